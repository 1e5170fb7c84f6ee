"""Histograms that a stream is compared with, and their cost for records that are in them.

| `--reference`  | rows                        | cost for a training record                    |
| -------------- | --------------------------- | --------------------------------------------- |
| stream         | the first window            | none                                          |
| public:NAME    | a data set that is public   | none                                          |
| FILE.json      | counts that were released   | none beyond their own                         |
| training       | the run's own training rows | `--reference_epsilon`, added to the training's |
| training       | the same, exactly           | no epsilon holds: only with --exact_reference |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpjax import data, validate
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.run import saved, writers
from dpjax.mechanisms import BudgetLedger
from dpjax.serving import drift
from dpjax.serving.drift import Bins
from dpjax.serving.journal import ServiceJournal
from dpjax.serving.predictor import Predictor, digest_of
from dpjax.serving.windows import Reference
from dpjax.validate import UserError

_PUBLIC = "public:"


def check(text: str, *, epsilon: float | None = None, exact: bool = False) -> None:
  """Checks the arguments of `make`, before a run is loaded or a journal begins.

  Raises:
    UserError: `text` is no reference; "training" has neither `epsilon` nor `exact`, or both;
      another `text` has one of them.
  """
  if text == "training":
    if exact == (epsilon is not None):
      raise UserError(
        "training rows are private: their counts need reference_epsilon=E, or exact_reference, "
        "after which no epsilon holds; or take reference=stream or public:NAME",
        field="reference",
        value=text,
      )
    if epsilon is not None:
      validate.positive(reference_epsilon=epsilon)
  elif epsilon is not None or exact:
    field_name = "reference_epsilon" if epsilon is not None else "exact_reference"
    value = exact if epsilon is None else epsilon
    raise UserError(
      "would be ignored, it needs reference=training", field=field_name, value=value
    )
  elif text != "stream" and not text.startswith(_PUBLIC) and not text.endswith(".json"):
    raise UserError(
      "must be stream, training, public:NAME or FILE.json", field="reference", value=text
    )


def make(
  text: str,
  run: Predictor,
  bins: Sequence[Bins],
  journal: Callable[[], ServiceJournal],
  *,
  epsilon: float | None = None,
  exact: bool = False,
) -> Reference | None:
  """Returns the reference that a flag names.

  Returns None if the first window of the stream is the reference, or if there are no bins.

  Args:
    text: stream, training, public:NAME or FILE.json.
    run: model whose answers are counted.
    bins: public bins.
    journal: function that returns the journal, which "training" alone calls: it keeps the noisy
      reference, so that a restart does not account for it again.
    epsilon: epsilon of the noise on the counts of training rows, for all bins together.
    exact: whether training rows are counted without noise.

  Raises:
    UserError: as `check`; a file has counts of other bins; "public" data are those of the run,
      whose counts cost its records; noise is to hide training rows, but the unit of privacy is not
      one row.
  """
  check(text, epsilon=epsilon, exact=exact)
  if text == "stream" or not bins:
    return None
  if text == "training":
    return _of_training(run, bins, journal(), epsilon, exact)
  with validate.about("reference", text, but=("reference",)):
    if text.startswith(_PUBLIC):
      name = text.removeprefix(_PUBLIC)
      private = run.result.get("epsilon_kind") != "none"
      if private and saved.bare(name) == saved.bare(str(run.result.get("dataset"))):
        raise UserError(
          "holds the training rows of this run, whose exact counts no epsilon covers; take "
          "reference=training with reference_epsilon=E",
          field="reference",
          value=text,
        )
      public, _ = data.load(name)
      return Reference(_count(run, bins, public.x), "public")
    return Reference(_of_file(text, bins), "file")


def _count(run: Predictor, bins: Sequence[Bins], x: Any) -> dict[str, Any]:
  """Counts rows exactly, NOT privately. Rows are read in parts, since they may lie in files."""
  totals = {each.name: np.zeros(each.size, np.int64) for each in bins}
  for start in range(0, len(x), drift.PART):
    rows = run.raw(np.asarray(x[start : start + drift.PART]))
    counts = drift.exact_counts(bins, rows, run.classes(run.logits(rows)))
    totals = {name: total + counts[name] for name, total in totals.items()}
  return {name: total.tolist() for name, total in totals.items()}


def _of_file(path: str, bins: Sequence[Bins]) -> dict[str, Any]:
  held = writers.read_json(path)
  sizes = {each.name: each.size for each in bins}
  if not isinstance(held, dict) or set(held) != set(sizes):
    raise UserError(f"must have the keys {', '.join(sizes)}", field="reference", value=path)
  for name, counts in held.items():
    is_list = isinstance(counts, list) and len(counts) == sizes[name]
    if not is_list or not all(type(count) in (int, float) for count in counts):
      raise UserError(
        f"{name}: must be {sizes[name]} counts", field="reference", value=path
      )
  return held


def _of_training(
  run: Predictor,
  bins: Sequence[Bins],
  journal: ServiceJournal,
  epsilon: float | None,
  exact: bool,
) -> Reference:
  if exact:
    writers.warn(
      "--exact_reference: /health, alarms and the journal follow from exact counts of training "
      "rows, so the epsilon of the training does not hold for this service"
    )
    # Later starts learn from this line that no epsilon holds any more, whatever their reference.
    journal.write("reference_charge", run=digest_of(run), epsilon=None, spent=None)
    return Reference(_count(run, bins, _training_rows(run)), "exact", epsilon=math.inf)
  assert epsilon is not None
  unit = run.result.get("unit")
  if unit not in (None, "example"):
    raise UserError(
      f"needs a run whose unit is an example, not a {unit}: a {unit} has many rows",
      field="reference",
      value="training",
    )
  relation = str(run.result.get("neighboring_relation") or "add_or_remove_one")
  ledger = BudgetLedger(epsilon=1e12, neighboring_relation=relation)
  for line in journal.of_kind("reference_charge"):
    if line["run"] == digest_of(run) and line["epsilon"] is not None:
      ledger = ledger.spend("reference", epsilon=line["epsilon"])
  for line in reversed(journal.of_kind("reference")):
    # Earlier noisy counts are used again: noise drawn a second time would cost epsilon again.
    same = line["run"] == digest_of(run) and line["source"] == "noised"
    if same and drift.fits(line["counts"], bins):
      return Reference(line["counts"], "noised", line["scale"], ledger.spent[0])
  exact_counts = _count(run, bins, _training_rows(run))
  ledger = ledger.spend("reference", epsilon=epsilon)
  # This line is on the disk before the noise is drawn, as with every charge.
  journal.write(
    "reference_charge",
    run=digest_of(run),
    epsilon=epsilon,
    neighboring_relation=relation,
    spent=ledger.spent[0],
  )
  counts, scale = drift.noisy_counts(exact_counts, bins, epsilon=epsilon, relation=relation)
  journal.write(
    "reference", run=digest_of(run), source="noised", counts=counts, scale=scale
  )
  return Reference(counts, "noised", scale, ledger.spent[0])


def _training_rows(run: Predictor) -> Any:
  """Returns the raw training rows of a run, in the form in which requests bring rows."""
  config = run.config
  # The rows are not centred here, since the rows of a request are not, either.
  raw = dataclasses.replace(config, data=dataclasses.replace(config.data, center=False))
  train, _ = central.load_data(raw, features=False)
  return train.x[:] if train.present is None else train.x[:][train.present]
