"""A report on a finished run for readers who are no engineers, such as an ethics board.

It answers five questions: whose data is protected, against whom, what an attacker can find out,
what is not covered, and whether the accuracy can be relied on. Every number comes from the run's
folder.
"""

from __future__ import annotations

import decimal
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from dpjax import files, validate
from dpjax.accounting import statement
from dpjax.accounting.text import upper
from dpjax.experiments.board import attacker, checks, scores
from dpjax.experiments.board.document import (
  Block,
  Bullets,
  Document,
  Icons,
  Paragraph,
  Section,
  Table,
  Verbatim,
)
from dpjax.experiments.kinds.federated.config import NATURAL
from dpjax.experiments.run import checkpoint, finished, workdir, writers
from dpjax.experiments.run.finished import Finished
from dpjax.experiments.run.guarantee import OWN_EPSILON
from dpjax.relevance.rigorous import FEATURES_UNIT

MARKDOWN = "report.md"
HTML = "report.html"
_VERDICTS = {
  "proved": "PROVED. The protection below is a theorem about this run. It was computed from the "
  "steps that the run really took.",
  "claimed": "CLAIMED, NOT PROVED. The protection below holds only if every assumption in this "
  "list holds. Some of them are known to fail, or nobody can check them.",
  "simulated": "SIMULATED. The protection below is that of a larger deployment, for which this "
  "run stands. It does not hold for the people whose data were used here.",
  "none": "NOT PRIVATE. Nothing protects the people in the data. Treat the model and all numbers "
  "of this run as you treat the raw data.",
}
_HIDDEN = (
  "NOT DIFFERENTIALLY PRIVATE. While the result is computed, some things are hidden: see below. "
  "The result itself is exact, and nothing limits what it says about a record."
)
_IF = {
  "claimed": "If every assumption above held, this would be true:",
  "simulated": "Of the larger deployment, this is true:",
}
# What one record is, by the unit of the guarantee.
_UNITS = {
  "example": "one record: one row of a table, one image or one text",
  "user": "one user, with all records of that user",
  "record of one silo": "one record of one silo, such as one patient in the table of one hospital",
  FEATURES_UNIT: "what one record says of an example, such as its image, but for its label",
}
_TOGETHER = {
  "example": "Who has several records is protected for each of them, not for all together. For "
  "two records, epsilon is twice as large, and delta grows, too.",
  "user": "Members of one family who are several users are protected one by one, not as a group.",
}
# A fact that the guarantee protects: of a record, and of its features alone.
_EXAMPLES = (", such as a diagnosis", " that is no label, such as what an image shows")
_LABELS_ARE_SEEN = (
  "Labels are not protected. They count as public, and the run used them as they are. Nor is it "
  "hidden that a record takes part: the guarantee is about what its features are."
)
_TOGETHER_BY_COLUMN = (
  "All records of one user are protected together, whoever they are about. Who has records of "
  "several users is protected for each of them, not for all together."
)
_TOGETHER_IN_SILOS = (
  "Who has more than one record in a silo is protected for each of them, not for all together. "
  "Who has records in more silos than that is protected in each, and less well in all together."
)
_SEES = (
  "The protection holds against anyone who gets what the run releases. This is also true of an "
  "attacker who knows all other records, knows the program and its settings, and has unlimited "
  "computers and time."
)
_TRUSTED = (
  "It does not hold against those who run the training. They see the raw data, and must be "
  "trusted."
)
_SERVER = (
  "It does not hold against the server. It sees the message of each user without noise, and must "
  "be trusted."
)
# Who must be trusted, by the method of a federated run (docs/threat_model.md).
_TRUSTED_BY = {
  "central": _SERVER,
  "dp_ftrl": _SERVER,
  "local": "Nobody but the users' own devices must be trusted. The server gets noisy messages.",
  "both": "The server must be trusted to add its noise. What it sees itself has the users' own "
  "noise alone.",
  "distributed": "The server must be trusted to follow the protocol, and enough users to add "
  "their share of the noise. It sees sums alone.",
  "records": "Where each silo runs its own part, nobody but one's own silo must be trusted. A silo "
  "adds noise to each of its steps before anything leaves it. So the protection holds against "
  "the server and all other silos, too. In this run one program simulated server and silos: "
  "whoever ran it saw all records, and must be trusted.",
}
_ASK = "Who must be trusted follows from the method; see the statement below."
# `statement.not_covered` in plain words, in the same order.
_PLAIN = (
  "settings that somebody chose by looking at the private data",
  "other runs on the same data: each costs privacy again",
  "numbers of single records, or averages of them, that were logged",
  "averages and the like that were computed from the data before, without being counted",
  "several participants that belong together, such as a family",
  "scores on test records, also where a participant has records in training and in the test",
  "records that change from training to test, or back, because somebody above them left the list",
  "who has the secret key of the noise, and can take the noise away",
  "rounding: the noise of a computer is not exactly that of the proof",
)
_ABOUT_ALL = (
  "facts about people in general: if the data show that smokers fall ill, the model may say so of "
  "every smoker, whether this smoker took part or not",
  "copies of the model, made by asking it many questions",
)
_LIES = "{client}s that send false messages in order to mislead the model"
_SILOS_ARE_SEEN = (
  "It is not hidden that a silo takes part, nor its declared number of records, nor when it is "
  "away."
)
_NOT_A_RELEASE = (
  "The run was not made in release mode. So the last digits of its numbers, and its times, may "
  "show more than the proof covers. Publish a run with --config.release=true instead."
)


