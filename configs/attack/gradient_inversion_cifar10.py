"""DLG on the LeNet of Zhu et al. 2019 and CIFAR-10: the rate falls with the client's noise.

  python -m launch.attack --config=configs/attack/gradient_inversion_cifar10.py --workdir=runs/dlg

Eight clients with an image each send one step of SGD. They clip it to BOUND, longer than any
of these messages, and add noise of sigma * BOUND themselves (privacy=local); the
adversary knows the bound and no noise. Needs the prepared CIFAR-10.
"""

from __future__ import annotations

from typing import Any

from configs.attack import common
from dpjax.experiments.kinds.attack.config import AttackConfig

BOUND = 30.0


def _noise(sigma: float) -> dict[str, Any]:
  return {
    "target.privacy": "local",
    "target.privacy.epsilon": None,
    "target.privacy.noise_multiplier": sigma,
    "target.privacy.l2_clip_norm": BOUND,
  }


def get_config() -> AttackConfig:
  """One attack without a defence, with five noises and with two compressions."""
  rows: dict[str, dict[str, Any]] = {"DLG, none": {}}
  for sigma in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2):
    rows[f"DLG, sigma {sigma:g}"] = _noise(sigma)
  rows["DLG, top-k"] = {"target.compression": "top_k"}
  rows["DLG, quantised"] = {"target.compression": "quantize"}
  return AttackConfig(
    target=common.clients("cifar10", common.LENET, count=8),
    attack=common.DLG,
    rows=rows,
    title="CIFAR-10, LeNet",
  )
