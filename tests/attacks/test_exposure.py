"""Exposure of canaries: ranks by a loop, tails by many digits, the bound by exact draws."""

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from dpjax import attacks
from dpjax.attacks import allowed, exposure
from tests.refuses import refuses


def test_the_secrets_of_a_format_are_all_different_lines():
  form = attacks.CanaryFormat("{x} is {}!", alphabet="abc", length=3)
  lines = [form.text(secret) for secret in range(form.num_secrets)]
  assert len(set(lines)) == form.num_secrets == 27
  assert (
    lines[0] == "{x} is aaa!" and lines[26] == "{x} is ccc!" and lines[5] == "{x} is abc!"
  )


@settings(max_examples=30)
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=12), st.data())
def test_the_rank_is_that_of_a_loop_with_ties_ahead(losses, data):
  secret = data.draw(st.integers(0, len(losses) - 1))
  ahead = [x for i, x in enumerate(losses) if x < losses[secret]]
  ties = [x for i, x in enumerate(losses) if x == losses[secret] and i != secret]
  rank = len(ahead) + len(ties) + 1
  row = attacks.exposure_by_rank(losses, secret)
  assert row.rank == rank
  assert row.bits == pytest.approx(np.log2(len(losses) / rank))


def test_a_model_that_knows_nothing_exposes_nothing():
  assert attacks.exposure_by_rank(np.ones(100), 7).bits == 0
  assert attacks.exposure_by_rank([np.inf, 1.0], 0).bits == 0


@pytest.mark.cases(
  quick=[f"{z}-{shape}" for z in (-9.0, 0.0, 6.0) for shape in (-8.0, 0.0, 8.0)], slow=...
)
@pytest.mark.parametrize("shape", [-8.0, -1.0, 0.0, 2.0, 8.0])
@pytest.mark.parametrize("z", [-9.0, -3.0, -0.2, 0.0, 1.5, 6.0])
def test_the_tail_is_that_of_forty_digits(shape, z):
  """scipy's own has no digit left at z = -9 and a shape of 2: it is -0.0 there, or negative."""
  with mpmath.workdps(40):
    density = lambda t: 2 * mpmath.npdf(t) * mpmath.ncdf(shape * t)
    stops = [
      mpmath.mpf(z) - 40,
      *[mpmath.mpf(z) - part for part in (8, 2, 0.5, 0.1, 0.02, 0)],
    ]
    expected = float(mpmath.log(mpmath.quad(density, stops)))
  assert exposure._log_cdf(z, shape) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_fit_finds_the_exposure_that_counting_finds():
  references = stats.skewnorm.rvs(3.0, 20.0, 2.0, 4000, random_state=0)
  for share in (0.4, 0.05, 0.005):
    loss = float(stats.skewnorm.ppf(share, 3.0, 20.0, 2.0))
    fit = attacks.extrapolate(loss, references, draws=20)
    assert fit.bits == pytest.approx(-np.log2(share), abs=0.35)
    assert fit.p_value > 0.05


def test_a_wrong_distribution_is_said_to_fit_badly():
  rng = np.random.default_rng(0)
  two_heaps = np.concatenate([rng.normal(0, 1, 300), rng.normal(9, 1, 300)])
  assert attacks.extrapolate(-2.0, two_heaps).p_value < 0.01
  p_values = [
    attacks.extrapolate(0.0, rng.normal(5, 2, 200), draws=20, seed=i).p_value
    for i in range(12)
  ]
  # As often below .1 as a fit to the right distribution should be.
  assert 0 <= np.mean(np.array(p_values) < 0.1) < 0.35


def test_without_leakage_the_mean_is_that_of_uniform_ranks():
  nothing = allowed.by_epsilon(0.0, 0.0)
  for count in (2, 16, 10_000):
    bound = attacks.ExposureBound(nothing, count)
    expected = np.mean(np.log2(count) - np.log2(np.arange(1, count + 1)))
    assert bound.mean() == pytest.approx(expected, rel=1e-9)
  many = attacks.ExposureBound(nothing, 10**9).mean()
  assert np.log2(np.e) <= many < 1.01 * np.log2(np.e)


def test_the_bound_of_epsilon_is_its_closed_form():
  epsilon = 1.0
  bound = attacks.ExposureBound(allowed.by_epsilon(epsilon, 1e-3), 1 << 14)
  for bits in (3.0, 5.0, 14.0):
    assert bound.probability(bits) == pytest.approx(np.exp(epsilon) * 2**-bits + 1e-3)
  # The same, solved for the bits that are exceeded with a probability of .05.
  closed = np.log2(np.exp(epsilon) / (0.05 - 1e-3))
  assert bound.most(0.95) == pytest.approx(closed, abs=0.02)


