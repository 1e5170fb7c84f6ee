"""Attacks as runs: on the public pipeline, resumed, with the guarantee of what they attack."""

import math

import dp_accounting as dpa
import jax
import numpy as np
import optax
import pytest
from scipy import special

from configs.attack import quickstart
from dpjax import attacks, data
from dpjax.attacks import allowed
from dpjax.attacks.attack_network import attack_network
from dpjax.attacks.difficulty import quantile_regression
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack import inversion, members
from dpjax.experiments.kinds.attack.config import Attack, AttackConfig, privacy_fields
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  ModelConfig,
  Sgd,
  TrainConfig,
)
from dpjax.experiments.kinds.federated import build as federated_build
from dpjax.experiments.kinds.federated import privacy as federated_privacy
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run import guarantee as guarantees
from dpjax.experiments.run import loop, run_keys, writers
from dpjax.experiments.sweeps.sweep import Runs
from dpjax.validate import UserError
from tests.refuses import refuses
from tests.runs.stops import stop_after


def _config(**changes):
  """One attack of the quickstart, small: on its first target, or on the other one."""
  config = quickstart.get_config()
  of_clients = changes.get("attack", "membership") != "membership"
  small = {}
  if not of_clients:
    _, config = next(quickstart.get_configs(config))
    small = {"target.num_steps": 12, "target.data.limit": 60, "attack.num_shadows": 6}
    small |= {"target.model.name": "linear", "target.model.options": {}}
    small |= {"target.privacy.sampling_prob": 0.5}
  return fields.replace_all(fields.replace_all(config, small), changes)


def _point(config):
  (point,) = Runs(None, config).points
  return point.config


_PRIVATE = {"target.privacy": "dp_sgd"}
_DENSE = {"attack": "dense_first"}


def _ran(config, folder):
  return loop.train(_point(config), folder)


# --- membership


@pytest.mark.long
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
  best = whole["attacks"][whole["strongest"]["method"]]
  rates = [one["tpr_at_fpr"]["0.01"]["tpr"] for one in whole["attacks"].values()]
  assert best["tpr_at_fpr"]["0.01"]["tpr"] == whole["strongest"]["tpr"] == max(rates)
  assert whole["line"] is None and len(writers.read_metrics(tmp_path / "run")) == 7
  for name in ("config.json", "attack.npz", "roc.png", "roc.csv", "attacks.md"):
    assert (tmp_path / "run" / name).exists()
  assert {one["against_line"] for one in whole["attacks"].values()} == {None}


@pytest.mark.slow
def test_copies_of_a_record_are_asked_about_too(tmp_path):
  result = _ran(_config(**{"attack.queries": 3}), tmp_path)
  with np.load(tmp_path / "attack.npz") as held:
    odds = held["log_odds"]
  assert odds.shape == (7, 3 * 60)
  parts = np.split(odds, 3, axis=1)
  assert all(np.ptp(parts[0] - part) > 0.1 for part in parts[1:])
  assert set(result["attacks"]) == set(_config().attack.methods)


@pytest.mark.slow
def test_quantile_regression_knows_public_records_and_no_shadow(tmp_path):
  chosen = {"attack.methods": ("loss", "quantile_regression"), "attack.num_shadows": 4}
  result = _ran(_config(**chosen), tmp_path)
  assert set(result["attacks"]) == {"loss", "quantile_regression"}
  with np.load(tmp_path / "attack.npz") as held:
    log_odds = held["log_odds"]
    public = held["public_log_odds"]
    included = held["included"]
  train, test = Attack(_config(**chosen)).data()
  features = lambda part: np.column_stack(
    [part.x.reshape(len(part), -1), np.eye(10)[part.y]]
  )
  assert public.shape == (5, len(test))
  scores = [
    quantile_regression(
      odds, features(train), known_log_odds=known, known_features=features(test)
    )
    for odds, known in zip(log_odds, public)
  ]
  expected = attacks.measure(np.concatenate(scores), np.concatenate(included))
  assert result["attacks"]["quantile_regression"]["auc"] == pytest.approx(expected.auc)
  # Non-members of the one distribution exceed 0 at 1 % at most, but for chance.
  assert np.mean(np.concatenate(scores)[~np.concatenate(included)] > 0) < 0.06


