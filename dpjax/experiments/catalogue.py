"""Everything that can be chosen by name, one line each: for `launch.list`.

Names come from the tables by which a run finds them, so later entries of a table are listed, too.
Most descriptions are first sentences of docstrings.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dpjax import names, sampling
from dpjax.accounting.event_kinds.kind import every_kind
from dpjax.accounting.proved import ACCOUNTANTS
from dpjax.auditing.lower_bounds import METHODS
from dpjax.data import image_folders, npz, tables, text_files
from dpjax.experiments.config.choices import choice_at
from dpjax.experiments.config.fields import WithChoices
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.settings import AttackSettings
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated import config as federated_config
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.federated import described
from dpjax.models.libraries.by_path import is_model_class
from dpjax.sampling.registry import used_for
from dpjax.training.augment import AUGMENTATIONS
from dpjax.zoo.datasets import prepared
from dpjax.zoo.datasets.published import PUBLISHED
from dpjax.zoo.networks import registry

Rows = Mapping[str, str]  # name -> what it is, one line


class Section(NamedTuple):
  """Names that a config field takes, or that belong to one topic."""

  where: str  # the field that takes them, or what they are names of
  rows: Callable[[], Rows]


_LAUNCHERS = {
  TrainConfig: "launch.train",
  FedConfig: "launch.federate",
  AttackConfig: "launch.attack",
  RelevanceConfig: "launch.relevance",
  SecureConfig: "launch.secure",
}


def sentence(text: str | None) -> str:
  """Returns the first sentence of a docstring, on one line; "" if there is no docstring.

  >>> sentence("Adds noise\\n  to sums. Slowly.\\n\\n  Args: ...")
  'Adds noise to sums.'
  """
  first = " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())
  return re.split(r"(?<=[.])\s+(?=[A-Z`])", first, maxsplit=1)[0]


def _meaning(value: Any) -> str:
  """Returns the first sentence of an object's docstring.

  The docstring of an alias is only the path of another object, in backquotes. Then the first
  sentence of that object's docstring is returned.
  """
  words = sentence(value.__doc__)
  path = re.fullmatch(r"`(\w+(?:\.\w+)+)`\.", words)
  if path is None:
    return words
  module, _, name = path[1].rpartition(".")
  try:
    return sentence(getattr(importlib.import_module(f"dpjax.{module}"), name).__doc__)
  # The path is that of a method, not of an object in a module.
  except (ImportError, AttributeError):
    return words


def _line(value: Any) -> str:
  """Returns one line about a class or a function, with its settings and their values."""
  numbers: dict[str, Any] = {}
  if value is type(None):
    return "nothing"
  if isinstance(value, functools.partial):
    numbers = value.keywords
    value = value.func
  # The fields of a whole section are too many for a line.
  is_section = isinstance(value, type) and issubclass(value, WithChoices)
  if dataclasses.is_dataclass(value) and not is_section:
    numbers = {
      field.name: field.default
      for field in dataclasses.fields(value)
      if field.default is not dataclasses.MISSING
    }
    # Where there is no docstring, `dataclass` writes one. It only repeats the settings, so it is
    # left out.
    signature = f"{getattr(value, '__name__', '')}("
    if (value.__doc__ or "").startswith(signature):
      return _with("", numbers)
  return _with(_meaning(value), numbers)


def _with(words: str, numbers: Mapping[str, Any]) -> str:
  shown = ", ".join(f"{name}={value!r}" for name, value in numbers.items())
  return " ".join(part for part in (words, f"[{shown}]" if shown else "") if part)


def _choice(config: type, path: str) -> Section:
  choice = choice_at(config, path)
  assert choice is not None, path
  return _document(f"--config.{path} of {_LAUNCHERS[config]}", choice.kinds())


def _document(where: str, table: Mapping[str, Any]) -> Section:
  return Section(where, lambda: {name: _line(value) for name, value in table.items()})


def _algorithms() -> Rows:
  """Returns every algorithm with the work of its client and its server, and when it is private."""
  table = federated_config.ALGORITHMS
  rows = described.algorithms()

  def line(name: str, value: Any) -> str:
    row = rows.get(name)
    if row is None:
      return _line(value)
    private = f"; private if {row.private_if} is set" if row.private_if else ""
    return f"{_line(value)} [client: {row.client}; server: {row.server}{private}]"

  return {name: line(name, value) for name, value in table.items()}


def _aggregators() -> Rows:
  """Returns every aggregator, with how many clients with arbitrary messages it tolerates."""
  rows = described.aggregators()

  def line(name: str, value: Any) -> str:
    row = rows.get(name)
    facts = f" [stands up to {row.stands_up_to}; {row.source}]" if row else ""
    return f"{_line(value)}{facts}"

  return {name: line(name, value) for name, value in federated_config.AGGREGATORS.items()}


def _samplers(where: str, purpose: str) -> Section:
  """Returns a section of samplers, each with its proved relations, and accountants for them."""

  def line(kind: type[sampling.Sampler]) -> str:
    sampler = kind(**kind.small[0])
    by = " or ".join(sampler.accountants(sampler.proved_under[0]))
    by = f"{', '.join(kind.relations)} by {by}"
    return f"{sentence(kind.__doc__)} [proved: {by}]"

  rows = used_for(purpose)
  return Section(where, lambda: {name: line(row.kind) for name, row in rows.items()})


def _accountants() -> Rows:
  kinds = {
    name: kind
    for name, kind in every_kind().items()
    if kind.relations and name != "non_private"
  }

  def line(by: str) -> str:
    events = (name for name, kind in kinds.items() if by in kind.accountants)
    return f"proves: {', '.join(events)}"

  return {by: line(by) for by in ACCOUNTANTS}


def _data_sets() -> Rows:
  """Returns a row for each data set in `PUBLISHED`: what it is, where it is, or how to get it. Adds
  a row for each kind of file or folder."""
  root = prepared.data_root()

  def line(name: str) -> str:
    if PUBLISHED[name].loader:
      return sentence(PUBLISHED[name].load().__doc__)
    if prepared.is_prepared(name, root):
      return f"prepared, in {root}"
    return f"not in {root}: {prepared.prepare_command(name, root)}"

  rows = {name: line(name) for name in PUBLISHED}
  forms = {
    "FILE.npz": npz.load_npz,
    "FILE.csv, FILE.parquet": tables.table,
    "FILE.txt": text_files.text_file,
    "FOLDER/": image_folders.image_folder,
  }
  return rows | {name: sentence(load.__doc__) for name, load in forms.items()}


def _models() -> Rows:
  return {
    name: f"{sentence(registry.entry(name).module.__doc__)} "
    f"[options: {', '.join(registry.options(name))}]"
    for name in registry.MODELS
  }


def user_defined(paths: Sequence[str]) -> Section:
  """Returns a section with a line for each import path, with flags that may take the path.

  `rows()` of the section raises UserError if an import path names nothing, or nothing that can be
  called.

  >>> user_defined(["dpjax.models:Linear"]).rows()["dpjax.models:Linear"][-21:]
  '(--config.model.name)'
  """
  return Section("of your own", lambda: {path: _users(path) for path in paths})


def _users(path: str) -> str:
  value = names.find(path, "topic")
  words = sentence(value.__doc__) or "without a docstring"
  if is_model_class(value):
    options = ", ".join(registry.options(path))
    return f"{words} [options: {options}] (--config.model.name)"
  if isinstance(value, type) and issubclass(value, AttackSettings):
    return f"{_line(value)} (--config.attack of launch.attack)"
  try:
    parameters = list(inspect.signature(value).parameters.values())
  # Native code has no signature to inspect, so its parameters are unknown.
  except ValueError:
    parameters = []
  if parameters and parameters[0].name == "loss_fn":
    return f"{words} (--config.algorithm of launch.federate)"
  if not [each for each in parameters if each.default is each.empty]:
    return f"{words} (--config.data.name, or --config.aggregator of launch.federate)"
  return f"{words} (see your_code.md for what takes it)"


_BOUNDS = {name: method.bound for name, method in METHODS.items()}

TOPICS: dict[str, tuple[Section, ...]] = {
  "data": (Section("--config.data.name of every launcher", _data_sets),),
  "models": (Section("--config.model.name of every launcher", _models),),
  "methods": (
    _choice(TrainConfig, "privacy"),
    _choice(FedConfig, "privacy"),
    _choice(RelevanceConfig, "method"),
  ),
  "clippings": (
    _choice(TrainConfig, "privacy.clipping"),
    _choice(FedConfig, "privacy.clipping"),
  ),
  "samplers": (
    _samplers("--config.privacy.sampler of dp_sgd", "examples"),
    _samplers("--config.privacy.sampler of launch.federate", "clients"),
    _samplers("--config.privacy.sampler of dp_ftrl", "correlated noise"),
  ),
  "scalings": (_choice(TrainConfig, "privacy.scaling"),),
  "clip_schedules": (_choice(TrainConfig, "privacy.clip_schedule"),),
  "normalizations": (_choice(TrainConfig, "privacy.normalization"),),
  "trainables": (_choice(TrainConfig, "trainable"),),
  "class_weights": (_choice(TrainConfig, "class_weights"),),
  "accountants": (Section("--config.privacy.accountant", _accountants),),
  "correlations": (_choice(TrainConfig, "privacy.strategy"),),
  "augmentations": (_document("--config.augmentation", AUGMENTATIONS),),
  "optimizers": (
    _choice(TrainConfig, "optimizer.rule"),
    _choice(FedConfig, "client_optimizer.rule"),
  ),
  "partitions": (_choice(FedConfig, "partition"),),
  "algorithms": (Section("--config.algorithm of launch.federate", _algorithms),),
  "weightings": (_choice(FedConfig, "weighting"),),
  "aggregators": (Section("--config.aggregator of launch.federate", _aggregators),),
  "compressions": (_choice(FedConfig, "compression"),),
  "secure_sums": (
    _choice(FedConfig, "secure_sum"),
    _choice(SecureConfig, "task.protocol"),
  ),
  "secure_tasks": (_choice(SecureConfig, "task"),),
  "attacks": (
    _choice(AttackConfig, "attack"),
    _choice(AttackConfig, "target"),
  ),
  "audits": (
    _choice(TrainConfig, "audit"),
    _choice(FedConfig, "audit"),
    _document("--config.audit.method", _BOUNDS),
  ),
}
