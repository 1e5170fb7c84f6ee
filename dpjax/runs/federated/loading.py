"""The data of a federated run: clients whom the data name, or to whom they are dealt."""

from __future__ import annotations

import dataclasses
from typing import Any

from dpjax.data import Federation
from dpjax.runs import bounds, unused
from dpjax.runs.central import build as build_central
from dpjax.runs.central.config import TrainConfig
from dpjax.runs.federated.config import NATURAL, FedConfig
from dpjax.schema.fields import name_of


@bounds.names_fields
def load_data(config: FedConfig, *, features: bool = True) -> tuple[Federation, Any]:
  """(the federation, the test set) that a config names; `build` takes them as `data`.

  Args:
    features: as of `central.build.load_data`.

  Raises:
    UserError: data that are not there; the line says how to get them.
  """
  if name_of(config, "partition") in NATURAL:
    return _natural(config, features)
  train, test = build_central.load_data(central(config), features=features)
  return _partitioned(config, train), test


def _natural(config: FedConfig, features: bool) -> tuple[Federation, Any]:
  """Clients of the test are scored together; they need not be among those that train."""
  train, test = config.partition.make(config.data)
  bounds.local_batch(config, len(train))
  unused.refuse(config, unused.of_dataset(train.dataset))
  sets = build_central.preprocessed(
    central(config), train.dataset, test.dataset, features=features
  )
  return dataclasses.replace(train, dataset=sets[0]), sets[1]


def central(config: FedConfig) -> TrainConfig:
  """The central run that would read the same data."""
  shared: Any = dict(data=config.data, model=config.model, loss=config.loss)
  return TrainConfig(**shared, resident=True)


def _partitioned(config: FedConfig, train: Any) -> Federation:
  """A simulated federation: who holds what is part of the question, decided before any
  mechanism runs, so its law may read the labels. The number of users is the config's."""
  bounds.local_batch(config, len(train))
  return Federation(train, config.partition.make(train.y))
