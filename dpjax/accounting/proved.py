"""The table of proofs: for which sampler, under which relation, by which accountant.

A sampler names its row (`Sampler.law`). A row may also name the kind of event that carries
the sampler with it: such an event is refused wherever the row does not hold, also by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import dp_accounting as dpa

from dpjax import validate
from dpjax.accounting.discrete import SkellamDpEvent
from dpjax.accounting.events import parts
from dpjax.passes import RandomAllocationDpEvent
from dpjax.validate import UserError

ACCOUNTANTS = ("pld", "rdp")
_ADD = "add_or_remove_one"
_REPLACE = "replace_one"
_ZERO = "replace_special"
RELATIONS = (_ADD, _REPLACE, _ZERO)


class Proved(NamedTuple):
  """A row: the relations, the default one first, and the accountants, the tightest first."""

  relations: tuple[str, ...]
  accountants: tuple[str, ...] = ACCOUNTANTS
  event: type | None = None


PROVED: dict[str, Proved] = {
  "none": Proved(RELATIONS),  # every record in every step
  "unproved": Proved(()),
  "poisson": Proved((_ADD, _ZERO), ACCOUNTANTS, dpa.PoissonSampledDpEvent),
  "fixed_size": Proved((_REPLACE,), ("rdp",), dpa.SampledWithoutReplacementDpEvent),
  "truncated_poisson": Proved((_ZERO,), ("pld",), dpa.TruncatedSubsampledGaussianDpEvent),
  "random_allocation": Proved(
    (_ADD, _ZERO, _REPLACE), ACCOUNTANTS, RandomAllocationDpEvent
  ),
  "shuffled": Proved((_REPLACE, _ZERO)),
  "cyclic": Proved((_ZERO, _REPLACE)),
  "balls_in_bins": Proved((_ADD, _ZERO, _REPLACE)),
  "cyclic_poisson": Proved((_ADD, _ZERO)),
  "min_sep": Proved((_ADD, _ZERO, _REPLACE)),
  # no samplers, but events of the same kind
  "poisson of Laplace noise": Proved((_ADD, _ZERO), ("pld",)),
  # With a record its share of the noise would go, too: nothing is proved for add/remove.
  "Skellam noise in shares": Proved((_ZERO, _REPLACE), ("rdp",), SkellamDpEvent),
  "the best of several runs": Proved(
    RELATIONS, ("rdp",), dpa.dp_event.RepeatAndSelectDpEvent
  ),
}


def proved_for(law: str) -> Proved:
  """The row of a sampler's law.

  >>> proved_for("truncated_poisson").relations
  ('replace_special',)
  """
  validate.one_of(PROVED, sampler=law)
  return PROVED[law]


def accountants_for(law: str, neighboring_relation: str) -> tuple[str, ...]:
  """Returns the accountants that prove an epsilon for a sampler under a relation.

  >>> accountants_for("fixed_size", "replace_one"), accountants_for("poisson", "replace_one")
  (('rdp',), ())
  """
  row = proved_for(law)
  return row.accountants if neighboring_relation in row.relations else ()


def checked_relation(law: str, asked: str, name: str) -> str:
  """The relation that is asked for, "" for the row's own; UserError where nothing is proved.

  >>> checked_relation("fixed_size", "", "FixedSizeSampler")
  'replace_one'
  """
  allowed = proved_for(law).relations
  relation = asked or (*allowed, _ADD)[0]
  validate.one_of(RELATIONS, neighboring_relation=relation)
  if allowed and relation not in allowed:
    raise UserError(
      f"{name} is proved only under {', '.join(allowed)}",
      field="neighboring_relation",
      value=relation,
    )
  return relation


def check_event(law: str, event: Any, relation: str, asked: str, name: str) -> None:
  """UserError, which names the sampler, where an accountant has no analysis of its row or of
  the event that it states, or where that event is not proved under the relation.

  >>> event = dpa.SampledWithoutReplacementDpEvent(9, 3, dpa.GaussianDpEvent(1.0))
  >>> check_event("fixed_size", event, "replace_one", "pld", "FixedSizeSampler")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: accountant='pld': has no analysis of FixedSizeSampler; use ...
  """
  laws = {law_of(part) for part in parts(event)}
  if asked not in ACCOUNTANTS or event == dpa.NonPrivateDpEvent():
    return
  for own in laws:
    if relation not in PROVED[own].relations:
      raise UserError(
        f"the event of {name}, {own}, is accounted under "
        f"{' or '.join(PROVED[own].relations)}",
        field="neighboring_relation",
        value=relation,
      )
  rows = [PROVED[own].accountants for own in (law, *laws)]
  known = [one for one in ACCOUNTANTS if all(one in row for row in rows)]
  if asked not in known:
    ways = " or ".join(map(repr, known))
    told = f"use accountant={ways}" if known else f"it is charged as {', '.join(laws)}"
    raise UserError(f"has no analysis of {name}; {told}", field="accountant", value=asked)


def law_of(part: Any) -> str:
  """The row that an elementary event (`events.parts`) belongs to.

  >>> law_of(dpa.GaussianDpEvent(1.0))
  'none'
  """
  sampled = isinstance(part, dpa.PoissonSampledDpEvent)
  if sampled and isinstance(part.event, dpa.LaplaceDpEvent):
    return "poisson of Laplace noise"
  return next((law for law, row in PROVED.items() if row.event is type(part)), "none")
