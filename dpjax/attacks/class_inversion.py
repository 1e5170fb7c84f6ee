"""Model inversion, white box: reconstructs a typical input of each class.

Fredrikson et al. (2015), MIFace: gradient descent moves an input until the model is sure that it
belongs to the class. Priors keep the input natural. The result shows the class as the model knows
it, and is no record. It is close to the class mean where a class holds one person or one digit.

An input that only fools the model proves nothing. So `judge_inversion` asks another network, which
was trained on other records. It also compares the input with the true mean of the class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import metrics, trees, validate
from dpjax.attacks import reconstructions, signals
from dpjax.attacks.gradient_inversion import total_variation
from dpjax.attacks.roc import Counted, with_interval
from dpjax.data import Dataset
from dpjax.metrics import Apply
from dpjax.types import Array, Example, HostArray, Params
from dpjax.validate import UserError


class Inverted(NamedTuple):
  """Inputs that an inversion found, `count` for each class, in the order of the classes."""

  x: np.ndarray  # [n, *shape], n = number of classes asked for * count
  y: np.ndarray  # [n] int32, the class of each input
  confidence: np.ndarray  # [n] probability that the TARGET gives to that class


@dataclasses.dataclass(frozen=True, eq=False)
class ClassInversion:
  """Minimises -log p(class | x) + l2 / 2 * |x - mean|^2 + total_variation * TV(x) by Adam.

  Args:
    temperature: divisor of the logits in p. Above 1, a model that is nearly sure of the class still
      gives a gradient that moves the input.
    l2, total_variation: weights of the two priors, which hold an input near the mean and make it
      smooth (images only).
    mean: mean of the public prior, around which the search starts: a number, or [*shape].
    spread: standard deviation of the random starts around the mean, before they are truncated at
      twice this distance.
    low, high: bounds to which each number of an input is clipped; None: no bound.
  """

  steps: int = 500
  learning_rate: float = 0.05
  temperature: float = 1.0
  l2: float = 0.01
  total_variation: float = 0.0
  mean: float | np.ndarray = 0.0
  spread: float = 0.1
  low: float | None = 0.0
  high: float | None = 1.0

  def __post_init__(self):
    validate.integer_at_least(1, steps=self.steps)
    validate.positive(learning_rate=self.learning_rate, temperature=self.temperature)
    validate.non_negative(
      l2=self.l2, total_variation=self.total_variation, spread=self.spread
    )
    if self.low is not None and self.high is not None and self.low >= self.high:
      raise UserError(f"must be below high={self.high!r}", field="low", value=self.low)

  def __call__(
    self,
    apply: Apply,
    params: Params,
    shape: Sequence[int],
    *,
    classes: Sequence[int] | np.ndarray,
    count: int = 1,
    key: Array,
  ) -> Inverted:
    """Inverts the model `apply(params, x [B, *shape]) -> logits [B, K]`, all classes at once.

    Args:
      shape: shape of one input.
      classes: classes to invert, each in [0, K).
      count: number of random starts for each class.

    Raises UserError for classes that the model does not have, total variation without images, a
    mean of another shape, or an input that the model does not take.

    >>> weights = jnp.array([[2.0, -1.0], [0.0, 1.0]])  # x [B, 2] @ weights
    >>> find = ClassInversion(low=-1.0)
    >>> pictures = find(lambda w, x: x @ w, weights, (2,), classes=[0, 1], key=jax.random.key(0))
    >>> pictures.x.round(1).tolist(), bool(pictures.confidence.min() > 0.9)
    ([[1.0, -1.0], [-1.0, 1.0]], True)
    """
    shape = tuple(shape)
    chosen = np.asarray(classes)
    validate.integer_at_least(1, count=count)
    num_classes = signals.num_classes(apply, params, shape)
    _check_classes(chosen, num_classes)
    if self.total_variation and len(shape) != 3:
      raise UserError(
        "must be an image [H, W, C] for total_variation", field="shape", value=shape
      )
    if np.shape(self.mean) not in ((), shape):
      raise UserError(
        f"must be {shape}, or one number", field="mean.shape", value=np.shape(self.mean)
      )
    y = np.repeat(chosen.astype(np.int32), count)
    noise = self.spread * jax.random.truncated_normal(key, -2, 2, (len(y), *shape))
    start = self._into_box(jnp.broadcast_to(self.mean, noise.shape) + noise)
    x = self._search(apply, params, start, y)
    logits = trees.at_least_float32(apply(params, x))
    sure = jax.nn.softmax(logits)[jnp.arange(len(y)), y]
    return Inverted(np.asarray(x), y, np.asarray(sure))

  def _into_box(self, x: Array) -> Array:
    return jnp.clip(x, self.low, self.high)

  def _search(self, apply: Apply, params: Params, x: Array, y: np.ndarray) -> Array:
    tx = optax.adam(optax.cosine_decay_schedule(self.learning_rate, self.steps))
    mean = jnp.broadcast_to(self.mean, x.shape)

    # Each x is optimised independently: the cost is a sum, not a mean.
    def cost(x: Array) -> Array:
      logits = trees.at_least_float32(apply(params, x)) / self.temperature
      missed = optax.softmax_cross_entropy_with_integer_labels(logits, y)
      away = jnp.sum(jnp.square(x - mean))
      # Total variation is a mean over inputs. Multiplied by the number of inputs it is a sum, like
      # the other terms.
      smooth = total_variation(x) * len(y) if self.total_variation else 0.0
      return jnp.sum(missed) + 0.5 * self.l2 * away + self.total_variation * smooth

    @jax.jit
    def step(x: Array, state: optax.OptState) -> tuple[Array, optax.OptState]:
      updates, state = tx.update(jax.grad(cost)(x), state)
      return self._into_box(optax.apply_updates(x, updates)), state  # pyright: ignore

    state = tx.init(x)
    for _ in range(self.steps):
      x, state = step(x, state)
    return x


def _check_classes(classes: np.ndarray, num_classes: int) -> None:
  right = classes.ndim == 1 and classes.size and classes.dtype.kind in "iu"
  if not right or not 0 <= classes.min() <= classes.max() < num_classes:
    raise UserError(
      f"must be in [0, {num_classes}), those of the model",
      field="classes",
      value=classes.tolist(),
    )


class InversionScore(NamedTuple):
  """Judgement of inverted classes by an independent network, and by the true class means."""

  # Found inputs that the network calls by their class; the interval holds if the starts are
  # independent.
  recognised: Counted
  # [total] to the mean of the class; for images of at least 11 x 11
  ssim: np.ndarray | None
  mse: np.ndarray  # [total] to the mean of the class


def judge_inversion(
  inverted: Inverted,
  apply: Apply,
  params: Params,
  records: Dataset,
  *,
  target: Params,
) -> InversionScore:
  """Judges inverted inputs by an evaluation network `apply(params, x)`, and by true class means.

  Args:
    records: true records, from which the mean of each class is taken.
    target: parameters of the attacked model, which must not judge itself.

  Raises UserError if the target is its own judge, or the judge has too few classes. It is also
  raised if a class has no record, or inputs have another shape than records.
  """
  same_tree = jax.tree.structure(params) == jax.tree.structure(target)
  # Networks with equal bits count as one network.
  if same_tree and trees.sha256(params) == trees.sha256(target):
    raise UserError(
      "are the target's own: the judge must be another network", field="params"
    )
  if inverted.x.shape[1:] != records.x.shape[1:]:
    raise UserError(
      f"have the shape {records.x.shape[1:]}, what was found "
      f"{inverted.x.shape[1:]}: must be alike",
      field="records",
    )
  _check_classes(inverted.y, signals.num_classes(apply, params, inverted.x.shape[1:]))
  means = class_means(records, np.unique(inverted.y))[inverted.y]
  rate = metrics.accuracy(apply, params, Example(inverted.x, inverted.y))
  total = len(inverted.y)
  images = means.ndim == 4 and min(means.shape[1:3]) >= 11
  alike = reconstructions.ssim(means, inverted.x) if images else None
  error = reconstructions.mse(means, inverted.x)
  return InversionScore(with_interval(round(rate * total), total), alike, error)


def class_means(records: Dataset, classes: HostArray) -> np.ndarray:
  """Returns the mean record of each class: [num_classes, *shape], 0 for classes not asked for.

  Raises UserError for a class without a record.
  """
  means = np.zeros((records.num_classes, *records.x.shape[1:]))
  for name in np.asarray(classes):
    if not (records.y == name).any():
      raise UserError(
        f"hold none of class {name}, whose mean is asked for", field="records"
      )
    means[name] = records.x[records.y == name].mean(axis=0)
  return means
