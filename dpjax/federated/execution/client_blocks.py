"""Many clients at once: blocks padded to common shapes, under `vmap`.

While the devices compute one block, the host pads and sends the next. So two blocks are in memory,
whatever the size of the cohort.

All clients of a block are padded to the largest. If that exceeds a budget in bytes, the block is
cut, so that large clients do not pad the small ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dpjax import closed_over, gradients, jaxprs, trees, validate
from dpjax.federated.client import ClientAlgorithm
from dpjax.federated.cohort import Cohort, LocalBatches, bucket
from dpjax.federated.execution import context as shared
from dpjax.federated.execution.context import Context, MapClients, Mapped, Partial, Run
from dpjax.gradients import clients_apart, loss_checks
from dpjax.parallel import made_for, step_program

# Default limit on the number of clients of one block on one device.
MOST = 32
# Default limit on the bytes of one block's padded examples.
MOST_BYTES = 1e9


class ClientBlock(NamedTuple):
  """Clients padded to common shapes; every leaf [K, ...]."""

  places: np.ndarray  # places of the clients in the cohort, to put the results back
  who: np.ndarray  # number that names each client
  n: np.ndarray  # number of examples of each client
  mask: np.ndarray  # False: no client
  num_steps: np.ndarray  # number of steps of each client; later ones are padding
  batches: LocalBatches  # leaves [K, S, B, ...]
  # Rows [K, R, ...] to which numbers in `batches` refer; None if no rows are gathered.
  client_data: Any = None


class ByteBudget(NamedTuple):
  """Limit on the bytes of one block's padded examples."""

  most: float  # limit in bytes
  lanes: int = 1  # number of devices, which divides the number of clients of a block

  def cut(self, cohort: Cohort, places: np.ndarray, size: int, sent: bool) -> Any:
    """Yields (places, padded number of clients) of pieces that together hold all `places`.

    There is one piece if all clients fit. Otherwise the number of clients of a piece on each device
    is a power of two, for few shapes. The largest clients come first. A piece is padded to at least
    one client for each device, even if that exceeds the limit.

    Args:
      size: number of clients to which one whole piece would be padded.
      sent: whether the rows that clients hold are sent with the block.
    """
    shapes = np.array([_shape(cohort, place, sent) for place in places], np.int64)
    if size * _bytes(shapes.max(axis=0), cohort) <= self.most:
      yield places, size
      return
    each = np.array([_bytes(shape, cohort) for shape in shapes])
    # Clients are ordered by size, so that small clients are not padded to the size of large ones.
    order = np.argsort(-each, kind="stable")
    while len(order):
      count = self.lanes
      wanted = min(size, len(order))
      while count < wanted and self._fits(shapes[order[: 2 * count]], 2 * count, cohort):
        count *= 2
      yield places[order[:count]], count
      order = order[count:]

  def _fits(self, shapes: np.ndarray, count: int, cohort: Cohort) -> bool:
    return count * _bytes(shapes.max(axis=0), cohort) <= self.most


