"""Reports of a training run: a row of metrics, and the final result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax import training
from dpjax.data import Dataset
from dpjax.experiments.config import choices, fields
from dpjax.experiments.kinds.central import starting_point
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.run import left_out, provenance, saved, writers
from dpjax.gradients.device_mesh import on_one
from dpjax.parallel.spanning import own_copy
from dpjax.plan import Plan
from dpjax.training.dp_sgd import TrainState, clip_scale
from dpjax.transforms.dp_sgld import sgld_temperature
from dpjax.types import ArrayLike

if TYPE_CHECKING:
  from dpjax.experiments.kinds.central.build import Run
  from dpjax.experiments.kinds.central.tasks import Task

# Largest number of classes whose confusion is written to result.json.
_FEW_CLASSES = 10


def clip_norm(plan: Plan, scale: ArrayLike | None, name: str) -> dict[str, float]:
  """Returns {name: clip norm of the next step}; {} if the norm is constant (`scale` None).

  The norm may be reported: it is public, or an output of the mechanism.
  """
  return {} if scale is None else {name: plan.l2_bound * float(np.asarray(scale))}


def shows_data(config: Any) -> bool:
  """Returns whether a run of `launch.train` or `launch.federate` may show what depends on raw data.

  A release must not."""
  return config.diagnostics and not config.release


def observe(
  config: TrainConfig, run: Run, state: TrainState, info: Any, step: int
) -> dict[str, float]:
  """Returns the values of a metrics row other than scores and epsilon."""
  row = {"learning_rate": float(np.asarray(run.schedule(step - 1)))}
  row |= clip_norm(run.plan, clip_scale(state), "l2_clip_norm")
  if not shows_data(config):
    return row
  shown = info._asdict().items()
  return row | {f"not_private/{name}": float(value) for name, value in shown}


def pretraining(run: Run) -> dict[str, Any]:
  """Returns {key of result.json: names of the data that first parameters or features depend on}.

  Returns {} if there are no such data.
  """
  return {saved.PRETRAINED_ON: list(run.pretrained_on)} if run.pretrained_on else {}


def of_plan(config: TrainConfig, plan: Plan) -> dict[str, Any]:
  """Returns the parts of a central run's result that its config and its plan tell."""
  facts: dict[str, Any] = {
    "dataset": config.data.name,
    "model": config.model.name,
    "method": choices.name_of(config, "privacy"),
    "noise_multiplier": plan.noise_multiplier,
    "l2_clip_norm": plan.l2_clip_norm.norms,
    "normalize_by": plan.normalize_by,
  }
  if plan.statistics is not None:
    facts["normalization"] = choices.name_of(config.privacy, "normalization")
    noise = plan.statistics.total_noise_multiplier
    # Without an epsilon, the noise of the statistics belongs to no guarantee, so it is left out.
    facts |= {"statistics_noise_multiplier": noise} if plan.is_private else {}
  if config.resident is not None:
    facts["resident"] = config.resident
  return facts


def planned_facts(config: TrainConfig, run: Run) -> dict[str, Any]:
  """Returns the parts of a central run's result that are known before the first step."""
  facts: dict[str, Any] = {
    "task": run.task.name,
    **of_plan(config, run.plan),
    "clipping": fields.get(config, "privacy.clipping"),
    "sampler": repr(run.plan.sampler),
  }
  scaling = fields.get(config, "privacy.scaling")
  if scaling not in ("none", None):
    facts["scaling"] = scaling
  facts |= pretraining(run) | starting_point.facts(config)
  tokenizer = run.train.tokenizer
  if tokenizer is not None:
    names = ("path", "sha256", "vocab_size")
    facts["tokenizer"] = {name: tokenizer[name] for name in names}
  if config.mesh is not None:
    facts["mesh"] = config.mesh
  if choices.name_of(config.optimizer, "rule") == "dp_sgld" and run.noise is not None:
    facts["sgld_temperature"] = sgld_temperature(
      step_size=config.optimizer.learning_rate / run.noise.num_examples,
      mean_noise_std=run.noise.std,
      num_examples=run.noise.num_examples,
    )
  return facts


