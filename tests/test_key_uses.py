"""No two uses share a key, in every kind of run and in every part of a notebook.

`tests/key_recorder.py` records each fold, split and draw while runs of seconds go on. JAX's own
keys have split(key, n)[i] == fold_in(key, i), so a number that two places choose may make one key.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import mechanisms, noise, training
from dpjax.data import from_arrays
from dpjax.experiments.run import loop
from dpjax.key_uses import KeyUse, key_for
from dpjax.noise import source
from dpjax.noise.gaussian import is_key_of_noise
from dpjax.training.augment import augment, flip_shift
from dpjax.zoo import recipes
from tests import key_recorder, plans
from tests.runs import small_configs


def test_every_number_is_above_all_that_is_counted():
  numbers = [int(use) for use in KeyUse]
  assert len(set(numbers)) == len(numbers)
  assert all(2**31 <= number < 2**32 for number in numbers)


@pytest.mark.parametrize("new_key", [jax.random.key, lambda _: dpjax.new_key()])
def test_no_use_is_a_step_or_a_part(new_key):
  key = new_key(5)
  words = lambda keys: {row.tobytes() for row in np.asarray(jax.random.key_data(keys))}
  uses = words(jnp.stack([key_for(use, key) for use in KeyUse]))
  assert len(uses) == len(KeyUse)
  assert uses.isdisjoint(words(jax.random.split(key, 1000)))
  for use in KeyUse:
    assert is_key_of_noise(key_for(use, key), key, num_draws=1)


def test_a_key_of_noise_is_known_by_its_words_whatever_its_generator_is():
  key = dpjax.new_key()
  bare = jax.random.wrap_key_data(jax.random.key_data(key), impl="threefry4x32")
  for own, other in ((bare, key), (key, bare)):
    assert is_key_of_noise(own, other)
    assert is_key_of_noise(jax.random.fold_in(own, 3), other, num_draws=9)
    assert is_key_of_noise(key_for(KeyUse.PAIRS, own), other, num_draws=1)
    assert not is_key_of_noise(jax.random.fold_in(own, 9), other, num_draws=9)
  assert not is_key_of_noise(jax.random.key(0), key, num_draws=9)


# --- the parts of a notebook

_X = np.random.default_rng(0).normal(size=(40, 4, 4, 1)).astype(np.float32)


_plan = functools.partial(plans.of, 40, normalize_by=20, num_steps=3)


def _loss(w, x):
  return jnp.sum((w - x) ** 2)


def _trained(plan, key, loss=_loss, **options):
  init, step = training.dp_sgd(loss, plan, optax.sgd(0.1), noise_key=key, **options)
  state, step = init(jnp.zeros((4, 4, 1))), jax.jit(step)
  for batch in plan.batches(_X, rng=1):
    state, _ = step(state, batch)
  return state


def _statistics():
  statistics = mechanisms.ChannelStatistics(normalize_by=40.0)
  plan, key = _plan(statistics=statistics), jax.random.key(3)
  statistics(key, _X)
  _trained(plan, key)


def _joint():
  joint = dpjax.JointPlan(parts={"first": _plan(), "second": _plan()}, delta=1e-4)
  for name, key in joint.keys(jax.random.key(3)).items():
    _trained(joint.parts[name], key)


def _adversarial(statistics=None, pairs=None):
  key = jax.random.key(7)
  plan = _plan(statistics=statistics)
  both = recipes.adversarial(
    lambda critic, pair: critic * jnp.sum(pair["fake"] - pair["real"]),
    lambda generator, critic, key: -critic * generator * jax.random.normal(key),
    plan,
    pair=lambda generator, key, x: {"real": x, "fake": generator + jax.random.normal(key)},
    critic_tx=optax.sgd(0.1),
    generator_tx=optax.sgd(0.1),
    noise_key=key,
    public_key=jax.random.key(99),
  )
  if statistics:
    statistics(key, _X)
  state, step = both.init(jnp.zeros(()), jnp.zeros(())), jax.jit(both.step)
  for batch in plan.batches(_X, rng=1):
    state, _ = step(state, batch)


def _with_example_keys():
  drops = lambda w, e: _loss(w, e.x * jax.random.bernoulli(e.key, 0.5, e.x.shape))
  loss = augment(drops, flip_shift, augmult=2)
  plan, key = _plan(), jax.random.key(3)
  options = {"noise_key": key, "example_key": jax.random.key(4)}
  init, step = training.dp_sgd(loss, plan, optax.sgd(0.1), **options)
  state, step = init(jnp.zeros((4, 4, 1))), jax.jit(step)
  data = from_arrays(_X, np.zeros(40, int), num_classes=2)
  for batch in plan.batches(data, rng=1):
    state, _ = step(state, batch)


_BANDED = dpjax.NoiseShape(correlation=noise.correlated.BandedToeplitz((1.0, 0.5)))
_CYCLIC = {
  "sampler": dpjax.CyclicSampler(steps_per_pass=2, num_examples=40),
  "neighboring_relation": "replace_special",
}
_ADAPTIVE = dpjax.Clip(1.0, dpjax.transforms.AdaptiveClipping())

_NOTEBOOK = {
  "plan": lambda: _trained(_plan(), jax.random.key(3)),
  "slices": lambda: _trained(_plan(slices=2), jax.random.key(3)),
  "adaptive clipping": lambda: _trained(_plan(l2_clip_norm=_ADAPTIVE), jax.random.key(3)),
  "correlated": lambda: _trained(_plan(noise_shape=_BANDED, **_CYCLIC), jax.random.key(3)),
  "own key": lambda: _trained(_plan(), dpjax.new_key()),
  "statistics": _statistics,
  "joint": _joint,
  "adversarial": _adversarial,
  "adversarial with statistics": lambda: _adversarial(
    mechanisms.ChannelStatistics(normalize_by=40.0, clip_norms=(1.0, 1.0))
  ),
  "example keys": _with_example_keys,
}


def _check(record):
  assert record.made and record.drawn
  assert record.reused() == []
  assert record.noise_drawn_twice() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", _NOTEBOOK)
def test_no_two_uses_of_a_notebook_share_a_key(name):
  with key_recorder.recording() as record:
    _NOTEBOOK[name]()
  _check(record)


# --- every kind of run

_RUNS = {
  "train": lambda: small_configs.central(),
  "train vmap": lambda: small_configs.central(grad_method="vmap"),
  "train sgd": lambda: small_configs.central(**{"privacy": "sgd"}),
  "train dp_ftrl": lambda: small_configs.central(**small_configs.FTRL),
  "train least_squares": lambda: small_configs.least_squares(),
  "train least_squares statistics": lambda: small_configs.least_squares(
    **{"privacy.normalization": small_configs.MEANS}
  ),
  "train statistics": lambda: small_configs.central(
    **{"privacy.normalization": small_configs.MEANS}
  ),
  "train dropout": lambda: small_configs.central(
    **{"model.name": "mlp", "model.options": {"features": (8,), "dropout": 0.3}}
  ),
  "train audit": lambda: small_configs.central(
    **{"audit": "canaries", "audit.num_canaries": 20}
  ),
  "train release": lambda: small_configs.central(release=True, diagnostics=True),
  "federate": lambda: small_configs.federated(),
  "federate both": lambda: small_configs.federated(**{"privacy": "both"}),
  "federate scaffold": lambda: small_configs.federated(algorithm="scaffold"),
  "federate release": lambda: small_configs.federated(release=True),
  "pate": lambda: small_configs.pate(),
  "pate cost": lambda: small_configs.pate(cost="published", std=20.0),
  "distill": lambda: small_configs.distillation(),
  "distill joint": lambda: small_configs.distillation(method="joint", student_rate=0.5),
  "synthesize": lambda: small_configs.synthesis(method=small_configs.KERNEL),
  "synthesize gan": lambda: small_configs.synthesis(method=small_configs.GAN),
  "relevance": lambda: small_configs.relevance(),
  "relevance adlm": lambda: small_configs.relevance(method="adlm"),
  "relevance dpsgd": lambda: small_configs.relevance(method="dpsgd"),
  "secure": lambda: small_configs.secure(
    **{"task.protocol": "plain", "task.num_clients": 3, "task.length": 8}
  ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", _RUNS)
def test_no_two_uses_of_a_run_share_a_key(name, tmp_path):
  config, loaded = _RUNS[name]()
  with key_recorder.recording() as record:
    loop.train(config, tmp_path, **({"data": loaded} if loaded else {}))
  assert record.reused() == []
  assert record.noise_drawn_twice() == []


# --- the recorder can find what it looks for


def _draw(key):
  return source.gaussian(key, jnp.zeros(3), 1.0)


def _one_number_for_two():
  key = jax.random.key(0)
  _draw(key_for(KeyUse.PAIRS, key))
  _draw(jax.random.fold_in(key, np.uint32(KeyUse.PAIRS)))


def _a_step_beside_a_part():
  key = jax.random.key(0)
  jax.jit(lambda step: _draw(jax.random.fold_in(key, step)))(2)
  jax.vmap(_draw)(jax.random.split(key, 4))


def _a_draw_of_two():
  key = jax.random.key(0)
  jax.random.normal(key)
  jax.random.uniform(key)


def _a_draw_of_what_is_folded():
  key = jax.random.key(0)
  jax.random.normal(key)
  jax.random.split(key)


def _a_stuck_count():
  tx = _plan().transform(jax.random.key(0))
  grads = dpjax.wrap_grads(jnp.ones((3, 2)), mask=True)
  state = tx.init(jnp.zeros(2))
  update = jax.jit(lambda state: tx.update(grads, state)[0])
  update(state), update(state)


_PLANTS = [_one_number_for_two, _a_step_beside_a_part, _a_draw_of_two]
_PLANTS += [_a_draw_of_what_is_folded, _a_stuck_count]


@pytest.mark.cases(
  slow=["_a_stuck_count", "_a_step_beside_a_part", "_one_number_for_two", "_a_draw_of_two"]
)
@pytest.mark.parametrize("plant", _PLANTS)
def test_a_planted_reuse_is_found(plant):
  with key_recorder.recording() as record:
    plant()
  assert record.reused() or record.noise_drawn_twice()
