"""All executions give one result; on several devices too, with the noise of one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import data
from dpjax.federated import (
  LocalWork,
  by_examples,
  client_noise,
  fed_avg,
  from_batches,
  local_training,
  loop_clients,
  median,
  pmap_clients,
  round,
  scaffold,
  shard_map_clients,
  vmap_clients,
)
from dpjax.federated import client as clients
from dpjax.federated.cohort import cohort_of
from dpjax.federated.execution import client_blocks
from dpjax.federated.execution.client_loop import has_convolution
from dpjax.federated.execution.context import Context
from dpjax.federated.execution.named import auto_clients, by_name
from dpjax.federated.silos import Silos
from dpjax.sampling import FixedSizeSampler
from dpjax.validate import UserError
from tests import commands, plans
from tests.federated import problems
from tests.refuses import refuses

_KEY = jax.random.key(0)
_EXECUTIONS = {
  "loop": loop_clients(),
  "vmap": vmap_clients(),
  "blocks": vmap_clients(clients_per_block=2),
  "pmap": pmap_clients(),
  "shard_map": shard_map_clients(),
}


def _after_two_rounds(make, map_clients):
  cohort = from_batches(problems.ragged(), batch_size=2)
  algorithm = make(map_clients)
  state = algorithm.init(problems.network_params(), num_clients=5)
  for _ in range(2):
    state, info = algorithm.round(state, cohort)
  return state, info


def _fed_avg(map_clients):
  tx = optax.sgd(0.1, momentum=0.9)
  return fed_avg(
    problems.network, tx, map_clients=map_clients, key=_KEY, weighting=by_examples
  )


def _scaffold(map_clients):
  return scaffold(
    problems.network, optax.sgd(0.1), map_clients=map_clients, key=_KEY,
    client_learning_rate=0.1, num_clients=5,
  )  # fmt: skip


def _median(map_clients):
  return fed_avg(problems.network, optax.sgd(0.1), None, median(), map_clients, key=_KEY)


# Differ from a tested pair in nothing that the algorithm would notice.
_SAME_CODE = {("blocks", _median)}
_SAME_CODE |= {("pmap", _fed_avg), ("pmap", _median)}  # eight devices have them below
_SAME_CODE |= {("shard_map", _scaffold), ("shard_map", _median)}


@pytest.fixture(scope="module")
def by_the_book():
  """What the plain Python twin finds, nothing compiled."""
  twin = loop_clients(jit=False)
  return {make: _after_two_rounds(make, twin) for make in (_fed_avg, _scaffold, _median)}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(_EXECUTIONS))
def test_every_execution_is_the_readable_twin(by_the_book, name):
  for make, (expected, wanted) in by_the_book.items():
    if (name, make) in _SAME_CODE:
      continue
    state, info = _after_two_rounds(make, _EXECUTIONS[name])
    problems.assert_trees_close(state.params, expected.params)
    if state.memories is not None:
      problems.assert_trees_close(state.memories.all(), expected.memories.all(), atol=1e-5)
    problems.assert_trees_close(info, wanted, rtol=1e-4)


def _noisy_messages(map_clients, draws):
  """[5, 4], of clients that add noise to what they send, or in every local step."""

  def loss_fn(w, x):
    return jnp.sum(w * x)

  memories = None
  if draws == "message":
    client = clients.local_training(loss_fn, optax.sgd(1.0))
    client = client_noise(client, l2_clip_norm=1.0, noise_multiplier=1.0)
  else:
    plan = plans.of(
      sampler=FixedSizeSampler(batch_size=2, num_examples=2),
      normalize_by=2.0,
      num_steps=1,
      delta=1e-3,
    )
    silos = Silos((plan,) * 5, num_rounds=1)
    client = clients.local_training(loss_fn, optax.sgd(1.0), silos=silos)
    client = round._with_own_noise(client)
    memories = None, silos.noise()
  cohort = from_batches([np.ones((2, 4), np.float32)] * 5, batch_size=2)
  context = Context(clients.Received(jnp.zeros(4)), None, memories, _KEY, None)
  return np.asarray(map_clients(client, None)(context, cohort).sent.message["delta"])


@pytest.mark.cases(slow=["step"], long=...)
@pytest.mark.parametrize("draws", ["message", "step"])
def test_clients_own_noise_is_the_same_in_every_execution(draws):
  """No execution is refused for it, and none pads with a client that shares another's key: noise
  that two share is NaN under vmap, and such messages would be left out without a word."""
  expected = _noisy_messages(loop_clients(), draws)
  assert np.isfinite(expected).all() and len(np.unique(expected)) == expected.size
  for name in ("vmap", "blocks", "shard_map"):
    found = _noisy_messages(_EXECUTIONS[name], draws)
    np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)


@pytest.mark.cases(quick=["_fed_avg-pmap"], long=...)
@pytest.mark.parametrize("name", ["loop", "blocks", "pmap"])
@pytest.mark.parametrize("make", [_fed_avg, _scaffold])
def test_a_round_takes_nothing_away_from_its_state(name, make):
  """Values in, values out: the same state again gives the same round, memories included."""
  cohort = from_batches(problems.ragged(), batch_size=2)
  algorithm = make(_EXECUTIONS[name])
  state = algorithm.init(problems.network_params(), num_clients=5)
  state, _ = algorithm.round(state, cohort)
  kept = lambda state: None if state.memories is None else state.memories.all()
  values = lambda state: jax.tree.leaves((state.params, kept(state), state.round))
  once, again = (values(algorithm.round(state, cohort)[0]) for _ in range(2))
  for a, b in zip(once, again):
    np.testing.assert_array_equal(a, b)
  assert int(state.round) == 1


def _what_it_is_shown():
  """A client that takes whatever it can reach: of each batch all entries, padding too."""

  def step(received, local, examples, mask):
    assert len(jax.tree.leaves(received)) == 1  # the parameters, and no data set
    return jnp.maximum(local, jnp.max(examples.x))

  def finish(received, local):
    info = clients.ClientInfo(local, local, jnp.int32(1), local, local)
    return clients.Sent({"delta": local}, jnp.float32(1)), None, info

  begin = lambda received, memory, n, key: jnp.float32(0)
  return clients.ClientAlgorithm(begin, step, finish)


@pytest.mark.cases(long=["blocks", "loop"])
@pytest.mark.parametrize("name", sorted(_EXECUTIONS))
def test_a_client_is_shown_its_own_rows_and_nothing_of_the_others(name):
  """Also where it is padded to a longer one, and its padding is row 0 of another."""
  x = np.array([100, 2, 2, 2, 3, 3, 3, 3, 3], np.float32)[:, None]
  rows = data.from_arrays(x, np.zeros(9, int), num_classes=1)
  federation = data.Federation(rows, [[0], [1, 2, 3], [4, 5, 6, 7, 8]])
  cohort = cohort_of(federation, [1, 2, 0], LocalWork(batch_size=None), seed=0, round=0)
  context = Context(clients.Received(jnp.zeros(1)), cohort.data, None, _KEY, None)
  found = _EXECUTIONS[name](_what_it_is_shown(), None)(context, cohort)
  assert found.sent.message["delta"].tolist() == [2, 3, 100]


@pytest.mark.cases(slow=["shard_map"], long=...)
@pytest.mark.parametrize(
  "name", ["loop", pytest.param("shard_map", marks=pytest.mark.slow)]
)
def test_no_device_ever_holds_what_all_clients_keep(name):
  """4,999 clients of SCAFFOLD, five of them in a round."""
  held = []

  def watched(client, partial):
    run = _EXECUTIONS[name](client, partial)

    def called(context, cohort):
      held.extend(leaf.shape for leaf in jax.live_arrays())
      mapped = run(context, cohort)
      held.extend(leaf.shape for leaf in jax.live_arrays())
      return mapped

    return called

  made = scaffold(
    problems.network, optax.sgd(0.1), map_clients=watched, key=_KEY,
    client_learning_rate=0.1, num_clients=4999,
  )  # fmt: skip
  state = made.init(problems.network_params(), num_clients=4999)
  for _ in range(2):
    state, _ = made.round(state, from_batches(problems.ragged(), batch_size=2))
  assert np.any(state.memories.rows([0])["a"]) and 0 < len(state.memories.touched) <= 5
  assert held and not [shape for shape in held if 4999 in shape]


def test_a_key_among_what_a_client_keeps_is_one_line():
  memory = lambda params: {"key": jax.random.key(1)}
  made = fed_avg(problems.quadratic, optax.sgd(0.1), key=_KEY, memory=memory)
  with refuses("memory"):
    made.init({"w": jnp.zeros(1)}, num_clients=2)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("run", [loop_clients(), vmap_clients()], ids=["loop", "vmap"])
def test_no_other_client_changes_a_bit_of_a_clients_message(run):
  """Rounded otherwise, chaotic local training would move all messages of a sum by their length."""
  client = local_training(problems.network, optax.sgd(0.3, momentum=0.9))

  def messages(sizes):
    own = [np.tile(rows, (20, 1)) for rows in problems.ragged(sizes)]
    cohort = from_batches(own, batch_size=5)
    context = Context(clients.Received(problems.network_params()), None, None, _KEY, None)
    sent = run(client, None)(context, cohort).sent.message
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:3], sent)

  few, more = messages((6, 9, 3)), messages((6, 9, 3, 60))
  jax.tree.map(np.testing.assert_array_equal, few, more)


def test_infos_come_back_in_the_order_of_the_cohort():
  """Blocks are sorted by length; nobody may notice."""
  _, info = _after_two_rounds(_fed_avg, _EXECUTIONS["blocks"])
  assert info.clients.num_examples.tolist() == [5, 1, 0, 7, 3]
  assert info.clients.num_steps.tolist() == [3, 1, 0, 4, 2]


_ON_DEVICES = """
import json, sys
sys.path.insert(0, ".")
import jax, jax.numpy as jnp, numpy as np, optax
from dpjax import data, sampling
from dpjax.federated import (LocalWork, central, fed_avg, from_batches, loop_clients, median,
                             pmap_clients, scaffold, shard_map_clients)
