"""Keys of a run, derived from its config AND its data; and the stored record of the data.

Keys depend on the config, because two runs with one seed and two epsilons must not share their
noise: two sums with the same noise at two scales reveal the exact sums. The runs must not share
batches either: their costs add up only if they sample independently. Keys depend on the data,
because two runs with the same noise on neighbouring data sets differ by exactly the effect of one
record.

The digest of the data, and any value that follows from it without noise, would confirm a guess of
the data. So the digest leaves this process only in checkpoints, which also hold the noise key and
are as secret as the data. The initial parameters depend on the seed alone. The ledger of a seeded
run names the noise key by the config alone (`ledger_name`). Anyone who knows a run's seed and
guesses its data can repeat the run, and compare bit for bit. So train models that you publish in
release mode, in which keys come from the operating system (`fresh`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax import names, noise, run_code
from dpjax.experiments.config import fields as schema_fields
from dpjax.experiments.run import config_names
from dpjax.types import Config
from dpjax.validate import UserError

# Names of entries in the JSON data that a run stores in its checkpoints (`to_meta`).
_DATA = "data_sha256"
_RELEASE_KEYS = "release_streams"
_USER_CODE = "user_code"
_RUN = "run_id"
CODE = "code"
_INPUTS = "code_inputs"
_KEYS = ("noise", "local")
_NUMBERS = ("sampler", "order")
_SAMPLER_BITS = 256
_ORDER_BITS = 64


class RunKeys(NamedTuple):
  """Every source of randomness of a run. All except `init` are as secret as the data."""

  init: jax.Array  # for the initial parameters; public, since it depends on the seed alone
  noise: jax.Array
  local: jax.Array  # for random draws inside one example or one client
  sampler: int  # 128 bits, in release mode 256
  # 64 bits. Outside of release mode they follow from seed and data alone, so runs that differ in
  # other fields of their config have the same order.
  order: int


def config_digest(kind: str, fields: Mapping[str, Any]) -> bytes:
  """Returns 32 public bytes that identify a config and the code that carries it out
  (`dpjax.run_code`).

  Edited code, of the user or of dpjax, and another version of JAX give another digest, and so other
  noise. With the same noise, the difference of two runs would be that of their exact sums.

  Args:
    kind: kind of run.
    fields: all fields that decide what the run computes, the seed included.
  """
  named = config_names.of_config(kind, fields)
  return hashlib.sha256(
    b"dpjax config and code" + named + names.code(fields).digest()
  ).digest()


def code_of(config: Config) -> run_code.Code:
  """Returns the user's code to which the fields of a config refer. If the type of the config is the
  user's own, this includes that type and the module `build` beside it.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> code_of(TrainConfig()).modules
  {}
  """
  return names.code(schema_fields.to_dict(config), _types(config))


def digest_of(config: Config, digest: bytes) -> bytes:
  """Returns a `config_digest`, extended by the code of the kind of run if it is user-defined."""
  kind = run_code.of(_types(config))
  return hashlib.sha256(digest + kind.digest()).digest() if kind.modules else digest


def _types(value: Any) -> list[Any]:
  """Returns the user's types of a config and its values, and the modules that build their runs."""
  type_list: list[Any] = []
  if isinstance(value, (list, tuple)):
    return [each for part in value for each in _types(part)]
  if isinstance(value, Mapping):
    return [each for part in value.values() for each in _types(part)]
  if not dataclasses.is_dataclass(value):
    return type_list
  home = type(value).__module__
  if home.partition(".")[0] != "dpjax":
    package = home.rpartition(".")[0]
    build = f"{package}.build" if package else "build"
    type_list += [type(value), *([build] if build in sys.modules else [])]
  for field in dataclasses.fields(value):
    type_list += _types(getattr(value, field.name))
  return type_list


