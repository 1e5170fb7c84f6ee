"""Parts that clipped gradients are made of, timed by themselves on the machine at hand.

  python -m benchmarks parts --workloads=products,convolutions

It writes parts.csv.

The constants of `dpjax.gradients.ghost.cost_model` are read off these. Each part is compiled,
warmed up and called several times in a row; the best of three such rows counts.
"""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from jax import lax

from benchmarks import calls, options
from benchmarks import entries as entries_file
from dpjax import validate
from dpjax.gradients.ghost import precision, row_forms
from dpjax.gradients.ghost.explain import aligned

_PRECISIONS: dict[str, Any] = {
  "default": None,
  "highest": lax.Precision.HIGHEST,
  "tf32 x3": lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
  "bfloat16 x3": lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
  "bfloat16 x6": lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
}
_PRODUCTS = ((1024, 2048, 1024), (4096, 4096, 4096), (192, 33280, 768), (256, 16384, 1024))
_GRAMS = ((128, 128, 256), (512, 65, 192), (1024, 64, 288))
_ROWS_OF_CALLS = 3
_LEAST_SECONDS = 0.02  # of a row of calls


class Layer(NamedTuple):
  """A convolution of square images [B, size, size, channels] by square kernels."""

  batch: int
  size: int
  channels: int
  kernel: int
  stride: int
  padding: tuple[int, int]
  features: int

  @property
  def places(self) -> int:
    """Places of the output along one axis."""
    return (self.size + sum(self.padding) - self.kernel) // self.stride + 1

  @property
  def name(self) -> str:
    image = f"{self.batch}x{self.size}x{self.size}x{self.channels}"
    return f"{image} by {self.kernel}x{self.kernel}/{self.stride} to {self.features}"


# Of the gradients' workloads at the batch sizes of accelerators.
_LAYERS = (
  Layer(2048, 28, 1, 8, 2, (3, 3), 16),
  Layer(2048, 13, 16, 4, 2, (0, 0), 32),
  Layer(1024, 32, 32, 3, 1, (1, 1), 32),
  Layer(1024, 16, 64, 3, 1, (1, 1), 64),
  Layer(1024, 8, 128, 3, 1, (1, 1), 128),
  Layer(8192, 7, 81, 3, 2, (1, 1), 16),
  Layer(8192, 4, 16, 3, 1, (1, 1), 32),
  Layer(1024, 32, 64, 3, 1, (1, 1), 64),
  Layer(1024, 16, 128, 3, 1, (1, 1), 128),
  Layer(1024, 8, 256, 3, 1, (1, 1), 256),
)
_MOST_PLACES = 256  # whose gram matrices fit


class Entry(NamedTuple):
  """One way of one part; None where it did not run."""

  kind: str
  shape: str
  way: str
  status: str  # "ok", or why it did not run
  seconds: float | None = None
  rate: float | None = None  # flops per second; bytes per second of a copy
  temporary_bytes: float | None = None
  device: str = ""


def _of_layer(layer: Layer) -> dict[str, Callable]:
  """Returns ways to the clipped gradient of a convolution: (x, cotangents) -> (sum, norms)."""
  strides = (layer.stride, layer.stride)
  pads = (layer.padding, layer.padding)
  layout = ("NHWC", "HWIO", "NHWC")
  side = layer.kernel
  kernel = jnp.zeros((side, side, layer.channels, layer.features))
  rows = layer.places**2
  ones = (1, 1)
  form = {"padding": pads, "window_strides": strides}
  form |= {"lhs_dilation": ones, "rhs_dilation": ones}

  def weight_gradient(x, cotangents):
    convolve = lambda w: lax.conv_general_dilated(
      x, w, strides, pads, dimension_numbers=layout
    )
    return jax.vjp(convolve, kernel)[1](cotangents)[0]

  def windows(x):
    cuts = row_forms.windows(x, form, (side, side), (layer.places, layer.places))
    return cuts.reshape(layer.batch, rows, -1)

  def clipped(grads):
    held = lax.optimization_barrier(grads).reshape(layer.batch, -1)
    norms = jnp.sqrt(jnp.sum(held * held, axis=1))
    factors = jnp.minimum(1, 1 / norms)
    total = jnp.einsum("b,bk->k", factors, held, precision=lax.Precision.HIGHEST)
    return total, norms

  def grouped(x, cotangents):
    one = lambda x, g: weight_gradient(x[None], g[None])
    return clipped(jax.vmap(one)(x, cotangents))

  def patches(x, cotangents):
    right = cotangents.reshape(layer.batch, rows, -1)
    return clipped(
      jnp.einsum("ntk,ntp->nkp", windows(x), right, precision=lax.Precision.HIGH)
    )

  def gram(x, cotangents):
    product = lambda a: precision.gram("ntk,nsk->nts", a, a)
    right = cotangents.reshape(layer.batch, rows, -1)
    norms = jnp.sqrt(jnp.sum(product(windows(x)) * product(right), axis=(1, 2)))
    factors = jnp.minimum(1, 1 / norms).reshape(-1, 1, 1, 1)
    return weight_gradient(x, cotangents * factors), norms

  ways = {"ordinary": weight_gradient, "grouped": grouped, "patches": patches}
  return ways | ({"gram": gram} if rows <= _MOST_PLACES else {})


