"""CIFAR-10 over epsilon .1 to 8 on features of a public VGG16 of 96x96 images, three seeds.

  python -m launch.sweep --config=configs/sweeps/cifar10_vgg_96.py --workdir=runs/cifar10_vgg_96

The runs of configs/sweeps/cifar10_vgg.py with four times the pixels. Its learning rates are taken
over as they are. The features take an hour and a half of one core, once: set DPJAX_CACHE_DIR to
keep them. Needs what that config needs.
"""

from collections.abc import Iterator
from typing import Any

from configs.sweeps import cifar10_vgg
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """Twenty-seven runs of `vgg16_96_linear`."""
  sweep = cifar10_vgg.get_config()
  sweep.base.model.name = "vgg16_96_linear"
  sweep.title = "CIFAR-10, features of ImageNet's VGG16 at 96x96 + linear"
  return sweep


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  return cifar10_vgg.runs(sweep, "VGG16 at 96x96")
