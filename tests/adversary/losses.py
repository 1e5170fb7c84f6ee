"""A generator of losses over the primitives of JAX, not over layers.

A `Recipe` is a list of steps; each takes values from a pool and puts its result, always of
shape [ROWS, COLS], back into it. The pool starts with the parameters and what the example
holds, so a step may see parameters only, data only, or both; a parameter may be used many
times, transformed, or not at all. `loss_of(recipe)` is a loss of ONE example.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

ROWS, COLS, WIDE = 3, 4, 1400  # [COLS, WIDE] is too large to be held per example
BATCH = 4
_AXIS = {"axis": 1, "keepdims": True}


def _spread(x):
  """Any shape [ROWS, n] -> [ROWS, COLS]: a row's sum beside its extremes."""
  parts = [x.sum(**_AXIS), x.max(**_AXIS), x[:, :1], x[:, -1:]]
  return jnp.concatenate(parts, axis=1)


@jax.custom_vjp
def _reversed_gradient(x):
  return x


_reversed_gradient.defvjp(lambda x: (x, None), lambda _, g: (-g,))


@jax.custom_vjp
def _clipped_gradient(x, w):
  return x * w


_clipped_gradient.defvjp(
  lambda x, w: (x * w, (x, w)),
  lambda saved, g: (jnp.clip(g, -1, 1) * saved[1], jnp.clip(g * saved[0], -1, 1)),
)


@jax.custom_jvp
def _smooth_abs(x):
  return jnp.abs(x)


_smooth_abs.defjvp(lambda x, t: (jnp.abs(x[0]), jnp.tanh(x[0]) * t[0]))


def _scanned(x, w):
  def step(carry, row):
    carry = jnp.tanh(carry * w[0] + row)
    return carry, carry + w[1]

  carry, rows = lax.scan(step, jnp.zeros_like(x[0]), x)
  return rows + carry[None]


def _sliced_scan(x, w):
  step = lambda carry, both: (carry + both[0] * both[1], both[1] @ both[0])
  carry, dots = lax.scan(step, w[0], (x, w))
  return carry[None] + dots[:, None] * jnp.ones_like(x)


def _counted(x, w):
  return lax.fori_loop(0, 3, lambda i, h: jnp.sin(h + w) * (1 + x), x)


def _cond(x, w):
  hot = x.sum() > w.sum()
  return lax.cond(hot, lambda a, b: a * b, lambda a, b: a - 2 * b, x, w)


def _conv(x, w):
  numbers = ("NHC", "HIO", "NHC")
  kernel = w.reshape(3, 1, 4)
  y = lax.conv_general_dilated(
    x.reshape(1, -1, 1), kernel, (1,), "SAME", dimension_numbers=numbers
  )
  return y.reshape(ROWS, COLS, 4).sum(axis=2)


def _one_hot(x):
  positive = jnp.nan_to_num(jnp.abs(x), nan=0.0, posinf=0.0)
  return (positive[:, 0] > positive[:, 1]).astype(jnp.int32) + jnp.argmax(x, axis=1) % 2


def _fft(x, w):
  return jnp.fft.ifft(jnp.fft.fft(x, axis=1) * w.astype(_complex(x)), axis=1).real


def _complex(x):
  return jnp.promote_types(x.dtype, jnp.complex64)


def _phase(x, w):
  z = lax.complex(x, w) * lax.complex(w, 2 * x)
  return z.real * z.imag


def _complex_scan(x, w):
  turn = w.astype(_complex(x))
  step = lambda z, row: (z * turn[0] + row.astype(_complex(x)) * 1j, (z * z).imag)
  z, rows = lax.scan(step, jnp.zeros_like(turn[0]), x)
  return rows + jnp.abs(z)[None]


def _complex_dot(x, w):
  return _spread(((x * 1j) @ w.astype(_complex(x)).T).imag)


def _padded(x, w):
  big = jnp.pad(x, ((1, 0), (0, 2))) + jnp.pad(w, ((0, 1), (2, 0)))
  return big[1:, 1:5]


def _through(dtype):
  return lambda x, w: (x.astype(dtype) * w.astype(dtype)).astype(x.dtype)


