"""Faces out of messages: a first dense layer gives eight people's pictures to the server.

  pip install -e '.[data]'
  python -m launch.attack --config=configs/attack/faces.py --workdir=runs/faces

Eight clients hold a face each (25x25, of scikit-image) and send one step of training. What DP-SGD
makes of it: each client clips its message and adds noise itself. Noise of the server does not help
against the server. Each row writes reconstructions.png.
Hardware: 2 busy CPU cores, 25 s of processor time.
Seen: 8 of 8 faces exactly without a defence (in each of ten runs), with clipping alone, and with
the server's noise (one run each). With noise of .001 of the clip norm .84 +- .12 of them (ten
runs). None in any of ten runs with .01, where a proved epsilon is still 20,860, nor at 8; none at
100 in one run. That an attack finds nothing is no proof; the epsilon is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.kinds.federated.config import (
  ClientOptimizerConfig,
  FedConfig,
  FedDataConfig,
  LocalConfig,
  NoPrivacy,
)

_CLIPPED = {"target.privacy": "local", "target.privacy.l2_clip_norm": 0.1}
_NOISE = "target.privacy.noise_multiplier"
_WITHOUT_EPSILON = {**_CLIPPED, "target.privacy.epsilon": None}
_DEFENCES: dict[str, dict[str, Any]] = {
  "none": {},
  "clipping": {**_WITHOUT_EPSILON, _NOISE: 0.0},
  "noise .001": {**_WITHOUT_EPSILON, _NOISE: 0.001},
  "noise .01": {**_WITHOUT_EPSILON, _NOISE: 0.01},
  "epsilon 100": {**_CLIPPED, "target.privacy.epsilon": 100.0},
  "epsilon 8": {**_CLIPPED, "target.privacy.epsilon": 8.0},
  "server's noise": {"target.privacy": "central", "target.privacy.l2_clip_norm": 0.1},
}


def get_config() -> AttackConfig:
  """Eight clients with a face each."""
  return AttackConfig(
    attack="dense_first",
    target=FedConfig(
      data=FedDataConfig(name="faces", limit=8),
      partition={"name": "iid", "num_clients": 8},
      model=ModelConfig(name="mlp", options={"features": (64,), "activation": "sigmoid"}),
      local=LocalConfig(batch_size=None, epochs=1),
      client_optimizer=ClientOptimizerConfig(learning_rate=0.1),
      privacy=NoPrivacy(),
      num_rounds=1,
      clients_per_round=2,
    ),
  )


def get_configs(base: AttackConfig) -> Iterator[tuple[str, AttackConfig]]:
  """Without a defence, with clipping, and with noise."""
  for defence, changes in _DEFENCES.items():
    yield f"dense layer first, {defence}", fields.replace_all(base, changes)
