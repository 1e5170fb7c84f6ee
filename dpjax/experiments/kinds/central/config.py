"""Typed configuration of a training run. A config file returns one of these.

Units: norms in gradient units, steps in optimizer updates. Fields left at None are
solved for (`noise_multiplier` from `epsilon`) or chosen safely (`capacity`). A name of a
model, loss, data set, optimizer or sampler may be a user's own, `package.module:name`; see
`dpjax.experiments.config.user_code`. A field with a `Choice` holds a frozen value of the
library, by its name or as it is; `dpjax.experiments.config.fields` says how it is written.
"""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from typing import Annotated, Any, ClassVar

from dpjax import gradients, transforms
from dpjax.experiments.config import optimizers
from dpjax.experiments.config.fields import Choice, WithChoices
from dpjax.noise import correlated

CLIPPINGS = ChainMap[str, Any]({"per_layer": transforms.PerLayer}, transforms.CLIP_RULES)


@dataclasses.dataclass(frozen=True)
class PerExample:
  """The model's own normalisation, of each example by itself: it costs no privacy."""


@dataclasses.dataclass(frozen=True)
class ByStatistics:
  """Mean and variance of each channel over the training data, paid from the run's budget."""

  noise_multiplier: float = 8.0  # of each of two sums, over all examples
  median_epsilon: float = 0.05  # of each clip norm, where they are private medians
  # public norms of an example's (means, mean squares) over positions; (): private medians
  clip_norms: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Whitened:
  """After each example was normalised by itself, or its channels brought to their typical sizes:
  the linear map that evens out the directions of the training data, paid likewise."""

  noise_multiplier: float = 16.0  # of each of five sums, over all examples
  median_epsilon: float = 0.02  # of each clip norm, where they are private ninth deciles
  # public norms of an example's (mean, channels, positions, variances, covariance); ():
  # private ones
  clip_norms: tuple[float, ...] = ()
  num_directions: int = 300  # whose covariance is released
  floor_rank: int = 100  # variances above the one of this rank are brought down to it


NORMALIZATIONS: dict[str, type] = {
  "per_example": PerExample,
  "private_statistics": ByStatistics,
  "private_whitening": Whitened,
}


@dataclasses.dataclass(frozen=True)
class AllWeights:
  """Every weight of the model is trained."""


@dataclasses.dataclass(frozen=True)
class Head:
  """The last layer alone; the layers below stay as they begin, such as `pretrained`."""


@dataclasses.dataclass(frozen=True)
class HeadFirst:
  """The last layer alone in the first steps, then every weight: one run, one promise."""

  steps: int = 20  # of the last layer alone; the others train every weight


@dataclasses.dataclass(frozen=True)
class LowRank:
  """Low-rank adapters (LoRA) of the matrices whose path matches; all else stays as it was."""

  rank: int = 4
  alpha: float = 8.0  # A B is multiplied by alpha / rank
  pattern: str = "*/kernel"  # of paths such as params/block_0/mlp_in/kernel


TRAINABLE: dict[str, type] = {
  "all": AllWeights,
  "head": Head,
  "head_first": HeadFirst,
  "lora": LowRank,
}


@dataclasses.dataclass
class DataConfig:
  """Which data; see `dpjax.data.load`."""

  # digits | random_process | mnist | fashion_mnist | cifar10 | any TFDS name | path.npz
  name: str = "digits"
  data_dir: str | None = None  # where TFDS data lie; None: TFDS_DATA_DIR or its default
  center: bool = False  # (x - 0.5) / 0.5: public constants, nothing estimated from data
  limit: int | None = None  # use only the first n training examples
  max_length: int = 256  # text: bytes kept of each example
  num_classes: int | None = None  # public; for data that do not declare it themselves
  # public, a constant near the number of training examples, which takes its place where one
  # example more or less is to be hidden; for data that do not declare it themselves
  num_examples: int | None = None
  num_users: int | None = None  # likewise, of users whom the data name (launch.federate)


@dataclasses.dataclass
class ModelConfig:
  """Which model; see `dpjax.models.build`."""

  name: str = "mlp"
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  mirrored: bool = False  # scattering features: averaged with those of the mirror image
  colours: str = "rgb"  # of scattering features: rgb | opponent (light and two differences)


@dataclasses.dataclass
class FtrlConfig(WithChoices):
  """How the noise of privacy.method='dp_ftrl' is correlated; see `dpjax.noise.correlated`."""

  sampler: str = "cyclic"  # cyclic | cyclic_poisson | balls_in_bins | min_sep
  # cyclic_poisson, min_sep: least steps between participations; None: steps of a pass
  separation: int | None = None
  # banded | blt | tree | identity
  strategy: Annotated[correlated.Strategy, Choice(correlated.STRATEGIES)] = (
    dataclasses.field(default_factory=correlated.Banded)
  )


