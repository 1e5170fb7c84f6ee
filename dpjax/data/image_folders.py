"""Folders of images: one folder for each class, PNG or JPEG files of a declared size.

    scans/declaration.toml
    scans/train/healthy/0001.png      with split = "folders"
    scans/test/healthy/0907.png

A declaration is a dict, or a TOML or JSON file. Its keys:

- `classes`: names of the folders, in the order of the labels.
- `height`, `width`: size of the images.
- `channels`: 1 (grey) or 3 (colours).
- `resize`: whether images of another size are resized; by default they are refused.
- `split`: "folders", or a dict of `test_share` and `salt`. With the dict, a hash of the file's path
  (healthy/0001.png) chooses the split, and the folders of the classes lie in scans/ itself.
- `num_examples`: a public number near the number of training images.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dpjax import optional, validate
from dpjax.data import table_declaration, tables
from dpjax.data.dataset import Dataset, from_arrays, in_files
from dpjax.data.rows import stay_in_files
from dpjax.validate import UserError, Verbatim

DECLARATION = "declaration.toml"
_SUFFIXES = (".png", ".jpg", ".jpeg")
_KEYS = (
  "classes", "height", "width", "channels", "resize", "split", "num_examples",
)  # fmt: skip
# Largest number of pixels of an image before it is resized. It stops small malicious files that
# decode to huge images.
_MOST_PIXELS = 2**27
# Pillow's pixel modes that convert to grey or RGB without a change of range. Images of other modes,
# for example of 16 bits, are refused.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")


class Images(NamedTuple):
  """Everything that is public about a folder of images."""

  classes: tuple[str, ...]
  height: int
  width: int
  channels: int
  resize: bool = False
  test_share: float | None = None  # None: folders train and test
  salt: int = 0
  num_examples: int | None = None


def parse(source: object) -> Images:
  """Returns the declaration that a dict holds. Raises UserError that names the wrong key.

  >>> parse({"classes": ["cat", "dog"], "height": 8, "width": 8, "channels": 1,
  ...        "split": "folders"}).resize
  False
  """
  keys = table_declaration.mapping(source, "", _KEYS)
  for name in ("height", "width", "channels", "split", "classes"):
    if name not in keys:
      raise UserError("must be declared", field=name)
  split = keys.pop("split")
  way: dict[str, Any] = {}
  if split != "folders":
    way = table_declaration.mapping(split, "split", ("test_share", "salt"))
    table_declaration.check_hashed(way)
  sizes = {name: keys[name] for name in ("height", "width")}
  validate.integer_in(1, 2**14, **sizes)
  validate.one_of((1, 3), channels=keys["channels"])
  if not isinstance(keys.get("resize", False), bool):
    raise UserError("must be true or false", field="resize", value=keys["resize"])
  if keys.get("num_examples") is not None:
    validate.integer_at_least(1, num_examples=keys["num_examples"])
  classes = table_declaration.texts(keys.pop("classes"), "classes")
  for name in classes:
    if pathlib.PurePath(name).name != name or name == "..":
      raise UserError("must be names of folders", field="classes", value=name)
  return Images(classes=classes, **keys, **way)


def is_image_folder(path: pathlib.Path, declaration: tables.Declared = None) -> bool:
  """Returns whether a folder is read as images: a declaration is given, or lies in the folder."""
  return declaration is not None or (path / DECLARATION).is_file()


def image_folder(
  path: str | os.PathLike[str],
  declaration: str | os.PathLike[str] | Mapping[str, Any] | None = None,
  *,
  resident: bool | None = True,
) -> tuple[Dataset, Dataset]:
  """Reads (train, test) from class folders: x float32 [n, height, width, channels] in [0, 1].

  Args:
    path: path of the folder. Its files are taken class by class, in the order of their names;
      hidden files are left out.
    declaration: public facts about the folder (see the module): a dict or the path of a file.
      None: declaration.toml in the folder.
    resident: place of the images. True: in memory. False: in their files, each of which is decoded
      when its image is drawn. None: a split stays in its files if it takes more than a quarter of
      the memory.

  Each image is converted independently of the other images. Transparency is dropped.

  Raises:
    UserError: one line that names the file, or the key of the declaration.
  """
  path = pathlib.Path(path)
  source = path / DECLARATION if declaration is None else declaration
  declared = table_declaration.parse_declaration(source, parse)
  with validate.about("name", Verbatim(f"'{path}/'")):
    files = _files(path, declared)
    parts = [_part(path, files[split], declared, split, resident) for split in files]
  return parts[0], parts[1]


def _files(path: pathlib.Path, declared: Images) -> dict[str, list[tuple[str, int]]]:
  """Returns (path in the folder, class number) of each image, by split."""
  by_split: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
  if declared.test_share is None:
    _only(path, (*by_split, DECLARATION))
    for split, files in by_split.items():
      files += _of_classes(path, split, declared)
    return by_split
  _only(path, (*declared.classes, DECLARATION))
  for name, label in _of_classes(path, "", declared):
    share = tables.hashed_text(name, declared.salt)
    by_split["test" if share < declared.test_share else "train"].append((name, label))
  return by_split


def _only(path: pathlib.Path, known: tuple[str, ...]) -> None:
  """Raises UserError for unexpected or missing entries of a folder."""
  try:
    there = {each.name for each in os.scandir(path) if not each.name.startswith(".")}
  except OSError as error:
    raise UserError(f"cannot be read as a folder ({error.strerror})") from error
  extra = sorted(there - set(known))
  if extra:
    raise UserError(f"holds {extra[0]!r:.60}; must be of {', '.join(known)}")
  absent = [name for name in known if name not in there and name != DECLARATION]
  if absent:
    raise UserError(f"has no folder {absent[0]!r:.60}")


def _of_classes(path: pathlib.Path, split: str, declared: Images) -> list[tuple[str, int]]:
  if split:
    _only(path / split, declared.classes)
  labelled = []
  for label, name in enumerate(declared.classes):
    folder = pathlib.PurePath(split, name)
    try:
      there = sorted(os.listdir(path / folder))
    except OSError as error:
      raise UserError(
        f"cannot be read as a folder ({error.strerror})", field=str(folder)
      ) from error
    for each in there:
      if each.startswith("."):
        continue
      if not each.lower().endswith(_SUFFIXES):
        raise UserError("must be a .png or .jpg file", field=str(folder / each))
      labelled.append((str(folder / each), label))
  return labelled


class _Source:
  """Source that reads images by place, as uint8 [k, height, width, channels]."""

  def __init__(self, path: pathlib.Path, names: list[str], declared: Images):
    self._path = path
    self._names = names
    self._declared = declared

  def __len__(self) -> int:
    return len(self._names)

  def read(self, places: np.ndarray) -> np.ndarray:
    declared = self._declared
    shape = (len(places), declared.height, declared.width, declared.channels)
    out = np.empty(shape, np.uint8)
    for row, place in zip(out, places):
      row[...] = _decode(self._path, self._names[place], declared)
    return out


def _part(
  path: pathlib.Path,
  files: list[tuple[str, int]],
  declared: Images,
  split: str,
  resident: bool | None,
) -> Dataset:
  if not files:
    raise UserError(f"has no image for {split}")
  source = _Source(path, [name for name, _ in files], declared)
  y = np.array([label for _, label in files])
  common: dict[str, Any] = {
    "num_classes": len(declared.classes),
    "name": path.name,
    "split": split,
    "nominal_size": declared.num_examples if split == "train" else None,
  }
  size = 4 * len(files) * declared.height * declared.width * declared.channels
  if stay_in_files(size, resident):
    dataset = in_files(source, y, **common)
  else:
    dataset = from_arrays(source.read(np.arange(len(files))), y, **common)
  return dataclasses.replace(dataset, classes=declared.classes)


def _decode(path: pathlib.Path, name: str, declared: Images) -> np.ndarray:
  """Decodes one file to uint8 pixels [height, width, channels]."""
  # Pillow is imported here, because it is optional and slow to import.
  with optional.require_extra():
    from PIL import Image

  size = (declared.width, declared.height)
  validate.no_pipe(path / name, name)
  try:
    with Image.open(path / name, formats=("PNG", "JPEG")) as image:
      # `open` reads only the header, so the size is checked before any pixel is decoded.
      if image.size != size and not declared.resize:
        raise UserError(
          f"is {image.size[0]} x {image.size[1]} pixels, not {size[0]} x {size[1]}; "
          "declare resize = true, or scale it",
          field=name,
        )
      if image.size[0] * image.size[1] > _MOST_PIXELS:
        raise UserError(f"has more than {_MOST_PIXELS} pixels", field=name)
      if image.mode not in _MODES:
        raise UserError(
          f"has pixels of kind {image.mode!r}; must have 8 bits each", field=name
        )
      pixels = image.convert("L" if declared.channels == 1 else "RGB")
      if pixels.size != size:
        pixels = pixels.resize(size, Image.Resampling.BILINEAR)
      return np.asarray(pixels).reshape(size[1], size[0], declared.channels)
  except UserError:
    raise
  # Pillow raises these errors, SyntaxError included, for damaged or huge files.
  except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
    raise UserError(
      f"is no readable image ({validate.first_line(error)})", field=name
    ) from error
