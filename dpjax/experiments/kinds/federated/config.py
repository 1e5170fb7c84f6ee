"""Typed configuration of a federated run. A config file returns a `FedConfig`.

Units: a round is one update of the server; privacy is for one USER, that is one client with all of
its data. A model, loss, data set, optimizer, algorithm, aggregator or sampler may be your own code,
as `package.module:name`; see `dpjax.experiments.config.user_code`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from dpjax import federated, gradients, validate
from dpjax.data import partition
from dpjax.experiments.config import common, optimizers, rules, samplers
from dpjax.experiments.config.choices import (
  Choice,
  Option,
  functions,
  name_of,
  settings,
  users_of,
)
from dpjax.experiments.config.common import COUNT, AttackerConfig
from dpjax.experiments.config.fields import WithChoices
from dpjax.experiments.config.naming import Gives
from dpjax.experiments.config.sections import InputsConfig, ModelConfig
from dpjax.experiments.kinds.central.config import (
  CanaryAudit,
  LearningRate,
  NoiseStrategy,
  Schedule,
)
from dpjax.experiments.kinds.federated.secure_sums import SECURE_SUMS, NoSecureSum
from dpjax.federated import described
from dpjax.federated.client import capped_weight, uniform
from dpjax.noise import correlated
from dpjax.transforms.every_clip_rule import CLIP_RULES
from dpjax.zoo.datasets import leaf, natural, pfl, shakespeare, tff


@dataclasses.dataclass
class FedDataConfig(InputsConfig):
  """The data of a federated run."""

  num_users: Annotated[
    int | None,
    COUNT,
    "public: a constant near the number of users whom the data name, used in its place where one "
    "user more or less is hidden; for data that do not declare it themselves",
  ] = None


def _roles(data: FedDataConfig, min_chars: int | None) -> Any:
  """Shakespeare's roles as clients, with data.name="shakespeare"; roles with fewer than
  min_chars characters are left out."""
  return shakespeare.shakespeare_federation(data.data_dir, min_chars=min_chars)


def _by_field(data: FedDataConfig, client_id: str, max_examples: int | None) -> Any:
  """Clients by the values of the field client_id, in prepared data, an .npz file or a table; or the
  clients that your function data.name=package.module:name returns."""
  options = {"client_id": client_id, "max_examples": max_examples}
  return natural.natural_federation(
    data.name, **_read(data), **options, declaration=data.declaration
  )


def _leaf(
  data: FedDataConfig, shape: tuple[int, ...] | None, max_examples: int | None
) -> Any:
  """The users of a folder that LEAF wrote (data.name): FEMNIST, Sent140, Shakespeare; shape is the
  shape of one example if LEAF stores examples as rows of numbers."""
  options: dict[str, Any] = {"shape": shape, "max_examples": max_examples}
  return leaf.leaf_federation(data.name, **_read(data), **options)


def _tff(data: FedDataConfig, max_examples: int | None) -> Any:
  """The clients of a file of TensorFlow Federated (data.name, .sqlite or _train.h5): EMNIST by
  writer, StackOverflow by user."""
  return tff.tff_federation(data.name, **_read(data), max_examples=max_examples)


def _pfl(
  data: FedDataConfig,
  image_size: int | None,
  fine_grained: bool,
  test_split: str,
  max_examples: int | None,
) -> Any:
  """The users of a file of pfl-research's benchmarks (data.name, .hdf5): FLAIR's photographs with
  several labels each, or StackOverflow's sentences of words."""
  return pfl.pfl_federation(
    data.name,
    data.data_dir,
    num_classes=data.num_classes,
    image_size=image_size,
    fine_grained=fine_grained,
    test_split=test_split,
    max_examples=max_examples,
  )


def _read(data: FedDataConfig) -> dict[str, Any]:
  return {name: getattr(data, name) for name in ("data_dir", "max_length", "num_classes")}


