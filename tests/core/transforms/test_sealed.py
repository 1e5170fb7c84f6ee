"""Nothing of Optax, and no function of trees, computes with gradients that are not yet private.

One example would move the sum by more than its noise covers: behind `clip_by_global_norm` by
62.9 bounds, in two parts of `multi_transform` by 1.414, with equal noise in both.
"""

import copy
import dataclasses
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, PartitionSpec

import dpjax
from dpjax import sampling, sealed, training, transforms
from dpjax.noise import NoiseShape
from dpjax.noise.correlated import BandedToeplitz
from dpjax.validate import UserError
from tests import plans
from tests.refuses import refuses

_PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
_KEY = jax.random.key(1)
_KINDS = ("stacked", "sum")


def _loss(params, x):
  return jnp.sum(jnp.tanh(x @ params["w"]) * params["b"])


_BATCH = dpjax.Batch(jax.random.normal(jax.random.key(0), (8, 3)), jnp.arange(8) < 7)


@functools.cache
def _plan(noise_multiplier=0.0):
  return plans.of(noise_multiplier=noise_multiplier, num_steps=5)


@functools.cache
def _gradients(kind):
  if kind == "sum":
    return _plan().clipped_grad(_loss)(_PARAMS, _BATCH)
  return dpjax.per_example_grads(_loss)(_PARAMS, _BATCH)[1]


def _private():
  return _plan().transform(_KEY)


def _seen(tx, released):
  """The transform, with each of its updates appended to `released`."""

  def update(updates, state, params=None, **more):
    out, state = tx.update(updates, state, params, **more)
    released.append(out)
    return out, state

  return optax.GradientTransformationExtraArgs(tx.init, update)


def _one_line(error):
  text = str(error)
  known = "must stand first in optax.chain" in text or "goes past the noise" in text
  return "\n" not in text and len(text) < 300 and known


_MORE = {"value": jnp.float32(1.0), "grad": _PARAMS, "loss": 1.0}
_MORE["value_fn"] = _MORE["obj_fn"] = lambda params: jnp.float32(1.0)


def _update(tx, kind, params=_PARAMS, wrapped=lambda fn: fn):
  """What an update gives, or its error, which must be the one line."""
  tx = optax.with_extra_args_support(tx)
  update = lambda grads, state, **more: tx.update(grads, state, params, **more)
  whole = lambda **more: wrapped(functools.partial(update, **more))(
    _gradients(kind), tx.init(params)
  )
  try:
    try:
      return whole()[0]
    except (TypeError, ValueError, KeyError) as error:  # what asks for more arguments
      if isinstance(error, UserError):
        raise
      return whole(**_MORE)[0]
  except UserError as error:
    assert _one_line(error), error
    return None


# --- all of Optax

_ARGUMENTS = {
  "learning_rate": 0.1, "step_size": 0.1, "step_size_fn": lambda step: 0.1, "factor": 0.5,
  "decay": 0.9, "max_norm": 1.0, "max_delta": 1.0, "threshold": 1.0, "clipping": 0.1,
  "eta": 0.1, "gamma": 0.9, "seed": 0, "key": jax.random.key(0), "weight_decay": 0.1,
  "max_consecutive_errors": 3, "every_k_schedule": 2, "mask": True, "sync_period": 2,
  "slow_step_size": 0.5, "l2_norm_clip": 1.0, "noise_multiplier": 1.0, "max_learning_rate": 1.0,
  "should_transform_fn": lambda step, **_: True, "f": lambda updates, params: updates,
  "should_update_fn": lambda step, **_: True,
  "param_labels": lambda params: jax.tree.map(lambda _: "a", params),
}  # fmt: skip
_INNER = ("inner", "opt", "optimizer", "base_optimizer", "fast_optimizer", "tx")
# `f` is a function of whole trees that hands them on; these change no gradient at all.
_HARMLESS = {"identity", "named_chain", "stateless"}
_WRAPS_WELL = {"chain", "lookahead", "schedule_free", "with_extra_args_support"}


def _made(function, inner):
  """(its transform, whether it wraps `inner`); None where it makes no transform."""
  options, positional, wraps = {}, [], False
  for parameter in inspect.signature(function).parameters.values():
    name = parameter.name
    if parameter.kind is parameter.VAR_POSITIONAL and function is optax.chain:
      positional, wraps = [inner], True
    elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
      continue
    elif name in _INNER or name == "transforms":
      options[name], wraps = {"a": inner} if name == "transforms" else inner, True
    elif name in _ARGUMENTS:
      options[name] = _ARGUMENTS[name]
    elif parameter.default is parameter.empty:
      return None
  tx = function(*positional, **options)
  tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
  is_transform = hasattr(tx, "init") and hasattr(tx, "update")
  return (tx, wraps) if is_transform else None


