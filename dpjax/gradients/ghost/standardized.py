"""Norms of the gradients of standardised kernels and their gains, mostly without these gradients.

A kernel W [K, P] is standardised column by column (`standard_kernels`): gain_p w_p, where w_p is
(W_p - mean) / size_p and has mean 0 and length 1. Let u = sum_t a_t g_t^T be an example's gradient
at the standardised kernel, from the rows a_t and g_t of `row_forms`. Then, for each column p:

| gradient of | is                                                  | its squared norm            |
| ----------- | --------------------------------------------------- | --------------------------- |
| gain_p      | h_p = <w_p, u_p>                                    | h_p^2                       |
| W_p         | gain_p / size_p (u_p - mean(u_p) - h_p w_p)         | s_p^2 (|u'_p|^2 - h_p^2)    |

Here s_p = |gain_p| / size_p, and u' is u minus the mean of each column. So the rows give:

- sum_p s_p^2 |u'_p|^2 = sum_ts (<a_t, a_s> - K mean(a_t) mean(a_s)) sum_p s_p^2 g_tp g_sp.
- h_p = sum_t g_tp <a_t, w_p>, and <a_t, w_p> is the result of the convolution / gain_p.

With many rows it is cheaper to form u of each example, and to free it after the norm.

If size_p^2 is below `epsilon`, `epsilon` replaces size_p^2, and the term h_p w_p falls away. The
clipped sum is one product over the batch, to which the same linear operator is applied
(`gradients`). So its rounding is that of a sum over the batch, as for other convolutions.

Roundings are added to the norm as for other rows (`row_forms.gram_length`). The forward pass rounds
the convolution's result, too (`precision.forward_growth`). All norms are NaN if a gain is too small
or too large, if the mean of a column is so large that its rounding is visible, or if size_p^2 is so
near `epsilon` that rounding decides which is larger. Then the gradient of each example is formed by
itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpjax import standard_kernels, trees
from dpjax.gradients.ghost import cost_model, lengths, precision, row_forms, unit_rules
from dpjax.gradients.ghost.cost_model import Cost
from dpjax.gradients.ghost.jaxpr_sites import Kind, Site, Value
from dpjax.gradients.ghost.lengths import Length, Norms
from dpjax.gradients.ghost.row_forms import RowForm
from dpjax.gradients.ghost.tapped import ParamFlow
from dpjax.gradients.ghost.unit_rules import UnitRule
from dpjax.gradients.ghost.units import Rule, Unit
from dpjax.parallel import made_for

# Outside of this range, products with a gain and quotients by it could leave the range of floats.
_LEAST_GAIN = 1e-6
_LARGEST_GAIN = 1e6
# Largest ratio of the length of a column to its length without the mean. At larger ratios the
# rounding of the mean is visible.
_LARGEST_TILT = 64.0
# Smallest distance of size_p^2 from `epsilon`, as a share of `epsilon`.
_NEAR = 1e-3


class StandardKernel(NamedTuple):
  """A kernel that is standardised, with the leaves that it is made of."""

  kernel: int
  gain: int
  epsilon: float

  def keeps(self, eqn: Any) -> bool:
    """Returns whether the results of an equation that reads the kernel are recorded.

    The gradient of a gain follows from the result of its kernel's convolution.
    """
    return eqn.primitive.name == "conv_general_dilated"

  def unit(
    self, group: tuple[int, ...], sites: Sequence[Site], platform: str
  ) -> Unit | None:
    """Returns the unit of the kernel and its gain; None if the general rule takes it."""
    form = self._form(group, sites)
    chosen = _cost(form, platform) if form else None
    if form is None or chosen is None:
      return None
    cost, is_gram = chosen
    rule = Rule.GRAM if is_gram else Rule.PRODUCT
    return Unit(
      group, tuple(sites), rule, cost, forms=(form,), swapped=(False,), layer=self
    )

  def _form(self, group: tuple[int, ...], sites: Sequence[Site]) -> RowForm | None:
    """Returns the row form of the kernel's only site; None if there is no norm for it."""
    site, *more = sites
    if more or not site.kept or {self.kernel, self.gain} != set(group):
      return None
    # The kernel is standardised over all axes but the last, which has to be that of the features.
    last = site.eqn.params["dimension_numbers"].rhs_spec[0] == 3
    form = site.form if last and _measured_precision(site) else None
    # The same rows are needed for all columns, but each group of a convolution has its own.
    return form if form is not None and form.blocks == 1 else None

  def rule(self, unit: Unit, flow: ParamFlow) -> UnitRule:
    """Returns the rule of the unit."""
    return _Standardized(unit, flow)


