"""The guarantee of a run. Every epsilon that a run guarantees is read from here.

A guarantee is made before the first step. It gives epsilon and a statement for any number of
steps. At the end, a proved epsilon is computed from the ledger, which holds the steps that ran.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dp_accounting import DpEvent, NoOpDpEvent

from dpjax import accounting, validate
from dpjax.accounting import Budget, Ledger, attack_bounds, overflow, upper
from dpjax.accounting.attack_bounds import AttackBound
from dpjax.accounting.epsilon import privacy_profile
from dpjax.accounting.event_kinds.elements import claims
from dpjax.accounting.ledger import BudgetExceeded
from dpjax.accounting.loss_grid import Profile
from dpjax.accounting.proved import ADD
from dpjax.accounting.statement import NOTHING, delta_warning
from dpjax.accounting.text import by_name, paragraph
from dpjax.experiments.run import writers
from dpjax.noise import source
from dpjax.plan import Plan
from dpjax.validate import UserError

KINDS = writers.EPSILON_KINDS
_FACTS = ("epsilon", "delta", "neighboring_relation", "unit")
# The assumption that fails if a run's noise can be repeated (`as_repeatable`).
REPEATED = "the noise is secret: it follows from noise_seed"
# The one that fails if small cohorts stand for those of a larger deployment (`of_plan`).
DEPLOYED = "cohorts are as large as simulated: those of this run were smaller"
# Key of result.json for the epsilon of what really ran, beside that of a larger deployment.
OWN_EPSILON = "epsilon_of_this_run"
# Keys of result.json for bounds on every membership attack, which follow from the proof of epsilon.
MU = "mu"
RATES = {"tpr_at_fpr_0.001": 1e-3, "tpr_at_fpr_0.01": 1e-2, "tpr_at_fpr_0.1": 0.1}
ADVANTAGE = "max_advantage"


@dataclasses.dataclass(frozen=True)
class Guarantee:
  """The privacy guarantee of a run: unit, kind of epsilon, neighbouring relation and accountant.

  >>> Guarantee("claimed", 0.0, "replace_one")
  Traceback (most recent call last):
  ...
  ValueError: a claimed epsilon must name the assumptions that fail
  """

  kind: str  # proved | simulated (of a larger deployment) | claimed | none
  delta: float | None
  relation: str
  unit: str = "example"
  accountant: str = ""
  # Event of step t of THIS run, and event of all its steps from t to the last one.
  step_event: Callable[[int], DpEvent] = lambda step: NoOpDpEvent()
  remaining_event: Callable[[int], DpEvent] = lambda start: NoOpDpEvent()
  curve: Callable[[int], float] = lambda steps: math.inf  # epsilon after `steps` steps
  # Function (number of steps, kind of epsilon) -> the guarantee after these steps, in words.
  words: Callable[[int, str], str] = lambda steps, kind: NOTHING
  accounted_delta: float | None = None  # delta for the ledger: the rest is set aside
  l2_bound: float = math.inf  # largest norm of one record's part in a step
  num_records: int | None = (
    None  # public number of records; delta should be far below 1 / n
  )
  budget: float | None = None  # largest epsilon; a run that would exceed it is refused
  # Assumptions that fail: those of a claim, or those of the run that simulates a deployment.
  failed_assumptions: tuple[str, ...] = ()
  # Profile of the larger deployment, whose steps differ from the steps of the simulation.
  deployed_profile: Callable[[], Profile] | None = None

  def __post_init__(self) -> None:
    validate.one_of(KINDS, kind=self.kind)
    if self.kind == "claimed" and not self.failed_assumptions:
      raise ValueError("a claimed epsilon must name the assumptions that fail")

  def statement(self, steps: int) -> str:
    """Returns the guarantee after so many steps, in words, which name the kind of its epsilon."""
    # Of a simulated run it is the guarantee of the deployment, whose epsilon is proved.
    return self.words(steps, "claimed" if self.kind == "claimed" else "proved")

  @property
  def is_of_deployment(self) -> bool:
    """Returns whether this is the guarantee of a larger deployment: a simulated one, or a claim, as
    with a `noise_seed` or a user's sampler."""
    return self.deployed_profile is not None

  @property
  def unit_owns_records(self) -> bool:
    """Returns whether a unit has several records, as a user has. Where records are dealt otherwise,
    it is another unit."""
    return self.unit == "user"

  def charge(self, ledger: Ledger, steps: range, *, noise_key_id: str) -> Ledger:
    """Returns the ledger with the events of these steps, in order."""
    # Consecutive equal steps form one entry.
    for event, run in itertools.groupby(steps, key=self.step_event):
      first, *more = run
      ledger = ledger.charge(
        event,
        num_steps=1 + len(more),
        l2_clip_norm=self.l2_bound,
        neighboring_relation=self.relation,
        noise_key_id=noise_key_id,
        first_step=first,
      )
    return ledger

  def check_budget(self, ledger: Ledger) -> None:
    """Checks, before the next step, that the run stays within its budget to its last step.

    Raises:
      BudgetExceeded: all steps together would exceed the budget. The error names the field
        `privacy.epsilon_budget`.
    """
    if self.budget is None or self.kind == "none":
      return
    budget = Budget(epsilon=self.budget, delta=self.accounted_delta or 0.0)
    proposed = self.remaining_event(ledger.num_steps)
    try:
      ledger.check(
        budget,
        proposed,
        neighboring_relation=self.relation,
        accountant=self.accountant,
      )
    except BudgetExceeded as error:
      raise error.of(field="privacy.epsilon_budget") from error

  def epsilon_of(self, ledger: Ledger) -> float:
    """Returns epsilon of the steps in the ledger, not of the planned steps."""
    return ledger.epsilon(
      self.accounted_delta or 0.0,
      neighboring_relation=self.relation,
      accountant=self.accountant,
    )

  def profile(self, ledger: Ledger, epsilon: float) -> Profile | None:
    """Returns the privacy profile: pairs (epsilon, delta) that all hold at once. None: there is no
    guarantee, or no event to account for.

    Args:
      ledger: ledger of the steps that ran. If it is empty, or epsilon is not proved, the profile is
        that of all planned steps.
      epsilon: epsilon on the curve, after all steps.
    """
    if self.kind == "none" or not math.isfinite(epsilon):
      return None
    if self.deployed_profile is not None:
      return self.deployed_profile()
    ran = self.kind == "proved" and ledger.charges
    event = ledger.event() if ran else self.remaining_event(0)
    if isinstance(event, NoOpDpEvent):
      return None
    profile = privacy_profile(
      event, neighboring_relation=self.relation, accountant=self.accountant
    )
    aside = (self.delta or 0.0) - (self.accounted_delta or 0.0)
    return overflow.with_aborts(profile, aside=aside, epsilon=epsilon)

  def attackers(self, ledger: Ledger, epsilon: float) -> dict[str, float]:
    """Returns bounds on every membership attack, by keys of result.json; {} if there are none."""
    profile = self.profile(ledger, epsilon)
    if profile is None or not self.delta:
      return {}
    mu = accounting.pairs_of(profile, self.delta).mu(self.delta)
    rates = {
      name: accounting.true_positive_rate(profile, fpr) for name, fpr in RATES.items()
    }
    known = {MU: mu} if math.isfinite(mu) else {}
    return known | rates | {ADVANTAGE: attack_bounds.advantage(profile)}

  def facts(self, ledger: Ledger, epsilon: float) -> dict[str, Any]:
    """Returns the privacy part of result.json.

    Args:
      ledger: ledger of the steps that ran.
      epsilon: epsilon on the curve, after all steps.
    """
    if self.kind == "none" or not math.isfinite(epsilon):
      return dict.fromkeys(_FACTS) | {"epsilon_kind": "none", "accountant": None}
    facts = {
      "epsilon": epsilon,
      "delta": self.delta,
      "neighboring_relation": self.relation,
      "unit": self.unit,
      "epsilon_kind": self.kind,
      "accountant": self.accountant or None,
    }
    if self.unit_owns_records:
      facts |= {"unit_owns_records": True}
    if self.failed_assumptions:
      facts |= {"failed_assumptions": list(self.failed_assumptions)}
    facts |= self.attackers(ledger, epsilon)
    if self.is_of_deployment:
      return facts | {OWN_EPSILON: self.epsilon_of(ledger)}
    # Epsilon is computed from the steps that ran: a run that ended early costs less than its plan.
    proved = self.kind == "proved" and ledger.charges
    # If a part of delta is set aside for aborts, the ledger's epsilon holds at the rest of delta.
    left = self.accounted_delta
    aside = {} if left in (None, self.delta) else {"accounted_delta": left}
    return facts | aside | ({"epsilon": self.epsilon_of(ledger)} if proved else {})

  def warn(self) -> None:
    """Prints a warning if delta is not below 1 / number of records."""
    if not (self.delta and self.num_records) or self.kind == "none":
      return
    warning = delta_warning(self.delta, self.num_records)
    if warning:
      what = "num_clients" if self.unit == "user" else "num_examples"
      writers.warn(warning.replace("num_examples", what))


