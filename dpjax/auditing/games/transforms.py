"""Games against Optax transforms: stacked gradients go in, releases come out.

Some transforms only change private gradients (`dp_adam`, `dp_sgld`), or wrap a private transform
(`accumulate`, `with_clip_schedule`). They are played around `base`, which is `clip_and_noise` or a
broken transform. The adversary sees every update and every state that may be released.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import accounting, transforms
from dpjax.auditing.games.game import Game, claims_of_event, drawn_by, linear
from dpjax.gradients import Clip, wrap_grads
from dpjax.gradients.clip import RULES
from dpjax.noise import NoiseShape
from dpjax.noise.correlated import BandedToeplitz
from dpjax.noise.correlated.strategies import matrix
from dpjax.transforms.clip_scale import clip_scale

STEPS = 2
_ADD = "add_or_remove_one"
_REPLACE = "replace_one"
# The private transform inside of the transforms that have no noise of their own.
_BASE = transforms.clip_and_noise
# Noise multiplier and clip norm of the games, unless a game says otherwise.
_Z = 1.5
_CLIP = 0.5
_FAR = 1e3 * _CLIP
_PARAMS = 2

Make = Callable[[Any], Any]  # key -> transform
Batch = tuple[np.ndarray, np.ndarray]  # gradients [records, params], mask [records]


def _present(target: tuple[float, float], dtype: Any = np.float32) -> tuple[Batch, Batch]:
  """Returns data without and with the target's gradient; another record pulls the other way."""
  rows = np.array([target, (-_FAR, 0.0)], dtype)
  return (rows, np.array([False, True])), (rows, np.array([True, True]))


def game(
  case: str,
  make: Make,
  worlds: tuple[Batch, Batch],
  *,
  relation: str = _ADD,
  steps: int = STEPS,
  noise_multiplier: float = _Z,
  released: Callable[[Any], Any] = lambda state: (),
  calls: int = 1,
  leaves: bool = False,
) -> Game:
  """Returns the game of `steps` accounted updates on one batch, with `calls` calls for each update.

  Args:
    leaves: whether the record of row 0 is in the first step alone, so that a second step which
      repeats the noise reveals the record.
  """
  dtype = worlds[0][0].dtype

  @jax.jit
  @functools.partial(jax.vmap, in_axes=(0, None, None))
  def run(key: Any, grads: Any, mask: Any) -> Any:
    tx = make(key)
    params = jnp.zeros(_PARAMS, dtype)
    state = tx.init(params)
    seen = []
    for call in range(steps * calls):
      there = mask.at[0].set(False) if leaves and call >= calls else mask
      updates, state = tx.update(wrap_grads(grads), state, params, mask=there)
      seen.append((updates, released(state)))
    return [jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(seen)]

  outputs = drawn_by(lambda keys, world: run(keys, *map(jnp.asarray, worlds[world])))
  event = accounting.compose(accounting.gaussian_event(noise_multiplier), steps)
  return Game(case, relation, claims_of_event(event, relation), outputs, linear)


def _each(make: Make, added: dict[str, tuple[float, float]], **options: Any) -> list[Game]:
  """Returns one game for each record of `added`, against another record."""
  return [game(case, make, _present(row), **options) for case, row in added.items()]


_LEAVES = "a record in the first of two steps"


def _leaving(make: Make, **options: Any) -> Game:
  """Returns a game in which the record is in one step only. The claim is that of all steps."""
  return game(_LEAVES, make, _present(_AWAY), leaves=True, **options)


_DIVISOR = 2.0
_NUMBERS: dict[str, Any] = {
  "l2_clip_norm": _CLIP,
  "noise_multiplier": _Z,
  "normalize_by": _DIVISOR,
}
_AWAY = (_FAR, 0.0)


def _clip_and_noise(tx: Callable) -> list[Game]:
  build = lambda **options: lambda key: tx(**{**_NUMBERS, "key": key, **options})
  plain = build()
  twice = build(noise_multiplier=2 * _Z)
  with_it, both = _present(_AWAY)[1]
  opposite = np.array([(-_FAR, 0.0)] * 2, np.float32)
  strange = {"1e30 added": (1e30, 1e30), "NaN added": (math.nan, 1.0)}
  return [
    game("a record added, against another", plain, _present(_AWAY)),
    game(
      "replaced by its opposite",
      twice,
      ((with_it, both), (opposite, both)),
      relation=_REPLACE,
      noise_multiplier=2 * _Z,
    ),
    *_each(plain, strange | {"infinity added": (-math.inf, 0.0)}),
    game("bfloat16 added", plain, _present(_AWAY, jnp.bfloat16)),
    game(
      "nobody, one record",
      plain,
      (
        (np.zeros((1, 2), np.float32), np.array([False])),
        (np.array([_AWAY], np.float32), np.array([True])),
      ),
    ),
    *[
      game(f"{rule} clipping", build(l2_clip_norm=Clip(_CLIP, rule)), _present(_AWAY))
      for rule in RULES
      if rule != "flat"
    ],
    game("noise by group", _by_group(tx), _present((_FAR, _FAR))),
    _leaving(plain),
  ]


