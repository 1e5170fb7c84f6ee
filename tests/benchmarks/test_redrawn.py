"""Printed intervals that are run again: which they are, and that a second call goes on."""

import csv

from benchmarks import redrawn


def test_each_printed_interval_has_its_own_name_and_a_width():
  every = redrawn.intervals()
  assert len({each.name for each in every}) == len(every) > 60
  assert all(each.low < each.high and each.runs > 1 for each in every)


def test_a_second_call_goes_on_with_the_same_draws(monkeypatch, tmp_path):
  tries = []
  one = lambda name: redrawn.Interval(
    name, "loss", 5, 0.0, 1.0, lambda: tries.append(name) or (0.5 if name < "c" else 2.0)
  )
  monkeypatch.setattr(redrawn, "intervals", lambda: [one(name) for name in "abcd"])
  for draws in (2, 4):
    monkeypatch.setattr("sys.argv", ["redrawn", f"--draws={draws}", f"--out={tmp_path}"])
    redrawn.main()
  assert sorted(tries) == [*"abcd"]
  with (tmp_path / "redrawn.csv").open() as lines:
    inside = {row["interval"]: row["is_inside"] for row in csv.DictReader(lines)}
  assert inside == {"a": "True", "b": "True", "c": "False", "d": "False"}
