"""Settings of attacks, with limits from `rules` (base class: `attacks.attack_settings`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import numpy as np

from dpjax import attacks, validate
from dpjax.attacks.attack_settings import AttackSettings
from dpjax.attacks.queries import MOST_QUERIES
from dpjax.attacks.rogue_server import read_imprint
from dpjax.experiments.config import rules
from dpjax.experiments.config.common import COUNT
from dpjax.experiments.kinds.attack.methods import METHODS, reads
from dpjax.types import ArrayTree, HostArray, Params
from dpjax.validate import UserError

# Methods that need no answers but log odds and the largest probability of any label.
_PLAIN = tuple(name for name, method in METHODS.items() if not method.reads)
# An attack compares shadows with and without a record. Models come in complementary pairs, and a
# target's own complement is no shadow. With 4 shadows a whole pair is always left, so neither group
# is empty.
LEAST_SHADOWS = 4
_STEPS = rules.between(1, rules.MOST_STEPS)


def _check_methods(methods: tuple[str, ...], known: Iterable[str]) -> None:
  if not methods or len(set(methods)) < len(methods):
    raise UserError("must hold some, none of them twice", field="methods", value=methods)
  validate.one_of(known, **validate.entries(methods=methods))


def _check_rising(least: int, **named: tuple[int, ...]) -> None:
  """Raises UserError unless each is rising integers of at least `least`, one or more."""
  for name, values in named.items():
    sizes = validate.several(**{name: values})
    if not sizes or list(sizes) != sorted({*sizes}):
      raise UserError("must hold some, each more than before", field=name, value=values)
    for size in sizes:
      validate.integer_at_least(least, **{name: size})


@dataclasses.dataclass(frozen=True)
class Membership(AttackSettings):
  """Membership inference, with several attacks on the same targets: models trained on
  random halves of the records. Each model is the target once. Its shadows are the others, except
  the model that was trained on exactly the other records.

  Args:
    queries: how often each model is asked about a record. More than 1 needs images: 2 adds the
      mirror image, and up to 18 add shifts by an eighth of the size. The score of a record is the
      mean over its queries. More queries help against models that were trained with mirrored or
      shifted images, and weaken the attack on other models.
    methods: names of attacks. `quantile_regression` uses no shadow models. It knows the answers
      about the first 2,000 test records, which no model has seen, and the pixels and labels of all
      records. `attack_network` reads a model's probabilities of all classes, of the records as
      they are.
    target: params.npz of a model that `launch.train` has trained on all training data. It is
      attacked in place of models trained here. Training data are members, test data non-members.
  """

  methods: Annotated[tuple[str, ...], "all of " + " | ".join(METHODS)] = (
    "confidence", "loss", "lira_fixed", "bavaria", "rmia", "rmia_tuned",
  )  # fmt: skip
  num_shadows: Annotated[
    int, rules.between(LEAST_SHADOWS, rules.MOST_RUNS), "models beside each target"
  ] = 16
  side_by_side: Annotated[
    int, rules.between(1, rules.MOST_RUNS), "models trained at once, under vmap"
  ] = 1
  queries: Annotated[
    int,
    rules.between(1, MOST_QUERIES),
    "how often each model is asked about a record: as it is, mirrored, shifted",
  ] = 1
  target: Annotated[
    str | None, "params.npz of launch.train, attacked in place of models trained here"
  ] = None
  section: ClassVar[str] = "train"
  module: ClassVar[str] = "dpjax.experiments.kinds.attack.members"
  task: ClassVar[str] = "membership"
  deals_records: ClassVar[bool] = True

  def __post_init__(self):
    _check_methods(self.methods, METHODS)
    if "public_log_odds" in reads(self.methods) and self.target is not None:
      raise UserError(
        "must not hold 'quantile_regression' beside attack.target: its public records are the test "
        "data, which are the non-members there",
        field="methods",
        value=self.methods,
      )
    rules.check_settings(self)


@dataclasses.dataclass(frozen=True)
class FedMembership(AttackSettings):
  """Membership inference on the server's model of a finished run of `launch.federate`: of records,
  or of whole clients. Shadow models are federations of the run's own config, each with half of all
  records, or of all clients.

  Args:
    methods: names of attacks, each of which needs log odds alone, or the largest probability.
    unit: "record", or "client" (dealt by the partition, which deals the test data to as many
      clients that did not take part).
    target: params.npz of the run.
  """

  methods: Annotated[tuple[str, ...], "all of " + " | ".join(_PLAIN)] = (
    "confidence",
    "loss",
    "lira_fixed",
    "bavaria",
    "rmia",
  )
  num_shadows: Annotated[
    int, rules.between(LEAST_SHADOWS, rules.MOST_RUNS), "federations beside the target"
  ] = 16
  unit: Annotated[
    str, rules.among(("record", "client")), "whose membership is inferred"
  ] = "record"
  target: Annotated[
    str | None, "params.npz of launch.federate; python -m launch.attack --run gives it"
  ] = None
  section: ClassVar[str] = "federate"
  module: ClassVar[str] = "dpjax.experiments.kinds.attack.fed_members"
  task: ClassVar[str] = "membership"
  wants: ClassVar[str] = ""
  # What `members` reads: each model is asked once, and trained alone.
  queries: ClassVar[int] = 1
  side_by_side: ClassVar[int] = 1

  def __post_init__(self):
    _check_methods(self.methods, _PLAIN)
    rules.check_settings(self)


@dataclasses.dataclass(frozen=True)
class CopyByAnswers(AttackSettings):
  """`attacks.Extraction`: a copy of the model, trained on the model's answers to test inputs."""

  num_queries: Annotated[
    tuple[int, ...], "how many are asked, one copy for each; the verdict is on the most"
  ] = (10, 100)
  labels_only: Annotated[bool, "the owner keeps back all but the label"] = False
  decimals: Annotated[
    int | None, rules.at_least(0), "digits of an answer; none: all of them"
  ] = None
  steps: Annotated[int, rules.between(1, rules.MOST_STEPS), "of the copy's training"] = 2000
  learning_rate: Annotated[float, rules.POSITIVE, "of the copy's training"] = 1e-3
  section: ClassVar[str] = "train"
  module: ClassVar[str] = "dpjax.experiments.kinds.attack.copies"
  task: ClassVar[str] = "extraction"

  def __post_init__(self):
    _check_rising(1, num_queries=self.num_queries)
    rules.check_settings(self)
    if self.decimals is not None and self.labels_only:
      raise UserError(
        "labels have none; must be None", field="decimals", value=self.decimals
      )