def _by_group(tx: Callable) -> Make:
  """Returns the function key -> transform with two groups, whose noise shares are .2 and .8."""
  tree = lambda rows: {"a": rows[..., :1], "b": rows[..., 1:]}
  whole = lambda grads: jnp.concatenate([grads["a"], grads["b"]], axis=-1)
  # The root of the sum of the squared norms is _CLIP.
  norms = {"a": _CLIP * 0.6, "b": _CLIP * 0.8}
  shape = NoiseShape(shares={"a": 0.2, "b": 0.8})
  options = {**_NUMBERS, "l2_clip_norm": norms, "noise_shape": shape}

  def make(key: Any) -> Any:
    inner = tx(**options, key=key)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
      rows = wrap_grads(tree(updates.arrays))
      noisy, state = inner.update(rows, state, tree(params), **extra_args)
      return whole(noisy), state

    init = lambda params: inner.init(tree(params))
    return optax.GradientTransformationExtraArgs(init, update)

  return make


def _adaptive(tx: Callable) -> list[Game]:
  how = transforms.AdaptiveClipping(count_noise_std=0.7, learning_rate=0.5)
  make = lambda key: tx(**{**_NUMBERS, "l2_clip_norm": Clip(_CLIP, how)}, key=key)
  z = how.combined_noise_multiplier(_Z, _NUMBERS["normalize_by"])
  added = {"a record above the quantile added": _AWAY, "NaN added": (math.nan, 0.0)}
  released = clip_scale
  slack = transforms.SlackClipping(num_slots=2, learning_rate=0.5)
  fitted = lambda key: tx(**{**_NUMBERS, "l2_clip_norm": Clip(_CLIP, slack)}, key=key)
  short = {
    "slack, a record without a gradient added": (0.0, 0.0),
    "slack, a record of half the norm added": (0.5 * _CLIP, 0.0),
  }
  return [
    *_each(make, added, noise_multiplier=z, released=released),
    _leaving(make, noise_multiplier=z, released=released),
    *_each(fitted, short, noise_multiplier=_Z, released=released),
  ]


def _correlation(tx: Callable) -> list[Game]:
  """Returns games with a record in both steps. The cost is that of one shift by |C (1, 1)|."""
  strategy = BandedToeplitz((1.0, 0.5))
  shape = NoiseShape(correlation=strategy)
  make = lambda key: tx(**_NUMBERS, key=key, noise_shape=shape, num_steps=STEPS)
  # A record in both steps shifts the whitened sums by C (1, 1).
  together = float(np.linalg.norm(matrix(strategy, STEPS).sum(axis=1)))
  effective = _Z / together * math.sqrt(STEPS)
  added = {"a record in both steps": _AWAY, "1e30 in both steps": (1e30, 0.0)}
  return [
    *_each(make, added, noise_multiplier=effective),
    _leaving(make, noise_multiplier=effective),
  ]


def _accumulate(tx: Callable, base: Callable = _BASE) -> list[Game]:
  """Returns games on steps of two slices. The second slice never holds the record."""

  def make(key: Any) -> Any:
    return tx(base(**_NUMBERS, key=key), every=2, l2_clip_norm=_CLIP)

  once = functools.partial(_in_first_slice, make)
  added = {"a record in the first slice": _AWAY, "NaN in the first slice": (math.nan, 0.0)}
  return [
    *_each(once, added, calls=2, steps=1),
    _leaving(once, calls=2),
  ]


def _in_first_slice(make: Make, key: Any) -> Any:
  """Returns the transform, which gets the batch in the first slice and an empty one in the
  second."""
  tx = make(key)

  def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
    mask = extra_args["mask"] & (state.inner.slices == 0)
    return tx.update(updates, state, params, mask=mask)

  return optax.GradientTransformationExtraArgs(tx.init, update)


def _schedule(tx: Callable, base: Callable = _BASE) -> list[Game]:
  make = lambda key: tx(base(**_NUMBERS, key=key), [1.0, 0.1])
  added = {"a record added": _AWAY, "1e30 added": (1e30, 0.0)}
  return [*_each(make, added), _leaving(make)]


def _scaling(tx: Callable, base: Callable = _BASE) -> list[Game]:
  """Returns games in which the released output of the first step scales the second step."""
  make = lambda key: tx(base(**_NUMBERS, key=key), b2=0.5)
  added = {"a record added": _AWAY, "1e30 added": (1e30, 0.0), "NaN added": (math.nan, 1.0)}
  released = lambda state: state.inner.mean_squares
  return [*_each(make, added, released=released), _leaving(make)]


def _post(**options: float) -> Callable[..., list[Game]]:
  """Returns a function that makes games on an optimizer after the private transform. This is
  post-processing, so its whole state may be released."""

  def games(tx: Callable, base: Callable = _BASE) -> list[Game]:
    make = lambda key: optax.chain(base(**_NUMBERS, key=key), tx(**options))
    added = {"a record added": _AWAY, "infinity added": (math.inf, 0.0)}
    released = lambda states: states[1:]
    return [*_each(make, added, released=released), _leaving(make, released=released)]

  return games


_STD = _Z * _CLIP / 2.0

GAMES: dict[str, Callable[..., list[Game]]] = {
  "clip_and_noise": _clip_and_noise,
  "adaptive_clip_and_noise": _adaptive,
  "clip_and_correlated_noise": _correlation,
  "accumulate": _accumulate,
  "with_clip_schedule": _schedule,
  "scale_then_privatize": _scaling,
  "dp_adam": _post(learning_rate=0.1, mean_noise_std=_STD),
  "scale_by_dp_adam": _post(mean_noise_std=_STD),
  "dp_sgld": _post(step_size=0.1, mean_noise_std=_STD, num_examples=10),
}

NO_CLAIM = {"with_guard": "refuses a changed state, and adds nothing"}
