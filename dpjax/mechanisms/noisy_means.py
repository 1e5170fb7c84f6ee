"""Base class of private statistics that are noisy means of one or more vectors per example.

Vectors of one kind are clipped to a norm, public or chosen privately, and their sum gets Gaussian
noise. The clipped sums are sums of integers, so rounding adds nothing to their sensitivity.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from scipy import special

from dpjax import accounting, trees, validate
from dpjax.accounting import text
from dpjax.data.rows import Rows
from dpjax.key_uses import KeyUse, key_for
from dpjax.mechanisms import finite, stated
from dpjax.mechanisms.additive import Gaussian
from dpjax.mechanisms.bounded import Quantile
from dpjax.mechanisms.sensitivity import vector_sum_sensitivity
from dpjax.types import Array, ArrayLike
from dpjax.validate import UserError, Verbatim

# Public range in which private medians are searched: [0, LARGEST_NORM].
LARGEST_NORM = 64.0
HUGE = 1e30
# Number of examples in a chunk. It is smaller if the vectors of so many examples would have more
# than 2^24 entries together.
_CHUNK = 1000
_CHUNK_ENTRIES = 2**24
# Spacing of a clipped vector's entries, in clip norms.
_GRID = 2.0**-22
_COUNTS = {0: "no", 2: "two", 5: "five"}
_NUMBERS = (1e-30, 1e30)
_MEDIAN_EPSILONS = (1e-6, 100.0)
_TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class NoisyMeans(abc.ABC):
  """Private statistics that are means of one or more vectors of each example.

  Each kind of vector has a clip norm, public or chosen privately, and the clipped sum gets Gaussian
  noise. A vector may depend on what was released before it. All releases together cost no more than
  ONE Gaussian sum with the noise multiplier that `event` states.
  """

  vectors: ClassVar[tuple[str, ...]] = ()  # name of each kind of vector
  norms: ClassVar[str] = "medians"  # what private clip norms are, in words

  normalize_by: float
  noise_multiplier: float = 8.0
  median_epsilon: float = 0.05
  clip_norms: tuple[float, ...] = ()
  neighboring_relation: str = "add_or_remove_one"

  def __post_init__(self) -> None:
    count = len(self.vectors)
    clip_norms = self.clip_norms
    if not isinstance(clip_norms, (tuple, list)) or len(clip_norms) not in (0, count):
      words = " ".join(repr(clip_norms).split())
      raise UserError(
        f"must be {_COUNTS[count]} norms, of an example's "
        f"{', '.join(self.vectors)}, or none for private {self.norms}",
        field="clip_norms",
        value=Verbatim(f"{words:.60}"),
      )
    norms = validate.entries(clip_norms=self.clip_norms)
    numbers = ("normalize_by", "noise_multiplier", "median_epsilon")
    checked = {name: getattr(self, name) for name in numbers} | norms
    for name, value in checked.items():
      bounds = _MEDIAN_EPSILONS if name == "median_epsilon" else _NUMBERS
      validate.number_in(*bounds, **{name: value})
    object.__setattr__(self, "clip_norms", tuple(float(norm) for norm in self.clip_norms))
    validate.one_of(stated.RELATIONS, neighboring_relation=self.neighboring_relation)
    stated.positive(noise_multiplier=self.total_noise_multiplier)
    # These properties raise if the noise or the median is out of range.
    _ = self._sums, self._median

  def clip_norm(self, key: jax.Array, norms: jax.Array, which: int) -> jax.Array:
    """Returns the clip norm of vectors of kind `which`: public, or chosen privately from their
    `norms` [n]."""
    if self.clip_norms:
      return jnp.float32(self.clip_norms[which])
    return self._private_norm(key, norms)

  def _private_norm(self, key: jax.Array, norms: jax.Array) -> jax.Array:
    """Returns the private median of `norms` [n]; a subclass may choose another quantile."""
    return self._median(key, norms)

  def noisy_mean_of(
    self, key: jax.Array, high: Array, low: Array, norm: Array
  ) -> jax.Array:
    """Returns the noisy mean, from the exact clipped sum high + low in units of `norm`."""
    mean = norm * self._sums.on(key, high, low) / float(self.normalize_by)
    # Noise may make the mean infinite, and later computations need finite numbers.
    return jnp.clip(mean, -HUGE, HUGE)

  @property
  def _sums(self) -> Gaussian:
    """Returns the mechanism that adds noise to a sum of vectors, in clip norms."""
    return Gaussian(self.noise_multiplier, 1.0)

  @property
  def _median(self) -> Quantile:
    relation = self.neighboring_relation
    # An empty record is left out of the data, so a median sees one record removed or added.
    if relation == "replace_special":
      relation = "add_or_remove_one"
    return Quantile(self.median_epsilon, 0.0, LARGEST_NORM, neighboring_relation=relation)

  @property
  def total_noise_multiplier(self) -> float:
    """Returns the std, in clip norms, of ONE Gaussian sum that costs no less than all releases.

    A private clip norm is counted as `gaussian_of_pure(median_epsilon)`. Gaussian mechanisms
    compose exactly (Dong, Roth and Su 2019, arXiv:1905.02383, corollary 3.3).
    """
    count = len(self.vectors)
    precision = count / float(self.noise_multiplier) ** 2
    if not self.clip_norms:
      precision += count / (self._bound * gaussian_of_pure(self.median_epsilon)) ** 2
    return precision**-0.5 if precision else math.inf

  @property
  def _bound(self) -> float:
    """Returns a bound on the change of a sum by one example, in clip norms."""
    return vector_sum_sensitivity(1.0, neighboring_relation=self.neighboring_relation)

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """Returns the event for `dpjax.accounting`, under `neighboring_relation`."""
    relative = self.total_noise_multiplier / self._bound
    return stated.gaussian_event(relative, self.neighboring_relation, neighboring_relation)

  def own_key(self, key: jax.Array) -> jax.Array:
    """Returns the key of this noise, derived from a run's key. Nothing else in the run uses it."""
    trees.check_key(key=key)
    return key_for(KeyUse.STATISTICS, key)

  def __call__(self, key: jax.Array, x: ArrayLike | Rows) -> Any:
    """Returns the statistics of n examples `x`, [n, ..., C]. `Rows` are read in chunks.

    The key is for ONE data set. Should it serve several, such as the folds of a cross-validation,
    or several noise levels, they still share no noise, since it follows from the settings and `x`,
    too: the difference of two releases would hold none. But equal data, in any order, have equal
    releases, so whoever sees two learns whether their data are equal, which no cost covers. Under
    jit, where `x` has no values, the noise follows from key, settings and shape alone.
    """
    return self.after(self._key_for(key, x), x, None)

  def _key_for(self, key: jax.Array, x: Any) -> jax.Array:
    """Returns a key that follows from `key`, the settings and the examples `x`, in any order.

    Whoever does not know `key` cannot tell it from a fresh one. A traced `x` gives its shape alone.
    """
    key = self.own_key(key)
    inputs: Any = x if isinstance(x, Rows) else finite.array("x", x)
    # Settings by value: a noise multiplier of 8 is that of 8.0.
    settings = [_by_value(getattr(self, field.name)) for field in dataclasses.fields(self)]
    # Examples of the same bytes in another shape have other sums, whose noise must be another one.
    shape = inputs.shape[1:]
    facts = [type(self).__name__, settings, math.prod(shape[:-1]), shape[-1:]]
    digest = _number(repr(facts).encode())
    size = max(1, min(_CHUNK, _CHUNK_ENTRIES // max(1, math.prod(shape))))
    is_known = inputs.ndim and not isinstance(inputs, core.Tracer)
    for start in range(0, len(inputs), size) if is_known else ():
      with np.errstate(over="ignore"):
        # Adding 0 turns -0.0 into 0.0, which is as large.
        rows = np.asarray(inputs[start : start + size]).astype(np.float32) + 0.0
      # A sum, so that the same rows in another order have the same noise: were it fresh, a second
      # look at one data set would cost again.
      digest += sum(_number(row.tobytes()) for row in rows)
    for shift in range(0, 128, 32):
      key = jax.random.fold_in(key, np.uint32(digest >> shift & 0xFFFFFFFF))
    return key

  @abc.abstractmethod
  def after(self, key: jax.Array, x: ArrayLike | Rows, before: Any) -> Any:
    """Returns statistics of `x`, in which each field is computed from earlier fields of `before`.
    If it is None, earlier fields are those of this call.

    So a test of one sum can keep earlier releases constant. The noise follows from the key alone,
    which must be for one run on one data set.
    """

  def noisy_totals(self, released: Any) -> list[np.ndarray]:
    """Returns the noisy sums of the release, in clip norms."""
    pairs = zip(released[: len(self.vectors)], np.asarray(released.clip_norms, np.float64))
    return [np.asarray(mean, np.float64) * self.normalize_by / norm for mean, norm in pairs]

  @abc.abstractmethod
  def statement(self, unit: str = "example") -> str:
    """Describes the release in words, for readers; `unit` is the word for one record."""

  def describe_as(self, what: str, unit: str) -> str:
    """Returns the text of `statement`; `what` names the statistics, and `unit` one record."""
    norms = "public norms"
    if not self.clip_norms:
      spent = accounting.upper(self.median_epsilon, digits=6)
      norms = f"private {self.norms} of their norms (each ({spent}, 0)-private)"
    noise = text.lower(self.noise_multiplier, digits=6)
    total = text.lower(self.total_noise_multiplier, digits=6)
    count = _COUNTS[len(self.vectors)]
    return (
      f"Before the first step: {what} over all {unit}s, the {count} "
      f"vectors of one {unit} clipped to {norms}, each sum with Gaussian noise of {noise} times "
      f"the norm. Charged together as Gaussian noise of {total} times the clip norm, which is "
      "part of what is charged above."
    )


def _by_value(setting: Any) -> Any:
  is_number = np.asarray(setting).dtype.kind in "biuf"
  return np.asarray(setting, np.float64).tolist() if is_number else f"{setting}"


def _number(content: bytes) -> int:
  return int.from_bytes(hashlib.sha256(content).digest(), "big")


def gaussian_of_pure(epsilon: float) -> float:
  """Returns a noise multiplier at which a Gaussian mechanism costs at least as much as ANY
  (epsilon, 0)-DP mechanism.

  Binary randomised response dominates every such mechanism. Its trade-off function is piecewise
  linear with a corner at 1 / (1 + e^epsilon). At mu = -2 Phi^-1(1 / (1 + e^epsilon)) the Gaussian
  trade-off function G_mu, convex with G_mu(0) = 1 and G_mu(1) = 0, passes through that corner. So
  G_mu lies below the trade-off function of randomised response.
  Source: Liu, Sun, Kong and Jiang 2022, "Identification, amplification and measurement: a
  bridge to Gaussian differential privacy".

  >>> round(gaussian_of_pure(0.1), 3)
  7.98
  """
  stated.positive(epsilon=epsilon)
  mu = -2 * float(special.ndtri(special.expit(-float(epsilon))))
  return math.inf if mu <= 0 else 1 / mu


def each(fn: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
  """Applies `fn` to each row of [n, ...] in a loop, so that rounding does not depend on n.

  The loop has two iterations or more, since the compiler would unroll a loop of one."""
  short = [(0, max(0, 2 - len(rows))), *[(0, 0)] * (rows.ndim - 1)]
  return jax.lax.map(fn, jnp.pad(rows, short))[: len(rows)]


def chunks(inputs: Any, entries: int = 0) -> Iterator[tuple[jax.Array, int]]:
  """Yields chunks (examples [size, positions, channels] in float32, their number without padding).

  The size does not depend on n, and the last chunk is padded with zeros: otherwise n would change
  the rounding of all examples.

  Args:
    inputs: array or `Rows`, [n, ..., channels].
    entries: length of the vector that is computed from one example, if longer than the example.
  """
  library: Any = jnp if isinstance(inputs, jax.Array) else np
  entries = max(entries, math.prod(inputs.shape[1:]))
  # A chunk has at least two examples, so that no loop over examples is unrolled (see `each`).
  size = max(2, min(_CHUNK, _CHUNK_ENTRIES // entries))
  for start in range(0, len(inputs), size):
    # NumPy would warn of values beyond float32, which become infinite.
    with np.errstate(over="ignore"):
      rows = library.asarray(inputs[start : start + size], np.float32)
    rows = rows.reshape(len(rows), -1, inputs.shape[-1])
    short = [(0, size - len(rows)), (0, 0), (0, 0)]
    yield jnp.asarray(library.pad(rows, short)), len(rows)


def _sound(rows: jax.Array) -> jax.Array:
  """Returns rows [n, d]; rows with an entry that is NaN, or of size >= 1e30, are set to zero."""
  sound = (jnp.abs(rows) < HUGE).all(axis=1, keepdims=True)
  return jnp.where(sound, rows, 0.0)


def norm(vector: jax.Array) -> jax.Array:
  """Returns the norm of a vector, [d] -> []; 0 if an entry is NaN, or of size >= 1e30."""
  return _norms(_sound(vector[None]))[0]


def _norms(rows: jax.Array) -> jax.Array:
  """Returns norms, [..., d] -> [...], without overflow or underflow of the squares."""
  top = jnp.maximum(jnp.abs(rows).max(axis=-1, initial=0.0), _TINY)
  return top * jnp.sqrt(jnp.square(rows / top[..., None]).sum(axis=-1))


def clipped_total(rows: jax.Array, clip_norm: Array) -> tuple[jax.Array, jax.Array]:
  """Clips rows [n, d], and returns their exact sum in clip norms as two parts (high, low), [d].

  A row with an entry that is NaN, or of size >= 1e30, counts as zero. Each row is clipped to
  slightly less than norm 1, so that rounding to multiples of 2^-22 keeps it within 1. Then only
  integers are added. Not private.

  >>> high, low = clipped_total(jnp.array([[3.0, 4.0], [0.0, 0.25]]), 1.0)  # doctest: +SLOW
  >>> np.round(np.float64(high + low), 3).tolist()
  [0.6, 1.05]
  """
  margin = 1 - _GRID * (rows.shape[1] + 64)

  def share(row: jax.Array) -> jax.Array:  # clips, and maps [-1, 1] to [0, 1]
    norm = jnp.maximum(_norms(row), _TINY)
    clipped = row / norm * jnp.minimum(norm / clip_norm, margin)
    return jnp.clip((clipped + 1) / 2, 0.0, 1.0)

  whole, fraction = finite.total(each(share, _sound(rows)))
  return 2 * whole - len(rows), 2 * fraction
