"""Canary clients: users inserted into a federation by fair coins, to be recognised
afterwards.

A canary client joins the others, or takes the place of a real one. It is drawn by the same sampler
and run by the same execution as all clients. It is clipped, and hidden by the same noise. Only its
data, or what it sends, differs. What it does, by kind:

| kind          | a canary that is in                                                     |
| ------------- | ----------------------------------------------------------------------- |
| `parameter`   | sends, whenever it is drawn, a number for one parameter that nobody     |
|               | else has, far above the clip norm: as much as a user may do. No model   |
|               | reads that parameter, so canaries do not move the model                 |
| `direction`   | sends one direction among the model's own parameters, equally long      |
|               | (Andrew et al. 2023)                                                    |
| `mislabelled` | trains, as others do, on its rows with wrong labels                     |
| `random`      | trains on noise with random labels                                      |

What is left of a canary that is out, by the neighbouring relation:

| relation            | `parameter`, `direction` | `mislabelled`, `random`  |
| ------------------- | ------------------------ | ------------------------ |
| `add_or_remove_one` | no client                | no client                |
| `replace_one`       | sends the opposite       | the client as it was     |
| `replace_special`   | a client without records | a client without records |

Proof that a bound from canary clients exceeds the true epsilon with probability at most 1 -
confidence. Let M(c) be everything that the rounds show as a function of the coins c in {0, 1}^m.
The coins are independent, fair, and drawn from a stream of their own. All else is fixed before c
and without it: place, rows and direction of a canary, all other clients, the sampling scheme, the
noise, the divisor and the number of rounds. Let coins c and c' differ in one entry. Then M(c) and
M(c') are runs on data that differ in ONE client, as the relation says. The guarantee of the run,
(epsilon, delta)-DP for a user, means that M is (epsilon, delta)-DP in each coin. That is the only
premise of Steinke, Nasr and Jagielski 2023, Theorem 5.2 (`one_run`), whatever the adversary
computes from M(c) alone. `one_run_fdp` also needs M to be Gaussian-DP.

Canaries that join change nothing in this proof: under add_or_remove_one a guarantee is about
federations of any size. M runs on the same clients, and on the canaries that are in. The sampler
has room for all m canaries. Its probability and the divisor are those of the federation without
canaries. The parameters of canaries are a part of the messages, and share clip norm and noise with
the model's: the Gaussian mechanism guarantees the same for the longer vector. The part of the model
that is kept at the end is post-processing of M.

Scores here are functions of M(c), of directions and of rows; no coin is read before scores are
separated. One thing is assumed, as in any run with a seed: noise and coins that follow from one
seed by unrelated streams are independent.

A direction depends on nobody's data: if it did, one user would move all canaries. For the same
reason canaries are chosen among all clients, also those without records. And no divisor of an
algorithm counts the canaries that are in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import flatten_util

from dpjax import trees, validate
from dpjax.accounting.proved import NeighboringRelation
from dpjax.auditing import canaries as records
from dpjax.auditing.scores import CanaryScores, Scores
from dpjax.data import Dataset, Federation
from dpjax.federated.client import ClientAlgorithm
from dpjax.federated.cohort import Cohort
from dpjax.federated.compression import hadamard
from dpjax.federated.execution.context import MapClients
from dpjax.federated.round import FederatedAlgorithm
from dpjax.parallel.client_states import ClientStates
from dpjax.types import Array, ArrayTree, LossFn, Params
from dpjax.validate import UserError

DIRECTION = "direction"
PARAMETER = "parameter"
SENDERS = (PARAMETER, DIRECTION)  # kinds that send a given message, and do not train
CLIENT_KINDS = (*SENDERS, *(kind for kind in records.KINDS if kind != "gradient"))
CLIENT_SCORES = ("rounds", "final")
# Part of the seed that separates these coins from those of canary records, and from other uses.
_STREAM = 0x0CA9A21E6
# Length of a canary's message, in clip norms. It is so large that a missing clip shows.
_LENGTH = 1e3
# Coordinates are cut at this multiple of the median of their absolute values.
_WIDE = 2.0
# Singular values are cut at this multiple of their median.
_FLAT = 1.2
# A matrix whose smaller side is longer than this stays uncut: `eigh` would take too long.
_MOST_VALUES = 1024
# With a larger probability to take part, canaries would lose more by `_new_along` than they gain.
_MOST_PROB = 0.5
# Number of rounds before anything is projected out.
_FEW_ROUNDS = 8
# Ratio of standard deviation to median distance from the median, for a normal distribution.
_SPREAD = 1.4826
# Names that algorithms give to the part of a message that moves the model.
_SENT = ("delta", "direction")


class CanaryClients(NamedTuple):
  """Canary clients, inserted or held out. Whoever knows the coins can finish the audit."""

  included: np.ndarray  # [m] bool: the coins
  kind: str
  examples: Dataset | None  # [k] rows of all canaries, changed; None for `SENDERS`
  owners: np.ndarray  # [k] int64: the canary of each row, in [0, m)
  # [n] int32, a number for each row of the federation: i + 1 for rows of canary i, -(i + 1) if the
  # canary sends the opposite, and 0 for all other rows. None for canaries that train.
  numbers: np.ndarray | None
  # [m] int64: each canary's place in the changed federation; -1 if it is absent
  places: np.ndarray


def insert_canary_clients(
  federation: Federation,
  *,
  num_canaries: int,
  seed: int,
  kind: str = DIRECTION,
  neighboring_relation: str = "add_or_remove_one",
  join: bool = False,
) -> tuple[Federation, CanaryClients]:
  """Turns `num_canaries` clients into canaries, or adds as many. Fair coins decide which are in.

  Args:
    federation: the federation, which is not changed.
    num_canaries: number m of canaries; at most the number of clients, unless canaries join.
    seed: seed of the choice of clients, of their change, and of the coins.
    kind: "parameter", "direction", "mislabelled" or "random"; see the first table above.
    neighboring_relation: relation that decides what is left of a canary that is out; see the second
      table.
    join: whether canaries come after all clients, and no client leaves. This needs the kind
      "parameter" or "direction", and add_or_remove_one. The plan's sampler needs room for
      `num_canaries` more clients.

  Returns:
    (the federation to train on, the canaries). Train with a plan made for the federation as
    it was: under add_or_remove_one the realised number of clients depends on the coins.

  >>> from dpjax.data import from_arrays
  >>> rows = from_arrays(np.zeros((100, 1)), np.zeros(100, int), num_classes=2)
  >>> federation = Federation(rows, np.split(np.arange(100), 50))
  >>> trained, canaries = insert_canary_clients(federation, num_canaries=40, seed=0)
  >>> trained.num_clients - 10, int(canaries.included.sum())
  (18, 18)
  """
  validate.integer_at_least(2, num_canaries=num_canaries)
  validate.integer_at_least(0, seed=seed)
  validate.one_of(CLIENT_KINDS, kind=kind)
  validate.one_of(NeighboringRelation, neighboring_relation=neighboring_relation)
  if join:
    _check_join(kind, neighboring_relation)
  elif num_canaries > federation.num_clients:
    raise UserError(
      f"must be <= {federation.num_clients}, the number of clients",
      field="num_canaries",
      value=num_canaries,
    )
  places_rng, change_rng, coin_rng = map(
    np.random.default_rng, np.random.SeedSequence([seed, _STREAM]).spawn(3)
  )
  if join:
    places = federation.num_clients + np.arange(num_canaries)
    # Canaries come after the real clients, and hold no rows of the data.
    joined = [f"canary {number} of {num_canaries}" for number in range(num_canaries)]
    none = [np.zeros(0, np.int64)] * num_canaries
    tests = federation.test_indices
    federation = dataclasses.replace(
      federation,
      indices=[*federation.indices, *none],
      client_ids=[*federation.client_ids, *joined],
      test_indices=None if tests is None else [*tests, *none],
    )
  else:
    places = np.sort(places_rng.choice(federation.num_clients, num_canaries, replace=False))
  included = coin_rng.random(num_canaries) < 0.5
  if kind in SENDERS:
    opposite = neighboring_relation == NeighboringRelation.REPLACE_ONE
    changed, canaries = _senders(federation, places, included, kind, opposite=opposite)
  else:
    changed, canaries = _trainers(federation, places, included, kind, change_rng)
  if neighboring_relation == NeighboringRelation.ADD_OR_REMOVE_ONE:
    # Remaining clients move down by the number of removed clients before them.
    moved = places - np.searchsorted(places[~included], places)
    canaries = canaries._replace(places=np.where(included, moved, -1))
  return _without(changed, places[~included], neighboring_relation), canaries


def _check_join(kind: str, relation: str) -> None:
  """Raises UserError for a kind or a relation under which canaries must replace clients."""
  if kind not in SENDERS:
    raise UserError(
      f"must be {PARAMETER!r} or {DIRECTION!r} with join=True, for others change a client's rows",
      field="kind",
      value=kind,
    )
  if relation != NeighboringRelation.ADD_OR_REMOVE_ONE:
    raise UserError(
      "must be 'add_or_remove_one' with join=True: other relations fix the number of clients",
      field="neighboring_relation",
      value=relation,
    )


def _senders(
  federation: Federation,
  places: np.ndarray,
  included: np.ndarray,
  kind: str,
  *,
  opposite: bool,
) -> tuple[Federation, CanaryClients]:
  """Gives every canary one row of zeros, which `numbers` marks with the canary's number."""
  whole = federation.dataset
  m = len(places)
  zeros = lambda leaf: np.zeros((m, *leaf.shape[1:]), leaf.dtype)
  joined = {n: np.concatenate([v, zeros(v)]) for n, v in (("x", whole.x), ("y", whole.y))}
  indices = list(federation.indices)
  for number, place in enumerate(places):
    indices[place] = np.array([len(whole) + number])
  numbers = np.zeros(len(whole) + m, np.int32)
  numbers[len(whole) :] = np.where(included, 1, -1 if opposite else 1) * np.arange(1, m + 1)
  if whole.present is not None:
    joined["present"] = np.concatenate([whole.present, np.ones(m, bool)])
  rows = dataclasses.replace(whole, **joined)
  changed = dataclasses.replace(federation, dataset=rows, indices=indices)
  return changed, CanaryClients(
    included, kind, None, np.zeros(0, np.int64), numbers, places
  )


