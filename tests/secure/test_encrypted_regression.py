"""E(X), E(y) -> E(w) -> E(y_hat): the closed form, found by who can read none of it."""

import numpy as np
import pytest
from sklearn import datasets

from dpjax.secure.homomorphic.ckks import Chain
from dpjax.secure.homomorphic.regression import (
  DataOwner,
  RegressionPlan,
  RegressionServer,
  regress,
)
from dpjax.secure.homomorphic.regression_plan import MOST_ERROR
from dpjax.validate import UserError
from tests.refuses import refuses

_SMALL = Chain(levels=3, scale_bits=36, end_bits=50)  # degree 8192: a few seconds


@pytest.fixture(autouse=True)
def tenseal():
  pytest.importorskip("tenseal", reason="needs TenSEAL: pip install -e '.[he]'")


def _data(n=50, d=3, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(n, d)) * [1, 5, 0.1][:d] + 3
  return x, x @ np.array([1.0, -0.4, 8.0][:d]) + rng.normal(size=n)


def _plan(n=50, d=3, **numbers):
  given = {"ridge": 1.0, "tolerance": 5e-5, "chain": _SMALL, "most_refreshes": 3}
  return RegressionPlan(n, d, **given | numbers)


@pytest.mark.slow
def test_the_closed_form_and_predictions_through_refreshes():
  x, y = _data()
  plan = _plan()
  found = regress(x, y, x[:7], plan)
  assert found.error < 1e-4 and found.step_error < 5e-5
  assert found.refreshes == plan.refreshes == 2 and found.refresh_bytes > 0
  scaled = (x - x.mean(0)) / x.std(0)
  n, eye = len(x), np.eye(3)
  want = np.linalg.solve(
    scaled.T @ scaled / n + eye, scaled.T @ (y - y.mean()) / y.std() / n
  )
  assert np.abs(found.weights - want).max() == pytest.approx(found.error, abs=1e-12)
  predicted = scaled[:7] @ want * y.std() + y.mean()
  np.testing.assert_allclose(found.predictions, predicted, atol=1e-2)


@pytest.mark.slow
def test_a_wrong_sign_would_be_seen(monkeypatch):
  lane = RegressionServer._lane
  monkeypatch.setattr(RegressionServer, "_lane", lambda self, value: lane(self, abs(value)))
  x, y = _data()
  assert regress(x, y, x[:1], _plan(most_refreshes=4)).error > 1e-2


@pytest.mark.slow
def test_the_server_sees_sizes_alone():
  """Every message to it is keys or ciphertexts, of a length that follows from the plan."""
  x, y = _data()
  one, other = (DataOwner(rows, y, _plan()).upload() for rows in (x, 1000 * x[::-1]))
  sizes = lambda upload: [len(c) for c in upload.x + upload.y]
  np.testing.assert_allclose(sizes(one), sizes(other), rtol=0.03)
  held = repr(vars(RegressionServer(_plan(), one.keys)))
  assert "SecretKey" not in held and "DataOwner" not in held


def test_a_server_that_asks_too_often_is_refused():
  x, y = _data()
  owner = DataOwner(x, y, _plan())
  ciphers = owner.upload().x
  for _ in range(owner.plan.refreshes):
    owner.refresh(ciphers, 1)
  with refuses("refreshes", value=3):
    owner.refresh(ciphers, 1)


@pytest.mark.parametrize(
  ("numbers", "field"),
  [
    ({"most_refreshes": 1}, "most_refreshes"),
    ({"ridge": 0.0}, "ridge"),
    # No float is their number of steps.
    ({"ridge": 1e-320}, "ridge"),
    ({"ridge": 1e300}, "ridge"),
    ({"tolerance": 1e-320}, "tolerance"),
    (
      {"chain": Chain(levels=2, scale_bits=36, end_bits=50)},
      "levels",
    ),
    ({"ridge": 0.001, "most_refreshes": 9}, "scale_bits"),
  ],
)
def test_what_the_chain_cannot_hold_is_refused_before_anything_is_encrypted(numbers, field):
  with refuses(field):
    _plan(**numbers)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    (lambda x, y: (x[1:], y), "as planned"),
    (lambda x, y: (x * [1, 0, 1], y), "a constant column"),
    (lambda x, y: (x, np.where(y > 3, np.nan, y)), "NaN or infinity"),
  ],
)
def test_data_that_are_not_planned_are_refused(change, words):
  with pytest.raises(UserError, match=words):
    DataOwner(*change(*_data()), _plan())


def test_the_bound_on_the_largest_step_holds():
  """eta is public: by the trace of standardised columns, whatever they are."""
  x = np.outer(np.arange(40.0), [1, 2, 3]) + np.random.default_rng(0).normal(size=(40, 3))
  plan = _plan(40)
  scaled = (x - x.mean(0)) / x.std(0)
  largest = np.linalg.eigvalsh(scaled.T @ scaled / 40 + plan.ridge * np.eye(3))[-1]
  assert 3 < largest <= 1 / plan.step_size + 1e-12


@pytest.mark.long
@pytest.mark.parametrize("load", [datasets.load_diabetes, datasets.load_breast_cancer])
def test_published_data_at_their_full_size(load):
  x, y = load(return_X_y=True)
  found = regress(x, y, x[:50], RegressionPlan(*x.shape))
  assert found.error < MOST_ERROR


@pytest.mark.parametrize(
  ("column", "words"),
  [
    (np.full(50, 0.1), "constant column"),
    (1e9 + 1e-7 * np.arange(50), "constant column"),  # off by 5e-4, where 1e-5 was planned
    (1e200 * np.arange(50.0), "squares are infinite"),
    (np.array(["a"] * 50), "x: must be an array of real numbers"),
  ],
)
def test_columns_without_a_scale_are_refused(column, words):
  x, y = _data()
  x = np.concatenate([x[:, :2].astype(column.dtype), column[:, None]], axis=1)
  with np.errstate(over="ignore"), pytest.raises(UserError, match=words):
    DataOwner(x, y, _plan())


@pytest.mark.cases(quick=[4], long=...)
@pytest.mark.parametrize(
  ("new", "field"),
  [
    (lambda x: x[:, :1], "new.shape"),  # would be broadcast
    (lambda x: x[:0], "new.shape"),
    (lambda x: x[0], "new.shape"),
    (lambda x: x * 1e6, "new"),  # would wrap around
    (lambda x: x * np.nan, "new"),
    (lambda x: "abc", "new"),
  ],
)
def test_new_rows_that_cannot_be_predicted_are_refused(new, field):
  x, y = _data()
  with refuses(field):
    DataOwner(x, y, _plan()).rows(new(x))
