"""Events that hold other events, elementary mechanisms, and the accountants that prove their cost.

`compose` makes a composition, and `parts` takes an event apart. `accountable` refuses parts for
which an accountant has no proof under a relation, and returns the others as accountants compose
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import dp_accounting as dpa
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from dpjax import validate
from dpjax.accounting.event_kinds.kind import (
  ORDERS,
  TOO_DEEP,
  DpEvent,
  Event,
  EventKind,
  check_is_list,
  is_user_defined,
  kind_of,
  plain_number,
  register,
  replace_fields,
)
from dpjax.accounting.proved import ACCOUNTANTS, ADD, RELATIONS, REPLACE
from dpjax.validate import UserError, Verbatim

Parts = Mapping[DpEvent, int]

# A computed Renyi divergence D errs by less than this times 1 + D. The largest error seen is a
# tenth of it (against 40 digits, for orders up to 1024).
_RDP_ROUNDING = 1e-14
# Larger counts, which only a hand-made file holds, would overflow a float.
_MOST_TIMES = 2**63 - 1


class NoOpKind(EventKind[dpa.NoOpDpEvent]):
  """A run in which nothing was released."""

  name = "no_op"
  event = dpa.NoOpDpEvent

  def elements(self, event: dpa.NoOpDpEvent) -> Iterable[tuple[DpEvent, int]]:
    return ()


class NonPrivateKind(EventKind[dpa.NonPrivateDpEvent]):
  """A release without noise, whose epsilon is infinite."""

  name = "non_private"
  event = dpa.NonPrivateDpEvent
  relations = RELATIONS

  def describe(self, part: dpa.NonPrivateDpEvent, unit: str) -> str:
    return "a release without noise"


class SelfComposedKind(EventKind[dpa.SelfComposedDpEvent]):
  """Composition of one event with itself, `count` times."""

  name = "self_composed"
  event = dpa.SelfComposedDpEvent

  def elements(self, event: dpa.SelfComposedDpEvent) -> Iterable[tuple[DpEvent, int]]:
    validate.integer_in(0, _MOST_TIMES, count=event.count)
    count = int(event.count)
    # The inner event is taken apart even for 0 repetitions, so that an unknown event is refused.
    for part, times in kind_of(event.event).elements(event.event):
      if count > 0:
        yield part, times * count


class ComposedKind(EventKind[dpa.ComposedDpEvent]):
  """Several events, one after the other."""

  name = "composed"
  event = dpa.ComposedDpEvent

  def elements(self, event: dpa.ComposedDpEvent) -> Iterable[tuple[DpEvent, int]]:
    check_is_list(event.events)
    for inner in event.events:
      yield from kind_of(inner).elements(inner)


@dataclasses.dataclass(frozen=True)
class StatedDpEvent(dpa.DpEvent):
  """An event that is true under ONE neighbouring relation, and is accounted under no other.

  A sensitivity under replace_one says nothing of a record that comes or goes. A pure epsilon under
  add_or_remove_one is twice as large for a replaced record. Accounted under another relation, such
  events would cost half of what they do, or what nothing proves.
  """

  neighboring_relation: str
  event: DpEvent


class WithinKind(EventKind[Event]):
  """The accounting of the event within, of which a wrapper says more."""

  def proofs(self, part: Event) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return kind_of(part.event).proofs(part.event)  # type: ignore[attr-defined]

  # Accountants compose what this returns, so the kind needs no analysis of its own.
  def under(self, part: Event, neighboring_relation: str) -> DpEvent:
    inner = part.event  # type: ignore[attr-defined]
    return kind_of(inner).under(inner, neighboring_relation)

  def zcdp(self, part: Event) -> float:
    return kind_of(part.event).zcdp(part.event)  # type: ignore[attr-defined]

  def describe(self, part: Event, unit: str) -> str:
    return kind_of(part.event).describe(part.event, unit)  # type: ignore[attr-defined]


class StatedKind(WithinKind[StatedDpEvent]):
  """The accounting of the inner event, refused under all relations but one."""

  name = "stated"
  event = StatedDpEvent

  def elements(self, event: StatedDpEvent) -> Iterable[tuple[DpEvent, int]]:
    validate.one_of(RELATIONS, neighboring_relation=event.neighboring_relation)
    relation = event.neighboring_relation
    for part, times in merged_parts(event.event).items():
      # What has no noise is private under no relation. A part is stated once, as accountants look
      # at what is within: nested statements that differ have no relation in common.
      stated = isinstance(part, StatedDpEvent) and part.neighboring_relation == relation
      known = stated or isinstance(part, dpa.NonPrivateDpEvent)
      yield part if known else StatedDpEvent(relation, part), times

  def proofs(self, part: StatedDpEvent) -> tuple[tuple[str, ...], tuple[str, ...]]:
    relations, accountants = super().proofs(part)
    stated = part.neighboring_relation
    return (stated,) if stated in relations else (), accountants


@dataclasses.dataclass(frozen=True)
class ClaimedDpEvent(dpa.DpEvent):
  """An event of which dpjax does not prove that it is what ran, such as one that a user's sampler
  states. It costs what the event within costs; see `claims`.

  The event itself says so, since it goes where no plan goes: into ledgers, files and compositions.
  """

  claim: str  # what is assumed
  event: DpEvent


class ClaimedKind(WithinKind[ClaimedDpEvent]):
  """The accounting of the inner event, whose epsilon is then claimed."""

  name = "claimed"
  event = ClaimedDpEvent

  def elements(self, event: ClaimedDpEvent) -> Iterable[tuple[DpEvent, int]]:
    if not isinstance(event.claim, str) or not event.claim:
      raise UserError("must say what is assumed", field="claim", value=event.claim)
    for part, times in parts(event.event).items():
      known = isinstance(part, dpa.NonPrivateDpEvent)
      yield part if known else ClaimedDpEvent(event.claim, part), times


def with_claims(event: DpEvent, claims: Iterable[str]) -> DpEvent:
  """Returns the event as one that rests on these assumptions. One that costs nothing, or is not
  private, rests on none."""
  if isinstance(event, dpa.NoOpDpEvent | dpa.NonPrivateDpEvent):
    return event
  for claim in claims:
    event = ClaimedDpEvent(claim, event)
  return event


def claims(event: DpEvent) -> tuple[str, ...]:
  """Returns what is assumed of an event, at any depth; empty if its epsilon is proved.

  >>> claims(compose(with_claims(dpa.GaussianDpEvent(1.0), ["Mine: my word"]), 3))
  ('Mine: my word',)
  >>> claims(dpa.GaussianDpEvent(1.0))
  ()
  """
  assumed: dict[str, None] = {}
  left = [event]
  while left:
    each = left.pop()
    if isinstance(each, ClaimedDpEvent):
      assumed[each.claim] = None
    # The accounting of a user-defined event is the user's claim, so dpjax proves nothing for it.
    elif is_user_defined(kind_of(each)):
      assumed[f"{type(each).__name__}: its accounting is its author's word"] = None
    inner = getattr(each, "event", None)
    left += [inner] if isinstance(inner, DpEvent) else []
    left += getattr(each, "events", ())
  return tuple(assumed)


def compose(step_event: DpEvent, num_steps: int) -> DpEvent:
  """Returns the event of `num_steps` adaptive runs of `step_event`; 0 steps cost nothing.

  >>> from dpjax.accounting import gaussian_event
  >>> compose(gaussian_event(1), 0)
  NoOpDpEvent()
  >>> compose(gaussian_event(1), 3).count
  3
  """
  validate.integer_at_least(0, num_steps=num_steps)
  if num_steps == 0:
    return dpa.NoOpDpEvent()
  # The count is a Python integer, because JSON cannot write NumPy's integers.
  return dpa.SelfComposedDpEvent(step_event, int(num_steps))


def parts(event: DpEvent) -> Counter[DpEvent]:
  """Returns part -> how often it ran, for the elementary mechanisms of an event.

  Compositions are taken apart. A sampled composition of Gaussians becomes one sampled Gaussian,
  exactly. Zero noise becomes NonPrivateDpEvent. Raises UserError for an unknown event.

  >>> from dpjax.accounting import compose, gaussian_event, poisson_sampled_event
  >>> parts(compose(poisson_sampled_event(gaussian_event(1), sampling_prob=0.5), 3))
  Counter({PoissonSampledDpEvent(...): 3})
  """
  counts: Counter[DpEvent] = Counter()
  try:
    for part, times in kind_of(event).elements(event):
      # A negative count of a user's event would cancel the cost of another event.
      validate.integer_at_least(0, times=times)
      # NumPy's narrow numbers could overflow or round.
      for name in kind_of(part).fields:
        value = getattr(part, name)
        number = plain_number(value)
        if number is not value:
          part = replace_fields(part, **{name: number})
      counts[part] += int(times)
  except RecursionError:
    raise UserError(TOO_DEEP, field="event", value=Verbatim(type(event).__name__)) from None
  return counts


def merged_parts(event: DpEvent) -> Counter[DpEvent]:
  """Returns the counts of `parts`, with all unsampled Gaussians merged into one.

  This merging is exact: Gaussians of noise multipliers z_i compose to one of
  (sum_i 1 / z_i^2)^(-1/2) (Dong, Roth and Su 2019, arXiv:1905.02383, corollary 3.3).

  >>> from dpjax.accounting import compose, gaussian_event
  >>> merged_parts(compose(gaussian_event(2), 4))
  Counter({GaussianDpEvent(noise_multiplier=1.0): 1})
  """
  return _merge(parts(event))


def _merge(counts: Counter[DpEvent]) -> Counter[DpEvent]:
  terms = []
  for part in list(counts):
    if isinstance(part, dpa.GaussianDpEvent):
      terms.append(counts.pop(part) / part.noise_multiplier**2)
  if terms:
    # fsum rounds only once. A run may have many terms, one for each noise level.
    counts[dpa.GaussianDpEvent(math.fsum(terms) ** -0.5)] = 1
  return counts


def sampled_elements(event: DpEvent, *allowed: type) -> list[tuple[DpEvent, int]]:
  """Returns the elements of an event that runs one mechanism on a sample; [] if nothing runs.

  Args:
    event: sampled event, with the mechanism in its field `event`.
    allowed: classes of mechanisms that may be sampled.

  Raises:
    UserError: several mechanisms, or one that is not `allowed`.
  """
  inner = merged_parts(event.event)  # type: ignore[attr-defined]
  if not inner:
    return []
  # Sampling is no protection without noise, as a drawn record is released as it is.
  if dpa.NonPrivateDpEvent() in inner:
    return [(dpa.NonPrivateDpEvent(), 1)]
  (part, times), *others = inner.items()
  if others or times > 1 or not isinstance(part, allowed):
    names = " or ".join(cls.__name__ for cls in allowed)
    raise UserError(f"what is sampled must be one {names}", field="event", value=event)
  # A composition of Gaussians was merged into one, and its numbers are plain.
  return [(replace_fields(event, event=part), 1)]


def under(steps: Parts, neighboring_relation: str) -> Counter[DpEvent]:
  """Returns what accountants compose in place of the parts; see `EventKind.under`."""
  counts: Counter[DpEvent] = Counter()
  for part, times in steps.items():
    # Two parts may become equal, such as a sample of fixed size and a Poisson sample.
    for inner, count in parts(kind_of(part).under(part, neighboring_relation)).items():
      counts[inner] += times * count
  return counts


def unamplified(steps: Parts) -> DpEvent:
  """Returns an event that costs no less than the parts; see `EventKind.unamplified`.

  >>> from dpjax.accounting.event_kinds.noisy_sum import gaussian_event
  >>> from dpjax.accounting.event_kinds.random_allocation import random_allocation_event
  >>> unamplified(parts(random_allocation_event(gaussian_event(2), num_steps=9)))
  ComposedDpEvent(events=[SelfComposedDpEvent(event=GaussianDpEvent(...=2.0), count=1)])
  """
  runs = []
  for part, times in steps.items():
    runs.append(dpa.SelfComposedDpEvent(kind_of(part).unamplified(part), times))
  return dpa.ComposedDpEvent(runs)


def check_accountant(accountant: str) -> None:
  """Raises UserError unless the name is an accountant whose epsilon is proved.

  >>> check_accountant("pld")
  """
  if accountant == "gdp":
    raise UserError(
      "an approximation that can be too small and proves nothing; use 'pld' or "
      "'rdp', or ask for it by name: dpjax.accounting.gdp.approximate",
      field="accountant",
      value="gdp",
    )
  validate.one_of(ACCOUNTANTS, accountant=accountant)


def mechanism_of(part: DpEvent) -> DpEvent:
  """Returns the elementary mechanism of a part, also of one that is stated for one relation, or is
  claimed."""
  while isinstance(part, StatedDpEvent | ClaimedDpEvent):
    part = part.event
  return part


class Accounted(NamedTuple):
  """The parts of an event as accountants compose them: part -> how often it ran."""

  parts: Parts
  # Whether replacing a record is accounted as removing one record and adding another. The noise
  # then stays in multiples of the clip norm, else it is in multiples of the sensitivity.
  in_two: bool


def accountable(
  event: DpEvent, neighboring_relation: str = ADD, accountant: str = "pld"
) -> Accounted:
  """Returns the parts of an event, with noise in multiples of the sensitivity under the relation.

  Raises:
    UserError: the accountant has no proof for a part under this relation, or for a part beside one
      whose replacement is accounted in two.
  """
  check_accountant(accountant)
  validate.one_of(RELATIONS, neighboring_relation=neighboring_relation)
  steps = merged_parts(event)
  twofold = ""
  others = []
  for part in steps:
    _check_supported(part, neighboring_relation, accountant)
    bare = mechanism_of(part)
    kind = kind_of(bare)
    if kind.replaced_in_two:
      twofold = twofold or kind.name
    # A Gaussian sum is allowed beside them, since it has a midpoint within one clip norm of both
    # neighbours (see `replaced`).
    elif not isinstance(bare, dpa.GaussianDpEvent):
      others.append(bare)
  in_two = bool(twofold) and neighboring_relation == REPLACE
  if in_two and others:
    raise UserError(
      f"is proved beside Gaussian noise only, not beside {type(others[0]).__name__}",
      field="event",
      value=Verbatim(f"{twofold} with neighboring_relation='replace_one'"),
    )
  # dp_accounting's two accountants read noise under REPLACE_ONE differently, so the noise is
  # converted here, once. A replacement in two is accounted as removing and adding a record.
  relation = ADD if in_two else neighboring_relation
  return Accounted(_merge(under(steps, relation)), in_two)


def _check_supported(part: DpEvent, neighboring_relation: str, accountant: str) -> None:
  kind = kind_of(part)
  relations, accountants = kind.proofs(part)
  if neighboring_relation not in relations:
    raise UserError(
      f"it is accounted under {' or '.join(relations) or 'no relation'}",
      field="event",
      value=Verbatim(f"{kind.name} with neighboring_relation={neighboring_relation!r}"),
    )
  if accountant not in accountants:
    raise UserError(
      f"has no such analysis; use accountant={' or '.join(map(repr, accountants))}",
      field="event",
      value=Verbatim(f"{kind.name} with accountant={accountant!r}"),
    )
  # Each of the runs that the best one is chosen from needs a proof, too.
  bare = mechanism_of(part)
  if isinstance(bare, RepeatAndSelectDpEvent):
    for inner in merged_parts(bare.event):
      run = kind_of(mechanism_of(inner))
      # The analysis of the best of several runs has no proof for a replacement that is
      # accounted as removing and adding.
      if neighboring_relation == REPLACE and run.replaced_in_two:
        raise UserError(
          "is not proved for the best of several runs",
          field="event",
          value=Verbatim(f"{run.name} with neighboring_relation='replace_one'"),
        )
      _check_supported(inner, neighboring_relation, accountant)


def accountants_for(event: DpEvent, neighboring_relation: str) -> tuple[str, ...]:
  """Returns the accountants that prove an epsilon for an event under a relation, tightest first.

  >>> noise = dpa.GaussianDpEvent(1.0)
  >>> accountants_for(dpa.SampledWithoutReplacementDpEvent(9, 3, noise), "replace_one")
  ('pld', 'rdp')
  >>> accountants_for(dpa.PoissonSampledDpEvent(0.1, noise), "replace_one")
  ()
  """
  elements = parts(event)
  proving = []
  for accountant in ACCOUNTANTS:
    with contextlib.suppress(UserError):
      for part in elements:
        _check_supported(part, neighboring_relation, accountant)
      proving.append(accountant)
  return tuple(proving)


def rdp_of(steps: Parts) -> np.ndarray:
  """Returns the Renyi divergences at `ORDERS` of all parts composed, [len(ORDERS)]."""
  total = np.zeros(len(ORDERS))
  for part, times in steps.items():
    total += times * _rdp_once(part)
  return total


# A user's event may claim to equal an event of another class, so the cache tells types apart.
@functools.lru_cache(maxsize=256, typed=True)
def _rdp_once(part: DpEvent) -> np.ndarray:
  curve = np.asarray(kind_of(part).rdp(part))
  # dp_accounting would read NaN as "costs nothing". Such an order proves nothing.
  curve = np.where(np.isnan(curve), np.inf, curve)
  # Rounded up: a divergence of zero or below would make any number of steps seem to cost nothing,
  # and ten million steps add up what each one lost.
  return np.maximum(curve, 0.0) * (1 + _RDP_ROUNDING) + _RDP_ROUNDING


def describe(event: DpEvent, unit: str) -> str:
  """Returns all parts of an event in words, each with the number of times that it ran."""
  each = (
    f"{times} x {kind_of(part).describe(part, unit)}"
    for part, times in parts(event).items()
  )
  return "; ".join(each)


register(
  NoOpKind(),
  NonPrivateKind(),
  SelfComposedKind(),
  ComposedKind(),
  StatedKind(),
  ClaimedKind(),
)
