"""Windows, alarms, stages and the journal, without HTTP; and after a kill."""

import asyncio
import contextlib
import dataclasses
import json
import math

import numpy as np
import pytest

from dpjax import data
from dpjax.serving import (
  Rollout,
  Service,
  ServiceSettings,
  StageRule,
  drift,
  references,
)
from dpjax.serving.batching import Batcher, Full, Late
from dpjax.serving.journal import ServiceJournal
from dpjax.serving.service import ModelFailed, digest_of
from dpjax.validate import UserError
from tests.refuses import refuses

_RULE = StageRule(stages=(0.25, 0.5), requests=40, latency_ms=0.0)
_SETTINGS = ServiceSettings(
  window=100, feedback_window=60, wait_ms=0.0, latency_ms=0.0, rule=_RULE
)


@pytest.fixture(scope="module")
def digits():
  test = data.load("digits")[1]
  return np.asarray(test.x), np.asarray(test.y)


def _bins(run):
  return [drift.predicted_bins(run.inputs), drift.bins_of("mean", run.inputs)]


_OPENED = []


@pytest.fixture(autouse=True)
def _closed():
  """Closes journals and threads of services that a test left as a kill does."""
  yield
  while _OPENED:
    service = _OPENED.pop()
    service.journal.close()
    service.batcher._thread.shutdown()


def _service(folder, runs, bins=None, load=None, clock=None, **changes):
  # A killed process lets its journal go; one that only stands here would keep it.
  for before in _OPENED:
    if before.journal.path.parent == folder:
      before.journal.close()
  settings = dataclasses.replace(_SETTINGS, **changes)
  more = {} if load is None else {"load": load}
  more |= {} if clock is None else {"clock": clock}
  bins = _bins(runs[0]) if bins is None else bins
  service = Service(runs, ServiceJournal(folder), bins=bins, settings=settings, **more)
  _OPENED.append(service)
  return service


async def _send(service, x, size=1, **more):
  """Sends rows in requests of `size`; returns the answers."""
  found = []
  for start in range(0, len(x), size):
    found.append(await service.predict(x[start : start + size], more.get("key")))
  return found


def _kinds(folder):
  text = (folder / "journal.jsonl").read_text()
  return [json.loads(line)["kind"] for line in text.splitlines()]


# --- drift


def test_an_alarm_fires_on_planted_drift_alone(runs, tmp_path, digits):
  x, _ = digits
  rng = np.random.default_rng(0)

  async def play():
    service = _service(tmp_path, runs[:1])
    for _ in range(6):
      await _send(service, x[rng.integers(0, 360, 100)], size=20)
      await service.tick()
    quiet = dict(service.alarms.raised)
    await _send(service, 1 - x[rng.integers(0, 360, 100)], size=20)
    await service.tick()
    drifted = dict(service.alarms.raised)
    await _send(service, x[rng.integers(0, 360, 100)], size=20)
    await service.tick()
    return quiet, drifted, dict(service.alarms.raised), service

  quiet, drifted, after, service = asyncio.run(play())
  assert quiet == {} and after == {} and service.windows.num_released == 8
  assert drifted["psi mean"]["level"] == "alarm" and drifted["psi mean"]["value"] > 0.25
  assert _kinds(tmp_path).count("alarm") >= 2


def test_windows_are_cut_at_their_exact_sizes(runs, tmp_path, digits):
  x, _ = digits

  async def play():
    service = _service(tmp_path, runs[:1])
    # 3 x 70 rows: two windows, and ten rows of the next.
    for start in (0, 70, 140):
      await service.predict(x[start : start + 70], None)
    await service.tick()
    return service

  service = asyncio.run(play())
  answers = runs[0].classes(runs[0](x[:210]))
  lines = [
    json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()
  ]
  windows = [line for line in lines if line["kind"] == "window"]
  for number, window in enumerate(windows):
    part = answers[100 * number : 100 * (number + 1)]
    assert window["counts"]["predicted"] == np.bincount(part, minlength=10).tolist()
  assert len(windows) == 2 and service.windows.drift.rows == 10
  by_hand = drift.psi(windows[1]["counts"]["mean"], windows[0]["counts"]["mean"])
  assert windows[1]["psi"]["mean"] == pytest.approx(by_hand)


