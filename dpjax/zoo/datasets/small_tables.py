"""Small tables of medicine, wine and finance, which installed packages or a folder contain.

The bounds of columns are round numbers around the ranges of these published rows (scikit-learn's
documentation states those of breast cancer and wine). That is right for a published benchmark. For
private rows, take bounds from the values that a column can have, not from the values in the rows.
"""

from __future__ import annotations

import csv
import pathlib
import tarfile
from typing import Any

import numpy as np

from dpjax import optional
from dpjax.data import tables
from dpjax.validate import UserError, about, first_line
from dpjax.zoo.datasets import carried
from dpjax.zoo.datasets.carried import Folder, Pair

# A hash of the row number alone chooses about four fifths of the rows for training.
_SPLIT = {"test_share": 0.2, "salt": 0}
_HDMA = "resources/rdata/csv/Ecdat/Hdma.csv"
_HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
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
# The columns of the heart sets, in their order. What stands for no value is public, too.
_HEART: dict[str, dict[str, Any]] = {
  "age": {"lower": 0, "upper": 100},
  "sex": {"values": [0, 1]},
  "cp": {"values": [1, 2, 3, 4]},
  "trestbps": {"lower": 50, "upper": 250, "missing": 130},
  "chol": {"lower": 0, "upper": 600, "missing": 0},
  "fbs": {"values": [0, 1], "missing": 0},
  "restecg": {"values": [0, 1, 2], "missing": 0},
  "thalach": {"lower": 50, "upper": 220, "missing": 140},
  "exang": {"values": [0, 1], "missing": 0},
  "oldpeak": {"lower": -3, "upper": 7, "missing": 0},
  "slope": {"values": [1, 2, 3], "missing": 2},
  "ca": {"lower": 0, "upper": 3, "missing": 0},
  "thal": {"values": [3, 6, 7], "missing": 3},
}


def _numbers(bounds: dict[str, Any]) -> dict[str, Any]:
  """Returns the declaration of columns of numbers, made of {name: (lower, upper)}."""
  return {name: {"lower": low, "upper": high} for name, (low, high) in bounds.items()}


def _bundled_columns(name: str, **options: Any) -> dict[str, Any]:
  """Returns the columns, by name, of a data set inside the scikit-learn wheel. The column `target`
  holds its target."""
  # scikit-learn is imported here, because its import is slow.
  with optional.require_extra():
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
  return tables.table(_bundled_columns("breast_cancer"), declared, name="breast_cancer")


def load_wine() -> Pair:
  """Loads 178 wines of three growers, 13 measured numbers each (UCI 1991)."""
  declared = {
    "columns": _numbers(_WINE),
    "target": {"column": "target", "values": [0, 1, 2]},
    "split": _SPLIT,
  }
  return tables.table(_bundled_columns("wine"), declared, name="wine")


def load_diabetes() -> Pair:
  """Loads 442 people with diabetes: ten values each, and the progress of the disease in a year
  (Efron 2004)."""
  columns = _bundled_columns("diabetes", scaled=False)
  columns["sex"] = columns["sex"].astype(int)
  declared = {
    "columns": {"sex": {"values": [1, 2]}} | _numbers(_DIABETES),
    # The published values of the progress end at 346.
    "target": {"column": "target", "lower": 0, "upper": 400},
    "split": _SPLIT,
  }
  return tables.table(columns, declared, name="diabetes")


def load_mortgages(data_dir: Folder = None) -> Pair:
  """Loads 2,381 mortgage applications in Boston, denied or not (Munnell et al. 1996).

  Inputs are ratios of debt, housing expenses and loan, two credit scores, public record, insurance,
  employment, household, unemployment of the industry, kind of home. Whether the applicant is black
  is no input: it is the group by which test rows are scored apart.

  Source: Federal Reserve Bank of Boston; A. Munnell, G. Tootell, L. Browne, J. McEneaney, American
  Economic Review 1996; "Hdma" of the R package Ecdat (GPL-2), as the package pydataset 0.2.0 (MIT)
  contains it.

  Args:
    data_dir: folder of pydataset's resources.tar.gz; None: that of pydataset (extra `data`).

  Raises:
    UserError: the file is missing, or is no such file.
  """
  path = carried.file_of("pydataset", "resources.tar.gz", data_dir, "mortgages")
  with about("name", "mortgages"):
    try:
      with tarfile.open(path) as archive:
        member = archive.extractfile(_HDMA)
        assert member is not None
        content = member.read()
    except (KeyError, OSError, EOFError, tarfile.TarError) as error:
      raise UserError(f"{path} cannot be read ({first_line(error)})") from error
    columns = _columns(content, path)
  yes = {"values": ["no", "yes"]}
  declared = {
    "columns": {
      **_numbers({"dir": (0, 1), "hir": (0, 1), "lvr": (0, 1.5), "ccs": (1, 6), "mcs": (1, 4)}),
      # One row has no answer to two of the questions.
      **{name: yes | {"missing": "no"} for name in ("pbcr", "self")},
      **{name: yes for name in ("dmi", "single")},
      **_numbers({"uria": (0, 15), "comdominiom": (0, 1)}),
    },
    "target": {"column": "deny", **yes},
    "group": {"column": "black", **yes},
    "missing_values": ["NA"],
    "split": _SPLIT,
    "ignore": "*",
  }  # fmt: skip
  return tables.table(columns, declared, name="mortgages")


