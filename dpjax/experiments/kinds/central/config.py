"""Typed configuration of a training run, which a config file returns.

Units: norms in gradient units, steps in optimizer updates. A field left at None is computed
(`noise_multiplier` from `epsilon`), chosen safely (`capacity`), or not used (`limit`). A model,
loss, data set, optimizer or sampler may be a user's own, as `package.module:name`; see
`dpjax.experiments.config.user_code`. A field with a `Choice` holds a frozen value, which may be
given by name; see `dpjax.experiments.config.fields`.
"""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from typing import Annotated, Any, ClassVar

from dpjax import (
  gradients,
  transforms,
  validate,
)
from dpjax.experiments.config import common, optimizers, rules, samplers
from dpjax.experiments.config.choices import Choice, functions, users_of
from dpjax.experiments.config.common import COUNT, AttackerConfig
from dpjax.experiments.config.fields import WithChoices
from dpjax.experiments.config.naming import Gives
from dpjax.experiments.config.sections import DataConfig, ModelConfig
from dpjax.gradients.per_example import METHODS
from dpjax.noise import correlated
from dpjax.noise.correlated.registry import STRATEGIES, Strategy
from dpjax.training.augment import AUGMENTATIONS
from dpjax.transforms.every_clip_rule import CLIP_RULES

# Name of the contrastive loss, which compares two views of each image of a batch (`embeddings`).
CONTRASTIVE = "contrastive"
_AUGMENTATIONS = ("none", *sorted(AUGMENTATIONS))

CLIPPINGS = ChainMap[str, Any]({"per_layer": transforms.PerLayer}, CLIP_RULES)


@dataclasses.dataclass(frozen=True)
class PerExample:
  """Releases no private statistics. Features and models may normalise each example by itself, which
  costs no privacy."""


@dataclasses.dataclass(frozen=True)
class ByStatistics:
  """Normalises inputs by mean and variance of each channel over the training data, at a cost from
  the run's budget."""

  noise_multiplier: float = 8.0  # for each of two sums over all examples
  median_epsilon: float = 0.05  # for each clip norm that is a private median
  # Public bounds on the norms of an example's (means, mean squares) over positions. If there are
  # none, private medians of these norms are the bounds.
  clip_norms: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Whitened:
  """Applies a linear map that scales down the directions in which training data vary most, at a
  cost from the run's budget. Scattering features are normalised before the map: each example by
  itself, or each channel by its typical size."""

  noise_multiplier: float = 16.0  # for each of five sums over all examples
  median_epsilon: float = 0.02  # for each clip norm that is a private ninth decile
  # Public bounds on the norms of an example's mean, second moments of channels and of positions,
  # variances, and covariance, in this order. Without them, private ninth deciles are the bounds.
  clip_norms: tuple[float, ...] = ()
  num_directions: int = 300  # number of directions whose covariance is released
  floor_rank: int = 100  # variances above the one of this rank are brought down to it


NORMALIZATIONS: dict[str, type] = {
  "per_example": PerExample,
  "private_statistics": ByStatistics,
  "private_whitening": Whitened,
}


@dataclasses.dataclass(frozen=True)
class AllWeights:
  """Trains every weight of the model."""


@dataclasses.dataclass(frozen=True)
class Head:
  """Trains the last layer alone; the layers below keep their first values, such as those of
  `pretrained`."""


@dataclasses.dataclass(frozen=True)
class HeadFirst:
  """Trains the last layer alone in the first steps, then every weight, under one guarantee."""

  steps: Annotated[int, COUNT, "of the last layer alone; the others train every weight"] = (
    20
  )


@dataclasses.dataclass(frozen=True)
class LowRank:
  """Trains low-rank adapters (LoRA) of the matrices whose path matches `pattern`; the model's
  own weights all stay fixed."""

  rank: Annotated[int, COUNT, "of the adapters A B"] = 4
  alpha: Annotated[float, rules.POSITIVE, "A B is multiplied by alpha / rank"] = 8.0
  pattern: Annotated[str, "of paths such as params/block_0/mlp_in/kernel"] = "*/kernel"


@dataclasses.dataclass(frozen=True)
class Unscaled:
  """Clips and noises all coordinates alike."""


@dataclasses.dataclass(frozen=True)
class EqualClasses:
  """Counts every example alike."""


