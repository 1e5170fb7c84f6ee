"""The picture of a sweep: panels, lines, scales and words, from the groups of curve.csv."""

import itertools

import pytest

from dpjax import pictures
from dpjax.experiments.plots import redraw
from dpjax.experiments.sweeps import curve, curves
from dpjax.experiments.sweeps.sweep import Sweep
from tests.refuses import refuses

_EPSILONS = (0.5, 1.0, 8.0)


def _group(series, epsilon, value, relation="add_or_remove_one", **changes):
  guarantee = {
    "epsilon_kind": "proved", "delta": 1e-5, "neighboring_relation": relation,
    "unit": "example", "epsilon": epsilon,
  }  # fmt: skip
  none = dict.fromkeys(guarantee) | {"epsilon_kind": "none"}
  return {
    "series": series, "privacy.epsilon": epsilon, "seeds": 3,
    "test_accuracy_mean": value, "test_accuracy_min": value - 0.004,
    "test_accuracy_max": value + 0.004,
    **(none if epsilon is None else guarantee), **changes,
  }  # fmt: skip


def _line(series, start=0.5, relation="add_or_remove_one"):
  private = [
    _group(series, epsilon, start + 0.02 * place, relation)
    for place, epsilon in enumerate(_EPSILONS)
  ]
  return [_group(series, None, start + 0.1), *private]


def _figure(groups, *, look=pictures.PAGE, title="", **more):
  sweep = Sweep(**({"series": "series"} | more))
  recipe = curves.recipe_of(groups, sweep, sweep.series, title)
  return redraw.draw(groups, recipe, look)


def _shown(figure):
  return [axes for axes in figure.axes if axes.axison]


def _colored(axes):
  """The lines of a panel that are neither grey context, nor horizontal, nor ends of bars."""
  grey = pictures.CONTEXT_COLOR
  lines = [line for line in axes.lines if line.get_color() != grey]
  lines = [line for line in lines if line.get_marker() != "_"]
  return [line for line in lines if len(line.get_xdata()) == len(_EPSILONS)]


def _names(figure):
  return [text.get_text() for text in figure.legends[0].get_texts()]


def test_few_lines_share_axes_and_the_legend_names_them():
  groups = [group for name in "abcd" for group in _line(name, 0.4 + ord(name) / 1000)]
  figure = _figure(groups)
  (axes,) = _shown(figure)
  assert sorted(_names(figure)) == [*"abcd", "without privacy"]
  assert axes.get_xlabel() == "privacy budget epsilon"
  assert len({line.get_marker() for line in _colored(axes)}) == 4


def test_of_many_lines_each_has_a_panel_with_the_others_in_grey():
  groups = [group for name in "abcdefg" for group in _line(name)]
  figure = _figure(groups, references=[("R 2021", 1.0, 0.5)])
  shown = _shown(figure)
  assert [axes.get_title(loc="left") for axes in shown] == list("abcdefg")
  for axes in shown:
    assert len(_colored(axes)) == 1
    grey = [line for line in axes.lines if line.get_color() == pictures.CONTEXT_COLOR]
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert len(grey) == 6 and len(dashed) == 1
  # Sixteen entries would be a key that nobody reads.
  (key,) = figure.legends
  names = [text.get_text() for text in key.get_texts()]
  assert names == ["without privacy", "the other panels' lines", "R 2021 (1: 0.5)"]


@pytest.mark.parametrize("number", [1, 3])
def test_two_relations_never_share_axes(number):
  ours = [group for i in range(number) for group in _line(f"a{i}")]
  theirs = [g for i in range(number) for g in _line(f"b{i}", 0.6, "replace_special")]
  figure = _figure([*ours, *theirs], references=[("R 2021", 1.0, 0.52)])
  height = {True: {0.5, 0.52, 0.54}, False: {0.6, 0.62, 0.64}}
  seen = set()
  for axes in _shown(figure):
    lines = [line for line in axes.lines if len(line.get_xdata()) == len(_EPSILONS)]
    lines = [line for line in lines if line.get_marker() != "_"]
    values = {round(float(y), 6) for line in lines for y in line.get_ydata()}
    is_ours = values <= height[True]
    assert is_ours or values <= height[False]
    seen.add(is_ours)
    # Published epsilons are of the usual relation.
    points = [line for line in axes.lines if len(line.get_xdata()) == 1]
    assert any(line.get_marker() == "*" for line in points) == is_ours
    named = "replace one example" in " ".join(axes.get_title(loc="left").split())
    assert named != is_ours
  assert seen == {True, False}


