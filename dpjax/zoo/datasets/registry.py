"""Loading of (train, test) of a data set by its name."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any

from dpjax import data, names, validate
from dpjax.data.dataset import Dataset
from dpjax.validate import UserError
from dpjax.zoo.datasets.published import (
  PUBLISHED,
  as_published_test,
  nominal_size,
)

if TYPE_CHECKING:
  from dpjax.data import tables

# Ends of the names of tables and of files of text.
_TABLES = (".csv", ".tsv", ".parquet")
_TEXT = ".txt"


def load(
  name: str | os.PathLike[str],
  data_dir: str | os.PathLike[str] | None = None,
  *,
  max_length: int = 256,
  num_classes: int | None = None,
  num_examples: int | None = None,
  resident: bool | None = True,
  declaration: tables.Declared = None,
) -> tuple[Dataset, Dataset]:
  """Loads (train, test): x is float32 (images [n, H, W, C] in [0, 1]) or int32 tokens [n, T].

  Args:
    name: name or path of the data set, one of
      - "digits" (embedded: works offline on a fresh machine), or another name of `published`;
      - "random_process" (synthetic images, see `load_random_process`);
      - "shakespeare" (an error says how to get it; `shakespeare_federation` keeps the roles
        apart), "shakespeare_lines", "shakespeare_roles" and "shakespeare_public_lines"
        (`datasets.shakespeare_lines`);
      - "mnist", "fashion_mnist", "cifar10" or any tensorflow-datasets name with an image or a
        text and a label, prepared beforehand;
      - a path that ends in ".npz" (`npz.load_npz`), in ".csv", ".tsv" or ".parquet"
        (`tables.table`), or in ".txt" (`text_files.text_file`);
      - a path that ends in "/": a folder of images (`image_folders.image_folder`), or of the
        arrays of an .npz (`npz.load_folder`);
      - `package.module:name`, a user's function of no arguments that returns (train, test).
    data_dir: folder of prepared data; None: $TFDS_DATA_DIR, else ~/tensorflow_datasets. A relative
      path in `name` begins in `data_dir`, or in the current folder if `data_dir` is None.
    max_length: number of bytes kept of each text of prepared data (padded with 0).
    num_classes: number of classes, for data that do not declare it. For other data it must be None
      or the declared number. It is public, and never counted from the labels.
    num_examples: declared number of training examples (`nominal_size`), for data that do not
      declare it. For other data, such as published data, it must be None or the declared number. It
      is public, and never counted from the rows.
    declaration: public facts about a table, a text or a folder of images, as a dict or the
      path of a file. None: the declaration file beside or in the data.
    resident: place of the inputs. True: in memory. False, only for prepared data and folders: in
      their files, which are read on request (`Rows`). None: in the files if that is possible and
      the inputs take more than a quarter of the memory.

  Prepared records come in the order of their files: public and fixed. Nothing is downloaded here.

  Raises:
    UserError: one line: an unknown name (with the nearest known name); missing data (with the
      folder that was searched and the command that prepares the data); a number of classes that
      nobody declares; a number of classes or examples with two different declarations.

  >>> train, test = load("digits")
  >>> train, test
  (Dataset(digits/train: 1437 x (8, 8, 1) float32, 10 classes),
   Dataset(digits/test: 360 x (8, 8, 1) float32, 10 classes))
  """
  if not isinstance(name, str | os.PathLike):
    raise UserError("must be the name of a data set or a path", field="name", value=name)
  name = os.fspath(name)
  validate.integer_at_least(1, max_length=max_length)
  if num_classes is not None:
    validate.integer_at_least(1, num_classes=num_classes)
  if num_examples is not None:
    validate.integer_at_least(1, num_examples=num_examples)
  if declaration is not None and not takes_declaration(name):
    raise UserError(
      "is of tables (.csv, .tsv, .parquet), texts (.txt) and folders of images",
      field="declaration",
      value=declaration,
    )
  train, test = _load(name, data_dir, max_length, num_classes, resident, declaration)
  if num_classes not in (None, train.num_classes):
    raise UserError(
      f"{name!r} declares {train.num_classes}", field="num_classes", value=num_classes
    )
  known = train.nominal_size
  # A user's folder `shakespeare` may hold other texts, whose number is not published.
  user_texts = False
  if name in PUBLISHED and PUBLISHED[name].of_plays:
    from dpjax.zoo.datasets import shakespeare

    user_texts = not shakespeare.are_published(data_dir)
  if known is None and not names.is_path(name) and not user_texts:
    known = nominal_size(name)
  if None not in (num_examples, known) and num_examples != known:
    raise UserError(f"{name!r} declares {known}", field="num_examples", value=num_examples)
  declared = num_examples if known is None else known
  # A user's texts under a published name are no published test set.
  return train.declared(declared), test if user_texts else as_published_test(test, name)


def _load(
  name: str,
  data_dir: str | os.PathLike[str] | None,
  max_length: int,
  num_classes: int | None,
  resident: bool | None,
  declaration: tables.Declared,
) -> tuple[Dataset, Dataset]:
  path = user_path(name, data_dir)
  held = declaration_at(declaration, data_dir)
  # Each reader is imported where its files are read: a run reads data of one kind.
  if name.endswith("/"):
    from dpjax.data import image_folders, npz

    if image_folders.is_image_folder(path, held):
      return image_folders.image_folder(path, held, resident=resident)
    return npz.load_folder(path, num_classes=num_classes, resident=resident)
  row = PUBLISHED.get(name.partition(":")[0])
  one_file = name.endswith(".npz") or takes_declaration(name)
  in_files = (row is None or not row.loader) and not one_file
  if resident is False and (not in_files or names.is_path(name)):
    raise UserError(
      f"{name!r} comes whole into memory; prepared data, and the folder "
      "of an unpacked .npz, whose name ends in '/', are read as they are drawn",
      field="resident",
      value=False,
    )
  if takes_declaration(name):
    return data.table(path, held) if is_table(name) else data.text_file(path, held)
  if name.endswith(".npz"):
    from dpjax.data import npz

    return npz.load_npz(path, num_classes=num_classes)
  if names.is_path(name):
    return _of_user(names.call(name, "data.name"), name)
  if row is not None and row.loader and name in PUBLISHED:
    return row.load()(data_dir) if row.in_folder else row.load()()
  from dpjax.zoo.datasets import prepared

  return prepared.load_prepared(
    name,
    prepared_root(name, data_dir),
    max_length=max_length,
    num_classes=num_classes,
    resident=resident,
  )


def user_path(
  name: str | os.PathLike[str], data_dir: str | os.PathLike[str] | None = None
) -> pathlib.Path:
  """Returns the path of a user's file or folder. A relative path begins in `data_dir`, or without
  it in the current folder."""
  return pathlib.Path(data_dir or ".") / pathlib.Path(os.path.expanduser(name))


def is_table(name: str) -> bool:
  """Returns whether a data name is the path of a table.

  >>> is_table("people.csv"), is_table("people.npz")
  (True, False)
  """
  return name.lower().endswith(_TABLES)


def takes_declaration(name: str) -> bool:
  """Returns whether data of this name may have a declaration of their public facts.

  It is True for every folder, although a folder with the arrays of an .npz needs no declaration.

  >>> [takes_declaration(name) for name in ("a.csv", "a.txt", "scans/", "a.npz", "mnist")]
  [True, True, True, False, False]
  """
  return is_table(name) or name.endswith((_TEXT, "/"))


def declaration_at(
  declaration: tables.Declared, data_dir: str | os.PathLike[str] | None = None
) -> tables.Declared:
  """Returns a dict or None as it is, and a path as `user_path(path, data_dir)`."""
  if isinstance(declaration, str | os.PathLike):
    return user_path(declaration, data_dir)
  return declaration


def prepared_root(
  name: str, data_dir: str | os.PathLike[str] | None = None
) -> pathlib.Path:
  """Returns the folder that holds prepared data sets. Raises UserError if the data set `name` is
  unknown, or is missing there (with the command that prepares it)."""
  from dpjax.zoo.datasets import prepared

  root = prepared.data_root(data_dir)
  if prepared.is_prepared(name, root):
    return root
  prepared.check_known(name)
  raise UserError(
    f"not found in {root} (data_dir=, else $TFDS_DATA_DIR, else "
    "~/tensorflow_datasets); prepare it with: "
    f"{prepared.prepare_command(name, root)}",
    field="name",
    value=name,
  )


def _of_user(answer: Any, name: str) -> tuple[Dataset, Dataset]:
  pair = isinstance(answer, tuple) and len(answer) == 2
  if not pair or not all(isinstance(part, Dataset) for part in answer):
    raise UserError(
      f"must return (train, test), two dpjax.data.Dataset, not {answer!r:.60}; "
      "dpjax.data.from_arrays makes one of arrays (docs/your_data.md has torch, pandas, grain)",
      field="data.name",
      value=name,
    )
  # If x is a dict, arrays of the same name must have the same shape.
  shapes = [
    (part.x.shapes if part.in_columns else part.x.shape[1:], part.num_classes)
    for part in answer
  ]
  if shapes[0] != shapes[1] or not all(map(len, answer)):
    raise UserError(
      "train and test must hold examples of one shape and as many classes",
      field="data.name",
      value=name,
    )
  return answer
