"""Strategies with banded C^{-1}: each step's noise is a sum of several white draws.

The noise is y_t = z_t - p_1 z_(t-1) - .. - p_k z_(t-k). No p_j is negative, and their sum is at
most 1. A white draw is a function of key and step, so earlier draws can be drawn again, and then
none is kept.

C itself has no band: its coefficients are c_0 = 1 and c_t = p_1 c_(t-1) + .. + p_k c_(t-k). Two
facts make its sensitivity exact (`dpjax.accounting.matrix.participation_costs`):

1. No c_t is negative, for it is a sum of products that are not negative.
2. If c_0 .. c_k fall, all c_t fall. For t > k, c_t - c_(t-1) = sum_j p_j (c_(t-j) -
   c_(t-j-1)), a sum of terms that are not positive, by induction.

By fact 1, examples whose steps are cyclic are accounted exactly. By fact 2, so are examples whose
steps are at least b apart (Kalinin and Lampert 2024, arXiv:2405.13763, theorem 2). No amplification
by sampling is proved: columns of C never end, so all steps of an example share rows, and
`accounting.matrix.amplified_costs` refuses such a C. Sampling by balls in bins has a proof that
needs no band (`accounting.balls_in_bins_proved`).
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize, signal

from dpjax import trees, validate
from dpjax.noise.correlated import series
from dpjax.noise.correlated.strategies import Correlation, Redrawn, zeros
from dpjax.noise.correlated.toeplitz import BandState, filter_bands
from dpjax.parallel import made_for
from dpjax.types import ArrayTree
from dpjax.validate import UserError

# Largest number of bands. Each costs one more draw in every step, or memory for one more draw.
_MOST_BANDS = 4096
# Largest total size of earlier noise that is kept by default. Up to this size, keeping noise is
# cheaper than drawing it again.
_KEPT_BYTES = 2**26
# Largest number of draws, bands times leaves, that are unrolled on an accelerator. Each takes .2 s
# to compile.
_UNROLLED = 128
# Numbers of bands that `Bisr` tries if none is given: powers of two.
_TRIED = tuple(2**power for power in range(1, 7))
# Smallest factor in the search of `optimized_inverse`, which divides by factors.
_LEAST_FACTOR = 1e-9


@dataclasses.dataclass(frozen=True)
class InverseBanded:
  """Strategy with banded C^{-1}: C^{-1}[i, j] = coefficients[i - j] in the band, else 0.

  This is banded inverse matrix factorisation (Kalinin et al. 2025, arXiv:2505.12128).

  Args:
    coefficients: first column of C^{-1}. The first is 1, the others are in [-1, 0], and the sum of
      all is not negative. They are rounded to float32, in which the noise is computed.
    redraw: whether white noise of earlier steps is drawn again. True needs no memory, but one draw
      for each coefficient in every step. False keeps earlier noise, as large as the parameters, for
      each coefficient but the first. None keeps this noise if it takes 64 MB or less.

  `redraw` does not change the distribution. For the same white noise, results differ by rounding.

  Raises:
    UserError: other coefficients. A positive one could make entries of C negative, and the
      sensitivity would not be exact; with a negative sum C would grow without bound.

  >>> from dpjax.noise.correlated import matrix
  >>> matrix(InverseBanded((1.0, -0.5)), 3)
  array([[1.  , 0.  , 0.  ],
         [0.5 , 1.  , 0.  ],
         [0.25, 0.5 , 1.  ]])
  """

  coefficients: tuple[float, ...]
  redraw: bool | None = None

  def __post_init__(self):
    coefficients = validate.several(coefficients=self.coefficients)
    validate.integer_in(1, _MOST_BANDS, number_of_coefficients=len(coefficients))
    for place, value in enumerate(coefficients[1:], start=1):
      validate.number_in(-1, 0, **{f"coefficients[{place}]": value})
    if coefficients[0] != 1:
      raise UserError("the first must be 1", field="coefficients", value=coefficients[:1])
    if self.redraw not in (True, False, None):
      raise UserError("must be True, False or None", field="redraw", value=self.redraw)
    # Adding 0 turns -0 into 0: both give one strategy, which must have one mark.
    values = tuple(float(np.float32(value)) + 0.0 for value in coefficients)
    if sum(values) < 0:
      raise UserError("must have a sum >= 0", field="coefficients", value=values)
    object.__setattr__(self, "coefficients", values)

  @classmethod
  def square_root(cls, bands: int, *, redraw: bool | None = None) -> InverseBanded:
    """Returns the banded inverse square root, BISR: the first coefficients of (1 - x)^{1/2}.

    >>> InverseBanded.square_root(3).coefficients
    (1.0, -0.5, -0.125)
    """
    validate.integer_in(1, _MOST_BANDS, bands=bands)
    # (1 - x)^{1/2} = (1 - x) (1 - x)^{-1/2}. So after the first, coefficients are differences of
    # falling numbers, and none is positive.
    root = series.square_root(bands)
    return cls(tuple(np.diff(root, prepend=0.0)), redraw)

  @classmethod
  def fractional_root(
    cls, bands: int, gamma: float, *, redraw: bool | None = None
  ) -> InverseBanded:
    """Returns the banded inverse fractional root, gamma-BIFR (Kalinin et al. 2026,
    arXiv:2605.18379).

    Its coefficients are the first `bands` of (1 - x)^gamma. gamma = 0 is white noise and
    gamma = 1/2 is `square_root`. Two bands are DP-lambda-CGD with lambda = gamma. The first
    `bands` coefficients of C are those of (1 - x)^{-gamma}, which fall.

    >>> InverseBanded.fractional_root(3, 0.75).coefficients
    (1.0, -0.75, -0.09375)
    """
    validate.integer_in(1, _MOST_BANDS, bands=bands)
    validate.share(gamma=gamma)
    lags = np.arange(1, bands)
    ratios = (lags - 1 - gamma) / lags
    return cls((1.0, *np.cumprod(ratios)), redraw)

  @classmethod
  @functools.lru_cache(maxsize=32)
  def optimized(
    cls,
    *,
    num_steps: int,
    bands: int,
    steps_apart: int,
    max_participations: int | None = None,
    objective: str = "mean",
    redraw: bool | None = None,
  ) -> InverseBanded:
    """Returns the strategy with the least error on prefix sums at equal privacy: BandInvMF.

    Args:
      num_steps: number of steps of the run.
      bands: number of coefficients. If noise is redrawn, each needs a white draw in every step.
      steps_apart: smallest distance between two steps of an example.
      max_participations: largest number of steps of an example; None for no other limit.
      objective: "mean" or "max" squared error over the prefixes.
      redraw: as for the class.

    >>> best = InverseBanded.optimized(num_steps=100, bands=2, steps_apart=10)
    >>> [round(value, 1) for value in best.coefficients]
    [1.0, -0.8]
    """
    validate.integer_at_least(1, num_steps=num_steps, steps_apart=steps_apart)
    validate.integer_in(1, _MOST_BANDS, bands=bands)
    validate.one_of(series.OBJECTIVES, objective=objective)
    times = _participations(num_steps, steps_apart)
    if max_participations is not None:
      validate.integer_at_least(1, max_participations=max_participations)
      times = min(times, max_participations)
    run = _Run(num_steps, steps_apart, times, objective)
    return cls(tuple(optimized_inverse(run, min(bands, num_steps))), redraw)

  @property
  def bands(self) -> int | None:
    """Returns 1 if C is the identity; else None, as C is then a full triangular matrix."""
    return 1 if not any(self.coefficients[1:]) else None

  @property
  def toeplitz(self) -> bool:
    return True

  @property
  def buffers(self) -> int:
    """Returns the largest number of earlier draws, each as large as the parameters, that are kept.

    It is 0 if `redraw` is True.
    """
    return 0 if self.redraw else len(self.coefficients) - 1

  def multiply(self, x: np.ndarray) -> np.ndarray:
    """Computes C x for x [n, ...], in float64.

    If x >= 0, the recurrence only adds, so no digits cancel."""
    x = np.asarray(x, np.float64)
    return np.asarray(signal.lfilter([1.0], self.coefficients, x, axis=0))

  def init(self, like: ArrayTree) -> BandState | Redrawn:
    """Returns the first state: an empty ring of earlier white noise, or a `Redrawn`."""
    redraw = self.redraw
    if redraw is None:
      redraw = 4 * self.buffers * trees.size(like) > _KEPT_BYTES
    if redraw:
      return Redrawn(self._mark(like))
    return BandState(jnp.zeros((), jnp.int32), zeros(like, self.buffers))

  def next(self, white: ArrayTree, state: BandState) -> tuple[Any, BandState]:
    """Computes y_t = z_t - sum_j p_j z_{t-j}, from stored white noise."""
    return filter_bands(self.coefficients[1:], white, state, keep="white")

  def redrawn(
    self,
    white: Callable[[jax.Array], ArrayTree],
    draws: jax.Array,
    memory: Redrawn,
    onto: ArrayTree,
  ) -> Any:
    """Computes `onto` + y_t, where y_t is as in `next`, from white noise that is drawn again.

    Args:
      white: function from a step to the white noise of the step.
      draws: number t of the step, int32.
      memory: state that `init` returned.
      onto: tree to which the noise is added, one draw after the other.

    Raises:
      UserError: a state of other coefficients or shapes, whose earlier noise was different (NaN if
        it is traced).
    """
    bands = len(self.coefficients)
    weights = jnp.asarray(self.coefficients, jnp.float32)

    def changed() -> UserError:
      return UserError(
        "belongs to another strategy or to parameters of other shapes: noise of earlier steps "
        "would be drawn again as it was not; give each update the state that the one before gave",
        field="state.memory",
      )

    # Under jit a wrong state makes the start NaN, and so the whole sum.
    start = trees.only_where(memory.mark == self._mark(onto), onto, changed)

    def with_draw(age: jax.Array, factor: jax.Array, total: ArrayTree) -> Any:
      new = white(draws - age)
      return jax.tree.map(lambda held, z: held + factor.astype(z.dtype) * z, total, new)

    if made_for.platform() != "cpu":
      many = bands * len(jax.tree.leaves(onto)) > _UNROLLED

      def add_always(place: jax.Array | int, total: ArrayTree) -> Any:
        # Steps before the first have no noise, so a draw in their place is multiplied by 0. A
        # branch would make a GPU wait for the host.
        age = jnp.int32(bands - 1) - place
        past = jnp.minimum(age, draws)
        return with_draw(past, jnp.where(age <= draws, weights[age], 0), total)

      if many:
        return jax.lax.fori_loop(0, bands, add_always, start)
      # The loop is unrolled, so that all draws become one fusion, which holds no draw in memory.
      total = start
      for place in range(bands):
        total = add_always(place, total)
      return total

    def add(place: jax.Array, total: ArrayTree) -> Any:
      # The newest draw is added last. Given the earlier draws, this addition is rounded like that
      # of white noise. A separate sum of all noise would need memory as large as the parameters.
      age = bands - 1 - place
      # The branch skips steps before the first, which have no noise. It also keeps XLA from moving
      # the counters of all random bits out of the loop, which would take 24 bytes per parameter.
      return jax.lax.cond(
        age <= draws,
        functools.partial(with_draw, age, weights[age]),
        lambda total: total,
        total,
      )

    # Draws are added in a loop, not in parallel, so that one draw is in memory at a time.
    return jax.lax.fori_loop(0, bands, add, start)

  def _mark(self, like: ArrayTree) -> jax.Array:
    """Returns 32 bits that identify the coefficients and the shapes of the draws, in order."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(like)]
    return jnp.uint32(zlib.crc32(repr((self.coefficients, shapes)).encode()))


