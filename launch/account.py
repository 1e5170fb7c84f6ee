"""What a private run costs, or what it may do: gives the one number that you leave out.

Leave out exactly one of --epsilon, --noise_multiplier, --num_steps and --sampling_prob:

  # epsilon of a run: 4000 steps, each on a Poisson sample of 1 % of the data
  python -m launch.account --noise_multiplier=1.1 --sampling_prob=0.01 --num_steps=4000

  # the same from data size, expected batch and epochs; four noise levels, with a curve
  python -m launch.account --noise_multiplier=0.8,1,1.5,2 --num_examples=60000 \\
    --batch_size=600 --epochs=40 --curve=/tmp/curve

  # how much noise keeps 40 epochs within epsilon 3; with the guarantee in words
  python -m launch.account --epsilon=3 --num_examples=60000 --batch_size=600 --epochs=40 \\
    --statement

  # how many steps are allowed; how large a sample
  python -m launch.account --epsilon=2 --noise_multiplier=1.1 --sampling_prob=0.01
  python -m launch.account --epsilon=2 --noise_multiplier=1.1 --num_steps=4000

  # fixed-size batches without replacement: replace_one, proved by RDP only
  python -m launch.account --sampler=fixed_size --noise_multiplier=4 --num_examples=60000 \\
    --batch_size=600 --num_steps=4000

  # Poisson samples cut to 700 at random: replace_special, proved by PLD only
  python -m launch.account --sampler=truncated_poisson --capacity=700 --noise_multiplier=1 \\
    --num_examples=60000 --batch_size=600 --num_steps=4000

  # shuffled batches: an epoch costs no more than one step on all data; here 40 epochs
  python -m launch.account --sampler=none --noise_multiplier=20 --num_steps=40 \\
    --neighboring_relation=replace_special

  # beside the proofs an approximation by the central limit, which may be too small
  python -m launch.account --gdp --noise_multiplier=1 --sampling_prob=0.01 --num_steps=100

  # published formulas beside the truth: where they promise too much, where too little
  python -m launch.account --compare_documents --out=/tmp/documents

noise_multiplier is std / l2_clip_norm under every neighbouring relation. What is solved for
is rounded to the private side, and each epsilon is rounded up.
"""

from __future__ import annotations

import csv
import math
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from dpjax import accounting, sampling, validate
from dpjax.accounting import documents
from dpjax.plan import OVERFLOW_SHARE
from dpjax.validate import UserError
from launch import app

SAMPLERS = ("poisson", "truncated_poisson", "fixed_size", "none")
_OF_SIZE = ("fixed_size", "truncated_poisson")  # samplers for a known number of examples
_UNKNOWNS = ("epsilon", "noise_multiplier", "num_steps", "sampling_prob")
_CURVE_POINTS = 60
_MOST = 2**53
_QUESTION_FLAGS = (
  *_UNKNOWNS,
  "epochs",
  "num_examples",
  "batch_size",
  "sampler",
  "neighboring_relation",
  "accountant",
  "curve",
  "statement",
  "capacity",
  "gdp",
)


