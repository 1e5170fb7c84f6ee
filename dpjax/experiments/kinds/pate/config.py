"""Typed configuration of a run of PATE. A config file returns it."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

from dpjax.experiments.config import common, rules
from dpjax.experiments.config.choices import Choice
from dpjax.experiments.config.fields import WithChoices
from dpjax.experiments.config.sections import ExamplesConfig
from dpjax.mechanisms.teacher_votes import ConfidentGNMax, GNMax, std_for
from dpjax.validate import UserError

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


def check(config: PateConfig) -> None:
  """Raises UserError if the config is wrong; loads no data."""
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
