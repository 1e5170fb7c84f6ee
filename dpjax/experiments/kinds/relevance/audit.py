"""Attacks the methods of `dpjax.relevance`; each attack gives a lower bound on the true epsilon.

| attack | what it tells apart                                    | where                       |
| ------ | ------------------------------------------------------ | --------------------------- |
| U1     | noisy features of two very different records, by their | independent noise for each  |
|        | likelihood ratio                                       | record                      |
| U2     | a record, by subtracting a known record                | noise shared by records     |
| U3     | canaries with a wrong label, by their loss (one run)   | where labels are private    |
| U4     | members among random canaries, by their loss (one run) | every method                |

Each bound holds with confidence 1 - 0.05 / (number of attacks), so the largest bound holds with
95 %. U1 attacks the local release. Under shuffling, its bound is compared with the local epsilon,
and not with the central epsilon.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import auditing, losses, relevance
from dpjax.auditing import likelihood
from dpjax.auditing.canaries import loss_scores
from dpjax.auditing.scores import Scores
from dpjax.experiments.config.choices import name_of
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.key_uses import KeyUse, key_for
from dpjax.relevance import record_noise as noise_lib
from dpjax.relevance import rigorous
from dpjax.relevance.inputs import Outcome

CONFIDENCE = 0.95
_KINDS = {"U3": "mislabelled", "U4": "random"}
_LOCAL = "features, local"
_AGAIN = (
  "U3 and U4 trained on the records again, with noise of their own. The epsilon of this run covers "
  "neither of their bounds: show them to nobody who may not see the records."
)
# Number of decimals kept of a log likelihood ratio. Float32 noise has no more precision.
_DIGITS = 4


class Bound(NamedTuple):
  """Holds an attack's result: a lower bound, the name of the bounded epsilon, a description."""

  epsilon_lower: float
  target: str  # epsilon that is bounded: "total" | "features, local"
  what: str
  ceiling: float  # what perfect scores would have shown


def facts(
  config: RelevanceConfig, job: relevance.Inputs, outcome: Outcome
) -> dict[str, Any]:
  """Returns the audit's part of result.json; {} if no attack applies."""
  attacks = _attacks(config, job, outcome)
  if not attacks:
    return {}
  # This is a union bound over the attacks. Their number is fixed before any attack runs.
  confidence = 1 - (1 - CONFIDENCE) / len(attacks)
  bounds = {name: attack(confidence) for name, attack in attacks.items()}
  total = {name: b.epsilon_lower for name, b in bounds.items() if b.target == "total"}
  strongest = max(total, key=lambda name: total[name]) if total else None
  lower = total[strongest] if strongest else 0.0
  stated = outcome.privacy.epsilon
  local = {name: b.epsilon_lower for name, b in bounds.items() if b.target == _LOCAL}
  # Epsilon of one record's features before the shuffler, as the run accounted for it.
  details = outcome.privacy.details
  accounted = details["epsilon_local"] - details["epsilon_labels"] if local else 0.0
  over = [name for name, bound in local.items() if bound > accounted]
  of = {"total": math.inf if stated is None else stated, _LOCAL: accounted}
  can_refute = any(bound.ceiling > of[bound.target] for bound in bounds.values())
  again = config.audit is not None and config.audit.canary_runs
  return {
    "epsilon_audited_lower": lower,
    "audit": {
      "strongest": strongest,
      "confidence": CONFIDENCE,
      "refuted": bool(over) or (stated is not None and lower > stated),
      "refuted_locally": over,
      "can_refute": can_refute,
      "bounds": {name: bound._asdict() for name, bound in bounds.items()},
      "note": _AGAIN if again else "",
    },
  }


