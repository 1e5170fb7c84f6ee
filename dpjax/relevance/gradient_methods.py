"""Methods that perturb gradients: each is a Plan, with an optimizer after it."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import accounting, losses, sampling, transforms
from dpjax.accounting.event_kinds.randomized_response import pure_dp_event
from dpjax.accounting.proved import ADD
from dpjax.data import Dataset
from dpjax.plan import Plan
from dpjax.relevance import (
  feature_budget,
  feature_shares,
  privacy,
  record_noise,
  rigorous,
  train,
)
from dpjax.relevance.inputs import GRADIENTS, MODEL_1, RELEVANCE, Inputs, Outcome
from dpjax.relevance.privacy import Privacy
from dpjax.relevance.rigorous import RELATION, StageCharge
from dpjax.types import Example, LossFn
from dpjax.validate import UserError

_PAIRS = (
  "G1: microbatches of two examples share one clipped gradient, so one example moves it by "
  "twice what the accountant was told; counted rightly it is at most epsilon={corrected} "
  "(delta={delta}, replace_one: the record exchanged in its place; nothing holds under "
  "add_or_remove_one, where one record more or less shifts every pair behind it)"
)


# --- plans


def steps_per_epoch(num_records: int, batch_size: int) -> int:
  """Number of steps, rounded, after which each record was drawn once on average."""
  return max(1, round(num_records / min(batch_size, num_records)))


def make_plan(
  job: Inputs,
  num_records: int,
  epsilon: float,
  before: float = 0.0,
  *,
  delta: float | None = None,
  relation: str | None = None,
) -> Plan:
  """Makes the plan of a gradient method, with noise calibrated to `epsilon`.

  Args:
    before: pure epsilon that was spent before, and that `epsilon` must cover, too (for the
      relevance of radp_dpsgd).
    delta, relation: delta and neighbouring relation; None for those of `job.private`.

  Raises:
    UserError: no declared size under add_or_remove_one, which hides len(job.train).
  """
  how = job.private
  size = min(job.training.batch_size, num_records)
  delta = how.delta if delta is None else delta
  relation = relation or how.neighboring_relation
  if relation == ADD and job.train.nominal_size is None:
    raise UserError(
      "must be declared, a constant that no record changes, since the relation hides len(train): "
      "train.declared(size); or private.neighboring_relation='replace_one'",
      field="train.nominal_size",
      value=None,
    )
  epochs = job.training.num_epochs
  clip = how.l2_clip_norm
  return _plan(num_records, size, epochs, epsilon, delta, clip, relation, before)


# Calibration is slow, so runs that differ only in their seed share the cached plan.
@functools.lru_cache(maxsize=32)
def _plan(
  num_records: int,
  batch_size: int,
  num_epochs: int,
  epsilon: float,
  delta: float,
  clip: float,
  relation: str,
  before: float,
) -> Plan:
  num_steps = steps_per_epoch(num_records, batch_size) * num_epochs
  fixed = relation == RELATION
  prob = batch_size / num_records
  sampler: Any = (
    sampling.FixedSizeSampler(batch_size=batch_size, num_examples=num_records)
    if fixed
    # No draw exceeds this capacity. The fitted sampler below mostly has a smaller one.
    else sampling.PoissonSampler(sampling_prob=prob, capacity=num_records + 1)
  )
  plan = Plan(
    sampler=sampler,
    noise_multiplier=1.0,
    l2_clip_norm=clip,
    normalize_by=batch_size,
    num_steps=num_steps,
    delta=delta,
    neighboring_relation=relation,
  )
  noise_multiplier = accounting.calibrate_noise_multiplier(
    lambda z: _with(before, dataclasses.replace(plan, noise_multiplier=z).event()),
    epsilon=epsilon,
    delta=plan.accounted_delta(delta),
    neighboring_relation=relation,
    accountant=plan.accountant,
  )
  plan = dataclasses.replace(plan, noise_multiplier=noise_multiplier)
  if fixed:
    return plan
  # An abort adds (1 + e^epsilon) times its probability to delta, with the epsilon of the WHOLE run.
  # The plan's epsilon leaves `before` out, so the plan's delta is divided by e^before.
  careful = dataclasses.replace(plan, delta=delta * math.exp(-before))
  return dataclasses.replace(plan, sampler=careful.fitted(num_records).sampler)


def _with(before: float, event: Any) -> Any:
  if before == 0:
    return event
  return dp_accounting.ComposedDpEvent([pure_dp_event(before), event])


def _cost(plan: Plan, before: float = 0.0) -> float:
  return accounting.epsilon(
    _with(before, plan.event()),
    delta=plan.accounted_delta(plan.delta),
    neighboring_relation=plan.neighboring_relation,
    accountant=plan.accountant,
  )


def _proof(plan: Plan) -> Privacy:
  return privacy.proof_record(
    _cost(plan),
    plan.delta,
    plan.neighboring_relation,
    ledger=[StageCharge("gradients", "all", _cost(plan), plan.delta, _what(plan))],
    **_numbers(plan),
  )


def _what(plan: Plan) -> str:
  return f"{plan.num_steps} steps of {plan.sampler!r}, z = {plan.noise_multiplier:.4g}"


def _numbers(plan: Plan) -> dict[str, Any]:
  return {
    "noise_multiplier": plan.noise_multiplier,
    "l2_clip_norm": plan.l2_clip_norm.norms,
    "accountant": plan.accountant,
  }


# --- runs


def _outcome(
  job: Inputs,
  model: Any,
  plan: Plan,
  tx: Any,
  guarantee: Privacy,
  *,
  data: Any = None,
  loss_fn: LossFn | None = None,
  **more: Any,
) -> train.Story:
  """Trains `model` by `plan` on `data`, and returns the outcome. `data` defaults to the training
  data of the job."""
  apply = model.apply
  initial = job.initial(model, job.test.x)
  params = yield train.fit_private(
    loss_fn or losses.softmax_cross_entropy(apply),
    initial,
    job.train if data is None else data,
    plan,
    tx,
    noise_key=job.keys.key(GRADIENTS),
    batch_seed=job.keys.secret,
    steps_per_epoch=max(1, plan.num_steps // job.training.num_epochs),
    scored=job.scorer(apply),
  )
  return Outcome(apply, initial, params, guarantee, plan.num_steps, job.test, **more)


def _standard(job: Inputs, tx: Any, model: Any) -> train.Story:
  plan = make_plan(job, job.size, job.epsilon)
  return _outcome(job, model, plan, tx, _proof(plan))


def _sgd(job: Inputs) -> optax.GradientTransformation:
  return optax.sgd(job.private.learning_rate, momentum=job.private.momentum or None)


def dpsgd(job: Inputs) -> train.Story:
  """Runs DP-SGD (Abadi et al. 2016). Guarantee: (epsilon, delta) of the plan."""
  return _standard(job, _sgd(job), job.nets.second)


def tempered_sigmoids(job: Inputs) -> train.Story:
  """Runs DP-SGD on model 2 with tempered sigmoids (Papernot et al. 2021)."""
  return _standard(job, _sgd(job), job.nets.tempered)


def dp_adam(job: Inputs) -> train.Story:
  """Runs Adam on the private gradient. This is post-processing, so DP-SGD's epsilon holds."""
  return _standard(job, optax.adam(job.private.adaptive_learning_rate), job.nets.second)


