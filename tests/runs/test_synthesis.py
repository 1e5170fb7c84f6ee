"""A run of private synthesis: its guarantee, resuming, release mode, an empty class."""

import dataclasses

import numpy as np
import pytest

from dpjax import Plan, accounting, data
from dpjax.accounting import Ledger
from dpjax.data import digest, from_arrays, table_declaration
from dpjax.experiments.kinds.pate import vote_costs
from dpjax.experiments.kinds.pate.config import Pate, PateConfig
from dpjax.experiments.kinds.synthesis import build, sample_scores
from dpjax.experiments.kinds.synthesis.config import (
  KernelMean,
  SynthesisConfig,
  WassersteinGan,
  check,
)
from dpjax.experiments.kinds.synthesis.sampled_run import SampledRun
from dpjax.experiments.run import loop, run_keys
from dpjax.mechanisms import ClassSums
from dpjax.zoo.recipes.synthesis import Embedding
from tests.refuses import refuses
from tests.runs import small_configs


@pytest.fixture(scope="module")
def sides():
  """A third class has no record."""
  return small_configs.halves((600, 100), num_classes=3)


def _config(**changes):
  settings = {
    "method": KernelMean(num_frequencies=8, side=2, num_steps=150),
    "epsilon": 2.0,
    "per_class": 20,
    "num_latents": 4,
    "hidden": 16,
    "learning_rate": 0.02,
    "num_samples": 120,
  }
  return SynthesisConfig(**(settings | changes))


# After 150 updates, one generator in twelve teaches a classifier no more than .9.
_LONGER = {
  "method": KernelMean(num_frequencies=8, side=2, num_steps=300),
  "num_samples": 480,
}


@pytest.fixture(scope="module")
def whole(sides, tmp_path_factory):
  folder = tmp_path_factory.mktemp("whole")
  return folder, loop.train(_config(attack=True, **_LONGER), folder, data=sides)


@pytest.mark.slow
def test_the_epsilon_is_that_of_one_release_and_samples_are_written(whole):
  folder, result = whole
  assert result["epsilon_kind"] == "proved"
  event = accounting.gaussian_event(result["noise_multiplier"])
  assert result["epsilon"] == pytest.approx(accounting.epsilon(event, delta=1e-5), rel=1e-9)
  assert result["epsilon"] == pytest.approx(2.0, rel=1e-3) and result["epsilon"] <= 2.0
  ledger = Ledger.from_json(result["ledger"])
  assert ledger.num_steps == 7 and ledger.epsilon(1e-5) == result["epsilon"]
  assert "clipped to norm 1" in result["privacy_statement"]
  with np.load(folder / "samples.npz") as samples:
    assert samples["x"].shape == (480, 4, 4, 1)
    # The third class has no records: noise is not taken for some.
    assert sorted(set(samples["y"].tolist())) == [0, 1]
  assert result["noisy_counts"][2] == 0.0
  lines = (folder / "samples.csv").read_text().splitlines()
  assert len(lines) == 481 and lines[0].startswith("label,pixel_0,")
  assert (folder / "samples.png").stat().st_size > 0
  assert result["not_private/attack_tpr_at_fpr_0.01"] <= result["tpr_at_fpr_0.01"] + 0.05


@pytest.mark.slow
def test_samples_look_like_their_class_and_teach(whole, sides, tmp_path):
  """One generator in a hundred is stuck from its first parameters on; that of seed 0 is one."""
  folder, result = whole
  runs = [(folder, result)]
  for seed in (1, 2, 3):
    folder = tmp_path / str(seed)
    runs.append((folder, loop.train(_config(seed=seed, **_LONGER), folder, data=sides)))
  assert np.mean([result["test_accuracy"] for _, result in runs]) > 0.9
  bright = []
  for folder, _ in runs:
    with np.load(folder / "samples.npz") as samples:
      bright.append(samples["x"][samples["y"] == 0][:, :2].mean())
  assert np.mean(bright) > 0.5


@pytest.mark.long
def test_a_release_draws_its_noise_from_the_system(whole, sides, tmp_path):
  _, result = whole
  released = loop.train(
    _config(release=True, method=KernelMean(num_frequencies=8, side=2, num_steps=1)),
    tmp_path,
    data=sides,
  )
  assert released["params_sha256"] != result["params_sha256"]
  assert not [name for name in released if name.startswith("not_private")]
  assert "256 bits" in " ".join(released["privacy_statement"].split())


