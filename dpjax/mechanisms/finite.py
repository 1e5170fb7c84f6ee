"""Finite precision: exact values before the noise, a public grid after it.

Guarantees are proved for real numbers. With floats four things could break them:

| fault                                             | what is done here                      |
| ------------------------------------------------- | -------------------------------------- |
| a value is rounded before its noise (integers     | it is split into two floats by `pair`; |
| above 2^24, float64 without x64)                  | their sum is off by <= 2^-25 scales    |
| a float sum moves by more than its sensitivity    | sums are sums of integers: `total`     |
| outputs lie on a lattice that the value decides   | they are rounded to multiples of a     |
| (Mironov 2012)                                    | public step: `add_noise`                  |
| noise is lost beside large scores (1e30)          | scores are taken relative to the       |
|                                                   | largest one: `gaps`                    |

The step is the power of two between scale / 2^8 and scale / 2^7. It is NOT proved that a grid point
has the chance that rounded real noise would give it: a cell of the grid holds only a limited number
of floats. The two chances differ by a factor of 1 +- 2^-13 within four scales of the value, and of
1 +- 2^-9 at 40 scales (2^-42 and 2^-38 in float64). This factor holds for ONE number. For d
numbers, of one release or of several, the factor is about its sqrt(d)-th power. So float32 is too
coarse for an epsilon much below 2^-10, or for 10^8 numbers at epsilon 1; use x64 there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from dpjax.noise import source
from dpjax.validate import UserError, Verbatim

Numbers = Any  # what NumPy or JAX reads as an array of real numbers, or refuses
# The grid of outputs is this many bits finer than the noise's scale.
GRID_BITS = 7
# Sums are taken over parts of this many bits, so that sums over 2^24 records fit 32 bits.
_LIMB = 8
# Up to this many records, sums of 8-bit parts fit uint32, and float32 holds every count exactly.
MAX_RECORDS = 2**24
# float64 holds every integer up to this one.
_MOST_INT = 2**53


def _kind(value: Any) -> str:
  return f"{getattr(value, 'dtype', type(value).__name__)}{getattr(value, 'shape', '')}"


def array(name: str, value: Numbers) -> Any:
  """Returns `value` as a NumPy or JAX array; raises UserError unless it holds real numbers.

  >>> array("value", "three")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: value: must be real numbers, not <U5()
  """
  if not isinstance(value, jax.Array):
    value = _from_host(name, value)
  floats = any(value.dtype == kind for kind in source.FLOATS)
  if not (floats or is_integer(value) or value.dtype == bool):
    raise UserError(f"must be real numbers, not {_kind(value)}", field=name)
  return value


def _from_host(name: str, value: Any) -> Any:
  try:
    on_host = np.asarray(value)
  except jax.errors.TracerArrayConversionError:
    on_host = jnp.asarray(value)
  except (TypeError, ValueError, OverflowError):
    raise UserError(
      f"must be an array of real numbers, not {_kind(value)}", field=name
    ) from None
  # JAX has no type wider than float64.
  return on_host.astype(np.float64) if on_host.dtype == np.longdouble else on_host


def is_integer(value: Numbers) -> bool:
  """Returns whether an array has an integer dtype; bool does not count."""
  return bool(jnp.issubdtype(value.dtype, jnp.integer))


def _too_wide(value: Any) -> bool:
  """Returns whether JAX, without x64, would cut these 64-bit NumPy numbers to 32 bits."""
  host = isinstance(value, np.ndarray)
  return host and jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype


def _known(value: Any) -> bool:
  return not isinstance(value, core.Tracer)


def finite(name: str, value: Numbers) -> None:
  """Raises UserError unless every entry is finite; traced values are not checked."""
  if _known(value) and not np.all(np.isfinite(value)):
    raise UserError("must be finite, for nothing bounds what noise would hide", field=name)


def _exact_floats(name: str, value: np.ndarray) -> np.ndarray:
  """Converts 64-bit host numbers to float64; UserError for integers beyond 2^53."""
  # Integers are compared before the cast, which would round 2^53 + 1 to 2^53.
  if value.dtype.kind in "iu" and np.any((value > _MOST_INT) | (value < -_MOST_INT)):
    raise UserError("integers beyond 2^53 are not supported", field=name)
  return value.astype(np.float64)


def _to_float32(value: np.ndarray) -> jax.Array:
  # NumPy would warn of numbers that are infinite or zero in float32.
  with np.errstate(over="ignore", under="ignore"):
    return jnp.asarray(value.astype(np.float32))


def _integer_pair(value: jax.Array, step: float = 1.0) -> tuple[jax.Array, jax.Array]:
  """Splits integers into floats (high, low) whose sum is exact. Unless `step` is very small, `low`
  is so small that `snap` can still round low + noise to a multiple of `step`."""
  # Types of 8 or 16 bits are too small for the split.
  value = value.astype(jnp.int32) if value.dtype.itemsize < 4 else value
  wide = value.dtype.itemsize == 8
  most, least, dtype = (32, 11, jnp.float64) if wide else (12, 8, jnp.float32)
  # 2^bits_left is half of the largest number that `snap` still rounds to a multiple of `step`.
  bits_left = jnp.finfo(dtype).nmant - 1 + math.frexp(step)[1] - 1
  bits = int(min(max(bits_left, least), most))
  low = value & jnp.asarray(2**bits - 1, value.dtype)
  return (value - low).astype(dtype), low.astype(dtype)


def pair(name: str, value: Numbers, scale: float) -> tuple[jax.Array, jax.Array]:
  """Splits `value` into floats (high, low); noise of `scale` is added to low.

  The sum high + low is exact; for 64-bit numbers without x64 it may be off by 2^-25 of `scale`.
  A float of a type that JAX can hold becomes low, and high is 0. Raises UserError for NaN, infinity
  and 64-bit numbers that are too large for float32 beside noise of this scale. The last error
  itself reveals something of the value: keep values within public bounds, or enable x64.

  >>> high, low = pair("value", np.array([2**24 + 1]), 1.0)
  >>> int(high[0]) + int(low[0]) == 2**24 + 1
  True
  """
  value = array(name, value)
  finite(name, value)
  if _too_wide(value):
    # int64 is NumPy's default, but most int64 arrays hold numbers that fit int32.
    whole = value.dtype.kind in "iu"
    if not (whole and bool(np.all((value >= -(2**31)) & (value < 2**31)))):
      return _wide_pair(name, value, scale)
  value = jnp.asarray(value.astype(np.int32) if _too_wide(value) else value)
  if is_integer(value) or value.dtype == bool:
    return _integer_pair(value, fine_step(scale))
  low = source.as_floats(value)
  return jnp.zeros_like(low), low


def _wide_pair(name: str, value: np.ndarray, scale: float) -> tuple[jax.Array, jax.Array]:
  scale = source.check_scale(scale, jnp.float32, "scale")
  value = _exact_floats(name, value)
  # The unit is a power of two, so that division by it is exact.
  unit = 2.0 * source.grid_step(scale, 0)
  if np.any(np.abs(value) > MAX_RECORDS * unit):
    raise UserError(
      f"beyond 2^24 times the noise's scale={scale:.6g}, float32 cannot hold the "
      "sum; enable x64",
      field=name,
    )
  high = np.round(value / unit) * unit
  return _to_float32(high), _to_float32(value - high)


def fine_step(scale: float) -> float:
  """Returns the public grid step, to which outputs with noise of `scale` are rounded.

  >>> fine_step(1.0) == 2.0**-7
  True
  """
  return source.grid_step(scale, GRID_BITS)


def add_noise(
  draw: Callable,
  key: jax.Array,
  high: jax.Array,
  low: jax.Array,
  scale: Any,
  step: float | None = None,
) -> jax.Array:
  """Computes high + low + draw(key, low, scale), rounded to a multiple of `step`.

  The small parts are added first, so that no bit of the value is lost. `step=None` stands for
  `fine_step(scale)`. Under jit the scale has no known value, so the step must be passed.

  >>> out = add_noise(source.laplace, jax.random.key(0), jnp.zeros(3), jnp.ones(3), 1.0)
  >>> bool((out * 2**7 == jnp.round(out * 2**7)).all())
  True
  """
  scale = source.check_scale(scale, low.dtype, "scale")
  step = fine_step(scale) if step is None else step
  # The part of high below the step joins the small sum, so that the result is a multiple of the
  # step. It is 0 unless the step is larger than the unit of high.
  beside = jnp.remainder(high, step)
  noisy = source.snap((low + beside) + draw(key, low, scale), step)
  return (high - beside) + noisy


def units(name: str, values: Numbers, lower: float, upper: float) -> jax.Array:
  """Clips each value to [lower, upper] and returns its relative position, 0 to 1; NaN is 1/2.

  >>> units("values", jnp.array([-5.0, 2.0, jnp.nan, jnp.inf]), 0.0, 10.0).tolist()
  [0.0, 0.20000000298023224, 0.5, 1.0]
  """
  values = array(name, values)
  lower = float(lower)
  upper = float(upper)
  # The bounds are halved first, since the difference of two finite bounds may overflow.
  half = upper / 2 - lower / 2
  if _too_wide(values):
    _check_bounds(lower, upper, jnp.float32)
    with np.errstate(invalid="ignore", over="ignore"):
      share = (values.astype(np.float64) / 2 - lower / 2) / half
    values = _to_float32(np.clip(share, 0, 1))
    return jnp.where(jnp.isnan(values), 0.5, values)
  values = jnp.asarray(values)
  if not any(values.dtype == kind for kind in source.FLOATS):
    wide = values.dtype.itemsize == 8
    values = values.astype(jnp.float64 if wide else jnp.float32)
  values = source.as_floats(values)
  _check_bounds(lower, upper, values.dtype)
  share = jnp.clip((values / 2 - lower / 2) / half, 0, 1)
  return jnp.where(jnp.isnan(share), 0.5, share)


def _check_bounds(lower: float, upper: float, dtype: Any) -> None:
  """Raises UserError unless `dtype` can hold the bounds and their difference."""
  info = jnp.finfo(dtype)
  if upper - lower > float(info.max) or upper / 2 - lower / 2 < float(info.tiny):
    raise UserError(
      f"with lower={lower!r} outside of what {jnp.dtype(dtype)} can hold",
      field="upper",
      value=upper,
    )
  if max(abs(lower), abs(upper)) > float(info.max):
    raise UserError(
      f"beyond {jnp.dtype(dtype)}",
      field="upper",
      value=Verbatim(f"{upper!r}, lower={lower!r}"),
    )


def total(shares: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Rounds shares in [0, 1] to multiples of 2^-23 (2^-38 in float64), and sums them exactly over
  axis 0. Returns (whole number, fraction in [0, 1)).

  A float sum would depend on the order, and one record could move the sum by more than 1.

  >>> whole, fraction = total(jnp.full(1000, 0.75))
  >>> float(whole), float(fraction)
  (750.0, 0.0)
  """
  if len(shares) > MAX_RECORDS:
    raise UserError(f"must be at most {MAX_RECORDS} records", field="values")
  if shares.dtype == jnp.float64:
    summed = jnp.sum(jnp.round(shares * 2.0**38).astype(jnp.int64), axis=0)
    fraction = summed & (2**38 - 1)
    return (summed >> 38).astype(shares.dtype), fraction.astype(shares.dtype) * 2.0**-38
  # A share of 24 bits is cut into three parts of 8 bits, whose sums fit 32 bits.
  counts = jnp.round(shares * 2.0**23).astype(jnp.uint32)
  carry = jnp.uint32(0)
  limbs = []
  for place in range(3):
    limb = (counts >> (_LIMB * place)) & 0xFF
    carry = jnp.sum(limb, axis=0, dtype=jnp.uint32) + carry
    if place < 2:
      limbs.append(carry & 0xFF)
      carry = carry >> _LIMB
  fraction = ((carry & 0x7F) << (2 * _LIMB)) | (limbs[1] << _LIMB) | limbs[0]
  return (carry >> 7).astype(jnp.float32), fraction.astype(jnp.float32) * 2.0**-23


