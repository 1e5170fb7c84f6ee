"""Inputs and outputs of an execution, and the work of ONE client that all executions share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dpjax.federated.client import ClientAlgorithm, ClientInfo, Received, Sent
from dpjax.federated.cohort import Cohort, LocalBatches, bucket, pad
from dpjax.sampling import batches
from dpjax.types import ArrayLike, ArrayTree


class Context(NamedTuple):
  """Inputs of a round. Each client sees only its own rows of the data, and its own state."""

  received: Received
  # Arrays [n, ...] to which row numbers in batches refer; None if batches hold examples.
  data: Any
  memories: Any  # client states [C or more, ...] in the order of the cohort, or None
  key: jax.Array  # key of the round
  state: Any  # state of the aggregator, which only `partial` reads


class Remembered(NamedTuple):
  """States of several clients of a cohort, padded to one of few shapes."""

  places: np.ndarray  # [K] places of the clients in the cohort
  mask: np.ndarray  # [K] bool; False: no client
  memories: Any  # leaves [K, ...]


class Mapped(NamedTuple):
  """The results of a cohort: sums or messages, client states, and diagnostics."""

  sums: Any  # sums of the aggregator's `partial`; None without `partial`
  sent: Any  # `Sent` with leaves [C, ...], NumPy; None if there are `sums`
  memories: tuple[Remembered, ...]
  info: ClientInfo  # leaves [C], NumPy; NOT private


# `partial` of an `Aggregator`: (state, messages, weights, mask) -> sums; None: it has no `partial`.
Partial = Callable[..., Any] | None
Run = Callable[[Context, Cohort], Mapped]
MapClients = Callable[[ClientAlgorithm, Partial], Run]


def row(tree: ArrayTree, i: ArrayLike) -> Any:
  """Returns row i of leaves [n, ...]."""
  return jax.tree.map(lambda leaf: leaf[i], tree)


def stack(rows: Sequence[ArrayTree]) -> Any:
  """Stacks trees with leaves [...] into one tree with leaves [len(rows), ...]."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def begin(
  client: ClientAlgorithm, context: Context, memory: ArrayTree, who: ArrayLike, n: ArrayLike
) -> Any:
  """Returns client number `who`, with n examples, before its first step."""
  return client.init(context.received, memory, n, jax.random.fold_in(context.key, who))


def step(
  client: ClientAlgorithm, context: Context, local: ArrayTree, batch: LocalBatches
) -> Any:
  """Runs one local step on a batch, which holds examples [B, ...] or row numbers [B] of the data.

  The client gets only these rows, and cannot reach any other row.
  """
  rows = batch.examples
  if context.data is None:
    return client.step(context.received, local, rows, batch.mask)
  examples = jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0), context.data)
  return client.step(context.received, local, examples, batch.mask)


def collect(partial: Partial, state: ArrayTree, sent: Sent, mask: ArrayLike) -> Any:
  """Returns the sums of the messages by `partial`; without `partial`, the messages themselves."""
  return sent if partial is None else partial(state, sent.message, sent.weight, mask)


def pad_memories(memories: ArrayTree, count: int) -> tuple[Remembered, ...]:
  """Returns the states of `count` clients, leaves [count, ...], in one of few shapes."""
  if memories is None or not count:
    return ()
  size = bucket(count)
  places, mask = batches.pad(np.arange(count), size)
  return (Remembered(places, mask, pad(memories, size)),)


def nobody(client: ClientAlgorithm, partial: Partial) -> Callable[[Context], Mapped]:
  """Returns a function from a context to the results of an empty cohort. Sums are zero, and all
  other results have length 0."""

  def run_client(context: Context, memory: Any) -> Any:
    sent, _, info = client.finish(context.received, begin(client, context, memory, 0, 0))
    return collect(partial, context.state, stack([sent]), jnp.ones(1, bool)), info

  def empty(context: Context) -> Mapped:
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    memory = jax.tree.map(shape, context.memories)
    bare = context._replace(data=None, memories=None)
    # `run_client` is traced only for shapes. JAX caches the trace, so each shape is traced once.
    shapes, info = jax.eval_shape(run_client, bare, memory)
    infos = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype), info)
    if partial is None:
      sent = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape[1:]), leaf.dtype), shapes)
      return Mapped(None, sent, (), infos)
    sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return Mapped(sums, None, (), infos)

  return empty


class Placed:
  """Places the context of a round where its programs run, so that calls move nothing.

  JAX arrays and read-only NumPy arrays of the data (as in a `Dataset`) never change. They are
  placed once, recognised by identity, and kept until another data set comes. NumPy arrays that
  can be written, and everything else, are placed once a round.

  Args:
    sharding: sharding of every leaf; None: where JAX puts it.
  """

  def __init__(self, sharding: NamedSharding | None = None):
    self._sharding = sharding
    self._kept: list[tuple[Any, Any]] = []  # (an array of the data set, its placed twin)

  def _place(self, leaf: Any) -> Any:
    if self._sharding is not None:
      return jax.device_put(leaf, self._sharding)
    # Arrays that can be written may change while a program reads them, so they are copied; once,
    # where `jnp.asarray` holds two copies for a while.
    if isinstance(leaf, np.ndarray):
      return jax.device_put(leaf, may_alias=not leaf.flags.writeable)
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)

  def _place_leaf(self, leaf: Any) -> Any:
    # Arrays are recognised by identity, since comparing their values would take too long.
    twins = [placed for original, placed in self._kept if original is leaf]
    return twins[0] if twins else self._place(leaf)

  def __call__(self, context: Context) -> Context:
    leaves, treedef = jax.tree.flatten(context.data)
    placed = [self._place_leaf(leaf) for leaf in leaves]
    self._kept = [
      (leaf, twin)
      for leaf, twin in zip(leaves, placed)
      if isinstance(leaf, jax.Array) or not leaf.flags.writeable
    ]
    placed_context = jax.tree.map(self._place, context._replace(data=None))
    return placed_context._replace(data=jax.tree.unflatten(treedef, placed))
