"""Makes the plan and the guarantee of a federated run from a `FedConfig`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from dpjax import accounting, gradients, sampling
from dpjax.accounting.proved import NeighboringRelation
from dpjax.accounting.text import paragraph
from dpjax.auditing.canary_clients import PARAMETER
from dpjax.data import Dataset, Federation
from dpjax.experiments.config import choices, common, samplers
from dpjax.experiments.config.common import attack_of
from dpjax.experiments.kinds import privacy_section
from dpjax.experiments.kinds.central import features, ftrl
from dpjax.experiments.kinds.federated import distributed
from dpjax.experiments.kinds.federated.config import (
  Both,
  Central,
  Distributed,
  FedConfig,
  FedFtrl,
  Local,
  ServerNoise,
  UserGuarantee,
  algorithm_of,
)
from dpjax.experiments.run import guarantee, sizes
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.federated import aggregation
from dpjax.noise import NoiseShape
from dpjax.plan import Plan
from dpjax.sampling.registry import steps_per_pass, whole_passes
from dpjax.secure.distributed_noise import SkellamSum
from dpjax.validate import UserError

# Methods that fit a secure sum, since the server adds no noise.
SUMMED = ("none", "local", "distributed", "records")


def public_size(config: FedConfig, federation: Federation) -> int:
  """Returns the number of clients that the mechanism may depend on; see `run.sizes`.

  Raises:
    UserError: the server adds noise under add_or_remove_one, and the declared number is missing or
      above twice the true number.
  """
  privacy = config.privacy
  if config.protects_records:
    # What is hidden is a record, so the number of silos is public.
    return federation.num_clients
  known = federation.nominal_users
  dealt = config.is_dealt
  declared = config.partition.num_clients if dealt else config.data.num_users
  return sizes.public(
    federation.num_clients,
    declared if known is None else known,
    relation=privacy_section.relation(privacy),
    promised=isinstance(privacy, ServerNoise) and privacy.noise_multiplier != 0,
    field="partition.num_clients" if dealt else "data.num_users",
    other="privacy.neighboring_relation=replace_special",
  )


def canaries_join(config: FedConfig) -> bool:
  """Returns whether the canary clients can join all other clients, so that no client is replaced.

  Under add_or_remove_one, the guarantee covers federations of any size. Samplers that depend on
  the number of clients, and guarantees from clients' own noise, need canaries that replace clients.
  Only canaries of kind "parameter" can join.
  """
  privacy = config.privacy
  return (
    config.audit is not None
    and config.audit.kind in ("auto", PARAMETER)
    and isinstance(privacy, Central)
    and privacy.sampler.name == "poisson"
    and privacy_section.relation(privacy) == NeighboringRelation.ADD_OR_REMOVE_ONE
  )


def check_cohort(config: FedConfig, num_clients: int) -> None:
  """Raises UserError for a `clients_per_round` that exceeds the number of clients."""
  if config.clients_per_round > num_clients:
    most = f"partition.num_clients={num_clients}"
    if not config.is_dealt:
      verb = "declare" if config.data.num_users == num_clients else "have"
      most = f"{num_clients}: the data {verb} {num_clients} clients"
    raise UserError(
      f"must be <= {most}",
      field="clients_per_round",
      value=config.clients_per_round,
    )


def _check_release(config: FedConfig) -> None:
  privacy = config.privacy
  if not config.release:
    return
  covered = isinstance(privacy, Central | FedFtrl | Distributed)
  simulated = getattr(privacy, "simulated_cohort", None)
  if not covered or simulated is not None:
    raise UserError(
      "needs privacy='central', 'dp_ftrl' or 'distributed' and no privacy.simulated_cohort, not "
      f"{choices.name_of(config, 'privacy')!r} and {simulated!r}; only what the noise of the sum "
      "covers may be released",
      field="release",
      value=True,
    )


def check(config: FedConfig) -> None:
  """Raises UserError for incompatible fields; loads no data."""
  privacy = config.privacy
  _check_release(config)
  if isinstance(privacy, UserGuarantee):
    privacy_section.check(privacy, release=config.release, num_rounds=config.num_rounds)
  if isinstance(privacy, Central):
    _check_simulated(config, privacy)
  distributed.check(config)


def _check_simulated(config: FedConfig, privacy: Central) -> None:
  """Raises UserError for a simulated cohort that is no larger one, drawn by Poisson sampling."""
  if (privacy.simulated_cohort is None) != (privacy.simulated_clients is None):
    raise UserError(
      f"needs privacy.simulated_clients={privacy.simulated_clients}, and the "
      "other way round",
      field="privacy.simulated_cohort",
      value=privacy.simulated_cohort,
    )
  cohort = privacy.simulated_cohort
  if cohort is None:
    return
  common.only(config, "privacy.clipping", ["flat"], " with privacy.simulated_cohort")
  if cohort < config.clients_per_round:
    raise UserError(
      f"must be >= clients_per_round={config.clients_per_round}",
      field="privacy.simulated_cohort",
      value=cohort,
    )
  why = " with privacy.simulated_cohort, which is drawn so"
  common.only(config, "privacy.sampler", ["poisson"], why)
  if cohort > (privacy.simulated_clients or 0):
    raise UserError(
      f"must be >= privacy.simulated_cohort={cohort}",
      field="privacy.simulated_clients",
      value=privacy.simulated_clients,
    )


def make_sampler(config: FedConfig, num_clients: int) -> sampling.Sampler:
  """Makes the sampler of a run's cohorts. Raises UserError if none draws cohorts of this size."""
  chosen = config.privacy.sampler
  scheme = chosen.scheme
  prob = config.clients_per_round / num_clients
  num_canaries = 0 if config.audit is None else config.audit.num_canaries
  joining = num_canaries if num_canaries and canaries_join(config) else 0
  size = chosen.sizing(
    sampling_prob=prob,
    num_examples=num_clients,
    num_steps=config.num_rounds,
    # A neighbouring federation may have one more client. All canaries are counted, in or out, so
    # that no refusal depends on which canaries are in.
    padded_batch_size=num_clients + joining + 1,
    neighboring_relation=getattr(config.privacy, "neighboring_relation", ""),
    unit="user",
    may_leave=num_canaries - joining,
  )
  # Silent rounding would make the run sample other numbers of clients than the config says.
  must = ""
  if scheme is not None and scheme.in_passes:
    if not whole_passes(prob):
      must = (
        f"must be num_clients={num_clients} / a whole number, the rounds of a pass, for "
        f"privacy.sampler={chosen.name!r}; {num_clients / steps_per_pass(prob)!r} is near"
      )
  elif scheme is not None and scheme.nearest_prob(size) != prob:
    must = f"must be an integer for {chosen.name}"
  if must:
    raise UserError(must, field="clients_per_round", value=config.clients_per_round)
  if isinstance(config.privacy, FedFtrl):
    ftrl.check_apart(config.privacy, prob)
  return samplers.make(chosen, size)


