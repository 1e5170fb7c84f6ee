"""Logistic regression on shares, opened with each party's noise, at six epsilons.

python -m launch.secure --config=configs/secure/output_noise.py --workdir=runs/output_noise

See results/secure/output_noise.json: the mean of 20 openings, and DP-SGD in the clear beside them.
"""

from __future__ import annotations

from collections.abc import Iterator

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.kinds.secure.noisy_model import NoisyModelTask


def get_config() -> SecureConfig:
  """Breast cancer at epsilon 1."""
  return SecureConfig(task=NoisyModelTask())


def get_configs(base: SecureConfig) -> Iterator[tuple[str, SecureConfig]]:
  """Breast cancer at six epsilons, and the digits at the largest."""
  for epsilon in (0.1, 0.5, 1.0, 3.0, 8.0, 30.0):
    run = fields.replace(base, "task.epsilon", epsilon)
    yield f"breast cancer, epsilon {epsilon:g}", run
  digits = {"name": "noisy_model", "dataset": "digits", "epsilon": 8.0}
  yield "digits, epsilon 8", fields.replace(base, "task", digits)
