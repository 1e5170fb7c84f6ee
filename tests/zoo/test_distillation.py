"""A student of released numbers costs nothing; a student of private examples is in the clip."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import Batch
from dpjax.zoo import recipes
from tests import plans
from tests.refuses import refuses

_X = jnp.array([[0.5, 1.0], [-1.0, 0.25], [2.0, -0.5]])
_MASK = jnp.array([True, True, False])
_BATCH = Batch(_X, _MASK)
_TEACHER = jnp.array([0.1, -0.2])
_STUDENT = jnp.array([0.3, 0.4])
_PUBLIC = jnp.array([[1.0, 0.0], [0.0, 2.0]])


def _teacher_loss(teacher, x):
  return jnp.sum((teacher - x) ** 2)


def _student_loss(student, teacher, rows):
  return jnp.mean((rows @ student - rows @ teacher) ** 2)


def _inputs(public, teacher, key):
  return public + jax.random.normal(key, public.shape)


def _both(plan, **changes):
  settings = {
    "inputs": _inputs,
    "public": _PUBLIC,
    "teacher_tx": optax.sgd(0.5),
    "student_tx": optax.sgd(0.25),
    "noise_key": jax.random.key(0),
    "public_key": jax.random.key(1),
    **changes,
  }
  student_loss = settings.pop("student_loss", _student_loss)
  return recipes.distillation(_teacher_loss, student_loss, plan, **settings)


@pytest.mark.slow
def test_two_steps_are_those_of_a_loop_over_single_examples():
  both = _both(plans.of_three())
  state = both.init(_TEACHER, _STUDENT)
  teacher = np.asarray(_TEACHER, np.float64)
  student = np.asarray(_STUDENT, np.float64)
  step = jax.jit(both.step)
  for count in range(3):
    if count < 2:
      state, _ = step(state, _BATCH)
      total = np.zeros(2)
      for x, counts in zip(np.asarray(_X, np.float64), _MASK):
        gradient = 2 * (teacher - x)
        total += counts * gradient / max(1.0, np.linalg.norm(gradient))
      teacher = teacher - 0.5 * total / 2
    else:
      # The student alone.
      state = both.student_step(state)
    key = jax.random.fold_in(jax.random.key(1), count)
    rows = np.asarray(_inputs(_PUBLIC, None, key), np.float64)
    student = student - 0.25 * rows.T @ (rows @ (student - teacher))
    np.testing.assert_allclose(state.teacher.params, teacher, rtol=1e-5)
    np.testing.assert_allclose(state.student, student, rtol=1e-5)


@pytest.mark.slow
def test_the_student_is_a_function_of_released_teachers_and_costs_nothing():
  """Other records with the same teacher leave the same student, bit for bit."""
  plan = plans.of_three(noise_multiplier=1.0)
  both = _both(plan)
  step = jax.jit(both.step)
  alone = jax.jit(both.student_step)
  state = both.init(_TEACHER, _STUDENT)
  for batch in (_BATCH, Batch(-3 * _X, ~_MASK)):
    after, _ = step(state, batch)
    seen = alone(state._replace(teacher=after.teacher)).student
    np.testing.assert_allclose(after.student, seen, rtol=1e-6)
  spent = plan.spent(after.teacher).epsilon
  for _ in range(5):
    after = alone(after)
  assert int(after.student_step) == 6
  assert plan.spent(after.teacher).epsilon == spent == plan.epsilon(steps=1)
  for _ in range(4):
    after, _ = step(after, _BATCH)
  # Beyond the plan there is neither a teacher nor a student.
  assert np.isnan(after.student).all()


@jax.custom_vjp
def _hides(x):
  return x


_hides.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.sum(_X),))


def _of_private_rows(student, teacher, rows):
  return _student_loss(student, teacher, _X)


def _calls_back(student, teacher, rows):
  shape = jax.ShapeDtypeStruct(_X.shape, _X.dtype)
  return _student_loss(student, teacher, jax.pure_callback(lambda: np.asarray(_X), shape))


_READS_X = optax.stateless(lambda updates, params: updates + _X[0])


@pytest.mark.parametrize(
  "changes",
  [
    {"student_loss": _of_private_rows},
    {"student_loss": jax.jit(_of_private_rows)},
    {"inputs": lambda public, teacher, key: _X},
    {"inputs": lambda public, teacher, key: np.asarray(_X)},
    {"student_loss": lambda s, t, rows: _student_loss(_hides(s), t, rows)},
    {"student_tx": _READS_X},
    {"student_loss": _calls_back},
  ],
)
def test_a_student_that_reads_what_is_not_declared_is_refused(changes):
  both = _both(plans.of_three(), **changes)
  with refuses("student_loss") as caught:
    both.init(_TEACHER, _STUDENT)
  assert "\n" not in str(caught.value)


def test_what_is_not_proved_is_refused():
  with refuses("plan.slices", value=2):
    _both(plans.of_three(slices=2))
  with refuses("public_key"):
    _both(plans.of_three(), public_key=3)


# --- both read private examples


def _student_of_private(student, teacher, x):
  return jnp.sum((student - x) ** 2) + 0.5 * jnp.sum((student - teacher) ** 2)


def _joint(plan):
  return recipes.joint_distillation(
    _teacher_loss,
    _student_of_private,
    plan,
    teacher_tx=optax.sgd(0.5),
    student_tx=optax.sgd(0.25),
    noise_key=jax.random.key(0),
  )


def test_both_gradients_are_clipped_as_one_vector_and_charged_once():
  plan = plans.of_three()
  init, step = _joint(plan)
  step = jax.jit(step)
  before = init({"teacher": _TEACHER, "student": _STUDENT})
  state, _ = step(before, _BATCH)
  teacher = np.asarray(_TEACHER, np.float64)
  student = np.asarray(_STUDENT, np.float64)
  total = np.zeros(4)
  for x, counts in zip(np.asarray(_X, np.float64), _MASK):
    # The teacher gets nothing from the student's loss.
    gradient = [2 * (teacher - x), 2 * (student - x) + (student - teacher)]
    gradient = np.concatenate(gradient)
    total += counts * gradient / max(1.0, np.linalg.norm(gradient))
  np.testing.assert_allclose(
    state.params["teacher"], teacher - 0.5 * total[:2] / 2, rtol=1e-5
  )
  np.testing.assert_allclose(
    state.params["student"], student - 0.25 * total[2:] / 2, rtol=1e-5
  )
  assert plan.spent(state).epsilon == plan.epsilon(steps=1)

  # The attack: one record, as far away as it gets, moves both networks together by C at most.
  for far in (1e6, -1e18, np.inf, np.nan):
    neighbour = Batch(_X.at[2].set(far), jnp.ones(3, bool))
    other, _ = step(before, neighbour)
    moved = [
      2 * (other.params[name] - state.params[name]) / rate
      for name, rate in (("teacher", 0.5), ("student", 0.25))
    ]
    assert np.linalg.norm(np.concatenate(moved)) <= 1.0 + 1e-5


def test_networks_of_other_names_are_refused():
  init, _ = _joint(plans.of_three())
  for params in ({"teacher": _TEACHER}, _TEACHER):
    with refuses("params"):
      init(params)
