"""A private state that something else has changed raises, or gives NaN for good."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import dpjax
from dpjax import noise, trees
from dpjax.noise import gaussian, source
from dpjax.noise.correlated import strategies, toeplitz
from dpjax.noise.correlated.draw import CorrelatedNoiseState
from dpjax.noise.gaussian import NoiseState, state_at
from dpjax.transforms import accumulation, guard
from dpjax.transforms.clip_scale import ScaledState
from dpjax.transforms.scale_then_privatize import ScalingState
from dpjax.validate import UserError
from tests.core import test_plan_spent
from tests.refuses import refuses

_PARAMS = test_plan_spent._PARAMS
_NAMES = ("white", "correlated", "clip schedule", "adaptive", "slices", "release")
_NAMES += ("scaled coordinates",)


@functools.cache
def _after(name, calls=1):
  """(plan, its update by one call, the state after so many calls), from the second step on."""
  plan = test_plan_spent._PLANS[name]
  key = dpjax.new_key(release=True) if name == "release" else jax.random.key(1)
  tx = plan.accumulated(optax.chain(plan.transform(key), optax.adam(0.1)), rows=8)
  summed = test_plan_spent.summed_of(plan)
  update = jax.jit(lambda opt_state: tx.update(summed, opt_state, _PARAMS))
  opt_state = tx.init(_PARAMS)
  for _ in range(calls):
    opt_state = update(opt_state)[1]
  return plan, tx, update, opt_state


def _numbers(change):
  """`change` on every leaf that is no key."""
  return lambda leaf: leaf if trees.is_key(leaf) else change(leaf).astype(leaf.dtype)


_CHANGES = {
  "draws=0": lambda s: optax.tree.set(s, draws=0),
  "draws=-1": lambda s: optax.tree.set(s, draws=jnp.int32(-1)),
  "draws=2": lambda s: optax.tree.set(s, draws=jnp.int32(2)),
  "checksum=0": lambda s: optax.tree.set(s, checksum=jnp.uint32(0)),
  "another key": lambda s: optax.tree.set(s, key=source.to_words(jax.random.key(7))),
  "zeros": lambda s: jax.tree.map(jnp.zeros_like, s),
  "ones": lambda s: jax.tree.map(jnp.ones_like, s),
  "zeros but the key": lambda s: jax.tree.map(_numbers(jnp.zeros_like), s),
  "doubled": lambda s: jax.tree.map(_numbers(lambda leaf: 2 * leaf), s),
  "integers set to zero": lambda s: jax.tree.map(
    lambda x: 0 * x if x.dtype == jnp.int32 else x, s
  ),
}


@pytest.mark.cases(slow=[50, 61, 64, "scaled coordinates-doubled"], long=[0, 60])
@pytest.mark.parametrize("change", sorted(_CHANGES))
@pytest.mark.parametrize("name", _NAMES)
def test_a_changed_state_is_refused_by_spent_and_gives_nan_for_good(name, change):
  plan, _, update, opt_state = _after(name, 2 if name == "slices" else 1)
  changed = _CHANGES[change](opt_state)
  if (name, change) != (
    "slices",
    "checksum=0",
  ):  # `optax.tree.set` takes the outermost alone
    with refuses("opt_state" if change == "draws=-1" else "state.draws") as caught:
      plan.spent(changed)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)
  released = []
  # Whoever leaves out what is NaN goes on with the state, which must not have healed.
  for _ in range(2 * plan.slices):
    updates, changed = update(changed)
    released.append(sum(jnp.sum(abs(leaf)) for leaf in jax.tree.leaves(updates)))
  assert all(np.isnan(value) or value == 0 for value in released), released
  assert np.isnan(released[plan.slices - 1]) and np.isnan(released[-1])


@pytest.mark.cases(long=["0"])
@pytest.mark.parametrize("slices", [0, -1, 1])
def test_slices_of_two_steps_never_add_up(slices):
  """A count that is set back in the middle of a step would hold an example twice."""
  _, tx, update, opt_state = _after("slices", 3 if slices != 1 else 2)
  changed = optax.tree.set(opt_state, slices=jnp.int32(slices))
  with refuses("state.slices"):
    tx.update(dpjax.wrap_grads(_PARAMS), changed, _PARAMS)
  for _ in range(4):
    updates, changed = update(changed)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(updates))


_ON_ARRAYS = {
  "negated": lambda x: -x,
  "halved": lambda x: x / 2,
  "absolute": abs,
  "zero": jnp.zeros_like,
  "ones": jnp.ones_like,
  "reversed": jnp.flip,
  "rolled": lambda x: jnp.roll(x, 1),
  "cut": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
  "clipped": lambda x: jnp.clip(x, -0.5, 0.5),
  "mean": lambda x: jnp.full_like(x, x.mean()),
  "sorted": lambda x: jnp.sort(x, -1) if x.ndim else x,
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (2,), (4,), (128,), (256, 1), (1, 256), (8, 8)])
def test_no_usual_change_of_an_array_keeps_its_digest(shape):
  """A digest that is linear in the bits lets an even number of signs pass."""
  digest = jax.jit(guard.digest)
  for seed in range(8):
    drawn = jax.random.normal(jax.random.key(seed), shape)
    for x in (drawn, jnp.ones(shape), jnp.round(4 * drawn) / 4):
      for how, change in _ON_ARRAYS.items():
        other = change(x)
        if not np.array_equal(other, x):
          assert digest(other) != digest(x), how


_ON_A_LEAF = {
  "set": lambda v: v + jnp.ones((), v.dtype),
  "one entry": lambda v: v.at[(0,) * v.ndim].add(jnp.ones((), v.dtype)),
  "halved": lambda v: (v / 2).astype(v.dtype),
  "negated": lambda v: -v,
  "reversed": lambda v: jnp.flip(v),
  "zero": jnp.zeros_like,
}


def _private_leaves(opt_state):
  """(its path, leaf) of all that a private transform keeps; the rest is the optimizer's."""
  leaves = jax.tree_util.tree_leaves_with_path(opt_state)
  for path, leaf in leaves:
    text = jax.tree_util.keystr(path)
    if not text.startswith(("[1]", ".inner.inner[1]")):
      yield text, leaf


