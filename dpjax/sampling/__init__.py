"""Who takes part in a step: samplers, each bound to its event."""

from dpjax.sampling.samplers import FixedSizeSampler as FixedSizeSampler
from dpjax.sampling.samplers import PoissonSampler as PoissonSampler
from dpjax.sampling.samplers import Sampler as Sampler
from dpjax.sampling.samplers import ShuffledSampler as ShuffledSampler
from dpjax.sampling.samplers import generator as generator
from dpjax.sampling.samplers import pad as pad
