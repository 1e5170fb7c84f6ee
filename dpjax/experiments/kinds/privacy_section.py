"""What a section `privacy` asks for, of every kind of run that has one: checks, noise and plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpjax import accounting, gradients, validate
from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.experiments.config import rules
from dpjax.experiments.config.common import attack_of
from dpjax.experiments.run import sizes
from dpjax.plan import Plan
from dpjax.validate import UserError


def relation(privacy: Any) -> str:
  """Returns the neighboring relation of a section, or the usual one of its sampler."""
  asked = getattr(privacy, "neighboring_relation", "")
  # A release without steps has no sampler.
  sampler = getattr(privacy, "sampler", None)
  return asked or sizes.usual_relation(sampler and sampler.scheme)


def check(privacy: Any, *, release: bool, **num_steps: int) -> None:
  """Raises UserError unless the noise follows from one number, and for a release without noise, a
  clip norm that the clipping rule does not support, or too many steps for noise that differs or is
  correlated over them.

  Args:
    num_steps: number of steps or rounds, by the name of its field.
  """
  if hasattr(privacy, "strategy") or getattr(privacy, "noise_levels", ()):
    validate.integer_in(1, rules.MOST_SHAPED, **num_steps)
  if release and privacy.noise_multiplier == 0:
    raise UserError(
      "without noise nothing may be released", field="privacy.noise_multiplier", value=0
    )
  rule = getattr(privacy, "clipping", None)
  if isinstance(rule, gradients.ClipRule):
    rule.check(privacy.l2_clip_norm)
  if attack_of(privacy) is not None:
    return
  if privacy.epsilon is None and privacy.noise_multiplier is None:
    raise UserError(
      "give privacy.epsilon or privacy.noise_multiplier, or numbers of privacy.attacker",
      field="privacy.epsilon",
      value=None,
    )
  if privacy.epsilon is not None and privacy.noise_multiplier is not None:
    raise UserError(
      f"give it or privacy.epsilon={privacy.epsilon!r}, not both "
      "(--config.privacy.epsilon=none)",
      field="privacy.noise_multiplier",
      value=privacy.noise_multiplier,
    )


def plan(privacy: Any, *, noise_multiplier: float | None = None, **settings: Any) -> Plan:
  """Returns the plan of a section: with its noise, or with the noise for its attacker or epsilon.

  Args:
    noise_multiplier: in place of all of these.
    settings: other arguments of `Plan`; delta, relation and accountant are those of the section.
  """
  for name, usual in (("delta", None), ("neighboring_relation", ""), ("accountant", "")):
    settings.setdefault(name, getattr(privacy, name, usual))
  attack = attack_of(privacy)
  if noise_multiplier is None:
    noise_multiplier = privacy.noise_multiplier
  if noise_multiplier is not None:
    return Plan(noise_multiplier=noise_multiplier, **settings)
  if attack is not None:
    return Plan.calibrated(attack=attack, **settings)
  return Plan.calibrated(epsilon=privacy.epsilon or 0.0, **settings)


def noise_multiplier(
  privacy: Any, run_event: Callable[[float], DpEvent], **asked: Any
) -> float:
  """Returns the noise multiplier of a mechanism without a plan: that of the section, or the one for
  its attacker or epsilon.

  Args:
    run_event: function from a noise multiplier to the event of the whole run.
    asked: neighboring_relation and accountant of the guarantee.
  """
  if privacy.noise_multiplier is not None:
    return privacy.noise_multiplier
  attack = attack_of(privacy)
  asked["delta"] = privacy.delta
  if attack is not None:
    return accounting.calibrate_noise_to_attack(run_event, attack, **asked)
  epsilon = privacy.epsilon or 0.0
  return accounting.calibrate_noise_multiplier(run_event, epsilon=epsilon, **asked)
