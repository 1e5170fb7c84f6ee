"""Test 5 of Kang and Wang 2024 (figures 12 and 13): four activations, three data sets.

  python -m launch.relevance --config=configs/radp/test5_activations.py \\
    --workdir=runs/test5_activations --config.num_seeds=3

Fewer epochs: --config.num_epochs=5. MNIST at 1.5, Fashion-MNIST at 3, CIFAR-10 at 8, paper
mode. The paper finds sigmoid and tanh above relu and leaky_relu.
"""

from configs.radp import common
from dpjax.experiment.relevance_config import RelevanceConfig


def get_config() -> RelevanceConfig:
  activations = ("relu", "sigmoid", "leaky_relu", "tanh")
  curves = {name: {"activation": name} for name in activations}
  return common.on("mnist", curves=common.everywhere(curves), title="Test 5")
