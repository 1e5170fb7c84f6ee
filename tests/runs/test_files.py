"""Files that a run finds otherwise than it left them: turned bits, edits, a loss of power, a disk
that refuses. The same result, or one line; never a smaller epsilon, never a hang."""

import contextlib
import dataclasses
import hashlib
import inspect
import json
import pathlib
import random
import re
import shutil
import stat
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import Plan, PoissonSampler, accounting, training
from dpjax.accounting import attack_bounds, trade_off_files
from dpjax.experiments.config import choices
from dpjax.experiments.kinds.central.config import DataConfig, TrainConfig
from dpjax.experiments.run import (
  checkpoint,
  experiment,
  finished,
  guarantee,
  left_out,
  loop,
  run_keys,
  writers,
)
from dpjax.experiments.run import workdir as owner
from dpjax.validate import UserError
from tests.refuses import refuses
from tests.runs.power import Disk
from tests.runs.stops import sigterm, stop_after

_STEPS = 6
_ROWS = np.full((60, 3), 0.3, np.float32)
_PLAN = Plan(
  sampler=PoissonSampler(sampling_prob=0.5, capacity=61), num_steps=_STEPS, l2_clip_norm=2.0,
  noise_multiplier=1.1, normalize_by=30.0, delta=1e-5,
)  # fmt: skip
_LOSS = lambda w, row: 0.5 * jnp.sum((w - row) ** 2)
_STEP = jax.jit(
  lambda key, state, batch: training.dp_sgd(
    _LOSS, _PLAN, optax.sgd(0.5), noise_key=key
  ).step(state, batch)
)


class _Mean(experiment.Experiment[TrainConfig]):
  """A private mean: a run of a second, of whose files each is of every run."""

  def data(self) -> np.ndarray:
    return _ROWS

  def digest(self, data: np.ndarray) -> bytes:
    return hashlib.sha256(data.tobytes()).digest()

  def train(self, data: np.ndarray, keys: run_keys.RunKeys) -> experiment.Story:
    return experiment.single(self.phase(keys))

  def phase(self, random_keys: run_keys.RunKeys) -> experiment.Phase:
    algorithm = training.dp_sgd(_LOSS, _PLAN, optax.sgd(0.5), noise_key=random_keys.noise)
    return experiment.Phase(
      num_steps=_STEPS,
      init=lambda: algorithm.init(jnp.zeros(3)),
      step=lambda state, batch: _STEP(random_keys.noise, state, batch),
      draws=lambda at: _PLAN.batches(_ROWS, rng=random_keys.sampler, start=at),
      released=lambda state: {"mean": state.params},
      evaluate=lambda state: {"accuracy": float(state.params[0])},
      guarantee=guarantee.of_plan(_PLAN, len(_ROWS), release=self.release),
      save_every=2,
      planned=lambda: {"task": "mean", "dataset": "rows", "method": "private_mean"},
    )


def _mean(*, release: bool = False) -> _Mean:
  # Data of this name may lie in another folder.
  config = TrainConfig(data=DataConfig("mnist"), release=release)
  return _Mean(dataclasses.replace(config, noise_seed=None if release else 0))


def _told(folder: pathlib.Path) -> tuple[Any, ...]:
  """All that a run says, but for how long it took."""
  result = json.loads((folder / writers.RESULT).read_text())
  facts = {
    name: result[name] for name in ("params_sha256", "epsilon", "ledger", "num_steps")
  }
  rows = (folder / writers.METRICS).read_bytes()
  with np.load(folder / owner.PARAMS) as params:
    return facts, rows, params["mean"].tobytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("whole") / "run"
  loop.run(_mean(), folder)
  return folder


