"""What the loop does for every kind of run: going on after any end, exactly; one process in a
folder; other data, another config, a full disk; keys of a release."""

import dataclasses
import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from dpjax.accounting import Ledger
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import DataConfig, ModelConfig
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.kinds.relevance.methods import RadpRigorous
from dpjax.experiments.run import checkpoint, loop, run_keys, writers
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.run.kind import experiment_of
from dpjax.noise.gaussian import key_id
from tests.refuses import refuses
from tests.runs import small_configs
from tests.runs.stops import die, sigterm, stop_after

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MODEL_2 = "model_2"


def _central(**more: Any) -> Any:
  few = {"num_steps": 6, "eval_every": 2, "checkpoint_every": 2, "data.limit": 300}
  few |= {"privacy.epsilon": None, "privacy.noise_multiplier": 2.0, "noise_seed": 0}
  return fields.replace_all(small_configs.short(**few), more)


def _federated(**more: Any) -> Any:
  few, _ = small_configs.federated(num_rounds=6, noise_seed=0)
  return fields.replace_all(few, more)


def _relevance(**more: Any) -> Any:
  base = RelevanceConfig(
    data=DataConfig(name="digits", limit=120),
    model=ModelConfig(name="linear"), num_epochs=3, batch_size=40, epsilon=4.0,
    noise_seed=0,
  )  # fmt: skip
  return dataclasses.replace(base, **more)


_RIGOROUS = RadpRigorous(
  model1={"name": "dp_sgd", "split_share": None}, shuffle=False, pool=2
)
_SCAFFOLD = {"algorithm": "scaffold", "server_optimizer.rule": "adam"}
_TURNS = {"privacy": "dp_ftrl", "privacy.neighboring_relation": "replace_special"}
_REDRAWN = {"privacy.strategy": "band_inv_mf", "privacy.strategy.redraw": True}
_MIN_SEP = {
  "privacy": "dp_ftrl", "privacy.sampler": "cyclic_poisson", "privacy.sampler.steps_apart": 3,
}  # fmt: skip
_SCALED = {"privacy.scaling": {"name": "by_outputs", "floor": 0.3}}
_MLP = {"model.name": "mlp", "model.options": {"features": (6,)}}
# What a central run keeps beside its parameters, in turn.
_HELD = {
  "schedule": {"slices": 2, "ema_decay": 0.9, "privacy.clip_schedule": "linear"},
  "adaptive": {"privacy.clipping": "adaptive"},
  "correlated": _TURNS,
  "correlated, redrawn": {**_TURNS, **_REDRAWN},
  "correlated, levels": {**_MIN_SEP, "privacy.noise_levels": [1.5, 1.0]},
  # The memory of one band is empty, which the library of checkpoints cannot save as it is.
  "one band": {**_TURNS, "privacy.sampling_prob": 1.0},
  "one band of coins": {**_MIN_SEP, "privacy.sampler.steps_apart": 1},
  "scaled": _SCALED,
  "scaled, ghost": {**_SCALED, "grad_method": "ghost"},
  "scaled, lora": {**_SCALED, **_MLP, "trainable": {"name": "lora", "rank": 2}},
  "scaled, head first": {**_SCALED, **_MLP, "trainable": {"name": "head_first", "steps": 2}},
  "scaled, head": {**_SCALED, **_MLP, "trainable": "head"},
  "scaled, statistics": {**_SCALED, "privacy.normalization": "private_statistics"},
  "scaled, levels": {**_SCALED, "privacy.noise_levels": [2.0, 1.0, 1.0, 1.0, 1.0, 1.0]},
}  # fmt: skip


class _Kind(NamedTuple):
  """A kind of run with a `noise_seed`: how to start it, and where in it to stop."""

  config: Any
  stop_at: int
  subfolder: str = ""
  release: Any = None  # its config with the keys of a release
  data: Any = None  # else what the config names

  @property
  def drawn(self) -> Any:
    """Its config with keys of the operating system."""
    return dataclasses.replace(self.config, noise_seed=None)

  def go(self, workdir: pathlib.Path, config: Any = None) -> dict[str, Any]:
    config = self.config if config is None else config
    return loop.train(config, workdir, data=self.data)


