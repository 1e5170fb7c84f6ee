"""PATE without its noisy vote: disjoint parts of the records, teachers, and a public student.

The private records reach a teacher only through `parts`. They reach a student only through the
labels that `dpjax.mechanisms.GNMax` publishes. `public_graph`, `spread_labels` and
`student_weights` read only published labels and public examples: they cost no privacy.

Source: Papernot et al. 2017, arXiv:1610.05755, and 2018, arXiv:1802.08908. Teachers here are
ridge regressions in closed form, and the student spreads labels over a graph (Zhou et al. 2004,
"Learning with local and global consistency"). Papernot et al. trained networks for both.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse

from dpjax import validate
from dpjax.accounting.proved import ADD, RELATIONS
from dpjax.types import Array, ArrayLike
from dpjax.validate import UserError

# The salt is public and fixed, so that neighbouring data sets are divided by the same hash
# function.
_SALT = b"dpjax parts"
# Number of rows of a similarity matrix that are computed at a time.
_ROWS = 1000
# Number of columns beyond the kept components, and number of passes, in the randomised
# decomposition (Halko, Martinsson and Tropp 2011, arXiv:0909.4061).
_OVERSAMPLED = 30
_PASSES = 2
# `reach` and `num_turns` with which the first student's scores are spread. Every example of the
# pool has scores, so they need not spread far.
_SECOND_REACH = 0.8
_SECOND_TURNS = 20


def parts(
  x: np.ndarray, y: np.ndarray, num_parts: int, *, neighboring_relation: str = ADD
) -> np.ndarray:
  """Returns the part of each record, [n] in [0, num_parts).

  Guarantee: neighbours differ in one part, under the relation that is named and under no other.

  | relation            | who chooses the part of a record | why one part changes                 |
  | ------------------- | -------------------------------- | ------------------------------------ |
  | `add_or_remove_one` | a hash of the record itself      | no other record moves                |
  | `replace_one`,      | its place                        | no other place moves; one record     |
  | `replace_special`   |                                  | more or fewer may change all parts   |

  Args:
    neighboring_relation: that of the mechanism that gets the votes, such as `GNMax`.

  >>> x = np.arange(6.0).reshape(3, 2)
  >>> by_content = parts(x, np.array([0, 1, 0]), 10)
  >>> by_content[1:].tolist() == parts(x[1:], np.array([1, 0]), 10).tolist()
  True
  >>> parts(x, np.array([0, 1, 0]), 2, neighboring_relation="replace_one").tolist()
  [0, 1, 0]
  """
  validate.integer_at_least(1, num_parts=num_parts)
  validate.one_of(RELATIONS, neighboring_relation=neighboring_relation)
  if len(x) != len(y):
    raise UserError(f"must have a label for each of {len(x)} records", field="y")
  if neighboring_relation != ADD:
    return np.arange(len(y), dtype=np.int32) % num_parts

  def part(row: np.ndarray, label: np.generic) -> int:
    hashed = hashlib.blake2b(_SALT, digest_size=8)
    hashed.update(np.ascontiguousarray(row).tobytes())
    hashed.update(np.int64(label).tobytes())
    return int.from_bytes(hashed.digest(), "little") % num_parts

  pairs = zip(np.asarray(x), np.asarray(y))
  return np.array([part(row, label) for row, label in pairs], np.int32)


class PaddedParts(NamedTuple):
  """Records of several parts, padded to one size."""

  x: np.ndarray  # [k, capacity, d]
  y: np.ndarray  # [k, capacity]
  mask: np.ndarray  # [k, capacity], 1 for a record


def padded_parts(
  x: np.ndarray, y: np.ndarray, parts: np.ndarray, which: range, capacity: int
) -> PaddedParts:
  """Returns the first `capacity` records of each part in `which`; later ones are left out.

  Leaving records out changes no other part, so it costs no privacy. `capacity` is public: shapes,
  and so the last bits of every teacher, follow from it and not from the data.

  >>> padded_parts(np.ones((3, 1)), np.zeros(3), np.array([0, 1, 0]), range(2), 2).mask.sum().item()
  3.0
  """
  validate.integer_at_least(1, capacity=capacity)
  flat = np.reshape(x, (len(x), math.prod(np.shape(x)[1:])))
  out = PaddedParts(
    np.zeros((len(which), capacity, flat.shape[1]), np.float32),
    np.zeros((len(which), capacity), np.int32),
    np.zeros((len(which), capacity), np.float32),
  )
  for place, part in enumerate(which):
    rows = np.flatnonzero(parts == part)[:capacity]
    out.x[place, : len(rows)] = flat[rows]
    out.y[place, : len(rows)] = np.asarray(y)[rows]
    out.mask[place, : len(rows)] = 1
  return out


@functools.partial(jax.jit, static_argnames="num_classes")
def ridge_votes(
  parts: PaddedParts, queries: Array, *, penalty: float, num_classes: int
) -> jax.Array:
  """Returns the vote of each part's teacher for each query, [k, m] in [0, num_classes).

  A teacher is a ridge regression onto one-hot labels, in dual form. It is computed from one part
  alone, under one `vmap` for all parts. An empty part votes for class 0.

  Args:
    queries: public examples [m, d].
    penalty: factor of the squared weights, as a multiple of the mean squared length of a part's
      examples.
  """

  def teacher(x: Any, y: Any, mask: Any) -> jax.Array:
    gram = x @ x.T
    count = jnp.maximum(mask.sum(), 1.0)
    # Rows of padding are zero. The ridge on their diagonal keeps the system solvable, and does not
    # change the teacher.
    ridge = penalty * jnp.trace(gram) / count + 1e-6
    targets = (jax.nn.one_hot(y, num_classes) - 1 / num_classes) * mask[:, None]
    dual = jnp.linalg.solve(gram + ridge * jnp.eye(len(gram)), targets)
    return jnp.argmax(queries @ (x.T @ dual), axis=1).astype(jnp.int32)

  return jax.vmap(teacher)(*parts)


def vote_counts(votes: ArrayLike, num_classes: int) -> np.ndarray:
  """Counts votes [k, m] -> [m, num_classes]. Not private.

  >>> vote_counts(np.array([[0, 1], [0, 0]]), 3).tolist()
  [[2, 0, 0], [1, 1, 0]]
  """
  votes = np.asarray(votes)
  return (votes[..., None] == np.arange(num_classes)).sum(axis=0).astype(np.int32)


class PublicGraph(NamedTuple):
  """Public examples as a student sees them, and the graph of their similarities."""

  spread: sparse.csr_matrix  # [n, n], normalised similarities of near neighbours
  pool: np.ndarray  # [n, d] examples, some of which get labels
  others: np.ndarray  # [m, d] examples outside the graph, which only the student labels


def public_graph(
  pool: np.ndarray,
  others: np.ndarray,
  *,
  num_components: int = 200,
  num_student_components: int = 320,
  num_neighbors: int = 5,
) -> PublicGraph:
  """Returns the graph of a public pool: near neighbours by cosine in principal components.

  Each component is scaled to the square root of its standard deviation. Unscaled, a few components
  would decide which examples are near; scaled to equal deviations, noise would decide.

  Args:
    pool: [n, ...], public.
    others: [m, ...], public; they influence neither the graph nor the components.
    num_components: number of components of the graph; fewer if n, or an example's size, is smaller.
    num_student_components: number of components of the student's inputs; fewer in the same cases.
    num_neighbors: number of nearest examples that each example is joined to. An example may have
      more neighbours, since others may be joined to it.
  """
  validate.integer_at_least(
    1,
    num_components=num_components,
    num_student_components=num_student_components,
    num_neighbors=num_neighbors,
  )
  flat = np.reshape(np.asarray(pool, np.float32), (len(pool), -1))
  far = np.reshape(np.asarray(others, np.float32), (len(others), -1))
  if len(flat) <= num_neighbors:
    raise UserError(
      f"must be fewer than the pool's {len(flat)} examples",
      field="num_neighbors",
      value=num_neighbors,
    )
  mean = flat.mean(axis=0)
  most = max(num_components, num_student_components)
  directions, deviations = _components(flat - mean, most)
  seen = (flat - mean) @ directions
  seen_far = (far - mean) @ directions
  near = _on_sphere(seen[:, :num_components] / np.sqrt(deviations[:num_components]))
  # Ridge regression works better with more components, weighted less evenly than in the graph.
  seen = seen[:, :num_student_components]
  seen_far = seen_far[:, :num_student_components]
  weight = deviations[:num_student_components] ** 0.25
  return PublicGraph(
    _neighbors(near, num_neighbors),
    _on_sphere(seen / weight),
    _on_sphere(seen_far / weight),
  )


def _components(centred: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns (directions [d, k], singular values [k]) of the k = `most` largest principal
  components.

  There are fewer if an axis of `centred` [n, d] is shorter.
  """
  count = min(most, *centred.shape)
  width = min(count + _OVERSAMPLED, *centred.shape)
  # The seed is fixed, so that the components are a function of the public pool.
  start = np.random.default_rng(0).normal(size=(len(centred), width)).astype(np.float32)
  basis, _ = np.linalg.qr(centred.T @ start)
  for _ in range(_PASSES - 1):
    basis, _ = np.linalg.qr(centred.T @ (centred @ basis))
  _, deviations, turned = np.linalg.svd(centred @ basis, full_matrices=False)
  kept = np.maximum(deviations[:count], 1e-6 * max(float(deviations[0]), 1e-30))
  return basis @ turned[:count].T, kept


