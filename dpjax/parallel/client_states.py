"""Stores client states between rounds: SCAFFOLD's c_i, APFL's models, errors of compression.

A state lies on the host, in memory or on disk, as one row of bytes. Clients that no round has
touched have no row. A round reads and writes the rows of its cohort, and devices are given these
rows alone.

Which clients have a row reveals who was drawn, a secret under Poisson sampling. A row holds what
its client alone would know. Keep both as secret as the data.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dpjax import trees, validate
from dpjax.parallel import row_journal
from dpjax.parallel.row_journal import Journal
from dpjax.types import ArrayLike, ArrayTree
from dpjax.validate import UserError

# Record of a client that still has its first state.
_NONE = b""
# Name of the folder of the rows, beside the checkpoints.
_FOLDER = "clients"
# Number of rows that `restore` reads at once.
_AT_ONCE = 64


class ClientStates:
  """States of `num_clients` clients, in memory. Immutable: `replace_rows` returns new states,
  which share the rows that did not change.

  JAX treats it as one leaf of a pytree.

  Args:
    initial: state of ONE client before its first round, a tree of arrays.
    num_clients: N, the number of clients.

  >>> states = ClientStates({"c": np.zeros(2, np.float32)}, num_clients=10_000)
  >>> after = states.replace_rows([7], {"c": np.ones((1, 2))})
  >>> after.rows([0, 7])["c"].tolist(), after.touched.tolist()
  ([[0.0, 0.0], [1.0, 1.0]], [7])
  >>> states.touched.tolist()
  []
  """

  def __init__(self, initial: ArrayTree, num_clients: int):
    if any(trees.is_key(leaf) for leaf in jax.tree.leaves(initial)):
      raise UserError(
        "must hold arrays; keep a key as jax.random.key_data(key)", field="memory"
      )
    validate.integer_at_least(1, num_clients=num_clients)
    self.initial = jax.tree.map(np.asarray, initial)
    self.num_clients = num_clients
    self._held = np.full(num_clients, _NONE, object)  # the bytes of each row

  @property
  def row_bytes(self) -> int:
    """Size of one client's state in bytes."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self.initial))

  @property
  def touched(self) -> np.ndarray:
    """Ids of the clients that have a row, ascending. Keep them as secret as who was drawn."""
    return np.flatnonzero(self._held != _NONE)

  def rows(self, ids: ArrayLike) -> Any:
    """Returns the states of these clients. Leaves are NumPy arrays [K, ...].

    Raises:
      UserError: an id is negative, or not below num_clients.

    >>> ClientStates(np.zeros(2), num_clients=3).rows([5])
    Traceback (most recent call last):
    ...
    dpjax.validate.UserError: client=5: must be in [0, 3), below num_clients of init(...)
    """
    return self._unpack(self.records(self._check_ids(ids)))

  def all(self) -> Any:
    """Returns the states of all clients, leaves [N, ...]. Memory must hold them all."""
    return self.rows(np.arange(self.num_clients))

  def replace_rows(self, ids: ArrayLike, rows: ArrayTree) -> ClientStates:
    """Returns new states in which these clients have the given rows, leaves [K, ...].

    Raises:
      UserError: an id is negative, or not below num_clients.
    """
    return self.with_records(self._check_ids(ids), self._pack(rows))

  def _check_ids(self, ids: ArrayLike) -> np.ndarray:
    """Returns the ids, [K] int64.

    Raises UserError for an id that is too large, or negative, which would index another client.
    """
    ids = np.asarray(ids, np.int64)
    wrong = ids[(ids < 0) | (ids >= self.num_clients)]
    if wrong.size:
      raise UserError(
        f"must be in [0, {self.num_clients}), below num_clients of init(...)",
        field="client",
        value=wrong[0],
      )
    return ids

  def changes_since(self, before: ClientStates) -> tuple[np.ndarray, list[bytes]]:
    """Returns (ids, rows) of the clients whose rows were replaced since `before`.

    These states must have been made from `before`.
    """
    pairs = enumerate(zip(self._held, before._held))
    # States share their rows, so a row that is the same object was not replaced.
    ids = np.array([i for i, (new, old) in pairs if new is not old], np.int64)
    return ids, self._held[ids].tolist()

  def records(self, ids: np.ndarray) -> list[bytes]:
    """Returns the rows of these clients as bytes, empty for clients that no round has
    touched."""
    return self._held[ids].tolist()

  def with_records(self, ids: np.ndarray, records: list[bytes]) -> ClientStates:
    """Returns new states in which these clients have the rows `records`, given as bytes."""
    after = ClientStates(self.initial, self.num_clients)
    after._held = self._held.copy()
    for who, record in zip(ids.tolist(), records):
      after._held[who] = record
    return after

  def _pack(self, rows: ArrayTree) -> list[bytes]:
    def flat(leaf: np.ndarray, like: np.ndarray) -> np.ndarray:  # [K, bytes of the leaf]
      array = np.ascontiguousarray(leaf, like.dtype)
      return np.frombuffer(array.tobytes(), np.uint8).reshape(len(array), like.nbytes)

    packed = jax.tree.leaves(jax.tree.map(flat, rows, self.initial))
    return [row.tobytes() for row in np.concatenate(packed, axis=1)]

  def _unpack(self, records: list[bytes]) -> Any:
    leaves, treedef = jax.tree.flatten(self.initial)
    # Clients without a record keep the initial row.
    leaves_of_clients = [np.repeat(leaf[None], len(records), axis=0) for leaf in leaves]
    for place, record in enumerate(records):
      start = 0
      for into in leaves_of_clients if record else ():
        # A leaf of size 0 has no bytes to read.
        row = np.frombuffer(record, into.dtype, into[0].size, start) if into[0].size else ()
        into[place] = np.reshape(row, into.shape[1:])
        start += into[0].nbytes
    return jax.tree.unflatten(treedef, leaves_of_clients)

  # Who was drawn is secret, so no row is shown.
  def __repr__(self) -> str:
    return f"{type(self).__name__}(num_clients={self.num_clients}, bytes={self.row_bytes})"


