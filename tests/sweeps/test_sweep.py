"""Sweeps with a fake training function: never twice, resumed, honest about their cost."""

from __future__ import annotations

import csv
import dataclasses
import errno
import importlib
import itertools
import math
import os
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import files, pictures
from dpjax.experiments.config import choices, fields, rules
from dpjax.experiments.config.choices import to_dict
from dpjax.experiments.config.common import AttackerConfig
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  Sgd,
  TrainConfig,
)
from dpjax.experiments.kinds.federated.config import Central, FedConfig
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.run import guarantee, writers
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.run.kind import experiment_of
from dpjax.experiments.sweeps import cost, curves, engine
from dpjax.experiments.sweeps.sweep import Runs, Selection, Sweep
from dpjax.noise.gaussian import key_id
from dpjax.validate import UserError
from tests.refuses import refuses
from tests.sweeps import grids
from tests.sweeps.grids import Grid

_PUBLISHED = pathlib.Path(__file__).parents[2] / "configs" / "sweeps"
_SWEEPS = sorted(set(_PUBLISHED.glob("*.py")) - {_PUBLISHED / "__init__.py"})

EPSILONS = [0.5, 2.0]


@pytest.fixture(autouse=True)
def _no_pixels(monkeypatch):
  """Pictures are drawn in test_report; here only that they are written."""

  def save(figure, path, *, also=()):
    for each in (path, *map(path.with_suffix, also)):
      files.replace_file(each, b"a picture")

  monkeypatch.setattr(pictures, "save", save)


@pytest.fixture(autouse=True)
def _no_data(monkeypatch):
  """What a run scores is known from its data, which fakes have not."""
  monkeypatch.setattr(curves.Curves, "check_data", lambda self, config, data: None)


class Fake:
  """A train function that counts its calls and can be told to fail or to be killed."""

  def __init__(self, *, fail=(), kill_at=None):
    self.calls, self.fail, self.kill_at, self.data = [], fail, kill_at, []

  def __call__(self, config, workdir, *, data=None):
    assert workdir.parent.name == "points"
    self.calls.append(workdir.name)
    self.data.append(data)
    writers.write_json(workdir / "config.json", to_dict(config))
    if len(self.calls) == self.kill_at:
      raise KeyboardInterrupt
    epsilon = getattr(config.privacy, "epsilon", None)
    if epsilon in self.fail:
      raise UserError("privacy.epsilon: cannot\nbe reached")
    private = getattr(config.privacy, "noise_multiplier", 0) != 0
    result = dict.fromkeys(writers.RESULT_KEYS, 0) | {
      "epsilon": epsilon if private else None,
      "delta": config.privacy.delta if private else None,
      "epsilon_kind": "proved" if private else "none",
      "neighboring_relation": getattr(config.privacy, "neighboring_relation", ""),
      "unit": "example",
      "test_accuracy": 0.5 + (epsilon or 5.0) / 10,
      "seed": config.seed,
      "test_loss": 1.0,
    }
    return owner.write_result(workdir, config, result)


def _config(**changes):
  return Grid(**{"grid": {"privacy.epsilon": EPSILONS}, "seeds": [0, 1]} | changes)


def _files(workdir):
  return {path: path.read_bytes() for path in sorted(workdir.glob("points/*/result.json"))}


def test_sweep_runs_every_point_and_writes_the_curve(tmp_path, capsys):
  fake = Fake()
  rows = grids.run(_config(), tmp_path, fake)
  assert [(row["privacy.epsilon"], row["seed"]) for row in rows] == [
    (0.5, 0), (0.5, 1), (2.0, 0), (2.0, 1)
  ]  # fmt: skip
  assert [row["test_accuracy"] for row in rows] == [0.55, 0.55, 0.7, 0.7]
  with (tmp_path / "curve.csv").open() as file:
    curve = list(csv.DictReader(file))
  assert [float(row["test_accuracy_mean"]) for row in curve] == [0.55, 0.7]
  for suffix in pictures.SUFFIXES:
    assert (tmp_path / "curve").with_suffix(suffix).exists()
  saved = writers.read_json(tmp_path / "sweep.json")
  assert saved["rows"] == rows and saved["points"] == 4
  assert saved["statement"] in capsys.readouterr().out


def test_finished_points_never_run_twice(tmp_path):
  grids.run(_config(), tmp_path, Fake())
  before = _files(tmp_path)
  again = Fake()
  rows = grids.run(_config(), tmp_path, again)
  assert again.calls == [] and _files(tmp_path) == before and len(rows) == 4
  more = Fake()
  grids.run(_config(seeds=[0, 1, 2]), tmp_path, more)
  assert len(more.calls) == 2  # only the new seed of each epsilon


def test_a_run_at_which_another_process_is_is_left_to_it(tmp_path, capsys):
  config, fake = _config(), Fake()
  names = [point.name for point in grids.points(config)]
  with writers.alone_in(tmp_path / "points", name=f".{names[1]}.lock"):
    rows = grids.run(config, tmp_path, fake)
  assert fake.calls == [names[0], *names[2:]] == [row["name"] for row in rows]
  assert "1 runs are at work in other processes" in capsys.readouterr().err
  rows = grids.run(config, tmp_path, fake)
  assert len(rows) == 4 and fake.calls[3:] == [names[1]]