def test_updates_of_the_generator_are_charged_as_nothing():
  config = _config()
  promised = build.guarantee_of(config, config.method.mechanism(config, 3), 600)
  assert promised.curve(0) == 0.0
  assert promised.curve(1) == promised.curve(10_000) > 1.9
  swap = _config(neighboring_relation="replace_one")
  other = build.guarantee_of(swap, swap.method.mechanism(swap, 3), 600)
  assert other.curve(1) == pytest.approx(promised.curve(1), rel=1e-6)
  # The same epsilon takes twice the noise there.
  assert swap.method.mechanism(swap, 3).std == 2 * config.method.mechanism(config, 3).std


@pytest.mark.parametrize(
  "changes, field",
  [
    ({"method": KernelMean(num_frequencies=0, side=0)}, "method.num_frequencies"),
    ({"attack": True, "release": True}, "attack"),
    ({"neighboring_relation": "replace_special"}, "neighboring_relation"),
    ({"per_class": 1}, "per_class"),
    ({"epsilon": float("nan")}, "epsilon"),
  ],
)
def test_it_refuses_in_one_line(changes, field):
  with refuses(field):
    check(_config(**changes))


@pytest.mark.parametrize("noise", [1e-320, 1e-31, 1e31, 1e308])
def test_noise_that_float32_cannot_hold_is_refused(noise):
  with refuses("noise_multiplier", value=noise):
    KernelMean(noise_multiplier=noise)


def test_frequencies_that_an_image_lacks_are_refused(sides, tmp_path):
  most = max(sides[0].x.shape[1:3])
  config = _config(method=KernelMean(num_frequencies=8, side=most + 1, num_steps=1))
  with refuses("method.side", value=most + 1):
    loop.train(config, tmp_path / "run", data=sides)
  assert not (tmp_path / "run").exists()


_DECLARED = {
  "columns": {"dose": {"lower": -10, "upper": 10}, "sex": {"values": ["f", "m"]}},
  "target": {"column": "ill", "values": ["no", "yes"]},
  "split": {"test_share": 0.2, "salt": 0},
  "num_examples": 640,
}


def _people(count=800):
  """Only those with a large dose are ill, nearly all of them women."""
  rng = np.random.default_rng(0)
  ill = rng.random(count) < 0.5
  woman = rng.random(count) < np.where(ill, 0.9, 0.1)
  return {
    "dose": (rng.normal(0, 1, count) + np.where(ill, 4, -4)).tolist(),
    "sex": np.where(woman, "f", "m").tolist(),
    "ill": np.where(ill, "yes", "no").tolist(),
  }


@pytest.mark.slow
def test_a_table_becomes_a_table_of_the_same_columns_that_teaches(tmp_path):
  train, test = data.table(_people(), _DECLARED)
  method = KernelMean(num_frequencies=50, length_scale=1.0, side=1, num_steps=400)
  config = _config(method=method, num_samples=480, attack=True, noise_seed=0)
  result = loop.train(config, tmp_path, data=(train, test))
  assert result["test_accuracy"] > 0.85 and result["epsilon"] <= 2.0
  assert not (tmp_path / "samples.png").exists()
  assert result["not_private/clipped_cells"] == {"dose": 0}
  # What is written is a table that the same declaration reads, and what was scored.
  read, rest = data.table(tmp_path / "samples.csv", _DECLARED)
  with np.load(tmp_path / "samples.npz") as samples:
    x, y = samples["x"], samples["y"]
  assert set(np.unique(x[:, 1:])) == {0.0, 1.0} and (x[:, 1:].sum(axis=1) == 1).all()
  both = np.concatenate([read.x, rest.x])
  by_dose = lambda rows: rows[np.argsort(rows[:, 0])]
  np.testing.assert_allclose(by_dose(both), by_dose(x), atol=1e-3)
  women = [np.mean(x[y == label, 1]) for label in (0, 1)]
  assert women == pytest.approx([0.1, 0.9], abs=0.1)


def test_samples_of_a_table_keep_the_digits_that_its_declaration_needs(tmp_path):
  """A range that is narrow and far from 0, and categories of five digits."""
  declared = {
    "columns": {
      "second": {"lower": 2**40, "upper": 2**40 + 200},
      "zip": {"values": [94103, 94104, 0.12345]},
    },
    "target": {"column": "code", "values": [12345, 12346]},
    "split": {"test_share": 0.5},
  }
  rng = np.random.default_rng(0)
  x = np.concatenate([rng.random((40, 1)), np.eye(3)[rng.integers(0, 3, 40)]], axis=1)
  y = rng.integers(0, 2, 40)
  parsed = table_declaration.parse(declared)
  sample_scores.write(tmp_path, x.astype(np.float32), y, parsed)
  parts = data.table(tmp_path / "samples.csv", declared)
  read = np.concatenate([np.column_stack([part.x, part.y]) for part in parts])
  wanted = np.column_stack([x, y])
  by_first = lambda rows: rows[np.argsort(rows[:, 0])]
  np.testing.assert_allclose(by_first(read), by_first(wanted), atol=1e-6)


