"""Lines over x, in panels that share names and colours.

Epsilons of two neighbouring relations cannot be compared, so their lines never share a panel. Where
more lines would hide each other, they get panels of their own, with the others in grey behind them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dpjax import pictures
from dpjax.accounting import upper
from dpjax.accounting.text import by_name
from dpjax.experiments.plots.recipes import WHAT_EPSILON_MEANS, Recipe, is_number
from dpjax.pictures import PAGE, Look
from dpjax.validate import UserError

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

Row = dict[str, Any]
# Largest number of lines of a panel. Without `panels` more lines have a panel each; with `panels`
# they are dealt to several.
_FEW = 4
_MOST = 5
# Neighbouring relation that published epsilons are assumed to have.
_USUAL = "add_or_remove_one"
# Width and height of a panel in inches: of one or two panels, and of more.
_LARGE = (3.0, 2.5)
_SMALL = (1.6, 1.7)
# Line style by the kind of a row's epsilon, where kinds differ; and what the note calls it.
_STYLES = {"proved": "-", "claimed": "--", "none": ":"}
_KINDS = {
  "proved": "solid: proved",
  "claimed": "dashed: claimed (no guarantee)",
  "none": "dotted: not private",
}
# Largest number of places on x at which the spread of a line's points is drawn as bars; more bars
# hide each other.
_BARS = 7
# Largest number of x values that are all ticks of a logarithmic axis.
_TICKS = 12


class Group(NamedTuple):
  """A point of a line: rows of one place that differ in no meaning of epsilon."""

  row: Row  # the first of them
  name: str  # of the line
  x: float | None  # None: runs without a guarantee have no place on an axis of epsilon
  mean: float
  low: float
  high: float
  seeds: int = 1
  not_finite: int = 0  # runs that ended without a finite number, which the mean leaves out

  @property
  def kind(self) -> str | None:
    """Returns what the epsilon is, "none" for a run that is not private; None: nobody says."""
    return self.row.get("epsilon_kind")


class Panel(NamedTuple):
  """A panel: its lines, and those of the same place that have panels of their own."""

  heading: str
  place: dict[str, Any]  # column -> value of its rows
  names: tuple[str, ...]
  behind: tuple[str, ...]  # drawn in grey

  @property
  def relation(self) -> str | None:
    """Returns the neighbouring relation of its lines; None: any."""
    return self.place.get("neighboring_relation")

  def take(self, groups: Sequence[Group], name: str) -> list[Group]:
    """Returns the groups of a line that are drawn here. What is not private has no neighbouring
    relation, and fits everywhere."""
    return [
      group
      for group in groups
      if group.name == name
      and is_number(group.mean)
      and all(_fits(group, column, value) for column, value in self.place.items())
    ]


class Drawing(NamedTuple):
  """What all panels share."""

  recipe: Recipe
  look: Look
  is_error: bool  # whether the error rate in per cent is drawn in place of the accuracy
  places: dict[float | None, float]  # positions of x values if one is infinite, else {}
  colors: dict[str, int]  # name of a line -> number of its colour and marker
  by_kind: bool  # whether the style of a line says what its epsilon is
  one_each: bool  # whether each line has a panel, with its name above
  bands: bool  # whether the spread of points is drawn as bands, not as bars

  def height(self, value: float) -> float:
    """Returns the height at which a value of y is drawn."""
    return 100 * (1 - value) if self.is_error else value

  def column(self, value: float | None) -> Any:
    """Returns the horizontal position at which a value of x is drawn."""
    return self.places.get(value, value)

  def in_order(self, groups: Sequence[Group]) -> list[Group]:
    """Returns the groups that have a place on the axis of x, from left to right."""
    placed = [group for group in groups if group.x is not None]
    return sorted(placed, key=lambda group: self.column(group.x))

  def is_across(self, at: float | None) -> bool:
    """Returns whether a reference is a line across the axes: one that saw no private data has an
    epsilon of 0, which a logarithmic axis lacks."""
    return at is None or (at == 0 and self.recipe.x[0] in self.recipe.log)


def lines(rows: Sequence[Row], recipe: Recipe, look: Look = PAGE) -> Figure:
  """Returns a picture of lines over x. It has a column of panels for each value of `panels`, or for
  each neighbouring relation, and a row for each column of y. Rows without x are horizontal lines.

  Args:
    rows: rows of the CSV file. Rows of one place that differ in no meaning of epsilon are averaged.
    recipe: what is drawn.
    look: sizes, fonts and style of the picture.
  """
  if recipe.together:
    rows = [row | {"line": name, "value": row[name]} for name in recipe.y for row in rows]
    stairs = ("value",) if recipe.stairs else ()
    its = {"y": ("value",), "series": "line", "stairs": stairs, "together": False}
    recipe = dataclasses.replace(recipe, **its)
  of_column = {y: _groups(rows, recipe, y) for y in recipe.y}
  groups = list(itertools.chain(*of_column.values()))
  if not groups and not recipe.ends:
    value = (recipe.x[0], recipe.y[0])
    raise UserError("no row holds a finite number in both", field="x, y", value=value)
  drawing = _drawing(groups, recipe, look)
  panels = _panels(groups, drawing)
  count = len(recipe.y)
  beside = count > 1 and len(panels) == 1 and look.across(2.6) > 1
  width, height = _LARGE if len(panels) <= 2 and (count == 1 or beside) else _SMALL
  wide = count if beside else min(look.across(width), len(panels))
  high = 1 if beside else count
  blocks = 1 if beside else -(-len(panels) // wide)
  drawn = pictures.new_figure(look, height=height * high * blocks + 1.0)
  # Panels of one score share their axes, so that they can be compared.
  alike = count == 1 and not recipe.panels
  grid = drawn.subplots(high * blocks, wide, squeeze=False, sharex=alike, sharey=alike)
  for axes in grid.flat:
    axes.set_axis_off()
  characters = int((look.width / wide - 0.6) / pictures.letter(look.font_size - 0.5))
  handles: dict[str, Any] = {}
  for index, panel in enumerate(panels):
    block, column = divmod(index, wide)
    for place, y in enumerate(recipe.y):
      axes = grid[0, place] if beside else grid[block * high + place, column]
      axes.set_axis_on()
      handles |= _draw(axes, panel, of_column[y], y, drawing)
      is_top = beside or place == 0
      # With shared axes, the lowest panel of each column names x.
      below = beside or (place == high - 1 and not (alike and index + wide < len(panels)))
      heading = "\n".join(
        textwrap.fill(text, characters, break_on_hyphens=False)
        for text in panel.heading.split("\n") * is_top
      )
      pictures.dress(
        axes, look=look, title=recipe.titles.get(y) or heading,
        xlabel=recipe.name_of(recipe.x[0]) if below else "",
        ylabel="" if column else "test error (%)" if drawing.is_error else recipe.name_of(y),
      )  # fmt: skip
      axes.title.set_fontsize(look.font_size - 0.5)
      axes.tick_params(labelbottom=below or not alike)
  pictures.headline(drawn, look, recipe.title, recipe.note or _note(groups, drawing))
  pictures.key(drawn, look, list(handles.values()))
  return drawn


def _groups(rows: Sequence[Row], recipe: Recipe, y: str) -> list[Group]:
  """Returns the points of a column of y. Those of `ends` hold means already. Of other rows, those
  without a finite x or y are left out."""
  x = recipe.x[0]
  labels = _labels(rows, recipe)
  name_of = lambda row: labels[row[recipe.series]] if recipe.series else ""
  if recipe.ends:
    low, high = recipe.ends
    return [
      Group(
        row, name_of(row), row[x], row[y], row[low], row[high], int(row["seeds"]),
        int(row.get("not_finite") or 0),
      )
      for row in rows
    ]  # fmt: skip
  kept: dict[tuple[Any, ...], list[Row]] = {}
  for row in rows:
    facts = tuple(row.get(key) for key in (*WHAT_EPSILON_MEANS, *recipe.panels))
    if is_number(row[x]) and is_number(row.get(y)):
      kept.setdefault((name_of(row), row[x], facts), []).append(row)
  groups = []
  for (name, at, _), alike in kept.items():
    values = [row[y] for row in alike]
    mean = statistics.mean(values)
    groups.append(Group(alike[0], name, at, mean, min(values), max(values), len(values)))
  return groups


def _labels(rows: Sequence[Row], recipe: Recipe) -> dict[Any, str]:
  """Returns the name of the line of each value of `series`, in their order."""
  labels: dict[Any, str] = {}
  base = ""
  for value in dict.fromkeys(row[recipe.series] for row in rows if recipe.series):
    label = recipe.text(str(recipe.series), value)
    # In a label such as "the same, DP-FTRL", "the same" is replaced by the last full label.
    again = label.startswith("the same,")
    base = base if again else label
    labels[value] = label.replace("the same", base, 1) if again and base else label
  return labels


def _fits(group: Group, column: str, value: Any) -> bool:
  return (group.row.get(column) or None) in (None, value)


def _panels(groups: Sequence[Group], drawing: Drawing) -> list[Panel]:
  """Returns the panels in the order of their rows. Lines without privacy stand in every panel that
  is otherwise theirs."""
  recipe, many = drawing.recipe, drawing.one_each
  columns = recipe.panels or ("neighboring_relation", "unit")
  place_of = lambda group: {name: group.row.get(name) or None for name in columns}
  private = [group for group in groups if group.kind != "none"] or groups
  of_private = {group.name for group in private}
  places: list[dict[str, Any]] = []
  for place in map(place_of, private):
    if place not in places:
      places.append(place)
  panels = []
  if len(places) < 2 and not recipe.panels:
    places = [{}]
  for place in places:
    mine = [group for group in private if place.items() <= place_of(group).items()]
    names = tuple(dict.fromkeys(group.name for group in mine))
    shared = tuple(
      dict.fromkeys(
        group.name
        for group in groups
        if group.name not in of_private and all(_fits(group, *at) for at in place.items())
      )
    )
    most = 1 if many else max(1, _MOST - len(shared)) if recipe.panels else _FEW
    parts = -(-len(names) // most) or 1
    unit = next((str(g.row["unit"]) for g in mine if g.row.get("unit")), "example")
    # The words of a relation name the unit.
    shown = [at for at in place.items() if at[1] is not None and at[0] != "unit"]
    words = [_in_words(*at, unit, recipe) for at in shown]
    # Where each line has a panel, the note says of which relation those are that name none.
    words = [] if many and place == places[0] else words
    # Lines are dealt evenly, so that no panel gets one leftover line.
    for part in range(parts):
      kept = names[part * len(names) // parts : (part + 1) * len(names) // parts]
      rest = tuple(name for name in names if name not in kept)
      heading = "\n".join([*kept, *words] if many else words)
      panels.append(Panel(heading, place, (*kept, *shared), rest))
  return panels


def _in_words(column: str, value: Any, unit: str, recipe: Recipe) -> str:
  """Returns what stands above the panels of a value of a column."""
  if isinstance(value, float):
    return f"{recipe.words.get(column) or column} = {by_name(column, value)}"
  relations = str(value).split(" / ")
  text = " / ".join(pictures.relation_in_words(each, unit) for each in relations)
  return recipe.words.get(str(value)) or pictures.proper_name(text)


def _drawing(groups: Sequence[Group], recipe: Recipe, look: Look) -> Drawing:
  values = [*(group.x for group in groups), *(at for _, at, _ in recipe.references)]
  kinds = {group.kind for group in groups if group.x is not None}
  names = dict.fromkeys(group.name for group in groups)
  colors = {name: index for index, name in enumerate(names)}
  by_kind = len(kinds) > 1 and None not in kinds
  if by_kind:
    # Black stands for no privacy.
    private = {group.name for group in groups if group.kind != "none"}
    colors |= {name: len(pictures.PALETTE) - 1 for name in names if name not in private}
  is_error = recipe.error and look.log_y is not False
  one_each = not recipe.panels and len(names) > _FEW
  places = {(group.name, group.x) for group in groups if group.x is not None}
  bands = max(Counter(name for name, _ in places).values(), default=0) > _BARS
  return Drawing(
    recipe, look, is_error, positions(values), colors, by_kind, one_each, bands
  )


def positions(values: Sequence[float | None]) -> dict[float | None, float]:
  """Returns the positions 0, 1, 2, ... of the sorted x values, if one value is infinite.

  If all values are finite, it returns {}: each value is then drawn at its place on an axis.

  >>> positions([0.1, math.inf, 0.5]), positions([0.1, 0.5])
  ({0.1: 0.0, 0.5: 1.0, inf: 2.0}, {})
  """
  ordered = sorted({value for value in values if value is not None})
  if not ordered or not math.isinf(ordered[-1]):
    return {}
  return {value: float(place) for place, value in enumerate(ordered)}


def _draw(
  axes: Axes, panel: Panel, groups: Sequence[Group], y: str, drawing: Drawing
) -> dict[str, Any]:
  """Draws one panel, and returns the entries of the legend by their words."""
  recipe, look = drawing.recipe, drawing.look
  handles: dict[str, Any] = {}
  told = panel.heading.split("\n")
  for name in panel.names:
    mine = panel.take(groups, name)
    index = drawing.colors[name] + (0 if recipe.series else recipe.y.index(y))
    points = drawing.in_order(mine)
    if points:
      line = _draw_line(axes, points, index, y, drawing)
      handles |= {name: line} if name and name not in told else {}
    for group in mine:
      if group.x is None:
        # A run without a guarantee has no place on the axis of epsilon, only a height.
        how: dict[str, Any] = {"linestyle": "--", "linewidth": 0.9}
        is_named = bool(name) and not points and name not in told
        word = name if is_named else pictures.WITHOUT_PRIVACY
        axes.axhline(drawing.height(group.mean), color=look.color(index), label=word, **how)
        color = look.color(index) if is_named else "#000000"
        handles[word] = pictures.sample(word, look, color=color, **how)
  for name in panel.behind:
    mine = drawing.in_order(panel.take(groups, name))
    grey: dict[str, Any] = {"color": pictures.CONTEXT_COLOR, "linewidth": 0.8, "zorder": 1}
    heights = [drawing.height(group.mean) for group in mine]
    axes.plot([drawing.column(group.x) for group in mine], heights, **grey)
    word = "the other panels' lines"
    handles[word] = pictures.sample(word, look, **grey)
  more = [name for name in recipe.curves if name not in recipe.y]
  for index, name in enumerate(more):
    how = {"color": "#000000", "linewidth": 0.9, "linestyle": (0, (3 + index, 1 + index))}
    axes.plot(*zip(*recipe.curves[name]), label=name, **how)
    handles[name] = pictures.sample(name, look, **how)
  if y == recipe.y[0]:
    handles |= _draw_references(axes, panel, drawing)
  _scale(axes, groups, y, drawing)
  return handles


def _draw_line(
  axes: Axes, points: list[Group], index: int, y: str, drawing: Drawing
) -> Any:
  """Draws a line, and the spread of its points. Returns the line."""
  recipe, look = drawing.recipe, drawing.look
  color = look.color(index)
  at = [drawing.column(group.x) for group in points]
  mean = [drawing.height(group.mean) for group in points]
  # The largest accuracy is the smallest error.
  ends = [
    sorted((drawing.height(group.low), drawing.height(group.high))) for group in points
  ]
  dash = _STYLES.get(str(points[0].kind), "-") if drawing.by_kind else look.dash(index)
  how: dict[str, Any] = {"linestyle": dash}
  between = recipe.curves.get(y)
  if between:
    axes.plot(*zip(*between), color=color, linewidth=1.2)
    how = {"linestyle": "none"}
  elif y in recipe.stairs:
    how["drawstyle"] = "steps-pre"
  (line,) = axes.plot(
    at, mean, label=points[0].name, color=color, marker=pictures.marker(index),
    markersize=3, markevery=1 + len(points) // 20, linewidth=1.2, zorder=3, **how,
  )  # fmt: skip
  if any(group.seeds > 1 for group in points):
    low, high = zip(*ends)
    if drawing.bands:
      axes.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
    else:
      bars = [[m - a for m, a in zip(mean, low)], [b - m for m, b in zip(mean, high)]]
      axes.errorbar(
        at, mean, yerr=bars, fmt="none", ecolor=color, capsize=1.8, elinewidth=0.8, zorder=3
      )
  return line


def _draw_references(axes: Axes, panel: Panel, drawing: Drawing) -> dict[str, Any]:
  """Draws published results, and returns their entries of the legend. Where panels are of several
  relations, their epsilons are assumed to be of the usual one."""
  recipe = drawing.recipe
  is_usual = panel.relation in (None, _USUAL)
  handles = {}
  labels = list(dict.fromkeys(label for label, _, _ in recipe.references))
  for label, at, value in recipe.references:
    how: dict[str, Any] = {
      "color": pictures.REFERENCE_COLOR,
      "linestyle": ":",
      "linewidth": 1.1,
    }
    name = label
    if value is None:
      axes.axvline(drawing.column(at), **how)
    elif drawing.is_across(at):
      axes.axhline(drawing.height(value), **how)
      name = f"{label} ({value:g})"
    else:
      number = labels.index(label) % len(pictures.REFERENCE_MARKERS)
      how = {"color": pictures.REFERENCE_COLOR, "linestyle": "none"}
      how["marker"] = pictures.REFERENCE_MARKERS[number]
      if is_usual:
        axes.plot(
          [drawing.column(at)], [drawing.height(value)], markersize=5, zorder=2, **how
        )
      name = f"{label} ({by_name(recipe.x[0], at or 0.0)}: {value:g})"
    # Several points of one paper share a marker, and their values are read off the axes.
    if sum(other == label for other, _, _ in recipe.references) > 1:
      name = label
    handles[name] = pictures.sample(name, drawing.look, **how)
  return handles


def _scale(axes: Axes, groups: Sequence[Group], y: str, drawing: Drawing) -> None:
  """Sets the scales and ticks of a panel, from all lines of the picture."""
  from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
  )

  recipe, look = drawing.recipe, drawing.look
  x = recipe.x[0]
  positive = [group.mean for group in groups if is_number(group.mean) and group.mean > 0]
  # If a loss diverges, the axis is logarithmic, so that the other losses remain visible.
  diverged = bool(positive) and max(positive) > 20 * statistics.median(positive)
  is_plain = y in recipe.curves or y in recipe.stairs
  wanted = y in recipe.log or (diverged and not is_plain)
  if drawing.is_error or (wanted if look.log_y is None else look.log_y):
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # An axis that spans a small factor needs more ticks, so that heights can be read.
    subs: tuple[float, ...] = (1.0,)
    if high <= 100 * low:
      subs = (1.0, 2.0, 5.0) if high > 6 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
  else:
    axes.ticklabel_format(axis="y", useOffset=False)
    if y in recipe.stairs:
      axes.set_ylim(bottom=0)
  if drawing.places:
    names = [by_name(x, at) if at is not None else "" for at in drawing.places]
    axes.set_xticks(list(drawing.places.values()), names)
    return
  at = sorted({group.x for group in groups if group.x is not None})
  ticks = [value for value in at if value > 0]
  ticks = ticks or sorted(
    {at for _, at, _ in recipe.references if at is not None and at > 0}
  )
  if ticks and (x in recipe.log if look.log_x is None else look.log_x):
    axes.set_xscale("log")
    if len(ticks) <= _TICKS:
      # Ticks stand at values that were run, not at powers of ten without a run.
      axes.xaxis.set_major_locator(FixedLocator(ticks))
      axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: by_name(x, value)))
      axes.xaxis.set_minor_locator(NullLocator())
  elif all(float(value).is_integer() for value in at):
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def _note(groups: Sequence[Group], drawing: Drawing) -> str:
  """Returns what points and bars show, how many runs are not drawn, and what epsilon means."""
  recipe = drawing.recipe
  sizes = sorted({group.seeds for group in groups})
  repeats = "seeds" if recipe.ends else "rows"
  counts = " to ".join(map(str, dict.fromkeys(sizes[:1] + sizes[-1:]))) or "0"
  spread = f"mean of {counts} {repeats}; {'bands' if drawing.bands else 'bars'}: min to max"
  if sizes == [1]:
    spread = "one seed each" if recipe.ends else ""
  lost = sum(group.not_finite for group in groups)
  spread += f"; not drawn: {lost} that ended without a finite number" if lost else ""
  kinds = dict.fromkeys(str(group.kind) for group in groups if group.x is not None)
  styles = ", ".join(_KINDS[kind] for kind in _KINDS if kind in kinds)
  parts = [spread, styles if drawing.by_kind else "", _meaning(groups, drawing)]
  return ". ".join(filter(None, parts))


def _meaning(groups: Sequence[Group], drawing: Drawing) -> str:
  """Returns what epsilon means: its kind, delta and neighbouring relation; "" if no row says."""
  private = [
    group.row
    for group in groups
    if all(group.row.get(key) is not None for key in WHAT_EPSILON_MEANS)
    and group.kind != "none"
  ]
  if not private:
    return ""
  kinds = " / ".join(dict.fromkeys(str(row["epsilon_kind"]) for row in private))
  # A delta is text if the runs of a point have different deltas.
  deltas = dict.fromkeys(row["delta"] for row in private)
  shown = [upper(value) if isinstance(value, float) else str(value) for value in deltas]
  meaning = f"epsilon: {kinds}, delta = {' / '.join(shown)}"
  column = "neighboring_relation"
  relations = list(
    dict.fromkeys(
      _in_words(column, row[column], str(row["unit"]), drawing.recipe) for row in private
    )
  )
  if len(relations) == 1:
    return f"{meaning}, {relations[0]}"
  # With few panels, each names its relation.
  return (
    f"{meaning}, {relations[0]} where a panel names no other"
    if drawing.one_each
    else meaning
  )
