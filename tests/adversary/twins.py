"""Broken twins: each subject of a game with a fault that its own games must refute.

| plant | what is broken                                                              |
| ----- | --------------------------------------------------------------------------- |
| noise | a tenth of the noise is drawn                                               |
| clip  | a record counts up to twice the bound; the noise stays                      |
| twice | every record is counted twice                                               |
| key   | one key draws the noise of two releases, or of two steps                    |

A twin makes the same claims as the honest subject. The same games and adversaries play it, and do
not know of the planted fault. If they do not refute it, they would also miss a real fault.

Each plant has a `SOUND` counterpart, which runs the same code without the fault (for `key`: a
second release of public data under a key of its own). It must not be refuted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import (
  federated,
  gradients,
  mechanisms,
  sampling,
  secure,
  transforms,
  validate,
)
from dpjax.auditing.games import accounting as accounting_games
from dpjax.auditing.games import federated as federated_games
from dpjax.auditing.games import mechanisms as mechanism_games
from dpjax.auditing.games import plans as plan_games
from dpjax.auditing.games import registry
from dpjax.auditing.games import relevance as relevance_games
from dpjax.auditing.games import samplers as sampler_games
from dpjax.auditing.games import secure as secure_games
from dpjax.auditing.games import shares as shares_games
from dpjax.auditing.games import silos as silo_games
from dpjax.auditing.games import training as training_games
from dpjax.auditing.games import transforms as transform_games
from dpjax.auditing.games import vertical as vertical_games
from dpjax.auditing.games.game import Game
from dpjax.federated import aggregation
from dpjax.federated.silos import Silos
from dpjax.gradients.arguments import examples_and_mask
from dpjax.noise import source
from dpjax.plan import Plan
from dpjax.relevance import labels, record_noise, rigorous
from dpjax.secure.distributed_noise import SkellamSum
from dpjax.secure.linear_regression import PrivateStatistics
from dpjax.secure.mpc.output_noise import OutputNoise
from dpjax.transforms import guard
from dpjax.types import ClippedSum, LossFn

_REUSED = "one"
_FRESH = "fresh"
# Number of a release, or of a key, that honest games do not use.
_FRESH_NUMBER = 2**30


class Plant(NamedTuple):
  """A fault: what differs from the honest subject. With the default values nothing differs."""

  noise: float = 1.0  # what is drawn / what is stated
  clip: float = 1.0  # the bound on a record / the one that is stated
  copies: int = 1  # how often each record counts
  keys: str = ""  # of a second release: "one" key for both, a "fresh" key; "": no release

  @property
  def releases(self) -> tuple[tuple[int, bool], ...]:
    """Returns (key number, whether the data are public) for each release.

    A record that is counted twice is released twice.
    """
    if self.keys:
      return ((0, False), (0 if self.keys == _REUSED else 1, True))
    return tuple((number, False) for number in range(self.copies))


PLANTS = {
  "noise": Plant(noise=0.1),
  "clip": Plant(clip=2.0),
  "twice": Plant(copies=2),
  "key": Plant(keys=_REUSED),
}
SOUND = {
  "noise": Plant(),
  "clip": Plant(),
  "twice": Plant(),
  "key": Plant(keys=_FRESH),
}

_ANSWER = "takes the answer to a query, whose sensitivity the caller states"
_NO_BOUND = "clips no record: one record moves a rank, a vote or a bin by 1 at most"
# (kind or kind.subject, plant) -> reason why this fault is impossible.
NOT_PLANTED: dict[tuple[str, str], str] = {
  **{
    (f"mechanisms.{name}", "clip"): _ANSWER
    for name in (
      *("Laplace", "Gaussian", "Exponential", "PermuteAndFlip", "ReportNoisyMax"),
      *("SparseVector",),
    )
  },
  **{
    (f"mechanisms.{name}", "clip"): _NO_BOUND
    for name in (
      *("Histogram", "Quantile", "SampleAndAggregateVote", "RandomizedResponse"),
      *("GNMax", "ConfidentGNMax", "OptimizedUnaryEncoding", "OptimizedLocalHashing"),
    )
  },
  **{
    (f"relevance.{name}", "clip"): "shares are on the simplex, and are not clipped"
    for name in ("relevance:laplace", "relevance:gaussian")
  },
  ("relevance.labels:randomized_response", "clip"): _NO_BOUND,
  **{
    (f"accounting.{name}", "clip"): _ANSWER
    for name in ("repeat_and_select_event", "Ledger", "BudgetLedger")
  },
  ("accounting.amplified_delta", "clip"): _NO_BOUND,
  ("silos.Silos", "key"): (
    "a message is the sum of a round's steps, whose equal noise would only add up; the keys of "
    "rounds and silos are those of round.py"
  ),
}


class BrokenTwin(NamedTuple):
  """A subject of the audit with one fault."""

  package: str
  subject: str
  plant: str

  @property
  def name(self) -> str:
    """Name that is unique among all twins."""
    return f"{self.package}.{self.subject}, {self.plant}"

  def games(self, *, sound: bool = False) -> list[Game]:
    """Returns the subject's games against the twin, the strongest one first.

    Args:
      sound: whether to play the same code without the fault.
    """
    plant = (SOUND if sound else PLANTS)[self.plant]
    return PACKAGES[self.package](self.subject, plant)


def twins(only: str = "") -> tuple[BrokenTwin, ...]:
  """Returns all twins; `only` is a kind, a subject or kind.subject, as for the games.

  Raises:
    UserError: nothing has that name.

  >>> [twin.plant for twin in twins("Laplace")]
  ['noise', 'twice', 'key']
  """
  every = (
    BrokenTwin(package, subject, plant)
    for package, subject in registry.subjects(only)
    for plant in PLANTS
  )
  return tuple(twin for twin in every if not reason(twin))


def reason(twin: BrokenTwin) -> str:
  """Returns the reason why there is no such twin; "" if the twin exists."""
  validate.one_of(PLANTS, plant=twin.plant)
  names = (twin.package, f"{twin.package}.{twin.subject}")
  reasons = [
    NOT_PLANTED[name, twin.plant] for name in names if (name, twin.plant) in NOT_PLANTED
  ]
  return reasons[0] if reasons else ""


# --- mechanisms

# Mechanisms whose twins repeat all records. Others, except `_OF_SHARDS`, double the answer.
_OF_RECORDS = (
  *("BoundedMean", "Histogram", "Quantile", "ChannelStatistics", "Whitening"),
  *("RandomizedResponse", "LeastSquares", "ClassSums"),
  *("OptimizedUnaryEncoding", "OptimizedLocalHashing"),
)
_OF_SHARDS = ("SampleAndAggregateMean", "SampleAndAggregateVote")
# Mechanisms whose number of records is private, so public data have `_PUBLIC_RECORDS` records.
_COUNTED = ("BoundedMean", "Histogram", "Quantile", "ChannelStatistics", "Whitening")
_COUNTED += ("LeastSquares", "ClassSums")
_PUBLIC_RECORDS = 2
# Public data of a second release. Zeros would hide that this release reuses the first noise.
_PUBLIC = {"Quantile": (4.9, 5.1), "SampleAndAggregateVote": (0, 1)}


class BrokenMechanism:
  """Mechanism that states what the honest one states, and makes releases with the plant's fault.

  Args:
    kind: class of mechanisms.
    name: name of the mechanism. If it is not in `_OF_RECORDS` or `_OF_SHARDS`, such as "", the data
      are the answer to a query.
    plant: the fault.
    settings: settings of the honest mechanism.

  >>> settings = dict(epsilon=1.0, l1_sensitivity=1.0)
  >>> broken = BrokenMechanism(mechanisms.Laplace, "", PLANTS["noise"], settings)
  >>> broken.scale, broken._broken.scale
  (1.0, 0.1)
  """

  def __init__(self, kind: Callable, name: str, plant: Plant, settings: dict[str, Any]):
    self._honest: Any = kind(**settings)
    self._broken: Any = kind(**_louder(settings, plant))
    self._name = name
    self._plant = plant

  def __call__(self, key: Any, data: Any, *others: Any) -> Any:
    seen = data
    if self._plant.copies > 1 and self._name in _OF_SHARDS:
      # Each shard gets all records, so that each record counts in every shard.
      (of_shard,) = others
      others = (lambda shard: of_shard(data),)
    elif self._plant.copies > 1:
      seen = _counted(data, self._name, self._plant.copies)
    # Statistics called as they are draw other noise for other data, whatever the key.
    after = getattr(self._broken, "after", None)
    draw = (lambda key, x: after(key, x, None)) if after else self._broken
    first = draw(key, seen, *others)
    if not self._plant.keys:
      return first
    again = key if self._plant.keys == _REUSED else jax.random.fold_in(key, _FRESH_NUMBER)
    second = draw(again, self._public(data), *others)
    return jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second)

  def at_once(self, draw: Callable[..., Any], keys: Any, data: Any) -> Any:
    """Returns the releases [n, ...] of many keys.

    Args:
      draw: function (an honest mechanism, keys, data) -> releases [n, ...].
    """
    seen = data
    if self._plant.copies > 1:
      seen = _counted(data, self._name, self._plant.copies)
    first = draw(self._broken, keys, seen)
    if not self._plant.keys:
      return first
    fresh = jax.vmap(lambda key: jax.random.fold_in(key, _FRESH_NUMBER))
    again = keys if self._plant.keys == _REUSED else fresh(keys)
    second = draw(self._broken, again, self._public(data))
    return jax.tree.map(lambda a, b: jnp.stack([a, b], axis=1), first, second)

  def _public(self, data: Any) -> np.ndarray:
    if self._name in _PUBLIC:
      return np.array(_PUBLIC[self._name], data.dtype)
    size = (_PUBLIC_RECORDS, *np.shape(data)[1:])
    return np.zeros(size if self._name in _COUNTED else np.shape(data), data.dtype)

  def __getattr__(self, name: str) -> Any:
    return getattr(self.__dict__["_honest"], name)


def _louder(settings: dict[str, Any], plant: Plant) -> dict[str, Any]:
  """Returns the settings of the mechanism that really runs, with the plant's noise and bound."""
  options = dict(settings)
  # If bounds and epsilon grow by the same factor, the noise stays unchanged.
  louder = plant.clip / plant.noise
  for name in ("epsilon", "epsilon_values"):
    if name in options:
      options[name] *= louder
  for name in ("noise_multiplier", "std", "check_std"):
    if name in options:
      options[name] /= louder
  if "clip_norms" in options:
    options["clip_norms"] = tuple(plant.clip * norm for norm in options["clip_norms"])
  if "feature_norm" in options:
    options["feature_norm"] *= plant.clip
  if "upper" in options:
    middle = (options["lower"] + options["upper"]) / 2
    half = plant.clip * (options["upper"] - options["lower"]) / 2
    options |= {"lower": middle - half, "upper": middle + half}
  return options


