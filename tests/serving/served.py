"""A service over a real socket, and clients that send bytes as they are."""

import asyncio
import http.client
import json
import logging
import socket
import struct
import threading
import time

import numpy as np

from dpjax.serving import Predictor, Service, ServiceSettings, StageRule, drift
from dpjax.serving import http as web
from dpjax.serving.journal import ServiceJournal

TOKEN = "sixteen letters.."
ROW = np.full((8, 8, 1), 0.5).tolist()
JSON = {"Content-Type": "application/json"}
BYTES = 200_000


class Served:
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
    application = web.Web(self.service, most_bytes=BYTES, token=TOKEN, load=self._load)

    def ready(host, port):
      self.port = port
      self.ready.set()

    # `serve` would take signals, which a thread cannot.
    server = web.server(application, host="127.0.0.1", port=0, ready=ready)
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
      connection.request(method, path, content, JSON if headers is None else headers)
      response = connection.getresponse()
      return response.status, response.read()
    finally:
      connection.close()


def raw(served, *parts, wait=0.0, shut=False, reset=True):
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


def head(length, path=b"/predict"):
  return (
    b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: " + str(length).encode() + b"\r\n\r\n"
  )


class Errors(logging.Handler):
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


def connected(served, content):
  connection = socket.create_connection(("127.0.0.1", served.port), timeout=20)
  connection.sendall(content)
  return connection


def reset(connection):
  linger = struct.pack("ii", 1, 0)
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
  connection.close()


def all_gone(served, seconds=15):
  end = time.monotonic() + seconds
  while served.server.server_state.connections and time.monotonic() < end:
    time.sleep(0.05)
  return not served.server.server_state.connections
