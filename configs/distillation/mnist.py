"""A teacher and a student on MNIST: a small network taught on public images.

  python -m launch.distill --config=configs/distillation/mnist.py --workdir=runs/distill_mnist

Needs MNIST prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir).
Hardware: 2 CPU cores. Time: one to five minutes beside other work.
Expected: test accuracy .897 (.893-.901 over three seeds) of the student and .901 of the teacher,
on 5,000 test images, at a proved epsilon of 1 (delta 1e-5, add/remove-one, per example). A network
of the student's size that DP-SGD trains itself reaches .889: docs/distillation.md.
"""

from dpjax.experiments.config.sections import ExamplesConfig
from dpjax.experiments.kinds.distillation import DistillationConfig


def get_config() -> DistillationConfig:
  return DistillationConfig(
    data=ExamplesConfig("mnist"),
    num_pool=5000,
    teacher_hidden=128,
    student_hidden=16,
    batch_size=1024,
    epochs=4,
    l2_clip_norm=1.0,
    epsilon=1.0,
    teacher_rate=1.0,
    eval_every=118,
  )
