"""The fast route in half precision, with non-finite examples, and within its bound."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from dpjax import gradients
from dpjax.gradients.ghost import unit_rules


def _sum(loss_fn, params, batch, method="ghost", clip_norm=0.5, **options):
  grad_fn = gradients.clipped_grad(
    loss_fn, l2_clip_norm=clip_norm, method=method, **options
  )
  return jax.jit(grad_fn)(params, batch, True)


def _normal(*shape, seed=0):
  return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def _params():
  return {"conv": _normal(3, 3, 2, 4), "bias": _normal(4), "w": _normal(4 * 36, 5)}


def _loss(params, x, dtype=jnp.float32):
  params, x = jax.tree.map(lambda leaf: leaf.astype(dtype), (params, x))
  x = lax.conv_general_dilated(
    x[None], params["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
  )
  x = jnp.tanh(x + params["bias"].reshape(1, 1, 1, 4))
  y = x.reshape(1, -1) @ params["w"]
  return jnp.sum(jnp.sin(y.astype(jnp.float32)))


def _close(a, b, rtol):
  scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(a))
  close = functools.partial(np.testing.assert_allclose, rtol=0, atol=rtol * scale)
  jax.tree.map(close, a, b)


@pytest.mark.slow
def test_float32_agrees_to_five_digits():
  params, batch = _params(), _normal(6, 6, 6, 2)
  slow, fast = (_sum(_loss, params, batch, method) for method in ("vmap", "ghost"))
  _close(slow.total, fast.total, 1e-5)
  np.testing.assert_allclose(slow.norms, fast.norms, rtol=1e-5)


@pytest.mark.cases(slow=["float16"], long=...)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_p20_half_precision_norms_and_sums_are_float32(dtype):
  loss = functools.partial(_loss, dtype=dtype)
  params, batch = _params(), _normal(6, 6, 6, 2)
  slow, fast = (_sum(loss, params, batch, method) for method in ("vmap", "ghost"))
  assert {leaf.dtype for leaf in jax.tree.leaves(fast.total)} == {jnp.dtype("float32")}
  assert fast.norms.dtype == jnp.float32
  _close(slow.total, fast.total, 2e-2)
  np.testing.assert_allclose(slow.norms, fast.norms, rtol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_number_of_the_loss_meets_parameters_in_half_precision(dtype):
  """As the degrees of freedom in `jnp.std` do, which are an argument of an inner function."""
  params = {"w": _normal(4, 2).astype(dtype)}
  batch = _normal(6, 4)

  def loss(p, x):
    kernel = p["w"] / (jnp.std(p["w"]) + 0.1)
    return jnp.sum(jnp.tanh(x.astype(dtype) @ kernel)).astype(jnp.float32)

  slow, fast = (_sum(loss, params, batch, method) for method in ("vmap", "ghost"))
  _close(slow.total, fast.total, 2e-2)


@pytest.mark.slow
def test_half_precision_parameters_get_a_float32_sum():
  params = {"w": jnp.full((2, 3), 0.5, jnp.bfloat16)}
  batch = jnp.ones((1000, 2), jnp.bfloat16) / 8
  loss = lambda p, x: jnp.sum(x @ p["w"]).astype(jnp.float32)
  total = _sum(loss, params, batch, clip_norm=1e3).total["w"]
  assert total.dtype == jnp.float32
  np.testing.assert_allclose(total, 125.0)  # bfloat16 would stall at 32


@pytest.mark.cases(slow=["0.001-bfloat16"], long=...)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("clip_norm", [1e-3, 0.7])
def test_p4_one_example_never_exceeds_the_bound(dtype, clip_norm):
  loss = functools.partial(_loss, dtype=dtype)
  for seed in range(4):
    total = _sum(loss, _params(), _normal(1, 6, 6, 2, seed=seed), clip_norm=clip_norm).total
    flat = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(total)]
    assert np.linalg.norm(np.concatenate(flat)) <= clip_norm * (1 + 1e-6)


@pytest.mark.cases(slow=["float16"], long=...)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_p4_the_bound_holds_where_the_general_rule_rounds(dtype):
  def loss(p, x):
    p, x = jax.tree.map(lambda leaf: leaf.astype(dtype), (p, x))
    shifted = jnp.tanh(x + p["shift"]) * p["shift"] + p["table"][jnp.arange(80)]
    return jnp.sum(jnp.sin(shifted.astype(jnp.float32)))

  params = {"shift": _normal(80, 60), "table": _normal(90, 60)}  # too large to be held
  total = _sum(loss, params, _normal(1, 80, 60), clip_norm=0.7).total
  flat = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(total)]
  assert 0.69 < np.linalg.norm(np.concatenate(flat)) <= 0.7 * (1 + 1e-6)


@pytest.mark.cases(slow=["product"], long=...)
@pytest.mark.parametrize("sizes", [(8, 200, 100), (64, 40, 40)], ids=["gram", "product"])
def test_p4_the_bound_holds_where_the_rows_of_an_example_cancel(sizes):
  rows, left, right = sizes
  x = jnp.broadcast_to(_normal(1, 1, left), (1, rows, left)) + 1e-5 * _normal(1, rows, left)
  weights = _normal(rows) * 1e3
  weights = weights - weights.mean()
  loss = lambda w, x: jnp.sum((x @ w) * weights[:, None])
  total = _sum(loss, jnp.ones((left, right)), x, clip_norm=1e-3).total
  assert np.linalg.norm(np.asarray(total, np.float64)) <= 1e-3 * (1 + 1e-6)


def _twice(table, example):
  """Rows of a table, looked up at two places."""
  row = lambda i: jnp.sum(table[example["i"]] * example["g"][i])
  return row(0) + row(1)


def _in_steps(table, example):
  def step(total, seen):
    return total + jnp.sum(table[seen["i"]] * seen["g"]), None

  steps = {"i": example["i"], "g": example["g"][0]}
  return lax.scan(step, jnp.float32(0), steps)[0]


def _multiplied(w, example):
  return jnp.sum((jnp.ones((example["g"].shape[1], 50)) @ w) * example["g"][0])


@pytest.mark.cases(quick=["1.0-_multiplied", "clip_norm1-_multiplied"], slow=...)
@pytest.mark.parametrize("loss", [_twice, _in_steps, _multiplied])
@pytest.mark.parametrize("clip_norm", [1.0, {"w": 1.0, "b": 0.5}])
def test_p4_rows_that_cancel_do_not_change_how_others_are_rounded(loss, clip_norm):
  """The others' numbers are below half a unit in the last place of 500: 1.9 bounds once."""
  count = 1024
  g = np.full((count, 2, 32, 3), 1.5e-5, np.float32)
  g[0] = 0
  g[0, 0, 0, 0] = 500
  g[0, 1 if loss is _twice else 0, -1, 0] = -500
  batch = {"i": np.zeros((count, 32), np.int32), "g": g}
  params = {"w": jnp.ones((50, 3)), "b": jnp.ones(2)}
  whole = lambda params, example: loss(params["w"], example) + 0 * jnp.sum(params["b"])
  grad_fn = gradients.clipped_grad(whole, l2_clip_norm=clip_norm, method="ghost")
  total_of = jax.jit(lambda mask: grad_fn(params, batch, mask).total["w"])
  # Its own gradient is 0.
  moved = total_of(np.ones(count, bool)) - total_of(np.arange(count) != 0)
  assert np.linalg.norm(moved) < 0.04


