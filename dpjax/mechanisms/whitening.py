"""Private linear map that scales down the directions in which features are spread most.

Features of images are strongly correlated: a few directions hold most of their energy, fill the
clip norm of every gradient, and say little about the class. If these few directions are scaled
down, all others have more signal at the same noise. The map is computed from these private
statistics of the data, whose cost the event includes:

- the mean;
- the second moments of channels and of positions. Their eigenvectors are a basis in which features
  are nearly uncorrelated (as in K-FAC, Martens and Grosse 2015, arXiv:1503.05671, and SOAP, Vyas et
  al. 2024, arXiv:2409.11321);
- the variance of each coordinate in that basis;
- the covariance of the coordinates of most variance, after scaling by these variances (Analyze
  Gauss, Dwork et al. 2014).

Each statistic is a mean of one vector per example. The vectors are clipped, and their sum gets
noise, as in `channel_statistics`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import validate
from dpjax.data.rows import Rows
from dpjax.mechanisms import finite, noisy_means
from dpjax.mechanisms.noisy_means import HUGE, NoisyMeans, chunks, clipped_total, each
from dpjax.mechanisms.selection import PermuteAndFlip
from dpjax.types import Array, ArrayLike
from dpjax.validate import UserError

MAX_DIRECTIONS = 1024
# Largest number of channels, and of positions, of an example.
MAX_SIDE = 1024
_TINY = 1 / HUGE
# Edges of the bins from which a private clip norm is chosen. Adjacent edges differ by 4.4 %.
_EDGES = (2.0 ** (np.arange(-320, 321) / 16)).astype(np.float32)
# Matrix product in full float32 precision. By default accelerators round inputs to fewer bits.
_product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class Spread(NamedTuple):
  """Private statistics of features, which may be released.

  Examples have P positions and C channels; M is the number of directions. A symmetric matrix is
  stored as its upper triangle, row by row, with off-diagonal entries times sqrt(2).
  """

  mean: jax.Array  # [P * C]
  channels: jax.Array  # [C (C + 1) / 2] second moments, summed over positions
  positions: jax.Array  # [P (P + 1) / 2] second moments, summed over channels
  variances: jax.Array  # [P * C] of coordinates in the eigenvectors of these two matrices
  covariance: jax.Array  # [M (M + 1) / 2] of the M coordinates of most variance, scaled
  clip_norms: jax.Array  # [5]: one for each of the fields above
  floor: jax.Array  # []: larger variances are scaled down to it; follows from `variances`

  def standardizer(self) -> Callable[[jax.Array], jax.Array]:
    """Returns the whitening map of examples [b, ..., C] -> same shape.

    Directions with a variance above the floor get a variance of about 1. All others are divided by
    the root of the floor.
    """
    shape = (_side(len(self.positions)), _side(len(self.channels)))
    known = _map(self._asdict(), shape, _side(len(self.covariance)))
    scale = np.float32(1 / math.sqrt(float(self.floor)))
    standardize = functools.partial(_apply_map, known=known, scale=scale)
    return jax.jit(lambda x: each(standardize, jnp.asarray(x, jnp.float32)))


class _Map(NamedTuple):
  """The whitening map, as far as the fields of `Spread` that are already released determine it."""

  mean: Any = 0.0  # [P, C]
  channels: Any = None  # [C, C], eigenvectors in columns
  positions: Any = None  # [P, P]
  scales: Any = None  # [P * C] in (0, 1]
  largest: Any = None  # [M] places of the coordinates of most variance
  root: Any = None  # [M, M] symmetric


@dataclasses.dataclass(frozen=True)
class Whitening(NoisyMeans):
  """Private linear map that evens out features `x` [n, ..., C].

  Args:
    normalize_by: public divisor of the noisy sums: the number of examples.
    noise_multiplier: std of the noise on a sum / clip norm of its vectors, the same for all five.
    median_epsilon: epsilon of each of the five clip norms, if they are private. Despite this name
      they are ninth deciles, since medians would cut off too much of the longest vectors.
    clip_norms: public norms (of the first five fields of `Spread`, in order), or () for private
      ones.
    num_directions: number of coordinates whose covariance is released; P * C if that is smaller.
    floor_rank: rank of the variance that is the floor, counted from the largest one. Larger
      variances are scaled down to the floor. With fewer features than this rank, the floor is the
      smallest variance. The floor is never below the std of the noise on a variance.

  Guarantee: as that of `ChannelStatistics`, but for five sums. The vectors of a sum may depend on
  earlier releases: adaptive composition of Gaussian mechanisms is exact (Dong, Roth and Su 2019,
  arXiv:1905.02383, corollary 3.3). All else is post-processing.

  >>> rng = np.random.default_rng(0)  # doctest: +LONG
  >>> x = rng.normal(size=(500, 2, 2, 3)) @ np.diag([9.0, 1.0, 1.0])
  >>> mechanism = Whitening(normalize_by=500.0, noise_multiplier=1e-2, median_epsilon=1.0)
  >>> released = mechanism(jax.random.key(0), x)
  >>> even = np.asarray(released.standardizer()(jnp.asarray(x, jnp.float32)))
  >>> before, after = (a.reshape(500, -1).std(axis=0) for a in (x, even))
  >>> bool(before.max() / before.min() > 8), bool(after.max() / after.min() < 2)
  (True, True)
  """

  num_directions: int = 300
  floor_rank: int = 100
  vectors = ("mean", "channels", "positions", "variances", "covariance")
  norms = "ninth deciles"

  def __post_init__(self) -> None:
    super().__post_init__()
    validate.integer_at_least(
      1, num_directions=self.num_directions, floor_rank=self.floor_rank
    )
    if self.num_directions > MAX_DIRECTIONS:
      raise UserError(
        f"must be at most {MAX_DIRECTIONS}",
        field="num_directions",
        value=self.num_directions,
      )

  def after(self, key: jax.Array, x: ArrayLike | Rows, before: Spread | None) -> Spread:
    """Returns the spread of `x`, as `NoisyMeans.after`. `Rows` are read ten times, or five times
    with public norms."""
    key = self.own_key(key)
    examples = _examples(x)
    sides = (math.prod(examples.shape[1:-1]), examples.shape[-1])
    keys = jax.random.split(key, 2 * len(self.vectors))
    released: dict[str, Any] = {}
    norms = []
    known = _Map()
    for place, name in enumerate(self.vectors):
      lengths = [jnp.zeros(0)]
      # A private clip norm is chosen from the norms of all vectors.
      if not self.clip_norms:
        parts = chunks(examples, _length(name, known, examples.shape))
        lengths += [_chunk_lengths(name, known, chunk)[:count] for chunk, count in parts]
      norms.append(self.clip_norm(keys[2 * place], jnp.concatenate(lengths), place))
      summed = _total(name, known, examples, norms[-1])
      # Whole numbers and fractions are each exact in float32.
      whole = np.round(summed)
      parts = (jnp.asarray(part, jnp.float32) for part in (whole, summed - whole))
      released[name] = _noisy_mean(self, keys[2 * place + 1], *parts, norms[-1])
      if name == "variances":
        released["floor"] = self._floor(released[name], norms[-1])
      there = (
        released if before is None else {name: getattr(before, name) for name in released}
      )
      known = _map(there, sides, self.num_directions)
    return Spread(**released, clip_norms=jnp.stack(norms))

  def _private_norm(self, key: jax.Array, norms: jax.Array) -> jax.Array:
    """Returns the upper end of a bin, chosen privately, near the ninth decile of `norms` [n].

    `Quantile` is not used, since it gives no mass to a norm that several examples have in common.
    The utility of a bin is the integer -10 * excess. The excess is the larger of two numbers, but
    at least 0: the number of records below the bin minus nine tenths of all records, and the number
    of records above the bin minus one tenth of all records.
    """
    places = jnp.minimum(jnp.searchsorted(jnp.asarray(_EDGES), norms), _EDGES.size - 1)
    counts = jnp.bincount(places, length=_EDGES.size)
    upto = jnp.cumsum(counts)
    count = len(norms)
    excess = jnp.maximum(10 * (upto - counts) - 9 * count, 10 * (count - upto) - count)
    chosen = self._among(key, -jnp.maximum(excess, 0))
    return jnp.asarray(_EDGES)[chosen]

  @property
  def _among(self) -> PermuteAndFlip:
    """Returns the mechanism that selects a bin. A replaced record moves a utility by at most 10. An
    added or removed record also moves the deciles, and so a utility by at most 9."""
    exchanged = self.neighboring_relation == "replace_one"
    return PermuteAndFlip(self.median_epsilon, utility_sensitivity=10 if exchanged else 9)

  def _floor(self, variances: jax.Array, clip_norm: jax.Array) -> jax.Array:
    """Returns the variance of rank `floor_rank`, but no less than the std of the noise on it."""
    rank = min(self.floor_rank, len(variances)) - 1
    noise = float(self.noise_multiplier) * clip_norm / float(self.normalize_by)
    return jnp.maximum(jnp.sort(variances)[::-1][rank], jnp.maximum(noise, _TINY))

  def statement(self, unit: str = "example") -> str:
    """Describes the release in words, for readers; `unit` is the word for one record.

    >>> print(Whitening(normalize_by=9).statement())
    Before the first step: mean, second moments of channels and of positions, variances and ...
    """
    what = (
      "mean, second moments of channels and of positions, variances and the covariance of "
      f"at most {self.num_directions} directions"
    )
    return self.describe_as(what, unit)


_noisy_mean = jax.jit(NoisyMeans.noisy_mean_of, static_argnums=0)


def _map(released: dict[str, Any], shape: tuple[int, ...], num_directions: int) -> _Map:
  """Returns the whitening map of examples [P, C], as far as the given fields determine it.

  NumPy computes it in float64, so that up to rounding all machines get the same map.
  """
  known = _Map(np.asarray(released["mean"]).reshape(shape))
  for name in ("channels", "positions"):
    if name in released:
      known = known._replace(**{name: _eigenvectors(released[name])[1]})
  if "variances" not in released:
    return known
  variances = np.asarray(released["variances"], np.float64)
  floor = float(released["floor"])
  # Equal variances are ordered by place, so that all machines get the same order.
  largest = np.argsort(-variances, kind="stable")[:num_directions]
  scales = np.sqrt(floor / np.maximum(variances, floor))
  known = known._replace(scales=np.float32(scales), largest=np.sort(largest))
  if "covariance" not in released:
    return known
  values, vectors = _eigenvectors(released["covariance"])
  evened = vectors * np.sqrt(floor / np.maximum(values, floor))
  return known._replace(root=np.float32(evened @ vectors.T))


def _examples(x: ArrayLike | Rows) -> Any:
  """Returns `x` as an array or `Rows` [n, ..., C]; raises UserError for another shape or type."""
  inputs: Any = x if isinstance(x, Rows) else finite.array("x", x)
  if inputs.ndim < 3 or 0 in inputs.shape[1:]:
    raise UserError(
      f"must have shape [n, positions, channels], not {inputs.shape}", field="x"
    )
  sides = (math.prod(inputs.shape[1:-1]), inputs.shape[-1])
  if max(sides) > MAX_SIDE or len(inputs) > finite.MAX_RECORDS:
    raise UserError(
      f"must have at most {MAX_SIDE} positions, {MAX_SIDE} channels and "
      f"{finite.MAX_RECORDS} examples, not {inputs.shape}",
      field="x",
    )
  return inputs


def _vector(name: str, known: _Map, example: jax.Array) -> jax.Array:
  """Returns the vector of one example [P, C] whose mean is the field `name` of `Spread`."""
  if name == "mean":
    return example.ravel()
  centred = example - known.mean
  if name == "channels":
    return _upper(_product(centred.T, centred))
  if name == "positions":
    return _upper(_product(centred, centred.T))
  turned = _product(known.positions.T, _product(centred, known.channels)).ravel()
  if name == "variances":
    return jnp.square(turned)
  evened = (turned * known.scales)[known.largest]
  return _upper(jnp.outer(evened, evened))


def _length(name: str, known: _Map, shape: tuple[int, ...]) -> int:
  """Returns the number of entries of `_vector` of one example; `shape` is [n, ..., C]."""
  positions = math.prod(shape[1:-1])
  channels = shape[-1]
  if name in ("mean", "variances"):
    return positions * channels
  sides = {"positions": positions, "channels": channels}
  side = sides[name] if name in sides else len(known.largest)
  return side * (side + 1) // 2


@functools.partial(jax.jit, static_argnums=0)
def _chunk_lengths(name: str, known: _Map, chunk: jax.Array) -> jax.Array:
  length_of = lambda example: noisy_means.norm(_vector(name, known, example))
  return jax.lax.map(length_of, chunk)


@functools.partial(jax.jit, static_argnums=0)
def _chunk_total(
  name: str, known: _Map, chunk: jax.Array, count: Array, clip_norm: Array
) -> tuple[jax.Array, jax.Array]:
  rows = jax.lax.map(functools.partial(_vector, name, known), chunk)
  there = jnp.arange(len(chunk))[:, None] < count
  # Padding is set to zero, which adds nothing to the exact sum.
  rows = jnp.where(there, rows, 0.0)
  return clipped_total(rows, clip_norm)


def _total(name: str, known: _Map, examples: Any, clip_norm: Array) -> np.ndarray:
  """Returns the exact sum of the clipped vectors in clip norms, float64 multiples of 2^-22."""
  length = _length(name, known, examples.shape)
  summed = np.zeros(length)
  for chunk, count in chunks(examples, length):
    high, low = _chunk_total(name, known, chunk, jnp.int32(count), clip_norm)
    summed += np.asarray(high, np.float64) + np.asarray(low, np.float64)
  return summed


def _upper(matrix: jax.Array) -> jax.Array:
  """Returns the upper triangle [k (k + 1) / 2] of a symmetric matrix [k, k].

  Off-diagonal entries are multiplied by sqrt(2), so that the vector has the matrix's norm.
  """
  rows, columns = np.triu_indices(matrix.shape[0])
  weights = np.where(rows == columns, 1.0, math.sqrt(2)).astype(np.float32)
  return matrix[rows, columns] * weights


def _side(length: int) -> int:
  """Returns k for a triangle of k (k + 1) / 2 entries."""
  return (math.isqrt(8 * length + 1) - 1) // 2


def _eigenvectors(triangle: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
  """Returns (eigenvalues, eigenvectors in columns) of a matrix in the form that `_upper` returns.

  The entry of largest absolute value in each vector is made positive, so that all machines get the
  same sign."""
  entries = np.asarray(triangle, np.float64)
  side = _side(len(entries))
  rows, columns = np.triu_indices(side)
  matrix = np.zeros((side, side))
  # Off-diagonal entries occur twice in the matrix, so the vector holds them times sqrt(2).
  matrix[rows, columns] = np.where(rows == columns, entries, entries / math.sqrt(2))
  matrix = matrix + np.triu(matrix, 1).T
  values, vectors = np.linalg.eigh(matrix)
  largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
  vectors = vectors * np.where(largest < 0, -1.0, 1.0)
  return values, vectors.astype(np.float32)


def _apply_map(example: jax.Array, known: _Map, scale: Any) -> jax.Array:
  """Applies the map to one example, [..., C] -> same shape; zeros if the result is not finite."""
  centred = example.reshape(known.mean.shape) - known.mean
  turned = _product(known.positions.T, _product(centred, known.channels))  # [P, C]
  evened = turned.ravel() * known.scales
  changed = _product(known.root, evened[known.largest])
  evened = evened.at[known.largest].set(changed).reshape(turned.shape) * scale
  back = _product(known.positions, _product(evened, known.channels.T))
  return jnp.where(jnp.isfinite(back).all(), back, 0.0).reshape(example.shape)