@dataclasses.dataclass(frozen=True)
class BalancedClasses:
  """Multiplies the loss of an example by (share of the rarest class) / (share of its class), so
  that every class counts alike. The shares are declared: counting private labels would cost
  privacy.

  The rarest class has the factor 1, since the clip norm would cut what a larger one adds.
  """

  shares: Annotated[tuple[float, ...], "public share of each class, in order"] = ()

  def weights(self) -> tuple[float, ...]:
    """Returns the factor of each class: scikit-learn's "balanced", divided by the largest.

    >>> BalancedClasses(shares=(0.75, 0.25)).weights()
    (0.3333333333333333, 1.0)
    """
    return tuple(min(self.shares) / share for share in self.shares)


@dataclasses.dataclass(frozen=True)
class GivenWeights:
  """Multiplies the loss of an example by the factor of its class."""

  factors: Annotated[
    tuple[float, ...],
    "public constant of each class, in order, at most 1: the clip norm cuts what is above",
  ] = ()

  def weights(self) -> tuple[float, ...]:
    """Returns the factor of each class."""
    return self.factors


CLASS_WEIGHTS: dict[str, type] = {
  "equal": EqualClasses,
  "balanced": BalancedClasses,
  "given": GivenWeights,
}
SCALINGS: dict[str, type] = {
  "none": Unscaled,
  "by_outputs": transforms.CoordinateScaling,
}


TRAINABLE: dict[str, type] = {
  "all": AllWeights,
  "head": Head,
  "head_first": HeadFirst,
  "lora": LowRank,
}


@dataclasses.dataclass(frozen=True)
class ConstantClip:
  """Leaves l2_clip_norm as it is at every step."""


@dataclasses.dataclass(frozen=True)
class _ChangingClip:
  final: Annotated[
    float,
    rules.within_range(validate.MIN_FACTOR, validate.MAX_FACTOR),
    "factor of l2_clip_norm at the last step",
  ] = 0.1


@dataclasses.dataclass(frozen=True)
class LinearClip(_ChangingClip):
  """Changes l2_clip_norm by the same amount at every step."""


@dataclasses.dataclass(frozen=True)
class CosineClip(_ChangingClip):
  """Changes l2_clip_norm along half a period of a cosine."""


@dataclasses.dataclass(frozen=True)
class ExponentialClip(_ChangingClip):
  """Changes l2_clip_norm by the same factor at every step."""


CLIP_SCHEDULES: dict[str, type] = {
  "constant": ConstantClip,
  "linear": LinearClip,
  "cosine": CosineClip,
  "exponential": ExponentialClip,
}

SamplingProb = Annotated[
  float,
  rules.within_range(1 / rules.MOST_PASSES, 1),
  "expected batch size / number of examples",
]


@dataclasses.dataclass
class Guarantee(WithChoices):
  """What every private method promises. Give one of `epsilon`, `noise_multiplier`, `attacker`."""

  epsilon: Annotated[common.Epsilon, "target; the noise multiplier is calibrated to it"] = (
    2.0
  )
  delta: Annotated[
    common.Delta, "chance that the bound may fail; well below 1 / examples"
  ] = 1e-5
  noise_multiplier: Annotated[
    common.NoiseMultiplier,
    "std of the noise on the sum / bound on one example's part of it",
  ] = None
  neighboring_relation: Annotated[
    str, "add_or_remove_one | replace_one | replace_special"
  ] = "add_or_remove_one"
  accountant: Annotated[common.Accountant, "'': the tightest"] = "pld"
  epsilon_budget: common.EpsilonBudget = None
  attacker: AttackerConfig = dataclasses.field(default_factory=AttackerConfig)
  normalization: Annotated[
    PerExample | ByStatistics | Whitened,
    Choice(NORMALIZATIONS),
    Gives("statistics"),
    "of the model's inputs: private_statistics of channels, private_whitening of all "
    "directions, both from the same budget",
  ] = dataclasses.field(default_factory=PerExample)


@dataclasses.dataclass
class NoisySteps(Guarantee):
  """What both methods of clipped gradients read."""

  l2_clip_norm: Annotated[common.ClipNorm, "bound on the gradient of one example"] = 1.0
  clipping: Annotated[
    gradients.ClipRule | transforms.PerLayer,
    Choice(CLIPPINGS, users_of(gradients.ClipRule)),
    Gives("l2_clip_norm"),  # of a rule that makes several norms of it
    Gives("noise_shares"),
    "rule by which one example's gradient is shortened; package.module:Rule: your own",
  ] = dataclasses.field(default_factory=gradients.Flat)
  scaling: Annotated[
    Unscaled | transforms.CoordinateScaling,
    Choice(SCALINGS),
    "of coordinates before the clip, and back after the noise; by_outputs: by earlier noisy "
    "gradients, at no cost",
  ] = dataclasses.field(default_factory=Unscaled)
  clip_schedule: Annotated[Any, Choice(CLIP_SCHEDULES), "l2_clip_norm by step"] = (
    dataclasses.field(default_factory=ConstantClip)
  )
  sampling_prob: SamplingProb = 0.05
  noise_levels: Annotated[
    list[float],
    "factors of the noise multiplier, each for an equal share of the steps; []: constant",
    Gives("noise_schedule"),
  ] = dataclasses.field(default_factory=list)


