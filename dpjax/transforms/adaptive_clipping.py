"""Private adaptive clipping: the clip norm follows a noisy query about the gradients' norms.

In each step an adapting rule (`AdaptingClip`) releases one more query of the same rows, together
with the noisy sum. Here the query is a count, with which the clip norm follows a quantile of the
norms. `slack_clipping` has another query.

Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping"
(arXiv:1905.03871), algorithm 1. At step t the noisy share of examples with norm <= C_t
gives C_{t+1} = C_t exp(-learning_rate (share - target_quantile)).

The table shows what each example adds to both queries. C is the first clip norm, and s_t = C_t / C:

| query            | one example's term           | norm at most | noise          |
| ---------------- | ---------------------------- | ------------ | -------------- |
| gradient / s_t   | clip(g / s_t, C)             | C            | z_sum C        |
| centred count    | 1[norm <= C_t] - 1/2         | 1/2          | count_noise_std|

Both are released together, as one vector. In it each query is divided by the std of its noise. One
example moves this vector by at most 1 / z, z^-2 = z_sum^-2 + (2 count_noise_std)^-2 (theorem 1 of
the paper). That ONE Gaussian mechanism is the step's event. Under replace_one a record may move
each query, and so the vector, twice as far: the accountant's usual conversion covers this. Under
replace_special the empty record adds nothing to either query, as padding does.

Norms are compared with the same C_t that clips. The noise of the sum is proportional to C_t. The
count is divided by the public expected batch size. C_t is a function of private outputs, so it may
be logged and released.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from dpjax import closed_over, gradients, noise, trees, validate
from dpjax.accounting import text
from dpjax.gradients.arguments import checked_mask
from dpjax.noise import gaussian
from dpjax.transforms.clip_and_noise import clip_of
from dpjax.transforms.clip_scale import ScaledState
from dpjax.transforms.group_noise import check_drawn, noise_std
from dpjax.transforms.guard import with_guard
from dpjax.transforms.inputs import Mechanism, divide_rows, open_gradients
from dpjax.types import ClipLike, ClippedSum
from dpjax.validate import UserError

# Default std of the noise on the count, as a share of the expected batch size, as in the paper.
_COUNT_SHARE = 1 / 20


class AdaptingClip(gradients.Flat):
  """Base class of rules whose clip norm follows a private query, released with each step's sum.

  Gradients are clipped flat to the current clip norm; the `Clip` states the first one. A subclass
  defines the query, the noise that covers query and sum, and how the clip norm changes.
  """

  adapts: ClassVar[bool] = True
  may_be_unbounded: ClassVar[bool] = False

  expected_batch_size: float | None

  def query(self, summed: ClippedSum, mask: Any = None) -> jax.Array:
    """Returns the query without noise, a sum over rows: [] or [k]. Queries of parts of a batch
    add up to the query of the batch."""
    raise NotImplementedError

  def query_unit(self, std: float, normalize_by: float) -> float:
    """Returns the factor that scales the query so that it needs noise of `std`, as the sum does.

    Sum and scaled query then get one draw of noise, and are one Gaussian mechanism.
    """
    raise NotImplementedError

  def next_scale(self, scale: jax.Array, noisy: jax.Array, clip: Any) -> jax.Array:
    """Returns the next clip norm as a multiple of the first one, from the noisy query.

    Args:
      scale: the current multiple, [].
      noisy: the noisy query / batch size.
      clip: the `Clip` with the first clip norm.
    """
    raise NotImplementedError

  def combined_noise_multiplier(
    self, noise_multiplier: float, normalize_by: float
  ) -> float:
    """Returns the noise multiplier of sum and query as one mechanism, from the sum's multiplier."""
    raise NotImplementedError

  def sum_noise_multiplier(self, combined: float, normalize_by: float) -> float:
    """Returns the noise multiplier of the sum: the inverse of `combined_noise_multiplier`."""
    raise NotImplementedError

  def statement(self, noise_multiplier: float, normalize_by: float) -> str:
    """Returns the sentences about this rule for a privacy statement."""
    raise NotImplementedError

  def batch_size(self, normalize_by: float) -> float:
    """Returns the public divisor of the query: `expected_batch_size`, or else `normalize_by`."""
    return self.expected_batch_size or normalize_by


def check_factors(min_factor: float, max_factor: float) -> None:
  """Raises UserError unless min_factor is in [1e-6, 1] and max_factor in [1, 1e6]."""
  validate.number_in(validate.MIN_FACTOR, 1, min_factor=min_factor)
  validate.number_in(1, validate.MAX_FACTOR, max_factor=max_factor)


