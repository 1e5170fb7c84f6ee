"""What a round sends to the devices: its own rows, the parameters once, the data set once in
all to one device and never to several.

Counted, not timed: JAX's transfer guard writes each transfer to a device with its shape, and
what compiled programs are called with from the host is added up beside it.
"""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import data
from dpjax.federated import (
  LocalWork,
  fed_avg,
  from_batches,
  loop_clients,
  pmap_clients,
  shard_map_clients,
  vmap_clients,
)
from dpjax.federated.cohort import LocalBatches, cohort_of
from tests import quick_compile
from tests.federated import problems, programs
from tests.refuses import refuses

_KEY = jax.random.key(0)
_EXECUTIONS = {
  "loop": loop_clients(),
  "threads": loop_clients(num_threads=2),
  "vmap": vmap_clients(clients_per_block=2),
  "pmap": pmap_clients(clients_per_device=1),
  "shard_map": shard_map_clients(clients_per_device=1),
}
_OVER_DEVICES = ("pmap", "shard_map")
_SIZES = (120, 7200)  # examples of the data set, twelve clients
_BYTES = {"f": 4, "i": 4, "u": 4, "b": 1}
_AVAL = re.compile(r"aval=ShapedArray\((\w)\w+\[([\d,]*)\]")

_ROUNDS = f"""
import json, sys
sys.path.insert(0, ".")
import jax, numpy as np
from tests.federated import problems, test_transfers
real, sent = jax.jit, [0]
def counting(fn, **options):
  compiled = real(fn, **options)
  def called(*arguments):
    host = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, np.ndarray)]
    sent[0] += sum(leaf.nbytes for leaf in host)
    return compiled(*arguments)
  return called
jax.jit = counting
found = {{}}
for size in {_SIZES}:
  federation = test_transfers.federation(size)
  for name in test_transfers._EXECUTIONS:
    algorithm, state = test_transfers.algorithm(name)
    for round in range(3):
      drawn = test_transfers.drawn(federation, round)
      print(f"== {{size}} {{name}} {{round}}", file=sys.stderr, flush=True)
      sent[0] = 0
      with jax.transfer_guard("log_explicit"):
        state, _ = algorithm.round(state, drawn)
    found[f"{{size}} {{name}}"] = sent[0]
    found[f"params {{size}} {{name}}"] = [np.asarray(leaf).ravel().tolist()
                                          for leaf in jax.tree.leaves(state.params)]
print("==", file=sys.stderr, flush=True)
print(json.dumps(found))
"""


def federation(size):
  """Twelve clients of a data set of this size; only its first rows differ from zero."""
  x = np.zeros((size, 3), np.float32)
  x[:120] = np.random.default_rng(0).normal(size=(120, 3))
  rows = [np.arange(i, 120, 12) for i in range(12)]
  rows[0] = np.concatenate([rows[0], np.arange(120, size)])  # so that all are somebody's
  return data.Federation(data.from_arrays(x, np.zeros(size, int), num_classes=1), rows)


def drawn(federation, round):
  """The clients with ten examples each: their work does not depend on the data set."""
  return cohort_of(federation, range(1, 12), LocalWork(5, 2), seed=0, round=round)


def algorithm(name):
  """FedAvg in that execution, and its first state."""
  loss_fn = lambda params, example: problems.network(params, example.x)
  made = fed_avg(loss_fn, optax.sgd(0.1), map_clients=_EXECUTIONS[name], key=_KEY)
  return made, made.init(problems.network_params())


def _transfers(text):
  """{(size, name, round): [(shape, bytes)]} of the guard's lines with a shape."""
  found = {}
  for part in text.split("== ")[1:]:
    head, _, lines = part.partition("\n")
    shapes = [
      (kind, tuple(int(n) for n in dims.split(",") if n))
      for kind, dims in _AVAL.findall(lines)
    ]
    found[head] = [(shape, _BYTES[kind] * math.prod(shape)) for kind, shape in shapes]
  return found


@pytest.fixture(scope="module", params=[1, 8])
def counted_bytes(request, tmp_path_factory):
  """(devices, bytes from the host by name, transfers by size, name and round)."""
  folder = tmp_path_factory.mktemp("transfers")
  flags = quick_compile.xla_flags(request.param)
  program = programs.start(["-c", _ROUNDS], folder, "rounds", XLA_FLAGS=flags)
  try:
    assert program.code() == 0, program.err.read_text()[-3000:]
  finally:
    programs.stop([program])
  host = json.loads(program.out.read_text().splitlines()[-1])
  return request.param, host, _transfers(program.err.read_text())


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(_EXECUTIONS))
def test_a_round_moves_nothing_that_grows_with_the_data_set(counted_bytes, name):
  _, host, moved = counted_bytes
  small, large = _SIZES
  assert host[f"{small} {name}"] == host[f"{large} {name}"]
  assert moved[f"{small} {name} 2"] == moved[f"{large} {name} 2"]
  for size in _SIZES:
    assert not [shape for shape, _ in moved[f"{size} {name} 2"] if shape[:1] == (size,)]
  assert host[f"params {small} {name}"] == host[f"params {large} {name}"]


