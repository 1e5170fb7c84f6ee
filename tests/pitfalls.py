"""The pitfalls of private training that the tests cite by number, and the page that says so.

  python -m tests.pitfalls          # writes tests/PITFALLS.md
  python -m tests.pitfalls --check  # exit code 1 where it is stale

A test belongs to pitfall N if its name begins with test_pN_ (or names it next: test_p1_p3_).
Every number has a test, and every number that a test cites stands here.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

PAGE = pathlib.Path(__file__).with_name("PITFALLS.md")
ROOT = PAGE.parent

PITFALLS = {
  1: "A NaN or infinite gradient, or norm, passes the clip.",
  2: "The norm overflows in half precision or at 1e30, and infinity times 0 is NaN.",
  3: "A gradient of zero, or a clip norm that is zero, infinite or negative.",
  4: "The clipped norm overshoots the bound by rounding, or by a cast after the scaling.",
  5: "Noise meant for a sum is added to a mean.",
  6: "The realised batch size, which is secret, is the divisor.",
  7: "Padding contributes: a bias, or a NaN from an empty row.",
  8: "An empty Poisson batch is skipped: no noise, no charge.",
  9: "Replacing a record moves the sum by 2C, and C is charged.",
  10: "A clip norm for each layer adds up to the root of the sum of their squares.",
  11: "A microbatch is clipped as one, which doubles what an example can move.",
  12: "A truncated Poisson batch is charged as a Poisson batch.",
  13: "Shuffled or fixed batches are charged as Poisson ones.",
  14: "Sampling without replacement is charged under add-or-remove-one.",
  15: "Gradient accumulation draws an example twice in one step.",
  16: "A resumed run samples other batches, or uses a noise key again.",
  17: "One key serves two leaves, steps or devices, so that noise cancels.",
  18: "A default key, or a seed that can be guessed.",
  19: "Noise is added once per device, or on one device alone.",
  20: "Noise or sums in half precision.",
  21: "Integer noise: rounding inflates the norm, sums overflow or wrap round.",
  22: "Adaptive clipping: the wrong sign, the wrong clip norm in the noise, a count not centred.",
  23: "A weighted average lets one client move the mean without bound.",
  24: "The classic Gaussian formula is used at epsilon 1 or above.",
  25: "Calibration ends on the side that is not private.",
  26: "Laplace noise is scaled by an L2 sensitivity, or its sampling is left out.",
  27: "Steps are counted in other units than they are charged in.",
  28: "A parameter or an operation that is not understood stays unclipped or untrained, silently.",
  29: "A layer mixes examples: batch statistics, state, ranking across the batch.",
  30: "Tied weights: a norm by layers misses the cross terms.",
  31: "Scans, loops and rematerialised layers hide parameters; long sequences cost their square.",
  32: "Losses, norms and counts are logged as if they were private.",
  33: "Shapes follow the batch, so that compilation tells its size.",
  34: "Per-example gradients of convolutions fail or differ over several devices.",
  35: "A donated key or state is used again.",
  36: "Secure aggregation: masks off by one, weak seeds, replayed rounds, late clients.",
  37: "Distributed noise counts on clients that drop out.",
  38: "Quantisation or rounding after the clip raises the norm.",
  39: "An audit picks its threshold on the scores that it counts.",
  40: "The search for hyper-parameters is not charged.",
  41: "A batch is used twice in one step, by two losses, and charged once.",
  42: "The size of the data is taken for public, or a sampling rate leaks it.",
  43: "Correlated noise: an example takes part more often than the noise was made for.",
  44: "A small simulated cohort is reported with the deployment's epsilon as its own.",
  45: "Adam's second moment counts the noise.",
  46: "Clients' randomness depends on the round alone, so that cohorts repeat.",
}

_NAME = re.compile(r"test_((?:p\d+_)+)")


def cited(name: str) -> list[int]:
  """The numbers in a test's name.

  >>> cited("test_p1_p3_zero_and_nan"), cited("test_p07_padding"), cited("test_padding")
  ([1, 3], [7], [])
  """
  found = _NAME.match(name)
  return [int(part[1:]) for part in found[1].split("_") if part] if found else []


def citing() -> Iterator[tuple[int, str]]:
  """(number, "path::name") of every test that cites a pitfall, without importing any."""
  texts = ((path, path.read_text()) for path in sorted(ROOT.rglob("test_*.py")))
  for path, text in texts:
    if "def test_p" not in text:
      continue  # parsing all files takes seconds, and this page goes stale with each of them
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.FunctionDef):
        where = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
        yield from ((number, where) for number in cited(node.name))


def by_number() -> dict[int, list[str]]:
  """The tests of each number that is cited, sorted."""
  found: dict[int, list[str]] = {}
  for number, where in citing():
    found.setdefault(number, []).append(where)
  return {number: sorted(found[number]) for number in sorted(found)}


def page() -> str:
  """The page as it should be."""
  found = by_number()
  head = (
    "# Pitfalls of private training, and the tests that hold them\n\n"
    "Written by `python -m tests.pitfalls`; a test fails where this page is stale, where a\n"
    "pitfall has no test, or where a test cites a number that is not here.\n"
  )
  return head + "".join(_entry(number, found.get(number, [])) for number in PITFALLS)


def _entry(number: int, where: list[str]) -> str:
  lines = "".join(f"- `{one}`\n" for one in where)
  return f"\n## P{number}. {PITFALLS[number]}\n\n{lines}"


def main(arguments: list[str]) -> int:
  """Writes the page, or with --check says whether it is stale."""
  if arguments not in ([], ["--check"]):
    print("error: takes --check or nothing", file=sys.stderr)
    return 2
  if not arguments:
    PAGE.write_text(page())
    return 0
  stale = PAGE.read_text() != page()
  if stale:
    print(
      "error: tests/PITFALLS.md is stale: run python -m tests.pitfalls", file=sys.stderr
    )
  return int(stale)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
