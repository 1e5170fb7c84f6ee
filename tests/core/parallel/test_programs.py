"""The work of a compiled program, counted from its text, against closed forms and brute force."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from dpjax import branches
from dpjax.parallel import programs
from dpjax.parallel.collectives import collectives


def _text(fn, *arguments):
  """As JAX hands it to the compiler: no optimisation has changed the products."""
  return jax.jit(fn).lower(*arguments).as_text(dialect="hlo")


_NHWC = ("NHWC", "HWIO", "NHWC")
# (input, kernel, strides, padding, dilation of the input, of the kernel, groups)
_CONVOLUTIONS = {
  "plain": ((2, 6, 5, 3), (3, 2, 3, 4), (1, 1), "VALID", (1, 1), (1, 1), 1),
  "padded and strided": ((2, 7, 6, 3), (3, 3, 3, 4), (2, 2), "SAME", (1, 1), (1, 1), 1),
  "transposed": ((2, 4, 4, 3), (3, 3, 3, 4), (1, 1), ((2, 1), (1, 1)), (2, 3), (1, 1), 1),
  "dilated": ((1, 8, 8, 2), (2, 3, 2, 4), (1, 2), ((1, 3), (0, 2)), (1, 1), (2, 2), 1),
  "by groups": ((2, 5, 5, 6), (3, 3, 2, 9), (1, 1), "SAME", (1, 1), (1, 1), 3),
}


@pytest.mark.cases(slow=[0, "padded and strided"])
@pytest.mark.parametrize("name", _CONVOLUTIONS)
def test_flops_of_a_convolution_are_twice_the_pairs_that_meet(name):
  shape, kernel, strides, padding, holes, dilation, groups = _CONVOLUTIONS[name]

  def convolve(x, k):
    return lax.conv_general_dilated(
      x,
      k,
      strides,
      padding,
      lhs_dilation=holes,
      rhs_dilation=dilation,
      dimension_numbers=_NHWC,
      feature_group_count=groups,
    )

  # A convolution of ones counts, for each output, the products that meet no padding or hole.
  pairs = float(jnp.sum(convolve(jnp.ones(shape), jnp.ones(kernel))))
  counts = programs.count_work(_text(convolve, jnp.ones(shape), jnp.ones(kernel)))
  assert counts.flops == 2 * pairs
  assert counts.narrow_flops == 0


def test_flops_of_products_with_batches_and_of_narrow_operands():
  x = jnp.ones((3, 5, 7))
  y = jnp.ones((3, 7, 11))
  product = lambda x, y: jnp.einsum("bij,bjk->bik", x, y)
  assert programs.count_work(_text(product, x, y)).flops == 2 * 3 * 5 * 7 * 11
  narrow = programs.count_work(_text(product, x.astype("bfloat16"), y.astype("bfloat16")))
  assert narrow.narrow_flops == narrow.flops == 2 * 3 * 5 * 7 * 11


def test_a_loop_is_its_body_times_its_trips_also_where_only_its_end_is_written():
  def loop(x, y):
    step = lambda carry, part: (carry @ part, None)
    return lax.scan(step, x, y)[0]

  arguments = jnp.ones((4, 4)), jnp.ones((6, 4, 4))
  plain = programs.count_work(_text(loop, *arguments))
  assert (plain.flops, plain.loops, plain.unknown_loops) == (6 * 2 * 4**3, 1, 0)
  # The compiler for CPUs states the trips, as that for GPUs does.
  compiled = jax.jit(loop).lower(*arguments).compile().as_text()
  assert "known_trip_count" in compiled
  assert programs.count_work(compiled).flops == 6 * 2 * 4**3


def test_a_loop_of_unknown_length_is_one_turn_and_said():
  def by_value(x):
    return lax.while_loop(lambda x: jnp.sum(x) < 9.0, lambda x: x @ x, x)

  def by_steps_of_its_own(x):
    step = lambda state: (state[0] * 2, state[1] @ state[1])
    return lax.while_loop(lambda state: state[0] < 9, step, (1, x))[1]

  for loop in (by_value, by_steps_of_its_own):
    counts = programs.count_work(_text(loop, jnp.ones((4, 4))))
    assert (counts.flops, counts.loops, counts.unknown_loops) == (2 * 4**3, 1, 1)


_PROGRAM = """HloModule m

%sliced (p.0: f32[10,100], p.1: s32[]) -> f32[1,100] {
  %p.0 = f32[10,100]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,100]{1,0} dynamic-slice(%p.0, %p.1, %zero), dynamic_slice_sizes={1,100}
}

%updated (p.2: f32[10,100], p.3: f32[1,100], p.4: s32[]) -> f32[10,100] {
  %p.2 = f32[10,100]{1,0} parameter(0)
  %p.3 = f32[1,100]{1,0} parameter(1)
  %p.4 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %update = f32[10,100]{1,0} dynamic-update-slice(%p.2, %p.3, %p.4, %zero.1)
}

%rare (p.5: f32[10,100]) -> f32[10,100] {
  %p.5 = f32[10,100]{1,0} parameter(0)
  ROOT %exp = f32[10,100]{1,0} exponential(%p.5)
}

%usual (p.6: f32[10,100]) -> f32[10,100] {
  ROOT %p.6 = f32[10,100]{1,0} parameter(0)
}

