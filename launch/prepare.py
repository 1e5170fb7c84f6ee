"""Downloads a public data set and writes it where `dpjax.data.load` reads it.

  python -m launch.prepare --dataset=mnist --data_dir=$HOME/tensorflow_datasets

This is tensorflow-datasets' own download and its own writer, with array_record files (the
format with random access). Only this command needs TensorFlow and the network:

  pip install -e '.[prepare]'

Training then reads the files without either, here or on another machine that you copy the
folder to. Names: mnist, fashion_mnist, cifar10, imdb_reviews, or any other
tensorflow-datasets name with an image or a text and a label. "digits", "random_process" and
a few more are embedded.

  python -m launch.prepare --dataset=femnist --data_dir=data

fetches a federation instead, as TensorFlow Federated published it: one file, emnist_all.sqlite
for "femnist" (170 MB, unpacked 4.7 GB), or stackoverflow.sqlite for "stackoverflow" (tens of GB).
This needs the network, but no TensorFlow. `configs/fed/femnist.py` reads emnist_all.sqlite.
"""

from __future__ import annotations

import importlib.util
import lzma
import os
import pathlib
import shutil
import urllib.request
from typing import Any

from absl import flags

from dpjax import optional
from dpjax.validate import UserError, first_line
from dpjax.zoo.datasets import prepared, tff
from dpjax.zoo.datasets.published import is_embedded
from launch import app

_PROBE_SECONDS = 20

_DATASET = flags.DEFINE_string(
  "dataset",
  None,
  "Name of the data set: mnist, fashion_mnist, cifar10, femnist, ...",
  required=True,
)
_DATA_DIR = flags.DEFINE_string(
  "data_dir",
  None,
  "Folder to write to; default $TFDS_DATA_DIR, else ~/tensorflow_datasets.",
)


def _require_tensorflow() -> None:
  # TensorFlow prints no messages at its start if this is set before its import.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  if importlib.util.find_spec("tensorflow") is None:
    raise UserError(
      "TensorFlow is needed to write a data set (not to read one) and is not installed: "
      "pip install -e '.[prepare]' in dpjax's clone"
    )


def _require_network(builder: Any) -> None:
  """Raises OSError if the first URL of a data set cannot be reached. TFDS itself would retry for
  minutes."""
  import requests

  for url in list(builder.url_infos or {})[:1]:
    try:
      requests.get(url, stream=True, timeout=_PROBE_SECONDS).close()
    except (requests.ConnectionError, requests.Timeout) as error:
      raise OSError(f"cannot download {url}: {first_line(error)}") from error
    except requests.RequestException:
      # The URL is no web address, or the request was refused. TFDS may still be able to fetch it.
      pass


def _write(name: str, root: pathlib.Path) -> None:
  with optional.require_extra():
    import tensorflow_datasets as tfds

  try:
    builder = tfds.builder(name, data_dir=str(root), file_format="array_record")
    _require_network(builder)
    builder.download_and_prepare()
  # TFDS raises many types of errors, mostly with long messages.
  except Exception as error:
    reason = first_line(error, with_type=True)
    raise OSError(f"could not prepare {name!r} in {root}: {reason}") from error


def prepare(name: str, root: pathlib.Path) -> dict[str, int]:
  """Makes `dpjax.data.load(name, root)` work; returns the size of each split.

  A data set that is there already is left alone. A failed download leaves nothing behind
  that `load` would take for data.
  """
  if not prepared.is_prepared(name, root):
    prepared.check_known(name)
    _require_tensorflow()
    prepared.check_features(name, root)
    _write(name, root)
  return prepared.split_sizes(name, root)


def fetch(name: str, root: pathlib.Path) -> pathlib.Path:
  """Downloads the database `name` of TensorFlow Federated, unpacks it as it arrives, and returns
  its path.

  An existing file is left alone. A failed download leaves nothing that could be read as data.
  """
  path = root / tff.DATABASES[name]
  if path.exists():
    return path
  root.mkdir(parents=True, exist_ok=True)
  unfinished = path.with_suffix(".part")
  url = f"{tff.URL}{path.name}.lzma"
  try:
    with (
      urllib.request.urlopen(url, timeout=_PROBE_SECONDS) as packed,
      lzma.open(packed) as whole,
      unfinished.open("wb") as out,
    ):
      shutil.copyfileobj(whole, out, 2**20)
  except (OSError, EOFError, lzma.LZMAError) as error:
    unfinished.unlink(missing_ok=True)
    reason = first_line(error, with_type=True)
    raise OSError(f"could not fetch {url}: {reason}") from error
  # The file is renamed when it is complete, so that nobody reads a part of it.
  return unfinished.replace(path)


def main() -> None:
  name = _DATASET.value
  root = prepared.data_root(_DATA_DIR.value)
  if is_embedded(name):
    app.refuse_given(["data_dir"], "a data set that is written to a folder")
    print(f"{name} is embedded: nothing to prepare")
    return
  if name in tff.DATABASES:
    path = fetch(name, root)
    print(f"{name}: {path}")
    print(f"train on it with: --config.partition=tff --config.data.name={path.absolute()}")
    return
  with app.giving(dataset="name"):
    sizes = prepare(name, root)
  counts = ", ".join(f"{split} {size}" for split, size in sizes.items())
  print(f"{name}: {counts} examples in {root}")
  print(f"read it with: dpjax.data.load({name!r}, data_dir={str(root)!r})")


if __name__ == "__main__":
  app.run(main)
