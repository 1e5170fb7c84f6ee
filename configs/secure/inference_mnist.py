"""Encrypted MNIST: 1,000 test images answered by dense(64) - square - dense(10).

python -m launch.secure --config=configs/secure/inference_mnist.py --workdir=runs/images

Needs the prepared MNIST (TFDS_DATA_DIR). Hardware: 2 CPU cores, busy; 5 minutes, trainings
included. Seen: the accuracy in the clear, to the image (.973 and .968 of 1,000, .9685 of 4,096;
logits off by less than 1e-4). Whole images: .2 s for four, .05 s and 81 kB an image. By pixels:
40 to 46 s for anything up to 4,096 images, then .01 s and 39 kB an image: less from about 900
images on. See results/secure/inference_mnist.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  Sgd,
  TrainConfig,
)
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.kinds.secure.encrypted_images import InferTask


def get_config() -> SecureConfig:
  """A network without privacy, and 1,000 images."""
  return SecureConfig(
    task=InferTask(
      num_images=1000,
      train=TrainConfig(
        data=DataConfig(name="mnist", center=True),
        model=ModelConfig(name="mlp", options={"features": (64,), "activation": "square"}),
        privacy=Sgd(sampling_prob=256 / 60_000),
        optimizer=OptimizerConfig(learning_rate=0.003),
        num_steps=3000,
        eval_every=500,
        checkpoint_every=500,
      ),
    ),
  )


def get_configs(base: SecureConfig) -> Iterator[tuple[str, SecureConfig]]:
  """Both layouts, and the same network trained with epsilon 2."""
  private = {"task.train.privacy": "dp_sgd", "task.train.privacy.epsilon": 2.0}
  rows: dict[str, dict[str, Any]] = {
    "infer, whole images": {},
    "infer, by pixels": {"task.layout": "pixels"},
    "infer, by pixels, 4,096 images": {"task.layout": "pixels", "task.num_images": 4096},
    "infer, whole images, trained with epsilon 2": private,
  }
  for label, changes in rows.items():
    yield label, fields.replace_all(base, changes)
