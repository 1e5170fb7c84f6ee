"""How a cohort is run: one client after another, many at once, or over devices.

The same `ClientAlgorithm` under three executions with one result (to rounding):

| execution      | what it is                                                   | good for        |
| -------------- | ------------------------------------------------------------ | --------------- |
| `loop_clients` | a Python loop; `jit=False` is the readable twin of the rest; | CPU             |
|                | an error says which client it came from                      |                 |
| `vmap_clients` | blocks of clients, padded to a common shape, in one program  | one accelerator |
| `pmap_clients` | the same on each of several devices, then `psum`             | several         |

Contributions are summed as they are made: memory is one message per client IN A BLOCK,
whatever the size of the cohort. Only an aggregator that needs all messages at once (a median,
say) gets them stacked. Noise is never added here: the aggregator adds it once, to the sum,
from its one key.

Measured, and why the loop is as it is: on the CPU a convolution inside a compiled loop
(`scan`, `while`, so also under `vmap_clients`) takes 3.6 times as long as outside of one.
So steps that hold a convolution are unrolled: up to 4 of them in one program with the rest of
the client's work, more in pieces of 8, 4, 2, 1 steps; ragged clients compile ten programs at
most. Steps without one run in a compiled loop whose length is an argument, one call per
client. A small convolution keeps one core busy, so unrolled clients may run in threads: each
thread does the local work of a client, and what they send is added up in the order of the
cohort, so that the number of threads does not change the result.

What all clients share goes to where they run once: the data set once in all, the parameters
once a round. A block or a client takes along its own rows and nothing else.

Every client of a round has its own key, folded from the round's by its number. One program
holds all of them: this is a simulation, and noise that a client adds here hides nothing from
who runs it. Clients that draw where nobody else can look are those of `flower`.

This is the only file with pmap in it.
"""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpjax import sampling, trees, validate
from dpjax.federated.client import ClientAlgorithm, ClientInfo
from dpjax.federated.cohort import Cohort, LocalBatches, bucket
from dpjax.validate import UserError

NAMES = ("auto", "loop", "vmap", "pmap")
_AXIS = "devices"
_UNROLL = 8  # most local steps in one program where steps are unrolled
_AT_ONCE = 4  # most local steps of a client that is one program when unrolled
_FLUSH = 256  # clients after which the loop waits and moves their results to the host
_BLOCK = 32  # most clients of one block on one device


def _num_cores() -> int:
  if hasattr(os, "sched_getaffinity"):  # of this process; not on macOS
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


class Context(NamedTuple):
  """What all clients of a round share."""

  received: Any
  memories: Any  # leaves [C or more, ...] in the order of the cohort, or None
  key: jax.Array  # of the round
  state: Any  # of the aggregator, which only `partial` reads


class Remembered(NamedTuple):
  """What some clients of a cohort keep, in shapes that do not depend on the cohort."""

  places: np.ndarray  # [K] in the cohort
  mask: np.ndarray  # [K] bool; False: no client
  memories: Any  # leaves [K, ...]


class Mapped(NamedTuple):
  """What came back from a cohort."""

  sums: Any  # of the aggregator's `partial`; None where it has none
  sent: Any  # `Sent` with leaves [C, ...], NumPy; None where `sums` took their place
  memories: tuple[Remembered, ...]
  info: ClientInfo  # leaves [C], NumPy; NOT private


Run = Callable[[Context, Cohort], Mapped]
# (client, the aggregator's `partial` or None) -> run
MapClients = Callable[[ClientAlgorithm, Any], Run]


def _row(tree: Any, i: Any) -> Any:
  return jax.tree.map(lambda leaf: leaf[i], tree)


def _stacked(rows: Sequence[Any]) -> Any:
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def _stacked_on_host(rows: Sequence[Any]) -> Any:
  """Stacking on the device would be one dispatch per client and leaf."""
  return jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(rows))


def _where(pred: Any, new: Any, old: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(pred, a, b), new, old)


def _begin(client: ClientAlgorithm, context: Context, memory: Any, who: Any, n: Any) -> Any:
  return client.init(context.received, memory, n, jax.random.fold_in(context.key, who))


