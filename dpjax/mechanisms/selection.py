"""Choosing one of k candidates by a private score: utilities [..., k] -> index [...].

All three are (epsilon, 0)-DP when one record moves every utility by at most
`utility_sensitivity`, under `neighboring_relation`. Where in addition one record moves all
utilities in the same direction (`monotonic=True`, for instance counts under
add_or_remove_one), half of the noise does. Batch axes are separate selections, each of
which costs epsilon.

| utilities                  | outcome                                               |
| -------------------------- | ----------------------------------------------------- |
| -infinity                  | never chosen; only for what is excluded publicly      |
| NaN or +infinity, or k = 0 | UserError (values are unseen while being traced)      |
| all equal                  | uniform                                               |

Draws are made in floating point: what has a probability below about 1e-7 may have another
probability of that order.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import validate
from dpjax.mechanisms import stated
from dpjax.validate import UserError

NOISES = ("laplace", "gumbel", "exponential")


@dataclasses.dataclass(frozen=True)
class _Selection:
  epsilon: float
  utility_sensitivity: float = 1.0
  monotonic: bool = False
  neighboring_relation: str = "add_or_remove_one"

  def __post_init__(self) -> None:
    validate.positive(epsilon=self.epsilon, utility_sensitivity=self.utility_sensitivity)
    validate.one_of(stated.RELATIONS, neighboring_relation=self.neighboring_relation)
    if self.monotonic and self.neighboring_relation == "replace_one":
      raise UserError(
        "monotonic=True: replacing a record can raise one utility and lower another; "
        "must be False under replace_one"
      )

  @property
  def scale(self) -> float:
    """Of the noise on a utility: 2 * utility_sensitivity / epsilon, or half of it."""
    return (1 if self.monotonic else 2) * self.utility_sensitivity / self.epsilon

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """For `dpjax.accounting`: one selection, of which only its pure epsilon is used."""
    return stated.pure_event(self.epsilon, self.neighboring_relation, neighboring_relation)


@dataclasses.dataclass(frozen=True)
class Exponential(_Selection):
  """Candidate r with probability proportional to exp(utility_r / scale), by Gumbel-max.

  Guarantee: (epsilon, 0)-DP.
  Source: McSherry and Talwar 2007; Dwork and Roth 2014, theorem 3.10.

  >>> mechanism = Exponential(epsilon=2.0)
  >>> mechanism.probs(np.log([1.0, 2.0, 5.0])).round(3)  # scale 1: proportional
  array([0.125, 0.25 , 0.625])
  >>> mechanism(jax.random.key(0), np.zeros((4, 3))).shape
  (4,)
  """

  def probs(self, utilities: np.ndarray) -> np.ndarray:
    """The exact law [..., k]; it depends on the data, so it must not be released."""
    logits = np.asarray(utilities, np.float64) / self.scale
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)

  def __call__(self, key: jax.Array, utilities: jax.Array) -> jax.Array:
    """The index of the chosen candidate, int32 [...]."""
    logits = _checked(utilities) / self.scale
    return jax.random.categorical(key, logits, axis=-1, mode="high").astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class PermuteAndFlip(_Selection):
  """Visits the candidates in random order; takes r with probability exp((u_r - max) / scale).

  Guarantee: (epsilon, 0)-DP, and for every data set an expected utility at least that of
  the exponential mechanism.
  Source: McKenna and Sheldon 2020, arXiv:2010.12603, algorithm 1.

  >>> mechanism = PermuteAndFlip(epsilon=2.0)
  >>> mechanism.probs(np.log([1.0, 1.0])).round(3)
  array([0.5, 0.5])
  >>> mechanism.probs(np.log([1.0, 2.0])).round(3)  # 1/2 * 1/2 and the rest
  array([0.25, 0.75])
  """

  def probs(self, utilities: np.ndarray) -> np.ndarray:
    """The exact law [k] of one selection: p_r * integral over [0, 1] of
    prod_{s != r} (1 - p_s t) dt, for t is when r's turn comes.

    A polynomial of degree k - 1, which Gauss-Legendre integrates exactly.
    """
    logits = np.asarray(utilities, np.float64) / self.scale
    accept = np.exp(logits - logits.max())
    nodes, weights = np.polynomial.legendre.leggauss(accept.size // 2 + 1)
    passed = 1 - accept[:, None] * (nodes + 1) / 2  # [k, nodes]: not taken by time t
    others = [np.delete(passed, r, axis=0).prod(0) for r in range(accept.size)]
    return accept * (np.array(others) @ weights) / 2

  def __call__(self, key: jax.Array, utilities: jax.Array) -> jax.Array:
    """The index of the chosen candidate, int32 [...]."""
    logits = _checked(utilities) / self.scale
    accept = jnp.exp(logits - logits.max(-1, keepdims=True))
    for_order, for_coins = jax.random.split(key)
    turn = jax.random.permutation(
      for_order,
      jnp.broadcast_to(jnp.arange(logits.shape[-1]), logits.shape),
      axis=-1,
      independent=True,
    )
    heads = jax.random.uniform(for_coins, logits.shape) < accept
    first = jnp.argmin(jnp.where(heads, turn, logits.shape[-1]), axis=-1)
    return first.astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class ReportNoisyMax(_Selection):
  """The candidate whose utility plus noise of `scale` is the largest; never its value.

  `noise`: "laplace", "gumbel" (which is the exponential mechanism) or "exponential" (which
  is permute-and-flip).
  Guarantee: (epsilon, 0)-DP for the index alone. The noisy maximum itself is not covered.
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
    """The index of the chosen candidate, int32 [...]."""
    utilities = _checked(utilities)
    noise = _SAMPLERS[self.noise](key, utilities.shape, utilities.dtype)
    return jnp.argmax(utilities + self.scale * noise, axis=-1).astype(jnp.int32)


_SAMPLERS = {
  "laplace": jax.random.laplace,
  "gumbel": functools.partial(jax.random.gumbel, mode="high"),
  "exponential": jax.random.exponential,
}


def _checked(utilities: jax.Array) -> jax.Array:
  utilities = jnp.asarray(utilities)
  if utilities.ndim == 0 or utilities.shape[-1] == 0:
    raise UserError(
      f"utilities: must have shape [..., k] with k >= 1, not {utilities.shape}"
    )
  excluded = utilities == -jnp.inf
  stated.finite(utilities=jnp.where(excluded, 0, utilities))
  return stated.as_floats(utilities)
