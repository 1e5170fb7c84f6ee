"""`--dry_run`: what a run would promise and need, and none of the run.

Everything is built and refused as in the run itself; then a few steps are timed on zeros of the
data's shape, their clients of equal size, with batches that are not the run's: so what is
printed tells nothing of the data but their number and shape. Nothing is written, no folder is
made, and no key is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from dpjax import models, trees
from dpjax.accounting import Ledger, by_name
from dpjax.data import Dataset, Federation
from dpjax.runs import checkpoint, loop, promise, streams, writers
from dpjax.runs import workdir as owner
from dpjax.runs.central import build as central
from dpjax.runs.central.config import ModelConfig, TrainConfig
from dpjax.runs.federated import build as federated
from dpjax.runs.federated.config import FedConfig
from dpjax.runs.loop import Work

TIMED_STEPS = 5  # after the first, which compiles
TIMED_SECONDS = 10.0  # of them together
_TIMED_FEATURES = 256  # examples
_ROOMS: dict[type, Any] = {TrainConfig: central, FedConfig: federated}


class Timing(NamedTuple):
  """Seconds, of steps on zeros."""

  start: float  # to the end of the first step, compilation included
  steps: tuple[float, ...]
  evaluation: float  # of one; 0 where there is none
  num_parameters: int

  def whole(self, work: Work) -> float:
    """Of the work; what is written to disk comes on top."""
    rows = sum(work.row_at(step + 1) is not None for step in range(work.num_steps))
    return self.start + (work.num_steps - 1) * self.step + rows * self.evaluation

  @property
  def step(self) -> float:
    """The median."""
    return statistics.median(self.steps) if self.steps else 0.0


class _Enough(Exception):
  """A work has been timed: the run ends here."""


def told(config: TrainConfig | FedConfig, workdir: pathlib.Path | str) -> str:
  """The plan of a run, as lines.

  Raises:
    UserError: whatever the run would be refused for before its first step, in the same line.
  """
  room, folder = _ROOMS[type(config)], pathlib.Path(workdir)
  room.check(config)
  owner.known(folder, config)  # before the data are read, as in a run
  loaded = room.load_data(config, features=False)
  state = _state(room.build(config, loaded), folder)
  work, timing, before = _rehearsed(room, config, loaded)
  held = loaded[0].dataset if isinstance(loaded[0], Federation) else loaded[0]
  lines = {
    "data": repr(held),
    **{name: _shown(name, value) for name, value in work.planned().items()},
    "num_parameters": f"{timing.num_parameters:,}",
    "privacy": _promised(work),
    work.name: f"{work.num_steps} {work.steps_are}",
    "time": _minutes(work, timing, before),
    "memory": _memory(),
    "workdir": f"{workdir}: {state}",
  }
  width = max(map(len, lines))
  head = "Plan only: nothing is trained, nothing is written."
  return "\n".join([head, *(f"{name:<{width}}  {line}" for name, line in lines.items())])


def _rehearsed(room: Any, config: Any, loaded: Any) -> tuple[Work, Timing, float]:
  """(what the loop would do, how long it takes, seconds before it begins), on zeros."""
  began = time.monotonic()
  blank, features = _blank(config.model, loaded)
  job = room.build(config, blank)
  play = job.start(streams.derived(job.seed, job.digest, job.data()))
  before, found = time.monotonic() - began + features, []

  def fit(work: Work) -> NoReturn:
    found.append((work, _timed(work)))
    raise _Enough

  with contextlib.suppress(_Enough):
    play(fit)
  return (*found[0], before)


def _state(job: loop.Job, folder: pathlib.Path) -> str:
  """What the run would find in its folder."""
  meta = owner.known(folder, job.config)
  done = owner.finished(folder, job.config) is not None
  if meta is not None and (folder / checkpoint.FOLDER / writers.LOCK).exists():
    with writers.alone_in(folder, checkpoint.FOLDER):
      pass
  loop.admitted(job, folder, meta)
  saved = checkpoint.newest(folder)
  if done:
    return "holds this run, finished; it would not run again"
  return "new" if saved is None else f"would go on from step {saved}"


def _blank(model: ModelConfig, loaded: tuple[Any, Any]) -> tuple[tuple[Any, Any], float]:
  """Zeros for the data, as inputs of the model; estimated seconds for their features."""
  train, test = loaded
  held = train.dataset if isinstance(train, Federation) else train
  seconds, shape = 0.0, held.x.shape[1:]
  if models.needs_features(model.name):
    rows = _zeros(held.subset(slice(0, _TIMED_FEATURES)), shape)
    for _ in range(2):  # the first compiles
      began = time.monotonic()
      shape = central.featured(model, rows).x.shape[1:]
      seconds = (time.monotonic() - began) / len(rows) * (len(held) + len(test))
  zeros: Any = _zeros(held, shape)
  if isinstance(train, Federation):
    rows = np.array_split(np.arange(len(train)), train.num_clients)
    zeros = Federation(zeros, rows)
  return (zeros, _zeros(test, shape)), seconds


def _zeros(dataset: Dataset, shape: tuple[int, ...]) -> Dataset:
  """As many examples, all zero, of class 0."""
  x = np.zeros((len(dataset), *shape), dataset.x.dtype)
  return dataclasses.replace(dataset, x=x, y=np.zeros_like(dataset.y))


def _timed(work: Work) -> Timing:
  def steps() -> Iterator[float]:
    nonlocal state
    began = time.monotonic()
    for draw in itertools.islice(work.draws(0), 1 + TIMED_STEPS):
      state, _ = jax.block_until_ready(work.step(state, draw))
      yield time.monotonic() - began
      began = time.monotonic()

  began = time.monotonic()
  state = work.init()
  size = trees.size(work.released(state))
  started = time.monotonic() - began
  spent: list[float] = []
  for seconds in steps():
    spent.append(seconds)
    if sum(spent[1:]) > TIMED_SECONDS:
      break
  return Timing(started + spent[0], tuple(spent[1:]), _evaluated(work, state), size)


def _evaluated(work: Work, state: Any) -> float:
  seconds = 0.0
  for _ in range(0 if work.evaluate is None else 2):  # the first compiles
    began = time.monotonic()
    work.evaluate(state)  # type: ignore[misc]
    seconds = time.monotonic() - began
  return seconds


def _promised(work: Work) -> str:
  if work.promise is None:
    return promise.told({"epsilon_kind": "none"})
  work.promise.warn()
  epsilon = work.promise.curve(work.num_steps)
  facts = work.promise.facts(Ledger(), epsilon)
  by = facts["accountant"]
  return promise.told(facts) + (f", by {by}" if by else "")


def _shown(name: str, value: Any) -> str:
  return by_name(name, value) if isinstance(value, float) else str(value)


def _minutes(work: Work, timing: Timing, before: float) -> str:
  minutes = (timing.whole(work) + before) / 60
  return (
    f"about {minutes:.2g} minutes (estimate: {before + timing.start:.2g} s until the first step "
    f"is done, then {1e3 * timing.step:.3g} ms a step, the median of {len(timing.steps)} on "
    f"zeros, and {timing.evaluation:.2g} s an evaluation)"
  )


def _memory() -> str:
  """Of this process until now: it held the data, compiled and took steps."""
  unit = 1 if sys.platform == "darwin" else 1024
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
  line = f"about {peak / 1e9:.2g} GB at most (estimate: what this dry run took)"
  stats = jax.local_devices()[0].memory_stats() or {}
  device = stats.get("peak_bytes_in_use")
  return line if device is None else f"{line}, {device / 1e9:.2g} GB of the device's"