%never (p.7: f32[10,100]) -> f32[10,100] {
  %p.7 = f32[10,100]{1,0} parameter(0)
  %one = f32[] constant(1)
  ROOT %ones = f32[10,100]{1,0} broadcast(%one), dimensions={}
}

%end (p.8: f32[10,100]) -> pred[] {
  ROOT %p.8 = f32[10,100]{1,0} parameter(0)
}

%looped (p.9: f32[10,100]) -> f32[10,100] {
  %p.9 = f32[10,100]{1,0} parameter(0)
  ROOT %while = f32[10,100]{1,0} while(%p.9), condition=%end, body=%rare
}

ENTRY %main (a: f32[10,100], i: s32[], c: pred[]) -> f32[10,100] {
  %a = f32[10,100]{1,0:T(8,128)} parameter(0)
  %i = s32[] parameter(1)
  %c = pred[] parameter(2)
  %row = f32[1,100]{1,0} fusion(%a, %i), kind=kLoop, calls=%sliced
  %b = f32[10,100]{1,0} fusion(%a, %row, %i), kind=kLoop, calls=%updated
  %fast = f32[10,100]{1,0:T(8,128)S(1)} negate(%b)
  %back = f32[10,100]{1,0:T(8,128)} sine(%fast)
  %first = f32[10,100]{1,0} conditional(%c, %back, %back), branch_computations={%never, %rare}
  ROOT %end = f32[10,100]{1,0} conditional(%c, %first, %first), BRANCHES
}
""".replace("BRANCHES", "true_computation=%looped, false_computation=%usual")


def test_bytes_are_those_that_cross_the_memory_of_the_device():
  counts = programs.count_work(_PROGRAM)
  whole = 4 * 10 * 100
  row = 4 * 100
  # A slice reads its row and an update writes its row; both are told where. What lies in fast
  # memory costs nothing. One conditional takes the branch that is no constant, the other the one
  # without a loop.
  sliced = row + row + 4
  updated = row + row + 4
  assert counts.memory_bytes == sliced + updated + whole + whole + 2 * whole
  assert (counts.kernels, counts.fusions, counts.flops) == (5, 2, 0)


_PARTS = """HloModule m

ENTRY %main (x: f32[10,100]) -> f32[2,100] {
  %x = f32[10,100]{1,0} parameter(0)
  %start = TYPES slice-start(%x), slice={[2:4], [0:100]}
  %done = f32[2,100]{1,0SPACE} slice-done(%start)
  ROOT %copy = f32[2,100]{1,0} copy(%done)
}
"""


_PARTS_TYPES = "((f32[10,100]{1,0}), f32[2,100]{1,0SPACE}, s32[]{:S(2)})"


@pytest.mark.parametrize(("space", "moves"), [("", 4), (":S(1)", 2)])
def test_a_part_that_is_sent_for_early_is_its_own_bytes(space, moves):
  """Its results begin with the whole array, which is neither read nor written."""
  counts = programs.count_work(
    _PARTS.replace("TYPES", _PARTS_TYPES).replace("SPACE", space)
  )
  # The part is read, written, and both again by the copy; a small fast memory is no traffic.
  assert counts.memory_bytes == moves * 4 * 200


def test_what_is_sent_in_a_loop_is_sent_in_each_turn():
  text = """HloModule m

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %y = f32[8]{0} all-reduce(%x), replica_groups=mesh['a'=4,'b'=2] {'a'}, to_apply=%add
  ROOT %out = (s32[], f32[8]{0}) tuple(%i, %y)
}

ENTRY %main (q: (s32[], f32[8])) -> (s32[], f32[8]) {
  %q = (s32[], f32[8]{0}) parameter(0)
  ROOT %w = (s32[], f32[8]{0}) while(%q), condition=%cond, body=%body, TRIPS
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"5"}}')
  assert programs.count_work(text).sent_bytes == 5 * 8 * 4
  (exchange,) = collectives(text)
  assert (exchange.kind, exchange.group) == ("all-reduce", 4)


def test_branches_of_rare_examples_and_second_reads_are_not_counted():
  """The dearer branch is marked as rare; a product of an array with itself reads it once."""
  text = """HloModule m

%often (p.0: f32[10,100]) -> f32[10,100] {
  %p.0 = f32[10,100]{1,0} parameter(0)
  ROOT %out.0 = f32[10,100]{1,0} negate(%p.0), metadata={op_name="jit(f)/cond/neg"}
}

%seldom (p.1: f32[10,100]) -> f32[10,100] {
  %p.1 = f32[10,100]{1,0} parameter(0)
  %more = f32[10,100]{1,0} sine(%p.1), metadata={op_name="jit(f)/cond/MARK/sin"}
  ROOT %out.1 = f32[10,100]{1,0} negate(%more)
}

ENTRY %main (a: f32[10,100], c: pred[]) -> f32[10,100] {
  %a = f32[10,100]{1,0} parameter(0)
  %c = pred[] parameter(1)
  %square = f32[10,100]{1,0} multiply(%a, %a)
  ROOT %end = f32[10,100]{1,0} conditional(%c, %square, %square), BRANCHES
}
""".replace("BRANCHES", "branch_computations={%often, %seldom}")
  whole = 4 * 10 * 100
  counts = programs.count_work(text.replace("MARK", branches.RARE))
  assert counts.memory_bytes == 2 * whole + 2 * whole
  # Without the mark the costlier one counts.
  assert programs.count_work(text).memory_bytes == 2 * whole + 4 * whole
