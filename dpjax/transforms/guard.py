"""The one guard of a private state: what other code has changed is refused.

Optax has functions that change a state by the names of its fields, and `jax.tree.map` changes every
leaf. A count that was set back would draw the same noise twice, which cancels in the difference of
two sums. Scales of the noise that came from elsewhere, such as the data, would be revealed by its
size, and no event covers that. Earlier noise and sums of slices are secret, and later ones rest on
them. So `with_guard` keeps 32 bits beside the state: a digest of ALL leaves, and the mark of the
plan that accounts for the noise.

| what happens to the state                                      | what follows                  |
| -------------------------------------------------------------- | ----------------------------- |
| a leaf is set, mapped, cast or comes from another state        | `UserError`; NaN under jit    |
| it is the state of a plan with another noise, correlation,     | the same                      |
| bound, sampler, slices, unit or statistics                     |                               |
| an update is given what became NaN, and goes on                | all later updates are NaN     |
| it is of the same plan with another number of steps            | it is accepted, unless the    |
|                                                                | sampler bounds participation  |
| it is given a batch of `plan.batches` out of turn: a batch for | the same                      |
| the second time, one of a loop that began again, or of another |                               |
| step                                                           |                               |
| it is given a batch of another plan's `batches`                | the same                      |
| it is given a batch of another call without `rng`, or of       | the same                      |
| another `rng` or number of rows, where the sampler bounds how  |                               |
| often an example takes part in several steps                   |                               |
| it is given a part of a batch of `plan.batches`                | `UserError`                   |
| it is given its rows out of their places, such as two views    | `UserError`; NaN under jit    |
| joined; or padding of it counts, as with mask=True             |                               |
| a whole earlier state is used again, with the batches that     | cannot be detected            |
| belong to it                                                   |                               |
| a first state is used again, with fresh draws of               | the noise is another one      |
| `plan.batches` (`noise_of_run`)                                |                               |

A `Mechanism` (in `clip_and_noise`, `correlated`, `adaptive_clipping`) knows nothing of this.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from dpjax import closed_over, trees
from dpjax.gradients import traced_values
from dpjax.key_uses import KeyUse, key_for
from dpjax.noise import source
from dpjax.noise.gaussian import check_count
from dpjax.transforms.inputs import Conditions, Mechanism, check_start, refuse_arguments
from dpjax.types import ArrayTree
from dpjax.validate import UserError

# Odd numbers with well-mixed bits. Multiplication by an odd number is a bijection modulo 2^32.
_ODD = 0x9E3779B1
_FIRST = 0x85EBCA6B
_SECOND = 0xC2B2AE35


class Guarded(NamedTuple):
  """State of a private transform. Keep it secret: it holds the key of the noise.

  Give each update the state that the last update returned, whole.
  """

  inner: Any  # state of the mechanism
  checksum: jax.Array  # uint32, of all leaves of `inner`, the plan's mark and the run
  run: jax.Array  # int32, number of the run whose batches it takes; 0 until then


def is_guarded(part: object) -> bool:
  """Returns whether a part of a tree of states is that of a private transform."""
  return isinstance(part, Guarded)


def mark_of(facts: Mapping[str, Any]) -> int:
  """Returns a hash of 32 bits, never 0, of the facts that define the steps of a plan.

  Numbers are rounded to six digits, so that rounding on another machine does not change the hash.

  >>> mark_of({"noise_multiplier": 1.0}) == mark_of({"noise_multiplier": 1.0000001})
  True
  >>> mark_of({"noise_multiplier": 1.0}) == mark_of({"noise_multiplier": 1.1})
  False
  """
  # NumPy's numbers become floats, so that they are written like Python's.
  text = json.dumps(facts, default=lambda number: float(number))
  rounded = lambda digits: f"{float(digits):.6g}"
  known = json.loads(text, parse_float=rounded, parse_int=rounded, parse_constant=str)
  digits = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).digest()
  # A mark of 0 is that of a transform without a plan.
  return int.from_bytes(digits[:4], "big") or 1


def digest(state: ArrayTree) -> jax.Array:
  """Returns 32 bits that depend on every number, its type and its position; not 0 for zeros.

  A state that others may change in part says in `covered` what counts.

  The digest adds integers, whose sum does not depend on the order. So devices that share an array
  agree on its digest.

  >>> one, other = (digest({"a": jnp.array(row)}) for row in ([1.0, 2.0], [2.0, 1.0]))
  >>> bool(one == other), bool(digest({"a": jnp.zeros(2)}) == 0)
  (False, False)
  """

  def of_arrays(leaves: Any) -> jax.Array:
    total = jnp.uint32(_ODD)
    for number, leaf in enumerate(leaves):
      # A cast may keep all values, but what follows would be rounded otherwise.
      kind = zlib.crc32(f"{number} {leaf.dtype} {leaf.shape}".encode())
      if leaf.dtype.itemsize not in (4, 8):
        leaf = leaf.astype(jnp.float32)  # has all values of narrower types
      if jnp.issubdtype(leaf.dtype, jnp.floating):
        # NaN has many bit patterns, which must all have the same digest.
        leaf = jnp.where(jnp.isnan(leaf), jnp.asarray(jnp.nan, leaf.dtype), leaf)
      bits = lax.bitcast_convert_type(leaf, jnp.uint32)
      places = jnp.zeros(bits.shape, jnp.uint32)  # of the entries, from the last axis on
      stride = 1
      for axis in reversed(range(bits.ndim)):
        along = lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        places = places + along * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
      mixed = bits ^ (places * jnp.uint32(_ODD))
      # These lines are the end of MurmurHash3, by which each bit changes about half of all bits.
      mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(_FIRST)
      mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(_SECOND)
      mixed = mixed ^ (mixed >> 16)
      total = total * jnp.uint32(_FIRST) + jnp.sum(mixed, dtype=jnp.uint32)
      total = total ^ jnp.uint32(kind)
    return total

  arrays = []
  are_rounded = False
  for leaf in jax.tree.leaves(getattr(state, "covered", state)):
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
      array = jax.random.key_data(array)
    are_rounded = are_rounded or jnp.issubdtype(array.dtype, jnp.floating)
    arrays.append(array)
  # XLA may compute a float again, and round it differently, for each use. The digest must be that
  # of the number that the state keeps.
  return traced_values.on_settled(of_arrays, arrays) if are_rounded else of_arrays(arrays)


def mechanism_state(state: Any) -> Any:
  """Returns what a guard holds of a private transform; another state is returned as it is."""
  return state.inner if isinstance(state, Guarded) else state


def noise_of(inner: Any) -> Any:
  """Returns the noise state in the state of a mechanism: the part that counts draws."""
  while not hasattr(inner, "draws") and hasattr(inner, "inner"):
    inner = inner.inner
  return inner


def next_batch(inner: Any) -> Any:
  """Returns the number of the batch that a mechanism's state takes next, []; None if it counts
  none."""
  return getattr(noise_of(inner), "draws", None)


def _in_turn(
  origin: Any, turn: Any, rows: int | None, mark: int, plan: Any, runs: tuple[Any, Any]
) -> Any:
  """Returns whether all rows are of the batch that the state takes next, [] bool.

  Epsilon holds for one draw a step, each fresh and whole. A loop over epochs that begins
  `plan.batches` anew with the same `rng` would train on one draw in every epoch. A slice that comes
  twice in one step would count its examples twice; so would a batch that is joined with itself,
  such as two augmented views of it. In a batch that is cut, one record pushes out another, and
  moves the sum by twice the clip norm. The batches of another plan, such as of a cell that was
  changed and run again, may hold an example more often.

  Args:
    origin: that of `gradients.arguments.origin_of`, [B, 4].
    turn: number of the batch that the state takes next.
    rows: number of rows of a batch, padding included; None if it is not known.
    mark: mark of the plan whose batches are taken; 0 for those of any.
    plan: the same mark, as an array.
    runs: number of the batch's run, and of the run that the state has taken batches of; 0: none.

  Raises:
    UserError: a part of a batch, one that is known to be another, or rows out of their places.
  """
  if rows is not None and len(origin) < rows:
    raise UserError(
      f"a part of a batch, which has {rows} rows: one record would push another out of it; give "
      "whole batches; to save memory: microbatch_size= of clipped_grad, or slices= of the plan and "
      "plan.accumulated(tx)",
      field="updates",
    )
  number, place, drawn_by, drawn_in = jnp.moveaxis(origin, -1, 0)
  is_padding = number == -1
  in_turn = jnp.all(is_padding | (number == turn))
  # To allow rows in any order one must sort them, for which devices would exchange them.
  in_place = jnp.all(is_padding | (place == jnp.arange(len(origin), dtype=place.dtype)))
  plan = lax.bitcast_convert_type(plan, jnp.int32)
  ours = jnp.all(is_padding | (drawn_by == plan)) if mark else True
  run, earlier = runs
  same_run = (run == 0) | (earlier == 0) | (run == earlier)
  # Of two draws joined, an example may come twice. Then `run` is neither's number.
  same_run &= jnp.all(is_padding | (drawn_in == run))

  def wrong() -> UserError:
    if not in_turn:
      return UserError(
        f"is not the batch that this state takes next, {int(turn)}: plan.batches yields the steps "
        "of all epochs, each for one update, in order; a loop that goes on takes "
        "plan.batches(data, rng, start), with the rng of before",
        field="batch.step",
        value=int(jnp.max(number)),
      )
    if not in_place:
      return UserError(
        "rows that do not stand where plan.batches put them, or padding that its mask lets count: "
        "a row that comes twice counts twice; "
        "of several views of an example take the mean loss, as training.augment does",
        field="updates",
      )
    if not same_run:
      return UserError(
        "drawn by another call without rng, or by another rng or from another number of rows, than "
        "the batches before: of both an example may take part more often than is accounted for; go "
        "on by plan.batches(data, rng, start) with the data and the rng of before",
        field="batch.origin",
      )
    return UserError(
      "drawn by another plan than that of this transform, whose epsilon is not theirs; where the "
      "plan has changed, make plan.transform and its state anew, too",
      field="batch.origin",
    )

  return trees.require(in_turn & in_place & same_run & ours, wrong)


def key_of_run(words: jax.Array, run: Any) -> jax.Array:
  """Returns the words of the key of one run, from those of a key that several runs may hold."""
  key = key_for(KeyUse.RUN, source.from_words(words))
  return jax.random.key_data(jax.random.fold_in(key, run))


def noise_of_run(inner: Any, first: Any, run: Any) -> Any:
  """Returns a state of noise as that of a run, if this is the first batch of it.

  The number of the run is folded into each key of noise. So two runs share no noise, even if both
  were given one key: a loop over learning rates, seeds or folds that makes one transform. A run is
  one call of `plan.batches`: a list of batches that serves two trainings gives both one noise.

  Args:
    inner: state of a mechanism or of a private transform.
    first: [] bool, whether the run begins with this update.
    run: [] int32, number of the run; 0 or less if its draws may be repeated, and so its noise.
  """

  def is_held(node: Any) -> bool:
    return isinstance(node, Guarded) or (hasattr(node, "draws") and hasattr(node, "key"))

  def of_run(node: Any) -> Any:
    if isinstance(node, Guarded):
      return exchange(node, lambda held: noise_of_run(held, first, run))
    if not is_held(node):
      return node
    words = jnp.where(first & (run > 0), key_of_run(node.key, run), node.key)
    return node._replace(key=words)

  return jax.tree.map(of_run, inner, is_leaf=is_held)


def _bits(run: Any) -> jax.Array:
  """Returns the part of a run's number in the checksum, [] uint32; 0 for the number 0."""
  return lax.bitcast_convert_type(jnp.asarray(run), jnp.uint32) * jnp.uint32(_ODD)


