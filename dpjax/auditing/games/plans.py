"""Games against whole plans: sampler, clip, sum, noise and event, as `Plan` binds them.

Every record's gradient is one number far beyond the clip norm, the same at every step, so
each noisy sum is a normal variable around a sum of signs. The adversary knows everything but
the noise and the draws: it simulates which sums the steps can have, decorrelates the noise,
and takes the likelihood ratio of the two mixtures, the best score there is. To it comes what no
sound plan shows: two steps whose difference is a value that it has met before (`repeats`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import gradients, sampling
from dpjax.auditing.games.game import DELTAS, Claim, Game, Score, claims, repeats
from dpjax.noise.correlated.strategies import matrix
from dpjax.plan import Plan
from dpjax.sampling import Sampler

_SIMULATED = 1500  # draws of the sampler by which the adversary learns its mixtures
_FAR = 1e6  # a gradient, in clip norms
_SEED = 7_919  # of the adversary's own simulation: apart from those of the game


@functools.lru_cache(maxsize=16)  # the games of one sampler share its draws
def batches(
  sampler: Sampler, num_steps: int, num_examples: int, seed: int, n: int
) -> tuple[np.ndarray, np.ndarray]:
  """(rows [n, steps, slots], mask) of n runs, each with its own seed."""
  shape = (n, num_steps, sampler.slots)
  rows, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
  for run in range(n):
    for step in range(num_steps):
      drawn = sampler.draw(num_examples, seed=(seed << 32) + run, step=step)
      rows[run, step], mask[run, step] = sampling.pad(drawn, shape[2])
  return rows, mask


def _batches(plan: Plan, grads: np.ndarray, seed: int, n: int) -> tuple[np.ndarray, ...]:
  return batches(plan.sampler, plan.num_steps, len(grads), seed, n)


def game(
  room: str,
  subject: str,
  case: str,
  plan: Plan,
  worlds: tuple[np.ndarray, np.ndarray],
  *,
  epsilon: float | None = None,
  delta: float | None = None,
  draws: float = 1.0,
) -> Game:
  """The game of a plan on two data sets of gradients, in clip norms.

  Args:
    plan: with ONE clip norm.
    worlds: gradients [n], [m] of the two neighbours; each is scaled up far beyond the clip.
    epsilon, delta: what somebody else says that the plan costs; it takes the place of all but
      the last point of the plan's own curve.
  """
  if epsilon is None or delta is None:
    promised = claims(plan.epsilon)
  else:
    promised = Claim(epsilon, delta), Claim(plan.epsilon(DELTAS[-1]), DELTAS[-1])
  clip = plan.l2_bound
  run = functools.cache(lambda: _runner(plan))

  def outputs(world: int, seed: int, n: int) -> np.ndarray:
    grads = worlds[world]
    rows, mask = _batches(plan, grads, 2 * seed + world, n)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), world), n)
    given = _FAR * clip * np.append(grads, 0.0)[rows]  # an empty data set has no row 0
    return np.asarray(run()(keys, given.astype(np.float32), mask))

  def adversary(zero: np.ndarray, one: np.ndarray) -> Score:
    # It knows the laws, so it learns nothing but what a sound plan does not have.
    mixtures = [_mixture(plan, grads, which) for which, grads in enumerate(worlds)]
    sums = lambda seen: seen * plan.normalize_by / clip
    again = repeats(sums(zero), sums(one))
    return lambda seen: _log_ratio(plan, sums(seen), mixtures) + again(sums(seen))

  return Game(
    room, subject, case, str(plan.neighboring_relation), promised, outputs, adversary, draws
  )


def _runner(plan: Plan) -> Callable[..., Any]:
  """(keys [n], gradients [n, steps, slots], mask) -> updates [n, steps]."""

  def one(key: Any, grads: Any, mask: Any) -> Any:
    tx: Any = plan.transform(key)
    state = tx.init(jnp.zeros(1))

    def step(state: Any, batch: Any) -> Any:
      offered = gradients.stacked(batch[0][:, None])
      update, state = tx.update(offered, state, jnp.zeros(1), mask=batch[1])
      return state, update[0]

    return jax.lax.scan(step, state, (grads, mask))[1]

  return jax.jit(jax.vmap(one))


def _whitened(plan: Plan, sums: np.ndarray) -> np.ndarray:
  """[n, steps] multiplied by C, after which the noise is white."""
  if plan.noise_shape.correlation is None:
    return sums
  return sums @ matrix(plan.noise_shape.correlation, plan.num_steps).T


def _mixture(plan: Plan, grads: np.ndarray, world: int) -> tuple[np.ndarray, np.ndarray]:
  """The sums without noise that the steps can have, and how likely they are."""
  rows, mask = _batches(plan, grads, _SEED + world, _SIMULATED)
  signs = np.sign(np.append(grads, 0.0))  # clipped to one clip norm
  sums = np.where(mask, signs[rows], 0.0).sum(axis=2)
  centres, counts = np.unique(sums, axis=0, return_counts=True)
  return _whitened(plan, centres), np.log(counts / counts.sum())


def _log_ratio(plan: Plan, sums: np.ndarray, mixtures: Any) -> np.ndarray:
  seen = _whitened(plan, np.nan_to_num(sums, posinf=1e9, neginf=-1e9))
  std = plan.noise_multiplier

  def log_density(mixture: Any) -> np.ndarray:
    centres, log_weights = mixture
    square = ((seen[:, None] - centres[None]) ** 2).sum(axis=2) / (2 * std**2)
    return np.logaddexp.reduce(log_weights - square, axis=1)

  ratio = log_density(mixtures[1]) - log_density(mixtures[0])
  broken = ~np.isfinite(sums).all(axis=1)
  return np.round(np.where(broken, 1e9, np.clip(ratio, -1e6, 1e6)), 6)
