"""Scores of each client: of the model that it uses, on rows of its own."""

import csv
import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from configs.fed import quickstart
from dpjax.data import Federation, from_arrays
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.federated import build, client_scores, loading
from dpjax.experiments.kinds.federated.client_scores import Score, summary
from dpjax.experiments.run import loop, run_keys, writers
from tests.refuses import refuses
from tests.runs.stops import stop_after


def _config(**overrides):
  usual = {
    "data.limit": 300,
    "privacy": "none",
    "partition": "dirichlet_hsu",
    "partition.num_clients": 6,
    "clients_per_round": 6,
    "num_rounds": 2,
    "held_out": 0.3,
    "eval_every": 1,
    "checkpoint_every": 1,
  }
  return fields.replace_all(quickstart.get_config(), {**usual, **overrides})


def _ready(config):
  build.check(config)
  return build.assemble_loaded(
    config, build.load_data(config), run_keys.draw(0, noise_seed=0)
  )


def _after(fed, rounds):
  state = fed.algorithm.init(fed.params, fed.federation.num_clients)
  cohorts = fed.algorithm.cohorts(fed.federation, fed.work, rng=fed.random.sampler)
  for _ in range(rounds):
    state, _ = fed.algorithm.round(state, next(cohorts))
  return state


def _accuracies(fed, models):
  """Of a linear model on the rows that each client held out, by NumPy."""
  found = []
  for params, rows in zip(models, fed.federation.held_out):
    head = jax.tree.map(np.asarray, params)["params"]["head"]
    x, y = (
      fed.federation.dataset.x[rows].reshape(len(rows), -1),
      fed.federation.dataset.y[rows],
    )
    found.append(np.mean(np.argmax(x @ head["kernel"] + head["bias"], axis=1) == y))
  return found


def test_rows_are_held_out_by_the_client_alone():
  data = from_arrays(np.zeros((12, 1)), np.zeros(12, int), num_classes=1)
  rows = {"a": [0, 1, 2, 3, 4], "b": [5], "c": [], "d": [6, 7], "e": [8, 9, 10, 11]}
  federation = Federation(data, [*rows.values()], [*rows])
  split = loading._holding_out(federation, 0.25)
  assert [len(part) for part in split.held_out] == [1, 0, 0, 1, 1]
  for name, trained, held in zip(rows, split.indices, split.held_out):
    assert sorted([*trained, *held]) == rows[name]
  without = dataclasses.replace(
    federation, indices=federation.indices[1:], client_ids=federation.client_ids[1:]
  )
  fewer = loading._holding_out(without, 0.25)
  # Another client changes nobody else's rows, or the guarantee would not hold.
  for one, other in zip(split.indices[1:], fewer.indices):
    np.testing.assert_array_equal(one, other)
  assert loading._holding_out(federation, 0.0) is federation


def test_the_summary_counts_clients_without_rows_and_says_what_chance_does():
  scores = [
    Score("a", 4, 0.75),
    Score("b", 1, 0.0),
    Score("c", 0, math.nan),
    Score("d", 5, 1.0),
  ]
  facts = summary(scores)
  values, sizes = np.array([0.75, 0.0, 1.0]), np.array([4, 1, 5])
  assert facts["num_scored"] == 3 and facts["without_rows"] == 1
  assert facts["fewest_rows"] == 1 and facts["worst"] == 0 and facts["p50"] == 0.75
  assert facts["mean"] == pytest.approx(values.mean()) and facts["weighted_mean"] == 0.8
  assert facts["std"] == pytest.approx(values.std(ddof=1))
  draws = np.random.default_rng(0).binomial(sizes, 0.8, (20_000, 3)) / sizes
  assert facts["std_by_chance"] == pytest.approx(
    np.sqrt(draws.var(axis=0).mean()), rel=0.02
  )