def find(eqn: Any, values: Sequence[Value]) -> StandardKernel | None:
  """Returns the kernel that an equation standardises; None for other equations, and for a kernel or
  gain that is no whole leaf, in its own layout and dtype."""
  epsilon = standard_kernels.floor_of(eqn)
  if epsilon is None:
    return None
  leaves = []
  for value, rank in zip(values[:2], (4, 1)):
    source = value.source
    as_it_is = source.perm == tuple(range(rank)) and not source.is_cast
    whole = source.is_view and as_it_is and not source.loops
    if value.kind is not Kind.PARAM or not whole or len(source.leaves) != 1:
      return None
    leaves += source.leaves
  kernel, gain = leaves
  return StandardKernel(kernel, gain, epsilon)


def _measured_precision(site: Site) -> bool:
  """Returns whether `precision.forward_growth` bounds the rounding of a convolution's result."""
  chosen = site.eqn.params["precision"]
  listed = chosen if isinstance(chosen, (tuple, list)) else (chosen,)
  plain = all(each is None or isinstance(each, lax.Precision) for each in listed)
  avals = (*(v.aval for v in (*site.params, *site.data)), *site.out_avals)
  one_type = len({aval.dtype for aval in avals}) == 1
  return plain and one_type and jnp.finfo(avals[0].dtype).bits >= 32


def _cost(form: RowForm, platform: str) -> tuple[Cost, bool] | None:
  """Returns the cost of the norm of a standardised kernel, and whether it is a gram product.

  Without a gram product, each example's product a^T g is formed and freed. Returns None if the
  general rule is cheaper: it holds each example's gradient for the sum, or forms it twice. On a GPU
  the general rule also replaces freed products, whose sum in TF32 would lengthen norms of many rows
  by up to a tenth.
  """
  of_gram = cost_model.gram([form], platform)
  of_product = cost_model.product([form], platform)[0]._replace(fused=False)
  machine = cost_model.constants(platform)
  seconds = of_gram.seconds(platform)
  if platform != "cpu" and cost_model.by_places(form, platform) and form.places is not None:
    # An accelerator also writes the products of places with zeros around them.
    seconds += (2 * form.places.count**2 + form.rows**2) * machine.element_seconds
  after = cost_model.contraction([form], platform)
  once = of_product.seconds(platform)
  size = cost_model.size(form)
  _, hold = cost_model.gradient(form.recorded + size, size, True)
  general = once + (cost_model.holding([form], platform) if hold else once)
  freed = once + after if platform != "gpu" else math.inf
  if general <= min(seconds + after, freed):
    return None
  return (of_gram, True) if seconds + after < freed else (of_product, False)


class _Standardized(UnitRule):
  """The norms of a standardised kernel and its gain, and their sum through `gradients`."""

  def prepare(self) -> Any:
    (seen,) = self.pull()[0][self.unit.sites[0].index]
    return of_leaves(self.flow.leaves, self.unit.layer, seen), seen

  def norm(self, prepared: Any, loss: Any, data: Any, cotangents: Any) -> Norms:
    known, seen = prepared  # `seen` is the standardised kernel
    (site,) = self.unit.sites
    (form,) = self.unit.forms
    operands = data[site.index][: len(site.data)]
    at_site = cotangents[site.index]
    if self.unit.rule is Rule.PRODUCT:
      (product,) = unit_rules.site_gradient(site, (seen,), operands, at_site)
      rows = rows_of(form, operands, at_site)
      return product_lengths(known, product, *rows)
    by_places = cost_model.by_places(form, made_for.platform())
    rows = gram_of(form, operands, at_site, by_places)
    out = form.build(operands, data[site.index][len(site.data) :]).right[0]  # [T, P]
    return row_lengths(known, rows, out, form.left)

  def transposer(self) -> Any:
    # Norms include the rounding of this operator, not that of the transpose of the traced program.
    seen, _ = self.pull()
    (site,) = self.unit.sites
    layer = self.unit.layer
    known = of_leaves(self.flow.leaves, layer, *seen[site.index])

    def back(products):
      of_kernel, of_gain = gradients(known, *products[site.index])
      by_leaf = {layer.kernel: of_kernel, layer.gain: of_gain}
      return tuple([by_leaf[leaf] for leaf in self.unit.leaves])

    return seen, back


