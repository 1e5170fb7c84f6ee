"""Private statistics in a run: charged, repeated exactly, released, met by every input."""

import dataclasses
import json
import types
from unittest import mock

import jax
import numpy as np
import pytest

from configs import quickstart
from dpjax import data, mechanisms
from dpjax.accounting import Ledger
from dpjax.checks import before_steps, table
from dpjax.data.rows import Rows
from dpjax.experiments.checks import of_config
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import Attack, AttackConfig
from dpjax.experiments.kinds.central import (
  build,
  facts,
  features,
  normalization,
  privacy,
)
from dpjax.experiments.run import loop, run_keys
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.sweeps import engine
from dpjax.mechanisms import channel_statistics, noisy_means
from dpjax.mechanisms.whitening import Spread
from tests.refuses import refuses
from tests.runs.stops import on_save

_PRIVATE = {"name": "private_statistics", "noise_multiplier": 2.0, "clip_norms": (1.0, 1.0)}
_SMALL = {
  "model.name": "linear",
  "model.options": {},
  "data.limit": 300,
  "num_steps": 4,
  "eval_every": 4,
  "checkpoint_every": 2,
  "privacy.normalization": _PRIVATE,
}


def _config(**changes):
  named = {name.replace("__", "."): value for name, value in changes.items()}
  return fields.replace_all(fields.replace_all(quickstart.get_config(), _SMALL), named)


@pytest.fixture(scope="module")
def loaded():
  return build.load_data(_config())


@pytest.fixture(scope="module")
def run(loaded):
  return build.assemble(_config(), loaded)


def _means(config, loaded, random=None):
  """What a run of this config releases of these data."""
  plan = privacy.make_plan(config, 300)
  random = build.Central(config).new_keys() if random is None else random
  return np.asarray(normalization.release(plan, random, loaded[0]).mean)


@pytest.mark.slow
def test_a_run_pays_for_them_says_so_and_releases_them(loaded, tmp_path):
  config = _config(privacy__epsilon=4.0)
  result = loop.train(config, tmp_path / "whole", data=loaded)
  ledger = Ledger.from_json(result["ledger"])
  gaussian = ledger.charges[0].event.events[0].event
  assert gaussian.noise_multiplier == pytest.approx(2 / 2**0.5)
  assert 3.9 < result["epsilon"] <= 4.0
  assert "Before the first step: mean and mean square" in result["privacy_statement"]
  assert result["normalization"] == "private_statistics"
  held = dict(np.load(tmp_path / "whole" / "params.npz"))
  meta = owner.recall(tmp_path / "whole")
  random = run_keys.from_meta(config.seed, meta)
  assert np.array_equal(held["statistics/mean"], _means(config, loaded, random))
  saved = json.dumps([path.name for path in (tmp_path / "whole").rglob("*")])
  assert "features" not in saved  # nothing of the data is kept


@pytest.mark.long  # that they are a function of settings and data is shown below
def test_without_noise_on_the_gradients_none_is_stated(loaded, run):
  without = _config(privacy__epsilon=None, privacy__noise_multiplier=0.0)
  unpaid = facts.planned_facts(without, build.assemble(without, loaded))
  assert unpaid["normalization"] == "private_statistics"  # it is done nevertheless
  planned = facts.planned_facts(_config(), run)
  assert planned.keys() - unpaid.keys() == {"statistics_noise_multiplier"}


@pytest.mark.slow
def test_a_resumed_run_has_the_same_statistics(loaded, tmp_path):
  def stop(step):
    if step == 2:
      raise KeyboardInterrupt

  with on_save(stop), pytest.raises(KeyboardInterrupt):
    loop.train(_config(noise_seed=0), tmp_path / "cut", data=loaded)
  cut = loop.train(_config(noise_seed=0), tmp_path / "cut", data=loaded)
  whole = loop.train(_config(noise_seed=0), tmp_path / "whole", data=loaded)
  assert cut["params_sha256"] == whole["params_sha256"]


_WHITENED = {
  "name": "private_whitening",
  "noise_multiplier": 4.0,
  "clip_norms": (4.0, 9.0, 9.0, 5.0, 2.0),
  "num_directions": 20,
  "floor_rank": 10,
}


