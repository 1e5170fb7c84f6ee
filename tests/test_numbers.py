"""Numbers on the pages are those of the committed results, and what is said of them is so."""

from __future__ import annotations

import collections
import fnmatch
import json
import pathlib
import re
import subprocess

import pytest

from tests import tables
from tests.commands import ROOT

_PAGES = [
  "README.md",
  *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
_OF_WORDS = {  # tables in which nothing is measured, by their first cells; or not kept as a file
  "command|what it does",
  "page|what it answers",
  "steps|delta|random allocation, PLD",  # tests/accounting/test_page.py computes it
  "what is put to the test|command",
  "|version read|what it is",
  "|dpjax|JAX-Privacy",
  "command|what it draws",
  "`--config.partition=`|`--config.data.name=`",
  "file in `runs/quickstart`|what it is",
  "notebook|what it shows",
  "step|minutes by the clock",  # measured once, as the page says
  "|words|where it stands",
  "|",
  "what|how|proved under",
}
_TABLES = [
  pytest.param(table, id=f"{table.page}: {table.head[0]}") for table in tables.TABLES
]


def _read(page: str) -> str:
  return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("table", _TABLES)
def test_a_table_is_that_of_its_file(table):
  text = _read(table.page)
  assert tables.written(text, table) == text, "run: python -m tests.tables"


def _stranger(page: str, block: str) -> bool:
  """Whether a table is neither made from results nor known to hold no measurement."""
  head = block.splitlines()[0]
  made = {tables.line(table.head) for table in tables.TABLES if table.page == page}
  cells = [cell.strip() for cell in head.strip().strip("|").split("|")]
  words = {"|".join(cells[:count]) for count in (2, 3)}
  return head not in made and not words & _OF_WORDS


@pytest.mark.parametrize("page", _PAGES)
def test_every_table_is_known(page):
  found = tables.blocks(_read(page))
  assert not [block for block in found if _stranger(page, block)]


def test_a_table_of_invented_numbers_is_seen():
  for wrong in (
    "| SVHN | 1 |\n|---|---|\n| ours | .99 |\n",
    " data | 1\n---|---\nours | .99\n",
  ):
    (block,) = tables.blocks(f"Text.\n\n{wrong}\nMore.\n")
    assert block == wrong and _stranger("README.md", block)


def test_a_row_that_does_not_look_like_one_is_seen():
  table = next(table for table in tables.TABLES if table.page == "docs/toolbox.md")
  told = tables.made(table)
  for more in (" | ours | .99 | .99 | .99 |\n", "| ours | .99 | .99 | .99\n", "ours\n"):
    page = f"Text.\n\n{told}{more}\nMore.\n"
    assert tables.written(page, table) == f"Text.\n\n{told}\nMore.\n"


# --- files of one folder


_SWEEPS = sorted(path.parent.name for path in (ROOT / "results").glob("*/sweep.json"))


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
    told = ("epsilon_kind", "delta", "neighboring_relation", "unit")
    made[at] |= {name: of[0][name] for name in told}
  return made


def _told(value: str) -> float | str | None:
  try:
    return float(value) if value else None
  except ValueError:
    return value


@pytest.mark.parametrize("folder", _SWEEPS)
def test_a_curve_is_that_of_its_runs(folder):
  rows, points = tables.runs(folder), tables.entries(f"{folder}/curve.csv")
  (x,) = {"privacy.epsilon", "partition.alpha", "num_steps"} & points[0].keys()
  (y,) = {name[:-5] for name in points[0] if name.endswith("_mean")}
  expected = _points(rows, x, y)
  found = {(row.get("variant", ""), _told(row[x])): row for row in points}
  if "variant" not in points[0]:  # what a variant sets is x itself
    expected = {("", at): of for (_, at), of in expected.items()}
  assert found.keys() == expected.keys()
  for at, wanted in expected.items():
    for name, value in wanted.items():
      told = _told(found[at][name])
      told = told or 0.0 if name == "epsilon" else told
      near = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
      assert told == near, (at, name)


@pytest.mark.parametrize(
  "folder", ["mnist_curves", "fashion_mnist_curves", "cifar10_curves"]
)
def test_curves_are_of_the_promise_that_their_page_says(folder):
  assert "at delta 1e-5" in _read("docs/curves.md")
  for row in tables.entries(f"{folder}/curve.csv"):
    if row["privacy.epsilon"]:
      relation = "replace_special" if "DP-FTRL" in row["variant"] else "add_or_remove_one"
      promised = (
        row["epsilon_kind"],
        row["delta"],
        row["neighboring_relation"],
        row["unit"],
      )
      assert promised == ("proved", "1e-05", relation, "example"), row
      assert float(row["epsilon"]) <= float(row["privacy.epsilon"])


def _kept() -> set[str]:
  """Every file under results/ that git has or would take."""
  command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "results"]
  found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  if found.returncode:
    pytest.skip("not a checkout of git")
  return {path.removeprefix("results/") for path in found.stdout.split()} - {"README.md"}


