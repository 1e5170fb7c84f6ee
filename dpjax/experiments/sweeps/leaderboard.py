"""Entries of finished runs for the leaderboard of private image classification.

The board (private-machinelearning.github.io; Mokhtari et al. 2026, arXiv:2601.17189) keeps a YAML
file for each data set and each kind of public data. An entry names a method and its claims. A claim
is a model, an epsilon, a delta, an accuracy and an accountant. All numbers of a claim are read from
the files of the runs. What the board's rules do not allow is refused.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from dpjax import accounting, validate
from dpjax.data import published
from dpjax.experiments.checks import several_runs
from dpjax.experiments.checks.several_runs import STRANGE
from dpjax.experiments.run import workdir, writers
from dpjax.experiments.sweeps import engine
from dpjax.types import NeighboringRelation
from dpjax.validate import UserError

Row = dict[str, Any]

# Maps a data set of the board to (prefix of file names, kinds of public data with a file).
BOARDS = {
  "CIFAR-10": ("CIFAR10", ("no", "IN1K", "DC1B", "any")),
  "ImageNet": ("ImageNet", ("no", "DC1B", "any")),
  "CheXpert": ("CheXpert", ("no", "IN1K", "any")),
  "EyePACS": ("EyePACS", ("no", "IN1K", "any")),
}
# Maps the name of a data set in dpjax to its name on the board.
_OURS = {"cifar10": "CIFAR-10"}
# Maps names of public data, as lower-case letters and digits, to their kind. Others are "any".
_PUBLIC = {
  "imagenet1k": "IN1K",
  "imagenet": "IN1K",
  "datacomp": "DC1B",
  "datacomp1b": "DC1B",
}
# No claim on the board has a larger delta.
_LARGEST_DELTA = 1e-5
# A larger epsilon promises nothing.
_LARGEST_EPSILON = 1e4
_ACCOUNTANTS = {"pld": "dp_accounting PLD", "rdp": "dp_accounting RDP"}
_SPLIT = " @ "


def _check_line(field: str, words: str) -> None:
  """Raises UserError for words that do not fit in one line of YAML."""
  if not words.isprintable():
    raise UserError("must be one line of printable text", field=field, value=words)


@dataclasses.dataclass(frozen=True)
class BoardClaim:
  """A line of the board: an epsilon and a score of one or more runs.

  Attributes:
    model: words for the model.
    epsilon: largest epsilon of the runs, rounded up to three decimals.
    delta: probability with which the epsilon may fail.
    score: mean score over the seeds, in [0, 1].
    lowest, highest: lowest and highest score of a seed.
    seeds: number of runs.
    accountant: words for the accountant.
    meaning: (kind of epsilon, neighbouring relation).
    is_auc: whether the score is an area under a curve, not an accuracy.
  """

  model: str
  epsilon: float
  delta: float
  score: float
  lowest: float
  highest: float
  seeds: int
  accountant: str
  meaning: tuple[str, str]
  is_auc: bool = False

  @property
  def accuracy(self) -> str:
    """Returns the score as the board writes it: in percent, rounded down to two decimals.

    >>> BoardClaim("CNN", 1.0, 1e-5, 0.70379, 0.7, 0.71, 3, "", ("", "")).accuracy
    '70.37%'
    """
    return f"{_percent(self.score)}%{' AUC' if self.is_auc else ''}"


@dataclasses.dataclass(frozen=True)
class BoardMethod:
  """The method that an entry names. The user gives these words, since runs do not hold them.

  Attributes:
    name: title of the method or of its paper.
    authors: names of the authors.
    url: address of the paper.
    code: address of the code.
    venue: name of the conference or journal.
    venue_date: date of publication, YYYY-MM-DD. Empty: today.
  """

  name: str
  authors: str
  url: str = "N/A"
  code: str = "N/A"
  venue: str = "Unpublished"
  venue_date: str = ""

  def __post_init__(self) -> None:
    for field in ("name", "authors"):
      if not getattr(self, field).strip():
        raise UserError("must not be empty", field=field, value=getattr(self, field))
    for field in dataclasses.fields(self):
      _check_line(field.name, getattr(self, field.name))
    if self.venue_date:
      try:
        datetime.date.fromisoformat(self.venue_date)
      except ValueError:
        raise UserError(
          "must be a day, such as 2026-05-31", field="venue_date", value=self.venue_date
        ) from None


@dataclasses.dataclass(frozen=True)
class Entry:
  """An entry for a file of the board.

  Attributes:
    claims: lines of the entry, ordered by model, then by epsilon.
    data_set: name of the data set on the board.
    public_data: words for the public data; empty if there were none.
    file: path of the file in the board's repository.
  """

  claims: tuple[BoardClaim, ...]
  data_set: str
  public_data: str
  file: str


def read(
  folders: Sequence[str],
  *,
  data_set: str | None = None,
  public_data: str = "",
  model: str = "",
  series: str = "",
  metric: str = "test_accuracy",
) -> Entry:
  """Reads the claims of finished runs.

  Runs that differ only in their seed form one claim, with their mean score.

  Args:
    folders: folders of runs (result.json) and of sweeps (sweep.json).
    data_set: data set of the board (`BOARDS`). None: it follows from the data of the runs.
    public_data: public data that the model has seen. Empty: none.
    model: words for the model. Empty: the variant's name in a sweep, else the model's name.
    series: name of the variants that are read, without the part from " @ " on. Empty: all.
    metric: key of the score in a result. If it contains "auc", the score is an area under a curve.

  Raises:
    UserError: an argument is wrong; a folder holds no finished run; the board does not take a run.
  """
  _check_arguments(folders, public_data, metric)
  rows = [row for folder in folders for row in _rows_in(folder)]
  known = list(dict.fromkeys(row["series"] for row in rows))
  rows = [row for row in rows if not series or row["series"] == series]
  if not rows:
    raise UserError(
      f"must be one of {validate.listed(known)}", field="series", value=series
    )
  for row in rows:
    _check(row, metric)
  groups: dict[tuple[Any, ...], list[Row]] = {}
  for row in rows:
    # The settings tell apart runs of one name that differ in more than their seed.
    key = (
      model or row["series"],
      row["settings"],
      _rounded_up(row["epsilon"]),
      row["delta"],
    )
    groups.setdefault(key, []).append(row)
  for words, *_ in groups:
    _check_line("model", words)
  claims = [_claim(key[0], runs, metric) for key, runs in groups.items()]
  claims.sort(key=lambda claim: (claim.model, claim.epsilon))
  data_set = _data_set(rows, data_set)
  return Entry(
    claims=tuple(claims),
    data_set=data_set,
    public_data=public_data,
    file=_file(data_set, rows, public_data),
  )


def _check_arguments(folders: Sequence[str], public_data: str, metric: str) -> None:
  """Raises UserError for arguments of `read` that no run could fit."""
  _check_line("public_data", public_data)
  if public_data and not any(map(str.isalnum, public_data)):
    raise UserError("must name the data", field="public_data", value=public_data)
  if not (metric.startswith("test_") and metric.endswith(("accuracy", "auc"))):
    raise UserError(
      "must be a score on test data, such as test_accuracy or test_auc",
      field="metric",
      value=metric,
    )
  if not folders:
    raise UserError("must name folders of runs or sweeps", field="folders", value=[])
  if len({pathlib.Path(folder).resolve() for folder in folders}) < len(folders):
    raise UserError("must not name a folder twice", field="folders", value=list(folders))


def _rows_in(folder: str) -> list[Row]:
  """Returns the result of `_rows`, and turns the errors of a damaged file into one line."""
  try:
    return _rows(pathlib.Path(folder))
  except UserError:
    raise
  except STRANGE as error:
    raise UserError(
      f"holds what no private training writes ({type(error).__name__}: "
      f"{validate.first_line(error)})",
      field="folders",
      value=folder,
    ) from error


def _rows(folder: pathlib.Path) -> list[Row]:
  """Returns the results of a folder's runs, with their series, settings and limit of examples. A
  failed run of a sweep has the status "failed"."""
  if (folder / engine.FILE).is_file():
    return _rows_of_sweep(folder / engine.FILE)
  if (folder / writers.RESULT).is_file():
    return [_row_of_run(folder)]
  raise UserError(
    f"must be folders with {writers.RESULT} or {engine.FILE}; there is neither",
    field="folders",
    value=str(folder),
  )


def _rows_of_sweep(path: pathlib.Path) -> list[Row]:
  content = writers.read_json(path)
  base = content["config"]["base"]
  rows = []
  for row in content["rows"]:
    label = str(row.get("variant", base["model"]["name"]))
    changed = {name: row.get(name) for name in content["config"]["grid"]}
    changed |= content["config"]["variants"].get(label, {})
    changed.pop("seed", None)
    held = {
      "series": label.split(_SPLIT)[0],
      "accountant": changed.get("privacy.accountant", base["privacy"]["accountant"]),
      "limit": changed.get("data.limit", base["data"]["limit"]),
      # The name of a run ends in a digest that depends on the seed, so it is not used here.
      "settings": json.dumps([label, changed, {**base, "seed": None}], sort_keys=True),
    }
    rows.append({**row, **held})
  if not rows:
    raise UserError("holds no finished run", field="folders", value=str(path))
  return rows


def _row_of_run(folder: pathlib.Path) -> Row:
  # This call refuses a result that was edited, or that belongs to another config.
  several_runs.read([str(folder)])
  result = writers.read_json(folder / writers.RESULT)
  config = writers.read_json(folder / workdir.CONFIG)
  if not isinstance(result, dict) or not isinstance(config, dict):
    raise UserError("must be the folder of a run", field="folders", value=str(folder))
  held = {name: value for name, value in config.items() if name != "seed"}
  return {
    **result,
    "status": "done",
    "limit": config["data"]["limit"],
    "series": str(result.get("model", "")),
    "settings": json.dumps(held, sort_keys=True),
  }


def _check(row: Row, metric: str) -> None:
  """Raises UserError for a run that the board does not take, or whose result lacks a field."""
  for name, allowed, why in (
    # A mean without the runs that failed could be too good.
    ("status", ("done",), ": every run of a claim must have ended"),
    ("epsilon_kind", ("proved", "claimed"), ""),
    ("unit", ("example",), ": the board compares epsilons of one image"),
    ("accountant", tuple(_ACCOUNTANTS), ""),
    ("neighboring_relation", tuple(relation.value for relation in NeighboringRelation), ""),
    ("limit", (None,), ": the board takes runs on the whole data set"),
  ):
    if row.get(name) not in allowed:
      words = " or ".join(map(str, allowed))
      raise UserError(f"must be {words}{why}", field=name, value=row.get(name))
  for name, least, largest in (
    ("epsilon", 0.0, _LARGEST_EPSILON),
    ("delta", 0.0, _LARGEST_DELTA),
    (metric, 0.0, 1.0),
    # A lower bound above epsilon means that an attack refuted the run's guarantee.
    ("epsilon_audited_lower", 0.0, row.get("epsilon") or 0.0),
  ):
    if name == "epsilon_audited_lower" and name not in row:
      continue
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise UserError("must be a number in the result", field=name, value=value)
    if not least <= value <= largest or not math.isfinite(value):
      raise UserError(f"must be in [{least:g}, {largest:g}]", field=name, value=value)
  _check_words(row)


def _check_words(row: Row) -> None:
  """Raises UserError unless the data set is a name, and assumptions are a list of words."""
  if not isinstance(row.get("dataset"), str):
    raise UserError("must be a name", field="dataset", value=row.get("dataset"))
  assumed = row.get("failed_assumptions") or []
  if not (isinstance(assumed, list) and all(isinstance(text, str) for text in assumed)):
    raise UserError("must be a list of words", field="failed_assumptions", value=assumed)


def _claim(model: str, runs: list[Row], metric: str) -> BoardClaim:
  scores = [float(run[metric]) for run in runs]
  seeds = [run.get("seed") for run in runs]
  # 0, 0.0 and False are equal, so only integers count as seeds.
  if len({seed for seed in seeds if type(seed) is int}) < len(runs):
    raise UserError(
      "must differ between the runs of one claim: equal seeds are one run",
      field="seed",
      value=seeds,
    )
  return BoardClaim(
    model=model,
    # The claim has the largest epsilon of the runs, so that it holds for each run.
    epsilon=_rounded_up(max(run["epsilon"] for run in runs)),
    delta=float(runs[0]["delta"]),
    score=statistics.mean(scores),
    lowest=min(scores),
    highest=max(scores),
    seeds=len(runs),
    accountant=_ACCOUNTANTS[runs[0]["accountant"]],
    meaning=(runs[0]["epsilon_kind"], str(runs[0]["neighboring_relation"])),
    is_auc="auc" in metric,
  )


def _rounded_up(epsilon: float) -> float:
  """Rounds an epsilon up to three decimals, exactly.

  >>> _rounded_up(0.99993), _rounded_up(1.0), _rounded_up(1.0001)
  (1.0, 1.0, 1.001)
  """
  return float(accounting.upper(epsilon, decimals=3))


def _percent(score: float) -> str:
  """Rounds a share down to hundredths of a percent, exactly.

  >>> _percent(0.7037333), _percent(0.29), _percent(1.0)
  ('70.37', '29.00', '100.00')
  """
  return f"{100 * decimal.Decimal(accounting.lower(score, decimals=4)):.2f}"


def _data_set(rows: list[Row], asked: str | None) -> str:
  names = {row["dataset"] for row in rows}
  if len(names) > 1:
    raise UserError("must be one data set", field="dataset", value=sorted(names))
  name = asked or _OURS.get(names.pop(), "")
  if name not in BOARDS:
    raise UserError(
      f"must be a data set of the board: {validate.listed(BOARDS)}",
      field="data_set",
      value=asked or rows[0]["dataset"],
    )
  held = rows[0]["dataset"]
  # A data set of dpjax cannot be entered as another one. `asked` is for data that a user declares.
  known = _OURS.get(held, held if held in published.PUBLISHED else name)
  if known != name:
    raise UserError(
      f"must be {known}, as the data of the runs", field="data_set", value=name
    )
  return name


def _file(data_set: str, rows: list[Row], public_data: str) -> str:
  """Returns the file of the board for a data set and its public data."""
  assumed = [text for row in rows for text in row.get("failed_assumptions") or ()]
  if not public_data and (assumed or any(row["epsilon_kind"] == "claimed" for row in rows)):
    reason = f" ({assumed[0]})" if assumed else ""
    raise UserError(
      f"must name the public data: the epsilon is claimed, not proved{reason}",
      field="public_data",
      value=public_data,
    )
  prefix, kinds = BOARDS[data_set]
  plain = "".join(filter(str.isalnum, public_data.lower()))
  kind = _PUBLIC.get(plain, "any") if public_data else "no"
  kind = kind if kind in kinds else "any"
  return f"_data/_{data_set}/{prefix}_{kind}.yml"


def text(entry: Entry, source: BoardMethod) -> str:
  """Returns an entry as a block of YAML, with the board's keys and a comment on each claim.

  Args:
    entry: result of `read`.
    source: method that the entry names.

  Returns:
    Text that can be appended to the board's file.
  """
  head = dataclasses.asdict(source)
  # YAML writes a date object, unlike text, without quotes, as on the board.
  today = datetime.date.today()
  head["venue_date"] = (
    datetime.date.fromisoformat(source.venue_date) if source.venue_date else today
  )
  lines = [
    "# Epsilons are rounded up, accuracies down. An accuracy is the mean of runs with other seeds.",
    "# An epsilon holds for one run: choosing the settings is not counted. Measured by dpjax.",
    "-",
  ]
  lines += [f"  {line}" for line in _yaml_lines(head)]
  lines.append("  claims:")
  for claim in entry.claims:
    kind, relation = claim.meaning
    seeds = (
      f"{claim.seeds} runs from {_percent(claim.lowest)} to {_percent(claim.highest)}%"
    )
    lines.append(f"    # {kind}, {relation}, one example; {seeds}")
    held = {
      # Only entries of the files "any" have a key for the public data.
      **({"public_data": entry.public_data} if entry.file.endswith("_any.yml") else {}),
      "model": claim.model,
      "epsilon": claim.epsilon,
      "delta": claim.delta,
      "private_accuracy": claim.accuracy,
      "dp_accountant": claim.accountant,
    }
    first, *others = _yaml_lines(held)
    lines.append(f"    - {first}")
    lines += [f"      {line}" for line in others]
  return "\n".join(lines) + "\n"


def _yaml_lines(content: Mapping[str, Any]) -> list[str]:
  # The width is so large that PyYAML breaks no value into two lines.
  dumped = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=10**6)
  return dumped.splitlines()


def parsed(path: pathlib.Path) -> tuple[str, list[dict[str, Any]]]:
  """Reads a file of the board.

  Returns:
    (text of the file, list of its entries, which may be empty).

  Raises:
    UserError: the file does not exist, or is no file of the board.
  """
  if not path.is_file():
    raise UserError("must hold the file of the board", field="board", value=str(path))
  try:
    content = path.read_text(encoding="utf-8")
    entries = _entries(content)
  # The constructors of dates and numbers raise errors of Python, not of YAML.
  except (yaml.YAMLError, *STRANGE) as error:
    reason = validate.first_line(error)
    raise UserError(f"must be YAML: {reason}", field="board", value=str(path)) from error
  sound = isinstance(entries, list) and all(
    isinstance(entry, dict) and isinstance(entry.get("claims"), list) for entry in entries
  )
  if not sound:
    raise UserError("must be a list of entries with claims", field="board", value=str(path))
  return content, entries


def _entries(content: str) -> Any:
  """Parses the text of a file of the board."""
  # The board's parser takes tabs between words; PyYAML does not.
  return yaml.safe_load(content.replace("\t", " ")) or []


def extended(path: pathlib.Path, entry: str) -> tuple[str, list[dict[str, Any]]]:
  """Returns (text of the board's file with an entry added at the end, the file's old entries).

  Args:
    path: file of the board.
    entry: result of `text`.

  Raises:
    UserError: as `parsed`, or the file's form does not allow an entry after its last one.
  """
  before, entries = parsed(path)
  content = f"{before.rstrip()}\n{entry}" if entries else entry
  try:
    after = _entries(content)
  except (yaml.YAMLError, *STRANGE):
    after = None
  if not isinstance(after, list) or after[:-1] != entries:
    raise UserError(
      "must be a list without indentation, as the board writes it, to take another entry",
      field="board",
      value=str(path),
    )
  return content, entries


def better(claim: BoardClaim, entries: Iterable[Mapping[str, Any]]) -> list[str]:
  """Returns the claims of a board that are at least as good as `claim`.

  Args:
    claim: claim that is compared with the board.
    entries: entries that `parsed` returns.

  Returns:
    Words for each claim of the same measure, with at most the epsilon and at least the score of
    `claim`. Claims with epsilon 0, or without numbers for epsilon and score, are left out.
  """
  matches = []
  for entry in entries:
    for row in (row for row in entry["claims"] if isinstance(row, dict)):
      try:
        epsilon = float(row["epsilon"])
        number, _, measure = str(row["private_accuracy"]).strip().partition("%")
        score = float(number) / 100
      except STRANGE:
        continue
      same = ("AUC" in measure) == claim.is_auc
      if same and 0 < epsilon <= claim.epsilon and score >= claim.score:
        matches.append(
          f"{row.get('model')} ({entry.get('authors')}): {number}% at {epsilon:g}"
        )
  return matches