def _with_leaf(opt_state, text, leaf):
  put = lambda path, old: leaf if jax.tree_util.keystr(path) == text else old
  return jax.tree_util.tree_map_with_path(put, opt_state)


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_every_leaf_of_every_state_is_guarded(name):
  """A leaf that is new in a state is changed here, too."""
  plan, tx, update, opt_state = _after(name, 3 if name == "slices" else 2)
  # As many rows as a slice has: fewer would be refused whatever the state.
  rows = jax.tree.map(lambda p: jnp.stack([p] * 8), _PARAMS)
  stacked = dpjax.wrap_grads(rows, mask=True)
  changed_leaves = set()
  tx.update(stacked, opt_state, _PARAMS)
  for text, leaf in _private_leaves(opt_state):
    for how, change in _ON_A_LEAF.items():
      if trees.is_key(leaf):
        new = jax.random.clone(jax.random.fold_in(leaf, 1)) if how == "set" else leaf
      else:
        new = change(jnp.asarray(leaf))
      same = new is leaf or (not trees.is_key(leaf) and np.array_equal(new, leaf))
      if same:
        continue
      changed_leaves.add(text)
      changed = _with_leaf(opt_state, text, new)
      with pytest.raises(UserError):
        tx.update(stacked, changed, _PARAMS)
      # Before the last slice of a step nothing is released, and the update is 0.
      released = []
      for _ in range(2 * plan.slices):
        updates, changed = update(changed)
        released.append(sum(jnp.sum(abs(x)) for x in jax.tree.leaves(updates)))
      assert all(np.isnan(value) or value == 0 for value in released), (text, how)
      assert np.isnan(released[-plan.slices :]).any(), (text, how)
  assert changed_leaves == {text for text, _ in _private_leaves(opt_state)}


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_a_state_that_nobody_changed_goes_on_in_every_program(name):
  """XLA may round a number anew where it is used, so the guard must see the number that is kept."""
  plan, tx, update, opt_state = _after(name, 2)
  summed = test_plan_spent.summed_of(plan)
  step = lambda s: tx.update(summed, s, _PARAMS)
  copies = [pickle.loads(pickle.dumps(opt_state)), copy.deepcopy(opt_state)]
  programs = {
    "jit": lambda: update(opt_state)[0],
    "eager": lambda: step(opt_state)[0],
    "scan": lambda: jax.jit(
      lambda s: jax.lax.scan(lambda s, _: step(s)[::-1], s, None, length=plan.slices)
    )(opt_state)[1],
    "donated": lambda: jax.jit(step, donate_argnums=0)(jax.tree.map(jnp.copy, opt_state))[
      0
    ],
    "copies": lambda: [update(each)[0] for each in copies],
    "aot": lambda: jax.jit(step).lower(opt_state).compile()(opt_state)[0],
  }
  for program, run in programs.items():
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(run())), program
  if name == "release":
    return
  # Models under vmap need keys of their own.
  begin = lambda key: optax.chain(
    test_plan_spent._PLANS[name].transform(key), optax.adam(0.1)
  ).init(_PARAMS)
  if plan.slices == 1:
    keys = jax.random.split(jax.random.key(5), 2)
    models = jax.vmap(begin)(keys)
    advance = jax.jit(jax.vmap(lambda s: step(s)))
    for _ in range(2):
      updates, models = advance(models)
      assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))


