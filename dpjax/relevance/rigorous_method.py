"""RADP with a proof: stages A, B, C, L and S of `rigorous`, and the training after them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax import accounting
from dpjax.relevance import (
  feature_budget,
  feature_shares,
  gradient_methods,
  labels,
  privacy,
  record_noise,
  rigorous,
  train,
)
from dpjax.relevance.inputs import FEATURES, LABELS, RELEVANCE, Inputs, RecordNoise
from dpjax.relevance.rigorous import StageCharge
from dpjax.relevance.settings import Rigorous
from dpjax.validate import UserError

# Assumed variance of a pixel. It depends on no data, so any number keeps the guarantee.
_PIXEL_VARIANCE = 0.1
_FLOAT_NOTE = (
  "Laplace and Gaussian samples are float32 with tails to 133 scales and 9.49 std, rounded "
  "with the record to a public grid of 1/64, or for scales above 2 of between 1/256 and 1/128 of "
  "the scale; the proof is for real-valued noise"
)


class _Prepared(NamedTuple):
  """Records of D2 after stages C, L and S, and the transformation of test inputs for model 2."""

  records: Callable[[int], tuple[np.ndarray, np.ndarray]]  # epoch -> records
  class_priors: np.ndarray
  test: Any
  prepare: Callable[[np.ndarray], np.ndarray]
  noise: RecordNoise
  charges: list[StageCharge]
  details: dict[str, Any]


def radp_rigorous(job: Inputs) -> train.Story:
  """Runs RADP with a proof, stages A to S of `rigorous`; training afterwards is post-processing.
  With model1="public" the epsilon is a claim: it assumes no private record in the public data.

  The noise depends on the settings and on the records. A second run with the same keys and
  another epsilon, or other records, shares no noise with the first.
  """
  rigorous.check_domain(**{"train.x": job.train.x, "test.x": job.test.x})
  unbound = job
  job = job.bound(job.rigorous)
  ids_1, ids_2 = _ids(job)
  beta = feature_budget.uniform(feature_shares.num_features(_pooled_shape(job)))
  charges: list[StageCharge] = []
  if job.rigorous.model1 != "none":
    # Only later stages and the post-processing of stage B read these settings. The keys of A and B
    # are made with their default values, so these settings do not change the noise of A and B.
    later = ("features", "clip", "labels", "label_share", "draw", "compose_fresh")
    default = {name: getattr(Rigorous(), name) for name in (*later, "beta_power", "floor")}
    beta, charges = yield from _stages_a_b(
      unbound.bound(dataclasses.replace(unbound.rigorous, **default)), ids_1
    )
  spent = 0.0 if job.rigorous.split else math.fsum(charge.epsilon for charge in charges)
  prepared = _stages_c_l_s(job, beta, ids_2, job.epsilon - spent)
  charges = [*charges, *prepared.charges]
  epsilon, delta = rigorous.total(charges)
  public = job.rigorous.labels == "public"
  rests_on = ()
  if job.rigorous.model1 == "public":
    # This assumption cannot be checked, since a copy of a private record may differ in one bit.
    rests_on = (f"no private record is known to the public data {job.public.name}",)
  guarantee = privacy.proof_record(
    epsilon,
    delta,
    rigorous.FEATURES_ONLY if public else rigorous.RELATION,
    unit=rigorous.FEATURES_UNIT if public else "example",
    ledger=charges,
    notes=_notes(job),
    rests_on=rests_on,
    **prepared.details,
  )
  epsilon_l = prepared.details["epsilon_labels"]
  k = job.train.num_classes
  transitions = labels.transition(epsilon_l, k) if epsilon_l else np.eye(k)
  net = job.nets.second
  outcome = yield from job.outcome(
    net,
    train.corrected_loss(net.apply, transitions, prepared.class_priors),
    prepared.records,
    guarantee,
    len(ids_2),
    prepared.test,
    weight_decay=job.training.weight_decay,
    # Without annealing, the noise of the last steps would drown the small signal.
    anneal=True,
  )
  return outcome._replace(
    prepare=prepared.prepare, noise=prepared.noise, maps={"beta": beta}
  )


def _ids(job: Inputs) -> tuple[np.ndarray, np.ndarray]:
  """Returns the ids of D1 and of D2. Without a split or without model 1, both are all records."""
  how = job.rigorous
  n = len(job.train)
  if how.model1 == "none" or not how.split:
    parts = np.arange(n), np.arange(n)
  else:
    parts = rigorous.split_by_hash(n, how.split_share)
  if not all(map(len, parts)):
    raise UserError(
      f"its {n} records leave {len(parts[0])} for the relevance and "
      f"{len(parts[1])} for the features; both must be >= 1",
      field="train",
    )
  return parts


def _pool(job: Inputs) -> int:
  return job.rigorous.pool if len(job.shape) == 3 else 1


def _pooled_shape(job: Inputs) -> tuple[int, ...]:
  return rigorous.pool(job.train.x[:1], _pool(job)).shape[1:]


def _stages_a_b(job: Inputs, ids: np.ndarray) -> train.Story:
  """Returns (beta from the records `ids`, charges of stages A and B for these records)."""
  how = job.rigorous
  where = "D1" if how.split else "all"
  data = job.train.subset(ids)
  shared = how.model1 == "dp_sgd" and not how.split
  cap = job.epsilon * how.budget_share_1 if shared else job.epsilon
  # Whether the same records also bear the cost of model 1, or of the features.
  more = how.model1 == "dp_sgd" or not how.split
  if how.epsilon_b > cap or (how.epsilon_b >= cap and more):
    raise UserError(
      f"must leave room in the {cap:g} that model 1 and the relevance may cost",
      field="rigorous.epsilon_b",
      value=how.epsilon_b,
    )
  theta_1, charges = yield from _model_1(job, data, cap - how.epsilon_b, where)
  share = feature_shares.mean_shares(
    job.nets.first.apply, theta_1, data, job.lrp, norm=how.rel_norm
  )
  delta_b = how.delta / 4 if how.rel_noise == "gaussian" else 0.0
  noisy = rigorous.noisy_relevance(
    job.keys.key(RELEVANCE),
    rigorous.pooled_shares(share, job.shape, _pool(job)),
    num_records=len(data),
    epsilon=how.epsilon_b,
    delta=delta_b,
  )
  floor = feature_budget.default_floor(len(noisy)) if how.floor is None else how.floor
  what = f"mean relevance of {len(data)} records with {how.rel_noise} noise"
  charges.append(StageCharge("B", where, how.epsilon_b, delta_b, what))
  return feature_budget.floor_normalized(noisy, floor, how.beta_power), charges


def _model_1(job: Inputs, data: Any, epsilon: float, where: str) -> train.Story:
  """Returns (parameters of model 1, charges of stage A). The parameters are untrained, from public
  data, or from DP-SGD on `data`."""
  how = job.rigorous
  model = job.nets.first
  if how.model1 == "untrained":
    what = "initial parameters: independent of the data"
    return job.initial(model, data.x, 1), [StageCharge("A", where, 0.0, 0.0, what)]
  if how.model1 == "public":
    if job.public is None:
      raise UserError(
        "needs public data of the same shape", field="rigorous.model1", value="public"
      )
    check_public(job.train, job.public)
    what = f"trained on public data ({job.public.name})"
    theta = yield from job.model_1(job.public)
    return theta, [StageCharge("A", where, 0.0, 0.0, what)]
  plan = gradient_methods.make_plan(
    job, len(data), epsilon, delta=how.delta / 2, relation=rigorous.RELATION
  )
  theta = yield gradient_methods.train_model_1(job, model, data, plan)
  spent = plan.epsilon()
  return theta, [StageCharge("A", where, spent, plan.delta, "model 1 by DP-SGD")]


def check_public(train: Any, public: Any) -> None:
  """Raises UserError if supposedly public data hold private records, or cannot be used.

  Private records in public data would go unaccounted. Only exact copies of an image are found.

  Args:
    train, public: `dpjax.data.Dataset`s.
  """
  kinds = [(dataset.x.shape[1:], dataset.num_classes) for dataset in (public, train)]
  if kinds[0] != kinds[1]:
    raise UserError(
      f"has images {kinds[0][0]} of {kinds[0][1]} classes; must be as those "
      f"of {train.name!r}, {kinds[1][0]} of {kinds[1][1]}",
      field="public",
      value=public.name,
    )
  private = {row.tobytes() for row in np.asarray(train.x)}
  shared = sum(row.tobytes() in private for row in np.asarray(public.x))
  if shared:
    raise UserError(
      f"{shared} of its records are in the training data {train.name!r}, which "
      "are private; use other data, or rigorous.model1='dp_sgd'",
      field="public",
      value=public.name,
    )


def _delta_s(job: Inputs) -> float:
  """Returns the delta of stages C, L and S. If stages A and B use the same records, it is a quarter
  of the total."""
  how = job.rigorous
  return how.delta if how.split or how.model1 == "none" else how.delta / 4


def _stages_c_l_s(
  job: Inputs, beta: np.ndarray, ids: np.ndarray, epsilon: float
) -> _Prepared:
  how = job.rigorous
  # Local epsilon of a record, which equals `epsilon` without a shuffler.
  local = epsilon
  if how.shuffle:
    local = rigorous.local_epsilon_for(epsilon, len(ids), _delta_s(job))
  epsilon_l = local * how.label_share if how.labels == "randomized_response" else 0.0
  copies = job.training.num_epochs if how.draw == "record_fresh" else 1
  drawn = rigorous.feature_noise(
    beta,
    dataclasses.replace(how, delta=_delta_s(job) / copies),
    epsilon=(local - epsilon_l) / copies,
    channels=job.channels,
  )
  clipped = lambda x: rigorous.clip_records(x, beta, how)
  reduce = lambda x: clipped(rigorous.pool(x, _pool(job)))
  key = job.keys.key(FEATURES)
  x = reduce(job.train.x[ids])
  noisy = lambda copy: record_noise.noisy_records(
    jax.random.fold_in(key, copy), ids, x, drawn.scales, mechanism=drawn.mechanism
  )
  # Inputs of model 2 are centred by the mean of the NOISY records (post-processing) and scaled by
  # the public noise scales. So each input has about unit variance.
  per = math.sqrt(2) if drawn.mechanism == "laplace" else 1.0
  std = np.sqrt(_PIXEL_VARIANCE + (per * drawn.scales) ** 2)
  shaped = record_noise.by_feature(std, _pooled_shape(job))
  mean = noisy(0).mean(axis=0)
  scale = lambda x: np.asarray((x - mean[None]) / shaped[None], np.float32)
  responses, class_priors = _responses(job, ids, epsilon_l)
  prepare = lambda x: scale(reduce(x))
  clip = how.clip if how.features == "laplace_clipped" else None
  noise = RecordNoise(
    _pooled_shape(job), beta, drawn.scales, drawn.mechanism,
    grid=record_noise.GRID, l1_clip=clip, clipped=clipped,
  )  # fmt: skip
  return _Prepared(
    _shuffle(job, lambda copy: scale(noisy(copy)), responses, copies),
    class_priors,
    dataclasses.replace(job.test, x=prepare(job.test.x)),
    prepare,
    noise,
    _record_charges(job, drawn, epsilon_l, copies, epsilon),
    {
      "epsilon_labels": epsilon_l,
      "epsilon_local": local,
      "labels_public": how.labels == "public",
      "draw": how.draw,
      "mean_noise_scale": float(np.mean(drawn.scales)),
    },
  )


def _responses(
  job: Inputs, ids: np.ndarray, epsilon_l: float
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (labels after randomised response, or public labels; class shares from these alone)."""
  y = job.train.y[ids]
  k = job.train.num_classes
  # Without a budget the labels are public.
  if not epsilon_l:
    # Each class gets one more count, so that the logarithm of its prior is finite.
    counts = np.bincount(y, minlength=k) + 1.0
    return y, counts / counts.sum()
  key = job.keys.key(LABELS)
  y = labels.noisy_labels(key, ids, y, epsilon=epsilon_l, num_classes=k)
  return y, labels.priors(y, epsilon_l, k)


