"""Printed guarantees are never rounded to the promising side, wherever they are printed."""

import ast
import math
import pathlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import accounting
from dpjax.accounting.text import by_name, lower, upper

_ROOT = pathlib.Path(accounting.__file__).parents[2]
# Names of what is promised or bounded, in any expression that a format spec is applied to;
# steps are counted, not promised.
_NAMES = re.compile(
  r"(?<!st)eps|delta|spent|\blower|claim|promise|guarantee|refut|stated|corrected|epsilon_budget",
  re.IGNORECASE,
)
_ROUNDERS = ("upper", "lower", "by_name", "_up")
_finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=300)
@given(value=_finite, digits=st.integers(1, 12))
def test_upper_is_no_less_and_lower_no_more(value, digits):
  low, high = float(lower(value, digits=digits)), float(upper(value, digits=digits))
  assert low <= value <= high
  assert float(upper(high, digits=digits)) == high  # what is printed is printed again


@settings(max_examples=200)
@given(value=st.floats(-1e12, 1e12), decimals=st.integers(0, 8))
def test_fixed_decimals_too(value, decimals):
  low, high = lower(value, decimals=decimals), upper(value, decimals=decimals)
  assert float(low) <= value <= float(high)
  assert float(high) - float(low) <= 1.001 * 10.0**-decimals + 1e-12 * abs(value)
  assert re.fullmatch(r"-?\d+(\.\d+)?", high)


def test_infinities_and_numbers_as_json_writes_them():
  assert upper(math.inf) == lower(math.inf) == "inf" and upper(1e-5) == "1e-05"
  assert upper(1e-300) == "1e-300" and upper(0.1 + 0.2) == "0.3001"
  assert by_name("delta", 1.00004e-5) == "1.001e-05"
  assert by_name("epsilon_audited_lower", 0.99999) == "0.9999"


def _formatted(source):
  """(line, expression) of each number that a format spec or round() is applied to."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
      spec = ast.unparse(node.format_spec)
      if re.search(r"[.\d][gfe%n]|['\"][gfe]", spec):
        yield node.lineno, node.value
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("round", "np.round"):
      yield node.lineno, node.args[0]


def _rounded_to_nearest(source):
  return [
    (line, ast.unparse(value))
    for line, value in _formatted(source)
    if _NAMES.search(ast.unparse(value))
    and not (isinstance(value, ast.Call) and ast.unparse(value.func) in _ROUNDERS)
  ]


# The declared range of a column, no number of a guarantee.
_KEPT = {("dpjax/experiments/board/scores.py", "kind.bounds.lower")}


@pytest.mark.cases(long=["dpjax"])
@pytest.mark.parametrize("folder", ["dpjax", "launch"])
def test_no_format_spec_rounds_a_guarantee_to_nearest(folder):
  found = [
    f"{path.relative_to(_ROOT)}:{line}: {value}"
    for path in sorted((_ROOT / folder).rglob("*.py"))
    for line, value in _rounded_to_nearest(path.read_text())
    if (str(path.relative_to(_ROOT)), value) not in _KEPT
  ]
  assert found == []


def test_the_search_can_fail():
  assert _rounded_to_nearest("print(f\"epsilon={result['epsilon']:.3f}\")")
  assert _rounded_to_nearest("f'{self.epsilon_lower:.4g}'")
  assert _rounded_to_nearest("round(epsilon, 3)")
  assert not _rounded_to_nearest("f'{upper(epsilon)} {accuracy:.3f} {epsilon!r}'")
