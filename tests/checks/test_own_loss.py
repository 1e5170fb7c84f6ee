"""`dpjax.check` on losses of every library, and on what is none."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpjax
from dpjax import data, training
from dpjax.checks import check as own_loss
from dpjax.checks import whole_step
from dpjax.validate import UserError
from tests import plans
from tests.refuses import refuses

_N = 200


@functools.cache
def _train():
  return data.load("digits")[0].subset(slice(0, _N))


_plan = functools.partial(plans.of, 72, prob=0.1, num_steps=20, normalize_by=20)


def _entropy(logits, label):
  return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def plain():
  loss = lambda w, example: _entropy(example.x.ravel() @ w, example.y)
  return loss, jnp.zeros((64, 10)), None


class _Linen(nn.Module):
  @nn.compact
  def __call__(self, x, train=True):
    x = nn.Dropout(0.5, deterministic=not train)(x.reshape(x.shape[0], -1))
    return nn.Dense(10)(x)


def linen_dropout():
  model = _Linen()
  params = model.init(jax.random.key(0), _train().x[:1], train=False)

  def loss(params, example):
    rngs = {"dropout": example.key}
    return _entropy(model.apply(params, example.x[None], rngs=rngs)[0], example.y)

  return loss, params, jax.random.key(1)


class _Nnx(nnx.Module):
  def __init__(self, rngs):
    self.dropout = nnx.Dropout(0.5)
    self.dense = nnx.Linear(64, 10, rngs=rngs)

  def __call__(self, x, key):
    return self.dense(self.dropout(x.ravel(), deterministic=False, rngs=nnx.Rngs(key)))


def nnx_dropout():
  graph, params = nnx.split(_Nnx(nnx.Rngs(0)), nnx.Param)
  loss = lambda params, e: _entropy(nnx.merge(graph, params)(e.x, e.key), e.y)
  return loss, params, jax.random.key(1)


class _Equinox(eqx.Module):
  dense: eqx.nn.Linear
  dropout: eqx.nn.Dropout

  def __call__(self, x, key):
    return self.dense(self.dropout(x.ravel(), key=key))


def equinox_dropout():
  model = _Equinox(eqx.nn.Linear(64, 10, key=jax.random.key(0)), eqx.nn.Dropout(0.5))
  params, static = eqx.partition(model, eqx.is_inexact_array)
  loss = lambda params, e: _entropy(eqx.combine(params, static)(e.x, e.key), e.y)
  return loss, params, jax.random.key(1)


@pytest.mark.long
@pytest.mark.parametrize(
  "make",
  [
    plain,
    *(
      pytest.param(each, marks=pytest.mark.slow)
      for each in (linen_dropout, nnx_dropout, equinox_dropout)
    ),
  ],
)
def test_sound_losses_of_every_library_pass(make):
  loss, params, key = make()
  table = dpjax.check(
    loss, params, _plan(), _train(), optimizer=optax.sgd(0.1), example_key=key
  )
  assert table.ok and not table.failed, table
  assert len(table) == len(table.rows) > 15 and len(repr(table).splitlines()) == len(table)
  names = {row.name for row in table if row.passed is None}
  # What a run states, and its keys, are checks of a config: `launch.check`.
  assert not {"no key serves twice", "stated as charged"} & {row.name for row in table}
  assert "step is its parts" not in names


@pytest.mark.cases(slow=["nnx_dropout"], long=...)
@pytest.mark.parametrize("make", [linen_dropout, nnx_dropout, equinox_dropout])
def test_every_example_draws_its_own_dropout(make):
  """Examples that are alike have other gradients, at every step others; a step repeats."""
  loss, params, key = make()
  plan = _plan(noise_multiplier=0.0)
  init, step = training.dp_sgd(
    loss, plan, optax.sgd(0.1), noise_key=jax.random.key(2), example_key=key
  )
  row = _train()[np.zeros(72, int)]
  mask = jnp.arange(72) < 2
  state = init(params)
  first, info = jax.jit(step)(state, dpjax.Batch(row, mask))
  again, _ = jax.jit(step)(state, dpjax.Batch(row, mask))
  later, _ = jax.jit(step)(state._replace(step=state.step + 1), dpjax.Batch(row, mask))
  leaf = lambda state: np.asarray(max(jax.tree.leaves(state.params), key=np.size))
  np.testing.assert_array_equal(leaf(first), leaf(again))
  assert not np.array_equal(leaf(first), leaf(later))
  assert np.isfinite(float(info.train_loss))


@pytest.mark.long
def test_a_broken_part_fails_its_row_and_a_row_that_ends_in_an_error_fails():
  loss, params, _ = plain()
  plan = _plan()
  loose = dpjax.clipped_grad(loss, l2_clip_norm=100.0)

  def transform(key):
    raise RuntimeError("no transform")

  table = dpjax.check(loss, params, plan, _train(), clipped_grad=loose, transform=transform)
  failed = {row.name: row.detail for row in table.failed}
  assert "influence of one example" in failed and not table.ok
  assert "RuntimeError: no transform" in failed["noise as charged"]


class _BatchNorm(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.BatchNorm(use_running_average=False)(x.reshape(x.shape[0], -1))
    return nn.Dense(10)(x)


def linen_immutable():
  model = _BatchNorm()
  variables = model.init(jax.random.key(0), _train().x[:1])
  return lambda p, e: _entropy(model.apply(p, e.x[None])[0], e.y), variables


def linen_mutable():
  model = _BatchNorm()
  variables = model.init(jax.random.key(0), _train().x[:1])

  def loss(params, example):
    held = {**variables, "params": params}
    out, _ = model.apply(held, example.x[None], mutable=["batch_stats"])
    return _entropy(out[0], example.y)

  return loss, variables["params"]


class _NnxBatchNorm(nnx.Module):
  def __init__(self, rngs):
    self.norm = nnx.BatchNorm(64, rngs=rngs)
    self.dense = nnx.Linear(64, 10, rngs=rngs)

  def __call__(self, x):
    return self.dense(self.norm(x.reshape(1, -1)))[0]


def nnx_batch_norm():
  graph, params, others = nnx.split(_NnxBatchNorm(nnx.Rngs(0)), nnx.Param, ...)
  return lambda p, e: _entropy(nnx.merge(graph, p, others)(e.x), e.y), params


class _EquinoxBatchNorm(eqx.Module):
  norm: eqx.nn.BatchNorm
  dense: eqx.nn.Linear

  def __init__(self):
    self.norm = eqx.nn.BatchNorm(64, axis_name="batch", mode="batch")
    self.dense = eqx.nn.Linear(64, 10, key=jax.random.key(0))

  def __call__(self, x, state):
    x, state = self.norm(x.ravel(), state)
    return self.dense(x), state


def equinox_batch_norm():
  model, state = eqx.nn.make_with_state(_EquinoxBatchNorm)()
  params, static = eqx.partition(model, eqx.is_inexact_array)
  return lambda p, e: _entropy(eqx.combine(p, static)(e.x, state)[0], e.y), params


_NORMS = (linen_immutable, linen_mutable, nnx_batch_norm, equinox_batch_norm)


@pytest.mark.cases(
  long=["check-linen_immutable", "check-linen_mutable", "check-equinox_batch_norm"]
)
@pytest.mark.parametrize("make", _NORMS)
@pytest.mark.parametrize("way", ["check", "clipped_grad", "vmap", "per_example_grads"])
def test_batch_norm_ends_in_one_line(make, way):
  loss, params = make()
  batch = _train()[np.arange(4)]
  ways = {
    "check": lambda: dpjax.check(loss, params, _plan(), _train()),
    "clipped_grad": lambda: _plan().clipped_grad(loss)(params, batch, True),
    "vmap": lambda: _plan().clipped_grad(loss, method="vmap")(params, batch, True),
    "per_example_grads": lambda: dpjax.per_example_grads(loss)(params, batch),
  }
  with refuses("loss_fn") as caught:
    ways[way]()
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.slow
def test_running_averages_of_a_batch_norm_are_no_statistics_of_the_batch():
  model = nn.BatchNorm(use_running_average=True)
  variables = model.init(jax.random.key(0), jnp.ones((1, 64)))
  loss = lambda p, e: jnp.sum(model.apply({**variables, "params": p}, e.x.reshape(1, -1)))
  _plan().clipped_grad(loss)(variables["params"], _train()[np.arange(4)], True)


def test_dropout_without_a_key_ends_in_one_line():
  model = _Linen()
  params = model.init(jax.random.key(0), _train().x[:1], train=False)
  loss = lambda params, e: _entropy(model.apply(params, e.x[None])[0], e.y)
  with refuses("loss_fn"):
    dpjax.check(loss, params, _plan(), _train())


_MISUSES = {
  "data": [
    (_N * [1], "len.. and data.indices., .* got list"),
    ({"x": np.ones((9, 2)), "y": np.ones(3)}, "rows"),
    ((np.ones((9, 2)), np.ones(9)), "got tuple"),
    (5, "got int"),
    (None, "got NoneType"),
    (np.array(["a"] * 9), "of numbers"),
    (np.ones((1, 3)), "at least 2"),
  ],
  "plan": [("plan", "must be a dpjax.Plan"), (None, "must be a dpjax.Plan")],
  "loss_fn": [
    (3, "must be a function"),
    (lambda w, e: w, "scalar"),
    (lambda w, e: 1 / 0, "fails on one example of these data .ZeroDivisionError"),
    (lambda w, e: jnp.sum(w @ jnp.ones(3)), "fails on one example"),
  ],
  "params": [
    (jnp.ones((64, 10), int), "floating"),
    ({}, "must hold at least one array"),
    ("weights", "."),
  ],
  "apply": [(3, "apply=3: must be a function")],
  "optimizer": [("sgd", "must be an Optax transformation")],
  "example_key": [(3, "must be a typed key")],
  "method": [("fast", "method='fast'")],
  "microbatch_size": [(0, "microbatch_size=0")],
}


@pytest.mark.parametrize(
  ("name", "value", "message"),
  [(name, value, message) for name, each in _MISUSES.items() for value, message in each],
)
def test_misuse_ends_in_one_line(name, value, message):
  loss, params, _ = plain()
  given = {
    "loss_fn": loss,
    "params": params,
    "plan": _plan(),
    "data": _train(),
    name: value,
  }
  with pytest.raises(UserError, match=message) as caught:
    dpjax.check(**given)
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_indices_are_not_told():
  """pandas' KeyError holds the drawn rows, which are the secret of the sample."""

  class Frame:
    def __len__(self):
      return _N

    def __getitem__(self, indices):
      raise KeyError(f"None of {list(indices)} are in the columns")

  with refuses("data"):
    own_loss.check(*plain()[:2], _plan(), Frame())


