"""A run in which nothing usable arrives says so; a release says nothing of it."""

import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart
from configs.fed import quickstart as fed_quickstart
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.federated.config import AGGREGATORS, ALGORITHMS
from dpjax.experiments.run import checkpoint, loop, writers
from dpjax.experiments.run import left_out as left_out_lib
from dpjax.experiments.run.left_out import Arrivals, Tally
from dpjax.validate import UserError

HERE = "tests.runs.test_left_out"


def diverging(apply):
  """A loss whose gradient is NaN for every example."""

  def loss_fn(params, example):
    logits = apply(params, example.x[None])[0]
    return jnp.sqrt(-jnp.sum(logits**2) - 1)

  return loss_fn


def odd_labels_diverge(apply):
  """A loss whose gradient is NaN for half of the classes."""

  def loss_fn(params, example):
    logits = apply(params, example.x[None])[0]
    return jnp.where(example.y % 2 == 1, jnp.nan, 1.0) * jnp.sum((logits - 1) ** 2)

  return loss_fn


def _central(**more):
  small = {
    "num_steps": 4, "eval_every": 2, "checkpoint_every": 2, "model.name": "linear",
    "model.options": {}, "data.limit": 300, "grad_method": "vmap",
    "loss": f"{HERE}:diverging",
  }  # fmt: skip
  noise = {"privacy.epsilon": None, "privacy.noise_multiplier": 2.0}
  return fields.replace_all(
    fields.replace_all(quickstart.get_config(), {**small, **noise}), more
  )


def _federated(**more):
  small = {
    "num_rounds": 2, "eval_every": 1, "checkpoint_every": 1, "data.limit": 150,
    "partition.num_clients": 30, "clients_per_round": 12.0, "local.batch_size": 4,
    "local.epochs": 1, "privacy": "none", "privacy.sampler": "fixed_size",
    "privacy.delta": 1e-5,
    "loss": f"{HERE}:diverging",
  }  # fmt: skip
  return fields.replace_all(fields.replace_all(fed_quickstart.get_config(), small), more)


def _ends(config, folder, capsys):
  """Asserts that a run ends in one line, without a result, and that it goes on to the same end."""
  for _ in range(2):
    with pytest.raises(UserError) as caught:
      loop.train(config, folder)
    assert "\n" not in str(caught.value) and "could be used" in str(caught.value)
  assert not (folder / writers.RESULT).exists()
  rows = writers.read_metrics(folder)
  assert checkpoint.newest(folder) == rows[-1]["step"]
  assert all(row["not_private/left_out"] > 0 for row in rows)
  return rows, capsys.readouterr().err


@pytest.mark.parametrize(
  "more",
  [
    {},
    pytest.param({"grad_method": "auto"}, marks=pytest.mark.slow),
    pytest.param({"microbatch_size": 7}, marks=pytest.mark.slow),
    pytest.param({"slices": 2}, marks=pytest.mark.slow),
    pytest.param({"privacy": "sgd"}, marks=pytest.mark.slow),
    pytest.param(
      {"privacy.clipping": "automatic", "ema_decay": 0.9}, marks=pytest.mark.slow
    ),
  ],
  ids=str,
)
def test_a_central_run_without_a_finite_example_ends(more, tmp_path, capsys):
  rows, said = _ends(_central(**more), tmp_path / "run", capsys)
  assert all(np.isnan(row["not_private/train_loss"]) for row in rows)
  assert all(row["not_private/left_out"] == row["not_private/batch_size"] for row in rows)
  assert said.count("were left out") == 1  # once in a run, however many steps it has


def test_some_examples_left_out_are_counted_and_the_run_goes_on(tmp_path, capsys):
  result = loop.train(_central(loss=f"{HERE}:odd_labels_diverge"), tmp_path / "run")
  rows = writers.read_metrics(tmp_path / "run")
  shares = [r["not_private/left_out"] / r["not_private/batch_size"] for r in rows]
  assert all(0.3 < share < 0.7 for share in shares)
  assert result["not_private/left_out"] > sum(r["not_private/left_out"] for r in rows)
  assert all(np.isfinite(row["not_private/mean_norm"]) for row in rows)
  assert "left out" not in capsys.readouterr().err


