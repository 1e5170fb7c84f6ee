"""The guarantee of a run in an attacker's terms, as a section of a config."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from dpjax.accounting.attack_bounds import AttackBound, attack_bound
from dpjax.experiments.config import rules
from dpjax.experiments.config.naming import within
from dpjax.validate import UserError


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
