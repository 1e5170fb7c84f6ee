"""Keys of a run, and the stored record of its keys and its data.

A private run draws its keys from the operating system when its folder is made. They are in the
checkpoints' secrets before their first use, so that a run which resumes goes on with the same noise
and the same batches. Two runs share no noise, whatever their configs, data and code are: the
difference of two sums with one noise would be that of the exact sums.

| run                                      | noise, sampling, draws inside examples follow from    |
| ---------------------------------------- | ----------------------------------------------------- |
| private                                  | the operating system: 128 bits for each key           |
| private, with `release`                  | the operating system: 256 bits, for ChaCha20          |
| private, with `noise_seed`               | `noise_seed` and `seed`; the guarantee is a claim     |
| without privacy (method "sgd" or "none") | `seed`, so that two algorithms meet the same cohorts  |

The first parameters, public partitions and public orders follow from `seed` in every run.

The digest of the data, and any value that follows from it without noise, would confirm a guess of
the data. So the digest leaves this process only in checkpoints, which also hold the noise key and
are as secret as the data.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import noise
from dpjax.validate import UserError

# The generator of ordinary keys: JAX's own Threefry with keys of 128 bits.
_IMPL = "threefry4x32"
_KEY_BYTES = 16
_RELEASE = "chacha20"
SAMPLER_BITS = 256
_ORDER_BYTES = 8
# Names of entries in the JSON data that a run stores in its checkpoints (`to_meta`).
_DATA = "data_sha256"
_WEIGHTS = "weights_sha256"
_KEYS = "keys"
_RUN = "run_id"


class RunKeys(NamedTuple):
  """Every source of randomness of a run. `noise`, `local` and `sampler` are as secret as the data,
  unless they follow from a seed."""

  init: jax.Array  # for the initial parameters; public, since it depends on the seed alone
  noise: jax.Array
  local: jax.Array  # for random draws inside one example or one client
  sampler: int  # 256 bits: which records or clients take part
  order: int  # 64 bits that depend on the seed alone: public orders and halves


def drawn(
  seed: int,
  *,
  private: bool = True,
  noise_seed: int | None = None,
  release: bool = False,
) -> RunKeys:
  """Returns the keys of a new run; see the table of this module.

  Args:
    seed: seed of the first parameters and of public orders; without privacy, of everything.
    private: whether the run has a guarantee, which needs secret keys.
    noise_seed: seed of the noise and the sampling; None: a private run draws from the operating
      system.
    release: whether the noise keys are those of a release.

  >>> one, other = drawn(0), drawn(0)
  >>> bool(one.init == other.init), one.order == other.order, one.sampler == other.sampler
  (True, True, False)
  >>> drawn(0, noise_seed=1).sampler == drawn(0, noise_seed=1).sampler
  True
  """
  if private and noise_seed is None:
    draw = lambda purpose, size: secrets.token_bytes(size)
  else:
    draw = lambda purpose, size: _bytes(purpose, size, seed, noise_seed)

  def key(purpose: str) -> jax.Array:
    if release:
      return noise.source.key_from_bytes(draw(purpose, noise.source.KEY_BYTES))
    return _wrapped(draw(purpose, _KEY_BYTES), _IMPL)

  return RunKeys(
    init=jax.random.key(seed),
    noise=key("noise"),
    local=key("local"),
    sampler=int.from_bytes(draw("sampler", SAMPLER_BITS // 8), "big"),
    order=int.from_bytes(_bytes("order", _ORDER_BYTES, seed, None), "big"),
  )


def _bytes(purpose: str, size: int, seed: int, noise_seed: int | None) -> bytes:
  """Returns bytes that follow from seeds; another purpose has other bytes."""
  text = f"dpjax keys {purpose} {seed} {noise_seed}"
  return hashlib.sha256(text.encode()).digest()[:size]


def _wrapped(words: bytes, impl: Any) -> jax.Array:
  return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(words, np.uint32)), impl=impl)


def to_json(random: RunKeys) -> dict[str, Any]:
  """Returns keys as JSON data, with the name of their generator. They are as secret as the keys."""
  held: dict[str, Any] = {}
  for name, value in random._asdict().items():
    if isinstance(value, int):
      held[name] = f"{value:x}"
      continue
    impl = _RELEASE if noise.source.is_secure(value) else str(jax.random.key_impl(value))
    words = np.asarray(jax.random.key_data(value)).tobytes().hex()
    held[name] = {"impl": impl, "words": words}
  return held


def from_json(held: Mapping[str, Any]) -> RunKeys:
  """Inverts `to_json`.

  >>> random = drawn(0)
  >>> from_json(to_json(random)) == random
  True
  """

  def key(name: str) -> jax.Array:
    value = held[name]
    words = bytes.fromhex(value["words"])
    if value["impl"] == _RELEASE:
      return noise.source.key_from_bytes(words)
    return _wrapped(words, value["impl"])

  return RunKeys(
    init=key("init"),
    noise=key("noise"),
    local=key("local"),
    sampler=int(held["sampler"], 16),
    order=int(held["order"], 16),
  )


def joined(*digests: bytes) -> bytes:
  """Joins the digests of several data sets; a single digest is returned unchanged."""
  return digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()


def run_id(config: bytes, data: bytes, random: RunKeys) -> str:
  """Returns a name for one run, from everything that determines the run. It is as secret as the
  data."""
  # The key distinguishes two runs of one config on one data set.
  key = np.asarray(jax.random.key_data(random.noise)).tobytes()
  return hashlib.sha256(b"dpjax run" + config + data + key).hexdigest()


# --- data that a run stores, in its checkpoints alone


def to_meta(
  data: bytes,
  random: RunKeys | None = None,
  *,
  weights: Mapping[str, str] | None = None,
  run: str = "",
) -> dict[str, Any]:
  """Returns the JSON data that a run must store before any computation, only in its checkpoints.

  Args:
    data: digest of the run's data.
    random: keys of the run; None: it makes no draw any more.
    weights: SHA-256 of each file of weights that the config names, by field.
    run: name of the run, from `run_id`.
  """
  meta: dict[str, Any] = {_DATA: data.hex()}
  meta |= {_WEIGHTS: {**weights}} if weights else {}
  meta |= {_RUN: run} if run else {}
  return meta | ({_KEYS: to_json(random)} if random is not None else {})


def without_keys(meta: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the part of `meta` that a finished run keeps: the identity of its data."""
  # A finished run makes no random draws, so its keys need not be kept.
  return {name: value for name, value in meta.items() if name not in (_KEYS, _RUN)}


