"""A server of separate clients cannot take their noise away, whatever it holds or asks."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import sampling
from dpjax.federated import (
  client_noise,
  fed_avg,
  from_batches,
  local_training,
  loop_clients,
  pmap_clients,
  vmap_clients,
)
from dpjax.federated import round as round_lib
from dpjax.federated.client import Received
from dpjax.federated.cohort import Cohort
from dpjax.federated.execution.context import Context
from dpjax.federated.transport import flower, remote
from dpjax.key_uses import KeyUse
from dpjax.noise import source
from dpjax.plan import Plan
from dpjax.validate import UserError
from tests.refuses import refuses

_SIZE, _STD = 3000, 2.5 * 0.4
_SECRET = "4711-0815"


def _silent(w, x):
  """Trains to nothing: what such a client sends is its noise."""
  return 0.0 * jnp.sum(w) * jnp.sum(x)


def local_data(client, round):
  """Clients of different sizes: 1, 6, 11, ... examples."""
  own = np.ones((1 + 5 * client, 1), np.float32)
  return from_batches([own], batch_size=4).batches[0], len(own)


def failing(client, round):
  """Client 2 has trouble with its data, and says with which."""
  if client == 2:
    raise ValueError(f"row {_SECRET} is odd")
  return local_data(client, round)


def _noisy():
  return client_noise(
    local_training(_silent, optax.sgd(0.1)), l2_clip_norm=0.4, noise_multiplier=2.5
  )


def _key_of_round(state):
  """Of the clients in the round that comes next; each folds in its own number."""
  return round_lib._of_round(source.from_words(state.key), state.round)[0]


class World:
  """A server with three noisy clients, and all that the server ever gets to see."""

  def __init__(self, folder, key=0):
    self.params, self.client = jnp.zeros(_SIZE), _noisy()
    plan = Plan(
      sampler=sampling.PoissonSampler(sampling_prob=1.0, capacity=9), noise_multiplier=0.0,
      l2_clip_norm=np.inf, normalize_by=3.0, num_steps=4, delta=1e-3,
    )  # fmt: skip
    self.options = dict(plan=plan, num_clients=3, rng=7)
    self.make = lambda aggregator, map_clients: fed_avg(
      _silent, optax.sgd(0.1), None, aggregator, map_clients, key=jax.random.key(key),
      wrap=lambda client: self.client,
    )  # fmt: skip
    self.server = flower._Server(self.make, self.params, **self.options)
    self.folder, self.answers, self.seen = folder, [], []

  def clients(self, folder=None, **changes):
    """Their programs, as after a fresh start."""
    options = dict(num_rounds=4, folder=folder or self.folder) | changes
    return remote.Client(self.client, local_data, self.params, **options)

  def held(self):
    """Every array and number in the server's hands now."""
    server, config = self.server, self.server.settings()
    facts = [*config.values(), server._draws.seed, server.num_clients]
    for leaf in jax.tree.leaves((server.state, _key_of_round(server.state))):
      is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
      facts.append(np.asarray(jax.random.key_data(leaf) if is_key else leaf))
    return facts

  def round(self):
    """One round in this process; [answer of each client]."""
    own, answers = self.clients(), {}
    for who in self.server.draw():
      self.seen += self.held()
      sent = own.answer(who, self.server.settings()["round"], self.server.state.params)
      answers[who] = sent
    self.server.close(answers)
    self.seen += self.held()
    self.answers += [answers[who] for who in sorted(answers)]
    return [np.asarray(answers[who].message["delta"]) for who in sorted(answers)]

  def _keys(self):
    """Keys made of all that was held, of both kinds, by the foldings of this library."""
    words = [np.ravel(np.asarray(held)) for held in (self.seen or self.held())]
    small = {int(w[0]) for w in words if w.size == 1 and w[0] == int(w[0]) >= 0}
    pairs = {tuple(w) for w in words if w.dtype == np.uint32 and w.size == 2}
    wrap = lambda data: jax.random.wrap_key_data(jnp.array(data, jnp.uint32))
    keys = [jax.random.key(number) for number in small] + [wrap(pair) for pair in pairs]
    as_bytes = [np.array(pair, np.uint32).tobytes() * 4 for pair in pairs]
    keys += [source.key_from_bytes(data) for data in as_bytes]
    fold = jax.random.fold_in
    once = [fold(key, n) for key in keys for n in (*range(3), np.uint32(KeyUse.CLIENTS))]
    twice = [
      fold(fold(key, np.uint32(KeyUse.CLIENTS)), r) for key in keys for r in range(3)
    ]
    return keys + once + twice

  def reproduced(self):
    """[(client, key)] for which the client's own program, run with a key of the server's,
    gives what it sent, or what it sent up to the grid of release noise."""
    run, found = loop_clients()(self.client, None), []
    sent = [np.asarray(answer.message["delta"]) for answer in self.answers]
    for key, who in itertools.product(self._keys(), range(3)):
      batches, count = local_data(who, 0)
      cohort = Cohort(np.array([who]), np.array([count]), (batches,))
      context = Context(Received(self.params), None, None, key, None)
      guess = np.asarray(run(context, cohort).sent.message["delta"][0])
      # A tenth of the noise left would be far too much; 1.4 is what another draw leaves.
      found += [who for own in sent if np.std(own - guess) < 0.7 * _STD]
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory):
  """(the world, [[noise of each client] of each round])."""
  world = World(tmp_path_factory.mktemp("clients"))
  return world, [world.round() for _ in range(2)]


