"""COUNTER-EXAMPLES: privacy formulas as some popular tutorials print them, beside the truth.

Nothing in dpjax computes an epsilon from a formula of this file. Each is kept as it was
published so that `compare` can say where it is

  unsound   the epsilon claimed is smaller than the true one: a false guarantee
  unproved  it is smaller than the best bound known here, which may not be exact
  loose     it is more than a tenth above: true, but noise was wasted
  right     neither

The truth is PLD. It is within one percent of exact for these mechanisms (a test bounds it from
below). Where PLD has no analysis, RDP stands for it. Documents, by their numbers in this project:

  000  "Privacy of convolutional networks' data": DP-SGD, Gaussian mechanism
  002  "Federated learning meets differential privacy": noise, sampling, code
  003  "Privacy-preserving machine learning, principles and code": the mean age
"""

from __future__ import annotations

import csv
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import dp_accounting as dpa
import numpy as np

from dpjax import validate
from dpjax.accounting.epsilon import epsilon as epsilon_of
from dpjax.accounting.epsilon import epsilon_curve
from dpjax.accounting.event_kinds.composition import composed
from dpjax.accounting.event_kinds.fixed_size import fixed_size_event
from dpjax.accounting.event_kinds.gaussian import gaussian_event
from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.accounting.event_kinds.poisson import poisson_sampled_event
from dpjax.accounting.text import upper

VERDICTS = ("unsound", "unproved", "loose", "right")
# PLD is within one percent of exact here, so a claim this close is not called unsound.
_EXACT_WITHIN = 0.99
_LOOSE_FROM = 1.1

# Settings of DP-SGD: (sampling probability, noise multiplier, number of steps).
_DP_SGD = (
  (1.0, 10.0, 100),
  (1.0, 20.0, 100),
  (1.0, 1.0, 1000),
  (0.5, 10.0, 100),
  (0.1, 10.0, 100),
  (0.01, 1.0, 1000),
  (0.01, 1.1, 6000),
  (0.004, 1.1, 15000),
)
_ONE_STEP = (0.5, 1.0, 2.0, 5.0, 20.0)  # noise multipliers
_TARGETS = (0.1, 0.5, 1.0, 5.0, 8.0, 10.0, 20.0)  # epsilons
_CLIENTS = 1000
_COHORT = 50
_ROUNDS = 100
_CLIENT_NOISE = 1.0
_AGE_RANGE = 100


class Comparison(NamedTuple):
  """A formula in one setting; epsilons at the same delta, None where not available."""

  document: str
  section: str
  formula: str
  setting: str
  neighboring_relation: str
  claimed: float
  pld: float | None
  rdp: float | None
  verdict: str  # one of VERDICTS


def dp_sgd_closed_form(noise_multiplier: float, num_steps: int, delta: float) -> float:
  """WRONG. Document 000, sections 3.2 and 4.3: min(sqrt(2 T ln(1/d)) / sigma, T / sigma^2).

  T is num_steps, sigma the noise multiplier and d delta. The formula leaves the sampling
  probability out. It takes the smaller of two terms, but a divergence T / (2 sigma^2) and a tail
  sqrt(2 T ln(1/d)) / sigma ADD up to epsilon. With num_steps 1 it is the document's epsilon of a
  single step.

  >>> round(dp_sgd_closed_form(10.0, 100, 1e-5), 2)  # in truth 4.38 without sampling
  1.0
  """
  tail = math.sqrt(2 * num_steps * math.log(1 / delta)) / noise_multiplier
  return min(tail, num_steps / noise_multiplier**2)


def gaussian_formula(epsilon: float, delta: float, *, constant: float = 1.25) -> float:
  """UNGUARDED. Returns sigma / sensitivity = sqrt(2 ln(constant / delta)) / epsilon.

  Args:
    constant: number in the logarithm. Document 000, section 4.2, takes 1.25 for epsilon < 1, as
      proved. Document 002 takes 1.25 without that condition in section 2.2, and 1.7 in section 2.5,
      in code that does not run: torch.log of a float, and an undefined delta.

  >>> round(gaussian_formula(1.0, 1e-5), 3), round(gaussian_formula(1.0, 1e-5, constant=1.7), 3)
  (4.845, 4.908)
  """
  return math.sqrt(2 * math.log(constant / delta)) / epsilon


def proportional_amplification(unsampled_epsilon: float, sampling_prob: float) -> float:
  """WRONG. Document 002, section 4.3: sampling m of n shrinks epsilon "in proportion", by q.

  The true epsilon is ln(1 + q (e^eps - 1)), at a delta multiplied by q. It is close to q eps only
  for small eps.

  >>> proportional_amplification(4.0, 0.05)
  0.2
  """
  return sampling_prob * unsampled_epsilon


def mean_age_epsilon(laplace_scale: float, num_records: int) -> float:
  """WRONG. Document 003, section 4.1: "one record changes the mean age by at most 1 / n".

  One record changes the mean by up to (upper - lower) / n, so ages in [0, 100] cost 100 times this.

  >>> mean_age_epsilon(laplace_scale=1 / 500, num_records=500)
  1.0
  """
  return 1 / (num_records * laplace_scale)


