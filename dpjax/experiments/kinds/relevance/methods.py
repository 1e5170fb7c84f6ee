"""Methods of a run of relevance, each with the settings that it alone reads.

A class gives the settings of `dpjax.relevance` from its own fields, which have the same names. The
fields of a chosen value, such as `method.features.clip`, count as fields of the method.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from dpjax import relevance
from dpjax.experiments.config import choices, common, rules
from dpjax.experiments.config.choices import Choice, settings
from dpjax.experiments.config.common import COUNT
from dpjax.experiments.config.fields import WithChoices
from dpjax.experiments.config.naming import Gives
from dpjax.experiments.config.sections import NetworkConfig
from dpjax.models.activations import ACTIVATIONS
from dpjax.relevance.feature_budget import PRESETS
from dpjax.relevance.feature_shares import NORMS
from dpjax.relevance.settings import ITERATIVE, RELATIONS, RELEVANCE_NOISE
from dpjax.validate import UserError

_PAPER = relevance.Paper()
_RIGOROUS = relevance.Rigorous()
_PRIVATE = relevance.Private()
_ADLM = relevance.AdLM()
_TRAINING = relevance.Training()

_Activation1 = Annotated[
  str, rules.among(ACTIVATIONS), "of model 1, whose relevance is propagated"
]
_Adam = Annotated[float, common.LearningRate, "of Adam, which trains without noise"]
_Sgd = Annotated[
  float, common.LearningRate, Gives("private.learning_rate"), "of SGD on noisy gradients"
]
_Clip = Annotated[common.ClipNorm, "bound on the gradient of one example"]
_Records = Annotated[
  int | None, COUNT, "average the relevance over the first so many; none: all"
]
# Scales of noise are divided by shares of the relevance, and must stay numbers of float32.
_Floor = Annotated[
  float | None,
  rules.within_range(1e-12, 1e12),
  "of the noisy relevance; none: 0.1 / d",
]
_SCALE = rules.within_range(1e-9, 1e9)
_POWER = rules.within_range(0, 10)


def _setting(words: str, **defaults: Any) -> type:
  """Returns a class with this docstring and these fields, for a `Choice`."""
  return settings(dict, types.SimpleNamespace(__doc__=words), **defaults)


def leaves_of(section: Any) -> dict[str, Any]:
  """Returns last name -> value of each field of a method, also of its chosen values."""
  return {leaf.path.rpartition(".")[2]: leaf.value for leaf in choices.leaves(section)}


def _of(section: Any, kind: Any, **more: Any) -> Any:
  """Returns the library's settings, each field from the leaf of this name."""
  given = leaves_of(section) | more
  names = [field.name for field in dataclasses.fields(kind)]
  return kind(**{name: given[name] for name in names if name in given})


@dataclasses.dataclass
class Method(WithChoices):
  """What every method has."""

  # Fields of RelevanceConfig that the method does not read.
  leaves_out: ClassVar[tuple[str, ...]] = ()

  @property
  def propagates(self) -> bool:
    """Whether there is a model 1, whose relevance the method reads."""
    return False

  def rows(self) -> Iterator[tuple[bool, str, str]]:
    """Yields (whether it is read, what it would need, field), as for a whole config."""
    yield from ()

  def parts(self) -> dict[str, Any]:
    """Returns the settings of `relevance.Inputs` that come from this method."""
    return {}

  def check(self, data_name: str) -> None:
    """Raises UserError if the settings do not fit each other, or the data of this name."""
    self.parts()


# --- RADP as in the paper


_CUSTOM = {
  name: getattr(_PAPER, name) for name in ("beta_norm", "times_batch_size", "draw")
}
READINGS = {
  **{name: _setting("A reading of `feature_budget.PRESETS`.") for name in PRESETS},
  "custom": _setting("A reading of Algorithm 3 by its parts.", **_CUSTOM),
}
MECHANISMS = {
  "laplace": _setting("Laplace noise."),
  "gaussian": _setting("Gaussian noise; delta of a coordinate.", delta=_PAPER.delta),
}


