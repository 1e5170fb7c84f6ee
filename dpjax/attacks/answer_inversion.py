"""Model inversion, black box: reconstructs inputs from the model's answers.

The attacker has auxiliary data of the same kind, and asks the model about them. It trains a decoder
from answers to inputs (Yang et al. 2019). The decoder then decodes the answers to other people's
records. One baseline guesses the mean input; a stronger baseline guesses the mean of the class that
the model names. A decoder that beats the stronger one uses what probabilities leak beyond labels.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import models, validate
from dpjax.attacks import reconstructions, signals
from dpjax.attacks.fitting import Fit
from dpjax.attacks.roc import Counted, with_interval
from dpjax.types import Array, HostArray, Params
from dpjax.validate import UserError

# Smaller probabilities are raised to this, since float32 does not resolve them beside 1.
_FLOOR = 1e-7


class Decoder(NamedTuple):
  """A function from answers [n, K] to inputs [n, *shape]."""

  model: models.Mlp
  params: Params
  center: np.ndarray  # [K] mean of the log answers in training
  scale: np.ndarray  # [K] their standard deviation
  mean: np.ndarray  # [*shape] mean of the inputs in training

  def __call__(self, answers: HostArray) -> np.ndarray:
    """Returns the inputs [n, *shape] decoded from answers [n, K].

    Raises UserError for another number of classes, or for answers outside [0, 1].
    """
    logs = _logs(answers)
    if logs.shape[1:] != self.center.shape:
      raise UserError(
        f"have {logs.shape[1]} classes, the decoder was trained on "
        f"{len(self.center)}: must be answers of the same model",
        field="answers",
      )
    decoded = self.model.apply(self.params, (logs - self.center) / self.scale)
    return np.asarray(decoded).reshape(-1, *self.mean.shape) + self.mean


def _logs(answers: HostArray) -> np.ndarray:
  p = signals.probabilities("answers", answers)
  return np.log(np.maximum(p, _FLOOR)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class AnswerInversion:
  """Trains an MLP from log probabilities to inputs, by least squares.

  Args:
    features: widths of the hidden layers.
    fit: settings of the MLP's training.
  """

  features: tuple[int, ...] = (256, 256)
  fit: Fit = dataclasses.field(default_factory=Fit)

  def __post_init__(self):
    validate.integer_at_least(1, **validate.entries(features=self.features))

  def __call__(self, answers: HostArray, x: HostArray, *, seed: int) -> Decoder:
    """Returns a decoder, trained on the answers [n, K] to the attacker's own inputs [n, *shape].

    Raises UserError for answers outside [0, 1], or if there is not one input for each answer.

    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(200, 1)).astype(np.float32)
    >>> answers = np.hstack([1 / (1 + np.exp(x)), 1 / (1 + np.exp(-x))])
    >>> decoder = AnswerInversion((16,), Fit(300, 0.03, 64))(answers, x, seed=0)
    >>> judge_decoder(decoder, answers, x).explained > 0.95
    True
    """
    logs = _logs(answers)
    inputs = np.asarray(x, np.float32)
    if inputs.ndim < 2 or len(inputs) != len(logs):
      raise UserError(
        f"must be inputs [{len(logs)}, *shape], one for each answer, got {inputs.shape}",
        field="x",
      )
    center = logs.mean(axis=0)
    # A class whose answers never change has no spread: the small number prevents a division by 0.
    scale = logs.std(axis=0) + 1e-6
    mean = inputs.mean(axis=0)
    # The decoder learns only the difference of an input from the mean, the weaker baseline.
    wanted = (inputs - mean).reshape(len(inputs), -1)
    model = models.Mlp(wanted.shape[1], features=self.features, activation="relu")
    first = model.init(jax.random.key(seed % 2**32), jnp.zeros((1, logs.shape[1])))

    def loss(params: Params, batch: tuple[Array, Array]) -> Array:
      decoded: Any = model.apply(params, batch[0])
      return jnp.mean(jnp.square(decoded - batch[1]))

    rows = ((logs - center) / scale, wanted)
    return Decoder(model, self.fit(loss, first, rows, seed=seed), center, scale, mean)


class DecoderScore(NamedTuple):
  """Errors of a decoder on inputs that it has not seen."""

  mse: np.ndarray  # [n]
  mse_of_mean: np.ndarray  # [n] of the mean input of the attacker's own data
  mse_of_class_mean: np.ndarray | None  # [n] where class means were given
  nearer: Counted  # records that it decodes better than the best of these guesses

  @property
  def explained(self) -> float:
    """1 - MSE / (MSE of the mean input): 0 for a decoder that knows nothing, at most 1."""
    return float(1 - self.mse.mean() / self.mse_of_mean.mean())


def judge_decoder(
  decoder: Decoder,
  answers: HostArray,
  x: HostArray,
  *,
  class_means: HostArray | None = None,
) -> DecoderScore:
  """Decodes the answers [n, K] to other records, and compares the result with the records.

  Args:
    x: the records [n, *shape].
    class_means: [K, *shape], class means of the attacker's own data. They are the best guess from
      the label alone. None: no comparison with class means.

  Raises UserError for records or means of another shape.
  """
  truth = np.asarray(x, np.float64)
  p = np.asarray(answers)
  if truth.shape != (len(p), *decoder.mean.shape):
    raise UserError(
      f"must be {(len(p), *decoder.mean.shape)}", field="x.shape", value=truth.shape
    )
  error = reconstructions.mse(truth, decoder(answers))
  rows = {"mean": reconstructions.mse(truth, np.broadcast_to(decoder.mean, truth.shape))}
  if class_means is not None:
    means = np.asarray(class_means)
    if means.shape != (p.shape[1], *decoder.mean.shape):
      wanted = (p.shape[1], *decoder.mean.shape)
      raise UserError(f"must be {wanted}", field="class_means.shape", value=means.shape)
    rows["class"] = reconstructions.mse(truth, means[p.argmax(axis=1)])
  # For each record, the decoder must beat the best of the guesses.
  nearer = int(np.sum(error < np.min(list(rows.values()), axis=0)))
  return DecoderScore(
    error, rows["mean"], rows.get("class"), with_interval(nearer, len(truth))
  )
