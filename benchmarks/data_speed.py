"""Steps and memory by the number of records, in memory and read from files as they are drawn.

  python -m benchmarks data --folder=made --records=10000,1000000

It writes data.csv. A million images take .8 GB as arrays, and the larger set must fit into memory.

Records are made by a program, in a folder that is named: `arrays` (28x28 bytes in .npy files),
`images` (PNGs in array_record files, as tensorflow-datasets prepares them) or `text` (lines of up
to 64 bytes in array_record files). Times are of blocks of steps in turns, each with a reader
of its own that starts with the block, so that nothing is read in anybody else's time. Peak memory
is that of a whole run of a few steps in a fresh process.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from benchmarks import alone, options
from benchmarks import entries as entries_file
from dpjax import validate
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  TrainConfig,
)
from dpjax.experiments.run import loop, provenance
from dpjax.gradients.ghost.explain import aligned
from dpjax.validate import UserError

KINDS = ("arrays", "images", "text")
_TEST = 1000  # records of the test split
_BATCH = 512  # expected
_CHUNK = 10_000  # records made at a time
_BLOCK = 8  # steps timed together
_SHARD = 100_000  # records in a file
_FEATURES = "tensorflow_datasets.core.features."


class Entry(NamedTuple):
  """One set, in one place."""

  kind: str
  records: int
  place: str  # memory | files
  step_s: float  # the median of its blocks, a step
  ratio: float  # to memory
  peak_rss_bytes: int | None


# --- records made by a program


def make(folder: pathlib.Path, kind: str, records: int) -> TrainConfig:
  """Writes the records, unless they are there; the run on them."""
  validate.one_of(KINDS, workloads=kind)
  name = f"{kind}_{records}"
  if not (folder / name / "done").exists():
    splits = {"train": records, "test": _TEST}
    (_arrays if kind == "arrays" else _prepared)(folder, name, kind, splits)
    (folder / name / "done").touch()
  return _config(folder, name, kind, records)


def _config(folder: pathlib.Path, name: str, kind: str, records: int) -> TrainConfig:
  text = kind == "text"
  return TrainConfig(
    data=DataConfig(
      name=f"{folder / name}/" if kind == "arrays" else name,
      data_dir=None if kind == "arrays" else str(folder),
      max_length=64 if text else 256,
      num_examples=records,
    ),
    model=ModelConfig("transformer", dict(_TRANSFORMER)) if text else ModelConfig("cnn"),
    privacy=DpSgd(
      epsilon=None, noise_multiplier=4.0, sampling_prob=min(1.0, _BATCH / records)
    ),
    num_steps=1000,  # an epsilon that is small: a large one asks for batches of many more slots
    microbatch_size=None if text else 128,
  )


_TRANSFORMER = {"features": 64, "num_layers": 1, "num_heads": 2, "max_length": 64}


def _made(kind: str, count: int, seed: int) -> Iterator[tuple[Any, np.ndarray]]:
  """(inputs, labels) by chunks: images whose brightness tells the class, or lines."""
  for start in range(0, count, _CHUNK):
    rng = np.random.default_rng([seed, start])
    size = min(_CHUNK, count - start)
    y = rng.integers(0, 10, size)
    if kind == "text":
      lengths = rng.integers(16, 65, size)
      text = rng.integers(97, 123, (size, 64), np.uint8).tobytes()
      lines = [text[64 * i : 64 * i + length] for i, length in enumerate(lengths)]
      yield lines, y
    else:
      x = rng.integers(0, 100, (size, 28, 28), np.uint8) + 15 * y[:, None, None]
      yield x.astype(np.uint8), y


def _arrays(folder: pathlib.Path, name: str, kind: str, splits: dict[str, int]) -> None:
  (folder / name).mkdir(parents=True, exist_ok=True)
  opened = np.lib.format.open_memmap
  for seed, (split, count) in enumerate(splits.items()):
    x = opened(folder / name / f"x_{split}.npy", "w+", np.uint8, (count, 28, 28))
    y = opened(folder / name / f"y_{split}.npy", "w+", np.int32, (count,))
    done = 0
    for images, labels in _made(kind, count, seed):
      x[done : done + len(labels)], y[done : done + len(labels)] = images, labels
      done += len(labels)
    x.flush()
    y.flush()
  np.save(folder / name / "num_classes.npy", 10)


def _prepared(folder: pathlib.Path, name: str, kind: str, splits: dict[str, int]) -> None:
  """As tensorflow-datasets lays a data set out: two JSON files and the records."""
  from array_record.python.array_record_module import ArrayRecordWriter
  from tensorflow_datasets.proto import tf_example_pb2

  place = folder / name / "1.0.0"
  place.mkdir(parents=True, exist_ok=True)
  key = "text" if kind == "text" else "image"
  example: Any = tf_example_pb2.Example  # pyright: ignore[reportAttributeAccessIssue]
  infos = []
  for seed, (split, count) in enumerate(splits.items()):
    shards = math.ceil(count / _SHARD)
    lengths = [min(_SHARD, count - i * _SHARD) for i in range(shards)]
    stored = (
      (x if kind == "text" else _png(x), int(label))
      for inputs, labels in _made(kind, count, seed)
      for x, label in zip(inputs, labels)
    )
    for shard, length in enumerate(lengths):
      file = place / f"{name}-{split}.array_record-{shard:05}-of-{shards:05}"
      writer = ArrayRecordWriter(str(file), "group_size:1")
      for _ in range(length):
        value, label = next(stored)
        record = example()
        record.features.feature[key].bytes_list.value.append(value)
        record.features.feature["label"].int64_list.value.append(label)
        writer.write(record.SerializeToString())
      writer.close()
    infos.append(
      {
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        "name": split,
        "numBytes": "1",
        "shardLengths": [str(length) for length in lengths],
      }
    )
  _describe(place, name, key, infos)


def _png(image: np.ndarray) -> bytes:
  from PIL import Image

  stream = io.BytesIO()
  Image.fromarray(image).save(stream, "PNG", compress_level=1)
  return stream.getvalue()


def _describe(place: pathlib.Path, name: str, key: str, splits: list[Any]) -> None:
  sides = {"dimensions": ["28", "28", "1"]}
  inputs = {
    "image": {
      "pythonClassName": f"{_FEATURES}image_feature.Image",
      "image": {"dtype": "uint8", "shape": sides},
    },
    "text": {"pythonClassName": f"{_FEATURES}text_feature.Text", "text": {}},
  }
  label = {
    "pythonClassName": f"{_FEATURES}class_label_feature.ClassLabel",
    "classLabel": {"numClasses": "10"},
  }
  features = {
    "pythonClassName": f"{_FEATURES}features_dict.FeaturesDict",
    "featuresDict": {"features": {key: inputs[key], "label": label}},
  }
  info = {"name": name, "version": "1.0.0", "fileFormat": "array_record"}
  info |= {"moduleName": "made", "splits": splits}
  (place / "features.json").write_text(json.dumps(features))
  (place / "dataset_info.json").write_text(json.dumps(info))


# --- what they cost


def measure(
  folder: pathlib.Path,
  kind: str,
  sizes: Sequence[int],
  *,
  repeats: int = 5,
  fresh_process: bool = True,
) -> list[Entry]:
  """Sets of one kind: for each size a step from memory and from files.

  Args:
    folder: where the records are made; they stay there.
    repeats: blocks of steps that are timed, in turns.
    fresh_process: also runs each in a fresh process, for its peak memory.
  """
  entries = []
  for records in sizes:
    config = make(folder, kind, records)
    peaks = {
      # Of a whole run of 2 blocks of steps; None where it failed.
      place: alone.run(__name__, config.data.name, config.data.data_dir, place).printed
      if fresh_process
      else None
      for place in ("memory", "files")
    }
    times = _timed(config, repeats)
    for place, seconds in times.items():
      ratio = seconds / times["memory"]
      entries.append(Entry(kind, records, place, seconds, ratio, peaks[place]))
  return entries


def _placed(config: TrainConfig, place: str) -> TrainConfig:
  return dataclasses.replace(config, resident=place == "memory")


def _blocks(config: TrainConfig) -> Callable[[], float]:
  """Does one more block of steps; seconds of one of them."""
  run = build.assemble(config)
  step_fn = jax.jit(run.algorithm.step, donate_argnums=0)
  state = None
  start = 0

  def block() -> float:
    nonlocal state, start
    state = run.algorithm.init(run.params) if state is None else state
    batches = build.batches(run, start)
    state, _ = jax.block_until_ready(step_fn(state, next(batches)))  # the reader is at work
    began = time.perf_counter()
    for _ in range(_BLOCK):
      state, _ = jax.block_until_ready(step_fn(state, next(batches)))
    seconds = time.perf_counter() - began
    batches.close()
    start += 1 + _BLOCK
    return seconds / _BLOCK

  return block


def _timed(config: TrainConfig, repeats: int) -> dict[str, float]:
  blocks = {place: _blocks(_placed(config, place)) for place in ("memory", "files")}
  for block in blocks.values():
    block()  # compiles
  times: dict[str, list[float]] = {place: [] for place in blocks}
  for _ in range(repeats):
    for place, block in blocks.items():
      times[place].append(block())
  return {place: statistics.median(seconds) for place, seconds in times.items()}


def _run_alone(name: str, folder: str | None, place: str) -> int:
  path = pathlib.Path(name) if folder is None else pathlib.Path(folder) / name
  kind, _, records = path.name.rpartition("_")
  config = _placed(_config(path.parent, path.name, kind, int(records)), place)
  config.num_steps = 2 * _BLOCK
  with tempfile.TemporaryDirectory() as workdir:
    loop.train(config, workdir)
  return provenance.peak_rss()


def table(entries: Sequence[Entry]) -> str:
  """Aligned text, one line per entry.

  >>> print(table([Entry("arrays", 10000, "files", 0.12, 1.02, 9 * 10**8)]))
  kind    records  place  s / step  ratio  peak memory
  arrays  10000    files  0.120     1.02   900 MB
  """
  rows = [("kind", "records", "place", "s / step", "ratio", "peak memory")]
  for entry in entries:
    peak = entry.peak_rss_bytes
    shown = "-" if peak is None else f"{peak / 1e6:.0f} MB"
    numbers = (f"{entry.step_s:.3f}", f"{entry.ratio:.2f}", shown)
    rows.append((entry.kind, str(entry.records), entry.place, *numbers))
  return aligned(rows)


def write(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """`out`/data.csv."""
  entries_file.write(out / "data.csv", entries)


def define() -> None:
  """Defines the flags."""
  flags.DEFINE_string("folder", None, "Where the records are made; they stay there.")
  options.define_names("workloads", KINDS, ["arrays"])
  flags.DEFINE_list("records", ["10000", "1000000"], "Sizes of the sets.")
  options.define_repeats()
  options.define_peak_rss()


def parts(values: flags.FlagValues) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of each part that the flags ask for."""
  if not values.folder:
    raise UserError("must be given: where a million records are made", field="folder")
  validate.folder(folder=values.folder)
  sizes = options.counts("records")
  for kind in options.names("workloads", KINDS):
    yield (
      kind,
      measure(
        pathlib.Path(values.folder),
        kind,
        sizes,
        repeats=values.repeats,
        fresh_process=values.peak_rss,
      ),
    )


if __name__ == "__main__":
  print(_run_alone(*alone.ordered()))
