"""Ridge regression on ciphertexts: scikit-learn's diabetes and breast-cancer data, all of them.

python -m launch.secure --config=configs/secure/regression.py --workdir=runs/regression
"""

from __future__ import annotations

from dpjax.experiments.kinds.secure.config import RegressTask, SecureConfig


def get_config() -> SecureConfig:
  """Both tables; the first also with a smaller penalty, which takes more steps."""
  return SecureConfig(
    task=RegressTask(num_predicted=100),
    rows={
      "regress, diabetes": {},
      "regress, diabetes, ridge .02": {"task.ridge": 0.02},
      "regress, breast cancer": {"task.table": "breast_cancer"},
    },
    title="scikit-learn's tables, at their full sizes",
  )
