"""Numbers of a guarantee as text, never rounded to the side that claims more.

An epsilon or a delta of a guarantee is rounded UP; a lower bound that an attack proves is rounded
DOWN. Both start from the shortest decimal text of the number, so that 1e-5 stays 1e-05.
"""

from __future__ import annotations

import decimal
import math
import textwrap
from collections.abc import Sequence

# Words in a name which mark its number as a lower bound.
_LOWER = ("audited", "lower")
_PROMISED = ("epsilon", "delta")


def upper(value: float, *, digits: int = 4, decimals: int | None = None) -> str:
  """Returns an epsilon or a delta as text, rounded up.

  The text has `digits` significant digits, or `decimals` places after the point if it is given.

  >>> upper(2.0001), upper(0.5), upper(1e-5), upper(math.inf)
  ('2.001', '0.5', '1e-05', 'inf')
  >>> upper(1.48001, decimals=3)
  '1.481'
  """
  return _round(value, digits, decimals, decimal.ROUND_CEILING)


def lower(value: float, *, digits: int = 4, decimals: int | None = None) -> str:
  """Returns a lower bound as text, rounded down, so that it claims no more than was observed.

  >>> lower(2.4999), lower(0.0), lower(-math.inf), lower(1.9999, decimals=2)
  ('2.499', '0', '-inf', '1.99')
  """
  return _round(value, digits, decimals, decimal.ROUND_FLOOR)


def percent(confidence: float) -> str:
  """Returns a confidence as text in percent, rounded down.

  >>> percent(0.95), percent(0.999999)
  ('95%', '99.99%')
  """
  # The decimal point is moved in the text: 100 * 0.29 is below 29.
  return f"{lower(float(decimal.Decimal(repr(float(confidence))).scaleb(2)))}%"


def round_out(ends: Sequence[float], decimals: int = 3, between: str = "-") -> str:
  """Returns the two ends of a confidence interval as text, rounded outwards.

  >>> round_out((0.21451, 0.5)), round_out((0.0, 0.36941), 2, " to ")
  ('0.214-0.500', '0.00 to 0.37')
  """
  low, high = ends
  return f"{lower(low, decimals=decimals)}{between}{upper(high, decimals=decimals)}"


def by_name(name: str, value: float, *, digits: int = 4) -> str:
  """Returns a number as text, rounded in the direction that its name requires.

  Lower bounds on an epsilon or a delta are rounded down, other epsilons and deltas up, and all
  other numbers to nearest.

  >>> by_name("epsilon", 1.00001), by_name("epsilon_audited_lower", 1.99999)
  ('1.001', '1.999')
  >>> by_name("test_accuracy", 0.98765)
  '0.9877'
  """
  if is_promised(name):
    bound = lower if any(word in name for word in _LOWER) else upper
    return bound(value, digits=digits)
  return f"{value:.{digits}g}"


def is_promised(name: str) -> bool:
  """Returns whether a number belongs to a guarantee: its name contains "epsilon" or "delta".

  >>> is_promised("privacy.epsilon"), is_promised("num_steps")
  (True, False)
  """
  return any(word in name for word in _PROMISED)


def paragraph(words: str) -> str:
  """Returns one paragraph of a privacy statement, broken into lines of at most 92 characters.

  >>> [len(line) for line in paragraph("word " * 40).splitlines()]
  [89, 89, 19]
  """
  return textwrap.fill(words, width=92, break_on_hyphens=False)


def _round(value: float, digits: int, decimals: int | None, rounding: str) -> str:
  value = float(value)
  if not math.isfinite(value):
    return f"{value}"
  # The shortest decimal text is rounded, as JSON writes it: the binary value of 1e-5 would round up
  # to 1.001e-05.
  exact = decimal.Decimal(repr(value))
  if decimals is not None:
    # 400 digits hold the largest float64. The default of 28 digits would raise for large numbers.
    with decimal.localcontext(prec=400):
      return f"{exact.quantize(decimal.Decimal(1).scaleb(-decimals), rounding):f}"
  context = decimal.Context(prec=digits, rounding=rounding)
  return f"{float(context.plus(exact)):.{digits}g}"
