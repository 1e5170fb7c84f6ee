"""Frequency oracles: each person sends one noisy message, and shares of many labels are estimated.

Nobody needs to be trusted, as with `RandomizedResponse`, whose variance grows with the number k of
labels. Here it does not:

| mechanism              | message                  | variance of a rare share, times n           |
| ---------------------- | ------------------------ | ------------------------------------------- |
| RandomizedResponse     | a label                  | (k - 2 + e^eps) / (e^eps - 1)^2             |
| OptimizedUnaryEncoding | k bits                   | 4 e^eps / (e^eps - 1)^2                     |
| OptimizedLocalHashing  | a hash function, a value | (g - 1 + e^eps)^2 / (g - 1) / (e^eps - 1)^2 |

The last two agree at g = e^eps + 1 hash values, of which a prime beside it is taken. `variance` is
that of any share. For fewer than 3 e^eps + 2 labels randomised response is the best.

Source: Wang, Blocki, Li and Jha 2017, Locally differentially private protocols for frequency
estimation, USENIX Security.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees, validate
from dpjax.mechanisms import finite, response, stated
from dpjax.mechanisms.response import RandomizedResponse
from dpjax.noise import source
from dpjax.validate import UserError

# The largest prime below 2^15. A product of two numbers below it fits int32.
_MOST_BUCKETS = 32_749
# Epsilon above which e^epsilon changes nothing, and its square might overflow.
_MOST_EPSILON = 300.0
# Number of comparisons at once, when supports are counted.
_AT_ONCE = 2**24


@dataclasses.dataclass(frozen=True)
class OptimizedUnaryEncoding(response.FrequencyOracle):
  """Sends k bits: the label's is 1 with probability 1/2, each other with 1 / (e^eps + 1) (OUE).

  Guarantee: each response is (epsilon, 0)-DP under replace_one (local DP: no trusted curator is
  needed). A response does not hide that a user responded, so add_or_remove_one is refused.

  Proof: the laws of two labels differ in their two bits alone. Let q = 1 / (e^eps + 1). The bits
  are (1, 0) with probability (1 - q) / 2 under one label and q / 2 under the other, a ratio of
  e^eps. (0, 1) is the mirror image, and (0, 0) and (1, 1) have one probability under both. So a
  response says nothing with probability 1/2, and is a binary randomised response otherwise.
  `RandomizedResponse` of m labels says nothing with probability (m - 2) / (e^eps + m - 1), which
  is at most 1/2 if m <= e^eps + 3. So its event for m = floor(e^eps) + 3 labels dominates.

  | label               | outcome                                |
  | ------------------- | -------------------------------------- |
  | below 0             | counts as 0                            |
  | above k-1           | counts as k-1                          |
  | floats              | UserError                              |

  The probability of a false 1 is rounded up, to a multiple of 2^-128. So it is never too small for
  the guarantee.

  >>> mechanism = OptimizedUnaryEncoding(epsilon=math.log(3), num_categories=100)
  >>> mechanism.event("replace_one").event.num_buckets
  5
  >>> round(mechanism.variance(3_000), 6)  # 4 * 3 / (3,000 * 2^2)
  0.001
  >>> mechanism(jax.random.key(0), np.zeros(5, int)).shape  # doctest: +SLOW
  (5, 100)
  """

  epsilon: float
  num_categories: int = 2

  neighboring_relation = "replace_one"

  def __post_init__(self) -> None:
    RandomizedResponse(self.epsilon, self.num_categories)

  @property
  def false_support(self) -> float:
    """Returns the probability of a 1 at a label that is not the true one."""
    unlikely = math.exp(-float(self.epsilon))
    return unlikely / (1 + unlikely)

  @property
  def support_gap(self) -> float:
    """Returns how much more probable a 1 is at the true label."""
    return math.tanh(float(self.epsilon) / 2) / 2

  def __call__(self, key: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns responses, bool [..., k], for labels [...]."""
    trees.check_key(key=key)
    k = int(self.num_categories)
    labels = finite.indices("labels", labels, 0, k - 1)[..., None]
    for_true, for_others = jax.random.split(key)
    chance = min(0.5, max(self.false_support, response.TINY) * response.ROUNDING)
    kept = source.bernoulli(for_true, 0.5, labels.shape)
    others = source.bernoulli(for_others, chance, (*labels.shape[:-1], k))
    each = jnp.arange(k).reshape((1,) * (labels.ndim - 1) + (k,))
    return jnp.where(labels == each, kept, others)

  def supports(self, responses: jax.Array) -> tuple[np.ndarray, int]:
    """Returns how many responses [..., k] have a 1 at each label, [k], and their number."""
    bits = _rows(responses, int(self.num_categories), 2)
    return bits.sum(axis=0), len(bits)

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """Returns an event that dominates one response: that of a randomised response."""
    # Rounded down, since fewer labels say more.
    grown = math.exp(min(float(self.epsilon), _MOST_EPSILON)) * (1 - 2.0**-48)
    labels = 3 + math.floor(min(grown, response.MOST_CATEGORIES - 3))
    return RandomizedResponse(self.epsilon, labels).event(neighboring_relation)