def _broken(algorithm, late=0):
  """The algorithm, whose parameters move by 1 % more than they should."""

  def broken(key):
    honest = algorithm(key)

    def step(state, batch):
      after, info = honest.step(state, batch)
      more = lambda a, b: jnp.where(after.step > late, b + 1.01 * (a - b), a)
      return after._replace(params=jax.tree.map(more, after.params, state.params)), info

    return honest._replace(step=step)

  return broken


_ADAPTIVE = dpjax.Clip(1.0, dpjax.transforms.AdaptiveClipping())
_SCHEDULE = dpjax.Clip(1.0, schedule=tuple(np.linspace(1, 0.1, 8)))
_COMPARED = {
  "whole batches": ({}, False),
  "slices": ({"slices": 3}, False),
  "a key for each example": ({}, True),
  "slices and keys": ({"slices": 2}, True),
  "a clip schedule": ({"l2_clip_norm": _SCHEDULE}, False),
  "an adaptive clip": ({"l2_clip_norm": _ADAPTIVE}, False),
  "slices and a schedule": ({"slices": 2, "l2_clip_norm": _SCHEDULE}, False),
}


_QUICK = (("slices and keys", "sound"), ("slices and a schedule", "broken"))


@pytest.mark.cases(slow=[10], long=...)
@pytest.mark.parametrize(
  ("name", "kind"),
  [
    pytest.param(name, kind, marks=() if (name, kind) in _QUICK else pytest.mark.long)
    for name in sorted(_COMPARED)
    for kind in ("sound", "broken")
  ],
)
def test_an_algorithm_is_compared_whatever_the_plan_is(name, kind, monkeypatch):
  """Slices, keys and clip norms that move once dropped the argument without a word."""
  changes, is_keyed = _COMPARED[name]
  sampler = dpjax.PoissonSampler(sampling_prob=0.01, capacity=40)
  plan = _plan(**{"sampler": sampler, "normalize_by": 2, "num_steps": 8, **changes})

  def loss(w, example):
    kept = jax.random.bernoulli(example.key, 0.5, (4,)) if is_keyed else 1.0
    return jnp.sum(jnp.tanh(w * example.x.ravel()[20:24] - 1) * kept)

  def algorithm(noise_key):
    return training.dp_sgd(loss, plan, optax.sgd(0.1), noise_key=noise_key)

  if kind == "broken":
    algorithm = _broken(algorithm, late=3 if "adaptive" in name else 7)
  monkeypatch.setattr(own_loss, "checks", lambda subject: whole_step.CHECKS)
  key = jax.random.key(0) if is_keyed else None
  given = {"optimizer": optax.sgd(0.1), "example_key": key, "algorithm": algorithm}
  (row,) = dpjax.check(loss, jnp.ones(4), plan, _train(), **given)
  assert row.passed is (kind == "sound"), row


