"""Canary clients: coins and what a losing one leaves, what is sent, what scores can tell."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import federated
from dpjax.auditing import canary_clients as cc
from dpjax.auditing import lower_bounds
from dpjax.data import Federation, from_arrays
from dpjax.federated.cohort import LocalWork, cohort_of
from tests import plans
from tests.refuses import refuses

_RELATIONS = ("add_or_remove_one", "replace_one", "replace_special")


def _federation(num_clients=40, each=3, seed=0):
  rng = np.random.default_rng(seed)
  n = num_clients * each
  rows = from_arrays(rng.normal(size=(n, 5)), rng.integers(0, 3, n), num_classes=3)
  return Federation(rows, np.split(np.arange(n), num_clients))


def _insert(federation, **options):
  return cc.insert_canary_clients(federation, **{"num_canaries": 20, "seed": 3, **options})


# --- coins, and what a losing one leaves


@pytest.mark.cases(long=["mislabelled-add_or_remove_one"])
@pytest.mark.parametrize("relation", _RELATIONS)
@pytest.mark.parametrize("kind", cc.CLIENT_KINDS)
def test_a_losing_coin_leaves_what_the_relation_says(kind, relation):
  federation = _federation()
  made, canaries = _insert(federation, kind=kind, neighboring_relation=relation)
  won, lost = int(canaries.included.sum()), int((~canaries.included).sum())
  assert won and lost
  removed = relation == "add_or_remove_one"
  assert made.num_clients == 40 - lost * removed
  held = {client: made.client(client).x for client in made.client_ids}
  empty = sum(len(x) == 0 for x in held.values())
  assert empty == (lost if relation == "replace_special" else 0)
  as_before = sum(
    np.array_equal(x, federation.client(client).x) for client, x in held.items()
  )
  others = 20 + (won if kind == "mislabelled" else 0)  # whose labels alone are wrong
  stays = lost if relation == "replace_one" and kind not in cc.SENDERS else 0
  assert as_before == others + stays
  if kind in cc.SENDERS:
    numbers = np.concatenate([canaries.numbers[rows] for rows in made.indices])
    expected = {i + 1 for i in np.flatnonzero(canaries.included)}
    if relation == "replace_one":  # who is out pulls the other way
      expected |= {-(i + 1) for i in np.flatnonzero(~canaries.included)}
    assert set(numbers) == {0, *expected}
    assert canaries.numbers is not None
    for number, place in enumerate(canaries.places):
      rows = [] if place < 0 else canaries.numbers[made.indices[place]]
      assert set(rows) <= {number + 1, -(number + 1)}
      assert len(rows) == (canaries.included[number] or relation == "replace_one")
  gone = ~canaries.included & removed
  assert np.array_equal(canaries.places < 0, gone)


@pytest.mark.cases(long=["direction", "mislabelled"])
@pytest.mark.parametrize("kind", cc.CLIENT_KINDS)
def test_coins_are_fair_and_nothing_else_depends_on_them_or_on_others(kind):
  """Which clients are canaries, and their directions, are functions of the seed alone."""
  included = np.stack([_insert(_federation(), seed=s)[1].included for s in range(200)])
  assert abs(included.mean() - 0.5) < 4 * 0.5 / np.sqrt(included.size)
  pairs = np.corrcoef(included.T) - np.eye(20)
  assert np.abs(pairs).max() < 0.35  # 190 pairs of 200 coins
  one, other = (_insert(_federation(seed=seed), kind=kind)[1] for seed in (0, 1))
  assert np.array_equal(one.included, other.included)
  if kind == "direction":
    assert np.array_equal(one.numbers, other.numbers)
  else:
    assert np.array_equal(one.owners, other.owners)


def test_clients_without_records_are_canaries_like_all_others():
  """Else the data of one user would decide who all of them are."""
  full = _federation()
  empty = Federation(full.dataset, [[] for _ in range(39)] + [full.indices[39]])
  for kind in ("direction", "mislabelled"):
    made = [_insert(f, kind=kind, num_canaries=40)[1] for f in (full, empty)]
    assert np.array_equal(made[0].included, made[1].included)


@pytest.mark.long
def test_directions_are_unit_random_and_all_but_orthogonal():
  params = {"w": jnp.zeros((30, 7)), "b": jnp.zeros(11)}
  made = cc.directions(params, num_canaries=60, seed=1)
  trees = jax.vmap(made.one, in_axes=(0, None))(jnp.arange(60), params)
  rows = np.concatenate([trees["b"], trees["w"].reshape(60, -1)], axis=1)  # [m, d]
  gram = rows @ rows.T
  np.testing.assert_allclose(np.diag(gram), 1.0, rtol=1e-5)
  assert np.abs(gram - np.eye(60)).max() <= 2 * 60 / 221
  given = np.random.default_rng(0).normal(size=221)
  flat = np.asarray(made.along(jnp.asarray(given, jnp.float32)))
  np.testing.assert_allclose(flat, rows @ given, rtol=1e-4, atol=1e-5)
  cosines = [
    cc.directions(params, num_canaries=60, seed=s).along(jnp.asarray(given, jnp.float32))[7]
    / np.linalg.norm(given)
    for s in range(100)
  ]  # of one canary's direction, over seeds: N(0, 1 / d)
  assert 0.7 < np.std(cosines) * np.sqrt(221) < 1.3 and abs(np.mean(cosines)) < 0.03


# --- what is sent


def _loss(w, example):
  return 0.5 * jnp.sum((w["w"] - jnp.mean(example.x)) ** 2)


@pytest.mark.long
@pytest.mark.parametrize(
  ("execution", "relation"),
  [
    (federated.loop_clients, "replace_one"),
    (federated.vmap_clients, "add_or_remove_one"),
    (federated.pmap_clients, "add_or_remove_one"),
  ],
)
def test_canaries_send_their_directions_and_honest_clients_what_they_would(
  execution, relation
):
  params, clip = {"w": jnp.zeros(64)}, 0.5
  made, canaries = _insert(_federation(), neighboring_relation=relation)
  directions = cc.directions(params, num_canaries=20, seed=3)
  inner = execution()
  mapped = cc.sending(inner, directions, l2_clip_norm=clip)

  def mean(map_clients, ids, mark):
    algorithm = federated.fed_avg(
      _loss,
      optax.sgd(0.3),
      map_clients=map_clients,
      key=jax.random.key(0),
      weighting=federated.by_examples,
    )
    cohort = cohort_of(made, ids, LocalWork(batch_size=2), seed=1, round=0)
    if mark:
      (cohort,) = cc.mark([cohort], canaries)
    state, info = algorithm.round(algorithm.init(params), cohort)
    return np.asarray(state.params["w"]), info

  numbers = np.array([canaries.numbers[rows[0]] for rows in made.indices])
  honest = np.flatnonzero(numbers == 0)[:3]
  given, _ = mean(inner, honest, False)
  marked, _ = mean(mapped, honest, True)
  np.testing.assert_allclose(marked, given, rtol=1e-6)
  some = np.flatnonzero(numbers)[[0, 3, 4]]
  sent = [
    np.sign(n) * np.asarray(directions.one(jnp.int32(abs(n) - 1), params)["w"])
    for n in numbers[some]
  ]
  found, _ = mean(mapped, [*honest, *some], True)
  # weights: 3 examples each of the honest, 1 of each canary
  expected = (9 * given + 1e3 * clip * np.sum(sent, axis=0)) / 12
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_what_else_a_message_holds_is_zero():
  params = {"w": jnp.zeros(64)}
  made, canaries = _insert(_federation(), num_canaries=40)
  directions = cc.directions(params, num_canaries=40, seed=3)
  algorithm = federated.scaffold(
    _loss,
    optax.sgd(0.3),
    client_learning_rate=0.3,
    num_clients=40,
    map_clients=cc.sending(federated.loop_clients(), directions, l2_clip_norm=1.0),
    key=jax.random.key(0),
  )
  cohort = cohort_of(made, [0, 1], LocalWork(), seed=1, round=0)
  state, _ = algorithm.round(
    algorithm.init(params, 40), next(iter(cc.mark([cohort], canaries)))
  )
  assert float(jnp.abs(state.server.control["w"]).max()) == 0
  assert float(jnp.linalg.norm(state.params["w"])) > 500


# --- scores


@pytest.mark.long
def test_a_crowd_in_few_directions_does_not_drown_canaries():
  """Honest clients that move a matrix along one rank, and one coordinate far."""
  rng = np.random.default_rng(0)
  like = {"w": jnp.zeros((128, 64))}
  directions = cc.directions(like, num_canaries=100, seed=0)
  crowd = 30 * np.outer(rng.normal(size=128), rng.normal(size=64)) / 10
  crowd[3, 4] += 500
  one = directions.one(jnp.int32(5), like)["w"]
  moved = {"w": jnp.asarray(crowd + rng.normal(size=(128, 64)), jnp.float32) + 8 * one}
  plain = np.asarray(directions.along(moved["w"].ravel()))
  robust = np.asarray(cc.along(directions, moved))
  z = lambda x: (x[5] - np.delete(x, 5).mean()) / np.delete(x, 5).std()
  assert z(robust) > 5 > 4 > z(plain)


def _heard_in_rounds(prob, shared, *, present=True, rounds=30, noise=0.5, seed=0):
  """(scores [m] of rounds in which all honest clients move alike, which canaries are in)."""
  rng = np.random.default_rng(seed)
  like = {"w": jnp.zeros(1024)}
  directions = cc.directions(like, num_canaries=40, seed=seed)
  each = np.stack([directions.one(jnp.int32(i), like)["w"] for i in range(40)])
  coins = np.arange(40) % 2 == 0
  crowd = shared * rng.normal(size=1024) / 32
  tx = cc.watching(directions, unit=1.0, sampling_prob=prob, present=present)
  state = tx.init(like)
  update = jax.jit(tx.update)
  for _ in range(rounds):
    part = rng.random(40) < prob
    if present:
      state = state._replace(present=jnp.asarray(part, jnp.float32))
    moved = crowd + (coins & part) @ each + rng.normal(0, noise, 1024)
    _, state = update({"w": jnp.asarray(-moved, jnp.float32)}, state)
  return np.asarray(state.scores), coins


@pytest.mark.cases(slow=["False"])
@pytest.mark.parametrize("present", [True, False])
def test_what_honest_clients_share_in_all_rounds_hides_no_canary(present, monkeypatch):
  def apart(shared):
    """The mean distance of both sides, in their spread, over three runs."""
    found = []
    for seed in range(3):
      scores, coins = _heard_in_rounds(0.25, shared, present=present, seed=seed)
      gap = scores[coins].mean() - scores[~coins].mean()
      found.append(gap / np.sqrt((scores[coins].var() + scores[~coins].var()) / 2))
    return np.mean(found)

  projected = apart(20.0), apart(0.0)
  monkeypatch.setattr(cc, "_MOST_PROB", 0.0)  # nothing is projected out
  whole = apart(20.0), apart(0.0)
  assert projected[0] > 1.5 * whole[0]
  assert projected[1] > 0.9 * whole[1]  # and little is lost where clients share nothing


def test_canaries_in_every_round_are_not_projected_out():
  scores, coins = _heard_in_rounds(1.0, 0.0)
  assert scores[coins].min() > scores[~coins].max()


def test_a_round_is_scored_as_the_sampled_gaussian_it_is():
  """Against the likelihood ratio in closed form, where no canary of the round is in."""
  rng, z, q = np.random.default_rng(0), 0.5, 0.1
  seen = rng.normal(0, z, 100_000)
  found = np.asarray(cc.round_scores(jnp.asarray(seen), q))
  exact = np.log(1 - q + q * np.exp((seen - 0.5) / z**2))
  np.testing.assert_allclose(found, exact, atol=0.1)
  both = cc.round_scores(jnp.asarray(seen), q, opposite=True)
  far = np.log(1 - q + q * np.exp((-seen - 0.5) / z**2))
  np.testing.assert_allclose(np.asarray(both), exact - far, atol=0.2)
  linear = np.asarray(cc.round_scores(jnp.asarray(seen), 1.0))
  assert np.corrcoef(linear, seen)[0, 1] > 0.9999


# --- a right mechanism is not refuted more often than it may

_CASES = [(1.0, 4, 2.0), (0.2, 20, 0.8)]  # prob, rounds, noise multiplier
_M, _RUNS = 200, 1000


@functools.cache
def _p_value(guesses, correct, epsilon, delta):
  return lower_bounds.one_run_p_value(
    correct=correct, guesses=guesses, num_canaries=_M, epsilon=epsilon, delta=delta
  )


def _refuted(scores, coins, epsilon, delta):
  """Whether `one_run` exceeds an epsilon: some number of guesses refutes it."""
  both = lower_bounds.Scores(scores[coins], scores[~coins])
  both = lower_bounds._joint_ranks(both, delta, 0.95)
  tried = list(lower_bounds._guesses(both, two_sided=False))
  return any(_p_value(k, v, epsilon, delta) <= 0.05 / len(tried) for k, v in tried)


def _simulated(prob, rounds, noise, seed):
  """(scores [runs, m] by every round, coins): each canary along an axis of its own."""
  rng = np.random.default_rng(seed)
  coins = rng.random((_RUNS, _M)) < 0.5
  total = np.zeros((_RUNS, _M))
  score = jax.jit(lambda seen: cc.round_scores(seen, prob))
  for _ in range(rounds):
    part = coins & (rng.random((_RUNS, _M)) < prob)
    total += np.asarray(score(jnp.asarray(part + rng.normal(0, noise, part.shape))))
  return total, coins


@pytest.mark.cases(long=["0.2-20-0.8"], slow=...)
@pytest.mark.parametrize(("prob", "rounds", "noise"), _CASES)
def test_in_1000_runs_the_bound_exceeds_the_proof_as_rarely_as_it_says(prob, rounds, noise):
  plan = plans.of(
    2000, prob=prob, noise_multiplier=noise, normalize_by=1.0, num_steps=rounds
  )
  epsilon = plan.epsilon()
  runs = list(zip(*_simulated(prob, rounds, noise, seed=0)))
  above = np.mean([_refuted(s, c, epsilon, plan.delta) for s, c in runs])
  assert above <= 0.05
  # the test can fail: a claim of a twentieth, and noise that is not there, are refuted
  assert np.mean([_refuted(s, c, epsilon / 20, plan.delta) for s, c in runs]) > 0.5
  quiet = list(zip(*_simulated(1.0, rounds, noise / 100, seed=1)))[:20]
  assert np.mean([_refuted(s, c, min(epsilon, 2.0), plan.delta) for s, c in quiet]) == 1


# --- bad input


def test_canaries_that_join_come_behind_clients_of_whom_nobody_leaves():
  federation = _federation()
  made, canaries = _insert(federation, kind="parameter", num_canaries=60, join=True)
  won = int(canaries.included.sum())
  assert made.num_clients == 40 + won and 0 < won < 60
  for client in range(40):
    np.testing.assert_array_equal(made.indices[client], federation.indices[client])
  numbers = [int(canaries.numbers[rows[0]]) for rows in made.indices[40:]]
  assert numbers == [number + 1 for number in np.flatnonzero(canaries.included)]
  assert canaries.places[canaries.included].tolist() == list(range(40, 40 + won))
  assert (canaries.places[~canaries.included] == -1).all()


def test_canaries_join_clients_that_have_tests_and_empty_records():
  federation = _federation()
  present = np.arange(120) != 7
  federation = dataclasses.replace(
    federation,
    dataset=dataclasses.replace(federation.dataset, present=present),
    test_indices=[np.arange(2)] * 40,
  )
  made, canaries = _insert(federation, kind="parameter", join=True)
  assert made.num_clients == 40 + int(canaries.included.sum())
  assert made.dataset.present[120:].all() and not made.dataset.present[7]


def test_parameters_of_canaries_are_apart_from_the_model_and_from_each_other():
  params = {"model": {"w": jnp.ones(7)}, "canaries": jnp.zeros(3)}
  own = cc.OwnParameters(3)
  sent = [own.one(jnp.int32(number), params) for number in range(3)]
  assert not any(np.any(one["model"]["w"]) for one in sent)
  np.testing.assert_array_equal([one["canaries"] for one in sent], np.eye(3))
  moved = {"model": {"w": 1e9 * jnp.ones(7)}, "canaries": jnp.array([5.0, -2.0, 0.5])}
  np.testing.assert_array_equal(cc.along(own, moved), [5.0, -2.0, 0.5])


@pytest.mark.parametrize(
  ("options", "field"),
  [
    ({"join": True, "kind": "random"}, "kind"),
    (
      {"join": True, "neighboring_relation": "replace_one"},
      "neighboring_relation",
    ),
    ({"num_canaries": 41}, "num_canaries"),
    ({"num_canaries": 1}, "num_canaries"),
    ({"seed": -1}, "seed"),
    ({"kind": "directions"}, "kind"),
    ({"neighboring_relation": "replace_two"}, "neighboring_relation"),
  ],
)
def test_bad_input_is_one_line(options, field):
  with refuses(field) as caught:
    _insert(_federation(), **options)
  assert "\n" not in str(caught.value)


def test_more_canaries_than_parameters_are_refused():
  with refuses("num_canaries", value=65):
    cc.directions({"w": jnp.zeros(64)}, num_canaries=65, seed=0)


def test_canaries_whose_clients_hold_nothing_cannot_train():
  rows = from_arrays(np.zeros((3, 1)), np.zeros(3, int), num_classes=2)
  federation = Federation(rows, [[], [], [0, 1, 2]])
  seed = next(s for s in range(9) if 2 not in _chosen(s))
  with refuses("kind"):
    _insert(federation, num_canaries=2, seed=seed, kind="random")


@pytest.mark.parametrize("kind", ["mislabelled", "random"])
def test_a_row_more_of_one_client_changes_no_canary_of_another(kind):
  """With one stream of draws it changed those of all clients behind it."""
  rng = np.random.default_rng(0)
  rows = from_arrays(rng.normal(size=(61, 2)), rng.integers(0, 5, 61), num_classes=5)
  held = np.split(np.arange(60), 20)
  for client in range(0, 20, 3):
    more = [*held]
    more[client] = np.append(held[client], 60)
    sent = [
      _insert(
        Federation(rows, part),
        num_canaries=20,
        kind=kind,
        neighboring_relation="replace_one",
      )[0]
      for part in (held, more)
    ]
    for place in set(range(20)) - {client}:
      mine, other = (made.client(place) for made in sent)
      assert np.array_equal(mine.x, other.x) and np.array_equal(mine.y, other.y)


def _chosen(seed):
  rows = from_arrays(np.zeros((3, 1)), np.zeros(3, int), num_classes=2)
  federation = Federation(rows, [[0], [1], [2]])
  made, canaries = _insert(
    federation, num_canaries=2, seed=seed, neighboring_relation="replace_one"
  )
  return [i for i, held in enumerate(made.indices) if canaries.numbers[held[0]]]
