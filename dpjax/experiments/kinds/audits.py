"""Shared parts of all audits of runs: the check of settings, and the report."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dpjax import auditing, validate
from dpjax.accounting import upper
from dpjax.accounting.proved import NeighboringRelation
from dpjax.accounting.text import lower
from dpjax.accounting.trade_off import TradeOff, all_pairs
from dpjax.auditing.lower_bounds import METHODS
from dpjax.auditing.scores import Scores
from dpjax.auditing.verdict import ceiling, check_method, reason
from dpjax.data.target_kinds import needs_classes
from dpjax.experiments.kinds.central.config import CanaryAudit
from dpjax.experiments.run import writers
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.plan import Plan
from dpjax.types import Params
from dpjax.validate import UserError

# Kinds of canaries, of records and of clients, that change parameters of their own.
_WITH_PARAMETERS = ("gradient", "parameter")


def check(
  config: CanaryAudit, kinds: tuple[str, ...], scores: tuple[str, ...], *, release: bool
) -> None:
  """Raises UserError for wrong settings of an audit; needs no data.

  Args:
    kinds: kinds of canaries that the run supports.
    scores: scores that the run supports.
    release: whether the result may be published.
  """
  validate.integer_at_least(2, **{"audit.num_canaries": config.num_canaries})
  validate.one_of(kinds, **{"audit.kind": config.kind})
  validate.one_of(scores, **{"audit.score": config.score})
  validate.one_of(METHODS, **{"audit.method": config.method})
  validate.open_unit(**{"audit.confidence": config.confidence})
  if release and config.kind == "mislabelled":
    raise UserError(
      "must be another kind with release=True: the scores of these canaries are of true rows",
      field="audit.kind",
      value=config.kind,
    )


@dataclasses.dataclass(frozen=True)
class AuditClaim:
  """The claim that an audit tries to refute. Event, epsilon and curve are computed on request."""

  relation: str  # neighboring relation; it decides what replaces a canary that is out
  delta: float
  event: Callable[[], Any]  # event of the whole run
  epsilon: Callable[[], float]  # epsilon at delta, as planned; infinity: nothing is claimed
  trade_off: Callable[[], TradeOff]  # all pairs (epsilon, delta) at once

  @classmethod
  def of_plan(cls, plan: Plan) -> AuditClaim:
    """Returns the claim of a plan. If nothing is proved for its sampler, canaries replace
    records. This also suits samplers that depend on the number of examples."""
    # Without a proof for the sampler no relation is proved, so replacement is chosen.
    is_proved = bool(plan.sampler.proved_under)
    relation = plan.neighboring_relation if is_proved else NeighboringRelation.REPLACE_ONE
    epsilon = plan.epsilon if plan.is_private else lambda: math.inf
    return cls(relation, plan.delta, plan.event, epsilon, plan.trade_off)

  @classmethod
  def of_promise(cls, guarantee: Guarantee, num_steps: int) -> AuditClaim:
    """Returns the claim of a guarantee without a plan. The noise comes from the clients: each adds
    noise to its message, or a share of the noise of a sum."""
    event = guarantee.remaining_event(0)
    pairs = functools.partial(
      all_pairs,
      event,
      neighboring_relation=guarantee.relation,
      accountant=guarantee.accountant,
    )
    epsilon = functools.partial(guarantee.curve, num_steps)
    return cls(guarantee.relation, guarantee.delta or 0.0, lambda: event, epsilon, pairs)

  def pairs(self, epsilon: float | None) -> TradeOff | None:
    """Returns all claimed pairs (epsilon, delta).

    `epsilon` is the epsilon of the actual steps. Returns None unless it is finite and equals the
    planned epsilon.
    """
    if epsilon is None or not math.isfinite(epsilon):
      return None
    # A run that ended early claims less than the planned curve, so its pairs are unknown.
    return self.trade_off() if math.isclose(epsilon, self.epsilon()) else None


def insert(
  config: Any, held: Any, claim: AuditClaim, make: Callable[..., tuple[Any, Any]]
) -> tuple[Any, Any]:
  """Returns (training data with canaries, canaries), or (`held`, None) without an audit.

  Args:
    config: config with the settings of an audit, and the seed of its coins.
    held: a data set, or a federation.
    claim: the planned claim.
    make: `auditing.insert_canaries`, or `auditing.insert_canary_clients`.

  Raises UserError for data without classes, an audit method that does not fit the claim, or coins
  that leave nothing to compare.
  """
  asked = config.audit
  if asked is None:
    return held, None
  # Some kinds of canaries change a label. For all kinds the rule is the same: data have classes.
  needs_classes(held, "audit")
  check_method(asked.method, claim.event())
  _warn_of_ceiling(asked, claim)
  changed, canaries = make(
    held,
    num_canaries=asked.num_canaries,
    seed=config.seed,
    kind=asked.kind,
    neighboring_relation=claim.relation,
  )
  check_coins(canaries.included, config.seed)
  return changed, canaries


def beside(
  config: Any, params: Params, apply: Callable[..., Any]
) -> tuple[Params, Callable[..., Any]]:
  """Returns (params, apply). If canaries change parameters of their own, these are added.

  `apply` then reads only the model's parameters, under the key "model".
  """
  if config.audit is None or config.audit.kind not in _WITH_PARAMETERS:
    return params, apply
  whole = auditing.with_canaries(params, config.audit.num_canaries)
  return whole, lambda params, x: apply(params["model"], x)


def _warn_of_ceiling(config: CanaryAudit, claim: AuditClaim) -> None:
  """Warns, before training, if even perfect scores could not refute the claim."""
  epsilon = claim.epsilon()
  if not math.isfinite(epsilon):
    return
  best = ceiling(
    config.num_canaries,
    delta=claim.delta,
    method=config.method,
    confidence=config.confidence,
    claim=claim.trade_off(),
  )
  refutes = reason(
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
  """Raises UserError, before training, if all canaries are in, or all are out.

  Args:
    included: [m] bool, which canaries are in.
    seed: seed of the coins, for the message.
  """
  # The bound compares the two groups, so neither may be empty.
  if included.all() or not included.any():
    raise UserError(
      f"the coins of seed={seed} put all of them on one side; must be more, or "
      "of another seed",
      field="audit.num_canaries",
      value=len(included),
    )


def facts(
  config: CanaryAudit,
  scores: Scores,
  *,
  score: str,
  claim: AuditClaim,
  included: np.ndarray,
  delta: float,
  epsilon: float | None,
  seed: int,
  note: str,
  at_best: Scores | None = None,
) -> dict[str, Any]:
  """Returns the audit's part of result.json.

  Args:
    score: name of the score by which canaries were guessed.
    claim: the planned claim.
    included: [m] bool, which canaries are in.
    delta, epsilon: guarantee of the steps that ran; epsilon None: nothing is claimed.
    seed: seed of the coins that chose `included`.
    note: text about the canaries; {out_of}, {included} and {kind} are filled in.
    at_best: scores that a perfect attack would give; None: of all canaries.
  """
  audited = auditing.audit(
    scores,
    delta=delta,
    epsilon_claimed=epsilon,
    method=config.method,
    confidence=config.confidence,
    claim=claim.pairs(epsilon),
    at_best=at_best,
    neighboring_relation=claim.relation,
  ).to_json()
  numbers = {"num_canaries": len(included), "num_included": int(included.sum())}
  note_text = note.format(
    out_of=numbers["num_canaries"], included=numbers["num_included"], kind=config.kind
  )
  return {
    "epsilon_audited_lower": audited["epsilon_audited_lower"],
    "audit": {
      **audited,
      "score": score,
      "kind": config.kind,
      **numbers,
      "coins_seed": seed,
      "note": note_text,
    },
  }