@pytest.mark.slow
def test_attack_networks_learn_from_the_shadows_alone(tmp_path):
  chosen = {"attack.methods": ("loss", "attack_network"), "attack.num_shadows": 4}
  result = _ran(_config(**chosen), tmp_path)
  assert set(result["attacks"]) == {"loss", "attack_network"}
  with np.load(tmp_path / "attack.npz") as held:
    answers = held["answers"]
    included = held["included"]
    log_odds = held["log_odds"]
  train, _ = Attack(_config(**chosen)).data()
  own = np.take_along_axis(answers, np.asarray(train.y)[None, :, None], axis=2)[:, :, 0]
  np.testing.assert_allclose(special.expit(log_odds), own, rtol=1e-3, atol=1e-6)
  scores = []
  for target in range(5):
    # Not the target, and not the model that holds exactly the other records.
    kept = [i for i in range(5) if i != target and (included[i] == included[target]).any()]
    assert len(kept) == (4 if target == 4 else 3)
    known = {"shadow_answers": answers[kept], "included": included[kept]}
    scores.append(attack_network(answers[target], train.y, **known))
  expected = attacks.measure(np.concatenate(scores), np.concatenate(included))
  assert result["attacks"]["attack_network"]["auc"] == pytest.approx(expected.auc)


def test_quantile_regression_needs_public_records_of_its_own():
  target = {"attack.target": "runs/x/params.npz"}
  with refuses("config.attack.methods"):
    _config(**{"attack.methods": ("quantile_regression",), **target})


def test_copies_of_what_is_no_image_are_refused():
  point = _point(_config(**{"attack.queries": 2}))
  train, test = Attack(point).data()
  flat = data.from_arrays(
    np.asarray(train.x).reshape(len(train), -1), train.y, num_classes=10
  )
  random = run_keys.draw(0, noise_seed=0)
  with refuses("attack.queries", value=2) as caught:
    point.attack.prepare(point, (flat, test), random)
  assert "\n" not in str(caught.value)


@pytest.mark.long
def test_privacy_is_one_flag_and_brings_its_line(tmp_path):
  config = _config(**_PRIVATE, **{"target.privacy.epsilon": 0.5})
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


@pytest.mark.slow
def test_defences_are_measured_on_the_same_members():
  found = []
  for config in (_config(), _config(**_PRIVATE)):
    point = _point(config)
    loaded = Attack(point).data()
    random = run_keys.draw(0, noise_seed=0)
    found.append(point.attack.prepare(point, loaded, random))
  assert np.array_equal(found[0].included, found[1].included)
  assert 20 < found[0].included[-1].sum() < 40


def _trained(folder, **changes):
  config = TrainConfig(
    data=DataConfig(limit=60), model=ModelConfig("linear"),
    privacy=Sgd(sampling_prob=0.5), num_steps=12,
  )  # fmt: skip
  loop.train(fields.replace_all(config, changes), folder)
  return str(folder / "params.npz")


@pytest.mark.long
def test_a_finished_run_is_attacked_and_one_of_another_shape_is_refused(tmp_path):
  config = _config(**{"target.data.center": False, "attack.num_shadows": 4})
  own = _trained(tmp_path / "own")
  result = _ran(fields.replace(config, "attack.target", own), tmp_path / "attack")
  assert result["num_records"] == 60 + 360 and result["num_models"] == 4
  assert result["line"] is None
  wide = {"target.model.name": "mlp", "target.model.options": {"features": (5,)}}
  other = fields.replace_all(config, {"attack.target": own, **wide})
  with refuses("attack.target") as caught:
    _ran(other, tmp_path / "other")
  assert "\n" not in str(caught.value)
  np.savez(
    tmp_path / "shape.npz",
    **{"params/head/kernel": np.ones((3, 10)), "params/head/bias": np.ones(10)},
  )
  odd = fields.replace(config, "attack.target", str(tmp_path / "shape.npz"))
  with refuses("attack.target"):
    _ran(odd, tmp_path / "odd")


