"""FedAvg on MNIST through every secure sum, each protocol actually run, beside the plain mean.

  python -m launch.sweep --config=configs/sweeps/secure_sums_mnist.py --workdir=runs/secure_sums

Twenty users, all of them in every round, and local steps on all of a user's images: nothing is
drawn, so runs differ by the rounding of messages to integers alone. Needs MNIST prepared by
tensorflow-datasets, and the extras `secure` and `he`.

Hardware: 2 busy CPU cores, 2 minutes. Seen: .8204 by the plain mean, by the simulation and by all
five protocols; .8203 with 16 bits. (Few and small steps, so that no rounding is amplified: at a
learning rate of .1 these steps are unstable, and no two runs agree.)
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.kinds.federated.config import (
  ClientOptimizerConfig,
  FedConfig,
  FedDataConfig,
  LocalConfig,
  NoPrivacy,
)
from dpjax.experiments.sweeps.sweep import Sweep

_PROTOCOLS = ("additive_sharing", "additive_servers", "secagg", "secagg_plus", "bfv")


def _base() -> FedConfig:
  return FedConfig(
    data=FedDataConfig(name="mnist", center=True),
    partition={"name": "iid", "num_clients": 20},
    model=ModelConfig(name="linear"),
    local=LocalConfig(batch_size=None, epochs=5),
    client_optimizer=ClientOptimizerConfig(learning_rate=0.02),
    privacy=NoPrivacy(sampler="fixed_size"),
    num_rounds=12,
    clients_per_round=20,
    eval_every=6,
    checkpoint_every=12,
    targets=(0.85, 0.9),
  )


def get_config() -> Sweep:
  """The plain mean, the simulation, five protocols, and few bits."""
  return Sweep(
    base=_base(), series="variant", picture="points", title="MNIST through secure sums"
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  sums: dict[str, Any] = {
    "plain": "none",
    "simulated": "secagg",
    "simulated, 16 bits": {"name": "secagg", "bits": 16, "largest_value": 0.25},
  }
  for name in _PROTOCOLS:
    sums[name] = {"name": name, "bits": 32, "simulated": False}
  for name, how in sums.items():
    yield name, fields.replace(sweep.base, "secure_sum", how)
