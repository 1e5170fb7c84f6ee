"""Model inversion against closed forms: a linear softmax, a map that can be inverted, and none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special

import dpjax
from dpjax import attacks
from dpjax.attacks import class_inversion
from dpjax.attacks.answer_inversion import judge_decoder
from dpjax.attacks.fitting import Fit
from dpjax.data import from_arrays
from dpjax.validate import UserError
from tests.refuses import refuses

_KEY = jax.random.key(0)


def _linear(w, x):
  return x.reshape(len(x), -1) @ w


@pytest.mark.slow
def test_two_linear_classes_are_inverted_along_the_difference_of_their_weights():
  """At the optimum l2 x = (1 - p) (w_k - w_j): a direction, and one equation for its length."""
  weights = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
  find = attacks.ClassInversion(low=None, high=None, l2=0.5, steps=600)
  found = find(_linear, weights, (6,), classes=[0, 1], key=_KEY)
  for x, this in zip(found.x, (0, 1)):
    away = weights[:, this] - weights[:, 1 - this]
    square = float(away @ away)
    short = lambda t, s=square: 0.5 * t - special.expit(-t * s)
    length = optimize.brentq(short, 0, 10)
    np.testing.assert_allclose(x, length * away, atol=2e-3)
    p = special.expit(length * square)
    np.testing.assert_allclose(found.confidence[this], p, atol=1e-3)


@pytest.mark.slow
def test_the_prior_holds_what_the_class_does_not_say():
  """Inputs that no class reads stay at the prior's mean; total variation smooths the rest."""
  weights = np.zeros((16, 2), np.float32)
  weights[5, 0] = 4.0
  mean = np.full((4, 4, 1), 0.5, np.float32)
  find = functools.partial(attacks.ClassInversion, mean=mean, spread=0.1, l2=0.1)
  look = lambda options: find(**options)(_linear, weights, (4, 4, 1), classes=[0], key=_KEY)
  sharp, smooth = (look({"total_variation": tv}).x[0].ravel() for tv in (0.0, 1.0))
  assert sharp[5] > 0.95
  np.testing.assert_allclose(np.delete(sharp, 5), 0.5, atol=0.01)
  assert smooth[5] < sharp[5] and smooth[1] > sharp[1] + 0.05


def _blobs(seed, n=400):
  """Four classes of 12 x 12 images, each bright in another quarter."""
  rng = np.random.default_rng(seed)
  y = rng.integers(0, 4, n)
  x = rng.random((n, 12, 12, 1)) * 0.3
  for row, label in zip(x, y):
    top, left = 6 * (label // 2), 6 * (label % 2)
    row[top : top + 6, left : left + 6] += 0.6
  return from_arrays(x, y, num_classes=4)


@functools.cache
def _nets():
  model, loss = dpjax.zoo.networks.build("linear", num_classes=4), _cross_entropy
  first = lambda seed: model.init(jax.random.key(seed), jnp.zeros((1, 12, 12, 1)))
  fit = Fit(steps=150, learning_rate=0.01, batch_size=64)
  train = lambda seed: fit(
    functools.partial(loss, model), first(seed), _blobs(seed)[:], seed=seed
  )
  return model.apply, train(0), train(1)


def _cross_entropy(model, params, batch):
  logits = model.apply(params, batch.x)
  return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(batch.y)), batch.y])


@pytest.mark.long
def test_an_independent_network_recognises_what_was_inverted_and_no_noise():
  apply, target, judge = _nets()
  find = attacks.ClassInversion(total_variation=1.0, steps=200)
  found = find(apply, target, (12, 12, 1), classes=range(4), count=5, key=_KEY)
  score = class_inversion.judge_inversion(found, apply, judge, _blobs(2), target=target)
  assert found.y.tolist() == np.repeat(range(4), 5).tolist()
  assert score.recognised.rate == 1 and score.ssim.mean() > 0.3
  noise = np.random.default_rng(0).random(found.x.shape)
  blind = class_inversion.judge_inversion(
    found._replace(x=noise), apply, judge, _blobs(2), target=target
  )
  assert blind.recognised.rate < 0.7 and blind.ssim.mean() < score.ssim.mean() - 0.1
  assert blind.mse.mean() > score.mse.mean()


