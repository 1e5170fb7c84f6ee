"""Accounts for a run of PATE: its guarantee, and the cost that depends on its actual votes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from dpjax import accounting
from dpjax.accounting import votes
from dpjax.accounting.event_kinds.kind import ORDERS, DpEvent
from dpjax.accounting.event_kinds.smooth_sensitivity import SmoothSensitivityDpEvent
from dpjax.accounting.matrix import join
from dpjax.accounting.text import paragraph
from dpjax.experiments.run import guarantee
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.key_uses import KeyUse, key_for
from dpjax.mechanisms.teacher_votes import ConfidentGNMax
from dpjax.noise import source
from dpjax.validate import UserError

if TYPE_CHECKING:
  from dpjax.experiments.kinds.pate.config import PateConfig, PublishedCost

# Published costs are rounded to multiples of this public number.
_COST_STEP = 2.0**-12


def step_events(config: PateConfig) -> list[DpEvent]:
  """Returns the event of each query, in order.

  For Confident-GNMax, the event of the first query includes all `max_answers` answers. The events
  must not show how many answers are used, and when, since this depends on the votes. The event of
  the last query includes the published cost, if there is one.
  """
  mechanism = config.aggregate
  relation = config.neighboring_relation
  if isinstance(mechanism, ConfidentGNMax):
    check = mechanism.event(relation, num_checks=1, most_answers=0)
    answers = mechanism.votes.event(relation, num_queries=config.most_answers)
    events = [join([check, answers])] + [check] * (config.num_queries - 1)
  else:
    events = [mechanism.event(relation)] * config.num_queries
  if config.cost is not None:
    published = SmoothSensitivityDpEvent(
      config.cost.beta, config.cost.noise_in_sensitivities, relation
    )
    events[-1] = join([events[-1], published])
  return events


def guarantee_of(config: PateConfig, num_records: int | None) -> Guarantee:
  """Returns the guarantee of a run. It does not depend on the votes.

  Args:
    num_records: public size of the private data; None: it is a secret.
  """
  events = step_events(config)
  accountant = "pld" if config.cost is None else "rdp"
  relation = config.neighboring_relation
  whole = guarantee.of_event(
    join(events),
    delta=config.delta,
    l2_bound=1.0,
    num_records=num_records,
    relation=relation,
    accountant=accountant,
    budget=config.epsilon_budget,
    release=config.release,
  )

  @functools.cache
  def curve(steps: int) -> float:
    return accounting.epsilon(
      join(events[:steps]),
      delta=config.delta,
      neighboring_relation=relation,
      accountant=accountant,
    )

  def words(steps: int, kind: str) -> str:
    text = accounting.privacy_statement(
      join(events[:steps]),
      num_examples=num_records,
      delta=config.delta,
      neighboring_relation=relation,
      accountants=(accountant,),
      epsilon_kind=kind,
    )
    return "\n\n".join(part for part in (_words(config), text) if part)

  return dataclasses.replace(
    whole,
    step_event=lambda step: events[step],
    remaining_event=lambda start: join(events[start:]),
    curve=curve,
    words=words,
  )


def _words(config: PateConfig) -> str:
  chooses = "content" if config.neighboring_relation == guarantee.ADD else "place"
  text = (
    f"PATE: {config.num_teachers} teachers on disjoint parts. A record's {chooses} chooses its "
    "teacher, so one record changes one vote of each query: one count falls by one, another "
    "rises by one, sqrt(2) in the L2 norm, to which the noise of a label is relative. The "
    "guarantee is of the published labels, of which of them were given, and of everything that "
    "is computed from these and from public examples. It does not depend on the votes."
  )
  if isinstance(config.aggregate, ConfidentGNMax):
    text += (
      f" Each of {config.num_queries} queries is charged with a check of the largest count, "
      f"sensitivity 1, answered or not. {config.most_answers} answers are charged, used or not."
    )
  if config.release:
    step = source.grid_step(float(config.aggregate.std), 7)
    text += (
      " Release mode: the noise key has 256 bits of the operating system's entropy, and noisy "
      f"counts are rounded to multiples of {step:g}. Votes and checkpoints stay as secret as "
      "the data."
    )
  return paragraph(text)


def of_votes(
  config: PateConfig, counts: np.ndarray, answered: np.ndarray
) -> dict[str, Any]:
  """Returns the cost of these actual votes. PRIVATE: it is computed from the votes without noise.

  For Confident-GNMax the cost is a sum over all checks, and over the answers that were given.
  Papernot et al. 2018 report its expectation. Nobody has proved that this sum is an epsilon.

  Args:
    counts: votes for each of K classes, [num_queries, K].
    answered: whether a label was given, [num_queries].
  """
  orders = np.asarray(ORDERS)
  mechanism = config.aggregate
  total = np.zeros(len(orders))
  asked = range(len(counts))
  for query in asked:
    row = counts[query]
    if isinstance(mechanism, ConfidentGNMax):
      total += votes.threshold_rdp(
        row.max(), mechanism.threshold, mechanism.check_std, orders
      )
    if answered[query]:
      log_q = votes.log_prob_of_others(row, mechanism.std)
      total += votes.gaussian_votes_rdp(log_q, mechanism.std, orders)
  return {"not_private/epsilon_data_dependent": _epsilon(orders, total, config.delta)}


def check_published(config: PateConfig, num_classes: int) -> None:
  """Raises UserError if a cost is to be published, and smooth sensitivity is not proved for the
  noise of the labels and its order."""
  if config.cost is None:
    return
  std, order = config.aggregate.std, config.cost.order
  if not votes.conditions_hold(std=std, num_classes=num_classes, order=order):
    raise UserError(
      f"smooth sensitivity is not proved there at std={std:g}; a larger noise or a lower order",
      field="cost.order",
      value=order,
    )


def publish(
  config: PateConfig, cost: PublishedCost, counts: np.ndarray, key: jax.Array
) -> dict[str, Any]:
  """Returns the cost of these votes at one Renyi order, published by smooth sensitivity.

  The number estimates a private quantity and is not a guarantee. The epsilon of the run is a
  guarantee, and includes the cost of this release. `check_published` says whether it is proved.

  Args:
    counts: votes for each of K classes, [num_queries, K]; all queries were answered.
    key: noise key of the run.
  """
  order = cost.order
  std = config.aggregate.std
  spent = 0.0
  local = np.zeros(config.num_teachers + 1)
  known: dict[tuple[int, ...], tuple[float, np.ndarray]] = {}
  for row in counts:
    # A cost depends only on the sorted counts, so the costs of equal counts are computed once.
    name = tuple(sorted(row.tolist()))
    if name not in known:
      log_q = votes.log_prob_of_others(row, std)
      single = float(votes.gaussian_votes_rdp(log_q, std, [order])[0])
      sensitivity = votes.votes_sensitivity(
        row, num_teachers=config.num_teachers, std=std, order=order
      )
      known[name] = (single, sensitivity)
    spent += known[name][0]
    local += known[name][1]
  release = votes.SmoothSensitivity(cost.beta, cost.noise_in_sensitivities)
  smooth = release.sensitivity(local)
  of_cost = key_for(KeyUse.VOTE_COST, key)
  # The noise is multiplied by a private scale. If the noise were on a grid, the spacing of the
  # products would reveal this scale.
  drawn = float(source.gaussian(of_cost, np.zeros((), np.float32), 1.0, long_tails=True))
  noisy = spent + smooth * cost.noise_in_sensitivities * drawn
  # The sum is rounded to a public grid, far coarser than the spacing of floats. So the set of
  # numbers that can be published does not depend on the votes.
  rdp = round(noisy / _COST_STEP) * _COST_STEP
  epsilon = (
    rdp + math.log1p(-1 / order) - (math.log(config.delta) + math.log(order)) / (order - 1)
  )
  return {
    "published_cost": {
      "order": order,
      "rdp": rdp,
      "epsilon_at_this_order": epsilon,
      "noise_std_in_smooth_sensitivities": cost.noise_in_sensitivities,
      "what_it_is": "a noisy estimate of what these votes cost, no guarantee",
    }
  }


def _epsilon(orders: Sequence[float] | np.ndarray, rdp: np.ndarray, delta: float) -> float:
  """Returns epsilon at delta from Renyi divergences (Canonne, Kamath and Steinke 2020,
  arXiv:2004.00010, prop. 12)."""
  orders = np.asarray(orders)
  epsilons = rdp + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
  return float(max(0.0, np.nanmin(epsilons)))
