"""Rounds of pfl-research's published CIFAR-10 setup: dpjax, pfl-research and Flower, in turns.

  python -m benchmarks peers --methods=threads,loop,pfl,flower --peer_python=PATH

It writes federated.csv and federated.png.

The setup is that of pfl-research's own benchmark (Granqvist et al. 2024, arXiv:2404.06430;
benchmarks/image_classification, baseline.yaml): 1,000 users of 50 images of 32x32x3, 50 of them
a round, one local epoch of SGD (rate .1) in batches of 10, the mean of their models; two 3x3
convolutions, a max-pool, a dense layer of 128: 1,626,442 parameters, here without its
dropout. Images are random: no speed depends on them. Each peer runs in a process of its own
(`peer_worker`), by whichever Python has it; Flower's clients hold the same PyTorch model as pfl's.
They are in none of the extras, for pfl wants a dp-accounting before ours. Timed with
`pip install 'pfl>=0.6,<0.7' 'flwr[simulation]>=1.41,<1.42' torch` in an environment of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
from absl import flags

from benchmarks import options
from benchmarks.federated_speed import Entry, table, write  # noqa: F401  # of the same entries
from dpjax import federated, losses, trees, validate
from dpjax.data import Federation, from_arrays
from dpjax.federated.cohort import cohort_of
from dpjax.federated.execution.named import by_name
from dpjax.models import pooling
from dpjax.models.dense import dense_layers
from dpjax.types import Params

WORKLOAD = "cifar10_pfl"
PEERS = ("pfl", "flower")
OURS = ("loop", "threads", "vmap")
METHODS = ("threads", "loop", *PEERS)  # by default
_WORKER = pathlib.Path(__file__).with_name("peer_worker.py")
_TORCH = {"conv_0": "0", "conv_1": "2", "dense_0": "6", "head": "8"}  # names in the twin
_SEED = 0
_WARM_UP = 2  # rounds


class Setup(NamedTuple):
  """Sizes of the rounds; by default the published ones."""

  clients: int = 1000
  cohort: int = 50
  examples: int = 50  # of a client
  batch: int = 10
  rate: float = 0.1
  side: int = 32  # of an image
  channels: int = 3
  rows: int = 50_000  # of all: clients times examples


_PUBLISHED = Setup()


class SimpleCnn(nn.Module):
  """The CNN of the published setup: x [B, H, W, C] -> logits [B, 10]."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    for index, width in enumerate((32, 64)):
      conv = nn.Conv(width, (3, 3), padding="VALID", name=f"conv_{index}")
      x = nn.relu(conv(x))
    return dense_layers(pooling.max_pool(x), (128,), 10, "relu", None)


class Load(NamedTuple):
  """What all of them train, from the same first weights."""

  setup: Setup
  federation: Federation
  params: Params
  loss_fn: Any


def load(setup: Setup) -> Load:
  """Random images, dealt in order, and the first weights."""
  rng = np.random.default_rng(_SEED)
  shape = (setup.side, setup.side, setup.channels)
  x = rng.random((setup.rows, *shape), np.float32)
  dataset = from_arrays(x, rng.integers(0, 10, setup.rows), num_classes=10)
  held = np.arange(setup.examples)
  rows = [(i * setup.examples + held) % setup.rows for i in range(setup.clients)]
  model: Any = SimpleCnn()
  params: Any = model.init(jax.random.key(_SEED), x[:1])
  loss_fn = losses.softmax_cross_entropy(model.apply)
  return Load(setup, Federation(dataset, rows), params, loss_fn)


def as_torch(params: Params, setup: Setup) -> dict[str, np.ndarray]:
  """Our weights as those of the PyTorch twin: channels first, kernels [out, in, ...]."""
  half = (setup.side - 4) // 2
  tensors = {}
  for name, leaf in dict(params)["params"].items():
    kernel = np.asarray(leaf["kernel"])
    if name == "dense_0":  # rows in the order of [H, W, C] -> [C, H, W]
      kernel = kernel.reshape(half, half, -1, kernel.shape[-1]).transpose(2, 0, 1, 3)
      kernel = kernel.reshape(-1, kernel.shape[-1])
    kernel = kernel.transpose((3, 2, 0, 1) if kernel.ndim == 4 else (1, 0))
    tensors[f"{_TORCH[name]}.weight"] = np.ascontiguousarray(kernel)
    tensors[f"{_TORCH[name]}.bias"] = np.asarray(leaf["bias"])
  return tensors


class Absent(Exception):
  """A peer that is not installed; says what is missing."""