@dataclasses.dataclass
class Radp(Method):
  """RADP as in the paper: claimed, since nothing is proved whatever is chosen here."""

  preset: Annotated[Any, Choice(READINGS), "how Algorithm 3 is read"] = _PAPER.preset
  mechanism: Annotated[Any, Choice(MECHANISMS), "noise of the features"] = _PAPER.mechanism
  rel_norm: Annotated[
    str, rules.among(NORMS), "shares of the relevance; raw: eq. 10 as printed"
  ] = _PAPER.rel_norm
  entropy_floor: Annotated[
    float | None, rules.NON_NEGATIVE, "none: log2(d) / d; the paper has 0"
  ] = _PAPER.entropy_floor
  floor: _Floor = _PAPER.floor
  shared_channels: Annotated[bool, "one noise value for the channels of a place"] = (
    _PAPER.shared_channels
  )
  relevance_records: _Records = None
  activation_1: _Activation1 = "relu"
  learning_rate: _Adam = _TRAINING.learning_rate

  @property
  def propagates(self) -> bool:
    return True

  def parts(self) -> dict[str, Any]:
    return {"paper": _of(self, relevance.Paper)}


# --- RADP with a proof


@dataclasses.dataclass(frozen=True)
class Uniform:
  """No model 1: every feature has the same share of the budget."""


@dataclasses.dataclass(frozen=True)
class Untrained:
  """Initial weights, which cost nothing."""

  split_share: Annotated[
    float | None,
    rules.OPEN_UNIT,
    "of the records in D1 (relevance), disjoint from D2 (features): the larger cost counts; "
    "none: all records pay for both",
  ] = _RIGOROUS.split_share
  epsilon_b: Annotated[float, _SCALE, "of the relevance"] = _RIGOROUS.epsilon_b
  rel_noise: Annotated[
    str, rules.among(RELEVANCE_NOISE), "of the relevance; entropy is refused"
  ] = _RIGOROUS.rel_noise
  rel_norm: Annotated[str, rules.among(NORMS[:2]), "shares of the relevance"] = (
    _RIGOROUS.rel_norm
  )
  beta_power: Annotated[float, rules.POSITIVE, _POWER, "of the shares"] = (
    _RIGOROUS.beta_power
  )
  floor: _Floor = _RIGOROUS.floor
  activation_1: _Activation1 = "relu"


@dataclasses.dataclass(frozen=True)
class TrainedOnPublic(Untrained):
  """Trained on public data, in which no private record may be known: a claim."""

  public_data: Annotated[str | None, Gives("public"), "name of the data"] = None


@dataclasses.dataclass(frozen=True)
class TrainedByDpSgd(Untrained):
  """Trained by DP-SGD on D1."""

  l2_clip_norm: _Clip = _PRIVATE.l2_clip_norm
  sgd_learning_rate: _Sgd = _PRIVATE.learning_rate
  momentum: Annotated[float, rules.SHARE, "of SGD"] = _PRIVATE.momentum
  budget_share_1: Annotated[
    float, rules.OPEN_UNIT, "of epsilon, for model 1 and relevance; of split_share=none"
  ] = _RIGOROUS.budget_share_1


MODEL_1: dict[str, type] = {
  "none": Uniform,
  "untrained": Untrained,
  "public": TrainedOnPublic,
  "dp_sgd": TrainedByDpSgd,
}


FEATURES = {
  "laplace": _setting("Laplace noise for the range of a pixel."),
  "laplace_clipped": _setting(
    "The same on a bounded weighted L1 norm.", clip=_RIGOROUS.clip
  ),
  "laplace_pld": _setting("Laplace noise by its privacy loss distribution."),
  "gaussian": _setting("Gaussian noise on a bounded L2 norm.", clip=_RIGOROUS.clip),
}
_SHARE = {"label_share": _RIGOROUS.label_share}
LABELS = {
  "randomized_response": _setting("Each is kept or drawn anew, by its share.", **_SHARE),
  "public": _setting("They count as public; the guarantee is of features alone."),
  "raw": _setting("Refused: a label is part of the record, and nothing protects it."),
}
_COMPOSE = {"compose_fresh": _RIGOROUS.compose_fresh}
RIGOROUS_DRAWS = {
  "record_once": _setting("Noise of a record is drawn once."),
  "record_fresh": _setting("Noise of each epoch is paid for (compose_fresh).", **_COMPOSE),
  "batch": _setting("Refused: a difference of two records of a batch has no noise."),
  "run": _setting("Refused: a difference of two records has no noise."),
}


