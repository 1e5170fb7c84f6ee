"""Damaged files for `tests.wrong_inputs`: data that a config names, and folders of runs.

A data set is written soundly, then damaged in one way: values, types, shapes, headers, bytes, or
what stands at its path. A folder of a run that ended, or was stopped, gets one damaged file. Each
is then read as the launcher reads it, which may take it or refuse it in one line.
"""

import contextlib
import io
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import zipfile
from typing import Any

import numpy as np

from configs import quickstart
from configs.attack import poisoning_digits
from configs.fed import quickstart as fed
from configs.radp import quickstart as radp
from configs.secure import sums
from dpjax.experiments.checks import several_runs
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.distillation import DistillationConfig
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.kinds.pate.config import PateConfig
from dpjax.experiments.kinds.relevance import build as relevance
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.kinds.synthesis.config import KernelMean, SynthesisConfig
from dpjax.experiments.plots import redraw
from dpjax.experiments.run import loop
from dpjax.experiments.run.kind import experiment_of
from dpjax.experiments.sweeps import cost, sweep
from dpjax.serving import predictor

_RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"
SECONDS = 30  # of one file, before it counts as a hang
SIDE = 4  # of an image


class Hang(Exception):
  """A file that was not read in time."""


# Called for another type: what takes a set's arrays and a random generator, and returns other
# arrays.
def _value(name, value):
  def change(arrays, rng):
    leaf = arrays[name].astype(np.result_type(arrays[name], type(value)))
    leaf.reshape(-1)[rng.randrange(leaf.size)] = value
    return arrays | {name: leaf}

  return change


def _dtype(name, dtype):
  return lambda arrays, rng: arrays | {name: arrays[name].astype(dtype)}


def _put(name, make):
  return lambda arrays, rng: arrays | {name: make(arrays[name])}


def _without(name):
  return lambda arrays, rng: {key: leaf for key, leaf in arrays.items() if key != name}


_NAMES = ("x_train", "y_train", "x_test", "y_test")
_DTYPES = (
  object,
  "U8",
  "S3",
  "M8[s]",
  bool,
  np.complex64,
  np.float16,
  np.int64,
  np.uint64,
  "V4",
)
_SHAPES = {
  "empty": lambda leaf: leaf[:0],
  "one": lambda leaf: leaf[:1],
  "short": lambda leaf: leaf[:-1],
  "scalar": lambda leaf: np.array(leaf.reshape(-1)[0]),
  "deep": lambda leaf: leaf[..., None],
  "flat": lambda leaf: leaf.reshape(-1),
  "no width": lambda leaf: leaf.reshape(len(leaf), -1)[:, :0],
  "big ends": lambda leaf: leaf.astype(leaf.dtype.newbyteorder(">")),
  "columns first": np.asfortranarray,
  "fields": lambda leaf: np.zeros(len(leaf), [("a", "f4"), ("b", "i4")]),
}
_VALUES = (np.nan, np.inf, -np.inf, -1.0, 1e30, 300.0, 0.5)
ARRAYS = {
  "sound": lambda arrays, rng: arrays,
  "no arrays": lambda arrays, rng: {},
  "other names": lambda arrays, rng: {f"array_{n}": np.zeros(1) for n in range(99)},
  **{f"{n} {v}": _value(n, v) for n in _NAMES for v in _VALUES},
  **{f"{n} {np.dtype(d)}": _dtype(n, d) for n in ("x_train", "x_test") for d in _DTYPES},
  **{f"{n} {np.dtype(d)}": _dtype(n, d) for n in ("y_train", "y_test") for d in _DTYPES},
  **{f"{n} {s}": _put(n, make) for n in _NAMES for s, make in _SHAPES.items()},
  **{f"without {n}": _without(n) for n in _NAMES},
  **{
    f"num_classes {value!r}": lambda arrays, rng, value=value: (
      arrays | {"num_classes": np.asarray(value)}
    )
    for value in (0, -1, 1, 2.5, "ten", [3, 3], np.nan, 10**12, None)
  },
}


