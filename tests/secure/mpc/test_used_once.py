"""Masks are used once: whatever is copied, pickled, asked twice, or dealt to threads at a time."""

import copy
import pickle
import sys
import threading
import time

import numpy as np
import pytest

from dpjax.secure import mpc
from dpjax.secure.mpc import comparison, dealer, garbled, links, private_values, secureml
from dpjax.secure.mpc.party import Party
from dpjax.validate import UserError
from tests.refuses import refuses


@pytest.fixture(autouse=True)
def cryptography():
  pytest.importorskip("cryptography", reason="needs pip install -e '.[secure]'")


def _party():
  supply = dealer.supplies(dealer.Dealer())[0]
  return Party(0, links.queue_links()[0], supply, bytes(32))


def _garbler():
  pytest.importorskip("Crypto", reason="needs pip install -e '.[secure]'")
  return garbled.Garbler(5, bits=4)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize(
  ("made", "field"),
  [
    (_party, "party"),
    (_garbler, "garbler"),
    (lambda: dealer.Dealer(), "dealer"),
    (lambda: _party().supply, "supply"),
    (lambda: _party().supply.deal("elementwise", (2,)), "dealt"),
  ],
)
def test_what_holds_masks_has_no_copies(made, field, copied):
  with refuses(field):
    copied(made())


def test_a_dealer_has_two_parties_and_each_number_once():
  dealt = dealer.Dealer()
  dealer.supplies(dealt)
  with refuses("dealer"):
    dealer.supplies(dealt)
  dealt.bound(3, "elementwise", [[2]])
  with refuses("correlation", value=3):
    dealt.bound(3, "matrices", [[1, 2], [2, 1]])


def test_threads_of_a_party_get_different_masks_and_correlations():
  party, masks, numbers = _party(), [], []

  def draw():
    for _ in range(100):
      masks.append(int(party.mask((1,))[0]))
      numbers.append(party.supply.deal("elementwise", (1,)).number)

  interval = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  try:
    threads = [threading.Thread(target=draw) for _ in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  finally:
    sys.setswitchinterval(interval)
  assert len(set(masks)) == len(set(numbers)) == 800


@pytest.mark.cases(long=["1"])
@pytest.mark.parametrize("who", [0, 1])
def test_who_hangs_does_not_keep_the_other(who):
  def program(party):
    if party.number == who:
      time.sleep(30)
    party.open(np.zeros(1, np.uint64))

  begun = time.monotonic()
  with pytest.raises(UserError, match=f"party {who}: silent for 0.1 seconds"):
    mpc.run(program, timeout=0.1)
  assert time.monotonic() - begun < 15


def test_a_party_that_exits_is_no_result():
  def program(party):
    return sys.exit(3) if party.number else 5

  with pytest.raises(SystemExit):
    mpc.run(program)


@pytest.mark.parametrize(
  ("changed", "field"),
  [
    (lambda offer: offer._replace(labels=(1 << 200,) * 4), "garbled"),
    (lambda offer: offer._replace(labels=(-1,) * 4), "garbled"),
    (lambda offer: offer._replace(labels=("a",) * 4), "garbled"),
    (lambda offer: offer._replace(point="a" * 64), "point"),
    (
      lambda offer: offer._replace(
        garbled=offer.garbled._replace(tables=((1 << 300, 0),) * 4)
      ),
      "garbled",
    ),
  ],
)
def test_an_offer_of_garbage_is_one_line(changed, field):
  garbler, evaluator = _garbler(), garbled.Evaluator(3, bits=4)
  with refuses(field):
    evaluator.less(garbler.answer(evaluator.choose(changed(garbler.offer))))


@pytest.mark.parametrize(
  ("pairs", "field"),
  [([b""] * 4, "sent"), ([(b"a" * 16,)] * 4, "sent"), ([("a" * 16,) * 2] * 4, "text")],
)
def test_labels_of_garbage_are_one_line(pairs, field):
  garbler, evaluator = _garbler(), garbled.Evaluator(3, bits=4)
  evaluator.choose(garbler.offer)
  with refuses(field):
    evaluator.less(pairs)


def test_what_cannot_be_computed_is_one_line():
  shares = private_values.split(np.ones((3, 1)), frac_bits=0)
  inputs = [(share,) for share in shares]
  with refuses("frac_bits", value=0):
    mpc.run(comparison.sigmoid, *inputs, frac_bits=0)
  with refuses("public"):
    mpc.run(lambda party, x: mpc.add(party, x, np.ones(3)), *inputs)
  with refuses("batch_size", value=0):
    secureml.Recipe().shift(0)
  with refuses("sizes"):
    secureml.initial((3,), seed=0)
  with refuses("sizes[0]", value=0):
    secureml.initial((0, 1), seed=0)
