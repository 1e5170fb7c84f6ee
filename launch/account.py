"""Accounts for a private run: gives the one number that you leave out.

Leave out exactly one of --epsilon, --noise_multiplier, --num_steps and --sampling_prob:

  # epsilon of a run: 4000 steps, each on a Poisson sample of 1 % of the data
  python -m launch.account --noise_multiplier=1.1 --sampling_prob=0.01 --num_steps=4000

  # epsilon from data size, expected batch size and epochs, for four noise levels; with a curve
  python -m launch.account --noise_multiplier=0.8,1,1.5,2 --num_examples=60000 \\
    --batch_size=600 --epochs=40 --curve=/tmp/curve

  # how much noise keeps 40 epochs within epsilon 3; with the guarantee in words
  python -m launch.account --epsilon=3 --num_examples=60000 --batch_size=600 --epochs=40 \\
    --statement

  # how many steps an epsilon allows; how large a sampling probability it allows
  python -m launch.account --epsilon=2 --noise_multiplier=1.1 --sampling_prob=0.01
  python -m launch.account --epsilon=2 --noise_multiplier=1.1 --num_steps=4000

  # fixed-size batches without replacement, under replace_one (default) or add_or_remove_one
  python -m launch.account --sampler=fixed_size --noise_multiplier=4 --num_examples=60000 \\
    --batch_size=600 --num_steps=4000

  # batches drawn with replacement, under replace_one (default) or add_or_remove_one; by PLD alone
  python -m launch.account --sampler=with_replacement --noise_multiplier=4 \\
    --num_examples=60000 --batch_size=600 --num_steps=4000

  # Poisson samples cut at random to 700 records, under replace_special; proved by PLD only
  python -m launch.account --sampler=truncated_poisson --capacity=700 --noise_multiplier=1 \\
    --num_examples=60000 --batch_size=600 --num_steps=4000

  # each record is in one random batch of every pass: 10 passes of 200 steps. Without
  # --sampling_prob the run is one pass of --num_steps. Poisson sampling is shown for comparison
  python -m launch.account --sampler=random_allocation --noise_multiplier=1 \\
    --num_steps=2000 --sampling_prob=0.005

  # each record takes part in 7 random steps of one pass of 2000 steps. With
  # --sampling_prob=0.035 it takes part in 7 steps of every pass of 200 steps
  python -m launch.account --sampler=k_out_of_t --num_selected=7 --noise_multiplier=1 \\
    --num_steps=2000

  # steps of a record are at least 8 apart, and noise has 4 bands. epsilon with amplification is
  # simulated; for --sampler=balls_in_bins it is also proved
  python -m launch.account --sampler=min_sep --steps_apart=8 --bands=4 --noise_multiplier=1 \\
    --num_steps=64 --sampling_prob=0.05 --delta=1e-4 --num_samples=300000

  # 40 epochs of shuffled batches: an epoch costs no more than one step on all data
  python -m launch.account --sampler=none --noise_multiplier=20 --num_steps=40 \\
    --neighboring_relation=replace_special

  # what an attacker can achieve at most: the true positive rate at low false positive rates, and mu
  # of Gaussian DP
  python -m launch.account --tradeoff --noise_multiplier=1.1 --sampling_prob=0.01 \\
    --num_steps=4000

  # how much noise limits every attack: to a true positive rate of .1 at a false positive rate of
  # .01; to an advantage; to mu of Gaussian DP; or so that it errs with at least a given chance
  python -m launch.account --tpr=0.1 --fpr=0.01 --sampling_prob=0.01 --num_steps=4000
  python -m launch.account --advantage=0.2 --sampling_prob=0.01 --num_steps=4000
  python -m launch.account --mu=0.5 --sampling_prob=0.01 --num_steps=4000
  python -m launch.account --bayes_risk=0.4 --prior=0.5 --sampling_prob=0.01 --num_steps=4000

  # the proved epsilons, and an approximation by the central limit, which may be too small
  python -m launch.account --gdp --noise_multiplier=1 --sampling_prob=0.01 --num_steps=100

  # what finished runs on the same data cost together, which is at most the sum of their epsilons; a
  # folder of a sweep stands for all of its runs
  python -m launch.account --runs=runs/first,runs/second

noise_multiplier is (std of the noise on the sum) / l2_clip_norm under every neighbouring relation.
The number that is solved for is rounded so that its target holds. Each epsilon is rounded up.
"""

