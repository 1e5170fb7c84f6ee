"""Membership inference by quantile regression, without shadow models (Bertran et al. 2023).

The attacker has records that were certainly not trained on. From them it learns how sure the model
is of non-members that look like a record x. If the model is surer of x than of nearly all such
non-members, the attacker calls x a member.
"""

from __future__ import annotations

import math

import numpy as np

from dpjax import optional, validate
from dpjax.attacks import signals
from dpjax.types import HostArray
from dpjax.validate import UserError


def quantile_regression(
  log_odds: HostArray,
  features: HostArray,
  *,
  known_log_odds: HostArray,
  known_features: HostArray,
  fpr: float = 0.01,
  seed: int = 0,
) -> np.ndarray:
  """Returns the log odds [n] minus the (1 - fpr) quantile of log odds of similar non-members.

  Gradient-boosted trees learn the quantile on half of the known records, by the pinball loss. The
  other half corrects it by a constant (split conformal prediction). So a non-member that is drawn
  like the known ones scores above 0 with probability at most `fpr`. This holds whatever the trees
  learned.

  Args:
    log_odds: [n], log odds of the target (`signals`).
    features: [n, d] numbers that the attacker knows of the records, such as pixels, a label, or the
      answers of another model.
    known_log_odds: [m], log odds of the target on records that are no members.
    known_features: [m, d], features of the same m records.
    fpr: false positive rate in (0, 1) at which members are to be found, at least
      1 / (ceil(m / 2) + 1).
    seed: seed of the halves and the trees.

  Raises UserError for shapes that do not match, NaN, infinite numbers, or too few known records
  for `fpr`.

  >>> known = np.linspace(0, 1, 400)
  >>> options = dict(known_log_odds=5 * known, known_features=known[:, None], fpr=0.05)
  >>> scores = quantile_regression([1.0, 4.9], [[0.9], [0.1]], **options)
  >>> (scores > 0).tolist()
  [False, True]
  """
  validate.open_unit(fpr=fpr)
  validate.integer_at_least(0, seed=seed)
  odds, seen = _checked("", log_odds, features)
  known, known_seen = _checked("known_", known_log_odds, known_features)
  if seen.shape[1] != known_seen.shape[1]:
    raise UserError(
      f"must have as many columns as known_features, which has {known_seen.shape[1]}",
      field="features.shape",
      value=seen.shape,
    )
  order = np.random.default_rng(seed).permutation(known.size)
  learned = order[: known.size // 2]
  held_back = order[known.size // 2 :]
  # Let n records be held back. If fpr * (n + 1) is a whole number, its float may be slightly
  # smaller. The factor 1 + 1e-12 undoes this.
  allowed = math.floor(fpr * (held_back.size + 1) * (1 + 1e-12))
  if allowed < 1 or not learned.size:
    raise UserError(
      f"must be at least {1 / (held_back.size + 1):.2g} with {known.size} known records",
      field="fpr",
      value=fpr,
    )
  # Imported here, since scikit-learn is slow to import.
  with optional.require_extra():
    from sklearn.ensemble import GradientBoostingRegressor

  leaf = min(40, max(1, learned.size // 10))
  trees = GradientBoostingRegressor(
    loss="quantile", alpha=1 - fpr, max_depth=2, min_samples_leaf=leaf, random_state=seed
  ).fit(known_seen[learned], known[learned])
  over = np.sort(known[held_back] - trees.predict(known_seen[held_back]))
  # An excess is log odds minus the trees' quantile. The excess of a new non-member is above the
  # `allowed`-th largest of the n held-back ones with probability at most allowed / (n + 1).
  return odds - trees.predict(seen) - over[-allowed]


def _checked(
  prefix: str, log_odds: HostArray, features: HostArray
) -> tuple[np.ndarray, np.ndarray]:
  odds = signals.numbers(f"{prefix}log_odds", log_odds)
  seen = signals.numbers(f"{prefix}features", features)
  if odds.ndim != 1 or not odds.size or seen.ndim != 2 or len(seen) != odds.size:
    raise UserError(
      f"must be [n, d] beside {prefix}log_odds [n], got {odds.shape}",
      field=f"{prefix}features.shape",
      value=seen.shape,
    )
  for name, values in (("log_odds", odds), ("features", seen)):
    if not np.isfinite(values).all():
      raise UserError("must be finite", field=f"{prefix}{name}")
  return odds, seen
