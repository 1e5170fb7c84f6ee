"""Federated rounds whose server sees only the sum of the messages.

`secure_mean(protocol, encoding)` is an `Aggregator` like any other, so every algorithm takes
it by one argument. There are two ways to run it, with the same result, bit for bit:

| protocol                  | what happens in a round                             | for          |
| ------------------------- | --------------------------------------------------- | ------------ |
| `PlainSum()`, or          | integers are added inside JAX, modulo 2^32, by any  | experiments  |
| `SecAgg(simulated=True)`  | execution; NOTHING is hidden from who runs it       |              |
| any other of `sums`       | vectors and drop-outs go through the protocol, with | tests of the |
|                           | all its cryptography                                | protocol     |

Integer sums do not depend on their order, so loop, vmap, pmap and processes agree in every
bit of the sum. Hiding is not differential privacy: the mean itself still tells about its
clients. `distributed_noise` adds noise inside the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core as jax_core

from dpjax import trees, validate
from dpjax.federated import FederatedAlgorithm
from dpjax.federated.aggregation import Aggregator, by_sums
from dpjax.federated.aggregation import RoundRefused as RoundRefused
from dpjax.federated.client import ClientAlgorithm, ClientInfo
from dpjax.federated.cohort import Cohort
from dpjax.federated.execution.context import Context, MapClients, Mapped, Run
from dpjax.federated.round import FederatedState, RoundInfo
from dpjax.secure.encoding import Encoded, Encoding, from_vector, to_vector
from dpjax.secure.sums import Drops
from dpjax.secure.sums.interface import NO_DROPS, LazyVectors, Summed, SumProtocol, dtype_of
from dpjax.types import Array
from dpjax.validate import UserError

# --- drop-outs


@dataclasses.dataclass(frozen=True)
class Dropout:
  """Random drop-outs for simulations. Each client drops out independently, in a random phase.

  Args:
    prob: probability that a client drops out of a round.
    seed: seed of all rounds. Who drops out depends on (prob, seed, round, client) alone, never on
      anyone's data.

  >>> Dropout(prob=0.5, seed=1).drops(0, range(4)) == Dropout(prob=0.5, seed=1).drops(0, range(4))
  True
  """

  prob: float = 0.0
  seed: int = 0

  def __post_init__(self):
    validate.share(prob=self.prob)
    validate.integer_at_least(0, seed=self.seed)

  def drops(self, round: int, clients: Any) -> Drops:
    """Returns the clients that drop out in this round, by phase."""
    silent: tuple[set[int], ...] = (set(), set(), set())
    for client in clients if self.prob else ():
      # The random stream depends on (seed, round, client) alone, not on other participants.
      stream = np.random.SeedSequence(self.seed, spawn_key=(round, int(client)))
      rng = np.random.Generator(np.random.Philox(stream))
      if rng.random() < self.prob:
        silent[rng.integers(len(silent))].add(int(client))
    return Drops(*map(frozenset, silent))


NO_DROPOUT = Dropout()


def uploading(clients: Any, drops: Drops) -> list[int]:
  """Returns the clients whose vectors are in the sum, ascending.

  >>> uploading([1, 2, 3], Drops(frozenset({1}), frozenset(), frozenset({3})))
  [2, 3]
  """
  gone = drops.before_sharing | drops.before_upload
  return sorted({int(client) for client in clients} - gone)


def check_survivors(protocol: SumProtocol, uploaded: list[int], drops: Drops) -> None:
  """Raises RoundRefused if fewer than `min_survivors` clients stay until the end."""
  left = len(set(uploaded) - drops.before_unmasking)
  if left < protocol.min_survivors:
    raise RoundRefused(
      f"must be >= min_survivors={protocol.min_survivors}; the round is refused and reveals "
      "nothing",
      field="survivors",
      value=left,
    )


def _check_most(count: int, max_clients: int) -> None:
  if count > max_clients:
    raise UserError(
      f"must be >= the {count} clients of a round, whose sum could wrap around",
      field="max_clients",
      value=max_clients,
    )


# --- mean


def secure_mean(
  protocol: SumProtocol,
  encoding: Encoding,
  *,
  dropout: Dropout = NO_DROPOUT,
) -> Aggregator:
  """Returns an aggregator that forms the weighted mean of messages from their secure sum.

  A plan draws its cohorts by `Aggregator.drawn_by`.

  Args:
    protocol: one of `sums`, with its cryptography or simulated. A round with too few survivors for
      the protocol raises RoundRefused (`forgiving` goes on with the next round).
    encoding: encoding of messages as integers. Its `bits` may be fewer than the protocol's.
    dropout: rule by which clients fall silent, in a simulation.

  Guarantee: the docstring of `protocol` says what it hides, and from whom; a simulated one
  hides nothing. The mean is NOT differentially private.

  Raises:
    UserError: an encoding with more bits than the protocol's modulus.

  >>> from dpjax.secure.sums import PlainSum
  >>> aggregator = secure_mean(PlainSum(), Encoding(max_clients=4, largest_value=4.0))
  >>> messages = jnp.array([[1.0], [3.0], [jnp.nan]])
  >>> state = aggregator.init(messages[0])
  >>> aggregator.update(messages, jnp.ones(3, bool), state)[0]
  Array([2.], dtype=float32)
  """
  if encoding.bits > protocol.bits:
    raise UserError(
      f"must be <= {protocol.bits} of {protocol.name}", field="bits", value=encoding.bits
    )

  def partial(state: Any, messages: Any, weights: Array, mask: Array) -> Encoded:
    del state
    return encoding.add(encoding.encode(messages, weights, mask))

  def finish(total: Encoded, state: Any) -> Any:
    return encoding.mean(total), state + 1

  def telling(client: ClientAlgorithm) -> ClientAlgorithm:
    """Returns the client, which then tells how many coordinates of a message are cut."""

    def finish(received: Any, local: Any) -> Any:
      sent, memory, info = client.finish(received, local)
      cut = encoding.coordinates_cut(sent.message)
      return sent, memory, info._replace(coordinates_cut=cut)

    return client._replace(finish=finish)

  simulated = protocol.is_simulated
  sum_of = _counted(protocol) if simulated else _protocol(encoding, protocol)

  def through(inner: MapClients) -> MapClients:
    # A protocol gets the messages themselves. A simulation adds the integers inside JAX.
    bind = lambda client, partial: inner(telling(client), partial if simulated else None)
    return through_sum(sum_of, dropout, protocol, bind, max_clients=encoding.max_clients)

  aggregator = by_sums(
    lambda message: jnp.int32(0),
    partial,
    finish,
    through=through,
    min_clients=protocol.min_clients,
  )

  def update(messages: Any, mask: Array, state: Any, weights: Array | None = None) -> Any:
    mask = jnp.asarray(mask, bool)
    # Under jit, which cannot raise, the update is NaN: a sum that has wrapped around looks valid.
    if not isinstance(mask, jax_core.Tracer):
      kept = np.flatnonzero(np.asarray(mask)).tolist()
      check_survivors(protocol, kept, NO_DROPS)
      _check_most(len(kept), encoding.max_clients)
    mean, state = aggregator.update(messages, mask, state, weights)
    count = jnp.sum(mask)
    fits = (count >= protocol.min_survivors) & (count <= encoding.max_clients)
    return jax.tree.map(lambda leaf: jnp.where(fits, leaf, jnp.nan), mean), state

  return aggregator._replace(update=update)


# Runs the clients of a cohort, and sums their messages.
Summing = Callable[[Run, Context, Cohort, Drops], Mapped]


def through_sum(
  sum_of: Summing,
  dropout: Dropout,
  protocol: SumProtocol,
  inner: MapClients,
  *,
  max_clients: int,
) -> MapClients:
  """Returns the execution in which clients drop out, and the others' messages are summed.

  A round of fewer clients than the protocol's `min_survivors`, or of more than `max_clients`, is
  refused before any client computes.
  """

  def bind(client: Any, partial: Any) -> Run:
    run = inner(client, partial)

    def summed_run(context: Context, cohort: Cohort) -> Mapped:
      drops = dropout.drops(int(context.state), np.asarray(cohort.ids))
      kept = uploading(cohort.ids, drops)
      check_survivors(protocol, kept, drops)
      _check_most(len(kept), max_clients)
      places = np.flatnonzero(np.isin(np.asarray(cohort.ids), kept))
      mapped = sum_of(run, *_those(context, cohort, places), drops)
      # The inner run numbers the clients that it was given. `back` returns their places in the
      # whole cohort.
      back = lambda part: places[np.minimum(np.asarray(part.places), len(places) - 1)]
      return mapped._replace(
        memories=tuple(part._replace(places=back(part)) for part in mapped.memories)
      )

    return summed_run

  return bind


def _those(context: Context, cohort: Cohort, places: np.ndarray) -> tuple[Context, Cohort]:
  """Returns the part of a cohort at these places, with its client states."""
  rows = jax.tree.map(lambda leaf: np.asarray(leaf)[places], context.memories)
  kept = cohort._replace(
    ids=np.asarray(cohort.ids)[places],
    num_examples=np.asarray(cohort.num_examples)[places],
    batches=[cohort.batches[place] for place in places],
  )
  return context._replace(memories=rows), kept


def _counted(protocol: SumProtocol) -> Summing:
  """Returns the sum in which the inner execution adds the integers itself.

  The protocol is only asked for its cost and its refusals.
  """

  def sum_of(run: Run, context: Context, cohort: Cohort, drops: Drops) -> Mapped:
    mapped = run(context, cohort)
    # The protocol adds zeros: only its cost and its refusals are needed.
    zeros = np.zeros(trees.size(mapped.sums), dtype_of(protocol.bits))
    result = carry_out(protocol, cohort.ids, drops, lambda client: zeros)
    return with_cost(mapped, result)

  return sum_of


def _protocol(encoding: Encoding, protocol: SumProtocol) -> Summing:
  """Returns the sum that gives each client's message to the protocol."""
  encode = jax.jit(encoding.encode)

  def sum_of(run: Run, context: Context, cohort: Cohort, drops: Drops) -> Mapped:
    mapped = run(context, cohort)
    sent = jax.device_get(mapped.sent)
    row = lambda place: jax.tree.map(lambda leaf: leaf[place : place + 1], sent)
    encoded = lambda place: encode(row(place).message, row(place).weight, np.ones(1, bool))
    shapes = jax.eval_shape(lambda: encoded(0))
    like = jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype), shapes)
    places = {int(client): place for place, client in enumerate(cohort.ids)}

    def vector(client: int) -> np.ndarray:
      # A protocol may also ask for clients that dropped out. It gets zeros, which are never sent.
      encoded_row = encoded(places[client]) if client in places else like
      return to_vector(encoded_row, protocol.bits)

    result = carry_out(protocol, cohort.ids, drops, vector)
    total = from_vector(result.total, like)
    return with_cost(mapped, result)._replace(sums=total, sent=None)

  return sum_of


