"""Ways to end a run in the middle."""

import contextlib
import os
import signal
from unittest import mock

from dpjax.experiments.run import loop


def sigterm():
  os.kill(os.getpid(), signal.SIGTERM)


def die():
  raise KeyboardInterrupt


def stop_after(monkeypatch, count, error=sigterm, subfolder=""):
  """`error()` once, right after step `count` of a training is charged."""
  original = loop.Running.charge

  def charge(running):
    original(running)
    if running.step == count and running.phase.subfolder == subfolder:
      monkeypatch.setattr(loop.Running, "charge", original)
      error()

  monkeypatch.setattr(loop.Running, "charge", charge)


@contextlib.contextmanager
def on_save(call):
  """Calls a function with the number of each step that a training saves."""
  original = loop.Running.save

  def save(running):
    original(running)
    call(running.step)

  with mock.patch.object(loop.Running, "save", save):
    yield
