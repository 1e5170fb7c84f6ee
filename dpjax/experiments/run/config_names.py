"""Digests of configs, and the canonical form in which two configs are compared."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from dpjax.experiments.config import choices
from dpjax.types import Config

# Fields that locate data on one machine. They are no part of a run's identity, since the digest of
# the data covers the content of the data and of their declaration.
PLACES = ("data_dir", "declaration")
# Sections of a config that may hold the fields `PLACES`.
_OF_DATA = ("data", "train", "target", "task")


def canonical(value: object, exact: bool = False) -> Any:
  """Converts a value to JSON data. Equal values give equal data, and different values different
  data.

  A field has one type, so 1 and 1.0 count as the same number. With `exact`, as under any key
  "options", True, 1 and 1.0 are three values: a user's model may distinguish their types.

  >>> canonical(1.0) == canonical(1), canonical({"options": 1.0}) == canonical({"options": 1})
  (True, False)
  """
  if isinstance(value, Mapping):
    pairs = []
    for name in sorted(value, key=str):
      free = exact or "options" in str(name).split(".")
      pairs.append([str(name), canonical(value[name], free)])
    return {"mapping": pairs}
  if isinstance(value, (list, tuple)):
    return [canonical(entry, exact) for entry in value]
  if isinstance(value, (np.generic, np.ndarray, jax.Array)) and value.ndim == 0:
    value = value.item()
  if exact and isinstance(value, bool):
    return {"boolean": str(value)}
  if isinstance(value, (int, float)):
    whole = isinstance(value, int) or (math.isfinite(value) and value == int(value))
    kind = "float" if exact and whole and isinstance(value, float) else "number"
    return {kind: str(int(value)) if whole else repr(value)}
  return value if value is None or isinstance(value, str) else {"other": repr(value)}


def digest(
  config: Config, without: Iterable[str] = (), *, held: Mapping[str, Any] | None = None
) -> bytes:
  """Returns 32 public bytes that identify a config: the name of its type and all its fields.

  Fields that do not change a run's identity are left out: those that `where` of its type names,
  such as devices, those in `without`, and `PLACES`. `held` are the config's fields as a run wrote
  them, if they are not those of now.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> digest(TrainConfig(seed=1)) == digest(TrainConfig()), len(digest(TrainConfig()))
  (False, 32)
  """
  apart = {*getattr(config, "where", ()), *without, *PLACES}
  held = choices.to_dict(config) if held is None else held
  text = json.dumps([type(config).__name__, canonical(_without(held, apart))])
  return hashlib.sha256(f"dpjax config {text}".encode()).digest()


def _without(held: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
  """Returns the fields without those of `names`, and sections of data without `PLACES`."""
  kept = {}
  for name, entry in held.items():
    if name not in names:
      is_of_data = name in _OF_DATA and isinstance(entry, Mapping)
      kept[name] = _without(entry, PLACES) if is_of_data else entry
  return kept
