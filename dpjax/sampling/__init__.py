"""Samplers: each decides who takes part in a step, and states the event for the accountant."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.sampling.balls_in_bins import BallsInBinsSampler as BallsInBinsSampler
  from dpjax.sampling.bounded_contribution import (
    BoundedContributionSampler as BoundedContributionSampler,
  )
  from dpjax.sampling.bounded_contribution import bound_contributions as bound_contributions
  from dpjax.sampling.cyclic import CyclicSampler as CyclicSampler
  from dpjax.sampling.cyclic_poisson import CyclicPoissonSampler as CyclicPoissonSampler
  from dpjax.sampling.fixed_size import FixedSizeSampler as FixedSizeSampler
  from dpjax.sampling.k_out_of_t import KOutOfTSampler as KOutOfTSampler
  from dpjax.sampling.min_sep import MinSepSampler as MinSepSampler
  from dpjax.sampling.poisson import PoissonSampler as PoissonSampler
  from dpjax.sampling.random_allocation import (
    RandomAllocationSampler as RandomAllocationSampler,
  )
  from dpjax.sampling.samplers import Sampler as Sampler
  from dpjax.sampling.shuffled import ShuffledSampler as ShuffledSampler
  from dpjax.sampling.truncated_poisson import (
    TruncatedPoissonSampler as TruncatedPoissonSampler,
  )
  from dpjax.sampling.users import group_by_user as group_by_user
  from dpjax.sampling.users import user_loss as user_loss
  from dpjax.sampling.with_replacement import (
    WithReplacementSampler as WithReplacementSampler,
  )
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