def _counted(data: Any, name: str, copies: int) -> Any:
  if name not in _OF_RECORDS:
    return copies * data
  library: Any = np if isinstance(data, np.ndarray) else jnp
  return library.concatenate([data] * copies)


def _mechanism(name: str, plant: Plant) -> list[Game]:
  kind = getattr(mechanisms, name)
  build = lambda **settings: BrokenMechanism(kind, name, plant, settings)
  return mechanism_games.GAMES[name](build)


# --- plans and transforms


def _wider(clip: Any, factor: float) -> gradients.Clip:
  """Returns the clip with every norm multiplied by a factor."""
  clip = gradients.Clip.of(clip)
  return dataclasses.replace(clip, norms=jax.tree.map(lambda c: factor * c, clip.norms))


def _in_steps(tx: Any, plant: Plant) -> optax.GradientTransformationExtraArgs:
  """Returns a private transform that counts rows `copies` times, or repeats its first noise."""

  def update(
    updates: Any, state: Any, params: Any = None, *, mask: Any = None, **others: Any
  ) -> Any:
    # A `ClippedSum` already counts the copies.
    if plant.copies > 1 and not isinstance(updates, ClippedSum):
      twice = lambda leaf: jnp.concatenate([leaf] * plant.copies)
      updates = gradients.wrap_grads(jax.tree.map(twice, updates.arrays))
      mask = twice(mask)
    noisy, after = tx.update(updates, state, params, mask=mask, **others)
    return noisy, (state if plant.keys == _REUSED else after)

  return optax.GradientTransformationExtraArgs(tx.init, update)


