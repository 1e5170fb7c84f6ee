"""Parts, teachers and the student of PATE: one record changes one vote, bit for bit."""

import numpy as np
import pytest
from scipy import sparse

from dpjax.mechanisms import teacher_votes
from dpjax.zoo.recipes import pate
from tests.refuses import refuses

_CLASSES = 3
_TEACHERS = 6
_CAPACITY = 12


@pytest.fixture(scope="module")
def records():
  rng = np.random.default_rng(0)
  y = rng.integers(0, _CLASSES, 50).astype(np.int32)
  x = (np.eye(_CLASSES, 5)[y] + 0.3 * rng.normal(size=(50, 5))).astype(np.float32)
  return x, y


def _votes(x, y, parts, queries):
  padded = pate.padded_parts(x, y, parts, range(_TEACHERS), _CAPACITY)
  return np.asarray(pate.ridge_votes(padded, queries, penalty=0.1, num_classes=_CLASSES))


def _by_place(x, y):
  return pate.parts(x, y, _TEACHERS, neighboring_relation="replace_one")


def test_a_record_more_changes_the_votes_of_its_own_teacher_alone(records):
  x, y = records
  queries = np.random.default_rng(1).normal(size=(40, 5)).astype(np.float32)
  before = _votes(x, y, pate.parts(x, y, _TEACHERS), queries)
  changed = set()
  for hostile in (1e6, -1e6, 0.0, np.nan):
    # First, last or in the middle: the place of a record says nothing.
    for place in (0, 25, 50):
      x_more = np.insert(x, place, np.full(5, hostile, np.float32), axis=0)
      y_more = np.insert(y, place, 2).astype(np.int32)
      after = _votes(x_more, y_more, pate.parts(x_more, y_more, _TEACHERS), queries)
      moved = np.flatnonzero((before != after).any(axis=1))
      assert len(moved) <= 1, (hostile, place, moved)
      changed |= set(moved.tolist())
      shift = pate.vote_counts(after, _CLASSES) - pate.vote_counts(before, _CLASSES)
      assert (np.abs(shift).sum(axis=1) <= 2).all() and (shift.sum(axis=1) == 0).all()
  # The neighbour of one record is no record at all.
  none = _votes(x[:0], y[:0], pate.parts(x[:0], y[:0], _TEACHERS), queries)
  first = _votes(x[:1], y[:1], pate.parts(x[:1], y[:1], _TEACHERS), queries)
  assert (none != first).any(axis=1).sum() <= 1
  # The attack has teeth: some teacher did change its vote.
  assert changed
  # By place a record in front moves every other one to another teacher.
  x_more = np.insert(x, 0, np.full(5, 1e6, np.float32), axis=0)
  y_more = np.insert(y, 0, 2).astype(np.int32)
  by_place = [_votes(a, b, _by_place(a, b), queries) for a, b in ((x, y), (x_more, y_more))]
  assert (by_place[0] != by_place[1]).any(axis=1).sum() > 1


def test_a_replaced_record_changes_one_teacher_by_place(records):
  x, y = records
  queries = np.random.default_rng(1).normal(size=(40, 5)).astype(np.float32)
  parts = _by_place(x, y)
  before = _votes(x, y, parts, queries)
  other = x.copy()
  other[7] = 1e6
  after = _votes(other, y, parts, queries)
  assert np.flatnonzero((before != after).any(axis=1)).tolist() == [7 % _TEACHERS]


def test_a_full_part_leaves_out_its_own_records(records):
  x, y = records
  parts = pate.parts(x, y, _TEACHERS)
  few = pate.padded_parts(x, y, parts, range(_TEACHERS), 3)
  assert few.mask.sum() < len(x) and few.x.shape == (_TEACHERS, 3, 5)
  assert (few.mask.sum(axis=1) == np.minimum(np.bincount(parts, minlength=6), 3)).all()


