"""Membership inference on the server's model of a finished federated run.

Members are the rows, or the clients, that the run trained on. Non-members are the test rows, and
rows that clients held out. For shadow models all rows are dealt to clients:

| unit   | who holds a non-member                                                              |
| ------ | ----------------------------------------------------------------------------------- |
| record | the client whose test row it is, or that held it out; else a client drawn by size   |
| client | as many further clients, to which the run's partition deals the test data           |

Each shadow is a federation with half of all records, or of all clients. It runs the config of the
attacked run with keys of its own. What is attacked is the server's model: not what clients keep,
and not the messages of rounds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import numpy as np

from dpjax import attacks, data, files, markdown
from dpjax.accounting import upper
from dpjax.accounting.proved import NeighboringRelation
from dpjax.accounting.text import round_out
from dpjax.attacks import roc
from dpjax.data import Federation
from dpjax.data.target_kinds import needs_arrays
from dpjax.experiments.config import fields, rules
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.members import (
  LEAST_SHADOWS,
  Inference,
  Targets,
  check_methods,
  given_target,
  join,
)
from dpjax.experiments.kinds.attack.methods import METHODS
from dpjax.experiments.kinds.attack.settings import MeasuredAttack
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.kinds.federated import records as silos
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run.guarantee import NONE, RATES
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.federated.round import params_of
from dpjax.types import Params
from dpjax.validate import UserError

# Methods that need no answers but log odds and the largest probability of any label.
_PLAIN = tuple(name for name, method in METHODS.items() if not method.reads)


class Dealt(NamedTuple):
  """All rows, members first, and which client would hold each."""

  records: data.Dataset
  owners: np.ndarray  # [n] places of clients; with unit "client" 0 to 2 K - 1
  num_members: int  # rows 0 to num_members - 1 were trained on


@dataclasses.dataclass(frozen=True)
class FedMembership(Inference):
  """Membership inference on the server's model of a finished run of `launch.federate`: of records,
  or of whole clients. Shadow models are federations of the run's own config, each with half of all
  records, or of all clients.

  Args:
    methods: names of attacks, each of which needs log odds alone, or the largest probability.
    unit: "record", or "client" (dealt by the partition, which deals the test data to as many
      clients that did not take part).
    target: params.npz of the run.
  """

  methods: Annotated[tuple[str, ...], "all of " + " | ".join(_PLAIN)] = (
    "confidence",
    "loss",
    "lira_fixed",
    "bavaria",
    "rmia",
  )
  num_shadows: Annotated[
    int, rules.between(LEAST_SHADOWS, rules.MOST_RUNS), "federations beside the target"
  ] = 16
  unit: Annotated[
    str, rules.among(("record", "client")), "whose membership is inferred"
  ] = "record"
  target: Annotated[
    str | None, "params.npz of launch.federate; python -m launch.attack --run gives it"
  ] = None
  section: ClassVar[str] = "federate"
  # Each model is asked once, and trained alone.
  queries: ClassVar[int] = 1
  side_by_side: ClassVar[int] = 1

  def __post_init__(self):
    check_methods(self.methods, _PLAIN)
    rules.check_settings(self)

  def prepare(
    self, config: AttackConfig, loaded: tuple[Any, Any], random: RunKeys
  ) -> Targets:
    """Returns the dealt rows, the target, and a function that trains a shadow federation.

    Raises:
      UserError: no finished run is named, or what `deal` refuses.
    """
    if self.target is None:
      raise UserError(
        "must name the params.npz of a finished run: python -m launch.attack --run=FOLDER",
        field="attack.target",
        value=None,
      )
    federation, test = loaded
    rows = deal(config, federation, test)
    run = federated.assemble(config.federate, loaded, random)
    target, facts = given_target(config, run.params)
    facts = _of_unit(facts, self.unit)
    unit_of = None
    is_member = np.arange(len(rows.owners)) < rows.num_members
    if self.unit == "client":
      # Clients without a row have no score.
      _, unit_of = np.unique(rows.owners, return_inverse=True)
      is_member = np.zeros(unit_of.max() + 1, bool)
      is_member[unit_of[: rows.num_members]] = True
    least = 2 * self.num_shadows
    if min(is_member.sum(), (~is_member).sum()) < least:
      raise UserError(
        f"needs {least} members and non-members each, there are {is_member.sum()} and "
        f"{(~is_member).sum()} {self.unit}s",
        field="attack.num_shadows",
        value=self.num_shadows,
      )
    # Halves of one size, so that a shadow has as many clients as the run.
    exact = self.unit == "client" and len(is_member) % 2 == 0
    included = attacks.random_halves(
      self.num_shadows, len(is_member), seed=random.order, exact=exact
    )

    def train(index: int) -> list[Params]:
      of_rows = included[index] if unit_of is None else included[index][unit_of]
      return [_shadow(config.federate, federation, test, rows, of_rows, random, index)]

    return Targets(
      rows.records, included, target, is_member, run, test, train, NONE, facts, unit_of,
      rows.owners,
    )  # fmt: skip

  def complete(
    self,
    found: MeasuredAttack,
    attacked: Targets,
    by_method: Mapping[str, np.ndarray],
    members: np.ndarray,
  ) -> MeasuredAttack:
    """Adds whose membership it is, and rates of each silo."""
    count = {"membership_of": self.unit, "num_units": attacked.included.shape[1]}
    result = found.result | count
    if silos.SILOS not in result or attacked.owners is None:
      return found._replace(result=result)
    # One target was given, so each array has one row.
    of_target = {name: score[0] for name, score in by_method.items()}
    rows = by_silo(result[silos.SILOS], attacked.owners, of_target, members[0])

    def write(folder: pathlib.Path) -> None:
      found.write(folder)
      path = folder / "attacks.md"
      files.replace_file(path, f"{path.read_text()}\n{_table(rows)}".encode())

    return found._replace(result=result | {silos.SILOS: rows}, write=write)


def deal(config: AttackConfig, federation: Federation, test: Any) -> Dealt:
  """Returns all rows with their owners.

  Raises:
    UserError: data without test rows; with unit "client", a partition by the data themselves, or
      test rows too few for as many clients.
  """
  needs_arrays(federation, "target.data.name", config.target.data.name)
  trained = np.concatenate([*federation.indices])
  owners = [np.repeat(np.arange(federation.num_clients), federation.sizes)]
  whole = federation.dataset
  held_out = []
  if config.attack.unit == "client":
    owners.append(_further_clients(config.federate, federation, test))
  else:
    owners.append(_owners_of_tests(federation, test, config.seed))
    if federation.held_out is not None:
      held = [np.asarray(rows, np.int64) for rows in federation.held_out]
      held_out.append(whole.subset(np.concatenate(held)))
      owners.append(np.repeat(np.arange(len(held)), [len(rows) for rows in held]))
  known = np.concatenate(owners)
  records = join(whole.subset(trained), test, *held_out)
  # Test rows of nobody are left out.
  kept = np.flatnonzero(known >= 0)
  return Dealt(records.subset(kept), known[kept], len(trained))


def _owners_of_tests(federation: Federation, test: Any, seed: int) -> np.ndarray:
  """Returns the client that would hold each test row, [len(test)]."""
  random = np.random.default_rng([seed, len(test)])
  sizes = np.maximum(federation.sizes, 0)
  owners = random.choice(len(sizes), len(test), p=sizes / sizes.sum())
  if federation.test_indices is not None:
    for client, rows in enumerate(federation.test_indices):
      owners[np.asarray(rows, np.int64)] = client
  return owners


def _further_clients(config: FedConfig, federation: Federation, test: Any) -> np.ndarray:
  """Returns the number of the further client that holds each test row; -1: nobody."""
  count = federation.num_clients
  if not config.is_dealt:
    raise UserError(
      "must be 'record' for clients whom the data name: nobody knows a client like them that did "
      "not take part",
      field="attack.unit",
      value="client",
    )
  labels = test.y if test.target is None else np.zeros(len(test), np.int32)
  owners = np.full(len(test), -1)
  try:
    parts = config.partition.make(labels)
  except UserError as error:
    raise UserError(
      f"must be 'record': the test data cannot be dealt to {count} clients as the training data "
      f"are ({error!s:.120})",
      field="attack.unit",
      value="client",
    ) from error
  for client, rows in enumerate(parts):
    owners[rows] = count + client
  return owners


def _of_unit(facts: Mapping[str, Any], attacked: str) -> dict[str, Any]:
  """Returns what a guarantee says of what is attacked, a record or a client.

  No rate of an attacker on records bounds one on clients, who hold many. One on users bounds one on
  records only if one user may replace another: a record that leaves changes its user's data, and
  removes no user."""
  of_users = facts.get("unit") == "user"
  replaced = facts.get("neighboring_relation") == NeighboringRelation.REPLACE_ONE
  if of_users and (attacked == "client" or replaced):
    return dict(facts)
  if not of_users and attacked == "record":
    return dict(facts)
  return {name: value for name, value in facts.items() if name not in RATES}


def _shadow(
  config: FedConfig,
  federation: Federation,
  test: Any,
  rows: Dealt,
  included: np.ndarray,
  random: RunKeys,
  index: int,
) -> Params:
  """Returns the server's parameters after all rounds of a federation with these rows."""
  count = int(rows.owners.max()) + 1
  held = [np.flatnonzero(included & (rows.owners == client)) for client in range(count)]
  if count > federation.num_clients:
    # Whole clients are in or out.
    held = [part for part in held if len(part)]
  names = federation.client_ids if len(held) == federation.num_clients else ()
  shadow = Federation(rows.records, held, names, federation.nominal_users)
  if config.protects_records:
    config, shadow = _smaller_silos(config, shadow)
  run = federated.assemble_loaded(config, (shadow, test), _keys_of(random, index))
  state = run.algorithm.init(run.params, shadow.num_clients)
  for cohort in run.algorithm.cohorts(run.federation, run.work, rng=run.random.sampler):
    state, _ = run.algorithm.round(state, cohort)
  return params_of(state)


