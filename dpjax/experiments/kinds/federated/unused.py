"""Finds settings of a federated run that nothing would read."""

from __future__ import annotations

from dpjax.experiments.config import fields
from dpjax.experiments.config.unread import Unused, needs
from dpjax.experiments.kinds.federated import privacy as federated_privacy
from dpjax.experiments.kinds.federated.config import (
  FedConfig,
  aggregation_of,
  aggregators_that,
  algorithm_of,
  algorithms_that,
)
from dpjax.experiments.kinds.unused import of_audit, of_data, of_ftrl, of_model
from dpjax.names import is_path


def of_federation(config: FedConfig) -> Unused:
  """Returns {field that this run does not read: condition under which it would be read}.

  >>> of_federation(FedConfig())["privacy.local_noise_multiplier"]
  "privacy.method='both'"
  """
  fields_of_clients = ("partition.client_id", "partition.max_examples")
  return (
    of_data(config.data, of_leaf=fields.name_of(config, "partition") == "leaf")
    | of_model(config.model)
    | needs(False, "a guarantee of one example, not of one user", "data.num_examples")
    | needs(
      not hasattr(config.partition, "num_clients"),
      "users that the data name",
      "data.num_users",
    )
    | needs(not is_path(config.data.name), "clients that dpjax reads", *fields_of_clients)
    | _algorithm(config)
    | _federated_optimizers(config)
    | _federated_privacy(config)
    | needs(not config.release, "release=False", "diagnostics")
    | of_audit(config.audit)
  )


def _algorithm(config: FedConfig) -> Unused:
  algorithm = algorithm_of(config)
  aggregation = aggregation_of(config)
  # An aggregator that a user defined may read the weights.
  weighs = aggregation is None or aggregation.weighted
  weighing = " or ".join(map(repr, aggregators_that(lambda row: row.weighted)))
  return (
    needs(
      algorithm.weighted and weighs,
      f"aggregator={weighing} and another algorithm than "
      f"{algorithms_that(lambda row: not row.weighted)}",
      "weighting",
    )
    | needs(algorithm.local_steps, "an algorithm with local steps", "local.epochs")
    | needs(
      algorithm.keeps_state or fields.name_of(config, "compression") == "top_k",
      "clients that keep something "
      f"(algorithm={algorithms_that(lambda row: row.keeps_state)}, compression='top_k')",
      "client_state",
    )
  )


def _federated_optimizers(config: FedConfig) -> Unused:
  algorithm = algorithm_of(config)
  unused = {"client_optimizer.schedule": "'constant': a client starts afresh every round"}
  if "client_tx" not in algorithm.optimizers:
    unused["client_optimizer"] = f"an algorithm with local steps, not {algorithm.name!r}"
  if "server_tx" not in algorithm.optimizers:
    unused["server_optimizer"] = (
      f"an algorithm whose server has one, not {algorithm.name!r}"
    )
  return unused


def _federated_privacy(config: FedConfig) -> Unused:
  privacy = config.privacy
  section = "privacy"
  method = privacy.method
  guarantee = ("epsilon", "noise_multiplier", "l2_clip_norm", "epsilon_budget", "attacker")
  reported = config.is_private or config.audit.enabled
  simulated = f"{section}.simulated_cohort", f"{section}.simulated_clients"
  return (
    needs(
      config.is_private,
      "privacy (privacy.method)",
      "noise_seed",
      *(f"{section}.{name}" for name in guarantee),
    )
    | needs(config.is_private, "privacy (privacy.method)", f"{section}.clipping")
    | needs(reported, "privacy (privacy.method) or audit.enabled", f"{section}.delta")
    | needs(
      method in federated_privacy.CENTRAL,
      "noise of the server (privacy.method)",
      f"{section}.accountant",
      f"{section}.neighboring_relation",
    )
    | needs(
      method == "both", f"{section}.method='both'", f"{section}.local_noise_multiplier"
    )
    | needs(method == "central", f"{section}.method='central'", *simulated)
    | needs(
      method != "dp_ftrl", "another privacy.method than 'dp_ftrl'", f"{section}.sampler"
    )
    | needs(
      method != "distributed",
      "another privacy.method than 'distributed', which clips to privacy.l2_clip_norm",
      "secure_sum.largest_value",
    )
    | of_ftrl(privacy.ftrl, method)
  )
