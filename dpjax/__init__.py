"""dpjax: train on private data in JAX. Every epsilon is proved, or reported as not proved.

Every package of dpjax is an attribute, which is imported at its first use. So a program that only
computes an epsilon, for example, does not load the models.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax import accounting as accounting
  from dpjax import attacks as attacks
  from dpjax import auditing as auditing
  from dpjax import data as data
  from dpjax import federated as federated
  from dpjax import gradients as gradients
  from dpjax import losses as losses
  from dpjax import mechanisms as mechanisms
  from dpjax import metrics as metrics
  from dpjax import models as models
  from dpjax import noise as noise
  from dpjax import relevance as relevance
  from dpjax import sampling as sampling
  from dpjax import secure as secure
  from dpjax import serving as serving
  from dpjax import training as training
  from dpjax import transforms as transforms
  from dpjax import zoo as zoo
  from dpjax.accounting.proved import NeighboringRelation as NeighboringRelation
  from dpjax.checks.check import check as check
  from dpjax.gradients import Clip as Clip
  from dpjax.gradients import clipped_grad as clipped_grad
  from dpjax.gradients import per_example_grads as per_example_grads
  from dpjax.gradients import wrap_grads as wrap_grads
  from dpjax.joint import JointPlan as JointPlan
  from dpjax.metrics import accuracy as accuracy
  from dpjax.noise import NoiseShape as NoiseShape
  from dpjax.noise import new_key as new_key
  from dpjax.plan import Plan as Plan
  from dpjax.sampling import BallsInBinsSampler as BallsInBinsSampler
  from dpjax.sampling import BoundedContributionSampler as BoundedContributionSampler
  from dpjax.sampling import CyclicPoissonSampler as CyclicPoissonSampler
  from dpjax.sampling import CyclicSampler as CyclicSampler
  from dpjax.sampling import FixedSizeSampler as FixedSizeSampler
  from dpjax.sampling import KOutOfTSampler as KOutOfTSampler
  from dpjax.sampling import MinSepSampler as MinSepSampler
  from dpjax.sampling import PoissonSampler as PoissonSampler
  from dpjax.sampling import RandomAllocationSampler as RandomAllocationSampler
  from dpjax.sampling import ShuffledSampler as ShuffledSampler
  from dpjax.sampling import TruncatedPoissonSampler as TruncatedPoissonSampler
  from dpjax.sampling import WithReplacementSampler as WithReplacementSampler
  from dpjax.transforms import clip_and_noise as clip_and_noise
  from dpjax.types import Batch as Batch
  from dpjax.types import ClippedSum as ClippedSum
  from dpjax.types import Example as Example
  from dpjax.types import PerExampleGrads as PerExampleGrads
  from dpjax.validate import UserError as UserError
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)

__version__ = "0.1.0"
