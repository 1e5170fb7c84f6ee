"""Private synthesis of MNIST: one release of second moments and random Fourier features.

  python -m launch.synthesize --config=configs/synthesis/mnist.py --workdir=runs/synthesis_mnist

Needs MNIST prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir).
Hardware: 2 CPU cores. Time: 2 to 5 minutes beside other work.
Expected: test accuracy .848 of logistic regression and .852 of a network, trained on samples alone.
"""

from dpjax.experiments.config.sections import ExamplesConfig
from dpjax.experiments.kinds.synthesis.config import KernelMean, SynthesisConfig


def get_config() -> SynthesisConfig:
  return SynthesisConfig(
    data=ExamplesConfig("mnist"),
    method=KernelMean(num_frequencies=300, length_scale=10.0, side=12, num_steps=2000),
    epsilon=1.0,
    delta=1e-5,
    num_samples=10_000,
  )
