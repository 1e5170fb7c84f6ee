"""Stops launchers at random moments, runs the same command again, and compares what they wrote.

    python -m tests.kills --kills=100 --out=results/kills
    python -m tests.kills --processes=4 --only=train,federate --kills=8 --out=results/kills
    unshare -rm python -m tests.kills --full_disks --kills=20 --out=results/kills

Each launcher runs once to its end. Then it is stopped at moments that are spread over that time,
and started again, until its stops are used up. A third of the runs are stopped twice. A moment
that comes after the end has a row as well, and does not count as a stop. A stop is one of

  - a kill (SIGKILL) of the process and its workers: kills.csv;
  - with --processes, a kill of one of several processes, drawn at random. Each of the others must
    end by itself, with an error that names it as the last line: processes.csv;
  - with --full_disks, a disk that is full from that moment on, until the run ends: full_disks.csv.
    The run must say one line about its folder, beside what it says without a stop, and end with
    code 1. The disk is a tmpfs, which `unshare -rm` allows to mount.

Every file that a finished run leaves must be equal to that of the run without a stop, but for
times and places. The files have a row for each moment. Exit code 1 where one differs.

Each command is forked from one process that has imported all of dpjax: a fresh interpreter
would spend most of its life on imports, and be killed there.
"""

import argparse
import contextlib
import csv
import functools
import io
import json
import math
import os
import pathlib
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from dpjax.experiments.run import report
from tests import commands, fork_server
from tests.federated import programs

# A run without a noise_seed draws keys of its own, so no other run is equal to it.
_REPEATED = "--config.noise_seed=7"
# Small enough for a hundred runs, long enough to be killed in each of their stages.
COMMANDS = {
  "train": ["--config=configs/quickstart.py", "--config.checkpoint_every=40", _REPEATED],
  "federate": [
    "--config=configs/fed/quickstart.py",
    "--config.checkpoint_every=5",
    _REPEATED,
  ],
  "pate": ["--config=configs/pate/quickstart.py", "--config.eval_every=5", _REPEATED],
  "distill": [
    "--config=configs/distillation/quickstart.py",
    "--config.epochs=8",
    "--config.eval_every=5",
    _REPEATED,
  ],
  "synthesize": [
    "--config=configs/synthesis/quickstart.py",
    "--config.method.num_steps=60",
    "--config.method.num_frequencies=200",
    "--config.num_samples=200",
    _REPEATED,
  ],
  "sweep": [
    "--config=configs/sweeps/quickstart.py",
    "--config.seeds=[0]",
    "--config.base.num_steps=60",
    "--config.base.noise_seed=7",
  ],
  "secure": ["--config=configs/secure/quickstart.py"],
  "relevance": [
    "--config=configs/radp/quickstart.py",
    "--config.num_epochs=3",
    "--config.data.limit=600",
    _REPEATED,
  ],
  "attack": [
    "--config=configs/attack/quickstart.py",
    "--only=d* none",
  ],
}
# What may differ: times, where the run stood, and the list of its starts.
_TIMES = ("seconds", "took", "milliseconds", "started", "starts", "speed")
# Digests of files with times in them.
_DIGESTS = ("files", "files_sha256", "run_sha256")
# Of a recipe: points between rows, which a run of more than a minute gets.
_OF_LONG_RUNS = ("curves",)
# Ciphertexts and shares take their randomness from the operating system: sizes and errors
# differ, and what was computed differs by as much.
_OF_CIPHERTEXTS = ("bytes", "error", "found", "params_sha256")
_CLOSE = 0.05
_NO_CONTENT = {".png", ".pdf", ".svg", ".lock"}
_SECRET = "checkpoints"
# Of the disk that fills up: what the largest of these runs needs, several times.
_MEGABYTES = 64
# Seconds after which a run that was stopped does hang.
_PATIENCE = 600.0


