"""MNIST over epsilon .1 to 8 and without noise: seven lines, three seeds.

  python -m launch.sweep --config=configs/sweeps/mnist_curves.py --workdir=runs/mnist_curves

Needs MNIST prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.base.data.data_dir).
Hardware: 2 CPU cores, half a minute a run, of the CNNs 3 to 15 (41 beside
much else); it goes on where it was stopped.
Numbers: results/mnist_curves.

The lines are DP-SGD on five models and two samplers under add_or_remove_one, and DP-FTRL under
replace_special: its epsilons are of another statement. Random allocation and DP-FTRL take 15 steps
for a pass, whole numbers being theirs, Poisson sampling 14.6.

Learning rates at small epsilon and the noise of the map follow epsilon by the rules below, which
were chosen on these data, as were those of the papers compared with. At .1 there is no map: five
clip norms and sums that cost so little say nothing (accuracy .60 with noise of 480 on each sum).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import OptimizerConfig, TrainConfig
from dpjax.experiments.sweeps.sweep import Sweep

EPSILONS = [0.1, 0.5, 1.0, 2.0, 4.0, 8.0, math.inf]


def paid(name: str, epsilon: float) -> dict:
  """A normalization that costs a share of the same epsilon. A smaller share means a noisier
  normalization."""
  share = min(epsilon, 3.0) / 3.0
  return {"name": name, "noise_multiplier": 16.0 / share, "median_epsilon": 0.02 * share}


def whitened(epsilon: float) -> dict | None:
  if epsilon < 0.5:
    return None  # see above
  return {
    "privacy.normalization": paid("private_whitening", epsilon),
    "privacy.sampling_prob": 8192 / 60000,
    "privacy.l2_clip_norm": 0.024,
    "optimizer.learning_rate": 64.0 * min(1.0, epsilon / 2),
    "ema_decay": 0.98,
    "num_steps": 400,
  }


def scattering(epsilon: float) -> dict:
  return {"optimizer.learning_rate": 4.0 * min(1.0, epsilon / 2), "ema_decay": 0.98}


def on_pixels(epsilon: float) -> dict:
  return {
    "data.center": True,
    "model.name": "cnn",
    "model.options": {},
    "privacy.sampling_prob": 1024 / 60000,
    "optimizer.learning_rate": 1.5 * min(1.0, 4 * epsilon),
    "num_steps": 500 if epsilon < 0.5 else 1000 if epsilon < 2 else 2000,
    "microbatch_size": 128,
    "ema_decay": 0.99,
  }


def equivariant(epsilon: float) -> dict:
  network = {"group": "C4", "filters": (8, 16), "strides": (2, 1), "pool_after": (1,)}
  return on_pixels(epsilon) | {
    "model.name": "equivariant_cnn",
    "model.options": network | {"num_groups": None, "invariant": False},
    "optimizer.learning_rate": 8.0 * min(1.0, epsilon),
    "num_steps": 300 if epsilon < 0.5 else 400 if epsilon < 2 else 800,
    "ema_decay": 0.98,
  }


LINES = {
  "whitened scattering + linear": whitened,
  "scattering + linear": scattering,
  "the same, random allocation": lambda epsilon: (
    scattering(epsilon)
    | {"privacy.sampler": "random_allocation", "privacy.sampling_prob": 1 / 15}
  ),
  "the same, DP-FTRL": lambda epsilon: (
    scattering(epsilon)
    | {
      "privacy": "dp_ftrl",
      "privacy.sampling_prob": 1 / 15,
      "privacy.neighboring_relation": "replace_special",
      "privacy.strategy.bands": 15,
    }
  ),
  "scattering + tempered-sigmoid CNN": lambda epsilon: (
    scattering(epsilon) | {"model.name": "scatter_cnn"}
  ),
  "tempered-sigmoid CNN": on_pixels,
  "C4-equivariant CNN": equivariant,
}


Lines = Mapping[str, Callable[[float], dict | None]]


def over_epsilon(
  base: Any, lines: Lines, epsilons: list[float]
) -> Iterator[tuple[str, Any]]:
  """Yields a run for each line at each epsilon.

  Args:
    lines: name -> (epsilon) -> the fields that it sets; None where the line has no run.
  """
  for name, changes_at in lines.items():
    for epsilon in epsilons:
      changes = changes_at(epsilon)
      if changes is not None:
        changed = {"privacy.epsilon": epsilon} | changes
        yield f"{name} @ {epsilon:g}", fields.replace_all(base, changed)


def curves(
  base: TrainConfig, references: list[tuple[str, float, float]], title: str
) -> Sweep:
  """What the curves of MNIST, Fashion-MNIST and CIFAR-10 have in common."""
  base.optimizer = OptimizerConfig()  # the lines have their learning rates
  return Sweep(
    base=base,
    epsilons=[*EPSILONS],
    seeds=[0, 1, 2],
    series="variant",
    references=references,
    title=title,
  )


def get_config() -> Sweep:
  """The seven lines."""
  from configs import mnist_scatter_linear

  references = [
    ("Papernot et al. 2021", 2.93, 0.981),
    ("Tramèr and Boneh 2021", 3.0, 0.987),
  ]
  return curves(mnist_scatter_linear.get_config(), references, "MNIST, delta 1e-5")


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  return over_epsilon(sweep.base, LINES, sweep.epsilons)
