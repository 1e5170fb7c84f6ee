"""CIFAR-10 over epsilon .1 to 8 and without noise: six lines, three seeds.

  python -m launch.sweep --config=configs/sweeps/cifar10_curves.py --workdir=runs/cifar10_curves

Scattering + linear is configs/cifar10_scatter_linear.py, with the price of the channels'
statistics in proportion to epsilon, and a smaller learning rate below epsilon 1; by Poisson
sampling, by random allocation and by DP-FTRL. The last one's epsilons are of replace_special,
another statement; both take 6 steps for a pass, Poisson sampling 6.1. A CNN on the same
features takes half the batch, and 100 or 150 steps. The equivariant network on pixels is that of
configs/cifar10_equivariant.py without its normalisation, for longer; the tempered-sigmoid one
has two layers and trains by the same rules.
Needs CIFAR-10 prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.base.data.data_dir) and
6 GB of memory. Hardware: 2 CPU cores, two minutes a run, more of the equivariant network; it
goes on where it was stopped. Numbers: results/cifar10_curves.
"""

from collections.abc import Iterator
from typing import Any

from configs.sweeps.mnist_curves import curves, over_epsilon, paid
from dpjax.experiments.kinds.central.config import DpSgd
from dpjax.experiments.sweeps.sweep import Sweep


def opponent(epsilon: float) -> dict:
  return {
    "privacy.normalization": paid("private_statistics", epsilon),
    "optimizer.learning_rate": 4.0 * min(1.0, epsilon),
  }


def cnn_on_features(epsilon: float) -> dict:
  return opponent(epsilon) | {
    "model.name": "scatter_cnn",
    "privacy.sampling_prob": 4096 / 50000,
    "optimizer.learning_rate": 16.0 * min(1.0, epsilon),
    "num_steps": 100 if epsilon < 0.5 else 150,
  }


def on_pixels(epsilon: float) -> dict:
  network = {"filters": (16, 32), "strides": (2, 1), "pool_after": (1,)}
  return {
    "data.center": True,
    "model.name": "convnet",
    "model.options": network | {"activation": "tempered_sigmoid"},
    "model.mirrored": False,
    "model.colours": "rgb",
    "privacy.sampling_prob": 1024 / 50000,
    "optimizer.learning_rate": 8.0 * min(1.0, epsilon),
    "num_steps": 200 if epsilon < 0.5 else 300 if epsilon < 2 else 400,
    "microbatch_size": 128,
  }


def equivariant(epsilon: float) -> dict:
  network = {"group": "C4", "filters": (8, 8, 16), "num_groups": None, "invariant": False}
  return on_pixels(epsilon) | {"model.name": "equivariant_cnn", "model.options": network}


LINES = {
  "opponent scattering + linear": opponent,
  "the same, random allocation": lambda epsilon: (
    opponent(epsilon)
    | {"privacy.sampler": "random_allocation", "privacy.sampling_prob": 1 / 6}
  ),
  "the same, DP-FTRL": lambda epsilon: (
    opponent(epsilon)
    | {
      "privacy": "dp_ftrl",
      "privacy.sampling_prob": 1 / 6,
      "privacy.neighboring_relation": "replace_special",
      "privacy.strategy.bands": 6,
    }
  ),
  "the same features, CNN": cnn_on_features,
  "tempered-sigmoid CNN": on_pixels,
  "C4-equivariant CNN": equivariant,
}


def get_config() -> Sweep:
  """The six lines."""
  from configs import cifar10_scatter_linear

  base = cifar10_scatter_linear.get_config()
  base.privacy.normalization = DpSgd().normalization  # the line has its own
  references = [
    ("Tramèr and Boneh 2021, linear", 3.0, 0.670),
    ("Tramèr and Boneh 2021, CNN", 3.0, 0.693),
    ("De et al. 2022, WRN-16-4", 1.0, 0.568),
    ("De et al. 2022, WRN-16-4", 2.0, 0.649),
    ("De et al. 2022, WRN-16-4", 4.0, 0.719),
    ("De et al. 2022, WRN-16-4", 8.0, 0.795),
  ]
  return curves(base, references, "CIFAR-10, delta 1e-5")


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  return over_epsilon(sweep.base, LINES, sweep.epsilons)