@pytest.mark.cases(slow=["by_outputs"], long=...)
@pytest.mark.parametrize("scaling", ["none", "by_outputs"])
def test_a_whitened_run_pays_for_five_sums_and_goes_on_with_the_same(
  loaded, tmp_path, scaling
):
  config = _config(
    privacy__normalization=_WHITENED, privacy__epsilon=4.0, privacy__scaling=scaling,
    noise_seed=0,
  )  # fmt: skip

  def stop(step):
    if step == 2:
      raise KeyboardInterrupt

  with on_save(stop), pytest.raises(KeyboardInterrupt):
    loop.train(config, tmp_path / "cut", data=loaded)
  cut = loop.train(config, tmp_path / "cut", data=loaded)
  result = loop.train(config, tmp_path / "whole", data=loaded)
  assert cut["params_sha256"] == result["params_sha256"]
  gaussian = Ledger.from_json(result["ledger"]).charges[0].event.events[0].event
  assert gaussian.noise_multiplier == pytest.approx(4 / 5**0.5)
  assert 3.9 < result["epsilon"] <= 4.0
  assert "second moments of channels" in result["privacy_statement"]
  assert result["normalization"] == "private_whitening"
  held = dict(np.load(tmp_path / "whole" / "params.npz"))
  names = {name.removeprefix("statistics/") for name in held if "statistics" in name}
  assert names == set(Spread._fields)


@pytest.mark.long
def test_the_checks_of_whitening_hold_and_refute(loaded, monkeypatch):
  # The checks take 8 examples, 800 times. Padded to a usual chunk they took six minutes.
  monkeypatch.setattr(noisy_means, "_CHUNK", 8)
  run = build.assemble(_config(privacy__normalization=_WHITENED), loaded)
  assert _passes(before_steps.influence, run, mechanisms.Whitening)
  assert _passes(before_steps.noise_std, run, mechanisms.Whitening)
  assert not _passes(before_steps.influence, run, _LongWhitening)
  assert not _passes(before_steps.noise_std, run, _QuietWhitening)


def test_features_are_standardised_before_they_are_whitened_where_groups_are_given():
  groups = {"name": "scatter_linear", "options": {"num_groups": 27}}
  found = []
  for changes in ({}, {"model.options": {}}, {"privacy.normalization": "per_example"}):
    start = {"model.name": groups["name"], "model.options": groups["options"]}
    start["privacy.normalization"] = _WHITENED
    config = fields.replace_all(fields.replace_all(quickstart.get_config(), start), changes)
    found.append(normalization.per_example(config))
  assert found == [True, False, True]


@pytest.mark.slow
def test_training_and_test_data_are_normalised_by_the_same(run, loaded):
  for mine, raw in zip((run.train, run.test), loaded):
    wanted = np.asarray(channel_statistics.standardize(raw.x, run.statistics))
    assert np.allclose(mine.x, wanted, atol=1e-5) and np.array_equal(mine.y, raw.y)
    assert np.abs(mine.x).max() > 1.1 * np.abs(raw.x).max()


@pytest.mark.slow
def test_p17_their_noise_is_that_of_the_run(loaded):
  config = _config()
  assert not np.array_equal(_means(config, loaded), _means(config, loaded))
  config = _config(noise_seed=1)
  assert np.array_equal(_means(config, loaded), _means(config, loaded))


@pytest.mark.long  # compiles the stretching of a release key
def test_p18_a_release_draws_from_a_key_of_its_own(loaded):
  found = [_means(_config(), loaded, run_keys.draw(0, release=True)) for _ in range(2)]
  assert not np.array_equal(*found)


class _Source:
  """Rows that lie elsewhere."""

  def __init__(self, x):
    self.x = x

  def __len__(self):
    return len(self.x)

  def read(self, places):
    return self.x[places]