@dataclasses.dataclass(frozen=True)
class AdaptiveClipping(AdaptingClip):
  """Rule of a `Clip` whose clip norm follows a quantile of the gradients' norms.

  The `Clip` states the first clip norm. At each step gradients are clipped flat to the current one.

  Args:
    target_quantile: share of examples that should not be clipped, in (0, 1).
    learning_rate: learning rate of the geometric update; 0 keeps the clip norm.
    count_noise_std: std of the noise on the count, in examples; None for 1/20 of the expected
      batch size, as in the paper.
    expected_batch_size: public number by which the count is divided; None for `normalize_by`.
    min_factor, max_factor: bounds on the clip norm, as multiples of the first one.

  >>> round(AdaptiveClipping(count_noise_std=1.0).combined_noise_multiplier(2.0, 100), 4)
  1.4142
  """

  target_quantile: float = 0.5
  learning_rate: float = 0.2
  count_noise_std: float | None = None
  expected_batch_size: float | None = None
  min_factor: float = 1e-3
  max_factor: float = 1e3

  def __post_init__(self):
    validate.open_unit(target_quantile=self.target_quantile)
    validate.non_negative(learning_rate=self.learning_rate)
    sizes = {"count_noise_std": self.count_noise_std}
    sizes["expected_batch_size"] = self.expected_batch_size
    validate.positive(**{name: size for name, size in sizes.items() if size is not None})
    check_factors(self.min_factor, self.max_factor)

  def query(self, summed: ClippedSum, mask: Any = None) -> jax.Array:
    return centred_count(summed, mask)

  def query_unit(self, std: float, normalize_by: float) -> float:
    return std / self.count_std(normalize_by) if std else 1.0

  def next_scale(self, scale: jax.Array, noisy: jax.Array, clip: Any) -> jax.Array:
    del clip
    step = jnp.exp(-self.learning_rate * (noisy + 0.5 - self.target_quantile))
    return jnp.clip(scale.astype(step.dtype) * step, self.min_factor, self.max_factor)

  def count_std(self, normalize_by: float) -> float:
    """Returns the standard deviation of the noise on the count, in examples."""
    return self.count_noise_std or _COUNT_SHARE * self.batch_size(normalize_by)

  def combined_noise_multiplier(
    self, noise_multiplier: float, normalize_by: float
  ) -> float:
    if noise_multiplier == 0:
      return 0.0
    # One example moves the count by 1/2: z^-2 = z_sum^-2 + (2 count_std)^-2 (theorem 1).
    return 1 / math.hypot(1 / noise_multiplier, 1 / (2 * self.count_std(normalize_by)))

  def sum_noise_multiplier(self, combined: float, normalize_by: float) -> float:
    return (combined**-2 - (2 * self.count_std(normalize_by)) ** -2) ** -0.5

  def statement(self, noise_multiplier: float, normalize_by: float) -> str:
    combined = self.combined_noise_multiplier(noise_multiplier, normalize_by)
    stds = (noise_multiplier, self.count_std(normalize_by), combined)
    of_sum, of_count, of_both = (text.lower(std, digits=6) for std in stds)
    return (
      f"Adaptive clipping. Every step releases a sum with noise multiplier {of_sum} and a "
      f"count with noise of standard deviation {of_count} and sensitivity 1/2, charged "
      f"together as one Gaussian mechanism with noise multiplier {of_both}. The clip norms "
      "follow from the noisy counts alone and may be released."
    )


def _count(summed: ClippedSum, mask: jax.Array) -> jax.Array:
  """Returns sum_i mask_i (1[norm_i <= C] - 1/2); a norm that is not finite counts as above C."""
  inside = summed.norms <= summed.l2_bound
  return jnp.sum(jnp.where(mask, jnp.where(inside, 0.5, -0.5), 0.0))


def rows_that_count(summed: ClippedSum, mask: Any = None) -> jax.Array:
  """Returns the mask of the rows that a query may use, [B] bool.

  Rows that the ClippedSum marks as padding never count, whatever `mask` says. If they did, one
  example could move a query by more than is accounted for.
  """
  known = summed.mask
  if known is None:
    return checked_mask(mask, summed.norms.shape[0])
  if mask is not None:
    known = known & checked_mask(mask, known.shape[0])
  return known


def centred_count(summed: ClippedSum, mask: Any = None) -> jax.Array:
  """Returns the number of examples within the clip norm, minus half the number of examples, [].
  Counts of parts of a batch add up to that of the batch, exactly for fewer than 2^23 rows."""
  return _count(summed, rows_that_count(summed, mask))


