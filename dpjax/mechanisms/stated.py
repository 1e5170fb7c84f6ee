"""The event of a mechanism, stated for the relation under which it will be accounted.

A sensitivity holds under one neighbouring relation. `dpjax.accounting` reads a noise
multiplier as scale / (bound of one record) and halves it under replace_one; so a mechanism
whose sensitivity was stated under replace_one doubles its multiplier here, and refuses to
be accounted under any other relation, where its epsilon would come out too small.

| stated under     | accounted under  | Gaussian, Laplace     | pure epsilon |
| ---------------- | ---------------- | --------------------- | ------------ |
| any              | the same         | scale / sensitivity   | epsilon      |
| add or remove    | replace_one      | half of it (two hops) | 2 epsilon    |
| replace_special  | replace_one      | half of it (two hops) | 2 epsilon    |
| anything else    |                  | refused               | refused      |
"""

from __future__ import annotations

import math
import numbers

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from dpjax import validate
from dpjax.trees import at_least_float32
from dpjax.types import NeighboringRelation
from dpjax.validate import UserError

RELATIONS = tuple(relation.value for relation in NeighboringRelation)
DpEvent = dp_accounting.DpEvent


def gaussian_event(noise_multiplier: float, stated: str, asked: str) -> DpEvent:
  """Gaussian noise of std `noise_multiplier` * (the L2 sensitivity under `stated`).

  >>> gaussian_event(3.0, "replace_one", "replace_one")  # the accountant halves it
  GaussianDpEvent(noise_multiplier=6.0)
  """
  _check(stated, asked)
  return dp_accounting.GaussianDpEvent(noise_multiplier * _doubled(stated))


def laplace_event(noise_multiplier: float, stated: str, asked: str) -> DpEvent:
  """Laplace noise of scale `noise_multiplier` * (the L1 sensitivity under `stated`).

  >>> laplace_event(3.0, "add_or_remove_one", "add_or_remove_one")
  LaplaceDpEvent(noise_multiplier=3.0)
  """
  _check(stated, asked)
  return dp_accounting.LaplaceDpEvent(noise_multiplier * _doubled(stated))


def pure_event(epsilon: float, stated: str, asked: str) -> DpEvent:
  """A mechanism of which only its (epsilon, 0)-DP under `stated` is known.

  Binary randomised response at that epsilon dominates it (Kairouz et al. 2015,
  arXiv:1311.0776); Laplace noise of scale 1 / epsilon would not.

  >>> pure_event(math.log(3), "add_or_remove_one", "add_or_remove_one")
  RandomizedResponseDpEvent(noise_parameter=0.5, num_buckets=2)
  """
  _check(stated, asked)
  total = epsilon if asked == stated else 2 * epsilon
  return dp_accounting.RandomizedResponseDpEvent(
    2 * math.exp(-total) / (1 + math.exp(-total)), 2
  )


def _check(stated: str, asked: str) -> None:
  validate.one_of(RELATIONS, neighboring_relation=asked)
  if asked not in (stated, "replace_one"):
    raise UserError(
      f"neighboring_relation={str(asked)!r}: this mechanism is private under "
      f"{str(stated)!r}; ask for event({str(stated)!r}) and account under the same"
    )


def _doubled(stated: str) -> int:
  return 2 if stated == "replace_one" else 1


def finite(**named: jax.Array) -> None:
  """Raises unless every entry is finite; values that are being traced pass unseen."""
  for name, value in named.items():
    if not isinstance(value, core.Tracer) and not np.all(np.isfinite(value)):
      raise UserError(f"{name}: must be finite, for nothing bounds what noise would hide")


def as_floats(value: jax.Array) -> jax.Array:
  """At least float32: noise in half precision has too few values (pitfall P20)."""
  return at_least_float32(jnp.asarray(value))


def number(**named: float) -> None:
  """Raises unless each value is a finite number.

  >>> number(threshold=math.nan)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: threshold=nan: must be a finite number
  """
  for name, value in named.items():
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (real and math.isfinite(value)):
      raise UserError(f"{name}={value!r}: must be a finite number")


def interval(lower: float, upper: float) -> None:
  """Raises unless lower < upper are finite numbers.

  >>> interval(1.0, 1.0)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: upper=1.0: must be a number above lower=1.0
  """
  number(lower=lower, upper=upper)
  if not lower < upper:
    raise UserError(f"upper={upper!r}: must be a number above lower={lower!r}")


def clipped(values: jax.Array, lower: float, upper: float) -> jax.Array:
  """Entries clipped into [lower, upper]; NaN becomes the middle, which is public.

  >>> clipped(jnp.array([-5.0, 2.0, jnp.nan, jnp.inf]), 0.0, 10.0)
  Array([ 0.,  2.,  5., 10.], dtype=float32)
  """
  values = as_floats(values)
  middle = lower + (upper - lower) / 2
  return jnp.clip(jnp.where(jnp.isnan(values), middle, values), lower, upper)
