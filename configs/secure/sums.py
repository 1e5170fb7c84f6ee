"""Sums of up to 100 clients' vectors of up to a million entries, by every protocol.

python -m launch.secure --config=configs/secure/sums.py --workdir=runs/sums

Hardware: 2 CPU cores, busy; a minute and a half. Seen: every integer sum exact, CKKS off by 5e-8.
100 clients x 10,000 entries: 4 MB in the clear, 6.3 MB and 4 s by SecAgg, 4.7 MB on a graph, 52
MB by BFV, 400 MB by shares among clients; 10 of 100 silent, and the threshold of 67 that goes with
them, cost SecAgg 32 s (the threshold is the reason: results/secure/sums.md), on a graph 1.4. At 10
clients x 1,000,000 masks cost nothing (40 MB), BFV 9 s and 359 MB. See results/secure/sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.kinds.secure.vector_sums import SumTask

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
  return SecureConfig(task=SumTask())


def get_configs(base: SecureConfig) -> Iterator[tuple[str, SecureConfig]]:
  """Each at 100 clients x 10,000 entries and 10 clients x 1,000,000; two with drop-outs."""
  sizes = {"100 x 1e4": (100, 10_000), "10 x 1e6": (10, 1_000_000)}
  for size, (clients, length) in sizes.items():
    task: dict[str, Any] = {"name": "sum", "num_clients": clients, "length": length}
    for name, protocol in _PROTOCOLS.items():
      its = {**task, "protocol": protocol}
      yield f"{name}, {size}", fields.replace(base, "task", its)
  task = {"name": "sum", "num_clients": 100, "length": 10_000, "silent": 10}
  secagg = {**task, "protocol": {"name": "secagg", "min_survivors": 67}}
  yield "SecAgg, 100 x 1e4, 10 silent", fields.replace(base, "task", secagg)
  graph = {**task, "protocol": "secagg_plus"}
  yield "SecAgg on a graph, 100 x 1e4, 10 silent", fields.replace(base, "task", graph)