SAMPLERS = samplers.choice("examples", "capacity", "num_selected")


@dataclasses.dataclass
class DpSgd(NoisySteps):
  """Clipped gradients, fresh noise in every step; privacy is amplified by the sampler."""

  sampler: Annotated[
    Any,
    SAMPLERS,
    "who is in a batch; launch.list samplers says what is proved of each; or "
    "package.module:name",
  ] = "poisson"


NoiseStrategy = Annotated[
  Strategy, Choice(STRATEGIES), Gives("correlation"), "how noise is correlated"
]


@dataclasses.dataclass
class DpFtrl(NoisySteps):
  """Clipped gradients, noise that is correlated over the steps; see `dpjax.noise.correlated`."""

  sampler: Annotated[
    Any,
    samplers.choice("correlated noise", "capacity", "steps_apart"),
    "who is in a batch, and how far apart; launch.list samplers; or package.module:name",
  ] = "cyclic"
  strategy: NoiseStrategy = dataclasses.field(default_factory=lambda: correlated.Banded())


@dataclasses.dataclass
class LeastSquares(Guarantee):
  """Noisy second moments of clipped inputs, one release and no steps; see
  `dpjax.mechanisms.LeastSquares`."""

  # Fields of TrainConfig that only runs with steps read.
  leaves_out: ClassVar[tuple[str, ...]] = (
    *(
      "trainable",
      "pretrained",
      "safetensors",
      "loss",
      "class_weights",
      "optimizer",
      "num_steps",
    ),
    *("grad_method", "microbatch_size", "memory_budget_gb", "mesh", "slices"),
    *("augmentation", "augmult", "ema_decay", "eval_every", "checkpoint_every", "audit"),
  )

  feature_norm: Annotated[float, rules.POSITIVE, "bound on the inputs of one example"] = 1.0
  unit_rows: Annotated[bool, "scales every example to it; false: longer ones alone"] = True
  moment_weight: Annotated[
    float,
    rules.NON_NEGATIVE,
    "of inputs' second moments beside those with classes; 0, or 1e-4 to 1e4",
  ] = 1.0
  ridge: Annotated[float, rules.within_range(0, 1e6), "in norms of their noise"] = 0.3
  directions: Annotated[
    int | None, COUNT, "public random ones, to which inputs are projected; none: all"
  ] = None


@dataclasses.dataclass
class Sgd(WithChoices):
  """No clipping, no noise, no epsilon."""

  leaves_out: ClassVar[tuple[str, ...]] = ("noise_seed",)

  sampler: Annotated[Any, SAMPLERS, "who is in a batch; or package.module:name"] = "poisson"
  sampling_prob: SamplingProb = 0.05
  delta: Annotated[common.Delta, "of the bound that an audit proves"] = 1e-5


PRIVACY: dict[str, type] = {
  "dp_sgd": DpSgd,
  "dp_ftrl": DpFtrl,
  "least_squares": LeastSquares,
  "sgd": Sgd,
}


LearningRate = Annotated[float, rules.POSITIVE, rules.IN_FLOAT32, "at the first step"]
Schedule = Annotated[
  str, rules.among(("constant", "cosine", "linear")), "of the rate, to 0 over the run"
]


@dataclasses.dataclass
class OptimizerConfig(WithChoices):
  """The Optax optimizer that is given the private gradient."""

  rule: Annotated[Any, Choice(optimizers.CENTRAL, functions), "or package.module:name"] = (
    "sgd"
  )
  learning_rate: LearningRate = 0.5
  schedule: Schedule = "constant"