def _on_sphere(rows: np.ndarray) -> np.ndarray:
  return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)


def _neighbors(rows: np.ndarray, count: int) -> sparse.csr_matrix:
  """Returns D^-1/2 W D^-1/2, for the similarities W [n, n] of each row and its `count` nearest
  rows.

  W is made symmetric. The diagonal matrix D holds the row sums of W.
  """
  size = len(rows)
  columns = np.empty((size, count), np.int64)
  weights = np.empty((size, count), np.float64)
  for start in range(0, size, _ROWS):
    near = rows[start : start + _ROWS] @ rows.T
    here = np.arange(len(near))
    # No example is its own neighbour.
    near[here, start + here] = -np.inf
    columns[start : start + _ROWS] = np.argpartition(-near, count, axis=1)[:, :count]
    block = np.take_along_axis(near, columns[start : start + _ROWS], axis=1)
    weights[start : start + _ROWS] = np.maximum(block, 1e-3)
  entries = (weights.ravel(), (np.repeat(np.arange(size), count), columns.ravel()))
  graph = sparse.csr_matrix(entries, shape=(size, size))
  graph = graph.maximum(graph.T)
  scale = sparse.diags(np.asarray(graph.sum(axis=1)).ravel() ** -0.5)
  return (scale @ graph @ scale).tocsr()