def feature_saliency(
  predict: Callable[[np.ndarray], np.ndarray],
  features: np.ndarray,
  index: int,
  *,
  factor: float = 1.05,
) -> float:
  """NOT A SENSITIVITY of differential privacy. Document 002, section 2.4: how much the
  predictions move on average when one feature is multiplied by `factor`.

  Args:
    predict: [n, d] -> [n, ...].
    features: [n, d].

  It is a saliency of a given model on given records. It does not bound the effect of exchanging one
  record, and is 0 for a feature that is 0. It is computed from the records, so noise levels chosen
  by it leak information. Scores from public data are harmless.

  >>> feature_saliency(lambda x: 3 * x[:, 0], np.ones((4, 2)), 0, factor=2)
  3.0
  """
  moved = np.array(features, float)
  moved[:, index] *= factor
  return float(np.mean(np.abs(predict(moved) - predict(features))))


def compare(delta: float = 1e-5) -> list[Comparison]:
  """Returns every formula beside PLD and RDP over a grid, in the order of the documents.

  >>> row = compare(1e-5)[0]
  >>> row.setting, round(row.claimed, 2), round(row.pld, 2), row.verdict
  ('q=1, sigma=10, T=100', 1.0, 4.38, 'unsound')
  """
  validate.open_unit(delta=delta)
  return [
    *(_dp_sgd(*setting, delta) for setting in _DP_SGD),
    *(_one_step(noise_multiplier, delta) for noise_multiplier in _ONE_STEP),
    *(_gaussian(target, delta, 1.25) for target in _TARGETS),
    *(_gaussian(target, delta, 1.7) for target in _TARGETS),
    *_unclipped(delta),
    *_subsampling(delta),
    _mean_age(),
  ]


def verdict(claimed: float, pld: float | None, rdp: float | None) -> str:
  """Returns the verdict on the formula, one of VERDICTS.

  >>> verdict(1.0, 4.4, 5.0), verdict(1.0, None, 5.0), verdict(9.0, 4.4, 5.0)
  ('unsound', 'unproved', 'loose')
  """
  truth = pld if pld is not None else rdp
  if truth is None:
    raise ValueError("nothing to compare with")
  if claimed > _LOOSE_FROM * truth:
    return "loose"
  if claimed >= _EXACT_WITHIN * truth:
    return "right"
  return "unproved" if pld is None else "unsound"


def _row(
  where: tuple[str, str, str],
  setting: str,
  claimed: float,
  event: DpEvent,
  delta: float,
  relation: str = "add_or_remove_one",
) -> Comparison:
  options: Any = {"delta": delta, "neighboring_relation": relation}
  pld = epsilon_of(event, accountant="pld", **options)
  rdp = epsilon_of(event, accountant="rdp", **options)
  return Comparison(
    *where, setting, relation, claimed, pld, rdp, verdict(claimed, pld, rdp)
  )


def _dp_sgd(q: float, sigma: float, num_steps: int, delta: float) -> Comparison:
  claimed = dp_sgd_closed_form(sigma, num_steps, delta)
  noise = gaussian_event(sigma)
  step = noise if q == 1 else poisson_sampled_event(noise, sampling_prob=q)
  where = ("000", "3.2", "min(sqrt(2T ln(1/d))/sigma, T/sigma^2)")
  setting = f"q={q:g}, sigma={sigma:g}, T={num_steps}"
  return _row(where, setting, claimed, composed(step, num_steps), delta)


def _one_step(sigma: float, delta: float) -> Comparison:
  where = ("000", "4.3", "min(sqrt(2 ln(1/d))/sigma, 1/sigma^2)")
  claimed = dp_sgd_closed_form(sigma, 1, delta)
  return _row(where, f"sigma={sigma:g}, one step", claimed, gaussian_event(sigma), delta)


def _gaussian(target: float, delta: float, constant: float) -> Comparison:
  section = "2.2" if constant == 1.25 else "2.5"
  where = ("002", section, f"sigma = sqrt(2 ln({constant:g}/d))/eps")
  sigma = gaussian_formula(target, delta, constant=constant)
  return _row(
    where, f"eps={target:g}, sigma={sigma:.4g}", target, gaussian_event(sigma), delta
  )


def _unclipped(delta: float) -> list[Comparison]:
  """Compares the claim of code that adds noise for a clip norm, but never clips, with the truth.
  Its sensitivity has no bound, so epsilon is infinite."""
  noise = gaussian_event(1.2)
  claimed = epsilon_of(noise, delta=delta)
  where = ("002", "4.1", "grad + randn * 1.2 * max_norm, not clipped")
  return [_row(where, "one round", claimed, dpa.NonPrivateDpEvent(), delta)]