def _patterns() -> list[str]:
  """Files and folders that the first column of results/README.md names."""
  cells = re.findall(r"^\| (`[^|]*) \|", _read("results/README.md"), re.MULTILINE)
  made = []
  for cell in cells:
    names = re.findall(r"`([^`]+)`", cell)
    first = names[0].rpartition("/")[0]  # "`secure/sums`, `regression`": of one folder
    made += [names[0], *(n if "/" in n else f"{first}/{n}" for n in names[1:])]
  return [name.replace("NAME", "*") for name in made]


def test_every_row_of_the_results_has_its_files_and_every_file_a_row():
  kept = _kept()
  rows = {name: {file for file in kept if _of(file, name)} for name in _patterns()}
  assert not [name for name, files in rows.items() if not files]
  assert not kept.difference(*rows.values())


def _of(file: str, name: str) -> bool:
  """Whether a row that names a file, with or without its ending, or a folder means this file."""
  above = map(str, (pathlib.PurePath(file), *pathlib.PurePath(file).parents))
  return any(fnmatch.fnmatch(path, form) for path in above for form in (name, f"{name}.*"))


@pytest.mark.parametrize("page", [*_PAGES, "CHANGELOG.md", "results/README.md"])
def test_results_that_a_page_names_are_there(page):
  for name in re.findall(r"`(results/[\w./*-]+)`", _read(page)):
    assert list(ROOT.glob(name.rstrip("/"))), name


# --- sentences


_SECONDS = [  # a page, its words about the seconds of a run, the sweep
  ("docs/federated.md", "{low} to {high} s a run", "fed_user_level"),
  ("configs/sweeps/fed_user_level.py", "{low} to {high} s a run", "fed_user_level"),
  ("configs/mnist_scatter_cnn.py", "{low} to {high} s", "scatter_cnn"),
  ("configs/sweeps/scatter_cnn.py", "{low} to {high} s a run", "scatter_cnn"),
  ("configs/sweeps/fed_dirichlet.py", "{low} to {high} s a run", "fed_dirichlet"),
  ("configs/sweeps/mnist_whitened.py", "{low} to {high} s a run", "mnist_whitened"),
  ("configs/fashion_mnist_whitened.py", "{low} to {high} s", "fashion_mnist_whitened"),
  ("configs/sweeps/fashion_mnist_whitened.py", "{low} to {high} s a run",
   "fashion_mnist_whitened"),
  ("configs/sweeps/ablations_cifar10.py", "{low} to {high} s a run", "ablations_cifar10"),
  ("configs/sweeps/mnist_algorithms.py", "{low} to {high} s a run", "mnist_algorithms"),
  ("configs/lm_lora.py", "{low} to {high} s a run", "lm_lora"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "words", "folder"), _SECONDS)
def test_seconds_of_a_run_are_those_of_its_file(page, words, folder):
  seconds = [row["wall_seconds"] for row in tables.runs(folder)]
  told = words.format(low=f"{min(seconds):.0f}", high=f"{max(seconds):.0f}")
  assert told in " ".join(_read(page).split())


def test_steps_on_machines_are_those_of_their_files():
  text = _read("docs/machines.md")
  one, two = (
    f"{1e3 * float(row['median_s']):.0f}" for row in tables.entries("training/devices.csv")
  )
  memory = tables.entries("training/allocator.csv")
  kept, given = (
    f"{1e3 * float(tables.one(memory, workload='wide', method=method)['step_s']):.0f}"
    for method in ("kept", "returned")
  )
  assert f"({two} ms for {one}," in text
  assert f"{kept} ms\nfor {given} (" in text


def test_the_membership_line_is_that_of_the_attacked_run():
  rows = tables.entries("attacks/membership_cifar10/attacks.csv")
  (noise,) = {row["noise_multiplier"] for row in rows if row["epsilon_kind"] == "proved"}
  text = _read("docs/attacks.md")
  assert f"--noise_multiplier={float(noise):.6f}" in text
  by = {(row["defence"], row["method"]): float(row["tpr_at_0.001_fpr"]) for row in rows}
  for method, told in {
    "lira_fixed": "6.7",
    "lira": "4.1",
    "rmia": "4.1",
    "loss": ".5",
  }.items():
    assert f"{100 * by['none', method]:.1f}".lstrip("0") == told and f"{told} %" in text
  best = max(rate for (defence, _), rate in by.items() if defence != "none")
  assert f"under DP-SGD at epsilon 8 {100 * best:.1f} %".replace(" 0.", " .") in text


def test_the_last_audit_is_as_readme_says():
  rows = tables.entries("audits/table.csv")
  assert f"{len({row['what'] for row in rows})} claims stand" in _read("README.md")
  bound, claim = "strongest lower bound (99.9 %)", "claim: epsilon"
  assert all(float(row[bound]) <= float(row[claim]) for row in rows)
  text = (ROOT / "results/audits/final_model_mnist/final_model.json").read_text()
  known, unknown = (json.loads(text)["bounds"][name] for name in ("gdp", "clopper_pearson"))
  assert f"epsilon >= {known:.2f} of the claimed 10" in _read("README.md")
  assert f"; {unknown:.2f} without that)" in _read("README.md")
