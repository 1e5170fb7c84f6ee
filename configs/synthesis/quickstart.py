"""Private synthesis of the embedded digits (1,797 real 8x8 images), offline.

  python -m launch.synthesize --config=configs/synthesis/quickstart.py --workdir=runs/synthesis

Hardware: 2 CPU cores, a minute. 2,000 samples at a proved epsilon of 8 (delta 1e-5).
"""

from dpjax.experiments.kinds.synthesis.config import SynthesisConfig


def get_config() -> SynthesisConfig:
  return SynthesisConfig(epsilon=8.0)