from dpjax.federated.cohort import cohort_of
from dpjax.plan import Plan
from tests.federated import problems

assert jax.local_device_count() == 8
key, noise_key = jax.random.key(0), jax.random.key(1)
clients = problems.ragged((5, 1, 0, 7, 3, 2, 2, 9, 4, 1, 6), seed=1)
cohort, params = from_batches(clients, batch_size=2), problems.network_params()
plan = Plan(sampler=sampling.PoissonSampler(sampling_prob=0.5, capacity=99), noise_multiplier=1.0,
            l2_clip_norm=0.5, normalize_by=4.0, num_steps=9, delta=1e-3, unit="user")
out = {}
ways = {"loop": loop_clients(), "one": pmap_clients(num_devices=1), "eight": pmap_clients(),
        "sharded": shard_map_clients(), "sharded one": shard_map_clients(num_devices=1)}
values = lambda tree: [np.asarray(leaf).ravel().tolist() for leaf in jax.tree.leaves(tree)]
for name in ("loop", "eight", "sharded"):
  algorithm = fed_avg(problems.network, optax.sgd(0.1), None, central(plan, noise_key),
                      ways[name], key=key)
  state, info = algorithm.round(algorithm.init(params), cohort)
  out[name] = values(state.params)
  algorithm = scaffold(problems.network, optax.sgd(0.1), key=key, map_clients=ways[name],
                       aggregator=central(plan, noise_key), client_learning_rate=0.1,
                       num_clients=11, expected_cohort=4)
  for count in (0, 7, 8, 11):  # fewer, as many and more clients than devices; nobody
    own = from_batches(clients[:count], batch_size=2)
    state, info = algorithm.round(algorithm.init(params, num_clients=11), own)
    out[f"of {count} {name}"] = values((state.params, state.memories.all(), info))
  if name == "loop":
    continue
  with jax.transfer_guard_host_to_device("disallow"):
    with jax.transfer_guard_device_to_device("disallow"):
      algorithm.round(state, own)  # whatever moves was sent on purpose
