"""Programs for SPU: a JAX function as StableHLO, or a one-line error.

SPU (SecretFlow, extra `mpc-spu`) is a virtual machine of secure multi-party computation: it
takes StableHLO text, which `jax.jit(fn).lower()` writes, and runs it on shares. Its own JAX
front end is not used: it relies on private names of an older JAX.

What SPU cannot do is refused here, before anything is shared. Overflow is the exception: numbers
are multiples of 2^-18 in a ring of 2^64, and neither SPU nor this file notices when a result
wraps around.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax import jaxprs
from dpjax.validate import UserError

INSTALL = "pip install -e '.[mpc-spu]' && pip install --no-deps spu==0.10.0.dev20251211"

# SPU's default in a ring of 2^64.
FRACTION_BITS = 18
# Bound on an input, as a factor of products: 2^(63 - 2 * 18 - 10), with 10 bits for sums and
# truncation.
MAX_INPUT = 2.0**17

_DTYPES = ("float32", "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32")
_RANDOM = "its key or its numbers would be known to all: draw outside and pass them in"
_FACTORED = "SPU has no such routine"
_CALLS_BACK = "it would call Python, which has no shares"
# primitive -> reason for its refusal
_REFUSED = {
  "sort": "SPU does not sort what JAX lowers", "top_k": "SPU does not sort what JAX lowers",
  "approx_top_k": "SPU does not sort what JAX lowers",
  "erf": "SPU has none; of gelu, take approximate=True", "erf_inv": "SPU has none",
  "erfc": "SPU has none", "lgamma": "SPU has none", "digamma": "SPU has none",
  "fft": _FACTORED, "cholesky": _FACTORED, "lu": _FACTORED, "qr": _FACTORED,
  "geqrf": _FACTORED, "svd": _FACTORED, "eigh": _FACTORED, "eig": _FACTORED,
  "triangular_solve": _FACTORED, "custom_linear_solve": _FACTORED,
  "pure_callback": _CALLS_BACK, "io_callback": _CALLS_BACK,
  "debug_callback": _CALLS_BACK, "debug_print": _CALLS_BACK,
}  # fmt: skip
_DRAWS = ("random_", "threefry", "rng_")


class SpuProgram(NamedTuple):
  """A function as SPU's bytecode, for inputs of known shapes."""

  code: bytes
  text: str  # StableHLO, which every party may read
  outputs: tuple[jax.ShapeDtypeStruct, ...]  # leaves, in order
  out_tree: Any


def library() -> Any:
  """Returns the package `spu`. Raises UserError if it is not installed."""
  try:
    import spu  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise UserError(f"needs spu; {INSTALL}", field="secure_jit") from error
  return spu


def as_input(name: str, value: Any) -> np.ndarray:
  """Returns an argument's leaf as an array for SPU. Raises UserError for an unsupported type, for
  NaN, and for floats of 2^17 or more in absolute value.

  >>> as_input("x", 0.5).dtype.name
  'float32'
  >>> as_input("x", np.zeros(2))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: x: float64; must be one of float32, bool, int8, ...
  """
  if isinstance(value, bool | int | float):
    value = np.asarray(value, {bool: bool, int: np.int32, float: np.float32}[type(value)])
  check_dtype(name, getattr(value, "dtype", type(value).__name__))
  array = np.ascontiguousarray(value).reshape(np.shape(value))
  if array.dtype.kind == "f" and array.size:
    # The maximum is NaN if any entry is, and this comparison refuses NaN.
    largest = float(np.abs(array).max())
    if not largest < MAX_INPUT:
      raise UserError(
        f"holds {largest:g}; must be finite and within +-{MAX_INPUT:g}, beyond "
        "which products wrap around: scale it",
        field=name,
      )
  return array


def check_dtype(name: str, dtype: Any) -> None:
  """Raises UserError unless inputs may have the type."""
  if str(dtype) not in _DTYPES:
    raise UserError(f"{dtype}; must be one of {', '.join(_DTYPES)}: cast it", field=name)


@functools.lru_cache(maxsize=128)
def compile_program(
  fn: Callable, structs: tuple[jax.ShapeDtypeStruct, ...], in_tree: Any, public: tuple
) -> SpuProgram:
  """Compiles `fn` for leaves of these shapes. Leaf i is secret unless `public[i]` is True.

  Raises UserError for an operation that SPU cannot do, or an array that `fn` closes over.
  """
  args = jax.tree.unflatten(in_tree, structs)
  # Unused arguments stay, so that inputs keep their places.
  traced = jax.jit(fn, keep_unused=True).trace(*args)
  _check(traced.jaxpr)
  text = traced.lower().as_text("stablehlo")
  if match := re.search(r"[x<](f64|i64x|f16|bf16|f8\w*|complex<f\d+>)>", text):
    raise UserError(
      f"computes in {match[1]}; SPU's numbers are float32 or integers", field="fn"
    )
  outputs, out_tree = jax.tree.flatten(traced.out_info)
  spu = library()
  kinds = spu.Visibility.VIS_SECRET, spu.Visibility.VIS_PUBLIC
  source = spu.CompilationSource(
    spu.SourceIRType.STABLEHLO, text.encode(), [kinds[known] for known in public]
  )
  with one_line():
    code = spu.compile(source, spu.CompilerOptions())
  leaves = tuple(jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outputs)
  return SpuProgram(code, text, leaves, out_tree)


class one_line:
  """Context that turns SPU's errors with stack traces into a UserError of one line.

  >>> with one_line():
  ...   raise RuntimeError("what: \\n\\t[a.cc:7] no such op\\nstacktrace: \\n#0 f()")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: spu: no such op
  """

  def __enter__(self) -> None:
    pass

  def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
    if not isinstance(error, RuntimeError):
      return
    text = re.split(r"(?i)\n\s*stacktrace", str(error))[0].removeprefix("what:")
    text = re.sub(r"\[(Enforce fail at )?[\w~/.]+:\d+\]", "", text)
    raise UserError(f"{' '.join(text.split())[:300]}", field="spu") from error


def _check(closed: Any) -> None:
  """Raises UserError at the first operation that SPU cannot run, or if `fn` closes over an array,
  which would be public."""
  for constant in jaxprs.closed_over(closed):
    raise UserError(
      f"closes over an array of shape {np.shape(constant)}, which every party "
      "would read in the program: pass it as an argument (public_argnums, if it "
      "may be known)",
      field="fn",
    )
  for name in jaxprs.primitives(closed):
    reason = _RANDOM if name.startswith(_DRAWS) else _REFUSED.get(name)
    if reason:
      raise UserError(f"uses {name}; {reason}", field="fn")
