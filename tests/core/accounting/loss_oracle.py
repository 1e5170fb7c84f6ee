"""Epsilons of the loss grid against exact divergences of 40 digits, at random settings.

An epsilon at delta is right if the exact divergence there is at most delta. The divergence of one
step is a closed form; that of two is one integral; many Gaussian steps are one Gaussian; and many
randomised responses, whose losses are on the grid, are a binomial. `python -m
tests.core.accounting.loss_oracle --count=500` prints a row of a CSV for each setting.
"""

import argparse
import csv
import importlib
import math
import random
import sys

import mpmath
import numpy as np

from dpjax import accounting
from dpjax.accounting.event_kinds.elements import accountable
from dpjax.accounting.loss_grid import Composition, LossMasses, Step

mpmath.mp.dps = 40
FIELDS = (
  "kind", "sampling_prob", "noise_multiplier", "steps", "delta", "epsilon", "exact_delta",
  "share_used",
)  # fmt: skip
_compositions = importlib.import_module("dpjax.accounting.epsilon")._compositions


def _density(x):
  return mpmath.npdf(x)


def one_step(q, shift, y, *, removed):
  """Divergence of one step of noise on a Poisson sample at any real y, the exact one."""
  q, shift, y = map(mpmath.mpf, (q, shift, y))
  # The ratio of the densities at the threshold.
  ratio = (mpmath.exp(y if removed else -y) - 1) / q + 1
  if ratio <= 0:
    return 1 - mpmath.exp(y) if removed else mpmath.mpf(0)
  at = mpmath.log(ratio) / shift + shift / 2
  if removed:
    mixture = (1 - q) * mpmath.ncdf(-at) + q * mpmath.ncdf(shift - at)
    return mixture - mpmath.exp(y) * mpmath.ncdf(-at)
  mixture = (1 - q) * mpmath.ncdf(at) + q * mpmath.ncdf(at - shift)
  return mpmath.ncdf(at) - mpmath.exp(y) * mixture


def two_steps(q, shift, epsilon, *, removed):
  """Divergence of two steps: that of one, at epsilon minus the loss of the other."""
  q, shift, epsilon = map(mpmath.mpf, (q, shift, epsilon))
  ratio = lambda x: 1 - q + q * mpmath.exp(shift * x - shift**2 / 2)

  def integrand(x):
    loss = mpmath.log(ratio(x))
    if removed:
      return _density(x) * ratio(x) * one_step(q, shift, epsilon - loss, removed=True)
    return _density(x) * one_step(q, shift, epsilon + loss, removed=False)

  # The integrand bends where the other step's divergence becomes that of a certain loss.
  bends = []
  with mpmath.workdps(25):
    edge = mpmath.exp(epsilon) / (1 - q) if removed else mpmath.exp(-epsilon) / (1 - q)
    inner = (edge - 1) / q + 1
    if inner > 0:
      bends = [mpmath.log(inner) / shift + shift / 2]
    points = sorted([mpmath.mpf(k) for k in range(-12, 13 + math.ceil(shift), 3)] + bends)
    return mpmath.quad(integrand, points)


def gaussian(mu, epsilon):
  mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
  low = mpmath.ncdf(-mu / 2 - epsilon / mu)
  return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * low


def laplace(q, z, y, *, removed):
  """As `one_step`, for Laplace noise of scale z."""
  q, y, top = mpmath.mpf(q), mpmath.mpf(y), 1 / mpmath.mpf(z)
  ratio = ((mpmath.exp(y if removed else -y) - 1) / q) + 1
  if ratio <= 0:
    return mpmath.mpf(0)
  inner = abs(mpmath.log(ratio))
  divergence = -mpmath.expm1((inner - top) / 2) if inner < top else mpmath.mpf(0)
  return q * divergence * (1 if removed else mpmath.exp(y) * ratio)


