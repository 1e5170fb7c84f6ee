"""Norms of the gradients of standardised kernels and their gains, without these gradients.

A kernel W [K, P] is standardised column by column (`standard_kernels`): gain_p w_p, where w_p is
(W_p - mean) / size_p and has mean 0 and length 1. Let u = sum_t a_t g_t^T be an example's gradient
at the standardised kernel, from the rows a_t and g_t of `row_forms`. Then, for each column p:

| gradient of | is                                                  | its square                  |
| ----------- | --------------------------------------------------- | --------------------------- |
| gain_p      | h_p = <w_p, u_p>                                    | h_p^2                       |
| W_p         | gain_p / size_p (u_p - mean(u_p) - h_p w_p)         | s_p^2 (|u'_p|^2 - h_p^2)    |

Here s_p = |gain_p| / size_p, and u' is u minus the mean of each column. So the rows give both:

- sum_p s_p^2 |u'_p|^2 = sum_ts (<a_t, a_s> - K mean(a_t) mean(a_s)) sum_p s_p^2 g_tp g_sp.
- h_p = sum_t g_tp <a_t, w_p>, and <a_t, w_p> is the result of the convolution, over gain_p.

With many rows it is cheaper to form u of each example, and to free it after the norm.

If size_p^2 is below `epsilon`, it is replaced by it, and the term h_p w_p falls away. The clipped
sum is one product over the batch, to which the same linear operator is applied (`gradients`). So
its rounding is that of a sum over the batch, as for other convolutions.

Roundings are added to the norm as for other rows (`row_forms.gram_length`). The forward pass rounds
the convolution's result, too (`precision.forward_growth`). If a gain is too small to divide by, or
rounding hides that a column has mean 0 or on which side of `epsilon` it is, all norms are NaN. Then
the gradient of each example is formed by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax import trees
from dpjax.gradients.ghost import lengths, precision, row_forms
from dpjax.gradients.ghost.jaxpr_sites import StandardKernel
from dpjax.gradients.ghost.lengths import Length
from dpjax.gradients.ghost.row_forms import RowForm, RowLengths
from dpjax.gradients.ghost.units import Unit

# Outside of this range, products with a gain and quotients by it could leave the range of floats.
_LEAST_GAIN = 1e-6
_LARGEST_GAIN = 1e6
# Largest length of a column over its length without the mean. Rounding of the mean of a longer
# column would be visible.
_LARGEST_TILT = 64.0
# Smallest distance of size_p^2 from `epsilon`, as a share of it.
_NEAR = 1e-3


class Channels(NamedTuple):
  """Values of a standardised kernel that its gradients need, for P columns of length K."""

  direction: jax.Array  # w [K, P]
  gain: jax.Array  # [P]
  inverse_size: jax.Array  # 1 / size_p, [P]
  follows: jax.Array  # [P]: 1 if size_p follows the kernel, 0 if `epsilon` replaces it
  rounding: jax.Array  # []: largest error of a sum in `gradients`, as a share of |u|
  mismatch: jax.Array  # [P]: length of (column of the traced kernel / gain_p) - w_p
  is_sound: jax.Array  # [] bool

  @property
  def scale(self) -> jax.Array:
    """Factors s_p, [P]."""
    return jnp.abs(self.gain) * self.inverse_size

  @property
  def removed(self) -> jax.Array:
    """Share of s_p^2 h_p^2 that the square of the kernel's gradient lacks, [P]; usually 1."""
    # |u' - h w|^2 is |u'|^2 - (2 - |w|^2) h^2.
    return self.follows * (2 - _column_sums(jnp.square(self.direction)))


def _column_sums(x: jax.Array) -> jax.Array:
  """Sums [K, P] over K, so that a term enters about K / 32 roundings, not K."""
  # Rows are added in pairs, since XLA would join two reductions to one.
  x = jnp.pad(x, ((0, -x.shape[0] % 32), (0, 0)))
  for _ in range(5):
    half = x.shape[0] // 2
    x = x[:half] + x[half:]
  return x.sum(0)