@pytest.mark.cases(slow=["correlated", "release", "slices", "scaled coordinates"])
@pytest.mark.parametrize("name", _NAMES)
def test_a_state_keeps_its_types_where_jax_has_float64(name):
  """As `lax.scan` over steps asks, and a checkpoint that is read where JAX has none."""
  with jax.enable_x64(True):
    plan = test_plan_spent._PLANS[name]
    key = dpjax.new_key(release=name == "release")
    tx = plan.accumulated(plan.transform(key), rows=8)
    summed = test_plan_spent.summed_of(plan)
    state = tx.init(_PARAMS)
    after = jax.eval_shape(lambda state: tx.update(summed, state, _PARAMS)[1], state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
      lambda leaf: (leaf.shape, leaf.dtype), after
    )


def test_numbers_of_another_run_beside_the_noise_are_refused():
  """Both states are sound; their numbers do not belong to each other's noise."""
  plan, _, update, opt_state = _after("scaled coordinates")
  _, later = update(opt_state)
  earlier = opt_state[0].inner.mean_squares
  inner = later[0].inner._replace(mean_squares=earlier)
  mixed = (later[0]._replace(inner=inner), *later[1:])
  with refuses("state.draws"):
    plan.spent(mixed)


@pytest.mark.cases(slow=[2], long=...)
@pytest.mark.parametrize("name", ["scaled coordinates", "adaptive", "white"])
def test_a_batch_that_is_too_large_leaves_nothing_finite_of_its_sum(name):
  """Under jit the update is NaN. So is what the next step reads of the same sum."""
  plan, tx, _, opt_state = _after(name)
  rows = plan.sampler.padded_batch_size + 4
  grads = jax.tree.map(lambda p: jnp.ones((rows, *p.shape)), _PARAMS)

  @jax.jit
  def step(state, present):
    mask = jnp.arange(rows) < present
    return tx.update(dpjax.wrap_grads(grads, mask=mask), state, _PARAMS, mask=mask)

  numbers = lambda state: [
    leaf
    for field in ("mean_squares", "scale")
    for leaf in jax.tree.leaves(getattr(state[0].inner, field, ()))
  ]
  # As many examples as a draw may have: nothing happens to a wider array.
  updates, within = step(opt_state, plan.sampler.padded_batch_size)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
  assert all(np.isfinite(leaf).all() for leaf in numbers(within))
  updates, beyond = step(opt_state, rows)
  assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(updates))
  assert all(np.isnan(leaf).all() for leaf in numbers(beyond))
  # The draw is counted all the same, and the state is no other plan's.
  assert plan.spent(beyond).steps == 2
  # Whoever leaves out what is NaN does not go on with what follows from that sum.
  if numbers(beyond):
    updates, _ = step(beyond, 2)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(updates))