def of_plan(
  plan: Plan,
  num_records: int,
  *,
  ran: Plan | None = None,
  deployed: int | None = None,
  budget: float | None = None,
  release: bool = False,
) -> Guarantee:
  """Returns the guarantee of a plan that runs on `num_records` records.

  Args:
    ran: plan of the steps that really run, if `plan` is the plan of a larger deployment with
      `deployed` records. The guarantee is then simulated, or claimed if `plan` makes assumptions.
      None: `plan` itself runs.
    budget: largest epsilon; None: there is no budget.
    release: whether noise is on a grid, with keys of 256 bits; see `release_paragraph`.

  Raises:
    UserError: a run without a guarantee has a budget, or is a release.
  """
  if not plan.is_private or (release and not math.isfinite(plan.epsilon())):
    check_nothing_asked(budget=budget, release=release)
  # The ledger records the actual run. The statement may be about a larger deployment.
  runs = plan if ran is None else ran
  kind = "claimed" if plan.assumptions else ("proved" if ran is None else "simulated")
  failed = plan.assumptions or runs.assumptions
  if plan.assumptions and ran is not None:
    failed = (*failed, DEPLOYED)

  def words(steps: int, kind: str) -> str:
    text = plan.statement(deployed or num_records, steps, epsilon_kind=kind)
    return f"{text}\n\n{release_paragraph(plan)}" if release else text

  return Guarantee(
    kind=kind if plan.is_private else "none",
    delta=plan.delta,
    relation=plan.neighboring_relation,
    unit=plan.unit,
    accountant=plan.accountant,
    step_event=runs.step_event,
    remaining_event=runs.remaining_event,
    curve=lambda steps: float(plan.epsilon_curve([steps])[0]),
    words=words,
    accounted_delta=runs.accounted_delta(plan.delta),
    l2_bound=runs.l2_bound,
    num_records=num_records,
    budget=budget,
    failed_assumptions=failed,
    deployed_profile=None if ran is None else plan.privacy_profile,
  )


