"""Runs of relevance: configs, files, pictures, the table, and the attacks."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from scipy import stats

from dpjax import auditing, relevance
from dpjax.experiments.config import fields
from dpjax.experiments.config.sections import ExamplesConfig, NetworkConfig
from dpjax.experiments.kinds.relevance import audit as relevance_audit
from dpjax.experiments.kinds.relevance import table
from dpjax.experiments.kinds.relevance.config import RelevanceAudit, RelevanceConfig
from dpjax.experiments.kinds.relevance.methods import AdLm, DpSgd, Radp, RadpDpSgd
from dpjax.experiments.plots import csv_tables, redraw
from dpjax.experiments.run import checkpoint, guarantee, loop, run_keys, writers
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.run.kind import experiment_of
from dpjax.experiments.sweeps import sweep
from dpjax.noise import source
from dpjax.relevance import Rigorous, rigorous
from dpjax.relevance.inputs import Outcome, RecordNoise
from dpjax.relevance.privacy import Privacy
from dpjax.validate import UserError
from tests.refuses import refuses

_PNG = b"\x89PNG"


_PROVED = {"name": "radp_rigorous", "shuffle": False, "pool": 2}


def _config(**fields):
  standard = dict(
    data=ExamplesConfig(name="digits", limit=200),
    model=NetworkConfig(name="mlp", options={"features": (8,)}),
    num_epochs=2,
    batch_size=50,
    epsilon=2.0,
  )
  return RelevanceConfig(**{**standard, **fields})


def _run(named, folder, **how):
  return sweep.run(named.items(), folder, sweep.Sweep(**how) if how else None)


# --- configs


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"method": "radpp"}, "did you mean 'radp'"),
    ({"method": {"name": "radp", "preset": "P9"}}, "method.preset='P9'"),
    ({"num_epochs": 10**9}, "num_epochs="),
    ({"epsilon": -1.0}, "epsilon=-1.0"),
    ({"model": NetworkConfig(name="scatter_linear")}, "must take images as they are"),
    # Their noise, or their steps, would leave the range of float32.
    ({"epsilon": 1e-320}, "epsilon=1e-320: must be in [1e-09, 1e+09]"),
    ({"epsilon": 1e308}, "epsilon=1e+308: must be in"),
    ({"method": Radp(floor=1e-320)}, "method.floor=1e-320: must be in"),
    ({"method": Radp(learning_rate=1e-320)}, "method.learning_rate=1e-320: must be in"),
    ({"method": DpSgd(l2_clip_norm=1e-320)}, "method.l2_clip_norm=1e-320: must be in"),
    ({"method": RadpDpSgd(kappa=1e300)}, "method.kappa=1e+300: must be in"),
    ({"method": AdLm(hidden=2**63 - 1)}, "method.hidden=9223372036854775807: must be"),
    ({"method": AdLm(input_clip=1e-320)}, "method.input_clip=1e-320: must be in"),
  ],
)
def test_a_wrong_config_is_one_line_before_anything_runs(fields, words):
  with pytest.raises(UserError) as error:
    experiment_of(_config(**fields)).check()
  assert words in str(error.value) and "\n" not in str(error.value)


def test_noise_comes_from_a_seed_only_where_it_is_said():
  key = lambda config: experiment_of(config).new_keys().noise
  same = lambda config: bool(key(config) == key(config))
  for method in ("radp", _PROVED):
    config = _config(method=method)
    assert not same(config) and same(dataclasses.replace(config, noise_seed=1))
    assert source.is_release(key(config)) == (method == _PROVED)
  assert same(_config(method="no_dp"))


@pytest.mark.slow
def test_a_proof_with_a_noise_seed_is_a_claim(tmp_path):
  result = loop.train(_config(method=_PROVED, noise_seed=1), tmp_path)
  assert result["epsilon_kind"] == "claimed" and result["proved_epsilon"] is None
  assert guarantee.REPEATED in result["failed_assumptions"]


def test_a_proof_whose_audit_trains_on_the_records_again_is_no_release():
  released = lambda audit: experiment_of(_config(method=_PROVED, audit=audit)).release
  assert released(None) and released(RelevanceAudit(canary_runs=False))
  assert not released(RelevanceAudit())


# --- runs


@pytest.mark.long
def test_a_claimed_run_writes_what_the_contract_wants(tmp_path):
  config = _config(audit=RelevanceAudit(200, canary_runs=False))
  result = loop.train(config, tmp_path / "run")
  assert set(writers.RESULT_KEYS) <= set(result)
  assert result["epsilon_kind"] == "claimed" and result["epsilon"] == 2.0
  assert result["proved_epsilon"] is None and result["claimed_epsilon_thm7"] > 2.0
  assert any(line.startswith("raw labels") for line in result["failed_assumptions"])
  assert result["epsilon_audited_lower"] > 2.0  # P3: 64 times the claim
  assert [row["step"] for row in writers.read_metrics(tmp_path / "run")] == [1, 2]
  for name in ("report.png", "heat_maps.png", "maps.png"):
    assert (tmp_path / "run" / name).read_bytes().startswith(_PNG)
  table = (tmp_path / "run" / "claims.md").read_text()
  assert "claim refuted" in table
  assert "neighbors, Delta R, data-dependent noise" in table
  assert guarantee.names_of(result["failed_assumptions"]) in table
  before = (tmp_path / "run" / "params.npz").stat().st_mtime_ns
  assert loop.train(config, tmp_path / "run") == writers.plain(result)
  assert (tmp_path / "run" / "params.npz").stat().st_mtime_ns == before
  with refuses("workdir"):
    loop.train(_config(epsilon=3.0), tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize("method", ["no_dp", "radp"])
def test_a_run_that_diverges_is_a_row_like_any_other(tmp_path, method):
  config = _config(method={"name": method, "learning_rate": 1e37})
  first = _run({method: config}, tmp_path, seeds=[0, 1])
  assert not np.isfinite(writers.number(first[0]["test_loss"]))
  again = _run({method: config}, tmp_path, seeds=[0, 1])
  assert again == [writers.plain(row) for row in first]
  assert len((tmp_path / "claims.csv").read_text().splitlines()) == 2
  assert (tmp_path / "report.png").read_bytes().startswith(_PNG)


@pytest.mark.long
def test_a_grid_of_methods_and_modes_writes_one_table(tmp_path):
  named = {
    "RADP": _config(),
    "RADP, proved": _config(method=_PROVED),
    "No_DP": _config(method="no_dp"),
  }
  results = _run(named, tmp_path)
  assert [r["epsilon_kind"] for r in results] == ["claimed", "proved", "none"]
  assert results[1]["proved_epsilon"] == pytest.approx(2.0)
  lines = (tmp_path / "claims.csv").read_text().splitlines()
  assert len(lines) == 4 and lines[0].startswith("method,dataset,claimed_epsilon")
  assert len((tmp_path / "report.csv").read_text().splitlines()) == 1 + 3 * 2
  saved = json.loads((tmp_path / "sweep.json").read_text())
  assert saved["rows"] == results and saved["all_runs_together"]["epsilon"] is None
  maps = np.load(tmp_path / "points" / "radp-proved" / "maps.npz")
  assert list(maps) == ["beta"]  # the relevance itself is not private


def test_a_folder_where_another_process_works_is_left_alone(tmp_path):
  config = _config(method="no_dp")
  owner.claim(tmp_path / "run", config)
  busy = writers.alone_in(tmp_path / "run", checkpoint.FOLDER)
  with busy, refuses("workdir"):
    loop.train(config, tmp_path / "run")
  assert {p.name for p in (tmp_path / "run").iterdir()} == {
    "config.json",
    checkpoint.FOLDER,
  }


def test_data_that_are_not_there_do_not_claim_the_folder(tmp_path):
  wrong = _config(data=ExamplesConfig(name="dgits"))
  with refuses("data.name"):
    loop.train(wrong, tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_run_that_is_refused_is_a_row_and_the_others_go_on(tmp_path):
  named = {"a": _config(method="no_dp")}
  named["b"] = fields.replace(named["a"], "data.name", "dgits")
  good, bad = _run(named, tmp_path)
  assert (good["status"], bad["status"]) == ("done", "failed")
  assert "did you mean 'digits'" in bad["error"]
  assert "| a | digits |" in (tmp_path / "claims.md").read_text()
  named["b"] = _config(method="no_dp", activation="relu")
  results = _run(named, tmp_path)
  assert [row["status"] for row in results] == ["done"] * 2
  assert results[0]["params_sha256"] == good["params_sha256"]


@pytest.mark.long
def test_the_folder_of_a_single_run_takes_no_sweep(tmp_path):
  loop.train(_config(method="no_dp"), tmp_path)
  before = sorted(path.name for path in tmp_path.iterdir())
  with refuses("workdir"):
    _run({"a": _config(method="no_dp")}, tmp_path)
  assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.slow
def test_what_follows_the_result_is_done_when_the_run_is_found_again(tmp_path):
  """A run may be killed right after its result: its keys go and its report comes then."""
  result = loop.train(_config(method="radp"), tmp_path)
  held = owner.recall(tmp_path)
  keys = run_keys.to_json(run_keys.draw(0))
  owner.remember(tmp_path, held | {"keys": keys})
  for name in ("report.png", "claims.md"):
    (tmp_path / name).unlink()
  assert loop.train(_config(method="radp"), tmp_path) == writers.plain(result)
  assert owner.recall(tmp_path) == held
  assert (tmp_path / "report.png").exists() and (tmp_path / "claims.md").exists()


@pytest.mark.parametrize(
  ("change", "field"),
  [
    ({"method": "no_dp", "epsilon": 1.0}, "epsilon"),
    (
      {"method": {"name": "radp_rigorous", "shuffle": False, "delta": 1e-3}},
      "method.delta",
    ),
    ({"num_epochs": 0}, "num_epochs"),
    (
      {"method": "dpsgd", "audit": RelevanceAudit(canary_runs=False)},
      "audit",
    ),
  ],
)
def test_a_run_refuses_what_its_method_does_not_read(change, field):
  with refuses(field):
    experiment_of(_config(**change)).check()


@pytest.mark.long
def test_a_list_may_get_more_seeds_in_its_folder(tmp_path):
  named = {name: _config(method="no_dp", activation=name) for name in ("relu", "tanh")}
  first = _run(named, tmp_path, seeds=[0])
  params = tmp_path / "points" / "relu_seed=0" / "params.npz"
  before = params.stat().st_mtime_ns
  results = _run(named, tmp_path, seeds=[0, 1])
  assert len(results) == 4 and params.stat().st_mtime_ns == before
  assert [r["params_sha256"] for r in results[::2]] == [r["params_sha256"] for r in first]
  text = (tmp_path / "sweep.json").read_text()
  assert json.loads(text)["config"]["seeds"] == [0, 1]
  more = {name: dataclasses.replace(config, num_epochs=9) for name, config in named.items()}
  with refuses("workdir"):
    _run(more, tmp_path, seeds=[0, 1, 2])
  assert (tmp_path / "sweep.json").read_text() == text
  assert _run(named, tmp_path, seeds=[0]) == results[::2]  # fewer, and none runs again
  assert params.stat().st_mtime_ns == before


@pytest.mark.long
def test_without_canaries_only_noisy_inputs_are_attacked(tmp_path):
  base = _config(audit=RelevanceAudit(50, canary_runs=False))
  changes = {"P5": ("method.preset", "P5"), "DPSGD": ("method", "dpsgd")}
  named = {name: fields.replace(base, *change) for name, change in changes.items()}
  shared, clipped = _run(named, tmp_path)
  assert shared["audit"]["strongest"] == "U2"
  assert "audit" not in clipped and "epsilon_audited_lower" not in clipped
  assert "not audited" in (tmp_path / "claims.md").read_text()


@pytest.mark.long
def test_a_run_without_privacy_has_no_epsilon_and_is_drawn_beside_each(tmp_path):
  named = {f"DPSGD @ {x}": _config(method="dpsgd", epsilon=x) for x in (1.0, 2.0)}
  results = _run(named | {"No_DP": _config(method="no_dp")}, tmp_path)
  assert [row["epsilon_target"] for row in results] == [1.0, 2.0, None]
  assert [row["curve"] for row in results] == ["DPSGD", "DPSGD", "No_DP"]
  rows = csv_tables.read(tmp_path / "report.csv").rows
  axes = redraw.draw(rows, table.recipe("")).axes
  assert [len(panel.get_lines()) for panel in axes] == [2] * 4  # two scores, two epsilons


# --- the table


def test_a_proof_is_refuted_by_a_larger_bound_only():
  row = {"epsilon": 1.0, "epsilon_kind": "proved", "epsilon_audited_lower": 0.9}
  assert table.verdict([row]) == "not refuted"
  assert table.verdict([row | {"epsilon_audited_lower": 1.1}]) == "PROOF REFUTED"
  assert table.verdict([row | {"epsilon": None}]) == "no epsilon is stated"
  assert table.verdict([{"epsilon": 1.0}]) == "not audited"


def test_several_seeds_err_no_more_often_than_one():
  # Each seed's bound errs in 1 of 20. Taking the largest of 5, .226 of tables were wrong.
  right = {"epsilon": 1.0, "epsilon_kind": "proved", "epsilon_audited_lower": 0.5}
  wrong = right | {"epsilon_audited_lower": 1.1}
  for runs in range(3, 12):
    needed = next(k for k in range(1, runs) if stats.binom.sf(k - 1, runs, 0.05) <= 0.05)
    for count in (needed - 1, needed):
      group = [wrong] * count + [right] * (runs - count)
      assert table.verdict(group).startswith("not refuted") == (count < needed)
      assert table._joint_audit(group) == (0.5 if count < needed else 1.1)


# --- attacks


def test_u2_shared_noise_is_refuted_whatever_its_scale():
  scales = np.full(16, 1e3)
  scores = relevance_audit.shared_noise_scores(jax.random.key(0), scales, (4, 4, 1), 1000)
  assert scores.inside.min() > scores.outside.max() + 0.5  # free of error
  bound = auditing.clopper_pearson(scores, delta=0.0)
  assert bound > 5.0


@pytest.mark.slow
def test_u2_clipping_the_noisy_pixels_does_not_help():
  """AdLM cuts them to [-10, 10]: one pixel that is not cut gives the record away."""
  run = lambda scale: relevance_audit.shared_noise_scores(
    jax.random.key(0), np.full(16, scale), (4, 4, 1), 1000, clip_after=10.0
  )
  assert auditing.clopper_pearson(run(24.0), delta=0.0) > 4.0
  assert (
    auditing.clopper_pearson(run(1e6), delta=0.0) < 0.5
  )  # everything is cut: nothing left


def _bound(job, outcome, num_trials=4000):
  config = _config(audit=RelevanceAudit(num_trials, 40, False))
  return relevance_audit._features(config, job, outcome, 0.95).epsilon_lower


def _noise(scales, beta, clip=None):
  made = RecordNoise((2, 2, 1), beta, scales, "laplace", grid=2.0**-6, l1_clip=clip)
  privacy = Privacy("none", None, None, None)
  return Outcome(None, None, None, privacy, 0, None, noise=made)


class _Job:
  keys = relevance.Keys(jax.random.key(0), jax.random.key(1), 0, 0)


def test_u1_one_feature_reaches_epsilon_and_never_passes_it():
  beta = np.array([1.0 - 3e-6, 1e-6, 1e-6, 1e-6])
  bound = _bound(_Job, _noise(1 / (beta * 2.0), beta))
  assert 1.6 < bound <= 2.0


def test_u1_spread_noise_is_far_below_its_pure_epsilon():
  beta = np.full(4, 0.25)
  spread = _bound(_Job, _noise(1 / (beta * 2.0), beta))
  assert spread <= 2.0
  wrong = _bound(_Job, _noise(1 / (beta * 8.0), beta))  # noise for 8, claimed as 2
  assert wrong > 2.0


def test_u1_takes_the_worst_pair_within_the_clip():
  beta = np.full(4, 0.25)
  one, other = relevance_audit.worst_pair((2, 2, 1), beta, 0.25)
  assert one.sum() == other.sum() == 1 and not (one * other).any()
  one, other = relevance_audit.worst_pair((2, 2, 1), beta, 0.9)
  assert np.abs(one - other).sum() == 4
  # A clip that allows all: 0 against 1, also for a single feature, which cannot be halved.
  for size in (1, 3):
    one, other = relevance_audit.worst_pair((size,), np.full(size, 1 / size), 1.0)
    assert np.abs(one - other).sum() == size


def test_u1_plays_the_pair_as_the_run_clips_it():
  """Gaussian noise is for records of a small norm: 0 against 1 would be many times as far apart,
  and refute a proof that stands."""
  beta, how = np.full(4, 0.25), Rigorous(features="gaussian", clip=0.05, shuffle=False)
  drawn = rigorous.feature_noise(beta, how, epsilon=2.0, channels=1)
  played = _noise(drawn.scales, beta).noise._replace(mechanism="gaussian", grid=None)
  bound = lambda noise: _bound(_Job, _noise(drawn.scales, beta)._replace(noise=noise))
  assert bound(played) > 2.0
  clipped = played._replace(clipped=lambda x: rigorous.clip_records(x, beta, how))
  assert 0.5 < bound(clipped) <= 2.0


@pytest.mark.long
def test_u3_raw_labels_are_found_and_randomised_ones_are_not(tmp_path):
  """Raw labels: with a net that memorises, wrong labels are told from right ones; behind randomised
  response the bound stays below the proof."""
  audit = RelevanceAudit(100, 100)
  raw = _config(
    epsilon=2000.0, num_epochs=60, audit=audit,
    model=NetworkConfig(name="mlp", options={"features": (64,)}), activation="relu",
    method={"name": "radp", "preset": "P3", "learning_rate": 0.02},
  )  # fmt: skip
  result = loop.train(raw, tmp_path / "raw")
  mislabelled = result["audit"]["bounds"]["U3"]
  assert 0.5 < mislabelled["epsilon_lower"] <= mislabelled["ceiling"]
  method = {**_PROVED, "learning_rate": 0.02}
  proved = dataclasses.replace(raw, method=method, epsilon=0.5)
  result = loop.train(proved, tmp_path / "proved")
  assert result["epsilon_audited_lower"] <= 0.5
