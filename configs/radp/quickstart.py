"""RADP on the embedded digits (1,797 real 8x8 images), offline, in both modes.

  python -m launch.relevance --config=configs/radp/quickstart.py --config.mode=paper
  python -m launch.relevance --config=configs/radp/quickstart.py --config.mode=rigorous

Give each its own --workdir. Hardware: 2 CPU cores; 9 s and 11 s of CPU time. Test accuracy,
three seeds, at epsilon 8: paper .961-.972 (claimed; 13.4 by its own theorem 7, 512 for the
features of one record; --audit shows at least 4.9 with 1,000 draws), rigorous .08-.19
(proved, pure, local, replace_one; its noise is no function of the seed): 1,437 records are
too few to learn from records that are noised one by one. With --config.method=radp_dpsgd the
relevance guides DP-SGD instead, at a proved epsilon.
"""

from dpjax.experiment.config import DataConfig, ModelConfig
from dpjax.experiment.relevance_config import RelevanceConfig
from dpjax.relevance import Rigorous


def get_config() -> RelevanceConfig:
  return RelevanceConfig(
    data=DataConfig(name="digits"),
    model=ModelConfig(name="mlp", options={"features": (64,)}),
    rigorous_model=ModelConfig(name="linear"),
    epsilons=[8.0],
    num_epochs=20,
    batch_size=100,
    learning_rate=5e-3,
    weight_decay=1.0,
    # Too few records to hide in a crowd: no shuffler, one budget for all records.
    rigorous=Rigorous(
      model1="untrained",
      split=False,
      shuffle=False,
      epsilon_b=0.5,
      budget_share_1=0.1,
      pool=2,
      clip=0.15,
    ),
    title="RADP on digits",
  )
