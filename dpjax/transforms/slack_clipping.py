"""SlaClip: a clip norm that adapts, at the privacy cost of a constant clip norm.

Zou et al. 2026, "SlaClip: Gradient Norm Slacks can be Indicator for Adaptive Clipping in DP-SGD"
(ICML 2026), equations 6 to 11 and 28 to 30.

A gradient that is shorter than the clip norm C leaves a part of C unused. Each example uses that
part for K more coordinates, which tell how short the gradient is:

  g+ = (clip(g), s),  sqrt(K) (C - |g|)+ = a L + b,  L = C / sqrt(K),  0 <= b < L,
  s  = (L, .., L, b, 0, .., 0)  with a times L.

g+ has norm at most C, if clip(g) is no longer than g. Proof, with the slack d = C - |g| in [0, C]:

  |s|^2 <= L (a L + b) = L sqrt(K) d = C d,  so  |g+|^2 <= (C - d)^2 + C d = C^2 - d (C - d) <= C^2.

So g+ costs what clip(g) costs, under each relation and sampler: noise of z C on all coordinates of
the sum of g+ is the Gaussian mechanism of noise multiplier z. The coordinates of clip(g) are those
of DP-SGD. The sum of s is divided by L and the batch size. Entry k, counted from 0, is then a share
of norms below r. It is averaged over r from C (K - k - 1) / K to C (K - k) / K, so the bin nearest
to C comes first. The next clip norm is computed from these noisy shares, which is post-processing.

Here d is made 1e-5 C smaller, so that rounded norms cannot pass the bound.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import validate
from dpjax.accounting import text
from dpjax.transforms.adaptive_clipping import AdaptingClip, check_factors, rows_that_count
from dpjax.types import ClippedSum
from dpjax.validate import UserError

# Share of the clip norm by which the slack is reduced. Rounding changes a float32 norm of 1e9
# coordinates by less.
_MARGIN = 1e-5
# Two-sided 99 % quantile of a normal distribution, for equation 36.
_CONFIDENT = 2.576
_MOST_SLOTS = 4096


@dataclasses.dataclass(frozen=True)
class SlackClipping(AdaptingClip):
  """Rule of a `Clip` whose clip norm follows the slack: the clip norm minus gradients' norms.

  The rule costs as much as flat clipping at the same noise multiplier.

  Args:
    num_slots: number K of coordinates of the slack. `slots_for` computes the paper's choice.
    learning_rate: eta of the geometric update.
    clipped_share: beta, the target share of norms above C while few norms are near zero.
    expected_batch_size: public number by which the slack is divided; None for `normalize_by`.
    min_factor, max_factor: bounds on the clip norm, as multiples of the first one.

  Raises:
    UserError: a number out of its range.

  >>> SlackClipping().combined_noise_multiplier(2.0, 100)
  2.0
  """

  num_slots: int = 8
  learning_rate: float = 0.2
  clipped_share: float = 0.5
  expected_batch_size: float | None = None
  min_factor: float = 1e-3
  max_factor: float = 1e3

  def __post_init__(self):
    validate.integer_in(1, _MOST_SLOTS, num_slots=self.num_slots)
    validate.non_negative(learning_rate=self.learning_rate)
    validate.open_unit(clipped_share=self.clipped_share)
    if self.expected_batch_size is not None:
      validate.positive(expected_batch_size=self.expected_batch_size)
    check_factors(self.min_factor, self.max_factor)

  @staticmethod
  def slots_for(batch_size: float, noise_multiplier: float) -> int:
    """Returns the largest K for which a 99 % interval of a share's noise is at most 1 / K wide.

    This is equation 36 of the paper. The result is at least 1 and at most 4096.

    >>> SlackClipping.slots_for(256, 1.0)
    13
    """
    validate.positive(batch_size=batch_size, noise_multiplier=noise_multiplier)
    most = (batch_size / (2 * _CONFIDENT * noise_multiplier)) ** (2 / 3)
    return min(max(1, math.floor(most)), _MOST_SLOTS)

  def query(self, summed: ClippedSum, mask: Any = None) -> jax.Array:
    """Returns the sum of slack vectors s over rows, [K]. Rows without a finite norm add nothing.

    Raises:
      UserError: a sum whose terms may be longer than its norms. They would leave less slack.
    """
    if not summed.shortened:
      raise UserError(
        "needs a sum of flat clipping, such as plan.clipped_grad gives: terms that a rule "
        "lengthens, or that are divided by the bound, leave less slack than their norms say",
        field="updates",
      )
    bound = summed.l2_bound
    norms = jnp.asarray(summed.norms, jnp.float32)
    slack = jnp.maximum(1 - _MARGIN - norms / bound, 0.0)  # [B], in units of C
    indices = jnp.arange(self.num_slots, dtype=jnp.float32)[None]  # [1, K]
    filled = jnp.clip(self.num_slots * slack[:, None] - indices, 0.0, 1.0)  # [B, K]
    rows = rows_that_count(summed, mask) & jnp.isfinite(norms)
    width = bound / math.sqrt(self.num_slots)
    return width * jnp.sum(jnp.where(rows[:, None], filled, 0.0), axis=0)

  def query_unit(self, std: float, normalize_by: float) -> float:
    # The slack has the unit of gradients, so it gets the same noise as the sum.
    del std, normalize_by
    return 1.0

  def next_scale(self, scale: jax.Array, noisy: jax.Array, clip: Any) -> jax.Array:
    width = clip.l2_bound / math.sqrt(self.num_slots)
    shares = noisy / width  # [K], the bin nearest to C first
    # Equations 28 to 30. `near_zero` slows the fall of the clip norm if many norms are near zero.
    near_zero = jnp.clip(shares[-1] / (clip.l2_bound * scale), 0.0, 1.0)
    target = 1 - self.clipped_share * (1 - near_zero)
    step = jnp.exp(self.learning_rate * (target - shares[0]))
    return jnp.clip(scale * step, self.min_factor, self.max_factor)

  def combined_noise_multiplier(
    self, noise_multiplier: float, normalize_by: float
  ) -> float:
    del normalize_by
    return noise_multiplier

  def sum_noise_multiplier(self, combined: float, normalize_by: float) -> float:
    del normalize_by
    return combined

  def statement(self, noise_multiplier: float, normalize_by: float) -> str:
    del normalize_by
    shown = text.lower(noise_multiplier, digits=6)
    return (
      f"Slack clipping. Every step releases a sum and {self.num_slots} sums of slack with noise "
      f"multiplier {shown}, as one Gaussian mechanism: an example's gradient and slack together "
      "are no longer than the clip norm. The clip norms follow from the noisy slack alone and may "
      "be released."
    )
