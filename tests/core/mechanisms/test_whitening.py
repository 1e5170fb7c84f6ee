"""Private whitening: a float64 loop, the influence of one example, noise, price, and the map."""

import dataclasses
import math

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from dpjax import accounting, mechanisms
from dpjax.mechanisms import noisy_means as means
from dpjax.mechanisms import whitening as lib
from tests.refuses import refuses

_RNG = np.random.default_rng(0)
_MIX = _RNG.normal(size=(3, 3)) * [3.0, 1.0, 0.3]
_X = (_RNG.normal(size=(60, 2, 2, 3)) @ _MIX + [1.0, 0.0, -2.0]).astype(np.float32)
_NOWHERE = 1e-3  # a noise multiplier that hides nothing
_WIDE = (1e4,) * 5
_NORMS = (4.0, 15.0, 15.0, 10.0, 2.0)


def _made(**options):
  given = {"normalize_by": 60.0, "num_directions": 6, "floor_rank": 6} | options
  return mechanisms.Whitening(**given)


def _triangle(matrix):
  rows, columns = np.triu_indices(len(matrix))
  return matrix[rows, columns] * np.where(rows == columns, 1, math.sqrt(2))


def _oracle(x, norms, before, made):
  """The five clipped means by a loop over examples, in float64, from released fields alone."""
  known = [lib._map(before._asdict(), (4, 3), made.num_directions)] * 5
  sums = [0.0] * 5
  for example in np.asarray(x, np.float64).reshape(len(x), 4, 3):
    z = example - known[1].mean
    turned = (known[3].positions.T @ z @ known[3].channels).ravel()
    evened = (turned * known[4].scales)[known[4].largest]
    vectors = (
      example.ravel(),
      _triangle(z.T @ z),
      _triangle(z @ z.T),
      turned**2,
      _triangle(np.outer(evened, evened)),
    )
    for i, vector in enumerate(vectors):
      sums[i] = sums[i] + vector * min(1.0, norms[i] / np.linalg.norm(vector))
  return [one / made.normalize_by for one in sums]


def _totals(found, made):
  return [np.asarray(one, np.float64) for one in made.noisy_totals(found)]


@pytest.mark.long
def test_it_is_the_loop_where_the_noise_is_negligible():
  made = _made(noise_multiplier=_NOWHERE, clip_norms=_NORMS)
  found = made(jax.random.key(0), _X)
  wanted = _oracle(_X, _NORMS, found, made)
  for mine, loop, norm in zip(found, wanted, _NORMS):
    assert np.abs(np.asarray(mine) - loop).max() < 4e-4 * norm
  unclipped = _oracle(_X, (math.inf,) * 5, found, made)
  assert all(np.abs(a - b).max() > 0.01 for a, b in zip(wanted, unclipped))


@pytest.mark.long
def test_the_private_norms_are_near_the_ninth_deciles():
  many = np.tile(_X, (40, 1, 1, 1))
  made = _made(normalize_by=2400.0, noise_multiplier=_NOWHERE, median_epsilon=1.0)
  found = made(jax.random.key(1), many)
  lengths = np.linalg.norm(_X.reshape(60, -1), axis=1)
  assert float(found.clip_norms[0]) == pytest.approx(np.quantile(lengths, 0.9), rel=0.06)


def _utilities(norms, relation, monkeypatch):
  """What the choice of a bin is made of."""
  seen = []
  chosen = lambda self, key, utilities: seen.append(np.asarray(utilities)) or 0
  monkeypatch.setattr(lib.PermuteAndFlip, "__call__", chosen)
  made = _made(neighboring_relation=relation)
  made.clip_norm(jax.random.key(0), jnp.asarray(norms, jnp.float32), 0)
  return seen[0]


def test_the_utility_of_a_bin_is_minus_ten_times_its_excess(monkeypatch):
  norms = np.array([0.5, 0.5, 1.0, 3.0, 3.0, 7.0, 20.0, 20.0, 20.0, 90.0])
  bins = np.searchsorted(lib._EDGES, norms)
  expected = [
    -max(10 * np.sum(bins < k) - 9 * 10, 10 * np.sum(bins > k) - 10, 0)
    for k in range(lib._EDGES.size)
  ]
  found = _utilities(norms, "replace_one", monkeypatch)
  np.testing.assert_array_equal(found, expected)
  assert found.max() == 0 > found.min()


@pytest.mark.cases(slow=["replace_one"], long=...)
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_one_example_moves_the_utility_of_a_bin_by_what_is_paid(relation, monkeypatch):
  rng, worst = np.random.default_rng(3), 0
  for _ in range(40):
    norms = np.round(rng.lognormal(size=rng.integers(1, 8)), 1)
    other = 10.0 ** rng.integers(-9, 9)
    more = np.append(norms[1:] if relation == "replace_one" else norms, other)
    pair = [_utilities(one, relation, monkeypatch) for one in (norms, more)]
    worst = max(worst, int(np.abs(pair[0] - pair[1]).max()))
  assert worst == _made(neighboring_relation=relation)._among.utility_sensitivity


