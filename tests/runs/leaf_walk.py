"""Other values for any leaf of any config, from its type, its value and what the checks say."""

import copy
import math
import re
import typing

from dpjax import names
from dpjax.experiments.config import fields
from dpjax.validate import UserError

_CHOICES = re.compile(r"must be one of ([^()]*?)(?: \(did you mean .*)?$")


def leaves(config):
  """(path, annotation, value) of every leaf: a choice by its name, then its value's own."""
  for leaf in fields.leaves(config):
    yield leaf.path, leaf.hint, leaf.value


def takes_words(hint):
  return hint is str or typing.get_origin(hint) is typing.Annotated


def choices(config, path, check):
  """What the refusal of a nonsense word offers; nothing where any word will do."""
  try:
    check(fields.replace(config, path, "no such word"))
  except UserError as error:
    found = _CHOICES.search(str(error))
    words = found[1].split(", ") if found else []
    return [word for word in words if word != names.FORM]  # names nobody's code
  return []


def candidates(config, path, hint, value, check):
  """Values of the right type that differ from `value` and from None."""
  kinds = (str,) if takes_words(hint) else typing.get_args(hint) or (hint,)
  if isinstance(value, dict) or typing.get_origin(hint) is dict:
    return _dicts(value)
  if isinstance(value, (list, tuple)):
    return _lists(value)
  if bool in kinds:
    return [not value]
  if float in kinds:
    return _floats(value)
  if int in kinds:
    return _integers(value)
  if str in kinds:
    words = choices(config, path, check) or ["another", "other.npz"]
    return [word for word in words if word and word != value]
  return []


def _floats(value):
  if value is None:
    return [0.37, 0.02, 3.7]
  if math.isinf(value):
    return [0.7]
  close = [value * 1.25, value * 0.6, value * 0.97]
  return [other for other in close if other != value] if value else [0.37, 0.02, 3.7]


def _integers(value):
  if value is None:
    return [2, 7, 40, 300]
  return [other for other in (value + 1, value // 2, 3 * value + 2) if other != value]


def _lists(value):
  kind = type(value)
  if not value:
    return [[1.5, 0.5]]
  first = value[0]
  shorter = [value[:-1]] if len(value) > 1 else []
  if isinstance(first, bool) or not isinstance(first, (int, float)):
    return shorter
  moved = first + 1 if isinstance(first, int) else first * 0.9
  return [kind([moved, *value[1:]]), *shorter]


def _dicts(value):
  found = [{**value, "no_such_key": 1}]
  for key, inner in value.items():
    found.append({k: v for k, v in value.items() if k != key})
    if isinstance(inner, int) and not isinstance(inner, bool):
      found += [{**value, key: other} for other in (inner + 1, inner // 3, 3 * inner)]
  return found


# --- values that must be refused

_COORDINATES = ("lrp.low",)  # may be negative
_UNBOUNDED = ("partition.alpha",)  # infinite: identically distributed clients


def is_number(hint):
  kinds = (hint,) if takes_words(hint) else typing.get_args(hint) or (hint,)
  return (float in kinds or int in kinds) and bool not in kinds and dict not in kinds


def nonsense(path, hint, value):
  """Values that no field of this type takes."""
  kinds = (str,) if takes_words(hint) else typing.get_args(hint) or (hint,)
  if typing.get_origin(hint) in (dict, list, tuple):
    return [3, "text", None, {1: 2}, {"no_such_key": 1}, ["text"], [None], (-1,)]
  if bool in kinds:
    return ["yes", 1, *([] if type(None) in kinds else [None])]
  if is_number(hint) and str not in kinds:
    wrong = ["a lot", True, math.nan, [1]]
    wrong += [] if path in _COORDINATES else [-1, -0.5]
    return wrong + ([] if path in _UNBOUNDED else [math.inf])
  return [3, 2.5, ["text"], {"a": 1}] if str in kinds else []


def extremes(hint):
  """Numbers that a slip of the keyboard makes."""
  if not is_number(hint):
    return []
  kinds = typing.get_args(hint) or (hint,)
  return [1e308, 1e-320, 0.0] if float in kinds else [0, 2**62, 10**9]


def forced(config, path, value):
  """A copy with a field set past every check, as a config file may do it."""
  config = copy.deepcopy(config)
  *sections, name = path.split(".")
  section = config
  for each in sections:
    section = getattr(section, each)
  object.__setattr__(section, name, value)
  return config