def derived(seed: int, config: bytes, data: bytes) -> RunKeys:
  """Returns the keys of a repeatable run.

  Args:
    config: `config_digest` of the run.
    data: digest of the run's training data, from `dpjax.data.digest` or `bound_data`.
  """
  bound = hashlib.sha256(b"dpjax streams" + config + data).digest()
  # One half of the digest determines the keys, and the other half the sampler, so keys and sampler
  # are independent.
  key = jax.random.key(seed)
  for word in np.frombuffer(bound[:16], np.uint32):
    key = jax.random.fold_in(key, word)
  first, second = jax.random.split(key)
  # `order` depends on seed and data alone: runs that differ in other fields have the same order.
  of_both = hashlib.sha256(f"dpjax order {seed} ".encode() + data).digest()
  return RunKeys(
    init=jax.random.key(seed),
    noise=first,
    local=second,
    sampler=int.from_bytes(bound[16:], "big"),
    order=int.from_bytes(of_both[:8], "big"),
  )


def fresh(seed: int) -> RunKeys:
  """Returns the keys of a release, drawn from the operating system.

  Only the initial parameters depend on the seed. The keys exist only in the run's checkpoints, so a
  published config reveals nothing about them.
  """
  return RunKeys(
    init=jax.random.key(seed),
    noise=noise.new_key(release=True),
    local=noise.new_key(release=True),
    sampler=secrets.randbits(_SAMPLER_BITS),
    order=secrets.randbits(_ORDER_BITS),
  )


def joined(*digests: bytes) -> bytes:
  """Joins the digests of several data sets; a single digest is returned unchanged."""
  return digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()


def bound_data(data: bytes, code: run_code.Code) -> bytes:
  """Joins the digest of a run's data with a digest of its code's inputs.

  The inputs are files and values that the code read or computed on import.

  These files and values may follow from the data, so the result is as secret as the data. Without
  them, `data` is returned unchanged.

  >>> bound_data(b"data", run_code.Code({}, {}))
  b'data'
  """
  inputs = code.secret_digest()
  return joined(data, inputs) if inputs else data


def run_id(config: bytes, data: bytes, random: RunKeys) -> str:
  """Returns a name for one run, from everything that determines the run. It is as secret as the
  data."""
  # The key distinguishes two releases of one config on one data set.
  key = np.asarray(jax.random.key_data(random.noise)).tobytes()
  return hashlib.sha256(b"dpjax run" + config + data + key).hexdigest()


def ledger_name(config: bytes) -> str:
  """Returns the name of the noise key in the ledger of a seeded run, from the config alone.

  A fingerprint of the key would confirm a guess of the data, from which the key is derived.
  """
  return hashlib.sha256(b"dpjax ledger" + config).hexdigest()[:16]


# --- data that a run stores, in its checkpoints alone


def to_meta(
  data: bytes,
  released: RunKeys | None = None,
  user_code: Mapping[str, Mapping[str, str]] | None = None,
  run: str = "",
  code: run_code.Code | None = None,
) -> dict[str, Any]:
  """Returns the JSON data that a run must store before any computation, only in its checkpoints.

  Args:
    data: digest of the run's data.
    released: keys of a release, which cannot be derived again.
    user_code: code files that the config names, from `names.sources`.
    run: name of the run, from `run_id`.
    code: all code of the run, from `names.code`.
  """
  meta: dict[str, Any] = {_DATA: data.hex()} | (
    {_USER_CODE: user_code} if user_code else {}
  )
  meta |= {CODE: code.to_json()} if code is not None else {}
  meta |= {_INPUTS: {**code.inputs}} if code is not None and code.inputs else {}
  meta |= {_RUN: run} if run else {}
  if released is None:
    return meta
  word = lambda key: np.asarray(jax.random.key_data(key)).tobytes().hex()
  keys = {name: word(getattr(released, name)) for name in _KEYS}
  numbers = {name: f"{getattr(released, name):x}" for name in _NUMBERS}
  return meta | {_RELEASE_KEYS: keys | numbers}


