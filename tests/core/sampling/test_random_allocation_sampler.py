"""Every example once a pass, uniformly, independently, anew; charged by the pass."""

import functools

import dp_accounting as dpa
import numpy as np
import pytest

from dpjax import accounting, sampling
from dpjax.accounting import overflow
from dpjax.accounting.event_kinds import elements
from dpjax.accounting.event_kinds.random_allocation import random_allocation_event
from dpjax.noise import NoiseShape
from dpjax.noise.correlated import BandedToeplitz
from tests import plans
from tests.refuses import refuses

_N = 20_000


def _places(seed, turn, steps=4):
  sampler = sampling.RandomAllocationSampler(steps_per_pass=steps, capacity=_N)
  places = np.full(_N, -1)
  for step in range(turn * steps, (turn + 1) * steps):
    drawn = sampler.draw(_N, seed=seed, step=step)
    assert (places[drawn] == -1).all()
    places[drawn] = step % steps
  assert (places >= 0).all()
  return places


def test_once_a_pass_uniform_independent_and_anew():
  first, second, other = _places(0, 0), _places(0, 1), _places(1, 0)
  for a, b in [(first, second), (first, other), (first[1:], first[:-1])]:
    table = np.histogram2d(a, b, bins=4)[0]
    chi = ((table - len(a) / 16) ** 2 / (len(a) / 16)).sum()
    assert 2 < chi < 45  # 15 degrees of freedom; equal passes would have 3 * _N
  np.testing.assert_array_equal(first, _places(0, 0))


_plan = functools.partial(
  plans.of, sampler=sampling.RandomAllocationSampler(steps_per_pass=4, capacity=64),
  noise_multiplier=2.0, normalize_by=10.0, num_steps=8, delta=1e-3,
)  # fmt: skip


def test_a_plan_is_charged_a_pass_at_its_first_step():
  plan = _plan()
  once = random_allocation_event(accounting.gaussian_event(2.0), num_steps=4)
  assert elements.parts(plan.event()) == {once: 2}
  assert elements.parts(plan.event(5)) == {once: 2}
  assert elements.parts(plan.event(4)) == {once: 1}
  assert plan.accountant == "pld"
  assert plan.epsilon(steps=1) == plan.epsilon(steps=4) < plan.epsilon(steps=5)
  left = plan.delta * (1 - overflow.OVERFLOW_SHARE)
  assert plan.epsilon() == accounting.epsilon(accounting.compose(once, 2), delta=left)
  assert "drawn uniformly on its own, anew in each pass" in " ".join(
    plan.statement().split()
  )


@pytest.mark.parametrize(
  "changes, field",
  [
    ({"noise_shape": NoiseShape(schedule=(1.0,) * 4 + (2.0,) * 4)}, "sampler"),
    ({"noise_shape": NoiseShape(correlation=BandedToeplitz((1.0, 0.5)))}, "sampler"),
  ],
)
def test_what_is_not_proved_is_refused(changes, field):
  with refuses(field):
    _plan(**changes)


def test_only_a_gaussian_is_a_step():
  sampler = sampling.RandomAllocationSampler(4, 8)
  with refuses("event"):
    sampler.event(dpa.LaplaceDpEvent(1.0))
  with refuses("steps_per_pass", value=0):
    sampling.RandomAllocationSampler(0, 8)
  with refuses("capacity"):
    sampling.RandomAllocationSampler(2, 1).draw(100, seed=0, step=0)
