"""Image features that are learnt from no data: patches are compared with two dictionaries.

The words of a dictionary are learnt from patches of random images. Each patch of an image is
normalised, described by its largest whitened axes, and compared with every word. What exceeds a
threshold is averaged over the cells of a grid (Coates, Ng and Lee 2011, "An analysis of
single-layer networks in unsupervised feature learning"; Coates and Ng 2011, "The importance of
encoding versus training with sparse coding and vector quantization"). The square roots of these
averages are standardised within each image.

The first dictionary is small, and its grid is fine. Its averages are a new image, with one colour
for each word. A second dictionary is learnt from patches of such images. It is large, and its grid
is 2x2. Its averages are over four moved copies of the image, so they change less when what is seen
moves. A linear map brings them to 4,000 directions of nearly equal size, by their
covariance on the same random images. So steps of a linear model gain nearly equally in all
directions, and fewer directions hold less noise.

All that is learnt here follows from random numbers. So neighbouring data sets have neighbouring
features, which cost no privacy (as in Tang et al. 2023, "learning priors from random processes",
arXiv:2306.06076).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.sparse

from dpjax import validate
from dpjax.models import pooling
from dpjax.types import HostArray, Indexed
from dpjax.validate import UserError

SIDE = 6  # side of a patch, in pixels
WORDS = 1600
DIRECTIONS = 4000
_GRID = 2
# Of the first dictionary: words, axes that describe a patch, and cells a side.
_FIRST_WORDS = 50
_FIRST_AXES = 64
_FIRST_GRID = 9
# Of the second dictionary: axes, and side of a patch, in cells of the first grid.
_AXES = 200
_SECOND_SIDE = 3
_THRESHOLD = 0.5
# A direction's values are divided by the variance of random images to this power. One half would
# make all directions equally large.
_EVENNESS = 0.35
# Numbers that are added to a variance before its root: the variance of a patch's numbers, of an
# axis, of a direction, and of an example.
_PATCH_FLOOR = 10 / 255**2
_AXIS_FLOOR = 0.1
_DIRECTION_FLOOR = 1e-5
_EXAMPLE_FLOOR = 1e-5
# Number of patches from which a dictionary is learnt, and number of rounds of k-means. The seed
# draws patches, and the words of the first round.
_PATCHES = 100_000
_ROUNDS = 10
_SEED = 0
_LARGEST = 96  # largest side of an image, in pixels
_COLOURS = 16  # largest number of colours; learning takes .2 GB for each
_CHUNK = 128
_ROWS = 20_000  # number of patches that are compared at a time


class PatchLayer(NamedTuple):
  """Holds a dictionary of patches; a patch has p = side * side * colours numbers."""

  mean: np.ndarray  # [p], mean of normalised patches
  axes: np.ndarray  # [p, q], whitens patches along q axes
  words: np.ndarray  # [q, k], k words of norm 1


class PatchNetwork(NamedTuple):
  """Holds what is learnt from random images.

  Axes, words and directions are rounded to values of float16. Another number of threads changes the
  last digits of a decomposition. Rounding removes the change, except for a few entries in millions.
  """

  first: PatchLayer  # of patches of pixels
  second: PatchLayer  # of patches of the first layer's averages
  centre: np.ndarray  # [f], mean of the f features of random images
  directions: np.ndarray  # [f, d], whitens features along d directions


def patch_shape(shape: tuple[int, ...]) -> tuple[int, int]:
  """Returns the shape of the features of images of `shape` [n, H, W, C].

  The network is assumed to have WORDS words, and to be learnt from more than DIRECTIONS images.

  Raises:
    UserError: the shape is not that of images, or the images are too small, too large, or of too
      many colours.

  >>> patch_shape((9, 32, 32, 3)), patch_shape((9, 28, 28, 1))
  ((9, 4000), (9, 4000))
  """
  sides = shape[1:3]
  least = SIDE + _GRID - 1
  is_image = len(shape) == 4 and all(least <= side <= _LARGEST for side in sides)
  if not is_image or not 1 <= shape[3] <= _COLOURS:
    # The number of images may be a secret.
    raise UserError(
      f"must be images [n, H, W, C] of {least} to {_LARGEST} pixels a side and 1 to {_COLOURS} "
      f"colours; an example is of shape {tuple(shape[1:])}",
      field="x",
    )
  return (shape[0], min(DIRECTIONS, _GRID**2 * 2 * WORDS))


def learned_patches(images: np.ndarray, *, words: int = WORDS) -> PatchNetwork:
  """Learns the dictionaries and the directions from random images.

  Args:
    images: random images [n, H, W, C] in [0, 1], such as the "random_process" of
      `dpjax.data.load`. A network that is learnt from private images is not public.
    words: size of the second dictionary.

  Returns:
    A network with DIRECTIONS directions, or fewer if there are too few features or images. The
    directions are learnt from mirrored features, and serve features without mirroring, too.

  Raises:
    UserError: the images have another shape, type or range, or are fewer than two; all numbers of
      each image are equal; words < 1.

  >>> images = np.random.default_rng(0).random((40, 8, 8, 1), np.float32)
  >>> network = learned_patches(images, words=5)  # doctest: +LONG
  >>> network.second.words.shape, network.directions.shape
  ((200, 5), (40, 39))
  """
  validate.integer_at_least(1, words=words)
  check_images(images, field="images")
  if len(images) < 2:
    raise UserError("must be at least 2 images", field="images", value=len(images))
  random = np.random.Generator(np.random.PCG64(_SEED))
  first = _learned_layer(images, SIDE, _FIRST_AXES, _FIRST_WORDS, random)
  maps = _over(images, functools.partial(_maps, jax.device_put(first)))
  second = _learned_layer(maps, _SECOND_SIDE, _AXES, words, random)
  held = jax.device_put((first, second))
  averages = _over(images, functools.partial(_averages, *held, mirrored=True))
  features = averages.astype(np.float64)
  centre = features.mean(axis=0)
  # n images have at most n - 1 independent differences from their mean.
  count = min(DIRECTIONS, len(features) - 1)
  directions = _whitening(features - centre, count, _DIRECTION_FLOOR, _EVENNESS)
  return PatchNetwork(first, second, centre.astype(np.float32), _short(directions))


def _over(images: np.ndarray, step: Callable[[np.ndarray], jax.Array]) -> np.ndarray:
  """Applies a step to chunks of images."""
  rows = [np.asarray(step(chunk)) for chunk in _chunks(images, _CHUNK)]
  return np.concatenate(rows)[: len(images)]


def _learned_layer(
  images: np.ndarray, side: int, axes: int, words: int, random: np.random.Generator
) -> PatchLayer:
  """Learns a dictionary of patches of `side` x `side`, each described by `axes` numbers."""
  patches = _draw(images, side, random)
  mean = patches.mean(axis=0)
  patches -= mean
  whitening = _short(_whitening(patches, axes, _AXIS_FLOOR))
  dictionary = _short(_cluster(patches @ whitening, words, random))
  return PatchLayer(mean.astype(np.float32), whitening, dictionary)


def _draw(images: np.ndarray, side: int, random: np.random.Generator) -> np.ndarray:
  """Draws patches [n, p] at random places of random images, and scales each to variance 1.

  The mean of a patch is subtracted. Nearly constant patches get a smaller variance.
  """
  count, height, width, _ = images.shape
  which = random.integers(count, size=_PATCHES)
  top = random.integers(height - side + 1, size=_PATCHES)
  left = random.integers(width - side + 1, size=_PATCHES)
  windows = np.lib.stride_tricks.sliding_window_view(images, (side, side), axis=(1, 2))
  # Windows are [n, C, side, side]. Colours move to the last axis, where convolutions expect them.
  taken = np.moveaxis(windows[which, top, left], 1, -1)
  patches = taken.reshape(_PATCHES, -1).astype(np.float64)
  centred = patches - patches.mean(axis=1, keepdims=True)
  variance = np.square(centred).mean(axis=1, keepdims=True)
  if not variance.any():
    raise UserError("must have patches that are not constant", field="images")
  return centred / np.sqrt(variance + _PATCH_FLOOR)


def _whitening(
  centred: np.ndarray, count: int, floor: float, power: float = 0.5
) -> np.ndarray:
  """Returns the map [p, min(count, n, p)] to the largest principal axes, scaled by their variances.

  Args:
    centred: float64 array [n, p] of mean 0.
    floor: number that is added to a variance before its power.
    power: an axis is divided by its variance to this power.
  """
  rows, width = centred.shape
  count = min(count, rows, width)
  # Rows and columns have the same inner products but for zeros. The smaller matrix is decomposed.
  few = rows < width
  products = (centred @ centred.T if few else centred.T @ centred) / rows
  side = len(products)
  variances, axes = scipy.linalg.eigh(products, subset_by_index=(side - count, side - 1))
  if few:
    axes = centred.T @ axes
    axes /= np.maximum(np.linalg.norm(axes, axis=0), np.finfo(float).tiny)
  # The sign of an axis is arbitrary. Here the entry of largest absolute value becomes positive.
  largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=0)[None], axis=0)
  signed = axes * np.sign(largest)
  scaled = signed / (np.maximum(variances, 0) + floor) ** power
  return scaled[:, ::-1]


def _cluster(points: np.ndarray, words: int, random: np.random.Generator) -> np.ndarray:
  """Returns words [q, k] of norm 1 by spherical k-means, after Coates and Ng (2012, section 2).

  A point joins the word with the largest inner product. In the paper the largest absolute value
  counts.

  Args:
    points: array [n, q] of mean 0.
  """
  chosen = points[random.choice(len(points), words, replace=len(points) < words)]
  centres = chosen / np.linalg.norm(chosen, axis=1, keepdims=True)
  for _ in range(_ROUNDS):
    nearest = np.empty(len(points), np.int32)
    weights = np.empty(len(points))
    for start in range(0, len(points), _ROWS):
      rows = slice(start, start + _ROWS)
      alike = points[rows] @ centres.T
      best = alike.argmax(axis=1)
      nearest[rows] = best
      # The weight of a point is its inner product with its word.
      weights[rows] = np.take_along_axis(alike, best[:, None], axis=1)[:, 0]
    # Each column of `members` has one entry, so a word's points are summed in order. `np.add.at`
    # gives the same bits in ten times the time.
    members = scipy.sparse.csc_array(
      (weights, nearest, np.arange(len(points) + 1)), shape=(words, len(points))
    )
    sums = members @ points
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    # A word that no point has joined keeps its value.
    centres = np.where(norms > 0, sums / np.where(norms > 0, norms, 1), centres)
  return centres.T


def _short(values: np.ndarray) -> np.ndarray:
  return values.astype(np.float16).astype(np.float32)


def check_images(images: Any, *, field: str = "x") -> None:
  """Raises UserError unless images [n, H, W, C] are real numbers in [0, 1], of a size that
  `patch_shape` accepts."""
  _check_kind(images, field)
  for start in range(0, images.shape[0], _CHUNK):
    _check_range(np.asarray(images[start : start + _CHUNK]), field)


def _check_kind(images: Any, field: str) -> None:
  kind = getattr(getattr(images, "dtype", None), "kind", "")
  if kind not in ("f", "u", "i", "b"):
    raise UserError(
      "must be an array of real numbers",
      field=field,
      value=validate.Verbatim(type(images).__name__),
    )
  patch_shape(images.shape)


def _check_range(chunk: np.ndarray, field: str) -> None:
  # NaN fails both comparisons.
  if chunk.size and not (chunk.min() >= 0 and chunk.max() <= 1):
    raise UserError("must hold images in [0, 1], as features of patches need", field=field)


def _chunks(images: Any, size: int) -> Iterator[np.ndarray]:
  """Yields float32 chunks of `size` images, the last filled up with zeros."""
  for start in range(0, images.shape[0], size):
    chunk = np.asarray(images[start : start + size], np.float32)
    missing = size - len(chunk)
    yield np.pad(chunk, ((0, missing), (0, 0), (0, 0), (0, 0)))


def patch_features(
  x: HostArray, network: PatchNetwork, *, mirrored: bool = False
) -> np.ndarray:
  """Computes the patch features of a whole data set.

  Args:
    x: images [n, H, W, C] in [0, 1], of as many colours as the images that `network` was learnt
      from.
    network: result of `learned_patches`.
    mirrored: whether to average over an image and its mirror image (left is right), in twice the
      time.

  Returns:
    float32 [n, d] for d directions. The mean of a row's squares is 1, or less for a nearly constant
    image.

  Raises:
    UserError: the images have another shape, type or number of colours, or a value outside [0, 1].

  Guarantee: a row of the result is a function of the same row of `x` alone. On a CPU this holds bit
  for bit, whatever the place of the row.

  >>> images = np.random.default_rng(0).random((40, 8, 8, 1), np.float32)
  >>> patch_features(images[:2], learned_patches(images, words=5)).shape  # doctest: +LONG
  (2, 39)
  """
  images: Any = x
  rows = list(patch_chunks(images, network, mirrored=mirrored))
  width = network.directions.shape[1]
  return np.concatenate([np.zeros((0, width), np.float32), *rows])


def patch_chunks(
  x: Indexed, network: PatchNetwork, *, mirrored: bool = False
) -> Iterator[np.ndarray]:
  """Yields the rows of `patch_features` in chunks.

  The images need not lie in memory: `x` needs only a shape, a dtype and slices.
  """
  images: Any = x
  validate.flag(mirrored=mirrored)
  if not isinstance(network, PatchNetwork):
    raise UserError(
      "must be what networks.learned_patches returns",
      field="network",
      value=validate.Verbatim(type(network).__name__),
    )
  _check_kind(images, "x")
  colours = len(network.first.mean) // SIDE**2
  if images.shape[3] != colours:
    raise UserError(
      f"must be images of {colours} colours; an example is of shape {tuple(images.shape[1:])}",
      field="x",
    )
  # The directions are large, so they go to the device once, not with each chunk.
  held = jax.device_put(network)
  done = 0
  for chunk in _chunks(images, _CHUNK):
    _check_range(chunk, "x")
    averages = _averages(held.first, held.second, chunk, mirrored=mirrored)
    rows = np.asarray(_along(held.centre, held.directions, averages))
    yield rows[: images.shape[0] - done]
    done += _CHUNK


@jax.jit
def _maps(first: PatchLayer, x: jax.Array) -> jax.Array:
  """Computes the averages of the first layer for images [b, H, W, C]: new images [b, cells, cells,
  2 k] for k words, standardised within each example."""
  return jax.lax.map(functools.partial(_map, first), x)


def _map(first: PatchLayer, image: jax.Array) -> jax.Array:
  # Pixels are shifted towards 0, where mean(x^2) - mean(x)^2 cancels fewer digits.
  averages = _codes(first, image - 0.5, _FIRST_GRID)
  return pooling.standardized_roots(averages.ravel()).reshape(averages.shape)


@functools.partial(jax.jit, static_argnames="mirrored")
def _averages(
  first: PatchLayer, second: PatchLayer, x: jax.Array, *, mirrored: bool
) -> jax.Array:
  """Computes the averages of the second layer for images [b, H, W, C].

  Returns:
    [b, GRID^2 * 2 k] for k words: square roots of the averages, standardised within each example.
  """

  def averages(image: jax.Array) -> jax.Array:
    # The image moves by a pixel along each diagonal. Its border is mirrored.
    padded = jnp.pad(image, ((1, 1), (1, 1), (0, 0)), mode="reflect")
    height, width, _ = image.shape
    corners = itertools.product((0, 2), repeat=2)
    moved = [padded[top : top + height, left : left + width] for top, left in corners]
    one, *others = (_codes(second, _map(first, each), _GRID).ravel() for each in moved)
    return sum(others, one) / 4

  def features(image: jax.Array) -> jax.Array:
    values = averages(image)
    if mirrored:
      values = (values + averages(image[:, ::-1])) / 2
    return pooling.standardized_roots(values)

  # Images are taken one at a time. The maps of one image fit into a CPU's cache, so this is four
  # times as fast. And rounding cannot depend on an image's place in the batch.
  return jax.lax.map(features, x)


def _codes(layer: PatchLayer, image: jax.Array, grid: int) -> jax.Array:
  """Compares patches of an image [H, W, C] with words, and averages the excess over the threshold
  in each cell: [grid, grid, 2 k] for k words."""
  side = math.isqrt(len(layer.mean) // image.shape[2])
  kernel = jnp.asarray(layer.axes).reshape(side, side, image.shape[2], -1)
  shape = (image.shape[0] - side + 1, image.shape[1] - side + 1)
  cells = [pooling.bin_averages(places, grid) for places in shape]
  described = _describe(image, kernel) - (layer.mean @ layer.axes)[None]
  alike = described @ layer.words

  def averages(values: jax.Array) -> jax.Array:
    above = jax.nn.relu(values - _THRESHOLD).reshape(*shape, -1)
    return jnp.einsum("ih,jw,hwk->ijk", *cells, above)

  return jnp.concatenate([averages(alike), averages(-alike)], axis=2)


def _describe(image: jax.Array, kernel: jax.Array) -> jax.Array:
  """Computes the coordinates [places, q] of the normalised patches of an image [H, W, C]."""
  convolved = functools.partial(
    jax.lax.conv_general_dilated,
    window_strides=(1, 1),
    padding="VALID",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
  )
  box = jnp.full((*kernel.shape[:3], 1), 1 / kernel[..., 0].size, kernel.dtype)
  means = convolved(image[None], box)
  variances = jnp.maximum(convolved(jnp.square(image)[None], box) - means * means, 0)
  sums = kernel.sum(axis=(0, 1, 2))[None, None, None]
  described = (convolved(image[None], kernel) - means * sums) * jax.lax.rsqrt(
    variances + _PATCH_FLOOR
  )
  return described.reshape(-1, kernel.shape[3])


@jax.jit
def _along(centre: jax.Array, directions: jax.Array, averages: jax.Array) -> jax.Array:
  """Computes the features [b, d] along the directions, scaled to mean square 1 in each example."""
  values = (averages - centre[None]) @ directions
  size = jnp.square(values).mean(axis=1, keepdims=True)
  return values * jax.lax.rsqrt(size + _EXAMPLE_FLOOR)