_KINDS = {
  "central": _Kind(
    _central(), 3, release=_central(release=True, augmentation="shift", noise_seed=None)
  ),
  **{f"central, {name}": _Kind(_central(**held), 3) for name, held in _HELD.items()},
  "federated": _Kind(_federated(), 3, release=_federated(release=True, noise_seed=None)),
  "federated, adaptive": _Kind(_federated(**{"privacy.clipping": "adaptive"}), 3),
  "federated, correlated": _Kind(
    _federated(privacy="dp_ftrl"), 3,
    release=_federated(privacy="dp_ftrl", release=True, noise_seed=None),
  ),
  "federated, scaffold": _Kind(_federated(**_SCAFFOLD), 3),
  "relevance": _Kind(_relevance(), 5, _MODEL_2),
  "relevance, in model 1": _Kind(_relevance(), 5, "model_1"),
  "relevance, dpsgd": _Kind(_relevance(method="dpsgd"), 5, _MODEL_2),
  "relevance, adlm": _Kind(_relevance(method="adlm"), 5, _MODEL_2),
  "relevance, rigorous": _Kind(
    _relevance(method=_RIGOROUS), 5, _MODEL_2,
    release=_relevance(method=_RIGOROUS, noise_seed=None),
  ),
}  # fmt: skip
for _name, (_config, _data), _stop_at, _subfolder in (
  ("pate, teachers", small_configs.pate(data_dependent=True), 1, "teachers"),
  ("pate, queries", small_configs.pate(data_dependent=True), 4, "queries"),
  ("distillation", small_configs.distillation(), 2, ""),
  ("distillation, joint", small_configs.distillation(method="joint"), 2, ""),
  ("synthesis", small_configs.synthesis(method=small_configs.KERNEL, attack=True), 1, ""),
  ("synthesis, networks", small_configs.synthesis(method=small_configs.GAN), 2, ""),
):
  _config = dataclasses.replace(_config, noise_seed=0)
  _KINDS[_name] = _Kind(_config, _stop_at, _subfolder, data=_data)
_PLAIN = ["central", "federated", "relevance"]  # one of each
_FOLDERS = ["federated", "relevance"]  # whose folder it is: of one training, and of two
_REPEATING = [*_PLAIN, "relevance, in model 1", "relevance, rigorous"]
_HELD_TOO = [f"central, {name}" for name in _HELD]
# Runs with secret keys: ordinary ones, and releases.
_SECRET = [*_PLAIN, *(f"{n}, release" for n, kind in _KINDS.items() if kind.release)]


def _secret(name: str) -> tuple[_Kind, Any]:
  """Returns a kind of run and its config with secret keys."""
  name, _, release = name.partition(", release")
  kind = _KINDS[name] if name in _KINDS else _KINDS["relevance, rigorous"]
  return kind, kind.release if release or name not in _PLAIN else kind.drawn


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[str], tuple[pathlib.Path, dict[str, Any]]]:
  """(folder, result) of the uninterrupted run of a kind."""
  found: dict[str, Any] = {}

  def of(name: str) -> tuple[pathlib.Path, dict[str, Any]]:
    config = repr(_KINDS[name].config)
    if config not in found:
      folder = tmp_path_factory.mktemp("whole") / "run"
      found[config] = folder, _KINDS[name].go(folder)
    return found[config]

  return of


def _same(one: pathlib.Path, other: pathlib.Path) -> None:
  """Equal results, bit for bit, and equal rows, byte for byte."""
  results = [json.loads((path / writers.RESULT).read_text()) for path in (one, other)]
  for name in ("params_sha256", "epsilon", "epsilon_kind", "test_accuracy", "num_steps"):
    assert results[0][name] == results[1][name], name
  assert results[0]["ledger"] == results[1]["ledger"]
  rows = [(path / writers.METRICS).read_bytes() for path in (one, other)]
  assert rows[0] == rows[1] and rows[0]
  params = [np.load(path / "params.npz") for path in (one, other)]
  assert all(np.array_equal(params[0][name], params[1][name]) for name in params[0].files)


# --- going on


