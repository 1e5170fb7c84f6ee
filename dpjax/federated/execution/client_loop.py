"""Clients one after another in Python, or a few at a time in threads.

The local steps of a client are a compiled loop whose length is an argument, so clients of any
number of steps share a few programs. Convolutions of a step are written in the form that is fast in
a loop (`gradients.canonical_convolutions`). A small convolution keeps only one core busy, so
clients with convolutions may run in several threads. Each thread does the local work of one
client. Messages are added in the order of the cohort, so that timing does not change the result.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import gradients, trees, validate
from dpjax.federated.client import ClientAlgorithm
from dpjax.federated.cohort import Cohort, LocalBatches, bucket
from dpjax.federated.execution import context as shared
from dpjax.federated.execution.context import Context, MapClients, Mapped, Partial
from dpjax.validate import UserError

# Number of clients after which the loop waits, and moves their results to the host.
_FLUSH = 256


def has_convolution(
  client: ClientAlgorithm, context: Context, batches: LocalBatches
) -> bool:
  """Returns whether the jaxpr of a local step contains a convolution."""

  def first(context: Context, batch: LocalBatches) -> Any:
    memory = shared.row(context.memories, 0)
    local = shared.begin(client, context, memory, 0, 1)
    return shared.step(client, context, local, batch)

  jaxpr = jax.make_jaxpr(first)(context, shared.row(batches, 0))
  return "conv_general_dilated" in str(jaxpr)


class _Loop:
  """The programs of `loop_clients` for one client algorithm and one aggregator."""

  def __init__(
    self, client: ClientAlgorithm, partial: Partial, jit: bool, num_threads: int | None
  ):
    compiled = jax.jit if jit else (lambda fn: fn)
    self.client = client
    self.partial = partial
    self._jit = jit
    # Number of cores that this process may use. On macOS it is unknown, so all cores count.
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
      cores = len(os.sched_getaffinity(0))
    self._num_threads = cores if num_threads is None else num_threads
    # One program for all of a client's work is a few percent faster than two, but rounds
    # differently. With convolutions it is used only if the caller asked for one thread. So
    # num_threads=None gives the same bits on every machine, also with one core.
    self._at_once = num_threads == 1
    self._convolves: bool | None = None
    self._nobody = shared.nobody(client, partial)
    self._placed = shared.Placed()
    self._local_program = compiled(self._local)
    self._last_program = compiled(self._last)
    self._whole_program = compiled(self._whole)

  def _local(
    self, context: Context, place: Any, who: Any, n: Any, batches: Any, num_steps: Any
  ) -> Any:
    memory = shared.row(context.memories, place)
    local = shared.begin(self.client, context, memory, who, n)

    def body(i: Any, local: Any) -> Any:
      return shared.step(self.client, context, local, shared.row(batches, i))

    if not self._jit:
      return functools.reduce(lambda local, i: body(i, local), range(num_steps), local)
    loop = lambda local: jax.lax.fori_loop(0, num_steps, body, local)
    return gradients.canonical_convolutions(loop)(local)

  def _last(self, context: Context, local: Any, sums: Any) -> Any:
    sent, memory, info = self.client.finish(context.received, local)
    if self.partial is None:
      return sent, memory, info
    sent = shared.stack([sent])
    more = shared.collect(self.partial, context.state, sent, jnp.ones(1, bool))
    return trees.add(sums, more), memory, info

  def _whole(self, context, place, who, n, batches, num_steps, sums) -> Any:
    local = self._local(context, place, who, n, batches, num_steps)
    return self._last(context, local, sums)

  def _begin(self, context: Context, cohort: Cohort, place: int, threads: bool) -> Any:
    """Returns a function from sums to (collected, client state, info) of the client at a place of
    the cohort.

    With `threads`, all work that does not depend on earlier clients is done on return.
    """
    who = np.int32(cohort.ids[place])
    n = np.int32(cohort.num_examples[place])
    batches = cohort.batches[place]
    num_steps = np.int32(len(batches.mask))
    # Batches are padded to one of few lengths, so that few programs are compiled. Only the first
    # `num_steps` steps are used.
    silos = self.client.silos
    longest = len(batches.mask) if silos is None else silos.longest
    batches = batches.pad(max(1, bucket(longest)))
    work = np.int32(place), who, n, batches, num_steps
    if self._at_once or not self._holds_convolution(context, cohort):
      return functools.partial(self._whole_program, context, *work)
    local = self._local_program(context, *work)
    if threads:
      # Without this wait, threads would return before their work is done, and all work would queue.
      jax.block_until_ready(local)
    return functools.partial(self._last_program, context, local)

  def _holds_convolution(self, context: Context, cohort: Cohort) -> bool:
    if self._convolves is None:
      busy = next((batches for batches in cohort.batches if len(batches.mask)), None)
      if busy is None:
        return False
      self._convolves = has_convolution(self.client, context, busy)
    return self._convolves

  def _begin_all(self, context: Context, cohort: Cohort) -> Iterator[Any]:
    """Yields the result of `_begin` for each place in order. Threads, if there are several, work on
    the next clients meanwhile."""
    several = self._num_threads > 1 and self._jit
    threads = several and self._holds_convolution(context, cohort)

    def begin(place: int) -> Any:
      with _naming(cohort.ids[place]):
        return self._begin(context, cohort, place, threads)

    if not threads:
      yield from map(begin, range(cohort.size))
      return
    ahead: collections.deque[futures.Future] = collections.deque()
    with futures.ThreadPoolExecutor(self._num_threads) as pool:
      for place in range(cohort.size):
        ahead.append(pool.submit(begin, place))
        # Few clients run ahead, since each of these holds its parameters in memory.
        if len(ahead) > self._num_threads:
          yield ahead.popleft().result()
      while ahead:
        yield ahead.popleft().result()

  def __call__(self, context: Context, cohort: Cohort) -> Mapped:
    context = self._placed(context)
    nothing = self._nobody(context)
    sums = nothing.sums
    rows = []
    done = []
    for place, finish in enumerate(self._begin_all(context, cohort)):
      with _naming(cohort.ids[place]):
        collected, memory, info = finish(sums)
      sums = sums if self.partial is None else collected
      rows.append((collected if self.partial is None else None, memory, info))
      if len(rows) == _FLUSH or place + 1 == cohort.size:
        # Results are stacked on the host: a device would need one dispatch per client and leaf.
        fetched = jax.device_get(rows)
        done = [*done, jax.tree.map(lambda *parts: np.stack(parts), *fetched)]
        rows = []
    if not done:
      return nothing
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *done)
    sent, memories, infos = joined
    return Mapped(sums, sent, shared.pad_memories(memories, cohort.size), infos)


@contextlib.contextmanager
def _naming(who: Any) -> Iterator[None]:
  """Adds the client's number to any error that is raised inside the `with` block."""
  try:
    yield
  except UserError as error:
    raise error.at(f"client {int(who)}") from error
  except Exception as error:
    error.add_note(f"in the local work of client {int(who)}")
    raise


def loop_clients(*, jit: bool = True, num_threads: int | None = 1) -> MapClients:
  """Runs clients one after another in Python, or a few at a time.

  Args:
    jit: False runs every operation uncompiled, which is slow and the easiest to debug.
    num_threads: number of clients that run at once, if steps are compiled and hold a convolution;
      None: one for each core. Settings of one thread (such as `with jax.enable_x64(True)`) do not
      reach other threads. All numbers except 1 give the same bits. With a convolution 1 differs by
      rounding.
  """
  if num_threads is not None:
    validate.integer_at_least(1, num_threads=num_threads)
  return lambda client, partial: _Loop(client, partial, jit, num_threads)
