"""Choices: config fields that hold one of several frozen values, and a walk over all
fields.

The annotation of such a field carries a `Choice`: a table of the values' classes by name. A setting
that only one value reads is a field of that value, so a config cannot hold it for another value.
`dpjax.experiments.config.fields` reads, checks and replaces such fields like all others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pkgutil
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from dpjax import names, validate
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
  """Metadata in `Annotated[ClipRule, Choice(RULES)]`, which lists the values that a field takes.

  Args:
    table: name -> dataclass, whose fields all have defaults, or NoneType; or the import path of
      such a class, which is imported when it is chosen. It is read at each use, so entries may be
      added later. A class may name in `leaves_out` fields beside this one that
      nothing reads if it is chosen; choosing it by name resets them.
    users: function (what an import path names, the path) -> class of a user's own values, always
      the same one, whose `names.path_of` is the path: `users_of`, `functions` or another. It raises
      UserError for what can be no value. None: no import path is accepted.
  """

  table: Mapping[str, type | str]
  users: Callable[[Any, str], type] | None = None

  def __post_init__(self):
    for name, kind in self.table.items():
      # `settings` names a class after its function, which is often a lambda. So the class gets its
      # name in the table.
      if isinstance(kind, type) and issubclass(kind, Setting):
        kind.__qualname__ = name

  def kinds(self) -> dict[str, type]:
    """Returns name -> class, of all entries of the table."""
    return {name: _import(entry) for name, entry in self.table.items()}

  def word(self, value: Any) -> str | None:
    """Returns the name of the value's class in the table, or the import path of a user's class.
    None: it is no value of this choice; classes are none."""
    kind = type(value)
    path = names.path_of(kind)
    for name, entry in self.table.items():
      if entry in (kind, path):
        return name
    if self.users is not None and names.is_path(path):
      # A class may be gone from its module, or be no value of this choice.
      with contextlib.suppress(AttributeError, ImportError, UserError):
        return path if self.users(_import(path), path) is kind else None
    return None

  def kind(self, word: str, field: str) -> type | None:
    """Returns the class for a name or an import path; None for anything else.

    Args:
      field: dotted name of the config's field, for the message.

    Raises:
      UserError: a path at which there is nothing that can be a value.
    """
    if self.users is None or not names.is_path(word):
      return _import(self.table[word]) if word in self.table else None
    there = names.find(word, field)
    with validate.about(field, word):
      return self.users(there, word)

  def make(self, word: str, field: str) -> Any:
    """Returns the value for a name or an import path that has a `kind`, with its defaults."""
    kind = self.kind(word, field)
    assert kind is not None
    return (names.guard(word, field, kind) if names.is_path(word) else kind)()

  def name(self, value: Any) -> Any:
    """Returns the `word` of a value; a value that is no choice is returned unchanged."""
    word = self.word(value)
    return value if word is None else word

  def describe(self, value: Any) -> Any:
    """Returns the name with all values that differ from the defaults, such as
    "automatic(gamma=0.1)". A value that is no choice is returned unchanged."""
    word = self.word(value)
    if word is None:
      return value
    changed = ", ".join(
      f"{path}={value_there!r}" for path, (value_there, _) in set_fields(value).items()
    )
    return f"{word}({changed})" if changed else word

  def owners(self) -> dict[str, list[str]]:
    """Returns a dict: field -> names of the table's classes that have it."""
    owners_of: dict[str, list[str]] = {}
    for name, kind in self.kinds().items():
      for field in fields_of(kind):
        owners_of.setdefault(field.name, []).append(name)
    return owners_of


def _import(entry: type | str) -> type:
  """Returns the class that an entry of a table is, or whose import path it is."""
  return pkgutil.resolve_name(entry) if isinstance(entry, str) else entry


def fields_of(kind: Any) -> tuple[dataclasses.Field[Any], ...]:
  """Returns the fields of a dataclass, or of an instance; () of None."""
  return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


# --- users' own values


