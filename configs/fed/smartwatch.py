"""Ten people with a smartwatch, eight of whom train: each hides every RECORDING of theirs.

pip install -e '.[data]'
python -m launch.federate --config=configs/fed/smartwatch.py --workdir=runs/smartwatch
"""

from dpjax.experiments.kinds.central.config import DataConfig, ModelConfig
from dpjax.experiments.kinds.federated.config import (
  FedConfig,
  FedOptimizerConfig,
  LocalConfig,
  Records,
)


def get_config() -> FedConfig:
  return FedConfig(
    data=DataConfig(name="smartwatch"),
    partition="natural",
    model=ModelConfig(name="linear"),
    local=LocalConfig(batch_size=None, epochs=1),
    client_optimizer=FedOptimizerConfig(learning_rate=2.0),
    # The study's plan says how many recordings a person makes: two of each of seven exercises.
    privacy=Records(epsilon=8.0, delta=1e-3, l2_clip_norm=1.0, num_examples=(14,) * 8),
    num_rounds=30,
    eval_every=30,
    checkpoint_every=30,
  )
