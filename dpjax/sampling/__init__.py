"""Samplers: each decides who takes part in a step, and states the event for the accountant."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.sampling.balls_in_bins import BallsInBinsSampler as BallsInBinsSampler
  from dpjax.sampling.batch_sizes import check_passes as check_passes
  from dpjax.sampling.batch_sizes import steps_per_pass as steps_per_pass
  from dpjax.sampling.batch_sizes import whole_batch_size as whole_batch_size
  from dpjax.sampling.batch_sizes import whole_passes as whole_passes
  from dpjax.sampling.batches import batches as batches
  from dpjax.sampling.batches import pad as pad
  from dpjax.sampling.batches import rows_of_slice as rows_of_slice
  from dpjax.sampling.batches import slices as slices
  from dpjax.sampling.batches import taken as taken
  from dpjax.sampling.bounded_contribution import (
    BoundedContributionSampler as BoundedContributionSampler,
  )
  from dpjax.sampling.cyclic import CyclicSampler as CyclicSampler
  from dpjax.sampling.cyclic_poisson import CyclicPoissonSampler as CyclicPoissonSampler
  from dpjax.sampling.draws import generator as generator
  from dpjax.sampling.fixed_size import FixedSizeSampler as FixedSizeSampler
  from dpjax.sampling.k_out_of_t import KOutOfTSampler as KOutOfTSampler
  from dpjax.sampling.min_sep import MinSepSampler as MinSepSampler
  from dpjax.sampling.owners import bound_contributions as bound_contributions
  from dpjax.sampling.poisson import PoissonSampler as PoissonSampler
  from dpjax.sampling.random_allocation import (
    RandomAllocationSampler as RandomAllocationSampler,
  )
  from dpjax.sampling.registry import SAMPLERS as SAMPLERS
  from dpjax.sampling.registry import answered as answered
  from dpjax.sampling.registry import used_for as used_for
  from dpjax.sampling.samplers import PaddedSampler as PaddedSampler
  from dpjax.sampling.samplers import Participation as Participation
  from dpjax.sampling.samplers import PassSampler as PassSampler
  from dpjax.sampling.samplers import Sampler as Sampler
  from dpjax.sampling.samplers import SizedSampler as SizedSampler
  from dpjax.sampling.samplers import Sizing as Sizing
  from dpjax.sampling.samplers import UnamplifiedSampler as UnamplifiedSampler
  from dpjax.sampling.samplers import assumption as assumption
  from dpjax.sampling.shuffled import ShuffledSampler as ShuffledSampler
  from dpjax.sampling.truncated_poisson import (
    TruncatedPoissonSampler as TruncatedPoissonSampler,
  )
  from dpjax.sampling.user_sampler import UserSampler as UserSampler
  from dpjax.sampling.users import UserBlocks as UserBlocks
  from dpjax.sampling.users import group_by_user as group_by_user
  from dpjax.sampling.users import user_loss as user_loss
  from dpjax.sampling.with_replacement import (
    WithReplacementSampler as WithReplacementSampler,
  )
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
