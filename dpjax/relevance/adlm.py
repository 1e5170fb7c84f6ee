"""AdLM and ILM (Phan et al. 2017) as in their published code. Nothing is proved.

ALL images of a batch get the same map of Laplace noise, whose scale is divided by the batch size.
The last hidden layer is normalised over the batch and clipped to [-1, 1]. The loss is a quadratic
approximation of the sigmoid cross-entropy, with noise on its coefficients, drawn once. The loss
holds the terms z^2 / 8 and N * W of `polynomial_loss`, so it is not comparable with a
cross-entropy. Report the cross-entropy of the logits instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.key_uses import KeyUse, key_for
from dpjax.noise import source
from dpjax.relevance.settings import AdLM
from dpjax.types import Array

# Weight of the old running statistics when the statistics of a batch are mixed in.
_MOMENTUM = 0.9
# Number that is added to a variance, since the variance of a constant output is 0.
_TINY = 1e-3


class Net(NamedTuple):
  """A net with batch normalisation. `init(key, x)` returns params. `apply(params, x)` returns
  logits; it normalises the last hidden layer by running statistics."""

  init: Callable[..., Any]
  apply: Callable[..., Array]
  refresh: Callable[..., Any]  # (params, batch statistics) -> updated params
  in_batch: Callable[..., Any]  # (params, x) -> (logits, batch statistics)


def net(body: Any, num_classes: int) -> Net:
  """Returns a net that normalises the outputs [B, h] of `body`, clips them to [-1, 1], and maps
  them linearly to logits.

  The normalisation mixes the examples of a batch, so one record changes the loss terms of all
  others.
  """

  def init(key: Array, x: Any) -> Any:
    params = body.init(key, x)
    h = jax.eval_shape(body.apply, params, x).shape[1]
    unit = jax.nn.initializers.normal(1.0)(key_for(KeyUse.HEAD, key), (h, num_classes))
    # This scale gives logits of about unit variance, since outputs are normalised.
    draw = unit / math.sqrt(h)
    return {
      "body": params,
      "head": draw,
      "bias": jnp.zeros(num_classes),
      "stats": {"mean": jnp.zeros(h), "var": jnp.ones(h)},
    }

  def logits(params: Any, hidden: Array, mean: Array, var: Array) -> Array:
    normal = (hidden - mean[None]) / jnp.sqrt(var + _TINY)[None]
    return jnp.clip(normal, -1, 1) @ params["head"] + params["bias"][None]

  def apply(params: Any, x: Any) -> Array:
    stats = params["stats"]
    return logits(params, body.apply(params["body"], x), stats["mean"], stats["var"])

  def in_batch(params: Any, x: Any) -> tuple[Array, Any]:
    hidden = body.apply(params["body"], x)
    stats = {"mean": hidden.mean(axis=0), "var": hidden.var(axis=0)}
    return logits(params, hidden, **stats), stats

  def refresh(params: Any, new: Any) -> Any:
    mix = lambda old, now: _MOMENTUM * old + (1 - _MOMENTUM) * now
    return {**params, "stats": jax.tree.map(mix, params["stats"], new)}

  return Net(init, apply, refresh, in_batch)


def input_scales(
  beta: np.ndarray, how: AdLM, *, epsilon: float, batch_size: int
) -> np.ndarray:
  """Returns the scales [d] of the input noise: Delta_h0 / (d * beta_j * eps2) / L.

  Delta_h0 is `how.first_layer_sensitivity` (2 (d / 4) 25 if that is None), eps2 is `epsilon` and
  L is `batch_size`.

  >>> scales = input_scales(np.full(784, 1 / 784), AdLM(), epsilon=0.075, batch_size=1800)
  >>> round(float(scales[0]), 1)  # the published code, at beta = 1
  72.6
  """
  sensitivity = how.first_layer_sensitivity
  if sensitivity is None:
    sensitivity = 2 * (len(beta) / 4) * 25
  return sensitivity / (len(beta) * beta * epsilon) / batch_size


def loss_noise(
  key: Array, how: AdLM, *, num_classes: int, epsilon: float, batch_size: int
) -> Array:
  """Draws the noise N [h, K] of the loss: Laplace of scale K * (h + h^2 / 4) / eps3 / L, or 0 if
  `how.loss_noise` is False.

  h is `how.hidden`, K is `num_classes`, eps3 is `epsilon` and L is `batch_size`.
  """
  scale = num_classes * (how.hidden + how.hidden**2 / 4) / epsilon / batch_size
  like = jnp.zeros((how.hidden, num_classes), jnp.float32)
  if not how.loss_noise:
    return like
  return source.laplace(key, like, scale)


def polynomial_loss(model: Net, noise: Array) -> Callable[..., tuple[Array, Any]]:
  """Returns a loss: the mean over a batch of sum_k (max(z, 0) - z * y + log 2 - |z| / 2 + z^2 / 8),
  minus sum(N * W). The sum over k is the sigmoid cross-entropy, to second order in |z|.
  z is the logit of class k, y is 1 for the label's class, else 0, N is `noise`, and W are the
  weights of the last layer.

  The loss returns (value, statistics of the batch).
  """

  def loss(params: Any, x: Any, y: Any) -> tuple[Array, Any]:
    z, stats = model.in_batch(params, x)
    wanted = jax.nn.one_hot(y, z.shape[1])
    terms = jnp.maximum(z, 0) - z * wanted + math.log(2) - jnp.abs(z) / 2 + z**2 / 8
    return jnp.mean(terms.sum(axis=1)) - jnp.sum(noise * params["head"]), stats

  return loss


FAILED = (
  "AdLM-1: one noise map is shared by all records of a batch: the difference of two records "
  "is free of noise, so no epsilon holds for one record",
  "AdLM-2: the noise is divided by the batch size, which protects at most a batch sum",
  "AdLM-3: batch normalisation mixes records, and the relevance model is trained without "
  "privacy",
  "AdLM-4: only the last layer's polynomial coefficients get noise; the labels reach every "
  "other gradient raw",
)
NO_LOSS_NOISE = (
  "AdLM-5: the loss has no noise at all, as in the authors' code for MNIST, whose training step "
  "is fed the noise of the tests, of scale 0",
)