def test_several_processes_write_one_table(tmp_path):
  """Each writes also what the others have finished; the last one, all."""
  config, other = _config(), Fake()
  names = [point.name for point in grids.points(config)]

  class First(Fake):
    def __call__(self, run, workdir, *, data=None):
      if not self.calls:  # while it is at its first run
        grids.run(config, tmp_path, other)
      return super().__call__(run, workdir, data=data)

  first = First()
  rows = grids.run(config, tmp_path, first)
  assert first.calls == names[:1] and other.calls == names[1:]
  assert [row["name"] for row in rows] == names
  assert writers.read_json(tmp_path / "sweep.json")["rows"] == rows
  assert not list(tmp_path.glob("points/.*"))


def test_a_run_that_another_process_finished_after_it_failed_here_is_charged(tmp_path):
  config, other = _config(seeds=[0]), Fake()
  first, last = (point.name for point in grids.points(config))

  class Failing(Fake):
    def __call__(self, run, workdir, *, data=None):
      if workdir.name == last:
        grids.run(config, tmp_path, other, only=first)
      return super().__call__(run, workdir, data=data)

  grids.run(config, tmp_path, Failing(fail=EPSILONS[:1]))
  saved = writers.read_json(tmp_path / "sweep.json")
  assert other.calls == [first] and len(_files(tmp_path)) == 2
  assert [row["status"] for row in saved["rows"]] == ["done", "done"]
  assert saved["all_runs_together"]["epsilon"] == sum(EPSILONS)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_run_that_cannot_be_drawn_is_charged(odd, tmp_path):
  """It ends the sweep if no run can be drawn: then the name is wrong."""

  class Odd(Fake):
    def __call__(self, run, workdir, *, data=None):
      result = super().__call__(run, workdir, data=data)
      if run.privacy.epsilon == EPSILONS[odd]:
        result.pop("test_loss")
        owner.write_result(workdir, run, result)
      return result

  config = _config(seeds=[0], y="test_loss")
  for _ in range(2):
    if odd == 0:
      with refuses("y", value="test_loss"):
        grids.run(config, tmp_path, Odd())
    else:
      rows = grids.run(config, tmp_path, Odd())
      assert [row["status"] for row in rows] == ["done", "failed"]
    saved = writers.read_json(tmp_path / "sweep.json")
    ran = EPSILONS[: odd + 1]
    assert len(saved["rows"]) == len(_files(tmp_path)) == len(ran)
    assert saved["all_runs_together"]["epsilon"] == sum(ran)


def test_a_config_that_a_file_changes_from_run_to_run_is_as_it_was_yielded(tmp_path):
  def named(config):
    for config.privacy.epsilon in EPSILONS:
      yield f"epsilon {config.privacy.epsilon}", config

  runs = Runs(named(TrainConfig()))
  assert [point.config.privacy.epsilon for point in runs.points] == EPSILONS


def test_no_name_of_a_run_is_that_of_a_lock(tmp_path):
  runs = Runs([("a", TrainConfig()), ("a.lock", TrainConfig())])
  with grids.by(Fake()):
    rows = runs.run(tmp_path)
  assert [row["status"] for row in rows] == ["done", "done"] and len(_files(tmp_path)) == 2


@pytest.mark.slow
def test_killed_sweep_resumes_at_the_interrupted_point(tmp_path):
  killed = Fake(kill_at=3)
  with pytest.raises(KeyboardInterrupt):
    grids.run(_config(), tmp_path, killed)
  assert len(writers.read_json(tmp_path / "sweep.json")["rows"]) == 2  # what was finished
  resumed = Fake()
  rows = grids.run(_config(), tmp_path, resumed)
  assert resumed.calls == [killed.calls[2], rows[3]["name"]]
  assert rows == grids.run(_config(), tmp_path / "other", Fake())


def test_failed_point_is_recorded_and_the_sweep_goes_on(tmp_path):
  fake = Fake(fail=(0.5,))
  rows = grids.run(_config(), tmp_path, fake)
  assert [row["status"] for row in rows] == ["failed", "failed", "done", "done"]
  assert rows[0]["error"] == "privacy.epsilon: cannot be reached"
  assert rows[0]["privacy.epsilon"] == 0.5
  assert writers.read_json(tmp_path / "sweep.json")["all_runs_together"]["epsilon"] == 4.0
  retried = Fake()
  rows = grids.run(_config(), tmp_path, retried)
  assert len(retried.calls) == 2 and {row["status"] for row in rows} == {"done"}


@pytest.mark.parametrize("of_run", [True, False])
def test_a_full_disk_ends_the_sweep_in_one_line_and_the_same_command_goes_on(
  of_run, tmp_path, monkeypatch
):
  full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  honest, write = Fake(), engine._Files.write

  def train(config, workdir, *, data=None):
    if of_run and len(honest.calls) == 2:
      with writers.space_on_disk(workdir, lambda: "step 3 is saved"):
        raise full
    return honest(config, workdir, data=data)

  def written(files, rows):
    if not of_run and len(rows) == 2:
      raise full
    write(files, rows)

  with monkeypatch.context() as mocked:
    mocked.setattr(engine._Files, "write", written)
    with refuses("workdir") as caught:
      grids.run(_config(), tmp_path, train)
  assert isinstance(caught.value, writers.Unwritable) and "same command" in str(
    caught.value
  )
  assert ("step 3 is saved" if of_run else "2 of 4 runs have ended") in str(caught.value)
  resumed = Fake()
  rows = grids.run(_config(), tmp_path, resumed)
  assert len(resumed.calls) == 2
  assert rows == grids.run(_config(), tmp_path / "other", Fake())


def test_all_points_failing_still_reports(tmp_path):
  rows = grids.run(_config(), tmp_path, Fake(fail=EPSILONS))
  assert {row["status"] for row in rows} == {"failed"}
  assert "no finite epsilon" in writers.read_json(tmp_path / "sweep.json")["statement"]


