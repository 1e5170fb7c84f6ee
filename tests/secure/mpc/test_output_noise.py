"""Weights opened with noise: the bound on the distance holds for what runs, and is not loose."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import accounting
from dpjax.experiments.kinds.secure import noisy_model
from dpjax.experiments.kinds.secure.noisy_model import NoisyModelTask
from dpjax.noise import discrete
from dpjax.secure import mpc
from dpjax.secure.mpc import output_noise, private_values
from tests.refuses import refuses

_SMALL = {"num_rows": 3, "num_features": 2, "noise_multiplier": 4.0}


@pytest.fixture
def secure():
  pytest.importorskip("cryptography", reason="needs the extra 'secure'")


def _made(**changes):
  return mpc.OutputNoise(**{**_SMALL, "l2_penalty": 0.5, "num_steps": 20, **changes})


def _exact(made, x, y):
  """The steps in float64, without any rounding."""
  weights = np.zeros((made.num_features + 1, made.num_outputs))
  for _ in range(made.num_steps):
    error = np.clip(x @ weights + 0.5, 0, 1) - y
    mean = x.T @ error / made.num_rows
    weights = weights - made.rate * (mean + made.penalty * weights)
  return weights


def _rounded(made, x, y, up):
  """The steps in whole numbers, where `up` says which truncations round up: the attacker's."""
  f = made.frac_bits
  rows, labels = ((part * 2.0**f).astype(np.int64) for part in (x, y))
  weights = np.zeros((made.num_features + 1, made.num_outputs), np.int64)

  def cut(values, bits, choice):
    low = values >> bits
    return low + (choice & (low << bits != values))

  penalty = round(made.l2_penalty * made.num_rows * 2**f)
  for step in range(made.num_steps):
    scores = cut(rows @ weights, f, up(step, 0, (made.num_rows, made.num_outputs)))
    error = np.clip(scores + 2 ** (f - 1), 0, 2**f) - labels
    gradient = rows.T @ error + penalty * weights
    weights = weights - cut(gradient, f + made.shift, up(step, 1, weights.shape))
  return weights / 2.0**f


def _data(made, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(made.num_rows, made.num_features))
  y = rng.integers(0, 2, (made.num_rows, made.num_outputs))
  return made.rows(x), made.labels(y)


# --- what runs


@pytest.mark.parametrize(("rows", "outputs", "frac_bits"), [(64, 1, 18), (37, 3, 12)])
def test_the_weights_on_shares_are_those_of_float64_but_for_rounding(
  rows, outputs, frac_bits, secure
):
  made = _made(num_rows=rows, num_outputs=outputs, frac_bits=frac_bits)
  x, y = _data(made)

  def program(party, x, y):
    weights = made.train(party, x, y, last=7)
    weights = made.train(party, x, y, weights=weights, first=7)
    return weights, made.release(party, weights, rng=np.random.default_rng(party.number))

  shares = private_values.split((x, y), frac_bits=frac_bits)
  (zero, opened), (one, also) = mpc.run(program, *shares, frac_bits=frac_bits).outputs
  weights = private_values.join(zero, one, frac_bits=frac_bits)
  exact = _exact(made, x, y)
  assert np.linalg.norm(exact) > 0.05
  # Rounding moves a step by p at most, and each step contracts what came before.
  p = made.rate * made.row_norm + math.sqrt(made.num_features + 1)
  most = math.sqrt(outputs) * p * 2.0**-frac_bits / (1 - made._contraction)
  assert np.linalg.norm(weights - exact) <= most
  assert np.linalg.norm(made.in_the_clear(x, y) - exact) <= most
  # Both parties see one number: the weights and the whole noise of each.
  np.testing.assert_array_equal(opened, also)
  noise = sum(made.noise(np.random.default_rng(number)) for number in (0, 1))
  np.testing.assert_array_equal(opened - weights, noise * 2.0**-frac_bits)


def test_columns_of_two_parties_are_one_bounded_row(secure):
  made = _made(num_rows=8, num_features=3)
  rng = np.random.default_rng(1)
  x_a, x_b = rng.normal(size=(8, 1)) * 9, rng.normal(size=(8, 2)) * 9
  y = rng.integers(0, 2, (8, 1)).astype(float)
  a = output_noise.bounded_rows(x_a, math.sqrt(0.5))
  b = np.c_[output_noise.bounded_rows(x_b, math.sqrt(0.5)), np.ones(8)]
  assert np.linalg.norm(np.c_[a, b], axis=1).max() <= made.row_norm
  shape = lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype)

  def program(party, a, b, y):
    parts = mpc.share(party, a, owner=0), mpc.share(party, b, owner=1)
    return made.train(party, np.concatenate(parts, axis=1), mpc.share(party, y, owner=1))

  ran = mpc.run(program, (a, shape(b), shape(y)), (shape(a), b, y))
  exact = _exact(made, np.c_[a, b], y)
  np.testing.assert_allclose(private_values.join(*ran.outputs), exact, atol=1e-4)


