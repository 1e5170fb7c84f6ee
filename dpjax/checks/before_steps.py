"""Checks of the noisy statistics of inputs, if a run releases them before its first step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from dpjax.accounting.proved import NeighboringRelation
from dpjax.checks.subject import BATCH, SEED, Row, Subject, Z, row, z_of_squares
from dpjax.mechanisms.noisy_means import NoisyMeans

# Factors by which one example is multiplied, so that it is zero, mirrored or huge.
_FACTORS = (0.0, -1.0, 1e4, 1e9)
# Noise multiplier of the compared releases. It is small, so that a change of a sum is visible.
_QUIET = 1e-3
# Epsilon of the medians that are released before the sums. A large epsilon makes these medians
# nearly exact.
_LOUD = 100.0
# Tolerance in clip norms, for the grid and the rounding of a release with little noise.
_SLACK = 1e-2
_KEYS = 200


def _public(statistics: NoisyMeans, x: np.ndarray, **changes: Any) -> NoisyMeans:
  """Returns the mechanism with public clip norms that most rows of x exceed."""
  private = {"clip_norms": (), "median_epsilon": _LOUD, "noise_multiplier": _QUIET}
  released = dataclasses.replace(statistics, **private)(jax.random.key(SEED), x)
  # The public clip norms are half the private ones, so that most examples are clipped.
  norms = np.asarray(released.clip_norms, np.float64) / 2
  norms = tuple(float(norm) or 1.0 for norm in norms)
  return dataclasses.replace(statistics, clip_norms=norms, **changes)


def influence(subject: Subject) -> Row:
  """Tests that no example moves a sum of the statistics by more than the noise covers. Earlier
  releases are held fixed."""
  statistics = subject.plan.statistics
  relation = subject.plan.neighboring_relation
  assert statistics is not None
  x = np.asarray(subject.batch().x, np.float32)
  quiet = _public(statistics, x, noise_multiplier=_QUIET)
  exchanged = relation is NeighboringRelation.REPLACE_ONE
  key = jax.random.key(SEED)
  without = x if exchanged else x[1:]
  released = quiet.after(key, without, None)
  moves = []
  for factor in _FACTORS:
    changed = x.copy()
    changed[0] *= factor
    # Each sum may depend on earlier releases, so these are held fixed.
    after = quiet.after(key, changed, released)
    pairs = zip(quiet.noisy_totals(released), quiet.noisy_totals(after))
    moves += [float(np.linalg.norm(vector - other)) for vector, other in pairs]
  worst = max(moves) if np.isfinite(moves).all() else math.nan
  detail = f"largest move of a sum in clip norms, {relation}, one of {BATCH} examples"
  return row(worst, (2 if exchanged else 1) + _SLACK, detail)


def noise_std(subject: Subject) -> Row:
  """Tests that the noise on the sums of the statistics has the accounted standard deviation over
  many keys, in every entry."""
  statistics = subject.plan.statistics
  assert statistics is not None
  x = np.asarray(subject.batch().x, np.float32)
  public = _public(statistics, x)
  quiet = dataclasses.replace(public, noise_multiplier=_QUIET)
  drawn = []
  for key in jax.random.split(jax.random.key(SEED), _KEYS):
    released = public(key, x)
    exact = quiet.after(jax.random.key(SEED), x, released)
    pairs = zip(public.noisy_totals(released), public.noisy_totals(exact))
    drawn.append(np.concatenate([noisy - quietly for noisy, quietly in pairs]))
  values = np.stack(drawn) / statistics.noise_multiplier  # [keys, entries]
  energy = np.sum((values - values.mean(axis=0)) ** 2, axis=0)
  detail = f"z of the least likely variance of {energy.size} entries over {_KEYS} keys"
  return row(z_of_squares(energy, _KEYS - 1), Z, detail)


CHECKS = {"statistics: influence": influence, "statistics: noise": noise_std}
