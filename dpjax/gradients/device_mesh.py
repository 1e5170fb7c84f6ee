"""A batch over several devices: each clips its own examples, and their sums are added once.

A mesh has an axis `data`, over which the rows of a batch are split. It may have an axis `model`,
over which parameters, and all that has their shape, are split.

| what                               | over `data`             | over `model`               |
| ---------------------------------- | ----------------------- | -------------------------- |
| examples, keys, mask, norms, losses| split by rows           | the same on all            |
| clipped sums                       | one `psum` of each leaf | as the parameters          |
| parameters, optimizer state, noise | the same on all         | split along the last axis  |
|                                    |                         | it divides, if any         |

Nothing else crosses `data`: no example leaves its device. Noise is drawn after the sum. It depends
on its key and on the shape of the whole leaf, not on how that leaf is split.

The devices may belong to several processes of JAX's runtime, the same number to each process. Then
all processes make the same calls with the same data. Parameters are only split within a process, so
each process holds all parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dpjax import trees
from dpjax.gradients.clipping import Clipped
from dpjax.gradients.microbatch import fill
from dpjax.parallel import made_for, spanning
from dpjax.types import Array, ArrayTree, HostArray
from dpjax.validate import UserError

DATA = "data"
MODEL = "model"
AXES = (DATA, MODEL)
_FORM = re.compile(r"data:([1-9][0-9]{0,8})(?:,model:([1-9][0-9]{0,8}))?", re.ASCII)
_ROWS: Any = PartitionSpec(DATA)


def mesh_of(text: str) -> Mesh:
  """Returns the mesh of a text such as "data:4" or "data:4,model:2", on the first devices.

  With several processes it takes the first devices of each process.

  Raises:
    UserError: text of another form, more devices than there are, or a number of devices that the
      processes cannot share equally.

  >>> dict(mesh_of("data:1").shape)
  {'data': 1}
  >>> mesh_of("data")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: mesh='data': must be such as 'data:4' or 'data:4,model:2'
  """
  match = _FORM.fullmatch(text)
  if not match:
    raise UserError(
      "must be such as 'data:4' or 'data:4,model:2'", field="mesh", value=text
    )
  shape = tuple(int(size) for size in match.groups() if size)
  devices = _equal_shares(text, math.prod(shape))
  return checked_mesh(Mesh(np.array(devices).reshape(shape), AXES[: len(shape)]))


def _equal_shares(text: str, count: int) -> list[Any]:
  """Returns `count` devices for the mesh of `text`: the first of the target, or equal shares of all
  processes in order."""
  target = made_for.current()
  if target is not None:
    # The target's processes do not run yet. The target lists the devices of all its machines.
    devices = target.devices()
    if count > len(devices):
      raise UserError(
        f"needs {count} devices, {target.text} has {len(devices)}", field="mesh", value=text
      )
    return devices[:count]
  num_processes = jax.process_count()
  share, remainder = divmod(count, num_processes)
  if remainder:
    raise UserError(
      f"has {count} devices, which must be a multiple of the {num_processes} processes",
      field="mesh",
      value=text,
    )
  chosen: list[Any] = []
  for index in range(num_processes):
    local_devices = [device for device in jax.devices() if device.process_index == index]
    if share > len(local_devices):
      who = "this process" if num_processes == 1 else f"process {index}"
      each = "" if num_processes == 1 else " of each process"
      raise UserError(
        f"needs {share} devices{each}, {who} has {len(local_devices)} "
        f"({local_devices[0].platform})",
        field="mesh",
        value=text,
      )
    chosen += local_devices[:share]
  return chosen


def checked_mesh(mesh: Mesh) -> Mesh:
  """Returns the mesh with automatic axes, whose shardings the compiler may choose.

  Raises:
    UserError: the mesh has no axis `data`, or an axis that is neither `data` nor `model`. Processes
      have different numbers of its devices, or the axis `model` spans two processes.

  >>> checked_mesh(jax.make_mesh((1,), ("rows",)))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: mesh=('rows',): must have an axis 'data' and none but 'model' ...
  """
  if not isinstance(mesh, Mesh):
    raise UserError("must be a jax.sharding.Mesh, or None", field="mesh", value=mesh)
  names = tuple(mesh.axis_names)
  if sorted(names) not in ([DATA], [DATA, MODEL]):
    raise UserError(
      f"must have an axis {DATA!r} and none but {MODEL!r} beside it",
      field="mesh",
      value=names,
    )
  _check_processes(mesh, names)
  return Mesh(mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))


def check_automatic(mesh: Mesh | None, *, params: ArrayTree = (), batch: ArrayTree) -> None:
  """Raises UserError if JAX would ask every operation of a loss for the sharding of its result.

  It does so for arrays that are split over explicit axes, which are those of `jax.make_mesh` by
  default, and within `jax.set_mesh` of such axes. A `mesh` splits rows over automatic axes.
  """
  explicit = lambda mesh: AxisType.Explicit in (mesh.axis_types or ())
  around = jax.sharding.get_abstract_mesh()
  if mesh is not None and explicit(around):
    raise UserError(
      "has automatic axes, and jax.set_mesh has set explicit ones; call it outside of set_mesh",
      field="mesh",
      value=mesh.axis_names,
    )
  # Whole arrays are computed with under `jax.jit`, which alone traces new arrays, or in `set_mesh`.
  takes_whole = explicit(around) or (around.empty and isinstance(jnp.zeros(()), Tracer))
  automatic = "make it with axis_types=(jax.sharding.AxisType.Auto,)"
  remedies = {"params": automatic, "batch": "give clipped_grad that mesh, as mesh="}
  for path, leaf in jax.tree_util.tree_leaves_with_path({"params": params, "batch": batch}):
    name = path[0].key
    sharding = jax.typeof(leaf).sharding
    is_whole = not any(sharding.spec)
    # A `mesh` places rows, and whole parameters, anew.
    placed = mesh is not None and (is_whole or name == "batch")
    fits = is_whole and (takes_whole or sharding.mesh.size == 1)
    if explicit(sharding.mesh) and not placed and not fits:
      raise UserError(
        f"is {'on' if is_whole else 'split over'} explicit axes of a mesh; {remedies[name]}",
        field=f"{name}{jax.tree_util.keystr(path[1:])}",
        value=sharding.spec,
      )


def _check_processes(mesh: Mesh, names: tuple[Any, ...]) -> None:
  whose = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
  counts = np.bincount(whose.ravel(), minlength=jax.process_count())
  if len({*counts}) > 1:
    raise UserError(
      f"must hold as many devices of each of the {len(counts)} processes, not "
      f"{counts.tolist()}",
      field="mesh",
      value=dict(mesh.shape),
    )
  if MODEL in names and np.ptp(whose, axis=names.index(MODEL)).any():
    raise UserError(
      f"{MODEL!r} must divide the {counts[0]} devices of a process, for "
      "parameters are not split between processes",
      field="mesh",
      value=dict(mesh.shape),
    )


def whole_rows(rows: int, mesh: Mesh) -> int:
  """Returns the least number of rows, from `rows` up, that divides equally among devices.

  >>> whole_rows(5, jax.make_mesh((1,), ("data",)))
  5
  """
  count = mesh.shape[DATA]
  return -(-rows // count) * count


def on_all(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of values that are equal on all devices."""
  return NamedSharding(mesh, PartitionSpec())


