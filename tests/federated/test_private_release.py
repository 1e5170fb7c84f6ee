"""Whatever a private round releases is a function of the noised sum, in every algorithm."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import JointPlan, data, federated, mechanisms, sampling
from dpjax.federated import (
  client_noise,
  compressed,
  from_batches,
  local_training,
  loop_clients,
  median,
  quantize,
  round,
  top_k,
)
from dpjax.federated.client import uniform
from dpjax.federated.execution import client_loop
from dpjax.federated.execution.context import Context
from dpjax.parallel.client_states import ClientStates
from tests import plans
from tests.federated import problems, registry
from tests.refuses import refuses

_STRANGE = (1e6, 1e30, np.nan)  # what the clients in which two cohorts differ hold


def _cohorts(value):
  """Three clients; and the same with one more."""
  own = problems.ragged((4, 2, 3, 4), width=3)
  own[3] = np.full((4, 3), value, np.float32)
  whole = from_batches(own, batch_size=2)
  first = whole._replace(
    ids=whole.ids[:3], num_examples=whole.num_examples[:3], batches=whole.batches[:3]
  )
  return first, whole


def _watched(aggregator):
  """The aggregator, with its last output as part of its state."""

  def init(like):
    return aggregator.init(like), jax.tree.map(jnp.zeros_like, like)

  def keeping(found):
    mean, state = found
    return mean, (state, mean)

  if aggregator.finish is None:
    update = lambda m, mask, state, w=None: aggregator.update(m, mask, state[0], w)
    return aggregator._replace(init=init, update=lambda *args: keeping(update(*args)))
  return aggregator._replace(
    init=init,
    partial=lambda state, *sent: aggregator.partial(state[0], *sent),
    finish=lambda sums, state: keeping(aggregator.finish(sums, state[0])),
  )


def _answering(aggregator, state):
  """An aggregator that has heard nothing and always answers what `state` remembers."""
  answer = lambda *_: (state[1], state)
  finish = None if aggregator.finish is None else answer
  return aggregator._replace(update=answer, finish=finish)


def _released(state):
  """All of the state but what stays with the clients."""
  state = state._replace(memories=None)
  numbers = lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf
  return jax.tree.map(numbers, state)


def _is_key(leaf):
  return jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)


def _distance(a, b):
  squares = jax.tree.map(lambda x, y: np.sum((np.asarray(x, float) - y) ** 2), a, b)
  return float(np.sqrt(sum(jax.tree.leaves(squares))))


def _check_release(name, kind, value):
  aggregator = _watched(registry.PRIVATE[kind]())
  first, whole = _cohorts(value)
  algorithm = registry.build(name, aggregator)
  before = registry.start(name, algorithm)
  with_it, without = (algorithm.round(before, cohort)[0] for cohort in (whole, first))
  bound = registry.CLIP / registry.DIVISOR
  assert _distance(with_it.aggregator[1], without.aggregator[1]) <= bound * (1 + 1e-4)
  replayed = registry.build(name, _answering(aggregator, without.aggregator))
  again, _ = replayed.round(before, whole)  # with the client, but deaf to it
  jax.tree.map(np.testing.assert_array_equal, _released(again), _released(without))
  assert np.isfinite(jax.tree.leaves(with_it.params)[0]).all()


def test_what_a_plan_of_clients_has_spent_is_said_of_users():
  plan = plans.of(num_steps=3, noise_multiplier=1.0, unit="user")
  tx = optax.sgd(1.0)
  private = federated.central(plan, jax.random.key(0))
  loss_fn = lambda w, x: jnp.sum((w - x) ** 2)
  fed = federated.fed_avg(loss_fn, tx, tx, private, key=jax.random.key(1))
  state = fed.init(jnp.zeros(3))
  for held in (state, {"round": 0, "state": state}, state.aggregator):
    assert "Unit: one user" in plan.spent(held).statement
  assert "Unit: one user" in plan.statement()


def test_a_plan_of_clients_says_that_it_hides_users():
  """A client without one of its examples may send the opposite message. So the epsilon of a plan
  that said "one example" was that of half as large a move of the sum."""
  rows = plans.of(num_steps=3)
  with refuses("unit", value="example"):
    federated.central(rows, registry.NOISE)
  clients = dataclasses.replace(rows, unit="user")
  assert federated.central(clients, registry.NOISE).plan == clients
  # A mechanism hides one example: with a plan of users it has no epsilon.
  votes = mechanisms.GNMax(4.0)
  assert JointPlan({"train": rows, "votes": votes}, delta=1e-3).unit == "example"
  with refuses("parts['votes']"):
    JointPlan({"train": clients, "votes": votes}, delta=1e-3)
  with refuses("unit", value="user"):
    plans.of(unit="user", statistics=mechanisms.ChannelStatistics(normalize_by=4.0))
  users = sampling.BoundedContributionSampler(0.5, 8, max_contribution=2)
  assert plans.of(sampler=users).unit == "user"
  with refuses("unit", value="example"):
    plans.of(sampler=users, unit="example")


@pytest.mark.cases(slow=[3], long=...)
@pytest.mark.parametrize("name", sorted(registry.ALGORITHMS))
def test_every_algorithm_releases_a_function_of_the_noised_sum(name):
  """A client, with whatever data, moves the sum by its bound, and nothing else by anything."""
  _check_release(name, "flat", _STRANGE[sorted(registry.ALGORITHMS).index(name) % 3])


@pytest.mark.cases(slow=[5], long=...)
@pytest.mark.parametrize("kind", sorted(set(registry.PRIVATE) - {"flat"}))
def test_every_private_aggregator_covers_all_that_is_sent(kind):
  _check_release("scaffold", kind, 1e6)


@pytest.mark.long
@pytest.mark.parametrize("value", _STRANGE)
@pytest.mark.parametrize("kind", sorted(registry.PRIVATE))
@pytest.mark.parametrize("name", sorted(registry.ALGORITHMS))
def test_every_algorithm_with_every_private_aggregator(name, kind, value):
  if (name, kind) == ("fed_avg local noise", "correlated"):
    # Its plan empties a client, whose noise is still sent (`check_empty`).
    with refuses("neighboring_relation"):
      _check_release(name, kind, value)
    return
  _check_release(name, kind, value)


def test_no_algorithm_is_left_out():
  checked = {name.split()[0] for name in registry.ALGORITHMS}
  assert registry.made_here() - {"federated"} == checked


def test_the_watch_sees_what_goes_around_the_noise():
  """The check above fails for a server that looks at how many clients took part."""

  def apply(params, state, mean, size):
    size = 0.0 if size is None else size
    return jax.tree.map(lambda p, d: p + d, params, mean["delta"]), state + size

  def leaking(aggregator):
    client = local_training(problems.quadratic, optax.sgd(0.1))
    server = federated.round.Server(lambda p: jnp.float32(0), lambda s: None, apply)
    options = {"key": registry.KEY, "map_clients": loop_clients()}
    return round.federated(client, server, aggregator=aggregator, **options)

  first, whole = _cohorts(1.0)
  for private in (True, False):
    aggregator = registry.PRIVATE["flat"]()._replace(private=private)
    algorithm = leaking(aggregator)
    before = algorithm.init({"w": jnp.zeros(3)})
    sizes = [float(algorithm.round(before, c)[0].server) for c in (first, whole)]
    assert sizes == ([0.0, 0.0] if private else [3.0, 4.0])


@pytest.mark.parametrize("kind", sorted(registry.PRIVATE))
@pytest.mark.parametrize(
  ("name", "changes"),
  [
    ("fed_nova", {"tau_eff": None}),
    ("scaffold", {"expected_cohort": None}),
    ("hyp_cluster", {"cluster_share": None}),
  ],
)
def test_a_quantity_that_would_not_be_public_is_refused(kind, name, changes):
  (argument,) = changes
  with refuses(argument) as caught:
    registry.build(name, registry.PRIVATE[kind](), **changes)
  assert "\n" not in str(caught.value)
  registry.build(name, **changes)  # without privacy it is the paper's


def test_private_aggregators_say_so():
  assert all(make().private for make in registry.PRIVATE.values())
  plain = (federated.weighted_mean(), median(), federated.krum(1))
  assert not any(aggregator.private for aggregator in plain)


@pytest.mark.parametrize(
  ("argument", "value"),
  [("cluster_share", 0.0), ("cluster_share", 1.5), ("cluster_share", np.nan)],
)
def test_a_public_share_is_a_share(argument, value):
  with refuses("cluster_share"):
    registry.build("hyp_cluster", **{argument: value})


def test_clusters_need_a_mean():
  with refuses("aggregator"):
    registry.build("hyp_cluster", median())


@pytest.mark.slow
def test_a_model_that_nobody_chose_moves_by_the_noise_of_one_mean():
  """Noise over the public share, never noise over a noisy count."""
  width, share, moved = 2000, 0.5, []
  algorithm = registry.build("hyp_cluster", registry.PRIVATE["flat"](), cluster_share=share)
  models = {"w": jnp.stack([jnp.zeros(width), jnp.full(width, 50.0)])}
  cohort = from_batches([np.zeros((2, width), np.float32)] * 3, batch_size=2)
  state, _ = algorithm.round(algorithm.init(models), cohort)
  assert state.memories.all()[:3].tolist() == [0, 0, 0]
  moved = np.asarray(state.params["w"][1]) - 50.0
  std = 2.0 * registry.CLIP / registry.DIVISOR / share
  assert 0.93 * std < moved.std() < 1.07 * std
  assert np.abs(moved).max() < 6 * std


@pytest.mark.long
def test_private_fed_nova_goes_where_the_clients_go():
  own = [np.full((n, 3), 3.0, np.float32) for n in (2, 6, 4)] * 10
  cohort = from_batches(own, batch_size=1)
  plan = registry.plan(
    noise_multiplier=0.5, normalize_by=30.0, l2_clip_norm=0.5, num_steps=30
  )
  aggregator = federated.central(plan, registry.NOISE)
  algorithm = registry.build("fed_nova", aggregator, tau_eff=4.0)
  state = algorithm.init({"w": jnp.zeros(3)})
  for _ in range(30):
    state, _ = algorithm.round(state, cohort)
  assert np.linalg.norm(state.params["w"] - 3.0) < 0.3 * np.linalg.norm(np.full(3, 3.0))


# --- local noise


_ONE_STEP = lambda w, x: jnp.sum(w * x)


def _sent(wrap, value, weighting=uniform):
  client = wrap(local_training(_ONE_STEP, optax.sgd(1.0), weighting=weighting))
  received = federated.client.Received(jnp.zeros(50))
  context = Context(received, None, None, jax.random.key(3), None)
  cohort = from_batches([np.full((2, 50), value, np.float32)])
  return client_loop.loop_clients()(client, None)(context, cohort)


@pytest.mark.cases(slow=["1e+38-False"], long=...)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("value", [0.5, 1e38])
def test_with_local_noise_a_client_moves_its_message_by_its_bound(inside, value):
  """The same key, other data: at most C from an empty message, and nothing but it is sent."""

  def wrap(client):
    client = compressed(client, quantize(2)) if inside else client
    return client_noise(client, l2_clip_norm=0.5, noise_multiplier=1.0)

  there, nothing = _sent(wrap, value, federated.by_examples), _sent(wrap, 0.0)
  moved = np.linalg.norm(there.sent.message["delta"] - nothing.sent.message["delta"])
  assert moved <= 0.5 * (1 + 1e-5)
  assert there.sent.weight.tolist() == nothing.sent.weight.tolist() == [1.0]
  assert there.info.upload_bits.tolist() == [32 * 50]  # noise is not compressed


@pytest.mark.cases(quick=["0.0"], long=...)
@pytest.mark.parametrize("weight", [np.nan, -1e38, 1e38, 0.0])
def test_no_weight_breaks_the_bound(weight):
  rule = lambda n: jnp.full_like(jnp.asarray(n, jnp.float32), weight)
  wrap = lambda client: client_noise(client, l2_clip_norm=0.5, noise_multiplier=1.0)
  there, nothing = _sent(wrap, 0.3, rule), _sent(wrap, 0.0)
  moved = np.linalg.norm(there.sent.message["delta"] - nothing.sent.message["delta"])
  assert moved <= 0.5 * (1 + 1e-5) and there.sent.weight.tolist() == [1.0]


# --- cohorts that do not belong to what is promised


def _federation():
  x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
  dataset = data.from_arrays(x, np.zeros(12, int), num_classes=1)
  return data.Federation(dataset, np.split(np.arange(12), 6))


def _loss(w, example):
  return problems.quadratic(w, example.x)


def _drawn(plan):
  return list(federated.cohorts(plan, _federation(), federated.LocalWork(2), rng=5))


def _rounds(aggregator, cohorts, state=None):
  algorithm = registry.build("fed_avg", aggregator, loss_fn=_loss)
  state = algorithm.init({"w": jnp.zeros(3)}) if state is None else state
  for cohort in cohorts:
    state, _ = algorithm.round(state, cohort)
  return state


def test_a_plans_cohorts_with_its_own_noise_are_a_run():
  assert int(_rounds(registry.PRIVATE["flat"](), _drawn(registry.plan())).round) == 3


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize("change", [{}, {"l2_clip_norm": 1.0}, {"num_steps": 4}])
def test_an_algorithm_draws_the_cohorts_of_the_plan_whose_noise_it_adds(change):
  """The plan is given once; only by hand can the two be another's."""
  plan = registry.plan(**change)
  algorithm = registry.build(
    "fed_avg", federated.central(plan, registry.NOISE), loss_fn=_loss
  )
  work, state = federated.LocalWork(2), algorithm.init({"w": jnp.zeros(3)})
  drawn = algorithm.cohorts(_federation(), work, rng=5)
  for cohort, other in zip(drawn, _drawn(plan), strict=True):
    np.testing.assert_array_equal(cohort.ids, other.ids)
    state, _ = algorithm.round(state, cohort)
  assert int(state.round) == plan.num_steps
  (late,) = algorithm.cohorts(_federation(), work, rng=5, start=plan.num_steps - 1)
  np.testing.assert_array_equal(late.ids, cohort.ids)


