"""What a secure computation of `launch.secure` is: a frozen dataclass of its settings, which
carries it out. A row of `config.TASKS` gives it a name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dpjax.experiments.config import rules
from dpjax.experiments.config.sections import DataConfig
from dpjax.experiments.run import pieces
from dpjax.experiments.run.experiment import Phase, Trained
from dpjax.experiments.run.pieces import Arrays
from dpjax.experiments.run.run_keys import RunKeys

# Largest number of rows that are predicted.
MOST_ROWS = 10_000


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


# The story of a computation, whose phases the run carries out.
Measuring = Generator[Phase, Trained, Computed]


class SecureTask(rules.Checked):
  """Base of all computations. Fields are settings, and have defaults.

  Attributes:
    needs: functions that raise UserError if a library that the computation needs is not installed.
  """

  needs: ClassVar[tuple[Callable[[], object], ...]] = ()

  @property
  def data(self) -> DataConfig:
    """A section that names the data of the computation; "drawn" if it reads none."""
    return DataConfig(name=getattr(self, "dataset", "drawn"))

  @property
  def is_private(self) -> bool:
    """Whether the computation draws noise from the run's keys."""
    return False

  def check_library(self) -> None:
    """Raises UserError if a library that the computation needs is not installed."""
    for library in self.needs:
      library()

  def check(self) -> None:
    """Raises UserError if the settings, each right by itself, do not fit each other; loads no
    data. The error names the fields of the config."""

  def load(self) -> Any:
    """Loads the data of the computation."""
    raise NotImplementedError

  def digest(self, loaded: Any) -> bytes:
    """Returns 32 bytes that identify the loaded training data: rows and labels of `LabelledRows`,
    whose test rows do not count. A task with other data defines its own."""
    return digest_of(loaded.x, loaded.y)

  def execute(self, loaded: Any, random: RunKeys, seed: int) -> Measuring:
    """Yields the phases of the computation, and returns its outcome.

    All is checked before the first phase, so that a refused run claims no folder.

    Args:
      loaded: result of `load`.
      seed: public seed of the run.

    Raises:
      UserError: the data do not fit the settings.
    """
    raise NotImplementedError


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
