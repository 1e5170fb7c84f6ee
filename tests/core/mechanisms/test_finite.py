"""Finite precision in the mechanisms: tails, grids, exact values, exact sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpjax import mechanisms
from dpjax.mechanisms import finite
from dpjax.noise import distributions, source
from tests.refuses import refuses

_KEY = jax.random.key(0)
_BITS = jax.random.bits


def _drive(monkeypatch, word):
  """Every random bit is that of `word`."""
  fixed = lambda key, shape=(), dtype=jnp.uint32: jnp.full(shape, word, dtype)
  monkeypatch.setattr(jax.random, "bits", fixed)


# --- tails


@pytest.mark.cases(slow=["float64"], long=...)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_query_noise_reaches_what_the_guarantee_needs(x64, monkeypatch, dtype):
  _drive(monkeypatch, 0)
  value = jnp.zeros(3, dtype)
  laplace = mechanisms.Laplace(2.0, 3.0)
  assert float(jnp.abs(laplace(_KEY, value)).min()) > 40 * laplace.scale
  gaussian = mechanisms.Gaussian.calibrated(epsilon=10.0, delta=1e-8, l2_sensitivity=1.0)
  assert float(jnp.abs(gaussian(_KEY, value)).min()) > 16 * gaussian.std


def test_the_stated_delta_of_epsilon_10_is_not_exceeded_by_finite_tails():
  """delta of the pair (noise, noise + 1 / z) where noise ends: the mass that only one of
  them reaches. At 5.42 standard deviations it is thousands of times the claimed 1e-8."""
  gaussian = mechanisms.Gaussian.calibrated(epsilon=10.0, delta=1e-8, l2_sensitivity=1.0)
  shift = 1 / gaussian.noise_multiplier
  only_one = lambda end: stats.norm.sf(end - shift)
  assert only_one(5.42) > 7e-5 > 1e-8 > 1e-40 > only_one(16.3)
  assert gaussian.delta(10.0) <= 1e-8 * (1 + 1e-9)
  with refuses("delta"):
    mechanisms.Gaussian.calibrated(epsilon=120.0, delta=1e-12, l2_sensitivity=1.0)


@pytest.mark.cases(slow=["exponential"], long=...)
@pytest.mark.parametrize("noise", mechanisms.selection.NOISES)
def test_a_hopeless_candidate_is_chosen_as_often_as_it_should(monkeypatch, noise):
  """55 scales behind: e^-55 is out of reach of draws, so the first words are driven; a
  sampler whose Gumbel or Laplace noise ends at 16 scales would never choose it."""
  far = -55.0

  def driven(key, shape, dtype):
    drawn = _BITS(key, shape, dtype)
    words = slice(0, 2) if shape[0] == 3 else slice(1, 2)  # of u, of the last candidate
    return drawn.at[words, ..., 1].set(jnp.uint32(2**32 - 1 if noise == "gumbel" else 0))

  monkeypatch.setattr(jax.random, "bits", driven)
  mechanism = mechanisms.ReportNoisyMax(2.0, noise=noise)  # scale 1
  chosen = np.asarray(mechanism(_KEY, jnp.tile(jnp.array([0.0, far]), (64, 1))))
  assert chosen.mean() > 0.3  # of Laplace noise half has the other sign


# --- the lattice


@pytest.mark.cases(slow=["mechanism1-float64"], long=...)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize(
  "mechanism", [mechanisms.Laplace(0.7, 1.0), mechanisms.Gaussian(1.3, 1.0)]
)
def test_every_output_is_a_multiple_of_a_public_step(x64, mechanism, dtype):
  scale = mechanism.scale if isinstance(mechanism, mechanisms.Laplace) else mechanism.std
  step = finite.fine_step(scale)
  for shift in (0.0, 1 / 3, 1 / 3 + 2**-20, 1e-6, 777.7):
    out = np.asarray(mechanism(_KEY, jnp.full(2000, shift, dtype)), np.float64)
    np.testing.assert_array_equal(out, np.round(out / step) * step)
  raw = np.asarray(1 / 3 + source.laplace(_KEY, jnp.zeros(2000, dtype), scale))
  assert np.mean(raw == np.round(raw / step) * step) < 0.5  # the test can fail


def _log_ratios(std, shift, snap, step):
  """log(chance of a cell / that of rounded real Gaussian noise) for a value of `shift`, by all
  floats of the unit noise from 1 to 1.1, each times the standard deviation, as it is drawn."""
  low, high = (np.float32(end).view(np.uint32) for end in (1.0, 1.1))
  drawn = np.arange(low, high, dtype=np.uint32).view(np.float32)
  edges = (drawn[1:].astype(np.float64) + drawn[:-1]) / 2
  chances = -np.diff(stats.norm.sf(edges))  # of a float: of what is rounded to it
  noise = jnp.float32(std) * jnp.asarray(drawn[1:-1])
  cells = np.asarray(snap(noise + jnp.float32(shift)), np.float64)
  cells, places = np.unique(cells, return_inverse=True)
  tail = lambda side: stats.norm.sf((cells + side * step / 2 - shift) / std)
  ideal = tail(-1) - tail(1)
  return np.log(np.bincount(places, chances) / ideal)[1:-1]  # the outer two are cut


@pytest.mark.cases(slow=["11.3"], long=...)
@pytest.mark.parametrize("std", [8.0, 11.3, 15.9])
def test_a_number_tells_less_than_3e_5_beyond_real_noise(std):
  """The log ratio of all cells, root mean square. With 2^11 floats in a cell, halves to even, it
  is 4e-4 to 1e-3, which 10^6 numbers make into a loss of up to 1."""
  step, worst, before = finite.fine_step(std), 0.0, 0.0
  for shift in (0.0, 2.0**-22, 2.0**-21, 3 * 2.0**-21, 1e-3 * std):
    new = _log_ratios(std, shift, lambda x: source.snap(x, step), step)
    old = _log_ratios(std, shift, lambda x: jnp.round(x / 2.0**-9) * 2.0**-9, 2.0**-9)
    worst = max(worst, np.sqrt(np.mean(new**2)))
    before = max(before, np.sqrt(np.mean(old**2)))
  assert worst < 2.5e-5 and before > 3e-4


@pytest.mark.parametrize(("dtype", "more"), [(np.float32, 0), (np.float64, 29)])
def test_a_cell_holds_the_floats_that_its_chance_is_said_to_rest_on(dtype, more):
  """A share of one float in a cell is what is left open, for a number: 2^-13 and 2^-9."""
  for scale in 2.0 ** np.linspace(-3, 3, 61):
    held = lambda scales: finite.fine_step(scale) / np.spacing(dtype(scales * scale))
    assert held(4) >= 2.0 ** (13 + more) and held(40) >= 2.0 ** (9 + more)


@pytest.mark.cases(slow=["1.0"], long=...)
@pytest.mark.parametrize("value", [0.0, 1 / 3, 1.0])
def test_every_point_at_40_scales_is_possible_for_every_value(value):
  """u is driven to e^-40: the 100 grid points there are all reached from each neighbour."""
  words = [np.zeros(60_000, np.uint32)]
  words += list(np.random.default_rng(0).integers(0, 2**32, (5, 60_000), np.uint32))
  words[1] = np.random.default_rng(1).integers(60, 90, 60_000).astype(np.uint32)
  sign = jnp.full(60_000, 2**31, jnp.uint32)
  noise = distributions.laplace(tuple(map(jnp.asarray, words)), sign, jnp.float32)
  out = np.asarray(source.snap(jnp.float32(value) + noise, 2.0**-12), np.float64)
  cells = np.round(out * 2**12).astype(int)
  start = int((40.05 + value) * 2**12)
  assert set(range(start, start + 100)) <= set(cells)


@pytest.mark.long
def test_quantiles_are_points_of_a_public_grid_and_never_a_record():
  quantile = mechanisms.Quantile(50.0, 0.0, 8.0)
  records = jnp.asarray(np.random.default_rng(0).uniform(0, 8, 50), jnp.float32)
  keys = jax.random.split(_KEY, 500)
  out = np.asarray(jax.vmap(quantile, (0, None))(keys, records), np.float64)
  np.testing.assert_array_equal(out / 8 * 2**23 % 1, 0.5)


# --- exact values


@pytest.mark.slow
def test_integers_and_float64_are_not_rounded_before_the_noise():
  laplace = mechanisms.Laplace(1.0, 1.0)
  for one in (2**24, 2**30 + 1, -(2**24) - 3):
    kinds = (np.int64, jnp.int32, np.float64)
    for kind in kinds[: 2 if abs(one) > 2**25 else 3]:
      pairs = [finite.pair("v", kind(one + moved), 1.0) for moved in (0, 1)]
      (high, low), (high_2, low_2) = pairs
      assert float(high_2 - high) + float(low_2 - low) == 1.0
      assert int(high) + float(low) == one
  out = [laplace(_KEY, np.array([v])) for v in (2**23 + 0.25, 2**23 + 1.25)]
  assert float(out[1][0] - out[0][0]) == 1.0
  with refuses("value"):
    laplace(_KEY, np.array([1e12]))
  with refuses("value"):
    laplace(_KEY, np.array([2**60]))


@pytest.mark.slow
def test_wide_integers_in_x64(x64):
  high, low = finite.pair("v", jnp.asarray([2**60 + 1, -(2**60) - 1]), 1.0)
  assert [int(h) + int(v) for h, v in zip(high, low)] == [2**60 + 1, -(2**60) - 1]
  assert mechanisms.Laplace(1.0, 1.0)(_KEY, jnp.asarray(2**53 + 1)).dtype == jnp.float64


# --- exact sums


@pytest.mark.slow
def test_sums_are_exact_in_any_order_and_move_by_one_share():
  """A float32 sum of 100,000 shares depends on the order by more than a record."""
  values = np.random.default_rng(0).random(100_000).astype(np.float32)
  orders = [values, np.sort(values), np.sort(values)[::-1]]
  floats = {float(np.cumsum(v, dtype=np.float32)[-1]) for v in orders}
  assert max(floats) - min(floats) > 0.1  # the old sum, in the worst order
  found = [finite.total(jnp.asarray(v)) for v in orders]
  whole = {int(w) * 2**23 + int(r * 2**23) for w, r in found}
  exact = int(np.round(values.astype(np.float64) * 2**23).sum())
  assert whole == {exact}
  changed = values.copy()
  changed[0] = 1.0
  w, r = finite.total(jnp.asarray(changed))
  assert 0 < int(w) * 2**23 + int(r * 2**23) - exact <= 2**23
  ones = finite.total(jnp.ones((3, 2)))
  assert ones[0].tolist() == [3, 3] and ones[1].tolist() == [0, 0]


def test_float64_sums_are_exact(x64):
  values = np.random.default_rng(0).random(1000)
  whole, rest = finite.total(jnp.asarray(values))
  exact = int(np.round(values * 2**38).astype(np.int64).sum())
  assert int(whole) * 2**38 + int(rest * 2**38) == exact


@pytest.mark.cases(long=["add_or_remove_one"], slow=...)
@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
def test_the_mean_of_float64_values_is_right(x64, relation):
  values = np.random.default_rng(0).uniform(-3, 5, 1000)
  mean = mechanisms.BoundedMean(1e9, -3.0, 5.0, neighboring_relation=relation)
  assert float(mean(_KEY, values)) == pytest.approx(values.mean(), rel=1e-8)


# --- scores


_KINDS = [
  mechanisms.Exponential,
  mechanisms.PermuteAndFlip,
  *(
    functools.partial(mechanisms.ReportNoisyMax, noise=n)
    for n in mechanisms.selection.NOISES
  ),
]


@pytest.mark.cases(
  slow=["1e+30-kind3"], long=["1e+30-Exponential", "1e+30-PermuteAndFlip", "1e+30-kind2"]
)
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(
  "level", [1e30, np.float32(-3e38), np.int64(2**60), np.int32(2**30)]
)
def test_huge_scores_still_get_noise(kind, level):
  """Equal scores are chosen equally often at any height; beside 1e30 noise was lost."""
  scores = np.full((4000, 2), level)
  share = np.asarray(kind(1.0)(_KEY, scores)).mean()
  assert abs(share - 0.5) < 0.05
  if isinstance(level, np.integer):  # one more: worth half a scale, not a rounding error
    scores[:, 1] += 1
    share = np.asarray(kind(2.0)(_KEY, scores)).mean()
    assert 0.6 < share < 0.86


@pytest.mark.cases(quick=["kind4"], long=...)
@pytest.mark.parametrize("kind", _KINDS)
def test_traced_scores_without_a_choice_give_minus_one(kind):
  rows = jnp.array([[jnp.nan, 0.0], [jnp.inf, 0.0], [-jnp.inf] * 2, [-jnp.inf, 0.0]])
  assert jax.jit(kind(1.0))(_KEY, rows).tolist() == [-1, -1, -1, 1]
  for row in rows[:3]:
    with refuses("utilities"):
      kind(1.0)(_KEY, row)


@pytest.mark.parametrize("scale", [1 / 40, 1 / 16.5, 1.0])
def test_integers_keep_room_for_the_grid_below_them(scale):
  """Of 4095 in float32 no multiple of 2^-12 is left: 4096 beside it had cells three to one."""
  step = finite.fine_step(scale)
  for value in (4095, 4096, 2**20 - 1, -(2**31), 2**31 - 1):
    high, low = finite.pair("v", jnp.int32(value), scale)
    assert int(high) + int(low) == value and 0 <= float(low) < 2.0**22 * step
    near = jnp.float32(low) + step * jnp.arange(1, 4)
    np.testing.assert_array_equal((near - low) / step, [1, 2, 3])


@pytest.mark.slow
def test_sparse_vector_compares_large_integers_exactly():
  base = 2**24
  vector = mechanisms.SparseVector(400.0, threshold=base + 0.5, max_above=3)
  answers = vector(_KEY, np.array([base, base + 1, base, base + 1]))
  assert answers.above.tolist() == [False, True, False, True]
  traced = jax.jit(vector)(_KEY, jnp.array([base, base + 1, base, base + 1]))
  np.testing.assert_array_equal(answers.above, traced.above)


@pytest.mark.slow
def test_values_of_hits_lie_on_the_public_grid():
  vector = mechanisms.SparseVector(50.0, threshold=1.0, max_above=5, epsilon_values=5.0)
  answers = vector(_KEY, jnp.full(5, 30 + 1 / 3))
  step = finite.fine_step(1.0)
  values = np.asarray(answers.value, np.float64)
  assert answers.above.all() and (values % step == 0).all()


def test_a_lie_of_probability_1e_12_is_told_that_rarely(monkeypatch):
  """Given 32 zero bits, a float32 uniform lies always; the exact coin in 0.4 %."""
  response = mechanisms.RandomizedResponse(27.6, num_categories=2)  # lies with 2e-12
  real = jax.random.bits
  first = lambda key, shape=(), dtype=jnp.uint32: (
    jnp.zeros(shape, dtype) if shape == (9000,) else real(key, shape, dtype)
  )
  monkeypatch.setattr(jax.random, "bits", first)
  answers = source.bernoulli(_KEY, response.noise_parameter, (9000,))
  assert 0.004 < float(answers.mean()) < 0.014
  old = jnp.zeros(9000) < response.noise_parameter
  assert bool(old.all())


def test_no_epsilon_is_so_large_that_nothing_is_hidden(monkeypatch):
  """e^-800 underflows to a coin that never falls."""
  _drive(monkeypatch, 0)
  response = mechanisms.RandomizedResponse(800.0, num_categories=2)
  assert (
    response.noise_parameter == 0 and response(_KEY, jnp.ones(4, int)).tolist() == [0] * 4
  )


@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)])
def test_an_integer_that_float64_would_round_is_refused(value):
  held = np.array([0, value], np.int64)
  with refuses("x"):
    finite._exact_floats("x", held)
  most = np.array([2**53, -(2**53)], np.int64)
  np.testing.assert_array_equal(finite._exact_floats("x", most), most.astype(np.float64))