def _dataset(rng):
  numbers = np.random.default_rng(rng.randrange(2**32))
  shape = (SIDE, SIDE, 1)
  return {
    "x_train": numbers.random((60, *shape)).astype(np.float32),
    "y_train": np.arange(60) % 3,
    "x_test": numbers.random((30, *shape)).astype(np.float32),
    "y_test": np.arange(30) % 3,
    "num_classes": np.asarray(3),
  }


# --- bytes, and what stands at a path


def _header(path, rng):
  """An array of a thousand million million numbers, or a header that is no header."""
  heads = (
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '<f4', 'shape': (1,)}",
    "(" * 3000,
    "[" + "0," * 9000 + "]",
  )
  text = rng.choice(heads).encode().ljust(118) + b"\n"
  member = (
    b"\x93NUMPY\x01\x00" + struct.pack("<H", min(len(text), 65535)) + text + bytes(64)
  )
  if path.suffix == ".npy":
    path.write_bytes(member)
    return
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("x_train.npy", member)


def _turned(path, rng):
  content = bytearray(path.read_bytes())
  for _ in range(rng.choice((1, 1, 3, 20)) if content else 0):
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
  path.write_bytes(bytes(content))


def _cut(path, rng):
  content = path.read_bytes()
  path.write_bytes(content[: rng.randrange(len(content) + 1)])


def _stretched(path, rng):
  path.write_bytes(path.read_bytes() + bytes(rng.randrange(256) for _ in range(40)))


def _text(path, rng):
  words = (
    "{",
    "[1]",
    "null",
    "\x00",
    "{}",
    '"a"',
    "nan",
    "é",
    "1",
    "[" * 9000,
    "a\nb\nc",
    "{}\n{}",
  )
  path.write_text(rng.choice(words))


def _folder(path, rng):
  path.unlink()
  path.mkdir()
  if rng.random() < 0.5:
    (path / "inside").write_text("a")


def _loop(path, rng):
  path.unlink()
  path.symlink_to(path.name)


def _nowhere(path, rng):
  path.unlink()
  path.symlink_to("/no/such/place")


def _device(path, rng):
  path.unlink()
  path.symlink_to(rng.choice(("/dev/null", "/dev/zero", "/dev/tty", "/")))


def _pipe(path, rng):
  path.unlink()
  os.mkfifo(path)


def _socket(path, rng):
  path.unlink()
  # A path of a socket is short.
  with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as one:
    one.bind(path.name)


def _unreadable(path, rng):
  path.chmod(0)


def _gone(path, rng):
  path.unlink()


BYTES = {
  "emptied": lambda path, rng: path.write_bytes(b""),
  "cut": _cut,
  "turned": _turned,
  "stretched": _stretched,
  "text": _text,
  "header": _header,
  "folder": _folder,
  "loop": _loop,
  "nowhere": _nowhere,
  "device": _device,
  "pipe": _pipe,
  "socket": _socket,
  "unreadable": _unreadable,
  "gone": _gone,
}


def _other_json(path, rng):
  """The same JSON with one value of another type, or one key less; text where it is none."""
  lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
  at = rng.randrange(len(lines)) if lines else 0
  try:
    whole = json.loads(lines[at])
  except (ValueError, IndexError):
    return _text(path, rng)
  holders: list[tuple[Any, Any]] = [(None, None)]
  stack = [whole]
  while stack:
    node = stack.pop()
    pairs = node.items() if isinstance(node, dict) else ()
    pairs = enumerate(node) if isinstance(node, list) else pairs
    for key, child in pairs:
      holders.append((node, key))
      stack.append(child)
  node, key = rng.choice(holders)
  other = rng.choice((None, [], {}, "a", -1, 1e400, True, [[]], "", {"a": 1}, 10**400))
  if node is None:
    whole = other
  elif rng.random() < 0.2:
    del node[key]
  else:
    node[key] = other
  lines[at] = json.dumps(whole)
  path.write_text("\n".join(lines) + "\n")
  return None