def test_two_units_never_share_axes():
  users = [group | {"unit": "user"} for group in _line("b")[1:]]
  shown = _shown(_figure([*_line("a"), *users]))
  titles = [axes.get_title(loc="left") for axes in shown]
  assert titles == ["add or remove one example", "add or remove one user"]


def test_crowded_accuracies_are_errors_on_a_logarithmic_axis():
  values = [0.96, 0.99, 0.995]
  crowded = [_group("a", e, v) for e, v in zip(_EPSILONS, values)]
  (axes,) = _shown(_figure(crowded))
  assert axes.get_yscale() == "log" and axes.get_ylabel() == "test error (%)"
  (line,) = _colored(axes)
  assert line.get_ydata() == pytest.approx([4.0, 1.0, 0.5])
  # Bars of accuracy turn over: each still begins below its point and ends above it.
  (_, _, (bars,)) = axes.containers[0].lines
  for (low, high), mean in zip(bars.get_segments(), line.get_ydata()):
    assert low[1] == pytest.approx(mean - 0.4) and high[1] == pytest.approx(mean + 0.4)
  plain = _figure(crowded, look=pictures.Look(log_y=False))
  assert _shown(plain)[0].get_ylabel() == "test accuracy"
  (axes,) = _shown(_figure(_line("a")))
  assert axes.get_yscale() == "linear" and axes.get_ylabel() == "test accuracy"


@pytest.mark.parametrize(("count", "shape"), [(7, "bars"), (8, "bands")])
def test_the_note_names_what_shows_the_spread(count, shape):
  figure = _figure([_group("a", 1.0 + place, 0.5) for place in range(count)])
  (axes,) = _shown(figure)
  assert (bool(axes.containers), bool(axes.collections[:1])) == (shape == "bars", True)
  assert any(f"{shape}: min to max" in text.get_text() for text in figure.texts)


def test_a_model_that_saw_no_private_data_is_a_line_across():
  figure = _figure(_line("a"), references=[("public model", 0.0, 0.45)])
  (axes,) = _shown(figure)
  (across,) = [line for line in axes.lines if line.get_linestyle() == ":"]
  assert list(across.get_ydata()) == [0.45, 0.45] and list(across.get_xdata()) == [0, 1]
  names = [text.get_text() for text in figure.legends[0].get_texts()]
  assert "public model (0.45)" in names


def test_points_stand_below_each_other():
  groups = [_group(name, 3.0, 0.4 + place / 50) for place, name in enumerate("abcdefgh")]
  figure = _figure(groups, picture="points")
  (axes,) = _shown(figure)
  assert "epsilon 3: proved, delta = 1e-05" in figure._suptitle.get_text()
  assert [text.get_text() for text in axes.get_yticklabels()] == list("abcdefgh")
  assert axes.get_xlabel() == "test accuracy"
  points = [line for line in axes.lines if line.get_marker() == "o"]
  assert [line.get_xdata()[0] for line in points] == [
    group["test_accuracy_mean"] for group in groups
  ]


def test_the_same_is_told_by_the_name_above():
  groups = [g for name in ("scatter", "the same, FTRL", "cnn") for g in _line(name)]
  assert {*_names(_figure(groups))} == {
    "scatter",
    "scatter, FTRL",
    "CNN",
    "without privacy",
  }


@pytest.mark.slow
def test_every_line_of_a_small_picture_is_inside_of_it(tmp_path):
  names = [f"a line with a rather long name, number {i}" for i in range(7)]
  for number, width in itertools.product((2, 7), pictures.SIZES.values()):
    groups = [group for name in names[:number] for group in _line(name)]
    look = pictures.Look(width=width)
    figure = _figure(groups, look=look, title="A title of a sweep that is not very short")
    figure.draw_without_rendering()
    for axes in _shown(figure):
      for text in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts):
        box = text.get_window_extent()
        assert box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1, (text, width)
      assert axes.get_window_extent().width / figure.dpi > 0.9


def test_a_series_that_a_run_lacks_is_one_line():
  rows = [{"e": 1.0, "a": 0.5, "name": "x"}, {"e": 1.0, "a": 0.5}]
  with refuses("series", value="name"):
    curve.summarize(rows, x="e", y="a", series="name")
