"""Draws CSV files: dpjax's own files as dpjax drew them, any file by columns that a user names."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dpjax import pictures
from dpjax.experiments.kinds.attack import table as attack_table
from dpjax.experiments.kinds.secure import table as secure_table
from dpjax.experiments.plots import csv_tables, measured
from dpjax.experiments.plots.csv_tables import CsvTable, Row
from dpjax.experiments.run import experiment, report, writers
from dpjax.experiments.sweeps import curve_picture, noise_histograms, panels
from dpjax.pictures import PAGE, Look
from dpjax.validate import UserError, first_line, join_words

if TYPE_CHECKING:
  from matplotlib.figure import Figure

Reference = tuple[str, float, float]


class Layout(NamedTuple):
  """Rule that recognises and draws one type of CSV file that dpjax writes.

  Attributes:
    words: description of the file's content.
    columns: names of the columns by which the file is recognised.
    numbers: columns that must hold numbers; rows without a number are reported, not drawn.
    draw: function of (table, title, look) that returns the picture.
  """

  words: str
  columns: frozenset[str]
  numbers: tuple[str, ...]
  draw: Callable[[CsvTable, str, Look], Figure]


class Asked(NamedTuple):
  """The columns and references that a user asks for in a picture.

  Attributes:
    x: column of x; None: the layout of dpjax's own file decides.
    y: column of y.
    group: column whose values become lines.
    references: (label, x, y) of published results.
  """

  x: str | None = None
  y: str | None = None
  group: str | None = None
  references: tuple[Reference, ...] = ()


# With no columns and no references, dpjax's own files are drawn as dpjax drew them.
NOTHING = Asked()


def plot(
  paths: Sequence[str | os.PathLike],
  out: Sequence[str | os.PathLike],
  *,
  asked: Asked = NOTHING,
  look: Look = PAGE,
) -> list[str]:
  """Draws CSV files on one picture, and writes it.

  Args:
    paths: paths of the CSV files. Several are allowed only for curves of sweeps, or with x and y.
    out: files to write, each .png, .pdf or .svg.
    asked: columns and references.
    look: sizes, fonts, style, title.

  Returns:
    Notes about rows that were not drawn.

  Raises:
    UserError: `paths` or `out` is empty; a file is no CSV file, or has no rows; a column or suffix
      is unknown; a cell cannot be drawn; x or y is needed and missing; or the files, or the
      references, cannot share a picture.
  """
  if not paths:
    raise UserError("must name at least one CSV file", field="csv", value="")
  if not out:
    raise UserError("must name a file to write", field="out", value="")
  for path in out:
    pictures.check_suffix(path)
  read = [csv_tables.read(path) for path in paths]
  notes: list[str] = []
  try:
    drawn = figure(read, asked, look, notes)
    for path in out:
      pictures.save(drawn, path)
  except UserError:
    raise
  # Drawing code reads dozens of columns, and raises these errors for cells of a wrong kind.
  except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
    raise _undrawable(read, error) from error
  return notes


def _undrawable(read: Sequence[CsvTable], error: Exception) -> UserError:
  """Returns the error for tables that cannot be drawn; it names suspicious cells, if any."""
  for table in read:
    cells = table.odd_cells()
    if cells:
      shown = f"cannot be drawn; perhaps as {join_words(cells, 100)}"
      return UserError(shown, field="csv", value=str(table.path))
  reason = first_line(error, with_type=True)
  return UserError(f"cannot be drawn: {reason}", field="csv", value=str(read[0].path))


def figure(read: Sequence[CsvTable], asked: Asked, look: Look, notes: list[str]) -> Figure:
  """Returns the picture that `plot` saves. Appends lines about rows not drawn to `notes`."""
  if asked.x or asked.y or asked.group:
    for name in ("x", "y"):
      if not getattr(asked, name):
        raise UserError("must be given with the other columns", field=name, value=None)
    return _by_columns(read, asked, look, notes)
  if all(map(_is_sweep, read)):
    return _sweeps(read, asked, look, notes)
  return _as_written(read, asked, look, notes)


def _as_written(
  read: Sequence[CsvTable], asked: Asked, look: Look, notes: list[str]
) -> Figure:
  """Returns the picture of one file that dpjax wrote, as dpjax drew it."""
  if len(read) > 1:
    raise UserError(
      "several files on one picture must be curves of sweeps, or be drawn with --x and --y",
      field="csv",
      value=[str(table.path) for table in read],
    )
  (table,) = read
  if asked.references:
    raise UserError(
      "goes with curves of sweeps, or with x and y",
      field="reference",
      value=str(table.path),
    )
  layout = layout_of(table)
  if layout is None:
    raise UserError(
      f"none of dpjax's own files; give --x and --y of its columns: "
      f"{join_words(table.columns, 120)}",
      field="csv",
      value=str(table.path),
    )
  for name in layout.numbers:
    table.numeric(name, field="csv")
    notes += _missing(table, name)
  return layout.draw(table, look.title or "", look)


def layout_of(table: CsvTable) -> Layout | None:
  """Returns the first layout whose columns are all in the table, or None."""
  columns = frozenset(table.columns)
  return next((layout for layout in LAYOUTS if layout.columns <= columns), None)


def size(text: str) -> dict[str, float]:
  """Parses "single", "double", "3.3" or "3.3x2.4" into width and, if given, height, in inches.

  Raises:
    UserError: the text has another form.

  >>> size("single"), size("5x2.5")
  ({'width': 3.3}, {'width': 5.0, 'height': 2.5})
  """
  if text in pictures.SIZES:
    return {"width": pictures.SIZES[text]}
  try:
    sides = [float(part) for part in text.split("x")]
    return dict(zip(("width", "height"), sides, strict=len(sides) > 2))
  except ValueError:
    raise UserError(
      "must be single, double, a width in inches or WIDTHxHEIGHT", field="size", value=text
    ) from None


def reference(text: str) -> Reference:
  """Parses "label:x:y" into (label, x, y); the label may hold colons.

  Raises:
    UserError: the text has another form.

  >>> reference("Papernot et al. 2021:2.93:0.981")
  ('Papernot et al. 2021', 2.93, 0.981)
  """
  try:
    label, x, y = text.rsplit(":", 2)
    return label, float(x), float(y)
  except ValueError:
    raise UserError(
      "must be LABEL:X:Y with two numbers", field="reference", value=text
    ) from None


def _missing(table: CsvTable, name: str) -> list[str]:
  """Returns a note on how many rows hold no finite number in a column; [] if all hold one."""
  lost = sum(not csv_tables.is_number(row[name]) for row in table.rows)
  if not lost:
    return []
  return [
    f"{table.path}: {lost} of {len(table.rows)} rows hold no finite {name}: not drawn"
  ]


def _is_sweep(table: CsvTable) -> bool:
  """Returns whether a table has the columns of a sweep's curve.csv."""
  has = {*report.WHAT_EPSILON_MEANS, "epsilon", "seeds"} <= {*table.columns}
  return has and any(name.endswith("_mean") for name in table.columns)


