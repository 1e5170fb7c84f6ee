"""One peer's simulation of federated averaging, in a process of its own: pfl-research or Flower.

Started by `peer_rounds` with whichever Python has the peer, so nothing of dpjax is imported
here. The peer's own loop runs, as its users run it, and is held after each round: a line
"round" on stdin lets it go for one more, "weights FILE" saves what it has. What it says are
lines that begin with @, in JSON.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (the peers are in an environment of their own)

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import pathlib
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np

Weights = Callable[[], dict[str, np.ndarray]]


def say(**facts: Any) -> None:
  """A line to who started this process."""
  print("@" + json.dumps(facts), flush=True)


class Turns:
  """Holds a loop between its rounds."""

  def __init__(self, facts: dict[str, Any]):
    self.facts = facts
    self.began = None

  def next(self, weights: Weights) -> bool:
    """A round has ended, or the loop begins: waits for orders; False: no more."""
    if self.began is None:
      say(**self.facts)
    else:
      say(seconds=time.perf_counter() - self.began)
    for line in sys.stdin:
      order, _, file = line.strip().partition(" ")
      if order == "round":
        self.began = time.perf_counter()
        return True
      np.savez(file, **weights())  # type: ignore[arg-type]
      say(saved=file)
    return False


def rows(setup: dict[str, Any], client: int) -> tuple[np.ndarray, np.ndarray]:
  """A client's examples: x [n, C, H, W], y [n]."""
  folder = pathlib.Path(setup["folder"])
  held = setup["examples"]
  x, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("x", "y"))
  places = np.arange(client * held, (client + 1) * held) % len(y)
  return np.array(x[places]), np.array(y[places])


def simple_cnn(setup: dict[str, Any]) -> Any:
  """The model with the first weights of the benchmark."""
  import torch
  from torch import nn

  side = setup["side"]
  channels = setup["channels"]
  model = nn.Sequential(
    nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(64 * ((side - 4) // 2) ** 2, 128), nn.ReLU(), nn.Linear(128, 10),
  )  # fmt: skip
  with np.load(pathlib.Path(setup["folder"]) / "first.npz") as first:
    model.load_state_dict({name: torch.from_numpy(first[name]) for name in first})
  return model


def _facts(model: Any, *packages: str) -> dict[str, Any]:
  versions = {name: importlib.metadata.version(name) for name in (*packages, "torch")}
  return {"versions": versions, "parameters": sum(p.numel() for p in model.parameters())}


def _numpy(state: dict[str, Any]) -> dict[str, np.ndarray]:
  return {name: leaf.detach().numpy() for name, leaf in state.items()}


def run_pfl(setup: dict[str, Any]) -> None:
  """pfl-research: FedAvg as in its benchmark, one process."""
  import torch
  from pfl.aggregate.simulate import SimulatedBackend
  from pfl.aggregate.weighting import WeightByUser
  from pfl.algorithm.base import NNAlgorithmParams
  from pfl.algorithm.federated_averaging import FederatedAveraging
  from pfl.callback.base import TrainingProcessCallback
  from pfl.data.dataset import Dataset
  from pfl.data.federated_dataset import FederatedDataset
  from pfl.data.sampling import get_user_sampler
  from pfl.hyperparam import NNTrainHyperParams
  from pfl.metrics import Metrics, Weighted
  from pfl.model.pytorch import PyTorchModel

  torch.set_num_threads(setup["cores"])
  np.random.seed(0)
  model = simple_cnn(setup)
  model.loss = types.MethodType(_loss, model)
  model.metrics = lambda x, y: {
    "accuracy": Weighted(0, len(y))
  }  # asked for in round 0 alone
  turns = Turns(_facts(model, "pfl"))
  weights = lambda: _numpy(model.state_dict())

  class Held(TrainingProcessCallback):
    def on_train_begin(self, *, model: Any) -> Any:
      if not turns.next(weights):
        sys.exit()
      return Metrics()

    def after_central_iteration(self, metrics: Any, model: Any, **named: Any) -> Any:
      return not turns.next(weights), Metrics()

  users = list(range(setup["clients"]))
  sampler = get_user_sampler("minimize_reuse", users)
  data = FederatedDataset(lambda user: Dataset(rows(setup, user)), sampler)
  server = torch.optim.SGD(model.parameters(), 1.0)
  FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
      central_num_iterations=10**9,
      evaluation_frequency=10**9,
      train_cohort_size=setup["cohort"],
      val_cohort_size=0,
    ),
    backend=SimulatedBackend(data, None, postprocessors=[WeightByUser()]),
    model=PyTorchModel(model, torch.optim.SGD, server),
    model_train_params=NNTrainHyperParams(
      local_learning_rate=setup["rate"], local_num_epochs=1, local_batch_size=setup["batch"]
    ),
    callbacks=[Held()],
  )