@pytest.mark.cases(
  slow=["central, schedule", "pate, teachers", "distillation", "synthesis"], long=...
)
@pytest.mark.parametrize("name", _KINDS)
def test_p16_stopped_and_resumed_equals_uninterrupted(name, whole, tmp_path, monkeypatch):
  """SIGTERM between two checkpoints: the step is finished and saved, none is repeated."""
  kind, steps = _KINDS[name], []
  stop_after(monkeypatch, kind.stop_at, sigterm, kind.subfolder)
  with pytest.raises(loop.Interrupted, match=f"step {kind.stop_at} .*run the same command"):
    kind.go(tmp_path / "run")
  assert not (tmp_path / "run" / writers.RESULT).exists()
  charge = loop.Running.charge
  monkeypatch.setattr(
    loop.Running,
    "charge",
    lambda running: (
      steps.append((running.phase.subfolder, running.step)),
      charge(running),
    ),
  )
  kind.go(tmp_path / "run")
  _same(tmp_path / "run", whole(name)[0])
  assert steps[0] == (
    kind.subfolder,
    kind.stop_at,
  )  # within the training, and no earlier one


@pytest.mark.cases(slow=["federated", "central, correlated", "central, scaled"], long=...)
@pytest.mark.parametrize("name", [*_REPEATING, *_HELD_TOO])
def test_p16_cut_off_between_checkpoints_repeats_steps_exactly(
  name, whole, tmp_path, monkeypatch
):
  """As kill -9: what came after the newest checkpoint is done again, and charged once."""
  kind = _KINDS[name]
  stop_after(monkeypatch, kind.stop_at, die, kind.subfolder)
  with pytest.raises(KeyboardInterrupt):
    kind.go(tmp_path / "run")
  kind.go(tmp_path / "run")
  _same(tmp_path / "run", whole(name)[0])


@pytest.mark.long
@pytest.mark.parametrize("name", ["relevance", "relevance, rigorous"])
@pytest.mark.parametrize("when", ["before its first checkpoint", "after it"])
def test_p16_cut_off_between_two_trainings(name, when, whole, tmp_path, monkeypatch):
  """As kill -9 when model 1 is done, and of model 2 nothing, or its beginning."""
  kind, save = _KINDS[name], loop.Running.save

  def killed(running):
    if when == "after it":
      save(running)
    die()

  monkeypatch.setattr(
    loop.Running,
    "save",
    lambda running: (killed if running.phase.subfolder == _MODEL_2 else save)(running),
  )
  with pytest.raises(KeyboardInterrupt):
    kind.go(tmp_path / "run")
  monkeypatch.setattr(loop.Running, "save", save)
  kind.go(tmp_path / "run")
  _same(tmp_path / "run", whole(name)[0])


_KILLED = """
import pathlib, sys
from dpjax.experiments.run import loop
from tests import pinned
from tests.runs import test_loop
pinned.pin()
loop.SAVE_SECONDS = 0.0
test_loop._KINDS[sys.argv[1]].go(pathlib.Path(sys.argv[2]))
"""


@pytest.mark.cases(slow=["federated"], long=...)
@pytest.mark.parametrize("name", _PLAIN)
def test_p16_killed_and_resumed_equals_uninterrupted(name, whole, tmp_path):
  """kill -9, at whatever moment it arrives, right after a checkpoint is there."""
  kind, workdir = _KINDS[name], tmp_path / "run"
  command = [sys.executable, "-c", textwrap.dedent(_KILLED), name, str(workdir)]
  process = subprocess.Popen(command, cwd=_ROOT, stderr=subprocess.DEVNULL)
  saved = workdir / checkpoint.FOLDER / kind.subfolder
  deadline = time.monotonic() + 120
  while process.poll() is None and time.monotonic() < deadline:
    if any(path.stem.isdigit() and int(path.stem) for path in saved.glob("*.npz")):
      break
    time.sleep(0.002)
  process.kill()
  process.wait()
  assert not (workdir / writers.RESULT).exists()  # it was killed on its way
  kind.go(workdir)
  _same(workdir, whole(name)[0])


@pytest.mark.cases(slow=["federated"], long=...)
@pytest.mark.parametrize("name", _FOLDERS)
def test_a_finished_run_is_returned_not_repeated(name, whole):
  folder, result = whole(name)
  before = (folder / writers.RESULT).stat().st_mtime_ns
  assert _KINDS[name].go(folder)["params_sha256"] == result["params_sha256"]
  assert (folder / writers.RESULT).stat().st_mtime_ns == before
  assert set(writers.RESULT_KEYS) <= set(result)