def _shuffle(
  job: Inputs, features: Callable[[int], np.ndarray], y: np.ndarray, copies: int
) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
  """Returns a function epoch -> (x, y), without the records' ids. With a shuffler the order is
  secret."""
  order = np.arange(len(y))
  if job.rigorous.shuffle:
    order = np.random.default_rng([job.keys.secret, 1]).permutation(len(y))
  # All copies of a record are one report, so they have the same place in the order.
  if copies > 1:
    return lambda epoch: (features(epoch)[order], y[order])
  once = features(0)[order], y[order]
  return lambda epoch: once


def _record_charges(
  job: Inputs, drawn: Any, epsilon_l: float, copies: int, epsilon: float
) -> list[StageCharge]:
  """Returns the charges of stages C, L and S. With a shuffler, `epsilon` is the central epsilon."""
  how = job.rigorous
  where = "D2" if how.split and how.model1 != "none" else "all"
  spent = drawn.epsilon * copies
  delta = drawn.delta * copies
  fresh = f", {copies} fresh copies" if copies > 1 else ""
  if how.shuffle:
    what = f"shuffled reports of local epsilon {accounting.upper(spent + epsilon_l)}{fresh}"
    return [StageCharge("C+L+S", where, epsilon, _delta_s(job), what)]
  charges = [StageCharge("C", where, spent, delta, f"features, {how.features}{fresh}")]
  if epsilon_l:
    charges.append(StageCharge("L", where, epsilon_l, 0.0, "randomised response"))
  return charges


def _notes(job: Inputs) -> list[str]:
  how = job.rigorous
  notes = [_FLOAT_NOTE]
  if how.labels == "public":
    notes.append("adjacency WITHOUT labels: they count as public and are used raw")
  if how.shuffle:
    notes.append("needs a trusted shuffler: central model")
  return notes