cut = fed_avg(problems.network, optax.sgd(0.1), None, central(plan, noise_key),
              shard_map_clients(memory_budget=1.0), key=key)  # one client on each device
out["cut"] = values(cut.round(cut.init(params), cohort)[0].params)
for name in ("one", "eight", "sharded one", "sharded"):  # clients that have nothing to say
  silent = fed_avg(lambda w, x: 0.0 * jnp.sum(w), optax.sgd(0.1), None,
                   central(plan, noise_key), ways[name], key=key)
  state, _ = silent.round(silent.init(jnp.zeros(8000)), from_batches([np.ones((1, 1))] * 9))
  out[f"noise {name}"] = np.asarray(state.params).tolist()
rows = data.from_arrays(np.concatenate(clients), np.zeros(40, int), num_classes=1)
federation = data.Federation(rows, np.split(np.arange(40), 8))
def convolve(p, example):
  kernel = p["c"].T.reshape(2, 1, 1, 4)[..., :3]
  return jnp.sum(jnp.tanh(jax.lax.conv(example.x.reshape(1, 1, 1, 3), kernel, (1, 1), "SAME")))
for name in ("loop", "eight", "sharded"):  # rows of one data set, all messages at once
  algorithm = fed_avg(convolve, optax.sgd(0.1), None, median(), ways[name], key=key)
  drawn = cohort_of(federation, [6, 1, 3], LocalWork(2), seed=0, round=0)
  state, _ = algorithm.round(algorithm.init(params), drawn)
  out[f"median {name}"] = values(state.params)
