"""Data-dependent bounds of noisy votes: the authors' values, exact divergences, brute force."""

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from dpjax import accounting
from dpjax.accounting import matrix, votes
from dpjax.accounting.event_kinds.kind import ORDERS, event_from_json, event_to_json
from dpjax.accounting.event_kinds.smooth_sensitivity import SmoothSensitivityDpEvent
from tests.refuses import refuses

_ORDERS = np.array([1.5, 4.0, 14.0, 40.0])

# Of the code that the authors published (tensorflow/privacy, research/pate_2018, 03035d5):
# votes, std, log q, the divergences of the label, and of a check at threshold 200.
_PUBLISHED = [
  (
    [200, 30, 20, 0], 40.0, -6.091572666645071,
    [0.0005848795298793582, 0.0006349044566802903, 0.0009882493825376013,
     0.006620216941823649],
    [0.00046875, 0.00125, 0.004375, 0.0125],
  ),
  (
    [250] + [0] * 9, 40.0, -10.019228294289038,
    [1.4969128682941973e-05, 1.6669896848485135e-05, 3.120157896191148e-05,
     0.0005611335895141353],
    [0.00046875, 0.00125, 0.004375, 0.0125],
  ),
  (
    [980, 20], 100.0, -25.89476170828563,
    [1.200689389950932e-12, 1.2838046793995632e-12, 1.8124419734278815e-12,
     8.197081815251101e-12],
    [5.2190633026070325e-16, 5.504242052474822e-16, 7.149056123384785e-16,
     2.1116353518317427e-15],
  ),
  ([6, 5, 1], 2.0, -0.9153243470053354, [0.375, 1.0, 3.5, 10.0], [0.0] * 4),
]  # fmt: skip
# votes, std, order, local sensitivity at distances 0, 1, 5, 30 and the last, smooth at .03
_SENSITIVITIES = [
  (
    [50, 6, 4], 8.0, 4.0,
    [0.00028564964840273934, 0.0004640166588000056, 0.002747935320740401,
     0.016592426467803435, 0.016592426467803435],
    0.011576143138660835,
  ),
  (
    [250] + [0] * 9, 40.0, 14.0,
    [4.912975446198e-06, 5.303783105771208e-06, 7.214131215977295e-06,
     5.20353956603507e-05, 0.0006699072431377868],
    8.364882019023562e-05,
  ),
  (
    [130] + [20] * 6 + [0] * 3, 40.0, 14.0,
    [0.0, 0.0, 0.0, 0.0, 0.0006699072431377868], 0.00024892191669683984,
  ),
]  # fmt: skip


@pytest.mark.parametrize("counts, std, log_q, label, check", _PUBLISHED)
def test_the_authors_values_of_a_label_and_of_a_check(counts, std, log_q, label, check):
  assert votes.log_prob_of_others(counts, std) == pytest.approx(log_q, rel=1e-9)
  found = votes.gaussian_votes_rdp(log_q, std, _ORDERS)
  np.testing.assert_allclose(found, label, rtol=1e-6)
  found = votes.threshold_rdp(max(counts), 200, std, _ORDERS)
  np.testing.assert_allclose(found, check, rtol=1e-6, atol=1e-18)


@pytest.mark.parametrize("counts, std, order, local, smooth", _SENSITIVITIES)
def test_the_authors_values_of_sensitivities(counts, std, order, local, smooth):
  num_teachers = sum(counts)
  found = votes.votes_sensitivity(counts, num_teachers=num_teachers, std=std, order=order)
  at = [0, 1, 5, 30, num_teachers - 1]
  np.testing.assert_allclose(found[at], local, rtol=1e-6, atol=1e-15)
  release = votes.SmoothSensitivity(beta=0.03, noise_multiplier=1.0)
  assert release.sensitivity(found) == pytest.approx(smooth, rel=1e-6)


def _renyi(order, one, other):
  """Renyi divergence of two Gaussians (mean, standard deviation), by quadrature on logarithms."""
  (mean, wide), (shift, narrow) = one, other
  # Of the exponent order log p + (1 - order) log q, a parabola.
  bend = order / wide**2 + (1 - order) / narrow**2
  if bend <= 0:
    return math.inf
  middle = (order * mean / wide**2 + (1 - order) * shift / narrow**2) / bend
  x = middle + np.linspace(-14, 14, 20_001) / math.sqrt(bend)
  exponent = order * stats.norm.logpdf(x, mean, wide)
  exponent = exponent + (1 - order) * stats.norm.logpdf(x, shift, narrow)
  top = exponent.max()
  return (top + math.log(np.trapezoid(np.exp(exponent - top), x))) / (order - 1)


