"""Toeplitz strategies: C with a few bands, or as a sum of a few decaying exponentials.

The first column of C never rises. Then the noise C^{-1} z stays near the size of z: with falling
c_t, 1 / (c(x) (1 - x)) = 1 / (1 - sum_j (c_(j-1) - c_j) x^j) is a renewal sequence, so its
coefficients are in [0, 1], and those of 1 / c(x), their differences, in [-1, 1]. Where a column
rises, as in 1, 2, noise may double in every step. After 18 steps floats of that size have no digits
left for a gradient: each of its numbers is rounded up or down to a multiple of 2^-5, and may become
twice as long, although z, which protects it, has the size that was accounted for.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import signal

from dpjax import trees, validate
from dpjax.noise.correlated import series
from dpjax.noise.correlated.strategies import Correlation, subtract, weighted_sum, zeros
from dpjax.types import ArrayTree
from dpjax.validate import UserError

# Largest number of bands. Each band but the first needs memory as large as the parameters.
_MOST_BANDS = 10**6
_MOST_BUFFERS = 64


def _round(name: str, values: Any) -> tuple[float, ...]:
  """Rounds numbers to float32, so that the C of the accounting is the C of the noise."""
  values = tuple(values)
  validate.non_negative(**validate.entries(**{name: values}))
  return tuple(float(np.float32(value)) for value in values)


def _times(coefficients: np.ndarray, x: np.ndarray) -> np.ndarray:
  """Multiplies the Toeplitz matrix with first column `coefficients` by x [n, ...], in float64."""
  x = np.asarray(x, np.float64)
  column = coefficients[: len(x)].reshape((-1,) + (1,) * (x.ndim - 1))
  # A filter takes rows times bands operations. For many bands the FFT takes fewer.
  if column.size <= 64:
    return np.asarray(signal.lfilter(column.ravel(), [1.0], x, axis=0))
  return signal.fftconvolve(x, column, axes=0)[: len(x)]


class BandState(NamedTuple):
  """The last bands - 1 rows, or white draws, in a ring buffer."""

  draws: jax.Array  # int32, rows done
  rows: Any  # leaves [bands - 1, ...]


def filter_bands(
  coefficients: tuple[float, ...], white: ArrayTree, state: BandState, *, keep: str
) -> tuple[Any, BandState]:
  """Computes y_t = z_t + sum_j c[j - 1] x_{t-j}. x is y for keep="row", and z for keep="white"."""
  buffers = len(coefficients)
  if not buffers:
    return white, BandState(state.draws + 1, state.rows)
  # Age of the entry at each place of the ring, 0 for the newest entry.
  age = (state.draws - 1 - jnp.arange(buffers)) % buffers
  row = trees.add(white, weighted_sum(jnp.asarray(coefficients)[age], state.rows))
  slot = state.draws % buffers
  put = lambda rows, new: jax.lax.dynamic_update_index_in_dim(
    rows, new.astype(rows.dtype), slot, 0
  )
  kept = white if keep == "white" else row
  return row, BandState(state.draws + 1, jax.tree.map(put, state.rows, kept))


@dataclasses.dataclass(frozen=True)
class BandedToeplitz:
  """Strategy with banded C: C[i, j] = coefficients[i - j] for 0 <= i - j < bands, else 0.

  This is banded matrix factorisation (Choquette-Choo et al. 2023, arXiv:2306.08153; McKenna 2024,
  arXiv:2405.15913). The state holds bands - 1 rows of noise, each as large as the parameters.

  Args:
    coefficients: first column of C. The first is 1, and none is negative. They are rounded to
      float32, in which the noise is computed. `optimized` chooses them.

  Raises:
    UserError: a negative coefficient (the sensitivity would not be exact), one that is larger than
      the one before it (the noise could grow without bound), or a first one other than 1.

  >>> from dpjax.noise.correlated import matrix
  >>> matrix(BandedToeplitz((1.0, 0.5)), 3)
  array([[1. , 0. , 0. ],
         [0.5, 1. , 0. ],
         [0. , 0.5, 1. ]])
  """

  coefficients: tuple[float, ...]

  def __post_init__(self):
    values = _round("coefficients", self.coefficients)
    if not values or values[0] != 1:
      raise UserError("the first must be 1", field="coefficients", value=values[:1])
    for place in range(1, len(values)):
      if values[place] > values[place - 1]:
        raise UserError(
          f"must be at most the one before it, {values[place - 1]:g}, or noise grows from step "
          "to step until gradients are rounded to its digits",
          field=f"coefficients[{place}]",
          value=values[place],
        )
    object.__setattr__(self, "coefficients", values)

  @classmethod
  @functools.lru_cache(maxsize=32)
  def optimized(
    cls, *, num_steps: int, bands: int, objective: str = "mean"
  ) -> BandedToeplitz:
    """Returns the strategy with the least error on prefix sums at equal privacy.

    Args:
      num_steps: number of steps of the run.
      bands: number of diagonals. It should be at most the distance between two participations of an
        example. Otherwise columns overlap, and the cost is larger than the search assumed.
      objective: "mean" or "max" squared error over the prefixes.

    >>> BandedToeplitz.optimized(num_steps=100, bands=2).bands
    2
    """
    validate.integer_at_least(1, num_steps=num_steps, bands=bands)
    validate.one_of(series.OBJECTIVES, objective=objective)
    return cls(tuple(series.optimized_bands(num_steps, min(bands, num_steps), objective)))

  @property
  def bands(self) -> int:
    return len(self.coefficients)

  @property
  def toeplitz(self) -> bool:
    return True

  @property
  def buffers(self) -> int:
    return self.bands - 1

  def multiply(self, x: np.ndarray) -> np.ndarray:
    """Computes C x for x [n, ...], in float64."""
    return _times(np.array(self.coefficients), x)

  def init(self, like: ArrayTree) -> BandState:
    """Returns the first state, with an empty ring of rows."""
    return BandState(jnp.zeros((), jnp.int32), zeros(like, self.buffers))

  def next(self, white: ArrayTree, state: BandState) -> tuple[Any, BandState]:
    """Computes y_t = z_t - sum_j c_j y_{t-j}."""
    minus = tuple(-value for value in self.coefficients[1:])
    return filter_bands(minus, white, state, keep="row")


@dataclasses.dataclass(frozen=True)
class BufferedToeplitz:
  """Strategy with C[i, j] = sum_b scales[b] * decays[b]^(i - j - 1) below a unit diagonal.

  This is buffered linear Toeplitz, BLT (Dvijotham et al. 2024, arXiv:2404.16706; McMahan et al.
  2024). The state holds the buffers, each as large as the parameters.

  Args:
    scales: number >= 0 for each buffer, rounded to float32, with a sum of at most 1; see
      `BufferedToeplitz.optimized`.
    decays: number in [0, 1] for each buffer, rounded to float32.

  >>> from dpjax.noise.correlated import matrix
  >>> matrix(BufferedToeplitz((0.5,), (0.5,)), 3)
  array([[1.  , 0.  , 0.  ],
         [0.5 , 1.  , 0.  ],
         [0.25, 0.5 , 1.  ]])
  """

  scales: tuple[float, ...]
  decays: tuple[float, ...]

  def __post_init__(self):
    object.__setattr__(self, "scales", _round("scales", self.scales))
    object.__setattr__(self, "decays", _round("decays", self.decays))
    if len(self.scales) != len(self.decays) or not self.scales:
      raise UserError(
        "must be as many as scales, at least one", field="decays", value=self.decays
      )
    if max(self.decays) > 1:
      raise UserError("must be at most 1", field="decays", value=self.decays)
    # Rounding to float32 may lift a sum of 1.
    if sum(self.scales) > 1 + 1e-6:
      raise UserError(
        "must have a sum of at most 1, or noise grows from step to step until gradients are "
        "rounded to its digits",
        field="scales",
        value=self.scales,
      )

  @classmethod
  @functools.lru_cache(maxsize=32)
  def optimized(
    cls,
    *,
    num_steps: int,
    buffers: int,
    steps_apart: int,
    max_participations: int | None = None,
    objective: str = "mean",
  ) -> BufferedToeplitz:
    """Returns the strategy with the least error on prefix sums at equal privacy.

    Args:
      num_steps: number of steps of the run.
      buffers: number of buffers.
      steps_apart: smallest distance between two steps of an example.
      max_participations: largest number of steps of an example; None for no other limit.
      objective: "mean" or "max" squared error over the prefixes.

    >>> BufferedToeplitz.optimized(num_steps=50, buffers=2, steps_apart=10).buffers
    2
    """
    validate.integer_at_least(
      1, num_steps=num_steps, buffers=buffers, steps_apart=steps_apart
    )
    validate.one_of(series.OBJECTIVES, objective=objective)
    # More than `times` participations do not fit into the run.
    times = -(-num_steps // steps_apart)
    if max_participations is not None:
      validate.integer_at_least(1, max_participations=max_participations)
      times = min(times, max_participations)
    fitted_values = series.optimized_buffers(
      num_steps, buffers, steps_apart, times, objective
    )
    return cls(*(tuple(values) for values in fitted_values))

  @property
  def bands(self) -> None:
    return None

  @property
  def toeplitz(self) -> bool:
    return True

  @property
  def buffers(self) -> int:
    return len(self.scales)

  def multiply(self, x: np.ndarray) -> np.ndarray:
    """Computes C x for x [n, ...], in float64."""
    scales = np.array(self.scales)
    decays = np.array(self.decays)
    return _times(series.buffered_coefficients(scales, decays, len(x)), x)

  def init(self, like: ArrayTree) -> Any:
    """Returns the first state, in which all buffers are zero: leaves [buffers, ...]."""
    return zeros(like, self.buffers)

  def next(self, white: ArrayTree, state: ArrayTree) -> tuple[Any, Any]:
    """Computes y_t = z_t - sum_b scales[b] s_b, then s_b <- decays[b] s_b + y_t."""
    row = subtract(white, weighted_sum(jnp.asarray(self.scales), state))

    def decayed(held, new):
      rates = jnp.asarray(self.decays, held.dtype).reshape((-1,) + (1,) * new.ndim)
      return rates * held + trees.at_least_float32(new).astype(held.dtype)[None]

    return row, jax.tree.map(decayed, state, row)


@dataclasses.dataclass(frozen=True)
class Banded:
  """Strategy `BandedToeplitz.optimized`; `bands` None takes `steps_apart` bands.

  >>> Banded().make(num_steps=10, steps_apart=2).bands
  2
  """

  bands: int | None = None
  objective: str = "mean"  # mean | max squared error of the prefix sums

  def __post_init__(self):
    validate.integer_in(1, _MOST_BANDS, bands=1 if self.bands is None else self.bands)
    validate.one_of(series.OBJECTIVES, objective=self.objective)

  def make(self, num_steps: int, steps_apart: int) -> Correlation:
    """Returns the strategy for a run in which steps of an example are `steps_apart` or more."""
    return BandedToeplitz.optimized(
      num_steps=num_steps, bands=self.bands or steps_apart, objective=self.objective
    )


@dataclasses.dataclass(frozen=True)
class Buffered:
  """Strategy `BufferedToeplitz.optimized` with a number of `buffers` that a config sets."""

  buffers: int = 4
  objective: str = "mean"  # mean | max squared error of the prefix sums

  def __post_init__(self):
    validate.integer_in(1, _MOST_BUFFERS, buffers=self.buffers)
    validate.one_of(series.OBJECTIVES, objective=self.objective)

  def make(self, num_steps: int, steps_apart: int) -> Correlation:
    """Returns the strategy for a run in which steps of an example are `steps_apart` or more."""
    return BufferedToeplitz.optimized(
      num_steps=num_steps,
      buffers=self.buffers,
      steps_apart=steps_apart,
      objective=self.objective,
    )