def _trainers(
  federation: Federation,
  places: np.ndarray,
  included: np.ndarray,
  kind: str,
  rng: np.random.Generator,
) -> tuple[Federation, CanaryClients]:
  """Changes the rows of each canary that is in, as the kind says."""
  held = [federation.indices[place] for place in places]
  owners = np.repeat(np.arange(len(held)), list(map(len, held)))
  rows = np.concatenate(held)
  if not len(rows):
    raise UserError(
      f"the canaries hold no records; use {DIRECTION!r}", field="kind", value=kind
    )
  whole = federation.dataset
  # Each client has draws of its own: with one stream, a row more of one would change all others.
  each = [
    records.change(whole.subset(part), kind, own)
    for part, own in zip(held, rng.spawn(len(held)))
  ]
  joined = {
    name: np.concatenate([getattr(part, name) for part in each]) for name in ("x", "y")
  }
  changed_records = dataclasses.replace(whole.subset(rows), **joined)
  x = whole.x.copy()
  y = whole.y.copy()
  come = included[owners]
  x[rows[come]] = changed_records.x[come]
  y[rows[come]] = changed_records.y[come]
  mixed = dataclasses.replace(whole, x=x, y=y)
  changed = dataclasses.replace(federation, dataset=mixed)
  return changed, CanaryClients(included, kind, changed_records, owners, None, places)


