"""Optimizers that a config can name, each with its own numbers.

In central training, and at the server, they use the data only through the noisy mean. dp_adam and
dp_sgld also use public numbers about its noise. So these steps are post-processing: they cost no
privacy, and no proof depends on them. Clients' optimizers use raw gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import optax
import optax.contrib

from dpjax import transforms
from dpjax.experiments.config import rules, user_code
from dpjax.experiments.config.choices import Option, UsersFunction, settings


class Noise(NamedTuple):
  """Public numbers that an optimizer may use."""

  std: Any  # of the noise on the mean gradient; see Plan.mean_noise_std
  num_examples: int


def _sgd(rate: Any, noise: Noise | None, momentum: float) -> Any:
  """Stochastic gradient descent, with momentum unless it is 0."""
  # Momentum 0 would keep a trace as large as the parameters, without using it.
  return optax.sgd(rate, momentum=momentum or None)


def _dp_sgld(rate: Any, noise: Noise, prior_precision: float) -> Any:
  return transforms.dp_sgld(
    lambda step: rate(step) / noise.num_examples,
    mean_noise_std=noise.std,
    num_examples=noise.num_examples,
    prior_precision=prior_precision,
  )


# Each step divides the average by b1, so rounding errors grow by the factor 1 / b1.
_AVERAGED = Option(
  0.9, rules.within_range(0.1, 1.0), "weight of the average in the point of a gradient"
)
_PENALTY = (rules.NON_NEGATIVE, rules.IN_FLOAT32)
_DECAY = Option(0.0, *_PENALTY)

# Optimizers of central training: name -> settings whose `make` takes (schedule, noise).
CENTRAL = {
  "sgd": settings(_sgd, momentum=Option(0.9, rules.SHARE)),
  "adam": settings(lambda rate, noise: optax.adam(rate), optax.adam),
  "adamw": settings(
    lambda rate, noise, weight_decay: optax.adamw(rate, weight_decay=weight_decay),
    optax.adamw,
    # Optax's own default: without decay it is Adam.
    weight_decay=Option(1e-4, *_PENALTY),
  ),
  "rmsprop": settings(
    lambda rate, noise, momentum: optax.rmsprop(rate, momentum=momentum),
    optax.rmsprop,
    momentum=Option(0.9, rules.SHARE),
  ),
  "adagrad": settings(lambda rate, noise: optax.adagrad(rate), optax.adagrad),
  "lion": settings(
    lambda rate, noise, weight_decay: optax.lion(rate, weight_decay=weight_decay),
    optax.lion,
    weight_decay=_DECAY,
  ),
  # Matrices get orthogonalised steps. Other parameters get steps of Adam with Nesterov's momentum.
  "muon": settings(
    lambda rate, noise, weight_decay: optax.contrib.muon(rate, weight_decay=weight_decay),
    optax.contrib.muon,
    weight_decay=_DECAY,
  ),
  # The next two optimizers average the parameters. A run evaluates and releases the average.
  "schedule_free_sgd": settings(
    lambda rate, noise, b1: optax.contrib.schedule_free_sgd(rate, b1=b1),
    optax.contrib.schedule_free_sgd,
    b1=_AVERAGED,
  ),
  "schedule_free_adamw": settings(
    lambda rate, noise, b1, weight_decay: optax.contrib.schedule_free_adamw(
      rate, b1=b1, weight_decay=weight_decay
    ),
    optax.contrib.schedule_free_adamw,
    b1=_AVERAGED,
    weight_decay=_DECAY,
  ),
  "dp_adam": settings(
    lambda rate, noise, noise_floor: transforms.dp_adam(
      rate, mean_noise_std=noise.std, noise_floor=noise_floor
    ),
    transforms.dp_adam,
    noise_floor=Option(
      0.3, *_PENALTY, "least denominator, in standard deviations of the noise"
    ),
  ),
  "dp_sgld": settings(
    _dp_sgld,
    transforms.dp_sgld,
    prior_precision=Option(0.0, *_PENALTY, "of a normal prior on every parameter"),
  ),
}
# Optimizers whose average of the parameters replaces a falling learning rate.
SCHEDULE_FREE = ("schedule_free_sgd", "schedule_free_adamw")
# Optimizers of clients and of the server: name -> settings whose `make` takes (rate, None). Each
# client starts with a new state in every round. The server calls `make` for sgd alone, and reads
# only the names of the others.
FEDERATED = {
  "sgd": settings(_sgd, momentum=Option(0.0, rules.SHARE)),
  "adam": settings(lambda rate, _: optax.adam(rate, b1=0.9, b2=0.99, eps=1e-3), optax.adam),
  "yogi": settings(lambda rate, _: optax.yogi(rate, b1=0.9, b2=0.99, eps=1e-3), optax.yogi),
  "adagrad": settings(lambda rate, _: optax.adagrad(rate, 0.0, eps=1e-3), optax.adagrad),
}


def make(
  config: Any, rate: Any, noise: Noise | None = None, section: str = "optimizer"
) -> optax.GradientTransformation:
  """Returns the Optax optimizer of a section of a config.

  Args:
    config: section with a `rule`: one of these settings, or a user's own function.
    rate: a learning rate, or a schedule: step -> learning rate.
    noise: for rules that must know the noise.
    section: name of the section, for errors.
  """
  if isinstance(config.rule, UsersFunction):
    return user_code.optimizer(config.rule.path, rate, section)
  return config.rule.make(rate, noise)
