"""Attacks as runs: on the public pipeline, resumed, with the promise of what they attack."""

import math

import jax
import numpy as np
import optax
import pytest

from configs.attack import quickstart
from dpjax import data
from dpjax.runs import fields, loop, streams, writers
from dpjax.runs.attack import build, inversion, members
from dpjax.runs.attack.config import AttackConfig, other
from dpjax.runs.central.config import DataConfig, ModelConfig, PrivacyConfig, TrainConfig
from dpjax.runs.federated import build as federated_build
from dpjax.sweeps import attack_table
from dpjax.validate import UserError
from tests.runs.stops import stop_after


def _config(**changes):
  """The quickstart without its rows, small, and without the room that is not attacked."""
  config = quickstart.get_config()
  small = {"rows": {}, "title": "", "train.num_steps": 12, "train.data.limit": 60}
  small |= {"train.model.name": "linear", "train.model.options": {}}
  small |= {"train.privacy.sampling_prob": 0.5}
  if "attack" not in changes:
    small |= {"attack.num_shadows": 6}
  config = fields.replace_all(config, small)
  setattr(config, other(config), type(getattr(config, other(config)))())
  if "attack" in changes:
    config.federate = quickstart.get_config().federate
    config.train = TrainConfig()
  return fields.replace_all(config, changes)


def _point(config):
  (point,) = attack_table.points(config)
  return point.config


_PRIVATE = {"train.privacy.method": "dp_sgd"}
_DENSE = {"attack": "dense_first"}


def _ran(config, folder):
  return loop.train(_point(config), folder)


# --- membership


def test_a_membership_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
  config = _config()
  whole = _ran(config, tmp_path / "whole")
  stop_after(monkeypatch, 3)
  with pytest.raises(loop.Interrupted, match="step 3"):
    _ran(config, tmp_path / "run")
  resumed = _ran(config, tmp_path / "run")
  assert resumed["params_sha256"] == whole["params_sha256"]
  assert resumed["attacks"] == whole["attacks"] and set(writers.RESULT_KEYS) <= set(whole)
  assert whole["num_models"] == 7 and whole["epsilon_kind"] == "none"
  assert whole["line"] is None and len(writers.read_metrics(tmp_path / "run")) == 7
  for name in ("config.json", "attack.npz", "roc.png", "roc.csv", "attacks.md"):
    assert (tmp_path / "run" / name).exists()
  assert {one["against_line"] for one in whole["attacks"].values()} == {None}


def test_privacy_is_one_flag_and_brings_its_line(tmp_path):
  config = _config(**_PRIVATE, **{"train.privacy.epsilon": 0.5})
  result = _ran(config, tmp_path)
  assert 0.45 < result["epsilon"] <= 0.5 and result["epsilon_kind"] == "proved"
  assert result["line"].startswith("proved by pld, add_or_remove_one")
  curves = result["curves"]
  assert all(
    a <= min(1, math.exp(0.5) * f + 1e-4) for a, f in zip(curves["allowed"], curves["fpr"])
  )
  for one in result["attacks"].values():
    assert one["against_line"] in ("below", "cannot tell")
    assert one["verdict"] == "not shown to fail"


def test_defences_are_measured_on_the_same_members():
  found = []
  for config in (_config(), _config(**_PRIVATE)):
    point = _point(config)
    loaded = build.load_data(point)
    random = streams.derived(0, build.digest(point), data.digest(loaded[0]))
    found.append(members.prepare(point, loaded, random))
  assert np.array_equal(found[0].included, found[1].included)
  assert 20 < found[0].included[-1].sum() < 40


def _trained(folder, **changes):
  config = TrainConfig(
    data=DataConfig(limit=60), model=ModelConfig("linear"),
    privacy=PrivacyConfig(method="sgd", sampling_prob=0.5), num_steps=12,
  )  # fmt: skip
  loop.train(fields.replace_all(config, changes), folder)
  return str(folder / "params.npz")


def test_a_finished_run_is_attacked_and_one_of_another_shape_is_refused(tmp_path):
  config = _config(**{"train.data.center": False, "attack.num_shadows": 4})
  own = _trained(tmp_path / "own")
  result = _ran(fields.replace(config, "attack.target", own), tmp_path / "attack")
  assert result["num_records"] == 60 + 360 and result["num_models"] == 4
  assert result["line"] is None
  wide = {"train.model.name": "mlp", "train.model.options": {"features": (5,)}}
  other = fields.replace_all(config, {"attack.target": own, **wide})
  with pytest.raises(UserError, match="was trained elsewhere: ") as caught:
    _ran(other, tmp_path / "other")
  assert "\n" not in str(caught.value)
  np.savez(
    tmp_path / "shape.npz",
    **{"params/head/kernel": np.ones((3, 10)), "params/head/bias": np.ones(10)},
  )
  odd = fields.replace(config, "attack.target", str(tmp_path / "shape.npz"))
  with pytest.raises(UserError, match=r"kernel is \(3, 10\) there, \(64, 10\) in"):
    _ran(odd, tmp_path / "odd")


# --- inversion


