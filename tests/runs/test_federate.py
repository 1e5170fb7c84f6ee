"""A federated run from config to result.json: resume, charges, what is promised."""

import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.accounting import Ledger
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.federated import build as federate_build
from dpjax.experiments.kinds.federated import privacy as federate_privacy
from dpjax.experiments.kinds.federated.config import ServerOptimizerConfig
from dpjax.experiments.run import guarantee, kind, loop, writers
from dpjax.validate import UserError
from tests.refuses import refuses
from tests.runs import small_configs


def _config(**overrides):
  return small_configs.federated(**{"num_rounds": 6, **overrides})[0]


_NONE = {
  "privacy": "none",
  "privacy.delta": 1e-5,
}
_EIGHT = {"privacy.epsilon": 8.0, "privacy.noise_multiplier": None}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("fed") / "whole"
  return workdir, loop.train(_config(**_EIGHT), workdir)


@pytest.mark.long
def test_the_result_says_what_is_promised_to_whom(finished):
  workdir, result = finished
  assert set(writers.RESULT_KEYS) <= set(result)
  assert result["unit"] == "user" and result["epsilon_kind"] == "proved"
  assert result["neighboring_relation"] == "add_or_remove_one"
  assert 7.8 < result["epsilon"] <= 8.0 and result["num_steps"] == 6
  assert result["method"] == "dp_fed_avg" and result["num_clients"] == 30
  assert "Unit: one user" in result["privacy_statement"]
  for name in ("config.json", "metrics.jsonl", "report.png", "report.csv", "params.npz"):
    assert (workdir / name).stat().st_size > 0
  assert [row["step"] for row in writers.read_metrics(workdir)] == [2, 4, 6]
  assert set(result["rounds_to_accuracy"]) == {"0.97", "0.99"}


@pytest.mark.long
def test_the_ledger_holds_every_round(finished):
  ledger = Ledger.from_json(finished[1]["ledger"])
  plan = federate_build.assemble(_config(**_EIGHT)).plan
  assert ledger.num_steps == 6
  spent = ledger.epsilon(plan.accounted_delta(plan.delta))
  assert spent == pytest.approx(finished[1]["epsilon"], rel=1e-9)
  assert plan.normalize_by == 6.0 and plan.sampler.sampling_prob == 6 / 30


@pytest.mark.long
def test_p8_rounds_without_clients_are_charged(tmp_path):
  config = _config(clients_per_round=0.01)
  with pytest.raises(UserError):  # nothing was learned
    loop.train(config, tmp_path / "run")
  rows = writers.read_metrics(tmp_path / "run")
  assert rows[-1]["step"] == 6 and rows[-1]["not_private/num_clients"] == 0
  promised = federate_build.assemble(config).guarantee
  assert rows[-1]["epsilon"] == pytest.approx(promised.curve(6), rel=1e-9)


@pytest.mark.long
def test_p44_a_simulated_cohort_is_never_called_proved(tmp_path):
  overrides = {
    "privacy.simulated_cohort": 600, "privacy.simulated_clients": 100_000,
    "privacy.delta": 1e-6, "num_rounds": 4,
  }  # fmt: skip
  config = _config(**overrides)
  run = federate_build.assemble(config)
  result = loop.train(config, tmp_path / "run")
  assert result["epsilon_kind"] == "simulated" and result["epsilon"] < 2.0
  assert result["epsilon_of_this_run"] > 10 * result["epsilon"]
  assert "\nSIMULATED. " in result["privacy_statement"]
  deployed = federate_privacy.make_plan(config, 30)[1]
  on_the_mean = [p.noise_multiplier / p.normalize_by for p in (run.plan, deployed)]
  assert on_the_mean[0] == pytest.approx(on_the_mean[1], rel=1e-12)


