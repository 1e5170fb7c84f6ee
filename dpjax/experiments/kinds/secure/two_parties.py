"""Runs SecureML: two parties train a model on shares, compared with the training in float64."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated

import jax
import numpy as np

from dpjax import data as data_lib
from dpjax import optional, validate
from dpjax.data.target_kinds import needs_classes
from dpjax.experiments.config import common, rules
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds.secure.noisy_model import train_shares
from dpjax.experiments.kinds.secure.task import (
  MOST_ROWS,
  Computed,
  LabelledRows,
  Measuring,
  SecureTask,
)
from dpjax.experiments.run import pieces
from dpjax.experiments.run.experiment import Phase
from dpjax.experiments.run.pieces import Arrays
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.secure import mpc
from dpjax.secure.mpc import in_the_clear, private_values, secureml
from dpjax.secure.sums import primitives
from dpjax.validate import UserError, Verbatim

# Number of gradient steps in one step of the run. A checkpoint may follow each step of the run.
_CHUNK = 20
# Bound on parameters. Their products with numbers below 2^11 still fit into the ring (`ring64`).
_MOST = 2.0**15
_HIDES = (
  "rows, labels and the model from each party and from the dealer, who do not collude"
)


def _training(
  rows: LabelledRows,
  start: tuple[secureml.Dense, ...],
  batches: np.ndarray,
  recipe: secureml.Recipe,
  truncation: str,
) -> Phase:
  """Returns a phase in which each step takes several gradient steps. Its checkpoints hold the
  shares of both parties."""
  shares = private_values.split((rows.x, rows.y))
  steps = len(batches)
  number = -(-steps // _CHUNK)

  def init() -> Arrays:
    return {"shares": private_values.split(start), "numbers": np.zeros(4)}

  def train(state: Arrays, place: int) -> None:
    part = batches[place * _CHUNK : (place + 1) * _CHUNK]
    run = lambda party, network, x, y: secureml.train(party, network, x, y, part, recipe)
    train_shares(state, run, shares, truncation=truncation)

  return pieces.fill_pieces(number, init, train, name="shares")


@dataclasses.dataclass(frozen=True)
class TrainTask(SecureTask):
  """`secure.mpc.secureml`: two parties train a model on shares, a dealer helps."""

  dataset: Annotated[
    str,
    rules.among(("breast_cancer", "digits", "mnist")),
    "breast_cancer: one output; the others: one for each class",
  ] = "breast_cancer"
  hidden: Annotated[
    tuple[int, ...], "widths of the hidden layers; none: logistic regression"
  ] = ()
  activation: Annotated[str, "of hidden layers: relu | square"] = "relu"
  output: Annotated[str, "of `secureml.Recipe`"] = "sigmoid"
  learning_rate: Annotated[float, "of every step"] = 0.5
  epochs: Annotated[int, rules.between(1, rules.MOST_EPOCHS), "of the training rows"] = 10
  batch_size: Annotated[int, rules.between(1, 2**16), "rows of a step"] = 64
  truncation: Annotated[
    str,
    rules.among(("masked", "local")),
    "masked: never fails; local: SecureML's own, which fails with a probability",
  ] = "masked"
  num_predicted: Annotated[
    int, rules.between(1, MOST_ROWS), "test rows that are predicted on shares"
  ] = 100
  needs = (primitives.library,)

  def __post_init__(self):
    super().__post_init__()
    validate.integer_in(1, 2**16, **validate.entries(hidden=self.hidden))
    secureml.Recipe(self.activation, self.output, self.learning_rate)

  def check(self) -> None:
    with within("task"):
      common.read_if(self, bool(self.hidden), "hidden layers (task.hidden)", "activation")

  def load(self) -> LabelledRows:
    """Loads rows to train on and to predict."""
    if self.dataset == "breast_cancer":
      # Imported here: scikit-learn is slow to import, and an optional package.
      with optional.require_extra():
        from sklearn import datasets

      # Columns are standardised by mean and deviation of all rows. Rows are shuffled, and the last
      # fifth are test rows.
      x, y = map(np.asarray, datasets.load_breast_cancer(return_X_y=True))
      x = (x - x.mean(0)) / x.std(0)
      order = np.random.default_rng(0).permutation(len(x))
      x = x[order]
      y = y[order]
      known = 4 * len(x) // 5
      return LabelledRows(x[:known], y[:known, None].astype(float), x[known:], y[known:])
    train, test = data_lib.load(self.dataset)
    needs_classes(train, "task.dataset", self.dataset)
    flat = lambda split: np.asarray(split.x, np.float64).reshape(len(split), -1)
    one_hot = np.eye(train.num_classes)[np.asarray(train.y)]
    return LabelledRows(flat(train), one_hot, flat(test), np.asarray(test.y))

  def execute(self, loaded: LabelledRows, random: RunKeys, seed: int) -> Measuring:
    """Returns the outcome: trains and predicts on shares, from public first parameters and batches.
    One party gets the predictions. The same model is trained in float64.

    Raises:
      UserError: more rows are asked for than there are, or the training in float64 diverges.
    """
    rows = loaded
    n = len(rows.x)
    if self.batch_size > n or self.num_predicted > len(rows.test_x):
      raise UserError(
        f"must be at most {n} and {len(rows.test_x)}, the rows of "
        f"task.dataset={self.dataset!r}",
        field="task.batch_size",
        value=Verbatim(f"{self.batch_size}, task.num_predicted={self.num_predicted}"),
      )
    rng = np.random.default_rng(random.order)
    # All batches have the same size, so that `recipe.shift` is the same in each step.
    each = n // self.batch_size * self.batch_size
    orders = [rng.permutation(n)[:each] for _ in range(self.epochs)]
    sizes = (rows.x.shape[1], *self.hidden, rows.y.shape[1])
    with within("task"):
      recipe = secureml.Recipe(self.activation, self.output, self.learning_rate)
      recipe.shift(self.batch_size)
    start = secureml.initial(sizes, seed=seed)
    batches = np.concatenate(orders).reshape(-1, self.batch_size)
    # NumPy's warnings are off, since a training that diverges is refused below.
    with np.errstate(all="ignore"):
      plain = in_the_clear.train(start, rows.x, rows.y, batches, recipe)
    # `not <` also refuses NaN. In the ring, too large numbers would wrap silently.
    if not max(np.abs(leaf).max() for leaf in jax.tree.leaves(plain)) < _MOST:
      raise UserError(
        "diverges in float64, too; must be smaller",
        field="task.learning_rate",
        value=self.learning_rate,
      )
    trained = yield _training(rows, start, batches, recipe, self.truncation)
    state = jax.tree.map(np.asarray, trained.state)
    first, second = state["shares"]
    seconds, sent, dealt, rounds = state["numbers"].tolist()
    x = rows.test_x[: self.num_predicted]
    truth = rows.test_labels[: self.num_predicted]
    asked = lambda party, net, x: secureml.predict(party, net, x, recipe, to=0)
    x_first, x_second = private_values.split(x)
    begun = time.monotonic()
    guesses = mpc.run(
      asked, (first, x_first), (second, x_second), truncation=self.truncation
    ).outputs[0]
    asking = time.monotonic() - begun
    network = private_values.join(first, second)
    accuracy = float(np.mean(guesses == truth))
    usual = float(np.mean(in_the_clear.predict(plain, x, recipe) == truth))
    pairs = zip(jax.tree.leaves(list(network)), jax.tree.leaves(plain))
    return Computed(
      protocol="two parties and a dealer",
      sizes=f"{'-'.join(map(str, sizes))}, {len(batches)} steps of {self.batch_size}",
      seconds=seconds,
      num_bytes=int(sent + dealt),
      error=max(float(np.abs(a - b).max()) for a, b in pairs),
      error_is="largest, of a parameter, against float64",
      found=f"accuracy {accuracy:.4f}, in the clear {usual:.4f}; {rounds:.0f} rounds",
      hides=_HIDES,
      num_steps=len(batches),
      params={"network": list(network)},
      more={
        "test_accuracy": accuracy,
        "plain_accuracy": usual,
        "bytes_between_parties": int(sent),
        "bytes_dealt": int(dealt),
        "rounds": int(rounds),
        "seconds_to_predict": asking,
        "num_predicted": len(x),
      },
    )
