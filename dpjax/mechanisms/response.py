"""Randomised response: every record is changed with a known probability, independently."""

from __future__ import annotations

import dataclasses
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees, validate
from dpjax.mechanisms import finite, stated
from dpjax.noise import source
from dpjax.validate import UserError

MOST_CATEGORIES = 2**31 - 1
# Factor that raises a probability by more than the rounding error of its computation in float64.
ROUNDING = 1 + 2.0**-48
# The smallest positive float64.
TINY = 5e-324


class FrequencyOracle:
  """Base class of mechanisms whose responses support labels, more often the true one than another.

  >>> mechanism = RandomizedResponse(epsilon=math.log(3))
  >>> round(mechanism.variance(1_000), 9)  # (k - 2 + 3) / (1,000 * 2^2)
  0.00075
  """

  num_categories: int

  @property
  def false_support(self) -> float:
    """Returns the probability that a response supports a label that is not the true one."""
    raise NotImplementedError

  @property
  def support_gap(self) -> float:
    """Returns how much more probable it is that a response supports the true label."""
    raise NotImplementedError

  def supports(self, responses: jax.Array) -> tuple[np.ndarray, int]:
    """Returns how many responses support each label, [k], and the number of responses."""
    raise NotImplementedError

  def frequencies(self, responses: jax.Array) -> np.ndarray:
    """Returns unbiased estimates of the share of each label, [k]; they may be outside [0, 1].

    The probability of a draw is rounded up, which moves a mean by 2^-48 / `support_gap` at most.
    Raises UserError for no responses, which say nothing of any share.

    >>> mechanism = RandomizedResponse(epsilon=math.log(3))
    >>> mechanism.frequencies(np.array([0, 0, 0, 1])).round(6)  # 3/4 kept: all were 0
    array([1., 0.])
    """
    counts, number = self.supports(responses)
    if not number:
      raise UserError("must hold at least one", field="responses")
    return (counts / number - self.false_support) / self.support_gap

  def variance(self, num_responses: int, share: float = 0.0) -> float:
    """Returns the variance of the estimate of one label's share.

    It is exact: given the labels, the count is a sum of independent coins, of which the share that
    holds the label has another probability.

    Args:
      num_responses: number of responses, one for each person.
      share: true share of the label.
    """
    validate.integer_at_least(1, num_responses=num_responses)
    validate.number_in(0, 1, share=share)
    other = self.false_support
    true = other + self.support_gap
    coins = share * true * (1 - true) + (1 - share) * other * (1 - other)
    # A square of the gap could underflow.
    return coins / num_responses / self.support_gap / self.support_gap


@dataclasses.dataclass(frozen=True)
class RandomizedResponse(FrequencyOracle):
  """Keeps a label in 0 .. k-1 with probability e^eps / (e^eps + k - 1), else draws another label.

  Guarantee: each response is (epsilon, 0)-DP under replace_one (local DP: no trusted curator is
  needed). A response does not hide that a user responded, so add_or_remove_one is refused.
  Source: Warner 1965 (k = 2); Kairouz, Bonawitz and Ramage 2016, arXiv:1602.07387.

  | label               | outcome                                |
  | ------------------- | -------------------------------------- |
  | below 0             | counts as 0                            |
  | above k-1           | counts as k-1                          |
  | floats              | UserError                              |

  The probability that a response is drawn at random is rounded up, to a multiple of 2^-128. So it
  is never too small for the guarantee.

  >>> mechanism = RandomizedResponse(epsilon=math.log(3), num_categories=2)  # doctest: +SLOW
  >>> round(mechanism.keep_prob, 6)
  0.75
  >>> mechanism.event("replace_one").event.num_buckets
  2
  >>> mechanism(jax.random.key(0), np.zeros(5, int)).shape
  (5,)
  """

  epsilon: float
  num_categories: int = 2

  neighboring_relation = "replace_one"

  def __post_init__(self) -> None:
    stated.positive(epsilon=self.epsilon)
    validate.integer_at_least(2, num_categories=self.num_categories)
    if self.num_categories > MOST_CATEGORIES:
      raise UserError(
        "must be below 2^31", field="num_categories", value=self.num_categories
      )

  @property
  def noise_parameter(self) -> float:
    """Returns the probability that the response is drawn uniformly, whatever the label."""
    k = int(self.num_categories)
    unlikely = math.exp(-float(self.epsilon))
    return k * unlikely / (1 + (k - 1) * unlikely)

  @property
  def keep_prob(self) -> float:
    """Returns the probability that the response is the label."""
    return 1 - self.noise_parameter * (1 - 1 / int(self.num_categories))

  def __call__(self, key: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns responses, int32 [...], one for each label [...]."""
    trees.check_key(key=key)
    k = int(self.num_categories)
    labels = finite.indices("labels", labels, 0, k - 1)
    for_coins, for_answers = jax.random.split(key)
    # At epsilon above 745 the probability would underflow to 0, and no label would ever change.
    chance = min(1.0, max(self.noise_parameter, TINY) * ROUNDING)
    lies = source.bernoulli(for_coins, chance, labels.shape)
    answers = source.integers(for_answers, labels.shape, k)
    return jnp.where(lies, answers, labels)

  @property
  def false_support(self) -> float:
    """Returns the probability of one given label that is not the true one."""
    return self.noise_parameter / int(self.num_categories)

  @property
  def support_gap(self) -> float:
    """Returns the probability that the response is not drawn at random."""
    # 1 - noise_parameter has no digit left where the gap is small: for many labels, or at a small
    # epsilon.
    epsilon = float(self.epsilon)
    return -math.expm1(-epsilon) / (1 + (int(self.num_categories) - 1) * math.exp(-epsilon))

  def supports(self, responses: jax.Array) -> tuple[np.ndarray, int]:
    """Returns how many responses are each label, [k], and the number of responses."""
    k = int(self.num_categories)
    checked = within("responses", responses, k).ravel()
    return np.bincount(checked, minlength=k), len(checked)

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """Returns the event of one response. For k > 2 labels, several responses together have a
    smaller epsilon than as many mechanisms that are only known to be (epsilon, 0)-DP."""
    stated.pure_event(float(self.epsilon), self.neighboring_relation, neighboring_relation)
    event = dp_accounting.RandomizedResponseDpEvent(
      self.noise_parameter, int(self.num_categories)
    )
    return stated.only_under(neighboring_relation, event)


def within(name: str, values: finite.Numbers, count: int) -> np.ndarray:
  """Returns integers on the host; UserError unless they are in 0 .. count - 1.

  >>> within("responses", np.array([0, 7]), 3)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: responses: must be in 0 .. 2
  """
  checked = np.asarray(finite.indices(name, values, -1, count))
  if np.any((checked < 0) | (checked >= count)):
    raise UserError(f"must be in 0 .. {count - 1}", field=name)
  return checked
