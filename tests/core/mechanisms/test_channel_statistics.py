"""Channel statistics: a float64 loop, the influence of one example, noise, and the price."""

import math

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy import stats

from dpjax import accounting, mechanisms
from dpjax.accounting.event_kinds.randomized_response import pure_dp_event
from dpjax.mechanisms import channel_statistics as lib
from dpjax.mechanisms import noisy_means as means
from dpjax.noise import source
from tests.refuses import refuses

_RNG = np.random.default_rng(0)
_X = np.abs(_RNG.normal(size=(40, 2, 2, 3)) * [0.1, 1.0, 3.0]).astype(np.float32)
_NORMS = (1.5, 4.0)
_NOWHERE = 1e-4  # a noise multiplier that hides nothing


def _oracle(x, norms, normalize_by):
  """Mean and mean square by a loop over examples, in float64."""
  sums = np.zeros((2, x.shape[-1]))
  for example in np.asarray(x, np.float64):
    rows = example.reshape(-1, x.shape[-1])
    for i, vector in enumerate((rows.mean(axis=0), (rows**2).mean(axis=0))):
      sums[i] += vector * min(1.0, norms[i] / np.linalg.norm(vector))
  return sums / normalize_by


def _made(**options):
  return mechanisms.ChannelStatistics(**{"normalize_by": 40.0, **options})


@pytest.mark.slow
def test_it_is_the_loop_where_the_noise_is_negligible():
  found = _made(noise_multiplier=_NOWHERE, clip_norms=_NORMS)(jax.random.key(0), _X)
  clipped = _oracle(_X, _NORMS, 40)
  assert np.abs(np.stack([found.mean, found.mean_square]) - clipped).max() < 2e-4
  unclipped = _oracle(_X, (math.inf, math.inf), 40)
  assert np.abs(clipped - unclipped).max() > 0.1  # the norms matter here
  on_device = lib.channel_moments(jnp.asarray(_X))
  assert np.allclose(on_device, lib.channel_moments(_X), atol=1e-6)


@pytest.mark.long
def test_the_private_medians_are_near_the_medians():
  many = np.tile(_X, (50, 1, 1, 1))
  made = _made(normalize_by=2000.0, noise_multiplier=_NOWHERE, median_epsilon=1.0)
  found = made(jax.random.key(1), many)
  vectors = np.asarray(lib.channel_moments(_X), np.float64)
  medians = np.median(np.linalg.norm(vectors, axis=2), axis=0)
  assert np.abs(np.asarray(found.clip_norms) / medians - 1).max() < 0.1
  clipped = _oracle(_X, np.asarray(found.clip_norms), 40)
  assert np.abs(np.stack([found.mean, found.mean_square]) - clipped).max() < 1e-3


def _moved(total, rows, other):
  """How far the sum moves between two neighbours, in clip norms."""
  sums = [
    np.add(*(np.asarray(part, np.float64) for part in total(r))) for r in (rows, other)
  ]
  return float(np.linalg.norm(sums[0] - sums[1]))


def _unclipped(rows):
  return np.sum(np.asarray(rows, np.float64), axis=0), 0.0


def _neighbours():
  """(rows, with one more, with one exchanged) of 700 rows, some as long as can be."""
  rows = _RNG.normal(size=(700, 5)).astype(np.float32)
  for extreme in (1e-38, 0.3, 7.0, 1e20, 1e29, 3e38):
    one = np.full((1, 5), extreme, np.float32)
    yield rows, np.concatenate([rows, one]), np.concatenate([one, rows[1:]])
  rows = np.full((700, 5), 1.0, np.float32)
  yield rows, np.concatenate([rows, -rows[:1]]), np.concatenate([-rows[:1], rows[1:]])


def test_p9_one_example_moves_a_sum_by_the_clip_norm_exchanged_by_twice_it():
  clipped = jax.jit(lambda rows: means.clipped_total(rows, 1.0))
  found = [
    (_moved(clipped, rows, more), _moved(clipped, rows, exchanged))
    for rows, more, exchanged in _neighbours()
  ]
  added, exchanged = np.max(found, axis=0)
  assert 0.999 < added <= 1.0 and 1.99 < exchanged <= 2.0  # exactly: integers
  broken = max(_moved(_unclipped, rows, more) for rows, more, _ in _neighbours())
  assert broken > 1e20  # what a sum without clipping would show


@pytest.mark.cases(long=["asarray0"])
@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
def test_what_an_example_adds_does_not_depend_on_the_others_bit_for_bit(place):
  """One compiled for all rows at once rounds a single one differently."""
  x = place(_RNG.normal(size=(means._CHUNK + 3, 25, 2)).astype(np.float32))
  whole, clipped = np.asarray(lib.channel_moments(x)), jax.jit(means.clipped_total)
  for rows in (slice(0, 1), slice(1, 4), slice(2, means._CHUNK + 3)):
    assert (np.asarray(lib.channel_moments(x[rows])) == whole[rows]).all()
  total = lambda rows: np.add(
    *(np.asarray(part, np.float64) for part in clipped(rows, 0.1))
  )
  alone = sum(total(whole[i : i + 1, 0]) for i in range(20))
  assert (total(whole[:20, 0]) == alone).all()


