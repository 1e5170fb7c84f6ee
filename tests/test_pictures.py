"""The look of pictures: files of three kinds, colours, words."""

import io

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from dpjax import pictures
from dpjax.accounting.proved import RELATIONS
from tests.refuses import refuses

_STARTS = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


def _figure(look=pictures.PAGE):
  figure = pictures.new_figure(look, height=2.0)
  axes = figure.subplots()
  axes.plot([0, 1], [0, 1], label="$a line$")
  pictures.dress(axes, look, title="a_$b", xlabel="x", ylabel="y")
  pictures.key(figure, look, axes.lines)
  return figure


@pytest.mark.slow
def test_one_call_writes_three_kinds_of_files_which_do_not_change(tmp_path):
  for folder in (tmp_path / "first", tmp_path / "second"):
    pictures.save(_figure(), folder / "a.png", also=(".pdf", ".svg"))
  for suffix, start in _STARTS.items():
    first = (tmp_path / "first" / "a").with_suffix(suffix).read_bytes()
    assert first.startswith(start)
    assert first == (tmp_path / "second" / "a").with_suffix(suffix).read_bytes()
  pdf = (tmp_path / "first" / "a.pdf").read_bytes()
  # Publishers refuse letters of type 3.
  assert b"/Type3" not in pdf and b"/FontFile2" in pdf
  assert sorted(path.name for path in (tmp_path / "first").iterdir()) == [
    "a.pdf",
    "a.png",
    "a.svg",
  ]


def test_a_width_is_that_of_the_file(tmp_path):
  look = pictures.Look(width=pictures.SIZES["single"])
  pictures.save(_figure(look), tmp_path / "a.png")
  with Image.open(tmp_path / "a.png") as image:
    assert image.size == (round(3.3 * 150), 300)
    assert image.mode == "P"  # a palette: a third of the bytes


def test_a_palette_changes_no_pixel_of_lines_by_much_and_none_of_a_photograph(tmp_path):
  figure = _figure()
  pictures.save(figure, tmp_path / "a.png")
  whole = io.BytesIO()
  figure.savefig(whole, format="png", dpi=150)
  with Image.open(tmp_path / "a.png") as image, Image.open(whole) as before:
    few = np.asarray(image.convert("RGB"), int)
    all_colors = np.asarray(before.convert("RGB"), int)
  assert np.abs(few - all_colors).mean() < 0.5 and (few == all_colors).mean() > 0.9
  photograph = Figure()
  values = np.random.default_rng(0).random((40, 40, 3))
  photograph.subplots().imshow(values)
  pictures.save(photograph, tmp_path / "b.png")
  with Image.open(tmp_path / "b.png") as image:
    assert len(image.getcolors(10**6)) > 1000


@pytest.mark.parametrize("name", ["a", "a.jpg", "a.csv", "png"])
def test_another_suffix_is_refused_and_nothing_is_written(tmp_path, name):
  with refuses("picture"):
    pictures.save(_figure(), tmp_path / name)
  with refuses("picture"):
    pictures.save(_figure(), tmp_path / "a.png", also=(".eps",))
  assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
  "wrong, field",
  [
    ({"width": 0.5}, "width"),
    ({"width": float("nan")}, "width"),
    ({"height": 100.0}, "height"),
    ({"font_size": 2.0}, "font_size"),
    ({"style": "gray"}, "style"),
  ],
)
def test_a_look_that_cannot_be_drawn_is_refused(wrong, field):
  with refuses(field):
    pictures.Look(**wrong)


def test_every_relation_has_words_of_its_own():
  words = {pictures.relation_in_words(relation, "user") for relation in RELATIONS}
  assert len(words) == len(RELATIONS) and all("one user" in each for each in words)
  assert not any("_" in each for each in words)


def test_seven_lines_differ_in_colour_or_dashes_in_every_style():
  for style in pictures.STYLES:
    look = pictures.Look(style=style)
    assert len({(look.color(i), str(look.dash(i))) for i in range(7)}) == 7
  # Every colour is told from white, and from the one that follows it.
  rgb = [[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in pictures.PALETTE]
  light = np.array(rgb) @ [0.299, 0.587, 0.114]
  assert (light < 190).all()
