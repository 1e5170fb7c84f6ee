"""Eight changes of a state, for every mechanism, in every program: refused, and NaN for good."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import transforms
from dpjax.noise import NoiseShape, source
from dpjax.noise.correlated import BandedToeplitz
from dpjax.transforms import accumulation, guard
from dpjax.validate import UserError
from tests.core import test_plan_spent
from tests.refuses import refuses

_PARAMS = test_plan_spent._PARAMS
_ROWS = dpjax.wrap_grads(
  jax.tree.map(lambda p: jnp.stack([p] * 8), _PARAMS), mask=jnp.arange(8) < 7
)
_KINDS = {
  "white": "white",
  "correlated": "correlated",
  "adaptive": "adaptive",
  "sliced": "slices",
  "scaled": "scaled coordinates",
}


def _plan(kind, **changes):
  plan = test_plan_spent._PLANS[_KINDS[kind]]
  return dataclasses.replace(plan, num_steps=12, **changes)


def _tx(kind, key, **changes):
  plan = _plan(kind, **changes)
  return plan.accumulated(optax.chain(plan.transform(key), optax.sgd(0.1)), rows=8)


def _step(kind, state):
  return _tx(kind, jax.random.key(1)).update(_ROWS, state, _PARAMS)


@functools.cache
def _states(kind, **changes):
  """(the state after one step, that after two)."""
  tx = _tx(kind, jax.random.key(1), **changes)
  update = jax.jit(lambda state: tx.update(_ROWS, state, _PARAMS)[1])
  state, kept = tx.init(_PARAMS), []
  for _ in range(2):
    for _ in range(_plan(kind).slices):
      state = update(state)
    kept.append(state)
  return tuple(kept)


def _on_private(change):
  """`change` on the state of the mechanism, wherever it stands."""

  def changed(state, earlier, other):
    ((where, private),) = _found(state)
    return where(private._replace(inner=change(private.inner)))

  return changed


def _found(state):
  """The private state, and the function that puts another in its place."""
  if guard.is_guarded(state):
    chain = state.inner.inner
    put = lambda new: state._replace(inner=state.inner._replace(inner=(new, *chain[1:])))
    yield put, chain[0]
  else:
    yield lambda new: (new, *state[1:]), state[0]


def _with_noise(**fields):
  def change(inner):
    if hasattr(inner, "draws"):
      return inner._replace(**fields)
    return inner._replace(inner=inner.inner._replace(**fields))

  return _on_private(change)


def _cast(leaf):
  if jnp.issubdtype(leaf.dtype, jnp.floating):
    return (leaf * 1.01).astype(jnp.bfloat16).astype(leaf.dtype)
  return leaf.astype(jnp.uint16).astype(leaf.dtype)


def _mixed(state, earlier, other):
  """The mechanism's state of an earlier step under the checksum of a later one."""
  ((put, private),) = _found(state)
  ((_, before),) = _found(earlier)
  return put(private._replace(inner=before.inner))


_CHANGES = {
  "count set to 0": _with_noise(draws=jnp.int32(0)),
  "optax.tree.set": lambda state, *_: optax.tree.set(state, draws=jnp.int32(0)),
  "zeros": lambda state, *_: jax.tree.map(jnp.zeros_like, state),
  "another key": _with_noise(key=source.to_words(jax.random.key(9))),
  "one number": _on_private(
    lambda inner: jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), inner)
  ),
  "cast": lambda state, *_: jax.tree.map(_cast, state),
  "mixed": _mixed,
  "of another plan": lambda state, earlier, other: other,
}


def _run(kind, program, state):
  """The updates of two steps from this state on, [calls, numbers]."""
  calls = 2 * _plan(kind).slices
  update = functools.partial(_compiled, kind)(program)
  if program == "scan":
    return np.asarray(update(state))
  released = []
  for _ in range(calls):
    updates, state = update(state)
    released.append(np.asarray(updates["w"]).ravel())
  return np.array(released)