def test_p1_a_vector_that_is_not_finite_counts_as_zero():
  clipped = jax.jit(means.clipped_total)
  for bad in (np.nan, np.inf, -np.inf):
    rows = np.ones((3, 2), np.float32)
    rows[1, 0] = bad
    high, low = clipped(rows, 10.0)
    assert np.allclose(np.asarray(high) + np.asarray(low), 0.2, atol=1e-5)


@pytest.mark.slow
def test_the_noise_is_as_large_as_charged_and_independent():
  made = _made(normalize_by=10.0, noise_multiplier=3.0, clip_norms=_NORMS)
  keys = jax.random.split(jax.random.key(2), 4000)
  found = jax.vmap(made, (0, None))(keys, jnp.zeros((2, 1, 1, 2)))
  draws = np.concatenate([found.mean, found.mean_square], axis=1) * 10 / 3
  stds = draws.std(axis=0) / np.repeat(_NORMS, 2)
  assert np.abs(stds - 1).max() < 0.05  # 1.1 % each; a fault would be a factor
  assert np.abs(np.corrcoef(draws.T) - np.eye(4)).max() < 0.07


@pytest.mark.cases(long=["2.0", "8.0"])
@pytest.mark.parametrize("epsilon", [0.01, 0.3, 2.0, 8.0])
def test_no_pure_mechanism_is_worse_than_its_gaussian(epsilon):
  """Both trade-off functions, and the price of four, at many deltas."""
  alpha = np.linspace(1e-6, 1 - 1e-6, 20_001)
  response = np.maximum(1 - np.exp(epsilon) * alpha, np.exp(-epsilon) * (1 - alpha))
  curve = lambda mu: stats.norm.cdf(stats.norm.isf(alpha) - mu)
  mu = 1 / means.gaussian_of_pure(epsilon)
  assert (curve(mu) <= response + 1e-12).all()
  assert (curve(0.98 * mu) > response).any()  # no smaller one would do
  pure = accounting.compose(pure_dp_event(epsilon), 4)
  gaussian = accounting.compose(accounting.gaussian_event(1 / mu), 4)
  for delta in (1e-6, 1e-2):
    cost = [accounting.epsilon(event, delta=delta) for event in (pure, gaussian)]
    assert cost[0] <= cost[1] * (1 + 1e-3)


def _direct(events, relation):
  """Epsilon by dp_accounting alone, events relative to the sensitivity."""
  del relation
  accountant = PLDAccountant()
  for event in events:
    accountant.compose(event)
  return accountant.get_epsilon(1e-5)


@pytest.mark.cases(quick=["replace_special-1"], long=...)
@pytest.mark.parametrize(
  ("relation", "sensitivity"),
  [("add_or_remove_one", 1), ("replace_special", 1), ("replace_one", 2)],
)
def test_the_event_is_that_of_all_four_releases(relation, sensitivity):
  made = _made(noise_multiplier=6.0, median_epsilon=0.2, neighboring_relation=relation)
  sums = [dpa.GaussianDpEvent(6.0 / sensitivity)] * 2
  medians = [
    dpa.GaussianDpEvent(means.gaussian_of_pure(0.2))
  ] * 2  # pure under its own relation
  event = made.event(relation)
  cost = accounting.epsilon(event, delta=1e-5, neighboring_relation=relation)
  assert cost == pytest.approx(_direct(sums + medians, relation), rel=1e-3)
  assert made._median.epsilon == 0.2
  public = _made(noise_multiplier=6.0, clip_norms=_NORMS, neighboring_relation=relation)
  event = public.event(relation)
  cheaper = accounting.epsilon(event, delta=1e-5, neighboring_relation=relation)
  assert cheaper == pytest.approx(_direct(sums, relation), rel=1e-3) and cheaper < cost


def test_under_replace_one_medians_are_scaled_for_an_exchange():
  swapped = _made(neighboring_relation="replace_one")._median
  assert swapped.scale == 2 * _made()._median.scale
  assert _made(neighboring_relation="replace_special")._median == _made()._median
  with refuses("neighboring_relation"):
    _made(neighboring_relation="replace_one").event("add_or_remove_one")


@pytest.mark.slow
def test_standardised_features_have_mean_zero_and_variance_one():
  found = _made(noise_multiplier=_NOWHERE, clip_norms=(20, 60))(jax.random.key(3), _X)
  seen = np.asarray(lib.standardize(_X, found), np.float64).reshape(-1, 3)
  assert np.abs(seen.mean(axis=0)).max() < 0.02
  assert np.abs(seen.std(axis=0) - 1).max() < 0.05


