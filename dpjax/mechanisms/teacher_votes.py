"""Private aggregation of teachers' votes: PATE's GNMax and Confident-GNMax.

Teachers are trained on disjoint parts of the private records. Each votes for one class of a public
query, and the class with the largest noisy count is published. A record is in the part of one
teacher, so it changes at most one vote: one count falls by one and another rises by one, which is
sqrt(2) in the L2 norm. The largest count changes by at most one.

| relation            | holds if                                                          |
| ------------------- | ----------------------------------------------------------------- |
| `add_or_remove_one` | a record's content decides its teacher                            |
| `replace_one`       | a record's place decides its teacher                              |

`pate.parts` divides records by the relation that it is given: give both the same.

A label is computed from noisy counts alone, so its event is that of Gaussian noise. This event
composes exactly, and does not depend on the votes. `dpjax.accounting.votes` has other bounds, which
depend on the votes.
Source: Papernot et al. 2018, arXiv:1802.08908, section 4.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from dpjax import accounting, trees, validate
from dpjax.accounting import matrix
from dpjax.mechanisms import finite, stated
from dpjax.mechanisms.additive import Gaussian, analytic_noise_multiplier
from dpjax.types import Array
from dpjax.validate import UserError

# L2 change of the counts when one vote moves from one count to another.
VOTE_SENSITIVITY = math.sqrt(2)
UNANSWERED = -1
# Factor by which `std_for` raises its result, since accountants round epsilon up.
_MARGIN = 1 + 1e-5


@dataclasses.dataclass(frozen=True)
class GNMax:
  """Returns the class with the largest noisy count: counts of votes [..., K] -> labels [...].

  Guarantee: each label costs no more than a Gaussian mechanism of noise multiplier std / sqrt(2),
  if one record changes at most one teacher's vote under `neighboring_relation`.

  | votes                        | outcome                               |
  | ---------------------------- | ------------------------------------- |
  | NaN or infinity              | UserError; while being traced -1      |
  | one class, or none           | UserError                             |
  | equal noisy counts           | the first of these classes            |

  Args:
    std: standard deviation of the noise on each count, in votes; sigma_2 of the paper.
    neighboring_relation: relation under which one record changes one vote.

  >>> mechanism = GNMax(std=40.0)
  >>> int(mechanism(jax.random.key(0), jnp.array([10.0, 235.0, 5.0])))
  1
  >>> mechanism.event(num_queries=4)  # 4 labels: one Gaussian of half the noise
  SelfComposedDpEvent(event=GaussianDpEvent(noise_multiplier=28.28...), count=4)
  """

  std: float
  neighboring_relation: str = "add_or_remove_one"

  def __post_init__(self) -> None:
    stated.positive(std=self.std)
    validate.one_of(stated.RELATIONS, neighboring_relation=self.neighboring_relation)
    # Refuses a standard deviation whose quotient by the sensitivity leaves [1e-300, 1e300].
    _ = self._noise

  @property
  def _noise(self) -> Gaussian:
    return Gaussian(
      float(self.std) / VOTE_SENSITIVITY, VOTE_SENSITIVITY, self.neighboring_relation
    )

  def __call__(self, key: jax.Array, counts: Array) -> jax.Array:
    """Returns the labels [...] of counts [..., K], int32."""
    _check_classes(counts)
    # Noise is added to the counts, not to their gaps to the largest one. So the label is a
    # function of what the Gaussian mechanism releases, rounding included.
    noisy = self._noise(key, counts)
    sound = jnp.isfinite(noisy).all(axis=-1)
    return jnp.where(sound, jnp.argmax(noisy, axis=-1), UNANSWERED).astype(jnp.int32)

  def event(
    self, neighboring_relation: str = "add_or_remove_one", *, num_queries: int = 1
  ) -> stated.DpEvent:
    """Returns the event of `num_queries` labels, for `dpjax.accounting`."""
    validate.integer_at_least(1, num_queries=num_queries)
    return accounting.compose(self._noise.event(neighboring_relation), int(num_queries))


@dataclasses.dataclass(frozen=True)
class ConfidentGNMax:
  """Returns a label if enough teachers agree, else -1: counts of votes [..., K] -> labels [...].

  A noisy check tests whether the largest count reaches `threshold`. The check of each query costs
  epsilon, even if the query gets no label. `GNMax` gives a label only if the check succeeds.

  Guarantee: each check costs no more than a Gaussian mechanism of noise multiplier `check_std`, and
  each label no more than a label of `GNMax`. Which queries get labels depends on the votes, so the
  number of labels must be limited beforehand, by `most_answers` of the call and of `event`. Then
  the Gaussian events of all checks and of the allowed labels bound the cost in any adaptive order
  (Smith and Thakurta 2022, arXiv:2210.17520, theorem 3). Never count the labels that were given
  in place of a limit: their number is an outcome.

  Args:
    threshold: public number of votes; T of the paper.
    check_std: standard deviation of the noise of a check, in votes; sigma_1 of the paper.
    std: standard deviation of the noise of a label; sigma_2 of the paper.
    neighboring_relation: relation under which one record changes one vote.

  >>> mechanism = ConfidentGNMax(threshold=200.0, check_std=15.0, std=40.0)  # doctest: +SLOW
  >>> mechanism(jax.random.key(0), jnp.array([[250.0, 0.0], [125.0, 125.0]])).tolist()
  [0, -1]
  """

  threshold: float
  check_std: float
  std: float
  neighboring_relation: str = "add_or_remove_one"

  def __post_init__(self) -> None:
    validate.finite(threshold=self.threshold)
    stated.positive(check_std=self.check_std)
    # Refuses a wrong std or relation before any call.
    _ = self.votes

  @property
  def votes(self) -> GNMax:
    """Returns the mechanism that gives the labels."""
    return GNMax(self.std, self.neighboring_relation)

  @property
  def _check(self) -> Gaussian:
    # One changed vote moves the largest count by at most one.
    return Gaussian(float(self.check_std), 1.0, self.neighboring_relation)

  def __call__(
    self, key: jax.Array, counts: Array, *, most_answers: int | None = None
  ) -> jax.Array:
    """Returns the labels [...] of counts [..., K], int32; -1 where too few teachers agree.

    Args:
      most_answers: the first queries, up to this number, get labels; all others -1. None: all may.
    """
    trees.check_key(key=key)
    _check_classes(counts)
    for_check, for_label = jax.random.split(key)
    largest = finite.array("counts", counts).max(axis=-1)
    noisy = self._check(for_check, largest)
    # The threshold is clipped to the range of the float type, since it could overflow.
    most = float(jnp.finfo(noisy.dtype).max)
    agree = noisy >= min(max(float(self.threshold), -most), most)
    # Labels are computed for all queries, and returned only if the check succeeded.
    labels = self.votes(for_label, counts)
    if most_answers is not None:
      validate.integer_at_least(0, most_answers=most_answers)
      given = jnp.cumsum(agree, dtype=jnp.int32).reshape(agree.shape)
      agree = agree & (given <= most_answers)
    return jnp.where(agree, labels, UNANSWERED).astype(jnp.int32)

  def event(
    self,
    neighboring_relation: str = "add_or_remove_one",
    *,
    num_checks: int = 1,
    most_answers: int | None = None,
  ) -> stated.DpEvent:
    """Returns the event of `num_checks` queries, of which at most `most_answers` get a label.

    Args:
      most_answers: the limit of the calls, all of them together; None: all queries may get one.
    """
    validate.integer_at_least(1, num_checks=num_checks)
    num_answers = num_checks if most_answers is None else most_answers
    validate.integer_in(0, num_checks, most_answers=num_answers)
    checks = accounting.compose(self._check.event(neighboring_relation), int(num_checks))
    if not num_answers:
      return checks
    answers = self.votes.event(neighboring_relation, num_queries=num_answers)
    return matrix.join([checks, answers])


def std_for(
  *,
  epsilon: float,
  delta: float,
  num_answers: int,
  num_checks: int = 0,
  check_std: float = math.inf,
) -> float:
  """Returns the least `std` for labels at which a run costs at most epsilon, checks included.

  All noise is Gaussian, so there is a closed form: num_checks / check_std^2 + 2 num_answers / std^2
  = mu^2, where mu-Gaussian DP has this epsilon at this delta.

  Raises:
    UserError: the checks alone cost epsilon or more.

  >>> round(std_for(epsilon=1.97, delta=1e-5, num_answers=286), 1)
  48.3
  """
  validate.integer_at_least(1, num_answers=num_answers)
  validate.integer_at_least(0, num_checks=num_checks)
  mu_squared = analytic_noise_multiplier(epsilon, delta) ** -2
  of_checks = num_checks / float(check_std) ** 2
  if of_checks >= mu_squared:
    raise UserError(
      f"{num_checks} checks alone cost as much as epsilon={epsilon}; it must be larger",
      field="check_std",
      value=check_std,
    )
  # The result is slightly larger than the exact answer, since accountants round epsilon up.
  return _MARGIN * math.sqrt(2 * num_answers / (mu_squared - of_checks))


def _check_classes(counts: Array) -> None:
  shape = jnp.shape(finite.array("counts", counts))
  if not shape or shape[-1] < 2:
    raise UserError(f"must be [..., K] with K >= 2 classes, not {shape}", field="counts")
