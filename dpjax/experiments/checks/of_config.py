"""Checks of a config's run: `python -m launch.check`.

The parts are those that `launch.train` puts together. What a run adds to them is checked here: what
it states, its keys, and that nothing follows from the number of records.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from scipy import stats

from dpjax import accounting
from dpjax.accounting import matrix
from dpjax.accounting.proved import NeighboringRelation
from dpjax.checks import table
from dpjax.checks.subject import Row, Subject, not_applicable, parts_of, row
from dpjax.data import Dataset
from dpjax.experiments.config.choices import name_of
from dpjax.experiments.kinds.central import build, facts
from dpjax.experiments.kinds.central.config import LeastSquares, TrainConfig
from dpjax.experiments.run import run_keys
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.noise import source
from dpjax.noise.gaussian import key_id
from dpjax.validate import UserError

_DRAWS = 64  # number of runs whose keys are compared
# Largest number of steps of a run whose cost is also composed step by step.
_LEDGER_STEPS = 200
# Relative tolerance between two computations of one epsilon, which round losses differently.
_EPSILON_SLACK = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSubject(Subject):
  """The parts of a config's run, and what the run states."""

  config: TrainConfig
  guarantee: Guarantee  # what the run states at its end
  run_keys: Callable[[TrainConfig], RunKeys]  # config -> the keys of a new run


def subject(config: TrainConfig, loaded: tuple[Any, Any] | None = None) -> RunSubject:
  """Returns the parts of a config's run, as used in training.

  Args:
    loaded: (training data, test data); None to load those of the config.

  Raises:
    UserError: a method without privacy, or without steps.
  """
  if not config.is_private:
    raise UserError(
      "promises nothing, so there is nothing to check; use 'dp_sgd' or 'dp_ftrl'",
      field="privacy",
      value=name_of(config, "privacy"),
    )
  if isinstance(config.privacy, LeastSquares):
    raise UserError(
      "has no steps to check; launch.audit --only=LeastSquares plays games against it",
      field="privacy",
      value="least_squares",
    )
  loaded = build.load_data(config) if loaded is None else loaded
  # A verdict can be repeated. A release is checked with the keys of a release, which are drawn.
  seed = None if config.release else config.noise_seed or 0
  random = run_keys.draw(config.seed, noise_seed=seed, release=config.release)
  run = build.assemble(config, loaded, random)
  options = {
    "method": config.grad_method,
    "microbatch_size": config.microbatch_size,
    "memory_budget": build.memory_budget(config),
  }
  return RunSubject(
    **parts_of(run.plan, run.loss_fn, options=options),
    config=config,
    apply=run.apply,
    run_keys=lambda config: build.Central(config).new_keys(),
    params=run.params,
    train=run.train,
    keyed=run.keyed,
    # If the loss needs keys, the batches of a check contain them, so no key is given here.
    algorithm=lambda key: run.with_keys(key, None if run.keyed else run.random.local),
    guarantee=run.guarantee,
    release=config.release,
    seed_bits=run_keys.SAMPLER_BITS,
    optimizer=run.optimizer,
  )


def _stated_epsilons(subject: RunSubject) -> Iterator[tuple[float, str]]:
  """Yields (epsilon, where it is stated) for the epsilons that a run prints or writes at its end.
  Above `_LEDGER_STEPS` steps, that of the ledger is left out."""
  guarantee = subject.guarantee
  config = subject.config
  yield float(guarantee.curve(config.num_steps)), "printed"
  left = guarantee.accounted_delta
  if left:
    options = {
      "neighboring_relation": guarantee.relation,
      "accountant": guarantee.accountant,
    }
    event = guarantee.remaining_event(0)
    yield accounting.epsilon(event, delta=left, **options), "of the steps from the first"
    if config.num_steps <= _LEDGER_STEPS or subject.plan.steps_alike:
      events = [guarantee.step_event(step) for step in range(min(config.num_steps, 2))]
      events += [
        guarantee.step_event(0 if subject.plan.steps_alike else step)
        for step in range(2, min(config.num_steps, _LEDGER_STEPS))
      ]
      if len(events) == config.num_steps:
        yield (
          accounting.epsilon(matrix.join(events), delta=left, **options),
          "of a ledger",
        )


def stated(subject: RunSubject) -> Row:
  """Tests that the run states and records the cost of its steps, at the delta and for the
  steps of its config."""
  plan = subject.plan
  config = subject.config
  guarantee = subject.guarantee
  if not plan.is_private or guarantee.kind == "none":
    return not_applicable("nothing is stated of a run")
  if plan.num_steps != config.num_steps:
    why = f"{config.num_steps} steps run, the plan pays for {plan.num_steps}"
    return Row("", False, math.inf, 0.0, why)
  if max(plan.delta, guarantee.delta or math.inf) > config.privacy.delta * (1 + 1e-9):
    spent = accounting.upper(plan.delta)
    why = f"delta {spent}, stated {guarantee.delta}, asked for {config.privacy.delta}"
    return Row("", False, math.inf, 0.0, why)
  charged = plan.epsilon()
  wanted = getattr(config.privacy, "epsilon", None)
  asked = [(wanted, "asked for")] if wanted else []
  epsilons = [*_stated_epsilons(subject), *asked]
  short = [(charged / max(epsilon, 1e-12) - 1, where) for epsilon, where in epsilons]
  worst, where = max(short)
  detail = f"relative, what is missing from one of {len(epsilons)} epsilons: {where}"
  return row(max(0.0, worst), _EPSILON_SLACK, detail)