class Peer:
  """A peer's loop in its process, held between rounds; a context that ends it.

  Raises:
    Absent: its Python has not all that it needs.
    RuntimeError: it ended by itself, lost a client, or its model has another number of
      parameters.
  """

  def __init__(self, name: str, work: Load, folder: pathlib.Path, python: str):
    facts = {**work.setup._asdict(), "folder": str(folder), "peer": name}
    order = folder / f"{name}.json"
    order.write_text(json.dumps({**facts, "cores": len(os.sched_getaffinity(0))}))
    self._said = (folder / f"{name}.log").open("w+")
    self._process = subprocess.Popen(
      [python, "-P", str(_WORKER), str(order)],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
    )  # fmt: skip
    try:
      answer = self._answer()
      if "missing" in answer:
        raise Absent(f"not installed for {python}: no {answer['missing']}")
      if answer["parameters"] != trees.size(work.params):
        raise RuntimeError(f"{name}: the twin has {answer['parameters']} parameters")
    except BaseException:
      self.__exit__()
      raise
    self.versions = ", ".join(" ".join(pair) for pair in answer["versions"].items())

  def __enter__(self) -> Peer:
    return self

  def __exit__(self, *raised: object) -> None:
    if self._process.stdin is not None:
      self._process.stdin.close()
    try:
      self._process.wait(timeout=30)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    assert self._process.stdout is not None
    self._process.stdout.close()
    self._said.close()

  def _answer(self) -> dict[str, Any]:
    assert self._process.stdout is not None
    for line in self._process.stdout:
      answer = json.loads(line[1:]) if line.startswith("@") else {}
      if "failed" in answer:
        raise RuntimeError(f"the peer's round failed: {answer['failed']}")
      if answer:
        return answer
    self._said.seek(0)
    last = (self._said.read().strip().splitlines() or ["no word"])[-1]
    raise RuntimeError(f"the peer ended by itself: {last}")

  def _ask(self, order: str) -> dict[str, Any]:
    assert self._process.stdin is not None
    print(order, file=self._process.stdin, flush=True)
    return self._answer()

  def round(self) -> float:
    """Seconds of one more round."""
    return self._ask("round")["seconds"]

  def weights(self, file: pathlib.Path) -> dict[str, np.ndarray]:
    """The server's, by the twin's names; `file` is an .npz to write them to."""
    self._ask(f"weights {file}")
    with np.load(file) as archive:
      return dict(archive)


def write_load(work: Load, folder: pathlib.Path) -> None:
  """What a peer's process reads: images with channels first, labels, the first weights."""
  dataset = work.federation.dataset
  np.save(folder / "x.npy", np.ascontiguousarray(dataset.x.transpose(0, 3, 1, 2)))
  np.save(folder / "y.npy", np.asarray(dataset.y))
  np.savez(folder / "first.npz", **as_torch(work.params, work.setup))  # type: ignore[arg-type]


def ours(work: Load, method: str) -> Callable[[], Params]:
  """() -> the server's parameters after one more round of newly drawn clients."""
  setup = work.setup
  rng = np.random.default_rng(_SEED)
  algorithm = federated.fed_avg(
    work.loss_fn,
    optax.sgd(setup.rate),
    map_clients=by_name(
      "loop" if method == "threads" else method,
      num_threads=1 if method == "loop" else None,
    ),
    key=jax.random.key(_SEED),
  )
  local = federated.LocalWork(setup.batch)
  state = algorithm.init(work.params)
  number = 0

  def one_round() -> Params:
    nonlocal state, number
    clients = rng.choice(setup.clients, setup.cohort, replace=False)
    drawn = cohort_of(work.federation, clients, local, seed=_SEED, round=number)
    state, _ = algorithm.round(state, drawn)
    number += 1
    return jax.block_until_ready(state.params)

  return one_round


def _timed(run: Callable[[], Any]) -> float:
  began = time.perf_counter()
  run()
  return time.perf_counter() - began


def measure(
  methods: Sequence[str],
  *,
  repeats: int = 5,
  setup: Setup = _PUBLISHED,
  peer_python: str = sys.executable,
) -> list[Entry]:
  """An entry for each method, after two rounds to warm up, in turns; its ratio is to the first
  that ran. One that is not installed has no times and says what is missing.

  Args:
    methods: of ("loop", "threads", "vmap", "pfl", "flower").
    peer_python: the Python that has the peers; by default this one.

  Raises:
    UserError: an unknown method.
  """
  for method in methods:
    validate.one_of((*OURS, *PEERS), methods=method)
  validate.integer_at_least(1, repeats=repeats)
  work = load(setup)
  runs = {}
  notes = dict.fromkeys(methods, "")
  with tempfile.TemporaryDirectory() as held, contextlib.ExitStack() as stack:
    folder = pathlib.Path(held)
    write_load(work, folder)
    for method in methods:
      if method in OURS:
        runs[method] = functools.partial(_timed, ours(work, method))
        continue
      try:
        peer = stack.enter_context(Peer(method, work, folder, peer_python))
        runs[method], notes[method] = peer.round, peer.versions
      except Absent as absent:
        notes[method] = str(absent)
    times = [[run() for run in runs.values()] for _ in range(_WARM_UP + repeats)]
  medians = dict(zip(runs, map(statistics.median, zip(*times[_WARM_UP:]))))
  first = next(iter(medians.values()), None)
  steps = -(-setup.examples // setup.batch)

  def entry(method: str) -> Entry:
    row = Entry(WORKLOAD, method, setup.cohort, steps, note=notes[method])
    if method not in medians:
      return row
    median = medians[method]
    return row._replace(median_s=median, ratio=median / first, rounds_per_s=1 / median)

  return list(map(entry, methods))


def define() -> None:
  """Defines the flags."""
  options.define_names("methods", (*OURS, *PEERS), METHODS)
  flags.DEFINE_string(
    "peer_python", sys.executable, "The Python that has pfl and flwr (default: this one)."
  )
  options.define_repeats()


def parts(values: flags.FlagValues) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of each part that the flags ask for."""
  python = values.peer_python
  yield WORKLOAD, measure(values.methods, repeats=values.repeats, peer_python=python)
