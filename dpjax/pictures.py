"""The look of every picture: sizes, colours, words, and files as PNG, PDF and SVG.

Drawing uses matplotlib's object interface, which changes no global state and needs no display.
Colours are those of Okabe and Ito (2008), which colour-blind readers can tell apart. Each has a
marker as well, for prints in grey.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dpjax import files, optional
from dpjax.validate import UserError

# matplotlib belongs to an extra: it is imported when something is drawn.
if TYPE_CHECKING:
  from matplotlib.artist import Artist
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure
  from matplotlib.lines import Line2D

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Markers of results that others published. They differ from the markers of our own lines.
REFERENCE_MARKERS = ("*", "d", "p", "h", "8", "<")
REFERENCE_COLOR = "#555555"
# Colour of curves that a panel shows for comparison, behind its main curve.
CONTEXT_COLOR = "#C8C8C8"
# Widths of pictures in inches. "single" fits one column of most two-column proceedings, and
# "double" fits a whole page.
SIZES = {"single": 3.3, "double": 6.9}
STYLES = ("grid", "plain", "grey")
SUFFIXES = (".png", ".pdf", ".svg")
WITHOUT_PRIVACY = "without privacy"
_GREYS = ("#000000", "#5A5A5A", "#8C8C8C", "#B0B0B0")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
# Smallest and largest side that a `Look` may ask for, in inches. On a smaller picture no tick label
# would fit.
_LEAST = 1.0
_MOST = 40.0
_FONT_SIZES = (4.0, 24.0)
_DPI = 150
_WORDS = {
  "privacy.epsilon": "privacy budget epsilon",
  "epsilon": "privacy budget epsilon",
  "epsilon_target": "privacy budget epsilon",
  "privacy.noise_multiplier": "noise multiplier",
  "partition.alpha": "alpha of the Dirichlet label skew",
  "test_perplexity": "perplexity of the test text",
  "test_loss": "test cross-entropy (nats)",
  "num_steps": "steps",
  "fpr": "false positive rate",
  "tpr": "true positive rate",
}
# Names of data sets, models and methods as their authors write them.
_PROPER_NAMES = {
  "mnist": "MNIST",
  "fashion_mnist": "Fashion-MNIST",
  "cifar10": "CIFAR-10",
  "dp_sgd": "DP-SGD",
  "gnmax": "GNMax",
  "confident_gnmax": "confident GNMax",
  "No_DP": WITHOUT_PRIVACY,
  "DPSGD": "DP-SGD",
  "mlp": "MLP",
  "wide_mlp": "wide MLP",
  "cnn": "CNN",
  "small_cnn": "small CNN",
  "cifar_cnn": "CIFAR CNN",
  "lstm": "LSTM",
  "gpt": "GPT",
  "gpt_lora": "GPT with LoRA",
  "vit": "ViT",
  "wrn": "wide ResNet",
  "jax_privacy": "JAX-Privacy",
  "torch": "PyTorch",
  "opacus": "Opacus",
  "opacus_ghost": "Opacus, ghost clipping",
  "fedjax": "FedJAX",
  "lira": "LiRA",
  "lira_fixed": "LiRA, one variance",
  "rmia": "RMIA",
  "krum": "Krum",
  "multi_krum": "multi-Krum",
  "cpu": "CPU",
  "gpu": "GPU",
  "tpu": "TPU",
}
_RELATIONS = {
  "add_or_remove_one": "add or remove one {unit}",
  "replace_one": "replace one {unit}",
  "replace_special": "replace one {unit} by an empty one",
}


@dataclasses.dataclass(frozen=True)
class Look:
  """The look of a picture, independent of what it shows.

  Attributes:
    width: width in inches.
    height: height in inches; None for the height that the panels need.
    font_size: size of labels, in points; ticks are one point smaller.
    style: "grid" draws light lines behind the curves, "plain" draws none, and "grey" is for
      print without colours.
    title: text above the picture; None for the picture's own title, "" for none.
    log_x: whether x is logarithmic; None for the default of the picture.
    log_y: whether y is logarithmic; None for the default of the picture.

  Raises:
    UserError: a size, a font size or a style that is not allowed.

  >>> Look().width, Look(width=SIZES["single"]).across(1.6)
  (6.9, 2)
  """

  width: float = SIZES["double"]
  height: float | None = None
  font_size: float = 8.0
  style: str = "grid"
  title: str | None = None
  log_x: bool | None = None
  log_y: bool | None = None

  def __post_init__(self) -> None:
    for name in ("width", "height"):
      value = getattr(self, name)
      # The negated comparison also refuses NaN.
      if value is not None and not _LEAST <= value <= _MOST:
        raise UserError(
          f"must be in [{_LEAST:g}, {_MOST:g}] inches", field=name, value=value
        )
    low, high = _FONT_SIZES
    if not low <= self.font_size <= high:
      raise UserError(
        f"must be in [{low:g}, {high:g}] points", field="font_size", value=self.font_size
      )
    if self.style not in STYLES:
      raise UserError(
        f"must be one of {', '.join(STYLES)}", field="style", value=self.style
      )

  def color(self, index: int) -> str:
    """Returns the colour of line `index`; after the last colour the first one follows."""
    colors = _GREYS if self.style == "grey" else PALETTE
    return colors[index % len(colors)]

  def dash(self, index: int) -> Any:
    """Returns the dash pattern of line `index`. Lines are solid, except where the style "grey"
    uses the same grey again."""
    return _DASHES[index // len(_GREYS) % len(_DASHES)] if self.style == "grey" else "-"

  def across(self, least_width: float) -> int:
    """Returns how many panels of `least_width` inches stand beside each other, at least 1."""
    return max(1, int(self.width // least_width))


# The look of a picture if the caller gives no look.
PAGE = Look()


def marker(index: int) -> str:
  """Returns the marker of line `index`, which tells lines apart where colours are lost."""
  return MARKERS[index % len(MARKERS)]


def letter(font_size: float) -> float:
  """Returns the average width of a letter in inches; `font_size` is its height in points."""
  return 0.565 * font_size / 72


def in_words(name: str) -> str:
  """Returns the name of a column or of a config's field in words.

  >>> in_words("privacy.epsilon"), in_words("base.num_clients"), in_words("test_accuracy")
  ('privacy budget epsilon', 'num clients', 'test accuracy')
  """
  return _WORDS.get(name) or name.split(".")[-1].replace("_", " ")


def proper_name(name: str) -> str:
  """Returns the name of a data set, a model or a method as its authors write it.

  >>> proper_name("fashion_mnist"), proper_name("gpt_lora"), proper_name("plain_loop")
  ('Fashion-MNIST', 'GPT with LoRA', 'plain loop')
  """
  return _PROPER_NAMES.get(name) or name.replace("_", " ")


def relation_in_words(relation: str, unit: str = "example") -> str:
  """Returns a neighbouring relation in words; text after the relation's name is kept.

  >>> relation_in_words("add_or_remove_one", "user")
  'add or remove one user'
  >>> relation_in_words("replace_one (label public)")
  'replace one example (label public)'
  """
  name, space, more = relation.partition(" ")
  return _RELATIONS.get(name, name).format(unit=unit) + space + more


def new_figure(look: Look, *, height: float) -> Figure:
  """Returns an empty figure of the look's size. `height` (inches) is used if the look has no
  height."""
  with optional.require_extra():
    from matplotlib.figure import Figure

  return Figure(figsize=(look.width, look.height or height), layout="constrained")


def dress(
  axes: Axes, look: Look = PAGE, *, title: str = "", xlabel: str = "", ylabel: str = ""
) -> None:
  """Sets the title, labels, tick sizes and grid of axes, and hides the top and right border."""
  axes.set_title(title, fontsize=look.font_size, loc="left")
  axes.set_xlabel(xlabel, fontsize=look.font_size)
  axes.set_ylabel(ylabel, fontsize=look.font_size)
  axes.tick_params(labelsize=look.font_size - 1, length=2.5, pad=2)
  axes.tick_params(which="minor", labelsize=look.font_size - 1, length=1.5)
  if look.style == "grid":
    axes.grid(True, color="#E5E5E5", linewidth=0.6)
  axes.set_axisbelow(True)
  axes.spines[["top", "right"]].set_visible(False)


def headline(figure: Figure, look: Look, title: str, note: str = "") -> None:
  """Writes a title above all panels, and a note below it, wrapped to the figure's width."""
  title = title if look.title is None else look.title
  characters = int(look.width / letter(look.font_size + 0.5))
  lines = [
    textwrap.fill(text, characters, break_on_hyphens=False)
    for text in (title, note)
    if text
  ]
  if lines:
    figure.suptitle("\n".join(lines), fontsize=look.font_size + 0.5, x=0.01, ha="left")


