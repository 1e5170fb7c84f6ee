"""Ways to end a run in the middle."""

import os
import signal

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
