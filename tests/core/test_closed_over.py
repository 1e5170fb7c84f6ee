"""Closed-over arrays are arguments: runs that differ in their numbers share one program."""

import os
import subprocess
import sys
import threading
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import closed_over, training
from dpjax.closed_over import Number, argument, jitted, within
from dpjax.noise.correlated import BandedToeplitz
from dpjax.sampling import MinSepSampler, PoissonSampler
from dpjax.transforms.adaptive_clipping import AdaptiveClipping
from dpjax.types import Batch, Example
from tests import plans

_PARAMS = {"w": jnp.ones(3) / 3}
_BATCH = Batch(Example(jnp.ones((4, 3)), jnp.ones(4)), jnp.ones(4, bool))


def _loss(params, example):
  return jnp.sum((example.x @ params["w"] - example.y) ** 2)


def _drawing_loss(params, example):
  return _loss(params, example) * jax.random.uniform(example.key)


def _plan(noise_multiplier=1.0, **changes):
  numbers = dict(l2_clip_norm=0.5, normalize_by=3, num_steps=8) | changes
  return plans.of(4, prob=0.3, noise_multiplier=noise_multiplier, **numbers)


def _algorithm(plan, rate=0.1, *, key=0, loss=_loss, **options):
  tx = optax.adam(optax.constant_schedule(argument(rate)))
  return training.dp_sgd(loss, plan, tx, noise_key=jax.random.key(key), **options)


def _text(algorithm):
  state = algorithm.init(_PARAMS)
  return jitted(algorithm.step, donate_argnums=0).lower(state, _BATCH).as_text()


_KINDS = {
  "white": {},
  "adaptive": {"l2_clip_norm": dpjax.Clip(0.5, rule=AdaptiveClipping())},
  "slices": {"slices": 2, "sampler": PoissonSampler(sampling_prob=0.3, capacity=8)},
  "correlated": {
    "sampler": MinSepSampler(turn_prob=0.3, steps_apart=2, num_steps=8, capacity=4),
    "noise_shape": dpjax.noise.NoiseShape(correlation=BandedToeplitz((1.0, 0.5))),
  },
}


@pytest.mark.cases(quick=["white"], slow=...)
@pytest.mark.parametrize("kind", _KINDS)
def test_noise_and_rates_share_one_program(kind):
  texts = {
    _text(_algorithm(_plan(z, **_KINDS[kind]), rate, key=key))
    for z, rate, key in [(1.0, 0.1, 0), (0.7, 0.1, 0), (1.0, 0.2, 0), (3.1, 0.4, 1)]
  }
  assert len(texts) == 1


def test_a_program_holds_no_key():
  keys = [jax.random.key(2**31 + 5), jax.random.key(7)]
  programs = [
    _text(_algorithm(_plan(), loss=_drawing_loss, example_key=key)) for key in keys
  ]
  assert programs[0] == programs[1]
  assert str(2**31 + 5) not in programs[0]
  # Plain jit writes the key into its program: the reason for all this.
  algorithm = _algorithm(_plan(), loss=_drawing_loss, example_key=keys[0])
  plain = jax.jit(algorithm.step).lower(algorithm.init(_PARAMS), _BATCH).as_text()
  assert str(2**31 + 5) in plain


_AROUND = {
  "nothing": lambda fn: fn,
  "jit": jax.jit,
  "vmap": lambda fn: lambda x: jax.vmap(fn)(x[None])[0],
  "grad": lambda fn: lambda x: jax.grad(lambda y: fn(y).sum())(x) * 1.0,
  "scan": lambda fn: lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, None, 2)[0],
  "cond": lambda fn: lambda x: jax.lax.cond(x[0] > 0, fn, lambda y: y, x),
  "while": lambda fn: (
    lambda x: jax.lax.fori_loop(0, x.astype(int)[0], lambda _, c: fn(c), x)
  ),
  "remat": lambda fn: jax.grad(jax.checkpoint(lambda x: fn(fn(x)).sum())),
}


@pytest.mark.parametrize("around", _AROUND)
def test_what_a_jitted_function_inside_closes_over_is_no_constant(around):
  """A user's loss may be jitted: neither a key nor an example of its table is in the program."""
  texts, results = set(), []
  for seed in (2**31 + 5, 7):
    table, key = jnp.arange(1.0, 4.0) / float(seed), jax.random.key(seed)
    inner = jax.jit(lambda x: x * (table + jax.random.uniform(key, (3,))))
    fn = _AROUND[around](inner)
    step = jitted(fn)
    texts.add(step.lower(jnp.ones(3)).as_text())
    results.append(step(jnp.ones(3)))
    np.testing.assert_array_equal(results[-1], jax.jit(fn)(jnp.ones(3)))
  assert len(texts) == 1 and (results[0] != results[1]).all()