@dataclasses.dataclass(frozen=True)
class BrokenPlan(Plan):
  """Plan that accounts for what it states, and runs with the plant's fault."""

  plant: Plant = SOUND["noise"]

  @classmethod
  def like(cls, plan: Plan, plant: Plant) -> BrokenPlan:
    """Returns a copy of an honest plan, with the plant's fault."""
    return cls(**_fields(plan), plant=plant)

  def transform(self, key: jax.Array) -> optax.GradientTransformationExtraArgs:
    """Returns a transform with the plant's noise, clip norm, copies and keys."""
    # A guard of the plan would give NaN for more rows than a batch can hold, and know its mark.
    of_any = guard.with_guard
    with mock.patch.object(guard, "with_guard", lambda mechanism, **_: of_any(mechanism)):
      return _in_steps(_quieter(self, self.plant).transform(key), self.plant)

  def clipped_grad(self, loss_fn: LossFn, **options: Any) -> Any:
    """Returns the clipped gradient as in the broken transform: with its clip norm, and with
    each record counted `plant.copies` times."""
    clipped = _quieter(self, self.plant).clipped_grad(loss_fn, **options)
    twice = lambda leaf: jnp.concatenate([leaf] * self.plant.copies)

    def summed(params: Any, batch: Any, mask: Any = None) -> Any:
      examples, mask = examples_and_mask(batch, mask)
      return clipped(params, jax.tree.map(twice, examples), twice(mask))

    return summed