from dpjax.federated.client import ClientAlgorithm, ClientInfo, Received, Sent
from dpjax.federated.execution.context import Context
for axis in ("devices", "batch"):  # a client that would sum over the other clients
  mixing = ClientAlgorithm(
    lambda received, memory, n, key: jnp.zeros(1),
    lambda received, local, batch, mask: jax.lax.psum(local + jnp.sum(mask), axis),
    lambda received, local: (
      Sent({"delta": local}, jnp.float32(1)), None, ClientInfo(*[jnp.float32(0)] * 5)))
  context = Context(Received(jnp.zeros(1), ()), None, None, key, ())
  for name in ("eight", "sharded"):
    try:
      ways[name](mixing, None)(context, from_batches([np.ones((1, 1))] * 9))
      out[f"mixed {axis} {name}"] = "mixed"
    except NameError as error:
      out[f"mixed {axis} {name}"] = str(error)
print(json.dumps(out))
"""


# Every algorithm, and every private aggregator under one of them: largest difference to the
# loop over two rounds, relative to the largest entry of a leaf or to 1.
_ALL = """
import json, sys
sys.path.insert(0, ".")
import jax, numpy as np
from dpjax import federated
from tests.federated import problems, registry
cohort = federated.from_batches(problems.ragged((5, 1, 0, 7, 3, 2)), batch_size=2)
def after(name, map_clients, aggregator):
  algorithm = registry.build(name, aggregator and registry.PRIVATE[aggregator](),
                             map_clients=map_clients)
  state = registry.start(name, algorithm)
  for _ in range(2):
    state, info = algorithm.round(state, cohort)
  memories = state.memories and state.memories.all()
  keep = state._replace(key=0, aggregator=0, memories=memories)
  return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves((keep, info))]
found = {}
cases = [(name, None) for name in registry.ALGORITHMS]
for name, aggregator in cases + [("fed_avg", name) for name in registry.PRIVATE]:
  expected = after(name, federated.loop_clients(), aggregator)
  for way in (federated.pmap_clients, federated.shard_map_clients):
    pairs = zip(after(name, way(), aggregator), expected, strict=True)
    far = [np.abs(a - b).max() / max(1, np.abs(b).max()) for a, b in pairs if a.size]
    found[f"{name}, {aggregator}, {way.__name__}"] = float(np.max(far))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def on_devices():
  return commands.on_eight_devices("-c", _ON_DEVICES)


@pytest.mark.long
def test_every_algorithm_over_eight_devices_is_the_loop():
  found = commands.on_eight_devices("-c", _ALL)
  print(found)
  assert len(found) >= 2 * (14 + 6)
  assert max(found.values()) <= 1e-5, found


_OVER_EIGHT = pytest.mark.parametrize("way", ["eight", "sharded"])