def test_clients_are_scored_by_the_models_that_they_use():
  fed = _ready(_config(**{"algorithm": "fed_bn", "algorithm.kept": "bias"}))
  phase, state = build.phase(fed), _after(fed, 1)
  kept = state.memories.all()["params"]["head"]["bias"]
  kernel = state.params["params"]["head"]["kernel"]
  models = [{"params": {"head": {"kernel": kernel, "bias": bias}}} for bias in kept]
  wanted = _accuracies(fed, models)
  row = phase.evaluate(state)
  assert row["client_accuracy_worst"] == pytest.approx(min(wanted))
  assert row["client_accuracy_mean"] == pytest.approx(np.mean(wanted))
  assert row["client_accuracy_p10"] == pytest.approx(np.quantile(wanted, 0.1))
  facts = phase.describe(state, {"epsilon": None}, [])["client_scores"]
  assert facts["model"] == "its own" and facts["std"] == pytest.approx(
    np.std(wanted, ddof=1)
  )
  assert not np.allclose(kept[0], kept[1])


@pytest.mark.slow
def test_fine_tuning_starts_from_the_servers_model_and_changes_no_run():
  config = _config(fine_tune_epochs=2)
  fed, phase = _ready(config), None
  phase, state = build.phase(fed), _after(fed, 1)
  facts = phase.describe(state, {"epsilon": None}, [])
  assert facts["client_scores"]["model"] == "the server's"
  alone = fields.replace_all(config, {"num_rounds": 1, "local.epochs": 2})
  models = []
  # Its work is that of a client in the round after the last, alone.
  for client in range(6):
    own = _ready(alone)
    from dpjax.federated.cohort import LocalWork, cohort_of

    work = LocalWork(config.local.batch_size, 2, None)
    cohort = cohort_of(
      fed.federation, [client], work, seed=fed.random.sampler, round=config.num_rounds
    )
    started = own.algorithm.init(state.params, 6)
    models.append(own.algorithm.round(started, cohort)[0].params)
  wanted = _accuracies(fed, models)
  tuned = facts["client_scores_fine_tuned"]
  assert tuned["mean"] == pytest.approx(np.mean(wanted))
  assert tuned["worst"] == pytest.approx(min(wanted))
  assert f"fine-tuned mean {tuned['mean']:.4f}" in client_scores.in_words(facts)


def _private(**overrides):
  return _config(
    **{
      "privacy": "central",
      "privacy.epsilon": 8.0,
      "privacy.delta": 1e-2,
      "noise_seed": 1,
      **overrides,
    }
  )


@pytest.mark.parametrize("algorithm", ["fed_avg", "apfl"])
def test_where_users_are_protected_scores_of_clients_are_not_private(algorithm):
  config = _private(algorithm=algorithm)
  fed = _ready(config)
  phase, state = build.phase(fed), _after(fed, 0)
  assert not any("client" in name for name in phase.evaluate(state))
  facts = phase.describe(state, {"epsilon": 8.0}, [])
  assert "not_private/client_scores" in facts and "client_scores" not in facts
  told = "keeps a model" in " ".join(fed.guarantee.statement(1).split())
  assert told == (algorithm == "apfl")
  quiet = fields.replace_all(config, {"diagnostics": False, "held_out": 0.0})
  phase = build.phase(_ready(quiet))
  assert not any("client_s" in name for name in phase.describe(state, {"epsilon": 8.0}, []))


def test_silos_of_a_run_that_hides_them_are_scored_by_the_servers_model():
  """Its test rows and the names of its silos are public; models of their own are not covered."""
  silos = {"partition": "silos", "partition.num_clients": 3, "held_out": 0.0}
  for algorithm in ("fed_avg", "mr_mtl"):
    config = _private(algorithm=algorithm, clients_per_round=3, **silos)
    fed = _ready(config)
    row = build.phase(fed).evaluate(_after(fed, 0))
    assert ("silo_accuracy/0" in row) == (algorithm == "fed_avg")


