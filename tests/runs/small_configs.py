"""A config of every kind of run, for seconds; those of two sides of data come with the data."""

import dataclasses

import numpy as np

from configs import quickstart
from configs.fed import quickstart as fed_quickstart
from dpjax.data import from_arrays
from dpjax.experiments.config import fields
from dpjax.experiments.config.sections import ExamplesConfig, NetworkConfig
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.distillation import DistillationConfig, PublicImages
from dpjax.experiments.kinds.pate.config import PateConfig
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.kinds.synthesis.config import (
  KernelMean,
  SynthesisConfig,
  WassersteinGan,
)
from dpjax.experiments.sweeps.sweep import Runs


def sides(classes, size=300):
  """Private and public images whose classes are bright at different rows; 300 are declared."""
  parts = []
  for count in (size, 100):
    rng = np.random.default_rng(count == 100)
    y = rng.integers(0, classes, count)
    x = 0.2 * rng.random((count, 4, 4, 1))
    x[np.arange(count), y] += 0.7
    x = x.astype(np.float32)
    parts.append(from_arrays(x, y, num_classes=classes, nominal_size=300))
  return tuple(parts)


def halves(sizes, num_classes=2):
  """Private and public images of two classes, bright in one half each."""
  rng = np.random.default_rng(0)
  parts = []
  for size in sizes:
    y = rng.integers(0, 2, size)
    x = 0.2 * rng.random((size, 4, 4, 1))
    x[y == 0, :2] += 0.7
    x[y == 1, 2:] += 0.7
    x = x.astype(np.float32)
    parts.append(from_arrays(x, y, num_classes=num_classes, nominal_size=sizes[0]))
  return tuple(parts)


SHORT = {
  "grad_method": "vmap",
  "num_steps": 12,
  "eval_every": 4,
  "checkpoint_every": 3,
  "model.name": "linear",
  "model.options": {},
  "data.limit": 400,
}


def short(**changes):
  """A private run of twelve steps on 400 digits for an epsilon, short enough to be repeated."""
  return fields.replace_all(fields.replace_all(quickstart.get_config(), SHORT), changes)


_CENTRAL = {
  "data.limit": 200,
  "model.name": "linear",
  "model.options": {},
  "num_steps": 4,
  "eval_every": 2,
  "checkpoint_every": 2,
  "privacy.sampling_prob": 0.2,
  "privacy.epsilon": None,
  "privacy.noise_multiplier": 2.0,
  "diagnostics": False,
}
FTRL = {"privacy": "dp_ftrl", "privacy.neighboring_relation": "replace_special"}
MEANS = {"name": "private_statistics", "noise_multiplier": 2.0}
_FED = {
  "num_rounds": 2,
  "eval_every": 2,
  "checkpoint_every": 2,
  "data.limit": 150,
  "partition.num_clients": 30,
  "clients_per_round": 6.0,
  "local.batch_size": 4,
  "local.epochs": 1,
  "privacy.delta": 1e-3,
  "privacy.epsilon": None,
  "privacy.noise_multiplier": 1.0,  # calibrating takes longer than a few rounds
}


def central(**changes):
  return fields.replace_all(
    fields.replace_all(quickstart.get_config(), _CENTRAL), changes
  ), None


def least_squares(**changes):
  least = {"model.name": "linear", "data.limit": 200, "privacy": "least_squares"}
  return fields.replace_all(
    TrainConfig(), {**least, "privacy.epsilon": 4.0, **changes}
  ), None


def federated(**changes):
  return fields.replace_all(
    fields.replace_all(fed_quickstart.get_config(), _FED), changes
  ), None


def pate(**changes):
  base = {"num_teachers": 12, "teacher_capacity": 50, "num_pool": 60, "num_queries": 6}
  base |= {"pool_is_public": True, "num_components": 6, "eval_every": 3, "delta": 1e-5}
  return PateConfig(**{**base, **changes}), sides(3)


def distillation(**changes):
  base = {"num_pool": 50, "teacher_hidden": 4, "student_hidden": 4, "batch_size": 100}
  base |= {"epochs": 1, "eval_every": 2, **changes}
  if changes.get("method") != "joint":
    base |= {"pool_is_public": True, "method": PublicImages(student_batch=16)}
  return DistillationConfig(**base), sides(2)


def synthesis(**changes):
  base = {"epsilon": 2.0, "per_class": 5, "num_latents": 4, "hidden": 8}
  base |= {"learning_rate": 0.02, "num_samples": 20}
  return SynthesisConfig(**{**base, **changes}), sides(2)


def relevance(**changes):
  base = RelevanceConfig(
    data=ExamplesConfig(name="digits", limit=100),
    model=NetworkConfig(name="mlp", options={"features": (8,)}),
    num_epochs=1,
    batch_size=50,
    epsilon=2.0,
  )
  return dataclasses.replace(base, **changes), None


def secure(**changes):
  (point,) = Runs(None, fields.replace_all(SecureConfig(), changes)).points
  return point.config, None


KERNEL = KernelMean(num_frequencies=8, side=2, num_steps=100)
GAN = WassersteinGan(batch_size=100, epochs=1, critic_hidden=4, critic_steps=2)
