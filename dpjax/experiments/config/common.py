"""Annotations of fields that several kinds of run have: each range and help is written once.

A field whose words differ adds its own: `Annotated[ClipNorm, "bound on one client's message"]`.
"""

from __future__ import annotations

from typing import Annotated

from dpjax import accounting
from dpjax.experiments.config import rules

COUNT = rules.at_least(1)

Accountant = Annotated[str, rules.among(("", *accounting.ACCOUNTANTS))]
ClipNorm = Annotated[float, rules.POSITIVE, rules.IN_FLOAT32]
DataDir = Annotated[str | None, "where TFDS data lie; none: TFDS_DATA_DIR or its default"]
Delta = Annotated[float, rules.OPEN_UNIT]
Epsilon = Annotated[float | None, rules.POSITIVE]
EpsilonBudget = Annotated[
  float | None, rules.POSITIVE, "refuse to start a run that would spend more"
]
NoiseMultiplier = Annotated[float | None, rules.NON_NEGATIVE]
NumUpdates = Annotated[int, rules.between(1, rules.MOST_STEPS)]
Release = Annotated[bool, "keys from the operating system, noise on a grid, no diagnostics"]
Seed = Annotated[int, rules.at_least(0), "of every key that no release draws"]
Writer = Annotated[
  str | None,
  "gets every row of metrics, too: wandb | mlflow | package.module:name of a function of "
  "(step, row)",
]