def of_leaves(
  leaves: Sequence[jax.Array], known: StandardKernel, seen: jax.Array
) -> Channels:
  """Returns the channels of a kernel [*spatial, channels, P] and a gain [P] among all leaves.

  `seen` is the standardised kernel in the trace, of which the convolution's results are.
  """
  kernel = leaves[known.kernel]
  columns = kernel.reshape(-1, kernel.shape[-1])  # [K, P]
  gain = leaves[known.gain]
  count = columns.shape[0]
  epsilon = jnp.asarray(known.epsilon, columns.dtype)
  centered = columns - (_column_sums(columns) / count)[None]
  square = _column_sums(jnp.square(centered))
  inverse_size = jax.lax.rsqrt(jnp.maximum(square, epsilon))
  direction = centered * inverse_size[None]
  follows = (square > epsilon).astype(square.dtype)
  tilt = jnp.sqrt(_column_sums(jnp.square(columns))) * inverse_size
  eps = float(jnp.finfo(columns.dtype).eps)
  size = jnp.abs(gain)
  good = (size >= _LEAST_GAIN) & (size <= _LARGEST_GAIN) & (tilt <= _LARGEST_TILT)
  # Near `epsilon`, rounding decides on which side a size lies. It may decide otherwise for the sum.
  good = good & (jnp.abs(square - epsilon) > _NEAR * epsilon)
  # A mean is off by (K / 64 + 4) eps of its column, and each sum in `gradients`, too.
  rounding = (count / 64 + 8) * eps * (jnp.max(tilt) + 2)
  apart = seen.reshape(columns.shape) / gain[None] - direction
  mismatch = jnp.sqrt(_column_sums(jnp.square(apart)))
  return Channels(direction, gain, inverse_size, follows, rounding, mismatch, jnp.all(good))


