"""Attacks on a service: its journal, its clock, its candidates, its feedback and its end."""

import asyncio
import copy
import dataclasses
import json
import resource
import shutil
import signal
import time

import numpy as np
import pytest

from dpjax import data
from dpjax.experiments.run import writers
from dpjax.serving import Predictor, Service, ServiceSettings, StageRule, drift
from dpjax.serving.batching import Batcher, Closed
from dpjax.serving.journal import ServiceJournal
from dpjax.serving.rollout import check_weights
from dpjax.validate import UserError
from tests.refuses import refuses

_RULE = StageRule(stages=(0.25, 0.5), requests=1000, latency_ms=0.0)
_SETTINGS = ServiceSettings(window=100, wait_ms=0.0, latency_ms=0.0, rule=_RULE)


@pytest.fixture(scope="module")
def x():
  return np.asarray(data.load("digits")[1].x)


def _service(journal, runs, **more):
  settings = dataclasses.replace(_SETTINGS, **more.pop("settings", {}))
  bins = [drift.predicted_bins(runs[0].inputs)]
  service = Service(runs, journal, bins=bins, settings=settings, **more)
  return service


def _play(service, *steps):
  """Runs coroutines one after the other, and ends the service's thread; returns their results."""

  async def play():
    results = [await step for step in steps]
    await service.batcher.close(seconds=5)
    return results

  return asyncio.run(play())


# --- the journal


def test_two_services_on_one_journal_folder_are_refused(tmp_path):
  (tmp_path / "link").symlink_to(tmp_path / "journal", target_is_directory=True)
  with ServiceJournal(tmp_path / "journal"):
    for name in ("journal", "link"):
      with refuses("workdir"):
        ServiceJournal(tmp_path / name)
  ServiceJournal(tmp_path / "journal").close()


def _written(folder):
  with ServiceJournal(folder) as journal:
    journal.write("start", runs=["a"], names=["straße"], resumed=False)
    for number in range(3):
      journal.write("charge", of="drift", number=number, epsilon=1.0, spent=1.0 + number)
    return journal.path.read_bytes()


def test_every_turned_bit_is_seen_or_costs_the_last_line_alone(tmp_path):
  whole = _written(tmp_path)
  path = tmp_path / "journal.jsonl"
  lines = whole.splitlines(keepends=True)
  start_of_last = len(whole) - len(lines[-1])
  # A step that is no multiple of 8, so that each bit of a byte has its turn.
  for place in (*range(0, len(whole), 3), *range(len(whole) - 3, len(whole))):
    # Every bit of the last line's end, and one of every other byte.
    for bit in range(8) if place > len(whole) - 4 else (place % 8,):
      turned = bytearray(whole)
      turned[place] ^= 1 << bit
      path.write_bytes(turned)
      try:
        with ServiceJournal(tmp_path) as journal:
          spent = [line["spent"] for line in journal.of_kind("charge")]
      except UserError as error:
        assert "is not what a service wrote there" in str(error) and "\n" not in str(error)
        continue
      assert place >= start_of_last and spent == [1.0, 2.0, 3.0], (place, bit)


