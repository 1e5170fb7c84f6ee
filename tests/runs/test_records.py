"""Record-level privacy across silos, from config to result.json."""

import dataclasses
import functools
import json
import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy import stats

from configs.fed import patients
from dpjax import sampling
from dpjax.accounting import Ledger
from dpjax.accounting.calibration import Unreachable
from dpjax.accounting.event_kinds.kind import event_from_json
from dpjax.accounting.ledger import BudgetExceeded
from dpjax.data import partition
from dpjax.experiments.config import fields
from dpjax.experiments.config.naming import naming
from dpjax.experiments.kinds.federated import build, records
from dpjax.experiments.run import loop, run_keys, writers
from dpjax.experiments.run.guarantee import RATES, REPEATED
from dpjax.experiments.sweeps import cost
from dpjax.plan import Plan
from tests.refuses import refuses
from tests.runs.stops import stop_after

_SIZES = (60, 40, 30)


def _config(**overrides):
  usual = {
    "data.limit": 130,
    "partition.sizes": _SIZES,
    "local.batch_size": 20,
    "num_rounds": 4,
    "eval_every": 2,
    "checkpoint_every": 2,
    "noise_seed": 3,
  }
  return fields.replace_all(patients.get_config(), {**usual, **overrides})


def _ready(config):
  build.check(config)
  with naming(config):
    return build.assemble_loaded(
      config, build.load_data(config), run_keys.draw(0, noise_seed=0)
    )


def test_the_statement_names_the_deal_which_one_row_more_changes():
  """The epsilon is of a record of a silo, not of a row of the data set that was dealt."""
  fed = _ready(_config())
  assert "partition=silos" in fed.guarantee.statement(4)
  labels = np.asarray(fed.federation.dataset.y)
  deal = functools.partial(partition.silos, num_clients=3, seed=0, sizes=_SIZES, skew=0.5)
  before, after = deal(labels), deal(np.append(labels, 1))
  assert sum(len(np.setdiff1d(*silos)) for silos in zip(before, after)) > 10


def test_silos_of_unequal_size_have_noise_of_their_own_for_one_epsilon():
  fed = _ready(_config())
  plans = fed.silos.plans
  assert [plan.sampler.sampling_prob for plan in plans] == [20 / size for size in _SIZES]
  assert [plan.num_steps for plan in plans] == [12, 8, 8]  # round(30 / 20) is 2
  assert all(0.999 < epsilon <= 1 for epsilon in fed.silos.epsilons())
  noise = [plan.noise_multiplier for plan in plans]
  assert noise[0] < noise[1] < noise[2]
  assert fed.guarantee.curve(4) == max(fed.silos.epsilons()) > fed.guarantee.curve(2)
  statement = fed.guarantee.statement(4)
  assert "Lowy and Razaviyayn" in statement and "one program simulated" in statement
  for size, plan in zip(_SIZES, plans):
    # A noise is rounded down, which claims no more.
    noise = f"{math.floor(1e4 * plan.noise_multiplier) / 1e4:.4f}"
    assert f"{size}" in statement and noise in statement


def test_epsilons_of_a_config_are_those_of_its_silos():
  config = _config(**{"privacy.epsilons": (0.5, 1.0, 2.0)})
  each = _ready(config).silos.epsilons()
  assert each == pytest.approx((0.5, 1.0, 2.0), rel=1e-2)


def test_a_person_in_several_silos():
  one = _ready(_config())
  two = _ready(_config(**{"privacy.max_silos_per_record": 2}))
  assert one.guarantee.curve(4) < two.guarantee.curve(4) < 2 * one.guarantee.curve(4)
  assert "at most 2 silos" in two.guarantee.statement(4)
  assert two.guarantee.unit == "person with one record in each of 2 silos"
  assert "one silo's record only" in one.guarantee.statement(4)


def test_a_delta_that_gives_a_record_of_the_largest_silo_away_is_warned_of(capsys):
  # 1 / 60 < .02 < 1 / 30: the smallest silo alone would not warn.
  for delta in (0.01, 0.02):
    _ready(_config(**{"privacy.delta": delta})).guarantee.warn()
    assert ("publishing one record" in capsys.readouterr().err) == (delta == 0.02)


