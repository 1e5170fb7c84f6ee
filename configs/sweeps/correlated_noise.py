"""MNIST over epsilon 1 to 8 in 20 passes: DP-SGD beside three ways to correlate noise.

  python -m launch.sweep --config=configs/sweeps/correlated_noise.py --workdir=runs/correlated_noise

On CIFAR-10, whose features are those of configs/cifar10_scatter_linear.py:

  python -m launch.sweep --config=configs/sweeps/correlated_noise_cifar10.py \\
    --workdir=runs/correlated_noise_cifar10

DP-SGD and cyclic Poisson sampling are under add_or_remove_one, the two lines of batches in a public
order under replace_special. All lines have the learning rate, the passes and the average of the
parameters in common. They were not chosen for one of them: DP-FTRL's own trials are in
configs/mnist_scatter_ftrl.py.
Needs MNIST prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.base.data.data_dir).
Hardware: 2 CPU cores, 20 to 40 s a run.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import (
  DpSgd,
  OptimizerConfig,
  TrainConfig,
)
from dpjax.experiments.sweeps.sweep import Sweep


def strategies(*, steps_per_pass: int) -> Mapping[str, dict]:
  """The fields of each line beside those that all have in common."""
  in_order = {
    "privacy": "dp_ftrl",
    "privacy.sampling_prob": 1 / steps_per_pass,
    "privacy.neighboring_relation": "replace_special",
  }
  # Two turns: half the examples take turns with the other half, and are sampled within a turn.
  in_turns = in_order | {
    "privacy.neighboring_relation": "add_or_remove_one",
    "privacy.sampler": "cyclic_poisson",
    "privacy.sampler.steps_apart": 2,
    "privacy.strategy.bands": 2,
  }
  redrawn = {"privacy.strategy": "band_inv_mf", "privacy.strategy.bands": 4}
  return {
    "DP-SGD": {"privacy.sampling_prob": 1 / steps_per_pass},
    "banded": in_order | {"privacy.strategy.bands": steps_per_pass},
    "band_inv_mf, nothing kept": in_order | redrawn,
    "banded, sampled in turns": in_turns,
  }


def compared(base: TrainConfig, *, steps_per_pass: int, title: str) -> Sweep:
  """Three seeds of each line, for twenty passes."""
  # The lines have these.
  base.privacy.sampling_prob = DpSgd().sampling_prob
  base.optimizer = OptimizerConfig()
  base.num_steps = 20 * steps_per_pass
  base.eval_every = base.num_steps
  base.checkpoint_every = base.num_steps
  return Sweep(base=base, seeds=[0, 1, 2], series="variant", title=title)


def runs(sweep: Sweep, *, steps_per_pass: int) -> Iterator[tuple[str, Any]]:
  """Yields a run for each line and epsilon."""
  for name, changes in strategies(steps_per_pass=steps_per_pass).items():
    for epsilon in sweep.epsilons:
      rate = 8.0 * min(1.0, epsilon / 2)
      more = {"privacy.epsilon": epsilon, "optimizer.learning_rate": rate}
      yield f"{name} @ {epsilon:g}", fields.replace_all(sweep.base, changes | more)


def get_config() -> Sweep:
  """The four lines on MNIST's scattering features."""
  from configs import mnist_scatter_linear

  base = mnist_scatter_linear.get_config()
  base.ema_decay = 0.98
  title = "MNIST, scattering + linear, 20 passes, delta 1e-5"
  sweep = compared(base, steps_per_pass=15, title=title)
  sweep.epsilons = [1.0, 2.0, 4.0, 8.0]
  return sweep


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  return runs(sweep, steps_per_pass=15)
