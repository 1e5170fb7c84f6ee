"""Costs of the rules per example, for choosing between them; `row_forms` defines N, T, K, P.

| rule         | flops                | elements moved       | then, for the sum            |
| ------------ | -------------------- | -------------------- | ---------------------------- |
| outer (T=1)  | 2 N (K + P)          | N (K + P)            | second transpose, 2 N T K P  |
| gram         | 2 N T^2 (K + P)      | N T (K + P + 2 T)    | second transpose, 2 N T K P  |
| product      | 2 N T K P            | N (T (K + P) + K P)  | second transpose, 2 N T K P  |
| product held | 2 N T K P            | N (T (K + P) + K P)  | none: sum_i c_i a_i^T g_i    |
| gradient     | the sites' transpose | sites' arrays + leaf | held, or the same once more  |

seconds = flops / rate + elements * cost. The constants below were measured, float32:

- cpu (2 cores). Convolutions were 3x3, of 8x8 to 32x32 positions and 3 to 128 channels. Batched
  products over a whole batch of patches ran at 7-15 Gflop/s. The same products ran at 50-110 one
  example at a time in a loop: patches stay in the cache, and no memory is faulted in. XLA's own
  weight gradient ran at 40-90, gram products (square matrices) at 110-210. A convolution inside a
  loop ran at 1, so no convolution with a row form is put into a loop. (This was before
  `convolutions.py`, whose layout is as fast inside as outside.)
  With patches of 3,300 to 15,900 elements an example (networks of MNIST, of RADP and on
  scattering features) a whole step took .37 to 1.05 times as long with the loop as without.
  Smaller patches were not measured. A loop leaves cores idle that a batch would use, so with
  many cores another constant may be better.
  Dense sites of 16 to 256 rows and 192 to 1024 columns, whose sides are the recorded
  arrays themselves: products, gram products and weight gradients all ran at 140-195 Gflop/s,
  in a batch as in a loop. But a product that is freed after its norm is faster in a loop, where
  it stays in the cache.
  Holding a product cost 0.1-0.3 ns per element up to the size of the arrays recorded at its
  site, which can be freed for it. Beyond that it cost 1.5-1.9 ns, since those pages are new.
  A matrix that an index chooses (a mixture of experts) is data where it meets the example.
  Its cotangent is an outer product that XLA fuses into the scatter-add of an ordinary or
  a stacked gradient. If it is recorded, it is written, read for the norm, scaled and scattered.
  The experts were one leaf of 2 to 64 matrices of 2048 to 16384 elements, 1 to 16 of them
  chosen by an example. Recording took 1.1-6 times as long as stacking where the leaf was up to
  3 times as large as the chosen matrices, and 0.3-1 times where it was larger. So up to that
  ratio the backward pass itself forms the leaf's gradient per example (`stacks`).
- gpu (H100, jax 0.11.2, results/h100/parts.csv). A copy moved 2.9 TB/s. Batched products of patches
  in TF32 ran at 90 to 190 Tflop/s. Gram products in three parts of TF32 ran at 36 to 50 in a GPT
  and in networks of convolutions (9 to 33 alone, for 64 to 128 rows of 192 to 288 numbers). Whole
  products in TF32 ran at 107 to 258, weight gradients of convolutions at 23 to 155. A convolution's
  gradients of single examples, which vmap makes a grouped convolution, ran at .2 to 9. They took 3
  to 60 times as long as products of patches. Examples are looped over only in chunks of 2^28
  numbers, to bound memory.
- tpu: not measured. It has the constants of the GPU, and keeps grouped convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpjax.gradients.ghost.row_forms import RowForm


class Platform(NamedTuple):
  """Measured constants of one kind of machine."""

  product_rate: float  # flops per second of a^T g
  gram_rate: float
  transpose_rate: float  # of the second transpose
  dense_rate: float  # of the second transpose where the sides are the recorded arrays
  dense_product_rate: float  # of a^T g there
  dense_gram_rate: float
  dense_elements: bool  # whether elements are moved there: a CPU has them in its cache
  element_seconds: float  # to write and read back one float32
  hold_seconds: float  # the same, of a product that outlives its norm
  fault_seconds: float  # added for its elements beyond those recorded at its site
  loop_above: int  # elements per example above which examples are taken in a loop
  patches_above: int  # the same, where the patches of a convolution are among them
  loop_elements: int  # elements per turn of that loop, which takes at least one example
  # Largest ratio of held products to the operands and cotangents that are held in any case. With
  # it, memory stays a small multiple of that for an ordinary gradient.
  hold_share: float


_PLATFORMS = {
  "cpu": Platform(
    product_rate=80e9,
    gram_rate=140e9,
    transpose_rate=70e9,
    dense_rate=170e9,
    dense_product_rate=170e9,
    dense_gram_rate=170e9,
    dense_elements=False,
    element_seconds=0.4e-9,
    hold_seconds=0.3e-9,
    fault_seconds=1.3e-9,
    loop_above=16_384,
    patches_above=3000,
    loop_elements=0,
    hold_share=2.0,
  ),
  "gpu": Platform(
    product_rate=100e12,
    gram_rate=45e12,
    transpose_rate=100e12,
    dense_rate=250e12,
    dense_product_rate=100e12,
    dense_gram_rate=40e12,
    dense_elements=True,
    element_seconds=2.75e-12,
    hold_seconds=1.4e-12,
    fault_seconds=0.0,
    loop_above=0,
    patches_above=0,
    loop_elements=2**28,
    hold_share=1.25,
  ),
}

# Largest ratio of a convolution's held gradient, on a TPU, to the arrays recorded at its site.
_HOLD_CONVOLUTION = 1.5
# Number of elements that fit a CPU's cache. Gradients for a sum are formed in groups of this size,
# and of at least one gradient.
_IN_CACHE = 2**18
# Largest ratio of a leaf to the matrices that an example gathers, at which gradients are stacked.
_STACK_UP_TO = 3.0
# Largest number of elements of one example's gradient for which `gradient` says that holding pays.
_HOLD_AT_MOST = 2**20


def constants(platform: str) -> Platform:
  """Returns the constants of a backend: those of the CPU, or of the GPU for all accelerators."""
  return _PLATFORMS["cpu" if platform == "cpu" else "gpu"]


class Cost(NamedTuple):
  """Work of one rule for one example."""

  flops: float
  elements: float  # float32 numbers written and read back
  is_gram: bool = False
  fused: bool = False  # nothing large is formed, or it is held: never worth a loop
  is_dense: bool = False  # the sides are the recorded arrays, already in the cache
  patches: bool = False  # a side is copied together from overlapping parts of an array

  def seconds(self, platform: str) -> float:
    """Returns the estimated seconds for one example."""
    machine = constants(platform)
    rate = machine.gram_rate if self.is_gram else machine.product_rate
    moved = self.elements
    if self.is_dense:
      rate = machine.dense_gram_rate if self.is_gram else machine.dense_product_rate
      moved = self.elements * machine.dense_elements
    return self.flops / rate + moved * machine.element_seconds


def _sides(form: RowForm) -> int:
  left = form.width or form.left * (not form.one_hot)
  return form.blocks * form.rows * (left + form.right)


def _recorded(forms: Sequence[RowForm]) -> int:
  return sum(form.recorded for form in forms)


def _dense(forms: Sequence[RowForm]) -> bool:
  return all(form.plain for form in forms)


def _patches(forms: Sequence[RowForm]) -> bool:
  return any(not (form.plain or form.one_hot) for form in forms)


def outer(form: RowForm) -> Cost:
  """Returns the cost of |a|^2 |g|^2, the squared norm for a single row."""
  return Cost(2 * _sides(form), _sides(form), fused=True)


def gram(forms: Sequence[RowForm], platform: str) -> Cost:
  """Returns the cost of the T x T products of both sides, where T counts the rows of all sites."""
  if len(forms) == 1 and by_places(forms[0], platform):
    return _gram_of_places(forms[0])
  rows = sum(form.rows for form in forms)
  flops = sum(2 * rows * _sides(form) for form in forms)
  pairs = 2 * rows * rows * forms[0].blocks
  patches = _patches(forms)
  return Cost(
    flops,
    pairs + sum(map(_sides, forms)),
    is_gram=True,
    fused=not patches and pairs <= _recorded(forms),
    is_dense=_dense(forms),
    patches=patches,
  )


def by_places(form: RowForm, platform: str) -> bool:
  """Returns whether inner products of windows are cheaper as sums of inner products of places.

  With a stride, for example, windows overlap little. Then there are fewer windows than places, so
  products of windows are cheaper.
  """
  if form.places is None:
    return False
  pairs = form.places.count**2
  if platform != "cpu":
    # An accelerator is bound by memory. So the numbers of both grams, of places and of windows, are
    # compared with those of copied windows.
    return pairs + form.rows**2 < form.rows * form.left
  # A CPU copies a number about as fast as it multiplies one. Near a tie the factor 2 decides for
  # copied windows, which need less memory than pairs of places.
  copied = form.rows * (form.rows + 1) * form.left
  return 2 * (pairs * form.places.channels + form.rows**2 * form.places.offsets) < copied


def _gram_of_places(form: RowForm) -> Cost:
  places = form.places
  assert places is not None
  of_places = places.count**2
  of_rows = form.rows**2
  right = form.blocks * form.rows * form.right
  flops = 2 * form.blocks * of_places * places.channels + 2 * form.rows * right
  sums = form.blocks * of_rows * places.offsets
  elements = form.blocks * (of_places + 2 * of_rows)
  return Cost(
    flops + sums,
    form.recorded + elements,
    is_gram=True,
    fused=elements <= form.recorded,
  )


def size(form: RowForm) -> int:
  """Returns the number of elements of one product a^T g, over all blocks."""
  return form.blocks * form.left * form.right


def product(forms: Sequence[RowForm], platform: str) -> tuple[Cost, bool]:
  """Returns the cost of a^T g for one example, and whether to hold this product for the sum."""
  light = size(forms[0]) <= constants(platform).hold_share * _recorded(forms)
  hold = light and holding(forms, platform) < contraction(forms, platform)
  cost = Cost(
    sum(map(_flops, forms)),
    sum(map(_sides, forms)) + size(forms[0]),
    fused=hold and _dense(forms),
    is_dense=_dense(forms),
    patches=_patches(forms),
  )
  return cost, hold


def holding(forms: Sequence[RowForm], platform: str) -> float:
  """Estimates the seconds to hold one example's product until the sum, and to sum it."""
  machine = constants(platform)
  elements = size(forms[0])
  new = max(0, elements - _recorded(forms))
  return elements * machine.hold_seconds + new * machine.fault_seconds


