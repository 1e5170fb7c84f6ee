"""The kind of run of `launch.distill`: a private teacher and a student under one budget."""

from dpjax.experiments.kinds.distillation.config import DistillationConfig, check
from dpjax.experiments.run.kind import Kind

DISTILLATION = Kind(config=DistillationConfig, launcher="launch.distill", check=check)
