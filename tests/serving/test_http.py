"""Right and wrong requests over a real socket: each wrong one is one clear line."""

import asyncio
import contextlib
import errno
import gzip
import http.client
import json
import logging
import os
import socket
import struct
import threading
import time

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from dpjax import data
from dpjax.serving import Predictor, Service, ServiceSettings, StageRule, drift
from dpjax.serving import http as web
from dpjax.serving.journal import ServiceJournal
from tests.refuses import refuses

_TOKEN = "sixteen letters.."
_ROW = np.full((8, 8, 1), 0.5).tolist()
_JSON = {"Content-Type": "application/json"}
_BYTES = 200_000


class _Served:
  """A service in a thread, which ends with the file."""

  def __init__(self, folder, runs):
    settings = ServiceSettings(
      max_rows=64, max_queue=64, deadline=2.0, window=100, latency_ms=0.0, wait_ms=0.0,
      rule=StageRule(stages=(0.5, 1.0), requests=5, latency_ms=0.0),
    )  # fmt: skip
    self.runs = {run.folder: run for run in runs}
    self.journal = ServiceJournal(folder)
    self.ready = threading.Event()
    self.stopping = None
    bins = [drift.predicted_bins(runs[0].inputs)]
    self.service = Service(runs[:1], self.journal, bins=bins, settings=settings)
    self.thread = threading.Thread(target=self._run)
    self.thread.start()
    assert self.ready.wait(60)

  def _load(self, folder):
    return self.runs[folder] if folder in self.runs else Predictor.load(folder)

  def _run(self):
    application = web.Web(self.service, most_bytes=_BYTES, token=_TOKEN, load=self._load)

    def ready(host, port):
      self.port = port
      self.ready.set()

    # `serve` would take signals, which a thread cannot.
    server = web.server(
      application, host="127.0.0.1", port=0, head_seconds=0.6, ready=ready
    )
    self.server = server[0]
    with server[1]:
      asyncio.run(server[0].serve([server[1]]))

  def close(self):
    self.server.should_exit = True
    self.thread.join(30)
    self.journal.close()

  def send(self, path, body=None, method="POST", headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
    try:
      content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
      connection.request(method, path, content, _JSON if headers is None else headers)
      response = connection.getresponse()
      return response.status, response.read()
    finally:
      connection.close()


@pytest.fixture(scope="module")
def served(runs, tmp_path_factory):
  found = _Served(tmp_path_factory.mktemp("service"), runs)
  yield found
  found.close()


def test_an_answer_has_the_logits_of_the_predictor_bit_by_bit(served, runs):
  x = data.load("digits")[1].x[:5]
  status, body = served.send("/predict", {"rows": x.tolist(), "key": "user-1"})
  found = json.loads(body)
  assert status == 200 and found["run"] == "run0"
  logits = np.asarray(found["logits"], np.float32)
  np.testing.assert_array_equal(logits, runs[0](x))
  assert found["classes"] == np.argmax(logits, axis=1).tolist()
  assert found["labels"] == [str(place) for place in found["classes"]]
  status, body = served.send("/feedback", {"id": found["id"], "labels": found["labels"]})
  assert (status, json.loads(body)) == (200, {"right": 5})
  held = (x * 255).astype(np.uint8)
  status, body = served.send("/predict", {"rows": held.tolist(), "encoding": "uint8"})
  np.testing.assert_array_equal(json.loads(body)["logits"], runs[0](held))


def _rows(value):
  return {"rows": [[[[value]] * 8] * 8]}


_DEEP = 100_000
_WRONG = {
  "no body": (b"", 400, "must be JSON"),
  "no JSON": (b"{", 400, "must be JSON"),
  "no UTF-8": (b'{"rows": "\xff"}', 400, "must be JSON"),
  "UTF-16": ('{"rows": [[0.5]]}'.encode("utf-16"), 400, "must be JSON"),
  "half of a pair": (b'{"rows": [[0.5]], "key": "\\ud800"}', 400, "must be JSON"),
  "half of a pair in bytes": (b'{"rows": [], "key": "\xed\xa0\x80"}', 400, "must be JSON"),
  "no object": (b"[1]", 400, "must be a JSON object"),
  "NaN": (b'{"rows": [NaN]}', 400, "NaN is no JSON number"),
  "infinity": (b'{"rows": [-Infinity]}', 400, "-Infinity is no JSON number"),
  "a key twice": (b'{"rows": [1], "rows": [2]}', 400, "a key stands twice"),
  "deep": (b"[" * _DEEP, 400, "must be JSON"),
  "deep in rows": (b'{"rows":' + b"[" * 900 + b"]" * 900 + b"}", (400, 422), "must"),
  "an integer of 5000 digits": (b'{"rows": [' + b"1" * 5000 + b"]}", 400, "must be JSON"),
  "too many bytes": (b" " * (_BYTES + 1), 413, f"at most {_BYTES} bytes"),
  "no rows": ({"row": []}, 422, "must have the key 'rows'"),
  "empty rows": ({"rows": []}, 422, "at least one row"),
  "rows of nothing": ({"rows": [[]]}, 422, "must be of shape [n, 8, 8, 1]"),
  "rows are a text": ({"rows": "digits"}, 422, "must be a list"),
  "rows are a number": ({"rows": 3}, 422, "must be a list"),
  "an unknown key": ({"rows": [_ROW], "model": "x"}, 422, "unknown key 'model'"),
  "texts": (_rows("0.5"), 422, "must hold numbers alone"),
  "true": (_rows(True), 422, "must hold numbers alone"),
  "null": (_rows(None), 422, "must hold numbers alone"),
  "objects": ({"rows": [{"age": 3}]}, 422, "no table"),
  "a huge integer": (_rows(10**400), 422, "at most 64 bits"),
  "a huge float": (b'{"rows": [[[[1e999]]]]}', 422, "must be of shape"),
  "beyond float32": (_rows(1e300), 422, "finite in float32"),
  "bytes without encoding": (_rows(200), 422, "must lie in [0, 1]"),
  "below zero": (_rows(-0.1), 422, "must lie in [0, 1]"),
  "ragged": ({"rows": [_ROW, _ROW[:3]]}, 422, "rectangular"),
  "another shape": ({"rows": [[0.5] * 64]}, 422, "must be of shape [n, 8, 8, 1]"),
  "too many rows": ({"rows": [[]] * 65}, 413, "at most 64"),
  "a key that is a number": ({"rows": [_ROW], "key": 7}, 422, "key: must be a text"),
  "an empty key": ({"rows": [_ROW], "key": ""}, 422, "key: must be a text"),
  "a long key": ({"rows": [_ROW], "key": "k" * 300}, 422, "key: must be a text"),
  "another encoding": ({"rows": [_ROW], "encoding": "png"}, 422, "must be 'uint8'"),
  "floats as bytes": ({"rows": [_ROW], "encoding": "uint8"}, 422, "integers in [0, 255]"),
  "256 as a byte": (_rows(256) | {"encoding": "uint8"}, 422, "integers in [0, 255]"),
}


@pytest.mark.parametrize("name", _WRONG)
def test_a_wrong_request_is_one_clear_line(served, name):
  body, wanted, words = _WRONG[name]
  status, content = served.send("/predict", body)
  wanted = wanted if isinstance(wanted, tuple) else (wanted,)
  assert status in wanted, content
  assert content.count(b"\n") == 1 and content.endswith(b"\n")
  found = json.loads(content)
  assert list(found) == ["error"] and words in found["error"] and len(content) < 600


@pytest.mark.parametrize(
  ("method", "path", "headers", "status"),
  [
    ("POST", "/predict", {}, 400),
    ("POST", "/predict", {"Content-Type": "text/plain"}, 400),
    ("POST", "/predict", _JSON | {"Content-Encoding": "gzip"}, 400),
    ("POST", "/predict", _JSON | {"Content-Length": "9" * 30}, 400),
    ("GET", "/predict", {}, 405),
    ("GET", "/nothing", {}, 404),
    ("POST", "/release", _JSON, 401),
    ("POST", "/release", _JSON | {"Authorization": "Bearer \xe9"}, 401),
    ("POST", "/feedback", _JSON, 400),
  ],
)
def test_wrong_heads_are_one_line(served, method, path, headers, status):
  # 10 MB of zeros in a few kilobytes: nothing is decompressed.
  body = gzip.compress(b"0" * 10**7) if "Content-Encoding" in headers else b"{"
  found, content = served.send(path, body if method == "POST" else None, method, headers)
  assert found == status and content.count(b"\n") <= 1, content


@pytest.mark.parametrize(
  ("body", "words"),
  [({}, "must have the key 'id'"), ({"id": 3, "labels": [1]}, "must be the text"),
   ({"id": "x", "labels": [1]}, "no id of an answer"), ({"id": "x"}, "must have the key")],
)  # fmt: skip
def test_wrong_feedback_is_one_line(served, body, words):
  status, content = served.send("/feedback", body)
  assert status == 422 and words in json.loads(content)["error"]


def test_an_address_of_another_machine_is_one_line(served):
  application = web.Web(served.service)
  with refuses("port"):
    web.server(application, host="192.0.2.1", port=8080)


def test_state_is_shown_to_people_and_to_prometheus(served):
  x = data.load("digits")[1].x[:1]
  assert served.send("/predict", {"rows": x.tolist(), "key": "user-1"})[0] == 200
  status, body = served.send("/health", None, "GET")
  health = json.loads(body)
  assert status == 200 and health["run"] == "run0" and health["row_exact"] is True
  assert health["privacy"]["stream_relation"] == "replace_one"
  assert health["privacy"]["training_epsilon"] == served.service.old.result["epsilon"]
  status, body = served.send("/metrics", None, "GET")
  text = body.decode()
  assert 'dpjax_requests_total{path="/predict",status="200"}' in text
  # Exact counts of answers would pass by the noise of --drift_epsilon.
  assert "predicted" not in text or "dpjax_psi" in text


def _raw(served, *parts, wait=0.0, shut=False, reset=True):
  """Sends bytes as they are; returns what comes back until the other side closes.

  With `reset=False` it raises ConnectionResetError where the other side resets the connection.
  """
  with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
    for part in parts:
      connection.sendall(part)
      time.sleep(wait)
    if shut:
      connection.shutdown(socket.SHUT_WR)
    found = b""
    try:
      while chunk := connection.recv(65536):
        found += chunk
    except ConnectionResetError:
      if not reset:
        raise
    return found


def _head(length, path=b"/predict"):
  return (
    b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: " + str(length).encode() + b"\r\n\r\n"
  )


def test_slow_and_half_closed_clients_neither_hang_nor_lose_an_answer(served):
  body = json.dumps({"rows": [_ROW]}).encode()
  # The client closes its side at once, and still gets the answer.
  assert _raw(served, _head(len(body)) + body, shut=True).startswith(b"HTTP/1.1 200")
  # A head that dribbles in is cut off by its deadline, and so is a connection without any.
  began = time.monotonic()
  found = _raw(served, b"POST /predict HTTP/1.1\r\n", b"Host: x\r\n", wait=0.3)
  assert b" 400" in found and b"did not arrive whole" in found
  assert _raw(served) == b""
  # A body that does not come is refused by its deadline.
  found = _raw(served, _head(len(body)) + body[:10])
  assert found.startswith(b"HTTP/1.1 503") and b"did not arrive" in found
  assert time.monotonic() - began < 15
  # A body that ends early, no HTTP, and a head without end.
  _raw(served, _head(len(body)) + body[:10], shut=True)
  assert b"400" in _raw(served, b"\x00\xff\r\n\r\n")
  assert b"200" not in _raw(served, b"GET /health HTTP/1.1\r\nX: " + b"a" * 100_000)
  assert served.send("/predict", {"rows": [_ROW]})[0] == 200


@pytest.mark.parametrize(
  ("head", "status"),
  [
    (_head(10**30), b"400"),
    (_head(10**9), b"413"),
    (_head(150_001, b"/release"), b"401"),
    (_head(150_001).replace(b"application/json", b"text/plain"), b"400"),
  ],
)
def test_an_early_refusal_is_read_whole_while_the_body_is_on_its_way(served, head, status):
  # A socket that was closed at once would answer the second and later parts by a reset.
  parts = (head, b"{", *[b"x" * 50_000] * 3)
  found = _raw(served, *parts, wait=0.05, reset=False)
  assert found.startswith(b"HTTP/1.1 " + status)
  assert b'{"error": "must' in found or b'{"error": "Invalid HTTP request' in found


@pytest.mark.parametrize(
  "head",
  [
    b"GET /nope HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"POST /nope HTTP/1.0\r\n\r\n",
    b"POST /nope HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1\r\n\r\n",
    b"CONNECT /nope HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
  ],
)
def test_more_than_a_request_does_not_reset_its_answer(served, head):
  answer = _raw(
    served, head, *[b"GET /health HTTP/1.1\r\n" * 2000] * 3, wait=0.05, reset=False
  )
  assert answer.startswith(b"HTTP/1.1 40") and answer.count(b"HTTP/1.1") == 1
  assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


class _Errors(logging.Handler):
  """Keeps what a server logs as an error."""

  def __init__(self):
    super().__init__(logging.ERROR)
    self.lines = []

  def emit(self, record):
    self.lines.append(f"{record.getMessage()} {record.exc_info}")

  def __enter__(self):
    for name in ("uvicorn.error", "asyncio"):
      logging.getLogger(name).addHandler(self)
    return self

  def __exit__(self, *exc):
    for name in ("uvicorn.error", "asyncio"):
      logging.getLogger(name).removeHandler(self)


def _connected(served, content):
  connection = socket.create_connection(("127.0.0.1", served.port), timeout=20)
  connection.sendall(content)
  return connection


def _reset(connection):
  linger = struct.pack("ii", 1, 0)
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
  connection.close()


def _all_gone(served, seconds=15):
  end = time.monotonic() + seconds
  while served.server.server_state.connections and time.monotonic() < end:
    time.sleep(0.05)
  return not served.server.server_state.connections


def test_clients_that_reset_leave_no_connection_and_no_traceback(served):
  """Attacks of a helper: closing such a socket raised an error, and it stayed open for ever."""
  body = json.dumps({"rows": [_ROW] * 32}).encode()
  refused = (
    b"POST /nope HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 500000\r\n\r\n"
  )
  close = b"Connection: close\r\nContent-Length"
  with _Errors() as errors:
    half_closed = [_connected(served, _head(100) + b"{") for _ in range(5)]
    for connection in half_closed:
      connection.shutdown(socket.SHUT_WR)
      assert connection.recv(4096)
      _reset(connection)
    for size in (10, 100_000) * 100:
      connection = _connected(served, refused)
      with contextlib.suppress(ConnectionError):
        connection.sendall(b"x" * size)
      assert connection.recv(1)
      _reset(connection)
    # The request is refused while its answer is computed.
    for wait in np.linspace(0, 0.01, 20):
      connection = _connected(
        served, _head(len(body)).replace(b"Content-Length", close) + body
      )
      time.sleep(wait)
      with contextlib.suppress(ConnectionError):
        connection.sendall(b"more")
        assert connection.recv(4096)
      connection.close()
    # A chunk that is none, after the answer and at once.
    chunked = b"POST /nope HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = _raw(served, chunked, b"zz\r\n", wait=0.2, reset=False)
    assert answer.startswith(b"HTTP/1.1 404") and answer.count(b"HTTP/1.1") == 1
    assert b" 40" in _raw(served, chunked + b"zz\r\n")
    assert _all_gone(served)
  assert errors.lines == []
  assert served.send("/predict", {"rows": [_ROW]})[0] == 200


def test_connections_beyond_the_limit_are_one_line(served, monkeypatch):
  monkeypatch.setattr(web.PatientProtocol, "most_connections", 3)
  idle = [_connected(served, b"") for _ in range(3)]
  try:
    answer = _raw(served, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", reset=False)
    assert answer.startswith(b"HTTP/1.1 503")
    assert "too many" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
  finally:
    for connection in idle:
      connection.close()
  assert _all_gone(served) and served.send("/health", None, "GET")[0] == 200


def test_a_refused_client_that_never_stops_is_cut_off(served):
  began = time.monotonic()
  with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
    connection.sendall(_head(10**30))
    with pytest.raises(ConnectionError):
      while time.monotonic() - began < 15:
        connection.sendall(b"x" * 1_000)
        time.sleep(0.01)
  assert time.monotonic() - began < 15


def test_many_at_once_are_answered_or_told_to_come_again(served, runs):
  """More rows than the queue holds: 200 with right logits, or 429, and nothing else."""
  x = data.load("digits")[1].x[:30]
  found = []

  def send():
    found.append(served.send("/predict", {"rows": x.tolist()}))

  threads = [threading.Thread(target=send) for _ in range(12)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(found) == 12 and {status for status, _ in found} <= {200, 429}
  for status, body in found:
    if status == 200:
      np.testing.assert_array_equal(json.loads(body)["logits"], runs[0](x))
  assert served.service.batcher.rows == 0


_OPERATOR = _JSON | {"Authorization": f"Bearer {_TOKEN}"}


@pytest.mark.parametrize(
  "run",
  [
    "a" * 5000,
    "/".join(["a" * 200] * 30),
    "\u00e9" * 300,
    "a\0b",
    "",
    "/",
    "/dev/null",
    "\n",
  ],
)
def test_a_release_of_a_bad_path_is_one_line(served, run):
  status, content = served.send(
    "/release", {"action": "offer", "run": run}, headers=_OPERATOR
  )
  assert status == 422 and content.count(b"\n") == 1
  assert "run" in json.loads(content)["error"]


def test_a_step_of_a_release_that_the_disk_does_not_take_is_one_line(
  served, runs, monkeypatch
):
  def write(kind, **values):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with monkeypatch.context() as patch:
    patch.setattr(served.journal, "write", write)
    body = {"action": "offer", "run": runs[1].folder}
    status, content = served.send("/release", body, headers=_OPERATOR)
  assert status == 503 and "No space left" in json.loads(content)["error"]
  assert served.service.new is None


@pytest.mark.slow
def test_a_client_that_does_not_read_its_answers_is_let_go(served):
  """Clients send many requests at once and read nothing: uvicorn would wait for ever."""
  held = []
  with _Errors() as errors:
    for _ in range(5):
      connection = socket.socket()
      connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2304)
      connection.connect(("127.0.0.1", served.port))
      held.append(connection)
      connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 300)
    time.sleep(0.2)
    num_held = len(served.server.server_state.connections)
    assert num_held == 5 and _all_gone(served, seconds=10)
    for connection in held:
      connection.close()
  assert errors.lines == []
  # A client that reads slowly, and does read, gets all.
  answer = _raw(served, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50, wait=0.3)
  assert answer.count(b"HTTP/1.1 200") == 50


def test_odd_bytes_in_a_head_get_one_line_of_json(served):
  """Heads of random damage: an answer comes, whatever the client sends."""
  rng = np.random.default_rng(0)
  good = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
  for _ in range(40):
    head = bytearray(good)
    for place in rng.integers(0, len(good), rng.integers(1, 4)):
      head[place] = int(rng.integers(0, 256))
    answer = _raw(served, bytes(head), shut=True)
    assert answer.startswith(b"HTTP/1.1 "), bytes(head)
    assert isinstance(json.loads(answer.partition(b"\r\n\r\n")[2]), dict)


def test_a_model_is_exchanged_while_requests_run(served, runs):
  """The operator's token is needed; every request is answered by one model or the other."""
  token = _OPERATOR
  for body, words in (
    ({"action": "offer"}, "must be the folder"),
    ({"action": "offer", "run": "/no/such/run"}, "there is none"),
    ({"action": "install"}, "must be of offer"),
    ({"action": "promote"}, "needs a release"),
    ({"action": "roll_back"}, "needs a release"),
  ):
    status, content = served.send("/release", body, headers=token)
    assert status == 422 and words in json.loads(content)["error"]
  x = data.load("digits")[1].x
  logits = {run.name: run(x) for run in runs}
  names = []
  stop = threading.Event()

  def send(seed):
    rng = np.random.default_rng(seed)
    while not stop.is_set():
      place = int(rng.integers(len(x)))
      status, body = served.send("/predict", {"rows": x[place : place + 1].tolist()})
      answer = json.loads(body)
      assert status == 200
      np.testing.assert_array_equal(answer["logits"][0], logits[answer["run"]][place])
      names.append(answer["run"])

  threads = [threading.Thread(target=send, args=(seed,)) for seed in range(3)]
  for thread in threads:
    thread.start()
  try:
    body = {"action": "offer", "run": runs[1].folder}
    assert served.send("/release", body, headers=token)[0] == 200
    end = time.monotonic() + 30
    while served.service.old is not runs[1] and time.monotonic() < end:
      time.sleep(0.05)
    # Promoted by its rule, in two stages.
    assert served.service.old is runs[1]
    time.sleep(0.3)
  finally:
    stop.set()
    for thread in threads:
      thread.join()
  assert set(names) == {"run0", "run1"} and names[-1] == "run1"
  body = {"action": "offer", "run": runs[0].folder}
  assert served.send("/release", body, headers=token)[0] == 200
  assert served.send("/release", {"action": "roll_back"}, headers=token)[0] == 200
  assert served.service.old is runs[1] and served.service.new is None
