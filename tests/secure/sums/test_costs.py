"""What a sum costs: counted from its messages, and by formula."""

import contextlib
import dataclasses
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.secure import sums
from dpjax.secure.sums import primitives, secagg, secagg_costs
from dpjax.secure.sums.interface import Present
from dpjax.secure.sums.terms import Terms, graph_parameters
from dpjax.validate import UserError
from tests.refuses import refuses
from tests.secure.sums import parties

pytest.importorskip("cryptography", reason="needs the extra 'secure'")
pytest.importorskip("Crypto", reason="needs the extra 'secure'")


def _without_seconds(cost):
  return cost._replace(seconds=0.0)


def _named(n, *, threshold, **others):
  clients = tuple(range(n))
  return Terms(
    session=bytes(16),
    clients=clients,
    threshold=threshold,
    min_survivors=threshold,
    **others,
  )


@st.composite
def _cases(draw):
  n = draw(st.integers(4, 9))
  degree = draw(st.sampled_from([None, 2, 4] if n > 5 else [None, 2]))
  t = draw(st.integers(2, n if degree is None else degree + 1))
  named = tuple(range(n))
  phases = [named]
  for _ in range(3):
    phases.append(tuple(who for who in phases[-1] if draw(st.integers(0, 6))))
  return parties.terms(n, t, degree=degree, min_survivors=2), Present(*phases)


@contextlib.contextmanager
def _computed():
  """Counts the streams that are expanded and the keys that are agreed on."""
  counts = {"streams": 0, "keys": 0}
  add, agree = primitives.add_streams, primitives.agree

  def adding(vector, streams):
    counts["streams"] += len(streams)
    add(vector, streams)

  def agreeing(private, public, info, length=32):
    # Without `info` the server only looks whether a public key is a point.
    counts["keys"] += bool(info)
    return agree(private, public, info, length)

  with (
    mock.patch.object(primitives, "add_streams", adding),
    mock.patch.object(primitives, "agree", agreeing),
  ):
    yield counts


@settings(max_examples=40)
@given(_cases())
def test_the_simulation_counts_and_refuses_what_the_protocol_does(case):
  terms, there = case
  vectors = parties.vectors(len(terms.clients))
  try:
    left = secagg_costs.going_on(terms, there)
  except UserError:
    with pytest.raises(UserError):
      secagg.run(terms, there, vectors.__getitem__)
    return
  with _computed() as counts:
    summed = secagg.run(terms, there, vectors.__getitem__)
  assert counts == {"streams": summed.cost.expansions, "keys": summed.cost.operations}
  assert _without_seconds(summed.cost) == secagg_costs.predict_cost(terms, left)
  assert summed.survivors == left.uploading


@pytest.mark.parametrize("signed", [False, True])
def test_a_simulated_sum_is_the_same_sum(signed):
  protocol = sums.SecAgg(min_survivors=5, signed=signed)
  vectors = parties.vectors(7)
  drops = sums.Drops(frozenset({1}), frozenset({2}), frozenset({3} if not signed else ()))
  if not signed:
    protocol = sums.SecAgg(min_survivors=4)
  real, fast = (
    protocol.sum(vectors, drops),
    dataclasses.replace(protocol, simulated=True).sum(vectors, drops),
  )
  np.testing.assert_array_equal(real.total, fast.total)
  assert real.survivors == fast.survivors
  assert _without_seconds(real.cost) == _without_seconds(fast.cost)
  with refuses("min_survivors"):
    few = dataclasses.replace(protocol, simulated=True)
    few.sum(vectors, sums.Drops(frozenset({1, 2, 3, 4})))


def test_a_simulation_says_that_it_is_one():
  assert sums.SecAggPlus(simulated=True).name == "simulated secagg_plus"


