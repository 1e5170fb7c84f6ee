"""MNIST, pixels and a linear model: white and correlated noise, epsilon 1 and 8.

  python -m launch.sweep --config=configs/sweeps/mnist_correlated.py \\
    --workdir=runs/mnist_correlated

All take 10 passes at one clip norm and one learning rate, delta 1e-5, replace_special, per example.
DP-SGD rests on secret Poisson sampling. The others take batches in a fixed, public order.

Hardware: 2 CPU cores. PENDING
"""

from dpjax.experiments.kinds.central.config import FtrlConfig
from dpjax.experiments.sweeps.grid import SweepConfig

_STRATEGY = "privacy.ftrl.strategy"
_FTRL = {"privacy.method": "dp_ftrl", "privacy.ftrl.sampler": "cyclic"}
VARIANTS = {
  "Poisson DP-SGD": {},
  "banded, 14 copies kept": {**_FTRL, f"{_STRATEGY}.bands": 15},
  "BandInvMF, 4 draws": {**_FTRL, _STRATEGY: "band_inv_mf"},
  "BISR, 16 draws": {**_FTRL, _STRATEGY: "bisr", f"{_STRATEGY}.bands": 16},
  "lambda-CGD, 2 draws": {**_FTRL, _STRATEGY: "lambda_cgd"},
}


def get_config() -> SweepConfig:
  """Thirty runs of configs/mnist_redrawn.py."""
  from configs import mnist_redrawn

  base = mnist_redrawn.get_config()
  base.privacy.method = "dp_sgd"
  base.privacy.ftrl = FtrlConfig()
  return SweepConfig(
    base=base,
    variants=VARIANTS,
    grid={"privacy.epsilon": [1.0, 8.0]},
    seeds=[0, 1, 2],
    series="variant",
    title="MNIST, pixels + linear: white and correlated noise, 10 passes",
  )