class OnDisk(ClientStates):
  """Client states whose rows are in a journal. Memory holds an index of 16 bytes a client.

  `Journal.keep` may remove rows that the newest two indexes do not use. Reading a removed row
  raises a UserError.

  >>> import pathlib, tempfile
  >>> states = ClientStates({"c": np.zeros(2, np.float32)}, num_clients=10_000)
  >>> journal = Journal(pathlib.Path(tempfile.mkdtemp()), states.row_bytes)
  >>> on_disk = OnDisk(states, journal).replace_rows([7], {"c": np.ones((1, 2))})
  >>> on_disk.rows([0, 7])["c"].tolist()
  [[0.0, 0.0], [1.0, 1.0]]
  """

  def __init__(
    self, states: ClientStates, journal: Journal, index: np.ndarray | None = None
  ):
    self.initial = states.initial
    self.num_clients = states.num_clients
    self.journal = journal
    if index is None:
      index = row_journal.no_rows(self.num_clients)
      ids = states.touched
      index[ids] = journal.append(states.records(ids))
    self.index: np.ndarray = index

  @property
  def touched(self) -> np.ndarray:
    return row_journal.with_rows(self.index)

  def records(self, ids: np.ndarray) -> list[bytes]:
    records = [_NONE] * len(ids)
    places = row_journal.with_rows(self.index[ids])
    for place, record in zip(places, self.journal.read(self.index[ids[places]])):
      records[place] = record
    return records

  def with_records(self, ids: np.ndarray, records: list[bytes]) -> ClientStates:
    index = self.index.copy()
    index[ids] = self.journal.append(records)
    return OnDisk(self, self.journal, index)