class Stop(NamedTuple):
  """How runs are stopped.

  Attributes:
    name: of the file with its rows.
    processes: of each run.
    disk: folder of the small file system that fills up; None: a process is killed.
  """

  name: str
  processes: int = 1
  disk: pathlib.Path | None = None

  def act(self, victim: int, codes: dict[int, int | None]) -> None:
    """Stops a run, of which one process was drawn, or does nothing if it has ended."""
    if self.disk is not None:
      _fill(self.disk / "ballast")
      return
    pid = list(codes)[victim]
    if codes[pid] is None:
      # Its workers as well: the machine fails as a whole.
      os.killpg(pid, signal.SIGKILL)

  def mend(self) -> None:
    """Makes room again."""
    if self.disk is not None:
      (self.disk / "ballast").unlink(missing_ok=True)

  def met(self, victim: int, codes: list[int]) -> bool:
    """Returns whether a run was stopped, from its exit codes."""
    return codes[victim] == -signal.SIGKILL if self.disk is None else codes != [0]

  def end(
    self, victim: int, codes: list[int], logs: list[pathlib.Path], usual: set[str]
  ) -> tuple[str, list[str]]:
    """Returns the last line of a run that was stopped, and what is wrong with its end.

    Args:
      usual: what such a run says without a stop (`_shape`).
    """
    if self.disk is not None:
      unusual = [line for line in _lines(logs[0]) if _shape(line) not in usual]
      said = unusual[-1] if unusual else ""
      right = said.startswith("error: ") and str(self.disk) in said and len(unusual) == 1
      wrong = [] if codes == [1] and right else [f"ends with {codes} and {unusual}"]
      return said, wrong
    said, wrong = "", []
    for index, (code, log) in enumerate(zip(codes, logs)):
      if index != victim and code != 0:
        said = _last_words(log)
        if not said.startswith(f"error: process {index} of {len(codes)}: "):
          wrong.append(f"process {index} ends with {code} and {said!r}")
    return said, wrong


def _fill(path: pathlib.Path) -> None:
  """Leaves no byte free on the file system of a file, which grows."""
  with path.open("ab", buffering=0) as file:
    for size in (1 << 20, 1 << 12, 1):
      with contextlib.suppress(OSError):
        while True:
          file.write(bytes(size))


def _lines(log: pathlib.Path) -> list[str]:
  # A bar of progress writes over its own line.
  text = log.read_text().replace("\r", "\n")
  return [line for line in text.splitlines() if line.strip()]


def _shape(line: str) -> str:
  """Returns a line without numbers and bars of progress."""
  return re.sub(r"\b(inf|nan)\b|[\d\W_]+", " ", line).strip()


def _last_words(log: pathlib.Path) -> str:
  """Returns the last line of a process, which a child of it may say after its end."""
  for _ in range(600):
    lines = _lines(log)
    if lines and lines[-1].startswith("error: "):
      break
    time.sleep(0.1)
  return lines[-1] if lines else ""


def _fork(module: str, arguments: list[str], log: pathlib.Path) -> int:
  pid = os.fork()
  if pid:
    return pid
  os.setsid()
  for number, path, how in (
    (0, os.devnull, os.O_RDONLY),
    (1, log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND),
    (2, log, os.O_CREAT | os.O_WRONLY | os.O_APPEND),
  ):
    os.dup2(os.open(path, how, 0o600), number)
  sys.argv = [module, *arguments]
  try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
  except SystemExit as end:
    os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
  except BaseException as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    os._exit(70)
  os._exit(0)


def _together(name: str, processes: int) -> list[list[str]]:
  """Returns what each process of a run has on its command line beside the others."""
  if processes == 1:
    return [[]]
  shared = [
    f"--coordinator=127.0.0.1:{programs.free_port()}",
    f"--num_processes={processes}",
    *([f"--config.mesh=data:{processes}"] if name == "train" else []),
  ]
  return [[*shared, f"--process_id={index}"] for index in range(processes)]


