"""The few types shared by all packages of dpjax.

A loss function sees ONE example, without a batch axis. Only dpjax adds the batch axis, so a
user's function cannot mix examples by accident.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import numpy.typing
import optax

from dpjax import sealed
from dpjax.sealed import PerExampleGrads as PerExampleGrads

Array = jax.Array
ArrayLike = jax.typing.ArrayLike  # an array of JAX or NumPy, or a number
HostArray = numpy.typing.ArrayLike  # whatever NumPy reads as an array
DType = jax.typing.DTypeLike
ArrayTree = Any  # pytree of arrays
Params = Any  # pytree of arrays
Updates = Any  # pytree with the structure of Params
# A number, or a prefix tree of Params with a number for each group of parameters.
NumberTree = Any
# A `Clip`, or a NumberTree of clip norms, which stands for a Clip without options.
ClipLike = Any
LossFn = Callable[[Params, Any], Array]  # (params, ONE example) -> scalar loss


# A client's optimizer, or a function of the client's own key that returns one.
ClientTx = optax.GradientTransformation | Callable[[Array], optax.GradientTransformation]


class Config(Protocol):
  """Type of configs: any instance of a dataclass."""

  __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


class Labelled(Protocol):
  """Examples and their labels, such as `dpjax.data.Dataset`."""

  @property
  def x(self) -> Any: ...  # [n, *features]
  @property
  def y(self) -> Any: ...  # [n]


class Indexed(Protocol):
  """Examples that are read by index: `rows[indices]` is a tree of stacked examples."""

  def __len__(self) -> int: ...
  def __getitem__(self, indices: Any, /) -> Any: ...


class Example(NamedTuple):
  """An example, or a batch of them when every leaf has a leading axis."""

  x: Any  # [..., *features]
  y: Any  # [...] integer label, or [..., T] tokens
  key: Array | None = None  # a random key for this example (augmentation, dropout)


class Batch(NamedTuple):
  """A padded batch: rows with mask False are padding and must contribute nothing."""

  examples: Any  # pytree, every leaf [capacity, ...]
  mask: Any  # [capacity] bool
  # [capacity, 4] int32, for each row the number of its batch, its place in it, the mark of the plan
  # that drew it, and the number of the run. A private transform takes no row out of turn, out of
  # place, or of another plan. Its noise follows from the number of the run, too, which is secret;
  # it is 0 where the caller gave the `rng` of the draws. None for rows of your own: nothing of this
  # is checked.
  origin: Any = None

  @property
  def step(self) -> Any:
    """Returns for each row the number of its batch, [capacity]; None for rows of your own.

    It is the step of the plan that drew the batch; with slices, step * slices + slice."""
    return None if self.origin is None else self.origin[..., 0]


# Default of `ClippedSum.seal`: the seal is made from the bounds of the sum itself.
_OF_ITS_BOUNDS = object()


@sealed.register
@dataclasses.dataclass(frozen=True)
class ClippedSum(metaclass=sealed.Sealed):
  """The sum of clipped per-example gradients, with the bound it was clipped to.

  `norms` and `losses` are per example and NOT private: never release them. A norm of at most 1e-7
  clip norms may be too small, even 0, if its square underflows (in float32: a norm below 1e-19).
  This changes no clipping factor.

  `l2_bound` is static (not an array), so that a transform which adds noise for another bound
  refuses during tracing. But scaling the sum would not scale `l2_bound`. So Optax may not flatten
  this class (`dpjax.sealed`), and `jax.tree.map` finds sealed leaves in place of sum, norms and
  losses, which take no arithmetic. Read them as `.total`, `.norms` and `.losses`. The leaf `seal`
  holds a digest of the original bounds, since `jax.tree.unflatten` and `dataclasses.replace` can
  put other bounds beside the sum.
  """

  # sum_i mask_i * clip(g_i); params-shaped, at least float32
  total: Updates = dataclasses.field(metadata={"sealed": True})
  norms: Array = dataclasses.field(
    metadata={"sealed": True}
  )  # [B] before clipping; not private
  losses: Array = dataclasses.field(metadata={"sealed": True})  # [B]; not private
  l2_bound: float = dataclasses.field(metadata={"static": True})  # of one term
  # Bound of each group of parameters. It is (l2_bound,) if they are not clipped group by group.
  group_bounds: tuple[float, ...] = dataclasses.field(default=(), metadata={"static": True})
  mask: Any = None  # [B] bool, the one that was applied; None where it is not known
  origin: Any = None  # [B, 4] int32, see `gradients.arguments.origin_of`
  # Number of slices that the sum adds up: 1, or all slices of a step if they were accumulated.
  slices: int = dataclasses.field(default=1, metadata={"static": True})
  # Whether no term is longer than its norm says, as of flat clipping. A rule that lengthens short
  # gradients, or a division by the bound, gives terms that are.
  shortened: bool = dataclasses.field(default=False, metadata={"static": True})
  seal: Any = _OF_ITS_BOUNDS  # [], takes no arithmetic

  def __post_init__(self):
    if self.seal is _OF_ITS_BOUNDS:
      object.__setattr__(self, "seal", sealed.seal(*self.bounds))

  @property
  def bounds(self) -> tuple[float, ...]:
    """Returns the numbers that the seal covers: bounds, slices, and whether terms are shortened."""
    return (self.l2_bound, *self.group_bounds, self.slices, self.shortened)


class Algorithm(NamedTuple):
  """Training algorithm as two pure functions: one makes the state, one runs a step."""

  init: Callable[..., Any]  # (params) -> state
  step: Callable[..., Any]  # (state, batch) -> (state, info)
