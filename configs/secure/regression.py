"""Ridge regression on ciphertexts: scikit-learn's diabetes and breast-cancer data, all of them.

python -m launch.secure --config=configs/secure/regression.py --workdir=runs/regression
"""

from __future__ import annotations

from collections.abc import Iterator

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.kinds.secure.encrypted_table import RegressTask


def get_config() -> SecureConfig:
  """The table of diabetes."""
  return SecureConfig(task=RegressTask(num_predicted=100))


def get_configs(base: SecureConfig) -> Iterator[tuple[str, SecureConfig]]:
  """Both tables; the first also with a smaller penalty, which takes more steps."""
  yield "regress, diabetes", base
  yield "regress, diabetes, ridge .02", fields.replace(base, "task.ridge", 0.02)
  yield "regress, breast cancer", fields.replace(base, "task.table", "breast_cancer")
