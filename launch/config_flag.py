"""`--config=FILE.py --config.privacy.epsilon=2`: typed configs on the command line.

The syntax is that of ml_collections' config_flags. They cannot be used here: on a dataclass
whose annotations are strings (`from __future__ import annotations`) every override ends in
`issubclass() arg 1 must be a class`. They have no spelling for None, add no key to a dict, and
turn a missing or failing config file into a traceback.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import re
import shlex
import sys
import textwrap
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

from absl import flags

from dpjax import names, validate
from dpjax.experiments.config import choices, fields, rules
from dpjax.experiments.run import kind as kinds
from dpjax.experiments.run import writers
from dpjax.experiments.run.experiment import Experiment
from dpjax.experiments.run.kind import KINDS, Kind
from dpjax.validate import UserError, Verbatim
from launch import app

# The flags are no key flags of this module, so that --help lists them with their launcher.
flags.disclaim_key_flags()

_WIDTH = 96  # of --help
# The name of the flag, and that of the config in errors about its fields.
_NAME = "config"
# Beginnings of an argument that overrides a field.
_MARKS = (f"--{_NAME}.", f"-{_NAME}.")
_HELP = {"--help", "--helpfull", "-help", "-helpfull"}


# The kind of config that the file must return, from `define`; None: any kind.
_kind: Kind | None = None


def define(*, kind: Kind | None, default: str | None) -> None:
  """Defines `--config=FILE.py`, every `--config.field=value` of the command line, --audit and
  --print_config.

  Call it at import time, like any absl flag. Without a default the flag `config` is required.
  """
  global _kind
  _kind = kind
  flags.DEFINE_string(
    _NAME,
    default,
    "config file: a Python file whose get_config() returns the config of a run, or whose "
    "get_configs() yields those of a sweep.",
  )
  for path in _overridden():
    try:
      flags.DEFINE_string(f"{_NAME}.{path}", None, f"override of {path}")
    # A name with a space, for example, is an error at import, before `app.run` catches errors.
    except flags.Error as error:
      app.fail(f"--{_NAME}.{path}: {error}")
  if default is None:
    flags.mark_flag_as_required(_NAME)
  flags.DEFINE_bool(
    "audit", False, "Attack the run; short for --config.audit=, the audit that it has."
  )
  flags.DEFINE_bool("print_config", False, "Print every field of the config, and end.")
  if kind is not None and _HELP & {*sys.argv[1:]}:
    # absl prints the docstring of the program for --help, with the program's name in place
    # of %s.
    main = sys.modules["__main__"]
    text = _fields_in_words(_choices_here(kind)).replace("%", "%%")
    main.__doc__ = f"{main.__doc__ or ''}\n{text}"


def get() -> Any:
  """Returns the config of the file that --config names, checked, with the overrides.

  If a flag chooses another value, such as another method, what the file set in the old value and
  the new one lacks is dropped, and a line on stderr says so. With --print_config, prints the config
  and ends the process.

  Raises:
    UserError: a missing or failing file, another type of config, an unknown field or
      an ill-typed value; one line that names the flag.
  """
  got = _got()
  if got.note:
    writers.note(got.note)
  return got.config


def run_and_folder() -> tuple[Any, str]:
  """Returns (what is run, its folder): the run of --config, an `Experiment`, or all its runs.

  All runs are checked. --audit and --noaudit override the audit in the file. The folder is
  --workdir, by default runs/<prefix><config name>.

  Raises:
    UserError: as `get`; a run of a sweep that would be refused, or is of another kind; a --workdir
      that cannot be a directory.
  """
  got = _got(several=True)
  whole, note = _whole(got), got.note
  is_one = isinstance(whole, Experiment)
  # A wrong config is one line, without a note above it. Several runs are checked by now.
  if note and is_one:
    kinds.check(whole.config)
  if note:
    writers.note(note)
  workdir = flags.FLAGS.workdir
  if workdir is None:
    kind = kinds.of(whole.config if is_one else whole.points[0].config)
    return whole, f"runs/{kind.prefix}{pathlib.Path(flags.FLAGS.config).stem}"
  validate.folder(workdir=workdir)
  return whole, workdir


class _Got(NamedTuple):
  """What the flag of a config names."""

  config: Any  # of the file, with the overrides
  module: ModuleType  # of the file
  note: str = ""  # for the user
  before: Any = None  # the file's config
  texts: Mapping[str, str] = {}  # of the overrides, by their paths

  def without(self, path: str) -> Any:
    """Returns the config without one override."""
    texts = {other: text for other, text in self.texts.items() if other != path}
    return fields.override_all(self.before, texts)


def _whole(got: _Got) -> Any:
  """Returns the run of a config, or all runs that its module yields."""
  config, module = got.config, got.module
  get_configs = getattr(module, "get_configs", None)
  wanted = _wanted_class()
  alone = flags.FLAGS.alone
  if alone and get_configs is None:
    raise UserError(
      "would be ignored, the file has no get_configs()", field="alone", value=True
    )
  is_one = get_configs is None or alone
  if alone and kinds.of(config).experiment is None:
    raise UserError(
      "must be of a config of one run; the file's is of several", field="alone", value=True
    )
  if is_one:
    table = kinds.of(config).its_table()
    if table is None or table.alone(config) is None:
      return kinds.experiment_of(config)
  # Imported here: most commands are one run.
  from dpjax.experiments.sweeps import sweep

  if is_one:
    return sweep.Runs(None, config, title=_title(module))
  named = _runs_of(got)
  for path in got.texts:
    if path.startswith("base.") and _is_ignored(got, path, named):
      raise UserError(
        "would be ignored: get_configs() of the file sets it in each run",
        field=path,
        value=got.texts[path],
      )
  several = sweep.Runs(named, config, title=_title(module))
  for point in several.points:
    if wanted not in (None, sweep.Sweep) and not isinstance(point.config, wanted):
      raise UserError(
        f"get_configs() yields {type(point.config).__name__}, but this launcher wants "
        f"{wanted.__name__}",
        field=f"--{_NAME}",
        value=Verbatim(flags.FLAGS.config),
      )
  return several


def _runs_of(got: _Got) -> list[Any]:
  """Returns (name, config) of each run that the file yields. Raises UserError about the override
  without which it would yield them, or else about the file."""
  from dpjax.experiments.sweeps import sweep

  def listed(config: Any) -> list[Any]:
    call = lambda: sweep.list_configs(_call(got.module.get_configs, config))
    return _guard(call, str(got.module.__file__))

  def works_without(path: str) -> bool:
    with contextlib.suppress(UserError):
      listed(got.without(path))
      return True
    return False

  try:
    return listed(got.config)
  except UserError as error:
    path = next(filter(works_without, got.texts), None)
    if path is None:
      raise error.of(field=f"--{_NAME}", value=Verbatim(flags.FLAGS.config)) from error
    raise error.of(field=path, value=got.texts[path]) from error


def _wanted_class() -> type | None:
  """Returns the class of the configs of this launcher; None: of any kind."""
  return None if _kind is None else _kind.config_class


def _is_ignored(got: _Got, path: str, named: list[Any]) -> bool:
  """Returns whether an override changes the config of a file, and none of the runs it yields."""
  from dpjax.experiments.sweeps import sweep

  with contextlib.suppress(UserError):
    other = got.without(path)
    if other != got.config:
      return named == sweep.list_configs(_call(got.module.get_configs, other))
  return False


def _call(get_configs: Any, config: Any) -> Any:
  return get_configs() if config is None else get_configs(config)


def _title(module: ModuleType) -> str:
  """Returns the first line of a config file's docstring, without its last sign."""
  return (module.__doc__ or "").strip().partition("\n")[0].rstrip(".:")


