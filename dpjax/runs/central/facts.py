"""What a training run reports: a row of metrics, the end."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpjax import training
from dpjax.runs import fields
from dpjax.runs.central import audit
from dpjax.runs.central.config import TrainConfig


def _changing_clip_norm(run: Any, state: Any, name: str) -> dict[str, float]:
  """{name: that of the next step} where it changes: public, or an output of the mechanism."""
  scale = training.clip_scale(state)
  return {} if scale is None else {name: run.plan.l2_bound * scale}


def observed(
  config: TrainConfig, run: Any, state: Any, info: Any, step: int
) -> dict[str, float]:
  """What a row says beside scores and epsilon; `run` is a `build.Run`."""
  rate = float(np.asarray(run.schedule(step - 1)))
  row = {"learning_rate": rate} | _changing_clip_norm(run, state, "l2_clip_norm")
  if not config.diagnostics or config.release:
    return row
  shown = info._asdict().items()
  return row | {f"not_private/{name}": float(value) for name, value in shown}


def of(config: TrainConfig, run: Any, state: Any, epsilon: float | None) -> dict[str, Any]:
  """The part of result.json that only central runs have."""
  plan, temperature = run.plan, run.sgld_temperature
  found: dict[str, Any] = {
    "task": run.task.name,
    "dataset": config.data.name,
    "model": config.model.name,
    "method": config.privacy.method,
    "noise_multiplier": plan.noise_multiplier,
    "l2_clip_norm": plan.l2_clip_norm.norms,
    "clipping": fields.get(config, "privacy.clipping")
    if config.privacy.method != "sgd"
    else None,
    **_changing_clip_norm(run, state, "final_l2_clip_norm"),
    **({} if temperature is None else {"sgld_temperature": temperature}),
    "sampler": repr(plan.sampler),
    "normalize_by": plan.normalize_by,
  }
  if run.canaries is None:
    return found
  return found | audit.facts(
    config,
    loss_fn=run.task.loss(run.apply),  # without augmentation
    before=run.params,
    after=training.eval_params(state),
    canaries=run.canaries,
    epsilon=epsilon,
  )
