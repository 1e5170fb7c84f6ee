"""FEMNIST over its 3,400 writers: letters and digits, privacy for each writer with every
character of theirs. Epsilon 8 at delta 1e-4, proved, per USER.

  python -m launch.prepare --dataset=femnist --data_dir=data
  python -m launch.federate --config=configs/fed/femnist.py --workdir=runs/fed_femnist \\
    --config.data.data_dir=data

The first downloads TensorFlow Federated's database (170 MB, 4.7 GB unpacked): 671,585 training
images of 62 classes, 77,483 for the test. Another source of the same images is LEAF
(./preprocess.sh -s niid --sf 1.0 -k 0 -t sample in its data/femnist):
  ... --config.partition=leaf --config.partition.shape=28,28,1 \\
    --config.data.name=leaf/data/femnist/data --config.data.data_dir=none
and the older HDF5 files (pip install -e '.[h5]'): --config.data.name=fed_emnist_train.h5.

Not run: the data are not embedded, and no number is claimed. `tests/runs/test_natural_clients.py`
runs two rounds of it, with a linear model, over 40 writers made up in the same format.
Images take 2.1 GB as float32; --config.partition.max_examples=100 keeps the first hundred of
each writer. The rate of learning and the clip norm are those of the MNIST configs, not tuned.
"""

from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.kinds.federated.config import (
  Central,
  ClientOptimizerConfig,
  FedConfig,
  FedDataConfig,
  LocalConfig,
  ServerOptimizerConfig,
)


def get_config() -> FedConfig:
  return FedConfig(
    data=FedDataConfig(
      name="emnist_all.sqlite", num_classes=62, num_users=3_400, center=True
    ),
    partition="tff",
    model=ModelConfig(name="cnn"),
    local=LocalConfig(batch_size=20, epochs=1, max_examples=200),
    client_optimizer=ClientOptimizerConfig(learning_rate=0.1),
    server_optimizer=ServerOptimizerConfig(
      rule={"name": "sgd", "momentum": 0.9}, learning_rate=1.0
    ),
    privacy=Central(epsilon=8.0, delta=1e-4, l2_clip_norm=0.3),
    num_rounds=500,
    clients_per_round=340,
    eval_every=50,
    checkpoint_every=50,
    targets=(0.7, 0.8),
  )
