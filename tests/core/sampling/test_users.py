"""Users as the unit: whatever one user's data are, the clipped sum moves by at most C."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpjax
from dpjax import data, gradients, sampling, transforms
from dpjax.types import Batch, Example
from tests import plans
from tests.refuses import refuses


class _Data:
  def __init__(self, x, y):
    self.x, self.y = np.asarray(x, np.float32), np.asarray(y, np.float32)

  def __len__(self):
    return len(self.x)

  def __getitem__(self, rows):
    return Example(self.x[rows], self.y[rows])


def _loss(params, example):
  return (params["w"] @ example.x + params["b"] - example.y) ** 2


def _data(seed=0, sizes=(3, 1, 6, 2), scale=1.0):
  rng = np.random.default_rng(seed)
  ids = np.repeat(np.arange(len(sizes)), sizes)
  x = scale * rng.normal(size=(ids.size, 2))
  return _Data(x, rng.normal(size=ids.size)), ids


def _blocks(data, ids, **options):
  return sampling.group_by_user(data, ids, **{"max_examples_per_user": 4} | options)


_PARAMS = {"w": jnp.array([0.3, -0.2]), "b": jnp.array(0.1)}


def _clipped_sum(blocks, users, clip=1.0, reduction="mean"):
  batch = blocks[np.asarray(users)]
  loss = sampling.user_loss(_loss, reduction=reduction)
  grad_fn = gradients.clipped_grad(loss, l2_clip_norm=clip, method="vmap")
  return grad_fn(_PARAMS, batch, jnp.ones(len(users), bool))


def _moved(a, b):
  squares = jax.tree.map(lambda x, y: ((x - y) ** 2).sum(), a.total, b.total)
  return float(jnp.sqrt(sum(jax.tree.leaves(squares))))


@pytest.mark.long
@settings(max_examples=15)
@given(
  seed=st.integers(0, 10**6),
  scale=st.sampled_from([1e-3, 1.0, 1e6]),
  reduction=st.sampled_from(["mean", "sum"]),
  user=st.integers(0, 3),
)
def test_changing_all_data_of_one_user_moves_the_sum_by_at_most_its_bound(
  seed, scale, reduction, user
):
  data, ids = _data()
  other, _ = _data(seed, scale=scale)
  changed = _Data(
    np.where((ids == user)[:, None], other.x, data.x),
    np.where(ids == user, other.y, data.y),
  )
  here = _clipped_sum(_blocks(data, ids), [0, 1, 2, 3], reduction=reduction)
  there = _clipped_sum(_blocks(changed, ids), [0, 1, 2, 3], reduction=reduction)
  assert _moved(here, there) <= 2.0 * (1 + 1e-5)  # exchanged: 2 C
  without = _clipped_sum(
    _blocks(data, ids), [u for u in range(4) if u != user], reduction=reduction
  )
  assert _moved(here, without) <= 1.0 + 1e-5  # joins or leaves: C


@pytest.mark.long
def test_example_level_clipping_would_not_protect_a_user():
  """The same user, clipped example by example, moves the sum by more than C."""
  data = _Data(np.ones((6, 2)), np.full(6, 50.0))
  grad_fn = gradients.clipped_grad(_loss, l2_clip_norm=1.0, method="vmap")
  of_examples = grad_fn(
    _PARAMS, Batch(data[np.arange(6)], None).examples, jnp.ones(6, bool)
  )
  length = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(of_examples.total)))
  assert length > 5.9
  of_user = _clipped_sum(_blocks(data, np.zeros(6, int)), [0])
  length = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(of_user.total)))
  assert length <= 1 + 1e-6


def test_an_emptied_user_adds_nothing_to_the_count_of_an_adaptive_clip_norm():
  """With noise of 1 on sum and count, a multiplier of .894 was stated. The count of an emptied user
  was 1 away from that of the full one, not 1/2, which is a multiplier of .707."""
  x = np.full((6, 1), 50.0, np.float32)
  whole = dpjax.data.from_arrays(x, np.zeros(6, int), num_classes=2, nominal_size=6)
  emptied = dataclasses.replace(whole, present=np.arange(6) > 1)
  rule = transforms.AdaptiveClipping(count_noise_std=1.0, learning_rate=1.0)
  plan = plans.of(
    prob=1.0,
    unit="user",
    neighboring_relation="replace_special",
    l2_clip_norm=dpjax.Clip(1.0, rule),
    normalize_by=1,
    num_steps=1,
  )
  grad_fn = plan.clipped_grad(sampling.user_loss(lambda w, e: jnp.sum(w * e.x)))

  def queries(data):
    blocks = sampling.group_by_user(data, np.arange(6) // 2, max_examples_per_user=2)
    summed = grad_fn(jnp.zeros(1), next(plan.batches(blocks, rng=0)))
    return np.append(summed.total, rule.query(summed))

  np.testing.assert_allclose(queries(whole) - queries(emptied), [1.0, -0.5], rtol=1e-5)


def _masked_by_hand(w, block):
  """A user's own loss of a block, which multiplies padding by 0: a NaN stays NaN."""
  losses = jax.vmap(lambda x: jnp.sum(w * x) / jnp.sum(x**2))(block.examples)
  return (losses * block.mask).sum() / block.mask.sum()


