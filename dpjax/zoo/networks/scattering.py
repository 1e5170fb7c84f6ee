"""Order-2 Morlet scattering: fixed, public image features (Bruna and Mallat 2013).

S(x) is `x * phi`, `|x * psi_1| * phi` and `||x * psi_1| * psi_2| * phi`, low-passed and
subsampled by 2**J. Nothing here is estimated from data and every image is transformed on
its own, so the features cost no privacy: neighbouring data sets have neighbouring
features. The filters, padding and subsampling are those of Kymatio 0.3 (Andreux et al.
2020), which Tramèr and Boneh (2021) trained on.

Every wavelet layer is linear before its modulus, so it is computed exactly as three dense
products instead of FFTs. The first is a real DFT along the columns. The second has one small
matrix for each column frequency, which holds padding, row convolution and subsampling for all
angles. The third is the inverse DFT at the sampled columns only. Images are the last axis
throughout, so that no large intermediate is transposed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees, validate
from dpjax.types import DType, HostArray, Indexed
from dpjax.validate import UserError
from dpjax.zoo import random_images
from dpjax.zoo.networks.registry import COLOURS

# Kymatio uses this rounded pi in the norm of its filters, so features here agree with Kymatio's.
_PI = 3.1415
# Product of slant and L. Wavelets are 1 / slant = L / 4 times longer across than along the wave.
_SLANT = 4.0
# Smallest number under the square root. It gives the modulus the gradient 0 at 0.
_TINY = 1e-30
# Rows are orthonormal: light, red minus blue, and red plus blue minus twice green. They are close
# to the principal components of colours in photographs (Buchsbaum and Gottschalk 1983), so no data
# are needed.
_OPPONENT = np.array([[1, 1, 1], [1, 0, -1], [1, -2, 1]]) / np.sqrt([[3], [2], [6]])
# Typical correlation between any two of red, green and blue in photographs.
_COLOUR_CORRELATION = 0.9


class _Bank(NamedTuple):
  """Operators of a wavelet layer with F angles. They take real planes [W, H, N] to moduli
  [W', H', F, N], subsampled."""

  forward: np.ndarray  # [K*2, W] real DFT along W, K = W_padded // 2 + 1
  angles: np.ndarray  # [K, 2*2, H', F, 2*H] pad, convolve and subsample along H
  inverse: np.ndarray  # [W', K*2] inverse real DFT at the sampled columns


class _Lowpass(NamedTuple):
  """Operators of the low-pass filter phi_J. They take planes [W, H, N] to the output grid,
  [W_out, H_out, N]."""

  columns: np.ndarray  # [W_out, W]
  rows: np.ndarray  # [H_out, H]


class _Plan(NamedTuple):
  """All operators for one image size and J scales. A second-order path has two scales j1 < j2."""

  zeroth: _Lowpass
  first: tuple[_Bank, ...]  # [J]
  second: tuple[tuple[_Bank, ...], ...]  # [J][J - 1 - j1]
  lowpass: tuple[_Lowpass, ...]  # [J], on the grid of scale j


def num_channels(J: int = 2, L: int = 8) -> int:
  """Number of scattering paths per colour with J scales and L angles: 1 + J L + L^2 J (J - 1) / 2.

  >>> num_channels(J=2, L=8)
  81
  """
  return 1 + J * L + L * L * J * (J - 1) // 2


def _padded_size(size: int, J: int) -> int:
  return ((size + 2**J) // 2**J + 1) * 2**J


def _gabor(shape: tuple[int, int], sigma: float, theta: float, xi: float, slant: float):
  """Returns the periodised Gabor wave [P1, P2]: exp(i xi u.e_theta) times an elliptic Gaussian.

  u is the position, and e_theta the unit vector of the angle theta.
  """
  rows, cols = shape
  u = np.arange(-2 * rows, 3 * rows)[:, None]
  v = np.arange(-2 * cols, 3 * cols)[None, :]
  along = u * np.cos(theta) + v * np.sin(theta)
  across = v * np.cos(theta) - u * np.sin(theta)
  envelope = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
  wave = envelope * np.exp(1j * xi * along) * slant / (2 * _PI * sigma**2)
  # Convolutions are circular, so the wave is summed over 5 x 5 periods.
  return wave.reshape(5, rows, 5, cols).sum(axis=(0, 2))


def _morlet_hat(shape: tuple[int, int], j: int, angle: int, L: int) -> np.ndarray:
  """Returns the real Fourier transform [P1, P2] of the zero-mean Morlet wavelet at scale 2**j."""
  theta = (int(L / 2 - 1) - angle) * np.pi / L
  sigma = 0.8 * 2**j
  xi = 0.75 * np.pi / 2**j
  wave = _gabor(shape, sigma, theta, xi, _SLANT / L)
  bump = _gabor(shape, sigma, theta, 0.0, _SLANT / L)
  # Subtracting the bump makes the mean 0, so a constant image gives 0.
  return np.fft.fft2(wave - bump * wave.sum() / bump.sum()).real


def _restrict(hat: np.ndarray, res: int) -> np.ndarray:
  """Keeps the lowest frequencies of a filter: every axis [P] -> [P // 2**res]."""
  for axis, size in enumerate(hat.shape):
    half = size // 2 ** (res + 1)
    kept = np.r_[0:half, size - half : size] if res else np.arange(size)
    hat = np.take(hat, kept, axis)
  return hat


def _row_operators(hat: np.ndarray, entry: np.ndarray, stride: int) -> np.ndarray:
  """Returns the row convolution for each column frequency, complex [K, H', H].

  Args:
    hat: filter [P1, K].
    entry: matrix [P1, H] that pads the rows.
    stride: ratio of P1 to H'.
  """
  size = hat.shape[0]
  dft = np.fft.fft(entry, axis=0)  # [P1, H]
  back = np.fft.ifft(np.eye(size), axis=1)[::stride]  # [H', P1]
  return np.einsum("op,pk,ph->koh", back, hat, dft, optimize=True)


def _angle_operators(hats, entry, stride: int) -> np.ndarray:
  """Returns the operators [K, 2*2, H', F, 2*H] of filters [F, P1, P2].

  2*2 stands for (re, im) of the output and (re, im) of the filter, 2*H for (re, im) of the input.
  """
  half = hats.shape[2] // 2 + 1
  # The sum and difference of hat(k) and hat(-k) give the filter's real and imaginary parts.
  mirrored = np.roll(hats[:, ::-1, ::-1], 1, axis=(1, 2))
  real_part = (hats + mirrored) / 2
  imag_part = (hats - mirrored) / 2j
  parts = [
    [_row_operators(hat[:, :half], entry, stride) for hat in part]
    for part in (real_part, imag_part)
  ]
  g: Any = np.stack(parts).transpose(2, 0, 3, 1, 4)  # [K, filter re/im, H', F, H]
  blocks = np.stack([np.stack([g.real, -g.imag], -2), np.stack([g.imag, g.real], -2)], 1)
  return blocks.reshape(half, 4, *g.shape[2:4], -1)


def _bank(hats, entry_rows, entry_cols, stride: int) -> _Bank:
  """Returns the operators of filters `hats` [F, P1, P2] for real planes. The matrices `entry_rows`
  [P1, H] and `entry_cols` [P2, W] pad the planes."""
  size = entry_cols.shape[0]
  spectrum = np.fft.rfft(entry_cols, axis=0)  # [K, W]
  forward = np.stack([spectrum.real, spectrum.imag], 1).reshape(-1, spectrum.shape[1])
  half = size // 2 + 1
  phase = 2j * np.pi * np.outer(np.arange(0, size, stride), np.arange(half)) / size
  # A real DFT keeps half of the frequencies: all but the first and the middle count twice.
  weight = np.where(np.arange(half) % (size // 2) == 0, 1, 2) / size
  wave = np.exp(phase) * weight
  inverse = np.stack([wave.real, -wave.imag], -1).reshape(len(wave), -1)
  angles = _angle_operators(hats, entry_rows, stride)
  return _Bank(*(np.asarray(m, np.float32) for m in (forward, angles, inverse)))


def _lowpass_matrix(size: int, J: int, res: int) -> np.ndarray:
  """Returns phi_J along one axis as a matrix: it smooths the grid of resolution `res`, subsamples
  and crops."""
  sigma = 0.8 * 2 ** (J - 1)
  u = np.arange(-2 * size, 3 * size)
  phi = np.exp(-(u**2) / (2 * sigma**2)).reshape(5, size).sum(0)
  hat = _restrict(np.fft.fft(phi).real / np.sqrt(2 * _PI * sigma**2), res)
  circulant = np.fft.ifft(hat[:, None] * np.fft.fft(np.eye(len(hat)), axis=0), axis=0)
  # The first output lies in the padding. So does the last one if 2**J divides the image's side.
  # Both are cropped, as in Kymatio.
  return circulant.real[:: 2 ** (J - res)][1:-1]


def _lowpass(shape: tuple[int, int], J: int, res: int) -> _Lowpass:
  rows, cols = (_lowpass_matrix(size, J, res) for size in shape)
  return _Lowpass(np.asarray(cols, np.float32), np.asarray(rows, np.float32))


@functools.lru_cache(maxsize=16)
def _plan(shape: tuple[int, int], J: int, L: int) -> _Plan:
  """Returns the operators for images [H, W]: NumPy arrays of a few MB. The last 16 are cached."""
  padded = (_padded_size(shape[0], J), _padded_size(shape[1], J))
  pads = []
  for size in shape:
    # This matrix [P, size] pads by reflection.
    total = _padded_size(size, J) - size
    widths = ((total // 2, (total + 1) // 2), (0, 0))
    pads.append(np.pad(np.eye(size), widths, mode="reflect"))
  hats = [np.stack([_morlet_hat(padded, j, a, L) for a in range(L)]) for j in range(J)]

  def second(j1: int, j2: int) -> _Bank:
    narrowed = np.stack([_restrict(hat, j1) for hat in hats[j2]])
    eyes = (np.eye(size // 2**j1) for size in padded)
    return _bank(narrowed, *eyes, stride=2 ** (j2 - j1))

  whole = _lowpass(padded, J, 0)
  return _Plan(
    zeroth=_Lowpass(whole.columns @ pads[1], whole.rows @ pads[0]),
    first=tuple(_bank(hats[j], *pads, stride=2**j) for j in range(J)),
    second=tuple(tuple(second(a, b) for b in range(a + 1, J)) for a in range(J)),
    lowpass=tuple(_lowpass(padded, J, j) for j in range(J)),
  )


# Computes products in full float32, also on accelerators that would round inputs to fewer bits.
_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _modulus(bank: _Bank, planes: jax.Array) -> jax.Array:
  """Returns |planes * psi| for every angle of a bank: [W, H, ...] -> [W', H', F, ...]."""
  half, _, rows, num_angles, depth = bank.angles.shape
  trailing = planes.shape[2:]
  spectrum = _product("kw,wn->kn", bank.forward, planes.reshape(planes.shape[0], -1))
  matrices = bank.angles.reshape(half, -1, depth)
  mixed = _product("kmq,kqn->kmn", matrices, spectrum.reshape(half, depth, -1))
  waves = _product("wk,kn->wn", bank.inverse, mixed.reshape(2 * half, -1))
  waves = waves.reshape(-1, 2, waves.shape[1] // 2)
  power = jnp.maximum(waves[:, 0] ** 2 + waves[:, 1] ** 2, _TINY)
  return jnp.sqrt(power).reshape(-1, rows, num_angles, *trailing)


def _smooth(low: _Lowpass, planes: jax.Array) -> jax.Array:
  """Returns planes * phi on the output grid: [W, H, ...] -> [W_out, H_out, ...]."""
  return _product(
    "hj,wj...->wh...", low.rows, _product("wi,ij...->wj...", low.columns, planes)
  )


def _second_order(plan: _Plan, j1: int, first: jax.Array) -> jax.Array:
  """Returns the second-order features from the first moduli of scale j1.

  They are [W_out, H_out, paths, N] for moduli [W, H, F, N], with paths = F * F * (J - 1 - j1).
  """
  moduli = (_modulus(bank, first) for bank in plan.second[j1])  # [W', H', F2, F1, N]
  lows = plan.lowpass[j1 + 1 :]
  paths = [_smooth(low, modulus) for low, modulus in zip(lows, moduli)]
  stacked = jnp.swapaxes(jnp.concatenate(paths, axis=2), 2, 3)
  return stacked.reshape(*stacked.shape[:2], -1, stacked.shape[-1])


@jax.jit
def _transform(plan: _Plan, images: jax.Array) -> jax.Array:
  batch, height, width, colours = images.shape
  planes = images.transpose(2, 1, 3, 0).reshape(width, height, -1)  # N = (colour, image)
  first = [_modulus(bank, planes) for bank in plan.first]
  zeroth = _smooth(plan.zeroth, planes)[:, :, None]
  ones = [_smooth(low, u) for low, u in zip(plan.lowpass, first)]
  twos = [_second_order(plan, j, u) for j, u in enumerate(first[:-1])]
  paths = jnp.concatenate([zeroth, *ones, *twos], axis=2)
  paths = paths.reshape(*paths.shape[:3], colours, batch).transpose(4, 1, 0, 3, 2)
  return paths.reshape(*paths.shape[:3], -1)


@jax.jit
def _transform_each(plan: _Plan, images: jax.Array) -> jax.Array:
  """Returns `_transform` of each image by itself.

  In one product of all images, the place of an image decides how its last bits are rounded. One
  record more or fewer would shift all later records, and so change their features. A loop over
  images is as fast on a CPU.
  """
  return jax.lax.map(lambda image: _transform(plan, image[None])[0], images)


def opponent_colours(images: HostArray) -> np.ndarray:
  """Converts red, green, blue [..., 3] to light, red - blue, red + blue - 2 green.

  The matrix is orthonormal. Red, green and blue of a photograph are strongly correlated. The three
  results are nearly uncorrelated, so edges of light and edges of colour become separate features.

  >>> bool(np.allclose(opponent_colours(np.ones((1, 3))), [[3**0.5, 0.0, 0.0]], atol=1e-6))
  True
  """
  return np.asarray(images, np.float32) @ _OPPONENT.T.astype(np.float32)


def _check_colours(colours: str, count: int) -> None:
  validate.one_of(COLOURS, colours=colours)
  if colours == "opponent" and count != 3:
    raise UserError(
      f"needs images of 3 colours, not of {count}", field="colours", value=colours
    )


def _check(images: Any, J: int, L: int) -> tuple[int, int]:
  """Returns (H, W). Raises UserError unless images are floats [B, H, W, C] with H, W >= 2**J."""
  validate.integer_at_least(1, J=J, L=L)
  if len(images.shape) != 4 or not jnp.issubdtype(images.dtype, jnp.floating):
    kind = f"{images.dtype} of shape {tuple(images.shape)}"
    raise UserError(
      f"must be floats [batch, height, width, channels], got {kind}", field="images"
    )
  if min(images.shape[1:3]) < 2**J:
    raise UserError(
      f"sides must be >= 2**J={2**J}", field="images.shape", value=tuple(images.shape)
    )
  return images.shape[1], images.shape[2]


def scattering(images: HostArray, *, J: int = 2, L: int = 8) -> jax.Array:
  """Scattering features of images: [B, H, W, C] -> [B, H // 2**J, W // 2**J, P * C].

  P = `num_channels(J, L)`, 81 by default. Channel c * P + p is path p of colour c. The
  paths are the low-pass, then |x * psi| by (scale, angle), then the second order by (scale,
  angle, second scale, second angle). Images are padded by reflection. Values are computed in
  float32 or wider. The function may be jitted and differentiated. Intermediates take about 1 MB for
  an image of 28x28; use `scattering_features` for whole data sets.

  Guarantee: no example influences the features of another example, and no parameter is fitted.

  Raises:
    UserError: images are not floats [B, H, W, C], or a side is shorter than 2**J.

  >>> features = scattering(jnp.ones((1, 8, 8, 1)))  # constant: only the low-pass is left
  >>> features.shape, round(float(features[0, 0, 0, 0]), 3)
  ((1, 2, 2, 81), 1.0)
  >>> bool(jnp.abs(features[..., 1:]).max() < 1e-5)
  True
  """
  shape = _check(images, J, L)
  return _transform(_plan(shape, J, L), trees.at_least_float32(jnp.asarray(images)))


def scattering_features(
  x: np.ndarray,
  *,
  J: int = 2,
  L: int = 8,
  batch_size: int | None = None,
  mirrored: bool = False,
  colours: str = "rgb",
  dtype: DType = np.float32,
  progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
  """Computes the scattering features of a whole data set in chunks, with one compilation.

  Args:
    x: float images [n, H, W, C].
    J: log2 of the largest scale.
    L: number of angles.
    batch_size: number of images per chunk; None: a number that suits the platform.
    mirrored: whether to average the features of an image and of its mirror image (left is right). A
      linear model then scores both images alike, so half of the noise in its weights has no effect.
    colours: "rgb" keeps the colours, "opponent" applies `opponent_colours` to three colours.
    dtype: type of the result. float16 halves its size and keeps three digits.
    progress: function that is called as progress(images done, n) after each chunk.

  Returns:
    [n, H // 2**J, W // 2**J, num_channels(J, L) * C], see `scattering`. In float32, 60,000
    images take 0.95 GB at 28x28x1 and 3.7 GB at 32x32x3.

  Guarantee: a row of the result is a function of the same row of `x` alone. This holds bit for bit,
  whatever the place of the row and the other rows.

  Raises:
    UserError: in the cases that `scattering` names; for unknown `colours`; for "opponent" without
      three colours.

  >>> scattering_features(np.zeros((3, 8, 8, 1), np.float32), batch_size=2).shape
  (3, 2, 2, 81)
  >>> image = np.arange(64.0, dtype=np.float32).reshape(1, 8, 8, 1)
  >>> both = [scattering_features(x, mirrored=True) for x in (image, image[:, :, ::-1])]
  >>> bool((both[0] == both[1]).all())
  True
  """
  _check(x, J, L)
  count = len(x)
  out = np.empty(features_shape(x.shape, J=J, L=L), dtype)
  done = 0
  options: Any = {"batch_size": batch_size, "mirrored": mirrored, "colours": colours}
  for features in scattering_chunks(x, J=J, L=L, **options):
    out[done : done + len(features)] = features
    done += len(features)
    if progress is not None:
      progress(done, count)
  return out


def features_shape(shape: tuple[int, ...], *, J: int = 2, L: int = 8) -> tuple[int, ...]:
  """Returns the shape of the scattering features of images of `shape` [n, H, W, C].

  >>> features_shape((9, 28, 28, 1))
  (9, 7, 7, 81)
  """
  count, height, width, colours = shape
  return (count, height // 2**J, width // 2**J, num_channels(J, L) * colours)


def scattering_chunks(
  x: Indexed,
  *,
  J: int = 2,
  L: int = 8,
  batch_size: int | None = None,
  mirrored: bool = False,
  colours: str = "rgb",
) -> Iterator[np.ndarray]:
  """Yields the rows of `scattering_features` in float32 chunks, with the same bits.

  The images need not lie in memory: `x` needs only a length, shape, dtype and slices.
  """
  images: Any = x
  shape = _check(images, J, L)
  count = len(x)
  _check_colours(colours, images.shape[3])
  if batch_size is None:
    # Measured on a CPU when a chunk was one product: with 48 planes, which fit into the caches, a
    # plane took half the time that it took with 96. `_transform_each` takes images one at a time.
    planes = 48 if jax.default_backend() == "cpu" else 1024
    batch_size = max(1, planes // images.shape[3])
  validate.integer_at_least(1, batch_size=batch_size)
  # Operators go to the device once, not with each chunk.
  plan = jax.device_put(_plan(shape, J, L))
  for start in range(0, count, batch_size):
    chunk = np.asarray(images[start : start + batch_size], np.float32)
    # The last chunk is filled up with zeros, so one compiled program serves all chunks.
    missing = ((0, batch_size - len(chunk)), (0, 0), (0, 0), (0, 0))
    rows = len(chunk)
    chunk = np.pad(chunk, missing)
    chunk = opponent_colours(chunk) if colours == "opponent" else chunk
    features = _transform_each(plan, chunk)
    if mirrored:
      features = (features + _transform_each(plan, chunk[:, :, ::-1])) / 2
    yield np.asarray(features)[:rows]


@functools.cache
def typical_scales(
  shape: tuple[int, int, int], *, J: int = 2, L: int = 8, colours: str = "rgb"
) -> np.ndarray:
  """Returns the typical size of each scattering channel of images, from no data at all.

  The size is the root mean square over synthetic images of unit variance. Amplitudes of these
  images fall as 1 / frequency, as in photographs (Field 1987), with phases of a fixed seed. A
  second-order channel is tens of times smaller than the low-pass. CIFAR-10's channels, except the
  low-pass, differ by a factor of 24. After division by these sizes they differ by a factor of 2. So
  noise of one size suits them all.

  Args:
    shape: (H, W, C) of an image.
    colours: "rgb" or "opponent". With "opponent", light has (1 + 2 * .9) / (1 - .9) times the
      variance of either other channel. This ratio holds for red, green and blue of correlation .9.

  Returns:
    [num_channels(J, L) * C], positive, in the order of `scattering`; not to be written to.

  >>> scales = typical_scales((8, 8, 2))
  >>> scales.shape, bool((scales > 0).all()), bool(scales[0] > 10 * scales[80])
  ((162,), True, True)
  """
  height, width, count = shape
  _check_colours(colours, count)
  frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width))  # [H, W]
  # The constant part gets amplitude 0.
  frequency[0, 0] = np.inf
  images = random_images.random_phases(np.random.default_rng(0), 64, frequency)
  features = scattering_features(images[..., None].astype(np.float32), J=J, L=L)
  of_one_colour = np.sqrt(np.square(features).mean(axis=(0, 1, 2)))
  of_colours = np.ones(count)
  if colours == "opponent":
    of_colours = np.sqrt(1 + _COLOUR_CORRELATION * np.array([2, -1, -1]))
  scales = np.outer(of_colours, of_one_colour).ravel().astype(of_one_colour.dtype)
  # The next caller gets the same array, so nobody may change it.
  scales.flags.writeable = False
  return scales
