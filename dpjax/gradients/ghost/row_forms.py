"""Parameter uses ("sites") whose gradient is a sum of outer products.

These are dense layers, convolutions, embeddings, and products with a matrix that an index chooses:
one class each. `jaxpr_sites` defines sites.

For one example the gradient at such a site is N independent matrices [K, P], left^T right. Here
left [N, T, K] follows from the operand, and right [N, T, P] from the cotangent. T is the number of
rows per example (tokens, output positions, steps of a scan). K and P are the two sides of the
parameter. An embedding's left side is one-hot and kept as integers [N, T].
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from dpjax import trees
from dpjax.gradients.ghost import chosen_products, lengths, precision
from dpjax.gradients.ghost.lengths import Length, Norms
from dpjax.jaxprs import is_float, is_literal

if TYPE_CHECKING:
  from dpjax.gradients.ghost.jaxpr_sites import Site

# Largest number of offsets of a kernel whose windows need not be copied: 5 x 5.
_MOST_OFFSETS = 25


class RowFactors(NamedTuple):
  """Both sides of the rows of one example. Integers mean one-hot rows, -1 a row of zeros."""

  left: jax.Array  # [N, T, K], or integer [N, T]
  right: jax.Array  # [N, T, P]
  chosen: jax.Array | None = None  # [N, T]: the block of the left side that a row is in


class RowForm:
  """A site whose gradient is a sum of outer products, with its arrays as rows."""

  blocks: int  # N
  rows: int  # T
  left: int  # K
  right: int  # P
  left_dims: tuple[int, ...]  # dimensions of the parameter on the left side
  right_dims: tuple[int, ...]
  order: tuple[int, ...]  # dimensions of the parameter, as a product [N, K, P] has them
  recorded: int  # elements of the site's operand and cotangent, per example
  one_hot = False
  plain = False  # the left side is the operand itself, rearranged: no patches, not one-hot
  places: PlaceGram | None = None  # inner products of the left rows, without forming them
  width = 0  # numbers in a left row if an index chooses its matrix; otherwise 0

  def __init__(self, site: Site):
    self.site = site
    self.shape = site.params[0].aval.shape
    self.out_shape = site.out_avals[0].shape
    self.depth = len(site.loops)
    # Axes of the scans that step through the parameter, and of those that reuse it.
    self.sliced: list[int] = []
    self.shared: list[int] = []
    for axis, loop in enumerate(site.loops):
      (self.sliced if loop in site.sources[0].loops else self.shared).append(axis)
    lengths = [loop.length for loop in site.loops]
    self.loop_sizes = _sizes(lengths, self.sliced)
    self.turns = math.prod(_sizes(lengths, self.shared))
    operand = math.prod(site.data[0].aval.shape)
    self.recorded = site.steps * (operand + math.prod(self.out_shape))

  @classmethod
  def of(cls, site: Site) -> Self | None:
    """Returns the form of a site; None if its rows are not of this form."""
    return cls(site)

  def arrange(
    self, x: jax.Array, blocks: Sequence[int], rows: Sequence[int], *groups: Sequence[int]
  ) -> jax.Array:
    """Returns x [*loops, ...] as [N, T, ...], given its dimensions without loops for each axis."""
    axes = list(self.sliced), list(self.shared), *[[] for _ in groups]
    for found, dims in zip(axes, (blocks, rows, *groups)):
      found += [self.depth + d for d in dims]
    shape = [math.prod(_sizes(x.shape, each)) for each in axes]
    return x.transpose([*itertools.chain(*axes)]).reshape(shape)

  def build(self, data: tuple, cotangents: tuple) -> RowFactors:
    """Returns the rows of one example, from its data operands and cotangents."""
    raise NotImplementedError

  def unflatten(self, product: jax.Array) -> jax.Array:
    """Returns a product [N, K, P] as a gradient [*sliced loops, *param] of the parameter."""
    stacked = product.reshape(*self.loop_sizes, *_sizes(self.shape, self.order))
    return self._in_order(stacked)

  def _in_order(self, stacked: jax.Array) -> jax.Array:
    """Puts [*sliced loops, dimensions as in `order`] into the order of the parameter."""
    loops = len(self.loop_sizes)
    return jnp.moveaxis(
      stacked, range(loops, stacked.ndim), [loops + d for d in self.order]
    )


def find(site: Site) -> RowForm | None:
  """Returns the row form of a site, or None if the site has no row form.

  A site with complex numbers, or of two precisions, has none: a norm from rows adds squares of real
  numbers of one precision.
  """
  form = _FORMS.get(site.name)
  simple = len(site.params) == len(site.outs) == 1 and site.data and not site.is_complex
  return form.of(site) if form and simple and len(precisions([site])) == 1 else None


def precisions(sites: Sequence[Site]) -> set[bool]:
  """Returns which precisions the floats of operands and cotangents have: True for double.

  A norm of rows includes rounding and underflow of one type only. If one side is in double
  precision, the errors of the other side's float32 would be left out.
  """
  found = set()
  for site in sites:
    for aval in (*[var.aval for var in site.data], *site.out_avals):
      if is_float(aval):
        found.add(jnp.finfo(aval.dtype).bits > 32)
  return found


def _sizes(shape: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
  return tuple([shape[d] for d in dims])


def _others(rank: int, *taken: Sequence[int]) -> tuple[int, ...]:
  return tuple(sorted(set(range(rank)).difference(*taken)))


class Dense(RowForm):
  """A matrix product of the parameter with data."""

  plain = True

  def __init__(self, site: Site):
    super().__init__(site)
    (lhs_c, rhs_c), (lhs_b, rhs_b) = site.eqn.params["dimension_numbers"]
    param_first = site.eqn.invars[0] is site.params[0]
    param_c, self.data_c = (lhs_c, rhs_c) if param_first else (rhs_c, lhs_c)
    param_b, self.data_b = (lhs_b, rhs_b) if param_first else (rhs_b, lhs_b)
    data_shape = site.data[0].aval.shape
    param_f = _others(len(self.shape), param_c, param_b)
    self.data_f = _others(len(data_shape), self.data_c, self.data_b)
    # dot_general orders its result: batch, free axes of the first operand, then of the second.
    self.batch = len(param_b)
    middle = self.batch + len(param_f if param_first else self.data_f)
    first = range(self.batch, middle)
    last = range(middle, self.batch + len(param_f) + len(self.data_f))
    self.out_p, self.out_t = (first, last) if param_first else (last, first)
    self.order = (*param_b, *param_c, *param_f)
    self.blocks = math.prod(self.loop_sizes) * math.prod(_sizes(self.shape, param_b))
    self.rows = self.turns * math.prod(_sizes(data_shape, self.data_f))
    self.left = math.prod(_sizes(self.shape, param_c))
    self.right = math.prod(_sizes(self.shape, param_f))
    self.left_dims = tuple(param_c)
    self.right_dims = param_f

  def build(self, data: tuple, cotangents: tuple) -> RowFactors:
    (a,) = data  # [*loops, *data]
    (g,) = cotangents  # [*loops, *out]
    # A left side of integers would count as rows of a table, so integer data become floats.
    if not is_float(a):
      a = a.astype(trees.at_least_float32(g).dtype)
    left = self.arrange(a, self.data_b, self.data_f, self.data_c)
    right = self.arrange(g, range(self.batch), self.out_t, self.out_p)
    return RowFactors(left, right)  # [N, T, K], [N, T, P]


def windows(x: jax.Array, params: dict[str, Any], kernel, out) -> jax.Array:
  """Extracts patches [..., *out, offsets, C] of x [..., *spatial, C], by strided slices.

  It works axis by axis, so the number of slices is the sum of the kernel's sizes, not the product.
  """
  lead = x.ndim - len(kernel) - 1
  config = [(0, 0, 0)] * lead
  pads = zip(params["padding"], params["lhs_dilation"])
  config += [(*pad, dilation - 1) for pad, dilation in pads] + [(0, 0, 0)]
  x = lax.pad(x, jnp.zeros((), x.dtype), config)  # [..., *padded, C]
  # If the output is empty, the padded array may be shorter than the slices below need. Then zeros
  # are added.
  fields = zip(kernel, params["rhs_dilation"], params["window_strides"], out)
  needed = [(k - 1) * d + (n - 1) * s + 1 for k, d, s, n in fields]
  short = [max(0, n - size) for n, size in zip(needed, x.shape[lead:-1])]
  x = jnp.pad(x, [(0, 0)] * lead + [(0, n) for n in short] + [(0, 0)])

  # The last axis comes first, since it varies fastest in the kernel.
  for i in reversed(range(len(kernel))):
    stride = params["window_strides"][i]
    reach = (out[i] - 1) * stride + 1
    step = params["rhs_dilation"][i]
    starts = [offset * step for offset in range(kernel[i])]
    windows = [
      lax.slice_in_dim(x, start, start + reach, stride, axis=lead + i) for start in starts
    ]
    x = jnp.concatenate(windows, axis=-1)
    # Axis lead + i now has length out[i], and the last axis is kernel[i] times as long.
  return x.reshape(*x.shape[:-1], math.prod(kernel), -1)


class Convolution(RowForm):
  """A convolution of data with the parameter as its kernel. Groups are separate blocks."""

  def __init__(self, site: Site):
    super().__init__(site)
    self.params = params = site.eqn.params
    numbers = params["dimension_numbers"]
    self.groups = params["feature_group_count"]
    lhs_n, lhs_c, *lhs_s = numbers.lhs_spec
    out_n, self.out_c, *out_s = numbers.out_spec
    rhs_o, rhs_i, *rhs_s = numbers.rhs_spec
    self.data_order = (lhs_n, *lhs_s, lhs_c)
    self.positions = (out_n, *out_s)
    self.kernel = _sizes(self.shape, rhs_s)
    self.out = _sizes(self.out_shape, out_s)
    self.channels = self.shape[rhs_i]
    self.offsets = math.prod(self.kernel)
    self.order = (*rhs_s, rhs_i, rhs_o)
    self.blocks = math.prod(self.loop_sizes) * self.groups
    self.rows = self.turns * self.out_shape[out_n] * math.prod(self.out)
    self.left = self.offsets * self.channels
    self.right = self.shape[rhs_o] // self.groups
    self.left_dims = (rhs_i, *rhs_s)
    self.right_dims = (rhs_o,)
    self.plain = self.offsets == 1
    # Each offset is compiled, so their number is limited. In a scan the steps would be places, too.
    if 1 < self.offsets <= _MOST_OFFSETS and not site.loops:
      self.places = PlaceGram(self)

  @classmethod
  def of(cls, site: Site) -> Self | None:
    is_kernel = site.eqn.invars[1] is site.params[0]
    return cls(site) if is_kernel and site.eqn.params["batch_group_count"] == 1 else None

  def build(self, data: tuple, cotangents: tuple) -> RowFactors:
    order = [*self.sliced, *self.shared, *(self.depth + d for d in self.data_order)]
    x = data[0].transpose(order)  # [*sliced, *shared, n, *spatial, groups * channels]
    # Each place of the output gives a row: its window on the left, its cotangent on the right.
    cut = windows(x, self.params, self.kernel, self.out)  # [..., n, *out, offsets, ...]
    each = (self.blocks // self.groups, self.rows)
    left = cut.reshape(*each, self.offsets, self.groups, self.channels)
    right = self.arrange(cotangents[0], (), self.positions, (self.out_c,))
    right = right.reshape(*each, self.groups, self.right)
    if self.groups == 1:
      return RowFactors(left.reshape(*each, -1), right.reshape(*each, -1))
    # Groups do not mix, so each is a separate block.
    left = left.transpose(0, 3, 1, 2, 4).reshape(self.blocks, self.rows, -1)  # [N, T, K]
    right = right.transpose(0, 2, 1, 3).reshape(self.blocks, self.rows, -1)  # [N, T, P]
    return RowFactors(left, right)

  def unflatten(self, product: jax.Array) -> jax.Array:
    blocks = self.blocks // self.groups
    split = product.reshape(blocks, self.groups, *self.kernel, self.channels, self.right)
    split = jnp.moveaxis(split, 1, -2)  # [blocks, *kernel, channels, groups, features]
    features = self.groups * self.right
    stacked = split.reshape(*self.loop_sizes, *self.kernel, self.channels, features)
    return self._in_order(stacked)  # [*sliced, *param]


class PlaceGram:
  """Inner products of windows, computed from inner products of the places in them.

  Two windows have the inner product sum_o <x[t + o], x[s + o]>, over the kernel's offsets o. So
  each pair of places is multiplied once, not once for every offset, and no window is copied.
  """

  def __init__(self, form: Convolution):
    self.form = form
    shape = form.site.data[0].aval.shape
    self.count = form.out_shape[form.positions[0]] * math.prod(
      _sizes(shape, form.data_order[1:-1])
    )  # Q, places of the operand
    self.channels = form.channels  # numbers of a place, in each block
    self.offsets = form.offsets

  def build(self, data: tuple) -> jax.Array:
    """Returns the inner products [groups, T, T], from the data operands of one example."""
    groups = self.form.groups
    x = data[0].transpose(self.form.data_order)  # [n, *spatial, groups * channels]
    places = x.shape[:-1]
    split = x.reshape(math.prod(places), groups, self.channels)
    # One group needs no transpose, which a GPU would write to memory.
    flat = split[None, :, 0] if groups == 1 else jnp.moveaxis(split, 1, 0)  # [N, Q, C]
    products = side_gram(flat, flat).reshape(groups, *places, *places)
    return self._window_sums(products)  # [groups, T, T]

  def row_sums(self, data: tuple) -> jax.Array:
    """Returns the sums of the left rows, [groups, T]."""
    form = self.form
    x = data[0].transpose(form.data_order)  # [n, *spatial, groups * channels]
    sums = x.reshape(*x.shape[:-1], form.groups, form.channels).sum(-1)
    cut = windows(jnp.moveaxis(sums, -1, 0)[..., None], form.params, form.kernel, form.out)
    return cut.sum((-2, -1)).reshape(form.groups, -1)  # [groups, T]

  def _window_sums(self, products: jax.Array) -> jax.Array:
    """Sums products of places [N, n, *spatial, n, *spatial] over the kernel's offsets. Returns
    [N, T, T], where T is n times the number of places of the output."""
    params = self.form.params
    pads = zip(params["padding"], params["lhs_dilation"])
    of_places = [(0, 0, 0), *((*pad, dilation - 1) for pad, dilation in pads)]
    padded = lax.pad(
      products, jnp.zeros((), products.dtype), [(0, 0, 0), *of_places, *of_places]
    )
    strides = [1, *params["window_strides"]]
    sizes = [products.shape[1], *self.form.out]
    reach = [(size - 1) * stride + 1 for size, stride in zip(sizes, strides)]
    total = jnp.zeros((), products.dtype)
    for offset in itertools.product(*map(range, self.form.kernel)):
      starts = [0, *(o * d for o, d in zip(offset, params["rhs_dilation"]))]
      ends = [start + length for start, length in zip(starts, reach)]
      total = total + lax.slice(
        padded,
        [0, *starts, *starts],
        [padded.shape[0], *ends, *ends],
        [1, *strides, *strides],
      )
    rows = math.prod(sizes)
    return total.reshape(products.shape[0], rows, rows)


class Indices:
  """The rows that a gather or a dynamic_slice takes from a table, the parameter of a site.

  Each column of the index is a start in one dimension of the table.
  """

  def __init__(self, site: Site, eqn: Any):
    self.loops = tuple(loop.length for loop in site.loops)
    shape = site.params[0].aval.shape
    self.is_gather = eqn.primitive.name == "gather"
    self.starts = eqn.invars[1:]
    if self.is_gather:
      self.columns = eqn.params["dimension_numbers"].start_index_map
      self.shape = eqn.invars[1].aval.shape[:-1]  # of the positions
      # Starts that are outside are moved inside; else they take nothing.
      self.clip = eqn.params["mode"] == lax.GatherScatterMode.CLIP
    else:
      self.columns = tuple(range(len(self.starts)))
      self.shape = ()
      # dynamic_slice moves an outside start to the nearest row, as `clip` does.
      self.clip = True
    sizes = eqn.params["slice_sizes"]
    # Dimensions of which one place is taken, and those that are taken whole.
    self.indexed = indexed = tuple(d for d in self.columns if sizes[d] == 1)
    self.kept = _others(len(shape), indexed)
    place = {d: math.prod(_sizes(shape, indexed[i + 1 :])) for i, d in enumerate(indexed)}
    # Number of valid starts per column; 1 if the dimension is kept.
    self.limits = tuple(shape[d] if d in place else 1 for d in self.columns)
    # Row number = sum of place * start; 0 if the dimension is kept.
    self.places = tuple(place.get(d, 0) for d in self.columns)

  @classmethod
  def of(cls, site: Site, eqn: Any) -> Self | None:
    """Returns how an equation takes rows. None if it takes no whole rows, or if slices could
    overlap without being equal."""
    if eqn.invars[0] is not site.params[0]:
      return None
    if eqn.primitive.name == "gather":
      batched = eqn.params["dimension_numbers"].operand_batching_dims
      if batched or is_float(eqn.invars[1].aval):
        return None
    found = cls(site, eqn)
    shape = site.params[0].aval.shape
    whole = all(eqn.params["slice_sizes"][d] == shape[d] for d in found.kept)
    return found if whole and found.columns else None

  def build(self, known: dict[Any, Any]) -> jax.Array:
    """Returns the starts [*loops, *shape, columns], from values by variable."""
    small = lambda x: _small_integers(x, max(self.limits))
    if self.is_gather:
      return small(known[self.starts[0]])
    each = [x.val if is_literal(x) else known[x] for x in self.starts]
    each = [small(jnp.asarray(x)) for x in each]
    return jnp.stack([jnp.broadcast_to(x, self.loops) for x in each], axis=-1)

  def rows(self, index: jax.Array, right: jax.Array) -> RowFactors:
    """Returns the rows chosen by starts [N, T, columns], with their cotangents [N, T, P]."""
    limits = jnp.asarray(self.limits, index.dtype).reshape(1, 1, -1)  # [1, 1, columns]
    index = jnp.clip(index, 0, limits - 1) if self.clip else index
    taken = jnp.all((index >= 0) & (index < limits), axis=-1)  # [N, T]
    places = jnp.asarray(self.places, index.dtype).reshape(1, 1, -1)  # [1, 1, columns]
    tokens = jnp.sum(index * places, axis=-1)  # [N, T]
    right = trees.at_least_float32(right)
    # -1 marks a row whose index took nothing. The cotangent of that row is dropped, too.
    return RowFactors(jnp.where(taken, tokens, -1), jnp.where(taken[..., None], right, 0))


def _small_integers(index: jax.Array, bound: int) -> jax.Array:
  """Converts to int32. Numbers above `bound` become `bound`, and negative numbers stay negative;
  both are outside of a table."""
  kind = jnp.iinfo(index.dtype)
  large = kind.max > bound
  return (jnp.clip(index, max(kind.min, -1), bound) if large else index).astype(jnp.int32)


class Embedding(RowForm):
  """Rows that an index takes from a table."""

  one_hot = True

  def __init__(self, site: Site, indices: Indices):
    super().__init__(site)
    self.indices = indices
    rank = len(self.out_shape)
    gathers = indices.is_gather
    numbers = site.eqn.params["dimension_numbers"] if gathers else None
    self.out_entries = range(rank) if numbers is None else numbers.offset_dims
    self.out_rows = _others(rank, self.out_entries)
    self.order = (*indices.indexed, *indices.kept)
    self.blocks = math.prod(self.loop_sizes)
    self.rows = self.turns * math.prod(indices.shape)
    self.left = math.prod(_sizes(self.shape, indices.indexed))
    self.right = math.prod(_sizes(self.shape, indices.kept))
    self.left_dims = indices.indexed
    self.right_dims = indices.kept

  @classmethod
  def of(cls, site: Site) -> Self | None:
    indices = Indices.of(site, site.eqn)
    return cls(site, indices) if indices else None

  def build(self, data: tuple, cotangents: tuple) -> RowFactors:
    index = self.indices.build(dict(zip(self.site.data, data)))
    positions = len(self.indices.shape)
    index = self.arrange(index, (), range(positions), (positions,))  # [N, T, columns]
    right = self.arrange(cotangents[0], (), self.out_rows, self.out_entries)  # [N, T, P]
    return self.indices.rows(index, right)


class ChosenProduct(RowForm):
  """Rows that are multiplied by matrices, if an index chooses the matrices."""

  def __init__(self, site: Site, indices: Indices, axes: chosen_products.ChosenAxes):
    super().__init__(site)
    self.indices = indices
    self.axes = axes
    product = site.eqn.eqns[-1]
    side = 1 if axes.param_first else 0
    contracting, batching = product.params["dimension_numbers"]
    self.data_var = product.invars[side]
    self.data_c = contracting[side]
    self.data_b = batching[side]
    data_shape = self.data_var.aval.shape
    self.data_f = _others(len(data_shape), self.data_c, self.data_b)
    self.batch = batch = len(self.data_b)
    rank = len(self.out_shape)
    free = len(self.data_f)
    # dot_general orders its result: batch, free axes of the first operand, then of the second.
    self.out_t = (
      range(rank - free, rank) if axes.param_first else range(batch, batch + free)
    )
    self.out_p = _others(rank, range(batch), self.out_t)
    shape = self.shape
    indexed = indices.indexed
    # Kept dimensions of size 1 may have been dropped between the choice and the product.
    dropped = _others(len(shape), indexed, axes.contracted, axes.kept)
    contracted = tuple(d for d in axes.contracted if d not in indexed) + dropped
    kept = tuple(d for d in axes.kept if d not in indexed)
    self.width = math.prod(_sizes(shape, contracted))
    self.frees = math.prod(_sizes(data_shape, self.data_f))
    self.shares = math.prod(indices.shape[d] for d in axes.shared)
    # Positions of size 1 may have been dropped between the choice and the product.
    self.single = _others(len(indices.shape), axes.positions, axes.shared)
    self.order = (*indexed, *contracted, *kept)
    self.blocks = math.prod(self.loop_sizes)
    self.rows = self.turns * math.prod(indices.shape) * self.frees
    self.left = math.prod(_sizes(shape, indexed)) * self.width
    self.right = math.prod(_sizes(shape, kept))
    self.left_dims = (*indexed, *contracted)
    self.right_dims = kept
    self.recorded = site.steps * (math.prod(data_shape) + math.prod(self.out_shape))

  @classmethod
  def of(cls, site: Site) -> Self | None:
    axes = chosen_products.axes(site.eqn)
    indices = Indices.of(site, site.eqn.eqns[0])
    if axes is None or indices is None or not indices.indexed:
      return None
    return cls(site, indices, axes)

  def build(self, data: tuple, cotangents: tuple) -> RowFactors:
    known = dict(zip(self.site.data, data))
    index = self.indices.build(known)  # [*loops, *positions, columns]
    columns = len(self.indices.shape)
    outer = (*self.single, *self.axes.positions)
    index = self.arrange(index, (), outer, self.axes.shared, (columns,))
    data_rows = known[self.data_var]
    # A left side of integers would count as rows of a table, so integer data become floats.
    if not is_float(data_rows):
      data_rows = data_rows.astype(trees.at_least_float32(cotangents[0]).dtype)
    x = self.arrange(data_rows, (), self.data_b, self.data_f, self.data_c)
    right = self.arrange(cotangents[0], (), range(self.batch), self.out_t, self.out_p)
    # In each of N blocks, each batch row meets each free row and each shared position.
    blocks, batch_rows = right.shape[:2]
    full = (blocks, batch_rows, self.frees, self.shares)
    every = lambda a: jnp.broadcast_to(a, (*full, a.shape[-1])).reshape(
      blocks, math.prod(full[1:]), a.shape[-1]
    )
    right = every(right.reshape(*full, self.right))  # [N, T, P]
    chosen = self.indices.rows(every(index[:, :, None]), right)
    taken = chosen.left >= 0  # [N, T]
    left = jnp.where(taken[..., None], every(x[:, :, :, None]), 0)  # [N, T, width]
    return RowFactors(left, chosen.right, chosen.left)


_FORMS: dict[str, type[RowForm]] = {
  "dot_general": Dense,
  "conv_general_dilated": Convolution,
  "gather": Embedding,
  "dynamic_slice": Embedding,
  chosen_products.NAME: ChosenProduct,
}


def side_gram(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns the inner products [N, Ta, Tb] of the rows of two sides, one-hot or dense."""
  if is_float(a) and is_float(b):
    wide = trees.at_least_float32
    return precision.gram("ntk,nsk->nts", wide(a), wide(b))
  if is_float(a):
    return jnp.swapaxes(side_gram(b, a), 1, 2)
  if not is_float(b):
    # The inner product of one-hot rows is 1 where their tokens agree.
    return (a[:, :, None] == b[:, None, :]) & (a >= 0)[:, :, None]  # [N, Ta, Tb] bool
  # A one-hot row picks a column of the other side. A token of -1 reads column 0, and is
  # masked.
  columns = jnp.take_along_axis(b, jnp.maximum(a, 0)[:, None, :], axis=2)  # [N, Tb, Ta]
  return jnp.where(a[:, :, None] >= 0, jnp.swapaxes(columns, 1, 2), 0)


