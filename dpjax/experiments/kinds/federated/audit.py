"""An audit inside a federated run: canary clients go in, a lower bound on epsilon comes out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import optax

from dpjax import auditing, federated, trees
from dpjax.auditing import canary_clients
from dpjax.experiments.config.fields import name_of
from dpjax.experiments.kinds import audits
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.plan import Plan
from dpjax.types import ArrayTree, LossFn, NeighboringRelation, Params
from dpjax.validate import UserError

NOTE = (
  "Canaries are part of this run: {out_of} clients left the federation and {included} came "
  "back as canaries ({kind}). The accuracy and the model are those of that changed federation."
)
_METHODS = ("central", "dp_ftrl", "none")


class Audited(NamedTuple):
  """The canaries of a run; `directions` None where they are known by their rows alone."""

  canaries: auditing.CanaryClients
  directions: canary_clients.Directions | None
  opposite: bool  # a canary that is out sends the opposite
  prob: float  # of a client to take part in a round
  plan: Plan


def check(config: FedConfig) -> None:
  """Raises UserError for what cannot be audited, as far as can be told without data."""
  audits.check(config.audit, auditing.CLIENT_KINDS, auditing.CLIENT_SCORES)
  if config.audit.enabled:
    _check_claim(config)
    _check_kind(config)


def _check_claim(config: FedConfig) -> None:
  """The bound is for the server's promise to a user of THIS run."""
  privacy = config.privacy
  if privacy.method not in _METHODS:
    raise UserError(
      f"needs privacy.method={' or '.join(map(repr, _METHODS))}, not "
      f"{privacy.method!r}: canary clients test what the server's noise promises, "
      "not what clients add themselves",
      field="audit.enabled",
      value=True,
    )
  if privacy.simulated_cohort is not None:
    raise UserError(
      f"needs no privacy.simulated_cohort={privacy.simulated_cohort}, whose "
      "epsilon is not of the clients of this run",
      field="audit.enabled",
      value=True,
    )


def _check_kind(config: FedConfig) -> None:
  kind, score, method = config.audit.kind, config.audit.score, config.audit.method
  if method == "one_run_gaussian":
    raise UserError(
      "is not valid for canary clients, whose scores share the noise of a round; "
      "use 'one_run_two_sided'",
      field="audit.method",
      value=method,
    )
  sends = kind == canary_clients.DIRECTION
  if sends and config.privacy.method == "none":
    others = " or ".join(repr(k) for k in auditing.CLIENT_KINDS if k != kind)
    raise UserError(
      f"needs a privacy.method with a clip norm, not 'none'; use {others}",
      field="audit.kind",
      value=kind,
    )
  if score == "rounds" and not sends:
    raise UserError(
      f"needs audit.kind={canary_clients.DIRECTION!r}, not {kind!r}; use 'final'",
      field="audit.score",
      value=score,
    )
  if score == "rounds" and name_of(config, "algorithm") == "mime_lite":
    raise UserError(
      "needs an algorithm whose server has an optimizer, not 'mime_lite'; use 'final'",
      field="audit.score",
      value=score,
    )


def prepared(
  config: FedConfig,
  canaries: auditing.CanaryClients | None,
  plan: Plan,
  params: Params,
  num_clients: int,
) -> Audited | None:
  """The canaries with their directions among these parameters.

  Args:
    num_clients: before canaries.
  """
  if canaries is None:
    return None
  found = None
  if config.audit.kind == canary_clients.DIRECTION:
    found = canary_clients.directions(
      params, num_canaries=config.audit.num_canaries, seed=config.seed
    )
  opposite = audits.relation_of(plan) == NeighboringRelation.REPLACE_ONE
  prob = config.clients_per_round / num_clients
  return Audited(canaries, found, opposite, prob, plan)


def marked(
  audited: Audited | None, cohorts: Iterator[federated.Cohort]
) -> Iterator[federated.Cohort]:
  """The cohorts of a run; rows of canaries that send say whose they are."""
  return cohorts if audited is None else canary_clients.marked(cohorts, audited.canaries)


def sending(audited: Audited | None, map_clients: Any) -> Any:
  """The execution, whose canaries send their directions."""
  if audited is None or audited.directions is None:
    return map_clients
  bound = audited.plan.l2_bound
  return canary_clients.sending(map_clients, audited.directions, l2_clip_norm=bound)


def watched(
  config: FedConfig,
  audited: Audited | None,
  server_tx: optax.GradientTransformation,
) -> Any:
  """The server's optimizer, before which every aggregate is scored if that is asked for."""
  if audited is None or audited.directions is None or config.audit.score != "rounds":
    return server_tx
  plan, correlated = audited.plan, config.privacy.method == "dp_ftrl"
  watch = canary_clients.watching(
    audited.directions,
    unit=plan.l2_bound / plan.normalize_by,
    prob=1.0 if correlated else audited.prob,
    opposite=audited.opposite,
  )
  return optax.chain(watch, server_tx)


def facts(
  config: FedConfig,
  audited: Audited,
  *,
  loss_fn: LossFn,
  before: Params,
  state: ArrayTree,
  epsilon: float | None,
) -> dict[str, Any]:
  """The audit's part of result.json, at the delta of the claim."""
  canaries, after = audited.canaries, federated.params_of(state)
  directions = audited.directions
  if directions is None:
    scores = canary_clients.client_loss_scores(loss_fn, before, after, canaries)
  elif config.audit.score == "rounds":
    scores = canary_clients.watched_scores(directions, state, canaries)
  else:
    moved = trees.add(after, trees.scale(before, -1.0))
    scores = canary_clients.direction_scores(directions, moved, canaries)
  return audits.facts(
    config.audit,
    scores,
    score=config.audit.score,
    plan=audited.plan,
    included=canaries.included,
    delta=config.privacy.delta,
    epsilon=epsilon,
    seed=config.seed,
    note=NOTE,
  )