def _no_state(state: Any) -> UserError:
  return UserError(
    f"{type(state).__name__}: must be what init and update of this private transform "
    "return; restore it with tx.init(params) as the target",
    field="state",
  )


def changed_bits(state: Any, mark: int | jax.Array = 0) -> jax.Array:
  """Returns 0 for a state that `with_guard` made, else the bits in which its checksum is wrong.

  Args:
    state: what `init` or `update` of the guarded transform returned.
    mark: mark of the plan; 0 without one.

  Raises:
    UserError: a state that is known to be changed, or is none.
  """
  if not isinstance(state, Guarded):
    raise _no_state(state)
  name = "slices" if hasattr(state.inner, "slices") else "draws"

  def changed() -> UserError:
    part = state.inner if name == "slices" else noise_of(state.inner)
    # A part that has another type has a better explanation.
    if hasattr(part, "key"):
      source.from_words(part.key, "state.key")
    count = getattr(part, name, None)
    check_count(f"state.{name}", count)
    check_count(f"checksum of state.{name}", state.checksum)
    return UserError(
      "does not belong to its checksum: something set, mapped or mixed the state "
      "of a private transform, and noise could be drawn twice, or another plan "
      "made it; give each update the state that the one before gave, or restore "
      "it whole",
      field=f"state.{name}",
      value=int(np.ravel(np.asarray(count))[0]),
    )

  dtype = getattr(state.checksum, "dtype", None)
  run_dtype = getattr(state.run, "dtype", None)
  if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or run_dtype != jnp.int32:
    raise changed()
  seen = digest(state.inner) ^ _bits(state.run)
  off = jnp.asarray(state.checksum).astype(jnp.uint32) ^ seen ^ jnp.uint32(mark)
  trees.require(off == 0, changed)
  return off