def _collected(partial: Any, state: Any, sent: Any, mask: Any) -> Any:
  return sent if partial is None else partial(state, sent.message, sent.weight, mask)


def _shapes_of_one(client: ClientAlgorithm, partial: Any, context: Context) -> Any:
  """Shapes of (collected, memory, info) of one client that has nothing to do."""

  def one(context: Context) -> Any:
    memory = jax.tree.map(
      lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), context.memories
    )
    local = _begin(client, context, memory, 0, 0)
    sent, memory, info = client.finish(context.received, local)
    stacked = _stacked([sent])
    return _collected(partial, context.state, stacked, jnp.ones(1, bool)), memory, info

  return jax.eval_shape(one, context)


class _Empty:
  """`_empty` for each shape of context: traced once, as it does not depend on the cohort."""

  def __init__(self, client: ClientAlgorithm, partial: Any):
    self._client, self._partial = client, partial
    self._known: dict[Any, Mapped] = {}

  def __call__(self, context: Context) -> Mapped:
    received = context.received._replace(data=None)  # of any length
    one = jax.tree.map(lambda leaf: leaf[0], context.memories)
    told = (received, one, context.state)
    facts = tuple(
      (jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(told)
    )
    shapes = (jax.tree.structure(told), facts)
    if shapes not in self._known:
      self._known[shapes] = _empty(self._client, self._partial, context)
    return self._known[shapes]


def _empty(client: ClientAlgorithm, partial: Any, context: Context) -> Mapped:
  """What comes back from no clients: sums that are zero, everything else of length 0."""
  collected, _, info = _shapes_of_one(client, partial, context)
  none = lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype)
  infos = jax.tree.map(none, info)
  if partial is None:
    one_less = lambda leaf: np.zeros((0, *leaf.shape[1:]), leaf.dtype)
    return Mapped(None, jax.tree.map(one_less, collected), (), infos)
  sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), collected)
  return Mapped(sums, None, (), infos)


def has_convolution(
  client: ClientAlgorithm, context: Context, batches: LocalBatches
) -> bool:
  """Whether a local step holds a convolution, by its jaxpr."""

  def step(context: Context, examples: Any, mask: Any) -> Any:
    memory = None if context.memories is None else _row(context.memories, 0)
    local = _begin(client, context, memory, 0, 1)
    return client.step(context.received, local, examples, mask)

  first = _row(batches, 0)
  return "conv_general_dilated" in str(
    jax.make_jaxpr(step)(context, first.examples, first.mask)
  )


# --- where what all clients share lies


class _Shared:
  """Puts the context of a round where its programs run, so that calling them moves nothing.

  The data set is kept until another comes: a JAX array never changes, so one that is there
  is known by its identity. NumPy arrays do change, and are placed once a round.

  Args:
    sharding: of every leaf; None: where JAX puts it.
  """

  def __init__(self, sharding: NamedSharding | None = None):
    self._sharding = sharding
    self._kept: list[tuple[Any, Any]] = []  # (an array of the data set, its placed twin)

  def _place(self, leaf: Any) -> Any:
    if self._sharding is not None:
      return jax.device_put(leaf, self._sharding)
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)

  def _found(self, leaf: Any) -> Any:
    twins = [placed for given, placed in self._kept if given is leaf]
    return twins[0] if twins else self._place(leaf)

  def __call__(self, context: Context) -> Context:
    data = context.received.data
    leaves, treedef = jax.tree.flatten(data)
    placed = [self._found(leaf) for leaf in leaves]
    self._kept = [pair for pair in zip(leaves, placed) if isinstance(pair[0], jax.Array)]
    received = context.received._replace(data=None)
    rest = jax.tree.map(self._place, context._replace(received=received))
    received = rest.received._replace(data=jax.tree.unflatten(treedef, placed))
    return rest._replace(received=received)


# --- one client after another


