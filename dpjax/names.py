"""A user's own code in a config: an import path `package.module:name` in place of a registered
name.

The object at the path is called with the same arguments as a registered one, so a new model or
loss needs no change of dpjax. `dpjax.experiments.config.user_code` lists the arguments for each
field. Python's search path applies; with `python -m launch.train` the current directory is first.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from dpjax import validate
from dpjax.validate import UserError

FORM = "package.module:name"
_DOTTED = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_PATH = re.compile(f"{_DOTTED}:{_DOTTED}")
# File of an imported object -> (field of the config that names the object, import path).
_FIELDS_OF: dict[str, tuple[str, str]] = {}


def is_path(name: str) -> bool:
  """Whether a name is an import path rather than a registered name.

  >>> is_path("mine.nets:Net"), is_path("mlp"), is_path("mnist:3.0.1")
  (True, False, False)
  """
  return _PATH.fullmatch(name) is not None


def path_of(part: Any) -> str:
  """Returns the import path of a class or a function.

  >>> path_of(UserError)
  'dpjax.validate:UserError'
  """
  return f"{part.__module__}:{part.__qualname__}"


def one_of(choices: Iterable[str], **named: str) -> None:
  """Raises UserError unless each name is one of the choices, or a path that can be imported.

  >>> one_of(("sgd", "adam"), **{"optimizer.rule": "optax:sgd"})
  >>> one_of(("sgd", "adam"), **{"optimizer.rule": "optax:sgdd"})
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: optimizer.rule='optax:sgdd': optax has no 'sgdd' (did you mean 'sgd'?)
  """
  for field, name in named.items():
    if is_path(name):
      find(name, field)
    else:
      validate.one_of((*choices, FORM), **{field: name})


def find(path: str, field: str) -> Callable[..., Any]:
  """Imports and returns the class or function at an import path.

  Args:
    field: field of the config that holds the path, for the message.

  Raises:
    UserError: no such module; a module that fails during its import (the error names the line
      in its file); no such name in the module; or an object that cannot be called.

  >>> find("dpjax.models:Linear", "model.name").__name__
  'Linear'
  >>> find("dpjax.modls:Linear", "model.name")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: model.name='dpjax.modls:Linear': there is no module 'dpjax.modls'
  """
  home, _, name = path.partition(":")
  value: Any = _module(home, field, path)
  for part in name.split("."):
    if not hasattr(value, part):
      hint = validate.did_you_mean(part, dir(value))
      raise UserError(f"{home} has no {part!r}{hint}", field=field, value=path)
    value = getattr(value, part)
  if not callable(value):
    kind = type(value).__name__
    raise UserError(
      f"must be a class or a function, not of type {kind}", field=field, value=path
    )
  _FIELDS_OF.update(dict.fromkeys(_files(home, value), (field, path)))
  return value


def _files(home: str, value: Any) -> list[str]:
  """Returns the file of the module in a path, and the file that defines the object. This is one
  file, unless the module only imports the object. Modules without a file are left out."""
  homes = dict.fromkeys((home, str(getattr(value, "__module__", home))))
  files = (getattr(sys.modules.get(name), "__file__", None) for name in homes)
  return [file for file in files if file is not None]


def call(path: str, field: str, *args: Any, **named: Any) -> Any:
  """Calls the class or function at a path.

  Raises:
    UserError: as `find`; the object does not take these arguments; or any error in the call.

  >>> call("dpjax.data:digest", "data.name", limit=3)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: data.name='dpjax.data:digest': is called with (limit=): missing ...
  """
  maker = find(path, field)
  try:
    inspect.signature(maker).bind(*args, **named)
  except TypeError as error:
    arguments = ", ".join([*("..." for _ in args), *(f"{name}=" for name in named)])
    raise UserError(
      f"is called with ({arguments}): {error}", field=field, value=path
    ) from error
  # Some callables, such as built-in ones, have no signature to check.
  except ValueError:
    pass
  return guard(path, field, maker)(*args, **named)


def guard(path: str, field: str, part: Callable[..., Any]) -> Callable[..., Any]:
  """Wraps `part`: the object at a path, or one of its functions. Any error in `part` becomes a
  UserError that names the field, with the error as its cause.

  >>> guard("mine:inverse", "loss", lambda x: 1 / x)(0)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: loss='mine:inverse': ZeroDivisionError: division by zero
  """

  def wrapper(*args: Any, **named: Any) -> Any:
    try:
      return part(*args, **named)
    except (Exception, SystemExit) as error:
      if not isinstance(error, UserError):
        why = reason(error, _file(path.partition(":")[0]))
      elif error.is_about(field, path):
        raise
      else:
        # An error about the field's section already shows the path. It is not shown twice.
        said = error.is_about(field.partition(".")[0], path)
        why = error.must if said else str(error)
      # A run may go on after some errors, which it knows by their type.
      kind = type(error) if isinstance(error, UserError) else UserError
      raise kind(why, field=field, value=path) from error

  return wrapper


def _module(home: str, field: str, path: str) -> Any:
  try:
    return importlib.import_module(home)
  except ModuleNotFoundError as error:
    missing = str(error.name)
    # The module exists, but something that it imports is missing.
    if home != missing and not home.startswith(f"{missing}."):
      raise UserError(reason(error, _file(home)), field=field, value=path) from error
    hint = validate.did_you_mean(missing, (p.stem for p in pathlib.Path().glob("*.py")))
    message = f"there is no module {missing!r}{hint}"
    raise UserError(message, field=field, value=path) from error
  # A user's module may raise anything.
  except (Exception, SystemExit) as error:
    raise UserError(reason(error, _file(home)), field=field, value=path) from error


def _file(home: str) -> str | None:
  """Returns the file of a module, which need not be importable; None if the file is unknown."""
  try:
    spec = importlib.util.find_spec(home)
  # The package that contains the module cannot be imported either.
  except Exception:
    return None
  return None if spec is None else spec.origin


def reason(error: BaseException, file: str | None) -> str:
  """Returns an error as one line of text, with the line number in `file` that led to it, if any.

  >>> reason(ValueError("too\\n  small"), "mine.py")
  'ValueError: too small'
  """
  frames = traceback.extract_tb(error.__traceback__)
  lines = [frame.lineno for frame in frames if frame.filename == file]
  where = f" (line {lines[-1]})" if lines else ""
  return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def blame(error: BaseException) -> UserError | None:
  """Returns the error about the config field that names the user's file in which `error` arose.

  It returns None if no such file is in the traceback.
  """
  files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
  # A config may also name a part of dpjax by its import path. Files of dpjax are no user's files.
  ours = pathlib.Path(__file__).parent
  theirs = [file for file in _FIELDS_OF if ours not in pathlib.Path(file).parents]
  faulty = next((file for file in theirs if file in files), None)
  if faulty is None:
    return None
  field, path = _FIELDS_OF[faulty]
  return UserError(reason(error, faulty), field=field, value=path)


# --- files of weights


def weights_file(path: str) -> str:
  """Returns the file or folder of weights that a path stands for.

  A folder of a run stands for the params.npz in it. A folder that Flax or Orbax wrote stands for
  its newest checkpoint. A file stands for itself.

  >>> weights_file("model.safetensors")
  'model.safetensors'
  """
  saved = os.path.join(path, "params.npz")
  if os.path.exists(saved) or not os.path.isdir(path):
    return saved if os.path.isdir(path) else path
  from dpjax import weight_folders  # needed only for folders that another program wrote

  return weight_folders.newest(path) or saved


def weights_sha256(path: str, field: str) -> str:
  """Returns the SHA-256 of a file or folder of weights, which is read in parts.

  Args:
    field: field of the config that holds the path, for messages.

  Raises:
    UserError: the file cannot be read.
  """
  file = weights_file(path)
  if os.path.isdir(file):
    from dpjax import weight_folders  # needed only for folders that another program wrote

    with validate.about(field, path):
      return weight_folders.sha256(file)
  validate.no_pipe(file, field, path)
  try:
    with open(file, "rb") as held:
      return hashlib.file_digest(held, "sha256").hexdigest()
  except OSError as error:
    raise UserError(f"{error.strerror}", field=field, value=path) from error
