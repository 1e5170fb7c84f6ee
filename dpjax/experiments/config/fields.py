"""Typed, dotted fields of a config dataclass: look up, check, replace, read from text.

A dataclass does not check its arguments: `DpSgd(epsilon="two")` would fail minutes later,
far from its cause. So values are checked here, against the annotations alone.

A field may hold one of several frozen values, such as `Automatic(gamma=0.1)`. Its annotation then
carries a `Choice`, the table of their names. The field accepts the value, its name (with the
defaults), or {"name": "automatic", "gamma": 0.1}. A longer path sets a field of the value:
`privacy.clipping.gamma`. So a config has no field that the chosen value would not read.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dpjax import names, validate
from dpjax.experiments.config.choices import (
  Choice,
  choice_of,
  fields_of,
  leaves,
  set_fields,
  to_dict,
  types_of,
)
from dpjax.validate import UserError, Verbatim, did_you_mean

_UNIONS = (typing.Union, types.UnionType)
_WORDS = {float: "a number", int: "an integer", bool: "true or false", str: "text",
          list: "a list", tuple: "a tuple", dict: "a dict or JSON"}  # fmt: skip
_SEVERAL = {"a number": "numbers", "an integer": "integers"}
# Largest number of characters of a list of fields that an error shows whole.
_LISTED = 200
# Number of bits, with the sign, of the largest integers that JAX and NumPy accept.
_INT_BITS = 64


class WithChoices:
  """Base of a config with choices. A name that is assigned to a field with a choice becomes the
  value of this name. An unknown name is kept, so that `check` can refuse it and name the field."""

  def __setattr__(self, name: str, value: Any) -> None:
    if isinstance(value, str | dict):
      its_type = types_of(type(self)).get(name)
      if its_type is not None and its_type.choice is not None:
        with contextlib.suppress(UserError):
          value = _choose(value, its_type.choice, name)
    super().__setattr__(name, value)

  def __getstate__(self) -> dict[str, Any]:
    """Returns the fields for pickle and `copy`, chosen values as in `to_dict`: no name in a module
    leads to the classes of some."""
    types = types_of(type(self))
    return {
      name: plain if types[name].choice is not None else getattr(self, name)
      for name, plain in to_dict(self).items()
    }

  def __setstate__(self, held: dict[str, Any]) -> None:
    # A wrong value stays as it is: a copy checks nothing.
    for name, value in held.items():
      setattr(self, name, value)


def get(config: Any, path: str, *, name: str = "config") -> Any:
  """Returns the value of a dotted field. A chosen value is returned as text, with its changed
  fields. The result is None if a dict, or the chosen value, lacks the key.

  Raises:
    UserError: an unknown field.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> get(TrainConfig(), "privacy.delta"), get(TrainConfig(), "privacy.clipping")
  (1e-05, 'flat')
  """
  head, _, tail = path.partition(".")
  if isinstance(config, dict):
    value = config.get(head)
    choice = None
  else:
    _check_field(config, head, name, path=path)
    value = getattr(config, head)
    choice = types_of(type(config))[head].choice
  if choice is not None and not tail:
    return choice.describe(value)
  first = tail.partition(".")[0]
  if choice is not None and not hasattr(value, first) and first in choice.owners():
    # Another value of the choice has the field; what is inside it must be there, too.
    get(choice.kinds()[choice.owners()[first][0]](), tail, name=f"{name}.{head}")
    return None
  return get(value, tail, name=f"{name}.{head}") if tail else value


def replace(config: Any, path: str, value: Any, *, name: str = "config") -> Any:
  """Returns a copy of the config with one dotted field replaced, checked against its
  annotation.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> replace(TrainConfig(), "privacy.epsilon", 8).privacy.epsilon
  8.0
  >>> replace(TrainConfig(), "num_steps", 2.5)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: config.num_steps=2.5: must be an integer
  """

  return replace_all(config, {path: value}, name=name)


def replace_all(config: Any, values: Mapping[str, Any], *, name: str = "config") -> Any:
  """Returns a copy of the config with several dotted fields replaced at once.

  Whole values are set before the fields inside them.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> config = replace_all(TrainConfig(), {"privacy.epsilon": 8, "num_steps": 3})
  >>> config.privacy.epsilon, config.num_steps
  (8.0, 3)
  """
  return _update(config, values, _from_value, name)


def override(config: Any, path: str, text: str, *, name: str = "config") -> Any:
  """Returns a copy of the config with one dotted field set to a value read from command-line text.

  The field's annotation decides how the text is read. "none" empties an optional field. A longer
  path sets a key of a dict field. If a choice is changed by its name, fields that were set in the
  old value are kept where the new value has them.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> override(TrainConfig(), "privacy.epsilon", "none").privacy.epsilon is None
  True
  >>> override(TrainConfig(), "model.options.width", "64").model.options
  {'width': 64}
  """
  return override_all(config, {path: text}, name=name)


def override_all(config: Any, texts: Mapping[str, str], *, name: str = "config") -> Any:
  """Returns a copy of the config with several dotted fields overridden; the order of the texts does
  not matter.

  >>> from dpjax.experiments.kinds.federated.config import FedConfig
  >>> texts = {"secure_sum.num_members": "3", "secure_sum.colluding": "1"}
  >>> override_all(FedConfig(), {**texts, "secure_sum": "committee"}).secure_sum.num_members
  3
  """
  return _update(config, texts, _from_text, name)


def lost(before: Any, after: Any, given: Iterable[str]) -> list[str]:
  """Returns the fields set in one config whose values another lost although nobody named them.

  A value is lost where another choice was made, which has no such field.

  Args:
    given: the fields that were changed by name.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> file = replace(TrainConfig(), "privacy.l2_clip_norm", 0.1)
  >>> lost(file, replace(file, "privacy", "sgd"), ["privacy"])
  ['privacy.l2_clip_norm']
  """
  named = tuple(given)
  now = {leaf.path: leaf.value for leaf in leaves(after)}
  paths = []
  for path, (value, _) in set_fields(before).items():
    is_named = any(f"{other}.".startswith(f"{path}.") for other in named)
    if not is_named and not (path in now and now[path] == value):
      paths.append(path)
  return paths


def _from_value(value: Any, hint: Any, name: str, old: Any) -> Any:
  """Returns the new value of a field that holds `old`, checked."""
  return check(_with_old_fields(value, hint, name, old), hint, name)


def _from_text(text: str, hint: Any, name: str, old: Any) -> Any:
  """Returns the new value of a field that holds `old`, from command-line text."""
  if choice_of(hint) is None:
    return parse(text, hint, name)
  literal = _literal(text) if text.lstrip().startswith("{") else text
  return _from_value(literal, hint, name, old)


def from_dict(kind: Any, held: Any, *, name: str = "config") -> Any:
  """Builds the config from plain data, such as a config.json; the inverse of `to_dict`.

  Args:
    kind: a dataclass, all of whose fields have defaults.
    held: dict of fields. Fields that are left out get their defaults.

  Raises:
    UserError: `kind` has no such field, or a value has another type.

  >>> from dpjax.experiments.config import choices
  >>> from dpjax.experiments.kinds.central.config import DpSgd
  >>> config = DpSgd(clipping="automatic", noise_levels=[2.0, 0.5])
  >>> from_dict(DpSgd, choices.to_dict(config)) == config
  True
  """
  if not isinstance(held, dict):
    raise _wrong(held, kind, name)
  config = kind()
  for key, value in held.items():
    field = str(key)  # what is typed as a Python dict may have other keys
    _check_field(config, field, name)
    checked = check(value, types_of(kind)[field].hint, f"{name}.{field}")
    config = _replace(config, {field: checked}, name)
  return config


def check(value: Any, hint: Any, name: str) -> Any:
  """Returns the value if it conforms to the annotation. For a float field an int becomes a float.

  What JSON lacks may be as JSON holds it: a dict for a section, a list for a tuple, and "inf".

  Raises:
    UserError: the value has another type; the message names the field, its value and what it must
      be. NaN is never a number. An integer of 2^63 or more in size is refused, unless the field is
      a float.
  """
  choice = choice_of(hint)
  if choice is not None:
    return _choose(value, choice, name)
  if hint in (Any, object) or (value is None and hint in (None, type(None))):
    return _check_length(value, name)
  if dataclasses.is_dataclass(hint):
    return _check_dataclass(value, hint, name)
  if typing.get_origin(hint) in _UNIONS:
    return _check_union(value, hint, name)
  if typing.get_origin(hint) is not None:
    return _check_container(value, hint, name)
  if hint is float and (
    _is_number(value) or (isinstance(value, str) and value in ("inf", "-inf"))
  ):
    return float(value)
  # In Python a bool is an int, but a count of True is a mistake.
  if isinstance(value, hint) and (hint is not int or not isinstance(value, bool)):
    return _check_length(value, name)
  raise _wrong(value, hint, name)


def parse(text: str, hint: Any, name: str) -> Any:
  """Parses text into a value of the annotated type.

  >>> parse("none", float | None, "epsilon"), parse("1e-5", float | None, "delta")
  (None, 1e-05)
  >>> parse("[1, 2]", list[float], "values")
  [1.0, 2.0]
  """
  options = _members(hint)
  if type(None) in options and text.strip().lower() == "none":
    return None
  # Text fields stay text: a data set may be called "1e3" or "true".
  if str in options:
    return _check_length(text, name)
  return check(_literal(text), hint, name)


def _with_old_fields(value: Any, hint: Any, name: str, old: Any) -> Any:
  """Returns the value of a chosen name, with the fields that were set in the old value, if the new
  one has them. Any other value is returned unchanged."""
  choice = choice_of(hint)
  if choice is None or not isinstance(value, str):
    return value
  if choice.kind(value, name) is None or choice.word(old) is None:
    return value
  new = choice.make(value, name)
  types = types_of(type(new))
  usual = type(old)()
  kept = {
    field.name: getattr(old, field.name)
    for field in fields_of(new)
    if hasattr(old, field.name)
    and getattr(old, field.name) != getattr(usual, field.name)
    and _fits(getattr(old, field.name), types[field.name].hint)
  }
  try:
    return dataclasses.replace(new, **kept) if kept else new
  except UserError:
    return new  # what one value took, the other may refuse


def _fits(value: Any, hint: Any) -> bool:
  """Returns whether a field may hold the value; only a choice may refuse it here."""
  choice = choice_of(hint)
  return choice is None or choice.word(value) is not None


def _choose(value: Any, choice: Choice, name: str) -> Any:
  """Returns the frozen value that a name, a dict with a name, or the value itself stands for."""
  value_or_name = {"name": value} if isinstance(value, str) else value
  if not isinstance(value_or_name, dict):
    if choice.word(value) is None:
      raise _not_chosen(value, value, choice, name)
    return value if value is None else _check_dataclass(value, type(value), name)
  value_or_name = {
    str(key): entry for key, entry in _check_length(value_or_name, name).items()
  }
  word = value_or_name.pop("name", None)
  if not isinstance(word, str) or choice.kind(word, name) is None:
    raise _not_chosen(value, word, choice, name)
  chosen = choice.make(word, name)
  for field in value_or_name:
    _check_field(chosen, field, name, choice)
  if chosen is None:
    return chosen
  values: dict[str, Any] = {}
  for field, entry in value_or_name.items():
    values[field] = check(entry, types_of(type(chosen))[field].hint, f"{name}.{field}")
  return _replace(chosen, values, name)


def _not_chosen(value: Any, word: Any, choice: Choice, name: str) -> UserError:
  hint = did_you_mean(word, choice.table) if isinstance(word, str) else ""
  known = ", ".join(choice.table if choice.users is None else (*choice.table, names.FORM))
  return UserError(f"must be one of {known}{hint}", field=name, value=value)


def _check_field(
  config: Any, head: str, name: str, choice: Choice | None = None, *, path: str = ""
) -> None:
  """Raises UserError unless the config has the field `head`. The message names the nearest field of
  the config or of its sections, or the chosen value that has the field.

  Args:
    path: dotted path that begins with `head`, as it was given; the error is about it.
  """
  # A choice may be none.
  is_section = dataclasses.is_dataclass(config) or (choice is not None and config is None)
  if not is_section or isinstance(config, type):
    raise UserError(
      f"{name} holds {config!r}, which has no fields", field=f"{name}.{path or head}"
    )
  known = [field.name for field in fields_of(config)]
  if head in known:
    return
  if choice is not None:
    owners = choice.owners()
    whose = f"; it belongs to {', '.join(owners[head])}" if head in owners else ""
    hint = whose or _did_you_mean(head, owners, known)
    raise UserError(
      f"{choice.name(config)!r} has no such field{hint}", field=f"{name}.{path or head}"
    )
  raise UserError(
    f"no such field{_did_you_mean(head, _paths(config), known)}",
    field=f"{name}.{path or head}",
  )


def _places(paths: Iterable[str]) -> dict[str, str]:
  """Returns {last name of a field: its path}."""
  # Deep paths come first. If a shallow path has the same last name, it replaces the deep one, and
  # is suggested.
  deep_first = sorted(paths, key=lambda path: -path.count("."))
  return {path.rpartition(".")[2]: path for path in deep_first}


def place_of(config: Any, word: str) -> tuple[str, str] | None:
  """Returns (path, note) of the field that is called `word` or nearly so, here or in other
  libraries; None if there is none. A note says how their value differs from ours.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> place_of(TrainConfig(), "max_grad_norm")
  ('privacy.l2_clip_norm', '')
  """
  return _place_among(list(_paths(config)), word)


def _place_among(paths: list[str], word: str) -> tuple[str, str] | None:
  from dpjax.experiments.config import elsewhere  # a mistake alone needs it

  theirs = elsewhere.find(word, paths)
  if theirs is not None:
    return theirs
  places = _places(paths)
  near = validate.slip_of(word, places)
  return None if near is None else (places[near], "")


def _did_you_mean(word: str, paths: Iterable[str], known: list[str]) -> str:
  """Returns the end of a message: the place of a similar name, or the list of fields.

  >>> _did_you_mean("epsilom", ["privacy.epsilon"], ["privacy"])
  " (did you mean 'privacy.epsilon'?)"
  >>> _did_you_mean("nope", ["privacy.clipping.noise"], ["privacy", "seed"])
  '; must be one of privacy, seed'
  >>> _did_you_mean("epochs", ["num_steps"], ["num_steps"])
  " (did you mean 'num_steps'? epochs * number of examples / batch size)"
  """
  from dpjax.experiments.config import elsewhere  # a mistake alone needs it

  place = _place_among(list(paths), word)
  if place is not None:
    return validate.question(repr(place[0]), place[1])
  ours = elsewhere.name_of(word)
  if ours is not None:
    return f"; dpjax calls it {ours!r}, which is not read here"
  if not known:
    return ", and no other"
  listed = ", ".join(known)
  if len(listed) > _LISTED:
    listed = f"{listed[:_LISTED].rpartition(', ')[0]}, ... ({len(known)} fields)"
  return f"; must be one of {listed}"


def _paths(config: Any, prefix: str = "") -> Iterator[str]:
  for field in fields_of(config):
    path = f"{prefix}{field.name}"
    yield path
    value = getattr(config, field.name)
    choice = types_of(type(config))[field.name].choice
    if choice is not None:
      values = [kind() for kind in choice.kinds().values()]
      yield from dict.fromkeys(
        inner for each in values for inner in _paths(each, f"{path}.")
      )
    elif dataclasses.is_dataclass(value):
      yield from _paths(value, f"{path}.")


# Function of (what is given for a field, its annotation, its dotted name, its old value) -> value.
_Read = Callable[[Any, Any, str, Any], Any]


def _update(
  config: Any, changes: Mapping[str, Any], read: _Read, name: str, hint: Any = Any
) -> Any:
  """Returns a copy with all changes of dotted fields, whole values before fields inside them.

  Each dataclass is replaced once, with all its changes. So its checks of one field against another
  see the new values of both, whatever the order was.
  """
  if isinstance(config, dict):
    for path, change in changes.items():
      config = _update_dict(config, path, change, read, name, hint)
    return config
  whole: dict[str, Any] = {}
  inside: dict[str, dict[str, Any]] = {}
  for path, change in changes.items():
    head, dot, tail = path.partition(".")
    if not head or (dot and not tail):
      raise UserError(
        "no such field; names between dots must not be empty", field=f"{name}.{path}"
      )
    _check_field(config, head, name, choice_of(hint), path=path)
    if tail:
      inside.setdefault(head, {})[tail] = change
    else:
      whole[head] = change
  values: dict[str, Any] = {}
  types = types_of(type(config))
  for head, change in whole.items():
    values[head] = read(change, types[head].hint, f"{name}.{head}", getattr(config, head))
  # A whole value set later would undo fields set inside it.
  for head, within in inside.items():
    value = values.get(head, getattr(config, head))
    values[head] = _update(value, within, read, f"{name}.{head}", types[head].hint)
  new = _replace(config, values, name)
  # What a chosen value leaves without a reader goes back to its default, unless it is named.
  for head in whole:
    for other in leaves_out(getattr(new, head)):
      if not any(f"{path}.".startswith(f"{other}.") for path in changes):
        new = at_default(new, other, type(config)())
  return new.settle(config, changes) if hasattr(new, "settle") else new


def leaves_out(value: Any) -> tuple[str, ...]:
  """Returns the fields beside a chosen value, by dotted name, that nothing reads then."""
  return getattr(type(value), "leaves_out", ())


def at_default(config: Any, path: str, usual: Any) -> Any:
  """Returns a copy of a config with one dotted field as in another one of its class, `usual`."""
  head, _, tail = path.partition(".")
  usual = usual if type(usual) is type(config) else type(config)()
  value = getattr(usual, head)
  # An optional section goes as a whole, unless it is a choice whose other fields may stay.
  if tail and (value is not None or types_of(type(config))[head].choice is not None):
    value = at_default(getattr(config, head), tail, value)
  return dataclasses.replace(config, **{head: value})


def _replace(config: Any, values: dict[str, Any], name: str) -> Any:
  """Returns a copy with these values. Errors of the dataclass about one of its fields get the
  dotted name of the field."""
  try:
    return dataclasses.replace(config, **values)
  except UserError as error:
    # The error may also be about a field whose value was not changed.
    field_names = {field.name for field in dataclasses.fields(config)}
    is_here = error.field.partition("[")[0] in field_names
    raise (error.within(name) if is_here else error) from error


def _update_dict(
  config: dict, path: str, change: Any, read: _Read, name: str, hint: Any
) -> dict:
  head, _, tail = path.partition(".")
  value_hint = (typing.get_args(hint) or (str, Any))[1]
  if tail and isinstance(config.get(head), dict):
    return {**config, head: _update_dict(config[head], tail, change, read, name, Any)}
  # Keys of a dict may contain dots, so the whole path may be one key.
  return {**config, path: read(change, value_hint, f"{name}.{path}", None)}


def _check_dataclass(value: Any, kind: Any, name: str) -> Any:
  if isinstance(value, dict):
    return from_dict(kind, value, name=name)
  if not isinstance(value, kind):
    raise _wrong(value, kind, name)
  types = types_of(kind)
  for attribute in getattr(value, "__dict__", ()):
    # A cached property of the class is stored in `__dict__`, too, but is no field.
    if not hasattr(kind, attribute):
      _check_field(value, attribute, name)
  fields = {
    field.name: check(
      getattr(value, field.name), types[field.name].hint, f"{name}.{field.name}"
    )
    for field in dataclasses.fields(kind)
  }
  return _replace(value, fields, name)


def _check_union(value: Any, hint: Any, name: str) -> Any:
  if type(value) in _members(hint) and dataclasses.is_dataclass(value):
    # A dataclass is checked by itself, since the error then names the field at fault. The error of
    # a union would not.
    return _check_dataclass(value, type(value), name)
  if value is None and type(None) in _members(hint):
    return None
  options = [option for option in _members(hint) if option is not type(None)]
  if len(options) == 1 and isinstance(value, list | tuple | dict):
    # The error then names the entry at fault.
    return check(value, options[0], name)
  for option in options:
    try:
      return check(value, option, name)
    except UserError:
      continue
  raise _wrong(value, hint, name)


def _check_container(value: Any, hint: Any, name: str) -> Any:
  kind = typing.get_origin(hint)
  inner = typing.get_args(hint)
  # Either may be written for the other, as [.9, .1] on a command line.
  if kind in (list, tuple) and isinstance(value, list | tuple):
    value = kind(value)
  if not isinstance(value, kind):
    raise _wrong(value, hint, name)
  if kind is dict:
    return {check(k, inner[0], name): check(v, inner[1], f"{name}[{k!r}]")
            for k, v in value.items()}  # fmt: skip
  if kind is list or inner[-1] is ...:
    return kind(check(v, inner[0], f"{name}[{i}]") for i, v in enumerate(value))
  if len(value) != len(inner):
    raise UserError(f"must have {len(inner)} entries", field=name, value=value)
  return tuple(check(v, h, f"{name}[{i}]") for i, (v, h) in enumerate(zip(value, inner)))


def _members(hint: Any) -> tuple:
  return typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)


def _is_number(value: Any) -> typing.TypeGuard[float]:
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return False
  try:
    return not math.isnan(value)
  # The integer is larger than every float.
  except OverflowError:
    return False


def _check_length(value: Any, name: str) -> Any:
  """Returns the value. Raises UserError if it contains an integer or a text that cannot be
  stored."""
  entries = value.values() if isinstance(value, dict) else value
  for entry in entries if isinstance(value, (dict, list, tuple)) else ():
    _check_length(entry, name)
  if isinstance(value, str):
    try:
      value.encode()
    # Bytes of a command line may be no UTF-8.
    except UnicodeEncodeError:
      must = "must be text that UTF-8 can write"
      raise UserError(must, field=name, value=Verbatim(f"{value!a}")) from None
  if isinstance(value, int) and value.bit_length() >= _INT_BITS:
    raise UserError(
      f"must be below 2**{_INT_BITS - 1} in size", field=name, value=Verbatim(_show(value))
    )
  return value


def _show(value: Any) -> str:
  """Returns a value as text. A long integer is shortened, since Python refuses to write thousands
  of digits."""
  long = isinstance(value, int) and value.bit_length() > 2 * _INT_BITS
  return f"{hex(value)[:12]}..." if long else repr(value)


def _literal(text: str) -> Any:
  text = text.strip()
  words = {"true": True, "false": False, "inf": math.inf, "none": None}
  if text.lower() in words:
    return words[text.lower()]
  # Two spellings are read: Python's, such as (1, 2) and None, and JSON's, such as null and true.
  for read in (ast.literal_eval, json.loads) if text[:1] in "{[" else (ast.literal_eval,):
    try:
      return read(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
      continue
  return text


def _wrong(value: Any, hint: Any, name: str) -> UserError:
  must = _by_name(value, hint, name) or f"must be {_describe(hint)}"
  return UserError(must, field=name, value=Verbatim(_show(value)))


def _by_name(value: Any, hint: Any, name: str) -> str:
  """Returns the advice to name one in the field `name` of a section, with what it may be; "" if
  the value is no text or the section has no such field."""
  if not (isinstance(value, str) and dataclasses.is_dataclass(hint)):
    return ""
  named = types_of(hint).get("name")  # type: ignore[arg-type]
  notes = [note for note in (named.attached if named else ()) if isinstance(note, str)]
  dashes = "--" if name.startswith("config.") else ""
  return f"is set by {dashes}{name}.name: {notes[0]}" if notes else ""


def _describe(hint: Any) -> str:
  if hint is type(None):
    return "none"
  if typing.get_origin(hint) in _UNIONS:
    return " or ".join(_describe(option) for option in typing.get_args(hint))
  if dataclasses.is_dataclass(hint):
    fields = validate.join_words(types_of(hint))  # type: ignore[arg-type]
    return f"set field by field: {fields}"
  if hint in (Any, object):
    return "anything"
  kind = typing.get_origin(hint)
  inner = typing.get_args(hint)
  if kind is not None:
    kept = inner[1:] if kind is dict else [part for part in inner if part is not ...]
    words = ", ".join(_describe(part) for part in kept if part not in (Any, object))
    return f"{_WORDS[kind]} of {_SEVERAL.get(words, words)}" if words else _WORDS[kind]
  return _WORDS.get(hint, f"of type {hint}")
