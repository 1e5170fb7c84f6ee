"""The program of an accelerator, run on a CPU: the same sums, and the traffic that it has.

What is compiled for a chip that is absent is measured by `benchmarks compiled`.
"""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import gradients
from dpjax.gradients.ghost import tapped, unit_rules
from dpjax.gradients.ghost.tapped import ParamFlow
from dpjax.gradients.ghost.units import Rule
from dpjax.parallel import programs, targets
from tests.core.gradients import ghost_oracle as oracle

pytestmark = pytest.mark.usefixtures("x64")
_quick = pytest.mark.usefixtures("quick_x64")
_GPU = "gpu:h100:1"
_TPU = "tpu:v5e:1x1"


@pytest.fixture(autouse=True)
def chip(request):
  """The accelerator that programs are made for; a GPU unless the test says otherwise."""
  name = getattr(request, "param", _GPU)
  with targets.compiling_for(targets.parse(name)):
    yield name


on_each_chip = pytest.mark.parametrize("chip", [_GPU, _TPU], indirect=True)


class _Net(nn.Module):
  """Held convolutions, one by its places, biases, a table, a dense layer."""

  @nn.compact
  def __call__(self, x, token):
    x = jnp.tanh(nn.Conv(2, (3, 3))(x))
    x = jnp.tanh(nn.Conv(32, (3, 3), strides=(2, 2))(x))
    x = jnp.tanh(nn.Conv(32, (3, 3))(x))
    x = nn.LayerNorm()(x.ravel()) * nn.Embed(5, 288)(jnp.asarray(token))
    return nn.Dense(3)(x)


def _net():
  model = _Net()
  image = jnp.zeros((6, 6, 2))
  params = oracle.as_float64(model.init(jax.random.key(0), image, 0))
  rng = np.random.default_rng(0)
  batch = {
    "x": jnp.asarray(rng.normal(size=(5, 6, 6, 2))),
    "t": jnp.asarray(rng.integers(0, 5, size=5)),
  }
  loss = lambda p, e: jnp.sum(jnp.sin(model.apply(p, e["x"], e["t"])))
  return loss, params, batch


@_quick
@pytest.mark.slow
@on_each_chip
def test_sums_are_those_of_the_other_route(chip):
  loss, params, batch = _net()
  planned = oracle.plan(loss, params, oracle.first_of(batch))
  assert planned.platform == chip[:3]
  rules = {u.rule for u in planned.units if u.sites[0].name == "conv_general_dilated"}
  assert rules == {Rule.PRODUCT if chip == _GPU else Rule.GRADIENT, Rule.GRAM}
  oracle.check(loss, params, batch, bound=1e-8)
  mask = jnp.array([True, False, True, True, False])
  oracle.check(loss, params, batch, mask=mask, bound=1e-8)
  bounds = jax.tree.map(lambda _: 0.2, params)
  oracle.check(loss, params, batch, clip_norm=bounds, bound=1e-8)


@_quick
@pytest.mark.slow
def test_an_example_that_is_not_finite_takes_nobody_with_it():
  loss, params, batch = _net()
  for value in (np.nan, np.inf, 1e200):
    damaged = batch | {"x": batch["x"].at[2, 1, 1, 0].set(value)}
    slow, fast = oracle.both(loss, params, damaged)
    for one, other in zip(jax.tree.leaves(slow.total), jax.tree.leaves(fast.total)):
      np.testing.assert_allclose(one, other, atol=1e-8)
    np.testing.assert_array_equal(np.isfinite(slow.norms), np.isfinite(fast.norms))


@_quick
@pytest.mark.cases(slow=["nan-tpu:v5e:1x1"])
@pytest.mark.parametrize("chip", [_TPU], indirect=True)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_on_a_tpu_an_example_that_is_not_finite_is_as_one_that_is_masked(chip, value):
  """In double precision the other route's grouped convolutions would mix examples on a CPU."""
  loss, params, batch = _net()
  fast = gradients.clipped_grad(loss, l2_clip_norm=0.5, method="ghost")
  damaged = batch | {"x": batch["x"].at[2, 1, 1, 0].set(value)}
  run = jax.jit(fast)
  found = run(params, damaged, jnp.ones(5, bool))
  wanted = run(params, batch, jnp.array([True, True, False, True, True]))
  assert oracle.relative_error(found.total, wanted.total) < 1e-12
  assert not np.isfinite(found.norms[2])


