"""Folders of images and files of text: what is declared is read, all else is one line."""

import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from dpjax import data
from dpjax.data import image_folders, text_files
from dpjax.validate import UserError

_RNG = np.random.default_rng(0)


def refused(load, *args, **kwargs) -> str:
  with pytest.raises(UserError) as caught:
    load(*args, **kwargs)
  (line,) = str(caught.value).splitlines()
  return line


# --- images


def images(**changes):
  keys = {"classes": ["cat", "dog"], "height": 4, "width": 6, "channels": 3}
  return keys | {"split": "folders"} | changes


@pytest.fixture
def scans(tmp_path):
  """A folder of ten images, and their pixels by path."""
  pixels = {}
  for split, count in (("train", 3), ("test", 2)):
    for name in ("cat", "dog"):
      (tmp_path / "scans" / split / name).mkdir(parents=True)
      for index in range(count):
        path = f"{split}/{name}/{index}.png"
        pixels[path] = _RNG.integers(0, 256, (4, 6, 3), np.uint8)
        Image.fromarray(pixels[path]).save(tmp_path / "scans" / path)
  return tmp_path / "scans", pixels


def test_class_folders_are_read_by_their_declaration(scans):
  folder, pixels = scans
  (folder / "declaration.toml").write_text(
    'classes = ["cat", "dog"]\nheight = 4\nwidth = 6\nchannels = 3\nsplit = "folders"\n'
    "num_examples = 6\n"
  )
  (folder / "train/cat/.DS_Store").write_bytes(b"hidden")
  train, test = data.load(f"{folder}/")
  assert (train.num_classes, train.nominal_size, len(test)) == (2, 6, 4)
  paths = [f"train/{name}/{index}.png" for name in ("cat", "dog") for index in range(3)]
  wanted = np.stack([pixels[path] for path in paths]).astype(np.float32) / np.float32(255)
  np.testing.assert_array_equal(train.x, wanted)
  assert train.y.tolist() == [0, 0, 0, 1, 1, 1]
  held = data.load(f"{folder}/", resident=False)[0]
  assert not held.in_memory and data.digest(held) == data.digest(train)


def test_a_file_is_in_the_test_by_its_name_alone(tmp_path):
  for name in ("cat", "dog"):
    (tmp_path / name).mkdir()
    for index in range(20):
      Image.new("L", (6, 4), index).save(tmp_path / name / f"{index}.png")
  declared = images(split={"test_share": 0.4, "salt": 1}, channels=1)
  before = data.image_folder(tmp_path, declared)
  assert len(before[0]) + len(before[1]) == 40 and 8 <= len(before[1]) <= 24
  (tmp_path / "cat/0.png").unlink()
  after = data.image_folder(tmp_path, declared)
  # The others stay where they were.
  sizes = [len(old) - len(new) for old, new in zip(before, after)]
  assert sorted(sizes) == [0, 1]


def test_grey_and_other_sizes_where_they_are_declared(scans):
  folder, pixels = scans
  grey = data.image_folder(folder, images(channels=1))[0]
  wanted = np.asarray(Image.fromarray(pixels["train/cat/0.png"]).convert("L")) / 255
  np.testing.assert_allclose(grey.x[0, :, :, 0], wanted, rtol=1e-6)
  small = data.image_folder(folder, images(height=2, width=3, resize=True))[0]
  assert small.x.shape == (6, 2, 3, 3)


def test_a_wrong_image_names_its_file(scans):
  folder, _ = scans
  declared = images()
  assert "is 6 x 4 pixels, not 5 x 4; declare resize" in refused(
    data.image_folder, folder, images(width=5)
  )
  for content, says in (
    (b"no image", "is no readable image"),
    ((folder / "test/dog/0.png").read_bytes()[:60], "is no readable image"),
  ):
    (folder / "test/dog/0.png").write_bytes(content)
    line = refused(data.image_folder, folder, declared)
    assert "test/dog/0.png: " in line and says in line
  deep = _RNG.integers(0, 2**16, (4, 6)).astype(np.uint16)
  Image.fromarray(deep).save(folder / "test/dog/0.png")
  assert "must have 8 bits each" in refused(data.image_folder, folder, declared)
  (folder / "test/dog/0.png").rename(folder / "test/dog/0.gif")
  assert "test/dog/0.gif: must be a .png" in refused(data.image_folder, folder, declared)
  (folder / "test/fox").mkdir()
  assert "holds 'fox'; must be of cat, dog" in refused(data.image_folder, folder, declared)
  (folder / "test/fox").rmdir()
  (folder / "train/dog").rename(folder.parent / "moved")
  assert "has no folder 'dog'" in refused(data.image_folder, folder, declared)