from __future__ import annotations

import math
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from absl import flags

from dpjax import accounting, sampling, solve, validate
from dpjax.accounting import attack_bounds, gdp, overflow, trade_off_files
from dpjax.accounting.attack_bounds import AttackBound, attack_bound
from dpjax.accounting.epsilon import epsilon_of_zcdp
from dpjax.accounting.epsilon import zcdp as zcdp_of
from dpjax.accounting.monte_carlo import MOST_APART
from dpjax.accounting.proved import ACCOUNTANTS, RELATIONS
from dpjax.accounting.statement import delta_warning
from dpjax.accounting.text import lower
from dpjax.sampling import registry
from dpjax.sampling.registry import Scheme
from dpjax.sampling.samplers import SizedSampler
from dpjax.solve import UNKNOWNS, Question
from dpjax.validate import UserError, Verbatim
from launch import app

# From this number on, some neighbouring integers are equal as floats.
_MOST = 2**53
# Flags that may only add to what is printed about attackers.
_PRINTED = {"fpr", "prior"}
# False positive rates at which true positive rates of attackers are printed.
_RATES = (1e-3, 1e-2, 1e-1)
# Flags that state a guarantee in an attacker's terms.
_OF_ATTACKERS = ("tpr", "fpr", "advantage", "mu", "bayes_risk", "prior")
# Flags for samplers that bound how often an example takes part, and for no others; and what else
# is read with these samplers.
_OF_BOUNDED = ("steps_apart", "bands", "num_samples")
_BESIDE_BOUNDED = ("sampler", "noise_multiplier", "num_steps", "sampling_prob", "delta")


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
  """Defines this launcher's flags. Importing the module defines none, since launchers share names
  of flags."""

  def flag(kind: str, name: str, default: Any, *more: Any) -> None:
    getattr(flags, f"DEFINE_{kind}")(name, default, *more, flag_values=values)

  flag("float", "epsilon", None, "target epsilon of the whole run")
  flag("float", "delta", 1e-5, "delta; keep it well below 1/n")
  several = "std of the noise on the sum / l2_clip_norm; several values: comma list"
  flag("list", "noise_multiplier", None, several)
  flag("integer", "num_steps", None, "number of noisy steps")
  passes = "instead of --num_steps: passes over the data, rounded up to steps"
  flag("float", "epochs", None, passes)
  chance = "chance of each example to be in a batch; for a fixed size b/n"
  flag("float", "sampling_prob", None, chance)
  flag(
    "integer", "num_examples", None, "n, the declared number of examples, a public constant"
  )
  size = "b, the (expected) batch; with --num_examples for --sampling_prob"
  flag("integer", "batch_size", None, size)
  most = "the most examples of a batch, for --sampler=truncated_poisson"
  flag("integer", "capacity", None, most)
  several = "steps of a pass for each example, for --sampler=k_out_of_t"
  flag("integer", "num_selected", None, several)
  flag(
    "enum",
    "sampler",
    "poisson",
    (*solve.SAMPLERS, *solve.BOUNDED),
    "who is in a batch; none: all data",
  )
  apart = "least steps between two of one example, for min_sep; bins of balls_in_bins"
  flag("integer", "steps_apart", None, apart)
  flag("integer", "bands", 1, "with --steps_apart: bands of the correlated noise")
  flag("integer", "num_samples", 2_000_000, "with --steps_apart: simulated runs")
  default_text = (
    "default: add_or_remove_one; fixed_size, with_replacement: replace_one; truncated_poisson: "
    "replace_special"
  )
  flag("enum", "neighboring_relation", None, RELATIONS, default_text)
  flag("enum", "accountant", "both", (*ACCOUNTANTS, "both"), "pld solves for both")
  folder = (
    "directory for epsilon_curve.csv and .png (epsilon over the steps), trade_off.csv (the "
    "whole run's trade-off curve) and privacy_loss.npz (its privacy loss, of dp_accounting)"
  )
  flag("string", "curve", None, folder)
  flag("bool", "gdp", False, "add the central limit's approximation, NOT a bound")
  flag("bool", "zcdp", False, "add rho of zero-concentrated DP, blind to sampling")
  attack = "print the largest true positive rates of any attack, and mu of Gaussian DP"
  flag("bool", "tradeoff", False, attack)
  guarantee = "in place of --epsilon, for the noise: "
  flag("float", "tpr", None, f"{guarantee}largest true positive rate at --fpr")
  flag("float", "fpr", None, "false positive rate of --tpr, or to print one at")
  flag("float", "advantage", None, f"{guarantee}largest TPR - FPR of any attack")
  flag("float", "mu", None, f"{guarantee}mu of Gaussian DP, up to --delta")
  risk = "least chance of error of an attacker who knows --prior"
  flag("float", "bayes_risk", None, f"{guarantee}{risk}")
  flag(
    "float", "prior", None, "chance of membership for --bayes_risk, or to print a risk at"
  )
  flag("bool", "statement", False, "print the guarantee in words")
  folders = "instead: folders of finished runs, whose cost together is printed"
  flag("multi_string", "runs", None, folders)