def carry_out(
  protocol: SumProtocol, uploading: Any, drops: Drops, vector: Callable[[int], np.ndarray]
) -> Summed:
  """Runs the protocol over the clients that upload, and returns its result.

  The protocol may also call `vector` for drop-outs, but nobody sees what it returns for them.

  Raises:
    RoundRefused: the protocol fails in a round with drop-outs.
    UserError: it fails in a round without them; there are several processes, each of which would
      draw its own masks; or the sum is over other clients than those who uploaded.
  """
  if jax.process_count() > 1 and not protocol.is_simulated:
    raise UserError(
      "must be run by one process, or simulated", field="protocol", value=protocol.name
    )
  clients = {int(client) for client in uploading}
  silent = drops.before_sharing | drops.before_upload
  try:
    # Drop-outs are named, too: what they still send depends on the protocol.
    result = protocol.sum(LazyVectors(clients | silent, vector), drops)
  except UserError as error:
    # Without drop-outs the settings are at fault, and the next round would fail, too.
    if any(drops):
      raise RoundRefused.of_facts(error.facts()) from error
    raise
  if list(result.survivors) != sorted(clients):
    raise UserError(
      f"must be those who uploaded, {sorted(clients)}",
      field="survivors",
      value=list(result.survivors),
    )
  return result


