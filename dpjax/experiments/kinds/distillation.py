"""One run of distillation, from a `DistillationConfig`.

Every step is one accounted step of DP-SGD. With `method="public"` a step updates the teacher,
then the student several times on public images. With `method="joint"` one gradient updates both.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from dpjax import closed_over
from dpjax import data as data_lib
from dpjax.accounting.text import paragraph
from dpjax.data.target_kinds import needs_classes
from dpjax.experiments.config import common, rules
from dpjax.experiments.config.choices import Choice, name_of
from dpjax.experiments.config.fields import WithChoices
from dpjax.experiments.config.sections import ExamplesConfig
from dpjax.experiments.kinds import public_pool
from dpjax.experiments.kinds.central.features import check_images
from dpjax.experiments.run import guarantee, left_out, writers
from dpjax.experiments.run.experiment import Experiment, Phase, Scores, Story, every, single
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.key_uses import KeyUse, key_for
from dpjax.plan import Plan
from dpjax.types import Array
from dpjax.zoo import recipes

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


_NOTES = {
  "public": (
    "Only the teacher reads private records, and each of its steps is accounted. The student reads "
    "the teacher's noisy parameters and {pool} images that are taken as public: the first ones of "
    "the test set, without labels. It costs nothing more."
  ),
  "joint": (
    "One vector holds the gradients of both networks. It is clipped and gets noise as a whole, so "
    "each step is one event for both."
  ),
}


class _Network(nn.Module):
  """Network from images to logits, with one hidden layer."""

  hidden: int
  num_classes: int

  @nn.compact
  def __call__(self, x: Array) -> Array:
    flat = x.reshape(x.shape[0], -1)
    return nn.Dense(self.num_classes)(nn.tanh(nn.Dense(self.hidden)(flat)))


class Distillation(Experiment[DistillationConfig]):
  """One run with a teacher under DP-SGD, and a smaller student."""

  def check(self) -> None:
    config = self.config
    common.check_types(config)
    is_public = isinstance(config.method, PublicImages)
    common.read_if(config, is_public, "method='public'", "pool_is_public")

  def data(self) -> tuple[Any, Any]:
    """Returns (private data, public data)."""
    return self.config.data.load()

  def check_data(self, data: Any) -> None:
    train, public = data
    name = self.config.data.name
    needs_classes(train, "data.name", name)
    check_images(train, "data.name", name)
    public_pool.check_size(self.config, public)
    if isinstance(self.config.method, PublicImages):
      public_pool.check(self.config, train, public)

  def digest(self, data: Any) -> bytes:
    if isinstance(self.config.method, Joint):
      # The student of "joint" reads no pool, so its training does not depend on public data.
      return data_lib.digest(data[0])
    return public_pool.digest(self.config, *data)

  def line(self, result: dict[str, Any]) -> str:
    return (
      f"{result['dataset']} {result['method']}: {writers.headline(result)} of the student, "
      f"teacher_accuracy={result['teacher_accuracy']:.4g}, "
      f"{guarantee.summary(result)}{writers.took(result)}"
    )

  def train(self, data: Any, keys: RunKeys) -> Story:
    train, public = data
    return single(_Run(self.config, train, public, keys).phase())


class _Run:
  """Holds the data, networks and plan of one run, and makes its phase."""

  def __init__(self, config: DistillationConfig, train: Any, public: Any, random: RunKeys):
    self.config = config
    self.train = train.without_empty_records()
    # `Plan.for_data` refuses data whose number of records is not declared.
    self.num_records = train.nominal_size
    self.public = public
    self.random = random
    self.teacher = _Network(config.teacher_hidden, train.num_classes)
    self.student = _Network(config.student_hidden, train.num_classes)
    self.plan = Plan.for_data(
      train,
      epsilon=config.epsilon,
      delta=config.delta,
      batch_size=config.batch_size,
      epochs=config.epochs,
      l2_clip_norm=config.l2_clip_norm,
    )
    make = self._public if isinstance(config.method, PublicImages) else self._joint
    self.init, self.step = make()

  # --- losses

  def _teacher_loss(self, params: Any, example: Any) -> Array:
    logits = self.teacher.apply(params, example.x[None])
    assert isinstance(logits, jax.Array)
    return optax.softmax_cross_entropy_with_integer_labels(logits[0], example.y)

  def _answers(self, teacher: Any, x: Array) -> Array:
    """Returns the teacher's probabilities [B, K], softened by the temperature."""
    logits = jnp.asarray(self.teacher.apply(teacher, x))
    return jax.nn.softmax(logits / self.config.temperature)

  def _imitation(self, student: Any, teacher: Any, x: Array) -> Array:
    """Returns the mean cross-entropy of the student against the teacher's answers, times the square
    of the temperature."""
    temperature = self.config.temperature
    logits = jnp.asarray(self.student.apply(student, x)) / temperature
    losses = optax.softmax_cross_entropy(logits, self._answers(teacher, x))
    # At high temperatures T, gradients shrink as 1 / T^2 (Hinton et al. 2015). The factor undoes
    # this.
    return temperature**2 * jnp.mean(losses)

  # --- the two methods

  def _public(self) -> tuple[Any, Any]:
    config = self.config
    method = config.method
    pool = jnp.asarray(np.asarray(self.public.x[: config.num_pool]))

    def inputs(rows: Array, teacher: Any, key: Array) -> Array:
      del teacher
      chosen = jax.random.randint(key, (method.student_batch,), 0, config.num_pool)
      return rows[chosen]

    both = recipes.distillation(
      self._teacher_loss,
      self._imitation,
      self.plan,
      inputs=inputs,
      public=pool,
      teacher_tx=optax.sgd(config.teacher_rate),
      student_tx=optax.adam(config.student_rate),
      noise_key=self.random.noise,
      public_key=key_for(KeyUse.PUBLIC_STEPS, self.random.init),
    )

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
      state, info = both.step(state, batch)
      update = lambda _, state: both.student_step(state)
      # `both.step` makes the first update of the student. The loop makes the other updates, and is
      # compiled only once.
      return jax.lax.fori_loop(1, method.student_updates, update, state), info

    return both.init, step

  def _joint(self) -> tuple[Any, Any]:
    config = self.config

    def student_loss(student: Any, teacher: Any, example: Any) -> Array:
      logits = jnp.asarray(self.student.apply(student, example.x[None]))
      labelled = optax.softmax_cross_entropy_with_integer_labels(logits[0], example.y)
      return labelled + self._imitation(student, teacher, example.x[None])

    algorithm = recipes.joint_distillation(
      self._teacher_loss,
      student_loss,
      self.plan,
      teacher_tx=optax.sgd(config.teacher_rate),
      student_tx=optax.sgd(config.student_rate),
      noise_key=self.random.noise,
    )
    together = lambda teacher, student: algorithm.init(
      {"teacher": teacher, "student": student}
    )
    return together, algorithm.step

  # --- the run

  def first(self) -> Any:
    """Returns the state before the first step."""
    key = key_for(KeyUse.PARAMETERS, self.random.init)
    teacher_key, student_key = jax.random.split(key)
    # Parameters are initialised on zeros, since they must not depend on any record.
    x = jnp.zeros((1, *self.train.x.shape[1:]))
    return self.init(self.teacher.init(teacher_key, x), self.student.init(student_key, x))

  def networks(self, state: Any) -> dict[str, Any]:
    """Returns a dict from "teacher" and "student" to the parameters of each network."""
    if isinstance(self.config.method, Joint):
      return state.params
    return {"teacher": state.teacher.params, "student": state.student}

  def scores(self, state: Any) -> Scores:
    """Returns the accuracy of both networks on public examples outside the pool."""
    held_out = slice(self.config.num_pool, len(self.public))
    x = jnp.asarray(np.asarray(self.public.x[held_out]))
    y = np.asarray(self.public.y[held_out])
    networks = self.networks(state)

    def accuracy(network: nn.Module, params: Any) -> float:
      logits = np.asarray(jax.jit(network.apply)(params, x))
      return float(np.mean(logits.argmax(axis=1) == y))

    return {
      "accuracy": accuracy(self.student, networks["student"]),
      "teacher_accuracy": accuracy(self.teacher, networks["teacher"]),
    }

  def phase(self) -> Phase:
    """Returns the phase that trains both networks, with its guarantee and its reports."""
    config = self.config
    plan = self.plan
    note = paragraph(_NOTES[name_of(config, "method")].format(pool=config.num_pool))
    promised = guarantee.of_plan(plan, self.num_records, budget=config.epsilon_budget)
    promised = guarantee.add_note(promised, note)
    if isinstance(config.method, PublicImages):
      promised = public_pool.add_note(promised, config, self.public)
    return Phase(
      num_steps=plan.num_steps,
      init=self.first,
      step=closed_over.jitted(self.step, donate_argnums=0),
      draws=lambda start: plan.batches(self.train, rng=self.random.sampler, start=start),
      released=self.networks,
      evaluate=self.scores,
      guarantee=promised,
      row_at=functools.partial(every, config.eval_every, plan.num_steps),
      steps_are="steps of the teacher",
      arrivals=left_out.of_step,
      planned=lambda: {
        "task": "distillation",
        "dataset": config.data.name,
        "method": name_of(config, "method"),
        "noise_multiplier": plan.noise_multiplier,
        "batch_size": config.batch_size,
        "l2_clip_norm": config.l2_clip_norm,
        "teacher_hidden": config.teacher_hidden,
        "student_hidden": config.student_hidden,
      },
      # The last row belongs to the last step, so it holds the final accuracy.
      describe=lambda state, facts, rows: {
        "teacher_accuracy": rows[-1]["test_teacher_accuracy"]
      },
    )
