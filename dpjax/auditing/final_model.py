"""Audit of the final model alone: many trainings from worst-case initial parameters.

The proof of DP-SGD holds for any initial parameters, so an auditor may choose the worst
(Annamalai and De Cristofaro 2024, arXiv:2405.14106). Such parameters are fitted on the auditor's
own records until gradients of ordinary records are small. The target is a blank input with the
label that the model finds least likely for it. Its gradient is near or beyond the clip norm, and
stays so. Then the target adds nearly the same vector in every step. So its loss under the final
model shows the sum of all noisy steps along that vector. An auditor who sees no step misses hardly
anything.

The auditor sees the final parameters and no step. Each model is one independent training with
noise of its own, so `clopper_pearson` holds as it stands (`lower_bounds`). Since nothing is
sampled, `gdp_lower_bound` holds, too. Error rates are resolved to 1 / (number of models).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import gradients, training, validate
from dpjax.auditing.scores import Scores
from dpjax.data import Dataset
from dpjax.plan import Plan
from dpjax.types import Array, Batch, Example, LossFn, Params
from dpjax.validate import UserError

# Number of models that one program trains at once.
_SIDE_BY_SIDE = 50


def fitted_params(
  loss_fn: LossFn, params: Params, records: Dataset, *, num_steps: int, learning_rate: float
) -> Params:
  """Returns parameters fitted by Adam, without privacy, to give ordinary records small gradients.

  Args:
    loss_fn: `(params, example) -> scalar` for ONE example.
    records: records of the auditor, or public ones. They are not protected.
  """
  validate.integer_at_least(1, num_steps=num_steps)
  validate.positive(learning_rate=learning_rate)
  batch = Example(jnp.asarray(records.x), jnp.asarray(records.y))
  tx = optax.adam(learning_rate)
  mean = lambda p: jnp.mean(jax.vmap(loss_fn, (None, 0))(p, batch))

  def step(carry: Any, _: None) -> tuple[Any, None]:
    params, state = carry
    updates, state = tx.update(jax.grad(mean)(params), state)
    return (optax.apply_updates(params, updates), state), None

  run = lambda p: jax.lax.scan(step, (p, tx.init(p)), length=num_steps)[0][0]
  return jax.jit(gradients.canonical_convolutions(run))(params)


def blank_target(
  apply: Callable[[Params, Array], Array], params: Params, like: Dataset
) -> Example:
  """Returns a blank input and the label that the model finds least likely: [1, ...] and [1]."""
  x = np.zeros_like(like.x[:1])
  label = np.argmin(np.asarray(apply(params, jnp.asarray(x))), axis=-1)
  return Example(x, label.astype(like.y.dtype))


def final_model_scores(
  loss_fn: LossFn,
  plan: Plan,
  tx: optax.GradientTransformation,
  *,
  params: Params,
  records: Dataset,
  target: Example,
  num_models: int,
  seed: int,
  progress: Callable[[int, int], None] = lambda done, total: None,
) -> Scores:
  """Returns scores [num_models] of models trained with the target, and [num_models] without it. A
  score is high if the target's loss under the final model is low.

  Models are trained by the public pipeline: `plan.batches`, `training.dp_sgd` with the plan's clip
  and noise, and `tx`. The models of a group run under vmap, and differ only in their noise keys.

  Args:
    plan: plan without sampling, under add_or_remove_one. Every record takes part in every step,
      so that all steps have one batch, and the plan is Gaussian-DP.
    params: initial parameters of every model.
    target: one example, x [1, ...] and y [1], such as `blank_target`.
    num_models: number of models with the target, and again as many without it.
    seed: seed of the noise of all models.

  Raises:
    UserError: a plan that samples, another relation, a training that diverges.
  """
  validate.integer_at_least(2, num_models=num_models)
  validate.integer_at_least(0, seed=seed)
  if getattr(plan.sampler, "sampling_prob", None) != 1.0:
    raise UserError(
      f"sampler={plan.sampler!r}: must take everybody, PoissonSampler(sampling_prob=1.0)",
      field="plan",
    )
  if plan.neighboring_relation != "add_or_remove_one":
    raise UserError(
      f"neighboring_relation={plan.neighboring_relation!r}: must be "
      "'add_or_remove_one', for the target is there or not",
      field="plan",
    )
  # Slices are not needed: one physical batch computes the same sums.
  plan = dataclasses.replace(plan, slices=1)
  # The target comes last, so that the other records keep their places.
  x = np.concatenate((records.x, target.x))
  y = np.concatenate((records.y, target.y))
  with_target = dataclasses.replace(records, x=x, y=y)
  finals = _finals(loss_fn, plan, tx, params, target)
  scores = []
  for world, data in enumerate((records, with_target)):
    # Nothing is sampled, so every step has this batch, whose own step is the first.
    first = next(iter(plan.batches(data, rng=0)))
    batch = jax.tree.map(jnp.asarray, first._replace(origin=None))
    losses: list[float] = []
    root = functools.reduce(jax.random.fold_in, (0xF17A1, world), jax.random.key(seed))
    # All groups have one size, so that one compiled program serves them. The last group may train
    # more models than needed.
    width = min(_SIDE_BY_SIDE, num_models)
    keys = jax.random.split(root, -(-num_models // width) * width)
    for start in range(0, len(keys), width):
      losses.extend(np.asarray(finals(keys[start : start + width], batch)))
      progress(world * num_models + min(len(losses), num_models), 2 * num_models)
    scores.append(-np.array(losses[:num_models], np.float64))
  if not np.isfinite(scores).all():
    raise UserError("the target's loss is not finite: a training diverged", field="loss_fn")
  return Scores(inside=scores[1], outside=scores[0])


def _finals(
  loss_fn: LossFn, plan: Plan, tx: Any, params: Params, target: Example
) -> Callable[[Array, Batch], Array]:
  """Returns the function (keys [S], batch of every step) -> the target's final loss [S]."""
  asked = Example(jnp.asarray(target.x[0]), jnp.asarray(target.y[0]))

  def final_model(key: Array, batch: Batch) -> Array:
    init, step = training.dp_sgd(loss_fn, plan, tx, noise_key=key)
    body = lambda _, state: step(state, batch)[0]
    state = jax.lax.fori_loop(0, plan.num_steps, body, init(params))
    return loss_fn(training.eval_params(state), asked)

  return jax.jit(gradients.canonical_convolutions(jax.vmap(final_model, (0, None))))