def _left_gram(a: RowFactors, b: RowFactors) -> jax.Array:
  """Returns inner products [N, Ta, Tb] of left rows of two sites; 0 if their blocks differ."""
  gram = side_gram(a.left, b.left)
  if a.chosen is None or b.chosen is None:
    return gram
  return jnp.where(a.chosen[:, :, None] == b.chosen[:, None, :], gram, 0)


def outer_length(rows: RowFactors) -> Norms:
  """Returns |left^T right| for a single row, which is |left| |right| in each block.

  Its growth by rounding in a sum is included (`precision`)."""
  right = lengths.of(rows.right, keep=1)  # [N]
  if not is_float(rows.left):
    return Norms((over_blocks(right),), extent=jnp.sum(right.longest))
  left = lengths.of(rows.left, keep=1)  # [N]
  grown = 1 + precision.of_sums(left.norm.dtype).growth
  norm = left.norm * right.norm * grown
  both = Length(norm, left.longest * right.longest * grown)
  length = over_blocks(both)
  return Norms((length,), extent=jnp.sum(left.longest + right.longest))


def over_blocks(each: Length) -> Length:
  """Returns the norm over blocks, [N] -> []. Norms are scaled before they are squared, since the
  square of a product of norms can leave the range of floats."""
  if each.norm.shape == (1,):
    return Length(each.norm[0], each.longest[0])
  norms = trees.scaled_norms([jnp.stack([each.norm, each.longest])])  # [2, N] -> [2]
  return Length(norms[0], norms[1])


