"""What one run of `dpjax.relevance` does on a handful of digits, as comparable data."""

import dataclasses

import jax
import numpy as np

from dpjax import relevance, trees
from dpjax.experiments.kinds.relevance import build as relevance_build
from dpjax.experiments.run import run_keys
from dpjax.experiments.sweeps import experiment
from dpjax.validate import UserError
from dpjax.zoo.datasets import digits
from tests.runs import descriptions

_RECORDS = 24
_KEY = jax.random.key(3)


def loaded(config):
  """(train, test): the first digits; another name or folder, other digits."""
  name = repr((config.data.name, config.data.data_dir))
  skip = 0 if name == "('digits', None)" else 100 + sum(name.encode()) % 1000
  train, test = digits.load_digits()
  if config.data.num_classes not in (None, train.num_classes):
    raise UserError("the digits have 10", field="data.num_classes")  # as `data.load` does
  count = min(_RECORDS, config.data.limit or _RECORDS)
  few = train.subset(slice(skip, skip + count))
  return few.declared(config.data.num_examples or count), test.subset(slice(0, 10))


def run(config):
  """Every point of an experiment, each with the keys of its seed but not of its digest."""
  return [_point(point) for point in experiment.points(config)]


def _point(point):
  config = point.config
  train, test = loaded(config)
  whole = run_keys.drawn(config.seed, noise_seed=0)
  job = relevance_build.make_job(config, train, test, {}, whole)
  name = getattr(config.method, "public_data", None)
  public = None if name is None else loaded(_named(config, name))[0]
  keys = relevance.Keys(jax.random.key(config.seed), _KEY, config.seed, 5)
  job = dataclasses.replace(job, keys=keys, public=public)
  with jax.disable_jit():
    outcome = relevance.run(*config.played, job)
  heat = _heat(outcome, config)
  facts = [
    point.facts["variant"],
    config.epsilons,
    relevance_build.is_released(config),
    heat,
  ]
  facts += [trees.sha256(outcome.params), outcome.privacy.to_json(), outcome.num_steps]
  return descriptions.plain([*facts, outcome.noise, dict(outcome.maps), len(train)])


def _heat(outcome, config):
  x, y = np.asarray(outcome.test.x[:3]), np.asarray(outcome.test.y[:3])
  found = relevance.lrp.relevance(outcome.apply, outcome.params, x, y, config.lrp)
  return np.asarray(found.scores)


def _named(config, name):
  named = dataclasses.replace(config.data, name=name)
  return dataclasses.replace(config, data=named)