@pytest.mark.long
@_OVER_EIGHT
def test_p34_eight_devices_are_the_loop_convolutions_too(on_devices, way):
  for prefix in ("", "median "):
    for a, b in zip(on_devices[f"{prefix}{way}"], on_devices[f"{prefix}loop"]):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.cases(long=["devices-eight"], slow=...)
@_OVER_EIGHT
@pytest.mark.parametrize("axis", ["devices", "batch"])
def test_no_client_sums_over_the_clients_of_other_devices(on_devices, axis, way):
  assert "unbound axis name" in on_devices[f"mixed {axis} {way}"]


@pytest.mark.slow
@_OVER_EIGHT
@pytest.mark.parametrize("count", [0, 7, 8, 11])
def test_eight_devices_serve_cohorts_of_any_size(on_devices, count, way):
  for a, b in zip(on_devices[f"of {count} {way}"], on_devices[f"of {count} loop"]):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
def test_blocks_that_are_cut_to_one_client_on_each_device_are_the_loop(on_devices):
  for a, b in zip(on_devices["cut"], on_devices["loop"]):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_p19_the_noise_does_not_grow_with_the_devices(on_devices):
  """Added once after the sum: bit for bit that of one device, with the plan's std."""
  for name in ("eight", "sharded one", "sharded"):
    np.testing.assert_array_equal(on_devices["noise one"], on_devices[f"noise {name}"])
  assert np.std(on_devices["noise eight"]) == pytest.approx(1.0 * 0.5 / 4.0, rel=0.03)


def _counting(calls):
  def loss_fn(w, x):
    calls.append(None)  # once for each trace
    return 0.5 * jnp.sum((w["w"] - x) ** 2)

  return loss_fn


@pytest.mark.long
@pytest.mark.parametrize(
  "map_clients", [loop_clients(), vmap_clients()], ids=["loop", "vmap"]
)
def test_ragged_clients_do_not_compile_one_by_one(map_clients):
  """Forty different sizes; a step is traced a few times, not forty."""
  calls = []
  algorithm = fed_avg(_counting(calls), optax.sgd(0.1), map_clients=map_clients, key=_KEY)
  state = algorithm.init({"w": jnp.zeros(2)})
  for start in range(0, 40, 10):
    own = problems.ragged(range(start, start + 10), width=2)
    state, _ = algorithm.round(state, from_batches(own, batch_size=1))
  # a loop body may be traced twice, and each time the loss is looked at before it is derived
  assert len(calls) <= 4 * 12
  before = len(calls)  # other clients of sizes in the same range: nothing is compiled
  own = problems.ragged((3, 39, 17, 8, 21, 30, 2, 5, 9, 12), width=2, seed=9)
  algorithm.round(state, from_batches(own, batch_size=1))
  assert len(calls) == before


@pytest.mark.long
def test_ragged_clients_compile_few_programs_where_their_rows_are_sent():
  """Twenty sizes, each example in two epochs: sent once, in shapes that follow the steps'."""
  calls, rows = [], data.from_arrays(np.ones((190, 2)), np.zeros(190, int), num_classes=1)
  ends = np.cumsum(np.arange(20))
  federation = data.Federation(rows, [np.arange(e - n, e) for n, e in enumerate(ends)])
  loss_fn = lambda w, example: _counting(calls)(w, example.x)
  made = fed_avg(loss_fn, optax.sgd(0.1), map_clients=shard_map_clients(), key=_KEY)
  state, work = made.init({"w": jnp.zeros(2)}), LocalWork(4, epochs=2)

  def run(clients):
    return made.round(state, cohort_of(federation, clients, work, seed=0, round=0))

  for start in range(0, 20, 5):  # 1, 3, 4 and 5 batches
    run(range(start, start + 5))
  compiled = len(calls)
  assert compiled <= 4 * 4  # a loop body may be traced twice, and is looked at before
  for start in range(4):  # 16 to 19 rows of the largest
    run(range(start, 20, 4))
  assert len(calls) == compiled


