"""White-box canaries in gradient space: the strongest audit of one run of a plan.

Each canary is an example whose gradient lies along a coordinate of its own, far longer than the
clip norm. So it contributes the most that clipping allows, and only the noise hides it. The plan's
own sampler, padding, clipping and noise do everything else. In `gradient_canaries` there is no
model. In a training, `with_canaries` adds one parameter for each canary to the model's.
`canary_loss` gives the canary a gradient along this parameter. `canary_sums` adds up what the
transform released along these parameters in every step, before the optimizer.

The plan's relation decides what is left of a canary that is out: nothing (add_or_remove_one) or an
empty record in its place (replace_special). Under replace_one `gradient_canaries` leaves the
opposite gradient, as far away as clipping allows; in a training the original record is left.
(Canary gradients: Nasr et al. 2023; one run: Steinke et al. 2023.)
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import gradients, validate
from dpjax.accounting.proved import NeighboringRelation
from dpjax.auditing.canaries import Canaries
from dpjax.auditing.scores import CanaryScores, Scores
from dpjax.plan import Plan
from dpjax.types import Example, LossFn, Params
from dpjax.validate import UserError

# Length of a canary's gradient, in clip norms. It is so large that a missing clip shows.
_LENGTH = 1e3


class _Ids(NamedTuple):
  """Canaries as data: number of each, sign of its gradient, whether it is present, and what a row
  is."""

  ids: np.ndarray
  signs: np.ndarray
  present: np.ndarray
  unit: str

  def __getitem__(self, indices: Any) -> Any:  # type: ignore[override]
    return self.ids[indices], self.signs[indices]

  def __len__(self) -> int:
    return len(self.ids)


def _records(plan: Plan, coins: np.ndarray) -> _Ids:
  """Returns the canaries as data, with as many empty records as the sampler needs."""
  ids = np.arange(len(coins))
  signs = np.ones(len(coins), np.float32)
  size = plan.sampler.only_size
  if size is not None and size < len(coins):
    raise UserError(
      f"must be <= num_examples={size} of the plan's sampler",
      field="num_canaries",
      value=len(coins),
    )
  if plan.neighboring_relation == NeighboringRelation.ADD_OR_REMOVE_ONE:
    kept = np.flatnonzero(coins)
    # The empty records alone are as many as the sampler needs, whatever the coins.
    others = plan.sampler.least_size
    return _Ids(
      np.concatenate([kept, np.zeros(others, int)]),
      np.concatenate([signs[kept], np.zeros(others, np.float32)]),
      np.arange(len(kept) + others) < len(kept),
      plan.unit,
    )
  if plan.neighboring_relation == NeighboringRelation.REPLACE_ONE:
    signs = np.where(coins, 1, -1).astype(np.float32)
    present = np.ones_like(coins)
  else:
    present = coins
  # The number of these empty records does not depend on the coins.
  others = (size or len(coins)) - len(coins)
  fill = lambda values, dtype: np.concatenate([values, np.zeros(others, dtype)])
  return _Ids(fill(ids, int), fill(signs, np.float32), fill(present, bool), plan.unit)


def gradient_canaries(
  plan: Plan,
  *,
  num_canaries: int,
  seed: int,
  key: jax.Array,
  transform: Callable[[jax.Array], Any] | None = None,
) -> Scores:
  """Returns the scores of one run of a plan on gradient canaries. Fair coins decide which are in.

  Args:
    plan: plan with the batches, the transform and the number of steps.
    num_canaries: number of canaries, and of parameters. If the sampler accepts only one number of
      examples, at most that number; the other examples are empty records.
    seed: seed of the coins and of the sampler.
    key: key of the noise.
    transform: `key -> optax transformation` in place of `plan.transform`, to audit
      another implementation against the plan's claim.

  Returns:
    The sum of all updates along each canary's coordinate. Give the scores to `one_run` (valid for
    any plan), or to `one_run_fdp` if the plan is Gaussian-DP (no sampling).

  Raises:
    UserError: the transform returned NaN.

  >>> from dpjax.sampling import PoissonSampler  # doctest: +SLOW
  >>> plan = Plan(sampler=PoissonSampler(sampling_prob=1.0, capacity=64), noise_multiplier=0.01,
  ...   l2_clip_norm=1.0, normalize_by=1, num_steps=1, delta=1e-5)
  >>> scores = gradient_canaries(plan, num_canaries=64, seed=0, key=jax.random.key(0))
  >>> bool(scores.inside.min() > 0.9 and scores.outside.max() < 0.1)
  True
  """
  validate.integer_at_least(2, num_canaries=num_canaries)
  validate.integer_at_least(0, seed=seed)
  if not plan.l2_clip_norm.is_one_number:
    raise UserError("must be one number, canaries have no groups", field="l2_clip_norm")
  # Slices are not needed: one physical batch computes the same sums.
  plan = dataclasses.replace(plan, slices=1)
  coins = np.random.default_rng([seed, 0x0C01]).random(num_canaries) < 0.5
  if coins.all() or not coins.any():
    raise UserError(
      f"with seed={seed} all are on one side; use more of them",
      field="num_canaries",
      value=num_canaries,
    )
  tx = (transform or plan.transform)(key)
  length = _LENGTH * plan.l2_bound

  @jax.jit
  def step(state, ids, signs, mask):
    grads = length * signs[:, None] * jax.nn.one_hot(ids, num_canaries)  # [batch, m]
    offered: Any = gradients.wrap_grads(grads)
    return tx.update(offered, state, jnp.zeros(num_canaries), mask=mask)

  state = tx.init(jnp.zeros(num_canaries))
  total = np.zeros(num_canaries)
  with warnings.catch_warnings():
    # The plan may warn of its divisor, since canaries are fewer records than the plan is made for.
    warnings.filterwarnings("ignore", message="normalize_by=")
    batches = plan.batches(_records(plan, coins), rng=seed)
  for batch in batches:
    ids, signs = map(jnp.asarray, batch.examples)
    update, state = step(state, ids, signs, jnp.asarray(batch.mask))
    total += np.asarray(update, np.float64)
  return _separate("transform", total, coins)


def _separate(field: str, sums: np.ndarray, included: np.ndarray) -> Scores:
  """Returns the scores of sums that `field` released. Raises UserError if one is NaN.

  A sum with noise is a number, whatever the records are. A private transform returns NaN for an
  update that it refuses: nothing is measured of it, and an audit could not fail.
  """
  if np.isnan(sums).any():
    raise UserError("released NaN, as for an update that it refused", field=field)
  return CanaryScores.separate(sums, included)


def with_canaries(params: Params, num_canaries: int) -> dict[str, Any]:
  """Returns the model's parameters with one more for each canary, which starts at zero.

  >>> with_canaries(jnp.ones(2), 3)["canaries"]
  Array([0., 0., 0.], dtype=float32)
  """
  validate.integer_at_least(2, num_canaries=num_canaries)
  return {"model": params, "canaries": jnp.zeros(num_canaries)}


def canary_loss(loss_fn: LossFn, *, num_classes: int, l2_clip_norm: float) -> LossFn:
  """Returns the loss of one example, where a label of `num_classes` or more marks a canary.

  A canary's gradient is -1,000 * `l2_clip_norm` along its parameter, and zero along the model's.
  Clipping shortens this gradient to the clip norm. The gradient of any other example is that of
  `loss_fn`, and zero along the canaries' parameters.

  >>> loss = canary_loss(lambda w, e: w * e.y, num_classes=2, l2_clip_norm=0.001)
  >>> params = with_canaries(jnp.float32(5.0), 3)
  >>> jax.grad(loss)(params, Example(0.0, jnp.int32(3)))  # the canary number 1
  {'canaries': Array([ 0., -1.,  0.], dtype=float32), 'model': Array(0., dtype=float32)}
  >>> float(loss(params, Example(0.0, jnp.int32(1))))
  5.0
  """

  def loss(params: Any, example: Example) -> jax.Array:
    place = example.y - num_classes
    is_canary = place >= 0
    # A canary's label is no class. Label 0 stands in, and that loss is not used.
    ordinary = loss_fn(
      params["model"], example._replace(y=jnp.where(is_canary, 0, example.y))
    )
    along = params["canaries"][jnp.maximum(place, 0)]
    return jnp.where(is_canary, -_LENGTH * l2_clip_norm * along, ordinary)

  return loss


class CanarySums(NamedTuple):
  """The sum of all released gradients along each canary's parameter."""

  canary_sums: jax.Array  # [m]


def canary_sums() -> optax.GradientTransformation:
  """Returns a transform that passes gradients on, and sums their parts along canaries' parameters.

  Put it between the private transform and the optimizer, at the start of the `tx` of `dp_sgd`. It
  reads only noisy sums, all of which the proof counts as released, so it costs no privacy.
  """

  def init(params: Any) -> CanarySums:
    return CanarySums(jnp.zeros_like(params["canaries"]))

  def update(updates: Any, state: Any, params: Any = None) -> Any:
    del params
    return updates, CanarySums(state.canary_sums + updates["canaries"])

  return optax.GradientTransformation(init, update)


def sum_scores(state: Any, canaries: Canaries) -> Scores:
  """Returns the scores of canaries, from a state that holds `canary_sums`.

  The score of a canary is the total length of the noisy sums along the canary's gradient.
  """
  sums = np.asarray(optax.tree.get(state, "canary_sums"))
  return _separate("state", -sums, canaries.included)
