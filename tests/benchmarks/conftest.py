"""What several benchmarks are tried on."""

import pytest

_CONFIG = """
from dpjax.experiments.kinds.central.config import DpSgd, ModelConfig, TrainConfig

def get_config():
  privacy = DpSgd(epsilon=None, noise_multiplier=1.0)
  return TrainConfig(model=ModelConfig("linear"), privacy=privacy, num_steps=2)
"""


@pytest.fixture
def small_run(tmp_path):
  """The file of a config of a run on digits, of two steps and without an epsilon."""
  path = tmp_path / "small.py"
  path.write_text(_CONFIG)
  return path