def write(
  folder: str | os.PathLike,
  *,
  attacks: Iterable[str | os.PathLike] = (),
  workdir: str | os.PathLike | None = None,
) -> list[pathlib.Path]:
  """Writes report.md and report.html of a finished run. Returns their paths.

  Args:
    folder: folder of the run, of any kind.
    attacks: folders of `launch.attack --run` on it, beside those that lie next to the run.
    workdir: folder that the reports are written to; None: the run's own.

  Raises:
    UserError: no finished run, or one whose files were changed.
  """
  target = pathlib.Path(folder if workdir is None else workdir)
  if workdir is not None:
    validate.folder(workdir=workdir)
  document = of(folder, attacks=attacks)
  files.make_folder(target)
  texts = {MARKDOWN: document.markdown(), HTML: document.html()}
  for name, text in texts.items():
    files.replace_file(target / name, text.encode())
  return [target / name for name in texts]


def of(folder: str | os.PathLike, *, attacks: Iterable[str | os.PathLike] = ()) -> Document:
  """Returns the report on a finished run; see `write`."""
  run = _finished_run(pathlib.Path(folder))
  on_it = checks.attacks_on(run, attacks)
  with finished.as_runs_write(run.path, "run"):
    questions = [
      Section("protected", "Whose data is protected?", _protection(run)),
      Section("against", "Against whom?", _against(run)),
      Section("attacker", "What can an attacker find out at most?", _attacker(run)),
      Section("not_covered", "What is not covered?", _not_covered(run)),
      Section("accuracy", "Can I rely on the accuracy?", scores.blocks(run)),
      Section("checks", "Which attacks were tried?", checks.blocks(run, on_it)),
      Section("data", "What was declared about the data?", scores.declarations(run)),
      Section("statement", "The statement, word by word", _statement(run)),
      Section("versions", "How the run was made", _made(run)),
    ]
    title = f"Privacy report: {run.path.resolve().name}"
    return Document(title, _lead(run), questions)


def _finished_run(path: pathlib.Path) -> Finished:
  """Returns the run in a folder. Raises UserError, one line, for any other folder."""
  if not path.is_dir():
    raise finished.odd(path, "must be the folder of a run", "run")
  if not (path / writers.RESULT).exists() and (path / "points").is_dir():
    raise finished.odd(path, "holds several runs; name one of those in points/", "run")
  run = finished.read(path, "run")
  if run.is_attack:
    reason = "is an attack; name the run that it attacked, whose report lists it"
    raise finished.odd(path, reason, "run")
  workdir.check_files(path, run.result.get(workdir.FILES) or {})
  return run


def _lead(run: Finished) -> list[Block]:
  result = run.result
  kind = result["epsilon_kind"]
  rows = [["result", scores.headline(result)]]
  rows.insert(0, ["data", scores.data_name(result)])
  for name in ("task", "model", "method"):
    if result.get(name):
      rows.insert(-1, [name, str(result[name])])
  selection = result.get("selection")
  if selection:
    best = f"{selection['setting']}, the best of several by {selection['y']}"
    rows.append(["chosen", f"{best}; how many there were is secret"])
  if kind != "none":
    rows.append(["epsilon", f"{_number(result['epsilon'])} ({kind}); smaller is safer"])
    rows.append(["delta", f"{_chance(result['delta'])}: how likely epsilon may fail"])
    rows.append(["protects", _unit(run)])
  hidden = kind == "none" and result.get("hides")
  blocks: list[Block] = [Paragraph(_HIDDEN if hidden else _VERDICTS[kind])]
  if result.get("failed_assumptions"):
    blocks.append(Bullets([str(text) for text in result["failed_assumptions"]]))
  if OWN_EPSILON in result:
    own = _number(result[OWN_EPSILON])
    blocks.append(Paragraph(f"Of the data that were used here, epsilon is {own}."))
  return [*blocks, Table(("", "this run"), rows)]


