"""Typed configuration of one run of relevance, and of an experiment of several runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any

from dpjax import relevance
from dpjax.experiments.config import common, fields, rules
from dpjax.experiments.config.common import COUNT
from dpjax.experiments.config.fields import Choice, WithChoices
from dpjax.experiments.kinds import bounds
from dpjax.experiments.kinds.central.config import DataConfig, ModelConfig
from dpjax.models.activations import ACTIVATIONS
from dpjax.relevance.pipeline import NAMES
from dpjax.relevance.settings import MODES
from dpjax.validate import UserError
from dpjax.zoo.networks.registry import needs_features

# An audit with fewer than 20 draws could refute only claims of an epsilon below 2.
_DRAWS = rules.between(20, rules.MOST_DRAWS)


@dataclasses.dataclass
class RelevanceAudit:
  """Attacks on each run; all bounds hold together at 95 % (Bonferroni over the attacks)."""

  num_trials: Annotated[
    int, _DRAWS, "of U1 (the features' noise) and U2 (shared noise), on each side"
  ] = 1000
  num_canaries: Annotated[
    int, _DRAWS, "at most, of U3 (wrong labels) and U4 (membership)"
  ] = 200
  canary_runs: Annotated[bool, "U3 and U4, which train the method once more each"] = True


AUDITS: dict[str, type] = {"none": type(None), "attacks": RelevanceAudit}


@dataclasses.dataclass
class RelevanceConfig(WithChoices):
  """Configuration of an experiment with the methods of `dpjax.relevance`.

  `curves` maps a label to fields that differ from this config, by dotted name, such as
  {"RADP": {}, "DPSGD": {"method": "dpsgd"}}. Without curves, this config is the only curve. Every
  curve is run at every epsilon with seeds seed, seed + 1, ...
  (`dpjax.experiments.sweeps.experiment`). Only the part of a label before " @ " names the curve. So
  {"tanh @ mnist": {...}, "tanh @ cifar10": {...}} draw a line "tanh" in two panels.
  """

  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  rigorous_model: Annotated[ModelConfig | None, "on the reduced features; none: model"] = (
    None
  )
  activation_1: Annotated[
    str, rules.among(ACTIVATIONS), "of model 1, whose relevance is propagated"
  ] = "relu"
  activation: Annotated[str, rules.among(ACTIVATIONS), "of model 2, which is released"] = (
    "tanh"
  )
  method: Annotated[str, rules.among(NAMES), "launch.list methods says what each does"] = (
    "radp"
  )
  mode: Annotated[str, rules.among(MODES), "decides for method='radp' alone"] = "paper"
  epsilons: Annotated[
    list[float], rules.each(rules.POSITIVE), "every curve is run at each of them"
  ] = dataclasses.field(default_factory=lambda: [2.0])
  curves: Annotated[
    dict[str, dict[str, Any]], "label to the fields that differ; none: one curve"
  ] = dataclasses.field(default_factory=dict)
  num_epochs: Annotated[int, rules.between(1, rules.MOST_EPOCHS), "of each training"] = 40
  batch_size: Annotated[int, COUNT, "examples of a step"] = 600
  learning_rate: Annotated[
    float, rules.POSITIVE, "of Adam, for all that is trained without noise"
  ] = 1e-3
  weight_decay: Annotated[
    float, rules.NON_NEGATIVE, "of model 2 on noisy records (rigorous mode)"
  ] = 0.0
  num_seeds: Annotated[
    int, rules.between(1, rules.MOST_RUNS), "seed, seed + 1, ...: runs at each epsilon"
  ] = 1
  seed: common.Seed = 0
  noise_seed: common.NoiseSeed = None
  lrp: relevance.Lrp = dataclasses.field(default_factory=relevance.Lrp)
  paper: relevance.Paper = dataclasses.field(default_factory=relevance.Paper)
  rigorous: relevance.Rigorous = dataclasses.field(default_factory=relevance.Rigorous)
  private: relevance.Private = dataclasses.field(default_factory=relevance.Private)
  adlm: relevance.AdLM = dataclasses.field(default_factory=relevance.AdLM)
  public_data: Annotated[str | None, "name of the data of a public model 1"] = None
  relevance_records: Annotated[
    int | None, COUNT, "average the relevance over the first so many; none: all"
  ] = None
  audit: Annotated[
    RelevanceAudit | None, Choice(AUDITS), "attack every point; short: --audit"
  ] = None
  title: Annotated[str, "of the picture"] = ""

  @property
  def is_private(self) -> bool:
    """Whether the method has a guarantee, proved or claimed, so that its keys are secret."""
    return self.method != "no_dp"

  def settled(self, changes: Iterable[str]) -> RelevanceConfig:
    """Returns the config of other curves: what none of them reads goes back to its default, unless
    it is among the `changes`."""
    # A single run of an experiment sets its seeds, too, and keeps all that its curve has.
    if "curves" not in changes or "num_seeds" in changes:
      return self
    from dpjax.experiments.kinds.relevance import unused  # it reads this module

    config = self
    try:
      unread = unused.of_curves(self)
    except UserError:  # a wrong curve, which `check` names
      return self
    for path in fields.set_fields(self):
      named = any(f"{other}.".startswith(f"{path}.") for other in changes)
      if not named and unused.reason(path, unread) is not None:
        config = fields.at_default(config, path, RelevanceConfig())
    return config


@bounds.names_fields
def check(config: RelevanceConfig) -> None:
  """Raises UserError if the config is wrong; loads no data."""
  bounds.typed(config)
  bounds.data(config.data)
  if not config.epsilons:
    raise UserError("must hold at least one epsilon", field="epsilons", value=[])
  if config.public_data is not None and config.public_data == config.data.name:
    raise UserError(
      "must not be data.name, whose records are private",
      field="public_data",
      value=config.public_data,
    )
  if config.data.center:
    raise UserError(
      "must be false, the noise is made for pixels in [0, 1]",
      field="data.center",
      value=True,
    )
  _check_models(config)


def _check_models(config: RelevanceConfig) -> None:
  for section, model in (
    ("model", config.model),
    ("rigorous_model", config.rigorous_model),
  ):
    if model is None:
      continue
    bounds.model(model, section)
    if needs_features(model.name):
      raise UserError(
        "must take images as they are", field=f"{section}.name", value=model.name
      )
  reduced = config.rigorous_model or ModelConfig()
  for name in ("mirrored", "colours"):
    if (value := getattr(reduced, name)) != getattr(ModelConfig(), name):
      raise UserError(
        "would be ignored, it is of scattering features",
        field=f"rigorous_model.{name}",
        value=value,
      )