def _got(*, several: bool = False) -> _Got:
  """Returns what --config, and its overrides, ask for; `several` as for `_load`."""
  path = flags.FLAGS[_NAME].value
  # A launcher that takes the file as a word cannot require the flag.
  if not path:
    raise UserError("must be given", field=f"--{_NAME}")
  before, module = _load(path, _wanted_class(), f"--{_NAME}", several=several)
  if before is None:
    return _Got(None, module)
  config = before
  texts = {path: str(flags.FLAGS[f"{_NAME}.{path}"].value) for path in _overridden()}
  if flags.FLAGS["audit"].present:
    # Before the fields of the audit that other flags set.
    path = "base.audit" if hasattr(before, "base") else "audit"  # of a sweep
    asked = _audit(before) if flags.FLAGS["audit"].value else "none"
    if texts.setdefault(path, asked) != asked:
      raise UserError(
        f"contradicts --{_NAME}.{path}={texts[path]}; give one of the two",
        field="audit",
        value=flags.FLAGS["audit"].value,
      )
  try:
    config = fields.override_all(before, texts, name=_NAME)
  except UserError as error:
    # A field of the file, which another field's flag made wrong, is no flag.
    field = error.field.removeprefix(f"{_NAME}.")
    raise error.of(field=field or f"--{_NAME}.") from error
  lost = fields.lost(before, config, texts)
  note = ""
  if lost:
    # The flags whose sections held what is lost. A choice may also leave out fields beside it.
    causes = [path for path in texts if any(one.startswith(f"{path}.") for one in lost)]
    given = ", ".join(f"{path}={texts[path]!r:.60}" for path in causes or texts)
    note = f"{given}: takes no {', '.join(lost)}; the file's values are dropped"
  if flags.FLAGS.print_config:
    for line in command_line(config):
      print(line)
    if note:
      writers.note(note)
    sys.exit(0)
  return _Got(config, module, note, before, texts)


