"""Lines over x: in one panel, with a panel for each line if there are many, or in panels of a grid.

Lines of two neighbouring relations never share a panel, because their epsilons cannot be compared.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dpjax import pictures
from dpjax.accounting import upper
from dpjax.accounting.text import by_name
from dpjax.experiments.plots.panels import finish, of_run, words
from dpjax.experiments.plots.recipes import WHAT_EPSILON_MEANS, Recipe, is_number
from dpjax.pictures import PAGE, Look
from dpjax.validate import UserError

if TYPE_CHECKING:
  from matplotlib.artist import Artist
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

Row = dict[str, Any]
Reference = tuple[str, Any, Any]
_OURS = "this sweep"
# Largest number of lines of a picture whose lines share panels. With more lines, each has a panel.
_FEW = 4
# First words of the neighbouring relation that published epsilons are assumed to have.
_USUAL = "add or remove"
# Width and height of a panel in inches: _PANEL if there are many lines, _WHOLE if there are few.
_PANEL = (1.6, 1.7)
_WHOLE = (3.0, 2.5)
# Width and height of a panel of a grid.
_CELL = (1.9, 1.6)
# Line style by the kind of a row's epsilon.
_STYLES = {"proved": "-", "claimed": "--", "none": ":"}
# If a panel of a grid would have more lines than this, its private lines are split over several.
_MOST = 5


class Line(NamedTuple):
  """A line of the picture: the groups of one series with one relation or without a guarantee."""

  label: str
  relation: str  # in words; "": no group has a guarantee
  color: str
  marker: str
  dash: Any
  groups: list[Row]


class Axis(NamedTuple):
  """The column that is drawn as x, and how y is drawn."""

  x: str
  is_error: bool  # whether the error rate in per cent is drawn in place of the accuracy
  places: dict[float | None, float]  # positions of x values if one is infinite, else {}
  recipe: Recipe

  def height(self, value: float) -> float:
    """Returns the height at which a value of y is drawn."""
    return 100 * (1 - value) if self.is_error else value

  def column(self, value: float | None) -> Any:
    """Returns the horizontal position at which a value of x is drawn."""
    return self.places.get(value, value)


def lines(rows: Sequence[Row], recipe: Recipe, look: Look = PAGE) -> Figure:
  """Returns a picture of lines over x.

  - With `titles`, or several columns of y and neither series nor `panels`: the picture of a run
    (`panels.of_run`).
  - With one column of y and no `panels`: up to four lines share a panel for each neighbouring
    relation, with names at the ends of lines. With more lines, each has a panel, with the others of
    its relation in grey. Rows without x are horizontal lines.
  - Otherwise a grid: a column of panels for each value of `panels`, a row for each column of y.

  Args:
    rows: rows of the CSV file. Rows of one place that differ in no meaning of epsilon are averaged.
    recipe: what is drawn.
    look: sizes, fonts and style of the picture.
  """
  y = recipe.y[0]
  if recipe.together:
    rows = [row | {"line": name, "value": row[name]} for name in recipe.y for row in rows]
    stairs = ("value",) if recipe.stairs else ()
    its = {"y": ("value",), "series": "line", "stairs": stairs, "together": False}
    return _grid(rows, dataclasses.replace(recipe, **its), look)
  if recipe.titles or not (len(recipe.y) == 1 or recipe.series or recipe.panels):
    return of_run(rows, recipe, look)
  if len(recipe.y) > 1 or recipe.panels or recipe.stairs:
    return _grid(rows, recipe, look)
  groups = _groups(rows, recipe, y)
  references = list(recipe.references)
  x = recipe.x[0]
  axis = Axis(x, recipe.error and look.log_y is not False, places([
    *(group[x] for group in groups), *(at for _, at, _ in references)
  ]), recipe)  # fmt: skip
  all_lines = _lines(groups, axis, recipe.series, look)
  relations = list(dict.fromkeys(each.relation for each in all_lines if each.relation))
  relations = relations or [""]
  many = len(all_lines) > _FEW
  drawn = _curves(all_lines, relations, groups, axis, references, look, many=many)
  meaning = _meaning(groups, relations, many=many)
  note = ". ".join(filter(None, (recipe.note or _note(groups, recipe), meaning)))
  pictures.headline(drawn, look, recipe.title, note)
  if not many:
    for axes, panel in zip(drawn.axes, _panels(all_lines, relations, many=many)):
      _name_ends(axes, panel, axis, look)
  return drawn


def _groups(rows: Sequence[Row], recipe: Recipe, y: str) -> list[Row]:
  """Returns a row for each series and x: "mean", "low" and "high" of y, and "seeds".

  Rows without a finite x or y are left out, but for those of `ends`, which hold means already.
  """
  x = recipe.x[0]
  if recipe.ends:
    low, high = recipe.ends
    if any(row[y] is None for row in rows):
      raise ValueError("an empty cell")
    return [row | {"mean": row[y], "low": row[low], "high": row[high]} for row in rows]
  kept: dict[tuple[Any, ...], list[Row]] = {}
  for row in rows:
    meaning = tuple(row.get(key) for key in WHAT_EPSILON_MEANS)
    series = row[recipe.series] if recipe.series else ""
    if is_number(row[x]) and is_number(row[y]):
      kept.setdefault((series, row[x], meaning), []).append(row)
  if not kept:
    raise UserError("no row holds a finite number in both", field="x, y", value=(x, y))
  groups = [_group(alike, y) for alike in kept.values()]
  return sorted(groups, key=lambda group: group[x])


def _group(alike: list[Row], y: str) -> Row:
  values = [row[y] for row in alike]
  meant = all(alike[0].get(key) is not None for key in WHAT_EPSILON_MEANS)
  facts: Row = {} if meant else {"epsilon_kind": None}
  ends = {"mean": statistics.mean(values), "low": min(values), "high": max(values)}
  return {**alike[0], **facts, **ends, "seeds": len(alike), "not_finite": 0}


# --- a grid of panels


def _grid(rows: Sequence[Row], recipe: Recipe, look: Look) -> Figure:
  """Returns a picture with a column of panels for each value of `panels`."""
  from matplotlib.ticker import MaxNLocator

  cells = _cells(rows, recipe)
  names = list(dict.fromkeys(_name(row, recipe) for row in rows))
  # If there are more lines than colours, each panel has colours and a legend of its own.
  shared = len(names) < len(pictures.PALETTE)
  wide = min(len(cells), look.across(_CELL[0]))
  blocks = -(-len(cells) // wide)
  high = len(recipe.y)
  one_row = high > 1 and len(cells) == 1 and look.across(2.6) > 1
  if one_row:
    wide, high, blocks = len(recipe.y), 1, 1
  height = 2.5 if one_row else (_CELL[1] * high + (not shared)) * blocks + 1.2
  drawn = pictures.new_figure(look, height=height)
  grid = drawn.subplots(high * blocks, wide, squeeze=False)
  for axes in grid.flat:
    axes.set_axis_off()
  handles: dict[str, Any] = {}
  for index, (heading, mine) in enumerate(cells):
    for place, y in enumerate(recipe.y):
      block, column = divmod(index, wide)
      axes = grid[0, place] if one_row else grid[block * high + place, column]
      axes.set_axis_on()
      its_names = names if shared else list(dict.fromkeys(_name(r, recipe) for r in mine))
      its_lines = _draw_cell(axes, mine, its_names, y, recipe, look)
      handles |= {str(line.get_label()): line for line in its_lines}
      if not shared and place == high - 1:
        axes.legend(
          handles=its_lines, loc="upper left", bbox_to_anchor=(0, -0.35), frameon=False,
          fontsize=look.font_size - 1, handlelength=1.6, borderaxespad=0.0, labelspacing=0.25,
        )  # fmt: skip
      top = one_row or place == 0
      below = one_row or place == high - 1
      pictures.dress(
        axes, look=look, title=heading if top else "",
        xlabel=words(recipe, recipe.x[0]) if below else "",
        ylabel="" if column else words(recipe, y),
      )  # fmt: skip
      axes.title.set_fontsize(look.font_size - 0.5)
      if recipe.x[0] not in recipe.log:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
  kinds = {row.get("epsilon_kind") for row in rows}
  note = "solid: proved, dashed: claimed (no guarantee), dotted: not private"
  told = note if kinds & {"claimed", "none"} and None not in kinds else ""
  pictures.headline(drawn, look, recipe.title, recipe.note or told)
  if shared and (recipe.series or recipe.references):
    pictures.key(drawn, look, list(handles.values()))
  return drawn


def _cells(rows: Sequence[Row], recipe: Recipe) -> list[tuple[str, list[Row]]]:
  """Returns (heading, rows) of each column of panels.

  Lines without privacy have no neighbouring relation: they stand in every panel that is otherwise
  theirs. A panel with too many lines becomes several.
  """
  place_of = lambda row: tuple(row.get(name) or None for name in recipe.panels)
  fits = lambda free, place: all(a in (None, b) for a, b in zip(place_of(free), place))
  private = [row for row in rows if row.get("epsilon_kind") != "none"]
  free = [row for row in rows if row.get("epsilon_kind") == "none"]
  cells = []
  for place in dict.fromkeys(map(place_of, private or free)):
    mine = [row for row in private if place_of(row) == place]
    others = [row for row in free if fits(row, place)]
    shown = zip(recipe.panels, place)
    unit = str((mine or others)[0].get("unit") or "example")
    words = [_value(recipe, *each, unit) for each in shown if each[1] is not None]
    names = list(dict.fromkeys(_name(row, recipe) for row in mine))
    share = max(1, _MOST - len({_name(row, recipe) for row in others}))
    parts = -(-len(names) // share) or 1
    # Lines are split into parts of nearly equal size, so that no panel gets one leftover line.
    for part in range(parts):
      kept = names[part * len(names) // parts : (part + 1) * len(names) // parts]
      of_part = [row for row in mine if _name(row, recipe) in kept]
      cells.append(("\n".join(words), [*of_part, *others]))
  return cells


def _value(recipe: Recipe, column: str, value: Any, unit: str) -> str:
  if isinstance(value, float):
    return f"{recipe.words.get(column) or column} = {by_name(column, value)}"
  text = recipe.words.get(str(value)) or pictures.relation_in_words(str(value), unit)
  return pictures.proper_name(text)


def _draw_cell(
  axes: Axes, rows: list[Row], names: list[str], y: str, recipe: Recipe, look: Look
) -> list[Any]:
  """Draws the lines of a panel, and returns those that a legend names."""
  x = recipe.x[0]
  handles = []
  for name in dict.fromkeys(_name(row, recipe) for row in rows):
    mine = [row for row in rows if _name(row, recipe) == name and is_number(row[y])]
    if not mine:
      continue
    groups = _groups(mine, recipe, y)
    kind = str(mine[0].get("epsilon_kind"))
    index = names.index(name)
    # Black stands for no privacy in every panel.
    color = look.color(len(pictures.PALETTE) - 1 if kind == "none" else index)
    steps: Any = {"drawstyle": "steps-pre"} if y in recipe.stairs else {}
    at = [group[x] for group in groups]
    (line,) = axes.plot(
      at, [group["mean"] for group in groups], label=name, color=color, linewidth=1.2,
      linestyle=_STYLES.get(kind, "-"), marker=pictures.marker(index), markersize=2.5,
      markevery=max(1, len(groups) // 4), **steps,
    )  # fmt: skip
    if any(group["seeds"] > 1 for group in groups):
      low, high = ([group[end] for group in groups] for end in ("low", "high"))
      axes.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
    handles.append(line)
  return handles + finish(axes, rows, y, recipe, look)


def _name(row: Row, recipe: Recipe) -> str:
  """Returns the name of a row's line."""
  if not recipe.series:
    return ""
  value = row[recipe.series]
  text = by_name(recipe.series, value) if isinstance(value, float) else str(value)
  return recipe.words.get(text) or pictures.proper_name(text)