def test_a_bug_is_not_taken_for_a_failed_point(tmp_path):
  def broken(config, workdir, *, data=None):
    raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    grids.run(_config(), tmp_path, broken)


def test_a_folder_that_holds_another_config_is_refused_before_anything_runs(tmp_path):
  rows = grids.run(_config(), tmp_path, Fake())
  saved = (tmp_path / "sweep.json").read_bytes()
  path = tmp_path / "points" / rows[3]["name"] / "config.json"
  writers.write_json(path, to_dict(TrainConfig(num_steps=7)))
  again = Fake()
  with refuses("workdir"):
    grids.run(_config(seeds=[0, 1, 2]), tmp_path, again)
  assert again.calls == [] and (tmp_path / "sweep.json").read_bytes() == saved


@pytest.mark.parametrize("name", ["table.md", "config.json", "notes/mine.txt"])
def test_a_folder_of_something_else_is_refused_and_keeps_what_it_holds(tmp_path, name):
  """A sweep with --workdir=. wrote its table.md and its curve.csv over those of its user."""
  path = tmp_path / name
  path.parent.mkdir(exist_ok=True)
  path.write_text("mine")
  there = sorted(tmp_path.rglob("*"))
  fake = Fake()
  with refuses("workdir", value=tmp_path):
    grids.run(_config(), tmp_path, fake)
  assert not fake.calls and sorted(tmp_path.rglob("*")) == there
  assert path.read_text() == "mine"
  # What a kill in the first run left is a sweep's own.
  killed = tmp_path / "killed"
  with pytest.raises(KeyboardInterrupt):
    grids.run(_config(), killed, Fake(kill_at=1))
  assert not (killed / engine.FILE).exists()
  assert len(grids.run(_config(), killed, Fake())) == 4


def test_hidden_files_are_nobodys_and_a_link_to_nowhere_is_no_sweep(tmp_path):
  """Finder writes .DS_Store into a sweep that was killed in its first run."""
  killed = tmp_path / "killed"
  with pytest.raises(KeyboardInterrupt):
    grids.run(_config(), killed, Fake(kill_at=1))
  (killed / ".DS_Store").write_text("")
  assert len(grids.run(_config(), killed, Fake())) == 4
  other = tmp_path / "other"
  other.mkdir()
  (other / "table.md").write_text("mine")
  (other / engine.FILE).symlink_to(tmp_path / "gone")
  with refuses("workdir", value=other):
    grids.run(_config(), other, Fake())
  assert (other / "table.md").read_text() == "mine"


def test_a_run_whose_folder_is_moved_ends_the_sweep(tmp_path):
  """The other runs went on in a new folder, where the next start trained all of them again."""
  fake = Fake()

  def moved(config, workdir, *, data=None):
    fake(config, workdir, data=data)
    (tmp_path / "sweep").rename(tmp_path / "moved")
    raise writers.Gone("was moved", field="workdir", value=workdir)

  with refuses("workdir"):
    grids.run(_config(), tmp_path / "sweep", moved)
  assert len(fake.calls) == 1
  assert len(grids.run(_config(), tmp_path / "moved", fake)) == 4 == len(fake.calls)


def test_whatever_shows_a_claimed_epsilon_says_what_it_rests_on(tmp_path):
  """table.md had epsilons alone, and curve.csv "claimed" without a reason."""

  def claimed(config, workdir, *, data=None):
    writers.write_json(workdir / "config.json", to_dict(config))
    result = dict.fromkeys(writers.RESULT_KEYS, 0) | {
      "epsilon": config.privacy.epsilon,
      "delta": 1e-5,
      "epsilon_kind": "claimed",
      "failed_assumptions": ["Mine: its event is its author's word"],
      "neighboring_relation": "replace_one",
      "unit": "example",
      "seed": config.seed,
    }
    return owner.write_result(workdir, config, result)

  grids.run(_config(), tmp_path, claimed)
  (line,) = (tmp_path / "table.md").read_text().splitlines()[-1:]
  for word in ("claimed", "1e-05", "replace one example", "Mine"):
    assert word in line
  with (tmp_path / "curve.csv").open() as file:
    assert {row["failed_assumptions"] for row in csv.DictReader(file)} == {
      "Mine: its event is its author's word"
    }


@pytest.mark.cases(quick=["-inf-test_loss"], long=...)
@pytest.mark.parametrize("y", ["test_accuracy", "test_loss"])
@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_a_run_that_diverged_keeps_its_row_and_the_sweep_goes_on(tmp_path, capsys, y, lost):
  class Diverging(Fake):
    def __call__(self, config, workdir, *, data=None):
      result = super().__call__(config, workdir, data=data)
      if config.seed == 0:
        return owner.write_result(workdir, config, result | {y: lost})
      return result

  rows = grids.run(_config(y=y), tmp_path, Diverging())
  assert {row["status"] for row in rows} == {"done"} and len(rows) == 4
  assert rows[0][y] == writers.plain(lost) and cost.charge(rows)["runs"] == 4
  assert f"{y} = {lost}" in capsys.readouterr().out
  assert "1 of 2 not finite" in (tmp_path / "table.md").read_text()
  again = Fake()
  assert grids.run(_config(y=y), tmp_path, again) == rows and again.calls == []