@functools.cache
def _of_optax():
  """{name: its function} of all that makes a transform."""
  found = {}
  for module in (optax, optax.contrib, optax.transforms):
    for name, value in vars(module).items():
      if name.startswith("_") or (
        not inspect.isfunction(value) and value is not optax.MultiSteps
      ):
        continue
      if name not in found and _made_or_none(value) is not None:
        found[name] = value
  return found


def _made_or_none(function, inner=None):
  try:
    return _made(function, inner or optax.identity())
  except (TypeError, ValueError, AttributeError):
    return None


def test_the_generator_finds_optax():
  wrappers = {n for n, f in _of_optax().items() if _made_or_none(f)[1]}
  assert len(_of_optax()) > 100, sorted(_of_optax())
  assert wrappers >= _WRAPS_WELL | {
    *("MultiSteps", "apply_if_finite", "flatten", "masked", "multi_transform", "partition")
  }


@pytest.mark.cases(
  slow=[
    38,
    "dog-stacked",
    "identity-stacked",
    "apply_every-stacked",
    "apply_every-sum",
    "adabelief-sum",
  ],
  long=[1, 3, 37, 84, 90],
)
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", sorted(_of_optax()))
def test_optax_before_or_around_the_private_transform_is_right_or_one_line(name, kind):
  released = []
  tx, wraps = _made(_of_optax()[name], _seen(_private(), released))
  whole = tx if wraps else optax.chain(tx, _seen(_private(), released))
  params = optax.LookaheadParams.init_synced(_PARAMS) if name == "lookahead" else _PARAMS
  out = _update(whole, kind, params)
  assert (out is not None) == (name in (_WRAPS_WELL if wraps else _HARMLESS))
  if out is not None:  # the private transform saw the gradients as they were
    expected = _update(_private(), kind)
    jax.tree.map(np.testing.assert_array_equal, released[0], expected)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("way", ["tree.leaves", "tree_util.tree_flatten_with_path"])
def test_no_way_of_optax_into_a_tree_is_unguarded(way, kind):
  in_optax = eval(f"lambda tree: jax.{way}(tree)", {"__name__": "optax.x", "jax": jax})
  with refuses("gradients") as caught:
    in_optax(_gradients(kind))
  assert caught.value.must == sealed.MISPLACED


# --- the compositions that people write

_SOME = {"w": True, "b": False}
_COMPOSED = {
  "chain after": (True, lambda p: optax.chain(p, optax.adamw(0.1, mask=_SOME))),
  "chain before": (False, lambda p: optax.chain(optax.clip_by_global_norm(10.0), p)),
  "masked": (False, lambda p: optax.masked(p, _SOME)),
  "masked by nothing": (False, lambda p: optax.masked(p, {"w": True, "b": True})),
  "masked by shape": (
    False,
    lambda p: optax.masked(p, lambda t: jax.tree.map(lambda x: x.ndim > 1, t)),
  ),
  "masked before": (
    False,
    lambda p: optax.chain(optax.masked(optax.clip_by_global_norm(1.0), _SOME), p),
  ),
  "multi_transform": (
    False,
    lambda p: optax.multi_transform({"a": p, "b": _private()}, {"w": "a", "b": "b"}),
  ),
  "multi_transform of one": (
    False,
    lambda p: optax.multi_transform({"a": p}, {"w": "a", "b": "a"}),
  ),
  "MultiSteps": (
    False,
    lambda p: optax.MultiSteps(optax.chain(p, optax.sgd(0.1)), 2).gradient_transformation(),
  ),
  "inject_hyperparams around": (
    True,
    lambda p: optax.inject_hyperparams(lambda r: optax.chain(p, optax.sgd(r)))(r=0.1),
  ),
  "inject_hyperparams after": (
    True,
    lambda p: optax.chain(p, optax.inject_hyperparams(optax.sgd)(0.1)),
  ),
  "apply_if_finite": (
    False,
    lambda p: optax.apply_if_finite(optax.chain(p, optax.sgd(0.1)), 3),
  ),
  "apply_if_finite after": (
    True,
    lambda p: optax.chain(p, optax.apply_if_finite(optax.sgd(0.1), 3)),
  ),
  "lookahead": (True, lambda p: optax.lookahead(optax.chain(p, optax.sgd(0.1)), 2, 0.5)),
  "schedule_free": (
    True,
    lambda p: optax.contrib.schedule_free(optax.chain(p, optax.sgd(0.1)), 0.1),
  ),
  "ema after": (True, lambda p: optax.chain(p, optax.ema(0.9))),
  "ema before": (False, lambda p: optax.chain(optax.ema(0.9), p)),
  "twice": (False, lambda p: optax.chain(p, _private())),
  "nested": (
    False,
    lambda p: optax.chain(optax.chain(optax.masked(optax.scale(2.0), True), p), optax.sgd(0.1)),
  ),
  "one of one's own, by shape": (
    False,
    lambda p: optax.chain(
      optax.stateless(
        lambda u, _: jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, u)
      ),
      p,
    ),
  ),
}  # fmt: skip