@pytest.mark.parametrize(
  ("overrides", "field"),
  [
    ({"held_out": 1.0}, "held_out"),
    ({"partition": "silos"}, "held_out"),
    ({"fine_tune_epochs": 1, "algorithm": "apfl"}, "fine_tune_epochs"),
    ({"fine_tune_epochs": -1}, "fine_tune_epochs"),
    ({"privacy": "central", "diagnostics": False}, "held_out"),
    ({"privacy": "central", "release": True}, "held_out"),
    ({"privacy": "central", "held_out": 0.0, "fine_tune_epochs": 1, "release": True},
     "fine_tune_epochs"),
    ({"privacy": "records", "held_out": 0.0, "fine_tune_epochs": 1, "partition": "silos"},
     "fine_tune_epochs"),
    ({"privacy": "distributed", "secure_sum": "secagg", "algorithm": "fed_bn"}, "algorithm"),
    ({"privacy": "local", "algorithm": "fed_bn"}, "algorithm"),
    ({"privacy": "central", "held_out": 0.0, "algorithm": "fed_bn", "audit": "canaries"},
     "algorithm"),
    ({"privacy": "central", "audit": "canaries"}, "held_out"),
    ({"privacy": "records", "held_out": 0.0, "algorithm": "apfl", "partition": "silos"},
     "algorithm"),
    ({"algorithm": "fed_bn", "algorithm.kept": "("}, "algorithm.kept"),
    ({"algorithm": "apfl", "algorithm.alpha": 1.5}, "algorithm.alpha"),
  ],
)  # fmt: skip
def test_a_wrong_input_is_one_line_before_any_data(overrides, field):
  overrides = dict(overrides)
  if overrides.get("privacy") == "records" or overrides.get("partition") == "silos":
    overrides = {"clients_per_round": 10, "partition.num_clients": 100, **overrides}
  with refuses(field):
    build.check(_config(**overrides))


def test_a_part_that_the_model_does_not_have_is_refused():
  config = _config(algorithm="fed_bn")
  build.check(config)
  with refuses("algorithm.kept", value="norm"):
    _ready(config)


def test_fine_tuning_needs_rows_to_score_it_on():
  config = _config(held_out=0.0, fine_tune_epochs=1)
  with refuses("fine_tune_epochs", value=1):
    build.phase(_ready(config))


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["fed_avg", "apfl", "fed_bn", "mr_mtl"])
def test_a_run_writes_the_scores_of_its_clients_and_resumes(
  tmp_path, monkeypatch, algorithm
):
  more = {"algorithm.kept": "bias"} if algorithm == "fed_bn" else {}
  more |= {"fine_tune_epochs": 1} if algorithm == "fed_avg" else {}
  config = _config(algorithm=algorithm, **more)
  whole = loop.train(config, tmp_path / "whole")
  stop_after(monkeypatch, 1)
  with pytest.raises(loop.Interrupted):
    loop.train(config, tmp_path / "run")
  resumed = loop.train(config, tmp_path / "run")
  for name in ("params_sha256", "client_scores", "files_sha256"):
    assert resumed[name] == whole[name], name
  with (tmp_path / "whole" / "clients.csv").open(newline="") as lines:
    rows = [float(row["accuracy"]) for row in csv.DictReader(lines)]
  assert rows == sorted(rows) and len(rows) == whole["client_scores"]["num_scored"]
  assert rows[0] == whole["client_scores"]["worst"]
  last = writers.read_metrics(tmp_path / "whole")[-1]
  assert last["test_client_accuracy_worst"] == rows[0]
  own = [(tmp_path / "whole" / f"params_of_client_{k}.npz").exists() for k in range(6)]
  assert own == [algorithm != "fed_avg"] * 6
  held = json.loads((tmp_path / "whole" / "result.json").read_text())
  assert ("client_scores_fine_tuned" in held) == (algorithm == "fed_avg")
  assert "6 clients: accuracy mean" in build.Federated(config).line(whole)
