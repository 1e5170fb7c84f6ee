"""Branches that few batches take, marked in the text of a compiled program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

# Name scope of all operations in a rarely taken branch. `parallel.programs` looks for this name.
RARE = "rarely_taken"

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def rarely_taken(branch: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
  """Marks a branch of a conditional that only unusual examples need.

  When `parallel.programs` counts the work of an ordinary batch, it leaves this branch out. Results
  do not change.

  >>> half = rarely_taken(lambda x: x / 2)
  >>> float(jax.jit(lambda x: jax.lax.cond(x > 9, half, lambda x: x, x))(10.0))
  5.0
  """

  @functools.wraps(branch)
  def marked(*args: _Args.args, **options: _Args.kwargs) -> _Result:
    with jax.named_scope(RARE):
      return branch(*args, **options)

  return marked