@functools.cache
def _compiled(kind, program):
  step = lambda state: _step(kind, state)
  if program == "jit":
    return jax.jit(step)
  if program == "vmap":
    return jax.jit(jax.vmap(step))

  def turn(state, _):
    updates, state = step(state)
    return state, updates["w"].ravel()

  calls = 2 * _plan(kind).slices
  return jax.jit(lambda state: jax.lax.scan(turn, state, None, length=calls)[1])


def _models(kind, **changes):
  """States of two models, with keys of their own."""
  begin = lambda key: _tx(kind, key, **changes).init(_PARAMS)
  return jax.vmap(begin)(jax.random.split(jax.random.key(5), 2))


def _cases(kind, program):
  """(name, changed state) for one state, or for two models under vmap."""
  if program != "vmap":
    earlier, state = _states(kind)
    other = _states(kind, noise_multiplier=1.0)[1]
  else:
    earlier = _models(kind)
    state = earlier
    for _ in range(_plan(kind).slices):
      state = _compiled(kind, "vmap")(state)[1]
    other = _models(kind, noise_multiplier=1.0)
  yield "nothing", state
  for name, change in _CHANGES.items():
    changed = change(state, earlier, other)
    like = lambda new, old: jnp.broadcast_to(new, jnp.shape(old)).astype(old.dtype)
    yield name, jax.tree.map(like, changed, state)


_ALL = [(kind, program) for kind in _KINDS for program in ("jit", "vmap", "scan")]
_QUICK = [("white", "jit"), ("scaled", "scan"), ("correlated", "vmap"), ("sliced", "jit")]


@pytest.mark.cases(slow=["sliced-jit", "scaled-scan", "correlated-vmap"])
@pytest.mark.parametrize(
  ("kind", "program"),
  [pytest.param(*case, marks=() if case in _QUICK else pytest.mark.slow) for case in _ALL],
)
def test_a_changed_state_is_nan_for_good_in_every_program(kind, program):
  for name, state in _cases(kind, program):
    released = _run(kind, program, state)
    if name == "nothing":
      assert np.isfinite(released).all()
      continue
    # Before the last slice of a step nothing is released.
    assert np.isnan(released[released != 0]).all(), name
    assert np.isnan(released[-1]).all(), name


@pytest.mark.parametrize(
  "kind", ["white", *[pytest.param(k, marks=pytest.mark.slow) for k in list(_KINDS)[1:]]]
)
def test_a_changed_state_raises_where_it_can_be_looked_at(kind):
  for name, state in _cases(kind, "eager"):
    if name == "nothing":
      _step(kind, state)
      continue
    with pytest.raises(UserError):
      _step(kind, state)


def _unguarded(mechanism, **_):
  """`with_guard` that looks at nothing."""
  guarded = _GUARD(mechanism, **_)

  def update(updates, state, params=None, **options):
    right = guard.exchange(state, lambda inner: inner)
    seen = guard.digest(state.inner)
    right = state._replace(checksum=seen ^ jnp.uint32(_.get("mark", 0)))
    return guarded.update(updates, right, params, **options)

  return optax.GradientTransformationExtraArgs(guarded.init, update)


_GUARD = guard.with_guard


@pytest.mark.parametrize(
  "kind", ["white", *[pytest.param(k, marks=pytest.mark.slow) for k in list(_KINDS)[1:]]]
)
def test_without_the_guard_nothing_is_seen(kind, monkeypatch):
  """Else the tests above would show nothing."""
  cases = dict(_cases(kind, "jit"))
  for module in (guard, accumulation):
    monkeypatch.setattr(module, "with_guard", _unguarded)
  update = jax.jit(lambda state: _tx(kind, jax.random.key(1)).update(_ROWS, state, _PARAMS))
  for name in ("count set to 0", "another key", "mixed", "of another plan"):
    state = cases[name]
    for _ in range(_plan(kind).slices):
      updates, state = update(state)
    assert np.isfinite(updates["w"]).all(), name