def of_event(
  event: DpEvent,
  *,
  delta: float,
  l2_bound: float,
  num_records: int | None,
  relation: str = ADD,
  num_steps: int = 1,
  accountant: str = "pld",
  unit: str = "example",
  budget: float | None = None,
  assumed: str = "",
  release: bool = False,
) -> Guarantee:
  """Returns the guarantee of a run without a `Plan`, in which every step has the same event.

  Nothing here can check that the steps do what the event says.

  Args:
    event: event of one step, such as `mechanism.event(relation)`.
    l2_bound: largest norm of one record's part, to which the event's noise is relative.
    num_records: public number of records; see `num_examples` of `accounting.privacy_statement`.
      None: the number is unknown or secret.
    assumed: unproved assumption of epsilon, which makes epsilon claimed; "": there is none. An
      event with user-defined accounting makes epsilon claimed, too.
    release: whether the model is to be published; such a run must have a finite epsilon.

  Raises:
    UserError: a run without a guarantee has a budget, or is a release.

  >>> from dpjax.accounting import gaussian_event
  >>> stated = of_event(gaussian_event(2.0), delta=1e-5, l2_bound=1.0, num_records=100)
  >>> stated.kind, round(stated.curve(1), 3)
  ('proved', 1.993)
  """
  failed = [*claims(event)]
  if assumed:
    failed.append(assumed)
  kind = "claimed" if failed else "proved"
  rules: dict[str, Any] = {"delta": delta, "neighboring_relation": relation}

  def curve(steps: int) -> float:
    return accounting.epsilon(
      accounting.compose(event, steps), accountant=accountant, **rules
    )

  def words(steps: int, kind: str) -> str:
    return accounting.privacy_statement(
      accounting.compose(event, steps),
      num_examples=num_records,
      unit=unit,
      accountants=(accountant,),
      epsilon_kind=kind,
      **rules,
    )

  # An infinite epsilon, as without noise, is no guarantee. A budget or a release is then refused.
  is_private = math.isfinite(curve(num_steps))
  if not is_private:
    check_nothing_asked(budget=budget, release=release)
  return Guarantee(
    kind=kind if is_private else "none",
    delta=delta,
    relation=relation,
    unit=unit,
    accountant=accountant,
    step_event=lambda step: event,
    remaining_event=lambda start: accounting.compose(event, num_steps - start),
    curve=curve,
    words=words if is_private else lambda steps, kind: NOTHING,
    accounted_delta=delta,
    l2_bound=l2_bound,
    num_records=num_records,
    budget=budget,
    failed_assumptions=tuple(failed),
  )


