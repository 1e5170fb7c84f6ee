"""The committed results agree with themselves, and every table of the guide can be made of them."""

from __future__ import annotations

import collections
import fnmatch
import json
import pathlib
import re
import subprocess

import pytest

from tests import pages
from tests.commands import ROOT

tables = pages.tables()
_TABLES = [
  pytest.param(table, id=f"{table.page}: {table.head[0]}") for table in tables.TABLES
]


def _read(page: str) -> str:
  return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.cases(slow=["docs/correlated.md: strategy"])
@pytest.mark.parametrize("table", _TABLES)
def test_a_table_is_made_of_the_results(table):
  rows = table.rows()
  assert rows and {len(row) for row in rows} == {len(table.head)}


def test_a_page_gets_the_numbers_of_the_results_and_keeps_its_other_tables():
  table = next(table for table in tables.TABLES if table.page == "docs/toolbox.md")
  page = "Text.\n\n{}\nMore.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
  stale = f"{tables.line(table.head)}\n{'|---' * len(table.head)}|\n| ours | .99 |\n"
  assert tables.written(page.format(stale), table.page) == page.format(tables.made(table))


def test_settings_for_tables_are_no_worse_than_the_shares_of_the_classes():
  rows = tables.entries("table_settings/table.csv")
  assert {row["epsilon"] for row in rows} == {"1.0", "3.0", "8.0"}
  for row in rows:
    nothing_to_learn = row["table"] in ("coin", "stock market")
    excess = float(row["loss"]) - float(row["constant_loss"])
    assert excess < (0.05 if nothing_to_learn else 0), row


# --- files of one folder


_NOT_KEPT = {"distributed_noise_digits", "federated_mnist"}  # runs of these two, once
_CURVES = [path.parent for path in sorted((ROOT / "results").rglob("curve.csv"))]
_SWEEPS = [path.name for path in _CURVES if path.name not in _NOT_KEPT]


def _points(rows: list[dict], x: str, y: str) -> dict[tuple, dict[str, float]]:
  """Means over seeds of a sweep's runs: (line, x) -> what its CSV must hold."""
  values = collections.defaultdict(list)
  for row in rows:
    place = row.get(x)
    if x == "privacy.epsilon" and row["epsilon_kind"] == "none":
      place = None
    line = str(row.get("variant", "")).split(" @ ")[0]
    values[line, None if place is None else float(place)].append(row)
  made = {}
  for at, of in values.items():
    found = [row[y] for row in of]
    made[at] = {"seeds": len(of), f"{y}_mean": sum(found) / len(of)}
    made[at] |= {f"{y}_min": min(found), f"{y}_max": max(found)}
    if x == "num_steps":
      continue
    kinds = {row["epsilon_kind"] for row in of}
    assert len(kinds) == 1 and len({row["seed"] for row in of}) == len(of), at
    made[at] |= {"epsilon": max((row["epsilon"] or 0) for row in of)}
    names = ("epsilon_kind", "delta", "neighboring_relation", "unit")
    made[at] |= {name: of[0][name] for name in names}
  return made


def _told(value: str) -> float | str | None:
  try:
    return float(value) if value else None
  except ValueError:
    return value


@pytest.mark.parametrize("folder", _SWEEPS)
def test_a_curve_is_that_of_its_runs(folder):
  rows, points = tables.runs(folder), tables.entries(f"{folder}/curve.csv")
  known = ("privacy.epsilon", "partition.alpha", "num_steps", "privacy.l2_clip_norm")
  known += ("optimizer.learning_rate",)
  (x,) = set(known) & points[0].keys()
  (y,) = {name[:-5] for name in points[0] if name.endswith("_mean")}
  expected = _points(rows, x, y)
  found = {(row.get("variant", ""), _told(row[x])): row for row in points}
  if "variant" not in points[0]:  # what a variant sets is x itself
    expected = {("", at): of for (_, at), of in expected.items()}
  assert found.keys() == expected.keys()
  for at, wanted in expected.items():
    for name, value in wanted.items():
      stated = _told(found[at][name])
      stated = stated or 0.0 if name == "epsilon" else stated
      near = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
      assert stated == near, (at, name)


@pytest.mark.parametrize(
  "folder", ["mnist_curves", "fashion_mnist_curves", "cifar10_curves"]
)
def test_curves_are_of_the_promise_that_their_page_says(folder):
  for row in tables.entries(f"{folder}/curve.csv"):
    if row["privacy.epsilon"]:
      relation = "replace_special" if "DP-FTRL" in row["variant"] else "add_or_remove_one"
      promised = tuple(
        row[name] for name in ("epsilon_kind", "neighboring_relation", "unit", "delta")
      )
      assert promised == ("proved", relation, "example", "1e-05"), row
      assert float(row["epsilon"]) <= float(row["privacy.epsilon"])