@given(
  st.lists(st.lists(st.floats(width=32), min_size=2, max_size=2), min_size=1, max_size=4),
  st.floats(1e-3, 1e3),
  st.integers(1, 24),
)
@settings(max_examples=60)
def test_no_row_is_longer_than_its_bound(rows, norm, frac_bits):
  found = output_noise.bounded_rows(np.array(rows, np.float32), norm, frac_bits=frac_bits)
  units = (found * 2.0**frac_bits).astype(object)
  assert np.isfinite(found).all()
  for row in units:
    assert sum(int(unit) ** 2 for unit in row) <= norm**2 * 4.0**frac_bits


# --- the bound


@given(
  st.integers(0, 2**32 - 1),
  st.floats(0.02, 20.0),
  st.floats(0.1, 4.0),
  st.integers(1, 30),
  st.sampled_from([6, 9, 18]),
  st.integers(1, 3),
  st.sampled_from([0.0, 1.0, 1e3, 1e30]),
)
@settings(max_examples=80)
def test_no_pair_of_neighbours_is_further_apart_than_the_bound(
  seed, penalty, norm, steps, frac_bits, outputs, far
):
  """Every truncation of one run rounds down, of the other up: the worst of all outcomes."""
  made = _made(
    l2_penalty=penalty,
    feature_norm=norm,
    num_steps=steps,
    frac_bits=frac_bits,
    num_outputs=outputs,
    noise_multiplier=0.05,
  )
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(3, 2)) * rng.choice([0.0, 1.0, far], (3, 1))
  y = rng.integers(0, 2, (3, outputs))
  other, labels = x.copy(), y.copy()
  other[0] = rng.choice([-x[0], np.array([np.nan, 1]), far * rng.normal(size=2)])
  labels[0] = rng.choice([labels[0], 1 - labels[0]])
  down = lambda step, which, shape: np.zeros(shape, bool)
  up = lambda step, which, shape: np.ones(shape, bool)
  first = _rounded(made, made.rows(x), y, down)
  second = _rounded(made, made.rows(other), labels, up)
  assert np.linalg.norm(first - second) <= made.l2_sensitivity
  assert np.linalg.norm(second, axis=0).max() <= made.radius


def _far_pair():
  """A pair of neighbours that few rows pull back: |w_1 - w_2| near 2 R / (n l).

  Most rows train the first feature alone, until the differing row counts as a sure mistake. Its
  second feature, which no other row has, then moves the weights one way or the other.
  """
  made = _made(num_rows=401, l2_penalty=0.2, num_steps=300, feature_norm=5.0)
  x = np.zeros((401, 2))
  y = np.zeros((401, 1))
  x[1:201, 0] = 0.45
  y[1:201] = 1
  x[201:, 0] = -0.45
  for sign in (1, -1):
    x[0] = (1.5, sign * 4.77)
    yield made, made.in_the_clear(made.rows(x), made.labels(y))


def test_a_pair_of_neighbours_comes_near_the_bound():
  (made, one), (_, two) = _far_pair()
  distance = np.linalg.norm(one - two)
  assert 0.9 * made.l2_sensitivity < distance <= made.l2_sensitivity


def test_rounding_is_counted_where_it_is_all_that_moves_the_weights():
  """On a coarse grid one truncation each way is most of the distance."""
  made = _made(frac_bits=2, num_steps=40, l2_penalty=2.0, noise_multiplier=0.2)
  without = 2 * made.row_norm / (3 * made.penalty)
  assert made.l2_sensitivity > 1.5 * without


@pytest.mark.parametrize("outputs", [1, 4])
def test_many_steps_on_a_fine_grid_give_the_bound_of_chaudhuri(outputs):
  numbers = {"num_rows": 1000, "num_features": 3, "noise_multiplier": 1.0}
  made = mpc.OutputNoise(
    **numbers, num_outputs=outputs, l2_penalty=0.01, num_steps=3000, frac_bits=22
  )
  limit = 2 * made.row_norm * math.sqrt(outputs) / (1000 * 0.01)
  assert made.l2_sensitivity == pytest.approx(limit, rel=0.01)
  few = dataclasses.replace(made, num_steps=1)
  # One step from 0: half of the slope, the rate, and rounding.
  first = few.rate * made.row_norm * math.sqrt(outputs) / 1000
  assert few.l2_sensitivity == pytest.approx(first, rel=0.01)


# --- noise and cost


def test_one_party_alone_adds_the_noise_that_is_counted():
  made = _made(num_rows=64, frac_bits=12)
  rng = np.random.default_rng(0)
  draws = np.stack([made.noise(rng) for _ in range(700)]).ravel() * 2.0**-12
  assert draws.std() == pytest.approx(4.0 * made.l2_sensitivity, rel=0.05)
  # Gaussian noise of that size on that distance, by the same accountant.
  gaussian = accounting.epsilon(
    accounting.gaussian_event(4.0),
    delta=1e-5,
    neighboring_relation="add_or_remove_one",
    accountant="rdp",
  )
  assert made.epsilon(delta=1e-5) == pytest.approx(gaussian, rel=1e-4)
  assert made.calibrated(epsilon=0.5, delta=1e-5).epsilon(delta=1e-5) == pytest.approx(
    0.5, rel=1e-3
  )


