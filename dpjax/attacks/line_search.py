"""L-BFGS with a line search, from SciPy, on a function that JAX differentiates.

L-BFGS models the function as a quadratic near a point. Without a line search, steps often leave the
region where the quadratic is close, above all on networks with tanh. A line search shortens such
steps, at the cost of a few more evaluations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import optimize

# Function from a point [d] to the value and the gradient [d] there.
Differentiated = Callable[[np.ndarray], tuple[float, np.ndarray]]


class Descent(NamedTuple):
  """The lowest point that a descent found."""

  x: np.ndarray  # [d]
  value: float  # infinite if no value was finite
  num_steps: int  # evaluations of value and gradient


class _EndError(Exception):
  """Exception that ends a descent from inside the differentiated function."""


def descend(
  function: Differentiated,
  start: np.ndarray,
  *,
  steps: int,
  memory: int,
  tolerance: float,
) -> Descent:
  """Returns the lowest point that L-BFGS-B without bounds finds from `start`, float64 [d].

  The method is that of Byrd et al. 1995. The descent ends after `steps` evaluations, or at a value
  of at most `tolerance`. It also ends if no step lowers the value, or if value or gradient is not
  finite.

  Args:
    memory: number of pairs (step, change of the gradient) that L-BFGS keeps.

  >>> descent = descend(
  ...   lambda x: (float(x @ x), 2 * x), np.ones(3), steps=9, memory=5, tolerance=1e-9)
  >>> descent.value <= 1e-9, np.abs(descent.x).max().round(3)
  (True, np.float64(0.0))
  """
  best = Descent(np.asarray(start, np.float64), np.inf, 0)
  taken = 0

  def watched(x: np.ndarray) -> tuple[float, np.ndarray]:
    nonlocal best, taken
    value, slope = function(x)
    taken += 1
    if value < best.value:
      # The point is copied, because SciPy may reuse its array.
      best = Descent(x.copy(), value, taken)
    arrived = value <= tolerance
    if arrived or taken >= steps or not (np.isfinite(value) and np.isfinite(slope).all()):
      raise _EndError
    return value, slope

  # None of these limits ends a descent: SciPy itself stops only if it finds no lower value.
  options = {
    "maxiter": steps,
    "maxfun": 2 * steps,
    "maxcor": memory,
    "ftol": 0.0,
    "gtol": 0.0,
  }
  with contextlib.suppress(_EndError):
    optimize.minimize(watched, start, jac=True, method="L-BFGS-B", options=options)
  return best._replace(num_steps=taken)