def gram_length(
  parts: Sequence[RowFactors], left_grams: Sequence[jax.Array | None] = ()
) -> Norms:
  """Returns |sum of left^T right| through the T x T products of rows (ghost norm).

  A bound on the rounding is added to the norm. Otherwise, where rows cancel, the sum of pairs could
  be below the squared norm of the gradient. `longest` also includes a bound on underflow, in the
  inner products of either side and in the products of pairs.

  A backend may add the K products of an inner product in any order. The error is at most K eps / 2
  times the product of both rows' lengths (Higham 2002, section 3.1). Constant rows come near this
  bound, since their sums are rounded the same way K times.

  Args:
    parts: both sides of each site.
    left_grams: inner products [N, T, T] of the left rows of each site, where they are known.
  """
  left_grams = left_grams or [None] * len(parts)
  total = jnp.float32(0)
  size = jnp.float32(0)
  sizes = jnp.float32(0)
  grown = jnp.float32(0)
  # `multiplied` is the `reach` of rows outside of tables, `in_table` the squared `reach` of rows of
  # a table.
  multiplied = jnp.float32(0)
  in_table = jnp.float32(0)
  extent = jnp.float32(0)
  left_trace = jnp.float32(0)
  right_trace = jnp.float32(0)
  # Inner products of one-hot rows are bool, so they become numbers.
  as_numbers = lambda gram: gram if is_float(gram) else gram.astype(jnp.float32)
  side_grams = [
    (
      as_numbers(_left_gram(p, p) if known is None else known),
      side_gram(p.right, p.right),
    )
    for p, known in zip(parts, left_grams)
  ]
  # Roots of the diagonals are the lengths of the rows, [N, T]. The diagonal is a masked sum, which
  # XLA merges with the sums over all pairs.
  eye = lambda gram: jnp.eye(gram.shape[-1], dtype=bool)[None]
  diagonal = lambda gram: jnp.sum(jnp.where(eye(gram), gram, 0), axis=2)
  sides = [tuple(jnp.sqrt(diagonal(gram)) for gram in each) for each in side_grams]
  width = parts[0].right.shape[2]
  inner = max(part.left.shape[2] if is_float(part.left) else 0 for part in parts)
  for i, a in enumerate(parts):
    for j, b in enumerate(parts[i:], i):
      left = side_grams[i][0] if i == j else as_numbers(_left_gram(a, b))
      right = side_grams[i][1] if i == j else side_gram(a.right, b.right)  # [N, Ta, Tb]
      # Pairs are symmetric, so a pair of rows from two sites counts for both orders.
      times = 1 if i == j else 2
      pairs = left * right * times  # [N, Ta, Tb]
      left_most = sides[i][0][:, :, None] * sides[j][0][:, None, :]  # [N, Ta, Tb]
      right_most = sides[i][1][:, :, None] * sides[j][1][:, None, :]  # [N, Ta, Tb]
      off = inner * left_most * jnp.abs(right) + width * jnp.abs(left) * right_most
      total = total + jnp.sum(pairs)
      # A share of 4 eps bounds the rounding of the products of pairs and of their sum.
      size = size + jnp.sum(4 * jnp.abs(pairs) + (times / 2) * off)
      if _in_table(a) and _in_table(b):
        # Rows of different tokens go to different rows of the table, so they do not add up.
        in_table = in_table + times * jnp.sum(left * right_most)
      if i == j:
        of_site = jnp.sum(sides[i][0] * sides[i][1])
        sizes = sizes + of_site
        multiplied = multiplied if _in_table(a) else multiplied + of_site
        growth = _growth(a)
        # 0 times an infinite size would be NaN.
        grown = grown + growth * of_site if growth else grown
        extent = extent + jnp.sum(sides[i][0] + sides[i][1])
        left_trace = left_trace + jnp.sum(jnp.square(sides[i][0]))
        right_trace = right_trace + jnp.sum(jnp.square(sides[i][1]))
  eps = jnp.finfo(total.dtype).eps
  rows = sum(part.right.shape[1] for part in parts)
  blocks = parts[0].right.shape[0]
  # Underflow takes at most K * `tiny` from an entry of the left gram. The sum over pairs of
  # |g_t| |g_s| is at most T times the right trace (Cauchy-Schwarz). The same holds with the
  # sides exchanged. Each of the T^2 products of pairs may lack one more `tiny`.
  lost = max(inner, 1) * right_trace + width * left_trace + rows * blocks
  lost = rows * (lengths.tiny(total) * lost)
  if precision.in_three_parts(parts[0].right, parts[0].right):
    # A number is split into parts of 11 bits. Later parts also become 0 if they are below `tiny`.
    longest_row = functools.reduce(
      jnp.maximum, [jnp.max(side, initial=0) for each in sides for side in each]
    )
    lost = lost * (1 + 2 * longest_row)
  # The sum of pairs is a square, so only rounding can make it negative.
  square = jnp.maximum(total, 0) + eps * size
  charge = eps + max(map(_growth, parts))
  missing = jnp.sqrt(rows * lost)
  length = lengths.from_square(square, lost, eps * sizes + grown, charge * missing)
  reach = multiplied + jnp.sqrt(in_table) + missing
  return Norms((length,), None, extent, reach)