def load_insurance(data_dir: Folder = None) -> Pair:
  """Loads 5,822 customers of a Dutch insurer: who insures a caravan? (CoIL Challenge 2000)

  Inputs are 85 codes of a customer's neighbourhood and policies. 6 of 100 customers insure one.

  Source: P. van der Putten and M. van Someren, "CoIL Challenge 2000" (Sentient Machine Research,
  for research and education), "Caravan" of the package islp 0.6.0 (BSD).

  Args:
    data_dir: folder of Caravan.csv; None: that of islp (`pip install --no-deps islp==0.6.0`).

  Raises:
    UserError: the file is missing, or is no such file.
  """
  path = carried.file_of("ISLP", "data/Caravan.csv", data_dir, "insurance")
  with about("name", "insurance"):
    columns = _columns(path.read_bytes(), path)
  names = [name for name in columns if name not in ("", "Purchase")]
  # All are codes of one digit or 10, but for the 41 kinds of neighbourhood.
  declared = {
    "columns": _numbers({name: (0, 41 if name == "MOSTYPE" else 10) for name in names}),
    "target": {"column": "Purchase", "values": ["No", "Yes"]},
    "split": _SPLIT,
    "ignore": "*",
  }
  return tables.table(columns, declared, name="insurance")


def _columns(content: bytes, path: pathlib.Path) -> dict[str, list[str]]:
  """Returns the columns, by name, of a CSV file that lies in `path`."""
  try:
    header, *rows = csv.reader(content.decode().splitlines())
    return dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))
  except (ValueError, csv.Error) as error:
    raise UserError(f"{path} cannot be read ({first_line(error)})") from error


def load_heart(data_dir: Folder = None) -> Pair:
  """Loads 920 patients of four hospitals, with a heart disease or without (UCI 1989).

  Source: UCI Machine Learning Repository, "Heart Disease" (A. Janosi, W. Steinbrunn, M. Pfisterer,
  R. Detrano 1989, DOI 10.24432/C52P4X, CC BY 4.0). No package has it: put the files
  processed.cleveland.data, processed.hungarian.data, processed.switzerland.data and
  processed.va.data into data_dir.

  Args:
    data_dir: folder of the four files; None: the current folder.

  Raises:
    UserError: a file is missing.
  """
  return _heart(data_dir)[0]


def heart_owners(data_dir: Folder = None) -> carried.Owned:
  """Returns ((train, hospitals), (test, hospitals)), the patients of `load_heart` with the hospital
  of each."""
  (train, test), (of_train, of_test) = _heart(data_dir)
  return (train, np.array(of_train)), (test, np.array(of_test))


def _heart(data_dir: Folder) -> tuple[Pair, tuple[list[str], list[str]]]:
  lines = []
  for hospital in _HOSPITALS:
    path = pathlib.Path(data_dir or ".") / f"processed.{hospital}.data"
    if not path.is_file():
      raise UserError(
        f"there is no {path}; the UCI repository has it, and data_dir names its folder",
        field="name",
        value="heart",
      )
    lines += [f"{line},{hospital}" for line in path.read_text().split()]
  declared = {
    "columns": _HEART,
    # 0 is none, 1 to 4 are degrees of disease.
    "target": {"column": "disease", "values": ["no", "yes"]},
    "missing_values": ["?"],
    "split": _SPLIT,
    "ignore": ["hospital"],
  }
  header = ",".join([*_HEART, "disease", "hospital"])
  columns = _columns("\n".join([header, *lines]).encode(), path)
  columns["disease"] = ["no" if each == "0" else "yes" for each in columns["disease"]]
  return tables.table_fields(columns, "hospital", declared, name="heart")