@pytest.mark.slow
def test_a_norm_that_all_examples_have_is_found():
  same = jnp.full(3000, 63.0)
  found = [_made().clip_norm(jax.random.key(i), same, 0) for i in range(20)]
  assert all(63.0 <= float(one) <= 63.0 * 2 ** (1 / 16) for one in found)
  nobody = _made().clip_norm(jax.random.key(0), jnp.zeros(0), 0)
  assert 2.0**-20 <= float(nobody) <= 2.0**20


@pytest.mark.long
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_p9_one_example_moves_each_sum_by_no_more_than_the_noise_covers(relation):
  """Given what was released before; the sums are of integers, so not even by a rounding."""
  made = _made(noise_multiplier=_NOWHERE, clip_norms=_NORMS, neighboring_relation=relation)
  key, exchanged = jax.random.key(2), relation == "replace_one"
  without = _X if exchanged else _X[1:]
  before, worst = made(key, without), np.zeros(5)
  for factor in (0.0, -1.0, 1e3, 1e9, 1e19, math.nan, math.inf):
    changed = _X.copy()
    changed[0] *= np.float32(factor)
    after = made.after(key, changed, before)
    pairs = zip(_totals(before, made), _totals(after, made))
    worst = np.maximum(worst, [np.linalg.norm(a - b) for a, b in pairs])
  bound = 2 if exchanged else 1
  assert (worst <= bound + 5e-3).all() and (worst > 0.5).all()
  loose = dataclasses.replace(
    made, clip_norms=_WIDE
  )  # what one does where nothing is clipped
  changed = _X.copy()
  changed[0] *= 1e3
  pairs = zip(*(loose.after(key, x, before) for x in (without, changed)))
  apart = [float(jnp.linalg.norm(a - b)) * 60 for a, b in pairs][:5]
  assert (np.array(apart) > 10 * np.array(_NORMS)).all()


@pytest.mark.cases(quick=["covariance"], slow=["variances"], long=...)
@pytest.mark.parametrize("name", lib.Whitening.vectors)
def test_what_an_example_adds_does_not_depend_on_the_others_bit_for_bit(name):
  known = lib._map(_made()(jax.random.key(3), _X)._asdict(), (4, 3), 6)
  total = lambda x: lib._total(name, known, lib._examples(x), jnp.float32(3.0))
  alone = sum(total(_X[i : i + 1]) for i in range(20))
  assert (total(_X[:20]) == alone).all()
  long = np.concatenate([_X] * 20)[: means._CHUNK + 3]  # two chunks
  moved = np.roll(long, 7, axis=0)
  assert (total(long) == total(moved)).all()
  assert (total(long) - total(long[1:]) == total(long[:1])).all()


@pytest.mark.slow
def test_p1_an_example_that_is_not_finite_counts_as_zero():
  made = _made(noise_multiplier=_NOWHERE, clip_norms=_NORMS)
  before = made(jax.random.key(4), _X[1:])
  for bad in (math.nan, math.inf, -math.inf, 1e30):
    changed = _X.copy()
    changed[0, 1, 1, 2] = bad
    after = made.after(jax.random.key(4), changed, before)
    for one, other in zip(_totals(before, made), _totals(after, made)):
      assert np.abs(one - other).max() < 1e-2


@pytest.mark.long
def test_the_noise_of_each_sum_is_as_large_as_charged_and_independent():
  made = _made(noise_multiplier=3.0, clip_norms=_NORMS)
  quiet = dataclasses.replace(made, noise_multiplier=_NOWHERE)
  draws = []
  for key in jax.random.split(jax.random.key(5), 150):
    found = made(key, _X[:2])
    exact = quiet.after(jax.random.key(6), _X[:2], found)
    pairs = zip(_totals(found, made), _totals(exact, made))
    draws.append(np.concatenate([(noisy - sure) / 3 for noisy, sure in pairs]))
  draws = np.stack(draws)  # [keys, 12 + 6 + 10 + 12 + 21]
  assert draws.shape == (150, 61)
  assert abs(draws.std() - 1) < 0.03  # 9,150 numbers: .7 %
  assert np.abs(draws.std(axis=0) - 1).max() < 0.25
  apart = np.corrcoef(draws.T) - np.eye(61)
  assert np.abs(apart).max() < 0.45  # 1,830 pairs: .08 each