class Channels(NamedTuple):
  """Values of a standardised kernel that its gradients need, for P columns of length K."""

  direction: jax.Array  # w [K, P]
  gain: jax.Array  # [P]
  inverse_size: jax.Array  # 1 / size_p, [P]
  follows: jax.Array  # [P]: 1 if size_p follows the kernel, 0 if it is sqrt(epsilon)
  rounding: jax.Array  # []: largest error of a sum in `gradients`, as a share of |u|
  mismatch: jax.Array  # [P]: length of (column of the kernel in the loss) / gain_p - w_p
  is_sound: jax.Array  # [] bool; if False, all norms become NaN

  @property
  def scale(self) -> jax.Array:
    """Returns the factors s_p, [P]."""
    return jnp.abs(self.gain) * self.inverse_size

  @property
  def removed(self) -> jax.Array:
    """Returns r [P], usually near 1: the squared norm for W_p is s_p^2 (|u'_p|^2 - r_p h_p^2)."""
    # |u' - h w|^2 is |u'|^2 - (2 - |w|^2) h^2, and rounding moves |w| from 1.
    return self.follows * (2 - _column_sums(jnp.square(self.direction)))


def _column_sums(x: jax.Array) -> jax.Array:
  """Returns the sums [P] of x [K, P] over K. A term enters about K / 32 roundings, not K."""
  # Rows are added in pairs, since XLA would join two reductions to one.
  x = jnp.pad(x, ((0, -x.shape[0] % 32), (0, 0)))
  for _ in range(5):
    half = x.shape[0] // 2
    x = x[:half] + x[half:]
  return x.sum(0)