def without_keys(meta: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the part of `meta` that a finished run keeps: the identity of its data and code."""
  # A finished run makes no random draws, so its keys need not be kept.
  return {name: value for name, value in meta.items() if name not in (_RELEASE_KEYS, _RUN)}


def from_meta(seed: int, meta: Mapping[str, Any]) -> RunKeys:
  """Returns the keys of a release that `to_meta` stored.

  Raises:
    UserError: `meta` holds no keys of a release.
  """
  held = meta.get(_RELEASE_KEYS, {})
  if {*held} != {*_KEYS, *_NUMBERS}:
    raise UserError(
      "holds no release keys, so it cannot be gone on from", field="checkpoint"
    )
  values: dict[str, Any] = {name: int(held[name], 16) for name in _NUMBERS}
  for name in _KEYS:
    values[name] = noise.source.key_from_bytes(bytes.fromhex(held[name]))
  return RunKeys(init=jax.random.key(seed), **values)


def check_run(meta: Mapping[str, Any] | None, run: str, *, workdir: object) -> None:
  """Raises UserError if the stored `run_id` names another run, for example after a folder of
  checkpoints was moved."""
  if meta and meta.get(_RUN, run) != run:
    raise UserError(
      "its checkpoints are those of another run; bring its own back, or choose "
      "another directory, nothing was changed",
      field="workdir",
      value=workdir,
    )


def data_of(meta: Mapping[str, Any]) -> bytes | None:
  """Returns the stored digest of the data, or None. Never write the digest to another place."""
  held = meta.get(_DATA)
  return bytes.fromhex(held) if isinstance(held, str) else None


def check_data(
  meta: Mapping[str, Any] | None, data: bytes, *, name: str, workdir: object
) -> None:
  """Raises UserError unless a run was begun with these data.

  Args:
    meta: result of `to_meta`. None: the run has not begun, so any data are accepted.
    data: digest of the data.
    name: name of the data, for the message, which never shows a digest.
  """
  if meta is None:
    return
  if _DATA not in meta:
    raise UserError(
      "holds a run of an earlier version, which did not remember its data, so it "
      "cannot be gone on with; choose another directory, nothing was changed",
      field="workdir",
      value=workdir,
    )
  if meta[_DATA] != data.hex():
    raise UserError(
      f"are not the data of the run in workdir={workdir}; bring those back, or "
      "choose another directory, nothing was changed",
      field="data.name",
      value=str(name),
    )


def check_code(
  meta: Mapping[str, Any] | None,
  user_code: Mapping[str, Any],
  code: run_code.Code,
  *,
  workdir: object,
  done: bool = False,
) -> None:
  """Raises UserError unless a run was begun with this code. A resume with other code would give two
  different steps the same noise.

  Args:
    meta: result of `to_meta`, or a run's result. None: the run has not begun, so any code is
      accepted.
    user_code: code files that the config names, from `names.sources`.
    code: all code of the run, from `names.code`.
    done: whether the run has ended, so that no more noise is drawn. Then other versions of dpjax
      and of packages are accepted, and so is a result without a record of its code.
  """
  if meta is None:
    return
  before = meta.get(_USER_CODE) or {}
  changed = [
    field for field in {**before, **user_code} if before.get(field) != user_code.get(field)
  ]
  if changed:
    raise UserError(
      f"its code is not that of the run in workdir={workdir}; bring that back, "
      "or choose another directory, nothing was changed",
      field=changed[0],
      value=user_code.get(changed[0], {}).get("path"),
    )
  held = meta.get(CODE)
  # Digests of the code's inputs are compared only with checkpoints: a result never contains them.
  if _DATA in meta:
    run_code.check_inputs(meta.get(_INPUTS), code, workdir=workdir)
  if done:
    if held is not None:
      before = {"modules": held["modules"]}
      run_code.check_same(before, code._replace(versions={}), workdir=workdir)
    return
  run_code.check_same(held, code, workdir=workdir)
