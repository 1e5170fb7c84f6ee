"""Membership inference: models are trained on random halves of the data, as targets or shadows."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import numpy as np
from scipy import special

from dpjax import attacks, auditing, data, trees, validate
from dpjax.accounting import upper
from dpjax.accounting.proved import NeighboringRelation
from dpjax.accounting.text import round_out
from dpjax.attacks import allowed, shadows, signals
from dpjax.attacks.membership import shadows_of
from dpjax.attacks.queries import MOST_QUERIES, queries_of_model
from dpjax.attacks.roc import (
  FPRS,
  Leakage,
  Roc,
  auc_interval,
  loss_tail,
  rate_at,
  strongest,
)
from dpjax.auditing.scores import Scores
from dpjax.data import resident
from dpjax.experiments.config import choices, rules
from dpjax.experiments.kinds.attack import curves as attack_report
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.methods import METHODS, Asked, reads
from dpjax.experiments.kinds.attack.settings import (
  AttackSettings,
  MeasuredAttack,
  Row,
  check_dealt,
)
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.central import privacy
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated.build import FedRun
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.kinds.federated.records import SILOS
from dpjax.experiments.run import pieces, saved, workdir, writers
from dpjax.experiments.run.experiment import Phase
from dpjax.experiments.run.guarantee import NONE, OWN_EPSILON, RATES, Guarantee
from dpjax.experiments.run.pieces import Arrays
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.types import Params
from dpjax.validate import UserError

# An attack compares shadows with and without a record. Models come in complementary pairs, and a
# target's own complement is no shadow. With 4 shadows a whole pair is always left, so neither group
# is empty.
LEAST_SHADOWS = 4
# Number of tests behind a verdict (Bonferroni): one for each false positive rate, one for the AUC.
_LOOKS = len(FPRS) + 1
_PROMISED = (
  "epsilon", "delta", "neighboring_relation", "unit", "epsilon_kind", "accountant",
  "noise_multiplier",
)  # fmt: skip
# Smallest false positive rate of a curve in result.json, and the number of points of a curve.
_LEFT = 1e-4
_COUNT = 81
# Largest number of test records that quantile regression learns from; with more, its trees take
# minutes.
_MOST_PUBLIC = 2000
# Smallest number of test records for quantile regression. Half of them must resolve a false
# positive rate of 1 %.
_LEAST_PUBLIC = 198
_UNTOLD = "no result.json of these parameters stands beside the target"


class Targets(NamedTuple):
  """Holds what an attack needs to train its models: targets, or shadows of a given target."""

  records: data.Dataset  # all records whose membership is inferred
  # [M, n] bool: whether a model trains on a record. All M models are targets, unless `target` is
  # given.
  included: np.ndarray
  target: Params | None  # trained elsewhere; then the M models are its shadows
  members: np.ndarray | None  # [n] bool, members of a given target
  run: central.Run | FedRun  # built for one half of the records
  test: Any
  train: Any  # (index of a group) -> its trained models
  guarantee: Guarantee
  facts: dict[str, Any]  # fields on privacy from a given target's result.json; else {}
  # [n] for each record the unit whose membership is inferred, such as its client, 0 to G - 1; then
  # `included` is [M, G] and `members` [G]. None: each record is a unit.
  unit_of: np.ndarray | None = None
  owners: np.ndarray | None = None  # [n] client that holds, or would hold, each record

  @property
  def public(self) -> data.Dataset:
    """Test records that no model has seen, and an attacker knows: the first 2,000 at most."""
    return self.test.subset(slice(0, min(len(self.test), _MOST_PUBLIC)))

  def pool(self, scores: np.ndarray) -> np.ndarray:
    """Returns the mean score of each unit's records, [n] -> [G]."""
    if self.unit_of is None:
      return scores
    counts = np.bincount(self.unit_of)
    return np.bincount(self.unit_of, np.asarray(scores, np.float64)) / counts


