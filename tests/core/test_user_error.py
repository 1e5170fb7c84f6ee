"""The text of a user's error: one line, of a length that a terminal shows."""

import hypothesis
import pytest
from hypothesis import strategies as st

from dpjax import validate
from dpjax.validate import UserError


@hypothesis.given(st.text(max_size=2000), st.sampled_from(["must be a number", "needs x"]))
def test_a_value_of_any_length_leaves_one_line_that_names_its_field(value, rest):
  message = str(UserError(f"privacy.delta={value!r}: {rest}"))
  assert message.startswith("privacy.delta=") and message.endswith(rest)
  assert "\n" not in message and "\r" not in message
  if " " not in value or rest.startswith("must"):
    assert len(message) <= 300


def test_short_messages_are_as_they_were_written():
  text = (
    "x='" + "a b " * 20 + "': must be one of " + ", ".join(f"choice_{i}" for i in range(5))
  )
  assert str(UserError(text)) == text


@pytest.mark.parametrize("word", ["a" * 400, "[" * 200, "a b " * 99])
def test_a_choice_of_any_length_ends_a_command_in_less_than_300_letters(word):
  choices = [f"a_choice_{number}" for number in range(99)]
  with pytest.raises(UserError) as caught:
    validate.one_of(choices, topic=word)
  assert len(f"error: {caught.value}") < 300
