"""Reports of a federated run: a row of metrics, and the final result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpjax.data import partition
from dpjax.experiments.config.choices import name_of
from dpjax.experiments.kinds.central import features
from dpjax.experiments.kinds.central.facts import clip_norm, shows_data, table_scores
from dpjax.experiments.kinds.federated import privacy, secure_sums
from dpjax.experiments.kinds.federated.config import Local
from dpjax.experiments.run import left_out, saved
from dpjax.experiments.run.left_out import Arrivals
from dpjax.federated.round import RoundInfo, params_of
from dpjax.transforms.clip_scale import clip_scale
from dpjax.types import Array, ArrayTree

if TYPE_CHECKING:
  from dpjax.experiments.kinds.federated.build import FedRun


def observe(fed: FedRun, state: ArrayTree, info: RoundInfo) -> dict[str, float]:
  """Returns the values of a metrics row other than scores and epsilon."""
  row = clip_norm(fed.plan, _clip_scale(state), "l2_clip_norm")
  if not shows_data(fed.config):
    return row
  shown = ((name, value) for name, value in info._asdict().items() if name != "clients")
  return row | {f"not_private/{name}": float(value) for name, value in shown}


def arrivals(info: RoundInfo) -> Arrivals:
  """Returns how many clients of a round were used and left out; NOT private."""
  counts = (info.num_clients, info.left_out, info.coordinates_cut, info.rounds_refused)
  return Arrivals(*map(int, counts))


def _clip_scale(state: ArrayTree) -> Array | None:
  return clip_scale(getattr(state, "aggregator", None))


def rounds_to(rows: list[dict[str, Any]], targets: tuple[float, ...]) -> dict[str, Any]:
  """Returns a dict from each target to the first evaluated round whose test accuracy reaches it.

  The value is None if no round reaches the target.

  >>> rounds_to([{"step": 1, "test_accuracy": 0.5}, {"step": 2, "test_accuracy": 0.98}],
  ...           (0.97, 0.99))
  {'0.97': 2, '0.99': None}
  """
  # A regression has no accuracy, so none of its rows counts.
  scored = [row for row in rows if "test_accuracy" in row]
  first = lambda target: (r["step"] for r in scored if r["test_accuracy"] >= target)
  return {f"{target:g}": next(first(target), None) for target in targets}


def _noise_facts(fed: FedRun) -> dict[str, float]:
  """Returns facts about the noise. The stated epsilon follows from `noise_multiplier`. For methods
  "local" and "both", `local_noise_multiplier` is the multiplier of the clients' noise."""
  if fed.mechanism is not None:
    mechanism = fed.mechanism
    return {
      "noise_multiplier": mechanism.noise_multiplier,
      "min_survivors": mechanism.noise.min_survivors,
      "grid_scale": mechanism.scale,
      "wrap_probability": mechanism.wrap_probability,
    }
  if fed.silos is not None:
    # Each silo has noise of its own; the list of silos in result.json has all.
    return {"noise_multiplier": min(plan.noise_multiplier for plan in fed.silos.plans)}
  local = privacy.local_noise(fed.config)
  if local is None:
    return {"noise_multiplier": fed.plan.noise_multiplier}
  # For method "local" the stated epsilon follows from the clients' noise.
  multiplier = local if isinstance(fed.config.privacy, Local) else fed.plan.noise_multiplier
  return {"noise_multiplier": multiplier, "local_noise_multiplier": local}


def planned_facts(fed: FedRun) -> dict[str, Any]:
  """Returns the parts of a federated run's result that are known before the first round."""
  config = fed.config
  names = {
    "none": "",
    "central": "dp_",
    "dp_ftrl": "dp_ftrl_",
    "distributed": "ddp_",
    "records": "record_dp_",
  }
  method = names.get(name_of(config, "privacy"), "ldp_")
  facts: dict[str, Any] = {
    "task": fed.task.name,
    "dataset": config.data.name,
    "model": config.model.name,
    "method": f"{method}{name_of(config, 'algorithm')}",
    "num_clients": fed.num_clients,
    "clients_per_round": config.clients_per_round,
    "partition": name_of(config, "partition"),
    **_noise_facts(fed),
    "l2_clip_norm": fed.guarantee.l2_bound,
    # The samplers of silos are in the list of silos.
    "sampler": repr(fed.plan.sampler) if fed.silos is None else config.privacy.sampler.name,
    **secure_sums.facts(
      config.secure_sum, name_of(config, "secure_sum"), config.clients_per_round
    ),
  }
  behind = features.trained_on(config.model.name, config.data.name)
  if behind:
    facts[saved.PRETRAINED_ON] = list(behind)
  if fed.mechanism is not None:
    # `largest_value` is not used, since messages are clipped by their norm.
    facts["secure_sum"].pop("largest_value")
  return facts


def of(fed: FedRun, state: ArrayTree, rows: list, epsilon: float | None) -> dict[str, Any]:
  """Returns the parts of the result that are known only from the data or at the end."""
  config = fed.config
  facts: dict[str, Any] = {"rounds_to_accuracy": rounds_to(rows, config.targets)}
  # Heterogeneity compares the class shares of clients, so it needs classes.
  of_classes = fed.federation.dataset.target is None
  # It is an exact function of the users' labels. In a run with a guarantee, its name begins with
  # "not_private", and it is left out if other diagnostics are left out.
  if of_classes and (not config.is_private or shows_data(config)):
    name = "not_private/heterogeneity" if config.is_private else "heterogeneity"
    facts[name] = partition.heterogeneity(fed.federation.label_histograms())
  facts |= table_scores(fed.task, fed.apply, params_of(state), fed.test)
  facts |= clip_norm(fed.plan, _clip_scale(state), "final_l2_clip_norm")
  facts |= left_out.clipped_cells(fed.federation.dataset, shown=shows_data(config))
  return facts | fed.audited.facts(
    loss_fn=fed.task.loss(fed.apply),
    before=fed.params,
    state=state,
    epsilon=epsilon,
  )
