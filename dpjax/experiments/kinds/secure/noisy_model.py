"""Runs logistic regression on shares, and opens the weights with noise."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np

from dpjax import data as data_lib
from dpjax.accounting.proved import REPLACE
from dpjax.data.target_kinds import needs_classes
from dpjax.experiments.config import rules
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds.secure.task import (
  Computed,
  LabelledRows,
  Measuring,
  SecureTask,
)
from dpjax.experiments.run import guarantee, pieces
from dpjax.experiments.run.experiment import Phase
from dpjax.experiments.run.pieces import Arrays
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.secure import mpc
from dpjax.secure.mpc import output_noise, private_values, ring64
from dpjax.secure.mpc.output_noise import OutputNoise
from dpjax.secure.mpc.party import Party
from dpjax.secure.sums import primitives

# Number of gradient steps in one step of the run. A checkpoint may follow each step of the run.
_CHUNK = 10
_NOT_PRIVATE = (
  "NOT covered, as task.diagnostics is true: error, plain_accuracy and found of the result compare "
  "with the model without noise, and are not private."
)
_SECRETS = (
  "checkpoints/ of this run hold both parties' shares and the secrets of all noise and masks: keep "
  "them as secret as the data, and delete none before the run has ended."
)
_HIDES = (
  "rows and labels from each party and from the dealer, who do not collude; the weights are "
  "opened with the noise of both"
)


def mechanism_of(task: NoisyModelTask, rows: LabelledRows) -> OutputNoise:
  """Returns the mechanism with noise for `task.epsilon`.

  Raises UserError if nothing is proved for these settings.
  """
  n, d = rows.x.shape
  with within("task"):
    return OutputNoise(
      num_rows=n,
      num_features=d,
      num_outputs=rows.y.shape[1],
      l2_penalty=task.l2_penalty,
      num_steps=task.num_steps,
      noise_multiplier=1.0,
      feature_norm=task.feature_norm,
      learning_rate=task.learning_rate,
      frac_bits=task.frac_bits,
    ).calibrated(epsilon=task.epsilon, delta=task.delta)


def guarantee_of(task: NoisyModelTask, mechanism: OutputNoise) -> guarantee.Guarantee:
  """Returns the guarantee of the opened weights."""
  proved = guarantee.of_event(
    mechanism.event(),
    delta=task.delta,
    l2_bound=mechanism.l2_sensitivity / 2,
    num_records=mechanism.num_rows,
    relation=REPLACE,
    accountant="rdp",
  )
  statement = f"{mechanism.statement()} {_SECRETS}"
  if task.diagnostics:
    statement = f"{statement} {_NOT_PRIVATE}"
  return guarantee.add_note(guarantee.add_note(proved, statement), task.note)


def train_shares(
  state: Arrays, program: Callable[..., Any], rows: Sequence[Any], **options: Any
) -> None:
  """Trains each party's share of a model on its shares of the rows, and adds what this cost.

  Args:
    state: `shares` of the model, which are replaced, and total `numbers`: seconds, bytes sent,
      bytes dealt, rounds.
    program: of (party, share of the model, *shares of rows).
    options: of `mpc.run`.
  """
  begun = time.monotonic()
  first, second = ((model, *mine) for model, mine in zip(state["shares"], rows))
  ran = mpc.run(program, first, second, **options)
  state["shares"] = ran.outputs
  state["numbers"] += [time.monotonic() - begun, *ran.cost]


def _training(mechanism: OutputNoise, rows: LabelledRows) -> Phase:
  """Returns a phase in which each step takes several gradient steps. Its checkpoints hold the
  shares of both parties."""
  inputs = (mechanism.rows(rows.x), mechanism.labels(rows.y))
  shares = private_values.split(inputs, frac_bits=mechanism.frac_bits)
  number = -(-mechanism.num_steps // _CHUNK)
  start = np.zeros((mechanism.num_features + 1, mechanism.num_outputs), np.uint64)

  def init() -> Arrays:
    # Each party's secret for its noise is kept with its shares. If a run is stopped while it opens
    # the weights, it opens them with the same noise again, which reveals nothing new.
    secret = np.frombuffer(secrets.token_bytes(64), np.uint64).reshape(2, 4)
    # Masks decide how truncations round, so repeated steps must use the same masks. Otherwise a
    # second opening could show slightly different weights with the same noise, and so reveal the
    # difference of the weights. This process holds both parties. Separate programs would each keep
    # a secret for masks.
    masks = np.frombuffer(secrets.token_bytes(32), np.uint64)
    # Training begins with shares of zero.
    return {
      "shares": (start, start.copy()),
      "secret": secret,
      "masks": masks,
      "numbers": np.zeros(4),
    }

  def train(state: Arrays, place: int) -> None:
    first = place * _CHUNK
    last = min(first + _CHUNK, mechanism.num_steps)

    def program(party: Party, weights: np.ndarray, x: np.ndarray, y: np.ndarray):
      kept = weights if first else None
      return mechanism.train(party, x, y, weights=kept, first=first, last=last)

    # Each step of the run has its own masks, since two messages under one mask reveal their
    # difference.
    masks = hashlib.sha256(state["masks"].tobytes() + place.to_bytes(8, "little")).digest()
    seed = int.from_bytes(masks, "little")
    train_shares(state, program, shares, seed=seed, frac_bits=mechanism.frac_bits)

  return pieces.fill_pieces(number, init, train, name="shares")


def _release(mechanism: OutputNoise, trained: Arrays) -> Phase:
  """Returns a phase of one step, which opens the weights."""
  shares = [np.asarray(share) for share in trained["shares"]]
  secret = np.asarray(trained["secret"]).tolist()

  def init() -> Arrays:
    shape = (mechanism.num_features + 1, mechanism.num_outputs)
    return {"weights": np.zeros(shape)}

  def open_once(state: Arrays, place: int) -> None:
    del place

    def program(party: Party, weights: np.ndarray) -> np.ndarray:
      bits = np.random.SeedSequence(secret[party.number])
      rng = np.random.Generator(np.random.Philox(bits))
      return mechanism.release(party, weights, rng=rng)

    first, second = ((share,) for share in shares)
    ran = mpc.run(program, first, second, frac_bits=mechanism.frac_bits)
    state["weights"] = ran.outputs[0]

  return pieces.fill_pieces(1, init, open_once, name="opening", subfolder="opening")


@dataclasses.dataclass(frozen=True)
class NoisyModelTask(SecureTask):
  """`secure.mpc.OutputNoise`: logistic regression on shares. The weights are opened with noise of
  both parties."""

  dataset: Annotated[
    str,
    rules.among(("breast_cancer", "digits")),
    "whose columns have declared ranges; breast_cancer: one output; digits: one for each class",
  ] = "breast_cancer"
  epsilon: Annotated[float, rules.POSITIVE, "of the opened weights, under replace_one"] = (
    1.0
  )
  delta: Annotated[float, rules.OPEN_UNIT, "far below 1 / n"] = 1e-5
  feature_norm: Annotated[float, rules.POSITIVE, "owners clip their rows to it"] = 3.0
  l2_penalty: Annotated[
    float, rules.POSITIVE, "of weights and bias; without one nothing is proved"
  ] = 0.3
  num_steps: Annotated[
    int,
    rules.between(1, output_noise.MOST_STEPS),
    "with all rows in each, from weights of 0",
  ] = 50
  learning_rate: Annotated[
    float | None, "over the number of rows a power of two; none: the largest that is proved"
  ] = None
  frac_bits: Annotated[int, rules.between(4, ring64.MOST_FRAC_BITS), "of fixed point"] = 18
  diagnostics: Annotated[bool, "compare with the model without noise: NOT private"] = False
  needs = (primitives.library,)
  note: ClassVar[str] = ""  # before the statement of the guarantee

  def load(self) -> LabelledRows:
    """Loads rows to train on and to predict, scaled by public bounds alone."""
    train, test = data_lib.load(self.dataset)
    needs_classes(train, "task.dataset", self.dataset)

    def flat(split: data_lib.Dataset) -> np.ndarray:
      # Columns are centred by the middle of the declared range [0, 1], since their mean is private.
      return 2 * np.asarray(split.x, np.float64).reshape(len(split), -1) - 1

    labels = np.asarray(train.y)
    binary = train.num_classes == 2
    columns = labels[:, None] if binary else np.eye(train.num_classes)[labels]
    return LabelledRows(flat(train), columns.astype(float), flat(test), np.asarray(test.y))

  def execute(self, loaded: LabelledRows, random: RunKeys, seed: int) -> Measuring:
    """Returns the outcome: trains on shares, opens the weights once, and predicts in the clear."""
    # `random` is not used, since masks and noise come from the operating system.
    del random, seed
    rows = loaded
    mechanism = mechanism_of(self, rows)
    told = guarantee_of(self, mechanism)
    trained = (yield _training(mechanism, rows)).state
    seconds, sent, dealt, rounds = np.asarray(trained["numbers"]).tolist()
    opening = _release(mechanism, trained)
    released = yield dataclasses.replace(opening, guarantee=told)
    weights = np.asarray(released.state["weights"])
    clipped = mechanism.rows(rows.test_x)

    def accuracy(model: np.ndarray) -> float:
      scores = clipped @ model
      several = scores.shape[1] > 1
      classes = scores.argmax(axis=1) if several else scores[:, 0] >= 0
      return float(np.mean(classes == rows.test_labels))

    facts = told.facts(released.ledger, released.epsilon)
    noisy = accuracy(weights)
    summary = f"accuracy {noisy:.4f}, "
    if self.diagnostics:
      exact = mechanism.in_the_clear(mechanism.rows(rows.x), rows.y)
      plain = accuracy(exact)
      error = float(np.abs(weights - exact).max())
      error_is = "largest, of a weight, against the same without noise (NOT private)"
      summary += f"without noise {plain:.4f} (NOT private); "
    else:
      # The exact error, beside the weights, could tell two data sets apart. So `error` is a public
      # bound on the mean of the largest noise. The largest absolute value of m sub-Gaussian numbers
      # has a mean of at most s sqrt(2 ln(2 m)). Here s is the standard deviation of the sum of both
      # parties' noise, sqrt(2) `mechanism.std`.
      plain = None
      error = mechanism.std * math.sqrt(2) * math.sqrt(2 * math.log(2 * weights.size))
      error_is = "bound on the mean of the largest noise of a weight"
    return Computed(
      protocol="two parties and a dealer, noise on the output",
      sizes=f"{mechanism.num_rows} rows x {mechanism.num_features} columns, "
      f"{mechanism.num_steps} full-batch steps",
      seconds=seconds,
      num_bytes=int(sent + dealt),
      error=error,
      error_is=error_is,
      found=f"{summary}{rounds:.0f} rounds",
      hides=_HIDES,
      num_steps=mechanism.num_steps,
      params={"weights": weights},
      facts=facts,
      more={
        "test_accuracy": noisy,
        "plain_accuracy": plain,
        "l2_sensitivity": mechanism.l2_sensitivity,
        "noise_std": mechanism.std,
        "learning_rate": mechanism.rate,
        "bytes_between_parties": int(sent),
        "bytes_dealt": int(dealt),
        "rounds": int(rounds),
        "ledger": released.ledger.to_json(),
        "privacy_statement": told.statement(1),
      },
    )
