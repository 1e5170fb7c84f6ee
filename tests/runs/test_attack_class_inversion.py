"""Class inversion as a run: the public training, inverted and judged by another network."""

import pytest

from configs.attack import extraction_digits
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack import table
from dpjax.experiments.run import loop
from dpjax.experiments.sweeps.sweep import Runs
from tests.refuses import refuses


def _ran(folder, **changes):
  small = {"target.num_steps": 40, "target.data.limit": 400}
  small |= {"target.model.name": "linear", "target.model.options": {}}
  small["attack"] = {"name": "class_inversion", "steps": 100, "judge_steps": 300}
  config = fields.replace_all(
    fields.replace_all(extraction_digits.get_config(), small), changes
  )
  (point,) = Runs(None, config).points
  return loop.train(point.config, folder) | {"attack": "a", "defence": "b"}


@pytest.mark.long
def test_classes_of_a_trained_model_are_recognised_and_of_noise_not(tmp_path):
  result = _ran(tmp_path / "none")
  assert (
    result["verdict"] == "FAILS: classes are recognised" and result["judge_accuracy"] > 0.7
  )
  table.write(tmp_path, [result])
  assert "10 (" in (tmp_path / "attacks.md").read_text()
  drowned = {"target.privacy": "dp_sgd", "target.privacy.epsilon": None}
  drowned["target.privacy.noise_multiplier"] = 300.0
  (row,) = table.rows_of([_ran(tmp_path / "noise", **drowned)])
  assert row["verdict"] == "not shown to fail"
  assert row["epsilon"] is None and "protects one record" in row["note"]


@pytest.mark.cases(quick=[0, 1], long=...)
@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"attack.starts": 0}, "config.attack.starts"),
    ({"attack.temperature": 0.0}, "config.attack.temperature"),
    ({"attack.judge_steps": 0}, "config.attack.judge_steps"),
    ({"target.data.limit": 8}, "target.data.name"),
    ({"target.eval_every": 3}, "target.eval_every"),
  ],
)
def test_a_mistake_is_one_line_that_names_its_field(changes, field, tmp_path):
  with refuses(field):
    _ran(tmp_path / "run", **changes)