@pytest.mark.long
def test_the_epsilon_of_a_target_is_that_of_its_own_run_and_never_of_the_config(tmp_path):
  config = _config(**{"target.data.center": False, "attack.num_shadows": 4}, **_PRIVATE)
  leaky = fields.replace(config, "attack.target", _trained(tmp_path / "sgd"))
  result = _ran(leaky, tmp_path / "attack")
  assert result["epsilon"] is None and result["epsilon_kind"] == "none"
  assert result["method"] == "sgd" and result["noise_multiplier"] in (None, 0.0)
  # what the shadows guarantee says nothing of the target: it may fail
  assert {row["verdict"].split(":")[0] for row in result["attacks"].values()} <= {
    "FAILS",
    "not shown to fail",
  }
  dp = {"privacy": "dp_sgd", "privacy.epsilon": 7.0}
  own = _trained(tmp_path / "dp", **dp)
  facts = members.facts_of_run(own, _held(own), config.train)
  assert 6 < facts["epsilon"] <= 7 and facts["epsilon_kind"] == "proved"
  moved = tmp_path / "sgd" / "params.npz"
  moved.write_bytes((tmp_path / "dp" / "params.npz").read_bytes())
  facts = members.facts_of_run(str(moved), _held(moved), config.train)
  assert facts["epsilon"] is None and "no result.json" in facts["epsilon_note"]
  # Where the declaration of the same data lies does not matter.
  elsewhere = fields.replace(config.train, "data.declaration", "b.toml")
  assert members.facts_of_run(own, _held(own), elsewhere)["epsilon_kind"] == "proved"
  fewer = fields.replace(config.train, "data.limit", 40)
  with refuses("attack.target"):
    members.facts_of_run(own, _held(own), fewer)


@pytest.mark.long
def test_another_model_under_the_targets_path_is_not_taken_for_it(tmp_path):
  changes = {"target.data.center": False, "attack.num_shadows": 4}
  target = _trained(tmp_path / "own")
  config = fields.replace(_config(**changes), "attack.target", target)
  _ran(config, tmp_path / "attack")
  other = {name: value + 1 for name, value in np.load(target).items()}
  np.savez(target, **other)
  with refuses("attack.target"):
    _ran(config, tmp_path / "attack")


def _held(path):
  with np.load(path) as found:
    return {"params": {"head": {n: found[f"params/head/{n}"] for n in ("bias", "kernel")}}}


@pytest.mark.cases(long=["truncated_poisson"], slow=...)
@pytest.mark.parametrize("sampler", ["poisson", "truncated_poisson"])
def test_exact_halves_are_held_to_the_line_of_a_replaced_record(sampler):
  changes = {"target.privacy.sampler": sampler, "target.privacy.epsilon": 1.0}
  if sampler != "poisson":
    changes["target.privacy.neighboring_relation"] = "replace_special"
  point = _point(_config(**_PRIVATE, **changes))
  loaded = Attack(point).data()
  random = run_keys.draw(0, noise_seed=0)
  attacked = point.attack.prepare(point, loaded, random)
  line, once = members._line(attacked), allowed.by_plan(attacked.run.plan)
  twice = once(once([0.01, 0.3]))
  np.testing.assert_array_equal(
    line([0.01, 0.3]), once([0.01, 0.3]) if sampler == "poisson" else twice
  )


# --- inversion


