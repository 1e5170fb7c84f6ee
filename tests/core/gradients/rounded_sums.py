"""An accelerator's rounding of clipped sums, on a CPU: worse than any card's."""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp

from dpjax.gradients.ghost import precision, row_forms, unit_rules
from dpjax.parallel import targets

_TF32_STEP = 2.0**-10


def longer(x):
  """Rounds each float32 away from zero to the 11 bits of TF32, as far as that can go."""
  if x.dtype != jnp.float32:
    return x
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  cut = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFE000), jnp.float32)
  up = cut * jnp.float32(1 + _TF32_STEP)
  # Where the mantissa has no more bits the product above is exact, or a step more.
  return jnp.where(cut == x, x, up)


def nearest(x):
  """Rounds each float32 to the nearest number of TF32."""
  return jax.lax.reduce_precision(x, 8, 10) if x.dtype == jnp.float32 else x


@contextlib.contextmanager
def on_a_card(rounded=longer):
  """Within the block, programs are a GPU's, and round the operands of their sums."""
  product = row_forms.product
  transpose = unit_rules.transpose

  def rounded_product(rows, left_size, *, as_sums=False):
    if as_sums:
      sides = (rounded(rows.left), rounded(rows.right))
      rows = row_forms.RowFactors(*sides, rows.chosen)
    return product(rows, left_size)

  def rounded_transpose(site, seen, data, cotangents, **options):
    if options.get("exactness") == jax.lax.Precision.HIGH:
      data, cotangents = jax.tree.map(rounded, (data, cotangents))
    return transpose(site, seen, data, cotangents, **options)

  with (
    targets.compiling_for(targets.parse("gpu:h100:1")),
    mock.patch.object(row_forms, "product", rounded_product),
    mock.patch.object(unit_rules, "transpose", rounded_transpose),
  ):
    assert precision.of_sums(jnp.float32).precision == jax.lax.Precision.HIGH
    yield
