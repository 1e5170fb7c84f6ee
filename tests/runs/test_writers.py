"""Files of a run: strict JSON, whole or not at all, equal after an interruption."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import math
import os
import select
import subprocess
import sys
import termios

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpjax import validate
from dpjax.experiments.kinds.federated import config as fed_config
from dpjax.experiments.run import checkpoint, writers
from dpjax.experiments.run import workdir as owner
from dpjax.validate import UserError
from tests.refuses import refuses

RESULT = {
  "task": "classification",
  "dataset": "digits",
  "method": "dp_sgd",
  "epsilon": 1.5,
  "delta": 1e-5,
  "neighboring_relation": "add_or_remove_one",
  "unit": "example",
  "epsilon_kind": "proved",
  "test_accuracy": 0.9,
  "num_steps": 10,
  "seed": 0,
  "params_sha256": "00",
  "wall_seconds": 1.0,
  "versions": {"jax": "0"},
}


def _strict(text):
  def refuse(word):
    raise AssertionError(f"{word} is not JSON")

  return json.loads(text, parse_constant=refuse)


def test_json_is_strict_and_keeps_order(tmp_path):
  data = {
    "z": math.inf,
    "a": [math.nan, -math.inf],
    "n": np.float32(0.5),
    "j": jnp.int32(3),
  }
  writers.write_json(tmp_path / "new" / "a.json", data)
  text = (tmp_path / "new" / "a.json").read_text()
  assert _strict(text) == {"z": "inf", "a": [None, "-inf"], "n": 0.5, "j": 3}
  assert list(writers.read_json(tmp_path / "new" / "a.json")) == ["z", "a", "n", "j"]


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / "a.json"
  writers.write_json(path, 1)

  def full(descriptor):
    raise OSError(errno.ENOSPC, "no space left")

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError) as caught:
    writers.write_json(path, 2)
  assert caught.value.filename == str(path)
  with pytest.raises(TypeError):
    writers.write_json(path, object())
  assert writers.read_json(path) == 1 and os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("content", [None, b"{", b"\xff\xfe", b""])
def test_missing_or_corrupt_json_is_one_line(tmp_path, content):
  path = tmp_path / "a.json"
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(UserError) as error:
    writers.read_json(path)
  assert "a.json" in str(error.value) and "\n" not in str(error.value)


def _metrics(workdir, steps, held=None):
  """Writes two rows for each step, and returns what a checkpoint of each step would hold."""
  with writers.MetricsWriter(workdir, held, tensorboard=False) as metrics:
    durable = {0: metrics.durable()}
    for step in steps:
      metrics.write(step, {"loss": 1 / step})
      metrics.write(step, {"epsilon": math.inf, "gone": math.nan})
      durable[step] = metrics.durable()
  return durable


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
  total=st.integers(1, 6), reached=st.integers(0, 6), saved=st.integers(0, 6),
  cut=st.integers(0, 20),
)  # fmt: skip
def test_p16_interrupted_metrics_equal_uninterrupted(tmp_path, total, reached, saved, cut):
  reached = min(reached, total)
  saved = min(saved, reached)
  _metrics(tmp_path / "whole", range(1, total + 1))
  durable = _metrics(tmp_path / "resumed", range(1, reached + 1))
  path = tmp_path / "resumed" / "metrics.jsonl"
  with path.open("a") as file:  # killed while it wrote the next line
    file.write('{"step": 1, "loss": 1.0}\n'[:cut])
  _metrics(tmp_path / "resumed", range(saved + 1, total + 1), durable[saved])
  assert path.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_metrics_read_back_as_floats(tmp_path):
  _metrics(tmp_path, [2])
  first, second = writers.read_metrics(tmp_path)
  assert first == {"step": 2, "loss": 0.5}
  assert second["epsilon"] == math.inf and math.isnan(second["gone"])
  for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
    _strict(line)


def test_new_run_starts_an_empty_file(tmp_path):
  _metrics(tmp_path, [1, 2])
  _metrics(tmp_path, [1])
  assert [entry["step"] for entry in writers.read_metrics(tmp_path)] == [1, 1]
  assert writers.read_metrics(tmp_path / "nowhere") == []


def test_cut_last_line_is_ignored_and_a_corrupt_middle_one_named(tmp_path):
  _metrics(tmp_path, [1])
  path = tmp_path / "metrics.jsonl"
  whole = path.read_text()
  path.write_text(whole + '{"step": 2, "loss": 0.5}')  # no newline: it was being written
  assert len(writers.read_metrics(tmp_path)) == 2
  path.write_text("garbage\n" + whole)
  with pytest.raises(UserError, match=r"metrics\.jsonl: line 1 "):
    writers.read_metrics(tmp_path)


def test_tensorboard_gets_the_scalars(tmp_path):
  pytest.importorskip("tensorboardX")
  held = None
  for step in (1, 2):
    with writers.MetricsWriter(tmp_path, held) as metrics:
      metrics.write(step, {"loss_of_run": 0.25})
      held = metrics.durable()
  events = sorted((tmp_path / "tensorboard").iterdir())
  assert events and all(b"loss_of_run" in path.read_bytes() for path in events)


def test_result_needs_every_key(tmp_path):
  writers.write_result(tmp_path, {**RESULT, "more": 1})
  assert writers.read_json(tmp_path / "result.json") == {**RESULT, "more": 1}
  for key in writers.RESULT_KEYS:
    with pytest.raises(ValueError, match=key):
      writers.write_result(tmp_path, {k: v for k, v in RESULT.items() if k != key})


@pytest.mark.parametrize(
  "changes",
  [
    {"epsilon": None},
    {"epsilon": math.inf},
    {"epsilon": "inf"},
    {"epsilon": math.nan},
    {"epsilon": -1.0},
    {"epsilon": math.inf, "epsilon_kind": "claimed"},
    {"epsilon": 1.0, "epsilon_kind": "none"},
    {"epsilon_kind": "certain"},
    {"delta": 1.0},
    {"delta": None},
    {"neighboring_relation": None},
    {"unit": ""},
  ],
)
def test_result_refuses_an_epsilon_that_means_nothing(tmp_path, changes):
  with pytest.raises(ValueError):
    writers.write_result(tmp_path, {**RESULT, **changes})
  assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("epsilon", [None, math.inf, "inf"])
def test_result_without_privacy_says_so(tmp_path, epsilon):
  nothing = {"epsilon": epsilon, "epsilon_kind": "none", "delta": None, "unit": None}
  writers.write_result(tmp_path, {**RESULT, **nothing, "neighboring_relation": None})
  assert writers.read_json(tmp_path / "result.json")["epsilon"] in (None, "inf")


def test_progress_speaks_every_five_seconds_and_at_the_end(monkeypatch, capsys):
  clock = [0.0]
  monkeypatch.setattr(writers.time, "monotonic", lambda: clock[0])
  bar = writers.Progress(100, 10, "train")
  for _ in range(12):  # one update a second
    clock[0] += 1
    bar.update(1, epsilon=0.123456)
  bar.close()
  bar.close()
  assert capsys.readouterr().err.splitlines() == [
    "train: 15/100 1/s epsilon=0.1235",
    "train: 20/100 1/s epsilon=0.1235",
    "train: 22/100 1/s epsilon=0.1235",
  ]


def test_progress_is_a_bar_on_a_terminal(monkeypatch, capsys):
  monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
  with writers.Progress(4, 1, "train") as bar:
    bar.update(3, accuracy=0.5)
  text = capsys.readouterr().err
  assert "4/4" in text and "train" in text and "accuracy=0.5" in text


@pytest.mark.parametrize("columns", [0, 80])
def test_a_terminal_without_a_size_shows_the_bar_at_once(monkeypatch, columns):
  """launch.check on a network was silent for three minutes."""
  ours, theirs = os.openpty()  # of 0 rows, as `script` and `docker run -t` may have
  termios.tcsetwinsize(theirs, (0, columns))
  shown = ""
  with os.fdopen(theirs, "w") as terminal, os.fdopen(ours, "rb", buffering=0) as screen:
    monkeypatch.setattr("sys.stderr", terminal)
    with writers.Progress(2, desc="checks") as bar:
      bar.update(0, now="padding")
      # The kernel passes on what was written a moment later.
      while "now=padding" not in shown and select.select([screen], [], [], 5.0)[0]:
        shown += os.read(ours, 4096).decode(errors="replace")
  assert "checks:   0%" in shown and "now=padding" in shown


def test_a_bar_that_is_switched_off_is_silent(monkeypatch, capsys):
  """With TQDM_DISABLE every launcher ended in a traceback."""
  monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
  monkeypatch.setattr(writers, "tqdm", functools.partial(writers.tqdm, disable=True))
  with writers.Progress(2) as bar:
    bar.update(1, loss=0.5)
    bar.update(0, loss=0.4)
  assert not capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_a_part_is_named_as_it_begins_on_a_terminal_alone(monkeypatch, capsys, terminal):
  monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
  writers.begins("membership-none")
  with writers.Progress(2, desc="checks", lines=False) as bar:
    bar.update(0, now="padding")
    begun = capsys.readouterr().err
    bar.update()
  ended = capsys.readouterr().err
  assert ("membership-none ..." in begun) == ("now=padding" in begun) == terminal
  assert "0/2" in begun if terminal else not begun and not ended


def test_of_several_runs_at_once_none_names_its_parts(monkeypatch, capsys):
  monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
  with writers.silent(), writers.Progress(2, lines=False) as bar:
    writers.begins("a")
    bar.update()
  assert not capsys.readouterr().err


def test_warning_is_one_line(capsys):
  writers.warn("two\n  lines")
  assert capsys.readouterr().err == "warning: two lines\n"


_HOLDER = """
import pathlib, sys, time
from dpjax.experiments.run import writers
with writers.alone_in(pathlib.Path(sys.argv[1])):
  print("held", flush=True)
  time.sleep(60)
