"""Data sets that tensorflow-datasets (TFDS) has written to disk, read without TensorFlow.

Reading needs array_record files (`python -m launch.prepare` writes them), and Pillow for images.
Nothing here downloads data.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dpjax import optional, validate
from dpjax.data import text
from dpjax.data.dataset import Dataset, from_arrays, in_files
from dpjax.data.npz import in_data, undeclared_classes
from dpjax.data.rows import stay_in_files
from dpjax.validate import UserError
from dpjax.zoo.datasets.published import PUBLISHED

# Names of data sets that errors and lists display.
COMMON = tuple(PUBLISHED)
# Number of records decoded at once, which bounds the memory of decoded Python objects.
_CHUNK = 1_000
# Keys of features.json whose value names a Python class.
_CLASS_KEYS = ("pythonClassName", "python_class_name")
_OWN_FEATURE = re.compile(r"tensorflow_datasets\.core\.features\.\w+\.\w+")
_NAME = re.compile(r"(?P<folder>\w+(/[\w.+-]+)?)(:\d+\.\d+\.\d+)?")


def data_root(data_dir: str | os.PathLike[str] | None = None) -> pathlib.Path:
  """Returns the folder of the data: `data_dir`, else $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
  chosen = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
  return pathlib.Path(os.path.expanduser(chosen))


def is_prepared(name: str, root: pathlib.Path) -> bool:
  """Returns whether TFDS has written some version of the data set `name` under `root`."""
  match = _NAME.fullmatch(name)
  if not match:
    return False
  infos = (root / match["folder"]).rglob("dataset_info.json")
  # TFDS renames the folder at the end, so a stopped download leaves "incomplete" in its name.
  return any("incomplete" not in info.parent.name for info in infos)


def check_known(name: str) -> None:
  """Raises UserError, with the nearest name, unless dpjax or TFDS knows the data set `name`. The
  check needs no network."""
  # TFDS is imported here, because its import is slow.
  with optional.require_extra():
    import tensorflow_datasets as tfds

  match = _NAME.fullmatch(name)
  known = {*COMMON, *tfds.list_builders(with_community_datasets=False)}
  if match and match["folder"].partition("/")[0] in known:
    return
  hint = validate.did_you_mean(name.lower(), known)
  raise UserError(
    f"unknown data set{hint}; one of {validate.join_words(COMMON, 60)}, another "
    "tensorflow-datasets name, a path that ends in .csv, .parquet, .npz or a slash, or "
    "package.module:name (docs/your_data.md)",
    field="name",
    value=name,
  )


def prepare_command(name: str, root: pathlib.Path) -> str:
  """Returns the command line that prepares a data set where `load` looks for it."""
  return f"python -m launch.prepare --dataset={name} --data_dir={shlex.quote(str(root))}"


def _is_worth_saying(record: logging.LogRecord) -> bool:
  # TFDS advises to install OpenCV. Pillow is used in its place, so the advice is hidden.
  advice = "OpenCV is not installed" in record.getMessage()
  return record.levelno >= logging.WARNING and not advice


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Hides the progress messages of TFDS, which go through absl's logger; warnings stay visible."""
  from absl import logging as absl_logging

  logger = absl_logging.get_absl_logger()
  logger.addFilter(_is_worth_saying)
  try:
    yield
  finally:
    logger.removeFilter(_is_worth_saying)


@contextlib.contextmanager
def _one_line_errors(name: str, root: pathlib.Path) -> Iterator[None]:
  """Turns any error in the `with` block into a UserError of one line. TFDS and its libraries raise
  many types of errors."""
  try:
    with in_data(name):
      yield
  except UserError:
    raise
  except Exception as error:
    raise UserError(
      f"what lies in {root} cannot be read: {validate.first_line(error)}; prepare it "
      "again, in an empty DIR, with: "
      f"{prepare_command(name, pathlib.Path('DIR'))}",
      field="name",
      value=name,
    ) from error


