"""The table: each method's claimed epsilon, its epsilon by theorem 7, what is proved, what
an attack shows, and the accuracy. On the embedded digits, offline.

  python -m launch.relevance --config=configs/radp/table.py \\
    --workdir=runs/table

For MNIST: --config.base.data.name=mnist --config.base.model.name=radp_mnist
--config.base.model.options={} --config.base.batch_size=600.
"RADP, proved" has no weight decay: a setting of 3.0 that stood here was never read.
Writes claims.md and claims.csv. The attacks: U1 likelihood ratio of one record's noisy
features, U2 subtraction where records share their noise, U3 wrong-label canaries and U4
membership (one run each).
"""

from collections.abc import Iterator
from typing import Any

from configs.radp import common
from dpjax.experiments.config.sections import ExamplesConfig, NetworkConfig
from dpjax.experiments.kinds.relevance.config import RelevanceAudit, RelevanceConfig
from dpjax.experiments.kinds.relevance.methods import Radp
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  base = RelevanceConfig(
    data=ExamplesConfig(name="digits"),
    model=NetworkConfig(name="mlp", options={"features": (64,)}),
    num_epochs=20,
    batch_size=100,
    method=Radp(learning_rate=5e-3),
    audit=RelevanceAudit(),
  )
  return Sweep(base=base, epsilons=[2.0], title="Claimed, proved, refuted: digits")


def get_configs(sweep: Sweep) -> Iterator[tuple[str, RelevanceConfig]]:
  proved = {
    "name": "radp_rigorous",
    "model1": {"name": "untrained", "split_share": None, "epsilon_b": 0.15},
    "shuffle": False,
    "pool": 2,
    "reduced_model": {"name": "linear"},
    "learning_rate": 5e-3,
  }
  by_sgd = lambda name: {"method": {"name": name, "sgd_learning_rate": 0.1}}
  changes: dict[str, dict[str, Any]] = {
    **{f"RADP {p}": {"method.preset": p} for p in ("P1", "P2", "P3", "P4", "P5")},
    "RADP, proved": {"method": proved},
    "RADP + DP-SGD": by_sgd("radp_dpsgd"),
    "AdLM": {"method": "adlm"},
    "ILM": {"method": "ilm"},
    "DPSGD": by_sgd("dpsgd"),
    "DPDLIGDO": {"method": "dpdligdo"},
    "DPDLIGDO, pairs": {"method": "dpdligdo", "method.legacy_microbatch": 2},
    "DP-SGLD": by_sgd("dp_sgld"),
    "tempered sigmoid": by_sgd("tempered"),
    "No_DP": {"method": "no_dp"},
  }
  yield from common.lines(sweep, changes)