def _refuse_beside(values: Any, read: Iterable[str], reason: str) -> None:
  """Raises UserError, with this reason, for a flag of the command line that is not among those that
  are read."""
  own = values.find_module_defining_flag("sampler")
  for name in values:
    is_ours = values.find_module_defining_flag(name) == own
    if is_ours and values[name].present and name not in read:
      raise UserError(reason, field=name)


def questions(values: Any) -> list[Question]:
  """Returns questions from flag values: one for each noise multiplier, or a single one if none is
  given.

  Raises UserError if a flag is missing, is out of range, or contradicts another one.
  """
  _check_counts(values)
  num_selected = _for_sampler(values, "num_selected")
  prob = _sampling_prob(values)
  relations, accountants = solve.proved_for(values.sampler)
  if (values.neighboring_relation or relations[0]) not in relations:
    raise UserError(
      f"must be {' or '.join(relations)} for sampler={values.sampler}",
      field="neighboring_relation",
      value=values.neighboring_relation,
    )
  by = values.accountant
  if by not in ("both", *accountants):
    raise UserError(
      f"must be {' or '.join(accountants)} for sampler={values.sampler}",
      field="accountant",
      value=by,
    )
  question = Question(
    epsilon=values.epsilon,
    noise_multiplier=None,
    num_steps=_num_steps(values, prob),
    sampling_prob=prob,
    delta=values.delta,
    sampler=values.sampler,
    num_examples=values.num_examples,
    neighboring_relation=values.neighboring_relation or relations[0],
    accountants=accountants if by == "both" else (by,),
    capacity=_for_sampler(values, "capacity"),
    num_selected=num_selected,
  )
  levels = _noise_multipliers(values.noise_multiplier)
  question = question._replace(attack=_attack(values, bool(levels)))
  asked = [question._replace(noise_multiplier=level) for level in levels or [None]]
  _check_one_missing(asked[0])
  return asked


def _check_counts(values: Any) -> None:
  """Raises UserError for counts of 2^53 or more. Ratios of counts are floats, and as floats some of
  these counts are equal."""
  for name in ("num_steps", "batch_size", "num_examples", "capacity", "num_selected"):
    value = getattr(values, name)
    if value is not None and abs(value) >= _MOST:
      raise UserError(
        "must be below 2**53 in size", field=name, value=Verbatim(hex(value)[:20])
      )


def _for_sampler(values: Any, name: str) -> int | None:
  """Returns the value of a flag that some samplers need; None for other samplers. Raises UserError
  if the sampler needs the flag and it is missing, or if another sampler gets it."""
  value = getattr(values, name)
  readers = [
    sampler
    for sampler in registry.names_answered("exact")
    if _decides_cost(registry.SCHEMES[sampler], name)
  ]
  if values.sampler in readers:
    validate.integer_at_least(1, **{name: value})
    return value
  if value is not None:
    samplers = " or ".join(map(repr, readers))
    raise UserError(f"goes with sampler={samplers}", field=name, value=value)
  return None


