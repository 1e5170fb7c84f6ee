"""Training loops of this room: plain (for what is public or already noised) and private."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import trees
from dpjax.plan import Plan
from dpjax.relevance import labels
from dpjax.relevance.settings import Training
from dpjax.types import Array, Example, LossFn

BatchLoss = Callable[[Any, Any, Any], Array]  # (params, x [B, ...], y [B]) -> scalar
OnEpoch = Callable[[int, Any], None]  # (epochs done, params)


def cross_entropy(apply: Callable) -> BatchLoss:
  """Mean cross-entropy of a batch, in nats."""

  def loss(params: Any, x: Any, y: Any) -> Array:
    log_p = jax.nn.log_softmax(trees.at_least_float32(apply(params, x)))
    return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], axis=1))

  return loss


def corrected(apply: Callable, transitions: Any, class_priors: Any) -> BatchLoss:
  """Mean of `labels.forward_corrected` over a batch."""
  loss_fn = labels.forward_corrected(apply, transitions, class_priors)

  def loss(params: Any, x: Any, y: Any) -> Array:
    return jnp.mean(jax.vmap(loss_fn, (None, 0))(params, Example(x, y)))

  return loss


def _same(x: Any, step: int) -> Any:
  del step
  return x


def fit(
  loss: BatchLoss,
  params: Any,
  records: Callable[[int], tuple[np.ndarray, np.ndarray]],
  how: Training,
  *,
  num_records: int,
  seed: int,
  on_epoch: OnEpoch | None = None,
  corrupt: Callable[[Any, int], Any] = _same,
  refresh: Callable[[Any, Any], Any] | None = None,
  weight_decay: float = 0.0,
  anneal: bool = False,
) -> Any:
  """Adam over shuffled batches; the parameters after the last epoch. NOT private by itself.

  Args:
    records: epoch -> (x [n, ...], y [n]) to learn from in that epoch.
    corrupt: (x of a batch, step) -> x, for noise that a batch shares.
    refresh: (params, x of the batch) -> params, after each step.
    anneal: let the learning rate fall to 0 along a cosine.

  The remainder of an epoch is dropped; with fewer records than a batch, all are one batch.
  """
  size = min(how.batch_size, num_records)
  steps = how.num_epochs * (num_records // size)
  rate: Any = how.learning_rate
  if anneal:
    rate = optax.cosine_decay_schedule(rate, steps)
  tx = optax.adamw(rate, weight_decay=weight_decay)

  @jax.jit
  def step(params, opt_state, x, y):
    grads = jax.grad(loss)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return (refresh(params, x) if refresh else params), opt_state

  opt_state, count = tx.init(params), 0
  for epoch in range(how.num_epochs):
    x, y = records(epoch)
    order = np.random.default_rng([seed, epoch]).permutation(len(y))
    for start in range(0, len(y) - size + 1, size):
      take = order[start : start + size]
      params, opt_state = step(params, opt_state, corrupt(x[take], count), y[take])
      count += 1
    if on_epoch:
      on_epoch(epoch + 1, params)
  return params


def fit_private(
  loss_fn: LossFn,
  params: Any,
  data: Any,
  plan: Plan,
  tx: optax.GradientTransformation,
  *,
  noise_key: Array,
  batch_seed: int,
  steps_per_epoch: int,
  on_epoch: OnEpoch | None = None,
) -> Any:
  """All steps of a plan behind any Optax optimizer; the last parameters.

  Guarantee: the sequence of all parameters is (plan.epsilon(), plan.delta)-DP for one
  element of `data` under the plan's relation.
  """
  chain = optax.chain(plan.transform(noise_key), tx)
  clipped = plan.clipped_grad(loss_fn)

  @jax.jit
  def step(params, opt_state, batch):
    summed: Any = clipped(params, batch.examples, batch.mask)
    updates, opt_state = chain.update(summed, opt_state, params, mask=batch.mask)
    return optax.apply_updates(params, updates), opt_state

  opt_state = chain.init(params)
  for done, batch in enumerate(plan.batches(data, rng=batch_seed), start=1):
    params, opt_state = step(params, opt_state, batch)
    if on_epoch and (done % steps_per_epoch == 0 or done == plan.num_steps):
      on_epoch(-(-done // steps_per_epoch), params)
  return params
