"""The picture of a sweep: lines over x, with a panel for each line if there are many lines.

Lines of two neighbouring relations never share a panel, because their epsilons cannot be compared.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dpjax import pictures
from dpjax.accounting import upper
from dpjax.accounting.text import by_name
from dpjax.pictures import PAGE, Look

if TYPE_CHECKING:
  from matplotlib.artist import Artist
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

Row = dict[str, Any]
_OURS = "this sweep"
# Largest number of lines of a picture whose lines share panels. With more lines, each has a panel.
_FEW = 4
# First words of the neighbouring relation that published epsilons are assumed to have.
_USUAL = "add or remove"
# Width and height of a panel in inches: _PANEL if there are many lines, _WHOLE if there are few.
_PANEL = (1.6, 1.7)
_WHOLE = (3.0, 2.5)
# Error rates are drawn in place of accuracies, on a logarithmic axis, under two conditions. The
# best accuracy is in [_CROWDED, 1). The largest error is at least _RANGE times the smallest.
_CROWDED = 0.9
_RANGE = 2.0
# An axis of epsilon is logarithmic. Any other x axis is logarithmic if all x are positive, and the
# largest x is at least this many times the smallest x.
_WIDE = 50


class Line(NamedTuple):
  """A line of the picture: the groups of one series with one relation or without a guarantee."""

  label: str
  relation: str  # in words; "": no group has a guarantee
  color: str
  marker: str
  dash: Any
  groups: list[Row]


class Axis(NamedTuple):
  """The columns that are drawn as x and y, and how they are drawn."""

  x: str
  y: str
  is_error: bool  # whether the error rate in per cent is drawn in place of the accuracy
  places: dict[float | None, float]  # positions of x values if one is infinite, else {}

  def height(self, value: float) -> float:
    """Returns the height at which a value of y is drawn."""
    return 100 * (1 - value) if self.is_error else value

  def column(self, value: float | None) -> Any:
    """Returns the horizontal position at which a value of x is drawn."""
    return self.places.get(value, value)


def figure(
  groups: Sequence[Row],
  *,
  x: str,
  y: str,
  series: str | None = None,
  references: Iterable[tuple[str, float, float]] = (),
  title: str = "",
  repeats: str = "seeds",
  look: Look = PAGE,
) -> Figure:
  """Returns the picture of the groups that `curve.summarize` makes, or that curve.csv holds.

  - With up to four lines in all, there is a panel for each neighbouring relation, with names at the
    ends of lines. With more lines, each has a panel, with the others of its relation in grey.
  - If the best accuracy is close to 1, error rates are drawn, on a logarithmic axis.
  - If every series has only one point, and all points have the same x, each point has a row.

  Args:
    groups: one row for each (series, x).
    x: name of the column of x.
    y: name of the score, whose columns are NAME_mean, NAME_min and NAME_max.
    series: name of the column that tells lines apart; None: there is one line.
    references: (label, x, y) of published results. A reference at epsilon 0 is a horizontal line.
    title: title of the picture.
    repeats: word for the runs whose mean a point shows.
    look: sizes, fonts and style of the picture.
  """
  references = list(references)
  axis = Axis(x, y, _is_crowded(groups, y, look), places([
    *(group[x] for group in groups), *(at for _, at, _ in references)
  ]))  # fmt: skip
  lines = _lines(groups, axis, series, look)
  alone = [len(line.groups) for line in lines] == [1] * len(lines)
  same_place = len({group[x] for group in groups}) == 1
  relations = list(dict.fromkeys(line.relation for line in lines if line.relation)) or [""]
  is_table = alone and same_place and len(lines) > 1
  many = len(lines) > _FEW and not is_table
  if is_table:
    drawn = _dots(lines, axis, references, look)
  else:
    drawn = _curves(lines, relations, groups, axis, references, look, many=many)
  meaning = _meaning(groups, relations, many=many)
  if is_table and meaning:
    meaning = meaning.replace("epsilon", f"epsilon {by_name(x, groups[0][x])}", 1)
  note = ". ".join(filter(None, (_note(groups, repeats), meaning)))
  pictures.headline(drawn, look, title, note)
  if not many and not is_table:
    for axes, panel in zip(drawn.axes, _panels(lines, relations, many=many)):
      _name_ends(axes, panel, axis, look)
  return drawn


def _panels(lines: list[Line], relations: list[str], *, many: bool) -> list[list[Line]]:
  """Returns the lines of each panel. Panels of the same relation follow each other."""
  if not many:
    return [
      [line for line in lines if line.relation in ("", relation)] for relation in relations
    ]
  ordered = sorted(lines, key=lambda line: relations.index(line.relation or relations[0]))
  return [[line] for line in ordered]


def _curves(
  lines: list[Line],
  relations: list[str],
  groups: Sequence[Row],
  axis: Axis,
  references: list[tuple[str, float, float]],
  look: Look,
  *,
  many: bool,
) -> Figure:
  """Returns a picture of lines. With `many`, each line has a panel; otherwise all lines of a
  relation share a panel."""
  panels = _panels(lines, relations, many=many)
  small, high = _PANEL if many else _WHOLE
  wide = min(look.across(small), len(panels))
  rows = -(-len(panels) // wide)
  drawn = pictures.new_figure(look, height=high * rows + 1.0)
  grid = drawn.subplots(rows, wide, squeeze=False, sharex=True, sharey=True)
  flat = list(grid.flat)
  for index, (axes, panel) in enumerate(zip(flat, panels)):
    mine = next((line.relation for line in panel if line.relation), "")
    alike = [line for line in lines if line.relation in ("", mine)]
    behind = [line for line in alike if line not in panel] if many else []
    # Published epsilons are assumed to have the usual relation. If there are several relations,
    # only panels of the usual relation show published epsilons.
    usual = len(relations) == 1 or mine.startswith(_USUAL)
    beside = [entry for entry in references if usual or _is_public(axis, entry[1])]
    _panel(axes, panel, behind, axis, beside, look)
    # With many panels, the note names the first relation, so only panels of other relations name
    # their relation.
    is_named = len(relations) > 1 and not (many and mine in ("", relations[0]))
    _dress(axes, panel, axis, look, name=many, relation=mine if is_named else "")
    # Panels share their axes: only the lowest row names x, and only the first column names y.
    below = index + wide >= len(panels)
    axes.tick_params(labelbottom=below)
    axes.set_ylabel(axes.get_ylabel() if index % wide == 0 else "")
    axes.set_xlabel(axes.get_xlabel() if index // wide == rows - 1 else "")
  for axes in flat[len(panels) :]:
    axes.set_axis_off()
  _scale(flat[0], axis, groups, references, look)
  pictures.key(drawn, look, _handles(lines, axis, references, look, many=many))
  return drawn


def places(values: Sequence[float | None]) -> dict[float | None, float]:
  """Returns the positions 0, 1, 2, ... of the sorted x values, if one value is infinite.

  If all values are finite, it returns {}: each value is then drawn at its place on an axis.

  >>> places([0.1, math.inf, 0.5]), places([0.1, 0.5])
  ({0.1: 0.0, 0.5: 1.0, inf: 2.0}, {})
  """
  ordered = sorted({value for value in values if value is not None})
  if not ordered or not math.isinf(ordered[-1]):
    return {}
  return {value: float(place) for place, value in enumerate(ordered)}


def _is_crowded(groups: Sequence[Row], y: str, look: Look) -> bool:
  """Returns whether accuracies are so close to 1 that error rates are drawn in their place."""
  values = [group[f"{y}_{end}"] for group in groups for end in ("min", "mean", "max")]
  values = [value for value in values if math.isfinite(value)]
  if not y.endswith("accuracy") or look.log_y is False or not values:
    return False
  low = min(values)
  high = max(values)
  return _CROWDED <= high < 1 and (1 - low) / (1 - high) >= _RANGE


def _lines(groups: Sequence[Row], axis: Axis, series: str | None, look: Look) -> list[Line]:
  """Returns a line for each series and each neighbouring relation of its runs."""
  labels = list(dict.fromkeys(str(group[series]) if series else "" for group in groups))
  lines = []
  base = ""
  for index, label in enumerate(labels):
    mine = [group for group in groups if not series or str(group[series]) == label]
    # In a label such as "the same, DP-FTRL", "the same" is replaced by the last full label.
    again = label.startswith("the same,")
    base = base if again else label
    name = label.replace("the same", base, 1) if again and base else label
    relations = {_relation(group): None for group in mine if group[axis.x] is not None}
    private = [relation for relation in relations if relation] or [""]
    for relation in private:
      kept = [group for group in mine if _relation(group) in ("", relation)]
      lines.append(
        Line(
          name, relation, look.color(index), pictures.marker(index), look.dash(index), kept
        )
      )
  return lines


def _relation(group: Row) -> str:
  """Returns the neighbouring relation of a group in words; "" without a guarantee."""
  if group.get("epsilon_kind") in (None, "none"):
    return ""
  names = str(group["neighboring_relation"]).split(" / ")
  unit = str(group["unit"])
  return " / ".join(pictures.relation_in_words(name, unit) for name in names)


def _points(line: Line, axis: Axis) -> list[Row]:
  """Returns the groups of a line that have an x value and a finite mean."""
  mean = f"{axis.y}_mean"
  return [g for g in line.groups if g[axis.x] is not None and math.isfinite(g[mean])]


def _levels(line: Line, axis: Axis) -> list[float]:
  """Returns the heights of a line's groups that have no x value: they guarantee no epsilon."""
  mean = f"{axis.y}_mean"
  flat = [g for g in line.groups if g[axis.x] is None and math.isfinite(g[mean])]
  return [axis.height(group[mean]) for group in flat]