@dataclasses.dataclass
class RadpRigorous(Method):
  """RADP with a proof; see `relevance.rigorous`. No budget depends on the data."""

  model1: Annotated[Any, Choice(MODEL_1), "whose relevance decides the shares"] = (
    _RIGOROUS.model1
  )
  features: Annotated[Any, Choice(FEATURES), "noise of the features"] = _RIGOROUS.features
  labels: Annotated[Any, Choice(LABELS), "what protects them"] = _RIGOROUS.labels
  draw: Annotated[Any, Choice(RIGOROUS_DRAWS), "when noise is drawn"] = _RIGOROUS.draw
  shuffle: Annotated[
    bool, "a trusted shuffler: central (epsilon, delta) by amplification"
  ] = _RIGOROUS.shuffle
  delta: Annotated[common.Delta, "of all that is not pure"] = _RIGOROUS.delta
  pool: Annotated[int, COUNT, "side of the blocks over which images are averaged first"] = (
    _RIGOROUS.pool
  )
  reduced_model: Annotated[
    NetworkConfig | None, "model 2, on the reduced features; none: model"
  ] = None
  learning_rate: _Adam = _TRAINING.learning_rate
  weight_decay: Annotated[float, rules.NON_NEGATIVE, "of model 2 on noisy records"] = (
    _TRAINING.weight_decay
  )

  @property
  def propagates(self) -> bool:
    return not isinstance(self.model1, Uniform)

  @property
  def public_data(self) -> str | None:
    """Name of the public data of model 1."""
    return getattr(self.model1, "public_data", None)

  def rows(self) -> Iterator[tuple[bool, str, str]]:
    features = choices.name_of(self, "features")
    approximate = self.shuffle or features in ("laplace_pld", "gaussian")
    approximate |= getattr(self.model1, "rel_noise", "") == "gaussian"
    approximate |= isinstance(self.model1, TrainedByDpSgd)
    yield approximate, "a mechanism that spends delta", "delta"
    unsplit = getattr(self.model1, "split_share", 0.0) is None
    yield unsplit, "method.model1.split_share=none", "model1.budget_share_1"

  def parts(self) -> dict[str, Any]:
    share = getattr(self.model1, "split_share", _RIGOROUS.split_share)
    split = {"split": share is not None}
    split |= {"split_share": _RIGOROUS.split_share if share is None else share}
    parts = {"rigorous": _of(self, relevance.Rigorous, **split)}
    if isinstance(self.model1, TrainedByDpSgd):
      parts["private"] = relevance.Private(
        l2_clip_norm=self.model1.l2_clip_norm,
        learning_rate=self.model1.sgd_learning_rate,
        momentum=self.model1.momentum,
      )
    return parts

  def check(self, data_name: str) -> None:
    super().check(data_name)
    if self.public_data is not None and self.public_data == data_name:
      raise UserError(
        "must not be data.name, whose records are private",
        field="method.model1.public_data",
        value=self.public_data,
      )


# --- methods that perturb gradients


@dataclasses.dataclass
class NoisyGradients(Method):
  """What every method with a plan reads."""

  l2_clip_norm: _Clip = _PRIVATE.l2_clip_norm
  delta: Annotated[common.Delta, "chance that the bound may fail"] = _PRIVATE.delta
  neighboring_relation: Annotated[
    str,
    rules.among(RELATIONS),
    "batches are Poisson samples under the first, of fixed size under the second",
  ] = _PRIVATE.neighboring_relation

  def parts(self) -> dict[str, Any]:
    rate = getattr(self, "sgd_learning_rate", _PRIVATE.learning_rate)
    return {"private": _of(self, relevance.Private, learning_rate=rate)}


