"""MNIST: scattering features and a linear model, by least squares in one noisy release.

  python -m launch.train --config=configs/mnist_least_squares.py --workdir=runs/mnist_ls

Needs MNIST prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir).
Inputs are scaled to norm 1 and projected to 1,000 public random directions.
Hardware: 2 CPU cores, beside much other work. Time: 75 to 106 s after features.
Expected: test accuracy .965 (.964-.965 over three seeds) at a proved epsilon of 1 (delta 1e-5,
add/remove-one, per example), .925 at .1. DP-SGD on the same features has .983 and .961.
"""

from configs import mnist_scatter_linear
from dpjax.experiments.kinds.central.config import (
  LeastSquares,
  TrainConfig,
)


def get_config() -> TrainConfig:
  base = mnist_scatter_linear.get_config()
  return TrainConfig(
    data=base.data,
    model=base.model,
    privacy=LeastSquares(epsilon=1.0, directions=1000),
  )
