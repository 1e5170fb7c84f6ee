"""Loads data for all kinds of run whose config has a section about data, `config.data`."""

from __future__ import annotations

from typing import Any

from dpjax import data
from dpjax.experiments.kinds import bounds
from dpjax.experiments.kinds.central.config import DataConfig


def load(config: DataConfig, **more: Any) -> tuple[Any, Any]:
  """Loads (train, test); errors name fields of the section `data`.

  Args:
    config: section `data` of a config.
    more: other arguments of `dpjax.data.load`.
  """
  with bounds.within("data", of=config):
    return data.load(
      config.name,
      data_dir=config.data_dir,
      num_classes=config.num_classes,
      num_examples=config.num_examples,
      declaration=config.declaration,
      **more,
    )
