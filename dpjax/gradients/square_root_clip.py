"""A clipping rule that shortens long gradients by the square root of their length."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from dpjax.gradients.clip import ClipRule
from dpjax.types import Array


@dataclasses.dataclass(frozen=True)
class SquareRoot(ClipRule):
  """C / sqrt(C^2 + n^2): every gradient of length n gets the length n C / sqrt(C^2 + n^2) < C."""

  def factors(self, lengths: Array, top: float, most: float) -> Array:
    ratio = top / most
    return top / jnp.sqrt(ratio**2 + lengths**2)
