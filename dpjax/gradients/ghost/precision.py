"""Precision of the products in clipped sums, and how much longer rounding may make a term.

A clipped sum is one product over the whole batch. An H100 computes it at 53 Tflop/s in float32, and
at 255 in TF32, the precision of an ordinary gradient. A rounded product may be longer than the
exact product. So a bound on this growth is added to the norm. Then the clip norm bounds each term
of the sum as it is computed.

| platform | precision of sums                | bound on a product's growth  |
| -------- | -------------------------------- | ---------------------------- |
| cpu      | float32                          | 0                            |
| gpu      | TF32: 11 bits of each operand    | 2^-9                         |
| tpu      | three passes of bfloat16         | 2^-13                        |

The growth times sum_t |a_t| |g_t|, over the T rows of an example, is added to its norm. On a GPU
that is .2 % of the norm for one row, and at most sqrt(T) times .2 % for orthogonal rows. Twice as
much is added if the norm was taken of a rounded product (`row_forms.with_rounding`). Rows of a
table are added without products, so their norm stays as it is. If `jax.default_matmul_precision` is
"highest" or "float32", sums are computed in float32 on all platforms.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpjax.parallel import made_for
from dpjax.types import DType


class SumPrecision(NamedTuple):
  """Precision of a clipped sum.

  Attributes:
    precision: precision that is passed to JAX.
    growth: largest excess of |fl(a) fl(g)| over |a| |g|, as a share of |a| |g|.
  """

  precision: lax.Precision
  growth: float


_EXACT = SumPrecision(lax.Precision.HIGHEST, 0.0)
_OF_PLATFORM = {
  # Truncation to 11 bits changes each operand by up to 2^-10, rounding to nearest by half of that.
  "gpu": SumPrecision(lax.Precision.HIGH, 2.0**-9 + 2.0**-20),
  # Two parts of 8 bits each lose up to 2^-16 of each operand. The product of both second parts is
  # left out, which is up to 2^-16 more. 2^-13 is more than twice the sum of these three errors.
  "tpu": SumPrecision(lax.Precision.HIGH, 2.0**-13),
}
# Truncation to 11 bits changes each operand by up to 2^-10, and truncation to 8 bits by 2^-7.
_FORWARD = {"gpu": 2.0**-9 + 2.0**-20, "tpu": 2.0**-6 + 2.0**-14}
_FULL = ("highest", "float32")


def of_sums(dtype: DType) -> SumPrecision:
  """Returns the precision in which the current platform forms clipped sums of a dtype.

  >>> of_sums(jnp.float32).growth  # on a CPU
  0.0
  """
  # `getattr` is used, since type checkers do not know this option of JAX.
  exact = getattr(jax.config, "jax_default_matmul_precision", None) in _FULL
  if exact or jnp.finfo(dtype).bits > 32:
    return _EXACT
  return _OF_PLATFORM.get(made_for.platform(), _EXACT)


def forward_growth(dtype: DType) -> float:
  """Returns a bound on the error of a product fl(a) fl(w) in the forward pass: a share of |a| |w|.

  fl rounds to JAX's default precision: TF32 on a GPU, bfloat16 on a TPU; elsewhere the bound is 0.
  """
  if jnp.finfo(dtype).bits > 32:
    return 0.0
  return _FORWARD.get(made_for.platform(), 0.0)


def gram(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns products of rows, einsum(spec, a, b), with at least 21 bits of each operand.

  Norms need so many bits: where rows cancel, TF32 may leave no correct digit of a squared norm. On
  NVIDIA's cards three products of TF32 replace one of float32, and are up to eight times as fast.
  """
  exact = lax.Precision.HIGHEST
  parts = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
  chosen = parts if in_three_parts(a, b) else exact
  return jnp.einsum(spec, a, b, precision=chosen)


def in_three_parts(a: jax.Array, b: jax.Array) -> bool:
  """Returns whether `gram` splits its operands into parts of TF32.

  The result is False in a program for a card that this machine lacks: there XLA cannot try kernels,
  and would write each part to memory.
  """
  single = a.dtype == b.dtype == jnp.float32
  here = made_for.current() is None and made_for.platform() == "gpu"
  return single and here and _knows_tf32()


def _knows_tf32() -> bool:
  """Returns whether this machine's cards multiply in TF32: compute capability 8.0 and above."""
  capability = getattr(jax.local_devices()[0], "compute_capability", "")
  # AMD's cards have names instead, such as gfx942.
  return re.fullmatch(r"[0-9]+\.[0-9]+", capability) is not None and float(capability) >= 8
