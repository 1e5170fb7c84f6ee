"""CSV files drawn again: dpjax's own as dpjax draws them, others by columns; errors in one line."""

import csv
import json
import pathlib
import random
import re
import shlex
import shutil

import pytest

from dpjax import accounting, pictures
from dpjax.accounting.event_kinds.kind import event_to_json
from dpjax.experiments.plots import csv_tables, recipes, redraw
from dpjax.experiments.run import report
from dpjax.validate import UserError
from tests import commands
from tests.refuses import refuses

_ROOT = commands.ROOT
_RESULTS = _ROOT / "results"
_LOOK = pictures.Look(width=pictures.SIZES["single"])
# One of each kind, and the richest; the others are drawn by the long test.
_QUICK = (
  "mnist_whitened/curve.csv",
  "lm_lora/curve.csv",
  "radp/departures_mnist/report.csv",
  "radp/figure_9/figure_9.csv",
  "attacks/leakage_scores/attacks.csv",
  "secure/regression/secure.csv",
  "secure/distributed_noise.csv",
  "gradients/gradients.csv",
  "federated_devices/federated.csv",
)


def _pictured():
  """Every committed CSV file that has a picture of its name beside it, from results/ on."""
  for path in sorted(_RESULTS.rglob("*.csv")):
    if path.with_suffix(".png").exists():
      yield path.relative_to(_RESULTS).as_posix()


def _write(path, header, rows):
  with path.open("w", newline="") as file:
    csv.writer(file).writerows([header, *rows])
  return path


def _redrawn(name, tmp_path, capsys=None):
  out = tmp_path / "a.png"
  notes = redraw.plot([_RESULTS / name], [out], look=_LOOK)
  assert out.read_bytes().startswith(b"\x89PNG") and 5000 < out.stat().st_size < 150_000
  table = csv_tables.read(_RESULTS / name)
  for note in notes:
    assert str(table.path) in note and "not drawn" in note
  return table


def _names(figure):
  return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("name", _QUICK)
def test_a_committed_picture_is_drawn_again(name, tmp_path):
  assert name in set(_pictured())
  _redrawn(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*_pictured()} - {*_QUICK}))
def test_every_committed_picture_is_drawn_again(name, tmp_path):
  _redrawn(name, tmp_path)