class Part(NamedTuple):
  """One way to compute one thing."""

  shape: str
  way: str
  work: float  # flops; bytes of a copy
  call: Callable
  args: tuple


def _normal(seed: int, *shape: int) -> jax.Array:
  return jax.random.normal(jax.random.key(seed), shape)


def _copies() -> Iterable[Part]:
  x = jnp.ones(2**28 if jax.default_backend() != "cpu" else 2**24)
  yield Part(f"{x.size}", "scaled", 2.0 * x.nbytes, lambda x: x * 1.5, (x,))


def _products() -> Iterable[Part]:
  for left, inner, right in _PRODUCTS:
    args = (_normal(0, inner, left), _normal(1, inner, right))
    shape = f"{left}x{inner}x{right}"
    for way, chosen in _PRECISIONS.items():
      call = functools.partial(jnp.einsum, "tk,tp->kp", precision=chosen)
      yield Part(shape, way, 2.0 * left * inner * right, call, args)


def _grams() -> Iterable[Part]:
  for batch, rows, width in _GRAMS:
    side = _normal(0, batch, rows, width)
    shape = f"{batch}x{rows}x{width}"
    for way, chosen in _PRECISIONS.items():
      call = functools.partial(jnp.einsum, "ntk,nsk->nts", precision=chosen)
      yield Part(shape, way, 2.0 * batch * rows**2 * width, call, (side, side))


def _convolutions() -> Iterable[Part]:
  for layer in _LAYERS:
    size = (layer.batch, layer.places, layer.places, layer.features)
    image = (layer.batch, layer.size, layer.size, layer.channels)
    args = (_normal(0, *image), _normal(1, *size))
    flops = 2.0 * math.prod(size) * layer.kernel**2 * layer.channels
    for way, call in _of_layer(layer).items():
      yield Part(layer.name, way, flops, call, args)


_PARTS: dict[str, Callable[[], Iterable[Part]]] = {
  "copies": _copies,
  "products": _products,
  "grams": _grams,
  "convolutions": _convolutions,
}
KINDS = tuple(_PARTS)


def _entry(kind: str, part: Part) -> Entry:
  first = (kind, part.shape, part.way)
  device = jax.local_devices()[0].device_kind
  try:
    compiled = jax.jit(part.call).lower(*part.args).compile()
  # What a machine cannot multiply is said by its compiler, each in its own words and type.
  except Exception as error:
    reason = (str(error).splitlines() or [""])[0]
    return Entry(*first, f"did not compile: {reason[:80]}", device=device)
  run = calls.of(compiled, part.args)
  count = calls.enough(run, _LEAST_SECONDS)
  seconds = min(calls.seconds(run, count) for _ in range(_ROWS_OF_CALLS))
  memory: Any = compiled.memory_analysis()
  held = memory.temp_size_in_bytes
  return Entry(*first, "ok", seconds, part.work / seconds, held, device)


def measure(kind: str) -> list[Entry]:
  """Times all ways of the parts of a kind of `KINDS`."""
  validate.one_of(KINDS, workloads=kind)
  return [_entry(kind, part) for part in _PARTS[kind]()]


def table(entries: Iterable[Entry]) -> str:
  """Aligned text, one line per entry.

  >>> print(table([Entry("grams", "8x4x2", "highest", "ok", 2e-5, 3e12, 1e6)]))
  kind   shape  way      ms     T/s  temporary
  grams  8x4x2  highest  0.020  3.0  1 MB
  """
  cells = [("kind", "shape", "way", "ms", "T/s", "temporary")]
  for row in entries:
    start = (row.kind, row.shape, row.way)
    if row.seconds is None:
      cells.append((*start, "", "", row.status))
      continue
    rate = f"{(row.rate or 0) / 1e12:.1f}"
    held = f"{(row.temporary_bytes or 0) / 1e6:.0f} MB"
    cells.append((*start, f"{1e3 * row.seconds:.3f}", rate, held))
  return aligned(cells)


def write(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """`out`/parts.csv."""
  entries_file.write(out / "parts.csv", entries)


def define() -> None:
  """Defines the flags."""
  options.define_names("workloads", KINDS)


def parts(_: flags.FlagValues) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of each part that the flags ask for."""
  for kind in options.names("workloads", KINDS):
    yield kind, measure(kind)
