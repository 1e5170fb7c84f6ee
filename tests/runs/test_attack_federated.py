"""Membership inference on a finished federated run: of its records, and of its clients."""

from __future__ import annotations

import json

import numpy as np
import pytest

from configs.fed import patients, quickstart
from dpjax.data import Federation, from_arrays
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack import fed_members, finished, members
from dpjax.experiments.kinds.attack.config import Attack, AttackConfig
from dpjax.experiments.kinds.attack.fed_members import FedMembership
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run import loop, run_keys
from tests.refuses import refuses


def _data(count, start=0, **more):
  x = np.arange(start, start + count, dtype=np.float32)[:, None]
  return from_arrays(x, np.arange(count) % 2, num_classes=2, **more)


def _federation(**more):
  return Federation(_data(9), [[0, 1, 2, 3], [], [4, 5, 6, 7, 8]], **more)


def _asked(unit, **federate):
  usual = {"partition.num_clients": 3, "clients_per_round": 2}
  target = fields.replace_all(FedConfig(), federate or usual)
  return AttackConfig(target=target, attack=FedMembership(unit=unit))


def _values(rows):
  return np.asarray(rows.records.x)[:, 0].tolist()


def test_a_test_row_is_dealt_to_the_client_whose_it_is():
  test = _data(6, start=100)
  rows = fed_members.deal(_asked("record"), _federation(), test)
  assert _values(rows) == [*range(9), *range(100, 106)] and rows.num_members == 9
  assert rows.owners[:9].tolist() == [0] * 4 + [2] * 5
  assert set(rows.owners[9:]) <= {0, 2}  # a client without rows gets none
  own = _federation(test_indices=[[0, 5], [1], [2, 3, 4]])
  rows = fed_members.deal(_asked("record"), own, test)
  assert rows.owners[9:].tolist() == [0, 1, 2, 2, 2, 0]


def test_rows_that_a_client_held_out_are_non_members_of_its_own():
  held = Federation(_data(9), [[0, 1], [2], [4, 5]], held_out=[[3], [], [6, 7]])
  rows = fed_members.deal(_asked("record"), held, _data(2, start=100))
  assert _values(rows) == [0, 1, 2, 4, 5, 100, 101, 3, 6, 7] and rows.num_members == 5
  assert rows.owners[-3:].tolist() == [0, 2, 2]


def test_as_many_further_clients_hold_the_test_rows():
  rows = fed_members.deal(_asked("client"), _federation(), _data(6, start=100))
  assert sorted(rows.owners[9:].tolist()) == [3, 3, 4, 4, 5, 5]
  named = _asked("client", partition="natural")
  with refuses("attack.unit", value="client"):
    fed_members.deal(named, _federation(), _data(6))
  skewed = _asked("client", partition="dirichlet")
  with refuses("attack.unit", value="client"):
    fed_members.deal(skewed, _federation(), _data(6))  # 10 rows for each at least


def test_a_score_of_a_client_is_the_mean_of_its_rows():
  target = members.Targets(*[None] * 9, unit_of=np.array([1, 0, 1, 2]))
  scores = target.pool(np.array([1.0, 5.0, 3.0, -1.0]))
  assert scores.tolist() == [5.0, 2.0, -1.0]
  assert target._replace(unit_of=None).pool(scores) is scores


def test_a_line_of_users_bounds_records_where_one_user_may_replace_another():
  promised = {"unit": "user", "epsilon": 4.0, "tpr_at_fpr_0.01": 0.03}
  for relation, allowed in (("add_or_remove_one", {}), ("replace_one", {0.01: 0.03})):
    told = promised | {"neighboring_relation": relation}
    facts = fed_members._of_unit(told, "record")
    assert facts["epsilon"] == 4.0 and members._allowed_tpr(None, facts) == allowed
    assert fed_members._of_unit(told, "client") == told