def _in_table(part: RowFactors) -> bool:
  """Returns whether the rows are added to rows of a table."""
  return not is_float(part.left)


def _growth(part: RowFactors) -> float:
  """Returns the share by which a product a_t g_t^T in a clipped sum may exceed |a_t| |g_t|.

  It is 0 for rows of a table, which are added without a product.
  """
  if _in_table(part):
    return 0.0
  return precision.of_sums(trees.at_least_float32(part.right).dtype).growth


def with_rounding(summed: jax.Array, parts: Sequence[RowFactors]) -> Norms:
  """Returns the norm of sum_t a_t g_t^T, plus a bound on the rounding of this product.

  The bound is a share of sum_t |a_t| |g_t|: (T + 2) eps / 2 for T rows, plus twice the growth of a
  sum (`precision`). It is far below the norm unless rows cancel.
  Constant rows come near the bound: XLA's CPU backend adds them one after the other, and rounds
  each sum the same way. With a share of eps alone, terms were 1.01 clip norms long from 64 rows on,
  and 3.5 from 10,000 rows on.
  """
  sides = [(_row_lengths(p.left), _row_lengths(p.right)) for p in parts]  # [N, T]
  each = [
    Length(jnp.sum(left.norm * right.norm), jnp.sum(left.longest * right.longest))
    for left, right in sides
  ]
  # T products, added in whichever order, with or without fused operations, are off by at most
  # T eps / 2 (Higham 2002, section 3.1). Rounding of c_i g_i adds eps / 2, and so does that of a
  # norm.
  rows = sum(part.right.shape[1] for part in parts)
  rounding = (rows + 2) * float(jnp.finfo(summed.dtype).eps) / 2
  # The product here may be shorter by the growth, and the product in the sum longer.
  charges = [rounding + 2 * _growth(part) for part in parts]
  pairs = list(zip(charges, each))
  charged = functools.reduce(jnp.add, [charge * rows.norm for charge, rows in pairs])
  most = functools.reduce(jnp.add, [charge * rows.longest for charge, rows in pairs])
  extents = [jnp.sum(left.longest + right.longest) for left, right in sides]
  extent = functools.reduce(jnp.add, extents)
  length = lengths.of(summed)  # []
  rounded = Length(length.norm + charged, length.longest + most)
  reach = jnp.zeros((), summed.dtype)
  for part, (_, right), rows in zip(parts, sides, each):
    if _in_table(part):
      # Rows of different tokens do not add up, so lengths are summed for each token: [N, K, 1].
      sums = product(RowFactors(part.left, right.longest[..., None]), summed.shape[1])
      reach = reach + lengths.of(sums).longest
    else:
      reach = reach + rows.longest
  return Norms((rounded,), None, extent, reach)