class Question(NamedTuple):
  """What was asked; exactly one of the first four is None, the one to solve for."""

  epsilon: float | None
  noise_multiplier: float | None
  num_steps: int | None
  sampling_prob: float | None
  delta: float
  sampler: str
  num_examples: Any  # int, or None where no sampler needs it
  options: dict[str, str]  # neighboring_relation
  accountants: tuple[str, ...]  # the first one solves
  capacity: int | None = None  # of truncated_poisson
  gdp: bool = False  # whether the approximation is shown, too


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
  """Defines this launcher's flags; not at import, so that launchers do not clash."""
  number = lambda name, text: flags.DEFINE_float(name, None, text, flag_values=values)
  whole = lambda name, text: flags.DEFINE_integer(name, None, text, flag_values=values)
  number("epsilon", "target epsilon of the whole run")
  flags.DEFINE_float("delta", 1e-5, "delta; keep it well below 1/n", flag_values=values)
  flags.DEFINE_list(
    "noise_multiplier",
    None,
    "std of the noise on the sum / l2_clip_norm; several values: comma list",
    flag_values=values,
  )
  whole("num_steps", "number of noisy steps")
  number("epochs", "instead of --num_steps: passes over the data, rounded up to steps")
  number("sampling_prob", "chance of each example to be in a batch; for fixed_size b/n")
  whole("num_examples", "n, the size of the data set; treated as public")
  whole("batch_size", "b, the (expected) batch; with --num_examples for --sampling_prob")
  whole("capacity", "the most examples of a batch, for --sampler=truncated_poisson")
  flags.DEFINE_enum(
    "sampler", "poisson", SAMPLERS, "who is in a batch; none: all data", flag_values=values
  )
  flags.DEFINE_enum(
    "neighboring_relation",
    None,
    accounting.RELATIONS,
    "default: add_or_remove_one; fixed_size: replace_one; truncated: replace_special",
    flag_values=values,
  )
  flags.DEFINE_enum(
    "accountant", "both", ("pld", "rdp", "both"), "pld solves for both", flag_values=values
  )
  flags.DEFINE_string(
    "curve",
    None,
    "directory for epsilon_curve.csv and .png: epsilon over the steps",
    flag_values=values,
  )
  flags.DEFINE_bool(
    "gdp", False, "add the central limit's approximation, NOT a bound", flag_values=values
  )
  flags.DEFINE_bool("statement", False, "print the guarantee in words", flag_values=values)
  flags.DEFINE_bool(
    "compare_documents",
    False,
    "instead: formulas that tutorials print, beside PLD and RDP at --delta",
    flag_values=values,
  )
  flags.DEFINE_string(
    "out",
    None,
    "with --compare_documents: directory for documents.csv and .png",
    flag_values=values,
  )


def questions(values: Any) -> list[Question]:
  """One question for each noise multiplier, from flag values; UserError when unclear."""
  _check_counts(values)
  prob = _sampling_prob(values)
  found = Question(
    epsilon=values.epsilon,
    noise_multiplier=None,
    num_steps=_num_steps(values, prob),
    sampling_prob=prob,
    delta=values.delta,
    sampler=values.sampler,
    num_examples=values.num_examples,
    options={"neighboring_relation": _relation(values)},
    accountants=_accountants(values),
    capacity=_capacity(values),
    gdp=values.gdp,
  )
  levels = _noise_multipliers(values.noise_multiplier)
  asked = [found._replace(noise_multiplier=level) for level in levels or [None]]
  _check_one_missing(asked[0])
  return asked


def _check_counts(values: Any) -> None:
  """UserError for a count beyond what a float tells from the next: ratios are taken."""
  for name in ("num_steps", "batch_size", "num_examples", "capacity"):
    value = getattr(values, name)
    if value is not None and abs(value) >= _MOST:
      raise UserError(f"{name}={hex(value)[:20]}: must be below 2**53 in size")


def _relation(values: Any) -> str:
  return values.neighboring_relation or accounting.proved_for(values.sampler).relations[0]


def _capacity(values: Any) -> int | None:
  if values.sampler != "truncated_poisson":
    if values.capacity is not None:
      raise UserError(f"capacity={values.capacity}: goes with sampler='truncated_poisson'")
    return None
  validate.integer_at_least(1, capacity=values.capacity)
  return values.capacity


def _accountants(values: Any) -> tuple[str, ...]:
  if values.accountant != "both":
    return (values.accountant,)
  return accounting.proved_for(values.sampler).accountants


def _noise_multipliers(texts: Sequence[str] | None) -> list[float]:
  try:
    levels = [float(text) for text in texts or ()]
  except ValueError:
    raise UserError(
      f"noise_multiplier={','.join(texts or ())!r}: must be numbers"
    ) from None
  for level in levels:
    validate.non_negative(noise_multiplier=level)
  return levels


