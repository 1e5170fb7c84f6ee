"""Settings of the attacks that share limits with runs; see `attack_settings`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from dpjax import attacks, validate
from dpjax.attacks.attack_settings import AttackSettings
from dpjax.experiments.config import rules
from dpjax.types import ArrayTree, HostArray, Params
from dpjax.validate import UserError

# The first two use more, or less, than log odds: all confidences, or the mean training
# loss.
MEMBERSHIP = ("confidence", "loss_rule", *attacks.MEMBERSHIP_ATTACKS)
# With fewer, a record may be in all shadows or in none, for some target.
LEAST_SHADOWS = 4


@dataclasses.dataclass(frozen=True)
class Membership(AttackSettings):
  """Membership inference, with several attacks on the same targets: models trained on
  random halves of the records. Each is the target once, with the others as its shadows.

  Args:
    methods: names of `MEMBERSHIP`.
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
  module: ClassVar[str] = "dpjax.experiments.kinds.attack.members"
  task: ClassVar[str] = "membership"
  deals_records: ClassVar[bool] = True

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
class CopyByAnswers(AttackSettings):
  """`attacks.Extraction`: a copy of the model, trained on its answers to test inputs.

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
  module: ClassVar[str] = "dpjax.experiments.kinds.attack.copies"
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
class ClassSearch(AttackSettings):
  """`attacks.ClassInversion` of every class. The judge is a network of the same shape,
  trained on the test records.

  Args:
    starts: random ones of each class.
    l2: weight of the prior, near the mean of the test inputs, in whose range the search stays.
    judge_steps: steps of the judge's training (`attacks.fitting.Fit`).
  """

  starts: int = 1
  steps: int = 500
  learning_rate: float = 0.05
  temperature: float = 1.0
  l2: float = 0.01
  total_variation: float = 0.0
  judge_steps: int = 2000
  room: ClassVar[str] = "train"
  module: ClassVar[str] = "dpjax.experiments.kinds.attack.class_pictures"
  task: ClassVar[str] = "class_inversion"

  def __post_init__(self):
    validate.integer_in(1, rules.MOST_RUNS, starts=self.starts)
    counts = {"steps": self.steps, "judge_steps": self.judge_steps}
    validate.integer_in(1, rules.MOST_STEPS, **counts)
    self.method()

  def method(self, **prior: Any) -> attacks.ClassInversion:
    """Returns the search, given mean, low and high of the inputs."""
    return attacks.ClassInversion(
      steps=self.steps,
      learning_rate=self.learning_rate,
      temperature=self.temperature,
      l2=self.l2,
      total_variation=self.total_variation,
      **prior,
    )


@dataclasses.dataclass(frozen=True)
class _Inversion(AttackSettings):
  """Settings common to all inversions of messages.

  Args:
    uniform_init: draw every weight from U(-a, a), as the first papers did, instead of by the
      model's own initialisation.
    labels: infer (from the last layer's gradient) | known.
  """

  uniform_init: float | None = None
  labels: str = "infer"
  room: ClassVar[str] = "federate"
  module: ClassVar[str] = "dpjax.experiments.kinds.attack.inversion"
  task: ClassVar[str] = "inversion"
  # Fields that no inversion reads: it uses no aggregate.
  unread: ClassVar[tuple[str, ...]] = (
    "memory_budget_gb",
    "weighting",
    "secure_sum.simulated",
    "secure_sum.dropout_prob",
    "server_optimizer",
    "execution",
    "num_devices",
    "num_threads",
    "aggregator",
  )

  def __post_init__(self):
    if self.uniform_init is not None:
      validate.positive(uniform_init=self.uniform_init)
    validate.one_of(("infer", "known"), labels=self.labels)

  def sent(self, params: Params, model: Any, public: HostArray, seed: int) -> Params:
    """Returns what the server sends: an honest server's parameters.

    Args:
      model: whose parameters they are.
      public: [N, ...], inputs that the server has.
      seed: of the run.
    """
    del model, public, seed
    return params


@dataclasses.dataclass(frozen=True)
class DenseFirst(_Inversion):
  """The input of a first dense layer, by one division: exact for one example.

  Args:
    layer: name of its module.
  """

  layer: str = "dense_0"

  def read(self, seen: ArrayTree, batch_size: int) -> np.ndarray:
    """Returns one guess for all examples of a message: [B, d], d the layer's inputs."""
    guess = attacks.first_dense(seen, self.layer)
    return np.broadcast_to(guess, (batch_size, guess.size))


@dataclasses.dataclass(frozen=True)
class Imprint(DenseFirst):
  """`attacks.imprint`: a server whose model shows a whole batch, one input from each bin.

  The bins are quantiles of the test inputs, which the server is taken to have.

  Args:
    gain: scale of the kernels after the first.
  """

  gain: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    validate.positive(gain=self.gain)

  def sent(self, params: Params, model: Any, public: HostArray, seed: int) -> Params:
    """Returns what the server sends in place of the parameters.

    Raises:
      UserError: an activation of the model that is not 0 below the threshold.
    """
    activation = getattr(model, "activation", "relu")
    if activation != "relu":
      raise UserError(
        "must be 'relu' for attack='imprint', whose units are bins",
        field="federate.model.options.activation",
        value=activation,
      )
    return attacks.imprint(params, public, layer=self.layer, gain=self.gain, seed=seed)

  def read(self, seen: ArrayTree, batch_size: int) -> np.ndarray:
    """Returns the contents of the fullest bins: [B, d]."""
    return attacks.read_imprint(seen, batch_size=batch_size, layer=self.layer)


@dataclasses.dataclass(frozen=True)
class _SearchInversion(_Inversion):
  """Settings of a search for inputs: steps, restarts, finalists and trial of `Inversion`."""

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
    """Returns the method that moves the guesses."""
    return attacks.Dlg(steps=self.steps, line_search=self.line_search)


@dataclasses.dataclass(frozen=True)
class CosineInversion(_SearchInversion):
  """`attacks.CosineAdam` on images in [0, 1]."""

  total_variation: float = 0.1

  def __post_init__(self):
    super().__post_init__()
    validate.non_negative(total_variation=self.total_variation)

  def method(self) -> attacks.CosineAdam:
    """Returns the method that moves the guesses."""
    return attacks.CosineAdam(steps=self.steps, total_variation=self.total_variation)
