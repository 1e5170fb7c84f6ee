"""An audit inside a federated run: canary clients go in, a lower bound on epsilon comes out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import optax

from dpjax import auditing, federated, trees
from dpjax.accounting.proved import NeighboringRelation
from dpjax.auditing import canary_clients
from dpjax.auditing.canary_clients import CLIENT_KINDS, CLIENT_SCORES, CanaryClients
from dpjax.auditing.scores import Scores
from dpjax.data import Federation
from dpjax.experiments.kinds import audits
from dpjax.experiments.kinds.federated import privacy
from dpjax.experiments.kinds.federated.config import (
  Both,
  ClientAudit,
  FedConfig,
  FedFtrl,
  Local,
  algorithm_of,
)
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.federated.cohort import Cohort
from dpjax.federated.round import params_of
from dpjax.plan import Plan
from dpjax.secure.distributed_noise import SkellamSum
from dpjax.secure.summation import uploading
from dpjax.types import ArrayTree, LossFn, Params
from dpjax.validate import UserError

NOTE = (
  "Canaries are part of this run: {out_of} clients left the federation and {included} came "
  "back as canaries ({kind}). The accuracy and the model are those of that changed federation."
)
JOINED_NOTE = (
  "Canaries are part of this run: {included} of {out_of} joined the federation ({kind}), and "
  "nobody left it. The accuracy and the model are those of its clients: canaries move none of "
  "the model's parameters."
)
SUMS = "every noisy sum that the server forms"
MEMBERS_SUMS = f"{SUMS}, and who is in it"
MESSAGES = "every noisy message of each client"
_SEES_MODEL = "the final model"
# Default numbers of canary clients that join the federation, and of those that replace clients. A
# claim is refuted at p-values up to .005. For epsilon 4 at delta 1e-3 with all guesses right,
# `claim_p_value` gives .0056 for 600 canaries and .0038 for 1,000. This p-value is valid even if
# guesses depend on each other.
_JOINED = 1000
_IN_PLACES = 50


class AuditTarget(NamedTuple):
  """The guarantee that an audit tests, and what its adversary sees."""

  claim: audits.AuditClaim
  sees: str  # SUMS | MEMBERS_SUMS | MESSAGES
  l2_clip_norm: float  # bound on a canary's message
  divisor: float  # number by which the server divides a sum


def resolve(config: FedConfig) -> FedConfig:
  """Returns the config with all audit fields decided; unchanged without an audit."""
  asked = config.audit
  if asked is None:
    return config
  join = privacy.canaries_join(config)
  kind = asked.kind
  if kind == "auto":
    kind = canary_clients.PARAMETER if join else canary_clients.DIRECTION
  count = asked.num_canaries or (_JOINED if join else _IN_PLACES)
  decided = dataclasses.replace(asked, kind=kind, num_canaries=count)
  return dataclasses.replace(config, audit=decided)


def check(config: FedConfig) -> None:
  """Raises UserError if the config alone shows that the run cannot be audited.

  Args:
    config: config with the audit's settings decided (`resolve`).
  """
  if config.audit is not None:
    audits.check(config.audit, CLIENT_KINDS, CLIENT_SCORES, release=config.release)
    simulated = getattr(config.privacy, "simulated_cohort", None)
    if simulated is not None:
      raise UserError(
        f"needs no privacy.simulated_cohort={simulated}, whose "
        "epsilon is not of the clients of this run",
        field="audit",
        value="canaries",
      )
    _check_kind(config, config.audit)


def _check_kind(config: FedConfig, asked: ClientAudit) -> None:
  kind = asked.kind
  score = asked.score
  method = asked.method
  if method == "one_run_gaussian":
    raise UserError(
      "is not valid for canary clients, whose scores share the noise of a round; "
      "use 'one_run_two_sided'",
      field="audit.method",
      value=method,
    )
  sends = kind in canary_clients.SENDERS
  if sends and not config.is_private:
    trained = set(CLIENT_KINDS) - set(canary_clients.SENDERS)
    others = " or ".join(repr(k) for k in sorted(trained))
    raise UserError(
      f"needs a privacy with a clip norm, not 'none'; use {others}",
      field="audit.kind",
      value=kind,
    )
  if score == "rounds" and not sends:
    raise UserError(
      f"needs audit.kind={canary_clients.DIRECTION!r}, not {kind!r}; use 'final'",
      field="audit.score",
      value=score,
    )
  algorithm = algorithm_of(config)
  if sends and algorithm.personal is not None and not algorithm.one_difference:
    raise UserError(
      "must be another: its messages lack what clients keep, and canaries send along all "
      "parameters",
      field="algorithm",
      value=algorithm.name,
    )
  if score == "rounds" and "server_tx" not in algorithm.optimizers:
    raise UserError(
      f"needs an algorithm whose server has an optimizer, not {algorithm.name!r}; "
      "use 'final'",
      field="audit.score",
      value=score,
    )


def _target_of(
  config: FedConfig,
  plan: Plan,
  promised: Guarantee,
  mechanism: SkellamSum | None,
) -> AuditTarget:
  """Returns the guarantee that an audit of this run tests, and what its adversary sees.

  | privacy                | the claim              | the adversary sees                          |
  | ---------------------- | ---------------------- | ------------------------------------------- |
  | central, dp_ftrl, none | guarantee of the sum   | every noisy sum                             |
  | local                  | guarantee of a message | every noisy message, and who sent it        |
  | both                   | the tighter of the two | what the row of the tighter guarantee says  |
  | distributed            | guarantee of shares    | every decoded integer sum, and who is in it |

  Without an audit, the first row of this table also holds for "local" and "both".

  Args:
    plan: plan that runs.
    promised: guarantee of the run.
    mechanism: mechanism of noise in shares; None without such noise.
  """
  asked = config.privacy
  rounds = config.num_rounds
  if mechanism is not None:
    claim = audits.AuditClaim.of_promise(promised, rounds)
    return AuditTarget(
      claim, MEMBERS_SUMS, mechanism.l2_clip_norm, config.clients_per_round
    )
  of_sums = AuditTarget(
    audits.AuditClaim.of_plan(plan), SUMS, plan.l2_bound, plan.normalize_by
  )
  if config.audit is None or not isinstance(asked, Local | Both):
    return of_sums
  if isinstance(asked, Both):
    promised = privacy.local_promise(config, promised.num_records)
  claim = audits.AuditClaim.of_promise(promised, rounds)
  if isinstance(asked, Both) and of_sums.claim.epsilon() <= claim.epsilon():
    return of_sums
  return AuditTarget(claim, MESSAGES, asked.l2_clip_norm, 1.0)


@dataclasses.dataclass(frozen=True)
class Audited:
  """The canaries of a run, and what they change in it. Without an audit, nothing is changed."""

  config: FedConfig  # with its audit's kind and number decided
  target: AuditTarget
  canaries: CanaryClients | None  # None: there is no audit
  # What canaries send. None: they train on rows, as clients do.
  directions: canary_clients.Directions | canary_clients.OwnParameters | None
  sampling_prob: float  # probability that a client takes part in a round

  @property
  def hears(self) -> bool:
    """Returns whether canaries send a direction to which the client's noise is added."""
    return self.directions is not None and self.target.sees == MESSAGES

  @property
  def scores_rounds(self) -> bool:
    """Returns whether what the adversary sees of each round is scored."""
    asked = self.config.audit
    return self.directions is not None and asked is not None and asked.score == "rounds"

  def of_model(self, params: Any) -> Params:
    """Returns the parameters of the model, without parameters of canaries."""
    own = isinstance(self.directions, canary_clients.OwnParameters)
    return params["model"] if own else params

  def mark(self, cohorts: Iterator[Cohort]) -> Iterator[Cohort]:
    """Returns the cohorts of a run. If canaries send directions, each row of a canary carries the
    canary's number."""
    if self.canaries is None:
      return cohorts
    return canary_clients.mark(cohorts, self.canaries)

  def sending(self, map_clients: Any) -> Any:
    """Returns the execution of clients, in which canaries send only their directions, unless
    `hide` sends these."""
    if self.directions is None or self.hears:
      return map_clients
    bound = self.target.l2_clip_norm
    return canary_clients.sending(map_clients, self.directions, l2_clip_norm=bound)

  def hide(self, client: federated.ClientAlgorithm) -> federated.ClientAlgorithm:
    """Returns the client before noise is added to its message. If the audit tests this noise, the
    client sends a canary's direction when its rows are a canary's."""
    if self.directions is None or not self.hears:
      return client
    bound = self.target.l2_clip_norm
    return canary_clients.sender(client, self.directions, l2_clip_norm=bound)

  def heard(self, wrapping: dict[str, Any]) -> dict[str, Any]:
    """Returns the dict of `build._wrapping`, changed if the adversary sees messages and the score
    is "rounds". Then each message is scored when it is sent."""
    directions = self.directions
    if directions is None or not (self.hears and self.scores_rounds):
      return wrapping
    bound = self.target.l2_clip_norm
    wrap = wrapping["wrap"]
    memory = wrapping["memory"]

    def listened(client: federated.ClientAlgorithm) -> federated.ClientAlgorithm:
      return canary_clients.heard(wrap(client), directions, l2_clip_norm=bound)

    def kept(params: Params) -> Any:
      return canary_clients.heard_memory(None if memory is None else memory(params))

    return {"wrap": listened, "memory": kept}

  def watch(self, server_tx: optax.GradientTransformation) -> Any:
    """Returns the server's optimizer. If the audit scores sums, each sum is recorded for the scores
    before the optimizer changes it."""
    if self.directions is None or not self.scores_rounds or self.hears:
      return server_tx
    target = self.target
    correlated = isinstance(self.config.privacy, FedFtrl)
    recorder = canary_clients.watching(
      self.directions,
      unit=target.l2_clip_norm / target.divisor,
      sampling_prob=1.0 if correlated else self.sampling_prob,
      # Whether a canary that is out sends the opposite of what it sends if it is in.
      opposite=target.claim.relation == NeighboringRelation.REPLACE_ONE,
      present=target.sees == MEMBERS_SUMS,
    )
    return optax.chain(recorder, server_tx)

  def seeing(self, algorithm: federated.FederatedAlgorithm) -> federated.FederatedAlgorithm:
    """Returns the algorithm. If the audit scores sums, and the server knows who is in a sum, the
    algorithm's state records who is in it."""
    knows = self.scores_rounds and self.target.sees == MEMBERS_SUMS
    if self.canaries is None or not knows:
      return algorithm
    dropout = self.config.secure_sum.dropout(self.config.seed)

    def in_sum(cohort: Cohort, round: int) -> np.ndarray:
      drops = dropout.drops(round, cohort.ids)
      return np.array(uploading(cohort.ids, drops), np.int64)

    divisor = self.target.divisor
    return canary_clients.seeing(algorithm, self.canaries, in_sum, divisor=divisor)

  def facts(
    self, *, loss_fn: LossFn, before: Params, state: ArrayTree, epsilon: float | None
  ) -> dict[str, Any]:
    """Returns the audit's part of result.json, at the delta of the claim; {} without an audit.

    Args:
      before: parameters before the first round.
      state: state after the last round.
      epsilon: epsilon of the rounds that ran; None: nothing is claimed.
    """
    config = self.config
    asked = config.audit
    canaries = self.canaries
    target = self.target
    if canaries is None or asked is None:
      return {}
    after = params_of(state)
    if self.directions is None:
      scores = canary_clients.client_loss_scores(loss_fn, before, after, canaries)
    elif self.scores_rounds and self.hears:
      scores = canary_clients.heard_scores(state.memories, canaries)
    elif self.scores_rounds:
      scores = canary_clients.watched_scores(self.directions, state, canaries)
    else:
      moved = trees.add(after, trees.scale(before, -1.0))
      scores = canary_clients.direction_scores(self.directions, moved, canaries)
    # With privacy="both", `epsilon` is about the sums. If the audit is about messages, the
    # epsilon of the claim about messages replaces it.
    of_messages = isinstance(config.privacy, Both) and target.sees == MESSAGES
    claimed = target.claim.epsilon() if of_messages else epsilon
    facts = audits.facts(
      asked,
      scores,
      score=asked.score,
      claim=target.claim,
      included=canaries.included,
      delta=config.privacy.delta,
      epsilon=claimed,
      seed=config.seed,
      at_best=self._at_best(scores),
      note=JOINED_NOTE if privacy.canaries_join(config) else NOTE,
    )
    facts["audit"] |= {
      "adversary_sees": _SEES_MODEL if asked.score == "final" else target.sees,
      "epsilon_claimed": claimed,
      "neighboring_relation": target.claim.relation,
    }
    return facts

  def _at_best(self, scores: Scores) -> Scores | None:
    """Returns the scores of a perfect attack where the adversary knows who takes part; else None.

    A canary that took part in no round has the score 0, whether it is in or out: nobody can guess
    it.
    """
    if not self.scores_rounds or self.target.sees not in (MEMBERS_SUMS, MESSAGES):
      return None
    inside = np.where(scores.inside != 0, 1.0, 0.0)
    return scores._replace(inside=inside, outside=np.where(scores.outside != 0, -1.0, 0.0))


def insert(
  config: FedConfig,
  federation: Federation,
  plan: Plan,
  promised: Guarantee,
  mechanism: SkellamSum | None,
  params: Params,
  num_clients: int,
) -> tuple[Federation, Audited]:
  """Returns the federation with the canaries of an audit, and what they change in the run.

  Args:
    config: config with the audit's settings decided (`resolve`).
    plan, promised, mechanism: as of `_target_of`.
    params: parameters; a direction has their shapes.
    num_clients: number of clients before canaries are inserted.
  """
  asked = config.audit
  target = _target_of(config, plan, promised, mechanism)
  join = privacy.canaries_join(config)
  make = functools.partial(auditing.insert_canary_clients, join=join)
  federation, canaries = audits.insert(config, federation, target.claim, make)
  directions = None
  if asked is not None and asked.kind == canary_clients.PARAMETER:
    directions = canary_clients.OwnParameters(asked.num_canaries)
  if asked is not None and asked.kind == canary_clients.DIRECTION:
    directions = canary_clients.directions(
      params, num_canaries=asked.num_canaries, seed=config.seed
    )
  sampling_prob = config.clients_per_round / num_clients
  return federation, Audited(config, target, canaries, directions, sampling_prob)