def test_the_number_of_records_is_declared_and_never_counted():
  config = _config()
  federation, _ = build.load_data(config)
  fewer = [rows[: len(rows) - 1] for rows in federation.indices]
  less = dataclasses.replace(federation, indices=fewer)
  one, other = (records.make(config, each) for each in (federation, less))
  assert one == other and one.sizes == _SIZES
  undeclared = dataclasses.replace(federation, nominal_sizes=None)
  with refuses("privacy.num_examples", value=None):
    records.make(config, undeclared)
  public = {"privacy.neighboring_relation": "replace_special"}
  assert records.make(fields.replace_all(config, public), undeclared).sizes == _SIZES
  empty = dataclasses.replace(undeclared, indices=[*federation.indices[:2], np.arange(0)])
  with refuses("partition", value="silos"):
    records.make(fields.replace_all(config, {**public, "local.batch_size": None}), empty)
  half = dataclasses.replace(
    federation, indices=[federation.indices[0][:20], *federation.indices[1:]]
  )
  with refuses("partition.sizes", value=60) as caught:
    records.make(config, half)
  assert "in the order 0, 1, 2" in caught.value.hint


def test_the_partition_deals_declared_sizes():
  labels = np.array([0, 1] * 50)
  silos = partition.silos(labels, num_clients=3, seed=0, sizes=(60, 30, 10), skew=0.8)
  assert [len(rows) for rows in silos] == [60, 30, 10]
  assert sorted(np.concatenate(silos).tolist()) == list(range(100))
  shares = [labels[rows].mean() for rows in silos]
  assert shares[0] < 0.5 < shares[1] and shares[2] < 0.5
  even = partition.silos(labels, num_clients=3, seed=0)
  assert sorted(map(len, even)) == [33, 33, 34]
  with refuses("sizes", value=(3, 4)):
    partition.silos(labels, num_clients=3, seed=0, sizes=(3, 4))
  with refuses("sizes[2]", value=0):
    partition.silos(labels, num_clients=3, seed=0, sizes=(3, 4, 0))


def test_a_silo_of_one_record_and_one_without_a_test_of_its_own():
  config = _config(**{"partition.sizes": (100, 29, 1), "local.batch_size": None})
  fed = _ready(config)
  assert fed.silos.plans[2].sampler.sampling_prob == 1 and fed.silos.plans[2].num_steps == 4
  phase = build.phase(fed)
  assert "test_silo_accuracy" not in phase.evaluate(phase.init())  # one has no test row


@pytest.mark.parametrize(
  ("overrides", "field", "value"),
  [
    ({"algorithm": "mime_lite"}, "algorithm", "mime_lite"),
    ({"algorithm": "fed_sgd"}, "algorithm", "fed_sgd"),
    ({"audit": "canaries"}, "audit", "canaries"),
    ({"clients_per_round": 2}, "clients_per_round", 2.0),
    ({"local.max_examples": 5}, "local.max_examples", 5),
    ({"privacy.epsilons": (1.0,)}, "privacy.epsilons", (1.0,)),
    ({"privacy.num_examples": (1, 2, 3)}, "privacy.num_examples", (1, 2, 3)),
    ({"privacy.max_silos_per_record": 4}, "privacy.max_silos_per_record", 4),
    ({"privacy.absent": 1.0}, "privacy.absent", 1.0),
    ({"release": True, "noise_seed": None}, "release", True),
    ({"stop_at_accuracy": 0.9}, "stop_at_accuracy", 0.9),
    ({"client_optimizer.rule": "adam", "algorithm": "scaffold"},
     "client_optimizer.rule", "adam"),
  ],
)  # fmt: skip
def test_a_wrong_input_is_one_line_before_any_data(overrides, field, value):
  with refuses(field, value=value):
    build.check(_config(**overrides))


