"""CIFAR-10 at epsilon 3: what each part of a recipe adds, one change at a time.

  python -m launch.sweep --config=configs/sweeps/ablations_cifar10.py --workdir=runs/ablations

Every row is the network of configs/cifar10_equivariant.py for two passes, but for what its
label says. What pre-training adds: the commands of configs/random_process_pretrain.py and
configs/random_process_contrastive.py.
Hardware: 2 CPU cores, 67 to 187 s a run, beside another. Numbers, of one seed:
results/ablations_cifar10. Nothing is tuned again for a change, and differences below .03 or so are
noise: the base with microbatches of 128, which draws other noise, reaches .493.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep

CHANGES: dict[str, dict[str, Any]] = {
  "C4 network": {},
  "no symmetry, as wide (C1)": {
    "model.options": {"group": "C1", "filters": (32, 32, 64), "invariant": False}
  },
  "no normalisation": {
    "model.options": {
      "group": "C4", "filters": (8, 8, 16), "invariant": False, "num_groups": None
    }
  },
  "cosine schedule": {"optimizer.schedule": "cosine"},
  "averaged parameters (.95)": {"ema_decay": 0.95},
  "batches of 4,096, 25 steps": {"privacy.sampling_prob": 4096 / 50000, "num_steps": 25},
  "turns and mirrors (D4)": {
    "model.options": {"group": "D4", "filters": (4, 4, 8), "num_groups": 4, "invariant": False}
  },
  "private statistics of the pixels": {
    "privacy.normalization": {
      "name": "private_statistics", "noise_multiplier": 16.0, "median_epsilon": 0.02
    }
  },
  "head sees the mean over positions": {
    "model.options": {"group": "C4", "filters": (8, 8, 16), "invariant": True}
  },
  "batches of 256, 400 steps": {"privacy.sampling_prob": 256 / 50000, "num_steps": 400},
  "two augmented copies": {"augmentation": "flip_shift", "augmult": 2},
}  # fmt: skip


def get_config() -> Sweep:
  """The base of all changes."""
  from configs import cifar10_equivariant

  return Sweep(
    base=fields.replace(cifar10_equivariant.get_config(), "privacy.epsilon", 3.0),
    series="variant",
    picture="points",
    title="CIFAR-10, a small CNN at epsilon 3: what each part adds",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for name, changes in CHANGES.items():
    yield name, fields.replace_all(sweep.base, changes)
