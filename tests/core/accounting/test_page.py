"""The tables of epsilons in the guide, computed anew."""

import re
import shlex

import pytest

from dpjax import accounting
from dpjax.accounting.event_kinds.random_allocation import random_allocation_event
from tests import commands, pages
from tests.commands import ROOT


def _rows(name):
  return [list(row.values()) for row in pages.tables().entries(f"accounting/{name}.csv")]


def _epsilon(event, delta, by="pld", relation="add_or_remove_one"):
  return accounting.epsilon(
    event, delta=delta, neighboring_relation=relation, accountant=by
  )


@pytest.mark.cases(quick=[1], long=...)
@pytest.mark.parametrize(
  "row", _rows("one_pass"), ids=lambda row: f"{row[0]}, delta {row[1]}"
)
def test_the_table_of_one_pass_is_that_of_the_library(row):
  steps = int(row[0].split(", ")[0].replace(",", ""))
  passes = 10 if "passes" in row[0] else 1
  noise, delta = accounting.gaussian_event(1.0), float(row[1])
  once = random_allocation_event(noise, num_steps=steps)
  allocated = accounting.compose(once, passes)
  sampled = accounting.poisson_sampled_event(noise, sampling_prob=1 / steps)
  found = [
    _epsilon(allocated, delta),
    _epsilon(allocated, delta, by="rdp"),
    _epsilon(accounting.compose(sampled, steps * passes), delta),
    _epsilon(allocated, delta, relation="replace_one"),
    _epsilon(accounting.compose(noise, passes), delta),
  ]
  for cell, value in zip(row[2:], found, strict=True):
    shown = accounting.upper(value, decimals=len(cell.partition(".")[2]))
    assert cell == shown.removeprefix("0"), (cell, value)


@pytest.mark.cases(long=["min_sep"], slow=...)
@pytest.mark.parametrize("sampler", ["balls_in_bins", "min_sep"])
def test_the_table_of_bins_is_what_its_commands_print(sampler):
  text = (ROOT / "docs/accounting.md").read_text(encoding="utf-8")
  (line,) = re.findall(rf"^python -m (launch\.account --sampler={sampler} .*)$", text, re.M)
  done = commands.run(*shlex.split(line))
  assert done.returncode == 0, done.stderr
  printed = re.findall(r"^ +[\d.]+ +([\d.]+) ", done.stdout, re.M)
  epsilons = [
    accounting.upper(float(value), decimals=2).removeprefix("0") for value in printed
  ]
  label = sampler.replace("_", " ").replace("min sep", "b-min-sep")
  (row,) = (row for row in _rows("bins") if row[0] == label)
  shown = re.findall(r"\d+\.\d+", " ".join(row[1:]))
  # Simulated, simulated at 99 %, proved or that of cyclic Poisson batches, unamplified.
  places = (0, 1, 2, 4) if sampler == "balls_in_bins" else (0, 1, 4, 2)
  assert shown == [epsilons[place] for place in places]
