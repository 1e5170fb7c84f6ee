"""A server that fishes for one class, against four clients with batches of 64 of CIFAR-10.

  python -m launch.attack --config=configs/attack/fishing_cifar10.py --workdir=runs/fishing

The model that the server sends silences all classes but one (Wen et al. 2022). The bins of its
first layer then hold the few records of that class (Fowl et al. 2022), whatever the batch. Without
fishing the bins hold all records, and more of them share one. Needs the prepared CIFAR-10.

Its table: `results/attacks/fishing_cifar10`. The tests hold what both servers read, on small images
(`tests/attacks/test_rogue_server.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.attack import common
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central.config import ModelConfig

_MODEL = ModelConfig(name="mlp", options={"features": (256,), "activation": "relu"})
_LOCAL = {"target.privacy": "local", "target.privacy.l2_clip_norm": 0.1}
_CLIPPED = {"target.privacy.epsilon": None, "target.privacy.noise_multiplier": 0.0}
_SUM = {"target.secure_sum": "secagg", "target.clients_per_round": 4}
_DEFENCES: dict[str, dict[str, Any]] = {
  "none": {},
  "clipping": {**_LOCAL, **_CLIPPED},
  "secure sum of 4": _SUM,
  "epsilon 8": {**_LOCAL, "target.privacy.epsilon": 8.0},
}


def get_config() -> AttackConfig:
  """Four clients with batches of 64."""
  target = common.clients("cifar10", _MODEL, count=4, batch=64)
  return AttackConfig(target=target, attack="fishing")


def get_configs(base: AttackConfig) -> Iterator[tuple[str, AttackConfig]]:
  """Four defences against both servers."""
  for attack, word in (("bins", "imprint"), ("fishing and bins", "fishing")):
    for defence, changes in _DEFENCES.items():
      changed = {"attack": word, **changes}
      yield f"{attack}, {defence}", fields.replace_all(base, changed)
