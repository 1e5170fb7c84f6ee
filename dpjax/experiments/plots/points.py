"""A row for each thing that was measured: a point, or a bar, at its value."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpjax import pictures
from dpjax.experiments.plots.recipes import Recipe, is_number
from dpjax.pictures import PAGE, Look
from dpjax.validate import UserError

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

Row = dict[str, Any]


def points(rows: Sequence[Row], recipe: Recipe, look: Look = PAGE) -> Figure:
  """Returns a picture with a row for each name, and a point at each of its values.

  Args:
    rows: rows of the CSV file.
    recipe: what is drawn. Columns of `y` name the row, `x` are values, each in panels of its own.
    look: sizes, fonts and style of the picture.
  """
  return _figure(rows, recipe, look, filled=False)


def bars(rows: Sequence[Row], recipe: Recipe, look: Look = PAGE) -> Figure:
  """Returns the picture of `points` with bars from zero, for shares and counts."""
  return _figure(rows, recipe, look, filled=True)


def _figure(rows: Sequence[Row], recipe: Recipe, look: Look, *, filled: bool) -> Figure:
  rows = [row for row in rows if any(is_number(row[x]) for x in recipe.x)]
  if not rows:
    raise UserError("no row holds a finite number", field="x", value=recipe.x)
  cells = [
    (place, x)
    for place in dict.fromkeys(map(_place(recipe), rows))
    for x in recipe.x
    if any(is_number(row[x]) for row in rows if _place(recipe)(row) == place)
  ]
  # Names stand beside the first panel of a row of panels alone, if all panels have the same names.
  names = [_names(rows, recipe, place) for place, _ in cells]
  alike = all(each == names[0] for each in names)
  longest = max(len(name) for each in names for name in each)
  margin = min(longest, 40) * pictures.letter(look.font_size - 1)
  least = 1.9 if alike else margin + 1.3
  wide = max(1, min(len(cells), int((look.width - margin * alike) // least)))
  blocks = -(-len(cells) // wide)
  wide = -(-len(cells) // blocks)
  line = look.font_size * 1.75 / 72
  height = (max(map(len, names)) * line + 0.6) * blocks + 0.8
  drawn = pictures.new_figure(look, height=height)
  grid = drawn.subplots(blocks, wide, squeeze=False, sharey=alike)
  handles: dict[str, Any] = {}
  # The first outcome is the one to be seen, so it gets the second colour.
  outcomes = [words for _, words in reversed(recipe.outcomes)]
  series = list(dict.fromkeys([*outcomes, *(_series(row, recipe) for row in rows)]))
  flat = list(grid.flat)
  for index, ((place, x), axes) in enumerate(zip(cells, flat)):
    mine = [row for row in rows if _place(recipe)(row) == place and is_number(row[x])]
    named = names[index]
    handles |= _draw(axes, mine, x, named, series, recipe, look, filled=filled)
    width = look.width / wide - (margin if not alike else margin / wide)
    characters = max(14, int(width / pictures.letter(look.font_size)))
    heading = ", ".join(recipe.words.get(str(each), str(each)) for each in place if each)
    label = recipe.name_of(x)
    title, xlabel = (_wrap(text, characters) for text in (heading, label))
    pictures.dress(axes, look, title=title, xlabel=xlabel)
    axes.set_yticks(range(len(named)), named)
    axes.set_ylim(len(named) - 0.4, -0.6)
  for axes in flat[len(cells) :]:
    axes.set_axis_off()
  pictures.headline(drawn, look, recipe.title, recipe.note)
  if len(handles) > 1:
    pictures.key(drawn, look, list(handles.values()))
  return drawn


def _wrap(text: str, characters: int) -> str:
  return textwrap.fill(text, characters, break_on_hyphens=False)


def _place(recipe: Recipe) -> Any:
  return lambda row: tuple(row[name] for name in recipe.panels)


def _row_name(row: Row, recipe: Recipe) -> str:
  parts = [recipe.text(name, row[name]) for name in recipe.y]
  return ", ".join(filter(None, parts))


def _names(rows: Sequence[Row], recipe: Recipe, place: tuple[Any, ...]) -> list[str]:
  mine = [row for row in rows if _place(recipe)(row) == place]
  return list(dict.fromkeys(_row_name(row, recipe) for row in mine))


def _series(row: Row, recipe: Recipe) -> str:
  """Returns the name of what a row's colour stands for."""
  if recipe.series is None:
    return ""
  value = row[recipe.series]
  for beginning, words in recipe.outcomes:
    if str(value).startswith(beginning):
      return words
  return recipe.text(recipe.series, value)


