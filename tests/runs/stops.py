"""Ways to end a run in the middle."""

import os
import signal


def sigterm():
  os.kill(os.getpid(), signal.SIGTERM)


def die():
  raise KeyboardInterrupt


def stop_after(monkeypatch, loop_class, count, error=sigterm):
  """`error()` once, right after step or round `count` is charged."""
  original = loop_class.charge

  def charge(loop):
    original(loop)
    if getattr(loop, "step", None) == count or getattr(loop, "round", None) == count:
      monkeypatch.setattr(loop_class, "charge", original)
      error()

  monkeypatch.setattr(loop_class, "charge", charge)