def _decides_cost(scheme: Scheme, name: str) -> bool:
  # A sampler whose batches cannot overflow cuts larger draws to the capacity, which changes the
  # cost. For other samplers the capacity only pads batches, which does not change the cost.
  return name in scheme.numbers and not (name == "capacity" and scheme.kind.can_overflow)


def _noise_multipliers(texts: Sequence[str] | None) -> list[float]:
  try:
    levels = [float(text) for text in texts or ()]
  except ValueError:
    raise UserError(
      "must be numbers", field="noise_multiplier", value=",".join(texts or ())
    ) from None
  for level in levels:
    validate.non_negative(noise_multiplier=level)
  return levels


def _attack(values: Any, has_noise: bool) -> AttackBound | None:
  """Returns the bound on attackers for which the noise is solved; None if there is no such bound.

  If the noise is given, or follows from --epsilon, --fpr and --prior only add a rate and a risk to
  the printed line.
  """
  numbers = {name: values[name].value for name in _OF_ATTACKERS}
  only_printed = {name for name, value in numbers.items() if value is not None} <= _PRINTED
  if not (has_noise or (values.epsilon is not None and only_printed)):
    return attack_bound(**numbers)
  for name, value in numbers.items():
    if value is not None and name not in _PRINTED:
      raise UserError(
        "is what the noise would be solved for; leave out noise_multiplier",
        field=name,
        value=value,
      )
    if value is not None:
      validate.open_unit(**{name: value})
  return None


def _sampling_prob(values: Any) -> float | None:
  n = values.num_examples
  batch = values.batch_size
  prob = values.sampling_prob
  scheme = registry.SCHEMES.get(values.sampler)
  if scheme is None:
    if (batch, prob) != (None, None):
      raise UserError(
        "takes no sampling_prob and no batch_size", field="sampler", value="none"
      )
    return 1.0
  if n is None and (batch is not None or issubclass(scheme.kind, SizedSampler)):
    sized = [
      name
      for name in registry.names_answered("exact")
      if issubclass(registry.SCHEMES[name].kind, SizedSampler)
    ]
    raise UserError(
      f"must be given with batch_size, and with sampler={' or '.join(map(repr, sized))}",
      field="num_examples",
      value=None,
    )
  if batch is not None and prob is not None:
    raise UserError(
      "must be without --sampling_prob: give one of the two",
      field="batch_size",
      value=batch,
    )
  if n is not None:
    validate.integer_at_least(1, num_examples=n)
  if batch is None:
    return _without_batch(values, prob)
  assert n is not None  # asked for above
  validate.integer_in(1, n, batch_size=batch)
  if scheme.in_passes:
    return _of_passes(values, scheme)
  return batch / n


def _without_batch(values: Any, prob: float | None) -> float | None:
  """Returns --sampling_prob. For a fixed size it is rounded to the nearest possible probability.

  Without the flag, the result for a sampler in passes is the probability that makes the run one
  pass, and for other samplers None.
  """
  scheme = registry.SCHEMES[values.sampler]
  size = solve.size_of(values)
  if prob is not None:
    validate.probability(sampling_prob=prob)
    scheme.check_prob(size)
    # A batch of a fixed size holds a whole number b of examples, so its probability is b / n.
    return prob if scheme.in_passes else scheme.nearest_prob(size)
  if not scheme.in_passes:
    return None
  times = scheme.times_per_pass(size)
  if values.num_steps is None:
    raise UserError(
      f"must be given for {values.sampler}, {times} / the steps of a pass, or "
      "num_steps, the steps of one pass",
      field="sampling_prob",
      value=None,
    )
  validate.integer_at_least(times, num_steps=values.num_steps)
  return times / values.num_steps