def adaptive_clip_and_noise(
  *,
  l2_clip_norm: ClipLike,
  noise_multiplier: float,
  normalize_by: float,
  key: jax.Array,
  num_steps: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Returns `clip_and_noise` with a clip norm that follows a noisy query about the norms.

  Args:
    l2_clip_norm: a `Clip` of ONE finite number, the first clip norm, with an `AdaptingClip` as its
      rule, such as `SlackClipping`. A number alone gets the rule `AdaptiveClipping()`.
    noise_multiplier: z_sum; the noise on the sum of a step has standard deviation z_sum times the
      clip norm of the step. The accountant needs `combined_noise_multiplier` of the rule, which is
      at most z_sum; `dpjax.Plan` uses it.
    normalize_by: public divisor of the noisy sum.
    key: a typed key; one draw per step serves the sum and the query.
    num_steps: as for `clip_and_noise`.

  Returns:
    A transform that takes `per_example_grads` with `mask=`, or the ClippedSum of the loss DIVIDED
    by `clip_scale(state)`, clipped to `l2_clip_norm`. A ClippedSum that was added up from parts
    knows no mask: give the sum of the parts' queries as `count=`.

  Guarantee: update and clip norm of each step are the post-processing of one Gaussian
  mechanism with the combined noise multiplier, for any gradients and any mask.

  >>> tx = adaptive_clip_and_noise(
  ...   l2_clip_norm=1.0, noise_multiplier=0.0, normalize_by=2, key=jax.random.key(0))
  >>> grads = gradients.wrap_grads(jnp.array([[3.0, 4.0], [6.0, 8.0]]))
  >>> mask = jnp.array([True, True])
  >>> _, state = tx.update(grads, tx.init(jnp.zeros(2)), mask=mask)
  >>> bool(state.inner.scale == jnp.exp(0.2 * 0.5))  # all were clipped: up by half the rate
  True
  """
  whole = gradients.Clip.of(l2_clip_norm, AdaptiveClipping())
  clip = clip_of(whole, noise_multiplier, normalize_by, key)
  if not isinstance(clip.rule, AdaptingClip):
    raise UserError(
      "must be a Clip of an AdaptiveClipping or another AdaptingClip",
      field="l2_clip_norm",
      value=clip,
    )
  if num_steps is not None:
    validate.integer_at_least(1, num_steps=num_steps)
  adaptive = adaptive_noise(
    clip,
    noise_multiplier=noise_multiplier,
    normalize_by=normalize_by,
    key=key,
    num_steps=num_steps,
  )
  return with_guard(adaptive)


def adaptive_noise(
  clip: gradients.Clip,
  *,
  noise_multiplier: float,
  normalize_by: float,
  key: jax.Array,
  num_steps: int | None = None,
) -> Mechanism:
  """Returns the mechanism of `adaptive_clip_and_noise`, without a guard; its arguments are not
  checked."""
  rule: Any = clip.rule
  std = closed_over.Number(noise_std(clip, noise_multiplier))
  batch_size = rule.batch_size(normalize_by)
  unit = closed_over.argument(rule.query_unit(float(std), normalize_by), jnp.float32)

  def init_fn(params) -> ScaledState:
    check_drawn(std, params)
    started = gaussian.init(key, params)
    return ScaledState(started, jnp.ones((), jnp.float32), jnp.zeros((), jnp.int32))

  def update_fn(updates, state, params=None, *, mask=None, count=None, conditions):
    scaled = divide_rows(updates, state.scale)
    summed, sound = open_gradients(scaled, params, mask, clip, conditions)
    count = jnp.asarray(rule.query(summed, mask) if count is None else count)
    width = unit.astype(count.dtype)
    # Sum and query get one draw of noise: the event is ONE Gaussian mechanism.
    queries = {"sum": summed.total, "count": count * width}
    noisy, inner = noise.add_gaussian(
      state.inner, queries, std, num_steps=num_steps, sound=sound
    )
    # Only the noisy query moves the clip norm, so the new one is post-processing.
    scale = rule.next_scale(state.scale, noisy["count"] / width / batch_size, clip)
    # `lax.scan` refuses a state that changes its type, as to float64 where JAX has it.
    after = ScaledState(inner, scale.astype(jnp.float32), state.steps + 1)
    return trees.scale(noisy["sum"], state.scale / normalize_by), after

  return Mechanism(init_fn, update_fn, ScaledState)