@pytest.mark.cases(long=[8, 12, 20, 28, 36, 72])
@pytest.mark.parametrize("wrapped", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", sorted(_COMPOSED))
def test_a_composition_is_right_or_one_line(name, kind, wrapped):
  works, make = _COMPOSED[name]
  released = []
  params = optax.LookaheadParams.init_synced(_PARAMS) if name == "lookahead" else _PARAMS
  out = _update(make(_seen(_private(), released)), kind, params, wrapped)
  assert (out is not None) == works
  if works and wrapped is not jax.jit:
    jax.tree.map(np.testing.assert_array_equal, released[0], _update(_private(), kind))


# --- everybody else

_ARITHMETIC = {
  "times": lambda x: 2 * x,
  "by shape": lambda x: x * 2 if x.ndim > 1 else x,
  "by type": lambda x: x * 2 if jnp.issubdtype(x.dtype, jnp.floating) else x + 0,
  "cast": lambda x: x.astype(jnp.float32),
  "sum": lambda x: x.sum(0, keepdims=True),
  "mean of all": lambda x: x - jnp.mean(x, 0),
  "clip": lambda x: jnp.clip(x, -1, 1),
  "norm": lambda x: x / jnp.linalg.norm(x),
  "numpy": lambda x: np.asarray(x) * 2,
}


@pytest.mark.parametrize("wrapped", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
@pytest.mark.parametrize("name", sorted(_ARITHMETIC))
def test_no_arithmetic_is_done_on_any_leaf(name, wrapped):
  change = lambda grads: jax.tree.map(_ARITHMETIC[name], grads)
  with pytest.raises((TypeError, ValueError, NotImplementedError, AttributeError)):
    wrapped(change)(_gradients("stacked"))


def _is_float(leaf):
  return jnp.issubdtype(leaf.dtype, jnp.floating)


_ON_A_SUM = {
  "floats": lambda g: jax.tree.map(lambda x: 100 * x if _is_float(x) else x, g),
  "floats, halved": lambda g: jax.tree.map(lambda x: x / 2 if _is_float(x) else x, g),
  "floats to zero": lambda g: jax.tree.map(jnp.zeros_like, g),
  "floats, cast": lambda g: jax.tree.map(
    lambda x: x.astype(jnp.float16) if _is_float(x) else x, g
  ),
  "of two": lambda g: jax.tree.map(lambda x, y: x + y if _is_float(x) else x, g, g),
  "all": lambda g: jax.tree.map(lambda x: 2 * x, g),
  "all of two": lambda g: jax.tree.map(jnp.add, g, g),
  "exchanged": lambda g: jax.tree.map(lambda x: jnp.ones(x.shape), g),
  "exchanged where closed": lambda g: jax.tree.map(
    lambda x: x if _is_float(x) else jnp.ones(x.shape), g
  ),
  "opened by JAX": lambda g: jax.tree.map(
    lambda x: jax.random.key_data(x) if sealed.is_closed(x) else x, g
  ),
  "by flattening": lambda g: jax.tree.unflatten(
    jax.tree.structure(g), [x * 9 if _is_float(x) else x for x in jax.tree.leaves(g)]
  ),
  "leaves left out": lambda g: jax.tree.map(
    lambda x: None if x.shape == (2,) and sealed.is_closed(x) else x, g
  ),
  "leaves in another order": lambda g: jax.tree.unflatten(
    jax.tree.structure(g), jax.tree.leaves(g)[::-1]
  ),
}


@pytest.mark.parametrize("wrapped", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
@pytest.mark.parametrize("name", sorted(_ON_A_SUM))
def test_a_clipped_sum_is_what_it_was_or_refused(name, wrapped):
  """By any function of trees, also the norms, from which an adaptive clip norm follows."""
  summed = _gradients("sum")
  tx = _private()
  update = lambda grads: tx.update(grads, tx.init(_PARAMS), _PARAMS)[0]
  wanted = update(summed)
  try:
    released = wrapped(lambda grads: update(_ON_A_SUM[name](grads)))(summed)
    norms = wrapped(lambda grads: _ON_A_SUM[name](grads).norms)(summed)
  except (UserError, TypeError, ValueError, AttributeError):
    return
  if all(np.isnan(leaf).all() for leaf in jax.tree.leaves(released)):
    return
  for leaf, same in zip(jax.tree.leaves(released), jax.tree.leaves(wanted)):
    np.testing.assert_allclose(leaf, same, rtol=1e-6)
  np.testing.assert_array_equal(norms, summed.norms)
  # There are no floats in the tree.
  assert name in ("floats", "floats, halved", "floats, cast", "of two", "by flattening")


def test_a_clipped_sum_reads_as_arrays_wherever_it_comes_from():
  summed = _gradients("sum")
  for total in (summed.total, jax.jit(lambda g: g.total)(summed)):
    assert {leaf.dtype for leaf in jax.tree.leaves(total)} == {jnp.dtype("float32")}
  assert jax.tree.structure(summed.total) == jax.tree.structure(_PARAMS)
  shapes = jax.eval_shape(lambda: summed).total
  assert jax.tree.map(lambda s: (s.shape, s.dtype), shapes) == jax.tree.map(
    lambda a: (a.shape, a.dtype), summed.total
  )
  shaped = jax.eval_shape(lambda: summed)
  assert shaped.total["b"].shape == (2,)
  # What was read is the same as before: it goes through JAX again.
  assert jax.eval_shape(lambda g: g.norms, shaped).shape == summed.norms.shape
  plain = np.arange(1.0, 4.0) / 3  # float64, which JAX has only where x64 is on
  mixed = dpjax.ClippedSum(plain, jnp.ones(1), jnp.ones(1), 1.0)
  read = jax.tree.map(lambda leaf: leaf, mixed).total
  assert read.dtype == jnp.float32
  np.testing.assert_array_equal(read, plain.astype(np.float32))
  half = dataclasses.replace(summed, total=jax.tree.map(lambda a: a / 2, summed.total))
  np.testing.assert_array_equal(half.total["b"], summed.total["b"] / 2)
  with jax.enable_x64(True):
    wide = dpjax.ClippedSum(jnp.arange(1, 4) / 3, jnp.ones(1), jnp.ones(1), 1.0)
    again = jax.jit(lambda g: g)(wide).total
    assert again.dtype == jnp.float64
    np.testing.assert_array_equal(again, jnp.arange(1, 4) / 3)


@pytest.mark.parametrize(
  "program",
  [
    jax.jit(lambda g: g),
    lambda g: jax.jit(lambda g: g, donate_argnums=0)(jax.tree.map(jnp.copy, g)),
    lambda g: jax.lax.scan(lambda c, x: (c, None), g, None, length=2)[0],
    lambda g: jax.lax.cond(True, lambda a: a, lambda a: a, g),
    lambda g: jax.tree.map(lambda x: x[1], jax.vmap(lambda _: g)(jnp.arange(3))),
    lambda g: jax.tree.map(lambda *x: jnp.stack(x)[0], g, g),
    lambda g: pickle.loads(pickle.dumps(g)),
    copy.deepcopy,
    lambda g: jax.jit(lambda g: g).lower(g).compile()(g),
    jax.checkpoint(lambda g: g),
  ],
  ids=[
    "jit",
    "donated",
    "scan",
    "cond",
    "vmap",
    "stacked",
    "pickle",
    "copy",
    "aot",
    "remat",
  ],
)
def test_every_program_hands_a_clipped_sum_on_bit_for_bit(program):
  total = {"w": jnp.array([[jnp.nan, -0.0], [1e-40, 3.0]]), "b": jnp.float32(jnp.inf)}
  summed = dpjax.ClippedSum(total, jnp.ones(3), jnp.zeros(3), 1.0)
  after = program(summed)
  jax.tree.map(np.testing.assert_array_equal, after.total, total)
  assert after.bounds == summed.bounds and sealed.is_seal_of(after.seal, *after.bounds)


def test_a_step_is_compiled_to_the_same_program_whether_or_not_its_sum_is_sealed():
  through = lambda summed: jax.jit(lambda g: g)(summed)
  params = {"w": jnp.ones((64, 32)), "b": jnp.ones(32)}
  rows = jax.tree.map(lambda leaf: jnp.ones((8, *leaf.shape)), params)

  def step(close):
    def run(rows):
      total = jax.tree.map(lambda leaf: jnp.tanh(leaf).sum(0), rows)
      return close(dpjax.ClippedSum(total, jnp.ones(8), jnp.ones(8), 1.0)).total

    return jax.jit(run).lower(rows).compile().cost_analysis()

  plain, closed = step(lambda summed: summed), step(through)
  for name in ("flops", "bytes accessed"):
    assert closed[name] == plain[name]


def test_rows_are_cut_and_joined_without_being_opened():
  grads = _gradients("stacked")
  parts = [jax.tree.map(lambda leaf, a=a: leaf[a : a + 4], grads) for a in (0, 4)]
  joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
  jax.tree.map(np.testing.assert_array_equal, joined.arrays, grads.arrays)


def _programs():
  mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
  rows = PartitionSpec("data")
  shared = jax.shard_map(lambda g: g, mesh=mesh, in_specs=(rows,), out_specs=rows)
  yield "jit", jax.jit(lambda g: g)
  yield "donated", lambda g: jax.jit(lambda g: g, donate_argnums=0)(jax.device_put(g))
  yield "vmap", jax.vmap(lambda g: g)
  yield "scan", lambda g: jax.lax.scan(lambda c, x: (c, x), 0, g)[1]
  yield "cond", lambda g: jax.lax.cond(True, lambda a: a, lambda a: a, g)
  yield "shard_map", jax.jit(shared)
  yield "remat", jax.checkpoint(lambda g: g)
  yield "pickle", lambda g: pickle.loads(pickle.dumps(g))
  yield "opened inside", jax.jit(lambda g: dpjax.wrap_grads(g.arrays))


@pytest.mark.cases(slow=["jit-float16"], long=[0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("program", [pytest.param(p, id=n) for n, p in _programs()])
def test_every_program_hands_them_on_bit_for_bit(program, dtype):
  rows = jax.random.normal(jax.random.key(0), (4, 3)).at[0, 0].set(jnp.nan)
  arrays = {"w": rows.astype(dtype), "b": jnp.arange(4.0).astype(dtype), "n": None}
  after = program(dpjax.wrap_grads(arrays)).arrays
  # NumPy knows the NaN of no type that is not its own.
  whole = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), tree)
  jax.tree.map(np.testing.assert_array_equal, whole(after), whole(arrays))
  assert jax.tree.map(lambda a: a.dtype, after) == jax.tree.map(lambda a: a.dtype, arrays)


def test_float64_keeps_its_bits():
  with jax.enable_x64(True):
    arrays = jnp.arange(1, 4, dtype=jnp.float64) / 3
    np.testing.assert_array_equal(dpjax.wrap_grads(arrays).arrays, arrays)


def test_they_have_no_derivative_rather_than_a_derivative_of_zero():
  moved = lambda scale: dpjax.wrap_grads(scale * jnp.ones((2, 3))).arrays.sum()
  with refuses("gradients"):
    jax.grad(moved)(1.0)


def test_closing_and_opening_cost_nothing_under_jit():
  round_trip = jax.jit(lambda x: dpjax.wrap_grads(x).arrays)
  text = round_trip.lower(jnp.ones((64, 32))).compile().as_text()
  assert "convert" not in text and "fusion" not in text, text


# --- the door for bare arrays, masks, parts of trees


def test_bare_arrays_are_refused_and_the_line_names_the_call():
  arrays = _gradients("stacked").arrays
  tx = _private()
  with refuses("updates") as caught:
    tx.update(arrays, tx.init(_PARAMS), _PARAMS, mask=_BATCH.mask)
  assert _one_line(caught.value)
  out, _ = tx.update(dpjax.wrap_grads(arrays), tx.init(_PARAMS), _PARAMS, mask=_BATCH.mask)
  jax.tree.map(np.testing.assert_array_equal, out, _update(tx, "stacked"))


def test_gradients_of_a_batch_know_its_mask_and_a_second_one_is_joined():
  tx, full = _private(), jnp.ones(8, bool)
  without = dpjax.per_example_grads(_loss)(_PARAMS, _BATCH.examples)[1]
  update = lambda grads, **mask: tx.update(grads, tx.init(_PARAMS), _PARAMS, **mask)[0]
  expected = update(without, mask=_BATCH.mask)
  for found in (
    update(_gradients("stacked")),
    update(_gradients("stacked"), mask=full),
    update(dpjax.wrap_grads(without.arrays, mask=_BATCH.mask)),
    update(dpjax.wrap_grads(without.arrays, mask=True), mask=_BATCH.mask),
  ):
    jax.tree.map(np.testing.assert_array_equal, found, expected)
  with refuses("mask"):
    update(without)
  with refuses("grads"):
    dpjax.wrap_grads({"a": jnp.ones((2, 1)), "b": jnp.ones(3)}, mask=True)


_WRONG_MASKS = ["True", np.array([None, True]), object(), [[True], [True, False]], b"\x01"]


@pytest.mark.parametrize("mask", _WRONG_MASKS, ids=lambda mask: type(mask).__name__)
def test_a_mask_that_is_no_array_is_one_line(mask):
  without = dpjax.per_example_grads(_loss)(_PARAMS, _BATCH.examples)[1]
  tx = _private()
  for call in (
    lambda: tx.update(without, tx.init(_PARAMS), _PARAMS, mask=mask),
    lambda: _plan().clipped_grad(_loss)(_PARAMS, _BATCH.examples, mask),
    lambda: dpjax.wrap_grads(without.arrays, mask=mask),
  ):
    with refuses("mask") as caught:
      call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def _all_private():
  numbers = {"l2_clip_norm": 1.0, "noise_multiplier": 0.0, "normalize_by": 1, "key": _KEY}
  banded = dpjax.noise.correlated.BandedToeplitz((1.0, 0.5))
  inner = transforms.clip_and_noise(**numbers)
  yield inner
  yield transforms.adaptive_clip_and_noise(**numbers)
  yield transforms.with_clip_schedule(inner, [1.0])
  yield transforms.accumulate(inner, every=2, l2_clip_norm=1.0)
  yield transforms.clip_and_correlated_noise(
    **numbers, num_steps=3, noise_shape=dpjax.NoiseShape(correlation=banded)
  )


@pytest.mark.parametrize(
  "tx", list(_all_private()), ids=lambda tx: tx.init.__qualname__[:30]
)
def test_a_part_of_a_tree_is_refused_by_every_private_transform(tx):
  part = {"w": _PARAMS["w"], "b": optax.MaskedNode()}
  with refuses("params") as caught:
    tx.init(part)
  assert _one_line(caught.value)
  arrays = _gradients("stacked").arrays | {"b": optax.MaskedNode()}
  with refuses("updates"):
    tx.update(dpjax.wrap_grads(arrays, mask=True), tx.init(_PARAMS), _PARAMS)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_one_key_means_one(number):
  keys = jax.random.split(jax.random.key(0), number)
  for make in (_plan().transform, lambda key: _plan(1.0).transform(key)):
    with refuses("key"):
      make(keys)
  with refuses("example_key"):
    training.dp_sgd(_loss, _plan(), optax.sgd(0.1), noise_key=_KEY, example_key=keys)


def test_a_gradient_that_is_looked_at_is_a_plain_array():
  grads = _gradients("stacked")
  assert grads.arrays["w"].shape == (8, 3, 2) and "float32[8, 3, 2]" in repr(grads)
  spoilt = sealed.PerExampleGrads(grads.arrays, None, grads.dtypes)
  with refuses("gradients"):
    _ = spoilt.arrays


# --- a record that is given twice


def _rows(index):
  return lambda g: jax.tree.map(lambda leaf: leaf[index], g)


_TWICE = {
  "joined with itself": lambda g: jax.tree.map(lambda x: jnp.concatenate([x, x]), g),
  "indexed twice": _rows(np.array([0, 1, 1, 3])),
  "the same shape": _rows(np.array([0, 0, 2, 3, 4, 5, 6, 7])),
  "repeated": lambda g: jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), g),
  "tiled": lambda g: jax.tree.map(lambda x: jnp.concatenate([x] * 3), g),
  "stacked and flattened": lambda g: jax.tree.map(
    lambda x: jnp.stack([x, x]).reshape(2 * x.shape[0], *x.shape[1:]), g
  ),
  "broadcast": lambda g: jax.tree.map(
    lambda x: jnp.broadcast_to(x[None, 0], (5, *x.shape[1:])), g
  ),
  "two calls": lambda g: jax.tree.map(
    lambda x, y: jnp.concatenate([x, y]), g, dpjax.wrap_grads(g.arrays, mask=g.mask)
  ),
  "unflattened": lambda g: jax.tree.unflatten(
    jax.tree.structure(g), [jnp.concatenate([x, x]) for x in jax.tree.leaves(g)]
  ),
  "taken": lambda g: jax.tree.map(lambda x: jnp.take(x, jnp.array([1, 1]), axis=0), g),
  "a scan": lambda g: jax.lax.scan(lambda c, _: (c, _rows(0)(c)), g, length=3)[1],
  "vmap": lambda g: jax.vmap(lambda i: _rows(i)(g))(jnp.array([2, 2, 3])),
  "pickled and joined": lambda g: _TWICE["joined with itself"](
    pickle.loads(pickle.dumps(g))
  ),
}
_ONCE = {
  "as they are": lambda g: g,
  "in another order": _rows(np.arange(7, -1, -1)),
  "some": _rows(np.array([1, 5, 6])),
  "padding that repeats padding": _rows(np.array([0, 1, 7, 7, 7])),
}


@pytest.mark.cases(
  quick=[9, 10, 11, 12, 13, 17, 21, 22, 23], slow=[1, 3, 4, 7, 8], long=...
)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", sorted(_TWICE))
def test_a_row_that_is_given_twice_is_one_line_or_nan(name, known):
  """A record that counts twice moves the sum by two bounds, under noise for one."""
  examples = _BATCH if known else _BATCH.examples
  grads = _TWICE[name](dpjax.per_example_grads(_loss)(_PARAMS, examples)[1])
  tx = _private()
  mask = {} if known else {"mask": True}
  update = lambda g: tx.update(g, tx.init(_PARAMS), _PARAMS, **mask)[0]
  with refuses("updates") as caught:
    update(grads)
  assert len(str(caught.value)) < 300
  out = jax.jit(update)(grads)
  assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(out))
  said = dpjax.wrap_grads(grads.arrays, mask=grads.mask)  # in so many words
  # The rows are of several batches: more than the plan's capacity is refused by its own rule.
  free = dpjax.clip_and_noise(
    l2_clip_norm=1.0, noise_multiplier=0.0, normalize_by=4, key=_KEY
  )
  summed = free.update(said, free.init(_PARAMS), _PARAMS, **mask)[0]
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(summed))