def _of_passes(values: Any, scheme: Scheme) -> float:
  """Returns the probability with which a sampler in passes has a mean batch of --batch_size. Raises
  UserError if a whole number of steps changes the mean batch by one example or more."""
  batch_size = values.batch_size
  times = scheme.times_per_pass(solve.size_of(values))
  drawn = times * values.num_examples
  steps = max(times, round(drawn / batch_size))
  # A pass has a whole number of steps, which rounds the mean batch. Rounding changes it by less
  # than one example here; a larger change is refused.
  if abs(drawn / steps - batch_size) < 1:
    return times / steps
  several = f"{times} num_examples, {drawn}," if times > 1 else f"num_examples={drawn}"
  raise UserError(
    f"must be {several} / a whole number, the steps of a pass, for "
    f"{values.sampler.replace('_', ' ')}; {-(-drawn // steps)} is near",
    field="batch_size",
    value=batch_size,
  )


def _num_steps(values: Any, prob: float | None) -> int | None:
  if values.epochs is None:
    if values.num_steps is not None:
      validate.integer_at_least(1, num_steps=values.num_steps)
    return values.num_steps
  if values.num_steps is not None:
    raise UserError(
      "must be without --num_steps: give one of the two",
      field="epochs",
      value=values.epochs,
    )
  if prob is None:
    raise UserError(
      "needs --sampling_prob or --batch_size; else give --num_steps", field="epochs"
    )
  validate.positive(epochs=values.epochs)
  validate.positive(**{"epochs / sampling_prob": values.epochs / prob})
  # Rounding errors must not add a step. As floats 9 / 0.009 is 1000.0000000000001, which gives 1000
  # steps, not 1001.
  steps = math.ceil(values.epochs / prob * (1 - 1e-12))
  if steps >= _MOST:
    raise UserError(
      "must be fewer than 2**53 steps", field="epochs", value=Verbatim(f"{values.epochs:g}")
    )
  return steps


def _check_one_missing(question: Question) -> None:
  missing = [name for name in UNKNOWNS if getattr(question, name) is None]
  if question.attack is not None:
    if question.epsilon is not None:
      raise UserError(
        f"not with {type(question.attack).__name__}: give one guarantee",
        field="epsilon",
        value=question.epsilon,
      )
    missing.remove("epsilon")
  if not missing:
    raise UserError(
      f"must be the one to solve for, or another of {', '.join(UNKNOWNS)}: leave out one",
      field=UNKNOWNS[0],
      value=getattr(question, UNKNOWNS[0]),
    )
  if len(missing) > 1:
    raise UserError(
      f"must be given: all but one of {', '.join(UNKNOWNS)}", field=missing[0], value=None
    )


def table(answers: Iterable[Question], *, gdp: bool = False, zcdp: bool = False) -> str:
  """Returns a text table with a row for each answer and accountant.

  An answer may get more rows: its cost in launch.train, and Poisson sampling for comparison. `gdp`
  adds the central limit's approximation, and `zcdp` the bound of zero-concentrated DP."""
  header = ("accountant", "noise_multiplier", "sampling_prob", "num_steps", "epsilon")
  lines = [header, *(row for answer in answers for row in _rows(answer, gdp, zcdp))]
  widths = [max(map(len, column)) for column in zip(*lines)]
  return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def _rows(answer: Question, gdp: bool, zcdp: bool) -> list[tuple[str, ...]]:
  known = (
    lower(answer.noise_multiplier or 0.0, digits=6),
    accounting.upper(answer.sampling_prob or 0.0, digits=6),
    f"{answer.num_steps}",
  )
  rows = [(by, *known, _up(solve.epsilon_of(answer, by))) for by in answer.accountants]
  by = answer.accountants[0]
  if answer.can_overflow:
    cost = solve.epsilon_in_training(answer, by)
    rows.append((f"launch.train ({by})", *known, _up(cost)))
  # Shows Poisson sampling with the same expected batches beside a sampler in passes.
  proved = answer.neighboring_relation in sampling.PoissonSampler.relations
  if answer.steps_per_pass > 1 and proved:
    poisson = answer._replace(sampler="poisson")
    rows.append((f"poisson ({by})", *known, _up(solve.epsilon_of(poisson, by))))
  if zcdp:
    relation = answer.neighboring_relation
    rho = zcdp_of(solve.run_event(answer), neighboring_relation=relation)
    name = f"zcdp (rho {accounting.upper(rho, digits=6)})"
    rows.append((name, *known, _up(epsilon_of_zcdp(rho, delta=answer.delta))))
  return rows + ([_approximate(answer, known)] if gdp else [])


