"""Strategies of correlated noise: their interface, white noise and tree aggregation."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees, validate
from dpjax.types import ArrayTree


class Correlation(Protocol):
  """An invertible lower-triangular matrix C >= 0 with a unit diagonal, for any size.

  `init` and `next` compute C^{-1} z row by row, in float32 or wider, under jit. If `init` returns a
  `Redrawn`, the strategy has a method `redrawn`, which is called in place of `next`. A strategy is
  frozen and hashable, and its fields are public.
  """

  @property
  def bands(self) -> int | None: ...  # C[i, j] = 0 where i - j >= bands; None: no band
  @property
  def toeplitz(self) -> bool: ...  # C[i, j] depends on i - j alone
  @property
  def buffers(self) -> int: ...  # trees in the state, each as large as the parameters
  def multiply(self, x: np.ndarray) -> np.ndarray: ...  # C x: [n, ...], float64
  def init(self, like: ArrayTree) -> Any: ...  # state before the first row
  def next(
    self, white: ArrayTree, state: ArrayTree
  ) -> tuple[Any, Any]: ...  # (row of C^{-1} z, state)


class Redrawn(NamedTuple):
  """State of a strategy that draws earlier noise again: only a mark, to detect a wrong state."""

  mark: jax.Array  # uint32, of the coefficients and of the parameters' shapes


def matrix(correlation: Correlation, num_steps: int) -> np.ndarray:
  """Returns the dense matrix C for `num_steps` steps, [num_steps, num_steps] in float64.

  >>> matrix(Tree(restart_every=2), 4)
  array([[1., 0., 0., 0.],
         [1., 1., 0., 0.],
         [0., 0., 1., 0.],
         [0., 0., 1., 1.]])
  """
  validate.integer_at_least(1, num_steps=num_steps)
  return correlation.multiply(np.eye(num_steps))


def zeros(like: ArrayTree, copies: int) -> Any:
  """Returns `copies` zero trees stacked on a leading axis, in float32 or wider."""

  def leaf(x):
    return jnp.zeros((copies, *jnp.shape(x)), trees.wide_dtype(jnp.result_type(x)))

  return jax.tree.map(leaf, like)


def weighted_sum(weights: jax.Array, stacked: ArrayTree) -> Any:
  """Returns sum_i weights[i] * leaf[i] for every leaf [copies, ...]."""
  dot = lambda leaf: jnp.tensordot(weights.astype(leaf.dtype), leaf, axes=1)
  return jax.tree.map(dot, stacked)


def subtract(a: ArrayTree, b: ArrayTree) -> Any:
  """Returns a - b, leaf by leaf."""
  return jax.tree.map(jnp.subtract, a, b)


@dataclasses.dataclass(frozen=True)
class Independent:
  """Strategy of white noise, as in DP-SGD: C is the identity.

  >>> matrix(Independent(), 2)
  array([[1., 0.],
         [0., 1.]])
  """

  @property
  def bands(self) -> int:
    return 1

  @property
  def toeplitz(self) -> bool:
    return True

  @property
  def buffers(self) -> int:
    return 0

  def multiply(self, x: np.ndarray) -> np.ndarray:
    """Returns C x = x, as a copy in float64."""
    return np.array(x, np.float64)

  def init(self, like: ArrayTree) -> tuple[()]:
    """Returns an empty state."""
    del like
    return ()

  def next(self, white: ArrayTree, state: tuple[()]) -> tuple[Any, tuple[()]]:
    """Returns the white noise itself."""
    return white, state


class TreeState(NamedTuple):
  """Nodes of the current tree, whose sum is the noise of this tree's steps so far."""

  draws: jax.Array  # int32, rows done
  nodes: Any  # leaves [levels, ...]; zero where the prefix has no node


@dataclasses.dataclass(frozen=True)
class Tree:
  """Tree aggregation (Dwork et al. 2010; Chan et al. 2011), as in DP-FTRL (Kairouz et al.
  2021), with a new tree every `restart_every` steps.

  Each tree adds the sum of at most log2(m) + 1 nodes to the noise of a prefix sum. Only nodes that
  some prefix needs are drawn, one in each step: row t (from 1 within a tree) of C sums the steps
  t - lowbit(t) + 1 .. t. A step is in at most floor(log2 m) + 1 nodes, which determines the cost.
  (Honaker's estimator, which also uses the other nodes, has no square C, and is not offered.)

  Args:
    restart_every: number m of steps of one tree. The state holds floor(log2 m) + 1 nodes, each as
      large as the parameters.

  >>> tree = Tree(restart_every=4)
  >>> matrix(tree, 4)[3], tree.buffers
  (array([1., 1., 1., 1.]), 3)
  """

  restart_every: int

  def __post_init__(self):
    validate.integer_at_least(1, restart_every=self.restart_every)

  @property
  def bands(self) -> int:
    return self.restart_every

  @property
  def toeplitz(self) -> bool:
    return False

  @property
  def buffers(self) -> int:
    return int(self.restart_every).bit_length()

  def multiply(self, x: np.ndarray) -> np.ndarray:
    """Computes C x for x [n, ...], in float64."""
    x = np.asarray(x, np.float64)
    out = np.empty_like(x)
    for row in range(len(x)):
      # The lowest bit of the step's number gives the size of the node that the step completes.
      place = row % self.restart_every + 1
      out[row] = x[row + 1 - (place & -place) : row + 1].sum(axis=0)
    return out

  def init(self, like: ArrayTree) -> TreeState:
    """Returns the first state, in which all nodes are zero."""
    return TreeState(jnp.zeros((), jnp.int32), zeros(like, self.buffers))

  def next(self, white: ArrayTree, state: TreeState) -> tuple[Any, TreeState]:
    """Returns the new node's noise minus the noise of the nodes that it replaces, and the state."""
    place = state.draws % self.restart_every + 1
    size = 2 ** jnp.arange(self.buffers)  # [levels] steps that a node of the level sums
    low_bit = place & -place
    # The first step of a tree replaces no node, since all nodes belong to the previous tree.
    old = jnp.where(place == 1, jnp.zeros_like(size), size < low_bit)
    row = subtract(white, weighted_sum(old, state.nodes))
    kept = jnp.where(place == 1, jnp.zeros_like(size), size > low_bit)

    def updated(nodes, new):
      shape = (-1,) + (1,) * new.ndim
      fresh = jnp.where((size == low_bit).reshape(shape), new, 0)
      return jnp.where((kept != 0).reshape(shape), nodes, fresh)

    nodes = jax.tree.map(updated, state.nodes, jax.tree.map(trees.at_least_float32, white))
    return row, TreeState(state.draws + 1, nodes)


@dataclasses.dataclass(frozen=True)
class White:
  """Strategy `Independent` for every run: noise without correlation."""

  def make(self, num_steps: int, steps_apart: int) -> Correlation:
    """Returns `Independent()`, whatever the numbers are."""
    return Independent()


@dataclasses.dataclass(frozen=True)
class Trees:
  """Strategy `Tree`; `restart_every` None starts a new tree every `steps_apart` steps."""

  restart_every: int | None = None

  def __post_init__(self):
    if self.restart_every is not None:
      validate.integer_at_least(1, restart_every=self.restart_every)

  def make(self, num_steps: int, steps_apart: int) -> Correlation:
    """Returns the strategy for a run in which steps of an example are `steps_apart` or more."""
    return Tree(restart_every=self.restart_every or steps_apart)
