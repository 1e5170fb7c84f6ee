"""What a sweep writes: curve.csv, its picture, and a table."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpjax import pictures, validate
from dpjax.accounting.text import by_name, lower
from dpjax.experiments.config import fields
from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.experiments.run import experiment, guarantee, report, writers
from dpjax.experiments.run.kind import Table, experiment_of
from dpjax.experiments.sweeps import curve, table
from dpjax.validate import UserError

if TYPE_CHECKING:
  from dpjax.experiments.sweeps.engine import Point
  from dpjax.experiments.sweeps.sweep import Sweep

Row = dict[str, Any]
# Entries of a result that a row keeps in addition to RESULT_KEYS, if the result has them. Only
# federated runs have the last five.
_MORE_KEYS = (
  "failed_assumptions",
  "epsilon_audited_lower",
  "rounds_to_accuracy",
  "num_clients",
  "clients_per_round",
  "heterogeneity",
  "not_private/heterogeneity",
)
# Error rates are drawn in place of accuracies, on a logarithmic axis, under two conditions. The
# best accuracy is in [_CROWDED, 1). The largest error is at least _RANGE times the smallest.
_CROWDED = 0.9
_RANGE = 2.0
# An axis other than epsilon's is logarithmic if all x are positive, and the largest is at least
# this many times the smallest.
_WIDE = 50
# Entries of every result that are no numbers.
_WORDS = ("task", "dataset", "method", "neighboring_relation", "unit", "epsilon_kind")
_WORDS += ("params_sha256", "versions")


class Curves(Table):
  """The curve of a sweep: curve.csv, curve.png and table.md; curve.pdf and .svg after the last run.

  Bars span the smallest and the largest y of the seeds, and say nothing about other seeds. If x is
  an epsilon, runs that guarantee none are drawn as a horizontal line. A run whose y is not finite
  (it diverged) is counted in the column `not_finite`, and left out of the mean.
  """

  writes = "curve.png (.pdf, .svg), curve.csv, table.md"

  def __init__(self, sweep: Sweep):
    self.sweep = sweep

  def facts(self, label: str, config: Any) -> Row:
    facts = {}
    for path, name in _config_axes(self.sweep, config).items():
      try:
        facts[path] = fields.get(config, path)
      except UserError as error:
        raise error.of(field=name, value=path) from error
    return facts

  def check_data(self, config: Any, data: Any) -> None:
    y = self.sweep.y
    if not y.startswith("test_"):
      return
    run = experiment_of(config)
    _, phase = experiment.begin_story(run, data, run.new_keys())
    # A kind of several phases may score in a later one alone.
    if phase.evaluate is not None:
      scores = experiment.score(phase, experiment.begin(phase))
      validate.one_of(sorted(scores), y=y)

  def keep(self, config: Any, result: Row) -> Row:
    sweep = self.sweep
    known = {*_config_axes(sweep, config), "variant", "label", "seed", None}
    drawn = {"x": sweep.x, "y": sweep.y, "series": sweep.series}
    for name, key in drawn.items():
      if name == "y" or key not in known:
        validate.one_of(result, **{name: key})
    for key in (sweep.y, *({sweep.x} - known)):
      curve.numeric(result, key)
    wanted = (*writers.RESULT_KEYS[:-1], *_MORE_KEYS, *drawn.values())  # not versions
    audited = {"refuted": result["audit"]["refuted"]} if "audit" in result else {}
    return {key: result[key] for key in wanted if key in result} | audited

  def tell(self, row: Row) -> str:
    y = self.sweep.y
    return f"{y} = {by_name(y, curve.numeric(row, y))}, {guarantee.summary(row)}"

  def write(
    self, folder: pathlib.Path, rows: Sequence[Row], *, title: str, last: bool
  ) -> None:
    sweep = self.sweep
    series = separating(rows, x=sweep.x, series=sweep.series)
    axes: dict[str, Any] = {"x": sweep.x, "y": sweep.y, "series": series}
    groups = curve.summarize(rows, **axes)
    header = [*([series] if series else []), sweep.x, "seeds", "not_finite"]
    header += [f"{sweep.y}_{end}" for end in ("mean", "min", "max")]
    header += ["epsilon", *report.WHAT_EPSILON_MEANS, "failed_assumptions"]
    report.write_csv(folder / "curve.csv", groups, list(dict.fromkeys(header)))
    if rows or sweep.picture == "lines":
      recipe = recipe_of(groups, sweep, series, title)
      # Three files of a picture take three times as long as one file.
      redraw.write(folder / "curve.csv", recipe, also=(".pdf", ".svg") if last else ())
    table.write(groups, folder, **axes)

  def alarm(self, rows: Sequence[Row]) -> str:
    refuted = [row for row in rows if row.get("refuted")]
    summary = "; ".join(
      f"{row['name']}: epsilon >= {lower(row['epsilon_audited_lower'])}" for row in refuted
    )
    audited = sum("epsilon_audited_lower" in row for row in rows)
    # Each bound may err by itself, so who reads of one must know of how many.
    return (
      f"audit: {len(refuted)} of {audited} claims are REFUTED: {summary}" if refuted else ""
    )


def check(sweep: Sweep, points: Sequence[Point]) -> None:
  """Raises UserError if the runs cannot be drawn, as far as this is known before they are.

  x must be a number in every run that has an epsilon. If x is a key of a result, it is not known
  yet. y must be a number of a result.
  """
  if sweep.x in ("variant", "label"):
    raise UserError(
      "must be a number; series='variant' draws one line for each",
      field="x",
      value=sweep.x,
    )
  if sweep.y in _WORDS:
    raise UserError(
      "must be a number of a result, such as 'test_loss'", field="y", value=sweep.y
    )
  for point in points:
    if sweep.x not in _config_axes(sweep, point.config):
      continue
    value = fields.get(point.config, sweep.x)
    # Runs without a guarantee need no x: on an axis of epsilon, they are drawn as horizontal lines.
    privacy = getattr(point.config, "privacy", None)
    has_epsilon = getattr(privacy, "noise_multiplier", 0) != 0
    needed = value is not None or has_epsilon
    if not needed or (isinstance(value, int | float) and not isinstance(value, bool)):
      continue
    raise UserError(
      f"must be a number in every run; it is {value!r} in {point.name}",
      field="x",
      value=sweep.x,
    )


def recipe_of(
  groups: Sequence[Row], sweep: Sweep, series: str | None, title: str
) -> Recipe:
  """Returns how curve.csv is drawn.

  Where accuracies crowd below 1, error rates are drawn, on a logarithmic axis. An axis of epsilon
  is logarithmic, and any other one of positive x that span a large factor.

  Args:
    groups: rows of curve.csv.
    series: column that tells lines apart.
  """
  mean, low, high = (f"{sweep.y}_{end}" for end in ("mean", "min", "max"))
  words = {mean: pictures.in_words(sweep.y)}
  if sweep.picture == "points":
    x = groups[0][sweep.x]
    alike = {(group[sweep.x], report.meaning(group)) for group in groups}
    is_one = len(alike) == 1 and x is not None and sweep.x.endswith("epsilon")
    return Recipe(
      "points", (mean,), (series or "variant",), ends=(low, high), words=words, title=title,
      references=tuple((f"{label} ({y:g})", y, None) for label, _, y in sweep.references),
      note=f"epsilon {by_name(sweep.x, x or 0.0)}: {report.meaning(groups[0])}" if is_one else "",
    )  # fmt: skip
  values = [group[end] for group in groups for end in (mean, low, high)]
  values = [value for value in values if math.isfinite(value)]
  crowded = (
    sweep.y.endswith("accuracy")
    and bool(values)
    and _CROWDED <= max(values) < 1
    and (1 - min(values)) / (1 - max(values)) >= _RANGE
  )
  xs = [x for group in groups if (x := group[sweep.x]) is not None]
  wide = bool(xs) and min(xs) > 0 and max(xs) >= _WIDE * min(xs)
  return Recipe(
    "lines", (sweep.x,), (mean,), series, ends=(low, high), words=words, title=title,
    references=tuple(sweep.references), error=crowded,
    log=(sweep.x,) if sweep.x.endswith("epsilon") or wide else (),
  )  # fmt: skip


def _config_axes(sweep: Sweep, config: Any) -> dict[str, str]:
  """Returns {path: "x" or "series"} of those that name a field of a config, not a key of a
  result."""
  known = {field.name for field in dataclasses.fields(config)}
  axes = {sweep.x: "x", sweep.series or "": "series"}
  return {path: name for path, name in axes.items() if "." in path or path in known}


def separating(rows: Sequence[Row], *, x: str, series: str | None) -> str | None:
  """Returns the key whose values tell lines apart: `series`, unless runs that differ in more than
  the seed would form one point. Then each name of a line, or each run's own name, is a line.

  >>> rows = [{"label": label, "variant": "a", "x": 1} for label in ("a @ 1", "a @ 2")]
  >>> separating(rows, x="x", series="variant"), separating(rows[:1], x="x", series=None)
  ('label', None)
  """
  for key in (series, "variant"):
    labels = collections.defaultdict(set)
    for row in rows:
      labels[repr((row.get(key or ""), curve.place(row, x)))].add(row["label"])
    if max(map(len, labels.values()), default=0) < 2:
      return key
  return "label"
