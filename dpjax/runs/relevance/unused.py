"""Which settings of a relevance experiment its methods read; see `unused`.

A setting of the experiment must be read by at least one of its curves, and one that a curve
sets by that curve.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dpjax import models
from dpjax.relevance.settings import Rigorous
from dpjax.runs import fields, unused
from dpjax.runs.central.config import DataConfig, ModelConfig
from dpjax.runs.unused import Unused, needs
from dpjax.validate import UserError

if TYPE_CHECKING:  # it refuses by this module
  from dpjax.runs.relevance.config import RelevanceConfig

_SGD = ("dpsgd", "tempered", "radp_dpsgd")  # and SGLD, without momentum
_ADAPTIVE = ("dp_adam", "dpdligdo")
_PLAN = (*_SGD, "dp_sgld", *_ADAPTIVE)  # perturb gradients
_CLAIMED = ("adlm", "ilm")
_OF_EXPERIMENT = ("curves", "title")  # a curve has neither


def refuse(config: RelevanceConfig) -> None:
  """Raises UserError for a setting that no curve reads."""
  curves = list(_curves(config))
  for label, changes, curve in curves:
    _refuse_changes(label, changes, curve)
  shadowed = {}
  for path in fields.set_fields(config):
    reasons = [_why(path, changes, curve) for _, changes, curve in curves]
    if path not in _OF_EXPERIMENT and all(reasons):
      shadowed[path] = str(reasons[0])
  unused.refuse(config, shadowed)


def _curves(
  config: RelevanceConfig,
) -> Iterator[tuple[str, dict[str, Any], RelevanceConfig]]:
  for label, changes in (config.curves or {config.method: {}}).items():
    curve = config
    for path, value in changes.items():
      curve = fields.replace(curve, path, value, name=f"config.curves[{label!r}]")
    yield label, changes, curve


def _refuse_changes(label: str, changes: dict[str, Any], curve: RelevanceConfig) -> None:
  where = f"curves[{label!r}]."
  for path in _OF_EXPERIMENT:
    if path in changes:
      raise UserError(f"{where}{path}: would be ignored, it is of the whole experiment")
  found = {
    path: what
    for path in fields.set_fields(curve)
    if _within(path, changes) and (what := unused.reason(path, of(curve))) is not None
  }
  unused.refuse(curve, found, where)


def _within(path: str, changes: dict[str, Any]) -> bool:
  return any(path == change or path.startswith(f"{change}.") for change in changes)


def _why(path: str, changes: dict[str, Any], curve: RelevanceConfig) -> str | None:
  if _within(path, changes):
    return "a curve that does not set its own"
  return unused.reason(path, of(curve))


def of(config: RelevanceConfig) -> Unused:
  """The fields that one curve does not read, and what each would need.

  >>> from dpjax.runs.relevance.config import RelevanceConfig
  >>> of(RelevanceConfig())["weight_decay"]
  "method='radp' with mode='rigorous'"
  """
  method, radp = config.method, config.method == "radp"
  paper, rigorous = radp and config.mode == "paper", radp and config.mode == "rigorous"
  proof = "method='radp' with mode='rigorous'"
  plain = radp or method in (*_CLAIMED, "no_dp")
  return (
    _data(config.data)
    | _nets(config, rigorous)
    | needs(radp, "method='radp'", "mode")
    | needs(plain, "a method that trains without a noisy gradient", "learning_rate")
    | needs(rigorous, proof, "weight_decay", "rigorous_model", "rigorous")
    | needs(paper, "method='radp' with mode='paper'", "paper")
    | needs(
      paper or method == "adlm", "a method with the paper's relevance", "relevance_records"
    )
    | needs(method in _CLAIMED, "method='adlm' or 'ilm'", "adlm")
    | (_paper(config) if paper else {})
    | (_rigorous(config.rigorous) if rigorous else {})
    | _public(config, rigorous)
    | _private(config, rigorous)
    | _lrp(config)
    | _audit(config)
  )


def _data(data: DataConfig) -> Unused:
  path, is_file = pathlib.Path(os.path.expanduser(data.name)), data.name.endswith(".npz")
  embedded = data.name == "digits" or (is_file and path.is_absolute())
  return needs(not embedded, "data that lie in a folder", "data.data_dir") | {
    "data.max_length": "text, and relevance is of images"
  }


def of_dataset(dataset: Any) -> Unused:
  """What can only be told from the loaded data."""
  shape = dataset.x.shape[1:]
  images = needs(len(shape) == 3, "images", "rigorous.pool", "private.relevance_pool")
  several = len(shape) == 3 and shape[2] > 1
  return images | needs(several, "images of several channels", "paper.shared_channels")


def _nets(config: RelevanceConfig, rigorous: bool) -> Unused:
  """Model 1 is the first net, model 2 the second; one may be what the other is not."""
  method, second = config.method, config.model
  guided = rigorous and config.rigorous.model1 != "none"
  first_used = config.method in ("radp_dpsgd", "adlm") or guided
  first_used |= method == "radp" and not rigorous
  reduced = rigorous and config.rigorous_model is not None
  if reduced and config.rigorous_model is not None:
    second = config.rigorous_model
  chosen = _takes_activation(config.model)
  return (
    needs(
      first_used and chosen, "a model 1 that takes its activation from here", "activation_1"
    )
    | needs(
      method != "tempered" and _takes_activation(second),
      "a model 2 that takes its activation from here",
      "activation",
    )
    | needs(first_used or not reduced, "a model 1 (rigorous.model1)", "model")
  )


def _takes_activation(model: ModelConfig) -> bool:
  return "activation" in models.options(model.name) and "activation" not in model.options


def _paper(config: RelevanceConfig) -> Unused:
  custom, paper = config.paper.preset == "custom", "paper"
  names = ("beta_norm", "times_batch_size", "draw")
  return needs(
    custom, "paper.preset='custom'", *(f"{paper}.{name}" for name in names)
  ) | needs(
    config.paper.mechanism == "gaussian", "paper.mechanism='gaussian'", "paper.delta"
  )


def _rigorous(how: Rigorous) -> Unused:
  room = "rigorous"
  guided = how.model1 != "none"
  of_relevance = ("split", "epsilon_b", "rel_noise", "rel_norm", "beta_power", "floor")
  clips = how.features in ("laplace_clipped", "gaussian")
  approximate = (
    how.shuffle
    or how.features in ("laplace_pld", "gaussian")
    or (guided and (how.rel_noise == "gaussian" or how.model1 == "dp_sgd"))
  )
  responds = how.labels == "randomized_response"
  return (
    needs(
      guided, "a rigorous.model1 for the relevance", *(f"{room}.{n}" for n in of_relevance)
    )
    | needs(
      guided and how.split, f"{room}.split and a {room}.model1", f"{room}.split_share"
    )
    | needs(
      how.model1 == "dp_sgd" and not how.split,
      f"{room}.split=False and {room}.model1='dp_sgd'",
      f"{room}.budget_share_1",
    )
    | needs(clips, f"{room}.features='laplace_clipped' or 'gaussian'", f"{room}.clip")
    | needs(responds, f"{room}.labels='randomized_response'", f"{room}.label_share")
    | needs(
      how.draw == "record_fresh", f"{room}.draw='record_fresh'", f"{room}.compose_fresh"
    )
    | needs(approximate, "a mechanism that spends delta", f"{room}.delta")
  )


def _public(config: RelevanceConfig, rigorous: bool) -> Unused:
  wanted = rigorous and config.rigorous.model1 == "public"
  return needs(wanted, "rigorous.model1='public' with mode='rigorous'", "public_data")


def _private(config: RelevanceConfig, rigorous: bool) -> Unused:
  method, legacy = config.method, config.method == "dpdligdo"
  model_1 = rigorous and config.rigorous.model1 == "dp_sgd"
  by_sgd = method in _SGD or model_1
  used = {
    "l2_clip_norm": method in _PLAN or model_1,
    "delta": method in _PLAN,
    "neighboring_relation": method in _PLAN,
    "learning_rate": by_sgd or method == "dp_sgld",
    "momentum": by_sgd,
    "adaptive_learning_rate": method in _ADAPTIVE,
    "iterative": legacy,
    "legacy_microbatch": legacy,
    "epsilon_b": method == "radp_dpsgd",
    "kappa": method == "radp_dpsgd",
    "relevance_pool": method == "radp_dpsgd",
  }
  unread = [f"private.{name}" for name, is_used in used.items() if not is_used]
  return needs(False, f"a method that reads it, not {method!r}", *unread)


def _lrp(config: RelevanceConfig) -> Unused:
  """Read by every method: by its relevance, or by the heat maps of its result."""
  how = config.lrp
  return (
    needs(how.rule == "epsilon", "lrp.rule='epsilon'", "lrp.stabilizer")
    | needs(how.rule == "alpha_beta", "lrp.rule='alpha_beta'", "lrp.alpha")
    | needs(how.input_rule == "z_box", "lrp.input_rule='z_box'", "lrp.low", "lrp.high")
  )


def _audit(config: RelevanceConfig) -> Unused:
  audit = config.audit
  if not audit.enabled:
    others = (f.name for f in dataclasses.fields(audit) if f.name != "enabled")
    return needs(False, "audit.enabled", *(f"audit.{name}" for name in others))
  noised = config.method in ("radp", *_CLAIMED)
  return needs(noised, "a method that noises records", "audit.num_trials") | needs(
    audit.canary_runs, "audit.canary_runs", "audit.num_canaries"
  )
