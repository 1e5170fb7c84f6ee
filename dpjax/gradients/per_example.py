"""Per-example gradients by vmap, and the clipped sum built on them or on the fast route.

The vmap route is easy to read, and tests compare the fast route (`ghost`) with it. It stacks a
gradient per example, so its memory grows with batch x parameters (see `microbatch_size`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import core
from jax.sharding import Mesh

from dpjax import trees, validate
from dpjax.accounting.proved import NeighboringRelation
from dpjax.gradients import clipping, memory
from dpjax.gradients.arguments import (
  check_arrays,
  check_real,
  checked_mask,
  examples_and_mask,
  origin_of,
)
from dpjax.gradients.clients_apart import clients_apart
from dpjax.gradients.clip import Clip, sensitivity
from dpjax.gradients.device_mesh import (
  DATA,
  check_automatic,
  checked_mesh,
  over_devices,
  whole_rows,
)
from dpjax.gradients.ghost import route as ghost
from dpjax.gradients.loss_checks import (
  Loss,
  check_callable,
  check_closure,
  check_loss,
  explain_failure,
  vmap_would_do,
)
from dpjax.gradients.microbatch import faster_size, fill, in_microbatches
from dpjax.gradients.traced_values import as_varying_as
from dpjax.types import (
  Array,
  ArrayLike,
  ArrayTree,
  Batch,
  ClipLike,
  ClippedSum,
  LossFn,
  Params,
  PerExampleGrads,
)

METHODS = ("auto", "vmap", "ghost")


def _batch_size(batch: Any, name: str = "batch") -> int:
  trees.check_no_none(batch, name)
  sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}  # () for a scalar
  if len(sizes) != 1 or () in sizes:
    leading_axes = sorted(map(str, sizes)) or "no arrays"
    raise validate.UserError(
      f"every leaf needs the same leading axis, found {leading_axes}", field=name
    )
  return sizes.pop()[0]


def wrap_grads(grads: ArrayTree, mask: ArrayLike | Batch | None = None) -> PerExampleGrads:
  """Wraps per-example gradients from your own code, as input of a private transform.

  Use it for bare arrays, such as those of `jax.vmap(jax.grad(loss_fn))`. Calling it states that
  row i of every leaf depends on example i alone, and that no other row depends on that example.
  Nothing can check this, but the guarantee depends on it. Use it also to join gradients of
  several computations, such as parts of a batch or several devices.

  Args:
    grads: leaves [B, *param], real floating point.
    mask: the `Batch` whose rows these are, which has a mask, and is then trained on in its turn
      alone. Or [B] bool, False for padding. True if there is no padding; None to give the transform
      a mask instead.

  Raises:
    UserError: a leaf that is not real floating point; a mask that is not bool, or of another
      length; gradients that are wrapped already.

  >>> grads = wrap_grads({"w": jnp.ones((3, 2))})
  >>> grads.arrays["w"].shape
  (3, 2)
  """
  if isinstance(grads, PerExampleGrads | ClippedSum):
    raise validate.UserError(
      f"must be bare arrays, not {type(grads).__name__}, which the transform "
      "takes as it is",
      field="grads",
    )
  check_real(grads=grads)
  real = mask.mask if isinstance(mask, Batch) else mask
  if real is not None:
    real = checked_mask(real, _batch_size(grads, "grads"))
  return PerExampleGrads.of(grads, real, origin=origin_of(mask))


def per_example_grads(
  loss_fn: LossFn,
) -> Callable[[Params, Any], tuple[Array, PerExampleGrads]]:
  """Returns a function that computes the gradient of each example's loss separately.

  Args:
    loss_fn: `(params, example) -> scalar`, for ONE example (no batch axis).

  Returns:
    `(params, batch) -> (losses [B], grads)`. Neither is private: pass the gradients to
    `plan.transform` or `dpjax.clip_and_noise`, with the batch's mask. Gradients of a
    `dpjax.types.Batch` already hold its mask. Gradients are sealed: read `grads.arrays`, a tree of
    leaves [B, *param] in at least float32. Rows of padding have gradients like any other row. A
    private transform that gets a row twice raises, or gives NaN under jit.

  Raises:
    UserError: a parameter that is not real floating point, a loss that is not a scalar.

  >>> loss_fn = lambda w, example: 0.5 * (w - example) ** 2
  >>> losses, grads = per_example_grads(loss_fn)(jnp.float32(1.0), jnp.array([0.0, 3.0]))
  >>> losses, grads.arrays
  (Array([0.5, 2. ], dtype=float32), Array([ 1., -2.], dtype=float32))
  """
  unsealed = stacked_arrays(loss_fn)

  def grads(params: Params, batch: Any) -> tuple[Array, PerExampleGrads]:
    examples, mask = examples_and_mask(batch, None)
    losses, arrays = unsealed(params, examples)
    if mask is not None:
      mask = checked_mask(mask, losses.shape[0])
    return losses, PerExampleGrads.of(arrays, mask, origin=origin_of(batch))

  return grads


def stacked_arrays(loss_fn: LossFn) -> Callable[[Params, Any], tuple[Array, Params]]:
  """Returns `per_example_grads` with bare arrays, for code that clips them itself."""
  check_callable(loss_fn)

  def grads(params: Params, batch: Any) -> tuple[Array, Params]:
    given = batch
    check_arrays(batch=batch)
    batch = jax.tree.map(jnp.asarray, batch)
    _batch_size(batch)
    check_real(params=params)
    params = jax.tree.map(jnp.asarray, params)
    check_automatic(None, params=params, batch=batch)
    loss = check_loss(loss_fn, params, batch)
    check_closure(loss, given)

    def rows(params: Params, batch: Any) -> tuple[Array, Params]:
      return _rows(loss_fn, *_of_one_device(loss_fn, loss, params, batch), batch)

    return (clients_apart(rows) if loss.mixes else rows)(params, batch)

  return grads


def _rows(loss_fn: LossFn, loss: Loss, params: Params, batch: Any) -> tuple[Array, Params]:
  """Returns losses and gradients of a loss, given its program, too."""
  grad_fn = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0))
  size = _batch_size(batch)
  if size and not vmap_would_do(loss):
    return ghost.stacked_gradients(loss, params, batch)
  if size:
    return grad_fn(params, batch)
  # Without rows there is nothing to compute, and only the shapes are needed.
  shapes = jax.eval_shape(grad_fn, params, batch)
  losses, grads = jax.tree.map(jnp.zeros_like, shapes)
  return losses, jax.tree.map(trees.at_least_float32, grads)


def _of_one_device(
  loss_fn: LossFn, loss: Loss, params: Any, batch: Any, *, on_mesh: bool = False
) -> tuple[Loss, Any]:
  """Returns the program and the parameters with which one device of a shard_map computes.

  JAX would sum gradients of unmarked parameters over the devices, before they are clipped. Marks,
  and the mesh of arrays, are a part of a program, which is traced again with them.
  """
  if not (on_mesh or trees.varying_axes(batch)) or not _batch_size(batch):
    return loss, params
  params = as_varying_as(batch, jax.tree.map(jnp.asarray, params))
  example = jax.tree.map(lambda leaf: leaf[0], batch)
  # A new function, since JAX caches traces by function.
  closed = jax.make_jaxpr(lambda p, e: loss_fn(p, e))(params, example)
  return loss._replace(closed=closed), params


# With eq=False the hash is that of the object. Bounds may be a dict, which has no hash.
@dataclasses.dataclass(frozen=True, eq=False)
class ClippedGrad:
  """Function `(params, batch, mask) -> ClippedSum` with a known sensitivity."""

  loss_fn: LossFn
  l2_clip_norm: Any  # a Clip, whatever it was given as
  method: str = "auto"
  microbatch_size: int | None = None
  rescale_to_unit_norm: bool = False
  memory_budget: float | None = None  # bytes
  mesh: Mesh | None = None
  filled: float = 1.0  # share of the rows of a batch that usually hold an example
  # Raises UserError for examples that it refuses, such as those of another unit.
  check_rows: Callable[[Any], Any] | None = None

  def __post_init__(self):
    check_callable(self.loss_fn)
    validate.one_of(METHODS, method=self.method)
    object.__setattr__(self, "l2_clip_norm", Clip.of(self.l2_clip_norm))
    if self.rescale_to_unit_norm:
      self.l2_clip_norm.check_finite()
    if self.mesh is not None:
      object.__setattr__(self, "mesh", checked_mesh(self.mesh))
    if self.microbatch_size is not None:
      validate.integer_at_least(1, microbatch_size=self.microbatch_size)
    if self.memory_budget is not None:
      validate.positive(memory_budget=self.memory_budget)
    if self.memory_budget is not None and self.microbatch_size is not None:
      raise validate.UserError(
        "must be None where microbatch_size is given",
        field="memory_budget",
        value=self.memory_budget,
      )

  @property
  def _bounds(self) -> tuple[float, ...]:
    """Returns the bound of each group of parameters."""
    unit = self.rescale_to_unit_norm
    return self.l2_clip_norm.group_bounds(rescale_to_unit_norm=unit)

  @property
  def l2_bound(self) -> float:
    """Returns the largest l2 norm of one example's contribution to the sum."""
    return math.hypot(*self._bounds)

  def sensitivity(self, relation: NeighboringRelation | str) -> float:
    """Returns the l2 sensitivity of the sum under the given neighbouring relation."""
    return sensitivity(self.l2_bound, relation)

  def _one_pass(self, loss: Loss, params, batch, mask):
    on_mesh = self.mesh is not None
    loss, params = _of_one_device(self.loss_fn, loss, params, batch, on_mesh=on_mesh)
    clip = self.l2_clip_norm
    planned = self._plan(loss, params) if len(mask) else None
    if planned is None:
      losses, grads = _rows(self.loss_fn, loss, params, batch)  # [B], [B, *param]
      out = clipping.sum_clipped(grads, losses, mask, clip)
    else:
      out = ghost.clipped_sum(planned, params, batch, mask, clip)
    unit = self.rescale_to_unit_norm
    return out._replace(total=clipping.rescale(out.total, clip, rescale_to_unit_norm=unit))

  def _plan(self, loss: Loss, params) -> ghost.Recipe | None:
    """Returns the plan of the fast route. None if the method is "vmap", if "auto" gains nothing, or
    if a convolution of the fast route could mix examples."""
    if self.method == "vmap":
      return None
    planned = ghost.plan(loss.closed, params, self.l2_clip_norm.norms)
    if self.method == "auto" and not ghost.pays(planned.units, params):
      return None
    return None if loss.mixes and not ghost.keeps_apart(planned) else planned

  def _fitting(self, loss: Loss, params, batch, batch_size: int) -> int | None:
    """Returns the microbatch size, given, by memory budget or for speed; None for the whole
    batch."""
    if self.microbatch_size is not None:
      return self.microbatch_size
    if self.memory_budget is None:
      # Outside of jit a loop is compiled at each call, also under vmap, where all arguments are
      # tracers; a new array is one under jit alone. Devices do not share padding.
      is_jitted = isinstance(jnp.zeros(()), core.Tracer)
      if self.filled >= 1 or self.mesh is not None or not is_jitted:
        return None
      return faster_size(loss.closed, params, batch_size, self.filled)
    example = jax.tree.map(lambda leaf: leaf[0], batch)
    estimate = memory.estimate(self.loss_fn, params, example, self._plan(loss, params))
    return memory.microbatch(self.memory_budget, estimate, batch_size)

  def __call__(
    self, params: Params, batch: ArrayTree, mask: ArrayLike | None = None
  ) -> ClippedSum:
    origin = origin_of(batch)
    batch, mask = examples_and_mask(batch, mask)
    given = (batch, mask)
    if self.check_rows is not None:
      self.check_rows(batch)
    check_arrays(batch=batch)
    batch = jax.tree.map(jnp.asarray, batch)
    size = _batch_size(batch)
    mesh = self.mesh
    mask = checked_mask(mask, size)
    self.l2_clip_norm.check_prefix(params)
    check_real(params=params)
    params = jax.tree.map(jnp.asarray, params)
    check_automatic(mesh, params=params, batch=batch)
    loss = check_loss(self.loss_fn, params, batch)
    check_closure(loss, given)
    one_pass = functools.partial(self._one_pass, loss)
    # No rows are neither cut nor shared.
    if size:
      # Microbatch and memory are those of one device, with its share of the padded rows.
      of_device = size if mesh is None else whole_rows(size, mesh) // mesh.shape[DATA]
      microbatch_size = self._fitting(loss, params, batch, of_device)
      if microbatch_size is not None:
        one_pass = in_microbatches(one_pass, microbatch_size)
      # Most losses hold no convolution that mixes clients. Their program is left as it is.
      if loss.mixes:
        one_pass = clients_apart(one_pass)
      if mesh is not None:
        one_pass = over_devices(one_pass, mesh)
    try:
      out = one_pass(params, batch, mask)
    # A UserError is a ValueError, too, but needs no further explanation.
    except validate.UserError:
      raise
    # JAX raises these for an operation without a derivative or without a batching rule.
    except (ValueError, NotImplementedError) as error:
      explain_failure(loss, len(jax.tree.leaves(params)), error)
      raise
    if mesh is not None:
      # Rows of padding are added if the devices cannot share the rows equally.
      mask = fill(mask, len(out.norms))
    shortened = self.l2_clip_norm.shortens(rescale_to_unit_norm=self.rescale_to_unit_norm)
    bounds = self._bounds
    return ClippedSum(*out, self.l2_bound, bounds, mask, origin, shortened=shortened)


