"""All samplers of dpjax: a row for each says where a config may name it, and how it is sized.

A sampler says who takes part in a step, and which event a step is. What makes a sampler's fields of
a run's numbers, such as a sampling probability and the size of the data, stands here.

| sampler                 | an example takes part in                               |
| ----------------------- | ------------------------------------------------------ |
| PoissonSampler          | any step, independently                                |
| RandomAllocationSampler | one step of every pass, drawn anew, uniformly          |
| KOutOfTSampler          | k steps of every pass, a uniform set, drawn anew       |
| TruncatedPoissonSampler | any step; a batch that is too large is cut at random   |
| FixedSizeSampler        | a uniform subset of fixed size                         |
| WithReplacementSampler  | a batch of uniform draws, maybe several times          |
| ShuffledSampler         | one step of every epoch, a permutation cut in batches  |
| CyclicSampler           | one fixed step of every pass                           |
| CyclicPoissonSampler    | its group's turn, with probability `turn_prob`         |
| BallsInBinsSampler      | one step of every pass, drawn once, uniformly          |
| MinSepSampler           | any step, at least `steps_apart` after its last one    |
| BoundedContribution-    | any step, independently; the guarantee is for a user,  |
|   Sampler               | who owns several examples                              |
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from dpjax import validate
from dpjax.accounting.proved import ADD
from dpjax.sampling.samplers import Sampler
from dpjax.validate import UserError, Verbatim

# Probability below which float64 cannot tell whether 1 / sampling_prob is a whole number.
_LEAST_PROB = 1e-15


class Sizing(NamedTuple):
  """Public numbers of a run that determine the fields of its sampler."""

  sampling_prob: float  # average chance that one example is in a batch
  num_examples: int  # public number of records; 0: not known yet
  num_steps: int = 1
  padded_batch_size: int = 1  # upper bound on the draws of a run; a plan then lowers it
  capacity: int | None = None  # requested by the config; None: not requested
  steps_apart: int | None = None  # requested by the config; None: about 1 / sampling_prob
  num_selected: int | None = None  # requested number of steps of an example in each pass
  neighboring_relation: str = ""  # of the guarantee; "" if none is requested
  unit: str = "example"  # what one row is, for messages
  may_leave: int = 0  # largest number of records that an audit leaves out at random

  @property
  def apart(self) -> int:
    """Returns the steps from one turn of an example to the next, for a sampler without passes."""
    # The addend corrects 1 / sampling_prob if rounding left it just below a whole number.
    return self.steps_apart or max(1, int(1 / self.sampling_prob + 1e-9))

  @property
  def turn_prob(self) -> float:
    """Returns the chance that an example whose turn comes every `apart` steps takes part in it."""
    prob = self.sampling_prob * self.apart
    # A value above 1, or below 1 by rounding alone, means that every example takes part.
    return 1.0 if prob > 1 - 1e-9 else prob


@dataclasses.dataclass(frozen=True)
class Scheme:
  """A sampler, where a config may name it, and how the numbers of a run make it.

  Attributes:
    sampler: class of the sampler, or "module:Name" in this package.
    make: (class, numbers) -> sampler; the class is `kind`, or a user's subclass of it. None: only
      its author sizes it.
    used_for: "examples" of central training; "clients" of a federated run; or "correlated noise",
      for which a sampler must declare how far apart an example's steps are.
    numbers: config fields that it reads: "capacity", "steps_apart" or "num_selected".
    answers: way in which `launch.account` computes epsilon: "exact" for that of the accountants,
      "simulated" for one that is shown beside proved ones; "" for none.
    in_passes: whether a pass must be a whole number of steps.
    relation_is_named: whether a run must name its neighbouring relation to have a proof.
  """

  sampler: str | type[Sampler]
  make: Callable[[Any, Sizing], Sampler] | None
  used_for: tuple[str, ...] = ()
  numbers: tuple[str, ...] = ()
  answers: str = ""
  in_passes: bool = False
  relation_is_named: bool = False

  @functools.cached_property
  def kind(self) -> type[Sampler]:
    """Returns the class of the sampler, whose file is imported now."""
    if not isinstance(self.sampler, str):
      return self.sampler
    return pkgutil.resolve_name(f"dpjax.sampling.{self.sampler}")

  def times_per_pass(self, size: Sizing) -> int:
    """Returns how often a pass takes each example, for a sampler in passes."""
    if "num_selected" not in self.numbers:
      return 1
    # k has no default, since it decides what a run costs.
    validate.integer_at_least(1, num_selected=size.num_selected)
    return int(size.num_selected or 0)

  def check_prob(self, size: Sizing, *, purpose: str = "") -> None:
    """Raises UserError if passes must be whole, and none has the sampling probability of `size`.

    Args:
      purpose: name of the sampler in the message; "" for its own.
    """
    if not self.in_passes:
      return
    times = self.times_per_pass(size)
    prob = size.sampling_prob
    purpose = purpose or self.kind.name.replace("_", " ")
    validate.probability(sampling_prob=prob)
    least = times * _LEAST_PROB
    if prob < least:
      raise UserError(
        f"must be at least {least}, for {purpose}", field="sampling_prob", value=prob
      )
    if not whole_passes(prob, times):
      raise UserError(
        f"must be {times} / a whole number, the steps of a pass, for {purpose}; "
        f"{times / steps_per_pass(prob, times)!r} is near",
        field="sampling_prob",
        value=prob,
      )

  def nearest_prob(self, size: Sizing) -> float:
    """Returns a sampling probability close to that of `size` that batches can have.

    For whole passes it is the largest possible one up to it."""
    prob = size.sampling_prob
    if self.make is _fixed_size:
      # A batch holds a whole number of examples, so a multiple of 1 / num_examples is possible.
      return whole_batch_size(prob, size.num_examples) / size.num_examples
    if not self.in_passes:
      return prob
    times = self.times_per_pass(size)
    # A longer pass takes each example less often, so its length is rounded up. A pass that is
    # whole up to rounding errors is kept.
    whole = whole_passes(prob, times)
    return times / (steps_per_pass(prob, times) if whole else math.ceil(times / prob))


# --- batch sizes and passes, for runs and accounting alike


def whole_batch_size(sampling_prob: float, num_examples: int) -> int:
  """Returns the fixed batch size for a sampling probability.

  It is sampling_prob * num_examples, rounded, and at least 1. Runs and accounting must both call
  this function, so that they use the same size.

  >>> whole_batch_size(0.015, 100), whole_batch_size(1e-6, 100)
  (2, 1)
  """
  validate.probability(sampling_prob=sampling_prob)
  validate.integer_at_least(1, num_examples=num_examples)
  return max(1, round(sampling_prob * num_examples))


def steps_per_pass(sampling_prob: float, times: int = 1) -> int:
  """Returns the number of steps of a pass, in which every record takes part `times` times.

  This number is times / sampling_prob, rounded, and at least `times`.

  >>> steps_per_pass(0.25), steps_per_pass(0.3, times=3)
  (4, 10)
  """
  return max(times, round(times / sampling_prob))


def whole_passes(sampling_prob: float, times: int = 1) -> bool:
  """Returns whether times / sampling_prob, the number of steps of a pass, is a whole number.

  >>> whole_passes(0.25), whole_passes(0.3), whole_passes(0.3, times=3)
  (True, False, True)
  """
  steps = steps_per_pass(sampling_prob, times)
  # Floats such as 1 / 3 are not exact, so the comparison allows for rounding.
  return math.isclose(steps * sampling_prob, times, rel_tol=1e-9)


# --- samplers for the numbers of a run


def make_sampler(kind: type[Sampler], size: Sizing) -> Sampler:
  """Returns the sampler of a class, dpjax's or a subclass of it, for the numbers of a run.

  >>> from dpjax.sampling import PoissonSampler
  >>> make_sampler(PoissonSampler, Sizing(0.5, num_examples=8, padded_batch_size=9))
  PoissonSampler(sampling_prob=0.5, capacity=9)

  Raises:
    UserError: numbers that do not fit the sampler, or a class that has no rule for its size.
  """
  scheme = scheme_of(kind)
  if scheme is None or scheme.make is None:
    raise UserError(
      "has no rule for its size; name a function that returns one",
      field="sampler",
      value=Verbatim(kind.__name__),
    )
  return scheme.make(kind, size)


def _poisson(kind: Any, size: Sizing) -> Sampler:
  return kind(sampling_prob=size.sampling_prob, capacity=size.padded_batch_size)


def _in_one_step_of_each_pass(kind: Any, size: Sizing) -> Sampler:
  SCHEMES["random_allocation"].check_prob(size)
  steps = steps_per_pass(size.sampling_prob)
  return kind(steps_per_pass=steps, capacity=size.padded_batch_size)


def _in_k_steps_of_each_pass(kind: Any, size: Sizing) -> Sampler:
  scheme = SCHEMES["k_out_of_t"]
  scheme.check_prob(size)
  k = scheme.times_per_pass(size)
  steps = steps_per_pass(size.sampling_prob, k)
  return kind(steps_per_pass=steps, num_selected=k, capacity=size.padded_batch_size)


def _truncated(kind: Any, size: Sizing) -> Sampler:
  """By default the capacity is three standard deviations above the mean batch size, so that about
  one step in a thousand is cut."""
  prob, num_examples = size.sampling_prob, size.num_examples
  deviation = math.sqrt(prob * (1 - prob) * num_examples)
  # The default is a multiple of 8, as in `PaddedSampler.fit_to`.
  capacity = size.capacity or 8 * math.ceil((prob * num_examples + 3 * deviation) / 8)
  return kind(sampling_prob=prob, capacity=capacity, num_examples=num_examples)


def _fixed_size(kind: Any, size: Sizing) -> Sampler:
  batch_size = whole_batch_size(size.sampling_prob, size.num_examples)
  if size.neighboring_relation != ADD:
    return kind(batch_size=batch_size, num_examples=size.num_examples)
  # An audit may leave out records. The batch size stays the same, so that it does not reveal how
  # many records are left. The event uses the smallest possible number, at which a batch is the
  # largest share of the records.
  least = size.num_examples - size.may_leave
  return kind(batch_size=batch_size, num_examples=least, size_is_public=False)


def _shuffled(kind: Any, size: Sizing) -> Sampler:
  batch_size = whole_batch_size(size.sampling_prob, size.num_examples)
  is_proved = size.neighboring_relation in kind.relations
  # Under other relations nothing is proved, so the size of the data stays private.
  return kind(batch_size, size.num_examples if is_proved else None)


def _cyclic(kind: Any, size: Sizing) -> Sampler:
  steps = steps_per_pass(size.sampling_prob)
  if steps > size.num_examples:
    raise UserError(
      f"its pass of {steps} steps must be of at most {size.num_examples}, one for "
      f"each {size.unit}; a larger batch makes it shorter",
      field="sampler",
      value=kind.name,
    )
  return kind(steps_per_pass=steps, num_examples=size.num_examples)


def _balls_in_bins(kind: Any, size: Sizing) -> Sampler:
  return kind(num_bins=steps_per_pass(size.sampling_prob), capacity=size.padded_batch_size)


def _check_apart(size: Sizing) -> int:
  """Returns `size.apart`; raises UserError if examples would take part more often."""
  apart = size.apart
  if size.sampling_prob * apart > 1 + 1e-9:
    raise UserError(
      f"must be <= {1 / apart:.6g} where an example takes part at most every {apart} steps",
      field="sampling_prob",
      value=size.sampling_prob,
    )
  return apart


def _cyclic_poisson(kind: Any, size: Sizing) -> Sampler:
  apart = _check_apart(size)
  return kind(turn_prob=size.turn_prob, num_groups=apart, capacity=size.padded_batch_size)


def _min_sep(kind: Any, size: Sizing) -> Sampler:
  apart, q = _check_apart(size), size.sampling_prob
  return kind(
    # It solves q = turn_prob / (1 + (apart - 1) turn_prob). Rounding may put 1 - (apart - 1) q
    # below q. Then the quotient would be above 1.
    turn_prob=min(1.0, q / max(1 - (apart - 1) * q, q)),
    steps_apart=apart,
    num_steps=size.num_steps,
    capacity=size.padded_batch_size,
  )


_EXAMPLES, _CORRELATED = ("examples",), ("correlated noise",)
SCHEMES: dict[str, Scheme] = {
  "poisson": Scheme(
    "poisson:PoissonSampler", _poisson, ("examples", "clients"), ("capacity",), "exact"
  ),
  "random_allocation": Scheme(
    "random_allocation:RandomAllocationSampler",
    _in_one_step_of_each_pass,
    _EXAMPLES,
    ("capacity",),
    "exact",
    in_passes=True,
  ),
  "k_out_of_t": Scheme(
    "k_out_of_t:KOutOfTSampler",
    _in_k_steps_of_each_pass,
    _EXAMPLES,
    ("capacity", "num_selected"),
    "exact",
    in_passes=True,
  ),
  "truncated_poisson": Scheme(
    "truncated_poisson:TruncatedPoissonSampler",
    _truncated,
    _EXAMPLES,
    ("capacity",),
    "exact",
  ),
  "fixed_size": Scheme(
    "fixed_size:FixedSizeSampler", _fixed_size, ("examples", "clients"), (), "exact"
  ),
  "with_replacement": Scheme(
    "with_replacement:WithReplacementSampler", _fixed_size, _EXAMPLES, (), "exact"
  ),
  "shuffled": Scheme(
    "shuffled:ShuffledSampler", _shuffled, _EXAMPLES, relation_is_named=True
  ),
  "cyclic": Scheme("cyclic:CyclicSampler", _cyclic, _CORRELATED, in_passes=True),
  "cyclic_poisson": Scheme(
    "cyclic_poisson:CyclicPoissonSampler",
    _cyclic_poisson,
    _CORRELATED,
    ("capacity", "steps_apart"),
  ),
  "balls_in_bins": Scheme(
    "balls_in_bins:BallsInBinsSampler",
    _balls_in_bins,
    _CORRELATED,
    ("capacity",),
    "simulated",
    in_passes=True,
  ),
  "min_sep": Scheme(
    "min_sep:MinSepSampler",
    _min_sep,
    _CORRELATED,
    ("capacity", "steps_apart"),
    "simulated",
  ),
  "bounded_contribution": Scheme("bounded_contribution:BoundedContributionSampler", None),
}


def scheme_of(kind: type) -> Scheme | None:
  """Returns the row of a class or of the nearest class that it derives from; None without one."""
  for base in kind.__mro__:
    scheme = SCHEMES.get(str(vars(base).get("name")))
    if scheme is not None and scheme.kind is base:
      return scheme
  return None


def used_for(purpose: str) -> dict[str, Scheme]:
  """Returns name -> row of the samplers for a purpose, one of `Scheme.used_for`.

  >>> list(used_for("clients"))
  ['poisson', 'fixed_size']
  """
  return {name: row for name, row in SCHEMES.items() if purpose in row.used_for}


def names_answered(how: str) -> tuple[str, ...]:
  """Returns the names of the samplers whose epsilon `launch.account` computes in the way `how`.

  >>> names_answered("simulated")
  ('balls_in_bins', 'min_sep')
  """
  return tuple(name for name, row in SCHEMES.items() if row.answers == how)