def with_guard(
  mechanism: Mechanism,
  *,
  mark: int = 0,
  rows: int | None = None,
  slices: int | None = None,
  turn: Callable[[Any], Any] = next_batch,
) -> optax.GradientTransformationExtraArgs:
  """Returns a mechanism as a private transform, whose state is guarded between updates.

  Args:
    mechanism: what opens gradients and adds noise.
    mark: mark of the plan that accounts for the noise; 0 without a plan.
    rows, slices: as for `inputs.Conditions`.
    turn: function from the mechanism's state to the number of the batch that it takes next.
  """

  # Plans that differ in their noise alone share one program.
  plan_mark = closed_over.argument(mark, jnp.uint32)

  def init_fn(params: Any) -> Guarded:
    check_start(params)
    inner = mechanism.init(params)
    return Guarded(inner, digest(inner) ^ plan_mark, jnp.int32(0))

  def update_fn(
    updates: Any,
    state: Any,
    params: Any = None,
    *,
    mask: Any = None,
    count: Any = None,
    **extra_args: Any,
  ) -> tuple[Any, Guarded]:
    if extra_args:
      refuse_arguments(extra_args)
    off = changed_bits(state, plan_mark)
    # Only where the state is traced can it be of another transform here.
    if not isinstance(state.inner, mechanism.state):
      raise _no_state(state.inner)
    given = {} if count is None else {"count": count}
    inner = state.inner
    sound = off == 0
    run = state.run
    origin = getattr(updates, "origin", None)
    number = turn(inner)
    if origin is not None and number is not None:
      # With a wrong checksum nothing else counts. XLA's CPU backend wakes another thread where more
      # than nine small operations are ready at once, so these wait for the checksum.
      origin = jnp.where(sound, origin, 0).reshape(-1, 4)
      # The number of the run that drew the batch, of one sign. Padding that came later has 0.
      of_batch = jnp.max(origin[:, 3], initial=0) + jnp.min(origin[:, 3], initial=0)
      sound &= _in_turn(origin, number, rows, mark, plan_mark, (of_batch, run))
      inner = noise_of_run(inner, number == 0, of_batch)
      run = jnp.where(of_batch == 0, run, of_batch)
    conditions = Conditions(sound, rows, slices)
    noisy, inner = mechanism.update(
      updates, inner, params, mask=mask, conditions=conditions, **given
    )
    # A wrong checksum stays wrong. If it became right, a caller who skips NaN updates would go on
    # with repeated noise.
    sums = digest(inner) ^ _bits(run)
    return noisy, Guarded(inner, sums ^ plan_mark ^ off, run)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def as_mechanism(tx: Any) -> Mechanism:
  """Returns a private transform as a mechanism: NaN where the conditions do not hold.

  The transform itself sees rows and slices as it likes.
  """

  def update_fn(updates, state, params=None, *, conditions, **extra_args):
    noisy, after = tx.update(updates, state, params, **extra_args)
    return trees.nan_unless(conditions.sound, noisy), after

  return Mechanism(tx.init, update_fn)


def exchange(state: Guarded, change: Callable[[Any], Any]) -> Guarded:
  """Returns the state with `change` applied to the mechanism's state, for tests and games.

  A right checksum stays right, and a wrong one stays wrong.

  >>> from dpjax import noise
  >>> inner = noise.gaussian.init(jax.random.key(0))
  >>> state = Guarded(inner, digest(inner), jnp.int32(0))
  >>> state = exchange(state, lambda s: s._replace(draws=s.draws + 1))
  >>> int(changed_bits(state))
  0
  """
  inner = change(state.inner)
  checksum = state.checksum ^ digest(state.inner) ^ digest(inner)
  return state._replace(inner=inner, checksum=checksum)