def key(figure: Figure, look: Look, handles: Sequence[Artist]) -> None:
  """Writes a legend of labelled artists below the panels, in as many columns as fit."""
  labels = [str(handle.get_label()) for handle in handles]
  if not labels:
    return
  # The line or marker before a label is about as wide as five letters.
  wide = (max(map(len, labels)) + 5) * letter(look.font_size - 0.5)
  columns = int(look.width // wide)
  figure.legend(
    handles, labels, loc="outside lower left", ncols=min(max(1, columns), len(labels)),
    fontsize=look.font_size - 0.5, frameon=False, handlelength=1.8, columnspacing=1.2,
    borderaxespad=0.2,
  )  # fmt: skip


def sample(label: str, look: Look = PAGE, **how: Any) -> Line2D:
  """Returns a line or a marker for the legend of `key`. `how`: options of matplotlib's Line2D."""
  with optional.require_extra():
    from matplotlib.lines import Line2D

  how = {"linewidth": 1.2, "markersize": look.font_size * 0.6} | how
  return Line2D([], [], label=label, **how)


def check_suffix(path: str | os.PathLike, *, field: str = "picture") -> str:
  """Returns the suffix of a picture's file.

  Raises:
    UserError: it is none of `SUFFIXES`.

  >>> check_suffix("a/curve.PDF")
  '.pdf'
  """
  suffix = pathlib.Path(path).suffix.lower()
  if suffix not in SUFFIXES:
    raise UserError(
      f"must end in {', '.join(SUFFIXES)}", field=field, value=os.fspath(path)
    )
  return suffix


def save(figure: Figure, path: str | os.PathLike, *, also: Iterable[str] = ()) -> None:
  """Writes a picture, atomically and without a display. A "$" in a title or label is plain text.

  Equal pictures give equal files: no date and no random id is written. Fonts of a PDF are
  TrueType, as publishers ask, and letters of an SVG are outlines.

  Args:
    figure: a matplotlib figure.
    path: file whose suffix is .png, .pdf or .svg.
    also: further suffixes; each gives one more file beside `path`.

  Raises:
    UserError: another suffix.
  """
  with optional.require_extra():
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.image import AxesImage
    from matplotlib.text import Text

  path = pathlib.Path(path)
  paths = [path, *(path.with_suffix(suffix) for suffix in also)]
  suffixes = [check_suffix(each) for each in paths]
  FigureCanvasAgg(figure)
  has_images = False
  # A title or a label may hold a path or a person's words, where "$" begins no formula. Ticks of
  # logarithmic axes do hold formulas, which matplotlib wrote.
  for part in _parts(figure):
    has_images |= isinstance(part, AxesImage)
    if isinstance(part, Text):
      part.set_parse_math(False)
  fixed: dict[Any, Any] = {"pdf.fonttype": 42, "svg.hashsalt": "dpjax"}
  dates = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": None}
  for each, suffix in zip(paths, suffixes):
    # The picture is drawn in memory first, so that a killed process leaves the old file or the new
    # one.
    content = io.BytesIO()
    with matplotlib.rc_context(fixed):
      figure.savefig(content, format=suffix[1:], dpi=_DPI, metadata=dates[suffix])
    # A palette makes the file a third as large. Photographs and heat maps need all colours.
    if suffix == ".png" and not has_images:
      content = _with_a_palette(content)
    files.replace_file(each, content.getvalue())


def _parts(artist: Any) -> Iterator[Any]:
  """Yields all parts of a picture but ticks: to list ticks makes them all, which takes longer than
  to draw the picture."""
  with optional.require_extra():
    from matplotlib.axis import Axis

  yield artist
  is_axis = isinstance(artist, Axis)
  for part in (artist.label, artist.offsetText) if is_axis else artist.get_children():
    yield from _parts(part)


def _with_a_palette(content: io.BytesIO) -> io.BytesIO:
  """Returns a PNG reduced to 256 colours, which is enough for lines and letters."""
  with optional.require_extra():
    from PIL import Image

  smaller = io.BytesIO()
  with Image.open(content) as image:
    # Dithering is off, so that an area of one colour keeps one colour.
    few = image.convert("RGB").quantize(
      256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
    )
    few.save(smaller, format="PNG", optimize=True)
  return smaller
