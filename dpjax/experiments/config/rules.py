"""Rules in a config field's annotation: its range and its help.

  num_steps: Annotated[int, between(1, MOST_STEPS), "updates of the parameters"] = 200

A `FieldRule` is checked where the value is not None. A text is the field's help, which `--help` of
a launcher shows. `check` covers a whole config, so no other list of fields is needed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dpjax import names, validate
from dpjax.experiments.config.choices import (
  Choice,
  FieldType,
  leaves,
  name_of,
  types_of,
)
from dpjax.validate import UserError

# Limits on sizes of loops and arrays, so that a mistyped number starts no endless run.
MOST_STEPS = 10**8  # steps, rounds or queries of a run
# Largest number of steps of a run whose noise is correlated over the steps, or has noise levels.
MOST_SHAPED = 10**6
# Largest number of passes over the data, of a run or of a client in one round.
MOST_EPOCHS = 10**4
MOST_CLIENTS = 10**7
MOST_THREADS = 1024
MOST_VIEWS = 1024  # of one example
MOST_RUNS = 10**5  # of one sweep, or one experiment
MOST_DRAWS = 10**7  # trials or canaries of an audit
MOST_TOKENS = 10**6  # of an example
# Largest 1 / sampling_prob: the number of steps in which an example is drawn once on average.
MOST_PASSES = 10**9


@dataclasses.dataclass(frozen=True, eq=False)
class FieldRule:
  """A bound on the value of a field.

  Args:
    check: function that is called as check(**{name: value}). If the value breaks the rule, it
      raises UserError, which names the field.
    words: text of the bound, for `--help`.
  """

  check: Callable[..., None]
  words: str


POSITIVE = FieldRule(validate.positive, "> 0")
NON_NEGATIVE = FieldRule(validate.non_negative, ">= 0")
PROBABILITY = FieldRule(validate.probability, "in (0, 1]")
OPEN_UNIT = FieldRule(validate.open_unit, "in (0, 1)")
SHARE = FieldRule(validate.share, "in [0, 1)")


def not_below(bound: float) -> FieldRule:
  """Returns the rule of a number that has a lower bound.

  >>> not_below(0.5).words
  '>= 0.5'
  """
  words = f">= {bound:g}"

  def check(**named: Any) -> None:
    for name, value in named.items():
      if not value >= bound:
        raise UserError(f"must be {words}", field=name, value=value)

  return FieldRule(check, words)


def at_least(bound: int) -> FieldRule:
  """Returns the rule of an integer that has a lower bound.

  >>> at_least(1).words
  '>= 1'
  """
  return FieldRule(functools.partial(validate.integer_at_least, bound), f">= {bound}")


def between(low: int, high: int) -> FieldRule:
  """Returns the rule of an integer in [low, high].

  >>> between(1, 3).check(num_steps=4)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: num_steps=4: must be an integer in [1, 3]
  """
  check = functools.partial(validate.integer_in, low, high)
  return FieldRule(check, f"in [{low}, {high:,}]")


def within_range(low: float, high: float) -> FieldRule:
  """Returns the rule of a number in [low, high].

  >>> within_range(0.5, 2.0).check(share=3.0)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: share=3.0: must be in [0.5, 2]
  """
  check = functools.partial(validate.number_in, low, high)
  return FieldRule(check, f"in [{low:g}, {high:g}]")


def among(choices: Iterable[str], *, user_defined: bool = False) -> FieldRule:
  """Returns the rule of one of several names.

  Args:
    choices: names; a mapping is read at each check, so entries may be added later.
    user_defined: whether an import path is accepted, too.

  >>> among(("sgd", "adam")).words
  'sgd | adam'
  """
  check = names.one_of if user_defined else validate.one_of
  words = " | ".join(name or "''" for name in choices)
  return FieldRule(functools.partial(check, choices), words)


def _check_float32(**named: Any) -> None:
  low = float(np.finfo(np.float32).tiny)
  high = float(np.finfo(np.float32).max)
  for name, value in named.items():
    if value > 0 and not low <= value <= high:
      raise UserError(
        f"must be in [{low:.3g}, {high:.3g}], the range of float32", field=name, value=value
      )


# float32 must not round a positive number to 0 or infinity, since the run would then use another
# value.
IN_FLOAT32 = FieldRule(_check_float32, "in the range of float32")


def each(rule: FieldRule) -> FieldRule:
  """Returns the rule of a sequence whose entries each follow another rule.

  >>> each(PROBABILITY).check(targets=(0.5, 2.0))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: targets[1]=2.0: must be in (0, 1]
  """

  def check(**named: Any) -> None:
    rule.check(**validate.entries(**named))

  return FieldRule(check, f"each {rule.words}")


def check(config: Any, *, prefix: str = "") -> None:
  """Raises UserError for the first field whose value breaks a rule.

  Args:
    config: config whose fields have the types of their annotations.
    prefix: text before the fields' names, such as "train." where the config is a section.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> check(TrainConfig(num_steps=0))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: num_steps=0: must be an integer in [1, 100000000]
  """
  for leaf in leaves(config):
    for rule in leaf.type.attached:
      if isinstance(rule, FieldRule) and leaf.value is not None:
        rule.check(**{f"{prefix}{leaf.path}": leaf.value})


def check_settings(settings: Any) -> None:
  """Raises UserError for the first field of one dataclass that breaks a rule of its annotation.

  Settings call it in their `__post_init__`, so that a wrong value is refused at once. Fields of
  sections are not checked.

  >>> from dpjax.experiments.kinds.secure.encrypted_images import InferTask
  >>> InferTask(num_images=0)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: num_images=0: must be an integer in [1, 100000000]
  """
  types = types_of(type(settings))
  for field in dataclasses.fields(settings):
    value = getattr(settings, field.name)
    for rule in types[field.name].attached:
      if isinstance(rule, FieldRule) and value is not None:
        rule.check(**{field.name: value})


class Checked:
  """Base of settings that are dataclasses: their rules are checked when they are made."""

  def __post_init__(self) -> None:
    check_settings(self)


class Described(NamedTuple):
  """A field of a config, as `--help` shows it."""

  path: str
  default: Any
  values: str  # the accepted values; "" where only its type limits them
  help: str


def describe(config: Any) -> list[Described]:
  """Returns every field of a config, in order, with its default, values and help. The fields that
  only other values of a choice have follow it.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> rows = {row.path: row for row in describe(TrainConfig())}
  >>> rows["privacy.delta"].values, rows["privacy.clipping"].values.split(" | ")[:2]
  ('in (0, 1)', ['flat', 'automatic'])
  """
  rows = []
  for leaf in leaves(config):
    rows.append(_describe(leaf.path, leaf.default, leaf.type))
    if leaf.type.choice is not None:
      rows += _of_others(leaf.type.choice, leaf.path, leaf.value)
  return rows


def _of_others(choice: Choice, path: str, chosen: Any) -> Iterator[Described]:
  """Yields the fields of a choice's values that the chosen one lacks, with the values' names."""
  for field, owners in choice.owners().items():
    if chosen not in owners:
      kind = choice.kinds()[owners[0]]
      its_type = types_of(kind)[field]
      row = _describe(f"{path}.{field}", name_of(kind(), field), its_type)
      yield row._replace(help=f"of {', '.join(owners)}: {row.help}".removesuffix(": "))


def _describe(path: str, default: Any, its_type: FieldType) -> Described:
  words = [] if its_type.choice is None else [" | ".join(its_type.choice.table)]
  words += [rule.words for rule in its_type.attached if isinstance(rule, FieldRule)]
  texts = [text for text in its_type.attached if isinstance(text, str)]
  return Described(path, default, ", ".join(words), next(iter(texts), ""))
