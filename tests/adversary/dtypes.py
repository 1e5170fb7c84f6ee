"""A generator of losses over floating-point types: which parameter has which, and where the
loss casts.

A `Recipe` is a list of layers. Each casts its parameter there and back (`before`), computes in
a type of its own (`inside`), and casts its result there and back (`after`). The last result is
summed in float32. `loss_of(recipe)` is a loss of ONE example.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

ROWS, COLS = 3, 4
BATCH = 4
DTYPES = (
  "float32",
  "bfloat16",
  "float16",
  "float8_e4m3fn",
  "float8_e5m2",
  "float8_e4m3b11fnuz",
  "float8_e4m3fnuz",
  "float8_e5m2fnuz",
)


def _rows(h):
  return jnp.argmax(h, axis=1) % ROWS


def _scanned(h, w):
  """The parameter is a constant of the loop, and where its carry begins."""
  step = lambda carry, row: (carry + (row[None] @ w)[0], carry * w[0])
  carry, rows = lax.scan(step, w[1], h)
  return rows + carry[None]


def _stepped(h, w):
  """The loop steps through the parameter."""
  step = lambda carry, both: (carry + both[0] * both[1], both[1] @ both[0])
  carry, dots = lax.scan(step, jnp.zeros_like(h[0]), (h, w[:ROWS]))
  return carry[None] + dots[:, None] * jnp.ones_like(h)


def _conv(h, w):
  numbers = ("NHC", "HIO", "NHC")
  return lax.conv_general_dilated(
    h[None], w[None].repeat(2, 0), (1,), "SAME", dimension_numbers=numbers
  )[0]


# Of h [ROWS, COLS] and w [COLS, COLS], in one type: [ROWS, COLS].
LAYERS = {
  "dense": lambda h, w: h @ w,
  "transposed": lambda h, w: jnp.einsum("rc,dc->rd", h, w),
  "row": lambda h, w: (h[0] @ w)[None] + h,
  "scale": lambda h, w: h * w[:1],
  "bias": lambda h, w: h + w[:1],
  "reshaped": lambda h, w: h + w.reshape(-1)[:COLS].reshape(1, COLS),
  "joined": lambda h, w: h @ jnp.concatenate([w[:2], w[2:]]),
  "halved": lambda h, w: jnp.concatenate([h @ w[:, :2], h @ w[:, 2:]], axis=1),
  "transformed": lambda h, w: h @ jnp.tanh(w),
  "tied": lambda h, w: (h @ w) @ w.T,
  "divided": lambda h, w: h / (2 + jnp.abs(w[:1])),
  "table": lambda h, w: w[_rows(h)] + h,
  "scan": _scanned,
  "stepped": _stepped,
  "conv": _conv,
  "remat": jax.checkpoint(lambda h, w: jnp.tanh(h @ w)),
  "call": jax.jit(lambda h, w: h @ w + w[:1]),
  "chosen": lambda h, w: lax.cond(
    h[0, 0] > 0, lambda a, b: a @ b, lambda a, b: a - b[:1], h, w
  ),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What a loss is made of; the sizes are powers of ten."""

  # (layer, parameter, types before, inside and after)
  layers: tuple[tuple[str, str, str, str, str], ...]
  dtypes: tuple[str, str]  # of the parameters
  example_sizes: tuple[float, ...]  # [BATCH]
  loss_size: float
  clip_norm: float
  seed: int


def loss_of(recipe):
  """`(params, ONE example) -> scalar`."""

  def loss(params, example):
    h = example
    for layer, name, before, inside, after in recipe.layers:
      w = params[name].astype(before).astype(inside)
      h = LAYERS[layer](h.astype(inside), w).astype(after).astype(jnp.float32)
    weights = jnp.arange(1.0, 1 + ROWS * COLS).reshape(ROWS, COLS)
    return jnp.sum(h * weights) * (10.0**recipe.loss_size)

  return loss


def data_of(recipe):
  """(params, batch, mask); the last example is masked."""
  rng = np.random.default_rng(recipe.seed)
  params = {
    name: jnp.asarray(rng.normal(size=(COLS, COLS)), jnp.float32).astype(dtype)
    for name, dtype in zip("ab", recipe.dtypes)
  }
  sizes = 10.0 ** np.asarray(recipe.example_sizes).reshape(-1, 1, 1)
  batch = np.float32(rng.normal(size=(BATCH, ROWS, COLS)) * sizes)
  return params, batch, np.arange(BATCH) < BATCH - 1


def recipes():
  """Strategy of recipes: half of them of sizes that a float16 can hold, half from 1e-30 to
  1e30."""
  return st.sampled_from([2.0, 30.0]).flatmap(_recipes_within)


def _recipes_within(reach):
  size = st.floats(-reach, reach) | st.just(0.0)
  dtype = st.sampled_from(DTYPES)
  # Wide numbers are as frequent as all narrow ones: else every product overflows.
  either = st.just("float32") | dtype
  layer = st.tuples(
    st.sampled_from(sorted(LAYERS)), st.sampled_from("ab"), either, either, either
  )
  return st.builds(
    Recipe,
    layers=st.lists(layer, min_size=1, max_size=3).map(tuple),
    dtypes=st.tuples(dtype, dtype),
    example_sizes=st.tuples(*[size] * BATCH),
    loss_size=size,
    clip_norm=st.sampled_from([1e-12, 1e-3, 1.0, 1e3]),
    seed=st.integers(0, 2**16),
  )
