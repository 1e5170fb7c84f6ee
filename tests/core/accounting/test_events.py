"""Events: constructors, what they are made of, and JSON."""

import json
import math

import dp_accounting as dpa
import pytest

from dpjax import accounting
from dpjax.accounting import proved
from dpjax.accounting.event_kinds.elements import merged_parts, parts
from dpjax.accounting.event_kinds.kind import event_from_json, event_to_json
from dpjax.validate import UserError
from tests.refuses import refuses

_GAUSSIAN = dpa.GaussianDpEvent(1.3)
_POISSON = dpa.PoissonSampledDpEvent(0.01, _GAUSSIAN)
_KNOWN = [
  dpa.NoOpDpEvent(),
  dpa.NonPrivateDpEvent(),
  _GAUSSIAN,
  dpa.LaplaceDpEvent(0.1 + 0.2),
  _POISSON,
  dpa.SampledWithoutReplacementDpEvent(100, 7, _GAUSSIAN),
  dpa.SampledWithReplacementDpEvent(100, 7, _GAUSSIAN),
  dpa.SelfComposedDpEvent(_POISSON, 4000),
  dpa.ComposedDpEvent([dpa.SelfComposedDpEvent(_POISSON, 3), dpa.LaplaceDpEvent(2.0)]),
]
_UNKNOWN = [
  dpa.UnsupportedDpEvent(),
  dpa.SingleEpochTreeAggregationDpEvent(1.0, 8),
  "gaussian",
]


@pytest.mark.parametrize("event", _KNOWN, ids=repr)
def test_json_gives_back_the_same_event(event):
  text = json.dumps(event_to_json(event), allow_nan=False)
  assert event_from_json(json.loads(text)) == event


@pytest.mark.parametrize("event", _UNKNOWN, ids=repr)
def test_p12_an_unknown_event_is_refused_everywhere(event):
  """What has no proof here has no reading either (truncation: test_truncated)."""
  with refuses("event"):
    event_to_json(event)
  for accountant in proved.ACCOUNTANTS:
    with refuses("event"):
      accounting.epsilon(event, delta=1e-5, accountant=accountant)
  with refuses("event"):
    accounting.epsilon(dpa.SelfComposedDpEvent(event, 2), delta=1e-5)


@pytest.mark.parametrize(
  "data",
  [
    {"kind": "gausian", "noise_multiplier": 1.0},
    {"kind": "gaussian"},
    {"kind": "gaussian", "noise_multiplier": 1.0, "hidden": 2},
    {"noise_multiplier": 1.0},
    {"kind": "composed", "events": [{"kind": "nothing"}]},
    [1],
  ],
)
def test_malformed_json_is_a_user_error(data):
  with pytest.raises(UserError):
    event_from_json(data)


def test_composed_of_nothing_is_free():
  assert accounting.compose(_POISSON, 0) == dpa.NoOpDpEvent()
  assert accounting.compose(_POISSON, 5) == dpa.SelfComposedDpEvent(_POISSON, 5)


@pytest.mark.parametrize("num_steps", [2.5, 4000.0, -1, True, "3"])
def test_p27_steps_are_whole_numbers(num_steps):
  with refuses("num_steps"):
    accounting.compose(_POISSON, num_steps)


@pytest.mark.parametrize(
  "make",
  [
    lambda: accounting.gaussian_event(-1),
    lambda: accounting.gaussian_event(math.nan),
    lambda: accounting.poisson_sampled_event(_GAUSSIAN, sampling_prob=0),
    lambda: accounting.poisson_sampled_event(_GAUSSIAN, sampling_prob=1.5),
    lambda: accounting.fixed_size_event(_GAUSSIAN, num_examples=3, batch_size=4),
    lambda: accounting.epsilon(dpa.GaussianDpEvent(-1.0), delta=0.1),
    lambda: accounting.epsilon(dpa.PoissonSampledDpEvent(1.5, _GAUSSIAN), delta=0.1),
    lambda: accounting.epsilon(dpa.SelfComposedDpEvent(_GAUSSIAN, 1.5), delta=0.1),
  ],
)
def test_impossible_numbers_are_refused(make):
  with pytest.raises(UserError):
    make()


def test_parts_count_through_every_composition():
  inner = dpa.ComposedDpEvent([dpa.SelfComposedDpEvent(_POISSON, 3), _GAUSSIAN])
  event = dpa.ComposedDpEvent([dpa.SelfComposedDpEvent(inner, 2), _POISSON])
  assert parts(event) == {_POISSON: 7, _GAUSSIAN: 2}


def test_gaussians_merge_by_their_precision():
  event = dpa.ComposedDpEvent([dpa.GaussianDpEvent(3.0), dpa.GaussianDpEvent(4.0)])
  (merged,) = merged_parts(event)
  assert merged.noise_multiplier == pytest.approx(12 / 5)  # (1/9 + 1/16)^(-1/2)


def test_a_composition_inside_a_sample_is_one_sampled_gaussian():
  both = dpa.ComposedDpEvent([dpa.GaussianDpEvent(3.0), dpa.GaussianDpEvent(4.0)])
  (part,) = parts(dpa.PoissonSampledDpEvent(0.1, both))
  assert part.sampling_probability == 0.1
  assert part.event.noise_multiplier == pytest.approx(12 / 5)


def test_what_cannot_be_sampled_is_refused():
  mixed = dpa.ComposedDpEvent([_GAUSSIAN, dpa.LaplaceDpEvent(1.0)])
  for inner in (mixed, _POISSON, dpa.SelfComposedDpEvent(dpa.LaplaceDpEvent(1.0), 2)):
    with refuses("event"):
      parts(dpa.PoissonSampledDpEvent(0.1, inner))
  with refuses("event"):
    parts(dpa.SampledWithoutReplacementDpEvent(10, 2, dpa.LaplaceDpEvent(1.0)))


def test_no_noise_is_not_private_and_no_sample_is_free():
  no_noise = dpa.GaussianDpEvent(0.0)
  for event in (no_noise, dpa.PoissonSampledDpEvent(0.1, no_noise)):
    assert set(parts(event)) == {dpa.NonPrivateDpEvent()}
  assert not parts(dpa.PoissonSampledDpEvent(0.0, no_noise))
  assert not parts(dpa.SampledWithoutReplacementDpEvent(10, 0, no_noise))
  assert not parts(dpa.PoissonSampledDpEvent(0.5, dpa.NoOpDpEvent()))