def spread_labels(
  graph: PublicGraph,
  labels: np.ndarray,
  *,
  num_classes: int,
  reach: float = 0.985,
  num_turns: int = 150,
) -> np.ndarray:
  """Returns a label for each example of the pool, [n], from the labels of its neighbours.

  It is post-processing of published labels, and costs no privacy. Labels are not clamped, so that
  a neighbourhood can outvote a wrong label.

  Args:
    labels: [n], labels of the pool; below 0 for an example without one.
    reach: weight of the neighbours in each turn, in (0, 1).
    num_turns: number of turns of the iteration.
  """
  labels = np.asarray(labels)
  known = np.flatnonzero(labels >= 0)
  start = np.zeros((len(labels), num_classes))
  start[known, labels[known]] = 1
  # Each class with labels has the same total weight, however many of its examples have one.
  start /= np.maximum(start.sum(axis=0), 1)
  return _spread(graph, start, reach, num_turns)


def _spread(
  graph: PublicGraph, start: np.ndarray, reach: float, num_turns: int
) -> np.ndarray:
  scores = start.copy()
  for _ in range(num_turns):
    scores = reach * (graph.spread @ scores) + (1 - reach) * start
  return np.argmax(scores / np.maximum(scores.sum(axis=0), 1e-300), axis=1).astype(np.int32)


def student_weights(
  graph: PublicGraph, labels: np.ndarray, *, num_classes: int, penalty: float = 0.03
) -> np.ndarray:
  """Returns the student [d, num_classes]: ridge regression onto the labels of the whole pool.

  A first student's scores of the pool are spread over the graph, and a second student learns
  from the result. This corrects neighbourhoods that no label has reached.

  Args:
    labels: [n] in [0, num_classes), as `spread_labels` returns them.
    penalty: factor of the squared weights.
  """
  first = _ridge(graph, np.asarray(labels), num_classes, penalty)
  scores = np.maximum(graph.pool @ first, 0.0)
  scores /= np.maximum(scores.sum(axis=0), 1e-300)
  again = _spread(graph, scores, _SECOND_REACH, _SECOND_TURNS)
  return _ridge(graph, again, num_classes, penalty).astype(np.float32)


def _ridge(
  graph: PublicGraph, labels: np.ndarray, num_classes: int, penalty: float
) -> np.ndarray:
  targets = np.eye(num_classes)[labels] - 1 / num_classes
  gram = graph.pool.T @ graph.pool + penalty * np.eye(graph.pool.shape[1])
  return np.linalg.solve(gram, graph.pool.T @ targets)
