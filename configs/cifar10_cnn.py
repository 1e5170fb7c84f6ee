"""CIFAR-10: the tanh CNN of Papernot et al. 2021 (550,570 parameters), DP-SGD.

  python -m launch.train --config=configs/cifar10_cnn.py --workdir=runs/cifar10_cnn

Needs CIFAR-10 prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir).
Hardware: 2 CPU cores. Nine passes over the data, so that it ends in half an hour; the paper
trains longer (.662). Expected: test accuracy .579 (one seed) at a proved epsilon of 7.53
(delta 1e-5, Poisson, add/remove-one, per example).
"""

from dpjax.runs.central.config import (
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  PrivacyConfig,
  TrainConfig,
)


def get_config() -> TrainConfig:
  return TrainConfig(
    data=DataConfig(name="cifar10", center=True),
    model=ModelConfig(name="cifar_cnn"),
    privacy=PrivacyConfig(
      epsilon=7.53, delta=1e-5, sampling_prob=512 / 50000, l2_clip_norm=0.1
    ),
    optimizer=OptimizerConfig(learning_rate=3.0),
    num_steps=900,
    microbatch_size=128,
    ema_decay=0.99,
    eval_every=100,
    checkpoint_every=100,
  )