@pytest.mark.parametrize("beta", [1e-9, 1e-3, 0.02, 0.3, 2.0])
@pytest.mark.parametrize("noise", [0.05, 8.0, 1e3])
def test_a_release_costs_the_divergence_of_the_worst_of_all_pairs_that_it_allows(
  beta, noise
):
  """Ratios of smooth sensitivities from e^-beta to e^beta, and shifts up to the smaller one."""
  release = votes.SmoothSensitivity(beta, noise)
  last = -1 / math.expm1(-2 * beta)
  orders = np.array([1 + (last - 1) * share for share in (1e-3, 0.1, 0.5, 0.9, 0.999)])
  orders = np.append(orders[orders < 1e4], 1.5 if last > 1.5 else 1 + (last - 1) / 7)
  claimed = release.rdp(orders)
  for order, bound in zip(orders, claimed, strict=True):
    pairs = [
      ((0.0, noise), (share * min(1, ratio), noise * ratio))
      for ratio in np.exp(beta * np.array([-1.0, -0.9, -0.4, 0.0, 0.4, 0.9, 1.0]))
      for share in (0.0, 0.6, 1.0)
    ]
    exact = max(_renyi(order, *pair) for pair in pairs)
    assert exact == pytest.approx(bound, rel=1e-8, abs=1e-12), order
  assert release.rdp([last * (1 + 1e-9) + 1e-6])[0] == math.inf


@functools.cache
def _probabilities(counts, std):
  """Chance of each class to win, by integration over the winner's noisy count."""

  def of(winner):
    others = np.delete(counts, winner)

    def density(x):
      return stats.norm.pdf(x, counts[winner], std) * np.prod(
        stats.norm.cdf(x, others, std)
      )

    low = min(counts) - 9 * std
    high = max(counts) + 9 * std
    return integrate.quad(density, low, high, epsabs=1e-13, limit=200)[0]

  return np.array([of(winner) for winner in range(len(counts))])


def _neighbours(counts):
  """All votes that one teacher's change of mind can make."""
  for source, target in itertools.permutations(range(len(counts)), 2):
    if counts[source] > 0:
      moved = list(counts)
      moved[source] -= 1
      moved[target] += 1
      yield tuple(moved)


_HISTOGRAMS = [(12, 0, 0), (9, 2, 1), (7, 5, 0), (4, 4, 4), (6, 6, 0), (11, 1)]


@pytest.mark.parametrize("counts", _HISTOGRAMS)
def test_no_bound_is_below_the_exact_divergence(counts):
  std = 2.0
  orders = np.array([1.5, 3.0, 8.0])
  here = _probabilities(counts, std)
  assert here.sum() == pytest.approx(1, abs=1e-9)
  log_q = votes.log_prob_of_others(counts, std)
  assert math.exp(log_q) >= 1 - here[int(np.argmax(counts))] - 1e-9 or log_q == math.log(
    1 - 1 / len(counts)
  )
  bound = votes.gaussian_votes_rdp(log_q, std, orders)
  for other in _neighbours(counts):
    there = _probabilities(other, std)
    powers = here ** orders[:, None] * there ** (1 - orders[:, None])
    exact = np.log(powers.sum(axis=1)) / (orders - 1)
    assert (exact <= bound + 1e-9).all(), (other, exact, bound)
    # A bound on nothing would pass, too: a quarter of it must be refuted where votes are even.
    if counts == (6, 6, 0) and other == (5, 7, 0):
      assert (exact > bound / 4).any()


@pytest.mark.parametrize("counts", _HISTOGRAMS)
@pytest.mark.parametrize("times", [1, 4])
def test_the_proved_epsilon_is_above_that_of_the_labels_themselves(counts, times):
  """Four labels of the same votes, whose joint chances are products, by their exact delta."""
  std = 2.0
  event = accounting.compose(accounting.gaussian_event(std / math.sqrt(2)), times)
  epsilon = accounting.epsilon(event, delta=1e-3)
  chances = [_probabilities(counts, std)]
  chances += [_probabilities(other, std) for other in _neighbours(counts)]
  joint = []
  for single in chances:
    product = single
    for _ in range(times - 1):
      product = np.outer(product, single).ravel()
    joint.append(product)
  for other in joint[1:]:
    for p, q in ((joint[0], other), (other, joint[0])):
      assert np.maximum(p - math.exp(epsilon) * q, 0).sum() <= 1e-3


def _sorted_histograms(num_teachers, num_classes, most=None) -> list[tuple[int, ...]]:
  """All votes, up to the names of the classes, from many for one class to few."""
  most = num_teachers if most is None else min(most, num_teachers)
  if num_classes == 1:
    return [(num_teachers,)] if num_teachers <= most else []
  return [
    (first, *rest)
    for first in range(most, -1, -1)
    for rest in _sorted_histograms(num_teachers - first, num_classes - 1, first)
  ]


# The noise is small, so that small polls are clear. At .7 and .8 theorem 6 ends while it is
# still the better bound.
_POLLS = [
  (num_teachers, num_classes, std, order)
  for num_teachers, num_classes in ((1, 2), (2, 2), (3, 3), (20, 2), (9, 3), (7, 4))
  for std, order in (
    (0.8, 1.5),
    (0.7, 1.2),
    (1.0, 2.0),
    (1.5, 1.01),
    (2.0, 2.0),
    (4.0, 4.0),
  )
]


