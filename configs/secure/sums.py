"""Sums of up to 100 clients' vectors of up to a million entries, by every protocol.

python -m launch.secure --config=configs/secure/sums.py --workdir=runs/sums
"""

from __future__ import annotations

from typing import Any

from dpjax.runs.secure.config import SecureConfig, SumTask

_PROTOCOLS: dict[str, Any] = {
  "plain": "plain",
  "additive shares": "additive_sharing",
  "additive shares, 2 servers": "additive_servers",
  "SecAgg": "secagg",
  "SecAgg on a graph": "secagg_plus",
  "BFV": "bfv",
  "CKKS": "ckks",
}


def get_config() -> SecureConfig:
  """Each at 100 clients x 10,000 entries and 10 clients x 1,000,000; two with drop-outs."""
  rows: dict[str, dict[str, Any]] = {}
  sizes = {"100 x 1e4": (100, 10_000), "10 x 1e6": (10, 1_000_000)}
  for size, (clients, length) in sizes.items():
    task = {"name": "sum", "num_clients": clients, "length": length}
    for name, protocol in _PROTOCOLS.items():
      rows[f"{name}, {size}"] = {"task": task, "protocol": protocol}
  task = {"name": "sum", "num_clients": 100, "length": 10_000, "silent": 10}
  rows["SecAgg, 100 x 1e4, 10 silent"] = {
    "task": task,
    "protocol": {"name": "secagg", "min_survivors": 67},
  }
  rows["SecAgg on a graph, 100 x 1e4, 10 silent"] = {
    "task": task,
    "protocol": "secagg_plus",
  }
  return SecureConfig(task=SumTask(), rows=rows, title="sums of 20-bit integers")
