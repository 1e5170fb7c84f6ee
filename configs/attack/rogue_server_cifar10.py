"""A server that sends a model made to leak, against four clients with batches of CIFAR-10.

  python -m launch.attack --config=configs/attack/rogue_server_cifar10.py --workdir=runs/rogue

The first layer of the model that it sends is 256 bins (Fowl et al. 2022). One gradient then
shows most images of a batch, exactly; and so does a sum over four clients, however it is made.
Needs the prepared CIFAR-10.

Hardware: one of 2 busy CPU cores; 2 minutes. Seen: 64 of 64 images exactly without a defence and
under clipping, 52 from one secure sum of four clients, 11 after four local steps, none under noise
of the clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.attack import common
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central.config import ModelConfig

_MODEL = ModelConfig(name="mlp", options={"features": (256,), "activation": "relu"})
_LOCAL = {
  "target.privacy": "local",
  "target.privacy.epsilon": None,
  "target.privacy.l2_clip_norm": 0.1,
}
_NOISE = "target.privacy.noise_multiplier"
_DEFENCES: dict[str, dict[str, Any]] = {
  "none": {},
  "clipping": {**_LOCAL, _NOISE: 0.0},
  "noise .01": {**_LOCAL, _NOISE: 0.01},
  "noise 2": {**_LOCAL, _NOISE: 2.0},
  "secure sum of 4": {"target.secure_sum": "secagg", "target.clients_per_round": 4},
  "4 local steps": {"target.local.epochs": 4},
  "top-k": {"target.compression": "top_k"},
}


def get_config() -> AttackConfig:
  """Four clients with batches of 16."""
  target = common.clients("cifar10", _MODEL, count=4, batch=16)
  return AttackConfig(target=target, attack="imprint")


def get_configs(base: AttackConfig) -> Iterator[tuple[str, AttackConfig]]:
  """Seven defences, and an honest model of the same shape."""
  yield "honest server, none", fields.replace(base, "attack", "dense_first")
  for defence, changes in _DEFENCES.items():
    yield f"rogue server, {defence}", fields.replace_all(base, changes)