@pytest.mark.parametrize(
  "changes, field",
  [
    ({"selection": Selection(mean_trials=1e9)}, "selection.mean_trials"),
    ({"x": "model.name"}, "x"),
    ({"x": "data.limit"}, "x"),
    # also of runs without a guarantee, which need no x
    ({"x": "model.name", "grid": {"privacy": ["sgd"], "model.name": ["mlp", "cnn"]}}, "x"),
    ({"x": "variant", "variants": {"a": {"num_steps": 7}}}, "x"),
    ({"y": "unit"}, "y"),
    ({"grid": {"privacy.epsilon": []}}, "get_configs"),
    ({"grid": {"privacy.epsilon": [1.0, 1.0]}}, "get_configs"),
    # of the base, as the flag names it
    ({"base": TrainConfig(privacy=DpSgd(delta=2.0))}, "base.privacy.delta"),
    ({"seeds": [0, 1, 0]}, "seeds"),
    ({"seeds": [-1]}, "seeds[0]"),
    ({"seeds": []}, "seeds"),
    ({"x": "privacy.epsilom"}, "x"),
    ({"series": "modell.name"}, "series"),
  ],
)
def test_a_wrong_sweep_is_refused_before_anything_runs(tmp_path, changes, field):
  fake = Fake()
  value = {"value": changes[field]} if field in ("x", "series") else {}
  with refuses(field, **value) as error:
    grids.run(_config(**changes), tmp_path, fake)
  assert fake.calls == [] and "\n" not in str(error.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "field, values, name",
  [
    ("privacy.epsilon", [2.0, -2.0], "epsilon=-2.0"),
    ("model.name", ["cnn", "cnnn"], "name=cnnn"),
  ],
)
def test_an_error_of_one_run_tells_its_name(field, values, name):
  with refuses(field, value=values[1]) as error:
    grids.points(_config(grid={field: values}))
  assert f"({name})" in str(error.value)


def test_a_run_that_could_never_be_private_is_refused_before_the_others_run():
  with refuses("algorithm.tau_eff"):
    Runs([("run", FedConfig()), ("nova", FedConfig(algorithm="fed_nova"))], Sweep())
  for fitting in ({"algorithm.tau_eff": 4.0}, {"privacy": "none"}):
    run = fields.replace_all(FedConfig(algorithm="fed_nova"), fitting)
    Runs([("nova", run)], Sweep(x="num_rounds"))


def test_more_runs_than_anybody_waits_for_are_counted_while_they_are_made(monkeypatch):
  monkeypatch.setattr(rules, "MOST_RUNS", 500)
  run = TrainConfig()
  with refuses("get_configs"):
    Runs(((f"run {number}", run) for number in itertools.count()), Sweep())


def test_no_run_at_all_names_the_lists_that_are_empty():
  with refuses("get_configs") as error:
    Runs([], Sweep())
  assert "--config.epsilons" in error.value.hint


def test_a_flag_in_an_error_of_the_base_is_one_of_the_base():
  base = TrainConfig(privacy=DpSgd(attacker=AttackerConfig(mu=0.5)))
  with refuses("base.privacy.epsilon") as error:
    Runs([("run", base)], Sweep(base=base))
  assert "(--config.base.privacy.epsilon=none)" in str(error.value)


@pytest.mark.parametrize("entry", [TrainConfig(), ("a", "b", "c"), (1, TrainConfig())])
def test_what_yields_no_named_configs_is_refused(entry):
  with refuses("get_configs"):
    Runs([entry], Sweep())


@pytest.mark.parametrize("name", ["", "/", "a\nb", "x" * 300])
def test_a_name_that_no_folder_can_have_is_refused(name):
  with refuses("get_configs"):
    Runs([(name, TrainConfig())], Sweep())


@pytest.mark.long
@settings(max_examples=30)
@given(
  names=st.lists(
    st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=40),
    min_size=1,
    max_size=3,
    unique_by=str.lower,
  ),
  seeds=st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True),
)
def test_names_are_stable_unique_and_safe(names, seeds):  # fmt: skip
  runs = lambda: Runs([(name, TrainConfig()) for name in names], Sweep(seeds=seeds))
  found = runs().points
  assert len(found) == len(names) * len(seeds or [None])
  assert len({point.name.lower() for point in found}) == len(found)
  assert not any(set(point.name) & set("/\\ \n\0") for point in found)
  assert found == runs().points


def test_an_epsilon_that_comes_twice_is_named():
  with refuses("epsilons", value=[2.0, 2.0]):
    Runs([("a run", TrainConfig())], Sweep(epsilons=[2.0, 2.0]))


@pytest.mark.parametrize("text", ["train", "{}", "none"])
def test_a_base_is_a_config(text):
  with refuses("config.base"):
    fields.override(Sweep(), "base", text)


def test_runs_of_two_kinds_share_no_data():
  sections = {"data": DataConfig("digits"), "model": ModelConfig("mlp")}
  central = TrainConfig(privacy=Sgd(), **sections)
  last = engine.LastData(lambda config: type(config))
  assert last(central) is last(dataclasses.replace(central, seed=1)) is TrainConfig
  assert last(RelevanceConfig(**sections)) is RelevanceConfig
  assert last(AttackConfig(target=central)) is AttackConfig


def test_p17_points_share_no_noise():
  """Equal noise draws under two noise multipliers solve for the exact gradient sum."""
  found = grids.points(_config(seeds=list(range(5))))
  run_keys = [build.Central(point.config).new_keys() for point in found]
  assert len({key_id(stream.noise) for stream in run_keys}) == len(found)
  assert len({stream.sampler for stream in run_keys}) == len(found)


def test_p40_the_choice_among_runs_is_charged(tmp_path, capsys):
  rows = grids.run(_config(), tmp_path, Fake())
  total = writers.read_json(tmp_path / "sweep.json")["all_runs_together"]
  assert total["epsilon"] == 5.0 and total["delta"] == pytest.approx(4e-5)
  assert total["runs"] == 4 and total["epsilon_kind"] == "proved"
  said = capsys.readouterr().out
  assert "holds for its own run alone" in said and "query on the private data" in said
  assert "epsilon = 5" in said and "add_or_remove_one" in said
  assert cost.charge(rows[:1])["epsilon"] == 0.5