@pytest.mark.slow
def test_rows_of_files_are_normalised_in_one_shape(loaded, run):
  """As many as are drawn, which no step has in common with another: one compilation."""
  train = loaded[0]
  lazy = dataclasses.replace(train, x=Rows(_Source(train.x), train.x.shape[1:]))
  shapes, kind = [], type(run.statistics)
  make = kind.standardizer

  def seen(self):
    step = make(self)
    return lambda x: shapes.append(x.shape) or step(x)

  with mock.patch.object(kind, "standardizer", seen):
    found = normalization.normalize(lazy, run.statistics)
  for count in (3, 17, 40):
    np.testing.assert_array_equal(found.x[:count], run.train.x[:count])
  assert len({*shapes}) == 1


@pytest.mark.long
def test_a_run_whose_statistics_come_out_otherwise_does_not_go_on(loaded, tmp_path):
  """Two releases with one noise would tell how they differ."""
  config = _config(num_steps=4, checkpoint_every=2)
  with on_save(_killed_at(2)), pytest.raises(RuntimeError, match="killed"):
    loop.train(config, tmp_path, data=loaded)
  other = lambda *given: jax.tree.map(
    lambda leaf: np.nextafter(leaf, 9.0), released(*given)
  )
  released = normalization.release
  with (
    mock.patch.object(normalization, "release", other),
    refuses("checkpoint"),
  ):
    loop.train(config, tmp_path, data=loaded)
  assert loop.train(config, tmp_path, data=loaded)["num_steps"] == 4


def _killed_at(step):
  def kill(saved):
    if saved == step:
      raise RuntimeError("killed")

  return kill


@pytest.mark.slow
def test_canaries_are_part_of_what_is_fitted(loaded, monkeypatch):
  """Statistics are of the changed data: an audit sees what they tell of a canary."""
  seen = []
  after = channel_statistics.ChannelStatistics.after

  def noted(self, key, x, before):
    seen.append((len(x), self.normalize_by))
    return after(self, key, x, before)

  monkeypatch.setattr(channel_statistics.ChannelStatistics, "after", noted)
  audited = _config(
    audit="canaries",
    audit__num_canaries=100,
    privacy__neighboring_relation="replace_special",
  )
  found = build.assemble(audited, loaded)
  out = int((~found.canaries.included).sum())
  assert seen == [(300 - out, 300.0)]  # empty records are left out, their place is public
  assert np.abs(found.canaries.examples.x).max() > 1.1  # as the data that they are among


@pytest.mark.long
@pytest.mark.parametrize("relation", ["replace_special", "replace_one"])
def test_a_run_of_dp_ftrl_pays_for_them_and_goes_on_with_the_same(
  relation, loaded, tmp_path
):
  config = _config(**_FTRL, privacy__neighboring_relation=relation, noise_seed=0)
  with on_save(_killed_at(2)), pytest.raises(RuntimeError, match="killed"):
    loop.train(config, tmp_path / "cut", data=loaded)
  cut = loop.train(config, tmp_path / "cut", data=loaded)
  result = loop.train(config, tmp_path / "whole", data=loaded)
  assert cut["params_sha256"] == result["params_sha256"]
  assert 3.9 < result["epsilon"] <= 4.0
  before = Ledger.from_json(result["ledger"]).charges[0].event.events[0].event.event
  assert before.noise_multiplier == pytest.approx(8 / 2**0.5)  # in clip norms
  assert "Before the first step" in result["privacy_statement"]


_FTRL = {
  "privacy": "dp_ftrl",
  "privacy__epsilon": 4.0,
  "privacy__sampling_prob": 0.5,
  "privacy__strategy": {"name": "banded", "bands": 2},
  "privacy__normalization": {**_PRIVATE, "noise_multiplier": 8.0},
}


@pytest.mark.long
@pytest.mark.parametrize("relation", ["", "replace_special", "replace_one"])
def test_every_check_holds(relation, loaded):
  ftrl = _FTRL | {"privacy__neighboring_relation": relation} if relation else {}
  subject = of_config.subject(_config(**ftrl), loaded)
  rows = list(table.rows(of_config.checks(subject), subject))
  assert [row for row in rows if row.passed is False] == []
  assert {"statistics: influence", "statistics: noise"} <= {row.name for row in rows}


def _passes(check_one, run, kind):
  """Whether a check of the statistics passes, of statistics of this kind."""
  mine = kind(**vars(run.plan.statistics))
  plan = dataclasses.replace(run.plan, statistics=mine)
  subject = types.SimpleNamespace(plan=plan, batch=lambda: run.train[np.arange(8)])
  return check_one(subject).passed