def with_cost(mapped: Mapped, result: Summed) -> Mapped:
  """Returns `mapped` with `upload_bits`: bits that the busiest client sent and received."""
  bits = np.full_like(mapped.info.upload_bits, 8 * result.cost.client_bytes)
  return mapped._replace(info=mapped.info._replace(upload_bits=bits))


# --- refused rounds


def forgiving(
  algorithm: FederatedAlgorithm, refused: Callable[[str], None] = lambda why: None
) -> FederatedAlgorithm:
  """Returns the same algorithm, in which a refused round only uses up its number.

  The next round follows. The aggregator's state must count rounds, as it does for `secure_mean`
  and `skellam_mean`, or be empty, as for `krum`.

  The refused round stays accounted: a ledger counts rounds, not successes.

  Args:
    refused: function that gets one line, which says which round was refused, and why.
  """

  def one_round(state: FederatedState, cohort: Cohort) -> tuple[FederatedState, RoundInfo]:
    try:
      return algorithm.round(state, cohort)
    except RoundRefused as error:
      refused(f"round {int(state.round) + 1} was refused, and moved nothing: {error}")
      # The refused round has used its number, which determines noise and rotations.
      aggregator = jax.tree.map(lambda count: count + 1, state.aggregator)
      later = state._replace(round=state.round + 1, aggregator=aggregator)
      unknown = np.float32(np.nan)
      clients = ClientInfo(*[jnp.zeros(0)] * len(ClientInfo._fields))
      info = RoundInfo(
        unknown, unknown, np.int32(0), np.int32(0), np.float64(0), clients,
        left_out=np.int32(cohort.size), rounds_refused=np.int32(1),
      )  # fmt: skip
      return later, info

  return algorithm._replace(round=one_round)