def check_features(name: str, root: pathlib.Path) -> None:
  """Raises UserError if a features.json names a Python class from outside
  `tensorflow_datasets.core.features`.

  TFDS would import the module of the class, which runs code of the file's author.
  """
  match = _NAME.fullmatch(name)
  folder = root / (match["folder"] if match else name)
  for path in sorted(folder.rglob("features.json")):
    validate.no_pipe(path, str(path))
    for named in _classes_named(json.loads(path.read_text(encoding="utf-8"))):
      if not _OWN_FEATURE.fullmatch(str(named)):
        raise UserError(
          f"{str(path)[-120:]} names the class {str(named)[:80]!r}, whose module would be run; "
          "must be of tensorflow_datasets.core.features"
        )


def _classes_named(data: Any) -> Iterator[Any]:
  """Yields every Python class named in JSON data of features, in the current and older layouts.

  One older layout holds JSON as text, which is parsed, too.
  """
  if isinstance(data, str) and data.lstrip()[:1] in ("{", "["):
    with contextlib.suppress(ValueError):
      yield from _classes_named(json.loads(data))
  elif isinstance(data, list):
    for entry in data:
      yield from _classes_named(entry)
  elif isinstance(data, dict):
    for key, value in data.items():
      # In an older layout the key is "type". A feature may be called "type", too, but its value is
      # a mapping.
      if key in _CLASS_KEYS or (key == "type" and not isinstance(value, dict)):
        yield value
      yield from _classes_named(value)


def _open(name: str, root: pathlib.Path) -> Any:  # {split: source}
  with optional.require_extra():
    import tensorflow_datasets as tfds

  check_features(name, root)
  return tfds.data_source(name, data_dir=str(root), download=False)


def split_sizes(name: str, root: pathlib.Path) -> dict[str, int]:
  """Returns {split: number of examples}, read from the files themselves."""
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
  """Returns the names (input, label): the supervised keys of TFDS if there are two, else "image" or
  "text", and "label". Raises UserError if the features lack these, too."""
  keys = info.supervised_keys
  if isinstance(keys, tuple) and len(keys) == 2 and all(isinstance(k, str) for k in keys):
    return keys
  inputs = [key for key in ("image", "text") if key in info.features]
  if inputs and "label" in info.features:
    return inputs[0], "label"
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


def stored_features(records: Iterable[bytes]) -> Iterator[Mapping[str, Any]]:
  """Parses stored tf.train.Examples, and yields for each one a mapping from name to feature."""
  # The module is imported here, because its import is slow.
  with optional.require_extra():
    from tensorflow_datasets.proto import tf_example_pb2

  parse = tf_example_pb2.Example.FromString  # pyright: ignore[reportAttributeAccessIssue]
  return (parse(record).features.feature for record in records)


def stored_values(feature: Any) -> Any:
  """Returns the values of a feature of any type, numbers or text."""
  return getattr(feature, str(feature.WhichOneof("kind"))).value


class _Records:
  """Reads the inputs of a split, and decodes them as tensorflow-datasets does.

  It is several times faster than the reader of tensorflow-datasets, which decodes every feature of
  a record.
  """

  def __init__(self, source: Any, key: str, max_length: int, errors: Callable[[], Any]):
    self._records = source.data_source
    self._key = key
    self._errors = errors
    self._feature = source.dataset_info.features[key]
    self._decode = _decoder(source[0][key], max_length)
    self._paths = source.dataset_info.splits[source.split].filepaths
    self._known = self._identity()

  def _identity(self) -> list[tuple[int, ...]]:
    stats = [os.stat(path) for path in self._paths]
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]

  def __len__(self) -> int:
    return len(self._records)

  def parts(self) -> list[np.ndarray]:
    """Returns the places of all records, in groups of at most `_CHUNK`."""
    return np.split(np.arange(len(self)), range(_CHUNK, len(self), _CHUNK))

  def examples(self, places: np.ndarray) -> Iterator[Any]:
    """Yields the features of the records at `places`, as they are stored."""
    return stored_features(self._records.__getitems__(places.tolist()))

  def read(self, places: np.ndarray) -> np.ndarray:
    with _quiet(), self._errors():
      stored = (example[self._key].bytes_list.value[0] for example in self.examples(places))
      decoded = self._decode([self._feature.decode_example_np(value) for value in stored])
      # Files are checked for changes after the read, so that data from changed files are not used.
      if self._identity() != self._known:
        raise UserError(
          "its files have changed since they were opened; a run is bound to its data, bring "
          "them back"
        )
    return decoded

  def columns(self, *keys: str) -> tuple[list[Any], ...]:
    """Returns a list of stored values for each key, with one number or text for each record. All
    keys are read in one pass."""
    values_of_keys: tuple[list[Any], ...] = tuple([] for _ in keys)
    for places in self.parts():
      for example in self.examples(places):
        for key, values in zip(keys, values_of_keys):
          values.append(stored_values(example[key])[0])
    return values_of_keys