def test_noisy_counts_of_training_rows_are_added_to_the_cost_of_training(runs, tmp_path):
  bins = _bins(runs[0])
  journal = ServiceJournal(tmp_path)
  noisy = references.make("training", runs[0], bins, lambda: journal, epsilon=0.5)
  service = Service(runs[:1], journal, bins=bins, reference=noisy, settings=_SETTINGS)
  _OPENED.append(service)
  found = service.health()["privacy"]
  assert found["training_epsilon"] > 0 and found["reference_epsilon"] == 0.5
  assert found["training_records_epsilon"] == found["training_epsilon"] + 0.5


def test_what_training_rows_paid_for_a_reference_stays_paid(runs, tmp_path):
  """A start with another reference, and a promotion there and back, forget no charge."""

  def records_epsilon(run, **asked):
    bins = _bins(run)
    with ServiceJournal(tmp_path) as journal:
      given = references.make(
        asked.pop("reference", "stream"), run, bins, lambda: journal, **asked
      )
      service = Service([run], journal, bins=bins, reference=given, settings=_SETTINGS)
      first = service.health()["privacy"]["training_records_epsilon"]
      for other in (runs[run is runs[0]], run):
        service.offer(other)
        service.promote("asked for")
      assert service.health()["privacy"]["training_records_epsilon"] == first
    return first

  own = runs[0].result["epsilon"]
  assert records_epsilon(runs[0]) == own
  assert records_epsilon(runs[0], reference="training", epsilon=0.5) == own + 0.5
  assert records_epsilon(runs[0]) == own + 0.5
  # After exact counts no epsilon holds any more, whatever comes later.
  assert records_epsilon(runs[0], reference="training", exact=True) is None
  assert records_epsilon(runs[0]) is None
  assert records_epsilon(runs[0], reference="training", epsilon=0.5) is None
  assert records_epsilon(runs[1]) == runs[1].result["epsilon"]


def test_windows_without_noise_leave_no_epsilon_of_the_stream(runs, tmp_path, digits):
  x, _ = digits

  async def play(**settings):
    service = _service(tmp_path, runs[:1], **settings)
    await _send(service, x[:100], size=100)
    await service.tick()
    return service

  for settings in ({}, {"drift_epsilon": 2.0}):
    service = asyncio.run(play(**settings))
    assert service.windows.num_released == 1
    assert service.windows.stream_epsilon == math.inf
    assert service.health()["privacy"]["stream_epsilon"] is None
    service.journal.close()


def test_health_counts_what_records_of_a_simulated_run_paid(runs, tmp_path):
  run = _Broken(runs[0], "NaN")
  simulated = {"epsilon": 1.0, "epsilon_kind": "simulated", "epsilon_of_this_run": 50.0}
  run.result = dict(runs[0].result) | simulated
  service = _service(tmp_path, [run])
  found = service.health()["privacy"]
  assert found["training_epsilon_kind"] == "simulated"
  assert found["training_epsilon"] == 1.0 and found["training_records_epsilon"] == 50.0
  assert found["training_failed_assumptions"] == []
  run.result |= {"epsilon_kind": "claimed", "failed_assumptions": ["noise: it is known"]}
  assert service.health()["privacy"]["training_failed_assumptions"] == [
    "noise: it is known"
  ]


