"""Typed configuration of one run of relevance, and of an experiment of several runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from dpjax import models, relevance, validate
from dpjax.experiments.config import rules
from dpjax.experiments.config.ignored import WouldBeIgnored
from dpjax.experiments.kinds import bounds
from dpjax.experiments.kinds.central.config import DataConfig, ModelConfig
from dpjax.relevance.settings import MODES
from dpjax.validate import UserError


@dataclasses.dataclass
class RelevanceAuditConfig:
  """Attacks on each point; their bounds hold together at 95 % (Bonferroni over the
  attacks)."""

  enabled: bool = False
  num_trials: int = 1000  # of U1 (the features' noise) and U2 (shared noise), on each side
  num_canaries: int = 200  # at most, of U3 (wrong labels) and U4 (membership)
  canary_runs: bool = True  # U3 and U4 train the method once more each


@dataclasses.dataclass
class RelevanceConfig:
  """Configuration of an experiment with the methods of `dpjax.relevance`.

  `curves` maps a label to fields that differ from this config, by dotted name, such as
  {"RADP": {}, "DPSGD": {"method": "dpsgd"}}; none is one curve. Every curve is run at every
  epsilon with seeds seed, seed + 1, ... (`dpjax.experiments.sweeps.experiment`). What follows
  " @ " in a label only tells runs apart: {"tanh @ mnist": {...}, "tanh @ cifar10": {...}} are
  one line in two panels.
  """

  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  rigorous_model: ModelConfig | None = None  # on the reduced features; None: `model`
  activation_1: str = "relu"  # of model 1, whose relevance is propagated
  activation: str = "tanh"  # of model 2, which is released
  method: str = "radp"  # see dpjax.relevance.NAMES
  mode: str = "paper"  # paper | rigorous; decides for method radp alone
  epsilons: list[float] = dataclasses.field(default_factory=lambda: [2.0])
  curves: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  num_epochs: int = 40
  batch_size: int = 600
  learning_rate: float = 1e-3  # of Adam, for everything that is trained without noise
  weight_decay: float = 0.0  # of model 2 on noisy records (rigorous mode)
  num_seeds: int = 1
  seed: int = 0
  lrp: relevance.Lrp = dataclasses.field(default_factory=relevance.Lrp)
  paper: relevance.Paper = dataclasses.field(default_factory=relevance.Paper)
  rigorous: relevance.Rigorous = dataclasses.field(default_factory=relevance.Rigorous)
  private: relevance.Private = dataclasses.field(default_factory=relevance.Private)
  adlm: relevance.AdLM = dataclasses.field(default_factory=relevance.AdLM)
  public_data: str | None = None  # name of the data of a public model 1
  relevance_records: int | None = None  # average the relevance over the first so many
  audit: RelevanceAuditConfig = dataclasses.field(default_factory=RelevanceAuditConfig)
  title: str = ""


@bounds.names_fields
def check(config: RelevanceConfig) -> None:
  """Raises UserError for errors that can be found without data."""
  bounds.typed(config)
  validate.one_of(relevance.NAMES, method=config.method)
  validate.one_of(MODES, mode=config.mode)
  bounds.data(config.data)
  validate.one_of(models.ACTIVATIONS, activation=config.activation)
  validate.one_of(models.ACTIVATIONS, activation_1=config.activation_1)
  validate.integer_at_least(1, batch_size=config.batch_size)
  validate.integer_in(1, rules.MOST_EPOCHS, num_epochs=config.num_epochs)
  validate.integer_in(1, rules.MOST_RUNS, num_seeds=config.num_seeds)
  validate.integer_at_least(0, seed=config.seed)
  validate.positive(learning_rate=config.learning_rate)
  validate.non_negative(weight_decay=config.weight_decay)
  if not config.epsilons:
    raise UserError("must hold at least one epsilon", field="epsilons", value=[])
  for index, epsilon in enumerate(config.epsilons):
    validate.positive(**{f"epsilons[{index}]": epsilon})
  if config.public_data is not None and config.public_data == config.data.name:
    raise UserError(
      "must not be data.name, whose records are private",
      field="public_data",
      value=config.public_data,
    )
  if config.relevance_records is not None:
    validate.integer_at_least(1, relevance_records=config.relevance_records)
  if config.data.center:
    raise UserError(
      "must be false, the noise is made for pixels in [0, 1]",
      field="data.center",
      value=True,
    )
  _check_models(config)
  counts = bounds.named("audit", config.audit, "num_trials", "num_canaries")
  validate.integer_in(20, rules.MOST_DRAWS, **counts)


def _check_models(config: RelevanceConfig) -> None:
  for room, model in (("model", config.model), ("rigorous_model", config.rigorous_model)):
    if model is None:
      continue
    bounds.model(model, room)
    if models.needs_features(model.name):
      raise UserError(
        "must take images as they are", field=f"{room}.name", value=model.name
      )
  reduced = config.rigorous_model or ModelConfig()
  for name in ("mirrored", "colours"):
    if (value := getattr(reduced, name)) != getattr(ModelConfig(), name):
      raise WouldBeIgnored(
        "would be ignored, it is of scattering features",
        field=f"rigorous_model.{name}",
        value=value,
      )
