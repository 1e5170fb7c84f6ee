"""Central training: DP-SGD as a pair of pure functions."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import core
from jax.sharding import Mesh

from dpjax import trees, validate
from dpjax.gradients import arguments, microbatch
from dpjax.gradients.device_mesh import checked_mesh, lay_out, whole_rows
from dpjax.noise.gaussian import is_key_of_noise, key_id
from dpjax.parallel import exchanges
from dpjax.plan import Plan
from dpjax.sampling.batches import rows_of_slice
from dpjax.training import schedule_free
from dpjax.transforms import accumulation, guard
from dpjax.transforms import clip_scale as clip_scale_lib
from dpjax.types import (
  Algorithm,
  Array,
  ArrayLike,
  Batch,
  ClippedSum,
  Example,
  LossFn,
  Params,
)
from dpjax.validate import UserError


class TrainState(NamedTuple):
  """State of training. `opt_state` holds the noise key: keep it secret."""

  params: Params
  opt_state: optax.OptState  # of plan.accumulated(chain(plan.transform(noise_key), tx))
  ema: Params | None  # exponential average of params, or None
  step: Array  # int32, updates done


class StepInfo(NamedTuple):
  """Diagnostics of a step, computed from raw examples: NOT private.

  Means are over the examples that count. They are NaN if all examples of a batch are left out, and
  0 for an empty batch.
  """

  train_loss: Array  # mean loss
  mean_norm: Array  # mean gradient norm before clipping
  clip_fraction: Array  # share of examples whose norm exceeded the bound
  batch_size: Array  # realised; itself a secret under Poisson sampling
  left_out: (
    Array  # examples of the batch whose gradient is NaN or infinite, and counts as 0
  )


def _with_keys(examples: Any, keys: Array) -> Any:
  """Returns examples with a key each: `example.key`, or `example["key"]` of a dict."""
  if isinstance(examples, Example):
    return examples._replace(key=keys)
  if not isinstance(examples, dict):
    kind = type(examples).__name__
    raise UserError(
      f"needs examples that are dpjax.types.Example or a dict, which get a key; got {kind}",
      field="example_key",
    )
  # JAX sorts the names of a dict, so all must be text, as "key" is.
  if not all(isinstance(name, str) for name in examples):
    raise UserError(
      'needs a dict whose names are text, beside which "key" can stand',
      field="example_key",
    )
  if "key" in examples:
    raise UserError(
      'needs examples without an entry "key" of their own: it gets the key of each example',
      field="example_key",
    )
  return {**examples, "key": keys}


def _step_info(summed: ClippedSum, scale: ArrayLike) -> StepInfo:
  """Returns the diagnostics of a sum whose gradients were divided by `scale`."""
  mask: Any = summed.mask
  counted = mask & jnp.isfinite(summed.norms)
  batch_size = jnp.sum(mask)
  count = jnp.sum(counted)
  # 0 would look like a perfect fit. An empty batch has nothing to divide by.
  divisor = jnp.where(batch_size > 0, count, 1).astype(jnp.float32)

  def mean(values: Array) -> Array:
    total = jnp.sum(jnp.where(counted, values, 0))
    return total / divisor.astype(total.dtype)

  return StepInfo(
    train_loss=mean(summed.losses) * scale,
    mean_norm=mean(summed.norms) * scale,
    clip_fraction=mean((summed.norms > summed.l2_bound).astype(jnp.float32)),
    batch_size=batch_size,
    left_out=batch_size - count,
  )


@jax.jit
def join(first: StepInfo, second: StepInfo) -> StepInfo:
  """Returns the diagnostics of two slices of a step, as if they were one batch.

  >>> info = StepInfo(*map(jnp.float32, (2.0, 1.0, 0.0, 3, 2)))
  >>> float(join(info, info._replace(train_loss=8.0, left_out=1.0)).train_loss)
  6.0
  """
  counts = [info.batch_size - info.left_out for info in (first, second)]
  batch_size = first.batch_size + second.batch_size
  divisor = jnp.where(batch_size > 0, counts[0] + counts[1], 1).astype(jnp.float32)

  def mean(*values: Array) -> Array:
    # The mean of a slice without an example that counts may be NaN.
    total = jnp.zeros((), values[0].dtype)
    for n, value in zip(counts, values):
      total += jnp.where(n > 0, jnp.asarray(n, value.dtype) * value, 0)
    return total / divisor.astype(total.dtype)

  return StepInfo(
    train_loss=mean(first.train_loss, second.train_loss),
    mean_norm=mean(first.mean_norm, second.mean_norm),
    clip_fraction=mean(first.clip_fraction, second.clip_fraction),
    batch_size=batch_size,
    left_out=first.left_out + second.left_out,
  )


def average(ema: Params, params: Params, step: Array, decay: float) -> Params:
  """Returns the average after step t, counted from 0, with decay min(decay, (1 + t) / (10 + t)).

  The warm-up is that of De et al. 2022: the average soon forgets the initial weights.
  """
  done = jnp.float32(step)
  rate = jnp.minimum(decay, (1.0 + done) / (10.0 + done))

  def mean(old: Array, new: Array) -> Array:
    old = trees.at_least_float32(old)
    share, rest = rate.astype(old.dtype), (1 - rate).astype(old.dtype)
    return share * old + rest * new.astype(old.dtype)

  return jax.tree.map(mean, ema, params)


def _check_arguments(
  *,
  noise_key: Array,
  example_key: Array | None,
  ema_decay: float | None,
  mesh: Mesh | None,
) -> None:
  """Raises UserError for a wrong argument, or one that several processes must not have so.

  Each process draws the noise that its own devices hold. With two keys, two processes would hold
  two noisy versions of one sum, each of which is released. Without a mesh, each would train alone.
  """
  if ema_decay is not None:
    validate.open_unit(ema_decay=ema_decay)
  if example_key is not None:
    trees.check_key(example_key=example_key)
    if is_key_of_noise(example_key, noise_key):
      raise UserError(
        "must be another key than noise_key, as of jax.random.split", field="example_key"
      )
  if jax.process_count() == 1:
    return
  if not isinstance(noise_key, core.Tracer):
    trees.check_key(noise_key=noise_key)
    example_id = "" if example_key is None else key_id(example_key)
    exchanges.same(noise_key=key_id(noise_key), example_key=example_id)
  if mesh is None:
    raise UserError(
      f"must be such as 'data:{jax.device_count()}', over devices of all "
      f"{jax.process_count()} processes: each would add the same noise to a sum "
      "of its own",
      field="mesh",
      value=None,
    )


def _of_no_scales(params: Params, batch: Batch) -> ClippedSum:
  """Raises UserError. It is called in place of the gradient function if a plan with scaling gets a
  state without scales."""
  del params, batch
  raise UserError(
    "must be of a plan with scaling, as the algorithm's own `init` makes it",
    field="state",
  )


def dp_sgd(
  loss_fn: LossFn,
  plan: Plan,
  tx: optax.GradientTransformation,
  *,
  noise_key: Array,
  example_key: Array | None = None,
  ema_decay: float | None = None,
  method: str = "auto",
  microbatch_size: int | None = None,
  memory_budget: float | None = None,
  mesh: Mesh | None = None,
) -> Algorithm:
  """DP-SGD (Abadi et al. 2016) with any Optax optimizer after the private gradient.

  Args:
    loss_fn: `(params, example) -> scalar` for ONE example.
    plan: clip norm, noise and divisor; also yields the batches.
    tx: optimizer; it costs no privacy, as it gets only the privatised gradient. It gets no extra
      argument such as the mask, whose sum is a secret.
    noise_key: typed key of the noise, for ONE run: `dpjax.new_key()`, or the key of a seed that no
      other run has. Two runs with one key have the same noise, which cancels in the difference of
      their releases.
    example_key: typed key from which every example of every step gets its own
      `example.key` (augmentation, dropout), or `example["key"]` of a dict; None adds no key. It is
      as secret as `noise_key`, and must be another key, not one that follows from it:
      `fold_in(noise_key, 1)` is the key of a step's noise. An example that leaves shifts the others
      to other keys. If these were known, all gradients would change visibly.
    ema_decay: decay of an exponential average of the parameters (post-processing, at no cost); None
      for no average. It must be None with a schedule-free optimizer of Optax, which averages the
      parameters itself: `eval_params` returns that average.
    method, microbatch_size, memory_budget: see `dpjax.clipped_grad`.
    mesh: device mesh (`dpjax.gradients.device_mesh`). Its axis "data" splits the examples of a
      batch. An axis "model", if there is one, splits parameters, optimizer state and noise. With
      several processes the mesh must span all of them, and all processes pass the same arguments
      and batches; keys that differ raise an error. Noise, batches and privacy event are as on one
      device.

  Returns:
    `init(params) -> TrainState` and `step(state, batch) -> (TrainState, StepInfo)`, both
    to be jitted by the caller; `step` may donate its state. A plan with slices > 1 takes
    `plan.slices` calls for one step of the optimizer; `state.step` counts such steps. With a mesh,
    place batches by `gradients.device_mesh.split_rows`, so that no device gets the whole batch.

  Guarantee: the sequence of all parameters is (plan.epsilon(), plan.delta)-DP for one
  example, for the steps and sampler of the plan. StepInfo is not private. A step beyond the
  plan raises, or gives NaN under jit; `plan.spent(state)` gives the cost of the steps so far.

  >>> from dpjax.sampling import PoissonSampler
  >>> plan = Plan(sampler=PoissonSampler(sampling_prob=0.5, capacity=4), noise_multiplier=0.0,
  ...   l2_clip_norm=1.0, normalize_by=2, num_steps=1, delta=1e-5)
  >>> loss_fn = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
  >>> init, step = dp_sgd(loss_fn, plan, optax.sgd(1.0), noise_key=jax.random.key(0))
  >>> batch = Batch(jnp.array([[2.0], [0.5]]), jnp.array([True, True]))
  >>> step(init(jnp.zeros(1)), batch)[0].params
  Array([0.75], dtype=float32)
  """
  mesh = None if mesh is None else checked_mesh(mesh)
  validate.instance(Plan, "a dpjax.Plan", plan=plan)
  validate.optimizer(tx=tx)
  _check_arguments(
    noise_key=noise_key, example_key=example_key, ema_decay=ema_decay, mesh=mesh
  )
  clipped_grad = functools.partial(
    plan.clipped_grad,
    method=method,
    microbatch_size=microbatch_size,
    memory_budget=memory_budget,
    mesh=mesh,
  )
  padded_batch_size = rows_of_slice(plan.sampler.padded_batch_size, plan.slices)
  placed = lambda tree: tree if mesh is None else lay_out(mesh, tree)
  # With scaling the loss depends on the state, so each step makes its own gradient function.
  grad_fn = clipped_grad(loss_fn) if plan.scaling is None else _of_no_scales
  rows = padded_batch_size if mesh is None else whole_rows(padded_batch_size, mesh)
  chain = plan.accumulated(optax.chain(plan.transform(noise_key), tx), rows=rows)

  def clipped(state: TrainState, batch: Batch) -> tuple[ClippedSum, Any]:
    private = _private_state(state)
    if plan.scaling is not None:
      # A plan without scaling does not import its transform.
      from dpjax.transforms.scale_then_privatize import ScaledLoss, coordinate_scales

      # The state of another plan has no scales, which `grad_fn` says.
      if (scales := coordinate_scales(private)) is not None:
        scaled_loss = ScaledLoss(loss_fn, state.params, scales)
        return clipped_grad(scaled_loss)(scaled_loss.start, batch), 1
    scale = clip_scale_lib.clip_scale(private)
    if scale is None:
      return grad_fn(state.params, batch), 1
    # Clipping the gradient of this loss to C clips that of `loss_fn` to C * scale.
    scaled_fn = clipped_grad(lambda params, example: loss_fn(params, example) / scale)
    return scaled_fn(state.params, batch), scale

  def init(params: Params) -> TrainState:
    # The parameters are copied, so that donation does not delete the caller's arrays.
    params = placed(jax.tree.map(jnp.copy, params))
    # Updates are float32 or wider, and so is from the first step on what is computed from them.
    wide = jax.tree.map(trees.at_least_float32, params)
    ema = None if ema_decay is None else jax.tree.map(jnp.copy, wide)
    opt_state = chain.init(wide)
    schedule_free.check(opt_state, params, ema_decay)
    return placed(TrainState(params, opt_state, ema, jnp.zeros((), jnp.int32)))

  def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepInfo]:
    examples = arguments.masked_batch(batch).examples
    # With slices = 1 the state has no count of slices.
    chained: Any = state.opt_state
    slice_index = chained.inner.slices if plan.slices > 1 else 0
    # Each slice of a step has its own keys.
    call = state.step * plan.slices + slice_index
    # Every device makes all keys, so that none needs to be sent.
    if example_key is not None:
      size = jax.tree.leaves(examples)[0].shape[0]
      num_keys = padded_batch_size if size == rows else size
      # Rows beyond `num_keys` only fill the mesh. They must not change the keys of the other rows.
      keys = jax.random.split(jax.random.fold_in(example_key, call), num_keys)
      examples = _with_keys(examples, placed(microbatch.fill(keys, size)))
    summed, scale = clipped(state, batch._replace(examples=examples))
    # The sum holds its mask. An extra argument would reach the optimizer, and the mask is a secret.
    updates, opt_state = chain.update(summed, state.opt_state, state.params)
    # The update is added in float32 or wider, also to parameters of types that JAX does not promote
    # (float8). Only the result, after the noise, is rounded to the parameter's own type.
    wide = optax.apply_updates(jax.tree.map(trees.at_least_float32, state.params), updates)
    params = jax.tree.map(lambda new, old: new.astype(old.dtype), wide, state.params)
    done = slice_index == plan.slices - 1
    # Like the parameters, the average changes once per step, at the last slice.
    ema = state.ema
    if ema_decay is not None:
      ema = average(ema, params, state.step, ema_decay)
      ema = jax.tree.map(lambda new, old: jnp.where(done, new, old), ema, state.ema)
    after = placed(TrainState(params, opt_state, ema, state.step + jnp.int32(done)))
    return after, _step_info(summed, scale)

  return Algorithm(init, step)


def eval_params(state: TrainState) -> Params:
  """Returns the parameters to evaluate and release: their average, if the state holds one.

  `ema_decay` makes such an average, and so does a schedule-free optimizer of Optax.
  """
  if state.ema is not None:
    return state.ema
  average = schedule_free.average(state.opt_state, state.params)
  return state.params if average is None else average


def _private_state(state: TrainState) -> Any:
  """Returns the state of `plan.transform`, without the count of slices and the optimizer's
  state."""
  (private,) = accumulation.private_states(state.opt_state)
  return private


def noise_state(state: TrainState) -> Any:
  """Returns the state of the noise, with its key and the number of draws so far."""
  return guard.noise_of(_private_state(state).inner)


def clip_scale(state: TrainState) -> float | None:
  """Returns the clip norm of the next step, divided by `plan.l2_clip_norm`.

  Returns None if the clip norm is constant, or if there is none (`zoo.recipes.contrastive`). The
  ratio is public, or an output of the mechanism: it may be logged and released.
  """
  private = accumulation.private_states(state.opt_state)
  scale = clip_scale_lib.clip_scale(private[0]) if private else None
  return None if scale is None else float(scale)