def _fields(plan: Plan) -> dict[str, Any]:
  return {field.name: getattr(plan, field.name) for field in dataclasses.fields(Plan)}


def _quieter(plan: Plan, plant: Plant) -> Plan:
  """Returns an honest plan with the plant's clip norm and noise."""
  noise = plan.noise_multiplier * plant.noise / plant.clip
  clip = _wider(plan.l2_clip_norm, plant.clip)
  return Plan(**(_fields(plan) | {"noise_multiplier": noise, "l2_clip_norm": clip}))


def _sampler(name: str, plant: Plant) -> list[Game]:
  make_plan = functools.partial(BrokenPlan, plant=plant)
  return sampler_games.games(getattr(sampling, name), make_plan)


# These transforms clip and add noise themselves. Games put all others around `clip_and_noise`, or
# after it.
_PRIVATE = ("clip_and_noise", "adaptive_clip_and_noise", "clip_and_correlated_noise")


def _broken_transform(make: Callable, plant: Plant) -> Callable:
  """Returns the function that makes a private transform, with the plant's fault."""

  def broken(*arguments: Any, **options: Any) -> Any:
    if "noise_multiplier" in options:
      options["noise_multiplier"] *= plant.noise / plant.clip
    if "l2_clip_norm" in options:
      options["l2_clip_norm"] = _wider(options["l2_clip_norm"], plant.clip)
    return _in_steps(make(*arguments, **options), plant)

  return broken


def _transform(name: str, plant: Plant) -> list[Game]:
  honest = registry.PACKAGES["transforms"].find()[name]
  if name in _PRIVATE:
    return transform_games.GAMES[name](_broken_transform(honest, plant))
  if name != "accumulate":
    return transform_games.GAMES[name](
      honest, _broken_transform(transforms.clip_and_noise, plant)
    )
  # `accumulate` itself clips the rows and counts their copies. It draws no noise, so it gets no
  # fault of keys. The transform inside it adds the noise of a whole step, so it counts no copies.
  outside = plant._replace(keys="")
  inside = plant._replace(copies=1)
  base = _broken_transform(transforms.clip_and_noise, inside)
  return transform_games.GAMES[name](_broken_transform(honest, outside), base)


# --- federated


def _central(plant: Plant) -> Callable[[Plan, Any], federated.Aggregator]:
  def aggregate(plan: Plan, key: Any) -> federated.Aggregator:
    loud = federated.central(_quieter(plan, plant), key)
    return _in_rounds(loud.init, loud, plan, plant)

  return aggregate


def _in_rounds(
  init: Callable, loud: federated.Aggregator, plan: Plan, plant: Plant
) -> federated.Aggregator:
  """Returns an aggregator that counts clients `copies` times, or repeats its first noise."""
  assert loud.partial is not None
  assert loud.finish is not None
  sums = loud.partial
  release = loud.finish

  def partial(state: Any, *of_clients: Any) -> Any:
    twice = lambda leaf: jnp.concatenate([leaf] * plant.copies)
    return sums(state, *jax.tree.map(twice, of_clients))

  def finish(summed: Any, state: Any) -> Any:
    released, after = release(summed, state)
    return released, (state if plant.keys == _REUSED else after)

  return aggregation.by_sums(init, partial, finish, private=True, plan=plan)