@pytest.mark.cases(
  slow=[
    f"{poll}-{noise}"
    for poll in ("1-2", "7-4")
    for noise in ("1.0-2.0", "2.0-2.0", "4.0-4.0")
  ]
)
@pytest.mark.parametrize("num_teachers, num_classes, std, order", _POLLS)
def test_smooth_sensitivity_covers_the_published_cost_of_all_votes_of_a_poll(
  num_teachers, num_classes, std, order
):
  """Brute force over all votes: the local sensitivity at each distance, and beta-smoothness."""
  assert votes.conditions_hold(std=std, num_classes=num_classes, order=order)
  every = _sorted_histograms(num_teachers, num_classes)
  near: Any = {
    counts: {tuple(sorted(other, reverse=True)) for other in _neighbours(counts)}
    for counts in every
  }
  costs = {
    counts: votes.gaussian_votes_rdp(votes.log_prob_of_others(counts, std), std, [order])[0]
    for counts in every
  }
  true = {
    counts: max(abs(costs[counts] - costs[other]) for other in near[counts])
    for counts in every
  }
  release = votes.SmoothSensitivity(beta=0.1, noise_multiplier=1.0)
  smooth = {}
  for counts in every:
    stated = votes.votes_sensitivity(
      counts, num_teachers=num_teachers, std=std, order=order
    )
    assert len(stated) == num_teachers + 1
    smooth[counts] = release.sensitivity(stated)
    within = {counts}
    for distance in range(num_teachers + 1):
      most = max(true[other] for other in within)
      # Rounding of the cost, which is at most order / std^2.
      assert most <= stated[: distance + 1].max() + 1e-13 * order / std**2
      within = within.union(*(near[other] for other in within))
  for counts in every:
    for other in near[counts]:
      # beta-smooth: what makes noise of this scale private.
      assert smooth[counts] <= math.exp(0.1) * smooth[other] * (1 + 1e-12)


def test_the_brute_force_sees_costs_that_move():
  found = [votes.gaussian_votes_rdp(votes.log_prob_of_others((20 - k, k), 1.5), 1.5, [2.0])
           for k in range(11)]  # fmt: skip
  assert np.ptp(found) > 0.3


def test_conditions_fail_where_the_paper_does_not_prove_them():
  assert votes.conditions_hold(std=40.0, num_classes=10, order=14.0)
  assert not votes.conditions_hold(std=5.0, num_classes=10, order=14.0)


def test_the_event_of_a_release_is_proved_under_its_own_relation_alone():
  event = SmoothSensitivityDpEvent(0.005, 30.0, "replace_one")
  both = matrix.join([event, accounting.gaussian_event(20.0)])
  epsilon = accounting.epsilon(
    both, delta=1e-5, neighboring_relation="replace_one", accountant="rdp"
  )
  rdp = votes.SmoothSensitivity(0.005, 30.0).rdp(ORDERS)
  gauss = np.asarray(ORDERS) / (2 * 10.0**2)
  orders = np.asarray(ORDERS)
  by_hand = (
    rdp + gauss + np.log1p(-1 / orders) - (math.log(1e-5) + np.log(orders)) / (orders - 1)
  )
  assert epsilon == pytest.approx(by_hand[np.isfinite(by_hand)].min(), rel=1e-6)
  with refuses("event"):
    accounting.epsilon(both, delta=1e-5, accountant="rdp")
  with refuses("event"):
    accounting.epsilon(both, delta=1e-5, neighboring_relation="replace_one")
  saved = event_to_json(event)
  assert event_from_json(saved) == event


@pytest.mark.parametrize(
  "call, field",
  [
    (lambda: votes.log_prob_of_others([1.0], 1.0), "counts"),
    (
      lambda: votes.log_prob_of_others([1.0, math.nan], 1.0),
      "counts",
    ),
    (lambda: votes.log_prob_of_others([1.0, -2.0], 1.0), "counts"),
    (lambda: votes.log_prob_of_others([1.0, 2.0], 0.0), "std"),
    (lambda: votes.gaussian_votes_rdp(0.1, 1.0, [2.0]), "log_q"),
    (lambda: votes.gaussian_votes_rdp(math.nan, 1.0, [2.0]), "log_q"),
    (lambda: votes.gaussian_votes_rdp(-1.0, 1.0, [1.0]), "orders"),
    (
      lambda: votes.votes_sensitivity([3, 1], num_teachers=5, std=1.0, order=2.0),
      "counts",
    ),
    (lambda: votes.SmoothSensitivity(0.0, 1.0), "beta"),
  ],
)
def test_wrong_inputs(call, field):
  with refuses(field):
    call()


def test_extreme_votes_have_finite_costs():
  log_q = votes.log_prob_of_others([1e9, 0], 1.0)
  assert log_q == -math.inf or log_q < -1e6
  assert (votes.gaussian_votes_rdp(log_q, 1.0, _ORDERS) >= 0).all()
  assert (votes.gaussian_votes_rdp(-1e-300, 1e-3, _ORDERS) == _ORDERS / 1e-6).all()
  assert np.isfinite(votes.threshold_rdp(1e9, -1e9, 1.0, _ORDERS)).all()