@pytest.mark.parametrize("pads_by_another", [False, True])
def test_no_record_of_another_user_is_in_the_padding_of_a_block(pads_by_another):
  """One record that is all zero has a loss of 0 / 0. While padding held the first record of the
  data, it took every user with padding out of the sum: 12 C where C was claimed."""
  ids = np.r_[0, 0, np.arange(1, 13)]
  grad_fn = gradients.clipped_grad(_masked_by_hand, l2_clip_norm=0.01, method="vmap")

  def total(first):
    x = np.ones((14, 1), np.float32)
    x[0] = first
    blocks = sampling.group_by_user(x, ids, max_examples_per_user=2)
    if pads_by_another:
      members = np.where(blocks.mask, blocks.members, 0)
      blocks = dataclasses.replace(blocks, members=members)
    return grad_fn(jnp.ones(1), blocks[np.arange(13)], True).total

  moved = float(jnp.abs(total(1.0) - total(0.0)).sum()) / 0.01
  assert moved == pytest.approx(13 if pads_by_another else 1, rel=1e-5)


class _UsersOfOwn(sampling.PoissonSampler):
  unit = "user"


def test_blocks_are_refused_by_a_plan_that_hides_examples():
  """A user with records 1 and -3: where the second one leaves, the block's gradient turns round. So
  one record moves the sum by 2 C, where the plan said C for one example."""
  x = np.array([[1.0], [-3.0], [1.0]], np.float32)
  loss = sampling.user_loss(lambda w, x: jnp.sum(w * x))
  user, example = (
    plans.of(4, prob=1.0, normalize_by=1, unit=unit) for unit in ("user", "example")
  )

  def total(rows, plan):
    ids = np.array([0, 0, 1])[rows]
    blocks = sampling.group_by_user(x[rows], ids, max_examples_per_user=2)
    return plan.clipped_grad(loss)(jnp.zeros(1), next(plan.batches(blocks))).total

  moved = float(jnp.abs(total([0, 1, 2], user) - total([0, 2], user)).sum())
  assert moved == pytest.approx(2 * user.l2_bound, rel=1e-5)
  with refuses("unit", value="example"):
    total([0, 1, 2], example)
  blocks = sampling.group_by_user(x, [0, 0, 1], max_examples_per_user=2)
  own = dataclasses.replace(user, sampler=_UsersOfOwn(sampling_prob=1.0, capacity=4))
  assert int(next(own.batches(blocks)).mask.sum()) == 2 and own.assumptions
  options = dict(epochs=1, epsilon=2.0, delta=1e-3, l2_clip_norm=1.0, num_examples=2)
  assert dpjax.Plan.for_data(blocks, batch_size=1, **options).unit == "user"
  assert dpjax.Plan.for_data(x, batch_size=1, **options).unit == "example"


class _Wrapped:
  """A container of one's own, which states no unit."""

  def __init__(self, data, put=lambda rows: rows):
    self._data, self._put = data, put

  def __len__(self):
    return len(self._data)

  def __getitem__(self, indices):
    return self._put(self._data[indices])


@pytest.mark.parametrize("put", [lambda rows: rows, lambda rows: {"of": (rows, rows.mask)}])
def test_blocks_in_another_container_are_refused_as_well(put):
  blocks = _Wrapped(_blocks(*_data()), put)
  user, example = (plans.of(16, unit=unit) for unit in ("user", "example"))
  with refuses("unit", value="example"):
    example.batches(blocks, rng=0)
  assert next(user.batches(blocks, rng=0)).mask.shape == (16,)


def test_blocks_in_rows_of_ones_own_are_refused_as_well():
  """A loop that draws by itself asks no `plan.batches`. `spent` said "one example"."""
  loss = sampling.user_loss(_loss)
  rows = _blocks(*_data())[np.arange(4)]
  user, example = (plans.of(4, unit=unit) for unit in ("user", "example"))
  for batch, mask in ((Batch(rows, np.ones(4, bool)), None), (rows, True)):
    with refuses("unit", value="example"):
      example.clipped_grad(loss)(_PARAMS, batch, mask)
    assert user.clipped_grad(loss)(_PARAMS, batch, mask).norms.shape == (4,)