@pytest.mark.slow
@pytest.mark.parametrize("in_steps", [False, True])
def test_rows_are_multiplied_in_parts_where_a_batch_has_many(in_steps, monkeypatch):
  """In few sums, so that an example's rows stand between few others."""
  monkeypatch.setattr(unit_rules, "_ROWS_OF_SUM", 64)
  x = _normal(12, 16, 96).at[5].set(jnp.nan)
  w = _normal(96, 96)

  def loss(w, x):
    if not in_steps:
      return jnp.sum(jnp.tanh(x @ w))
    add = lambda total, row: (total + jnp.sum(jnp.tanh(row @ w)), None)
    return lax.scan(add, jnp.float32(0), x)[0]

  grad_fn = gradients.clipped_grad(loss, l2_clip_norm=0.5, method="ghost")
  assert "length=3" in str(jax.make_jaxpr(grad_fn)(w, x, True))
  slow, fast = (_sum(loss, w, x, method) for method in ("vmap", "ghost"))
  _close(slow.total, fast.total, 1e-4)


def test_rows_in_single_precision_are_summed_in_parts_beside_doubles(monkeypatch):
  """The limit on an example's rows counts on these parts. Its factor is a double here."""
  monkeypatch.setattr(unit_rules, "_ROWS_OF_SUM", 64)
  with jax.enable_x64(True):
    params = {"w": _normal(96, 96), "v": jnp.ones(3)}
    assert params["w"].dtype == jnp.float32 and params["v"].dtype == jnp.float64
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["w"])) + jnp.sum(p["v"]) * x[0, 0]
    grad_fn = gradients.clipped_grad(loss, l2_clip_norm=0.5, method="ghost")
    assert "length=3" in str(jax.make_jaxpr(grad_fn)(params, _normal(12, 16, 96), True))


