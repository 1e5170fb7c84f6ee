"""Builds the job of one secure computation from a `SecureConfig`.

All parties of a protocol run in this process and exchange bytes. So a run measures costs, but hides
nothing from whoever starts it. The result has an epsilon only if the model of `train` is private,
or if a model is opened with noise (`noisy_model`, `columns`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from dpjax.accounting import Ledger
from dpjax.experiments.config.fields import name_of
from dpjax.experiments.kinds import bounds
from dpjax.experiments.kinds.secure.config import SecureConfig, check
from dpjax.experiments.run import pieces
from dpjax.experiments.run.guarantee import NONE
from dpjax.experiments.run.loop import Job, Phase, RunOutcome, Schedule, TrainPhase
from dpjax.experiments.run.pieces import Arrays
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.validate import UserError


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


_REPORTED = ("sizes", "seconds", "error", "error_is", "found", "hides", "num_steps")


@bounds.names_fields
def build(config: SecureConfig, loaded: Any = None) -> Job:
  """Builds the job of one computation. `config.rows` describes several, so it must be empty.

  Args:
    loaded: result of the task's `load_data`, to share it between runs; None: it is loaded.
  """
  check(config)
  if config.rows:
    raise UserError(
      "must be empty for one computation; it is of a table of several", field="rows"
    )
  kind = importlib.import_module(f"dpjax.experiments.kinds.secure.{config.task.module}")
  read = functools.cache(lambda: kind.load_data(config) if loaded is None else loaded)

  def start(random: RunKeys) -> Schedule:
    prepared = kind.prepare(config, read(), random)
    return functools.partial(_schedule, config, kind, prepared)

  return Job(
    config=config,
    seed=config.seed,
    data_name=config.data.name,
    data=lambda: kind.data_digest(read()),
    start=start,
    # A task that opens weights with noise draws this noise itself. Secret keys also give its ledger
    # a name of its own, by which `launch.account` tells two runs of one seed apart.
    private=config.is_private or hasattr(config.task, "epsilon"),
    noise_seed=config.noise_seed,
  )


def _schedule(
  config: SecureConfig, kind: Any, prepared: Any, train_phase: TrainPhase
) -> RunOutcome:
  computed: Computed = kind.measured(config, prepared, train_phase)
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
  return RunOutcome(computed.params, lambda folder: result, saved_as="secure.npz")


def once(compute: Callable[[], Arrays], like: Arrays, name: str) -> Phase:
  """Returns a phase whose only step stores the arrays of `compute()`.

  A run that is stopped inside this step repeats it.

  Args:
    compute: function that returns the arrays.
    like: arrays of the same shapes and types, for the state before the step.
    name: name of the phase.
  """
  return pieces.filled(1, lambda: like, lambda state, _: state.update(compute()), name=name)