@pytest.mark.slow
def test_a_run_says_what_an_attacker_can_do_and_writes_the_curve(whole, tmp_path):
  result = loop.run(_Mean(TrainConfig()), tmp_path)
  alphas, betas = trade_off_files.read_curve(tmp_path / trade_off_files.CURVE)
  for name, fpr in guarantee.RATES.items():
    # Between two corners the curve is straight.
    assert result[name] == pytest.approx(1 - np.interp(fpr, alphas, betas), rel=2e-3)
  profile = _PLAN.privacy_profile()
  assert result["tpr_at_fpr_0.01"] == accounting.true_positive_rate(profile, 0.01)
  assert result["mu"] == accounting.pairs_of(profile, 1e-5).mu(1e-5)
  assert result["max_advantage"] == attack_bounds.advantage(profile)
  assert f", mu={accounting.upper(result['mu'])}, TPR at most" in guarantee.summary(result)
  assert trade_off_files.CURVE in result[owner.FILES]
  assert "In an attacker's terms" in result["privacy_statement"]
  # The noise of the other run can be repeated.
  assert json.loads((whole / writers.RESULT).read_text())["epsilon_kind"] == "claimed"
  assert not (whole / trade_off_files.CURVE).exists()


@pytest.mark.parametrize("assumed", ["", "C9: the norm is a guess"])
def test_a_claimed_run_writes_no_curve_which_could_not_say_so(tmp_path, assumed):
  event = accounting.gaussian_event(2.0)
  asked = {"delta": 1e-5, "l2_bound": 1.0, "num_records": 100, "assumed": assumed}
  stated = guarantee.of_event(event, **asked)
  phase = experiment.Phase(
    num_steps=1, init=dict, step=lambda state, draw: (state, None),
    draws=lambda at: iter([0]), released=lambda state: state, evaluate=None, guarantee=stated,
    planned=lambda: {"task": "t", "dataset": "d", "method": "m"},
  )  # fmt: skip
  story = experiment.single(phase)
  next(story)
  counts = left_out.Tally(None, "examples")
  trained = (phase, {}, 1, accounting.Ledger(), stated.curve(1), counts, None)
  with pytest.raises(StopIteration) as end:
    story.send(experiment.Trained(*trained))
  end.value.value.write(tmp_path)
  assert stated.kind == ("claimed" if assumed else "proved")
  assert (tmp_path / trade_off_files.CURVE).exists() == (not assumed)


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("stopped") / "run"
  with pytest.MonkeyPatch.context() as context:
    stop_after(context, 5, sigterm)
    with pytest.raises(loop.Interrupted):
      loop.run(_mean(), folder)
  return folder


@pytest.fixture
def stopped(stopped_once, tmp_path) -> pathlib.Path:
  """The folder of a run that was stopped at step 5 of 6, steps 4 and 5 saved."""
  return shutil.copytree(stopped_once, tmp_path / "run")


def _goes_on(folder: pathlib.Path, whole: pathlib.Path) -> bool:
  """True: with the same result. False: refused in one line."""
  try:
    loop.run(_mean(), folder)
  except UserError as error:
    message = str(error)
    assert "\n" not in message and len(message) < 300 + len(str(folder)), message
    return False
  assert _told(folder) == _told(whole)
  return True


# --- a later version


def _without_a_field(to_dict):
  """As a version writes a config that knows no `ema_decay`, and no `data.num_examples`."""

  def older(config):
    held = to_dict(config)
    held.pop("ema_decay", None)
    if "data" in held:
      held["data"] = {k: v for k, v in held["data"].items() if k != "num_examples"}
    return held

  return older


def test_a_field_that_a_later_version_added_makes_no_other_run(tmp_path, whole):
  folder = tmp_path / "run"
  with pytest.MonkeyPatch.context() as context:
    context.setattr(choices, "to_dict", _without_a_field(choices.to_dict))
    stop_after(context, 5, sigterm)
    with pytest.raises(loop.Interrupted):
      loop.run(_mean(), folder)
  written = json.loads((folder / owner.CONFIG).read_text())
  assert "ema_decay" not in written and "num_examples" not in written["data"]
  # What no version wrote is another run's: a field that was taken out, renamed or added by hand.
  for damaged in (
    {name: entry for name, entry in written.items() if name != "seed"},
    {**written, "steps": 1},
    {**written, "data": {**written["data"], "nums": 1}},
  ):
    (folder / owner.CONFIG).write_text(json.dumps(damaged))
    with refuses("workdir"):
      loop.run(_mean(), folder)
  (folder / owner.CONFIG).write_text(json.dumps(written))
  with refuses("workdir"):  # of another value than it has by default
    loop.run(_Mean(TrainConfig(noise_seed=0, ema_decay=0.5)), folder)
  assert _goes_on(folder, whole)
  # Its result is that of its config, for both versions and for who reads it.
  assert owner.finished_result(folder, _mean().config) == loop.run(_mean(), folder)
  assert finished.read(folder).result["num_steps"] == _STEPS
  with pytest.MonkeyPatch.context() as context:
    context.setattr(choices, "to_dict", _without_a_field(choices.to_dict))
    assert owner.finished_result(folder, _mean().config)


