"""Files of a run's trade-off curve and privacy loss, which others can read and compose.

- `trade_off.csv`: a header `alpha,beta`, then the corners of the curve. Whatever the test, at a
  false positive rate of at most alpha its false negative rate is at least beta. The curve is
  straight between two rows, so interpolation by lines keeps the bound.
- `privacy_loss.npz`: the privacy loss distribution in the form of dp_accounting. Each direction
  holds the arguments of its `DensePLDPmf`: `remove_discretization`, `remove_lower_loss`,
  `remove_probs`, `remove_infinity_mass`, and the same with `add_` where adding a record differs
  from removing it. All estimates are pessimistic.

An untrusted file is read as data, never as code. A file that cannot bound any mechanism is refused
by an error of one line.
"""

from __future__ import annotations

import csv
import io
import os
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld_lib

from dpjax import files, validate
from dpjax.accounting.epsilon import Counting, loss_distribution
from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.accounting.loss_grid import LossMasses, masses_of, pld_of
from dpjax.accounting.trade_off import TradeOff
from dpjax.validate import UserError

CURVE = "trade_off.csv"
LOSSES = "privacy_loss.npz"
_HEADER = ("alpha", "beta")
_FIELDS = ("discretization", "lower_loss", "probs", "infinity_mass")
# Limits on a file that is read: rows of a curve, masses of one direction, bytes of an unpacked npz,
# bytes of a text.
_MOST_ROWS = 10**6
_MOST_MASSES = 10**7
_MOST_BYTES = 2**30
_MOST_TEXT = 2**26
# Rounding that is allowed in the rules of a curve, and in the total of 1e6 masses from an FFT.
_ROUNDING = 1e-9
# Largest surplus of a total mass above 1, and largest mass that `_lift` moves. Connecting the
# dots leaves a surplus of 3e-9 per step.
_SURPLUS = 1e-2


def write_curve(pairs: TradeOff, path: str | os.PathLike) -> None:
  """Writes the corners of a trade-off curve as CSV, atomically; see `read_curve`."""
  text = io.StringIO()
  writer = csv.writer(text, lineterminator="\n")
  writer.writerow(_HEADER)
  alphas, betas = pairs.points()
  # A Python float is written as the shortest text that reads back as the same number.
  writer.writerows(zip(map(float, alphas), map(float, betas)))
  files.replace_file(path, text.getvalue().encode())


def read_curve(path: str | os.PathLike) -> tuple[np.ndarray, np.ndarray]:
  """Returns false positive rates and the least false negative rate at each, [k] and [k].

  Raises:
    UserError: the file cannot be read, has another header, or has an entry that is no number in
      [0, 1]. Or the alphas do not rise from 0 to 1. Or no mechanism has such betas: they rise, are
      above 1 - alpha, or are not convex.

  >>> import tempfile
  >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
  ...   _ = file.write("alpha,beta\\n0,1\\n0.2,0.2\\n1,0\\n")
  ...   file.flush()
  ...   alphas, betas = read_curve(file.name)
  >>> np.interp(0.1, alphas, betas).round(3)
  np.float64(0.6)
  """
  with validate.about("curve", str(path)[-120:]):
    return _curve(_rates(_text(path).splitlines()))