def _loss(self: Any, x: Any, y: Any) -> Any:
  import torch

  self.train()
  return torch.nn.functional.cross_entropy(self(x), y.long())


def trained(setup: dict[str, Any], state: dict[str, Any], client: int) -> dict[str, Any]:
  """A client's weights after one pass over its examples in batches, by SGD."""
  import torch

  torch.set_num_threads(1)
  model = simple_cnn(setup)
  model.load_state_dict(state)
  optimizer = torch.optim.SGD(model.parameters(), setup["rate"])
  x, y = map(torch.from_numpy, rows(setup, client))
  for images, labels in zip(x.split(setup["batch"]), y.split(setup["batch"])):
    optimizer.zero_grad()
    _loss(model, images, labels).backward()
    optimizer.step()
  return model.state_dict()


def run_flower(setup: dict[str, Any]) -> None:
  """Flower's simulation: the same PyTorch client, one Ray actor of one thread for each core."""
  import flwr.app as messages
  from flwr.clientapp import ClientApp
  from flwr.serverapp import ServerApp
  from flwr.serverapp.strategy import FedAvg
  from flwr.simulation import run_simulation

  class Whole(FedAvg):
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
      replies = list(replies)
      failed = [reply for reply in replies if reply.has_error()]
      if (
        failed or len(replies) != setup["cohort"]
      ):  # a mean of fewer would pass for a round
        say(failed=f"{len(replies) - len(failed)} of {setup['cohort']} clients answered")
        os._exit(1)
      return super().aggregate_train(server_round, replies)

  client = ClientApp()
  server = ServerApp()
  first = simple_cnn(setup)
  turns = Turns(_facts(first, "flwr", "ray"))

  @client.train()
  def train(message: Any, context: Any) -> Any:
    import torch  # noqa: F401 - of an actor that has just begun; Flower asks for it

    state = message.content["arrays"].to_torch_state_dict()
    place = int(context.node_config["partition-id"])
    content = messages.RecordDict(
      {
        "arrays": messages.ArrayRecord(trained(setup, state, place)),
        "metrics": messages.MetricRecord({"num-examples": setup["examples"]}),
      }
    )
    return messages.Message(content=content, reply_to=message)

  def held(number: int, arrays: Any) -> Any:
    del number
    if not turns.next(lambda: _numpy(arrays.to_torch_state_dict())):
      import ray

      ray.shutdown()
      os._exit(0)  # the loop has no end of its own
    return messages.MetricRecord()

  @server.main()
  def main(grid: Any, context: Any) -> None:
    strategy = Whole(
      fraction_train=setup["cohort"] / setup["clients"],
      fraction_evaluate=0.0,
      min_train_nodes=setup["cohort"],
      min_available_nodes=setup["clients"],
    )
    arrays = messages.ArrayRecord(first.state_dict())
    strategy.start(grid, arrays, num_rounds=10**9, evaluate_fn=held)

  run_simulation(
    server,
    client,
    setup["clients"],
    backend_config={
      "client_resources": {"num_cpus": 1.0, "num_gpus": 0.0},
      "init_args": {"num_cpus": setup["cores"]},
    },
  )


PEERS = {"pfl": run_pfl, "flower": run_flower}


def main() -> None:
  """`peer_worker.py SETUP.json`."""
  setup = json.loads(pathlib.Path(sys.argv[1]).read_text())
  try:
    functools.partial(PEERS[setup["peer"]], setup)()
  except ModuleNotFoundError as error:
    say(missing=error.name)


if __name__ == "__main__":
  main()
