"""Digests of configs: names that keep two configs from sharing noise and batches.

| version | fields that the digest covers                                | runs       |
| ------- | ------------------------------------------------------------ | ---------- |
| 1       | all, except later fields that keep the earlier behaviour     | up to 0.2  |
| 2       | all                                                          | since then |

A new field needs an entry in `_LATER`, so that published results keep their digest of version 1.
The field changes every digest of version 2. A result states its version as `digest_version`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dpjax import names

# Version of the digest that names the config of every new run.
VERSION = 2
# Fields that locate data on one machine. They are no part of a run's identity, since the digest of
# the data covers the content of the data and of their declaration.
PLACES = ("data_dir", "declaration")
# Sections of a config that may hold the fields `PLACES`.
_OF_DATA = ("data", "train", "federate")


def canonical(value: object, exact: bool = False) -> Any:
  """Converts a value to JSON data. Equal values give equal data, and different values different
  data.

  A field has one type, so 1 and 1.0 count as the same number. With `exact`, as under any key
  "options", True, 1 and 1.0 are three values: a user's model may distinguish their types.

  >>> canonical(1.0) == canonical(1), canonical({"options": 1.0}) == canonical({"options": 1})
  (True, False)
  """
  if isinstance(value, Mapping):
    free = lambda name: exact or "options" in str(name).split(".")
    pairs = [[str(name), canonical(entry, free(name))] for name, entry in value.items()]
    return {"mapping": sorted(pairs, key=lambda pair: pair[0])}
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


def of_config(kind: str, fields: Mapping[str, Any]) -> bytes:
  """Returns the digest of a config in the current version.

  Args:
    kind: kind of run.
    fields: all fields that determine the result of the run, the seed included.

  >>> of_config("central", {"a": 1, "b": 2}) == of_config("central", {"b": 2.0, "a": 1})
  True
  """
  return VERSIONS[VERSION](kind, fields)


def digest_v2(kind: str, fields: Mapping[str, Any]) -> bytes:
  """Returns 32 bytes that identify a config and the files that it names.

  The bytes depend neither on the order of dicts (`canonical`) nor on the code of dpjax.

  Args:
    kind: kind of run.
    fields: all fields that determine the result of the run, the seed included.
  """
  # The version is part of the hashed text, so no config has the same digest in both versions.
  text = json.dumps([2, kind, canonical(fields), canonical(names.sources(fields))])
  return hashlib.sha256(f"dpjax config {text}".encode()).digest()


def without_places(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config's fields without `PLACES`, which locate its data: a run stays the same if its
  data move.

  Args:
    fields: fields of a config, as `config.fields.to_dict` gives them.

  >>> without_places({"seed": 1, "data": {"name": "digits", "data_dir": "/tmp"}})
  {'seed': 1, 'data': {'name': 'digits'}}
  """
  return {
    name: without_places(entry)
    if name in _OF_DATA and isinstance(entry, Mapping)
    else entry
    for name, entry in fields.items()
    if name not in PLACES
  }


# --- version 1, for results published earlier


# Fields that were added after version 1, in any section, with the value that means the earlier
# behaviour.
_LATER: dict[str, Any] = {
  "normalization": {"name": "per_example"},
  "mirrored": False,
  "colours": "rgb",
  "least_squares": {
    "feature_norm": 1.0,
    "unit_rows": True,
    "moment_weight": 1.0,
    "ridge": 0.3,
    "directions": None,
  },
  "trainable": {"name": "all"},
  "scaling": {"name": "none"},
  "pool_is_public": False,
  "safetensors": False,
  "pretrained": None,
  "client_state": "memory",
  "writer": None,
  "num_examples": None,
  "num_users": None,
  "declaration": None,
  "neighboring_relation": "",
  "line_search": False,
  "num_selected": None,
  "queries": 1,
  "attacker": dict.fromkeys(("tpr", "fpr", "advantage", "mu", "bayes_risk", "prior")),
}
# Fields that one kind of run got after version 1, by kind and dotted name, with the value that
# means the earlier behaviour.
_LATER_OF: dict[str, dict[str, Any]] = {
  "central": {"loss": "auto"},
  "federated": {"loss": "auto", "secure_sum": {"name": "none"}},
  "synthesis": {"method": {"name": "kernel_mean"}},
  # This entry is for attacks only: central runs had a memory budget already in version 1.
  "attack": {"federate.memory_budget_gb": None},
  "relevance": {"adlm.loss_noise": True},
}
# Values that version 1 wrote for the fields of a disabled audit, by the current kind of the audit.
_AUDITS_OFF: dict[Any, dict[str, Any]] = {
  "gradient": {
    "num_canaries": 1000,
    "kind": "mislabelled",
    "score": "loss",
    "method": "one_run",
  },
  "direction": {"method": "one_run"},
  "auto": {"num_canaries": 50, "kind": "direction", "method": "one_run"},
}


def digest_v1(kind: str, fields: Mapping[str, Any]) -> bytes:
  """Returns the digest of a config by the rule of dpjax up to 0.2. The arguments are those of
  `digest_v2`."""
  sources = names.sources(fields)
  later = _LATER_OF.get(kind, {})
  before = _before(fields, later)
  # In version 1, the text of a config that names no file has no entry for files.
  of_files = [canonical(sources)] if sources else []
  text = json.dumps([kind, canonical(before), *of_files])
  return hashlib.sha256(f"dpjax config {text}".encode()).digest()


def _before(
  fields: Mapping[str, Any], later: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
  """Returns a config's fields as version 1 would have written them.

  Fields of `_LATER` and `later` are left out if they have the value of the earlier behaviour. A
  disabled audit gets the values that version 1 wrote.
  """
  kept = {}
  for name, entry in fields.items():
    path = prefix + name
    if any(
      key in old and entry == old[key] for key, old in ((name, _LATER), (path, later))
    ):
      continue
    if name == "audit" and isinstance(entry, Mapping) and not entry["enabled"]:
      entry = {**entry, **_AUDITS_OFF.get(entry.get("kind"), {})}
    # Options are not searched: a user's model may have options with any of these names.
    nested = isinstance(entry, Mapping) and name != "options"
    kept[name] = _before(entry, later, f"{path}.") if nested else entry
  return kept


VERSIONS: dict[int, Callable[[str, Mapping[str, Any]], bytes]] = {
  1: digest_v1,
  2: digest_v2,
}
