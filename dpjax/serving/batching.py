"""Concurrent requests computed together: one queue, and one thread that computes batches."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterable

import numpy as np

from dpjax.serving.predictor import EVALUATION, Predictor


class Full(Exception):
  """Raised if the queue has no room for the rows of a request."""


class Late(Exception):
  """Raised if a request was not answered by its deadline."""


class Closed(Exception):
  """Raised for requests that the service cannot answer because it is stopping."""


@dataclasses.dataclass(eq=False)
class _Waiting:
  model: Predictor
  x: np.ndarray
  answer: asyncio.Future[np.ndarray]


def _refuse(requests: Iterable[_Waiting], error: Exception) -> None:
  """Gives an error to each request that has no answer yet."""
  for each in requests:
    if not each.answer.done():
      each.answer.set_exception(error)


class Batcher:
  """Computes requests together, in the order in which they came.

  A request keeps the model that it came with, so replacing a model loses no request.

  Args:
    max_queue: largest number of rows that wait.
    wait_ms: milliseconds that the first request of a batch waits for other requests.
    timer: function that is called with (model, rows) when a batch begins. What it returns is called
      with the seconds of the batch once it is computed.
  """

  def __init__(
    self,
    *,
    max_queue: int,
    wait_ms: float,
    timer: Callable[[Predictor, int], Callable[[float], object]] = (
      lambda model, rows: lambda seconds: None
    ),
  ):
    self._max_queue = max_queue
    self._wait = wait_ms / 1000
    self._timer = timer
    self._queue: collections.deque[_Waiting] = collections.deque()
    self._rows = 0
    self._there = asyncio.Event()
    self._closing = False
    self._is_computing = False
    # One thread is enough, since XLA uses every core for one batch.
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "dpjax-serve")
    self._task: asyncio.Task[None] | None = None

  @property
  def rows(self) -> int:
    """Number of rows in the queue, without the batch that is being computed."""
    return self._rows

  async def logits(self, model: Predictor, x: np.ndarray, *, seconds: float) -> np.ndarray:
    """Returns the logits of one request.

    Args:
      model: model that answers the request.
      x: rows, as `Predictor.raw` returns them.
      seconds: seconds until the request's deadline.

    Raises:
      Full, Late, Closed: the request got no answer. Other errors come from the model.
    """
    if self._closing:
      raise Closed
    if self._rows + len(x) > self._max_queue:
      raise Full
    if self._task is None:
      self._task = asyncio.create_task(self._work())
    waiting = _Waiting(model, x, asyncio.get_running_loop().create_future())
    self._queue.append(waiting)
    self._rows += len(x)
    self._there.set()
    try:
      async with asyncio.timeout(seconds):
        return await waiting.answer
    except TimeoutError:
      raise Late from None

  async def _work(self) -> None:
    while True:
      await self._there.wait()
      # Requests that come now can still join the batch. A full batch need not wait for them.
      if self._wait and self._rows < EVALUATION and not self._closing:
        await asyncio.sleep(self._wait)
      batch = self._next()
      if batch:
        self._is_computing = True
        try:
          await self._compute(batch)
        finally:
          self._is_computing = False

  async def _compute(self, batch: list[_Waiting]) -> None:
    """Answers the requests of one batch, which all have the same model."""
    loop = asyncio.get_running_loop()
    model = batch[0].model
    x = np.concatenate([each.x for each in batch])
    record = self._timer(model, len(x))
    began = time.perf_counter()
    try:
      logits = await loop.run_in_executor(self._thread, model.logits, x)
    except asyncio.CancelledError:
      # If the batch is not computed within the `seconds` of `close`, `close` cancels this task.
      _refuse(batch, Closed())
      raise
    # An error of the model goes to the requests of this batch, and does not end the service.
    except Exception as error:
      _refuse(batch, error)
      return
    record(time.perf_counter() - began)
    start = 0
    for each in batch:
      rows = logits[start : start + len(each.x)]
      start += len(each.x)
      if not each.answer.done():
        each.answer.set_result(rows)

  def _next(self) -> list[_Waiting]:
    """Takes requests from the front of the queue: for one model, and as many as fit in a batch."""
    batch: list[_Waiting] = []
    rows = 0
    while self._queue:
      first = self._queue[0]
      other = batch and first.model is not batch[0].model
      if other or (batch and rows + len(first.x) > EVALUATION):
        break
      self._queue.popleft()
      self._rows -= len(first.x)
      # A request whose deadline has passed is dropped, since nobody reads its answer.
      if not first.answer.done():
        batch.append(first)
        rows += len(first.x)
    if not self._queue:
      self._there.clear()
    return batch

  async def close(self, *, seconds: float) -> None:
    """Refuses new requests, and computes the requests that wait.

    Args:
      seconds: time in seconds for the computation. After it, open requests get `Closed`.
    """
    self._closing = True
    end = time.monotonic() + seconds
    # The batch that is being computed has left the queue, so it is waited for separately.
    while (self._rows or self._is_computing) and time.monotonic() < end:
      await asyncio.sleep(0.01)
    if self._task is not None:
      self._task.cancel()
      await asyncio.gather(self._task, return_exceptions=True)
    _refuse(self._queue, Closed())
    # The shutdown runs in another thread, so that a model that hangs does not stop the event loop.
    await asyncio.to_thread(self._thread.shutdown)
