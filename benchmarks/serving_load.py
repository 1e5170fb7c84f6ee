"""Load on `launch.serve` over loopback: latency, requests a second, and what is lost.

  python -m benchmarks serve --minutes=30 --folder=made --out=runs/serve_load

It writes serve.json.

Clients in threads send rows of the digits over connections that stay open, compare every logit
with those of the predictor bit by bit, and send a request again until it is answered. A request is
lost if the service took it and gave no answer while it was alive; what a kill interrupts is counted
by itself. With minutes, the service also gets a release that is promoted, one that is worse and is
taken back, inputs that drift, and a kill -9 in the middle of a release.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import platform
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from absl import flags

from dpjax import data
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from dpjax.experiments.run import loop, writers
from dpjax.serving.predictor import Predictor
from dpjax.validate import UserError

_CLIENTS = 8
_TOKEN = "a token of the benchmark"
# Share of answers whose label is sent back.
_LABELLED = 0.25
_START_SECONDS = 300
# A stage of a release waits for its requests and labels, which a busy machine sends slowly.
_EVENT_SECONDS = 1200
# Phases and their shares of the time; the first ones are played without a kill as well.
_WHOLE = (
  ("as many as it can", 0.02),
  ("steady", 0.2),
  ("a release that is promoted", 0.2),
  ("a worse release", 0.15),
  ("drift", 0.13),
  ("a kill -9", 0.15),
  ("after it", 0.15),
)
_QUIET = 3
_CHECKOUT = pathlib.Path(__file__).resolve().parents[1]
_FLAGS = (
  "--port=0", "--drift_inputs=mean", "--window=500", "--feedback_window=100", "--stages=0.1,0.5",
  "--stage_requests=100", "--stage_labels=30", "--latency_ms=0", "--deadline=60",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Phase:
  """Requests of one part of the load."""

  name: str
  seconds: float
  requests: int  # answered
  per_second: float
  p50_ms: float
  p99_ms: float
  refused: int  # 429 and 503, which were sent again
  interrupted: int  # by the kill, and sent again
  lost: int  # taken and not answered, while the service was alive
  other_bits: int  # answers with a logit that is not the predictor's


class _Load:
  """Clients that send rows until they are stopped.

  Args:
    known: {name of a run: its logits of every row}.
    rows, labels: what is sent, and the truth.
    per_second: requests a second of all clients together; 0: as many as there is time for.
  """

  def __init__(
    self,
    known: dict[str, np.ndarray],
    rows: np.ndarray,
    labels: np.ndarray,
    per_second: float,
  ):
    self.port = 0
    self.alive = True
    self.drifting = False
    self.per_second = per_second
    self._known = known
    self._bodies = [_body(row) for row in rows]
    # Photographic negatives: other brightness, and other answers.
    self._drifted = [_body(1 - row) for row in rows]
    self._labels = labels
    self._stop = threading.Event()
    self._lock = threading.Lock()
    self._local = threading.local()
    self._times: list[float] = []
    self._counts: collections.Counter[str] = collections.Counter()
    self._began = time.monotonic()
    self._threads = [
      threading.Thread(target=self._client, args=(seed,), daemon=True)
      for seed in range(_CLIENTS)
    ]

  def start(self) -> None:
    """Starts the clients."""
    for thread in self._threads:
      thread.start()

  def stop(self) -> None:
    """Stops the clients, once their last requests are answered."""
    self._stop.set()
    for thread in self._threads:
      thread.join()

  def phase(self, name: str) -> Phase:
    """Returns what happened since the last call."""
    with self._lock:
      times = self._times
      counts = self._counts
      self._times = []
      self._counts = collections.Counter()
    seconds = time.monotonic() - self._began
    self._began = time.monotonic()
    percentiles = np.percentile(times, (50, 99)) if times else (float("nan"), float("nan"))
    return Phase(
      name=name,
      seconds=round(seconds, 1),
      requests=len(times),
      per_second=round(len(times) / seconds, 1),
      p50_ms=round(float(percentiles[0]), 2),
      p99_ms=round(float(percentiles[1]), 2),
      refused=counts["refused"],
      interrupted=counts["interrupted"],
      lost=counts["lost"],
      other_bits=counts["other_bits"],
    )

  def _client(self, seed: int) -> None:
    rng = random.Random(seed)
    while not self._stop.is_set():
      place = rng.randrange(len(self._bodies))
      drifted = self.drifting
      began = time.monotonic()
      answer = self._answer((self._drifted if drifted else self._bodies)[place])
      if answer is None:
        break
      took = time.monotonic() - began
      with self._lock:
        self._times.append(1000 * took)
      self._check(answer, place, drifted)
      if rng.random() < _LABELLED:
        label = {"id": answer["id"], "labels": [int(self._labels[place])]}
        # A label that a kill interrupts is not worth a second try.
        try:
          _post(self._connection(), "/feedback", json.dumps(label).encode())
        except (OSError, http.client.HTTPException, UserError):
          self._local.connection = None
      if self.per_second:
        time.sleep(max(0.0, _CLIENTS / self.per_second - took))
    self._connection().close()

  def _connection(self) -> http.client.HTTPConnection:
    """Returns the thread's connection, which stays open."""
    connection = getattr(self._local, "connection", None)
    if connection is None:
      connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=90)
      self._local.connection = connection
    return connection

  def _answer(self, body: bytes) -> dict[str, Any] | None:
    """Sends a request until it is answered; None where the load is stopped first."""
    while True:
      try:
        answer = _post(self._connection(), "/predict", body)
        if answer is not None:
          return answer
        self._count("refused")
      except (OSError, http.client.HTTPException, UserError) as error:
        self._local.connection = None
        # A refused connection took nothing; a kill interrupts what was taken.
        if not isinstance(error, ConnectionRefusedError):
          self._count("lost" if self.alive else "interrupted")
      if self._stop.wait(0.2):
        return None

  def _check(self, answer: dict[str, Any], place: int, drifted: bool) -> None:
    logits = np.asarray(answer["logits"], np.float32)[0]
    if not drifted and not np.array_equal(logits, self._known[answer["run"]][place]):
      self._count("other_bits")

  def _count(self, what: str) -> None:
    with self._lock:
      self._counts[what] += 1


