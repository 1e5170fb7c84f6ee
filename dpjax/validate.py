"""Checks of user input. Each failure is a one-line error: the argument, its value, the bound."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import math
import numbers
import os
import pathlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

# A word of more characters than the first number is cut. In a message of more characters than the
# second, the value that it shows is cut. With a launcher's "error: " that makes about 300.
_LONGEST_WORD = 160
_LONGEST = 292
# Largest number of characters shown of another library's error.
_LONGEST_REASON = 160
# Largest number of characters of a list of choices that an error shows whole.
_MOST_LETTERS = 180
_WORD = re.compile(rf"[^\s=]{{{_LONGEST_WORD + 1},}}|={{{_LONGEST_WORD + 1},}}")


class _Nothing(enum.Enum):
  """Placeholder for "no value", since None itself may be the value of an argument."""

  VALUE = "none was given"


NO_VALUE = _Nothing.VALUE


class Verbatim(str):
  """Text that an error shows unchanged, without quotes."""

  __slots__ = ()


class UserError(ValueError):
  """An error in the user's input; its text is one printable line.

  Args:
    must: what is wrong, or what must hold; the whole message where there is no field.
    field: name of the argument or config field, such as "privacy.delta"; "" for none.
    value: the value that was given. If its text is long, the middle is left out.
    hint: what to do, shown at the end of the line.

  >>> print(UserError("must be in (0, 1)", field="delta", value=2.0))
  delta=2.0: must be in (0, 1)
  >>> print(UserError("must be a number", field="x", value=[[1], [2]], hint="try x[0]"))
  x=[[1], [2]]: must be a number; try x[0]
  >>> len(str(UserError("must be a number", field="x", value="9" * 4000))) < 120
  True
  """

  def __init__(
    self, must: str = "", *, field: str = "", value: Any = NO_VALUE, hint: str = ""
  ):
    self.must = str(must)
    self.field = field
    self.value = value
    self.hint = hint
    shown = _show(value)
    line = self._line(shown=shown)
    if len(line) > _LONGEST:
      line = self._line(shown=_cut(shown, _LONGEST - (len(line) - len(shown))))
    super().__init__(_WORD.sub(lambda word: _cut(word[0]), line))

  def _line(self, shown: str) -> str:
    shown_value = f"={shown}" if self.value is not NO_VALUE else ""
    place = f"{self.field}{shown_value}: " if self.field else ""
    text = f"{place}{self.must}{'; ' if self.hint else ''}{self.hint}"
    line = " ".join(line.strip() for line in text.splitlines())
    if line.isprintable():
      return line
    # A name in an untrusted file may hold control codes of a terminal, so they are escaped.
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)

  def of(self, *, field: str, value: Any = NO_VALUE) -> Self:
    """Returns the same error about another field; without `value` the old value is kept.

    >>> print(UserError("must be > 0", field="n", value=0).of(field="rows"))
    rows=0: must be > 0
    """
    value = self.value if value is NO_VALUE else value
    return type(self)(self.must, field=field, value=value, hint=self.hint)

  def is_about(self, field: str, value: Any) -> bool:
    """Returns whether this error is about `field`, and shows `value`.

    >>> UserError("must be > 0", field="n", value=0).is_about("n", 0)
    True
    """
    return (self.field, _show(self.value)) == (field, _show(value))

  def within(self, section: str, *, holds_config: bool = False) -> Self:
    """Returns the same error for a field inside a section of the config.

    Args:
      holds_config: whether the section is a whole config, whose flags the text may name.

    >>> print(UserError("must be > 0", field="n", value=0).within("data"))
    data.n=0: must be > 0
    >>> error = UserError("must be > 0", field="n", value=0, hint="give --config.m")
    >>> print(error.within("base", holds_config=True))
    base.n=0: must be > 0; give --config.base.m
    """
    if holds_config:
      must, hint = (
        text.replace("--config.", f"--config.{section}.") for text in (self.must, self.hint)
      )
      same = type(self)(must, field=self.field, value=self.value, hint=hint)
      return same.within(section)
    return self.of(field=f"{section}.{self.field}" if self.field else section)

  def at(self, place: str) -> Self:
    """Returns the same error, which also says where it arose, such as in which run.

    >>> print(UserError("must be > 0", field="n", value=0).at("run 3"))
    n=0: must be > 0 (run 3)
    >>> print(UserError("has no noise").at("run 3"))
    run 3: has no noise
    """
    if not self.field:
      return self.of(field=place)
    must = f"{self.must} ({place})"
    return type(self)(must, field=self.field, value=self.value, hint=self.hint)

  def facts(self) -> tuple[str, str, str | None, str]:
    """Returns what `of_facts` makes the same error of, in another process: as text, since some
    values cannot be sent."""
    shown = None if self.value is NO_VALUE else _show(self.value)
    return self.must, self.field, shown, self.hint

  @classmethod
  def of_facts(cls, facts: Sequence[Any]) -> Self:
    """Returns the error of these `facts`. Its value is text.

    >>> print(UserError.of_facts(UserError("must be > 0", field="n", value=0).facts()))
    n=0: must be > 0
    """
    must, field, shown, hint = facts
    value = NO_VALUE if shown is None else Verbatim(shown)
    return cls(must, field=field, value=value, hint=hint)

  def __reduce__(self) -> tuple[Any, ...]:
    # By default an exception is pickled by its positional arguments, without the field.
    return type(self).of_facts, (self.facts(),)


def _show(value: Any) -> str:
  """Returns a value as an error shows it: text is quoted, unless it is `Verbatim`.

  Of an array or a frame only the kind is shown: its numbers may be records, or the words of a key.

  >>> import numpy as np
  >>> _show("a"), _show(np.float32(3)), _show(np.array([3.0]))
  ("'a'", '3.0', 'float64[n]')
  """
  if isinstance(value, Verbatim):
    return str(value)
  shape = getattr(value, "shape", None)
  # A number of NumPy has a shape, too, and a type such as float32 has one, but no dtype.
  if isinstance(shape, tuple) and not isinstance(value, numbers.Number | str | bytes):
    kind = getattr(value, "dtype", type(value).__name__ if shape else "")
    if kind != "":
      return f"{kind}{shape_of_rows(shape)}"
  return repr(value) if isinstance(value, str | bytes) else str(value)


def shape_of_rows(shape: Sequence[int]) -> Verbatim:
  """Returns a shape for a message. The number of rows may be secret, so it is shown as n.

  >>> shape_of_rows((60_000, 28, 28)), shape_of_rows(())
  ('[n, 28, 28]', '[]')
  """
  sizes = ["n", *map(str, shape[1:])] if shape else []
  return Verbatim(f"[{', '.join(sizes)}]")


def first_line(error: BaseException, with_type: bool = False) -> str:
  """Returns the first line of another library's error, cut after 160 characters.

  Args:
    error: any exception. One without text is shown as its type.
    with_type: whether to put the type in front. The text of a KeyError, for example, is only
      the missing key.

  >>> first_line(OSError("no such host\\nat line 3"))
  'no such host'
  >>> first_line(KeyError("ledger"), with_type=True), first_line(KeyError(), with_type=True)
  ("KeyError: 'ledger'", 'KeyError')
  """
  kind = type(error).__name__
  lines = str(error).strip().splitlines()
  if not lines:
    return kind
  text = lines[0][:_LONGEST_REASON]
  return f"{kind}: {text}" if with_type else text


def _cut(text: str, most: int = 0) -> str:
  """Returns the text, without its middle if it is longer than max(most, 55) characters."""
  tail = 12
  head = max(most - tail - 3, 40)
  return text if len(text) <= head + tail + 3 else f"{text[:head]}...{text[-tail:]}"


def _is_number(value: Any) -> bool:
  """Whether this is a real number that `float` can convert; NaN and infinity are included."""
  # In Python True and False are numbers; here they are taken for mistakes.
  if not isinstance(value, numbers.Real) or isinstance(value, bool):
    return False
  try:
    float(value)
  # The value is too large for float64.
  except OverflowError:
    return False
  return True


@dataclasses.dataclass(frozen=True)
class Range:
  """The numbers between two bounds. Called as `positive(delta=-1)`, it raises UserError for the
  first value outside; the keywords name the arguments.

  Args:
    words: text of the error.
    low, high: bounds, which do not belong to the range.
    with_low, with_high: whether they do.

  >>> positive(delta=-1)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: delta=-1: must be a finite number > 0
  >>> share(momentum=0.0)
  """

  words: str
  low: float
  high: float
  with_low: bool = False
  with_high: bool = False

  def __call__(self, **named: Any) -> None:
    for name, value in named.items():
      # NaN is in no range.
      inside = _is_number(value) and (
        self.low < value < self.high
        or (self.with_low and value == self.low)
        or (self.with_high and value == self.high)
      )
      if not inside:
        raise UserError(self.words, field=name, value=value)


finite = Range("must be a finite number", -math.inf, math.inf)
positive = Range("must be a finite number > 0", 0, math.inf)
positive_or_inf = Range("must be a number > 0", 0, math.inf, with_high=True)
non_negative = Range("must be a finite number >= 0", 0, math.inf, with_low=True)
probability = Range("must be in (0, 1]", 0, 1, with_high=True)
open_unit = Range("must be in (0, 1)", 0, 1)
share = Range("must be in [0, 1)", 0, 1, with_low=True)


def flag(**named: Any) -> None:
  """Raises UserError unless each value is True or False. To Python the text "no" is true."""
  for name, value in named.items():
    if not isinstance(value, bool):
      raise UserError("must be True or False", field=name, value=value)


def number_in(low: float, high: float, **named: Any) -> None:
  """Raises UserError unless each value is a number in [low, high].

  >>> number_in(0, 1, alpha=1.5)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: alpha=1.5: must be in [0, 1]
  """
  for name, value in named.items():
    if not (_is_number(value) and low <= value <= high):
      raise UserError(f"must be in [{low:g}, {high:g}]", field=name, value=value)


MIN_FACTOR = 1e-6
MAX_FACTOR = 1e6


def factors(**named: Iterable[float]) -> None:
  """Raises UserError unless each value is a sequence of numbers in [1e-6, 1e6]. Products with
  float32 numbers of usual size then neither overflow nor underflow.

  >>> factors(clip_schedule=(1.0, 0.0))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: clip_schedule[1]=0.0: must be in [1e-06, 1e+06]
  """
  number_in(MIN_FACTOR, MAX_FACTOR, **entries(**named))


def entries(**named: Iterable[Any]) -> dict[str, Any]:
  """Returns each entry of sequences by its own name, to be checked.

  >>> integer_at_least(1, **entries(sizes=(3, 0)))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: sizes[1]=0: must be an integer >= 1
  """
  return {
    f"{name}[{index}]": value
    for name, values in named.items()
    for index, value in enumerate(several(**{name: values}))
  }


def apply_function(**named: object) -> None:
  """Raises UserError unless each value is a function, such as `model.apply`, and not the model.

  >>> import flax.linen
  >>> apply_function(apply=flax.linen.Dense(2))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: apply=Dense: must be a function of (params, inputs), as model.apply
  """
  for name, value in named.items():
    if not callable(value) or hasattr(value, "apply"):
      raise UserError(
        "must be a function of (params, inputs), as model.apply",
        field=name,
        value=Verbatim(type(value).__name__),
      )


def instance(kind: type | tuple[type, ...], words: str, **named: object) -> None:
  """Raises UserError unless each value is of a class; `words` say which.

  >>> instance(int, "a number of rows", size="7")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: size=str: must be a number of rows
  """
  for name, value in named.items():
    if not isinstance(value, kind):
      raise UserError(f"must be {words}", field=name, value=Verbatim(type(value).__name__))


def optimizer(**named: Any) -> None:
  """Raises UserError unless each value is an Optax transformation, and not its learning rate.

  >>> optimizer(tx=0.1)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: tx=float: must be an Optax transformation, as optax.sgd(0.1)
  """
  for name, value in named.items():
    if not callable(getattr(value, "update", None)):
      raise UserError(
        "must be an Optax transformation, as optax.sgd(0.1)",
        field=name,
        value=Verbatim(type(value).__name__),
      )


def several(**named: object) -> tuple:
  """Returns the only argument as a tuple; raises UserError if it is text or not iterable.

  >>> several(values=[1, 2])
  (1, 2)
  """
  ((name, value),) = named.items()
  if not isinstance(value, Iterable) or isinstance(value, str):
    raise UserError("must be a sequence", field=name, value=value)
  return tuple(value)


def owner_ids(**named: Any) -> list[str]:
  """Returns ids of clients or users as text in one normal form, so that all types and encodings of
  one id become equal.

  Raises UserError for an id that is empty or missing, or neither text nor an integer.

  >>> owner_ids(client_ids=[b"ann", "ann", "7", 7])
  ['ann', 'ann', '7', '7']
  """
  ((name, _),) = named.items()
  # Of a number of NumPy or JAX this is Python's.
  plain_ids: list[Any] = [
    owner.item() if getattr(owner, "ndim", None) == 0 else owner
    for owner in several(**named)
  ]
  kinds = set(map(type, plain_ids))
  if not kinds <= {str, bytes, int}:
    wrong = next(owner for owner in plain_ids if type(owner) not in (str, bytes, int))
    raise UserError(f"must be text or integers, got {wrong!r:.60}", field=name)
  try:
    ids = list(map(_id_text, plain_ids))
    # `encode` fails for a lone surrogate, which UTF-8 cannot encode.
    "".join(ids).encode()
  except UnicodeError as error:
    raise UserError(
      f"must be UTF-8, got {error.object!r:.60}",  # type: ignore[attr-defined]
      field=name,
    ) from None
  if "" in ids:
    raise UserError(
      f"the id at place {ids.index('')} is empty; nothing can be promised to the owner of a record "
      "that nobody knows: leave such records out when the data are prepared",
      field=name,
    )
  return ids


def _id_text(owner: str | bytes | int) -> str:
  text = owner.decode() if isinstance(owner, bytes) else str(owner)
  # One character, such as an accented letter, may have several encodings. NFC makes them equal.
  return unicodedata.normalize("NFC", text)


def integer_at_least(bound: int, **named: Any) -> None:
  """Raises UserError unless each value is an integer >= bound."""
  for name, value in named.items():
    ok = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not (ok and int(value) >= bound):
      raise UserError(f"must be an integer >= {bound}", field=name, value=value)


def integer_in(low: int, high: int, **named: Any) -> None:
  """Raises UserError unless each value is an integer in [low, high].

  >>> integer_in(1, 1000, num_seeds=10**9)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: num_seeds=1000000000: must be an integer in [1, 1000]
  """
  for name, value in named.items():
    ok = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not (ok and low <= int(value) <= high):
      raise UserError(f"must be an integer in [{low}, {high}]", field=name, value=value)


def folder(**named: str | os.PathLike) -> None:
  """Raises UserError unless each value is a writable directory, or a path where one can be made.
  It makes no directory.

  >>> folder(workdir="/dev/null/runs")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: workdir='/dev/null/runs': must be a directory; /dev/null is none
  """
  for name, value in named.items():
    if str(value) == "":
      raise UserError("must be the name of a directory", field=name, value=value)
    path = pathlib.Path(value)
    # A run in a folder of that name here is not where its user looks for it, or deletes it.
    if path.parts and path.parts[0].startswith("~"):
      raise UserError(
        "begins with ~, which shells leave as it is after a '='; write $HOME, or the whole path, "
        "in its place",
        field=name,
        value=value,
      )
    places = (path, *path.absolute().parents)
    try:
      # Without a UTF-8 locale Python keeps bytes of a name that other libraries cannot take.
      str(path.absolute()).encode()
      there = next(place for place in places if place.exists())
    except UnicodeEncodeError:
      raise UserError(
        "must be text in UTF-8; set PYTHONUTF8=1, or a locale of UTF-8",
        field=name,
        value=str(value).encode(errors="backslashreplace").decode(),
      ) from None
    except OSError as error:
      raise UserError(
        f"must be a directory ({error.strerror})", field=name, value=str(value)[-120:]
      ) from error
    reason = ""
    for place in places:
      if place.is_symlink() and not place.exists():
        reason = reason or f"; {place} is a link to what is not there"
    if not reason and not there.is_dir():
      reason = f"; {there} is none"
    if not reason and not os.access(there, os.W_OK | os.X_OK):
      reason = f" that can be written to; {there} cannot"
    if reason:
      raise UserError(f"must be a directory{reason}", field=name, value=str(value))


@contextlib.contextmanager
def about(field: str, value: Any = NO_VALUE, *, but: Sequence[str] = ()) -> Iterator[None]:
  """Makes each UserError that is raised in the `with` block an error about one argument.

  Use it where the block checks a part of that argument, or a file that the argument names.

  Args:
    field, value: the argument's name and value.
    but: names of other arguments. Errors about these stay as they are.

  >>> with about("name", "a.npz", but=("num_classes",)):
  ...   raise UserError("is empty", field="y")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: name='a.npz': y: is empty
  """
  try:
    yield
  except UserError as error:
    if error.field in but:
      raise
    raise UserError(str(error), field=field, value=value) from error


def no_pipe(path: str | os.PathLike, field: str = "", value: Any = NO_VALUE) -> None:
  """Raises UserError if the path is a folder, a pipe or a device. Reading a pipe may never end.

  Args:
    field, value: name and value of the argument that holds the path, for the message.

  >>> no_pipe("/dev/null", "name", "/dev/null")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: name='/dev/null': must be a file, not a folder, a pipe or a device
  """
  there = pathlib.Path(path)
  if there.exists() and not there.is_file():
    must = "must be a file, not a folder, a pipe or a device"
    raise UserError(must, field=field, value=value)


def one_of(choices: Iterable[str | int], **named: Any) -> None:
  """Raises UserError unless each value is one of the choices; suggests the nearest.

  >>> one_of(("sgd", "adam"), optimizer="adan")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: optimizer='adan': must be one of sgd, adam (did you mean 'adam'?)
  """
  choices = tuple(choices)
  words = tuple(map(str, choices))
  for name, value in named.items():
    # The value itself is compared, not its text: callers go on to use the value.
    known = isinstance(value, str | numbers.Integral) and not isinstance(value, bool)
    if not (known and value in choices):
      # The search for the nearest word is slow, so it runs only for an error.
      nearest = did_you_mean(str(value), words)
      raise UserError(
        f"must be one of {join_words(words)}{nearest}", field=name, value=value
      )


def join_words(words: Iterable[object], most: int = _MOST_LETTERS) -> str:
  """Returns the words joined by commas; a list that is cut ends in the number of words.

  Args:
    most: largest number of characters of a list that is shown whole.

  >>> join_words(("sgd", "adam"))
  'sgd, adam'
  """
  texts = tuple(map(str, words))
  whole = ", ".join(texts)
  if len(whole) <= most:
    return whole
  beginning = whole[:most].rpartition(", ")[0]
  return f"{beginning}, .. ({len(texts)} in all)"


def slip_of(word: str, known: Iterable[str]) -> str | None:
  """Returns the known word that differs from `word` by few spelling errors; None if none does.

  An error is a letter too many, missing or wrong, or two neighbours exchanged. One error is
  allowed for every four letters of `word`: at least one, and at most three.

  >>> slip_of("alhpa", ("alpha", "beta")), slip_of("nope", ("noise",)), slip_of("a", ("a",))
  ('alpha', None, 'a')
  """
  nearest = min(known, key=lambda other: _slips(word, other), default=None)
  most = min(3, max(1, len(word) // 4))
  return None if nearest is None or _slips(word, nearest) > most else nearest


def _slips(word: str, other: str) -> int:
  """Returns the edit distance that also counts an exchange of two neighbouring letters as 1.

  This is the variant of Damerau-Levenshtein in which no part is changed twice."""
  rows = [list(range(len(other) + 1))]
  for i, letter in enumerate(word, start=1):
    row = [i]
    for j, character in enumerate(other, start=1):
      row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != character)))
      # The exchange of two neighbouring letters counts as one error.
      if i > 1 and j > 1 and word[i - 2 : i] == other[j - 2 : j][::-1]:
        row[-1] = min(row[-1], rows[-2][j - 2] + 1)
    rows.append(row)
  return rows[-1][-1]


def did_you_mean(word: str, known: Iterable[str]) -> str:
  """Returns " (did you mean ...?)" with the known word nearest to `word`; "" if none is near.

  >>> did_you_mean("adan", ("sgd", "adam")), did_you_mean("x", ("sgd", "adam"))
  (" (did you mean 'adam'?)", '')
  """
  near = difflib.get_close_matches(word, tuple(known), n=1)
  return question(repr(near[0])) if near else ""


def question(name: str, note: str = "") -> str:
  """Returns the end of a message that asks for another name.

  >>> question("--config.seed"), question("num_steps", "epochs / sampling_prob")
  (' (did you mean --config.seed?)', ' (did you mean num_steps? epochs / sampling_prob)')
  """
  return f" (did you mean {name}?{note and f' {note}'})"