class Keeper:
  """Stores the client states of a run at its checkpoints, and writes only rows that changed.

  A checkpoint is the index that `save` returns, once the caller has stored it. Rows that belong
  to no checkpoint do no harm. `commit` removes files that the newest two checkpoints do not use.

  Args:
    folder: folder of the rows.
    states: states that a run begins with.
    on_disk: True keeps rows on disk between checkpoints, too; False keeps them in memory.
    segment_bytes: size in bytes at which a file is closed, as in `Journal`.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    states: ClientStates,
    *,
    on_disk: bool,
    segment_bytes: int = row_journal.SEGMENT_BYTES,
  ):
    self.journal = Journal(folder, states.row_bytes, segment_bytes=segment_bytes)
    self.begun = OnDisk(states, self.journal) if on_disk else states
    self._before = ClientStates(states.initial, states.num_clients)
    self._index: np.ndarray = row_journal.no_rows(states.num_clients)

  def save(self, states: ClientStates) -> np.ndarray:
    """Writes rows that changed, and returns the index [N, 4] of these states.

    Every row is then on disk.
    """
    if isinstance(states, OnDisk):
      # `compact` may change this index in place: a row that moves keeps its value.
      self._index = states.index
    else:
      ids, records = states.changes_since(self._before)
      places = self.journal.append(records)
      self._index = self._index.copy()
      self._index[ids] = places
      self._before = states
    # `compact` appends rows, too, so `sync` comes after it.
    self.journal.compact(self._index)
    self.journal.sync()
    return self._index.copy()

  def commit(self) -> None:
    """Removes files that the newest two checkpoints do not use.

    Call it once the index of `save` is stored.
    """
    self.journal.keep(self._index)

  def restore(self, index: np.ndarray) -> ClientStates:
    """Returns the states of an index, after reading and verifying every row.

    Raises:
      UserError: a row is gone, or is not what was written.
    """
    self._index = np.array(index, np.uint32)
    records = []
    in_memory = not isinstance(self.begun, OnDisk)
    ids = row_journal.with_rows(self._index)
    for start in range(0, len(ids), _AT_ONCE):
      # Rows are read even if they stay on disk: a torn row is reported now, not in a later round.
      loaded = self.journal.read(self._index[ids[start : start + _AT_ONCE]])
      records += loaded if in_memory else []
    self.journal.resume(self._index)
    if not in_memory:
      return OnDisk(self._before, self.journal, self._index.copy())
    untouched = ClientStates(self._before.initial, self._before.num_clients)
    self._before = untouched.with_records(ids, records)
    return self._before


class Memory:
  """Stores all `ClientStates` of a run's state, each at its own place; see `Keeper`.

  Args:
    folder: folder of the run's checkpoints.
    state: the first state of the run.
    on_disk: as of `Keeper`.

  Attributes:
    begun: the first state, with its `ClientStates` where the run will keep them.
  """

  def __init__(self, folder: pathlib.Path, state: ArrayTree, *, on_disk: bool = False):
    self._keepers: list[Keeper] = []
    for i, states in enumerate(_states(state)):
      at = folder / f"{_FOLDER}{i or ''}"
      self._keepers.append(Keeper(at, states, on_disk=on_disk))
    self.begun = _with_states(state, [keeper.begun for keeper in self._keepers], state)

  def save(self, state: ArrayTree) -> Any:
    """Writes rows that changed, and returns the state with an index in place of `ClientStates`."""
    pairs = zip(self._keepers, _states(state))
    return _with_states(state, [keeper.save(states) for keeper, states in pairs], state)

  def commit(self) -> None:
    """Removes files of rows that are needed no more, once what `save` returned is stored."""
    for keeper in self._keepers:
      keeper.commit()

  def unread(self, like: ArrayTree) -> Any:
    """Returns a state with indexes of no rows, of the shapes of what `save` returns."""
    empty = [row_journal.no_rows(states.num_clients) for states in _states(like)]
    return _with_states(like, empty, like)

  def restore(self, state: ArrayTree, like: ArrayTree) -> Any:
    """Inverts `save`, after reading and verifying every row."""
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(like))
    indexes = [index for index, leaf in pairs if isinstance(leaf, ClientStates)]
    kept = zip(self._keepers, indexes)
    rows = [keeper.restore(np.asarray(index)) for keeper, index in kept]
    return _with_states(state, rows, like)


def _states(tree: ArrayTree) -> list[ClientStates]:
  return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, ClientStates)]


def _with_states(tree: ArrayTree, others: Sequence[Any], like: ArrayTree) -> Any:
  """Returns the tree with `others`, in order, at the leaves where `like` has `ClientStates`."""
  left = list(others)
  place = lambda old, leaf: left.pop(0) if isinstance(leaf, ClientStates) else old
  return jax.tree.map(place, tree, like)