def row_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of a batch's leaves [B, ...], as `split_rows` places them."""
  return NamedSharding(mesh, _ROWS)


def leaf_sharding(mesh: Mesh, leaf: HostArray) -> NamedSharding:
  """Returns the sharding of one leaf of parameters, or of a state.

  The leaf is split along the last of its axes whose size `model` divides (a layer's outputs). If
  there is no such axis, the leaf is the same on all devices; so are keys and the words of keys.

  >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
  >>> leaf_sharding(mesh, np.ones((3, 4))).spec == PartitionSpec(None, "model")
  True
  >>> leaf_sharding(mesh, np.ones(4, np.uint32)).spec == PartitionSpec()
  True
  """
  # Words of a key are the only uint32 arrays of a state. No device can draw from a part of them.
  is_key = trees.is_key(leaf) or getattr(leaf, "dtype", None) == np.uint32
  shape: tuple[int, ...] = () if is_key else np.shape(leaf)
  count = mesh.shape.get(MODEL, 0)
  fitting = [axis for axis, size in enumerate(shape) if count and size and not size % count]
  if not fitting:
    return on_all(mesh)
  return NamedSharding(mesh, PartitionSpec(*[None] * fitting[-1], MODEL))


def _at(leaf: Any, sharding: NamedSharding) -> Any:
  """Places a leaf by its sharding, also during tracing."""
  if isinstance(leaf, Tracer):
    return lax.with_sharding_constraint(leaf, sharding)
  return spanning.place(leaf, sharding)