def _other_cell(path, rng):
  """The same table with one cell, or one comma, more, less or other."""
  lines = path.read_text().splitlines()
  at = rng.choice((0, rng.randrange(len(lines))))
  cells = lines[at].split(",")
  place = rng.randrange(len(cells))
  words = (
    "",
    "nan",
    "inf",
    "-1",
    "1e400",
    "a",
    '"',
    "a,b",
    "\x00",
    "é" * 400,
    "=1+1",
    "$x_1$",
  )
  if rng.random() < 0.2:
    del cells[place]
  else:
    cells[place] = rng.choice(words)
  lines[at] = ",".join(cells)
  path.write_text("\n".join(lines) + "\n")


# --- who reads them


def readers():
  """Launcher -> what reads a data set at a path, as its runs do."""

  def train(path):
    config = fields.replace_all(TrainConfig(), {"data.name": path})
    return central.load_data(config)

  def federate(path):
    config = fields.replace_all(
      FedConfig(), {"data.name": path, "partition": "iid", "partition.num_clients": 5}
    )
    return federated.load_data(config)

  def relevance_run(path):
    config = fields.replace_all(RelevanceConfig(), {"data.name": path})
    return relevance.load_data(config, {})

  def attack(path):
    config = fields.replace_all(
      AttackConfig(), {"target.data.name": path, "attack": "membership"}
    )
    return experiment_of(config).data()

  return {
    "train": train,
    "federate": federate,
    "sweep": train,
    "relevance": relevance_run,
    "attack": attack,
  }


@contextlib.contextmanager
def in_time(seconds=SECONDS):
  """Raises Hang after so many seconds; silent."""

  def late(number, frame):
    raise Hang

  before = signal.signal(signal.SIGALRM, late)
  signal.alarm(seconds)
  hush = contextlib.redirect_stderr(io.StringIO())
  try:
    with hush, contextlib.redirect_stdout(io.StringIO()):
      yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def damaged_data(folder, rng):
  """(name of a damaged data set in the folder, what is wrong with it)."""
  folder.mkdir(parents=True)
  arrays = _dataset(rng)
  in_files = rng.random() < 0.4
  of_arrays = rng.random() < 0.6
  word = rng.choice(sorted(ARRAYS if of_arrays else BYTES))
  if of_arrays:
    arrays = ARRAYS[word](arrays, rng)
  path = folder / "set.npz"
  if in_files:
    path = folder / "set"
    path.mkdir()
    for name, leaf in arrays.items():
      np.save(path / f"{name}.npy", leaf, allow_pickle=True)
  else:
    np.savez(path, **arrays)
  if not of_arrays:
    one = rng.choice(sorted(path.iterdir())) if in_files else path
    BYTES[word](one, rng)
    word = f"{word} {one.name}"
  return f"{path}/" if in_files else str(path), word


# --- folders of runs

_ENDS = ("result.json", "params.npz", "report.png", "report.csv")  # a stopped run has none


