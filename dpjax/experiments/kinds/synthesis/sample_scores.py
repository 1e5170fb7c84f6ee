"""Scores samples by classifiers that saw samples alone, attacks samples, and writes them."""

from __future__ import annotations

import csv
import io
import math
import pathlib
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from dpjax import files, optional, pictures
from dpjax.attacks import roc
from dpjax.data import tables

# Largest number of rows of the picture, which has a column for each class.
_SHOWN = 10
# Largest number of rows of samples.csv.
_FIRST_SAMPLES = 1000
# Largest number of members, and of non-members, that an attack scores.
_ATTACKED = 2000


def downstream(images: Any, labels: Any, test_x: Any, test_y: Any) -> dict[str, float]:
  """Returns the accuracies of two classifiers, trained on samples alone, on real test images.

  The classifiers are logistic regression and a network with one hidden layer of 100 units, both of
  scikit-learn. They are two of the twelve classifiers of Harder et al. 2021. `accuracy` is the mean
  of both accuracies. With two classes, `auroc_...` says how well each classifier ranks them.
  """
  # Imported here, since few runs need them.
  from dpjax import metrics

  with optional.require_extra():
    from sklearn import linear_model, neural_network

  asked = np.clip(np.reshape(np.asarray(test_x, np.float64), (len(test_x), -1)), 0, 1)
  # There is no sample if all classes were taken for empty. Then a width of -1 cannot be inferred.
  seen = np.reshape(np.asarray(images, np.float64), (len(images), asked.shape[1]))
  models = {
    "logistic_regression": linear_model.LogisticRegression(max_iter=100),
    "mlp": neural_network.MLPClassifier(max_iter=20, random_state=0),
  }
  scores: dict[str, float] = {}
  for name, model in models.items():
    # A classifier needs two classes. With fewer classes, the answer is always the same class.
    if len(np.unique(labels)) < 2:
      scores[f"accuracy_{name}"] = float(np.mean(np.asarray(test_y) == [*labels, 0][0]))
      continue
    with warnings.catch_warnings():
      # Both classifiers are scored even if they have not converged.
      warnings.simplefilter("ignore")
      model.fit(seen, labels)
    scores[f"accuracy_{name}"] = float(np.mean(model.predict(asked) == test_y))
    if len(np.unique([*labels, *test_y])) == 2:
      chances = model.predict_proba(asked)[:, 1]
      scores[f"auroc_{name}"] = metrics.auroc(
        chances, np.asarray(test_y) == model.classes_[1]
      )
  accuracy = np.mean([scores[f"accuracy_{name}"] for name in models])
  return {"accuracy": float(accuracy), **scores}


def attack(images: Any, members: Any, others: Any) -> dict[str, float]:
  """Attacks samples by distance: a record near a sample is called a member.

  Source: Hayes et al. 2019 (LOGAN), Chen et al. 2020 (GAN-Leaks).

  Returns:
    `auc`, `tpr_at_fpr_0.01`, and the upper end of the rate's 95 % interval, with the ending
    `_high`. {} if there is no sample, no member or no other record.
  """
  if not (len(images) and len(members) and len(others)):
    return {}
  samples = np.reshape(np.asarray(images, np.float32), (len(images), -1))
  scores = []
  for part in (members, others):
    rows = np.asarray(part[:_ATTACKED], np.float32).reshape(min(len(part), _ATTACKED), -1)
    squares = (samples**2).sum(axis=1)[None] - 2 * rows @ samples.T
    scores.append(-(squares.min(axis=1) + (rows**2).sum(axis=1)))
  membership = np.repeat([True, False], [len(scores[0]), len(scores[1])])
  curve = roc.curve_of(np.concatenate(scores), membership)
  rate = roc.rate_at(curve, 0.01)
  return {
    "auc": curve.auc,
    "tpr_at_fpr_0.01": rate.tpr,
    "tpr_at_fpr_0.01_high": rate.tpr_interval[1],
  }


def write(
  folder: pathlib.Path, images: np.ndarray, labels: np.ndarray, declaration: Any = None
) -> None:
  """Writes samples.npz (all samples), samples.csv (the first 1,000 images, or all rows) and, of
  images, samples.png.

  Args:
    folder: folder of the files.
    images: images [n, H, W, C], or rows of a table [n, d].
    labels: classes [n].
    declaration: `tables.Declaration` of a table, whose columns and units samples.csv then has.
  """
  files.replace_file(
    folder / "samples.npz",
    lambda stream: np.savez_compressed(stream, x=images, y=labels),
  )
  if declaration is not None:
    columns = tables.rows_of(images, labels, declaration)
    cells = ([_whole(cell) for cell in column] for column in columns.values())
    _write_csv(folder, list(columns), zip(*cells))
    return
  # There may be no sample, so a width of -1 could not be inferred.
  flat = images.reshape(len(images), math.prod(images.shape[1:]))
  is_table = images.ndim == 2
  names = [f"{'column' if is_table else 'pixel'}_{place}" for place in range(flat.shape[1])]
  shown = len(flat) if is_table else _FIRST_SAMPLES
  rows = zip(
    labels[:shown], *([f"{cell:.4g}" for cell in column[:shown]] for column in flat.T)
  )
  _write_csv(folder, ["label", *names], rows)
  if not is_table:
    picture(images, labels, folder / "samples.png")


def _whole(cell: Any) -> str:
  """Returns a number with all its digits, a text as it is."""
  return cell if isinstance(cell, str) else repr(float(cell)).removesuffix(".0")


def _write_csv(folder: pathlib.Path, names: list[str], rows: Iterable[Any]) -> None:
  lines = io.StringIO()
  writer = csv.writer(lines, lineterminator="\n")
  writer.writerow(names)
  writer.writerows(rows)
  files.replace_file(folder / "samples.csv", lines.getvalue().encode())


def picture(images: np.ndarray, labels: np.ndarray, path: pathlib.Path) -> None:
  """Draws up to 10 samples of each class in a column. Writes no picture if there is no sample."""
  classes = np.unique(labels)
  columns = [images[labels == label][:_SHOWN] for label in classes]
  rows = min((len(column) for column in columns), default=0)
  if not rows:
    return
  height, width, colours = images.shape[1:]
  grid = np.stack([column[:rows] for column in columns])  # [K, rows, H, W, C]
  sheet = grid.transpose(1, 2, 0, 3, 4).reshape(
    rows * height, len(classes) * width, colours
  )
  sheet = sheet[..., 0] if colours not in (3, 4) else sheet
  figure = pictures.new_figure(
    pictures.PAGE, height=pictures.PAGE.width * rows / len(classes)
  )
  axes = figure.subplots()
  axes.imshow(sheet, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
  axes.set_axis_off()
  pictures.save(figure, path)