def _draw(
  axes: Axes,
  rows: list[Row],
  x: str,
  names: list[str],
  series: list[str],
  recipe: Recipe,
  look: Look,
  *,
  filled: bool,
) -> dict[str, Any]:
  """Draws the rows of a panel, and returns the legend's entries."""
  handles: dict[str, Any] = {}
  for row in rows:
    name = _series(row, recipe)
    index = series.index(name)
    color = look.color(index)
    marker = pictures.marker(index)
    # Points of one row are drawn slightly apart, so that none hides another.
    mates = [other for other in rows if _row_name(other, recipe) == _row_name(row, recipe)]
    shift = (mates.index(row) - (len(mates) - 1) / 2) * 0.6 / max(len(mates), 1)
    height = names.index(_row_name(row, recipe)) + (shift if len(mates) > 1 else 0.0)
    if filled:
      axes.barh(height, row[x], height=0.6 / len(mates), color=color, alpha=0.35)
    if recipe.ends:
      low, high = (row[end] for end in recipe.ends)
      axes.plot([low, high], [height, height], color=color, linewidth=1.4)
    axes.plot(row[x], height, color=color, marker=marker, markersize=3.6, linestyle="none")
    if x in recipe.units:
      axes.annotate(
        _number(row[x], recipe.units[x]), (row[x], height), xytext=(5, 0),
        textcoords="offset points", va="center", fontsize=look.font_size - 1.5, color="#333333",
      )  # fmt: skip
    if name:
      how = {"linestyle": "none", "marker": marker, "color": color}
      handles[name] = pictures.sample(name, look, **how)
  _scale(axes, [row[x] for row in rows], x, recipe, look)
  for index, (label, at, _) in enumerate(recipe.references):
    if at is not None:
      dash = (0, (1 + index, 1.5))
      how = {"color": pictures.REFERENCE_COLOR, "linewidth": 0.9, "linestyle": dash}
      axes.axvline(at, **how)
      handles[label] = pictures.sample(label, look, **how)
  return handles


def _scale(axes: Axes, values: list[float], x: str, recipe: Recipe, look: Look) -> None:
  from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

  is_log = x in recipe.log if look.log_x is None else look.log_x
  positive = [value for value in values if value > 0]
  if not is_log or not positive:
    return
  low = min(positive)
  high = max(positive)
  axes.set_xscale("log")
  # The axis ends far beyond the largest value, so that the number beside its point fits.
  beyond = (high / low) ** 0.3 * 3 if x in recipe.units else 1.3
  axes.set_xlim(low / 1.6, high * beyond)
  # A short range of values gets more ticks.
  subs = (1.0,) if high > 20 * low else (1.0, 2.0, 5.0)
  axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=5))
  unit = recipe.units.get(x, "")
  axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value, unit)))
  axes.xaxis.set_minor_locator(NullLocator())


def _number(value: float, unit: str) -> str:
  """Returns a number with its unit.

  >>> _number(0.25, "s"), _number(12_345_678, "B"), _number(2.0, "")
  ('0.25 s', '12.3 MB', '2')
  """
  if unit == "B":
    return amount(int(value))
  return f"{value:.3g} {unit}".rstrip() if value < 1000 else f"{value:,.0f} {unit}".rstrip()


def amount(num_bytes: int) -> str:
  """Returns a number of bytes as text, with three digits and a unit.

  >>> amount(999), amount(12_345_678)
  ('999 B', '12.3 MB')
  """
  value = float(num_bytes)
  for unit in ("B", "kB", "MB", "GB"):
    if value < 1000:
      return f"{value:.3g} {unit}"
    value = value / 1000
  return f"{value:.3g} TB"
