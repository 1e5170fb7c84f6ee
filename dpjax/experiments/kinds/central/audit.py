"""An audit inside a training run: canaries go in, a lower bound on epsilon comes out."""

from __future__ import annotations

from typing import Any

import optax

from dpjax import auditing
from dpjax.auditing.canaries import KINDS, SCORES, Canaries, gradient_scores, loss_scores
from dpjax.auditing.gradient_canaries import canary_loss, canary_sums, sum_scores
from dpjax.data import Dataset
from dpjax.experiments.kinds import audits
from dpjax.experiments.kinds.central.config import CanaryAudit, TrainConfig
from dpjax.plan import Plan
from dpjax.types import LossFn, Params
from dpjax.validate import UserError

NOTE = (
  "Canaries are part of the training data of this run: {out_of} rows were taken out of the "
  "training set and {included} of them came back as {kind} canaries. The accuracy and the "
  "model are those of that changed data set."
)


def check(config: CanaryAudit, *, release: bool) -> None:
  """Raises UserError for wrong or incompatible settings of an audit; needs no data."""
  audits.check(config, KINDS, ("auto", *SCORES), release=release)
  if (config.kind == "gradient") != (score(config) == "sums"):
    raise UserError(
      "must be 'sums' with audit.kind='gradient', whose canaries have a "
      f"parameter of their own, and with no other kind; audit.kind={config.kind!r}",
      field="audit.score",
      value=config.score,
    )
  if config.method == "one_run_gaussian" and score(config) != "sums":
    raise UserError(
      f"is valid for audit.score='sums' only, not {score(config)!r}",
      field="audit.method",
      value="one_run_gaussian",
    )


def score(config: CanaryAudit) -> str:
  """Returns the name of the score. "auto" means "sums" for kind "gradient", else "loss"."""
  if config.score != "auto":
    return config.score
  return "sums" if config.kind == "gradient" else "loss"


def in_gradients(config: TrainConfig) -> bool:
  """Returns whether the canaries are gradients, for which the model gets extra parameters."""
  return config.audit is not None and config.audit.kind == "gradient"


def loss(config: TrainConfig, of_one: LossFn, *, num_classes: int, plan: Plan) -> LossFn:
  """Returns the loss of one example, which may be a canary.

  Args:
    of_one: loss of one example under the parameters of the model alone.
  """
  if not in_gradients(config):
    return of_one
  return canary_loss(of_one, num_classes=num_classes, l2_clip_norm=plan.l2_bound)


def insert(
  config: TrainConfig, train: Dataset, plan: Plan
) -> tuple[Dataset, Canaries | None]:
  """Returns (training data with canaries, the canaries)."""
  claim = audits.AuditClaim.of_plan(plan)
  return audits.insert(config, train, claim, auditing.insert_canaries)


def watch(
  config: TrainConfig, tx: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Returns the optimizer. If canaries are gradients, it also sums the noisy gradients."""
  return optax.chain(canary_sums(), tx) if in_gradients(config) else tx


def facts(
  config: TrainConfig,
  *,
  plan: Plan,
  loss_fn: LossFn,
  before: Params,
  after: Params,
  state: Any,
  canaries: Canaries,
  epsilon: float | None,
) -> dict[str, Any]:
  """Returns the audit's part of result.json, at the delta of the claim.

  Args:
    before, after: parameters before and after training.
    state: last training state; it holds the noisy sums along canaries that are gradients.
    epsilon: epsilon of the steps that ran; None: nothing is claimed.
  """
  asked = config.audit
  assert asked is not None
  scored = {"loss": loss_scores, "gradient": gradient_scores}
  if in_gradients(config):
    scores = sum_scores(state, canaries)
  else:
    scores = scored[score(asked)](loss_fn, before, after, canaries)
  return audits.facts(
    asked,
    scores,
    score=score(asked),
    claim=audits.AuditClaim.of_plan(plan),
    included=canaries.included,
    delta=config.privacy.delta,
    epsilon=epsilon,
    seed=config.seed,
    note=NOTE,
  )