"""


@pytest.mark.slow
def test_two_processes_never_work_in_one_folder(tmp_path):
  command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
    assert holder.stdout.readline() == "held\n"
    with refuses("workdir"), writers.alone_in(tmp_path):
      pass
    holder.kill()  # even so the lock is gone
    holder.wait()
  with writers.alone_in(tmp_path):
    (tmp_path / writers.LOCK).unlink()  # as a run that is refused gives its folder back
  with writers.alone_in(tmp_path):
    pass


@pytest.mark.parametrize(
  ("code", "words"),
  [(code, "without locks") for code in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO)]
  + [(code, "another process") for code in (errno.EWOULDBLOCK, errno.EACCES)],
)  # fmt: skip
def test_only_a_lock_that_is_held_is_another_process(code, words, tmp_path, monkeypatch):
  def flock(*_):
    raise OSError(code, os.strerror(code))

  monkeypatch.setattr(writers.fcntl, "flock", flock)
  with pytest.raises(UserError, match=words) as raised, writers.alone_in(tmp_path):
    pass
  assert raised.value.field == "workdir"


def test_a_run_that_is_refused_at_its_first_save_leaves_an_empty_folder(tmp_path):
  config = fed_config.FedConfig()
  folder = tmp_path / "run"
  owner.claim(folder, config)
  left = folder / checkpoint.FOLDER / "training" / ".0.npz.7.tmp"
  left.parent.mkdir(parents=True)
  left.write_bytes(b"secret")
  (folder / checkpoint.FOLDER / "lock").touch()
  with (
    pytest.raises(UserError, match="full"),
    owner.release_if_refused(folder, lambda: True),
  ):
    raise UserError("the disk is full")
  assert [*folder.rglob("*")] == []
  # The same command goes on, and so does a corrected one.
  assert owner.recall_for(folder, config) is None
  assert owner.recall_for(folder, dataclasses.replace(config, seed=7)) is None
  (folder / checkpoint.FOLDER).mkdir()
  (folder / checkpoint.FOLDER / "7.npz").write_bytes(b"another run's")
  with pytest.raises(UserError, match="must be a new, an empty"):
    owner.recall_for(folder, config)


def test_a_workdir_that_is_no_folder_is_one_line(tmp_path):
  link = tmp_path / "link"
  link.symlink_to(tmp_path / "nothing")
  for value, words in (
    ("~/run", "begins with ~"),
    ("~user/run", "begins with ~"),  # made a folder of this name here
    (link, "a link to what is not there"),
    (link / "run", "a link to what is not there"),
    (tmp_path / ("a" * 1000), "File name too long"),
    (tmp_path / os.fsdecode(b"\xc3\xa4\xff"), "UTF-8"),
  ):
    with pytest.raises(UserError, match=words) as raised:
      validate.folder(workdir=value)
    assert raised.value.field == "workdir" and str(raised.value).isprintable()


@pytest.mark.parametrize("room", ["", "checkpoints"])
def test_a_lock_that_is_no_file_is_one_line_and_does_not_hang(room, tmp_path):
  (tmp_path / room).mkdir(exist_ok=True)
  lock = tmp_path / room / writers.LOCK
  for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/null")):
    make(lock)
    refused = pytest.raises(UserError, match="must be a file, not a folder, a pipe")
    with refused, writers.alone_in(tmp_path, room):
      raise AssertionError("was held")
    if lock.is_dir():
      lock.rmdir()
    else:
      lock.unlink()