@pytest.mark.long
def test_a_critic_learns_from_a_table(tmp_path):
  pair = data.table(_people(), _DECLARED)
  config = _config(method=WassersteinGan(epochs=2, batch_size=64))
  result = loop.train(config, tmp_path, data=pair)
  assert result["epsilon"] <= 2.0 and np.isfinite(result["test_accuracy"])
  assert (tmp_path / "samples.csv").read_text().startswith("dose,sex,ill\n")


def test_it_refuses_what_are_no_images_and_a_budget_that_is_too_small(sides, tmp_path):
  rows = from_arrays(np.zeros((4, 3, 2), np.float32), [0, 1, 0, 1], num_classes=2)
  with refuses("data.name"):
    loop.train(_config(), tmp_path / "rows", data=(rows, rows))
  with pytest.raises(ValueError, match="epsilon_budget"):
    loop.train(_config(epsilon_budget=1.0), tmp_path / "budget", data=sides)


def _statement(config, count):
  x = np.full((count, 4, 4, 1), 0.5, np.float32)
  train = from_arrays(x, np.arange(count) % 3, num_classes=3)
  phase = build._Run(config, train, train, None).phase()
  return phase.guarantee.statement(1), phase.guarantee.num_records


def test_no_file_says_how_many_records_there_are():
  # One record more or less showed in the statement of result.json, as a "declared" number.
  assert _statement(_config(), 123) == _statement(_config(), 124)
  assert "123" not in _statement(_config(), 123)[0]
  # The other relation fixes the number.
  swap = _config(neighboring_relation="replace_one")
  assert "123" in _statement(swap, 123)[0]


def test_votes_say_no_number_of_records_either(monkeypatch):
  guarantees = []
  monkeypatch.setattr(
    vote_costs, "guarantee_of", lambda config, count: guarantees.append(count)
  )
  x = np.zeros((123, 4, 4, 1), np.float32)
  private = from_arrays(x, np.zeros(123, int), num_classes=2)
  for relation in ("add_or_remove_one", "replace_one"):
    config = PateConfig(
      neighboring_relation=relation, num_pool=100, num_queries=10, pool_is_public=True
    )
    # The guarantee of this test is none.
    with pytest.raises(AttributeError):
      next(Pate(config).train((private, private), None))
  assert guarantees == [None, 123]


def test_a_release_without_an_epsilon_is_refused():
  config = _config(
    method=KernelMean(num_frequencies=8, side=2, num_steps=150, noise_multiplier=1e-9)
  )
  assert build.guarantee_of(config, config.method.mechanism(config, 3), 600).kind == "none"
  config = dataclasses.replace(config, release=True)
  with refuses("release", value=True):
    build.guarantee_of(config, config.method.mechanism(config, 3), 600)


def test_a_narrow_chunk_is_refused():
  # It was added to each of 10,000 columns: one record moved the sums by 100.
  chunks = [np.zeros((1, 10_000)), np.ones((1, 1))]
  with refuses("rows"):
    ClassSums(1.0, 2).exact(chunks, np.zeros(2, int))


def test_nobodys_data_are_noise_around_zero():
  embedding = Embedding((4, 4, 1), num_frequencies=3, side=2)
  nobody = np.zeros((0, 4, 4, 1))
  chunks = embedding.chunks(nobody)
  sums = ClassSums(1.0, 2).exact(chunks, [])
  assert sums.shape == (2, embedding.width) and not np.any(sums)
  with refuses("rows"):
    ClassSums(1.0, 2).exact([], np.zeros(0, int))


def test_a_row_of_the_largest_frequencies_follows_from_its_image_alone():
  embedding = Embedding((64, 64, 1), num_frequencies=37, length_scale=1e-3, side=0)
  images = np.random.default_rng(0).random((5, 64, 64, 1))
  # Sums of this image are the largest: they were beyond 2^53 units, and so rounded.
  images[1] = (embedding.frequencies[:, 0] > 0).reshape(64, 64, 1) * (1 - 2.0**-12)
  alone = np.concatenate([embedding.rows(image[None]) for image in images])
  assert np.array_equal(embedding.rows(images), alone)
  units = np.abs(embedding.frequencies).sum(axis=0) * 2.0**36
  assert 2.0**51 < units.max() <= 2.0**53