@pytest.mark.long
def test_a_message_is_what_a_round_of_the_public_pipeline_is_moved_by():
  """Clients of a run with its own clipping, noise and codes, not written anew."""
  changes = {"target.compression": "quantize", "target.partition.num_clients": 1}
  changes |= {"target.clients_per_round": 1.0, "target.local.epochs": 3}
  changes |= {"target.privacy": "local", "target.privacy.epsilon": None}
  changes |= {
    "target.privacy.noise_multiplier": 0.0,
    "target.privacy.l2_clip_norm": 0.05,
  }
  config = _point(_config(**_DENSE, **changes)).federate
  loaded = federated_build.load_data(config)
  run = federated_build.assemble(config, loaded)
  state = run.algorithm.init(run.params, 1)
  (cohort,) = run.algorithm.cohorts(run.federation, run.work, rng=0)
  moved, _ = run.algorithm.round(state, cohort)
  random = run.random._replace(local=jax.random.key(9))
  attack = AttackConfig(target=config, attack="dense_first")
  attacked = attack.attack.prepare(attack, loaded, random)
  step = jax.tree.map(np.subtract, moved.params, run.params)
  sent = attacked.send(0)["delta"]
  assert float(optax.global_norm(step)) == pytest.approx(0.05, rel=0.02)
  for one, two in zip(jax.tree.leaves(step), jax.tree.leaves(sent)):
    width = float(np.ptp(one)) / 255  # codes are drawn by another key
    np.testing.assert_allclose(one, two, atol=1.01 * width + 1e-7)


@pytest.mark.long
@pytest.mark.parametrize(
  ("changes", "fails"),
  [
    ({}, True),
    ({"target.privacy": "central", "target.privacy.l2_clip_norm": 0.1}, True),
    (
      {
        "target.privacy": "local",
        "target.privacy.epsilon": None,
        "target.privacy.noise_multiplier": 2.0,
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


def test_what_the_servers_noise_promises_is_no_promise_against_it_with_own_noise_beside():
  changes = {"target.privacy": "both", "target.privacy.epsilon": None}
  changes |= {"target.privacy.noise_multiplier": 3.0}
  changes |= {"target.privacy.local_noise_multiplier": 1e-6}
  point = _point(_config(**_DENSE, **changes))
  loaded = Attack(point).data()
  random = run_keys.draw(0, noise_seed=0)
  assert "server sees every message" in point.attack.prepare(point, loaded, random).note


def test_an_inversion_states_the_guarantee_of_the_run_itself():
  changes = {"target.privacy": "central", "target.privacy.epsilon": None}
  changes |= {"target.privacy.noise_multiplier": 3.0}
  point = _point(_config(**_DENSE, **changes))
  loaded = Attack(point).data()
  random = run_keys.draw(0, noise_seed=0)
  stated = point.attack.prepare(point, loaded, random).guarantee
  of_run = federated_build.assemble_loaded(point.federate, loaded, random).guarantee
  assert stated.statement(1) == of_run.statement(1)
  assert "Dealt clients" in stated.statement(1)  # what is noted of the data, too


@pytest.mark.long
def test_a_simulated_cohort_says_what_this_very_run_costs():
  changes = {"privacy.epsilon": None, "privacy.noise_multiplier": 3.0}
  changes |= {"privacy.simulated_cohort": 100, "privacy.simulated_clients": 100_000}
  changes |= {"num_rounds": 2, "clients_per_round": 2.0, "partition.num_clients": 8}
  config = fields.replace_all(FedConfig(), changes)
  guarantee = federated_privacy.make_promise(
    config, *federated_privacy.make_plan(config, 8), 8
  )
  facts = privacy_fields(guarantee, 2)
  gaussian = dpa.GaussianDpEvent(3.0 * 2 / 100)  # the cohort of 100 has it, of 2 are here
  own = dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(2 / 8, gaussian), 2)
  accountant = dpa.pld.PLDAccountant().compose(own)
  assert facts["epsilon_kind"] == "simulated" and facts["epsilon"] < 0.1
  expected = accountant.get_epsilon(config.privacy.delta)
  assert expected > 100 and facts["epsilon_of_this_run"] == pytest.approx(
    expected, rel=0.01
  )
  claimed = privacy_fields(guarantees.as_repeatable(guarantee, 3), 2)
  assert claimed["epsilon_of_this_run"] == facts["epsilon_of_this_run"]


def test_labels_are_counted_as_sets_that_may_hold_one_twice():
  """[0, 1, 2] and [1, 2, 3] have two in common, though sorted they agree nowhere."""
  pairs = [([0, 1, 2], [1, 2, 3]), ([5, 5, 1], [5, 1, 1]), ([4, 4, 4], [4, 4, 4])]
  assert [inversion.in_common(*map(np.array, pair)) for pair in pairs] == [2, 2, 3]


# --- what is refused


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"attack.num_shadows": 1}, "attack.num_shadows=1: must be an integer in"),
    ({"attack.methods": ("lira", "lyra")}, "methods[1]='lyra'"),
    ({"attack.methods": ()}, "methods=()"),
    (
      {"attack": "dlg", "target.algorithm": "fed_prox"},
      "target.algorithm='fed_prox': must be 'fed_avg'",
    ),
    ({"target.privacy.sampling_prob": 2.0}, "target.privacy.sampling_prob=2.0"),
    ({"target.eval_every": 3}, "target.eval_every=3: would be ignored"),
    ({"target.release": True, "target.privacy": "dp_sgd"}, "target.release=True"),
    ({"target.audit": "canaries"}, "target.audit"),
    (
      {**_DENSE, "target.secure_sum": "secagg", "target.secure_sum.simulated": False},
      "target.secure_sum.simulated=False: would be ignored",
    ),
    *[
      ({"attack": "dense_first", f"target.{name}": value}, f"target.{name}={value!r}: ")
      for name, value in (("memory_budget_gb", 5.0), ("weighting", "capped"))
    ],
    (
      {"attack.target": "a.npz", "target.privacy": "dp_sgd",
       "target.privacy.epsilon_budget": 0.1},
      "target.privacy.epsilon_budget=0.1: would be ignored",
    ),
    ({"seed": -1}, "seed=-1"),
  ],
)  # fmt: skip
def test_a_wrong_config_is_one_line_that_names_its_field(changes, words):
  with pytest.raises(UserError) as caught:
    Runs(None, _config(**changes))
  assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.cases(long=[5])
