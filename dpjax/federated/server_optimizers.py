"""The server's adaptive optimizers of FedOpt: algorithm 2 of Reddi et al. 2021.

D_t is the mean difference of the clients, m_-1 is 0, and v_-1 is tau^2 (arXiv:2003.00295 asks for
v_-1 >= tau^2). Then in every coordinate:

    m_t = beta_1 m_(t-1) + (1 - beta_1) D_t
    v_t = v_(t-1) + D_t^2                                                       (FedAdagrad)
    v_t = v_(t-1) - (1 - beta_2) D_t^2 sign(v_(t-1) - D_t^2)                    (FedYogi)
    v_t = beta_2 v_(t-1) + (1 - beta_2) D_t^2                                   (FedAdam)
    x_(t+1) = x_t + learning_rate * m_t / (sqrt(v_t) + tau)

There is no bias correction, and tau stands outside the root. The optimizers of Optax with these
names differ: Adam and Yogi correct biases, Adagrad's epsilon is inside the root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import trees, validate
from dpjax.types import Array

SECOND_MOMENTS: dict[str, Callable[..., Array]] = {
  "adagrad": lambda v, square, beta_2: v + square,
  "yogi": lambda v, square, beta_2: v - (1 - beta_2) * square * jnp.sign(v - square),
  "adam": lambda v, square, beta_2: beta_2 * v + (1 - beta_2) * square,
}


class FedOptState(NamedTuple):
  """Moments m and v of the paper. The gradient is -D_t here, so m has the opposite sign."""

  first: Any
  second: Any


def fed_opt(
  name: str,
  learning_rate: float,
  *,
  beta_1: float | None = None,
  beta_2: float = 0.99,
  tau: float = 1e-3,
) -> optax.GradientTransformation:
  """Returns a server optimizer (Reddi et al. 2021, algorithm 2) that takes -D_t as its gradient.

  Args:
    name: "adam", "yogi" or "adagrad".
    learning_rate: eta of the paper.
    beta_1: decay of m; None for the value of the paper: 0 (no momentum) for "adagrad", else 0.9.
    beta_2: decay of v, 0.99 in the paper; unused by "adagrad".
    tau: degree of adaptivity, 1e-3 where the paper does not tune it. It also sets v_-1 = tau^2.

  Raises:
    UserError: the name is unknown, or a number is out of its range.

  >>> tx = fed_opt("adam", 0.1, tau=1.0)  # m = 0.1 * 2, v = 0.99 * 1 + 0.01 * 4
  >>> print(tx.update(jnp.array(-2.0), tx.init(jnp.array(0.0)))[0].round(6))
  0.009926
  """
  validate.one_of(SECOND_MOMENTS, name=name)
  validate.positive(learning_rate=learning_rate, tau=tau)
  beta_1 = (0.0 if name == "adagrad" else 0.9) if beta_1 is None else beta_1
  validate.share(beta_1=beta_1, beta_2=beta_2)
  moved = SECOND_MOMENTS[name]

  def init(params: Any) -> FedOptState:
    # Moments are at least float32, since small squares in half precision underflow or vanish
    # beside v.
    wide = jax.tree.map(lambda leaf: trees.at_least_float32(jnp.asarray(leaf)), params)
    return FedOptState(
      jax.tree.map(jnp.zeros_like, wide),
      # v_-1 = tau^2 is the smallest value that the paper allows. That of Optax ignores tau.
      jax.tree.map(lambda leaf: jnp.full_like(leaf, tau**2), wide),
    )

  def update(updates: Any, state: Any, params: Any = None) -> Any:
    del params
    grads = updates
    updates = jax.tree.map(trees.at_least_float32, updates)
    first = jax.tree.map(lambda m, g: beta_1 * m + (1 - beta_1) * g, state.first, updates)
    second = jax.tree.map(lambda v, g: moved(v, g * g, beta_2), state.second, updates)
    step = lambda m, v, g: (-learning_rate * m / (jnp.sqrt(v) + tau)).astype(g.dtype)
    return jax.tree.map(step, first, second, grads), FedOptState(first, second)

  return optax.GradientTransformation(init, update)