def _panel(
  axes: Axes,
  lines: list[Line],
  behind: list[Line],
  axis: Axis,
  references: list[tuple[str, float, float]],
  look: Look,
) -> None:
  for line in behind:
    points = _points(line, axis)
    axes.plot(
      [axis.column(group[axis.x]) for group in points],
      [axis.height(group[f"{axis.y}_mean"]) for group in points],
      color=pictures.CONTEXT_COLOR,
      linewidth=0.8,
      zorder=1,
    )
  for line in lines:
    points = _points(line, axis)
    if points:
      ends = [
        [axis.height(group[f"{axis.y}_{end}"]) for group in points]
        for end in ("min", "mean", "max")
      ]
      mean = ends[1]
      # The ends of a bar are sorted, because the largest accuracy is the smallest error.
      low = [value - min(pair) for value, pair in zip(mean, zip(*ends))]
      high = [max(pair) - value for value, pair in zip(mean, zip(*ends))]
      bars = [low, high] if any(group["seeds"] > 1 for group in points) else None
      axes.errorbar(
        [axis.column(group[axis.x]) for group in points], mean, yerr=bars,
        color=line.color, marker=line.marker, linestyle=line.dash, markersize=3.2,
        linewidth=1.2, capsize=1.8, elinewidth=0.8, label=line.label or _OURS, zorder=3,
      )  # fmt: skip
    for level in _levels(line, axis):
      # A run without a guarantee has no place on the axis of epsilon, only a height.
      name = f"{line.label}, {pictures.WITHOUT_PRIVACY}" if line.label else ""
      name = name or pictures.WITHOUT_PRIVACY
      axes.axhline(level, color=line.color, linestyle="--", linewidth=0.9, label=name)
  names = list(dict.fromkeys(label for label, _, _ in references))
  for label, at, value in references:
    if _is_public(axis, at):
      axes.axhline(
        axis.height(value), color=pictures.REFERENCE_COLOR, linestyle=":", linewidth=1.1
      )
    else:
      axes.plot(
        [axis.column(at)], [axis.height(value)], linestyle="none", markersize=5,
        marker=_reference_marker(names.index(label)),
        color=pictures.REFERENCE_COLOR, zorder=2,
      )  # fmt: skip


