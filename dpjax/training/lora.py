"""Low-rank adapters (LoRA, Hu et al. 2022, arXiv:2106.09685): few numbers are trained, and
the model stays fixed.

`merge` gives the weights W + (alpha / rank) A B. Training through merged weights would form,
for every example, a gradient as large as W. `apply` rewrites the products of a loss instead:
to each x W it adds (alpha / rank) (x A) B, so that no gradient of a frozen weight is formed.
"""

from __future__ import annotations

import collections
import fnmatch
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from dpjax import jaxprs, trees, validate
from dpjax.gradients.arguments import check_real
from dpjax.types import Example, LossFn, Params
from dpjax.validate import UserError

Adapters = dict[str, dict[str, jax.Array]]  # path -> {"a": [K, rank], "b": [rank, P]}
_CALLS = ("jit", "pjit")


class Lora(NamedTuple):
  """Adapters of some weights: parameters to train, and the two functions that use them."""

  trainable: Adapters
  merge: Callable[[Adapters], Params]
  apply: Callable[[LossFn], LossFn]


def lora(params: Params, pattern: str, *, rank: int, alpha: float, key: jax.Array) -> Lora:
  """Returns adapters of the matrices whose path matches. All of `params` stays frozen.

  Args:
    params: tree of real floating-point arrays, which must be public: trained on other data.
    pattern: shell pattern, such as "*/kernel", of paths such as "params/block_0/mlp_in/kernel".
    rank: r of A [K, r] and B [r, P], at most min(K, P) of every matrix [K, P].
    alpha: numerator of the factor alpha / rank of A B.
    key: key of the initial A, which is truncated normal of variance 1 / K. B starts at 0, so that
      the adapters change nothing at first.

  Returns:
    (trainable, merge, apply). `merge(trainable)` is the tree of `params` with every matched W
    as W + (alpha / rank) A B, in the dtype of W. `apply(loss_fn)` is the loss of the adapters:
    `loss_fn(merge(trainable), example)` up to rounding, for `clipped_grad` and `dp_sgd`.
    A product with W as its second operand is rewritten, also inside `jit` and
    `jax.checkpoint`. Anywhere else, such as in a scan, the merged weight is used, which gives
    the same result more slowly.

  Guarantee: none; privacy comes from the algorithm that trains the adapters. The frozen weights
  must not depend on the private data.

  Raises:
    UserError: a pattern that matches no leaf, or a leaf that is no matrix; a rank above a
      dimension; leaves that are not real floating point, or two of one path; an empty tree.
      `merge` and `apply`: adapters of other names or shapes.

  >>> params = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}}
  >>> loss = lambda p, x: jnp.sum(x @ p["dense"]["kernel"] + p["dense"]["bias"])
  >>> adapted = lora(params, "*/kernel", rank=1, alpha=1.0, key=jax.random.key(0))
  >>> jax.tree.map(jnp.shape, adapted.trainable)
  {'dense/kernel': {'a': (3, 1), 'b': (1, 2)}}
  >>> float(adapted.apply(loss)(adapted.trainable, jnp.ones(3)))
  6.0
  """
  validate.integer_at_least(1, rank=rank)
  validate.positive(alpha=alpha)
  chosen = _choose(params, pattern)
  for path, matrix in chosen.items():
    if matrix.ndim != 2:
      raise UserError(
        f"{path!r} of shape {matrix.shape} must be a matrix; choose another pattern",
        field="params",
      )
    if rank > min(matrix.shape):
      bound = f"must be <= {min(matrix.shape)}, a dimension of {path!r}"
      raise UserError(f"{bound}", field="rank", value=rank)
  init = jax.nn.initializers.lecun_normal()
  trainable = {
    path: {
      "a": init(jax.random.fold_in(key, i), (w.shape[0], rank), trees.wide_dtype(w.dtype)),
      "b": jnp.zeros((rank, w.shape[1]), trees.wide_dtype(w.dtype)),
    }
    for i, (path, w) in enumerate(chosen.items())
  }
  scale = alpha / rank
  names = trees.leaf_names(params)

  def merge(adapters: Adapters) -> Any:
    _check_adapters(adapters, trainable)

    leaves = [
      _merge(leaf, adapters[name], scale) if name in adapters else leaf
      for name, leaf in zip(names, jax.tree.leaves(params))
    ]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)

  def apply(loss_fn: LossFn) -> LossFn:
    def loss(adapters: Adapters, example: Example) -> jax.Array:
      _check_adapters(adapters, trainable)
      # A new function is traced: JAX caches traces by function, and closures may have changed.
      call = lambda p, e: loss_fn(p, e)
      traced, shapes = jax.make_jaxpr(call, return_shape=True)(params, example)
      frozen = [
        _Adapted(leaf, adapters[name], scale) if name in adapters else leaf
        for name, leaf in zip(names, jax.tree.leaves(params))
      ]
      results = _evaluate(traced, [*frozen, *jax.tree.leaves(example)])
      return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return loss

  return Lora(trainable, merge, apply)