def test_the_gallery_shows_every_committed_picture_with_its_command():
  page = (_ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
  shown = set(re.findall(r"\]\(\.\./(results/[^)]+\.png)\)", page))
  committed = {path.relative_to(_ROOT).as_posix() for path in _RESULTS.rglob("*.png")}
  assert shown == committed and len(shown) > 35
  drawn = set()
  for line in re.findall(r"(?m)^python -m launch\.plot (.*--out=results.*)$", page):
    table, *flags = shlex.split(line)
    (out,) = [flag.removeprefix("--out=") for flag in flags if flag.startswith("--out=")]
    assert (_ROOT / table).is_file() and out in committed, line
    assert pathlib.Path(table).parent == pathlib.Path(out).parent
    drawn.add(out)
  named = {f"results/{name.removesuffix('csv')}png" for name in _pictured()}
  assert drawn == named


def test_no_committed_picture_is_large():
  """A reader of the page loads all of them."""
  sizes = {path: path.stat().st_size for path in _RESULTS.rglob("*.png")}
  assert max(sizes.values()) < 150_000, max(sizes, key=lambda path: sizes[path])


def test_each_committed_picture_has_its_recipe():
  names = list(_pictured())
  assert len(names) >= 60
  drawn = set()
  for name in names:
    recipe = recipes.read(_RESULTS / name)
    assert recipe is not None, name
    columns = {*csv_tables.read(_RESULTS / name).columns}
    assert {*recipe.columns()} <= columns, name
    drawn.add(recipe.draw)
  assert drawn == set(recipes.DRAWN)
  held = {
    path.relative_to(_RESULTS).as_posix() for path in _RESULTS.rglob("*.picture.json")
  }
  assert held == {name.removesuffix(".csv") + recipes.SUFFIX for name in names}


def test_a_recipe_is_read_as_it_was_written(tmp_path):
  recipe = recipes.Recipe(
    "bars", ("a",), ("b", "c"), "d", references=(("R", None, 1.5),), log=("a",),
    outcomes=(("FAILS", "fails"),), words={"a": "A"}, units={"a": "s"},
  )  # fmt: skip
  recipes.write(tmp_path / "a.csv", recipe)
  assert recipes.read(tmp_path / "a.csv") == recipe
  assert recipes.read(tmp_path / "b.csv") is None


@pytest.mark.parametrize(
  "text", ["{", "[]", '{"draw": "pie", "x": ["a"], "y": ["b"]}', '{"draw": "lines"}',
  '{"draw": "lines", "x": ["a"], "y": ["b"], "colour": "red"}',
  '{"draw": "lines", "x": [], "y": ["b"]}',
  '{"draw": "lines", "x": "a", "y": ["b"]}',
  '{"draw": "lines", "x": ["a"], "y": ["b"], "ends": ["a"]}',
  '{"draw": "lines", "x": ["a"], "y": ["b"], "without": ["a"]}'],
)  # fmt: skip
def test_what_is_no_recipe_is_one_line(tmp_path, text):
  path = _write(tmp_path / "a.csv", ["a", "b"], [[1, 2]])
  recipes.beside(path).write_text(text)
  with pytest.raises(UserError) as caught:
    redraw.plot([path], [tmp_path / "a.png"])
  assert "\n" not in str(caught.value) and not (tmp_path / "a.png").exists()


def test_a_recipe_of_other_columns_names_the_column(tmp_path):
  path = _write(tmp_path / "a.csv", ["a", "b"], [[1, 2]])
  recipes.write(path, recipes.Recipe("points", ("a",), ("c",)))
  with refuses("csv", value="c"):
    redraw.plot([path], [tmp_path / "a.png"])
  recipes.write(path, recipes.Recipe("lines", ("a",), ("b",), ends=("a", "b")))
  with refuses("csv", value="seeds"):
    redraw.plot([path], [tmp_path / "a.png"])
  recipes.write(path, recipes.Recipe("lines", ("a",), ("b",), "c"))
  with refuses("csv", value="c"):
    redraw.plot([path], [tmp_path / "a.png"])


def test_lines_in_a_grid_split_by_relation_and_share_what_is_not_private():
  facts = {"epsilon_kind": "proved", "dataset": "d", "relation": "replace_one"}
  rows = [
    {**facts, "curve": "a", "epoch": 1.0, "score": 0.5},
    {**facts, "curve": "b", "epoch": 1.0, "score": 0.6, "relation": "add_or_remove_one"},
    {**facts, "curve": "free", "epoch": 1.0, "score": 0.9, "epsilon_kind": "none",
     "relation": None},
  ]  # fmt: skip
  panels = ("dataset", "relation")
  recipe = recipes.Recipe("lines", ("epoch",), ("score",), "curve", panels=panels)
  figure = redraw.draw(rows, recipe)
  shown = [axes for axes in figure.axes if axes.axison]
  titles = [axes.get_title(loc="left") for axes in shown]
  assert titles == ["d\nreplace one example", "d\nadd or remove one example"]
  names = [{line.get_label() for line in axes.lines} for axes in shown]
  assert names == [{"a", "free"}, {"b", "free"}]


def test_bars_show_what_fails_in_another_colour():
  rows = [
    {"row": name, "rate": rate, "low": rate - 0.1, "high": rate + 0.1, "verdict": verdict}
    for name, rate, verdict in (("a", 0.2, "not shown"), ("b", 0.9, "FAILS: 9 of 10"))
  ]
  recipe = recipes.Recipe(
    "bars", ("rate",), ("row",), "verdict", ends=("low", "high"),
    outcomes=(("FAILS", "fails"), ("", "holds")),
  )  # fmt: skip
  figure = redraw.draw(rows, recipe)
  (axes,) = figure.axes
  assert [bar.get_width() for bar in axes.patches] == [0.2, 0.9]
  assert len({bar.get_facecolor() for bar in axes.patches}) == 2
  assert {text.get_text() for text in figure.legends[0].get_texts()} == {"holds", "fails"}


def test_the_numbers_of_a_curve_are_those_of_its_file():
  table = csv_tables.read(_RESULTS / "mnist_whitened" / "curve.csv")
  notes = []
  figure = redraw.figure([table], redraw.NOTHING, pictures.Look(log_y=False), notes)
  (axes,) = figure.axes
  (line,) = [line for line in axes.lines if len(line.get_xdata()) == len(table.rows)][:1]
  assert list(line.get_xdata()) == [row["privacy.epsilon"] for row in table.rows]
  assert list(line.get_ydata()) == [row["test_accuracy_mean"] for row in table.rows]
  assert notes == []
  names = {text.get_text() for text in figure.legends[0].get_texts()}
  assert names == {"Papernot et al. 2021 (2.93: 0.981)", "Tramèr and Boneh 2021 (3: 0.987)"}


def test_two_sweeps_stand_on_one_picture_with_the_names_of_their_folders():
  names = ("mnist_whitened", "mnist_scatter_linear")
  read = [csv_tables.read(_RESULTS / name / "curve.csv") for name in names]
  figure = redraw.figure(read, redraw.NOTHING, pictures.PAGE, [])
  assert _names(figure)[:2] == ["mnist whitened", "mnist scatter linear"]


def test_any_table_by_its_columns_is_the_mean_of_rows_that_share_x(tmp_path):
  path = _write(
    tmp_path / "a.csv",
    ["step", "loss", "name"],
    [
      [1, 2.0, "a"],
      [1, 4.0, "a"],
      [2, 1.0, "a"],
      [1, 5.0, "b"],
      [2, "nan", "b"],
      [3, "", "b"],
    ],
  )
  asked = redraw.Asked(x="step", y="loss", group="name")
  notes = []
  figure = redraw.figure([csv_tables.read(path)], asked, pictures.Look(log_y=True), notes)
  (axes,) = figure.axes
  (of_a, of_b) = [line for line in axes.lines if line.get_label() in ("a", "b")]
  assert (list(of_a.get_xdata()), list(of_a.get_ydata())) == ([1, 2], [3.0, 1.0])
  assert (list(of_b.get_xdata()), list(of_b.get_ydata())) == ([1], [5.0])
  assert axes.get_yscale() == "log"
  assert notes == [f"{path}: 2 of 6 rows hold no finite loss: not drawn"]
  assert "mean of 1 to 2 rows" in figure._suptitle.get_text()


def test_files_of_one_name_are_lines_of_their_own(tmp_path):
  header = ["step", "loss"]
  paths = []
  for folder, loss in (("a", 2.0), ("b", 4.0)):
    (tmp_path / folder).mkdir()
    paths.append(_write(tmp_path / folder / "report.csv", header, [[1, loss], [2, loss]]))
  read = [csv_tables.read(path) for path in paths]
  figure = redraw.figure(read, redraw.Asked(x="step", y="loss"), pictures.PAGE, [])
  (axes,) = figure.axes
  assert _names(figure) == ["a/report", "b/report"]
  # A file of another folder of the same name is no seed of the first.
  assert {line.get_ydata()[0] for line in axes.lines if len(line.get_xdata())} >= {2.0, 4.0}


def test_two_relations_of_any_table_have_axes_of_their_own():
  rows = csv_tables.read(_RESULTS / "radp" / "departures_mnist" / "report.csv").rows
  other = [{**row, "neighboring_relation": "replace_one"} for row in rows]
  table = csv_tables.CsvTable(_RESULTS / "a.csv", list(rows[0]), [*rows, *other])
  asked = redraw.Asked(x="epoch", y="test_accuracy")
  figure = redraw.figure([table], asked, pictures.PAGE, [])
  titles = [axes.get_title(loc="left") for axes in figure.axes]
  assert titles == ["add or remove one example", "replace one example"]


@pytest.mark.parametrize("steps", ["communication rounds", "optimizer steps"])
def test_a_run_is_redrawn_with_the_name_of_its_steps(tmp_path, steps):
  guarantee = {"epsilon_kind": "proved", "delta": 1e-5, "unit": "user", "epsilon": 2.0}
  guarantee["neighboring_relation"] = "add_or_remove_one"
  named = {"dataset": "d", "method": "dp_fed_avg", "test_accuracy": 0.2}
  rows = [[1, 0.1, 1.0], [2, 0.2, 2.0]]
  axes = _drawn_run(tmp_path, guarantee | named, rows, steps=steps)
  labels = {one.get_xlabel() for one in axes.figure.axes}
  assert labels == {steps}


def test_a_run_is_redrawn_beside_a_published_result(tmp_path):
  """The legend names it alone: the panels name their own lines."""
  _drawn_run(tmp_path, {}, [[1, 0.1, 1.0], [2, 0.2, 2.0]])
  asked = redraw.Asked(references=(("paper", 1.0, 0.5),))
  read = [csv_tables.read(tmp_path / "report.csv")]
  figure = redraw.figure(read, asked, pictures.PAGE, [])
  assert _names(figure) == ["paper (1: 0.5)"]
  score, epsilon = figure.axes
  assert score.lines[1].get_xydata().tolist() == [[1.0, 0.5]] and len(epsilon.lines) == 1


def _drawn_run(folder, result, rows, steps="optimizer steps"):
  """The axes of epsilon in the picture of a run."""
  columns = ["step", "test_accuracy", "epsilon"]
  path = _write(folder / "report.csv", columns, rows)
  recipe = report.recipe([dict(zip(columns, row)) for row in rows], result, steps=steps)
  recipes.write(path, recipe)
  figure = redraw.figure([csv_tables.read(path)], redraw.NOTHING, pictures.PAGE, [])
  return figure.axes[1]


def test_epsilon_between_two_evaluations_is_the_accountants(tmp_path):
  guarantee = {"epsilon_kind": "proved", "delta": 1e-5, "unit": "example"}
  guarantee["neighboring_relation"] = "add_or_remove_one"
  step = accounting.gaussian_event(20.0)
  cost = {
    n: accounting.epsilon(accounting.compose(step, n), delta=1e-5, accountant="rdp")
    for n in (100, 450, 900)
  }
  charge = {"event": event_to_json(step), "num_steps": 900}
  result = guarantee | {
    "epsilon": cost[900], "accountant": "rdp", "ledger": {"charges": [charge]},
    "dataset": "d", "method": "dp_sgd", "test_accuracy": 0.5,
  }  # fmt: skip
  rows = [[100, 0.475, cost[100]], [900, 0.5787, cost[900]]]
  line, points = _drawn_run(tmp_path, result, rows).lines
  assert list(points.get_ydata()) == [cost[100], cost[900]]
  curve = dict(zip(line.get_xdata(), line.get_ydata()))
  assert len(curve) > 12 and min(curve) == 1
  assert {step: curve[step] for step in cost} == pytest.approx(cost)
  # A straight line between the evaluations would be far below it.
  chord = cost[100] + (cost[900] - cost[100]) * 350 / 800
  assert curve[450] > 1.05 * chord
  # Where the ledger gives another epsilon than the run had, the line is a staircase.
  rows[1][2] = 1.1 * cost[900]
  (line,) = _drawn_run(tmp_path, result, rows).lines
  assert line.get_drawstyle() == "steps-pre"


@pytest.mark.long
def test_what_is_set_aside_for_large_batches_is_left_out_of_the_curve(tmp_path):
  result = json.loads((_RESULTS / "cifar10_cnn" / "result.json").read_text())
  rows = [[100, 0.475, 3.99609145], [900, 0.5787, result["epsilon"]]]
  line, _ = _drawn_run(tmp_path, result, rows).lines
  curve = dict(zip(line.get_xdata(), line.get_ydata()))
  assert curve[900] == pytest.approx(result["epsilon"]) and 5.9 < curve[450] < 5.99


_BAD = [
  ("missing.csv", None, "csv"),
  ("a.csv", b"", "csv"),
  ("a.csv", b"x,y\n", "csv"),
  ("a.csv", b"\x89PNG\r\n\x1a\n\x00\xff", "csv"),
  ("a.csv", b"x,y\n1,2\n3\n", "csv"),
  ("a.csv", b'{\n "a": 1,\n "b": 2\n}\n', "csv"),
  ("a.csv", b"x,x\n1,2\n", "csv"),
  ("a.csv", b'x,y\n"1"2,3\n', "csv"),
  ("a.csv", b"x,y\n1,2\n", "csv"),
]


@pytest.mark.parametrize("name, content, field", _BAD)
def test_a_file_that_is_no_table_is_refused(tmp_path, name, content, field):
  path = tmp_path / name
  if content is not None:
    path.write_bytes(content)
  with refuses(field) as caught:
    redraw.plot([path], [tmp_path / "a.png"])
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
  "asked, field",
  [
    ({"x": "z", "y": "loss"}, "x"),
    ({"x": "step", "y": "los"}, "y"),
    ({"x": "step", "y": "name"}, "y"),
    ({"x": "step", "y": "loss", "group": "g"}, "group"),
    ({"x": "step"}, "y"),
    ({"group": "name"}, "x"),
  ],
)
def test_a_column_that_is_not_there_is_refused(tmp_path, asked, field):
  path = _write(
    tmp_path / "a.csv", ["step", "loss", "name"], [[1, 2.0, "a"], [2, "nan", "b"]]
  )
  with refuses(field):
    redraw.plot([path], [tmp_path / "a.png"], asked=redraw.Asked(**asked))


