"""Every pitfall of docs/sharp_edges.md has a test, and every number that a test cites stands there.

A test belongs to pitfall N if its name begins with test_pN_ (or names it next: test_p1_p3_).
"""

import pathlib
import re

_TESTS = pathlib.Path(__file__).parent
_PAGE = _TESTS.parent / "docs" / "sharp_edges.md"


def _cited(text):
  """The numbers in the names of a file's tests."""
  names = re.findall(r"def test_((?:p\d+_)+)", text)
  return {int(part[1:]) for name in names for part in name.strip("_").split("_")}


def test_every_pitfall_has_a_test_and_every_number_that_is_cited_is_known():
  listed = {int(number) for number in re.findall(r"(?m)^### P(\d+)\. ", _PAGE.read_text())}
  cited = set().union(*(_cited(path.read_text()) for path in _TESTS.rglob("test_*.py")))
  assert cited == listed and len(listed) > 40


def test_all_numbers_of_a_name_are_read():
  assert _cited("def test_p1_p3_zero(): pass\ndef test_padding(): pass") == {1, 3}
