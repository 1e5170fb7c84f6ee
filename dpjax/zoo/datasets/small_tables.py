"""Small tables of medicine, wine and finance, which installed packages contain.

The bounds of columns are round numbers around the ranges of these published rows (scikit-learn's
documentation states those of breast cancer and wine). That is right for a published benchmark. For
private rows, take bounds from the values that a column can have, not from the values in the rows.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
from typing import Any

from dpjax import optional
from dpjax.data import tables
from dpjax.data.dataset import Dataset
from dpjax.validate import UserError

Pair = tuple[Dataset, Dataset]
# A hash of the row number alone chooses about four fifths of the rows for training.
_SPLIT = {"test_share": 0.2, "salt": 0}
_ISLP = "ISLP"
# Upper bounds of (mean, standard error, worst) of each of ten features of a cell nucleus.
_NUCLEUS = {
  "radius": (30, 3, 40),
  "texture": (40, 5, 50),
  "perimeter": (200, 25, 260),
  "area": (3000, 600, 4500),
  "smoothness": (0.2, 0.04, 0.25),
  "compactness": (0.4, 0.15, 1.2),
  "concavity": (0.5, 0.4, 1.3),
  "concave points": (0.25, 0.06, 0.3),
  "symmetry": (0.4, 0.08, 0.7),
  "fractal dimension": (0.1, 0.03, 0.25),
}
_WINE = {
  "alcohol": (10, 16),
  "malic_acid": (0, 6),
  "ash": (1, 4),
  "alcalinity_of_ash": (10, 30),
  "magnesium": (60, 170),
  "total_phenols": (0, 4),
  "flavanoids": (0, 6),
  "nonflavanoid_phenols": (0, 1),
  "proanthocyanins": (0, 4),
  "color_intensity": (0, 14),
  "hue": (0, 2),
  "od280/od315_of_diluted_wines": (1, 4),
  "proline": (200, 1800),
}
_DIABETES = {
  "age": (0, 100),
  "bmi": (15, 50),
  "bp": (50, 150),
  "s1": (80, 320),
  "s2": (30, 260),
  "s3": (15, 110),
  "s4": (1, 10),
  "s5": (3, 7),
  "s6": (50, 140),
}


def _numbers(bounds: dict[str, Any]) -> dict[str, Any]:
  """Returns the declaration of columns of numbers, made of {name: (lower, upper)}."""
  return {name: {"lower": low, "upper": high} for name, (low, high) in bounds.items()}


def _bundled(name: str, **options: Any) -> dict[str, Any]:
  """Returns the columns, by name, of a data set inside the scikit-learn wheel. The column `target`
  holds its target."""
  # scikit-learn is imported here, because its import is slow.
  with optional.needed():
    from sklearn import datasets

  bunch: Any = getattr(datasets, f"load_{name}")(**options)
  return dict(zip(bunch.feature_names, bunch.data.T)) | {"target": bunch.target}


def load_breast_cancer() -> Pair:
  """Loads 569 tumours of the breast, 30 numbers each, malignant or benign (Wisconsin 1995)."""
  columns = {}
  for name, uppers in _NUCLEUS.items():
    for label, upper in zip((f"mean {name}", f"{name} error", f"worst {name}"), uppers):
      columns[label] = (0, upper)
  declared = {
    "columns": _numbers(columns),
    # In scikit-learn's copy, 0 is malignant and 1 is benign.
    "target": {"column": "target", "values": [0, 1]},
    "split": _SPLIT,
  }
  return tables.table(_bundled("breast_cancer"), declared, name="breast_cancer")


def load_wine() -> Pair:
  """Loads 178 wines of three growers, 13 measured numbers each (UCI 1991)."""
  declared = {
    "columns": _numbers(_WINE),
    "target": {"column": "target", "values": [0, 1, 2]},
    "split": _SPLIT,
  }
  return tables.table(_bundled("wine"), declared, name="wine")


def load_diabetes() -> Pair:
  """Loads 442 people with diabetes: ten values each, and the progress of the disease in a year
  (Efron 2004)."""
  columns = _bundled("diabetes", scaled=False)
  columns["sex"] = columns["sex"].astype(int)
  declared = {
    "columns": {"sex": {"values": [1, 2]}} | _numbers(_DIABETES),
    # The published values of the progress end at 346.
    "target": {"column": "target", "lower": 0, "upper": 400},
    "split": _SPLIT,
  }
  return tables.table(columns, declared, name="diabetes")


def load_credit_default(data_dir: str | os.PathLike[str] | None = None) -> Pair:
  """Loads 10,000 simulated credit cards: balance, income, student, default (James et al.
  2023).

  Args:
    data_dir: folder that holds Default.csv. None: the folder of the installed package islp
      (`pip install --no-deps islp==0.6.0`).

  Raises:
    UserError: the file is missing.
  """
  if data_dir is None:
    # The package is found without an import, since its import would need torch.
    spec = importlib.util.find_spec(_ISLP)
    homes = [] if spec is None else list(spec.submodule_search_locations or ())
    folder = pathlib.Path(homes[0]) / "data" if homes else pathlib.Path(".")
  else:
    folder = pathlib.Path(data_dir)
  path = folder / "Default.csv"
  if not path.is_file():
    raise UserError(
      f"not found in {folder}; it comes with: pip install --no-deps islp==0.6.0, or lies in "
      "data_dir",
      field="name",
      value="credit_default",
    )
  yes = {"values": ["No", "Yes"]}
  declared = {
    "columns": {
      "student": yes,
      "balance": {"lower": 0, "upper": 3000},
      "income": {"lower": 0, "upper": 100_000},
    },
    "target": {"column": "default", **yes},
    "split": _SPLIT,
  }
  return tables.table(path, declared, name="credit_default")
