"""Tasks by the target of the data: numbers and several labels, from loss to result.json."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as oracle

from dpjax import data, losses, metrics
from dpjax.data import partition
from dpjax.data.dataset import Groups
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import Attack, AttackConfig
from dpjax.experiments.kinds.central import build, facts, tasks
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run import loop, writers
from dpjax.types import Example
from tests.refuses import refuses

_RNG = np.random.default_rng(0)
_X = _RNG.uniform(0, 1, (60, 3)).astype(np.float32)
_WEIGHTS = _RNG.normal(size=(3, 2)).astype(np.float32)


def linear(params, x):
  return x @ params


def test_the_loss_of_several_labels_is_the_mean_of_binary_ones():
  """Against a float64 loop, also where exp would overflow."""
  logits = np.array([[3.0, -2.0], [-40.0, 700.0], [0.0, 0.0]])
  labels = np.array([[1, 0], [1, 1], [0, 1]])
  loss = losses.sigmoid_cross_entropy(lambda params, x: x)
  for row, label in zip(logits, labels):
    wanted = np.mean(
      [np.logaddexp(0, -z) if y else np.logaddexp(0, z) for z, y in zip(row, label)]
    )
    found = loss(None, Example(jnp.array(row, jnp.float32), jnp.array(label)))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("labels", [[1, 0, 1], 1, [[1, 0]]])
def test_labels_of_another_shape_are_refused_not_broadcast(labels):
  loss = losses.sigmoid_cross_entropy(linear)
  with refuses("example.y"):
    loss(_WEIGHTS, Example(_X[0], jnp.array(labels)))


def test_scores_of_labels_are_those_of_scikit_learn():
  y = (_RNG.random((60, 2)) < 0.5).astype(np.int32)
  rows = data.from_arrays(_X, y, target=data.Labels(("a", "b")))
  found = metrics.evaluate_labels(linear, jnp.array(_WEIGHTS), rows, batch_size=16)
  logits = _X.astype(np.float64) @ _WEIGHTS
  shares = 1 / (1 + np.exp(-logits))
  assert found["exact_match"] == pytest.approx(oracle.accuracy_score(y, logits > 0))
  assert found["accuracy"] == pytest.approx(1 - oracle.hamming_loss(y, logits > 0))
  wanted = np.mean([oracle.log_loss(y[:, k], shares[:, k]) for k in range(2)])
  assert found["loss"] == pytest.approx(wanted, rel=1e-5)


def test_a_logit_that_is_no_number_is_a_wrong_answer():
  rows = data.from_arrays(
    _X[:4], np.eye(2, dtype=int)[[0, 1, 0, 1]], target=data.Labels(("a", "b"))
  )
  found = metrics.evaluate_labels(lambda p, x: jnp.full((len(x), 2), jnp.nan), None, rows)
  assert found["accuracy"] == 0 and math.isnan(found["loss"])


def test_scores_of_numbers_are_those_of_scikit_learn_in_their_own_units():
  y = 300 * _X[:, 0] + 20 + 10 * _RNG.normal(size=60)
  rows = data.from_arrays(_X, y, target=data.Interval(0, 400))
  weights = jnp.array(_WEIGHTS[:, :1])
  found = metrics.evaluate_regression(linear, weights, rows, batch_size=7)
  predicted = (_X.astype(np.float64) @ np.asarray(weights))[:, 0] * 200 + 200
  clipped = np.clip(y, 0, 400)
  assert found["rmse"] == pytest.approx(oracle.root_mean_squared_error(clipped, predicted))
  assert found["r2"] == pytest.approx(oracle.r2_score(clipped, predicted))
  # What training lowers is the same, scaled.
  loss = losses.mean_squared_error(linear)
  each = [loss(weights, Example(x, s)) for x, s in zip(rows.x, rows.y)]
  assert found["loss"] == pytest.approx(np.mean(each), rel=1e-5)
  assert found["rmse"] == pytest.approx(200 * math.sqrt(found["loss"]))


def test_numbers_that_are_all_equal_have_no_r2():
  rows = data.from_arrays(_X[:3], [5.0] * 3, target=data.Interval(0, 10))
  assert math.isnan(metrics.evaluate_regression(linear, _WEIGHTS[:, :1], rows)["r2"])


@pytest.mark.parametrize(
  "y, target, field",
  [
    ([[0, 2]] * 2, data.Labels(("a", "b")), "y"),
    ([[0], [1]], data.Labels(("a", "b")), "y"),
    ([np.nan, 1.0], data.Interval(0, 1), "y"),
    (["a", "b"], data.Interval(0, 1), "y"),
    ([[1], [1, 2]], data.Interval(0, 1), "y"),
    ([[1.0], [2.0]], data.Interval(0, 1), "y"),
  ],
)
def test_wrong_targets_are_refused(y, target, field):
  with refuses(field):
    data.from_arrays(_X[:2], y, target=target)


def test_a_target_is_part_of_which_data_these_are():
  same = [
    data.from_arrays(_X[:2], [1.0, 3.0], target=data.Interval(0, 4)) for _ in range(2)
  ]
  half = data.from_arrays(_X[:2], [0.5, 1.5], target=data.Interval(0.0, 2.0))
  assert data.digest(same[0]) == data.digest(same[1]) != data.digest(half)
  np.testing.assert_array_equal(same[0].y, half.y)


# --- runs


def _labels():
  """Whether each of two sums of the inputs is above a half."""
  y = (_X[:, :2] > 0.5).astype(np.int32)
  rows = data.from_arrays(_X, y, target=data.Labels(("a", "b")), nominal_size=60)
  return rows, rows


def _config(name, **changes):
  config = TrainConfig(
    data=DataConfig(name=name),
    model=ModelConfig(name="linear"),
    privacy=DpSgd(epsilon=8.0, delta=1e-4, sampling_prob=0.5),
    optimizer=OptimizerConfig(learning_rate=0.5),
    num_steps=6,
    eval_every=3,
    checkpoint_every=6,
  )
  return fields.replace_all(config, changes)


@pytest.mark.slow
def test_a_private_regression_says_its_error_in_units_of_the_data(tmp_path):
  result = loop.train(_config("diabetes"), tmp_path / "run")
  assert result["task"] == "regression" and result["test_accuracy"] is None
  assert result["epsilon_kind"] == "proved" and 7 < result["epsilon"] <= 8
  test = data.load("diabetes")[1]
  # The file holds what `apply` takes: predict by hand from it.
  arrays = np.load(tmp_path / "run/params.npz")
  kernel = next(arrays[name] for name in arrays if name.endswith("kernel"))
  bias = next(arrays[name] for name in arrays if name.endswith("bias"))
  predicted = test.target.original(test.x @ kernel + bias)[:, 0]
  truth = test.target.original(test.y)
  wanted = oracle.root_mean_squared_error(truth, predicted)
  assert result["test_rmse"] == pytest.approx(wanted, rel=1e-4)
  assert result["test_r2"] == pytest.approx(oracle.r2_score(truth, predicted), abs=1e-4)
  assert f"test_rmse={wanted:.4g}"[:12] in writers.headline(result)
  rows = writers.read_metrics(tmp_path / "run")
  assert {"test_rmse", "test_r2", "test_loss"} <= set(rows[0])
  assert (tmp_path / "run/report.png").stat().st_size > 0
  assert json.loads((tmp_path / "run/result.json").read_text())["test_rmse"] > 0


def _table(common=40, shape=(3,), num_classes=2):
  """60 rows, of which `common` are of class 0."""
  x = _RNG.uniform(0, 1, (60, *shape)).astype(np.float32)
  y = np.repeat([0, 1], [common, 60 - common])
  return data.from_arrays(x, y, num_classes=num_classes, nominal_size=60)


def test_scores_by_class_of_a_table_warn_where_accuracy_says_nothing(capsys):
  rows = _table()
  always = facts.class_scores(lambda p, x: jnp.array([[1.0, 0.0]] * len(x)), None, rows)
  assert always["test_auroc"] == 0.5 and always["test_recall_by_class"] == [1.0, 0.0]
  assert always["test_largest_class"] == pytest.approx(40 / 60)
  line = capsys.readouterr().err
  assert line.startswith("warning: ") and "0.6667" in line and line.count("\n") == 1
  shares_loss = -(2 * np.log(2 / 3) + np.log(1 / 3)) / 3
  assert always["test_class_shares_loss"] == pytest.approx(shares_loss)
  assert f"{shares_loss:.4f}" in line  # the model's is np.log(1 + np.e) - 2 / 3 = 0.6466
  knows = lambda p, x: jnp.eye(2)[jnp.asarray(rows.y)[: len(x)]] if len(x) == 60 else None
  padded = lambda p, x: jnp.zeros((len(x), 2)).at[:60].set(knows(p, x[:60]))
  assert facts.class_scores(padded, None, rows)["test_auroc"] == 1
  assert not capsys.readouterr().err
  sure = lambda p, x: 20 * padded(p, x).at[0].set(jnp.array([0.0, 1.0]))
  facts.class_scores(sure, None, rows)  # right but for one row, of which it was too sure
  assert not capsys.readouterr().err
  facts.class_scores(lambda p, x: 3 * sure(p, x), None, rows)
  assert "log loss 1.0000" in capsys.readouterr().err


@pytest.mark.parametrize(
  "rows", [_table(shape=(2, 2, 1)), _table(num_classes=11), _labels()[1]]
)
def test_images_many_classes_and_labels_have_no_scores_by_class(rows):
  assert facts.class_scores(lambda p, x: None, None, rows) == {}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dp_sgd", "least_squares"])
def test_a_run_of_a_table_writes_its_scores_by_class(method, tmp_path):
  config = _config("breast_cancer", **{"optimizer.learning_rate": 4.0})
  if method == "least_squares":
    config = TrainConfig(data=config.data, model=config.model)
    config = fields.replace_all(config, {"privacy": method, "privacy.epsilon": 8.0})
  loop.train(config, tmp_path / "run")
  result = json.loads((tmp_path / "run/result.json").read_text())
  counts = np.array(result["test_confusion"])
  assert counts.sum() == len(data.load("breast_cancer")[1])
  assert result["test_accuracy"] == pytest.approx(np.trace(counts) / counts.sum())
  assert result["test_recall_by_class"] == pytest.approx(np.diag(counts) / counts.sum(1))
  assert 0.5 < result["test_auroc"] <= 1 and 0 <= result["test_calibration_error"] < 1


def test_a_private_run_of_several_labels(tmp_path):
  config = _config(f"{__name__}:_labels")
  run = build.assemble(config, _labels())
  assert run.task.name == "multi_label" and run.params["params"]["head"]["bias"].shape == (
    2,
  )
  scores = run.task.evaluate(run.apply, run.params, run.test)
  assert set(scores) == {"accuracy", "exact_match", "loss"}
  # One example's gradient is what jax.grad says of its own loss.
  example = jax.tree.map(lambda leaf: leaf[0], run.train[0:1]._replace(key=None))
  value = run.loss_fn(run.params, example)
  logits = run.apply(run.params, _X[:1])[0]
  wanted = np.mean(np.logaddexp(0, np.where(_X[0, :2] > 0.5, -logits, logits)))
  np.testing.assert_allclose(value, wanted, rtol=1e-5)


@pytest.mark.slow
def test_what_needs_classes_is_refused_before_it_trains(tmp_path):
  for change in ({"audit": "canaries"}, {"audit": "canaries", "audit.kind": "random"}):
    with refuses("audit"):
      build.assemble(_config("diabetes", **change))
  spied = AttackConfig(target=_config("diabetes"))
  with refuses("target.data.name"):
    Attack(spied).check_data(Attack(spied).data())
  fed = fields.replace_all(FedConfig(), {"data.name": "diabetes", "model.name": "linear"})
  for rule in federated.loading.BY_CLASS:
    dealt = fields.replace_all(fed, {"partition": rule, "partition.num_clients": 5})
    with refuses("partition"):
      federated.load_data(dealt)


@pytest.mark.slow
def test_numbers_are_learnt_by_clients_too(tmp_path):
  config = fields.replace_all(
    FedConfig(),
    {
      "data.name": "diabetes",
      "model.name": "linear",
      "partition.num_clients": 5,
      "clients_per_round": 5,
      "privacy": "none",
      "num_rounds": 2,
      "eval_every": 1,
    },
  )
  result = loop.train(config, tmp_path / "run")
  assert result["task"] == "regression" and result["test_rmse"] > 0
  assert result["rounds_to_accuracy"] == {"0.97": None, "0.99": None}
  assert "heterogeneity" not in result
  early = fields.replace(config, "stop_at_accuracy", 0.5)
  with refuses("stop_at_accuracy"):
    loop.train(early, tmp_path / "early")


def test_laws_of_sizes_need_no_classes():
  train, _ = data.load("diabetes")
  config = fields.replace_all(
    FedConfig(),
    {"data.name": "diabetes", "partition": "power_law", "partition.num_clients": 4},
  )
  federation, _ = federated.load_data(config)
  labels = np.zeros(len(train), np.int32)
  wanted = partition.power_law(labels, num_clients=4, exponent=1.0, seed=0)
  assert [len(rows) for rows in federation.indices] == [len(rows) for rows in wanted]


def test_scores_by_group_are_those_of_each_group_alone():
  rng = np.random.default_rng(1)
  y = (rng.random(60) < 0.4).astype(int)
  places = np.where(_X[:, 0] < 0.6, 0, 2).astype(np.int32)  # nobody is in group 1
  rows = data.from_arrays(_X, y, num_classes=2, split="test")
  rows = dataclasses.replace(rows, groups=Groups("sex", ("f", "x", "m"), places))
  found = facts.group_scores(tasks.TASKS[None], linear, _WEIGHTS, rows)["test_by_group"]
  assert found["column"] == "sex" and found["scores"]["x"] == {"rows": 0}
  logits = _X @ _WEIGHTS
  for place, name in ((0, "f"), (2, "m")):
    of = places == place
    scores = found["scores"][name]
    said = logits[of].argmax(axis=1)
    assert scores["rows"] == of.sum()
    assert scores["accuracy"] == pytest.approx(oracle.accuracy_score(y[of], said))
    assert scores["auroc"] == pytest.approx(
      oracle.roc_auc_score(y[of], logits[of, 1] - logits[of, 0])
    )
    assert scores["recall_by_class"] == pytest.approx(
      oracle.recall_score(y[of], said, average=None, zero_division=0)
    )
  assert facts.group_scores(tasks.TASKS[None], linear, _WEIGHTS, _classes()) == {}


def _classes():
  return data.from_arrays(_X, np.zeros(60, int), num_classes=2)
