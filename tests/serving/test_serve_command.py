"""launch.serve from the command line: mistakes in one line, and a kill -9 that loses nothing."""

import functools
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from tests import commands

_launch = functools.partial(commands.run, "launch.serve")
_ROW = [[[[0.5]] * 8] * 8]


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    ((), "--run=[]: must be given once"),
    (("--run=a", "--run=b", "--run=c"), "must be given once"),
    (("--run=/no/such/run",), "must be the folder of a finished run"),
    (("--run=a", "--weights=.5,.5"), "it needs two --run"),
    (("--run=a", "--run=b", "--weights=.9,.2"), "sum to 1"),
    (("--run=a", "--run=b", "--weights=.9,x"), "must be numbers"),
    (("--run=a", "--stages=.5,.1"), "increasing"),
    (("--run=a", "--drift_budget=1"), "it needs drift_epsilon"),
    (("--run=a", "--drift_epsilon=-1"), "drift_epsilon"),
    (("--run=a", "--psi_alarm=.01"), "must be >= psi_warning"),
    (("--run=a", "--token_file=/no/such/file"), "token_file"),
    (("--run=a", "--port=70000"), "port"),
    (("--run=a", "--nodrift", "--drift_inputs=mean"), "would be ignored"),
    (("--run=a", "--window_seconds=9", "--feedback_window=9"), "would be ignored"),
    (("--run=a", "--window_seconds=0"), "window_seconds=0"),
    (("--run=a", "--reference=training"), "training rows are private"),
    (("--run=a", "--reference_epsilon=1"), "--reference_epsilon=1.0: would be ignored"),
    (("--run=a", "--reference=train"), "--reference='train'"),
  ],
)
def test_a_wrong_flag_is_one_line(flags, words):
  assert words in commands.refusal(_launch(*flags))


def test_a_flag_that_does_not_fit_the_run_is_one_line(folders, tmp_path):
  workdir = tmp_path / "service"
  for flag in ("--drift_inputs=nope", "--reference=/no/such/counts.json"):
    done = _launch(f"--run={folders[0]}", f"--workdir={workdir}", flag)
    name = flag[2:].partition("=")[0]
    assert name in commands.refusal(done) and not workdir.exists()


class _Process:
  """The service as users start it."""

  def __init__(self, *flags):
    command = [sys.executable, "-m", "launch.serve", "--port=0", *map(str, flags)]
    self.process = subprocess.Popen(
      command, cwd=commands.ROOT, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    line = self.process.stdout.readline()
    self.port = int(re.search(r"http://127.0.0.1:(\d+)", line)[1])

  def ask(self, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    text = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, text, headers)
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found

  def end(self, signum):
    self.process.send_signal(signum)
    code = self.process.wait(60)
    self.process.stdout.close()
    return code


@pytest.mark.long
def test_a_service_that_is_killed_goes_on_where_it_was(folders, tmp_path):
  flags = (f"--run={folders[0]}", f"--run={folders[1]}", "--weights=.75,.25", "--window=50")
  flags += (
    f"--workdir={tmp_path / 'service'}",
    "--drift_epsilon=1",
    "--stage_requests=1000",
  )
  service = _Process(*flags)
  try:
    models = {}
    for number in range(120):
      key = f"user-{number}"
      models[key] = service.ask("/predict", {"rows": _ROW, "key": key})["run"]
    # Windows close in the background, on a busy machine later.
    deadline = time.monotonic() + 60
    while service.ask("/health")["windows"] < 2 and time.monotonic() < deadline:
      time.sleep(0.5)
    time.sleep(2.5)
    before = service.ask("/health")
  finally:
    assert service.end(signal.SIGKILL) == -signal.SIGKILL
  assert set(models.values()) == {"run0", "run1"} and before["windows"] == 2
  assert before["privacy"]["stream_epsilon"] == 2.0
  journal = (tmp_path / "service" / "journal.jsonl").read_text().splitlines()
  # Each charge stands before the window that it pays for.
  kinds = [json.loads(line)["kind"] for line in journal]
  assert [k for k in kinds if k in ("charge", "window")] == ["charge", "window"] * 2
  service = _Process(*flags)
  try:
    after = service.ask("/health")
    assert after["privacy"] == before["privacy"]
    # Requests, errors and the stage; a second or less of them may be lost, here none was sent.
    assert after["release"] == before["release"]
    for key in list(models)[:20]:
      assert service.ask("/predict", {"rows": _ROW, "key": key})["run"] == models[key]
    for number in range(10):
      service.ask("/predict", {"rows": _ROW, "key": f"more-{number}"})
    time.sleep(2.5)
    # 20 rows of the open window were kept: 30 more close it.
    assert service.ask("/health")["privacy"]["stream_epsilon"] == 3.0
    # A second service cannot take the same journal.
    done = _launch(*flags)
    assert "another process is at work there" in commands.refusal(done)
  finally:
    service.end(signal.SIGTERM)


@pytest.mark.long
def test_the_load_test_of_the_benchmark_loses_nothing(tmp_path):
  from benchmarks import serving_load

  result = serving_load.measure(tmp_path, seconds=15, per_second=40.0)
  assert result["lost"] == 0 and result["other_bits"] == 0 and result["requests"] > 200
  # A release may take longer than its share, and never less.
  assert result["seconds"] >= result["seconds_asked"] == 15
  assert [phase["name"] for phase in result["phases"]][-1] == "a release that is promoted"
  serving_load.write([result], tmp_path)
  assert json.loads((tmp_path / "serve.json").read_text())["lost"] == 0
  assert "steady" in serving_load.table([result])
