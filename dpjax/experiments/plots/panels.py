"""The picture of one run, and what its panels share with those of a grid."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpjax import pictures
from dpjax.experiments.plots.recipes import Recipe, is_number
from dpjax.pictures import PAGE, Look

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure


def of_run(rows: Sequence[Mapping[str, Any]], recipe: Recipe, look: Look = PAGE) -> Figure:
  """Returns the picture of a run: a panel for each column of y over x, beside each other if they
  fit.

  Args:
    rows: one for each place on the x axis. What a row lacks is not drawn.
    recipe: what is drawn; it has no series.
    look: sizes, fonts and style of the picture.
  """
  from matplotlib.ticker import MaxNLocator

  x, count = recipe.x[0], len(recipe.y)
  is_beside = count > 1 and look.across(2.6) > 1
  height = 2.5 if is_beside else 1.6 * count + 1.2
  drawn = pictures.new_figure(look, height=height)
  high, wide = (1, count) if is_beside else (count, 1)
  handles: list[Any] = []
  for place, (y, axes) in enumerate(
    zip(recipe.y, drawn.subplots(high, wide, squeeze=False).flat)
  ):
    points = sorted((row[x], row[y]) for row in rows if is_number(row.get(y)))
    how: dict[str, Any] = {"color": look.color(place), "linewidth": 1.2}
    curve = recipe.curves.get(y)
    if curve:
      axes.plot(*zip(*curve), **how)
      how["linestyle"] = "none"
    elif y in recipe.stairs:
      how["drawstyle"] = "steps-pre"
    if points:
      axes.plot(
        *zip(*points), marker=pictures.marker(place), markersize=2.5,
        markevery=1 + len(points) // 30, **how,
      )  # fmt: skip
    handles = finish(axes, rows, y, recipe, look)
    named = is_beside or place == count - 1
    pictures.dress(
      axes, look=look, title=recipe.titles.get(y, ""), xlabel=words(recipe, x) if named else "",
      ylabel=words(recipe, y),
    )  # fmt: skip
    axes.title.set_fontsize(look.font_size - 0.5)
    if x not in recipe.log:
      axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
  pictures.headline(drawn, look, recipe.title, recipe.note)
  if recipe.references:
    pictures.key(drawn, look, handles)
  return drawn


def finish(
  axes: Axes, rows: Sequence[Mapping[str, Any]], y: str, recipe: Recipe, look: Look
) -> list[Any]:
  """Draws the references of a panel whose lines are drawn, and sets its scales. Returns what a
  legend names of the references."""
  handles = []
  for label, at, height in recipe.references:
    how: Any = {"color": "#000000", "linewidth": 0.9, "linestyle": "--", "label": label}
    line = axes.axvline(at, **how) if at is not None else axes.axhline(height or 0.0, **how)
    handles.append(line)
  if recipe.x[0] in recipe.log:
    axes.set_xscale("log")
  # If a loss diverges, the axis is logarithmic, so that the other losses remain visible.
  values = [row[y] for row in rows if is_number(row.get(y)) and row[y] > 0]
  is_wide = bool(values) and max(values) > 20 * statistics.median(values)
  wanted = y in recipe.log or (is_wide and not recipe.curves and y not in recipe.stairs)
  if wanted if look.log_y is None else look.log_y:
    axes.set_yscale("log")
  else:
    axes.ticklabel_format(axis="y", useOffset=False)
  if y in recipe.stairs:
    axes.set_ylim(bottom=0)
  return handles


def words(recipe: Recipe, column: str) -> str:
  """Returns what a picture calls a column."""
  return recipe.words.get(column) or pictures.in_words(column)
