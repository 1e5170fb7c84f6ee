"""Strategies by name, with the numbers that a person sets. The matrix is made when the run is
known: its steps, and the least number of steps between two participations of one example.
"""

from __future__ import annotations

import dataclasses

from dpjax import validate
from dpjax.noise.correlated import series
from dpjax.noise.correlated.strategies import Correlation, Independent, Tree
from dpjax.noise.correlated.toeplitz import BandedToeplitz, BufferedToeplitz

# Each band is a copy of the parameters.
_MOST_BANDS = 10**6
_MOST_BUFFERS = 64


@dataclasses.dataclass(frozen=True)
class White:
  """`Independent`: no correlation."""

  def make(self, num_steps: int, min_sep: int) -> Correlation:
    """The strategy of a run."""
    return Independent()


@dataclasses.dataclass(frozen=True)
class Banded:
  """`BandedToeplitz.optimized`; without a number of bands, with `min_sep` of them.

  >>> Banded().make(num_steps=10, min_sep=2).bands
  2
  """

  bands: int | None = None
  objective: str = "mean"  # mean | max squared error of the prefix sums

  def __post_init__(self):
    validate.integer_in(1, _MOST_BANDS, bands=1 if self.bands is None else self.bands)
    validate.one_of(series.OBJECTIVES, objective=self.objective)

  def make(self, num_steps: int, min_sep: int) -> Correlation:
    """The strategy of a run."""
    return BandedToeplitz.optimized(
      num_steps=num_steps, bands=self.bands or min_sep, objective=self.objective
    )


@dataclasses.dataclass(frozen=True)
class Buffered:
  """`BufferedToeplitz.optimized`."""

  buffers: int = 4
  objective: str = "mean"  # mean | max squared error of the prefix sums

  def __post_init__(self):
    validate.integer_in(1, _MOST_BUFFERS, buffers=self.buffers)
    validate.one_of(series.OBJECTIVES, objective=self.objective)

  def make(self, num_steps: int, min_sep: int) -> Correlation:
    """The strategy of a run."""
    return BufferedToeplitz.optimized(
      num_steps=num_steps, buffers=self.buffers, min_sep=min_sep, objective=self.objective
    )


@dataclasses.dataclass(frozen=True)
class Trees:
  """`Tree`; without `restart_every`, a new one every `min_sep` steps."""

  restart_every: int | None = None

  def __post_init__(self):
    if self.restart_every is not None:
      validate.integer_at_least(1, restart_every=self.restart_every)

  def make(self, num_steps: int, min_sep: int) -> Correlation:
    """The strategy of a run."""
    return Tree(restart_every=self.restart_every or min_sep)


Strategy = White | Banded | Buffered | Trees
STRATEGIES: dict[str, type[Strategy]] = {
  "banded": Banded,
  "blt": Buffered,
  "tree": Trees,
  "identity": White,
}