def _read_all(
  name: str,
  root: pathlib.Path,
  max_length: int,
  declared: int | None,
  resident: bool | None,
  *field: str,
) -> tuple[tuple[Dataset, list], tuple[Dataset, list]]:
  """Returns (train, values) and (test, values), with the values of `field` in the split, or [] if
  no field is given."""
  sources = _pick_splits(_open(name, root))
  info = sources[0].dataset_info
  keys = _pick_keys(info)
  for name_of_field in field:
    if name_of_field not in info.features:
      hint = validate.did_you_mean(name_of_field, info.features)
      has = ", ".join(sorted(info.features))
      raise UserError(f"has no field {name_of_field!r}{hint}; must be one of {has}")
  # The files may declare the number of classes: their description is public.
  num_classes = getattr(info.features[keys[1]], "num_classes", None) or declared
  if num_classes is None:
    raise undeclared_classes(f"{name!r:.80} declares none")
  errors = functools.partial(_one_line_errors, name, root)
  records = [_Records(source, keys[0], max_length, errors) for source in sources]
  # The first record determines the type of all records.
  first = records[0].read(np.zeros(1, np.int64))
  is_text = first.dtype == np.int32
  vocab_size = text.VOCAB_SIZE if is_text else None
  parts = []
  for split, part in zip(("train", "test"), records):
    # Labels are read without inputs, since the inputs may stay in their files.
    column, *asked = part.columns(keys[1], *field)
    labels = np.array(column, np.int64)
    others = asked[0] if asked else []
    # Pixels and tokens take 4 bytes each in memory.
    later = stay_in_files(4 * first.size * len(part), resident)
    inputs: Any = part
    if not later:
      inputs = np.concatenate([part.read(places) for places in part.parts()])
    make = in_files if later else from_arrays
    dataset = make(
      inputs,
      labels,
      split=split,
      num_classes=num_classes,
      vocab_size=vocab_size,
      name=name,
    )
    parts.append((dataset, others))
  return parts[0], parts[1]


def load_prepared(
  name: str,
  root: pathlib.Path,
  *,
  max_length: int,
  num_classes: int | None = None,
  resident: bool | None = True,
) -> tuple[Dataset, Dataset]:
  """Loads (train, test) of a prepared data set. The caller must have checked `is_prepared`.

  Args:
    resident: as in `data.load`.

  Raises:
    UserError: one line: the files are damaged or of another format; the features are not an
      image or a text with an integer label; or neither the files nor `num_classes` declare the
      number of classes.
  """
  with _quiet(), _one_line_errors(name, root):
    (train, _), (test, _) = _read_all(name, root, max_length, num_classes, resident)
  return train, test


def load_prepared_fields(
  name: str,
  root: pathlib.Path,
  field: str,
  *,
  max_length: int,
  num_classes: int | None = None,
) -> tuple[tuple[Dataset, list], tuple[Dataset, list]]:
  """Loads ((train, values), (test, values)) as `load_prepared` does, with the values of `field` in
  each split."""
  with _quiet(), _one_line_errors(name, root):
    return _read_all(name, root, max_length, num_classes, True, field)