def _smaller_silos(config: FedConfig, shadow: Federation) -> tuple[FedConfig, Federation]:
  """Returns config and silos of a shadow: plans are made for the rows that its silos hold, and no
  batch is larger than the smallest silo."""
  sizes = tuple(max(1, int(size)) for size in shadow.sizes)
  batch = config.local.batch_size
  changes: dict[str, Any] = {"privacy.num_examples": ()}
  if batch is not None and batch > min(sizes):
    changes["local.batch_size"] = min(sizes)
  return fields.replace_all(config, changes), dataclasses.replace(
    shadow, nominal_sizes=sizes
  )


def _keys_of(random: RunKeys, index: int) -> RunKeys:
  """Returns the keys of a shadow, which no other shadow shares."""
  fold = lambda key: jax.random.fold_in(key, index + 1)
  seed = hashlib.sha256(f"{random.sampler} {index}".encode()).digest()
  return random._replace(
    init=fold(random.init),
    noise=fold(random.noise),
    local=fold(random.local),
    sampler=int.from_bytes(seed),
  )


def by_silo(
  rows: Sequence[Mapping[str, Any]],
  owners: np.ndarray,
  by_method: Mapping[str, np.ndarray],
  is_member: np.ndarray,
) -> list[dict[str, Any]]:
  """Returns what a run says of each silo, with the strongest attack on its records alone.

  The records of a silo are told apart from those that it would hold, beside the silo's own
  guarantee. So which silo a record fits tells nothing.

  Args:
    rows: of result.json, one for each silo: name, epsilon, and the rates that it allows.
    owners: [n], place of the silo that holds, or would hold, each record.
    by_method: scores of all records, [n] each.
    is_member: [n].

  >>> truth = np.arange(48) % 2 == 0
  >>> scores = {"sure": np.where(np.arange(48) < 24, truth, 0.0)}
  >>> rows = [{"silo": "a", "tpr_at_fpr_0.1": 0.3}, {"silo": "b", "tpr_at_fpr_0.1": 0.3}]
  >>> for row in by_silo(rows, np.arange(48) // 24, scores, truth):
  ...   print(row["silo"], row["num_members"], row["strongest"]["words"])
  a 12 TPR 1.000 (0.735-1.000) at 10 % FPR, where 0.3 is allowed
  b 12 TPR 0.000 (0.000-0.265) at 10 % FPR, where 0.3 is allowed
  """
  of_silos = []
  for place, row in enumerate(rows):
    own = owners == place
    truth = is_member[own]
    known = {"num_members": int(truth.sum()), "num_non_members": int((~truth).sum())}
    best = None
    if all(known.values()):
      scores = {name: score[own] for name, score in by_method.items()}
      best = _strongest(row, scores, truth)
    of_silos.append({**row, **known, "strongest": best})
  return of_silos