@pytest.mark.cases(slow=[2], long=[3])
@pytest.mark.parametrize("name", sorted(_ONCE))
def test_rows_that_come_once_are_summed_in_any_order(name):
  grads = _gradients("stacked")
  kept = _ONCE[name](grads)
  tx = _private()
  update = lambda g: tx.update(g, tx.init(_PARAMS), _PARAMS)[0]
  expected = update(dpjax.wrap_grads(kept.arrays, mask=kept.mask))
  for found in (update(kept), jax.jit(update)(kept)):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected)


def test_padding_stays_padding_whatever_the_mask_has_become():
  grads = _gradients("stacked")
  opened = jax.tree.map(lambda x: ~x if x.dtype == bool else x, grads)
  masks = [
    dataclasses.replace(grads, mask=None),
    dataclasses.replace(grads, mask=opened.mask | True),
  ]
  tx = _private()
  update = lambda g: tx.update(g, tx.init(_PARAMS), _PARAMS, mask=True)[0]
  for found in map(update, masks):
    jax.tree.map(np.testing.assert_array_equal, found, update(grads))


def test_numbers_that_are_left_out_or_exchanged_are_one_line():
  grads, tx = _gradients("stacked"), _private()
  for wrong in (
    dataclasses.replace(grads, rows=None),
    dataclasses.replace(grads, rows=jnp.arange(8)),
    dataclasses.replace(grads, leaves=_TWICE["repeated"](grads.leaves), mask=None),
  ):
    with refuses("gradients") as caught:
      tx.update(wrong, tx.init(_PARAMS), _PARAMS, mask=True)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("change", [lambda x: jnp.stack([x, x]), lambda x: x[None]])
