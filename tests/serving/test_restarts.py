"""Random histories of a service, restarted at many points, against the same without a restart; and
changes of the models while a request waits. Models are stand-ins, and clocks are counted."""

import asyncio
import contextlib
import dataclasses
import threading

import numpy as np
import pytest

from dpjax.experiments.run.model_inputs import ModelInputs
from dpjax.serving import Service, ServiceSettings, StageRule, drift
from dpjax.serving.journal import ServiceJournal
from dpjax.serving.service import ModelFailed
from dpjax.validate import UserError

_INPUTS = ModelInputs(
  shape=(2,),
  dtype="float32",
  num_classes=3,
  labels=("a", "b", "c"),
  unit_range=False,
  vocab_size=None,
  target=None,
  declaration=None,
)
_SETTINGS = ServiceSettings(
  window=30,
  feedback_window=8,
  wait_ms=0.0,
  latency_ms=0.0,
  rule=StageRule(
    (0.3, 0.7), requests=12, seconds=3.0, error_rate=0.2, latency_ms=50.0, labels=6
  ),
)


class _Model:
  """A predictor of three classes: `answer`, or the first number of the row if it is None."""

  row_exact = True
  differences = ()

  def __init__(self, name, answer=None, error_from=np.inf, wait=None):
    self.name = self.folder = name
    self.result = {"run_sha256": name, "test_accuracy": 0.9}
    self.inputs = _INPUTS
    self._answer = answer
    self._error_from = error_from
    self._wait = wait

  def logits(self, x):
    if self._wait is not None:
      assert self._wait.wait(20)
    if x[0, 1] >= self._error_from:
      raise RuntimeError("planted")
    answers = x[:, 0].astype(int) if self._answer is None else np.full(len(x), self._answer)
    return np.eye(3, dtype=np.float32)[answers]

  def classes(self, logits):
    return logits.argmax(1)


class _Clock:
  seconds = 0.0

  def __call__(self):
    return self.seconds


def _models():
  # Of four new models, one is as good as the old one, one is wrong, one fails, and one is slow.
  return [_Model("old"), _Model("good"), _Model("wrong", 0), _Model("fails", None, 0.7),
          _Model("slow")]  # fmt: skip


def _open(folder, models, clock, num_runs=1):
  service = Service(
    models[:num_runs],
    ServiceJournal(folder),
    bins=[drift.predicted_bins(_INPUTS)],
    settings=_SETTINGS,
    clock=clock,
    load=lambda name: next(model for model in models if model.name == name),
  )
  begins = service.releases.timer

  def timer(model, rows):
    record = begins(model)
    return lambda seconds: record(0.08 if model.name == "slow" else 0.01)

  service.batcher._timer = timer
  return service


def _history(seed, length=120):
  rng = np.random.default_rng(seed)
  kinds = ["rows"] * 12 + ["labels"] * 8 + ["tick"] * 8 + ["pause", "offer", "offer"]
  kinds += ["promote", "roll_back"] if seed % 3 == 0 else []
  events = []
  for _ in range(length):
    kind = str(rng.choice(kinds))
    size = int(rng.integers(1, 9))
    x = np.stack([rng.integers(0, 3, size), rng.random(size)], 1).astype(np.float32)
    events.append((kind, x, f"user-{rng.integers(40)}", int(rng.integers(5))))
  return events


def _state(service):
  snapshot = service.releases.snapshot() or {}
  return {
    "models": (
      service.releases.old.name,
      None if service.releases.new is None else service.releases.new.name,
    ),
    "stage": service.releases.state(),
    "elapsed": snapshot.get("elapsed"),
    "times": snapshot.get("times_ms", []),
    "alarms": {name: alarm["level"] for name, alarm in service.alarms.raised.items()},
    "reference": None
    if service.windows.reference is None
    else service.windows.reference.counts,
    "drift": service.windows.drift.plain(),
    "feedback": service.windows.feedback.plain(),
  }