# --- other draws


_FLAGS = {
  "default_prng_impl": "rbg",
  "threefry_partitionable": False,
  "enable_x64": True,
}


@pytest.mark.parametrize("flag", [*_FLAGS, "NumPy"])
def test_a_run_goes_on_only_where_its_keys_draw_the_same(flag, stopped, whole, monkeypatch):
  """Frozen first weights were drawn anew under another generator: of an accuracy of .24 the
  resumed run left .06, and steps that were done again had the same noise for other gradients."""
  if flag == "NumPy":
    draws = run_keys.generator
    context = contextlib.nullcontext()
    monkeypatch.setattr(run_keys, "generator", lambda seed, *at: draws(seed + 1, *at))
  else:
    context = getattr(jax, flag)(_FLAGS[flag])
  before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
  with context, refuses("workdir"):
    loop.run(_mean(), stopped)
  after = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
  assert before == after
  monkeypatch.undo()
  assert _goes_on(stopped, whole)


def test_every_method_by_which_runs_draw_is_in_the_record_of_draws():
  """Skellam noise is drawn by `poisson`, which was not: a round that was done again under a NumPy
  with another one had the same sum and other noise."""
  covered = set(re.findall(r"\brng\.(\w+)\(", inspect.getsource(run_keys._draws_here)))
  drawn = set()
  for package in ("sampling", "noise", "federated"):
    for path in (pathlib.Path(dpjax.__file__).parent / package).rglob("*.py"):
      code = [line for line in path.read_text().splitlines() if ">>>" not in line]
      drawn |= set(re.findall(r"(?:\brng|_rng|\))\.(\w+)\(", "\n".join(code)))
  methods = drawn & {*dir(np.random.Generator)}
  assert {"geometric", "poisson", "permutation"} <= methods <= covered


@pytest.mark.parametrize("name", ["split", "fold_in", "uniform", "randint"])
def test_functions_of_jax_by_which_runs_draw_are_in_the_record(name, monkeypatch):
  """Views of an example, and the noise of a step, follow from more than bits of the run's key."""
  here = run_keys._draws_here(run_keys.draw(0))
  draws = getattr(jax.random, name)
  other = {
    "split": lambda key: draws(key)[::-1],
    "fold_in": lambda key, n: draws(key, n + 1),
  }
  changed = lambda *args, **more: draws(*args, **more) + 1
  monkeypatch.setattr(jax.random, name, other.get(name, changed))
  assert run_keys._draws_here(run_keys.draw(0)) != here


def test_both_ways_to_choose_rows_are_in_the_record(monkeypatch):
  """NumPy shuffles the end of a list where it takes many of more than 10,000 rows."""
  here = run_keys._draws_here(run_keys.draw(0))
  drawn = run_keys.generator

  class Other:
    def __init__(self, *args):
      self.rng = drawn(*args)

    def __getattr__(self, name):
      return getattr(self.rng, name)

    def choice(self, rows, *args, **more):
      return self.rng.choice(rows, *args, **more) + (rows > 10_000)

  monkeypatch.setattr(run_keys, "generator", Other)
  assert run_keys._draws_here(run_keys.draw(0)) != here


def test_data_that_declare_another_number_of_records_are_others(
  stopped, whole, monkeypatch
):
  """The digest of the data is that of the rows. A divisor, or a probability, may follow from the
  declared number: steps that were done again had the same noise for other sums."""
  of_plan = guarantee.of_plan
  more = lambda plan, count, **options: of_plan(plan, count + 1, **options)
  with monkeypatch.context() as context:
    context.setattr(guarantee, "of_plan", more)
    with refuses("checkpoint"):
      loop.run(_mean(), stopped)
  assert _goes_on(stopped, whole)


