"""Epsilon of a private run from its settings, or one setting that a given epsilon allows.

No data, model or `Plan` is needed.
"""

from __future__ import annotations

import csv
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpjax import accounting, sampling, validate
from dpjax.accounting import matrix
from dpjax.accounting.attack_bounds import AttackBound
from dpjax.accounting.epsilon import privacy_profile
from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.accounting.loss_grid import Profile
from dpjax.accounting.matrix import Strategy
from dpjax.accounting.monte_carlo import MOST_APART, min_sep_epsilon
from dpjax.accounting.overflow import without_share
from dpjax.accounting.proved import ACCOUNTANTS, RELATIONS
from dpjax.accounting.text import percent
from dpjax.sampling import registry
from dpjax.sampling.registry import Scheme, Sizing
from dpjax.validate import UserError

# Value of `sampler` for a run without sampling: every record is in every step.
EVERYBODY = "none"
SAMPLERS = (*registry.names_answered("exact"), EVERYBODY)
# Samplers that bound how often an example takes part, and whose epsilon `bounded_rows` simulates.
BOUNDED = registry.names_answered("simulated")
UNKNOWNS = ("epsilon", "noise_multiplier", "num_steps", "sampling_prob")
_CURVE_POINTS = 60


def proved_for(sampler: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns the relations, default first, and the accountants that are proved for one of SAMPLERS.

  >>> proved_for("truncated_poisson"), proved_for("fixed_size")[0]
  ((('replace_special',), ('pld',)), ('replace_one', 'add_or_remove_one'))
  """
  if sampler == EVERYBODY:
    return RELATIONS, ACCOUNTANTS
  kind = registry.SCHEMES[sampler].kind
  made: Any = kind(**kind.small[0])
  return kind.relations, made.accountants(made.proved_under[0])


class Question(NamedTuple):
  """Settings of a run. Without an `attack`, one of the first four fields is None: the unknown.

  With an `attack`, both epsilon and noise_multiplier are None: `solve` finds the noise, and
  `epsilon_of` the epsilon that it gives.
  """

  epsilon: float | None
  noise_multiplier: float | None
  num_steps: int | None
  # The probability must be possible with whole batches and passes. For "fixed_size" it is
  # b / num_examples, where b is the size of a batch.
  sampling_prob: float | None
  delta: float
  sampler: str  # one of SAMPLERS
  neighboring_relation: str
  accountants: tuple[str, ...]  # `solve` uses the first one
  num_examples: int | None = None  # for samplers that need it
  capacity: int | None = None  # for truncated_poisson
  # A bound on attackers in place of epsilon, to solve for the noise.
  attack: AttackBound | None = None
  num_selected: int | None = None  # of k_out_of_t

  @property
  def scheme(self) -> Scheme | None:
    """Returns the row of the sampler; None if every record is in every step."""
    return None if self.sampler == EVERYBODY else registry.SCHEMES[self.sampler]

  @property
  def can_overflow(self) -> bool:
    """Whether a draw can exceed the padded batch size. A share of delta is reserved for this."""
    return self.scheme is not None and self.scheme.kind.can_overflow

  @property
  def steps_per_pass(self) -> int:
    """Returns the number of steps that `event` covers: 1, or those of a pass that is accounted
    as a whole."""
    drawn = _sampler(self)
    return 1 if drawn is None else drawn.steps_per_event

  @property
  def size(self) -> Sizing:
    """Returns the numbers that fix the sampler's size; see `size_of`."""
    return size_of(self)


def size_of(numbers: Any) -> Sizing:
  """Returns the known numbers that fix a sampler's size.

  Args:
    numbers: a `Question`, or flags with the attributes `sampling_prob`, `num_examples`,
      `capacity` and `num_selected`, each None if it is not known.

  >>> asked = Question(2.0, None, 1, None, 1e-5, "none", "add_or_remove_one", ("pld",))
  >>> size_of(asked).sampling_prob, size_of(asked._replace(num_examples=9)).num_examples
  (0.0, 9)
  """
  return Sizing(
    sampling_prob=numbers.sampling_prob or 0.0,
    num_examples=numbers.num_examples or 0,
    capacity=numbers.capacity,
    num_selected=numbers.num_selected,
  )


def _sampler(question: Question) -> sampling.Sampler | None:
  scheme = question.scheme
  return None if scheme is None else scheme.kind.sized(question.size)


def event(question: Question) -> DpEvent:
  """Returns the event of one step, or of one pass if passes are accounted as a whole."""
  noise = accounting.gaussian_event(question.noise_multiplier or 0.0)
  drawn = _sampler(question)
  sampled = noise if drawn is None else drawn.event(noise)
  # `SAMPLERS` lists only samplers whose event an accountant knows.
  assert sampled is not None, question.sampler
  return sampled


def run_event(question: Question) -> DpEvent:
  """Returns the event of the whole run; an unfinished pass counts as a whole one."""
  num_steps = question.num_steps or 0
  # The two minus signs make the division round up, to whole passes.
  return accounting.compose(event(question), -(-num_steps // question.steps_per_pass))


def solve(question: Question) -> Question:
  """Returns the question with its unknown setting solved for, rounded so that the guarantee holds.

  Without an attack, a question with an unknown epsilon is returned unchanged; call `epsilon_of`.

  >>> asked = Question(2.0, None, 1, 1.0, 1e-5, "none", "add_or_remove_one", ("pld",))
  >>> round(solve(asked).noise_multiplier, 2)
  1.99
  """
  if question.attack is not None:
    noise_multiplier = accounting.calibrate_noise_to_attack(
      lambda z: run_event(question._replace(noise_multiplier=z)),
      question.attack,
      delta=question.delta,
      neighboring_relation=question.neighboring_relation,
      accountant=question.accountants[0],
    )
    answer = question._replace(noise_multiplier=_round(noise_multiplier, math.ceil))
    # The accountant may use a coarser grid of privacy losses for the rounded noise multiplier. Its
    # bound is then slightly looser, and more noise is needed.
    while question.attack.cost(profile_of(answer), question.delta) > question.attack.limit:
      more = (answer.noise_multiplier or 0.0) * (1 + 1e-5)
      answer = question._replace(noise_multiplier=_round(more, math.ceil))
    return answer
  if question.epsilon is None:
    return question
  target: Any = {
    "epsilon": question.epsilon,
    "delta": question.delta,
    "neighboring_relation": question.neighboring_relation,
    "accountant": question.accountants[0],
  }
  if question.noise_multiplier is None:
    noise_multiplier = accounting.calibrate_noise_multiplier(
      lambda z: run_event(question._replace(noise_multiplier=z)), **target
    )
    return question._replace(noise_multiplier=_round(noise_multiplier, math.ceil))
  if question.num_steps is None:
    times = accounting.calibrate_num_steps(event(question), **target)
    return question._replace(num_steps=times * question.steps_per_pass)
  scheme, size = question.scheme, question.size
  assert scheme is not None, "without a sampler the probability is known: 1"

  # The search tries any probability, but only some probabilities give whole batches or passes.
  def near(prob: float) -> float:
    return scheme.nearest_prob(size._replace(sampling_prob=prob))

  prob = near(
    accounting.calibrate_sampling_prob(
      lambda q: run_event(question._replace(sampling_prob=near(q))), **target
    )
  )
  rounded = _round(prob, math.floor)
  # The answer is rounded to six digits only if batches can have the rounded probability.
  return question._replace(sampling_prob=rounded if near(rounded) == rounded else prob)


def _round(value: float, to_integer: Callable[[float], int]) -> float:
  """Rounds `value` > 0 to six significant digits by `to_integer`, math.ceil or math.floor."""
  scale = 10.0 ** (5 - math.floor(math.log10(value)))
  return to_integer(value * scale) / scale


def epsilon_of(question: Question, accountant: str) -> float:
  """Returns the epsilon of the whole run by one accountant."""
  return accounting.epsilon(
    run_event(question),
    delta=question.delta,
    neighboring_relation=question.neighboring_relation,
    accountant=accountant,
  )


def profile_of(question: Question) -> Profile:
  """Returns the privacy profile epsilon -> delta of the whole run, by the first accountant."""
  return privacy_profile(
    run_event(question),
    neighboring_relation=question.neighboring_relation,
    accountant=question.accountants[0],
  )


def epsilon_in_training(question: Question, accountant: str) -> float:
  """Returns the epsilon that `launch.train` prints for this run.

  If a draw can exceed the padded batch size, a share of delta is reserved for this.
  """
  if question.can_overflow:
    question = question._replace(delta=without_share(question.delta))
  return epsilon_of(question, accountant)


class Bounded(NamedTuple):
  """Settings of a run with banded noise and a sampler that bounds an example's participation."""

  sampler: str  # one of BOUNDED
  noise_multiplier: float
  num_steps: int
  sampling_prob: float  # probability that one example is in a batch
  steps_apart: int  # for balls_in_bins, the number of bins
  delta: float
  bands: int = 1  # of the noise; 1: independent
  num_samples: int = 2_000_000

  @property
  def strategy(self) -> Strategy:
    """Returns the noise's correlation: the best coefficients for this number of steps and bands."""
    # Imported here, since it loads JAX, which nothing else in this file needs.
    from dpjax.noise import correlated

    if self.bands == 1:
      return correlated.Independent()
    return correlated.BandedToeplitz.optimized(num_steps=self.num_steps, bands=self.bands)


def check_bounded(run: Bounded) -> None:
  """Raises UserError for settings that `bounded_rows` refuses. It simulates nothing."""
  validate.one_of(BOUNDED, sampler=run.sampler)
  validate.integer_in(1, MOST_APART, steps_apart=run.steps_apart)
  validate.probability(sampling_prob=run.sampling_prob)
  bins = run.sampler == "balls_in_bins"
  turn = run.sampling_prob * run.steps_apart
  # With the sampler min_sep, an example may wait longer than steps_apart steps. With balls_in_bins,
  # it takes part exactly once in every steps_apart steps.
  if turn > 1 + 1e-9 or (bins and turn < 1 - 1e-9):
    raise UserError(
      f"must be {'' if bins else 'at most '}1 / steps_apart, {1 / run.steps_apart!r}, "
      f"for sampler={run.sampler!r}",
      field="sampling_prob",
      value=run.sampling_prob,
    )


def bounded_rows(run: Bounded) -> list[tuple[str, float]]:
  """Returns rows (kind of epsilon, epsilon) under add_or_remove_one.

  Rows named Monte Carlo are simulated, NOT proved. The others are proved, for the same run or for
  cyclic Poisson batches of the same expected size. Rows named "launch.train" keep a share of
  delta for batches above their capacity, as that program does.

  Raises:
    UserError: a sampler outside `BOUNDED`; a steps_apart out of its range; a sampling_prob that is
      above 1 / steps_apart, or, with the sampler balls_in_bins, below it.

  >>> rows = bounded_rows(Bounded("balls_in_bins", 1.0, 8, 0.25, 4, 1e-3, num_samples=10_000))
  >>> [name for name, _ in rows][:2]  # doctest: +SLOW
  ['Monte Carlo estimate, NOT a bound', 'Monte Carlo, 99 % confidence, NOT a proof']
  """
  check_bounded(run)
  strategy = run.strategy
  common: Any = {"noise_multiplier": run.noise_multiplier, "num_steps": run.num_steps}
  bins = run.sampler == "balls_in_bins"
  turn = run.sampling_prob * run.steps_apart
  simulated: Any = {**common, "delta": run.delta, "num_samples": run.num_samples}
  if bins:
    estimate = accounting.balls_in_bins_epsilon(
      strategy, num_bins=run.steps_apart, **simulated
    )
  else:
    size = Sizing(run.sampling_prob, 0, run.num_steps, steps_apart=run.steps_apart)
    drawn: Any = sampling.MinSepSampler.sized(size)
    estimate = min_sep_epsilon(
      strategy, turn_prob=drawn.turn_prob, steps_apart=run.steps_apart, **simulated
    )
  share = percent(estimate.confidence).replace("%", " %")
  rows = [
    ("Monte Carlo estimate, NOT a bound", estimate.estimate),
    (f"Monte Carlo, {share} confidence, NOT a proof", estimate.upper),
  ]
  for by in ACCOUNTANTS if bins else ():
    proved = accounting.balls_in_bins_proved(
      strategy, num_bins=run.steps_apart, delta=run.delta, accountant=by, **common
    )
    rows.append((f"proved, charged by no run ({by})", proved))
  schemes: dict[str, dict[str, Any]] = {"proved, unamplified": {"cyclic": bins}}
  # Amplification of cyclic Poisson batches is proved only for at most steps_apart bands.
  if not bins and run.bands <= run.steps_apart and turn < 1:
    schemes["cyclic poisson"] = {"cyclic": True, "turn_prob": turn}
  for scheme, more in schemes.items():
    event = matrix.join(
      matrix.correlated_events(strategy, steps_apart=run.steps_apart, **common, **more)
    )
    deltas = {"pld": run.delta, "launch.train, pld": without_share(run.delta)}
    rows += [
      (f"{scheme} ({by})", accounting.epsilon(event, delta=d)) for by, d in deltas.items()
    ]
  return rows


def curve(answers: Iterable[Question]) -> list[dict[str, Any]]:
  """Returns rows with epsilon after rising numbers of steps, for each answer and accountant."""
  rows = []
  for answer in answers:
    total = answer.num_steps or 0
    # Numbers of steps grow like squares, so that they are denser at the start, where the curve
    # bends.
    shares = np.linspace(0, 1, _CURVE_POINTS) ** 2
    steps = sorted({max(1, round(share * total)) for share in shares})
    names = ("noise_multiplier", "sampling_prob", "delta", "neighboring_relation")
    fixed = {name: getattr(answer, name) for name in names}
    for by in answer.accountants:
      cost = [epsilon_of(answer._replace(num_steps=n), by) for n in steps]
      points = zip(steps, cost)
      rows += [{"num_steps": n, "accountant": by, **fixed, "epsilon": e} for n, e in points]
  return rows


def write_curve(rows: Sequence[dict[str, Any]], directory: str) -> list[pathlib.Path]:
  """Writes the rows of `curve` as epsilon_curve.csv and .png; returns their paths."""
  folder = pathlib.Path(directory)
  folder.mkdir(parents=True, exist_ok=True)
  paths = [folder / "epsilon_curve.csv", folder / "epsilon_curve.png"]
  with paths[0].open("w", newline="") as file:
    writer = csv.DictWriter(file, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
  _plot(rows, paths[1])
  return paths


def _plot(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
  # Imported here, since only a picture needs it.
  from dpjax import pictures

  look = pictures.Look()
  figure = pictures.new_figure(look, height=3.6)
  axes = figure.subplots()
  lines: dict[tuple[str, float], list[tuple[int, float]]] = {}
  for row in rows:
    line = lines.setdefault((row["accountant"], row["noise_multiplier"]), [])
    line.append((row["num_steps"], row["epsilon"]))
  levels = list(dict.fromkeys(level for _, level in lines))
  for (by, level), points in lines.items():
    axes.plot(
      *zip(*points),
      "-" if by == "pld" else "--",
      color=look.color(levels.index(level)),
      linewidth=1.2,
      label=f"noise multiplier {level:.4g}, {by.upper()}",
    )
  first = rows[0]
  probs = sorted({f"{row['sampling_prob']:.4g}" for row in rows})
  ylabel = f"epsilon at delta = {accounting.upper(first['delta'])}"
  pictures.dress(axes, look, xlabel="steps", ylabel=ylabel)
  relation = pictures.relation_in_words(first["neighboring_relation"])
  title = f"Privacy cost, sampling probability {', '.join(probs)}, {relation}"
  pictures.headline(figure, look, title)
  axes.set_xlim(left=0)
  axes.set_ylim(bottom=0)
  pictures.key(figure, look, axes.lines)
  pictures.save(figure, path)