def iterative(job: Inputs) -> optax.GradientTransformation:
  """Returns the optimizer of PIAdam, PIAdaGrad or PIRMSProp."""
  optimizers = {"adam": optax.adam, "adagrad": optax.adagrad, "rmsprop": optax.rmsprop}
  return optimizers[job.private.iterative](job.private.adaptive_learning_rate)


def dpdligdo(job: Inputs) -> train.Story:
  """Runs DPDLIGDO (Ding et al. 2022): an iterative optimizer on the clipped, noisy gradient.

  With `legacy_microbatch` 2, as in the published code, two examples are clipped together. The
  epsilon is then only a claim, and the details hold `corrected_epsilon`.
  """
  if job.private.legacy_microbatch == 1:
    return _standard(job, iterative(job), job.nets.second)
  return _in_pairs(job)


class _Pairs:
  """Data set of pairs of examples, each pair as one element. An odd last example is left out."""

  def __init__(self, data: Any):
    n = len(data.y) // 2 * 2
    self.x = np.asarray(data.x[:n]).reshape(n // 2, 2, *data.x.shape[1:])
    self.y = np.asarray(data.y[:n]).reshape(n // 2, 2)
    declared = getattr(data, "nominal_size", None)
    self.nominal_size = None if declared is None else declared // 2

  def __len__(self) -> int:
    return len(self.y)

  def __getitem__(self, indices: Any) -> Example:
    return Example(self.x[indices], self.y[indices])


def pair_loss(loss_fn: LossFn) -> LossFn:
  """Returns the loss of a pair as one element: the mean loss of its two examples."""

  def loss(params: Any, pair: Example) -> Any:
    first, second = (Example(pair.x[i], pair.y[i]) for i in range(2))
    return (loss_fn(params, first) + loss_fn(params, second)) / 2

  return loss


def _in_pairs(job: Inputs) -> train.Story:
  if min(job.size, len(job.train)) < 2:
    raise UserError(
      "needs at least two training records", field="private.legacy_microbatch", value=2
    )
  model = job.nets.second
  pairs = _Pairs(job.train)
  # A pair is one element, so a batch has half as many elements.
  half = dataclasses.replace(job.training, batch_size=max(1, job.training.batch_size // 2))
  plan = make_plan(dataclasses.replace(job, training=half), job.size // 2, job.epsilon)
  loss_fn = pair_loss(losses.softmax_cross_entropy(model.apply))
  # q is the sampling probability, C the clip norm. Replacing a record changes the distribution of
  # a step from (1 - q) N(0) + q N(u) to (1 - q) N(0) + q N(v), with |u - v| <= 2 C. By joint
  # convexity, this is no easier to detect than the removal of an element of norm 2 C.
  corrected = _cost(dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier / 2))
  guarantee = Privacy(
    kind="claimed",
    epsilon=_cost(plan),
    delta=plan.delta,
    neighboring_relation=plan.neighboring_relation,
    claimed_epsilon=_cost(plan),
    failed_assumptions=(
      _PAIRS.format(
        corrected=accounting.upper(corrected), delta=accounting.upper(plan.delta)
      ),
    ),
    details={
      "corrected_epsilon": corrected,
      "corrected_neighboring_relation": RELATION,
      **_numbers(plan),
    },
  )
  return _outcome(job, model, plan, iterative(job), guarantee, data=pairs, loss_fn=loss_fn)


def dp_sgld(job: Inputs) -> train.Story:
  """Runs Langevin dynamics whose random term is the plan's noise. Its accounting is that of DP-SGD
  with the same plan."""
  plan = make_plan(job, job.size, job.epsilon)
  std = plan.noise_multiplier * plan.l2_bound / plan.normalize_by
  step_size = job.private.learning_rate / job.size
  tx = transforms.dp_sgld(step_size, mean_noise_std=std, num_examples=job.size)
  return _outcome(job, job.nets.second, plan, tx, _proof(plan))


# --- model 1 of the rigorous mode, and radp_dpsgd


def train_model_1(job: Inputs, model: Any, data: Dataset, plan: Plan) -> train.Steps:
  """Returns the training of model 1 by DP-SGD.

  Guarantee: (plan.epsilon(), plan.delta)-DP for the records `data`.
  """
  return train.fit_private(
    losses.softmax_cross_entropy(model.apply),
    job.initial(model, data.x),
    data,
    plan,
    _sgd(job),
    noise_key=job.keys.key(MODEL_1),
    # Secret draws must be independent. The seed of other methods' batches is `secret` itself, and
    # that of the shuffler of rigorous mode is [secret, 1].
    batch_seed=job.keys.secret + 1,
    steps_per_epoch=plan.num_steps,
    name=train.FIRST,
  )


def radp_dpsgd(job: Inputs) -> train.Story:
  """Weights inputs by (d beta_j)^kappa of a DP relevance, then runs DP-SGD.

  Model 1 is untrained, so that it costs nothing. A square block of an image, with a side of
  `private.relevance_pool` places, has one relevance. The same noise distorts a larger block less.
  The weights are scaled so that their square, averaged with weights beta, is 1. So inputs keep
  their usual size. Between the centres of blocks, the weights are interpolated.

  Guarantee: (epsilon, delta) of the Laplace mechanism on the relevance, composed with the plan,
  under the plan's relation. The number of records is public.
  """
  relation = job.private.neighboring_relation
  before = job.private.epsilon_b
  # Made first: it refuses a size that the relation hides, and nothing is trained before.
  plan = make_plan(job, job.size, job.epsilon, before)
  weights, beta = _weights(job, relation)
  prepare = lambda x: np.asarray(x * weights[None])
  weigh = lambda data: dataclasses.replace(data, x=prepare(data.x))
  weighed = dataclasses.replace(job, train=weigh(job.train), test=weigh(job.test))
  spent = _cost(plan, before)
  parts = [
    StageCharge("B", "all", job.private.epsilon_b, 0.0, "mean relevance, Laplace"),
    StageCharge("gradients", "all", _cost(plan), plan.delta, _what(plan)),
  ]
  note = "the total is composed by the accountant: less than the sum of the stages"
  guarantee = privacy.proof_record(
    spent, plan.delta, relation, ledger=parts, notes=[note], **_numbers(plan)
  )
  maps = {"beta": beta}
  model = job.nets.second
  return _outcome(weighed, model, plan, _sgd(job), guarantee, prepare=prepare, maps=maps)


def _weights(job: Inputs, relation: str) -> tuple[np.ndarray, np.ndarray]:
  model_1 = job.nets.first
  theta_1 = job.initial(model_1, job.train.x)
  share = feature_shares.mean_shares(model_1.apply, theta_1, job.train, job.lrp)
  factor = job.private.relevance_pool
  blocks = rigorous.pooled_shares(share, job.shape, factor, "private.relevance_pool")
  noisy = rigorous.noisy_relevance(
    job.keys.key(RELEVANCE),
    # This factor turns the mean into the sum divided by the PUBLIC number of records.
    blocks * (len(job.train) / job.size),
    num_records=job.size,
    epsilon=job.private.epsilon_b,
    neighboring_relation=relation,
  )
  beta = feature_budget.floor_normalized(noisy, feature_budget.default_floor(len(noisy)))
  return input_weights(beta, job.private.kappa, job.shape, factor), beta


def input_weights(
  beta: np.ndarray, kappa: float, shape: tuple[int, ...], pool: int
) -> np.ndarray:
  """Returns weights w_j proportional to (d beta_j)^kappa, with sum_j beta_j w_j^2 = 1.

  They have the shape of one example, [height, width, 1] for images. This is post-processing of
  beta, so it costs no privacy.

  Args:
    beta: [d], one for each feature, or for each block of `pool` x `pool` places of an image.
      Weights of blocks are interpolated after the scaling.
    shape: shape of one example. The channels of an image share the weight of their place.

  >>> input_weights(np.array([0.5, 0.5]), 0.5, (2,), 1).tolist()
  [1.0, 1.0]
  """
  weights = (len(beta) * beta) ** kappa
  weights = weights / np.sqrt(np.sum(beta * weights**2))
  if len(shape) == 3 and pool > 1:
    blocks = weights.reshape(shape[0] // pool, shape[1] // pool)
    weights = np.ravel(jax.image.resize(jnp.asarray(blocks), shape[:2], "linear"))
  return record_noise.by_feature(weights, shape)
