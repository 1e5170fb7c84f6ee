"""Federated training: clients, executions (loop, vmap, devices), aggregators, algorithms."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.federated.aggregation import Aggregator as Aggregator
  from dpjax.federated.aggregation import central as central
  from dpjax.federated.aggregation import client_noise as client_noise
  from dpjax.federated.aggregation import dp_mean as dp_mean

  # These imports take everything that the two packages list, so a new algorithm needs no line here.
  from dpjax.federated.aggregators import *  # noqa: F403
  from dpjax.federated.algorithms import *  # noqa: F403
  from dpjax.federated.client import ClientAlgorithm as ClientAlgorithm
  from dpjax.federated.client import by_examples as by_examples
  from dpjax.federated.client import local_training as local_training
  from dpjax.federated.cohort import LocalWork as LocalWork
  from dpjax.federated.cohort import cohorts as cohorts
  from dpjax.federated.cohort import from_batches as from_batches
  from dpjax.federated.compression import compressed as compressed
  from dpjax.federated.compression import drive as drive
  from dpjax.federated.compression import quantize as quantize
  from dpjax.federated.compression import rotated as rotated
  from dpjax.federated.compression import top_k as top_k
  from dpjax.federated.execution.client_blocks import vmap_clients as vmap_clients
  from dpjax.federated.execution.client_devices import pmap_clients as pmap_clients
  from dpjax.federated.execution.client_devices import (
    shard_map_clients as shard_map_clients,
  )
  from dpjax.federated.execution.client_loop import loop_clients as loop_clients
  from dpjax.federated.execution.client_processes import process_clients as process_clients
  from dpjax.federated.execution.named import auto_clients as auto_clients
  from dpjax.federated.round import FederatedAlgorithm as FederatedAlgorithm
  from dpjax.federated.server_optimizers import fed_opt as fed_opt
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
