"""Calls of a compiled program in a row: alone, a short one would show how a resting card starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax

Run = Callable[[int], None]  # so many calls, one after the other


def of(compiled: Callable, args: tuple) -> Run:
  """Returns calls of a program, the last of which is waited for."""

  def run(calls: int) -> None:
    last: Any = None
    for _ in range(calls):
      last = compiled(*args)
    jax.block_until_ready(last)

  return run


def seconds(run: Run, calls: int) -> float:
  """Returns the mean seconds of so many calls.

  >>> seconds(of(lambda x: x + 1, (1,)), 3) < 1
  True
  """
  start = time.perf_counter()
  run(calls)
  return (time.perf_counter() - start) / calls


def enough(run: Run, least_seconds: float) -> int:
  """Returns how many calls take so long; two calls are made, the first of which warms up."""
  run(1)
  return max(1, math.ceil(least_seconds / seconds(run, 1)))
