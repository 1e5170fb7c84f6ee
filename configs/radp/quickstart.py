"""RADP on the embedded digits (1,797 real 8x8 images), offline, as the paper has it.

  python -m launch.relevance --config=configs/radp/quickstart.py --workdir=runs/radp

Hardware: 2 CPU cores; 9 s of CPU time. Test accuracy at epsilon 8: .969 +- .005 (ten runs, each
with its own keys; a new run lies in [.957, .981] with 95 %). That epsilon is claimed: it is 13.4
by the paper's own theorem 7, 512 for the features of one record, and --audit shows at least 4.9
with 1,000 draws. quickstart_proved.py beside it is the mode with a proof. With
--config.method=radp_dpsgd the relevance guides DP-SGD instead, at a proved epsilon.
"""

from dpjax.experiments.config.sections import ExamplesConfig, NetworkConfig
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.kinds.relevance.methods import Radp


def get_config() -> RelevanceConfig:
  return RelevanceConfig(
    data=ExamplesConfig(name="digits"),
    model=NetworkConfig(name="mlp", options={"features": (64,)}),
    epsilon=8.0,
    num_epochs=20,
    batch_size=100,
    method=Radp(learning_rate=5e-3),
  )