def _up(epsilon: float) -> str:
  return accounting.upper(epsilon, decimals=4)


def _approximate(answer: Question, known: tuple[str, ...]) -> tuple[str, ...]:
  """Returns the row of --gdp, labelled as an approximation unless it is exact."""
  bound = gdp.approximate(
    solve.run_event(answer),
    delta=answer.delta,
    neighboring_relation=answer.neighboring_relation,
  )
  kind = "exact" if bound.epsilon_kind == "proved" else "APPROXIMATION, not a bound"
  return (f"gdp ({kind})", *known, _up(bound.epsilon))


def note_on_training(answer: Question) -> str | None:
  """Returns a note if launch.train would exceed the requested guarantee with this noise, else None.

  launch.train reserves a share of delta for batches above the capacity. A run that finds the noise
  itself (`--config.privacy.epsilon`) accounts for this share, and adds a little more noise.
  """
  if answer.attack is not None and answer.can_overflow:
    return _note_on_attack(answer, answer.attack)
  if answer.epsilon is None or not answer.can_overflow:
    return None
  cost = solve.epsilon_in_training(answer, answer.accountants[0])
  if cost <= answer.epsilon:
    return None
  return (
    f"note: launch.train costs {_up(cost)} with this noise, for it sets a share of delta aside "
    f"for batches above their capacity; --config.privacy.epsilon={answer.epsilon!r} finds the "
    "noise that keeps within it"
  )


def _note_on_attack(answer: Question, attack: AttackBound) -> str | None:
  epsilon = solve.epsilon_in_training(answer, answer.accountants[0])
  aside = overflow.OVERFLOW_SHARE * answer.delta
  profile = overflow.with_aborts(solve.profile_of(answer), aside=aside, epsilon=epsilon)
  if attack.cost(profile, answer.delta) <= attack.limit:
    return None
  return (
    "note: launch.train leaves an attacker a little more with this noise, for its batches may "
    "be above their capacity; --config.privacy.attacker finds the noise that keeps the guarantee"
  )


def attackers(
  answer: Question, fpr: float | None = None, prior: float | None = None
) -> str:
  """Returns one line about the most that any attack can achieve, by the first accountant's proof.

  Args:
    fpr: one more false positive rate to report; None for no other.
    prior: chance of membership that an attacker knows, to report the attacker's least chance of
      error; None to leave it out.
  """
  by = answer.accountants[0]
  profile = solve.profile_of(answer)
  asked: list[float] = sorted({*_RATES, _RATES[0] if fpr is None else fpr})
  rates = (
    f"{accounting.upper(accounting.true_positive_rate(profile, rate))} at false positive rate "
    f"{lower(rate)}"
    for rate in asked
  )
  mu = accounting.upper(accounting.pairs_of(profile, answer.delta).mu(answer.delta))
  delta = accounting.upper(answer.delta)
  advantage = accounting.upper(attack_bounds.advantage(profile))
  risk = ""
  if prior is not None:
    least = lower(attack_bounds.bayes_risk(profile, prior))
    risk = f"; anyone who knows the prior {prior!r} errs with probability {least} at least"
  return (
    f"noise_multiplier {lower(answer.noise_multiplier or 0.0, digits=6)}: true "
    f"positive rate of any attack at most {', '.join(rates)}, and nowhere more than {advantage} "
    f"above a guess{risk}; {mu}-Gaussian DP up to {delta} (by {by})"
  )