def make_plan(config: FedConfig, num_clients: int) -> tuple[Plan, Plan]:
  """Makes (the plan that runs, the plan that is reported).

  The plans differ only for a simulated cohort. Then both have the same noise on the mean: the
  reported noise multiplier times l2_clip_norm / simulated_cohort.
  """
  privacy = config.privacy
  check_cohort(config, num_clients)
  # All numbers below use the public `num_clients`, never the true number.
  if config.protects_records:
    sampler = sampling.FixedSizeSampler(batch_size=num_clients, num_examples=num_clients)
  else:
    sampler = make_sampler(config, num_clients)
  if not isinstance(privacy, ServerNoise):
    plan = Plan(
      sampler=sampler,
      noise_multiplier=0.0,
      l2_clip_norm=math.inf,
      normalize_by=config.clients_per_round,
      num_steps=config.num_rounds,
      delta=privacy.delta,
      unit="user",
    )
    return plan, plan
  correlation = None
  if isinstance(privacy, FedFtrl):
    prob = config.clients_per_round / num_clients
    correlation = ftrl.correlation(privacy, prob, config.num_rounds)

  def plan_of(sampler: Any, divisor: float, noise: float | None = None) -> Plan:
    """Returns the plan whose server divides a sum by `divisor`; noise None: as configured."""
    return privacy_section.plan(
      privacy,
      noise_multiplier=noise,
      sampler=sampler,
      num_steps=config.num_rounds,
      l2_clip_norm=gradients.Clip(
        privacy.l2_clip_norm, getattr(privacy, "clipping", gradients.Flat())
      ),
      normalize_by=divisor,
      noise_shape=NoiseShape(correlation=correlation),
      unit="user",
    )

  cohort = getattr(privacy, "simulated_cohort", None)
  population = getattr(privacy, "simulated_clients", None)
  if cohort is None or population is None:
    plan = plan_of(sampler, config.clients_per_round)
    return plan, plan
  whole = sampling.PoissonSampler(
    sampling_prob=cohort / population, capacity=population + 1
  )
  reported = plan_of(whole, cohort)
  # The multiplier is scaled, so that the noise on the mean is the same for any actual cohort.
  scaled = reported.noise_multiplier * config.clients_per_round / cohort
  return plan_of(sampler, config.clients_per_round, scaled), reported


