"""What either party of a two-party regression could solve for, and that it is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.federated import vertical
from dpjax.federated.vertical import disclosure, encrypted_vectors
from dpjax.types import Example
from dpjax.validate import UserError

_RATE = 0.1


def _batch(rows, f_a, f_b, seed=0):
  rng = np.random.default_rng(seed)
  x_a, x_b = rng.normal(size=(rows, f_a)), rng.normal(size=(rows, f_b))
  return Example((x_a, x_b), rng.integers(0, 2, rows))


def _part(batch, rows):
  return Example((batch.x[0][rows], batch.x[1][rows]), batch.y[rows])


def _protocol(**options):
  keys = encrypted_vectors.plaintext()
  return vertical.two_party_logistic(keys, learning_rate=_RATE, **options)


def _unguarded(monkeypatch):
  monkeypatch.setattr(disclosure.Disclosure, "admit", lambda *_: None)


def _views(state, after):
  """What each party learns in a step: its own gradient's sum over the rows, and no more."""
  return (
    (state.weights_a - after.weights_a) / _RATE,
    (state.weights_b - after.weights_b) / _RATE,
  )


def _started(batch, seed=9):
  """Weights that are not zero, as after some steps with others."""
  rng = np.random.default_rng(seed)
  f_a, f_b = (part.shape[1] for part in batch.x)
  return vertical.TwoPartyState(rng.normal(size=f_a), rng.normal(size=f_b + 1))


def _solved_by_b(batch, view):
  """b's estimate of the residuals from its own columns and gradient."""
  columns = np.column_stack([batch.x[1], np.ones(len(batch.y))])
  return np.linalg.pinv(columns.T) @ (view * len(batch.y))


def _residuals(batch, state):
  return vertical.residuals(vertical.two_party_scores(state, batch), batch.y)


# --- the attacks work where nothing refuses them


@pytest.mark.parametrize("party", ["a", "b"])
def test_a_party_with_enough_columns_reads_the_other(monkeypatch, party):
  """b reads a's scores and a reads the labels: the same equations on both sides."""
  batch = _batch(6, 6, 2) if party == "a" else _batch(6, 2, 5)
  state = _started(batch)
  with pytest.raises(UserError, match=f"6 different rows.* of party {party}"):
    _protocol()[1](state, batch)
  _unguarded(monkeypatch)
  view_a, view_b = _views(state, _protocol()[1](state, batch)[0])
  true = _residuals(batch, state)
  if party == "a":
    found = np.linalg.pinv(batch.x[0].T) @ (view_a * 6)
  else:
    found = _solved_by_b(batch, view_b)
    scores = (found - vertical.residuals(_own_scores_b(batch, state), batch.y)) * 4
    np.testing.assert_allclose(scores, batch.x[0] @ state.weights_a, atol=1e-5)
  np.testing.assert_allclose(found, true, atol=1e-5)


def _own_scores_b(batch, state):
  return batch.x[1] @ state.weights_b[:-1] + state.weights_b[-1]


@pytest.mark.parametrize("party", [0, 1])
def test_a_column_of_one_row_reads_that_row(monkeypatch, party):
  batch = _batch(30, 2, 2)
  batch.x[party][:, 0] = 0
  batch.x[party][4, 0] = 3.0
  state = _started(batch)
  name = "ab"[party]
  with pytest.raises(UserError, match=f"party {name} has a row of leverage"):
    _protocol()[1](state, batch)
  _unguarded(monkeypatch)
  view = _views(state, _protocol()[1](state, batch)[0])[party]
  assert view[0] * 30 / 3.0 == pytest.approx(_residuals(batch, state)[4], abs=1e-5)


