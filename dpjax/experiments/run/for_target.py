"""`--dry_run --target=tpu:v5e:2x4`: a run's step, compiled for a machine that is not here.

The numbers are those of the compiled program: memory of a device, data sent between devices,
operations and bytes. A loop of unknown length counts as one turn. The hours are a roofline bound:
at the chip's published peaks, the compiled step cannot run faster, and most runs are slower. The
hours leave out evaluation, checkpoints, reading of data and the work of a federated server.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from dpjax.experiments.run.experiment import Phase
from dpjax.parallel import targets
from dpjax.parallel.targets import Compiled, Machine, NotFitting, StepProgram
from dpjax.validate import UserError

# Largest number of microbatch sizes that are tried. Each try compiles the step.
_MOST_TRIES = 5


class CompiledPlan(NamedTuple):
  """A run's step, compiled for a target."""

  phase: Phase
  target: Machine
  program: StepProgram
  compiled: Compiled | None  # None: the compiler refused the step for lack of memory
  compile_seconds: float
  wanted: float | None  # bytes needed on a device; None: unknown, but more than there are
  microbatch: tuple[int, float] | None = None  # (a size that fits, bytes needed with it)

  @property
  def fits(self) -> bool:
    usable = self.target.chip.usable_bytes
    return self.compiled is not None and self.wanted is not None and self.wanted <= usable

  @property
  def hours(self) -> float | None:
    """Lower bound on the hours of all steps, by the roofline; None if the step was not compiled."""
    if self.compiled is None:
      return None
    calls = self.program.calls * self.phase.num_steps
    return calls * self.compiled.seconds(self.target.chip) / 3600


def compile_step(
  make_phase: Callable[[Any], Phase], config: Any, target: Machine
) -> CompiledPlan:
  """Compiles the step of a run for a target. Returns the compiled step and whether it fits.

  Args:
    make_phase: function from a config to its phase on zeros, called within
      `targets.compiling_for`. If the step does not fit and the config has a `microbatch_size`, the
      function is called again with smaller values of that field.

  Raises:
    UserError: the compiler is not installed; a mesh does not fit the machine; or the kind of run
      gives no program of its step.
  """
  # This call comes first: it raises an error if the compiler is missing, before anything is built.
  target.devices()
  plan = _compile(make_phase, config, target)
  if plan.fits or not plan.program.rows or not hasattr(config, "microbatch_size"):
    return plan
  size = _guess(plan, getattr(config, "microbatch_size", None) or plan.program.rows)
  for _ in range(_MOST_TRIES):
    smaller = {"microbatch_size": size, "memory_budget_gb": None}
    tried = _compile(make_phase, dataclasses.replace(config, **smaller), target)
    if tried.fits:
      return plan._replace(microbatch=(size, tried.wanted))
    if size == 1:
      break
    size = max(1, size // 2)
  return plan


def _compile(
  make_phase: Callable[[Any], Phase], config: Any, target: Machine
) -> CompiledPlan:
  with targets.compiling_for(target):
    phase = make_phase(config)
    if phase.program is None:
      raise UserError(
        "is for runs of launch.train and launch.federate", field="target", value=target.text
      )
    program = phase.program()
  began = time.monotonic()
  try:
    built = targets.compile_for(program.lowered, target)
    wanted = built.held + program.data_bytes
  except NotFitting as error:
    built = None
    wanted = None if error.wanted is None else error.wanted + program.data_bytes
  return CompiledPlan(phase, target, program, built, time.monotonic() - began, wanted)


def _guess(plan: CompiledPlan, size: int) -> int:
  """Returns a smaller microbatch size that should fit, since temporaries grow with the size.

  The result is a power of two that is at most half of `size`. If the bytes needed are unknown, it
  is half of `size`, rounded down. It is at least 1.
  """
  usable = plan.target.chip.usable_bytes
  if plan.wanted is None:
    return max(1, size // 2)
  fixed = plan.program.data_bytes
  if plan.compiled is not None:
    fixed += plan.compiled.arguments + plan.compiled.outputs - plan.compiled.aliased
  share = max(usable - fixed, 0) / max(plan.wanted - fixed, 1)
  return 2 ** max(0, math.floor(math.log2(max(1.0, size * min(share, 0.5)))))


def _gigabytes(size: float) -> str:
  """Formats a number of bytes in units of 1e9 bytes.
  >>> _gigabytes(17179869184), _gigabytes(5310000)
  ('17.2 GB', '0.00531 GB')
  """
  return f"{size / 1e9:.3g} GB"


def lines(plan: CompiledPlan) -> dict[str, str]:
  """Returns the lines about the target in a plan's text, by name."""
  chip = plan.target.chip
  text = {
    "target": f"{plan.target.text}: {plan.target.num_devices} x {chip.device}, "
    f"{_gigabytes(chip.usable_bytes)} of memory each for JAX; compiled in "
    f"{plan.compile_seconds:.2g} s, not run",
    "fits": _verdict(plan),
  }
  built = plan.compiled
  if built is None or plan.hours is None:
    return text
  parts = {
    "arguments": built.arguments,
    "outputs": built.outputs - built.aliased,
    "temporaries": built.temporaries,
    "code": built.code,
    "data set": plan.program.data_bytes,
  }
  calls = plan.program.calls
  counts = built.counts
  text["memory"] = ", ".join(f"{name} {_gigabytes(size)}" for name, size in parts.items())
  text["exchanges"] = f"{_gigabytes(calls * counts.sent_bytes)} a step from each device"
  unknown = ""
  if counts.unknown_loops:
    unknown = f"; {counts.unknown_loops} loops of unknown length are counted as one turn"
  text["time"] = (
    f"at least {plan.hours:.2g} hours (roofline, no timing: {calls * counts.flops:.3g} flops and "
    f"{_gigabytes(calls * counts.memory_bytes)} a step and device, as compiled, at the chip's "
    f"published peaks{unknown})"
  )
  return text


def _verdict(plan: CompiledPlan) -> str:
  usable = plan.target.chip.usable_bytes
  if plan.fits:
    return f"yes: {_gigabytes(plan.wanted or 0)} of a device"
  if plan.wanted is None:
    message = "no: the compiler refuses it for lack of memory"
  else:
    excess = _gigabytes(plan.wanted - usable)
    message = f"no: {_gigabytes(plan.wanted)} of a device, {excess} too much"
  if plan.microbatch is not None:
    size, wanted = plan.microbatch
    return f"{message}; --config.microbatch_size={size} would fit ({_gigabytes(wanted)})"
  return message
