"""The scores of a finished run, and what was declared about its data, as a report tells them."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dpjax.accounting.text import lower, round_out, upper
from dpjax.attacks.roc import exact_interval
from dpjax.data import table_declaration
from dpjax.data.table_declaration import Category, Number
from dpjax.experiments.board.document import Block, Paragraph, Table
from dpjax.experiments.run import model_inputs, writers
from dpjax.experiments.run.finished import Finished

# Scores of result.json in words, in the order of the report.
_WORDS = {
  "test_accuracy": "share of right answers (accuracy)",
  "test_balanced_accuracy": "the same, every class counted alike (balanced accuracy)",
  "test_largest_class": "share of right answers if the most frequent class were always given",
  "test_auroc": "how well cases are ranked: 1 perfect, 0.5 a coin (AUROC)",
  "test_average_precision": "how well rare cases are found: 1 perfect (average precision)",
  "test_calibration_error": "how far stated probabilities are off (calibration error)",
  "test_loss": "cost of stated probabilities: smaller is better (log loss)",
  "test_class_shares_loss": "the same, if the shares of the classes were always stated",
  "test_rmse": "typical error, in units of the data (root mean squared error)",
  "test_r2": "share of the differences that is explained: 1 perfect, 0 useless (R2)",
  "test_exact_match": "share of records with all labels right",
  "test_silo_accuracy": "share of right answers of all silos, each with the model that it uses",
  "test_silo_accuracy_mean": "the same, every silo counted alike",
  "test_silo_accuracy_worst": "the same, of the worst silo",
  "test_silo_accuracy_std": "how much silos differ (standard deviation of these accuracies)",
  "test_silo_accuracy_p10": "accuracy that 9 of 10 silos reach or exceed",
  "test_silo_accuracy_p50": "accuracy of the silo in the middle",
  "test_silo_accuracy_p90": "accuracy that 1 of 10 silos reaches or exceeds",
  "test_client_accuracy": "share of right answers of all clients, each with the model that it uses",
  "test_client_accuracy_mean": "the same, every client counted alike",
  "test_client_accuracy_worst": "the same, of the worst client",
  "test_client_accuracy_std": "how much clients differ (standard deviation of these accuracies)",
  "test_client_accuracy_p10": "accuracy that 9 of 10 clients reach or exceed",
  "test_client_accuracy_p50": "accuracy of the client in the middle",
  "test_client_accuracy_p90": "accuracy that 1 of 10 clients reaches or exceeds",
  "test_perplexity": "number of words among which the model wavers (perplexity)",
}
_OF_SILO = "test_silo_accuracy/"
_ABOUT = (
  "The scores were measured on test records, which were not trained on. The protection does not "
  "cover test records: they are taken as public."
)
_AGAIN = (
  "The noise of the protection is drawn anew in each run. So another run with the same settings "
  "gets other scores. One run does not show how much they differ."
)
_CHOSEN = (
  "If settings were chosen by looking at these test records, the scores are too good. No file says "
  "whether that happened."
)
_TOO_GOOD = (
  "The model was chosen among several by {y} on these test records, so this score is too good. "
  "Other test records would show how good the model is."
)
_NO_BETTER = (
  "WARNING: the share of right answers is no better than that of always giving the most frequent "
  "class."
)
_NO_SURER = (
  "WARNING: always stating the classes' shares would cost less than these probabilities."
)
_OF_SAMPLES = (
  "The scores are of classifiers that saw samples alone. Samples have every class equally often, "
  "unlike the data."
)
_FIELDS = ("test_recall_by_class", "test_confusion", "test_by_group")


def headline(result: Mapping[str, Any]) -> str:
  """Returns the score of a run in a few words."""
  return writers.headline(result).replace("test_", "").replace("=", " ")


def data_name(result: Mapping[str, Any]) -> str:
  """Returns the name of a run's data; of a file, without its folders.

  >>> data_name({"dataset": "/home/ann/people.csv"}), data_name({"dataset": "digits"})
  ('people.csv', 'digits')
  """
  return pathlib.PurePath(str(result.get("dataset"))).name


def blocks(run: Finished) -> list[Block]:
  """Returns what a report says of the scores."""
  result = run.result
  known = {name: value for name, value in result.items() if _is_score(name, value)}
  if not known:
    return [Paragraph("The run measured no scores on test records.")]
  names = [
    *(name for name in _WORDS if name in known),
    *sorted(known.keys() - _WORDS.keys()),
  ]
  rows = [
    [_WORDS.get(name, _with_spaces(name)), _in_interval(result, name)] for name in names
  ]
  told: list[Block] = [Paragraph(_ABOUT), Table(("score", "value"), rows)]
  told += [Paragraph(_OF_SAMPLES)] if "samples_by_class" in result else []
  largest = result.get("test_largest_class")
  if largest is not None and result["test_accuracy"] <= largest:
    told.append(Paragraph(_NO_BETTER))
  shares_loss = result.get("test_class_shares_loss")
  if shares_loss is not None and result["test_loss"] > shares_loss:
    told.append(Paragraph(_NO_SURER))
  told += _by_class(run)
  told += _by_group(result)
  told += [Paragraph(_AGAIN)] if result["epsilon_kind"] != "none" else []
  selection = result.get("selection")
  told.append(Paragraph(_TOO_GOOD.format(**selection) if selection else _CHOSEN))
  note = (result.get("audit") or {}).get("note")
  return [*told, Paragraph(str(note))] if note else told


def _is_score(name: str, value: Any) -> bool:
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  return name.startswith("test_") and name not in _FIELDS and is_number


def _with_spaces(name: str) -> str:
  if name.startswith(_OF_SILO):
    return f"the same, of silo {name.removeprefix(_OF_SILO)}"
  return name.removeprefix("test_").replace("_", " ")


def _show(value: Any) -> str:
  number = writers.number(value)
  return "unknown" if math.isnan(number) else f"{number:.4g}"


def _in_interval(scores: Mapping[str, Any], name: str) -> str:
  value, interval = _show(scores[name]), scores.get(f"{name}_interval")
  if not interval:
    return value
  return f"{value} ({lower(interval[0])} to {upper(interval[1])} with 95 % confidence)"


def _by_class(run: Finished) -> list[Block]:
  """Returns the scores of each class, and how sure the accuracy is, from the counts of answers."""
  counts = run.result.get("test_confusion")
  if not counts:
    return []
  inputs = model_inputs.read(run.path)
  labels: Sequence[str] = inputs.labels if inputs is not None else ()
  if len(labels) != len(counts):
    labels = [str(place) for place in range(len(counts))]
  rows = [
    [label, f"{sum(row)}", f"{row[place]}"]
    for place, (label, row) in enumerate(zip(labels, counts))
  ]
  total = sum(map(sum, counts))
  right = sum(row[place] for place, row in enumerate(counts))
  told: list[Block] = [Table(("class", "test records", "recognised"), rows)]
  if total:
    ends = round_out(exact_interval(right, total, 0.95), between=" and ")
    told.insert(
      0,
      Paragraph(
        f"{right} of {total} test records were answered right. For other records like these, the "
        f"share of right answers of this model lies between {ends}, with 95 % confidence."
      ),
    )
  return told


def _by_group(result: Mapping[str, Any]) -> list[Block]:
  by_group = result.get("test_by_group")
  if not by_group:
    return []
  names = dict.fromkeys(
    name
    for scores in by_group["scores"].values()
    for name, value in scores.items()
    if not isinstance(value, list)
  )
  rows = [
    [group, *(_in_interval(scores, name) if name in scores else "" for name in names)]
    for group, scores in by_group["scores"].items()
  ]
  head = [by_group["column"], *map(_with_spaces, names)]
  return [Paragraph("By group, on the test records:"), Table(head, rows)]


def declarations(run: Finished) -> list[Block]:
  """Returns what a report says of the public facts about the data."""
  inputs = model_inputs.read(run.path)
  name = data_name(run.result)
  if inputs is None:
    return [Paragraph(f"The data are {name}. The folder holds no further declaration.")]
  told: list[Block] = [
    Paragraph(
      f"The data are {name}. These facts were declared, and count as public. If somebody read them "
      "from the records, the protection does not cover that."
    )
  ]
  if inputs.declaration is None:
    shape = " x ".join(map(str, inputs.shape))
    rows = [["how many numbers one record has", shape]]
    rows += [["classes", ", ".join(inputs.labels)]] if inputs.labels else []
    return [*told, Table(("fact", "declared"), rows)]
  parsed = table_declaration.parse(inputs.declaration)
  rows = [[column, _kind(kind)] for column, kind in parsed.columns.items()]
  targets = ", ".join(parsed.target_columns)
  rows.append([f"{targets} (what is learnt)", _kind(parsed.target_kind)])
  if parsed.group is not None and parsed.group[0] not in parsed.columns:
    rows.append([f"{parsed.group[0]} (scores by group)", _kind(parsed.group[1])])
  if parsed.num_examples is not None:
    rows.append(["number of records", f"about {parsed.num_examples}"])
  num_users = dict(run.config.get("data") or {}).get("num_users")
  if num_users is not None:
    rows.append(["number of users", f"about {num_users}"])
  return [*told, Table(("column", "declared"), rows)]


def _kind(kind: Any) -> str:
  if isinstance(kind, Number):
    missing = "" if kind.missing is None else f"; no value counts as {kind.missing:g}"
    return f"{kind.bounds.lower:g} to {kind.bounds.upper:g}{missing}"
  if isinstance(kind, Category):
    return ", ".join(map(str, kind.values))
  return f"text of at most {kind.length} tokens"