@pytest.mark.long
def test_the_guard_sees_the_data_set_go_to_one_device_once_and_never_to_several(
  counted_bytes,
):
  """The count above can fail: the first round's is seen."""
  _, _, moved = counted_bytes
  seen = lambda name, round: [
    sum(shape == (size, 3) for shape, _ in moved[f"{size} {name} {round}"])
    for size in _SIZES
  ]
  assert seen("loop", 0) == [1, 1] and seen("loop", 1) == seen("loop", 2) == [0, 0]
  for name in _OVER_DEVICES:
    assert seen(name, 0) == seen(name, 1) == seen(name, 2) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", _OVER_DEVICES)
def test_a_round_sends_its_own_rows_once_and_the_parameters_once_whatever_the_blocks(
  counted_bytes, name
):
  """The guard writes a line for each device. Eleven clients of ten rows, in two epochs."""
  devices, host, moved = counted_bytes
  lines = [shape for shape, _ in moved[f"{_SIZES[0]} {name} 2"]]
  rows = [shape for shape in lines if shape[-2:] == (10, 3)]
  assert len(rows) == -(-11 // devices) * devices  # blocks of a client on each device
  assert {math.prod(shape) for shape in rows} == {devices * 10 * 3}
  back = 1  # the sum comes once, by way of the host
  assert lines.count((3, 4)) == (devices if devices > 1 else 0) + back
  assert host[f"{_SIZES[0]} {name}"] == 0  # no program is called with what is not there


def _cohort(rows, arrays):
  batches = tuple(LocalBatches(np.array([[row]], np.int32), np.ones((1, 1), bool))
                  for row in rows)  # fmt: skip
  one = from_batches([np.zeros((1, 1))] * len(rows))
  return one._replace(batches=batches, data=arrays)


@pytest.mark.cases(quick=["vmap"], long=...)
@pytest.mark.parametrize("name", sorted(_EXECUTIONS))
def test_another_data_set_is_seen_and_so_is_one_that_was_written_over(name):
  made = fed_avg(
    problems.quadratic, optax.sgd(1.0), map_clients=_EXECUTIONS[name], key=_KEY
  )
  state = made.init({"w": jnp.zeros(1)})
  after = lambda arrays: float(made.round(state, _cohort([0, 1], arrays))[0].params["w"][0])
  first, second = jnp.array([[1.0], [3.0]]), jnp.array([[5.0], [7.0]])
  assert [after(first), after(second), after(first)] == [2.0, 6.0, 2.0]
  written = np.array([[1.0], [3.0]], np.float32)
  assert after(written) == 2.0
  written += 4
  assert after(written) == 6.0


@pytest.mark.cases(quick=["loop"], long=...)
@pytest.mark.parametrize("name", sorted(_EXECUTIONS))
def test_one_algorithm_serves_parameters_of_two_shapes(name):
  """Nothing of the first run's shapes stays with the second, an empty cohort's included."""
  made = fed_avg(
    problems.quadratic, optax.sgd(1.0), map_clients=_EXECUTIONS[name], key=_KEY
  )
  nobody = from_batches([])
  for width in (5, 1, 3):
    state = made.init({"w": jnp.zeros(width)})
    state, _ = made.round(state, nobody)
    np.testing.assert_array_equal(state.params["w"], np.zeros(width))
    own = [np.full((1, width), value, np.float32) for value in (1.0, 3.0)]
    state, _ = made.round(state, from_batches(own))
    np.testing.assert_array_equal(state.params["w"], np.full(width, 2.0))


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize("ids", [[3, 1, 3], [0, 2**32, 1], [-1, 0, 1]])
def test_clients_that_would_share_a_key_are_refused(ids):
  """One number twice in a round, or two that are equal in 32 bits: one noise for two."""
  own = from_batches([np.ones((1, 1), np.float32)] * 3)._replace(ids=np.array(ids))
  for name in ("loop", "vmap"):
    made = fed_avg(
      problems.quadratic, optax.sgd(1.0), map_clients=_EXECUTIONS[name], key=_KEY
    )
    with refuses("cohort.ids") as caught:
      made.round(made.init({"w": jnp.zeros(1)}), own)
    assert "\n" not in str(caught.value)