@dataclasses.dataclass(frozen=True)
class ClassSearch(AttackSettings):
  """`attacks.ClassInversion` of every class, judged by a network of the model's architecture that
  was trained on the test records. The search stays in the range of the test inputs."""

  starts: Annotated[int, rules.between(1, rules.MOST_RUNS), "random ones of each class"] = 1
  steps: Annotated[int, rules.between(1, rules.MOST_STEPS), "of the search"] = 500
  learning_rate: Annotated[float, "of the search"] = 0.05
  temperature: Annotated[float, "by which logits are divided"] = 1.0
  l2: Annotated[float, "of the prior, near the mean of the test inputs"] = 0.01
  total_variation: Annotated[float, "of the prior, for smooth images"] = 0.0
  judge_steps: Annotated[
    int, rules.between(1, rules.MOST_STEPS), "of the judge's training"
  ] = 2000
  section: ClassVar[str] = "train"
  module: ClassVar[str] = "dpjax.experiments.kinds.attack.class_pictures"
  task: ClassVar[str] = "class_inversion"

  def __post_init__(self):
    rules.check_settings(self)
    self.method()

  def method(self, **prior: Any) -> attacks.ClassInversion:
    """Returns the search. `prior` holds mean, low and high of the inputs."""
    return attacks.ClassInversion(
      steps=self.steps,
      learning_rate=self.learning_rate,
      temperature=self.temperature,
      l2=self.l2,
      total_variation=self.total_variation,
      **prior,
    )


