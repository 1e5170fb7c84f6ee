"""Schedule-free optimizers: the average is that of the paper, resumes exactly, or is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import dpjax
from configs import quickstart
from dpjax import training
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.run import loop
from dpjax.types import Batch
from tests.refuses import refuses
from tests.runs.stops import die, stop_after

_RATE = 0.3
_CLIP = 0.5
_START = np.array([1.0, -2.0, 0.5])
_MASK = np.array([True, True, False, True])
_ROWS = np.random.default_rng(0).normal(size=(6, 4, 3))


def _loss(params, example):
  return 0.5 * jnp.sum((params["w"] - example) ** 2)


def _algorithm(tx, slices=1, **options):
  plan = dpjax.Plan(
    sampler=dpjax.PoissonSampler(sampling_prob=0.5, capacity=4 * slices),
    noise_multiplier=0.0,
    l2_clip_norm=_CLIP,
    normalize_by=3,
    num_steps=6 // slices,
    delta=1e-5,
    slices=slices,
  )
  return training.dp_sgd(_loss, plan, tx, noise_key=jax.random.key(0), **options)


def _states(tx, slices=1):
  """States after each batch, the steps compiled once."""
  init, step = _algorithm(tx, slices)
  step = jax.jit(step)
  state = init({"w": jnp.asarray(_START, jnp.float32)})
  for rows in _ROWS:
    state, _ = step(state, Batch(jnp.asarray(rows, jnp.float32), jnp.asarray(_MASK)))
    yield state


def _of_the_paper(b1, slices=1):
  """(average, point of the gradient) by Defazio et al. 2024, equations 3 to 5, in float64."""
  z = _START.copy()
  x = _START.copy()
  for step in range(len(_ROWS) // slices):
    y = (1 - b1) * z + b1 * x
    total = np.zeros(3)
    for rows in _ROWS[step * slices : (step + 1) * slices]:
      for row in rows[_MASK]:
        grad = y - row
        total += grad * min(1.0, _CLIP / np.linalg.norm(grad))
    z = z - _RATE * total / 3
    x = x + (z - x) / (step + 1)
  return x, (1 - b1) * z + b1 * x


@pytest.mark.parametrize(
  ("b1", "slices"), [(0.9, 1), pytest.param(0.5, 2, marks=pytest.mark.long)]
)
def test_what_is_evaluated_is_the_average_of_the_paper(b1, slices):
  tx = optax.contrib.schedule_free_sgd(_RATE, b1=b1)
  *_, state = _states(tx, slices)
  average, point = _of_the_paper(b1, slices)
  np.testing.assert_allclose(training.eval_params(state)["w"], average, rtol=2e-5)
  np.testing.assert_allclose(state.params["w"], point, rtol=2e-5)
  assert np.abs(average - point).max() > 1e-2


def test_a_chain_around_it_is_seen_and_another_optimizer_has_no_average():
  inside = optax.chain(optax.identity(), optax.contrib.schedule_free_sgd(_RATE, b1=0.9))
  state = _algorithm(inside).init({"w": jnp.ones(3)})
  # y = .9 x + .1 z, of which z is still 1.
  moved = state._replace(params={"w": jnp.full(3, 1.9)})
  np.testing.assert_allclose(training.eval_params(moved)["w"], 2.0, rtol=1e-6)
  init, _ = _algorithm(optax.sgd(_RATE))
  state = init({"w": jnp.zeros(3)})
  assert training.eval_params(state) is state.params


def _init(tx, params=None, **options):
  return _algorithm(tx, **options).init(params or {"w": jnp.zeros(3)})


def test_an_average_that_means_nothing_is_refused():
  free = optax.contrib.schedule_free_sgd(_RATE)
  with refuses("ema_decay", value=0.9):
    _init(free, ema_decay=0.9)
  parts = {"a": free, "b": optax.sgd(_RATE)}
  some = optax.multi_transform(parts, {"w": "a", "v": "b"})
  with refuses("tx"):
    _init(some, {"w": jnp.zeros(3), "v": jnp.zeros(2)})
  with refuses("tx"):
    _init(optax.chain(free, free))
  with refuses("params"):
    _init(free, {"w": jnp.zeros(3, jnp.bfloat16)})
  with refuses("b1", value=0.0):
    _init(optax.contrib.schedule_free_sgd(_RATE, b1=0.0))
  moved = training.of_part(_loss, free, "w".__eq__)[1]
  with refuses("tx"):
    moved.update({"w": jnp.zeros(3)}, free.init({"w": jnp.zeros(3)}), {"w": jnp.zeros(3)})


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("optimizer.schedule", "cosine"),
    ("ema_decay", 0.9),
    ("trainable", "head_first"),
    ("optimizer.rule.b1", 0.0),
    ("optimizer.rule.b1", float("nan")),
  ],
)
@pytest.mark.parametrize("rule", ["schedule_free_sgd", "schedule_free_adamw"])
def test_a_config_is_refused_in_one_line(rule, field, value):
  config = fields.replace_all(TrainConfig(), {"optimizer.rule": rule, field: value})
  with refuses(field, value=value):
    build.Central(config).check()


@pytest.mark.long
def test_a_run_that_was_stopped_goes_on_to_the_same_average(tmp_path, monkeypatch):
  small = {
    "optimizer.rule": "schedule_free_adamw",
    "optimizer.learning_rate": 0.05,
    "num_steps": 6,
    "eval_every": 3,
    "checkpoint_every": 2,
    "model.name": "linear",
    "model.options": {},
    "data.limit": 400,
    "noise_seed": 0,
  }
  config = fields.replace_all(quickstart.get_config(), small)
  whole = loop.train(config, tmp_path / "whole")
  stop_after(monkeypatch, 3, die)
  with pytest.raises(KeyboardInterrupt):
    loop.train(config, tmp_path / "cut")
  resumed = loop.train(config, tmp_path / "cut")
  for key in ("params_sha256", "test_accuracy", "test_loss", "epsilon"):
    assert resumed[key] == whole[key]
  # The last point of the gradients is another model.
  last = fields.replace_all(config, {"optimizer.rule": "adam"})
  assert loop.train(last, tmp_path / "last")["params_sha256"] != whole["params_sha256"]
