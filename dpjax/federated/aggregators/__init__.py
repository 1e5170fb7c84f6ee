# ruff: noqa: I001 (tables and messages show them in this order, the simplest first)
"""Aggregators that a config names, one file each. A line below adds one."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.federated.aggregation import weighted_mean as weighted_mean
  from dpjax.federated.aggregators.median import median as median
  from dpjax.federated.aggregators.trimmed_mean import trimmed_mean as trimmed_mean
  from dpjax.federated.aggregators.krum import krum as krum
  from dpjax.federated.aggregators.geometric_median import (
    geometric_median as geometric_median,
  )
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
