"""dpjax: train on private data in JAX, with every epsilon proved and tested."""

from dpjax import accounting as accounting
from dpjax import data as data
from dpjax import gradients as gradients
from dpjax import losses as losses
from dpjax import mechanisms as mechanisms
from dpjax import metrics as metrics
from dpjax import models as models
from dpjax import noise as noise
from dpjax import relevance as relevance
from dpjax import sampling as sampling
from dpjax import training as training
from dpjax.gradients import Clip as Clip
from dpjax.gradients import clipped_grad as clipped_grad
from dpjax.gradients import per_example_grads as per_example_grads
from dpjax.metrics import accuracy as accuracy
from dpjax.noise import NoiseShape as NoiseShape
from dpjax.plan import Plan as Plan
from dpjax.sampling import BallsInBinsSampler as BallsInBinsSampler
from dpjax.sampling import CyclicPoissonSampler as CyclicPoissonSampler
from dpjax.sampling import CyclicSampler as CyclicSampler
from dpjax.sampling import FixedSizeSampler as FixedSizeSampler
from dpjax.sampling import MinSepSampler as MinSepSampler
from dpjax.sampling import PoissonSampler as PoissonSampler
from dpjax.sampling import ShuffledSampler as ShuffledSampler
from dpjax.sampling import TruncatedPoissonSampler as TruncatedPoissonSampler
from dpjax.sampling import UserSampler as UserSampler
from dpjax.transforms import clip_and_noise as clip_and_noise
from dpjax.types import Batch as Batch
from dpjax.types import ClippedSum as ClippedSum
from dpjax.types import Example as Example
from dpjax.types import NeighboringRelation as NeighboringRelation
from dpjax.validate import UserError as UserError

__version__ = "0.1.0"