# The partition has its own seed, so that runs with different seeds have the same clients.
_CLIENTS = rules.between(1, rules.MOST_CLIENTS)
_SEED = Option(0, rules.at_least(0))
_DEALT: dict[str, Any] = {"num_clients": Option(100, _CLIENTS), "seed": _SEED}
_ALPHA = Option(
  0.5, rules.FieldRule(validate.positive_or_inf, "> 0"), "less is more unequal"
)
_LEAST = Option(0, rules.at_least(0))  # least size of a client
PARTITIONS = {
  "iid": settings(partition.iid, **_DEALT),
  "dirichlet": settings(
    partition.dirichlet, **_DEALT, alpha=_ALPHA, min_size=Option(10, rules.at_least(0))
  ),
  "dirichlet_hsu": settings(partition.dirichlet_hsu, **_DEALT, alpha=_ALPHA),
  "shards": settings(partition.shards, **_DEALT, shards_per_client=Option(2, _CLIENTS)),
  "quantity_skew": settings(
    partition.quantity_skew, **_DEALT, alpha=_ALPHA, min_size=_LEAST
  ),
  "power_law": settings(
    partition.power_law,
    **_DEALT,
    exponent=Option(1.0, rules.NON_NEGATIVE),
    min_size=_LEAST,
  ),
  "silos": settings(
    partition.silos, num_clients=Option(3, _CLIENTS), seed=_SEED, sizes=None, skew=0.0
  ),
}
# Partitions that need data with classes.
BY_CLASS = ("dirichlet", "dirichlet_hsu", "shards")
_FIRST = Option(None, COUNT, "each client keeps its first n examples; none: all")
# Functions `FedDataConfig` -> (train, test), for data that name their clients.
NATURAL = {
  "shakespeare": settings(_roles, min_chars=Option(None, COUNT)),
  "natural": settings(_by_field, client_id="", max_examples=_FIRST),
  "leaf": settings(_leaf, shape=None, max_examples=_FIRST),
  "tff": settings(_tff, max_examples=_FIRST),
  "pfl": settings(
    _pfl, image_size=None, fine_grained=False, test_split="val", max_examples=_FIRST
  ),
}


def _with_rules(
  options: Mapping[str, Any], checks: Mapping[str, Callable[..., None]]
) -> dict[str, Any]:
  """Returns the defaults of an algorithm's options, each with its check as a rule."""
  return {
    name: Option(default, rules.FieldRule(checks[name], "")) if name in checks else default
    for name, default in options.items()
  }


# Every algorithm declares its facts, so a new algorithm needs no line here.
_DESCRIBED = described.algorithms()
ALGORITHMS = {
  name: settings(row.make, **_with_rules(row.options, row.checks))
  for name, row in _DESCRIBED.items()
  if row.options is not None
}


def _left_out(facts: described.AlgorithmFacts) -> tuple[str, ...]:
  """Returns the fields of FedConfig that an algorithm does not read."""
  read = {
    "client_optimizer": "client_tx" in facts.optimizers,
    "server_optimizer": "server_tx" in facts.optimizers,
    "local.epochs": facts.local_steps,
    "weighting": facts.weighted,
  }
  return tuple(field for field, is_read in read.items() if not is_read)


for _name, _kind in ALGORITHMS.items():
  _kind.leaves_out = _left_out(_DESCRIBED[_name])


def _no_compression() -> None:
  """Sends messages unchanged."""


WEIGHTINGS = {
  "uniform": settings(lambda: uniform, uniform),
  # Privacy refuses "examples". For "capped", a client with n examples has weight min(n, cap) / cap.
  "examples": settings(lambda: federated.by_examples, federated.by_examples),
  "capped": settings(capped_weight, cap=100),
}
_AGGREGATIONS = described.aggregators()
AGGREGATORS = {
  name: settings(row.make, **row.options) for name, row in _AGGREGATIONS.items()
}
for _name, _kind in AGGREGATORS.items():
  _kind.leaves_out = () if _AGGREGATIONS[_name].weighted else ("weighting",)
COMPRESSIONS = {
  "none": settings(_no_compression),
  "quantize": settings(federated.quantize, bits=8),
  # "top_k" always has error feedback. Without feedback, small coordinates would never be sent.
  "top_k": settings(federated.top_k, share=0.1),
  "rotated": settings(federated.rotated, bits=8),
  "drive": settings(federated.drive),
}


@dataclasses.dataclass
class LocalConfig:
  """The work of a client in one round."""

  batch_size: Annotated[int | None, COUNT, "none: all of the client's examples at once"] = (
    10
  )
  epochs: Annotated[
    int, rules.between(1, rules.MOST_EPOCHS), "of the client's examples, in one round"
  ] = 1
  max_examples: Annotated[
    int | None, COUNT, "of a client in a round, chosen afresh; none: all"
  ] = None


@dataclasses.dataclass
class ClientOptimizerConfig(WithChoices):
  """The optimizer of a client: its state is new in every round, and its learning rate constant."""

  rule: Annotated[
    Any, Choice(optimizers.FEDERATED, functions), "or package.module:name"
  ] = "sgd"
  learning_rate: LearningRate = 0.1


