"""Private aggregation of teachers' votes: PATE's GNMax and Confident-GNMax.

Teachers are trained on disjoint parts of the private records. Each votes for one class of a
public query, and the class with the most votes is published, by noisy counts. One record is in
the part of one teacher, so it changes one vote, whatever it does to that teacher: one count
falls by one and another rises by one, sqrt(2) in the L2 norm. The largest count moves by one.

| relation            | holds if                                                          |
| ------------------- | ----------------------------------------------------------------- |
| `add_or_remove_one` | a record chooses its teacher by itself (`pate.parts_by_content`)  |
| `replace_one`       | its place chooses its teacher (`pate.parts_by_place`)             |

A label is computed from noisy counts alone, so its event is that of Gaussian noise: exact under
composition, and independent of the votes. `dpjax.accounting.votes` has the bounds that depend
on them. Source: Papernot et al. 2018, arXiv:1802.08908, section 4.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from dpjax import accounting, validate
from dpjax.mechanisms import finite, stated
from dpjax.mechanisms.additive import Gaussian, analytic_noise_multiplier
from dpjax.types import Array
from dpjax.validate import UserError

# One vote leaves a count and joins another one.
VOTE_SENSITIVITY = math.sqrt(2)
UNANSWERED = -1
# Of a noise that is solved for.
_MARGIN = 1 + 1e-5


@dataclasses.dataclass(frozen=True)
class GNMax:
  """The class with the largest noisy count: votes [..., K] -> labels [...].

  Guarantee: each label costs no more than Gaussian noise of `std` / sqrt(2) sensitivities,
  when one record changes at most one teacher's vote, under `neighboring_relation`.

  | votes                        | outcome                               |
  | ---------------------------- | ------------------------------------- |
  | NaN or infinity              | UserError; while being traced -1      |
  | one class, or none           | UserError                             |
  | equal counts on the grid     | the first of these classes            |

  Args:
    std: standard deviation of the noise on each count, in votes; sigma_2 of the paper.
    neighboring_relation: under which one record changes one vote.

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
    # Refuses a standard deviation that is no multiple of the sensitivity in float64.
    _ = self._noise

  @property
  def _noise(self) -> Gaussian:
    return Gaussian(
      float(self.std) / VOTE_SENSITIVITY, VOTE_SENSITIVITY, self.neighboring_relation
    )

  def __call__(self, key: jax.Array, counts: Array) -> jax.Array:
    """Returns the labels [...] of counts [..., K], int32."""
    _check_classes(counts)
    # Noise on the counts themselves, not on their gaps to the largest one: the label is then
    # a function of what the Gaussian mechanism releases, rounding included.
    noisy = self._noise(key, counts)
    sound = jnp.isfinite(noisy).all(axis=-1)
    return jnp.where(sound, jnp.argmax(noisy, axis=-1), UNANSWERED).astype(jnp.int32)

  def event(
    self, neighboring_relation: str = "add_or_remove_one", *, num_queries: int = 1
  ) -> stated.DpEvent:
    """Event for `dpjax.accounting` of `num_queries` labels."""
    validate.integer_at_least(1, num_queries=num_queries)
    return accounting.composed(self._noise.event(neighboring_relation), int(num_queries))


@dataclasses.dataclass(frozen=True)
class ConfidentGNMax:
  """A label where enough teachers agree, else -1: votes [..., K] -> labels [...].

  Whether the largest count reaches `threshold` is itself asked by noise, and this check costs
  for each query, answered or not. Only then is there a label, by `GNMax`.

  Guarantee: each check costs no more than Gaussian noise of `check_std` sensitivities, and each
  label that of `GNMax`. Which queries are answered follows from what was published before, so
  their number must be limited: the Gaussian events of all checks and of the most answers bound
  every adaptive order of them (Smith and Thakurta 2022, arXiv:2210.17520, theorem 3).

  Args:
    threshold: public; T of the paper, in votes.
    check_std: standard deviation of the noise of a check, in votes; sigma_1 of the paper.
    std: standard deviation of the noise of a label; sigma_2 of the paper.
    neighboring_relation: under which one record changes one vote.

  >>> mechanism = ConfidentGNMax(threshold=200.0, check_std=15.0, std=40.0)
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
    """Mechanism of the labels."""
    return GNMax(self.std, self.neighboring_relation)

  @property
  def _check(self) -> Gaussian:
    # The largest count moves by one, whichever vote moves.
    return Gaussian(float(self.check_std), 1.0, self.neighboring_relation)

  def __call__(self, key: jax.Array, counts: Array) -> jax.Array:
    """Returns the labels [...] of counts [..., K], int32; -1 where too few agree."""
    finite.check_key(key)
    _check_classes(counts)
    for_check, for_label = jax.random.split(key)
    largest = finite.array("counts", counts).max(axis=-1)
    noisy = self._check(for_check, largest)
    # A threshold beyond the noise's type is never, or always, reached; it must not overflow.
    most = float(jnp.finfo(noisy.dtype).max)
    agree = noisy >= min(max(float(self.threshold), -most), most)
    # The label is computed for all queries, but leaves only where the check allowed it.
    labels = self.votes(for_label, counts)
    return jnp.where(agree, labels, UNANSWERED).astype(jnp.int32)

  def event(
    self,
    neighboring_relation: str = "add_or_remove_one",
    *,
    num_checks: int = 1,
    num_answers: int = 1,
  ) -> stated.DpEvent:
    """Event for `dpjax.accounting` of `num_checks` queries with at most that many answers."""
    validate.integer_at_least(1, num_checks=num_checks)
    validate.integer_in(0, num_checks, num_answers=num_answers)
    checks = accounting.composed(self._check.event(neighboring_relation), int(num_checks))
    if not num_answers:
      return checks
    answers = self.votes.event(neighboring_relation, num_queries=num_answers)
    return accounting.joined([checks, answers])


def std_for(
  *,
  epsilon: float,
  delta: float,
  num_answers: int,
  num_checks: int = 0,
  check_std: float = math.inf,
) -> float:
  """Returns the least noise of labels with which a run costs epsilon, checks included.

  All of it is Gaussian noise, so the answer is in closed form: with mu of Gaussian DP at
  (epsilon, delta), num_checks / check_std^2 + 2 num_answers / std^2 = mu^2.

  Raises:
    UserError: the checks alone cost as much.

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
  # A little more than the exact answer: an accountant that errs on the private side then finds
  # no more than epsilon, too.
  return _MARGIN * math.sqrt(2 * num_answers / (mu_squared - of_checks))


def _check_classes(counts: Array) -> None:
  shape = jnp.shape(finite.array("counts", counts))
  if not shape or shape[-1] < 2:
    raise UserError(f"must be [..., K] with K >= 2 classes, not {shape}", field="counts")
