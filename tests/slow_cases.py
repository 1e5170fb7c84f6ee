"""Which cases are slow: measured, not guessed. The list is `slow_cases.txt` beside this file.

A case is slow where it takes more than half a second of processor time, unless it is the
quickest of its test and takes less than three: so every test but the longest keeps a case that
`pytest` runs, and `.ci/run` runs all of them. Measure and write the list again:

    python -m pytest -q -n 2 -m 'not long' -p tests.slow_cases --times=DIR
    python -m tests.slow_cases DIR

with an empty compilation cache (`DPJAX_TEST_CACHE`), as on a fresh machine. A test that is
added later is quick until the list is written again, or carries `pytest.mark.slow` itself.
"""

import collections
import os
import pathlib
import resource
import sys

import pytest

LIST = pathlib.Path(__file__).with_suffix(".txt")
_QUICK, _SLOW = 0.5, 3.0  # seconds of processor time


def names() -> frozenset[str]:
  """The node ids of the list."""
  return frozenset(LIST.read_text().splitlines())


def pytest_addoption(parser):
  parser.addoption("--times", help="folder for the seconds of each test")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
  before = _seconds()
  yield
  worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
  folder = pathlib.Path(item.config.getoption("--times"))
  folder.mkdir(parents=True, exist_ok=True)
  with open(folder / f"{worker}.tsv", "a") as file:
    file.write(f"{_seconds() - before:.3f}\t{item.nodeid}\n")


def _seconds() -> float:
  """Of this process and of the commands that it has waited for."""
  whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
  used = [resource.getrusage(who) for who in whose]
  return sum(one.ru_utime + one.ru_stime for one in used)


def slow(times: dict[str, float]) -> list[str]:
  """Of node ids and their seconds those that are slow, sorted.

  >>> slow({"a::t[1]": 0.1, "a::t[2]": 2.0, "a::u[1]": 2.0, "a::u[2]": 2.5, "a::v": 4.0})
  ['a::t[2]', 'a::u[2]', 'a::v']
  """
  by_test = collections.defaultdict(dict)
  for name, seconds in times.items():
    by_test[name.partition("[")[0]][name] = seconds
  found = []
  for cases in by_test.values():
    quickest = min(cases, key=cases.__getitem__)
    spared = quickest if cases[quickest] < _SLOW else None
    found += [name for name, s in cases.items() if s > _QUICK and name != spared]
  return sorted(found)


def _times(folder: pathlib.Path) -> dict[str, float]:
  lines = [line for path in folder.glob("*.tsv") for line in path.read_text().splitlines()]
  pairs = (line.split("\t", maxsplit=1) for line in lines)
  return {name: float(seconds) for seconds, name in pairs}


if __name__ == "__main__":
  LIST.write_text("\n".join(slow(_times(pathlib.Path(sys.argv[1])))) + "\n")
