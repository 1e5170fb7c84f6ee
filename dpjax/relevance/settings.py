"""Settings of methods, as frozen dataclasses. Configs of runs have them as nested fields."""

from __future__ import annotations

import dataclasses

from dpjax import validate
from dpjax.relevance.feature_budget import BETA_NORMS, DRAWS, PRESETS, Reading
from dpjax.relevance.feature_shares import NORMS
from dpjax.validate import UserError, Verbatim

MECHANISMS = ("laplace", "gaussian")
FEATURES = ("laplace", "laplace_clipped", "laplace_pld", "gaussian")
MODEL_1 = ("none", "untrained", "public", "dp_sgd")
RELEVANCE_NOISE = ("laplace", "gaussian", "entropy")
LABELS = ("randomized_response", "public", "raw")
ITERATIVE = ("adam", "adagrad", "rmsprop")
RELATIONS = ("add_or_remove_one", "replace_one")


@dataclasses.dataclass(frozen=True)
class Training:
  """Training settings of a net, for model 1 and model 2."""

  num_epochs: int = 40
  batch_size: int = 600
  learning_rate: float = 1e-3  # of Adam, unless a method has another setting
  weight_decay: float = 0.0  # decoupled, of model 2 on noisy records (rigorous mode)

  def __post_init__(self) -> None:
    validate.integer_at_least(1, num_epochs=self.num_epochs, batch_size=self.batch_size)
    validate.positive(learning_rate=self.learning_rate)
    validate.non_negative(weight_decay=self.weight_decay)


@dataclasses.dataclass(frozen=True)
class Paper:
  """Settings of the paper's mode: how its text is read, and the repairs that it needs to run.

  Nothing is proved in this mode, whatever is chosen here.
  """

  preset: str = "P3"  # P1 .. P5 of `feature_budget.PRESETS`; "custom": next 3 fields
  beta_norm: str = "mean1"
  times_batch_size: bool = False
  draw: str = "record_once"  # record_once | record_fresh | batch | run
  mechanism: str = "laplace"  # laplace | gaussian
  delta: float = 1e-3  # delta of Gaussian noise; the paper counts it per coordinate
  rel_norm: str = "abs"  # abs | relu | raw (eq. 10 as printed)
  entropy_floor: float | None = None  # None: log2(d) / d; the paper has 0
  floor: float | None = None  # of the noisy relevance; None: 0.1 / d
  shared_channels: bool = True  # one noise value for the channels of a place

  def __post_init__(self) -> None:
    validate.one_of((*PRESETS, "custom"), **{"paper.preset": self.preset})
    validate.one_of(BETA_NORMS, **{"paper.beta_norm": self.beta_norm})
    validate.one_of(DRAWS, **{"paper.draw": self.draw})
    validate.one_of(MECHANISMS, **{"paper.mechanism": self.mechanism})
    validate.one_of(NORMS, **{"paper.rel_norm": self.rel_norm})
    validate.open_unit(**{"paper.delta": self.delta})
    if self.entropy_floor is not None:
      validate.non_negative(**{"paper.entropy_floor": self.entropy_floor})
    if self.floor is not None:
      validate.positive(**{"paper.floor": self.floor})

  @property
  def reading(self) -> Reading:
    """Interpretation of Algorithm 3 by `preset`; for "custom" by `beta_norm`, `times_batch_size`
    and `draw`."""
    if self.preset == "custom":
      return Reading(self.beta_norm, self.times_batch_size, self.draw)
    return PRESETS[self.preset]