# --- lines of one score


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
  references: list[Reference],
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


def _lines(groups: Sequence[Row], axis: Axis, series: str | None, look: Look) -> list[Line]:
  """Returns a line for each series and each neighbouring relation of its runs."""
  text_of = lambda group: _line_text(group[series], axis.recipe) if series else ""
  labels = list(dict.fromkeys(map(text_of, groups)))
  lines = []
  base = ""
  for index, label in enumerate(labels):
    mine = [group for group in groups if text_of(group) == label]
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


def _line_text(value: Any, recipe: Recipe) -> str:
  text = f"{value:g}" if isinstance(value, float) else str(value or "")
  return recipe.words.get(text, text)


def _relation(group: Row) -> str:
  """Returns the neighbouring relation of a group in words; "" without a guarantee."""
  if group.get("epsilon_kind") in (None, "none"):
    return ""
  names = str(group["neighboring_relation"]).split(" / ")
  unit = str(group["unit"])
  return " / ".join(pictures.relation_in_words(name, unit) for name in names)


def _points(line: Line, axis: Axis) -> list[Row]:
  """Returns the groups of a line that have an x value and a finite mean."""
  return [g for g in line.groups if g[axis.x] is not None and is_number(g["mean"])]


def _levels(line: Line, axis: Axis) -> list[float]:
  """Returns the heights of a line's groups that have no x value: they guarantee no epsilon."""
  flat = [g for g in line.groups if g[axis.x] is None and is_number(g["mean"])]
  return [axis.height(group["mean"]) for group in flat]