def _attacks(config: RelevanceConfig, job: relevance.Inputs, outcome: Outcome):
  """Returns a dict from the name of an attack to a function (confidence) -> Bound.

  The choice of attacks depends on no result of an attack.
  """
  attacks: dict[str, Callable[[float], Bound]] = {}
  draw = outcome.privacy.details.get("draw")
  if draw in ("batch", "run"):
    attacks["U2"] = lambda c: _shared_noise(config, job, outcome, c)
  elif outcome.noise is not None:
    attacks["U1"] = lambda c: _features(config, job, outcome, c)
  if config.audit is not None and config.audit.canary_runs:
    # With public labels the guarantee covers features only, so U3, on wrong labels, is left out.
    public = outcome.privacy.neighboring_relation == rigorous.FEATURES_ONLY
    for name in ("U4",) if public else _KINDS:
      attacks[name] = lambda c, name=name: _canaries(config, job, outcome, name, c)
  return attacks


# --- U1 and U2: the mechanism itself


def worst_pair(
  shape: tuple[int, ...], beta: np.ndarray, clip: float | None
) -> tuple[np.ndarray, np.ndarray]:
  """Returns two records that are easy to tell apart under independent noise.

  Without a clip, one record is all 0, and the other record is all 1. With a weighted L1 clip, each
  record is 1 on some features and 0 on all others. Its norm is at most `clip`, up to rounding. No
  feature is 1 in both records.

  >>> worst_pair((4,), np.full(4, 0.25), 0.25)[1].tolist()
  [0.0, 0.0, 0.0, 1.0]
  >>> [record.tolist() for record in worst_pair((2,), np.full(2, 0.5), 2.0)]
  [[1.0, 1.0], [0.0, 0.0]]
  """
  if clip is None:
    return np.zeros(shape, np.float32), np.ones(shape, np.float32)
  weights = np.broadcast_to(noise_lib.by_feature(beta, shape), shape).reshape(-1)
  # The factor allows for rounding of the cumulative sum, which could exclude the last feature.
  limit = clip * (1 + 1e-6)
  used = np.cumsum(weights) <= limit
  last = np.cumsum(weights[::-1])[::-1] <= limit
  first = used.astype(np.float32)
  other = (last & ~used).astype(np.float32)
  return first.reshape(shape), other.reshape(shape)


def _features(config: Any, job: Any, outcome: Any, confidence: float) -> Bound:
  """Returns the bound of U1. The records of `worst_pair` get the method's noise many times, and the
  likelihood ratio tells them apart."""
  noise = outcome.noise
  n = config.audit.num_trials
  pair = noise.clipped(np.stack(worst_pair(noise.shape, noise.beta, noise.l1_clip)))
  keys = jax.random.split(key_for(KeyUse.RECORD_AUDIT, job.keys.noise))
  outputs = [
    noise_lib.noisy_records(
      key,
      np.arange(n),
      np.broadcast_to(x, (n, *noise.shape)),
      noise.scales,
      mechanism=noise.mechanism,
      shared_channels=noise.shared_channels,
      grid=noise.grid,
    )
    for key, x in zip(keys, pair)
  ]
  laplace = noise.mechanism == "laplace"
  score = likelihood.laplace_log_ratio if laplace else likelihood.gaussian_log_ratio
  ratio = score(pair[0], pair[1], noise_lib.by_feature(noise.scales, noise.shape))
  outside, inside = (np.round(ratio(noisy), _DIGITS) for noisy in outputs)
  scores = Scores(inside=inside, outside=outside)
  delta = outcome.privacy.delta or 0.0
  local = config.is_rigorous and config.method.shuffle
  what = f"likelihood ratio of one record's noisy features, {n} draws on each side"
  by = functools.partial(auditing.clopper_pearson, delta=delta, confidence=confidence)
  return _bound(by, scores, _LOCAL if local else "total", what)


def _bound(by: Callable[[Scores], float], scores: Scores, target: str, what: str) -> Bound:
  sides = len(scores.inside), len(scores.outside)
  perfect = Scores(inside=np.ones(sides[0]), outside=np.zeros(sides[1]))
  return Bound(by(scores), target, what, by(perfect))


