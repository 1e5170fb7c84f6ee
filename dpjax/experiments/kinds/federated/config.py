"""Typed configuration of a federated run. A config file returns a `FedConfig`.

Units: a round is one update of the server; privacy is for one USER, that is one client with
all of its data. A name of a model, loss, data set, optimizer, algorithm, aggregator or sampler
may be a user's own, `package.module:name`; see `dpjax.experiments.config.user_code`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

from dpjax import federated, gradients, transforms
from dpjax.data import leaf, natural, partition, shakespeare, tff
from dpjax.experiments.config import optimizers
from dpjax.experiments.config.fields import Choice, WithChoices, settings
from dpjax.experiments.kinds.central.config import (
  AuditConfig,
  DataConfig,
  FtrlConfig,
  ModelConfig,
  OptimizerConfig,
)
from dpjax.experiments.kinds.federated.secure_sums import SECURE_SUMS


def _roles(data: DataConfig, min_chars: int | None) -> Any:
  """One client for each role of Shakespeare's plays, with data.name="shakespeare"; roles with
  less text are left out."""
  return shakespeare.shakespeare_federation(data.data_dir, min_chars=min_chars)


def _by_field(data: DataConfig, client_id: str, max_examples: int | None) -> Any:
  """One client for each value of a field, client_id, of prepared data or of an .npz; or those of
  a function of yours, data.name=package.module:name."""
  own = {"client_id": client_id, "max_examples": max_examples}
  return natural.natural_federation(data.name, **_read(data), **own)


def _leaf(data: DataConfig, shape: tuple[int, ...] | None, max_examples: int | None) -> Any:
  """The users of a folder that LEAF wrote, data.name: FEMNIST, Sent140, Shakespeare; shape of
  one example, where LEAF holds it as a row."""
  own: dict[str, Any] = {"shape": shape, "max_examples": max_examples}
  return leaf.leaf_federation(data.name, **_read(data), **own)


def _tff(data: DataConfig, max_examples: int | None) -> Any:
  """The clients of a file of TensorFlow Federated, data.name, .sqlite or _train.h5: EMNIST by
  writer, StackOverflow by user."""
  return tff.tff_federation(data.name, **_read(data), max_examples=max_examples)


def _read(data: DataConfig) -> dict[str, Any]:
  return {name: getattr(data, name) for name in ("data_dir", "max_length", "num_classes")}


# The seed is that of the partition alone, so that seeds of a run share their clients.
_DEALT: dict[str, Any] = {"num_clients": 100, "seed": 0}
PARTITIONS = {
  "iid": settings(partition.iid, **_DEALT),
  "dirichlet": settings(partition.dirichlet, **_DEALT, alpha=0.5, min_size=10),
  "dirichlet_hsu": settings(partition.dirichlet_hsu, **_DEALT, alpha=0.5),
  "shards": settings(partition.shards, **_DEALT, shards_per_client=2),
  "quantity_skew": settings(partition.quantity_skew, **_DEALT, alpha=0.5, min_size=0),
  "power_law": settings(partition.power_law, **_DEALT, exponent=1.0, min_size=0),
}
# Clients that the data decide: called with the `DataConfig`, they return (train, test).
NATURAL = {
  "shakespeare": settings(_roles, min_chars=None),
  # max_examples of each client are kept, the first; None: all
  "natural": settings(_by_field, client_id="", max_examples=None),
  "leaf": settings(_leaf, shape=None, max_examples=None),
  "tff": settings(_tff, max_examples=None),
}
ALGORITHMS = {
  "fed_avg": settings(federated.fed_avg),
  "fed_sgd": settings(federated.fed_sgd),
  "fed_prox": settings(federated.fed_prox, mu=0.01),
  "fed_nova": settings(federated.fed_nova, tau_eff=None),  # public; None: the clients' mean
  "scaffold": settings(federated.scaffold),
  "mime_lite": settings(federated.mime_lite),
}


def _uncompressed() -> None:
  """Messages as they are."""


WEIGHTINGS = {
  "uniform": settings(lambda: federated.uniform, federated.uniform),
  "examples": settings(lambda: federated.by_examples, federated.by_examples),  # no privacy
  "capped": settings(federated.capped, cap=100),  # min(n, cap) / cap
}
AGGREGATORS = {
  "mean": settings(federated.weighted_mean),
  "median": settings(federated.median),
  "trimmed_mean": settings(federated.trimmed_mean, trim=0.1),
  "krum": settings(federated.krum, num_byzantine=1),
  "geometric_median": settings(federated.geometric_median),
}
COMPRESSIONS = {
  "none": settings(_uncompressed),
  "quantize": settings(federated.quantize, bits=8),
  "top_k": settings(federated.top_k, share=0.1),  # always with error feedback
  "rotated": settings(federated.rotated, bits=8),
  "drive": settings(federated.drive),
}


@dataclasses.dataclass
class LocalConfig:
  """The work of a client in one round."""

  batch_size: int | None = 10  # None: all of the client's examples at once
  epochs: int = 1
  max_examples: int | None = None  # of a client in a round, chosen afresh; None: all


@dataclasses.dataclass
class FedOptimizerConfig(OptimizerConfig):
  """The optimizer of a client, or of the server."""

  rule: Annotated[Any, Choice(optimizers.FEDERATED, own=True)] = (
    "sgd"  # sgd | adam | yogi | adagrad
  )


@dataclasses.dataclass
class FedPrivacyConfig(WithChoices):
  """The guarantee to one user. Give `epsilon` or `noise_multiplier`, not both."""

  # central | local | both | none | dp_ftrl (central, noise correlated over the rounds) |
  # distributed (every client adds a share of the noise, inside a secure_sum)
  method: str = "central"
  epsilon: float | None = 8.0  # target for num_rounds rounds
  delta: float = 1e-5
  noise_multiplier: float | None = None  # std of the noise / l2_clip_norm
  l2_clip_norm: float = 1.0  # of one client's message
  local_noise_multiplier: float = 1.0  # both: what clients add themselves
  # flat | automatic | adaptive, of clients' messages; all but flat: central only
  clipping: Annotated[gradients.ClipRule, Choice(transforms.CLIP_RULES)] = (
    dataclasses.field(default_factory=gradients.Flat)
  )
  sampler: str = "poisson"  # poisson | fixed_size, over clients; dp_ftrl has its own
  ftrl: FtrlConfig = dataclasses.field(default_factory=FtrlConfig)  # dp_ftrl, over clients
  # "": the sampler's own; replace_special, which makes the number of users public, for poisson
  neighboring_relation: str = ""
  accountant: str = ""  # pld | rdp; "": the tightest for the sampler
  epsilon_budget: float | None = None  # refuse to start a run that would spend more
  simulated_cohort: int | None = None  # central: noise as if so many clients took part
  simulated_clients: int | None = None  # of so many; the epsilon is then "simulated"


@dataclasses.dataclass
class FedAuditConfig(AuditConfig):
  """Canary clients, and the lower bound on epsilon that they prove."""

  # clients, each in by a fair coin; 0: 1,000 where they join the others, 50 in others' places
  num_canaries: int = 0
  # parameter (of its own, beside the model's) | direction (among the model's parameters) |
  # mislabelled | random; auto: parameter where canaries can join, else direction
  kind: str = "auto"
  score: str = "rounds"  # rounds (every aggregate is seen) | final (the model alone)


@dataclasses.dataclass
class FedConfig(WithChoices):
  """A whole federated run."""

  # Where clients' states lie: a run goes on elsewhere, bit for bit.
  where: ClassVar[tuple[str, ...]] = ("client_state",)

  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  # iid | dirichlet | dirichlet_hsu | shards | quantity_skew | power_law; or clients of the
  # data: natural (by a field) | leaf | tff | shakespeare
  partition: Annotated[Any, Choice({**PARTITIONS, **NATURAL})] = "iid"
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  loss: str = "auto"  # of one example; auto: that of the task
  # fed_avg | fed_sgd | fed_prox | fed_nova | scaffold | mime_lite
  algorithm: Annotated[Any, Choice(ALGORITHMS, own=True)] = "fed_avg"
  # uniform | examples (not with privacy) | capped: of clients, in the mean
  weighting: Annotated[Any, Choice(WEIGHTINGS)] = "uniform"
  # mean | median | trimmed_mean | krum | geometric_median
  aggregator: Annotated[Any, Choice(AGGREGATORS, own=True)] = "mean"
  # none | quantize | top_k | rotated | drive: of messages to the server
  compression: Annotated[Any, Choice(COMPRESSIONS)] = "none"
  # none | additive_sharing | additive_servers | secagg | secagg_plus | bfv: the server sees
  # the sum of the messages alone
  secure_sum: Annotated[Any, Choice(SECURE_SUMS)] = "none"
  local: LocalConfig = dataclasses.field(default_factory=LocalConfig)
  # a client's starts afresh in every round, at a constant rate
  client_optimizer: FedOptimizerConfig = dataclasses.field(
    default_factory=lambda: FedOptimizerConfig(learning_rate=0.1)
  )
  # its schedule runs over num_rounds
  server_optimizer: FedOptimizerConfig = dataclasses.field(
    default_factory=lambda: FedOptimizerConfig(learning_rate=1.0)
  )
  privacy: FedPrivacyConfig = dataclasses.field(default_factory=FedPrivacyConfig)
  num_rounds: int = 100
  clients_per_round: float = 10  # expected, under poisson; exact, under fixed_size
  seed: int = 0
  execution: str = "auto"  # auto | loop | vmap | pmap | shard_map
  num_devices: int | None = None  # pmap, shard_map; None: all
  num_threads: int | None = None  # loop: clients at once; None: as many as there are cores
  memory_budget_gb: float | None = None  # vmap, pmap, shard_map: of a block, 1e9 B; None: 1
  # memory | disk: where what clients keep between rounds lies; disk: in the run's folder
  client_state: str = "memory"
  eval_every: int = 10  # rounds
  checkpoint_every: int = 10  # rounds
  targets: tuple[float, ...] = (0.97, 0.99)  # rounds to these accuracies are reported
  stop_at_accuracy: float | None = None  # end at the first evaluation that reaches it
  diagnostics: bool = True  # log losses, norms and cohort sizes: NOT private
  release: bool = False  # keys from the operating system, noise on a grid, no diagnostics
  audit: FedAuditConfig = dataclasses.field(default_factory=FedAuditConfig)
