"""Losses that compute in types of less than 32 bits: no example exceeds its bound, and all
routes keep the same examples.

The 200 losses of the acceptance run are `-m long` (or DPJAX_ADVERSARY_LOSSES=n).
"""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from dpjax import gradients
from tests.adversary import dtypes
from tests.adversary.routes import LOSSES, ROUTES, SLACK, flat, norm
from tests.refuses import refuses

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _terms(grad_fn, params, batch, mask):
  """What each example adds alone, [BATCH, P]; all sums are float32."""
  run, size = jax.jit(grad_fn), len(mask)
  alone = []
  for i in range(size):
    total = run(params, batch, mask & (np.arange(size) == i)).total
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(total))
    alone.append(flat(total))
  return np.array(alone)


def check(recipe, routes=tuple(ROUTES)):
  """Every guarantee for one loss; how many terms were not zero."""
  data, found = dtypes.data_of(recipe), {}
  for route in routes:
    grad_fn = gradients.clipped_grad(
      dtypes.loss_of(recipe), l2_clip_norm=recipe.clip_norm, **ROUTES[route]
    )
    found[route] = _terms(grad_fn, *data)
    for i, term in enumerate(found[route]):
      assert np.isfinite(term).all(), (route, i)
      assert norm(term) <= recipe.clip_norm * (1 + SLACK), (route, i, norm(term))
    np.testing.assert_array_equal(found[route][-1], 0)  # padding
  kept = {route: [norm(term) > 0 for term in terms] for route, terms in found.items()}
  assert len(set(map(tuple, kept.values()))) == 1, kept
  return sum(kept[routes[0]])


_SETTINGS = dict(
  derandomize=True,
  database=None,
  suppress_health_check=list(HealthCheck),
  phases=[Phase.explicit, Phase.generate],  # shrinking would compile for an hour
)


def _run(count, routes):
  kept = 0

  @settings(max_examples=count, **_SETTINGS)
  @given(dtypes.recipes())
  def each(recipe):
    nonlocal kept
    kept += check(recipe, routes)

  each()
  assert kept >= count // 4  # not everything overflows


_LINKED = (  # layers that hand on what others have rounded
  ("joined", "a", "bfloat16", "float32", "float32"),
  ("scan", "b", "float32", "bfloat16", "float16"),
)


def test_a_loss_of_mixed_precision_keeps_every_guarantee():
  sizes = (0.0, 19.5, -25.0, 0.0)
  recipe = dtypes.Recipe(_LINKED, ("float16", "float8_e5m2"), sizes, 0.0, 1.0, 0)
  assert check(recipe, ("auto", "vmap")) >= 1


@pytest.mark.long
def test_a_few_losses_of_low_precision_keep_every_guarantee():
  _run(4, tuple(ROUTES))


@pytest.mark.long
def test_losses_of_low_precision_keep_every_guarantee_on_every_route():
  _run(LOSSES, tuple(ROUTES))


def _layer(layer, dtype, before="float32", inside="float32", after="float32"):
  layers = ((layer, "a", before, inside, after),)
  return dtypes.Recipe(layers, (dtype, dtype), (0.0,) * dtypes.BATCH, 0.0, 0.5, 0)


def _influence(recipe, count, **options):
  """By how many clip norms one of `count` examples, which are alike, moves the sum."""
  params, batch, _ = dtypes.data_of(recipe)
  alike = np.repeat(batch[:1], count, axis=0)
  run = jax.jit(
    gradients.clipped_grad(
      dtypes.loss_of(recipe), l2_clip_norm=recipe.clip_norm, method="ghost", **options
    )
  )
  most = np.ones(count, bool)
  least = np.arange(count) > 0
  moved = flat(run(params, alike, most).total) - flat(run(params, alike, least).total)
  return norm(moved) / recipe.clip_norm


def _check_influence(recipe, count, **options):
  """The last of many moves the sum as far as it does alone: not less either, for a rounded
  sum stands still until it jumps."""
  alone = _influence(recipe, 1)
  assert alone <= 1 + SLACK
  # Float32 rounds each of the two sums, of numbers up to `count`.
  rounding = 4 * count * np.finfo(np.float32).eps
  moved = _influence(recipe, count, **options)
  assert abs(moved - alone) <= SLACK + rounding, (recipe, count, alone, moved)


