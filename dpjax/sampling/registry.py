"""All samplers of dpjax: a row for each says where a config may name it, and what it reads.

A sampler says who takes part in a step, which event a step is, and how the numbers of a run, such
as a sampling probability and the size of the data, make its fields (`Sampler.sized`).

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
from typing import NamedTuple

from dpjax import validate
from dpjax.sampling.samplers import Sampler
from dpjax.validate import UserError

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
  """A sampler, where a config may name it, and which numbers of a run decide its size.

  Attributes:
    sampler: class of the sampler, or "module:Name" in this package.
    used_for: "examples" of central training; "clients" of a federated run; or "correlated noise",
      for which a sampler must declare how far apart an example's steps are.
    numbers: config fields that it reads: "capacity", "steps_apart" or "num_selected".
    answers: way in which `launch.account` computes epsilon: "exact" for that of the accountants,
      "simulated" for one that is shown beside proved ones; "" for none.
    in_passes: whether a pass must be a whole number of steps.
    relation_is_named: whether a run must name its neighbouring relation to have a proof.
  """

  sampler: str | type[Sampler]
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
    if "batch_size" in getattr(self.kind, "__dataclass_fields__", {}):
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


def check_apart(size: Sizing) -> int:
  """Returns `size.apart`; raises UserError if examples would take part more often."""
  apart = size.apart
  if size.sampling_prob * apart > 1 + 1e-9:
    raise UserError(
      f"must be <= {1 / apart:.6g} where an example takes part at most every {apart} steps",
      field="sampling_prob",
      value=size.sampling_prob,
    )
  return apart


# --- all samplers

_EXAMPLES, _CORRELATED = ("examples",), ("correlated noise",)
SCHEMES: dict[str, Scheme] = {
  "poisson": Scheme(
    "poisson:PoissonSampler", ("examples", "clients"), ("capacity",), "exact"
  ),
  "random_allocation": Scheme(
    "random_allocation:RandomAllocationSampler",
    _EXAMPLES,
    ("capacity",),
    "exact",
    in_passes=True,
  ),
  "k_out_of_t": Scheme(
    "k_out_of_t:KOutOfTSampler",
    _EXAMPLES,
    ("capacity", "num_selected"),
    "exact",
    in_passes=True,
  ),
  "truncated_poisson": Scheme(
    "truncated_poisson:TruncatedPoissonSampler",
    _EXAMPLES,
    ("capacity",),
    "exact",
  ),
  "fixed_size": Scheme("fixed_size:FixedSizeSampler", ("examples", "clients"), (), "exact"),
  "with_replacement": Scheme(
    "with_replacement:WithReplacementSampler", _EXAMPLES, (), "exact"
  ),
  "shuffled": Scheme("shuffled:ShuffledSampler", _EXAMPLES, relation_is_named=True),
  "cyclic": Scheme("cyclic:CyclicSampler", _CORRELATED, in_passes=True),
  "cyclic_poisson": Scheme(
    "cyclic_poisson:CyclicPoissonSampler",
    _CORRELATED,
    ("capacity", "steps_apart"),
  ),
  "balls_in_bins": Scheme(
    "balls_in_bins:BallsInBinsSampler",
    _CORRELATED,
    ("capacity",),
    "simulated",
    in_passes=True,
  ),
  "min_sep": Scheme(
    "min_sep:MinSepSampler",
    _CORRELATED,
    ("capacity", "steps_apart"),
    "simulated",
  ),
  "bounded_contribution": Scheme("bounded_contribution:BoundedContributionSampler"),
}


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
