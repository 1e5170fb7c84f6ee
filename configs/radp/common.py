"""Settings that the five tests share: the paper's nets, epsilons and compared methods.

Chosen where the paper is silent: Adam at 1e-3; batches of 100 for RADP and No_DP, of 600
(CIFAR-10: 1000) for what perturbs gradients or batches; relu for model 1 and tanh for model 2,
pixels / 255, clean test images, the last epoch. With 8 epochs on MNIST and 4 on the others
("RADP, proved" takes 20) one seed of a test took 14 to 21 minutes on one of two busy cores; an
accelerator may take --config.base.num_epochs=40.

`paper` and `proof` are the settings of RADP as in the paper, and with a proof.

"RADP, proved" and the vectors of test 4 have no weight decay: a setting of 0.5 that stood here
was never read, so the published numbers are of runs without it.

The noisy relevance, a part of which comes out negative, is floored at its mean, 1 / d, so
that no place gets more than about four times the noise of a uniform share. The paper has no
floor and does not run without one; a floor at a tenth of that ("P3, low floor") costs 3 points
on MNIST and 13 on Fashion-MNIST.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.config.sections import ExamplesConfig, NetworkConfig
from dpjax.experiments.kinds.relevance.config import RelevanceAudit, RelevanceConfig
from dpjax.experiments.kinds.relevance.methods import Radp
from dpjax.experiments.sweeps.sweep import Sweep

EPSILONS = {
  "mnist": [0.5, 1.5, 2.0],
  "fashion_mnist": [1.5, 3.0, 5.0],
  "cifar10": [2.0, 8.0, 12.0],
}
MIDDLE = {"mnist": 1.5, "fashion_mnist": 3.0, "cifar10": 8.0}  # of tests 4 and 5
LAST = {name: values[-1] for name, values in EPSILONS.items()}  # of the numbers in the text
# The methods of the paper's figures. DPDLIGDO is DP-Adam with clipping of each example.
COMPARED: dict[str, dict[str, Any]] = {
  "RADP": {"method": "radp", "batch_size": 100},
  "AdLM": {"method": "adlm"},
  "DPSGD": {"method": "dpsgd"},
  "DPDLIGDO": {"method": "dpdligdo"},
  "No_DP": {"method": "no_dp", "batch_size": 100},
}
# Ways to read Algorithm 3. With P1 and P2 nothing can be learnt on any of the three data
# sets.
READINGS: dict[str, dict[str, Any]] = {
  **{name: {"method.preset": name} for name in ("P1", "P2", "P3", "P4", "P5")},
  "P3, fresh": {"method.preset": "custom", "method.preset.draw": "record_fresh"},
  "P3, low floor": {"method.floor": None},
}
# Runs with a proof, all under replace_one. It takes twice the noise of add/remove, so the
# learning rate is smaller than in the tests above.
_PRIVATE = {"neighboring_relation": "replace_one", "sgd_learning_rate": 0.1}
_SMOOTH = {"epsilon_b": 0.01, "kappa": 0.25, "relevance_pool": 4}
LONGER = {"num_epochs": 20, "batch_size": 1000}
PROVED: dict[str, dict[str, Any]] = {
  "RADP, proved": LONGER,
  "RADP + DP-SGD": {"method": {"name": "radp_dpsgd", **_SMOOTH, **_PRIVATE}},
  "DP-SGD": {"method": {"name": "dpsgd", **_PRIVATE}},
  "tempered sigmoid": {"method": {"name": "tempered", **_PRIVATE}},
}


def _floor(dataset: str) -> float:
  return 1 / (1024 if dataset == "cifar10" else 784)


def paper(dataset: str) -> dict[str, Any]:
  """RADP as in the paper."""
  return {"method": Radp(floor=_floor(dataset), relevance_records=10_000)}


def proof(**how: Any) -> dict[str, Any]:
  """RADP with a proof. Relevance costs D1 alone, so it may cost as much as the whole run at
  the smallest epsilon."""
  method = {
    "name": "radp_rigorous",
    "model1": {"name": "untrained", "split_share": 0.1, "epsilon_b": 0.5},
    "pool": 4,
    "reduced_model": {"name": "linear"},
    "learning_rate": 5e-3,
  }
  return {"method": {**method, **how}}


def on(dataset: str, **fields: Any) -> RelevanceConfig:
  """The paper's setting on one data set: nets, epochs and attacks."""
  cifar = dataset == "cifar10"
  standard: dict[str, Any] = dict(
    data=ExamplesConfig(name=dataset),
    model=NetworkConfig(name=f"radp_{dataset}"),
    num_epochs=8 if dataset == "mnist" else 4,
    batch_size=1000 if cifar else 600,
    # Attacks on the noise of one record take seconds. Canaries would train everything three
    # times.
    audit=RelevanceAudit(canary_runs=False),
  )
  return RelevanceConfig(**{**standard, **fields})


def test(number: int, dataset: str) -> Sweep:
  """What tests 1 to 3 of the paper start from: RADP on one data set, at the paper's epsilons."""
  base = on(dataset, **paper(dataset))
  return Sweep(base=base, epsilons=EPSILONS[dataset], title=f"Test {number}: {dataset}")


def presets(dataset: str, num_epochs: int) -> Sweep:
  """The readings of Algorithm 3, at the epsilon whose numbers the text states. Batches have
  100 records, since the paper names no size. The noise of P3 to P5 depends on neither size
  nor epochs."""
  base = on(dataset, **paper(dataset), batch_size=100, num_epochs=num_epochs)
  return Sweep(base=base, epsilons=[LAST[dataset]], title=f"Presets: {dataset}")


def proved(dataset: str) -> Sweep:
  """RADP with a proof, at the paper's epsilons."""
  clipped = {"name": "laplace_clipped", "clip": 0.13}
  base = on(dataset, **proof(features=clipped))
  return Sweep(base=base, epsilons=EPSILONS[dataset], title=f"With a proof: {dataset}")


def lines(
  sweep: Sweep, changes: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, RelevanceConfig]]:
  """Each line at each epsilon of a sweep, as its base with these changes; a line without privacy,
  which has no epsilon, once."""
  for name, differing in changes.items():
    config = fields.replace_all(sweep.base, differing)
    for epsilon in sweep.epsilons if config.is_private else ():
      yield f"{name} @ epsilon {epsilon:g}", fields.replace(config, "epsilon", epsilon)
    if not config.is_private:
      yield name, config


def everywhere(
  base: RelevanceConfig, changes: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, RelevanceConfig]]:
  """Each line on all three data sets, at the middle epsilon; `base` is of MNIST."""
  for name, differing in changes.items():
    for dataset, epsilon in MIDDLE.items():
      every = {**_of_data(dataset, differing), "epsilon": epsilon, **differing}
      yield f"{name} @ {dataset}", fields.replace_all(base, every)


def _of_data(dataset: str, changes: Mapping[str, Any]) -> dict[str, Any]:
  """The changes that a line made for MNIST needs on this data set."""
  if dataset == "mnist":
    return {}
  floor = {} if "method" in changes else {"method.floor": _floor(dataset)}
  return {"data.name": dataset, "model.name": f"radp_{dataset}", **floor}