def _sampling_prob(values: Any) -> float | None:
  n, batch, prob = values.num_examples, values.batch_size, values.sampling_prob
  if values.sampler == "none":
    if (batch, prob) != (None, None):
      raise UserError("sampler='none': takes no sampling_prob and no batch_size")
    return 1.0
  if n is None and (batch is not None or values.sampler in _OF_SIZE):
    raise UserError(
      "num_examples=None: must be given with batch_size, fixed_size or truncated_poisson"
    )
  if batch is not None and prob is not None:
    raise UserError("batch_size, sampling_prob: give only one of the two")
  if n is not None:
    validate.integer_at_least(1, num_examples=n)
  if batch is None:
    return None if prob is None else _given_prob(values.sampler, prob, n)
  validate.integer_at_least(1, batch_size=batch)
  validate.probability(**{"batch_size / num_examples": batch / n})
  return batch / n


def _given_prob(sampler: str, prob: float, num_examples: Any) -> float:
  """As it is; for fixed-size batches that of the whole batch which training would draw."""
  validate.probability(sampling_prob=prob)
  if sampler != "fixed_size":
    return prob
  return sampling.whole_batch_size(prob, num_examples) / num_examples


def _num_steps(values: Any, prob: float | None) -> int | None:
  if values.epochs is None:
    if values.num_steps is not None:
      validate.integer_at_least(1, num_steps=values.num_steps)
    return values.num_steps
  if values.num_steps is not None:
    raise UserError("epochs, num_steps: give only one of the two")
  if prob is None:
    raise UserError("epochs: needs --sampling_prob or --batch_size; else give --num_steps")
  validate.positive(epochs=values.epochs)
  validate.positive(**{"epochs / sampling_prob": values.epochs / prob})
  return math.ceil(values.epochs / prob * (1 - 1e-12))  # 40 / 0.01 is 4000, not 4001


def _check_one_missing(question: Question) -> None:
  missing = [name for name in _UNKNOWNS if getattr(question, name) is None]
  if not missing:
    raise UserError(f"{', '.join(_UNKNOWNS)}: leave out one, the one to solve for")
  if len(missing) > 1:
    raise UserError(f"{', '.join(missing)}: give all but one of these")


def step_event(question: Question) -> accounting.DpEvent:
  """The event of one step."""
  noise = accounting.gaussian_event(question.noise_multiplier or 0.0)
  prob = question.sampling_prob or 0.0
  if question.sampler == "none":
    return noise
  if question.sampler == "poisson":
    return accounting.poisson_sampled_event(noise, sampling_prob=prob)
  if question.sampler == "truncated_poisson":
    return accounting.truncated_poisson_event(
      noise,
      sampling_prob=prob,
      num_examples=question.num_examples,
      capacity=question.capacity or 0,
    )
  size = _batch_size(question, prob)
  return accounting.fixed_size_event(
    noise, num_examples=question.num_examples, batch_size=size
  )


def run_event(question: Question) -> accounting.DpEvent:
  """The event of the whole run."""
  return accounting.composed(step_event(question), question.num_steps or 0)


def solve(question: Question) -> Question:
  """The question with its unknown filled in, but for epsilon, which the table shows."""
  if question.epsilon is None:
    return question
  with_value = lambda **value: run_event(question._replace(**value))
  target: Any = {
    "epsilon": question.epsilon,
    "delta": question.delta,
    "accountant": question.accountants[0],
    **question.options,
  }
  if question.noise_multiplier is None:
    make = lambda z: with_value(noise_multiplier=z)
    level = accounting.calibrate_noise_multiplier(make, **target)
    return question._replace(noise_multiplier=_rounded(level, math.ceil))
  if question.num_steps is None:
    num_steps = accounting.calibrate_num_steps(step_event(question), **target)
    return question._replace(num_steps=num_steps)
  make = lambda q: with_value(sampling_prob=q)
  prob = accounting.calibrate_sampling_prob(make, **target)
  if question.sampler == "fixed_size":
    return question._replace(
      sampling_prob=_batch_size(question, prob) / question.num_examples
    )
  return question._replace(sampling_prob=_rounded(prob, math.floor))


