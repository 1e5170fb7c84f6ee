"""What a stranger typed: numbers beyond every type, options of the wrong kind, and folders
that a refused run must leave as it found them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from absl import flags

from configs import quickstart
from configs.fed import quickstart as fed_quickstart
from dpjax import accounting, data
from dpjax.experiments.checks import long_games
from dpjax.experiments.config import choices, fields
from dpjax.experiments.config.naming import naming
from dpjax.experiments.kinds import privacy_section
from dpjax.experiments.kinds.central import build, privacy
from dpjax.experiments.kinds.central.build import Central
from dpjax.experiments.kinds.central.config import ModelConfig, TrainConfig
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.run import dry_run, loop, writers
from dpjax.experiments.sweeps import curves, tuning
from dpjax.experiments.sweeps import sweep as sweeps
from dpjax.experiments.sweeps.sweep import Selection, Sweep
from dpjax.validate import UserError
from launch import account
from tests.refuses import refuses

_HUGE = ("1" + "0" * 30, "-1" + "0" * 30, "1" + "0" * 400, "[1" + "0" * 400 + "]")


def _config(**changes) -> TrainConfig:
  config = quickstart.get_config()
  config.num_steps, config.data.limit = 2, 60
  dotted = {path.replace("__", "."): value for path, value in changes.items()}
  return fields.replace_all(config, dotted)


@pytest.mark.parametrize("kind", [TrainConfig, FedConfig, RelevanceConfig])
def test_an_integer_beyond_every_array_is_refused_or_a_number(kind):
  for path in (leaf.path for leaf in choices.leaves(kind())):
    for text in _HUGE:
      try:
        value = fields.get(fields.override(kind(), path, text), path)
      except UserError as error:
        assert path.split(".")[-1] in str(error) and len(str(error)) < 1200
      else:  # text, a number of float's range, or a list of those
        assert isinstance(value, (str, float, list, tuple)), (path, value)


def test_an_integer_that_python_does_not_write_out_is_refused():
  with refuses("c.num_steps"):
    fields.check(
      dataclasses.replace(TrainConfig(), num_steps=1 << 20_000), TrainConfig, "c"
    )
  with refuses("config.privacy.delta"):
    fields.replace(TrainConfig(), "privacy.delta", 1 << 20_000)
  with refuses("config.model.options['features']"):
    fields.replace(TrainConfig(), "model.options", {"features": (1 << 20_000,)})


def test_bytes_that_are_no_text_are_refused():
  for path in ("data.name", "model.options.activation", "data.data_dir", "optimizer.rule"):
    with refuses(f"config.{path}"):
      fields.override(TrainConfig(), path, "a\udcff.npz")


def test_a_title_or_a_name_is_no_formula(tmp_path):
  row = {"a": 1.0, "b": 0.5, "s": "$\\frac{$", "epsilon_kind": "none"}
  title = "$\\nosuch$ {a} \\ $x_"
  sweep = Sweep(x="a", y="b", series="s", references=[(title, 1.0, 0.2)])
  row |= {"label": "a run"}
  curves.Curves(sweep).write(tmp_path, [row], title=title, last=False)
  assert (tmp_path / "curve.png").stat().st_size > 1000


@pytest.mark.parametrize(
  ("name", "options", "field"),
  [
    ("mlp", {"features": 2}, "model.options.features"),
    ("mlp", {"activation": 3.5}, "model.options"),
    ("mlp", {"activation": ("leaky_relu", "a")}, "model.options"),
    ("mlp", {"activation": ("relu", 1, 2, 3)}, "model.options"),
    ("mlp", {"dtype": "nothing"}, "model.options.dtype"),
    ("linear", {"dtype": (1,)}, "model.options.dtype"),
    ("cnn", {"features": 3}, "model.options"),
    ("mlp", {"features": (1 << 40,)}, "model.name"),
  ],
)
def test_an_option_of_the_wrong_kind_is_one_line(tmp_path, name, options, field):
  config = _config(model__name=name, model__options=options)
  with refuses(field):
    loop.train(config, tmp_path / "run")
  assert not (tmp_path / "run").exists()


_CYCLIC = {"privacy": "dp_ftrl", "privacy.sampling_prob": 1e-3}
_NOISE = {"privacy.epsilon": None, "privacy.noise_multiplier": 1.0}


@pytest.mark.cases(long=[2])
@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"model.options": {"features": [0]}}, "model.options.features[0]"),
    ({"model.options": {"activation": "rellu"}}, "model.options.activation"),
    ({"memory_budget_gb": 1e-9}, "memory_budget_gb"),
    (
      {"privacy.sampler.capacity": 10**12},
      "privacy.sampler.capacity",
    ),
    ({"privacy.noise_levels": [1e-9]}, "privacy.noise_levels[0]"),
    (
      {"privacy.noise_levels": [1.0 + i for i in range(33)], "num_steps": 33},
      "privacy.noise_levels",
    ),
    (
      {
        "privacy": "dp_ftrl",
        "privacy.sampler": "cyclic_poisson",
        "privacy.sampler.steps_apart": 2,
        "privacy.strategy": "blt",
        "privacy.sampling_prob": 0.25,
      },
      "privacy.strategy",
    ),
    (
      _CYCLIC,
      "privacy.sampler",
    ),
  ],
)
def test_an_error_of_a_lower_room_names_the_field(tmp_path, changes, field):
  config = fields.replace_all(fields.replace_all(_config(), _NOISE), changes)
  with refuses(field):
    loop.train(config, tmp_path / "run")


@pytest.mark.parametrize(
  "start",
  [
    loop.train,
    lambda config, workdir: dry_run.report(Central(config), workdir),
    sweeps.run,
    tuning.run_selection,
  ],
)
def test_a_folder_that_cannot_be_is_refused_before_the_data_are_read(tmp_path, start):
  (tmp_path / "file").write_text("")
  config = _config(data__name="no/such.npz")
  if start is sweeps.run:
    config = [("a run", config)]
  if start is tuning.run_selection:
    config = sweeps.Runs([("a run", config)], Sweep(selection=Selection()))
  with refuses("workdir"):
    start(config, tmp_path / "file" / "run")


def test_more_slices_than_slots_are_refused():
  config = _config(slices=1000, privacy__epsilon=None, privacy__noise_multiplier=1.0)
  with refuses("slices", value=1000):
    privacy.make_plan(config, 60)


def test_an_attacker_out_of_reach_is_named_as_typed():
  asked = {"privacy.epsilon": None, "privacy.attacker.advantage": 0.1}
  config = fields.replace_all(_config(), asked)
  run_event = lambda noise: accounting.gaussian_event(min(noise, 1.0))
  with refuses("privacy.attacker"), naming(config):
    privacy_section.noise_multiplier(config.privacy, run_event)


def test_pictures_are_moved_and_nothing_else():
  rows = data.from_arrays(np.zeros((9, 4)), np.arange(9) % 3, num_classes=3)
  with refuses("augmentation"):
    build.assemble(_config(augmentation="shift"), (rows, rows))
  with refuses("model.name"):
    build.add_features(ModelConfig("scatter_linear"), rows)


def test_a_client_pads_no_batch_beyond_the_data():
  config = fields.replace(fed_quickstart.get_config(), "local.batch_size", 10**8)
  with refuses("local.batch_size", value=100000000):
    federated.load_data(config)


@pytest.mark.long
def test_a_refused_run_leaves_its_folder_to_the_mended_config(tmp_path):
  refused = {"epsilon_budget": 1.0, "l2_clip_norm": 3e38}
  for name, value in refused.items():
    with refuses(f"privacy.{name}", value=value):
      loop.train(_config(**{f"privacy__{name}": value}), tmp_path)
    assert not list(tmp_path.iterdir()), name
  assert loop.train(_config(), tmp_path)["num_steps"] == 2
  # A run that has begun keeps what is there, whatever is wrong with the next command.
  before = sorted(tmp_path.rglob("*"))
  with refuses("workdir"):
    loop.train(_config(privacy__epsilon_budget=1.0), tmp_path)
  assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_refused_federated_run_leaves_its_folder_to_the_mended_config(tmp_path):
  config = fed_quickstart.get_config()
  config.num_rounds, config.data.limit = 1, 200
  for path, value in {"epsilon_budget": 1.0, "l2_clip_norm": 3e38}.items():
    with refuses(f"privacy.{path}", value=value):
      loop.train(fields.replace(config, f"privacy.{path}", value), tmp_path)
    assert not list(tmp_path.iterdir()), path


@pytest.mark.parametrize("norm", [1e300, 1e-300, 4e38, 1e-30])
def test_a_clip_norm_beyond_float32_is_named(tmp_path, norm):
  """By the one bound that `gradients.Clip` has."""
  with refuses("privacy.l2_clip_norm"):
    build.Central(_config(privacy__l2_clip_norm=norm)).check()
  config = fields.replace(fed_quickstart.get_config(), "privacy.l2_clip_norm", norm)
  with refuses("privacy.l2_clip_norm"):
    loop.train(config, tmp_path)


def test_scores_of_an_attempt_with_other_noise_are_not_left_behind(tmp_path):
  with writers.MetricsWriter(tmp_path) as metrics:
    metrics.write(1, {"test_accuracy": 0.123})
    held = metrics.durable()
  first = tmp_path / writers.EVENTS / "of-the-first-attempt"
  first.touch()
  with writers.MetricsWriter(tmp_path, held):
    assert first.exists()  # the same run goes on
  with writers.MetricsWriter(tmp_path):
    assert not first.exists() and list(first.parent.iterdir())
  assert not (tmp_path / writers.METRICS).read_text()


def test_two_selections_in_one_folder_are_refused(tmp_path):
  base = _config(privacy__epsilon=None, privacy__noise_multiplier=2.0)
  named = [
    (f"rate {rate}", fields.replace(base, "optimizer.learning_rate", rate))
    for rate in (0.1, 0.2)
  ]
  runs = sweeps.Runs(named, Sweep(selection=Selection(mean_trials=2.0)))
  with writers.alone_in(tmp_path), refuses("workdir"):
    tuning.run_selection(runs, tmp_path)
  assert not (tmp_path / tuning._TRIALS_FILE).exists()


def test_an_audit_of_a_seed_or_a_time_beyond_bounds_is_refused():
  for name, value in {"seed": 10**400, "minutes": 1e308}.items():
    with refuses(name):
      long_games.Settings(only="Laplace", **{name: value})


@pytest.mark.cases(long=["given2-epochs"])
@pytest.mark.parametrize(
  ("given", "named"),
  [
    (["--num_steps=1" + "0" * 400, "--sampling_prob=.1"], "num_steps"),
    (["--batch_size=1" + "0" * 400, "--num_examples=9", "--num_steps=2"], "batch_size"),
    (["--epochs=1e308", "--sampling_prob=1e-10"], "epochs"),
  ],
)
def test_a_count_beyond_every_float_is_refused(given, named):
  values = flags.FlagValues()
  account.define_flags(values)
  values(["account", "--noise_multiplier=1", *given])
  with pytest.raises(UserError, match=f"{named}.*must be"):
    account.questions(values)


_UNPROVED = dict(
  privacy__epsilon=None, privacy__noise_multiplier=1.0, privacy__sampler="shuffled"
)


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    (_UNPROVED | dict(privacy__epsilon_budget=0.1), "privacy.epsilon_budget"),
    (
      dict(
        privacy__epsilon=None, privacy__noise_multiplier=0.0, privacy__epsilon_budget=0.1
      ),
      "privacy.epsilon_budget",
    ),
    (_UNPROVED | dict(release=True), "release"),
    (
      dict(privacy__epsilon=None, privacy__noise_multiplier=1e-8, release=True),
      "release",
    ),
    (
      dict(privacy__clipping={"name": "adaptive"}, privacy__noise_levels=[1.0, 2.0]),
      "privacy.noise_levels",
    ),
    (
      dict(privacy__clipping={"name": "adaptive"}, privacy__clip_schedule="linear"),
      "privacy.clip_schedule",
    ),
    (
      dict(optimizer__rule={"name": "dp_adam"}, privacy="dp_ftrl"),
      "optimizer.rule",
    ),
    (
      dict(privacy__noise_levels=[1.0, 1.0, 5.0]),
      "privacy.noise_levels",
    ),
    (
      dict(num_steps=1, privacy__clip_schedule="linear", privacy__clip_schedule__final=0.5),
      "privacy.clip_schedule",
    ),
    (
      dict(optimizer__rule={"name": "dp_adam"}, privacy__noise_levels=[1.0, 2.0]),
      "optimizer.rule",
    ),
  ],
)
def test_a_setting_that_would_be_ignored_in_this_combination_is_refused(changes, field):
  config = _config(**changes)
  with refuses(field), naming(config):
    build.assemble(config, build.load_data(config))


def test_a_federated_budget_without_an_epsilon_is_refused():
  config = fed_quickstart.get_config()
  config = fields.replace_all(
    config,
    {
      "privacy.epsilon": None,
      "privacy.noise_multiplier": 0.0,
      "privacy.epsilon_budget": 0.1,
    },
  )
  with refuses("privacy.epsilon_budget", value=0.1):
    federated.assemble(config)


def test_a_cohort_that_is_no_whole_share_of_a_cyclic_pass_is_refused():
  """Of 100 clients 80 ran as 100, and the result said 80."""
  config = fields.replace_all(
    fed_quickstart.get_config(),
    {"privacy": "dp_ftrl", "clients_per_round": 80},
  )
  with refuses("clients_per_round", value=80.0):
    federated.assemble(config)