@pytest.mark.cases(slow=[2], long=...)
@pytest.mark.parametrize(
  "change",
  [{"epsilon_kind": "none"}, {"neighboring_relation": "replace_one"}, {"unit": "user"}],
)
def test_p40_runs_that_cannot_be_added_have_no_bound(tmp_path, change):
  rows = grids.run(_config(), tmp_path, Fake())
  total = cost.charge([{**rows[0], **change}, *rows[1:]])
  assert total["epsilon"] is None
  assert "no finite epsilon" in cost.statement_of_sweep([{**rows[0], **change}, *rows[1:]])


def test_p40_runs_with_one_noise_have_no_bound(tmp_path):
  rows = grids.run(_config(), tmp_path, Fake())
  repeated = {"epsilon_kind": "claimed", "failed_assumptions": [guarantee.REPEATED]}
  one = {**rows[0], **repeated}
  assert cost.charge([one, *rows[1:]])["epsilon"] == 5.0
  assert cost.charge([one, {**rows[1], **repeated}, *rows[2:]])["epsilon"] is None


def test_p40_a_claimed_epsilon_never_becomes_a_proof(tmp_path):
  rows = grids.run(_config(), tmp_path, Fake())
  assert cost.charge([{**rows[0], "epsilon_kind": "claimed"}, *rows[1:]])[
    "epsilon_kind"
  ] == ("claimed")


def test_p40_a_sum_of_claims_says_what_fails(tmp_path):
  rows = grids.run(_config(), tmp_path, Fake())
  fails = {"epsilon_kind": "claimed", "failed_assumptions": ["C4: scales follow the data"]}
  text = cost.statement_of_sweep([{**rows[0], **fails}, *rows[1:]])
  assert (
    "claimed, add_or_remove_one" in text
    and "Nothing is proved; fails or is assumed: C4" in text
  )
  assert "fails or is assumed:" not in cost.statement_of_sweep(rows)


def test_p40_runs_of_an_earlier_grid_are_mentioned(tmp_path):
  grids.run(_config(), tmp_path, Fake())
  grids.run(_config(grid={"privacy.epsilon": [2.0]}), tmp_path, Fake())
  assert (
    "2 further finished runs" in writers.read_json(tmp_path / "sweep.json")["statement"]
  )


_LINES = {
  f"{name} @ {epsilon}": {"privacy.epsilon": epsilon, "optimizer.learning_rate": rate}
  for name, rate in (("plain", 0.1), ("wide", 0.2))
  for epsilon in EPSILONS
}


@pytest.mark.slow
def test_a_part_is_run_by_name_and_drawn_with_what_has_run(tmp_path):
  """The parts, in whichever order, are the whole, and each is charged with what is there."""
  config = _config(grid={}, variants=_LINES, seeds=[0], series="variant")
  fake = Fake()
  rows = grids.run(config, tmp_path, fake, only="wide @ *")
  assert [row["label"] for row in rows] == ["wide @ 0.5", "wide @ 2.0"]
  assert cost.charge(rows)["epsilon"] == 2.5
  rows = grids.run(config, tmp_path, fake, only="plain @ 0.5")
  assert [row["label"] for row in rows] == ["plain @ 0.5", "wide @ 0.5", "wide @ 2.0"]
  text = writers.read_json(tmp_path / "sweep.json")["statement"]
  assert "best of these 3 runs" in text and "further" not in text
  assert len(fake.calls) == 3
  whole = grids.run(config, tmp_path, fake)
  assert len(fake.calls) == 4 and whole == grids.run(config, tmp_path / "once", Fake())
  assert grids.run(config, tmp_path, fake, only=whole[0]["name"]) == whole


@pytest.mark.slow
def test_a_part_keeps_what_had_failed_of_the_rest(tmp_path):
  """The file is that of the whole: its runs are counted, and no error is lost."""
  config = _config(grid={}, variants=_LINES, seeds=[0], series="variant")
  names = [point.name for point in grids.points(config)]

  def train(run, workdir, *, data=None):
    if pathlib.Path(workdir).name == names[0]:
      raise UserError("num_steps=3: too few")
    return Fake()(run, workdir, data=data)

  grids.run(config, tmp_path, train)
  rows = grids.run(config, tmp_path, train, only="wide @ *")
  assert [row["status"] for row in rows] == ["done"] * 3  # of its part, nothing has failed
  saved = writers.read_json(tmp_path / "sweep.json")
  assert saved["points"] == 4 == len(saved["rows"])
  assert saved["rows"][0]["error"] == "num_steps=3: too few"
  rows = grids.run(config, tmp_path, Fake(), only=names[0])  # mended
  assert [row["status"] for row in rows] == ["done"] * 4


@pytest.mark.parametrize("text", ["{", "{}", '{"rows": null}', '{"rows": [{"x": 1}]}'])
def test_a_sweep_json_of_something_else_is_refused(tmp_path, text):
  config = _config(grid={}, variants=_LINES, seeds=[0], series="variant")
  (tmp_path / "sweep.json").write_text(text)
  fake = Fake()
  with pytest.raises(UserError, match="sweep.json"):
    grids.run(config, tmp_path, fake, only="wide @ *")
  assert not fake.calls  # the first run is not lost on it


