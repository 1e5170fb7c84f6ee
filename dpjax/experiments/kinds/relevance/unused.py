"""Finds settings of a run of relevance that its method does not read.

A table maps a dotted field, or a whole section, to the condition under which it would be read. A
field at its default, or an optional field at None, counts as not set.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import DataConfig, ModelConfig
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.relevance.settings import Rigorous
from dpjax.validate import UserError
from dpjax.zoo.datasets.published import is_embedded
from dpjax.zoo.datasets.registry import takes_declaration
from dpjax.zoo.networks.registry import options

Unused = dict[str, str]  # dotted field, or group of fields -> what it would need


def needs(condition: bool, what: str, *fields: str) -> Unused:
  """Returns the table {field: what} if the condition is false, else {}.

  >>> needs(False, "text", "data.max_length")
  {'data.max_length': 'text'}
  """
  return {} if condition else dict.fromkeys(fields, what)


def reason(path: str, unused: Unused) -> str | None:
  """Returns the condition that a field needs; None if it is read.

  >>> reason("audit.kind", {"audit": "audit"}), reason("audits", {"audit": "audit"})
  ('audit', None)
  """
  names = path.split(".")
  prefixes = (".".join(names[:count]) for count in range(len(names), 0, -1))
  return next((unused[prefix] for prefix in prefixes if prefix in unused), None)


def refuse(config: Any, unused: Unused, name: str = "") -> None:
  """Raises UserError for the first field that is set and would be ignored.

  >>> import dataclasses
  >>> config = dataclasses.make_dataclass("Config", [("num_steps", int, 200)])(3)
  >>> refuse(config, {"num_steps": "more"})
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: num_steps=3: would be ignored, it needs more; leave it at 200
  """
  for path, (value, default) in fields.set_fields(config).items():
    what = reason(path, unused)
    if what is not None:
      raise UserError(
        f"would be ignored, it needs {what}",
        field=f"{name}{path}",
        value=value,
        hint=f"leave it at {default!r}",
      )


_SGD = ("dpsgd", "tempered", "radp_dpsgd")
_ADAPTIVE = ("dp_adam", "dpdligdo")
# Methods that perturb gradients, and so have a plan.
PLAN = (*_SGD, "dp_sgld", *_ADAPTIVE)
_CLAIMED = ("adlm", "ilm")


def of(config: RelevanceConfig) -> Unused:
  """Returns {field that one curve does not read: condition under which it would be read}.

  >>> from dpjax.experiments.kinds.relevance.config import RelevanceConfig
  >>> of(RelevanceConfig())["weight_decay"]
  "method='radp' with mode='rigorous'"
  """
  method = config.method
  radp = config.method == "radp"
  audit = config.audit
  paper = radp and config.mode == "paper"
  rigorous = radp and config.mode == "rigorous"
  proof = "method='radp' with mode='rigorous'"
  noised = radp or method in _CLAIMED
  public = rigorous and config.rigorous.model1 == "public"
  canaries = audit is not None and audit.canary_runs
  of_preset = "paper.beta_norm paper.times_batch_size paper.draw"
  of_paper = _table(
    (config.paper.preset == "custom", "paper.preset='custom'", of_preset),
    (config.paper.mechanism == "gaussian", "paper.mechanism='gaussian'", "paper.delta"),
  )
  # Every method reads `lrp`, for its relevance or for the heat maps of its result.
  lrp = _table(
    (config.lrp.rule == "epsilon", "lrp.rule='epsilon'", "lrp.stabilizer"),
    (config.lrp.rule == "alpha_beta", "lrp.rule='alpha_beta'", "lrp.alpha"),
    (config.lrp.input_rule == "z_box", "lrp.input_rule='z_box'", "lrp.low lrp.high"),
  )
  return (
    _data(config.data)
    | _nets(config, rigorous)
    | _private(config, rigorous)
    | _table(
      (radp, "method='radp'", "mode"),
      (noised or method == "no_dp", "a method that trains without a noisy gradient",
       "learning_rate"),
      (rigorous, proof, "weight_decay rigorous_model rigorous"),
      (paper, "method='radp' with mode='paper'", "paper"),
      (config.is_private, "a method with noise", "noise_seed"),
      (paper or method == "adlm", "a method with the paper's relevance",
       "relevance_records"),
      (method in _CLAIMED, "method='adlm' or 'ilm'", "adlm"),
      (public, "rigorous.model1='public' with mode='rigorous'", "public_data"),
      (noised, "a method that noises records", "audit.num_trials"),
      (canaries, "audit.canary_runs", "audit.num_canaries"),
      (noised or canaries, "audit.canary_runs, or a method that noises records", "audit"),
    )
    | (of_paper if paper else {})
    | (_rigorous(config.rigorous) if rigorous else {})
    | lrp
  )  # fmt: skip


def _table(*rows: tuple[bool, str, str]) -> Unused:
  """Returns {field: words} for all rows (condition, words, fields) whose condition is false.

  The words say what the condition is. Fields are separated by spaces.
  """
  return {name: what for holds, what, names in rows if not holds for name in names.split()}


def _data(data: DataConfig) -> Unused:
  path = pathlib.Path(os.path.expanduser(data.name))
  declared = takes_declaration(data.name)
  is_file = data.name.endswith(".npz") or declared
  embedded = is_embedded(data.name) or (is_file and path.is_absolute())
  return (
    needs(declared, "a table or a folder of images", "data.declaration")
    | needs(not embedded, "data that lie in a folder", "data.data_dir")
    | {
      "data.max_length": "text, and relevance is of images",
      "data.num_users": "users that the data name (launch.federate)",
    }
  )


def of_dataset(dataset: Any) -> Unused:
  """Returns {field: condition} for fields that these data leave unread, such as pools of pixels.

  Only the shape of an example is read.
  """
  shape = dataset.x.shape[1:]
  images = needs(len(shape) == 3, "images", "rigorous.pool", "private.relevance_pool")
  several = len(shape) == 3 and shape[2] > 1
  return images | needs(several, "images of several channels", "paper.shared_channels")


def _nets(config: RelevanceConfig, rigorous: bool) -> Unused:
  """Returns {unused field of the nets: condition}. Model 1 and 2 may be of different types."""
  method = config.method
  second = config.model
  reduced = rigorous and config.rigorous_model is not None
  if reduced and config.rigorous_model is not None:
    second = config.rigorous_model
  first_used = method in ("radp_dpsgd", "adlm") or (method == "radp" and not rigorous)
  first_used |= rigorous and config.rigorous.model1 != "none"
  activation_1 = first_used and _takes_activation(config.model)
  activation = method != "tempered" and _takes_activation(second)
  return _table(
    (activation_1, "a model 1 that takes its activation from here", "activation_1"),
    (activation, "a model 2 that takes its activation from here", "activation"),
    (first_used or not reduced, "a model 1 (rigorous.model1)", "model"),
  )


def _takes_activation(model: ModelConfig) -> bool:
  return "activation" in options(model.name) and "activation" not in model.options


def _rigorous(how: Rigorous) -> Unused:
  guided = how.model1 != "none"
  sgd = how.model1 == "dp_sgd"
  of_relevance = ("split", "epsilon_b", "rel_noise", "rel_norm", "beta_power", "floor")
  approximate = how.shuffle or how.features in ("laplace_pld", "gaussian")
  approximate |= guided and (how.rel_noise == "gaussian" or sgd)
  rows = (
    (guided, "a rigorous.model1 for the relevance", *of_relevance),
    (guided and how.split, "rigorous.split and a rigorous.model1", "split_share"),
    (sgd and not how.split, "rigorous.split=False and rigorous.model1='dp_sgd'",
     "budget_share_1"),
    (how.features in ("laplace_clipped", "gaussian"),
     "rigorous.features='laplace_clipped' or 'gaussian'", "clip"),
    (how.labels == "randomized_response", "rigorous.labels='randomized_response'",
     "label_share"),
    (how.draw == "record_fresh", "rigorous.draw='record_fresh'", "compose_fresh"),
    (approximate, "a mechanism that spends delta", "delta"),
  )  # fmt: skip
  return _table(*((is_so, what, " ".join(f"rigorous.{n}" for n in names))
                  for is_so, what, *names in rows))  # fmt: skip


def _private(config: RelevanceConfig, rigorous: bool) -> Unused:
  method = config.method
  legacy = config.method == "dpdligdo"
  model_1 = rigorous and config.rigorous.model1 == "dp_sgd"
  by_sgd = method in _SGD or model_1
  used = {
    "l2_clip_norm": method in PLAN or model_1,
    "delta": method in PLAN,
    "neighboring_relation": method in PLAN,
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


# Fields of an experiment that a curve does not have.
OF_EXPERIMENT = ("curves", "title")


def refuse_curves(config: RelevanceConfig) -> None:
  """Raises UserError for a setting of an experiment that no curve reads, or that a curve sets but
  does not read."""
  refuse(config, of_curves(config))


def of_curves(config: RelevanceConfig) -> Unused:
  """Returns the fields of an experiment that no curve reads.

  Raises:
    UserError: a curve sets a field that it does not read, or a field of the whole experiment.
  """
  paths = [leaf.path for leaf in fields.leaves(config)]
  reasons: dict[str, list[str | None]] = {path: [] for path in paths}
  for label, changes in (config.curves or {config.method: {}}).items():
    where = f"curves[{label!r}]."
    for path in OF_EXPERIMENT:
      if path in changes:
        raise UserError(
          "would be ignored, it is of the whole experiment", field=f"{where}{path}"
        )
    curve = fields.replace_all(config, changes, name=f"config.curves[{label!r}]")
    unread = of(curve)
    taken_there = dict.fromkeys(changes, "")
    set_here = (
      path for path in fields.set_fields(curve) if reason(path, taken_there) == ""
    )
    unread_here = {path: why for path in set_here if (why := reason(path, unread))}
    refuse(curve, unread_here, where)
    taken = unread | dict.fromkeys(changes, "a curve that does not set its own")
    for path, reasons_of_path in reasons.items():
      reasons_of_path.append(reason(path, taken))
  return {
    path: str(reasons_of_path[0])
    for path, reasons_of_path in reasons.items()
    if path not in OF_EXPERIMENT and all(reasons_of_path)
  }
