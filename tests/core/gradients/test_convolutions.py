"""Convolutions of gradients in the form that XLA's CPU backend computes fast, in loops too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpjax import gradients, models
from dpjax.gradients import canonical_convolutions
from tests import hlo


def _normal(seed, shape):
  return jax.random.normal(jax.random.key(seed), shape)


def _conv(specs, **options):
  return lambda x, k: lax.conv_general_dilated(x, k, dimension_numbers=specs, **options)


_FLAX = ("NHWC", "HWIO", "NHWC")
_CASES = {
  "flax": (_conv(_FLAX, window_strides=(1, 1), padding="SAME"), (2, 6, 5, 3), (3, 3, 3, 4)),
  "strides that leave a row over": (
    _conv(_FLAX, window_strides=(2, 2), padding="VALID"), (2, 9, 6, 3), (4, 3, 3, 2)
  ),
  "dilated": (
    _conv(_FLAX, window_strides=(1, 2), padding="SAME", rhs_dilation=(2, 1)),
    (2, 7, 7, 2), (3, 3, 2, 4),
  ),
  "transposed": (
    _conv(_FLAX, window_strides=(1, 1), padding=((2, 2), (1, 1)), lhs_dilation=(2, 3)),
    (2, 4, 4, 2), (3, 3, 2, 3),
  ),
  "groups": (
    _conv(_FLAX, window_strides=(1, 1), padding="SAME", feature_group_count=2),
    (2, 5, 5, 4), (3, 3, 2, 6),
  ),
  "torch": (
    _conv(("NCHW", "OIHW", "NCHW"), window_strides=(1, 1), padding="SAME"),
    (2, 3, 5, 6), (4, 3, 3, 3),
  ),
  "no two alike": (
    _conv(("WNHC", "IHOW", "CWHN"), window_strides=(1, 1), padding="SAME"),
    (5, 2, 6, 3), (3, 3, 4, 3),
  ),
  "line": (
    _conv(("NWC", "WIO", "NWC"), window_strides=(2,), padding="SAME"), (2, 9, 3), (3, 3, 4)
  ),
  "volume": (
    _conv(("NDHWC", "DHWIO", "NDHWC"), window_strides=(1, 1, 2), padding="SAME"),
    (1, 4, 3, 4, 2), (3, 2, 2, 2, 3),
  ),
  "a window over all": (
    _conv(_FLAX, window_strides=(1, 1), padding="VALID"),
    (2, 4, 4, 3),
    (4, 4, 3, 2),
  ),
  "a window over more than all": (
    _conv(_FLAX, window_strides=(1, 2), padding="SAME"),
    (2, 2, 3, 3),
    (3, 5, 3, 2),
  ),
  "no window": (_conv(("NC", "IO", "NC"), window_strides=(), padding=()), (4, 3), (3, 2)),
}  # fmt: skip


def _case(name):
  conv, x, k = _CASES[name]
  x, k = _normal(0, x), _normal(1, k)
  loss = lambda x, k: jnp.sum(jnp.sin(conv(x, k)))
  return loss, x, k


def _not_fast(fn, *args):
  return hlo.slow_convolutions(jax.jit(fn).lower(*args).compile())


def _twice(fn):
  """The sum of fn's values at x and at 2 x, in a compiled loop."""

  def body(total, scale, x, *rest):
    more = fn(scale * x, *rest)
    return jax.tree.map(jnp.add, total, more), None

  def looped(*args):
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(fn, *args))
    return lax.scan(lambda t, s: body(t, s, *args), zero, jnp.array([1.0, 2.0]))[0]

  return looped


@pytest.mark.cases(slow=[7], long=...)
@pytest.mark.parametrize("name", sorted(_CASES))
def test_gradients_are_the_same_in_the_fast_form(name):
  loss, x, k = _case(name)
  grad = jax.grad(loss, argnums=(0, 1))
  fast = canonical_convolutions(grad)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
    fast(x, k),
    grad(x, k),
  )
  assert not _not_fast(_twice(fast), x, k)


@pytest.mark.cases(slow=[1], long=...)
@pytest.mark.parametrize("name", ["flax", "a window over more than all"])
def test_what_is_infinite_spreads_no_further(name):
  conv, x, k = _CASES[name]
  x, k = _normal(0, x).at[0, 0, 0, 0].set(jnp.inf), _normal(1, k)
  fn = lambda x, k: jax.vjp(conv, x, k)[0]
  np.testing.assert_allclose(canonical_convolutions(fn)(x, k), fn(x, k), rtol=1e-5)