def _number(value: Any) -> str:
  return upper(writers.number(value))


def _chance(delta: float) -> str:
  """Returns a delta as text, also as one in so many, rounded to the larger chance.

  >>> _chance(1e-5), _chance(0.0)
  ('1e-05 (1 in 100,000)', '0')
  """
  if not delta:
    return "0"
  return f"{upper(delta)} (1 in {int(1 / decimal.Decimal(repr(delta))):,})"


def _protection(run: Finished) -> list[Block]:
  result = run.result
  if result["epsilon_kind"] == "none":
    return [Paragraph("Nobody's: no epsilon is proved for this run.")]
  unit = result["unit"]
  condition = _IF.get(result["epsilon_kind"])
  difference = statement.difference(_relation(result), unit)
  blocks: list[Block] = [
    *([Paragraph(condition)] if condition else []),
    Paragraph(
      f"That of every participant alike. In this report a participant is {_unit(run)}."
    ),
    Paragraph(
      f"Compare two runs whose data differ by {difference}. The guarantee limits how well anybody "
      "can tell from the results which data were used. So it limits what taking part adds to "
      "what anybody can learn about a participant. The numbers below say how much that is."
    ),
  ]
  if any(name.startswith("test_") for name in result):
    chosen = " The model depends on them, too: it was chosen by its score on them."
    words = "Test records are not protected: they are taken as public."
    blocks.append(Paragraph(words + (chosen if "selection" in result else "")))
  together = _TOGETHER.get(unit)
  if _client(run.config) == "silo":
    together = _TOGETHER_IN_SILOS
  elif unit == "user" and _column_of_users(run.config):
    together = _TOGETHER_BY_COLUMN
  blocks += [Paragraph(together)] if together else []
  blocks += [Paragraph(_LABELS_ARE_SEEN)] if unit == FEATURES_UNIT else []
  users = _users(run.config)
  return [*blocks, Paragraph(users)] if users else blocks


def _relation(result: Mapping[str, Any]) -> str:
  """Returns the neighboring relation, without what it leaves out: the unit says that, too."""
  return str(result["neighboring_relation"]).partition(" (")[0]


def _unit(run: Finished) -> str:
  """Returns what one participant is. A column may name hospitals, so its users are not people."""
  unit = run.result["unit"]
  by = _column_of_users(run.config)
  if unit == "user" and by:
    return (
      f"one user (each value of the column {by!r} is one), with all records of that user"
    )
  return _UNITS.get(unit, f"one {unit}")


def _column_of_users(config: Mapping[str, Any]) -> str | None:
  """Returns the column that names the users, or silos, of a federated run; None: there is none."""
  partition = config.get("partition")
  return partition.get("client_id") if isinstance(partition, dict) else None


def _method(config: Mapping[str, Any]) -> str:
  """Returns the name of a federated run's kind of privacy."""
  privacy = config.get("privacy")
  return str(privacy.get("name")) if isinstance(privacy, dict) else ""


def _client(config: Mapping[str, Any]) -> str:
  """Returns what a client of a federated run is called."""
  return "silo" if _method(config) == "records" else "user"


def _users(config: Mapping[str, Any]) -> str:
  """Returns who the users, or silos, of a federated run are; "" for another run."""
  partition = config.get("partition")
  if not isinstance(partition, dict):
    return ""
  by = _column_of_users(config)
  client = _client(config)
  if by:
    return f"The column {by!r} of the data says which records belong to one {client}."
  if partition["name"] in NATURAL:
    return f"The data say which records belong to one {client}."
  if client == "silo":
    return "The silos are simulated: records of one data set were dealt to them."
  return (
    f"The users are simulated: records were dealt to them ({partition['name']}). They are not "
    "people."
  )


def _against(run: Finished) -> list[Block]:
  result = run.result
  hides = result.get("hides")
  blocks: list[Block] = []
  if hides:
    blocks.append(Paragraph(f"While it is computed, this is hidden: {hides}."))
  if result["epsilon_kind"] == "none":
    return [
      *blocks,
      Paragraph("Nobody who sees the result is kept from learning about a record."),
    ]
  trusted = _TRUSTED
  if run.is_federated:
    trusted = _TRUSTED_BY.get(_method(run.config), _ASK)
  return [*blocks, Paragraph(_SEES), Paragraph(trusted)]