@pytest.mark.parametrize("copies", [1, 2, 5])
def test_the_bound_is_reached_by_randomised_response_and_not_by_less(copies):
  """The best attack on a secret in k answers, each with epsilon: no bound may be below it.

  The mechanism says the true secret with a probability p that makes it epsilon-DP for one
  record, against an output that is uniform without it: k records shift it by k epsilon.
  """
  count = 64
  epsilon = 0.3
  odds = np.exp(copies * epsilon)
  hit = odds / count  # <= 1: Pr[rank = 1]; all other ranks alike
  rng = np.random.default_rng(copies)
  ranks = np.where(rng.random(40_000) < hit, 1, rng.integers(2, count + 1, 40_000))
  bits = np.log2(count) - np.log2(ranks)
  bound = attacks.ExposureBound(allowed.by_epsilon(epsilon, 0.0), count, copies)
  error = 4 * bits.std() / np.sqrt(len(bits))
  assert bits.mean() < bound.mean() + error
  for level in (1.0, 3.0, 6.0):
    rate = np.mean(bits >= level)
    assert rate < bound.probability(level) + 4 * np.sqrt(rate / len(bits))
  # At the first rank it is reached: a bound of one copy fewer would be broken.
  assert np.mean(ranks == 1) == pytest.approx(bound.probability(6.0), rel=0.1)
  if copies > 1:
    less = attacks.ExposureBound(bound.line, count, copies - 1)
    assert np.mean(ranks == 1) > 1.15 * less.probability(6.0)


def test_a_group_of_gaussians_is_a_gaussian_of_its_size():
  line = allowed.of_group(allowed.by_mu(0.25), 8)
  rates = np.array([1e-6, 0.01, 0.5])
  np.testing.assert_allclose(
    line(rates), special.ndtr(special.ndtri(rates) + 2.0), rtol=1e-9
  )


def test_many_copies_may_be_exposed_and_the_bits_end_there():
  bound = attacks.ExposureBound(allowed.by_epsilon(8.0, 1e-5), 10_000, 16)
  assert bound.most() == pytest.approx(np.log2(10_000))
  assert bound.probability(13.3) == 0.0 and bound.probability(-1e9) == 1.0
  assert bound.mean() == pytest.approx(np.log2(10_000))


_FORM = attacks.CanaryFormat("{}")
_LINE = allowed.by_mu(1.0)


@pytest.mark.parametrize(
  ("call", "field"),
  [
    (lambda: attacks.CanaryFormat("no place"), "template"),
    (lambda: attacks.CanaryFormat("{}{}"), "template"),
    (lambda: attacks.CanaryFormat("{}", "aa"), "alphabet"),
    (lambda: attacks.CanaryFormat("{}", "a"), "alphabet"),
    (lambda: attacks.CanaryFormat("{}", length=8), "length"),
    (lambda: _FORM.text(10_000), "secret"),
    (lambda: attacks.exposure_by_rank([1.0, np.nan], 0), "losses"),
    (lambda: attacks.exposure_by_rank([1.0], 0), "losses.shape"),
    (lambda: attacks.exposure_by_rank([1.0, 2.0], 2), "secret"),
    (lambda: attacks.extrapolate(np.nan, np.arange(30.0)), "loss"),
    (lambda: attacks.extrapolate(0.0, np.ones(30)), "references"),
    (lambda: attacks.extrapolate(0.0, np.arange(9.0)), "references.shape"),
    (lambda: attacks.extrapolate(0.0, [*range(30), np.inf]), "references"),
    (lambda: attacks.ExposureBound(_LINE, 1), "num_secrets"),
    (lambda: attacks.ExposureBound(_LINE, 10, 0), "copies"),
    (lambda: attacks.ExposureBound(_LINE, 10).most(1.0), "confidence"),
    (lambda: attacks.ExposureBound(_LINE, 10).probability(np.nan), "bits"),
    (lambda: allowed.of_group(_LINE, 0), "size"),
    (
      lambda: attacks.sequence_losses(lambda w, e: w, 0.0, np.arange(3)),
      "tokens.shape",
    ),
  ],
)
def test_wrong_arguments_are_one_line(call, field):
  with refuses(field):
    call()