@pytest.mark.long
def test_bad_inversions_are_one_line():
  apply, target, judge = _nets()
  refused = lambda words: pytest.raises(UserError, match=words)
  find = attacks.ClassInversion(steps=1)
  with refused(r"classes=\[4\]: must be in \[0, 4\)"):
    find(apply, target, (12, 12, 1), classes=[4], key=_KEY)
  with refused(r"classes=\[\]: must be in"):
    find(apply, target, (12, 12, 1), classes=[], key=_KEY)
  with refused(r"shape=\(5, 5, 1\): the model takes no such input"):
    find(apply, target, (5, 5, 1), classes=[0], key=_KEY)
  with refused("must be an image"):
    smooth = attacks.ClassInversion(total_variation=1.0)
    smooth(apply, target, (144,), classes=[0], key=_KEY)
  with refused("low=1.0: must be below high=1.0"):
    attacks.ClassInversion(low=1.0)
  found = find(apply, target, (12, 12, 1), classes=[0, 3], key=_KEY)
  with refused("the judge must be another network"):
    class_inversion.judge_inversion(found, apply, target, _blobs(2), target=target)
  with refused(r"classes=\[0, 3\]: must be in \[0, 2\)"):
    two = np.zeros((144, 2), np.float32)
    class_inversion.judge_inversion(found, _linear, two, _blobs(2), target=target)
  threes = _blobs(2)
  with refused("hold none of class 0"):
    part = threes.subset(threes.y == 3)
    class_inversion.judge_inversion(found, apply, judge, part, target=target)
  with refused("must be alike"):
    other = from_arrays(np.zeros((4, 2)), [0, 1, 2, 3], num_classes=4)
    class_inversion.judge_inversion(found, apply, judge, other, target=target)


_FIT = Fit(steps=600, learning_rate=0.01, batch_size=64)


def _softmax_answers(x, seed=3):
  """Three numbers decide four probabilities, and are decided by them."""
  weights = np.random.default_rng(seed).normal(size=(3, 4))
  return special.softmax(x @ weights, axis=1)


@pytest.mark.slow
def test_answers_that_determine_the_input_are_decoded():
  rng = np.random.default_rng(0)
  own, others = (rng.normal(size=(500, 3)).astype(np.float32) for _ in range(2))
  decoder = attacks.AnswerInversion((64,), _FIT)(_softmax_answers(own), own, seed=0)
  score = judge_decoder(decoder, _softmax_answers(others), others)
  assert score.explained > 0.95 and score.nearer.interval[0] > 0.9


@pytest.mark.long
def test_answers_that_say_nothing_are_decoded_to_the_mean():
  rng = np.random.default_rng(0)
  own, others = (rng.normal(size=(500, 3)).astype(np.float32) for _ in range(2))
  nothing = lambda: special.softmax(rng.normal(size=(500, 4)), axis=1)
  decoder = attacks.AnswerInversion((8,), Fit(100, 0.003, 64))(nothing(), own, seed=0)
  score = judge_decoder(decoder, nothing(), others)
  assert score.explained < 0.05 and score.nearer.interval[0] < 0.5


@pytest.mark.long
def test_a_decoder_of_labels_alone_is_no_nearer_than_the_class_mean():
  rng = np.random.default_rng(0)
  y = rng.integers(0, 4, 800)
  x = (3 * rng.normal(size=(4, 5))[y] + rng.normal(size=(800, 5))).astype(np.float32)
  answers = np.eye(4)[y]
  decoder = attacks.AnswerInversion((32,), _FIT)(answers[:400], x[:400], seed=0)
  means = np.stack([x[:400][y[:400] == k].mean(axis=0) for k in range(4)])
  score = judge_decoder(decoder, answers[400:], x[400:], class_means=means)
  assert score.explained > 0.5
  assert abs(score.mse.mean() / score.mse_of_class_mean.mean() - 1) < 0.05


@pytest.mark.slow
def test_bad_answers_are_one_line():
  x, p = np.zeros((6, 2), np.float32), np.full((6, 2), 0.5)
  invert = attacks.AnswerInversion((4,), Fit(steps=2, batch_size=2))
  with refuses("answers"):
    invert(np.array([[-1.0, 2.0]] * 6), x, seed=0)
  with refuses("x"):
    invert(p, x[:5], seed=0)
  with refuses("answers"):
    invert(p[:0], x[:0], seed=0)
  decoder = invert(p, x, seed=0)
  with refuses("answers"):
    decoder(np.full((1, 3), 1 / 3))
  with refuses("x.shape", value=(6, 3)):
    judge_decoder(decoder, p, np.zeros((6, 3)))
  with refuses("class_means.shape"):
    judge_decoder(decoder, p, x, class_means=np.zeros((3, 2)))


def test_class_means_are_means():
  data = from_arrays(np.array([[1.0], [3.0], [7.0]]), [0, 0, 1], num_classes=3)
  assert class_inversion.class_means(data, [0, 1]).tolist() == [[2.0], [7.0], [0.0]]