@pytest.mark.parametrize("party", [0, 1])
def test_the_difference_of_two_batches_reads_a_row(monkeypatch, party):
  batch, protocol = _batch(20, 2, 2), _protocol()
  state, less = _started(batch), np.arange(20) != 7
  protocol[1](state, batch)
  with pytest.raises(UserError, match="a row of another batch"):
    protocol[1](state, _part(batch, less))  # also from the old state
  _unguarded(monkeypatch)
  views = [
    _views(state, protocol[1](state, b)[0])[party] * len(b.y)
    for b in (batch, _part(batch, less))
  ]
  told = (views[0] - views[1])[0] / batch.x[party][7, 0]
  assert told == pytest.approx(_residuals(batch, state)[7], abs=1e-4)


def test_one_row_many_times_is_one_row(monkeypatch):
  batch = _part(_batch(3, 2, 2), np.zeros(30, int))
  with pytest.raises(UserError, match="1 different rows"):
    _protocol()[1](_started(batch), batch)


# --- all queries together


@settings(deadline=None, max_examples=30)
@given(
  st.integers(1, 14), st.integers(1, 5), st.integers(0, 5), st.integers(0, 10**6),
  st.integers(1, 25),
)  # fmt: skip
def test_no_sequence_of_queries_determines_a_residual(rows, f_a, f_b, seed, queries):
  """Batches chosen at random, also again: what is admitted leaves every residual open.

  The worst case for the other party is that residuals do not change between queries. Then a
  party knows the span of all rows of its equations, and a residual is told if its unit
  vector is in there.
  """
  rng = np.random.default_rng(seed)
  batch = _batch(rows, f_a, f_b, seed)
  state, (_, step) = _started(batch), _protocol()
  equations, admitted, subsets = ([], []), 0, [np.arange(rows)]
  for _ in range(queries):
    if rng.random() < 0.5:
      subsets.append(np.flatnonzero(rng.random(rows) < rng.random()))
    chosen = subsets[rng.integers(len(subsets))]
    part = _part(batch, chosen)
    try:
      state, _ = step(state, part)
    except UserError:
      continue
    admitted += 1
    own = (part.x[0], np.column_stack([part.x[1], np.ones(len(chosen))]))
    for known, matrix in zip(equations, own):
      whole = np.zeros((rows, matrix.shape[1]))
      whole[chosen] = matrix
      known.append(whole)
  for party, known in enumerate(equations):
    if known:
      assert disclosure.leverages(np.hstack(known)).max() < 0.95
    width = f_a if party == 0 else f_b + 1
    other = (rows * f_b + rows) if party == 0 else rows * f_a
    assert admitted * width < max(other, 1)


def test_repeated_runs_are_counted_together():
  batch, seen = _batch(9, 2, 1), disclosure.Disclosure()
  least, runs = None, 0
  for _ in range(9):
    _, step = _protocol(disclosure=seen)
    state = _started(batch)  # from the start again, as if nothing had been asked
    try:
      for _ in range(3):
        state, _ = step(state, batch)
      runs += 1
    except UserError as error:
      least = str(error)
      break
  assert runs == 2 and "step 9" in least and "party a 18 equations" in least
  assert "\n" not in least


def _path_of_b(x_a, x_b, y, num_steps):
  """All that b learns in so many steps, as a function of a's features (degree 1)."""
  ones = jnp.column_stack([x_b, jnp.ones(len(y))])
  w_a, w_b, seen = jnp.zeros(x_a.shape[1]), jnp.zeros(ones.shape[1]), []
  for _ in range(num_steps):
    r = 0.5 + (x_a @ w_a + ones @ w_b) / 4 - y
    seen.append(ones.T @ r / len(y))
    w_a, w_b = w_a - x_a.T @ r / len(y), w_b - seen[-1]
  return jnp.concatenate(seen)


