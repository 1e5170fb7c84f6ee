"""The one place where an error about an argument becomes one about a field of the config.

The library names the argument that its caller wrote. A user of a config wrote a field, so what
carries out a config does so inside `naming(config)`. A field has the name of the argument that it
gives; where it has another one, its annotation carries `Gives`:

  memory_budget_gb: Annotated[float | None, rules.POSITIVE, Gives("memory_budget")] = None
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config.choices import leaves
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True)
class Gives:
  """Metadata in a field's annotation: the argument that the field gives, under another name."""

  argument: str


@contextlib.contextmanager
def naming(config: Any) -> Iterator[None]:
  """Makes errors in the block name the fields of a config; of no dataclass, it changes nothing.

  >>> from dpjax.experiments.kinds.central.config import DpSgd, TrainConfig
  >>> with naming(TrainConfig(privacy=DpSgd(delta=2.0))):
  ...   raise UserError("must be in (0, 1)", field="delta", value=2.0)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: privacy.delta=2.0: must be in (0, 1)
  """
  try:
    yield
  except UserError as error:
    named = _rename(error, config) if dataclasses.is_dataclass(config) else error
    # An unchanged error, raised from itself, would be its own cause.
    if named.field == error.field:
      raise
    raise named from error


def _rename(error: UserError, config: Any) -> UserError:
  """Returns the error about the field that gives its argument; unchanged if that is not sure."""
  every = list(leaves(config))
  # What is inside a value, such as an item of a list, is of the value's field.
  inside = f"{error.field}.".replace("[", ".")
  if "." in error.field and any(inside.startswith(f"{leaf.path}.") for leaf in every):
    return error
  argument = error.field.rpartition(".")[2]
  whole, _, index = argument.partition("[")
  alike = [leaf for leaf in every if leaf.path.rpartition(".")[2] == whole]
  # What a dict holds, such as model.options, is no leaf of the config.
  keyed = [
    f"{leaf.path}.{argument}"
    for leaf in every
    if isinstance(leaf.value, dict)
    and whole in leaf.value
    and (index or error.is_about(error.field, leaf.value[whole]))
  ]
  if not alike and len(keyed) == 1:
    return error.of(field=keyed[0])
  if index:
    holding = [leaf for leaf in alike if isinstance(leaf.value, list | tuple)]
    return error.of(field=f"{holding[0].path}[{index}") if len(holding) == 1 else error
  # The argument is made of a choice, so it has another value than the choice's name.
  giving = [leaf for leaf in alike if leaf.type.choice]
  giving += [leaf for leaf in every if Gives(error.field) in leaf.type.attached]
  # Of several fields with the argument's name, the one with its value is meant.
  for fields in (giving, alike):
    equal = [leaf.path for leaf in fields if error.is_about(error.field, leaf.value)]
    if len(equal) == 1:
      return error.of(field=equal[0])
  # Code for all kinds says `privacy.epsilon_budget`, but some configs have no sections.
  if any(leaf.path == argument for leaf in alike):
    return error.of(field=argument)
  if len(giving) == 1:
    return error.of(field=giving[0].path, value=giving[0].value)
  sections = {leaf.path.rpartition(".")[0] for leaf in every}
  meant = [path for path in sections if path.rpartition(".")[2] == error.field]
  return error.of(field=meant[0]) if len(meant) == 1 else error


@contextlib.contextmanager
def within(section: str, *, of: Any = None, holds_config: bool = False) -> Iterator[None]:
  """Puts the name of a section of the config before each field that an error names; of a section
  that is a whole config, into its flags, too.

  Args:
    section: dotted name of the section.
    of: dataclass of the section; errors about no field of it are left alone. None: about any.
    holds_config: whether the section is a whole config.

  >>> with within("train"):
  ...   raise UserError("must be >= 0", field="seed", value=-1)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: train.seed=-1: must be >= 0
  """
  try:
    yield
  except UserError as error:
    known = None if of is None else {field.name for field in dataclasses.fields(of)}
    if known is not None and error.field.partition(".")[0] not in known:
      raise
    raise error.within(section, holds_config=holds_config) from error
