"""MNIST: scattering features and a linear model, DP-FTRL whose noise needs no extra memory.

  python -m launch.train --config=configs/mnist_scatter_redrawn.py --workdir=runs/mnist_redrawn

Needs MNIST prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir).
Hardware: 2 CPU cores. Time: PENDING.
Expected: PENDING

Batches come in a fixed, public order, 20 passes of 15 steps. Each step's noise is a sum of four
white draws (`noise.correlated.BandInvMf`). Those of earlier steps are drawn again, which takes no
memory. This model is small: --config.privacy.ftrl.strategy.redraw=false would be quicker.
"""

from configs import mnist_scatter_ftrl
from dpjax.experiments.kinds.central.config import FtrlConfig, TrainConfig
from dpjax.noise.correlated import BandInvMf


def get_config() -> TrainConfig:
  config = mnist_scatter_ftrl.get_config()
  config.privacy.ftrl = FtrlConfig(
    sampler="cyclic", strategy=BandInvMf(bands=4, redraw=True)
  )
  config.optimizer.learning_rate = 8.0
  config.num_steps = 300
  config.eval_every = 100
  config.checkpoint_every = 300
  return config
