"""All membership attacks that need only a target's `Evidence`, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from dpjax.attacks.information import informia
from dpjax.attacks.membership import Evidence, lira, loss_threshold, rmia
from dpjax.attacks.rmia_tuning import rmia_tuned
from dpjax.attacks.student_t import bavaria

MEMBERSHIP_ATTACKS: dict[str, Callable[[Evidence], np.ndarray]] = {
  "loss": loss_threshold,
  "lira": lira,
  "lira_fixed": functools.partial(lira, fixed_variance=True),
  "lira_offline": functools.partial(lira, offline=True),
  "lira_offline_fixed": functools.partial(lira, offline=True, fixed_variance=True),
  "rmia": rmia,
  "rmia_offline": functools.partial(rmia, offline=True),
  "rmia_tuned": rmia_tuned,
  "rmia_tuned_offline": functools.partial(rmia_tuned, offline=True),
  "informia": informia,
  "informia_offline": functools.partial(informia, offline=True),
  "bavaria": bavaria,
  "bavaria_offline": functools.partial(bavaria, offline=True),
}