def summed_product(
  parts: Sequence[RowFactors], left_size: int, *, as_sums: bool = False
) -> jax.Array:
  """Sums left^T right over sites: [N, K, P], in float32 or wider; see `product`."""
  each = [product(p, left_size, as_sums=as_sums) for p in parts]
  return functools.reduce(jnp.add, each)


def _row_lengths(side: jax.Array) -> Length:
  if not is_float(side):
    inside = (side >= 0).astype(jnp.float32)  # [N, T]
    return Length(inside, inside)
  return lengths.of(side, keep=2)


def product(rows: RowFactors, left_size: int, *, as_sums: bool = False) -> jax.Array:
  """Returns left^T right: [N, K, P], in float32 or wider.

  Args:
    rows: both sides.
    left_size: K.
    as_sums: whether to multiply in the precision of sums (`precision.of_sums`). Rounding may then
      make the product longer than the exact product of the rows.
  """
  if rows.chosen is not None:
    return _product_by_blocks(rows, left_size)
  if is_float(rows.left):
    exact = lax.Precision.HIGHEST
    left = trees.at_least_float32(rows.left)
    right = trees.at_least_float32(rows.right)
    chosen = precision.of_sums(left.dtype).precision if as_sums else exact
    dot = functools.partial(jnp.einsum, precision=chosen)
    if left.shape[0] == 1:
      # XLA multiplies two flat matrices without transposing them in memory.
      return dot("tk,tp->kp", left[0], right[0])[None]
    return dot("ntk,ntp->nkp", left, right)
  right = trees.at_least_float32(rows.right)
  empty = jnp.zeros((left_size, right.shape[-1]), right.dtype)  # [K, P]
  # A token of -1 adds zeros to row 0.
  add = lambda tokens, values: empty.at[jnp.maximum(tokens, 0)].add(values)
  return jax.vmap(add)(rows.left, right)


def _product_by_blocks(rows: RowFactors, left_size: int) -> jax.Array:
  """Returns left^T right, with each row in the block that it chose: [N, K, P]."""
  left = trees.at_least_float32(rows.left)
  right = trees.at_least_float32(rows.right)
  width = left.shape[-1]
  empty = jnp.zeros((left_size // width, width, right.shape[-1]), right.dtype)

  def add(chosen, left, right):
    outer = left[:, :, None] * right[:, None, :]  # [T, width, P]
    return empty.at[jnp.maximum(chosen, 0)].add(outer)

  # Rows that took nothing are zero, and add zeros to block 0.
  blocks = jax.vmap(add)(rows.chosen, left, right)  # [N, blocks, width, P]
  return blocks.reshape(blocks.shape[0], left_size, -1)
