"""CIFAR-10: scattering features and a linear model, trained with DP-SGD (Tramèr & Boneh 2021).

  python -m launch.train --config=configs/cifar10_scatter_linear.py \\
    --workdir=runs/cifar10_scatter

Needs CIFAR-10 prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir) and
8 GB of memory: the features take 3.7.
"""

from dpjax.experiment.config import (
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  PrivacyConfig,
  TrainConfig,
)


def get_config() -> TrainConfig:
  return TrainConfig(
    data=DataConfig(name="cifar10"),
    model=ModelConfig(name="scatter_linear", options={"num_groups": 27}),
    privacy=PrivacyConfig(
      epsilon=3.0, delta=1e-5, sampling_prob=4096 / 50000, l2_clip_norm=0.1
    ),
    optimizer=OptimizerConfig(name="sgd", learning_rate=4.0, momentum=0.9),
    num_steps=800,
    eval_every=200,
    checkpoint_every=400,
  )
