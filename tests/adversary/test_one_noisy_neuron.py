"""A counter-example: noise on ONE sampled neuron of the output layer hides no record.

Lu et al. 2022 (arXiv:2204.01049) train a network without noise on a convexified loss, sample a
neuron of its output layer by the exponential mechanism, and add noise to that neuron. All other
neurons, and all layers below, are exact functions of the data. A user who may ask the model for
the probabilities of three classes gets the difference of two exact scores with every answer.

`_noise_on_one` is the scheme as its abstract describes it, kept here as what must NOT be used.
`_noise_on_all`, scaled to the distance of this pair, stands the same game.
"""

import numpy as np
import pytest

from dpjax.auditing.games.game import Claim, Game, linear, play

_CLASSES = 3
_EPSILON = 1.0
_DELTA = 1e-5
# Standard deviations per unit of distance of a Gaussian at that epsilon and delta, rounded up.
_MULTIPLIER = 4.0
_PAIRS = ((0, 1), (0, 2), (1, 2))


def _model(last_label):
  """The optimum [2, 3] of a strongly convex loss; one record's label differs."""
  x = np.array([[1.0, 0.2], [0.3, -1.0], [-0.8, 0.5], [0.4, 0.6]])
  labels = np.array([0, 1, 2, last_label])
  targets = np.eye(_CLASSES)[labels] - 1 / _CLASSES
  return np.linalg.solve(x.T @ x + 0.5 * np.eye(2), x.T @ targets)


_MODELS = (_model(0), _model(1))
_DISTANCE = float(np.linalg.norm(_MODELS[0] - _MODELS[1]))


def _noise_on_one(rng, n):
  """Far more noise than any bound asks for, in one neuron."""
  neuron = rng.integers(0, _CLASSES, n)
  noise = np.zeros((n, 2, _CLASSES))
  noise[np.arange(n), :, neuron] = 10 * rng.normal(size=(n, 2))
  return noise


def _noise_on_all(rng, n):
  return _MULTIPLIER * _DISTANCE * rng.normal(size=(n, 2, _CLASSES))


def _released(noise, world, rng, n):
  """What a user of n noisy models sees: log probabilities [n, 3] at one public input."""
  weights = _MODELS[world] + noise(rng, n)
  scores = np.array([0.7, -0.4]) @ weights  # [n, 3]
  shifted = scores - scores.max(axis=1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _differences(noise, world, seed, n):
  """Ratios of two classes' probabilities, and whether one is that of the model of world 0."""
  logs = _released(noise, world, np.random.default_rng([world, seed]), n)
  ratios = np.stack([logs[:, a] - logs[:, b] for a, b in _PAIRS], axis=1)
  scores = np.array([0.7, -0.4]) @ _MODELS[0]
  wanted = np.array([scores[a] - scores[b] for a, b in _PAIRS])
  is_known = (np.abs(ratios - wanted) < 1e-6).any(axis=1)
  return np.concatenate([np.clip(ratios, -9, 9), is_known[:, None]], axis=1)


@pytest.mark.parametrize(
  ("noise", "is_refuted"), [(_noise_on_one, True), (_noise_on_all, False)]
)
def test_noise_on_one_neuron_is_told_apart_and_noise_on_all_is_not(noise, is_refuted):
  outputs = lambda world, seed, n: _differences(noise, world, seed, n)
  claim = (Claim(_EPSILON, _DELTA),)
  made = Game("a label", "replace_one", claim, outputs, linear)
  (result,) = play(made, num_draws=3_000)
  assert result.can_refute
  assert result.refuted is is_refuted
  assert not is_refuted or result.epsilon_lower > 4


def test_every_answer_holds_two_exact_neurons():
  """No epsilon helps: the event has probability 1 on one input and 0 on the other."""
  known = [_differences(_noise_on_one, world, 1, 500)[:, -1] for world in range(2)]
  assert known[0].all() and not known[1].any()