def test_a_name_with_brackets_is_no_pattern(tmp_path):
  lines = {f"net [{f}]": {"model.options.activation": f} for f in ("tanh", "relu")}
  config = _config(variants=lines, seeds=[0], series="variant")
  rows = grids.run(config, tmp_path, Fake(), only="net [tanh] @ epsilon=2.0")
  assert [row["label"] for row in rows] == ["net [tanh] @ epsilon=2.0"]


def test_a_selection_is_not_run_as_a_grid(tmp_path):
  config = _config(selection=Selection())
  with refuses("selection", value="best"):
    config.runs().run(tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.cases(long=[5])
@pytest.mark.parametrize("only", ["", "wide", "Plain*", "*z", "[", " "])
def test_a_pattern_of_no_run_is_refused_before_anything_runs(tmp_path, only):
  config = _config(grid={}, variants=_LINES, seeds=[0], series="variant")
  with refuses("only"):
    grids.run(config, tmp_path / "run", Fake(), only=only)
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_data_are_loaded_once_per_data_and_model(tmp_path):
  loaded = []

  def load(config):
    loaded.append(config.model.name)
    return config.model.name, len(loaded)

  fake = Fake()
  grid = {"privacy.epsilon": EPSILONS, "model.name": ["mlp", "cnn"]}
  config = _config(grid=grid, series="model.name")
  rows = grids.run(config, tmp_path, fake, load)
  assert loaded == ["mlp", "cnn"]  # grouped, though the grid alternates
  assert fake.data == [("mlp", 1)] * 4 + [("cnn", 2)] * 4
  assert [row["model.name"] for row in rows] == ["mlp"] * 2 + ["cnn"] * 2 + ["mlp"] * 2 + [
    "cnn"
  ] * 2
  grids.run(config, tmp_path, fake, load)
  assert len(loaded) == 2  # nothing left to run, nothing to load


def test_x_and_series_may_be_fields_outside_the_grid_or_result_keys(tmp_path):
  config = _config(grid={"num_steps": [5, 6]}, x="privacy.epsilon", series="model.name")
  rows = grids.run(config, tmp_path / "a", Fake())
  assert {(row["privacy.epsilon"], row["model.name"]) for row in rows} == {(2.0, "mlp")}
  rows = grids.run(_config(x="epsilon", y="test_loss"), tmp_path / "b", Fake())
  assert [row["test_loss"] for row in rows] == [1.0] * 4
  assert "versions" not in rows[0]


def test_a_run_without_privacy_stands_beside_the_curve_without_a_position(tmp_path):
  config = _config(
    grid={},
    variants={"2": {"privacy.epsilon": 2.0}, "not private": {"privacy": "sgd"}},
  )
  config.base.privacy.epsilon = None
  rows = grids.run(config, tmp_path, Fake())
  assert [row["privacy.epsilon"] for row in rows] == [2.0] * 2 + [None] * 2
  config.variants["not private"] = {"privacy.noise_multiplier": 1.0}
  with refuses("x", value="privacy.epsilon"):
    grids.run(config, tmp_path / "b", Fake())


@pytest.mark.parametrize(
  "base",
  [
    TrainConfig(privacy=DpSgd(epsilon=None)),
    FedConfig(clients_per_round=5, privacy=Central(epsilon=None)),
  ],
)
def test_an_infinite_epsilon_is_the_run_without_noise(base):
  config = Grid(base=base, grid={"privacy.epsilon": [2.0, math.inf]})
  private, without = grids.points(config)
  assert private.config.privacy.epsilon == 2.0
  assert private.config.privacy.noise_multiplier is None
  assert without.config.privacy.epsilon is None
  assert without.config.privacy.noise_multiplier == 0
  wanted = dataclasses.replace(private.config.privacy, epsilon=None, noise_multiplier=0.0)
  assert without.config.privacy == wanted  # clipped as the others are


def test_a_run_without_noise_is_drawn_beside_the_curve_without_a_position(tmp_path):
  config = _config(grid={"privacy.epsilon": [2.0, math.inf]})
  config.base.privacy.epsilon = None
  rows = grids.run(config, tmp_path, Fake())
  assert [row["privacy.epsilon"] for row in rows] == [2.0] * 2 + [None] * 2
  assert [row["epsilon"] for row in rows] == [2.0] * 2 + [None] * 2
  with (tmp_path / "curve.csv").open() as file:
    assert [row["privacy.epsilon"] for row in csv.DictReader(file)] == ["", "2.0"]


def test_variants_of_one_line_are_drawn_as_one_each_with_its_settings(tmp_path):
  at = lambda epsilon, rate: {"privacy.epsilon": epsilon, "optimizer.learning_rate": rate}
  variants = {"A @ 1": at(1.0, 0.1), "A @ 4": at(4.0, 0.5), "A @ inf": at(math.inf, 0.5)}
  config = _config(
    grid={}, variants={**variants, "B": at(4.0, 0.2)}, seeds=[0], series="variant"
  )
  fake = Fake()
  rows = grids.run(config, tmp_path, fake)
  assert [row["label"] for row in rows] == [*variants, "B"]
  assert [row["variant"] for row in rows] == ["A", "A", "A", "B"]
  assert [row["privacy.epsilon"] for row in rows] == [1.0, 4.0, None, 4.0]
  assert [row["epsilon"] for row in rows] == [1.0, 4.0, None, 4.0]
  with (tmp_path / "curve.csv").open() as file:
    drawn = [(row["variant"], row["privacy.epsilon"]) for row in csv.DictReader(file)]
  assert drawn == [("A", ""), ("A", "1.0"), ("A", "4.0"), ("B", "4.0")]


@pytest.mark.cases(quick=[2], long=...)
@pytest.mark.parametrize(
  "changes",
  [
    {"grid": {"privacy.epsilon": [1.0, 2.0], "optimizer.learning_rate": [0.1, 1.0]}},
    {
      "variants": {f"A @ {r}": {"optimizer.learning_rate": r} for r in (0.1, 1.0)},
      "series": "variant",
    },
    {"variants": {r: {"optimizer.learning_rate": float(r)} for r in ("0.1", "1")}},
  ],
  ids=["grid", "one line", "no series"],
)
def test_runs_of_two_settings_are_no_seeds_of_one_point(changes, tmp_path):
  config = _config(**changes)
  rows = grids.run(config, tmp_path, Fake())
  with (tmp_path / "curve.csv").open() as file:
    drawn = list(csv.DictReader(file))
  assert {row["seeds"] for row in drawn} == {"2"}  # of _config, and nothing else
  told_apart = "label" if "label" in drawn[0] else "variant"
  assert len({row[told_apart] for row in drawn}) in (2, 4)
  assert len(rows) == 2 * len(drawn)


def test_a_train_function_that_writes_nothing_is_still_recorded(tmp_path):
  class Silent(Fake):
    def __call__(self, config, workdir, *, data=None):
      result = super().__call__(config, workdir, data=data)
      (workdir / "config.json").unlink()
      (workdir / "result.json").unlink()
      return result

  grids.run(_config(), tmp_path, Silent())
  again = Fake()
  grids.run(_config(), tmp_path, again)
  assert again.calls == []


def test_sgd_beside_dp_sgd_has_no_epsilon(tmp_path):
  config = _config(grid={}, variants={"dp_sgd": {}, "sgd": {"privacy": "sgd"}})
  rows = grids.run(config, tmp_path, Fake())
  assert [row["epsilon"] for row in rows] == [2.0, 2.0, None, None]
  with (tmp_path / "curve.csv").open() as file:
    assert [row["privacy.epsilon"] for row in csv.DictReader(file)] == ["", "2.0"]


def test_infinite_values_survive_the_comparison_of_configs(tmp_path):
  config = _federated(grid={"partition.alpha": [math.inf]}, x="partition.alpha")
  grids.run(config, tmp_path, FakeFederated())
  again = FakeFederated()
  grids.run(config, tmp_path, again)
  assert again.data == []


_VARIANTS = {
  "slow": {"optimizer.learning_rate": 0.1},
  "adam": {"optimizer.rule": "adam", "optimizer.learning_rate": 0.01},
}


def test_variants_set_fields_together_and_are_a_series(tmp_path):
  config = _config(variants=_VARIANTS, series="variant", seeds=[0])
  rows = grids.run(config, tmp_path, Fake())
  found = [(row["variant"], row["privacy.epsilon"]) for row in rows]
  assert found == [(name, epsilon) for name in _VARIANTS for epsilon in EPSILONS]
  rates = {
    (choices.name_of(p.config.optimizer, "rule"), p.config.optimizer.learning_rate)
    for p in grids.points(config)
  }
  assert rates == {("sgd", 0.1), ("adam", 0.01)}
  with open(tmp_path / "curve.csv") as file:
    assert {row["variant"] for row in csv.DictReader(file)} == set(_VARIANTS)


# --- over clients


def test_the_users_of_a_base_are_kept_where_a_grid_deals_them_otherwise():
  base = FedConfig(partition={"name": "iid", "num_clients": 500})
  dealt = {"partition": ["dirichlet", "shards"]}
  found = grids.points(Grid(base=base, grid=dealt, x="num_rounds"))
  assert [point.config.partition.num_clients for point in found] == [500, 500]


class FakeFederated:
  """A federated train function: the keys of a real result, an accuracy that knows alpha."""

  def __init__(self, **guarantee):
    self.data, self.guarantee = [], guarantee

  def __call__(self, config, workdir, *, data=None):
    assert isinstance(config, FedConfig)
    self.data.append(data)
    better = {"fed_avg": 0.0, "scaffold": 0.05}[choices.name_of(config, "algorithm")]
    result = dict.fromkeys(writers.RESULT_KEYS, 0) | {
      "epsilon": None,
      "epsilon_kind": "none",
      "test_accuracy": 0.5
      + better
      + min(getattr(config.partition, "alpha", 1.0), 1.0) / 10,
      "num_steps": 7,
      "rounds_to_accuracy": {"0.5": 3, "0.99": None},
      "num_clients": getattr(config.partition, "num_clients", 100),
      **self.guarantee,
    }
    writers.write_json(workdir / "config.json", to_dict(config))
    return owner.write_result(workdir, config, result)


def _federated(**changes):
  defaults = {
    "base": FedConfig(partition="dirichlet"),
    "grid": {"partition.alpha": [0.5, math.inf, 0.1]},
    "variants": {
      "FedAvg": {"algorithm": "fed_avg"},
      "SCAFFOLD": {"algorithm": "scaffold"},
    },
    "x": "partition.alpha",
    "series": "variant",
  }
  return Grid(**defaults | changes)


def test_a_federated_sweep_has_alpha_infinity_and_a_table(tmp_path):
  fake = FakeFederated()
  rows = grids.run(_federated(), tmp_path, fake, lambda c: c.partition.alpha)
  assert [row["partition.alpha"] for row in rows] == [0.5, math.inf, 0.1] * 2
  assert rows[0]["num_clients"] == 100 and rows[0]["rounds_to_accuracy"]["0.5"] == 3
  assert sorted(fake.data) == [0.1, 0.1, 0.5, 0.5, math.inf, math.inf]
  assert (tmp_path / "table.md").read_text().splitlines() == [
    "| variant \\ partition.alpha | 0.1 | 0.5 | inf |",
    "| --- | --- | --- | --- |",
    "| FedAvg | .5100 | .5500 | .6000 |",
    "| SCAFFOLD | .5600 | .6000 | .6500 |",
    "",
    "| rounds to | 0.5 | 0.99 |",
    "| --- | --- | --- |",
    *(
      f"| {name} @ {alpha} | 3 | - |"
      for name in ("FedAvg", "SCAFFOLD")
      for alpha in ("0.1", "0.5", "inf")
    ),
  ]
  with (tmp_path / "curve.csv").open() as file:
    assert [row["partition.alpha"] for row in csv.DictReader(file)][:3] == [
      "0.1",
      "0.5",
      "inf",
    ]
  again = FakeFederated()
  assert grids.run(_federated(), tmp_path, again, lambda c: 1 / 0) == rows
  assert again.data == []


def test_x_may_be_the_rounds_of_a_result(tmp_path):
  config = _federated(grid={"local.epochs": [1, 5]}, x="num_steps")
  rows = grids.run(config, tmp_path, FakeFederated())
  assert [row["num_steps"] for row in rows] == [7] * 4


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"x": "privacy.sampling_prob"}, "x"),
  ],
)
def test_a_wrong_federated_sweep_is_refused(changes, field):
  with refuses(field, value=changes[field]):
    grids.points(_federated(**changes))