def test_noisy_windows_are_charged_before_the_noise_and_up_to_the_budget(
  runs, tmp_path, digits
):
  x, _ = digits

  async def play():
    # The noise is secret: about once in 500 windows it would raise an alarm of its own.
    bounds = {"psi_warning": 1e9, "psi_alarm": 1e9}
    service = _service(tmp_path, runs[:1], drift_epsilon=2.0, drift_budget=5.0, **bounds)
    await _send(service, np.concatenate([x, x[:40]]), size=100)
    await service.tick()
    return service

  service = asyncio.run(play())
  assert service.windows.stream_ledger.spent == (4.0, 0.0)
  assert service.health()["privacy"]["stream_epsilon"] == 4.0
  assert service.alarms.raised["drift_budget"] == {
    "level": "warning",
    "value": 4.0,
    "bound": 5.0,
  }
  kinds = _kinds(tmp_path)
  assert kinds == [
    "start",
    "charge",
    "reference",
    "window",
    "charge",
    "window",
    "spent",
    "alarm",
  ]
  lines = [
    json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()
  ]
  windows = [line for line in lines if line["kind"] == "window"]
  # replace_one moves two bins of each of two histograms: 2 / (2.0 / 2).
  assert {window["scale"] for window in windows} == {2.0}
  exact = np.bincount(runs[0].classes(runs[0](x[:100])), minlength=10)
  assert not np.array_equal(windows[0]["counts"]["predicted"], exact)
  # A second start knows what was spent.
  again = _service(tmp_path, runs[:1], drift_epsilon=2.0, drift_budget=5.0)
  assert again.windows.stream_ledger.spent == (4.0, 0.0) and again.windows.drift.number == 2


# --- accuracy and latency


def test_accuracy_falls_with_wrong_labels_alone(runs, tmp_path, digits):
  x, _ = digits

  async def play():
    service = _service(tmp_path, runs[:1])
    # The accuracy that result.json says, played exactly.
    service.releases.old.result = service.releases.old.result | {"test_accuracy": 0.9}
    right = await service.predict(x[:60], None)
    labels = right.answers.tolist()
    labels[:6] = [(label + 1) % 10 for label in labels[:6]]
    assert service.feedback(right.id, labels) == 54
    await service.tick()
    quiet = dict(service.alarms.raised)
    wrong = await service.predict(x[:60], None)
    labels = [str((label + 1) % 10) for label in wrong.answers[:40].tolist()]
    service.feedback(wrong.id, labels + wrong.answers[40:].tolist())
    await service.tick()
    return service, quiet, wrong

  before = runs[0].result
  try:
    service, quiet, wrong = asyncio.run(play())
  finally:
    runs[0].result = before
  assert quiet == {} and service.alarms.raised["accuracy"]["value"] == pytest.approx(
    20 / 60
  )
  with refuses("id"):
    service.feedback(wrong.id, [0] * 60)


def test_windows_by_time_keep_a_bad_hour_apart_from_a_good_one(runs, tmp_path, digits):
  x, _ = digits
  now = [0.0]

  async def play():
    service = _service(tmp_path, runs[:1], clock=lambda: now[0], window_seconds=3600.0)
    seen = []

    async def send(minute, count, wrong):
      now[0] = 60.0 * minute
      if count:
        answer = await service.predict(x[:count], None)
        labels = answer.answers.tolist()
        labels[:wrong] = [(label + 1) % 10 for label in labels[:wrong]]
        service.feedback(answer.id, labels)
      await service.tick()
      seen.append(service.windows.accuracy)

    # Many labels do not close the window, and few do.
    await send(10, 120, 0)
    await send(59, 40, 0)
    await send(60, 0, 0)
    await send(70, 10, 10)
    await send(121, 0, 0)
    # Nothing came: no window.
    await send(190, 0, 0)
    await send(200, 4, 1)
    await send(251, 0, 0)
    return seen

  seen = asyncio.run(play())
  assert np.isnan(seen[:2]).all() and seen[2:] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.75]
  lines = map(json.loads, (tmp_path / "journal.jsonl").read_text().splitlines())
  closed = [line for line in lines if line["kind"] == "window"]
  feedback = [line for line in closed if line["of"] == "feedback"]
  assert [line["rows"] for line in feedback] == [160, 10, 4]
  assert [line["number"] for line in feedback] == [0, 1, 2]


