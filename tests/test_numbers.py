"""Numbers on the pages are those of the committed results, and labels say how many seeds."""

from __future__ import annotations

import csv
import functools
import json
import re

import pytest

from tests.commands import ROOT

_LINES = {  # of the curves: as a page calls them -> as the sweep does
  "whitened": "whitened scattering + linear",
  "plain": "scattering + linear",
  "plain, random allocation": "the same, random allocation",
  "plain, DP-FTRL": "the same, DP-FTRL",
  "CNN on the features": "scattering + tempered-sigmoid CNN",
  "CNN on pixels": "tempered-sigmoid CNN",
  "C4-equivariant CNN on pixels": "C4-equivariant CNN",
  "opponent colours, private channel statistics": "opponent scattering + linear",
  # of users
  "linear on pixels": "linear",
  "linear on scattering features": "scattering + linear",
  # of algorithms
  "DP-SGD, Poisson": "DP-SGD",
  "DP-FTRL, banded noise, fixed public order (no sampling to trust)": "DP-FTRL, banded",
  "DP-Adam, second moment corrected": "DP-Adam",
  "FedProx, mu 0.1": "FedProx",
}
_TABLES = [  # page, how its header begins, folder, column of the header
  ("docs/curves.md", "MNIST|0.1", "mnist_curves", "privacy.epsilon"),
  ("docs/curves.md", "Fashion-MNIST (", "fashion_mnist_curves", "privacy.epsilon"),
  ("docs/curves.md", "CIFAR-10 (", "cifar10_curves", "privacy.epsilon"),
  ("docs/federated.md", "model|0.1", "fed_user_level", "privacy.epsilon"),
  ("docs/federated.md", "|alpha 0.1", "fed_dirichlet", "partition.alpha"),
  ("docs/toolbox.md", "algorithm|", "mnist_algorithms", "privacy.epsilon"),
]
_ABLATIONS = {
  "none": "C4 network",
  "no symmetry, as wide (C1)": "no symmetry, as wide (C1)",
  "turns and mirrors (D4), as wide": "turns and mirrors (D4)",
  "no normalisation of channels": "no normalisation",
  "pixels normalised by private statistics": "private statistics of the pixels",
  "parameters averaged, decay .95": "averaged parameters (.95)",
  "cosine schedule of the learning rate": "cosine schedule",
  "batches of 256, 400 steps": "batches of 256, 400 steps",
  "batches of 4,096, 25 steps": "batches of 4,096, 25 steps",
  "two augmented copies of an example (shifts, mirrors)": "two augmented copies",
  "head sees the mean over positions": "head sees the mean over positions",
}
_WORKLOADS = {
  "small CNN, 28x28": "small_cnn",
  "linear, scattering features": "scatter_linear",
  "CNN on scattering features": "scatter_cnn",
  "CIFAR CNN": "cifar_cnn",
  "WRN-16-4, standardised kernels": "wrn",
  "MLP 784-1024-1024-10": "mlp",
  "MLP 784-4096-4096-10": "wide_mlp",
  "GPT, 4 layers, T 128": "gpt",
  "GPT, tied embeddings, LoRA": "gpt_lora",
  "ViT-Tiny/4, 32x32": "vit",
  "LSTM, T 64": "lstm",
  "mixture of 2 experts": "few_experts",
  "mixture of 16 experts": "experts",
}
_PUBLISHED = {  # row of README -> folder
  "`sweeps/mnist_whitened`": "mnist_whitened",
  "`mnist_whitened`": "mnist_whitened",
  "`mnist_scatter_linear`": "mnist_scatter_linear",
  "`fashion_mnist_whitened`": "fashion_mnist_whitened",
  "`fashion_mnist_scatter_linear`": "fashion_mnist_scatter_linear",
  "`cifar10_scatter_linear`": "cifar10_scatter_linear",
  "`cifar10_cnn`": "cifar10_cnn",
  "`sweeps/scatter_cnn`": "scatter_cnn",
  "`sweeps/mnist_cnn`": "mnist_cnn",
}


