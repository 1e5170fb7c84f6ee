"""One run of PATE, from a `PateConfig`.

The first phase counts the votes of all teachers, some teachers in each step. The second phase
answers one query in each step, and only this phase publishes anything. Votes are stored only in
secret checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import data as data_lib
from dpjax.accounting import Ledger
from dpjax.data import cache
from dpjax.data.target_kinds import needs_classes
from dpjax.experiments.config import common, rules
from dpjax.experiments.config.choices import Choice, name_of
from dpjax.experiments.config.fields import WithChoices
from dpjax.experiments.config.sections import ExamplesConfig
from dpjax.experiments.kinds import public_pool
from dpjax.experiments.kinds.central import features as features_lib
from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.kinds.pate import vote_costs
from dpjax.experiments.run import guarantee, left_out, pieces, sizes, writers
from dpjax.experiments.run.experiment import Experiment, Phase, Scores, Story, every, single
from dpjax.experiments.run.pieces import Arrays
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.mechanisms.teacher_votes import UNANSWERED, ConfidentGNMax, GNMax, std_for
from dpjax.validate import UserError
from dpjax.zoo.recipes import pate

# Votes are float32: beyond these numbers their noise would be infinite, or 0.
_NOISE_STD = rules.within_range(1e-30, 1e36)


@dataclasses.dataclass(frozen=True)
class EveryQuery:
  """Every query is answered (GNMax)."""


@dataclasses.dataclass(frozen=True)
class ConfidentQueries:
  """Only queries are answered on which enough teachers agree (Confident-GNMax)."""

  max_answers: Annotated[int, common.COUNT, "all are accounted, used or not"] = 30
  threshold: Annotated[
    float, rules.NON_NEGATIVE, rules.IN_FLOAT32, "votes that an answer needs"
  ] = 25.0
  check_std: Annotated[float, _NOISE_STD, "noise of a check, in votes"] = 10.0


@dataclasses.dataclass(frozen=True)
class Pixels:
  """Teachers and student read the inputs as they are."""


@dataclasses.dataclass(frozen=True)
class Scattering:
  """Teachers and student read scattering features."""

  num_groups: Annotated[int, common.COUNT, "of channels, each standardised by itself"] = 27


@dataclasses.dataclass(frozen=True)
class PublishedCost:
  """What these very votes cost, published by smooth sensitivity, and paid for; of gnmax."""

  order: Annotated[
    float, "Renyi order of the published cost, from 1 to 1 / (1 - e^(-2 beta))"
  ] = 14.0
  beta: Annotated[float, rules.POSITIVE, "of its smooth sensitivity, a teacher"] = 0.02
  noise_in_sensitivities: Annotated[
    float, rules.POSITIVE, "of the published cost, in smooth sensitivities"
  ] = 12.0


AGGREGATORS: dict[str, type] = {
  "gnmax": EveryQuery,
  "confident_gnmax": ConfidentQueries,
}
FEATURES: dict[str, type] = {"pixels": Pixels, "scattering": Scattering}
COSTS: dict[str, type] = {"none": type(None), "published": PublishedCost}


@dataclasses.dataclass
class PateConfig(WithChoices):
  """Configuration of a run: teachers on private parts, noisy votes, a student.

  The test set is taken as public. Its first `num_pool` examples are the student's unlabelled pool.
  The other examples score the student.
  """

  data: ExamplesConfig = dataclasses.field(default_factory=ExamplesConfig)
  features: Annotated[Any, Choice(FEATURES), "what teachers and student read"] = "pixels"
  num_teachers: Annotated[int, rules.between(2, rules.MOST_CLIENTS), "private parts"] = 40
  teacher_capacity: Annotated[
    int,
    rules.between(1, rules.MOST_CLIENTS),
    "public: most records of a part; others are left out",
  ] = 60
  teacher_penalty: Annotated[
    float, rules.POSITIVE, rules.IN_FLOAT32, "of ridge regression"
  ] = 0.01
  num_pool: Annotated[int, rules.at_least(2), "public examples without labels"] = 200
  pool_is_public: common.PoolIsPublic = False
  num_queries: Annotated[
    int, rules.between(1, rules.MOST_STEPS), "examples of the pool that are asked about"
  ] = 40
  aggregator: Annotated[
    Any,
    Choice(AGGREGATORS),
    "gnmax: every query is answered; confident_gnmax: only where enough teachers agree",
  ] = "gnmax"
  std: Annotated[
    float | None, _NOISE_STD, "noise of a label, in votes; none: what epsilon allows"
  ] = None
  epsilon: Annotated[float, rules.POSITIVE, "of all labels together"] = 8.0
  delta: Annotated[common.Delta, "of the same"] = 1e-5
  epsilon_budget: common.EpsilonBudget = None
  neighboring_relation: Annotated[
    common.RecordRelation,
    "add_or_remove_one: a record's content chooses its teacher; replace_one: its place",
  ] = "add_or_remove_one"
  num_components: Annotated[int, common.COUNT, "of the public pool, for its graph"] = 50
  num_student_components: Annotated[int, common.COUNT, "of the student's inputs"] = 50
  num_neighbors: Annotated[int, common.COUNT, "of an example in the public graph"] = 5
  reach: Annotated[float, rules.OPEN_UNIT, "how far labels spread"] = 0.985
  student_penalty: Annotated[
    float, rules.POSITIVE, rules.IN_FLOAT32, "of ridge regression"
  ] = 0.03
  data_dependent: Annotated[
    bool, "also compute what these very votes cost: private, not for release"
  ] = False
  cost: Annotated[
    PublishedCost | None,
    Choice(COSTS),
    "published: that cost by smooth sensitivity, which is paid for; of gnmax",
  ] = None
  eval_every: Annotated[int, common.COUNT, "queries between two students"] = 20
  seed: common.Seed = 0
  noise_seed: common.NoiseSeed = None
  release: common.Release = False

  @property
  def aggregate(self) -> GNMax | ConfidentGNMax:
    """Returns the mechanism that publishes labels; if `std` is None, with the noise that `epsilon`
    allows."""
    relation = self.neighboring_relation
    std = self.std
    asked = self.aggregator
    confident = isinstance(asked, ConfidentQueries)
    if std is None:
      std = std_for(
        epsilon=self.epsilon,
        delta=self.delta,
        num_answers=self.most_answers,
        num_checks=self.num_queries if confident else 0,
        check_std=asked.check_std if confident else 1.0,
      )
    if confident:
      return ConfidentGNMax(asked.threshold, asked.check_std, std, relation)
    return GNMax(std, relation)

  @property
  def most_answers(self) -> int:
    """Returns how many answers the guarantee accounts for, whether they are given or not."""
    asked = self.aggregator
    is_bounded = isinstance(asked, ConfidentQueries)
    return asked.max_answers if is_bounded else self.num_queries


def _check_cost(config: PateConfig, cost: PublishedCost) -> None:
  if isinstance(config.aggregator, ConfidentQueries):
    raise UserError(
      "is proved for aggregator='gnmax' alone: which queries were answered depends on the votes",
      field="cost",
      value="published",
    )
  last_order = -1 / math.expm1(-2 * cost.beta)
  if not 1 < cost.order < last_order:
    raise UserError(
      "must be between 1 and the last order at which the release has a bound, "
      f"1 / (1 - e^(-2 beta)) = {last_order:g}",
      field="cost.order",
      value=cost.order,
    )


# Number of teachers in a step. Their padded parts are in memory at once.
_AT_ONCE = 10
# Label of a query that was not asked, because all answers were used.
_NOT_ASKED = -2


class Pate(Experiment[PateConfig]):
  """One run of PATE: teachers vote, queries are answered with noise, a student learns."""

  def check(self) -> None:
    config = self.config
    common.check_types(config)
    common.read_if(config, config.std is None, "std=None, which is solved for", "epsilon")
    common.at_most(config, "num_queries", config.num_pool, ", as num_pool")
    if config.most_answers > config.num_queries:
      raise UserError(
        f"must be at most num_queries={config.num_queries}",
        field="aggregator.max_answers",
        value=config.most_answers,
      )
    if config.num_neighbors >= config.num_pool:
      raise UserError(
        f"must be below num_pool={config.num_pool}",
        field="num_neighbors",
        value=config.num_neighbors,
      )
    if config.release:
      why = " with release=True: what these votes cost is itself private"
      common.only(config, "data_dependent", [False], why)
    if config.cost is not None:
      _check_cost(config, config.cost)
    # This raises UserError if no noise reaches epsilon.
    _ = config.aggregate

  def data(self) -> tuple[data_lib.Dataset, data_lib.Dataset]:
    """Returns (private data, public data) without features."""
    return self.config.data.load()

  def check_data(self, data: Any) -> None:
    private, public = data
    needs_classes(private, "data.name", self.config.data.name)
    public_pool.check_size(self.config, public)
    relation = self.config.neighboring_relation
    declared = sizes.named_size(len(private), private.nominal_size, relation=relation)
    if declared is not None:
      # Most parts would be empty, and a teacher without records votes for class 0.
      common.at_most(self.config, "num_teachers", declared, ", the records")
      # Every part is padded to it, whatever it holds.
      common.at_most(self.config, "teacher_capacity", declared, ", the records")
    elif self.config.num_teachers > len(private):
      writers.warn(
        f"num_teachers={self.config.num_teachers}: there are fewer records; a teacher without "
        "records votes for class 0"
      )
    vote_costs.check_published(self.config, private.num_classes)
    public_pool.check(self.config, private, public)

  def digest(self, data: Any) -> bytes:
    return public_pool.digest(self.config, *data)

  def line(self, result: dict[str, Any]) -> str:
    return (
      f"{result['dataset']} {result['method']}: {writers.headline(result)}, "
      f"{guarantee.summary(result)}, {result['num_answers']} of {result['num_queries']} queries "
      f"answered{writers.took(result)}"
    )

  def train(self, data: Any, keys: RunKeys) -> Story:
    private, public = data
    run = _Run(self.config, private, public, keys)
    # The budget is checked here, so that a refused run claims no folder.
    run.promised.check_budget(Ledger())
    votes = yield run.votes_phase()
    queries = run.queries_phase(np.asarray(votes.state["counts"]))
    return (yield from single(queries))


class _Run:
  """Holds the private records and the public examples of one run, and makes its two phases.

  The student is trained on published labels and public examples, so it costs no privacy.
  """

  def __init__(
    self,
    config: PateConfig,
    private: data_lib.Dataset,
    public: data_lib.Dataset,
    random: RunKeys,
  ):
    self.config = config
    self.private = private
    self.public = public
    self.random = random
    num_records = sizes.named_size(
      len(private), private.nominal_size, relation=config.neighboring_relation
    )
    promised = vote_costs.guarantee_of(config, num_records)
    self.promised = public_pool.add_note(promised, config, public)

  # Both phases read the public features. The phase that reads them first computes them.
  @functools.cached_property
  def public_features(self) -> np.ndarray:
    return self.features(self.public)

  @functools.cached_property
  def private_features(self) -> np.ndarray:
    return self.features(self.private)

  def features(self, dataset: Any) -> np.ndarray:
    """Returns features [n, d]. Each row depends only on one example and on public constants."""
    seen = dataset.x
    if not isinstance(self.config.features, Pixels):
      options = {"num_groups": self.config.features.num_groups}
      model = ModelConfig(name="scatter_linear", options=options)
      seen = features_lib.add_features(model, dataset, kept=cache.folder()).x
    # The neighbour of a single record is an empty data set. Its width cannot be inferred by -1.
    shape = (len(dataset), math.prod(seen.shape[1:]))
    return np.reshape(np.asarray(seen, np.float32), shape)

  # --- the teachers

  @functools.cached_property
  def parts(self) -> np.ndarray:
    """Returns the part of each private record, [n]; -1 for an empty one, which teaches nobody."""
    relation = self.config.aggregate.neighboring_relation
    x, y = self.private.x, self.private.y
    parts = pate.parts(x, y, self.config.num_teachers, neighboring_relation=relation)
    # Empty records are left out after places have decided, so that nobody else moves.
    present = self.private.present
    return parts if present is None else np.where(present, parts, -1)

  def votes_phase(self) -> Phase:
    """Returns the phase that counts the votes of all teachers, some teachers in each step."""
    config = self.config
    num_classes = self.private.num_classes

    def fill(state: Arrays, piece: int) -> None:
      first = piece * _AT_ONCE
      which = range(first, min(first + _AT_ONCE, config.num_teachers))
      queries = jnp.asarray(self.public_features[: config.num_queries])
      padded = pate.padded_parts(
        self.private_features, self.private.y, self.parts, which, config.teacher_capacity
      )
      votes = pate.ridge_votes(
        padded, queries, penalty=config.teacher_penalty, num_classes=num_classes
      )
      state["counts"] += pate.vote_counts(votes, num_classes)

    shape = (config.num_queries, num_classes)
    return pieces.fill_pieces(
      -(-config.num_teachers // _AT_ONCE),
      lambda: {"counts": np.zeros(shape, np.int32)},
      fill,
      name="teachers",
      subfolder="teachers",
    )

  # --- the student

  @functools.cached_property
  def graph(self) -> pate.PublicGraph:
    """Returns the public graph, computed once, for the first student."""
    seen = self.public_features
    pool = self.config.num_pool
    return pate.public_graph(
      seen[:pool],
      seen[pool:],
      num_components=self.config.num_components,
      num_student_components=self.config.num_student_components,
      num_neighbors=self.config.num_neighbors,
    )

  @functools.lru_cache(maxsize=2)  # noqa: B019 - as long as the run
  def _student(self, labels: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Returns (labels of the pool, weights of the student)."""
    published = np.frombuffer(labels, np.int32)
    pool = np.full(self.config.num_pool, UNANSWERED, np.int32)
    pool[: len(published)] = published
    num_classes = self.private.num_classes
    spread = pate.spread_labels(
      self.graph, pool, num_classes=num_classes, reach=self.config.reach
    )
    weights = pate.student_weights(
      self.graph, spread, num_classes=num_classes, penalty=self.config.student_penalty
    )
    return spread, weights

  def outputs(self, state: Any) -> dict[str, np.ndarray]:
    """Returns the outputs that may be published: answers, labels of the pool, student's weights."""
    labels = np.asarray(state["labels"])
    spread, weights = self._student(labels.tobytes())
    return {"labels": labels, "pool_labels": spread, "student": weights}

  def scores(self, state: Any) -> Scores:
    """Returns the accuracies of the student, of the answers and of the pool's labels, and the
    number of answers."""
    labels = np.asarray(state["labels"])
    pool = self.config.num_pool
    truth = self.public.y
    spread, weights = self._student(labels.tobytes())
    answered = np.flatnonzero(labels >= 0)
    right = labels[answered] == truth[answered]
    predicted = np.argmax(self.graph.others @ weights, axis=1)
    return {
      "accuracy": float(np.mean(predicted == truth[pool:])),
      "label_accuracy": float(np.mean(right)) if len(right) else 0.0,
      "pool_accuracy": float(np.mean(spread == truth[:pool])),
      "answers": len(answered),
    }

  # --- the queries

  def not_private(self, counts: np.ndarray) -> dict[str, Any]:
    """Returns what the private records tell of the teachers, and of the cells of a table."""
    config = self.config
    right = counts[np.arange(len(counts)), self.public.y[: len(counts)]]
    in_part = np.bincount(self.parts[self.parts >= 0], minlength=config.num_teachers)
    return {
      "not_private/teacher_accuracy": float(np.mean(right) / config.num_teachers),
      "not_private/left_out": int(np.maximum(in_part - config.teacher_capacity, 0).sum()),
      **left_out.clipped_cells(self.private, shown=True),
    }

  def queries_phase(self, counts: np.ndarray) -> Phase:
    """Returns the phase that answers one query in each step. Only this phase publishes anything.

    Args:
      counts: votes of all teachers, [num_queries, K].
    """
    config = self.config
    random = self.random
    mechanism = config.aggregate

    # The key is an argument: as a constant it would stand in the compiled program, which JAX may
    # keep in a cache on disk.
    @jax.jit
    def answered(key: jax.Array, labels: jax.Array, query: Any, row: Any) -> jax.Array:
      label = mechanism(jax.random.fold_in(key, query), row)
      left = jnp.sum(labels >= 0) < config.most_answers
      # If no answer is left, the query counts as not asked. All answers were accounted for before.
      return labels.at[query].set(jnp.where(left, label, _NOT_ASKED))

    def step(state: Any, draw: Any) -> tuple[Any, None]:
      return {"labels": answered(random.noise, state["labels"], *draw)}, None

    def draws(start: int) -> Iterator[tuple[Any, Any]]:
      for query in range(start, config.num_queries):
        yield np.int32(query), jnp.asarray(counts[query], jnp.float32)

    def describe(state: Any, facts: Any, rows: Any) -> dict[str, Any]:
      labels = np.asarray(state["labels"])
      # The answers are released with noise, so a release may say this, too.
      if not np.any(labels >= 0):
        raise UserError(
          "none of them was answered, so no student learned anything; no result is written, rows "
          "and checkpoints stay",
          field="num_queries",
          value=config.num_queries,
        )
      values: dict[str, Any] = {
        "num_teachers": config.num_teachers,
        "num_queries": config.num_queries,
        "num_answers": int(np.sum(labels >= 0)),
        "most_answers": config.most_answers,
        "answer_std": float(mechanism.std),
      }
      if not config.release:
        values |= self.not_private(counts)
      if config.data_dependent:
        values |= vote_costs.of_votes(config, counts, labels >= 0)
      if config.cost is not None:
        values |= vote_costs.publish(config, config.cost, counts, random.noise)
      return values

    return Phase(
      num_steps=config.num_queries,
      init=lambda: {"labels": jnp.full(config.num_queries, _NOT_ASKED, jnp.int32)},
      step=step,
      draws=draws,
      released=self.outputs,
      evaluate=self.scores,
      row_at=functools.partial(every, config.eval_every, config.num_queries),
      guarantee=self.promised,
      name="queries",
      subfolder="queries",
      steps_are="queries",
      planned=lambda: {
        "task": "pate",
        "dataset": config.data.name,
        "method": name_of(config, "aggregator"),
        "model": name_of(config, "features"),
      },
      describe=describe,
    )
