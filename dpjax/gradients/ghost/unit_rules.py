"""Norms and clipped sums of one unit, from the recorded operands and cotangents.

Norms and gradients are written for ONE example. `_over_examples` adds the batch, at once or in a
compiled loop, as the cost model chooses. Sums take the whole batch. In comments c_i is the clip
factor of example i, and g_i its cotangents.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpjax import jaxprs, trees
from dpjax.branches import rarely_taken
from dpjax.gradients.exact_sum import ExactSum, exact_plus
from dpjax.gradients.ghost import (
  chosen_products,
  cost_model,
  lengths,
  precision,
  row_forms,
  tapped,
)
from dpjax.gradients.ghost.jaxpr_sites import Loop, Site
from dpjax.gradients.ghost.lengths import Length, Norms
from dpjax.gradients.ghost.row_forms import RowFactors, RowForm
from dpjax.gradients.ghost.tapped import ParamFlow, Recorded
from dpjax.gradients.ghost.units import ELEMENTWISE, Rule, Sum, Unit, sum_of
from dpjax.gradients.traced_values import as_varying_as, on_settled
from dpjax.gradients.weighted_sums import dot_examples, weighted_sum
from dpjax.parallel import made_for

# Array size per example, in elements, above which a branch skips the pass that drops examples, if
# none is dropped. For smaller arrays the branch takes longer to compile than the pass to run.
_BRANCH_ABOVE = 4096
# Operand size of a batch, in elements, above which a branch skips the copy that drops examples, if
# all operands are finite. XLA's CPU backend would cut a larger copy into parts for other threads.
_WIDE = 2**16
# Two evaluations of one gradient may differ by this share of its norm.
_ROUNDING = 1e-6
# Largest number of parts of a batch in the branch for batches with unusual examples, unless
# `_parts_of` gives more. The branch copies operands part by part.
_PARTS = 16
# Largest share of a clipped term that c_i g_i may lose to underflow. If more is lost, the example
# is added alone.
_LOST = 1e-7
# Change of a sum, in clip norms, that an example's rows may cause through the rounding of other
# rows. `_USUAL_REACH` may allow more.
_STRAY = 0.04
# Least limit on the reach of an example's rows in a unit (`Norms.reach`), in clip norms,
# however many rows the batch has. In networks the reach was 0 to 5, and 15 with LoRA.
_USUAL_REACH = 8.0
# Largest limit on this reach. An example beyond the limit is added alone.
_MOST_REACH = 32.0
# A part of a batch, as `_parts_of` cuts it, has about this many rows or fewer, unless one example
# has more. With so many rows, `_STRAY` allows a reach of about 32 clip norms.
_ROWS_OF_SUM = 40_000
# Number of rows of a batch in one part of `_table_sum`. Roundings add up only within a part.
_ROWS_OF_TABLE = 256


def sites_of(rules: Iterable[UnitRule]) -> list[Site]:
  """Returns the sites of the units of these rules."""
  return [site for rule in rules for site in rule.unit.sites]


@dataclasses.dataclass(frozen=True, eq=False)
class UnitRule:
  """How the norms and the clipped sum of one unit are formed.

  `norm` and `gradient` are written for ONE example, without the axis of examples. `sum` takes the
  whole batch.
  """

  unit: Unit
  flow: ParamFlow

  def pull(self) -> Any:
    """Returns (what the sites see of the parameters, transpose from there to the leaves)."""
    return self.flow.pull(self.unit.leaves, self.unit.sites)

  def prepare(self) -> Any:
    """Returns what `norm` reads of the parameters, which is computed once for all examples."""
    return None

  def norm(self, prepared: Any, loss: jax.Array, data: Any, cotangents: Any) -> Norms:
    """Returns the norms of ONE example; see `Norms` for the arrays that are kept with them."""
    raise NotImplementedError

  def sum(
    self,
    recorded: Recorded,
    first: Norms,
    factors: Sequence[jax.Array],
    finite: bool | None = None,
    begun: tuple[jax.Array, ...] | None = None,
  ) -> tuple[jax.Array, ...]:
    """Computes sum_i factors[l][i] * gradient_i of leaf l, for each leaf of the unit.

    A factor of exactly 0 drops its example, whatever its operands hold. This is the ordinary
    transpose of each site at c_i g_i.

    Args:
      recorded: operands and cotangents of all sites.
      first: norms of the unit, and arrays that the first pass has kept.
      factors: [B] for each leaf of the unit.
      finite: True only if every example has a finite norm. False suits any batch, but copies
        operands. With None the norms are tested here.
      begun: sums to which a unit's loop (`Sum.AGAIN`) adds its terms; None for zeros.
    """
    del begun
    if self.unit.hold:
      each = zip(first.held, factors)
      return self.of_held(tuple([_weighted_sum(x, factor, finite) for x, factor in each]))
    # A non-finite operand of a product makes its example's norm infinite or NaN. So finite norms
    # imply finite operands.
    known = all_finite([first]) if finite is None else finite
    return self.transpose(recorded, factors, known)

  def gradient(self, pulled: Any, data: Any, cotangents: Any) -> tuple[jax.Array, ...]:
    """Returns the gradient [*leaf] of ONE example, for each leaf of the unit."""
    seen, back = pulled  # of each site: [*source.loops, *param]
    at = {}
    for site in self.unit.sites:
      i = site.index
      at[i] = site_gradient(site, seen[i], data[i], cotangents[i])
    return back(at)

  def of_held(self, held: Any) -> tuple[jax.Array, ...]:
    """Returns the gradient of each leaf from a row, or a sum of rows, of `Norms.held`."""
    return held

  def row_gradient(self, rows: RowReader, first: Norms | None, row: jax.Array) -> Any:
    """Returns the gradient of the example in one row of the batch, for each leaf of the unit.

    It is formed from g_i, not from c_i g_i, which may underflow. If the first pass holds it, it is
    read from there: `first` is not None. So the unit's recording need not stay in memory.
    """
    if first is None:
      return self.gradient(self.pull(), *rows.at(self.unit, row))
    held = jax.tree.map(lambda x: rows.one(x, row, 0), first.held)
    if first.finite is not None:
      held = jax.tree.map(lambda x: jnp.where(first.finite[row], x, jnp.nan), held)
    return self.of_held(held)

  def stack(self, recorded: Recorded) -> tuple[jax.Array, ...]:
    """Returns the gradients of all examples, [B, *leaf] for each leaf of the unit."""
    pulled = self.pull()
    of_example = lambda loss, data, cotangents: self.gradient(pulled, data, cotangents)
    return _over_examples(of_example, self.unit.sites, recorded, None)

  def zeros(self, recorded: Recorded) -> tuple[jax.Array, ...]:
    """Returns a zero for each leaf of the unit."""
    zeros = tuple([jnp.zeros_like(self.flow.leaves[i]) for i in self.unit.leaves])
    # Under shard_map the carry of a loop must vary over the mesh as its terms do.
    return as_varying_as(recorded.losses, zeros)

  @property
  def convolves(self) -> bool:
    """Returns whether the sum of the unit is an ordinary convolution."""
    names = [site.name for site in self.unit.sites]
    return "conv_general_dilated" in names and sum_of(self.unit) is Sum.TRANSPOSE

  def transposer(self) -> Any:
    """Returns `pull`, or another linear map whose rounding the norms include."""
    return self.pull()

  def transpose(
    self,
    recorded: Recorded,
    factors: Sequence[jax.Array],
    finite: jax.Array | bool | None = None,
    *,
    settled: bool = True,
  ) -> tuple[jax.Array, ...]:
    """Applies each site's ordinary transpose to c_i g_i, cotangents of example i times its factor.

    Unless the recording is `settled` in memory already, c_i g_i are formed from stored numbers, as
    the norms are.
    """
    call = operator.call if settled else on_settled
    seen, back = self.transposer()  # of each site: [*source.loops, *param]
    by_factor: dict[int, tuple[jax.Array, ...]] = {}
    sums = []
    for i, factor in enumerate(factors):
      # Leaves of one clip group share one array of factors, so one transpose serves them all.
      if id(factor) not in by_factor:
        at = {}
        for site in self.unit.sites:
          params = seen[site.index]
          at[site.index] = _clipped_transpose(site, params, recorded, factor, call, finite)
        by_factor[id(factor)] = back(at)
      sums.append(by_factor[id(factor)][i])
    return tuple(sums)

  def loses_terms(
    self, first: Norms, factor: jax.Array, longest: jax.Array
  ) -> jax.Array | None:
    """Returns [B] bool: whether c_i g_i loses a visible part of the example's clipped term.

    An entry of c_i g_i below the smallest normal number becomes 0. Row t then loses up to this
    number times |a_t|, for each column of g_t. If the operand is large, this may be the whole term.

    Args:
      first: result of the first pass over the unit.
      factor: [B], clip factors of the unit's leaves.
      longest: [B], upper bounds on the norms of the gradients of the leaves' clip group.

    Returns:
      None if the first pass measured no extent: then nothing visible is lost.
    """
    if first.extent is None:
      return None
    columns = max([max(form.left, form.right) for form in self.unit.forms])
    lost = lengths.tiny(first.extent) * math.sqrt(columns) * first.extent  # [B]
    # The test is negated, so that an extent of infinity or NaN counts as a loss.
    return (factor != 0) & ~(lost <= _LOST * factor * longest)

  def stray(self, first: Norms, factor: jax.Array, bound: float) -> jax.Array | None:
    """Returns how far an example's rows can move the sum of other examples, [B]; up to 1 is
    allowed.

    Rows that cancel remain in the sum of a batch until the last of them is added. Meanwhile the N
    rows of other examples are added to numbers of up to R / 2, where R is the reach of the
    canceling rows. Each addition is rounded. In any order, this changes the sum by at most
    N R eps / 4.

    Args:
      first: result of the first pass over the unit.
      factor: [B], clip factors of the unit's leaves.
      bound: clip norm of the unit's leaves, positive.

    Returns:
      None if the first pass measured no reach.
    """
    if first.reach is None:
      return None
    count = factor.shape[0]
    dtype = first.reach.dtype
    rows = sum(
      [form.rows * count // _parts_of(form, dtype, count) for form in self.unit.forms]
    )
    allowed = _STRAY / (max(rows, 1) * float(jnp.finfo(dtype).eps) / 4)
    # Other examples may be at the limit, too, and together make the sum large (`_examples_of_sum`).
    # So the limit is at most `_MOST_REACH`.
    far = factor * first.reach / bound / max(min(allowed, _MOST_REACH), _USUAL_REACH)
    # A dropped example may have an infinite reach, but is not in the sum.
    return jnp.where(factor != 0, far, 0)


class Unused(UnitRule):
  """No site: the gradient is zero."""

  def norm(self, prepared, loss, data, cotangents) -> Norms:
    zero = jnp.zeros(loss.shape, jnp.float32)  # []
    return Norms((Length(zero, zero),))

  def sum(self, recorded, first, factors, finite=None, begun=None):
    return tuple([jnp.zeros_like(self.flow.leaves[i]) for i in self.unit.leaves])

  def row_gradient(self, rows, first, row):
    return self.zeros(rows.recorded)

  def stack(self, recorded):
    count = recorded.losses.shape[0]
    leaves = [self.flow.leaves[i] for i in self.unit.leaves]
    return tuple([jnp.zeros((count, *x.shape), x.dtype) for x in leaves])


class Rows(UnitRule):
  """Base class of the rules whose norm comes from rows (`row_forms`)."""

  def norm(self, prepared, loss, data, cotangents) -> Norms:
    parts = []
    for site, form, swap in zip(self.unit.sites, self.unit.forms, self.unit.swapped):
      rows = form.build(data[site.index], cotangents[site.index])
      # The sides of a site are exchanged where they would not match those of the other sites.
      parts.append(RowFactors(rows.right, rows.left) if swap else rows)
    return self.norm_of_rows(parts, data)

  def norm_of_rows(self, parts: Sequence[RowFactors], data: Any) -> Norms:
    """Returns the norms from both sides of each site: left [N, T, K] or [N, T], right [N, T, P]."""
    raise NotImplementedError


class Outer(Rows):
  """One row: |a|^2 |g|^2."""

  def norm_of_rows(self, parts, data) -> Norms:
    return row_forms.outer_length(parts[0])


class Gram(Rows):
  """Inner products of rows: sum of (a a^T) * (g g^T)."""

  def norm_of_rows(self, parts, data) -> Norms:
    # If inner products of windows come from `places`, no window is read, so XLA copies none.
    known = [
      form.places.build(data[site.index])
      if form.places and cost_model.by_places(form, made_for.platform())
      else None
      for site, form in zip(self.unit.sites, self.unit.forms)
    ]
    return row_forms.gram_length(parts, known)


class Product(Rows):
  """The product a^T g of one example, which is freed, or held for the sum."""

  def norm_of_rows(self, parts, data) -> Norms:
    form = self.unit.forms[0]
    left_size = form.right if self.unit.swapped[0] else form.left
    product = row_forms.summed_product(parts, left_size, as_sums=True)
    # The product is [N, K, P], or [N, P, K] if swapped. A held product is summed itself, so its
    # norm needs no bound on rounding.
    if self.unit.hold:
      return Norms((lengths.of(product),), (product,))
    return row_forms.with_rounding(product, parts)

  def of_held(self, held):
    (product,) = held
    # All sites of the leaf share this one matrix, so it is converted back through the first site.
    site = self.unit.sites[0]
    if self.unit.swapped[0]:
      product = jnp.swapaxes(product, 1, 2)  # [N, P, K] -> [N, K, P]
    _, back = self.flow.pull(self.unit.leaves, (site,))
    return back({site.index: (self.unit.forms[0].unflatten(product),)})


class Gradient(UnitRule):
  """Each leaf's gradient of one example: held for the sum, or formed once more."""

  def prepare(self):
    return self.pull()

  def norm(self, prepared, loss, data, cotangents) -> Norms:
    finite, grads = self.apart(prepared, data, cotangents)  # of each leaf: [*leaf]
    if self.unit.hold:
      return Norms((), grads, finite=finite)
    return Norms(tuple(map(lengths.of, grads)), None, finite=finite).unless_damaged()

  def apart(self, pulled: Any, data: Any, cotangents: Any) -> tuple[Any, Any]:
    """Returns (finite, gradient of ONE example for each leaf), under which vmap mixes no examples.

    In a computation that mixes examples, such as a grouped convolution with zeros between its
    groups, NaN of one example reaches the others. So if an example's arrays are not finite, all
    their numbers become 1, since 0 times a finite number is 0. Its gradient is then wrong, and has
    to be replaced by NaN: `finite` is False. `finite` is None if nothing mixes.
    """
    if all(map(_keeps_apart, self.unit.sites)):
      return None, self.gradient(pulled, data, cotangents)
    seen = (data, cotangents)
    numbers = filter(jaxprs.is_float, jax.tree.leaves(seen))
    known = [jnp.all(jnp.isfinite(x)) for x in numbers]
    finite = functools.reduce(jnp.logical_and, known, jnp.array(True))
    # Every type of floats has a 1, and some have no 0.
    clean = lambda x: jnp.where(finite, x, jnp.ones((), x.dtype))
    harmless = jax.tree.map(lambda x: clean(x) if jaxprs.is_float(x) else x, seen)
    return finite, self.gradient(pulled, *harmless)

  def sum(self, recorded, first, factors, finite=None, begun=None):
    if sum_of(self.unit) is not Sum.AGAIN:
      return super().sum(recorded, first, factors, finite, begun)
    begun = self.zeros(recorded) if begun is None else begun
    return self._one_by_one(recorded, first, factors, begun)

  def _one_by_one(self, recorded: Recorded, first: Norms, factors: Any, begun: Any):
    """Adds each example's gradient, formed again in a compiled loop, times its factor.

    If terms cancel or a custom derivative is not linear, the transpose at c_i g_i is not c_i times
    the gradient whose norm was taken. So the gradient is formed again, and scaled down where it
    exceeds that norm.
    """
    pulled = self.pull()
    longest = tuple([length.longest for length in first.lengths])  # of each leaf: [B]
    _, data, cotangents = recorded.in_front(self.unit.sites)
    seen = data, cotangents, tuple(factors), longest
    count = recorded.losses.shape[0]
    # All chunks have the same size: the largest divisor of the batch size that `in_flight` allows.
    in_flight = cost_model.in_flight(self.unit.cost, made_for.platform())
    most = max(1, min(count, in_flight))
    chunk = max(d for d in range(1, most + 1) if count % d == 0)
    cut = lambda x: x.reshape(count // chunk, chunk, *x.shape[1:])  # [B, ...] -> chunks

    def clipped_term(data, cotangents, factors, longest):
      # An example that is not finite has factors of 0.
      _, grads = self.apart(pulled, data, cotangents)
      return tuple(map(_hold_to, grads, factors, longest))

    def body(total, part):
      terms = jax.vmap(clipped_term)(*part)  # of each leaf: [chunk, *leaf]
      return total.plus(tuple(map(trees.pairwise_sum, terms))), None

    first_sums = as_varying_as(seen, ExactSum.of(begun))
    return lax.scan(body, first_sums, jax.tree.map(cut, seen))[0].value()


_RULES = {
  Rule.UNUSED: Unused,
  Rule.OUTER: Outer,
  Rule.GRAM: Gram,
  Rule.PRODUCT: Product,
  Rule.GRADIENT: Gradient,
}


def rule_of(unit: Unit, flow: ParamFlow) -> UnitRule:
  """Returns the rule of a unit: the one of its layer, if it has one, or a general one."""
  return (unit.layer.rule if unit.layer else _RULES[unit.rule])(unit, flow)


def norms(rules: Sequence[UnitRule], recorded: Recorded, platform: str) -> list[Norms]:
  """Returns the norms of each example's gradient, unit by unit and leaf by leaf.

  Units that take the examples in chunks of the same size share one compiled loop.
  """
  by_chunk: dict[int | None, list[UnitRule]] = {}
  for rule in rules:
    by_chunk.setdefault(cost_model.chunk(rule.unit.cost, platform), []).append(rule)
  results: dict[UnitRule, Norms] = {}
  for chunk, members in by_chunk.items():
    norm_fns = [functools.partial(rule.norm, rule.prepare()) for rule in members]
    of_example = lambda *seen, norm_fns=norm_fns: [norm(*seen) for norm in norm_fns]
    each = _over_examples(of_example, sites_of(members), recorded, chunk)
    # lengths [B], held [B, ...]
    for rule, norms in zip(members, each):
      # Of joined leaves the first has the norm of all, the others have 0.
      if norms.lengths:
        zero = jnp.zeros_like(norms.lengths[0].norm)  # [B]
        missing = len(rule.unit.leaves) - len(norms.lengths)
        norms = norms._replace(lengths=norms.lengths + (Length(zero, zero),) * missing)
      results[rule] = norms
  return [results[rule] for rule in rules]


def _over_examples(
  fn: Callable, sites: Sequence[Site], recorded: Recorded, chunk: int | None
) -> Any:
  """Returns fn(loss, operands, cotangents) of each example at these sites, [B, ...]."""
  count = recorded.losses.shape[0]
  if chunk is None or chunk >= count:
    axes = {site.index: len(site.loops) for site in sites}
    return jax.vmap(fn, in_axes=(0, axes, axes))(*recorded.at(sites))
  # Chunks get nearly equal sizes. This often avoids a remainder, which is compiled separately.
  chunk = -(-count // -(-count // chunk))
  seen = recorded.in_front(sites)
  return lax.map(lambda x: fn(*x), seen, batch_size=chunk if chunk > 1 else None)


def _keeps_apart(site: Site) -> bool:
  """Returns whether the gradients of single examples at a site are formed apart.

  A grouped convolution may mix them: where a compiler carries it out with zeros between the groups,
  NaN of one example reaches the others.
  """
  form = site.form
  if form is not None:
    return form.one_hot or _by_rows(site, form)
  if site.eqn is None or site.name == chosen_products.NAME:
    return True
  names = {site.name}.union(*map(jaxprs.primitives, jaxprs.inside(site.eqn)))
  # The rule of a custom derivative may hold a convolution.
  custom = any(name.startswith("custom_") for name in names)
  return not custom and "conv_general_dilated" not in names


def site_gradient(site: Site, seen, data, cotangents) -> tuple[jax.Array, ...]:
  """Returns the gradient [*source.loops, *param] of ONE example for each parameter as the
  site sees it."""
  form = site.form
  if form is not None and _by_rows(site, form):
    # `precision.of_sums` suffices here. Callers add the gradient to a sum, scale it down to a known
    # norm, or add a bound on its rounding to its norm.
    rows = form.build(data, cotangents)
    product = row_forms.product(rows, form.left, as_sums=True)  # [N, K, P]
    return (form.unflatten(product),)
  if site.name in ELEMENTWISE and site.loops:
    return _stepwise(site, seen, data, cotangents)
  return transpose(site, seen, data, cotangents)


def _by_rows(site: Site, form: RowForm) -> bool:
  """Returns whether a product of rows, not a transpose, forms the gradient of one example.

  Under vmap the transpose of a convolution is a grouped convolution. On an H100 it takes 3 to 60
  times as long as a product of patches. A TPU was not timed; patches would move more memory.
  """
  grouped = site.name == "conv_general_dilated" and cost_model.copies_windows(form)
  return not form.one_hot and (not grouped or made_for.platform() in ("cpu", "gpu"))


def _stepwise(site: Site, seen, data, cotangents) -> tuple[jax.Array, ...]:
  """Transposes a site step by step, then sums over the steps by a matrix product.

  XLA's CPU backend sums over a leading axis several times slower than it multiplies.
  """
  step = dataclasses.replace(site, loops=())
  back = _over_loops(lambda params, arrays: transpose(step, params, *arrays), site)
  grads = back(seen, (data, cotangents))  # of each parameter: [*site.loops, *param]

  def summed(source, grad):
    shared = [i for i, loop in enumerate(site.loops) if loop not in source.loops]
    ones = jnp.ones([site.loops[i].length for i in shared], grad.dtype)  # [*shared]
    contracted = list(range(len(shared))), shared
    return jnp.tensordot(ones, grad, contracted)  # [*source.loops, *param]

  return tuple(map(summed, site.sources, grads))


def transpose(
  site: Site,
  seen,
  data,
  cotangents,
  *,
  wide: bool = False,
  exactness: lax.Precision = lax.Precision.HIGHEST,
):
  """Returns the gradients of the site's parameters, summed over scans that reuse a parameter.

  With `wide`, or for floats of less than 32 bits, it computes in at least float32, with products in
  precision `exactness`. Equations that cannot be widened keep their types.
  """
  fn = _over_loops(_site_fn(site, wide, exactness), site)
  primals, back = jax.vjp(lambda *params: fn(params, data), *seen)  # [*site.loops, *result]
  return back(jax.tree.map(tapped.cast_as, cotangents, primals))


def _site_fn(site: Site, wide: bool, exactness: lax.Precision) -> Callable:
  """Returns a function (parameters, data operands) -> the site's differentiable results.

  With `wide`, or if the equation has floats of less than 32 bits, results are at least float32,
  unless the equation cannot be widened.
  """
  if site.eqn is None:
    return lambda params, data: (params[0],)
  order = jaxprs.operands(site.eqn)
  avals = [var.aval for var in (*order, *site.eqn.outvars)]
  wide = wide or any(map(jaxprs.is_narrow, avals))
  evaluate = jaxprs.wide_fn(site.eqn, exactness) if wide else None
  call = evaluate or jaxprs.eqn_fn(site.eqn)

  def fn(params, data):
    known = dict(zip((*site.params, *site.data), (*params, *data)))
    values = [known[var] for var in order]
    # Equations that cannot be widened get the types that they were traced with.
    values = values if evaluate else map(tapped.cast_as, values, avals)
    results = call(*values)
    return tuple([results[i] for i in site.outs])

  return fn


def _over_loops(fn: Callable, site: Site) -> Callable:
  """Maps fn(parameters, arrays) over the scans around the site: [*site.loops, ...]."""
  for loop in reversed(site.loops):
    axes = tuple(0 if loop in source.loops else None for source in site.sources)
    fn = jax.vmap(fn, in_axes=(axes, 0), axis_size=loop.length)
  return fn


def all_finite(results: Sequence[Norms]) -> jax.Array:
  """Returns whether every example has a finite norm in every leaf of these units, [] bool."""
  longest = [length.longest for first in results for length in first.lengths]  # each [B]
  return jnp.all(jnp.isfinite(jnp.stack(longest)))


# Numbers that a vector of a TPU holds side by side.
_LANES = 128


def _is_in_lanes(x: jax.Array) -> bool:
  """Returns whether a TPU holds the examples of x [..., B, ..., C] along its lanes."""
  fills = x.shape[-1] % _LANES == 0
  return x.size > 0 and not fills and jnp.issubdtype(x.dtype, jnp.floating)


class RowReader:
  """Reads what was recorded or held of ONE example, in a loop over such examples.

  A TPU holds the batch along the 128 lanes of its vectors, unless the last axis fills them. To cut
  an example out there, the compiler copies every array into a layout in which the batch comes
  first. With few channels such a copy is four times as large, and all copies are in memory at once.
  So these arrays enter the loop as [n, B], which is how they lie, and an example is read as a sum
  over B in which all others are 0.
  """

  def __init__(
    self, rules: Sequence[UnitRule], recorded: Recorded, kept: Sequence[Norms | None]
  ):
    self.recorded = recorded
    self.kept = kept
    self._lanes: dict[int, jax.Array] = {}  # by the array's identity
    if made_for.platform() != "tpu":
      return
    read = []
    for rule, first in zip(rules, kept):
      if first is not None:
        read += [(x, 0) for x in jax.tree.leaves(first.held)]
        continue
      for site in rule.unit.sites:
        arrays = recorded.operands[site.index] + recorded.cotangents[site.index]
        read += [(x, len(site.loops)) for x in arrays]
    for x, axis in read:
      if id(x) not in self._lanes and _is_in_lanes(x):
        last = jnp.moveaxis(x, axis, -1)
        self._lanes[id(x)] = last.reshape(-1, last.shape[-1])

  def at(self, unit: Unit, row: jax.Array) -> tuple[Any, Any]:
    """Returns operands and cotangents at the unit's sites, without the axis of examples."""
    _, *kinds = self.recorded.at(unit.sites)
    for site in unit.sites:
      for arrays in kinds:
        each = [self.one(x, row, len(site.loops)) for x in arrays[site.index]]
        arrays[site.index] = tuple(each)
    return kinds[0], kinds[1]

  def one(self, x: jax.Array, row: jax.Array, axis: int) -> jax.Array:
    """Returns one row of an array whose axis `axis` is that of the examples."""
    lanes = self._lanes.get(id(x))
    if lanes is None:
      return lax.dynamic_index_in_dim(x, row, axis, keepdims=False)
    # NaN and infinity of other examples stay out. The sum of one number and zeros is exact.
    here = jnp.arange(lanes.shape[1]) == row  # [B]
    alone = jnp.sum(jnp.where(here[None], lanes, jnp.zeros((), x.dtype)), axis=1)  # [n]
    return alone.reshape(x.shape[:axis] + x.shape[axis + 1 :])


def _hold_to(grad: jax.Array, factor: jax.Array, longest: jax.Array) -> jax.Array:
  """Returns factor * grad [*leaf] of ONE example, scaled down if grad is longer than when its norm
  was taken."""
  # The length is computed in units of `longest`, so that its squares do not underflow.
  most = float(jnp.finfo(longest.dtype).max) ** 0.8
  unit = jnp.where(jnp.isfinite(longest), jnp.clip(longest, 1 / most, most), 1)
  again = lengths.of(trees.at_least_float32(grad) / unit).longest * unit  # []
  over = again > longest * (1 + _ROUNDING)
  factor = factor * jnp.where(over, longest / again, 1)
  keep = (factor != 0) & jnp.isfinite(again)
  return jnp.where(keep, grad * factor.astype(grad.dtype), 0)


def _parts_of(form: RowForm, dtype: Any, count: int) -> int:
  """Returns in how many parts the rows of a batch are multiplied and summed.

  Convolutions with windows stay out of loops, and tables have parts of their own (`_table_sum`).
  Rows in double precision need no parts.
  """
  if not form.plain or jnp.finfo(dtype).bits > 32:
    return 1
  wanted = min(max(1, -(-form.rows * count // _ROWS_OF_SUM)), count)
  # If the number of parts divides the batch, no smaller part is left over to compile.
  even = (d for d in range(wanted, min(4 * wanted, count) + 1) if count % d == 0)
  return next(even, wanted)


def _examples_of_sum(rows: int) -> int:
  """Returns the number of examples whose rows of a table may be added one after the other.

  N examples of T rows make a sum of up to N clip norms. So adding a row rounds by up to N eps / 2,
  and by half of that on average. One more example may change T N of these roundings. For
  `trees.ADDED_AT_ONCE` examples of one row, they add up to about .03 clip norms. Rows that cancel
  have a reach of up to 32 clip norms, half of which may be in the sum at once.
  """
  large = 1 if rows == 1 else _MOST_REACH / 2
  return max(1, int(trees.ADDED_AT_ONCE / math.sqrt(rows * large)))


def _weighted_sum(x: jax.Array, factor: jax.Array, finite: bool | None) -> jax.Array:
  """Sums [B, ...] with weights [B] -> [...]; see `UnitRule.sum`."""
  if finite:
    return dot_examples(factor, trees.at_least_float32(x))
  if finite is None and math.prod(x.shape[1:]) > _BRANCH_ABOVE:
    return weighted_sum(x, factor, jnp.all(factor != 0))
  x = trees.at_least_float32(x)
  return dot_examples(factor, _clean(x, factor, 0))


def _clipped_transpose(site: Site, seen, recorded: Recorded, factor, call, finite):
  """Computes sum_i factor[i] * gradient_i of each parameter: [*source.loops, *param]."""
  operands = recorded.operands[site.index][: len(site.data)]
  cotangents = recorded.cotangents[site.index]
  transposed = functools.partial(_transpose_at, site, seen, call=call, finite=finite)
  count = factor.shape[0]
  form = site.form
  # The number of parts follows from the type of the cotangents, as for the norm. Factors may be in
  # double precision because of other leaves of the clip group.
  parts = _parts_of(form, cotangents[0].dtype, count) if form is not None else 1
  # The rarely taken branch copies operands, and XLA reserves memory for it even if it is not taken.
  # So the batch is cut into more parts there.
  if finite is False and not site.loops:
    parts = max(d for d in range(1, max(parts, _PARTS) + 1) if count % d == 0)
  if parts == 1:
    return transposed((factor, operands, cotangents))
  return _in_parts(transposed, (factor, operands, cotangents), parts, len(site.loops))


def _in_parts(fn: Callable, args: Any, parts: int, depth: int) -> tuple[jax.Array, ...]:
  """Returns the sum of fn(part) over the parts of a batch.

  Args:
    fn: function of factors, operands and cotangents.
    args: factors [B]; operands and cotangents [*loops, B, ...].
    parts: largest number of parts, at most B; the last part may be smaller than the others.
    depth: number of scans around the site.
  """
  factor, *recorded = args
  size = -(-factor.shape[0] // parts)
  parts, left_over = divmod(factor.shape[0], size)

  def rows(start, size):
    cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
    return (cut(factor), *jax.tree.map(functools.partial(cut, axis=depth), recorded))

  part = lambda i: rows(i * size, size)
  shapes = jax.eval_shape(lambda: fn(part(0)))
  zero = jax.tree.map(jnp.zeros_like, shapes)

  def add(total, i):
    return total.plus(fn(part(i))), None

  # Under shard_map the carry must vary over the mesh as its terms do.
  begun = as_varying_as(args, ExactSum.of(zero))
  total = lax.scan(add, begun, jnp.arange(parts))[0]
  if left_over:
    total = total.plus(fn(rows(parts * size, left_over)))
  return total.value()


def _transpose_at(site: Site, seen, args, *, call, finite):
  """Returns the clipped transpose for `args`: (factors [B], operands, cotangents)."""
  factor = args[0]
  depth = len(site.loops)
  batch = dataclasses.replace(site, loops=(*site.loops, Loop(-1, factor.shape[0])))
  # The batch is one more loop around the site.
  form = batch.form

  def clipped(settled):
    factor, data, cotangents = settled
    kept = data if finite is True else tuple(_clean(a, factor, depth) for a in data)
    return kept, tuple(_clip(g, factor, depth, finite) for g in cotangents)

  def as_it_lies(factor, data, cotangents):
    (product,) = multiplied(data, tuple(_clip(g, factor, depth) for g in cotangents))
    # 0 times a dropped row may be -0.0.
    return (jnp.where(product == 0, 0, product),)

  if form is None or not form.plain:
    data, cotangents = call(clipped, args)  # [*loops, B, ...]
    if (
      form is not None and form.one_hot and _is_long(form, cotangents[0].dtype, len(factor))
    ):
      return (form.unflatten(_table_sum(form.build(data, cotangents), form.left)),)
    wide = form is not None
    exactness = lax.Precision.HIGHEST
    # The norm of a table's rows, or of a site without rows, includes no rounding of products. So
    # products have full precision there.
    if wide and not form.one_hot:
      exactness = precision.of_sums(cotangents[0].dtype).precision
    return transpose(batch, seen, data, cotangents, wide=wide, exactness=exactness)
  multiplied = functools.partial(_multiply, form)
  # For small operands a branch costs more than the pass that it saves.
  is_known = finite is None or isinstance(finite, bool)
  if is_known or form.left * form.rows <= _WIDE:
    return multiplied(*call(clipped, args))

  # If all operands are finite, a factor of 0 drops its example without cleaning them.
  @rarely_taken
  def without_rows(*args):
    return multiplied(*clipped(args))

  return lax.cond(finite, as_it_lies, without_rows, *args)


def _is_long(form: RowForm, dtype: Any, count: int) -> bool:
  """Returns whether rows of a table are added in parts; `form` describes the whole batch."""
  # Parts were timed on CPUs alone, so other devices do not use them.
  left = jnp.finfo(dtype).bits > 32 or made_for.platform() != "cpu"
  few = form.rows <= _ROWS_OF_TABLE or count <= _examples_of_sum(form.rows // count)
  return not left and not few


def _table_sum(rows: RowFactors, size: int) -> jax.Array:
  """Returns a table [N, size, P] that holds, for each token, the sum of its rows.

  The rows come in parts. In each part, the rows of one token are added up, and then added to the
  table once. `ExactSum` keeps what rounding of the table leaves out.
  """
  count = rows.right.shape[1]
  parts = -(-count // _ROWS_OF_TABLE)
  missing = parts * _ROWS_OF_TABLE - count

  def of_block(tokens, values):  # [T], [T, P]
    tokens = jnp.pad(tokens, (0, missing), constant_values=-1)
    values = jnp.pad(values, ((0, missing), (0, 0)))
    cut = lambda x: x.reshape(parts, _ROWS_OF_TABLE, *x.shape[1:])

    row = jnp.arange(_ROWS_OF_TABLE)

    def add(carry, part):
      tokens, values = part
      # The first row of each token gets the sum of that token's rows.
      same = tokens[:, None] == tokens[None]
      first = jnp.min(jnp.where(same, row[None], _ROWS_OF_TABLE), axis=1)
      sums = jnp.zeros_like(values).at[first].add(values)
      # Other rows get a place outside of the table, and add nothing.
      place = jnp.where((first == row) & (tokens >= 0), tokens, size)
      total, left_out = jnp.split(carry.at[place].get(mode="fill", fill_value=0), 2, axis=1)
      after = jnp.concatenate(exact_plus(total, left_out, sums), axis=1)
      return carry.at[place].set(after, mode="drop"), None

    # The first half of the columns are sums, the second half the parts that roundings left out.
    empty = jnp.zeros((size, 2 * values.shape[-1]), values.dtype)
    begun = as_varying_as((tokens, values), empty)
    both = lax.scan(add, begun, (cut(tokens), cut(values)))[0]
    return ExactSum(*jnp.split(both, 2, axis=1)).value()

  return jax.vmap(of_block)(rows.left, trees.at_least_float32(rows.right))


def _multiply(form: RowForm, data, cotangents) -> tuple[jax.Array]:
  rows = form.build(data, cotangents)  # [N, T, K], [N, T, P], T over the whole batch
  fast = form.left <= form.right or made_for.platform() != "cpu"
  if form.blocks > 1 or fast:
    return (form.unflatten(row_forms.product(rows, form.left, as_sums=True)),)
  # If K exceeds P, XLA's CPU backend forms [P, K] in .3 to .9 of the time of [K, P]. Without the
  # barrier it would merge the product with `swapaxes`, and form [K, P].
  swapped = row_forms.product(RowFactors(rows.right, rows.left), form.right)  # [1, P, K]
  return (form.unflatten(jnp.swapaxes(lax.optimization_barrier(swapped), 1, 2)),)


def _along(x: jax.Array, values: jax.Array, depth: int) -> jax.Array:
  """Reshapes [B] -> [1 for each loop, B, 1 ...], for x of shape [*loops, B, ...]."""
  return values.reshape((1,) * depth + (-1,) + (1,) * (x.ndim - depth - 1))


def _squeeze(x: jax.Array, depth: int) -> jax.Array:
  """Returns x [*loops, B, ...] without dimensions of size 1 behind B."""
  # With them XLA's CPU backend would choose another layout in a branch, and copy the array.
  return jnp.squeeze(x, [i for i in range(depth + 1, x.ndim) if x.shape[i] == 1])


def _clip(g: jax.Array, factor: jax.Array, depth: int, finite: Any = None) -> jax.Array:
  wide = trees.at_least_float32(_squeeze(g, depth))
  factor = _along(wide, factor, depth)
  product = wide * factor.astype(wide.dtype)
  # 0 times an infinite cotangent would be NaN, so a dropped example is selected away.
  kept = product if finite is True else jnp.where(factor != 0, product, 0)
  return kept.reshape(g.shape)


def _clean(a: jax.Array, factor: jax.Array, depth: int) -> jax.Array:
  if not jaxprs.is_float(a):
    return a
  # The operand is widened first, since a narrow type may have no zero (float8_e8m0fnu).
  wide = trees.at_least_float32(_squeeze(a, depth))
  return jnp.where(_along(wide, factor != 0, depth), wide, 0).reshape(a.shape)