def test_the_same_data_in_another_place_go_on(stopped, whole):
  config = TrainConfig(noise_seed=0, data=DataConfig("mnist", data_dir="/elsewhere"))
  assert loop.run(_Mean(config), stopped)["num_steps"] == _STEPS
  assert _told(stopped) == _told(whole)


# --- a folder that is gone


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
@pytest.mark.cases(quick=["moved-1"], slow=...)
def test_a_folder_that_is_gone_in_the_middle_is_said(
  how, step, whole, tmp_path, monkeypatch
):
  """The run made the folder anew, without config.json, and ended well: no command read it."""
  folder, moved = tmp_path / "run", tmp_path / "moved"

  def change():
    if how == "removed":
      shutil.rmtree(folder)
    else:
      folder.rename(moved)
    if how == "replaced":
      shutil.copytree(whole, folder)

  stop_after(monkeypatch, step, change)
  with refuses("workdir", value=folder):
    loop.run(_mean(), folder)
  if how == "replaced":
    assert _told(folder) == _told(whole)
    shutil.rmtree(folder)
  assert not folder.exists()
  if moved.exists():
    moved.rename(folder)
  assert _goes_on(folder, whole)


# --- accidents


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  """What a run goes on from, but for the steps before the newest."""
  memory = folder / checkpoint.FOLDER / "run.json"
  return [_newest(folder), memory, folder / writers.METRICS, folder / owner.CONFIG]


def _newest(folder: pathlib.Path) -> pathlib.Path:
  return folder / checkpoint.FOLDER / f"{checkpoint.newest(folder)}.npz"


def _flipped(count: int, stopped: pathlib.Path, whole: pathlib.Path, folder: pathlib.Path):
  """How many of so many turned bits were refused."""
  chance, refused = random.Random(0), 0
  files = _files(stopped)
  for _ in range(count):
    shutil.copytree(stopped, folder)
    path = folder / chance.choice(files).relative_to(stopped)
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(content))
    refused += not _goes_on(folder, whole)
    shutil.rmtree(folder)
  return refused


@pytest.mark.slow
def test_a_turned_bit_is_refused_or_changes_nothing(stopped, whole, tmp_path):
  assert _flipped(20, stopped, whole, tmp_path / "copy") > 3


@pytest.mark.long
def test_of_200_turned_bits_each_is_refused_or_changes_nothing(stopped, whole, tmp_path):
  assert _flipped(200, stopped, whole, tmp_path / "copy") > 50