def _batch_size(question: Question, prob: float) -> int:
  return sampling.whole_batch_size(prob, question.num_examples)


def _rounded(value: float, to_integer: Any) -> float:
  """`value` with six significant digits, rounded to the private side."""
  scale = 10.0 ** (5 - math.floor(math.log10(value)))
  return to_integer(value * scale) / scale


def epsilon_of(question: Question, accountant: str) -> float:
  """Epsilon of the whole run, with the sampler as its law says."""
  return accounting.epsilon(
    run_event(question), delta=question.delta, accountant=accountant, **question.options
  )


def epsilon_in_training(question: Question, accountant: str) -> float:
  """What `launch.train` prints for this run: its Poisson batches have a capacity, and a
  share of delta pays for a draw above it."""
  share = OVERFLOW_SHARE if question.sampler == "poisson" else 0.0
  smaller = question._replace(delta=question.delta - share * question.delta)
  return epsilon_of(smaller, accountant)


def table(answers: Iterable[Question]) -> str:
  """Each answer by each accountant, in columns."""
  header = ("accountant", "noise_multiplier", "sampling_prob", "num_steps", "epsilon")
  lines = [header, *(row for answer in answers for row in _rows(answer))]
  widths = [max(map(len, column)) for column in zip(*lines)]
  return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def _rows(answer: Question) -> list[tuple[str, ...]]:
  known = (
    accounting.lower(answer.noise_multiplier or 0.0, digits=6),
    accounting.upper(answer.sampling_prob or 0.0, digits=6),
    f"{answer.num_steps}",
  )
  rows = [(by, *known, _up(epsilon_of(answer, by))) for by in answer.accountants]
  if answer.sampler == "poisson":
    by = answer.accountants[0]
    rows.append((f"launch.train ({by})", *known, _up(epsilon_in_training(answer, by))))
  return rows + ([_approximated(answer, known)] if answer.gdp else [])


def _up(epsilon: float) -> str:
  return accounting.upper(epsilon, decimals=4)


def _approximated(answer: Question, known: tuple[str, ...]) -> tuple[str, ...]:
  """The row of --gdp, labelled with what it is worth."""
  found = accounting.gdp.approximate(
    run_event(answer), delta=answer.delta, **answer.options
  )
  kind = "exact" if found.epsilon_kind == "proved" else "APPROXIMATION, not a bound"
  return (f"gdp ({kind})", *known, _up(found.epsilon))


def curve_rows(answers: Iterable[Question]) -> list[dict[str, Any]]:
  """Epsilon after a growing number of steps, for each answer and accountant."""
  rows = []
  for answer in answers:
    total = answer.num_steps or 0
    shares = np.linspace(0, 1, _CURVE_POINTS) ** 2  # closer where the curve bends
    steps = sorted({max(1, round(share * total)) for share in shares})
    fixed = {
      "noise_multiplier": answer.noise_multiplier,
      "sampling_prob": answer.sampling_prob,
      "delta": answer.delta,
      **answer.options,
    }
    for by in answer.accountants:
      values = accounting.epsilon_curve(
        step_event(answer), steps, delta=answer.delta, accountant=by, **answer.options
      )
      points = zip(steps, map(float, values))
      rows += [{"num_steps": n, "accountant": by, **fixed, "epsilon": e} for n, e in points]
  return rows