def test_a_journal_cut_anywhere_keeps_its_whole_lines(tmp_path):
  whole = _written(tmp_path)
  path = tmp_path / "journal.jsonl"
  ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
  near = {end + step for end in ends for step in (-1, 0, 1)}
  for size in sorted({*range(0, len(whole), 23), *near} - {len(whole)}):
    path.write_bytes(whole[:size])
    with ServiceJournal(tmp_path) as journal:
      # A line that misses its newline alone was written, and may have taken effect.
      assert len(journal.lines) == whole[: size + 1].count(b"\n")
  # In the middle: what follows is no line any more.
  for size in (3, 40, len(whole) // 2):
    path.write_bytes(whole[: size - 2] + whole[size:])
    with pytest.raises(UserError, match="is not what a service wrote there"):
      ServiceJournal(tmp_path)


def test_lines_that_are_gone_are_missed(tmp_path):
  whole = _written(tmp_path)
  path = tmp_path / "journal.jsonl"
  with ServiceJournal(tmp_path) as journal:
    journal.save_counts({"lines": journal.num_lines})
  path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
  with (
    ServiceJournal(tmp_path) as journal,
    pytest.raises(UserError, match="has 3 lines and had 4"),
  ):
    journal.saved_counts()
  path.write_bytes(whole)
  counts = (tmp_path / "counts.json").read_text()
  (tmp_path / "counts.json").write_text(counts.replace("4", "2"))
  with ServiceJournal(tmp_path) as journal, refuses(str(tmp_path / "counts.json")):
    journal.saved_counts()


@pytest.mark.parametrize(
  "line",
  [{"kind": "start", "format": 2, "runs": []}, {"kind": "start", "format": "x", "runs": []},
   {"kind": "a charge of tomorrow"}],
)  # fmt: skip
def test_a_line_of_another_version_is_told(tmp_path, line):
  with ServiceJournal(tmp_path) as journal:
    journal.write(**line)
  with pytest.raises(UserError, match="line 1 was written by another version of dpjax"):
    ServiceJournal(tmp_path)


@pytest.mark.cases(slow=["lines0-None", "lines1-None", "lines2-None"])
@pytest.mark.parametrize(
  ("lines", "counts"),
  [
    ([{"kind": "charge", "of": "drift"}], None),
    ([{"kind": "window", "of": "drift", "number": "x"}], None),
    ([{"kind": "start", "runs": 3}], None),
    ([], {"drift": {"number": 0}}),
    ([], {"drift": {"number": 0, "rows": "x", "counts": {"predicted": [0] * 10}}}),
    ([], {"drift": {"number": 0, "rows": 1, "counts": 3}}),
  ],
)
def test_lines_and_counts_of_anything_are_one_line(runs, tmp_path, lines, counts):
  with ServiceJournal(tmp_path) as journal:
    for line in lines:
      journal.write(**line)
  if counts is not None:
    writers.write_digested(tmp_path / "counts.json", counts)
  with (
    ServiceJournal(tmp_path) as journal,
    pytest.raises(UserError, match="not what a service wrote there") as raised,
  ):
    _service(journal, runs[:1])
  assert "\n" not in str(raised.value)


def test_a_full_disk_leaves_a_journal_of_whole_lines(tmp_path):
  with ServiceJournal(tmp_path) as journal:
    journal.write("alarm", name="before")
    size = journal.path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
      # The disk takes a part of the line.
      resource.setrlimit(resource.RLIMIT_FSIZE, (size + 30, before[1]))
      with pytest.raises(OSError):
        journal.write("alarm", name="does not fit")
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)
      signal.signal(signal.SIGXFSZ, ignored)
    assert journal.path.stat().st_size == size
    journal.write("alarm", name="after")
  with ServiceJournal(tmp_path) as journal:
    assert [line["name"] for line in journal.lines] == ["before", "after"]


# --- starts


def test_a_kill_before_the_candidate_line_does_not_lose_the_release(runs, tmp_path):
  with ServiceJournal(tmp_path) as journal:
    _service(journal, runs)
  path = tmp_path / "journal.jsonl"
  first = path.read_bytes().splitlines(keepends=True)
  assert [json.loads(line)["kind"] for line in first] == ["start", "candidate"]
  path.write_bytes(first[0])
  with ServiceJournal(tmp_path) as journal:
    assert _service(journal, runs).releases.new is runs[1]


def test_a_kill_right_after_a_promotion_forgets_the_rows_of_the_old_model(
  runs, tmp_path, x
):
  with ServiceJournal(tmp_path) as journal:
    service = _service(journal, runs)
    _play(service, service.predict(x[:30], None), service.tick())
    saved = (tmp_path / "counts.json").read_bytes()
    service.promote("asked for")
    # Not even without a kill may they be the reference of the new model.
    assert service.windows.drift.rows == 0
  (tmp_path / "counts.json").write_bytes(saved)
  with ServiceJournal(tmp_path) as journal:
    again = _service(journal, runs)
    assert again.releases.old is runs[1] and again.windows.drift.rows == 0


def test_a_smaller_window_after_a_restart_neither_hangs_nor_counts_twice(
  runs, tmp_path, x, capsys
):
  with ServiceJournal(tmp_path) as journal:
    service = _service(journal, runs[:1])
    _play(service, service.predict(x[:80], None), service.tick())
  with ServiceJournal(tmp_path) as journal:
    service = _service(journal, runs[:1], settings={"window": 50})
    assert "80 rows of an open window are dropped" in capsys.readouterr().err
    _play(service, service.predict(x[:60], None), service.tick())
    assert service.windows.num_released == 1 and service.windows.drift.rows == 10