class _Loop:
  """The programs of `loop_clients` for one client algorithm and one aggregator."""

  def __init__(
    self,
    client: ClientAlgorithm,
    partial: Any,
    jit: bool,
    unroll: bool | None,
    num_threads: int | None,
  ):
    compiled = jax.jit if jit else (lambda fn: fn)
    self.client, self.partial, self.unroll = client, partial, unroll
    self._num_threads = _num_cores() if num_threads is None else num_threads
    # One program is a few percent faster but rounds differently from its pieces: for those
    # who ask for one thread, not for those who happen to have one core.
    self._at_once = _AT_ONCE if num_threads == 1 else 0
    self._jit = jit
    self._empty, self._shared = _Empty(client, partial), _Shared()
    self._first_program = compiled(self._first)
    self._pieces_program = compiled(self._pieces)
    self._last_program = compiled(self._last)
    self._unrolled_program = compiled(self._unrolled)
    self._looping_program = compiled(self._looping)

  def _first(self, context: Context, place: Any, who: Any, n: Any) -> Any:
    return _begin(self.client, context, _row(context.memories, place), who, n)

  def _pieces(self, received: Any, local: Any, batches: LocalBatches) -> Any:
    for step in range(batches.mask.shape[0]):
      local = self.client.step(received, local, *_row(batches, step))
    return local

  def _last(self, context: Context, local: Any, sums: Any) -> Any:
    sent, memory, info = self.client.finish(context.received, local)
    if self.partial is None:
      return sent, memory, info
    stacked = _stacked([sent])
    more = self.partial(context.state, stacked.message, stacked.weight, jnp.ones(1, bool))
    return trees.add(sums, more), memory, info

  def _unrolled(self, context, place, who, n, batches, sums) -> Any:
    local = self._first(context, place, who, n)
    local = self._pieces(context.received, local, batches)
    return self._last(context, local, sums)

  def _looping(self, context, place, who, n, batches, num_steps, sums) -> Any:
    def body(i: Any, local: Any) -> Any:
      return self.client.step(context.received, local, *_row(batches, i))

    local = self._first(context, place, who, n)
    return self._last(context, jax.lax.fori_loop(0, num_steps, body, local), sums)

  def _trained(self, context, place, who, n, batches) -> Any:
    local = self._first_program(context, place, who, n)
    for piece in _pieces_of(batches, _UNROLL):
      local = self._pieces_program(context.received, local, piece)
    return local

  def _begun(self, context: Context, cohort: Cohort, place: int, threads: bool) -> Any:
    """sums -> (collected, memory, info) of the client at this place of the cohort.

    With `threads` all that needs nothing of the clients before it is done on return.
    """
    who, n = np.int32(cohort.ids[place]), np.int32(cohort.num_examples[place])
    batches = cohort.batches[place]
    given = context, np.int32(place), who, n
    num_steps, width = batches.mask.shape
    if not self._unrolls(context, cohort):
      padded = _padded(batches, max(1, bucket(num_steps)), width)
      return functools.partial(self._looping_program, *given, padded, np.int32(num_steps))
    if not self._jit or num_steps <= self._at_once:
      return functools.partial(self._unrolled_program, *given, batches)
    local = self._trained(*given, batches)
    if threads:
      jax.block_until_ready(local)
    return functools.partial(self._last_program, context, local)

  def _unrolls(self, context: Context, cohort: Cohort) -> bool:
    if self.unroll is not None:
      return self.unroll
    busy = next((batches for batches in cohort.batches if len(batches.mask)), None)
    if busy is None:
      return True
    self.unroll = not self._jit or has_convolution(self.client, context, busy)
    return self.unroll

  def _all_begun(self, context: Context, cohort: Cohort) -> Iterator[Any]:
    """`_begun` of each place in order, with as many clients ahead as there are threads."""
    if self._num_threads == 1 or not (self._jit and self._unrolls(context, cohort)):
      for place in range(cohort.size):
        with _naming(cohort.ids[place]):
          begun = self._begun(context, cohort, place, False)
        yield begun
      return

    def begin(place: int) -> Any:
      with _naming(cohort.ids[place]):
        return self._begun(context, cohort, place, True)

    ahead: collections.deque[futures.Future] = collections.deque()
    with futures.ThreadPoolExecutor(self._num_threads) as pool:
      for place in range(cohort.size):
        ahead.append(pool.submit(begin, place))
        if len(ahead) > self._num_threads:
          yield ahead.popleft().result()
      while ahead:
        yield ahead.popleft().result()

  def __call__(self, context: Context, cohort: Cohort) -> Mapped:
    context = self._shared(context)
    nothing = self._empty(context)
    sums, rows, done = nothing.sums, [], []
    for place, finish in enumerate(self._all_begun(context, cohort)):
      with _naming(cohort.ids[place]):
        collected, memory, info = finish(sums)
      sums = sums if self.partial is None else collected
      rows.append((collected if self.partial is None else None, memory, info))
      if len(rows) == _FLUSH or place + 1 == cohort.size:
        done, rows = [*done, _stacked_on_host(rows)], []
    if not done:
      return nothing
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *done)
    sent, memories, infos = joined
    kept = () if memories is None else (_remembered(memories, cohort.size),)
    return Mapped(sums, sent, kept, infos)


