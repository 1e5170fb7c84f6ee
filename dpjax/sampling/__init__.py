"""Samplers: who takes part in a step, each bound to its event."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.sampling.participation import BallsInBinsSampler as BallsInBinsSampler
  from dpjax.sampling.participation import CyclicPoissonSampler as CyclicPoissonSampler
  from dpjax.sampling.participation import CyclicSampler as CyclicSampler
  from dpjax.sampling.participation import MinSepSampler as MinSepSampler
  from dpjax.sampling.participation import (
    RandomAllocationSampler as RandomAllocationSampler,
  )
  from dpjax.sampling.samplers import FixedSizeSampler as FixedSizeSampler
  from dpjax.sampling.samplers import PaddedSampler as PaddedSampler
  from dpjax.sampling.samplers import Participation as Participation
  from dpjax.sampling.samplers import PoissonSampler as PoissonSampler
  from dpjax.sampling.samplers import Sampler as Sampler
  from dpjax.sampling.samplers import ShuffledSampler as ShuffledSampler
  from dpjax.sampling.samplers import SizedSampler as SizedSampler
  from dpjax.sampling.samplers import assumption as assumption
  from dpjax.sampling.samplers import check_passes as check_passes
  from dpjax.sampling.samplers import generator as generator
  from dpjax.sampling.samplers import pad as pad
  from dpjax.sampling.samplers import steps_per_pass as steps_per_pass
  from dpjax.sampling.samplers import taken as taken
  from dpjax.sampling.samplers import whole_batch_size as whole_batch_size
  from dpjax.sampling.samplers import whole_passes as whole_passes
  from dpjax.sampling.slicing import slice_slots as slice_slots
  from dpjax.sampling.slicing import slices as slices
  from dpjax.sampling.truncated import TruncatedPoissonSampler as TruncatedPoissonSampler
  from dpjax.sampling.users import UserBlocks as UserBlocks
  from dpjax.sampling.users import UserSampler as UserSampler
  from dpjax.sampling.users import group_by_user as group_by_user
  from dpjax.sampling.users import user_loss as user_loss
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