def _without(federation: Federation, places: np.ndarray, relation: str) -> Federation:
  """Removes the clients at `places`; replace_special empties them, and replace_one keeps them."""
  if relation == NeighboringRelation.REPLACE_ONE:
    return federation
  if relation == NeighboringRelation.ADD_OR_REMOVE_ONE:
    kept = np.setdiff1d(np.arange(federation.num_clients), places)
    if not len(kept):
      raise UserError(
        "every client is a canary, and none is in; use fewer", field="num_canaries"
      )
    return federation.select(kept.tolist())
  indices = list(federation.indices)
  for place in places:
    indices[place] = np.zeros(0, np.int64)
  return dataclasses.replace(federation, indices=indices)


# --- directions


class Directions(NamedTuple):
  """Unit vectors, one for each canary: rows of a Hadamard matrix, cut to d entries, with one random
  sign for each column.

  Each vector alone is uniform over {-1, 1}^d / sqrt(d). So its cosine with any vector that is fixed
  beforehand has mean 0 and variance 1 / d. The cosine of any two is within 2 m / d of 0.
  """

  signs: np.ndarray  # [d] float32, 1 or -1
  count: int  # m <= d

  @property
  def scale(self) -> float:
    """Returns the absolute value of every entry, 1 / sqrt(d)."""
    return float(1 / np.sqrt(len(self.signs)))

  def one(self, number: Array, like: ArrayTree) -> Any:
    """Returns the direction of canary `number`, counted from 0, as a tree like the parameters."""
    flat, unravel = flatten_util.ravel_pytree(like)
    # Entry (i, j) of a Hadamard matrix is (-1)^(number of 1 bits of i & j).
    odd = jax.lax.population_count(number & jnp.arange(len(self.signs))) & 1
    return unravel(((1 - 2 * odd) * self.signs * self.scale).astype(flat.dtype))

  def along(self, flat: Array) -> Array:
    """Returns inner products [m] of a vector [d] with all directions, by one fast transform."""
    # The fast transform needs a power of two as its length.
    size = 1 << max(0, (len(self.signs) - 1).bit_length())
    spread = jnp.pad(flat * self.signs, (0, size - len(self.signs)))
    return hadamard(spread)[: self.count] * (np.sqrt(size) * self.scale)