@pytest.mark.parametrize(("n", "degree"), [(100, None), (100, 28), (1000, 66)])
def test_costs_by_number_and_length(n, degree):
  """The papers' orders: expansions n (k + 2), agreements 2 n k, bytes n (d + k)."""
  everybody = Present(*[tuple(range(n))] * 4)
  k = n - 1 if degree is None else degree
  for d in (10, 10**6):
    terms = _named(n, threshold=20, length=d, degree=degree)
    cost = secagg_costs.predict_cost(terms, everybody)
    assert cost.expansions == n * (k + 2) and cost.operations == 2 * n * k
    assert cost.client_bytes == 4 * d + 389 + 230 * k
    assert cost.server_bytes == n * cost.client_bytes


# number, corrupt, dropout -> degree, threshold that Google's fcp/secagg computes
# (graph_parameter_finder_test.cc, honest-but-curious, security 40, correctness 20)
_PUBLISHED = {
  (10, 0.33, 0.33): (8, 4),
  (100, 0.45, 0.45): (92, 46),
  (100, 0.33, 0.33): (68, 34),
  (1000, 0.33, 0.33): (286, 150),
  (100, 0.05, 0.33): (28, 6),
  (1000, 0.05, 0.33): (72, 24),
  (10_000, 0.05, 0.33): (86, 29),
  (100, 0.33, 0.05): (34, 29),
  (1000, 0.33, 0.05): (78, 60),
}


@pytest.mark.parametrize("given_", list(_PUBLISHED))
def test_degree_and_threshold_are_the_published_ones(given_):
  n, corrupt, dropout = given_
  assert graph_parameters(n, corrupt=corrupt, dropout=dropout) == _PUBLISHED[given_]


def test_a_graph_too_small_is_complete_and_one_without_trust_refused():
  assert graph_parameters(5, corrupt=0.2, dropout=0.4) == (None, 2)
  with refuses("corrupt"):
    graph_parameters(10, corrupt=0.5, dropout=0.45)
  assert graph_parameters(10, corrupt=0.5, dropout=0.3, security_bits=300) == (None, 6)


def test_more_silent_clients_than_stated_are_refused_on_a_graph():
  """The graph of who is left could fall apart, and each part's sum be seen."""
  vectors = parties.vectors(20)
  protocol = sums.SecAggPlus(dropout_share=0.2)
  gone = lambda count: sums.Drops(before_upload=frozenset(range(count)))
  assert len(protocol.sum(vectors, gone(4)).survivors) == 16
  with refuses("min_survivors"):
    protocol.sum(vectors, gone(5))


def test_terms_that_make_no_sense_are_refused():
  bad = {
    "threshold=1: must be": {"threshold": 1},
    "threshold=6: must be an integer in [2, 5]": {"threshold": 6},
    "degree=3: must be an even number": {"degree": 3, "threshold": 2},
    "degree=4: must be an even number in [2, 3]": {"degree": 4, "threshold": 2},
    "length=0: must be": {"length": 0},
    "bits='33'": {"bits": 33},
    "session=b'x': must be 16 bytes": {"session": b"x"},
    "must be ids in ascending order": {"clients": (2, 1, 3, 4, 5)},
    "client=4294967295: must be": {"clients": (0, 1, 2, 3, 2**32 - 1)},  # the server's
    "client=-1: must be": {"clients": (-1, 1, 2, 3, 4)},
    "client=0.5: must be": {"clients": (0.5, 1, 2, 3, 4)},
    "client='a': must be": {"clients": ("a", 1, 2, 3, 4)},
    "session='xxxxxxxxxxxxxxxx': must be 16 bytes": {"session": "x" * 16},
    "degree=2.0: must be an integer": {"degree": 2.0, "threshold": 2},
  }
  good = _named(5, threshold=3, length=4)
  for says, change in bad.items():
    with pytest.raises(UserError) as caught:
      Terms(**{**good.__dict__, **change})
    assert says.replace("bits='33'", "bits=33") in str(caught.value)


def test_settings_that_no_protocol_has_are_one_line():
  for says, make in {
    "foo": lambda: sums.by_name("secagg", foo=1),
    "bits": lambda: sums.PlainSum(bits="32"),
    "drops": lambda: sums.PlainSum().sum(
      {who: np.zeros(2, np.uint32) for who in range(3)},
      sums.Drops(before_upload=frozenset({"a", 1})),
    ),
  }.items():
    with refuses(says):
      make()
