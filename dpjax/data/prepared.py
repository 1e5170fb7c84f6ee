"""Data sets that tensorflow-datasets (TFDS) has written to disk, read without TensorFlow.

Reading needs array_record files (`python -m launch.prepare` writes them) and Pillow.
Nothing here downloads.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dpjax import validate
from dpjax.data import text
from dpjax.data.dataset import Dataset, from_arrays
from dpjax.data.dataset import first_line as first_line
from dpjax.data.npz import UNDECLARED
from dpjax.validate import UserError

COMMON = ("digits", "mnist", "fashion_mnist", "cifar10", "shakespeare")
_CHUNK = 1_000  # records decoded at once: bounds the memory of decoded Python objects
_NAME = re.compile(r"(?P<folder>\w+(/[\w.+-]+)?)(:\d+\.\d+\.\d+)?")


def data_root(data_dir: str | os.PathLike[str] | None = None) -> pathlib.Path:
  """Where to look: `data_dir`, else $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
  chosen = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
  return pathlib.Path(os.path.expanduser(chosen))


def is_prepared(name: str, root: pathlib.Path) -> bool:
  """Whether some version of this data set lies under root, as TFDS lays it out."""
  match = _NAME.fullmatch(name)
  if not match:
    return False
  infos = (root / match["folder"]).rglob("dataset_info.json")
  # TFDS renames the folder when it is done, so a killed download leaves an "incomplete" one
  return any("incomplete" not in info.parent.name for info in infos)


def check_known(name: str) -> None:
  """Raises UserError, with the nearest name, unless TFDS knows this data set (offline)."""
  import tensorflow_datasets as tfds  # slow to import

  match = _NAME.fullmatch(name)
  known = {*COMMON, *tfds.list_builders(with_community_datasets=False)}
  if match and match["folder"].partition("/")[0] in known:
    return
  hint = validate.did_you_mean(name.lower(), known)
  raise UserError(
    f"name={name!r}: unknown data set{hint}; one of {', '.join(COMMON)}, another "
    "tensorflow-datasets name, or a path that ends in .npz"
  )


def prepare_command(name: str, root: pathlib.Path) -> str:
  """The command line that prepares a data set where `load` looks for it."""
  return f"python -m launch.prepare --dataset={name} --data_dir={shlex.quote(str(root))}"


def _is_worth_saying(record: logging.LogRecord) -> bool:
  advice = "OpenCV is not installed" in record.getMessage()  # Pillow does as well
  return record.levelno >= logging.WARNING and not advice


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Drops TFDS's notes on its own progress, through absl's logger, while we read."""
  from absl import logging as absl_logging

  logger = absl_logging.get_absl_logger()
  logger.addFilter(_is_worth_saying)
  try:
    yield
  finally:
    logger.removeFilter(_is_worth_saying)


@contextlib.contextmanager
def _one_line_errors(name: str, root: pathlib.Path) -> Iterator[None]:
  """TFDS and the libraries under it raise many types, most of many lines."""
  try:
    yield
  except UserError as error:
    raise UserError(f"name={name!r}: {error}") from error
  except Exception as error:
    raise UserError(
      f"name={name!r}: what lies in {root} cannot be read: {first_line(error)}; prepare it "
      f"again, in an empty DIR, with: {prepare_command(name, pathlib.Path('DIR'))}"
    ) from error


def _open(name: str, root: pathlib.Path) -> Any:  # {split: source}
  import tensorflow_datasets as tfds

  return tfds.data_source(name, data_dir=str(root), download=False)


def split_sizes(name: str, root: pathlib.Path) -> dict[str, int]:
  """How many examples each split holds, read from the files themselves."""
  with _quiet(), _one_line_errors(name, root):
    return {split: len(source) for split, source in _open(name, root).items()}


def _pick_splits(sources: dict[str, Any]) -> tuple[Any, Any]:
  held_out = next((key for key in ("test", "validation") if key in sources), None)
  if "train" not in sources or held_out is None:
    raise UserError(
      "must have a train and a test (or validation) split, has "
      + ", ".join(sorted(sources))
    )
  return sources["train"], sources[held_out]


def _pick_keys(info: Any) -> tuple[str, str]:
  """(input, label): TFDS's own supervised keys where it names two, else the usual names."""
  keys = info.supervised_keys
  if isinstance(keys, tuple) and len(keys) == 2 and all(isinstance(k, str) for k in keys):
    return keys
  found = [key for key in ("image", "text") if key in info.features]
  if found and "label" in info.features:
    return found[0], "label"
  raise UserError(
    "must have an image or a text and a label as features, has "
    + ", ".join(sorted(info.features))
  )


def _images(values: list[Any]) -> np.ndarray:
  shapes = sorted({np.shape(value) for value in values})
  if len(shapes) > 1:
    raise UserError(
      f"images differ in shape ({shapes[0]}, {shapes[-1]}): resize them to one shape, then "
      "use dpjax.data.from_arrays"
    )
  return np.stack(values)


def _decoder(first: Any, max_length: int) -> Callable[[list[Any]], np.ndarray]:
  if isinstance(first, str | bytes):
    return lambda values: text.encode_text(values, max_length=max_length)
  if isinstance(first, np.ndarray) and first.dtype == np.uint8 and first.ndim == 3:
    return _images
  kind = f"{first.dtype} {first.shape}" if hasattr(first, "dtype") else type(first).__name__
  raise UserError(f"the input must be text or a uint8 image [H, W, C], got {kind}")


def _read(source: Any, keys: tuple[str, str], max_length: int) -> tuple[Any, Any]:
  decode = _decoder(source[0][keys[0]], max_length)
  xs, ys = [], []
  for start in range(0, len(source), _CHUNK):
    records = source.__getitems__(list(range(start, min(start + _CHUNK, len(source)))))
    xs.append(decode([record[keys[0]] for record in records]))
    ys.append(np.asarray([record[keys[1]] for record in records]))
  return np.concatenate(xs), np.concatenate(ys)


def _num_classes(info: Any, label_key: str, given: int | None) -> int:
  """As dataset_info.json declares it, which is public."""
  declared = getattr(info.features[label_key], "num_classes", None) or given
  if declared is None:
    raise UserError(f"num_classes: {UNDECLARED}")
  return declared


def _read_all(
  name: str, root: pathlib.Path, max_length: int, given: int | None
) -> tuple[Dataset, Dataset]:
  sources = _pick_splits(_open(name, root))
  info = sources[0].dataset_info
  keys = _pick_keys(info)
  num_classes = _num_classes(info, keys[1], given)
  arrays = [_read(source, keys, max_length) for source in sources]
  is_text = arrays[0][0].dtype == np.int32
  make = functools.partial(
    from_arrays,
    num_classes=num_classes,
    vocab_size=text.VOCAB_SIZE if is_text else None,
    name=name,
  )
  return make(*arrays[0], split="train"), make(*arrays[1], split="test")


def load_prepared(
  name: str, root: pathlib.Path, *, max_length: int, num_classes: int | None = None
) -> tuple[Dataset, Dataset]:
  """(train, test) of a prepared data set; the caller has checked `is_prepared`.

  Raises:
    UserError: one line, where the files are damaged or of another format, or the features
      are not an image or a text with an integer label, or a number of classes that neither
      the files nor `num_classes` declare.
  """
  with _quiet(), _one_line_errors(name, root):
    return _read_all(name, root, max_length, num_classes)
