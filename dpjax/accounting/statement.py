"""Privacy statements: what an epsilon means in words, and what it does not cover."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dp_accounting.dp_event import RepeatAndSelectDpEvent

from dpjax import validate
from dpjax.accounting.epsilon import Counting, privacy_profile
from dpjax.accounting.epsilon import epsilon as epsilon_of
from dpjax.accounting.event_kinds.elements import claims, describe, mechanism_of, parts
from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.accounting.loss_grid import Profile
from dpjax.accounting.overflow import with_aborts
from dpjax.accounting.proved import ACCOUNTANTS, RELATIONS
from dpjax.accounting.text import lower, paragraph, upper
from dpjax.validate import UserError

EPSILON_KINDS = {
  "proved": "an upper bound, proved for the mechanism described below",
  "claimed": "resting on what is assumed, and NOT proved here",
  "approximation": "an approximation in the limit of many steps, which may be too small",
  "none": "no bound at all",
  "audited_lower_bound": "a lower bound measured by an attack, the truth is no less",
}
# Statement for a run without a finite proved epsilon, such as one without noise.
NOTHING = "Privacy statement\n\nNone: no epsilon is proved for this run."
_RELATIONS = {
  "add_or_remove_one": "one {unit} more or less",
  "replace_one": "one {unit} exchanged for any other",
  "replace_special": "one {unit} exchanged for an empty record that contributes zero",
}
RELEASED = "every iterate, hence also the last one"
_NOT_COVERED = (
  "the choice of hyper-parameters, architecture and stopping time, when made by looking at "
  "the private data",
  "runs that were not charged",
  "per-{unit} losses, gradient norms and clip fractions, where logged",
  "{fitted} fitted to the private data before training",
  "several {unit}s that belong together",
  "scores on test data, also where one {unit} is in both",
  "a split by row numbers, in which one {unit} less moves others between training and test data",
  "the noise key (a seed, or a checkpoint that holds it, is a secret)",
  "the finite precision of floating-point noise",
)


def not_covered(unit: str, fitted: str = "statistics") -> tuple[str, ...]:
  """Returns what no epsilon covers, as phrases.

  Args:
    unit: name of what counts as one record.
    fitted: what else may have been fitted to the private data.

  >>> not_covered("user")[4]
  'several users that belong together'
  """
  return tuple(words.format(unit=unit, fitted=fitted) for words in _NOT_COVERED)


def difference(relation: str, unit: str) -> str:
  """Returns in words how two neighbouring data sets differ.

  >>> difference("add_or_remove_one", "user")
  'one user more or less'
  """
  return _RELATIONS[relation].format(unit=unit)


def delta_warning(delta: float, num_examples: int) -> str | None:
  """Returns a one-line warning if delta >= 1 / num_examples; else None.

  >>> delta_warning(1e-5, 60_000)
  >>> delta_warning(1e-3, 1_000)
  'delta=0.001 is not below 1/num_examples=0.001: publishing one record, ...'
  """
  validate.open_unit(delta=delta)
  validate.integer_at_least(1, num_examples=num_examples)
  if delta < 1 / num_examples:
    return None
  return (
    f"delta={upper(delta)} is not below 1/num_examples={1 / num_examples:g}: publishing one "
    "record, picked at random, in the clear would satisfy such a guarantee; choose delta "
    "well below it"
  )


def privacy_statement(
  event: DpEvent,
  *,
  delta: float,
  neighboring_relation: str = "add_or_remove_one",
  num_examples: int | None = None,
  unit: str = "example",
  accountants: Sequence[str] = ACCOUNTANTS,
  epsilon_kind: str = "proved",
  epsilons: Mapping[str, float] | None = None,
  delta_set_aside: float = 0.0,
  noise: str = "",
  statistics: str = "",
) -> str:
  """Returns the guarantee of a run in words, with a table accountant -> epsilon.

  Args:
    event: event of the whole run.
    num_examples: number of units; None if it is not stated. Under add_or_remove_one, the DECLARED
      constant that the mechanism used; under other relations, the true number, equal in neighbours.
    unit: name of what counts as one record, such as "example" or "user".
    epsilon_kind: a key of `EPSILON_KINDS`. What an event itself claims is never "proved".
    epsilons: name -> epsilon, for a table of values that no accountant computes.
    delta_set_aside: part of delta reserved for a failure outside `event`, such as a batch above
      its capacity. Epsilon is taken at the remaining delta.
    noise: description of a step's noise, if this noise is not that of `event`. It follows the
      description of `event`, with a note that the noise of `event` is not that of a step.
    statistics: description of the private statistics that `event` includes and that were computed
      before the first step; "" for none.

  >>> import dp_accounting as dpa
  >>> text = privacy_statement(dpa.GaussianDpEvent(2.0), delta=1e-5)
  >>> print(text[text.index("accountant"):])
  accountant  epsilon
  pld         1.9931
  rdp         2.1658
  """
  validate.open_unit(delta=delta)
  validate.one_of(RELATIONS, neighboring_relation=neighboring_relation)
  validate.one_of(EPSILON_KINDS, epsilon_kind=epsilon_kind)
  assumed = claims(event)
  if epsilon_kind == "proved" and assumed:
    epsilon_kind = "claimed"
  rows = {}
  attackers = ""
  is_known = epsilons is not None
  for name, value in (epsilons or {}).items():
    rows[name] = upper(value, decimals=4)
  for name in accountants if epsilons is None else ():
    relation: Counting = {"neighboring_relation": neighboring_relation, "accountant": name}
    try:
      # The chance of an abort costs the rest of the stated delta.
      epsilon = epsilon_of(event, delta=delta - delta_set_aside, **relation)
    except UserError as error:
      # The statement is still useful with the other accountant's epsilon.
      rows[name] = f"not available ({error})"
      continue
    rows[name] = upper(epsilon, decimals=4)
    is_known |= math.isfinite(epsilon)
    if not attackers and math.isfinite(epsilon):
      profile = privacy_profile(event, **relation)
      profile = with_aborts(profile, aside=delta_set_aside, epsilon=epsilon)
      attackers = _attackers(profile, delta, name)
  epsilon_kind = epsilon_kind if is_known else "none"
  selected = any(
    isinstance(mechanism_of(part), RepeatAndSelectDpEvent) for part in parts(event)
  )
  *rest, last = not_covered(unit, "other statistics" if statistics else "statistics")
  as_if = " as no worse than (this is not the noise of a step)" if noise else ""
  words = [
    _headline(rows, delta, delta_set_aside, epsilon_kind),
    *([f"Assumed: {'; '.join(assumed)}."] if assumed else []),
    _adjacency(neighboring_relation, unit, num_examples),
    *([attackers] if attackers else []),
    f"Charged{as_if}: {describe(event, unit) or 'nothing'}.",
    *noise.splitlines(),
    *statistics.splitlines(),
    f"Released: {RELEASED}. Not covered: "
    f"{'beyond the selection above, ' if selected else ''}"
    f"{'; '.join(rest)}; and {last}.",
  ]
  warning = None if num_examples is None else delta_warning(delta, num_examples)
  words += [f"WARNING: {warning}."] if warning else []
  broken = "\n".join(paragraph(sentence) for sentence in words)
  width = max(12, *(len(name) + 2 for name in rows))
  lines = [f"{name:<{width}}{value}" for name, value in rows.items()]
  heading = f"{'accountant':<{width}}epsilon"
  return "\n".join(["Privacy statement", "", broken, "", heading, *lines])


def _attackers(profile: Profile, delta: float, accountant: str) -> str:
  """Returns bounds on every membership test, in words, from what an accountant proves."""
  # Imported here, since every run imports `statement`, but needs these modules only when it writes
  # a statement.
  from dpjax.accounting.attack_bounds import advantage, true_positive_rate
  from dpjax.accounting.trade_off import pairs_of

  mu = pairs_of(profile, delta).mu(delta)
  gaussian = (
    f" It is {upper(mu)}-Gaussian DP up to {upper(delta)}: no test tells the two apart "
    f"better than a draw of N(0, 1) from one of N({upper(mu)}, 1)."
    if math.isfinite(mu)
    else ""
  )
  hundredth = upper(true_positive_rate(profile, 0.01))
  thousandth = upper(true_positive_rate(profile, 0.001))
  return (
    f"In an attacker's terms ({accountant}): a test that tells two neighbouring data sets "
    f"apart has a true positive rate of at most {hundredth} at a false positive rate of 0.01, "
    f"of at most {thousandth} at 0.001, and is never more than "
    f"{upper(advantage(profile))} above its false positive rate.{gaussian}"
  )


def _headline(
  rows: Mapping[str, str], delta: float, delta_set_aside: float, epsilon_kind: str
) -> str:
  known = [f"{value} ({name})" for name, value in rows.items() if value[0] != "n"]
  aside = f" (of which {lower(delta_set_aside)} is set aside for batches above capacity)"
  return (
    f"Epsilon {' or '.join(known) or 'unknown'} at delta {upper(delta)}"
    f"{aside if delta_set_aside else ''}; kind: {epsilon_kind.replace('_', ' ')}, that is "
    f"{EPSILON_KINDS[epsilon_kind]}."
  )


def _adjacency(relation: str, unit: str, num_examples: int | None) -> str:
  sentence = (
    f"Unit: one {unit}. Neighbouring data sets ({relation}) differ by "
    f"{difference(relation, unit)}."
  )
  if relation != "add_or_remove_one":
    size = "" if num_examples is None else f" ({num_examples})"
    return (
      f"{sentence} The number of {unit}s{size} is the same in neighbouring data sets. It and all "
      "hyper-parameters are treated as public."
    )
  # The true number of records could reveal whether one of them is there, so a declared number takes
  # its place.
  declared = (
    f"A declared number of {unit}s"
    if num_examples is None
    else f"The declared number of {num_examples} {unit}s"
  )
  return (
    f"{sentence} {declared}, a constant that does not follow from the data, was used wherever a "
    "mechanism needs their size. All hyper-parameters are treated as public."
  )