def _dp_mean(plant: Plant) -> Callable[..., federated.Aggregator]:
  """Returns a broken `dp_mean`, with the key of the honest one."""

  def broken(tx: Any, *, l2_clip_norm: Any) -> federated.Aggregator:
    honest = federated.dp_mean(tx, l2_clip_norm=l2_clip_norm)
    plan = federated_games.the_plan()
    quieter = _quieter(plan, plant)

    def init(message: Any) -> Any:
      # The honest state would be refused: its checksum is that of the noise that is accounted for.
      key = source.from_words(honest.init(message).inner.key)
      return federated.central(quieter, key).init(message)

    return _in_rounds(init, federated.central(quieter, jax.random.key(0)), plan, plant)

  return broken


def _client_noise(plant: Plant) -> Callable[..., Any]:
  """Returns a broken `client_noise`. Its clients send one message for each release of the plant."""

  def broken(client: Any, *, l2_clip_norm: float, noise_multiplier: float) -> Any:
    local = federated.client_noise(
      client,
      l2_clip_norm=plant.clip * l2_clip_norm,
      noise_multiplier=noise_multiplier * plant.noise / plant.clip,
    )

    def init(received: Any, memory: Any, size: Any, key: Any) -> Any:
      sizes = [jnp.int32(1) if public else size for _, public in plant.releases]
      # The first message has the key of an honest client's message.
      keys = [jax.random.fold_in(key, n) if n else key for n, _ in plant.releases]
      return tuple(local.init(received, memory, *each) for each in zip(sizes, keys))

    def step(received: Any, states: Any, x: Any, mask: Any) -> Any:
      seen = [jnp.zeros_like(x) if public else x for _, public in plant.releases]
      return tuple(local.step(received, o, s, mask) for o, s in zip(states, seen))

    def finish(received: Any, states: Any) -> Any:
      return tuple(local.finish(received, state)[0] for state in states), None, None

    return local._replace(init=init, step=step, finish=finish)

  return broken


def _federated(name: str, plant: Plant) -> list[Game]:
  kinds: dict[str, Callable[[Plant], Any]] = {
    "dp_mean": _dp_mean,
    "central": _central,
    "client_noise": _client_noise,
  }
  found = registry.PACKAGES["federated"].find()
  kind = kinds[name](plant) if name in kinds else found[name]
  return federated_games.GAMES[name](kind, _central(plant))


# --- silos


class _BrokenSilos(Silos):
  """Silos that account for what they state, and run with the plant's fault."""

  plant = SOUND["noise"]

  def noise(self) -> Any:
    numbers = super().noise()
    return numbers._replace(std=self.plant.noise * numbers.std)

  def noisy(self, summed: ClippedSum, local: Any) -> Any:
    # Far records have the length of the bound, so twice the bound is twice the record.
    more = self.plant.clip * self.plant.copies - 1
    extra = lambda noisy, total: noisy + more * local.silo.scale * total
    return jax.tree.map(extra, super().noisy(summed, local), summed.total)


def _silos(name: str, plant: Plant) -> list[Game]:
  kind = type("BrokenSilos", (_BrokenSilos,), {"plant": plant})
  return silo_games.GAMES[name](kind)


# --- noise inside a secure sum


@dataclasses.dataclass(frozen=True)
class _Copied(SkellamSum):
  """A sum in which every client's integers count `copies` times."""

  copies: int = 1

  def encode(self, rng: np.random.Generator, vector: Any, signs: jax.Array) -> np.ndarray:
    """Returns the honest encoding, multiplied by the number of copies."""
    return self.copies * super().encode(rng, vector, signs)


