"""An attack on a finished run by its folder, and what is said of folders that are none."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from dpjax.attacks.roc import Roc, auc_interval
from dpjax.experiments.kinds.attack import finished, members, table
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from dpjax.experiments.run import loop
from tests.refuses import refuses


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs") / "own"
  config = TrainConfig(
    data=DataConfig(name="digits", limit=120),
    model=ModelConfig("linear"),
    privacy=DpSgd(epsilon=None, noise_multiplier=2.0, sampling_prob=0.2),
    optimizer=OptimizerConfig(learning_rate=0.3),
    grad_method="vmap",  # compiled in half the time
    num_steps=6,
    seed=5,
    eval_every=3,
    checkpoint_every=6,
  )
  loop.train(config, folder)
  return folder


@pytest.mark.slow
def test_a_finished_run_is_attacked_by_its_folder(run, tmp_path):
  config = finished.attack_on(run, num_shadows=4)
  assert (config.train.seed, config.train.eval_every) == (0, 100)  # of the run itself
  assert config.train.num_steps == 6 and config.attack.target == str(run / "params.npz")
  result = loop.train(config, tmp_path)
  own = json.loads((run / "result.json").read_text())
  assert result["epsilon"] == own["epsilon"] and result["epsilon_kind"] == "proved"
  # A report of the run finds the attack by this digest.
  assert result["attacked_sha256"] == own["files_sha256"]["params.npz"]
  assert result["num_members"] == 120 and result["num_models"] == 4
  assert 0 <= result["epsilon_lower_indicative"] <= result["epsilon_lower_ceiling"]
  assert {"result.json", "roc.csv", "roc.png", "attacks.md"} <= {
    path.name for path in tmp_path.iterdir()
  }
  for rates in result["attacks"].values():
    for rate in ("0.001", "0.01"):  # what the training of the target printed
      assert rates["tpr_at_fpr"][rate]["allowed_tpr"] == own[f"tpr_at_fpr_{rate}"]
  line = table.summary_of_run(result)
  assert "epsilon >= " in line and "perfect scores of 120 members would show" in line
  assert "(strongest of 6: " in line and set(result["loss_tail"]) == {"0.001", "0.01"}


@pytest.mark.parametrize(
  ("kind", "epsilon", "above"),
  [
    ("proved", 1.0, True),
    ("claimed", 1.0, True),
    ("proved", 3.0, False),
    ("none", None, False),
  ],
)
def test_a_bound_above_the_epsilon_of_a_finished_run_is_an_alarm(kind, epsilon, above):
  rates = {"tpr_at_fpr": {"0.01": {"allowed_tpr": None}}, "verdict": "leaks"}
  result = {
    "attack": "membership", "attacks": {"loss": rates | {"against_line": None}},
    "epsilon": epsilon, "epsilon_kind": kind, "unit": "example", "delta": 1e-5,
    "neighboring_relation": "add_or_remove_one", "test_accuracy": 0.9, "num_members": 9,
    "epsilon_lower_indicative": 2.0, "epsilon_lower_ceiling": 2.5,
  }  # fmt: skip
  assert table.is_above(result) == above
  line = table.summary_of_run(result)
  assert line.startswith("ALARM: ") == above
  # An epsilon without its delta and relation means nothing.
  assert (f"({kind}, delta = 1e-05, add or remove one example)" in line) == (kind != "none")


def test_perfect_scores_reach_the_ceiling():
  truth = np.arange(400) < 200
  scores = {"loss": truth + 0.0, "rmia": np.zeros(400)}
  found = members._lower_bounds(scores, truth, {"delta": 1e-5})
  assert found["epsilon_lower_indicative"] == found["epsilon_lower_ceiling"] > 3
  blind = members._lower_bounds({"rmia": np.zeros(400)}, truth, {"delta": None})
  assert blind["epsilon_lower_indicative"] == 0


def _changed(run, tmp_path, **files):
  folder = tmp_path / "copy"
  shutil.copytree(run, folder)
  for name, change in files.items():
    path = folder / name.replace("__", ".")
    if change is None:
      path.unlink()
    else:
      path.write_text(json.dumps(change(json.loads(path.read_text()))))
  return folder


@pytest.mark.cases(slow=["files0-run"])
@pytest.mark.parametrize(
  ("files", "field"),
  [
    ({"result__json": None}, "run"),
    ({"params__npz": None}, "run"),
    ({"config__json": None}, "run"),
    ({"config__json": lambda held: {"num_rounds": 3}}, "run"),
    ({"config__json": lambda held: {"rows": {}}}, "run"),
    ({"config__json": lambda held: held | {"tau": 1}}, "run"),
    ({"config__json": lambda held: held | {"seed": 9}}, "run"),
  ],
)
def test_another_folder_is_one_line(run, tmp_path, files, field):
  with refuses(field) as caught:
    finished.attack_on(_changed(run, tmp_path, **files))
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_no_folder_is_one_line(tmp_path):
  with refuses("run", value=str(tmp_path / "nowhere")[-100:]):
    finished.attack_on(tmp_path / "nowhere")


def test_a_defence_is_not_said_to_fail_by_records_that_are_counted_many_times():
  """17 targets that are asked about the same 500 records: the AUC knows 500, not 8,500."""
  weak, clear = _through(0.4, 0.452), _through(0.1, 0.9)
  assert weak.auc == pytest.approx(0.526) and clear.auc == pytest.approx(0.9)
  assert members.verdict(weak, None) == "FAILS: members are told apart"
  weak, clear = (curve._replace(num_targets=17) for curve in (weak, clear))
  assert members.verdict(weak, None) == "not shown to fail"
  assert members.verdict(clear, None) == "FAILS: members are told apart"
  low, high = auc_interval(weak, confidence=0.95)
  assert low < 0.5 < 0.526 < high


def _through(fpr, tpr, count=4250):
  """The ROC of two straight lines through one point."""
  counts = [np.array([0, round(rate * count), count]) for rate in (fpr, tpr)]
  return Roc(np.array([np.inf, 1.0, 0.0]), *counts)