def test_several_sums_in_one_are_one_line(change):
  """Each would get its own noise, and together they hold a record twice."""
  several = jax.tree.map(change, _gradients("sum"))
  tx = _private()
  for params in (_PARAMS, None):
    with refuses("updates"):
      tx.update(several, tx.init(_PARAMS), params)


# --- what a chain hands on past the noise

_PRIVATE_FACTORIES = {
  "white": lambda: _plan_with(),
  "adaptive": lambda: _plan_with(
    l2_clip_norm=dpjax.Clip(1.0, transforms.AdaptiveClipping())
  ),
  "clip schedule": lambda: _plan_with(l2_clip_norm=dpjax.Clip(1.0, schedule=(1.0, 0.5))),
  "correlated": lambda: _plan_with(
    sampler=sampling.CyclicSampler(steps_per_pass=2, num_examples=16),
    noise_shape=NoiseShape(correlation=BandedToeplitz((1.0, 0.5))),
  ),
  "slices": lambda: _plan_with(slices=2),
}


def _plan_with(**changes):
  numbers = {
    "sampler": sampling.PoissonSampler(sampling_prob=0.5, capacity=8),
    "noise_multiplier": 1.0,
    "l2_clip_norm": 1.0,
    "normalize_by": 1,
    "num_steps": 2,
    "delta": 1e-5,
  }
  return dpjax.Plan(**(numbers | changes))


