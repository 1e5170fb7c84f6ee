"""What a few bits cost: noise inside a secure sum against the noise of a trusted server.

  python -m launch.sweep --config=configs/sweeps/secure_sum.py --workdir=runs/secure_sum_bits

configs/fed/secure_sum.py without drop-outs at 12 to 20 bits, and the same with Gaussian noise
of the server (every user in every round, so nothing is amplified either).

Hardware: 2 busy CPU cores, a minute. Seen, one seed each, at epsilon 2 and 8: central .886 and
.944; 12 bits .858 and .925; 14 bits .911 and .933; 16 bits .914 and .925; 20 bits .919 and .942.
"""

import dataclasses
from typing import Any

from configs.fed import secure_sum
from dpjax.experiments.sweeps.grid import SweepConfig

_CENTRAL: dict[str, Any] = {
  "privacy": "central",
  "privacy.sampler": "poisson",
  "privacy.accountant": "rdp",
}
_BITS = (12, 14, 16, 20)


def get_config() -> SweepConfig:
  """Five ways to add noise at two epsilons."""
  return SweepConfig(
    base=dataclasses.replace(secure_sum.get_config(), secure_sum="none"),
    variants={
      "central": _CENTRAL,
      **{
        f"{bits} bits": {"secure_sum": {"name": "secagg", "bits": bits, "threshold": 1.0}}
        for bits in _BITS
      },
    },
    grid={"privacy.epsilon": [2.0, 8.0]},
    seeds=[0],
    series="variant",
    title="Noise in shares inside a secure sum, digits over 100 users",
  )