def _poisoned_loss(params, example):
  x, poison = example
  hidden = jnp.tanh(x @ params["w"] + params["b"][None]) @ params["w"].T
  return jnp.sum(jnp.sin(hidden)) * poison


@pytest.mark.cases(slow=["operand-inf"], long=...)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["operand", "cotangent"])
def test_p1_a_non_finite_example_contributes_nothing(poison, where):
  params = {"w": _normal(4, 3), "b": _normal(3)}
  x, scale = _normal(5, 2, 4), jnp.ones(5)
  keep = np.arange(5) != 2
  clean = (x[keep], scale[keep])
  bad = (
    (x.at[2, 0, 1].set(poison), scale)
    if where == "operand"
    else (x, scale.at[2].set(poison))
  )
  expected, got = (_sum(_poisoned_loss, params, batch) for batch in (clean, bad))
  _close(expected.total, got.total, 1e-6)
  assert not np.isfinite(got.norms[2])
  np.testing.assert_allclose(got.norms[keep], expected.norms, rtol=1e-6)


@pytest.mark.long
def test_p1_a_dropped_example_never_meets_a_zero_times_infinity():
  """Every kind of contraction: held product, second transpose, held gradient, tied."""

  def loss(p, x):
    h = jnp.tanh(x @ p["wide"]) * p["scale"][None]
    return jnp.sum(h @ p["wide"].T) + jnp.sum(p["table"][jnp.int32(x[:, 0] > 0)])

  params = {"wide": _normal(3, 50), "scale": _normal(50), "table": _normal(2, 3)}
  for rows in (1, 30):
    x = _normal(3, rows, 3)
    expected = _sum(loss, params, x[:2]).total
    got = _sum(loss, params, x.at[2].set(jnp.inf)).total
    _close(expected, got, 1e-6)


@pytest.mark.cases(slow=["3e+38-1", "3e+38-3"], long=...)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_p1_a_wide_operand_is_multiplied_as_it_is_only_where_all_are_finite(rows, poison):
  """Also where the poison reaches no parameter, or meets a gradient of 0, or is masked out."""
  live = np.arange(1500) != 7

  def loss(w, example):
    x, scale = example
    return jnp.sum(jnp.sin(x @ jnp.where(live[:, None], w, 0))) * scale

  w, x, scale = _normal(1500, 2), _normal(5, rows, 1500), jnp.ones(5)
  mask = jnp.arange(5) != 3
  grad_fn = jax.jit(gradients.clipped_grad(loss, l2_clip_norm=0.5, method="ghost"))
  for column, factor in ((0, 1.0), (7, 1.0), (0, 0.0)):
    bad = x.at[3, 0, column].set(poison), scale.at[3].set(factor)
    expected, got = grad_fn(w, (x, scale), mask).total, grad_fn(w, bad, mask).total
    np.testing.assert_array_equal(got, expected)  # of an example that the mask leaves out
    dropped = grad_fn(w, bad, jnp.ones(5, bool))
    alone = grad_fn(w, bad, ~mask)
    assert np.isfinite(dropped.total).all()
    assert float(jnp.linalg.norm(dropped.total - expected)) <= 0.5 * (1 + 1e-5)
    _close(dropped.total, expected + alone.total, 1e-5)