def headline(asked: Question) -> str:
  """Returns the line above the table: what is solved for, delta, sampler and relation."""
  if asked.attack is not None:
    return (
      f"noise_multiplier with which {asked.attack.words(asked.delta)}, by "
      f"{asked.accountants[0]}; epsilon at delta {accounting.upper(asked.delta)}; sampler "
      f"{asked.sampler}, {asked.neighboring_relation}"
    )
  unknown = next(name for name in UNKNOWNS if getattr(asked, name) is None)
  target = accounting.upper(asked.epsilon or 0.0)
  goal = f" for epsilon {target} by {asked.accountants[0]}" if asked.epsilon else ""
  return (
    f"{unknown}{goal} at delta {accounting.upper(asked.delta)}; sampler {asked.sampler}, "
    f"{asked.neighboring_relation}"
  )


def statement(answer: Question) -> str:
  """Returns the guarantee of the whole run in words, with its assumptions."""
  return accounting.privacy_statement(
    solve.run_event(answer),
    delta=answer.delta,
    neighboring_relation=answer.neighboring_relation,
    num_examples=answer.num_examples,
    accountants=answer.accountants,
  )


def bounded_runs(values: Any, levels: Sequence[float]) -> list[solve.Bounded]:
  """Returns the settings of a run for each noise multiplier, from flag values, of a sampler that
  bounds how often an example takes part.

  Raises UserError if a flag is missing, is out of range, or does not fit the sampler.
  """
  reason = f"does not go with sampler={values.sampler!r}"
  _refuse_beside(values, (*_BESIDE_BOUNDED, *_OF_BOUNDED), reason)
  if not levels:
    raise UserError(
      f"must be given for {values.sampler!r}", field="noise_multiplier", value=None
    )
  validate.integer_at_least(1, num_steps=values.num_steps)
  validate.integer_in(1, MOST_APART, steps_apart=values.steps_apart)
  validate.integer_in(1, values.steps_apart, bands=values.bands)
  bins = values.sampler == "balls_in_bins"
  prob = values.sampling_prob
  if bins and prob is not None:
    raise UserError("is 1 / steps_apart for sampler='balls_in_bins'", field="sampling_prob")
  prob = 1 / values.steps_apart if bins else prob or 0.0
  common = (values.num_steps, prob, values.steps_apart, values.delta, values.bands)
  questions = [
    solve.Bounded(values.sampler, level, *common, values.num_samples) for level in levels
  ]
  solve.check_bounded(questions[0])
  return questions


def bounded_table(asked: Iterable[solve.Bounded]) -> str:
  """Returns a text table with a row for each run and kind of epsilon."""
  lines: list[tuple[str, ...]] = [("noise_multiplier", "epsilon", "kind")]
  for run in asked:
    level = lower(run.noise_multiplier, digits=6)
    up = lambda value: accounting.upper(value, decimals=4)
    lines += [(level, up(value), kind) for kind, value in solve.bounded_rows(run)]
  return "\n".join(f"{level:>16}  {value:>10}  {kind}" for level, value, kind in lines)


def show_bounded(asked: Sequence[solve.Bounded]) -> None:
  """Prints the settings that all runs share, and the table."""
  first, rows = asked[0], bounded_table(asked)
  print(
    f"epsilon at delta {accounting.upper(first.delta)}; sampler {first.sampler}, steps_apart "
    f"{first.steps_apart}, sampling_prob {accounting.upper(first.sampling_prob, digits=6)}, "
    f"{first.num_steps} steps, noise of bands {first.bands}, add_or_remove_one"
  )
  print(rows)


def show_runs(values: Any) -> None:
  """Prints the cost of each finished run, of all together, and the joint guarantee in words."""
  reason = "does not go with --runs, whose folders say everything"
  _refuse_beside(values, ("runs", "delta", "statement"), reason)
  # Imported here, since few calls ask about finished runs.
  from dpjax.experiments.checks import several_runs
  from dpjax.experiments.sweeps import cost

  # --runs may be given several times, and may list folders between commas.
  runs = several_runs.read(",".join(values.runs).split(","))
  total = cost.together(runs, delta=values.delta if values["delta"].present else None)
  up = lambda value: accounting.upper(value, digits=4)
  rows = [(run.name, up(run.epsilon), up(run.delta)) for run in runs]
  rows += [("sum", up(total.sum_epsilon), up(total.sum_delta))]
  rows += [(f"together ({total.accountant or 'sum'})", up(total.epsilon), up(total.delta))]
  width = max(len(name) for name, _, _ in rows)
  print("\n".join(f"{name:<{width}}  {eps:>9}  {delta}" for name, eps, delta in rows))
  print(f"\n{cost.statement(runs, total)}")