@dataclasses.dataclass
class DpSgd(NoisyGradients):
  """Clipped, noisy gradients behind SGD (Abadi et al. 2016): proved."""

  sgd_learning_rate: _Sgd = _PRIVATE.learning_rate
  momentum: Annotated[float, rules.SHARE, "of SGD"] = _PRIVATE.momentum


@dataclasses.dataclass
class Tempered(DpSgd):
  """DP-SGD with tempered sigmoids in model 2 (Papernot et al. 2021): proved."""

  leaves_out: ClassVar[tuple[str, ...]] = ("activation",)


@dataclasses.dataclass
class RadpDpSgd(DpSgd):
  """DP relevance weights the inputs, then DP-SGD: proved, composed."""

  epsilon_b: Annotated[float, _SCALE, "of the relevance"] = _PRIVATE.epsilon_b
  kappa: Annotated[float, _POWER, "inputs are weighted by (d beta_j)^kappa"] = (
    _PRIVATE.kappa
  )
  relevance_pool: Annotated[int, COUNT, "side of blocks with one relevance, in places"] = (
    _PRIVATE.relevance_pool
  )
  activation_1: _Activation1 = "relu"

  @property
  def propagates(self) -> bool:
    return True


@dataclasses.dataclass
class DpSgld(NoisyGradients):
  """The noise of DP-SGD as Langevin dynamics (Wang et al. 2015): proved."""

  sgd_learning_rate: _Sgd = _PRIVATE.learning_rate


@dataclasses.dataclass
class DpAdam(NoisyGradients):
  """The gradients of DP-SGD behind Adam: proved."""

  adaptive_learning_rate: Annotated[float, common.LearningRate, "of the optimizer"] = (
    _PRIVATE.adaptive_learning_rate
  )


@dataclasses.dataclass
class DpDligdo(DpAdam):
  """PIAdam, PIAdaGrad, PIRMSProp on these gradients (Ding et al. 2022): proved but in pairs."""

  iterative: Annotated[str, rules.among(ITERATIVE), "PIAdam, PIAdaGrad, PIRMSProp"] = (
    _PRIVATE.iterative
  )
  legacy_microbatch: Annotated[
    int, rules.between(1, 2), "2: pairs, whose epsilon is claimed only"
  ] = _PRIVATE.legacy_microbatch


# --- AdLM, ILM, and no privacy


@dataclasses.dataclass
class Ilm(Method):
  """AdLM without relevance: every input has the same noise; claimed."""

  first_layer_sensitivity: Annotated[
    float | None, _SCALE, "none: 2 (d / 4) 25, 9800 on MNIST"
  ] = _ADLM.first_layer_sensitivity
  hidden: Annotated[int, rules.between(1, 10**4), "units of the last hidden layer"] = (
    _ADLM.hidden
  )
  input_clip: Annotated[float, _SCALE, "bound on noisy inputs"] = _ADLM.input_clip
  loss_noise: Annotated[bool, "the authors' code for MNIST has none"] = _ADLM.loss_noise
  learning_rate: _Adam = _TRAINING.learning_rate

  def parts(self) -> dict[str, Any]:
    return {"adlm": _of(self, relevance.AdLM)}


@dataclasses.dataclass
class AdLm(Ilm):
  """The adaptive Laplace mechanism (Phan et al. 2017), as in its code; claimed."""

  relevance_records: _Records = None
  activation_1: _Activation1 = "relu"

  @property
  def propagates(self) -> bool:
    return True


@dataclasses.dataclass
class NoDp(Method):
  """Plain training, without noise and without epsilon."""

  leaves_out: ClassVar[tuple[str, ...]] = ("epsilon", "noise_seed")

  learning_rate: _Adam = _TRAINING.learning_rate


METHODS: dict[str, type] = {
  "radp": Radp,
  "radp_rigorous": RadpRigorous,
  "radp_dpsgd": RadpDpSgd,
  "adlm": AdLm,
  "ilm": Ilm,
  "dpsgd": DpSgd,
  "tempered": Tempered,
  "dp_adam": DpAdam,
  "dpdligdo": DpDligdo,
  "dp_sgld": DpSgld,
  "no_dp": NoDp,
}
# Methods that noise records, so that an audit can play their noise.
AUDITED = (Radp, RadpRigorous, Ilm)