def _curve(rates: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
  """Returns the rates; raises UserError if no mechanism has them."""
  alphas, betas = rates
  if len(alphas) < 2 or alphas[0] != 0 or alphas[-1] != 1:
    raise UserError("alpha must go from 0 to 1")
  widths = np.diff(alphas)
  if (widths <= 0).any():
    raise UserError("alpha must rise from row to row")
  # A curve is convex if each inner point lies on or below the line between its neighbours.
  share = widths[:-1] / (widths[:-1] + widths[1:])
  chord = betas[:-2] + share * (betas[2:] - betas[:-2])
  # Rule of a trade-off function -> values that must not be above 0.
  excess = {
    "beta must never rise with alpha": np.diff(betas),
    "beta must be at most 1 - alpha, which a guess reaches": betas + alphas - 1,
    "beta must be convex in alpha": betas[1:-1] - chord,
  }
  for rule, values in excess.items():
    if (values > _ROUNDING).any():
      raise UserError(rule)
  return alphas, betas


def _rates(lines: list[str]) -> tuple[np.ndarray, np.ndarray]:
  """Returns the columns alpha, [k], and beta, [k]; raises UserError if a line is not two rates."""
  if not lines or tuple(lines[0].split(",")) != _HEADER:
    raise UserError("must begin with the header alpha,beta")
  if len(lines) > _MOST_ROWS:
    raise UserError(f"must have at most {_MOST_ROWS} rows")
  rows = []
  for number, line in enumerate(lines[1:], start=2):
    try:
      alpha, beta = map(float, line.split(","))
    except ValueError:
      raise UserError(f"row {number} must be two numbers, alpha,beta") from None
    # NaN compares as false, so it is refused here, too.
    if not (0 <= alpha <= 1 and 0 <= beta <= 1):
      raise UserError(f"row {number} must be two rates in [0, 1]")
    rows.append((alpha, beta))
  alphas, betas = np.array(rows, float).reshape(-1, 2).T
  return alphas, betas


def write_losses(
  event: DpEvent, path: str | os.PathLike, **counting: Unpack[Counting]
) -> bool:
  """Writes the privacy loss distribution of an event as npz, atomically; see `read_losses`.

  Guarantee: an upper bound. A bound on the rounding errors is added to the mass at infinity.

  Returns:
    Whether a file was written: False if `loss_distribution` returns None, as for Renyi DP.

  Raises UserError as `loss_distribution` does.
  """
  counted = loss_distribution(event, **counting)
  if counted is None:
    return False
  pld, rounding = counted
  arrays: dict[str, Any] = {}
  for name, part in zip(("remove", "add"), masses_of(pld)):
    arrays[f"{name}_discretization"] = np.float64(part.interval)
    arrays[f"{name}_lower_loss"] = np.int64(part.lowest)
    # The Fourier transform leaves masses of about -1e-18, which `read_losses` would refuse.
    arrays[f"{name}_probs"] = np.maximum(part.probs, 0.0)
    arrays[f"{name}_infinity_mass"] = np.float64(min(1.0, part.infinity_mass + rounding))
  files.replace_file(path, lambda file: np.savez_compressed(file, **arrays))
  return True


def read_losses(path: str | os.PathLike) -> pld_lib.PrivacyLossDistribution:
  """Returns the privacy loss distribution in a file. It composes with others of equal interval.

  Raises:
    UserError: there is no such file, it is no npz, or it has other entries. Or masses are NaN or
      negative, or their sum is not 1. Or losses would cancel losses of another distribution in a
      composition.

  Guarantee: a composition of another distribution with the result never has a smaller delta than
  the other distribution alone.

  >>> import pathlib, tempfile
  >>> from dpjax.accounting import gaussian_event
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   path = pathlib.Path(folder) / "privacy_loss.npz"
  ...   _ = write_losses(gaussian_event(2.0), path)
  ...   twice = read_losses(path).self_compose(2)
  >>> round(twice.get_epsilon_for_delta(1e-5), 2)  # as one Gaussian of 2 / sqrt(2)
  2.94
  """
  with validate.about("losses", str(path)[-120:]):
    return _distribution(_arrays(path))


def _distribution(arrays: Mapping[str, np.ndarray]) -> pld_lib.PrivacyLossDistribution:
  """Returns the distribution that these arrays hold; raises UserError if they hold none."""
  names = {f"remove_{field}" for field in _FIELDS}
  both = names | {f"add_{field}" for field in _FIELDS}
  if set(arrays) not in (names, both):
    raise UserError(
      "must hold remove_discretization, remove_lower_loss, remove_probs and "
      "remove_infinity_mass, and all or none of the same of add_"
    )
  parts = [_masses_of(arrays, "remove")]
  if set(arrays) == both:
    parts.append(_masses_of(arrays, "add"))
    if parts[0].interval != parts[1].interval:
      raise UserError("both directions must have one discretization")
  return pld_of(parts)


def _text(path: str | os.PathLike) -> str:
  validate.no_pipe(path)
  try:
    if pathlib.Path(path).stat().st_size > _MOST_TEXT:
      raise UserError(f"must be at most {_MOST_TEXT} bytes")
    return pathlib.Path(path).read_text(encoding="utf-8")
  except OSError as error:
    raise UserError(f"cannot be read ({error.strerror})") from None
  except UnicodeDecodeError:
    raise UserError("must be text") from None


def _arrays(path: str | os.PathLike) -> dict[str, np.ndarray]:
  """Returns the arrays of an npz. No array may hold objects, since a pickle is code."""
  validate.no_pipe(path)
  try:
    with zipfile.ZipFile(path) as archive:
      # The declared unpacked size is checked before anything is unpacked.
      if sum(entry.file_size for entry in archive.infolist()) > _MOST_BYTES:
        raise UserError(f"must unpack to at most {_MOST_BYTES} bytes")
    with np.load(path, allow_pickle=False) as archive:
      return dict(archive)
  except OSError as error:
    reason = error.strerror or "no npz"
    raise UserError(f"cannot be read ({reason})") from None
  # NumPy reads the header as Python source, and the shape in it may exceed the memory. So damaged
  # bytes may raise errors of zip, zlib, Python's parser, the memory or integers.
  except Exception as error:
    if isinstance(error, UserError):
      raise
    raise UserError("must be an npz of numbers") from None


def _masses_of(arrays: Mapping[str, np.ndarray], name: str) -> LossMasses:
  """Returns the masses of one direction. Raises UserError if no mechanism can have these masses."""
  values = {field: arrays[f"{name}_{field}"] for field in _FIELDS}
  probs = values.pop("probs")
  if any(value.shape != () or value.dtype.kind not in "iuf" for value in values.values()):
    raise UserError(f"{', '.join(f'{name}_{field}' for field in values)} must be numbers")
  if probs.ndim != 1 or probs.dtype.kind != "f" or not 1 <= len(probs) <= _MOST_MASSES:
    raise UserError(f"{name}_probs must be 1 to {_MOST_MASSES} floats in a row")
  interval = float(values["discretization"])
  infinity_mass = float(values["infinity_mass"])
  validate.positive(**{f"{name}_discretization": interval})
  lowest = float(values["lower_loss"])
  # NaN fails this comparison, so it is refused, too.
  if not (abs(lowest) < 2**53 and lowest == int(lowest)):
    raise UserError(f"{name}_lower_loss must be an integer")
  if not (0 <= infinity_mass <= 1 and np.isfinite(probs).all() and (probs >= 0).all()):
    raise UserError(
      f"{name}_probs and {name}_infinity_mass must be probabilities, not NaN or negative"
    )
  total = float(probs.sum()) + infinity_mass
  # Missing mass would claim too much privacy. On a pessimistic grid the total may slightly exceed
  # 1.
  if not 1 - _ROUNDING <= total <= 1 + _SURPLUS:
    raise UserError(f"{name}_probs and {name}_infinity_mass must sum to 1, not {total!r}")
  # Mass that is missing by rounding is added at infinity, since over many compositions the missing
  # mass would add up.
  infinity_mass = min(1.0, infinity_mass + max(0.0, 1 - total))
  masses = LossMasses(interval, int(lowest), np.array(probs, float), infinity_mass)
  return _lift(masses, f"{name}_probs")


def _lift(masses: LossMasses, field: str) -> LossMasses:
  """Returns masses that never lower the cost of a mechanism with which they are composed.

  For a mechanism's pair P and Q, sum p e^-loss is the mass that Q has where P has mass, so this sum
  is at most 1. If the sum is more, losses below 0 cancel losses of other mechanisms. For example,
  with a mass of 1 at -20 a run of epsilon 10 would seem to cost nothing. Otherwise nothing is
  cancelled, by Jensen's inequality: delta of the other mechanism is convex in e^epsilon, and falls.

  The Fourier transform leaves masses of about 1e-18 at losses as low as -40, where e^-loss is e^40.
  The lowest masses are lifted to loss 0, which is pessimistic, until the sum is small enough.
  """
  losses = masses.losses
  probs = masses.probs
  with np.errstate(over="ignore", invalid="ignore"):
    weights = np.where(probs > 0, probs * np.exp(-losses), 0.0)
  # Entry k of `above + below` is the sum after the k lowest masses are lifted to the loss 0. It
  # falls with k while the lifted losses are below 0.
  above = np.append(np.cumsum(weights[::-1])[::-1], 0.0)
  below = np.append(0.0, np.cumsum(probs))
  enough = above + below <= max(1.0, below[-1] + masses.infinity_mass)
  lifts = int(np.argmax(enough))
  lifted = float(below[lifts])
  if not enough.any() or lifted > _SURPLUS:
    raise UserError(
      "the sum of probs e^-loss must be at most 1, or they would cancel other losses",
      field=field,
    )
  if not lifts:
    return masses
  zero = -masses.lowest
  infinity_mass = masses.infinity_mass
  probs[:lifts] = 0.0
  if zero < len(probs):
    probs[zero] += lifted
  else:
    infinity_mass = min(1.0, infinity_mass + lifted)
  return masses._replace(infinity_mass=infinity_mass)
