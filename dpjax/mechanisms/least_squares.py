"""Private least squares: the sums x x^T and x y^T of clipped rows in one Gaussian release.

A linear model that minimises squared error needs only two things of the data: the second moments of
its inputs x and their products with the targets y. Both sums are released once, with one noise,
under one joint sensitivity. All else is post-processing: every ridge, every repair of the noisy
matrix and every threshold (Wang 2018, arXiv:1803.02596; Dwork et al. 2014, "Analyze Gauss"). Mehta
et al. 2022, arXiv:2211.13403, fit the last layer of image classifiers in this way.

Joint sensitivity
-----------------
Rows x and y are clipped to z, |z| <= 1, and t, |t| <= 1, and turned into one vector

  v(z, t) = (w U(z z^T), z t^T),

where w is `moment_weight`, and U(M) is the upper triangle of a symmetric matrix M with the entries
off the diagonal times sqrt(2). So |U(M)| is the Frobenius norm of M.

1. add_or_remove_one, replace_special: |v|^2 = w^2 |z|^4 + |z|^2 |t|^2 <= w^2 + 1, and every row of
   norms 1 attains it.
2. replace_one. Let p and q be the norms of z and z', and r and u those of t and t'. With
   c = <z, z'> and s = <t, t'>,

     |v - v'|^2 = w^2 (p^4 + q^4 - 2 c^2) + p^2 r^2 + q^2 u^2 - 2 c s.

   For fixed norms, s = -r u sign(c) is the worst case, and |c| <= p q. The terms with c then have
   their unconstrained maximum r^2 u^2 / (2 w^2) at |c| = r u / (2 w^2), so that in every case

     |v - v'|^2 <= 2 w^2 + 2 + 1 / (2 w^2).

   For w^2 >= 1/2 rows of norm 1 attain this bound (in two dimensions or more). For w^2 < 1/2 the
   bound is 4. If r u <= 2 w^2 p q, the maximum is at most 2 w^2 p^2 q^2, and |v - v'|^2 is at most
   w^2 (p^2 + q^2)^2 + p^2 + q^2 <= 4 w^2 + 2 <= 4. Otherwise |c| = p q, and |v - v'|^2 is at most
   (p + q)^2 (1 + w^2 (p - q)^2) <= m^2 (1 + (2 - m)^2 / 2) with m = p + q. This increases in m
   and is 4 at m = 2. A row and its mirror image, (z, t) and (-z, t), attain the bound.

   Two separate releases at these scales would have the squared sensitivity 2 w^2 + 4. Twice the
   bound of an added row, squared, is 4 w^2 + 4. For w > 0 both are larger than the bound here.

Instead of 1, the diagonal of U could have a weight a. The expected squared Frobenius norm of the
noise on the matrix is proportional to max(a^2, 1 - (1 - a^2) / d) (1 / a^2 + (d - 1) / 2). It
falls until a = 1 and rises from there on, so a = 1 is best.

A larger weight w means less noise on A, the sum of x x^T, and more on b, the sum of x y^T. To first
order, the weights W = (A + ridge)^-1 b err by (A + ridge)^-1 (noise_b - noise_A W). The variance of
noise_b grows as the squared sensitivity w^2 + 1, and that of noise_A W is |W|^2 / (2 w^2) times as
large. So the sum of both variances is least at w^2 = |W| / sqrt(2), where |W| is the norm of one
column of weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax import trees, validate
from dpjax.data.rows import Rows
from dpjax.mechanisms import finite, stated
from dpjax.mechanisms.additive import Gaussian
from dpjax.noise import source
from dpjax.types import ArrayLike
from dpjax.validate import UserError

# Largest number of features of an example: x x^T then has 2^26 entries.
MAX_FEATURES = 2**13
MAX_TARGETS = 2**13
# Entries of rows are integers, in units of 2^-19 clip norms. A product of two entries is a multiple
# of 2^-38. Products of 2^24 rows sum to at most 2^62 of these units, which int64 holds.
BITS = 19
# A chunk of 2^14 rows sums to at most 2^52 units: float64 holds every partial sum, in any order.
_CHUNK = 2**14
# Largest number of entries of a chunk: 64 MB in float64.
_CHUNK_ENTRIES = 2**23
# Rows are clipped to this part of the bound. The margin exceeds the rounding of a norm in float64.
_INSIDE = 1 - 1e-9
_WEIGHTS = (1e-4, 1e4)
# Range of the clip norms. Products of two norms, also with noise, stay far within float64.
_NORMS = (1e-30, 1e30)
# Number of sums that get their noise in one call.
_BLOCK = 2**16


class NoisyMoments(NamedTuple):
  """Noisy sums of a data set: everything here may be published."""

  xx: np.ndarray | None  # [d, d] symmetric, sum of x x^T; None if moment_weight is 0
  xy: np.ndarray  # [d, k] sum of x y^T
  xx_std: (
    float  # std of the noise on diagonal entries of xx; on others it is this / sqrt(2)
  )
  xy_std: float  # std of the noise on every entry of xy

  @property
  def noise_norm(self) -> float:
    """Returns xx_std sqrt(2 d), about the spectral norm of the noise on xx; 0 if xx is None.

    A symmetric Gaussian matrix with variance s^2 / 2 off its diagonal has a norm near
    2 (s / sqrt(2)) sqrt(d) (Bai and Yin 1988). The number is public, since no data enter it.
    """
    return 0.0 if self.xx is None else self.xx_std * math.sqrt(2 * len(self.xy))

  def ridge(self, strength: float = 1.0, penalty: float = 0.0) -> np.ndarray:
    """Returns the weights (xx + r I)^-1 xy with r = strength * noise_norm + penalty: [d, k].

    Negative eigenvalues of the noisy matrix count as 0. The true matrix has none, so this reduces
    the error. If xx is None, the weights are xy itself. All this is post-processing, at no cost.

    Args:
      strength: ridge in units of `noise_norm`, which is public. (Wang 2018 chooses the ridge by a
        private release of the least eigenvalue.)
      penalty: a further ridge, in units of xx.

    Raises:
      UserError: the matrix with its ridge is singular.

    >>> exact = NoisyMoments(np.diag([3.0, 1.0]), np.array([[4.0], [2.0]]), 0.0, 0.0)
    >>> exact.ridge(penalty=1.0).tolist()
    [[1.0], [1.0]]
    """
    validate.non_negative(strength=strength, penalty=penalty)
    if self.xx is None:
      return self.xy.copy()
    values, vectors = np.linalg.eigh(self.xx)
    raised = np.maximum(values, 0.0) + float(strength) * self.noise_norm + float(penalty)
    # Without noise and ridge the matrix may be singular, for example if there are no rows.
    least = raised.min()
    if not least > np.finfo(np.float64).eps * raised.max():
      raise UserError(
        "must be > 0, for the matrix is singular", field="penalty", value=penalty
      )
    return vectors @ ((vectors.T @ self.xy) / raised[:, None])


@dataclasses.dataclass(frozen=True)
class LeastSquares:
  """Noisy sums of x x^T and x y^T over rows x [n, d] and targets y [n, k], in one release.

  x [n, ...] is read as [n, d]: all axes but the first are flattened.

  Args:
    noise_multiplier: std of the noise / `l2_sensitivity`, for the vector v of the module's proof.
    feature_norm: rows of x are clipped to this l2 norm.
    target_norm: rows of y are clipped to this l2 norm. For `centred_labels` of K classes it is
      sqrt(1 - 1 / K).
    moment_weight: w, the weight of x x^T relative to x y^T. With 0, x x^T is not released, and
      costs nothing.
    unit_rows: whether to lengthen shorter rows of x to `feature_norm`, too. Then lengths of rows
      are not used; a row of zeros stays zero.
    neighboring_relation: relation of the guarantee.

  Guarantee: one Gaussian release with the module's joint sensitivity, if a record gives one row.
  The number of rows, which is private under add_or_remove_one, is not used. Rows are rounded toward
  zero to integers, and their products are summed exactly. The noise is drawn in float64, and the
  result is rounded to a public grid (`finite`). Sums are not multiplied by their weights. Instead
  their noise is divided by the weights, so that nothing is rounded before noise is added.

  | rows                            | outcome                                 |
  | ------------------------------- | --------------------------------------- |
  | NaN, infinity in x or y         | the row counts as zero                  |
  | longer than the norm            | clipped, each by itself                 |
  | no rows                         | noise around zero                       |

  >>> rng = np.random.default_rng(0)
  >>> x = rng.normal(size=(500, 3)) / 4
  >>> mechanism = LeastSquares(noise_multiplier=1e-3)
  >>> released = mechanism(jax.random.key(0), x, x @ np.array([[0.5], [0.0], [-0.5]]))
  >>> released.ridge(strength=0.1).round(1).tolist()
  [[0.5], [0.0], [-0.5]]
  >>> round(mechanism.l2_sensitivity, 4)  # sqrt(1 + 1)
  1.4142
  """

  noise_multiplier: float
  feature_norm: float = 1.0
  target_norm: float = 1.0
  moment_weight: float = 1.0
  unit_rows: bool = False
  neighboring_relation: str = "add_or_remove_one"

  def __post_init__(self) -> None:
    stated.positive(noise_multiplier=self.noise_multiplier)
    norms = {"feature_norm": self.feature_norm, "target_norm": self.target_norm}
    validate.number_in(*_NORMS, **norms)
    validate.flag(unit_rows=self.unit_rows)
    # Raises if the weight is out of range.
    _ = self.l2_sensitivity
    validate.one_of(stated.RELATIONS, neighboring_relation=self.neighboring_relation)

  @property
  def l2_sensitivity(self) -> float:
    """Returns the largest L2 change of the vector v, which the module defines, by one record."""
    return joint_sensitivity(self.moment_weight, self.neighboring_relation)

  @property
  def stds(self) -> tuple[float, ...]:
    """Returns the standard deviations of the noise, in units of the clip norms.

    The first one is for entries of x y^T. If x x^T is released, two more follow: for the diagonal
    of x x^T, and for its other entries.
    """
    std = float(self.noise_multiplier) * self.l2_sensitivity
    if not self.moment_weight:
      return (std,)
    diagonal = std / float(self.moment_weight)
    # Entries off the diagonal have the weight sqrt(2) in v, so their noise is divided by sqrt(2).
    return std, diagonal, diagonal / math.sqrt(2)

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """Returns the event for `dpjax.accounting`, under `neighboring_relation`."""
    return stated.gaussian_event(
      float(self.noise_multiplier), self.neighboring_relation, neighboring_relation
    )

  def __call__(self, key: jax.Array, x: ArrayLike | Rows, y: ArrayLike) -> NoisyMoments:
    """Returns the noisy sums over all rows of x [n, ...], y [n, k]. `Rows` are read in chunks."""
    # The key is checked before the sums, which take long.
    trees.check_key(key=key)
    return self.noisy(key, *exact_sums(self, x, y))

  def projected(self, x: ArrayLike | Rows, directions: ArrayLike) -> np.ndarray:
    """Returns clip(x) @ directions for x [n, ...], public directions [d, m]: [n, m]. NOT private.

    With fewer numbers for each example, the release has less noise in total. Orthonormal directions
    make no row longer; the mechanism clips the result in any case.

    >>> mechanism = LeastSquares(1.0, feature_norm=5.0)
    >>> mechanism.projected(np.array([[3.0, 4.0]]), np.array([[0.0], [1.0]])).round(3).tolist()
    [[4.0]]
    """
    inputs: Any = x if isinstance(x, Rows) else finite.array("x", x)
    columns = np.asarray(finite.array("directions", directions), np.float64)
    width = math.prod(inputs.shape[1:])
    if columns.ndim != 2 or len(columns) != width:
      raise UserError(
        f"must have shape [{width}, m], not {columns.shape}", field="directions"
      )
    whole = np.round(columns * 2.0**BITS)
    if not (np.abs(whole).sum(axis=0) <= 2.0**33).all():
      raise UserError("must be finite, in columns of norm 1", field="directions")
    out = np.zeros((len(inputs), columns.shape[1]))
    start = 0
    for rows in _chunks(inputs, width):
      units = whole_rows(rows, self.feature_norm, filled=self.unit_rows)
      # Entries are integers up to 2^19, and absolute entries of a column sum to at most 2^33. So
      # the product is exact, and no row changes the rounding of another.
      out[start : start + len(rows)] = units @ whole
      start += len(rows)
    return out * (float(self.feature_norm) * 2.0 ** (-2 * BITS))

  def noisy(self, key: jax.Array, xx: np.ndarray, xy: np.ndarray) -> NoisyMoments:
    """Returns the sums of `exact_sums` with noise, in units of x and y."""
    trees.check_key(key=key)
    diagonal_key, beside_key, product_key = jax.random.split(key, 3)
    feature = float(self.feature_norm)
    product = feature * float(self.target_norm)
    std, *of_matrix = self.stds
    products = product * noisy_sums(product_key, xy, std)
    if not of_matrix:
      return NoisyMoments(None, products, 0.0, product * std)
    diagonal_std, beside_std = of_matrix
    rows, columns = np.triu_indices(len(xx), 1)
    matrix = np.zeros(xx.shape)
    matrix[rows, columns] = noisy_sums(beside_key, xx[rows, columns], beside_std)
    matrix += matrix.T
    matrix[np.diag_indices(len(xx))] = noisy_sums(
      diagonal_key, np.diagonal(xx), diagonal_std
    )
    return NoisyMoments(
      feature**2 * matrix, products, feature**2 * diagonal_std, product * std
    )

  def statement(self, unit: str = "example") -> str:
    """Describes the release in words, for readers; `unit` is the word for one record.

    >>> print(LeastSquares(noise_multiplier=2.0, moment_weight=0.0).statement())
    Released once, over all examples: the sums of x y^T, of features clipped to norm 1 and ...
    """
    what = "x x^T (upper triangle) and x y^T" if self.moment_weight else "x y^T"
    bounded = "scaled" if self.unit_rows else "clipped"
    weight = f", x x^T weighing {self.moment_weight:g}" if self.moment_weight else ""
    return (
      f"Released once, over all {unit}s: the sums of {what}, of features {bounded} to norm "
      f"{self.feature_norm:g} and targets clipped to norm {self.target_norm:g}{weight}. The "
      "clip norm above is the joint bound on one record's part of both, in units of these norms; "
      "the number of records is not used."
    )


def joint_sensitivity(
  moment_weight: float, neighboring_relation: str = "add_or_remove_one"
) -> float:
  """Returns the largest L2 change of (w U(x x^T), x y^T) by one record, for rows of norm <= 1.

  `moment_weight` is w. The module's docstring defines U and has the proof. Source: Dwork et al.
  2014 for the matrix alone.

  >>> [round(joint_sensitivity(w, "replace_one"), 4) for w in (0.0, 1.0)]
  [2.0, 2.1213]
  """
  validate.non_negative(moment_weight=moment_weight)
  validate.one_of(stated.RELATIONS, neighboring_relation=neighboring_relation)
  # With a weight far outside this range, the rounding of w^2 + 1 would lose the smaller term.
  if moment_weight and not _WEIGHTS[0] <= moment_weight <= _WEIGHTS[1]:
    raise UserError(
      f"must be 0 or in [{_WEIGHTS[0]:g}, {_WEIGHTS[1]:g}]",
      field="moment_weight",
      value=moment_weight,
    )
  square = float(moment_weight) ** 2
  if neighboring_relation != "replace_one":
    return math.sqrt(square + 1)
  if square < 0.5:
    return 2.0
  return math.sqrt(2 * square + 2 + 1 / (2 * square))


# Largest number of classes. Every class is a column of the targets.
_MOST_CLASSES = 2**20


def centred_labels(y: ArrayLike, num_classes: int) -> np.ndarray:
  """Returns the rows e_y - 1 / K of classes y [n]: [n, K], of norm sqrt(1 - 1 / K).

  They are shorter than e_y, so they need less noise. Decisions are the same, since a part of the
  weights that all classes share changes no argmax. A class outside [0, K) gets a row of zeros.

  >>> centred_labels(np.array([1]), 2).tolist()
  [[-0.5, 0.5]]
  """
  validate.integer_in(2, _MOST_CLASSES, num_classes=num_classes)
  classes = np.asarray(finite.array("y", y))
  if classes.ndim != 1 or classes.dtype.kind not in "iu":
    raise UserError(f"must be integers [n], not {classes.dtype}{classes.shape}", field="y")
  rows = np.zeros((len(classes), num_classes))
  known = (classes >= 0) & (classes < num_classes)
  rows[known] = -1 / num_classes
  rows[np.flatnonzero(known), classes[known]] += 1.0
  return rows


def centred_norm(num_classes: int) -> float:
  """Returns the norm of a row of `centred_labels`: sqrt(1 - 1 / K).

  >>> round(centred_norm(10), 4)
  0.9487
  """
  validate.integer_at_least(2, num_classes=num_classes)
  return math.sqrt(1 - 1 / num_classes)


def exact_sums(
  mechanism: LeastSquares, x: ArrayLike | Rows, y: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (x^T x [d, d], x^T y [d, k]) of the clipped rows, in units of the clip norms.

  The rows are rounded to multiples of 2^-19. Sums of their products are exact, in int64 multiples
  of 2^-38. NOT private. If `moment_weight` is 0, x^T x is empty.

  Raises:
    UserError: entries that are not numbers, wrong shapes, too many rows, features or targets.
  """
  inputs: Any = x if isinstance(x, Rows) else finite.array("x", x)
  targets = np.asarray(finite.array("y", y))
  width = math.prod(inputs.shape[1:])
  if inputs.ndim < 2 or not 1 <= width <= MAX_FEATURES:
    raise UserError(
      f"must have shape [n, ...] with 1 to {MAX_FEATURES} features, not [n, "
      f"{', '.join(map(str, inputs.shape[1:]))}]",
      field="x",
    )
  if targets.ndim != 2 or len(targets) != len(inputs) or not targets.shape[1]:
    raise UserError(
      "must have shape [n, targets], one row for each of the n rows of x",
      field="y",
    )
  if targets.shape[1] > MAX_TARGETS or len(inputs) > finite.MAX_RECORDS:
    raise UserError(
      f"must have at most {MAX_TARGETS} columns and {finite.MAX_RECORDS} rows",
      field="y",
    )
  side = width if mechanism.moment_weight else 0
  xx = np.zeros((side, side), np.int64)
  xy = np.zeros((width, targets.shape[1]), np.int64)
  start = 0
  for rows in _chunks(inputs, width, targets.shape[1]):
    wanted = np.ascontiguousarray(targets[start : start + len(rows)], np.float64)
    start += len(rows)
    units = whole_rows(rows, mechanism.feature_norm, filled=mechanism.unit_rows)
    answers = whole_rows(wanted, mechanism.target_norm)
    # A row with NaN or infinity in x or y is left out of both sums.
    sound = np.isfinite(rows).all(axis=1) & np.isfinite(wanted).all(axis=1)
    units[~sound] = 0.0
    if side:
      # The products are exact, also if fused: every partial sum is an integer below 2^53.
      xx += (units.T @ units).astype(np.int64)
    xy += (units.T @ answers).astype(np.int64)
  return xx, xy