@dataclasses.dataclass(frozen=True)
class Inference(AttackSettings):
  """Base of membership inference with several attacks on the same targets.

  Its settings have `methods`, `num_shadows`, `target`, and, fixed or not, `queries` and
  `side_by_side`.
  """

  task: ClassVar[str] = "membership"

  def phase(self, config: AttackConfig, attacked: Targets) -> Phase:
    """Returns a phase that trains one group of models in each step, and queries each model about
    all records."""
    both = attacked.included.shape  # models, records
    width = config.attack.side_by_side
    asked = _questions(attacked, config)
    odds = (both[0], config.attack.queries * both[1])  # [M, queries * n], query by query
    shapes = {"log_odds": odds, "top": both, "accuracy": both[:1]}
    needs = reads(config.attack.methods)
    if "answers" in needs:
      shapes["answers"] = (*both, attacked.records.num_classes)
    if "public_log_odds" in needs:
      shapes["public_log_odds"] = (both[0], len(attacked.public))
    empty = lambda: {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def ask(state: Arrays, group: int) -> None:
      for index, params in enumerate(attacked.train(group), start=group * width):
        for name, value in asked(params, index).items():
          state[name][index] = value

    def accuracy(state: Arrays) -> dict[str, float]:
      known = np.asarray(state["accuracy"])
      return {"accuracy": float(known[known > 0].mean()) if known.any() else 0.0}

    groups = shadows.num_groups(both[0], width)
    return pieces.fill_pieces(groups, empty, ask, name="models", evaluate=accuracy)

  def measure(
    self, config: AttackConfig, attacked: Targets, state: Mapping[str, Any]
  ) -> MeasuredAttack:
    """Returns rates, verdicts and curves of every method, and what the guarantee allows."""
    by_method, members, odds = scores(config, attacked, state)
    leakages = {
      name: attacks.measure(scores_of, members) for name, scores_of in by_method.items()
    }
    run = attacked.run
    if attacked.target is None:
      accuracy = float(np.mean(state["accuracy"]))
      private = run.plan.is_private
      # Members were dealt at random, as the line assumes.
      line = _line(attacked) if private else None
    else:
      tested = run.task.evaluate(run.apply, attacked.target, attacked.test)
      accuracy = float(tested["accuracy"])
      # The shadows' plan did not train the target.
      private, line = attacked.facts["epsilon_kind"] in ("proved", "claimed"), None
    allowed_tpr = _allowed_tpr(line, attacked.facts)
    curves = {name: leakage.curve for name, leakage in leakages.items()}
    best = strongest(curves, fpr=FPRS[-1])
    # Maps a false negative rate to the share of non-members that the loss attack then recognises:
    # their losses exceed the losses of almost all members.
    tails = {rate: loss_tail(odds, members, fnr=rate) for rate in FPRS}
    result = {
      "test_accuracy": accuracy,
      "num_models": len(attacked.included),
      "num_records": len(attacked.records),
      "noise_multiplier": run.plan.noise_multiplier,
      "line": None if line is None else line.words,
      "attacks": {
        name: _row(leakage, line, private, allowed_tpr)
        for name, leakage in leakages.items()
      },
      "strongest": best.to_json()
      | {
        "words": f"strongest of {len(leakages)}: {best.name}, {best.words}, "
        f"AUC {best.auc:.3f} ({round_out(best.auc_interval)})"
      },
      "loss_tail": {
        f"{rate:g}": {"share": tail.tpr, "interval": list(tail.tpr_interval)}
        for rate, tail in tails.items()
      },
      "curves": _curves(leakages, line),
      **attacked.facts,
    }
    if attacked.target is not None:
      result |= _lower_bounds(by_method, members, attacked.facts)
    result["rows"] = _table_rows(result)

    def write(folder: pathlib.Path) -> None:
      attack_report.roc_report(
        folder, leakages, line=line, allowed=allowed_tpr, title=config.target.data.name
      )

    held = {name: np.asarray(leaf) for name, leaf in state.items()}
    found = MeasuredAttack(held | {"included": attacked.included}, result, write)
    return self.complete(found, attacked, by_method, members)

  def complete(
    self,
    found: MeasuredAttack,
    attacked: Targets,
    by_method: Mapping[str, np.ndarray],
    members: np.ndarray,
  ) -> MeasuredAttack:
    """Returns what was found, with what an attack adds to it; here nothing.

    Args:
      by_method, members: scores of each method and the true members, [targets, units].
    """
    del attacked, by_method, members
    return found


def check_methods(methods: tuple[str, ...], known: Iterable[str]) -> None:
  """Raises UserError unless `methods` are known names, one or more, none of them twice."""
  if not methods or len(set(methods)) < len(methods):
    raise UserError("must hold some, none of them twice", field="methods", value=methods)
  validate.one_of(known, **validate.entries(methods=methods))


@dataclasses.dataclass(frozen=True)
class Membership(Inference):
  """Membership inference, with several attacks on the same targets: models trained on
  random halves of the records. Each model is the target once. Its shadows are the others, except
  the model that was trained on exactly the other records.

  Args:
    queries: how often each model is asked about a record. More than 1 needs images: 2 adds the
      mirror image, and up to 18 add shifts by an eighth of the size. The score of a record is the
      mean over its queries. More queries help against models that were trained with mirrored or
      shifted images, and weaken the attack on other models.
    methods: names of attacks. `quantile_regression` uses no shadow models. It knows the answers
      about the first 2,000 test records, which no model has seen, and the pixels and labels of all
      records. `attack_network` reads a model's probabilities of all classes, of the records as
      they are.
    target: params.npz of a model that `launch.train` has trained on all training data. It is
      attacked in place of models trained here. Training data are members, test data non-members.
  """

  methods: Annotated[tuple[str, ...], "all of " + " | ".join(METHODS)] = (
    "confidence", "loss", "lira_fixed", "bavaria", "rmia", "rmia_tuned",
  )  # fmt: skip
  num_shadows: Annotated[
    int, rules.between(LEAST_SHADOWS, rules.MOST_RUNS), "models beside each target"
  ] = 16
  side_by_side: Annotated[
    int, rules.between(1, rules.MOST_RUNS), "models trained at once, under vmap"
  ] = 1
  queries: Annotated[
    int,
    rules.between(1, MOST_QUERIES),
    "how often each model is asked about a record: as it is, mirrored, shifted",
  ] = 1
  target: Annotated[
    str | None, "params.npz of launch.train, attacked in place of models trained here"
  ] = None
  section: ClassVar[str] = "train"

  def __post_init__(self):
    check_methods(self.methods, METHODS)
    if "public_log_odds" in reads(self.methods) and self.target is not None:
      raise UserError(
        "must not hold 'quantile_regression' beside attack.target: its public records are the test "
        "data, which are the non-members there",
        field="methods",
        value=self.methods,
      )
    rules.check_settings(self)

  def check_target(self, target: TrainConfig) -> None:
    check_dealt(target)

  def prepare(
    self, config: AttackConfig, loaded: tuple[Any, Any], random: RunKeys
  ) -> Targets:
    """Returns the divided records, and the attacked run, which is built for one half of them.

    The halves depend only on the seed, the data, the number of models, and whether the sampler
    needs halves of one size. So two defences for which these are alike have the same members.

    Raises UserError for data that do not fit the settings, such as queries of data without images.
    """
    train, test = loaded
    target = None
    records, members = train, None
    if self.target is not None:
      records = join(train, test)
      members = np.arange(len(records)) < len(train)
    if self.queries > 1 and np.ndim(records.x) != 4:
      raise UserError(
        "needs images [H, W, C] to flip and shift, data have shape "
        f"{np.shape(records.x)[1:]}; must be 1",
        field="attack.queries",
        value=self.queries,
      )
    if "public_log_odds" in reads(self.methods) and len(test) < _LEAST_PUBLIC:
      raise UserError(
        f"holds 'quantile_regression', which needs {_LEAST_PUBLIC} test records as public ones; "
        f"there are {len(test)}",
        field="attack.methods",
        value=self.methods,
      )
    count = self.num_shadows + (self.target is None)
    included = _halves(config, count, len(records), random)
    size = int(included.sum(axis=1).max())
    # Models train on one half each, so the plan is for the size of the largest half.
    records = records.declared(size)
    half = records.subset(slice(0, size))
    run = central.assemble(config.train, (half, test), random)
    guarantee = run.guarantee
    facts = {}
    if self.target is not None:
      target, facts = given_target(config, run.params)
      guarantee = NONE  # the steps of this config did not train the target
    init = jax.jit(
      lambda key: central.start(config.train, half, random._replace(init=key))[2]
    )
    models = shadows.shadow_models(
      records,
      included,
      algorithm=lambda key: run.with_keys(*jax.random.split(key)),
      batches=lambda part, rng: run.plan.batches(resident.resident(part), rng=rng),
      init_params=init,
      seed=random.sampler,
      side_by_side=self.side_by_side,
    )
    return Targets(records, included, target, members, run, test, models, guarantee, facts)


def join(train: data.Dataset, test: data.Dataset, *more: data.Dataset) -> data.Dataset:
  """Returns all records in one data set. Raises UserError without test data."""
  if not len(test):
    raise UserError("has no test data, so there are no non-members", field="data.name")
  parts = (train, test, *more)
  x, y = (np.concatenate([np.asarray(getattr(p, n)) for p in parts]) for n in "xy")
  return data.from_arrays(x, y, num_classes=train.num_classes, name=train.name)


def given_target(config: AttackConfig, params: Params) -> tuple[Params, dict[str, Any]]:
  """Returns the parameters of `attack.target`, a tree like `params`, and `facts_of_run` of it."""
  path = config.attack.target
  with validate.about("attack.target", path):
    target = saved.in_place_of(params, saved.read(path))
  return target, facts_of_run(path, target, config.target)


def _halves(config: AttackConfig, count: int, n: int, random: RunKeys) -> np.ndarray:
  """Returns random members, bool [count, n]: a coin for each record, or exact halves.

  Exact halves are for samplers that need a fixed number of records. Raises UserError for too few
  records, and for an odd number that cannot be halved.
  """
  least = 2 * config.attack.num_shadows
  if n < least:
    raise UserError(
      f"needs {least} records or more, or too few would be members or non-members; there are {n}",
      field="attack.num_shadows",
      value=config.attack.num_shadows,
    )
  drawn_by = privacy.sampler(config.train, n)  # `assemble` makes another one for a half
  sized = drawn_by.least_size > 0
  if sized and n % 2:
    raise UserError(
      f"leaves {n} records, which must be even: {type(drawn_by).__name__} is "
      "made for halves of one size",
      field="data.limit",
      value=config.train.data.limit,
    )
  return attacks.random_halves(count, n, seed=random.order, exact=sized)


def facts_of_run(
  path: str, params: Params, train: TrainConfig | FedConfig
) -> dict[str, Any]:
  """Returns the guarantee of the target, from the result.json beside its params.npz.

  If that file does not belong to exactly these parameters, its epsilon does not cover them. Then
  epsilon_kind is "none", method is "unknown", epsilon_note says why, and other values are None.

  Raises UserError if the target's run had other data than `train`, and so other members.
  """
  config = pathlib.Path(path).parent / workdir.CONFIG
  none = dict.fromkeys(_PROMISED)
  result = saved.result_of(path, params)
  if result is None:
    return none | {"epsilon_kind": "none", "method": "unknown", "epsilon_note": _UNTOLD}
  # These fields (the location of the data, and declared numbers) do not change the data.
  apart = (*workdir.PLACES, "num_examples", "num_users")
  # A config.json that holds no object names no data, so the comparison below fails.
  held = writers.read_json(config) if config.exists() else {}
  said = held.get("data", {}) if isinstance(held, dict) else {}
  wanted, known = (
    {name: value for name, value in dict(data).items() if name not in apart}
    for data in (
      writers.plain(choices.to_dict(train))["data"],
      said if isinstance(said, dict) else {},
    )
  )
  if wanted != known:
    raise UserError(
      f"was trained elsewhere: its run had data={known}, train.data is {wanted}",
      field="attack.target",
      value=path,
    )
  names = (*_PROMISED, *RATES, SILOS, OWN_EPSILON)
  names += ("failed_assumptions", "method", "num_steps")
  return none | {name: result[name] for name in names if name in result}


# --- what each model is asked


def _questions(attacked: Targets, config: AttackConfig) -> Any:
  """Returns a function (params, index) -> one model's answers.

  The answers are log odds [queries * n], test accuracy, and of the records as they are top
  confidences [n]. For methods that read them they are also probabilities [n, K] and log odds of
  public records. An error names the model by `index`.
  """
  run = attacked.run
  queries = config.attack.queries
  needs = reads(config.attack.methods)
  records = attacked.records
  shift = max(1, min(np.shape(records.x)[1:3], default=1) // 8)
  odds_of = signals.log_odds_of_model(run.apply)
  odds = queries_of_model(odds_of, queries, shift=shift)
  logits = jax.jit(lambda params, x: trees.at_least_float32(run.apply(params, x)))

  def asked(params: Params, index: int) -> dict[str, Any]:
    log_odds = odds(params, records)
    if not np.isfinite(log_odds).all():
      raise UserError(
        f"the training of model {index} diverged; a smaller "
        "optimizer.learning_rate may help",
        field="target",
      )
    parts = range(0, len(records), 500)
    said = np.concatenate([logits(params, records.x[i : i + 500]) for i in parts])
    accuracy = run.task.evaluate(run.apply, params, attacked.test)["accuracy"]
    answers = {"answers": special.softmax(said, axis=-1)} if "answers" in needs else {}
    if "public_log_odds" in needs:
      answers["public_log_odds"] = odds_of(params, attacked.public)
    top = attacked.pool(signals.top_confidences(said))
    each = np.split(np.asarray(log_odds), queries)
    log_odds = np.concatenate([attacked.pool(odds) for odds in each])
    return {"log_odds": log_odds, "top": top, "accuracy": accuracy} | answers

  return asked


# --- results


def _ask(
  config: AttackConfig, attacked: Targets, state: Mapping[str, Any]
) -> Iterator[Asked]:
  """Yields what each target and its shadows answered. Targets are all trained models, or only the
  given one."""
  of_all = {name: np.asarray(leaf) for name, leaf in state.items()}
  odds = np.asarray(state["log_odds"], np.float64)
  of_query = np.split(odds, config.attack.queries, axis=1)  # of each query [M, n]
  rest = {"records": attacked.records, "public": attacked.public}

  def asked(queries, members, own: Mapping[str, Any], shadow_answers: Any) -> Asked:
    top = np.asarray(own["top"], np.float64)
    public = own.get("public_log_odds")
    return Asked(queries, members, top, own.get("answers"), shadow_answers, public, **rest)

  if attacked.target is not None:
    own = _questions(attacked, config)(attacked.target, 0)
    theirs = np.split(np.asarray(own["log_odds"]), config.attack.queries)
    queries = [
      attacks.Evidence(target, shadows, attacked.included)
      for target, shadows in zip(theirs, of_query)
    ]
    yield asked(queries, np.asarray(attacked.members), own, of_all.get("answers"))
    return
  games = zip(*(attacks.each_as_target(odds, attacked.included) for odds in of_query))
  for target, of_target in enumerate(games):
    own = {name: leaf[target] for name, leaf in of_all.items()}
    kept = shadows_of(target, attacked.included)
    theirs = of_all["answers"][kept] if "answers" in of_all else None
    yield asked([evidence for evidence, _ in of_target], of_target[0][1], own, theirs)


# Scores by method, membership, and log odds, each [targets, n].
def scores(
  config: AttackConfig, attacked: Targets, state: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
  """Returns (scores by method, membership, log odds), each [targets, n].

  The targets are all trained models, or only the given target. Log odds are of the records as they
  are, not mirrored or shifted.
  """
  by_method: dict[str, list[np.ndarray]] = {name: [] for name in config.attack.methods}
  members = []
  odds = []
  for asked in _ask(config, attacked, state):
    members.append(asked.members)
    odds.append(asked.queries[0].target)
    for name, of_targets in by_method.items():
      of_targets.append(METHODS[name].scores(asked))
  joined = {name: np.stack(each) for name, each in by_method.items()}
  return joined, np.stack(members), np.stack(odds)


def _lower_bounds(
  by_method: Mapping[str, np.ndarray], members: np.ndarray, facts: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns lower bounds on a target's epsilon, from its scores and from perfect scores.

  The bounds are indicative, not proved: no coins chose the members, and all records share one
  training. The bounds of all methods hold together at 95 % (Bonferroni).
  """
  confidence = 1 - 0.05 / len(by_method)
  delta = facts.get("delta") or 0.0

  def bound(scores: np.ndarray) -> float:
    sides = Scores(inside=scores[members], outside=scores[~members])
    return auditing.clopper_pearson(sides, delta=delta, confidence=confidence)

  return {
    "epsilon_lower_indicative": max(map(bound, by_method.values())),
    "epsilon_lower_ceiling": bound(members.astype(np.float64)),
    "num_members": int(members.sum()),
  }


def _line(attacked: Targets) -> allowed.AllowedRoc:
  plan = attacked.run.plan
  sizes = attacked.included.sum(axis=1)
  line = allowed.by_plan(plan)
  exact = np.ptp(sizes) == 0  # with exact halves, neighbours replace a record
  same = plan.neighboring_relation == NeighboringRelation.REPLACE_ONE
  return allowed.replacement_line(line) if exact and not same else line


def _allowed_tpr(
  line: allowed.AllowedRoc | None, facts: Mapping[str, Any]
) -> dict[float, float]:
  """Returns the allowed TPR at each FPR: of the line, or what a given target's run promised.

  What is of a larger deployment was promised to others than those whose data were used."""
  if line is not None:
    return dict(zip(FPRS, line(FPRS).tolist()))
  if facts.get("epsilon_kind") == "simulated" or OWN_EPSILON in facts:
    return {}
  return {fpr: facts[name] for name, fpr in RATES.items() if facts.get(name) is not None}


def _row(
  leakage: Leakage,
  line: allowed.AllowedRoc | None,
  private: bool,
  allowed_tpr: Mapping[float, float],
) -> dict[str, Any]:
  judged = None if line is None else attacks.judge(leakage.curve, line)
  return {
    "auc": leakage.auc,
    "auc_interval": list(leakage.auc_interval),
    "balanced_accuracy": leakage.balanced_accuracy,
    "tpr_at_fpr": {
      f"{rate.fpr:g}": {
        "tpr": rate.tpr,
        "interval": list(rate.tpr_interval),
        "fpr_interval": list(rate.fpr_interval),
        "resolved": rate.resolved,
        "allowed_tpr": allowed_tpr.get(rate.fpr),
      }
      for rate in leakage.rates
    },
    "against_line": None if judged is None else judged.verdict,
    "verdict": verdict(leakage.curve, judged, private=private),
  }


def verdict(curve: Roc, judged: allowed.Judgement | None, *, private: bool = False) -> str:
  """Returns the verdict on a defence.

  Recognised members are leakage. A guarantee bounds leakage, but does not forbid it. A defence
  without a guarantee fails if members are recognised. No attack can show that a defence holds.

  Args:
    curve: ROC of an attack.
    judged: comparison of the curve with the line that the guarantee allows; None: no line.
    private: whether the run has a guarantee.

  >>> truth = np.arange(4000) >= 2000
  >>> verdict(attacks.roc.curve_of(truth + 0.0, truth), None)
  'FAILS: members are told apart'
  >>> verdict(attacks.roc.curve_of(np.zeros(4000), truth), None)
  'not shown to fail'
  """
  each = 1 - 0.05 / _LOOKS
  rates = [rate_at(curve, fpr, confidence=each) for fpr in FPRS]
  apart = any(rate.tpr_interval[0] > rate.fpr_interval[1] for rate in rates)
  apart |= auc_interval(curve, confidence=each)[0] > 0.5
  if judged is not None and judged.verdict == "above":
    return "ABOVE the line that its guarantee allows"
  if not apart:
    return "not shown to fail"
  if judged is None:
    return "leaks" if private else "FAILS: members are told apart"
  below = judged.verdict == "below"
  return f"leaks, {'below' if below else 'too few records to tell from'} its line"


def _curves(leakages: Mapping[str, Leakage], line: Any) -> dict[str, list[float]]:
  """Returns true positive rates of all methods at several false positive rates ("fpr").

  With a line, "allowed" holds the true positive rates that the line allows. False positive rates
  below 1 / (number of non-members) are left out, since curves would seem to cross the line there.
  """
  least = 1 / min(leakage.num_non_members for leakage in leakages.values())
  points = np.geomspace(max(_LEFT, least), 1, _COUNT)
  curves = {"fpr": points.tolist()}
  for name, leakage in leakages.items():
    places = np.searchsorted(leakage.curve.fpr, points, side="right") - 1
    curves[name] = leakage.curve.tpr[places].tolist()
  return curves | ({} if line is None else {"allowed": line(points).tolist()})


def _table_rows(result: Row) -> list[Row]:
  """Returns a row for each method; success is the true positive rate at 1 % false positives."""
  rows = []
  for name, rates in result["attacks"].items():
    at_1_percent = rates["tpr_at_fpr"]["0.01"]
    tpr, bound = at_1_percent["tpr"], at_1_percent["allowed_tpr"]
    low, high = at_1_percent["interval"]
    ends = round_out((low, high))
    finds = f"TPR {tpr:.3f} ({ends}) at 1 % FPR, AUC {rates['auc']:.3f}"
    finds += "" if bound is None else f"; at most {upper(bound)} allowed"
    rows.append(
      {
        "method": name,
        "share": "true positives at 1 % false ones, of members",
        "finds": finds,
        "success": tpr,
        "low": low,
        "high": high,
        "allowed_tpr": bound,
        "tpr_at_0.001_fpr": rates["tpr_at_fpr"]["0.001"]["tpr"],
        "auc": rates["auc"],
        "loss_tail_0.01": result["loss_tail"]["0.01"]["share"],
        "verdict": rates["verdict"],
      }
    )
  return rows
