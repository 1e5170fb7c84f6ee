"""Record-level privacy across silos: plans, guarantee and scores of `privacy=records`.

Each client of the federation is a silo with a plan of its own. The ledger of a run has the charges
of all silos, each under a noise key of its own, so the epsilon of a silo is that of its charges.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpjax import accounting, gradients, validate
from dpjax.accounting import Ledger, upper
from dpjax.accounting.calibration import Unreachable
from dpjax.accounting.ledger import BudgetExceeded, Charge
from dpjax.accounting.loss_grid import Profile
from dpjax.accounting.text import by_name, lower, paragraph
from dpjax.data import Federation
from dpjax.experiments.config import common, samplers
from dpjax.experiments.config.choices import name_of
from dpjax.experiments.config.common import attack_of
from dpjax.experiments.kinds import privacy_section
from dpjax.experiments.kinds.federated.config import (
  FedConfig,
  Records,
  algorithm_of,
  algorithms_that,
)
from dpjax.experiments.run import guarantee, sizes
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.federated.silos import Attendance, Silos
from dpjax.plan import Plan
from dpjax.validate import UserError

UNIT = "record of one silo"
PERSON = "person with one record in each of"  # ... so many silos
# Keys of result.json, and the beginning of the names of silos' scores.
SILOS = "silos"
SCORE = "silo_accuracy"
_NOTE = (
  "Inter-silo record-level privacy (Lowy and Razaviyayn 2021). Each silo trusts nobody outside: it "
  "adds the noise below to each of its own steps, before anything leaves. The guarantee is for one "
  "record of one silo against the server, all other silos and whoever sees the models. It hides "
  "neither that a silo takes part nor, of a person with several records in a silo, all of them."
)
_SIMULATED = (
  "In this run one program simulated server and silos: it held all data and the key of every "
  "silo's noise, so nothing is promised against whoever runs it."
)


# --- checks


def check(config: FedConfig) -> None:
  """Raises UserError for fields that do not fit record-level privacy; loads no data."""
  asked = config.privacy
  if not isinstance(asked, Records):
    return
  if not algorithm_of(config).records:
    known = algorithms_that(lambda row: row.records)
    why = "clients of the others send what no step's noise covers"
    common.only(config, "algorithm", known, f" with privacy='records': {why}")
  why = (
    "whose canaries would be records of one silo; python -m launch.audit --only=silos plays"
  )
  common.only(config, "audit", ["none"], f" with privacy='records', {why} its games")
  if asked.epsilons and (asked.noise_multiplier is not None or attack_of(asked)):
    raise UserError(
      "are targets; must be empty with a noise_multiplier or an attacker",
      field="privacy.epsilons",
      value=asked.epsilons,
    )
  declared = getattr(config.partition, "sizes", None)
  if declared and asked.num_examples:
    raise UserError(
      f"are declared by partition.sizes={declared}", field="privacy.num_examples",
      value=asked.num_examples,
    )  # fmt: skip
  if config.is_dealt:
    _check_counts(asked, config.partition.num_clients)


def _check_counts(asked: Records, num_silos: int, order: str = "") -> None:
  for name in ("epsilons", "num_examples"):
    given = getattr(asked, name)
    if given and len(given) != num_silos:
      raise UserError(
        f"must be one for each of {num_silos} silos{order}",
        field=f"privacy.{name}",
        value=given,
      )
  if asked.max_silos_per_record > num_silos:
    raise UserError(
      f"must be <= {num_silos}, the number of silos",
      field="privacy.max_silos_per_record",
      value=asked.max_silos_per_record,
    )


def resolve(config: FedConfig, num_silos: int) -> FedConfig:
  """Returns a config whose `clients_per_round` is the number of silos, all of which take part."""
  if not config.protects_records:
    return config
  return dataclasses.replace(config, clients_per_round=num_silos)


# --- plans


def make(config: FedConfig, federation: Federation) -> Silos:
  """Returns the silos of a run, each with a plan of its own.

  Raises:
    UserError: a silo of which too few records are declared for a batch, whose declared number is
      far from the true one, or for which no noise reaches the epsilon.
  """
  asked = config.privacy
  assert isinstance(asked, Records)
  count = federation.num_clients
  # Names of silos are public. Who declares numbers in another order learns it here.
  order = (
    f", in the order {validate.join_words(federation.client_ids)}" if count > 1 else ""
  )
  _check_counts(asked, count, order)
  targets = asked.epsilons or (asked.epsilon,) * count
  plan_of = functools.cache(functools.partial(_plan, config))
  plans = []
  numbers = []
  for place, name in enumerate(federation.client_ids):
    try:
      numbers.append(_size(config, federation, place))
      plans.append(plan_of(numbers[-1], targets[place]))
    except UserError as error:
      if isinstance(error, Unreachable) and error.field == "epsilon":
        error = error.of(field=f"privacy.epsilon{'s' if asked.epsilons else ''}")
      raise type(error)(
        error.must,
        field=error.field,
        value=error.value,
        hint=f"silo {name!r} (numbers are one for each silo{order})",
      ) from error
  attendance = Attendance(asked.absent, asked.lost, config.seed)
  silos = Silos(plans, config.num_rounds, numbers, attendance, asked.max_silos_per_record)
  return silos.fitted() if asked.noise_multiplier != 0 else silos


def _size(config: FedConfig, federation: Federation, place: int) -> int:
  """Returns the number of records of a silo that its plan may depend on; see `run.sizes`."""
  asked = config.privacy
  assert isinstance(asked, Records)
  known = asked.num_examples or federation.nominal_sizes
  field = "privacy.num_examples" if not federation.nominal_sizes else "partition.sizes"
  return sizes.public(
    len(federation.indices[place]),
    None if not known else known[place],
    relation=privacy_section.relation(asked),
    promised=asked.noise_multiplier != 0,
    field=field,
    other="privacy.neighboring_relation=replace_special",
  )


def _plan(config: FedConfig, size: int, epsilon: float | None) -> Plan:
  """Returns the plan of a silo with a declared number of records, for all rounds."""
  asked = config.privacy
  assert isinstance(asked, Records)
  if not size:
    raise UserError(
      "deals it no record; must hold one at least in each silo",
      field="partition",
      value=name_of(config, "partition"),
    )
  batch = config.local.batch_size or size
  why = ", or none for all records of a silo at once"
  common.at_most(config, "local.batch_size", size, why)
  steps = config.num_rounds * max(1, round(config.local.epochs * size / batch))
  size_of_run = asked.sampler.sizing(
    sampling_prob=batch / size,
    num_examples=size,
    num_steps=steps,
    # A neighbour may have one record more.
    padded_batch_size=size + 1,
    neighboring_relation=asked.neighboring_relation,
  )
  return privacy_section.plan(
    dataclasses.replace(asked, epsilon=epsilon),
    sampler=samplers.make(asked.sampler, size_of_run),
    num_steps=steps,
    l2_clip_norm=gradients.Clip(asked.l2_clip_norm),
    normalize_by=batch,
  )


# --- the guarantee


@dataclasses.dataclass(frozen=True)
class SilosGuarantee(Guarantee):
  """The guarantee of a run of silos. Its epsilon is the largest of all silos."""

  silos: Silos = dataclasses.field(kw_only=True)
  names: tuple[str, ...] = dataclasses.field(kw_only=True)

  @property
  def unit_owns_records(self) -> bool:
    return self.silos.max_silos > 1

  def charge(self, ledger: Ledger, steps: range, *, noise_key_id: str) -> Ledger:
    """Returns the ledger with the steps of all silos that compute a message in these rounds."""
    num_steps = collections.Counter[int]()
    for round in steps:
      here = self.silos.attendance.of(round, len(self.names))[0]
      for silo in np.flatnonzero(here).tolist():
        num_steps[silo] += self.silos.steps_per_round(silo)
    ran = ledger.steps_by_key()
    charges = []
    for silo, count in num_steps.items():
      plan = self.silos.plans[silo]
      # The name of a silo may hold a slash, that of a run's key holds none.
      key = f"{noise_key_id}/{self.names[silo]}"
      relation = plan.neighboring_relation
      charges.append(
        Charge(plan.step_event(0), count, plan.l2_bound, relation, key, ran.get(key, 0))
      )
    return ledger.with_charges(charges)

  def ran(self, ledger: Ledger) -> tuple[int, ...]:
    """Returns the number of steps of each silo in a ledger; of an empty one, of all rounds."""
    if not ledger.charges:
      return self.silos.num_steps()
    ran = collections.Counter[str]()
    for key, count in ledger.steps_by_key().items():
      ran[key.partition("/")[2]] += count
    return tuple(ran[name] for name in self.names)

  def check_budget(self, ledger: Ledger) -> None:
    del ledger  # what ran is a part of all rounds, whose number is fixed
    if self.budget is None or self.kind == "none":
      return
    spent = self.silos.epsilon()
    if spent > self.budget:
      raise BudgetExceeded(
        f"the budget of a silo is exceeded, the run would cost {upper(spent, digits=6)}",
        field="privacy.epsilon_budget",
        value=self.budget,
      )

  def epsilon_of(self, ledger: Ledger) -> float:
    return self.silos.epsilon(self.ran(ledger))

  def profile(self, ledger: Ledger, epsilon: float) -> Profile | None:
    """Returns the largest delta of any silo at each epsilon, so it holds for records of all."""
    del epsilon
    if self.kind == "none":
      return None
    runs = self.silos.held(self.ran(ledger))
    # The steps of several silos together are a tuple.
    profiles = [run.privacy_profile(steps) for run, steps in runs if np.any(steps)]
    if not profiles:
      return None
    return lambda epsilons: functools.reduce(np.maximum, [p(epsilons) for p in profiles])

  def facts(self, ledger: Ledger, epsilon: float) -> dict[str, Any]:
    facts = super().facts(ledger, epsilon)
    if self.kind == "none":
      return facts
    steps = self.ran(ledger)
    each = self.silos.epsilons(steps)
    rows = [
      {
        "silo": name,
        "num_examples": size,
        "sampler": repr(plan.sampler),
        "noise_multiplier": plan.noise_multiplier,
        "num_steps": count,
        "epsilon": spent,
        **_rates(plan, count),
      }
      for name, size, plan, count, spent in zip(
        self.names, self.silos.sizes, self.silos.plans, steps, each
      )
    ]
    return facts | {SILOS: rows, "max_silos_per_record": self.silos.max_silos}


@functools.cache
def _rates(plan: Plan, steps: int) -> dict[str, float]:
  """Returns bounds on attacks that ask for one record of a silo, after so many of its steps."""
  if not steps:
    return dict(guarantee.RATES)  # a silo that was never there has told nothing
  profile = plan.privacy_profile(steps)
  return {
    name: accounting.true_positive_rate(profile, fpr)
    for name, fpr in guarantee.RATES.items()
  }


def promise(config: FedConfig, federation: Federation, silos: Silos) -> SilosGuarantee:
  """Returns the guarantee of a run."""
  asked = config.privacy
  assert isinstance(asked, Records)
  first = silos.plans[0]
  private = all(plan.is_private for plan in silos.plans)
  if not private:
    guarantee.check_nothing_asked(budget=asked.epsilon_budget, release=config.release)
  failed = tuple(dict.fromkeys(line for plan in silos.plans for line in plan.assumptions))
  kind = "claimed" if failed else "proved"
  limit = asked.max_silos_per_record
  names = tuple(federation.client_ids)
  # The steps of a silo may differ from round to round, so the base class gets no event.
  return SilosGuarantee(
    kind=kind if private else "none",
    delta=asked.delta,
    relation=first.neighboring_relation,
    unit=UNIT if limit == 1 else f"{PERSON} {limit} silos",
    accountant=first.accountant,
    curve=lambda rounds: silos.epsilon(silos.num_steps(rounds)),
    words=lambda rounds, kind: _statement(asked, silos, names, rounds, kind),
    accounted_delta=asked.delta,
    l2_bound=first.l2_bound,
    # The largest silo is the first whose records a large delta gives away.
    num_records=max(silos.sizes),
    budget=asked.epsilon_budget,
    failed_assumptions=failed,
    silos=silos,
    names=names,
  )


def _statement(
  asked: Records, silos: Silos, names: tuple[str, ...], rounds: int, kind: str
) -> str:
  """Returns the guarantee in words: of all silos, in a table, and of the worst, in full."""
  steps = silos.num_steps(rounds)
  each = silos.epsilons(steps)
  worst = int(np.argmax(each))
  plan = silos.plans[worst]
  several = _of_several(asked, silos, steps)
  wanted = guarantee.describe_attack_bound(attack_of(asked), asked.delta)
  width = max(len("silo"), *map(len, names))
  head = f"{'silo':<{width}}  records  noise multiplier  steps  epsilon"
  noises = [lower(own.noise_multiplier, decimals=4) for own in silos.plans]
  rows = [
    f"{name:<{width}}  {size:>7}  {noise:>16}  {count:>5}  {upper(spent)}"
    for name, size, noise, count, spent in zip(names, silos.sizes, noises, steps, each)
  ]
  table = "\n".join([head, *rows])
  parts = [
    paragraph(_NOTE),
    paragraph(several),
    paragraph(_SIMULATED),
    wanted,
    f"Silos, with their declared records, at delta {upper(asked.delta)}\n\n{table}",
    f"Of silo {names[worst]!r}, whose epsilon is the largest:",
    plan.statement(silos.sizes[worst], steps[worst], unit="record", epsilon_kind=kind),
  ]
  return "\n\n".join(part for part in parts if part)


def _of_several(asked: Records, silos: Silos, steps: tuple[int, ...]) -> str:
  """Returns what holds for a person whose records lie in several silos, in words."""
  limit = asked.max_silos_per_record
  if limit == 1:
    return (
      "It is a guarantee of one silo's record only. A person with records in several silos has "
      "one guarantee in each; together these are weaker: declare max_silos_per_record=m for the "
      "epsilon of m silos, which follows by composition."
    )
  spent = upper(silos.epsilon(steps))
  return (
    f"A person with one record in each of at most {limit} silos, which was declared: epsilon "
    f"{spent} at delta {upper(asked.delta)}, the largest composition of the steps of any {limit} "
    "silos, each of which depends on the others only by what was sent. Nothing is proved for a "
    "person in more silos, or with more records in one."
  )


def in_words(result: Mapping[str, Any]) -> str:
  """Returns what a finished run's line says of its silos; "" if it has none.

  >>> in_words({"silos": [{"silo": "a", "epsilon": 0.5}, {"silo": "b", "epsilon": 1.0}],
  ...   "test_silo_accuracy_mean": 0.9, "test_silo_accuracy_worst": 0.8})
  '; silos: epsilon a: 0.5, b: 1, accuracy mean 0.9000, worst 0.8000'
  """
  rows = result.get(SILOS)
  if not rows:
    return ""
  epsilon = lambda row: by_name("epsilon", row["epsilon"])
  each = ", ".join(f"{row['silo']}: {epsilon(row)}" for row in rows[:5])
  more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
  scored = "".join(
    f", {'accuracy ' if key == 'mean' else ''}{key} {result[name]:.4f}"
    for key in ("mean", "worst")
    if (name := f"test_{SCORE}_{key}") in result
  )
  return f"; silos: epsilon {each}{more}{scored}"
