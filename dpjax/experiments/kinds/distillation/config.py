"""Typed configuration of a run with a teacher and a student. A config file returns it."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from dpjax.experiments.config import common, rules
from dpjax.experiments.config.choices import Choice
from dpjax.experiments.config.fields import WithChoices
from dpjax.experiments.config.sections import ExamplesConfig

_WIDTH = rules.between(1, 10**4)
# Float32 loses the differences of answers at temperatures above 1e4, and the student's gradients at
# temperatures below 1e-4.
_TEMPERATURE = rules.within_range(1e-4, 1e4)


@dataclasses.dataclass(frozen=True)
class PublicImages:
  """The student learns the teacher's answers on public images; it costs nothing."""

  student_updates: Annotated[
    int, rules.between(1, 1000), "of the student in a step of the teacher"
  ] = 5
  student_batch: Annotated[
    int, rules.between(1, 1_000_000), "public images of an update"
  ] = 128


@dataclasses.dataclass(frozen=True)
class Joint:
  """Both learn from private records, under one clip and one noise."""


METHODS: dict[str, type] = {"public": PublicImages, "joint": Joint}


@dataclasses.dataclass
class DistillationConfig(WithChoices):
  """Configuration of a run: a teacher under DP-SGD, and a smaller student.

  The test set is taken as public. With method="public" the student reads the first `num_pool` test
  images, without labels. The other test images score both networks.
  """

  method: Annotated[Any, Choice(METHODS), "what the student reads"] = "public"
  data: ExamplesConfig = dataclasses.field(default_factory=ExamplesConfig)
  num_pool: Annotated[int, common.COUNT, "public images without labels; of public"] = 200
  pool_is_public: common.PoolIsPublic = False
  teacher_hidden: Annotated[int, _WIDTH, "width of the teacher"] = 64
  student_hidden: Annotated[int, _WIDTH, "width of the student"] = 16
  temperature: Annotated[
    float, _TEMPERATURE, "of the teacher's answers; more is softer"
  ] = 1.0
  batch_size: Annotated[int, common.COUNT, "expected records of a step"] = 256
  epochs: Annotated[
    int, rules.between(1, rules.MOST_EPOCHS), "expected steps of each record"
  ] = 30
  l2_clip_norm: Annotated[
    common.ClipNorm, "of one record's gradient; of joint: of both networks together"
  ] = 1.0
  epsilon: Annotated[float, rules.POSITIVE, "of both networks together"] = 3.0
  delta: Annotated[common.Delta, "of the same"] = 1e-5
  epsilon_budget: common.EpsilonBudget = None
  teacher_rate: Annotated[float, common.LearningRate, "learning rate of its SGD"] = 0.5
  student_rate: Annotated[
    float, common.LearningRate, "learning rate: of Adam for public, of SGD for joint"
  ] = 2e-3
  eval_every: Annotated[int, common.COUNT, "steps between two scores"] = 50
  seed: common.Seed = 0
  noise_seed: common.NoiseSeed = None


def check(config: DistillationConfig) -> None:
  """Raises UserError if the config is wrong; loads no data."""
  common.check_types(config)
  is_public = isinstance(config.method, PublicImages)
  common.read_if(config, is_public, "method='public'", "pool_is_public")