class OwnParameters(NamedTuple):
  """Directions of canaries along parameters of their own, which `with_canaries` adds to the model.

  They are exactly orthogonal to each other and to everything that clients learn.
  """

  count: int

  def one(self, number: Array, like: ArrayTree) -> Any:
    """Returns the direction of canary `number`, counted from 0, as a tree like the parameters."""
    zeros: Any = trees.zeros(like)
    one_hot = jax.nn.one_hot(number, self.count, dtype=zeros["canaries"].dtype)
    return zeros | {"canaries": one_hot}


def directions(params: Params, *, num_canaries: int, seed: int) -> Directions:
  """Draws directions for canaries in the space of the parameters, as a function of `seed`.

  >>> drawn = directions({"w": jnp.zeros(64)}, num_canaries=5, seed=0)  # doctest: +SLOW
  >>> along = drawn.along(drawn.one(jnp.int32(3), {"w": jnp.zeros(64)})["w"])
  >>> [round(abs(float(cosine)), 5) for cosine in along]
  [0.0, 0.0, 0.0, 1.0, 0.0]
  """
  size = trees.size(params)
  if num_canaries > size:
    raise UserError(
      f"must be <= {size}, the parameters of the model, each a direction",
      field="num_canaries",
      value=num_canaries,
    )
  coins = np.random.default_rng([seed, _STREAM, 1]).integers(0, 2, size)
  return Directions((2 * coins - 1).astype(np.float32), num_canaries)


class _Marked(NamedTuple):
  """Rows, each with its entry of `CanaryClients.numbers`."""

  examples: Any
  numbers: Any  # [n] int32


class _Work(NamedTuple):
  """State of a client between two steps, and the number that its rows hold in `_Marked`."""

  own: Any
  number: Array

  @property
  def key(self) -> Array:
    """The client's key, from which wrappers of the client draw random numbers."""
    return self.own.key


def mark(cohorts: Iterable[Cohort], canaries: CanaryClients) -> Iterator[Cohort]:
  """Yields the cohorts, with each row marked by its entry of `canaries.numbers`, for `sender`.

  If the canaries train, the cohorts stay unchanged.
  """
  if canaries.numbers is None:
    yield from cohorts
    return
  numbers = jnp.asarray(canaries.numbers)
  for cohort in cohorts:
    yield cohort._replace(data=_Marked(cohort.data, numbers))


def sender(
  client: ClientAlgorithm, directions: Directions | OwnParameters, *, l2_clip_norm: float
) -> ClientAlgorithm:
  """Returns a client that sends a canary's direction if its rows are those of a canary.

  The direction, 1,000 clip norms long, or its opposite replaces the part of a message that moves
  the model. The other parts are 0, and the weight is 1.
  """

  def init(received: Any, memory: Any, num_examples: Array, key: Array) -> _Work:
    return _Work(client.init(received, memory, num_examples, key), jnp.int32(0))

  def step(received: Any, work: _Work, rows: _Marked, mask: Array) -> _Work:
    # A canary holds one row, so the sum is its number.
    number = jnp.sum(jnp.where(mask, rows.numbers, 0))
    inner = client.step(received, work.own, rows.examples, mask)
    return _Work(inner, jnp.where(number == 0, work.number, number))

  def finish(received: Any, work: _Work) -> Any:
    sent, memory, info = client.finish(received, work.own)
    name = next(name for name in _SENT if name in sent.message)
    direction = directions.one(jnp.abs(work.number) - 1, sent.message[name])
    length = _LENGTH * l2_clip_norm * jnp.sign(work.number)
    message = trees.zeros(sent.message) | {name: trees.scale(direction, length)}
    is_one = work.number != 0
    chosen = lambda honest, canary: jnp.where(
      is_one, jnp.asarray(canary, honest.dtype), honest
    )
    message = jax.tree.map(chosen, sent.message, message)
    weight = jnp.where(is_one, jnp.ones_like(sent.weight), sent.weight)
    return sent._replace(message=message, weight=weight), memory, info

  return client.wrap(init=init, step=step, finish=finish)