@pytest.mark.long
def test_the_check_of_influence_refutes_what_is_not_clipped(run):
  assert _passes(before_steps.influence, run, channel_statistics.ChannelStatistics)
  assert not _passes(before_steps.influence, run, _Unclipped)


@pytest.mark.long  # the game of the mechanism shows it too
def test_the_check_of_noise_refutes_half_of_it(run):
  assert _passes(before_steps.noise_std, run, channel_statistics.ChannelStatistics)
  assert not _passes(before_steps.noise_std, run, _HalfNoise)


class _Unclipped(channel_statistics.ChannelStatistics):
  """States the price of clipped sums and clips nothing."""

  def noisy_mean(self, key, rows, clip_norm):
    noise = super().noisy_mean(key, 0 * rows, clip_norm)
    return noise + rows.sum(axis=0) / self.normalize_by


class _LongWhitening(mechanisms.Whitening):
  """States the price of norms that it clips to three times."""

  def clip_norm(self, key, norms, which):
    return super().clip_norm(key, norms, which) * (3 if which == 4 else 1)

  def noisy_totals(self, found):
    norms = np.array(found.clip_norms) / np.array([1, 1, 1, 1, 3])
    return super().noisy_totals(found._replace(clip_norms=norms))


class _QuietWhitening(mechanisms.Whitening):
  """States a noise of which it adds half."""

  @property
  def _sums(self):
    return mechanisms.Gaussian(self.noise_multiplier / 2, 1.0)


class _HalfNoise(channel_statistics.ChannelStatistics):
  """States a noise of which it adds half."""

  @property
  def _sums(self):
    return mechanisms.Gaussian(self.noise_multiplier / 2, 1.0)


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    (
      {"privacy": "sgd", "privacy__normalization": "private_statistics"},
      "config.privacy.normalization",
    ),
    (
      {"model__name": "scatter_linear", "model__options": {"num_groups": 27}},
      "model.options.num_groups",
    ),
    (
      {"privacy__normalization": {**_PRIVATE, "median_epsilon": 0.3}},
      "privacy.normalization.median_epsilon",
    ),
    (
      {"privacy__normalization": {**_PRIVATE, "noise_multiplier": -1.0}},
      "privacy.normalization.noise_multiplier",
    ),
  ],
)
def test_what_does_not_go_together_is_one_line(changes, field, loaded):
  with refuses(field) as caught:
    build.assemble(_config(**changes), loaded)
  assert "\n" not in str(caught.value)


def test_attacks_whose_models_share_a_function_are_refused():
  config = AttackConfig(target=_config(eval_every=100, checkpoint_every=100))
  with refuses("target.privacy.normalization"):
    Attack(config).check()


def test_a_sweep_does_not_share_features_that_are_normalised_otherwise():
  loads = []
  last = engine.LastData(lambda config: loads.append(config) or len(loads))
  mine = _config()
  noisier = _config(privacy__normalization={**_PRIVATE, "noise_multiplier": 3.0})
  assert [last(mine), last(noisier)] == [1, 1]
  assert last(_config(privacy__normalization="per_example")) == 2


def test_the_progress_of_features_tells_no_number_of_examples(monkeypatch, capsys):
  def chunks(images, **seen):
    yield from np.array_split(np.zeros((len(images), 2, 2, 3), np.float32), 7)

  monkeypatch.setattr("dpjax.zoo.networks.scattering.scattering_chunks", chunks)
  said = []
  for size in (307, 308):
    images = np.zeros((size, 8, 8, 3), np.float32)
    dataset = data.from_arrays(images, np.zeros(size, int), num_classes=2)
    make = lambda: features.scattering_blocks(dataset, None, True, {"colours": "rgb"})
    computed = features.ComputedFeatures((), (), (), make)
    blocks = list(features._with_bar(computed, "scattering", size))
    assert sum(map(len, blocks)) == size
    said.append(capsys.readouterr().err.rpartition(" ")[0])  # without the speed
  assert said[0] == said[1] == "scattering features, percent: 100/100"
