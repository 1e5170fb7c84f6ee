"""The proxy of docs/serve.md in front of a service: slow and hostile clients are its work."""

import json
import pathlib
import re
import shutil
import socket
import subprocess
import time
import types

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from tests.serving.served import ROW, Errors, Served, all_gone, connected, head, raw, reset

_NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")
_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "serve.md"


@pytest.fixture(scope="module")
def served(runs, tmp_path_factory):
  found = Served(tmp_path_factory.mktemp("service"), runs)
  yield found
  found.close()


@pytest.fixture(scope="module")
def proxy(served, tmp_path_factory):
  """The configuration of the page, with ports of this test and shorter deadlines."""
  if _NGINX is None:
    pytest.skip("nginx is not installed (apt-get install nginx-light)")
  folder = tmp_path_factory.mktemp("nginx")
  server = re.search(r"```nginx\n(.*?)```", _PAGE.read_text(), re.S)[1]
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  for before, after in [
    ("127.0.0.1:8080", f"127.0.0.1:{served.port}"),
    ("listen 80;", f"listen 127.0.0.1:{port};"),
    ("10s", "1s"),
    ("4m", "200k"),
  ]:
    assert before in server
    server = server.replace(before, after)
  places = "".join(
    f"{name}_temp_path {folder}/{name};\n"
    for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
  )
  (folder / "nginx.conf").write_text(
    f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors;\n"
    f"events {{}}\nhttp {{ access_log off;\n{places}{server}}}\n"
  )
  running = subprocess.Popen([_NGINX, "-p", folder, "-c", folder / "nginx.conf"])
  end = time.monotonic() + 20
  while time.monotonic() < end and running.poll() is None:
    with socket.socket() as tried:
      if tried.connect_ex(("127.0.0.1", port)) == 0:
        break
    time.sleep(0.05)
  assert running.poll() is None, (folder / "errors").read_text()
  yield types.SimpleNamespace(port=port)
  running.terminate()
  running.wait(20)


def _send(proxy, path, body=None, method="POST"):
  return Served.send(proxy, path, body, method)


def _error(answer):
  return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_answers_go_through_bit_by_bit(proxy, runs):
  status, content = _send(proxy, "/predict", {"rows": [ROW] * 3})
  assert status == 200
  logits = np.asarray(json.loads(content)["logits"], np.float32)
  np.testing.assert_array_equal(logits, runs[0](np.asarray([ROW] * 3, np.float32)))
  status, content = _send(proxy, "/predict", {"rows": []})
  assert status == 422
  assert json.loads(content)["error"]


def test_the_operators_door_is_shut(proxy):
  status, content = _send(proxy, "/release", {"action": "promote"})
  assert status == 403
  assert json.loads(content)["error"]


def test_a_client_that_closes_its_side_gets_its_answer(proxy):
  body = json.dumps({"rows": [ROW]}).encode()
  assert raw(proxy, head(len(body)) + body, shut=True).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
  "sent",
  [
    b"",
    b"POST /predict HTTP/1.1\r\nHost: x\r\n",
    head(1000) + b"{",
  ],
  ids=["nothing", "half a head", "half a body"],
)
def test_what_does_not_come_is_cut_off_and_never_reaches_the_service(proxy, served, sent):
  began = time.monotonic()
  answer = raw(proxy, sent)
  assert b" 200" not in answer
  assert time.monotonic() - began < 10
  assert all_gone(served)


@pytest.mark.cases(slow=["210000"])
@pytest.mark.parametrize("length", [210_000, 10**30])
def test_a_body_that_is_too_large_is_one_line(proxy, length):
  answer = raw(proxy, head(length) + b"x" * 1000)
  assert re.match(rb"HTTP/1.1 4(13|00)", answer)
  assert _error(answer)


def test_clients_that_reset_leave_no_connection_and_no_traceback(proxy, served):
  body = json.dumps({"rows": [ROW] * 32}).encode()
  with Errors() as errors:
    for wait in np.linspace(0, 0.01, 40):
      connection = connected(proxy, head(len(body)) + body)
      time.sleep(wait)
      reset(connection)
    for _ in range(40):
      reset(connected(proxy, head(len(body)) + body[:20]))
    assert all_gone(served)
  assert errors.lines == []
  assert _send(proxy, "/predict", {"rows": [ROW]})[0] == 200


def test_clients_that_do_not_read_hold_no_connection_of_the_service(proxy, served):
  held = []
  for _ in range(5):
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2304)
    connection.connect(("127.0.0.1", proxy.port))
    held.append(connection)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 300)
  assert all_gone(served)
  for connection in held:
    connection.close()


def test_odd_bytes_in_a_head_never_end_the_service(proxy):
  rng = np.random.default_rng(0)
  good = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
  for _ in range(40):
    damaged = bytearray(good)
    for place in rng.integers(0, len(good), rng.integers(1, 4)):
      damaged[place] = int(rng.integers(0, 256))
    answer = raw(proxy, bytes(damaged), shut=True)
    assert b" 500" not in answer[:16], (bytes(damaged), answer)
  assert _send(proxy, "/health", None, "GET")[0] == 200
