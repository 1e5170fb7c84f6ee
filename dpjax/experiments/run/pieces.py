"""Phases whose steps fill arrays piece by piece. They train nothing, but resume like a training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dpjax.experiments.run.experiment import Phase, Scores

Arrays = dict[str, Any]  # each a NumPy array, or a tree of them


def fill_pieces(
  num_pieces: int,
  init: Callable[[], Arrays],
  fill: Callable[[Arrays, int], None],
  *,
  name: str,
  evaluate: Callable[[Arrays], Scores] | None = None,
  subfolder: str = "",
) -> Phase:
  """Returns a phase whose step t computes piece t; the arrays are its result.

  Args:
    init: function that returns the arrays before the first piece.
    fill: function (arrays, t) that writes piece t into the arrays, in place.
    name, evaluate, subfolder: fields of `Phase`.
  """

  def step(state: Arrays, piece: int) -> tuple[Arrays, None]:
    # `fill` writes in place, but arrays restored from a checkpoint may be read-only.
    held = jax.tree.map(np.array, state)
    fill(held, piece)
    return held, None

  return Phase(
    num_steps=num_pieces,
    init=init,
    step=step,
    draws=lambda start: range(start, num_pieces),
    released=lambda state: state,
    evaluate=evaluate,
    name=name,
    subfolder=subfolder,
  )
