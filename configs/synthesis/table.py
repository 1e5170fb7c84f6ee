"""Private synthesis of a table: 569 tumours of the breast, 30 numbers each, offline.

  python -m launch.synthesize --config=configs/synthesis/table.py --workdir=runs/synthesis_table

Any table with declared columns will do (--config.dataset=people.csv): samples.csv has its columns.
"""

from dpjax.experiments.kinds.synthesis.config import KernelMean, SynthesisConfig


def get_config() -> SynthesisConfig:
  return SynthesisConfig(
    dataset="breast_cancer",
    method=KernelMean(num_frequencies=200, length_scale=1.5, side=0),
    epsilon=3.0,
    delta=1e-5,
    hidden=64,
    num_latents=16,
  )