@dataclasses.dataclass
class PrivacyConfig(WithChoices):
  """The guarantee of a run. Give `epsilon` or `noise_multiplier`, not both."""

  method: str = "dp_sgd"  # dp_sgd | dp_ftrl | sgd (no clipping, no noise, no epsilon)
  epsilon: float | None = 2.0  # target; the noise multiplier is calibrated to it
  delta: float = 1e-5
  noise_multiplier: float | None = None  # std of the noise on the sum / l2_clip_norm
  l2_clip_norm: float = 1.0
  # flat | automatic | adaptive | per_layer
  clipping: Annotated[gradients.ClipRule | transforms.PerLayer, Choice(CLIPPINGS)] = (
    dataclasses.field(default_factory=gradients.Flat)
  )
  clip_schedule: str = "constant"  # constant | linear | cosine | exponential, by step
  clip_schedule_final: float = 0.1  # factor of l2_clip_norm at the last step
  # poisson | fixed_size (replace_one) | truncated_poisson (replace_special) | shuffled
  # (an epoch as one step on all data under replace_one or replace_special, else no epsilon)
  # | users (poisson, over data of which an example is all of one person)
  # | random_allocation (every example once in each pass of 1 / sampling_prob steps)
  sampler: str = "poisson"
  sampling_prob: float = 0.05  # expected batch size / number of examples
  # slots of a Poisson batch; None: overflow is negligible, or truncation is rare
  capacity: int | None = None
  neighboring_relation: str = "add_or_remove_one"
  accountant: str = "pld"  # pld | rdp
  epsilon_budget: float | None = None  # refuse to start a run that would spend more
  # factors of the noise multiplier, each for an equal share of the steps; none: constant
  noise_levels: list[float] = dataclasses.field(default_factory=list)
  ftrl: FtrlConfig = dataclasses.field(default_factory=FtrlConfig)
  # of the model's inputs: per_example | private_statistics (of channels, from the same budget)
  # | private_whitening (of all directions, likewise)
  normalization: Annotated[PerExample | ByStatistics | Whitened, Choice(NORMALIZATIONS)] = (
    dataclasses.field(default_factory=PerExample)
  )


@dataclasses.dataclass
class OptimizerConfig(WithChoices):
  """The Optax optimizer behind the private gradient."""

  # sgd | adam | adamw | rmsprop | adagrad | dp_adam | dp_sgld
  rule: Annotated[Any, Choice(optimizers.CENTRAL, own=True)] = "sgd"
  learning_rate: float = 0.5
  schedule: str = "constant"  # constant | cosine | linear (to 0 over num_steps)


@dataclasses.dataclass
class AuditConfig:
  """Canaries in the training data, and the lower bound on epsilon that they prove."""

  enabled: bool = False
  num_canaries: int = 200  # rows of the training data; each comes back by a fair coin
  kind: str = "gradient"  # gradient (a parameter of its own) | mislabelled | random
  # loss (black box) | gradient (first and last parameters are known) | sums (white box: all
  # noisy sums along the canaries; of audit.kind = gradient, and of no other); auto: sums where
  # the kind has them, else loss
  score: str = "auto"
  # one_run | one_run_two_sided | clopper_pearson; without sampling also one_run_fdp |
  # one_run_fdp_two_sided | gdp, and of score = sums one_run_gaussian
  method: str = "one_run_two_sided"
  confidence: float = 0.95


@dataclasses.dataclass
class TrainConfig(WithChoices):
  """A whole training run."""

  # Which devices compute it, where data lie: a run goes on with others, with the noise and
  # batches it had.
  where: ClassVar[tuple[str, ...]] = ("mesh", "resident")

  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  # all | head | head_first | lora: what is trained, released and paid for; the rest is public
  # and stays
  trainable: Annotated[AllWeights | Head | HeadFirst | LowRank, Choice(TRAINABLE)] = (
    dataclasses.field(default_factory=AllWeights)
  )
  # weights to start from, of other data: params.npz of an earlier run, or a .safetensors file in
  # GPT-2's layout; None: random ones
  pretrained: str | None = None
  safetensors: bool = False  # write model.safetensors, too: all weights, adapters merged
  # auto: of one example, that of the task | contrastive: of a whole batch, of two views of each
  # image; for privacy.method='sgd' alone
  loss: str = "auto"
  privacy: PrivacyConfig = dataclasses.field(default_factory=PrivacyConfig)
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  num_steps: int = 200
  seed: int = 0
  grad_method: str = "auto"  # auto | vmap
  microbatch_size: int | None = None  # examples in memory at a time; None: the whole batch
  memory_budget_gb: float | None = None  # in its place: what one microbatch may take, 1e9 B
  # devices that share a batch, data:8, and parameters, data:4,model:2; None: one device
  mesh: str | None = None
  # examples in memory; False: read from files as they are drawn; None: by their size
  resident: bool | None = None
  slices: int = 1  # physical batches that make up one step (gradient accumulation)
  augmentation: str = "none"  # none | shift | flip_shift | crop_color
  augmult: int = 1  # augmented copies per example, averaged before clipping
  ema_decay: float | None = None  # evaluate an exponential average of the parameters
  eval_every: int = 100  # steps
  checkpoint_every: int = 100  # steps
  diagnostics: bool = True  # log per-batch loss, norms, clip fraction: NOT private
  release: bool = False  # keys from the operating system, noise on a grid, no diagnostics
  audit: AuditConfig = dataclasses.field(default_factory=AuditConfig)