async def _play(event, service, models, clock):
  kind, x, key, number = event
  clock.seconds += 0.25
  if kind in ("rows", "labels"):
    # A model that fails may have been promoted.
    with contextlib.suppress(ModelFailed):
      answer = await service.predict(x, key)
      if kind == "labels":
        service.feedback(answer.id, x[:, 0].astype(int).tolist())
  elif kind == "tick":
    await service.tick()
  elif kind == "pause":
    clock.seconds += 4.0
  else:
    # The model may answer already, and no release may be under way.
    with contextlib.suppress(UserError):
      service.offer(models[number]) if kind == "offer" else getattr(service, kind)("x")


async def _closed(service):
  """Leaves a service as a kill does: nothing is saved."""
  if service.batcher._task is not None:
    service.batcher._task.cancel()
  service.journal.close()
  service.batcher._thread.shutdown()


async def _played(folder, events, seed, restart_prob):
  """Returns the state after each event."""
  rng = np.random.default_rng(seed)
  models = _models()
  clock = _Clock()
  service = _open(folder, models, clock)
  states = []
  for event in events:
    await _play(event, service, models, clock)
    if event[0] == "tick" and rng.random() < restart_prob:
      await _closed(service)
      service = _open(folder, models, clock)
    states.append(_state(service))
  await _closed(service)
  return states


@pytest.mark.parametrize("seed", range(6))
def test_a_restart_after_any_tick_changes_no_decision(tmp_path, seed):
  events = _history(seed)
  wanted = asyncio.run(_played(tmp_path / "whole", events, seed, 0.0))
  found = asyncio.run(_played(tmp_path / "restarted", events, seed, (0.2, 1.0)[seed % 2]))
  for place, (now, then) in enumerate(zip(found, wanted)):
    assert now == then, f"event {place}: {events[place][0]}"
  with ServiceJournal(tmp_path / "whole") as journal:
    assert {"candidate", "window"} < {line["kind"] for line in journal.lines}


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_at_any_moment_loses_counts_and_decides_nothing(tmp_path, seed):
  """After a kill between ticks, a stage has what its last tick saved, or nothing."""
  events = _history(100 + seed)

  async def play():
    models = _models()
    clock = _Clock()
    service = _open(tmp_path, models, clock)
    num_kills = 0
    saved = None
    rows = 0
    for event in events:
      lines = service.journal.num_lines
      answering = service.releases.old
      await _play(event, service, models, clock)
      if event[0] == "tick":
        saved = _state(service)
        rows = saved["drift"]["rows"]
      elif service.journal.num_lines > lines:
        saved = None  # the journal is ahead of the counts
      if service.releases.old is not answering:
        rows = 0
      if event[3] == 1:
        num_kills += 1
        before = _state(service)
        await _closed(service)
        service = _open(tmp_path, models, clock)
        after = _state(service)
        assert after["models"] == before["models"] and after["alarms"] == before["alarms"]
        assert (after["stage"] or {}).get("stage") == (before["stage"] or {}).get("stage")
        counts = (after["stage"] or {"counts": None})["counts"]
        if saved is not None:
          assert counts == (saved["stage"] or {"counts": None})["counts"]
          assert after["times"] == saved["times"]
          assert after["feedback"] == saved["feedback"]
        else:
          assert counts is None or not any(
            value for each in counts.values() for value in each.values()
          )
          assert not after["times"] and not after["feedback"]["rows"]
        assert after["drift"]["rows"] == rows
        saved = after
    await _closed(service)
    return num_kills

  assert asyncio.run(play()) > 10


# --- what is read before an await is asked again after it


