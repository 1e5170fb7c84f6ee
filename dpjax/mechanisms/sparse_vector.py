"""Sparse vector: finds queries above a threshold, at the same cost for any number of queries.

One noisy threshold is drawn. Every query is compared with it under fresh noise, and the stream ends
after `max_above` hits. Queries below the threshold cost nothing.

Source: Dwork and Roth 2014, section 3.6. The scales and the split of the budget are those of Lyu,
Su and Li 2017, arXiv:1603.01699, algorithm 7. They show that other variants are not private: those
without noise on the queries, without an end after `max_above` hits, or with a release of the
compared noisy value.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp

from dpjax import accounting, trees, validate
from dpjax.mechanisms import finite, stated
from dpjax.mechanisms.additive import Laplace
from dpjax.noise import source
from dpjax.validate import UserError

_MOST_ABOVE = 2**31 - 1


class SparseVectorState(NamedTuple):
  """State between queries. It holds the threshold's noise: keep it secret."""

  key: jax.Array  # words of the key (`noise.source.to_words`)
  threshold_noise: jax.Array  # scalar float: noisy threshold - public threshold
  num_asked: jax.Array  # scalar int32
  num_above: jax.Array  # scalar int32


class SparseVectorAnswer(NamedTuple):
  """Answers, which may be released: each field is [] for one query, [n] for a stream."""

  asked: jax.Array  # bool: False once the stream has ended; then `above` is False
  above: jax.Array  # bool
  value: jax.Array  # float: noisy value of a hit if epsilon_values > 0, else NaN