def test_a_block_is_sent_while_the_one_before_is_computed():
  """Nothing waits for a block before the next one is on its way; two are in memory."""
  seen = []

  def noting(name, call=lambda given: given):
    def called(*given):
      seen.append(name)
      return call(*given)

    return called

  client = clients.full_gradient(problems.quadratic)
  program = jax.jit(lambda *given: client_blocks.run_block(client, None, *given))
  way = client_blocks.Dispatch(
    noting("compute", program), lambda count: 1, None, noting("send"),
    noting("fetch", jax.device_get),
  )  # fmt: skip
  received = clients.Received({"w": jnp.zeros(1)})
  context = Context(received, None, None, _KEY, None)
  own = [np.full((1, 1), value, np.float32) for value in (1, 2, 3)]
  found = client_blocks.Blocks(client, None, way)(context, from_batches(own))
  assert found.sent.message["delta"]["w"].ravel().tolist() == [1, 2, 3]
  twice, once = ["send", "compute"] * 2, ["send", "compute"]
  assert seen == [*twice, "fetch", *once, "fetch", "fetch"]


def test_a_client_of_ten_thousand_examples_beside_an_empty_one():
  own = [np.full((n, 1), v, np.float32) for n, v in ((1, 1.0), (10_000, 3.0), (0, 9.0))]
  cohort = from_batches(own, batch_size=100)
  for map_clients in (loop_clients(), vmap_clients()):
    algorithm = fed_avg(
      problems.quadratic, optax.sgd(0.5), map_clients=map_clients, key=_KEY
    )
    state, info = algorithm.round(algorithm.init({"w": jnp.zeros(1)}), cohort)
    assert float(state.params["w"][0]) == pytest.approx((0.5 + 3.0) / 2)
    assert info.clients.num_steps.tolist() == [1, 100, 0]


def test_more_clients_than_the_loop_holds_at_once_come_back_in_order():
  values = np.arange(300, dtype=np.float32)
  cohort = from_batches(
    [np.full((1 + i % 2, 1), v, np.float32) for i, v in enumerate(values)]
  )
  algorithm = fed_avg(
    problems.quadratic, optax.sgd(1.0), map_clients=loop_clients(), key=_KEY
  )
  state, info = algorithm.round(algorithm.init({"w": jnp.zeros(1)}), cohort)
  assert float(state.params["w"][0]) == pytest.approx(149.5, rel=1e-5)
  np.testing.assert_allclose(info.clients.update_norm, values, rtol=1e-6)


def test_convolutions_are_seen():
  kernel = jnp.ones((2, 2, 1, 1))

  def convolve(w, x):
    y = jax.lax.conv(x[None, None], w["w"].reshape(1, 1, 2, 2), (1, 1), "SAME")
    return jnp.sum(y * y)

  params = {"w": kernel.ravel()}
  own = [np.ones((1, 3, 3), np.float32)]
  cohort = from_batches(own)
  context = Context(clients.Received(params), None, None, _KEY, None)
  seen = lambda loss_fn: has_convolution(
    clients.local_training(loss_fn, optax.sgd(0.1)), context, cohort.batches[0]
  )
  assert seen(convolve)
  assert not seen(lambda w, x: jnp.sum(w["w"]) * jnp.sum(x))


def test_a_client_that_is_not_finite_takes_nobody_with_it():
  """XLA's CPU backend multiplies NaN by the zeros between groups of a convolution."""

  def depthwise(w, x):
    layout = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(
      *(x[None], w["w"], (1, 1), "SAME"), dimension_numbers=layout, feature_group_count=2
    )
    return jnp.mean((jnp.tanh(y) - 1) ** 2)

  rng = np.random.default_rng(0)
  own = [np.asarray(rng.normal(size=(2, 4, 4, 2)), np.float32) for _ in range(4)]
  own[1][0, 1, 1, 0] = np.nan
  params = {"w": jnp.asarray(rng.normal(size=(3, 3, 1, 2)), jnp.float32)}
  cohort = from_batches(own, batch_size=2)
  after = {}
  for name in ("loop", "vmap"):
    algorithm = fed_avg(depthwise, optax.sgd(0.1), map_clients=_EXECUTIONS[name], key=_KEY)
    state, info = algorithm.round(algorithm.init(params), cohort)
    after[name] = state.params
    assert np.isfinite(info.clients.update_norm).sum() == 3
  problems.assert_trees_close(after["loop"], after["vmap"])
  assert np.abs(np.asarray(after["vmap"]["w"] - params["w"])).max() > 1e-4