def sending(
  map_clients: MapClients, directions: Directions | OwnParameters, *, l2_clip_norm: float
) -> MapClients:
  """Returns the execution `map_clients`, with clients wrapped in `sender`.

  This tests the noise of a server, since canaries add no noise of their own.
  """

  def bind(client: ClientAlgorithm, partial: Any) -> Any:
    return map_clients(sender(client, directions, l2_clip_norm=l2_clip_norm), partial)

  return bind


class _Heard(NamedTuple):
  """State of a client whose messages are recorded."""

  own: Any
  score: Array


def heard(
  client: ClientAlgorithm, directions: Directions | OwnParameters, *, l2_clip_norm: float
) -> ClientAlgorithm:
  """Returns the client with its messages recorded, for a server that sees each message.

  The client must hold a `sender` inside. The client state keeps the sum of all messages along the
  canary's direction, in clip norms. Only the messages of the canary's own client count, since the
  server knows who sends. The sum depends on the sent messages and the direction alone.

  See `heard_memory` for the first client state, and `heard_scores` for the scores.
  """

  def init(received: Any, memory: Any, num_examples: Array, key: Array) -> _Heard:
    inner = client.init(received, memory["own"], num_examples, key)
    return _Heard(inner, memory["heard"])

  def step(received: Any, work: _Heard, rows: Any, mask: Array) -> _Heard:
    return work._replace(own=client.step(received, work.own, rows, mask))

  def finish(received: Any, work: _Heard) -> Any:
    sent, memory, info = client.finish(received, work.own)
    # Other wrappers may hold the `_Work` of a `sender` inside their states, so a search finds it.
    is_sender = lambda node: isinstance(node, _Work)
    nodes = jax.tree.leaves(work.own, is_leaf=is_sender)
    number = next(node.number for node in nodes if is_sender(node))
    message = next(sent.message[name] for name in _SENT if name in sent.message)
    # The direction is taken without its sign, since the sign is the coin.
    direction = directions.one(jnp.abs(number) - 1, message)
    along = optax.tree.vdot(message, direction) / l2_clip_norm
    score = work.score + jnp.where(number == 0, 0.0, along)
    return sent, {"own": memory, "heard": score}, info

  return client.wrap(init=init, step=step, finish=finish)


def heard_memory(inner: ArrayTree) -> Any:
  """Returns the first client state under `heard`; `inner` is the state without `heard`."""
  return {"own": inner, "heard": jnp.zeros((), jnp.float32)}


def heard_scores(states: ClientStates, canaries: CanaryClients) -> Scores:
  """Returns the scores of `heard`, from the client states."""
  return CanaryScores.separate(states.rows(canaries.places)["heard"], canaries.included)


# --- scores


class Watched(NamedTuple):
  """Sums kept by an adversary who sees every round's aggregate."""

  # The sum of all aggregates, as a tree. If each round is scored: the sum [d] of their `_spread`,
  # or None; see `_new_along`.
  total: Any
  scores: Any  # [m]: sums over rounds; or None
  # [m]: for canaries in the sum of the next round, the number of clients in it / the divisor of
  # `seeing`; 0 for other canaries. None if participation is not seen.
  present: Any = None
  rounds: Any = None  # [] int32: rounds in `total`, if each round is scored


