"""dense - square - dense on ciphertexts equals itself in the clear, in both layouts."""

import numpy as np
import pytest

from dpjax.secure.homomorphic import inference
from dpjax.secure.homomorphic.inference import ImageOwner, ModelOwner, SquareNetwork
from tests.refuses import refuses


@pytest.fixture(autouse=True)
def tenseal():
  pytest.importorskip("tenseal", reason="needs TenSEAL: pip install -e '.[he]'")


def _network(d, h, k, seed=0, scale=1.0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=shape) / np.sqrt(shape[0]) * scale
  return SquareNetwork(draw(d, h), draw(h), draw(h, k), draw(k))


def _asked(net, x, layout):
  owner = ImageOwner(*net.kernel.shape, net.head.shape[1], layout=layout)
  model = ModelOwner(net, owner.public, layout=layout)
  return owner.logits(model.answer(owner.encrypt(x)), len(x))


@pytest.mark.cases(quick=["sizes0-pixels", "sizes1-pixels", "sizes3-pixels"], long=...)
@pytest.mark.parametrize("layout", inference.LAYOUTS)
@pytest.mark.parametrize("sizes", [(6, 4, 3), (9, 1, 2), (20, 5, 10), (3, 8, 5)])
def test_answers_are_those_in_the_clear_whatever_the_sizes(sizes, layout):
  net = _network(*sizes)
  x = np.random.default_rng(1).uniform(-1, 1, (3, sizes[0]))
  error = np.abs(_asked(net, x, layout) - net.logits(x)).max()
  assert error < 1e-3 * max(1, np.abs(net.logits(x)).max())


def test_a_question_holds_many_images_which_do_not_mix():
  net = _network(16, 8, 10)
  x = np.zeros((64, 16))
  x[5] = 1.0
  logits = _asked(net, x, "packed")
  np.testing.assert_allclose(logits, net.logits(x), atol=1e-3)


def test_a_lost_square_would_be_seen():
  net = _network(6, 4, 3)
  x = np.random.default_rng(1).uniform(-1, 1, (3, 6))
  linear = (x @ net.kernel + net.bias) @ net.head + net.head_bias
  assert np.abs(_asked(net, x, "packed") - linear).max() > 0.1


def test_the_bound_on_logits_holds_and_is_asked_of_the_model():
  net = _network(6, 4, 3)
  corners = np.stack(np.meshgrid(*[[-1, 1]] * 6), -1).reshape(-1, 6)
  assert np.abs(net.logits(corners)).max() <= net.largest_logit
  owner = ImageOwner(6, 4, 3)
  with refuses("network"):
    ModelOwner(_network(6, 4, 3, scale=100.0), owner.public)
  with refuses("network"):
    ModelOwner(net._replace(bias=net.bias * np.nan), owner.public)


@pytest.mark.parametrize(
  ("images", "field"),
  [
    (np.ones((1000, 6)), "images"),
    (2 * np.ones((1, 6)), "images"),
    (np.full((1, 6), np.nan), "images"),
  ],
)
def test_questions_that_cannot_be_asked(images, field):
  with refuses(field):
    ImageOwner(6, 4, 3).encrypt(images)


def test_sizes_that_no_ciphertext_holds():
  with refuses("num_inputs", value=5000):
    ImageOwner(5000, 64, 10)
  with refuses("layout", value="rows"):
    ImageOwner(6, 4, 3, layout="rows")


def test_the_parameters_of_another_network_are_refused():
  layer = {"kernel": np.ones((2, 2)), "bias": np.ones(2)}
  net = inference.network_of({"params": {"dense_0": layer, "head": layer}})
  assert net.logits(np.ones((1, 2))).tolist() == [[19.0, 19.0]]
  with refuses("params"):
    inference.network_of({"params": {"dense_0": layer, "dense_1": layer, "head": layer}})


@pytest.mark.cases(long=["packed"])
@pytest.mark.parametrize("layout", inference.LAYOUTS)
def test_units_without_weights_are_no_error(layout):
  net = _network(6, 4, 3)
  net = net._replace(kernel=net.kernel * [1, 0, 1, 1], head=net.head * [1, 0, 1])
  x = np.random.default_rng(1).uniform(-1, 1, (3, 6))
  np.testing.assert_allclose(_asked(net, x, layout), net.logits(x), atol=1e-3)
  dark = net._replace(kernel=np.zeros((6, 4)))
  np.testing.assert_allclose(_asked(dark, x, layout), dark.logits(x), atol=1e-3)


@pytest.mark.cases(long=["packed"])
@pytest.mark.parametrize("layout", inference.LAYOUTS)
def test_images_and_questions_of_another_size_are_refused(layout):
  """One column would be broadcast, a short question cut: wrong logits without a word."""
  net, x = _network(6, 4, 3), np.zeros((2, 6))
  owner = ImageOwner(6, 4, 3, layout=layout)
  for images in (x[:, :1], x[:, :5], x.reshape(2, 3, 2), x[0]):
    with refuses("images"):
      owner.encrypt(images)
  model = ModelOwner(net, owner.public, layout=layout)
  question = owner.encrypt(x)
  for wrong in ([], question * 2):
    with refuses("question"):
      model.answer(wrong)
  answer = model.answer(question)
  with refuses("num_images", value=-1):
    owner.logits(answer, -1)
  with refuses("answer"):
    owner.logits([], 2)


def test_layers_too_unlike_in_size_are_refused():
  """One undoes the other, and what is left is rounding: logits off by hundreds."""
  net = _network(6, 4, 3)
  for scale in (1e-4, 1e5, 1e8):
    kernel, bias = net.kernel * scale, net.bias * scale
    unlike = SquareNetwork(kernel, bias, net.head / scale**2, net.head_bias)
    with refuses("network"):
      ModelOwner(unlike, ImageOwner(6, 4, 3).public)