@pytest.mark.slow
def test_sound_states_stay_sound_in_every_program():
  """XLA rounds anew in each fusion. A digest of other roundings would refuse its own state."""
  plan = test_plan_spent._PLANS["scaled coordinates"]
  rng = np.random.default_rng(0)
  params = {"w": jnp.asarray(rng.normal(size=(37, 13)), jnp.float32), "b": jnp.ones(13)}
  rows = {
    name: jnp.asarray(rng.normal(size=(8, *leaf.shape)) * 3, jnp.float32)
    for name, leaf in params.items()
  }
  tx = plan.transform(jax.random.key(1))

  def run(key):
    one = plan.transform(key)

    def step(carry, scale):
      params, state = carry
      grads = jax.tree.map(lambda g: g * scale, rows)
      updates, state = one.update(dpjax.wrap_grads(grads, mask=True), state, params)
      return (jax.tree.map(lambda p, u: p - u, params, updates), state), updates["b"]

    scales = jnp.array([1.0, 0.3, 7.0])
    (_, state), updates = jax.lax.scan(step, (params, one.init(params)), scales)
    return updates, state

  updates, state = jax.jit(run)(jax.random.key(1))
  assert np.isfinite(updates).all() and plan.spent(state).steps == 3
  updates, _ = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(2), 5))
  assert np.isfinite(updates).all()
  # Each step compiled by itself, and none compiled at all.
  for wrapped in (jax.jit, lambda fn: fn):
    state = tx.init(params)
    for _ in range(3):
      grads = dpjax.wrap_grads(rows, mask=True)
      updates, state = wrapped(lambda g, s: tx.update(g, s, params))(grads, state)
      assert np.isfinite(updates["b"]).all()
    assert plan.spent(state).steps == 3


_KEPT = {
  "count=0": lambda tx, s: optax.tree.set(s, count=jnp.int32(0)),
  "mu": lambda tx, s: optax.tree.set(s, mu=jax.tree.map(jnp.zeros_like, _PARAMS)),
  "nu": lambda tx, s: optax.tree.set(s, nu=jax.tree.map(jnp.zeros_like, _PARAMS)),
  "moments": lambda tx, s: optax.tree_utils.tree_map_params(tx, jnp.zeros_like, s),
  "pickled": lambda tx, s: pickle.loads(pickle.dumps(s)),
  "copied": lambda tx, s: copy.deepcopy(s),
  "to NumPy and back": lambda tx, s: jax.tree.map(_numbers(np.asarray), s),
}


@pytest.mark.cases(slow=[21, "adaptive-count=0"], long=[39, 42, 43])
@pytest.mark.parametrize("change", sorted(_KEPT))
@pytest.mark.parametrize("name", _NAMES)
def test_what_resets_an_optimizer_leaves_the_noise_as_it_is(name, change):
  """`optax.tree.set(opt_state, count=0)` restarts a schedule; once it drew the noise again."""
  plan, tx, update, opt_state = _after(name, 3 if name == "slices" else 1)
  changed = _KEPT[change](tx, opt_state)
  assert plan.spent(changed).steps == 1
  assert np.array_equal(_private(changed), _private(opt_state))
  assert np.array_equal(_private(update(changed)[1]), _private(update(opt_state)[1]))


def _private(opt_state):
  """Every number of a state but those of Adam."""
  (private,) = accumulation.private_states(opt_state)
  held: list = [private]
  if guard.is_guarded(opt_state):
    held += [opt_state.inner._replace(inner=None), opt_state.checksum]
  leaves = [jax.random.key_data(x) if trees.is_key(x) else x for x in jax.tree.leaves(held)]
  return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in leaves])