def _reference_marker(index: int) -> str:
  """Returns the marker of a published result, which no line of the sweep has."""
  return pictures.REFERENCE_MARKERS[index % len(pictures.REFERENCE_MARKERS)]


def _is_public(axis: Axis, at: float) -> bool:
  """Returns whether a reference saw no private data: its epsilon is 0, which a log axis lacks."""
  return at == 0 and axis.x.endswith("epsilon")


def _dress(
  axes: Axes, lines: list[Line], axis: Axis, look: Look, *, name: bool, relation: str
) -> None:
  """Sets the axis labels of a panel, and its title: the name of its line (with `name`), and
  `relation` if that is not ""."""
  characters = int((_PANEL[0] - 0.25) / pictures.letter(look.font_size - 0.5))
  heading = [lines[0].label or _OURS] if name else []
  heading += [relation] * bool(relation)
  if name:
    heading = [textwrap.fill(text, characters, break_on_hyphens=False) for text in heading]
  ylabel = "test error (%)" if axis.is_error else pictures.in_words(axis.y)
  xlabel = pictures.in_words(axis.x)
  pictures.dress(axes, look, title="\n".join(heading), xlabel=xlabel, ylabel=ylabel)
  if name:
    axes.set_title("\n".join(heading), loc="left", fontsize=look.font_size - 0.5)


