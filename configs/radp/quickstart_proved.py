"""RADP on the embedded digits (1,797 real 8x8 images), offline, with a proof.

  python -m launch.relevance --config=configs/radp/quickstart_proved.py \\
    --workdir=runs/radp_proved

Hardware: 2 CPU cores; 11 s of CPU time. Test accuracy, six runs, at epsilon 8: .08-.30
(proved, pure, local, replace_one; its noise is no function of the seed): 1,437 records are
too few to learn from records that are noised one by one. These runs had no weight decay: a
setting of 1.0 that stood here before was never read, and is gone.
"""

from configs.radp import quickstart
from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.relevance import Rigorous


def get_config() -> RelevanceConfig:
  """The paper's quickstart in the rigorous mode."""
  config = quickstart.get_config()
  config.mode = "rigorous"
  config.rigorous_model = ModelConfig(name="linear")
  # Too few records to hide in a crowd: no shuffler, one budget for all records.
  config.rigorous = Rigorous(
    model1="untrained",
    split=False,
    shuffle=False,
    epsilon_b=0.5,
    pool=2,
    clip=0.15,
  )
  return config