@pytest.mark.parametrize(
  ("labels", "field"),
  [([0, 1], "labels"), ("3", "labels"), ([10], "labels"),
   ([True], "labels"), (["x"], "labels"), ([None], "labels"),
   ([-1], "labels"), ([1.0], "labels")],
)  # fmt: skip
def test_wrong_labels_are_one_line_and_use_up_no_id(runs, tmp_path, digits, labels, field):
  async def play():
    service = _service(tmp_path, runs[:1])
    answer = await service.predict(digits[0][:1], None)
    with refuses(field):
      service.feedback(answer.id, labels)
    return service.feedback(answer.id, answer.answers.tolist())

  assert asyncio.run(play()) == 1


def test_latency_is_told_above_its_bound_alone(runs, tmp_path):
  service = _service(tmp_path, runs[:1], latency_ms=50.0)
  service._latencies.extend([10.0] * 200)
  service._check_latency()
  assert service.alarms.raised == {}
  service._latencies.extend([80.0] * 20)
  service._check_latency()
  assert service.alarms.raised["latency p99 ms"]["level"] == "alarm"
  service._latencies.extend([10.0] * 1000)
  service._check_latency()
  assert service.alarms.raised == {}

  # A start that reports no latency could not clear its alarm either.
  service._latencies.extend([80.0] * 1000)
  service._check_latency()
  assert _service(tmp_path, runs[:1], latency_ms=50.0).alarms.raised.keys() == {
    "latency p99 ms"
  }
  assert _service(tmp_path, runs[:1], latency_ms=0.0).alarms.raised == {}


# --- releases


def test_a_key_keeps_its_model_and_shares_grow():
  rollout = Rollout(StageRule(stages=(0.1, 0.5, 1.0)), salt="run")
  keys = [f"user-{number}" for number in range(4000)]
  before = {key for key in keys if rollout.is_new(key)}
  assert abs(len(before) / 4000 - 0.1) < 0.02
  rollout.advance()
  after = {key for key in keys if rollout.is_new(key)}
  assert before < after and abs(len(after) / 4000 - 0.5) < 0.03
  rollout.advance()
  assert all(map(rollout.is_new, keys))
  other = Rollout(StageRule(stages=(0.1,)), salt="other")
  # Another release begins with other users.
  assert len(before & {key for key in keys if other.is_new(key)}) < 100


@pytest.mark.parametrize(
  ("counts", "p99", "elapsed", "wanted"),
  [
    ({"requests": 99}, 1.0, 99.0, "keep"),
    ({"requests": 100}, 1.0, 9.0, "keep"),
    ({"requests": 100}, 1.0, 10.0, "advance"),
    ({"requests": 100, "errors": 2}, 1.0, 10.0, "roll_back"),
    ({"requests": 20, "errors": 5}, 1.0, 0.0, "roll_back"),
    ({"requests": 20, "errors": 1}, 1.0, 0.0, "keep"),
    ({"requests": 100}, 500.0, 10.0, "roll_back"),
    ({"requests": 100}, math.nan, 10.0, "keep"),
    ({"requests": 100, "right": 30, "labels": 60}, 1.0, 10.0, "roll_back"),
    ({"requests": 100, "right": 52, "labels": 60}, 1.0, 10.0, "advance"),
    ({"requests": 100, "right": 9, "labels": 10}, 1.0, 10.0, "keep"),
  ],
)  # fmt: skip
def test_a_stage_ends_by_its_rule(counts, p99, elapsed, wanted):
  labels = 50 if "labels" in counts else 0
  rule = StageRule(
    stages=(0.1, 0.5), requests=100, seconds=10.0, error_rate=0.01, labels=labels
  )
  old = {"requests": 900, "right": 54, "labels": 60}
  rollout = Rollout(rule, "run", counts={"new": counts, "old": old})
  assert rollout.decision(p99_ms=p99, elapsed=elapsed)[0] == wanted
  last = Rollout(rule, "run", stage=1, counts={"new": counts, "old": old})
  wanted = "promote" if wanted == "advance" else wanted
  assert last.decision(p99_ms=p99, elapsed=elapsed)[0] == wanted