def test_noise_of_the_operating_system_differs_each_time():
  draws = [output_noise.secret_generator().bytes(8) for _ in range(2)]
  assert draws[0] != draws[1]


# --- what is refused


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"l2_penalty": 0.0}, "l2_penalty"),
    ({"l2_penalty": math.nan}, "l2_penalty"),
    ({"l2_penalty": 1e-9}, "l2_penalty"),
    ({"learning_rate": 1.5}, "learning_rate"),
    ({"learning_rate": 0.3}, "learning_rate"),
    ({"learning_rate": -1.0}, "learning_rate"),
    ({"noise_multiplier": 0.0}, "noise_multiplier"),
    ({"noise_multiplier": 1e6}, "noise_multiplier"),
    ({"num_rows": 2**22, "frac_bits": 22}, "frac_bits"),
    ({"num_steps": 0}, "num_steps"),
    ({"feature_norm": math.inf}, "feature_norm"),
  ],
)
def test_numbers_that_no_proof_covers(changes, field):
  with refuses(field) as caught:
    _made(**changes)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("settings_of_party", "field"),
  [
    ({"truncation": "local"}, "truncation"),
    ({"frac_bits": 12}, "frac_bits"),
  ],
)
def test_a_session_that_rounds_otherwise(settings_of_party, field, secure):
  made = _made()
  bits = settings_of_party.get("frac_bits", 18)
  shares = private_values.split(_data(made), frac_bits=bits)
  with refuses(field):
    mpc.run(made.train, *shares, **settings_of_party)


def test_data_that_no_proof_covers(secure):
  made = _made()
  with refuses("y"):
    made.labels(np.array([[0.5]]))
  with refuses("neighboring_relation"):
    made.event("add_or_remove_one")
  x, y = _data(made)
  with refuses("x.shape"):
    mpc.run(made.train, *private_values.split((x[:2], y[:2])))


# --- what is beside the noise


def test_integers_that_wrap_around_give_the_same_bound_and_noise():
  # 255 + 1 is 0 for np.uint8, and without the bias rounding was counted for no number.
  wrapping = _made(num_features=np.uint8(255), frac_bits=np.int8(18), num_rows=np.int8(3))
  assert wrapping == _made(num_features=255)
  assert wrapping.l2_sensitivity == _made(num_features=255).l2_sensitivity
  # As np.int32 the coin's denominator wrapped around: two humps near -257 and 257, none between.
  rng = np.random.Generator(np.random.Philox(0))
  draws = discrete.wide_discrete_gaussian(rng, 4000, variance=np.int32(66000))
  assert 0.34 < np.mean(np.abs(draws) < 128) < 0.42
  assert discrete.discrete_gaussian(rng, 3, variance=np.int8(100)).shape == (3,)


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"feature_norm": 1e200}, "feature_norm"),
    ({"noise_multiplier": 1e200}, "noise_multiplier"),
    ({"learning_rate": 5e-324}, "learning_rate"),
    ({"l2_penalty": 1e308}, "l2_penalty"),
    ({"l2_penalty": 1e18}, "l2_penalty"),
  ],
)
def test_numbers_that_overflow_are_one_line(changes, field):
  with refuses(field, value=changes[field]) as caught:
    _made(**changes)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("diagnostics", [False, True])
def test_the_result_of_a_run_does_not_read_the_weights_without_noise(
  monkeypatch, diagnostics
):
  # Who holds the opened weights and the largest error knows which of two data sets it was: for
  # this one alone the error is exactly the distance from the weights without noise.
  task = NoisyModelTask(epsilon=8.0, num_steps=3, diagnostics=diagnostics)
  x = np.linspace(-1, 1, 12).reshape(6, 2)
  y = np.eye(2)[[0, 1, 0, 1, 1, 0]][:, :1]

  def result(labels):
    rows = noisy_model.LabelledRows(x, labels, x, labels[:, 0].astype(int))
    mechanism = noisy_model.mechanism_of(task, rows)
    opened = {"weights": np.ones((3, 1))}
    trained = noisy_model._training(mechanism, rows).init()
    states = iter([trained, opened])
    guarantee = noisy_model.guarantee_of(task, mechanism)
    ledger = accounting.Ledger().charge(
      guarantee.step_event(0),
      l2_clip_norm=guarantee.l2_bound,
      neighboring_relation=guarantee.relation,
      noise_key_id="key",
      first_step=0,
    )

    story = task.execute(rows, None, 0)
    next(story)
    try:
      for state in states:
        story.send(SimpleNamespace(state=state, ledger=ledger, epsilon=8.0))
    except StopIteration as end:
      return end.value
    raise AssertionError("asks for a third phase")

  monkeypatch.setattr(noisy_model.private_values, "split", lambda inputs, **given: inputs)
  one = result(y)
  two = result(1 - y)
  assert (one.error == two.error) is not diagnostics
  statement = one.more["privacy_statement"].replace("\n", " ")
  assert ("NOT covered" in statement) is diagnostics
  assert ("without noise" in one.found) is diagnostics
  assert (one.more["plain_accuracy"] is not None) is diagnostics