def _panel(
  axes: Axes,
  lines: list[Line],
  behind: list[Line],
  axis: Axis,
  references: list[Reference],
  look: Look,
) -> None:
  for line in behind:
    points = _points(line, axis)
    axes.plot(
      [axis.column(group[axis.x]) for group in points],
      [axis.height(group["mean"]) for group in points],
      color=pictures.CONTEXT_COLOR,
      linewidth=0.8,
      zorder=1,
    )
  for line in lines:
    points = _points(line, axis)
    if points:
      ends = [
        [axis.height(group[end]) for group in points] for end in ("low", "mean", "high")
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


def _is_public(axis: Axis, at: float | None) -> bool:
  """Returns whether a reference is a line across the axes: one that saw no private data has an
  epsilon of 0, which a logarithmic axis lacks."""
  return at is None or (at == 0 and axis.x in axis.recipe.log)


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
  ylabel = "test error (%)" if axis.is_error else words(axis.recipe, axis.recipe.y[0])
  xlabel = words(axis.recipe, axis.x)
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


def _note(groups: Sequence[Row], recipe: Recipe) -> str:
  """Returns the note on what points and bars show, and on how many runs are not drawn."""
  sizes = sorted({int(group["seeds"]) for group in groups})
  counts = " to ".join(map(str, dict.fromkeys(sizes[:1] + sizes[-1:]))) or "0"
  repeats = "seeds" if recipe.ends else "rows"
  note = f"mean of {counts} {repeats}; bars: min to max"
  if sizes == [1]:
    note = "one seed each" if recipe.ends else ""
  lost = sum(int(group.get("not_finite") or 0) for group in groups)
  return note + (f"; not drawn: {lost} that ended without a finite number" if lost else "")


def _scale(
  axes: Axes,
  axis: Axis,
  groups: Sequence[Row],
  references: list[Reference],
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
  wanted = axis.x in axis.recipe.log if look.log_x is None else look.log_x
  if wanted and ticks:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: by_name(axis.x, value)))
    axes.xaxis.set_minor_locator(NullLocator())


