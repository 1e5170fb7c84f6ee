"""Trains some parameters for some steps, with the optimizer state of all parameters."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from dpjax import trees
from dpjax.training import schedule_free
from dpjax.types import Example, LossFn, Params, Updates
from dpjax.validate import UserError

# Largest number of parameter names that an error lists.
_SHOWN = 8


def of_part(
  loss_fn: LossFn, tx: optax.GradientTransformation, trained: Callable[[str], bool]
) -> tuple[LossFn, optax.GradientTransformation]:
  """Returns (loss, optimizer) in which parameters that are not `trained` have no gradient,
  and do not move.

  The optimizer state is that of `tx`, so any step may switch between this pair and `loss_fn` with
  `tx`. With `dp_sgd` both kinds of steps belong to one plan. Examples are clipped by the gradient
  of the trained parameters alone. Noise on the others is drawn as usual and discarded, at no cost.

  Args:
    trained: (parameter's name, such as params/head/kernel) -> whether it is trained; the names
      are those of `trees.named_leaves`. Names of an nnx state have no "params/" in front.

  Raises:
    UserError: no parameter is trained; then nothing would learn, and the budget would be spent.
      Or `tx` is a schedule-free optimizer of Optax.

  >>> loss, tx = of_part(lambda p, x: x * p["a"] * p["b"], optax.sgd(1.0), "b".__eq__)
  >>> params = {"a": jnp.float32(2), "b": jnp.float32(3)}
  >>> grads = jax.grad(loss)(params, 5.0)
  >>> print(grads["a"], grads["b"], tx.update(params, tx.init(params))[0]["a"])
  0.0 10.0 0.0
  """

  def but(tree: Params, instead: Callable[[jax.Array], jax.Array]) -> Params:
    leaves = trees.named_leaves(tree)
    structure = jax.tree.structure(tree)
    moving = {name for name in leaves if trained(name)}
    if leaves and not moving:
      names = ", ".join(list(leaves)[:_SHOWN])
      raise UserError(f"chooses no parameter; their names are {names}", field="trained")
    chosen = (leaf if name in moving else instead(leaf) for name, leaf in leaves.items())
    return jax.tree.unflatten(structure, list(chosen))

  def loss(params: Params, example: Example) -> jax.Array:
    return loss_fn(but(params, jax.lax.stop_gradient), example)

  def update(updates: Updates, state: optax.OptState, params: Params | None = None):
    # A schedule-free optimizer averages all parameters, also those that must not move here.
    if schedule_free.states(state):
      raise UserError(
        "must not be schedule-free, which averages all parameters", field="tx"
      )
    # Updates of parameters that are not trained are zeroed before the optimizer, so that its state
    # does not see them. They are zeroed again after it, since an optimizer may add updates of its
    # own, such as weight decay.
    moved, state = tx.update(but(updates, jnp.zeros_like), state, params)
    return but(moved, jnp.zeros_like), state

  return loss, optax.GradientTransformation(tx.init, update)