@dataclasses.dataclass(frozen=True)
class OptimizedLocalHashing(response.FrequencyOracle):
  """Sends a random hash function, and its value at the label by randomised response (OLH).

  Guarantee: each response is (epsilon, 0)-DP under replace_one (local DP: no trusted curator is
  needed). A response does not hide that a user responded, so add_or_remove_one is refused.

  Proof: the hash function is drawn without the label. Given it, two labels have one hash value, so
  that the response says nothing, or two, of which `RandomizedResponse` of g labels is sent. So the
  event of that dominates.

  The hash function has g values, g prime: the label's digits to base g, times random digits, summed
  modulo g. Two labels differ in a digit, and a prime has no divisors of zero, so they have one hash
  value with probability exactly 1 / g. Then a response supports a label that is not the true one
  with probability p / g + (1 - p) / (g - 1) * (1 - 1 / g) = 1 / g, where p is the probability that
  the value is kept. So `frequencies` is unbiased, and `variance` exact.

  | label               | outcome                                |
  | ------------------- | -------------------------------------- |
  | below 0             | counts as 0                            |
  | above k-1           | counts as k-1                          |
  | floats              | UserError                              |

  Args:
    epsilon: epsilon of one response.
    num_categories: number k of labels.
    num_buckets: number g of hash values, a prime up to 32,749. None: the prime with the least
      variance, next to e^epsilon + 1.

  >>> mechanism = OptimizedLocalHashing(epsilon=math.log(3), num_categories=100)
  >>> mechanism.buckets, mechanism.num_digits
  (5, 3)
  >>> round(mechanism.variance(3_000), 6)  # (5 - 1 + 3)^2 / 4 / (3,000 * 2^2)
  0.001021
  >>> mechanism(jax.random.key(0), np.zeros(7, int)).shape  # doctest: +SLOW
  (7, 4)
  """

  epsilon: float
  num_categories: int = 2
  num_buckets: int | None = None

  neighboring_relation = "replace_one"

  def __post_init__(self) -> None:
    RandomizedResponse(self.epsilon, self.num_categories)
    if self.num_buckets is None:
      return
    validate.integer_in(2, _MOST_BUCKETS, num_buckets=self.num_buckets)
    if not _is_prime(int(self.num_buckets)):
      raise UserError("must be a prime", field="num_buckets", value=self.num_buckets)

  @property
  def buckets(self) -> int:
    """Returns the number g of hash values."""
    if self.num_buckets is not None:
      return int(self.num_buckets)
    grown = math.exp(min(float(self.epsilon), _MOST_EPSILON))
    below = above = min(1 + math.floor(grown), _MOST_BUCKETS)
    while not _is_prime(below):
      below -= 1
    while not _is_prime(above):
      above += 1
    return min(below, above, key=lambda g: (g - 1 + grown) ** 2 / (g - 1))

  @property
  def num_digits(self) -> int:
    """Returns the number of digits of a label to base g, which is that of a hash function."""
    digits, reached = 1, self.buckets
    while reached < int(self.num_categories):
      digits, reached = digits + 1, reached * self.buckets
    return digits

  @property
  def false_support(self) -> float:
    """Returns the probability that the value sent is the hash value of another label."""
    return 1 / self.buckets

  @property
  def support_gap(self) -> float:
    """Returns how much more probable it is that the value sent is that of the true label."""
    return (1 - 1 / self.buckets) * self._sent.support_gap

  @property
  def _sent(self) -> RandomizedResponse:
    return RandomizedResponse(self.epsilon, self.buckets)

  def _digits(self, labels: jax.Array | np.ndarray) -> list[jax.Array | np.ndarray]:
    """Returns the digits of labels to base g, the last one first."""
    return [
      labels // self.buckets**place % self.buckets for place in range(self.num_digits)
    ]

  def __call__(self, key: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns responses, int32 [..., num_digits + 1], for labels [...]: the digits of the hash
    function, and the value."""
    trees.check_key(key=key)
    labels = finite.indices("labels", labels, 0, int(self.num_categories) - 1)
    for_hash, for_answer = jax.random.split(key)
    factors = source.integers(for_hash, (*labels.shape, self.num_digits), self.buckets)
    value = jnp.zeros_like(labels)
    for place, digit in enumerate(self._digits(labels)):
      value = (value + factors[..., place] * digit % self.buckets) % self.buckets
    answer = self._sent(for_answer, value)
    return jnp.concatenate([factors, answer[..., None]], axis=-1)

  def supports(self, responses: jax.Array) -> tuple[np.ndarray, int]:
    """Returns of how many responses [..., num_digits + 1] each label has the value, [k], and their
    number."""
    rows = _rows(responses, self.num_digits + 1, self.buckets).astype(np.int64)
    k = int(self.num_categories)
    counts = np.zeros(k, np.int64)
    size = max(1, _AT_ONCE // max(1, len(rows)))
    for start in range(0, k, size):
      labels = np.arange(start, min(k, start + size))
      values = rows[:, :-1] @ np.stack(self._digits(labels)) % self.buckets
      counts[labels] = (values == rows[:, -1:]).sum(axis=0)
    return counts, len(rows)

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """Returns an event that dominates one response: that of the value sent."""
    return self._sent.event(neighboring_relation)


def _rows(responses: jax.Array, width: int, count: int) -> np.ndarray:
  """Returns responses [..., width] of integers in 0 .. count - 1 as [n, width]."""
  checked = response.within("responses", responses, count)
  if checked.ndim == 0 or checked.shape[-1] != width:
    raise UserError(
      f"must have shape [..., {width}], not {checked.shape}", field="responses"
    )
  return checked.reshape(-1, width)


def _is_prime(number: int) -> bool:
  """Returns whether a number from 2 on is a prime.

  >>> [number for number in range(2, 12) if _is_prime(number)]
  [2, 3, 5, 7, 11]
  """
  return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
