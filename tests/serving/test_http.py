"""Right and wrong requests over a real socket: each wrong one is one clear line."""

import errno
import gzip
import json
import os
import threading
import time

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from dpjax import data
from dpjax.serving import http as web
from tests.refuses import refuses
from tests.serving.served import BYTES, JSON, ROW, TOKEN, Served, head, raw


@pytest.fixture(scope="module")
def served(runs, tmp_path_factory):
  found = Served(tmp_path_factory.mktemp("service"), runs)
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
  "too many bytes": (b" " * (BYTES + 1), 413, f"at most {BYTES} bytes"),
  "no rows": ({"row": []}, 422, "must have the key 'rows'"),
  "empty rows": ({"rows": []}, 422, "at least one row"),
  "rows of nothing": ({"rows": [[]]}, 422, "must be of shape [n, 8, 8, 1]"),
  "rows are a text": ({"rows": "digits"}, 422, "must be a list"),
  "rows are a number": ({"rows": 3}, 422, "must be a list"),
  "an unknown key": ({"rows": [ROW], "model": "x"}, 422, "unknown key 'model'"),
  "texts": (_rows("0.5"), 422, "must hold numbers alone"),
  "true": (_rows(True), 422, "must hold numbers alone"),
  "null": (_rows(None), 422, "must hold numbers alone"),
  "objects": ({"rows": [{"age": 3}]}, 422, "no table"),
  "a huge integer": (_rows(10**400), 422, "at most 64 bits"),
  "a huge float": (b'{"rows": [[[[1e999]]]]}', 422, "must be of shape"),
  "beyond float32": (_rows(1e300), 422, "finite in float32"),
  "bytes without encoding": (_rows(200), 422, "must lie in [0, 1]"),
  "below zero": (_rows(-0.1), 422, "must lie in [0, 1]"),
  "ragged": ({"rows": [ROW, ROW[:3]]}, 422, "rectangular"),
  "another shape": ({"rows": [[0.5] * 64]}, 422, "must be of shape [n, 8, 8, 1]"),
  "too many rows": ({"rows": [[]] * 65}, 413, "at most 64"),
  "a key that is a number": ({"rows": [ROW], "key": 7}, 422, "key: must be a text"),
  "an empty key": ({"rows": [ROW], "key": ""}, 422, "key: must be a text"),
  "a long key": ({"rows": [ROW], "key": "k" * 300}, 422, "key: must be a text"),
  "another encoding": ({"rows": [ROW], "encoding": "png"}, 422, "must be 'uint8'"),
  "floats as bytes": ({"rows": [ROW], "encoding": "uint8"}, 422, "integers in [0, 255]"),
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
    ("POST", "/predict", JSON | {"Content-Encoding": "gzip"}, 400),
    ("POST", "/predict", JSON | {"Content-Length": "9" * 30}, 400),
    ("GET", "/predict", {}, 405),
    ("GET", "/nothing", {}, 404),
    ("POST", "/release", JSON, 401),
    ("POST", "/release", JSON | {"Authorization": "Bearer \xe9"}, 401),
    ("POST", "/feedback", JSON, 400),
  ],
)
def test_wrong_heads_are_one_line(served, method, path, headers, status):
  # 10 MB of zeros in a few kilobytes: nothing is decompressed.
  body = gzip.compress(b"0" * 10**7) if "Content-Encoding" in headers else b"{"
  # The server answers the head and closes. A body that comes later would reset the connection.
  body = b"" if "Content-Length" in headers else body
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
  assert (
    health["privacy"]["training_epsilon"] == served.service.releases.old.result["epsilon"]
  )
  status, body = served.send("/metrics", None, "GET")
  text = body.decode()
  assert 'dpjax_requests_total{path="/predict",status="200"}' in text
  # Exact counts of answers would pass by the noise of --drift_epsilon.
  assert "predicted" not in text or "dpjax_psi" in text


@pytest.mark.slow
def test_a_body_that_does_not_come_is_refused_by_its_deadline(served):
  answer = raw(served, head(1000) + b"{")
  assert answer.startswith(b"HTTP/1.1 503")
  assert b"did not arrive" in answer


def test_what_is_no_http_is_refused_and_the_service_goes_on(served):
  """Heads of random damage, and bodies that end early or in the middle of a chunk."""
  rng = np.random.default_rng(0)
  good = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
  for _ in range(40):
    damaged = bytearray(good)
    for place in rng.integers(0, len(good), rng.integers(1, 4)):
      damaged[place] = int(rng.integers(0, 256))
    raw(served, bytes(damaged), shut=True)
  chunked = b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
  assert b" 400" in raw(served, chunked + b"zz\r\n")
  assert b" 400" in raw(served, b"\x00\xff\r\n\r\n")
  raw(served, head(1000) + b"{", shut=True)
  assert b"200" not in raw(served, b"GET /health HTTP/1.1\r\nX: " + b"a" * 100_000)
  assert served.send("/predict", {"rows": [ROW]})[0] == 200


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


_OPERATOR = JSON | {"Authorization": f"Bearer {TOKEN}"}


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
  assert served.service.releases.new is None


@pytest.mark.slow
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
    while served.service.releases.old is not runs[1] and time.monotonic() < end:
      time.sleep(0.05)
    # Promoted by its rule, in two stages.
    assert served.service.releases.old is runs[1]
    time.sleep(0.3)
  finally:
    stop.set()
    for thread in threads:
      thread.join()
  assert set(names) == {"run0", "run1"} and names[-1] == "run1"
  body = {"action": "offer", "run": runs[0].folder}
  assert served.send("/release", body, headers=token)[0] == 200
  assert served.send("/release", {"action": "roll_back"}, headers=token)[0] == 200
  assert served.service.releases.old is runs[1] and served.service.releases.new is None
