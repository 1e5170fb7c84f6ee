"""What audits of all kinds of runs share: the check of their settings, and what is reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from dpjax import accounting, auditing, validate
from dpjax.accounting import lower, upper
from dpjax.auditing import Scores
from dpjax.data import Dataset, Federation
from dpjax.experiments.kinds.central.config import AuditConfig
from dpjax.experiments.run import writers
from dpjax.plan import Plan
from dpjax.types import NeighboringRelation
from dpjax.validate import UserError


class AuditedConfig(Protocol):
  """A config of a run that can be audited."""

  @property
  def audit(self) -> AuditConfig: ...
  @property
  def seed(self) -> int: ...


class _Coins(Protocol):
  @property
  def included(self) -> np.ndarray: ...


_Data = TypeVar("_Data", Dataset, Federation)
_Canaries = TypeVar("_Canaries", bound=_Coins)


def check(config: AuditConfig, kinds: tuple[str, ...], scores: tuple[str, ...]) -> None:
  """Raises UserError for what can be told without data."""
  if not config.enabled:
    return
  validate.integer_at_least(2, **{"audit.num_canaries": config.num_canaries})
  validate.one_of(kinds, **{"audit.kind": config.kind})
  validate.one_of(scores, **{"audit.score": config.score})
  validate.one_of(auditing.METHODS, **{"audit.method": config.method})
  validate.open_unit(**{"audit.confidence": config.confidence})


def relation_of(plan: Plan) -> str:
  """What a canary that is out leaves: what the plan's relation says, so that a sampler which
  knows the number of examples still fits; where nothing is proved, they are exchanged."""
  known = plan.sampler.law != "unproved"
  return str(plan.neighboring_relation if known else NeighboringRelation.REPLACE_ONE)


def insert(
  config: AuditedConfig,
  held: _Data,
  plan: Plan,
  make: Callable[..., tuple[_Data, _Canaries]],
) -> tuple[_Data, _Canaries | None]:
  """(what to train on, canaries), or the data as they are where no audit is asked for.

  Args:
    held: a data set, or a federation.
    make: `auditing.insert_canaries`, or `auditing.insert_canary_clients`.
  """
  if not config.audit.enabled:
    return held, None
  auditing.check_method(config.audit.method, plan)
  _warn_of_ceiling(config.audit, plan)
  changed, canaries = make(
    held,
    num_canaries=config.audit.num_canaries,
    seed=config.seed,
    kind=config.audit.kind,
    neighboring_relation=relation_of(plan),
  )
  check_coins(canaries.included, config.seed)
  return changed, canaries


def claim_of(plan: Plan, epsilon: float | None) -> accounting.TradeOff | None:
  """All pairs that are claimed, where the claim is that of the plan."""
  if epsilon is None or not plan.is_private or not math.isfinite(epsilon):
    return None
  return plan.trade_off() if math.isclose(epsilon, plan.epsilon()) else None


def _warn_of_ceiling(config: AuditConfig, plan: Plan) -> None:
  """One line, before anything trains, where no scores could refute the claim."""
  epsilon = plan.epsilon() if plan.is_private else math.inf
  if not math.isfinite(epsilon):
    return
  best = auditing.ceiling(
    config.num_canaries,
    delta=plan.delta,
    method=config.method,
    confidence=config.confidence,
    claim=plan.trade_off(),
  )
  refutes = auditing.reason(
    best,
    epsilon_claimed=epsilon,
    method=config.method,
    confidence=config.confidence,
  )
  if not refutes:
    writers.warn(
      f"audit.num_canaries={config.num_canaries}: perfect scores of so many would show epsilon "
      f">= {lower(best.epsilon_lower)}, which cannot refute the claimed {upper(epsilon)}; use more"
    )


def check_coins(included: np.ndarray, seed: int) -> None:
  """Raises UserError, before anything trains, where coins leave nothing to tell apart.

  Args:
    included: [m] bool.
  """
  if included.all() or not included.any():
    raise UserError(
      f"the coins of seed={seed} put all of them on one side; must be more, or "
      "of another seed",
      field="audit.num_canaries",
      value=len(included),
    )


def facts(
  config: AuditConfig,
  scores: Scores,
  *,
  score: str,
  plan: Plan,
  included: np.ndarray,
  delta: float,
  epsilon: float | None,
  seed: int,
  note: str,
) -> dict[str, Any]:
  """The audit's part of result.json.

  Args:
    score: what told them.
    plan: what the run was charged for.
    included: [m] bool, the coins; seed: theirs.
    delta, epsilon: the claim; epsilon None: nothing is claimed.
    note: who the canaries are; {out_of}, {included} and {kind} are filled in.
  """
  found = auditing.audit(
    scores,
    delta=delta,
    epsilon_claimed=epsilon,
    method=config.method,
    confidence=config.confidence,
    claim=claim_of(plan, epsilon),
  ).to_json()
  numbers = {"num_canaries": len(included), "num_included": int(included.sum())}
  told = note.format(
    out_of=numbers["num_canaries"], included=numbers["num_included"], kind=config.kind
  )
  return {
    "epsilon_audited_lower": found["epsilon_audited_lower"],
    "audit": {
      **found,
      "score": score,
      "kind": config.kind,
      **numbers,
      "coins_seed": seed,
      "note": told,
    },
  }
