"""A block of clients is no larger than its budget: one large client does not pad the others."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import optax
import pytest

from dpjax import data
from dpjax.federated import LocalWork, fed_avg, from_batches, loop_clients, vmap_clients
from dpjax.federated.cohort import cohort_of
from dpjax.federated.execution import client_blocks
from dpjax.federated.execution.client_blocks import ByteBudget
from dpjax.federated.execution.named import by_name
from tests.federated import problems
from tests.refuses import refuses

_KEY = jax.random.key(0)
_WIDTH = 3


def _cohort(sizes, batch_size, epochs=1):
  """Clients that hold rows of one data set, so many each."""
  ends = np.cumsum([0, *sizes])
  x = np.random.default_rng(0).normal(size=(ends[-1] + 1, _WIDTH)).astype(np.float32)
  rows = data.from_arrays(x, np.zeros(len(x), int), num_classes=1)
  federation = data.Federation(
    rows, [np.arange(*pair) for pair in itertools.pairwise(ends)]
  )
  work = LocalWork(batch_size=batch_size, epochs=epochs)
  cohort = cohort_of(federation, range(len(sizes)), work, seed=1, round=0)
  return cohort._replace(data=jax.tree.map(np.asarray, cohort.data))


def _nbytes(block):
  return sum(leaf.nbytes for leaf in jax.tree.leaves((block.batches, block.client_data)))


_SIZES = st.lists(st.sampled_from([0, 1, 3, 10, 40, 400]), min_size=1, max_size=12)


@hypothesis.settings(max_examples=40, database=None, derandomize=True)
@hypothesis.given(
  sizes=_SIZES,
  batch_size=st.sampled_from([None, 4]),
  lanes=st.sampled_from([1, 4]),
  most=st.sampled_from([1.0, 3e3, 3e4, 1e9]),
  sent=st.booleans(),
)
def test_blocks_hold_everyone_once_within_the_budget(sizes, batch_size, lanes, most, sent):
  """But for a client (one on each device) that needs more by itself."""
  cohort, size = _cohort(sizes, batch_size), 12
  held = cohort.data if sent else None
  found = list(client_blocks.blocks(cohort, size, held, ByteBudget(most, lanes)))
  members = np.concatenate([block.places[block.mask] for block in found])
  assert sorted(members.tolist()) == list(range(len(sizes)))
  if most == 1e9:  # as if there was no budget
    assert len(found) == 1 and len(found[0].mask) == size
  for block in found:
    count = len(block.mask)
    assert count % lanes == 0 and (count == size or sum(block.mask) > count / 2 - lanes)
    assert _nbytes(block) <= most or count == lanes
  shapes = {block.batches.mask.shape for block in found}
  assert len(shapes) <= 2 * len(set(sizes)) + 1


def test_one_large_client_does_not_pad_the_others():
  """100 times the rows of 31 others: a block of its own, and 9 times fewer bytes."""
  cohort = _cohort([400] + [4] * 31, batch_size=4)
  blocks = lambda most: list(
    client_blocks.blocks(cohort, 32, cohort.data, ByteBudget(most))
  )
  (whole,), cut = blocks(1e9), blocks(_nbytes(blocks(1e9)[0]) / 16)
  assert len(cut[0].places) <= 2 and cut[0].places[0] == 0
  assert sum(map(_nbytes, cut)) < _nbytes(whole) / 9


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_a_budget_changes_no_result_and_costs_few_programs(batch_size):
  cohort = _cohort([1, 80, 3, 2, 0], batch_size)
  loss, most, bound = lambda w, example: problems.quadratic(w, example.x), 700, []

  def trained(map_clients):
    def binding(client, partial):
      bound.append(map_clients(client, partial))
      return bound[-1]

    algorithm = fed_avg(loss, optax.sgd(0.1), map_clients=binding, key=_KEY)
    state, info = algorithm.round(algorithm.init({"w": np.zeros(_WIDTH)}), cohort)
    return state.params, info

  expected, wanted = trained(loop_clients())
  found, losses = trained(vmap_clients(memory_budget=most))
  problems.assert_trees_close(found, expected, rtol=1e-5)
  problems.assert_trees_close(losses, wanted, rtol=1e-4)
  pieces = client_blocks.blocks(cohort, 5, None, ByteBudget(most))
  counts = [len(block.mask) for block in pieces]
  assert counts[0] == 1 and len(counts) > 1  # the large one by itself
  assert bound[-1]._way.program._jitted._cache_size() == 2


def test_clients_with_arrays_of_their_own_are_cut_too():
  cohort = from_batches(problems.ragged((50, 1, 2, 1)), batch_size=1)
  (first, *others) = client_blocks.blocks(cohort, 4, None, ByteBudget(1_000))
  assert first.mask.tolist() == [True] and sum(sum(block.mask) for block in others) == 3


@pytest.mark.cases(long=[1])
@pytest.mark.parametrize(
  ("call", "field"),
  [
    (lambda: vmap_clients(memory_budget=0), "memory_budget"),
    (
      lambda: by_name("loop", memory_budget_gb=1.0),
      "memory_budget_gb",
    ),
  ],
)
def test_a_wrong_budget_is_one_line(call, field):
  with refuses(field):
    call()
