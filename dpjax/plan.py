"""The one place where sampler, clip, noise and event meet.

A Plan yields the transform that runs AND the event that is charged, so that a mismatch
between them cannot be written down.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from dp_accounting import DpEvent, NonPrivateDpEvent

from dpjax import accounting, gradients, sampling, transforms, validate
from dpjax.types import Batch, LossFn, NeighboringRelation
from dpjax.validate import UserError

# The share of delta that is set aside for a Poisson draw above the capacity.
OVERFLOW_SHARE = 0.05


def _log_overflow_allowed(delta: float, epsilon: float, num_steps: int) -> float:
  """log of the largest per-draw overflow probability b with
  (1 + e^epsilon) * num_steps * b <= OVERFLOW_SHARE * delta.

  A run that aborts on overflow differs from the analysed one by at most B = num_steps * b
  in total variation, on the data and on their neighbour: (epsilon, delta' + (1 + e^eps) B).
  """
  epsilon = epsilon if math.isfinite(epsilon) else 0.0
  return math.log(OVERFLOW_SHARE * delta / max(num_steps, 1)) - np.logaddexp(0.0, epsilon)


@dataclasses.dataclass(frozen=True)
class Plan:
  """A private run: how to sample, clip and add noise, how often, and what it costs.

  Args:
    sampler: decides who takes part in a step, and states its event.
    noise_multiplier: standard deviation of the noise on the sum / l2_clip_norm.
    l2_clip_norm: bound on one example's gradient (or a prefix tree of bounds).
    normalize_by: public divisor of the noisy sum: the expected batch size.
    num_steps: updates that the plan pays for.
    delta: of the guarantee; `epsilon()` refers to it. A share of `OVERFLOW_SHARE` pays
      for Poisson draws above the capacity.
    neighboring_relation: "" for the sampler's own.
    accountant: "pld" (tight) or "rdp"; "" for the tightest that knows the sampler
      (fixed-size sampling is proved by "rdp" only).

  Guarantee: a run that uses `transform` on the batches of `batches`, for at most `steps`
  updates, is (epsilon(delta, steps), delta)-differentially private for one example under
  `neighboring_relation`, with the number of examples public.

  >>> plan = Plan(sampler=sampling.PoissonSampler(prob=0.01, capacity=768),
  ...   noise_multiplier=1.2, l2_clip_norm=1.0, normalize_by=600, num_steps=2000, delta=1e-5)
  >>> 1.8 < plan.epsilon() < 1.9 and plan.epsilon(steps=0) == 0
  True
  """

  sampler: sampling.Sampler
  noise_multiplier: float
  l2_clip_norm: Any
  normalize_by: float
  num_steps: int
  delta: float
  neighboring_relation: NeighboringRelation | str = ""
  accountant: str = ""

  def __post_init__(self):
    validate.non_negative(noise_multiplier=self.noise_multiplier)
    validate.positive(normalize_by=self.normalize_by)
    validate.integer_at_least(1, num_steps=self.num_steps)
    validate.open_unit(delta=self.delta)
    gradients.check_clip_norm(self.l2_clip_norm, False)
    fixed = isinstance(self.sampler, sampling.FixedSizeSampler)
    accountant = self.accountant or ("rdp" if fixed else "pld")
    object.__setattr__(self, "accountant", accountant)
    object.__setattr__(self, "neighboring_relation", self._checked_relation())

  def _checked_relation(self) -> NeighboringRelation:
    allowed = self.sampler.relations
    default = allowed[0] if allowed else NeighboringRelation.ADD_OR_REMOVE_ONE
    relation = self.neighboring_relation or default
    validate.one_of(NeighboringRelation, neighboring_relation=str(relation))
    if allowed and relation not in allowed:
      raise UserError(
        f"neighboring_relation={str(relation)!r}: {type(self.sampler).__name__} is proved "
        f"only under {', '.join(allowed)}"
      )
    return NeighboringRelation(relation)

  @classmethod
  def calibrated(
    cls,
    *,
    epsilon: float,
    delta: float,
    sampler: sampling.Sampler,
    num_steps: int,
    l2_clip_norm: Any,
    normalize_by: float,
    neighboring_relation: NeighboringRelation | str = "",
    accountant: str = "",
  ) -> Plan:
    """The plan with the least noise that keeps `num_steps` within (epsilon, delta).

    Raises:
      UserError: epsilon <= 0 or unreachable, or a sampler that has no event.
    """
    validate.positive(epsilon=epsilon)
    unit = cls(
      sampler=sampler,
      noise_multiplier=1.0,
      l2_clip_norm=l2_clip_norm,
      normalize_by=normalize_by,
      num_steps=num_steps,
      delta=delta,
      neighboring_relation=neighboring_relation,
      accountant=accountant,
    )
    if sampler.event(accounting.gaussian_event(1.0)) is None:
      raise UserError(
        f"sampler={type(sampler).__name__}: has no event, so no epsilon can be proved for "
        "it; use PoissonSampler or FixedSizeSampler"
      )
    noise_multiplier = accounting.calibrate_noise_multiplier(
      lambda z: dataclasses.replace(unit, noise_multiplier=z).event(),
      epsilon=epsilon,
      delta=unit.accounted_delta(delta),
      neighboring_relation=unit.neighboring_relation,
      accountant=unit.accountant,
    )
    return dataclasses.replace(unit, noise_multiplier=noise_multiplier)

  @property
  def is_private(self) -> bool:
    """False where no epsilon can be proved: no noise, no clipping, or no event."""
    return not isinstance(self.step_event(), NonPrivateDpEvent)

  def step_event(self) -> DpEvent:
    """What one step is to the accountant."""
    if self.noise_multiplier == 0:
      return NonPrivateDpEvent()
    event = self.sampler.event(self._sum_event())
    return NonPrivateDpEvent() if event is None else event

  def _sum_event(self) -> DpEvent:
    """What one noisy sum is to the accountant, before sampling."""
    return accounting.gaussian_event(self.noise_multiplier)

  def event(self, steps: int | None = None) -> DpEvent:
    """What `steps` steps (default: all) are to the accountant."""
    return accounting.composed(self.step_event(), self._steps(steps))

  def _steps(self, steps: int | None) -> int:
    if steps is None:
      return self.num_steps
    validate.integer_at_least(0, steps=steps)
    if steps > self.num_steps:
      raise UserError(f"steps={steps}: must be <= num_steps={self.num_steps} of the plan")
    return int(steps)

  def accounted_delta(self, delta: float) -> float:
    """delta less what is set aside for a Poisson draw above the capacity."""
    if not isinstance(self.sampler, sampling.PoissonSampler):
      return delta
    left = delta - OVERFLOW_SHARE * self.delta
    if left <= 0:
      raise UserError(
        f"delta={delta!r}: must be > {OVERFLOW_SHARE * self.delta!r}, which the plan sets "
        "aside for batch overflow"
      )
    return left

  def epsilon(self, delta: float | None = None, steps: int | None = None) -> float:
    """epsilon at `delta` (default: the plan's) after `steps` (default: all) steps."""
    return accounting.epsilon(
      self.event(steps),
      delta=self.accounted_delta(self.delta if delta is None else delta),
      neighboring_relation=self.neighboring_relation,
      accountant=self.accountant,
    )

  def epsilon_curve(self, steps: Any, delta: float | None = None) -> np.ndarray:
    """epsilon after each of the given step counts."""
    return accounting.epsilon_curve(
      self.step_event(),
      [self._steps(int(step)) for step in steps],
      delta=self.accounted_delta(self.delta if delta is None else delta),
      neighboring_relation=self.neighboring_relation,
      accountant=self.accountant,
    )

  def transform(self, key: jax.Array) -> optax.GradientTransformationExtraArgs:
    """`dpjax.clip_and_noise` with this plan's numbers."""
    return transforms.clip_and_noise(
      l2_clip_norm=self.l2_clip_norm,
      noise_multiplier=self.noise_multiplier,
      normalize_by=self.normalize_by,
      key=key,
    )

  def clipped_grad(self, loss_fn: LossFn, **options: Any) -> gradients.ClippedGrad:
    """`dpjax.clipped_grad` with this plan's clip norm; feed its result to `transform`."""
    return gradients.clipped_grad(loss_fn, l2_clip_norm=self.l2_clip_norm, **options)

  def _poisson(self) -> sampling.PoissonSampler:
    if not isinstance(self.sampler, sampling.PoissonSampler):
      raise UserError(
        f"sampler={self.sampler!r}: must be a PoissonSampler to have a capacity"
      )
    return self.sampler

  def fitted_sampler(self, num_examples: int) -> sampling.PoissonSampler:
    """This plan's Poisson sampler with the smallest capacity that delta's share allows."""
    allowed = _log_overflow_allowed(self.delta, self.epsilon(), self.num_steps)
    return sampling.PoissonSampler.fitted(
      prob=self._poisson().prob,
      num_examples=num_examples + 1,  # the neighbour may have one more
      log_overflow_prob=allowed,
    )

  def check_capacity(self, num_examples: int) -> None:
    """Raises unless the chance of a draw above the capacity fits into delta's share."""
    if not isinstance(self.sampler, sampling.PoissonSampler):
      return
    needed = self.fitted_sampler(num_examples).capacity
    if self.sampler.capacity < min(needed, num_examples + 1):
      chance = math.exp(self.sampler.log_overflow_prob(num_examples + 1))
      raise UserError(
        f"capacity={self.sampler.capacity}: a Poisson draw from {num_examples} examples "
        f"exceeds it with probability {chance:.1e} per step; must be >= {needed} for "
        f"delta={self.delta:g}"
      )

  def batches(self, data: Any, rng: int, start: int = 0) -> Iterator[Batch]:
    """Padded, masked batches for steps start .. num_steps - 1, each a function of
    (rng, step) alone.

    Args:
      data: anything with `len()` whose `data[indices]` is a tree of stacked examples.
      rng: integer seed of the sampler; 128 bits or more for a release.
      start: first step, to go on where a run stopped.

    Raises:
      UserError: the sampler's capacity is too small for these data.
    """
    validate.integer_at_least(0, rng=rng, start=start)
    num_examples = len(data)
    self.check_capacity(num_examples)

    def generate() -> Iterator[Batch]:
      for step in range(start, self.num_steps):
        drawn = self.sampler.draw(num_examples, seed=rng, step=step)
        indices, mask = sampling.pad(drawn, self.sampler.slots)
        yield Batch(data[indices], mask)

    return generate()

  @property
  def l2_bound(self) -> float:
    """Largest norm of one example's contribution to the sum."""
    return gradients.l2_bound(self.l2_clip_norm)

  def statement(self, num_examples: int | None = None, steps: int | None = None) -> str:
    """The guarantee in words, with its assumptions; see accounting.privacy_statement."""
    if not self.is_private:
      return "Privacy statement\n\nNone: no epsilon is proved for this run."
    fixed = isinstance(self.sampler, sampling.FixedSizeSampler)
    return accounting.privacy_statement(
      self.event(steps),
      delta=self.delta,
      neighboring_relation=self.neighboring_relation,
      num_examples=num_examples,
      accountants=("rdp",) if fixed else ("pld", "rdp"),
      delta_set_aside=self.delta - self.accounted_delta(self.delta),
    )
