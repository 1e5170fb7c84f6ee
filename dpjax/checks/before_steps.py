"""Checks of what a run releases before its first step: the statistics of its inputs. For runs
that have some."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from scipy import stats

from dpjax import mechanisms
from dpjax.checks.subject import BATCH, SEED, Row, Subject, row
from dpjax.mechanisms.channel_statistics import channel_moments
from dpjax.types import NeighboringRelation

_NAME = ("statistics: influence", "statistics: noise")
_FACTORS = (0.0, -1.0, 1e4, 1e9)  # of one example, in place of its neighbour
_QUIET = 1e-3  # noise multiplier of the runs that are compared
_SLACK = 1e-2  # of a clip norm: grid and rounding of such a run
_KEYS = 200
_Z = 6.0


def _public(
  statistics: mechanisms.ChannelStatistics, x: np.ndarray, **changes: Any
) -> tuple[mechanisms.ChannelStatistics, tuple[float, ...]]:
  """The same mechanism with public norms, that most of these examples exceed."""
  moments = np.asarray(channel_moments(x), np.float64)
  norms = np.median(np.linalg.norm(moments, axis=2), axis=0) / 2
  norms = tuple(float(norm) or 1.0 for norm in norms)
  return dataclasses.replace(statistics, clip_norms=norms, **changes), norms


def _in_norms(
  found: mechanisms.ChannelMoments, norms: tuple[float, ...], n: float
) -> list[np.ndarray]:
  """The two noisy sums [C], each in its clip norm."""
  sums = (np.asarray(found.mean, np.float64), np.asarray(found.mean_square, np.float64))
  return [one * n / norm for one, norm in zip(sums, norms)]


def influence(subject: Subject) -> Row:
  """No example moves either sum by more than the noise covers, whatever it holds."""
  statistics, relation = subject.plan.statistics, subject.plan.neighboring_relation
  assert statistics is not None
  x = np.asarray(subject.batch().x, np.float32)
  quiet, norms = _public(statistics, x, noise_multiplier=_QUIET)
  exchanged = relation is NeighboringRelation.REPLACE_ONE
  released = lambda rows: _in_norms(
    quiet(jax.random.key(SEED), rows), norms, statistics.normalize_by
  )
  before, moves = released(x if exchanged else x[1:]), []
  for factor in _FACTORS:
    changed = x.copy()
    changed[0] *= factor
    pairs = zip(before, released(changed))
    moves += [float(np.linalg.norm(one - other)) for one, other in pairs]
  worst = max(moves) if np.isfinite(moves).all() else math.nan
  detail = f"largest move of a sum in clip norms, {relation}, one of {BATCH} examples"
  return row(_NAME[0], worst, (2 if exchanged else 1) + _SLACK, detail)


def noise_std(subject: Subject) -> Row:
  """The noise on the sums has the standard deviation that is paid for, in every channel, and
  differs from key to key."""
  statistics = subject.plan.statistics
  assert statistics is not None
  x = np.asarray(subject.batch().x, np.float32)
  public, norms = _public(statistics, x)
  keys = jax.random.split(jax.random.key(SEED), _KEYS)
  found = jax.vmap(public, (0, None))(keys, jax.numpy.asarray(x))
  drawn = [one[:, None] for one in _in_norms(found, norms, statistics.normalize_by)]
  values = np.concatenate(drawn, axis=1) / statistics.noise_multiplier  # [keys, 2, C]
  energy = np.sum((values - values.mean(axis=0)) ** 2, axis=0)
  tails = np.minimum(stats.chi2.cdf(energy, _KEYS - 1), stats.chi2.sf(energy, _KEYS - 1))
  worst = float(stats.norm.isf(min(1.0, 2 * float(np.min(tails)) * energy.size) / 2))
  detail = f"z of the least likely variance of {energy.size} channels over {_KEYS} keys"
  return row(_NAME[1], worst, _Z, detail)


CHECKS = (influence, noise_std)