def class_scores(
  apply: Any, params: Any, test: Dataset, *, warn: bool = True
) -> dict[str, Any]:
  """Returns the scores by class of a model of a table, on its public test rows, for result.json.

  With `warn`, warns if always giving the larger class would be as accurate, or the shares of the
  classes a smaller loss. Returns {} for other data.
  """
  is_table = (
    not test.in_columns and len(test.x.shape) == 2 and np.dtype(test.x.dtype).kind == "f"
  )
  if not (is_table and test.target is None and test.num_classes <= _FEW_CLASSES):
    return {}
  from dpjax import metrics  # only the end of a run of a table needs it here

  scores = metrics.evaluate_classes(apply, params, test)
  loss = scores.pop("loss")  # the run has written it
  largest = scores["largest_class"]
  accuracy = float(np.trace(scores["confusion"]) / len(test))
  if warn:
    poor = []
    if accuracy <= largest:
      poor.append(
        f"test accuracy {accuracy:.4f} is no more than the larger class has alone, {largest:.4f} "
        "of the test rows"
      )
    shares_loss = scores["class_shares_loss"]
    if loss > shares_loss:
      poor.append(
        f"test log loss {loss:.4f} is above that of always giving the classes' shares, "
        f"{shares_loss:.4f}"
      )
    if poor:
      writers.warn(f"{'; '.join(poor)}; see test_auroc={scores['auroc']:.4f}")
  return {f"test_{name}": score for name, score in scores.items()}


def group_scores(task: Task, apply: Any, params: Any, test: Dataset) -> dict[str, Any]:
  """Returns the scores of each group of the public test rows, for result.json; {} if the data
  declare no group. A group without test rows has no scores."""
  groups = test.groups
  if groups is None:
    return {}
  by_name: dict[str, dict[str, Any]] = {}
  for place, name in enumerate(groups.names):
    rows = np.flatnonzero(groups.places == place)
    by_name[name] = {"rows": len(rows)}
    if len(rows):
      part = test.subset(rows)
      by_name[name] |= task.evaluate(apply, params, part)
      of_classes = class_scores(apply, params, part, warn=False)
      shown = ("auroc", "auroc_interval", "balanced_accuracy", "recall_by_class")
      by_name[name] |= {
        key: of_classes[f"test_{key}"] for key in shown if f"test_{key}" in of_classes
      }
  return {"test_by_group": {"column": groups.column, "scores": by_name}}


def table_scores(task: Task, apply: Any, params: Any, test: Dataset) -> dict[str, Any]:
  """Returns the scores of a table's model by class and by group, for result.json."""
  by_class = class_scores(apply, params, test) if task.name == "classification" else {}
  return by_class | group_scores(task, apply, params, test)


def of(
  config: TrainConfig,
  run: Run,
  last: TrainState,
  stated: dict[str, Any],
  rows: list[dict[str, Any]],
) -> dict[str, Any]:
  """Returns the parts of a central run's result that are known only at the end; for
  `Phase.describe`."""
  del rows
  state = own_copy(last)
  used = 1 if run.mesh is None else run.mesh.size
  facts: dict[str, Any] = {"device": provenance.device(used, config.mesh)}
  params = training.eval_params(state)
  params = params if run.mesh is None else on_one(run.mesh, params)
  facts |= table_scores(run.task, run.apply, params, run.test)
  facts |= clip_norm(run.plan, clip_scale(state), "final_l2_clip_norm")
  facts |= left_out.clipped_cells(run.train, shown=shows_data(config))
  if run.canaries is None:
    return facts
  from dpjax.experiments.kinds.central import audit  # few runs are audited

  return facts | audit.facts(
    config,
    plan=run.plan,
    # This loss has no augmentation, which would add randomness to the score.
    loss_fn=run.task.loss(run.apply),
    before=run.params,
    after=training.eval_params(state),
    state=state,
    canaries=run.canaries,
    epsilon=stated["epsilon"],
  )
