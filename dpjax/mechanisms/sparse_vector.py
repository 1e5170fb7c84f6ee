"""Sparse vector: which of many queries exceed a threshold, paying for the hits only.

One noisy threshold is drawn; every query is compared with it under fresh noise, and the
stream ends after `max_above` hits. The queries below cost nothing.

Source: Dwork and Roth 2014, section 3.6; the scales and the split of the budget: Lyu, Su and
Li 2017, arXiv:1603.01699, algorithm 7, who also show how other variants fail: no noise on
the queries, no end after `max_above`, or the noisy value of the comparison released.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp

from dpjax import validate
from dpjax.mechanisms import stated
from dpjax.validate import UserError


class SparseVectorState(NamedTuple):
  """What the next query needs. It holds the noisy threshold: keep it secret."""

  key: jax.Array
  noisy_threshold: jax.Array  # scalar float
  num_asked: jax.Array  # scalar int32
  num_above: jax.Array  # scalar int32


class SparseVectorAnswer(NamedTuple):
  """What may be released: [] for one query, [n] for a stream."""

  asked: jax.Array  # bool: False once the stream has ended; the rest is then empty
  above: jax.Array  # bool
  value: jax.Array  # float: fresh noisy value where above and paid for, else NaN


@dataclasses.dataclass(frozen=True)
class SparseVector:
  """Which queries exceed `threshold`, until `max_above` of them did.

  Args:
    epsilon: of all comparisons together.
    sensitivity: how far one record moves each query.
    max_above: hits after which the stream ends.
    monotonic: one record moves all queries in the same direction; less noise then.
    epsilon_values: on top, for noisy values of the hits; 0 releases none.

  Guarantee: (epsilon + epsilon_values, 0)-DP, for any number of queries, each of which may
  depend on all earlier answers.

  | input                        | outcome                               |
  | ---------------------------- | ------------------------------------- |
  | NaN or infinity in a query   | UserError (unseen while being traced) |
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
    validate.positive(epsilon=self.epsilon, sensitivity=self.sensitivity)
    validate.non_negative(epsilon_values=self.epsilon_values)
    validate.integer_at_least(1, max_above=self.max_above)
    validate.one_of(stated.RELATIONS, neighboring_relation=self.neighboring_relation)
    stated.number(threshold=self.threshold)
    if self.monotonic and self.neighboring_relation == "replace_one":
      raise UserError("monotonic=True: must be False under replace_one")

  @property
  def _shifts(self) -> int:
    """How many sensitivities the noise on one query has to hide."""
    return 1 if self.monotonic else 2

  @property
  def threshold_epsilon(self) -> float:
    """Share of epsilon for the threshold: the split that minimises the noise."""
    return self.epsilon / (1 + (self._shifts * self.max_above) ** (2 / 3))

  @property
  def hit_epsilon(self) -> float:
    """What each hit costs: an equal part of the rest of epsilon."""
    return (self.epsilon - self.threshold_epsilon) / self.max_above

  @property
  def threshold_scale(self) -> float:
    """Scale of the Laplace noise on the threshold."""
    return self.sensitivity / self.threshold_epsilon

  @property
  def query_scale(self) -> float:
    """Scale of the Laplace noise on each query, for its comparison."""
    return self._shifts * self.sensitivity / self.hit_epsilon

  def init(self, key: jax.Array) -> SparseVectorState:
    """Draws the noisy threshold."""
    for_threshold, for_queries = jax.random.split(key)
    noise = self.threshold_scale * jax.random.laplace(for_threshold)
    none = jnp.zeros((), jnp.int32)
    return SparseVectorState(for_queries, self.threshold + noise, none, none)

  def step(
    self, state: SparseVectorState, query: jax.Array
  ) -> tuple[SparseVectorAnswer, SparseVectorState]:
    """The answer to one query, a scalar; the query may depend on earlier answers.

    >>> mechanism = SparseVector(epsilon=1.0, threshold=50.0)
    >>> answer, state = mechanism.step(mechanism.init(jax.random.key(0)), 900.0)
    >>> bool(answer.above), int(state.num_above)
    (True, 1)
    """
    stated.finite(query=query)
    query = stated.as_floats(query)
    key = jax.random.fold_in(state.key, state.num_asked)
    for_comparison, for_value = jax.random.split(key)
    asked = state.num_above < self.max_above
    noisy = query + self.query_scale * jax.random.laplace(for_comparison)
    above = asked & (noisy >= state.noisy_threshold)
    value = jnp.where(above, self._value(for_value, query), jnp.nan)
    later = state._replace(num_asked=state.num_asked + 1, num_above=state.num_above + above)
    return SparseVectorAnswer(asked, above, value), later

  def _value(self, key: jax.Array, query: jax.Array) -> jax.Array:
    """A fresh noisy value: the one that was compared would give the threshold away."""
    if self.epsilon_values == 0:
      return jnp.full_like(query, jnp.nan)
    scale = self.max_above * self.sensitivity / self.epsilon_values
    return query + scale * jax.random.laplace(key, query.shape, query.dtype)

  def __call__(self, key: jax.Array, queries: jax.Array) -> SparseVectorAnswer:
    """The answers [n] to `queries` [n], in order."""
    stated.finite(queries=queries)
    queries = stated.as_floats(queries)
    if queries.ndim != 1:
      raise UserError(f"queries: must have shape [n], not {queries.shape}")

    def step(state, query):
      answer, state = self.step(state, query)
      return state, answer

    return jax.lax.scan(step, self.init(key), queries)[1]

  def event(
    self,
    neighboring_relation: str = "add_or_remove_one",
    *,
    num_above: int | None = None,
  ) -> stated.DpEvent:
    """For `dpjax.accounting`: by default the whole price, which is fixed beforehand.

    num_above: the price of a stream that was ended after so many hits: the threshold,
    those hits and their values. It is right inside a budget that was fixed beforehand and
    is summed up by pure epsilons (a privacy filter: Rogers et al. 2016, arXiv:1605.08294),
    because it bounds the privacy loss of that very transcript. It is not an epsilon of the
    mechanism, since the number of hits depends on the data.

    >>> SparseVector(epsilon=1.0, threshold=0.0, max_above=3).event(num_above=4)
    Traceback (most recent call last):
    ...
    dpjax.validate.UserError: num_above=4: must be at most max_above=3
    """
    hits = self.max_above if num_above is None else num_above
    validate.integer_at_least(0, num_above=hits)
    if hits > self.max_above:
      raise UserError(f"num_above={hits}: must be at most max_above={self.max_above}")
    relations = self.neighboring_relation, neighboring_relation
    spent = self.threshold_epsilon + hits * self.hit_epsilon
    comparisons = stated.pure_event(spent, *relations)
    if self.epsilon_values == 0 or hits == 0:
      return comparisons
    values = stated.laplace_event(self.max_above / self.epsilon_values, *relations)
    return dp_accounting.ComposedDpEvent(
      [comparisons, dp_accounting.SelfComposedDpEvent(values, int(hits))]
    )
