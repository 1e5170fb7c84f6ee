"""Gives every launcher thousands of wrong inputs, and looks at how it refuses them.

    python -m tests.wrong_inputs --count=10000 --out=results/wrong_inputs

| inputs        | what is wrong                                                             |
| ------------- | ------------------------------------------------------------------------- |
| `values`      | a text that a command line could hold for a field of a published config: a |
|               | random hostile word, or the field's own value with one mark changed       |
| `data sets`   | an .npz file, or the folder of one, damaged in one way: `wrong_files`      |
| `run folders` | one file of a run's folder, ended or stopped, damaged in one way; or a     |
|               | table of results that launch.plot draws                                   |
| `commands`    | flags of launchers that read no config: `wrong_commands`                  |

A value goes the way of a launcher's override, through the check of its kind of config; files are
read as a run reads them. Allowed are: to be accepted, or to be refused by an error of one line
under 300 characters. wrong_inputs.csv counts both, how many refusals of a value begin with its flag
(others name a field that does not go with it), and what was neither: another error (a traceback
for the user), a longer line, a value that took 10 seconds of processor time or a file that took 30
seconds. Exit code 1 where there was one.
"""

import argparse
import collections
import importlib
import pathlib
import random
import shutil
import sys
import tempfile
import time

from dpjax.experiments.config import choices, fields
from dpjax.experiments.run import kind as kind_lib
from dpjax.experiments.run import report
from dpjax.experiments.run.kind import KINDS
from dpjax.experiments.sweeps import sweep
from dpjax.validate import UserError
from launch import app
from tests import commands, wrong_commands, wrong_files

_ROOT = pathlib.Path(__file__).resolve().parents[1] / "configs"
_LONGEST = 300
_SLOW = 10.0
HOSTILE = (
  "", " ", "none", "None", "nan", "-nan", "inf", "-inf", "0", "-0.0", "-1", "1", "2", "1e-400",
  "1e400", "1e30", "-1e30", "1e-30", "9" * 30, "0x10", "1_000", "1j", "True", "false", "[]",
  "{}", "()", "[[]]", "{[]:1}", "{'a':1}", "{1:2}", "{'': None}", "[1]", "[1,2]", "[0.5, nan]",
  "['a']", "[None]", "[-1]", "1,2", "a", "A b", "../..", "/", "/dev/null", "/dev/zero", "~",
  "*", "%s", "{0}", "$HOME", "\\", "\x00", "\n", "a\nb", "é", "數", "😀", "a" * 400, "[" * 200,
  "lambda: 1", "__import__('os')", "os:system", "builtins:exit", "dpjax:Plan", "json:loads",
  "math:nan", "numpy:zeros", "this", "configs.quickstart", "poisson", "gaussian", "laplace",
)  # fmt: skip


def _checked(name, config):
  """Checks a config of a file, and all runs that the file makes of it where it is a sweep."""
  if isinstance(config, sweep.Sweep):
    module = importlib.import_module(name)
    sweep.Runs(module.get_configs(config), config)
  else:
    kind_lib.check(config)


def published(kind):
  """Returns the configs of one kind in configs/, by name."""
  found = {}
  for path in sorted(_ROOT.rglob("*.py")):
    name = ".".join(path.relative_to(_ROOT.parent).with_suffix("").parts)
    module = importlib.import_module(name)
    config = module.get_config() if hasattr(module, "get_config") else None
    if isinstance(config, kind):
      found[name] = config
  return found


def text_for(value, rng):
  """Returns a text that a command line could hold in place of a value."""
  shown = str(value)
  if rng.random() < 0.6 or not shown:
    return rng.choice(HOSTILE)
  at = rng.randrange(len(shown) + 1)
  mark = rng.choice("0123456789.-+eE,:[]{}()'\" \tnaif_/x")
  return rng.choice((shown[:at] + mark + shown[at:], shown[:at] + shown[at + 1 :]))


def tried(config, name, path, text):
  """Returns "accepted", "named" or "refused" (whether or not the error begins with the flag), or
  what was wrong with the way that it was refused."""
  flag = f"config.{path}"
  begins = []

  def checked():
    try:
      _checked(name, fields.override(config, path, text))
    except UserError as error:
      error = app.as_typed(error, [flag])
      begins.append(str(error).startswith(f"--{flag}"))
      raise error from None

  verdict = judged(checked)
  return "named" if verdict == "refused" and begins == [True] else verdict


def judged(call, slow=_SLOW, clock=time.process_time):
  """Returns the verdict on one call: as of `tried`.

  Args:
    slow: seconds of the clock that are too long.
    clock: by default the processor's, which other work on the machine does not move.
  """
  began = clock()
  try:
    call()
    verdict = "accepted"
  except (UserError, OSError, MemoryError) as error:  # as `launch.app` ends a process
    own = isinstance(error, UserError)
    message = str(error if own else UserError(str(error)))
    verdict = "refused"
    if "\n" in message or len(message) > _LONGEST:
      verdict = f"long: {len(message)} characters: {message[:200]!r}"
  except wrong_files.Hang:
    verdict = "slow: does not end"
  except Exception as error:
    verdict = f"traceback: {type(error).__name__}: {str(error)[:200]!r}"
  seconds = clock() - began
  return f"slow: {seconds:.0f} s" if seconds > slow else verdict


