"""Processor seconds of a calibration, for each sampler; beside another version of dpjax.

`python -m benchmarks.accounting_speed > FILE` finds the least noise for each setting. With
`--other=FOLDER`, a checkout of another version, each setting runs in both by turns. `--few` takes a
setting in eight. `--peer=dp_accounting` times one epsilon of ours at a known noise, and that of
dp_accounting's PLDAccountant at its own and at our grid. `--peer=jax_privacy` times calibrations to
an epsilon, and `--peer=riskcal` those of `riskcal_noise.py` to an attack; found is what the noise
costs by our accounting.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from dpjax.accounting.calibration import Unreachable
from dpjax.accounting.event_kinds.bounded_contribution import bounded_contribution_event
from dpjax.accounting.event_kinds.random_allocation import random_allocation_event
from dpjax.accounting.event_kinds.truncated_poisson import truncated_poisson_event

DELTA = 1e-6
STEPS = (10**2, 10**3, 10**4, 10**5, 10**6, 10**7)
PROBS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
EPSILONS = (0.1, 1.0, 8.0)
_FEW = 8
_REPLACE = {"neighboring_relation": "replace_one"}
_ZERO = {"neighboring_relation": "replace_special"}
# Sampler -> options of the accounting. The records of a data set are such that one record is in a
# batch with the probability of the setting.
SAMPLERS: dict[str, dict[str, str]] = {
  "poisson": {},
  "fixed_size": _REPLACE,
  "fixed_size_add": {},
  "with_replacement": _REPLACE,
  "bounded_contribution": _ZERO,
  "truncated_poisson": _ZERO,
  "laplace": {},
  "random_allocation": {},
}
_BATCH = 100


def step_event(
  sampler: str, sampling_prob: float, noise_multiplier: float
) -> tuple[Any, int]:
  """Returns the event of a step, or of a pass, and its number of steps."""
  from dpjax import accounting

  noise = accounting.gaussian_event(noise_multiplier)
  if sampler == "poisson":
    return accounting.poisson_sampled_event(noise, sampling_prob=sampling_prob), 1
  if sampler == "laplace":
    noise = accounting.laplace_event(noise_multiplier)
    return accounting.poisson_sampled_event(noise, sampling_prob=sampling_prob), 1
  size = round(_BATCH / sampling_prob)
  if sampler.startswith("fixed_size"):
    return accounting.fixed_size_event(noise, num_examples=size, batch_size=_BATCH), 1
  if sampler == "with_replacement":
    return accounting.with_replacement_event(noise, num_examples=size, batch_size=_BATCH), 1
  if sampler == "bounded_contribution":
    return bounded_contribution_event(
      noise, sampling_prob=sampling_prob / 3, max_contribution=3
    ), 1
  if sampler == "truncated_poisson":
    return truncated_poisson_event(
      noise, sampling_prob=sampling_prob, num_examples=size, capacity=2 * _BATCH
    ), 1
  passes = max(1, round(1 / sampling_prob))
  return random_allocation_event(noise, num_steps=passes), passes


def settings() -> Iterator[dict[str, Any]]:
  """Yields all settings: every one of Poisson sampling, and a few of each other sampler."""
  for sampler in SAMPLERS:
    for steps in STEPS:
      for sampling_prob in PROBS:
        for epsilon in EPSILONS:
          # The other samplers are asked at epsilon 1, and where a record joins at all.
          if sampler != "poisson" and (epsilon != 1.0 or sampling_prob in (1.0, 1e-6)):
            continue
          if sampler == "random_allocation" and steps * sampling_prob < 1:
            continue
          yield {
            "sampler": sampler,
            "steps": steps,
            "sampling_prob": sampling_prob,
            "epsilon": epsilon,
          }


def calibrated(setting: dict[str, Any]) -> tuple[float, float, float]:
  """Returns processor seconds, the noise multiplier, and the epsilon at this noise."""
  from dpjax import accounting

  sampler, sampling_prob, steps = (
    setting[name] for name in ("sampler", "sampling_prob", "steps")
  )

  def make(noise_multiplier: float) -> Any:
    event, length = step_event(sampler, sampling_prob, noise_multiplier)
    return accounting.compose(event, -(-steps // length))

  options: Any = {"delta": DELTA, **SAMPLERS[sampler]}
  start = time.process_time()
  try:
    noise = accounting.calibrate_noise_multiplier(
      make, epsilon=setting["epsilon"], **options
    )
  except Unreachable:
    return time.process_time() - start, float("nan"), float("nan")
  seconds = time.process_time() - start
  return seconds, noise, accounting.epsilon(make(noise), **options)


class Worker:
  """A process that calibrates in the dpjax of a folder."""

  def __init__(self, folder: str):
    # One thread, so that no thread's waiting counts.
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    self._process = subprocess.Popen(
      [sys.executable, os.path.abspath(__file__), "--worker"],
      env={**os.environ, **threads, "PYTHONPATH": path},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )

  def ask(self, setting: dict[str, Any]) -> list[float]:
    """Returns what `calibrated` returns there."""
    process = self._process
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(setting) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())

  def close(self) -> None:
    """Ends the process."""
    assert self._process.stdin is not None
    self._process.stdin.close()
    self._process.wait()


def _work() -> None:
  # Imports and first calls are not counted.
  calibrated({"sampler": "poisson", "steps": 10, "sampling_prob": 0.1, "epsilon": 1.0})
  for line in sys.stdin:
    print(json.dumps(calibrated(json.loads(line))), flush=True)


def _peer_rows() -> Iterator[list[Any]]:
  import dp_accounting
  from dp_accounting.pld import PLDAccountant

  from dpjax import accounting

  yield [
    "sampling_prob",
    "noise_multiplier",
    "steps",
    "delta",
    "of",
    "grid",
    "seconds",
    "epsilon",
  ]
  cases = [(1e-2, 1.0, 4000), (1e-3, 0.7, 10**4), (1e-4, 0.6, 10**5), (0.1, 10.0, 10**6)]
  for sampling_prob, noise, steps in cases:
    event = accounting.compose(
      accounting.poisson_sampled_event(
        accounting.gaussian_event(noise), sampling_prob=sampling_prob
      ),
      steps,
    )
    accounting.epsilon(accounting.gaussian_event(1.0), delta=DELTA)
    start = time.process_time()
    found = accounting.epsilon(event, delta=DELTA)
    yield [
      sampling_prob, noise, steps, DELTA, "dpjax", "", f"{time.process_time() - start:.3f}", found
    ]  # fmt: skip
    for grid in (1e-4, 4e-4):
      start = time.process_time()
      accountant = PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        value_discretization_interval=grid,
      )
      found = accountant.compose(event).get_epsilon(DELTA)
      yield [
        sampling_prob, noise, steps, DELTA, "dp_accounting", grid,
        f"{time.process_time() - start:.3f}", found,
      ]  # fmt: skip


_CALIBRATIONS = (
  "target",
  "sampling_prob",
  "steps",
  "of",
  "seconds",
  "noise_multiplier",
  "found",
)


def _calibration(
  target: str,
  setting: tuple[float, int],
  of: str,
  find: Callable[[], float],
  cost: Callable,
) -> list[Any]:
  start = time.process_time()
  noise = find()
  seconds = f"{time.process_time() - start:.3f}"
  return [target, *setting, of, seconds, f"{noise:.6g}", f"{cost(noise):.6g}"]


def _maker(sampling_prob: float, steps: int) -> Callable[[float], Any]:
  from dpjax import accounting

  step = lambda noise: step_event("poisson", sampling_prob, noise)[0]
  return lambda noise: accounting.compose(step(noise), steps)


def _jax_privacy_rows() -> Iterator[Any]:

  from jax_privacy.accounting import accountants, analysis, calibrate

  from dpjax import accounting

  yield _CALIBRATIONS
  theirs = analysis.DpsgdTrainingAccountant(accountants.PldAccountantConfig())
  cases = [(3.0, 600, 60_000, 4000), (1.0, 100, 100_000, 10**4), (8.0, 1000, 10_000, 1000)]
  for epsilon, size, count, steps in cases:
    target: Any = {"epsilon": epsilon, "delta": DELTA}
    options: Any = {"batch_sizes": size, "num_updates": steps, "num_samples": count}
    make = _maker(size / count, steps)
    finds = {
      "dpjax": lambda make=make, target=target: accounting.calibrate_noise_multiplier(
        make, **target
      ),
      "jax_privacy": lambda options=options, epsilon=epsilon: (
        calibrate.calibrate_noise_multiplier(
          target_epsilon=epsilon, accountant=theirs, target_delta=DELTA, **options
        )
      ),
    }
    cost = lambda noise, make=make: accounting.epsilon(make(noise), delta=DELTA)
    cost(9.0)  # imports and first calls are not counted
    for of, find in finds.items():
      yield _calibration(f"epsilon {epsilon:g}", (size / count, steps), of, find, cost)


def _riskcal_rows() -> Iterator[Any]:
  from benchmarks import riskcal_noise
  from dpjax import accounting
  from dpjax.accounting.attack_bounds import attack_bound
  from dpjax.accounting.epsilon import privacy_profile

  yield _CALIBRATIONS
  file = pathlib.Path(__file__).parents[1] / "results" / "accounting" / "riskcal.csv"
  theirs = list(csv.DictReader(file.open(newline="", encoding="utf-8")))
  for (_, numbers, prob, steps), row in zip(riskcal_noise.SETTINGS, theirs, strict=True):
    bound: Any = attack_bound(**numbers)
    make = _maker(prob, steps)
    cost = lambda noise, make=make, bound=bound: bound.cost(
      privacy_profile(make(noise)), DELTA
    )
    find = lambda make=make, bound=bound: accounting.calibrate_noise_to_attack(
      make, bound, delta=DELTA
    )
    cost(9.0)
    words = " ".join(f"{name} {value:g}" for name, value in numbers.items())
    yield _calibration(words, (prob, steps), "dpjax", find, cost)
    known = float(row["noise_multiplier"])
    yield [words, prob, steps, "riskcal", row["seconds"], known, f"{cost(known):.6g}"]


_PEERS = {
  "dp_accounting": _peer_rows,
  "jax_privacy": _jax_privacy_rows,
  "riskcal": _riskcal_rows,
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--other", default="", help="folder of another version of dpjax")
  parser.add_argument("--samplers", default=",".join(SAMPLERS), help="names, by commas")
  parser.add_argument("--few", action="store_true", help="a setting in eight")
  parser.add_argument("--peer", choices=list(_PEERS))
  parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.worker:
    _work()
    return
  writer = csv.writer(sys.stdout, lineterminator="\n")
  if options.peer:
    writer.writerows(_PEERS[options.peer]())
    return
  here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  workers = {"": Worker(here)}
  if options.other:
    workers["other_"] = Worker(options.other)
  names = ("seconds", "noise_multiplier", "found_epsilon")
  header = [f"{prefix}{name}" for prefix in workers for name in names]
  if options.other:
    header.append("ratio")
  writer.writerow(["sampler", "steps", "sampling_prob", "epsilon", *header])
  samplers = options.samplers.split(",")
  chosen = [setting for setting in settings() if setting["sampler"] in samplers]
  for setting in chosen[:: _FEW if options.few else 1]:
    found = [worker.ask(setting) for worker in workers.values()]
    ratio = [f"{found[1][0] / found[0][0]:.1f}"] if options.other else []
    cells = [f"{each[0]:.3f},{each[1]:.7g},{each[2]:.7g}".split(",") for each in found]
    writer.writerow([*setting.values(), *(cell for each in cells for cell in each), *ratio])
    sys.stdout.flush()
  for worker in workers.values():
    worker.close()


if __name__ == "__main__":
  main()
