"""Logistic regression on shares, opened with each party's noise, at six epsilons.

python -m launch.secure --config=configs/secure/output_noise.py --workdir=runs/output_noise

See results/secure/output_noise.json: the mean of 20 openings, and DP-SGD in the clear beside them.
"""

from __future__ import annotations

from dpjax.experiments.kinds.secure.config import NoisyModelTask, SecureConfig


def get_config() -> SecureConfig:
  """Breast cancer at six epsilons, and the digits at the largest."""
  digits = {"name": "noisy_model", "dataset": "digits", "epsilon": 8.0}
  return SecureConfig(
    task=NoisyModelTask(),
    rows={
      **{
        f"breast cancer, epsilon {epsilon:g}": {"task.epsilon": epsilon}
        for epsilon in (0.1, 0.5, 1.0, 3.0, 8.0, 30.0)
      },
      "digits, epsilon 8": {"task": digits},
    },
    title="Noise on the output of a training on shares",
  )