def _meaning(groups: Sequence[Row], relations: list[str], *, many: bool) -> str:
  """Returns the note on what epsilon means: its kind, delta and neighbouring relation.

  The note is "" if no group states an epsilon.
  """
  private = [group for group in groups if group.get("epsilon_kind") not in (None, "none")]
  if not private:
    return ""
  kinds = " / ".join(dict.fromkeys(str(group["epsilon_kind"]) for group in private))
  deltas = dict.fromkeys(group["delta"] for group in private)
  # A delta is text if the runs of a point have different deltas.
  shown = [upper(value) if isinstance(value, float) else str(value) for value in deltas]
  meaning = f"epsilon: {kinds}, delta = {' / '.join(shown)}"
  if len(relations) == 1:
    return f"{meaning}, {relations[0]}"
  # With few panels, each panel names its relation, so the note names none.
  return f"{meaning}, {relations[0]} where a panel names no other" if many else meaning


def _note(groups: Sequence[Row], repeats: str) -> str:
  """Returns the note on what points and bars show, and on how many runs are not drawn."""
  sizes = sorted({int(group["seeds"]) for group in groups})
  counts = " to ".join(map(str, dict.fromkeys(sizes[:1] + sizes[-1:]))) or "0"
  note = f"mean of {counts} {repeats}; bars: min to max"
  if sizes == [1]:
    note = "one seed each" if repeats == "seeds" else ""
  lost = sum(int(group.get("not_finite") or 0) for group in groups)
  return note + (f"; not drawn: {lost} that ended without a finite number" if lost else "")


def _scale(
  axes: Axes,
  axis: Axis,
  groups: Sequence[Row],
  references: list[tuple[str, float, float]],
  look: Look,
) -> None:
  """Sets the scales and ticks, which all panels share."""
  from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

  if axis.is_error or look.log_y:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # An axis that spans at most a factor of 6 needs more ticks, so that heights can be read.
    few = (1.0, 2.0, 5.0)
    subs = few if high > 6 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
  if axis.places:
    names = [by_name(axis.x, at) if at is not None else "" for at in axis.places]
    axes.set_xticks(list(axis.places.values()), names)
    return
  # Ticks stand at values that were run, not at powers of ten without a run.
  ticks = sorted({at for group in groups if (at := group[axis.x]) is not None and at > 0})
  ticks = ticks or sorted({at for _, at, _ in references if at > 0})
  # On a linear axis that spans a large factor, most values would be drawn at nearly one place.
  is_wide = bool(ticks) and ticks[-1] >= _WIDE * ticks[0]
  is_positive = all(group[axis.x] is None or group[axis.x] > 0 for group in groups)
  wanted = axis.x.endswith("epsilon") or (is_wide and is_positive)
  wanted = wanted if look.log_x is None else look.log_x
  if wanted and ticks:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: by_name(axis.x, value)))
    axes.xaxis.set_minor_locator(NullLocator())


