"""What a federation of 1e5 clients and 1e6 records costs, in seconds and MB; by hand:

python -m tests.zoo.large_federation > results/natural_federations/large.json
"""

import json
import pathlib
import resource
import tempfile
import time

import numpy as np

from dpjax import data
from dpjax.zoo import datasets
from tests.zoo import client_files

CLIENTS, RECORDS = 100_000, 1_000_000


def main() -> None:
  rng = np.random.default_rng(0)
  owners = rng.permutation(RECORDS) % CLIENTS
  ids = [f"user{owner:06}" for owner in owners]
  dataset = data.from_arrays(
    rng.random((RECORDS, 16), np.float32), owners % 10, num_classes=10
  )
  found = {"clients": CLIENTS, "records": RECORDS}
  clock = _Clock(found)
  federation = data.by_client(dataset, ids)
  clock.lap("by_client")
  assert federation.num_clients == CLIENTS and len(federation) == RECORDS
  data.by_client(dataset, ids, max_examples=5)
  clock.lap("by_client, max_examples=5")
  data.digest(federation)
  clock.lap("digest")
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "stackoverflow.sqlite"
    say = client_files.example(tokens=b"how do i sort a list in place without a copy")
    rows = [(client, say) for client in ids]
    client_files.sqlite(path, {"train": rows, "test": rows[:9]})
    clock.start()
    train, _ = datasets.tff_federation(path, max_length=32)
    clock.lap("tff_federation, sentences of 32 bytes")
    assert train.client_ids == federation.client_ids
  found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
  print(json.dumps(found, indent=2))


class _Clock:
  """Seconds since the last lap."""

  def __init__(self, found: dict):
    self._found = found
    self.start()

  def start(self) -> None:
    self._since = time.perf_counter()

  def lap(self, name: str) -> None:
    self._found[f"seconds {name}"] = round(time.perf_counter() - self._since, 2)
    self.start()


if __name__ == "__main__":
  main()
