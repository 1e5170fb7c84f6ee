"""Mean and mean square of each channel over a whole data set, privately.

They normalise features (Tramèr and Boneh 2021, arXiv:2011.11660, `scatter_normalization` of
their code): every example is averaged over its positions, which gives it one vector of means
and one of mean squares; each vector is clipped to a norm, and the two sums get Gaussian noise.
The norms are public numbers, or private medians of the vectors' norms, which are paid for (the
paper takes the exact ones, unpaid).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from dpjax import accounting, validate
from dpjax.data.rows import Rows
from dpjax.mechanisms import finite, stated
from dpjax.mechanisms.additive import Gaussian
from dpjax.mechanisms.bounded import Quantile
from dpjax.mechanisms.sensitivity import vector_sum_sensitivity
from dpjax.types import Array, ArrayLike
from dpjax.validate import UserError

LARGEST_NORM = 64.0  # public: medians are looked for in [0, it]
MAX_CHANNELS = 2**20
VARIANCE_FLOOR = 1e-5  # is added to variances, as in the paper's code
_CHUNK = 1000  # examples averaged at a time, of so many entries at most
_CHUNK_ENTRIES = 2**24
_GRID = 2.0**-22  # of a clipped vector's entries, in clip norms
_HUGE = 1e30
_COUNTS = {0: "no", 2: "two", 5: "five"}
_NUMBERS, _MEDIAN_EPSILONS = (1e-30, 1e30), (1e-6, 100.0)
_TINY = float(np.finfo(np.float32).tiny)


class ChannelMoments(NamedTuple):
  """What was released."""

  mean: jax.Array  # [C]
  mean_square: jax.Array  # [C]
  clip_norms: jax.Array  # [2] of the vectors of means, of mean squares

  def standardizer(self) -> Callable[[jax.Array], jax.Array]:
    """What normalises examples [b, ..., C] by it."""
    return jax.jit(functools.partial(standardized, statistics=self))


def standardized(x: ArrayLike, statistics: ChannelMoments) -> jax.Array:
  """(x - mean) / sqrt(variance + 1e-5) for each channel, the last axis: [..., C] -> same.

  A channel whose noisy variance is not positive becomes 0.

  >>> found = ChannelMoments(jnp.array([1.0, 0.0]), jnp.array([5.0, 0.0]), jnp.ones(2))
  >>> standardized(jnp.array([[3.0, 3.0]]), found).round(3).tolist()
  [[1.0, 0.0]]
  """
  x = jnp.asarray(x, jnp.float32)
  wide = lambda one: jnp.asarray(one, jnp.float32).reshape(*[1] * (x.ndim - 1), -1)
  mean, square = wide(statistics.mean), wide(statistics.mean_square)
  variance = square - mean**2
  scale = jnp.where(variance > 0, jax.lax.rsqrt(variance + VARIANCE_FLOOR), 0.0)
  return (x - mean) * scale


@dataclasses.dataclass(frozen=True)
class NoisyMeans(abc.ABC):
  """What statistics have in common that are means of vectors, so many of each example.

  Each kind of vector is clipped to a norm of its own, public or a private median, and its sum
  gets Gaussian noise. A vector may depend on what was released before it: all of them together
  are no worse than ONE Gaussian sum of the noise multiplier that `event` states.
  """

  vectors: ClassVar[tuple[str, ...]] = ()  # what each is
  norms: ClassVar[str] = "medians"  # what the private clip norms are

  normalize_by: float
  noise_multiplier: float = 8.0
  median_epsilon: float = 0.05
  clip_norms: tuple[float, ...] = ()
  neighboring_relation: str = "add_or_remove_one"

  def __post_init__(self) -> None:
    count = len(self.vectors)
    if not isinstance(self.clip_norms, (tuple, list)) or len(self.clip_norms) not in (
      0,
      count,
    ):
      told = " ".join(repr(self.clip_norms).split())
      raise UserError(
        f"clip_norms={told:.60}: must be {_COUNTS[count]} norms, of an example's "
        f"{', '.join(self.vectors)}, or none for private medians"
      )
    norms = {f"clip_norms[{i}]": norm for i, norm in enumerate(self.clip_norms)}
    numbers = ("normalize_by", "noise_multiplier", "median_epsilon")
    given = {name: getattr(self, name) for name in numbers} | norms
    stated.positive(**given)
    for name, value in given.items():
      low, high = _MEDIAN_EPSILONS if name == "median_epsilon" else _NUMBERS
      if not low <= float(value) <= high:
        raise UserError(f"{name}={value!r}: must be in [{low:g}, {high:g}]")
    object.__setattr__(self, "clip_norms", tuple(float(norm) for norm in self.clip_norms))
    validate.one_of(stated.RELATIONS, neighboring_relation=self.neighboring_relation)
    stated.positive(noise_multiplier=self.total_noise_multiplier)
    _ = self._sums, self._median  # check the rest

  def clip_norm(self, key: jax.Array, norms: jax.Array, which: int) -> jax.Array:
    """Public, or the private median of `norms` [n]."""
    if self.clip_norms:
      return jnp.float32(self.clip_norms[which])
    return self._median(key, norms)

  @property
  def _sums(self) -> Gaussian:
    """Noise on a sum of vectors, in clip norms."""
    return Gaussian(self.noise_multiplier, 1.0)

  @property
  def _median(self) -> Quantile:
    relation = self.neighboring_relation
    if relation == "replace_special":  # an empty record is one value less
      relation = "add_or_remove_one"
    return Quantile(self.median_epsilon, 0.0, LARGEST_NORM, neighboring_relation=relation)

  @property
  def total_noise_multiplier(self) -> float:
    """Of one Gaussian sum that costs no less than all that is released, in clip norms.

    Medians are counted as `gaussian_of_pure(median_epsilon)`; Gaussian mechanisms compose
    exactly (Dong, Roth and Su 2019, arXiv:1905.02383, corollary 3.3).
    """
    count = len(self.vectors)
    precision = count / float(self.noise_multiplier) ** 2
    if not self.clip_norms:
      precision += count / (self._bound * gaussian_of_pure(self.median_epsilon)) ** 2
    return precision**-0.5 if precision else math.inf

  @property
  def _bound(self) -> float:
    """How far one example moves a sum, in clip norms."""
    return vector_sum_sensitivity(1.0, neighboring_relation=self.neighboring_relation)

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """For `dpjax.accounting`, under `neighboring_relation`."""
    relative = self.total_noise_multiplier / self._bound
    return stated.gaussian_event(relative, self.neighboring_relation, neighboring_relation)

  def __call__(self, key: jax.Array, x: ArrayLike | Rows) -> Any:
    """The statistics of `x` [n, ..., C], where each row is one example."""
    return self.after(key, x, None)

  @abc.abstractmethod
  def after(self, key: jax.Array, x: ArrayLike | Rows, before: Any) -> Any:
    """The same; each of its fields as if those ahead of it in `before` had been released."""

  @abc.abstractmethod
  def noisy_totals(self, found: Any) -> list[np.ndarray]:
    """The noisy sums of what was released, in clip norms."""

  @abc.abstractmethod
  def statement(self, unit: str = "example") -> str:
    """What is released, in words."""

  def _told(self, what: str, unit: str) -> str:
    norms = "public norms"
    if not self.clip_norms:
      spent = accounting.upper(self.median_epsilon, digits=6)
      norms = f"private {self.norms} of their norms (each ({spent}, 0)-private)"
    noise = accounting.lower(self.noise_multiplier, digits=6)
    total = accounting.lower(self.total_noise_multiplier, digits=6)
    count = _COUNTS[len(self.vectors)]
    return (
      f"Before the first step: {what} over all {unit}s, the {count} "
      f"vectors of one {unit} clipped to {norms}, each sum with Gaussian noise of {noise} times "
      f"the norm. Charged together as Gaussian noise of {total} times the clip norm, which is "
      "part of what is charged above, with the first step."
    )


@dataclasses.dataclass(frozen=True)
class ChannelStatistics(NoisyMeans):
  """Mean and mean square of each channel of `x` [n, ..., C], over examples and positions.

  Args:
    normalize_by: public divisor of the noisy sums: the number of examples.
    noise_multiplier: std of the noise on each of the two sums / the clip norm of its vectors.
    median_epsilon: spent on each of the two clip norms, where they are private medians.
    clip_norms: public norms (of an example's means, of its mean squares), or () for medians.

  Guarantee: what is released is no worse than ONE Gaussian sum of the noise multiplier that
  `event` states, with one example in at most one row, which is all of its influence: no
  example is sampled. Clipped sums are sums of integers, so no rounding adds to the bound.
  An example that is an empty record is left out of `x` (its place stays in `normalize_by`).

  | example                        | outcome                                    |
  | ------------------------------ | ------------------------------------------ |
  | a mean that is NaN or >= 1e30  | its vector counts as zero                  |
  | no example                     | noise around zero                          |
  | integers, other floats         | become float32, each by itself             |

  >>> mechanism = ChannelStatistics(normalize_by=2.0, noise_multiplier=1e-3, clip_norms=(4, 9))
  >>> found = mechanism(jax.random.key(0), np.full((2, 3, 3, 1), 2.0))
  >>> found.mean.round(1).tolist(), found.mean_square.round(1).tolist()
  ([2.0], [4.0])
  >>> mechanism.event().noise_multiplier == 1e-3 / math.sqrt(2)
  True
  """

  vectors = ("means", "mean squares")

  def noisy_mean(self, key: jax.Array, rows: jax.Array, clip_norm: Array) -> jax.Array:
    """Of `rows` [n, C], each clipped: [C]."""
    noisy = self._sums.on(key, *clipped_total(rows, clip_norm))
    return clip_norm * noisy / float(self.normalize_by)

  def __call__(self, key: jax.Array, x: ArrayLike | Rows) -> ChannelMoments:
    """The statistics of `x` [n, ..., C], where each row is one example; `Rows` are read once,
    in chunks."""
    return self.after(key, x, None)

  def after(self, key: jax.Array, x: ArrayLike | Rows, before: Any) -> ChannelMoments:
    """The same: neither sum depends on the other."""
    finite.check_key(key)
    return _released(self, key, channel_moments(x))

  def noisy_totals(self, found: ChannelMoments) -> list[np.ndarray]:
    """The noisy sums, in clip norms."""
    means = (found.mean, found.mean_square)
    pairs = zip(means, np.asarray(found.clip_norms, np.float64))
    return [np.asarray(one, np.float64) * self.normalize_by / norm for one, norm in pairs]

  def statement(self, unit: str = "example") -> str:
    """What is released, in words.

    >>> print(ChannelStatistics(normalize_by=9, clip_norms=(1, 1)).statement())
    Before the first step: mean and mean square of each channel over all examples, ...
    """
    return self._told("mean and mean square of each channel", unit)


@functools.partial(jax.jit, static_argnums=0)
def _released(
  mechanism: ChannelStatistics, key: jax.Array, vectors: jax.Array
) -> ChannelMoments:
  keys = jax.random.split(key, 4)
  rows = (vectors[:, 0], vectors[:, 1])
  lengths = [_each(_norms, _sound(one)) for one in rows]
  norms = [mechanism.clip_norm(keys[i], one, i) for i, one in enumerate(lengths)]
  means = [mechanism.noisy_mean(keys[2 + i], one, norms[i]) for i, one in enumerate(rows)]
  mean, square = means
  return ChannelMoments(mean, square, jnp.stack(norms))


def gaussian_of_pure(epsilon: float) -> float:
  """Noise multiplier of a Gaussian mechanism that is no better than ANY (epsilon, 0)-DP one.

  Its trade-off function G_mu is convex with G_mu(0) = 1, G_mu(1) = 0, and meets the corner
  1 / (1 + e^epsilon) of the piecewise linear one of binary randomised response, which
  dominates every such mechanism, where mu = -2 Phi^-1(1 / (1 + e^epsilon)): it lies below.
  Source: Liu, Sun, Kong and Jiang 2022, "Identification, amplification and measurement: a
  bridge to Gaussian differential privacy".

  >>> round(gaussian_of_pure(0.1), 3)
  7.98
  """
  stated.positive(epsilon=epsilon)
  mu = -2 * float(special.ndtri(special.expit(-float(epsilon))))
  return math.inf if mu <= 0 else 1 / mu


def channel_moments(x: ArrayLike | Rows) -> jax.Array:
  """[n, ..., C] -> [n, 2, C]: of each example the mean, and the mean square, over positions.

  In float32, by chunks of examples where `x` lies on the host. Not private.

  >>> channel_moments(np.array([[[1.0], [3.0]]])).tolist()
  [[[2.0], [5.0]]]
  """
  given = x if isinstance(x, Rows) else finite.array("x", x)
  if given.ndim < 2 or 0 in given.shape[1:]:
    raise UserError(f"x: must have shape [n, ..., channels], not {given.shape}")
  if given.shape[-1] > MAX_CHANNELS or len(given) > finite.MAX_RECORDS:
    raise UserError(
      f"x: must have at most {MAX_CHANNELS} channels and {finite.MAX_RECORDS} examples"
    )
  library: Any = jnp if isinstance(given, jax.Array) else np
  entries = math.prod(given.shape[1:])
  # chunks of one shape, whatever n is: else the others' last bits follow from n
  size = max(1, min(_CHUNK, _CHUNK_ENTRIES // entries))
  parts = [jnp.zeros((0, 2, given.shape[-1]), jnp.float32)]
  for i in range(0, len(given), size):
    with np.errstate(over="ignore"):  # what float32 cannot hold counts as infinite
      rows = library.asarray(given[i : i + size], np.float32)
    rows = rows.reshape(len(rows), -1, given.shape[-1])
    short = [(0, size - len(rows)), (0, 0), (0, 0)]
    parts.append(_moments(jnp.asarray(library.pad(rows, short)))[: len(rows)])
  return jnp.concatenate(parts)


@jax.jit
def _moments(x: jax.Array) -> jax.Array:
  """[n, positions, C] -> [n, 2, C]"""
  return jax.lax.map(lambda one: jnp.stack([one.mean(0), jnp.square(one).mean(0)]), x)


def _each(fn: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
  """`fn` of each row of [n, d], by itself: what a compiler makes of all rows at once may
  round each differently where there are fewer of them. A loop of one turn is no loop to it,
  so there are two or more."""
  enough = jnp.pad(rows, [(0, max(0, 2 - len(rows))), (0, 0)])
  return jax.lax.map(fn, enough)[: len(rows)]


def _sound(rows: jax.Array) -> jax.Array:
  """[n, d], zero where a row holds what is not finite, or so large that its inverse is not."""
  sound = (jnp.abs(rows) < _HUGE).all(axis=1, keepdims=True)
  return jnp.where(sound, rows, 0.0)


def norm(vector: jax.Array) -> jax.Array:
  """[d] -> [], 0 where an entry is not finite or beyond 1e30."""
  return _norms(_sound(vector[None]))[0]


def _norms(rows: jax.Array) -> jax.Array:
  """[..., d] -> [...], without overflow or underflow of the squares."""
  top = jnp.maximum(jnp.abs(rows).max(axis=-1, initial=0.0), _TINY)
  return top * jnp.sqrt(jnp.square(rows / top[..., None]).sum(axis=-1))


def clipped_total(rows: jax.Array, clip_norm: Array) -> tuple[jax.Array, jax.Array]:
  """(high, low), whose sum is that of the rows [n, d] in clip norms, each clipped to norm 1.

  A row that is not finite, or beyond 1e30, counts as zero. Each is rounded by itself, to
  multiples of 2^-22, with room for it below norm 1; from there on the sum is one of integers.
  Not private.

  >>> high, low = clipped_total(jnp.array([[3.0, 4.0], [0.0, 0.25]]), 1.0)
  >>> np.round(np.float64(high + low), 3).tolist()
  [0.6, 1.05]
  """
  room = 1 - _GRID * (rows.shape[1] + 64)

  def share(row: jax.Array) -> jax.Array:  # of [-1, 1]
    norm = jnp.maximum(_norms(row), _TINY)
    clipped = row / norm * jnp.minimum(norm / clip_norm, room)
    return jnp.clip((clipped + 1) / 2, 0.0, 1.0)

  whole, rest = finite.total(_each(share, _sound(rows)))
  return 2 * whole - len(rows), 2 * rest