def _strongest(
  row: Mapping[str, Any], scores: Mapping[str, np.ndarray], truth: np.ndarray
) -> dict[str, Any]:
  """Returns the strongest attack on the records of a silo, at the smallest false positive rate that
  so many non-members resolve; of fewer than ten by its AUC alone."""
  curves = {name: roc.curve_of(score, truth) for name, score in scores.items()}
  resolved = [(name, fpr) for name, fpr in RATES.items() if fpr * int((~truth).sum()) >= 1]
  if not resolved:
    return roc.strongest(curves, fpr=None).to_json()
  key, fpr = resolved[0]
  best = roc.strongest(curves, fpr=fpr)
  words = f"{best.words}, where {upper(row[key])} is allowed"
  return best.to_json() | {"allowed_tpr": row[key], "words": words}


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
  head = ("silo", "epsilon", "members", "others", "strongest", "finds", "AUC")
  lines = []
  for row in rows:
    best = row["strongest"]
    found = ("-", "-", "-")
    if best is not None:
      ends = round_out(best["auc_interval"])
      found = (best["method"], best["words"], f"{best['auc']:.3f} ({ends})")
    counts = (str(row["num_members"]), str(row["num_non_members"]))
    name = str(row["silo"]).replace("|", "/")
    lines.append((name, upper(row["epsilon"]), *counts, *found))
  return markdown.table(head, lines)
