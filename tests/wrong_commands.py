"""Wrong command lines for `tests.wrong_inputs`: flags of launchers that read no config.

Each try is a sound command with one flag changed or added, in a process of its own that is
forked after the imports. A command that is still at work after `SECONDS` of processor time has
accepted its flags.
"""

import dataclasses
import os
import pathlib
import re
import resource
import runpy
import signal
import sys
import tempfile
import time
import traceback

from tests import commands, fork_server

SECONDS = 2  # of processor time of one command
_DEADLINE = 30.0  # of a command that does not work, before it counts as a hang
_LONGEST = 300
# By launcher: sound commands, which the walk takes in turn.
SOUND = {
  "account": (
    "--epsilon=3 --delta=1e-5 --sampling_prob=.01 --num_steps=1000",
    "--noise_multiplier=1.1 --delta=1e-5 --sampling_prob=.01 --num_steps=1000 --tradeoff",
  ),
  "audit": (
    "--only=Laplace --minutes=.1 --out=OUT",
    "--final_model=mnist --models=20 --out=OUT",
  ),
  "check": ("--config=configs/quickstart.py --workdir=OUT",),
  "list": ("models samplers", "attacks"),
  "peers": (
    "--config=configs/quickstart.py --workdir=OUT --coordinator=127.0.0.1:0 --num_processes=1 "
    "--process_id=0 --connect_timeout=2 --peer_timeout=3 --local_devices=0",
  ),
  "plot": (
    "results/mnist_curves/curve.csv --out=OUT/curve.png --size=single --font_size=7",
    "results/radp/test1_mnist/report.csv --x=epoch --y=test_accuracy --group=curve "
    "--out=OUT/accuracy.svg --reference=label:1:.5",
  ),
  # No network in a test: what is not known here is not asked for.
  "prepare": ("--dataset=digits", "--dataset=mnist --data_dir=OUT"),
  "report": ("RUN --workdir=OUT",),
  "serve": ("--run=RUN --port=0 --workdir=OUT --window=100 --weights=1",),
}
# Flags of several processes are those of launch.train.
_MODULES = {"peers": "train"}
_NO_NETWORK = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy")}


@dataclasses.dataclass(frozen=True)
class Ended:
  """How a command ended: None where it was still at work, or hung."""

  code: int | None
  errors: str
  seconds: float
  is_hung: bool = False


def load() -> None:
  """Imports all that a command imports, so that a fork need not."""
  fork_server.import_everything()
  os.environ.update(_NO_NETWORK)


def flag_names(launcher: str) -> list[str]:
  """Returns the flags that the file of a launcher defines, without those of its config."""
  path = commands.ROOT / "launch" / f"{launcher}.py"
  return sorted(set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', path.read_text())))


def changed(launcher: str, number: int, rng, text_for) -> list[str]:
  """Returns the words of a sound command, of which one has another value, or one is new.

  Args:
    number: of the try.
    text_for: (value, rng) -> another text.
  """
  choices = SOUND[launcher]
  words = choices[number % len(choices)].split()
  names = flag_names(launcher)
  if names and rng.random() < 0.5:
    name = rng.choice(names)
    return [*words, f"--{name}={text_for('', rng)}"]
  at = rng.randrange(len(words))
  name, is_flag, value = words[at].partition("=")
  words[at] = f"{name}={text_for(value, rng)}" if is_flag else text_for(name, rng)
  return words


def run(launcher: str, words: list[str], folder: pathlib.Path) -> Ended:
  """Runs a command in a forked process, in the root of the repository."""
  errors = folder / "errors"
  began = time.monotonic()
  pid = os.fork()
  if pid == 0:
    _become(f"launch.{_MODULES.get(launcher, launcher)}", words, errors)
  while True:
    ended, status, used = os.wait4(pid, os.WNOHANG)
    seconds = time.monotonic() - began
    if ended:
      break
    if seconds > _DEADLINE:
      os.killpg(pid, signal.SIGKILL)
      _, status, used = os.wait4(pid, 0)
      # A service listens, and a command that had no processor time yet is not stuck.
      is_hung = used.ru_utime + used.ru_stime < SECONDS / 2
      is_hung &= b"serving at" not in errors.with_suffix(".out").read_bytes()
      return Ended(None, errors.read_text(errors="replace"), seconds, is_hung)
    time.sleep(0.005)
  code = os.waitstatus_to_exitcode(status)
  at_work = code in (-signal.SIGXCPU, -signal.SIGKILL)
  text = errors.read_text(errors="replace")
  return Ended(None if at_work else code, text, seconds)


def _become(module: str, words: list[str], errors: pathlib.Path) -> None:
  os.setsid()
  resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  for number, path, how in (
    (0, os.devnull, os.O_RDONLY),
    (1, errors.with_suffix(".out"), os.O_CREAT | os.O_WRONLY | os.O_APPEND),
    (2, errors, os.O_CREAT | os.O_WRONLY | os.O_APPEND),
  ):
    os.dup2(os.open(path, how, 0o600), number)
  os.chdir(commands.ROOT)
  sys.argv = [module, *words]
  try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
  except SystemExit as end:
    os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
  except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(70)
  os._exit(0)


def verdict(ended: Ended) -> str:
  """Returns "accepted", "refused", or what was wrong with the way that it was refused."""
  lines = ended.errors.strip().splitlines()
  last = lines[-1] if lines else ""
  if ended.is_hung:
    return "slow: does not end"
  if ended.code in (0, None):
    return "accepted"
  if ended.code not in (1, 2) or "Traceback" in ended.errors:
    return f"traceback: exit code {ended.code}: {last[:200]!r}"
  refusals = [line for line in lines if not line.startswith(("warning:", "note:"))]
  if len(refusals) != 1 or len(refusals[0]) > _LONGEST:
    return f"long: {len(lines)} lines, the last of {len(last)} characters: {last[:200]!r}"
  return "refused"


def judged(launcher: str, words: list[str], run_folder: pathlib.Path) -> str:
  """Returns the verdict on a command; its words may name OUT and RUN.

  Args:
    run_folder: of a finished run of launch.train, for RUN.
  """
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary)
    (folder / "out").mkdir()
    named = {"OUT": str(folder / "out"), "RUN": str(run_folder)}
    filled = [re.sub("OUT|RUN", lambda match: named[match[0]], word) for word in words]
    try:
      return verdict(run(launcher, filled, folder))
    # A word with a zero byte is refused by the system, before any program reads it.
    except ValueError:
      return "refused"