@pytest.mark.parametrize("action", ["promote", "roll_back", "advance", "offer", "nothing"])
@pytest.mark.parametrize("asked", ["old", "new"])
def test_a_request_under_way_counts_for_its_model_and_stage_alone(tmp_path, action, asked):
  """A model is replaced, withdrawn or gets a new stage while it computes."""
  go = threading.Event()
  models = [_Model("old", 0, wait=go), _Model("new", 1, wait=go), _Model("next", 2)]
  rule = dataclasses.replace(_SETTINGS.rule, stages=(0.5, 0.7), requests=10**6)

  async def play():
    with ServiceJournal(tmp_path) as journal:
      service = Service(
        models[:2],
        journal,
        bins=[drift.predicted_bins(_INPUTS)],
        settings=dataclasses.replace(_SETTINGS, rule=rule),
      )
      key = next(
        f"user-{i}" for i in range(99)
        if service.releases.rollout.is_new(f"user-{i}") == (asked == "new")
      )  # fmt: skip
      waiting = asyncio.create_task(service.predict(np.zeros((10, 2), np.float32), key))
      while not service.batcher._is_computing:
        await asyncio.sleep(0.001)
      if action == "advance":
        service.releases.advance("asked for")
      elif action == "offer":
        service.offer(models[2])
      elif action != "nothing":
        getattr(service, action)("asked for")
      go.set()
      assert (await waiting).run == asked
      await service.tick()
      await _closed(service)
      return service

  service = asyncio.run(play())
  is_there = asked == "old" or action in ("advance", "nothing", "promote")
  is_there &= not (asked == "old" and action == "promote")
  assert service.windows.drift.rows == 10 * is_there
  if service.releases.rollout is not None:
    is_counted = action == "nothing"
    assert service.releases.rollout.counts[asked].requests == is_counted
    assert len(service.releases._times) == (is_counted and asked == "new")


@pytest.mark.slow
@pytest.mark.parametrize("action", ["promote", "roll_back", "offer"])
@pytest.mark.parametrize("place", range(3))
def test_windows_under_noise_count_for_no_other_model(tmp_path, action, place):
  """A release moves on while a thread draws noise for rows or labels, or simulates."""
  models = [_Model("old", 0), _Model("new", 1), _Model("next", 2)]
  rule = dataclasses.replace(_SETTINGS.rule, requests=10**6)
  settings = dataclasses.replace(_SETTINGS, rule=rule, drift_epsilon=100.0)
  ran = []

  async def play(service):
    in_thread = asyncio.to_thread

    async def to_thread(function, *args, **options):
      found = await in_thread(function, *args, **options)
      ran.append(function.__name__)
      if len(ran) == place + 1:
        act = service.offer if action == "offer" else getattr(service, action)
        act(models[2] if action == "offer" else "asked for")
      return found

    for number in range(12):
      answer = await service.predict(np.zeros((3, 2), np.float32), f"user-{number}")
      service.feedback(answer.id, [2, 2, 2])  # all answers are wrong
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(asyncio, "to_thread", to_thread)
      await service.tick()
    await _closed(service)

  with ServiceJournal(tmp_path) as journal:
    bins = [drift.predicted_bins(_INPUTS)]
    service = Service(models[:2], journal, bins=bins, settings=settings)
    asyncio.run(play(service))
  assert ran[place] == ("noisy_counts", "by_chance", "noisy_counts")[place]
  if service.releases.rollout is not None:
    assert all(each.labels == 0 for each in service.releases.rollout.counts.values())
  if action == "promote":
    assert not service.windows.psi and service.windows.reference is None
    assert "accuracy" not in service.alarms.raised


@pytest.mark.parametrize(
  ("before", "action", "then", "wanted"),
  [
    ((0, 1), None, (0, 1), ("old", "good")),
    ((0, 1), None, (3,), ("fails", None)),
    ((0, 1), None, (0,), ("old", None)),
    ((0, 1), "promote", (0, 1), ("good", None)),
    ((0, 1), "promote", (1, 2), ("good", "wrong")),
    ((0, 1), "roll_back", (0, 2), ("old", "wrong")),
    ((0, 1), "roll_back", (0, 1), ("old", None)),
  ],
)
def test_a_start_with_other_runs_ends_the_release(tmp_path, before, action, then, wanted):
  models = _models()

  async def play():
    service = _open(tmp_path, [models[place] for place in before], _Clock(), len(before))
    answer = await service.predict(np.zeros((3, 2), np.float32), "user")
    service.feedback(answer.id, [0, 0, 0])
    await service.tick()
    if action is not None:
      getattr(service, action)("asked for")
    await _closed(service)
    later = _open(tmp_path, [models[place] for place in then], _Clock(), len(then))
    await _closed(later)
    return later

  service = asyncio.run(play())
  found = (
    service.releases.old.name,
    None if service.releases.new is None else service.releases.new.name,
  )
  assert found == wanted
  goes_on = then == before and action is None
  assert service.windows.feedback.rows == 3 * goes_on