def test_without_privacy_a_plan_is_named_or_nothing_is_drawn():
  with refuses("aggregator") as caught:
    registry.build("fed_avg").cohorts(_federation(), federated.LocalWork(2), rng=5)
  assert "\n" not in str(caught.value)
  with refuses("plan"):
    median().drawn_by(registry.plan())
  quiet = registry.plan(noise_multiplier=0.0)
  algorithm = registry.build("fed_avg", median().drawn_by(quiet), loss_fn=_loss)
  drawn = algorithm.cohorts(_federation(), federated.LocalWork(2), rng=5)
  assert len(list(drawn)) == quiet.num_steps


@pytest.mark.parametrize(
  ("change", "field"),
  [
    ({"noise_multiplier": 9.0}, "cohort"),
    ({"l2_clip_norm": 1.0}, "cohort"),
    ({"normalize_by": 3.0}, "cohort"),
    ({"sampler": sampling.PoissonSampler(sampling_prob=0.25, capacity=40)}, "cohort"),
    ({"num_steps": 4}, "cohort"),
  ],
)
def test_cohorts_of_another_plan_are_refused(change, field):
  cohorts = _drawn(registry.plan(**change))
  with refuses(field) as caught:
    _rounds(registry.PRIVATE["flat"](), cohorts[:1])
  assert "\n" not in str(caught.value)