@pytest.mark.cases(slow=["federated"], long=...)
@pytest.mark.parametrize("name", _FOLDERS)
def test_p16_another_seed_is_another_run(name, whole, tmp_path):
  config = dataclasses.replace(_KINDS[name].config, seed=1)
  other = _KINDS[name].go(tmp_path / "run", config)
  assert other["params_sha256"] != whole(name)[1]["params_sha256"]


@pytest.mark.cases(slow=["federated"], long=...)
@pytest.mark.parametrize("name", _FOLDERS)
def test_a_corrupt_checkpoint_is_one_line_and_nothing_is_lost(name, tmp_path, monkeypatch):
  kind, workdir = _KINDS[name], tmp_path / "run"
  stop_after(monkeypatch, kind.stop_at, sigterm, kind.subfolder)
  with pytest.raises(loop.Interrupted):
    kind.go(workdir)
  newest = max((workdir / checkpoint.FOLDER / kind.subfolder).glob("[0-9]*"))
  before = sorted(path.name for path in workdir.rglob("*"))
  newest.write_bytes(b"garbage")
  with refuses("checkpoint") as caught:
    kind.go(workdir)
  assert "\n" not in str(caught.value)
  assert sorted(path.name for path in workdir.rglob("*")) == before
  newest.unlink()
  assert kind.go(workdir)["params_sha256"]


# --- whose folder it is