def test_a_check_refuses_rows_of_another_unit_than_the_plan():
  """Its sensitivity changes whole rows, and so found no fault in blocks under "example"."""
  data, ids = _data()
  blocks = _blocks(data, ids)
  for rows in (blocks, _Wrapped(blocks)):
    with refuses("unit", value="example"):
      dpjax.check(sampling.user_loss(_loss), _PARAMS, plans.of(16), rows)
  with refuses("data"):
    dpjax.check(_loss, _PARAMS, plans.of(16, unit="user"), data)


def test_an_absent_record_takes_no_place_in_a_block():
  x = np.arange(1, 7, dtype=np.float32)[:, None]
  whole = dpjax.data.from_arrays(x, np.zeros(6, int), num_classes=2, nominal_size=6)
  without = dataclasses.replace(whole, present=np.array([0, 1, 1, 0, 0, 1], bool))
  blocks = sampling.group_by_user(without, np.arange(6) // 3, max_examples_per_user=2)
  np.testing.assert_array_equal(blocks.members, [[1, 2], [5, 5]])
  np.testing.assert_array_equal(blocks.mask, [[True, True], [True, False]])


def test_other_users_decide_nothing_about_a_block():
  data, ids = _data()
  for choose in sampling.users.CHOICES:
    blocks = _blocks(data, ids, choose=choose)
    alone = ids == 2
    rows = np.flatnonzero(alone)
    only = _blocks(_Data(data.x[rows], data.y[rows]), ids[rows], choose=choose)
    np.testing.assert_array_equal(
      blocks[np.array([2])].examples.x, only[np.array([0])].examples.x
    )


def test_a_random_choice_is_uniform_and_takes_whom_first_leaves():
  data = _Data(np.arange(10)[:, None], np.zeros(10))
  kept = [
    _blocks(data, np.zeros(10, int), choose="random", seed=seed).members[0]
    for seed in range(500)
  ]
  counts = np.bincount(np.concatenate(kept), minlength=10)
  assert counts.min() > 140 and counts.max() < 260 and counts.sum() == 2000


@pytest.mark.long
def test_the_fast_route_gives_the_same_sum():
  data, ids = _data(scale=3.0)
  batch = _blocks(data, ids)[np.arange(4)]
  loss, mask = sampling.user_loss(_loss), jnp.array([True, True, True, False])
  fast, slow = (
    gradients.clipped_grad(loss, l2_clip_norm=1.0, method=method)(_PARAMS, batch, mask)
    for method in ("auto", "vmap")
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), fast.total, slow.total
  )


@pytest.mark.cases(slow=["sum"], long=...)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_p07_padding_changes_nothing_even_where_its_gradient_is_nan(reduction):
  safe = lambda params, example: jnp.log(example.x.sum()) * params["b"] + params["w"].sum()
  loss = sampling.user_loss(safe, reduction=reduction)
  x = jnp.array([[1.0, 1.0], [2.0, 2.0], [-5.0, 0.0], [jnp.nan, 1.0]])
  mask = jnp.array([True, True, False, False])
  padded = jax.value_and_grad(loss)(_PARAMS, Batch(Example(x, jnp.zeros(4)), mask))
  plain = jax.value_and_grad(loss)(_PARAMS, Batch(Example(x[:2], jnp.zeros(2)), mask[:2]))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), padded, plain)
  direct = sum(float(safe(_PARAMS, Example(row, 0.0))) for row in x[:2])
  assert float(padded[0]) == pytest.approx(direct / (2 if reduction == "mean" else 1))


def test_blocks_hold_every_example_once_within_the_limit():
  data, ids = _data(sizes=(3, 1, 6, 2))
  blocks = _blocks(data, ids)
  assert len(blocks) == 4 and blocks.mask.sum(1).tolist() == [3, 1, 4, 2]
  kept = blocks.members[blocks.mask]
  assert np.unique(kept).size == kept.size
  for user in range(4):
    assert (ids[blocks.members[user][blocks.mask[user]]] == user).all()
  batch = blocks[np.array([2, 0])]
  assert batch.examples.x.shape == (2, 4, 2) and batch.mask.shape == (2, 4)


def test_an_emptied_user_adds_nothing():
  """Under replace_special the twin of a user has empty records in the places of his."""
  x = np.array([3.0, 4.0, 5.0, 6.0], np.float32)
  present = np.array([True, False, False, False])
  rows = data.from_arrays(x[:, None], np.zeros(4, np.int32), num_classes=2)
  blocks = sampling.group_by_user(
    dataclasses.replace(rows, present=present),
    ["a", "a", "b", "b"],
    max_examples_per_user=3,
  )
  assert blocks.mask.tolist() == [[True, False, False], [False] * 3]