def test_within_the_count_the_features_stay_open_and_beyond_it_they_are_determined(x64):
  """The rank of b's whole view in a's features: never all, until the steps that are refused
  would make it so (up to the rotation that no view tells)."""
  batch = _batch(7, 2, 3)
  x_a, x_b = (jnp.asarray(part) for part in batch.x)
  held = disclosure.numbers_held(7, 2, labels=False)
  allowed = (held - 1) // 4
  assert allowed == 3

  def rank(num_steps):
    view = jax.jacobian(lambda x: _path_of_b(x, x_b, batch.y, num_steps))(x_a)
    return np.linalg.matrix_rank(np.asarray(view).reshape(-1, 14), tol=1e-10)

  assert rank(allowed) < held
  assert rank(held) > rank(allowed)  # more steps do tell more
  _, step = _protocol()
  state = _started(batch)
  for _ in range(allowed):
    state, _ = step(state, batch)
  with pytest.raises(UserError, match="step 4 on these rows would give party b 16"):
    step(state, batch)


def test_a_refused_step_is_not_counted():
  seen, batch = disclosure.Disclosure(), _batch(20, 2, 2)
  _, step = _protocol(disclosure=seen)
  step(_started(batch), _part(batch, np.arange(10)))
  for _ in range(50):
    with pytest.raises(UserError):
      step(_started(batch), batch)
  step(_started(batch), _part(batch, np.arange(10, 20)))
  step(_started(batch), _part(batch, np.arange(10)))


def test_features_must_be_finite():
  batch = _batch(20, 2, 2)
  batch.x[1][3, 0] = np.nan
  with pytest.raises(UserError, match="finite"):
    _protocol()[1](_started(batch), batch)


def test_a_small_column_of_one_row_is_found_beside_a_large_one():
  """Its sum is read to the step of the masks' lattice, whatever the scale of the others."""
  alone = np.zeros(40)
  alone[7] = 1e-6
  large = 1e3 * np.random.default_rng(0).normal(size=40)
  assert disclosure.leverages(np.column_stack([large, alone])).max() > 0.99
  assert disclosure.leverages(np.column_stack([large, large])).max() < 0.5  # rank 1


def test_labels_alone_are_not_asked_for_in_sums_that_tell_them(monkeypatch):
  """b's weights at 0: one sum over 16 labels has one solution among the 2^16."""
  batch = _batch(16, 1, 3)
  with pytest.raises(UserError, match="16 different rows while b's weights are 0"):
    _protocol()[1](vertical.TwoPartyState(np.zeros(1), np.zeros(4)), batch)
  _unguarded(monkeypatch)
  init, step = _protocol()
  view, _ = _views(init((1, 3)), step(init((1, 3)), batch)[0])
  every = (np.arange(2**16)[:, None] >> np.arange(16)) & 1
  best = np.argmin(np.abs((0.5 - every) @ batch.x[0][:, 0] - view[0] * 16))
  np.testing.assert_array_equal(every[best], batch.y)


def test_zero_has_one_sign():
  batch, seen = _batch(20, 2, 2), disclosure.Disclosure()
  batch.x[0][::2, 0] = 0.0
  _, step = _protocol(disclosure=seen)
  step(_started(batch), batch)
  other = _batch(20, 2, 2, seed=1)
  for mine, theirs in zip(other.x, batch.x):
    mine[::2] = np.where(theirs[::2] == 0, -0.0, theirs[::2])
  other.y[::2] = batch.y[::2]
  with pytest.raises(UserError, match="a row of another batch"):
    step(_started(batch), other)


@pytest.mark.parametrize(
  "x_a, y",
  [
    (np.ones(20), np.zeros(20)),
    (np.ones((20, 2)) * 1j, np.zeros(20)),
    (np.array([["a", "b"]] * 20), np.zeros(20)),
    (np.ones((20, 2)), np.zeros((20, 1))),
    (np.ones((20, 3)), np.zeros(20)),
    (np.full((20, 2), 1e12), np.zeros(20)),
  ],
)
def test_what_is_no_batch_ends_in_one_line(x_a, y):
  batch = _batch(20, 2, 2)
  with pytest.raises(UserError, match="batch"):
    _protocol()[1](_started(batch), Example((x_a, batch.x[1]), y))