@pytest.mark.parametrize(
  "change, says",
  [
    ({"classes": []}, "classes=[]"),
    ({"classes": ["../x"]}, "classes='../x': must be names of folders"),
    ({"channels": 2}, "channels=2"),
    ({"height": 0}, "height=0"),
    ({"split": "random"}, "split: must be a table"),
    ({"split": {"test_share": 2}}, "split.test_share=2"),
    ({"resize": "yes"}, "resize='yes'"),
    ({"size": 3}, "unknown key 'size'"),
  ],
)
def test_a_wrong_declaration_of_images_names_its_key(tmp_path, change, says):
  assert says in refused(image_folders.image_folder, tmp_path, images(**change))


# --- text


def lines(**changes):
  return {"example": "line", "length": 6, "split": {"test_share": 0.5, "salt": 3}} | changes


def test_lines_are_bytes_cut_and_padded(tmp_path):
  path = tmp_path / "posts.txt"
  path.write_bytes("\ufeffone\r\n\r\nzwölf!!\nthree\n".encode())
  (tmp_path / "posts.toml").write_text(
    'example = "line"\nlength = 6\nsplit = {test_share = 0.5, salt = 0}\n'
  )
  train, test = data.load(str(path))
  rows = {bytes(row[row > 0].tolist()) for part in (train, test) for row in part.x}
  assert rows == {b"one", "zwölf!!".encode()[:6], b"three"}
  assert train.vocab_size == 256 and train.x.dtype == np.int32


def test_windows_cover_the_text_without_overlap(tmp_path):
  text = "".join(chr(65 + index % 26) for index in range(100))
  (tmp_path / "a.txt").write_text(text)
  (tmp_path / "b.txt").write_text("held")
  declared = lines(example="window", length=8, split={"test_file": "b.txt"})
  train, test = data.text_file(tmp_path / "a.txt", declared)
  joined = "".join(bytes(row[row > 0].tolist()).decode() for row in train.x)
  assert joined == text and len(train) == 13 and len(test) == 1


def test_a_line_that_becomes_blank_moves_no_other_line_to_another_split(tmp_path):
  declared = {"example": "line", "length": 4, "split": {"test_share": 0.4, "salt": 1}}
  lines = [f"{number:02}" for number in range(30)]
  split_of = lambda text: [
    {bytes(row[:2].tolist()).decode() for row in part.x}
    for part in _read_text(tmp_path, text, declared)
  ]
  whole = split_of("\n".join(lines))
  for number in range(30):
    changed = [*lines]
    changed[number] = " "
    parts = split_of("\n".join(changed))
    assert parts == [part - {lines[number]} for part in whole]


def _read_text(folder, text, declared):
  (folder / "lines.txt").write_text(text)
  return data.text_file(folder / "lines.txt", declared)


def test_a_tokenizer_of_public_text(tmp_path):
  tokenizers = pytest.importorskip("tokenizers")
  made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, "?"))
  made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  made.save(str(tmp_path / "tokenizer.json"))
  (tmp_path / "a.txt").write_text("a b\nb c\n")
  declared = lines(tokenizer="tokenizer.json", length=3)
  train, test = data.text_file(tmp_path / "a.txt", declared)
  # One above the tokenizer's own, for 0 is the padding.
  assert sorted([*train.x.tolist(), *test.x.tolist()]) == [[1, 2, 0], [2, 3, 0]]
  assert train.vocab_size == 4
  (tmp_path / "tokenizer.json").write_text("{}")
  assert "is no tokenizer.json" in refused(data.text_file, tmp_path / "a.txt", declared)


@pytest.mark.parametrize(
  "content, change, says",
  [
    (b"\xff\xfe", {}, "is no UTF-8 at byte 0"),
    (b"a\0b\n", {}, "holds a zero byte"),
    (b"\n\n", {}, "has no line for train"),
    (b"a\n", {"length": 0}, "length=0"),
    (b"a\n", {"example": "word"}, "example='word'"),
    (b"a\n", {"split": {}}, "split: must have one of"),
    (b"a\n", {"split": {"test_file": "absent.txt"}}, "cannot be read (No such file"),
    (b"a\n", {"tokenizer": 3}, "tokenizer=3: must be the path"),
  ],
)
def test_a_wrong_text_or_declaration_is_one_line(tmp_path, content, change, says):
  (tmp_path / "a.txt").write_bytes(content)
  assert says in refused(text_files.text_file, tmp_path / "a.txt", lines(**change))


@hypothesis.settings(max_examples=60, derandomize=True)
@hypothesis.given(
  kind=st.sampled_from([image_folders.parse, text_files.parse]),
  source=st.dictionaries(
    st.sampled_from(["classes", "height", "width", "channels", "split", "example", "length"]),
    st.none() | st.integers(-2, 9) | st.text(max_size=3) | st.just({"test_share": 0.5})
    | st.just(["a"]) | st.sampled_from(["folders", "line"]),
  ),
)  # fmt: skip
def test_any_declaration_is_read_or_refused_in_one_line(kind, source):
  try:
    kind(json.loads(json.dumps(source)))
  except UserError as error:
    assert len(str(error).splitlines()) == 1


def test_a_declaration_of_data_that_take_none_is_refused():
  assert "is of tables" in refused(data.load, "digits", declaration={})
