"""A teacher and a student on MNIST: is a small network better taught, or trained by DP-SGD itself?

python -m launch.distill --config=configs/distillation/mnist.py --workdir=runs/distill_mnist
"""

from dpjax.experiments.kinds.distillation.config import DistillationConfig


def get_config() -> DistillationConfig:
  return DistillationConfig(
    dataset="mnist",
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