def _skellam_mean(plant: Plant) -> Callable[..., Any]:
  def broken(protocol: Any, mechanism: SkellamSum, **options: Any) -> Any:
    variance = mechanism.noise.share_variance * plant.noise**2
    names = [field.name for field in dataclasses.fields(SkellamSum)]
    fields = {name: getattr(mechanism, name) for name in names} | {
      "l2_clip_norm": plant.clip * mechanism.l2_clip_norm,
      "noise": dataclasses.replace(mechanism.noise, share_variance=variance),
    }
    aggregator = secure.skellam_mean(
      protocol, _Copied(**fields, copies=plant.copies), **options
    )
    if not plant.keys:
      return aggregator
    away = 0 if plant.keys == _REUSED else _FRESH_NUMBER

    def update(messages: Any, mask: Any, state: int, weights: Any = None) -> Any:
      first, after = aggregator.update(messages, mask, state, weights)
      second, _ = aggregator.update(np.zeros_like(messages), mask, state + away, weights)
      return np.concatenate([first, second]), after

    return aggregator._replace(update=update)

  return broken


def _secure(name: str, plant: Plant) -> list[Game]:
  return secure_games.GAMES[name](_skellam_mean(plant))


# --- relevance


def _released(
  answer: Callable[[Any, bool], np.ndarray], key: Any, plant: Plant
) -> np.ndarray:
  """Returns `answer(key, public)` of all releases, joined along the last axis: [n, ...]."""
  keys = [jax.random.fold_in(key, n) if n else key for n, _ in plant.releases]
  answers = [
    answer(release_key, public) for release_key, (_, public) in zip(keys, plant.releases)
  ]
  return answers[0] if len(answers) == 1 else np.concatenate(answers, axis=-1)


def _noisy_records(plant: Plant) -> Callable[..., np.ndarray]:
  def broken(key: Any, ids: Any, x: Any, scales: Any, **options: Any) -> np.ndarray:
    quiet = plant.noise * np.asarray(scales)
    wide = plant.clip * np.asarray(x)

    def release(release_key: Any, public: bool) -> np.ndarray:
      seen = np.zeros_like(wide) if public else wide
      return record_noise.noisy_records(release_key, ids, seen, quiet, **options)

    return _released(release, key, plant)

  return broken


def _noisy_relevance(plant: Plant) -> Callable[..., np.ndarray]:
  def broken(key: Any, relevance: Any, *, epsilon: float, **options: Any) -> np.ndarray:
    counted = plant.copies * np.asarray(relevance)

    def release(release_key: Any, public: bool) -> np.ndarray:
      seen = np.zeros_like(counted) if public else counted
      return rigorous.noisy_relevance(
        release_key, seen, epsilon=epsilon / plant.noise, **options
      )

    return _released(release, key, plant._replace(copies=1))

  return broken


def _answers(
  plant: Plant, key: Any, ids: Any, true_labels: Any, *, epsilon: float, num_classes: int
) -> np.ndarray:
  """Returns the noisy labels [n, releases] of every record."""

  def release(release_key: Any, public: bool) -> np.ndarray:
    seen = np.zeros_like(true_labels) if public else true_labels
    loud = epsilon / plant.noise
    noisy = labels.noisy_labels(
      release_key, ids, seen, epsilon=loud, num_classes=num_classes
    )
    return np.asarray(noisy)[:, None]

  return _released(release, key, plant)


def _noisy_labels(plant: Plant) -> Callable[..., np.ndarray]:
  def broken(
    key: Any, ids: Any, true_labels: Any, *, epsilon: float, num_classes: int
  ) -> Any:
    answers = _answers(
      plant, key, ids, true_labels, epsilon=epsilon, num_classes=num_classes
    )
    # The game expects one label, so all answers of a record become one number.
    return answers @ (num_classes ** np.arange(answers.shape[1]))

  return broken


def _relevance(name: str, plant: Plant) -> list[Game]:
  kind, _, which = name.partition(":")
  broken: Any = functools.partial(BrokenPlan.like, plant=plant)
  if kind == "features" or which == "radp":
    broken = _noisy_records(plant)
  if kind == "relevance":
    broken = _noisy_relevance(plant)
  if kind == "labels":
    broken = _noisy_labels(plant)
  return relevance_games.GAMES[name](broken)


# --- totals


def _accounting(name: str, plant: Plant) -> list[Game]:
  if name == "amplified_delta":
    return accounting_games.GAMES[name](_reports(plant))
  which = "Laplace" if name == "BudgetLedger" else "Gaussian"
  kind = getattr(mechanisms, which)
  build = lambda **settings: BrokenMechanism(kind, which, plant, settings)
  return accounting_games.GAMES[name](build)


