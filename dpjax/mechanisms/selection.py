"""Selection of one of k candidates by a private score: utilities [..., k] -> index [...].

All three mechanisms are (epsilon, 0)-DP if one record moves every utility by at most
`utility_sensitivity`, under `neighboring_relation`. If one record also moves all utilities in the
same direction, as counts under add_or_remove_one, `monotonic=True` gives the same guarantee with
half of the noise. Batch axes are separate selections, each of which costs epsilon.

| utilities                  | outcome                                               |
| -------------------------- | ----------------------------------------------------- |
| -infinity                  | never chosen; only for what is excluded publicly      |
| NaN, +infinity, or nothing | UserError; while being traced the row's answer is -1  |
| but -infinity              |                                                       |
| k = 0                      | UserError                                             |
| all equal, also at 1e30    | uniform                                               |

All three subtract the largest utility of the row, add noise of `dpjax.noise`, and return the index
of the maximum. Gumbel noise reaches 87 scales, Laplace and exponential noise 133, so a candidate
with a chance of e^-80 can be chosen. In float32 a chance is right up to a factor of about
1 +- 2^-16.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees, validate
from dpjax.mechanisms import finite, stated
from dpjax.noise import source
from dpjax.validate import UserError

_SAMPLERS = {
  "laplace": source.laplace,
  "gumbel": source.gumbel,
  "exponential": source.exponential,
}
NOISES = tuple(_SAMPLERS)


@dataclasses.dataclass(frozen=True)
class _Selection:
  epsilon: float
  utility_sensitivity: float = 1.0
  monotonic: bool = False
  neighboring_relation: str = "add_or_remove_one"

  def __post_init__(self) -> None:
    validate.flag(monotonic=self.monotonic)
    stated.positive(epsilon=self.epsilon, utility_sensitivity=self.utility_sensitivity)
    stated.positive(scale=self.scale)
    validate.one_of(stated.RELATIONS, neighboring_relation=self.neighboring_relation)
    if self.monotonic and self.neighboring_relation == "replace_one":
      raise UserError(
        "replacing a record can raise one utility and lower another; must be False "
        "under replace_one",
        field="monotonic",
        value=True,
      )

  @property
  def scale(self) -> float:
    """Returns the scale of the noise: 2 utility_sensitivity / epsilon, or half if `monotonic`."""
    shifts = 1 if self.monotonic else 2
    return shifts * float(self.utility_sensitivity) / float(self.epsilon)

  def _choose(self, noise: str, key: jax.Array, utilities: jax.Array) -> jax.Array:
    trees.check_key(key=key)
    gaps, sound = finite.gaps("utilities", utilities)
    scale = source.check_scale(self.scale, gaps.dtype, "scale")
    noisy = gaps / scale + _SAMPLERS[noise](key, gaps, 1.0)
    return jnp.where(sound, jnp.argmax(noisy, axis=-1), -1).astype(jnp.int32)

  def _logits(self, utilities: np.ndarray) -> np.ndarray:
    # Raises for a row with NaN or +infinity, and for a row without a candidate to choose.
    finite.gaps("utilities", utilities)
    exact = np.asarray(utilities, np.float64)
    return (exact - exact.max(-1, keepdims=True)) / self.scale

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """Returns the event of one selection: that of an arbitrary (epsilon, 0)-DP mechanism."""
    return stated.pure_event(
      float(self.epsilon), self.neighboring_relation, neighboring_relation
    )


@dataclasses.dataclass(frozen=True)
class Exponential(_Selection):
  """Chooses candidate r with probability proportional to exp(utility_r / scale), by Gumbel-max.

  Guarantee: (epsilon, 0)-DP, if one record moves each utility by at most `utility_sensitivity`.
  Source: McSherry and Talwar 2007; Dwork and Roth 2014, theorem 3.10.

  >>> mechanism = Exponential(epsilon=2.0)  # doctest: +SLOW
  >>> mechanism.probs(np.log([1.0, 2.0, 5.0])).round(3)  # scale 1: proportional
  array([0.125, 0.25 , 0.625])
  >>> mechanism(jax.random.key(0), np.zeros((4, 3))).shape
  (4,)
  """

  def probs(self, utilities: np.ndarray) -> np.ndarray:
    """Returns the exact probabilities [..., k]. Not private: they depend on the data."""
    weights = np.exp(self._logits(utilities))
    return weights / weights.sum(-1, keepdims=True)

  def __call__(self, key: jax.Array, utilities: jax.Array) -> jax.Array:
    """Returns the index of the chosen candidate, int32 [...]."""
    return self._choose("gumbel", key, utilities)


@dataclasses.dataclass(frozen=True)
class PermuteAndFlip(_Selection):
  """Visits candidates r in random order, and takes r with probability exp((u_r - max u) / scale).

  u_r is the utility of candidate r. The first candidate that is taken is the answer.

  Guarantee: (epsilon, 0)-DP, and for every data set an expected utility at least that of
  the exponential mechanism.
  Source: McKenna and Sheldon 2020, arXiv:2010.12603, algorithm 1; drawn as the noisy maximum
  with exponential noise, which has the same distribution (Ding et al. 2021, arXiv:2105.07260).

  >>> mechanism = PermuteAndFlip(epsilon=2.0)
  >>> mechanism.probs(np.log([1.0, 1.0])).round(3)
  array([0.5, 0.5])
  >>> mechanism.probs(np.log([1.0, 2.0])).round(3)  # 1/2 * 1/2 and the rest
  array([0.25, 0.75])
  """

  def probs(self, utilities: np.ndarray) -> np.ndarray:
    """Returns the exact probabilities [k] of one selection. Not private.

    Each candidate r has its turn at an independent uniform time t in [0, 1]. Let p_r be the chance
    that r is taken in its turn. Then r is chosen with chance p_r * integral of
    prod_{s != r} (1 - p_s t) dt over [0, 1]. The integrand is a polynomial of degree k - 1, which
    Gauss-Legendre quadrature integrates exactly.
    """
    accept = np.exp(self._logits(utilities))
    if accept.ndim != 1:
      raise UserError(f"must have shape [k], not {accept.shape}", field="utilities")
    nodes, weights = np.polynomial.legendre.leggauss(accept.size // 2 + 1)
    passed = 1 - accept[:, None] * (nodes + 1) / 2  # [k, nodes]: not taken by time t
    others = [np.delete(passed, r, axis=0).prod(0) for r in range(accept.size)]
    return accept * (np.array(others) @ weights) / 2

  def __call__(self, key: jax.Array, utilities: jax.Array) -> jax.Array:
    """Returns the index of the chosen candidate, int32 [...]."""
    return self._choose("exponential", key, utilities)


@dataclasses.dataclass(frozen=True)
class ReportNoisyMax(_Selection):
  """Returns the index of the largest utility after noise of `scale`, but not the noisy utility.

  `noise` is "laplace", "gumbel" (which gives the exponential mechanism) or "exponential" (which
  gives permute-and-flip).
  Guarantee: the index is (epsilon, 0)-DP. This does not cover the noisy maximum.
  Source: Dwork and Roth 2014, claim 3.9 and remark 3.1; Ding et al. 2021, arXiv:2105.07260
  (exponential noise).

  >>> mechanism = ReportNoisyMax(epsilon=1.0, monotonic=True)
  >>> mechanism.scale
  1.0
  >>> int(mechanism(jax.random.key(0), np.array([0.0, 90.0])))
  1
  """

  noise: str = "laplace"

  def __post_init__(self) -> None:
    super().__post_init__()
    validate.one_of(NOISES, noise=self.noise)

  def __call__(self, key: jax.Array, utilities: jax.Array) -> jax.Array:
    """Returns the index of the chosen candidate, int32 [...]."""
    return self._choose(self.noise, key, utilities)