def _remembered(memories: Any, count: int) -> Remembered:
  size = bucket(count)
  pad = lambda leaf: np.pad(leaf, [(0, size - count)] + [(0, 0)] * (leaf.ndim - 1))
  places, mask = sampling.pad(np.arange(count), size)
  return Remembered(places, mask, jax.tree.map(pad, memories))


class _naming:
  """Adds the client's place to whatever goes wrong inside."""

  def __init__(self, who: Any):
    self._who = int(who)

  def __enter__(self) -> None:
    return None

  def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
    if isinstance(error, UserError):
      raise UserError(f"client {self._who}: {error}") from error
    if isinstance(error, Exception):
      error.add_note(f"in the local work of client {self._who}")


def _pieces_of(batches: LocalBatches, most: int) -> Iterator[LocalBatches]:
  """The steps in order, in pieces of `most` and then of smaller powers of two."""
  start, total = 0, len(batches.mask)
  while start < total:
    size = min(most, 1 << ((total - start).bit_length() - 1))
    yield jax.tree.map(lambda leaf: leaf[start : start + size], batches)  # noqa: B023
    start += size


def loop_clients(
  *, jit: bool = True, unroll: bool | None = None, num_threads: int | None = 1
) -> MapClients:
  """Clients one after another in Python, or a few at a time.

  Args:
    jit: False runs every operation as it stands: slow, and the easiest to look into.
    unroll: compile local steps one after another instead of in a compiled loop; None: where
      they hold a convolution.
    num_threads: clients at once, where steps are compiled and unrolled; None: one for each
      core. Settings that hold for one thread only (`with jax.enable_x64(True)` and the like)
      do not reach the others. All but 1 give the same result bit for bit, 1 to rounding.
  """
  if num_threads is not None:
    validate.integer_at_least(1, num_threads=num_threads)
  return lambda client, partial: _Loop(client, partial, jit, unroll, num_threads)


# --- many at once


class _Block(NamedTuple):
  """Clients padded to common shapes; every leaf [K, ...]."""

  places: np.ndarray  # in the cohort, to put the results back
  who: np.ndarray
  n: np.ndarray
  mask: np.ndarray  # False: no client
  batches: LocalBatches  # leaves [K, S, B, ...]


def _padded(batches: LocalBatches, num_steps: int, size: int) -> LocalBatches:
  """The batches with leaves [num_steps, size, ...]; padding is masked."""

  def pad(leaf: Any) -> np.ndarray:
    leaf = np.asarray(leaf)
    more = [(0, num_steps - leaf.shape[0]), (0, size - leaf.shape[1])]
    return np.pad(leaf, more + [(0, 0)] * (leaf.ndim - 2))

  return jax.tree.map(pad, batches)


def _blocks(cohort: Cohort, size: int) -> Iterator[_Block]:
  """Blocks of `size` clients, those with the most steps first: like is padded to like."""
  steps = np.array([len(batches.mask) for batches in cohort.batches], np.int64)
  order = np.argsort(-steps, kind="stable")
  for start in range(0, len(order), size):
    places = order[start : start + size]
    yield _block(cohort, places, size)