@dataclasses.dataclass
class ServerOptimizerConfig(ClientOptimizerConfig):
  """The optimizer of the server; the schedule of its learning rate runs over num_rounds."""

  learning_rate: LearningRate = 1.0
  schedule: Schedule = "constant"


@dataclasses.dataclass
class UserGuarantee(WithChoices):
  """What every private method promises to one user. Give one of `epsilon`, `noise_multiplier` and
  `attacker`."""

  epsilon: Annotated[common.Epsilon, "target for num_rounds rounds"] = 8.0
  delta: Annotated[common.Delta, "chance that the bound may fail; well below 1 / users"] = (
    1e-5
  )
  noise_multiplier: Annotated[common.NoiseMultiplier, "std of the noise / l2_clip_norm"] = (
    None
  )
  l2_clip_norm: Annotated[common.ClipNorm, "bound on one client's message"] = 1.0
  epsilon_budget: common.EpsilonBudget = None
  attacker: AttackerConfig = dataclasses.field(default_factory=AttackerConfig)


@dataclasses.dataclass
class ServerNoise(UserGuarantee):
  """What all methods read whose server adds the noise."""

  neighboring_relation: Annotated[
    str,
    "'': the sampler's own; replace_special, which makes the number of users public, for "
    "poisson",
  ] = ""
  accountant: Annotated[common.Accountant, "'': the tightest for the sampler"] = ""


SAMPLERS = samplers.choice("clients")
ClientSampler = Annotated[
  Any, SAMPLERS, "which clients are in a round; or package.module:name"
]


@dataclasses.dataclass
class Central(ServerNoise):
  """The server clips messages and adds noise to their sum."""

  clipping: Annotated[
    gradients.ClipRule,
    Choice(CLIP_RULES, users_of(gradients.ClipRule)),
    Gives("l2_clip_norm"),
    "of clients' messages; or package.module:Rule",
  ] = dataclasses.field(default_factory=gradients.Flat)
  sampler: ClientSampler = "poisson"
  simulated_cohort: Annotated[
    int | None, COUNT, "noise as if so many clients took part"
  ] = None
  simulated_clients: Annotated[
    int | None, COUNT, "of so many; the epsilon is then simulated"
  ] = None


@dataclasses.dataclass
class Local(UserGuarantee):
  """Every client adds noise to its own message: a guarantee against the server, too."""

  sampler: ClientSampler = "poisson"


@dataclasses.dataclass
class Both(ServerNoise):
  """Noise of the clients, and of the server."""

  local_noise_multiplier: Annotated[
    float, rules.POSITIVE, "what clients add themselves / l2_clip_norm"
  ] = 1.0
  sampler: ClientSampler = "poisson"


@dataclasses.dataclass
class FedFtrl(ServerNoise):
  """As central, with noise that is correlated over the rounds."""

  sampler: Annotated[
    Any,
    samplers.choice("correlated noise", "steps_apart"),
    "which clients are in a round, and how far apart; or package.module:name",
  ] = "cyclic"
  strategy: NoiseStrategy = dataclasses.field(default_factory=lambda: correlated.Banded())


@dataclasses.dataclass
class Distributed(UserGuarantee):
  """Every client adds a share of the noise, inside a secure_sum."""

  # The noise is sized for the number of clients of a round, which must be an integer.
  sampler: ClassVar[samplers.SamplerChoice] = SAMPLERS.make("fixed_size", "sampler")


