"""Test 4 of Kang and Wang 2024 (figures 10 and 11): Laplace against Gaussian, three data
sets.

  python -m launch.relevance --config=configs/radp/test4_gaussian.py \\
    --workdir=runs/test4_gaussian

Four epochs in batches of 100 (the vectors: 20 of 1,000); more: --config.base.num_epochs=40. MNIST
at 1.5, Fashion-MNIST at 3, CIFAR-10 at 8.
"Laplace" and "Gaussian" are the paper's comparison: coordinate by coordinate, delta 1e-3
each. The corrected comparison noises the record as ONE vector, (epsilon, 1e-5)-locally
private under replace_one, labels public: Laplace accounted by its privacy loss
distribution, and the analytic Gaussian.

Hardware: one of 2 CPU cores, 10 minutes. Seen on MNIST / Fashion-MNIST / CIFAR-10 (one seed,
last epoch): Laplace .870 / .761 / .452, Gaussian .686 / .646 / .360, as the paper has it. As a
vector it is the other way round: Gaussian .478 / .590 / .267, Laplace .333 / .567 / .221.
"""

from collections.abc import Iterator

from configs.radp import common
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """Epsilons are those of the data sets, `common.MIDDLE`."""
  base = common.on("mnist", **common.paper("mnist"), num_epochs=4, batch_size=100)
  return Sweep(base=base, title="Test 4")


def get_configs(sweep: Sweep) -> Iterator[tuple[str, RelevanceConfig]]:
  # A centred grey pixel is at most 1/2, so a clip of 0.5 clips nothing.
  gaussian = {"name": "gaussian", "clip": 0.5}
  vector = lambda features: {
    **common.proof(shuffle=False, labels="public", features=features),
    **common.LONGER,
  }
  changes = {
    "Laplace": {},
    "Gaussian": {"method.mechanism": "gaussian"},
    "Laplace, as a vector": vector("laplace_pld"),
    "Gaussian, as a vector": vector(gaussian),
  }
  yield from common.everywhere(sweep.base, changes)