@pytest.mark.parametrize(
  "wrong",
  [{"stages": ()}, {"stages": (0.5, 0.1)}, {"stages": (0.0,)}, {"stages": (1.5,)},
   {"stages": (math.nan,)}, {"requests": 0}, {"error_rate": -1.0}, {"seconds": math.inf}],
)  # fmt: skip
def test_a_wrong_rule_is_refused(wrong):
  with pytest.raises(UserError):
    StageRule(**wrong)


def test_a_release_goes_through_its_stages_and_a_start_afterwards_knows(
  runs, tmp_path, digits
):
  x, _ = digits

  async def play():
    service = _service(tmp_path, runs)
    names = set()
    for place in range(400):
      names.add(
        (await service.predict(x[place % 300 : place % 300 + 1], f"user-{place}")).run
      )
      if place % 10 == 0:
        await service.tick()
      if service.releases.rollout is None:
        break
    return service, names

  service, names = asyncio.run(play())
  assert (
    names == {"run0", "run1"}
    and service.releases.old is runs[1]
    and service.releases.rollout is None
  )
  kinds = [
    kind for kind in _kinds(tmp_path) if kind not in ("window", "reference", "alarm")
  ]
  assert kinds == ["start", "candidate", "stage", "promote"]
  assert _service(tmp_path, runs).releases.old is runs[1]
  # Only the first run is named now: the journal knows where the second one is.
  again = _service(tmp_path / "other", runs[:1])
  again.offer(runs[1])
  again.promote("asked for")
  later = _service(tmp_path / "other", runs[:1], load=lambda _: runs[1])
  assert later.releases.old is runs[1]
  later.journal.close()
  with (
    ServiceJournal(tmp_path / "other") as journal,
    pytest.raises(UserError, match="is not the run that the journal released"),
  ):
    Service(runs[:1], journal, load=lambda _: runs[0])


class _Broken:
  """The second run, whose logits are wrong in one way."""

  def __init__(self, run, how):
    self._run = run
    self._how = how

  def __getattr__(self, name):
    return getattr(self._run, name)

  def logits(self, x):
    if self._how == "raises":
      raise RuntimeError("out of memory")
    if self._how == "a row":  # rows that are all 1 have no answer
      ones = x.reshape(len(x), -1).min(axis=1, keepdims=True) == 1
      return np.where(ones, np.inf, self._run.logits(x)).astype(np.float32)
    return np.full((len(x), 10), np.nan, np.float32)


@pytest.mark.parametrize("how", ["raises", "NaN"])
def test_a_new_model_that_fails_is_taken_back_and_costs_no_answer(
  runs, tmp_path, digits, how
):
  x, _ = digits

  async def play():
    service = _service(tmp_path, [runs[0], _Broken(runs[1], how)])
    answers = []
    for place in range(100):
      answers.append(await service.predict(x[place : place + 1], f"user-{place}"))
      await service.tick()
    return service, answers

  service, answers = asyncio.run(play())
  assert len(answers) == 100 and {answer.run for answer in answers} == {"run0"}
  assert service.releases.new is None and "roll_back" in _kinds(tmp_path)
  logits = np.concatenate([answer.logits for answer in answers])
  np.testing.assert_array_equal(logits, runs[0](x[:100]))


def test_an_old_model_that_fails_is_told(runs, tmp_path, digits):
  async def play():
    service = _service(tmp_path, [_Broken(runs[0], "NaN")])
    with pytest.raises(ModelFailed, match="not finite"):
      await service.predict(digits[0][:1], None)

  asyncio.run(play())


def test_a_row_without_an_answer_moves_no_other_row_of_a_window(runs, tmp_path, digits):
  """One row in place of another moves one row of one window, which is all that the noise hides."""
  x = np.array(digits[0][:90])
  other = np.concatenate([np.ones_like(x[:1]), x[1:]])

  async def counted(folder, rows):
    service = _service(folder, [_Broken(runs[0], "a row")], bins=_bins(runs[0]))
    for start in range(0, 90, 30):
      with contextlib.suppress(ModelFailed):
        await service.predict(rows[start : start + 30], None)
    return service.windows.drift

  one, two = (
    asyncio.run(counted(tmp_path / name, rows)) for name, rows in (("a", x), ("b", other))
  )
  assert one.rows == two.rows == 90
  for name, counts in one.counts.items():
    assert np.abs(counts - two.counts[name]).sum() <= 2