def run(
  name: str,
  workdir: pathlib.Path,
  logs: list[pathlib.Path],
  after: float = math.inf,
  act: Callable[[dict[int, int | None]], None] = lambda codes: None,
) -> list[int]:
  """Runs a launcher's command in a folder, as one process for each log.

  Args:
    name: of the launcher, one of COMMANDS.
    workdir: of the run.
    logs: files for what each process says.
    after: seconds after which `act` is called, again and again, with the exit codes by process;
      None for those that have not ended.

  Returns:
    The exit codes.
  """
  codes: dict[int, int | None] = {}
  for log, options in zip(logs, _together(name, len(logs))):
    arguments = [f"--workdir={workdir}", *COMMANDS[name], *options]
    codes[_fork(f"launch.{name}", arguments, log)] = None
  began = time.monotonic()
  while None in codes.values():
    for pid in [pid for pid, code in codes.items() if code is None]:
      done, status = os.waitpid(pid, os.WNOHANG)
      if done:
        codes[pid] = os.waitstatus_to_exitcode(status)
      elif time.monotonic() - began > after + _PATIENCE:
        os.killpg(pid, signal.SIGKILL)
    if time.monotonic() - began > after:
      act(codes)
    time.sleep(0.002)
  return [code for code in codes.values() if code is not None]


def contents(name: str, workdir: pathlib.Path) -> dict[str, object]:
  """Returns what the files of a finished run of a launcher hold, without times and places."""
  ignored = (*_TIMES, *(_OF_CIPHERTEXTS if name == "secure" else ()))
  found: dict[str, object] = {}
  for path in sorted(workdir.rglob("*")):
    place = str(path.relative_to(workdir))
    if path.is_dir() or path.suffix in _NO_CONTENT or _SECRET in place:
      continue
    if "tensorboard" in place:
      continue
    found[place] = _content(path, str(workdir), ignored)
  return found


def _content(path: pathlib.Path, workdir: str, ignored: tuple[str, ...]) -> object:
  if path.suffix == ".npz":
    with np.load(path) as arrays:
      return dict(arrays.items())
  text = path.read_bytes()
  if path.name.endswith(".picture.json"):
    ignored = (*ignored, *_OF_LONG_RUNS)
  if path.suffix == ".json":
    return _timeless(json.loads(text), workdir, ignored)
  if path.suffix == ".jsonl":
    return [_timeless(json.loads(line), workdir, ignored) for line in text.splitlines()]
  if path.suffix == ".csv":
    rows = csv.DictReader(io.StringIO(text.decode()))
    return [_timeless(dict(row), workdir, ignored) for row in rows]
  return None  # words with times in them: that the file is there is what counts


def _timeless(value: object, workdir: str, ignored: tuple[str, ...]) -> object:
  if isinstance(value, dict):
    return {
      key: _timeless(item, workdir, ignored)
      for key, item in value.items()
      if key not in _DIGESTS and not any(word in key for word in ignored)
    }
  if isinstance(value, list):
    return [_timeless(item, workdir, ignored) for item in value]
  return value.replace(workdir, "WORKDIR") if isinstance(value, str) else value


def differences(name: str, known: dict[str, object], found: dict[str, object]) -> list[str]:
  """Returns the names of files that are missing, new or different; of JSON also the keys."""
  wrong = []
  for place in sorted(known.keys() | found.keys()):
    one, other = known.get(place), found.get(place)
    if isinstance(one, dict) and isinstance(other, dict):
      keys = sorted(one.keys() | other.keys())
      pairs = [(key, one.get(key), other.get(key)) for key in keys]
      wrong += [f"{place}:{key}" for key, a, b in pairs if not _equal(name, a, b)]
    elif one != other:
      wrong.append(place)
  return wrong


def _equal(name: str, one: object, other: object) -> bool:
  if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
    return one == other
  if one.dtype != other.dtype or one.shape != other.shape:
    return False
  if name == "secure" and one.dtype.kind == "f":
    return bool(np.allclose(one, other, atol=_CLOSE))
  return one.tobytes() == other.tobytes()


