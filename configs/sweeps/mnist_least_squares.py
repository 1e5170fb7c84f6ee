"""MNIST, scattering features, least squares by one noisy release; epsilon .1 to 1, three seeds.

  python -m launch.sweep --config=configs/sweeps/mnist_least_squares.py \\
    --workdir=runs/mnist_least_squares

Hardware: 2 CPU cores, beside much other work, 75 to 106 s a run.
Numbers: results/mnist_least_squares.
"""

from dpjax.experiments.sweeps.grid import SweepConfig


def get_config() -> SweepConfig:
  """Runs of configs/mnist_least_squares.py."""
  from configs import mnist_least_squares

  base = mnist_least_squares.get_config()
  base.privacy.epsilon = None  # the grid has it
  return SweepConfig(
    base=base,
    grid={"privacy.epsilon": [0.1, 0.2, 0.5, 1.0]},
    seeds=[0, 1, 2],
    title="MNIST, scattering features, least squares",
  )
