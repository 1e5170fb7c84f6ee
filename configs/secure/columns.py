"""A clinic and a laboratory: other columns of the same people, aligned, and a model with noise.

  python -m launch.secure --config=configs/secure/columns.py --workdir=runs/columns

The clinic holds the diagnoses and the first 10 columns of scikit-learn's breast cancer, the
laboratory the other 20. Each holds people whom the other does not know. They find those of both by
private set intersection (pip install -e '.[vertical,secure]'), clip their own columns, train a
logistic regression on shares, and open it with the noise of both. Epsilon is that of the opened
model under replace_one; who is held by both is told to both, and is not covered.
Hardware: 2 CPU cores. Time: a few seconds a row.
Seen in three openings each: test accuracy .63 to .83 at epsilon 1, .76 to .85 at 3 and .80 to .92
at 8, on 365 people of both. With half of the people in common (228) it is .85 to .95 at 8.
"""

from __future__ import annotations

from collections.abc import Iterator

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.secure.aligned_columns import ColumnsTask
from dpjax.experiments.kinds.secure.config import SecureConfig


def get_config() -> SecureConfig:
  """Both parties, and their model."""
  return SecureConfig(task=ColumnsTask())


def get_configs(base: SecureConfig) -> Iterator[tuple[str, SecureConfig]]:
  """Three epsilons; at the last also with half of the people in common."""
  for epsilon in (1.0, 3.0, 8.0):
    yield f"epsilon {epsilon:g}", fields.replace(base, "task.epsilon", epsilon)
  few = {"task.epsilon": 8.0, "task.shared": 0.5}
  yield "epsilon 8, half of the people in common", fields.replace_all(base, few)
