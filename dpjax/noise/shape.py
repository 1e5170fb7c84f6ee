"""How the noise of a run differs by step and by group: `NoiseShape`, for transforms and plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from dpjax import validate
from dpjax.validate import UserError

if TYPE_CHECKING:
  from dpjax.noise.correlated import Correlation

# Largest number of noise levels of a sampled run with accountant='pld'. Each level needs one more
# privacy loss distribution (PLD).
MAX_NOISE_LEVELS = 32
# Members of a strategy that its cost follows from; `init` starts its noise.
_MEMBERS = ("bands", "toeplitz", "multiply", "init")
# Largest quotient of two factors of a schedule of correlated noise. Noise of earlier steps comes
# back in later ones, and in floats of its size a gradient is rounded: above 2^20 times the noise
# that protects it, it could become visibly longer.
_MAX_QUOTIENT = 1000.0


@dataclasses.dataclass(frozen=True)
class NoiseShape:
  """Properties of noise other than its level. By default noise is independent and equal everywhere.

  Args:
    schedule: public factors of the noise multiplier, one for each step; () for 1 at every step.
    correlation: a strategy of `dpjax.noise.correlated` (DP-FTRL); None for noise that is
      independent from step to step.
    shares: each group's share of the privacy budget, a tree like the clip norms; None for equal
      noise. Shares do not change the privacy cost (see `transforms/group_noise.py`).

  >>> NoiseShape().by_step, NoiseShape(schedule=(2.0, 1.0)).by_step
  (False, True)
  """

  schedule: tuple[float, ...] = ()
  correlation: Correlation | None = None
  shares: Any = None

  def __post_init__(self):
    object.__setattr__(self, "schedule", validate.several(schedule=self.schedule))
    # A dict of the caller's may change later, and transforms would differ from their plan.
    object.__setattr__(self, "shares", jax.tree.map(lambda share: share, self.shares))
    # Without `bands`, noise of several bands would count as white.
    for name in _MEMBERS:
      if self.correlation is not None and not hasattr(self.correlation, name):
        raise UserError(
          f"must be a strategy, which has {name}, or None",
          field="correlation",
          value=self.correlation,
        )
    validate.factors(schedule=self.schedule)
    if self.has_bands and self.schedule:
      quotient = max(self.schedule) / min(self.schedule)
      if quotient > _MAX_QUOTIENT:
        raise UserError(
          f"holds factors whose quotient is {quotient:g}, must be <= {_MAX_QUOTIENT:g} for "
          "correlated noise, in which the largest comes back at the smallest",
          field="noise_schedule",
        )

  @property
  def by_step(self) -> bool:
    """Returns whether a step's noise depends on the step, or on other steps."""
    return self.correlation is not None or bool(self.schedule)

  @property
  def strategy(self) -> Correlation:
    """Returns the correlation; `Independent()` if there is none."""
    # White noise alone imports no strategies.
    from dpjax.noise.correlated import Independent

    return self.correlation or Independent()

  @property
  def has_bands(self) -> bool:
    """Returns whether the noise of a step also comes back in later ones."""
    return self.correlation is not None and self.correlation.bands != 1

  def check_steps(self, num_steps: int) -> None:
    """Raises UserError unless the schedule is empty or has one factor for each step."""
    if len(self.schedule) not in (0, num_steps):
      raise UserError(
        f"has {len(self.schedule)} factors, must have num_steps={num_steps}",
        field="noise_schedule",
      )


def check_levels(
  factors: Sequence[float], accountant: str, *, name: str = "noise_schedule"
) -> None:
  """Raises UserError for too many noise levels if `accountant` is "pld": each needs a PLD.

  Args:
    factors: those of a schedule, one for each step.
    name: their field in the message.
  """
  levels = len(set(factors))
  if levels > MAX_NOISE_LEVELS and accountant == "pld":
    raise UserError(
      f"has {levels} different factors; must have at most {MAX_NOISE_LEVELS} "
      "for accountant='pld' (each is one more privacy loss distribution), or use "
      "accountant='rdp'",
      field=name,
    )


WHITE = NoiseShape()
