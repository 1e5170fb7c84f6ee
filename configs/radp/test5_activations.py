"""Test 5 of Kang and Wang 2024 (figures 12 and 13): four activations, three data sets.

  python -m launch.relevance --config=configs/radp/test5_activations.py \\
    --workdir=runs/test5_activations

Four epochs in batches of 100; more: --config.base.num_epochs=40. MNIST at 1.5, Fashion-MNIST at
3, CIFAR-10 at 8, paper mode. The paper finds sigmoid and tanh above relu and leaky_relu.

Hardware: one of 2 CPU cores, 15 minutes. Seen on MNIST / Fashion-MNIST / CIFAR-10 (one seed,
last epoch): tanh .870 / .761 / .452, relu .824 / .771 / .464, leaky_relu .801 / .775 / .458,
sigmoid .724 / .739 / .304 and still rising: of the paper's verdict, tanh on MNIST is left.
"""

from collections.abc import Iterator

from configs.radp import common
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """Epsilons are those of the data sets, `common.MIDDLE`."""
  base = common.on("mnist", **common.paper("mnist"), num_epochs=4, batch_size=100)
  return Sweep(base=base, title="Test 5")


def get_configs(sweep: Sweep) -> Iterator[tuple[str, RelevanceConfig]]:
  activations = ("relu", "sigmoid", "leaky_relu", "tanh")
  changes = {name: {"activation": name} for name in activations}
  yield from common.everywhere(sweep.base, changes)