@dataclasses.dataclass
class CanaryAudit:
  """Canaries in the training data, and the lower bound on epsilon that they prove."""

  num_canaries: Annotated[
    int, "rows of the training data; each comes back by a fair coin"
  ] = 200
  kind: Annotated[str, "gradient (a parameter of its own) | mislabelled | random"] = (
    "gradient"
  )
  score: Annotated[
    str,
    "loss (black box) | gradient (first and last parameters are known) | sums (white box: all "
    "noisy sums along the canaries; of kind gradient alone) | auto (sums where the kind has "
    "them, else loss)",
  ] = "auto"
  method: Annotated[
    str,
    "one_run | one_run_two_sided | clopper_pearson; without sampling also one_run_fdp | "
    "one_run_fdp_two_sided | gdp, and of score sums one_run_gaussian",
  ] = "one_run_two_sided"
  confidence: Annotated[float, "of the lower bound"] = 0.95


AUDITS: dict[str, type] = {"none": type(None), "canaries": CanaryAudit}


@dataclasses.dataclass
class TrainConfig(WithChoices):
  """Configuration of a whole training run of `launch.train`."""

  # Fields that may change when a run resumes, since noise and batches do not depend on them.
  where: ClassVar[tuple[str, ...]] = ("mesh", "resident", "writer")

  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  trainable: Annotated[
    AllWeights | Head | HeadFirst | LowRank,
    Choice(TRAINABLE),
    "what is trained, released and accounted; all else is public and stays",
  ] = dataclasses.field(default_factory=AllWeights)
  pretrained: Annotated[
    str | None,
    "weights to start from, of other data: an earlier run's folder or its params.npz; a "
    ".safetensors file in the layout of GPT-2, ViT, ResNet or BERT; a .msgpack file of Flax or a "
    "folder of Orbax, by the model's own names; none: random ones",
  ] = None
  safetensors: Annotated[
    bool, "write model.safetensors, too: all weights, adapters merged"
  ] = False
  loss: Annotated[
    str,
    rules.among(("auto", CONTRASTIVE), user_defined=True),
    "auto: of one example, that of the task; contrastive: of a whole batch, of two views of "
    "each image, for privacy='sgd' alone; or package.module:name",
  ] = "auto"
  class_weights: Annotated[
    EqualClasses | BalancedClasses | GivenWeights,
    Choice(CLASS_WEIGHTS),
    "of an example's loss, before it is clipped; public, so they cost no privacy",
  ] = dataclasses.field(default_factory=EqualClasses)
  privacy: Annotated[
    DpSgd | DpFtrl | LeastSquares | Sgd,
    Choice(PRIVACY),
    "the method, with what it alone reads; sgd: no clipping, no noise, no epsilon",
  ] = dataclasses.field(default_factory=DpSgd)
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  num_steps: Annotated[common.NumUpdates, "updates of the parameters"] = 200
  seed: common.Seed = 0
  noise_seed: common.NoiseSeed = None
  grad_method: Annotated[
    str, rules.among(METHODS), Gives("method"), "how clipped gradients are computed"
  ] = "auto"
  microbatch_size: Annotated[
    int | None,
    COUNT,
    "examples in memory at a time; none: the whole batch, or what is fastest",
  ] = None
  memory_budget_gb: Annotated[
    float | None,
    rules.POSITIVE,
    Gives("memory_budget"),
    "in its place: what one microbatch may take, in 1e9 bytes",
  ] = None
  mesh: Annotated[
    str | None,
    "devices that share a batch, data:8, and parameters, data:4,model:2; none: one device",
  ] = None
  resident: Annotated[
    bool | None,
    "examples in memory; false: read from files as they are drawn; none: by their size",
  ] = None
  slices: Annotated[
    int, COUNT, "physical batches that make up one step (gradient accumulation)"
  ] = 1
  augmentation: Annotated[str, rules.among(_AUGMENTATIONS), "of training images"] = "none"
  augmult: Annotated[
    int,
    rules.between(1, rules.MOST_VIEWS),
    "augmented copies per example, averaged before clipping",
  ] = 1
  ema_decay: Annotated[
    float | None, rules.OPEN_UNIT, "evaluate an exponential average of the parameters"
  ] = None
  eval_every: Annotated[int, COUNT, "steps"] = 100
  checkpoint_every: Annotated[int, COUNT, "steps"] = 100
  diagnostics: Annotated[bool, "log per-batch loss, norms, clip fraction: NOT private"] = (
    True
  )
  release: common.Release = False
  writer: common.Writer = None
  audit: Annotated[
    CanaryAudit | None, Choice(AUDITS), "train with canaries; short: --audit"
  ] = None

  @property
  def is_private(self) -> bool:
    """Whether the method is one with a guarantee, whose keys are secret."""
    return not isinstance(self.privacy, Sgd)