def walk(
  name: str, stops: int, stop: Stop, folder: pathlib.Path, rng: random.Random
) -> list[dict]:
  """Stops one launcher so many times; returns a row for each moment."""
  logs = [folder / f"{name}-{index}.log" for index in range(stop.processes)]
  whole = folder / f"{name}-whole"
  began = time.monotonic()
  codes = run(name, whole, logs)
  length = time.monotonic() - began
  if any(codes):
    raise SystemExit(f"launch.{name} ends with {codes}: {logs[0].read_text()}")
  known = contents(name, whole)
  usual = {_shape(line) for log in logs for line in _lines(log)}
  rows: list[dict] = []
  met = 0
  while met < stops:
    workdir = (stop.disk or folder) / f"{name}-{len(rows)}"
    wanted = min(2 if rng.random() < 1 / 3 else 1, stops - met)
    moments = [round(rng.uniform(0.02, 1.0) * length, 3) for _ in range(wanted)]
    attempts, wrong = [], []
    for moment in moments:
      victim = rng.randrange(stop.processes)
      codes = run(name, workdir, logs, moment, functools.partial(stop.act, victim))
      stop.mend()
      attempts.append((moment, stop.met(victim, codes), ""))
      if stop.met(victim, codes):
        said, faults = stop.end(victim, codes, logs, usual)
        attempts[-1] = (moment, True, said.replace(str(workdir), "WORKDIR"))
        wrong += faults
    met += sum(was_met for _, was_met, _ in attempts)
    if not attempts[0][1]:
      # Files that were warm, or a quieter machine: later moments are drawn from this time.
      length = moments[0]
    codes = run(name, workdir, logs)
    wrong += (
      [f"exit codes {codes}"]
      if any(codes)
      else differences(name, known, contents(name, workdir))
    )
    shutil.rmtree(workdir)
    for moment, was_met, said in attempts:
      rows.append(
        {
          "launcher": name,
          "processes": stop.processes,
          "seconds": moment,
          "of": round(length, 1),
          "stopped": was_met,
          "equal": not wrong,
          "differs": " ".join(wrong),
          "said": said,
        }
      )
    print(f"{name}: {met} of {stops}, {wrong or 'equal'}", flush=True)
  return rows


@contextlib.contextmanager
def small_disk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Mounts a small file system for the block."""
  folder.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", f"size={_MEGABYTES}m", "none", str(folder)]
  if subprocess.run(mount).returncode:
    raise SystemExit(
      "--full_disks: needs a file system of its own; begin with `unshare -rm`"
    )
  try:
    yield folder
  finally:
    subprocess.run(["umount", str(folder)], check=True)


def main() -> int:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--kills", type=int, default=100, help="how many stops")
  parser.add_argument("--only", default=",".join(COMMANDS), help="launchers, by commas")
  parser.add_argument("--processes", type=int, default=1, help="of each run")
  parser.add_argument("--full_disks", action="store_true", help="in place of kills")
  parser.add_argument("--out", default="", help="folder for the rows")
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args()
  names = options.only.split(",")
  os.chdir(commands.ROOT)
  fork_server.import_everything()
  rows = []
  with contextlib.ExitStack() as held:
    folder = pathlib.Path(held.enter_context(tempfile.TemporaryDirectory()))
    stop = Stop("kills" if options.processes == 1 else "processes", options.processes)
    if options.full_disks:
      stop = Stop("full_disks", disk=held.enter_context(small_disk(folder / "disk")))
    for index, name in enumerate(names):
      share = options.kills // len(names) + (index < options.kills % len(names))
      rows += walk(name, share, stop, folder, random.Random(f"{options.seed} {name}"))
      if options.out:
        out = pathlib.Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        report.write_csv(out / f"{stop.name}.csv", rows)
  met = sum(row["stopped"] for row in rows)
  equal = sum(row["equal"] for row in rows)
  print(f"{met} stops met a run, {len(rows) - met} came after it; {equal} rows equal")
  return int(equal < len(rows))


if __name__ == "__main__":
  sys.exit(main())