@pytest.mark.slow
def test_without_it_a_loop_holds_slow_ones():
  """Or all of this is for nothing, and may go."""
  loss, x, k = _case("flax")
  assert _not_fast(_twice(jax.grad(loss, argnums=1)), x, k)


def _in_while(loss):
  def grad(x, k):
    step = lambda state: (state[0] + 1, state[1] - 0.01 * jax.grad(loss, 1)(x, state[1]))
    return lax.while_loop(lambda state: state[0] < 3, step, (0, k))[1]

  return grad


def _in_cond(loss):
  g = jax.grad(loss, argnums=1)
  return lambda x, k: lax.cond(x.sum() > 0, g, lambda x, k: -g(x, 2 * k), x, k)


def _in_scan(loss):
  g = jax.grad(loss, argnums=1)
  return lambda x, k: lax.scan(lambda k, s: (k - s * g(x, k), k[0]), k, jnp.arange(3.0))


_WRAPPED = {
  "scan": _in_scan,
  "while": _in_while,
  "cond": _in_cond,
  "jit": lambda loss: jax.jit(jax.grad(jax.jit(loss), argnums=1)),
  "remat": lambda loss: jax.grad(jax.checkpoint(loss), argnums=1),
  "remat outside": lambda loss: jax.checkpoint(jax.grad(loss, argnums=1)),
  "vmap inside": lambda loss: (
    lambda x, k: jax.vmap(jax.grad(loss, argnums=1), (0, None))(x[:, None], k)
  ),
}


@pytest.mark.cases(slow=[3], long=...)
@pytest.mark.parametrize("name", sorted(_WRAPPED))
def test_it_enters_what_jax_can_nest(name):
  loss, x, k = _case("flax")
  fn = _WRAPPED[name](loss)
  fast = canonical_convolutions(fn)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  jax.tree.map(close, fast(x, k), fn(x, k))
  jax.tree.map(close, jax.jit(fast)(x, k), fn(x, k))
  assert not _not_fast(fast, x, k)


@pytest.mark.slow
def test_it_can_be_mapped_and_differentiated():
  loss, x, k = _case("flax")
  grad = jax.grad(loss, argnums=1)
  fast, many = canonical_convolutions(grad), jnp.stack([k, 2 * k])
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
  mapped = lambda fn: jax.vmap(fn, (None, 0))(x, many)
  close(mapped(fast), mapped(grad))
  normed = lambda fn: jax.grad(lambda k: jnp.sum(jnp.square(fn(x, k))))(k)
  close(normed(fast), normed(grad))


@pytest.mark.long
def test_custom_derivatives_keys_and_half_precision_pass_through():
  @jax.custom_vjp
  def doubled(z):
    return z

  doubled.defvjp(lambda z: (z, None), lambda _, g: (2 * g,))

  def fn(key, k, flag):
    x = jax.random.normal(key, (2, 5, 5, 3), jnp.bfloat16)
    loss = lambda k: jnp.sum(doubled(_CASES["flax"][0](x, k)).astype(jnp.float32))
    return {"grad": jax.grad(loss)(k), "flag": flag, "key": key}

  k = _normal(1, (3, 3, 3, 4)).astype(jnp.bfloat16)
  found = canonical_convolutions(fn)(jax.random.key(0), k, True)
  wanted = fn(jax.random.key(0), k, True)
  assert found["grad"].dtype == jnp.bfloat16 and bool(found["flag"])
  np.testing.assert_array_equal(found["grad"], wanted["grad"])
  assert found["key"].dtype == jax.random.key(0).dtype


@pytest.mark.long
@pytest.mark.parametrize("name", ["vmap", "ghost"])
@pytest.mark.parametrize("rows", [4, 40])
def test_microbatches_hold_none_of_the_slow_form(name, rows):
  net = models.Cnn(num_classes=3, features=(2, 3), kernel_sizes=(3, 2), strides=(2, 1))
  x, y = _normal(0, (rows, 8, 8, 1)), jnp.zeros(rows, int)
  params = net.init(jax.random.key(1), x[:1])
  loss = lambda p, e: -jax.nn.log_softmax(net.apply(p, e[0][None])[0])[e[1]]
  of = functools.partial(gradients.clipped_grad, loss, l2_clip_norm=0.1, method=name)
  parts, args = of(microbatch_size=2), (params, (x, y), jnp.ones(rows, bool))
  assert not _not_fast(parts, *args)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
  jax.tree.map(close, jax.jit(parts)(*args).total, of()(*args).total)