def _block(cohort: Cohort, places: np.ndarray, size: int) -> _Block:
  members = [cohort.batches[place] for place in places]
  num_steps = max(1, bucket(max(len(member.mask) for member in members)))
  width = max(member.mask.shape[1] for member in members)
  nobody = jax.tree.map(np.zeros_like, members[0])
  members += [nobody] * (size - len(places))
  padded = [_padded(member, num_steps, width) for member in members]
  indices = np.concatenate([places, np.full(size - len(places), places[0])])
  return _Block(
    places=indices,
    who=np.asarray(cohort.ids)[indices].astype(np.int32),
    n=np.asarray(cohort.num_examples)[indices].astype(np.int32),
    mask=np.arange(size) < len(places),
    batches=jax.tree.map(lambda *leaves: np.stack(leaves), *padded),
  )


def _run_block(
  client: ClientAlgorithm, partial: Any, context: Context, memories: Any, block: _Block
) -> Any:
  """(sums or messages, memories, info) of a block: one `scan` over steps, under vmap."""

  def one(memory: Any, who: Any, n: Any, batches: LocalBatches) -> Any:
    def body(local: Any, batch: LocalBatches) -> Any:
      new = client.step(context.received, local, batch.examples, batch.mask)
      return _where(jnp.any(batch.mask), new, local), None

    local = _begin(client, context, memory, who, n)
    local, _ = jax.lax.scan(body, local, batches)
    return client.finish(context.received, local)

  sent, memories, info = jax.vmap(one)(memories, block.who, block.n, block.batches)
  return _collected(partial, context.state, sent, block.mask), memories, info


class _Blocks:
  """What `vmap_clients` and `pmap_clients` share: cutting into blocks, adding up."""

  def __init__(
    self,
    client: ClientAlgorithm,
    partial: Any,
    run_block: Any,
    size: Any,
    sharding: NamedSharding | None = None,
  ):
    self.client, self.partial = client, partial
    self._run_block, self._size = run_block, size  # size: (clients) -> clients in a block
    self._empty, self._shared = _Empty(client, partial), _Shared(sharding)
    self._add = jax.jit(trees.add)
    self._rows = jax.jit(_row)

  def __call__(self, context: Context, cohort: Cohort) -> Mapped:
    nothing = self._empty(context)
    sums, kept, rows, places = nothing.sums, [], [], []
    memories, context = context.memories, self._shared(context._replace(memories=None))
    for block in _blocks(cohort, self._size(cohort.size)):
      held = self._rows(memories, block.places)
      collected, remembered, info = self._run_block(context, held, block)
      if self.partial is not None:
        sums = self._add(sums, collected)
      sent = collected if self.partial is None else None
      rows.append(_kept_on_host((sent, info), block.mask))
      places.append(block.places[block.mask])
      if remembered is not None:
        kept.append(Remembered(block.places, block.mask, remembered))
    if not rows:
      return nothing
    back = np.argsort(np.concatenate(places))
    sent, info = jax.tree.map(lambda *leaves: np.concatenate(leaves)[back], *rows)
    return Mapped(sums, sent, tuple(kept), info)


def _kept_on_host(tree: Any, mask: np.ndarray) -> Any:
  return jax.tree.map(lambda leaf: np.asarray(leaf)[mask], jax.device_get(tree))


def vmap_clients(*, clients_per_block: int | None = None) -> MapClients:
  """Blocks of clients in one program each.

  Args:
    clients_per_block: None for the whole cohort, up to 32.
  """
  if clients_per_block is not None:
    validate.integer_at_least(1, clients_per_block=clients_per_block)
  size = lambda count: clients_per_block or bucket(min(max(count, 1), _BLOCK))

  def bind(client: ClientAlgorithm, partial: Any) -> Run:
    run_block = jax.jit(functools.partial(_run_block, client, partial))
    return _Blocks(client, partial, run_block, size)

  return bind


# --- over devices


