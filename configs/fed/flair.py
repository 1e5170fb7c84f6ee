"""FLAIR over its 41,131 photographers, as pfl-research's benchmark has it: 17 labels, several of a
photograph. The noise is that of 5,000 clients a round, of a million: the epsilon is that of a
deployment. It is a claim, since the labels are those that occur in the users' photographs.

  pip install -e '.[h5]'
  python -m launch.federate --config=configs/fed/flair.py --workdir=runs/fed_flair \\
    --config.data.data_dir=data

Before that, in a clone of github.com/apple/pfl-research, its benchmarks' command writes the file:
  python -m dataset.flair.download_preprocess --output_file data/flair_federated.hdf5
For 1,628 fine labels: --config.partition.fine_grained=true --config.data.num_classes=1628

Hardware: not run. The data (345,879 photographs) are not embedded, and no number is claimed.
`tests/runs/test_pfl_benchmarks.py` runs two rounds of it over users made up in the same format.
At 64 pixels a side the photographs take 17 GB as float32.

Cohort, clip norm, rates, local batches and epochs are those of pfl-research's baseline.yaml. Its
network is a ResNet-18 that ImageNet has trained. Here it is a WRN-16-4 that starts
from random weights, so its scores are not those of the benchmark.
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
    data=FedDataConfig(name="flair_federated.hdf5", num_classes=17, num_users=41_131),
    partition={"name": "pfl", "image_size": 64, "max_examples": 512},
    model=ModelConfig(name="wrn_16_4"),
    local=LocalConfig(batch_size=16, epochs=2),
    client_optimizer=ClientOptimizerConfig(learning_rate=0.01),
    server_optimizer=ServerOptimizerConfig(rule="adam", learning_rate=0.1),
    privacy=Central(
      epsilon=2.0,
      delta=1e-6,
      l2_clip_norm=0.1,
      simulated_cohort=5_000,
      simulated_clients=1_000_000,
    ),
    num_rounds=5_000,
    clients_per_round=200,
    eval_every=20,
    checkpoint_every=20,
  )
