"""Settings that nothing would read are refused, for every config, in one place.

A config holds the fields of all methods; a run reads those of its own. `of_training` and
`of_federation` say which fields the others are and what each would need; `refuse` raises one
line where such a field is set. A field at its default, or an optional one at None, is not set.
`tests/runs/test_every_leaf.py` changes every field of every published config: what
changes nothing there and is not refused here fails.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from dpjax import models
from dpjax.data import EMBEDDED
from dpjax.data.published import PUBLISHED
from dpjax.data.shakespeare_lines import LOADERS as LINES
from dpjax.experiments.config import fields
from dpjax.experiments.config.ignored import WouldBeIgnored
from dpjax.experiments.kinds.central import normalization
from dpjax.experiments.kinds.central.config import (
  AuditConfig,
  DataConfig,
  FtrlConfig,
  ModelConfig,
  PrivacyConfig,
  TrainConfig,
)
from dpjax.experiments.kinds.central.ftrl import SAMPLERS as FTRL_SAMPLERS
from dpjax.experiments.kinds.central.privacy import SAMPLERS
from dpjax.experiments.kinds.federated import privacy as federated_privacy
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.names import is_path
from dpjax.validate import UserError

# what a loss of a whole batch does not read
_OF_ONE_EXAMPLE = ("grad_method", "microbatch_size", "memory_budget_gb", "mesh", "slices")
_OF_ONE_EXAMPLE += ("augmult",)

Unused = dict[str, str]  # dotted field, or room of fields -> what it would need
# shakespeare comes in windows, and lines, of its own length
_NO_TEXT = (*EMBEDDED, "shakespeare", *LINES)


def needs(condition: bool, what: str, *fields: str) -> Unused:
  """The fields, where the condition that they need does not hold.

  >>> needs(False, "text", "data.max_length")
  {'data.max_length': 'text'}
  """
  return {} if condition else dict.fromkeys(fields, what)


def reason(path: str, unused: Unused) -> str | None:
  """What a field would need; None where it is used.

  >>> reason("audit.kind", {"audit": "audit"}), reason("audits", {"audit": "audit"})
  ('audit', None)
  """
  names = path.split(".")
  prefixes = (".".join(names[:count]) for count in range(len(names), 0, -1))
  return next((unused[prefix] for prefix in prefixes if prefix in unused), None)


def within(section: str, unused: Unused) -> Unused:
  """The same fields where their config is a section of another.

  >>> within("train", {"seed": "a run of its own"})
  {'train.seed': 'a run of its own'}
  """
  return {f"{section}.{path}": what for path, what in unused.items()}


def refuse(config: Any, unused: Unused, name: str = "") -> None:
  """Raises UserError, one line for all, where a field is set that would be ignored.

  >>> refuse(TrainConfig(num_steps=3), {"num_steps": "more"})
  Traceback (most recent call last):
  ...
  dpjax...WouldBeIgnored: num_steps=3: would be ignored, it needs more; leave it at 200
  """
  faults = [
    UserError(
      f"would be ignored, it needs {what}",
      field=f"{name}{path}",
      value=value,
      hint=f"leave it at {default!r}",
    )
    for path, (value, default) in fields.set_fields(config).items()
    if (what := reason(path, unused)) is not None
  ]
  if faults:
    raise WouldBeIgnored.joined(faults)


# --- central runs


def of_training(config: TrainConfig) -> Unused:
  """The fields that this run does not read, and what each would need.

  >>> of_training(TrainConfig())["audit.score"]
  'audit.enabled'
  """
  privacy = config.privacy
  private = privacy.method != "sgd"
  promise = ("epsilon", "noise_multiplier", "l2_clip_norm", "neighboring_relation")
  promise += ("accountant", "epsilon_budget")
  promise += ("clipping", "clip_schedule", "noise_levels")
  named = [f"privacy.{name}" for name in promise]
  reported = private or config.audit.enabled
  return (
    _data(config.data)
    | of_model(config.model)
    | _of_groups(config)
    | needs(private, "privacy.method='dp_sgd' or 'dp_ftrl'", "data.num_examples")
    | needs(False, "users that the data name (launch.federate)", "data.num_users")
    | needs(private, "privacy.method='dp_sgd' or 'dp_ftrl'", *named)
    | needs(reported, "a private privacy.method or audit.enabled", "privacy.delta")
    | needs(
      privacy.clip_schedule != "constant",
      "a privacy.clip_schedule",
      "privacy.clip_schedule_final",
    )
    | _sampling(privacy)
    | _ftrl(privacy.ftrl, privacy.method)
    | needs(
      not getattr(privacy.normalization, "clip_norms", ()),
      "no privacy.normalization.clip_norms",
      "privacy.normalization.median_epsilon",
    )
    | _audit(config.audit)
    | needs(not config.release, "release=False", "diagnostics")
    | needs(config.loss != "contrastive", "a loss of one example", *_OF_ONE_EXAMPLE)
  )


def _data(data: DataConfig, *, of_leaf: bool = False) -> Unused:
  """What can be told from the name; `of_dataset` tells the rest. A folder that LEAF wrote may
  hold text, another one holds the arrays of an .npz."""
  path, folder = pathlib.Path(os.path.expanduser(data.name)), data.name.endswith("/")
  is_file = data.name.endswith(".npz") or (folder and not of_leaf)
  own = is_path(data.name)
  embedded = data.name in EMBEDDED or own or path.is_absolute()
  published = data.name.partition(":")[0] in PUBLISHED  # images, or text of its own length
  text = data.name not in _NO_TEXT and not published and not is_file and not own
  return needs(not embedded, "data that lie in a folder", "data.data_dir") | needs(
    text, "a text of tensorflow-datasets", "data.max_length"
  )


def of_model(model: ModelConfig) -> Unused:
  """The fields of a model that are of another kind of inputs, and options of other models."""
  of_features = models.needs_features(model.name) == "scattering"
  what = "a model on scattering features"
  features = needs(of_features, what, "model.mirrored", "model.colours")
  return features | within("model", of_options(model))


def of_options(model: ModelConfig) -> Unused:
  """The options that are set and that a model of this name does not take.

  >>> of_options(ModelConfig("linear", {"features": (8,)}))
  {'options.features': 'a model that takes it'}
  """
  if is_path(model.name):  # only its call tells
    return {}
  others = [name for name in model.options if name not in models.options(model.name)]
  return {f"options.{name}": "a model that takes it" for name in others}


def _of_groups(config: TrainConfig) -> Unused:
  """The model's own groups, where private statistics normalise its inputs in their place."""
  grouped = normalization.per_example(config)
  return needs(grouped, "privacy.normalization='per_example'", "model.options.num_groups")