def _subsampling(delta: float) -> list[Comparison]:
  where = ("002", "4.3", "sampling shrinks eps by q = m/n")
  q = _COHORT / _CLIENTS
  rows = []
  for rounds in (1, _ROUNDS):
    each = gaussian_event(_CLIENT_NOISE)
    claimed = proportional_amplification(epsilon_of(composed(each, rounds), delta=delta), q)
    text = f"{_COHORT} of {_CLIENTS}, sigma={_CLIENT_NOISE:g}, T={rounds}"
    poisson = composed(poisson_sampled_event(each, sampling_prob=q), rounds)
    rows.append(_row(where, f"{text}, Poisson", claimed, poisson, delta))
    # Sigma is relative to the sensitivity, so without sampling both relations cost the same. The
    # event's multiplier is relative to the clip norm; under replace_one the sensitivity is twice
    # that norm.
    fixed = fixed_size_event(
      gaussian_event(2 * _CLIENT_NOISE), num_examples=_CLIENTS, batch_size=_COHORT
    )
    fixed = composed(fixed, rounds)
    rows.append(_row(where, f"{text}, WOR", claimed, fixed, delta, "replace_one"))
  return rows


def _mean_age() -> Comparison:
  """Compares pure epsilons. There is no delta, so both columns hold the closed form."""
  claimed = mean_age_epsilon(laplace_scale=1 / 500, num_records=500)
  truth = float(_AGE_RANGE) * claimed
  setting = f"ages in [0, {_AGE_RANGE}], n=500, Lap(1/n)"
  where = ("003", "4.1", "mean: sensitivity 1/n")
  return Comparison(*where, setting, "replace_one", claimed, truth, truth, "unsound")


def table(rows: Sequence[Comparison]) -> str:
  """Returns a line for each formula and setting, in columns."""
  number = lambda value: "-" if value is None else upper(value)
  lines = [("document", "formula", "setting", "claimed", "pld", "rdp", "verdict")]
  for row in rows:
    claimed, pld, rdp = map(number, (row.claimed, row.pld, row.rdp))
    place = f"{row.document} {row.section}"
    lines.append((place, row.formula, row.setting, claimed, pld, rdp, row.verdict))
  widths = [max(map(len, column)) for column in zip(*lines)]
  return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def write(rows: Sequence[Comparison], directory: str, delta: float) -> list[pathlib.Path]:
  """Writes documents.csv and documents.png; returns their paths."""
  folder = pathlib.Path(directory)
  folder.mkdir(parents=True, exist_ok=True)
  paths = [folder / "documents.csv", folder / "documents.png"]
  with paths[0].open("w", newline="") as file:
    writer = csv.DictWriter(file, fieldnames=["delta", *rows[0]._fields])
    writer.writeheader()
    writer.writerows({"delta": delta, **row._asdict()} for row in rows)
  _plot(rows, paths[1], delta)
  return paths


def _plot(rows: Sequence[Comparison], path: pathlib.Path, delta: float) -> None:
  # Imported here, since only a picture needs it. Drawing needs no display.
  from dpjax import pictures

  look = pictures.Look()
  figure = pictures.new_figure(look, height=3.4)
  left, right = figure.subplots(1, 2)
  # Claims that are too small are red or orange, and claims that are too large are blue.
  for name, index in zip(VERDICTS, (1, 4, 0, 2)):
    mine = [row for row in rows if row.verdict == name]
    truth = [row.rdp if row.pld is None else row.pld for row in mine]
    shown = [(t, row.claimed) for t, row in zip(truth, mine) if t and math.isfinite(t)]
    points = np.array(shown).reshape(-1, 2)
    how: dict[str, Any] = {"color": look.color(index), "marker": pictures.marker(index)}
    left.plot(
      *points.T, linestyle="none", markersize=4, label=f"{name} ({len(mine)})", **how
    )
  left.axline((1, 1), slope=1, color="0.5", linewidth=1)
  left.set(xscale="log", yscale="log")
  pictures.dress(
    left, look, title="below the line the claim is too small",
    xlabel="true epsilon (PLD; RDP where there is no PLD)", ylabel="claimed epsilon",
  )  # fmt: skip
  _plot_closed_form(right, delta)
  title = "min(sqrt(2T ln(1/d))/sigma, T/sigma^2)"
  pictures.dress(right, look, title=f"DP-SGD by {title}", xlabel="steps", ylabel="epsilon")
  for axes in (left, right):
    axes.legend(frameon=False, fontsize=look.font_size - 1)
  words = f"Published formulas and the truth, delta = {upper(delta)}"
  pictures.headline(figure, look, words)
  pictures.save(figure, path)


def _plot_closed_form(axes: Any, delta: float) -> None:
  from dpjax import pictures

  steps = [1, 3, 10, 30, 100, 300, 1000]
  for index, (sigma, prob) in enumerate(((10.0, 1.0), (1.0, 0.01))):
    noise = gaussian_event(sigma)
    step = poisson_sampled_event(noise, sampling_prob=prob)
    truth = epsilon_curve(step, steps, delta=delta)
    claimed = [dp_sgd_closed_form(sigma, n, delta) for n in steps]
    text = f"q {prob:g}, sigma {sigma:g}"
    color = pictures.PALETTE[index]
    axes.loglog(steps, truth, "-", color=color, label=f"{text}: PLD")
    axes.loglog(steps, claimed, "--", color=color, label=f"{text}: document 000")
