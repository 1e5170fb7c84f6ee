"""Poisoning as a run: the public federation, unchanged but for those who lie."""

import jax
import numpy as np
import pytest

from configs.attack import poisoning_digits
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack import poisoned_rounds, table
from dpjax.experiments.kinds.attack.config import Attack
from dpjax.experiments.run import loop, run_keys
from dpjax.experiments.sweeps.sweep import Runs
from tests.refuses import refuses
from tests.runs.stops import stop_after

_PRIVATE = {
  "target.privacy": "central",
  "target.privacy.epsilon": None,
  "target.privacy.noise_multiplier": 1.0,
}


def _config(**changes):
  small = {"attack": {"name": "scaled_update", "factor": -20.0, "fraction": 0.25}}
  small |= {"target.num_rounds": 2, "target.local.epochs": 1}
  return fields.replace_all(
    fields.replace_all(poisoning_digits.get_config(), small), changes
  )


def _ran(config, folder):
  (point,) = Runs(None, config).points
  result = loop.train(point.config, folder)
  return result | {"attack": "a", "defence": "b"}


@pytest.mark.long
def test_a_poisoned_run_goes_on_where_it_stopped_and_says_what_fails(tmp_path, monkeypatch):
  config = _config()
  private = fields.get(config, "target.privacy") != "none"
  config = _config(noise_seed=0) if private else config
  whole = _ran(config, tmp_path / "whole")
  stop_after(monkeypatch, 1)
  with pytest.raises(loop.Interrupted, match="step 1"):
    _ran(config, tmp_path / "run")
  resumed = _ran(config, tmp_path / "run")
  assert resumed["params_sha256"] == whole["params_sha256"]
  assert whole["verdict"].startswith("FAILS: accuracy falls (3 attackers, its breakdown")
  assert whole["accuracy"]["count"] < whole["clean_accuracy"]["count"]
  assert whole["victims_misled"] is None and whole["epsilon"] is None
  table.write(tmp_path, [whole])
  assert (tmp_path / "attacks.png").exists()
  assert "3 of 12 clients attack" in (tmp_path / "attacks.md").read_text()


def _prepared(config):
  (point,) = Runs(None, config).points
  loaded = Attack(point.config).data()
  random = run_keys.draw(0, noise_seed=0)
  return point.config.attack.prepare(point.config, loaded, random)


def _result(config):
  """What result.json says where attackers change nothing: 9 of 10 right, none misled."""
  counts = np.array([[[9, 10], [0, 10]]] * 2)
  return config.attack.measure(config, _prepared(config), {"counts": counts}).result


@pytest.mark.long
def test_without_attackers_it_is_the_public_run_bit_for_bit_memories_included():
  changes = {"target.compression": "top_k", "target.clients_per_round": 5}
  attacked = _prepared(_config(**changes))
  run = attacked.run
  state = run.algorithm.init(run.params, 12)
  for cohort in run.algorithm.cohorts(run.federation, run.work, rng=run.random.sampler):
    state, _ = run.algorithm.round(state, cohort)
  found = poisoned_rounds.train(attacked, np.zeros(0, np.int64))
  jax.tree.map(np.testing.assert_array_equal, found, state.params)


@pytest.mark.cases(slow=["alie"], long=...)
@pytest.mark.parametrize(
  "name",
  [
    "alie",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("min_max", "min_sum")),
  ],
)
def test_attackers_who_agree_are_of_the_run_and_replace_what_they_send(name):
  """The lie is asked for in each round, of what the honest nine of twelve send."""
  prepared = _prepared(
    _config(**{"attack": {"name": name, "fraction": 0.25}, "target.num_rounds": 1})
  )
  lie, asked = prepared.attack.collude, []

  assert lie is not None

  def spied(honest):
    asked.append(honest.messages.shape)
    return 1e3 * lie(honest)

  changed = prepared._replace(attack=prepared.attack._replace(collude=spied))
  honest, moved, far = (
    poisoned_rounds.train(one, attackers)
    for one, attackers in (
      (prepared, np.zeros(0, np.int64)),
      (prepared, prepared.attackers),
      (changed, prepared.attackers),
    )
  )
  assert asked
  length = lambda params: float(
    sum(
      np.sum((np.asarray(a) - np.asarray(b)) ** 2)
      for a, b in zip(*map(jax.tree.leaves, (params, honest)))
    )
  )
  assert 0 < length(moved) < 1e-2 * length(far)


@pytest.mark.long
def test_an_epsilon_stands_where_it_binds_an_attacker(tmp_path):
  central = _ran(_config(**_PRIVATE), tmp_path / "central")
  (row,) = table.rows_of([central])
  assert row["epsilon"] > 0 and row["epsilon_kind"] == "proved"
  assert central["tolerates"] is None and "epsilon bounds one client" in row["verdict"]
  local = _config(**{**_PRIVATE, "target.privacy": "local"})
  assert "an attacker sends what it likes" in _result(local)["epsilon_note"]
  inside = {
    "target.privacy": "distributed", "target.secure_sum": "secagg",
    "target.privacy.epsilon": None,
    "target.privacy.noise_multiplier": 2.0, "target.privacy.l2_clip_norm": 0.5,
    "target.clients_per_round": 4,
  }  # fmt: skip
  assert "adds to the sum what it likes" in _result(_config(**inside))["epsilon_note"]


def test_defences_meet_the_same_attackers_on_the_same_victims():
  of_mean = _config(attack={"name": "backdoor", "size": 2, "fraction": 0.25})
  of_median = _config(**{"target.aggregator": "median"})
  one, two = _prepared(of_mean), _prepared(of_median)
  assert one.attackers.tolist() == two.attackers.tolist()
  assert [_result(config)["tolerates"] for config in (of_mean, of_median)] == [0, 5]


@pytest.mark.cases(long=[7, 8, 9])
@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"attack.fraction": 1.0}, "config.attack.fraction"),
    (
      {"attack.fraction": 0.01},
      "attack.fraction",
    ),
    ({"attack.factor": 0.0}, "config.attack.factor"),
    ({"attack": {"name": "label_flip", "target": 10}}, "attack.target"),
    ({"attack": {"name": "backdoor", "size": 8}}, "attack.size"),
    ({"attack": {"name": "scaled_update", "size": 8}}, "config.attack.size"),
    (
      {"target.algorithm": "fed_nova"},
      "target.algorithm",
    ),
    ({**_PRIVATE, "target.audit": "canaries"}, "target.audit"),
    ({"target.eval_every": 3}, "target.eval_every"),
    ({"target.num_steps": 3}, "config.target.num_steps"),
    ({"attack": {"name": "alie", "z": 0.0}}, "config.attack.z"),
    ({"attack": {"name": "min_sum", "direction": "up"}}, "config.attack.direction"),
    (
      {"attack": "alie", "target.secure_sum": "secagg"},
      "target.secure_sum",
    ),
  ],
)
def test_a_mistake_is_one_line_that_names_its_field(changes, field, tmp_path):
  with refuses(field):
    _ran(_config(**changes), tmp_path / "run")
  assert not (tmp_path / "run" / "config.json").exists()