@pytest.mark.slow
def test_nothing_that_the_server_holds_gives_a_clients_noise(played):
  world, _ = played
  assert len(world.answers) == 6 and world.reproduced() == []


@pytest.mark.long
def test_noise_from_what_the_server_sends_would_have_been_found(tmp_path, monkeypatch):
  """As it once was: the key of the round, which server and clients all know."""
  world = World(tmp_path)
  monkeypatch.setattr(remote, "_new_key", lambda: _key_of_round(world.server.state))
  world.round()
  assert sorted(set(world.reproduced())) == [0, 1, 2]


@pytest.mark.slow
def test_noises_have_their_law_and_differ_between_clients_and_rounds(played):
  noises = np.array([one for round in played[1] for one in round])
  assert noises.shape == (6, _SIZE)
  np.testing.assert_allclose(noises.std(axis=1), _STD, rtol=0.07)
  correlations = np.corrcoef(noises)[np.triu_indices(6, 1)]
  assert np.abs(correlations).max() < 5.5 / np.sqrt(_SIZE)


@pytest.mark.slow
def test_two_runs_of_one_seed_share_no_noise(played, tmp_path):
  again = World(tmp_path).round()
  for one, other in zip(played[1][0], again):
    assert abs(np.corrcoef(one, other)[0, 1]) < 5.5 / np.sqrt(_SIZE)


@pytest.mark.slow
def test_the_server_is_told_message_and_weight_and_no_number_of_examples(played):
  world, _ = played
  assert set(world.server.settings()) == {"round"}
  for answer in world.answers:
    assert answer._fields == ("message", "weight")
    assert set(answer.message) == {"delta"} and float(answer.weight) == 1.0
  for info in world.server.infos:
    assert np.isnan(info.train_loss)
    assert info.clients.num_examples.tolist() == info.clients.num_steps.tolist() == [0] * 3


@pytest.mark.cases(long=["True"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_round_is_answered_once_also_after_a_restart_and_in_another_run(
  tmp_path, restarted
):
  world = World(tmp_path)
  own = world.clients()
  own.answer(1, 0, world.params)
  later = World(tmp_path, key=5).clients() if restarted else own
  with refuses("round", value=0) as caught:
    later.answer(1, 0, world.params + 1)
  assert "\n" not in str(caught.value)
  later.answer(1, 1, world.params)  # the next one is
  later.answer(2, 0, world.params)  # and another client's


@pytest.mark.parametrize(
  "round", [4, -1, 10**9, True, 0.0, "0", None, [0], np.int64(0)], ids=repr
)
def test_no_more_answers_than_the_client_pays_for(tmp_path, round):
  world = World(tmp_path)
  with refuses("round"):
    world.clients().answer(0, round, world.params)
  assert not list(tmp_path.iterdir())


def test_asked_many_times_at_once_it_answers_once(tmp_path):
  world, got, refused = World(tmp_path), [], []
  programs = [world.clients() for _ in range(6)]
  start = threading.Barrier(len(programs))

  def ask(own):
    start.wait()
    try:
      got.append(own.answer(0, 3, world.params))
    except UserError:
      refused.append(own)

  threads = [threading.Thread(target=ask, args=(own,)) for own in programs]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(got) == 1 and len(refused) == 5


def test_a_round_that_was_cut_off_stays_answered(tmp_path):
  """Its noise may have been seen: a repeated round is a dropped one, not a second message."""
  world = World(tmp_path)
  own = remote.Client(world.client, failing, world.params, num_rounds=4, folder=tmp_path)
  with pytest.raises(ValueError, match=_SECRET):
    own.answer(2, 0, world.params)
  with refuses("round"):
    world.clients().answer(2, 0, world.params)


@pytest.mark.parametrize(
  "given",
  [None, [np.ones(3)], np.ones((2, 3)), local_data(0, 0)[0], (np.ones(3), 3)],
  ids=["None", "list", "array", "batches alone", "arrays and a number"],
)
def test_data_that_are_no_batches_are_one_line(tmp_path, given):
  world = World(tmp_path)
  own = remote.Client(
    world.client, lambda *_: given, world.params, num_rounds=4, folder=tmp_path
  )
  with refuses("local_data") as caught:
    own.answer(2, 0, world.params)
  assert "\n" not in str(caught.value)


@pytest.mark.cases(long=[1])
@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"num_rounds": 0}, "num_rounds"),
    ({"folder": "clients"}, "folder"),
  ],
)
def test_mistakes_are_one_line(tmp_path, changes, field):
  with refuses(field) as caught:
    World(tmp_path).clients(**changes)
  assert "\n" not in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("make", [loop_clients, vmap_clients, pmap_clients])
def test_simulated_clients_have_keys_of_their_own(make):
  """One program holds all keys there; still no two messages share their noise."""
  own = [np.ones((n, 1), np.float32) for n in (1, 6, 2, 3)]
  cohort = from_batches(own, batch_size=4)._replace(ids=np.array([7, 0, 3, 8]))
  noises = []
  for round in range(2):
    key = jax.random.fold_in(jax.random.key(0), round)
    context = Context(Received(jnp.zeros(_SIZE)), None, None, key, None)
    noises += list(make()(_noisy(), None)(context, cohort).sent.message["delta"])
  np.testing.assert_allclose(np.std(noises, axis=1), _STD, rtol=0.07)
  correlations = np.corrcoef(np.array(noises))[np.triu_indices(8, 1)]
  assert np.abs(correlations).max() < 5.5 / np.sqrt(_SIZE)
