"""Digests of configs, and what makes two configs different."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from dpjax.experiments.config import choices
from dpjax.experiments.run import writers
from dpjax.types import Config
from dpjax.validate import NO_VALUE

# Fields that locate data on one machine. They are no part of a run's identity, since the digest of
# the data covers the content of the data and of their declaration.
PLACES = ("data_dir", "declaration")
# Sections of a config that may hold the fields `PLACES`.
_OF_DATA = ("data", "train", "target", "task")


def differences(
  there: object, now: object, path: tuple[str, ...] = ("config",)
) -> Iterator[str]:
  """Yields a line for each entry that differs in the JSON data of two configs.

  A field has one type, so 1 and 1.0 count as the same number. Under any key "options", True, 1 and
  1.0 are three values: a user's model may distinguish their types.

  >>> list(differences({"seed": 1, "data": {"limit": 3}}, {"seed": 1.0, "data": {"limit": 4}}))
  ['config.data.limit: 3 there, 4 now']
  """
  if isinstance(there, dict) and isinstance(now, dict):
    for name in sorted({*there, *now}):
      one, other = (data.get(name, NO_VALUE) for data in (there, now))
      yield from differences(one, other, (*path, name))
  elif there != now or ("options" in path and _typed(there) != _typed(now)):
    yield f"{'.'.join(path)[:87]}: {_short(there)} there, {_short(now)} now"


def _typed(value: object) -> str:
  return json.dumps(value, sort_keys=True)


def _short(value: object) -> str:
  """Returns a value as text of at most 60 characters."""
  text = "nothing" if value is NO_VALUE else repr(value)
  return text if len(text) <= 60 else f"{text[:57]}..."


def identity(
  kind: type, held: Mapping[str, Any], without: Iterable[str] = ()
) -> dict[str, Any]:
  """Returns the fields of a config, as plain data, that make it another run.

  Left out are those that `where` of its type names, such as devices, those in `without`, and
  `PLACES`, in sections of data, too.

  Args:
    kind: type of the config.
  """
  return _without(held, {*getattr(kind, "where", ()), *without, *PLACES})


def digest(config: Config, without: Iterable[str] = ()) -> str:
  """Returns a public SHA-256 of the name of a config's type and its `identity`.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> digest(TrainConfig(seed=1)) == digest(TrainConfig()), len(digest(TrainConfig()))
  (False, 64)
  """
  kind = type(config)
  return writers.digest([kind.__name__, identity(kind, choices.to_dict(config), without)])


def _without(held: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
  kept = {}
  for name, entry in held.items():
    if name not in names:
      is_of_data = name in _OF_DATA and isinstance(entry, Mapping)
      kept[name] = _without(entry, PLACES) if is_of_data else entry
  return kept
