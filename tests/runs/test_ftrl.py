"""privacy='dp_ftrl' from a config to result.json: charges, resume, budget, checks."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from configs import quickstart
from dpjax.accounting import Ledger
from dpjax.checks import batches, noise_distributions, table
from dpjax.checks import charges as check_laws
from dpjax.checks.table import CheckTable
from dpjax.experiments.checks import of_config
from dpjax.experiments.config import fields
from dpjax.experiments.config.naming import naming
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.privacy import make_plan
from dpjax.experiments.run import loop
from tests.checks import second_accountant
from tests.refuses import refuses
from tests.runs import small_run
from tests.runs.stops import die, stop_after

_SMALL = {
  **small_run.SMALL,
  "privacy": "dp_ftrl",
  "privacy.neighboring_relation": "replace_special",
}
_POISSON = {
  "privacy.sampler": "cyclic_poisson",
  "privacy.neighboring_relation": "add_or_remove_one",
  "privacy.sampler.steps_apart": 3,
}


def _config(**overrides):
  config = quickstart.get_config()
  return fields.replace_all(fields.replace_all(config, _SMALL), overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("ftrl") / "whole"
  return workdir, loop.train(_config(), workdir)


@pytest.mark.long
def test_the_result_is_what_the_charges_add_up_to(finished):
  workdir, result = finished
  plan = make_plan(_config(), 400)
  ledger = Ledger.from_json(result["ledger"])
  assert ledger.num_steps == 12 and result["method"] == "dp_ftrl"
  assert result["neighboring_relation"] == "replace_special"
  assert 2.98 < result["epsilon"] <= 3.0
  spent = ledger.epsilon(1e-5, neighboring_relation="replace_special")
  assert spent == plan.epsilon() == result["epsilon"]
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  expected = [plan.epsilon(steps=row["step"]) for row in rows]
  assert [row["epsilon"] for row in rows] == pytest.approx(expected, rel=1e-9)
  assert "strategy BandedToeplitz" in result["privacy_statement"]


_REDRAWN = {"privacy.strategy": "band_inv_mf", "privacy.strategy.redraw": True}


@pytest.mark.cases(slow=[0], long=...)
@pytest.mark.parametrize(
  "extra",
  [
    {},
    {**_POISSON, "privacy.noise_levels": [1.5, 1.0]},
    pytest.param(_REDRAWN, marks=pytest.mark.long),
  ],
)
def test_p16_an_interrupted_run_ends_as_the_uninterrupted_one(tmp_path, extra):
  config = _config(**extra)
  whole = loop.train(config, tmp_path / "whole")
  shutil.copytree(tmp_path / "whole", tmp_path / "cut")
  for name in ("result.json", "params.npz"):
    (tmp_path / "cut" / name).unlink()
  for step in (9, 12):
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / str(step), ignore_errors=True)
  resumed = loop.train(config, tmp_path / "cut")
  for key in ("params_sha256", "epsilon", "ledger", "test_accuracy"):
    assert resumed[key] == whole[key]


@pytest.mark.cases(slow=[3], long=...)
@pytest.mark.parametrize(
  "extra",
  [
    {"privacy.strategy": "blt", "privacy.strategy.buffers": 2},
    {"privacy.strategy": "tree"},
    {"privacy.strategy": "identity"},
    _REDRAWN,
    {"privacy.sampler": "balls_in_bins"},
    {"privacy.sampler": "min_sep", "privacy.sampler.steps_apart": 4},
    {"privacy.neighboring_relation": "replace_one"},
    {"privacy.noise_levels": [2.0, 1.0, 0.5]},
    _POISSON,
  ],
  ids=lambda extra: " ".join(str(value) for value in extra.values()),
)
def test_every_strategy_and_sampler_meets_its_epsilon_and_passes_the_checks(extra):
  config = _config(**extra)
  plan = make_plan(config, 400)
  assert 2.97 < plan.epsilon() <= 3.0 and plan.is_private
  rows = _rows(of_config.subject(config))
  assert rows.ok, rows.failed
  passed = {row.name for row in rows if row.passed}
  assert {"noise as charged", "sampler as charged"} <= passed
  assert second_accountant.agrees(plan)


def _rows(subject):
  asked = (
    noise_distributions.noise_std,
    noise_distributions.noise_independence,
    batches.sampler_law,
    batches.sampler_seed,
    check_laws.own_sum,
    check_laws.overflow,
  )
  named = {n: check for n, check in table.checks(subject).items() if check in asked}
  assert len(named) == len(asked)
  return CheckTable(list(table.rows(named, subject)))


def _failures(subject):
  return {row.name for row in _rows(subject).failed}


@pytest.mark.long
def test_p43_the_checks_catch_a_sampler_that_comes_back_too_early():
  subject = of_config.subject(_config())
  draw = lambda n, seed, step: np.flatnonzero(np.random.default_rng(step).random(n) < 0.2)
  assert "sampler as charged" in _failures(dataclasses.replace(subject, draw=draw))


@pytest.mark.long
def test_the_checks_catch_noise_without_its_correlation():
  white = of_config.subject(_config(**{"privacy.strategy": "identity"}))
  banded = of_config.subject(_config())
  caught = _failures(dataclasses.replace(banded, transform=white.transform))
  assert caught & {"noise as charged", "noise independent"}


def test_noise_without_end_is_charged_where_everybody_of_a_group_takes_part():
  """Nothing is amplified there, as under cyclic batches of the same turn."""
  blt = {"privacy.strategy": "blt", "privacy.sampling_prob": 0.25}
  cyclic = make_plan(_config(**blt, **{"privacy.sampler": "cyclic"}), 400)
  poisson = make_plan(
    _config(**_POISSON | blt | {"privacy.sampler.steps_apart": None}), 400
  )
  assert 2.99 < poisson.epsilon() <= 3.0
  rounded = (
    _POISSON | blt | {"privacy.sampler.steps_apart": None, "privacy.sampling_prob": 1 / 49}
  )
  # 49 * (1 / 49) is below 1.
  assert make_plan(_config(**rounded), 400).sampler.turn_prob == 1
  assert poisson.noise_multiplier == pytest.approx(cyclic.noise_multiplier, rel=5e-3)


@pytest.mark.slow
def test_a_budget_is_refused_before_the_first_step(tmp_path):
  with refuses("privacy.epsilon_budget"):
    loop.train(_config(**{"privacy.epsilon_budget": 2.9}), tmp_path / "run")
  loop.train(
    _config(**{"privacy.epsilon_budget": 3.0, "num_steps": 4}), tmp_path / "enough"
  )


@pytest.mark.cases(long=[8])
@pytest.mark.parametrize(
  ("extra", "field"),
  [
    ({"privacy.sampler": "poisson"}, "config.privacy.sampler"),
    ({"privacy.strategy": "bandit"}, "config.privacy.strategy"),
    ({"privacy.strategy.bands": 0}, "config.privacy.strategy.bands"),
    ({"privacy.strategy.buffers": 2}, "config.privacy.strategy.buffers"),
    (
      {**_POISSON, "privacy.sampler.steps_apart": 6},
      "privacy.sampler.steps_apart",
    ),
    ({"privacy.neighboring_relation": "add_or_remove_one"}, "privacy.neighboring_relation"),
    ({"privacy.noise_levels": [1.0, -1.0]}, "privacy.noise_levels[1]"),
    (
      {
        "privacy": "sgd",
        "privacy.sampler": "poisson",
        "privacy.noise_levels": [2.0],
      },
      "config.privacy.noise_levels",
    ),
    ({**_POISSON, "privacy.strategy": "blt"}, "privacy.strategy"),
  ],
)
def test_wrong_configs_are_one_line(extra, field):
  with refuses(field) as caught:
    config = _config(**extra)
    build.Central(config).check()
    with naming(config):
      make_plan(config, 400)
  assert "\n" not in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize(
  "changes",
  [
    {"privacy.sampling_prob": 1.0},
    {**_POISSON, "privacy.sampler.steps_apart": 1},
  ],
)
def test_one_band_keeps_no_noise_and_goes_on_from_a_checkpoint(changes, tmp_path):
  """Its memory is empty, which the library of checkpoints cannot save as it is."""
  config = _config(num_steps=4, eval_every=4, checkpoint_every=2, noise_seed=0, **changes)
  whole = loop.train(config, tmp_path / "whole")
  stopped = tmp_path / "stopped"
  with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
    stop_after(patch, 3, die)
    loop.train(config, stopped)
  assert loop.train(config, stopped)["params_sha256"] == whole["params_sha256"]


@pytest.mark.slow
def test_a_batch_that_is_no_whole_share_of_a_cyclic_pass_is_refused():
  """0.7 ran as 1 without a word."""
  some = {"privacy.sampling_prob": 0.7}
  for sampler in ("cyclic", "balls_in_bins"):
    with refuses("privacy.sampling_prob"):
      build.assemble(_config(**some, **{"privacy.sampler": sampler}))
  apart = {**_POISSON, "privacy.sampler.steps_apart": 1}
  assert build.assemble(_config(**some, **apart)).plan.sampler.sampling_prob == 0.7