def test_a_row_that_a_new_model_fails_on_moves_no_other_row_or_label(
  runs, tmp_path, digits
):
  """The old model answers the whole request, and its classes would be counted for all 30 rows."""
  x, y = np.array(digits[0][:30]), digits[1][:30].tolist()
  other = np.concatenate([np.ones_like(x[:1]), x[1:]])

  async def counted(folder, rows):
    new = _Broken(runs[1], "a row")
    service = _service(folder, [runs[0], new], rule=StageRule(stages=(1.0,)))
    answer = await service.predict(rows, None)
    service.feedback(answer.id, y)
    return answer.run, service.windows.drift.counts | service.windows.feedback.counts

  (by, one), (fallback, two) = (
    asyncio.run(counted(tmp_path / name, rows)) for name, rows in (("a", x), ("b", other))
  )
  assert by != fallback
  for name, counts in one.items():
    assert np.abs(counts - two[name]).sum() <= 2, name


def test_models_that_take_other_inputs_are_no_release(runs, tmp_path):
  service = _service(tmp_path, runs[:1])
  other = _Broken(runs[1], "NaN")
  other.inputs = dataclasses.replace(runs[1].inputs, labels=tuple("abcdefghij"))
  with refuses("run"):
    service.offer(other)
  for action in (service.promote, service.roll_back):
    with refuses("action"):
      action("asked for")


# --- a kill


def test_a_start_goes_on_where_a_kill_left_it(runs, tmp_path, digits):
  x, y = digits

  async def play():
    service = _service(tmp_path, runs, drift_epsilon=1.0)
    for place in range(130):
      answer = await service.predict(x[place : place + 1], f"user-{place}")
      if place % 4 == 0:
        service.feedback(answer.id, [int(y[place])])
      if place % 13 == 0:
        await service.tick()
    await service.tick()
    return service

  service = asyncio.run(play())
  # Nothing is closed or said goodbye to: the files are what a kill -9 leaves. The last line of a
  # journal may be cut off in the middle.
  with (tmp_path / "journal.jsonl").open("ab") as file:
    file.write(b'{"line": 99, "kind": "prom')
  again = _service(tmp_path, runs, drift_epsilon=1.0)
  assert (
    again.releases.new is runs[1]
    and again.releases.rollout is not None
    and service.releases.rollout is not None
  )
  assert again.releases.rollout.stage == service.releases.rollout.stage
  assert again.releases.rollout.counts == service.releases.rollout.counts
  assert again.windows.drift.number == service.windows.drift.number == 1
  assert again.windows.drift.rows == service.windows.drift.rows == 30
  assert all(
    np.array_equal(again.windows.drift.counts[k], v)
    for k, v in service.windows.drift.counts.items()
  )
  assert again.windows.feedback.rows == service.windows.feedback.rows
  assert (
    again.windows.stream_ledger.spent == service.windows.stream_ledger.spent == (1.0, 0.0)
  )
  assert again.windows.reference.counts == service.windows.reference.counts
  keys = [f"user-{number}" for number in range(500)]
  assert [again.releases.rollout.is_new(key) for key in keys] == [
    service.releases.rollout.is_new(k) for k in keys
  ]


def test_a_window_that_was_charged_is_not_released_again(runs, tmp_path, digits):
  """Killed between the charge and the noise, while the counts on disk are older."""

  async def play():
    service = _service(tmp_path, runs[:1], drift_epsilon=1.0)
    await service.predict(digits[0][:70], None)
    await service.tick()

  asyncio.run(play())
  _OPENED[-1].journal.close()
  with ServiceJournal(tmp_path) as journal:
    journal.write("charge", what="x", of="drift", number=0, epsilon=1.0, spent=1.0)
  again = _service(tmp_path, runs[:1], drift_epsilon=1.0)
  assert again.windows.drift.number == 1 and again.windows.drift.rows == 0
  assert again.windows.stream_ledger.spent == (1.0, 0.0)