@pytest.mark.parametrize("argument", ["value", "value_fn"])
@pytest.mark.parametrize("name", sorted(_PRIVATE_FACTORIES))
def test_what_goes_past_the_noise_is_one_line(name, argument):
  """The loss of a batch sets the step of `polyak_sgd`, line searches and their kin."""
  plan = _PRIVATE_FACTORIES[name]()
  chain = plan.accumulated(optax.chain(plan.transform(_KEY), optax.polyak_sgd()), rows=8)
  state, summed = chain.init(_PARAMS), _gradients("sum")
  with refuses(argument) as caught:
    for _ in range(plan.slices):
      _, state = chain.update(summed, state, _PARAMS, **{argument: _MORE[argument]})
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


# --- a sum under the bounds of another


def _exchanged_by_unflatten(big, small):
  return jax.tree.unflatten(jax.tree.structure(small), jax.tree.leaves(big))


def _exchanged_by_setattr(big, small):
  changed = copy.copy(big)
  object.__setattr__(changed, "l2_bound", small.l2_bound)
  return changed


_EXCHANGED = {
  "unflatten": _exchanged_by_unflatten,
  "replace": lambda big, small: dataclasses.replace(big, l2_bound=small.l2_bound),
  "setattr": _exchanged_by_setattr,
  "pickle": lambda big, small: pickle.loads(
    pickle.dumps(_exchanged_by_unflatten(big, small))
  ),
  "group bounds": lambda big, small: dataclasses.replace(small, group_bounds=(0.6, 0.8)),
}


