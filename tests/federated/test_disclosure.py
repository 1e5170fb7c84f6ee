"""What either party of a two-party regression could solve for, and that it is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.secure import vertical
from dpjax.secure.vertical import disclosure, encrypted_vectors, network
from dpjax.secure.vertical.network import TwoPartyState
from dpjax.types import Example
from dpjax.validate import UserError
from tests.refuses import refuses

_RATE = 0.1


def _batch(rows, f_a, f_b, seed=0):
  rng = np.random.default_rng(seed)
  x_a, x_b = rng.normal(size=(rows, f_a)), rng.normal(size=(rows, f_b))
  return Example((x_a, x_b), rng.integers(0, 2, rows))


def _part(batch, rows):
  return Example((batch.x[0][rows], batch.x[1][rows]), batch.y[rows])


def _protocol(**options):
  """By default with labels that a may know: the other rules alone are asked."""
  keys = encrypted_vectors.plaintext()
  options.setdefault("disclosure", disclosure.Disclosure(secret_labels=False))
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
  return TwoPartyState(rng.normal(size=f_a), rng.normal(size=f_b + 1))


def _solved_by_b(batch, view):
  """b's estimate of the residuals from its own columns and gradient."""
  columns = np.column_stack([batch.x[1], np.ones(len(batch.y))])
  return np.linalg.pinv(columns.T) @ (view * len(batch.y))


def _residuals(batch, state):
  return network.residuals(vertical.two_party_scores(state, batch), batch.y)


# --- the attacks work where nothing refuses them


@pytest.mark.parametrize("party", ["a", "b"])
def test_a_party_with_enough_columns_reads_the_other(monkeypatch, party):
  """b reads a's scores and a reads the labels: the same equations on both sides."""
  batch = _batch(6, 6, 2) if party == "a" else _batch(6, 2, 5)
  state = _started(batch)
  with refuses("batch"):
    _protocol()[1](state, batch)
  _unguarded(monkeypatch)
  view_a, view_b = _views(state, _protocol()[1](state, batch)[0])
  true = _residuals(batch, state)
  if party == "a":
    found = np.linalg.pinv(batch.x[0].T) @ (view_a * 6)
  else:
    found = _solved_by_b(batch, view_b)
    scores = (found - network.residuals(_own_scores_b(batch, state), batch.y)) * 4
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
  "ab"[party]
  with refuses("batch"):
    _protocol()[1](state, batch)
  _unguarded(monkeypatch)
  view = _views(state, _protocol()[1](state, batch)[0])[party]
  assert view[0] * 30 / 3.0 == pytest.approx(_residuals(batch, state)[4], abs=1e-5)


@pytest.mark.parametrize("party", [0, 1])
def test_the_difference_of_two_batches_reads_a_row(monkeypatch, party):
  batch, protocol = _batch(20, 2, 2), _protocol()
  state, less = _started(batch), np.arange(20) != 7
  protocol[1](state, batch)
  with refuses("batch"):
    protocol[1](state, _part(batch, less))  # also from the old state
  _unguarded(monkeypatch)
  views = [
    _views(state, protocol[1](state, b)[0])[party] * len(b.y)
    for b in (batch, _part(batch, less))
  ]
  residual = (views[0] - views[1])[0] / batch.x[party][7, 0]
  assert residual == pytest.approx(_residuals(batch, state)[7], abs=1e-4)


def test_one_row_many_times_is_one_row(monkeypatch):
  batch = _part(_batch(3, 2, 2), np.zeros(30, int))
  with refuses("batch"):
    _protocol()[1](_started(batch), batch)


# --- all queries together


@settings(max_examples=30)
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
    other = rows * (f_b if party == 0 else f_a)
    assert not other or admitted * width < other


def test_repeated_runs_are_counted_together():
  batch, seen = _batch(9, 2, 1), disclosure.Disclosure(secret_labels=False)
  least, runs = None, 0
  for _ in range(9):
    _, step = _protocol(disclosure=seen)
    state = _started(batch)  # from the start again, as if nothing had been asked
    try:
      for _ in range(2):
        state, _ = step(state, batch)
      runs += 1
    except UserError as error:
      least = str(error)
      break
  assert runs == 2 and "step 5" in least and "party a 10 equations" in least
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