def test_a_message_is_what_a_round_of_the_public_pipeline_is_moved_by():
  """Clients of a run with its own clipping, noise and codes, not written anew."""
  changes = {"federate.compression": "quantize", "federate.partition.num_clients": 1}
  changes |= {"federate.clients_per_round": 1.0, "federate.local.epochs": 3}
  changes |= {"federate.privacy.method": "local", "federate.privacy.epsilon": None}
  changes |= {
    "federate.privacy.noise_multiplier": 0.0,
    "federate.privacy.l2_clip_norm": 0.05,
  }
  config = _point(_config(**_DENSE, **changes)).federate
  loaded = federated_build.load_data(config)
  run = federated_build.assemble(config, loaded)
  state = run.algorithm.init(run.params, 1)
  (cohort,) = run.algorithm.cohorts(run.federation, run.work, rng=0)
  moved, _ = run.algorithm.round(state, cohort)
  random = run.random._replace(local=jax.random.key(9))
  attacked = inversion.prepare(
    AttackConfig(federate=config, attack="dense_first"), loaded, random
  )
  step = jax.tree.map(np.subtract, moved.params, run.params)
  sent = attacked.send(0)["delta"]
  assert float(optax.global_norm(step)) == pytest.approx(0.05, rel=0.02)
  for one, two in zip(jax.tree.leaves(step), jax.tree.leaves(sent)):
    width = float(np.ptp(one)) / 255  # codes are drawn by another key
    np.testing.assert_allclose(one, two, atol=1.01 * width + 1e-7)


@pytest.mark.parametrize(
  ("changes", "fails"),
  [
    ({}, True),
    ({"federate.privacy.method": "central", "federate.privacy.l2_clip_norm": 0.1}, True),
    (
      {
        "federate.privacy.method": "local",
        "federate.privacy.epsilon": None,
        "federate.privacy.noise_multiplier": 2.0,
      },
      False,
    ),
  ],
  ids=["none", "server's noise", "own noise"],
)
def test_a_defence_that_fails_is_said_to_fail(changes, fails, tmp_path):
  result = _ran(_config(**_DENSE, **changes), tmp_path)
  count = 8 if fails else 0
  assert result["success"]["exact"]["count"] == count
  assert result["verdict"].startswith("FAILS: 8 of 8" if fails else "not shown to fail")
  assert set(result["leakage"]) == {"recovered", "dense", "distance"}
  assert (result["leakage"]["dense"]["score"] > 0.999) == fails
  assert (tmp_path / "reconstructions.png").exists()
  assert bool(result["epsilon_note"]) == ("central" in changes.values())


# --- what is refused


_ROW = "rows['a, b']"


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"attack.num_shadows": 1}, "attack.num_shadows=1: must be an integer in"),
    ({"attack.methods": ("lira", "lyra")}, "methods='lyra'"),
    ({"attack.methods": ()}, "methods=()"),
    (
      {"attack": "dlg", "federate.algorithm": "fed_prox"},
      "federate.algorithm='fed_prox': must be 'fed_avg'",
    ),
    ({"train.privacy.sampling_prob": 2.0}, "train.privacy.sampling_prob=2.0"),
    ({"train.eval_every": 3}, "train.eval_every=3: would be ignored"),
    ({"train.release": True, "train.privacy.method": "dp_sgd"}, "train.release=True"),
    ({"train.audit.enabled": True}, "train.audit.enabled=True"),
    ({"beside": {"nobody": ".8"}}, "beside['nobody']: is no row"),
    ({"rows": {"a, b": {"federate.aggregator": "secure_sum"}}}, "no secure sum yet"),
    ({"rows": {"a, b": {"train.no_such": 1}}}, "no_such"),
    ({"rows": {"a, b": {"title": "x"}}}, f"{_ROW}.title: would be ignored"),
    (
      {"rows": {"a, b": {"train.privacy.epsilon": -1.0}}},
      f"{_ROW}: train.privacy.epsilon=-1.0",
    ),
    ({"rows": {"a, b": {}, "a-b": {}}}, "runs of the same name"),
    ({"seed": -1}, "seed=-1"),
  ],
)  # fmt: skip
def test_a_wrong_config_is_one_line_that_names_its_field(changes, words):
  with pytest.raises(UserError) as caught:
    attack_table.points(_config(**changes))
  assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"train.data.limit": 11}, "train.data.limit=11: leaves 11 records, of which too few"),
    (
      {"train.data.limit": 61, "train.privacy.sampler": "shuffled"},
      "train.data.limit=61: leaves 61 records, which must be even",
    ),
    ({"attack.target": "no/such.npz"}, "attack.target='no/such.npz': is no params.npz"),
    (
      {"attack": "dense_first", "federate.data.limit": 9},
      "federate.partition.num_clients=8: deals 1 to 2 examples to a client",
    ),
    ({"train.data.limit": 10**6}, "train.data.limit=1000000: must be"),
    (
      {**_PRIVATE, "train.privacy.epsilon_budget": 1.0},
      "train.privacy.epsilon_budget=1.0:",
    ),
  ],
)
def test_what_only_the_data_tell_is_one_line_that_names_its_field(changes, words, tmp_path):
  with pytest.raises(UserError) as caught:
    _ran(_config(**changes), tmp_path / "run")
  assert words in str(caught.value) and "\n" not in str(caught.value)
  assert not (tmp_path / "run" / "config.json").exists()


def test_a_room_that_no_row_attacks_is_refused():
  with pytest.raises(UserError, match="federate.data.limit=8: would be ignored, it needs"):
    attack_table.points(_config(**{"federate.data.limit": 8}))