def _audit(config: Any) -> str:
  """Returns the name of the only kind of audit that a config has."""
  config = getattr(config, "base", config)  # of a sweep
  choice = choices.choice_at(type(config), "audit")
  if choice is None:
    raise UserError("must be of a config with an audit", field="audit", value=True)
  (kind,) = choice.table.keys() - {"none"}
  return kind


def did_you_mean(word: str) -> str:
  """Returns the end of a message about a flag that is none: the field or the flag that has its
  name, here or in other libraries, or ""."""
  from dpjax.experiments.config import elsewhere  # a mistake alone needs it

  wanted = _wanted_class()
  place = None if wanted is None else fields.place_of(wanted(), word)
  if place is not None:
    return validate.question(f"--{_NAME}.{place[0]}", place[1])
  # Launchers without a config, such as launch.account, have flags for some fields.
  place = elsewhere.find(word, flags.FLAGS)
  if place is not None:
    return validate.question(f"--{place[0]}", place[1])
  ours = elsewhere.name_of(word)
  return "" if ours is None else f"; dpjax calls it {ours!r}, which is not read here"


def command_line(config: Any) -> list[str]:
  """Returns a line for each field: its flag, or a comment if only a file can hold its value."""
  lines = []
  for leaf in choices.leaves(config):
    text = _as_text(leaf.value)
    line = f"--{_NAME}.{leaf.path}={shlex.quote(text)}"
    try:
      # Entries of a list or a dict may be anything, so not all of them can be written.
      is_open = isinstance(leaf.value, (dict, list, tuple))
      read = fields.parse(text, leaf.type.hint, leaf.path) if is_open else leaf.value
    except UserError:
      read = None
    lines.append(line if read == leaf.value else f"# {line}  (in a config file only)")
  return lines


def _as_text(value: Any) -> str:
  """Returns the text of a value in an override such as --config.seed=1."""
  if value is None or isinstance(value, bool):
    return str(value).lower()
  # Python parses 1e999 as infinity, and the word inf as a name.
  return value if isinstance(value, str) else re.sub(r"\binf\b", "1e999", repr(value))


def _choices_here(kind: Kind) -> Any:
  """Returns the defaults of a kind of run, with the choices on the command line of --help."""
  given = [arg.partition("=") for arg in sys.argv[1:] if arg.startswith(_MARKS)]
  texts = {path.lstrip("-").removeprefix(f"{_NAME}."): text for path, _, text in given}
  with contextlib.suppress(UserError):
    return fields.override_all(kind.config_class(), texts)
  return kind.config_class()


