"""A teacher and a student on the embedded digits (1,797 real 8x8 images), offline.

python -m launch.distill --config=configs/distillation/quickstart.py --workdir=runs/distill
"""

from dpjax.experiments.kinds.distillation.config import DistillationConfig


def get_config() -> DistillationConfig:
  return DistillationConfig()