def _shape(cohort: Cohort, place: int, sent: bool) -> tuple[int, int, int]:
  """Returns the numbers (steps, examples of a step, rows that are sent) of a client, rounded up as
  in a block."""
  steps, width = cohort.batches[place].mask.shape
  rows = min(steps * width, int(cohort.num_examples[place])) if sent else 0
  return max(1, bucket(steps)), width, width * bucket(-(-rows // width))


def _bytes(shape: np.ndarray, cohort: Cohort) -> float:
  """Returns the bytes of a client in a block: its batches, its rows, and a step's examples."""
  steps, width, rows = shape.tolist()
  of_row = lambda leaf, axes: leaf.nbytes / max(1, np.prod(leaf.shape[:axes]))
  some = next(
    (batches for batches in cohort.batches if batches.mask.size), cohort.batches[0]
  )
  in_batch = sum(of_row(np.asarray(leaf), 2) for leaf in jax.tree.leaves(some))
  in_data = sum(of_row(leaf, 1) for leaf in jax.tree.leaves(cohort.data))
  return steps * width * in_batch + (rows + width) * in_data


def blocks(
  cohort: Cohort, size: int, data: Any, budget: ByteBudget
) -> Iterator[ClientBlock]:
  """Yields blocks of at most `size` clients. Clients with the most steps come first, so that
  there is little padding."""
  steps = np.array([len(batches.mask) for batches in cohort.batches], np.int64)
  order = np.argsort(-steps, kind="stable")
  for start in range(0, len(order), size):
    pieces = budget.cut(cohort, order[start : start + size], size, data is not None)
    for places, count in pieces:
      yield _block(cohort, places, count, data)


def _block(cohort: Cohort, places: np.ndarray, size: int, data: Any) -> ClientBlock:
  members = [cohort.batches[place] for place in places]
  client_data = None
  if data is not None:
    members, client_data = _gather(members, data, size)
  num_steps = max(1, bucket(max(len(member.mask) for member in members)))
  width = max(member.mask.shape[1] for member in members)
  steps = np.array([len(member.mask) for member in members], np.int32)
  members += [jax.tree.map(np.zeros_like, members[0])] * (size - len(places))
  padded = [member.pad(num_steps, width) for member in members]
  missing = size - len(places)
  indices = np.concatenate([places, np.full(missing, places[0])])
  # Padding gets the numbers of no client. With a client's number it would repeat that client's
  # noise, and repeated noise is NaN under vmap.
  nobody = -1 - np.arange(missing)
  return ClientBlock(
    places=indices,
    who=np.concatenate([np.asarray(cohort.ids)[places], nobody]).astype(np.int32),
    n=np.asarray(cohort.num_examples)[indices].astype(np.int32),
    mask=np.arange(size) < len(places),
    num_steps=np.concatenate([steps, np.zeros(missing, np.int32)]),
    batches=jax.tree.map(lambda *leaves: np.stack(leaves), *padded),
    client_data=client_data,
  )


def _gather(
  members: Sequence[LocalBatches], data: Any, size: int
) -> tuple[list[LocalBatches], Any]:
  """Returns (members whose examples are row numbers of the gathered data, gathered data).

  Leaves of the data are [size, R, ...]. A row that a client visits in several epochs is stored
  once. R is a whole number of batches, rounded up as numbers of steps are, so that there are few
  shapes. Unused rows are zero.
  """
  held = []
  renumbered = []
  for member in members:
    rows, places = np.unique(member.examples, return_inverse=True)
    held.append(rows)
    places = places.reshape(member.mask.shape).astype(np.int32)
    renumbered.append(member._replace(examples=places))
  width = max(member.mask.shape[1] for member in members)
  most = width * max(1, bucket(-(-max(map(len, held)) // width)))

  def rows_of_leaf(leaf: np.ndarray) -> np.ndarray:
    gathered = np.zeros((size, most, *leaf.shape[1:]), leaf.dtype)
    for place, rows in enumerate(held):
      gathered[place, : len(rows)] = leaf[rows]
    return gathered

  return renumbered, jax.tree.map(rows_of_leaf, data)


def run_block(
  client: ClientAlgorithm,
  partial: Partial,
  context: Context,
  memories: Any,
  block: ClientBlock,
) -> Any:
  """Returns (sums or messages, client states, info) of a block, by one `scan` over steps under
  vmap."""

  def run_client(
    memory: Any, who: Any, n: Any, num_steps: Any, batches: LocalBatches, client_data: Any
  ) -> Any:
    seen = context if client_data is None else context._replace(data=client_data)

    def body(local: Any, step: tuple[Any, LocalBatches]) -> Any:
      place, batch = step
      new = shared.step(client, seen, local, batch)
      # A step that pads the client's work must neither count nor change a momentum. An empty batch
      # of a silo is no padding: its noise hides that it is empty.
      works = place < num_steps
      return jax.tree.map(lambda a, b: jnp.where(works, a, b), new, local), None

    local = shared.begin(client, seen, memory, who, n)
    places = jnp.arange(batches.mask.shape[0])
    local, _ = jax.lax.scan(body, local, (places, batches))
    return client.finish(seen.received, local)

  each = (
    memories,
    block.who,
    block.n,
    block.num_steps,
    block.batches,
    block.client_data,
  )
  # The check traces the client whenever this function is traced, so once for each shape.
  jaxpr = loss_checks.check_client(run_client, *each)
  # Two kinds of convolutions may mix clients under vmap (`clients_apart.mixes_clients`).
  # `canonical_convolutions` rewrites those with a `batch_group_count` above 1. So only convolutions
  # of numbers of more than 32 bits need `clients_apart`.
  if any(map(clients_apart.is_wide, jaxprs.every_equation(jaxpr))):
    run_client = clients_apart.clients_apart(run_client)
  sent, memories, info = gradients.canonical_convolutions(jax.vmap(run_client))(*each)
  return shared.collect(partial, context.state, sent, block.mask), memories, info


class Dispatch(NamedTuple):
  """Transport of blocks to the devices and of results back."""

  program: Callable[..., Any]  # (context, memories, block) -> what `run_block` returns
  size: Callable[[int], int]  # number of clients of a cohort -> that of a block
  everywhere: NamedSharding | None = None  # sharding of arrays that a round sends once
  # Function from (memories, block) to the same on the devices of the program. None: the program
  # takes host arrays, and the whole data set is placed on the device once.
  send: Callable[[Any], Any] | None = None
  fetch: Callable[[Any], Any] = jax.device_get  # leaves of all devices -> [K, ...], NumPy
  budget: ByteBudget = ByteBudget(MOST_BYTES)
  apart: NamedSharding | None = None  # sharding of a block and its states; None: one device


class Blocks:
  """Runs a cohort in blocks: cuts it, sends blocks ahead, and adds up their sums."""

  def __init__(self, client: ClientAlgorithm, partial: Partial, way: Dispatch):
    self.partial = partial
    self._way = way
    self._nobody = shared.nobody(client, partial)
    self._placed = shared.Placed(way.everywhere)
    self._add = jax.jit(trees.add)

  def _cut(self, context: Context, cohort: Cohort) -> tuple[Context, Iterator[Any]]:
    """Returns (context that all blocks of a round share, iterator of (client states, block)). The
    iterator's arrays are on the host."""
    memories = jax.tree.map(np.asarray, context.memories)
    data = None
    if self._way.send is not None and context.data is not None:
      data = jax.tree.map(np.asarray, context.data)
      # Rows travel with the blocks, so no device needs the whole data set.
      context = context._replace(data=None)
    size = self._way.size(cohort.size)
    cut = blocks(cohort, size, data, self._way.budget)
    pairs = ((shared.row(memories, block.places), block) for block in cut)
    return context._replace(memories=None), pairs

  def _dispatch(
    self, context: Context, cohort: Cohort
  ) -> Iterator[tuple[ClientBlock, Any]]:
    """Yields each block with its pending results."""
    context, pairs = self._cut(context, cohort)
    context = self._placed(context)
    for pair in pairs:
      block = pair[1]
      pair = pair if self._way.send is None else self._way.send(pair)
      yield block, self._way.program(context, *pair)

  def _lower(self, context: Context, cohort: Cohort) -> step_program.StepProgram:
    """Lowers the program of the first block, whose clients have the most steps, for the target of
    `made_for`."""
    context, pairs = self._cut(context, cohort)
    first, *others = pairs
    if self._way.everywhere is None:
      context, first = step_program.on_device((context, first))
    else:
      context = step_program.place_shapes(context, lambda leaf: self._way.everywhere)
      first = step_program.place_shapes(first, lambda leaf: self._way.apart)
    lowered = self._way.program.lower(context, *first)  # type: ignore[attr-defined]
    return step_program.StepProgram(lowered, calls=1 + len(others))

  def __call__(self, context: Context, cohort: Cohort) -> Mapped:
    if made_for.current() is not None and cohort.size:
      raise step_program.Reached(self._lower(context, cohort))
    sums = None
    kept = []
    rows = []
    places = []
    for block, (collected, remembered, info) in _one_behind(
      self._dispatch(context, cohort)
    ):
      if self.partial is not None:
        sums = collected if sums is None else self._add(sums, collected)
        # The sums of the block are dropped, so that `fetch` does not move them to the host.
        collected = None
      fetched = self._way.fetch((collected, info))
      rows.append(jax.tree.map(lambda leaf: leaf[block.mask], fetched))  # noqa: B023
      places.append(block.places[block.mask])
      if remembered is not None:
        fetched = self._way.fetch(remembered)
        kept.append(shared.Remembered(block.places, block.mask, fetched))
    if not rows:
      return self._nobody(context)
    # Blocks order clients by size. Results return in the order of the cohort.
    back = np.argsort(np.concatenate(places))
    sent, info = jax.tree.map(lambda *leaves: np.concatenate(leaves)[back], *rows)
    # The sums move through the host once a round, so that they combine with arrays on any device.
    if self._way.everywhere is not None:
      sums = jax.device_put(jax.device_get(sums))
    return Mapped(sums, sent, tuple(kept), info)


def _one_behind(items: Iterator[Any]) -> Iterator[Any]:
  """Yields the items of an iterator, each only after the next item has been made.

  >>> computed = []
  >>> [(item, len(computed)) for item in _one_behind(computed.append(i) or i for i in range(3))]
  [(0, 2), (1, 3), (2, 3)]
  """
  late = []
  for item in items:
    late.append(item)
    if len(late) > 1:
      yield late.pop(0)
  yield from late


def vmap_clients(
  *, clients_per_block: int | None = None, memory_budget: float = MOST_BYTES
) -> MapClients:
  """Runs blocks of clients, each in one program.

  Args:
    clients_per_block: number of clients of a block; None for the whole cohort, up to 32.
    memory_budget: largest size of a block's examples in bytes, padded to its largest client. A
      larger block is cut. A client that exceeds the budget alone has a block for itself. Memory
      holds two blocks at a time, and in addition the clients' parameters and optimizer states.
  """
  validate.positive(memory_budget=memory_budget)
  if clients_per_block is not None:
    validate.integer_at_least(1, clients_per_block=clients_per_block)
  size = lambda count: clients_per_block or bucket(min(max(count, 1), MOST))

  def bind(client: ClientAlgorithm, partial: Partial) -> Run:
    program = closed_over.jitted(functools.partial(run_block, client, partial))
    return Blocks(
      client, partial, Dispatch(program, size, budget=ByteBudget(memory_budget))
    )

  return bind