@pytest.mark.cases(slow=["{'release': True}"])
@pytest.mark.parametrize("more", [{"release": True}, {"diagnostics": False}], ids=str)
def test_where_diagnostics_are_off_nothing_of_it_is_said(more, tmp_path, capsys):
  result = loop.train(_central(**more), tmp_path / "run")
  assert "not_private" not in json.dumps(result)
  assert "not_private" not in json.dumps(writers.read_metrics(tmp_path / "run"))
  assert "left out" not in capsys.readouterr().err


_SLOW_DOORS = (
  [
    # Mime-lite's server has no optimizer, so its settings stay at their defaults.
    {"algorithm": name, "server_optimizer.rule": {"name": "sgd", "momentum": 0.0}}
    for name in ALGORITHMS
    if name not in ("fed_avg", "fed_bn")
  ]
  + [{"algorithm": "fed_bn", "algorithm.kept": "bias"}]
  + [{"aggregator": name} for name in AGGREGATORS if name != "mean"]
  + [{"secure_sum": "secagg"}, {"compression": "quantize"}, {"weighting": "examples"}]
)
_PRIVATE = {"privacy.epsilon": None, "privacy.noise_multiplier": 1.0}
_SLOW_DOORS += [{"privacy": m, **_PRIVATE} for m in ("central", "local")]
_SLOW_DOORS += [
  {
    "privacy": "distributed",
    "secure_sum": {"name": "secagg", "bits": 16},
    **_PRIVATE,
  }
]


@pytest.mark.parametrize(
  "more",
  [{}, *(pytest.param(door, marks=pytest.mark.slow) for door in _SLOW_DOORS)],
  ids=str,
)
def test_a_federated_run_without_a_finite_message_ends(more, tmp_path, capsys):
  rows, said = _ends(_federated(**more), tmp_path / "run", capsys)
  assert all(row["not_private/num_clients"] == 0 for row in rows)
  assert all(row["not_private/left_out"] == 12 for row in rows)
  assert said.count("were left out") == 1


@pytest.mark.slow
def test_a_release_of_a_federated_run_says_nothing_of_it(tmp_path, capsys):
  more = {"privacy": "central", "release": True, **_PRIVATE}
  result = loop.train(_federated(**more), tmp_path / "run")
  assert "not_private" not in json.dumps(result)
  assert "left out" not in capsys.readouterr().err


@pytest.mark.slow
def test_cut_coordinates_are_counted_and_warned_of_once(tmp_path, capsys):
  """The count is that of a run without a secure sum whose messages are compared with the bound."""
  more = {"loss": "auto", "secure_sum": {"name": "secagg", "largest_value": 1e-3}}
  result = loop.train(_federated(**more), tmp_path / "run")
  rows = writers.read_metrics(tmp_path / "run")
  cut = [row["not_private/coordinates_cut"] for row in rows]
  assert all(0 < count <= 12 * 650 for count in cut)
  assert result["not_private/coordinates_cut"] == sum(cut)
  assert capsys.readouterr().err.count("were cut to") == 1


@pytest.mark.slow
def test_refused_rounds_are_counted_and_all_of_them_end_the_run(tmp_path, capsys):
  summed = {"name": "secagg", "threshold": 0.9, "dropout_prob": 0.1}
  config = _federated(**{"loss": "auto", "secure_sum": summed, "num_rounds": 8})
  result = loop.train(config, tmp_path / "run")
  rows = writers.read_metrics(tmp_path / "run")
  refused = sum(row["not_private/rounds_refused"] for row in rows)
  assert result["not_private/rounds_refused"] == refused > 0
  assert capsys.readouterr().err.count("was refused, and moved nothing") == refused


# --- the counts themselves, without a run


def test_sums_survive_a_checkpoint_and_nothing_used_is_refused():
  read = lambda used: Arrivals(used, 5 - used, coordinates_cut=2)
  first = Tally(read, "examples")
  first.add(1, 3)
  second = Tally(read, "examples")
  second.resume(first.to_meta())
  second.add(2, 0)
  assert second.settle() == Arrivals(3, 7, 4, 0)
  second.check(2)
  nothing = Tally(read, "examples")
  nothing.add(1, 0)
  with pytest.raises(UserError):
    nothing.check(1)
  nothing.check(0)  # a run without steps has nothing to use


def test_rows_are_counted_where_every_array_is_finite():
  x = np.array([[1.0, np.inf], [1.0, 2.0], [0.0, 0.0]])
  y = np.array([1.0, np.nan, 2.0])
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert left_out_lib.of_rows(x, y) == Arrivals(1, 2)
    assert left_out_lib.of_rows(np.zeros((0, 3))) == Arrivals(0, 0)