def _devices(num_devices: int | None) -> list[Any]:
  devices = jax.local_devices()
  if num_devices is None:
    return devices
  validate.integer_at_least(1, num_devices=num_devices)
  if num_devices > len(devices):
    raise UserError(
      f"num_devices={num_devices}: this process has {len(devices)} "
      f"({devices[0].platform}); must be <= {len(devices)}"
    )
  return devices[:num_devices]


def pmap_clients(
  *, num_devices: int | None = None, clients_per_device: int | None = None
) -> MapClients:
  """Blocks of devices x clients: vmap on each device, then one `psum` over the devices.

  The server's parameters, the keys and the aggregator's state go to every device once a
  round, the data set once in all (`in_axes=None` of arrays that are there already); the sum
  comes back once (`out_axes=None`), so that whatever is added to it afterwards, noise above
  all, is added once.

  Args:
    num_devices: of this process; None for all.
    clients_per_device: in a block; None for an equal share of the cohort, up to 32.

  Raises:
    UserError: more devices than there are.
  """
  devices = _devices(num_devices)
  if clients_per_device is not None:
    validate.integer_at_least(1, clients_per_device=clients_per_device)

  def size(count: int) -> int:
    share = -(-max(count, 1) // len(devices))
    return len(devices) * (clients_per_device or bucket(min(share, _BLOCK)))

  def bind(client: ClientAlgorithm, partial: Any) -> Run:
    def on_device(context: Context, memories: Any, block: _Block) -> Any:
      collected, *rest = _run_block(client, partial, context, memories, block)
      if partial is not None:
        collected = jax.lax.psum(collected, _AXIS)
      return collected, *rest

    mapped = jax.pmap(
      on_device,
      axis_name=_AXIS,
      in_axes=(None, 0, 0),
      out_axes=(0 if partial is None else None, 0, 0),
      devices=devices,
    )

    def run_block(context: Context, memories: Any, block: _Block) -> Any:
      shares = _to_devices((memories, block), len(devices))
      return _from_devices(mapped(context, *shares), summed=partial is not None)

    everywhere = NamedSharding(Mesh(np.array(devices), (_AXIS,)), PartitionSpec())
    return _Blocks(client, partial, run_block, size, everywhere)

  return bind


def _to_devices(tree: Any, num_devices: int) -> Any:
  """Leaves [D * K, ...] -> [D, K, ...]."""
  return jax.tree.map(lambda leaf: leaf.reshape(num_devices, -1, *leaf.shape[1:]), tree)


def _from_devices(results: Any, *, summed: bool) -> Any:
  """Leaves [D, K, ...] -> [D * K, ...], all on the first device, but for what was summed."""
  collected, *rest = results
  flat = lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:])
  whole = np.asarray if summed else flat
  return jax.tree.map(whole, collected), *jax.tree.map(flat, rest)


# --- which


def auto_clients(*, num_threads: int | None = 1) -> MapClients:
  """The loop on a CPU (with `num_threads`), vmap on one accelerator, pmap on several."""
  if jax.default_backend() == "cpu":
    return loop_clients(num_threads=num_threads)
  return pmap_clients() if jax.local_device_count() > 1 else vmap_clients()


def by_name(
  name: str, *, num_devices: int | None = None, num_threads: int | None = None
) -> MapClients:
  """The execution of that name; `num_devices` concerns pmap alone, `num_threads` the loop
  (None: one for each core).

  >>> by_name("pmpa")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: execution='pmpa': must be one of ... (did you mean 'pmap'?)
  """
  validate.one_of(NAMES, execution=name)
  if num_devices is not None and name != "pmap":
    raise UserError(f"num_devices={num_devices}: is for execution='pmap', not {name!r}")
  if num_threads is not None and name in ("pmap", "vmap"):
    raise UserError(f"num_threads={num_threads}: is for execution='loop', not {name!r}")
  if name == "pmap":
    return pmap_clients(num_devices=num_devices)
  if name == "vmap":
    return vmap_clients()
  make = auto_clients if name == "auto" else loop_clients
  return make(num_threads=num_threads)