def _reports(plant: Plant) -> Callable[..., np.ndarray]:
  """Returns a broken `noisy_labels` for shuffled rounds, which sums the answers of each record.
  Answers on public data stay apart."""

  def broken(
    key: Any, ids: Any, true_labels: Any, *, epsilon: float, num_classes: int
  ) -> Any:
    answers = _answers(
      plant, key, ids, true_labels, epsilon=epsilon, num_classes=num_classes
    )
    return answers if plant.keys else answers.sum(axis=1)

  return broken


def _of_plan(games: dict[str, Callable[..., list[Game]]]) -> Callable[..., list[Game]]:
  """Returns the function (subject, plant) -> games, for games that make their plan themselves."""
  return lambda name, plant: games[name](functools.partial(BrokenPlan, plant=plant))


# --- statistics of other columns


class _Statistics:
  """Statistics that state what the honest ones state, and are released with the plant's fault."""

  def __init__(self, plant: Plant, settings: dict[str, Any]):
    self._plant = plant
    self._honest = PrivateStatistics(**settings)
    bounds = {name: plant.clip * settings[name] for name in ("x_bound", "y_bound")}
    wide = PrivateStatistics(**(settings | bounds))
    noise = plant.noise * self._honest.std / wide.l2_sensitivity
    self._broken = dataclasses.replace(wide, noise_multiplier=noise)

  def epsilon(self, *, delta: float) -> float:
    """Returns the epsilon of the honest statistics."""
    return self._honest.epsilon(delta=delta)

  def exact(self, clients: Any) -> np.ndarray:
    """Returns the sums, in which a record counts as often as the fault says."""
    return self._broken.exact([*clients] * self._plant.copies)

  def noisy(self, key: Any, vector: Any) -> jax.Array:
    """Returns the noisy sums of all releases, concatenated."""
    first = self._broken.noisy(key, vector)
    if not self._plant.keys:
      return first
    again = key if self._plant.keys == _REUSED else jax.random.fold_in(key, _FRESH_NUMBER)
    second = self._broken.noisy(again, np.zeros(vector.shape))
    return jnp.concatenate([first, second])


def _vertical(name: str, plant: Plant) -> list[Game]:
  return vertical_games.GAMES[name](lambda **settings: _Statistics(plant, settings))


# --- a model opened from shares


class _Opened:
  """Release that states what the honest one states, and opens weights with the plant's fault."""

  def __init__(self, plant: Plant, settings: dict[str, Any]):
    self._plant = plant
    self._honest = OutputNoise(**settings)
    wide = plant.clip * self._honest.feature_norm
    # The learning rate stays that of the honest training.
    settings = settings | {"feature_norm": wide, "learning_rate": self._honest.rate}
    self._broken = OutputNoise(**settings)
    self.rows = self._broken.rows
    self.labels = self._honest.labels
    self.in_the_clear = self._broken.in_the_clear

  def epsilon(self, *, delta: float) -> float:
    """Returns the epsilon of the honest release."""
    return self._honest.epsilon(delta=delta)

  def views(self, weights: np.ndarray, seed: int, n: int) -> np.ndarray:
    """Returns all releases, concatenated; each has the noise that the fault leaves."""
    drawn = []
    counted = self._plant.copies * weights
    for number, is_public in self._plant._replace(copies=1).releases:
      exact = np.zeros_like(weights) if is_public else counted
      seen = shares_games.views(self._honest, exact, seed + number * _FRESH_NUMBER, n)
      drawn.append(exact + self._plant.noise * (seen - exact))
    return np.concatenate(drawn, axis=1)


def _shares(name: str, plant: Plant) -> list[Game]:
  return shares_games.GAMES[name](lambda **settings: _Opened(plant, settings))


PACKAGES: dict[str, Callable[[str, Plant], list[Game]]] = {
  "mechanisms": _mechanism,
  "samplers": _sampler,
  "transforms": _transform,
  "federated": _federated,
  "silos": _silos,
  "secure": _secure,
  "plans": _of_plan(plan_games.GAMES),
  "training": _of_plan(training_games.GAMES),
  "vertical": _vertical,
  "shares": _shares,
  "accounting": _accounting,
  "relevance": _relevance,
}