def users_of(base: type) -> Callable[[Any, str], type]:
  """Returns the `users` of a choice whose import paths name frozen dataclasses that derive from
  `base`; their fields are set like those of the table's classes."""

  def found(kind: Any, path: str) -> type:
    if not (isinstance(kind, type) and issubclass(kind, base) and _is_frozen(kind)):
      raise UserError(
        f"must be a frozen dataclass that derives from {base.__name__}, all of whose "
        "fields have defaults"
      )
    return kind

  return found


def _is_frozen(kind: type) -> bool:
  """Returns whether this is a frozen dataclass that needs no arguments."""
  # A class that only derives from a dataclass has inherited fields, not its own.
  if (
    "__dataclass_fields__" not in vars(kind)
    or not vars(kind)["__dataclass_params__"].frozen
  ):
    return False
  missing = dataclasses.MISSING
  return all(
    field.default is not missing or field.default_factory is not missing
    for field in dataclasses.fields(kind)
  )


class UsersFunction:
  """Base of the values that stand for a user's function; they have no fields."""

  @property
  def path(self) -> str:
    """Returns the function's import path."""
    return names.path_of(type(self))


def functions(function: Any, path: str) -> type:
  """Returns the class of the value for a user's function, as `users` of a choice."""
  del function  # what calls it with its arguments checks what it returns
  return _of_path(path)


@functools.cache
def _of_path(path: str) -> type:
  return at_path(
    dataclasses.make_dataclass(path, (), bases=(UsersFunction,), frozen=True), path
  )


def at_path(kind: type, path: str) -> type:
  """Returns a class that stands for what is at an import path, which becomes its `path_of`."""
  kind.__module__, _, kind.__qualname__ = path.partition(":")
  return kind


class Setting:
  """Base of the classes that `settings` makes."""

  function: ClassVar[Callable[..., Any]]
  leaves_out: ClassVar[tuple[str, ...]] = ()

  def make(self, *args: Any, **named: Any) -> Any:
    """Calls the function with these arguments and the configured ones."""
    return type(self).function(*args, **named, **vars(self))


class Option:
  """A default of `settings` with rules and help, which the field's annotation then carries."""

  def __init__(self, default: Any, *carried: Any):
    self.default = default
    self.carried = carried


def settings(
  function: Callable[..., Any], documented: Any = None, /, **defaults: Any
) -> type[Setting]:
  """Returns a frozen dataclass of a function's configurable arguments, for a `Choice`.

  Args:
    documented: object whose docstring describes the choice; None for the function itself.
    defaults: default of each argument, or an `Option`.

  >>> kind = settings(round, ndigits=2)
  >>> kind(), kind(ndigits=1).make(3.14159)
  (round(ndigits=2), 3.1)
  """
  kinds = []
  hints: dict[str, Any] = {}
  for name, default in defaults.items():
    carried: tuple[Any, ...] = ()
    if isinstance(default, Option):
      default, carried = default.default, default.carried
    # Every default but None shows its type. For None the annotation of the function is needed.
    if default is None:
      hints = hints or typing.get_type_hints(function)
    hint = hints[name] if default is None else type(default)
    kinds.append((name, Annotated[hint, *carried] if carried else hint, default))
  return dataclasses.make_dataclass(
    function.__name__,
    kinds,
    bases=(Setting,),
    namespace={
      "function": staticmethod(function),
      "__doc__": (documented or function).__doc__ or "",
    },
    frozen=True,
  )


class FieldType(NamedTuple):
  """What the annotation of a field says."""

  hint: Any  # its type; the whole annotation if it has a choice
  choice: Choice | None
  attached: tuple[Any, ...]  # a choice, rules, help


@functools.cache
def types_of(kind: type) -> dict[str, FieldType]:
  """Returns field -> its type. Annotations of a class do not change.

  >>> from dpjax.experiments.kinds.central.config import OptimizerConfig
  >>> types_of(OptimizerConfig)["rule"].choice.users is functions
  True
  """
  plain = typing.get_type_hints(kind)
  found = {}
  for name, annotation in typing.get_type_hints(kind, include_extras=True).items():
    choice = choice_of(annotation)
    hint = plain[name] if choice is None else annotation
    found[name] = FieldType(hint, choice, tuple(_attachments(annotation)))
  return found