# --- best coefficients


class _Run(NamedTuple):
  """Numbers on which error and sensitivity depend, besides the coefficients."""

  num_steps: int
  steps_apart: int
  times: int  # participations of one example, at most
  objective: str


def _participations(num_steps: int, steps_apart: int) -> int:
  """Returns the largest number of participations of an example in a run."""
  return -(-num_steps // steps_apart)


def inverse_loss(tail: np.ndarray, run: _Run) -> tuple[float, np.ndarray]:
  """Returns log(error of the prefix sums * squared sensitivity), and its gradient [k].

  Args:
    tail: p_1 .. p_k, for which the coefficients of C must fall.
    run: numbers of steps and participations, and the objective.

  >>> run = _Run(num_steps=4, steps_apart=2, times=2, objective="max")
  >>> loss, _ = inverse_loss(np.array([0.0]), run)
  >>> round(float(np.exp(loss)), 9)  # 4 steps of error 1, two participations
  8.0
  """
  weights = series.objective_weights(run.num_steps, run.objective)
  lags = np.arange(1, 1 + len(tail))
  # A sums prefixes. So the first column of A C^{-1} holds b_s = 1 - p_1 - .. - p_s.
  noise = np.ones(run.num_steps)
  noise[1:] -= np.cumsum(np.pad(tail, (0, run.num_steps))[: run.num_steps - 1])
  error = (weights * noise**2).sum()
  # p_j lowers every b_s from s = j on.
  pull = np.cumsum((weights * noise)[::-1])[::-1]
  by_error = -2 * np.pad(pull, (0, len(tail) + 1))[lags]
  comb = np.zeros(run.num_steps)
  comb[: run.steps_apart * run.times : run.steps_apart] = 1
  filters = np.concatenate([[1.0], -tail])
  image = np.asarray(signal.lfilter([1.0], filters, comb))
  norm = (image**2).sum()
  # image = comb / q(x) with q(x) = 1 - sum_j p_j x^j, so d image / d p_j = x^j image / q(x).
  slope = np.pad(signal.lfilter([1.0], filters, image), (len(tail), 0))
  ends = len(tail) - lags
  by_norm = 2 * np.array([image @ slope[end : end + run.num_steps] for end in ends])
  return float(np.log(error) + np.log(norm)), by_error / error + by_norm / norm


def falling_inverse(factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns a falling column c, and p_1, p_2, .. with 1 / c(x) = 1 - sum_j p_j x^j.

  c_t / c_(t-1) = 1 - g_t, where g_t is the product of factors[0] .. factors[t-1]. Factors in (0, 1]
  make these ratios rise, so c is log-convex, and then no p_j is negative (Kaluza 1928).

  Returns:
    The column c_0 .. c_k, and p_1 .. p_k, for k factors.

  >>> column, tail = falling_inverse(np.array([0.5, 0.5]))
  >>> column.tolist(), tail.tolist()
  ([1.0, 0.5, 0.375], [0.5, 0.125])
  """
  column = np.concatenate([[1.0], np.cumprod(1 - np.cumprod(factors))])
  impulse = np.zeros(len(column))
  impulse[0] = 1
  return column, -np.asarray(signal.lfilter([1.0], column, impulse))[1:]


def rounded_to_fall(tail: np.ndarray) -> np.ndarray:
  """Rounds p_1 .. p_k to float32, and lowers each that would make coefficients of C rise.

  Rounding to nearest could make nearly equal coefficients rise in the last digit.

  >>> rounded_to_fall(np.array([0.1, 0.5])).tolist()
  [0.10000000149011612, 0.08999999612569809]
  """
  rounded = np.zeros(len(tail))
  column = np.ones(len(tail) + 1)
  for place, value in enumerate(tail):
    # `before` is c_(place + 1) without its newest term. This term must not lift c_(place + 1) above
    # column[place].
    before = rounded[:place] @ column[place:0:-1]
    nearest = np.float32(min(value, column[place] - before))
    if before + nearest > column[place]:
      nearest = np.nextafter(nearest, np.float32(-1))
    rounded[place] = nearest
    column[place + 1] = before + rounded[place]
  return rounded


def optimized_inverse(run: _Run, bands: int) -> np.ndarray:
  """Returns the coefficients of C^{-1} with the least loss, over log-convex columns of C.

  The search doubles the number of bands in each round. A round starts from the result of the last
  round, continued with factors of the square root, whose column is log-convex.

  >>> optimized_inverse(_Run(64, 8, 8, "mean"), 1)
  array([1.])
  """
  if bands == 1:
    return np.ones(1)

  def loss(factors: np.ndarray) -> tuple[float, np.ndarray]:
    column, tail = falling_inverse(factors)
    value, by_tail = inverse_loss(tail, run)
    # p = 1 - 1 / c as a series, so d p_j / d c_i is coefficient j - i of 1 / c^2.
    inverse = np.concatenate([[1.0], -tail])
    square = np.convolve(inverse, inverse)[: len(column)]
    sizes = range(len(tail), 0, -1)
    by_column = np.array([square[:size] @ by_tail[-size:] for size in sizes])
    # c_t is a product of ratios 1 - g_s, and g_s is a product of factors. So the chain rule gives
    # sums from the end.
    gaps = np.cumprod(factors)
    by_ratio = np.cumsum((by_column * column[1:])[::-1])[::-1] / (1 - gaps)
    return value, np.cumsum((-by_ratio * gaps)[::-1])[::-1] / factors

  # The square root has g_t = 1/2, 1/4, 1/6, .., so its factors are 1/2, 1/2, 2/3, 3/4, ..
  start = np.arange(0, bands - 1) / np.arange(1, bands)
  start[0] = 0.5
  best = start[:1]
  while True:
    end = optimize.minimize(
      loss, best, jac=True, method="L-BFGS-B",
      bounds=[(_LEAST_FACTOR, 1 - _LEAST_FACTOR)] * len(best),
      options={"maxiter": 300, "ftol": 1e-11, "gtol": 1e-9},
    )  # fmt: skip
    best = end.x
    if len(best) == bands - 1:
      break
    best = np.concatenate([best, start[len(best) : 2 * len(best) + 1]])
  return np.concatenate([[1.0], -rounded_to_fall(falling_inverse(best)[1])])


# --- names for a config


def _loss_in(
  num_steps: int, steps_apart: int, objective: str
) -> Callable[[InverseBanded], float]:
  """Returns a function strategy -> `inverse_loss` in a run; `make` minimises this loss."""
  run = _Run(num_steps, steps_apart, _participations(num_steps, steps_apart), objective)
  return lambda strategy: inverse_loss(-np.array(strategy.coefficients[1:]), run)[0]


@dataclasses.dataclass(frozen=True)
class Bisr:
  """Strategy `InverseBanded.square_root`; `bands` None takes the best power of two in 2 .. 64.

  >>> Bisr(bands=4).make(num_steps=10, steps_apart=2).coefficients[:2]
  (1.0, -0.5)
  """

  bands: int | None = None
  objective: str = "mean"  # mean | max squared error of the prefix sums, to choose bands by
  redraw: bool | None = None  # draw earlier noise again; None: if it takes over 64 MB

  def __post_init__(self):
    validate.integer_in(1, _MOST_BANDS, bands=1 if self.bands is None else self.bands)
    validate.one_of(series.OBJECTIVES, objective=self.objective)

  def make(self, num_steps: int, steps_apart: int) -> Correlation:
    """Returns the strategy for a run in which steps of an example are `steps_apart` or more."""
    tried = (self.bands,) if self.bands else _TRIED
    strategies = [InverseBanded.square_root(bands, redraw=self.redraw) for bands in tried]
    return min(strategies, key=_loss_in(num_steps, steps_apart, self.objective))


@dataclasses.dataclass(frozen=True)
class Bifr:
  """Strategy `InverseBanded.fractional_root`; `gamma` None takes the best gamma for `objective`.

  >>> Bifr(bands=3, gamma=0.5).make(num_steps=10, steps_apart=2).coefficients
  (1.0, -0.5, -0.125)
  """

  bands: int = 4
  gamma: float | None = None
  objective: str = "mean"  # mean | max squared error of the prefix sums, to choose gamma by
  redraw: bool | None = None  # draw earlier noise again; None: if it takes over 64 MB

  def __post_init__(self):
    validate.integer_in(1, _MOST_BANDS, bands=self.bands)
    validate.share(gamma=0.0 if self.gamma is None else self.gamma)
    validate.one_of(series.OBJECTIVES, objective=self.objective)

  def make(self, num_steps: int, steps_apart: int) -> Correlation:
    """Returns the strategy for a run in which steps of an example are `steps_apart` or more."""
    loss = _loss_in(num_steps, steps_apart, self.objective)

    def strategy(gamma: float) -> InverseBanded:
      return InverseBanded.fractional_root(self.bands, gamma, redraw=self.redraw)

    if self.gamma is not None:
      return strategy(self.gamma)
    best = optimize.minimize_scalar(
      lambda gamma: loss(strategy(gamma)), bounds=(0, 1), method="bounded"
    )
    return strategy(float(best.x))


@dataclasses.dataclass(frozen=True)
class BandInvMf:
  """Strategy `InverseBanded.optimized`; if noise is redrawn, a step takes `bands` white draws.

  >>> len(BandInvMf(bands=3).make(num_steps=10, steps_apart=2).coefficients)
  3
  """

  bands: int = 4
  objective: str = "mean"  # mean | max squared error of the prefix sums
  redraw: bool | None = None  # draw earlier noise again; None: if it takes over 64 MB

  def __post_init__(self):
    validate.integer_in(1, _MOST_BANDS, bands=self.bands)
    validate.one_of(series.OBJECTIVES, objective=self.objective)

  def make(self, num_steps: int, steps_apart: int) -> Correlation:
    """Returns the strategy for a run in which steps of an example are `steps_apart` or more."""
    return InverseBanded.optimized(
      num_steps=num_steps,
      bands=self.bands,
      steps_apart=steps_apart,
      objective=self.objective,
      redraw=self.redraw,
    )


@dataclasses.dataclass(frozen=True)
class LambdaCgd:
  """Strategy with noise z_t - decay z_(t-1); `decay` None takes the best decay for `objective`.

  This is DP-lambda-CGD (Kalinin et al. 2026, arXiv:2601.22334), with `decay` as its lambda.

  >>> LambdaCgd(decay=0.5).make(num_steps=10, steps_apart=2).coefficients
  (1.0, -0.5)
  """

  decay: float | None = None
  objective: str = "mean"  # mean | max squared error of the prefix sums, to choose decay by
  redraw: bool | None = None  # draw earlier noise again; None: if it takes over 64 MB

  def __post_init__(self):
    validate.share(decay=0.0 if self.decay is None else self.decay)
    validate.one_of(series.OBJECTIVES, objective=self.objective)

  def make(self, num_steps: int, steps_apart: int) -> Correlation:
    """Returns the strategy for a run in which steps of an example are `steps_apart` or more."""
    if self.decay is not None:
      return InverseBanded((1.0, -self.decay), self.redraw)
    return InverseBanded.optimized(
      num_steps=num_steps,
      bands=2,
      steps_apart=steps_apart,
      objective=self.objective,
      redraw=self.redraw,
    )
