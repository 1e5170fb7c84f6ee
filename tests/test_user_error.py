"""The text of a user's error: one line, of a length that a terminal shows."""

import hypothesis
from hypothesis import strategies as st

from dpjax.validate import UserError


@hypothesis.given(st.text(max_size=2000), st.sampled_from(["must be a number", "needs x"]))
@hypothesis.settings(deadline=None)
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
