"""Noise on a Poisson sample that is cut to a random subset if it is too large."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import dp_accounting as dpa
import numpy as np
from scipy import stats

from dpjax import validate
from dpjax.accounting import noise_profiles
from dpjax.accounting.event_kinds.kind import (
  LEAST_PROB,
  DpEvent,
  EventKind,
  Grid,
  amplify,
  kind_of,
  register,
)
from dpjax.accounting.event_kinds.noisy_sum import largest_added
from dpjax.accounting.loss_grid import LossMasses, connect
from dpjax.accounting.proved import ZERO
from dpjax.accounting.text import upper
from dpjax.validate import UserError

# Allowance for the relative error of SciPy's chances of a binomial.
_CHANCE_ERROR = 1e-11


class TruncatedPoissonKind(EventKind[dpa.TruncatedSubsampledGaussianDpEvent]):
  """The accounting of a Poisson sample at rate q from n records, cut to B of them at random.

  In the neighbour one record x is zeroed, but keeps its place.
  Let K ~ Bin(n - 1, q) be the number of OTHER records that are drawn. If K < B, nothing is cut,
  with or without x, and the pair is that of Poisson sampling. If K >= B, let T be a uniform
  B-subset of the other drawn records, and y uniform in T. Then x is kept with probability
  p = q E[B / (K + 1) | K >= B], in the place of y. Given (T, y), the outputs of the two neighbours
  are (1 - p) N(0) + p N(u), with ||u|| <= 2 C, and
  (1 - p) N(0) + p N(v), with ||v|| <= C and ||u - v|| <= C. By advanced joint convexity
  (Balle, Barthe, Gaboardi 2018, theorem 2) their hockey-stick divergence is at most p times
  that of two Gaussians 2 C apart, in both directions and at every order >= 1. So it is at
  most that of (1 - p) N(0) + p N(2 C) and (1 - p) N(0) + p N(-2 C). The
  accounting reveals whether K >= B, so it mixes the two pairs. dp_accounting builds the same
  mixture (arXiv:2508.15089).
  """

  name = "truncated_poisson"
  event = dpa.TruncatedSubsampledGaussianDpEvent
  relations = (ZERO,)
  accountants = ("pld",)

  def elements(
    self, event: dpa.TruncatedSubsampledGaussianDpEvent
  ) -> Iterable[tuple[DpEvent, int]]:
    prob = event.sampling_probability
    capacity = event.truncated_batch_size
    size = event.dataset_size
    # If one of these numbers is 0, no record ever takes part, so the release costs nothing.
    if prob == 0 or capacity == 0 or size == 0:
      return []
    _check(prob, size, capacity)
    return super().elements(event)

  def pld(
    self, part: dpa.TruncatedSubsampledGaussianDpEvent, interval: float
  ) -> Sequence[LossMasses]:
    prob = part.sampling_probability
    plain = dpa.PoissonSampledDpEvent(prob, _noise_of(part))
    capacity, size = part.truncated_batch_size, part.dataset_size
    cut = float(stats.binom.sf(capacity - 1, size - 1, prob))
    if cut == 0:
      return kind_of(plain).pld(plain, interval)
    kept = float(stats.binom.sf(capacity, size, prob)) * capacity / (cut * size)
    kept = min(1.0, kept * (1 + _CHANCE_ERROR))
    shift = 2 / part.noise_multiplier
    noise = noise_profiles.gaussian(shift / 2)

    # Both directions have the same grid, and the same divergence if the sample is cut.
    of_cut: dict[int, np.ndarray] = {}

    def mixed(uncut: Callable[..., np.ndarray], epsilons: np.ndarray) -> np.ndarray:
      if not of_cut:
        apart = noise_profiles.distance_deltas(epsilons, prob=kept, shift=shift)
        of_cut[len(epsilons)] = (1 + _CHANCE_ERROR) * cut * apart
      deltas = (1 - (1 - _CHANCE_ERROR) * cut) * uncut(
        epsilons, sampling_prob=prob, noise=noise
      )
      return np.minimum(deltas + of_cut[len(epsilons)], 1.0)

    # At 10 deviations beyond `shift`, the loss is that of a removed and of an added record.
    removed = amplify(shift**2 / 2 + 10 * shift, kept)
    return connect(
      functools.partial(mixed, noise_profiles.removal_deltas),
      functools.partial(mixed, noise_profiles.addition_deltas),
      interval=interval,
      largest=removed + largest_added(1.5 * shift**2 + 10 * shift, kept),
    )

  def grid(self, part: dpa.TruncatedSubsampledGaussianDpEvent) -> Grid:
    # The grid is that of the uncut sample.
    noise = _noise_of(part)
    whole = kind_of(noise).grid(noise)
    prob = part.sampling_probability
    return Grid(amplify(whole.renyi_two, prob**2), amplify(whole.largest_loss, prob))

  def zcdp(self, part: dpa.TruncatedSubsampledGaussianDpEvent) -> float:
    # The draw does not depend on the record, and a zeroed record keeps its place in the draw. So
    # the step is a mixture of Gaussian sums.
    noise = _noise_of(part)
    return kind_of(noise).zcdp(noise)

  def gaussian_noise(self, part: dpa.TruncatedSubsampledGaussianDpEvent) -> float:
    return part.noise_multiplier

  def describe(self, part: dpa.TruncatedSubsampledGaussianDpEvent, unit: str) -> str:
    noise = _noise_of(part)
    return (
      f"{kind_of(noise).describe(noise, unit)} on a truncated Poisson "
      f"sample (assumed: every {unit} of {part.dataset_size} joins each batch on its own, "
      f"with probability {upper(part.sampling_probability, digits=6)}, and of more than "
      f"{part.truncated_batch_size} a uniformly random subset of that size is kept)"
    )


def _check(sampling_prob: float, num_examples: int, capacity: int) -> None:
  validate.probability(sampling_prob=sampling_prob)
  if sampling_prob < LEAST_PROB:
    raise UserError(
      f"must be at least {LEAST_PROB:g}", field="sampling_prob", value=sampling_prob
    )
  validate.integer_at_least(1, num_examples=num_examples, capacity=capacity)


def _noise_of(part: dpa.TruncatedSubsampledGaussianDpEvent) -> DpEvent:
  return dpa.GaussianDpEvent(part.noise_multiplier)


def truncated_poisson_event(
  event: DpEvent, *, sampling_prob: float, num_examples: int, capacity: int
) -> DpEvent:
  """Returns the event of a Gaussian sum over a Poisson sample, cut to `capacity` records.

  If more records are drawn, a uniformly random subset is kept. This is NOT Poisson sampling
  (pitfall P12), so the event can be accounted only under replace_special and by PLD.

  >>> from dpjax.accounting import gaussian_event
  >>> truncated_poisson_event(
  ...   gaussian_event(1), sampling_prob=0.5, num_examples=10, capacity=6)
  TruncatedSubsampledGaussianDpEvent(dataset_size=10, ..., noise_multiplier=1.0)
  """
  _check(sampling_prob, num_examples, capacity)
  if not isinstance(event, dpa.GaussianDpEvent):
    raise UserError(
      "a truncated Poisson sample takes a GaussianDpEvent", field="event", value=event
    )
  return dpa.TruncatedSubsampledGaussianDpEvent(
    int(num_examples), float(sampling_prob), int(capacity), event.noise_multiplier
  )


register(TruncatedPoissonKind())