def _attachments(hint: Any) -> Iterator[Any]:
  """Yields everything attached to an annotation, and to the members of a union."""
  if typing.get_origin(hint) is typing.Annotated:
    yield from hint.__metadata__
    hint = hint.__origin__
  for member in typing.get_args(hint):
    if typing.get_origin(member) is typing.Annotated:
      yield from _attachments(member)


def choice_of(hint: Any) -> Choice | None:
  """Returns the choice attached to an annotation; None if there is none."""
  for entry in getattr(hint, "__metadata__", ()):
    if isinstance(entry, Choice):
      return entry
  return None


def choice_at(kind: type, path: str) -> Choice | None:
  """Returns the choice of a dotted field of a config's class; None if it has none.

  Of a section that is a choice itself, the first class with the field counts.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> list(choice_at(TrainConfig, "privacy.clipping").table)[0]
  'flat'
  """

  def into(section: Any, name: str) -> Any:
    choice = choice_of(section)
    kinds = [section] if choice is None else choice.kinds().values()
    return next(
      (types_of(each)[name].hint for each in kinds if name in types_of(each)), None
    )

  return choice_of(functools.reduce(into, path.split("."), kind))


class Leaf(NamedTuple):
  """A field of a config that is no section of fields. If it has a choice, `value` is the name of
  the chosen value."""

  path: str
  type: FieldType
  value: Any
  default: Any  # for a field of a chosen value: the default of its class


def leaves(config: Any, default: Any = None, prefix: str = "") -> Iterator[Leaf]:
  """Yields every leaf, in order. The fields of a chosen value follow the leaf with its name.

  >>> from dpjax.experiments.kinds.central.config import DpSgd
  >>> all_leaves = leaves(DpSgd(clipping="automatic"))
  >>> [leaf[2:] for leaf in all_leaves if leaf.path.startswith("clipping")]
  [('automatic', 'flat'), (0.01, 0.01)]
  """
  default = default if prefix else type(config)()
  for field in fields_of(config):
    path = f"{prefix}{field.name}"
    its_type = types_of(type(config))[field.name]
    value = getattr(config, field.name)
    usual = getattr(default, field.name, None)
    choice = its_type.choice
    # An instance of a dataclass is a section, whose fields are leaves. A class is a value.
    has_fields = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if choice is not None:
      # A value that is none of this choice is refused by its leaf, and has no fields here.
      has_fields = has_fields and choice.word(value) is not None
      yield Leaf(path, its_type, choice.name(value), choice.name(usual))
    elif not has_fields:
      yield Leaf(path, its_type, value, usual)
    if has_fields:
      # If the usual value is of another class, its fields are no defaults for this value.
      other = choice is not None and type(usual) is not type(value)
      yield from leaves(value, type(value)() if other else usual, f"{path}.")


def set_fields(config: Any) -> dict[str, tuple[Any, Any]]:
  """Returns path -> (value, default) of each leaf whose value is neither its default nor None."""
  return {
    leaf.path: leaf[2:]
    for leaf in leaves(config)
    if leaf.value is not None and leaf.value != leaf.default
  }


def to_dict(config: Any) -> dict[str, Any]:
  """Returns the config as nested dicts, with the name of each chosen value.

  >>> from dpjax.experiments.kinds.central.config import DpSgd
  >>> to_dict(DpSgd(clipping="automatic"))["clipping"]
  {'name': 'automatic', 'gamma': 0.01}
  """
  values: dict[str, Any] = {}
  for field in fields_of(config):
    value = getattr(config, field.name)
    choice = types_of(type(config))[field.name].choice
    if dataclasses.is_dataclass(value):
      named = {} if choice is None else {"name": choice.name(value)}
      values[field.name] = named | to_dict(value)
    else:
      values[field.name] = value
  return values


def name_of(config: Any, field: str) -> Any:
  """Returns the name of a field's chosen value; the value itself for a field without a choice.

  >>> from dpjax.experiments.kinds.central.config import DpSgd
  >>> name_of(DpSgd(clipping={"name": "automatic", "gamma": 0.1}), "clipping")
  'automatic'
  """
  value = getattr(config, field)
  choice = types_of(type(config))[field].choice
  return value if choice is None else choice.name(value)