@pytest.mark.long
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
  with refuses("batch"):
    step(state, batch)


def test_a_refused_step_is_not_counted():
  seen, batch = disclosure.Disclosure(secret_labels=False), _batch(20, 2, 2)
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
  with refuses("batch.x"):
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
  with refuses("batch"):
    vertical.two_party_logistic(encrypted_vectors.plaintext(), learning_rate=_RATE)[1](
      TwoPartyState(np.zeros(1), np.zeros(4)), batch
    )
  _unguarded(monkeypatch)
  init, step = _protocol()
  view, _ = _views(init((1, 3)), step(init((1, 3)), batch)[0])
  every = (np.arange(2**16)[:, None] >> np.arange(16)) & 1
  best = np.argmin(np.abs((0.5 - every) @ batch.x[0][:, 0] - view[0] * 16))
  np.testing.assert_array_equal(every[best], batch.y)


def test_zero_has_one_sign():
  batch, seen = _batch(20, 2, 2), disclosure.Disclosure(secret_labels=False)
  batch.x[0][::2, 0] = 0.0
  _, step = _protocol(disclosure=seen)
  step(_started(batch), batch)
  other = _batch(20, 2, 2, seed=1)
  for mine, theirs in zip(other.x, batch.x):
    mine[::2] = np.where(theirs[::2] == 0, -0.0, theirs[::2])
  other.y[::2] = batch.y[::2]
  with refuses("batch"):
    step(_started(batch), other)


@pytest.mark.cases(long=["x_a4-y4-batch.x", "x_a5-y5-batch.x"])
@pytest.mark.parametrize(
  "x_a, y, field",
  [
    (np.ones(20), np.zeros(20), "batch"),
    (np.ones((20, 2)) * 1j, np.zeros(20), "batch"),
    (np.array([["a", "b"]] * 20), np.zeros(20), "batch"),
    (np.ones((20, 2)), np.zeros((20, 1)), "batch"),
    (np.ones((20, 3)), np.zeros(20), "batch.x"),
    (np.full((20, 2), np.inf), np.zeros(20), "batch.x"),
  ],
)
def test_what_is_no_batch_ends_in_one_line(x_a, y, field):
  batch = _batch(20, 2, 2)
  with refuses(field):
    _protocol()[1](_started(batch), Example((x_a, batch.x[1]), y))


# --- values of a short list: all of them are tried


def _all_signs(rows):
  return (np.arange(2**rows)[:, None] >> np.arange(rows)) & 1


def _labels_read(rows, *, learning_rate, f_a=3, f_b=3, degree=1, warm_up=1, again=1):
  """(labels that a reads, labels asked about, refusals): honest but curious, by its own
  columns, weights and gradients alone, with b's scores taken as 0."""
  rng = np.random.default_rng(rows)
  first, batches = 1000, 12
  x = rng.normal(size=(first * warm_up + rows * batches, f_a + f_b))
  y = (x.sum(axis=1) + rng.logistic(size=len(x)) > 0).astype(int)
  example = lambda part: Example((x[part, :f_a], x[part, f_a:]), y[part])
  keys = encrypted_vectors.plaintext()
  init, step = vertical.two_party_logistic(keys, learning_rate=learning_rate, degree=degree)
  state = init((f_a, f_b))
  for i in range(warm_up):
    state, _ = step(state, example(slice(i * first, (i + 1) * first)))
  right = asked = refused = 0
  for start in range(first * warm_up, len(x), rows):
    part = slice(start, start + rows)
    x_a, views = x[part, :f_a], np.zeros((2**rows, 0))
    for _ in range(again):
      before = state
      try:
        state, _ = step(state, example(part))
      except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 300
        refused += 1
        break
      view = (before.weights_a - state.weights_a) / learning_rate * rows
      known = network.residuals(x_a @ before.weights_a, np.zeros(rows), degree=degree)
      views = np.column_stack([views, x_a.T @ known - _all_signs(rows) @ x_a - view])
    if views.size:
      best = _all_signs(rows)[np.argmin((views**2).sum(axis=1))]
      right += int((best == y[part]).sum())
      asked += rows
  return right, asked, refused


