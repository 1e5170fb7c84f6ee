"""Robust aggregators against clients that may send anything, up to their breakdown point."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.federated import from_batches, geometric_median, krum, median, trimmed_mean
from dpjax.validate import UserError
from tests.federated import problems, registry
from tests.refuses import refuses

_SLOTS, _WIDTH, _TRIM, _BYZANTINE, _SELECTED = 12, 3, 0.2, 2, 3
_UPDATES = {
  "median": jax.jit(median().update),
  "trimmed": jax.jit(trimmed_mean(_TRIM).update),
  "krum": jax.jit(krum(_BYZANTINE).update),
  "multi_krum": jax.jit(krum(_BYZANTINE, num_selected=_SELECTED).update),
  "geometric": jax.jit(geometric_median().update),
}
_SIZES = [1e3, 1e6, 1e19, 1e20, 1e30, 3e38, np.inf, np.nan]


def _breakdown(name, n):
  """How many of n messages may be arbitrary."""
  if name == "trimmed":
    return int(_TRIM * n + 1e-6)
  return _BYZANTINE if "krum" in name else (n - 1) // 2


def _least(name):
  return 2 * _BYZANTINE + 3 if "krum" in name else 3


def _honest(kind, count, scale, offset, rng):
  drawn = rng.normal(size=(count, _WIDTH))
  line = np.outer(rng.normal(size=count), rng.normal(size=_WIDTH))
  some = np.where(np.arange(count)[:, None] < (count + 1) // 2, drawn[:1], drawn)
  shapes = {"cloud": drawn, "line": line, "point": 0 * drawn + drawn[:1], "ties": some}
  return (shapes[kind] + offset) * scale


def _attacks(honest, count, size, rng):
  """What an attacker that sees everything might send, each [count, width]."""
  centre, spread = honest.mean(0), honest.std() + 1e-9
  unit = rng.normal(size=_WIDTH)
  unit /= np.linalg.norm(unit)
  one = np.ones((count, 1))
  return {
    "one far point": one * unit * size,
    "along a line": rng.choice([-1, 1], (count, 1))
    * rng.uniform(0.1, 1, (count, 1))
    * unit
    * size,
    "mirrored": 2 * centre + unit * size - honest[:1] * one,
    "everywhere": rng.normal(size=(count, _WIDTH)) * (size / 10),
    "a copy": one * honest[0],
    "near a copy": one * (honest[0] + 1e-7 * spread * unit),
    "just outside": one * (centre + 10 * spread * unit),
    "axes": one * size * np.eye(_WIDTH)[0],
  }


def _bound(name, honest, n):
  """Distance from the honest centre that the result may have (see robust.py)."""
  radius = np.linalg.norm(honest - honest.mean(0), axis=1).max()
  if name == "geometric":
    bad = n - len(honest)
    return 2 * (n - bad) / (n - 2 * bad) * radius
  diameter = np.linalg.norm(honest[:, None] - honest[None], axis=-1).max()
  return radius + (1 + np.sqrt(max(n - _BYZANTINE - 2, 1))) * diameter


def _aggregated(name, rows):
  padded = np.full((_SLOTS, _WIDTH), 7.0, np.float32)  # rubbish in the padding
  padded[: len(rows)] = rows
  messages = {"a": padded[:, :1], "b": padded[:, 1:]}
  found, state = _UPDATES[name](messages, np.arange(_SLOTS) < len(rows), ())
  return np.concatenate([found["a"], found["b"]]), state


@pytest.mark.cases(quick=["median"], long=...)
@pytest.mark.parametrize("name", sorted(_UPDATES))
@settings(max_examples=25)
@given(
  seed=st.integers(0, 10**6),
  n=st.integers(3, _SLOTS),
  kind=st.sampled_from(["cloud", "line", "point", "ties"]),
  scale=st.sampled_from([1e-6, 1.0, 1e10]),
  offset=st.sampled_from([0.0, 100.0]),
  size=st.sampled_from(_SIZES),
  cancel=st.integers(0, 2),
)
def test_a_minority_moves_the_result_within_the_honest_spread(
  name, seed, n, kind, scale, offset, size, cancel
):
  rng = np.random.default_rng(seed)
  n = max(n, _least(name))
  bad = max(_breakdown(name, n) - cancel, 0)  # as many as it stands up to, or fewer
  honest = _honest(kind, n - bad, scale, offset, rng).astype(np.float32)
  with np.errstate(all="ignore"):
    attacks = _attacks(honest.astype(float), bad, size, rng)
    attacks = {what: np.asarray(sent, np.float32) for what, sent in attacks.items()}
  largest = np.finfo(np.float32).max
  for what, sent in attacks.items():
    arrived = int((np.linalg.norm(sent.astype(float), axis=1) <= largest).sum())
    if "krum" not in name and len(honest) + arrived < _least(name):
      continue  # a refusal: tested below
    rows = rng.permutation(np.concatenate([honest, sent]))
    found, state = _aggregated(name, rows)
    exact = honest.astype(float)
    slack = 2e-6 * np.abs(exact).max()
    if name in ("median", "trimmed"):
      low, high = exact.min(0) - slack, exact.max(0) + slack
      assert ((low <= found) & (found <= high)).all(), what
    else:
      away = np.linalg.norm(found - exact.mean(0))
      assert away <= _bound(name, exact, n) + 3 * slack, what
    if name == "geometric":
      assert float(state.residual) <= 1e-3, what


@pytest.mark.cases(quick=["median"], long=...)
@pytest.mark.parametrize("name", sorted(_UPDATES))
def test_beyond_the_breakdown_point_the_result_is_carried_away(name):
  """The test above can fail: one more attacker than its bound allows moves the result."""
  n = 9
  bad = {"trimmed": 2, "krum": 6, "multi_krum": 6}.get(name, 5)
  rows = np.concatenate([np.eye(3)[: n - bad].repeat(1, 0), np.zeros((0, 3))])
  honest = np.random.default_rng(0).normal(size=(n - bad, 3))
  far = np.full((bad, 3), 1e6) + 1e-3 * rows[:1]
  found, _ = _aggregated(name, np.concatenate([honest, far]).astype(np.float32))
  assert np.abs(found).max() > 1e4


def test_distances_that_overflow_do_not_let_the_attacker_win():
  """Two of seven at one far point: their mutual distance is 0, all others are infinite."""
  honest = np.random.default_rng(0).normal(size=(5, 3))
  for size in (1e19, 1e20, 3e37):
    rows = np.concatenate([np.full((2, 3), size), honest]).astype(np.float32)
    for name in ("krum", "multi_krum"):
      assert np.abs(_aggregated(name, rows)[0]).max() < 5


def test_krum_orders_messages_of_any_size():
  """Scores are compared without over- or underflow: the same choice at every scale."""
  rows = np.random.default_rng(3).normal(size=(8, 3))
  chosen = []
  for scale in (1e-30, 1e-10, 1.0, 1e15, 1e30):
    found, _ = _aggregated("krum", (rows * scale).astype(np.float32))
    chosen.append(int(np.argmin(np.abs(rows * scale - found).sum(1))))
  assert len(set(chosen)) == 1


def test_the_geometric_median_is_the_minimum_where_attackers_nearly_balance():
  """Four of nine pull from far away: the minimum of the true cost, by brute force."""
  rng = np.random.default_rng(5)
  honest = rng.normal(size=(5, 3)).astype(np.float32)
  rows = np.concatenate([honest, np.tile([[1e8, 0, 0]], (4, 1))]).astype(np.float32)
  found, state = _aggregated("geometric", rows)
  assert float(state.residual) <= 1e-4 and int(state.num_iterations) < 200

  def cost(p):  # without the constant of the far ones
    near = np.linalg.norm(honest - p, axis=-1).sum()
    return near - 4 * p[0]

  around = [cost(found + 0.05 * u) for u in rng.normal(size=(60, 3))]
  assert cost(found) < min(around)


# --- too few messages


@pytest.mark.long
@pytest.mark.parametrize("f", [0, 2])
def test_krum_refuses_too_few_messages(f):
  aggregator, rows = krum(f), np.zeros((2 * f + 3, 2), np.float32)
  everyone = np.ones(len(rows), bool)
  aggregator.update(rows, everyone, ())
  less = everyone & (np.arange(len(rows)) > 0)
  left = np.arange(len(rows)) > f  # one more than f says nothing that counts
  broken = np.where(left[:, None], rows, np.nan).astype(np.float32)
  for messages, mask, weights in (
    (rows[1:], everyone[1:], None),
    (rows, less, None),
    (broken, everyone, None),
    (rows, everyone, left.astype(np.float32)),
  ):
    with refuses("num_byzantine") as caught:
      aggregator.update(messages, mask, (), weights)
    assert "\n" not in str(caught.value)
  assert np.isnan(jax.jit(aggregator.update)(rows, less, ())[0]).all()  # cannot raise
  found, _ = aggregator.update(rows, np.zeros(len(rows), bool), ())
  np.testing.assert_array_equal(found, 0)  # nobody is nobody
  found, _ = aggregator.update(rows[:0], np.zeros(0, bool), ())
  np.testing.assert_array_equal(found, 0)


@pytest.mark.slow
def test_multi_krum_selects_no_more_than_are_honest():
  rows = np.zeros((5, 2), np.float32)
  krum(1, num_selected=4).update(rows, np.ones(5, bool), ())
  with refuses("num_selected"):
    krum(1, num_selected=5).update(rows, np.ones(5, bool), ())


def test_a_round_with_too_few_messages_is_refused():
  """Counted are clients of the round. One of f may send nothing that counts; two without examples
  may not. Who sends NaN is one of the f, so that a client without examples beside it is honest."""
  algorithm = registry.build("fed_avg", krum(1))
  own = problems.ragged((2, 2, 2, 2, 2), width=3)
  state = registry.start("fed_avg", algorithm)
  algorithm.round(state, from_batches(own, batch_size=2))
  own[1][:] = np.nan
  empty = [own[0], own[1][:0], *own[2:]]
  for fine in (own, empty, [own[0][:0], *own[1:]]):
    after, _ = algorithm.round(state, from_batches(fine, batch_size=2))
    assert np.isfinite(after.params["w"]).all()
  for broken in (own[1:], [own[0][:0], *empty[1:]]):
    with refuses("num_byzantine"):
      algorithm.round(state, from_batches(broken, batch_size=2))


@pytest.mark.cases(quick=[4], slow=[3], long=...)
@pytest.mark.parametrize(
  "size", [np.nan, np.inf, 3e38, "weight 0", "weight NaN", "weight -1"]
)
@pytest.mark.parametrize("f", [1, 2, 3])
def test_krum_is_not_stopped_by_its_attackers(f, size):
  """Any number of the f send nothing that counts, for every n from 2 f + 3 on."""
  rng = np.random.default_rng(f)
  for n in range(2 * f + 3, 3 * f + 4):
    for silent in range(1, f + 1):
      honest = rng.normal(size=(n - f, 2)).astype(np.float32)
      active = np.full((f - silent, 2), 1e6, np.float32)
      rows = np.concatenate([np.zeros((silent, 2), np.float32), active, honest])
      weights = np.ones(n, np.float32)
      if isinstance(size, str):
        weights[:silent] = {"weight 0": 0, "weight NaN": np.nan, "weight -1": -1}[size]
      else:
        rows[:silent, 0] = size
      for aggregator in (krum(f), krum(f, num_selected=n - f)):
        found, _ = aggregator.update(jnp.asarray(rows), np.ones(n, bool), (), weights)
        diameter = np.linalg.norm(honest[:, None] - honest[None], axis=-1).max()
        distance = np.linalg.norm(honest - np.asarray(found), axis=1).min()
        assert distance <= (1 + np.sqrt(n - f - 2)) * diameter


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_infinite_weights_do_not_count_and_are_no_excuse(size):
  """As faulty they lowered f, and as messages they still stood beside the honest ones."""
  honest = np.random.default_rng(0).normal(size=(6, 1)).astype(np.float32)
  rows = np.concatenate([np.array([[size / 4], [size], [size]], np.float32), honest])
  weights = np.r_[np.full(3, np.inf), np.ones(6)].astype(np.float32)
  found, _ = krum(3).update(jnp.asarray(rows), np.ones(9, bool), (), weights)
  assert np.abs(honest - np.asarray(found)).min() == 0


@pytest.mark.long
@settings(max_examples=60)
@given(
  st.integers(0, 3), st.integers(0, 4), st.integers(0, 3), st.integers(0, 3),
  st.sampled_from([1e2, 1e6, 1e20]), st.integers(0, 10**6),
)  # fmt: skip
def test_what_krum_does_not_refuse_is_near_an_honest_message(
  f, more, bad, idle, size, seed
):
  """b clients send NaN, z honest ones have no examples, and all other attackers agree."""
  bad, n = min(bad, f), 2 * f + 3 + more
  idle, left = min(idle, n - f), f - bad
  rng = np.random.default_rng(seed)
  honest = rng.normal(size=(n - f, 2))
  # the tightest cluster that there is: distances of 0 to each other
  rows = np.concatenate([np.full((bad, 2), np.nan), np.full((left, 2), size), honest])
  weights = np.ones(n)
  weights[n - idle :] = 0.0
  heard = honest[: n - f - idle]
  try:
    messages = jnp.asarray(rows, jnp.float32)
    found, _ = krum(f).update(messages, np.ones(n, bool), (), jnp.asarray(weights))
  except UserError:
    assert bad + idle > f  # only what goes beyond the assumption is refused
    return
  if len(heard) + left < 2 * left + 1:
    return  # as many attackers as honest messages: no rule can tell them apart
  diameter = np.linalg.norm(heard[:, None] - heard[None], axis=-1).max()
  distance = np.linalg.norm(heard - np.asarray(found), axis=1).min()
  assert distance <= np.sqrt(n - f - 2) * diameter + 1e-5


# --- together with noise on the client


@pytest.mark.long
@pytest.mark.parametrize("name", ["median", "krum", "geometric"])
def test_local_noise_and_a_robust_aggregator(name):
  """Every client sends noise of the same law and weight 1, also one that holds nothing."""
  aggregator = {"median": median(), "krum": krum(1), "geometric": geometric_median()}[name]
  algorithm = registry.build("fed_avg local noise", aggregator)
  own = problems.ragged((2, 2, 0, 2, 2, 2), width=3)
  state, _ = algorithm.round(
    registry.start("fed_avg", algorithm), from_batches(own, batch_size=2)
  )
  assert np.isfinite(state.params["w"]).all()