# A parameter that is widened where it meets the data, and a wide one that is cast there and back.
_WIDENED = [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")]


@pytest.mark.cases(long=["bfloat16-float32"])
@pytest.mark.parametrize(("dtype", "before"), [_WIDENED[0], ("float32", "float8_e5m2")])
def test_p20_no_sum_of_clipped_gradients_is_rounded(dtype, before):
  _check_influence(_layer("dense", dtype, before), 1024)


def _check_layer(layer, count, names):
  for dtype in names:
    for before, inside in (("float32", "float32"), (dtype, "float32"), (dtype, dtype)):
      _check_influence(_layer(layer, dtype, before, inside), count)


@pytest.mark.cases(slow=["scale"], long=...)
@pytest.mark.parametrize("layer", sorted(dtypes.LAYERS))
@pytest.mark.slow
def test_no_sum_of_clipped_gradients_of_any_layer_is_rounded(layer):
  _check_layer(layer, 1024, ("bfloat16", "float8_e4m3fn"))


@pytest.mark.parametrize("layer", sorted(dtypes.LAYERS))
@pytest.mark.parametrize("count", [256, 1024, 4096])
@pytest.mark.long
def test_no_sum_of_any_layer_and_type_is_rounded(layer, count):
  _check_layer(layer, count, dtypes.DTYPES[1:])


@pytest.mark.slow
def test_no_sum_is_rounded_in_microbatches():
  for dtype, before in _WIDENED:
    _check_influence(_layer("dense", dtype, before), 1024, microbatch_size=300)


_OVER_DEVICES = """
import dataclasses

from dpjax import gradients
from tests.adversary import test_dtypes as own

for dtype, before in own._WIDENED:
  recipe = own._layer("dense", dtype, before)
  own._check_influence(recipe, 1024, mesh=gradients.device_mesh.mesh_of("data:4"))
recipe = own._layer("dense", "float32")
for size in (0.0, 20.0):
  far = dataclasses.replace(recipe, example_sizes=(size,) * own.dtypes.BATCH)
  one = own._influence(far, 8, mesh=gradients.device_mesh.mesh_of("data:4"))
  assert abs(one - 1) < 1e-5, (size, one)
"""


@pytest.mark.long
def test_no_sum_is_rounded_over_devices():
  flags = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(_ROOT),
  }
  command = [sys.executable, "-c", _OVER_DEVICES]
  done = subprocess.run(
    command, env={**os.environ, **flags}, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr


@pytest.mark.cases(quick=["200.0-vmap"], long=...)
@pytest.mark.parametrize("method", ["ghost", "vmap"])
@pytest.mark.parametrize("clip_norm", [1e-12, 200.0])
def test_p2_a_finite_gradient_is_clipped_whatever_its_size(method, clip_norm):
  # Its square, or its products in float16, are no numbers of their type.
  for size, dtype in ((1e19, "float32"), (1e25, "float32"), (600.0, "float16")):
    loss = lambda w, x: jnp.sum(jnp.square((x @ w).astype(jnp.float32)))
    loss = (lambda w, x: jnp.sum(x @ w)) if dtype == "float32" else loss
    w = jnp.full((3, 2), 0.5).astype(dtype)
    x = jnp.asarray([[size, -size, size / 2], [0.5, 0.25, 0.0]]).astype(dtype)
    run = jax.jit(gradients.clipped_grad(loss, l2_clip_norm=clip_norm, method=method))
    term = run(w, x, np.array([True, False])).total
    np.testing.assert_allclose(norm(flat(term)), clip_norm, rtol=1e-5)


_BARE = {
  "promotion": lambda w, x: jnp.sum(x @ w.astype(jnp.float8_e4m3fn)),
  "ragged": lambda w, x: jnp.sum(
    jax.lax.ragged_dot(x[None], w[None], jnp.array([1], jnp.int32))
  ),
}


@pytest.mark.parametrize("name", sorted(_BARE))
@pytest.mark.parametrize("method", ["auto", "ghost", "vmap"])
def test_what_jax_cannot_do_for_a_batch_ends_in_one_line(name, method):
  grad_fn = gradients.clipped_grad(_BARE[name], l2_clip_norm=1.0, method=method)
  with refuses("loss_fn"):
    grad_fn(jnp.ones((3, 2)), jnp.ones((4, 3)), True)


def test_a_type_without_a_zero_or_a_sign_drops_every_example():
  loss = lambda w, x: jnp.sum((x.astype(w.dtype) @ w).astype(jnp.float32))
  params = jnp.ones((3, 2), jnp.float8_e8m0fnu)
  run = jax.jit(gradients.clipped_grad(loss, l2_clip_norm=1.0, method="ghost"))
  total = run(params, -jnp.ones((4, 3)), True).total
  np.testing.assert_array_equal(total, 0)
