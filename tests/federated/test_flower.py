"""Clients as programs of Flower: the numbers of the same algorithm in process."""

import contextlib
import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import norm

from dpjax import sampling
from dpjax.federated import central, fed_avg, from_batches, local_training, scaffold
from dpjax.federated.transport import flower, remote
from dpjax.plan import Plan
from dpjax.sampling.batches import Draws
from dpjax.validate import UserError
from tests import plans
from tests.federated import problems, programs
from tests.refuses import refuses

_HERE = importlib.util.find_spec("flwr") is not None
_KEY, _NOISE = jax.random.key(0), jax.random.key(1)

_SIMULATION = """
import json, sys
sys.path.insert(0, ".")
import jax, jax.numpy as jnp, numpy as np, optax
from flwr.simulation import run_simulation
from dpjax.federated import local_training
from dpjax.federated.transport import flower
from tests.federated import problems, test_flower
folder = sys.argv[1]

params, out = problems.network_params(), {}
client = local_training(problems.network, optax.sgd(0.1))
for name in ("plain", "private"):
  strategy = test_flower.server(name)
  run_simulation(flower.server_app(strategy, num_rounds=3),
                 flower.client_app(client, test_flower.local_data, params, num_rounds=3,
                                   folder=f"{folder}/{name}"),
                 num_supernodes=4, backend_config={"client_resources": {"num_cpus": 1}})
  server = strategy.server
  leaves = jax.tree.leaves(server.state.params)
  out[name] = {"params": [np.asarray(leaf).ravel().tolist() for leaf in leaves],
               "charged": server.plan.spent(server.state).steps if name == "private" else 0,
               "clients": [int(info.num_clients) for info in server.infos]}

# Noise on the clients, one of whom fails with its data in the error.
from tests.federated import test_remote
world, kept = test_remote.World(folder), []
strategy = flower.rounds(world.make, world.params, **world.options)
aggregate = strategy.aggregate_train
def recording(server_round, replies):
  replies = list(replies)
  kept.extend(replies)
  return aggregate(server_round, replies)
strategy.aggregate_train = recording
world.server = strategy.server
sent = [world.held()]
app = flower.client_app(world.client, test_remote.failing, world.params,
                        num_rounds=2, folder=f"{folder}/local")
run_simulation(flower.server_app(strategy, num_rounds=2), app, num_supernodes=3,
               backend_config={"client_resources": {"num_cpus": 1}})
errors = [reply.error.reason for reply in kept if reply.has_error()]
answers = [reply.content for reply in kept if not reply.has_error()]
world.answers = [strategy.server.answer(content["answer"]) for content in answers]
out["local"] = {"errors": errors, "words": [sorted(map(str, content)) for content in answers],
                "weights": [float(answer.weight) for answer in world.answers],
                "found": world.reproduced(), "charged": len(strategy.server.infos)}
print(json.dumps(out))
"""


def plan(name):
  """Half of four clients in a round; three rounds."""
  private = name == "private"
  return plans.of(
    9,
    noise_multiplier=1.0 if private else 0.0,
    l2_clip_norm=0.5 if private else np.inf,
    normalize_by=2.0,
    num_steps=3,
    delta=1e-3,
    unit="user",
  )


def _own():
  return problems.ragged((5, 1, 0, 7), seed=1)


def local_data(client, round):
  """What one client holds: the same in every round."""
  own = _own()[client]
  return from_batches([own], batch_size=2).batches[0], len(own)


def server(name):
  """The strategy of a run."""
  make = lambda aggregator, map_clients: fed_avg(
    problems.network, optax.sgd(0.1), None, aggregator, map_clients, key=_KEY
  )
  noise_key = _NOISE if name == "private" else None
  strategy = flower.rounds(
    make, problems.network_params(), plan=plan(name), num_clients=4, noise_key=noise_key
  )
  # Draws that repeat, so that the run in process has the same.
  strategy.server._draws = Draws(7, 0)
  return strategy


def _in_process(name):
  aggregator = central(plan(name), _NOISE) if name == "private" else None
  algorithm = fed_avg(problems.network, optax.sgd(0.1), None, aggregator, key=_KEY)
  everyone = from_batches(_own(), batch_size=2)
  state, sizes = algorithm.init(problems.network_params()), []
  for step in range(3):
    ids = plan(name).sampler.draw(4, seed=7, step=step)
    batches = [everyone.batches[i] for i in ids]
    cohort = everyone._replace(
      ids=ids, num_examples=everyone.num_examples[ids], batches=batches
    )
    state, info = algorithm.round(state, cohort)
    sizes.append(int(info.num_clients))
  return state, sizes


