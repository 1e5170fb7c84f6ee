"""Products with matrices that an index chooses: no matrix of an example is recorded.

The oracle is the vmap route in float64 (`ghost_oracle`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import gradients
from dpjax.gradients.ghost import chosen_products
from dpjax.gradients.ghost.units import Rule
from tests.core.gradients import ghost_oracle as oracle

pytestmark = pytest.mark.usefixtures("x64")

_EXPERTS = 4
_WIDTH = 5
_COLUMNS = 3


def _params(seed=0):
  rng = np.random.default_rng(seed)
  return {
    "w": jnp.asarray(rng.normal(size=(_EXPERTS, _WIDTH, _COLUMNS))),
    "layers": jnp.asarray(rng.normal(size=(2, _EXPERTS, _WIDTH, _WIDTH))),
  }


def _batch(num_examples=5, seed=1):
  rng = np.random.default_rng(seed)
  chosen = rng.integers(0, _EXPERTS, size=(num_examples, 2))
  # Rows of one example meet one matrix twice, and their gradients add up.
  chosen[0] = 1
  return {
    "x": jnp.asarray(rng.normal(size=(num_examples, 2, _WIDTH))),
    "y": jnp.asarray(rng.normal(size=(num_examples, 2, _COLUMNS))),
    "i": jnp.asarray(chosen),
  }


def _energy(x):
  return jnp.sum(jnp.sin(x))


def _scan_layers(p, e):
  def layer(h, w):
    return jnp.tanh(h @ w[e["i"][0]]), None

  return _energy(jax.lax.scan(layer, e["x"], p["layers"])[0])


def _scan_steps(p, e):
  def step(h, i):
    return jnp.tanh(jnp.tanh(h @ p["w"][i]) @ jnp.ones((_COLUMNS, _WIDTH))), None

  return _energy(jax.lax.scan(step, e["x"], e["i"])[0])


def _dynamic(p, e):
  w = jax.lax.dynamic_index_in_dim(p["w"], e["i"][0], keepdims=False)
  return _energy(w.T @ e["x"][1])


_LOSSES = {
  "one matrix": lambda p, e: _energy(e["x"] @ p["w"][e["i"][0]]),
  "one row": lambda p, e: _energy(e["x"][0] @ p["w"][e["i"][0]]),
  "a matrix for each row": lambda p, e: _energy(
    jnp.einsum("td,tdp->tp", e["x"], p["w"][e["i"]])
  ),
  "transposed": lambda p, e: _energy(jnp.einsum("td,tpd->tp", e["y"], p["w"][e["i"]])),
  "two matrices for one row": lambda p, e: _energy(
    jnp.einsum("d,kdp->kp", e["x"][0], p["w"][e["i"]])
  ),
  "two matrices for each row": lambda p, e: _energy(
    jnp.einsum("td,kdp->tkp", e["x"], p["w"][e["i"]])
  ),
  "rows of integers": lambda p, e: _energy(
    jnp.einsum("td,tdp->tp", (3 * e["x"]).astype(jnp.int32), p["w"][e["i"]])
  ),
  "take": lambda p, e: _energy(e["x"] @ jnp.take(p["w"], e["i"][1], axis=0)),
  "dynamic_index_in_dim": _dynamic,
  "middle": lambda p, e: _energy(
    e["x"] @ jnp.moveaxis(jnp.moveaxis(p["w"], 0, 1)[:, e["i"][0]], 0, 0)
  ),
  "two choices": lambda p, e: (
    _energy(e["x"] @ p["w"][e["i"][0]]) + jnp.sum(jnp.cos(e["x"] @ p["w"][e["i"][1]]))
  ),
  "layers of a scan": _scan_layers,
  "steps of a scan": _scan_steps,
}


@pytest.mark.parametrize("name", _LOSSES)
def test_chosen_matrices_are_never_formed_for_an_example(name):
  planned = oracle.plan(_LOSSES[name], _params(), oracle.first_of(_batch()))
  sites = [site for unit in planned.units for site in unit.sites]
  assert {site.name for site in sites} == {chosen_products.NAME}
  rules = {unit.rule for unit in planned.units if unit.sites}
  assert rules <= {Rule.OUTER, Rule.GRAM}


@pytest.mark.cases(slow=[7], long=...)
@pytest.mark.parametrize("name", _LOSSES)
def test_sums_over_chosen_matrices_are_those_of_a_loop(name):
  params = _params()
  batch = _batch()
  # Rounding is added to a norm of several rows.
  oracle.check(_LOSSES[name], params, batch, bound=1e-8)


@pytest.mark.cases(slow=[3], long=...)
@pytest.mark.parametrize(
  "loss",
  [
    # A matrix that two products use; one that is no factor of a product; a table of rows.
    lambda p, e: _energy(e["x"] @ (w := p["w"][e["i"][0]])) + jnp.sum(jnp.cos(e["x"] @ w)),
    lambda p, e: _energy(p["w"][e["i"][0]] * e["y"][:1]),
    lambda p, e: _energy(e["x"][:, :_EXPERTS] @ p["w"][:, e["i"][0]]),
    lambda p, e: _energy(jnp.einsum("kd,kdp->p", e["x"], p["w"][e["i"]])),
    lambda p, e: _energy(p["w"][e["i"][0]].T @ p["w"][e["i"][1]]),
    # What is chosen begins a loop, or is chosen from again.
    lambda p, e: _energy(
      jax.lax.scan(
        lambda h, x: (jnp.tanh(h * jnp.sum(x)), None), p["w"][e["i"][0]], e["x"]
      )[0]
    ),
    lambda p, e: _energy(e["x"] @ p["layers"][e["i"][0] % 2][e["i"][1]]),
  ],
)
def test_other_uses_of_a_choice_keep_their_rules(loss):
  oracle.check(loss, _params(), _batch(), bound=1e-8)


@pytest.mark.slow
def test_many_steps_of_a_scan_are_not_multiplied_pair_by_pair():
  """Of 64 steps there are 4,096 pairs, where a matrix has 15 numbers."""
  batch = _batch()
  long = batch | {"i": jnp.tile(batch["i"], (1, 32))}
  planned = oracle.plan(_scan_steps, _params(), oracle.first_of(long))
  assert Rule.GRAM not in {unit.rule for unit in planned.units}
  oracle.check(_scan_steps, _params(), long, bound=1e-8)


@pytest.mark.slow
def test_what_lies_outside_follows_the_index_rules_of_jax():
  params = _params()
  batch = _batch()
  batch["i"] = batch["i"].at[:, 0].set(jnp.array([-1, _EXPERTS, 99, -99, 2]))
  for mode in ("clip", "wrap"):
    loss = lambda p, e, mode=mode: _energy(
      e["x"] @ jnp.take(p["w"], e["i"][0], axis=0, mode=mode)
    )
    oracle.check(loss, params, batch, bound=1e-8)
  # Outside there is NaN, as is the loss, and no gradient of the matrices.
  filled = lambda p, e: _energy(e["x"] @ jnp.take(p["w"], e["i"][0], axis=0))
  slow, fast = oracle.both(filled, params, batch)
  np.testing.assert_allclose(slow.norms, fast.norms, rtol=1e-8)
  assert (np.asarray(fast.norms) > 0).sum() == 2
  assert oracle.relative_error(slow.total, fast.total) < 1e-8


@pytest.mark.slow
def test_no_term_is_longer_than_the_bound_where_rows_cancel():
  """Rows of one example that meet one matrix with opposite signs, in float32."""
  params = {"w": _params()["w"].astype(jnp.float32)}
  loss = lambda p, e: jnp.sum(
    jnp.einsum("td,tdp->tp", e["x"], p["w"][e["i"]]) * e["sign"][:, None]
  )
  x = jax.random.normal(jax.random.key(0), (64, 1, _WIDTH), jnp.float32) * 1e4
  x = jnp.tile(x, (1, 16, 1))
  sign = jnp.tile(jnp.array([1.0, -1.0], jnp.float32), (64, 8))
  # What is left of an example is below the rounding of its rows.
  x = x * (1 + 3e-7 * jax.random.normal(jax.random.key(1), x.shape, jnp.float32))
  batch = {"x": x, "sign": sign, "i": jnp.ones((64, 16), jnp.int32)}
  grad_fn = gradients.clipped_grad(loss, l2_clip_norm=1.0, method="ghost")
  for row in range(0, 64, 16):
    alone = jnp.arange(64) == row
    term = grad_fn(params, batch, alone).total["w"]
    assert float(jnp.linalg.norm(term.ravel().astype(jnp.float64))) <= 1 + 1e-5


def test_rows_that_cancel_do_not_round_other_examples_away():
  """Steps of a scan are summed over the batch one after the other.

  An example whose rows cancel once stood in that sum with millions of bounds, between its first
  step and its last. Terms of the others in between were lost: 13 bounds.
  """
  count = 512
  x = np.zeros((count, 4, 6), np.float32)
  x[:, :, 0] = 1
  g = np.zeros((count, 4, 5), np.float32)
  g[:, :, 0] = 0.1
  g[0, :, 0] = [2.5e6, 0, 0, -2.5e6]
  batch = {"x": x, "g": g}

  def loss(w, e):
    def step(total, seen):
      return total + jnp.sum(seen["g"] * (seen["x"] @ w)), None

    return jax.lax.scan(step, jnp.float32(0), e)[0]

  clipped = gradients.clipped_grad(loss, l2_clip_norm=1.0, method="ghost")
  total_of = jax.jit(lambda mask: clipped(jnp.ones((6, 5), jnp.float32), batch, mask).total)
  # Its own gradient is 0. What is left is what a sum of 200 bounds is rounded by.
  moved = total_of(np.ones(count, bool)) - total_of(np.arange(count) != 0)
  assert np.linalg.norm(moved) < 0.1