def _handles(
  lines: list[Line],
  axis: Axis,
  references: list[Reference],
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
    if _is_public(axis, at):
      how = {"linestyle": ":", "linewidth": 1.1}
      name = f"{label} ({value:g})"
    else:
      name = f"{label} ({by_name(axis.x, at)}: {value:g})"
    # Several points of one paper share a marker, and their values are read off the axes.
    name = name if len(places) == 1 else label
    handles.append(pictures.sample(name, look, color=pictures.REFERENCE_COLOR, **how))
  return handles


def _name_ends(axes: Axes, lines: list[Line], axis: Axis, look: Look) -> None:
  """Writes the name of each line of a panel at the end of the line. Lines without a label get no
  name."""
  ends = []
  for line in lines:
    points = _points(line, axis)
    last = max(points, key=lambda group: axis.column(group[axis.x]), default=None)
    heights = [axis.height(last["mean"])] if last else _levels(line, axis)
    ends += [(line.label, heights[0], line.color)] if heights and line.label else []
  if ends:
    # Names get a third of the panel's width, so that the lines keep most of it.
    width = axes.get_window_extent().width / axes.figure.dpi
    characters = max(10, int(width / 3 / pictures.letter(look.font_size)))
    pictures.label_ends(axes, look, ends, characters=characters)
