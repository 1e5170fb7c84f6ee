"""Rows of metrics for a function of one's own, W&B and MLflow; errors of theirs cost no run."""

import json
import sys
import types

import pytest

from configs import quickstart
from configs.fed import quickstart as fed_quickstart
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.run import loop, row_hooks, workdir, writers
from tests.refuses import refuses
from tests.runs import stops

_ROWS = []


def log(step, row):
  """Keeps rows, and spoils its own copy."""
  _ROWS.append((step, dict(row)))
  row.clear()


def broken(step, row):
  """Fails at the second row."""
  log(step, row)
  if len(_ROWS) == 2:
    raise SystemExit("no\nnetwork")


def of_one_argument(step):
  """Cannot be called with a row."""


@pytest.fixture(autouse=True)
def _empty():
  _ROWS.clear()


def _config(**changes):
  small = {
    "num_steps": 4, "eval_every": 1, "checkpoint_every": 2, "data.limit": 60,
    "model.name": "linear", "model.options": {}, "privacy.epsilon": None,
    "privacy.noise_multiplier": 2.0, "grad_method": "vmap",
  }  # fmt: skip
  return fields.replace_all(fields.replace_all(quickstart.get_config(), small), changes)


def _written(folder):
  return [
    (row.pop("step"), row) for row in writers.read_metrics(folder)
  ]  # fmt: skip


def _same(ours, written):
  # NaN is null in the file, so both are compared as texts.
  as_text = lambda rows: [json.dumps(writers.plain(row)) for row in rows]
  return as_text(ours) == as_text(written)


@pytest.mark.cases(slow=["True"], long=...)
@pytest.mark.parametrize("release", [False, True])
def test_a_function_gets_the_rows_of_the_file_and_nothing_else(release, tmp_path):
  config = _config(writer=f"{__name__}:log", release=release)
  loop.train(config, tmp_path)
  assert len(_ROWS) == 4 and _same(_ROWS, _written(tmp_path))
  # Nothing that a release must not hold: no time, no machine, no number of raw examples.
  names = {name for _, row in _ROWS for name in row}
  assert not release or not [
    name for name in names if "not_private" in name or "time" in name
  ]


@pytest.mark.slow
def test_rows_since_the_checkpoint_come_again_after_a_resume(tmp_path, monkeypatch):
  config = _config(writer=f"{__name__}:log")
  stops.stop_after(monkeypatch, 3, stops.die)
  with pytest.raises(KeyboardInterrupt):
    loop.train(config, tmp_path)
  before = [step for step, _ in _ROWS]
  loop.train(config, tmp_path)
  steps = [step for step, _ in _ROWS]
  assert steps[: len(before)] == before and steps[len(before) :] == [3, 4]
  assert _same(_ROWS[-2:], _written(tmp_path)[-2:])


@pytest.mark.slow
def test_an_error_of_a_hook_is_one_warning_and_no_end(tmp_path, capsys):
  result = loop.train(_config(writer=f"{__name__}:broken"), tmp_path)
  assert result["num_steps"] == 4 and len(_written(tmp_path)) == 4
  assert len(_ROWS) == 2
  lines = [line for line in capsys.readouterr().err.splitlines() if "broken" in line]
  assert len(lines) == 1 and "SystemExit: no network" in lines[0]
  assert "the run goes on" in lines[0]


class _Service(types.ModuleType):
  """Records the calls of a service's package."""

  def __init__(self, name, fails=""):
    super().__init__(name)
    self.calls = []
    self.fails = fails

  def __getattr__(self, name):
    if name.startswith("__"):
      raise AttributeError(name)

    def call(*args, **named):
      self.calls.append((name, args, named))
      if name == self.fails:
        raise OSError("offline")
      return self

    return call


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_services_get_config_rows_and_an_end(name, tmp_path, monkeypatch):
  service = _Service(name)
  monkeypatch.setitem(sys.modules, name, service)
  hook = row_hooks.of_run(_config(writer=name, seed=7), tmp_path / "mine")
  hook(3, {"test_accuracy": 0.5})
  hook.close()
  hook.close()
  words = repr(service.calls)
  assert "mine" in words and "'test_accuracy': 0.5" in words and "'step': 3" in words
  assert service.calls[-1][0] in ("finish", "end_run")
  assert [call for call, _, _ in service.calls].count(service.calls[-1][0]) == 1
  # Whoever holds the data and the seed could compute the noise.
  assert "noise_multiplier" in words and "'seed'" not in words


def test_a_service_that_cannot_begin_costs_no_run(tmp_path, monkeypatch, capsys):
  service = _Service("wandb", fails="init")
  monkeypatch.setitem(sys.modules, "wandb", service)
  hook = row_hooks.of_run(_config(writer="wandb"), tmp_path)
  hook(1, {"test_accuracy": 0.5})
  hook.close()
  assert [name for name, _, _ in service.calls] == ["init"]
  assert capsys.readouterr().err.count("offline") == 1


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"writer": "wandb"}, "writer"),
    (
      {"writer": "wandbb"},
      "writer",
    ),
    (
      {"writer": "mlflow", "release": True, "diagnostics": False},
      "writer",
    ),
    ({"writer": f"{__name__}:nothing"}, "writer"),
    ({"writer": f"{__name__}:of_one_argument"}, "writer"),
  ],
)
def test_a_writer_that_cannot_be_used_is_one_line(changes, field, monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  with refuses(field) as refused:
    build.Central(_config(**changes)).check()
  assert str(refused.value).startswith("writer=") and "\n" not in str(refused.value)


def test_another_hook_is_the_same_run():
  hooks = (None, "wandb", "mlflow", f"{__name__}:log")
  assert len({workdir.config_digest(_config(writer=writer)) for writer in hooks}) == 1


@pytest.mark.long
def test_rounds_are_handed_on_too(tmp_path):
  config = fields.replace_all(
    fed_quickstart.get_config(),
    {
      "writer": f"{__name__}:log", "num_rounds": 2, "eval_every": 1, "data.limit": 100,
      "partition.num_clients": 10, "clients_per_round": 4.0, "privacy.epsilon": None,
      "privacy.noise_multiplier": 1.0,
    },
  )  # fmt: skip
  loop.train(config, tmp_path)
  assert [step for step, _ in _ROWS] == [1, 2] and _same(_ROWS, _written(tmp_path))
