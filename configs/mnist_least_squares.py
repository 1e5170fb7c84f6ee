"""MNIST: scattering features and a linear model from noisy sums, in one release.

python -m launch.train --config=configs/mnist_least_squares.py --workdir=runs/mnist_ls
"""

from configs import mnist_scatter_linear
from dpjax.experiments.kinds.central.config import (
  LeastSquaresConfig,
  PrivacyConfig,
  TrainConfig,
)


def get_config() -> TrainConfig:
  base = mnist_scatter_linear.get_config()
  return TrainConfig(
    data=base.data,
    model=base.model,
    privacy=PrivacyConfig(
      method="least_squares",
      epsilon=1.0,
      least_squares=LeastSquaresConfig(directions=1000),
    ),
  )