@dataclasses.dataclass
class Records(UserGuarantee):
  """Each client is a silo, such as a hospital, and hides each of its RECORDS from everybody else:
  it adds the noise of its own plan to every local step."""

  # All silos take part in each round, but for those that are away.
  leaves_out: ClassVar[tuple[str, ...]] = ("clients_per_round",)

  epsilon: Annotated[common.Epsilon, "target of each silo for num_rounds rounds"] = 8.0
  delta: Annotated[
    common.Delta, "chance that the bound may fail; well below 1 / records of a silo"
  ] = 1e-5
  l2_clip_norm: Annotated[common.ClipNorm, "bound on one record's gradient"] = 1.0
  epsilons: Annotated[
    tuple[float, ...],
    rules.each(rules.POSITIVE),
    "targets of the silos, in their order, in place of epsilon",
  ] = ()
  num_examples: Annotated[
    tuple[int, ...],
    rules.each(COUNT),
    "declared records of each silo, in their order; empty: those that the partition declares",
  ] = ()
  sampler: Annotated[
    Any, samplers.choice("clients"), "which records of a silo are in a step"
  ] = "poisson"
  neighboring_relation: Annotated[
    str,
    "'': the sampler's own; replace_special, which makes the number of records of each silo "
    "public, for poisson",
  ] = ""
  accountant: Annotated[common.Accountant, "'': the tightest for the sampler"] = ""
  max_silos_per_record: Annotated[
    int,
    COUNT,
    Gives("max_silos"),
    "silos that hold a record of one person, one in each at most; epsilon is that of all of these "
    "together",
  ] = 1
  absent: Annotated[
    float, rules.SHARE, "chance that a silo is away for a round: not computed, not charged"
  ] = 0.0
  lost: Annotated[
    float, rules.SHARE, "chance that a silo's message is lost: computed, charged, not used"
  ] = 0.0


@dataclasses.dataclass
class NoPrivacy(WithChoices):
  """No noise, no epsilon."""

  leaves_out: ClassVar[tuple[str, ...]] = ("noise_seed",)

  sampler: ClientSampler = "poisson"
  delta: Annotated[common.Delta, "of the bound that an audit proves"] = 1e-5


FED_PRIVACY: dict[str, type] = {
  "central": Central,
  "local": Local,
  "both": Both,
  "none": NoPrivacy,
  "dp_ftrl": FedFtrl,
  "distributed": Distributed,
  "records": Records,
}


@dataclasses.dataclass
class ClientAudit(CanaryAudit):
  """Canary clients, and the lower bound on epsilon that they prove."""

  num_canaries: Annotated[
    int,
    "clients, each in by a fair coin; 0: 1,000 where they join the others, 50 in others' places",
  ] = 0
  kind: Annotated[
    str,
    "parameter (of its own, beside the model's) | direction (among the model's parameters) | "
    "mislabelled | random | auto (parameter where canaries can join, else direction)",
  ] = "auto"
  score: Annotated[str, "rounds (every aggregate is seen) | final (the model alone)"] = (
    "rounds"
  )