def responses(loss, times, epsilon):
  """Divergence of `times` randomised responses, each of the losses +-`loss`."""
  loss, epsilon = mpmath.mpf(loss), mpmath.mpf(epsilon)
  chance = 1 / (1 + mpmath.exp(-loss))
  total = mpmath.mpf(0)
  for count in range(times, -1, -1):
    here = (2 * count - times) * loss
    if here <= epsilon:
      break
    term = mpmath.binomial(times, count) * chance**count * (1 - chance) ** (times - count)
    total -= term * mpmath.expm1(epsilon - here)
  return total


def _of_event(event, delta):
  """Epsilon of each direction, proved without the part of delta that is left unused."""
  return [side.epsilon(delta) for side in _compositions(accountable(event).parts)]


def on_grid(loss_cells, interval):
  """Masses of a randomised response whose losses are cells of the grid, rounded up."""
  loss = mpmath.mpf(loss_cells) * mpmath.mpf(interval)
  chance = 1 / (1 + mpmath.exp(-loss))
  probs = np.zeros(2 * loss_cells + 1)
  probs[-1] = math.nextafter(float(chance), 2.0)
  probs[0] = math.nextafter(float(1 - chance), 2.0)
  return LossMasses(interval, -loss_cells, probs, 0.0)


KINDS = ("one step", "gaussians", "responses", "laplace", "two steps")


def settings(count, seed, kinds=KINDS):
  """Yields a row of `FIELDS` for each random setting."""
  draw = random.Random(seed)
  for place in range(count):
    delta = 10 ** draw.uniform(-12, -2)
    q = 10 ** draw.uniform(-6, 0)
    z = 10 ** draw.uniform(-0.5, 1.5)
    kind = kinds[place % len(kinds)]
    steps = 1
    if kind == "gaussians":
      q, steps = 1.0, round(10 ** draw.uniform(0.3, 7))
      z *= math.sqrt(steps)
      event = accounting.poisson_sampled_event(
        accounting.gaussian_event(z), sampling_prob=q
      )
      (epsilon,) = _of_event(accounting.compose(event, steps), delta)
      exact = gaussian(mpmath.sqrt(steps) / mpmath.mpf(z), epsilon)
    elif kind == "responses":
      # `noise_multiplier` is the loss here.
      steps, cells = round(10 ** draw.uniform(0.3, 3)), round(10 ** draw.uniform(0, 3))
      interval = 2.0 ** -draw.randint(8, 16)
      q, z = 1.0, cells * interval
      step = Step(on_grid(cells, interval))
      epsilon = Composition([(step, steps)]).epsilon(delta)
      exact = responses(z, steps, epsilon)
    else:
      noise = accounting.laplace_event if kind == "laplace" else accounting.gaussian_event
      steps = 2 if kind == "two steps" else 1
      q = max(q, 1e-3) if kind == "two steps" else q
      event = accounting.poisson_sampled_event(noise(z), sampling_prob=q)
      sides = _of_event(accounting.compose(event, steps), delta)
      exact, epsilon = max(
        (_exact(kind, q, z, side, removed=not place), side)
        for place, side in enumerate(sides)
      )
    yield kind, q, z, steps, delta, epsilon, float(exact), float(exact / delta)


def _exact(kind, q, z, epsilon, *, removed):
  if kind == "laplace":
    return laplace(q, z, epsilon, removed=removed)
  exact = two_steps if kind == "two steps" else one_step
  return exact(q, 1 / mpmath.mpf(z), epsilon, removed=removed)


def main(arguments=None):
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--count", type=int, default=500)
  parser.add_argument("--seed", type=int, default=1)
  options = parser.parse_args(arguments)
  writer = csv.writer(sys.stdout, lineterminator="\n")
  writer.writerow(FIELDS)
  for row in settings(options.count, options.seed):
    writer.writerow(f"{value:.12g}" if isinstance(value, float) else value for value in row)
    sys.stdout.flush()


if __name__ == "__main__":
  main()
