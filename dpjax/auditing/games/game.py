"""A distinguishing game: two neighbouring inputs, an adversary, and a claim to refute.

The game draws the released outputs on both inputs many times. The adversary learns a score
from the first third of the draws. It picks what looks worst for the claim: an event, {score >= t}
or its complement, and the input on which it is likely. Only then the other two thirds are opened:
they give the event's rate on each input, bounded exactly (Clopper and Pearson 1934), and

  P(event | one input) <= e^epsilon P(event | the other) + delta

gives the lower bound on epsilon. Nothing is chosen on the draws that it is counted on, so
one claim needs no correction; a game with several claims divides its significance by their
number.

A bound above the claim REFUTES it. A bound below the claim does not confirm it, since no attack can
prove a claim.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax import accounting, validate
from dpjax.auditing.lower_bounds import Scores, log_ratio, rate_at_most
from dpjax.validate import UserError

CONFIDENCE = 0.999
# Number of thresholds that the adversary tries, on its own draws.
_THRESHOLDS = 400
# Number of draws in one call of `Game.outputs`.
AT_ONCE = 1_024
# Deltas of a curve: small ones test the tails, large ones the middle.
DELTAS = (1e-5, 0.01, 0.1)
# Number of decimals to which a difference is rounded; float32 has about six for numbers near 1.
_DECIMALS = 5
# Number of times that a difference must occur to count.
_MET = 5
# Number of draws on each input that `repeats` learns from. With many more, outputs on a grid
# coincide by chance, and these matches hide the signal.
_LEARNT = 4_000
# Largest number of columns that are compared in pairs.
_PAIRED = 8
# Margin by which a ceiling must exceed a claim, so that imperfect scores can refute the claim.
_CLEARLY = 0.5
# One draw in this many trains the adversary.
_FIT = 3

Outputs = Callable[[int, int, int], np.ndarray]  # (which input, seed, n) -> [n, features]
Score = Callable[[np.ndarray], np.ndarray]  # outputs [n, features] -> [n]
Adversary = Callable[[np.ndarray, np.ndarray], Score]  # outputs on input 0, on input 1


class Claim(NamedTuple):
  """An (epsilon, delta) guarantee about the outputs on ANY two neighbours."""

  epsilon: float
  delta: float


def claims(epsilon_at: Callable[[float], float]) -> tuple[Claim, ...]:
  """Returns the points at `DELTAS` of a guaranteed curve, delta -> epsilon."""
  return tuple(Claim(epsilon_at(delta), delta) for delta in DELTAS)


def claims_of_event(event: Any, relation: str, **options: str) -> tuple[Claim, ...]:
  """Returns the points at `DELTAS` of what an event costs. Options are those of `epsilon`."""
  return claims(
    lambda delta: accounting.epsilon(
      event, delta=delta, neighboring_relation=relation, **options
    )
  )


@dataclasses.dataclass(frozen=True, eq=False)
class Game:
  """Pair of neighbours, played against one guarantee.

  Args:
    case: the neighbours and the setting, in words, unlike those of the subject's other games.
    relation: relation under which they are neighbours.
    claims: points of the guaranteed curve; all of them hold if the guarantee does.
    outputs: function from (input 0 or 1, seed, n) to all that is released, as numbers [n,
      features]. NaN counts as an output.
    adversary: function that learns the score from draws on both inputs.
    draws: share of the requested number of draws that is made; below 1 if one draw is slow.
    at_once: largest number of draws of one call of `outputs`.
  """

  case: str
  relation: str
  claims: tuple[Claim, ...]
  outputs: Outputs
  adversary: Adversary
  draws: float = 1.0
  at_once: int = AT_ONCE


def key(world: int, seed: int) -> jax.Array:
  """Returns the key of one call of `Game.outputs`."""
  return jax.random.fold_in(jax.random.key(seed), world)


def keys(world: int, seed: int, n: int) -> jax.Array:
  """Returns the keys [n] of the draws of one call of `Game.outputs`."""
  return jax.random.split(key(world, seed), n)


def drawn_by(release: Callable[[jax.Array, int], Any]) -> Outputs:
  """Returns `Game.outputs` of a function that draws by keys alone.

  Args:
    release: (keys [n], which input) -> all that is released, a tree with leaves [n, ...].
  """

  def outputs(world: int, seed: int, n: int) -> np.ndarray:
    leaves = jax.tree.leaves(release(keys(world, seed, n), world))
    return np.concatenate(
      [np.asarray(leaf, np.float64).reshape(n, -1) for leaf in leaves], axis=1
    )

  return outputs


class Result(NamedTuple):
  """The outcome of a game against one of its claims."""

  game: Game
  claim: Claim
  epsilon_lower: float
  num_draws: int  # on each input, the adversary's own included
  confidence: float
  seconds: float
  ceiling: float  # what outputs that are always told apart would have shown

  @property
  def can_refute(self) -> bool:
    """Whether this number of draws could refute the claim if outputs were always told apart."""
    return self.ceiling > self.claim.epsilon

  @property
  def refuted(self) -> bool:
    """Whether the claim is false, with `confidence`."""
    return self.epsilon_lower > self.claim.epsilon


def play(
  game: Game, *, num_draws: int, seed: int = 0, confidence: float = CONFIDENCE
) -> list[Result]:
  """Plays a game and returns a `Result` for each of its claims; all bounds hold together.

  Args:
    num_draws: number of draws on each of the two inputs, before `game.draws` is applied.
    seed: seed of all draws; the same seed gives the same result.

  >>> rng = lambda world, seed: np.random.default_rng([world, seed])
  >>> laplace = lambda world, seed, n: rng(world, seed).laplace(world, 1.0, (n, 1))
  >>> game = Game("0, 1", "any", (Claim(0.5, 0.0),), laplace, linear)
  >>> play(game, num_draws=9_000)[0].refuted  # its epsilon is 1
  True
  """
  validate.integer_at_least(1, num_draws=num_draws)
  started = time.perf_counter()
  n = max(30, round(num_draws * game.draws))
  drawn = [_draw(game, world, seed, n) for world in range(2)]
  # A refusal is an output, too: it is visible if only one of two neighbours is refused.
  width = max(1 if each is None else each.shape[1] for each in drawn)
  outputs = [np.full((n, width), np.nan) if each is None else each for each in drawn]
  cut = n // _FIT
  score = game.adversary(*(drawn[:cut] for drawn in outputs))
  outside, inside = (np.asarray(score(drawn), np.float64) for drawn in outputs)
  fit = Scores(inside[:cut], outside[:cut])
  test = Scores(inside[cut:], outside[cut:])
  each = 1 - (1 - confidence) / len(game.claims)
  bounds = [held_out_bound(fit, test, delta=c.delta, confidence=each) for c in game.claims]
  seconds = time.perf_counter() - started
  return [
    Result(
      game=game,
      claim=claim,
      epsilon_lower=bound,
      num_draws=n,
      confidence=confidence,
      seconds=seconds,
      ceiling=ceiling(n, delta=claim.delta, confidence=each),
    )
    for claim, bound in zip(game.claims, bounds)
  ]


def _draw(game: Game, world: int, seed: int, n: int) -> np.ndarray | None:
  """Returns n draws of the outputs on one input, [n, features]; None if the input is refused."""
  # A compiled program serves one number of draws. So all calls draw equally many, a power
  # of two for small numbers, and the surplus is dropped.
  size = min(game.at_once, 1 << max(0, n - 1).bit_length())
  try:
    parts = [
      np.asarray(game.outputs(world, (seed * 1_000_003 + part) % 2**62, size), np.float64)
      for part in range(-(-n // size))
    ]
  except UserError:
    return None
  return np.concatenate([part.reshape(size, -1) for part in parts])[:n]


# --- bounds


def ceiling(num_draws: int, *, delta: float, confidence: float = CONFIDENCE) -> float:
  """Returns the largest bound on epsilon that so many draws can give: that of disjoint outputs.

  Args:
    num_draws: draws on each of the two inputs, including those that the adversary learns from.
    delta: delta of the claim.
    confidence: confidence of this one claim.

  >>> round(ceiling(1_500, delta=0.0, confidence=0.95), 2)
  5.6
  """
  validate.integer_at_least(2, num_draws=num_draws)
  counted = num_draws - num_draws // _FIT
  significance = (1 - confidence) / 2
  # Best case: every draw of one input is recognised, and none of the other is mistaken for
  # it.
  bound = _log_ratio(np.array(counted), counted, np.array(0), counted, delta, significance)
  return max(0.0, float(bound))


def draws_to_refute(
  claim: Claim, *, most: int, confidence: float = CONFIDENCE
) -> int | None:
  """Returns the smallest number of draws whose ceiling is clearly above a claim.

  Returns None if that is more than `most`.

  Args:
    claim: claim whose epsilon the ceiling exceeds by `_CLEARLY`, so that scores may be imperfect.
    most: largest number of draws on each of the two inputs.
    confidence: confidence of this one claim.

  >>> draws_to_refute(Claim(4.0, 1e-5), most=10_000)
  1033
  >>> draws_to_refute(Claim(9.0, 1e-5), most=10_000) is None
  True
  """
  validate.integer_at_least(2, most=most)
  clearly = lambda n: (
    ceiling(n, delta=claim.delta, confidence=confidence) > claim.epsilon + _CLEARLY
  )
  if not clearly(most):
    return None
  return 2 + bisect.bisect_left(range(2, most), True, key=clearly)


def held_out_bound(
  fit: Scores, test: Scores, *, delta: float, confidence: float = CONFIDENCE
) -> float:
  """Returns a lower bound on epsilon at `delta`: `fit` chooses an event, and `test` counts it.

  Guarantee: the bound is above the true epsilon with probability at most 1 - confidence, for any
  mechanism. The scores of `test` must be those of independent runs, on which neither the score
  nor the event was chosen.

  >>> apart = Scores(inside=np.ones(1000), outside=np.zeros(1000))
  >>> round(held_out_bound(apart, apart, delta=0.0, confidence=0.95), 2)
  5.6
  """
  outputs = np.concatenate([fit.inside, fit.outside])
  levels = np.quantile(outputs, np.linspace(0, 1, _THRESHOLDS), method="nearest")
  levels = np.unique(np.concatenate([levels, [np.inf]]))
  learned = _bounds(fit, levels, delta, confidence)  # [events, directions]
  event, direction = np.unravel_index(np.argmax(learned), learned.shape)
  bound = _bounds(test, levels[[event]], delta, confidence)[0, direction]
  return max(0.0, float(bound))


def _bounds(
  scores: Scores, levels: np.ndarray, delta: float, confidence: float
) -> np.ndarray:
  """Returns bounds on epsilon [levels, 4]. The event {score >= level} and its complement give two
  bounds each: either input may have the larger rate."""
  n = len(scores.inside)
  m = len(scores.outside)
  ones = n - np.searchsorted(np.sort(scores.inside), levels, side="left")
  zeros = m - np.searchsorted(np.sort(scores.outside), levels, side="left")
  cases = (
    (ones, n, zeros, m),
    (zeros, m, ones, n),
    (n - ones, n, m - zeros, m),
    (m - zeros, m, n - ones, n),
  )
  significance = (1 - confidence) / 2
  return np.stack([_log_ratio(*case, delta, significance) for case in cases], axis=1)


def _log_ratio(
  often: np.ndarray, n: int, rarely: np.ndarray, m: int, delta: float, significance: float
) -> np.ndarray:
  low = 1 - rate_at_most(n - often, n, significance)
  return log_ratio(low - delta, rate_at_most(rarely, m, significance))


# --- adversaries


def linear(zero: np.ndarray, one: np.ndarray) -> Score:
  """Learns Fisher's discriminant, the best score for Gaussian outputs with one covariance.

  An output without noise gets nearly all the weight. A copy of each output on a logarithmic scale
  shows heavy tails.
  """
  both = np.where(np.isfinite(outputs := np.concatenate([zero, one])), outputs, 0.0)
  middle = np.median(both, axis=0)
  width = np.median(np.abs(both - middle), axis=0) + 1e-30

  def features(outputs: np.ndarray) -> np.ndarray:
    finite = np.isfinite(outputs)
    kept = np.where(finite, outputs, 0.0)
    return np.concatenate([np.arcsinh((kept - middle) / width), kept, ~finite], axis=1)

  zero = features(zero)
  one = features(one)
  centre = np.mean(both := np.concatenate([zero, one]), axis=0)
  spread = both.std(axis=0)
  used = spread > 0
  scaled = lambda x: (x[:, used] - centre[used]) / spread[used]
  within = np.concatenate([scaled(x) - scaled(x).mean(axis=0) for x in (zero, one)])
  # The small ridge keeps the system solvable if columns depend on each other.
  covariance = within.T @ within / len(within) + 1e-6 * np.eye(int(used.sum()))
  gap = scaled(one).mean(axis=0) - scaled(zero).mean(axis=0)
  weights = np.linalg.solve(covariance, gap)
  # Scores are rounded, so that the last digits of floats are not audited.
  return lambda outputs: np.round(scaled(features(outputs)) @ weights, 6)


def two_sided(zero: np.ndarray, one: np.ndarray) -> Score:
  """Learns to clip each entry at its medians on the two inputs.

  This gives the log-ratio of Laplace noise, up to a factor and a constant. An output with NaN or
  infinity gets a separate score.
  """
  middles = (
    np.nanmedian(np.nan_to_num(zero), axis=0),
    np.nanmedian(np.nan_to_num(one), axis=0),
  )
  low = np.minimum(*middles)
  high = np.maximum(*middles)
  scale = np.abs(np.nan_to_num(zero) - middles[0]).mean(axis=0) + 1e-30
  sign = np.sign(middles[1] - middles[0]) / scale

  def score(outputs: np.ndarray) -> np.ndarray:
    cut = np.round(np.clip(np.nan_to_num(outputs), low, high) @ sign, 6)
    return np.where(np.isfinite(outputs).all(axis=1), cut, 1e12)

  return score


def frequency(zero: np.ndarray, one: np.ndarray) -> Score:
  """Learns the log-ratio of each output's two frequencies, the best score for few distinct
  outputs."""
  seen: dict[bytes, list[int]] = {}
  for which, outputs in enumerate((zero, one)):
    for row in np.ascontiguousarray(outputs):
      seen.setdefault(row.tobytes(), [0, 0])[which] += 1
  # Half a count on each side keeps the ratio finite.
  ratio = {row: math.log((b + 0.5) / (a + 0.5)) for row, (a, b) in seen.items()}
  return lambda outputs: np.array(
    [ratio.get(row.tobytes(), 0.0) for row in np.ascontiguousarray(outputs)]
  )


def learn_bins(zero: np.ndarray, one: np.ndarray, bins: int = 24) -> Score:
  """Learns the `frequency` score of outputs whose entries are put into bins.

  Bins are equally full. A value that is the edge of a bin gets a bin of its own.
  """
  both = np.concatenate([zero, one])
  shares = np.linspace(0, 1, bins + 1)[1:-1]
  edges = [np.unique(np.nanquantile(np.nan_to_num(x), shares)) for x in both.T]

  def places(outputs: np.ndarray) -> np.ndarray:
    clean = np.nan_to_num(outputs, nan=np.inf)
    # An entry that equals an edge gets its own place: such values are frequent, or hardly occur.
    columns = [
      np.searchsorted(edge, x, side="left") + np.searchsorted(edge, x, side="right")
      for edge, x in zip(edges, clean.T)
    ]
    return np.stack(columns, axis=1).astype(np.float64)

  learned = frequency(places(zero), places(one))
  return lambda outputs: learned(places(outputs))


def repeats(zero: np.ndarray, one: np.ndarray) -> Score:
  """Learns the log-ratio of the frequencies of each difference of two entries; 0 for rare ones.

  Independent noise hardly ever gives one difference of two numbers five times. If two entries
  share their noise, it cancels, and only the few differences of exact values remain.
  """
  zero = zero[:_LEARNT]
  one = one[:_LEARNT]
  size = min(zero.shape[1], _PAIRED)
  left, right = np.triu_indices(size, 1)
  if not left.size:
    return lambda outputs: np.zeros(len(outputs))

  def differences(outputs: np.ndarray) -> np.ndarray:
    clean = np.nan_to_num(outputs[:, :size], nan=np.inf, posinf=np.inf, neginf=-np.inf)
    with np.errstate(invalid="ignore"):
      gaps = clean[:, right] - clean[:, left]
    # Non-finite values have no difference. Adding 0 removes -0.
    return np.round(np.where(np.isfinite(gaps), gaps, 0.0), _DECIMALS) + 0.0

  tables = [
    _met(a, b) for a, b in zip(differences(zero).T, differences(one).T, strict=True)
  ]

  def score(outputs: np.ndarray) -> np.ndarray:
    total = np.zeros(len(outputs))
    for column, (values, ratios) in zip(differences(outputs).T, tables, strict=True):
      # A column in which no difference was frequent says nothing.
      if len(values):
        places = np.minimum(np.searchsorted(values, column), len(values) - 1)
        total += np.where(values[places] == column, ratios[places], 0.0)
    return total

  return score


def _met(zero: np.ndarray, one: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the values that occur at least `_MET` times, and the log-ratios of their counts."""
  values = np.unique(np.concatenate([zero, one]))
  counts = [np.zeros(len(values)), np.zeros(len(values))]
  for which, column in enumerate((zero, one)):
    seen, number = np.unique(column, return_counts=True)
    counts[which][np.searchsorted(values, seen)] = number
  often = counts[0] + counts[1] >= _MET
  ratio = np.log((counts[1] + 0.5) / (counts[0] + 0.5))
  return values[often], ratio[often]


def together(*adversaries: Adversary) -> Adversary:
  """Returns an adversary whose score is the sum of several scores, each nearly a log-ratio."""

  def learn(zero: np.ndarray, one: np.ndarray) -> Score:
    scores = [adversary(zero, one) for adversary in adversaries]
    return lambda outputs: np.sum([score(outputs) for score in scores], axis=0)

  return learn