def _check_companions(values: Any) -> None:
  """Raises UserError for a flag whose companion is missing, or a --curve that is no usable path."""
  present = [name for name in _OF_BOUNDED if values[name].present]
  if present and values.sampler not in solve.BOUNDED:
    samplers = " or ".join(solve.BOUNDED)
    raise UserError(
      f"goes with sampler={samplers} only", field=present[0], value=values[present[0]].value
    )
  if values.curve is not None:
    validate.folder(curve=values.curve)
    # A run's trade_off.csv says what that run guarantees, and its result has a digest of it.
    if (pathlib.Path(values.curve) / "result.json").exists():
      raise UserError(
        "holds a run, whose trade_off.csv would be lost; choose another folder",
        field="curve",
        value=values.curve,
      )


def _write_trade_offs(
  answers: Sequence[Question], folder: pathlib.Path
) -> list[pathlib.Path]:
  """Writes the trade-off curve of each answer, and its privacy loss if `write_losses` does so.

  With several answers, the name of a file begins with the noise multiplier. Returns the paths.
  """
  paths = []
  for answer in answers:
    level = lower(answer.noise_multiplier or 0.0, digits=6)
    names = {
      name: folder / (f"{level}_{name}" if len(answers) > 1 else name)
      for name in (trade_off_files.CURVE, trade_off_files.LOSSES)
    }
    pairs = accounting.pairs_of(solve.profile_of(answer), answer.delta)
    trade_off_files.write_curve(pairs, names[trade_off_files.CURVE])
    paths.append(names[trade_off_files.CURVE])
    has_losses = trade_off_files.write_losses(
      solve.run_event(answer),
      names[trade_off_files.LOSSES],
      neighboring_relation=answer.neighboring_relation,
      accountant=answer.accountants[0],
    )
    if has_losses:
      paths.append(names[trade_off_files.LOSSES])
  return paths


def main() -> None:
  """Prints what the flags ask for: the cost of finished runs, or answers."""
  values = flags.FLAGS
  if values.runs is not None:
    return show_runs(values)
  return answer_questions(values)


def answer_questions(values: Any) -> None:
  """Prints the answers about the runs that flags describe. Writes curves if --curve is set."""
  _check_companions(values)
  if values.sampler in solve.BOUNDED:
    _check_counts(values)
    levels = _noise_multipliers(values.noise_multiplier)
    return show_bounded(bounded_runs(values, levels))
  asked = questions(values)
  answers = [solve.solve(question) for question in asked]
  print(f"{headline(asked[0])}\n{table(answers, gdp=values.gdp, zcdp=values.zcdp)}")
  notes = filter(None, map(note_on_training, answers))
  sys.stderr.writelines(f"{note}\n" for note in notes)
  # Numbers about attackers are printed if a flag asks for them, or if the noise was solved for
  # them.
  asked_for = ("tradeoff", *_OF_ATTACKERS)
  for answer in answers if any(values[name].value for name in asked_for) else ():
    print(attackers(answer, values.fpr, values.prior))
  n = values.num_examples
  # The warning goes to stderr, so that a table in a pipe stays a table.
  warning = delta_warning(values.delta, n) if n else None
  if warning:
    print(f"warning: {warning}", file=sys.stderr)
  for answer in answers if values.statement else ():
    print(f"\n{statement(answer)}")
  if values.curve is not None:
    paths = solve.write_curve(solve.curve(answers), values.curve)
    for path in [*paths, *_write_trade_offs(answers, pathlib.Path(values.curve))]:
      print(f"wrote {path}")


if __name__ == "__main__":
  define_flags()
  app.run(main)
