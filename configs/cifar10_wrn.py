"""CIFAR-10: a WRN-16-4 with augmentation multiplicity, DP-SGD (De et al. 2022), for a GPU.

  python -m launch.train --config=configs/cifar10_wrn.py --workdir=runs/cifar10_wrn

Needs CIFAR-10 prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir) and one
accelerator; the same command goes on where it was stopped (a checkpoint every 25 steps).
microbatch_size decides what it takes of memory, mesh=data:8 how many devices share a batch.
Batches of 4,096, 16 copies of each image, clip norm 1, learning rate 2 and the average of the
parameters are the paper's (arXiv 2204.13650) and its released code's; as are the numbers of steps
in configs/sweeps/cifar10_wrn.py. The noise is calibrated here, by PLD.
Expected: the paper has .568 at a proved epsilon of 1 (.649 at 2, .719 at 4, .795 at 8; delta
1e-5, Poisson, add/remove-one, per example). It has not been run here: a step is
65,536 images, forwards and backwards.
"""

from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)


def get_config() -> TrainConfig:
  return TrainConfig(
    data=DataConfig(name="cifar10", center=True),
    model=ModelConfig(name="wrn_16_4"),
    privacy=DpSgd(epsilon=1.0, delta=1e-5, sampling_prob=4096 / 50000, l2_clip_norm=1.0),
    optimizer=OptimizerConfig(rule={"name": "sgd", "momentum": 0.0}, learning_rate=2.0),
    augmentation="flip_shift",
    augmult=16,
    num_steps=875,
    microbatch_size=64,
    ema_decay=0.9999,
    eval_every=125,
    checkpoint_every=25,
  )
