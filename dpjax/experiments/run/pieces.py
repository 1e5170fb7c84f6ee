"""Works whose steps fill in arrays, piece by piece: no training, but it goes on like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dpjax.experiments.run.loop import Scores, Work

Arrays = dict[str, Any]  # each a NumPy array, or a tree of them


def filled(
  num_pieces: int,
  init: Callable[[], Arrays],
  fill: Callable[[Arrays, int], None],
  *,
  name: str,
  evaluate: Callable[[Arrays], Scores] | None = None,
  phase: str = "",
) -> Work:
  """The work whose step t is piece t; the arrays are what it leaves.

  Args:
    init: the arrays before the first piece.
    fill: (the arrays, t), which it changes in place.
    name, evaluate, phase: as `Work` has them.
  """

  def step(state: Arrays, piece: int) -> tuple[Arrays, None]:
    # `fill` writes in place, and arrays that a checkpoint gave back may be read-only.
    held = jax.tree.map(np.array, state)
    fill(held, piece)
    return held, None

  return Work(
    num_steps=num_pieces,
    init=init,
    step=step,
    draws=lambda start: range(start, num_pieces),
    released=lambda state: state,
    evaluate=evaluate,
    name=name,
    phase=phase,
  )