def test_an_algorithm_that_cannot_be_compared_is_one_line():
  loss, params, _ = plain()
  algorithm = lambda key: training.dp_sgd(loss, _plan(), optax.sgd(0.1), noise_key=key)
  with refuses("algorithm"):
    dpjax.check(loss, params, _plan(), _train(), algorithm=algorithm)
  plan = _plan(l2_clip_norm=_ADAPTIVE)
  given = {"algorithm": algorithm, "optimizer": optax.sgd(0.1)}
  given["clipped_grad"] = plan.clipped_grad(loss)
  with refuses("algorithm") as caught:
    dpjax.check(loss, params, plan, _train(), **given)
  assert len(str(caught.value)) < 300


def test_the_capacity_is_checked_for_the_declared_size(monkeypatch):
  """For the true one it would flip between neighbours, and `plan.batches` does not."""
  loss, params, _ = plain()
  plan = _plan()
  slots = lambda size: plan.fitted(size).sampler.padded_batch_size
  size = next(size for size in range(_N - 1, 2, -1) if slots(size) > slots(size - 1))
  train = _train().subset(slice(0, size)).declared(size - 1)
  least = plan.fitted(size - 1)
  with refuses("capacity", value=48):
    dpjax.check(loss, params, least, train.declared(None))
  monkeypatch.setattr(own_loss, "checks", lambda subject: {})
  assert dpjax.check(loss, params, least, train).ok
  assert next(least.batches(train, 0)).mask.shape == (least.sampler.padded_batch_size,)
