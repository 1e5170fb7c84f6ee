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

  def __post_init__(self):
    if self.nominal_users is not None:
      validate.integer_at_least(1, nominal_users=self.nominal_users)
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
