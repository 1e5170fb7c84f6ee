"""What is relied on of JAX's traces, and how a program is taken apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpjax import gradients, jaxprs
from dpjax.gradients.ghost import jaxpr_sites, row_forms, tapped


def _names(function, *args):
  return [eqn.primitive.name for eqn in jax.make_jaxpr(function)(*args).eqns]


def _eqn(function, *args):
  return jax.make_jaxpr(function)(*args).eqns[-1]


def test_names_and_parameters_of_the_primitives_that_are_entered():
  x = jnp.ones(3)
  call = _eqn(jax.jit(jnp.sin), x)
  assert call.primitive.name in jaxprs.CALLS and "jaxpr" in call.params
  remat = _eqn(jax.checkpoint(jnp.sin), x)
  assert remat.primitive.name in jaxpr_sites.REMATS
  assert {"jaxpr", "policy", "prevent_cse"} <= set(remat.params)
  scan = _eqn(lambda x: lax.scan(lambda c, y: (c + y, c), 0.0, x), x)
  assert scan.primitive.name == "scan"
  assert {"jaxpr", "length", "reverse", "unroll"} <= set(scan.params)
  assert jaxprs.ScanParts.of(scan) == (0, 1)


@pytest.mark.parametrize("consts", [0, 2])
@pytest.mark.parametrize("carries", [0, 1, 2])
@pytest.mark.parametrize("stepped", [0, 1, 2])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_the_parts_of_a_scan_are_told_from_ranks_alone(consts, carries, stepped, shape):
  # Length and shape are alike: only the rank tells a constant from what is stepped through.
  def scan(known, carry, xs):
    def body(carry, xs):
      key = jax.random.key(0)
      used = sum(map(jnp.sum, (*known, *carry, *xs)), jnp.zeros(shape))
      return [c + used for c in carry], (used, key)

    return lax.scan(body, carry, xs, length=3)

  known = [jnp.ones(shape)] * consts
  xs = [jnp.ones((3, *shape))] * stepped
  jaxpr = jax.make_jaxpr(scan)(known, [jnp.ones(shape)] * carries, xs).jaxpr
  found = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
  parts = jaxprs.ScanParts.of(found)
  # JAX may add constants of its own, such as the zeros above.
  assert parts.first_xs - parts.first_carry == carries
  assert len(found.invars) - parts.first_xs == stepped


def test_names_and_parameters_of_the_row_forms():
  dot = _eqn(jnp.dot, jnp.ones((2, 3)), jnp.ones((3, 2)))
  assert dot.primitive.name in row_forms._FORMS and "dimension_numbers" in dot.params
  conv = _eqn(
    lambda x, k: lax.conv(x, k, (1,), "SAME"), jnp.ones((1, 1, 4)), jnp.ones((1, 1, 3))
  )
  assert conv.primitive.name in row_forms._FORMS
  fields = {
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "dimension_numbers",
  }
  assert fields | {"feature_group_count", "batch_group_count"} <= set(conv.params)
  take = lambda t, i: t.at[i].get(mode="fill")
  gather = [e for e in jax.make_jaxpr(take)(jnp.ones((4, 2)), jnp.arange(3)).eqns]
  gather = next(eqn for eqn in gather if eqn.primitive.name == "gather")
  assert {"dimension_numbers", "slice_sizes", "mode"} <= set(gather.params)
  assert "stop_gradient" in _names(lax.stop_gradient, 1.0)


def _program(loss_fn, params, example):
  loss = jax.make_jaxpr(loss_fn)(params, example)
  return jaxpr_sites.program_of(loss, len(jax.tree.leaves(params)))


def _sites(program):
  return [site.name for site in program.sites]


def test_sites_are_where_parameters_meet_data_and_nowhere_else():
  def loss(p, x):
    kernel = jnp.tanh(p["w"]) * 2  # parameters alone: no site
    y = jnp.sin(x) ** 2  # data alone: no site
    return jnp.sum((y @ kernel + p["b"]) * jnp.arange(3.0))

  program = _program(loss, {"b": jnp.ones(3), "w": jnp.ones((4, 3))}, jnp.ones(4))
  assert _sites(program) == ["dot_general", "add"]
  dot, add = program.sites
  assert (dot.leaves, add.leaves) == ({1}, {0})
  assert not dot.sources[0].is_view and add.sources[0].is_view


def test_a_layer_and_its_bias_share_one_tap():
  loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["w"] + p["b"]) * (x @ p["w"]))
  program = _program(loss, {"b": jnp.ones(3), "w": jnp.ones((4, 3))}, jnp.ones(4))
  dot, add, other = program.sites
  taps = program.cotangents
  assert taps[dot.index] == taps[add.index] != taps[other.index]
  assert len(program.taps) == 2


def test_a_value_that_is_used_twice_does_not_share_its_tap():
  def loss(p, x):
    y = x @ p["w"]
    return jnp.sum(jnp.sin(y + p["b"]) + y)

  program = _program(loss, {"b": jnp.ones(3), "w": jnp.ones((4, 3))}, jnp.ones(4))
  assert len(program.taps) == 2


def _gates(p, x, *, used_whole=False):
  """Two products, split alike, whose parts are summed one by one."""
  one, two = x @ p["w"], jnp.cos(x) @ p["v"] + p["b"][None]
  pairs = zip(jnp.split(one, [1], axis=-1), jnp.split(two, [1], axis=-1))
  left, right = (a + b for a, b in pairs)
  rest = jnp.sum(one**2) if used_whole else 0.0
  return jnp.sum(jnp.sin(left) * 2) + jnp.sum(jnp.cos(right)) + rest


@pytest.mark.long
@pytest.mark.parametrize("used_whole", [False, True])
def test_products_that_are_split_and_summed_share_the_taps_of_the_sums(used_whole):
  params = {"b": jnp.ones(3), "v": jnp.ones((4, 3)), "w": jnp.ones((4, 3))}
  loss = lambda p, x: _gates(p, x, used_whole=used_whole)
  program = _program(loss, params, jnp.ones((2, 4)))
  one, two, bias = (program.cotangents[site.index] for site in program.sites)
  assert two == bias and (one == two) != used_whole
  assert one[0].axis == (0 if used_whole else 1)
  batch = jnp.sin(jnp.arange(24.0)).reshape(3, 2, 4)
  norms = [
    gradients.clipped_grad(loss, l2_clip_norm=1.0, method=method)(params, batch, True).norms
    for method in ("vmap", "ghost")
  ]
  np.testing.assert_allclose(*norms, rtol=1e-5)


def test_without_taps_the_program_is_the_loss():
  def loss(p, x):
    h, ys = lax.scan(lambda h, v: (jnp.tanh(h @ p["w"] + v), h[0]), x, p["b"])
    return jnp.sum(h) + jnp.sum(jax.checkpoint(jax.jit(jnp.cos))(ys))

  params = {"b": jnp.ones((2, 3)), "w": jnp.eye(3)}
  program = _program(loss, params, jnp.arange(3.0))
  zeros = {tap.index: jnp.zeros(tap.shape) for tap in program.taps}
  outs, seen = tapped.run(program, [*jax.tree.leaves(params), jnp.arange(3.0)], zeros)
  np.testing.assert_allclose(outs[0], loss(params, jnp.arange(3.0)), rtol=1e-6)
  assert set(seen) == {site.index for site in program.sites}
  assert all(x.shape[0] == 2 for arrays in seen.values() for x in arrays)  # stacked


def test_only_an_honest_rearrangement_is_a_view():
  views = {
    "transpose": lambda w: w.T,
    "reshape": lambda w: w.reshape(2, 6).reshape(3, 4),
    "cast": lambda w: w.astype(jnp.bfloat16).T,
    "slice": lambda w: w[:3, :].reshape(3, 3).T,
  }
  others = {
    "scaled": lambda w: 2 * w.T,
    "broadcast": lambda w: jnp.broadcast_to(w[0, :1], (3, 4)),
    "repeated": lambda w: jnp.concatenate([w[:2], w[:2]], 1)[:, :4].T,
    "symmetric": lambda w: w[:3] + w[:3].T,
  }
  for name, view in (views | others).items():
    loss = lambda w, x, view=view: jnp.sum(jnp.sin(view(w).astype(jnp.float32) @ x))
    example = jnp.ones(jax.eval_shape(view, jnp.ones((4, 3))).shape[1])
    (site,) = _program(loss, jnp.ones((4, 3)), example).sites
    assert site.sources[0].is_view == (name in views), name


def test_joined_parameters_are_a_view_of_all_of_them():
  def loss(p, x):
    return jnp.sum(jnp.sin(x @ jnp.concatenate([p["a"], p["b"]], axis=1)))

  params = {"a": jnp.ones((4, 2)), "b": jnp.ones((4, 3))}
  (site,) = _program(loss, params, jnp.ones(4)).sites
  assert site.sources[0].is_view and site.leaves == {0, 1}


def test_a_loss_without_its_example_is_lifted_to_a_site():
  program = _program(lambda p, x: jnp.sum(p**2), jnp.ones(3), jnp.ones(2))
  assert _sites(program) == ["parameter"]


@pytest.mark.cases(long=["1"])
@pytest.mark.parametrize("axis", [0, 1])
def test_an_equation_stands_alone_with_literals_and_unused_results(axis):
  function = lambda x: lax.top_k(x * 2.0, 2)[axis]
  eqn = jax.make_jaxpr(function)(jnp.arange(4.0)).eqns[-1]
  results = jaxprs.eqn_fn(eqn)(jnp.arange(4.0))
  assert len(results) == len(eqn.outvars)
  expected = lax.top_k(jnp.arange(4.0), 2)[axis]
  np.testing.assert_array_equal(results[axis], expected)