@dataclasses.dataclass(frozen=True)
class Rigorous:
  """Settings of the mode with a proof; see `relevance.rigorous`. No budget depends on the data.

  Values of `rel_noise`, `labels` and `draw` that no proof covers are refused by name.
  """

  split: bool = True  # disjoint D1 (relevance) and D2 (features): the larger cost counts
  split_share: float = 0.2  # share of the records in D1
  budget_share_1: float = 0.2  # unsplit dp_sgd: share of epsilon for model 1 and relevance
  # Kind of model 1: none (beta is uniform), untrained (initial weights), public (trained on other
  # data) or dp_sgd (trained on D1).
  model1: str = "none"
  epsilon_b: float = 0.25  # of the relevance
  rel_noise: str = "laplace"  # laplace | gaussian; "entropy" is refused
  rel_norm: str = "abs"  # abs | relu
  beta_power: float = 1.0
  floor: float | None = None  # of the noisy relevance; None: 0.1 / d
  features: str = "laplace_clipped"  # laplace | laplace_clipped | laplace_pld | gaussian
  clip: float = 0.25  # bound on a record's weighted L1 or (gaussian) L2 norm
  labels: str = "randomized_response"  # or public; "raw" is refused
  label_share: float = 0.45  # of a record's local budget
  draw: str = "record_once"  # or record_fresh with compose_fresh; batch and run are refused
  compose_fresh: bool = False  # account for every epoch's fresh noise
  shuffle: bool = True  # a trusted shuffler: central (epsilon, delta) by amplification
  delta: float = 1e-5
  pool: int = 4  # side of the blocks over which images are averaged first; a public step

  def __post_init__(self) -> None:
    named = lambda name: {f"rigorous.{name}": getattr(self, name)}
    validate.one_of(MODEL_1, **named("model1"))
    validate.one_of(RELEVANCE_NOISE, **named("rel_noise"))
    validate.one_of(NORMS[:2], **named("rel_norm"))
    validate.one_of(FEATURES, **named("features"))
    validate.one_of(LABELS, **named("labels"))
    validate.one_of(DRAWS, **named("draw"))
    validate.integer_at_least(1, **named("pool"))
    for name in ("epsilon_b", "beta_power", "clip"):
      validate.positive(**named(name))
    for name in ("split_share", "budget_share_1", "label_share", "delta"):
      validate.open_unit(**named(name))
    if self.floor is not None:
      validate.positive(**named("floor"))
    self._refuse()

  def _refuse(self) -> None:
    """Raises UserError for a setting that no proof covers. The message names the setting."""
    if self.labels == "raw":
      raise UserError(
        "raw labels are part of the record and are not protected; use "
        "'randomized_response', or 'public' for an adjacency without labels",
        field="rigorous.labels",
        value="raw",
      )
    if self.rel_noise == "entropy":
      raise UserError(
        "data-dependent budgets: the scale of the noise reveals the data and no "
        "finite epsilon holds; use 'laplace' or 'gaussian'",
        field="rigorous.rel_noise",
        value="entropy",
      )
    if self.draw in ("batch", "run"):
      raise UserError(
        "shared noise: the difference of two records is free of it, so no epsilon "
        "holds; use 'record_once'",
        field="rigorous.draw",
        value=self.draw,
      )
    if self.draw == "record_fresh" and not self.compose_fresh:
      raise UserError(
        "fresh noise without composition: E epochs are E releases and averaging "
        "recovers the record; set compose_fresh, or use 'record_once'",
        field="rigorous.draw",
        value="record_fresh",
      )
    if self.shuffle and self.labels == "public":
      raise UserError(
        "a report carries its label, so a record hides among those of its own "
        "class alone, and the amplification counts all of them; use shuffle=False, "
        "or labels='randomized_response'",
        field="rigorous.shuffle",
        value=Verbatim("True with labels='public'"),
      )
    if self.shuffle and self.features in ("laplace_pld", "gaussian"):
      raise UserError(
        "the amplification theorem used here needs pure local privacy; use "
        "'laplace' or 'laplace_clipped'",
        field="rigorous.shuffle",
        value=Verbatim(f"True with features={self.features!r}"),
      )


@dataclasses.dataclass(frozen=True)
class Private:
  """Settings of the gradient-perturbing methods: DPSGD, tempered, DP-Adam, DPDLIGDO, DP-SGLD,
  radp_dpsgd."""

  l2_clip_norm: float = 1.0
  delta: float = 1e-5
  # Batches are Poisson samples under add_or_remove_one, and of fixed size under replace_one.
  neighboring_relation: str = "add_or_remove_one"
  learning_rate: float = 0.5  # of SGD
  momentum: float = 0.9
  adaptive_learning_rate: float = 2e-3  # of Adam, AdaGrad and RMSProp
  iterative: str = "adam"  # DPDLIGDO: PIAdam | PIAdaGrad | PIRMSProp
  legacy_microbatch: int = 1  # 2: DPDLIGDO's pairs, whose epsilon is claimed only
  epsilon_b: float = 0.1  # radp_dpsgd: of the relevance
  kappa: float = 0.5  # radp_dpsgd: inputs are weighted by (d beta_j)^kappa
  relevance_pool: int = 1  # radp_dpsgd: side of blocks with one relevance, in places

  def __post_init__(self) -> None:
    validate.one_of(
      RELATIONS, **{"private.neighboring_relation": self.neighboring_relation}
    )
    validate.one_of(ITERATIVE, **{"private.iterative": self.iterative})
    validate.open_unit(**{"private.delta": self.delta})
    for name in ("l2_clip_norm", "learning_rate", "adaptive_learning_rate", "epsilon_b"):
      validate.positive(**{f"private.{name}": getattr(self, name)})
    validate.non_negative(**{"private.kappa": self.kappa})
    validate.share(**{"private.momentum": self.momentum})
    validate.integer_at_least(1, **{"private.relevance_pool": self.relevance_pool})
    if self.legacy_microbatch not in (1, 2):
      raise UserError(
        "must be 1 or 2", field="private.legacy_microbatch", value=self.legacy_microbatch
      )


@dataclasses.dataclass(frozen=True)
class AdLM:
  """Settings of AdLM and ILM (Phan et al. 2017), as in their code. Nothing is proved."""

  first_layer_sensitivity: float | None = None  # None: 2 (d / 4) 25, 9800 on MNIST
  hidden: int = 30  # units of the last hidden layer
  input_clip: float = 10.0  # bound on the absolute value of noisy inputs
  # Whether the loss gets noise. It gets none in the authors' code for MNIST: the training step gets
  # the noise of the tests, of scale 0.
  loss_noise: bool = True

  def __post_init__(self) -> None:
    validate.flag(**{"adlm.loss_noise": self.loss_noise})
    validate.integer_at_least(1, **{"adlm.hidden": self.hidden})
    validate.positive(**{"adlm.input_clip": self.input_clip})
    if self.first_layer_sensitivity is not None:
      validate.positive(**{"adlm.first_layer_sensitivity": self.first_layer_sensitivity})
