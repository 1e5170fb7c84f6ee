"""Synthetic records from one noisy embedding: features, a generator, and its training.

DP-MERF (Harder, Adamczewski and Park 2021, arXiv:2002.11603) sums unit-norm features of all
records, class by class, and adds Gaussian noise once. It trains a generator until the mean features
of its images are those of the release. The features here are public functions of one record alone:

| part       | features of an image x                               | kernel                       |
| ---------- | ---------------------------------------------------- | ---------------------------- |
| `fourier`  | cos and sin of random frequencies (the paper's)      | exp(-|x - x'|^2 / 2 l^2)     |
| `moments`  | products of two entries of the vector u              | <u, u'>^2                    |
| `count`    | the number 1                                         | 1                            |

The vector u joins a constant and the low frequencies of the image, and is scaled to norm 1. Of a
table, whose rows are vectors in [0, 1], it joins a constant and all columns. Each part has norm 1,
and the parts are joined with weights whose squares sum to 1. So the joint vector has norm 1 for
every record, and one Gaussian release covers all parts together. A noisy number of records of each
class is in the release, so no exact count is used.

`mechanisms.ClassSums` makes the release. Everything in this module after it is post-processing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import validate
from dpjax.types import Params
from dpjax.validate import UserError

# Pixels are whole multiples of 2^-12 and frequencies of 2^-24, so that float64 holds their products
# exactly.
_PIXEL_BITS = 12
_FREQUENCY_BITS = 24
# Size of the constant entry of u before scaling, relative to the length of an image of ones.
_CONSTANT = 0.2
# Number of images whose features are computed at a time. They fit into the processor's cache.
_CHUNK = 64
# A class whose noisy count is below this many standard deviations of the noise counts as empty.
_EMPTY = 4.0
_MOST_PIXELS = 2**12
# Largest random frequency, and largest sum of the frequencies of all pixels. A pixel times a
# frequency is a whole multiple of 2^-(12 + 24). The products of one image sum to at most 2^17,
# which is 2^53 of these units. So float64 adds them exactly in any order.
_MOST_FREQUENCY = 2.0**8
_MOST_FREQUENCIES = 2.0 ** (53 - _PIXEL_BITS - _FREQUENCY_BITS)
# Smallest number that is added to the second moments in the metric of the generator's loss.
_FLOOR = 1e-2


@dataclasses.dataclass(frozen=True)
class Embedding:
  """Public features of an image or of a row of a table, as a vector of norm 1.

  Args:
    shape: shape (H, W, C) of an image, or (d,) of a row. Numbers are clipped to [0, 1].
    num_frequencies: number of frequencies of the part `fourier`; 0 leaves it out.
    length_scale: l of the Gaussian kernel of `fourier`, in units of the distance |x - x'| of
      images.
    side: number of low frequencies of each axis in the part `moments`; 0 leaves it out. Of a row
      any other number takes all columns.
    moments_share: share of `moments` in the squared norm that `moments` and `fourier` have
      together.
    count_share: share of the part `count` in the squared norm.
    seed: public seed of the random frequencies.

  Guarantee: each row follows from its image alone, bit for bit, whatever other images there are.

  >>> embedding = Embedding((4, 4, 1), num_frequencies=3, length_scale=1.0, side=2)
  >>> rows = embedding.rows(np.ones((2, 4, 4, 1)))
  >>> rows.shape, bool(np.allclose(np.linalg.norm(rows, axis=1), 1))
  ((2, 22), True)
  """

  shape: tuple[int, ...]
  num_frequencies: int = 500
  length_scale: float = 10.0
  side: int = 12
  moments_share: float = 0.8
  count_share: float = 0.04
  seed: int = 0

  def __post_init__(self) -> None:
    validate.integer_at_least(0, num_frequencies=self.num_frequencies, side=self.side)
    validate.integer_at_least(0, seed=self.seed)
    validate.open_unit(count_share=self.count_share, moments_share=self.moments_share)
    validate.positive(length_scale=self.length_scale)
    if len(self.shape) not in (1, 3) or math.prod(self.shape) > _MOST_PIXELS:
      raise UserError(
        f"must be images [H, W, C], or rows of a table, of at most {_MOST_PIXELS} numbers",
        field="shape",
        value=tuple(self.shape),
      )
    if not self.num_frequencies and not self.side:
      raise UserError("must be > 0, or side must be", field="num_frequencies", value=0)

  @property
  def weights(self) -> dict[str, float]:
    """Returns the weight of each part in use, by name; the squares sum to 1."""
    features = 1 - self.count_share
    moments = self.moments_share if self.side else 0.0
    if not self.num_frequencies:
      moments = 1.0
    squares = {"fourier": features * (1 - moments), "moments": features * moments}
    return {
      "count": math.sqrt(self.count_share),
      **{name: math.sqrt(square) for name, square in squares.items() if square > 0},
    }

  @property
  def width(self) -> int:
    """Returns the number of features of an image, the count included."""
    return 1 + 2 * self.num_frequencies + (len(self._pairs[0]) if self.side else 0)

  @functools.cached_property
  def frequencies(self) -> np.ndarray:
    """Returns the random frequencies [pixels, m], of std 1 / length_scale; public.

    They are clipped to 2^8 and to 2^17 / pixels. With length scales above .25 none is that large,
    except with probability below 1e-8.
    """
    count = (math.prod(self.shape), self.num_frequencies)
    drawn = np.random.Generator(np.random.Philox(self.seed)).standard_normal(count)
    most = min(_MOST_FREQUENCY, _MOST_FREQUENCIES / count[0])
    # The limit is on the grid of frequencies, so that the rounding below does not exceed it.
    most = math.floor(most * 2.0**_FREQUENCY_BITS) * 2.0**-_FREQUENCY_BITS
    drawn = np.clip(drawn / self.length_scale, -most, most)
    return np.round(drawn * 2.0**_FREQUENCY_BITS) * 2.0**-_FREQUENCY_BITS

  @functools.cached_property
  def low_frequencies(self) -> np.ndarray:
    """Returns the low frequencies of an image as orthonormal columns [pixels, s]; of a row of a
    table the identity, since its columns have no order."""
    if len(self.shape) == 1:
      return np.eye(self.shape[0])
    rows, columns, colours = self.shape
    down = _cosines(rows, min(self.side, rows))
    along = _cosines(columns, min(self.side, columns))
    plane = np.kron(np.kron(down, along), np.eye(colours))
    return np.round(plane * 2.0**_FREQUENCY_BITS) * 2.0**-_FREQUENCY_BITS

  @functools.cached_property
  def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
    return np.triu_indices(1 + self.low_frequencies.shape[1])

  @functools.cached_property
  def _pair_weights(self) -> np.ndarray:
    first, second = self._pairs
    # An entry off the diagonal stands for two equal entries of the symmetric matrix.
    return np.where(first == second, 1.0, math.sqrt(2))

  def rows(self, images: Any) -> np.ndarray:
    """Returns the features [n, width] of images [n, H, W, C], in float64. NOT private.

    An image with NaN or infinity gets a row of NaN, which `mechanisms.ClassSums` counts as zero.
    """
    images = np.asarray(images, np.float64).reshape(len(images), math.prod(self.shape))
    sound = np.isfinite(images).all(axis=1)
    clipped = np.clip(np.where(sound[:, None], images, 0.0), 0.0, 1.0)
    # Pixels are rounded to a grid, so that their products with frequencies are exact. Then a row's
    # last bit does not depend on its place in the batch.
    pixels = np.round(clipped * 2.0**_PIXEL_BITS) * 2.0**-_PIXEL_BITS
    out = np.empty((len(images), self.width))
    out[:, 0] = self.weights["count"]
    start = 1
    if self.num_frequencies:
      angles = pixels @ self.frequencies
      scale = self.weights["fourier"] / math.sqrt(self.num_frequencies)
      out[:, start : start + self.num_frequencies] = scale * np.cos(angles)
      start += self.num_frequencies
      out[:, start : start + self.num_frequencies] = scale * np.sin(angles)
      start += self.num_frequencies
    if self.side:
      unit = self._unit(pixels)
      first, second = self._pairs
      scale = self.weights["moments"] * self._pair_weights
      out[:, start:] = unit[:, first] * unit[:, second] * scale
    out[~sound] = np.nan
    return out

  def chunks(self, images: Any) -> Iterator[np.ndarray]:
    """Yields the features of all images in order, for 64 images or fewer at a time.

    Without images it yields one chunk of 0 rows, so that a release of no data has the right width.
    """
    for start in range(0, max(1, len(images)), _CHUNK):
      yield self.rows(images[start : start + _CHUNK])

  def _unit(self, pixels: np.ndarray) -> np.ndarray:
    """Returns u [n, 1 + s]: a constant and s low frequencies of each image, scaled to norm 1."""
    low = pixels @ self.low_frequencies
    constant = np.full((len(low), 1), _CONSTANT * math.sqrt(pixels.shape[1]))
    joined = np.concatenate([constant, low], axis=1)
    # The constant is above 0, so no row has length 0.
    return joined / np.sqrt(np.square(joined).sum(axis=1, keepdims=True))

  def targets(self, sums: np.ndarray, std: float) -> MeanFeatures:
    """Returns the mean features towards which a generator is trained, from a release.

    Args:
      sums: [K, width], a release of `mechanisms.ClassSums`.
      std: standard deviation of the noise on each entry.
    """
    counts = sums[:, 0] / self.weights["count"]
    present = counts > _EMPTY * std / self.weights["count"]
    means = sums / np.where(present, counts, 1.0)[:, None]
    start = 1 + 2 * self.num_frequencies
    fourier = means[:, 1:start]
    matrices = np.zeros((len(sums), 0, 0))
    metric = np.zeros((0, 0))
    if self.side:
      size = 1 + self.low_frequencies.shape[1]
      matrices = np.zeros((len(sums), size, size))
      first, second = self._pairs
      # The matrix holds plain moments. In the release those off the diagonal are weighted by
      # sqrt(2).
      matrices[:, first, second] = (
        means[:, start:] / self._pair_weights / self.weights["moments"]
      )
      matrices[:, second, first] = matrices[:, first, second]
      total = np.where(present, counts, 0.0)
      mixed = np.einsum("c,cij->ij", total, matrices) / max(total.sum(), 1.0)
      # Spectral norm of the noise on a class of average size (Bai and Yin 1988).
      per_class = max(total.sum(), 1.0) / len(sums)
      floor = std * math.sqrt(2 * size) / per_class / self.weights["moments"]
      values, vectors = np.linalg.eigh(mixed)
      raised = np.maximum(values, 0.0) + max(floor, _FLOOR)
      metric = (vectors / np.sqrt(raised)) @ vectors.T
      matrices = metric @ matrices @ metric
    return MeanFeatures(
      counts=np.where(present, counts, 0.0),
      present=present,
      fourier=fourier.astype(np.float32),
      matrices=matrices.astype(np.float32),
      metric=metric.astype(np.float32),
    )


class MeanFeatures(NamedTuple):
  """Noisy mean features of each class; all of it may be published."""

  counts: Any  # [K] noisy numbers of records; 0 for a class that counts as empty
  present: Any  # [K] bool; False for a class that counts as empty
  fourier: Any  # [K, 2m]
  matrices: Any  # [K, 1 + s, 1 + s] second moments of u, times `metric` from both sides
  metric: Any  # [1 + s, 1 + s] inverse root of (mean moments of all classes + a floor)


def _cosines(length: int, count: int) -> np.ndarray:
  """Returns the first `count` columns of the orthonormal cosine transform: [length, count]."""
  places = (np.arange(length) + 0.5) * np.pi / length
  waves = np.cos(np.outer(places, np.arange(count))) * math.sqrt(2 / length)
  waves[:, 0] /= math.sqrt(2)
  return waves


class Generator(nn.Module):
  """Makes records of classes from random numbers: (z [B, k], labels [B]) -> [B, *shape] in (0, 1).

  The last layer writes low frequencies of images, so that neighbouring pixels are similar from the
  start, and columns of rows. `categories` are the first and the end of the places that hold one
  category of a row: their numbers are above 0 and sum to 1.
  """

  shape: tuple[int, ...]
  num_classes: int
  hidden: int = 256
  side: int = 16
  categories: tuple[tuple[int, int], ...] = ()

  @nn.compact
  def __call__(self, z: jax.Array, labels: jax.Array) -> jax.Array:
    embedding = Embedding(self.shape, num_frequencies=0, side=self.side)
    basis = jnp.asarray(embedding.low_frequencies, jnp.float32)
    classes = jax.nn.one_hot(labels, self.num_classes)
    # Each class scales the units of the first layer, so that classes differ in more than a shift.
    h = nn.Dense(self.hidden)(jnp.concatenate([z, classes], axis=1))
    h = h * (1 + nn.Dense(self.hidden, use_bias=False)(classes))
    h = nn.relu(h)
    h = nn.relu(nn.Dense(self.hidden)(h))
    mean = nn.Dense(basis.shape[1], use_bias=False)(classes)
    coefficients = nn.Dense(basis.shape[1])(h) + mean
    logits = 4.0 * (coefficients @ basis.T)
    # The first logits lie around -2, so that most pixels of the first images are dark.
    images = nn.sigmoid(logits - 2.0)
    for first, end in self.categories:
      images = images.at[:, first:end].set(nn.softmax(logits[:, first:end]))
    return images.reshape(len(z), *self.shape)


@dataclasses.dataclass(frozen=True)
class Synthesis:
  """Trains a generator to the mean features of a release; no record is read.

  Args:
    embedding: the embedding that the release was made with.
    num_classes: public number of classes.
    num_steps: number of updates of the generator.
    per_class: number of generated images of each class in an update, at least 2.
    learning_rate: learning rate of Adam, which falls to 0 along a cosine.
    num_latents: number of random numbers that the generator turns into an image.
    hidden: width of the generator's hidden layers.
    matrix_weight: weight of the part `moments` in the loss, instead of its weight in the release.
    categories: places of the categories of a row (`Generator`).
  """

  embedding: Embedding
  num_classes: int
  num_steps: int = 1000
  per_class: int = 50
  learning_rate: float = 2e-3
  num_latents: int = 32
  hidden: int = 256
  matrix_weight: float = 0.01
  categories: tuple[tuple[int, int], ...] = ()

  def __post_init__(self) -> None:
    validate.integer_at_least(1, num_classes=self.num_classes, num_steps=self.num_steps)
    # The loss needs pairs of two different images of a class.
    validate.integer_at_least(2, per_class=self.per_class)

  @property
  def generator(self) -> Generator:
    """Returns the network that makes images of the embedding's shape from z and labels."""
    return Generator(
      shape=self.embedding.shape,
      num_classes=self.num_classes,
      hidden=self.hidden,
      categories=self.categories,
    )

  @property
  def optimizer(self) -> optax.GradientTransformation:
    """Returns Adam with a learning rate that falls to 0 at step `num_steps`."""
    return optax.adam(optax.cosine_decay_schedule(self.learning_rate, self.num_steps))

  def init(self, key: jax.Array) -> Params:
    """Returns the first parameters of the generator, drawn from `key`."""
    z = jnp.zeros((1, self.num_latents))
    return self.generator.init(key, z, jnp.zeros(1, jnp.int32))

  def images(self, params: Params, key: jax.Array, labels: Any) -> Any:
    """Returns one image for each of the labels [B], drawn from `key`: [B, H, W, C]."""
    z = jax.random.normal(key, (len(labels), self.num_latents))
    return self.generator.apply(params, z, labels)

  def loss(self, params: Params, key: jax.Array, targets: MeanFeatures) -> jax.Array:
    """Returns the squared distance between generated and target mean features, up to a constant.

    It is unbiased for any number of images, as pairs of an image with itself are left out. With
    these pairs the generator would be trained to less variety.
    """
    labels = jnp.repeat(jnp.arange(self.num_classes), self.per_class)
    pixels = self.images(params, key, labels).reshape(len(labels), -1)
    unbiased = self.per_class / (self.per_class - 1)
    present = jnp.asarray(targets.present, jnp.float32)
    total = jnp.float32(0)
    embedding = self.embedding
    weights = embedding.weights
    by_class = (self.num_classes, self.per_class, -1)
    if embedding.num_frequencies:
      angles = pixels @ jnp.asarray(embedding.frequencies, jnp.float32)
      scale = weights["fourier"] / math.sqrt(embedding.num_frequencies)
      waves = scale * jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1)
      mean = waves.reshape(by_class).mean(axis=1)
      # The product of a row with itself is the square of the weight. These products are left out.
      alone = weights["fourier"] ** 2 / (self.per_class - 1)
      squares = unbiased * jnp.square(mean).sum(axis=1) - alone
      total += jnp.sum(present * (squares - 2 * (mean * targets.fourier).sum(axis=1)))
    if embedding.side:
      low = pixels @ jnp.asarray(embedding.low_frequencies, jnp.float32)
      constant = jnp.full((len(low), 1), _CONSTANT * math.sqrt(pixels.shape[1]))
      joined = jnp.concatenate([constant, low], axis=1)
      unit = joined / jnp.linalg.norm(joined, axis=1, keepdims=True)
      # The metric raises the weight of directions in which u is small in most images.
      unit = (unit @ targets.metric).reshape(by_class)
      mean = jnp.einsum("cbi,cbj->cij", unit, unit) / self.per_class
      # Products of an image with itself are left out: they make the squared mean too large.
      each = jnp.square(jnp.square(unit).sum(axis=2)).mean(axis=1) / self.per_class
      squares = unbiased * (jnp.square(mean).sum(axis=(1, 2)) - each)
      cross = (mean * targets.matrices).sum(axis=(1, 2))
      total += self.matrix_weight * jnp.sum(present * (squares - 2 * cross))
    return total

  def update_fn(self) -> Callable[..., tuple[Params, Any, jax.Array]]:
    """Returns a function that makes n updates.

    It maps (params, optimizer state, keys [n], targets) to (params, optimizer state, mean loss).
    """
    optimizer = self.optimizer

    @jax.jit
    def updates(
      params: Params, state: Any, keys: jax.Array, targets: MeanFeatures
    ) -> tuple[Params, Any, jax.Array]:
      def update(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        before, held = carry
        loss, grads = jax.value_and_grad(self.loss)(before, key, targets)
        change, held = optimizer.update(grads, held, before)
        return (optax.apply_updates(before, change), held), loss

      (params, state), losses = jax.lax.scan(update, (params, state), keys)
      return params, state, losses.mean()

    return updates
