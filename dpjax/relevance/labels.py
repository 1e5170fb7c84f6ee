"""Labels under randomised response, and a loss that corrects for their noise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import mechanisms, trees
from dpjax.mechanisms import finite
from dpjax.relevance.record_noise import distinct_ids
from dpjax.types import Array, Example, HostArray, LossFn
from dpjax.validate import UserError

# Smaller estimated shares are raised to this, since an estimate of 0 or less has no logarithm.
_LEAST_PRIOR = 0.01


def noisy_labels(
  key: jax.Array,
  record_ids: HostArray,
  labels: HostArray,
  *,
  epsilon: float,
  num_classes: int,
) -> np.ndarray:
  """Keeps each label with probability e^eps / (e^eps + K - 1), else draws another class. Returns
  int32 [n].

  The randomness of record i is a function of (key, i), so repeated calls give the same label.

  Guarantee: (epsilon, 0)-DP for each label under replace_one (local).

  Raises:
    UserError: two records have the same id, and would share their randomness; the labels are not
      one integer in [0, K) for each record.

  >>> noisy_labels(jax.random.key(0), [0, 1], [3, 3], epsilon=20.0, num_classes=10).tolist()
  [3, 3]
  """
  # This call checks epsilon and the number of classes before float() and int() convert them.
  keep_probability(epsilon, num_classes)
  true = finite.indices("labels", labels, 0, int(num_classes) - 1)
  if true.ndim != 1:
    raise UserError(
      f"must be [n], one for each record, not {list(true.shape)}", field="labels"
    )
  ids = distinct_ids(record_ids, len(true))
  respond = _responses(float(epsilon), int(num_classes))
  return np.asarray(respond(key, jnp.asarray(ids), true), np.int32)


@functools.cache
def _responses(epsilon: float, num_classes: int) -> Callable:
  respond = mechanisms.RandomizedResponse(epsilon, num_classes)
  respond_to = lambda key, i, label: respond(jax.random.fold_in(key, i), label)
  return jax.jit(jax.vmap(respond_to, in_axes=(None, 0, 0)))


def keep_probability(epsilon: float, num_classes: int) -> float:
  """Returns the probability e^eps / (e^eps + K - 1) that randomised response gives the true label.

  >>> round(keep_probability(2.0, 10), 4), round(keep_probability(1.0, 10), 4)
  (0.4509, 0.232)
  """
  return mechanisms.RandomizedResponse(epsilon, num_classes).keep_prob


def transition(epsilon: float, num_classes: int) -> np.ndarray:
  """Returns the matrix T [K, K] with T[a, b] = P(the response is b | the label is a).

  >>> transition(np.log(3.0), 2).round(6).tolist()
  [[0.75, 0.25], [0.25, 0.75]]
  """
  keep = keep_probability(epsilon, num_classes)
  other = (1 - keep) / (num_classes - 1)
  return np.full((num_classes, num_classes), other) + np.eye(num_classes) * (keep - other)


def priors(responses: HostArray, epsilon: float, num_classes: int) -> np.ndarray:
  """Returns estimated shares [K] of the true labels. They depend on the responses alone, so this is
  post-processing.

  >>> priors([0, 0, 0, 1], np.log(3.0), 2).round(3).tolist()  # 3/4 kept: all were 0
  [0.99, 0.01]
  """
  respond = mechanisms.RandomizedResponse(epsilon, num_classes)
  frequencies = np.maximum(respond.frequencies(jnp.asarray(responses)), _LEAST_PRIOR)
  return frequencies / frequencies.sum()


def forward_corrected(
  apply: Callable, transitions: HostArray, class_priors: HostArray | None = None
) -> LossFn:
  """Returns the cross-entropy of T^T softmax(logits) with the noisy label (Patrini et al. 2017).

  This loss has the same minimiser over noisy labels as the cross-entropy has over true labels. With
  `class_priors`, the logarithms of the priors are added to the logits, only in training (Menon et
  al. 2021). Without priors, a net learns them if noise leaves little evidence in a record. It then
  answers with the most frequent class, also for clean inputs.

  >>> loss = forward_corrected(lambda params, x: x @ params, np.eye(2))
  >>> example = Example(x=jnp.log(jnp.array([1.0, 3.0])), y=1)
  >>> round(float(loss(jnp.eye(2), example)), 4)  # T = 1: -log(3 / 4)
  0.2877
  """
  # T holds zeros if labels get no noise. The logarithm of a zero must be finite.
  log_transitions = jnp.log(jnp.maximum(jnp.asarray(transitions, jnp.float32), 1e-30))
  shift = jnp.zeros(()) if class_priors is None else jnp.log(jnp.asarray(class_priors))

  def loss(params: Any, example: Example) -> Array:
    logits = trees.at_least_float32(apply(params, jnp.asarray(example.x)[None])[0])
    reached = jax.nn.log_softmax(logits + shift) + log_transitions[:, example.y]
    return -jax.nn.logsumexp(reached)

  return loss