def _choose(params: Any, pattern: str) -> dict[str, Any]:
  """Returns {path: leaf} of the leaves whose path matches; raises UserError if there are none."""
  names = trees.leaf_names(params)
  if not names:
    raise UserError("must hold at least one array", field="params")
  check_real(params=params)
  named = dict(zip(names, map(jnp.asarray, jax.tree.leaves(params))))
  if len(named) < len(names):
    twice, _ = collections.Counter(names).most_common(1)[0]
    raise UserError(
      f"{twice!r} must be the path of one leaf, not of several", field="params"
    )
  if not isinstance(pattern, str):
    raise UserError("must be a string, such as '*/kernel'", field="pattern", value=pattern)
  chosen = {name: w for name, w in named.items() if fnmatch.fnmatchcase(name, pattern)}
  if not chosen:
    # The error names a matrix, since only matrices can be adapted.
    matrices = (name for name, leaf in named.items() if jnp.ndim(leaf) == 2)
    example = next(matrices, next(iter(named)))
    raise UserError(
      f"must match a path, such as {example!r}", field="pattern", value=pattern
    )
  return chosen


def _check_adapters(adapters: Adapters, trainable: Adapters) -> None:
  shapes, wanted = (jax.tree.map(jnp.shape, tree) for tree in (adapters, trainable))
  if shapes != wanted:
    raise UserError(
      f"must have the names and shapes of trainable, {wanted!r:.200}", field="adapters"
    )


def _merge(w: Any, pair: dict[str, jax.Array], scale: float) -> jax.Array:
  """Returns W + scale A B: [K, P], in the dtype of W."""
  # The product needs full precision: accelerators use fewer bits by default.
  low_rank = jnp.matmul(pair["a"], pair["b"], precision=lax.Precision.HIGHEST)
  w = jnp.asarray(w)
  return (trees.at_least_float32(w) + scale * low_rank).astype(w.dtype)


class _Adapted(NamedTuple):
  """A frozen matrix W and its adapters, whose product A B is not computed yet."""

  frozen: Any  # [K, P]
  pair: dict[str, jax.Array]
  scale: float


def _plain(value: Any) -> Any:
  return _merge(*value) if isinstance(value, _Adapted) else value


def _evaluate(closed: Any, args: Sequence[Any]) -> list[Any]:
  """Returns the results of a traced function, some of whose arguments are `_Adapted`."""
  return [
    _plain(value) for value in jaxprs.evaluate(closed.jaxpr, closed.consts, args, _step)
  ]


def _step(eqn: Any, values: list[Any]) -> list[Any]:
  """Returns the results of one equation; `values` are its inputs, some of them `_Adapted`."""
  name = eqn.primitive.name
  if not any(isinstance(value, _Adapted) for value in values):
    return jaxprs.results_of(eqn, values)
  if name in _CALLS:
    return _evaluate(eqn.params["jaxpr"], values)
  if name in jaxprs.REMATS:
    inner = jex.ClosedJaxpr(eqn.params["jaxpr"], ())
    return jaxprs.remat_again(eqn, lambda *operands: _evaluate(inner, operands))(*values)
  # A cast of W casts the frozen part; adapters are cast where they are used.
  if name == "convert_element_type" and jaxprs.is_float(eqn.outvars[0].aval):
    return [values[0]._replace(frozen=jaxprs.results_of(eqn, [values[0].frozen])[0])]
  if name == "dot_general" and isinstance(values[1], _Adapted) and _is_matmul(eqn):
    return [_product(eqn, _plain(values[0]), values[1])]
  return jaxprs.results_of(eqn, list(map(_plain, values)))


def _is_matmul(eqn: Any) -> bool:
  """Returns whether a product is x W or x W^T, summed over one axis and without batch axes."""
  (_, contracted), (batch, _) = eqn.params["dimension_numbers"]
  return len(contracted) == 1 and not batch


def _product(eqn: Any, x: Any, adapted: _Adapted) -> jax.Array:
  """Returns x W + scale (x A) B, [..., P], or x W^T + scale (x B^T) A^T, [..., K]."""
  (contracted, (side,)), _ = eqn.params["dimension_numbers"]
  out = eqn.outvars[0].aval.dtype
  first, second = ("b", "a") if side else ("a", "b")
  near, far = (adapted.pair[name].astype(x.dtype) for name in (first, second))
  names = ("precision", "preferred_element_type")
  how = {name: eqn.params[name] for name in names}
  dot = lambda left, right, axis: lax.dot_general(
    left, right, (((axis,), (side,)), ((), ())), **how
  )
  low = dot(x, near, contracted[0])  # [..., rank]
  low = dot(low.astype(x.dtype), far, low.ndim - 1)  # [..., P or K]
  return (dot(x, adapted.frozen, contracted[0]) + adapted.scale * low).astype(out)