def test_a_claim_about_a_simulated_cohort_says_that_the_cohort_was_smaller():
  plan = lambda prob, noise: dpjax.Plan(
    sampler=dpjax.PoissonSampler(prob, 10), noise_multiplier=noise, l2_clip_norm=1.0,
    normalize_by=2, num_steps=1, delta=1e-3,
  )  # fmt: skip
  simulated = guarantee.of_plan(plan(0.1, 2.0), 9, ran=plan(0.5, 0.1), deployed=9)
  claimed = guarantee.as_repeatable(simulated, noise_seed=3)
  assert simulated.kind == "simulated" and claimed.kind == "claimed"
  assert claimed.failed_assumptions == (guarantee.DEPLOYED, guarantee.REPEATED)


@pytest.mark.long
def test_local_noise_is_promised_against_the_server(tmp_path):
  config = _config(**_EIGHT, **{"privacy": "local", "num_rounds": 4})
  result = loop.train(config, tmp_path / "run")
  assert result["neighboring_relation"] == "replace_one" and result["unit"] == "user"
  assert result["epsilon_kind"] == "proved" and 7.9 < result["epsilon"] <= 8.0
  assert Ledger.from_json(result["ledger"]).charges[0].l2_clip_norm == 0.15


@pytest.mark.long
@pytest.mark.parametrize("method", ["central", "local", "both"])
def test_p32_what_the_labels_say_of_private_users_is_called_not_private(method, tmp_path):
  config = {"privacy": method, "num_rounds": 2}
  result = loop.train(_config(**config), tmp_path / "shown")
  assert "heterogeneity" not in result and result["not_private/heterogeneity"] > 0
  result = loop.train(_config(**config, diagnostics=False), tmp_path / "off")
  assert not [name for name in result if "heterogeneity" in name]
  # the noise that the epsilon is for, and the clients' own
  local = {"local": 1.5, "both": 0.7}.get(method)
  both = {"privacy.local_noise_multiplier": 0.7} if method == "both" else {}
  noisy = _config(**config, **both, **{"privacy.noise_multiplier": 1.5})
  result = loop.train(noisy, tmp_path / "noise")
  assert result["noise_multiplier"] == 1.5 and result.get("local_noise_multiplier") == local


@pytest.mark.long
def test_without_privacy_there_is_no_epsilon(tmp_path):
  overrides = {
    **_NONE, "privacy.sampler": "fixed_size", "aggregator": "median",
    "num_rounds": 4, "partition": {"name": "dirichlet", "num_clients": 30},
    "partition.min_size": 1, "diagnostics": False, "compression": "top_k",
  }  # fmt: skip
  result = loop.train(_config(**overrides), tmp_path / "run")
  assert result["epsilon"] is None and result["epsilon_kind"] == "none"
  assert result["method"] == "fed_avg" and result["heterogeneity"] > 0.1
  names = {name for row in writers.read_metrics(tmp_path / "run") for name in row}
  assert names == {"step", "test_accuracy", "test_loss"}


@pytest.mark.cases(slow=["mime_lite"], long=...)
@pytest.mark.parametrize("name", ["fed_prox", "mime_lite"])
def test_every_algorithm_has_a_name(name, tmp_path):
  public = {**_NONE, "server_optimizer.rule.momentum": 0.0} if name == "mime_lite" else {}
  config = _config(**{"algorithm": name, "num_rounds": 2}, **public)
  assert loop.train(config, tmp_path / "run")["num_steps"] == 2