def test_cohorts_of_a_private_plan_need_noise():
  cohorts = _drawn(registry.plan())
  for aggregator in (None, median()):
    with refuses("aggregator"):
      _rounds(aggregator, cohorts[:1])
  assert int(_rounds(None, _drawn(registry.plan(noise_multiplier=0.0))).round) == 3


def test_a_cohort_serves_the_round_it_was_drawn_for():
  cohorts = _drawn(registry.plan())
  for wrong in (cohorts[1:], cohorts + cohorts[:1]):
    with refuses("cohort"):
      _rounds(registry.PRIVATE["flat"](), wrong)


def test_a_client_twice_in_a_cohort_is_refused():
  cohort = from_batches(problems.ragged((2, 2)))._replace(ids=np.array([1, 1]))
  for name in ("fed_avg", "scaffold"):
    algorithm = registry.build(name)
    with refuses("cohort.ids"):
      algorithm.round(registry.start(name, algorithm), cohort)


# --- rounds are pure, and nothing breaks them


def _bits(tree):
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(_numbers(tree))]


_plain = functools.cache(registry.build)


def _numbers(tree):
  """The same tree with the words of keys, and the rows of clients' states."""

  def numbers(leaf):
    if isinstance(leaf, ClientStates):
      return leaf.all()
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf

  return jax.tree.map(numbers, tree)