@pytest.mark.slow
def test_settings_that_the_journal_is_beyond_are_one_line(runs, tmp_path, x):
  with ServiceJournal(tmp_path) as journal:
    service = _service(journal, runs, settings={"drift_epsilon": 2.0})
    _play(service, service.predict(x[:100], None), service.tick())
    service.releases.advance("asked for")
  settings = {"drift_epsilon": 2.0, "drift_budget": 1.0}
  with ServiceJournal(tmp_path) as journal:
    with refuses("drift_budget"):
      _service(journal, runs, settings=settings)
    with refuses("stages"):
      _service(journal, runs, settings={"rule": StageRule(stages=(0.5,))})


def test_a_clock_that_goes_backwards_ends_no_stage_and_saves_no_debt(runs, tmp_path, x):
  now = [1e6]
  rule = StageRule(stages=(1.0,), requests=1, seconds=5.0, latency_ms=0.0)
  with ServiceJournal(tmp_path, clock=lambda: now[0]) as journal:
    service = _service(journal, runs, clock=lambda: now[0], settings={"rule": rule})
    now[0] = 10.0
    _play(service, service.predict(x[:1], "user"), service.tick())
    assert service.releases.new is runs[1]
    assert service.releases.snapshot()["elapsed"] == 0.0
    assert min(service._latencies) >= 0.0
  with ServiceJournal(tmp_path, clock=lambda: now[0]) as journal:
    service = _service(journal, runs, clock=lambda: now[0], settings={"rule": rule})
    now[0] += 6.0
    _play(service, service.tick())
    assert service.releases.old is runs[1]


def test_a_folder_that_is_exchanged_while_it_is_served_changes_nothing(
  folders, runs, tmp_path, x
):
  shutil.copytree(folders[0], tmp_path / "run")
  served = Predictor.load(tmp_path / "run")
  with ServiceJournal(tmp_path / "journal") as journal:
    service = _service(journal, [runs[1]])
    service.offer(served)
    service.promote("asked for")
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(folders[1], tmp_path / "run")
    (answer,) = _play(service, service.predict(x[:5], None))
    np.testing.assert_array_equal(answer.logits, runs[0](x[:5]))
  # A start afterwards does not take the other run for the one that was promoted.
  with (
    ServiceJournal(tmp_path / "journal") as journal,
    pytest.raises(UserError, match="is not the run that the journal released"),
  ):
    _service(journal, [runs[1]])


# --- releases and feedback


def test_the_run_that_answers_is_no_candidate(folders, runs, tmp_path):
  twin = Predictor.load(folders[0], sizes=())
  with (
    ServiceJournal(tmp_path / "first") as journal,
    refuses("run"),
  ):
    _service(journal, [runs[0], twin])
  with ServiceJournal(tmp_path / "second") as journal:
    service = _service(journal, runs)
    with refuses("run"):
      service.offer(twin)
    # The refused offer ended nothing.
    assert service.releases.new is runs[1]


@pytest.mark.parametrize(
  "weights",
  [(0.0, 0.0), (float("nan"), 0.5), (float("nan"),) * 2, (float("inf"), -float("inf")),
   (1.0, 0.0), (1.5, -0.5), (0.5,), (1e308, 1e308)],
)  # fmt: skip
def test_weights_that_are_no_shares_are_refused(weights):
  with refuses("weights"):
    check_weights(weights, 2)


def test_labels_count_for_the_run_that_answered_and_for_no_later_one(runs, tmp_path, x):
  rule = StageRule(stages=(1.0,), requests=1000, latency_ms=0.0)
  with ServiceJournal(tmp_path) as journal:
    service = _service(journal, runs, settings={"rule": rule})
    answers = _play(service, *(service.predict(x[:4], None) for _ in range(3)))
    assert {answer.run for answer in answers} == {"run1"}
    labels = answers[0].answers.tolist()
    assert service.feedback(answers[0].id, labels) == 4
    assert service.windows.feedback.counts["feedback"].tolist() == [0, 0, 4, 0]
    with refuses("id"):
      service.feedback(answers[0].id, labels)
    with refuses("id"):
      service.feedback("f" * 24, labels)
    service.roll_back("asked for")
    assert service.windows.feedback.rows == 0
    # Of a run that was taken back: right, and counted for nobody.
    assert service.feedback(answers[1].id, labels) == 4
    assert service.windows.feedback.rows == 0
    service.offer(runs[1])
    service.promote("asked for")
    assert service.feedback(answers[2].id, labels) == 4
    # It is the model that answers now.
    assert service.windows.feedback.counts["feedback"].tolist() == [4, 0, 0, 0]