def test_p17_federated_points_share_no_noise():
  config = _federated(grid={"privacy.epsilon": [1.0, 2.0]}, x="privacy.epsilon")
  found = [experiment_of(point.config).new_keys() for point in grids.points(config)]
  assert len({key_id(run_keys.noise) for run_keys in found}) == 4


_PRIVATE = {
  "epsilon": 2.0,
  "delta": 1e-5,
  "epsilon_kind": "proved",
  "neighboring_relation": "add_or_remove_one",
  "unit": "user",
  "unit_owns_records": True,
}


_ROLES = {
  "partition": ["shakespeare"], "data.name": ["shakespeare"], "model.name": ["transformer"]
}  # fmt: skip


@pytest.mark.cases(quick=["grid5-True"], long=...)
@pytest.mark.parametrize(
  ("grid", "sums"),
  [
    ({"privacy.epsilon": [1.0, 2.0]}, True),
    ({"partition.seed": [0, 1]}, False),  # each run deals the same records to other users
    ({"partition.num_clients": [100, 200]}, False),
    ({"data.limit": [100, 200]}, False),
    ({"data.name": ["mnist", "digits"]}, False),
    ({**_ROLES, "partition.min_chars": [99, 500]}, True),
  ],
)
def test_p40_users_who_are_dealt_anew_have_no_sum(grid, sums, tmp_path):
  """What one run hides as one user belongs to many users of another: by group privacy the
  sum of their epsilons bounds neither."""
  config = Grid(FedConfig(), grid, x="seed", seeds=[0, 1])

  rows = grids.run(config, tmp_path, FakeFederated(**_PRIVATE))
  total, text = cost.charge(rows), cost.statement_of_sweep(rows)
  assert total["epsilon"] == (2.0 * len(rows) if sums else None)
  assert ("deal records differently" in text) == (not sums)
  one_partition = [row for row in rows if row["population"] == rows[0]["population"]]
  assert cost.charge(one_partition)["epsilon"] == 2.0 * len(one_partition)


