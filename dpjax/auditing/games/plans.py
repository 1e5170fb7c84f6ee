"""Games against whole plans: sampler, clip, sum, noise and event, as `Plan` binds them.

Every record's gradient is one number, 0 or far beyond the clip norm, the same at every step. So a
noisy sum is a normal variable around a sum of signs. The adversary knows everything but the noise
and the draws. It simulates which sums the steps can have, and decorrelates the noise. Its
score is the likelihood ratio of the two mixtures, the best score there is. It adds a score for what
no sound plan shows: a difference of two steps that it has met before (`repeats`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import gradients, mechanisms
from dpjax.auditing.games.defined import public
from dpjax.auditing.games.game import (
  DELTAS,
  Claim,
  Game,
  Score,
  claims,
  drawn_by,
  keys,
  linear,
  repeats,
)
from dpjax.mechanisms.noisy_means import NoisyMeans
from dpjax.names import path_of
from dpjax.noise import NoiseShape, correlated
from dpjax.noise.correlated import registry
from dpjax.noise.correlated.strategies import matrix
from dpjax.plan import Plan
from dpjax.sampling import CyclicSampler, PoissonSampler, Sampler
from dpjax.sampling.batches import pad

# Number of draws of the sampler from which the adversary learns its mixtures.
_SIMULATED = 1500
# Length of a far gradient, in clip norms.
_FAR = 1e6
# Seed of the adversary's own simulation, separate from those of the game.
_SEED = 7_919


# The games of one sampler share its draws, so the draws are cached.
@functools.lru_cache(maxsize=128)
def batches(
  sampler: Sampler, num_steps: int, num_examples: int, seed: int, n: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (rows [n, steps, batch], mask) of n runs of the sampler, each with its own seed."""
  shape = (n, num_steps, sampler.padded_batch_size)
  rows = np.zeros(shape, np.int64)
  mask = np.zeros(shape, bool)
  for run in range(n):
    for step in range(num_steps):
      drawn = sampler.draw(num_examples, seed=(seed << 32) + run, step=step)
      rows[run, step], mask[run, step] = pad(drawn, shape[2])
  return rows, mask


def _batches(plan: Plan, grads: np.ndarray, seed: int, n: int) -> tuple[np.ndarray, ...]:
  return batches(plan.sampler, plan.num_steps, len(grads), seed, n)


def game(
  case: str,
  plan: Plan,
  worlds: tuple[np.ndarray, np.ndarray],
  *,
  epsilon: float | None = None,
  delta: float | None = None,
  draws: float = 1.0,
  runner: Callable[[Plan], Callable[..., Any]] | None = None,
) -> Game:
  """Returns the game of a plan on two data sets of gradients, in clip norms.

  Args:
    plan: plan with ONE clip norm.
    worlds: gradients [n], [m] of the two neighbours; each is scaled up far beyond the clip.
    epsilon, delta: cost of the plan, as other code states it. This point replaces all but the last
      point of the plan's own curve.
    runner: function from a plan to a function (keys [n], gradients [n, steps, batch], mask) ->
      private means [n, steps], for code that uses the plan. None: the plan's transform alone.
  """
  if epsilon is None or delta is None:
    promised = claims(plan.epsilon)
  else:
    promised = Claim(epsilon, delta), Claim(plan.epsilon(DELTAS[-1]), DELTAS[-1])
  clip = plan.l2_bound
  run = functools.cache(lambda: (runner or _runner)(plan))

  def outputs(world: int, seed: int, n: int) -> np.ndarray:
    grads = worlds[world]
    rows, mask = _batches(plan, grads, 2 * seed + world, n)
    # The appended 0 is for padding, which reads row 0: an empty data set has no row 0.
    example_grads = _FAR * clip * np.append(grads, 0.0)[rows]
    return np.asarray(run()(keys(world, seed, n), example_grads.astype(np.float32), mask))

  def adversary(zero: np.ndarray, one: np.ndarray) -> Score:
    # The adversary knows the distributions, so training teaches it only the faults of an
    # unsound plan.
    mixtures = [_mixture(plan, grads, which) for which, grads in enumerate(worlds)]
    sums = lambda seen: seen * plan.normalize_by / clip
    again = repeats(sums(zero), sums(one))
    return lambda seen: _log_ratio(plan, sums(seen), mixtures) + again(sums(seen))

  return Game(case, plan.neighboring_relation, promised, outputs, adversary, draws)


