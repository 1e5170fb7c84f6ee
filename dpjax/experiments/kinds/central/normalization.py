"""Normalises the inputs of a model: each input by itself, or all by private statistics.

Statistics are computed from the training data, canaries included. They also normalise test data and
canaries. The released params.npz holds them, as an output of the mechanism; normalised inputs are
never written. A resumed run computes the statistics again with the same key, and is refused where
any bit differs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import data, mechanisms, sampling
from dpjax.data import cache
from dpjax.experiments.config import common
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds.central.config import (
  NORMALIZATIONS,
  ByStatistics,
  TrainConfig,
  Whitened,
)
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.plan import Plan
from dpjax.types import Params
from dpjax.validate import UserError

if TYPE_CHECKING:
  from dpjax.auditing.canaries import Canaries
  from dpjax.mechanisms.channel_statistics import ChannelMoments
  from dpjax.mechanisms.noisy_means import NoisyMeans
  from dpjax.mechanisms.whitening import Spread

  Released = ChannelMoments | Spread

# Maps settings to the name of their mechanism. Runs without these settings import no mechanism.
_MECHANISMS = {ByStatistics: "ChannelStatistics", Whitened: "Whitening"}
# Name of the statistics beside the parameters in params.npz.
RELEASED = "statistics"
_CHUNK = 1000  # examples


def statistics_of(config: TrainConfig) -> Any:
  """Returns the settings of the private statistics that the run releases; None: there are none."""
  chosen = getattr(config.privacy, "normalization", None)
  return chosen if type(chosen) in _MECHANISMS else None


def per_example(config: TrainConfig) -> bool:
  """Returns whether scattering features are standardised for each example by itself.

  This is so without private statistics, and before whitening if `model.options` sets `num_groups`.
  """
  groups = config.model.options.get("num_groups")
  chosen = statistics_of(config)
  return chosen is None or (isinstance(chosen, Whitened) and groups is not None)


def check(config: TrainConfig) -> None:
  """Raises UserError if private statistics do not fit the rest of the config; loads no data."""
  chosen = statistics_of(config)
  if chosen is None:
    return
  # The mechanism checks its numbers when it is made.
  mechanism(config, 1)
  common.read_if(
    config,
    not getattr(chosen, "clip_norms", ()),
    "no privacy.normalization.clip_norms",
    "privacy.normalization.median_epsilon",
  )
  groups = config.model.options.get("num_groups")
  if groups is not None and not per_example(config):
    raise UserError(
      "would be ignored, it needs privacy.normalization='per_example'; leave it out",
      field="model.options.num_groups",
      value=groups,
    )


def mechanism(
  config: TrainConfig, num_examples: int, sampler: sampling.Sampler | None = None
) -> NoisyMeans | None:
  """Returns the mechanism of the private statistics; None if the run has none.

  Args:
    num_examples: public number of examples.
    sampler: sampler that must support the config's neighboring relation; None: the relation is
      add_or_remove_one.
  """
  chosen = statistics_of(config)
  relation = "add_or_remove_one"
  if chosen is None:
    return None
  if sampler is not None:
    asked = getattr(config.privacy, "neighboring_relation", "")
    relation = sampler.checked_relation(asked)
  numbers = {"normalize_by": float(num_examples), "neighboring_relation": relation}
  with within("privacy.normalization"):
    mechanism_class = getattr(mechanisms, _MECHANISMS[type(chosen)])
    return mechanism_class(**numbers, **dataclasses.asdict(chosen))


def release(plan: Plan, random: RunKeys, train: data.Dataset) -> Released | None:
  """Returns the private statistics of the training data; None if the plan has none.

  Empty records are left out. Raises UserError for tokens, which have no channels.
  """
  if plan.statistics is None:
    return None
  released = type(plan.statistics).__name__
  names = (n for n, kind in NORMALIZATIONS.items() if _MECHANISMS.get(kind) == released)
  chosen = next(names)
  if train.x.dtype == np.int32:
    raise UserError(
      "needs inputs of numbers, data.name holds tokens",
      field="privacy.normalization",
      value=chosen,
    )
  there = train.without_empty_records()
  try:
    # The key is of one run, whose data do not change; published runs drew their noise so.
    statistics = plan.statistics.after(random.noise, there.x, None)
  except UserError as error:
    raise UserError(str(error), field="privacy.normalization", value=chosen) from error
  return jax.tree.map(np.asarray, statistics)


def normalize(dataset: data.Dataset, statistics: Released) -> data.Dataset:
  """Returns the data set with normalised inputs, as a copy made in chunks. Features in a file get
  another file (`cache.unnamed_rows`). Other rows in files are normalised when they are read."""
  step = statistics.standardizer()

  def change(x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    chunk = np.zeros((_CHUNK, *x.shape[1:]), x.dtype)
    for start in range(0, len(x), _CHUNK):
      rows = x[start : start + _CHUNK]
      # Every chunk has one padded shape. So the step compiles once, and the last bits do not depend
      # on the number of rows.
      chunk[: len(rows)] = rows
      out[start : start + _CHUNK] = step(jnp.asarray(chunk))[: len(rows)]
    return out

  x = dataset.x
  if dataset.in_memory:
    x = change(x)
  elif x.as_stored:
    x = cache.unnamed_rows(x.shape, lambda: map(change, dataset.x.chunks()))
  else:
    x = x.then(change)
  return dataclasses.replace(dataset, x=x)


def of_canaries(canaries: Canaries | None, statistics: Released) -> Canaries | None:
  """Returns the canaries, normalised like all inputs of the model; None without canaries."""
  if canaries is None:
    return None
  return canaries._replace(examples=normalize(canaries.examples, statistics))


def beside(params: Params, statistics: Released | None) -> Params:
  """Returns the parameters, with the statistics under the key `RELEASED` if there are any."""
  if statistics is None:
    return params
  return {**dict(params), RELEASED: statistics._asdict()}
