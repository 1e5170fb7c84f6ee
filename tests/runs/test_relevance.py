"""Experiments of relevance: points, files, pictures, the table, and the attacks."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from dpjax import auditing, relevance
from dpjax.experiments.config.fields import name_of
from dpjax.experiments.kinds.central.config import DataConfig, ModelConfig
from dpjax.experiments.kinds.relevance import audit as relevance_audit
from dpjax.experiments.kinds.relevance.config import RelevanceAudit, RelevanceConfig
from dpjax.experiments.run import checkpoint, guarantee, writers
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.run.kind import experiment_of
from dpjax.experiments.sweeps import claims, experiment
from dpjax.noise import source
from dpjax.relevance import Rigorous, pipeline, rigorous
from dpjax.relevance.inputs import Outcome, RecordNoise
from dpjax.relevance.privacy import Privacy
from dpjax.validate import UserError
from tests.refuses import refuses

_DATA = bytes(32)  # a digest
_PNG = b"\x89PNG"


_PROVED = {"name": "radp_rigorous", "shuffle": False, "pool": 2}


def _config(**fields):
  standard = dict(
    data=DataConfig(name="digits", limit=200),
    model=ModelConfig(name="mlp", options={"features": (8,)}),
    num_epochs=2,
    batch_size=50,
    epsilons=[2.0],
  )
  return RelevanceConfig(**{**standard, **fields})


# --- configs


def test_points_are_curves_by_epsilons_by_seeds():
  config = _config(
    curves={"A": {"method": "dpsgd"}, "B @ x": {"method.preset": "P5", "epsilons": [7.0]}},
    epsilons=[1.0, 2.0], num_seeds=2, seed=3,
  )  # fmt: skip
  found = experiment.points(config)
  of_one_seed = ["a-eps1", "a-eps2", "b-x-eps7"]
  assert [p.name for p in found] == [f"{p}-seed{s}" for s in (3, 4) for p in of_one_seed]
  assert (
    found[-1].facts["variant"] == "B @ x"
    and name_of(found[-1].config.method, "preset") == "P5"
  )
  assert found[0].config.curves == {} and found[0].config.num_seeds == 1


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"method": "radpp"}, "did you mean 'radp'"),
    ({"method": {"name": "radp", "preset": "P9"}}, "method.preset='P9'"),
    ({"epsilons": []}, "at least one epsilon"),
    ({"num_seeds": 10**6}, "num_seeds=1000000: must be an integer in"),
    (
      {"num_seeds": 10**5, "epsilons": [1.0, 2.0]},
      "has 200000 runs; must be at most 100000",
    ),
    ({"num_epochs": 10**9}, "num_epochs="),
    ({"epsilons": [-1.0]}, "epsilons[0]=-1.0"),
    ({"curves": {"A": {"method.presett": "P1"}}}, "config.curves['A'].method.presett"),
    ({"curves": {"a": {}, "A": {}}}, "same name"),
    ({"data": DataConfig(center=True)}, "data.center=True"),
    ({"model": ModelConfig(name="scatter_linear")}, "must take images as they are"),
  ],
)
def test_a_wrong_config_is_one_line_before_anything_runs(fields, words):
  with pytest.raises(UserError) as error:
    experiment.points(_config(**fields))
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
  (result,) = experiment.run_all(_config(method=_PROVED, noise_seed=1), tmp_path)
  assert result["epsilon_kind"] == "claimed" and result["proved_epsilon"] is None
  assert guarantee.REPEATED in result["failed_assumptions"]


# --- runs


@pytest.mark.long
def test_a_claimed_run_writes_what_the_contract_wants(tmp_path):
  config = _config(audit=RelevanceAudit(200, canary_runs=False))
  (result,) = experiment.run_all(config, tmp_path / "run")
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
  assert guarantee.named(result["failed_assumptions"]) in table
  before = (tmp_path / "run" / "params.npz").stat().st_mtime_ns
  assert experiment.run_all(config, tmp_path / "run") == [writers.plain(result)]
  assert (tmp_path / "run" / "params.npz").stat().st_mtime_ns == before
  with refuses("workdir"):
    experiment.run_all(_config(epsilons=[3.0]), tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize("method", ["no_dp", "radp"])
def test_a_run_that_diverges_is_a_row_like_any_other(tmp_path, method):
  config = _config(method={"name": method, "learning_rate": 1e37}, num_seeds=2, audit=None)
  first = experiment.run_all(config, tmp_path)
  assert not np.isfinite(writers.number(first[0]["test_loss"]))
  assert experiment.run_all(config, tmp_path) == [writers.plain(row) for row in first]
  assert len((tmp_path / "claims.csv").read_text().splitlines()) == 2
  assert (tmp_path / "report.png").read_bytes().startswith(_PNG)


@pytest.mark.long
def test_a_grid_of_methods_and_modes_writes_one_table(tmp_path):
  config = _config(
    curves={
      "RADP": {},
      "RADP, proved": {"method": _PROVED},
      "No_DP": {"method": "no_dp"},
    }
  )
  results = experiment.run_all(config, tmp_path)
  assert [r["epsilon_kind"] for r in results] == ["claimed", "proved", "none"]
  assert results[1]["proved_epsilon"] == pytest.approx(2.0)
  lines = (tmp_path / "claims.csv").read_text().splitlines()
  assert len(lines) == 4 and lines[0].startswith("method,dataset,claimed_epsilon")
  assert len((tmp_path / "report.csv").read_text().splitlines()) == 1 + 3 * 2
  saved = json.loads((tmp_path / "sweep.json").read_text())
  assert saved["rows"] == results and saved["all_runs_together"]["epsilon"] is None
  maps = np.load(tmp_path / "points" / "radp-proved-eps2-seed0" / "maps.npz")
  assert list(maps) == ["beta"]  # the relevance itself is not private


def test_a_folder_where_another_process_works_is_left_alone(tmp_path):
  config = _config(method="no_dp")
  owner.claim(tmp_path / "run", config)
  busy = writers.alone_in(tmp_path / "run", checkpoint.FOLDER)
  with busy, refuses("workdir"):
    experiment.run_all(config, tmp_path / "run")
  assert {p.name for p in (tmp_path / "run").iterdir()} == {
    "config.json",
    checkpoint.FOLDER,
  }


def test_data_that_are_not_there_do_not_claim_the_folder(tmp_path):
  wrong = _config(data=DataConfig(name="dgits"))
  with refuses("data.name"):
    experiment.run_all(wrong, tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_run_that_is_refused_is_a_row_and_the_others_go_on(tmp_path):
  curves = {"a": {}, "b": {"data.name": "dgits"}}
  config = _config(method="no_dp", curves=curves)
  good, bad = experiment.run_all(config, tmp_path)
  assert (good["status"], bad["status"]) == ("done", "failed")
  assert "did you mean 'digits'" in bad["error"]
  assert "| a | digits |" in (tmp_path / "claims.md").read_text()
  mended = dataclasses.replace(config, curves={"a": {}, "b": {"activation": "relu"}})
  results = experiment.run_all(mended, tmp_path)
  assert [row["status"] for row in results] == ["done"] * 2
  assert results[0]["params_sha256"] == good["params_sha256"]


@pytest.mark.long
def test_the_folder_of_a_single_run_takes_no_experiment(tmp_path):
  experiment.run_all(_config(method="no_dp"), tmp_path)
  before = sorted(path.name for path in tmp_path.iterdir())
  with refuses("workdir"):
    experiment.run_all(_config(method="no_dp", num_seeds=2), tmp_path)
  assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
  ("change", "field"),
  [
    ({"epsilons": [1.0, 2.0]}, "epsilons"),
    ({"num_seeds": 2}, "num_seeds"),
    ({"title": "mine"}, "title"),
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
def test_a_single_run_refuses_what_only_an_experiment_reads(change, field):
  with refuses(field):
    experiment_of(_config(**change)).check()


@pytest.mark.long
def test_an_experiment_may_get_more_seeds_in_its_folder(tmp_path):
  config = _config(method="no_dp", curves={"a": {}, "b": {"activation": "relu"}})
  first = experiment.run_all(config, tmp_path)
  params = tmp_path / "points" / "a-eps2-seed0" / "params.npz"
  before = params.stat().st_mtime_ns
  more = dataclasses.replace(config, num_seeds=2)
  results = experiment.run_all(more, tmp_path)
  assert len(results) == 4 and params.stat().st_mtime_ns == before
  assert [r["params_sha256"] for r in results[:2]] == [r["params_sha256"] for r in first]
  text = (tmp_path / "sweep.json").read_text()
  assert json.loads(text)["config"]["num_seeds"] == 2
  with refuses("workdir"):
    experiment.run_all(dataclasses.replace(more, num_seeds=3, num_epochs=9), tmp_path)
  assert (tmp_path / "sweep.json").read_text() == text
  assert experiment.run_all(config, tmp_path) == results[:2]  # fewer, and none runs again
  assert params.stat().st_mtime_ns == before


@pytest.mark.long
def test_without_canaries_only_noisy_inputs_are_attacked(tmp_path):
  config = _config(
    curves={"P5": {"method.preset": "P5"}, "DPSGD": {"method": "dpsgd"}},
    audit=RelevanceAudit(50, canary_runs=False),
  )
  shared, clipped = experiment.run_all(config, tmp_path)
  assert shared["audit"]["strongest"] == "U2"
  assert "audit" not in clipped and "epsilon_audited_lower" not in clipped
  assert "not audited" in (tmp_path / "claims.md").read_text()


@pytest.mark.long
def test_without_privacy_one_run_serves_every_epsilon(tmp_path, monkeypatch):
  made = []
  story = pipeline.story
  monkeypatch.setattr(pipeline, "story", lambda *a: made.append(a[0]) or story(*a))
  config = _config(method="no_dp", epsilons=[1.0, 2.0], num_seeds=2)
  results = experiment.run_all(config, tmp_path)
  assert made == ["no_dp"] * 2  # one for each seed
  assert [r["epsilon_target"] for r in results] == [1.0, 2.0] * 2
  assert results[0]["params_sha256"] == results[1]["params_sha256"]
  assert results[0]["params_sha256"] != results[2]["params_sha256"]
  assert results[1]["copied_from"] == "no-dp-eps1-seed0"
  assert len((tmp_path / "report.csv").read_text().splitlines()) == 1 + 4 * 2


# --- the table


def test_a_proof_is_refuted_by_a_larger_bound_only():
  row = {"epsilon": 1.0, "epsilon_kind": "proved", "epsilon_audited_lower": 0.9}
  assert claims.verdict([row]) == "not refuted"
  assert claims.verdict([row | {"epsilon_audited_lower": 1.1}]) == "PROOF REFUTED"
  assert claims.verdict([row | {"epsilon": None}]) == "no epsilon is stated"
  assert claims.verdict([{"epsilon": 1.0}]) == "not audited"


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
  clipped = played._replace(clipped=lambda x: rigorous.clipped(x, beta, how))
  assert 0.5 < bound(clipped) <= 2.0


@pytest.mark.long
def test_u3_raw_labels_are_found_and_randomised_ones_are_not(tmp_path):
  """Raw labels: with a net that memorises, wrong labels are told from right ones; behind randomised
  response the bound stays below the proof."""
  audit = RelevanceAudit(100, 100)
  raw = _config(
    epsilons=[2000.0], num_epochs=60, audit=audit,
    model=ModelConfig(name="mlp", options={"features": (64,)}), activation="relu",
    method={"name": "radp", "preset": "P3", "learning_rate": 0.02},
  )  # fmt: skip
  (result,) = experiment.run_all(raw, tmp_path / "raw")
  assert result["audit"]["bounds"]["U3"]["epsilon_lower"] > 0.5
  method = {**_PROVED, "learning_rate": 0.02}
  proved = dataclasses.replace(raw, method=method, epsilons=[0.5])
  (result,) = experiment.run_all(proved, tmp_path / "proved")
  assert result["epsilon_audited_lower"] <= 0.5
