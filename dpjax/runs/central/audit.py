"""An audit inside a training run: canaries go in, a lower bound on epsilon comes out."""

from __future__ import annotations

from typing import Any

from dpjax import auditing, data
from dpjax.plan import Plan
from dpjax.runs import audits
from dpjax.runs.central.config import AuditConfig, TrainConfig
from dpjax.types import LossFn, Params

NOTE = (
  "Canaries are part of the training data of this run: {out_of} rows were taken out of the "
  "training set and {included} of them came back as {kind} canaries. The accuracy and the "
  "model are those of that changed data set."
)


def check(config: AuditConfig) -> None:
  """Raises UserError for what can be told without data."""
  audits.check(config, auditing.KINDS, auditing.SCORES)


def insert(
  config: TrainConfig, train: data.Dataset, plan: Plan
) -> tuple[data.Dataset, auditing.Canaries | None]:
  """(data to train on, canaries), or the data as they are where no audit is asked for."""
  if not config.audit.enabled:
    return train, None
  return auditing.insert_canaries(
    train,
    num_canaries=config.audit.num_canaries,
    seed=config.seed,
    kind=config.audit.kind,
    neighboring_relation=audits.relation_of(plan),
  )


def facts(
  config: TrainConfig,
  *,
  loss_fn: LossFn,
  before: Params,
  after: Params,
  canaries: auditing.Canaries,
  epsilon: float | None,
) -> dict[str, Any]:
  """The audit's part of result.json, at the delta of the claim."""
  scored = {"loss": auditing.loss_scores, "gradient": auditing.gradient_scores}
  return audits.facts(
    config.audit,
    scored[config.audit.score](loss_fn, before, after, canaries),
    included=canaries.included,
    delta=config.privacy.delta,
    epsilon=epsilon,
    seed=config.seed,
    note=NOTE,
  )
