"""The pitfalls of private training that the tests cite by number, and the page that says so.

  python -m tests.pitfalls          # writes docs/sharp_edges.md
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

ROOT = pathlib.Path(__file__).parent
PAGE = ROOT.parent / "docs" / "sharp_edges.md"

PITFALLS = {
  1: "A NaN or infinite gradient, or norm, passes the clip.",
  2: "The norm overflows in half precision or at 1e30, and infinity times 0 is NaN.",
  3: "A gradient of zero, or a clip norm that is zero, infinite or negative.",
  4: "The clipped norm overshoots the bound by rounding, or by a cast after the scaling.",
  5: "Noise meant for a sum is added to a mean.",
  6: "The realised batch size, which is secret, is the divisor.",
  7: "Padding contributes: a bias, or a NaN from an empty row.",
  8: "An empty Poisson batch is skipped: no noise, and not accounted.",
  9: "Replacing a record moves the sum by 2C, and C is accounted.",
  10: "A clip norm for each layer adds up to the root of the sum of their squares.",
  11: "A microbatch is clipped as one, which doubles what an example can move.",
  12: "A truncated Poisson batch is accounted as a Poisson batch.",
  13: "Shuffled or fixed batches are accounted as Poisson ones.",
  14: "A batch of fixed size counts a joining record as one clip norm.",
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
  27: "Steps are counted in other units than they are accounted in.",
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
  40: "The search for hyper-parameters is not accounted.",
  41: "A batch is used twice in one step, by two losses, and accounted once.",
  42: "The size of the data is taken for public, or a sampling rate leaks it.",
  43: "Correlated noise: an example takes part more often than the noise was made for.",
  44: "A small simulated cohort is reported with the deployment's epsilon as its own.",
  45: "Adam's second moment counts the noise.",
  46: "Clients' randomness depends on the round alone, so that cohorts repeat.",
}

# What a pitfall does, the worst first.
SEVERITY = {
  "The epsilon is false": (
    "The printed number holds for another mechanism than the one that ran."
  ),
  "Something leaks beside the epsilon": (
    "The number is true, and something that it does not cover tells about the data."
  ),
  "The report misleads": "The number is read as more than it is.",
  "The training suffers": "Privacy holds, and the model is worse or slower than it need be.",
}
_BESIDE = {32, 33, 36, 42}
_REPORT = {39, 40, 44}
_TRAINING = {3, 31, 34, 45}

# What dpjax does about each, and what is left to the user.
REMEDY = {
  1: "dpjax drops the whole example. Mask or repair such records before training.",
  2: "Norms are computed in float32 and scaled before they are squared.",
  3: "A zero gradient contributes zero. A clip norm that is not positive is refused.",
  4: "Each rule's rounding is added to the norm, so the bound holds in floating point.",
  5: "`plan.transform` adds noise to the sum and divides afterwards. Pass it sums, not means.",
  6: "The divisor is `normalize_by`, a public constant. `Plan.for_data` chooses it.",
  7: "Batches carry a mask, and none is ever assumed. Pass the whole `Batch`.",
  8: "An empty batch gets noise and is accounted. Do not skip it in a loop of your own.",
  9: "The relation decides the sensitivity: C for add/remove and zero-out, 2C for replace.",
  10: "`clipped_grad.sensitivity` gives the total bound, and the noise covers it.",
  11: "`microbatch_size` never changes the result: each example is clipped by itself.",
  12: "A batch is never cut. `TruncatedPoissonSampler` has an event of its own.",
  13: "A shuffled epoch is accounted as one full step. For amplification use Poisson sampling.",
  14: "A joining record pushes another one out, so it is accounted as two clip norms.",
  15: "`Plan(slices=k)` draws once and slices the draw. Do not draw each slice by itself.",
  16: "Draws and noise are functions of seed, key and step. Save the whole state.",
  17: "Each leaf, step and device folds its own number into the key. Give each run its own key.",
  18: "No key is assumed. `dpjax.new_key()` and every private run ask the operating system.",
  19: "Noise is drawn once, after the sum over devices. Never call `psum` on noisy sums.",
  20: "Sums and noise are float32 at least, whatever the activations are.",
  21: "Integer noise is sized with its rounding, and the chance of a wrap is bounded.",
  22: "Sum and count are one Gaussian vector; the noise follows the norm that clipped.",
  23: "Weights are applied before the clip. `by_examples` is refused with privacy.",
  24: "dpjax uses the analytic Gaussian. The classic formula is unproved from epsilon 1 on.",
  25: "Each search ends on the private side, and what is printed is rounded up.",
  26: "Laplace noise takes an L1 sensitivity, and its sampling is part of its event.",
  27: "Plan, state and ledger count optimizer steps. Epochs are rounded up to whole steps.",
  28: "What has no rule is differentiated per example. `gradients.explain` shows the rule.",
  29: "BatchNorm is refused, and `launch.check` finds layers that mix. Use GroupNorm.",
  30: "The norm is taken over the whole gradient of a shared weight.",
  31: "Scans and rematerialised layers have rules; long sequences take the cheaper one.",
  32: "Such metrics are named `not_private/...`, and a release does not compute them.",
  33: "Batches are padded to one shape, so that one program serves every step.",
  34: "Convolutions over several devices give the sums of one device, up to rounding.",
  35: "A donated state moves on; an earlier state as a whole is NOT seen. Keep the last one.",
  36: "A client answers each message once, and reveals nothing below the threshold.",
  37: "Noise is sized for the fewest survivors; with fewer nothing is released.",
  38: "The sensitivity includes the rounding, so the bound holds for what is sent.",
  39: "Thresholds are fixed beforehand, or the bound is corrected for all of them.",
  40: "Use `selection` of a sweep on private data: its epsilon includes the choice.",
  41: "The loop takes each batch once. Add two losses up before you differentiate.",
  42: "The size is declared (`num_examples`), or the relation makes it public.",
  43: "A plan refuses a sampler under which an example comes back too early.",
  44: "Such an epsilon is called simulated, and that of the run stands beside it.",
  45: "`dp_adam` subtracts the noise from the second moment. Plain Adam costs no privacy.",
  46: "A client's key follows from the run's own key, from round and client.",
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


def severity(number: int) -> str:
  """The heading under which a pitfall stands.

  >>> severity(5), severity(39)
  ('The epsilon is false', 'The report misleads')
  """
  places = (_BESIDE, _REPORT, _TRAINING)
  later = [place for place, numbers in enumerate(places, start=1) if number in numbers]
  return list(SEVERITY)[later[0] if later else 0]


def page() -> str:
  """The page as it should be."""
  tests = by_number()
  parts = [
    "# Sharp edges of private training\n\n"
    "After this page you know the usual mistakes of private training, what each of them does, "
    "and\nwhat dpjax does about it. The worst come first.\n\n"
    "`python -m tests.pitfalls` writes this page. A test fails where it is stale, where a "
    "pitfall has\nno test, or where a test cites a number that is not here.\n"
  ]
  for heading, meaning in SEVERITY.items():
    parts.append(f"\n## {heading}\n\n{meaning}\n")
    for number, text in PITFALLS.items():
      if severity(number) == heading:
        parts.append(f"\n### P{number}. {text}\n\n{REMEDY.get(number, '')}\n")
  parts.append("\n## The tests of each\n\nPaths below `tests/`.\n")
  for number in PITFALLS:
    lines = "".join(f"- `{where}`\n" for where in tests.get(number, []))
    parts.append(f"\nP{number}:\n\n{lines}")
  return "".join(parts)


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
      "error: docs/sharp_edges.md is stale: run python -m tests.pitfalls", file=sys.stderr
    )
  return int(stale)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
