"""Games against the accountant's claims about several releases together.

| subject                 | what is played                                                     |
| ----------------------- | ------------------------------------------------------------------ |
| repeat_and_select_event | the best of a random number of noisy answers (private selection)   |
| amplified_delta         | shuffled answers of many records, one of which is exchanged        |
| Ledger                  | two noisy sums of one run, at the total of its ledger              |
| BudgetLedger            | two answers with pure budgets, at the total of their ledger        |

Each subject is made of mechanisms that have games of their own. Here the total is attacked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dpjax import accounting, mechanisms
from dpjax.accounting import tuning
from dpjax.accounting.event_kinds.repeat_and_select import repeat_and_select_event
from dpjax.auditing.games.game import (
  Adversary,
  Claim,
  Game,
  claims,
  claims_of_event,
  frequency,
  key,
  keys,
  linear,
  repeats,
  together,
)
from dpjax.relevance import labels, rigorous

_ADD = "add_or_remove_one"
_REPLACE = "replace_one"
# Shuffled rounds: number of records, the epsilon of each answer, delta. The first round has
# little amplification, so its bound is nearly tight and a fault shows.
_ROUNDS = ((20, 3.0, 0.1), (60, 1.0, 0.01))

Kind = Callable[..., Any]  # a mechanism, or a broken one


@functools.lru_cache(maxsize=64)
def _many(mechanism: Any) -> Callable[..., Any]:
  """Returns the function (keys [n], one input) -> n releases, cached for each mechanism."""
  return jax.jit(jax.vmap(mechanism, in_axes=(0, None)))


def _answers(mechanism: Any, keys: Any, value: float) -> np.ndarray:
  """Returns what the mechanism releases on the single record `value`, once for each of n keys:
  [n, releases]."""
  data = np.array([value], np.float32)
  drawn = _many(mechanism)(keys, data)
  return np.asarray(drawn, np.float64).reshape(len(keys), -1)


# --- private selection

_DISTRIBUTIONS = {"geometric": 1.0, "logarithmic": 0.0, "Poisson": math.inf}
_TRIALS = 2.0


def _selection(kind: Kind = mechanisms.Gaussian) -> list[Game]:
  """Returns games on the largest of K noisy answers, where K is random.

  An answer is its own score, so selecting by it reveals nothing more.
  """

  def game_of(distribution: str, shape: float, values: tuple[float, float]) -> Game:
    mechanism = kind(noise_multiplier=1.0, l2_sensitivity=1.0)
    event = repeat_and_select_event(mechanism.event(_ADD), mean_trials=_TRIALS, shape=shape)

    def outputs(world: int, seed: int, n: int) -> np.ndarray:
      rng = np.random.default_rng(2 * seed + world)
      draw = functools.partial(tuning.draw_trials, rng, mean_trials=_TRIALS)
      trials = np.array([draw(shape=shape) for _ in range(n)])
      # The number of keys is rounded up to a power of 2, so that few programs are compiled.
      total = int(trials.sum())
      padded = keys(world, seed, 1 << max(0, total - 1).bit_length())
      answers = _answers(mechanism, padded, values[world])[:total]
      # A draw of zero trials releases nothing, which is shown as NaN.
      best = np.full((n, answers.shape[1]), np.nan)
      starts = np.cumsum(trials) - trials
      for place in np.flatnonzero(trials):
        runs = answers[starts[place] : starts[place] + trials[place]]
        best[place] = runs[np.argmax(runs[:, 0])]
      return best

    claimed = claims_of_event(event, _ADD, accountant="rdp")
    case = f"the largest of {distribution} many answers, {values[0]:g} or {values[1]:g}"
    return Game(case, _ADD, claimed, outputs, linear)

  return [
    game_of(distribution, shape, (0.0, 1.0))
    for distribution, shape in _DISTRIBUTIONS.items()
  ]


# --- shuffling


def _shuffle(noisy_labels: Kind = labels.noisy_labels) -> list[Game]:
  """Returns games on the number of answers that are 1.

  A shuffled round of two classes reveals only this number.
  """

  def game_of(reports: int, local: float, delta: float) -> Game:
    def outputs(world: int, seed: int, n: int) -> np.ndarray:
      bits = np.zeros((n, reports), np.int64)
      bits[:, 0] = world
      answers = noisy_labels(
        key(world, seed),
        np.arange(bits.size),
        bits.ravel(),
        epsilon=local,
        num_classes=2,
      )
      return np.asarray(answers).reshape(n, reports, -1).sum(axis=1)

    claim = (Claim(rigorous.shuffled_epsilon(local, reports, delta), delta),)
    case = f"one of {reports} answers of epsilon {local:g} changes"
    return Game(case, _REPLACE, claim, outputs, frequency)

  return [game_of(*numbers) for numbers in _ROUNDS]


# --- ledgers


def _two_releases(
  pair: list[Any], promised: tuple[Claim, ...], adversary: Adversary
) -> Game:
  def outputs(world: int, seed: int, n: int) -> np.ndarray:
    both = keys(world, seed, 2 * n)
    halves = (both[:n], both[n:])
    drawn = [_answers(release, half, world) for release, half in zip(pair, halves)]
    return np.concatenate(drawn, axis=1)

  return Game("0, 1, asked twice", _ADD, promised, outputs, adversary)


def _ledger(kind: Kind = mechanisms.Gaussian) -> list[Game]:
  pair = [kind(noise_multiplier=z, l2_sensitivity=1.0) for z in (2.0, 3.0)]
  ledger = accounting.Ledger()
  for step, mechanism in enumerate(pair):
    ledger = ledger.charge(
      mechanism.event(_ADD),
      l2_clip_norm=1.0,
      neighboring_relation=_ADD,
      noise_key_id="a",
      first_step=step,
    )
  return [_two_releases(pair, claims(ledger.epsilon), linear)]


def _budget(kind: Kind = mechanisms.Laplace) -> list[Game]:
  ledger = mechanisms.BudgetLedger(epsilon=1.0)
  first, second = ledger.split(0.3, 0.7)
  pair = [kind(epsilon=share, l1_sensitivity=1.0) for share in (first, second)]
  for name, share in (("first", first), ("second", second)):
    ledger = ledger.spend(name, epsilon=share)
  return [_two_releases(pair, (Claim(*ledger.spent),), together(linear, repeats))]


GAMES: dict[str, Callable[..., list[Game]]] = {
  "repeat_and_select_event": _selection,
  "amplified_delta": _shuffle,
  "Ledger": _ledger,
  "BudgetLedger": _budget,
}
_CLOSED = "an upper bound of amplified_delta's epsilon, which is played"
_SAMPLER = "what a sampler states, played with it: samplers."
_NOISE = "what a mechanism states, played with it: mechanisms."
_ANY = "adds up what it is given; every game's claim comes from it"
NO_CLAIM = {
  "amplified_epsilon": _CLOSED,
  "balls_in_bins_event": f"{_SAMPLER}BallsInBinsSampler",
  "balls_in_bins_epsilon": f"{_SAMPLER}BallsInBinsSampler",
  "min_sep_epsilon": f"{_SAMPLER}MinSepSampler",
  "poisson_sampled_event": f"{_SAMPLER}PoissonSampler",
  "bounded_contribution_event": f"{_SAMPLER}BoundedContributionSampler",
  "fixed_size_event": f"{_SAMPLER}FixedSizeSampler",
  "with_replacement_event": f"{_SAMPLER}WithReplacementSampler",
  "truncated_poisson_event": f"{_SAMPLER}TruncatedPoissonSampler",
  "random_allocation_event": f"{_SAMPLER}RandomAllocationSampler",
  "k_out_of_t_event": f"{_SAMPLER}KOutOfTSampler",
  "correlated_events": "what a strategy costs, played with it: plans.correlation",
  "gaussian_event": f"{_NOISE}Gaussian",
  "laplace_event": f"{_NOISE}Laplace",
  "pure_dp_event": f"{_NOISE}RandomizedResponse",
  "epsilon": _ANY,
  "epsilon_curve": _ANY,
  "epsilon_about": "a guess that proves nothing: where a search for noise starts",
  "Composition": "losses of many steps on one grid, from which every epsilon comes: samplers",
  "epsilon_of_zcdp": _ANY,
  "epsilon_of_both": "both directions of a sampled step, played with FixedSizeSampler",
}
