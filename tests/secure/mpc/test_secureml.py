"""Training and prediction on shares against the same steps in floating point."""

import jax
import numpy as np
import pytest

from dpjax.secure import mpc
from dpjax.secure.mpc import in_the_clear, private_values, secureml
from dpjax.validate import UserError
from tests.refuses import refuses

pytest.importorskip("cryptography", reason="needs the extra 'secure'")
pytest.importorskip("Crypto", reason="needs the extra 'secure'")


def train_on_shares(network, x, y, batches, recipe, **settings):
  """(the network, what it took)."""
  zero, one = private_values.split((network, x, y))
  run = lambda party, *shares: secureml.train(party, *shares, batches, recipe)
  ran = mpc.run(run, zero, one, **settings)
  return private_values.join(*ran.outputs), ran.spent


def _problem(outputs=3):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(60, 6))
  y = np.eye(3)[x[:, :3].argmax(1)][:, :outputs]
  return x, y, np.stack([rng.permutation(60)[:16] for _ in range(10)])


@pytest.mark.cases(long=["relu-normalized_relu-0.125-masked"])
@pytest.mark.parametrize(
  ("hidden", "output", "rate", "truncation"),
  [
    ("relu", "sigmoid", 0.125, "masked"),
    ("relu", "sigmoid", 0.125, "local"),
    ("square", "linear", 0.0078125, "masked"),
    ("relu", "normalized_relu", 0.125, "masked"),
  ],
)
def test_a_network_is_that_of_floating_point(hidden, output, rate, truncation):
  x, y, batches = _problem()
  network = secureml.initial((6, 5, 3), seed=1)
  recipe = secureml.Recipe(activation=hidden, output=output, learning_rate=rate)
  found, _ = train_on_shares(network, x, y, batches, recipe, seed=0, truncation=truncation)
  exact = in_the_clear.train(network, x, y, batches, recipe)
  moved = max(np.max(abs(a - b)) for a, b in _pairs(network, exact))
  assert moved > 0.01
  assert max(np.max(abs(a - b)) for a, b in _pairs(found, exact)) < 1e-3


def _pairs(first, second):
  return zip(jax.tree.leaves(list(first)), jax.tree.leaves(list(second)))


def breast_cancer():
  """scikit-learn's, standardised: (x, y [n, 1]) to train and to test."""
  from sklearn.datasets import load_breast_cancer

  x, y = load_breast_cancer(return_X_y=True)
  x, order = (x - x.mean(0)) / x.std(0), np.random.default_rng(0).permutation(len(x))
  x, y = x[order], y[order, None].astype(float)
  return (x[:456], y[:456]), (x[456:], y[456:])


def test_logistic_regression_on_breast_cancer_is_as_accurate_as_plain():
  (x, y), (x_test, y_test) = breast_cancer()
  network = (secureml.Dense(np.zeros((30, 1)), np.zeros(1)),)
  recipe = secureml.Recipe(learning_rate=0.5)
  rng = np.random.default_rng(1)
  batches = np.stack([rng.choice(456, 64, replace=False) for _ in range(70)])
  exact = in_the_clear.train(network, x, y, batches, recipe)

  def program(party, network, x, y, x_test):
    network = secureml.train(party, network, x, y, batches, recipe)
    return network, secureml.predict(party, network, x_test, recipe, to=1)

  ran = mpc.run(program, *private_values.split((network, x, y, x_test)))
  (zero, nothing), (one, answers) = ran.outputs
  assert nothing is None  # who does not ask learns nothing
  assert (answers == in_the_clear.predict(exact, x_test, recipe)).all()
  assert np.mean(answers == y_test[:, 0]) >= 0.97
  assert (
    max(np.max(abs(a - b)) for a, b in _pairs(private_values.join(zero, one), exact)) < 1e-3
  )


def test_predictions_of_several_classes_for_both():
  x, *_ = _problem()
  network = secureml.initial((6, 5, 3), seed=1)
  recipe = secureml.Recipe()
  ran = mpc.run(
    lambda party, network, x: secureml.predict(party, network, x, recipe),
    *private_values.split((network, x)),
  )
  assert (ran.outputs[0] == in_the_clear.predict(network, x, recipe)).all()
  assert (ran.outputs[0] == ran.outputs[1]).all()


def test_a_training_that_broke_off_goes_on_from_the_shares_that_both_kept(tmp_path):
  x, y, batches = _problem()
  recipe = secureml.Recipe()
  network = secureml.initial((6, 5, 3), seed=1)
  shares = private_values.split((network, x, y))
  for part in (batches[:4], batches[4:]):  # two sessions, with other keys
    run = lambda party, *inputs: secureml.train(party, *inputs, part, recipe)
    kept = mpc.run(run, *shares).outputs
    for number, layers in enumerate(kept):
      np.savez(tmp_path / f"{number}.npz", *jax.tree.leaves(layers))
    files = [np.load(tmp_path / f"{number}.npz") for number in (0, 1)]
    found = [_layers(file) for file in files]
    shares = [(layers, *rest) for layers, (_, *rest) in zip(found, shares)]
  exact = in_the_clear.train(network, x, y, batches, recipe)
  assert (
    max(np.max(abs(a - b)) for a, b in _pairs(private_values.join(*found), exact)) < 1e-3
  )


def _layers(file):
  leaves = [file[name] for name in file.files]
  file.close()
  return tuple(secureml.Dense(*pair) for pair in zip(leaves[::2], leaves[1::2]))


def test_what_a_step_takes_is_counted():
  """One triple per product, one comparison for the hidden layer and one for the output."""
  x, y, batches = _problem()
  _, spent = train_on_shares(
    secureml.initial((6, 5, 3), seed=1), x, y, batches[:1], secureml.Recipe()
  )
  assert spent[0].dealt == {"matrices": 5, "truncation": 5, "sign": 2, "elementwise": 1}
  assert (
    spent[0].dealt == spent[1].dealt and spent[0].bytes_dealt == 0 < spent[1].bytes_dealt
  )
  assert spent[0].bytes_sent == spent[0].bytes_received == spent[1].bytes_sent
  assert spent[0].rounds == 5 + 5 + 2 * 8 + 1


@pytest.mark.parametrize(
  ("change", "line"),
  [
    (
      {"recipe": secureml.Recipe(learning_rate=0.1)},
      "learning_rate=0.1: over the batch size, 16",
    ),
    ({"x": np.ones((60, 7))}, r"network: is \[6, 5, 3\], for x \(60, 7\)"),
    ({"y": np.ones((59, 3))}, r"x.shape=\(60, 6\): "),
    ({"batches": np.array([[60]])}, r"batches: hold 60, must be in \[0, 60\)"),
    ({"batches": np.ones(3)}, "batches: must be"),
  ],
)
def test_what_does_not_fit_is_one_line(change, line):
  x, y, batches = _problem()
  asked = {"x": x, "y": y, "batches": batches, "recipe": secureml.Recipe()} | change
  with pytest.raises(UserError, match=line):
    train_on_shares(secureml.initial((6, 5, 3), seed=1), **asked)


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize(
  ("setting", "field"),
  [
    ({"activation": "tanh"}, "activation"),
    ({"output": "softmax"}, "output"),
    ({"learning_rate": 0.0}, "learning_rate"),
  ],
)
def test_a_setting_that_nobody_has_is_one_line(setting, field):
  with refuses(field):
    secureml.Recipe(**setting)
