"""privacy='least_squares' from a config to result.json: charges, words, refusals."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest

from dpjax import mechanisms
from dpjax.accounting import Ledger
from dpjax.accounting.event_kinds import elements
from dpjax.experiments.checks import of_config
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build, one_release, privacy
from dpjax.experiments.kinds.central.config import LeastSquares, TrainConfig
from dpjax.experiments.run import folder, loop, provenance, run_keys
from dpjax.experiments.run import workdir as owner
from dpjax.mechanisms.least_squares import joint_sensitivity
from tests.refuses import refuses

_SMALL = {
  "model.name": "linear",
  "data.limit": 300,
  "privacy": "least_squares",
  "privacy.epsilon": 4.0,
}
_STATISTICS = {
  "name": "private_statistics",
  "noise_multiplier": 2.0,
  "clip_norms": (1.0, 1.0),
}


def _config(**changes):
  named = {name.replace("__", "."): value for name, value in changes.items()}
  return fields.replace_all(fields.replace_all(TrainConfig(), _SMALL), named)


@pytest.fixture(scope="module")
def loaded():
  return build.load_data(_config())


def _trained(config, folder, loaded):
  result = loop.train(config, folder, data=loaded)
  return result, dict(np.load(folder / "params.npz"))


@pytest.mark.slow
def test_a_run_is_one_gaussian_release_and_says_so(loaded, tmp_path):
  result, params = _trained(_config(), tmp_path / "run", loaded)
  ledger = Ledger.from_json(result["ledger"])
  assert ledger.num_steps == result["num_steps"] == 1
  wanted = mechanisms.analytic_noise_multiplier(result["epsilon"], 1e-5)
  assert result["noise_multiplier"] == pytest.approx(wanted, rel=1e-3)
  assert 3.9 < result["epsilon"] <= 4.0 and result["epsilon_kind"] == "proved"
  assert result["l2_clip_norm"] == pytest.approx(2**0.5)
  statement = result["privacy_statement"]
  assert "Released once, over all examples: the sums of x x^T" in statement
  assert "set aside" not in statement and "sample" not in statement
  # 300 examples of 8x8 images; .1 is chance.
  assert result["test_accuracy"] > 0.7
  # The weights are those of the mechanism on these rows with this key.
  train = loaded[0]
  config = _config()
  held = owner.recall(tmp_path / "run")
  random = run_keys.from_meta(config.seed, held)
  plan = privacy.make_plan(config, 300)
  released = one_release.mechanism(config, plan, 10)(
    jax.random.fold_in(random.noise, 0), train.x, mechanisms.centred_labels(train.y, 10)
  )
  kernel = params["params/head/kernel"]
  np.testing.assert_allclose(kernel, released.ridge(0.3), rtol=1e-5, atol=1e-6)
  # A second call finds it finished, with the same weights.
  again = loop.train(config, tmp_path / "run", data=loaded)
  assert again["params_sha256"] == result["params_sha256"]


@pytest.mark.slow
def test_statistics_of_the_inputs_are_part_of_the_same_epsilon(loaded, tmp_path):
  config = _config(privacy__normalization=_STATISTICS)
  result, params = _trained(config, tmp_path / "run", loaded)
  assert 3.9 < result["epsilon"] <= 4.0
  charge = Ledger.from_json(result["ledger"]).charges[0].event
  multipliers = [getattr(part, "noise_multiplier", 0.0) for part in elements.parts(charge)]
  assert pytest.approx(2 / 2**0.5) in multipliers
  assert result["noise_multiplier"] in [pytest.approx(value) for value in multipliers]
  assert "statistics/mean" in params


def test_replace_one_pays_the_joint_bound_and_not_two_rows(loaded):
  config = _config(privacy__neighboring_relation="replace_one")
  plan = privacy.make_plan(config, 300)
  releasing = one_release.mechanism(config, plan, 10)
  joint = joint_sensitivity(1.0, "replace_one")
  # What is added is what is charged: std / sensitivity is that of the exact formula.
  assert releasing.stds[0] / joint == pytest.approx(plan.noise_multiplier / 2)
  wanted = mechanisms.analytic_noise_multiplier(plan.epsilon(), 1e-5)
  assert plan.noise_multiplier / 2 == pytest.approx(wanted, rel=1e-3)
  added = privacy.make_plan(_config(), 300)
  assert releasing.stds[0] < 2 * one_release.mechanism(_config(), added, 10).stds[0]


@pytest.mark.slow
def test_few_public_directions_give_a_model_of_all_inputs(loaded, tmp_path):
  config = _config(privacy__directions=20, release=True)
  result, params = _trained(config, tmp_path / "run", loaded)
  kernel = params["params/head/kernel"]
  assert kernel.shape == (64, 10) and np.linalg.matrix_rank(kernel) <= 20
  assert result["directions"] == 20 and result["test_accuracy"] > 0.4
  assert "Release mode." in result["privacy_statement"]
  assert "Each noisy sum is rounded to multiples of" in " ".join(
    result["privacy_statement"].split()
  )
  with refuses("privacy.directions"):
    many = _config(privacy__directions=65)
    loop.train(many, tmp_path / "many", data=loaded)


def test_empty_records_are_left_out(loaded):
  train = loaded[0]
  present = np.ones(len(train), bool)
  present[5] = False
  config = _config(privacy__neighboring_relation="replace_special")
  random = build.Central(config).new_keys()
  weights = []
  for part in (dataclasses.replace(train, present=present), train.subset(present)):
    work = one_release.phase(config, (part, loaded[1]), random)
    state, _ = work.step(work.init(), None)
    weights.append(np.asarray(state["params"]["params"]["head"]["kernel"]))
  # One has 300 rows of which one is empty, the other 299: the sums are equal.
  assert np.array_equal(*weights)


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"privacy__sampling_prob": 0.1}, "config.privacy.sampling_prob"),
    ({"augmentation": "mirror"}, "augmentation"),
    ({"num_steps": 3}, "num_steps"),
    ({"optimizer__learning_rate": 1.0}, "optimizer.learning_rate"),
    (
      {"privacy__noise_multiplier": 0.0, "privacy__epsilon": None},
      "privacy.noise_multiplier",
    ),
    ({"audit": "canaries"}, "audit"),
    (
      {"privacy": "dp_sgd", "privacy__ridge": 1.0},
      "config.privacy.ridge",
    ),
    (
      {"privacy__moment_weight": -1.0},
      "privacy.moment_weight",
    ),
    (
      {"privacy__moment_weight": 1e-9},
      "privacy.moment_weight",
    ),
    (
      {"privacy__feature_norm": 1e40},
      "privacy.feature_norm",
    ),
    ({"privacy__epsilon": 0.0}, "privacy.epsilon"),
  ],
)
def test_what_is_not_proved_or_read_is_refused_in_one_line(changes, field):
  if changes.get("augmentation"):
    changes = {"augmentation": next(iter(build.AUGMENTATIONS))}
  with refuses(field) as caught:
    build.Central(_config(**changes)).check()
  assert "\n" not in str(caught.value)


_READ: set[str] = set()


@dataclasses.dataclass
class _Watched(TrainConfig):
  """Notes which fields a run reads. What goes over all fields, such as config.json, reads none."""

  ignored: int = 0  # a new field, of which least squares knows nothing

  def __getattribute__(self, name):
    module = sys._getframe(1).f_globals["__name__"]
    if module.startswith(("dpjax.experiments.kinds.", "dpjax.experiments.run.")):
      _READ.add(name)
    return super().__getattribute__(name)


def test_every_field_of_a_config_is_read_or_said_to_be_left_out(tmp_path, monkeypatch):
  """A check alone reads nothing: a field that is only found valid would be ignored."""
  # It reads all code, and no config.
  monkeypatch.setattr(provenance, "own_modules", dict)
  noise = {"privacy.epsilon": None, "privacy.noise_multiplier": 2.0}
  experiment = build.Central(fields.replace_all(_Watched(), {**_SMALL, **noise}))
  _READ.clear()
  experiment.train(experiment.data(), experiment.new_keys())
  with folder.Folder(experiment, tmp_path / "run").take():
    pass
  known = {field.name for field in dataclasses.fields(_Watched)}
  assert known - _READ - {*LeastSquares.leaves_out} == {"ignored"}
  assert {*LeastSquares.leaves_out} <= known


def test_other_models_and_other_uses_are_refused(loaded, tmp_path):
  with refuses("model.name", value="mlp"):
    loop.train(_config(model__name="mlp"), tmp_path / "mlp", data=loaded)
  with refuses("privacy"):
    build.assemble(_config(), loaded)
  with refuses("privacy"):
    of_config.subject(_config(), loaded)


def test_its_budget_is_kept_before_anything_is_released(loaded, tmp_path):
  with refuses("privacy.epsilon_budget"):
    loop.train(_config(privacy__epsilon_budget=1.0), tmp_path / "over", data=loaded)
  assert not (tmp_path / "over" / "params.npz").exists()


@pytest.mark.slow
def test_result_holds_the_ordinary_keys(loaded, tmp_path):
  _trained(_config(), tmp_path / "run", loaded)
  result = json.loads((tmp_path / "run" / "result.json").read_text())
  for key in ("epsilon", "delta", "mu", "test_accuracy", "method", "task", "device"):
    assert result[key] is not None
  rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  assert json.loads(rows[-1])["step"] == 1
