"""Class inversion as a run: the public training, inverted and judged by another network."""

import pytest

from configs.attack import extraction_digits
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack import table
from dpjax.experiments.run import loop
from dpjax.experiments.sweeps import attack_table
from dpjax.validate import UserError


def _ran(folder, **changes):
  small = {"rows": {}, "title": "", "train.num_steps": 40, "train.data.limit": 400}
  small |= {"train.model.name": "linear", "train.model.options": {}}
  small["attack"] = {"name": "class_inversion", "steps": 100, "judge_steps": 300}
  config = fields.replace_all(extraction_digits.get_config(), {**small, **changes})
  (point,) = attack_table.points(config)
  return loop.train(point.config, folder) | {"attack": "a", "defence": "b"}


@pytest.mark.long
def test_classes_of_a_trained_model_are_recognised_and_of_noise_not(tmp_path):
  result = _ran(tmp_path / "none")
  assert (
    result["verdict"] == "FAILS: classes are recognised" and result["judge_accuracy"] > 0.7
  )
  table.write(tmp_path, [result])
  assert "10 (" in (tmp_path / "attacks.md").read_text()
  drowned = {"train.privacy.method": "dp_sgd", "train.privacy.epsilon": None}
  drowned["train.privacy.noise_multiplier"] = 300.0
  (row,) = table.rows_of([_ran(tmp_path / "noise", **drowned)])
  assert row["verdict"] == "not shown to fail"
  assert row["epsilon"] is None and "protects one record" in row["note"]


@pytest.mark.cases(quick=[0, 1], long=...)
@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"attack.starts": 0}, "attack.starts=0"),
    ({"attack.temperature": 0.0}, "attack.temperature=0.0"),
    ({"attack.judge_steps": 0}, "attack.judge_steps=0"),
    ({"train.data.limit": 8}, "must hold every class among its training records"),
    ({"train.eval_every": 3}, "train.eval_every=3: would be ignored"),
  ],
)
def test_a_mistake_is_one_line_that_names_its_field(changes, words, tmp_path):
  with pytest.raises(UserError) as caught:
    _ran(tmp_path / "run", **changes)
  assert words in str(caught.value) and "\n" not in str(caught.value)
