"""What one party sees: of everything that is dealt, sent or opened, uniform bytes."""

import numpy as np
import pytest

from dpjax.secure import mpc
from dpjax.secure.mpc import comparison, correlations, private_values, secureml
from dpjax.secure.sums import primitives
from dpjax.validate import UserError
from tests.secure.mpc import programs
from tests.secure.mpc.programs import looks_uniform

pytest.importorskip("cryptography", reason="needs the extra 'secure'")
pytest.importorskip("Crypto", reason="needs the extra 'secure'")

_DEALT = {
  "elementwise": ((3000,),),
  "matrices": ((30, 100), (100, 40)),
  "truncation": ((3000,), 18),
  "sign": ((2000,),),
}


def _parts(name):
  """(what each party holds, the values) of one correlation."""
  dealt = correlations.correlation_named(name, _DEALT[name])
  keys = [correlations.fresh_key(number, "test") for number in (0, 1)]
  zero = correlations.expand(keys[0], 5, (*dealt.free, *dealt.bound))
  one = [*correlations.expand(keys[1], 5, dealt.free), *correlations.bind(dealt, keys, 5)]
  both = zip((*dealt.free, *dealt.bound), zero, one)
  return (zero, one), [correlations.total(part, *pair) for part, *pair in both]


def _bytes(arrays):
  data = b"".join(array.tobytes() for array in arrays)
  return data[: len(data) // 8 * 8]


@pytest.mark.parametrize("name", _DEALT)
def test_each_partys_part_of_what_is_dealt_is_uniform_alone(name):
  held, values = _parts(name)
  for parts in held:
    assert looks_uniform(_bytes(parts))
  bound = len(correlations.correlation_named(name, _DEALT[name]).bound)
  assert not looks_uniform(_bytes(values[-bound:])) or name in ("elementwise", "matrices")


def test_every_correlation_of_this_room_is_tried():
  assert set(_DEALT) <= set(correlations.CORRELATIONS)


def test_a_triple_is_one():
  for name, product in (("elementwise", np.multiply), ("matrices", np.matmul)):
    a, b, c = _parts(name)[1]
    assert (product(a, b) == c).all()


def _seen(program, value):
  """All that crosses between the parties, of shares of one value many times."""
  inputs = private_values.split((np.full(3000, value),))
  _, data = mpc.run(programs.overheard(program), *inputs).outputs[0]
  return data[: len(data) // 8 * 8]


def _square(party, x):
  return mpc.multiply(party, x, x)


def _masked_by_a_factor(party, x):
  """What is NOT done: x times a random positive number tells its sign and its size."""
  factor, _ = np.divmod(
    private_values.split(np.zeros(x.shape), seed=3)[0], np.uint64(2**20)
  )
  return party.open(x * factor)


@pytest.mark.parametrize("value", [0.0, 1.0, -1e5])
@pytest.mark.parametrize("program", [_square, mpc.relu, mpc.sigmoid])
def test_messages_are_uniform_whatever_they_hide(program, value):
  assert looks_uniform(_seen(program, value))


def test_a_multiplicative_mask_is_rejected():
  """Its low bits are those of x: zeros."""
  assert not looks_uniform(_seen(_masked_by_a_factor, 0.0))
  ran = mpc.run(_masked_by_a_factor, *private_values.split((np.full(3000, 4.0),)))
  assert not looks_uniform(ran.outputs[0][0].tobytes())


def test_who_does_not_ask_receives_nothing_that_depends_on_the_answer():
  """Party 1 asks; party 0's last message is received before the answer is told."""

  def program(party, network, x):
    before = party.link.bytes_received
    recipe = secureml.Recipe()
    place = comparison.argmax(party, secureml.scores(party, network, x, recipe))
    computed = party.link.bytes_received
    answer = mpc.reveal(party, place, to=1, frac_bits=0)
    return answer, party.link.bytes_received - computed, computed - before

  x = np.random.default_rng(0).normal(size=(50, 4))
  network = secureml.initial((4, 3, 5), seed=0)
  ran = mpc.run(programs.overheard(program), *private_values.split((network, x)))
  ((nothing, labels, _), data), ((answer, words, computed), _) = ran.outputs
  assert nothing is None and labels == 0 and words == 8 * 50
  assert len(data) > computed > 0 and looks_uniform(data[: len(data) // 8 * 8])
  assert answer.shape == (50,)


def test_without_the_extra_one_line_names_it(monkeypatch):
  def missing(*asked):
    raise UserError("needs pip install -e '.[secure]'")

  monkeypatch.setattr(primitives, "library", missing)
  with pytest.raises(UserError, match=r"pip install -e '\.\[secure\]'"):
    private_values.split(np.zeros(1))