def _flops(form: RowForm) -> int:
  if form.one_hot:
    return form.blocks * form.rows * form.right
  return 2 * form.rows * size(form)


def contraction(forms: Sequence[RowForm], platform: str) -> float:
  """Estimates the seconds of the transpose that forms the clipped sum, for one example."""
  machine = constants(platform)
  rate = machine.dense_rate if _dense(forms) else machine.transpose_rate
  scaled = sum(form.blocks * form.rows * form.right for form in forms)  # c_i g_i
  moved = scaled * machine.dense_elements * machine.element_seconds
  return sum(map(_flops, forms)) / rate + moved


def holds_convolution(name: str, forms: Sequence[RowForm]) -> bool:
  """Returns whether a TPU forms and holds each example's gradient of a convolution.

  vmap turns the transpose of the convolution into a grouped convolution, which reads the recorded
  arrays as they are. The row form would first copy the operand into patches, once for each place of
  the kernel.
  """
  form = forms[0]
  is_alone = len(forms) == 1 and name == "conv_general_dilated" and copies_windows(form)
  return is_alone and size(form) <= _HOLD_CONVOLUTION * form.recorded


def copies_windows(form: RowForm) -> bool:
  """Returns whether the rows are windows that overlap, so that they are more numbers than were
  recorded."""
  return not form.plain and _sides(form) > form.recorded