@pytest.mark.cases(quick=[3], long=...)
@pytest.mark.parametrize("name", sorted(registry.ALGORITHMS))
def test_a_round_is_a_pure_function(name):
  """Twice from one state: the same bits; the state before is what it was, and usable."""
  algorithm = _plain(name)
  _, cohort = _cohorts(1.0)
  state, _ = algorithm.round(registry.start(name, algorithm), cohort)
  before = _bits(state)
  once, _ = algorithm.round(state, cohort)
  algorithm.round(once, cohort)
  twice, _ = algorithm.round(state, cohort)
  assert _bits(once) == _bits(twice) and _bits(state) == before
  assert _bits(once.params) != _bits(state.params)


@pytest.mark.cases(quick=[3], long=...)
@pytest.mark.parametrize("name", sorted(registry.ALGORITHMS))
def test_strange_cohorts_leave_a_finite_state(name):
  """Nobody; nobody with an example; one with numbers that cannot be trained on."""
  algorithm = _plain(name)
  state = registry.start(name, algorithm)
  nobody = from_batches([np.zeros((0, 3), np.float32)] * 2, batch_size=2)
  for cohort in (
    nobody,
    nobody._replace(ids=nobody.ids[:0], batches=(), num_examples=nobody.num_examples[:0]),
  ):
    state, _ = algorithm.round(state, cohort)
  noisy = "noise" in name
  moved = _distance(state.params, registry.start(name, algorithm).params)
  assert moved == 0 or noisy
  for value in (np.nan, 1e15):
    _, cohort = _cohorts(value)
    state, _ = algorithm.round(state, cohort)
  finite = [np.isfinite(leaf).all() for leaf in jax.tree.leaves(_numbers(state))]
  assert all(finite)


def test_error_feedback_outlives_a_message_that_is_not_finite():
  algorithm = registry.build("fed_avg error feedback")
  state = registry.start("fed_avg error feedback", algorithm)
  for value in (1.0, np.nan, 1.0):
    state, _ = algorithm.round(state, _cohorts(value)[1])
  assert float(jnp.abs(state.memories.all()["left_out"]["delta"]["w"][3]).max()) > 0


def test_error_feedback_names_the_memory_that_it_needs():
  wrap = lambda client: compressed(client, top_k(0.5), error_feedback=True)
  algorithm = registry.build("fed_avg", wrap=wrap)
  with refuses("error_feedback"):
    registry.start("fed_avg", algorithm)


def test_mime_lite_has_one_aggregator():
  assert "gradient_aggregator" not in inspect.signature(federated.mime_lite).parameters