@pytest.mark.long
@pytest.mark.skipif(not _HERE, reason="needs the flower extra")
def test_a_simulation_is_the_run_in_process_and_hides_local_noise(tmp_path):
  program = programs.start(
    ["-c", _SIMULATION, str(tmp_path)], tmp_path, "flower", FLWR_TELEMETRY_ENABLED="0"
  )
  try:
    assert program.code() == 0, program.err.read_text()[-3000:]
  finally:
    programs.stop([program])
  found = json.loads(program.out.read_text().splitlines()[-1])
  for name in ("plain", "private"):
    state, sizes = _in_process(name)
    expected = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(state.params)]
    for a, b in zip(found[name]["params"], expected):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert found[name]["clients"] == sizes
  assert found["plain"]["charged"] == 0 and found["private"]["charged"] == 3
  assert found["plain"]["params"] != found["private"]["params"]
  local = found["local"]
  assert local["errors"] == ["left out"] * 2  # not the text, which names a secret
  assert local["words"] == [["answer"]] * 4 and local["weights"] == [1.0] * 4
  assert local["found"] == [] and local["charged"] == 2


def _server(name="private", **changes):
  """The part of the server that knows nothing of Flower."""
  make = lambda aggregator, map_clients: fed_avg(
    problems.network, optax.sgd(0.1), None, aggregator, map_clients, key=_KEY
  )
  options = dict(plan=plan(name), num_clients=4, noise_key=_NOISE)
  return flower._Server(make, problems.network_params(), **options | changes)


def test_a_round_that_nobody_answers_is_charged_and_noised():
  server = _server()
  before = server.state.params
  server.draw()
  server.close({})
  assert server.plan.spent(server.state).steps == 1 and int(server.state.round) == 1
  moved = jax.tree.map(
    lambda a, b: float(jnp.sum(jnp.abs(a - b))), before, server.state.params
  )
  assert all(value > 0 for value in jax.tree.leaves(moved))


def test_programs_that_see_when_they_are_asked_need_clients_drawn_apart():
  """Of two clients one is asked, and sends 1, or -1 for the exchanged data, at noise 2. The other
  one knows in half of the rounds that it was the victim's turn."""
  numbers = dict(l2_clip_norm=1.0, normalize_by=1, num_steps=1, delta=0.01, unit="user")
  fixed = Plan(sampler=sampling.FixedSizeSampler(1, 2), noise_multiplier=2.0, **numbers)
  spent = fixed.epsilon()
  told = norm.cdf(0.5 - spent) - np.exp(spent) * norm.cdf(-0.5 - spent)
  assert told / 2 > 3 * fixed.delta
  with refuses("sampler", value="fixed_size"):
    _server(plan=fixed, num_clients=2)
  # Without noise nothing is promised; if all are asked, nobody learns anything from it.
  free = dataclasses.replace(fixed, noise_multiplier=0.0)
  _server(plan=free, num_clients=2, noise_key=None)
  every = dataclasses.replace(fixed, sampler=sampling.FixedSizeSampler(2, 2))
  _server(plan=every, num_clients=2)


def test_what_an_emptied_client_sends_is_not_known_to_the_server():
  # It may be `client_noise`, which is sent without examples, too: twice the clip norm apart.
  emptied = dataclasses.replace(plan("private"), neighboring_relation="replace_special")
  with refuses("neighboring_relation", value="replace_special"):
    _server(plan=emptied)


@pytest.mark.slow
def test_a_server_that_starts_again_does_not_release_the_noise_of_before(tmp_path):
  """Clients answer a round once. So the second start's first round is noise alone, and with the
  noise of the first start its clients' sum would be the difference."""
  every = sampling.PoissonSampler(sampling_prob=1.0, capacity=9)
  every = dataclasses.replace(plan("private"), sampler=every)
  client = local_training(problems.network, optax.sgd(0.1))
  flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])

  def started():
    server = _server(plan=every)
    held_by = remote.Client(
      client, local_data, server.state.params, num_rounds=3, folder=tmp_path
    )
    answers = {}
    for who in server.draw():
      with contextlib.suppress(UserError):
        answers[who] = held_by.answer(who, 0, server.state.params)
    server.close(answers)
    return flat(server.state.params), answers

  (first, answers), (second, nothing) = started(), started()
  assert len(answers) == 4 and not nothing
  sent = [flat(answer.message) for answer in answers.values()]
  total = sum(change * min(1, 0.5 / max(np.linalg.norm(change), 1e-9)) for change in sent)
  left = (first - second) * every.normalize_by - total
  # Two draws of noise of standard deviation .5 are left.
  assert 0.5 < left.std() / (0.5 * np.sqrt(2)) < 1.5


def test_an_algorithm_without_the_noise_of_the_plan_is_refused():
  make = lambda aggregator, map_clients: fed_avg(
    problems.network, optax.sgd(0.1), None, None, map_clients, key=_KEY
  )
  server = flower._Server(
    make, problems.network_params(), plan=plan("private"), num_clients=4, noise_key=_NOISE
  )
  with refuses("aggregator"):
    server.close({})


def test_no_round_after_the_plans_last():
  server = _server()
  for _ in range(3):
    server.draw()
    server.close({})
  with refuses("num_rounds", value=4):
    server.draw()


class _Record:
  def __init__(self, arrays):
    self._arrays = arrays

  def to_numpy_ndarrays(self):
    return self._arrays


