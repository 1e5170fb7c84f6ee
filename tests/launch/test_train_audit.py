"""launch.train --audit and release mode from the command line."""

import json

import pytest

from dpjax.sampling.registry import used_for
from tests import commands

# A config file can hold any code, so it can plant what a patched installation would.
_BROKEN = """
import dataclasses

from configs import quickstart
from dpjax.experiments.config import fields
from dpjax.plan import Plan

grad, transform, batches = Plan.clipped_grad, Plan.transform, Plan.batches
loose = lambda plan: dataclasses.replace(plan, l2_clip_norm=1e6, noise_multiplier=1e-9)
Plan.clipped_grad = lambda plan, loss_fn, **options: grad(loose(plan), loss_fn, **options)
Plan.transform = lambda plan, key: transform(loose(plan), key)
# A transform takes the batches of its own plan alone.
Plan.batches = lambda plan, *args, **options: batches(loose(plan), *args, **options)


def get_config():
  config = quickstart.get_config()
  return fields.replace_all(config, {
    "privacy.epsilon": 0.5, "privacy.sampling_prob": 1.0, "num_steps": 60,
    "eval_every": 60, "model.options": {"features": (128,)}, "optimizer.rule": "adam",
    "optimizer.learning_rate": 0.01, "data.limit": 240, "audit": "canaries",
    "audit.num_canaries": 200,
  })
"""


def _launch(*arguments):
  return commands.run("launch.train", *arguments)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
  folder = tmp_path_factory.mktemp("broken")
  (folder / "config.py").write_text(_BROKEN)
  return (
    "--audit",
    f"--config={folder / 'config.py'}",
    f"--workdir={folder / 'run'}",
  ), folder / "run"


@pytest.mark.slow
def test_a_refuted_claim_exits_with_1_and_one_line(broken):
  arguments, workdir = broken
  done = _launch(*arguments)
  assert done.returncode == 1, done.stderr
  errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
  assert len(errors) == 1 and "audit: REFUTED: epsilon >= " in errors[0]
  result = json.loads((workdir / "result.json").read_text())
  assert result["epsilon"] <= 0.5 < result["epsilon_audited_lower"]
  again = _launch(*arguments)  # the finished run says it again
  assert again.returncode == 1 and "REFUTED" in again.stderr


@pytest.mark.slow
def test_a_sound_run_prints_its_bound_and_never_the_word_passed(tmp_path):
  done = _launch(
    "--audit", f"--workdir={tmp_path / 'run'}", "--config.num_steps=10",
    "--config.audit.num_canaries=300", "--config.model.name=linear",
    "--config.model.options={}",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert "audit: not refuted: epsilon >= " in done.stdout
  assert "cannot show that a run is private" in done.stdout
  result = json.loads((tmp_path / "run" / "result.json").read_text())
  assert result["epsilon_audited_lower"] <= result["epsilon"]
  assert "part of the training data" in result["audit"]["note"]


_RELATIONS = ("add_or_remove_one", "replace_one", "replace_special")


def _samplers():
  """Every sampler that a config names, under each relation that somebody proves it for."""
  kinds = [("dp_sgd", "privacy.sampler", name) for name in used_for("examples")]
  kinds += [("dp_ftrl", "privacy.sampler", name) for name in used_for("correlated noise")]
  for method, field, name in kinds:
    for relation in _RELATIONS:
      given = {"privacy": method, field: name}
      given |= {"privacy.neighboring_relation": relation}
      if name == "k_out_of_t":
        given |= {"privacy.sampler.num_selected": 2}
      yield pytest.param(given, id=f"{method}-{name}-{relation}")


@pytest.mark.long
@pytest.mark.parametrize("given", _samplers())
def test_every_sampler_is_audited_or_refused_in_one_line(given, tmp_path):
  """Canaries go in and out as the relation says; a bound comes out, below the claim."""
  small = {"num_steps": 6, "eval_every": 6, "data.limit": 300, "model.name": "linear"}
  small |= {"model.options": "{}", "audit.num_canaries": 100, "privacy.epsilon": "none"}
  small |= {"privacy.noise_multiplier": 2.0, **given}
  flags = [f"--config.{path}={value}" for path, value in small.items()]
  done = _launch("--audit", f"--workdir={tmp_path / 'run'}", *flags)
  if done.returncode == 2:
    (line,) = done.stderr.strip().splitlines()
    # A sampler of users needs texts by user, which digits are not.
    words = (
      "neighboring_relation",
      "no event",
      "must not be 'users' for data.name='digits'",
    )
    assert any(word in line for word in words), line
    return
  assert done.returncode == 0, done.stderr
  result = json.loads((tmp_path / "run" / "result.json").read_text())
  epsilon = result["epsilon"] if result["epsilon"] is not None else float("inf")
  assert 0 <= result["epsilon_audited_lower"] <= epsilon
  assert ("audit: not refuted" in done.stdout) or result["epsilon"] is None