def test_optax_has_none_of_the_names_that_private_states_have():
  """`optax.tree.set` knows fields by their names alone."""
  modules = (optax, optax.contrib, optax.transforms)
  fields = {
    name
    for module in modules
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, tuple)
    for name in getattr(value, "_fields", ())
    if value is not optax.GradientTransformation
  }
  assert {"count", "mu", "hyperparams"} <= fields
  states = (NoiseState, CorrelatedNoiseState, accumulation.AccumulateState)
  states += (
    guard.Guarded,
    ScaledState,
    ScalingState,
    toeplitz.BandState,
    strategies.TreeState,
  )
  shared = fields & {name for held in states for name in held._fields}
  # A key or a scale that is exchanged is seen by the checksum.
  assert shared <= {"key", "scale"}


@pytest.mark.slow
def test_no_two_counts_share_a_checksum():
  counts = jnp.arange(100_000, dtype=jnp.int32)
  for key in (jax.random.key(3), noise.new_key(), noise.new_key(release=True)):
    at = lambda count, key=key: guard.digest(state_at(key, count))
    found = jax.vmap(at)(counts)
    assert len(np.unique(found)) == len(counts) and 0 not in found[:1000]


_RAW = {
  "half a key": (
    lambda s: optax.tree.set(s, key=jnp.zeros(1, jnp.uint32)),
    r"state\.key: uint32\[1\]: must be the uint32 words of a key",
  ),
  "floats": (
    lambda s: jax.tree.map(lambda x: x if trees.is_key(x) else x.astype("float32"), s),
    r"state\.key: float32.*: must be the uint32 words",
  ),
  "of an earlier version": (
    lambda s: (guard.Guarded(s[0].inner, None, s[0].run), *s[1:]),
    r"checksum of state\.draws: None: must be an integer",
  ),
  "a dict": (lambda s: (s[0]._asdict(), *s[1:]), r"state: dict: must be what init and"),
}


@pytest.mark.cases(long=[0])
@pytest.mark.parametrize("wrapped", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
@pytest.mark.parametrize("kind", sorted(_RAW))
def test_a_state_that_was_restored_in_part_is_one_line(kind, wrapped):
  change, match = _RAW[kind]
  plan, tx, _, opt_state = _after("white")
  summed = dpjax.wrap_grads(jax.tree.map(lambda p: p[None], _PARAMS), mask=True)
  with pytest.raises(UserError, match=match) as caught:
    wrapped(lambda s: tx.update(summed, s, _PARAMS))(change(opt_state))
  assert len(str(caught.value)) < 300
  with pytest.raises(UserError):
    plan.spent(change(opt_state))


def _resets():
  """What Optax can wrap around a transform and reset with it."""
  private = lambda: test_plan_spent._PLANS["white"].transform(jax.random.key(1))
  chain = lambda: optax.chain(private(), optax.sgd(0.1))
  yield "lookahead", lambda reset: optax.lookahead(chain(), 2, 0.5, reset_state=reset)
  yield (
    "lookahead inside inject_hyperparams",
    lambda reset: optax.inject_hyperparams(
      lambda rate: optax.lookahead(
        optax.chain(private(), optax.sgd(rate)), 2, 0.5, reset_state=reset
      )
    )(rate=0.1),
  )


@pytest.mark.cases(long=[0, 2])
@pytest.mark.parametrize("wrapped", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
@pytest.mark.parametrize("make", [pytest.param(m, id=n) for n, m in _resets()])
def test_optax_does_not_begin_anew_in_the_middle_of_a_run(make, wrapped):
  """`optax.lookahead(reset_state=True)` would draw its noise again at every synchronisation."""
  plan = test_plan_spent._PLANS["white"]
  summed = plan.clipped_grad(test_plan_spent._loss)(_PARAMS, test_plan_spent._BATCH)
  params = optax.LookaheadParams.init_synced(_PARAMS)
  for reset in (True, False):
    tx = make(reset)
    opt_state = tx.init(params)
    update = wrapped(lambda s, tx=tx: tx.update(summed, s, params))
    if reset:
      with refuses("state") as caught:
        update(opt_state)
      assert len(str(caught.value)) < 300
      continue
    for done in range(3):
      assert plan.spent(opt_state).steps == done
      opt_state = update(opt_state)[1]


@pytest.mark.cases(slow=[0], long=...)
@pytest.mark.parametrize("name", ["white", "correlated", "adaptive", "clip schedule"])
def test_sums_under_vmap_do_not_share_the_noise_of_one_state(name):
  """Two sums with one noise: their difference is exact."""
  plan, tx, _, opt_state = _after(name)
  grads = dpjax.wrap_grads(
    jax.tree.map(lambda p: jnp.stack([p, 2 * p]), _PARAMS), mask=True
  )
  several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), grads)
  update = lambda g, s: tx.update(g, s, _PARAMS)[0]["w"]
  for mapped in (jax.vmap(update, (0, None)), jax.jit(jax.vmap(update, (0, None)))):
    with refuses("key"):
      mapped(several, opt_state)
  keys = jax.random.split(jax.random.key(0), 2)
  states = jax.vmap(lambda key: plan.transform(key).init(_PARAMS))(keys)
  states = (states, jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), opt_state[1]))
  first, second = jax.vmap(update)(several, states)
  assert not np.array_equal(first, second)