def _tables(page: str) -> list[list[list[str]]]:
  """Of each table its rows of cells, header first."""
  text = (ROOT / page).read_text(encoding="utf-8")
  blocks = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
  cells = lambda line: [cell.strip() for cell in line.strip("|").split("|")]
  made = [[cells(line) for line in block.splitlines()] for block in blocks]
  return [[rows[0], *rows[2:]] for rows in made]


@functools.cache
def _rows(file: str) -> list[dict[str, str]]:
  with open(ROOT / "results" / file, newline="", encoding="utf-8") as lines:
    return list(csv.DictReader(lines))


def _curve(folder: str) -> list[dict[str, str]]:
  return _rows(f"{folder}/curve.csv")


def _as_printed(value: str | float, cell: str) -> str:
  """To as many decimals as the cell has."""
  return f"{float(value):.{len(cell.partition('.')[2])}f}".lstrip("0")


def _x(head: str) -> str:
  """Of a column's head the value in the file, where no noise is an empty field."""
  found = re.search(r"[\d.]+", head)
  none = "inf" if head == "IID" else ""
  return repr(float(found[0])) if found else none


@pytest.mark.parametrize(("page", "first", "folder", "column"), _TABLES)
def test_a_table_is_that_of_its_file(page, first, folder, column):
  (table,) = [rows for rows in _tables(page) if "|".join(rows[0]).startswith(first)]
  points = {(row["variant"], row[column]): row for row in _curve(folder)}
  lines = [(label.partition(", ONE seed"), cells) for label, *cells in table[1:]]
  told = {
    (_LINES.get(name, name), _x(head)): (cell, one)
    for (name, one, _), cells in lines
    for head, cell in zip(table[0][1:], cells, strict=True)
    if cell != "–"
  }
  assert told.keys() == points.keys()
  for at, (cell, one) in told.items():
    assert cell == _as_printed(points[at]["test_accuracy_mean"], cell), at
    if folder.endswith("_curves"):  # whose seeds are said line by line
      assert points[at]["seeds"] == ("1" if one else "3"), at


def test_ablations_are_those_of_their_file():
  (table,) = [rows for rows in _tables("docs/curves.md") if rows[0][0] == "change"]
  points = {
    row["variant"]: row["test_accuracy_mean"] for row in _curve("ablations_cifar10")
  }
  told = {_ABLATIONS[label]: cell for label, cell in table[1:]}
  assert told == {name: _as_printed(value, ".000") for name, value in points.items()}


def test_perplexities_are_those_of_their_file():
  tables = [rows for rows in _tables("docs/language_models.md") if rows[0][0] == "epsilon"]
  points = {
    row["privacy.epsilon"] or "not private": row["test_perplexity_mean"]
    for row in _curve("lm_lora")
  }
  told = {row[0]: row[1] for row in tables[0][1:] if "untouched" not in row[0]}
  assert told == {
    name if name == "not private" else f"{float(name):g}": _as_printed(value, ".000")
    for name, value in points.items()
  }


def _published() -> list[tuple[str, dict[str, str]]]:
  """(folder, cells by the head of their column) of README's table."""
  (table,) = [rows for rows in _tables("README.md") if rows[0][0] == "config"]
  rows = [dict(zip(table[0], cells)) for cells in table[1:]]
  named = [re.split(r", | \(", row["config"])[0] for row in rows]
  return [(_PUBLISHED[name], row) for name, row in zip(named, rows)]