def test_empty_records_are_part_of_the_identity_of_data(sides):
  # Two runs with the same noise would differ by what the empty record was.
  full = np.ones(len(sides[0]), bool)
  less = full.copy()
  less[3] = False
  digests = [
    digest(dataclasses.replace(sides[0], present=present)) for present in (None, full, less)
  ]
  assert digests[0] == digests[1] != digests[2]


def test_a_run_whose_classes_all_look_empty_ends_without_samples(sides, tmp_path):
  config = _config(attack=True)
  run = build._Run(config, *sides, run_keys.draw(0, release=True))
  state = run.init()
  assert run.scores(state)["accuracy"] == np.mean(sides[1].y == 0)
  run.write(tmp_path, state)
  assert len((tmp_path / "samples.csv").read_text().splitlines()) == 1
  empty = {"noisy_counts": [0.0] * 3, "classes_without_samples": [0, 1, 2]}
  alone = float(np.bincount(sides[1].y).max() / len(sides[1]))
  none = {"num_samples": 120, "samples_by_class": [0, 0, 0], "test_largest_class": alone}
  assert run.describe(state, {}, []) == {**empty, **none}


def test_samples_of_classes_alike_are_counted_and_a_poor_accuracy_is_told(
  sides, monkeypatch, capsys
):
  run = build._Run(_config(), *sides, run_keys.draw(0, release=True))
  labels = np.resize([0, 1], 120)
  drawn = np.zeros((120, 4, 4, 1), np.float32), labels
  monkeypatch.setattr(run, "samples", lambda state: drawn)
  described = SampledRun.describe(run, None, None, None)
  assert described["samples_by_class"] == [60, 60, 0]
  assert "samples have all classes alike" in capsys.readouterr().err


def test_two_classes_are_scored_by_their_ranks():
  x = np.linspace(0, 1, 40)[:, None]
  scores = sample_scores.downstream(x, x[:, 0] > 0.5, x, x[:, 0] > 0.5)
  assert scores["auroc_logistic_regression"] == 1.0 and "auroc_mlp" in scores


# --- two networks


def _two_networks(**changes):
  method = WassersteinGan(batch_size=200, epochs=1, critic_hidden=4, critic_steps=2)
  return _config(**{"method": method, "per_class": 5, **changes})


@pytest.mark.slow
def test_two_networks_cost_the_steps_of_the_critic(sides, tmp_path):
  config = _two_networks(num_samples=9, noise_seed=0)
  result = loop.train(config, tmp_path / "whole", data=sides)
  assert result["method"] == "wgan_gp" and result["epsilon_kind"] == "claimed"
  charges = Ledger.from_json(result["ledger"])
  assert charges.num_steps == result["num_steps"] == 3
  # The plan that `Plan.for_data` makes from the declared number alone.
  plan = Plan.for_data(
    sides[0], batch_size=200, epochs=1, epsilon=2.0, delta=1e-5, l2_clip_norm=1.0
  )
  assert result["epsilon"] == pytest.approx(plan.epsilon(), rel=1e-9)
  assert 1.9 < result["epsilon"] <= 2.0
  with np.load(tmp_path / "whole" / "samples.npz") as samples:
    assert samples["x"].shape == (9, 4, 4, 1)
    assert samples["y"].tolist() == [0, 1, 2] * 3


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"release": True}, "release"),
    (
      {"method": {"name": "wgan_gp", "num_frequencies": 9}},
      "config.method.num_frequencies",
    ),
    (
      {"method": {"name": "wgan_gp", "noise_multiplier": 1.0}},
      "config.method.noise_multiplier",
    ),
    ({"method": {"name": "wgan_gp", "num_steps": 7}}, "config.method.num_steps"),
    (
      {"neighboring_relation": "replace_one"},
      "neighboring_relation",
    ),
  ],
)
def test_what_two_networks_do_not_read_is_refused(changes, field):
  with refuses(field):
    check(_two_networks(**changes))


def test_what_the_data_show_to_be_wrong_names_the_field_of_the_config(sides, tmp_path):
  config = _two_networks()
  config.method = dataclasses.replace(config.method, batch_size=10**6)
  with refuses("method.batch_size", value=1000000):
    loop.train(config, tmp_path, data=sides)