@pytest.mark.cases(quick=["replace_special-1"], long=...)
@pytest.mark.parametrize(
  ("relation", "sensitivity"),
  [("add_or_remove_one", 1), ("replace_special", 1), ("replace_one", 2)],
)
def test_the_event_is_that_of_all_ten_releases(relation, sensitivity):
  made = _made(noise_multiplier=9.0, median_epsilon=0.1, neighboring_relation=relation)
  sums = [dpa.GaussianDpEvent(9.0 / sensitivity)] * 5
  medians = [dpa.GaussianDpEvent(means.gaussian_of_pure(0.1))] * 5
  direct = PLDAccountant()
  for event in (*sums, *medians):
    direct.compose(event)
  cost = accounting.epsilon(made.event(relation), delta=1e-5, neighboring_relation=relation)
  assert cost == pytest.approx(direct.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.long
def test_directions_are_even_above_the_floor_and_as_they_were_below_it():
  x = (
    _RNG.normal(size=(4000, 1, 4))
    * [30.0, 10.0, 3.0, 0.1]
    @ np.linalg.qr(_RNG.normal(size=(4, 4)))[0]
  )
  made = _made(
    normalize_by=4000.0, noise_multiplier=_NOWHERE, clip_norms=(1e3, *(1e5,) * 4),
    num_directions=4, floor_rank=3,
  )  # fmt: skip
  found = made(jax.random.key(7), x)
  even = np.asarray(found.standardizer()(jnp.asarray(x, jnp.float32))).reshape(4000, 4)
  sizes = np.sqrt(np.linalg.eigvalsh(np.cov(even.T)))[::-1]
  assert np.abs(sizes[:3] - 1).max() < 0.05
  assert sizes[3] == pytest.approx(0.1 / 3.0, rel=0.1)
  assert np.abs(even.mean(axis=0)).max() < 0.05
  nothing = dataclasses.replace(made, floor_rank=1)(jax.random.key(7), x)
  kept = np.asarray(nothing.standardizer()(jnp.asarray(x, jnp.float32))).reshape(4000, 4)
  spread = np.sqrt(np.linalg.eigvalsh(np.cov(kept.T)))[::-1]
  assert spread / spread[0] == pytest.approx([1, 1 / 3, 0.1, 1 / 300], rel=0.1)


def test_the_map_of_known_moments_is_that_of_their_eigenvectors():
  root = _RNG.normal(size=(3, 3))
  matrix = root @ root.T
  values, vectors = lib._eigenvectors(_triangle(matrix))
  assert np.allclose(vectors * values @ vectors.T, matrix, atol=1e-5)
  assert all(v[np.abs(v).argmax()] > 0 for v in vectors.T)
  released = {
    "mean": np.zeros(3), "channels": _triangle(matrix), "positions": np.ones(1),
    "variances": [0.5, 4.0, 9.0], "floor": 1.0, "covariance": _triangle(np.diag([4.0, 0.5])),
  }  # fmt: skip
  known = lib._map(released, (1, 3), 2)
  # Directions of variance 4 and 9 are the largest; a variance below the floor stays as it is.
  assert known.largest.tolist() == [1, 2]
  assert np.allclose(known.scales, [1.0, 1 / 2, 1 / 3])
  assert np.allclose(known.root, np.diag([1 / 2, 1.0]), atol=1e-6)


def test_the_map_is_that_of_the_released_fields_read_again():
  found = _made()(jax.random.key(8), _X)
  stored = lib.Spread(*(np.array(np.asarray(one).tolist(), np.float32) for one in found))
  mine, again = (one.standardizer()(jnp.asarray(_X)) for one in (found, stored))
  assert np.array_equal(mine, again)
  shape = (_X.shape[0], 4, 3)
  flat = found.standardizer()(jnp.asarray(_X.reshape(shape)))
  assert np.allclose(flat, np.asarray(mine).reshape(shape), atol=1e-5)


@pytest.mark.cases(long=["1"])
@pytest.mark.parametrize("count", [0, 1])
def test_few_examples_are_noise_and_never_nan(count):
  found = _made()(jax.random.key(9), _X[:count])
  seen = np.asarray(found.standardizer()(jnp.asarray(_X)))
  assert np.isfinite(seen).all()
  assert all(np.isfinite(one).all() for one in found)


@pytest.mark.parametrize(
  ("options", "field"),
  [
    ({"clip_norms": (1.0, 2.0)}, "clip_norms"),
    ({"num_directions": 0}, "num_directions"),
    ({"num_directions": 2000}, "num_directions"),
    ({"num_directions": 2.5}, "num_directions"),
    ({"floor_rank": -1}, "floor_rank"),
    ({"noise_multiplier": 0.0}, "noise_multiplier"),
  ],
)
def test_wrong_settings_are_one_line(options, field):
  with refuses(field):
    _made(**options)


@pytest.mark.cases(long=[2, 3])
@pytest.mark.parametrize(
  ("x", "field"),
  [
    (np.zeros((3, 4)), "x"),
    (np.zeros((3, 0, 4)), "x"),
    (np.zeros((1, 1025, 1)), "x"),
    (["a"], "x"),
  ],
)
def test_wrong_data_are_one_line(x, field):
  with refuses(field):
    _made()(jax.random.key(0), x)
