"""Gaussian noise, drawn from a state of one key and the number of draws so far.

The noise of step t comes from fold_in(key, t), split once per leaf. So no two steps or leaves share
random bits. The state (key, draws) determines all later draws, and a resumed run draws what the
interrupted one would have.

A count that was set back would draw the same noise twice, which cancels in the difference of two
sums. The functions here see a count that is no integer, is negative or is not accounted for.
Whether other code has changed a state is seen by the guard of the private transforms
(`dpjax/transforms/guard.py`), which covers all of it.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from dpjax import trees
from dpjax.key_uses import KeyUse
from dpjax.noise import source
from dpjax.parallel import made_for
from dpjax.types import Array, ArrayTree
from dpjax.validate import UserError

# How the name of an axis of devices begins along which the clients of a federated run lie.
CLIENTS = "clients of devices "


class NoiseState(NamedTuple):
  """State of white noise. Keep it secret: whoever knows it can compute and subtract the noise.

  Give each update the state that the last update returned. `state_at` makes a state from a key and
  a count.
  """

  key: jax.Array  # words of the key (`source.to_words`), uint32 [words]; never change
  draws: jax.Array  # int32, number of draws so far


def state_at(key: jax.Array, draws: Array | int) -> NoiseState:
  """Returns the state after `draws` draws under `key`, so that a run can be repeated.

  >>> int(state_at(jax.random.key(0), 3).draws)
  3
  """
  return NoiseState(source.to_words(key), jnp.asarray(draws, jnp.int32))


def check_count(name: str, count: Any) -> None:
  """Raises UserError unless a count in a state is an integer.

  >>> check_count("state.draws", jnp.float32(1.0))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: state.draws: float32: must be an integer; change nothing ...
  """
  dtype = None if count is None else jnp.result_type(count)
  if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
    raise UserError(
      f"{dtype}: must be an integer; change nothing in the state of a private "
      "transform, and give each update the state that the one before gave",
      field=name,
    )


def check_accounted(state: Any, num_steps: int | None) -> Any:
  """Returns whether the next draw of a noise state is accounted for, [] bool.

  Raises:
    UserError: a draw that is known not to be accounted for, or no noise state.

  Args:
    state: a `NoiseState`, or another state with its fields.
    num_steps: number of draws that are accounted for; None for no limit.

  >>> check_accounted(state_at(jax.random.key(0), 20), 20)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: step=20: the noise was accounted for num_steps=20 steps only
  """
  if not hasattr(state, "draws"):
    raise UserError(
      f"{type(state).__name__}: must be what init and update of the private "
      "transform return; restore it with tx.init(params) as the target",
      field="state",
    )
  check_count("state.draws", state.draws)
  is_sound = state.draws >= 0
  is_accounted = is_sound if num_steps is None else is_sound & (state.draws < num_steps)
  # A traced state has no values. For it the caller gives NaN in place of an error.
  if isinstance(is_accounted, core.Tracer) or bool(is_accounted):
    return is_accounted
  if not is_sound:
    raise UserError("must be >= 0", field="state.draws", value=int(state.draws))
  raise UserError(
    f"the noise was accounted for num_steps={num_steps} steps only",
    field="step",
    value=int(state.draws),
  )


def init(key: jax.Array, params: ArrayTree = None) -> NoiseState:
  """Returns the state before the first draw.

  The state holds a copy of the key. So the caller's key is not deleted if the state is donated to a
  jitted function.

  Args:
    key: one typed key.
    params: parameters that the noise is for; they only serve to detect `jax.vmap` over models.

  Raises:
    UserError: a vmap over several models with one key. The models would get the same noise, which
      cancels in the difference of their sums. Map over as many keys, too.
  """
  arrays = [leaf for leaf in jax.tree.leaves(params) if hasattr(leaf, "dtype")]
  _one_model(
    [leaf for leaf in arrays if not trees.is_key(leaf)], [jax.random.key_data(key)]
  )
  return state_at(key, 0)


@jax.custom_batching.custom_vmap
def _one_model(params: list[Array], stream: list[Array]) -> jax.Array:
  """Returns whether all models have different keys or counts, [] bool; true for a single model.

  `stream` is the key's data, and the draws if there is a state. The work is done by the batching
  rule below, which JAX calls under `jax.vmap`.
  """
  del params, stream
  return jnp.array(True)


@_one_model.def_vmap
def _several_models(
  size: int, mapped: Any, params: list[Array], stream: list[Array]
) -> Any:
  of_params, of_stream = mapped
  # If no parameter is mapped there is one model, whatever else is mapped.
  if not any(of_params):
    return _one_model(params, stream), False
  if not any(of_stream):
    raise UserError(
      f"one for {size} models under jax.vmap, which would all get the same "
      "noise; map over as many keys, jax.random.split(key, n), and account for "
      "each model",
      field="key",
    )
  whole = zip(stream, of_stream)
  # Values shared by all models are repeated, so that rows can be compared.
  repeated = lambda part: jnp.broadcast_to(part, (size, *jnp.shape(part)))
  rows = [part if is_mapped else repeated(part) for part, is_mapped in whole]
  distinct = _distinct(rows[0], rows[1]) if len(rows) > 1 else jnp.array(True)
  # `_one_model` is called on the mapped arrays, so that an outer vmap is checked, too.
  return distinct & _one_model(params, rows), False


def _distinct(words: Array, draws: Array) -> jax.Array:
  """Returns whether no two models have the same key and count, [] bool.

  Args:
    words: data of the models' keys, [..., words].
    draws: number of draws of each key so far, [...].
  """
  columns = [words[..., i].ravel() for i in range(words.shape[-1])]
  columns.append(draws.ravel().astype(jnp.uint32))
  # After sorting, two models with equal key and count are neighbours.
  ordered = jax.lax.sort(columns, num_keys=len(columns))
  alike = [column[1:] == column[:-1] for column in ordered]  # of neighbours: [n - 1]
  return ~jnp.any(jnp.all(jnp.stack(alike), axis=0))


def check_one_sum(tree: ArrayTree, state: Any) -> Any:
  """Returns False if `jax.vmap` maps over sums that would share one draw of noise, [] bool.

  Raises:
    UserError: vmap maps over sums but not over the state; or two states are equal, if their values
      are known. Or the sum differs between devices of a `jax.shard_map`, and the state does not.
      Under `jax.pmap`, and with check_vma=False, nobody knows which values differ, so any call.
  """
  # A leaf that is not traced cannot be mapped.
  leaves = []
  for leaf in jax.tree.leaves(tree):
    if isinstance(leaf, core.Tracer):
      leaves.append(leaf)
  if not leaves:
    return True
  stream = [jnp.asarray(state.key), jnp.asarray(state.draws)]
  unmarked = _unmarked_axes()
  if unmarked or trees.varying_axes(leaves) - trees.varying_axes(stream):
    same = "may be the same" if unmarked else "the same"
    raise UserError(
      f"{same} on all devices of a shard_map or pmap, each of which has a sum of its own: the "
      "noise would cancel in the difference of two devices; sum over the devices first, as "
      "plan.clipped_grad(loss_fn, mesh=...) does outside of them",
      field="state",
    )

  def shared() -> UserError:
    return UserError(
      "the same for several models under jax.vmap, which would get the same "
      "noise; give each a state of its own, jax.vmap(tx.init) with as many keys",
      field="state",
    )

  return trees.require(_one_model(leaves, stream), shared)


def _unmarked_axes() -> list[str]:
  """Returns the axes of devices along which JAX does not mark which values differ.

  Those of clients are left out: each client has a state of its own.
  """
  axes = map(str, jax.sharding.get_abstract_mesh().manual_axes)
  return [
    axis
    for axis in axes
    if not (axis.startswith(CLIENTS) or trees.varying_axes(jax.lax.axis_index(axis)))
  ]


def add_gaussian(
  state: NoiseState,
  tree: ArrayTree,
  std: float | Array,
  *,
  num_steps: int | None = None,
  sound: Any = True,
) -> tuple[Any, NoiseState]:
  """Returns tree + N(0, std^2 I), and the state for the next draw.

  It trusts key and count of the state. Whether other code has changed them is seen by the guard of
  a private transform, which calls this function.

  Args:
    state: key and draws, as `init` or the last draw returned it.
    tree: leaves are cast to at least float32 before the noise is added.
    std: standard deviation, in the units of `tree`; with 0 no noise is added. An array [] may be
      traced, so that one program serves several; it is not checked, and not for a release key.
    num_steps: number of draws that are accounted for; None for no limit. A later draw raises
      UserError, or gives NaN if the state is traced.
    sound: [] bool, may be traced. If it is False, all numbers are NaN.

  Raises:
    UserError: a raw key; a count that is no integer >= 0; one state for several sums under
      `jax.vmap`; a release key with a std that is an array.

  With a release key (`dpjax.noise.source`) the noisy tree is rounded to a public grid.

  >>> total, state = add_gaussian(init(jax.random.key(0)), jnp.ones(2), 0.0)
  >>> total, int(state.draws)
  (Array([1., 1.], dtype=float32), 1)
  """
  sound = sound & check_accounted(state, num_steps)
  key = source.from_words(state.key, "state.key")
  noisy = source.as_floats(tree)
  if isinstance(std, jax.Array):
    if source.is_release(key):
      raise UserError(
        "must be a number for a release, whose grid follows from it", field="std"
      )
    sound = sound & check_one_sum(noisy, state)
    unit = source.gaussian(jax.random.fold_in(key, state.draws), noisy, 1.0)
    noisy = _compute_once(trees.add(noisy, trees.scale(unit, std)))
  elif std != 0:
    sound = sound & check_one_sum(noisy, state)
    # Every draw gets its own key, derived from the count of draws.
    own_key = jax.random.fold_in(key, state.draws)
    noisy = _compute_once(trees.add(noisy, source.gaussian(own_key, noisy, std)))
    # A public grid limits the information in the lowest bits (Mironov 2012).
    if source.is_release(key):
      noisy = source.snap(noisy, source.grid_step(std))
  return trees.nan_unless(sound, noisy), state._replace(draws=state.draws + 1)


def _compute_once(noisy: Any) -> Any:
  """Returns the same numbers, which XLA's CPU backend then computes once however many read them.

  An optimizer with two moments reads its gradient twice, and XLA would draw a third of the noise
  for each, since it does not count the work of integers. It never repeats a division. This one is
  by 1, since nothing is above infinity, which XLA does not know.
  """
  # Outside of a trace nothing is computed twice.
  is_traced = any([isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves(noisy)])
  if not is_traced or made_for.platform() != "cpu":
    return noisy
  return jax.tree.map(lambda leaf: leaf / jnp.where(leaf > jnp.inf, 2.0, 1.0), noisy)


def is_key_of_noise(key: Any, noise_key: jax.Array, *, num_draws: int = 0) -> bool:
  """Returns whether a key is the noise key, or the key of one of its first `num_draws` draws, or of
  a use in `KeyUse`.

  Whoever knows one of these keys can compute noise. Under jit keys have no values, so the answer is
  False.

  >>> key = jax.random.key(0)
  >>> is_key_of_noise(key, key), is_key_of_noise(jax.random.key(1), key, num_draws=9)
  (True, False)
  >>> is_key_of_noise(jax.random.fold_in(key, 3), key, num_draws=9)
  True
  """
  keys = (key, noise_key)
  if any(isinstance(each, core.Tracer) or not trees.is_key(each) for each in keys):
    return False
  # Whoever has the words of a key can make the same key of any generator.
  words, words_of_noise = (np.asarray(jax.random.key_data(each)) for each in keys)
  if np.array_equal(words, words_of_noise):
    return True
  if not num_draws or words.shape != words_of_noise.shape:
    return False
  # Draw t uses the key fold_in(noise_key, t). For JAX's own keys, `split` gives this key, too.
  numbers = np.append(np.arange(num_draws, dtype=np.uint32), np.array([*KeyUse], np.uint32))
  of_draws = jax.vmap(functools.partial(jax.random.fold_in, noise_key))(numbers)
  words_of_draws = np.asarray(jax.random.key_data(of_draws))  # [t, words]
  return bool(np.all(words_of_draws == words, axis=-1).any())


def key_id(key: jax.Array) -> str:
  """Returns a fingerprint of a key for the ledger: digits of a hash, which do not show the key.

  >>> key_id(jax.random.key(0)) == key_id(jax.random.key(0))
  True
  >>> key_id(jax.random.key(0)) == key_id(jax.random.key(1))
  False
  """
  data = np.asarray(jax.random.key_data(key)).tobytes()
  return hashlib.sha256(b"dpjax noise key" + data).hexdigest()[:16]