def clipped_grad(
  loss_fn: LossFn,
  *,
  l2_clip_norm: ClipLike,
  method: str = "auto",
  microbatch_size: int | None = None,
  rescale_to_unit_norm: bool = False,
  memory_budget: float | None = None,
  mesh: Mesh | None = None,
) -> ClippedGrad:
  """Returns a function that sums the clipped gradients of examples (Abadi et al. 2016).

  Args:
    loss_fn: `(params, example) -> scalar`, for ONE example.
    l2_clip_norm: bound C in [1e-25, 1e30] on each example's gradient norm (inf for no clipping);
      or a tree of bounds that is a prefix of the parameters, one per group of parameters
      (see `allocate_clip_norms`); or a `Clip`, which also names the rule. The schedule of a `Clip`
      is for the transform, and is ignored here.
    method: "vmap" stacks a gradient per example. "ghost" forms a gradient per example only for
      parameters without a cheaper rule (see `dpjax.gradients.ghost.route`, and `explain` for its
      choices). "auto" is "ghost" wherever that can be faster, else "vmap". If a convolution of
      "ghost" could mix examples, all are "vmap". All give the same sum to rounding.
    microbatch_size: number of examples held in memory at a time; None for the whole batch. It
      changes memory, speed and rounding only, never the sensitivity. Microbatches of padding alone
      are skipped, and their rows have norms and losses of 0.
    rescale_to_unit_norm: whether to divide each group by its bound, so that one example's
      contribution has norm <= 1 (<= sqrt(number of groups) for per-layer bounds).
    memory_budget: number of bytes that the estimated temporaries of a microbatch may take, given
      in place of `microbatch_size` (`dpjax.gradients.memory`; parameters, batch and result come on
      top). UserError if by that estimate not even one example fits.
    mesh: devices that share the examples (`dpjax.gradients.device_mesh`), for use under jit.
      Microbatch and memory are those of each device. The sum is the same to rounding. If the
      number of devices does not divide B, norms, losses and mask also have entries for padding.

  Returns:
    A callable `(params, batch, mask) -> ClippedSum` with
    `.sensitivity(neighboring_relation)`. Leaves of the batch are [B, ...]. The mask is [B] bool,
    False for padding, or True if every row is an example. A `dpjax.types.Batch` holds a mask, so
    none is given beside it. Without rows the sum is 0.

  Guarantee: the l2 norm of one example's term is <= `.l2_bound` (1 + 1e-5) for every
  input; non-finite examples and padding contribute exactly 0.

  Raises:
    UserError: no mask, or a mask of another length; no parameters, or some that are not real
      floating point; bounds that are not a prefix of them; a loss that is not a real scalar.

  >>> grad_fn = clipped_grad(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), l2_clip_norm=1.0)
  >>> grad_fn(jnp.zeros(2), jnp.array([[3.0, 4.0], [0.25, 0.0]]), mask=True).total
  Array([-0.85, -0.8 ], dtype=float32)
  >>> grad_fn.sensitivity("replace_one")
  2.0
  """
  return ClippedGrad(
    loss_fn,
    l2_clip_norm,
    method,
    microbatch_size,
    rescale_to_unit_norm,
    memory_budget,
    mesh,
  )
