"""Which reading of the paper gives its numbers? Presets P1 to P5 on mnist, paper mode.

  python -m launch.relevance --config=configs/radp/presets_mnist.py \\
    --workdir=runs/presets_mnist --config.num_seeds=3

Fewer epochs: --config.num_epochs=5. At the epsilon whose numbers the text states. P1 is
Algorithm 3 as printed; P3 to P5 are the noise that the code of AdLM, its ancestor, really
adds; "P3, fresh" draws it anew in each epoch.
"""

from configs.radp import common
from dpjax.experiment.relevance_config import RelevanceConfig


def get_config() -> RelevanceConfig:
  curves = common.READINGS
  epsilons = [common.LAST["mnist"]]
  return common.on("mnist", curves=curves, epsilons=epsilons, title="Presets: mnist")
