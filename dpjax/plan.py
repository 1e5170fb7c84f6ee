"""The one place where sampler, clip, noise and event meet.

A Plan yields the transform that runs AND the event that is charged, so that a mismatch
between them cannot be written down.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from dp_accounting import DpEvent, NonPrivateDpEvent

from dpjax import accounting, gradients, noise, sampling, transforms, validate
from dpjax.types import Batch, LossFn, NeighboringRelation
from dpjax.validate import UserError

# The share of delta that is set aside for a Poisson draw above the capacity.
OVERFLOW_SHARE = 0.05
_MAX_DENSE = 1024  # steps up to which a statement looks at the whole of C
MAX_NOISE_LEVELS = 32  # different factors of a noise_schedule under sampling, by PLD


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
    clipping: "flat", "automatic" (see `dpjax.clipped_grad`), or an `AdaptiveClipping`, whose
      count is released and charged with every step.
    gamma: of automatic clipping.
    clip_schedule: public factors of the clip norm, one for each step; they cost nothing.
    noise_shares: each group's share of the privacy budget, a tree like `l2_clip_norm`; they
      cost nothing (see `transforms/group_noise.py`).
    slices: physical batches that make up one step; see `accumulated`.
    correlation: a strategy of `dpjax.noise.correlated` (DP-FTRL), None for noise that is
      independent from step to step. Needs a sampler that bounds the participation of one
      example (`dpjax.sampling.participation`), from which its cost is computed.
    noise_schedule: public factors of the noise multiplier, one for each step, or ().

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
  clipping: str | transforms.AdaptiveClipping = "flat"
  gamma: float = 0.01
  clip_schedule: tuple[float, ...] | None = None
  noise_shares: Any = None
  slices: int = 1
  correlation: noise.correlated.Correlation | None = None
  noise_schedule: tuple[float, ...] = ()

  def __post_init__(self):
    validate.non_negative(noise_multiplier=self.noise_multiplier)
    validate.positive(normalize_by=self.normalize_by)
    validate.integer_at_least(1, num_steps=self.num_steps)
    validate.open_unit(delta=self.delta)
    gradients.check_clip_norm(self.l2_clip_norm, False)
    self._check_clipping()
    if self.noise_multiplier:  # without such a number z is not what runs
      validate.positive(noise_std=float(self.noise_multiplier) * self.l2_bound)
    accountant = self.accountant or self._proved.accountants[0]
    object.__setattr__(self, "accountant", accountant)
    object.__setattr__(self, "neighboring_relation", self._checked_relation())
    object.__setattr__(self, "noise_schedule", tuple(self.noise_schedule))
    self._check_noise()

  @property
  def _proved(self) -> accounting.Proved:
    return accounting.proved_for(self.sampler.law)

  def _check_noise(self) -> None:
    transforms.check_schedule(self.noise_schedule, self.num_steps)
    if self.noise_schedule and not self.sampler.steps_alike:
      raise UserError(
        f"noise_schedule: not with {type(self.sampler).__name__}, whose epoch is paid at the "
        "noise of its first step"
      )
    self._check_noise_and_clipping()
    if self.sampler.participation is not None:
      _ = self._correlated_events  # refuses what has no analysis
    elif not (self.correlation is None or self.correlation.bands == 1):
      raise UserError(
        f"correlation={type(self.correlation).__name__}: needs a sampler that bounds how "
        "often an example takes part, such as CyclicSampler or CyclicPoissonSampler, not "
        f"{type(self.sampler).__name__}"
      )
    levels = len(set(self.noise_schedule))
    sampled = (
      self.sampler.participation is None or self.sampler.participation.sampling_prob < 1
    )
    if sampled and levels > MAX_NOISE_LEVELS and self.accountant == "pld":
      raise UserError(
        f"noise_schedule: has {levels} different factors; must have at most "
        f"{MAX_NOISE_LEVELS} for accountant='pld' (each is one more privacy loss "
        "distribution), or use accountant='rdp'"
      )

  def _check_noise_and_clipping(self) -> None:
    """Refuses what the transform of correlated noise does not know."""
    shaped = self.correlation is not None or bool(self.noise_schedule)
    refused = {
      "clipping": shaped and self.clipping != "flat",
      "noise_shares": shaped and self.noise_shares is not None,
      "l2_clip_norm": shaped and 0 in jax.tree.leaves(self.l2_clip_norm),  # frozen groups
    }
    for name in [name for name, wrong in refused.items() if wrong]:
      what = "correlated noise" if self.correlation is not None else "a noise_schedule"
      raise UserError(f"{name}={getattr(self, name)!r}: not with {what}")

  @property
  def _strategy(self) -> noise.correlated.Correlation:
    return self.correlation or noise.correlated.Independent()

  @functools.cached_property
  def _correlated_events(self) -> tuple[DpEvent, ...]:
    """Of each step, where the sampler bounds participation and the noise is not zero."""
    participation = self.sampler.participation
    assert participation is not None
    return accounting.correlated_events(
      self._strategy,
      noise_multiplier=self.noise_multiplier,
      num_steps=self.num_steps,
      factors=self.noise_schedule,
      **participation._asdict(),
    )

  @property
  def _adaptive(self) -> transforms.AdaptiveClipping | None:
    return self.clipping if isinstance(self.clipping, transforms.AdaptiveClipping) else None

  def _check_clipping(self) -> None:
    validate.integer_at_least(1, slices=self.slices)
    if self._adaptive is not None:
      self._check_adaptive()
    else:
      validate.one_of(gradients.CLIPPINGS, clipping=self.clipping)
      gamma = self.gamma if self.clipping == "automatic" else None
      gradients.check_clip_norm(self.l2_clip_norm, False, gamma)
    if self.noise_shares is not None:
      transforms.group_stds(self.l2_clip_norm, self.noise_multiplier, self.noise_shares)
    if self.clip_schedule is not None:
      self._check_schedule(self.clip_schedule)

  def _check_adaptive(self) -> None:
    if not isinstance(self.l2_clip_norm, (int, float)) or math.isinf(self.l2_clip_norm):
      raise UserError(
        f"l2_clip_norm={self.l2_clip_norm!r}: must be one finite number for adaptive clipping"
      )
    refused = {
      "clip_schedule": self.clip_schedule is not None,
      "noise_shares": self.noise_shares is not None,
      "slices": self.slices != 1,
      "sampler": self.sampler.participation is not None,
    }
    for name in [name for name, wrong in refused.items() if wrong]:
      raise UserError(f"{name}={getattr(self, name)!r}: not with adaptive clipping")

  def _check_schedule(self, scales: tuple[float, ...]) -> None:
    transforms.check_scales(scales)
    if len(scales) < self.num_steps:
      raise UserError(
        f"clip_schedule: has {len(scales)} factors, must have one for each of "
        f"num_steps={self.num_steps}"
      )
    if self.clipping != "flat":
      raise UserError(f"clip_schedule: not with clipping={self.clipping!r}")

  def _checked_relation(self) -> NeighboringRelation:
    allowed = self._proved.relations
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
    **options: Any,
  ) -> Plan:
    """The plan with the least noise that keeps `num_steps` within (epsilon, delta).

    `options` are further fields of the plan.

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
      **options,
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
    return not isinstance(self._event_at(0), NonPrivateDpEvent)

  @property
  def steps_alike(self) -> bool:
    """Whether every step is the same event."""
    correlated = self.sampler.participation is not None
    return self.sampler.steps_alike and not (self.noise_schedule or correlated)

  def step_event(self, step: int | None = None) -> DpEvent:
    """What step `step`, from 0, adds to the bill; None where all steps are alike.

    Composing the events of the first t steps gives what t steps cost, for every t.

    Raises:
      UserError: step None where the steps differ, or beyond the plan's steps.
    """
    if step is None and not self.steps_alike:
      raise UserError("step=None: the steps of this plan differ in cost, name one of them")
    if step is not None:
      validate.integer_at_least(0, step=step)
      if step >= self.num_steps:
        raise UserError(f"step={step}: must be < num_steps={self.num_steps} of the plan")
    return self._event_at(step or 0)

  def _event_at(self, step: int) -> DpEvent:
    if self.noise_multiplier == 0:
      return NonPrivateDpEvent()
    if self.sampler.participation is not None:
      return self._correlated_events[step]
    inner = self._sum_event()
    if self.noise_schedule:
      inner = accounting.gaussian_event(self.noise_multiplier * self.noise_schedule[step])
    event = self.sampler.event_at(step, inner)
    return NonPrivateDpEvent() if event is None else event

  def _sum_event(self) -> DpEvent:
    """What one noisy sum is to the accountant, before sampling; with adaptive clipping,
    the noisy sum and the noisy count together."""
    multiplier = self.noise_multiplier
    if self._adaptive is not None:
      multiplier = self._adaptive.combined_noise_multiplier(multiplier, self.normalize_by)
    return accounting.gaussian_event(multiplier)

  def event(self, steps: int | None = None) -> DpEvent:
    """What `steps` steps (default: all) are to the accountant."""
    steps = self._steps(steps)
    if self.steps_alike:
      return accounting.composed(self.step_event(), steps)
    return accounting.joined([self._event_at(step) for step in range(steps)])

  def _total(self, steps: int | None) -> DpEvent:
    """`event(steps)`, up to rounding: one Gaussian where it composes to one."""
    steps, participation = self._steps(steps), self.sampler.participation
    if participation is None or not steps or not self.noise_multiplier:
      return self.event(steps)
    if participation.sampling_prob < 1:
      return self.event(steps)
    costs = accounting.participation_costs(
      self._strategy,
      num_steps=self.num_steps,
      min_sep=participation.min_sep,
      cyclic=participation.cyclic,
      factors=self.noise_schedule,
    )
    return accounting.gaussian_event(self.noise_multiplier / math.sqrt(costs[steps - 1]))

  def remaining_event(self, start: int) -> DpEvent:
    """What the steps from `start` to the last are to the accountant."""
    if self.steps_alike:
      return accounting.composed(self.step_event(), self.num_steps - start)
    return accounting.joined([self._event_at(t) for t in range(start, self.num_steps)])

  def _steps(self, steps: int | None) -> int:
    if steps is None:
      return self.num_steps
    validate.integer_at_least(0, steps=steps)
    if steps > self.num_steps:
      raise UserError(f"steps={steps}: must be <= num_steps={self.num_steps} of the plan")
    return int(steps)

  def accounted_delta(self, delta: float, steps: int | None = None) -> float:
    """delta less what pays for a random draw above the capacity, in a run of `steps`.

    A run overflows with probability B at most, of which `check_capacity` makes sure at the
    plan's own delta and epsilon. It costs (1 + e^epsilon) B of delta at ANY delta: below
    the plan's own delta, where epsilon is larger, more than `OVERFLOW_SHARE` is needed, and
    the least amount x >= (1 + e^epsilon(delta - x)) B is set aside.

    Raises:
      UserError: no epsilon makes the run private at such a small delta.
    """
    validate.open_unit(delta=delta)
    steps = self._steps(steps)
    if not self.sampler.can_overflow or not steps or not self.is_private:
      return delta
    share = OVERFLOW_SHARE * self.delta
    if delta >= self.delta and (
      steps == self.num_steps or math.isfinite(self._own_epsilon)
    ):
      return delta - share
    return delta - self._set_aside(delta, steps)

  @functools.cached_property
  def _own_epsilon(self) -> float:
    """Of all steps at the plan's delta: it decides which capacity is enough."""
    return self._accounted(self.event(), self.delta * (1 - OVERFLOW_SHARE))

  def _set_aside(self, delta: float, steps: int) -> float:
    """What `steps` steps need, where the plan's own share may not be enough."""
    allowed = _log_overflow_allowed(self.delta, self._own_epsilon, self.num_steps)
    event = self._total(steps)
    aside = accounting.overflow.set_aside(
      lambda left: self._accounted(event, left),
      delta=delta,
      log_abort_prob=allowed + math.log(steps),
      least=OVERFLOW_SHARE * self.delta,
    )
    if aside is None:
      raise UserError(
        f"delta={delta!r}: is too small for this plan, whose capacity was chosen for delta="
        f"{self.delta!r}: batch overflow alone may cost more; make a plan with this delta"
      )
    return aside

  def epsilon(self, delta: float | None = None, steps: int | None = None) -> float:
    """epsilon at `delta` (default: the plan's) after `steps` (default: all) steps.

    Guarantee: it holds for runs on `batches`, whose abort on a draw above the capacity is
    paid for at every delta.
    """
    return self._epsilon_of(self.event(steps), delta, steps)

  def _epsilon_of(self, event: DpEvent, delta: float | None, steps: int | None) -> float:
    delta = self.delta if delta is None else delta
    return self._accounted(event, self.accounted_delta(delta, steps))

  def _accounted(self, event: DpEvent, left: float) -> float:
    return accounting.epsilon(
      event,
      delta=left,
      neighboring_relation=self.neighboring_relation,
      accountant=self.accountant,
    )

  def epsilon_curve(self, steps: Any, delta: float | None = None) -> np.ndarray:
    """epsilon after each of the given step counts, each as `epsilon(delta, steps)`."""
    counts = [self._steps(int(count)) for count in steps]
    return np.array([self._epsilon_of(self._total(n), delta, n) for n in counts], float)

  def transform(self, key: jax.Array) -> optax.GradientTransformationExtraArgs:
    """`dpjax.clip_and_noise` with this plan's numbers, or its kin for other clippings.

    Args:
      key: of the noise, for ONE run on ONE data set. It is the caller's, and no transform
        sees the whole data, so it cannot be checked here: two runs with one key, on data or
        settings that differ in anything, have the same noise, and the difference of what
        they release is exact. Give every run a key of its own:
        `dpjax.noise.secure.new_key()`, or a seed that no other run has.
    """
    numbers: dict[str, Any] = dict(
      l2_clip_norm=self.l2_clip_norm,
      noise_multiplier=self.noise_multiplier,
      normalize_by=self.normalize_by,
      key=key,
    )
    if self._adaptive is not None:
      return transforms.adaptive_clip_and_noise(**numbers, adaptive=self._adaptive)
    if self.correlation is not None or self.noise_schedule:
      tx = self._correlated_transform(numbers)
    else:
      tx = transforms.clip_and_noise(
        **numbers,
        clipping=str(self.clipping),
        gamma=self.gamma,
        noise_shares=self.noise_shares,
      )
    if self.clip_schedule is None:
      return tx
    return transforms.with_clip_schedule(tx, self.clip_schedule)

  def _correlated_transform(self, numbers: dict[str, Any]) -> Any:
    return transforms.clip_and_correlated_noise(
      **numbers,
      correlation=self._strategy,
      num_steps=self.num_steps,
      noise_schedule=self.noise_schedule,
    )

  def clipped_grad(self, loss_fn: LossFn, **options: Any) -> gradients.ClippedGrad:
    """`dpjax.clipped_grad` with this plan's clip norm; feed its result to `transform`.

    Where the clip norm changes from step to step, `loss_fn` must be the loss divided by
    `transforms.clip_scale(state)` of the transform's state, as `training.dp_sgd` does it.
    """
    options = {
      "clipping": "flat" if self._adaptive else self.clipping,
      "gamma": self.gamma,
      **options,
    }
    return gradients.clipped_grad(loss_fn, l2_clip_norm=self.l2_clip_norm, **options)

  def accumulated(self, tx: Any) -> Any:
    """`tx` for this plan's slices: give it `optax.chain(plan.transform(key), optimizer)`.

    With slices > 1 the result takes the `slices` batches of one step one after the other;
    noise, division and the optimizer's own state move with the last one, once per step.
    """
    if self.slices == 1:
      return tx
    return transforms.accumulate(
      tx,
      every=self.slices,
      l2_clip_norm=self.l2_clip_norm,
      slots=sampling.slice_slots(self.sampler.slots, self.slices),
      gamma=self.gamma if self.clipping == "automatic" else None,
    )

  @property
  def noise_std(self) -> Any:
    """Standard deviation of the noise on the private MEAN gradient, the same at every step:
    a number, or a prefix tree of numbers where it differs by group.

    Raises:
      UserError: it changes from step to step.
    """
    changing = {
      "clipping": self._adaptive is not None,
      "clip_schedule": self.clip_schedule is not None,
      "noise_schedule": bool(self.noise_schedule),
      "correlation": self.correlation is not None,
    }
    for name in [name for name, changes in changing.items() if changes]:
      raise UserError(f"{name}={getattr(self, name)!r}: makes noise_std differ by step")
    stds = transforms.group_stds(
      self.l2_clip_norm, self.noise_multiplier, self.noise_shares
    )
    stds = jax.tree.map(lambda std: std / self.normalize_by, stds)
    return jax.tree.leaves(stds)[0] if len(set(jax.tree.leaves(stds))) == 1 else stds

  def fitted_sampler(self, num_examples: int) -> Any:
    """This plan's sampler with the smallest capacity that delta's share allows."""
    allowed = _log_overflow_allowed(self.delta, self._own_epsilon, self.num_steps)
    # the neighbour may have one more
    return self.sampler.fitted_to(num_examples + 1, log_overflow_prob=allowed)

  def check_capacity(self, num_examples: int) -> None:
    """Raises unless the chance of a draw above the capacity fits into delta's share."""
    if not self.sampler.can_overflow:
      return
    slots, needed = self.sampler.slots, self.fitted_sampler(num_examples).slots
    if slots < min(needed, num_examples + 1):
      chance = math.exp(self.sampler.log_overflow_prob(num_examples + 1))
      raise UserError(
        f"capacity={slots}: a Poisson draw from {num_examples} examples "
        f"exceeds it with probability {chance:.1e} per step; must be >= {needed} for "
        f"delta={self.delta!r}"
      )

  def batches(self, data: Any, rng: int, start: int = 0) -> Iterator[Batch]:
    """Padded, masked batches for steps start .. num_steps - 1, each a function of
    (rng, step) alone. With slices > 1, each step's draw comes as that many batches in a
    row, and every drawn example is in exactly one of them.

    Args:
      data: anything with `len()` whose `data[indices]` is a tree of stacked examples. Rows
        that its `present` [n] (where it has one) calls empty are drawn, and contribute zero.
      rng: integer seed of the sampler; 128 bits or more for a release. As the key of
        `transform`, of one run on one data set: the costs of runs add up only where they
        sample independently. The batches are a function of (rng, step), not of the data, so
        that they are the same wherever the data are kept.
      start: first step, to go on where a run stopped.

    Raises:
      UserError: the sampler's capacity is too small for these data.
    """
    validate.integer_at_least(0, rng=rng, start=start)
    num_examples, present = len(data), getattr(data, "present", None)
    self.check_capacity(num_examples)

    def generate() -> Iterator[Batch]:
      for step in range(start, self.num_steps):
        drawn = self.sampler.draw(num_examples, seed=rng, step=step)
        for indices, mask in sampling.slices(drawn, self.sampler.slots, self.slices):
          yield Batch(data[indices], mask if present is None else mask & present[indices])

    return generate()

  @property
  def l2_bound(self) -> float:
    """Largest norm of one example's contribution to the sum."""
    return gradients.l2_bound(self.l2_clip_norm)

  def statement(
    self, num_examples: int | None = None, steps: int | None = None, *, unit: str = ""
  ) -> str:
    """The guarantee in words, with its assumptions; see accounting.privacy_statement.

    `unit` is whose data count as one record; "" for the sampler's own word.
    """
    unit = unit or self.unit
    if not self.is_private:
      return "Privacy statement\n\nNone: no epsilon is proved for this run."
    return accounting.privacy_statement(
      self._total(steps),
      delta=self.delta,
      neighboring_relation=self.neighboring_relation,
      num_examples=num_examples,
      accountants=self._proved.accountants,
      delta_set_aside=self.delta - self.accounted_delta(self.delta),
      unit=unit,
      noise=self._noise_in_words(unit),
    )

  def _noise_in_words(self, unit: str) -> str:
    """Of a step, where it differs from what the accountant is told; else nothing."""
    if self.sampler.participation is not None:
      return self._correlated_noise_in_words(unit)
    if self._adaptive is not None:
      return self._adaptive.statement(self.noise_multiplier, self.normalize_by)
    if self.noise_shares is None:
      return ""
    stds = jax.tree.leaves(
      transforms.group_stds(self.l2_clip_norm, self.noise_multiplier, self.noise_shares)
    )
    low, high = (accounting.lower(std, digits=6) for std in (min(stds), max(stds)))
    return (
      f"Noise by group: its standard deviation on the sum is {low} to {high}, by the public "
      "shares of the groups; after division by the shares it is the noise above."
    )

  @property
  def unit(self) -> str:
    """Whose data count as one record: "example", or "user" where users are sampled."""
    return self.sampler.unit

  def _correlated_noise_in_words(self, unit: str) -> str:
    name, shown = type(self._strategy).__name__, self._noise_std_in_words()
    min_sep, cyclic, prob = self.sampler.participation or (1, False, 1.0)
    apart = f"exactly {min_sep} steps apart" if cyclic else f"{min_sep} steps apart or more"
    amplified = (
      "each turn's noise on the largest column of C, with probability "
      f"{accounting.upper(prob, digits=6)}"
      if prob < 1
      else f"one Gaussian mechanism on the columns of C that one {unit} can touch"
    )
    return (
      f"Noise: C^-1 z (strategy {name}), z white. {shown}\nAssumed, and kept by "
      f"{type(self.sampler).__name__}: the steps of one {unit} are {apart}. Charged as "
      f"{amplified}."
    )

  def _noise_std_in_words(self) -> str:
    """Standard deviations of the noise on the sum: C has a unit diagonal, so what is new in
    step t is z_t, and what comes from earlier steps is independent of it."""
    factors = np.array(self.noise_schedule or np.ones(self.num_steps))
    number = lambda value: accounting.lower(self.noise_multiplier * value, digits=6)
    low, high = number(factors.min()), number(factors.max())
    new = low if low == high else f"{low} to {high}"
    words = (
      f"Given the noise of all earlier steps, that of a step has {new} times the clip norm as "
      "its standard deviation"
    )
    if self.num_steps > _MAX_DENSE:
      return f"{words}; taken alone it has more."
    matrix = noise.correlated.matrix(self._strategy, self.num_steps)
    alone = np.linalg.norm(np.linalg.inv(matrix) * factors, axis=1)
    return f"{words}; taken alone it has up to {number(alone.max())}."
