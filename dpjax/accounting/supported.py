"""Refuses events for which an accountant has no proof under a relation."""

from __future__ import annotations

from typing import Any

import dp_accounting as dpa

from dpjax import validate
from dpjax.accounting.event_kinds.kind import (
  DpEvent,
  Parts,
  converted,
  kind_of,
  merged_parts,
  parts,
)
from dpjax.accounting.proved import ACCOUNTANTS, ADD, RELATIONS, REPLACE
from dpjax.validate import UserError, Verbatim


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


def accountable(
  event: DpEvent, neighboring_relation: str = "add_or_remove_one", accountant: str = "pld"
) -> Parts:
  """Returns the parts of an event, with noise in multiples of the sensitivity under the relation.

  If `in_two` holds, the noise stays in multiples of the clip norm.

  Raises:
    UserError: the accountant has no proof for a part under this relation.
  """
  check_accountant(accountant)
  validate.one_of(RELATIONS, neighboring_relation=neighboring_relation)
  steps = merged_parts(event)
  for part in steps:
    _check_supported(part, str(neighboring_relation), accountant)
  steps = _reduced(steps)
  if neighboring_relation == ADD:
    return converted(steps, lambda part: kind_of(part).under_add_or_remove_one(part))
  # If a replacement is accounted as removing and adding, the noise of the parts is not halved.
  if neighboring_relation != REPLACE or in_two(steps, neighboring_relation):
    return steps
  # dp_accounting's two accountants read noise under REPLACE_ONE differently, so the noise is
  # converted here, once.
  return converted(steps, lambda part: kind_of(part).under_replace_one(part))


def _reduced(steps: Parts) -> Parts:
  """Replaces each part by the event from `EventKind.accounted_as`, and returns the new parts."""
  reduced = {part: kind_of(part).accounted_as(part) for part in steps}
  if all(part is event for part, event in reduced.items()):
    return steps
  return merged_parts(
    dpa.ComposedDpEvent(
      [dpa.SelfComposedDpEvent(reduced[part], times) for part, times in steps.items()]
    )
  )


def in_two(steps: Parts, neighboring_relation: str) -> bool:
  """Returns whether replacing a record is accounted as removing one record and adding another.

  Raises:
    UserError: some parts are accounted in this way, but another part has no proof beside them.
  """
  if neighboring_relation != REPLACE:
    return False
  kinds = {part: kind_of(part) for part in steps}
  names = [kind.name for kind in kinds.values() if kind.replaced_in_two]
  if not names:
    return False
  for part, kind in kinds.items():
    # A Gaussian sum is allowed, since it has a midpoint within one clip norm of both neighbours
    # (see `replaced`).
    if not (kind.replaced_in_two or isinstance(part, dpa.GaussianDpEvent)):
      raise UserError(
        f"is proved beside Gaussian noise only, not beside {type(part).__name__}",
        field="event",
        value=Verbatim(f"{names[0]} with neighboring_relation='replace_one'"),
      )
  return True


def _check_supported(part: Any, neighboring_relation: str, accountant: str) -> None:
  kind = kind_of(part)
  relations = kind.relations_of(part)
  if neighboring_relation not in relations:
    raise UserError(
      f"it is accounted under {' or '.join(relations) or 'no relation'}",
      field="event",
      value=Verbatim(f"{kind.name} with neighboring_relation={neighboring_relation!r}"),
    )
  accountants = kind.accountants_of(part)
  if accountant not in accountants:
    raise UserError(
      f"has no such analysis; use accountant={' or '.join(map(repr, accountants))}",
      field="event",
      value=Verbatim(f"{kind.name} with accountant={accountant!r}"),
    )
  for inner in kind.repeated(part):
    inner_kind = kind_of(inner)
    # The analysis of the best of several runs has no proof for a replacement that is
    # accounted as removing and adding.
    if neighboring_relation == REPLACE and inner_kind.replaced_in_two:
      raise UserError(
        "is not proved for the best of several runs",
        field="event",
        value=Verbatim(f"{inner_kind.name} with neighboring_relation='replace_one'"),
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

  def proves(accountant: str) -> bool:
    try:
      for part in elements:
        _check_supported(part, neighboring_relation, accountant)
    except UserError:
      return False
    return True

  return tuple(filter(proves, ACCOUNTANTS))
