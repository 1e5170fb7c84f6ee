"""Private choices among architectures: `python -m benchmarks.architecture --workdir=DIR --out=DIR`.

Carries out configs/sweeps/architecture.py ten times, each with fresh keys and a fresh random number
of trials. Writes runs.csv (what each choice released) and summary.csv (mean, standard deviation and
a t interval at 95 % of the test accuracies, and who was chosen) to --out. A choice that has
finished in --workdir is not made again.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import statistics
from typing import Any

from scipy import stats

from configs.sweeps import architecture
from dpjax.experiments.run import report
from dpjax.experiments.sweeps import sweep, tuning

_SHOWN = ("epsilon", "delta", "epsilon_of_one_run", "neighboring_relation", "unit")
Row = dict[str, Any]


def chosen(folder: pathlib.Path) -> Row:
  """Returns what one private choice releases."""
  config = architecture.get_config()
  runs = sweep.Runs(architecture.get_configs(config), config)
  found = tuning.run_selection(runs, folder)
  selection = found["selection"]
  named = {"architecture": selection["setting"], "test_accuracy": selection["score"]}
  return named | {name: (found | selection)[name] for name in _SHOWN}


def summary(rows: list[Row]) -> Row:
  """Returns mean, standard deviation and interval of the accuracies, and counts of who was chosen.

  >>> rows = [{"architecture": "linear", "test_accuracy": x} for x in (0.8, 0.9)]
  >>> found = summary(rows)
  >>> round(found["mean"], 3), round(found["sd"], 3), found["chosen"]
  (0.85, 0.071, 'linear 2')
  """
  values = [row["test_accuracy"] for row in rows]
  mean, sd = statistics.fmean(values), statistics.stdev(values)
  half = float(stats.t.ppf(0.975, len(values) - 1)) * sd / len(values) ** 0.5
  names = collections.Counter(row["architecture"] for row in rows).most_common()
  return {
    "n": len(values),
    "mean": mean,
    "sd": sd,
    "low": mean - half,
    "high": mean + half,
    "least": min(values),
    "most": max(values),
    "chosen": ", ".join(f"{name} {count}" for name, count in names),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--workdir", type=pathlib.Path, required=True)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--runs", type=int, default=10, help="2 or more")
  flags = parser.parse_args()
  flags.out.mkdir(parents=True, exist_ok=True)
  rows: list[Row] = []
  for run in range(flags.runs):
    rows.append({"run": run, **chosen(flags.workdir / str(run))})
    report.write_csv(flags.out / "runs.csv", rows)
    print(*rows[-1].values(), flush=True)
  report.write_csv(flags.out / "summary.csv", [summary(rows)])


if __name__ == "__main__":
  import launch  # noqa: F401  # keeps compiled programs, as a user's command does

  main()