def _identities(random: Any) -> set[str]:
  keys = {key_id(key) for key in (random.noise, random.local)}
  return {*keys, f"sampler {random.sampler}"}


def _poor_bits(draws: list[RunKeys]) -> Iterator[str]:
  """Yields the names of keys with a bit that is the same in too many draws."""
  for name in ("noise", "local"):
    words = [np.asarray(jax.random.key_data(getattr(each, name))).ravel() for each in draws]
    bits = np.unpackbits(np.stack(words).view(np.uint8), axis=1)  # [draws, bits]
    ones = bits.sum(axis=0)
    # Each bit of a good key is a fair coin.
    tails = stats.binom.cdf(np.minimum(ones, len(draws) - ones), len(draws), 0.5)
    if tails.min() * 2 * len(ones) < 1e-9:
      yield f"some bits of the {name} key"


def key_reuse(subject: RunSubject) -> Row:
  """Tests that two runs of one config share no key of noise, augmentation or batches, and that
  the bits of their keys are fair coins."""
  config = subject.config
  if config.noise_seed is not None:
    return not_applicable("noise_seed repeats the noise, so epsilon is a claim")
  draws = [subject.run_keys(config) for _ in range(_DRAWS)]
  identities = [_identities(random) for random in draws]
  shared = []
  if len(set().union(*identities)) < sum(map(len, identities)):
    shared.append("two runs of one config")
  first = draws[0]
  if len(identities[0]) < 3 or key_id(first.init) in identities[0]:
    shared.append("one key for two purposes")
  if max(random.sampler for random in draws).bit_length() < 64:
    shared.append("a sampler seed of fewer than 64 bits")
  secure = all(source.is_release(key) for key in (first.noise, first.local))
  if config.release and not secure:
    shared.append("release keys of fewer than 256 bits")
  shared += _poor_bits(draws)
  shown = f" ({', '.join(shared[:3])})" if shared else ""
  return row(len(shared), 0, f"ways in which runs share a key{shown}")


def _of_zeros(train: Dataset, count: int) -> Dataset:
  """Returns a data set of `count` records of zeros, since a plan must not depend on content."""
  # A broadcast row takes no memory for the copies.
  x = np.broadcast_to(
    np.zeros(train.x.shape[1:], train.x.dtype), (count, *train.x.shape[1:])
  )
  y = np.zeros((count, *train.y.shape[1:]), train.y.dtype)
  return dataclasses.replace(train, x=x, y=y, present=None)


def _parts_as_text(subject: RunSubject, train: Dataset) -> dict[str, str]:
  """Returns name -> text of the parts of a run on `train`: plan, guarantee, planned result."""
  # The audit is left out, since its canaries remove or replace random records.
  config = dataclasses.replace(subject.config, audit=None)
  run = build.assemble(config, (train, train), subject.run_keys(config))
  stated = run.guarantee
  return {
    "plan": repr(run.plan),
    "events": repr(stated.remaining_event(0)),
    "statement": stated.statement(config.num_steps),
    "number of records in the guarantee": repr(stated.num_records),
    "noise that the optimizer knows": repr(run.noise),
    "result.json": repr(facts.planned_facts(config, run)),
  }


def size_of_data(subject: RunSubject) -> Row:
  """Tests that the run is built alike with one record less and with one record more.

  Otherwise the scale of the noise, for example, would reveal the number of records, and with it
  whether one record is present (arXiv 2605.15648).
  """
  relation = subject.plan.neighboring_relation
  if relation != NeighboringRelation.ADD_OR_REMOVE_ONE:
    return not_applicable(f"is the same in neighbouring data sets under {relation}")
  count = len(subject.train)
  less = _parts_as_text(subject, _of_zeros(subject.train, count - 1))
  more = _parts_as_text(subject, _of_zeros(subject.train, count + 1))
  differ = [name for name in less if less[name] != more[name]]
  detail = ", ".join(differ) or "things that differ between a record less and a record more"
  return row(len(differ), 0, detail)


CHECKS: dict[str, Callable[[RunSubject], Row]] = {
  "stated as charged": stated,
  "no key serves twice": key_reuse,
  "number of records": size_of_data,
}


def checks(subject: RunSubject) -> dict[str, table.Check]:
  """Returns the checks of the parts and of the run by their names, in order."""
  return {**table.checks(subject), **CHECKS}
