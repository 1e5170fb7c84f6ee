"""MNIST: the tempered-sigmoid CNN of Papernot et al. 2021 (26,010 parameters), DP-SGD.

  python -m launch.train --config=configs/mnist_cnn.py --workdir=runs/mnist_cnn

Needs MNIST prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir).
Hardware: 2 CPU cores. Time: two to eight minutes (microbatches of 128 fit the caches: .8 of the
time of the whole batch at once; an accelerator may take --config.microbatch_size=none).
Expected: test accuracy .982 (.981-.983 over three seeds) at a proved epsilon of 2.93 (delta 1e-5,
Poisson, add/remove-one, per example). With --config.data.name=fashion_mnist
--config.privacy.epsilon=2.7: .866 (.864-.867; Papernot et al. .861).
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
    data=DataConfig(name="mnist", center=True),
    model=ModelConfig(name="cnn"),
    privacy=DpSgd(epsilon=2.93, delta=1e-5, sampling_prob=1024 / 60000, l2_clip_norm=0.1),
    optimizer=OptimizerConfig(learning_rate=1.5),
    num_steps=2000,
    microbatch_size=128,
    ema_decay=0.99,
    eval_every=250,
    checkpoint_every=250,
  )