def lay_out(mesh: Mesh, tree: ArrayTree) -> Any:
  """Returns the tree with each leaf placed by `leaf_sharding`."""
  return jax.tree.map(lambda leaf: _at(leaf, leaf_sharding(mesh, leaf)), tree)


def split_rows(mesh: Mesh, tree: ArrayTree) -> Any:
  """Splits leaves [B, ...] as [B', ...] over the devices, where B' is the `whole_rows` of B.

  Added rows are zeros (of keys, the last key). In a mask they are False, so they add nothing to a
  sum.

  >>> split_rows(jax.make_mesh((1,), ("data",)), {"x": np.ones((3, 2))})["x"].shape
  (3, 2)
  """
  mesh = checked_mesh(mesh)

  def split(leaf):
    return _at(fill(leaf, whole_rows(leaf.shape[0], mesh)), row_sharding(mesh))

  return jax.tree.map(split, tree)


def on_one(mesh: Mesh, tree: ArrayTree) -> Any:
  """Returns the tree on the first device of this process, if each device holds the whole tree.
  Otherwise the tree stays on the devices of this process."""
  if mesh.shape.get(MODEL, 1) > 1:
    return spanning.own_copy(tree)
  return jax.device_put(spanning.own_copy(tree), mesh.local_devices[0])


def over_devices(
  fn: Callable[[Any, Any, Array], Clipped], mesh: Mesh
) -> Callable[[Any, Any, Array], Clipped]:
  """Returns `fn`, `(params, batch, mask) -> Clipped`, with the rows split over devices.

  If the rows do not divide equally, masked padding is added. The result's norms and losses have
  entries for this padding.

  Args:
    fn: function for the rows of one device.
    mesh: mesh with an axis `data`.
  """

  def share(params, batch, mask):
    out = fn(params, batch, mask)
    # Each device has clipped its own rows, so the sum over devices is the sum of the batch.
    return out._replace(total=lax.psum(out.total, DATA))

  split = jax.shard_map(
    share,
    mesh=mesh,
    in_specs=(PartitionSpec(), _ROWS, _ROWS),
    out_specs=Clipped(PartitionSpec(), _ROWS, _ROWS),
    axis_names={DATA},
    # With `check_vma`, JAX would sum gradients of parameters over the devices before they are
    # clipped. It would also refuse a loss whose loop begins from constants, such as the zeros of a
    # recurrent cell: later states differ between devices.
    check_vma=False,
  )

  def wrapped(params, batch, mask):
    batch, mask = fill((batch, mask), whole_rows(mask.shape[0], mesh))
    out = split(params, batch, mask)
    return out._replace(total=lay_out(mesh, out.total))

  return wrapped
