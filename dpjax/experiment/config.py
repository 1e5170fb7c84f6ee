"""Typed configuration of a training run. A config file returns one of these.

Units: norms in gradient units, steps in optimizer updates. Fields left at None are
solved for (`noise_multiplier` from `epsilon`) or chosen safely (`capacity`).
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class DataConfig:
  """Which data; see `dpjax.data.load`."""

  name: str = (
    "digits"  # digits | mnist | fashion_mnist | cifar10 | any TFDS name | path.npz
  )
  data_dir: str | None = None  # where TFDS data lie; None: TFDS_DATA_DIR or its default
  center: bool = False  # (x - 0.5) / 0.5: public constants, nothing estimated from data
  limit: int | None = None  # use only the first n training examples
  max_length: int = 256  # text: bytes kept of each example


@dataclasses.dataclass
class ModelConfig:
  """Which model; see `dpjax.models.build`."""

  name: str = "mlp"
  options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class PrivacyConfig:
  """What is promised. Give `epsilon` or `noise_multiplier`, not both."""

  method: str = "dp_sgd"  # dp_sgd | sgd (no clipping, no noise, no epsilon)
  epsilon: float | None = 2.0  # target; the noise multiplier is calibrated to it
  delta: float = 1e-5
  noise_multiplier: float | None = None  # std of the noise on the sum / l2_clip_norm
  l2_clip_norm: float = 1.0
  sampler: str = "poisson"  # poisson | fixed_size | shuffled
  sampling_prob: float = 0.05  # expected batch size / number of examples
  capacity: int | None = None  # slots of a Poisson batch; None: overflow is negligible
  neighboring_relation: str = "add_or_remove_one"
  accountant: str = "pld"  # pld | rdp
  epsilon_budget: float | None = None  # refuse to start a run that would spend more


@dataclasses.dataclass
class OptimizerConfig:
  """The Optax optimizer behind the private gradient."""

  name: str = "sgd"  # sgd | adam | adamw | rmsprop | adagrad
  learning_rate: float = 0.5
  momentum: float = 0.9  # sgd and rmsprop
  schedule: str = "constant"  # constant | cosine | linear (to 0 over num_steps)
  weight_decay: float = 0.0  # adamw


@dataclasses.dataclass
class AuditConfig:
  """Canaries in the training data, and the lower bound on epsilon that they prove."""

  enabled: bool = False
  num_canaries: int = 1000  # rows of the training data; each comes back by a fair coin
  kind: str = "mislabelled"  # mislabelled | random
  score: str = "loss"  # loss (black box) | gradient (first and last parameters are known)
  method: str = "one_run"  # one_run | one_run_fdp | clopper_pearson | gdp
  confidence: float = 0.95


@dataclasses.dataclass
class TrainConfig:
  """A whole training run."""

  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  privacy: PrivacyConfig = dataclasses.field(default_factory=PrivacyConfig)
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  num_steps: int = 200
  seed: int = 0
  grad_method: str = "auto"  # auto | vmap
  microbatch_size: int | None = None  # examples in memory at a time; None: the whole batch
  augmentation: str = "none"  # none | shift | flip_shift
  augmult: int = 1  # augmented copies per example, averaged before clipping
  ema_decay: float | None = None  # evaluate an exponential average of the parameters
  eval_every: int = 100  # steps
  checkpoint_every: int = 100  # steps
  diagnostics: bool = True  # log per-batch loss, norms, clip fraction: NOT private
  release: bool = False  # keys from the operating system, noise on a grid, no diagnostics
  audit: AuditConfig = dataclasses.field(default_factory=AuditConfig)


def to_dict(config: TrainConfig) -> dict[str, Any]:
  """The config as plain JSON data."""
  return dataclasses.asdict(config)
