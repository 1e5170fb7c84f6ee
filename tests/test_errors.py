"""Errors carry data: their text is written once and read by nobody."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpjax import validate
from dpjax.validate import NO_VALUE, UserError, Verbatim

_NAMES = st.from_regex(r"[a-z_]{1,12}(\.[a-z_]{1,12}){0,3}", fullmatch=True)
_VALUES = st.one_of(
  st.none(), st.integers(), st.floats(), st.text(max_size=500), st.lists(st.integers())
)


@given(_NAMES, _VALUES, st.text(max_size=40))
def test_an_error_is_one_line_and_keeps_its_data(field, value, must):
  error = UserError(must, field=field, value=value)
  assert len(str(error).splitlines()) <= 1
  assert len(UserError("must be a number", field=field, value=value).args[0]) <= 300
  assert error.field == field and error.is_about(field, value)
  moved = error.within("privacy")
  assert moved.field == f"privacy.{field}" and moved.value is value
  again = pickle.loads(pickle.dumps(error))
  assert type(again) is UserError and str(again) == str(error) and again.field == field


def test_a_message_without_a_field_is_shown_as_it_is():
  error = UserError("no sound run")
  assert (str(error), error.field, error.value) == ("no sound run", "", NO_VALUE)
  assert str(error.within("train")) == "train: no sound run"
  assert str(pickle.loads(pickle.dumps(error))) == "no sound run"


def test_text_is_quoted_unless_verbatim_and_a_hint_ends_the_line():
  assert str(UserError("must be int", field="n", value="3")) == "n='3': must be int"
  assert str(UserError("no", field="n", value=Verbatim("3"))) == "n=3: no"
  assert str(UserError("no", field="n", hint="try 4")) == "n: no; try 4"


def test_of_arrays_frames_and_keys_the_kind_is_shown_and_no_content():
  """A key in a log gives away the noise, and a column of records the records."""
  numbers = np.array([1234.5, 6789.5])
  values = {
    "key<fry>[]": jax.random.key(1234),
    "uint32[n]": jax.random.key_data(jax.random.key(1234)),
    "float64[n]": numbers,
    "float32[]": jnp.float32(1234.5),
    "DataFrame[n, 1]": pd.DataFrame({"a": numbers}),
  }
  for kind, value in values.items():
    assert str(UserError("no", field="n", value=value)) == f"n={kind}: no"
  assert str(UserError("no", field="n", value=np.float32(3))) == "n=3.0: no"
  assert str(UserError("no", field="n", value=numbers.dtype)) == "n=float64: no"


def test_a_number_in_an_array_is_told_from_a_number():
  """It said that 0.5 must be in (0, 1)."""
  for array in (np.array(0.5), jnp.float32(0.5)):
    with pytest.raises(UserError) as caught:
      validate.open_unit(delta=array)
    assert f"={array.dtype}[]: " in str(caught.value) and caught.value.value is array


@pytest.mark.parametrize("word", ["a" * 400, "[" * 200, "a b " * 99])
def test_a_choice_of_any_length_ends_a_command_in_less_than_300_letters(word):
  choices = [f"a_choice_{number}" for number in range(99)]
  with pytest.raises(UserError) as caught:
    validate.one_of(choices, topic=word)
  assert len(f"error: {caught.value}") < 300