def of_dataset(dataset: Any) -> Unused:
  """What can only be told from the loaded data."""
  return needs(dataset.vocab_size is not None, "text", "data.max_length")


def _sampling(privacy: PrivacyConfig) -> Unused:
  correlated = privacy.method == "dp_ftrl"
  sampler = privacy.ftrl.sampler if correlated else privacy.sampler
  kind = {**SAMPLERS, **FTRL_SAMPLERS}.get(sampler)  # None: one's own
  fixed = kind is not None and "capacity" not in kind.__dataclass_fields__
  return needs(
    not correlated, "another privacy.method than 'dp_ftrl'", "privacy.sampler"
  ) | needs(
    not fixed,
    f"a sampler whose batches differ in size, not {sampler!r}",
    "privacy.capacity",
  )


def _ftrl(ftrl: FtrlConfig, method: str) -> Unused:
  if method != "dp_ftrl":
    return {"privacy.ftrl": "privacy.method='dp_ftrl'"}
  free = ftrl.sampler in ("cyclic_poisson", "min_sep") or is_path(ftrl.sampler)
  return needs(free, "a sampler that does not pass in turns", "privacy.ftrl.separation")


def _audit(audit: AuditConfig) -> Unused:
  others = (field.name for field in dataclasses.fields(audit) if field.name != "enabled")
  return needs(audit.enabled, "audit.enabled", *(f"audit.{name}" for name in others))


