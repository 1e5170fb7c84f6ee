"""What a compiled program says of its convolutions."""

import re

_FAST = {"bf_io->bf", "b0f_0io->b0f", "b01f_01io->b01f", "b012f_012io->b012f"}


def slow_convolutions(compiled):
  """Forms of convolutions in a compiled program that XLA computes slowly within a loop."""
  text = compiled.as_text()
  assert text is not None
  return set(re.findall(r"dim_labels=([^,\s]*)", text)) - _FAST
