"""Which cases are slow: measured, not guessed. The list is `slow_cases.txt` beside this file.

The quickest case of each test is what `pytest` runs, where it takes less than 1.5 seconds of
processor time, and every other that takes less than .3. The rest is `slow`, which
`.ci/run` runs as well, but for other cases of more than .3 seconds: they are `long`, by hand.
Measure, with an empty compilation cache (`DPJAX_TEST_CACHE`), and write the list again:

    python -m pytest -q -n 2 -m 'not long' -p tests.slow_cases --times=DIR
    python -m tests.slow_cases DIR

    python -m pytest -q -n 2 -p tests.slow_cases --times=QUICK
    python -m tests.slow_cases QUICK quick

The second pair is of README's own command, in which a quick case may pay for what a slow one
had compiled or prepared for it: what takes more than .8 seconds there is slow. A test that is
added later is quick until then, or carries `pytest.mark.slow` itself. Cases that were not
measured keep their mark.
"""

import collections
import os
import pathlib
import resource
import sys

import pytest

LIST = pathlib.Path(__file__).with_suffix(".txt")
_QUICK, _SLOW, _LONG = 0.3, 1.5, 0.3  # seconds of processor time
_ALONE = 0.8  # where no slow case runs beside it
# Fixtures that start programs of eight devices or of several processes, for a whole file: the
# first test that is left would pay for all.
PROGRAMS = frozenset({"on_devices", "outcomes", "whole_runs", "counted_bytes"})


def marks() -> dict[str, str]:
  """Node id -> slow or long."""
  pairs = (line.split(" ", maxsplit=1) for line in LIST.read_text().splitlines())
  return {name: mark for mark, name in pairs}


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


def marked(times: dict[str, float]) -> dict[str, str]:
  """Of node ids and their seconds those that are not quick.

  >>> marked({"a::t[1]": 0.1, "a::t[2]": 0.2, "a::u[1]": 1.6, "a::u[2]": 9.0, "a::v": 9.0})
  {'a::u[1]': 'slow', 'a::u[2]': 'long', 'a::v': 'slow'}
  """
  by_test = collections.defaultdict(dict)
  for name, seconds in times.items():
    by_test[name.partition("[")[0]][name] = seconds
  found = {}
  for cases in by_test.values():
    quickest = min(cases, key=cases.__getitem__)
    for name, seconds in cases.items():
      if seconds > (_SLOW if name == quickest else _QUICK):
        found[name] = "long" if seconds > _LONG and name != quickest else "slow"
  return found


def _times(folder: pathlib.Path) -> dict[str, float]:
  lines = [line for path in folder.glob("*.tsv") for line in path.read_text().splitlines()]
  pairs = (line.split("\t", maxsplit=1) for line in lines)
  return {name: float(seconds) for seconds, name in pairs}


if __name__ == "__main__":
  times = _times(pathlib.Path(sys.argv[1]))
  kept = {name: mark for name, mark in marks().items() if name not in times}
  alone = {name: "slow" for name, seconds in times.items() if seconds > _ALONE}
  new = alone if sys.argv[2:] == ["quick"] else marked(times)
  found = sorted((name, mark) for name, mark in (kept | new).items())
  LIST.write_text("".join(f"{mark} {name}\n" for name, mark in found))
