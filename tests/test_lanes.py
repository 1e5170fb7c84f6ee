"""A walk over slow and long cases loses nothing: not by a crash, a kill or a change."""

import collections
import fcntl
import json
import pathlib
import signal
import subprocess
import sys
import types

import pytest

from tests import lanes

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
_INI = "[pytest]\nmarkers =\n  slow: s\n  long: l\naddopts = -m 'not slow and not long'\n"
# Each case writes its name, so that the test knows how often it ran.
_HEAD = """
import os, pathlib, signal, time
import pytest

@pytest.fixture(autouse=True)
def _counted(request):
  with open(pathlib.Path(__file__).parents[1] / "ran.txt", "a") as file:
    file.write(request.node.name + "\\n")
"""
_OUTCOMES = """
pytestmark = pytest.mark.long

@pytest.mark.parametrize("x", ["a::b", "c d"])
def test_bad(x):
  assert x == "c d"

def test_dies():
  os.abort()

def test_hangs():
  time.sleep(100)

def test_skipped():
  pytest.skip("no")

def test_after():
  pass
"""
_QUICK_AND_SLOW = """
@pytest.mark.slow
def test_slow():
  pass

def test_quick():
  assert False
"""
_KILLER = """
pytestmark = pytest.mark.long

def test_first():
  pass

def test_kills_the_walk():
  os.kill(os.getppid(), signal.SIGKILL)
  while os.getppid() == int(os.environ["WALK"]):
    time.sleep(.01)

def test_third():
  pass
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
  """A tree of tests; pytest of it starts quickly, without plugins."""
  monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
  (tmp_path / "pytest.ini").write_text(_INI)
  (tmp_path / "tests").mkdir()
  before = signal.getsignal(signal.SIGTERM)
  yield tmp_path
  signal.signal(signal.SIGTERM, before)


def _ran(suite):
  return collections.Counter((suite / "ran.txt").read_text().splitlines())


def _known(suite):
  folder = suite / "runs" / "lanes"
  cases = lanes.collected(suite, folder)
  return lanes.states(cases, lanes.journal(folder), suite)


def test_every_outcome_is_journaled_and_walked_once(suite, capsys):
  first = suite / "tests" / "test_a.py"
  first.write_text(_HEAD + _OUTCOMES)
  (suite / "tests" / "test_b.py").write_text(_HEAD + _QUICK_AND_SLOW)
  walk = [f"--root={suite}", "--case_minutes=0.05"]
  table = suite / "walked.csv"
  assert lanes.main([*walk, f"--table={table}"]) == 1
  expected = {
    "tests/test_a.py::test_bad[a::b]": "failed",
    "tests/test_a.py::test_bad[c d]": "passed",
    "tests/test_a.py::test_dies": "failed",
    "tests/test_a.py::test_hangs": "failed",
    "tests/test_a.py::test_skipped": "skipped",
    "tests/test_a.py::test_after": "passed",
    "tests/test_b.py::test_slow": "passed",
  }
  assert _known(suite) == expected
  printed = capsys.readouterr().out
  assert "test_bad[a::b]: AssertionError: assert 'a::b' == 'c d'" in printed
  assert "test_dies: died of signal 6" in printed
  assert "test_hangs: killed after 0.05 minutes" in printed
  assert table.read_text().splitlines()[1].startswith("tests/test_a.py,long,2,3,1,0,0,")
  # Both files share processes, whose output is kept, since a case failed.
  logs = [path.name for path in (suite / "runs" / "lanes").glob("*.log")]
  assert logs == ["tests+test_b.py.log"]
  ran = _ran(suite)
  assert set(ran.values()) == {1} and len(ran) == len(expected)
  # The same command has nothing left to do.
  assert lanes.main(walk) == 1 and _ran(suite) == ran

  first.write_text(_HEAD + "\n@pytest.mark.long\ndef test_after():\n  pass\n")
  assert _known(suite)["tests/test_a.py::test_after"] == "older"
  assert lanes.main(walk) == 0
  assert _known(suite) == {
    "tests/test_a.py::test_after": "passed",
    "tests/test_b.py::test_slow": "passed",
  }
  assert _ran(suite) == ran + collections.Counter(["test_after"])
  with pytest.raises(SystemExit, match="no slow or long case"):
    lanes.main([*walk, "tests/test"])


def test_a_file_that_cannot_be_imported_takes_no_other_with_it(suite):
  sound, broken = (suite / "tests" / name for name in ("test_a.py", "test_b.py"))
  sound.write_text(_HEAD + _QUICK_AND_SLOW)
  broken.write_text(_HEAD + _QUICK_AND_SLOW)
  walk = [f"--root={suite}"]
  assert lanes.main([*walk, "--minutes=1e-9"]) == 0
  # The cases are known, and then the file breaks, as an import of another module may.
  broken.write_text("import no_such_module\n")
  cases = suite / "runs" / "lanes" / "cases.json"
  held = json.loads(cases.read_text())
  chosen = {
    f"tests/{file.name}": [f"tests/{file.name}::test_slow"] for file in (sound, broken)
  }
  walker = lanes.Walk(
    suite,
    suite / "runs" / "lanes",
    until=1e12,
    case_minutes=1,
    lock=1,
    now="now",
  )
  assert set(held["cases"]) == {case for cases in chosen.values() for case in cases}
  walker.run(chosen, {}, types.SimpleNamespace(update=lambda *_, **__: None))
  outcomes = {case: row["outcome"] for case, row in lanes.journal(cases.parent).items()}
  assert outcomes == {
    "tests/test_a.py::test_slow": "passed",
    "tests/test_b.py::test_slow": "failed",
  }


def test_a_walk_that_is_killed_goes_on_behind_its_last_line(suite):
  (suite / "tests" / "test_a.py").write_text(_HEAD + _KILLER)
  program = (
    "import os, sys; from tests import lanes; os.environ['WALK'] = str(os.getpid());"
    f"sys.exit(lanes.main(['--root={suite}']))"
  )
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=_REPOSITORY, capture_output=True, check=False
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  # Its pytest process ends after the case, and lets go of the lock then.
  with open(suite / "runs" / "lanes" / "lock") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
  states = dict(zip(("first", "kills_the_walk", "third"), _known(suite).values()))
  assert states == {"first": "passed", "kills_the_walk": "passed", "third": "never"}
  assert lanes.main([f"--root={suite}"]) == 0
  assert set(_known(suite).values()) == {"passed"}
  assert _ran(suite) == {"test_first": 1, "test_kills_the_walk": 1, "test_third": 1}


def test_two_walks_do_not_share_a_folder(tmp_path):
  with open(tmp_path / "lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(SystemExit, match="another walk is at work"):
      lanes.main([f"--out={tmp_path}"])


def test_half_a_line_is_passed_over_and_swallows_no_other(tmp_path):
  row = {"case": "a.py::test", "outcome": "passed", "digest": "d"}
  (tmp_path / "journal.jsonl").write_text(
    '{"case": "b.py::test", "outcome": "passed", "digest": "d"}\n[]\n{"case": "c.py::t'
  )
  lanes.append(tmp_path, [row])
  assert set(lanes.journal(tmp_path)) == {"a.py::test", "b.py::test"}


def test_a_walk_stops_between_cases_when_its_time_is_up(tmp_path):
  for until, stops in ((0, True), (1e12, False)):
    recorder = lanes._Recorder(
      tmp_path,
      until=until,
      parent=lanes.os.getppid(),
      commit="now",
      digests={"a.py": "d"},
    )
    session = types.SimpleNamespace(shouldstop="")
    recorder.pytest_sessionstart(session)
    recorder.pytest_runtest_logstart("a.py::test")
    recorder.pytest_runtest_logfinish("a.py::test")
    assert bool(session.shouldstop) == stops
  # A case without a report did not pass.
  assert lanes.journal(tmp_path)["a.py::test"]["outcome"] == "failed"
  assert json.loads((tmp_path / "running.json").read_text())["case"] == "a.py::test"


def test_cheap_files_come_first_and_failures_of_another_commit_again():
  cases = dict.fromkeys(("a::1", "a::2", "b::1", "c::1", "d::1", "e::1"), "long")
  rows = {
    "a::2": {"seconds": 1.0, "commit": "now"},
    "b::1": {"seconds": 90.0, "commit": "now"},
    "d::1": {"seconds": 0.1, "commit": "now"},
    "e::1": {"seconds": 0.2, "commit": "before"},
  }
  known = {
    "a::1": "never",
    "a::2": "passed",
    "b::1": "older",
    "c::1": "never",
    "d::1": "failed",
    "e::1": "failed",
  }
  chosen = lanes.todo(cases, rows, known, now="now")
  assert list(chosen.items()) == [
    ("e", ["e::1"]),
    ("a", ["a::1"]),
    ("c", ["c::1"]),
    ("b", ["b::1"]),
  ]
  assert list(lanes.todo(cases, rows, known, now="now", failed=True)) == ["d", "e"]


def test_parts_are_every_file_once():
  files = [f"tests/{letter}.py" for letter in "gfedcba"]
  parts = [lanes.part_of(files, f"{number}/3") for number in (1, 2, 3)]
  assert sorted(file for part in parts for file in part) == sorted(files)
  for wrong in ("0/3", "4/3", "3", "a/b", "-1/3"):
    with pytest.raises(SystemExit, match="must be NUMBER/COUNT"):
      lanes.part_of(files, wrong)
