"""DLG on the LeNet of Zhu et al. 2019 and CIFAR-10: the rate falls with the client's noise.

  python -m launch.attack --config=configs/attack/gradient_inversion_cifar10.py --workdir=runs/dlg

Eight clients with an image each send one step of SGD. They clip it to BOUND, longer than any
of these messages, and add noise of sigma * BOUND themselves (privacy=local); the
adversary knows the bound and no noise. Needs the prepared CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.attack import common
from dpjax.experiments.config import fields
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
  """DLG on eight clients."""
  target = common.clients("cifar10", common.LENET, count=8)
  return AttackConfig(target=target, attack=common.DLG)


def get_configs(base: AttackConfig) -> Iterator[tuple[str, AttackConfig]]:
  """Without a defence, with five noises and with two compressions."""
  defences: dict[str, dict[str, Any]] = {"none": {}}
  for sigma in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2):
    defences[f"sigma {sigma:g}"] = _noise(sigma)
  defences["top-k"] = {"target.compression": "top_k"}
  defences["quantised"] = {"target.compression": "quantize"}
  for defence, changes in defences.items():
    yield f"DLG, {defence}", fields.replace_all(base, changes)
