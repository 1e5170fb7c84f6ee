"""launch.federate --audit from the command line, and how a run is stopped outside its rounds."""

import functools
import json
import re
import signal

import pytest

from tests import commands

# A config file can hold any code, so it can plant what a patched installation would.
_BROKEN = """
import dataclasses

from configs.fed import quickstart
from dpjax import federated
from dpjax.experiments.config import fields

honest = federated.central
quiet = lambda plan: dataclasses.replace(plan, noise_multiplier=1e-9)
federated.central = lambda plan, key: honest(quiet(plan), key)._replace(plan=plan)


def get_config():
  return fields.replace_all(quickstart.get_config(), {
    "privacy.epsilon": None, "privacy.noise_multiplier": 8.0, "num_rounds": 2,
    "clients_per_round": 100.0, "audit": "canaries", "audit.num_canaries": 90,
    "audit.method": "one_run_fdp",
  })
"""
_QUIET = """
import dataclasses

from configs.fed import quickstart
from dpjax import federated

honest = federated.central
quiet = lambda plan: dataclasses.replace(plan, noise_multiplier=0.01 * plan.noise_multiplier)
federated.central = lambda plan, key: honest(quiet(plan), key)._replace(plan=plan)
get_config = quickstart.get_config
"""
_STOPPED = """
import os
import signal

from configs.fed import quickstart
from dpjax.experiments.kinds.federated import build

load = build.load_data


def stopping(*arguments, **options):
  os.kill(os.getpid(), signal.SIGTERM)
  return load(*arguments, **options)


build.load_data = stopping
get_config = quickstart.get_config
"""
_launch = functools.partial(commands.run, "launch.federate")


def _file(folder, text):
  path = folder / "config.py"
  path.write_text(text)
  return f"--config={path}"


@pytest.mark.slow
def test_a_refuted_claim_exits_with_1_and_one_line_and_again_when_it_is_done(tmp_path):
  arguments = "--audit", _file(tmp_path, _BROKEN), f"--workdir={tmp_path / 'run'}"
  done = _launch(*arguments)
  assert done.returncode == 1, done.stderr
  errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
  assert len(errors) == 1 and "audit: REFUTED: epsilon >= " in errors[0]
  result = json.loads((tmp_path / "run" / "result.json").read_text())
  assert result["epsilon"] < 1.5 < result["epsilon_audited_lower"]
  again = _launch(*arguments)  # the finished run says it again
  assert again.returncode == 1 and "REFUTED" in again.stderr


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_the_defaults_refute_a_hundredth_of_the_noise(tmp_path, seed):
  """50 canaries at delta 1e-3 cannot show a bound above epsilon 4, whatever they guess. But the
  guesses themselves are too unlikely under the claim."""
  where = f"--workdir={tmp_path / 'run'}", f"--config.seed={seed}"
  done = _launch("--audit", _file(tmp_path, _QUIET), *where)
  assert done.returncode == 1, done.stderr
  assert "audit: REFUTED: such guesses have probability <= 0.00" in done.stderr
  sound = _launch("--audit", f"--workdir={tmp_path / 'sound'}", f"--config.seed={seed}")
  assert sound.returncode == 0, sound.stderr
  # Of 50 coins about half include their canary; what perfect scores show follows from how many.
  shown = re.search(r"\(perfect scores would show ([\d.]+)\)", sound.stdout)
  assert 1.3 < float(shown[1]) < 1.9


@pytest.mark.slow
def test_a_mistake_about_canaries_is_one_line_and_exit_code_2(tmp_path):
  done = _launch(
    "--audit",
    f"--workdir={tmp_path / 'run'}",
    "--config.audit.kind=direction",
    "--config.audit.num_canaries=101",
  )
  line = commands.refusal(done)
  assert "audit.num_canaries=101: must be <= 100, the number of clients" in line


@pytest.mark.slow
def test_sigterm_before_the_rounds_is_one_line_and_the_same_command_goes_on(tmp_path):
  """As launch.train: within a round the loop hears it, and before them the launcher. What is
  then printed is a bound, and never that the run is private."""
  arguments = "--audit", f"--workdir={tmp_path / 'run'}", "--config.num_rounds=2"
  done = _launch(_file(tmp_path, _STOPPED), *arguments)
  assert done.returncode == 128 + signal.SIGTERM
  (line,) = done.stderr.strip().splitlines()
  assert "run the same command to go on" in line and str(tmp_path / "run") in line
  done = _launch("--config=configs/fed/quickstart.py", *arguments)
  assert done.returncode == 0, done.stderr
  assert "audit: not refuted: epsilon >= " in done.stdout
  assert "cannot show that a run is private" in done.stdout
  result = json.loads((tmp_path / "run" / "result.json").read_text())
  assert result["epsilon_audited_lower"] <= result["epsilon"]
  assert "part of this run" in result["audit"]["note"]
