"""`dpjax.solve`: answers are those of the accountant, on the private side; steps are counted."""

import math

import pytest

from dpjax import accounting, solve
from dpjax.accounting import matrix
from dpjax.accounting.overflow import OVERFLOW_SHARE
from dpjax.solve import Bounded, Question
from tests.refuses import refuses

_ASKED = Question(
  epsilon=2.0,
  noise_multiplier=1.0,
  num_steps=30,
  sampling_prob=0.05,
  delta=1e-5,
  sampler="poisson",
  neighboring_relation="add_or_remove_one",
  accountants=("rdp",),
)


def _epsilon(asked, delta=1e-5):
  """Of Poisson sampled Gaussian steps, by the accountant asked directly."""
  noise = accounting.gaussian_event(asked.noise_multiplier)
  step = accounting.poisson_sampled_event(noise, sampling_prob=asked.sampling_prob)
  run = accounting.compose(step, asked.num_steps)
  return accounting.epsilon(run, delta=delta, accountant="rdp")


def test_an_epsilon_is_that_of_the_accountant_and_in_training_of_less_delta():
  assert solve.epsilon_of(_ASKED, "rdp") == pytest.approx(_epsilon(_ASKED), rel=1e-9)
  expected = _epsilon(_ASKED, delta=1e-5 * (1 - OVERFLOW_SHARE))
  assert solve.epsilon_in_training(_ASKED, "rdp") == pytest.approx(expected, rel=1e-9)
  everybody = _ASKED._replace(sampler="none", sampling_prob=1.0)
  noise = accounting.compose(accounting.gaussian_event(1.0), 30)
  expected = accounting.epsilon(noise, delta=1e-5, accountant="rdp")
  assert solve.epsilon_of(everybody, "rdp") == pytest.approx(expected, rel=1e-9)
  # Nobody overflows where everybody takes part.
  assert solve.epsilon_in_training(everybody, "rdp") == pytest.approx(expected, rel=1e-9)


@pytest.mark.cases(slow=["noise_multiplier-<lambda>", "sampling_prob-<lambda>"])
@pytest.mark.parametrize(
  ("unknown", "worse"),
  [
    ("noise_multiplier", lambda value: value * (1 - 1e-4)),
    ("num_steps", lambda value: value + 1),
    ("sampling_prob", lambda value: value * (1 + 1e-4)),
  ],
)
def test_the_unknown_reaches_the_target_from_the_private_side(unknown, worse):
  answer = solve.solve(_ASKED._replace(**{unknown: None}))
  found = getattr(answer, unknown)
  assert _epsilon(answer) <= 2.0 < _epsilon(answer._replace(**{unknown: worse(found)}))
  # Six digits, as the command prints them.
  assert float(f"{found:.6g}") == found


class _Attack:
  """A bound that a coarser grid breaks three times, whatever the noise."""

  limit = 1.0

  def __init__(self):
    self.asked = 0

  def cost(self, profile, delta):
    self.asked += 1
    assert self.asked < 9
    return 2.0 if self.asked <= 3 else 1.0


def test_noise_against_an_attack_rises_until_the_rounded_noise_keeps_the_bound(monkeypatch):
  calibrated = lambda event_of, attack, **options: 1.23456789
  monkeypatch.setattr(accounting, "calibrate_noise_to_attack", calibrated)
  asked = _ASKED._replace(epsilon=None, noise_multiplier=None, attack=_Attack())
  # Rounded up to six digits, at first and each of the three times.
  assert solve.solve(asked).noise_multiplier == pytest.approx(1.23463, abs=1e-9)


def test_a_pass_that_has_begun_is_accounted_whole():
  asked = _ASKED._replace(sampler="random_allocation", sampling_prob=0.1)
  for steps, passes in ((1, 1), (10, 1), (11, 2), (20, 2)):
    once = solve.event(asked)
    whole = accounting.epsilon(
      accounting.compose(once, passes), delta=1e-5, accountant="rdp"
    )
    found = solve.epsilon_of(asked._replace(num_steps=steps), "rdp")
    assert found == pytest.approx(whole, rel=1e-9), steps


def test_a_curve_rises_to_the_epsilon_of_the_whole_run():
  rows = solve.curve([_ASKED])
  assert (rows[0]["num_steps"], rows[-1]["num_steps"]) == (1, 30)
  assert rows[-1]["epsilon"] == pytest.approx(_epsilon(_ASKED), rel=1e-9)
  costs = [row["epsilon"] for row in rows]
  assert costs == sorted(costs) and len({row["num_steps"] for row in rows}) == len(rows)


def _bounded(**changes):
  settings = dict(
    sampler="min_sep", noise_multiplier=1.0, num_steps=8, sampling_prob=0.125, steps_apart=4,
    delta=1e-3, num_samples=10_000,
  )  # fmt: skip
  return Bounded(**{**settings, **changes})


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"sampling_prob": 0.2501}, "sampling_prob"),
    ({"sampler": "balls_in_bins"}, "sampling_prob"),
    ({"sampler": "balls_in_bins", "sampling_prob": 0.2501}, "sampling_prob"),
    ({"steps_apart": 0}, "steps_apart"),
    ({"sampler": "poisson"}, "sampler"),
  ],
)
def test_probabilities_that_the_sampler_cannot_have_are_refused(changes, field):
  with refuses(field):
    solve.check_bounded(_bounded(**changes))
  solve.check_bounded(_bounded(sampling_prob=0.25))
  solve.check_bounded(_bounded(sampler="balls_in_bins", sampling_prob=0.25))
  # Within the rounding of 1 / steps_apart.
  solve.check_bounded(_bounded(steps_apart=3, sampling_prob=math.nextafter(1 / 3, 1)))


def test_bounded_rows_hold_the_accountants_epsilons_of_their_names():
  run = _bounded()
  rows = dict(solve.bounded_rows(run))
  common = {"steps_apart": 4, "noise_multiplier": 1.0, "num_steps": 8}
  schemes = {
    "proved, unamplified": {"cyclic": False},
    "cyclic poisson": {"cyclic": True, "turn_prob": 0.5},
  }
  for name, more in schemes.items():
    event = matrix.join(matrix.correlated_events(run.strategy, **common, **more))
    whole = accounting.epsilon(event, delta=1e-3)
    trained = accounting.epsilon(event, delta=1e-3 * (1 - OVERFLOW_SHARE))
    assert rows[f"{name} (pld)"] == pytest.approx(whole, rel=1e-9)
    assert rows[f"{name} (launch.train, pld)"] == pytest.approx(trained, rel=1e-9)
    assert trained > whole