@dataclasses.dataclass(frozen=True)
class WrittenText(AttackSettings):
  """Secrets among the lines that a language model writes by itself (`attacks.text_extraction`).

  Invented records, a name and a number each, take the place of some training lines. The attacker
  lets the model write, ranks its lines in three ways, and looks at the first of each ranking. The
  attack reads texts of bytes. Every line, of the data too, begins and ends with a line end.
  """

  template: Annotated[str, "of a record; holds {name} and {number}"] = (
    "the number of {name} is {number}."
  )
  digits: Annotated[int, rules.between(1, 7), "of the number"] = 6
  copies: Annotated[
    tuple[int, ...], "lines of each record, by group; 0: a control that is never there"
  ] = (0, 1, 4, 16)
  records_each: Annotated[int, rules.between(1, 1000), "records of each group"] = 8
  num_lines: Annotated[int, rules.between(1, 10**6), "that the model writes"] = 3000
  first: Annotated[
    tuple[int, ...], "how many lines of a ranking are looked at; the verdict is on the most"
  ] = (10, 100)
  prompt_length: Annotated[
    int, rules.at_least(0), "bytes of a test line that a line begins with"
  ] = 0
  temperature: Annotated[float, rules.POSITIVE, "by which logits are divided"] = 1.0
  top_k: Annotated[int | None, COUNT, "likeliest bytes that are drawn; none: all"] = 40
  section: ClassVar[str] = "train"
  module: ClassVar[str] = "dpjax.experiments.kinds.attack.written_text"
  task: ClassVar[str] = "text_extraction"
  # A secret line takes the place of another, so the attack chooses the records.
  deals_records: ClassVar[bool] = True
  of_text: ClassVar[bool] = True

  def __post_init__(self):
    rules.check_settings(self)
    for word in ("{name}", "{number}"):
      if not isinstance(self.template, str) or self.template.count(word) != 1:
        raise UserError(f"must hold one {word!r}", field="template", value=self.template)
    if "\n" in self.template or "\0" in self.template:
      raise UserError(
        "must be one line, without a zero byte", field="template", value=self.template
      )
    _check_rising(0, copies=self.copies)
    _check_rising(1, first=self.first)
    if self.copies == (0,):
      raise UserError("must plant a record", field="copies", value=self.copies)


@dataclasses.dataclass(frozen=True)
class _Inversion(AttackSettings):
  """Settings that all inversions of messages share."""

  uniform_init: Annotated[
    float | None,
    rules.POSITIVE,
    "a: every weight from U(-a, a), as the first papers did; none: the model's own",
  ] = None
  labels: Annotated[
    str, rules.among(("infer", "known")), "infer: from the last layer's gradient"
  ] = "infer"
  section: ClassVar[str] = "federate"
  module: ClassVar[str] = "dpjax.experiments.kinds.attack.inversion"
  task: ClassVar[str] = "inversion"
  # Fields that change no inversion: they decide how a round is computed, or what the server does
  # with messages that it has seen.
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
    rules.check_settings(self)

  def sent(self, params: Params, model: Any, public: HostArray, seed: int) -> Params:
    """Returns the parameters that the server sends. This server is honest and changes nothing.

    Args:
      model: model that has these parameters.
      public: [N, ...], inputs that the server has.
      seed: seed of the run.
    """
    del model, public, seed
    return params