@dataclasses.dataclass
class FedConfig(WithChoices):
  """Configuration of a whole federated run of `launch.federate`."""

  # Fields that may change when a run resumes, since no bit of its result depends on them.
  where: ClassVar[tuple[str, ...]] = ("client_state", "writer")

  data: FedDataConfig = dataclasses.field(default_factory=FedDataConfig)
  partition: Annotated[
    Any,
    Choice({**PARTITIONS, **NATURAL}),
    "how examples are dealt to clients; natural (by a field), leaf, tff, pfl and shakespeare: "
    "the clients of the data",
  ] = "iid"
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  loss: Annotated[
    str,
    rules.among(("auto",), user_defined=True),
    "of one example; auto: that of the task; or package.module:name",
  ] = "auto"
  algorithm: Annotated[
    Any,
    Choice(ALGORITHMS, functions),
    "what a client does, and what the server; or package.module:name",
  ] = "fed_avg"
  weighting: Annotated[
    Any, Choice(WEIGHTINGS), "of clients in the mean; examples: not with privacy"
  ] = "uniform"
  aggregator: Annotated[
    Any,
    Choice(AGGREGATORS, functions),
    "of clients' messages, without privacy; or package.module:name",
  ] = "mean"
  compression: Annotated[Any, Choice(COMPRESSIONS), "of messages to the server"] = "none"
  secure_sum: Annotated[
    Any, Choice(SECURE_SUMS), "the server sees the sum of the messages alone"
  ] = "none"
  held_out: Annotated[
    float,
    rules.SHARE,
    "share of each client's rows that trains nothing, and on which the client is scored",
  ] = 0.0
  fine_tune_epochs: Annotated[
    int,
    rules.between(0, rules.MOST_EPOCHS),
    "after the last round each client trains the server's model on its own rows, and is scored; "
    "nothing is sent",
  ] = 0
  local: LocalConfig = dataclasses.field(default_factory=LocalConfig)
  client_optimizer: ClientOptimizerConfig = dataclasses.field(
    default_factory=ClientOptimizerConfig
  )
  server_optimizer: ServerOptimizerConfig = dataclasses.field(
    default_factory=ServerOptimizerConfig
  )
  privacy: Annotated[
    Central | Local | Both | NoPrivacy | FedFtrl | Distributed | Records,
    Choice(FED_PRIVACY),
    "the method of the guarantee to one user, or to one record of a silo, with what it alone reads",
  ] = dataclasses.field(default_factory=Central)
  num_rounds: Annotated[common.NumUpdates, "updates of the server"] = 100
  clients_per_round: Annotated[
    float,
    rules.POSITIVE,
    rules.not_below(1e-3),
    "expected, under poisson; exact, under fixed_size",
  ] = 10
  seed: common.Seed = 0
  noise_seed: common.NoiseSeed = None
  execution: Annotated[
    str, "auto | loop | vmap | pmap | shard_map: how clients of a round are computed"
  ] = "auto"
  num_devices: Annotated[int | None, COUNT, "pmap, shard_map; none: all"] = None
  num_threads: Annotated[
    int | None,
    rules.between(1, rules.MOST_THREADS),
    "loop: clients at once; none: as many as there are cores",
  ] = None
  memory_budget_gb: Annotated[
    float | None,
    rules.POSITIVE,
    "vmap, pmap, shard_map: of a block, in 1e9 bytes; none: 1",
  ] = None
  client_state: Annotated[
    str,
    rules.among(("memory", "disk")),
    "where what clients keep between rounds lies; disk: in the run's folder",
  ] = "memory"
  eval_every: Annotated[int, COUNT, "rounds"] = 10
  checkpoint_every: Annotated[int, COUNT, "rounds"] = 10
  targets: Annotated[
    tuple[float, ...],
    rules.each(rules.PROBABILITY),
    "rounds to these accuracies are reported",
  ] = (0.97, 0.99)
  stop_at_accuracy: Annotated[
    float | None, rules.PROBABILITY, "end at the first evaluation that reaches it"
  ] = None
  diagnostics: Annotated[bool, "log losses, norms and cohort sizes: NOT private"] = True
  release: common.Release = False
  writer: common.Writer = None
  audit: Annotated[
    ClientAudit | None,
    Choice({"none": type(None), "canaries": ClientAudit}),
    "train with canary clients; short: --audit",
  ] = None

  @property
  def is_private(self) -> bool:
    """Whether the method is one with a guarantee, whose keys are secret."""
    return not isinstance(self.privacy, NoPrivacy)

  @property
  def protects_users(self) -> bool:
    """Whether the guarantee is for a user, not for a record of a silo."""
    return not isinstance(self.privacy, NoPrivacy | Records)

  @property
  def protects_records(self) -> bool:
    """Whether each client is a silo, and the guarantee is for one record of a silo."""
    return isinstance(self.privacy, Records)

  @property
  def is_dealt(self) -> bool:
    """Whether the partition deals one data set to clients; else the data name their clients."""
    return name_of(self, "partition") in PARTITIONS

  @property
  def is_summed(self) -> bool:
    """Whether the server sees the sum of the messages alone."""
    return not isinstance(self.secure_sum, NoSecureSum)


def algorithm_of(config: FedConfig) -> described.AlgorithmFacts:
  """Returns the facts of a config's algorithm; `described.user_defined` if a user defined it.

  >>> algorithm_of(FedConfig(algorithm="fed_sgd")).local_steps
  False
  """
  name = name_of(config, "algorithm")
  return _DESCRIBED[name] if name in ALGORITHMS else described.user_defined(str(name))


def algorithms_that(
  holds: Callable[[described.AlgorithmFacts], bool],
) -> tuple[str, ...]:
  """Returns the names of the algorithms for which `holds` is true.

  >>> algorithms_that(lambda row: row.keeps_state)
  ('apfl', 'fed_bn', 'mr_mtl', 'scaffold')
  """
  return tuple(name for name in ALGORITHMS if holds(_DESCRIBED[name]))


def aggregation_of(config: FedConfig) -> described.AggregatorFacts | None:
  """Returns the facts of a config's aggregator; None for a user's own aggregator, whose facts are
  unknown.

  >>> aggregation_of(FedConfig(aggregator="krum")).tolerates(9, num_byzantine=2)
  2
  """
  return _AGGREGATIONS.get(name_of(config, "aggregator"))


def aggregators_that(holds: Callable[[described.AggregatorFacts], bool]) -> tuple[str, ...]:
  """Returns the names of the aggregators for which `holds` is true.

  >>> aggregators_that(lambda row: row.is_mean)
  ('mean',)
  """
  return tuple(name for name, row in _AGGREGATIONS.items() if holds(row))