def test_what_a_run_simulates_bounds_nobody_in_it():
  told = {"unit": "user", "epsilon_kind": "simulated", "tpr_at_fpr_0.01": 0.03}
  assert members._allowed_tpr(None, told) == {}
  assert members._allowed_tpr(None, told | {"epsilon_kind": "claimed"}) == {0.01: 0.03}


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_a_line_of_records_bounds_no_client(relation):
  # A silo of 20 records, each 0.2-GDP, is 4-GDP: TPR .95 at 1 % FPR, where .017 was "allowed".
  told = {"unit": "record of one silo", "neighboring_relation": relation, "epsilon": 4.0}
  told |= {"tpr_at_fpr_0.01": 0.017}
  assert fed_members._of_unit(told, "record") == told
  facts = fed_members._of_unit(told, "client")
  assert facts["epsilon"] == 4.0 and members._allowed_tpr(None, facts) == {}


def test_no_two_shadows_share_a_key():
  random = run_keys.draw(0, noise_seed=1)
  several = [random, *(fed_members._keys_of(random, index) for index in range(3))]
  assert len({keys.sampler for keys in several}) == 4
  for name in ("init", "noise", "local"):
    assert len({str(getattr(keys, name)) for keys in several}) == 4


def test_a_wrong_config_is_one_line():
  Attack(_asked("record")).check()
  for change, field in (
    ({"unit": "group"}, "unit"), ({"methods": ()}, "methods"), ({"num_shadows": 3}, "num_shadows"),
    ({"methods": ("attack_network",)}, "methods[0]"),
  ):  # fmt: skip
    with refuses(field):
      FedMembership(**change)
  with refuses("target", value="train"):
    Attack(AttackConfig(attack=FedMembership())).check()


def unlearnable():
  """Points whose labels are coins: a model can only know them by heart."""
  random = np.random.default_rng(0)
  draw = lambda split: from_arrays(
    random.normal(size=(80, 100)).astype(np.float32), random.integers(0, 2, 80), num_classes=2,
    name="unlearnable", split=split,
  )  # fmt: skip
  return draw("train"), draw("test")


_RUNS = {
  "users": (quickstart, {"num_rounds": 3, "partition.num_clients": 12, "clients_per_round": 6}),
  "silos": (patients, {"data.limit": 130, "partition.sizes": (60, 40, 30), "num_rounds": 2}),
  "overfitted": (
    quickstart,
    {"privacy": "none", "num_rounds": 20, "partition.num_clients": 4, "clients_per_round": 4,
     "data.name": "tests.runs.test_attack_federated:unlearnable"},
  ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", _RUNS)
def test_a_finished_run_is_attacked_by_its_folder(tmp_path, name):
  module, overrides = _RUNS[name]
  config = fields.replace_all(module.get_config(), overrides)
  loop.train(config, tmp_path / "run")
  asked = finished.attack_on(tmp_path / "run", num_shadows=4)
  assert asked.attack.unit == ("client" if name == "users" else "record")
  result = loop.train(asked, tmp_path / "attack")
  own = json.loads((tmp_path / "run" / "result.json").read_text())
  assert result["epsilon"] == own["epsilon"] and result["unit"] == own["unit"]
  assert result["attacked_sha256"] == own["files_sha256"]["params.npz"]
  counts = {"users": 12, "silos": 130, "overfitted": 80}
  assert result["num_members"] == counts[name] and result["num_models"] == 4
  assert result["membership_of"] == asked.attack.unit
  if name == "silos":
    rows = result["silos"]
    assert [row["num_members"] for row in rows] == [60, 40, 30]
    assert [row["epsilon"] for row in rows] == [row["epsilon"] for row in own["silos"]]
    assert sum(row["num_non_members"] for row in rows) == result["num_records"] - 130
    assert "| 2 | " in (tmp_path / "attack" / "attacks.md").read_text()
  # A model that knows its rows by heart is caught, and the attack on noise finds nothing.
  low = result["strongest"]["auc_interval"][0]
  assert (low > 0.55) == (name == "overfitted")
  assert result["epsilon_lower_indicative"] <= (own["epsilon"] or np.inf)