def _convolving(w, x):
  kernel = w["w"].reshape(1, 1, 2, 2)
  y = jax.lax.conv(x[None, None], kernel, (1, 1), "SAME")
  return jnp.mean((y - 1) ** 2)


@pytest.mark.cases(slow=["None"], long=...)
@pytest.mark.parametrize("num_threads", [1, 3, None])
def test_threads_do_not_change_the_result(num_threads):
  """Ragged clients, an empty one, more clients than threads, two rounds."""
  rng = np.random.default_rng(3)
  own = [rng.normal(size=(n, 3, 3)).astype(np.float32) for n in (1, 9, 0, 4, 17, 2, 6)]
  cohort, found = from_batches(own, batch_size=2), []
  for threads in (2, num_threads):
    algorithm = fed_avg(
      _convolving,
      optax.sgd(0.1),
      map_clients=loop_clients(num_threads=threads),
      key=_KEY,
    )
    state = algorithm.init({"w": jnp.arange(4, dtype=jnp.float32)})
    for _ in range(2):
      state, info = algorithm.round(state, cohort)
    found.append((np.asarray(state.params["w"]), info.clients.num_steps.tolist()))
  one = num_threads == 1
  np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6 if one else 0)
  assert found[0][1] == found[1][1] == [1, 5, 0, 2, 9, 1, 3]


def test_an_error_in_a_thread_says_which_client_it_came_from():
  own = [np.ones((1, 3, 3), np.float32)] * 3
  cohort = from_batches(own)._replace(ids=np.array([4, 17, 30]))

  def client_17_fails(client, partial):
    run = loop_clients(num_threads=2)(client, partial)
    trained = run._local_program

    def fails(context, place, *rest):
      if place == 1:
        raise RuntimeError("here")
      return trained(context, place, *rest)

    run._local_program = fails
    return run

  algorithm = fed_avg(_convolving, optax.sgd(0.1), map_clients=client_17_fails, key=_KEY)
  with pytest.raises(RuntimeError) as caught:
    algorithm.round(algorithm.init({"w": jnp.ones(4)}), cohort)
  assert "client 17" in "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.slow
def test_an_error_says_which_client_it_came_from():
  own = [np.ones((1, 2), np.float32), np.ones((1, 3), np.float32)]
  cohort = from_batches(own)._replace(ids=np.array([4, 17]))
  algorithm = fed_avg(
    problems.quadratic, optax.sgd(0.1), map_clients=loop_clients(jit=False), key=_KEY
  )
  with pytest.raises(Exception) as caught:
    algorithm.round(algorithm.init({"w": jnp.zeros(2)}), cohort)
  assert "client 17" in "".join(getattr(caught.value, "__notes__", []))

  def refuses(w, x):
    raise UserError("is wrong", field="x")

  algorithm = fed_avg(refuses, optax.sgd(0.1), map_clients=loop_clients(), key=_KEY)
  with pytest.raises(UserError, match="x: is wrong .client 4."):
    algorithm.round(algorithm.init({"w": jnp.zeros(2)}), cohort)


@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda: pmap_clients(num_devices=99), "num_devices"),
    (lambda: shard_map_clients(num_devices=99), "num_devices"),
    (lambda: pmap_clients(num_devices=0), "num_devices"),
    (lambda: pmap_clients(clients_per_device=0), "clients_per_device"),
    (lambda: vmap_clients(clients_per_block=0), "clients_per_block"),
    (lambda: loop_clients(num_threads=0), "num_threads"),
    (lambda: by_name("vmpa"), "execution"),
    (
      lambda: by_name("loop", num_devices=2),
      "num_devices",
    ),
    (
      lambda: by_name("shard_map", num_threads=2),
      "num_threads",
    ),
    (
      lambda: by_name("vmap", num_threads=2),
      "num_threads",
    ),
  ],
)
def test_mistakes_are_one_line(make, field):
  with refuses(field) as caught:
    make()
  assert "\n" not in str(caught.value)


def test_the_choice_follows_the_platform():
  client = clients.full_gradient(problems.quadratic)
  chosen = auto_clients()(client, None)
  assert type(chosen) is type(loop_clients()(client, None))
