"""Fashion-MNIST, scattering features, whitened privately, and a linear model; three seeds.

  python -m launch.sweep --config=configs/sweeps/fashion_mnist_whitened.py \\
    --workdir=runs/fashion_whitened_sweep

Hardware: 2 CPU cores, 86 to 170 s a run. Numbers: results/fashion_mnist_whitened.
"""

from dpjax.experiments.sweeps.grid import SweepConfig


def get_config() -> SweepConfig:
  """Runs of configs/fashion_mnist_whitened.py."""
  from configs import fashion_mnist_whitened

  base = fashion_mnist_whitened.get_config()
  base.privacy.epsilon = None  # the grid has it
  return SweepConfig(
    base=base,
    grid={"privacy.epsilon": [3.0]},
    seeds=[0, 1, 2],
    references=[
      ("Papernot et al. 2021", 2.7, 0.861),
      ("Tramèr and Boneh 2021", 3.0, 0.897),
    ],
    title="Fashion-MNIST, whitened scattering features + linear",
  )