@pytest.mark.parametrize(
  ("options", "field"),
  [
    ({"clip_norms": (1.0,)}, "clip_norms"),
    ({"clip_norms": (1.0, -1.0)}, "clip_norms[1]"),
    ({"noise_multiplier": 0.0}, "noise_multiplier"),
    ({"noise_multiplier": 1e-200}, "noise_multiplier"),
    ({"noise_multiplier": 1e200}, "noise_multiplier"),
    ({"median_epsilon": 0.0}, "median_epsilon"),
    ({"median_epsilon": 800.0}, "median_epsilon"),
    ({"normalize_by": 1e200}, "normalize_by"),
  ],
)
def test_wrong_settings_are_one_line(options, field):
  with refuses(field):
    _made(**options)


def test_wrong_data_are_one_line():
  made = _made()
  for x in (np.zeros(3), np.zeros((3, 0)), np.zeros((3, 0, 2))):
    with refuses("x"):
      made(jax.random.key(0), x)


class _KeyAlone(lib.ChannelStatistics):
  """A plant: its noise follows from the key alone."""

  def __call__(self, key, x):
    return self.after(key, x, None)


@pytest.mark.parametrize("kind", [lib.ChannelStatistics, _KeyAlone])
def test_folds_and_noise_levels_under_one_key_share_no_noise(kind):
  """The difference of two folds' means was the exact mean of the records that only one holds, and
  two noise levels gave the exact mean of all."""
  made = kind(normalize_by=1.0, noise_multiplier=8.0, clip_norms=(1.0, 1.0))
  x = np.zeros((6, 1, 1, 40), np.float32)
  x[0] = 0.1
  key = jax.random.key(0)
  whole, fold = made(key, x), made(key, x[1:])
  exact = made.after(key, x, None).mean - made.after(key, x[1:], None).mean
  np.testing.assert_allclose(exact, 0.1, atol=1 / 16)  # the grid's step
  noise = np.asarray(whole.mean - fold.mean) - 0.1
  assert (noise.std() < 1 / 16) == (kind is _KeyAlone)
  assert kind is _KeyAlone or 8 < noise.std() < 16  # sqrt(2) of 8, from 40 numbers
  louder = kind(normalize_by=1.0, noise_multiplier=16.0, clip_norms=(1.0, 1.0))(key, x)
  # Without the noise: twice one release less the other is the sum.
  noise = np.asarray(2 * whole.mean - louder.mean)
  assert (noise.std() < 1 / 8) == (kind is _KeyAlone)
  again = made(key, x[::-1].astype(np.float64))  # no second draw for the same data
  np.testing.assert_array_equal(again.mean, whole.mean)


@pytest.mark.parametrize("kind", [lib.ChannelStatistics, _KeyAlone])
def test_other_shapes_of_the_same_bytes_share_no_noise(kind):
  """Flat images and images of two channels had the same noise where both have a channel, so their
  difference was that of two exact sums."""
  made = kind(normalize_by=1.0, noise_multiplier=8.0, clip_norms=(1.0, 1.0))
  key = source.new_key()  # whose noise begins with the same numbers, whatever its length is
  x = np.zeros((3, 40), np.float32)
  difference = np.asarray(made(key, x).mean[:20] - made(key, x.reshape(3, 2, 20)).mean)
  assert (difference.std() < 1 / 16) == (kind is _KeyAlone)
  # Positions in another shape have the same sums: no second draw.
  rows = np.asarray(made(key, x.reshape(3, 4, 10)).mean)
  np.testing.assert_array_equal(rows, made(key, x.reshape(3, 2, 2, 10)).mean)


@pytest.mark.parametrize("kind", [lib.ChannelStatistics, _KeyAlone])
def test_noise_levels_share_no_noise_under_jit(kind):
  """Twice one release less the other was the exact sum."""
  key, x = jax.random.key(0), np.zeros((3, 40), np.float32)
  quiet, loud = (
    np.asarray(jax.jit(kind(1.0, level, clip_norms=(1.0, 1.0)))(key, x).mean)
    for level in (8.0, 16.0)
  )
  assert ((2 * quiet - loud).std() < 1 / 8) == (kind is _KeyAlone)


@pytest.mark.parametrize("eight", [8, np.float64(8), np.float32(8)])
def test_equal_settings_and_data_have_one_noise(eight):
  """A second draw would cost again, and who wrote 8 in place of 8.0 would not expect it."""
  key, x = jax.random.key(0), np.zeros((3, 4), np.float32)
  first = lib.ChannelStatistics(1.0, 8.0, clip_norms=(1.0, 1.0))(key, x)
  again = lib.ChannelStatistics(1, eight, clip_norms=[1, 1])(key, -x)  # -0.0 is 0.0
  np.testing.assert_array_equal(first.mean, again.mean)


def test_one_key_shows_whether_two_data_sets_are_equal():
  """As `__call__` says: so each data set needs a key of its own, even if all cells are 0 or 1."""
  made = lib.ChannelStatistics(1.0, 8.0, clip_norms=(1.0, 1.0))
  key = jax.random.key(0)
  folds = [np.float32([[1], [0], cell]) for cell in ([0], [0], [1])]
  one, equal, other = (float(made(key, fold).mean[0]) for fold in folds)
  assert one == equal != other
  alone = [float(made(jax.random.fold_in(key, i), folds[0]).mean[0]) for i in range(2)]
  assert alone[0] != alone[1]
