"""Noise on records: one key per record, scales per feature, rounded to a public grid.

The noise of record i is drawn from fold_in(key, i). So it is the same at every call, and no
two records share any. Noise that is drawn ONCE per record costs once. The other ways to draw
are here to be measured and attacked; "batch" and "run" are those of the AdLM code.

| draw           | noise                         | epsilon that is proved for a record |
| -------------- | ----------------------------- | ----------------------------------- |
| "record_once"  | a function of (key, record)   | sum_j channels / b_j                |
| "record_fresh" | new in each epoch             | that, times the number of epochs    |
| "batch"        | one map for a batch           | nothing: differences are noise-free |
| "run"          | one map for the whole run     | nothing: differences are noise-free |

Samples come from `dpjax.noise.source`: tails to 133 scales (Gaussian: 9.49 standard
deviations), in the float type of the records. Which floats record + noise can be depends on the
record (Mironov 2012). Rounding to a public grid afterwards is post-processing, and limits which
numbers can be seen. A feature's step is `GRID`, or for scales above 2 between scale / 2^8 and
scale / 2^7. So about 2^15 floats lie in a grid cell; `mechanisms.finite` says what that leaves
open. With one step for all scales, a cell at scale 80,000 would hold about three floats. Their
probabilities would reveal the record.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import validate
from dpjax.mechanisms import finite
from dpjax.noise import source
from dpjax.types import DType, HostArray
from dpjax.validate import UserError

# Smallest step of the grid.
GRID = 2.0**-6
MECHANISMS = ("laplace", "gaussian")
_SAMPLE: dict[str, Callable] = {
  "laplace": source.laplace,
  "gaussian": source.gaussian,
}
# Number of records that get their noise at a time.
_CHUNK = 2000


def by_feature(scales: HostArray, shape: tuple[int, ...]) -> np.ndarray:
  """Reshapes scales [d] for one example. The channels of an image share the scale of their place.

  >>> by_feature([1.0, 2.0], (1, 2, 3)).shape
  (1, 2, 1)
  """
  with np.errstate(over="ignore"):
    scales = np.asarray(finite.array("scales", scales)).astype(np.float32)
  places = shape[:2] if len(shape) == 3 else shape
  if scales.size != int(np.prod(places)):
    raise UserError(
      f"must be one for each of {int(np.prod(places))} features", field="scales"
    )
  return scales.reshape((*places, 1) if len(shape) == 3 else places)


def sample(
  key: jax.Array,
  scales: jax.Array,
  shape: tuple[int, ...],
  *,
  mechanism: str = "laplace",
  shared_channels: bool = False,
  dtype: DType = jnp.float32,
) -> jax.Array:
  """Draws a map of noise in the shape of an example. `scales` is what `by_feature` returns.

  `dtype` must be the type of the values that get the noise, since coarser noise would not change
  their low bits.

  For "gaussian" the scales are standard deviations. With `shared_channels` all channels of a place
  get one value, so the differences of channels are noise-free.
  """
  validate.one_of(MECHANISMS, mechanism=mechanism)
  drawn = scales.shape if shared_channels else shape
  unit = _SAMPLE[mechanism](key, jnp.zeros(drawn, dtype), 1.0)
  return jnp.broadcast_to(unit * scales, shape)


@functools.cache
def _compile(shape: tuple, mechanism: str, shared: bool) -> Callable:
  def noisy_record(key, record_id, x, scales, steps):
    mine = jax.random.fold_in(key, record_id)
    drawn = sample(mine, scales, shape, mechanism=mechanism, shared_channels=shared)
    if steps is None:
      return x + drawn
    # Scaling by the steps is exact, since they are powers of two.
    return source.snap((x + drawn) / steps, 1.0) * steps

  return jax.jit(jax.vmap(noisy_record, in_axes=(None, 0, 0, None, None)))


def distinct_ids(record_ids: HostArray, count: int) -> np.ndarray:
  """Returns the ids as uint32 [count]; the noise of a record is drawn from its id.

  Raises:
    UserError: two records have the same id, and would share their noise; an id is no integer in
      [0, 2^32), so that two ids could be cut to one.

  >>> distinct_ids([7, 2**32 - 1], 2)
  array([         7, 4294967295], dtype=uint32)
  """
  ids = finite.array("record_ids", record_ids)
  if ids.shape != (count,):
    raise UserError(
      f"must be [{count}], one for each record, not {[*ids.shape]}", field="record_ids"
    )
  ids = np.asarray(ids if count else np.zeros(0, np.uint32))
  right = ids.dtype.kind in "iu" and (not count or 0 <= ids.min() <= ids.max() < 2**32)
  if not right or len(np.unique(ids)) != count:
    raise UserError("must be integers in [0, 2^32), all different", field="record_ids")
  return ids.astype(np.uint32)


def noisy_records(
  key: jax.Array,
  record_ids: HostArray,
  x: HostArray,
  scales: HostArray,
  *,
  mechanism: str = "laplace",
  shared_channels: bool = False,
  grid: float | None = GRID,
) -> np.ndarray:
  """Adds independent noise to each record of x [n, ...]: draw "record_once".

  Args:
    key: secret key. The random numbers depend on the key and the ids alone.
    record_ids: [n] distinct integers. They may be published, the key may not.
    scales: [d] Laplace scales (or Gaussian standard deviations) by feature.
    grid: smallest step of the grid of the outputs, a power of two; None: no rounding.

  Raises:
    UserError: `distinct_ids` refuses the ids; a scale is not positive, or so small or large that
      float32 noise would vanish or overflow; a record is not finite; `grid` is no power of two.

  Guarantee: each record's output is (sum_j channels / b_j, 0)-DP under replace_one (local), for
  Laplace noise of scales b_j, channels that are not shared, and entries of x in [0, 1]. The proof
  is for real-valued noise; the module says what floats leave open.

  >>> x = np.zeros((2, 3), np.float32)  # doctest: +SLOW
  >>> key = jax.random.key(0)
  >>> both = noisy_records(key, [5, 7], x, [1.0, 1.0, 1.0])
  >>> bool((noisy_records(key, [7], x[:1], [1.0] * 3)[0] == both[1]).all())
  True
  """
  x = np.asarray(finite.array("x", x), np.float32)
  if not x.ndim or not np.isfinite(x).all():
    raise UserError("must be records [n, ...] of finite numbers", field="x")
  ids = distinct_ids(record_ids, len(x))
  shaped = by_feature(scales, x.shape[1:])
  for end in (shaped.min(), shaped.max()) if shaped.size else ():
    source.check_scale(float(end), shaped.dtype, "scales")
  if grid is not None:
    source.check_step(jnp.dtype(x.dtype), grid=grid)
  shaped = jnp.asarray(shaped)
  steps = None
  if grid is not None:
    # The step of each feature is a power of two. frexp gives e for scale = m * 2^e, with
    # 1/2 <= m < 1.
    exponents = np.frexp(np.asarray(scales, np.float32))[1]
    steps_of_features = np.ldexp(0.5, exponents - finite.GRID_BITS)
    widest = np.maximum(steps_of_features, np.float32(grid)).astype(np.float32)
    steps = jnp.asarray(by_feature(widest, x.shape[1:]))
  run = _compile(x.shape[1:], mechanism, shared_channels)
  size = min(_CHUNK, len(x))
  parts = []
  for start in range(0, len(x), max(size, 1)):
    take = slice(start, start + size)
    # Every chunk is padded to one size, so that one compilation serves all chunks.
    missing = size - len(ids[take])
    padded = np.pad(x[take], [(0, missing)] + [(0, 0)] * (x.ndim - 1))
    out = run(key, np.pad(ids[take], (0, missing)), padded, shaped, steps)
    parts.append(np.asarray(out)[: len(ids[take])])
  return np.concatenate(parts) if parts else x


def noisy_batch(
  key: jax.Array,
  x: jax.Array,
  scales: jax.Array,
  *,
  mechanism: str = "laplace",
  shared_channels: bool = False,
) -> jax.Array:
  """Adds ONE map of noise to x [B, ...]: draws "batch" and "run". It protects nobody,
  because the difference of two records contains no noise.

  >>> key, x = jax.random.key(0), jnp.array([[1.0, 0.0], [0.0, 0.0]])
  >>> noisy = noisy_batch(key, x, jnp.ones(2))
  >>> jnp.allclose(noisy[0] - noisy[1], x[0] - x[1], atol=1e-5).item()
  True
  """
  x = source.as_floats(x)
  drawn = sample(
    key,
    scales,
    x.shape[1:],
    mechanism=mechanism,
    shared_channels=shared_channels,
    dtype=x.dtype,
  )
  return x + drawn[None]