def above(name: str, values: Numbers, public: float) -> jax.Array:
  """Returns values - public as floats, to be compared with noise.

  Large integers lose no digits before the subtraction.

  >>> above("queries", np.array([2**24 + 1]), 2.0**24).tolist()
  [1.0]
  """
  values = array(name, values)
  finite(name, values)
  if _too_wide(values):
    with np.errstate(over="ignore"):
      return _to_float32(_exact_floats(name, values) - public)
  values = jnp.asarray(values)
  if is_integer(values) or values.dtype == bool:
    high, low = _integer_pair(values)
    # The public number is split like the values, so that the large parts cancel without rounding.
    near = float(round(public / 2**12) * 2**12)
    return (high - near) + (low - (public - near))
  return source.as_floats(values) - public


def gaps(name: str, scores: Numbers) -> tuple[jax.Array, jax.Array]:
  """Returns scores [..., k] minus the largest of their row, and which rows are valid, [...] bool.

  A row is invalid if it holds NaN or +infinity, or nothing but -infinity. Then UserError is raised.
  For traced scores nothing is raised, and the second result is False for an invalid row.

  >>> gaps("scores", jnp.array([1e30, 1e30, -jnp.inf]))[0].tolist()
  [0.0, 0.0, -inf]
  """
  scores = array(name, scores)
  if scores.ndim == 0 or scores.shape[-1] == 0:
    raise UserError(f"must have shape [..., k] with k >= 1, not {scores.shape}", field=name)
  library = np if isinstance(scores, np.ndarray) else jnp
  high = scores.max(-1, keepdims=True)
  if is_integer(scores) or scores.dtype == bool:
    sound = jnp.ones(scores.shape[:-1], bool)
    return _integer_gaps(library, scores, high), sound
  # The maximum of a row with NaN is NaN, so such rows are refused, too.
  sound = (library.abs(high) < np.inf)[..., 0]
  if _known(sound) and not np.all(sound):
    raise UserError(
      "must be numbers below infinity, and one of each row above -infinity", field=name
    )
  if _too_wide(scores):
    with np.errstate(over="ignore"):
      return _to_float32(scores - high), jnp.asarray(sound)
  scores, high = (source.as_floats(x) for x in (scores, high))
  return scores - high, jnp.asarray(sound)