@dataclasses.dataclass(frozen=True)
class DenseFirst(_Inversion):
  """Reads the input of a first dense layer by one division; exact for a batch of one example."""

  layer: Annotated[str, "name of its module"] = "dense_0"

  def read(self, seen: ArrayTree, batch_size: int) -> np.ndarray:
    """Returns one guess for all B examples of a message, [B, d]; d is the layer's input width."""
    guess = attacks.first_dense(seen, self.layer)
    return np.broadcast_to(guess, (batch_size, guess.size))


@dataclasses.dataclass(frozen=True)
class Imprint(DenseFirst):
  """`attacks.imprint`: a server that sends a leaking model, and reads one input from each bin.

  The bins are quantiles of the test inputs. The server is assumed to have these inputs.

  Args:
    gain: scale of the kernels that have one row for each unit of the first layer.
  """

  gain: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    validate.positive(gain=self.gain)

  def sent(self, params: Params, model: Any, public: HostArray, seed: int) -> Params:
    """Returns the malicious parameters that the server sends.

    Raises:
      UserError: the model's activation is not "relu", which is 0 below the threshold.
    """
    activation = getattr(model, "activation", "relu")
    if activation != "relu":
      raise UserError(
        "must be 'relu' for attack='imprint', whose units are bins",
        field="target.model.options.activation",
        value=activation,
      )
    return attacks.imprint(params, public, layer=self.layer, gain=self.gain, seed=seed)

  def read(self, seen: ArrayTree, batch_size: int) -> np.ndarray:
    """Returns the inputs in the fullest bins, [batch_size, d]; rows of 0 if fewer are full."""
    return read_imprint(seen, batch_size=batch_size, layer=self.layer)


@dataclasses.dataclass(frozen=True)
class Fishing(Imprint):
  """`attacks.fish`: a server that reads inputs of one class, from the bins of `attacks.imprint`.

  Args:
    gain: scale of the kernels that have one row for each unit of the first layer.
    label: class that is fished for.
    head: name of the last layer.
  """

  label: Annotated[int, rules.at_least(0), "class that is fished for"] = 0
  head: Annotated[str, "name of the last layer"] = "head"

  def sent(self, params: Params, model: Any, public: HostArray, seed: int) -> Params:
    """Returns the malicious parameters that the server sends: the parameters of `Imprint` with a
    changed last layer."""
    trap = super().sent(params, model, public, seed)
    try:
      return attacks.fish(trap, self.label, layer=self.head)
    except UserError as error:
      # Errors of `attacks.fish` call the last layer `layer`. The field for it here is `head`.
      field = "head" if error.field.startswith("layer") else error.field
      raise error.of(field=f"attack.{field}") from error


@dataclasses.dataclass(frozen=True)
class _SearchInversion(_Inversion):
  """Settings of a search for inputs, as in `attacks.Inversion`."""

  steps: Annotated[int, _STEPS, "of a search that is carried to its end"] = 3000
  restarts: Annotated[int, _STEPS, "random guesses that begin"] = 12
  finalists: Annotated[int, _STEPS, "guesses that go on after the trial"] = 2
  trial: Annotated[int, _STEPS, "steps of every guess"] = 200


@dataclasses.dataclass(frozen=True)
class DlgInversion(_SearchInversion):
  """Settings of `attacks.Dlg`, which matches messages by L-BFGS."""

  line_search: Annotated[
    bool, "false: L-BFGS steps of a fixed length, which fail on tanh networks"
  ] = True

  def method(self) -> attacks.Dlg:
    """Returns the method that moves the guesses."""
    return attacks.Dlg(steps=self.steps, line_search=self.line_search)


@dataclasses.dataclass(frozen=True)
class CosineInversion(_SearchInversion):
  """Settings of `attacks.CosineAdam` on inputs in [0, 1]."""

  total_variation: Annotated[
    float, rules.NON_NEGATIVE, "weight of smoothness in the search"
  ] = 0.1

  def method(self) -> attacks.CosineAdam:
    """Returns the method that moves the guesses."""
    return attacks.CosineAdam(steps=self.steps, total_variation=self.total_variation)
