"""CIFAR-10: a small network that turns with its images (C4), DP-SGD (Hölzl et al. 2023).

  python -m launch.train --config=configs/cifar10_equivariant.py --workdir=runs/cifar10_equi

Needs CIFAR-10 prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir).
Hardware: 2 CPU cores. Two passes over the data, a minute, so that a table of ablations
(configs/sweeps/ablations_cifar10.py) is short.
Expected: test accuracy .476 at a proved epsilon of 3 (delta 1e-5, Poisson, add/remove-one, per
example; seed 0). A run this short shows what its parts add, not what the network can do.
"""

from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)


def get_config() -> TrainConfig:
  network = {"group": "C4", "filters": (8, 8, 16), "invariant": False}
  return TrainConfig(
    data=DataConfig(name="cifar10", center=True),
    model=ModelConfig(name="equivariant_cnn", options=network),
    privacy=DpSgd(epsilon=3.0, delta=1e-5, sampling_prob=1024 / 50000, l2_clip_norm=1.0),
    optimizer=OptimizerConfig(learning_rate=1.0),
    num_steps=100,
    eval_every=25,
    checkpoint_every=25,
  )