@pytest.mark.cases(slow=[2], long=[0, 1])
@pytest.mark.parametrize("name", sorted(_EXCHANGED))
def test_a_sum_under_the_bounds_of_another_is_one_line_or_nan(name):
  small, big = (
    dpjax.clipped_grad(_loss, l2_clip_norm=bound)(_PARAMS, _BATCH) for bound in (1.0, 10.0)
  )
  tx = _plan_with().transform(_KEY)
  update = lambda summed: tx.update(summed, tx.init(_PARAMS), _PARAMS)[0]
  forged = _EXCHANGED[name](big, small)
  with refuses("updates.l2_bound"):
    update(forged)
  assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(jax.jit(update)(forged)))
  whole = pickle.loads(pickle.dumps(small))
  jax.tree.map(np.testing.assert_array_equal, update(whole), update(small))


@pytest.mark.parametrize("kind", _KINDS)
def test_a_train_state_of_flax_takes_them(kind):
  train_state = pytest.importorskip("flax.training.train_state")
  plan = _plan_with()
  tx = optax.chain(plan.transform(_KEY), optax.sgd(1.0))
  started = train_state.TrainState.create(apply_fn=None, params=_PARAMS, tx=tx)
  after = started.apply_gradients(grads=_gradients(kind))
  expected, _ = tx.update(_gradients(kind), tx.init(_PARAMS), _PARAMS)
  jax.tree.map(
    np.testing.assert_array_equal, after.params, optax.apply_updates(_PARAMS, expected)
  )
  assert plan.spent(after.opt_state).steps == 1