def test_a_journal_that_somebody_changed_is_refused(tmp_path):
  with ServiceJournal(tmp_path) as journal:
    for number in range(3):
      journal.write("alarm", number=number)
  assert journal.path.stat().st_mode & 0o077 == 0
  lines = journal.path.read_bytes().splitlines(keepends=True)
  for changed in (lines[:1] + lines[2:], [b"x\n", *lines[1:]], [b"[]\n", *lines]):
    journal.path.write_bytes(b"".join(changed))
    with pytest.raises(UserError, match="is not what a service wrote there"):
      ServiceJournal(tmp_path)
  (tmp_path / "counts.json").write_text("[]")
  journal.path.write_bytes(b"")
  with ServiceJournal(tmp_path) as journal, refuses(str(tmp_path / "counts.json")):
    journal.saved_counts()


def test_a_journal_in_a_file_is_refused(tmp_path):
  (tmp_path / "file").touch()
  for at in ("file", "file/below"):
    with refuses("workdir"):
      ServiceJournal(tmp_path / at)


def test_another_set_of_runs_begins_anew(runs, tmp_path):
  service = _service(tmp_path, runs)
  service.roll_back("asked for")
  assert _service(tmp_path, runs).releases.new is None
  swapped = _service(tmp_path, [runs[1]])
  assert swapped.releases.old is runs[1] and swapped.releases.new is None
  assert digest_of(runs[0]) != digest_of(runs[1])


# --- batches


def test_requests_are_computed_together_and_an_exchange_loses_none(runs, digits):
  x, _ = digits

  async def play():
    batches = []
    timer = lambda model, rows: lambda seconds: batches.append((model, rows))
    batcher = Batcher(max_queue=1000, wait_ms=1.0, timer=timer)
    models = [runs[place % 2] if place > 20 else runs[0] for place in range(60)]
    tasks = [
      asyncio.create_task(batcher.logits(model, x[place : place + 1], seconds=60))
      for place, model in enumerate(models)
    ]
    found = await asyncio.gather(*tasks)
    await batcher.close(seconds=1)
    return models, found, batches

  models, found, batches = asyncio.run(play())
  for place, (model, logits) in enumerate(zip(models, found)):
    np.testing.assert_array_equal(logits[0], model(x[place : place + 1])[0])
  assert sum(rows for _, rows in batches) == 60 and batches[0][1] > 1


def test_the_queue_is_bounded_and_deadlines_hold(runs, digits):
  x, _ = digits

  class Slow:
    def logits(self, rows):
      import time

      time.sleep(0.2)
      return np.zeros((len(rows), 10), np.float32)

  async def play():
    batcher = Batcher(max_queue=4, wait_ms=0.0)
    first = asyncio.create_task(batcher.logits(Slow(), x[:3], seconds=5))
    late = asyncio.create_task(batcher.logits(Slow(), x[:1], seconds=0.01))
    await asyncio.sleep(0)
    with pytest.raises(Full):
      await batcher.logits(Slow(), x[:4], seconds=5)
    with pytest.raises(Late):
      await late
    assert (await first).shape == (3, 10)
    await batcher.close(seconds=1)
    return batcher.rows

  assert asyncio.run(play()) == 0


@pytest.mark.parametrize(
  "wrong",
  [{"window": 0}, {"deadline": 0.0}, {"drift_epsilon": 0.0}, {"drift_epsilon": math.nan},
   {"drift_budget": 1.0}, {"psi_alarm": 0.05}, {"wait_ms": -1.0}, {"latency_ms": math.inf}],
)  # fmt: skip
def test_wrong_settings_are_refused(wrong):
  with pytest.raises(UserError):
    ServiceSettings(**wrong)
