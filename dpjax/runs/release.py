"""Release mode: the secrets of a run come from the operating system and live in its
checkpoints alone, so the config, which gets published, tells nothing about them."""

from __future__ import annotations

import secrets
import textwrap
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dpjax import noise
from dpjax.runs.central import build
from dpjax.plan import Plan
from dpjax.validate import UserError

_SAMPLER_BITS = 256
_STREAMS = "release_streams"  # in a checkpoint's meta data


def new_streams(config: Any, kind: Any = build.Streams) -> Any:
  """Fresh streams of 256 bits each; only the initial parameters depend on the seed.

  Args:
    config: with a `seed`.
    kind: a NamedTuple (init, two other keys, sampler).
  """
  keys = noise.secure.new_key(), noise.secure.new_key()
  return kind(jax.random.key(config.seed), *keys, secrets.randbits(_SAMPLER_BITS))


def to_meta(random: Any) -> dict[str, Any]:
  """The secrets, for the meta data of a checkpoint. Never write them anywhere else."""
  keys = {name: _hex(getattr(random, name)) for name in random._fields[1:3]}
  return {_STREAMS: {**keys, "sampler": f"{random.sampler:x}"}}


def _hex(key: jax.Array) -> str:
  return np.asarray(jax.random.key_data(key)).tobytes().hex()


def from_meta(config: Any, meta: Mapping[str, Any], kind: Any = build.Streams) -> Any:
  """The streams that `to_meta` wrote."""
  if _STREAMS not in meta:
    raise UserError("checkpoint: holds no release keys, so it cannot be gone on from")
  held = meta[_STREAMS]
  key = lambda name: noise.secure.key_from_bytes(bytes.fromhex(held[name]))
  init = jax.random.key(config.seed)
  return kind(init, *map(key, kind._fields[1:3]), int(held["sampler"], 16))


def streams(config: Any, meta: Mapping[str, Any] | None, kind: Any = build.Streams) -> Any:
  """The streams of a release: of the meta data of its newest checkpoint, or fresh ones where
  there is none."""
  return new_streams(config, kind) if meta is None else from_meta(config, meta, kind)


def statement(plan: Plan) -> str:
  """What release mode adds to the privacy statement, and what it does not cover."""
  least = plan.noise_multiplier * min(plan.noise_shape.schedule, default=1.0)
  step = noise.secure.grid_step(least * plan.l2_bound)
  return textwrap.fill(
    "Release mode. The noise key has 256 bits of the operating system's entropy and is "
    "stretched by ChaCha20; it is kept in the checkpoints only: delete them, or keep them "
    "as secret as the data. Batches are drawn by NumPy's Philox from a 256-bit seed of the "
    "same origin; Philox is not a cryptographic generator. Each noisy sum is rounded to the "
    f"grid of multiples of {step:g} before anything is computed from it, so that which "
    "numbers can occur does not depend on the data; that the probabilities on the grid are "
    "those of an ideal rounded Gaussian is not proved to the last bit. Per-example "
    "diagnostics were switched off. How long anything took follows the private sizes of "
    "batches and cohorts and is not covered: result.json does not say it, but times of "
    "files, TensorBoard's events and progress on a terminal do, so release none of these.",
    width=92,
    break_on_hyphens=False,
  )