@dataclasses.dataclass(frozen=True)
class SparseVector:
  """Finds queries above `threshold`, until `max_above` of them are found.

  Args:
    epsilon: epsilon of all comparisons together.
    threshold: public number with which queries are compared.
    sensitivity: largest change of each query by one record.
    max_above: number of hits after which the stream ends.
    monotonic: whether one record moves all queries in the same direction, which needs less noise.
    epsilon_values: further epsilon, for noisy values of the hits; 0 releases none.

  Guarantee: (epsilon + epsilon_values, 0)-DP, for any number of queries, each of which may
  depend on all earlier answers.

  | input                        | outcome                               |
  | ---------------------------- | ------------------------------------- |
  | NaN or infinity in a query   | UserError; not checked under tracing  |
  | queries after the end        | asked=False, above=False, value=NaN   |

  >>> mechanism = SparseVector(epsilon=1.0, threshold=50.0, max_above=1)
  >>> answers = mechanism(jax.random.key(0), jnp.array([0.0, 1.0, 900.0, 900.0]))
  >>> answers.above.tolist(), answers.asked.tolist()
  ([False, False, True, False], [True, True, True, False])
  """

  epsilon: float
  threshold: float
  sensitivity: float = 1.0
  max_above: int = 1
  monotonic: bool = False
  epsilon_values: float = 0.0
  neighboring_relation: str = "add_or_remove_one"

  def __post_init__(self) -> None:
    validate.flag(monotonic=self.monotonic)
    stated.positive(epsilon=self.epsilon, sensitivity=self.sensitivity)
    validate.non_negative(epsilon_values=self.epsilon_values)
    validate.finite(epsilon_values=self.epsilon_values)
    validate.integer_at_least(1, max_above=self.max_above)
    if self.max_above > _MOST_ABOVE:
      raise UserError("must be below 2^31", field="max_above", value=self.max_above)
    validate.one_of(stated.RELATIONS, neighboring_relation=self.neighboring_relation)
    validate.finite(threshold=self.threshold)
    if self.monotonic and self.neighboring_relation == "replace_one":
      raise UserError("must be False under replace_one", field="monotonic", value=True)
    stated.positive(threshold_scale=self.threshold_scale, query_scale=self.query_scale)
    # Raises for a wrong scale of the values before any call.
    _ = self._values

  @property
  def _shifts(self) -> int:
    """Returns how many sensitivities the noise on one query must hide."""
    return 1 if self.monotonic else 2

  @property
  def threshold_epsilon(self) -> float:
    """Returns the threshold's part of epsilon, at which comparisons have the least variance."""
    return float(self.epsilon) / (1 + (self._shifts * int(self.max_above)) ** (2 / 3))

  @property
  def hit_epsilon(self) -> float:
    """Returns the epsilon of one hit: an equal part of what the threshold leaves."""
    return (float(self.epsilon) - self.threshold_epsilon) / int(self.max_above)

  @property
  def threshold_scale(self) -> float:
    """Returns the scale of the Laplace noise on the threshold."""
    return float(self.sensitivity) / self.threshold_epsilon

  @property
  def query_scale(self) -> float:
    """Returns the scale of the Laplace noise that is added to each query for its comparison."""
    return self._shifts * float(self.sensitivity) / self.hit_epsilon

  def init(self, key: jax.Array) -> SparseVectorState:
    """Draws the noisy threshold, and returns the state before the first query."""
    trees.check_key(key=key)
    for_threshold, for_queries = jax.random.split(key)
    noise = source.laplace(for_threshold, jnp.zeros(()), self.threshold_scale)
    none = jnp.zeros((), jnp.int32)
    return SparseVectorState(source.to_words(for_queries), noise, none, none)

  def step(
    self, state: SparseVectorState, query: jax.Array
  ) -> tuple[SparseVectorAnswer, SparseVectorState]:
    """Returns (answer to one scalar query, next state); the query may depend on earlier answers.

    >>> mechanism = SparseVector(epsilon=1.0, threshold=50.0)
    >>> answer, state = mechanism.step(mechanism.init(jax.random.key(0)), 900.0)
    >>> bool(answer.above), int(state.num_above)
    (True, 1)
    """
    query = finite.array("query", query)
    if query.ndim:
      raise UserError(f"must be a scalar, not of shape {query.shape}", field="query")
    return self._step(state, *self._excess("query", query))

  @property
  def _values(self) -> Laplace | None:
    """Returns the noise on the values of hits; None if no values are released.

    This noise is drawn anew: the noisy query that was compared would reveal the noisy threshold."""
    if self.epsilon_values == 0:
      return None
    each = float(self.epsilon_values) / int(self.max_above)
    return Laplace(each, self.sensitivity, self.neighboring_relation)

  def _excess(self, name: str, queries: jax.Array) -> tuple[jax.Array, tuple | None]:
    """Returns queries minus the public threshold, and the queries as pairs of floats for the noise
    on their values (None if no values are released)."""
    above = finite.above(name, queries, float(self.threshold))
    if self._values is None:
      return above, None
    return above, finite.pair(name, queries, self._values.scale)

  def _step(
    self, state: SparseVectorState, gap: jax.Array, query: tuple | None
  ) -> tuple[SparseVectorAnswer, SparseVectorState]:
    # Each query is compared under fresh noise, as the proof needs.
    key = jax.random.fold_in(source.from_words(state.key), state.num_asked)
    for_comparison, for_value = jax.random.split(key)
    asked = state.num_above < int(self.max_above)
    like = state.threshold_noise
    noisy = gap + source.laplace(for_comparison, like, self.query_scale)
    # `gap` is the query minus the public threshold, so it is compared with the threshold's noise.
    above = asked & (noisy >= state.threshold_noise)
    fresh = jnp.full_like(gap, jnp.nan)
    if query is not None:
      fresh = self._values.on(for_value, *query)  # pyright: ignore[reportOptionalMemberAccess]
    value = jnp.where(above, fresh, jnp.nan)
    later = state._replace(num_asked=state.num_asked + 1, num_above=state.num_above + above)
    return SparseVectorAnswer(asked, above, value), later

  def __call__(self, key: jax.Array, queries: jax.Array) -> SparseVectorAnswer:
    """Returns the answers [n] to `queries` [n], in order."""
    queries = finite.array("queries", queries)
    if queries.ndim != 1:
      raise UserError(f"must have shape [n], not {queries.shape}", field="queries")

    def step(state, query):
      answer, state = self._step(state, *query)
      return state, answer

    return jax.lax.scan(step, self.init(key), self._excess("queries", queries))[1]

  def event(
    self,
    neighboring_relation: str = "add_or_remove_one",
    *,
    num_above: int | None = None,
  ) -> stated.DpEvent:
    """Returns the event for `dpjax.accounting`: by default that of all `max_above` hits.

    With `num_above` the event is that of a stream that ended after `num_above` hits: the threshold,
    those hits and their values. This event bounds the privacy loss of one transcript. It is no
    guarantee of the mechanism, since the number of hits depends on the data. So use it only with a
    privacy filter: a budget that was fixed beforehand, from which pure epsilons are subtracted
    (Rogers et al. 2016, arXiv:1605.08294).

    >>> SparseVector(epsilon=1.0, threshold=0.0, max_above=3).event(num_above=4)
    Traceback (most recent call last):
    ...
    dpjax.validate.UserError: num_above=4: must be at most max_above=3
    """
    hits = self.max_above if num_above is None else num_above
    validate.integer_at_least(0, num_above=hits)
    if hits > self.max_above:
      raise UserError(
        f"must be at most max_above={self.max_above}", field="num_above", value=hits
      )
    relations = self.neighboring_relation, neighboring_relation
    spent = self.threshold_epsilon + hits * self.hit_epsilon
    comparisons = stated.pure_event(spent, *relations)
    if self._values is None or hits == 0:
      return comparisons
    values = accounting.compose(self._values.event(neighboring_relation), int(hits))
    return dp_accounting.ComposedDpEvent([comparisons, values])