def _sweeps(read: Sequence[CsvTable], asked: Asked, look: Look, notes: list[str]) -> Figure:
  """Draws curves of sweeps: a line for each series of each file."""
  axes = []
  groups: list[Row] = []
  references = list(asked.references)
  title = ""
  folders = _told_apart([table.path.resolve().parent.parts for table in read])
  for table, folder in zip(read, folders):
    place = table.columns.index("seeds")
    x = table.numeric(table.columns[place - 1], field="csv")
    y = next(name for name in table.columns if name.endswith("_mean")).removesuffix("_mean")
    for end in ("mean", "min", "max"):
      table.numeric(f"{y}_{end}", field="csv")
    table.numeric("seeds", field="csv")
    axes.append((x, y))
    series = table.columns[place - 2] if place > 1 else None
    for row in table.rows:
      label = str(row[series]) if series else ""
      # With several files, each line is named after its file's folder, too.
      name = ": ".join(filter(None, (folder, label))) if len(read) > 1 else label
      groups.append({**row, "series": name})
    lost = sum(not csv_tables.is_number(row[f"{y}_mean"]) for row in table.rows)
    if lost:
      notes.append(
        f"{table.path}: {lost} of {len(table.rows)} rows hold no finite {y}: not drawn"
      )
    beside = table.path.with_name("sweep.json")
    if beside.is_file():
      known = writers.read_json(beside)
      title = known.get("title", "") if len(read) == 1 else ""
      references += [tuple(entry) for entry in known["config"].get("references", ())]
  if len(set(axes)) > 1:
    shown = "; ".join(f"{table.path}: {y} over {x}" for table, (x, y) in zip(read, axes))
    raise UserError(f"files on one picture must have the same axes, not {shown}")
  x, y = axes[0]
  references = list(dict.fromkeys(references))
  named = any(group["series"] for group in groups)
  return curve_picture.figure(
    groups, x=x, y=y, series="series" if named else None, references=references,
    title=title, look=look,
  )  # fmt: skip


