"""Typed configuration of one run of relevance."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from dpjax import relevance
from dpjax.experiments.config import choices, common, fields, rules
from dpjax.experiments.config.choices import Choice
from dpjax.experiments.config.common import COUNT
from dpjax.experiments.config.fields import WithChoices
from dpjax.experiments.config.sections import ExamplesConfig, NetworkConfig
from dpjax.experiments.kinds.relevance.methods import (
  AUDITED,
  METHODS,
  NoDp,
  Radp,
  RadpRigorous,
)
from dpjax.models.activations import ACTIVATIONS
from dpjax.validate import UserError
from dpjax.zoo.networks.registry import entry, options

# An audit with fewer than 20 draws could refute only claims of an epsilon below 2.
_DRAWS = rules.between(20, rules.MOST_DRAWS)
# Scales of noise, which are divided by it and by shares of it, stay numbers of float32.
_EPSILON = rules.within_range(1e-9, 1e9)


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
  """Configuration of a run of one method of `dpjax.relevance`."""

  data: ExamplesConfig = dataclasses.field(default_factory=ExamplesConfig)
  model: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
  activation: Annotated[str, rules.among(ACTIVATIONS), "of model 2, which is released"] = (
    "tanh"
  )
  method: Annotated[
    Any,
    Choice(METHODS),
    "with what it alone reads; launch.list methods says what each does",
  ] = dataclasses.field(default_factory=Radp)
  epsilon: Annotated[float, _EPSILON, "of the whole run, as the method counts it"] = 2.0
  num_epochs: Annotated[int, rules.between(1, rules.MOST_EPOCHS), "of each training"] = 40
  batch_size: Annotated[int, COUNT, "examples of a step"] = 600
  seed: common.Seed = 0
  noise_seed: common.NoiseSeed = None
  lrp: relevance.Lrp = dataclasses.field(default_factory=relevance.Lrp)
  audit: Annotated[
    RelevanceAudit | None, Choice(AUDITS), "attack the run; short: --audit"
  ] = None

  @property
  def is_private(self) -> bool:
    """Whether the method has a guarantee, proved or claimed, so that its keys are secret."""
    return not isinstance(self.method, NoDp)

  @property
  def is_rigorous(self) -> bool:
    """Whether this is RADP with a proof."""
    return isinstance(self.method, RadpRigorous)

  @property
  def second(self) -> NetworkConfig:
    """Model 2, which is released."""
    return getattr(self.method, "reduced_model", None) or self.model

  def settle(self, before: RelevanceConfig, changes: Iterable[str]) -> RelevanceConfig:
    """Returns the config without what its run does not read, unless it is among the `changes`."""
    del before
    try:
      unread = _unread(self)
    except (UserError, TypeError, AttributeError):
      return self  # a wrong value, which `check` names
    config = self
    for path in unread:
      if not any(f"{other}.".startswith(f"{path}.") for other in changes):
        config = fields.at_default(config, path, RelevanceConfig())
    return config


def _rows(config: RelevanceConfig) -> Iterator[tuple[bool, str, str]]:
  """Yields (whether it is read, what it would need, fields), for fields whose reader is no value of
  a choice. Fields are separated by spaces."""
  method = config.method
  audit = config.audit
  noised = isinstance(method, AUDITED)
  first = method.propagates
  canaries = audit is not None and audit.canary_runs
  lrp = config.lrp
  yield first or config.second is config.model, "a model 1 (method.model1)", "model"
  takes = _takes_activation(config.second)
  yield takes, "a model 2 that takes its activation from here", "activation"
  takes = first and _takes_activation(config.model)
  words = "a model 1 that takes its activation from here"
  yield takes, words, "method.activation_1 method.model1.activation_1"
  yield noised, "a method that noises records", "audit.num_trials"
  yield canaries, "audit.canary_runs", "audit.num_canaries"
  yield noised or canaries, "audit.canary_runs, or a method that noises records", "audit"
  # Every method reads `lrp`, for its relevance or for the heat maps of its result.
  yield lrp.rule == "epsilon", "lrp.rule='epsilon'", "lrp.stabilizer"
  yield lrp.rule == "alpha_beta", "lrp.rule='alpha_beta'", "lrp.alpha"
  yield lrp.input_rule == "z_box", "lrp.input_rule='z_box'", "lrp.low lrp.high"
  for is_read, words, name in method.rows():
    yield is_read, words, f"method.{name}"


def _takes_activation(model: NetworkConfig) -> bool:
  return "activation" in options(model.name) and "activation" not in model.options


def _unread(config: RelevanceConfig) -> list[str]:
  set_here = choices.set_fields(config)
  return [
    name
    for is_read, _, names in _rows(config)
    for name in names.split()
    if not is_read and any(f"{path}.".startswith(f"{name}.") for path in set_here)
  ]


def check(config: RelevanceConfig) -> None:
  """Raises UserError if the config is wrong, or holds what its run does not read; loads no data."""
  common.check_types(config)
  config.method.check(config.data.name)
  _check_models(config)
  for is_read, words, names in _rows(config):
    common.read_if(config, is_read, words, *names.split())


def _check_models(config: RelevanceConfig) -> None:
  models = {"model": config.model}
  reduced = getattr(config.method, "reduced_model", None)
  if reduced is not None:
    reduced.check("method.reduced_model")
    models["method.reduced_model"] = reduced
  for section, model in models.items():
    if entry(model.name).features:
      raise UserError(
        "must take images as they are", field=f"{section}.name", value=model.name
      )