def test_a_wrong_input_of_a_silo_names_its_field_and_the_silo():
  with refuses("local.batch_size", value=31) as caught:
    _ready(_config(**{"local.batch_size": 31}))
  assert "silo '2'" in str(caught.value)
  with refuses("privacy.epsilon", error=Unreachable) as caught:
    _ready(_config(**{"privacy.epsilon": 1e-9, "privacy.delta": 1e-12}))
  assert "silo '0'" in str(caught.value)
  with refuses("privacy.epsilon_budget", value=0.5, error=BudgetExceeded):
    _ready(_config(**{"privacy.epsilon_budget": 0.5})).guarantee.check_budget(Ledger())
  # Each batch of a fixed size must leave a record out, of a silo that may have one less.
  with refuses("local.batch_size", value=30):
    fixed = {"privacy.sampler": "fixed_size", "local.batch_size": 30}
    _ready(_config(**fixed, **{"privacy.neighboring_relation": "add_or_remove_one"}))


def test_a_silo_allows_an_attacker_what_its_own_steps_do():
  """Steps on all records of a silo are Gaussian DP: four at noise 8 have mu = 2 / 8."""
  sampler = sampling.PoissonSampler(sampling_prob=1.0, capacity=30)
  plan = Plan(
    sampler=sampler, noise_multiplier=8.0, l2_clip_norm=1.0, normalize_by=30, num_steps=10,
    delta=1e-3,
  )  # fmt: skip
  rates = records._rates(plan, 4)
  for name, fpr in RATES.items():
    exact = stats.norm.cdf(stats.norm.ppf(fpr) + 0.25)
    assert exact <= rates[name] <= 1.01 * exact + 0.1 * plan.delta  # of aborts
  assert records._rates(plan, 0) == RATES  # a guess


def _alone(ledger, delta):
  """Epsilon of each noise key by dp_accounting alone, from the JSON of a ledger."""
  found = {}
  for charge in ledger["charges"]:
    accountant = found.setdefault(
      charge["noise_key_id"],
      PLDAccountant(dpa.NeighboringRelation.ADD_OR_REMOVE_ONE),
    )
    accountant.compose(event_from_json(charge["event"]), charge["num_steps"])
  return [accountant.get_epsilon(0.95 * delta) for accountant in found.values()]


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["fed_avg", "fed_prox", "scaffold", "mr_mtl"])
def test_a_run_resumes_bit_for_bit_and_pays_for_what_ran(tmp_path, monkeypatch, algorithm):
  config = _config(algorithm=algorithm, **{"privacy.absent": 0.3, "privacy.lost": 0.2})
  whole = loop.train(config, tmp_path / "whole")
  stop_after(monkeypatch, 3)
  with pytest.raises(loop.Interrupted):
    loop.train(config, tmp_path / "run")
  resumed = loop.train(config, tmp_path / "run")
  for name in ("params_sha256", "ledger", "epsilon", "silos", "files_sha256"):
    assert resumed[name] == whole[name], name
  lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "run")]
  assert lines[0] == lines[1]
  assert whole["epsilon_kind"] == "claimed" and REPEATED in whole["failed_assumptions"]
  each = [row["epsilon"] for row in whole["silos"]]
  ran = [row["num_steps"] for row in whole["silos"]]
  full = [12, 8, 8]
  assert all(count <= most for count, most in zip(ran, full)) and ran != full
  by_key = {charge["noise_key_id"] for charge in whole["ledger"]["charges"]}
  assert len(by_key) == sum(count > 0 for count in ran)
  alone = _alone(
    json.loads((tmp_path / "whole" / "result.json").read_text())["ledger"], 1e-3
  )
  assert sorted(e for e in each if e) == pytest.approx(sorted(alone), rel=1e-3)
  accuracies = [whole[f"test_silo_accuracy/{name}"] for name in "012"]
  assert whole["test_silo_accuracy_worst"] == min(accuracies)
  assert whole["test_silo_accuracy_mean"] == pytest.approx(np.mean(accuracies))
  row = writers.read_metrics(tmp_path / "whole")[-1]
  assert row["test_silo_accuracy/2"] == accuracies[2]
  own = [(tmp_path / "whole" / f"params_of_silo_{k}.npz").exists() for k in range(3)]
  assert own == [algorithm == "mr_mtl"] * 3