# --- runs over clients


def of_federation(config: FedConfig) -> Unused:
  """The fields that this run does not read, and what each would need.

  >>> of_federation(FedConfig())["privacy.local_noise_multiplier"]
  "privacy.method='both'"
  """
  fields_of_clients = ("partition.client_id", "partition.max_examples")
  return (
    _data(config.data, of_leaf=fields.name_of(config, "partition") == "leaf")
    | of_model(config.model)
    | needs(False, "a promise to one example, not to one user", "data.num_examples")
    | needs(
      not hasattr(config.partition, "num_clients"),
      "users that the data name",
      "data.num_users",
    )
    | needs(not is_path(config.data.name), "clients that dpjax reads", *fields_of_clients)
    | _algorithm(config)
    | _federated_optimizers(config)
    | _federated_privacy(config)
    | needs(not config.release, "release=False", "diagnostics")
    | _audit(config.audit)
  )


def _algorithm(config: FedConfig) -> Unused:
  name, aggregator = fields.name_of(config, "algorithm"), config.aggregator
  weighs = isinstance(aggregator, str) or fields.name_of(config, "aggregator") == "mean"
  return (
    needs(
      name != "scaffold" and weighs,
      "aggregator='mean' and another algorithm than 'scaffold'",
      "weighting",
    )
    | needs(name != "fed_sgd", "an algorithm with local steps", "local.epochs")
    | needs(
      _keeps(config, name),
      "clients that keep something (algorithm='scaffold', compression='top_k')",
      "client_state",
    )
  )


def _keeps(config: FedConfig, algorithm: str) -> bool:
  """Whether clients keep something between rounds; one's own algorithm may."""
  own = isinstance(config.algorithm, str)
  return own or algorithm == "scaffold" or fields.name_of(config, "compression") == "top_k"


def _federated_optimizers(config: FedConfig) -> Unused:
  name = fields.name_of(config, "algorithm")
  unused = {"client_optimizer.schedule": "'constant': a client starts afresh every round"}
  if name == "fed_sgd":
    unused["client_optimizer"] = "an algorithm with local steps, not 'fed_sgd'"
  if name == "mime_lite":
    unused["server_optimizer"] = "an algorithm whose server has one, not 'mime_lite'"
  return unused


def _federated_privacy(config: FedConfig) -> Unused:
  privacy, room = config.privacy, "privacy"
  method = privacy.method
  promise = ("epsilon", "noise_multiplier", "l2_clip_norm", "epsilon_budget")
  reported = method != "none" or config.audit.enabled
  simulated = f"{room}.simulated_cohort", f"{room}.simulated_clients"
  return (
    needs(
      method != "none", "privacy (privacy.method)", *(f"{room}.{name}" for name in promise)
    )
    | needs(method != "none", "privacy (privacy.method)", f"{room}.clipping")
    | needs(reported, "privacy (privacy.method) or audit.enabled", f"{room}.delta")
    | needs(
      method in federated_privacy.CENTRAL,
      "noise of the server (privacy.method)",
      f"{room}.accountant",
      f"{room}.neighboring_relation",
    )
    | needs(method == "both", f"{room}.method='both'", f"{room}.local_noise_multiplier")
    | needs(method == "central", f"{room}.method='central'", *simulated)
    | needs(method != "dp_ftrl", "another privacy.method than 'dp_ftrl'", f"{room}.sampler")
    | needs(
      method != "distributed",
      "another privacy.method than 'distributed', which clips to privacy.l2_clip_norm",
      "secure_sum.largest_value",
    )
    | _ftrl(privacy.ftrl, method)
  )