@pytest.mark.slow
def test_what_the_function_closes_over_is_read_anew():
  """JAX remembers what it traced by the function; here it is another each time."""
  loss, x, k = _case("flax")
  held = {"k": k}
  fast = canonical_convolutions(lambda x: jax.grad(loss)(x, held["k"]))
  first = fast(x)
  held["k"] = 2 * k
  assert not np.allclose(fast(x), first)

  def outer(x, k):
    held["k"] = k
    return fast(x)

  jax.jit(outer)(x, k)  # its tracers are not met again
  np.testing.assert_allclose(jax.jit(lambda x, k: outer(x, k))(x, k), first, rtol=1e-5)


@pytest.mark.long
def test_what_is_no_array_is_handed_through():
  def fn(x, k, padding, *, train=True):
    y = lax.conv_general_dilated(x, k, (1, 1), padding)
    return {"y": y if train else x, "one": 1.0, "name": padding, "none": None, "np": _ONE}

  x, k = _normal(0, (2, 3, 5, 5)), _normal(1, (2, 3, 3, 3))
  fast = canonical_convolutions(fn)
  found, wanted = fast(x, k, "SAME"), fn(x, k, "SAME")
  assert type(found["one"]) is float and found["name"] == "SAME" and found["none"] is None
  np.testing.assert_allclose(found["y"], wanted["y"], rtol=1e-5)
  assert isinstance(found["np"], jax.Array)
  again = jax.jit(lambda x, k: fast(x, k, "SAME", train=True)["y"])(x, k)
  np.testing.assert_allclose(again, wanted["y"], rtol=1e-5)


_ONE = np.ones(3, np.float32)


@pytest.mark.long
def test_shared_functions_stay_shared():
  """Twelve of them, each calling the one before twice: not 4,096 convolutions."""
  _, x, _ = _case("torch")
  fn, k = jax.jit(lambda x, k: x + _CASES["torch"][0](x, k)), _normal(1, (3, 3, 3, 3))
  for _ in range(12):
    fn = jax.jit(lambda x, k, fn=fn: fn(fn(x, k), k))
  text = jax.jit(canonical_convolutions(fn)).lower(x, k).as_text()
  assert text.count("stablehlo.convolution") < 4


@pytest.mark.long
def test_symbolic_sizes_and_doubles_within():
  _, x, k = _case("torch")
  conv = canonical_convolutions(_CASES["torch"][0])
  height, width = jax.export.symbolic_shape("h,w")
  shape = jax.ShapeDtypeStruct((2, 3, height, width), x.dtype)
  exported = jax.export.export(jax.jit(conv))(shape, k)
  np.testing.assert_allclose(exported.call(x, k), conv(x, k), rtol=1e-5)

  def doubles(x, k):
    with jax.enable_x64(True):
      x, k = x.astype(jnp.float64) / 3, k.astype(jnp.float64) / 7
      return lax.conv_general_dilated(x, k, (1, 1), [(4, 4)] * 2)

  x = x[..., :2, :2]
  np.testing.assert_allclose(canonical_convolutions(doubles)(x, k), doubles(x, k), 1e-12)


@pytest.mark.long
def test_a_dilated_image_takes_no_more_than_its_result():
  loss = lambda x, k: jnp.sum(jnp.square(lax.conv_transpose(x, k, (8, 8), "SAME")))
  grad = jax.grad(loss, argnums=1)
  x, k = _normal(0, (8, 8, 8, 4)), 0.01 * _normal(1, (9, 9, 4, 4))

  def temporaries(fn):
    compiled = jax.jit(_twice(fn)).lower(x, k).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries(canonical_convolutions(grad)) < 4 * temporaries(grad)


def test_no_tracer_outlives_its_trace():
  """JAX's check of leaks found one in each federated run."""
  with jax.checking_leaks():
    out = jax.jit(canonical_convolutions(lambda x: (x + 1, "name", 2 * x)[::2]))(2.0)
  assert [float(value) for value in out] == [3.0, 4.0]