def walk(launcher, count, seed):
  """Tries so many values; returns how often each verdict came."""
  verdicts = collections.Counter()
  if launcher not in KINDS:
    return verdicts
  configs = published(KINDS[launcher].config_class)
  names = sorted(configs)
  rng = random.Random(f"{seed} {launcher}")
  for number in range(count):
    name = names[number % len(names)]
    config = configs[name]
    leaves = [(leaf.path, leaf.value) for leaf in choices.leaves(config)]
    path, value = rng.choice(leaves)
    text = text_for(value, rng)
    verdict = tried(config, name, path, text)
    verdicts[verdict.split(":")[0]] += 1
    verdicts["refused"] += verdict == "named"
    if ":" in verdict:
      print(f"{launcher}: {name} --config.{path}={text!r}: {verdict}", flush=True)
  return verdicts


def walk_data(launcher, count, seed):
  """Reads so many damaged data sets as a run of this launcher would; returns the verdicts."""
  read = wrong_files.readers().get(launcher)
  rng = random.Random(f"{seed} {launcher} data")
  verdicts = collections.Counter()
  if read is None:
    return verdicts
  for _ in range(count):
    with tempfile.TemporaryDirectory() as folder:
      path, word = wrong_files.damaged_data(pathlib.Path(folder) / "data", rng)

      def call(path=path, read=read):
        with wrong_files.in_time():
          read(path)

      verdict = judged(call, wrong_files.SECONDS, time.monotonic)
    verdicts[verdict.split(":")[0]] += 1
    if ":" in verdict:
      print(f"{launcher}: data set with {word} ({path}): {verdict}", flush=True)
  return verdicts


def walk_folders(launcher, count, seed):
  """Goes on with so many damaged folders of a small run; returns the verdicts."""
  go_on = wrong_files.runs().get(launcher)
  if not count or go_on is None:
    return collections.Counter()
  rng = random.Random(f"{seed} {launcher} folders")
  verdicts = collections.Counter()
  with tempfile.TemporaryDirectory() as parent:
    whole = pathlib.Path(parent) / "whole"
    with wrong_files.in_time(600):
      go_on(whole)
    for number in range(count):
      folder = pathlib.Path(parent) / f"{number}"
      word = wrong_files.damaged_folder(whole, folder, rng)

      def call(folder=folder):
        with wrong_files.in_time():
          failed = [row["error"] for row in go_on(folder) if row.get("status") == "failed"]
        if failed:
          raise UserError("; ".join(failed))

      verdict = judged(call, wrong_files.SECONDS, time.monotonic)
      verdicts[verdict.split(":")[0]] += 1
      if ":" in verdict:
        print(f"{launcher}: {word}: {verdict}", flush=True)
      shutil.rmtree(folder, ignore_errors=True)
  return verdicts


def walk_commands(launcher, count, seed):
  """Runs so many commands with one wrong flag; returns the verdicts."""
  rng = random.Random(f"{seed} {launcher} commands")
  verdicts = collections.Counter()
  if not count or launcher not in wrong_commands.SOUND:
    return verdicts
  # JAX's backend does not survive a fork: the run is made by a process of its own.
  with tempfile.TemporaryDirectory() as parent:
    run_folder = pathlib.Path(parent) / "run"
    if "RUN" in " ".join(wrong_commands.SOUND[launcher]):
      commands.run("launch.train", "--config.num_steps=2", f"--workdir={run_folder}")
    for number in range(count):
      words = wrong_commands.changed(launcher, number, rng, text_for)
      verdict = wrong_commands.judged(launcher, words, run_folder)
      verdicts[verdict.split(":")[0]] += 1
      if ":" in verdict:
        print(f"launch.{launcher} {words}: {verdict}", flush=True)
  return verdicts


def main():
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--count", type=int, default=10_000, help="values for each launcher")
  parser.add_argument("--data", type=int, default=1_000, help="damaged data sets for each")
  parser.add_argument(
    "--folders", type=int, default=100, help="damaged run folders for each"
  )
  parser.add_argument(
    "--commands", type=int, default=1_000, help="commands for each without a config"
  )
  every = dict.fromkeys([*wrong_commands.SOUND, *KINDS, *wrong_files.runs()])
  parser.add_argument("--only", default=",".join(every), help="launchers, by commas")
  parser.add_argument("--out", default="", help="folder for wrong_inputs.csv")
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args()
  rows = []
  wrong_commands.load()
  walks = (
    ("commands", walk_commands, options.commands),
    ("values", walk, options.count),
    ("data sets", walk_data, options.data),
    ("run folders", walk_folders, options.folders),
  )
  launchers = options.only.split(",")
  names = ("accepted", "refused", "named", "traceback", "long", "slow")
  # Commands come first: they are forked, which a backend of JAX that has started does not survive.
  for inputs, tour, count in walks:
    for launcher in launchers:
      verdicts = tour(launcher, count, options.seed)
      # A launcher that reads no such input.
      if not verdicts:
        continue
      tried_now = sum(verdicts.values()) - verdicts["named"]
      row = {"launcher": launcher, "inputs": inputs, "tried": tried_now}
      rows.append(row | {name: verdicts[name] for name in names})
      print(rows[-1], flush=True)
      if options.out:
        folder = pathlib.Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        ordered = sorted(rows, key=lambda row: launchers.index(row["launcher"]))
        report.write_csv(folder / "wrong_inputs.csv", ordered)
  return int(any(row["traceback"] + row["long"] + row["slow"] for row in rows))


if __name__ == "__main__":
  sys.exit(main())
