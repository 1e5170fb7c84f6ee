"""One secure computation, from a `SecureConfig`.

All parties of a protocol run in this process and exchange bytes. So a run measures costs, but hides
nothing from whoever starts it. The result has an epsilon only if the model of `train` is private,
or if a model is opened with noise (`noisy_model`, `columns`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import numpy as np

from dpjax.accounting import Ledger
from dpjax.experiments.config.choices import name_of
from dpjax.experiments.kinds.secure.config import SecureConfig, check
from dpjax.experiments.run import pieces
from dpjax.experiments.run.experiment import (
  Experiment,
  Outcome,
  Phase,
  Story,
  Trained,
)
from dpjax.experiments.run.guarantee import NONE
from dpjax.experiments.run.pieces import Arrays
from dpjax.experiments.run.run_keys import RunKeys


class Computed(NamedTuple):
  """Holds the outcome of a computation; the fields fill one row of the table."""

  protocol: str
  sizes: str  # in words
  seconds: float  # duration of the protocol, all parties together
  num_bytes: int  # bytes of all messages
  error: float  # difference to the computation in the clear, or a bound
  error_is: str  # what `error` measures, in words
  found: str  # the result in a few words
  hides: str  # what is hidden, and from whom
  num_steps: int
  params: Any  # the released arrays
  facts: dict[str, Any] | None = None  # `Guarantee.facts`; None: there is no guarantee
  more: dict[str, Any] = {}  # noqa: RUF012 - only read


class LabelledRows(NamedTuple):
  """Holds the data of a training on shares: float64, except the integers `test_labels`."""

  x: np.ndarray  # [n, d]
  y: np.ndarray  # [n, k] 0 or 1
  test_x: np.ndarray  # [m, d]
  test_labels: np.ndarray  # [m]


def digest_of(*arrays: np.ndarray) -> bytes:
  """Returns the SHA-256 digest of arrays, with their types and shapes."""
  hashed = hashlib.sha256()
  for array in arrays:
    hashed.update(f"{array.dtype.str} {array.shape} ".encode() + array.tobytes())
  return hashed.digest()


# The story of a computation, whose phases the run carries out.
Measuring = Generator[Phase, Trained, Computed]
_REPORTED = ("sizes", "seconds", "error", "error_is", "found", "hides", "num_steps")


class SecureComputation(Experiment[SecureConfig]):
  """One computation."""

  def check(self) -> None:
    check(self.config)

  @functools.cached_property
  def task(self) -> Any:
    """Returns the module of the task."""
    module = self.config.task.module
    return importlib.import_module(f"dpjax.experiments.kinds.secure.{module}")

  def data(self) -> Any:
    return self.task.load_data(self.config)

  def digest(self, data: Any) -> bytes:
    return self.task.data_digest(data)

  @property
  def is_private(self) -> bool:
    # A task that opens weights with noise draws this noise itself. Secret keys also give its ledger
    # a name of its own, by which `launch.account` tells two runs of one seed apart.
    return self.config.is_private or hasattr(self.config.task, "epsilon")

  def train(self, data: Any, keys: RunKeys) -> Story:
    config = self.config
    # A task checks everything before its first phase, so that a refused run claims no folder.
    computed: Computed = yield from self.task.execute(config, data, keys)
    nothing = NONE.facts(Ledger(), 0.0)
    result = {
      # Tasks that score a model replace this value by an entry of `computed.more`.
      "test_accuracy": None,
      **(nothing if computed.facts is None else computed.facts),
      "task": name_of(config, "task"),
      "dataset": config.data.name,
      "method": computed.protocol,
      "bytes": computed.num_bytes,
      **{name: getattr(computed, name) for name in _REPORTED},
      **computed.more,
    }
    return Outcome(computed.params, lambda folder: result, saved_as="secure.npz")


def once(compute: Callable[[], Arrays], like: Arrays, name: str) -> Phase:
  """Returns a phase whose only step stores the arrays of `compute()`.

  A run that is stopped inside this step repeats it.

  Args:
    compute: function that returns the arrays.
    like: arrays of the same shapes and types, for the state before the step.
    name: name of the phase.
  """
  return pieces.fill_pieces(
    1, lambda: like, lambda state, _: state.update(compute()), name=name
  )