def watching(
  directions: Directions | OwnParameters,
  *,
  unit: float,
  sampling_prob: float,
  opposite: bool = False,
  present: bool = False,
) -> optax.GradientTransformation:
  """Returns a transform to be put before the server's optimizer; it leaves updates unchanged.

  From each round's private aggregate the transform keeps what reveals canaries. This is
  post-processing, and checkpoints hold its state.

  Args:
    unit: length of one canary's part in the aggregate.
    sampling_prob: probability that a canary takes part in a round. At 1 the aggregates are
      summed, and their sum is scored at the end. Give 1, too, if later rounds cancel the noise of
      earlier rounds.
    opposite: whether a canary that is out sends the opposite.
    present: whether the adversary also sees who is in each sum (`seeing`). Then only
      canaries in the sum are scored.
  """

  def init(params: Params) -> Watched:
    if sampling_prob == 1 and not present:
      zeros = lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.float32)
      return Watched(jax.tree.map(zeros, params), None)
    total = None
    if isinstance(directions, Directions) and sampling_prob <= _MOST_PROB:
      total = jnp.zeros(len(directions.signs), jnp.float32)
    scores = jnp.zeros(directions.count, jnp.float32)
    return Watched(total, scores, scores if present else None, jnp.int32(0))

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Watched]:
    del params
    # The optimizer's gradient is -aggregate.
    aggregate = trees.scale(updates, -1.0 / unit)
    if sampling_prob == 1 and not present:
      add = lambda total, leaf: total + leaf.astype(jnp.float32)
      return updates, Watched(jax.tree.map(add, state.total, aggregate), None)
    seen, total = _new_along(directions, aggregate, state)
    if present:
      scores = round_scores(seen * jnp.max(state.present), 1.0, opposite=opposite)
      scores = jnp.where(state.present > 0, scores, 0.0)
    else:
      scores = round_scores(seen, sampling_prob, opposite=opposite)
    state = state._replace(total=total, scores=state.scores + scores)
    return updates, state._replace(rounds=state.rounds + 1)

  return optax.GradientTransformation(init, update)


def seeing(
  algorithm: FederatedAlgorithm,
  canaries: CanaryClients,
  in_sum: Callable[[Cohort, int], np.ndarray],
  *,
  divisor: float,
) -> FederatedAlgorithm:
  """Returns the algorithm, changed to tell `watching` whose messages are in the sum of each round.

  Args:
    in_sum: function (cohort, round) -> the clients whose messages are in the mean of that round.
    divisor: divisor of the sum, from which the `unit` of `watching` was computed.
  """

  def one_round(state: Any, cohort: Cohort) -> Any:
    clients = in_sum(cohort, int(state.round))
    factor = np.where(np.isin(canaries.places, clients), len(clients) / divisor, 0.0)
    present = jnp.asarray(factor, jnp.float32)
    tell = lambda node: node._replace(present=present) if _is_watched(node) else node
    return algorithm.round(jax.tree.map(tell, state, is_leaf=_is_watched), cohort)

  return algorithm._replace(round=one_round)


def _is_watched(node: Any) -> bool:
  return isinstance(node, Watched)


def along(directions: Directions | OwnParameters, moved: Any) -> Array:
  """Returns the lengths [m] of `moved` along each direction, after cutting what most clients share.

  Honest clients move matrices along a few singular directions, and move a few coordinates far. A
  canary's random signs spread evenly over all of them. So singular values are cut at 1.2 times
  their median, then coordinates at twice the median of their absolute values. The audit's bound is
  sound for any such function of what is seen. Parameters that only canaries move are not cut.
  """
  if isinstance(directions, OwnParameters):
    return jnp.asarray(moved["canaries"], jnp.float32)
  return directions.along(_spread(moved))


def _spread(moved: Any) -> Array:
  """Returns `moved` as a vector [d], after cutting what most clients share; see `along`."""
  flat = flatten_util.ravel_pytree(jax.tree.map(_flatten, moved))[0]
  limit = _WIDE * jnp.median(jnp.abs(flat))
  # If most coordinates are zero, the limit is 0, and no coordinate is cut.
  return jnp.where(limit > 0, jnp.clip(flat, -limit, limit), flat)