@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"target.data.limit": 11}, "attack.num_shadows"),
    (
      {"target.data.limit": 61, "target.privacy.sampler": "fixed_size"},
      "target.data.limit",
    ),
    ({"attack.target": "no/such.npz"}, "attack.target"),
    (
      {"attack": "dense_first", "target.data.limit": 9},
      "target.partition.num_clients",
    ),
    ({"target.data.limit": 10**6}, "target.data.limit"),
    (
      {**_PRIVATE, "target.privacy.epsilon_budget": 1.0},
      "target.privacy.epsilon_budget",
    ),
  ],
)
def test_what_only_the_data_tell_is_one_line_that_names_its_field(changes, field, tmp_path):
  with refuses(field):
    _ran(_config(**changes), tmp_path / "run")
  assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("names", [("a, b", "a-b"), ("", "a"), ("membership, a\nb",)])
def test_rows_whose_names_are_no_folders_are_refused(names):
  config = _config()
  with refuses("get_configs"):
    Runs([(name, config) for name in names], config)


def test_a_wrong_row_of_a_table_is_named():
  base = _config()
  wrong = fields.replace(base, "target.eval_every", 3)
  with refuses("target.eval_every", value=3) as caught:
    Runs([("membership, none", base), ("membership, few", wrong)], base)
  assert "(membership, few)" in str(caught.value)


_OWN_NOISE = {
  "target.privacy": "local",
  "target.privacy.epsilon": None,
  "target.privacy.noise_multiplier": 2.0,
}
_IMPRINT = {
  "attack": "imprint",
  "target.model.options": {"features": (128,), "activation": "relu"},
}


@pytest.mark.cases(long=[1], slow=...)
@pytest.mark.parametrize(
  ("changes", "fails"),
  [
    ({"target.partition.num_clients": 2}, True),  # batches of four
    (_OWN_NOISE, False),
  ],
  ids=["batch", "own noise"],
)
def test_a_rogue_server_reads_batches_but_not_noise(changes, fails, tmp_path):
  result = _ran(_config(**_IMPRINT, **changes), tmp_path / "run")
  shares = [row["count"] / row["total"] for row in result["success"].values()]
  assert (max(shares) > 0.7) is fails


def test_a_rogue_server_needs_units_that_are_bins(tmp_path):
  smooth = {**_IMPRINT, "target.model.options": {"features": (8,)}}
  with refuses("target.model.options.activation"):
    _ran(_config(**smooth), tmp_path / "run")
