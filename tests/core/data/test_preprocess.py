"""Public preprocessing: right by hand, and no way to have it look at the data."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dpjax import data
from dpjax.data import preprocess
from dpjax.validate import UserError
from tests.refuses import refuses


def test_center_maps_the_pixel_range_to_minus_one_and_one():
  d = data.from_arrays(np.array([[[0, 255]]], np.uint8), [0], num_classes=1)
  centred = preprocess.center(d)
  assert centred.x.ravel().tolist() == [-1, 1] and centred.x.dtype == np.float32
  assert (centred.name, centred.num_classes, centred.y.tolist()) == ("arrays", 1, [0])
  assert d.x.ravel().tolist() == [0, 1]  # the original is untouched


def test_one_constant_for_each_channel():
  x = np.ones((2, 1, 1, 3), np.float32)
  out = preprocess.standardize(x, mean=[0, 1, 2], std=[1, 2, 4])
  np.testing.assert_array_equal(out, np.broadcast_to([1, 0, -0.25], x.shape))


@hypothesis.given(st.integers(0, 3), st.floats(-10, 10, width=32))
def test_no_example_influences_another(row, value):
  """What makes it public preprocessing: a function of one example and constants."""
  x = np.linspace(0, 1, 8, dtype=np.float32).reshape(4, 2)
  changed = x.copy()
  changed[row] = value
  before = preprocess.standardize(x, mean=0.25, std=2.0)
  after = preprocess.standardize(changed, mean=0.25, std=2.0)
  others = np.arange(4) != row
  np.testing.assert_array_equal(before[others], after[others])


@pytest.mark.parametrize("estimate", ["estimate", "auto", None, np.mean])
@pytest.mark.parametrize("name", ["mean", "std"])
def test_estimating_from_private_data_is_refused(name, estimate):
  constants = {"mean": 0.5, "std": 0.5, name: estimate}
  with pytest.raises(UserError) as caught:
    preprocess.standardize(np.zeros((2, 2)), **constants)
  message = str(caught.value)
  assert message.startswith(f"{name}=") and "center" in message and "\n" not in message


@pytest.mark.parametrize(
  ("mean", "std", "field", "says"),
  [
    (0.0, 0.0, "std", "must be > 0"),
    (0.0, [1.0, -1.0], "std", "must be > 0"),
    (np.nan, 1.0, "mean", "must be finite"),
    ([0.0] * 3, 1.0, "mean", "one number or 2"),
  ],
)
def test_wrong_constants(mean, std, field, says):
  with refuses(field, value={"mean": mean, "std": std}[field]) as caught:
    preprocess.standardize(np.zeros((4, 2)), mean, std)
  assert says in str(caught.value)


def test_tokens_cannot_be_standardized():
  tokens = data.from_arrays(np.array([[1, 2]]), [0], num_classes=1)
  with refuses("x"):
    preprocess.center(tokens)