UNARY = {
  "neg": jnp.negative,
  "sin": jnp.sin,
  "tanh": jnp.tanh,
  "exp": lambda x: jnp.exp(jnp.minimum(x, 20)),
  "log": lambda x: jnp.log(jnp.abs(x)),
  "log1p": lambda x: jnp.log1p(x * x),
  "sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
  "rsqrt": lambda x: lax.rsqrt(jnp.abs(x)),
  "square": jnp.square,
  "cube": lambda x: lax.integer_pow(x, 3),
  "logistic": jax.nn.sigmoid,
  "erf": jax.scipy.special.erf,
  "abs": jnp.abs,
  "reciprocal": lambda x: 1 / x,
  "relu": lambda x: jnp.maximum(x, 0),
  "clamp": lambda x: jnp.clip(x, -1, 1),
  "softmax": lambda x: jax.nn.softmax(x, axis=1),
  "normalize": lambda x: x / jnp.sqrt(jnp.sum(x * x, **_AXIS)),
  "standardize": lambda x: x - jnp.mean(x, **_AXIS),
  "cumsum": lambda x: jnp.cumsum(x, axis=0),
  "cumprod": lambda x: jnp.cumprod(x, axis=1),
  "cummax": lambda x: lax.cummax(x, axis=1),
  "cumlogsumexp": lambda x: lax.cumlogsumexp(x, axis=1),
  "sort": lambda x: jnp.sort(x, axis=1),
  "top": lambda x: jnp.concatenate([lax.top_k(x, 2)[0]] * 2, axis=1),
  "reverse": lambda x: x[::-1],
  "turn": lambda x: x.T.reshape(ROWS, COLS),
  "sum": lambda x: jnp.sum(x, **_AXIS) * jnp.ones_like(x),
  "max": lambda x: jnp.broadcast_to(jnp.max(x, **_AXIS), x.shape),
  "prod": lambda x: jnp.broadcast_to(jnp.prod(x, **_AXIS), x.shape),
  "window": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "SAME"),
  "stop": lax.stop_gradient,
  "reversed_gradient": _reversed_gradient,
  "smooth_abs": _smooth_abs,
  "remat": jax.checkpoint(lambda x: jnp.sin(x) * jnp.cos(x)),
  "jit": jax.jit(lambda x: x * jnp.tanh(x)),
  "power_spectrum": lambda x: jnp.abs(jnp.fft.fft(x, axis=1)) ** 2,
}
BINARY = {
  "add": jnp.add,
  "sub": jnp.subtract,
  "mul": jnp.multiply,
  "div": jnp.divide,
  "maximum": jnp.maximum,
  "minimum": jnp.minimum,
  "atan2": jnp.arctan2,
  "pow": lambda x, w: jnp.abs(x) ** jnp.clip(w, -2, 2),
  "bias": lambda x, w: x + w[:1],
  "scale": lambda x, w: x * w[:, :1],
  "select": lambda x, w: jnp.where(x > 0, w, x),
  "dot": lambda x, w: _spread(x @ w.T),
  "outer": lambda x, w: x[:1].T[:ROWS] * w[:1],
  "batch_dot": lambda x, w: jnp.einsum("rc,rd->rd", x, w),
  "row": lambda x, w: (x[0] @ w.T)[:, None] * jnp.ones_like(x),
  "conv": _conv,
  "gather": lambda x, w: w[_one_hot(x)],
  "take": lambda x, w: jnp.take_along_axis(w, _one_hot(x)[:, None], axis=1) * x,
  "dynamic_slice": lambda x, w: lax.dynamic_slice(
    jnp.concatenate([w, x]), (_one_hot(x)[0], 0), (ROWS, COLS)
  ),
  "update": lambda x, w: lax.dynamic_update_slice(x, w[:1], (_one_hot(x)[1], 0)),
  "scatter": lambda x, w: x.at[_one_hot(x)].add(w),
  "concatenate": lambda x, w: jnp.concatenate([x[:, :2], w[:, 2:]], axis=1),
  "pad": _padded,
  "scan": _scanned,
  "sliced_scan": _sliced_scan,
  "fori": _counted,
  "cond": _cond,
  "clipped_gradient": _clipped_gradient,
  "remat_dot": jax.checkpoint(lambda x, w: jnp.tanh(_spread(x @ w.T))),
  "low_rank": lambda x, w: x @ (w.T @ w),
  "cancel": lambda x, w: (x + 1e4) * w - 1e4 * w,
  "bfloat16": _through(jnp.bfloat16),
  "float16": _through(jnp.float16),
  "fft": _fft,
  "phase": _phase,
  "complex_scan": _complex_scan,
  "complex_dot": _complex_dot,
}
# With the large parameter [COLS, WIDE].
LARGE = {
  "wide_dot": lambda x, v: _spread(jnp.sin(x @ v)),
  "wide_row": lambda x, v: _spread(x[0][None] @ v) * jnp.ones_like(x),
  "wide_mul": lambda x, v: _spread((x.T[:, :1] * v)[:ROWS]),
  "wide_div": lambda x, v: _spread((v / x.T[:, :1])[:ROWS]),
  "wide_transformed": lambda x, v: _spread(x @ (v - jnp.mean(v, axis=0, keepdims=True))),
  "wide_twice": lambda x, v: _spread(x @ v) - _spread(jnp.flip(x, 0) @ jnp.tanh(v)),
  "wide_clipped": lambda x, v: _spread(_clipped_gradient(x.T[:, :1] * 1.0 + 0 * v, v)[:3]),
  "wide_table": lambda x, v: v.reshape(-1, COLS)[_one_hot(x) * 7],
}
_HALF = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What a loss is made of; the sizes are powers of ten."""

  steps: tuple[tuple[str, int, int], ...]  # (name, two places in the pool from its end)
  param_size: float
  example_sizes: tuple[float, ...]  # [BATCH]
  loss_size: float
  specials: tuple[str, ...]  # [BATCH]: "", "nan", "inf", "zero" or "some_zero"
  clip_norm: float
  seed: int

  @property
  def is_large(self):
    return any(name in LARGE for name, *_ in self.steps)

  @property
  def is_moderate(self):
    """No number is so large or small that its square leaves the normal range."""
    sizes = [self.param_size, *self.example_sizes, self.loss_size]
    return max(map(abs, sizes)) <= 2 and not any(name in _HALF for name, *_ in self.steps)


def loss_of(recipe):
  """`(params, ONE example) -> scalar`."""

  def loss(params, example):
    pool = [params["a"], params["b"], params["a"] - params["b"], example["y"], example["x"]]
    for name, first, second in recipe.steps:
      x, w = pool[-1 - first % len(pool)], pool[second % len(pool)]
      if name in UNARY:
        pool.append(UNARY[name](x))
      elif name in BINARY:
        pool.append(BINARY[name](x, w))
      else:
        pool.append(LARGE[name](x, params["v"]))
    weights = jnp.arange(1.0, 1 + ROWS * COLS, dtype=x.dtype).reshape(ROWS, COLS)
    return jnp.sum(pool[-1] * weights) * (10.0**recipe.loss_size)

  return loss


def data_of(recipe):
  """(params, batch, mask), NumPy float32; the last example is masked and holds NaN."""
  rng = np.random.default_rng(recipe.seed)
  draw = lambda *shape: rng.normal(size=shape)
  params = {name: draw(ROWS, COLS) for name in ("a", "b", "unused")}
  if recipe.is_large:
    params["v"] = draw(COLS, WIDE)
  params = {k: np.float32(v * 10.0**recipe.param_size) for k, v in params.items()}
  sizes = (10.0 ** np.asarray(recipe.example_sizes)).reshape(-1, 1, 1)
  batch = {name: np.float32(draw(BATCH, ROWS, COLS) * sizes) for name in ("x", "y")}
  for i, special in enumerate(recipe.specials):
    _spoil(batch, i, special)
  mask = np.arange(BATCH) < BATCH - 1
  batch["x"][-1, 0] = np.nan
  return params, batch, mask


def _spoil(batch, i, special):
  if special in ("nan", "inf"):
    batch["x"][i, 1, 1] = float(special)
  if special == "zero":
    batch["x"][i] = batch["y"][i] = 0
  if special == "some_zero":
    batch["x"][i, :, ::2] = 0


def recipes():
  """Strategy of recipes: half of them of moderate size, half from 1e-30 to 1e30."""
  return st.sampled_from([2.0, 30.0]).flatmap(_recipes_within)


def _recipes_within(reach):
  size = st.floats(-reach, reach) | st.just(0.0)
  names = st.sampled_from(sorted({**UNARY, **BINARY, **LARGE}))
  step = st.tuples(names, st.integers(0, 2), st.integers(0, 6))
  return st.builds(
    Recipe,
    steps=st.lists(step, min_size=1, max_size=4).map(tuple),
    param_size=size,
    example_sizes=st.tuples(*[size] * BATCH),
    loss_size=size,
    specials=st.tuples(
      *[st.sampled_from(["", "", "", "nan", "inf", "zero", "some_zero"])] * BATCH
    ),
    clip_norm=st.sampled_from([1e-12, 1e-3, 1.0, 1e3]),
    seed=st.integers(0, 2**16),
  )