def _told_apart(places: Sequence[tuple[str, ...]]) -> list[str]:
  """Returns a name for each path: its last part, or as many of them as tell all the paths apart.

  Paths are tuples of parts. Equal paths have the same name.

  >>> _told_apart([("runs", "a", "report"), ("runs", "b", "report")])
  ['a/report', 'b/report']
  """
  names: list[str] = []
  for depth in range(1, 1 + max(map(len, places))):
    names = ["/".join(parts[-depth:]) for parts in places]
    if len(set(names)) == len(set(places)):
      break
  return names


def _by_columns(
  read: Sequence[CsvTable], asked: Asked, look: Look, notes: list[str]
) -> Figure:
  """Draws y over x of any tables. Rows with the same file name, group, x and meaning of epsilon are
  averaged."""
  x = asked.x or ""
  y = asked.y or ""
  kept: dict[tuple[Any, ...], list[Row]] = {}
  paths = [table.path.resolve() for table in read]
  files = _told_apart([(*path.parent.parts, path.stem) for path in paths])
  for table, file in zip(read, files):
    table.numeric(x, field="x")
    table.numeric(y, field="y")
    if asked.group:
      table.known(asked.group, field="group")
    for name in (x, y):
      notes += _missing(table, name)
    finite = [row for row in table.rows if csv_tables.is_number(row[x])]
    for row in finite:
      value = row[asked.group] if asked.group else ""
      label = f"{value:g}" if isinstance(value, float) else str(value or "")
      name = ": ".join(filter(None, (file, label))) if len(read) > 1 else label
      # Rows whose epsilons differ in kind, delta, relation or unit are never averaged.
      meaning = tuple(row.get(key) for key in report.WHAT_EPSILON_MEANS)
      if csv_tables.is_number(row[y]):
        kept.setdefault((name, row[x], meaning), []).append(row)
  if not kept:
    raise UserError("no row holds a finite number in both", field="x, y", value=(x, y))
  groups = [_group(place, rows, x, y) for place, rows in kept.items()]
  groups.sort(key=lambda group: group[x])
  named = any(group["series"] for group in groups)
  return curve_picture.figure(
    groups, x=x, y=y, series="series" if named else None, references=asked.references,
    repeats="rows", look=look,
  )  # fmt: skip


def _group(place: tuple[Any, ...], rows: list[Row], x: str, y: str) -> Row:
  """Returns the mean, minimum and maximum of y, in the form of `curve.summarize`.

  The rows have the same series, the same x, and the same meaning of epsilon.
  """
  name, at, meaning = place
  values = [row[y] for row in rows]
  facts: Row = {"epsilon_kind": None}
  if all(value is not None for value in meaning):
    facts = dict(zip(report.WHAT_EPSILON_MEANS, meaning))
  return {
    **facts,
    "series": name,
    x: at,
    "seeds": len(rows),
    f"{y}_mean": statistics.mean(values),
    f"{y}_min": min(values),
    f"{y}_max": max(values),
  }


def _run(table: CsvTable, title: str, look: Look) -> Figure:
  """Draws report.csv of a run, with the result.json beside it."""
  beside = table.path.with_name(writers.RESULT)
  result = writers.read_json(beside) if beside.is_file() else {}
  rows = [row | {"step": int(row["step"])} for row in table.rows]
  # Without result.json, only a column that PATE writes tells what the steps are.
  usual = "queries" if "test_answers" in table.columns else "optimizer steps"
  steps = result.get(experiment.STEPS_ARE) if isinstance(result, dict) else None
  drawn = report.figure(rows, result, steps=str(steps or usual), look=look)
  if drawn is None:
    raise UserError(
      "must hold a score or an epsilon by step", field="csv", value=str(table.path)
    )
  return drawn


