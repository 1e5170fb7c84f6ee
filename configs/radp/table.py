"""The table: each method's claimed epsilon, its epsilon by theorem 7, what is proved, what
an attack shows, and the accuracy. On the embedded digits, offline.

  python -m launch.relevance --config=configs/radp/table.py \\
    --workdir=runs/table

For MNIST: --config.data.name=mnist --config.model.name=radp_mnist --config.model.options={}
--config.batch_size=600.
"RADP, proved" has no weight decay: a setting of 3.0 that stood here was never read.
Writes claims.md and claims.csv. The attacks: U1 likelihood ratio of one record's noisy
features, U2 subtraction where records share their noise, U3 wrong-label canaries and U4
membership (one run each).
"""

from dpjax.experiments.kinds.central.config import DataConfig, ModelConfig
from dpjax.experiments.kinds.relevance.config import RelevanceAudit, RelevanceConfig
from dpjax.relevance import Private, Rigorous


def get_config() -> RelevanceConfig:
  curves = {
    **{f"RADP {p}": {"paper.preset": p} for p in ("P1", "P2", "P3", "P4", "P5")},
    "RADP, proved": {"mode": "rigorous"},
    "RADP + DP-SGD": {"method": "radp_dpsgd"},
    "AdLM": {"method": "adlm"},
    "ILM": {"method": "ilm"},
    "DPSGD": {"method": "dpsgd"},
    "DPDLIGDO": {"method": "dpdligdo"},
    "DPDLIGDO, pairs": {"method": "dpdligdo", "private.legacy_microbatch": 2},
    "DP-SGLD": {"method": "dp_sgld"},
    "tempered sigmoid": {"method": "tempered"},
    "No_DP": {"method": "no_dp"},
  }
  return RelevanceConfig(
    data=DataConfig(name="digits"),
    model=ModelConfig(name="mlp", options={"features": (64,)}),
    rigorous_model=ModelConfig(name="linear"),
    curves=curves,
    epsilons=[2.0],
    num_epochs=20,
    batch_size=100,
    learning_rate=5e-3,
    rigorous=Rigorous(
      model1="untrained",
      split=False,
      shuffle=False,
      epsilon_b=0.15,
      pool=2,
    ),
    private=Private(learning_rate=0.1),
    audit=RelevanceAudit(),
    title="Claimed, proved, refuted: digits",
  )