@pytest.mark.slow
def test_a_run_draws_keys_of_its_own_and_is_proved(tmp_path):
  config = _config(noise_seed=None, num_rounds=2, **{"privacy.epsilon": 3.0})
  one, other = (loop.train(config, tmp_path / name) for name in ("a", "b"))
  assert one["params_sha256"] != other["params_sha256"]
  assert one["epsilon_kind"] == "proved" and one["unit"] == "record of one silo"
  assert one["epsilon"] == max(row["epsilon"] for row in one["silos"]) <= 3
  assert one["neighboring_relation"] == "add_or_remove_one" and one["delta"] == 1e-3
  line = build.Federated(config).line(one)
  assert "per record of one silo" in line and "silos: epsilon 0: " in line
  again = loop.train(config, tmp_path / "a")
  assert again["params_sha256"] == one["params_sha256"]


@pytest.mark.long
def test_a_secure_sum_on_top_changes_no_epsilon(tmp_path):
  config = _config(algorithm="fed_avg")
  plain = loop.train(config, tmp_path / "plain")
  summed = fields.replace_all(config, {"secure_sum": "secagg"})
  result = loop.train(summed, tmp_path / "summed")
  assert result["epsilon"] == plain["epsilon"]
  arrays = [np.load(tmp_path / name / "params.npz") for name in ("plain", "summed")]
  for name in arrays[0].files:
    np.testing.assert_allclose(arrays[0][name], arrays[1][name], atol=1e-4)


@pytest.mark.long
def test_without_noise_nothing_is_promised(tmp_path):
  none = {"privacy.epsilon": None, "privacy.noise_multiplier": 0.0}
  result = loop.train(_config(**none), tmp_path / "run")
  assert result["epsilon_kind"] == "none" and result["epsilon"] is None
  assert math.isfinite(result["test_loss"])
  # A table has the scores of a central run.
  confusion = np.array(result["test_confusion"])
  assert np.trace(confusion) / confusion.sum() == pytest.approx(result["test_accuracy"])
  assert 0 <= result["test_auroc"] <= 1


def test_the_size_of_own_data_is_not_counted_for_equal_silos(tmp_path):
  random = np.random.default_rng(0)
  held = {
    f"x_{part}": random.normal(size=(n, 2)) for part, n in (("train", 90), ("test", 9))
  }
  held |= {f"y_{part}": np.arange(n) % 2 for part, n in (("train", 90), ("test", 9))}
  np.savez(tmp_path / "own.npz", **held, num_classes=2)
  own = {
    "data.name": str(tmp_path / "own.npz"),
    "data.limit": None,
    "data.center": False,
    "partition.sizes": None,
  }
  with refuses("privacy.num_examples"):
    _ready(_config(**own))
  fed = _ready(_config(**own, **{"privacy.num_examples": (30, 30, 30)}))
  assert fed.silos.sizes == (30, 30, 30)


def test_an_aggregator_that_needs_more_silos_is_refused_before_the_first_round():
  with refuses("aggregator.num_byzantine"):
    _ready(_config(aggregator="krum"))


def test_persons_of_several_silos_are_not_summed_over_other_partitions():
  for limit, together in (1, 2.0), (2, None):
    config = _config(**{"privacy.max_silos_per_record": limit, "noise_seed": None})
    promised = _ready(config).guarantee
    run = {"status": "done", "population": "a", **promised.facts(Ledger(), 1.0)}
    assert run["unit"] == promised.unit
    assert cost.charge([run, run])["epsilon"] == 2.0
    assert cost.charge([run, {**run, "population": "b"}])["epsilon"] == together


def test_the_charges_of_many_rounds_are_those_of_each_round():
  promised = _ready(_config(**{"privacy.absent": 0.5, "num_rounds": 8})).guarantee
  step_by_step = Ledger()
  for t in range(8):
    step_by_step = promised.charge(step_by_step, range(t, t + 1), noise_key_id="key")
  here = [promised.silos.attendance.of(t, 3)[0] for t in range(8)]
  each = [promised.silos.steps_per_round(k) * sum(h[k] for h in here) for k in range(3)]
  assert promised.ran(step_by_step) == tuple(each) == promised.silos.num_steps()
  at_once = promised.charge(Ledger(), range(8), noise_key_id="key")
  assert at_once == step_by_step
  rest = promised.charge(Ledger(), range(3), noise_key_id="key")
  assert promised.charge(rest, range(3, 8), noise_key_id="key") == at_once
