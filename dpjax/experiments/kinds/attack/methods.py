"""The methods of membership inference that a config may name, each a function of `Asked`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from dpjax import attacks, data
from dpjax.attacks.attack_network import attack_network
from dpjax.attacks.difficulty import quantile_regression
from dpjax.attacks.membership import confidence_rule, loss_rule
from dpjax.attacks.queries import mean_score

_QUANTILE_FPR = 0.01


class Asked(NamedTuple):
  """What one target and its shadows answered about n records, and the target's members.

  Fields that no method of the config reads are None.
  """

  # Log odds of each query; the first is of the records as they are.
  queries: list[attacks.Evidence]
  members: np.ndarray  # [n] bool
  top: np.ndarray  # [n] the target's largest probability of any label
  answers: Any  # [n, K] the target's probabilities
  shadow_answers: Any  # [S, n, K] those of its shadows
  public_log_odds: Any  # [m] those of the target, of public records that no model has seen
  records: data.Dataset
  public: data.Dataset


class Method(NamedTuple):
  """A method, and the answers that it needs beside log odds and largest probabilities."""

  scores: Callable[[Asked], np.ndarray]  # [n], larger for a more likely member
  reads: str = ""  # "members" (whose mean loss it knows), "public_log_odds" or "answers"


def _by_mean_loss(asked: Asked) -> np.ndarray:
  losses = -special.log_expit(asked.queries[0].target)
  mean = float(losses[asked.members].mean())
  return loss_rule(losses, mean_training_loss=mean)


def _features(records: data.Dataset) -> np.ndarray:
  """Returns what an attacker knows of each record, [n, numbers + classes]: the record's numbers,
  and its label as one-hot vector."""
  x = np.asarray(records.x, np.float64).reshape(len(records), -1)
  return np.column_stack([x, np.eye(records.num_classes)[np.asarray(records.y)]])


def _by_quantiles(asked: Asked) -> np.ndarray:
  return quantile_regression(
    asked.queries[0].target,
    _features(asked.records),
    known_log_odds=asked.public_log_odds,
    known_features=_features(asked.public),
    fpr=_QUANTILE_FPR,
  )


def _by_network(asked: Asked) -> np.ndarray:
  return attack_network(
    asked.answers,
    np.asarray(asked.records.y),
    shadow_answers=asked.shadow_answers,
    included=asked.queries[0].included,
  )


def _of_evidence(attack: Callable[[attacks.Evidence], np.ndarray]) -> Method:
  return Method(lambda asked: mean_score(attack, asked.queries))


METHODS: dict[str, Method] = {
  "confidence": Method(lambda asked: confidence_rule(asked.top)),
  "loss_rule": Method(_by_mean_loss, "members"),
  "quantile_regression": Method(_by_quantiles, "public_log_odds"),
  "attack_network": Method(_by_network, "answers"),
  **{name: _of_evidence(attack) for name, attack in attacks.MEMBERSHIP_ATTACKS.items()},
}


def reads(methods: tuple[str, ...]) -> set[str]:
  """Returns what these methods read beside log odds and largest probabilities.

  >>> reads(("loss", "attack_network"))
  {'answers'}
  """
  return {METHODS[name].reads for name in methods} - {""}
