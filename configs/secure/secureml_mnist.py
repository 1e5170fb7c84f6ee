"""SecureML on MNIST: 784-128-128-10 trained on shares by two parties and a dealer.

python -m launch.secure --config=configs/secure/secureml_mnist.py --workdir=runs/secureml

Hardware: 2 CPU cores, busy; a minute. Seen: accuracy .9437 on all 10,000 test images, in the clear
.9442; 468 steps in 51 s, 19,656 rounds, 6.7 GB between the parties, 2.9 from the dealer. See
results/secure/secureml_mnist.
"""

from __future__ import annotations

from collections.abc import Iterator

from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.kinds.secure.two_parties import TrainTask


def get_config() -> SecureConfig:
  """One epoch; three are in results/secure/secureml.json."""
  network = TrainTask(
    dataset="mnist",
    hidden=(128, 128),
    learning_rate=0.25,
    epochs=1,
    batch_size=128,
    num_predicted=10_000,
  )
  return SecureConfig(task=network)


def get_configs(base: SecureConfig) -> Iterator[tuple[str, SecureConfig]]:
  yield "train, MNIST, 784-128-128-10", base