NONE = Guarantee("none", None, "")


def delta_of_ledger(result: Mapping[str, Any]) -> Any:
  """Returns the delta at which the ledger of a result.json has the result's epsilon."""
  # Without aborts the whole delta is left for the steps, and is not written twice.
  return result.get("accounted_delta", result["delta"])


def names_of(assumptions: Iterable[str]) -> str:
  """Returns the names of assumptions, separated by commas. An assumption is "NAME: DESCRIPTION".

  >>> names_of(["C1: the clip norm is a guess", "C4: no noise"])
  'C1, C4'
  """
  return ", ".join(text.split(":")[0] for text in assumptions)


def check_nothing_asked(*, budget: float | None, release: bool) -> None:
  """Raises UserError if a run without a guarantee has a budget, or is a release."""
  if release or budget is not None:
    raise UserError(
      "needs an epsilon, and nothing is proved for this run",
      field="release" if release else "privacy.epsilon_budget",
      value=release or budget,
    )


def add_note(promised: Guarantee, note: str, assumed: str = "") -> Guarantee:
  """Returns the guarantee with a note before its statement; if the note is "", it is unchanged.

  Args:
    assumed: assumption that nothing here can check, which makes the guarantee a claim; "": none.
  """
  if not note:
    return promised
  words = promised.words
  noted_guarantee = dataclasses.replace(
    promised, words=lambda steps, kind: f"{note}\n\n{words(steps, kind)}"
  )
  if not assumed or promised.kind == "none":
    return noted_guarantee
  # A claim has one list of what fails. What made the guarantee a simulated one belongs there, too.
  deployed = (DEPLOYED,) if promised.kind == "simulated" else ()
  rests = (*promised.failed_assumptions, *deployed, assumed)
  return dataclasses.replace(noted_guarantee, kind="claimed", failed_assumptions=rests)


