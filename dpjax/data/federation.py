"""A data set with the clients that hold its rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpjax import validate
from dpjax.data.dataset import Dataset
from dpjax.types import Example
from dpjax.validate import UserError

_DATA_SET = "a data set, as dpjax.data.from_arrays makes"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Federation:
  """A data set, and for each client the rows that it holds.

  `indices[i]` are the row numbers of client i, so `federation.dataset[federation.indices[i]]` is
  the client's `Example` batch. `client(i)` copies these rows into a `Dataset`. A client may be
  empty. A row may belong to no client, but not to two clients.

  >>> from dpjax.data.dataset import from_arrays
  >>> d = from_arrays(np.arange(8.0).reshape(4, 2), [0, 1, 1, 0], num_classes=2)
  >>> fed = Federation(d, [[0, 3], [], [2, 1]], client_ids=["ann", "bob", "cy"])
  >>> fed
  Federation(arrays/train: 4 examples over 3 clients of 0 to 2)
  >>> fed.client("cy").x.tolist(), len(fed.client(1)), fed.sizes.tolist()
  ([[4.0, 5.0], [2.0, 3.0]], 0, [2, 0, 2])
  >>> fed.client("bo")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: client='bo': is none of the 3 clients (did you mean 'bob'?)
  """

  dataset: Dataset
  indices: Sequence[Any]  # [num_clients] arrays of rows
  client_ids: Sequence[str] = ()  # default: "0", "1", ...
  # The declared number of clients: a constant that does not follow from the data, so adding
  # or removing a client does not change it. None: nothing is declared.
  nominal_users: int | None = None
  # The declared number of examples of each client, constants that no example changes; None: no
  # number is declared.
  nominal_sizes: tuple[int, ...] | None = None
  # Rows of the test set that are each client's, to score a client on its own; None: unknown.
  test_indices: Sequence[Any] | None = None
  # Rows of `dataset` that each client holds out: they train nothing, and score the client.
  held_out: Sequence[Any] | None = None

  def __post_init__(self):
    validate.instance(Dataset, _DATA_SET, dataset=self.dataset)
    if self.nominal_users is not None:
      validate.integer_at_least(1, nominal_users=self.nominal_users)
    validate.integer_at_least(1, **validate.entries(nominal_sizes=self.nominal_sizes or ()))
    for name in ("nominal_sizes", "test_indices", "held_out"):
      given = getattr(self, name)
      if given is not None and len(given) != len(self.indices):
        raise UserError("must be one for each client", field=name)
    rows = tuple(_as_rows(client) for client in self.indices)
    if not rows:
      raise UserError("must hold at least one client", field="indices")
    _check_rows(rows, len(self.dataset))
    ids = tuple(self.client_ids) or tuple(map(str, range(len(rows))))
    num_clients = len(rows)
    if len(ids) != num_clients:
      raise UserError("must be one for each client", field="client_ids")
    if len(set(ids)) != len(ids):
      twice = next(name for name in ids if ids.count(name) > 1)
      raise UserError(f"{twice!r} names more than one client", field="client_ids")
    object.__setattr__(self, "indices", rows)
    object.__setattr__(self, "client_ids", ids)

  @property
  def num_clients(self) -> int:
    """Number of clients, empty ones included."""
    return len(self.indices)

  @functools.cached_property
  def sizes(self) -> np.ndarray:
    """Exact number of examples of each client, [num_clients]; do not release it."""
    return np.array([len(rows) for rows in self.indices], np.int64)

  @functools.cached_property
  def _positions(self) -> dict[str, int]:
    return {name: position for position, name in enumerate(self.client_ids)}

  def position(self, client: int | str) -> int:
    """Returns the place in `indices` of a client, which is given by place or id.

    Raises:
      UserError: the client is unknown.
    """
    if isinstance(client, str):
      if client not in self._positions:
        hint = validate.did_you_mean(client, self.client_ids)
        raise UserError(
          f"is none of the {self.num_clients} clients{hint}", field="client", value=client
        )
      return self._positions[client]
    validate.integer_at_least(0, client=client)
    if client >= self.num_clients:
      raise UserError(
        f"must be below the {self.num_clients} clients", field="client", value=client
      )
    return int(client)

  def client(self, client: int | str) -> Dataset:
    """Returns a copy of the rows of one client, which is given by place or id."""
    return self.dataset.subset(self.indices[self.position(client)])

  def examples(self, client: int | str) -> Example:
    """Returns the examples of one client as arrays [n_i, ...], faster than `client` does."""
    return self.dataset[self.indices[self.position(client)]]

  def select(self, clients: Sequence[int | str]) -> Federation:
    """Returns the federation of `clients` only, with the same data set and `nominal_users`."""
    places = [self.position(client) for client in clients]
    return Federation(
      self.dataset,
      [self.indices[place] for place in places],
      [self.client_ids[place] for place in places],
      self.nominal_users,
    )

  def label_histograms(self) -> np.ndarray:
    """Returns exact class counts [num_clients, num_classes]; do not release them."""
    count = lambda rows: np.bincount(self.dataset.y[rows], minlength=classes)
    classes = self.dataset.num_classes
    return np.stack([count(rows) for rows in self.indices])

  def __len__(self) -> int:
    return int(self.sizes.sum())

  def __repr__(self) -> str:
    sizes = f"{self.sizes.min()} to {self.sizes.max()}"
    clients = f"{len(self)} examples over {self.num_clients} clients of {sizes}"
    return f"Federation({self.dataset.name}/{self.dataset.split}: {clients})"


def _as_rows(client: Any) -> np.ndarray:
  rows = np.asarray(client)
  rows = rows.astype(np.int64) if rows.size == 0 else rows
  if rows.ndim != 1 or rows.dtype.kind not in "iu":
    raise UserError(
      f"each client must be a vector of row numbers, got {rows.dtype} of shape "
      f"{validate.shape_of_rows(rows.shape)}",
      field="indices",
    )
  rows = rows.astype(np.int64, copy=False).view()
  rows.flags.writeable = False
  return rows


def _check_rows(rows: Sequence[np.ndarray], num_examples: int) -> None:
  flat = np.concatenate(rows)
  if flat.size and not 0 <= flat.min() <= flat.max() < num_examples:
    raise UserError(
      "holds a row outside of [0, n), n the number of examples of the data set",
      field="indices",
    )
  holders = np.bincount(flat, minlength=1)
  if holders.max() > 1:
    raise UserError("two clients, or one client twice, hold the same row", field="indices")


Pair = tuple[Federation, Federation]  # train, test


def by_client(
  dataset: Dataset,
  client_ids: Sequence[Any] | np.ndarray,
  *,
  sizes: Sequence[int] | np.ndarray | None = None,
  max_examples: int | None = None,
) -> Federation:
  """Groups rows into one client for each id. Clients are ordered by id as text: 10 before 2.

  Rows of a client keep their order.

  Args:
    client_ids: owners of the examples [n], as text, UTF-8 bytes or integers. b"7", "7" and 7
      are one client.
    sizes: lengths of consecutive stretches of rows, each of one client. If they are given,
      `client_ids` has one id for each stretch, and a stretch may have length 0.
    max_examples: public upper limit on the number of examples of a client. The client's first
      examples are kept. None: all are kept.

  Raises:
    UserError: one line: an id that is empty, or neither text nor an integer; a number of ids
      that does not fit the data.

  >>> from dpjax.data.dataset import from_arrays
  >>> d = from_arrays(np.arange(4.0)[:, None], [0, 1, 1, 0], num_classes=2)
  >>> fed = by_client(d, ["bob", b"ann", "bob", "bob"], max_examples=2)
  >>> fed.client_ids, fed.client("bob").x.ravel().tolist()
  (('ann', 'bob'), [0.0, 2.0])
  """
  if max_examples is not None:
    validate.integer_at_least(1, max_examples=max_examples)
  # Swapped arguments are found before any message could show a record as an id.
  validate.instance(Dataset, _DATA_SET, dataset=dataset)
  ids = validate.owner_ids(client_ids=client_ids)
  counts = np.ones(len(ids), np.int64) if sizes is None else np.asarray(sizes, np.int64)
  if len(counts) != len(ids) or counts.sum() != len(dataset):
    raise UserError(
      "must be one for each example, or with `sizes` one for each client, whose sizes add up to "
      "the number of examples",
      field="client_ids",
    )
  if not ids:
    raise UserError("must name at least one client", field="client_ids")
  distinct = sorted(set(ids))
  places = {name: place for place, name in enumerate(distinct)}
  stretches = np.fromiter(map(places.__getitem__, ids), np.int64, len(ids))
  owners = np.repeat(stretches, counts)  # [n]
  if max_examples is not None:
    by_owner, first = _sort(owners, 0)
    # Number of earlier rows of the same owner, for each row.
    before = np.arange(len(by_owner)) - first[owners[by_owner]]
    kept = np.sort(by_owner[before < max_examples])
    dataset = dataset.subset(kept)
    owners = owners[kept]
  order, starts = _sort(owners, len(distinct))
  return Federation(dataset, np.split(order, starts[1:]), distinct)


def _sort(owners: np.ndarray, num_clients: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns (row numbers sorted by owner [n], start of each owner's rows in them [num_clients]).
  Rows of one owner keep their order."""
  ends = np.cumsum(np.bincount(owners, minlength=num_clients))
  return np.argsort(owners, kind="stable"), np.concatenate([[0], ends[:-1]])


def check_pair(train: Federation, test: Federation, name: str) -> Pair:
  """Returns (train, test). Raises UserError if their examples differ in type or shape, or if train
  or test is empty."""
  kinds = [(fed.dataset.x.shape[1:], fed.dataset.x.dtype) for fed in (train, test)]
  if kinds[0] != kinds[1]:
    shapes = " and ".join(f"{dtype} {shape}" for shape, dtype in kinds)
    raise UserError(
      f"train and test differ in what one example is: {shapes}", field="name", value=name
    )
  if not (len(train) and len(test)):
    raise UserError(
      "train and test must hold at least one example each", field="name", value=name
    )
  return train, test
