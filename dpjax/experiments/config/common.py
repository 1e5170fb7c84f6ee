"""What configs of all kinds share: annotations, so that each range stands once, their check, checks
of one field beside others, and the section `privacy.attacker`.

Where an annotation has no help text, a field adds its own: `Annotated[ClipNorm, "of a message"]`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Annotated, Any

from dpjax.accounting import proved
from dpjax.accounting.attack_bounds import AttackBound, attack_bound
from dpjax.experiments.config import choices, fields, rules
from dpjax.experiments.config.naming import within
from dpjax.gradients import clip
from dpjax.validate import UserError

COUNT = rules.at_least(1)

Accountant = Annotated[str, rules.among(("", *proved.ACCOUNTANTS))]
ClipNorm = Annotated[
  float,
  rules.POSITIVE,
  rules.FieldRule(clip.check_norm, f"in [{clip.MIN_NORM:g}, {clip.MAX_NORM:g}]"),
]
Delta = Annotated[float, rules.OPEN_UNIT]
Epsilon = Annotated[float | None, rules.POSITIVE]
EpsilonBudget = Annotated[
  float | None, rules.POSITIVE, "refuse to start a run that would spend more"
]
# A learning rate above 1e6 soon makes a network's float32 outputs infinite.
LearningRate = rules.within_range(1e-12, 1e6)
NoiseMultiplier = Annotated[float | None, rules.NON_NEGATIVE]
NumUpdates = Annotated[int, rules.between(1, rules.MOST_STEPS)]
PoolIsPublic = Annotated[
  bool,
  "your word that no private record is in the pool, or decides what is in it; needed where the "
  "pool is not of a published data set, and epsilon is a claim then",
]
# Kinds of run with this field offer two relations. The third, "replace_special", is left out.
RecordRelation = Annotated[str, rules.among((proved.RELATIONS[0], proved.RELATIONS[1]))]
NoiseSeed = Annotated[
  int | None,
  rules.at_least(0),
  "repeat noise and sampling, for tests and lessons: epsilon is a claim; none: secret keys",
]
Release = Annotated[
  bool, "keys of 256 bits, noise on a grid, no diagnostics; see docs/release.md"
]
Seed = Annotated[
  int, rules.at_least(0), "of first parameters and public orders; without privacy, of all"
]
Writer = Annotated[
  str | None,
  "gets every row of metrics, too: wandb | mlflow | package.module:name of a function of "
  "(step, row)",
]


class Section:
  """Base of a section of a config that checks itself. `check_types` of the config calls `check`."""

  def check(self, section: str) -> None:
    """Raises UserError, about fields of `section`, if they do not fit each other; loads no data."""
    raise NotImplementedError


def check_types(config: Any) -> None:
  """Raises UserError unless every field has its annotated type, follows its rules, and is read by
  what is chosen beside it; also for a wrong `Section`, and a release with a `noise_seed`.

  NaN is refused as a number. All types are checked before the first range.

  >>> from dpjax.experiments.kinds.central.config import OptimizerConfig
  >>> check_types(OptimizerConfig(learning_rate="a lot"))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: config.learning_rate='a lot': must be a number
  """
  fields.check(config, type(config), "config")
  rules.check(config)
  for field in dataclasses.fields(config):
    unread = fields.leaves_out(getattr(config, field.name))
    read_if(config, not unread, f"another {field.name}", *unread)
  for field in dataclasses.fields(config):
    section = getattr(config, field.name)
    if isinstance(section, Section):
      section.check(field.name)
  noise_seed = getattr(config, "noise_seed", None)
  if noise_seed is not None and getattr(config, "release", False):
    raise UserError(
      "must be none with release=True, whose noise must be secret",
      field="noise_seed",
      value=noise_seed,
    )


def read_if(config: Any, is_read: bool, needed: str, *paths: str) -> None:
  """Raises UserError for the first of these fields that is set, unless `is_read`.

  It is for fields whose reader is no value of a choice, such as the length of texts. What a value
  of a choice leaves unread beside it, its class says in `leaves_out`.

  >>> from dpjax.experiments.config.sections import DataConfig
  >>> read_if(DataConfig(limit=3), False, "a table", "limit")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: limit=3: would be ignored, it needs a table; leave it at None
  """
  if is_read:
    return
  set_here = choices.set_fields(config)
  for path in paths:
    section, _, option = path.rpartition(".options.")
    if section and option in fields.get(config, f"{section}.options"):
      value = fields.get(config, f"{section}.options")[option]
      raise UserError(
        f"would be ignored, it needs {needed}; leave it out", field=path, value=value
      )
    for there, (value, default) in set_here.items():
      if there == path or there.startswith(f"{path}."):
        raise UserError(
          f"would be ignored, it needs {needed}",
          field=there,
          value=value,
          hint=f"leave it at {default!r}",
        )


def only(config: Any, path: str, allowed: Iterable[Any], why: str) -> None:
  """Raises UserError unless a field has one of these values, all that other fields leave to it.

  Args:
    path: dotted name of the field; the values of a choice are given by their names.
    why: end of the message.

  >>> from dpjax.experiments.config.sections import DataConfig
  >>> only(DataConfig(center=True), "center", [False], " for tokens")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: center=True: must be false for tokens
  """
  *sections, name = path.split(".")
  value = choices.name_of(functools.reduce(getattr, sections, config), name)
  values = list(allowed)
  if value not in values:
    words = (repr(each) if isinstance(each, str) else str(each).lower() for each in values)
    raise UserError(f"must be {' or '.join(words)}{why}", field=path, value=value)


def at_most(config: Any, path: str, most: float, why: str = "") -> None:
  """Raises UserError for a field above the most that other fields or the data allow.

  >>> from dpjax.experiments.config.sections import DataConfig
  >>> at_most(DataConfig(limit=3), "limit", 2, ", the examples")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: limit=3: must be at most 2, the examples
  """
  value = fields.get(config, path)
  if value is not None and value > most:
    raise UserError(f"must be at most {most}{why}", field=path, value=value)


@dataclasses.dataclass
class AttackerConfig:
  """Bound on the success of any membership attack, to use instead of an epsilon.

  Set the numbers of one bound, or none at all; see `dpjax.accounting.attack_bound`.
  """

  tpr: Annotated[
    float | None, rules.OPEN_UNIT, "largest true positive rate of any attack, at fpr"
  ] = None
  fpr: Annotated[float | None, rules.OPEN_UNIT, "false positive rate of tpr"] = None
  advantage: Annotated[
    float | None, rules.OPEN_UNIT, "or the largest TPR - FPR of any attack"
  ] = None
  mu: Annotated[
    float | None, rules.POSITIVE, "or mu of Gaussian DP, up to privacy.delta"
  ] = None
  bayes_risk: Annotated[
    float | None, rules.OPEN_UNIT, "or the least chance of error of an attacker, at prior"
  ] = None
  prior: Annotated[
    float | None, rules.OPEN_UNIT, "chance of membership that such an attacker knows"
  ] = None


def attack_of(privacy: Any) -> AttackBound | None:
  """Returns the bound that a config's noise is calibrated to; None for other calibrations, and for
  methods that promise nothing.

  Raises:
    UserError: numbers of two bounds, a missing number of one bound, or an epsilon or a noise
      multiplier beside a bound.

  >>> from dpjax.experiments.kinds.central.config import DpSgd
  >>> attack_of(DpSgd(epsilon=None, attacker=AttackerConfig(mu=0.5)))
  GaussianDp(mu=0.5)
  """
  if getattr(privacy, "attacker", AttackerConfig()) == AttackerConfig():
    return None
  with within("privacy.attacker"):
    attack = attack_bound(**dataclasses.asdict(privacy.attacker))
  for name in ("epsilon", "noise_multiplier"):
    value = getattr(privacy, name)
    if attack is not None and value is not None:
      raise UserError(
        f"give it or privacy.attacker, not both (--config.privacy.{name}=none)",
        field=f"privacy.{name}",
        value=value,
      )
  return attack