@pytest.mark.parametrize(
  "sampler",
  [
    sampling.FixedSizeSampler(batch_size=2, num_examples=5),
    sampling.ShuffledSampler(batch_size=2, num_examples=5),
    sampling.CyclicSampler(steps_per_pass=2, num_examples=5),
    sampling.RandomAllocationSampler(steps_per_pass=2, capacity=6),
    sampling.TruncatedPoissonSampler(sampling_prob=0.5, capacity=3, num_examples=5),
  ],
)
def test_any_sampler_of_examples_draws_users(sampler):
  """One block is to it what one example is: at the same cost, and proved."""
  data, ids = _data(sizes=(2, 5, 1, 3, 2))
  users, examples = (plans.of(sampler=sampler, unit=unit) for unit in ("user", "example"))
  assert users.epsilon() == examples.epsilon() and not users.assumptions
  assert "one user" in users.statement() and "one user" not in examples.statement()
  batches = list(users.batches(_blocks(data, ids), rng=0))
  assert len(batches) == 4 and batches[0].examples.mask.ndim == 2


def test_a_plan_of_users_draws_no_plain_rows():
  """It did, and its statement said "one user" of single examples."""
  plan = plans.of(16, unit="user")
  data, ids = _data()
  lines = np.zeros((4, 3), np.int32)
  tokens = lambda x: dpjax.data.Dataset(x, np.zeros(4, np.int32), "lines", 9, "train", 9)
  for plain in (data, np.ones((12, 3, 2), np.int32), {"x": data.x}, tokens(lines)):
    with refuses("data"):
      plan.batches(plain, rng=0)
  rows = tokens(np.stack([lines, lines], axis=1))  # [n, m, T]
  for users in (_blocks(data, ids), rows, dpjax.data.resident.resident(rows)):
    assert next(plan.batches(users, rng=0)).mask.shape == (16,)


@pytest.mark.cases(long=[4])
@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda d, ids: _blocks(d, ids[:-1]), "user_ids"),
    (lambda d, ids: _blocks(d, ids + 0.5), "user_ids"),
    (lambda d, ids: _blocks(d, ids, max_examples_per_user=0), "max_examples_per_user"),
    (lambda d, ids: _blocks(d, ids, choose="best"), "choose"),
    (lambda d, ids: sampling.user_loss(_loss, reduction="max"), "reduction"),
  ],
)
def test_wrong_arguments_are_named(make, field):
  with refuses(field) as caught:
    make(*_data())
  assert "\n" not in str(caught.value)


@pytest.mark.long
def test_a_plan_takes_users_for_examples():
  """Blocks through the plan's batches, clipped sum and noise: one compilation, and the
  budget of a Poisson sample of users."""
  data, ids = _data(sizes=(2, 5, 1) * 20)
  blocks = _blocks(data, ids)
  plan = plans.of(
    40,
    prob=0.2,
    unit="user",
    normalize_by=12,
    num_steps=5,
    delta=1e-3,
  )
  grad_fn = plan.clipped_grad(sampling.user_loss(_loss))
  tx = plan.transform(jax.random.key(0))
  state, traces = tx.init(_PARAMS), []

  @jax.jit
  def step(state, batch):
    traces.append(None)
    clipped = grad_fn(_PARAMS, batch.examples, batch.mask)
    return *tx.update(clipped, state, _PARAMS), clipped.norms.shape

  for batch in plan.batches(blocks, rng=1):
    updates, state, norms_shape = step(state, batch)
    assert np.isfinite(jax.tree.leaves(updates)[0]).all()
  assert len(traces) == 1 and norms_shape == (40,)  # a norm per user, not per example
  examples = dpjax.Plan(
    **{
      **{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)},
      "sampler": sampling.PoissonSampler(sampling_prob=0.2, capacity=40),
    }
  )
  assert plan.epsilon() == examples.epsilon()


@pytest.mark.parametrize(
  "ids",
  [
    ["josé", "jose\u0301", "ann", "josé"],
    ["7", b"7", "ann", 7],
    np.array([b"7", b"7", b"8", b"7"]),
  ],
)
def test_all_ways_to_write_a_name_are_one_user(ids):
  """Each had a block of its own, so the user moved a sum by a clip norm in each of them."""
  blocks = sampling.group_by_user(np.arange(4.0), ids, max_examples_per_user=4)
  assert len(blocks) == 2 and sorted(blocks.mask.sum(axis=1)) == [1, 3]


@pytest.mark.parametrize(
  "missing", ["", None, float("nan"), np.ma.array([0, 1, 1], mask=[0, 0, 1])[2]]
)
def test_a_record_of_nobody_knows_whom_is_refused(missing):
  """All of them were one user more, and some are of users with blocks of their own."""
  ids = ["ann", "bob", missing]
  if missing is np.ma.masked:
    ids = np.ma.array([0, 1, 1], mask=[0, 0, 1])
  with refuses("user_ids"):
    sampling.group_by_user(np.arange(3.0), ids, max_examples_per_user=2)
  with refuses("owners[1]"):
    sampling.bound_contributions([["ann"], ["bob", missing]], max_contribution=1)