@pytest.mark.cases(slow=[1])
@on_each_chip
def test_terms_that_would_underflow_are_added_alone(chip):
  """c_i g_i is below the normal numbers beside an operand that is large."""
  loss = lambda w, x: jnp.sum(x[None] @ w) * 1e-34
  w = jnp.ones((4, 2), jnp.float32)
  x = jnp.array([[1e34, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]], jnp.float32)
  slow, fast = oracle.both(loss, w, x, clip_norm=2e-5)
  assert float(jnp.abs(slow.total).max()) > 1e-5
  # Sums in TF32 are charged for what a product may grow by.
  assert oracle.relative_error(slow.total, fast.total) < 2.0**-9 + 1e-5


@_quick
@pytest.mark.parametrize("chip", [_TPU], indirect=True)
def test_one_example_is_read_as_it_was_recorded(chip):
  """In loops, tables and integers, beside an example that holds NaN and infinity."""
  rng = np.random.default_rng(0)
  params = {
    "table": jnp.asarray(rng.normal(size=(7, 3))),
    "w": jnp.eye(3),
    "b": jnp.ones(3),
  }

  def loss(params, tokens):
    step = lambda h, t: (jnp.tanh(h @ params["w"] + params["b"] + params["table"][t]), None)
    return jnp.sum(jax.lax.scan(step, jnp.ones(3), tokens)[0])

  tokens = jnp.asarray(rng.integers(0, 7, size=(4, 5)))
  planned = oracle.plan(loss, params, tokens[0])
  recorded = tapped.record(planned.program, jax.tree.leaves(params), [tokens])
  # Each array of the recording, with numbers that are not finite in another example.
  damaged = jax.tree.map(lambda x: x, recorded)
  for kind in ("operands", "cotangents"):
    for site, arrays in getattr(recorded, kind).items():
      depth = len(next(s for s in planned.program.sites if s.index == site).loops)
      bad = lambda x, depth=depth: (
        jnp.moveaxis(x, depth, 0).at[1].set(jnp.nan).at[3].set(-jnp.inf)
        if jnp.issubdtype(x.dtype, jnp.floating) else jnp.moveaxis(x, depth, 0)
      )  # fmt: skip
      getattr(damaged, kind)[site] = tuple(jnp.moveaxis(bad(x), 0, depth) for x in arrays)
  flow = ParamFlow.of(planned.program, jax.tree.leaves(params))
  rules = [unit_rules.rule_of(unit, flow) for unit in planned.units]
  reader = unit_rules.RowReader(rules, damaged, [None] * len(rules))
  assert reader._lanes
  for unit in planned.units:
    for found, given in zip(reader.at(unit, jnp.array(2)), (recorded[1], recorded[2])):
      for site in unit.sites:
        for x, whole in zip(found[site.index], given[site.index]):
          wanted = jnp.take(whole, 2, axis=len(site.loops))
          np.testing.assert_array_equal(x, wanted)
          assert x.dtype == whole.dtype


@_quick
@pytest.mark.cases(quick=["inf-tpu:v5e:1x1", "1e+200-tpu:v5e:1x1"], slow=...)
@on_each_chip
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200])
def test_a_held_gradient_is_that_of_the_recording(chip, value):
  """Read for one example, beside one that is not finite or overflows."""
  loss, params, batch = _net()
  planned = oracle.plan(loss, params, oracle.first_of(batch))
  leaves = jax.tree.leaves(params)
  flow = ParamFlow.of(planned.program, leaves)
  held = [unit for unit in planned.units if unit.hold]
  rules = [unit_rules.rule_of(unit, flow) for unit in held]
  is_convolution = lambda unit: unit.sites[0].name == "conv_general_dilated"
  assert any(map(is_convolution, held)) and not all(map(is_convolution, held))

  def first_pass(batch):
    recorded = tapped.record(planned.program, leaves, jax.tree.leaves(batch))
    first = unit_rules.norms(rules, recorded, planned.platform)
    rows = unit_rules.RowReader(rules, recorded, first)
    of_row = lambda row, given: [
      rule.row_gradient(rows, each, jnp.array(row)) for rule, each in zip(rules, given)
    ]
    norms = [each.finish().lengths for each in first]
    return of_row, first, norms

  of_row, first, norms = first_pass(batch | {"x": batch["x"].at[2, 1, 1, 0].set(value)})
  _, _, undamaged = first_pass(batch)
  recordings = [None] * len(held)
  near = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
  jax.tree.map(near, of_row(1, first), of_row(1, recordings))
  if np.isfinite(value):
    jax.tree.map(near, of_row(2, first), of_row(2, recordings))
  # A grouped convolution mixes examples on a CPU in double precision. What is held does not.
  for each, wanted in zip(jax.tree.leaves(norms), jax.tree.leaves(undamaged)):
    near(np.delete(each, 2), np.delete(wanted, 2))
  for unit, each, length in zip(held, of_row(2, first), norms):
    if is_convolution(unit) and not np.isfinite(value):
      assert not all(np.isfinite(x).all() for x in each)
      assert not np.isfinite(length[0].longest[2])


