"""Loads the data of a federated run, with clients named by the data or made by a partition."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from dpjax.data import Federation
from dpjax.data.target_kinds import needs_arrays, needs_classes
from dpjax.experiments.config import common
from dpjax.experiments.config.choices import name_of
from dpjax.experiments.config.naming import within
from dpjax.experiments.config.sections import DataConfig
from dpjax.experiments.kinds.central import build as build_central
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated.config import BY_CLASS, FedConfig
from dpjax.validate import UserError

# A client's batch of up to this size is accepted for any number of examples.
_ANY_BATCH = 1024


def load_data(config: FedConfig, *, features: bool = True) -> tuple[Federation, Any]:
  """Loads (the federation, the test set) of a config; `build` takes them as `data`.

  Args:
    features: whether to compute the features of the model (`central.build.load_data`).

  Raises:
    UserError: data that are missing; the message says how to get them.
  """
  federation, test = _partition(config) if config.is_dealt else _natural(config)
  loaded = _holding_out(federation, config.held_out), test
  return with_features(config, loaded) if features else loaded


def with_features(
  config: FedConfig, loaded: tuple[Federation, Any]
) -> tuple[Federation, Any]:
  """Returns (federation, test) with features as inputs if the model takes features, else
  unchanged."""
  federation, test = loaded
  sets = build_central.Central(central(config)).with_features((federation.dataset, test))
  return dataclasses.replace(federation, dataset=sets[0]), sets[1]


def _natural(config: FedConfig) -> tuple[Federation, Any]:
  """Loads clients named by the data. Test clients are scored together, and may differ from the
  training clients."""
  with within("data", of=config.data):
    train, test = config.partition.make(config.data)
  _check_local_batch(config, len(train))
  sets = config.data.preprocess(train.dataset, test.dataset)
  known = train.nominal_users
  asked = config.data.num_users
  # Two different declared numbers would give two sampling probabilities.
  if None not in (known, asked) and known != asked:
    raise UserError(
      f"{config.data.name!r} declares {known}", field="data.num_users", value=asked
    )
  users = asked if known is None else known
  return dataclasses.replace(
    train, dataset=sets[0], nominal_users=users, test_indices=_own_test_rows(train, test)
  ), sets[1]


def _check_local_batch(config: FedConfig, num_examples: int) -> None:
  """Raises UserError for a `local.batch_size` above both 1024 and the number of training examples
  of all clients together."""
  most = max(num_examples, _ANY_BATCH)
  common.at_most(config, "local.batch_size", most, ", or none, a client's examples at once")


def _holding_out(federation: Federation, share: float) -> Federation:
  """Returns the federation in which each client holds out a share of its rows, at least one of two
  or more. Which rows these are depends on the client's name and number of rows alone: if another
  client comes, no client trains on other rows."""
  if not share:
    return federation
  kept = []
  held = []
  for name, rows in zip(federation.client_ids, federation.indices):
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest())
    stream = np.random.SeedSequence(seed)
    order = np.random.Generator(np.random.Philox(stream)).permutation(len(rows))
    count = min(max(1, round(share * len(rows))), max(0, len(rows) - 1))
    held.append(np.sort(rows[order[:count]]))
    kept.append(np.sort(rows[order[count:]]))
  return dataclasses.replace(federation, indices=kept, held_out=held)


def _own_test_rows(train: Federation, test: Federation) -> list[np.ndarray] | None:
  """Returns the test rows of each training client; None if no client has any."""
  held = dict(zip(test.client_ids, test.indices))
  rows = [held.get(name, np.zeros(0, np.int64)) for name in train.client_ids]
  return rows if any(map(len, rows)) else None


def central(config: FedConfig) -> TrainConfig:
  """Returns the config of a central run that reads the same data."""
  names_of = lambda kind: {field.name for field in dataclasses.fields(kind)}
  shared = names_of(DataConfig) & names_of(type(config.data))
  data = DataConfig(**{name: getattr(config.data, name) for name in shared})
  return TrainConfig(data=data, model=config.model, loss=config.loss, resident=True)


def _partition(config: FedConfig) -> tuple[Federation, Any]:
  """Loads a simulated federation, whose number of users the config gives. The partition may depend
  on the labels: it defines the users' data, before any mechanism runs."""
  train, test = config.data.load(resident=True)
  needs_arrays(train, "data.name", config.data.name)
  _check_local_batch(config, train.nominal_size or len(train))
  users = config.partition.num_clients
  labels = train.y
  if train.target is not None:
    partition = name_of(config, "partition")
    if partition in BY_CLASS:
      needs_classes(train, "partition", partition)
    # The other partitions read only the number of rows.
    labels = np.zeros(len(train), np.int32)
  dealt = Federation(train, config.partition.make(labels), nominal_users=users)
  if name_of(config, "partition") != "silos":
    return dealt, test
  # The test set is dealt by the same rule, so that each silo has a test like its own records.
  own = config.partition.make(test.y if train.target is None else np.zeros(len(test)))
  declared = config.partition.sizes
  # Own data without a declared size have none here: their true number is a secret.
  if not declared and train.nominal_size:
    declared = (max(1, train.nominal_size // users),) * users
  return dataclasses.replace(dealt, nominal_sizes=declared or None, test_indices=own), test