def as_repeatable(promised: Guarantee, noise_seed: int | None) -> Guarantee:
  """Returns the guarantee of a run whose noise follows from `noise_seed`: a claim.

  With None, whose keys come from the operating system, for a run without a guarantee, and for one
  that is such a claim already, it is unchanged.

  >>> from dpjax.accounting import gaussian_event
  >>> proved = of_event(gaussian_event(2.0), delta=1e-5, l2_bound=1.0, num_records=100)
  >>> as_repeatable(proved, 3).failed_assumptions
  ('the noise is secret: it follows from noise_seed',)
  """
  if (
    noise_seed is None or promised.kind == "none" or REPEATED in promised.failed_assumptions
  ):
    return promised
  note = (
    f"CLAIMED. Noise and sampling follow from noise_seed={noise_seed}, so that the run can be "
    "repeated. Whoever knows this number can subtract the noise. What follows would hold if the "
    "noise were secret."
  )
  return add_note(promised, paragraph(note), REPEATED)


def describe_attack_bound(attack: AttackBound | None, delta: float) -> str:
  """Describes the attack bound to which a run's noise was calibrated; "" if there is none, for
  example if the noise was calibrated to an epsilon.

  >>> describe_attack_bound(accounting.TruePositiveRate(tpr=0.1, fpr=0.01), 1e-5)[:45]
  'The noise was calibrated so that no test of m'
  """
  if attack is None:
    return ""
  return paragraph(
    f"The noise was calibrated so that {attack.words(delta)}, by the accounting below and under "
    "its assumptions."
  )


def release_paragraph(plan: Plan) -> str:
  """Returns the paragraph of the privacy statement about release mode. It also lists what the
  guarantee does not cover."""
  # The grid must be fine relative to the least noise of any step.
  least = plan.noise_multiplier * min(plan.noise_shape.schedule, default=1.0)
  step = source.grid_step(least * plan.l2_bound)
  return paragraph(
    "Release mode. The noise key has 256 bits of the operating system's entropy and is "
    "stretched by ChaCha20; it is kept in the checkpoints only: delete them, or keep them "
    "as secret as the data. Batches are drawn by NumPy's Philox from a 256-bit seed of the "
    "same origin; Philox is not a cryptographic generator. Each noisy sum is rounded to the "
    f"grid of multiples of {step:g} before anything is computed from it, so that which "
    "numbers can occur does not depend on the data; that the probabilities on the grid are "
    "those of an ideal rounded Gaussian is not proved to the last bit. Per-example "
    "diagnostics were switched off. How long anything took follows the private sizes of "
    "batches and cohorts and is not covered: no file of the run says it (there are no "
    "TensorBoard events), but the files' own times and progress on a terminal do, so release "
    "neither of these."
  )


def summary(result: Mapping[str, Any]) -> str:
  """Returns the guarantee of a result.json in a few words. For a claim, the words include the names
  of the assumptions that fail.

  >>> summary({"epsilon_kind": "none"})
  'not private'
  """
  kind = result["epsilon_kind"]
  if kind == "none":
    return "not private"
  epsilon = f"epsilon={by_name('epsilon', result['epsilon'])}"
  under = f"delta={upper(result['delta'])}, {result['neighboring_relation']}"
  if kind == "simulated" and result.get("failed_assumptions"):
    under += ", what really ran is not proved"
  if kind != "claimed":
    meaning = f"{epsilon} ({kind}, {under}, per {result['unit']})"
    return f"{meaning}{attackers_bound(result)}"
  theorem = result.get("claimed_epsilon_thm7")
  by_theorem = f"; {upper(theorem)} by its own theorem 7" if theorem else ""
  failed = names_of(result["failed_assumptions"])
  return (
    f"{epsilon} (CLAIMED, {under}, per {result['unit']}{by_theorem}; nothing is proved; "
    f"fails or is assumed: {failed})"
  )


def attackers_bound(result: Mapping[str, Any]) -> str:
  """Returns the bounds on attackers in a result.json, as text to append to an epsilon; "" if there
  are none.

  >>> attackers_bound({"mu": 0.5, "tpr_at_fpr_0.01": 0.034})
  ', mu=0.5, TPR at most 0.034 at FPR 0.01'
  """
  words = [f", mu={upper(result[MU])}"] if MU in result else []
  name = "tpr_at_fpr_0.01"
  if name in result:
    words.append(f", TPR at most {upper(result[name])} at FPR 0.01")
  return "".join(words)
