"""A service over HTTP: strict JSON in, JSON out, one line for every error.

| request                   | answer                                                        |
| ------------------------- | ------------------------------------------------------------- |
| POST /predict             | {"rows": [...], "key": "user-7"} -> id, run, classes, ...     |
| POST /feedback            | {"id": "...", "labels": [...]} -> how many were right         |
| GET /health, GET /metrics | state as JSON; counters for Prometheus                        |
| POST /release             | {"action": "offer", "run": "runs/Y"}, with the operator's token |

400: the body is no JSON object, or is not declared as JSON. 401, 403: no permission to release.
404, 405: no such path or method. 413: the body is too large, or has too many rows. 422: the content
of the JSON is refused, such as rows that are no input of the model. 429: the queue is full. 500: an
error of the service. 503: no body or no answer by the deadline, a failed model, or a stopping
service. Nothing is decompressed, so a small body cannot grow. Clients that send or read slowly are
the work of the proxy in front (docs/serve.md has one); only a body has a deadline here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.util
import json
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax import data
from dpjax.experiments.run import writers
from dpjax.serving.batching import Closed, Full, Late
from dpjax.serving.predictor import Predictor
from dpjax.serving.service import ModelFailed, Service
from dpjax.validate import UserError

# Libraries of the extra `serve` that are not installed. The module can be imported without them,
# since tools import every module.
MISSING = [
  name
  for name in ("starlette", "uvicorn", "prometheus_client")
  if importlib.util.find_spec(name) is None
]
if TYPE_CHECKING or not MISSING:
  import prometheus_client
  import uvicorn
  from starlette.applications import Starlette
  from starlette.exceptions import HTTPException
  from starlette.requests import ClientDisconnect, Request
  from starlette.responses import Response
  from starlette.routing import Route

_TICK_SECONDS = 1.0
# Beyond these, uvicorn answers 503.
_MOST_CONNECTIONS = 2048
_MOST_KEY = 256
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class _Refused(Exception):
  """Raised for a request that gets one line of error as its answer.

  Args:
    status: HTTP status.
    message: the line.
  """

  def __init__(self, status: int, message: str):
    super().__init__(message)
    self.status = status


def _json(content: Any, status: int = 200, **headers: str) -> Response:
  text = json.dumps(content, allow_nan=False, ensure_ascii=False)
  named = {name.replace("_", "-"): value for name, value in headers.items()}
  return Response(f"{text}\n", status, named, "application/json")


def _refusal(status: int, message: str) -> Response:
  retry = {"retry_after": "1"} if status in (429, 503) else {}
  return _json({"error": message}, status, **retry)


def parse(body: bytes) -> dict[str, Any]:
  """Returns the JSON object of a request, parsed strictly.

  Raises:
    _Refused: the body is no text, not JSON or no object; it is nested too deeply; it holds NaN,
      infinity, a key twice, or an escape for half of a surrogate pair. The status is 400.
  """

  def constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")

  def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(items)
    if len(members) < len(items):
      raise ValueError("a key stands twice")
    return members

  try:
    # `json.loads` of bytes guesses UTF-16 and UTF-32, too, and takes halves of surrogate pairs.
    text = body.decode("utf-8-sig")
    value = json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
    # JSON allows half of a surrogate pair, but such a text can be neither hashed nor written.
    if b"\\u" in body:
      json.dumps(value, ensure_ascii=False).encode()
  # ValueError is also raised for bytes that are no text, and for integers of too many digits.
  except (ValueError, RecursionError) as error:
    raise _Refused(400, f"must be JSON ({str(error)[:120]})") from None
  if not isinstance(value, dict):
    raise _Refused(400, "must be a JSON object")
  return value


def _fields(body: dict[str, Any], needed: tuple[str, ...], also: tuple[str, ...]) -> None:
  """Raises _Refused unless the body has all keys of `needed`, and otherwise only keys of `also`."""
  for name in needed:
    if name not in body:
      raise _Refused(422, f"must have the key {name!r}")
  for name in body:
    if name not in (*needed, *also):
      known = ", ".join((*needed, *also))
      raise _Refused(422, f"has an unknown key {name[:60]!r}; must be of {known}")


class Web:
  """The HTTP application of a service.

  Args:
    service: service that answers.
    most_bytes: largest size of a body, in bytes.
    token: bearer token that POST /release must bring; None: nobody may release.
    load: function that loads a run from its folder.
  """

  def __init__(
    self,
    service: Service,
    *,
    most_bytes: int = 2**22,
    token: str | None = None,
    load: Callable[[str], Predictor] = Predictor.load,
  ):
    if MISSING:
      raise UserError(
        f"a service over HTTP needs {MISSING[0]}; pip install -e '.[serve]' in dpjax's clone"
      )
    self.service = service
    self._most_bytes = most_bytes
    self._token = token
    self._load = load
    registry = prometheus_client.CollectorRegistry()
    self._registry = registry
    self._requests = prometheus_client.Counter(
      "dpjax_requests_total",
      "Requests by path and status.",
      ("path", "status"),
      registry=registry,
    )
    self._rows = prometheus_client.Counter(
      "dpjax_rows_total", "Rows that were answered, by run.", ("run",), registry=registry
    )
    self._latency = prometheus_client.Histogram(
      "dpjax_request_seconds", "Seconds of a request.", buckets=_SECONDS, registry=registry
    )
    self._gauges = {
      name: prometheus_client.Gauge(f"dpjax_{name}", text, labels, registry=registry)
      for name, text, labels in (
        ("psi", "PSI of the last window.", ("of",)),
        ("alarm", "1 for a warning, 2 for an alarm.", ("of",)),
        ("waiting_rows", "Rows in the queue.", ()),
        ("release_share", "Share of requests of the new model.", ()),
        ("stream_epsilon", "Epsilon of all windows, +Inf without noise.", ()),
        ("accuracy", "Accuracy of the last window of feedback.", ()),
      )
    }
    paths = {
      "/predict": (self._predict, "POST"),
      "/feedback": (self._feedback, "POST"),
      "/release": (self._release, "POST"),
      "/health": (self._health, "GET"),
      "/metrics": (self._metrics, "GET"),
    }
    self.app = Starlette(
      routes=[
        Route(path, self._answer(path, handler), methods=[method])
        for path, (handler, method) in paths.items()
      ],
      exception_handlers={HTTPException: self._of_routing, Exception: self._of_bug},
      lifespan=self._lifespan,
    )

  @contextlib.asynccontextmanager
  async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
    stopping = asyncio.Event()
    ticking = asyncio.create_task(self._tick_until(stopping))
    try:
      yield
    finally:
      await self.service.batcher.close(seconds=self.service.settings.deadline)
      stopping.set()
      # The task is not cancelled: it may draw noise for a window that is accounted already.
      await ticking

  async def _tick_until(self, stopping: asyncio.Event) -> None:
    """Calls `Service.tick` once a second until `stopping` is set, and then a last time, so that no
    counts are lost."""
    while True:
      is_last = stopping.is_set()
      try:
        await self.service.tick()
        self.service.alarms.raised.pop("journal", None)
      # A full disk stops the journal, but not the answers. /health and the log report it.
      except Exception as error:
        writers.warn(f"the journal stands still: {type(error).__name__}: {error!s:.200}")
        self.service.alarms.raised["journal"] = {
          "level": "alarm",
          "value": 1.0,
          "bound": 0.0,
        }
      if is_last:
        return
      with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stopping.wait(), _TICK_SECONDS)

  async def _of_routing(self, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refusal(
      error.status_code, f"{request.method} {request.url.path[:80]}: {error.detail}"
    )

  async def _of_bug(self, request: Request, error: Exception) -> Response:
    # The log has the traceback; the client gets only the type of the error.
    return _refusal(500, f"an error of the service ({type(error).__name__})")

  def _answer(
    self, path: str, handler: Callable[[Request], Awaitable[Response]]
  ) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
      began = time.perf_counter()
      try:
        response = await handler(request)
      except Exception as error:
        status, message = self._status_of(error)
        response = _refusal(status, " ".join(message.split())[:400])
      self._requests.labels(path, str(response.status_code)).inc()
      if path == "/predict":
        self._latency.observe(time.perf_counter() - began)
      return response

    return answer

  def _status_of(self, error: Exception) -> tuple[int, str]:
    """Returns (HTTP status, line of the answer) for an expected error; raises any other one."""
    match error:
      case _Refused():
        return error.status, str(error)
      case UserError():
        return 422, str(error)
      case Full():
        return 429, "the queue is full; send it again later"
      case Closed():
        return 503, "the service is stopping"
      case Late():
        seconds = self.service.settings.deadline
        return 503, f"no answer within {seconds:g} s; send it again later"
      case ModelFailed():
        return 503, f"the model failed: {error!s:.200}"
      # The client has gone, so nobody reads this answer.
      case ClientDisconnect():
        return 400, "the body ended early"
      # JSON that the parser accepts may still be nested too deeply for the stack in later checks.
      case RecursionError():
        return 400, "must be JSON of fewer levels"
      # A promotion or another step of a release that the disk does not take has no effect.
      case OSError():
        return 503, f"the journal cannot be written ({error.strerror}); see /health"
    raise error

  async def _body(self, request: Request) -> dict[str, Any]:
    """Reads and parses the body of a request. Raises _Refused where `parse` does, and if the body
    is not declared as JSON, is compressed, is too large, or comes after the deadline."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A browser lets a page send JSON to another host only if that host allows it.
    if kind != "application/json":
      raise _Refused(400, "must have Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
      raise _Refused(400, "must not be compressed (Content-Encoding)")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > self._most_bytes:
      raise _Refused(413, f"must have a body of at most {self._most_bytes} bytes")
    body = bytearray()
    try:
      async with asyncio.timeout(self.service.settings.deadline):
        async for chunk in request.stream():
          body += chunk
          if len(body) > self._most_bytes:
            raise _Refused(413, f"must have a body of at most {self._most_bytes} bytes")
    except TimeoutError:
      raise _Refused(503, "the body did not arrive by the deadline") from None
    return parse(bytes(body))

  async def _predict(self, request: Request) -> Response:
    body = await self._body(request)
    _fields(body, ("rows",), ("key", "encoding"))
    key = body.get("key")
    if key is not None and not (isinstance(key, str) and 0 < len(key) <= _MOST_KEY):
      raise _Refused(422, f"key: must be a text of 1 to {_MOST_KEY} characters")
    model = self.service.releases.old
    x = model.raw(self._rows_of(body["rows"], body.get("encoding"), model))
    # A request without rows has no answer, even if `raw` accepts it.
    if not len(x):
      raise _Refused(422, "rows: must be a list of at least one row")
    answer = await self.service.predict(x, key)
    self._rows.labels(answer.run).inc(len(x))
    reply: dict[str, Any] = {"id": answer.id, "run": answer.run}
    inputs = model.inputs
    answers = answer.answers.tolist()
    if isinstance(inputs.target, data.Interval):
      reply["values"] = answers
    elif inputs.target is not None:
      reply["labels"] = [
        [name for name, holds in zip(inputs.labels, row) if holds] for row in answers
      ]
    else:
      reply["classes"] = answers
      reply["labels"] = [inputs.labels[place] for place in answers]
    # A float64 holds every float32 exactly, so a reader gets the same bits.
    reply["logits"] = answer.logits.astype(np.float64).tolist()
    return _json(reply)

  def _rows_of(self, rows: Any, encoding: Any, model: Predictor) -> Any:
    """Returns the rows of a request after checks that NumPy does not make. Raises _Refused."""
    if not isinstance(rows, list) or not rows:
      raise _Refused(422, "rows: must be a list of at least one row")
    if len(rows) > self.service.settings.max_rows:
      raise _Refused(413, f"rows: must be at most {self.service.settings.max_rows}")
    if encoding not in (None, "uint8"):
      raise _Refused(422, "encoding: must be 'uint8' (bytes of images), or left out")
    if all(isinstance(row, dict) for row in rows):
      if model.inputs.declaration is None:
        raise _Refused(
          422, "rows: must be arrays of numbers; the model's data are no table"
        )
      return rows
    if not _only_numbers(rows):
      raise _Refused(422, "rows: must hold numbers alone")
    return rows if encoding is None else _bytes_of(rows, model)

  async def _feedback(self, request: Request) -> Response:
    body = await self._body(request)
    _fields(body, ("id", "labels"), ())
    if not isinstance(body["id"], str):
      raise _Refused(422, "id: must be the text that /predict gave")
    return _json({"right": self.service.feedback(body["id"], body["labels"])})

  async def _release(self, request: Request) -> Response:
    if self._token is None:
      raise _Refused(403, "releases need --token_file")
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    # The comparison takes constant time, so it does not reveal how many characters are right.
    if scheme.lower() != "bearer" or not hmac.compare_digest(
      token.encode(), self._token.encode()
    ):
      raise _Refused(
        401, "must bring the token of --token_file: Authorization: Bearer TOKEN"
      )
    body = await self._body(request)
    _fields(body, ("action",), ("run",))
    if body["action"] == "offer":
      if not isinstance(body.get("run"), str):
        raise _Refused(422, "run: must be the folder of a finished run")
      # The model is loaded and compiled in a thread, so that requests are answered meanwhile.
      try:
        new = await asyncio.to_thread(self._load, body["run"])
      except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _Refused(422, f"run: cannot be read ({reason})") from None
      self.service.offer(new)
    elif body["action"] == "promote":
      self.service.promote("asked for")
    elif body["action"] == "roll_back":
      self.service.roll_back("asked for")
    else:
      raise _Refused(422, "action: must be of offer, promote, roll_back")
    return _json(self.service.releases.state() or {"run": self.service.releases.old.name})

  async def _health(self, request: Request) -> Response:
    return _json(self.service.health())

  async def _metrics(self, request: Request) -> Response:
    service = self.service
    for name in ("psi", "alarm"):
      self._gauges[name].clear()
    for name, value in service.windows.psi.items():
      self._gauges["psi"].labels(name).set(value)
    for name, alarm in service.alarms.raised.items():
      self._gauges["alarm"].labels(name).set(1 if alarm["level"] == "warning" else 2)
    self._gauges["waiting_rows"].set(service.batcher.rows)
    self._gauges["release_share"].set(
      service.releases.rollout.share if service.releases.rollout else 0
    )
    self._gauges["stream_epsilon"].set(service.windows.stream_epsilon)
    self._gauges["accuracy"].set(service.windows.accuracy)
    content = prometheus_client.generate_latest(self._registry)
    return Response(content, media_type=prometheus_client.CONTENT_TYPE_LATEST)


def _bytes_of(rows: list[Any], model: Predictor) -> np.ndarray:
  """Returns the pixels of images as uint8. The model divides them by 255, as training did. Raises
  _Refused for numbers other than integers in [0, 255], and for a model whose inputs are not images
  in [0, 1]."""
  try:
    wide = np.asarray(rows)
  except (ValueError, OverflowError):
    raise _Refused(422, "rows: must be a rectangular array of numbers") from None
  if wide.dtype.kind not in "iu" or not wide.size or wide.min() < 0 or wide.max() > 255:
    raise _Refused(422, "rows: must be integers in [0, 255] with encoding='uint8'")
  if not model.inputs.unit_range:
    raise _Refused(422, "encoding: needs a model of images in [0, 1]")
  return wide.astype(np.uint8)


def _only_numbers(value: Any) -> bool:
  """Returns whether nested lists hold only numbers. NumPy alone would read true as 1."""
  if isinstance(value, list):
    return all(map(_only_numbers, value))
  return type(value) in (int, float)


def server(
  web: Web,
  *,
  host: str,
  port: int,
  ready: Callable[[str, int], None] = lambda host, port: None,
) -> tuple[uvicorn.Server, socket.socket]:
  """Returns (uvicorn server, bound socket that the server is to be run with).

  Args:
    host, port: address to listen at; port 0: any free port.
    ready: function that is called with host and port once the server listens.

  Raises:
    UserError: the server cannot listen at the address.
  """
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  listening = socket.socket(family, socket.SOCK_STREAM)
  listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    listening.bind((host, port))
  except OSError as error:
    listening.close()
    raise UserError(
      f"cannot be listened at ({error.strerror})", field="port", value=f"{host}:{port}"
    ) from None
  config = uvicorn.Config(
    web.app,
    http="h11",
    ws="none",
    lifespan="on",
    access_log=False,
    log_level="warning",
    server_header=False,
    limit_concurrency=_MOST_CONNECTIONS,
    # A body may take the whole deadline.
    timeout_graceful_shutdown=1 + math.ceil(web.service.settings.deadline),
    h11_max_incomplete_event_size=2**14,
  )

  class Server(uvicorn.Server):
    """uvicorn's server, which says when it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
      await super().startup(sockets)
      ready(host, listening.getsockname()[1])

  return Server(config), listening


def serve(web: Web, **where: Any) -> None:
  """Serves until SIGINT or SIGTERM. Requests that are under way are still answered.

  Args:
    where: arguments host, port and ready of `server`.
  """
  uvicorn_server, listening = server(web, **where)
  with listening, contextlib.suppress(KeyboardInterrupt):
    uvicorn_server.run([listening])
