"""RADP on the embedded digits (1,797 real 8x8 images), offline, with a proof.

  python -m launch.relevance --config=configs/radp/quickstart_proved.py \\
    --workdir=runs/radp_proved

Hardware: 2 CPU cores; 11 s of CPU time. Test accuracy, six runs, at epsilon 8: .08-.30
(proved, pure, local, replace_one; its noise is no function of the seed): 1,437 records are
too few to learn from records that are noised one by one. These runs had no weight decay: a
setting of 1.0 that stood here before was never read, and is gone.
"""

from configs.radp import quickstart
from dpjax.experiments.config.sections import NetworkConfig
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.kinds.relevance.methods import RadpRigorous, Untrained


def get_config() -> RelevanceConfig:
  """The paper's quickstart, with a proof."""
  config = quickstart.get_config()
  # Too few records to hide in a crowd: no shuffler, one budget for all records.
  config.method = RadpRigorous(
    model1=Untrained(split_share=None, epsilon_b=0.5),
    features={"name": "laplace_clipped", "clip": 0.15},
    shuffle=False,
    pool=2,
    reduced_model=NetworkConfig(name="linear"),
    learning_rate=5e-3,
  )
  return config
