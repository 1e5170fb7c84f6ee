"""Typed configuration of an attack on a run, and of a table of several (`sweeps.attack_table`).

What is attacked is a config of the public launchers, unchanged: `train` is that of a model of
`launch.train`, of which membership is inferred or which is copied; `federate` is that of clients of
`launch.federate`, whose messages are inverted, or some of whom poison its rounds. So a defence
is a field of theirs, one flag:
`--config.train.privacy.epsilon=8`, `--config.federate.compression=top_k`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

from dpjax import attacks, validate
from dpjax.experiments.config import fields, rules
from dpjax.experiments.config import unread as unread_lib
from dpjax.experiments.config.fields import Choice, WithChoices
from dpjax.experiments.kinds import bounds, unused
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.central import embeddings
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.kinds.federated import unused as fed_unused
from dpjax.experiments.kinds.federated.config import (
  FedConfig,
  algorithm_of,
  algorithms_that,
)
from dpjax.validate import UserError

# The first two are told more, or less, than log odds: all confidences, the mean training loss.
MEMBERSHIP = ("confidence", "loss_rule", *attacks.MEMBERSHIP_ATTACKS)
LEAST_SHADOWS = (
  4  # so that some hold a record and some do not, whichever model is the target
)


@dataclasses.dataclass(frozen=True)
class Membership:
  """Membership inference, several attacks on the same targets: models trained on random
  halves of the records. Each is once the target, the others are its shadows.

  Args:
    methods: of `MEMBERSHIP`.
    num_shadows: models beside each target.
    queries: how often each model is asked about a record, of images: 1 as it is, 2 also mirrored,
      up to 18 also shifted by an eighth of their size. A record has the mean of its scores. They
      help against training on such copies, and weaken the attack where there was none.
    side_by_side: how many are trained at once, under vmap.
    target: params.npz of a model that `launch.train` has trained on all of the data, which is
      attacked in their place: its members are the training data, the others the test data.
  """

  methods: tuple[str, ...] = (
    "confidence", "loss", "lira_fixed", "bavaria", "rmia", "rmia_tuned",
  )  # fmt: skip
  num_shadows: int = 16
  side_by_side: int = 1
  queries: int = 1
  target: str | None = None
  room: ClassVar[str] = "train"
  module: ClassVar[str] = "members"
  task: ClassVar[str] = "membership"

  def __post_init__(self):
    if not self.methods or len(set(self.methods)) < len(self.methods):
      raise UserError(
        "must hold some, none of them twice", field="methods", value=self.methods
      )
    for name in self.methods:
      validate.one_of(MEMBERSHIP, methods=name)
    validate.integer_in(LEAST_SHADOWS, rules.MOST_RUNS, num_shadows=self.num_shadows)
    validate.integer_in(1, rules.MOST_RUNS, side_by_side=self.side_by_side)
    validate.integer_in(1, attacks.MOST_QUERIES, queries=self.queries)


@dataclasses.dataclass(frozen=True)
class CopyByAnswers:
  """`attacks.Extraction`: a copy of the model, taught by its answers to test inputs.

  Args:
    num_queries: how many are asked, one copy for each; the verdict is on the most.
    labels_only, decimals: what the owner keeps back; see `attacks.ask`.
    steps, learning_rate: of the copy's training (`attacks.fitting.Fit`).
  """

  num_queries: tuple[int, ...] = (10, 100)
  labels_only: bool = False
  decimals: int | None = None
  steps: int = 2000
  learning_rate: float = 1e-3
  room: ClassVar[str] = "train"
  module: ClassVar[str] = "copies"
  task: ClassVar[str] = "extraction"

  def __post_init__(self):
    sizes = validate.several(num_queries=self.num_queries)
    if not sizes or list(sizes) != sorted({*sizes}):
      raise UserError(
        "must hold some, each more than before", field="num_queries", value=self.num_queries
      )
    for size in sizes:
      validate.integer_at_least(1, num_queries=size)
    validate.integer_in(1, rules.MOST_STEPS, steps=self.steps)
    validate.positive(learning_rate=self.learning_rate)
    if self.decimals is not None:
      validate.integer_at_least(0, decimals=self.decimals)
    if self.decimals is not None and self.labels_only:
      raise UserError(
        "labels have none; must be None", field="decimals", value=self.decimals
      )


@dataclasses.dataclass(frozen=True)
class ClassSearch:
  """`attacks.ClassInversion` of every class, judged by a network of the same shape that was
  trained on the test records.

  Args:
    starts: random ones of each class.
    l2: of the prior, near the mean of the test inputs, in whose range the search stays.
    judge_steps: of the judge's training (`attacks.fitting.Fit`).
  """

  starts: int = 1
  steps: int = 500
  learning_rate: float = 0.05
  temperature: float = 1.0
  l2: float = 0.01
  total_variation: float = 0.0
  judge_steps: int = 2000
  room: ClassVar[str] = "train"
  module: ClassVar[str] = "class_pictures"
  task: ClassVar[str] = "class_inversion"

  def __post_init__(self):
    validate.integer_in(1, rules.MOST_RUNS, starts=self.starts)
    counts = {"steps": self.steps, "judge_steps": self.judge_steps}
    validate.integer_in(1, rules.MOST_STEPS, **counts)
    self.method()

  def method(self, **prior: Any) -> attacks.ClassInversion:
    """What searches, given mean, low and high of the inputs."""
    return attacks.ClassInversion(
      steps=self.steps,
      learning_rate=self.learning_rate,
      temperature=self.temperature,
      l2=self.l2,
      total_variation=self.total_variation,
      **prior,
    )


@dataclasses.dataclass(frozen=True)
class _Inversion:
  """Settings of every inversion of messages.

  Args:
    uniform_init: draw every weight from U(-a, a), as the first papers did, instead of by the
      model's own initialisation.
    labels: infer (from the last layer's gradient) | known.
  """

  uniform_init: float | None = None
  labels: str = "infer"
  room: ClassVar[str] = "federate"
  module: ClassVar[str] = "inversion"
  task: ClassVar[str] = "inversion"

  def __post_init__(self):
    if self.uniform_init is not None:
      validate.positive(uniform_init=self.uniform_init)
    validate.one_of(("infer", "known"), labels=self.labels)


@dataclasses.dataclass(frozen=True)
class DenseFirst(_Inversion):
  """The input of a first dense layer, by one division: exact for one example.

  Args:
    layer: name of its module.
  """

  layer: str = "dense_0"


@dataclasses.dataclass(frozen=True)
class _SearchInversion(_Inversion):
  """What searches for inputs; steps, restarts, finalists and trial are those of `Inversion`."""

  steps: int = 3000
  restarts: int = 12
  finalists: int = 2
  trial: int = 200

  def __post_init__(self):
    super().__post_init__()
    counts = {name: getattr(self, name) for name in ("steps", "restarts", "finalists")}
    validate.integer_in(1, rules.MOST_STEPS, trial=self.trial, **counts)


@dataclasses.dataclass(frozen=True)
class DlgInversion(_SearchInversion):
  """`attacks.Dlg`.

  Args:
    line_search: False takes L-BFGS steps of a fixed length, which fail on tanh networks.
  """

  line_search: bool = True

  def method(self) -> attacks.Dlg:
    """What moves the guesses."""
    return attacks.Dlg(steps=self.steps, line_search=self.line_search)


@dataclasses.dataclass(frozen=True)
class CosineInversion(_SearchInversion):
  """`attacks.CosineAdam` on images in [0, 1]."""

  total_variation: float = 0.1

  def __post_init__(self):
    super().__post_init__()
    validate.non_negative(total_variation=self.total_variation)

  def method(self) -> attacks.CosineAdam:
    """What moves the guesses."""
    return attacks.CosineAdam(steps=self.steps, total_variation=self.total_variation)


@dataclasses.dataclass(frozen=True)
class _Poisoning:
  """Settings of every poisoning of federated rounds; see `attacks.poisoning`.

  Args:
    fraction: of the clients, who attack; which ones follows from the seed.
  """

  fraction: float = 0.2
  room: ClassVar[str] = "federate"
  module: ClassVar[str] = "poisoned_rounds"
  task: ClassVar[str] = "poisoning"
  colludes: ClassVar[bool] = False

  def __post_init__(self):
    validate.share(fraction=self.fraction)
    self.method()

  def method(self) -> attacks.Poisoning:
    """Returns what attackers do."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LabelFlip(_Poisoning):
  """`attacks.label_flip`."""

  source: int = 1
  target: int = 7
  factor: float = 1.0

  def method(self) -> attacks.Poisoning:
    """Returns what attackers do."""
    return attacks.label_flip(self.source, self.target, factor=self.factor)


@dataclasses.dataclass(frozen=True)
class ScaledUpdate(_Poisoning):
  """`attacks.scaled_update`."""

  factor: float = -5.0

  def method(self) -> attacks.Poisoning:
    """Returns what attackers do."""
    return attacks.scaled_update(self.factor)


@dataclasses.dataclass(frozen=True)
class Backdoor(_Poisoning):
  """`attacks.backdoor`; size and value are those of its `Trigger`."""

  target: int = 0
  size: int = 3
  value: float = 1.0
  share: float = 0.5
  factor: float = 1.0

  def method(self) -> attacks.Poisoning:
    """Returns what attackers do."""
    trigger = attacks.Trigger(size=self.size, value=self.value)
    return attacks.backdoor(
      self.target, trigger=trigger, share=self.share, factor=self.factor
    )


@dataclasses.dataclass(frozen=True)
class _Colluding(_Poisoning):
  """Attackers who agree, and know what honest clients send; see `attacks.collusion`."""

  colludes: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class LittleIsEnough(_Colluding):
  """`attacks.alie`; z None: the largest with enough honest messages further off."""

  z: float | None = None

  def method(self) -> attacks.Poisoning:
    """Returns what attackers do."""
    return attacks.alie(self.z)


@dataclasses.dataclass(frozen=True)
class MinMax(_Colluding):
  """`attacks.min_max`; direction: std | unit | sign."""

  direction: str = "std"

  def method(self) -> attacks.Poisoning:
    """Returns what attackers do."""
    return attacks.min_max(self.direction)


@dataclasses.dataclass(frozen=True)
class MinSum(_Colluding):
  """`attacks.min_sum`; direction: std | unit | sign."""

  direction: str = "std"

  def method(self) -> attacks.Poisoning:
    """Returns what attackers do."""
    return attacks.min_sum(self.direction)


ATTACKS = {
  "membership": Membership,
  "extraction": CopyByAnswers,
  "class_inversion": ClassSearch,
  "dense_first": DenseFirst,
  "dlg": DlgInversion,
  "cosine": CosineInversion,
  "label_flip": LabelFlip,
  "scaled_update": ScaledUpdate,
  "backdoor": Backdoor,
  "alie": LittleIsEnough,
  "min_max": MinMax,
  "min_sum": MinSum,
}


@dataclasses.dataclass
class AttackConfig(WithChoices):
  """Configuration of an attack on a run, or of a table of attacks.

  `rows` maps a label to the fields that differ from this config, by dotted name, such as
  {"membership, none": {"train.privacy.method": "sgd"}, "DLG, top-k": {"attack": "dlg",
  "federate.compression": "top_k"}}; none is one row. What precedes the first comma is the
  attack's name in the table, what follows the defence's. `beside` maps labels to what others
  have published for them, which the table shows in a column of its own.
  """

  train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
  federate: FedConfig = dataclasses.field(default_factory=FedConfig)
  # membership | extraction | class_inversion | dense_first | dlg | cosine | label_flip |
  # scaled_update | backdoor | alie | min_max | min_sum
  attack: Annotated[Any, Choice(ATTACKS)] = "membership"
  rows: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  beside: dict[str, str] = dataclasses.field(default_factory=dict)
  seed: int = 0
  title: str = ""
  of_table: ClassVar[tuple[str, ...]] = ("rows", "beside", "title")  # not of a run

  @property
  def data(self) -> Any:
    """Of the room that is attacked."""
    return room(self).data

  @property
  def model(self) -> Any:
    """Of the room that is attacked."""
    return room(self).model


def room(config: AttackConfig) -> TrainConfig | FedConfig:
  """Returns the config of the run that is attacked."""
  return getattr(config, config.attack.room)


def other(config: AttackConfig) -> str:
  """The name of the room that this attack does not read."""
  return "federate" if config.attack.room == "train" else "train"


@bounds.names_fields
def check(config: AttackConfig) -> None:
  """Raises UserError for what can be told of one run without data."""
  bounds.typed(config)
  validate.integer_at_least(0, seed=config.seed)
  checks = {"train": central.check, "federate": federated.check}
  with bounds.within(config.attack.room):
    checks[config.attack.room](room(config))
  if config.attack.room == "train":
    _check_train(config.train)
    dealt = fields.name_of(config, "attack") == "membership"
    normalized = fields.name_of(config.train.privacy, "normalization")
    if dealt and normalized != "per_example":
      raise UserError(
        "must be 'per_example' for attack='membership', whose shadow models would "
        "share statistics of one half",
        field="train.privacy.normalization",
        value=normalized,
      )
  else:
    _check_federate(config.federate, config.attack)
  unread_lib.refuse(config, {other(config): "an attack on it"} | _unread(config))


def unread(config: AttackConfig) -> unread_lib.Unused:
  """The fields that one attack does not read: those of its own, and those that the attacked run
  does not read.

  >>> unread(AttackConfig())["train.audit.score"]
  'audit.enabled'
  """
  section = config.attack.room
  of_run = (
    unused.of_training(config.train)
    if section == "train"
    else fed_unused.of_federation(config.federate)
  )
  own = {other(config): "an attack on it"} | _unread(config)
  return own | unread_lib.within(section, of_run)


def _check_train(train: TrainConfig) -> None:
  if train.audit.enabled:
    raise UserError(
      "must be false, the attack deals the records", field="train.audit.enabled", value=True
    )
  if train.release:
    raise UserError(
      "must be false, an attack trains many models", field="train.release", value=True
    )
  if train.model.name == "transformer":
    raise UserError("must classify records", field="train.model.name", value="transformer")
  embeddings.refuse(train, "train")
  trainable = fields.name_of(train, "trainable")
  if trainable != "all":
    told = f"train.trainable={trainable!r}"
    raise UserError(f"{told}: must be 'all', an attack trains whole models")


def _check_federate(federate: FedConfig, attack: Any) -> None:
  algorithm = algorithm_of(federate)
  poisoned = attack.task == "poisoning"
  if poisoned and not algorithm.wraps_clients:
    raise UserError(
      f"must be {algorithms_that(lambda row: row.wraps_clients)}, whose clients can lie",
      field="federate.algorithm",
      value=algorithm.name,
    )
  summed = fields.name_of(federate, "secure_sum")
  if getattr(attack, "colludes", False) and summed != "none":
    raise UserError(
      "must be 'none' for attackers who see the messages of honest clients",
      field="federate.secure_sum",
      value=summed,
    )
  if not poisoned and not algorithm.plain_client:
    raise UserError(
      f"must be {algorithms_that(lambda row: row.plain_client)}, whose clients are inverted",
      field="federate.algorithm",
      value=algorithm.name,
    )
  if federate.model.name == "transformer":
    raise UserError(
      "must take images or numbers", field="federate.model.name", value="transformer"
    )


def _unread(config: AttackConfig) -> unread_lib.Unused:
  """Fields of the attacked room that decide nothing of what an attacker sees."""
  if config.attack.room == "train":
    names = ("eval_every", "checkpoint_every", "diagnostics", "seed", *TrainConfig.where)
    if getattr(config.attack, "target", None) is not None:  # whose run has paid already
      names += ("privacy.epsilon_budget",)
    needs = unread_lib.needs(False, "a run of launch.train itself", *names)
  else:
    names = ("eval_every", "checkpoint_every", "targets", "stop_at_accuracy")
    names += ("diagnostics", "release", "seed", "audit", "client_state")
    if config.attack.task == "inversion":  # which looks at no aggregate
      names += ("memory_budget_gb", "weighting")
      names += ("secure_sum.simulated", "secure_sum.dropout_prob")
      names += ("server_optimizer", "execution", "num_devices", "num_threads", "aggregator")
    needs = unread_lib.needs(False, "a run of launch.federate itself", *names)
  return unread_lib.within(config.attack.room, needs)