def of_leaves(
  leaves: Sequence[jax.Array], known: StandardKernel, seen: jax.Array
) -> Channels:
  """Returns the `Channels` of a kernel [*spatial, c_in, P] and a gain [P] among all leaves.

  `seen` is the standardised kernel as the loss computes it, for its convolution.
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
  # Near `epsilon`, rounding decides on which side size_p^2 lies. It may decide otherwise where the
  # clipped sum is computed.
  good = good & (jnp.abs(square - epsilon) > _NEAR * epsilon)
  # A sum over a column, for its mean or in `gradients`, is off by at most (K / 64 + 4) eps times
  # the sum of its absolute terms.
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


class RowSides(NamedTuple):
  """Rows of one example: of the left ones only their lengths."""

  left: jax.Array  # [T], upper bounds on the lengths |a_t| of the left rows
  right: jax.Array  # cotangents [T, P]


class RowGram(NamedTuple):
  """Rows of one example: of the left ones only inner products and sums."""

  left_gram: jax.Array  # [T, T]
  left_sums: jax.Array  # [T]
  right: jax.Array  # cotangents [T, P]


def rows_of(form: RowForm, data: tuple, cotangents: tuple) -> RowSides:
  """Returns the rows of one example at a site. If the form has `places`, no window is copied."""
  rows = form.build(data, cotangents)
  right = trees.at_least_float32(rows.right[0])
  if form.places is None:
    return RowSides(lengths.of(rows.left[0], keep=1).longest, right)
  squares = jnp.square(trees.at_least_float32(data[0]))
  missing = math.sqrt(form.left * lengths.tiny(squares))
  eps = float(jnp.finfo(squares.dtype).eps)
  sums = form.places.row_sums((squares,))[0]  # [T]
  return RowSides(jnp.sqrt(sums) * (1 + form.left * eps) + missing, right)


def gram_of(form: RowForm, data: tuple, cotangents: tuple, by_places: bool) -> RowGram:
  """Returns the rows of one example at a site, with inner products of the left ones.

  If `by_places`, they are computed from inner products of places, where the form has `places`.
  """
  rows = form.build(data, cotangents)
  right = trees.at_least_float32(rows.right[0])
  if by_places and form.places is not None:
    return RowGram(form.places.build(data)[0], form.places.row_sums(data)[0], right)
  left = trees.at_least_float32(rows.left)
  return RowGram(row_forms.side_gram(left, left)[0], jnp.sum(left[0], axis=1), right)


def row_lengths(known: Channels, rows: RowGram, out: jax.Array, fan_in: int) -> Norms:
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
  # The inner product <a_t, a_s> is off by up to K eps / 2 of |a_t| |a_s|, and each of the two means
  # adds as much: 3 K.
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
  # Underflow counts as in `gram_length`. The means add to its share of the left side: 3 K, not K.
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
  return _measure(known, length, left_side, plain_side, sizes + missing)


def _measure(
  known: Channels, length: Length, left: jax.Array, right: jax.Array, reach: jax.Array
) -> Norms:
  """Returns the `Norms` of a gradient, from the lengths `left` and `right` [T] of its rows.

  Its length is NaN if the channels are not sound.
  """
  sound = lambda x: jnp.where(known.is_sound, x, jnp.nan)
  # An entry that underflows is multiplied by the scale of its column afterwards.
  extent = jnp.sum(left + right) * jnp.maximum(jnp.max(known.scale), 1)
  sure = Length(sound(length.norm), sound(length.longest))
  return Norms((sure,), None, extent, reach)


class _Gains(NamedTuple):
  """Part of the squared norm of the gradients that comes from the terms h_p; each []."""

  square: jax.Array  # sum_p (1 - s_p^2 `removed`_p) h_p^2, which may be negative
  rounding: jax.Array  # largest error of `square` by rounding
  lost: jax.Array  # largest error of `square` by underflow


def _gains(
  known: Channels, left: jax.Array, right: jax.Array, out: jax.Array, fan_in: int
) -> _Gains:
  """Returns the part of the squared norm that comes from the gradients h of the gains.

  Args:
    known: channels of the kernel.
    left: upper bounds on the lengths |a_t| of the left rows, [T].
    right: cotangents, [T, P].
    out: [T, P], results of the convolution.
    fan_in: K.
  """
  count = right.shape[0]
  eps = float(jnp.finfo(right.dtype).eps)
  tiny = lengths.tiny(right)
  along = jnp.sum(right * out, axis=0) / known.gain  # h [P]
  magnitudes = jnp.abs(right)
  # This is no product of matrices, since such a product may round below the exact sum.
  of_column = jnp.sum(left[:, None] * magnitudes, axis=0)  # sum_t |a_t| |g_tp|, [P]
  # `out` is computed with the kernel in the loss, whose columns / gain_p differ from w_p by
  # `mismatch`. The sums in `out` have K terms, and those in `along` T terms.
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
  # `gradients` rounds h_p, which is the gain's gradient, and a factor in the gradient of W_p.
  rounded = known.rounding * of_column
  charged = charged + 2 * jnp.abs(along) * rounded + (1 + removed) * jnp.square(rounded)
  missed = jnp.abs(weight) * (2 * (jnp.abs(along) + slack) + underflow) * underflow
  lost = jnp.sum(missed) + tiny * jnp.sum(1 + removed)
  return _Gains(jnp.sum(weight * jnp.square(along)), jnp.sum(charged), lost)


def product_lengths(
  known: Channels, product: jax.Array, left: jax.Array, right: jax.Array
) -> Norms:
  """Returns the length of the gradient of a kernel and its gain, computed from u.

  Roundings are added as in `row_forms.with_rounding`. Those of `gradients` are added twice: for its
  call here, and for its call on the clipped sum.

  Args:
    known: channels of the kernel.
    product: gradient u of one example at the standardised kernel, [*kernel].
    left: upper bounds on the lengths |a_t| of the left rows, [T].
    right: cotangents, [T, P].
  """
  of_kernel, of_gain = map(lengths.of, gradients(known, product))
  both = jax.tree.map(lambda *each: jnp.stack(each), of_kernel, of_gain)  # [2]
  length = row_forms.over_blocks(both)
  scaled = lengths.of(right * known.scale[None], keep=1).longest  # [T]
  plain = lengths.of(right, keep=1).longest
  sizes = jnp.sum(left * trees.root_sum_squares([scaled, plain]))
  eps = float(jnp.finfo(right.dtype).eps)
  rounding = (len(left) + 2) * eps / 2 + 2 * precision.of_sums(right.dtype).growth
  charged = (rounding + 2 * known.rounding) * sizes
  longer = Length(length.norm + charged, length.longest + charged)
  return _measure(known, longer, left, plain, sizes)
