"""Finds settings that a run would not read, so that they are refused.

A config holds the fields of all methods, but a run reads only the fields of one method.
`of_training` returns the other fields, each with the condition under which it would be read.
`kinds.federated.unused` does the same for federated runs. `test_every_leaf.py` changes every field
of every published config. It fails for a field that changes nothing and is not refused here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dpjax.experiments.config.unread import Unused, needs, within
from dpjax.experiments.kinds.central import normalization
from dpjax.experiments.kinds.central.config import (
  CONTRASTIVE,
  AuditConfig,
  DataConfig,
  FtrlConfig,
  ModelConfig,
  PrivacyConfig,
  TrainConfig,
)
from dpjax.names import is_path
from dpjax.sampling import registry
from dpjax.zoo.datasets import published
from dpjax.zoo.datasets.registry import takes_declaration
from dpjax.zoo.networks.registry import needs_features, options

# Kinds of data that have a declaration.
_DECLARED = "a table, a text file or a folder of images"
# Fields that only a loss of one example reads.
_OF_ONE_EXAMPLE = ("grad_method", "microbatch_size", "memory_budget_gb", "mesh", "slices")
_OF_ONE_EXAMPLE += ("augmult",)
_PRIVATE = "privacy.method='dp_sgd', 'dp_ftrl' or 'least_squares'"


def of_training(config: TrainConfig) -> Unused:
  """Returns {field that this run does not read: condition under which it would be read}.

  >>> of_training(TrainConfig())["audit.score"]
  'audit.enabled'
  """
  privacy = config.privacy
  private = config.is_private
  guarantee = ("epsilon", "noise_multiplier", "l2_clip_norm", "neighboring_relation")
  guarantee += ("accountant", "epsilon_budget", "attacker")
  guarantee += ("clipping", "scaling", "clip_schedule", "noise_levels")
  named = [f"privacy.{name}" for name in guarantee]
  reported = private or config.audit.enabled
  # Private statistics may replace the model's own groups, which then have no use.
  grouped = normalization.per_example(config)
  return (
    of_data(config.data)
    | of_model(config.model)
    | needs(grouped, "privacy.normalization='per_example'", "model.options.num_groups")
    | needs(private, _PRIVATE, "data.num_examples")
    | needs(False, "users that the data name (launch.federate)", "data.num_users")
    | needs(private, _PRIVATE, "noise_seed", *named)
    | _at_once(config)
    | needs(reported, "a private privacy.method or audit.enabled", "privacy.delta")
    | needs(
      privacy.clip_schedule != "constant",
      "a privacy.clip_schedule",
      "privacy.clip_schedule_final",
    )
    | _sampling(privacy)
    | of_ftrl(privacy.ftrl, privacy.method)
    | needs(
      not getattr(privacy.normalization, "clip_norms", ()),
      "no privacy.normalization.clip_norms",
      "privacy.normalization.median_epsilon",
    )
    | of_audit(config.audit)
    | needs(not config.release, "release=False", "diagnostics")
    | needs(config.loss != CONTRASTIVE, "a loss of one example", *_OF_ONE_EXAMPLE)
  )


def _at_once(config: TrainConfig) -> Unused:
  if config.privacy.method != "least_squares":
    return {"privacy.least_squares": "privacy.method='least_squares'"}
  from dpjax.experiments.kinds.central import one_release  # no other method needs it

  return one_release.unread(config)


def of_data(data: DataConfig, *, of_leaf: bool = False) -> Unused:
  """Returns {field: condition} for fields that data of this name leave unread.

  Whether the data are text may be known only after loading; see `of_dataset`.

  Args:
    of_leaf: whether a folder was written by LEAF, so that it may hold text.
  """
  declared = takes_declaration(data.name) and not of_leaf
  is_file = data.name.endswith(".npz") or declared
  is_user_code = is_path(data.name)
  # Published data are images, tables, or texts of a length that their loader fixes, so none of them
  # reads `data.max_length`.
  is_published = data.name.partition(":")[0] in published.PUBLISHED
  text = not is_published and not is_file and not is_user_code
  return (
    needs(published.lies_in_folder(data.name), "data that lie in a folder", "data.data_dir")
    | needs(text, "a text of tensorflow-datasets", "data.max_length")
    | needs(declared, _DECLARED, "data.declaration")
  )


def of_model(model: ModelConfig) -> Unused:
  """Returns {field: condition} for fields that the model does not read, and options that it does
  not take."""
  features = needs_features(model.name)
  of_scattering = features == "scattering"
  return (
    needs(features is not None, "a model on features", "model.mirrored")
    | needs(of_scattering, "a model on scattering features", "model.colours")
    | within("model", of_options(model))
  )


def of_options(model: ModelConfig) -> Unused:
  """Returns {option: condition} for options that a model of this name does not take.

  >>> of_options(ModelConfig("linear", {"features": (8,)}))
  {'options.features': 'a model that takes it'}
  """
  # Which options a user's model takes is known only when it is called.
  if is_path(model.name):
    return {}
  others = [name for name in model.options if name not in options(model.name)]
  return {f"options.{name}": "a model that takes it" for name in others}


def of_dataset(dataset: Any) -> Unused:
  """Returns `data.max_length` as unread if the loaded data are no text, else {}."""
  return needs(dataset.vocab_size is not None, "text", "data.max_length")


def _sampling(privacy: PrivacyConfig) -> Unused:
  correlated = privacy.method == "dp_ftrl"
  sampler = privacy.ftrl.sampler if correlated else privacy.sampler
  kind = registry.SAMPLERS.get(sampler)  # None: a user's own
  fixed = kind is not None and "capacity" not in kind.options
  selects = kind is not None and "num_selected" in kind.options
  return (
    needs(not correlated, "another privacy.method than 'dp_ftrl'", "privacy.sampler")
    | needs(
      not fixed,
      f"a sampler whose batches differ in size, not {sampler!r}",
      "privacy.capacity",
    )
    | needs(
      selects,
      f"a sampler of several steps of each pass, not {sampler!r}",
      "privacy.num_selected",
    )
  )


def of_ftrl(ftrl: FtrlConfig, method: str) -> Unused:
  if method != "dp_ftrl":
    return {"privacy.ftrl": "privacy.method='dp_ftrl'"}
  kind = registry.SAMPLERS.get(ftrl.sampler)
  free = is_path(ftrl.sampler) or (kind is not None and "separation" in kind.options)
  return needs(free, "a sampler that does not pass in turns", "privacy.ftrl.separation")


def of_audit(audit: AuditConfig) -> Unused:
  others = (field.name for field in dataclasses.fields(audit) if field.name != "enabled")
  return needs(audit.enabled, "audit.enabled", *(f"audit.{name}" for name in others))