@pytest.mark.parametrize(
  ("overrides", "field"),
  [
    ({"clients_per_round": 0.0}, "clients_per_round"),
    ({"clients_per_round": -3.0}, "clients_per_round"),
    ({"clients_per_round": 31.0}, "clients_per_round"),
    ({"partition.num_clients": 0}, "partition.num_clients"),
    ({"partition": "diriclet"}, "config.partition"),
    ({"algorithm": "fedavg"}, "config.algorithm"),
    ({"aggregator": "median"}, "aggregator"),
    ({"weighting": "examples"}, "weighting"),
    ({"algorithm": "scaffold", "compression": "drive"}, "algorithm"),
    ({"privacy.epsilon": -1.0, "privacy.noise_multiplier": None}, "privacy.epsilon"),
    ({"privacy.noise_multiplier": None}, "privacy.epsilon"),
    ({"privacy.epsilon": 1.0}, "privacy.noise_multiplier"),
    ({"privacy.delta": 0.0}, "privacy.delta"),
    ({"privacy.simulated_cohort": 100}, "privacy.simulated_cohort"),
    (
      {"privacy.simulated_cohort": 2, "privacy.simulated_clients": 100},
      "privacy.simulated_cohort",
    ),
    ({"privacy.sampler": "fixed_size", "clients_per_round": 2.5}, "clients_per_round"),
    ({"execution": "pmap", "num_devices": 64}, "num_devices"),
    ({"execution": "shard_map", "num_devices": 64}, "num_devices"),
    ({"execution": "pamp"}, "execution"),
    ({"local.epochs": 0}, "local.epochs"),
    ({"num_rounds": 0}, "num_rounds"),
    ({"client_optimizer.learning_rate": 0.0}, "client_optimizer.learning_rate"),
    ({"model.name": "mpl"}, "model.name"),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, overrides, field):
  with refuses(field) as caught:
    loop.train(_config(**overrides), tmp_path / "run")
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("overrides", "field"),
  [
    ({"num_devices": 2}, "num_devices"),
    ({"execution": "vmap", "num_threads": 2}, "num_threads"),
    ({"memory_budget_gb": 1.0}, "memory_budget_gb"),
    ({"privacy.sampler": "fixed_size", "clients_per_round": 2.5}, "clients_per_round"),
    (
      {"privacy": "dp_ftrl", "clients_per_round": 29.0, **_EIGHT},
      "clients_per_round",
    ),
  ],
)
def test_what_needs_no_data_is_refused_before_a_sweep_begins(overrides, field):
  """A sweep tried its first runs, and was told of the others at their turn."""
  with refuses(field):
    kind.check(_config(**overrides))


@pytest.mark.cases(long=["cosine-adam", "cosine-yogi", "cosine-adagrad"])
@pytest.mark.parametrize("name", ["adam", "yogi", "adagrad"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_server_s_optimizer_is_that_of_the_paper(name, schedule):
  """FedAdam and kin by algorithm 2 of Reddi et al. 2021: no bias correction, tau outside."""
  config = ServerOptimizerConfig(rule=name, learning_rate=0.1, schedule=schedule)
  tx, params = federate_build.server_optimizer(config, 5), jnp.ones(2)
  state, m, v = tx.init(params), 0.0, 1e-6  # v_-1 = tau^2
  beta_1 = 0.0 if name == "adagrad" else 0.9
  for step in range(5):
    delta = np.array([0.3, -2.0]) * (step + 1)
    update, state = tx.update(jnp.asarray(-delta), state, params)
    m = beta_1 * m + (1 - beta_1) * delta
    v = {
      "adam": 0.99 * v + 0.01 * delta**2,
      "yogi": v - 0.01 * delta**2 * np.sign(v - delta**2),
      "adagrad": v + delta**2,
    }[name]
    rate = build.learning_rate_schedule(config, 5)(step) if schedule == "cosine" else 0.1
    np.testing.assert_allclose(update, rate * m / (np.sqrt(v) + 1e-3), rtol=1e-5)


@pytest.mark.slow
def test_a_finished_run_is_served_with_the_scores_of_its_evaluation(finished):
  workdir, result = finished
  run = dpjax.serving.Predictor.load(workdir)
  test = build.load_data(federate_build.loading.central(_config()), features=False)[1]
  raw = dpjax.data.load("digits")[1]
  assert run.inputs.shape == raw.x.shape[1:] and len(test) == len(raw)
  hits = np.argmax(run(raw.x), axis=1) == raw.y
  assert hits.mean() == result["test_accuracy"]
