"""Kills launchers at random moments, runs the same command again, and compares what they wrote.

    python -m tests.kills --kills=100 --out=results/kills

Each launcher runs once to its end. Then it is killed (SIGKILL) at moments that are spread over
that time, and started again, until its kills are used up. A third of the runs are killed twice.
A moment that comes after the end has a row as well, and does not count as a kill.
Every file that a finished run leaves must be equal to that of the run without a kill, but for
times and places. kills.csv has a row for each kill. Exit code 1 where one differs.

Each command is forked from one process that has imported all of dpjax: a fresh interpreter
would spend most of its life on imports, and be killed there.
"""

import argparse
import csv
import io
import json
import os
import pathlib
import random
import runpy
import signal
import sys
import tempfile
import time

import numpy as np

from dpjax.experiments.run import report
from tests import commands, fork_server

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


def _fork(module: str, arguments: list[str], log: pathlib.Path) -> int:
  pid = os.fork()
  if pid:
    return pid
  os.setsid()
  for number, path, how in (
    (0, os.devnull, os.O_RDONLY),
    (1, log, os.O_CREAT | os.O_WRONLY | os.O_APPEND),
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


def run(name: str, workdir: pathlib.Path, kill_after: float | None = None) -> int | None:
  """Runs a launcher's command in a folder.

  Args:
    name: of the launcher, one of COMMANDS.
    workdir: of the run.
    kill_after: seconds, or None for a run that is left alone.

  Returns:
    The exit code, or None where the run was killed.
  """
  log = workdir.with_suffix(".log")
  arguments = [f"--workdir={workdir}", *COMMANDS[name]]
  pid = _fork(f"launch.{name}", arguments, log)
  began = time.monotonic()
  while True:
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
      return os.waitstatus_to_exitcode(status)
    if kill_after is not None and time.monotonic() - began > kill_after:
      # Its workers as well: the machine fails as a whole.
      os.killpg(pid, signal.SIGKILL)
      os.waitpid(pid, 0)
      return None
    time.sleep(0.002)


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


def walk(name: str, kills: int, folder: pathlib.Path, rng: random.Random) -> list[dict]:
  """Kills one launcher so many times; returns a row for each kill."""
  whole = folder / f"{name}-whole"
  began = time.monotonic()
  code = run(name, whole)
  length = time.monotonic() - began
  if code != 0:
    raise SystemExit(
      f"launch.{name} ends with {code}: {whole.with_suffix('.log').read_text()}"
    )
  known = contents(name, whole)
  rows: list[dict] = []
  met = 0
  while met < kills:
    workdir = folder / f"{name}-{len(rows)}"
    wanted = min(2 if rng.random() < 1 / 3 else 1, kills - met)
    moments = [round(rng.uniform(0.02, 1.0) * length, 3) for _ in range(wanted)]
    killed = [run(name, workdir, kill_after=moment) is None for moment in moments]
    met += sum(killed)
    if not killed[0]:
      # Files that were warm, or a quieter machine: later moments are drawn from this time.
      length = moments[0]
    code = run(name, workdir)
    wrong = (
      differences(name, known, contents(name, workdir))
      if code == 0
      else [f"exit code {code}"]
    )
    for moment, alive in zip(moments, killed):
      rows.append(
        {
          "launcher": name,
          "seconds": moment,
          "of": round(length, 1),
          "killed": alive,
          "equal": not wrong,
          "differs": " ".join(wrong),
        }
      )
    print(f"{name}: {met} of {kills}, {wrong or 'equal'}", flush=True)
  return rows


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--kills", type=int, default=100)
  parser.add_argument("--only", default=",".join(COMMANDS), help="launchers, by commas")
  parser.add_argument("--out", default="", help="folder for kills.csv")
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args()
  names = options.only.split(",")
  os.chdir(commands.ROOT)
  fork_server.import_everything()
  rows = []
  with tempfile.TemporaryDirectory() as temporary:
    for index, name in enumerate(names):
      share = options.kills // len(names) + (index < options.kills % len(names))
      rng = random.Random(f"{options.seed} {name}")
      rows += walk(name, share, pathlib.Path(temporary), rng)
      if options.out:
        out = pathlib.Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        report.write_csv(out / "kills.csv", rows)
  killed = sum(row["killed"] for row in rows)
  equal = sum(row["equal"] for row in rows)
  print(f"{killed} kills met a run, {len(rows) - killed} came after it; {equal} rows equal")
  return int(equal < len(rows))


if __name__ == "__main__":
  sys.exit(main())
