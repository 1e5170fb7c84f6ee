"""Whether the cohorts of a run are large enough for its aggregator or its secure sum.

A round that is too small moves nothing. The law of the number of clients is public, so a run in
which this is likely is refused before its first round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dpjax.experiments.config.choices import name_of
from dpjax.experiments.kinds.federated import user_code as own_parts
from dpjax.experiments.kinds.federated.config import FedConfig, aggregation_of
from dpjax.validate import UserError

# Largest chance that a round of the run is refused, and largest share of rounds in which a robust
# aggregator tolerates nobody.
MOST = 0.01


def below(
  least: int, sampler: str, num_clients: int, cohort: float, *, empty: bool = False
) -> float:
  """Returns the chance that a round has fewer than `least` clients.

  Args:
    sampler: "poisson", or another name for cohorts of exactly `cohort` clients.
    cohort: expected number of clients of a round, of `num_clients`.
    empty: whether a round without any client counts, too. Such a round moves nothing anyway.

  >>> round(below(5, "poisson", 100, 10), 4), below(5, "fixed_size", 100, 4)
  (0.0237, 1.0)
  """
  if least <= 1 and not empty:
    return 0.0
  if sampler != "poisson":
    return float(cohort < least)
  # Imported here: few runs have an aggregator or a sum that needs several clients.
  from scipy.stats import binom

  chance = binom.cdf(least - 1, num_clients, cohort / num_clients)
  nobody = 0.0 if empty else binom.pmf(0, num_clients, cohort / num_clients)
  return max(0.0, float(chance - nobody))


def ever(chance: float, num_rounds: int) -> float:
  """Returns the chance that an event of this chance happens in one round or more.

  >>> round(ever(0.0237, 100), 2), ever(1.0, 3)
  (0.91, 1.0)
  """
  return 1.0 if chance >= 1 else -math.expm1(num_rounds * math.log1p(-chance))


def check(config: FedConfig, num_clients: int) -> None:
  """Raises UserError if cohorts are too small, or a robust aggregator would tolerate nobody.

  Args:
    num_clients: public number of clients.
  """
  tolerant = _least_tolerant(config, num_clients)
  summed = config.secure_sum
  if config.is_summed:
    least_of: Callable[[float], int] = summed.min_survivors
    field = "secure_sum"
  else:
    of_aggregator = _min_clients(config)
    least_of = lambda cohort: of_aggregator
    field = "aggregator"
  chance_of = lambda cohort: ever(
    below(least_of(cohort), config.privacy.sampler.name, num_clients, cohort),
    config.num_rounds,
  )
  cohort = config.clients_per_round
  name = name_of(config, field)
  least = least_of(cohort)
  if (chance := chance_of(cohort)) > MOST:
    rounds = f"num_rounds={config.num_rounds} with clients_per_round={cohort:g}"
    why = f"; one or more of {rounds} have fewer with chance {chance:.2g}, not <= {MOST:g}"
    raise UserError(
      f"needs {least} clients in a round" + (why if chance < 1 else f", not {cohort:g}"),
      field=field,
      value=name,
      hint=_remedy(config, num_clients, chance_of),
    )
  if config.is_summed and summed.dropout_prob:
    _check_dropouts(config, num_clients, least)
  share_of = lambda cohort: below(
    tolerant, config.privacy.sampler.name, num_clients, cohort
  )
  if (share := share_of(cohort)) > MOST:
    field, value = _option(config)
    raise UserError(
      f"tolerates no arbitrary client in a round of fewer than {tolerant}; of rounds with "
      f"clients_per_round={cohort:g} this is a share of {share:.2g}, not <= {MOST:g}",
      field=field,
      value=value,
      hint=_remedy(config, num_clients, share_of),
    )


def _min_clients(config: FedConfig) -> int:
  facts = aggregation_of(config)
  if facts is None:
    return own_parts.aggregator(config.aggregator.path).min_clients
  return 1 if facts.is_mean else config.aggregator.make().min_clients


def _remedy(
  config: FedConfig, num_clients: int, chance_of: Callable[[float], float]
) -> str:
  """Returns what makes `chance_of` a cohort at most `MOST`, for the end of an error."""
  if config.protects_records:
    return "more clients"  # all silos take part
  start = math.floor(config.clients_per_round) + 1
  enough = next((n for n in range(start, num_clients + 1) if chance_of(n) <= MOST), None)
  ways = []
  if config.privacy.sampler.name != "fixed_size":
    ways.append("--config.privacy.sampler=fixed_size")
  if enough is not None:
    ways.append(f"--config.clients_per_round={enough} or more")
  return " or ".join(ways) or "more clients"


def _check_dropouts(config: FedConfig, num_clients: int, least: int) -> None:
  """Raises UserError if drop-outs may well leave too few clients in every round of the run.

  A refused round alone is what the simulation is for: it is warned of and counted.
  """
  stay = 1 - config.secure_sum.dropout_prob
  cohort = config.clients_per_round
  # Each client of a cohort stays by itself, so the survivors of a cohort are binomial, too.
  most = num_clients if config.privacy.sampler.name == "poisson" else int(cohort)
  refused = below(least, "poisson", most, cohort * stay, empty=True)
  if refused**config.num_rounds > MOST:
    raise UserError(
      f"leaves fewer than {least} clients in a round with chance {refused:.2g}, and in each of "
      f"num_rounds={config.num_rounds} with chance {refused**config.num_rounds:.2g}, which must "
      f"be <= {MOST:g}",
      field="secure_sum.dropout_prob",
      value=config.secure_sum.dropout_prob,
      hint="a smaller --config.secure_sum.threshold allows fewer clients",
    )


def _least_tolerant(config: FedConfig, num_clients: int) -> int:
  """Returns the smallest cohort of which the aggregator tolerates an arbitrary client. It is 1 for
  a mean, which promises nothing, and for a user's own aggregator, of which nothing is known.

  Raises UserError if no cohort is large enough.
  """
  facts = aggregation_of(config)
  if facts is None or facts.is_mean:
    return 1
  options = {name: getattr(config.aggregator, name) for name in facts.options}
  sizes = range(1, num_clients + 1)
  least = next((n for n in sizes if facts.tolerates(n, **options)), None)
  if least is None:
    field, value = _option(config)
    raise UserError(
      f"tolerates no arbitrary client, not even of all {num_clients}; must be another one, or "
      "--config.aggregator=mean",
      field=field,
      value=value,
    )
  return least


def _option(config: FedConfig) -> tuple[str, Any]:
  """Returns the field that decides how many clients an aggregator tolerates, and its value."""
  facts = aggregation_of(config)
  assert facts is not None
  for name in facts.options:
    return f"aggregator.{name}", getattr(config.aggregator, name)
  return "aggregator", facts.name