def _integer_gaps(library: Any, scores: Any, high: Any) -> jax.Array:
  """Returns scores - high as floats. Integers are subtracted as unsigned, which cannot overflow."""
  wide = scores.dtype.itemsize == 8
  unsigned = library.uint64 if wide else library.uint32
  # uint32 keeps its type, since its upper half exceeds int32.
  word = np.uint32 if scores.dtype == np.uint32 else np.int32
  signed = scores if wide else scores.astype(word)
  top = high if wide else high.astype(signed.dtype)
  apart = top.astype(unsigned) - signed.astype(unsigned)
  dtype = jnp.float64 if wide and not _too_wide(scores) else jnp.float32
  return -jnp.asarray(apart.astype(np.float64 if wide else np.float32), dtype)


def integers(name: str, value: Numbers) -> jax.Array | np.ndarray:
  """Returns `value` as an array of integers [n]; UserError for another type or shape."""
  found = array(name, value)
  # NumPy reads an empty list as floats.
  found = found if found.size else found.astype(np.int32)
  if found.ndim != 1 or not is_integer(found):
    raise UserError(f"must be integers [n], not {found.dtype} {found.shape}", field=name)
  return found


def indices(name: str, values: Numbers, lowest: int, highest: int) -> jax.Array:
  """Clips integers (or bool) into [lowest, highest] as int32; `lowest` must be at most 0.

  >>> indices("bins", np.array([2**40, -7]), -1, 5).tolist()
  [5, -1]
  """
  values = array(name, values)
  if not (is_integer(values) or values.dtype == bool):
    raise UserError(f"must be integers, not {_kind(values)}", field=name)
  library = np if isinstance(values, np.ndarray) else jnp
  # Types of 8 and 16 bits may be too small for the bounds.
  if values.dtype.itemsize < 4:
    values = values.astype(library.int32)
  values = library.minimum(values, library.asarray(highest, values.dtype))
  # An unsigned number is never below `lowest`, and its type may not hold a negative `lowest`.
  if jnp.issubdtype(values.dtype, jnp.signedinteger):
    values = library.maximum(values, library.asarray(lowest, values.dtype))
  return jnp.asarray(values.astype(library.int32))
