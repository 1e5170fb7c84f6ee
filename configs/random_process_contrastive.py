"""Synthetic images of random processes: a small network learns to tell image from image.

python -m launch.train --config=configs/random_process_contrastive.py --workdir=runs/pretrained
"""

from configs import cifar10_equivariant
from dpjax.runs.central.config import OptimizerConfig, PrivacyConfig, TrainConfig


def get_config() -> TrainConfig:
  """The network of configs/cifar10_equivariant.py on images that no camera took."""
  config = cifar10_equivariant.get_config()
  config.data.name = "random_process"
  config.loss = "contrastive"
  config.augmentation = "crop_color"
  config.privacy = PrivacyConfig(method="sgd", sampling_prob=512 / 32000)
  config.optimizer = OptimizerConfig(rule="adam", learning_rate=3e-3, schedule="cosine")
  config.num_steps = 300
  config.eval_every = config.checkpoint_every = 100
  return config
