"""Private Langevin dynamics: the plan's privacy noise also serves as the noise of the dynamics.

Stochastic gradient Langevin dynamics (Welling and Teh 2011) on the energy
U(theta) = sum_i loss_i(theta) + (prior_precision / 2) |theta|^2, with step size h at temperature
tau, is

  theta <- theta - h grad U + sqrt(2 h tau) N(0, I).

Replace grad U by the private mean gradient g of a plan, times the number n of examples. The noise
N(0, mean_noise_std^2) of g then enters the step as h n mean_noise_std N(0, I), so

  tau = h (n mean_noise_std)^2 / 2,          mean_noise_std = z C / L,

and z = (L / (n C)) sqrt(2 tau / h). Here z is the noise multiplier, C the clip norm and L the
expected batch size. No other noise is added, so epsilon is the plan's, for every iterate. Sources:
Wang, Fienberg and Smola 2015 (arXiv:1502.07645, "one posterior sample"), here with the accountant
of DP-SGD in place of their closed form; Li et al. 2019 (arXiv:1712.09097). SGLD on UNCLIPPED
gradients has no proof of privacy at any temperature, and is not offered.

It is not claimed that the iterates follow the posterior: clipping changes the drift, and sampling
batches adds variance.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import optax

from dpjax import validate
from dpjax.validate import UserError


def sgld_temperature(
  *, step_size: float, mean_noise_std: float, num_examples: int
) -> float:
  """Returns tau = h (n mean_noise_std)^2 / 2, the temperature that a plan's noise gives.

  >>> sgld_temperature(step_size=1e-4, mean_noise_std=0.1, num_examples=1000)
  0.5
  """
  _check(step_size, num_examples)
  validate.non_negative(mean_noise_std=mean_noise_std)
  return step_size * (num_examples * mean_noise_std) ** 2 / 2


def sgld_step_size(
  *, temperature: float, mean_noise_std: float, num_examples: int
) -> float:
  """Returns h = 2 tau / (n mean_noise_std)^2, at which a plan samples at temperature tau.

  >>> round(sgld_step_size(temperature=0.5, mean_noise_std=0.1, num_examples=1000), 10)
  0.0001
  """
  validate.integer_at_least(1, num_examples=num_examples)
  validate.positive(temperature=temperature, mean_noise_std=mean_noise_std)
  return 2 * temperature / (num_examples * mean_noise_std) ** 2


def sgld_noise_multiplier(
  *,
  temperature: float,
  step_size: float,
  num_examples: int,
  l2_clip_norm: float,
  expected_batch_size: float,
) -> float:
  """Returns z = (L / (n C)) sqrt(2 tau / h), the noise multiplier of a Plan for this SGLD.

  >>> round(sgld_noise_multiplier(temperature=1.0, step_size=2e-4, num_examples=1000,
  ...   l2_clip_norm=1.0, expected_batch_size=10), 10)
  1.0
  """
  _check(step_size, num_examples)
  validate.positive(
    temperature=temperature,
    l2_clip_norm=l2_clip_norm,
    expected_batch_size=expected_batch_size,
  )
  share = expected_batch_size / (num_examples * l2_clip_norm)
  return share * math.sqrt(2 * temperature / step_size)


def _check(step_size: float, num_examples: int) -> None:
  validate.positive(step_size=step_size)
  validate.integer_at_least(1, num_examples=num_examples)


def dp_sgld(
  step_size: optax.ScalarOrSchedule,
  *,
  mean_noise_std: float,
  num_examples: int,
  prior_precision: float = 0.0,
) -> optax.GradientTransformation:
  """Returns the transform g -> -h (n g + prior_precision theta), a Langevin step.

  It must follow a private transform, which gives the noisy mean gradient g.

  Args:
    step_size: h, for the energy SUMMED over the examples. A learning rate r of SGD on the mean loss
      corresponds to h = r / n. A schedule changes the temperature from step to step.
    mean_noise_std: standard deviation of the noise on the mean gradient, `plan.mean_noise_std`; it
      must be > 0, because this transform adds no noise itself. `sgld_temperature` computes the
      temperature from it.
    num_examples: number n of examples; public, as in the plan's guarantee.
    prior_precision: precision of a N(0, 1 / prior_precision) prior on every parameter.

  >>> import jax.numpy as jnp
  >>> tx = dp_sgld(0.01, mean_noise_std=1.0, num_examples=10, prior_precision=2.0)
  >>> tx.update(jnp.array([3.0]), tx.init(jnp.ones(1)), jnp.ones(1))[0].round(4)
  Array([-0.32], dtype=float32)
  """
  if not callable(step_size):
    validate.positive(step_size=step_size)
  validate.integer_at_least(1, num_examples=num_examples)
  validate.non_negative(prior_precision=prior_precision)
  if not isinstance(mean_noise_std, (int, float)) or not mean_noise_std > 0:
    raise UserError(
      "must be one number > 0; the noise of DP-SGLD is the plan's, and without "
      "it neither privacy nor a temperature is left",
      field="mean_noise_std",
      value=mean_noise_std,
    )

  def update_fn(updates: Any, state: Any, params: Any = None):
    if params is None:
      raise UserError("dp_sgld needs them for the prior", field="params", value=None)
    # n times the mean gradient is the gradient of the sum over examples; the prior counts once.
    pull = lambda g, p: num_examples * g + prior_precision * p.astype(g.dtype)
    return jax.tree.map(pull, updates, params), state

  drift = optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)
  return optax.chain(drift, optax.scale_by_learning_rate(step_size))