def _attacker(run: Finished) -> list[Block]:
  result = run.result
  bounds = attacker.of(result)
  if bounds is None:
    return [
      Paragraph(
        "Nothing limits an attacker. In the worst case the released numbers show whole records."
      )
    ]
  condition = _IF.get(result["epsilon_kind"])
  blocks: list[Block] = [Paragraph(condition)] if condition else []
  replaced = _relation(result) == "replace_one"
  of_features = result["unit"] == FEATURES_UNIT
  many, one = ("users", "user") if result["unit"] == "user" else ("people", "person")
  by = _column_of_users(run.config)
  whom = (
    f"{many} (each value of the column {by!r} is one)" if by and many == "users" else many
  )
  asked = (
    f"An attacker has two versions of the {'features' if of_features else 'record'} of each of 100 "
    "participants, and says which one was used."
    if replaced
    else f"An attacker is asked about 100 {whom}, of whom half took part, and says of each "
    f"whether this {one} took part."
  )
  caption = (
    f"{asked} At most {bounds.right} of his 100 answers are right, on average. A coin gets 50 "
    "right."
  )
  did = (
    ("named version A", "of 1,000 with version B")
    if replaced
    else ("accused", "of 1,000 others")
  )
  head = (
    f"wrongly {did[0]}, {did[1]}",
    f"rightly {did[0]}, of 1,000 {'with version A' if replaced else 'participants'}, at most",
    "right among 100 such answers, at most",
  )
  rows = [[f"{row.wrong}", f"{row.found}", f"{row.right}"] for row in bounds.accused]
  few = bounds.accused[1]
  return [
    *blocks,
    Icons(min(bounds.right, 100), caption),
    Paragraph(
      "A careful attacker answers seldom, to be right more often. On average, per 1,000:"
    ),
    Table(head, rows),
    Paragraph(
      f"Secrets: take a fact{_EXAMPLES[of_features]}, that an attacker guesses of {many} who did "
      f"not take part with a chance of {few.wrong} in 1,000. Of a participant he guesses it with a "
      f"chance of at most {few.found} in 1,000."
    ),
    Paragraph(
      "These are limits for the best possible attacker. They are rounded up. Real attackers "
      "mostly know less."
    ),
  ]


def _not_covered(run: Finished) -> list[Block]:
  result = run.result
  private = result["epsilon_kind"] != "none"
  client = _client(run.config)
  # The statement of a silo, too, calls its unit a record.
  unit = "record" if client == "silo" else str(result["unit"] or "example")
  unit = unit.removesuffix("'s features")
  lies = [_LIES.format(client=client)] if run.is_federated else []
  items = [*_ABOUT_ALL, *lies]
  blocks: list[Block] = [Paragraph("No epsilon ever covers:"), Bullets(items)]
  if private:
    rows = zip(_PLAIN, statement.not_covered(unit), strict=True)
    blocks += [
      Paragraph("The guarantee of this run does not cover:"),
      Table(("in plain words", "in the words of the statement"), [[*row] for row in rows]),
    ]
    blocks += [Paragraph(_SILOS_ARE_SEEN)] if client == "silo" else []
  raw = _raw_numbers(run)
  if raw:
    blocks += [
      Paragraph(
        "The files of the run also hold numbers that were computed from raw records, without "
        "noise. Do not publish them:"
      ),
      Bullets(raw),
    ]
  if private and not result.get("release"):
    blocks.append(Paragraph(_NOT_A_RELEASE))
  if (run.path / checkpoint.FOLDER).exists():
    blocks.append(
      Paragraph(
        f"The folder {checkpoint.FOLDER}/ holds the key of the noise. Who has it can undo the "
        "protection. Keep it as secret as the data, or delete it."
      )
    )
  if run.path.resolve().parent.name == "points":
    blocks.append(
      Paragraph(
        "This run is one of several. Choosing the best of them is not covered by this report."
      )
    )
  return blocks


def _raw_numbers(run: Finished) -> list[str]:
  """Returns the names of numbers in the run's files that depend on raw records."""
  rows = writers.read_metrics(run.path)
  names = {name for row in [run.result, *rows] for name in row}
  mark = "not_private/"
  return sorted(name.removeprefix(mark) for name in names if name.startswith(mark))


def _statement(run: Finished) -> list[Block]:
  text = run.result.get("privacy_statement")
  if text:
    return [Paragraph("For experts, in full:"), Verbatim(str(text))]
  return [Paragraph("This kind of run writes no statement beside its list of assumptions.")]


def _made(run: Finished) -> list[Block]:
  result = run.result
  rows = [["steps", f"{result['num_steps']} {result.get('steps_are', 'steps')}"]]
  rows.append(["machine", str(result.get("device", ""))])
  rows += [[name, str(value)] for name, value in result["versions"].items() if value]
  rows.append(["SHA-256 of config and result", str(result[workdir.SEAL])])
  rows.append(["SHA-256 of the parameters", str(result["params_sha256"])])
  return [
    Paragraph(
      "This report was made from the run's folder alone. Its files fit together by their "
      "checksums. A checksum shows an accident, not a forgery."
    ),
    Table(("", "value"), rows),
  ]