@pytest.mark.cases(slow=["federated"], long=["relevance"])
@pytest.mark.parametrize("name", _FOLDERS)
def test_a_workdir_of_another_config_is_left_alone(name, whole, tmp_path):
  kind, (folder, _) = _KINDS[name], whole(name)
  before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
  with refuses("workdir"):
    kind.go(folder, dataclasses.replace(kind.config, seed=3))
  assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
  (tmp_path / "thesis.tex").write_text("precious")
  with refuses("workdir"):
    kind.go(tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.cases(slow=["federated"], long=...)
@pytest.mark.parametrize("name", _FOLDERS)
def test_two_processes_never_work_in_one_folder(name, tmp_path):
  kind, folder = _KINDS[name], tmp_path / "run"
  busy = writers.alone_in(folder, checkpoint.FOLDER)
  with busy, refuses("workdir"):
    kind.go(folder)
  assert not (folder / writers.RESULT).exists()
  assert owner.recall(folder) is None  # it has not begun
  assert kind.go(folder)["params_sha256"]  # what a killed one leaves is no hindrance


@pytest.mark.slow
def test_other_users_of_the_machine_cannot_enter_where_the_keys_lie(tmp_path):
  before = os.umask(0o022)  # as most have it
  try:
    _KINDS["central"].go(tmp_path)
  finally:
    os.umask(before)
  open_to_others = {path.name for path in tmp_path.iterdir() if path.stat().st_mode & 0o077}
  assert (tmp_path / checkpoint.FOLDER / "run.json").exists()
  assert checkpoint.FOLDER not in open_to_others and writers.RESULT in open_to_others


@pytest.mark.slow
def test_two_that_start_at_once_do_not_draw_two_sets_of_keys(tmp_path):
  """Another process does the whole run between our look into the folder and our lock."""
  config, folder = _KINDS["central"].release, tmp_path / "run"
  run = experiment_of(config)
  train = run.train
  run.train = lambda data, keys: (loop.train(config, folder), train(data, keys))[1]
  with refuses("workdir"):
    loop.run(run, folder)
  assert loop.train(config, folder)["num_steps"] == 6  # what the other left


_AT_ONCE = """
import pathlib, sys, time
from dpjax.experiments.run import loop
from dpjax.experiments.run import workdir as owner
from dpjax.validate import UserError
from tests.runs import test_loop
go, recall_for = pathlib.Path(sys.argv[2]), owner.recall_for
def both(*given):  # both have looked into the folder before either writes to it
  found = recall_for(*given)
  pathlib.Path(sys.argv[1] + sys.argv[3]).touch()
  while not go.exists():
    time.sleep(0.001)
  return found
owner.recall_for = both
try:
  loop.train(test_loop._KINDS["central"].release, pathlib.Path(sys.argv[1]))
  print("done")
except UserError as error:
  print(error)
"""


@pytest.mark.long
def test_of_two_that_start_at_the_same_moment_one_runs(tmp_path):
  folder, go = tmp_path / "run", tmp_path / "go"
  command = [sys.executable, "-c", textwrap.dedent(_AT_ONCE), str(folder), str(go)]
  both = [
    subprocess.Popen([*command, name], cwd=_ROOT, stdout=subprocess.PIPE, text=True)
    for name in "ab"
  ]
  while not all((tmp_path / f"run{name}").exists() for name in "ab"):
    assert all(process.poll() is None for process in both)
    time.sleep(0.01)
  go.touch()
  said = sorted((process.communicate()[0].strip() for process in both), key=len)
  assert said[0] == "done" and "another process" in said[1], said
  assert loop.train(_KINDS["central"].release, folder)["num_steps"] == 6


# --- what is moved


@pytest.mark.cases(slow=["federated"], long=...)
@pytest.mark.parametrize("name", _FOLDERS)
def test_a_foreign_result_is_not_believed(name, whole, tmp_path):
  kind, folder = _KINDS[name], tmp_path / "run"
  shutil.copytree(whole(name)[0], folder)
  other = dataclasses.replace(kind.config, seed=7)
  kind.go(tmp_path / "other", other)
  foreign = json.loads((tmp_path / "other" / writers.RESULT).read_text())
  own = (folder / writers.RESULT).read_text()
  edited = json.dumps({**json.loads(own), "test_accuracy": 1.0})
  resealed = owner.write_result(tmp_path / "x", kind.config, foreign)  # of the same config
  for text in (json.dumps(foreign), edited, json.dumps(resealed), "[]", own):
    (folder / writers.RESULT).write_text(text)
    if text is own:
      assert kind.go(folder)["run_sha256"] == json.loads(own)["run_sha256"]
      continue
    with refuses("workdir") as caught:
      kind.go(folder)
    assert "\n" not in str(caught.value)
  shutil.rmtree(folder / checkpoint.FOLDER)  # as who publishes a release is told to
  assert kind.go(folder)["params_sha256"] == whole(name)[1]["params_sha256"]


@pytest.mark.cases(slow=["all-federated", "one training-federated"], long=...)
@pytest.mark.parametrize("name", [*_FOLDERS, "relevance, in model 1"])
@pytest.mark.parametrize("what", ["all", "one training"])
def test_checkpoints_of_another_run_are_not_gone_on_from(name, what, tmp_path, monkeypatch):
  kind, ours, theirs = _KINDS[name], tmp_path / "ours", tmp_path / "theirs"
  for folder, config in (
    (ours, kind.config),
    (
      theirs,
      dataclasses.replace(kind.config, seed=7),
    ),
  ):
    stop_after(monkeypatch, kind.stop_at, sigterm, kind.subfolder)
    with pytest.raises(loop.Interrupted):
      kind.go(folder, config)
  shutil.copytree(ours, tmp_path / "kept")
  moved = pathlib.Path(checkpoint.FOLDER)
  for path in (theirs / moved).iterdir():
    if what == "all" or path.is_dir() or path.suffix == ".npz":
      shutil.rmtree(ours / moved / path.name, ignore_errors=True)
      (shutil.copytree if path.is_dir() else shutil.copy)(path, ours / moved / path.name)
  before = {p: p.read_bytes() for p in ours.rglob("*") if p.is_file()}
  with refuses("workdir" if what == "all" else "checkpoint") as caught:
    kind.go(ours)
  assert "\n" not in str(caught.value)
  assert before == {p: p.read_bytes() for p in ours.rglob("*") if p.is_file()}
  kind.go(tmp_path / "kept")


@pytest.mark.parametrize("name", ["central", "federated"])
def test_a_run_over_its_budget_refuses_before_it_starts(name, tmp_path):
  config = fields.replace(_KINDS[name].config, "privacy.epsilon_budget", 0.1)
  with refuses("privacy.epsilon_budget", value=0.1) as caught:
    _KINDS[name].go(tmp_path / "run", config)
  assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


# --- secret keys


def _made(monkeypatch) -> list[run_keys.RunKeys]:
  """Returns a list that gets the keys of every run that begins."""
  made, drawn = [], run_keys.draw
  note = lambda seed, **how: made.append(drawn(seed, **how)) or made[-1]
  monkeypatch.setattr(run_keys, "draw", note)
  return made


@pytest.mark.cases(
  slow=[
    "sigterm-central, release",
    "sigterm-federated",
    "sigterm-relevance",
    "die-federated",
    "die-relevance",
    "die-relevance, rigorous, release",
    "sigterm-central",
    "sigterm-federated, release",
    "die-central, release",
    "die-federated, release",
    "sigterm-relevance, rigorous, release",
    "sigterm-federated, correlated, release",
    "die-federated, correlated, release",
  ]
)
@pytest.mark.parametrize("name", _SECRET)
@pytest.mark.parametrize("how", [sigterm, die])
def test_p16_a_resumed_run_goes_on_with_the_keys_it_drew(name, how, tmp_path, monkeypatch):
  """Every stream comes back. (The copy of the folder after the first step, run to its end
  without a stop, is the uninterrupted run.)"""
  (kind, config), workdir, copy = _secret(name), tmp_path / "run", tmp_path / "whole"
  stop_after(monkeypatch, 1, die, kind.subfolder)
  with pytest.raises(KeyboardInterrupt):
    kind.go(workdir, config)
  shutil.copytree(workdir, copy)
  kind.go(copy, config)
  stop_after(monkeypatch, kind.stop_at, how, kind.subfolder)
  with pytest.raises((loop.Interrupted, KeyboardInterrupt)):
    kind.go(workdir, config)
  resumed = kind.go(workdir, config)
  _same(workdir, copy)
  if not kind.subfolder:  # one key, all the steps
    ledger = Ledger.from_json(resumed["ledger"])
    assert ledger.num_steps == 6
    assert len({charge.noise_key_id for charge in ledger.charges}) == 1


@pytest.mark.cases(quick=["central"], slow=...)
@pytest.mark.parametrize("name", _SECRET)
def test_keys_are_saved_before_anything_is_computed_with_them(name, tmp_path, monkeypatch):
  (kind, config), workdir = _secret(name), tmp_path / "run"
  init = loop.Running.__init__
  monkeypatch.setattr(loop.Running, "__init__", lambda *a: die())
  with pytest.raises(KeyboardInterrupt):
    kind.go(workdir, config)
  monkeypatch.setattr(loop.Running, "__init__", init)
  kept = run_keys.from_meta(config.seed, owner.recall(workdir))
  made = []
  monkeypatch.setattr(run_keys, "draw", lambda seed, **how: made.append(seed))
  result = kind.go(workdir, config)
  assert not made
  if not kind.subfolder:
    charge = result["ledger"]["charges"][0]
    assert charge["noise_key_id"] == key_id(kept.noise) and charge["first_step"] == 0


@pytest.mark.cases(quick=["central"], slow=...)
@pytest.mark.parametrize("name", _SECRET)
def test_killed_before_its_keys_are_saved_it_starts_with_new_ones(
  name, tmp_path, monkeypatch
):
  (kind, config), made = _secret(name), _made(monkeypatch)
  with monkeypatch.context() as killed:
    killed.setattr(owner, "remember", lambda *what: die())
    with pytest.raises(KeyboardInterrupt):
      kind.go(tmp_path / "run", config)
  kind.go(tmp_path / "run", config)
  ids = [key_id(one.noise) for one in made]
  assert len(ids) == 2 and ids[0] != ids[1]


@pytest.mark.cases(
  slow=[
    "central",
    "federated",
    "relevance",
    "federated, release",
    "federated, correlated, release",
    "relevance, rigorous, release",
  ]
)
@pytest.mark.parametrize("name", _SECRET)
def test_p18_two_runs_share_no_key_and_no_file_but_the_checkpoints_holds_one(
  name, tmp_path, monkeypatch
):
  (kind, config), made = _secret(name), _made(monkeypatch)
  results = [kind.go(tmp_path / folder, config) for folder in "ab"]
  assert results[0]["params_sha256"] != results[1]["params_sha256"]
  assert key_id(made[0].noise) != key_id(made[1].noise)
  held = run_keys.to_json(made[0])
  words = list(held.values())
  assert len(words) == 3 and all(len(word) >= 32 for word in words)
  for path in (tmp_path / "a").rglob("*"):
    if path.is_file() and checkpoint.FOLDER not in path.parts:
      content = path.read_bytes()
      assert not any(word.encode() in content for word in words), path
      assert not any(bytes.fromhex(held[n]) in content for n in ("noise", "local")), path
  if kind.subfolder:  # what is done needs no key any more
    assert "keys" not in owner.recall(tmp_path / "a")
    left = sorted(p.name for p in (tmp_path / "a" / checkpoint.FOLDER).iterdir())
    assert left == [writers.LOCK, "run.json"]


# --- a full disk

_FILLED = """
import pathlib, sys
from dpjax.experiments.run import loop
from dpjax.validate import UserError
from launch import app
from tests import pinned
from tests.runs import test_loop
pinned.pin()
loop.SAVE_SECONDS = 0.0
kind, workdir = test_loop._KINDS[sys.argv[1]], pathlib.Path(sys.argv[2])
charge = loop.Running.charge
def fill(running):
  charge(running)
  if running.step == kind.stop_at and running.phase.subfolder == kind.subfolder:
    with open(workdir.parent / "ballast", "wb", buffering=0) as file:
      for size in (1 << 16, 1 << 12, 1):
        try:
          while True:
            file.write(bytes(size))
        except OSError:
          pass
loop.Running.charge = fill
try:
  kind.go(workdir)
except UserError as error:
  app.fail(error)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", _FOLDERS)
def test_a_full_disk_is_one_line_and_nothing_that_was_saved_is_lost(name, whole, tmp_path):
  """On a file system of a few megabytes that fills up in the middle of the run."""
  mount = [
    "unshare",
    "-rm",
    "sh",
    "-c",
    f"mount -t tmpfs -o size=8m none {tmp_path} && true",
  ]
  if not shutil.which("unshare") or subprocess.run(mount, capture_output=True).returncode:
    pytest.skip("no file system of its own can be mounted here")
  script = tmp_path.parent / f"{name}.py"
  script.write_text(textwrap.dedent(_FILLED))
  there, kept = tmp_path / "run", tmp_path.parent / f"{name}-kept"
  inside = (
    f"mount -t tmpfs -o size=8m none {tmp_path}; "
    f"{sys.executable} {script} {name} {there}; code=$?; rm -f {tmp_path}/ballast; "
    f"cp -r {there} {kept}; exit $code"
  )
  done = subprocess.run(
    ["unshare", "-rm", "sh", "-c", inside], cwd=_ROOT, capture_output=True, text=True,
    env={**os.environ, "PYTHONPATH": str(_ROOT)},
  )  # fmt: skip
  said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
  lines = [line for line in done.stderr.splitlines() if "/s" not in line]  # of progress
  assert done.returncode == 2 and lines == said and len(said) == 1, done.stderr
  assert "no space left on the device; step " in said[0] and "the same command" in said[0]
  assert not (kept / writers.RESULT).exists()
  _KINDS[name].go(kept)
  _same(kept, whole(name)[0])


def _no_space(step: int, honest: Any, error: Exception) -> Any:
  """`honest`, a method that is told the step first, until that step is there."""

  def act(self: Any, at: int, *args: Any, **options: Any) -> Any:
    if at >= step:
      raise error
    return honest(self, at, *args, **options)

  return act


@pytest.mark.slow
@pytest.mark.parametrize(
  ("owns", "name", "error"),
  [
    (writers.MetricsWriter, "write", OSError(errno.ENOSPC, "No space left on device")),
    (checkpoint.Checkpoints, "_write", OSError(errno.ENOSPC, "No space left on device")),
  ],
)  # fmt: skip
def test_no_space_for_metrics_or_a_checkpoint_is_one_line(
  owns, name, error, whole, tmp_path, monkeypatch
):
  kind, workdir = _KINDS["central"], tmp_path / "run"
  with monkeypatch.context() as full:
    full.setattr(owns, name, _no_space(4, getattr(owns, name), error))
    with refuses("workdir") as caught:
      kind.go(workdir)
  assert "\n" not in str(caught.value)
  kind.go(workdir)
  _same(workdir, whole("central")[0])