def _runner(plan: Plan) -> Callable[..., Any]:
  """Returns the function (keys [n], gradients [n, steps, batch], mask) -> updates [n, steps]."""

  def run_once(key: Any, grads: Any, mask: Any) -> Any:
    tx: Any = plan.transform(key)
    state = tx.init(jnp.zeros(1))

    def step(state: Any, batch: Any) -> Any:
      offered = gradients.wrap_grads(batch[0][:, None])
      update, state = tx.update(offered, state, jnp.zeros(1), mask=batch[1])
      return state, update[0]

    return jax.lax.scan(step, state, (grads, mask))[1]

  return jax.jit(jax.vmap(run_once))


def _whiten(plan: Plan, sums: np.ndarray) -> np.ndarray:
  """Returns sums [n, steps] multiplied by the matrix C of the strategy, which whitens their
  noise."""
  if plan.noise_shape.correlation is None:
    return sums
  return sums @ matrix(plan.noise_shape.correlation, plan.num_steps).T


def _mixture(plan: Plan, grads: np.ndarray, world: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the sums that the steps can have without noise, whitened, and their log
  probabilities."""
  rows, mask = _batches(plan, grads, _SEED + world, _SIMULATED)
  # Each gradient is clipped to length 1, in clip norms.
  signs = np.sign(np.append(grads, 0.0))
  sums = np.where(mask, signs[rows], 0.0).sum(axis=2)
  centres, counts = np.unique(sums, axis=0, return_counts=True)
  return _whiten(plan, centres), np.log(counts / counts.sum())


def _log_ratio(plan: Plan, sums: np.ndarray, mixtures: Any) -> np.ndarray:
  seen = _whiten(plan, np.nan_to_num(sums, posinf=1e9, neginf=-1e9))
  # Standard deviation of each step's noise, relative to the clip norm.
  std = plan.noise_multiplier * np.array(plan.noise_shape.schedule or 1.0)

  def log_density(mixture: Any) -> np.ndarray:
    centres, log_weights = mixture
    square = (((seen[:, None] - centres[None]) / std) ** 2).sum(axis=2) / 2
    return np.logaddexp.reduce(log_weights - square, axis=1)

  ratio = log_density(mixtures[1]) - log_density(mixtures[0])
  broken = ~np.isfinite(sums).all(axis=1)
  return np.round(np.where(broken, 1e9, np.clip(ratio, -1e6, 1e6)), 6)


# --- plans: correlated noise, schedules and statistics

_LOUD = 2.0
_CLIP = 0.5
_ALONE = np.zeros(3)
_CROWD = -np.ones(3)
# With this sampler a record is in two of four steps.
_IN_TURN = CyclicSampler(steps_per_pass=2, num_examples=4)
_ONE_IN_TWO = PoissonSampler(sampling_prob=0.5, capacity=5)

MakePlan = Callable[..., Plan]


def names() -> tuple[str, ...]:
  """Returns the names of all subjects, found in the code.

  They are correlations of noise, strategies that a config names, kinds of statistics, and the other
  fields of `NoiseShape`.
  """
  correlations = {
    name
    for name, member in public(correlated).items()
    if inspect.isclass(member)
    and dataclasses.is_dataclass(member)
    and hasattr(member, "multiply")
  }
  unnamed = {
    name
    for name, member in public(correlated).items()
    if dataclasses.is_dataclass(member)
    and hasattr(member, "make")
    and path_of(member) not in registry.STRATEGIES.values()
  }
  released = {
    name
    for name, member in public(mechanisms).items()
    if inspect.isclass(member) and NoisyMeans in member.__mro__[1:]
  }
  shapes = {field.name for field in dataclasses.fields(NoiseShape)} - {"correlation"}
  return (
    *(f"correlation:{name}" for name in sorted(correlations)),
    *(f"strategy:{name}" for name in (*registry.STRATEGIES, *sorted(unnamed))),
    *(f"statistics:{name}" for name in sorted(released)),
    *(f"noise_shape:{name}" for name in sorted(shapes)),
  )


def small_plan(make_plan: MakePlan = Plan, **changes: Any) -> Plan:
  """Returns a plan of two steps; `changes` give its sampler, and replace the usual numbers."""
  usual: dict[str, Any] = {"noise_multiplier": 1.2, "l2_clip_norm": _CLIP, "delta": 1e-5}
  return make_plan(**(usual | {"normalize_by": 2.0, "num_steps": 2} | changes))


def _inverse(choice: Any) -> Any:
  # Without `redraw`, a plan of so few parameters would keep earlier noise, not draw it again.
  return dataclasses.replace(choice, redraw=True).make(num_steps=4, steps_apart=2)


# Subject -> its correlation. Other strategies that a config names build one of these; see
# `NO_CLAIM`.
_CORRELATIONS: dict[str, Any] = {
  "correlation:Independent": correlated.Independent(),
  "correlation:Tree": correlated.Tree(restart_every=4),
  "correlation:BandedToeplitz": correlated.BandedToeplitz((1.0, 0.5)),
  "correlation:BufferedToeplitz": correlated.BufferedToeplitz((0.5,), (0.5,)),
  "correlation:InverseBanded": _inverse(correlated.Bisr(bands=4)),
  "strategy:band_inv_mf": _inverse(correlated.BandInvMf(bands=3)),
  "strategy:bifr": _inverse(correlated.Bifr(bands=4)),
  "strategy:lambda_cgd": _inverse(correlated.LambdaCgd()),
}


def _correlation(subject: str, make_plan: MakePlan = Plan) -> list[Game]:
  """Returns games on a record in every second of four steps; one neighbour has zeros instead."""
  shape = NoiseShape(correlation=_CORRELATIONS[subject])

  def played(crowd: str, others: np.ndarray, **louder: float) -> Game:
    return game(
      f"a record in every second step, {crowd}",
      small_plan(make_plan, sampler=_IN_TURN, num_steps=4, noise_shape=shape, **louder),
      # The last of four records is in the second and fourth step, the first in the first and third.
      (np.append(others, 0.0), np.append(others, 1.0))
      if crowd == "last"
      else (np.append(0.0, others), np.append(1.0, others)),
    )

  games = [played("alone", _ALONE), played("against others", _CROWD)]
  if subject == "correlation:InverseBanded":
    # The score of `game` is the best against noise C^-1 z. Noise that is drawn again wrongly has
    # another covariance, against which that score may be poor; a learned score adapts to it. For a
    # large epsilon a learned score needs many draws, so this game has loud noise.
    loud = played("last", _ALONE, noise_multiplier=_LOUD)
    learned = f"{loud.case}, loud noise, a learned score"
    games.append(dataclasses.replace(loud, case=learned, adversary=linear))
  return games


def _schedule(make_plan: MakePlan = Plan) -> list[Game]:
  """Returns games in which the first step has half the noise of the second."""
  shape = NoiseShape(schedule=(1.0, 2.0))
  plan = small_plan(make_plan, sampler=_ONE_IN_TWO, noise_shape=shape)
  return [
    game(f"a record added, {crowd}", plan, (others, np.append(1.0, others)))
    for crowd, others in (("alone", _ALONE), ("against others", _CROWD))
  ]


def _statistics(make_plan: MakePlan = Plan) -> list[Game]:
  """Returns games on statistics before the first step and on noisy sums, accounted together."""
  statistics = mechanisms.ChannelStatistics(
    normalize_by=1.0, clip_norms=(1.0, 2.0), noise_multiplier=2.0
  )
  everybody = PoissonSampler(sampling_prob=1.0, capacity=4)
  plan = small_plan(make_plan, sampler=everybody, statistics=statistics)
  records = (np.zeros((1, 1, 1), np.float32), np.full((1, 1, 1), 1e4, np.float32))

  @functools.cache
  def run() -> Any:
    # Both programs get the run's key, from which the statistics derive a key of their own.
    before = jax.jit(jax.vmap(statistics, in_axes=(0, None)))
    return before, _runner(plan)

  def release(last: int, keys: Any, world: int) -> Any:
    before, steps = run()
    grads = np.zeros((len(keys), plan.num_steps, 1), np.float32)
    grads[:, : last + 1] = _FAR * _CLIP * world
    return before(keys, records[world]), steps(keys, grads, np.ones(grads.shape, bool))

  long = "an empty example, a long one"
  cases = {long: plan.num_steps - 1, f"{long} whose gradient vanishes after a step": 0}
  relation = plan.neighboring_relation
  claimed = claims(plan.epsilon)
  return [
    Game(case, relation, claimed, drawn_by(functools.partial(release, last)), linear)
    for case, last in cases.items()
  ]


# Subject -> function (make_plan) -> its games, the strongest first.
GAMES: dict[str, Callable[..., list[Game]]] = {
  **{subject: functools.partial(_correlation, subject) for subject in _CORRELATIONS},
  "statistics:ChannelStatistics": _statistics,
  "noise_shape:schedule": _schedule,
}
NO_CLAIM = {
  "statistics:Whitening": "accounted as ChannelStatistics is; its noise is mechanisms.Whitening",
  "strategy:identity": "correlation:Independent",
  "strategy:tree": "correlation:Tree",
  "strategy:banded": "correlation:BandedToeplitz",
  "strategy:blt": "correlation:BufferedToeplitz",
  "strategy:bisr": "correlation:InverseBanded, whose game has its coefficients",
  "noise_shape:shares": "a change of units around one draw: transforms.clip_and_noise by groups",
}
