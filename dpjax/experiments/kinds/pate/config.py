"""Typed configuration of a run of PATE. A config file returns it."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

from dpjax.experiments.config import common, rules
from dpjax.experiments.config import unread as unread_lib
from dpjax.experiments.config.unread import Unused, needs
from dpjax.experiments.kinds import bounds, named_data
from dpjax.mechanisms.teacher_votes import ConfidentGNMax, GNMax, std_for
from dpjax.validate import UserError

AGGREGATORS = ("gnmax", "confident_gnmax")
FEATURES = ("scattering", "pixels")


@dataclasses.dataclass
class PateConfig:
  """Configuration of a run: teachers on private parts, noisy votes, a student.

  The test set is taken as public. Its first `num_pool` examples are the student's unlabelled pool.
  The other examples score the student.
  """

  dataset: Annotated[str, "digits | mnist | any name of dpjax.data.load"] = "digits"
  data_dir: common.DataDir = None
  features: Annotated[str, rules.among(FEATURES), "what teachers and student read"] = (
    "pixels"
  )
  num_groups: Annotated[
    int, common.COUNT, "of channels, each standardised by itself; of scattering"
  ] = 27
  num_teachers: Annotated[int, rules.between(2, rules.MOST_CLIENTS), "private parts"] = 40
  teacher_capacity: Annotated[
    int, common.COUNT, "public: most records of a part; others are left out"
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
    str,
    rules.among(AGGREGATORS),
    "gnmax: every query is answered; confident_gnmax: only where enough teachers agree",
  ] = "gnmax"
  max_answers: Annotated[
    int, common.COUNT, "all are accounted, used or not; of confident_gnmax"
  ] = 30
  threshold: Annotated[
    float,
    rules.NON_NEGATIVE,
    rules.IN_FLOAT32,
    "votes that an answer needs; of confident_gnmax",
  ] = 25.0
  check_std: Annotated[
    float,
    rules.POSITIVE,
    rules.IN_FLOAT32,
    "noise of a check, in votes; of confident_gnmax",
  ] = 10.0
  std: Annotated[
    float | None,
    rules.POSITIVE,
    rules.IN_FLOAT32,
    "noise of a label, in votes; none: what epsilon allows",
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
  publish_cost: Annotated[
    bool, "publish that cost by smooth sensitivity, and pay for it; of gnmax"
  ] = False
  cost_order: Annotated[
    float, "Renyi order of the published cost, from 1 to 1 / (1 - e^(-2 cost_beta))"
  ] = 14.0
  cost_beta: Annotated[float, rules.POSITIVE, "of its smooth sensitivity, a teacher"] = 0.02
  cost_noise: Annotated[
    float, rules.POSITIVE, "of the published cost, in smooth sensitivities"
  ] = 12.0
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
    confident = self.aggregator == "confident_gnmax"
    if std is None:
      std = std_for(
        epsilon=self.epsilon,
        delta=self.delta,
        num_answers=self.most_answers,
        num_checks=self.num_queries if confident else 0,
        check_std=self.check_std,
      )
    if confident:
      return ConfidentGNMax(self.threshold, self.check_std, std, relation)
    return GNMax(std, relation)

  @property
  def most_answers(self) -> int:
    """Returns how many answers the guarantee accounts for, whether they are given or not."""
    return self.max_answers if self.aggregator == "confident_gnmax" else self.num_queries


def unread(config: PateConfig) -> Unused:
  """Returns {field that a run does not read: condition under which it would be read}.

  >>> sorted(unread(PateConfig()))[:2]
  ['check_std', 'cost_beta']
  """
  confident = config.aggregator == "confident_gnmax"
  return (
    needs(
      confident,
      "aggregator='confident_gnmax'",
      *("max_answers", "threshold", "check_std"),
    )
    | needs(config.features == "scattering", "features='scattering'", "num_groups")
    | needs(config.publish_cost, "publish_cost", "cost_order", "cost_beta", "cost_noise")
    | needs(config.std is None, "std=None, which is solved for", "epsilon")
    | named_data.unread(config)
  )


@bounds.names_fields
def check(config: PateConfig) -> None:
  """Raises UserError if the config is wrong; loads no data."""
  bounds.typed(config)
  unread_lib.refuse(config, unread(config))
  if config.num_queries > config.num_pool:
    raise UserError(
      f"must be at most num_pool={config.num_pool}",
      field="num_queries",
      value=config.num_queries,
    )
  if config.most_answers > config.num_queries:
    raise UserError(
      f"must be at most num_queries={config.num_queries}",
      field="max_answers",
      value=config.max_answers,
    )
  if config.num_neighbors >= config.num_pool:
    raise UserError(
      f"must be below num_pool={config.num_pool}",
      field="num_neighbors",
      value=config.num_neighbors,
    )
  if config.release and config.data_dependent:
    raise UserError(
      "must be false with release=True: what these votes cost is itself private",
      field="data_dependent",
      value=True,
    )
  if config.publish_cost and config.aggregator != "gnmax":
    raise UserError(
      "is proved for aggregator='gnmax' alone: which queries were answered depends on the votes",
      field="publish_cost",
      value=True,
    )
  last_order = -1 / math.expm1(-2 * config.cost_beta)
  if config.publish_cost and not 1 < config.cost_order < last_order:
    raise UserError(
      "must be between 1 and the last order at which the release has a bound, "
      f"1 / (1 - e^(-2 cost_beta)) = {last_order:g}",
      field="cost_order",
      value=config.cost_order,
    )
  # This raises UserError if no noise reaches epsilon.
  _ = config.aggregate
