"""Wrong losses, batches, parameters and masks end in one line that names them, at every entry."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import data, gradients
from dpjax.validate import UserError
from tests import plans, quick_compile
from tests.refuses import refuses

_W = jnp.ones((3, 2))
_BATCH = np.ones((4, 3), np.float32)
_KEY = jax.random.key(0)


def _good(w, x):
  return jnp.sum((x @ w) ** 2)


def _branching(w, x):
  if jnp.sum(x) > 0:
    return jnp.sum(x @ w)
  return jnp.sum(w)


_LOSSES = {
  "none": None,
  "one argument": lambda w: jnp.sum(w),
  "three arguments": lambda w, x, y: jnp.sum(x @ w),
  "if": _branching,
  "numpy": lambda w, x: np.sum(np.asarray(w)),
  "float": lambda w, x: float(jnp.sum(x @ w)),
  "int": lambda w, x: w[int(x[0])].sum(),
  "index": lambda w, x: [0.0, 1.0][jnp.int32(x[0])],
  "bool index": lambda w, x: jnp.sum(x[x > 0]),
  "a tuple": lambda w, x: (jnp.sum(x @ w), 1.0),
  "nothing": lambda w, x: None,
  "a vector": lambda w, x: x @ w,
  "text": lambda w, x: "a",
}
_LEAVES = {
  "text": np.array(["a"] * 4),
  "object": np.array([None] * 4, object),
  "datetime": np.array(["2020-01-01"] * 4, "datetime64[D]"),
  "data set": data.from_arrays(_BATCH, [0] * 4, num_classes=1),
  "batches": iter([_BATCH]),
}


def _clipped(**options):
  return lambda loss_fn, params, batch: gradients.clipped_grad(
    loss_fn, l2_clip_norm=1.0, **options
  )(params, batch, True)


@functools.cache
def _plan():
  return plans.of(72, prob=0.1, normalize_by=20, num_steps=20)


def _planned(loss_fn, params, batch):
  return _plan().clipped_grad(loss_fn)(params, batch, True)


_ENTRIES = {
  "per_example_grads": lambda loss_fn, params, batch: gradients.per_example_grads(loss_fn)(
    params, batch
  ),
  "vmap": _clipped(method="vmap"),
  "ghost": _clipped(method="ghost"),
  "auto": _clipped(),
  "microbatches": _clipped(microbatch_size=2),
  "memory": _clipped(memory_budget=1e9),
  "plan": _planned,
  "explain": lambda loss_fn, params, batch: gradients.explain(
    loss_fn, params, jax.tree.map(lambda leaf: leaf[0], batch)
  ),
}


def _one_line(call, name):
  with pytest.raises(UserError) as caught:
    call()
  message = str(caught.value)
  assert name in message and "\n" not in message and len(message) < 300, message


@pytest.mark.parametrize("entry", sorted(_ENTRIES))
def test_a_wrong_loss_is_one_line(entry):
  for loss_fn in _LOSSES.values():
    _one_line(lambda loss_fn=loss_fn: _ENTRIES[entry](loss_fn, _W, _BATCH), "loss_fn")


@pytest.mark.parametrize("entry", sorted(_ENTRIES))
def test_parameters_without_an_array_are_one_line(entry):
  loss_fn = lambda w, x: jnp.sum(x)
  for params in ({}, {"w": None}):
    _one_line(lambda params=params: _ENTRIES[entry](loss_fn, params, _BATCH), "params")
    _one_line(lambda params=params: _plan().transform(_KEY).init(params), "params")


@pytest.mark.parametrize("entry", sorted(set(_ENTRIES) - {"explain"}))
@pytest.mark.parametrize("kind", sorted(_LEAVES))
def test_a_leaf_that_is_no_number_is_one_line_that_names_its_path(entry, kind):
  leaf = _LEAVES[kind]
  call = _ENTRIES[entry]
  _one_line(lambda: call(_good, _W, {"x": _BATCH, "y": leaf}), "batch['y']")
  _one_line(lambda: call(_good, {"w": _W, "q": leaf}, _BATCH), "params['q']")


@pytest.mark.parametrize("entry", sorted(set(_ENTRIES) - {"explain"}))
def test_a_batch_without_one_leading_axis_is_one_line(entry):
  for batch in ((np.ones((4, 3)), np.ones(3)), np.float32(1)):
    _one_line(lambda batch=batch: _ENTRIES[entry](_good, _W, batch), "batch")


@pytest.mark.parametrize(
  "mask", [np.ones((4, 1), bool), np.array([[None]] * 4), "a\nb", False]
)
def test_a_wrong_mask_is_one_line(mask):
  grad_fn = gradients.clipped_grad(_good, l2_clip_norm=1.0)
  _one_line(lambda: grad_fn(_W, _BATCH, mask), "mask")
  _one_line(lambda: gradients.wrap_grads({"w": np.ones((4, 3))}, mask), "mask")


@pytest.mark.cases(long=[12])
@pytest.mark.parametrize("name", sorted(set(_LOSSES)))
def test_check_says_what_is_wrong_with_a_loss(name):
  _one_line(lambda: dpjax.check(_LOSSES[name], _W, _plan(), _BATCH), "loss_fn")


def test_rows_over_explicit_axes_are_named_before_jax_asks_for_shardings():
  explicit = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
  over = jax.sharding.NamedSharding(explicit, jax.sharding.PartitionSpec("data"))
  batch = {"x": jax.device_put(jnp.ones((4, 2)), over)}
  loss_fn = lambda w, example: jnp.sum(w * example["x"])
  call = lambda mesh: gradients.clipped_grad(loss_fn, l2_clip_norm=1.0, mesh=mesh)(
    jnp.ones(2), batch, True
  )
  with refuses("batch['x']"):
    call(None)
  assert np.isfinite(call(explicit).total).all()
  with jax.set_mesh(explicit), refuses("mesh"):
    call(explicit)
  with refuses("batch['x']"):
    gradients.per_example_grads(loss_fn)(jnp.ones(2), batch)
  split = {"w": jax.device_put(jnp.ones(2), over)}
  with refuses("params['w']"):
    gradients.clipped_grad(
      lambda p, e: loss_fn(p["w"], e), l2_clip_norm=1.0, mesh=explicit
    )(split, batch, True)


_WHOLE = """
import jax, jax.numpy as jnp, numpy as np
from dpjax import gradients, validate
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
on_all = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
rows = np.arange(8.0, dtype=np.float32).reshape(4, 2)
params, x = jax.device_put((jnp.ones(2), rows), on_all)

def total(params, x, mesh=None):
  loss_fn = lambda w, example: jnp.sum(w * example)
  grad_fn = gradients.clipped_grad(loss_fn, l2_clip_norm=1e3, mesh=mesh)
  return grad_fn(params, x, True).total

for args in ((np.ones(2), x), (params, rows)):
  try:
    total(*args)
  except validate.UserError as error:
    print(error.field)
sums = [jax.jit(total)(params, x), total(params, x, mesh)]
with jax.set_mesh(mesh):
  sums += [total(params, x)]
print(*[np.allclose(each, rows.sum(axis=0)) for each in sums])
"""


@pytest.mark.slow
def test_whole_arrays_on_explicit_axes_are_taken_where_jax_takes_them():
  """JAX itself finds no gradient of them under `jax.vmap` outside of `jax.jit` and `set_mesh`."""
  flags = dict(XLA_FLAGS=quick_compile.xla_flags(2), JAX_PLATFORMS="cpu")
  done = subprocess.run(
    [sys.executable, "-c", _WHOLE], env=os.environ | flags, capture_output=True, text=True
  )
  assert done.stdout.split() == ["batch", "params", *["True"] * 3], done.stderr[-2000:]
