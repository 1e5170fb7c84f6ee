"""PATE on MNIST: 250 teachers, 300 labels, at the epsilon that Papernot et al. 2018 report.

  python -m launch.pate --config=configs/pate/mnist.py --workdir=runs/pate_mnist

Needs MNIST prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir).
Hardware: 2 CPU cores. Time: 3 minutes beside other work, and a minute of features.
Expected: test accuracy .980 (.979-.980 over three seeds) on the last 1,000 test images, at a
proved epsilon of 1.97 (delta 1e-5, add/remove-one, per example), whatever the votes are.
"""

from dpjax.experiments.config.sections import ExamplesConfig
from dpjax.experiments.kinds.pate.config import PateConfig


def get_config() -> PateConfig:
  return PateConfig(
    data=ExamplesConfig("mnist"),
    features="scattering",
    num_teachers=250,
    teacher_capacity=320,
    num_pool=9000,
    num_queries=300,
    epsilon=1.97,
    delta=1e-5,
    num_components=200,
    num_student_components=320,
    eval_every=100,
  )