def gradients(known: Channels, product: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (gradient of the kernel, gradient of the gain) from u, a gradient [*kernel] at the
  standardised kernel."""
  flat = product.reshape(-1, product.shape[-1])  # [K, P]
  along = _column_sums(known.direction * flat)
  mean = _column_sums(flat) / flat.shape[0]
  rest = flat - mean[None] - (known.follows * along)[None] * known.direction
  kernel = (known.gain * known.inverse_size)[None] * rest
  return kernel.reshape(product.shape), along


def transpose(
  leaves: Sequence[jax.Array], unit: Unit, seen: dict[int, tuple[jax.Array, ...]]
) -> Callable[[dict[int, tuple[jax.Array, ...]]], tuple[jax.Array, ...]]:
  """Returns `gradients` of a unit in the form of the transpose of `ParamFlow.pull`."""
  (site,) = unit.sites
  standard = unit.standard
  assert standard is not None
  known = of_leaves(leaves, standard, *seen[site.index])

  def back(products):
    of_kernel, of_gain = gradients(known, *products[site.index])
    by_leaf = {standard.kernel: of_kernel, standard.gain: of_gain}
    return tuple(by_leaf[leaf] for leaf in unit.leaves)

  return back


class RowSides(NamedTuple):
  """Rows of one example, without the left ones."""

  left: jax.Array  # lengths |a_t| of the left ones, at least, [T]
  right: jax.Array  # cotangents [T, P]


class RowGram(NamedTuple):
  """Rows of one example, with inner products and sums of the left ones."""

  left_gram: jax.Array  # [T, T]
  left_sums: jax.Array  # [T]
  right: jax.Array  # cotangents [T, P]


def rows_of(form: RowForm, data: tuple, cotangents: tuple) -> RowSides:
  """Returns the rows of a site. Windows are not copied if sums over them can be taken in place."""
  rows = form.build(data, cotangents)
  right = trees.at_least_float32(rows.right[0])
  if form.places is None:
    return RowSides(lengths.of(rows.left[0], axis=-1).longest, right)
  squares = jnp.square(trees.at_least_float32(data[0]))
  missing = math.sqrt(form.left * lengths.tiny(squares))
  eps = float(jnp.finfo(squares.dtype).eps)
  sums = form.places.row_sums((squares,))[0]  # [T]
  return RowSides(jnp.sqrt(sums) * (1 + form.left * eps) + missing, right)


def gram_of(form: RowForm, data: tuple, cotangents: tuple, by_places: bool) -> RowGram:
  """Returns the rows of a site with inner products, which may be taken from places."""
  rows = form.build(data, cotangents)
  right = trees.at_least_float32(rows.right[0])
  if by_places and form.places is not None:
    return RowGram(form.places.build(data)[0], form.places.row_sums(data)[0], right)
  left = trees.at_least_float32(rows.left)
  return RowGram(row_forms.side_gram(left, left)[0], jnp.sum(left[0], axis=1), right)


def row_lengths(known: Channels, rows: RowGram, out: jax.Array, fan_in: int) -> RowLengths:
  """Returns the length of the gradient of a kernel and its gain, as `row_forms.gram_length` does.

  Args:
    known: channels of the kernel.
    rows: rows of one example.
    out: [T, P], results of the convolution.
    fan_in: K.
  """
  left_gram, left_sums, right = rows
  out = trees.at_least_float32(out)
  count, columns = right.shape
  eps = float(jnp.finfo(right.dtype).eps)
  scale = known.scale
  scaled = (right * scale[None])[None]  # [1, T, P]
  right_gram = row_forms.side_gram(scaled, scaled)[0]  # [T, T]
  # The diagonal is a masked sum, which XLA merges with the sums over all pairs.
  eye = jnp.eye(count, dtype=bool)
  diagonal = lambda gram: jnp.sum(jnp.where(eye, gram, 0), axis=1)
  left_side = jnp.sqrt(diagonal(left_gram))  # |a_t|, [T]
  right_side = jnp.sqrt(diagonal(right_gram))  # |s g_t|, [T]
  plain_side = jnp.sqrt(jnp.sum(jnp.square(right), axis=1))  # |g_t|, [T]
  means = left_sums / math.sqrt(fan_in)  # [T]
  centered = left_gram - means[:, None] * means[None, :]
  pairs = centered * right_gram
  with_means = jnp.maximum(jnp.sum(left_gram * right_gram), 0)  # sum_p s_p^2 |u_p|^2
  # Inner products <a_t, a_s>, and both means, are off by K eps / 2 of |a_t| |a_s|.
  left_most = left_side[:, None] * left_side[None, :]
  right_most = right_side[:, None] * right_side[None, :]
  off = (3 * fan_in + 8) * left_most * jnp.abs(right_gram)
  off = off + columns * jnp.abs(centered) * right_most
  size = jnp.sum(4 * jnp.abs(pairs) + off / 2)
  tiny = lengths.tiny(right)
  # Squares that underflowed may have shortened |a_t| by up to sqrt(K tiny).
  longest_left = left_side + math.sqrt(fan_in * tiny)
  gains = _gains(known, longest_left, right, out, fan_in)
  square = jnp.maximum(jnp.sum(pairs) + gains.square, 0) + eps * size + gains.rounding
  square = square + 2 * known.rounding * with_means
  # Underflow counts as in `gram_length`; the means double its share of the left side.
  traces = jnp.sum(jnp.square(left_side)), jnp.sum(jnp.square(right_side))
  lost = 3 * fan_in * traces[1] + columns * traces[0] + 2 * count
  lost = count * (tiny * lost)
  if precision.in_three_parts(right, right):
    longest = jnp.maximum(jnp.max(left_side, initial=0), jnp.max(right_side, initial=0))
    lost = lost * (1 + 2 * longest)
  lost = lost + gains.lost
  grown = precision.of_sums(right.dtype).growth
  sizes = jnp.sum(left_side * trees.root_sum_squares([right_side, plain_side]))
  missing = jnp.sqrt(count * lost)
  added = (eps + grown) * sizes + known.rounding * jnp.sqrt(with_means)
  length = lengths.from_square(square, lost, added, (eps + grown) * missing)
  return _measured(known, length, left_side, plain_side, sizes + missing)


def _measured(
  known: Channels, length: Length, left: jax.Array, right: jax.Array, reach: jax.Array
) -> RowLengths:
  """Returns the length of a gradient with the measures of its rows, of lengths [T] on each side."""
  sound = lambda x: jnp.where(known.is_sound, x, jnp.nan)
  # An entry that underflows is multiplied by the scale of its column afterwards.
  extent = jnp.sum(left + right) * jnp.maximum(jnp.max(known.scale), 1)
  return RowLengths(Length(sound(length.norm), sound(length.longest)), extent, reach)


class _Gains(NamedTuple):
  """Part of the squared norm of a kernel and its gain that the terms h_p add; each []."""

  square: jax.Array  # sum_p h_p^2, less what the kernel's square lacks
  rounding: jax.Array  # largest error of `square` by rounding
  lost: jax.Array  # and by underflow


def _gains(
  known: Channels, left: jax.Array, right: jax.Array, out: jax.Array, fan_in: int
) -> _Gains:
  """Returns the part of the squared norm that comes from the gradients h of the gains.

  Args:
    known: channels of the kernel.
    left: lengths |a_t| of the rows, at least, [T].
    right: cotangents, [T, P].
    out: [T, P], results of the convolution.
    fan_in: K.
  """
  count = right.shape[0]
  eps = float(jnp.finfo(right.dtype).eps)
  tiny = lengths.tiny(right)
  along = jnp.sum(right * out, axis=0) / known.gain  # h [P]
  magnitudes = jnp.abs(right)
  # No product of matrices: these may round below the exact sum.
  of_column = jnp.sum(left[:, None] * magnitudes, axis=0)  # sum_t |a_t| |g_tp|, [P]
  # The result is that of the kernel in the trace, and its sums have K and T terms.
  share = (fan_in + count + 8) * eps / 2 + precision.forward_growth(right.dtype)
  slack = (share + known.mismatch) * of_column
  # Each of the K products in a result of the convolution may lose `tiny`, which is multiplied by
  # g_tp and divided by the gain afterwards.
  flushed = count + fan_in * jnp.sum(magnitudes, axis=0)
  underflow = tiny * (flushed / jnp.abs(known.gain) + count)  # of h_p
  removed = jnp.square(known.scale) * known.removed
  weight = 1 - removed
  charged = jnp.abs(weight) * (2 * jnp.abs(along) * slack + jnp.square(slack))
  charged = charged + 4 * eps * (1 + removed) * jnp.square(along)
  # In `gradients` the part along the kernel is rounded: the gain's gradient, and what W_p lacks.
  rounded = known.rounding * of_column
  charged = charged + 2 * jnp.abs(along) * rounded + (1 + removed) * jnp.square(rounded)
  missed = jnp.abs(weight) * (2 * (jnp.abs(along) + slack) + underflow) * underflow
  lost = jnp.sum(missed) + tiny * jnp.sum(1 + removed)
  return _Gains(jnp.sum(weight * jnp.square(along)), jnp.sum(charged), lost)


def product_lengths(
  known: Channels, product: jax.Array, left: jax.Array, right: jax.Array
) -> RowLengths:
  """Returns the length of the gradient of a kernel and its gain from u, which is formed.

  Roundings are added as in `row_forms.with_rounding`, and those of `gradients` here and in the sum.

  Args:
    known: channels of the kernel.
    product: gradient u of one example at the standardised kernel, [*kernel].
    left: lengths |a_t| of the rows, at least, [T].
    right: cotangents, [T, P].
  """
  of_kernel, of_gain = map(lengths.of, gradients(known, product))
  both = jax.tree.map(lambda *each: jnp.stack(each), of_kernel, of_gain)  # [2]
  length = row_forms.over_blocks(both)
  scaled = lengths.of(right * known.scale[None], axis=-1).longest  # [T]
  plain = lengths.of(right, axis=-1).longest
  sizes = jnp.sum(left * trees.root_sum_squares([scaled, plain]))
  eps = float(jnp.finfo(right.dtype).eps)
  rounding = (len(left) + 2) * eps / 2 + 2 * precision.of_sums(right.dtype).growth
  charged = (rounding + 2 * known.rounding) * sizes
  longer = Length(length.norm + charged, length.longest + charged)
  return _measured(known, longer, left, plain, sizes)
