"""A private transform serves the plan that pays for it, its states and its batches alone.

Before, `plan.spent` of a state with a tenth of the noise said 3.5 where 89.7 had been spent.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import sampling, transforms
from dpjax.noise import NoiseShape
from dpjax.noise.correlated import BandedToeplitz
from dpjax.sampling.registry import SCHEMES
from dpjax.validate import UserError
from tests import plans
from tests.refuses import refuses

_PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
_KEY = jax.random.key(1)


def _loss(params, x):
  return jnp.sum(jnp.tanh(x @ params["w"]) * params["b"])


_plan = functools.partial(plans.of, prob=0.1, noise_multiplier=2.0, num_steps=3)


def _batch(rows, count):
  return dpjax.Batch(
    jax.random.normal(jax.random.key(0), (rows, 3)), jnp.arange(rows) < count
  )


_DATA = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("slices", [1, 2])
def test_a_batch_serves_the_step_that_drew_it(slices, stacked):
  whole = sampling.PoissonSampler(sampling_prob=0.1, capacity=41)
  plan = _plan(slices=slices, sampler=whole)
  tx = plan.accumulated(optax.chain(plan.transform(_KEY), optax.sgd(0.1)))
  summed = plan.clipped_grad(_loss)
  rows = lambda params, batch: dpjax.per_example_grads(_loss)(params, batch)[1]
  grads = rows if stacked else summed
  update = jax.jit(lambda batch, state: tx.update(grads(_PARAMS, batch), state, _PARAMS))
  batches = list(plan.batches(_DATA, rng=0))
  state = tx.init(_PARAMS)
  for batch in batches[:slices]:
    updates, state = update(batch, state)
  is_finite = lambda tree: all(
    bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree)
  )
  assert is_finite(updates)
  # The next batch is taken; one of a loop that began anew is not, nor a later one.
  assert is_finite(update(batches[slices], state)[0])
  for wrong in (batches[0], batches[2 * slices], next(iter(plan.batches(_DATA, rng=1)))):
    assert not is_finite(update(wrong, state)[0])
    with refuses("batch.step", value=int(wrong.step[0])):
      tx.update(grads(_PARAMS, wrong), state, _PARAMS)
  if slices > 1:
    # An example would count twice in one step.
    _, within = update(batches[slices], state)
    assert not is_finite(update(batches[slices], within)[0])
    assert is_finite(update(batches[slices + 1], within)[0])
  # Rows of one's own have no turn.
  assert is_finite(update(batches[0]._replace(origin=None), state)[0])


@pytest.mark.parametrize("how", ["sum", "stacked", "wrapped"])
def test_padding_that_came_later_has_any_step(how):
  """As of `split_rows` over several devices."""
  plan = _plan(sampler=sampling.PoissonSampler(sampling_prob=0.1, capacity=41))
  tx = plan.transform(_KEY)
  mine = jax.vmap(jax.grad(_loss), in_axes=(None, 0))
  grads = {
    "sum": plan.clipped_grad(_loss),
    "stacked": lambda params, batch: dpjax.per_example_grads(_loss)(params, batch)[1],
    "wrapped": lambda params, batch: dpjax.wrap_grads(mine(params, batch.examples), batch),
  }[how]
  update = lambda batch, state: tx.update(grads(_PARAMS, batch), state, _PARAMS)
  more = lambda leaf: np.concatenate([leaf, np.zeros_like(leaf[:3])])
  drawn = itertools.islice(plan.batches(_DATA, rng=0), 2)
  first, second = (jax.tree.map(more, batch) for batch in drawn)
  _, state = update(first, tx.init(_PARAMS))
  assert np.isfinite(update(second, state)[0]["w"]).all()
  with refuses("batch.step", value=0):
    update(first, state)


_CYCLIC = sampling.CyclicSampler(steps_per_pass=3, num_examples=24)
_TOEPLITZ = NoiseShape(correlation=BandedToeplitz((1.0, 0.5)))
_OTHERS = {
  "less noise": _plan(noise_multiplier=0.2),
  "no noise": _plan(noise_multiplier=0.0),
  "another bound": _plan(l2_clip_norm=0.5),
  "bounds by group": _plan(l2_clip_norm={"w": 0.6, "b": 0.8}),
  "a rarer example": _plan(sampler=sampling.PoissonSampler(sampling_prob=0.2, capacity=8)),
  "another sampler": _plan(sampler=sampling.FixedSizeSampler(8, 80)),
  "a rule that adapts": _plan(l2_clip_norm=dpjax.Clip(1.0, transforms.AdaptiveClipping())),
  "a clip schedule": _plan(l2_clip_norm=dpjax.Clip(1.0, schedule=(1.0, 0.5, 0.5))),
  "a noise schedule": _plan(noise_shape=NoiseShape(schedule=(1.0, 1.0, 2.0))),
  "correlated": _plan(sampler=_CYCLIC, noise_shape=_TOEPLITZ),
}


@pytest.mark.parametrize(
  "relation", ["add_or_remove_one", "replace_special", "replace_one"]
)
def test_plans_that_draw_otherwise_never_share_a_mark(relation):
  """Whatever they cost: cyclic batches and balls in bins did, and two probabilities of MinSep."""
  samplers = [scheme.kind(**kw) for scheme in SCHEMES.values() for kw in scheme.kind.small]
  samplers += [
    sampling.MinSepSampler(1.0, 2, 3, capacity=5),
    sampling.MinSepSampler(0.25, 2, 3, capacity=5),
    sampling.CyclicPoissonSampler(1.0, 2, capacity=5),
  ]
  bands = [(1.0, 0.5, 0.5), (1.0, 0.6, 0.14**0.5)]  # columns of one length
  shapes = [NoiseShape(), *(NoiseShape(correlation=BandedToeplitz(c)) for c in bands)]
  marks = {}
  for sampler, shape, slices in itertools.product(samplers, shapes, (1, 2)):
    try:
      of_all = dict(sampler=sampler, noise_shape=shape, slices=slices)
      plan = _plan(**of_all, neighboring_relation=relation)
    except UserError:
      continue
    marks.setdefault(plan._mark, []).append((sampler, shape, slices))
  assert len(marks) > 10
  assert [alike for alike in marks.values() if len(alike) > 1] == []


@pytest.mark.parametrize("real, whole", [(float, int), (np.float32, np.int64)])
def test_numbers_of_numpy_make_the_marks_of_pythons(real, whole):
  """The costs of MinSep do not follow from `turn_prob`, so at np.float32 two samplers had one mark.
  And a plan of np.int64 did not take states of the same plan from JSON."""
  chance = [
    sampling.MinSepSampler(real(q), whole(2), whole(3), capacity=5) for q in (0.5, 0.25)
  ]
  half, quarter = (_plan(sampler=sampler)._mark for sampler in chance)
  assert half != quarter
  assert half == _plan(sampler=sampling.MinSepSampler(0.5, 2, 3, capacity=9))._mark


@dataclasses.dataclass(frozen=True)
class _Ordered(sampling.PoissonSampler):
  order: str = "rows"


def test_words_of_a_users_own_sampler_are_in_the_mark():
  marks = {_plan(sampler=_Ordered(0.5, 8, word))._mark for word in ("rows", "turns")}
  assert len(marks) == 2


def _after_one_step(plan):
  tx = optax.chain(plan.transform(_KEY), optax.sgd(0.1))
  summed = plan.clipped_grad(_loss)(_PARAMS, _batch(8, 7))
  return tx, summed, tx.update(summed, tx.init(_PARAMS), _PARAMS)[1]


@pytest.mark.cases(quick=[5], slow=[1, 2, 6], long=...)
@pytest.mark.parametrize("name", sorted(_OTHERS))
def test_the_state_of_another_plan_is_one_line(name):
  plan, other = _plan(), _OTHERS[name]
  _, _, theirs = _after_one_step(other)
  _, _, ours = _after_one_step(plan)
  assert other.spent(theirs).steps == plan.spent(ours).steps == 1
  for asked, state in ((plan, theirs), (other, ours)):
    with refuses("state.draws") as caught:
      asked.spent(state)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_an_update_with_the_state_of_another_plan_is_one_line_or_nan_for_good():
  tx, summed, _ = _after_one_step(_plan())
  _, _, theirs = _after_one_step(_OTHERS["less noise"])
  with refuses("state.draws"):
    tx.update(summed, theirs, _PARAMS)
  update = jax.jit(lambda state: tx.update(summed, state, _PARAMS))
  for _ in range(2):
    updates, theirs = update(theirs)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(updates))


_SAME = {
  "more steps": {"num_steps": 9},
  "another delta": {"delta": 1e-6},
  "another divisor": {"normalize_by": 8},
  "more slots": {"sampler": sampling.PoissonSampler(sampling_prob=0.1, capacity=16)},
  "numbers of NumPy": {"noise_multiplier": np.float64(2.0), "l2_clip_norm": np.int64(1)},
  "the last bits": {"noise_multiplier": 2.0 * (1 + 1e-15)},
}


@pytest.mark.parametrize("name", sorted(_SAME))
def test_a_plan_of_the_same_mechanism_goes_on(name):
  plan = _plan()
  _, summed, state = _after_one_step(plan)
  same = dataclasses.replace(plan, **_SAME[name])
  assert same.spent(state).steps == 1
  tx = optax.chain(same.transform(_KEY), optax.sgd(0.1))
  assert same.spent(tx.update(summed, state, _PARAMS)[1]).steps == 2


@pytest.mark.cases(slow=[3, "stacked, mask apart-jit", "sum-jit"], long=[1, 5])
@pytest.mark.parametrize("wrapped", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
@pytest.mark.parametrize("kind", ["sum", "stacked", "stacked, mask apart"])
def test_more_examples_than_a_draw_has_are_one_line_or_nan(kind, wrapped):
  """Rows of padding may be more: several devices, and microbatches, fill up."""
  plan = _plan()
  tx = plan.transform(_KEY)

  def update(batch):
    more = {}
    if kind == "sum":
      grads = plan.clipped_grad(_loss)(_PARAMS, batch)
    elif kind == "stacked":
      grads = dpjax.per_example_grads(_loss)(_PARAMS, batch)[1]
    else:
      grads = dpjax.per_example_grads(_loss)(_PARAMS, batch.examples)[1]
      more = {"mask": batch.mask}
    return tx.update(grads, tx.init(_PARAMS), _PARAMS, **more)[0]

  assert np.isfinite(wrapped(update)(_batch(16, 8))["w"]).all()
  if wrapped is jax.jit:
    assert np.isnan(wrapped(update)(_batch(16, 9))["w"]).all()
    return
  with pytest.raises(UserError, match="^updates: must be of at most 8 examples"):
    update(_batch(16, 9))