def _body(row: np.ndarray) -> bytes:
  return json.dumps({"rows": [row.tolist()]}).encode()


def _post(
  connection: http.client.HTTPConnection, path: str, body: bytes
) -> dict[str, Any] | None:
  """Returns the answer; None where the service refused it for now.

  Raises:
    UserError: another refusal than 429, 503 and, for feedback, 422.
  """
  headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_TOKEN}"}
  connection.request("POST", path, body, headers)
  response = connection.getresponse()
  content = response.read()
  if response.status == 200:
    return json.loads(content)
  # After a kill, the service does not know the ids of before.
  if response.status in (429, 503) or (path == "/feedback" and response.status == 422):
    return None
  raise UserError(f"{response.status} {content[:200]!r}", field=path)


class _Server:
  """The service as a process of its own."""

  def __init__(self, folder: pathlib.Path, run: pathlib.Path):
    token = folder / "token"
    token.write_text(_TOKEN)
    self.workdir = folder / "service"
    self._log = folder / "server.log"
    self._command = [sys.executable, "-m", "launch.serve", f"--run={run}", *_FLAGS]
    self._command += [f"--workdir={self.workdir}", f"--token_file={token}"]
    self.port = 0

  def start(self) -> float:
    """Starts the service; returns the seconds until it listens."""
    began = time.monotonic()
    before = self._log.stat().st_size if self._log.exists() else 0
    paths = [str(_CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with self._log.open("ab") as log:
      self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=env)
    while time.monotonic() - began < _START_SECONDS:
      text = self._log.read_bytes()[before:].decode(errors="replace")
      listening = re.search(r"serving at http://[^:]+:(\d+)", text)
      if listening:
        self.port = int(listening[1])
        return time.monotonic() - began
      if self.process.poll() is not None:
        raise UserError(f"launch.serve ended: {text[-300:]}")
      time.sleep(0.1)
    raise UserError(f"launch.serve does not listen after {_START_SECONDS} s")

  def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the answer to a request of the operator."""
    connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
    with contextlib.closing(connection):
      if body is not None:
        return _post(connection, path, json.dumps(body).encode()) or {}
      connection.request("GET", path)
      return json.loads(connection.getresponse().read())

  def kinds(self) -> list[str]:
    """Returns the kinds of the journal's lines."""
    text = (self.workdir / "journal.jsonl").read_text()
    return [
      json.loads(line)["kind"]
      for line in text.splitlines(keepends=True)
      if line[-1:] == "\n"
    ]

  def stop(self) -> int:
    """Stops the service as an operator does; returns its exit code."""
    self.process.send_signal(signal.SIGTERM)
    return self.process.wait(timeout=_START_SECONDS)


def _config(seed: int, num_steps: int) -> TrainConfig:
  return TrainConfig(
    data=DataConfig(name="digits", center=True),
    model=ModelConfig(name="mlp", options={"features": (64,)}),
    privacy=DpSgd(epsilon=3.0, sampling_prob=0.2, l2_clip_norm=0.5),
    optimizer=OptimizerConfig(learning_rate=0.5),
    num_steps=num_steps,
    eval_every=num_steps,
    seed=seed,
  )


def trained(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Trains the runs that are served: two good ones, and one of a single step."""
  wanted = {"first": _config(0, 150), "second": _config(1, 150), "worse": _config(2, 1)}
  for name, config in wanted.items():
    loop.train(config, folder / name)
  return {name: folder / name for name in wanted}


def measure(
  folder: str | os.PathLike[str],
  *,
  seconds: float,
  per_second: float = 80.0,
  whole: bool = False,
  say: Callable[[str], None] = lambda line: None,
  save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
  """Plays the load; returns its phases and events.

  Args:
    folder: where runs, journal and log of the service are written.
    seconds: of all phases together, at least.
    per_second: requests a second, but for the first phase, which sends as many as it can.
    whole: with a release that is taken back, drift, and a kill.
    say: told each phase.
    save: gets what there is of the result after each phase.
  """
  folder = pathlib.Path(folder)
  runs = trained(folder)
  test = data.load("digits")[1]
  predictors = {name: Predictor.load(path) for name, path in runs.items()}
  known = {name: predictor(test.x) for name, predictor in predictors.items()}
  server = _Server(folder, runs["first"])
  events: dict[str, Any] = {"seconds_to_start": round(server.start(), 2)}
  load = _Load(known, np.asarray(test.x), np.asarray(test.y), 0.0)
  load.port = server.port
  phases: list[Phase] = []
  plan = _WHOLE if whole else _WHOLE[:_QUIET]
  total = sum(share for _, share in plan)
  result: dict[str, Any] = {
    "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    # Other work on the machine decides the slowest answers.
    "load_average_before": round(os.getloadavg()[0], 1),
    "clients": _CLIENTS,
    "requests_per_second_asked": per_second,
    "seconds_asked": seconds,
    "phases": [],
    "events": events,
  }
  load.start()
  try:
    for name, share in plan:
      # The shares of a shorter plan are raised, so that its phases fill the time as well.
      end = time.monotonic() + max(5.0, share / total * seconds)
      events |= _event(name, server, load, runs, say)
      while time.monotonic() < end:
        time.sleep(0.2)
      load.drifting = False
      phases.append(load.phase(name))
      load.per_second = per_second
      say(json.dumps(dataclasses.asdict(phases[-1])))
      result["phases"] = [dataclasses.asdict(phase) for phase in phases]
      for what in ("requests", "lost", "other_bits"):
        result[what] = sum(phase[what] for phase in result["phases"])
      result["load_average_after"] = round(os.getloadavg()[0], 1)
      result["seconds"] = round(sum(phase["seconds"] for phase in result["phases"]), 1)
      # After each phase, so that an interrupted load keeps its results.
      save(result)
  finally:
    load.stop()
    events["exit_code"] = server.stop()
  events["journal"] = dict(collections.Counter(server.kinds()))
  say(f"phases of {result['seconds']:.0f} s in all; {seconds:.0f} s were asked for")
  save(result)
  return result


def _until(server: _Server, holds: Callable[[dict[str, Any]], bool], what: str) -> float:
  """Waits until /health holds; returns the seconds."""
  began = time.monotonic()
  while time.monotonic() - began < _EVENT_SECONDS:
    if holds(server.ask("/health")):
      return round(time.monotonic() - began, 1)
    time.sleep(0.2)
  raise UserError(
    f"{what} did not happen within {_EVENT_SECONDS} s: {server.ask('/health')}"
  )


def _event(
  name: str,
  server: _Server,
  load: _Load,
  runs: dict[str, pathlib.Path],
  say: Callable[[str], None],
) -> dict[str, Any]:
  """Plays what a phase begins with; returns what it showed."""
  if name == "a release that is promoted":
    server.ask("/release", {"action": "offer", "run": str(runs["second"])})
    seconds = _until(server, lambda health: health["run"] == "second", "promotion")
    return {"seconds_to_promote": seconds}
  if name == "a worse release":
    server.ask("/release", {"action": "offer", "run": str(runs["worse"])})
    rolled_back = lambda health: health["release"] is None
    seconds = _until(server, rolled_back, "roll-back")
    return {
      "seconds_to_roll_back": seconds,
      "run_after_roll_back": server.ask("/health")["run"],
    }
  if name == "drift":
    quiet = not any(alarm.startswith("psi") for alarm in server.ask("/health")["alarms"])
    load.drifting = True
    raised = _until(server, lambda health: "psi mean" in health["alarms"], "an alarm")
    load.drifting = False
    cleared = _until(server, lambda health: "psi mean" not in health["alarms"], "its end")
    return {
      "quiet_before_drift": quiet,
      "seconds_to_alarm": raised,
      "seconds_to_clear": cleared,
    }
  if name == "a kill -9":
    return _kill(server, load, runs, say)
  return {}


def _kill(
  server: _Server, load: _Load, runs: dict[str, pathlib.Path], say: Callable[[str], None]
) -> dict[str, Any]:
  """Kills the service in a release, and starts it again with the same command."""
  server.ask("/release", {"action": "offer", "run": str(runs["first"])})
  answered = lambda health: health["release"]["counts"]["new"]["requests"] >= 20
  _until(server, answered, "a release under way")
  # Counts are saved once a second.
  time.sleep(1.5)
  before = server.ask("/health")
  load.alive = False
  server.process.kill()
  server.process.wait()
  down = time.monotonic()
  server.start()
  load.port = server.port
  load.alive = True
  outage = round(time.monotonic() - down, 1)
  say(f"killed, and back after {outage} s")
  after = server.ask("/health")
  release = after["release"] or {}
  return {
    "seconds_of_outage": outage,
    "run_kept": before["run"] == after["run"],
    "release_kept": release.get("run") == before["release"]["run"],
    "stage_kept": release.get("stage") == before["release"]["stage"],
    "requests_of_stage_before_and_after": [
      before["release"]["counts"]["new"]["requests"],
      release.get("counts", {}).get("new", {}).get("requests"),
    ],
  }


def write(results: list[dict[str, Any]], out: pathlib.Path) -> None:
  """Writes serve.json of the only result."""
  (result,) = results
  writers.write_json(out / "serve.json", result)


def table(results: list[dict[str, Any]]) -> str:
  """Returns aligned text of the only result, one line for each phase.

  >>> phase = Phase("steady", 10.0, 800, 80.0, 4.0, 9.5, 0, 0, 0, 0)
  >>> print(table([{"phases": [dataclasses.asdict(phase)]}]))
  phase   requests  per second  p50 ms  p99 ms  lost  other bits
  steady       800        80.0    4.00    9.50     0           0
  """
  (result,) = results
  names = [phase["name"] for phase in result["phases"]]
  width = max(map(len, ("phase", *names)))
  lines = [f"{'phase':<{width}}  requests  per second  p50 ms  p99 ms  lost  other bits"]
  for phase in result["phases"]:
    lines.append(
      f"{phase['name']:<{width}}  {phase['requests']:8}  {phase['per_second']:10.1f}  "
      f"{phase['p50_ms']:6.2f}  {phase['p99_ms']:6.2f}  {phase['lost']:4}  {phase['other_bits']:10}"
    )
  return "\n".join(lines)


def define() -> None:
  """Defines the flags."""
  flags.DEFINE_string("folder", None, "Where runs are made; they stay there.")
  flags.DEFINE_float(
    "minutes", None, "With releases, drift and a kill, for so long.", lower_bound=1
  )
  flags.DEFINE_float(
    "per_second", 80.0, "Requests a second.", lower_bound=1, upper_bound=10_000
  )


def parts(values: flags.FlagValues) -> Iterator[tuple[str, list[dict[str, Any]]]]:
  """Yields (name, its only result) of the only part."""
  if values.folder is None:
    raise UserError("must be given, for runs and the journal", field="folder")
  whole = values.minutes is not None
  out = None if values.out is None else pathlib.Path(values.out)
  result = measure(
    values.folder,
    seconds=60 * values.minutes if whole else 25.0,
    per_second=values.per_second,
    whole=whole,
    say=lambda line: print(line, file=sys.stderr, flush=True),
    save=lambda measured: None if out is None else write([measured], out),
  )
  yield "load", [result]