def held_convolution(form: RowForm) -> Cost:
  """Returns the cost of a convolution's gradient of one example, which is held for the sum."""
  return Cost(_flops(form), form.recorded + 3 * size(form), fused=True)


def gradient(work: int, leaf_size: int, heavy: bool) -> tuple[Cost, bool]:
  """Returns the cost of the general rule, and whether it pays to hold the gradients of examples.

  It pays for gradients of up to 4096 elements, and for gradients of up to `_HOLD_AT_MOST` elements
  that are at most a quarter as large as the arrays that their sites touch.
  """
  small = leaf_size * 4 <= work or leaf_size <= 4096
  cost = Cost(2 * work, work + 2 * leaf_size, fused=not heavy)
  return cost, small and leaf_size <= _HOLD_AT_MOST


def stacks(leaf_size: int, gathered: int) -> bool:
  """Returns whether a leaf's gradient of one example costs less than recording gathered matrices.

  Args:
    leaf_size: number of elements of the parameter, over all experts.
    gathered: number of elements of the matrices that one example's indices choose from it.
  """
  return leaf_size <= _STACK_UP_TO * gathered


def in_flight(cost: Cost, platform: str) -> int:
  """Returns the number of examples whose gradients are formed at once for the sum, if they
  are not held."""
  at_most = constants(platform).loop_elements or _IN_CACHE
  return max(1, int(at_most // max(cost.elements, 1)))


def chunk(cost: Cost, platform: str) -> int | None:
  """Returns the number of examples per turn of a compiled loop; None for the whole batch at
  once."""
  machine = constants(platform)
  above = machine.patches_above if cost.patches else machine.loop_above
  if cost.fused or cost.elements <= above:
    return None
  return max(1, int(machine.loop_elements // cost.elements))