_RADP = sorted(path.parent.name for path in (ROOT / "results").glob("radp/*/claims.csv"))


@pytest.mark.parametrize("folder", _RADP)
def test_claims_are_those_of_their_runs(folder):
  """Means over seeds, and the losses by epoch, which end where the runs did."""
  runs = json.loads((ROOT / f"results/radp/{folder}/results.json").read_text())
  names = ("curve", "dataset", "epsilon_target", "seed")
  points, last = collections.defaultdict(list), {}
  for run in runs:
    points[tuple(run[name] for name in names[:3])].append(run)
    last[tuple(str(run[name]) for name in names)] = run["test_loss"], run["test_accuracy"]
  expected = sorted(
    (curve, data, len(of), sum(run["test_accuracy"] for run in of) / len(of))
    for (curve, data, _), of in points.items()
  )
  found = sorted(
    (row["method"], row["dataset"], int(row["seeds"]), float(row["test_accuracy"]))
    for row in tables.entries(f"radp/{folder}/claims.csv")
  )
  assert [row[:3] for row in found] == [row[:3] for row in expected]
  assert [row[3] for row in found] == pytest.approx([row[3] for row in expected])
  ended = {
    tuple(row[name] for name in names): (row["test_loss"], row["test_accuracy"])
    for row in tables.entries(f"radp/{folder}/report.csv")  # its epochs are in order
  }
  assert ended.keys() == last.keys()
  for at, values in last.items():
    assert tuple(map(float, ended[at])) == pytest.approx(values), at


_OF_GRADIENTS = [
  path.relative_to(ROOT / "results").as_posix()
  for pattern in ("gradients/*.csv", "h100/gradients_*.csv")
  for path in sorted((ROOT / "results").glob(pattern))
]


@pytest.mark.parametrize("file", _OF_GRADIENTS)
def test_ratios_of_gradients_are_those_of_their_seconds(file):
  rows = tables.entries(file)
  ordinary = {row["workload"]: row for row in rows if row["method"] == "ordinary"}
  columns = {
    "median_s": "ratio", "buffer_bytes": "memory_ratio", "compile_s": "compile_ratio"
  }  # fmt: skip
  for row in rows:
    for value, ratio in columns.items():
      if row.get(ratio):
        base = float(ordinary[row["workload"]][value])
        assert float(row[ratio]) == pytest.approx(float(row[value]) / base, rel=1e-6), row


def test_minutes_of_whole_runs_are_those_of_their_steps():
  for row in tables.entries("training/training.csv"):
    minutes = float(row["median_s"]) * int(row["num_steps"]) / 60
    assert float(row["minutes"]) == pytest.approx(minutes)


# --- folders


def _kept() -> set[str]:
  """Every file under results/ that git has or would take, and that is there."""
  command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "results"]
  found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  if found.returncode:
    pytest.skip("not a checkout of git")
  there = {path for path in found.stdout.split() if (ROOT / path).exists()}
  return {path.removeprefix("results/") for path in there} - {"README.md"}


def _published() -> list[str]:
  """Experiments of relevance, which have a folder each."""
  found = [path.stem for path in sorted((ROOT / "configs/radp").glob("*.py"))]
  return [name for name in found if not name.startswith(("__", "common", "quickstart"))]


def _patterns() -> list[str]:
  """Files and folders that the first column of results/README.md names."""
  head = "| folder | command | hardware |"
  every = tables.blocks(_read("results/README.md"))
  (table,) = (block for block in every if block.splitlines()[0] == head)
  made = []
  for line in table.splitlines()[2:]:
    names = re.findall(r"`([^`]+)`", line.split(" | ")[0])
    assert names, line
    first = names[0].rpartition("/")[0]  # "`secure/sums`, `regression`": of one folder
    made += [names[0], *(n if "/" in n else f"{first}/{n}" for n in names[1:])]
  made.remove("radp/NAME")
  return [*made, *(f"radp/{name}" for name in _published())]


def test_every_row_of_the_results_has_its_files_and_every_file_a_row():
  kept = _kept()
  rows = {name: {file for file in kept if _of(file, name)} for name in _patterns()}
  assert not [name for name, files in rows.items() if not files]
  assert not kept.difference(*rows.values())


def _of(file: str, name: str) -> bool:
  """Whether a row that names a file, with or without its ending, or a folder means this file."""
  above = map(str, (pathlib.PurePath(file), *pathlib.PurePath(file).parents))
  return any(fnmatch.fnmatch(path, form) for path in above for form in (name, f"{name}.*"))