def _chunks(x: Any, width: int, other: int = 0) -> Iterator[np.ndarray]:
  """Yields rows [size, width] in float64, in chunks of equal size; the last may be smaller."""
  size = max(1, min(_CHUNK, _CHUNK_ENTRIES // max(width, other)))
  for start in range(0, len(x), size):
    rows = np.ascontiguousarray(x[start : start + size], np.float64)
    yield rows.reshape(len(rows), width)


def whole_rows(rows: np.ndarray, norm: float, *, filled: bool = False) -> np.ndarray:
  """Clips each row of [n, d] to `norm`, and returns it as integers in units of norm / 2^19.

  `filled` also lengthens shorter rows to `norm`. Rounding is toward zero, which lengthens no row.
  Rows with NaN or infinity become zero.
  """
  sound = np.isfinite(rows).all(axis=1, keepdims=True)
  rows = np.where(sound, rows, 0.0)
  largest = np.abs(rows).max(axis=1, keepdims=True)
  # Rows are divided by their largest entry first, since the square of 1e200 is infinite.
  scaled = rows / np.where(largest > 0, largest, 1.0)
  lengths = np.sqrt(np.square(scaled).sum(axis=1, keepdims=True))
  # `share` is the row's length / norm, at most 1. A quotient that overflows becomes 1, too.
  with np.errstate(over="ignore", under="ignore"):
    share = np.minimum(1.0, lengths * (largest / float(norm)))
  share = np.ones_like(share) if filled else share
  unit = scaled / np.where(lengths > 0, lengths, 1.0)
  return np.trunc(unit * (share * _INSIDE * 2.0**BITS))


def noisy_sums(key: jax.Array, sums: np.ndarray, std: float) -> np.ndarray:
  """Returns `sums` * 2^-38 plus Gaussian noise of `std`: int64 [...] -> float64 [...]."""
  parts, unit = _parts(sums, std)
  short = -sums.size % _BLOCK
  blocks = np.pad(parts, ((0, 0), (0, short))).reshape(2, -1, _BLOCK)
  noisy = np.zeros(blocks.shape[1:])
  # In float32 the deviation from exact noise, which `finite` states, is too large for 10^8 sums.
  with jax.enable_x64(True):
    for place in range(len(noisy)):
      block_key = jax.random.fold_in(key, place)
      noisy[place] = _noised_block(block_key, *blocks[:, place], std / unit)
  return unit * noisy.ravel()[: sums.size].reshape(sums.shape)


def draw_at_once(keys: jax.Array, sums: np.ndarray, std: float) -> np.ndarray:
  """Returns `sums` [m] * 2^-38 plus noise as in `noisy_sums`, once for each of n keys: [n, m]."""
  parts, unit = _parts(sums, std)
  with jax.enable_x64(True):
    drawn = _noised_blocks(keys, *parts, std / unit)
    return unit * np.asarray(drawn)


def _parts(sums: np.ndarray, std: float) -> tuple[np.ndarray, float]:
  """Returns (parts [2, m], unit). The parts are the whole numbers and the fractions of the sums,
  divided by the unit, which is the largest power of two up to `std`."""
  # Raises if the standard deviation is out of range.
  Gaussian(std, 1.0)
  bits = 2 * BITS
  # Whole numbers and fractions are each exact in float64; their sum may not be.
  whole = sums >> bits
  fraction = (sums - (whole << bits)).astype(np.float64) * 2.0**-bits
  # In this unit every std lies in [1, 2) and has the same grid, so one compiled program serves all.
  # Division by a power of two rounds nothing.
  unit = math.ldexp(1.0, math.frexp(std)[1] - 1)
  return np.stack([whole.ravel().astype(np.float64), fraction.ravel()]) / unit, unit


@jax.jit
def _noised_block(
  key: jax.Array, high: jax.Array, low: jax.Array, std: jax.Array
) -> jax.Array:
  """Adds Gaussian noise of a std in [1, 2) to high + low, and rounds to the grid of that noise."""
  draw = functools.partial(source.gaussian, long_tails=True)
  return finite.add_noise(draw, key, high, low, std, finite.fine_step(1.0))


_noised_blocks = jax.jit(jax.vmap(_noised_block, in_axes=(0, None, None, None)))
