"""The curves of a relevance experiment by epoch, in the paper's layout."""

from __future__ import annotations

import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dpjax import pictures
from dpjax.accounting import upper
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.run import report
from dpjax.pictures import PAGE, Look

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

Row = dict[str, Any]
_METRICS = (("test_accuracy", "test accuracy"), ("test_loss", "cross-entropy (nats)"))
_OF_RUN = ("curve", "dataset", "epsilon_target", "seed")
_MEANING = (
  "epsilon_kind",
  "claimed_epsilon_thm7",
  "proved_epsilon",
  "delta",
  "neighboring_relation",
  "unit",
)
_STYLES = {"proved": "-", "claimed": "--", "none": ":"}
# If a panel would have more curves than this, its private curves are split over several panels.
# More colours would be hard to tell apart.
_MOST = 5
# Width and height of a panel in inches. A panel with a legend below it is wider.
_WIDE = 1.7
_WIDE_WITH_KEY = 3.2
_HIGH = 1.4


class Column(NamedTuple):
  """Two panels with the same curves: accuracy above, cross-entropy below."""

  dataset: str
  epsilon: float
  relation: str  # in words; "": no run here has a guarantee
  curves: list[str]


def draw(
  workdir: pathlib.Path,
  config: RelevanceConfig,
  results: Sequence[Row],
  metrics: Sequence[list[Row]],
) -> None:
  """Writes `workdir`/report.csv (every epoch of every run) and report.png (`figure`).

  Args:
    workdir: folder of the experiment.
    config: config of the experiment, for the title of the picture.
    results: result of each run.
    metrics: rows of metrics.jsonl, for each run.
  """
  rows = [row for curve in map(_by_epoch, results, metrics) for row in curve]
  report.write_csv(workdir / "report.csv", rows)
  curves = list(dict.fromkeys(row["curve"] for row in rows))
  title = config.title or f"{config.data.name}: {', '.join(curves)}"
  pictures.save(figure(rows, title=title), workdir / "report.png")


