"""A teacher and a student under one privacy budget.

| what the student reads                   | function             | what is accounted        |
| ---------------------------------------- | -------------------- | ------------------------ |
| the teacher, public rows, random numbers | `distillation`       | the teacher's steps      |
| private examples, and the teacher        | `joint_distillation` | each step, once for both |

In `distillation` the student is post-processing: it may take any number of steps. In
`joint_distillation` one gradient holds the parts of both networks. It is clipped and gets noise as
a whole, so one event covers both.

Source: Hinton, Vinyals and Dean 2015 (arXiv:1503.02531) for distillation. The joint gradient is
clipped, and gets noise, as in DP-SGD (Abadi et al. 2016).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import jaxprs, trees
from dpjax.noise.gaussian import is_key_of_noise
from dpjax.plan import Plan
from dpjax.training.dp_sgd import StepInfo, TrainState, dp_sgd
from dpjax.types import Algorithm, Array, ArrayTree, Batch, LossFn, Params
from dpjax.validate import UserError


class DistillationState(NamedTuple):
  """State of both networks; `plan.spent(state.teacher)` gives the privacy cost so far."""

  teacher: TrainState
  student: Params
  student_opt_state: optax.OptState
  student_step: Array  # int32, updates of the student


class Distillation(NamedTuple):
  """The three functions of `distillation`.

  `init(teacher, student)` makes the state. `step(state, batch)` updates both networks, and
  `student_step(state)` the student alone.
  """

  init: Callable[[Params, Params], DistillationState]
  step: Callable[[DistillationState, Batch], tuple[DistillationState, StepInfo]]
  student_step: Callable[[DistillationState], DistillationState]


def distillation(
  teacher_loss: LossFn,
  student_loss: Callable[[Params, Params, Any], Array],
  plan: Plan,
  *,
  inputs: Callable[[Any, Params, Array], Any],
  public: ArrayTree = None,
  teacher_tx: optax.GradientTransformation,
  student_tx: optax.GradientTransformation,
  noise_key: Array,
  public_key: Array,
  method: str = "auto",
  microbatch_size: int | None = None,
) -> Distillation:
  """Trains a private teacher, and a student on the teacher's outputs.

  Args:
    teacher_loss: `(teacher, example) -> scalar` for ONE private example.
    student_loss: `(student, teacher, inputs) -> scalar` for a batch of inputs.
    plan: clip norm, noise and divisor of the teacher's gradients; also yields the batches.
    inputs: `(public, teacher, key) -> inputs` of one update of the student: rows of `public`, or
      synthetic ones.
    public: arrays that you declare to be public: anybody may know them, and they hold no record
      that the epsilon protects. Nothing can check this. None if `inputs` needs no arrays.
    teacher_tx, student_tx: optimizers.
    noise_key: typed key of the noise, for ONE run: `dpjax.new_key()`.
    public_key: typed key of everything else that is random. It may be known, so it must not follow
      from `noise_key`.
    method, microbatch_size: see `dpjax.clipped_grad`.

  Returns:
    Three functions, to be jitted by the caller. `step` moves the teacher, then the student.
    `student_step` moves the student alone, at no cost. `StepInfo` is the teacher's; it is not
    private.

  Guarantee: the sequence of all parameters of BOTH networks is (plan.epsilon(), plan.delta)-DP for
  one example, for any number of student steps. The student's functions see the teacher's noisy
  parameters, `public` and random numbers. An array that they close over is refused, because it
  could be private data. Single numbers are not refused: you must account for those that you compute
  from private data.

  Raises:
    UserError: a plan with slices; a public key that follows from the noise key. At `init` and each
      step: a student that reads an array which is not declared, or calls back into Python.

  >>> from dpjax.sampling import PoissonSampler
  >>> plan = Plan(sampler=PoissonSampler(sampling_prob=0.5, capacity=4), noise_multiplier=0.0,
  ...   l2_clip_norm=1.0, normalize_by=2, num_steps=1, delta=1e-5)
  >>> both = distillation(
  ...   lambda teacher, x: 0.5 * (teacher - x) ** 2,
  ...   lambda student, teacher, x: jnp.mean((student * x - teacher * x) ** 2),
  ...   plan,
  ...   inputs=lambda public, teacher, key: public,
  ...   public=jnp.ones(3),
  ...   teacher_tx=optax.sgd(1.0),
  ...   student_tx=optax.sgd(0.25),
  ...   noise_key=jax.random.key(0),
  ...   public_key=jax.random.key(1),
  ... )
  >>> state = both.init(jnp.zeros(()), jnp.zeros(()))
  >>> state, _ = both.step(state, Batch(jnp.array([2.0, 0.5]), jnp.array([True, True])))
  >>> print(state.teacher.params, state.student, both.student_step(state).student)
  0.75 0.375 0.5625
  """
  if plan.slices != 1:
    raise UserError(
      "must be 1: the student moves between steps, not within one",
      field="plan.slices",
      value=plan.slices,
    )
  init_teacher, teacher_step = dp_sgd(
    teacher_loss,
    plan,
    teacher_tx,
    noise_key=noise_key,
    method=method,
    microbatch_size=microbatch_size,
  )
  check_public_key(public_key, noise_key, plan.num_steps)
  check = functools.partial(
    check_declared,
    field="student_loss",
    remedy="pass it as `public`, or use joint_distillation for a student of private examples",
  )

  def loss_of(student: Params, teacher: Params, key: Array, rows: ArrayTree) -> Array:
    return student_loss(student, teacher, inputs(rows, teacher, key))

  def update(
    student: Params, opt_state: Any, count: Array, teacher: Params, rows: ArrayTree
  ) -> tuple[Params, Any]:
    key = jax.random.fold_in(public_key, count)
    gradient = jax.grad(loss_of)(student, teacher, key, rows)
    updates, opt_state = student_tx.update(gradient, opt_state, student)
    return optax.apply_updates(student, updates), opt_state

  def init(teacher: Params, student: Params) -> DistillationState:
    # The parameters are copied, so that donation does not delete the caller's arrays.
    student = jax.tree.map(jnp.copy, student)
    # The optimizer's first state reaches the student, so it must not hold private data.
    check(student_tx.init, student)
    opt_state = student_tx.init(student)
    count = jnp.zeros((), jnp.int32)
    # The whole update is checked: a derivative or an optimizer may read arrays that the loss does
    # not.
    check(update, student, opt_state, count, teacher, public)
    return DistillationState(init_teacher(teacher), student, opt_state, count)

  def student_step(state: DistillationState) -> DistillationState:
    read = (
      state.student,
      state.student_opt_state,
      state.student_step,
      state.teacher.params,
      public,
    )
    # A second check: a restored state has not passed `init`, and closures may have changed.
    check(update, *read)
    student, opt_state = update(*read)
    return state._replace(
      student=student,
      student_opt_state=opt_state,
      student_step=state.student_step + 1,
    )

  def step(state: DistillationState, batch: Batch) -> tuple[DistillationState, StepInfo]:
    teacher, info = teacher_step(state.teacher, batch)
    # Neither the batch nor its mask, whose sum is a secret, reaches the student.
    return student_step(state._replace(teacher=teacher)), info

  return Distillation(init, step, student_step)


def joint_distillation(
  teacher_loss: LossFn,
  student_loss: Callable[[Params, Params, Any], Array],
  plan: Plan,
  *,
  teacher_tx: optax.GradientTransformation,
  student_tx: optax.GradientTransformation,
  noise_key: Array,
  method: str = "auto",
  microbatch_size: int | None = None,
) -> Algorithm:
  """Trains a teacher and a student that BOTH read private examples.

  Args:
    teacher_loss: `(teacher, example) -> scalar` for ONE private example.
    student_loss: `(student, teacher, example) -> scalar` for ONE private example. The teacher
      gets no gradient from it.
    plan: plan whose clip norm bounds the gradient of both networks together.
    teacher_tx, student_tx: optimizers.
    noise_key: typed key of the noise, for ONE run: `dpjax.new_key()`.
    method, microbatch_size: see `dpjax.clipped_grad`.

  Returns:
    `init` and `step` of `dp_sgd`, whose parameters are `{"teacher": ..., "student": ...}`.

  Guarantee: the sequence of all parameters of both networks is (plan.epsilon(), plan.delta)-DP for
  one example. One vector holds both gradients, its norm is clipped, and its noise is drawn once:
  each step is one event, and `plan.spent(state)` counts it.

  Raises:
    UserError: as `dp_sgd` does. At `init`: parameters that are no dict of exactly these entries.

  >>> from dpjax.sampling import PoissonSampler
  >>> plan = Plan(sampler=PoissonSampler(sampling_prob=0.5, capacity=4), noise_multiplier=0.0,
  ...   l2_clip_norm=1.0, normalize_by=2, num_steps=1, delta=1e-5)
  >>> init, step = joint_distillation(
  ...   lambda teacher, x: -0.6 * teacher,
  ...   lambda student, teacher, x: -0.8 * student,
  ...   plan,
  ...   teacher_tx=optax.sgd(1.0),
  ...   student_tx=optax.sgd(10.0),
  ...   noise_key=jax.random.key(0),
  ... )
  >>> state = init({"teacher": jnp.zeros(()), "student": jnp.zeros(())})
  >>> state, _ = step(state, Batch(jnp.ones(2), jnp.array([True, False])))
  >>> {name: round(float(value), 3) for name, value in state.params.items()}
  {'student': 4.0, 'teacher': 0.3}
  """

  def loss_fn(params: Params, example: Any) -> Array:
    # The student's loss must not pull the teacher towards the student.
    fixed = jax.lax.stop_gradient(params["teacher"])
    of_teacher = teacher_loss(params["teacher"], example)
    return of_teacher + student_loss(params["student"], fixed, example)

  # The top-level name alone chooses the optimizer, whatever a network's parameters look like.
  by_network = optax.partition(
    {"teacher": teacher_tx, "student": student_tx},
    {"teacher": "teacher", "student": "student"},
  )
  init_both, step = dp_sgd(
    loss_fn,
    plan,
    by_network,
    noise_key=noise_key,
    method=method,
    microbatch_size=microbatch_size,
  )

  def init(params: Params) -> TrainState:
    if not isinstance(params, dict) or {*params} != {"teacher", "student"}:
      raise UserError('must be {"teacher": ..., "student": ...}', field="params")
    return init_both(params)

  return Algorithm(init, step)


def check_public_key(public_key: Array, noise_key: Array, num_steps: int) -> None:
  """Raises UserError if a key that may be known is the noise key, or the key of a draw of noise."""
  trees.check_key(public_key=public_key)
  if is_key_of_noise(public_key, noise_key, num_draws=num_steps):
    raise UserError(
      "must not follow from noise_key: whoever knows it would know the noise",
      field="public_key",
    )


def check_declared(
  update: Callable[..., Any], *arguments: Any, field: str, remedy: str
) -> None:
  """Raises UserError if an update could read private data: it reads an array that is no argument,
  or calls back into Python.

  Args:
    update: the function; it is traced, not run.
    arguments: values that it may read.
    field: name of the user's argument that the error names.
    remedy: advice for an array that is public.
  """
  # A new function is traced: JAX caches traces by function, and closures may have changed.
  jaxpr = jax.make_jaxpr(lambda *each: update(*each))(*arguments)
  for constant in jaxprs.closed_over(jaxpr):
    raise UserError(
      f"reads an array of shape {np.shape(constant)} that is not declared, and may be private: "
      f"{remedy}",
      field=field,
    )
  for name in jaxprs.primitives(jaxpr):
    # A callback may read anything, and the program does not show what.
    if "callback" in name:
      raise UserError(
        f"calls back into Python ({name}), which may read private data", field=field
      )