_WINDOWS = {
  "same": {},
  "strides": {"window_strides": (2, 2)},
  "one axis": {"window_strides": (1, 2), "padding": "VALID"},
  "groups": {"feature_group_count": 2},
  "dilated": {"rhs_dilation": (2, 1), "padding": "VALID"},
  "transposed": {"lhs_dilation": (2, 2), "padding": [(1, 1), (2, 1)]},
  "cut": {"padding": [(-1, 1), (0, -1)]},
}


@pytest.mark.cases(slow=[2, 3], long=...)
@pytest.mark.parametrize("name", _WINDOWS)
def test_products_of_windows_are_sums_of_products_of_places(name):
  options = {"window_strides": (1, 1), "padding": "SAME"} | _WINDOWS[name]
  groups = options.get("feature_group_count", 1)
  rng = np.random.default_rng(0)
  w = rng.normal(size=(3, 2, 4 // groups, 6))
  x = jnp.asarray(rng.normal(size=(1, 2, 5, 6, 4)))

  def loss(w, x):
    layout = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, w, dimension_numbers=layout, **options)
    return jnp.sum(jnp.sin(y))

  planned = oracle.plan(loss, w, x[0], platform="cpu")
  (unit,) = planned.units
  site = unit.sites[0]
  form = site.form
  recorded = tapped.record(planned.program, [w], [x])
  data, cotangents = recorded.operands[site.index], recorded.cotangents[site.index]
  windows = np.asarray(form.build((data[0][0],), (cotangents[0][0],)).left)
  wanted = np.einsum("ntk,nsk->nts", windows, windows)
  np.testing.assert_allclose(form.places.build((data[0][0],)), wanted, atol=1e-12)
  assert form.places.count == 2 * 5 * 6


def test_a_scan_and_a_large_kernel_copy_their_windows():
  def scanned(w, x):
    step = lambda h, _: (jnp.tanh(jax.lax.conv(h, w, (1, 1), "SAME")), None)
    return jnp.sum(jax.lax.scan(step, x[None], None, length=2)[0])

  planned = oracle.plan(scanned, jnp.ones((2, 2, 3, 3)), jnp.ones((2, 5, 5)))
  assert planned.units[0].sites[0].form.places is None
  large = lambda w, x: jnp.sum(jax.lax.conv(x[None], w, (1, 1), "SAME"))
  planned = oracle.plan(large, jnp.ones((2, 2, 6, 6)), jnp.ones((2, 9, 9)))
  assert planned.units[0].sites[0].form.places is None


@pytest.mark.slow
def test_a_usual_batch_is_counted_without_the_branches_of_rare_examples():
  """Of the traffic of a dense layer, no operand is copied to drop an example."""
  loss = lambda w, x: jnp.sum(jnp.sin(x @ w))
  w = jnp.ones((512, 64), jnp.float32)
  x = jnp.ones((1024, 512), jnp.float32)
  grad_fn = gradients.clipped_grad(loss, l2_clip_norm=1.0)
  compiled = jax.jit(lambda w, x: grad_fn(w, x, True).total).lower(w, x).compile()
  counts = programs.count_work(compiled.as_text())
  # Read by the product, by the norms and by the sum; the other arrays are an eighth of it.
  assert counts.memory_bytes < 4.5 * x.nbytes
  assert counts.loops == 0


@pytest.mark.slow
def test_offsets_of_a_kernel_are_few():
  shapes = list(itertools.product(range(1, 7), range(1, 7)))
  copied = []
  for shape in shapes:
    loss = lambda w, x: jnp.sum(jax.lax.conv(x[None], w, (1, 1), "SAME"))
    planned = oracle.plan(loss, jnp.ones((2, 2, *shape)), jnp.ones((2, 7, 7)))
    if planned.units[0].sites[0].form.places is None:
      copied.append(shape)
  # A kernel of one place has no windows.
  assert copied == [(1, 1), (5, 6), (6, 5), (6, 6)]