def test_a_teacher_is_ridge_regression(records):
  x, y = records
  parts = np.zeros(len(x), np.int32)
  padded = pate.padded_parts(x, y, parts, range(1), 60)
  queries = np.random.default_rng(2).normal(size=(200, 5)).astype(np.float32)
  votes = pate.ridge_votes(padded, queries, penalty=0.1, num_classes=_CLASSES)
  wide = x.astype(np.float64)
  ridge = 0.1 * np.square(wide).sum() / len(x) * np.eye(5)
  weights = np.linalg.solve(wide.T @ wide + ridge, wide.T @ (np.eye(3)[y] - 1 / 3))
  scores = np.sort(queries @ weights, axis=1)
  clear = scores[:, -1] - scores[:, -2] > 1e-3
  assert clear.sum() > 150
  assert (np.asarray(votes)[0] == (queries @ weights).argmax(1))[clear].all()
  # An empty part is no error, and no information.
  nobody = pate.padded_parts(x, y, parts + 1, range(1), 60)
  empty = pate.ridge_votes(nobody, queries, penalty=0.1, num_classes=_CLASSES)
  assert (np.asarray(empty) == 0).all()


def test_labels_spread_over_two_moons_of_points():
  rng = np.random.default_rng(3)
  truth = np.repeat([0, 1], 150)
  angle = rng.uniform(0, 2 * np.pi, 300)
  # Two circles in two planes of ten dimensions.
  x = np.zeros((300, 10))
  x[truth == 0, :2] = np.stack([np.cos(angle), np.sin(angle)], 1)[truth == 0]
  x[truth == 1, 2:4] = np.stack([np.cos(angle), np.sin(angle)], 1)[truth == 1]
  x += 0.01 * rng.normal(size=x.shape)
  graph = pate.public_graph(x[:280], x[280:], num_components=4, num_neighbors=5)
  dense = graph.spread.toarray()
  assert sparse.issparse(graph.spread)
  np.testing.assert_allclose(dense, dense.T, atol=1e-12)
  assert np.linalg.eigvalsh(dense).max() <= 1 + 1e-9
  labels = np.full(280, -1)
  labels[[3, 200, 210]] = [0, 1, 1]
  spread = pate.spread_labels(graph, labels, num_classes=2)
  assert (spread == truth[:280]).mean() > 0.97
  # Closed form of the limit: (I - reach S)^-1 start.
  start = np.zeros((280, 2))
  start[3, 0] = 1
  start[[200, 210], 1] = 0.5
  limit = np.linalg.solve(np.eye(280) - 0.5 * dense, start)
  limit = (limit / limit.sum(0)).argmax(1)
  near = pate.spread_labels(graph, labels, num_classes=2, reach=0.5, num_turns=200)
  reached = np.abs(np.linalg.solve(np.eye(280) - 0.5 * dense, start)).sum(1) > 1e-6
  assert (near == limit)[reached].all()


def test_no_label_at_all_and_wrong_sizes():
  graph = pate.public_graph(np.eye(8), np.eye(8)[:2], num_components=3, num_neighbors=2)
  assert (pate.spread_labels(graph, np.full(8, -1), num_classes=2) == 0).all()
  with refuses("num_neighbors", value=8):
    pate.public_graph(np.eye(8), np.eye(8), num_neighbors=8)
  with refuses("y"):
    pate.parts(np.zeros((3, 1)), np.zeros(2), 2)
  with refuses("num_parts", value=0):
    pate.parts(np.zeros((3, 1)), np.zeros(3), 0)
  with refuses("neighboring_relation", value="either"):
    pate.parts(np.zeros((3, 1)), np.zeros(3), 2, neighboring_relation="either")


def test_parts_and_votes_are_private_under_one_relation_by_default(records):
  """By place, a record in front changed the votes of all teachers, and GNMax accounted for one."""
  x, y = records
  relation = teacher_votes.GNMax(std=1.0).neighboring_relation
  before, after = pate.parts(x[1:], y[1:], _TEACHERS), pate.parts(x, y, _TEACHERS)
  named = pate.parts(x, y, _TEACHERS, neighboring_relation=relation)
  assert (after[1:] == before).all() and (named == after).all()