def _fields_in_words(config: Any) -> str:
  """Returns lines for each field: its default, its possible values, its help."""
  lines = [
    "fields of the config: --config.FIELD=VALUE, or none for what is optional;",
    "beside a choice, such as --config.privacy=dp_ftrl, --help shows all of its fields",
    "",
  ]
  for row in rules.describe(config):
    values = f"  [{row.values}]" if row.values else ""
    head = f"  {row.path}={row.default!r}{values}"
    lines += textwrap.wrap(head, _WIDTH, subsequent_indent=" " * 6)
    indent = " " * 6
    lines += textwrap.wrap(
      row.help, _WIDTH, initial_indent=indent, subsequent_indent=indent
    )
  return "\n".join(lines)


def load(path: str, kind: type | None, *, name: str = "--config") -> Any:
  """Returns the result of a Python file's `get_config()`. Raises UserError if the file fails, or if
  the result is no well-typed `kind` (None: of any kind of run).

  A file of configs/ that the current directory lacks is read from the installation of dpjax.
  """
  return _load(path, kind, name)[0]


def _load(
  path: str, kind: type | None, name: str, *, several: bool = False
) -> tuple[Any, ModuleType]:
  """Returns (result of a file's `get_config()`, its module).

  Args:
    several: whether the runs of `get_configs()` may be asked for. A file that has no other function
      then has no config: None.
  """
  with validate.about(name, Verbatim(path)):
    module = _module(path)
    get_config = getattr(module, "get_config", None)
    several = several and callable(getattr(module, "get_configs", None))
    if get_config is None and several:
      if _overridden():
        raise UserError("the file has no get_config(), whose fields are flags")
      return None, module
    if not callable(get_config):
      raise UserError("the file must define get_config() or get_configs()")
    config = _guard(get_config, str(module.__file__))
    if kind is None:
      kind = kinds.of(config).config_class
    # What the flags of a sweep change may be of any kind, if its runs are of the wanted one.
    if several:
      sweep = KINDS["sweep"].config_class
      if kind is sweep or isinstance(config, sweep):
        kind = type(config)
    if not isinstance(config, kind):
      type_name = type(config).__name__
      raise UserError(
        f"get_config() returned {type_name}, but this launcher wants {kind.__name__}"
      )
  return fields.check(config, type(config), name), module


def _module(path: str) -> ModuleType:
  """Returns the module of a Python file, which runs now."""
  if not pathlib.PurePath(path).name:
    raise UserError("must name a Python file")
  roots = [pathlib.Path()]
  if pathlib.PurePath(path).parts[:1] == ("configs",):
    roots.append(app.ROOT)
  file = next((root / path for root in roots if (root / path).is_file()), None)
  if file is None:
    files = {file for root in roots for file in (root / path).parent.glob("*.py")}
    near = {str(pathlib.PurePath(path).with_name(file.name)) for file in files}
    raise UserError(f"no such file{validate.did_you_mean(path, near)}")
  spec = importlib.util.spec_from_file_location("_dpjax_config", file)
  if spec is None or spec.loader is None:
    raise UserError("must be a Python file (.py)")
  module = importlib.util.module_from_spec(spec)
  # The module is registered before it runs, since a dataclass in the file looks up its module.
  sys.modules[spec.name] = module
  _guard(spec.loader.exec_module, str(module.__file__), module)
  return module


def _guard(call: Any, path: str, *args: Any) -> Any:
  try:
    return call(*args)
  # A user's file may raise any error. It is reported in one line.
  except (Exception, SystemExit) as error:
    raise UserError(names.reason(error, str(path))) from error


def _overridden() -> list[str]:
  """Returns the dotted paths that the command line (and its flag files) overrides, in
  order."""
  try:
    argv = flags.FLAGS.read_flags_from_files(sys.argv[1:], force_gnu=False)
  # absl reports an unreadable --flagfile later, when it parses the flags.
  except flags.Error:
    return []
  paths = [
    arg[len(mark) :].split("=", 1)[0]
    for arg in argv
    for mark in _MARKS
    if arg.startswith(mark)
  ]
  return list(dict.fromkeys(paths))