def test_a_tick_without_a_request_closes_no_window(runs, tmp_path):
  with ServiceJournal(tmp_path) as journal:
    service = _service(journal, runs[:1], settings={"window": 1, "drift_epsilon": 1.0})
    _play(service, service.tick(), service.tick())
    assert service.windows.num_released == 0 and service.windows.stream_ledger.spent == (
      0.0,
      0.0,
    )
    assert journal.num_lines == 1


def test_a_promotion_while_a_window_is_released_gives_it_no_reference(
  runs, tmp_path, x, monkeypatch
):
  with ServiceJournal(tmp_path) as journal:
    service = _service(journal, runs, settings={"drift_epsilon": 1.0})
    noisy = drift.noisy_counts

    def promoted_meanwhile(*args, **more):
      service.promote("asked for")
      return noisy(*args, **more)

    monkeypatch.setattr(drift, "noisy_counts", promoted_meanwhile)
    _play(service, service.predict(x[:100], None), service.tick())
    assert (
      service.releases.old is runs[1]
      and service.windows.reference is None
      and service.windows.psi == {}
    )


def test_health_shows_a_window_only_once_its_line_is_on_the_disk(
  runs, tmp_path, x, monkeypatch
):
  """A kill after /health had shown the exact drift left no line of it: the next start, with noise,
  stated an epsilon for rows that had been shown without."""
  settings = {"window": 50, "feedback_window": 50, "psi_alarm": 0.2}
  before, ended = [], False
  with ServiceJournal(tmp_path) as journal:
    service = _service(journal, runs[:1], settings=settings)
    write = journal.write

    def killed(kind, **values):
      if kind == "window":
        before.append((values["of"], copy.deepcopy(service.health())))
        if ended:
          raise KeyboardInterrupt
      write(kind, **values)

    monkeypatch.setattr(journal, "write", killed)
    rows = np.concatenate([x[:50], np.repeat(x[:1], 50, axis=0)])
    answer, *_ = _play(service, service.predict(rows, None), service.tick())
    service.feedback(answer.id, answer.answers.tolist())
    asyncio.run(service.tick())
    first, second, labels = [health for _, health in before]
    assert [of for of, _ in before] == ["drift", "drift", "feedback"]
    assert (first["windows"], first["psi"], first["alarms"]) == (0, {}, {})
    assert (second["windows"], second["psi"]) == (1, {"predicted": 0.0})
    assert second["alarms"] == {} and labels["accuracy"] is None
    shown = service.health()
    assert shown["windows"] == 2 and shown["alarms"] and shown["accuracy"] == 1.0

  # The first window is the reference, whose line comes before its own.
  ended = True
  with ServiceJournal(tmp_path / "killed") as journal:
    service = _service(journal, runs[:1], settings=settings)
    write = journal.write
    monkeypatch.setattr(journal, "write", killed)
    with pytest.raises(KeyboardInterrupt):
      _play(service, service.predict(x[:50], None), service.tick())
    service.batcher._thread.shutdown()
  with ServiceJournal(tmp_path / "killed") as journal:
    service = _service(journal, runs[:1], settings=settings | {"drift_epsilon": 1.0})
    assert service.windows.reference is not None
    assert service.health()["privacy"]["stream_epsilon"] is None


# --- the end


class _Slow:
  def logits(self, rows):
    time.sleep(0.15)
    return np.zeros((len(rows), 10), np.float32)


def test_an_end_answers_the_batch_under_way_and_refuses_what_is_too_late(x):
  async def play():
    batcher = Batcher(max_queue=9, wait_ms=0.0)
    model = _Slow()
    first = asyncio.create_task(batcher.logits(model, x[:2], seconds=9))
    await asyncio.sleep(0.05)
    # The first has left the queue, which is empty.
    assert batcher.rows == 0
    await batcher.close(seconds=9)
    with pytest.raises(Closed):
      await batcher.logits(model, x[:1], seconds=9)
    late = Batcher(max_queue=9, wait_ms=0.0)
    tasks = [
      asyncio.create_task(late.logits(each, x[:2], seconds=9)) for each in (model, _Slow())
    ]
    await asyncio.sleep(0.05)
    await late.close(seconds=0.0)
    return await first, await asyncio.gather(*tasks, return_exceptions=True)

  answered, refused = asyncio.run(play())
  assert answered.shape == (2, 10)
  assert [type(error) for error in refused] == [Closed, Closed]