def from_meta(meta: Mapping[str, Any]) -> RunKeys:
  """Returns the keys that `to_meta` stored.

  Raises:
    UserError: `meta` holds no keys, or damaged ones.
  """
  try:
    return from_json(meta[_KEYS])
  except (KeyError, TypeError, ValueError, AttributeError) as error:
    raise UserError(
      "holds no keys of a run, so it cannot be gone on from", field="checkpoint"
    ) from error


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
      "holds a run whose keys and whose record of its data are gone "
      "(checkpoints/run.json), so it cannot be gone on with; bring that file back, or choose "
      "another directory, nothing was changed",
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


def check_weights(
  meta: Mapping[str, Any] | None, weights: Mapping[str, str], *, workdir: object
) -> None:
  """Raises UserError, which names the field, unless a run was begun with these files of weights.

  Args:
    meta: result of `to_meta`. None: the run has not begun, so any weights are accepted.
    weights: SHA-256 of each file, by field.
  """
  held = weights if meta is None else meta.get(_WEIGHTS, {})
  for field in sorted({*held, *weights}):
    if held.get(field) != weights.get(field):
      raise UserError(
        f"is not the file that the run in workdir={workdir} was begun with; bring that back, or "
        "choose another directory, nothing was changed",
        field=field,
      )
