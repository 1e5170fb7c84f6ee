"""What a few bits cost: noise inside a secure sum against the noise of a trusted server.

  python -m launch.sweep --config=configs/sweeps/secure_sum.py --workdir=runs/secure_sum_bits

configs/fed/secure_sum.py without drop-outs at 12 to 20 bits, and the same with Gaussian noise
of the server (every user in every round, so nothing is amplified either).

Hardware: 2 busy CPU cores, a minute. Seen, one seed each, at epsilon 2 and 8: central .886 and
.944; 12 bits .858 and .925; 14 bits .911 and .933; 16 bits .914 and .925; 20 bits .919 and .942.
"""

from collections.abc import Iterator
from typing import Any

from configs.fed import secure_sum
from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep

_CENTRAL: dict[str, Any] = {
  "privacy": "central",
  "privacy.sampler": "poisson",
  "privacy.accountant": "rdp",
}
_BITS = (12, 14, 16, 20)


def get_config() -> Sweep:
  """Five ways to add noise at two epsilons."""
  return Sweep(
    base=fields.replace(secure_sum.get_config(), "secure_sum", "none"),
    epsilons=[2.0, 8.0],
    series="variant",
    title="Noise in shares inside a secure sum, digits over 100 users",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  ways = {"central": _CENTRAL}
  for bits in _BITS:
    how = {"name": "secagg", "bits": bits, "threshold": 1.0}
    ways[f"{bits} bits"] = {"secure_sum": how}
  for name, changes in ways.items():
    for epsilon in sweep.epsilons:
      changed = changes | {"privacy.epsilon": epsilon}
      yield f"{name} @ {epsilon:g}", fields.replace_all(sweep.base, changed)