def test_an_answer_of_other_shapes_is_refused():
  server = _server()
  good = [np.zeros(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(server._like)]
  server.answer(_Record(good))
  for bad in (good[:-1], [np.zeros(7), *good[1:]], [good[0].astype(np.float64), *good[1:]]):
    with pytest.raises(ValueError, match="other shapes"):
      server.answer(_Record(bad))


@pytest.mark.parametrize("private", [False, True])
def test_a_client_of_ones_own_sends_arrays_in_order(private):
  """Only NumPy: changes in the order of sorted keys, then the weight."""
  noise = {"plan": plan("plain"), "noise_key": None}
  server = _server(**({} if private else noise))
  before = jax.tree.map(np.asarray, server.state.params)
  order = sorted(before)
  assert order == ["a", "b", "c"]

  def answer(size, weight):
    change = [np.full(before[name].shape, size, np.float32) for name in order]
    return server.answer(_Record([*change, np.float32(weight)]))

  server.draw()
  info = server.close({0: answer(1.0, 1.0), 2: answer(4.0, 2.0)})
  moved = {name: server.state.params[name] - before[name] for name in order}
  assert int(info.num_clients) == 2
  if private:
    assert server.plan.spent(server.state).steps == 1
  for change in moved.values():
    # The mean of 1 and, twice, 4. A guarantee has no use for a change that is not clipped.
    assert np.allclose(change, 3.0) != private


def test_clients_that_keep_something_are_refused():
  def make(aggregator, map_clients):
    return scaffold(
      problems.network, optax.sgd(0.1), aggregator=aggregator, map_clients=map_clients, key=_KEY,
      client_learning_rate=0.1, num_clients=4,
    )  # fmt: skip

  with refuses("make"):
    flower._Server(make, problems.network_params(), plan=plan("plain"), num_clients=4)


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"noise_key": None}, "noise_key"),
    ({"plan": plan("plain")}, "noise_key"),
    ({"num_clients": 0}, "num_clients"),
    ({"rng": -1, "plan": plan("plain"), "noise_key": None}, "rng"),
    ({"rng": 7}, "rng"),
  ],
)
def test_mistakes_are_one_line(changes, field):
  with refuses(field) as caught:
    _server(**changes)
  assert "\n" not in str(caught.value)


@pytest.mark.skipif(_HERE, reason="flwr is installed")
def test_without_flwr_one_line_says_what_to_install():
  with pytest.raises(UserError, match=r"flwr: is not installed .*\.\[flower\]"):
    server("plain")


class _Reply:
  def __init__(self, node, content=None, *, record=True):
    self.metadata = type("Metadata", (), {"src_node_id": node})()
    self._content = {"answer": content} if record else {"arrays": content}
    self._failed = content is None

  def has_error(self):
    return self._failed

  @property
  def content(self):
    if self._failed:
      raise ValueError("the secret of this client")
    return self._content


def _aggregated(replies, monkeypatch, capsys):
  """(diagnostics, what is said) of a round in which nodes 10, 11, ... were asked."""
  monkeypatch.setattr(flower, "_arrays", lambda tree: tree)
  strategy = flower._Strategy(_server("plain", plan=plan("plain"), noise_key=None))
  strategy._asked = {10 + client: client for client in range(4)}
  strategy._num_asked = 4
  like = jax.tree.leaves(strategy.server._like)
  strategy.aggregate_train(1, replies(like))
  return strategy.server.infos[-1], capsys.readouterr().err


def test_the_server_counts_every_kind_of_unusable_reply(monkeypatch, capsys):
  def replies(like):
    good = [np.ones(leaf.shape, leaf.dtype) for leaf in like]
    yield _Reply(10, _Record(good))
    yield _Reply(10, _Record(good))  # a second answer is no client
    yield _Reply(11)
    yield _Reply(12, _Record(good), record=False)
    yield _Reply(99, _Record(good))  # was not asked

  info, said = _aggregated(replies, monkeypatch, capsys)
  assert int(info.num_clients) == 1 and int(info.left_out) == 3
  assert "3 of 4" in said and said.count(" 1 ") == 3 and said.count("\n") == 1
  assert "secret" not in said


def test_a_message_of_nan_or_of_other_shapes_is_no_client(monkeypatch, capsys):
  def replies(like):
    good = [np.ones(leaf.shape, leaf.dtype) for leaf in like]
    yield _Reply(10, _Record([np.full_like(good[0], np.nan), *good[1:]]))
    yield _Reply(11, _Record(good[:-1]))
    for node in (12, 13):
      yield _Reply(node, _Record(good))

  info, said = _aggregated(replies, monkeypatch, capsys)
  assert int(info.num_clients) == 2 and int(info.left_out) == 2 and "2 of 4" in said


def test_where_all_replies_are_used_nothing_is_said(monkeypatch, capsys):
  def replies(like):
    for node in range(10, 14):
      yield _Reply(node, _Record([np.ones(leaf.shape, leaf.dtype) for leaf in like]))

  info, said = _aggregated(replies, monkeypatch, capsys)
  assert int(info.num_clients) == 4 and int(info.left_out) == 0 and not said