@pytest.mark.cases(slow=[2], long=...)
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.bool_])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (1500,)], ids=str)
def test_p1_integers_that_a_parameter_multiplies_are_numbers(dtype, size, shape):
  """Taken for rows of a table, they made a sum of 100 times the clip norm of one example."""
  x = np.random.default_rng(0).integers(0, 200, (size, *shape)).astype(dtype)
  w = _normal(shape[-1], 4)
  contracted = (((len(shape) - 1,), (0,)), ((), ()))
  loss = lambda w, x: jnp.sum(jnp.sin(jax.lax.dot_general(x, w, contracted)))
  expected, got = (
    gradients.clipped_grad(loss, l2_clip_norm=0.5, method=method)(w, x, True)
    for method in ("vmap", "ghost")
  )
  _close(expected.total, got.total, 1e-4)
  np.testing.assert_allclose(got.norms, expected.norms, rtol=1e-4)


@pytest.mark.cases(slow=[1], long=...)
@pytest.mark.parametrize("sizes", [(1, 1500, 2), (2, 1025, 1)], ids=str)
def test_p7_not_even_the_sign_of_a_zero_says_what_padding_holds(sizes):
  size, width, classes = sizes
  loss = lambda w, x: jnp.sum(jnp.sin(x @ w))
  grad_fn = jax.jit(gradients.clipped_grad(loss, l2_clip_norm=0.5, method="ghost"))
  x = jnp.zeros((size, width))
  for held in (1.0, -1.0, np.nan):
    total = grad_fn(_normal(width, classes), x.at[0].set(held), jnp.arange(size) > 0).total
    assert not np.signbit(total).any()


def test_p2_a_square_beyond_float32_is_clipped_and_a_norm_beyond_it_dropped():
  loss = lambda w, x: jnp.sum(x @ w)
  got = _sum(loss, jnp.ones((2, 1)), jnp.array([[3e30, 4e30], [0.0, 0.5]]))
  np.testing.assert_allclose(got.total, [[0.3], [0.9]], rtol=1e-6)
  np.testing.assert_allclose(got.norms, [5e30, 0.5], rtol=1e-6)
  got = _sum(loss, jnp.ones((2, 1)), jnp.array([[3e38, 3e38], [0.0, 0.5]]))
  np.testing.assert_allclose(got.total, [[0.0], [0.5]])


@pytest.mark.long
def test_p3_an_example_with_zero_gradient_contributes_zero():
  got = _sum(_loss, _params(), jnp.zeros((2, 6, 6, 2)))
  zero = _sum(lambda p, x: 0.0 * _loss(p, x), _params(), jnp.zeros((2, 6, 6, 2)))
  assert np.isfinite(got.norms).all()
  jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, 0), zero.total)
  np.testing.assert_array_equal(zero.norms, 0)


@pytest.mark.slow
def test_p7_padding_may_hold_anything():
  params, x = _params(), _normal(4, 6, 6, 2)
  mask = jnp.arange(4) < 3
  grad_fn = jax.jit(gradients.clipped_grad(_loss, l2_clip_norm=0.5, method="ghost"))
  expected = grad_fn(params, x, mask).total
  jax.tree.map(
    np.testing.assert_array_equal,
    grad_fn(params, x.at[3].set(jnp.nan), mask).total,
    expected,
  )


def test_p28_unused_parameters_keep_their_place():
  params = {"used": jnp.ones(2), "unused": jnp.ones((3, 2))}
  got = _sum(lambda p, x: jnp.sum(p["used"] * x), params, jnp.ones((4, 2)))
  np.testing.assert_array_equal(got.total["unused"], np.zeros((3, 2)))


@pytest.mark.slow
def test_memory_does_not_grow_with_batch_times_parameters():
  loss = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)
  params, batch = jnp.ones((256, 256)), jnp.ones((128, 256))

  def peak(method):
    grad_fn = gradients.clipped_grad(loss, l2_clip_norm=1.0, method=method)
    return (
      jax.jit(grad_fn)
      .lower(params, batch, True)
      .compile()
      .memory_analysis()
      .temp_size_in_bytes
    )

  assert peak("auto") < peak("vmap") / 10


# --- random small networks ------------------------------------------------------------------