def test_threads_that_call_it_first_at_once_agree():
  def calls():
    arrays = [argument(float(i)) for i in range(9)]
    step = jitted(lambda x: sum((x * array for array in arrays), start=x))
    barrier = threading.Barrier(4)

    def call(n):
      barrier.wait()
      return float(step(jnp.ones(n))[0])

    with futures.ThreadPoolExecutor(4) as pool:
      return set(pool.map(call, (1, 1, 2, 2)))

  assert calls() == calls() == {37.0}


@pytest.mark.cases(quick=["white"], slow=...)
@pytest.mark.parametrize("kind", _KINDS)
def test_it_computes_what_plain_jit_computes(kind):
  algorithm = _algorithm(_plan(1.3, **_KINDS[kind]), 0.37)
  ends = []
  for step in (jax.jit(algorithm.step), jitted(algorithm.step)):
    state = algorithm.init(_PARAMS)
    for _ in range(4):
      state, _ = step(state, _BATCH)
    ends.append(state.params["w"])
  np.testing.assert_array_equal(*ends)


def test_a_state_of_another_noise_is_refused_by_the_shared_program():
  less, more = _algorithm(_plan(0.1)), _algorithm(_plan(1.0))
  assert _text(less) == _text(more)
  step = jitted(more.step)
  assert jnp.isfinite(step(more.init(_PARAMS), _BATCH)[0].params["w"]).all()
  assert jnp.isnan(step(less.init(_PARAMS), _BATCH)[0].params["w"]).all()


def test_other_shapes_get_their_own_program():
  rate = argument(0.5)
  double = jitted(lambda tree: jax.tree.map(lambda x: x / rate, tree))
  assert float(double({"a": 3.0})["a"]) == 6
  np.testing.assert_array_equal(double({"a": jnp.ones(2), "b": 1.0})["a"], [2, 2])
  np.testing.assert_array_equal(double({"a": jnp.ones(3)})["a"], [2, 2, 2])


def test_arrays_of_numpy_stay_constants():
  table = np.array([1.0, 2.0], np.float32)
  text = jitted(lambda x: x + table).lower(jnp.ones(2)).as_text()
  assert text.count("%arg") == 2  # declared once and used once


def test_an_argument_is_not_traced():
  assert not isinstance(jax.jit(lambda x: _made.append(argument(2.0)) or x)(1.0), tuple)
  assert float(_made[0]) == 2


_made = []


def test_a_number_keeps_the_precision_of_wide_leaves():
  number = Number(1 / 3)
  assert within(number, jnp.float32).dtype == jnp.float32
  with jax.enable_x64(True):
    assert within(number, jnp.float64) == 1 / 3
    assert within(Number(1 / 3), jnp.float64) == 1 / 3
    assert within(Number(1 / 3), jnp.float32).dtype == jnp.float32
  assert within(0.5, jnp.float32) == 0.5
  assert closed_over.Number(2.0) == 2


@pytest.mark.long
def test_a_sweep_compiles_one_step(tmp_path):
  def run(epsilons, name):
    words = [
      "--config=configs/sweeps/quickstart.py",
      "--config.seeds=[0]",
      f"--config.epsilons={epsilons}",
      "--config.base.num_steps=2",
      "--config.base.privacy.sampler.capacity=400",
      f"--workdir={tmp_path / name}",
    ]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    subprocess.run([sys.executable, "-m", "launch.sweep", *words], env=env, check=True)
    return {path.name for path in (tmp_path / "cache").rglob("jit_step-*-cache")}

  first = run([0.5, 1.0, 2.0, 4.0, 8.0], "a")
  assert len(first) == 1
  assert run([3.0], "b") == first


def test_a_step_for_wide_vectors_draws_the_same_bits():
  tree = [jnp.zeros((33, 7)), jnp.zeros(5)]
  draw = lambda key: dpjax.noise.source.gaussian(key, tree, 1.5)
  key = dpjax.noise.source.key_from_bytes(bytes(range(16)))
  alone = draw(key)
  for compiled in (jitted(draw), jax.jit(draw)):
    for one, other in zip(alone, compiled(key)):
      np.testing.assert_array_equal(one, other)


def test_a_jitted_function_is_a_part_of_another():
  """Options of a compiler can be given to the outermost function alone."""
  double = closed_over.jitted(lambda x: 2 * x)
  assert float(jax.jit(lambda x: double(x) + 1)(3.0)) == 7.0
  assert float(jax.lax.scan(lambda x, _: (double(x), None), 1.0, length=3)[0]) == 8.0