def runs():
  """Launcher -> what runs a small config in a folder, and goes on with what is there."""
  central_config = fields.replace_all(
    quickstart.get_config(),
    {
      "num_steps": 2,
      "eval_every": 1,
      "checkpoint_every": 1,
      "data.limit": 64,
      "privacy.epsilon": None,
      "privacy.noise_multiplier": 1.0,
    },
  )
  fed_config = fields.replace_all(
    fed.get_config(),
    {
      "num_rounds": 2,
      "eval_every": 1,
      "checkpoint_every": 1,
      "data.limit": 64,
      "partition.num_clients": 8,
      "clients_per_round": 4.0,
      "local.epochs": 1,
      "privacy.epsilon": None,
      "privacy.noise_multiplier": 1.0,
    },
  )
  name = "privacy.noise_multiplier"
  of_sweep = [
    (f"noise {noise}", fields.replace(central_config, name, noise)) for noise in (1.0, 2.0)
  ]
  task = {"name": "sum", "num_clients": 3, "length": 10}
  secure_config = fields.replace_all(
    sums.get_config(), {"task": {**task, "protocol": "additive_sharing"}}
  )
  relevance_config = fields.replace_all(
    radp.get_config(), {"num_epochs": 1, "data.limit": 200}
  )
  lie = {"attack": {"name": "scaled_update", "fraction": 0.25}}
  attack_config = poisoning_digits.get_config()
  attack_config = fields.replace_all(
    attack_config,
    {
      **lie,
      "target.num_rounds": 1,
      "target.local.epochs": 1,
    },
  )
  pate_config = PateConfig(
    num_teachers=12,
    num_pool=60,
    num_queries=20,
    num_components=6,
    eval_every=10,
    delta=1e-5,
  )
  synthesis_config = SynthesisConfig(
    method=KernelMean(num_frequencies=8, num_steps=2),
    epsilon=8.0,
    per_class=4,
    hidden=4,
    num_samples=20,
  )
  distillation_config = fields.replace_all(
    DistillationConfig(),
    {"batch_size": 700, "epochs": 1, "eval_every": 1, "num_pool": 40},
  )
  return {
    "train": lambda folder: [loop.train(central_config, folder)],
    "federate": lambda folder: [loop.train(fed_config, folder)],
    "sweep": lambda folder: sweep.run(of_sweep, folder, sweep.Sweep(x=name)),
    "secure": lambda folder: sweep.run([("sum, a", secure_config)], folder),
    "relevance": lambda folder: [loop.train(relevance_config, folder)],
    "attack": lambda folder: sweep.run([("a, b", attack_config)], folder),
    "pate": lambda folder: [loop.train(pate_config, folder)],
    "synthesize": lambda folder: [loop.train(synthesis_config, folder)],
    "distill": lambda folder: [loop.train(distillation_config, folder)],
    "serve": lambda folder: _served(central_config, folder),
    "account": lambda folder: _accounted(central_config, folder),
    "plot": _drawn,
  }


def _served(config, folder):
  """Loads a run as a service does; makes it where there is none."""
  if not folder.exists():
    loop.train(config, folder)
  predictor.Predictor.load(folder)
  return []


def _accounted(config, folder):
  """Accounts for a run as `launch.account --runs` does; makes it where there is none."""
  if not folder.exists():
    loop.train(config, folder)
  cost.together(several_runs.read([str(folder)]))
  return []


_TABLES = (
  "mnist_curves/curve",
  "radp/test1_mnist/report",
  "attacks/gradient_inversion_cifar10/attacks",
  "compiled/compiled",
)


def _drawn(folder):
  """Draws every table of a folder again; makes the folder where there is none."""
  if not folder.exists():
    folder.mkdir()
    for name in _TABLES:
      table = _RESULTS / f"{name}.csv"
      shutil.copyfile(table, folder / f"{table.parent.name}_{table.name}")
  for table in sorted(folder.iterdir()):
    redraw.plot([table], [folder / "picture.svg"])
    (folder / "picture.svg").unlink(missing_ok=True)
  return []


def damaged_folder(whole, folder, rng):
  """A copy of a run's folder, ended or stopped, with one damaged file: returns what is wrong."""
  shutil.copytree(whole, folder, symlinks=True)
  stopped = rng.random() < 0.5
  if stopped:
    for name in _ENDS:
      for path in folder.rglob(name):
        path.unlink()
  files = sorted(path for path in folder.rglob("*") if path.is_file())
  path = rng.choice(files)
  shown = f"{'stopped' if stopped else 'ended'} {path.relative_to(folder)}"
  if path.suffix == ".csv" and rng.random() < 0.7:
    _other_cell(path, rng)
    return f"{shown}: another cell"
  if path.suffix in (".json", ".jsonl") and rng.random() < 0.5:
    _other_json(path, rng)
    return f"{shown}: other JSON"
  word = rng.choice(sorted(BYTES))
  BYTES[word](path, rng)
  return f"{shown}: {word}"