def test_a_table_of_many_columns_is_refused_in_one_line(tmp_path):
  names = [f"a_column_of_a_table_{number}" for number in range(99)]
  path = _write(tmp_path / "a.csv", names, [[1] * 99])
  for field, asked in (("csv", redraw.Asked()), ("x", redraw.Asked(x="x", y="y"))):
    with refuses(field) as caught:
      redraw.plot([path], [tmp_path / "a.png"], asked=asked)
    assert len(str(caught.value)) < 293


def test_what_cannot_stand_on_one_picture_is_refused(tmp_path):
  empty = _write(tmp_path / "a.csv", ["x", "y"], [["nan", 1], [1, "inf"]])
  with pytest.raises(UserError, match="no row holds a finite number in both"):
    redraw.plot([empty], [tmp_path / "a.png"], asked=redraw.Asked(x="x", y="y"))
  curve = _RESULTS / "mnist_whitened" / "curve.csv"
  other = _RESULTS / "lm_lora" / "curve.csv"
  with pytest.raises(
    UserError, match="lines with the same axes, not .*test_perplexity_mean over"
  ):
    redraw.plot([curve, other], [tmp_path / "a.png"])
  secure = _RESULTS / "secure" / "sums" / "secure.csv"
  with refuses("csv"):
    redraw.plot([curve, secure], [tmp_path / "a.png"])
  published = redraw.Asked(references=(("R", 1.0, 2.0),))
  with refuses("reference"):
    redraw.plot([secure], [tmp_path / "a.png"], asked=published)
  with refuses("out", value="a.jpg"):
    redraw.plot([curve], ["a.jpg"])
  with refuses("csv", value=""):
    redraw.plot([], ["a.png"])


