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

from dpjax.noise import source
from dpjax.sampling.draws import generator
from dpjax.validate import UserError

SAMPLER_BITS = 256
_ORDER_BITS = 64
# Names of entries in the JSON data that a run stores in its checkpoints (`to_meta`).
_DATA = "data_sha256"
WEIGHTS = "weights_sha256"
_KEYS = "keys"
_DRAWS = "draws"
RUN = "run_id"


class RunKeys(NamedTuple):
  """Every source of randomness of a run. `noise`, `local` and `sampler` are as secret as the data,
  unless they follow from a seed."""

  init: jax.Array  # for the initial parameters; public, since it depends on the seed alone
  noise: jax.Array
  local: jax.Array  # for random draws inside one example or one client
  sampler: int  # 256 bits: which records or clients take part
  order: int  # 64 bits that depend on the seed alone: public orders and halves


def draw(
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

  >>> one, other = draw(0), draw(0)
  >>> bool(one.init == other.init), one.order == other.order, one.sampler == other.sampler
  (True, True, False)
  >>> draw(0, noise_seed=1).sampler == draw(0, noise_seed=1).sampler
  True
  """
  # A seed of NumPy's has another repr than the equal int.
  seeds = int(seed), None if noise_seed is None else int(noise_seed)
  size = source.KEY_BYTES if release else source.ORDINARY_BYTES
  held = {}
  for purpose, count in (("noise", size), ("local", size), ("sampler", SAMPLER_BITS // 8)):
    is_secret = private and noise_seed is None
    found = secrets.token_bytes(count) if is_secret else _bytes(purpose, count, *seeds)
    held[purpose] = found.hex()
  return from_json(seed, held)


def _bytes(purpose: str, size: int, *seeds: int | None) -> bytes:
  """Returns bytes that follow from seeds; another purpose has other bytes."""
  return hashlib.sha256(f"dpjax keys {purpose} {seeds}".encode()).digest()[:size]


def to_json(random: RunKeys) -> dict[str, str]:
  """Returns the secret part of keys as JSON data."""
  held = {"sampler": random.sampler.to_bytes(SAMPLER_BITS // 8, "big").hex()}
  for name in ("noise", "local"):
    words = jax.random.key_data(getattr(random, name))
    held[name] = np.asarray(words).tobytes().hex()
  return held


def from_json(seed: int, held: Mapping[str, str]) -> RunKeys:
  """Inverts `to_json`. The length of a noise key says its generator.

  >>> random = draw(0)
  >>> from_json(0, to_json(random)) == random
  True
  """
  return RunKeys(
    init=jax.random.key(seed),
    noise=source.key_from_bytes(bytes.fromhex(held["noise"])),
    local=source.key_from_bytes(bytes.fromhex(held["local"])),
    sampler=int.from_bytes(bytes.fromhex(held["sampler"]), "big"),
    order=int.from_bytes(_bytes("order", _ORDER_BITS // 8, int(seed)), "big"),
  )


def _draws_here(random: RunKeys) -> str:
  """Returns a digest of what this process draws under fixed keys of the kinds of a run's.

  Libraries and flags decide it, such as another version of NumPy, jax_default_prng_impl or
  jax_enable_x64. No device does, since it covers integers, and floats that are bits of them.
  """

  # One program, since every run begins with it: JAX keeps it as a whole for later ones.
  @jax.jit
  def of_jax(*keys: jax.Array) -> list[jax.Array]:
    # Steps and examples have keys of their own.
    own = [jax.random.fold_in(jax.random.split(key)[1], 1) for key in keys[:2]]
    return [
      *(jax.random.bits(key, (3,)) for key in own),
      # Augmentation and rounded messages draw so: under keys of any kind, of which one will do.
      jax.random.uniform(keys[2], (3,)),
      jax.random.randint(keys[2], (3,), 0, 9),
    ]

  found: list[Any] = [str(jax.dtypes.canonicalize_dtype(np.float64))]
  fixed = []
  for key in (random.init, random.noise):
    words = jnp.zeros_like(jax.random.key_data(key))
    fixed.append(jax.random.wrap_key_data(words, impl=jax.random.key_impl(key)))
  found += [np.asarray(drawn).tolist() for drawn in of_jax(*fixed, jax.random.key(0))]
  rng = generator(0, 0)
  # The methods by which samplers, and noise of integers, draw: some have two ways.
  found += [rng.geometric(0.3, 4).tolist(), rng.integers(9, size=4).tolist()]
  found += [rng.permutation(4).tolist(), rng.random(4).tolist()]
  for rows in (9, 10_001):
    found += [rng.choice(rows, rows // 2, replace=False, shuffle=False)[:4].tolist()]
  found += [rng.geometric(0.5, 4).tolist(), rng.poisson([0.5, 99.0]).tolist(), rng.bytes(4)]
  return hashlib.sha256(repr(found).encode()).hexdigest()


def join_digests(*digests: bytes) -> bytes:
  """Joins the digests of several data sets; a single digest is returned unchanged."""
  return digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()


# --- data that a run stores, in its checkpoints alone


def to_meta(
  data: bytes,
  random: RunKeys,
  *,
  weights: Mapping[str, str],
  config: str,
) -> dict[str, Any]:
  """Returns the JSON data that a run must store before any computation, only in its checkpoints.

  Args:
    data: digest of the run's data.
    random: keys of the run.
    weights: SHA-256 of each file of weights that the config names, by field.
    config: digest of the config.
  """
  keys = to_json(random)
  run = _run_id(config, data, keys)
  identity = {_DATA: data.hex(), WEIGHTS: {**weights}, RUN: run}
  return identity | {_KEYS: keys, _DRAWS: _draws_here(random)}


def _run_id(config: str, data: bytes, keys: Mapping[str, str]) -> str:
  """Returns a name for one run, from everything that determines the run. It is as secret as the
  data."""
  # The key distinguishes two runs of one config on one data set.
  text = b"dpjax run" + config.encode() + data + bytes.fromhex(keys["noise"])
  return hashlib.sha256(text).hexdigest()


def without_keys(meta: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the part of `meta` that a finished run keeps: the identity of its data."""
  # A finished run makes no random draws, so its keys need not be kept.
  return {name: value for name, value in meta.items() if name not in (_KEYS, RUN, _DRAWS)}


def from_meta(seed: int, meta: Mapping[str, Any]) -> RunKeys:
  """Returns the keys that `to_meta` stored.

  Raises:
    UserError: `meta` holds no keys, or damaged ones.
  """
  try:
    return from_json(seed, meta[_KEYS])
  except (KeyError, TypeError, ValueError, AttributeError) as error:
    raise UserError(
      "holds no keys of a run, so it cannot be gone on from", field="checkpoint"
    ) from error


def data_of(meta: Mapping[str, Any]) -> bytes | None:
  """Returns the stored digest of the data, or None. Never write the digest to another place."""
  held = meta.get(_DATA)
  return bytes.fromhex(held) if isinstance(held, str) else None


def check(
  meta: Mapping[str, Any],
  data: bytes,
  *,
  weights: Mapping[str, str],
  config: str,
  name: str,
  workdir: object,
) -> None:
  """Raises UserError, which names the field, unless what a run stored is of a run with this config,
  these data and these files of weights.

  Args:
    meta: what the run stored; see `to_meta`, also for `data`, `weights` and `config`.
    name: name of the data, for the message, which never shows a digest.
  """
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

  held = meta.get(WEIGHTS, {})
  for field in sorted({*held, *weights}):
    if held.get(field) != weights.get(field):
      raise UserError(
        f"is not the file that the run in workdir={workdir} was begun with; bring that back, or "
        "choose another directory, nothing was changed",
        field=field,
      )
  # A finished run may keep no keys (`without_keys`). A folder of checkpoints may have been moved.
  if RUN in meta and meta[RUN] != _run_id(config, data, meta[_KEYS]):
    raise UserError(
      "its checkpoints are those of another run; bring its own back, or choose "
      "another directory, nothing was changed",
      field="workdir",
      value=workdir,
    )
  # A step that is done again would have the same noise and another batch or other first parameters,
  # so that its two releases would give away their difference; or the same sum and other noise.
  if _DRAWS in meta and meta[_DRAWS] != _draws_here(from_meta(0, meta)):
    raise UserError(
      "holds a run whose keys draw other numbers here: with another version of JAX or NumPy, or "
      "another flag such as jax_default_prng_impl; go on as it was begun, or choose another "
      "directory, nothing was changed",
      field="workdir",
      value=workdir,
    )