@pytest.mark.parametrize(
  "setting",
  [
    dict(rows=8, learning_rate=0.1),
    dict(rows=8, learning_rate=0.02, warm_up=2),
    dict(rows=6, learning_rate=0.1, f_b=1),
    dict(rows=10, learning_rate=0.02),
    dict(rows=9, learning_rate=0.05, degree=3),
    dict(rows=7, learning_rate=0.02, f_a=2, f_b=2, again=3),
  ],
)
def test_labels_of_small_batches_are_not_read_after_an_ordinary_step(monkeypatch, setting):
  right, asked, refused = _labels_read(**setting)
  assert (right, asked) == (0, 0) and refused == 12
  _unguarded(monkeypatch)
  right, asked, _ = _labels_read(**setting)
  assert right > 0.85 * asked > 0  # what is refused does tell the labels


@settings(max_examples=40)
@given(
  st.integers(2, 400), st.integers(1, 3), st.integers(0, 3), st.integers(0, 10**6),
  st.integers(1, 8), st.floats(0.0, 30.0),
)  # fmt: skip
def test_no_admitted_steps_tell_more_than_a_share_of_the_labels(
  rows, f_a, f_b, seed, queries, size
):
  """Whatever b's weights are, and however often a batch comes again."""
  batch, seen = _batch(rows, f_a, f_b, seed), disclosure.Disclosure()
  state = _started(batch, seed)
  state = TwoPartyState(size * state.weights_a, size * state.weights_b)
  _, step = _protocol(disclosure=seen)
  bits = 0.0
  for _ in range(queries):
    before = state
    try:
      state, _ = step(state, batch)
    except UserError:
      break
    view = np.abs(before.weights_a - state.weights_a) / _RATE * rows
    # what it takes to write the view down: its integers in units of 2^-20
    bits += float(np.sum(np.log2(1 + view * 2.0**disclosure.SUM_BITS)))
  assert bits <= disclosure.MAX_SHARE * rows


def test_a_large_batch_is_admitted_until_its_bits_are_told():
  batch = _batch(2000, 2, 2)
  _, step = _protocol(disclosure=disclosure.Disclosure())
  state, steps = TwoPartyState(np.zeros(2), np.zeros(3)), 0
  with refuses("batch"):
    for _ in range(100):
      state, _ = step(state, batch)
      steps += 1
  assert steps == 6  # 73 bits a step, of 500


@pytest.mark.parametrize("party", [0, 1])
def test_a_column_of_two_values_is_not_read(monkeypatch, party):
  """The same attack on features: b tries all columns of 0 and 1 that a may have (and a those
  of b, where it may know the labels), up to the weight that it does not know."""
  rows = 10
  rng = np.random.default_rng(3)
  own, secret = rng.normal(size=(rows, 4)), rng.integers(0, 2, (rows, 1)).astype(float)
  batch = Example((secret, own) if party == 1 else (own, secret), rng.integers(0, 2, rows))
  weights = [rng.normal(size=1 if p != party else 4) for p in (0, 1)]
  state = TwoPartyState(weights[0], np.append(weights[1], 0.0))
  with refuses("batch"):
    _protocol()[1](state, batch)
  _unguarded(monkeypatch)
  view = _views(state, _protocol()[1](state, batch)[0])[party][:4] * rows
  residuals = view - own.T @ network.residuals(own @ weights[party], batch.y)
  tried = _all_signs(rows)[1:] @ own
  tried /= np.linalg.norm(tried, axis=1, keepdims=True)
  # told is a quarter of the unknown weight times own^T secret: only its direction is known
  best = _all_signs(rows)[1:][np.argmax(np.abs(tried @ residuals))]
  np.testing.assert_array_equal(best, secret[:, 0])


def test_secret_labels_is_a_bool():
  with refuses("secret_labels", value=2):
    disclosure.Disclosure(secret_labels=2)  # pyright: ignore[reportArgumentType]
