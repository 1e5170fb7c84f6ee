"""Every key of a run from one digest of its config AND its data; the memory of the data.

Why the config: two runs with one seed and, say, two epsilons must not share their noise: from
two sums with the same noise at two scales the exact sums follow. Nor may they share batches:
the cost of both together is the sum of their costs only if they sample independently. Why the
data: the difference of two runs with the same noise on data sets that are one record apart IS
what that record did.

What may be seen. The digest of the data, and whatever follows from it without noise, would
confirm a guess of the data. So it leaves this process in checkpoints alone, which hold the
noise key too and are as secret as the data; the initial parameters depend on the seed alone;
and a ledger names a key by the config, not by the key (`ledger_name`). A run whose seed is
known can be repeated by whoever guesses its data, and compared bit for bit: that is what
reproducible means. What is to be published is trained in release mode, whose keys depend on
nothing at all (`runs/release.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax import names
from dpjax.runs import writers
from dpjax.validate import UserError

DATA = "data_sha256"  # in a checkpoint's meta data


class Keys(NamedTuple):
  """What a seeded run draws from. Fields but `init` are as secret as the data."""

  init: jax.Array  # of the seed alone: public
  first: jax.Array
  second: jax.Array
  sampler: int  # 128 bits
  order: int  # 64 bits of seed and data alone: equal for runs that differ in their config


def config_digest(kind: str, fields: Mapping[str, Any]) -> bytes:
  """32 bytes that name a config and the files of the user's own code that it names: equal for
  equal ones, whatever the order of their dicts and whether a number is written 1 or 1.0. Public.

  Args:
    kind: of run. fields: all that decides what it computes, the seed included.
  """
  own = names.sources(fields)  # edited code is another config
  text = json.dumps([kind, _canonical(fields), *([_canonical(own)] if own else [])])
  return hashlib.sha256(f"dpjax config {text}".encode()).digest()


def _canonical(value: Any) -> Any:
  """JSON data that are equal for values that are."""
  if isinstance(value, Mapping):
    pairs = [[str(name), _canonical(entry)] for name, entry in value.items()]
    return {"mapping": sorted(pairs, key=lambda pair: pair[0])}
  if isinstance(value, (list, tuple)):
    return [_canonical(entry) for entry in value]
  value = value.item() if hasattr(value, "item") else value  # NumPy and JAX scalars
  if isinstance(value, (int, float)):
    return {"number": str(int(value)) if _is_whole(value) else repr(value)}
  return value if value is None or isinstance(value, str) else {"other": repr(value)}


def _is_whole(value: float) -> bool:
  return math.isfinite(value) and value == int(value)


def keys(seed: int, config: bytes, data: bytes) -> Keys:
  """The keys of a run.

  Args:
    config: `config_digest`. data: `dpjax.data.digest` of all that it trains on.
  """
  bound = hashlib.sha256(b"dpjax streams" + config + data).digest()
  key = jax.random.key(seed)
  for word in np.frombuffer(bound[:16], np.uint32):
    key = jax.random.fold_in(key, word)
  first, second = jax.random.split(key)
  of_both = hashlib.sha256(f"dpjax order {seed} ".encode() + data).digest()
  return Keys(
    init=jax.random.key(seed),
    first=first,
    second=second,
    sampler=int.from_bytes(bound[16:], "big"),
    order=int.from_bytes(of_both[:8], "big"),
  )


def joined(*digests: bytes) -> bytes:
  """One digest of several data sets; of one, its own."""
  return digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()


def ledger_name(config: bytes) -> str:
  """What a ledger calls the noise key of a seeded run: its config's name. A fingerprint of
  the key itself would be a test for a guess of the data."""
  return hashlib.sha256(b"dpjax ledger" + config).hexdigest()[:16]


# --- the memory of the data


def to_meta(data: bytes) -> dict[str, str]:
  """The digest of the data, for the meta data of a checkpoint. Never write it elsewhere."""
  return {DATA: data.hex()}


def remembers(meta: Mapping[str, Any] | None) -> bool:
  """Whether a checkpoint knows its data; those of earlier versions do not."""
  return DATA in (meta or {})


def check_data(
  meta: Mapping[str, Any] | None, data: bytes, *, name: str, workdir: Any
) -> None:
  """Raises UserError unless a checkpoint is of these data; None: there is no checkpoint.

  Args:
    name: of the data, for the message. It never holds a digest.
  """
  if meta is None:
    return
  if not remembers(meta):
    raise UserError(
      f"workdir={workdir}: holds a run of an earlier version, which did not remember its "
      "data, so it cannot be gone on with; choose another directory, nothing was changed"
    )
  if meta[DATA] != data.hex():
    raise UserError(
      f"data.name={str(name)!r}: are not the data of the run in workdir={workdir}; bring those "
      "back, or choose another directory, nothing was changed"
    )


def _path(folder: pathlib.Path) -> pathlib.Path:
  return folder / "checkpoints" / "data.json"


def held(folder: pathlib.Path) -> dict[str, str] | None:
  """What `hold` wrote into a folder that has no other checkpoint; None: nothing."""
  return writers.read_json(_path(folder)) if _path(folder).exists() else None


def hold(folder: pathlib.Path, data: bytes) -> None:
  """Remembers the data in a folder whose run keeps no other checkpoint."""
  _path(folder).parent.mkdir(parents=True, exist_ok=True)
  writers.write_json(_path(folder), to_meta(data))