def _edited(folder: pathlib.Path, change) -> None:
  """Changes the meta data of the newest step, with checksums that fit."""
  path = _newest(folder)
  with np.load(path) as archive:
    held = dict(archive)
  meta = json.loads(held["meta"].tobytes())
  change(meta)
  held["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
  np.savez(path, **held)


def _charge(**changes):
  def change(meta: dict[str, Any]) -> None:
    meta["ledger"]["charges"][0].update(changes)

  return change


def _numbers(data: Any) -> list[tuple[Any, Any]]:
  """(holder, key) of every float in JSON data."""
  pairs = data.items() if isinstance(data, dict) else enumerate(data)
  found = []
  for key, value in pairs:
    if isinstance(value, dict | list):
      found += _numbers(value)
    elif isinstance(value, float):
      found.append((data, key))
  return found


def _every_number(meta: dict[str, Any]) -> None:
  for holder, key in _numbers(meta["ledger"]):
    holder[key] *= 9


@pytest.mark.parametrize(
  "change",
  [
    _every_number,
    _charge(l2_clip_norm=1e-3),
    _charge(num_steps=4),
    _charge(neighboring_relation="replace_one"),
    _charge(noise_key_id="another"),
    lambda meta: meta["ledger"].update(charges=[]),
    lambda meta: meta["ledger"].update(version=3),
    lambda meta: meta.update(seconds="x"),
    lambda meta: meta.update(step=4),
    lambda meta: meta.update(rows={"bytes": 0, "sha256": "0"}),
  ],
)
def test_an_edited_ledger_is_refused_even_with_checksums_that_fit(change, stopped, whole):
  _edited(stopped, change)
  assert not _goes_on(stopped, whole)


def test_a_checkpoint_of_another_step_is_refused(stopped, whole):
  shutil.copy(stopped / checkpoint.FOLDER / "4.npz", _newest(stopped))
  assert not _goes_on(stopped, whole)
  _newest(stopped).unlink()
  assert _goes_on(stopped, whole)


@pytest.mark.parametrize("change", ["gone", "shape"])
def test_a_checkpoint_that_lacks_an_array_is_refused(change, stopped, whole):
  with np.load(_newest(stopped)) as archive:
    held = dict(archive)
  (name, *_) = (name for name in held if held[name].shape == (3,))
  if change == "gone":
    del held[name]
  else:
    held[name] = held[name][:2]
  np.savez(_newest(stopped), **held)
  assert not _goes_on(stopped, whole)


@pytest.mark.parametrize(
  "name", ["step", "arrays", "before_steps", "num_records", "arrivals", "ledger", "run"]
)
def test_a_checkpoint_that_lacks_an_entry_is_refused(name, stopped, whole):
  _edited(stopped, lambda meta: meta.pop(name))
  assert not _goes_on(stopped, whole)


@pytest.mark.cases(
  slow=[
    *(f"metrics.jsonl-{content}" for content in ("[1]", "3", "NaN", r"\xff")),
    *(f"checkpoints/5.npz-{content}" for content in ("[1]", "3", "", r"\xff")),
    20,
  ]
)
@pytest.mark.parametrize(
  "content", [b"", b"[1]", b"3", b"NaN", b"{}x", b"\xff", b"[" * 9999]
)
@pytest.mark.parametrize(
  "name",
  ["checkpoints/run.json", "config.json", "metrics.jsonl", "checkpoints/5.npz"],
)
def test_what_is_no_json_of_ours_is_refused(name, content, stopped, whole):
  (stopped / name).write_bytes(content)
  assert not _goes_on(stopped, whole)


@pytest.mark.parametrize(
  "name", ["checkpoints/run.json", "config.json", "metrics.jsonl", "checkpoints/5.npz"]
)
def test_a_pipe_in_place_of_a_file_does_not_hang(name, stopped, whole):
  import os

  (stopped / name).unlink()
  os.mkfifo(stopped / name)
  ended: list[bool] = []
  going = threading.Thread(
    target=lambda: ended.append(_goes_on(stopped, whole)), daemon=True
  )
  going.start()
  going.join(60)
  assert ended == [False]


@pytest.mark.parametrize(
  "change", [lambda text: "", lambda text: text[:-20], lambda t: t.replace("1", "2")]
)
def test_lost_or_edited_rows_are_noticed(change, stopped, whole):
  path = stopped / writers.METRICS
  path.write_text(change(path.read_text()))
  assert not _goes_on(stopped, whole)


# --- a loss of power


def _power_cuts(count: int, whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
  """A run, its power cut at moments spread over it; what is left goes on to the same result."""
  chance = random.Random(1)
  calls: list[int] = []
  with Disk(tmp_path / "dry", lambda: calls.append(1)).watched():
    loop.run(_mean(), tmp_path / "dry")
  moments = set(chance.sample(range(len(calls)), min(count, len(calls))))
  seen: list[int] = []

  def before() -> None:
    seen.append(1)
    if len(seen) in moments:
      disk.lost(tmp_path / "cut" / str(len(seen)), chance)

  disk = Disk(tmp_path / "run", before)
  with disk.watched():
    loop.run(_mean(), tmp_path / "run")
  steps = []
  for moment in sorted(moments):
    left = tmp_path / "cut" / str(moment)
    steps.append(checkpoint.newest(left) or 0)
    assert _goes_on(left, whole), moment
  assert max(steps) == _STEPS


@pytest.mark.long
def test_after_a_loss_of_power_a_run_goes_on_to_the_same_result(whole, tmp_path):
  _power_cuts(8, whole, tmp_path)


@pytest.mark.slow
def test_a_config_that_was_half_written_is_no_strangers_file(whole, tmp_path):
  folder = tmp_path / "run"
  folder.mkdir()
  (folder / f".{owner.CONFIG}.7.tmp").write_text("{")
  assert _goes_on(folder, whole)
  other = tmp_path / "other"
  other.mkdir()
  (other / ".notes.7.tmp").write_text("{")
  assert not _goes_on(other, whole)


@pytest.mark.long
def test_after_each_of_100_losses_of_power_a_run_goes_on_to_the_same_result(
  whole, tmp_path
):
  _power_cuts(100, whole, tmp_path)


# --- a run that is done


@pytest.mark.parametrize("name", [owner.PARAMS, writers.METRICS])
@pytest.mark.parametrize("how", ["gone", "empty", "edited"])
def test_a_damaged_file_of_a_finished_run_is_told_and_can_be_written_again(
  name, how, whole, tmp_path
):
  folder = tmp_path / "run"
  shutil.copytree(whole, folder)
  path = folder / name
  content = path.read_bytes()
  path.unlink()
  if how != "gone":
    path.write_bytes(b"" if how == "empty" else content[:-1] + b"?")
  with refuses("workdir") as caught:
    loop.run(_mean(), folder)
  assert "\n" not in str(caught.value)
  if name == owner.PARAMS:
    (folder / writers.RESULT).unlink()
    assert _goes_on(folder, whole)


@pytest.mark.parametrize("name", ["report.png", "report.csv"])
@pytest.mark.usefixtures("every_report_is_drawn")
def test_a_missing_report_is_drawn(name, whole, tmp_path):
  folder = tmp_path / "run"
  shutil.copytree(whole, folder)
  drawn = []
  for _ in range(2):
    (folder / name).unlink()
    loop.run(_mean(), folder)
    drawn.append((folder / name).read_bytes())
  assert drawn[0] == drawn[1] and drawn[0]


# --- who may read what


def _open_to_others(folder: pathlib.Path) -> list[str]:
  paths = [path for path in folder.rglob("*") if stat.S_IMODE(path.stat().st_mode) & 0o077]
  return [str(path.relative_to(folder)) for path in paths]


@pytest.mark.cases(slow=["18"], long=...)
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
def test_what_is_secret_is_its_owners_alone(mask, tmp_path):
  import os

  folder = tmp_path / "run"
  (folder / checkpoint.FOLDER).mkdir(parents=True, mode=0o777)
  (folder / checkpoint.FOLDER).chmod(0o777)
  before = os.umask(mask)
  try:
    loop.run(_mean(), folder)
  finally:
    os.umask(before)
  assert _open_to_others(folder / checkpoint.FOLDER) == []
  assert stat.S_IMODE((folder / checkpoint.FOLDER).stat().st_mode) == 0o700


@pytest.mark.slow
def test_a_release_holds_no_time_and_no_name_of_the_machine(tmp_path, monkeypatch):
  import socket
  import time

  clock = 4_000_000_000.0  # of no other number in the files
  monkeypatch.setattr(time, "time", lambda: clock)
  monkeypatch.setattr(socket, "gethostname", lambda: "machine-of-mine")
  loop.run(_mean(release=True), tmp_path / "run")
  files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
  public = [path for path in files if checkpoint.FOLDER not in path.parts]
  assert {path.name for path in public} > {writers.RESULT, owner.PARAMS, "report.png"}
  assert not any(writers.EVENTS in path.parts for path in public)
  for path in public:
    content = path.read_bytes()
    assert b"machine-of-mine" not in content and b"4000000000" not in content, path
    assert np.float64(clock).tobytes() not in content, path


def test_a_finished_release_and_a_seeded_run_write_the_same_kinds_of_files(whole):
  assert (whole / writers.EVENTS).is_dir()


# --- a state that could not be read again


def test_a_numpy_scalar_in_a_state_is_refused_before_the_first_step(tmp_path):
  phase = experiment.Phase(
    num_steps=1, init=lambda: {"w": jnp.zeros(2), "n": np.int32(0)},
    step=lambda state, draw: (state, None), draws=lambda at: iter([0]),
    released=lambda state: state, evaluate=None,
    planned=lambda: {"task": "t", "dataset": "d", "method": "m"},
  )  # fmt: skip
  run = _mean()
  run.phase = lambda keys: phase
  with refuses("Phase.init") as caught:
    loop.run(run, tmp_path / "run")
  assert "int32" in str(caught.value)
