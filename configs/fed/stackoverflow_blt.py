"""StackOverflow over its 342,477 users by BLT-DP-FTRL: correlated noise, no sampling. Six passes of
342 rounds, with 1,001 or 1,002 users in each. Epsilon 8 at delta 1e-6 per USER, but for the words.

  pip install -e '.[h5]'
  python -m launch.federate --config=configs/fed/stackoverflow_blt.py --workdir=runs/fed_blt \\
    --config.data.data_dir=data

The file, its words and the model are those of configs/fed/stackoverflow.py. Tree aggregation in
place of the buffered linear Toeplitz matrix (McMahan, Xu and Zhang 2024, arXiv:2408.08868):
  ... --config.privacy.strategy=tree
White noise, with what sampling would amplify left out:
  ... --config.privacy.strategy=identity

Hardware: not run. The data are not embedded, and no number is claimed.
`tests/runs/test_pfl_benchmarks.py` runs eight rounds of it over users made up in the same format.

The clients' rate and the clip norm are those of configs/fed/stackoverflow.py, not tuned for this
noise.
"""

from configs.fed import stackoverflow
from dpjax.experiments.kinds.federated.config import (
  FedConfig,
  FedFtrl,
  ServerOptimizerConfig,
)
from dpjax.noise import correlated


def get_config() -> FedConfig:
  config = stackoverflow.get_config()
  config.server_optimizer = ServerOptimizerConfig(
    rule={"name": "sgd", "momentum": 0.9}, learning_rate=1.0
  )
  config.privacy = FedFtrl(
    epsilon=8.0, delta=1e-6, l2_clip_norm=1.0, strategy=correlated.Buffered()
  )
  config.num_rounds = 2_052
  # A pass is a whole number of rounds.
  config.clients_per_round = 342_477 / 342
  config.eval_every = 57
  config.checkpoint_every = 57
  return config