def test_p40_data_sets_are_never_taken_to_be_disjoint(tmp_path):
  config = _config(grid={"data.name": ["digits", "mnist"]}, x="seed", seeds=[0])
  rows = grids.run(config, tmp_path, Fake())
  total = cost.charge(rows)
  assert total["epsilon"] == sum(row["epsilon"] for row in rows) and total["runs"] == 2
  assert "different data, which may overlap" in cost.statement_of_sweep(rows)
  assert "may overlap" not in cost.statement_of_sweep(rows[:1])


def test_p44_a_simulated_epsilon_is_never_added_up_as_a_proof(tmp_path):
  rows = grids.run(_config(), tmp_path, Fake())
  assert cost.charge([{**rows[0], "epsilon_kind": "simulated"}])["epsilon"] is None


@pytest.mark.cases(
  long=[
    "cifar10_curves",
    "fashion_mnist_curves",
    "fed_user_level",
    "fed_user_level_cifar10",
    "fed_user_level_fashion_mnist",
    "mnist_curves",
    "secure_sums_mnist",
  ]
)
@pytest.mark.parametrize("path", _SWEEPS, ids=lambda path: path.stem)
def test_every_run_of_a_published_sweep_is_sound(path):
  module = importlib.import_module(f"configs.sweeps.{path.stem}")
  sweep = fields.check(module.get_config(), Sweep, "config")
  assert Runs(module.get_configs(sweep), sweep).points


def test_a_refuted_run_is_told_in_its_row(tmp_path):
  """launch.sweep ended with exit code 0 and no word of it."""
  result = Fake()

  def audited(config, workdir, *, data=None):
    found = {"refuted": config.privacy.epsilon < 1, "verdict": "REFUTED"}
    more = {"epsilon_audited_lower": 0.7, "audit": found}
    return owner.write_result(workdir, config, result(config, workdir, data=data) | more)

  rows = grids.run(_config(seeds=[0]), tmp_path, audited)
  assert [row["refuted"] for row in rows] == [True, False]
  table = curves.Curves(Sweep())
  assert "1 of 2 claims are REFUTED" in table.alarm(rows) and not table.alarm(rows[1:])
