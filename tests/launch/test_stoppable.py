"""What a user sees who stops a run outside of its trainings."""

import contextlib
import json
import signal
import sys
import time

import pytest

from dpjax.experiments.kinds.central.config import DataConfig, ModelConfig
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.run import loop, writers
from dpjax.relevance import feature_shares
from launch import app
from tests.runs.stops import sigterm

_CONFIG = RelevanceConfig(
  data=DataConfig(name="digits", limit=120),
  model=ModelConfig(name="linear"), num_epochs=2, batch_size=40, epsilon=4.0,
  noise_seed=0,
)  # fmt: skip


def _stopped(workdir, capsys):
  with pytest.raises(SystemExit) as end, app.stoppable(str(workdir)):
    loop.train(_CONFIG, workdir)
  lines = [line for line in capsys.readouterr().err.splitlines() if "stopped" in line]
  return end.value.code, lines


@pytest.mark.slow
def test_between_two_trainings_sigterm_is_one_line_and_the_same_command_goes_on(
  tmp_path, capsys, monkeypatch
):
  shares = feature_shares.mean_shares

  def stopping(*args, **kwargs):
    monkeypatch.setattr(feature_shares, "mean_shares", shares)
    sigterm()
    return shares(*args, **kwargs)

  monkeypatch.setattr(feature_shares, "mean_shares", stopping)
  before = signal.getsignal(signal.SIGTERM)
  code, (line,) = _stopped(tmp_path / "run", capsys)
  assert code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) is before
  assert "between" in line and "run the same command to go on" in line
  assert str(tmp_path / "run") in line
  assert not (tmp_path / "run" / writers.RESULT).exists()
  trained, fit = [], loop.Running.charge
  monkeypatch.setattr(
    loop.Running, "charge", lambda r: trained.append(r.phase.subfolder) or fit(r)
  )
  row = loop.train(_CONFIG, tmp_path / "run")
  assert set(trained) == {"model_2"}  # model 1 was saved
  whole = loop.train(_CONFIG, tmp_path / "whole")
  assert row["params_sha256"] == whole["params_sha256"]
  assert json.loads((tmp_path / "run" / writers.RESULT).read_text())["epsilon"] == 4.0


def test_control_c_ends_with_its_own_code(tmp_path, capsys):
  with pytest.raises(SystemExit) as end, app.stoppable(str(tmp_path)):
    raise KeyboardInterrupt
  assert end.value.code == 128 + signal.SIGINT
  assert "go on" in capsys.readouterr().err


def _last_step():
  """A signal in the last step of a training: the training is whole, what follows it is not."""
  with loop.signals() as received:
    sigterm()
  assert received == [signal.SIGTERM]


def _destructor():
  """Python prints and drops an exception of a destructor."""

  class Ends:
    def __del__(self):
      sigterm()

  Ends()
  time.sleep(20)


def _other_error():
  """tqdm answers an exception between two of its lines with an AttributeError."""
  try:
    sigterm()
  except KeyboardInterrupt:
    raise AttributeError("_lock") from None


def _destructor_with_another_error():
  class Ends:
    def __del__(self):
      _other_error()

  Ends()
  time.sleep(20)


@pytest.mark.parametrize(
  "lose", [_last_step, _destructor, _other_error, _destructor_with_another_error]
)
def test_no_code_loses_a_signal(lose, tmp_path, capsys):
  with pytest.raises(SystemExit) as end, app.stoppable(str(tmp_path)):
    lose()
  assert end.value.code == 128 + signal.SIGTERM
  (line,) = capsys.readouterr().err.splitlines()
  assert "go on" in line


def test_an_error_without_a_signal_stays_an_error(tmp_path):
  hook = sys.unraisablehook
  handler = signal.getsignal(signal.SIGINT)
  with pytest.raises(AttributeError, match="mine"), app.stoppable(str(tmp_path)):
    raise AttributeError("mine")
  assert sys.unraisablehook is hook
  assert signal.getsignal(signal.SIGINT) is handler


def test_an_error_that_is_its_own_cause_stays_an_error(tmp_path):
  error = ValueError("mine")
  error.__cause__ = error
  with pytest.raises(ValueError, match="mine"), app.stoppable(str(tmp_path)):
    raise error


def test_a_signal_that_somebody_handled_explains_no_later_error(tmp_path):
  with pytest.raises(ZeroDivisionError), app.stoppable(str(tmp_path)):
    with contextlib.suppress(KeyboardInterrupt):
      sigterm()
    divmod(1, 0)


def test_a_signal_that_is_lost_at_the_end_comes_too_late(tmp_path):
  class Ends:
    def __del__(self):
      sigterm()

  with app.stoppable(str(tmp_path)):
    Ends()
  # Sent again here, it would end the process.
  time.sleep(2 * app._AGAIN_SECONDS)


def test_a_process_among_others_ends_with_them(monkeypatch, tmp_path):
  """They did not get the signal, and wait for it in the next exchange."""
  monkeypatch.setattr(loop.jax, "process_count", lambda: 2)
  with app.stoppable(str(tmp_path)), loop.signals() as received:
    sigterm()
  assert received == [signal.SIGTERM]


def test_a_signal_in_the_last_step_of_all_is_too_late():
  before = signal.getsignal(signal.SIGTERM)
  with loop.signals() as received:
    sigterm()
  assert received == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is before