def _handles(
  lines: list[Line],
  axis: Axis,
  references: list[tuple[str, float, float]],
  look: Look,
  *,
  many: bool,
) -> list[Artist]:
  """Returns the entries of the legend: each kind of line or marker that no panel names."""
  handles: list[Artist] = []
  if any(_levels(line, axis) for line in lines):
    dashes = {"color": "#000000", "linestyle": "--", "linewidth": 0.9}
    handles.append(pictures.sample(pictures.WITHOUT_PRIVACY, look, **dashes))
  if many:
    grey = {"color": pictures.CONTEXT_COLOR, "linewidth": 0.9}
    handles.append(pictures.sample("the other panels' lines", look, **grey))
  points: dict[str, list[tuple[float, float]]] = {}
  for label, at, value in references:
    points.setdefault(label, []).append((at, value))
  for index, (label, places) in enumerate(points.items()):
    at, value = places[0]
    how: dict[str, Any] = {"linestyle": "none", "marker": _reference_marker(index)}
    name = f"{label} ({by_name(axis.x, at)}: {value:g})"
    if _is_public(axis, at):
      how = {"linestyle": ":", "linewidth": 1.1}
      name = f"{label} ({value:g})"
    # Several points of one paper share a marker, and their values are read off the axes.
    name = name if len(places) == 1 else label
    handles.append(pictures.sample(name, look, color=pictures.REFERENCE_COLOR, **how))
  return handles


def _name_ends(axes: Axes, lines: list[Line], axis: Axis, look: Look) -> None:
  """Writes the name of each line of a panel at the end of the line. Lines without a label get no
  name."""
  ends = []
  if all(len(_points(line, axis)) == 1 for line in lines) and len(lines) > 1:
    # A line of one point has no end, so its name is written beside the point.
    for line in lines:
      (group,) = _points(line, axis)
      axes.annotate(
        line.label, (axis.column(group[axis.x]), axis.height(group[f"{axis.y}_mean"])),
        xytext=(5, 0), textcoords="offset points", va="center", color=line.color,
        fontsize=look.font_size - 0.5,
      )  # fmt: skip
    return
  for line in lines:
    points = _points(line, axis)
    last = max(points, key=lambda group: axis.column(group[axis.x]), default=None)
    heights = [axis.height(last[f"{axis.y}_mean"])] if last else _levels(line, axis)
    ends += [(line.label, heights[0], line.color)] if heights and line.label else []
  if ends:
    # Names get a third of the panel's width, so that the lines keep most of it.
    width = axes.get_window_extent().width / axes.figure.dpi
    characters = max(10, int(width / 3 / pictures.letter(look.font_size)))
    pictures.label_ends(axes, look, ends, characters=characters)


def _dots(
  lines: list[Line],
  axis: Axis,
  references: list[tuple[str, float, float]],
  look: Look,
) -> Figure:
  """Returns a picture of lines that have one point each. Each line has a row, and each relation has
  a panel."""
  relations = list(dict.fromkeys(line.relation for line in lines))
  height = 1.1 + (look.font_size * 1.7 / 72) * len(lines) + 0.3 * len(relations)
  drawn = pictures.new_figure(look, height=height)
  counts = [sum(line.relation == relation for line in lines) for relation in relations]
  grid = drawn.subplots(
    len(relations), 1, squeeze=False, sharex=True, height_ratios=counts
  )[:, 0]
  for axes, relation in zip(grid, relations):
    mine = [line for line in lines if line.relation == relation]
    for place, line in enumerate(mine):
      (group,) = line.groups
      ends = [axis.height(group[f"{axis.y}_{end}"]) for end in ("min", "max")]
      axes.plot(ends, [place, place], color=look.color(0), linewidth=1.2)
      axes.plot(
        axis.height(group[f"{axis.y}_mean"]), place, marker="o", markersize=3.5,
        color=look.color(0),
      )  # fmt: skip
    for index, (_, _, value) in enumerate(references):
      axes.axvline(
        axis.height(value), color=pictures.REFERENCE_COLOR, linewidth=0.9,
        linestyle=(0, (1 + index, 1.5)),
      )  # fmt: skip
    # If there is only one relation, the note above the panels names it.
    words = (relation or pictures.WITHOUT_PRIVACY) if len(relations) > 1 else ""
    ylabel = "test error (%)" if axis.is_error else pictures.in_words(axis.y)
    pictures.dress(axes, look, title=words, xlabel=ylabel)
    axes.set_yticks(range(len(mine)), [line.label or _OURS for line in mine])
    axes.set_ylim(len(mine) - 0.4, -0.6)
  for axes in grid[:-1]:
    axes.set_xlabel("")
  pictures.key(drawn, look, [
    pictures.sample(
      f"{label} ({value:g})", look, color=pictures.REFERENCE_COLOR, linestyle=(0, (1 + index, 1.5))
    )
    for index, (label, _, value) in enumerate(references)
  ])  # fmt: skip
  return drawn
