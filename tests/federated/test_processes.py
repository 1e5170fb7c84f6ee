"""Two processes are one: same parameters, same noise, nobody waits for ever."""

import json

import numpy as np
import pytest

from dpjax.federated.execution import client_processes
from tests.federated import programs

_WORKER = """
import json, sys
sys.path.insert(0, ".")
count, index, port = map(int, sys.argv[1:])
from dpjax.parallel import exchanges as processes
from dpjax.parallel import runtime
if count > 1:
  where = dict(num_processes=count, process_id=index, timeout=120)
  runtime.start(f"127.0.0.1:{port}", local_devices=[0, 1], same={"config": "same"}, **where)
import jax, jax.numpy as jnp, numpy as np, optax
from dpjax import sampling, trees
from dpjax.federated import (central, fed_avg, from_batches, loop_clients, median,
                             pmap_clients, process_clients, scaffold,
                             vmap_clients)
from dpjax.plan import Plan
from dpjax.validate import UserError
from tests.federated import problems

assert jax.process_count() == count
key, noise_key = jax.random.key(0), jax.random.key(1)
params = problems.network_params()
cohorts = [from_batches(problems.ragged(sizes, seed=len(sizes)), batch_size=2)
           for sizes in ((4, 1, 0, 3, 4), (4,), ())]  # an empty share; nobody at all
plan = Plan(sampler=sampling.PoissonSampler(sampling_prob=0.5, capacity=99), noise_multiplier=1.0,
            l2_clip_norm=0.5, normalize_by=4.0, num_steps=9, delta=1e-3, unit="user")
def fed(inner, aggregator=None):
  return fed_avg(problems.network, optax.sgd(0.1), None, aggregator,
                 process_clients(inner), key=key)
def run(algorithm, what=cohorts):
  state, infos = algorithm.init(params, num_clients=5), []
  for cohort in what:
    state, info = algorithm.round(state, cohort)
    infos.append([np.asarray(leaf).tolist() for leaf in info.clients])
  kept = (state.params, state.memories and state.memories.all())
  return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(kept)], infos
out = {
  "pmap": run(fed(pmap_clients(num_devices=2 if count > 1 else 1), central(plan, noise_key))),
  "median": run(fed(loop_clients(), median())),
  "scaffold": run(scaffold(problems.network, optax.sgd(0.1), client_learning_rate=0.1,
                           map_clients=process_clients(vmap_clients()),
                           num_clients=5, key=key)),
}
import functools, pathlib, tempfile
from dpjax.experiments.run import checkpoint
from dpjax.parallel.client_states import Memory
algorithm = scaffold(problems.network, optax.sgd(0.1), client_learning_rate=0.1, key=key,
                     map_clients=process_clients(vmap_clients()), num_clients=5)
folder = pathlib.Path(tempfile.mkdtemp())
checkpoints = checkpoint.Checkpoints(folder, memory=functools.partial(Memory, on_disk=True))
state = checkpoints.begin(algorithm.init(params, num_clients=5))
for step, cohort in enumerate(cohorts):
  state, _ = algorithm.round(state, cohort)
  checkpoints.save(step, state, {})
restored, _ = checkpoint.Checkpoints(folder, memory=Memory).restore(
  algorithm.init(params, num_clients=5))
for name, found in (("on disk", state), ("restored", restored)):
  kept = (found.params, found.memories.all())
  out[name] = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(kept)]
out["files"] = len(list(folder.rglob("*.rows")))
silent = fed_avg(lambda w, x: 0.0 * jnp.sum(w), optax.sgd(0.1), None,
                 central(plan, noise_key), process_clients(loop_clients()), key=key)
state, _ = silent.round(silent.init(jnp.zeros(8000)), from_batches([np.ones((1, 1))] * 5))
out["noise"] = [float(jnp.std(state.params)), trees.sha256(state.params)]

def refuse():
  raise UserError("workdir='x': is wrong")
caught = []
for call in (lambda: processes.on_first(refuse), lambda: processes.same(params=str(index))):
  try:
    call()
  except UserError as error:
    caught.append(str(error))
processes.same(params="equal")
out["errors"] = caught
out["first"] = processes.on_first(lambda: {"by": index})
out["largest"] = processes.largest(7 * index)
odd = np.array([-0.0, np.nan, 1e-45 * (1 + index)], np.float32)
out["bits"] = processes.arrays_from_first({"x": odd})["x"].view(np.int32).tolist()
print(json.dumps(out), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
  """What one process finds, and what each of two finds."""
  port, folder = programs.free_port(), tmp_path_factory.mktemp("processes")
  running = [
    programs.start(["-c", _WORKER, count, index, str(port)], folder, f"{count}{index}")
    for count, index in ("10", "20", "21")
  ]
  try:
    for program in running:
      assert program.code() == 0, program.err.read_text()[-3000:]
  finally:
    programs.stop(running)
  return [json.loads(program.out.read_text().splitlines()[-1]) for program in running]


def _close(a, b, atol=1e-6):
  assert type(a) is type(b)
  if not isinstance(a, list):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol)
    return
  assert len(a) == len(b)
  for x, y in zip(a, b):
    _close(x, y, atol)


@pytest.mark.long
@pytest.mark.parametrize("name", ["pmap", "median", "scaffold"])
def test_two_processes_are_one(outcomes, name):
  """Parameters, what clients keep and infos in order; with an empty share and nobody."""
  one, first, second = (found[name] for found in outcomes)
  assert first == second  # bit for bit
  _close(one, first, atol=2e-6)


@pytest.mark.long
def test_what_clients_keep_on_disk_is_in_the_files_of_process_0_alone(outcomes):
  for found in outcomes:
    assert found["on disk"] == found["restored"] == found["scaffold"][0]
  assert [found["files"] > 0 for found in outcomes] == [True, True, False]


@pytest.mark.long
def test_messages_that_are_gathered_are_those_of_one_process(outcomes):
  """No sum, so no order of a sum: the median's parameters agree to the last bit."""
  assert outcomes[0]["median"][0] == outcomes[1]["median"][0]


@pytest.mark.long
def test_p19_the_noise_does_not_grow_with_the_processes(outcomes):
  one, first, second = (found["noise"] for found in outcomes)
  assert one == first == second
  assert first[0] == pytest.approx(1.0 * 0.5 / 4.0, rel=0.03)


@pytest.mark.long
def test_process_0_speaks_for_all(outcomes):
  one, first, second = outcomes
  assert first["errors"] == second["errors"] == [
    "workdir='x': is wrong",
    "params: differs between process 0 and process 1; all processes need the same command, "
    "data, software and kind of device",
  ]  # fmt: skip
  assert one["errors"] == ["workdir='x': is wrong"]
  assert first["first"] == second["first"] == {"by": 0}
  assert first["largest"] == second["largest"] == 7
  assert first["bits"] == second["bits"] == one["bits"]
  assert first["bits"][0] == -(2**31)  # minus zero stays minus zero


def test_the_deal_takes_everyone_once_and_balances():
  sizes = np.array([100, 1, 90, 2, 80, 3, 70, 4])
  shares = client_processes.deal(sizes, 3)
  assert sorted(np.concatenate(shares).tolist()) == list(range(8))
  work = [int(sizes[places].sum()) for places in shares]
  assert max(work) - min(work) <= sizes.max()
  assert [len(places) for places in client_processes.deal(np.zeros(1), 3)] == [1, 0, 0]