def figure(rows: Sequence[Row], *, title: str = "", look: Look = PAGE) -> Figure:
  """Returns the picture of an experiment: accuracy above, cross-entropy below.

  There is a column for each data set, epsilon and neighbouring relation. A curve is a line: the
  mean over seeds, in a band from the smallest to the largest value. If a column would have more
  than five curves, the private curves are split over several columns. Each column also shows the
  runs without privacy on its data and at its epsilon.

  Args:
    rows: rows of report.csv, one for each epoch of each run.
    title: title of the picture.
    look: sizes, fonts and style of the picture.
  """
  columns = _columns(rows)
  names = list(dict.fromkeys(row["curve"] for row in rows))
  # If there are fewer curves than colours, one legend serves all columns. If not, each column has a
  # legend below it.
  shared = len(names) < len(pictures.PALETTE)
  relations = [column.relation for column in columns]
  # A row has as many columns as the most frequent relation has, if they fit. So columns of
  # different relations seldom share a row.
  alike = max(map(relations.count, relations))
  wide = min(alike, look.across(_WIDE if shared else _WIDE_WITH_KEY))
  blocks = -(-len(columns) // wide)
  keys = 0.16 * max(len(column.curves) for column in columns)
  height = (2 * _HIGH + (0.3 if shared else keys)) * blocks + 0.9
  drawn = pictures.new_figure(look, height=height)
  # Legends that differ between columns are drawn in an additional row below each block.
  ratios = [1.0, 1.0] if shared else [1.0, 1.0, keys / _HIGH]
  grid = drawn.subplots(
    len(ratios) * blocks, wide, squeeze=False, height_ratios=ratios * blocks
  )
  for axes in grid.flat:
    axes.set_axis_off()
  kinds = {}
  for index, column in enumerate(columns):
    block, place = divmod(index, wide)
    top = len(ratios) * block
    mine = [row for row in rows if _is_in(row, column)]
    heading = [f"{pictures.proper_name(column.dataset)}, epsilon = {upper(column.epsilon)}"]
    # If there is only one relation, the note below the title names it, so the columns do not.
    several = len({other.relation for other in columns}) > 1
    heading += [column.relation] * bool(several and column.relation)
    for axes, (metric, label) in zip(grid[top : top + 2, place], _METRICS):
      axes.set_axis_on()
      handles = _panel(axes, mine, column.curves, metric, look, names if shared else None)
      is_top = metric == _METRICS[0][0]
      pictures.dress(
        axes, look, title="\n".join(heading) if is_top else "",
        xlabel="" if is_top else "epoch", ylabel=label if place == 0 else "",
      )  # fmt: skip
      axes.title.set_fontsize(look.font_size - 0.5)
    kinds |= {handle.get_label(): handle for handle in handles}
    if not shared:
      grid[top + 2, place].legend(
        handles=handles, loc="upper left", fontsize=look.font_size - 1, frameon=False,
        handlelength=1.6, borderaxespad=0.0, labelspacing=0.25,
      )  # fmt: skip
  relations = list(dict.fromkeys(filter(None, relations)))
  note = "solid: proved, dashed: claimed (no guarantee), dotted: not private"
  note += f"; {relations[0]}" if len(relations) == 1 else ""
  pictures.headline(drawn, look, title, note)
  if shared:
    pictures.key(drawn, look, list(kinds.values()))
  return drawn


def _columns(rows: Sequence[Row]) -> list[Column]:
  """Returns the columns of the picture. Columns of the same neighbouring relation follow each
  other."""
  columns = []
  relations = list(dict.fromkeys(_relation(row) for row in rows if _is_private(row)))
  for relation in relations or [""]:
    alike = [row for row in rows if not _is_private(row) or _relation(row) == relation]
    for dataset, epsilon in dict.fromkeys(
      (row["dataset"], row["epsilon_target"])
      for row in alike
      if _is_private(row) or not relation
    ):
      mine = [
        row
        for row in alike
        if (row["dataset"], row["epsilon_target"]) == (dataset, epsilon)
      ]
      private = list(dict.fromkeys(row["curve"] for row in mine if _is_private(row)))
      free = [row["curve"] for row in mine if not _is_private(row)]
      others = list(dict.fromkeys(free))
      share = max(1, _MOST - len(others))
      parts = -(-len(private) // share) or 1
      # Curves are split into parts of nearly equal size, so that no panel gets one leftover curve.
      for part in range(parts):
        mine = private[part * len(private) // parts : (part + 1) * len(private) // parts]
        columns.append(Column(dataset, epsilon, relation, [*mine, *others]))
  return columns


def _is_private(row: Row) -> bool:
  return row["epsilon_kind"] != "none"


def _relation(row: Row) -> str:
  """Returns a run's neighbouring relation in words; "" if an older table lacks it."""
  relation = row.get("neighboring_relation")
  return (
    pictures.relation_in_words(relation, row.get("unit") or "example") if relation else ""
  )


def _is_in(row: Row, column: Column) -> bool:
  place = (row["dataset"], row["epsilon_target"]) == (column.dataset, column.epsilon)
  alike = not _is_private(row) or _relation(row) == column.relation
  return place and alike and row["curve"] in column.curves


def _by_epoch(result: Row, lines: list[Row]) -> list[Row]:
  of_run, meaning = (
    {name: result[name] for name in names} for names in (_OF_RUN, _MEANING)
  )
  scores = [{name: line[name] for name, _ in _METRICS} for line in lines]
  epochs = [{"epoch": line["step"]} for line in lines]
  return [of_run | epoch | score | meaning for epoch, score in zip(epochs, scores)]


def _panel(
  axes: Axes,
  rows: list[Row],
  curves: list[str],
  metric: str,
  look: Look,
  names: list[str] | None,
) -> list[Any]:
  """Draws the curves of a panel, and returns their lines for the legend.

  Args:
    names: names of all curves, whose order decides the colours. None: the order of `curves`
      decides.
  """
  from matplotlib.ticker import MaxNLocator

  handles = []
  for place, curve in enumerate(curves):
    index = names.index(curve) if names else place
    mine = [row for row in rows if row["curve"] == curve]
    kind = mine[0]["epsilon_kind"]
    epochs = sorted({row["epoch"] for row in mine})
    values = [[row[metric] for row in mine if row["epoch"] == epoch] for epoch in epochs]
    # Black stands for no privacy in every panel.
    index = index if kind != "none" else len(pictures.PALETTE) - 1
    color = look.color(index)
    name = pictures.proper_name(curve)
    words = kind if kind != "none" else "not private"
    # The kind is added to a name unless the name already says it.
    is_said = words in name or name == pictures.WITHOUT_PRIVACY
    # A few markers on each curve tell curves apart in grey prints, too.
    (line,) = axes.plot(
      epochs,
      list(map(statistics.mean, values)),
      label=name if is_said else f"{name} ({words})",
      color=color,
      linewidth=1.1,
      linestyle=_STYLES[kind],
      marker=pictures.marker(index),
      markersize=2.5,
      markevery=max(1, len(epochs) // 4),
    )
    handles.append(line)
    low = [min(each) for each in values]
    high = [max(each) for each in values]
    axes.fill_between(epochs, low, high, color=color, alpha=0.15, linewidth=0)
  axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
  # Ticks show full numbers, not differences from an offset.
  axes.ticklabel_format(axis="y", useOffset=False)
  losses = [row[metric] for row in rows if math.isfinite(row[metric]) and row[metric] > 0]
  # If a loss diverges, the axis is logarithmic, so that the other losses remain visible.
  is_wide = bool(losses) and max(losses) > 20 * statistics.median(losses)
  if metric == "test_loss" and (is_wide if look.log_y is None else look.log_y):
    axes.set_yscale("log")
  return handles