_LAYERS = (
  "dense", "bias", "scale", "conv", "norm", "tied", "lora", "scan", "embed", "attend", "jit",
  "experts",
)  # fmt: skip
_WIDTH = 4


def _layer_params(kind, seed):
  shapes = {
    "dense": dict(w=(_WIDTH, _WIDTH)),
    "bias": dict(b=(_WIDTH,)),
    "scale": dict(s=(_WIDTH,)),
    "conv": dict(k=(3, _WIDTH, _WIDTH)),
    "norm": dict(s=(_WIDTH,), b=(_WIDTH,)),
    "tied": dict(w=(_WIDTH, 3)),
    "lora": dict(a=(_WIDTH, 2), b=(2, _WIDTH)),
    "scan": dict(w=(_WIDTH, _WIDTH), b=(_WIDTH,)),
    "embed": dict(t=(3, _WIDTH)),
    "attend": dict(q=(_WIDTH, _WIDTH), k=(_WIDTH, _WIDTH)),
    "jit": dict(w=(_WIDTH, _WIDTH)),
    "experts": dict(few=(3, _WIDTH, _WIDTH), many=(40, _WIDTH, _WIDTH)),
  }
  return {name: _normal(*shape, seed=seed) for name, shape in shapes[kind].items()}


def _scan(x, p):
  step = lambda h, xt: (jnp.tanh(xt + h @ p["w"] + p["b"]),) * 2
  return lax.scan(step, jnp.zeros(_WIDTH, x.dtype), x)[1]


def _conv(x, p):
  numbers = ("NHC", "HIO", "NHC")
  return lax.conv_general_dilated(x[None], p["k"], (1,), "SAME", dimension_numbers=numbers)[
    0
  ]


def _experts(x, p):
  chosen = jnp.argmax(x[:, :3], axis=1)
  by_row = jax.vmap(lambda row, i: row @ p["few"][i])(x, chosen)
  return by_row + x @ p["many"][12 * chosen[0]]


_APPLY = {
  "dense": lambda x, p: x @ p["w"],
  "bias": lambda x, p: x + p["b"][None],
  "scale": lambda x, p: x * p["s"][None],
  "conv": _conv,
  "norm": lambda x, p: x / jnp.sqrt(1 + jnp.mean(x**2)) * p["s"][None] + p["b"][None],
  "tied": lambda x, p: jnp.tanh(x @ p["w"]) @ p["w"].T,
  "lora": lambda x, p: x @ (jnp.eye(_WIDTH, dtype=x.dtype) + p["a"] @ p["b"]),
  "scan": _scan,
  "embed": lambda x, p: x + p["t"][jnp.argmax(x[:, :3], axis=1)],
  "attend": lambda x, p: jax.nn.softmax((x @ p["q"]) @ (x @ p["k"]).T) @ x,
  "experts": _experts,
  "jit": lambda x, p: jax.checkpoint(jax.jit(lambda x, w: jnp.sin(x @ w)))(x, p["w"]),
}


def _network(kinds, shared):
  def loss(params, x):
    for i, kind in enumerate(kinds):
      x = jnp.tanh(_APPLY[kind](x, params[f"{kind}_{0 if shared else i}"]))
    return jnp.sum(x * jnp.arange(1.0, 1 + x.size).reshape(x.shape))

  names = {f"{kind}_{0 if shared else i}": (kind, i) for i, kind in enumerate(kinds)}
  return loss, {name: _layer_params(*spec) for name, spec in names.items()}


@pytest.mark.long
@settings(max_examples=8)
@given(
  kinds=st.lists(st.sampled_from(_LAYERS), min_size=1, max_size=4),
  shared=st.booleans(),
  clip_norm=st.sampled_from([0.1, 5.0, 1e3]),
)
def test_random_networks_are_exact(kinds, shared, clip_norm):
  with jax.enable_x64(True):
    loss, params = _network(kinds, shared)
    params, batch = jax.tree.map(
      lambda leaf: leaf.astype(jnp.float64), (params, _normal(3, 5, _WIDTH))
    )
    slow, fast = (
      _sum(loss, params, batch, method, clip_norm) for method in ("vmap", "ghost")
    )
    np.testing.assert_allclose(slow.norms, fast.norms, rtol=1e-10)
    _close(slow.total, fast.total, 1e-10)