def test_the_sum_of_a_step_belongs_to_its_noise():
  """A sum of the first step before the noise of the second: an example could count twice."""
  tx = _tx("sliced", jax.random.key(1))
  update = jax.jit(lambda state: tx.update(_ROWS, state, _PARAMS)[1])
  states = [tx.init(_PARAMS)]
  for _ in range(3):
    states.append(update(states[-1]))
  first, later = states[1].inner, states[3].inner
  assert int(first.slices) == int(later.slices) == 1
  mixed = states[1]._replace(inner=first._replace(inner=later.inner))
  with refuses("state.slices", value=1):
    tx.update(_ROWS, mixed, _PARAMS)


@pytest.mark.parametrize("kind", ["white", "correlated", "adaptive"])
def test_a_state_of_other_types_is_refused_although_its_numbers_are_the_same(kind):
  """Earlier noise in half precision would be rounded from then on."""
  state = _tx(kind, jax.random.key(1)).init(_PARAMS)

  def narrow(leaf):
    return leaf.astype(jnp.bfloat16 if leaf.dtype == jnp.float32 else jnp.int16)

  ((put, private),) = _found(state)
  fields = {"white": "draws", "correlated": "memory", "adaptive": "scale"}
  cast = jax.tree.map(narrow, getattr(private.inner, fields[kind]))
  changed = put(private._replace(inner=private.inner._replace(**{fields[kind]: cast})))
  with refuses("state.draws"):
    _step(kind, changed)


def test_states_of_two_programs_take_turns():
  """A state is one run's: two runs with two keys never accept each other's parts."""
  shape = NoiseShape(correlation=BandedToeplitz((1.0, 0.5)))
  make = functools.partial(
    transforms.clip_and_correlated_noise,
    l2_clip_norm=1.0, noise_multiplier=1.0, normalize_by=4.0, noise_shape=shape, num_steps=9,
  )  # fmt: skip
  first, second = (make(key=jax.random.key(seed)) for seed in (1, 2))
  a, b = first.init(_PARAMS), second.init(_PARAMS)
  _, a = first.update(_ROWS, a, _PARAMS)
  _, b = second.update(_ROWS, b, _PARAMS)
  mixed = a._replace(inner=a.inner._replace(memory=b.inner.memory))
  with pytest.raises(UserError):
    first.update(_ROWS, mixed, _PARAMS)


@pytest.mark.parametrize(
  ("wrapped", "field"),
  [(jax.jit, "state"), (lambda fn: fn, "state.draws")],
  ids=["jit", "eager"],
)
def test_the_state_of_another_transform_is_one_line_also_where_it_is_traced(wrapped, field):
  white = _tx("white", jax.random.key(1)).init(_PARAMS)
  for kind in ("correlated", "adaptive", "scaled"):
    with refuses(field):
      wrapped(functools.partial(_step, kind))(white)


@pytest.mark.parametrize("wrapped", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
def test_a_state_of_other_shapes_is_one_line(wrapped):
  """A plan, or a model, was changed and run again, and not the cell of the state. Slices ended in
  an AttributeError, other bands under jit in a TypeError of `dot_general`."""
  private = _tx("white", jax.random.key(1))
  sliced = transforms.accumulate(private, every=2, l2_clip_norm=1.0)
  with pytest.raises(UserError):
    wrapped(lambda state: sliced.update(_ROWS, state, _PARAMS))(private.init(_PARAMS))
  make = lambda *bands: transforms.clip_and_correlated_noise(
    l2_clip_norm=1.0, noise_multiplier=1.0, normalize_by=4.0, key=jax.random.key(1), num_steps=9,
    noise_shape=NoiseShape(correlation=BandedToeplitz(bands)),
  )  # fmt: skip
  tx = make(1.0, 0.5)
  narrower = jax.tree.map(lambda leaf: leaf[:1], _PARAMS)
  for state in (make(1.0, 0.5, 0.2).init(_PARAMS), tx.init(narrower)):
    with pytest.raises(UserError):
      wrapped(lambda state: tx.update(_ROWS, state, _PARAMS))(state)