def _relevance(table: CsvTable, title: str, look: Look) -> Figure:
  """Draws report.csv of a relevance experiment.

  Old report files have no neighboring relations, so these are read from claims.csv.
  """
  rows = table.rows
  beside = table.path.with_name("claims.csv")
  if "neighboring_relation" not in table.columns and beside.is_file():
    claims = csv_tables.read(beside).rows
    relations = {claim["method"]: claim["neighboring_relation"] for claim in claims}
    rows = [row | {"neighboring_relation": relations.get(row["curve"])} for row in rows]
  curves = list(dict.fromkeys(str(row["curve"]) for row in rows))
  datasets = list(dict.fromkeys(str(row["dataset"]) for row in rows))
  return panels.figure(rows, title=f"{', '.join(datasets)}: {', '.join(curves)}", look=look)


def _attacks(table: CsvTable, title: str, look: Look) -> Figure:
  """Draws attacks.csv, and the ROC curves of the curves.csv beside it."""
  beside = table.path.with_name("curves.csv")
  points = csv_tables.read(beside).rows if beside.is_file() else []
  return attack_table.figure(table.rows, points, title=title, look=look)


def _rocs(table: CsvTable, title: str, look: Look) -> Figure:
  """Draws curves.csv of attacks, or roc.csv of one attacked run."""
  more = {"defence": "", "epsilon": ""}
  # In roc.csv the column "attack" names the method, so it becomes "method".
  points = [
    row
    if "method" in row
    else more | row | {"attack": "membership", "method": row["attack"]}
    for row in table.rows
  ]
  return attack_table.figure([], points, title=title, look=look)


def _of_rows(draw: Callable[..., Figure]) -> Callable[[CsvTable, str, Look], Figure]:
  """Turns a function of (rows, title, look) into the `draw` of a layout."""
  return lambda table, title, look: draw(table.rows, title=title, look=look)


LAYOUTS = (
  Layout(
    "a relevance experiment by epoch",
    frozenset({"curve", "dataset", "epsilon_target", "epoch", "epsilon_kind"}),
    ("epsilon_target", "epoch", "test_accuracy", "test_loss"),
    _relevance,
  ),
  Layout(
    "a table of attacks",
    frozenset({"attack", "defence", "method", "verdict"}),
    ("success", "low", "high"),
    _attacks,
  ),
  Layout(
    "ROC curves of attacks", frozenset({"attack", "fpr", "tpr"}), ("fpr", "tpr"), _rocs
  ),
  Layout(
    "a table of secure computations",
    frozenset({"row", "task", "protocol", "hides"}),
    ("seconds", "bytes"),
    _of_rows(secure_table.figure),
  ),
  Layout(
    "the benchmark of clipped gradients",
    frozenset({"workload", "method", "status", "compile_ratio"}),
    ("ratio",),
    _of_rows(measured.gradients),
  ),
  Layout(
    "the benchmark of compiled gradients",
    frozenset({"target", "workload", "method", "roofline_ratio", "memory_ratio"}),
    ("roofline_ratio", "memory_ratio"),
    _of_rows(measured.compiled),
  ),
  Layout(
    "the benchmark of federated rounds",
    frozenset({"workload", "method", "num_clients", "steps_per_client"}),
    ("num_clients", "steps_per_client", "median_s"),
    _of_rows(measured.federated),
  ),
  Layout(
    "the benchmark of noise inside secure sums",
    frozenset({"bits", "epsilon", "ratio", "central_rmse"}),
    ("bits", "epsilon", "ratio"),
    _of_rows(measured.noise_error),
  ),
  Layout(
    "histograms",
    frozenset({"from", "to"}),
    ("from", "to"),
    _of_rows(noise_histograms.figure),
  ),
  Layout("a run by step", frozenset({"step"}), ("step",), _run),
)
