"""The guarantee of every route: one example moves the sum by at most its bound, or not at all.

Each test holds a class of inputs by which an earlier version broke it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
from dpjax import gradients, transforms
from dpjax.gradients.clipping import clip_and_sum
from dpjax.types import Batch
from dpjax.validate import UserError
from tests.refuses import refuses

METHODS = ("auto", "ghost", "vmap")


def _normal(*shape, seed=0):
  return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def _norm(tree):
  leaves = [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)]
  flat = np.concatenate(leaves)
  largest = np.abs(flat).max(initial=0)
  return largest * np.linalg.norm(flat / largest) if 0 < largest < np.inf else largest


def _sum(loss, params, batch, mask=True, *, clip_norm=1.0, method="ghost", **options):
  grad_fn = gradients.clipped_grad(loss, l2_clip_norm=clip_norm, method=method, **options)
  return jax.jit(grad_fn)(params, batch, mask)


# --- masks ------------------------------------------------------------------------------------


_LINEAR = lambda w, x: jnp.sum(w * x)


@pytest.mark.cases(slow=["None-vmap"], long=...)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("microbatch_size", [None, 5])
def test_p7_a_batch_without_a_mask_is_refused_on_every_route(method, microbatch_size):
  x = jnp.ones((64, 3)) * (jnp.arange(64)[:, None] < 1)
  loss = lambda w, x: jnp.sum(w) + jnp.sum(w * x)  # padding has a gradient as well
  grad_fn = gradients.clipped_grad(
    loss, l2_clip_norm=1.0, method=method, microbatch_size=microbatch_size
  )
  for call in (lambda: grad_fn(jnp.ones(3), x), lambda: grad_fn(jnp.ones(3), x, mask=None)):
    with refuses("mask") as caught:
      call()
    assert "\n" not in str(caught.value)
  real = jnp.arange(64) < 1
  padded = grad_fn(jnp.ones(3), Batch(x, real))
  assert _norm(padded.total) <= 1 + 1e-5
  np.testing.assert_array_equal(padded.total, grad_fn(jnp.ones(3), x, real).total)
  np.testing.assert_array_equal(padded.mask, real)
  everything = grad_fn(jnp.ones(3), x, mask=True)
  np.testing.assert_array_equal(
    everything.total, grad_fn(jnp.ones(3), x, real | ~real).total
  )


@pytest.mark.cases(slow=[4], long=...)
@pytest.mark.parametrize(
  ("mask", "field"),
  [
    (None, "mask"),
    (np.ones(3, bool), "mask.shape"),
    (np.ones((4, 1), bool), "mask.shape"),
    (np.ones(4), "mask.dtype"),
    (np.ones(4, int), "mask.dtype"),
  ],
)
def test_a_mask_that_is_none_of_the_kinds_is_named(mask, field):
  x = jnp.ones((4, 2))
  stacked = {"w": jnp.ones((4, 2))}
  calls = [
    lambda: gradients.clipped_grad(_LINEAR, l2_clip_norm=1.0)(jnp.ones(2), x, mask),
    lambda: clip_and_sum(stacked, jnp.zeros(4), mask, 1.0),
    *(functools.partial(_update, tx, stacked, mask) for tx in _private_transforms()),
  ]
  for call in calls:
    with refuses(field):
      call()


def test_a_batch_and_a_mask_beside_it_are_one_too_many():
  batch = Batch(jnp.ones((4, 2)), jnp.ones(4, bool))
  grad_fn = gradients.clipped_grad(_LINEAR, l2_clip_norm=1.0)
  with refuses("mask"):
    grad_fn(jnp.ones(2), batch, True)
  for missing in (
    Batch(jnp.ones((4, 2)), None),
    Batch(jnp.ones((4, 3, 2)), jnp.ones((4, 3), bool)),  # of users, each with 3 examples
  ):
    with refuses("mask"):
      grad_fn(jnp.ones(2), missing)


def _private_transforms():
  key, public = jax.random.key(0), dict(noise_multiplier=0.0, normalize_by=1)
  inner = transforms.clip_and_noise(l2_clip_norm=1.0, key=key, **public)
  yield inner
  yield transforms.adaptive_clip_and_noise(l2_clip_norm=1.0, key=key, **public)
  yield transforms.accumulate(inner, every=2, l2_clip_norm=1.0)
  yield transforms.with_clip_schedule(inner, [1.0])
  yield transforms.clip_and_correlated_noise(
    l2_clip_norm=1.0,
    key=key,
    noise_shape=dpjax.NoiseShape(
      correlation=dpjax.noise.correlated.BandedToeplitz((1.0, 0.5))
    ),
    num_steps=3,
    **public,
  )


def _update(tx, updates, mask, params=None):
  params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:]), updates)
  return tx.update(gradients.wrap_grads(updates), tx.init(params), params, mask=mask)


@pytest.mark.slow
def test_the_count_of_adaptive_clipping_leaves_out_what_the_sum_leaves_out():
  adaptive = transforms.AdaptiveClipping(count_noise_std=1.0, learning_rate=1.0)
  tx = transforms.adaptive_clip_and_noise(
    l2_clip_norm=gradients.Clip(1.0, adaptive), noise_multiplier=0.0, normalize_by=4,
    key=jax.random.key(0),
  )  # fmt: skip
  real = jnp.array([True, False, False, False])
  summed = _sum(_LINEAR, jnp.ones(2), jnp.ones((4, 2)) * 5, real)
  scales = [
    float(tx.update(summed, tx.init(None), mask=mask)[1].inner.scale)
    for mask in (None, real, True)
  ]
  assert len(set(scales)) == 1  # the padding is not counted, whatever is said beside it


# --- complex numbers --------------------------------------------------------------------------


def _spectrum_loss(p, x):
  return jnp.sum(jnp.abs(jnp.fft.fft(x) * p["w"]) ** 2) + jnp.sum(p["b"] * x)


def _complex_dot_loss(p, x):
  return jnp.sum(jnp.abs(jnp.fft.fft(x)[None] @ p["m"].astype(jnp.complex64)))


def _complex_bias_loss(p, x):
  return jnp.sum((jnp.fft.fft(x) + lax.complex(p["w"], p["b"])).imag * 3)


def _complex_scan_loss(p, x):
  turn = p["w"].astype(jnp.complex64)

  def step(z, row):
    z = z * turn + row * 1j
    return z, (z @ p["m"].astype(jnp.complex64)).imag

  return jnp.sum(lax.scan(step, jnp.zeros(6, jnp.complex64), jnp.stack([x, x * x]))[1])


def _complex_inside_loss(p, x):
  return jnp.sum(jnp.abs(jnp.fft.fft(x * p["w"])))


@pytest.mark.cases(slow=["_complex_bias_loss-1000.0"], long=...)
@pytest.mark.parametrize("size", [0.1, 1e3])
@pytest.mark.parametrize(
  "loss",
  [
    _spectrum_loss,
    _complex_dot_loss,
    _complex_bias_loss,
    _complex_scan_loss,
    _complex_inside_loss,
  ],
)
def test_p4_complex_numbers_inside_a_real_loss_are_measured_by_their_size(loss, size):
  params = {"w": _normal(6), "b": _normal(6, seed=1), "m": _normal(6, 6)}
  batch = _normal(4, 6, seed=2) * np.float32(size)
  slow, fast = (_sum(loss, params, batch, method=m) for m in ("vmap", "ghost"))
  np.testing.assert_allclose(fast.norms, slow.norms, rtol=1e-4)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5),
    fast.total,
    slow.total,
  )
  for i in range(4):
    assert _norm(_sum(loss, params, batch[i : i + 1]).total) <= 1 + 1e-5


@pytest.mark.cases(long=["auto-complex64"])
@pytest.mark.parametrize("bad", [jnp.complex64, jnp.int32, bool])
@pytest.mark.parametrize("method", METHODS)
def test_parameters_that_are_not_real_floats_are_refused_on_every_route(bad, method):
  params = {"w": jnp.ones(2), "n": jnp.ones(2, bad)}
  loss = lambda p, x: jnp.sum(p["w"] * x) + jnp.sum(jnp.abs(p["n"])) * 0
  batch = jnp.ones((3, 2))
  stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), params)
  of_params = [
    lambda: gradients.clipped_grad(loss, l2_clip_norm=1.0, method=method)(
      params, batch, True
    ),
    lambda: gradients.per_example_grads(loss)(params, batch),
    lambda: gradients.explain(loss, params, batch[0]),
  ]
  of_grads = [
    lambda: clip_and_sum(stacked, jnp.zeros(3), True, 1.0),
    *(functools.partial(_update, tx, stacked, True) for tx in _private_transforms()),
  ]
  for field, calls in (("params['n']", of_params), ("grads['n']", of_grads)):
    for call in calls:
      with refuses(field) as caught:
        call()
      assert "\n" not in str(caught.value)


@pytest.mark.parametrize("result", [lambda x: x * 1j, lambda x: (x > 0).astype(jnp.int32)])
def test_a_loss_that_is_not_a_real_number_is_refused(result):
  loss = lambda w, x: jnp.sum(result(w * x))
  for method in METHODS:
    with pytest.raises(UserError, match="real floating-point"):
      gradients.clipped_grad(loss, l2_clip_norm=1.0, method=method)(
        jnp.ones(2), jnp.ones((3, 2)), True
      )


# --- the range of floats ----------------------------------------------------------------------


def _outer(p, x):
  return jnp.sum((x["a"][0] @ p) * x["g"][0, : p.shape[1]])


def _rows(p, x):
  return jnp.sum((x["a"] @ p) * x["g"][:, : p.shape[1]])


def _general(p, x):
  weights = p - jnp.mean(p, axis=0, keepdims=True)
  return jnp.sum((x["a"] @ weights) * x["g"][:, : p.shape[1]])


def _bias(p, x):
  return jnp.sum((x["a"][:, :1] + p[:1]) * x["g"][:, : p.shape[1]])


def _steps(p, x):
  step = lambda h, row: (h * 0.5 + row @ p, None)
  first = jnp.zeros(p.shape[1], p.dtype)
  return jnp.sum(lax.scan(step, first, x["a"])[0] * x["g"][0, : p.shape[1]])


_SHAPES = {"small": (4, 3), "wide": (5, 1200)}
_SIZES = (1e-38, 1e-30, 1e-20, 1e-12, 1.0, 1e12, 1e18, 1e30, 1e37)


@functools.cache
def _ranged(loss, shape, clip_norm, method):
  grad_fn = gradients.clipped_grad(loss, l2_clip_norm=clip_norm, method=method)
  params = jnp.asarray(_normal(*_SHAPES[shape]))
  return jax.jit(lambda batch, mask: grad_fn(params, batch, mask))


@pytest.mark.cases(slow=["_bias-small-0.0001"], long=...)
@pytest.mark.parametrize("clip_norm", [1e-25, 1e-4])
@pytest.mark.parametrize("shape", ["small", "wide"])
@pytest.mark.parametrize("loss", [_outer, _rows, _general, _bias, _steps])
def test_p2_no_size_of_operand_or_cotangent_breaks_the_bound(loss, shape, clip_norm):
  sizes = np.array([(a, g) for a in _SIZES for g in _SIZES], np.float32)
  rows, (left, right) = 2, _SHAPES[shape]
  with np.errstate(over="ignore"):
    batch = {
      "a": _normal(len(sizes), rows, left) * sizes[:, :1, None],
      "g": _normal(len(sizes), rows, right) * sizes[:, 1:, None],
    }
  for method in ("ghost", "vmap"):
    run = _ranged(loss, shape, clip_norm, method)
    for i in range(len(sizes)):
      one = jax.tree.map(lambda leaf: leaf[i : i + 1], batch)
      summed = run(one, np.ones(1, bool))
      length = _norm(summed.total)
      assert np.isfinite(length), (method, sizes[i])
      assert length <= clip_norm * (1 + 1e-5), (method, sizes[i], length / clip_norm)
      if (
        1e-12 <= np.prod(np.float64(sizes[i])) <= 1e12
        and 1e-12 <= sizes[i].min() <= sizes[i].max() <= 1e12
      ):
        exact = np.einsum("tk,tp->kp", *(np.float64(one[k][0]) for k in "ag"))
        if loss is _rows:  # within the normal range it is exact as well
          expected = exact * min(1, clip_norm / np.linalg.norm(exact))
          np.testing.assert_allclose(
            summed.total, expected, rtol=1e-3, atol=1e-5 * clip_norm
          )


@pytest.mark.cases(
  slow=["float32-1e-20-1e-10"],
  long=[
    "float32-1e-30-1e-25",
    "float32-1e-30-1e-10",
    "float32-1e-30-1.0",
    "float32-1e-30-1e+30",
    "float32-1e-20-1e-25",
    "bfloat16-1e-30-1e-25",
  ],
)
@pytest.mark.parametrize("clip_norm", [1e-25, 1e-10, 1.0, 1e30])
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e-3, 1.0, 1e20, 1e30])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_p2_stacked_gradients_of_any_size_have_their_true_norm(clip_norm, size, dtype):
  grads = {"a": jnp.asarray(_normal(3, 4) * size, dtype), "b": jnp.asarray(
    _normal(3, 2, seed=1) * size, dtype)}  # fmt: skip
  exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), grads)
  flat, gamma = gradients.Clip(clip_norm), max(0.01, clip_norm)
  automatic = gradients.Clip(clip_norm, gradients.Automatic(gamma))
  for clip, unit in ((flat, False), (flat, True), (automatic, False)):
    options = {"rescale_to_unit_norm": unit}
    summed = clip_and_sum(grads, jnp.zeros(3), True, clip, **options)
    for i in range(3):
      alone = clip_and_sum(grads, jnp.zeros(3), np.arange(3) == i, clip, **options)
      length = _norm(jax.tree.map(lambda leaf: leaf[i], exact))
      wanted = (
        min(length, clip_norm) if clip is flat else length / (length + gamma) * clip_norm
      )
      wanted /= clip_norm if unit else 1
      got = _norm(alone.total)
      assert got <= alone.l2_bound * (1 + 1e-5)
      if wanted > 1e-34:
        np.testing.assert_allclose(got, wanted, rtol=1e-4)
    assert np.isfinite(_norm(summed.total))


@pytest.mark.slow
def test_norms_of_any_size_are_true_also_in_float64(x64):
  for dtype, sizes in ((np.float32, (1e-30, 1e37)), (np.float64, (1e-300, 1e300))):
    for size in sizes:
      leaf = jnp.asarray(np.full((1, 16), size), dtype)
      np.testing.assert_allclose(
        dpjax.trees.per_example_norms(leaf)[0], 4 * size, rtol=1e-6
      )


@pytest.mark.parametrize("bad", [1e-26, 1e31, 1e-300])
def test_a_clip_norm_beyond_float32_is_refused(bad):
  with refuses("l2_clip_norm"):
    gradients.clipped_grad(_LINEAR, l2_clip_norm=bad)


@jax.custom_vjp
def _clipping_product(w, x):
  return x @ w


_clipping_product.defvjp(
  lambda w, x: (x @ w, (w, x)),
  lambda saved, g: (jnp.clip(jnp.outer(saved[1], g), -1e-3, 1e-3), g @ saved[0].T),
)


def _centred(w):
  return w - jnp.mean(w, axis=0, keepdims=True)


_CANCELLING = {
  "offset": lambda w, x, y: jnp.sum(y @ jnp.sin(w)) - jnp.sum((y + 0.1) @ jnp.sin(w)),
  "two sums": lambda w, x, y: jnp.sum(y[:, None] * w) - jnp.sum((x + y)[:, None] * w),
  "product": lambda w, x, y: jnp.sum((y[:, None] * w) * x[:, None] - (x * y)[:, None] * w),
  "centred": lambda w, x, y: jnp.sum((y @ _centred(w)) * jnp.arange(1.0, 1 + w.shape[1])),
  "custom": lambda w, x, y: jnp.sum(_clipping_product(w, y)),
}


@pytest.mark.cases(quick=[8], long=...)
@pytest.mark.parametrize("method", ["ghost", "vmap"])
@pytest.mark.parametrize("columns", [3, 90], ids=["held", "formed again"])
@pytest.mark.parametrize("loss", _CANCELLING)
def test_p4_the_bound_holds_where_terms_of_a_parameter_cancel(loss, columns, method):
  """Norm and sum may be two evaluations of a gradient."""
  params, x = _normal(64, columns), _normal(3, 64, seed=1)
  y = np.float32(1e6) + _normal(3, 64)
  for clip_norm in (1e-3, 0.05):
    grad_fn = gradients.clipped_grad(
      lambda w, e: _CANCELLING[loss](w, *e), l2_clip_norm=clip_norm, method=method
    )
    run = jax.jit(lambda mask: grad_fn(params, (x, y), mask).total)
    for i in range(3):
      assert _norm(run(np.arange(3) == i)) <= clip_norm * (1 + 1e-5)


# --- examples that are dropped ----------------------------------------------------------------


def _quotient(p, x):  # one site: the transpose would divide 0 by 0
  return jnp.sum(jnp.sin(p / x[:, None]))


def _power(p, x):
  return jnp.sum(jnp.sin(p ** x[:, None]))


def _quotients(p, x):
  h = jnp.sum(p / x[:, None], axis=0)
  return jnp.sum(jnp.sin(h)) + jnp.sum(jnp.sqrt(x)[:, None] * p)


def _powers(p, x):
  return jnp.sum(jnp.sin(jnp.abs(p) ** x[:, None])) + jnp.sum(jnp.log(x[:, None] + p * p))


def _normalized(p, x):
  def step(h, row):
    h = h + row[0] * jnp.sum(p, axis=1) / jnp.sqrt(jnp.sum(row**2))
    return h / jnp.linalg.norm(h), None

  return jnp.sum(lax.scan(step, x * 0 + 1, jnp.stack([x, x]))[0])


@jax.custom_vjp
def _own_division(p, x):
  return p / x[:, None]


_own_division.defvjp(
  lambda p, x: (p / x[:, None], (p, x)),
  lambda saved, g: (g / saved[1][:, None], jnp.sum(-g * saved[0], axis=1) / saved[1] ** 2),
)


def _custom(p, x):
  return jnp.sum(jnp.sin(_own_division(p, x)))


@pytest.mark.cases(slow=[1], long=...)
@pytest.mark.parametrize(
  "loss", [_quotient, _power, _quotients, _powers, _normalized, _custom]
)
@pytest.mark.parametrize("large", [False, True], ids=["held", "formed again"])
@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf])
def test_p1_a_dropped_example_adds_exactly_nothing_to_any_rule(loss, large, poison):
  params = np.abs(_normal(5, 1100 if large else 3)) + 1
  clean = np.abs(_normal(3, 5, seed=1)) + 1
  bad = np.concatenate([clean, np.full((2, 5), poison, np.float32)])
  expected = _sum(loss, params, clean).total
  masked = _sum(loss, params, bad, np.arange(5) < 3)
  np.testing.assert_allclose(masked.total, expected, rtol=2e-5, atol=1e-7)
  unmasked = _sum(loss, params, bad)
  assert np.isfinite(unmasked.total).all()
  if not np.isfinite(unmasked.norms[3]):
    np.testing.assert_allclose(unmasked.total, expected, rtol=2e-5, atol=1e-7)


# --- nothing at all ---------------------------------------------------------------------------


@pytest.mark.cases(
  slow=["options1-ghost"],
  long=["options0-auto", "options0-ghost", "options0-vmap", "options1-auto"],
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"microbatch_size": 4}, {"memory_budget": 1e9}])
def test_an_empty_batch_sums_to_zero(method, options):
  loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]) ** 2)
  params = {"w": jnp.ones((3, 2))}
  grad_fn = gradients.clipped_grad(loss, l2_clip_norm=1.0, method=method, **options)
  for mask in (True, np.zeros(0, bool)):
    summed = grad_fn(params, jnp.ones((0, 3)), mask)
    np.testing.assert_array_equal(summed.total["w"], np.zeros((3, 2)))
    assert summed.norms.shape == summed.losses.shape == (0,)
    assert summed.l2_bound == 1.0
  with refuses("mask"):
    grad_fn(params, jnp.ones((0, 3)))


@pytest.mark.slow
def test_an_empty_batch_passes_through_every_transform():
  losses, grads = gradients.per_example_grads(_LINEAR)(jnp.ones(2), jnp.ones((0, 2)))
  assert losses.shape == (0,) and grads.arrays.shape == (0, 2)
  for tx in _private_transforms():
    np.testing.assert_array_equal(
      _update(tx, {"w": grads.arrays}, True)[0]["w"], np.zeros(2)
    )


@pytest.mark.parametrize("empty", [{}, (), None])
def test_parameters_without_an_array_are_one_line(empty):
  loss = lambda p, x: jnp.sum(x)
  of_params = [
    lambda: gradients.clipped_grad(loss, l2_clip_norm=1.0)(empty, jnp.ones((2, 3)), True),
    lambda: gradients.per_example_grads(loss)(empty, jnp.ones((2, 3))),
    lambda: clip_and_sum(empty, jnp.zeros(2), True, 1.0),
  ]
  of_updates = [
    *(functools.partial(_update, tx, empty, True) for tx in _private_transforms()),
  ]
  for field, calls in (("params", of_params), ("grads", of_updates)):
    for call in calls:
      with refuses(field):
        call()


@pytest.mark.cases(quick=["vmap"], long=...)
@pytest.mark.parametrize("method", METHODS)
def test_leaves_without_numbers_keep_their_shape(method):
  params = {"none": jnp.ones((3, 0)), "w": jnp.ones(3), "neither": jnp.ones((0, 4))}

  def loss(p, x):
    return jnp.sum(p["w"] * x) + jnp.sum(x @ p["none"]) + jnp.sum(p["neither"])

  for batch, wanted in ((jnp.ones((2, 3)), 2 / np.sqrt(3)), (jnp.ones((0, 3)), 0.0)):
    total = _sum(loss, params, batch, method=method).total
    assert jax.tree.map(jnp.shape, total) == jax.tree.map(jnp.shape, params)
    np.testing.assert_allclose(total["w"], wanted, rtol=1e-5)


@pytest.mark.cases(quick=["ghost"], long=...)
@pytest.mark.parametrize("method", METHODS)
def test_examples_without_numbers_contribute_zero(method):
  loss = lambda w, x: jnp.sum(x @ w) + jnp.sum(w) * 0
  total = _sum(loss, jnp.ones((0, 2)), jnp.ones((3, 0)), method=method).total
  assert total.shape == (0, 2)
  rows = _sum(
    lambda w, x: jnp.sum(x @ w), jnp.ones((2, 2)), jnp.ones((3, 0, 2)), method=method
  )
  np.testing.assert_array_equal(rows.total, 0)
  np.testing.assert_array_equal(rows.norms, 0)


def test_bounds_that_are_no_prefix_of_the_parameters_are_one_line():
  grad_fn = gradients.clipped_grad(
    lambda p, x: jnp.sum(p["w"] * x), l2_clip_norm={"v": 1.0}
  )
  with refuses("l2_clip_norm"):
    grad_fn({"w": jnp.ones(2)}, jnp.ones((2, 2)), True)