def _new_along(
  directions: Directions | OwnParameters, moved: Any, watched: Watched
) -> tuple[Array, Array | None]:
  """Returns the lengths [m] of what is new in a round, and `watched.total` with this round.

  Honest clients move alike in all rounds, so their part of earlier rounds is taken away: the
  projection on `total`, the sum of earlier rounds. Without a `total` nothing is taken away. A
  canary that takes part with probability p loses about p of its length. In few rounds it may lose
  more than that, so projection begins after some rounds. The adversary sees `moved` and `watched`,
  so the audit's bound stays sound.
  """
  total = watched.total
  if isinstance(directions, OwnParameters) or total is None:
    return along(directions, moved), total
  spread = _spread(moved)
  square = jnp.maximum(jnp.vdot(total, total), jnp.finfo(jnp.float32).tiny)
  share = jnp.where(watched.rounds < _FEW_ROUNDS, 0.0, jnp.vdot(total, spread) / square)
  new = spread - share * total
  return directions.along(new), total + spread


def _flatten(leaf: Array) -> Array:
  """Returns an array [..., n] in float32, with its largest singular values cut.

  The array is read as one matrix. Vectors, and matrices with two long sides, are not cut.
  """
  leaf = jnp.asarray(leaf, jnp.float32)
  if leaf.ndim < 2:
    return leaf
  tall = leaf.reshape(-1, leaf.shape[-1])
  tall = tall if tall.shape[0] >= tall.shape[1] else tall.T
  if tall.shape[1] > _MOST_VALUES:
    return leaf
  # Singular values come from the smaller Gram matrix, which is far cheaper than an SVD.
  squares, vectors = jnp.linalg.eigh(tall.T @ tall)
  values = jnp.sqrt(jnp.maximum(squares, 0.0))
  limit = _FLAT * jnp.median(values)
  factors = jnp.where(values > limit, limit / jnp.maximum(values, 1e-30), 1.0)
  cut = tall @ (vectors * factors[None]) @ vectors.T
  whole = cut if cut.shape[1] == leaf.shape[-1] else cut.T
  return jnp.where(limit > 0, whole.reshape(leaf.shape), leaf)


def round_scores(seen: Array, sampling_prob: float, *, opposite: bool = False) -> Array:
  """Returns the log-likelihood ratios of one round: [..., m] -> [..., m].

  A canary that is in takes part with probability `sampling_prob`, and then adds 1 to its entry. A
  canary that is out adds 0; with `opposite` it takes part as often, and adds -1. The width of
  the normal noise is estimated from the round's canaries.

  >>> seen = jnp.array([0.1, 1.1, -0.1, 0.0, 0.05, -0.05])
  >>> int(jnp.argmax(round_scores(seen, 0.5)))
  1
  """
  middle = jnp.median(seen, axis=-1, keepdims=True)
  width = _SPREAD * jnp.median(jnp.abs(seen - middle), axis=-1, keepdims=True)
  # Equal values have width 0, which cannot be a divisor.
  variance = jnp.maximum(width, 1e-3) ** 2
  # A canary that takes part in every round cannot be absent.
  stays = jnp.log1p(-sampling_prob) if sampling_prob < 1 else -jnp.inf
  ratio = lambda x: jnp.logaddexp(stays, jnp.log(sampling_prob) + (x - 0.5) / variance)
  return ratio(seen) - ratio(-seen) if opposite else ratio(seen)


def direction_scores(
  directions: Directions | OwnParameters, moved: ArrayTree, canaries: CanaryClients
) -> Scores:
  """Returns the lengths of the parameters' total movement along each canary's direction."""
  scores = jax.jit(lambda moved: along(directions, moved))(moved)
  return CanaryScores.separate(scores, canaries.included)


def watched_scores(
  directions: Directions | OwnParameters, state: ArrayTree, canaries: CanaryClients
) -> Scores:
  """Returns the scores of `watching`, from the state of the federated algorithm."""
  watched = [x for x in jax.tree.leaves(state, is_leaf=_is_watched) if _is_watched(x)]
  if watched[0].scores is None:
    return direction_scores(directions, watched[0].total, canaries)
  return CanaryScores.separate(watched[0].scores, canaries.included)


def client_loss_scores(
  loss_fn: LossFn, before: Params, after: Params, canaries: CanaryClients
) -> Scores:
  """Returns the decrease of each canary's mean loss over its rows; 0 for a canary without rows."""
  assert canaries.examples is not None
  gains = records.loss_gains(loss_fn, before, after, canaries.examples)
  count = lambda weights: np.bincount(canaries.owners, weights, len(canaries.included))
  return CanaryScores.separate(count(gains) / np.maximum(count(None), 1), canaries.included)
