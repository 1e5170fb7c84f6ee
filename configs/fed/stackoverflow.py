"""StackOverflow over its 342,477 users, as pfl-research's benchmark has it: next of 10,000 words.
The noise is that of 5,000 clients a round, of a million: the epsilon is that of a deployment.

  pip install -e '.[h5]'
  python -m launch.federate --config=configs/fed/stackoverflow.py --workdir=runs/fed_words \\
    --config.data.data_dir=data

Before that, in a clone of github.com/apple/pfl-research, its benchmarks' command writes the file:
  python -m dataset.stackoverflow.download_preprocess --output_dir data

Hardware: not run. The data (135,818,730 sentences) are not embedded, and no number is claimed.
`tests/runs/test_pfl_benchmarks.py` runs two rounds of it over users made up in the same format.
With 64 sentences of each user they take 1.6 GB.

Cohort, clip norm, rates and local batches are those of pfl-research's baseline.yaml (64 sentences
of a user as in Wang et al. 2021). Its transformer has 1,536 hidden units in each block, this one
has 384, and its Adam has an epsilon of .01, this one .001. The words of the file were chosen by
how many users have them, which no epsilon covers: so it is a claim.
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
    data=FedDataConfig(name="stackoverflow.hdf5", num_users=342_477),
    partition={"name": "pfl", "max_examples": 64},
    model=ModelConfig(
      name="transformer",
      options={"num_layers": 3, "num_heads": 8, "features": 96, "max_length": 21},
    ),
    local=LocalConfig(batch_size=16, epochs=1),
    client_optimizer=ClientOptimizerConfig(learning_rate=0.3),
    server_optimizer=ServerOptimizerConfig(rule="adam", learning_rate=0.1),
    privacy=Central(
      epsilon=2.0,
      delta=1e-6,
      l2_clip_norm=1.0,
      simulated_cohort=5_000,
      simulated_clients=1_000_000,
    ),
    num_rounds=2_000,
    clients_per_round=400,
    eval_every=20,
    checkpoint_every=20,
    targets=(0.2, 0.25),
  )
