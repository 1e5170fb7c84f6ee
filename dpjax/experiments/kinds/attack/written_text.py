"""Extraction of training text: trains a language model of `launch.train` on lines among
which secrets stand, lets it write, and looks for the secrets among the first lines of a ranking."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np

from dpjax import losses, training
from dpjax.accounting import upper
from dpjax.attacks import allowed, roc, text_extraction
from dpjax.attacks.exposure import ExposureBound, sequence_losses
from dpjax.data import Dataset
from dpjax.data.text import PADDING_ID, VOCAB_SIZE, encode_text
from dpjax.experiments.config import rules
from dpjax.experiments.config.common import COUNT
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.settings import (
  AttackSettings,
  MeasuredAttack,
  Row,
  Trained,
  check_dealt,
  check_rising,
  counted_row,
)
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.key_uses import KeyUse, key_for
from dpjax.validate import UserError

_END = ord("\n")
_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"


class Record(NamedTuple):
  """An invented name with a random number, and how many training lines hold them."""

  text: bytes
  copies: int


@dataclasses.dataclass(frozen=True)
class Planted(Trained):
  """The run of the attacked model, the records among its lines, and the prompts."""

  records: list[Record]
  prompts: np.ndarray  # tokens [num_lines, p]


@dataclasses.dataclass(frozen=True)
class WrittenText(AttackSettings):
  """Secrets among the lines that a language model writes by itself (`attacks.text_extraction`).

  Invented records, a name and a number each, take the place of some training lines. The attacker
  lets the model write, ranks its lines in three ways, and looks at the first of each ranking. The
  attack reads texts of bytes. Every line, of the data too, begins and ends with a line end.
  """

  template: Annotated[str, "of a record; holds {name} and {number}"] = (
    "the number of {name} is {number}."
  )
  digits: Annotated[int, rules.between(1, 7), "of the number"] = 6
  copies: Annotated[
    tuple[int, ...], "lines of each record, by group; 0: a control that is never there"
  ] = (0, 1, 4, 16)
  records_each: Annotated[int, rules.between(1, 1000), "records of each group"] = 8
  num_lines: Annotated[int, rules.between(1, 10**6), "that the model writes"] = 3000
  first: Annotated[
    tuple[int, ...], "how many lines of a ranking are looked at; the verdict is on the most"
  ] = (10, 100)
  prompt_length: Annotated[
    int, rules.at_least(0), "bytes of a test line that a line begins with"
  ] = 0
  temperature: Annotated[float, rules.POSITIVE, "by which logits are divided"] = 1.0
  top_k: Annotated[int | None, COUNT, "likeliest bytes that are drawn; none: all"] = 40
  section: ClassVar[str] = "train"
  task: ClassVar[str] = "text_extraction"
  of_text: ClassVar[bool] = True

  def __post_init__(self):
    rules.check_settings(self)
    for word in ("{name}", "{number}"):
      if not isinstance(self.template, str) or self.template.count(word) != 1:
        raise UserError(f"must hold one {word!r}", field="template", value=self.template)
    if "\n" in self.template or "\0" in self.template:
      raise UserError(
        "must be one line, without a zero byte", field="template", value=self.template
      )
    check_rising(0, copies=self.copies)
    check_rising(1, first=self.first)
    if self.copies == (0,):
      raise UserError("must plant a record", field="copies", value=self.copies)

  def check_target(self, target: TrainConfig) -> None:
    check_dealt(target)  # a secret line takes the place of another

  def prepare(
    self, config: AttackConfig, loaded: tuple[Any, Any], random: RunKeys
  ) -> Planted:
    """Returns the run, in whose training data records take the place of other lines.

    Which lines go, names and numbers follow from the seed alone, so they are the same under every
    defence. Raises UserError for data that are no lines of bytes, or for fewer lines than records.
    """
    train, test = (_frame(part, config.target.data.name) for part in loaded)
    rng = np.random.default_rng(random.order)
    records = invent(self, rng)
    length = train.x.shape[1]
    longest = max(len(record.text) for record in records) + 2
    if longest > length:
      raise UserError(
        f"leaves records of {longest} bytes with both line ends, the data have lines of {length}",
        field="attack.template",
        value=self.template,
      )
    needed = sum(record.copies for record in records)
    if needed > len(train) // 2:
      raise UserError(
        f"leaves {needed} lines of records, more than half of the training lines",
        field="attack.copies",
        value=self.copies,
      )
    lines = [record.text for record in records for _ in range(record.copies)]
    x = np.array(train.x)
    gone = rng.permutation(len(x))[: len(lines)]
    x[gone] = _lines_of(lines, length)
    planted = dataclasses.replace(train, x=x)
    prompts = _prompts(self, test.x, random.order)
    run = central.assemble(config.train, (planted, test), random)
    return Planted(run, records, prompts)

  def measure(self, config: AttackConfig, attacked: Planted, state: Any) -> MeasuredAttack:
    """Returns the secrets among the first lines of each ranking, and what the guarantee allows."""
    run = attacked.run
    params = training.eval_params(state)
    lines = text_extraction.write_lines(
      run.apply,
      params,
      attacked.prompts,
      length=run.train.x.shape[1],
      key=key_for(KeyUse.SAMPLES, run.random.init),
      end=_END,
      temperature=self.temperature,
      top_k=self.top_k,
    )
    loss_fn = losses.next_token(run.apply, padding_id=PADDING_ID)
    # The first token is the line end of every line, which no loss counts.
    nats = sequence_losses(loss_fn, params, lines)
    lowered = sequence_losses(loss_fn, params, text_extraction.lower_case(lines))
    if np.isnan(nats).any() or np.isnan(lowered).any():
      raise UserError(
        "the training diverged; a smaller optimizer.learning_rate may help", field="target"
      )
    texts = texts_of(lines)
    planted = [record for record in attacked.records if record.copies]
    controls = [record for record in attacked.records if not record.copies]
    line = allowed.by_plan(run.plan) if run.plan.is_private else None
    rows, ranks = [], {}
    for by in text_extraction.RANKINGS:
      ranks[by] = text_extraction.rank(texts, nats, by=by, lowered=lowered)
      ranked = [texts[place] for place in ranks[by]]
      for first in self.first:
        found = text_extraction.find_extracted(
          ranked, [r.text for r in planted], first=first
        )
        by_chance = text_extraction.find_extracted(
          ranked, [r.text for r in controls], first=first
        )
        most = (
          None if line is None else allowed_by_copies(line, planted, first, self.digits)
        )
        total = None if most is None else sum(most.values())
        rows.append(
          {
            "ranking": by,
            "first": found.first,
            "lines": found.lines,
            "precision": found.precision,
            **roc.with_interval(len(found.secrets), len(planted))._asdict(),
            "by_copies": _by_copies(planted, found.secrets),
            "controls": len(by_chance.secrets),
            "allowed": total,
            "allowed_by_copies": most,
            "verdict": verdict(len(found.secrets), first, 10**self.digits, total),
          }
        )
    scores = run.task.evaluate(run.apply, params, run.test)
    result = {
      "test_accuracy": scores["accuracy"],
      "test_perplexity": scores["perplexity"],
      "num_written": len(texts),
      "num_different": len(set(texts)),
      "num_records": len(planted),
      "extracted": rows,
    }
    if line is not None:
      result["of_groups"] = words_on_groups(planted, rows[-1])
    result["rows"] = [_table_row(row, result["test_perplexity"]) for row in rows]
    written = {"lines": lines, "log_perplexity": nats, "log_perplexity_lowered": lowered}
    return MeasuredAttack(written | {f"ranked_{by}": ranks[by] for by in ranks}, result)


def invent(attack: WrittenText, rng: np.random.Generator) -> list[Record]:
  """Returns the records of all groups: names of random syllables, no two alike, and numbers.

  >>> first = invent(WrittenText(), np.random.default_rng(0))[0]
  >>> first.text.decode(), first.copies
  ('the number of Tone Baba is 476566.', 0)
  """
  names: dict[str, None] = {}
  while len(names) < attack.records_each * len(attack.copies):
    words = [_word(rng, 2), _word(rng, int(rng.integers(2, 4)))]
    names[" ".join(words)] = None
  records = []
  for place, name in enumerate(names):
    number = f"{rng.integers(10**attack.digits):0{attack.digits}}"
    text = attack.template.replace("{number}", number).replace("{name}", name)
    copies = attack.copies[place // attack.records_each]
    records.append(Record(text.encode(), copies))
  return records


def _word(rng: np.random.Generator, syllables: int) -> str:
  pairs = [rng.choice([*_CONSONANTS]) + rng.choice([*_VOWELS]) for _ in range(syllables)]
  return "".join(pairs).capitalize()


def _lines_of(texts: Sequence[bytes], length: int) -> np.ndarray:
  """Returns tokens [n, length] of texts between line ends, cut so that both ends fit."""
  return encode_text([b"\n%b\n" % text[: length - 2] for text in texts], max_length=length)


def texts_of(tokens: np.ndarray) -> list[bytes]:
  """Returns the text of each line of bytes [n, T], without line ends and padding."""
  return [bytes(row).strip(b"\n\0") for row in np.asarray(tokens, np.uint8)]


def _frame(data: Dataset, name: str) -> Dataset:
  """Returns the lines between line ends, so that a model learns where a line ends."""
  if data.vocab_size != VOCAB_SIZE or data.x.ndim != 2 or data.x.shape[1] < 3:
    raise UserError(
      "must be lines of at least 3 bytes, [n, T]", field="data.name", value=name
    )
  return dataclasses.replace(
    data, x=_lines_of(texts_of(np.asarray(data.x)), data.x.shape[1])
  )


def _prompts(attack: WrittenText, test: np.ndarray, order: int) -> np.ndarray:
  """Returns the line end, and the first bytes of random test lines that have so many."""
  size = 1 + attack.prompt_length
  known = test[test[:, size] != PADDING_ID] if size < test.shape[1] else test[:0]
  if not len(known):
    raise UserError(
      "must leave a rest of some test line",
      field="attack.prompt_length",
      value=attack.prompt_length,
    )
  rows = np.random.default_rng([order, 1]).integers(len(known), size=attack.num_lines)
  return known[rows, :size]


def _by_copies(planted: list[Record], found: tuple[int, ...]) -> dict[str, int]:
  """Returns the number of records found, by how many lines held them."""
  counts = dict.fromkeys(sorted({record.copies for record in planted}), 0)
  for place in found:
    counts[planted[place].copies] += 1
  return {str(copies): count for copies, count in counts.items()}


def allowed_by_copies(
  line: allowed.AllowedRoc, planted: Sequence[Record], first: int, digits: int
) -> dict[str, float]:
  """Returns `mean_allowed` by how many lines hold a record."""
  groups: dict[str, list[Record]] = {}
  for record in sorted(planted, key=lambda record: record.copies):
    groups.setdefault(str(record.copies), []).append(record)
  return {
    copies: mean_allowed(line, group, first, digits) for copies, group in groups.items()
  }


def words_on_groups(planted: Sequence[Record], row: dict[str, Any]) -> str:
  """Returns a line on what the guarantee of a line allows for records in several lines."""
  held = collections.Counter(str(record.copies) for record in planted)
  allows = ", ".join(
    f"{upper(most)} of {held[copies]} in {copies} line{'' if copies == '1' else 's'}"
    for copies, most in row["allowed_by_copies"].items()
  )
  return (
    "epsilon holds for one line, and a record in several lines has the weaker guarantee of a "
    f"group. Among the first {row['first']} lines it allows in the mean these records: {allows}"
  )


def mean_allowed(
  line: allowed.AllowedRoc, planted: Sequence[Record], first: int, digits: int
) -> float:
  """Returns a bound on the mean number of records among the first lines of any ranking.

  Different lines are one guess each of a record's number. Without the record's lines its number
  would be among `first` guesses with a probability of first / 10^digits at most, and the line of
  the guarantee bounds what they add (`ExposureBound`).

  >>> line = allowed.by_epsilon(math.log(4), 0.0)
  >>> once, twice = Record(b"a 12", 1), Record(b"b 34", 2)
  >>> [round(mean_allowed(line, [record], 2, digits=2), 9) for record in (once, twice)]
  [0.08, 0.32]
  """
  numbers = 10**digits
  bits = math.log2(numbers / min(first, numbers))
  each = (ExposureBound(line, numbers, record.copies) for record in planted)
  return sum(bound.probability(bits) for bound in each)


def verdict(found: int, first: int, numbers: int, most: float | None) -> str:
  """Returns the verdict on a defence.

  Whoever knows nothing of the numbers has `first` guesses: x records are found with a probability
  of (first / numbers)^x / x! at most. A defence without a guarantee fails if that is below 5 %.
  Under a guarantee the mean number is at most `most`, so 20 times as many are found with a
  probability of 5 % at most (Markov).

  >>> verdict(0, 100, 10**6, None), verdict(1, 100, 10**6, None)
  ('not shown to fail', 'FAILS: secrets of the text are read out')
  >>> verdict(3, 100, 10**6, 0.1), verdict(1, 100, 10**6, 0.1)
  ('ABOVE the line that its guarantee allows', 'leaks, below its line')
  """
  if most is not None and found > 20 * most:
    return "ABOVE the line that its guarantee allows"
  by_chance = found * math.log(first / numbers) - math.lgamma(found + 1)
  if not found or by_chance > math.log(0.05):
    return "not shown to fail"
  return (
    "FAILS: secrets of the text are read out" if most is None else "leaks, below its line"
  )


def _table_row(found: Row, test_perplexity: float) -> Row:
  """Returns the row of one ranking and number of lines; success is the share of records found."""
  groups = ", ".join(
    f"{count} with {copies} cop{'y' if copies == '1' else 'ies'}"
    for copies, count in found["by_copies"].items()
  )
  text = f"{found['count']} of {found['total']} records ({groups}), precision"
  text += f" {found['precision']:.3f}; {found['controls']} that were never there"
  columns = {name: found[name] for name in ("precision", "controls", "allowed")}
  columns |= {f"found_of_{copies}": count for copies, count in found["by_copies"].items()}
  most = found["allowed_by_copies"] or dict.fromkeys(found["by_copies"])
  columns |= {f"allowed_of_{copies}": mean for copies, mean in most.items()}
  return counted_row(
    found, f"{found['ranking']}, first {found['first']}",
    "records among the first lines, of those planted", text,
    **columns, test_perplexity=test_perplexity, verdict=found["verdict"],
  )  # fmt: skip
