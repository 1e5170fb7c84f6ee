"""Walks the slow and long cases in parts, and goes on where it stopped.

    python -m tests.lanes                       # what was not walked yet, cheap files first
    python -m tests.lanes --lane=long --minutes=60
    python -m tests.lanes --part=3/10           # every tenth file, from the third on
    python -m tests.lanes tests/runs            # what lies below a path
    python -m tests.lanes --failed              # cases that failed, once more
    python -m tests.lanes --summary --table=results/lanes/walked.csv

Node ids are collected once, and again after a file has changed. Files of a few seconds share a
pytest process, whose start takes as long; every other file has its own. A log is named after the
first file of its process. `runs/lanes/journal.jsonl` has a line for each finished case, synced to
disk, so a walk may be killed at any moment: the same command goes on after the last line.

A case is walked where its last line is of its test file as it is now. Otherwise it is "older"
and runs again. So does one that failed at another commit: what it tests may be mended. Code that
a passing case tests may have changed since; the table says the commits. `--minutes` and
Ctrl-C end a walk in good order. The exit code is 1 where a case of the lane failed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import fcntl
import hashlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# Folders whose files decide which cases there are.
_FOLDERS = ("tests", "dpjax", "benchmarks")
LANES = ("slow", "long")
STATES = ("passed", "failed", "skipped", "older", "never")
# Guesses of seconds, for cases that no walk has measured.
_GUESS = {"slow": 2.0, "long": 5.0}
_WORST = 15
# Expected seconds of the files that share a process.
_TOGETHER = 60.0

Row = dict[str, Any]


class _Recorder:
  """Writes a line for each finished case: the part of a walk that runs inside pytest."""

  def __init__(
    self,
    folder: pathlib.Path,
    *,
    until: float,
    parent: int,
    commit: str,
    digests: Mapping[str, str],
  ) -> None:
    self._folder = folder
    self._until = until
    self._parent = parent
    self._commit = commit
    self._digests = digests
    self._reports: list[Any] = []
    self._session: Any = None

  def pytest_sessionstart(self, session: Any) -> None:
    self._session = session

  def pytest_runtest_logstart(self, nodeid: str) -> None:
    self._reports = []
    # Whoever started this process names the case after a crash of the interpreter.
    write(self._folder / "running.json", json.dumps({"case": nodeid, "began": time.time()}))

  def pytest_runtest_logreport(self, report: Any) -> None:
    self._reports.append(report)

  def pytest_runtest_logfinish(self, nodeid: str) -> None:
    outcomes = {report.outcome for report in self._reports}
    worst = [name for name in ("failed", "skipped", "passed") if name in outcomes]
    row = {
      "case": nodeid,
      "outcome": worst[0] if worst else "failed",
      "seconds": round(sum(report.duration for report in self._reports), 3),
      "commit": self._commit,
      "digest": self._digests[file_of(nodeid)],
    }
    texts = [report.longreprtext for report in self._reports if report.failed]
    if texts:
      row["reason"] = _reason(texts[0])
    append(self._folder, [row])
    # The walk may have been killed, and its next one must not find this process at work.
    if time.time() > self._until or os.getppid() != self._parent:
      self._session.shouldstop = "the walk ends here"


def _reason(text: str) -> str:
  """Returns the line of a traceback that says the error.

  >>> _reason("x = 1\\nE   ValueError: no\\nE     more\\n\\ntests/a.py:3: ValueError")
  'ValueError: no'
  """
  lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
  return (lines or text.strip().splitlines() or [""])[0][:300]


def pytest_addoption(parser: Any) -> None:
  """Adds what a walk tells the pytest processes that it starts."""
  parser.addoption("--lane-collect", help="file for the node ids of slow and long cases")
  parser.addoption("--lane-orders", help="JSON: cases, and what the recorder needs")


def pytest_configure(config: Any) -> None:
  """Registers the recorder of a walk."""
  file = config.getoption("--lane-orders")
  if file:
    orders = json.loads(pathlib.Path(file).read_text())
    recorder = _Recorder(
      pathlib.Path(orders["folder"]),
      until=orders["until"],
      parent=orders["parent"],
      commit=orders["commit"],
      digests=orders["digests"],
    )
    config.pluginmanager.register(recorder)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
  """Leaves the cases that the walk asked for."""
  file = config.getoption("--lane-orders")
  if file:
    cases = set(json.loads(pathlib.Path(file).read_text())["cases"])
    items[:] = [item for item in items if item.nodeid in cases]


def pytest_collection_finish(session: Any) -> None:
  """Writes the node ids, each with its lane."""
  file = session.config.getoption("--lane-collect")
  if file:
    lanes = {}
    for item in session.items:
      marks = {mark.name for mark in item.iter_markers()} & {*LANES}
      if marks:
        lanes[item.nodeid] = "long" if "long" in marks else "slow"
    write(pathlib.Path(file), json.dumps(lanes))


def write(path: pathlib.Path, text: str) -> None:
  """Writes a file whole or not at all."""
  new = path.with_name(f".{path.name}.{os.getpid()}")
  new.write_text(text)
  os.replace(new, path)


def append(folder: pathlib.Path, rows: Iterable[Row]) -> None:
  """Adds lines to the journal, on disk before this returns."""
  text = "".join(json.dumps(row) + "\n" for row in rows)
  # One write to the end of a file: lines of two processes never mix.
  flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
  descriptor = os.open(folder / "journal.jsonl", flags, 0o644)
  try:
    size = os.fstat(descriptor).st_size
    # A loss of power may leave half a line, which must not swallow the next one.
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
      text = "\n" + text
    os.write(descriptor, text.encode())
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def journal(folder: pathlib.Path) -> dict[str, Row]:
  """Returns the last line of each case. Lines that are not whole are passed over."""
  path = folder / "journal.jsonl"
  rows = {}
  for line in path.read_text().splitlines() if path.exists() else ():
    with contextlib.suppress(ValueError, KeyError, TypeError):
      row = json.loads(line)
      rows[row["case"]] = {"outcome": row["outcome"], "digest": row["digest"], **row}
  return rows


def file_of(case: str) -> str:
  """Returns the path in a node id.

  >>> file_of("tests/a.py::test_b[c::d]")
  'tests/a.py'
  """
  return case.partition("::")[0]


def digest(path: pathlib.Path) -> str:
  """Returns a short digest of a file; of one that is gone, an empty string."""
  return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.exists() else ""


def commit(root: pathlib.Path) -> str:
  """Returns the commit of a tree, with + where files differ from it; empty outside of git."""
  head = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
  changes = ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"]
  name = subprocess.run(head, capture_output=True, text=True).stdout.strip()
  differs = subprocess.run(changes, capture_output=True, text=True).stdout.strip()
  return f"{name}+" if name and differs else name


def collected(root: pathlib.Path, folder: pathlib.Path) -> dict[str, str]:
  """Returns node id -> lane of all slow and long cases, from a file unless a source changed."""
  sources = [path for name in _FOLDERS for path in sorted((root / name).rglob("*.py"))]
  sources += [*(root / "tests").glob("slow_cases.txt")]
  state = hashlib.sha256()
  for path in sources:
    state.update(f"{path.relative_to(root)} {digest(path)}\n".encode())
  kept = folder / "cases.json"
  if kept.exists():
    content = json.loads(kept.read_text())
    if content["state"] == state.hexdigest():
      return content["cases"]
  print("collects the cases", file=sys.stderr, flush=True)
  file = folder / "collected.json"
  file.unlink(missing_ok=True)
  command = [*_PYTEST, "--collect-only", "-m", " or ".join(LANES), f"--lane-collect={file}"]
  done = subprocess.run(
    command, cwd=root, env=_environment(), capture_output=True, text=True
  )
  # 5: there is no such case
  if done.returncode not in (0, 5) or not file.exists():
    print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
    raise SystemExit("error: the cases could not be collected")
  cases = json.loads(file.read_text())
  write(kept, json.dumps({"state": state.hexdigest(), "cases": cases}))
  return cases


_PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "tests.lanes"]


def _environment() -> dict[str, str]:
  """Returns that of the pytest processes, which import this file wherever they run."""
  places = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
  return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def states(
  cases: Iterable[str], rows: Mapping[str, Row], root: pathlib.Path
) -> dict[str, str]:
  """Returns what is known of each case: its outcome, "older" or "never"."""
  digests = {file: digest(root / file) for file in {file_of(case) for case in cases}}
  known = {}
  for case in cases:
    row = rows.get(case)
    if row is None:
      known[case] = "never"
    else:
      same = row["digest"] == digests[file_of(case)]
      known[case] = row["outcome"] if same else "older"
  return known


def part_of(files: Iterable[str], part: str) -> list[str]:
  """Returns the files of a part, the same on every machine.

  >>> part_of(["c", "a", "b"], "2/2")
  ['b']
  """
  number, _, count = part.partition("/")
  if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
    raise SystemExit(f"error: --part={part}: must be NUMBER/COUNT, such as 3/10")
  return sorted(files)[int(number) - 1 :: int(count)]


def todo(
  cases: Mapping[str, str],
  rows: Mapping[str, Row],
  known: Mapping[str, str],
  *,
  now: str,
  failed: bool = False,
) -> dict[str, list[str]]:
  """Returns file -> cases that a walk has to run, the cheapest file first.

  Args:
    cases: node id -> lane.
    rows: last line of each case.
    known: state of each case.
    now: the commit. Cases that failed at another one run again.
    failed: run the cases that failed, and no others.
  """
  chosen = collections.defaultdict(list)
  seconds: dict[str, float] = collections.defaultdict(float)
  for case, lane in cases.items():
    row = rows.get(case, {})
    again = known[case] == "failed" and (failed or row.get("commit") != now)
    if again or (not failed and known[case] in ("never", "older")):
      chosen[file_of(case)].append(case)
      seconds[file_of(case)] += row.get("seconds", _GUESS[lane])
  return {file: chosen[file] for file in sorted(chosen, key=lambda file: seconds[file])}


def together(chosen: Mapping[str, list[str]], rows: Mapping[str, Row]) -> list[list[str]]:
  """Returns the files of each process, in their order.

  Args:
    chosen: file -> cases that a walk has to run.
    rows: last line of each case.

  >>> rows = {"a::1": {"seconds": 0}, "b::1": {"seconds": 30}, "c::1": {"seconds": 50}}
  >>> together({"a": ["a::1"], "b": ["b::1"], "c": ["c::1"]}, rows)
  [['a', 'b'], ['c']]
  """
  batches: list[list[str]] = []
  room = 0.0
  for file, cases in chosen.items():
    seconds = sum(rows.get(case, {}).get("seconds", _GUESS["long"]) for case in cases)
    if not batches or seconds > room:
      batches.append([])
      room = _TOGETHER
    batches[-1].append(file)
    room -= seconds
  return batches


class Walk:
  """Runs cases, few files at a time, and journals them.

  Args:
    root: tree of the tests.
    folder: of the journal.
    until: moment after which no case starts, in seconds of `time.time`.
    case_minutes: after which a case is killed.
    lock: descriptor that every process of the walk holds.
    now: the commit.
  """

  def __init__(
    self,
    root: pathlib.Path,
    folder: pathlib.Path,
    *,
    until: float,
    case_minutes: float,
    lock: int,
    now: str,
  ) -> None:
    self._root = root
    self._folder = folder
    self._until = until
    self._case_seconds = 60 * case_minutes
    self._lock = lock
    self._commit = now

  def run(self, chosen: Mapping[str, list[str]], rows: Mapping[str, Row], bar: Any) -> None:
    """Runs the cases of each file, in the order of the files.

    Args:
      chosen: file -> cases.
      rows: last line of each case of earlier walks.
      bar: shows progress.
    """
    batches = collections.deque(together(chosen, rows))
    cases_of = dict(chosen)
    while batches:
      files = batches.popleft()
      remaining = [case for file in files for case in cases_of[file]]
      outcomes = set()
      log = self._log(files[0])
      log.unlink(missing_ok=True)
      # A crash of the interpreter takes one case with it; the others get a new process.
      while remaining and time.time() < self._until:
        before = len(remaining)
        for row in self._process(remaining, log):
          remaining.remove(row["case"])
          outcomes.add(row["outcome"])
          bar.update(1, last=row["outcome"])
        if len(remaining) == before:
          # One of the files cannot be imported, or is gone: each gets a process of its own.
          left = list(dict.fromkeys(map(file_of, remaining)))
          for file in left:
            cases_of[file] = [case for case in remaining if file_of(case) == file]
          batches.extendleft([file] for file in reversed(left))
          break
      # What pytest printed is kept where it may say why.
      if "failed" not in outcomes:
        log.unlink(missing_ok=True)

  def _log(self, file: str) -> pathlib.Path:
    return self._folder / f"{file.replace('/', '+')}.log"

  def _process(self, cases: list[str], log: pathlib.Path) -> Iterator[Row]:
    """Runs cases in one pytest process; yields a row for each as it comes.

    All have rows at the end, unless the time is up or the process died. Cases of several files may
    have none where one of the files stops pytest.
    """
    # In the order of the cases.
    files = list(dict.fromkeys(map(file_of, cases)))
    digests = {file: digest(self._root / file) for file in files}
    orders = {
      "cases": cases,
      "folder": str(self._folder),
      "until": self._until,
      "parent": os.getpid(),
      "commit": self._commit,
      "digests": digests,
    }
    write(self._folder / "orders.json", json.dumps(orders))
    running = self._folder / "running.json"
    running.unlink(missing_ok=True)
    # The end of the journal, after which this process writes.
    append(self._folder, [])
    place = (self._folder / "journal.jsonl").stat().st_size
    unfinished = set(cases)
    death = ""
    with open(log, "a") as output:
      process = subprocess.Popen(
        [*_PYTEST, "-m", "", f"--lane-orders={self._folder / 'orders.json'}", *files],
        cwd=self._root,
        env=_environment(),
        stdout=output,
        stderr=subprocess.STDOUT,
        # Ctrl-C is for the walk alone, which then ends the process and all that it started.
        start_new_session=True,
        pass_fds=[self._lock],
      )
      try:
        ended = False
        while not ended:
          # Asked before the journal is read: the last rows come before the end.
          ended = process.poll() is not None
          for row in _rows_after(self._folder, place):
            place = row.pop("place")
            unfinished.discard(row["case"])
            yield row
          case = json.loads(running.read_text()) if running.exists() else {}
          if not ended and case and time.time() - case["began"] > self._case_seconds:
            death = f"killed after {self._case_seconds / 60:g} minutes"
            os.killpg(process.pid, signal.SIGKILL)
          time.sleep(0 if ended else 0.2)
      finally:
        # Nothing of it may outlive the walk.
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not death and process.returncode < 0:
      death = f"died of signal {-process.returncode}"
    case = json.loads(running.read_text())["case"] if running.exists() else ""
    lost = []
    if death and case in unfinished:
      lost = [case]
    elif time.time() < self._until and len(files) == 1:
      # An import that fails, an id that is gone, an exit without a word.
      lost = sorted(unfinished)
    for case in lost:
      reason = death or f"pytest ran no such case: see {log.name}"
      row = {
        "case": case,
        "outcome": "failed",
        "seconds": 0.0,
        "commit": self._commit,
        "digest": digests[file_of(case)],
        "reason": reason,
      }
      append(self._folder, [row])
      yield row


def _rows_after(folder: pathlib.Path, place: int) -> Iterator[Row]:
  """Yields the rows behind a place of the journal, each with the place behind it."""
  with open(folder / "journal.jsonl", "rb") as file:
    file.seek(place)
    lines = file.read().splitlines(keepends=True)
  for line in lines:
    place += len(line)
    if line.strip() and line.endswith(b"\n"):
      yield {**json.loads(line), "place": place}


def table(
  cases: Mapping[str, str], rows: Mapping[str, Row], known: Mapping[str, str]
) -> list[Row]:
  """Returns a row for each file and lane: how many cases of each state, seconds, commits."""
  groups: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
  for case, lane in cases.items():
    groups[file_of(case), lane].append(case)
  lines = []
  for (file, lane), names in sorted(groups.items()):
    counts = collections.Counter(known[name] for name in names)
    seconds = sum(rows[name]["seconds"] for name in names if name in rows)
    commits = {rows[name].get("commit", "") for name in names if name in rows}
    lines.append(
      {
        "file": file,
        "lane": lane,
        **{state: counts[state] for state in STATES},
        "seconds": round(seconds, 1),
        "commits": " ".join(sorted(commits)),
      }
    )
  return lines


def summary(
  cases: Mapping[str, str], rows: Mapping[str, Row], known: Mapping[str, str]
) -> str:
  """Returns what was walked, the worst times, and the cases that failed."""
  lines = [f"{'lane':6}" + "".join(f"{state:>10}" for state in STATES)]
  for lane in LANES:
    counts = collections.Counter(known[case] for case in cases if cases[case] == lane)
    if counts:
      lines.append(f"{lane:6}" + "".join(f"{counts[state]:>10}" for state in STATES))
  walked = [case for case in cases if case in rows]
  slowest = sorted(walked, key=lambda case: -rows[case]["seconds"])[:_WORST]
  lines += ["", "worst times, seconds:"] if slowest else []
  lines += [f"{rows[case]['seconds']:8.1f}  {case}" for case in slowest]
  failed = [case for case in walked if known[case] == "failed"]
  lines += ["", "failed:"] if failed else []
  lines += [f"  {case}: {rows[case].get('reason', '')}" for case in failed]
  return "\n".join(lines)


def _arguments(arguments: list[str]) -> argparse.Namespace:
  """Returns the flags of the command line."""
  parser = argparse.ArgumentParser(
    prog="python -m tests.lanes",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("paths", nargs="*", help="files or folders; everything without one")
  parser.add_argument("--lane", choices=[*LANES, "all"], default="all")
  parser.add_argument("--part", default="1/1", help="NUMBER/COUNT: every COUNTth file")
  parser.add_argument(
    "--minutes", type=float, default=1e6, help="after which no case starts"
  )
  parser.add_argument(
    "--case_minutes", type=float, default=60, help="the most for one case"
  )
  parser.add_argument("--failed", action="store_true", help="those that failed, once more")
  parser.add_argument("--summary", action="store_true", help="run nothing")
  parser.add_argument(
    "--table", type=pathlib.Path, help="CSV to write: a row for each file"
  )
  parser.add_argument(
    "--resume",
    action=argparse.BooleanOptionalAction,
    default=True,
    help="go on; --no-resume puts the journal aside",
  )
  parser.add_argument("--out", type=pathlib.Path, help="folder; runs/lanes without it")
  parser.add_argument("--root", type=pathlib.Path, default=_ROOT, help="tree of the tests")
  return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
  """Walks, then prints the summary. Returns 1 where a case of the lane failed."""
  asked = _arguments(arguments)
  if not asked.minutes > 0 or not asked.case_minutes > 0:
    raise SystemExit("error: --minutes and --case_minutes must be > 0")
  root = asked.root.resolve()
  folder = (asked.out or root / "runs" / "lanes").resolve()
  folder.mkdir(parents=True, exist_ok=True)
  # SIGTERM ends a walk as Ctrl-C does: in good order.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  until = time.time() + 60 * asked.minutes
  with open(folder / "lock", "w") as lock:
    if not asked.summary:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError:
        raise SystemExit(f"error: --out={folder}: another walk is at work there") from None
    if not asked.resume and (folder / "journal.jsonl").exists():
      os.replace(folder / "journal.jsonl", folder / f"journal.{int(time.time())}.jsonl")
    cases = collected(root, folder)
    files = {*part_of({file_of(case) for case in cases}, asked.part)}
    places = tuple(f"{path.replace('::', '/').rstrip('/')}/" for path in asked.paths)
    cases = {
      case: lane
      for case, lane in cases.items()
      if asked.lane in (lane, "all")
      and file_of(case) in files
      # a whole name: tests/run is no folder of tests/runs
      and (not places or f"{case}/".replace("::", "/").startswith(places))
    }
    if not cases:
      raise SystemExit("error: no slow or long case there")
    rows = journal(folder)
    if not asked.summary:
      now = commit(root)
      known = states(cases, rows, root)
      chosen = todo(cases, rows, known, now=now, failed=asked.failed)
      walk = Walk(
        root,
        folder,
        until=until,
        case_minutes=asked.case_minutes,
        lock=lock.fileno(),
        now=now,
      )
      # Imported late: pytest processes need none of it.
      from dpjax.experiments.run import writers

      count = sum(map(len, chosen.values()))
      with (
        contextlib.suppress(KeyboardInterrupt),
        writers.progress(count, 0, "cases") as bar,
      ):
        walk.run(chosen, rows, bar)
      rows = journal(folder)
  known = states(cases, rows, root)
  print(summary(cases, rows, known))
  if asked.table:
    text = io.StringIO()
    writer = csv.DictWriter(
      text, ["file", "lane", *STATES, "seconds", "commits"], lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(table(cases, rows, known))
    asked.table.parent.mkdir(parents=True, exist_ok=True)
    write(asked.table, text.getvalue())
  return int("failed" in known.values())


if __name__ == "__main__":
  try:
    sys.exit(main(sys.argv[1:]))
  # While the cases are collected: nothing was begun, so nothing is said.
  except KeyboardInterrupt:
    sys.exit(130)
