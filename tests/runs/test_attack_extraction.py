"""Extraction as a run: the public training, then copies of it."""

import jax
import numpy as np
import pytest

from configs.attack import extraction_digits
from dpjax import training
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack import table
from dpjax.experiments.kinds.attack.config import Attack
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.run import loop
from dpjax.experiments.sweeps.sweep import Runs
from tests.refuses import refuses
from tests.runs.stops import stop_after


def _config(**changes):
  small = {"target.num_steps": 8, "target.data.limit": 200}
  small |= {"target.model.name": "linear", "target.model.options": {}, "attack.steps": 100}
  small |= {"attack.learning_rate": 0.03}
  return fields.replace_all(
    fields.replace_all(extraction_digits.get_config(), small), changes
  )


def _ran(config, folder):
  (point,) = Runs(None, config).points
  result = loop.train(point.config, folder)
  return result | {"attack": "a", "defence": "b"}


@pytest.mark.long
def test_a_copy_is_made_after_a_training_that_was_cut_off(tmp_path, monkeypatch):
  whole = _ran(_config(), tmp_path / "whole")
  stop_after(monkeypatch, 3)
  with pytest.raises(loop.Interrupted, match="step 3"):
    _ran(_config(), tmp_path / "run")
  resumed = _ran(_config(), tmp_path / "run")
  assert resumed["copies"] == whole["copies"]
  few, many = whole["copies"]
  assert many["count"] > few["count"] and many["verdict"] == "FAILS: the model is copied"
  assert many["total"] == 360 - 150 and whole["epsilon"] is None
  table.write(tmp_path, [whole])
  assert (tmp_path / "attacks.png").exists()
  assert "the commonest answer" in (tmp_path / "attacks.md").read_text()


@pytest.mark.slow
def test_the_target_is_the_public_training_bit_for_bit():
  (point,) = Runs(None, _config()).points
  loaded, train = Attack(point.config).data(), point.config.train
  run = central.assemble(train, loaded)
  attacked = point.config.attack.prepare(point.config, loaded, run.random)
  ended = []
  for one in (central.phase(train, run), point.config.attack.phase(point.config, attacked)):
    state = one.init()
    for draw in one.draws(0):
      state, _ = one.step(state, draw)
    ended.append(training.eval_params(state))
  jax.tree.map(np.testing.assert_array_equal, *ended)
  asked = {row.tobytes() for row in attacked.queries}
  assert not any(row.tobytes() in asked for row in attacked.held_out)


@pytest.mark.long
def test_privacy_of_records_is_no_promise_against_a_copy(tmp_path):
  private = {"target.privacy": "dp_sgd", "target.privacy.epsilon": None}
  private |= {"target.privacy.noise_multiplier": 1.0}
  private |= {"target.num_steps": 2, "attack.num_queries": (15,), "attack.steps": 20}
  result = _ran(_config(**private), tmp_path)
  for row in table.rows_of([result]):
    assert row["epsilon"] is None and "not the model" in row["note"]


@pytest.mark.cases(long=[5, 6, 7])
@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"attack.num_queries": ()}, "config.attack.num_queries"),
    (
      {"attack.num_queries": (9, 5)},
      "config.attack.num_queries",
    ),
    ({"attack.num_queries": (360,)}, "attack.num_queries"),
    ({"attack.labels_only": True, "attack.decimals": 2}, "config.attack.decimals"),
    ({"attack.decimals": -1}, "config.attack.decimals"),
    ({"attack.learning_rate": 0.0}, "config.attack.learning_rate"),
    ({"target.eval_every": 3}, "target.eval_every"),
    ({"target.audit": "canaries"}, "target.audit"),
  ],
)
def test_a_mistake_is_one_line_that_names_its_field(changes, field, tmp_path):
  with refuses(field):
    _ran(_config(**changes), tmp_path / "run")
  assert not (tmp_path / "run" / "config.json").exists()