@pytest.mark.cases(quick=[3], slow=...)
@pytest.mark.parametrize("name", _QUICK)
def test_a_damaged_cell_of_any_column_is_drawn_or_one_line(name, tmp_path):
  rng = random.Random(name)
  shutil.copytree((_RESULTS / name).parent, tmp_path / "whole")
  path = tmp_path / "whole" / pathlib.Path(name).name
  header, *rows = csv.reader(path.read_text().splitlines())
  for place in range(len(header)):
    damaged = [list(row) for row in rows]
    rng.choice(damaged)[place] = rng.choice(["", "nan", "inf", "x", "-1", "1e400"])
    _write(path, header, damaged)
    try:
      redraw.plot([path], [tmp_path / "a.svg"], look=_LOOK)
    except UserError as error:
      assert "\n" not in str(error) and len(str(error)) < 300


@pytest.mark.parametrize(
  ("column", "text"),
  [("seeds", ""), ("seeds", "nan"), ("test_accuracy_mean", ""), ("not_finite", "x")],
)
def test_a_cell_that_cannot_be_drawn_is_named(column, text, tmp_path):
  whole = _RESULTS / "mnist_curves" / "curve.csv"
  header, *rows = csv.reader(whole.read_text().splitlines())
  rows[1][header.index(column)] = text
  path = _write(tmp_path / "curve.csv", header, rows)
  shutil.copy(recipes.beside(whole), recipes.beside(path))
  with refuses("csv") as caught:
    redraw.plot([path], [tmp_path / "a.svg"], look=_LOOK)
  assert f"row 3 of {column!r}" in str(caught.value)
  assert not (tmp_path / "a.svg").exists()


@pytest.mark.parametrize("text", ["wide", "3x", "x3", "3x2x1", "", "0x3", "3xnan", "41"])
def test_a_size_that_is_none_is_refused(text):
  with refuses("size", value=text):
    redraw.size(text)


@pytest.mark.parametrize("text", ["R", "R:1", "R:1:x", "1:2", "R:nan:1", "R:1:inf"])
def test_a_reference_that_is_none_is_refused(text):
  with refuses("reference", value=text):
    redraw.reference(text)