def local_noise(config: FedConfig) -> float | None:
  """Returns the noise multiplier on a client's message; None unless privacy is "local" or "both".
  Under "local" without `noise_multiplier`, it is calibrated for a message in every round."""
  privacy = config.privacy
  if isinstance(privacy, Both):
    return privacy.local_noise_multiplier
  if not isinstance(privacy, Local):
    return None
  # Every round is counted: the server sees who sends, so sampling amplifies nothing.
  return privacy_section.noise_multiplier(
    privacy,
    lambda noise: aggregation.local_event(noise, config.num_rounds),
    neighboring_relation=NeighboringRelation.REPLACE_ONE,
  )


_LOCAL_NOTE = (
  "Against a server that gets the clients' noisy messages and nothing else. In this run one "
  "program simulated server and clients: it held all data and the key of every client's noise, "
  "so nothing is promised against whoever runs it. Clients that draw their own noise are those "
  "of dpjax.federated.transport.flower."
)


def local_promise(config: FedConfig, num_clients: int | None) -> Guarantee:
  """Returns the guarantee against the server, for a client that takes part in every round."""
  noise = local_noise(config) or 0.0
  asked = config.privacy
  assert isinstance(asked, UserGuarantee)
  promised = guarantee.of_event(
    aggregation.local_event(noise),
    delta=asked.delta,
    l2_bound=asked.l2_clip_norm,
    num_records=num_clients,
    relation=NeighboringRelation.REPLACE_ONE,
    num_steps=config.num_rounds,
    unit="user",
    budget=asked.epsilon_budget,
    release=config.release,
  )

  def words(rounds: int, kind: str) -> str:
    text = accounting.privacy_statement(
      aggregation.local_event(noise, rounds),
      num_examples=num_clients,
      unit="user",
      delta=asked.delta,
      neighboring_relation=promised.relation,
      epsilon_kind=kind,
    )
    return f"{_LOCAL_NOTE}\n\n{text}"

  return dataclasses.replace(promised, words=words)


def make_promise(
  config: FedConfig,
  ran: Plan,
  reported: Plan,
  num_clients: int,
  mechanism: SkellamSum | None = None,
) -> Guarantee:
  """Returns the guarantee for one client of `num_clients`.

  Args:
    ran, reported: results of `make_plan`.
    num_clients: public number of clients.
    mechanism: result of `distributed.mechanism`.
  """
  asked = guarantee.describe_attack_bound(attack_of(config.privacy), config.privacy.delta)
  if mechanism is not None:
    return guarantee.add_note(distributed.guarantee(config, mechanism, num_clients), asked)
  if isinstance(config.privacy, Local):
    return guarantee.add_note(local_promise(config, num_clients), asked)
  deployed = getattr(config.privacy, "simulated_clients", None)
  if reported is not ran:
    cohort = getattr(config.privacy, "simulated_cohort", None)
    note = (
      f"SIMULATED. The noise is that of cohorts of {cohort} out of {deployed} clients; this run "
      f"had cohorts of {config.clients_per_round:g}. What follows holds for such a deployment. It "
      "is NOT a guarantee for the clients whose data were used here."
    )
    asked = f"{note}\n\n{asked}" if asked else note
  promised = guarantee.of_plan(
    reported,
    num_clients,
    ran=None if reported is ran else ran,
    deployed=deployed,
    budget=getattr(config.privacy, "epsilon_budget", None),
    release=config.release,
  )
  return guarantee.add_note(promised, asked)


_OWN_MODELS = (
  "Each client also keeps a model, or parameters, of its own. They are no part of what is "
  "released, and this guarantee does not cover them: show them to that client alone."
)

_DEALT = (
  "Dealt clients. partition={name} has dealt the rows of one data set to clients, as a simulation, "
  "and neighbours are compared after the deal. Of a row of the data set itself nothing is "
  "promised: one row more, or another label, may deal others elsewhere."
)
_CHOSEN_WORDS = (
  "Words and labels. The vocabulary of {name}, or its list of labels, holds what occurs in the "
  "data of its users. Nothing is promised to those who shaped it; that this run's users did not is "
  "assumed, and is wrong for the published files."
)


def add_notes(config: FedConfig, promised: Guarantee, dataset: Dataset) -> Guarantee:
  """Returns the guarantee of a run with all that its statement says before it, and with what nobody
  can check, which makes it a claim."""
  own = algorithm_of(config).personal is not None
  if own and config.is_private and not config.protects_records:
    promised = guarantee.add_note(promised, paragraph(_OWN_MODELS))
  partition = choices.name_of(config, "partition")
  if config.is_private and config.is_dealt:
    promised = guarantee.add_note(promised, paragraph(_DEALT.format(name=partition)))
  if partition == "pfl":
    words = paragraph(_CHOSEN_WORDS.format(name=config.data.name))
    assumed = f"words or labels of {config.data.name} were chosen without this run's users"
    promised = guarantee.add_note(promised, words, assumed)
  promised = guarantee.as_repeatable(promised, config.noise_seed)
  return features.add_note(config, promised, dataset)
