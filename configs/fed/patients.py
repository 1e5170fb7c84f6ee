"""Three hospitals that train together, private for each PATIENT.

python -m launch.federate --config=configs/fed/patients.py --workdir=runs/patients
"""

from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.kinds.federated.config import (
  ClientOptimizerConfig,
  FedConfig,
  FedDataConfig,
  LocalConfig,
  Records,
)


def get_config() -> FedConfig:
  return FedConfig(
    data=FedDataConfig(name="breast_cancer", center=True),
    partition={
      "name": "silos",
      "num_clients": 3,
      "sizes": (299, 128, 30),
      "skew": 0.5,
    },
    model=ModelConfig(name="linear"),
    algorithm={"name": "mr_mtl", "lam": 0.03},
    local=LocalConfig(batch_size=30, epochs=1),
    client_optimizer=ClientOptimizerConfig(learning_rate=1.0),
    privacy=Records(epsilon=1.0, delta=1e-3, l2_clip_norm=1.0),
    num_rounds=10,
    eval_every=5,
    checkpoint_every=5,
  )