def shared_noise_scores(
  key: jax.Array,
  scales: Any,
  shape: tuple[int, ...],
  num_trials: int,
  *,
  clip_after: float | None = None,
  **options: Any,
) -> Scores:
  """Returns the scores of an attacker who knows one record of a batch of two.

  The known record is all 0. The attacker must tell whether the other record is all 0 or all 1, in
  `num_trials` batches of either kind. A score is the largest difference of the two noisy records.
  An entry that is clipped in both records reveals nothing. Any other entry reveals everything.
  """
  shaped = jnp.asarray(noise_lib.by_feature(scales, shape))
  # An infinite limit means that nothing is clipped after the noise.
  limit = jnp.inf if clip_after is None else clip_after

  @jax.jit
  def score(key, target):
    batch = jnp.stack([target, jnp.zeros(shape)])
    noisy = jnp.clip(noise_lib.noisy_batch(key, batch, shaped, **options), -limit, limit)
    return jnp.max(noisy[0] - noisy[1])

  def many(value: float, purpose: int) -> np.ndarray:
    # Batches of each kind draw their own noise, since the test assumes independence.
    mine = jax.random.fold_in(key, purpose)
    target = jnp.full(shape, value, jnp.float32)
    run = jax.vmap(lambda i: score(jax.random.fold_in(mine, i), target))
    return np.asarray(run(jnp.arange(num_trials)), np.float64)

  return Scores(inside=many(1.0, 1), outside=many(0.0, 0))


def _shared_noise(config: Any, job: Any, outcome: Any, confidence: float) -> Bound:
  noise = outcome.noise
  scores = shared_noise_scores(
    key_for(KeyUse.BATCH_AUDIT, job.keys.noise),
    noise.scales,
    noise.shape,
    config.audit.num_trials,
    clip_after=noise.clip_after,
    mechanism=noise.mechanism,
    shared_channels=noise.shared_channels,
  )
  delta = outcome.privacy.delta or 0.0
  by = functools.partial(auditing.clopper_pearson, delta=delta, confidence=confidence)
  what = f"difference of two records of a batch, {config.audit.num_trials} batches each"
  return _bound(by, scores, "total", what)


# --- U3 and U4: the released model


def _canaries(config: Any, job: Any, outcome: Any, name: str, confidence: float) -> Bound:
  """Returns the bound of U3 or U4. Trains again with canaries, each in by a fair coin, and scores
  them by their loss.

  A proof is tested under its own relation. All else is tested under replace_one, the relation of
  theorem 2 of the RADP paper. Where labels count as public, proved or claimed, no canary has
  another label than its row.
  """
  privacy = outcome.privacy
  features_only = privacy.neighboring_relation == rigorous.FEATURES_ONLY
  proved = privacy.kind == "proved" and not features_only
  relation = privacy.neighboring_relation if proved else rigorous.RELATION
  mixed, canaries = auditing.insert_canaries(
    job.train,
    num_canaries=min(config.audit.num_canaries, len(job.train)),
    seed=config.seed,
    kind=_KINDS[name],
    neighboring_relation=relation,
    keep_labels=features_only,
  )
  # This run gets new noise. With the noise of the released run, the two models would differ only by
  # their data.
  which = sorted(_KINDS).index(name)
  key = jax.random.fold_in(key_for(KeyUse.CANARY_AUDIT, job.keys.noise), which)
  run_keys = job.keys._replace(noise=key, secret=job.keys.secret + 2000 + which)
  again = dataclasses.replace(job, train=mixed, memo={}, keys=run_keys)
  attacked = relevance.run(name_of(config, "method"), again)
  seen = dataclasses.replace(canaries.examples, x=attacked.prepare(canaries.examples.x))
  scores = loss_scores(
    losses.softmax_cross_entropy(attacked.apply),
    attacked.initial,
    attacked.params,
    canaries._replace(examples=seen),
  )
  delta = privacy.delta or 0.0
  by = functools.partial(auditing.one_run, delta=delta, confidence=confidence)
  what = f"{len(canaries.included)} {_KINDS[name]} canaries in one run, {relation}"
  return _bound(by, scores, "total", what)