def test_rows_of_the_readme_are_those_of_their_files():
  """Mean, smallest and largest accuracy, and the seconds of a run, over three seeds."""
  for folder, told in _published():
    if folder == "cifar10_cnn":  # one run
      run = json.loads((ROOT / "results" / folder / "result.json").read_text())
      assert told["ours"] == _as_printed(run["test_accuracy"], ".000") + ", one seed"
      assert told["time a run"] == f"{run['wall_seconds']:.0f} s"
      continue
    data, epsilon = told["data"], float(told["epsilon"])
    is_of = lambda row: (
      float(row["privacy.epsilon"] or "inf") == epsilon and row.get("variant", data) == data
    )
    (point,) = filter(is_of, _curve(folder))
    mean, low, high = re.fullmatch(r"(\S+) \[(\S+), (\S+)\]", told["ours"]).groups()
    for part, cell in (("mean", mean), ("min", low), ("max", high)):
      assert cell == _as_printed(point[f"test_accuracy_{part}"], cell), (told, part)
    runs = json.loads((ROOT / "results" / folder / "sweep.json").read_text())["rows"]
    seconds = [run["wall_seconds"] for run in filter(is_of, runs)]
    assert len(seconds) == 3 == int(point["seeds"])
    assert told["time a run"] == f"{min(seconds):.0f} to {max(seconds):.0f} s", told


def _entries(file: str, first: str) -> dict[tuple[str, str], dict[str, str]]:
  return {(row[first], row["method"]): row for row in _rows(file)}


def _speeds(workload: str) -> dict[str, float]:
  """By the head of the page's columns."""
  began = _entries("gradients/fourth_run.csv", "workload")
  began |= _entries("gradients/gradients.csv", "workload")
  ratio = lambda method: float(began.get((workload, method), {}).get("ratio") or "inf")
  now = _entries("gradients/eighth_run.csv", "workload")[workload, "auto"]
  return {
    "dpjax auto": ratio("auto"),
    "dpjax vmap": ratio("vmap"),
    "jax-privacy 2.0": ratio("jax_privacy"),
    "Opacus 1.6, best mode": min(ratio("opacus"), ratio("opacus_ghost")),
    "auto, now": float(now["ratio"]),
    "memory, now": float(now["memory_ratio"]),
    "compile, now": float(now["compile_ratio"]),
  }


def test_speeds_of_gradients_are_those_of_their_files():
  tables = _tables("docs/gradients.md")
  (table,) = [rows for rows in tables if rows[0][-1] == "compile, now"]
  assert {label for label, *_ in table[1:]} == _WORKLOADS.keys()
  told = [
    (label, head, cell[:-1])
    for label, *cells in table[1:]
    for head, cell in zip(table[0][1:], cells)
    if re.fullmatch(r"[\d.]+x", cell)
  ]
  assert len(told) > 60
  for label, head, times in told:
    digits = len(times.partition(".")[2])
    assert times == f"{_speeds(_WORKLOADS[label])[head]:.{digits}f}", (label, head)


def test_minutes_of_whole_runs_are_those_of_their_file():
  (table,) = [rows for rows in _tables("docs/gradients.md") if rows[0][0] == "config"]
  names = ("mnist_cnn", "mnist_cnn --config.microbatch_size=none", "cifar10_cnn")
  found = _entries("training/training.csv", "config")
  for name, (_, _, *cells) in zip(names, table[1:], strict=True):
    for method, cell in zip(("vmap", "auto"), cells, strict=True):
      value = float(found[name, method]["minutes"])
      assert cell == (f"{value:.1f} min" if value < 20 else f"{value:.0f} min"), name


def test_steps_on_machines_are_those_of_their_files():
  text = (ROOT / "docs/machines.md").read_text(encoding="utf-8")
  one, two = (
    f"{1e3 * float(row['median_s']):.0f}" for row in _rows("training/devices.csv")
  )
  memory = _entries("training/allocator.csv", "workload")
  kept, given = (
    f"{1e3 * float(memory['wide', method]['step_s']):.0f}"
    for method in ("kept", "returned")
  )
  assert f"({two} ms for {one}," in text
  assert f"{kept} ms\nfor {given} (" in text