def write_curve(rows: list[dict[str, Any]], directory: str) -> list[pathlib.Path]:
  """Writes epsilon_curve.csv and epsilon_curve.png; returns their paths."""
  folder = pathlib.Path(directory)
  folder.mkdir(parents=True, exist_ok=True)
  paths = [folder / "epsilon_curve.csv", folder / "epsilon_curve.png"]
  with paths[0].open("w", newline="") as file:
    writer = csv.DictWriter(file, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
  _plot(rows, paths[1])
  return paths


def _plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
  from matplotlib.figure import Figure  # slow to import; draws by Agg, needs no display

  figure = Figure(figsize=(9, 4.5), layout="constrained")
  axes = figure.subplots()
  levels = list(dict.fromkeys(row["noise_multiplier"] for row in rows))
  for by, style in (("pld", "-"), ("rdp", "--")):
    for index, level in enumerate(levels):
      mine = [r for r in rows if (r["accountant"], r["noise_multiplier"]) == (by, level)]
      if mine:
        axes.plot(
          [row["num_steps"] for row in mine],
          [row["epsilon"] for row in mine],
          style,
          color=f"C{index % 10}",
          label=f"noise multiplier {level:.4g}, {by.upper()}",
        )
  first = rows[0]
  probs = sorted({f"{row['sampling_prob']:.4g}" for row in rows})
  axes.set_xlabel("steps")
  axes.set_ylabel(f"epsilon at delta = {accounting.upper(first['delta'])}")
  axes.set_title(
    f"Privacy cost, sampling probability {', '.join(probs)}, "
    f"{first['neighboring_relation'].replace('_', ' ')}"
  )
  axes.set_xlim(left=0)
  axes.set_ylim(bottom=0)
  axes.grid(alpha=0.3)
  figure.legend(loc="outside right upper", frameon=False)
  figure.savefig(path, dpi=150)


def headline(asked: Question) -> str:
  """One line above the table: what was solved for, and under which assumptions."""
  unknown = next(name for name in _UNKNOWNS if getattr(asked, name) is None)
  target = accounting.upper(asked.epsilon or 0.0)
  goal = f" for epsilon {target} by {asked.accountants[0]}" if asked.epsilon else ""
  return (
    f"{unknown}{goal} at delta {accounting.upper(asked.delta)}; sampler {asked.sampler}, "
    f"{asked.options['neighboring_relation']}"
  )


def compare_documents(values: Any) -> None:
  """Prints every published formula beside the truth, and draws it where `out` says."""
  others = [name for name in _QUESTION_FLAGS if values[name].present]
  if others:
    raise UserError(f"{others[0]}: --compare_documents takes only --delta and --out")
  rows = documents.compare(values.delta)
  print(documents_table(rows))
  counts = {name: sum(row.verdict == name for row in rows) for name in documents.VERDICTS}
  print(
    f"delta {accounting.upper(values.delta)}; "
    + ", ".join(f"{count} {name}" for name, count in counts.items())
    + "; unsound: the truth is worse than promised"
  )
  if values.out is not None:
    for path in write_documents(rows, values.out, values.delta):
      print(f"wrote {path}")


def documents_table(rows: Sequence[documents.Comparison]) -> str:
  """One line for each formula and setting, in columns."""
  number = lambda value: "-" if value is None else accounting.upper(value)
  lines = [("document", "formula", "setting", "claimed", "pld", "rdp", "verdict")]
  for row in rows:
    claimed, pld, rdp = map(number, (row.claimed, row.pld, row.rdp))
    place = f"{row.document} {row.section}"
    lines.append((place, row.formula, row.setting, claimed, pld, rdp, row.verdict))
  widths = [max(map(len, column)) for column in zip(*lines)]
  return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def write_documents(
  rows: Sequence[documents.Comparison], directory: str, delta: float
) -> list[pathlib.Path]:
  """Writes documents.csv and documents.png; returns their paths."""
  folder = pathlib.Path(directory)
  folder.mkdir(parents=True, exist_ok=True)
  paths = [folder / "documents.csv", folder / "documents.png"]
  with paths[0].open("w", newline="") as file:
    writer = csv.DictWriter(file, fieldnames=["delta", *rows[0]._fields])
    writer.writeheader()
    writer.writerows({"delta": delta, **row._asdict()} for row in rows)
  _plot_documents(rows, paths[1], delta)
  return paths


def _plot_documents(
  rows: Sequence[documents.Comparison], path: pathlib.Path, delta: float
) -> None:
  from matplotlib.figure import Figure  # slow to import; draws by Agg, needs no display

  figure = Figure(figsize=(11, 4.8), layout="constrained")
  left, right = figure.subplots(1, 2)
  _plot_claims(left, rows)
  _plot_closed_form(right, delta)
  figure.suptitle(f"Published formulas and the truth, delta = {accounting.upper(delta)}")
  figure.savefig(path, dpi=150)


def _plot_claims(axes: Any, rows: Sequence[documents.Comparison]) -> None:
  colors = dict(zip(documents.VERDICTS, ("C3", "C1", "C0", "C2")))
  for name, color in colors.items():
    mine = [row for row in rows if row.verdict == name]
    truth = [row.rdp if row.pld is None else row.pld for row in mine]
    shown = [(t, row.claimed) for t, row in zip(truth, mine) if t and math.isfinite(t)]
    points = np.array(shown).reshape(-1, 2)
    axes.scatter(*points.T, color=color, label=f"{name} ({len(mine)})", s=28)
  axes.axline((1, 1), slope=1, color="0.5", linewidth=1)
  axes.set_xscale("log")
  axes.set_yscale("log")
  axes.set_xlabel("true epsilon (PLD; RDP where there is no PLD)")
  axes.set_ylabel("claimed epsilon")
  axes.set_title("below the line the claim is too small")
  axes.legend(frameon=False)


def _plot_closed_form(axes: Any, delta: float) -> None:
  steps = [1, 3, 10, 30, 100, 300, 1000]
  for index, (sigma, prob) in enumerate(((10.0, 1.0), (1.0, 0.01))):
    noise = accounting.gaussian_event(sigma)
    step = accounting.poisson_sampled_event(noise, sampling_prob=prob)
    truth = accounting.epsilon_curve(step, steps, delta=delta)
    claimed = [documents.dp_sgd_closed_form(sigma, n, delta) for n in steps]
    text = f"q {prob:g}, sigma {sigma:g}"
    axes.loglog(steps, truth, "-", color=f"C{index}", label=f"{text}: PLD")
    axes.loglog(steps, claimed, "--", color=f"C{index}", label=f"{text}: document 000")
  axes.set_xlabel("steps")
  axes.set_ylabel("epsilon")
  axes.set_title("DP-SGD by min(sqrt(2T ln(1/d))/sigma, T/sigma^2)")
  axes.legend(frameon=False)


def main() -> None:
  """Answers the command line."""
  values = flags.FLAGS
  if values.compare_documents:
    return compare_documents(values)
  if values.out is not None:
    raise UserError("out: goes with --compare_documents only")
  asked = questions(values)
  answers = [solve(question) for question in asked]
  print(f"{headline(asked[0])}\n{table(answers)}")
  n = values.num_examples
  warning = accounting.delta_warning(values.delta, n) if n else None
  if warning:
    print(f"warning: {warning}", file=sys.stderr)
  if values.statement:
    for answer in answers:
      text = accounting.privacy_statement(
        run_event(answer),
        delta=answer.delta,
        num_examples=n,
        accountants=answer.accountants,
        **answer.options,  # type: ignore[arg-type]
      )
      print(f"\n{text}")
  if values.curve is not None:
    for path in write_curve(curve_rows(answers), values.curve):
      print(f"wrote {path}")


if __name__ == "__main__":
  define_flags()
  app.run(main)