@pytest.mark.cases(slow=["correlated"], long=...)
@pytest.mark.parametrize("name", ["white", "correlated", "adaptive"])
def test_a_state_that_is_stacked_for_several_models_is_one_line_or_nan(name):
  """An ensemble whose members start from copies of one state: their noise would be the same."""
  _, tx, _, opt_state = _after(name)
  grads = dpjax.wrap_grads(
    jax.tree.map(lambda p: jnp.stack([p, 2 * p]), _PARAMS), mask=True
  )
  stacked = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)
  update = lambda g, s: tx.update(g, s, _PARAMS)[0]["w"]
  with refuses("state"):
    jax.vmap(update)(stacked(grads), stacked(opt_state))
  traced = jax.jit(jax.vmap(update))(stacked(grads), stacked(opt_state))
  assert np.isnan(traced).all()


def test_devices_with_sums_of_their_own_do_not_share_the_noise_of_one_state():
  """Each device would add the same noise: the difference of two is that of their exact sums."""
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  rows, same = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
  sums = jnp.zeros((1, 3))
  state = gaussian.init(jax.random.key(0))
  draw = lambda x, s: noise.add_gaussian(s, x, 1.0)[0]
  shared = jax.shard_map(draw, mesh=mesh, in_specs=(rows, same), out_specs=rows)
  unmarked = jax.shard_map(
    draw, mesh=mesh, in_specs=(rows, same), out_specs=rows, check_vma=False
  )
  mapped = jax.pmap(draw, axis_name="data", in_axes=(0, None))
  for fn in (shared, unmarked, mapped):
    with refuses("state"):
      jax.eval_shape(fn, sums, state)
  split = state._replace(key=state.key[None], draws=state.draws[None])
  of_each = lambda x, s: draw(x, jax.tree.map(lambda leaf: leaf[0], s))
  own = jax.shard_map(of_each, mesh=mesh, in_specs=(rows, rows), out_specs=rows)
  assert jax.eval_shape(own, sums, split).shape == sums.shape


def test_streams_of_all_levels_of_vmap_are_told_apart():
  keys = jax.random.split(jax.random.key(0), 4).reshape(2, 2)
  alike = keys.at[1].set(keys[0])
  draw = lambda key, x: noise.add_gaussian(gaussian.init(key), x, 1.0)[0]
  twice = jax.jit(jax.vmap(jax.vmap(draw)))
  sums = jnp.zeros((2, 2, 3))
  assert len(np.unique(twice(keys, sums))) == sums.size
  assert np.isnan(twice(alike, sums)).all()
