"""Model extraction: a copy of a model, from its answers alone.

| attack          | asks for                | gets                                 | source        |
| --------------- | ----------------------- | ------------------------------------ | ------------- |
| `solve_softmax` | probabilities           | an exact linear model, d + 1 queries | Tramèr 2016   |
| `Extraction`    | probabilities or labels | a student of any shape, from answers | Orekondy 2019 |

The measure is fidelity: the share of new inputs on which copy and model name the same label.
Differential privacy protects records, not the model: a private model is copied like any other. An
owner can round the answers (`ask(..., decimals=)`), give labels alone (`labels_only=`), and limit
the number of queries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees, validate
from dpjax.attacks import signals
from dpjax.attacks.fitting import Fit
from dpjax.attacks.roc import Counted, with_interval
from dpjax.metrics import Apply
from dpjax.types import Array, HostArray, Params
from dpjax.validate import UserError

Ask = Callable[[np.ndarray], np.ndarray]  # x [n, ...] -> probabilities [n, K]


def ask(
  apply: Apply,
  params: Params,
  *,
  labels_only: bool = False,
  decimals: int | None = None,
  batch_size: int = 500,
) -> Ask:
  """Returns the function that queries a model: x [n, ...] -> answers, float64 [n, K].

  Args:
    labels_only: whether answers show the most probable label alone, as 1, and 0 for all others.
    decimals: number of decimals of the rounded probabilities; None: not rounded.

  Raises UserError for `labels_only` beside `decimals`. The returned function raises it for inputs
  that the model does not take.

  >>> door = ask(lambda w, x: x * w, 1.0, decimals=1)
  >>> door(np.array([[0.0, 1.0]])).tolist()  # .269, .731
  [[0.3, 0.7]]
  """
  validate.integer_at_least(1, batch_size=batch_size)
  if decimals is not None:
    validate.integer_at_least(0, decimals=decimals)
    if labels_only:
      raise UserError("labels have none; must be None", field="decimals", value=decimals)
  answer = jax.jit(lambda x: jax.nn.softmax(trees.at_least_float32(apply(params, x))))

  def door(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x)
    if not len(x):
      raise UserError("must hold at least one query", field="x")
    signals.num_classes(apply, params, x.shape[1:])
    probabilities = signals.by_parts(lambda part: answer(x[part]), len(x), batch_size)
    if labels_only:
      return np.eye(probabilities.shape[1])[probabilities.argmax(axis=1)]
    return probabilities if decimals is None else probabilities.round(decimals)

  return door


def solve_softmax(x: HostArray, answers: HostArray) -> tuple[np.ndarray, np.ndarray]:
  """Solves for (kernel [d, K], bias [K]) of a linear softmax model (Tramèr et al. 2016, 4.1).

  log(p_k / p_0) is linear in x, so d + 1 queries in general position are enough. More queries are
  solved by least squares. Answers fix only differences of logits, so class 0 gets weights of 0.

  Args:
    x: queries [n, ...], flattened to [n, d].
    answers: probabilities [n, K].

  Raises UserError if the queries do not fix d + 1 numbers for each class. It is also raised for a
  probability of 0 or 1 (rounded, or a label), which has no log odds.

  >>> kernel, bias = solve_softmax([[0.0], [1.0]], [[0.5, 0.5], [0.25, 0.75]])
  >>> kernel.round(4).tolist(), (bias.round(4) + 0.0).tolist()  # log 3
  ([[0.0, 1.0986]], [0.0, 0.0])
  """
  queries = signals.numbers("x", x)
  p = signals.probabilities("answers", answers)
  if not np.isfinite(queries).all():
    raise UserError("must be finite", field="x")
  if len(queries) != len(p):
    raise UserError(
      f"are {len(p)} to {len(queries)} queries: must be as many", field="answers"
    )
  # A column of ones carries the bias.
  queries = np.column_stack([queries.reshape(len(queries), -1), np.ones(len(queries))])
  if (p <= 0).any() or (p >= 1).any():
    raise UserError(
      f"{np.sum((p <= 0) | (p >= 1))} are 0 or 1, which have no log odds: must "
      "be in (0, 1)",
      field="answers",
    )
  odds = np.log(p) - np.log(p[:, :1])  # [n, K]
  solution, _, rank, _ = np.linalg.lstsq(queries, odds, rcond=None)
  if rank < queries.shape[1]:
    raise UserError(
      f"{len(queries)} queries fix {rank} of {queries.shape[1]} numbers per "
      f"class: must be at least {queries.shape[1]} in general position",
      field="x",
    )
  return solution[:-1], solution[-1]


@dataclasses.dataclass(frozen=True)
class Extraction:
  """Trains a student model to answer as the target did.

  Args:
    apply: the student, `(params, x [B, ...]) -> logits [B, K]`, of any architecture.
    init_params: function from a key to the student's first parameters.
    fit: settings of the student's training.
  """

  apply: Apply
  init_params: Callable[[Array], Params]
  fit: Fit = dataclasses.field(default_factory=Fit)

  def __call__(self, x: HostArray, answers: HostArray, *, seed: int) -> Params:
    """Trains on queries x [n, ...] and answers [n, K], and returns the student's parameters.

    Raises UserError if there is not one answer for each query, or the student has another number
    of classes.
    """
    queries = np.asarray(x)
    p = signals.probabilities("answers", answers)
    if len(queries) != len(p):
      raise UserError(
        f"are {len(p)} to {len(queries)} queries: must be as many", field="answers"
      )
    params = self.init_params(jax.random.key(seed % 2**32))
    known = signals.num_classes(self.apply, params, queries.shape[1:])
    if known != p.shape[1]:
      raise UserError(
        f"the student has {known} classes: must have {p.shape[1]}, as the model answers",
        field="apply",
      )

    def loss(params: Params, batch: tuple[Array, Array]) -> Array:
      logits = trees.at_least_float32(self.apply(params, batch[0]))
      return -jnp.mean(jnp.sum(batch[1] * jax.nn.log_softmax(logits), axis=1))

    return self.fit(loss, params, (queries, p.astype(np.float32)), seed=seed)


class Agreement(NamedTuple):
  """Inputs on which a copy and its model name the same label."""

  num_queries: int  # that the copy was trained on
  alike: Counted


def agreement(
  guesses: HostArray, answers: HostArray, *, num_queries: int, confidence: float = 0.95
) -> Agreement:
  """Counts the inputs on which a copy and its model name the same label, from answers [n, K].

  None of these inputs may be among the `num_queries` queries that the copy was trained on.

  >>> agreement([[0.9, 0.1], [0.2, 0.8]], [[0.6, 0.4], [1.0, 0.0]], num_queries=5).alike.rate
  0.5
  """
  validate.integer_at_least(1, num_queries=num_queries)
  a = signals.probabilities("answers", guesses)
  b = signals.probabilities("answers", answers)
  if a.shape != b.shape:
    raise UserError(
      f"has the shape {a.shape}: must be that of the answers, {b.shape}", field="guesses"
    )
  count = int(np.sum(a.argmax(axis=1) == b.argmax(axis=1)))
  return Agreement(num_queries, with_interval(count, len(a), confidence))


def extraction_curve(
  extraction: Extraction,
  target: Ask,
  queries: HostArray,
  held_out: HostArray,
  *,
  num_queries: Sequence[int],
  seed: int,
) -> list[Agreement]:
  """Returns the fidelity of a copy from the first n rows of `queries`, for each n of `num_queries`.

  Args:
    target: the attacker's access to the model, `ask(...)`.
    queries: inputs [N, ...].
    held_out: inputs [m, ...] on which copy and target are compared. The attacker asks none of them.

  Raises UserError for more queries than there are rows, or held-out inputs that are queries, too.
  """
  x = np.asarray(queries)
  others = np.asarray(held_out)
  sizes = validate.several(num_queries=num_queries)
  if not sizes:
    raise UserError("must hold at least one number", field="num_queries", value=sizes)
  validate.integer_in(1, len(x), **validate.entries(num_queries=sizes))
  # One type for both, and one zero: -0.0 equals 0.0, but has other bytes.
  common = np.result_type(x, others)
  bytes_of = lambda rows: [row.tobytes() for row in rows.astype(common) + 0]
  known = set(bytes_of(x[: max(sizes)]))
  if shared := sum(row in known for row in bytes_of(others)):
    raise UserError(
      f"{shared} of {len(others)} inputs are queries as well", field="held_out"
    )
  truth = target(others)
  answers = target(x[: max(sizes)])
  rows = []
  for size in sizes:
    params = extraction(x[:size], answers[:size], seed=seed)
    copy = ask(extraction.apply, params)(others)
    rows.append(agreement(copy, truth, num_queries=size))
  return rows
