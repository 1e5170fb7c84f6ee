"""Models over two parties' columns on shares: as good as on pooled data, and blind."""

import jax
import numpy as np
import pytest
from sklearn import datasets
from sklearn.linear_model import LogisticRegression

from dpjax.secure import mpc, vertical_models
from dpjax.secure.mpc.secureml import Recipe
from dpjax.secure.vertical import alignment, network
from dpjax.types import Example
from tests.refuses import refuses

pytest.importorskip("cryptography", reason="needs: pip install -e '.[secure]'")


def _shape(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _run(program, x_a, x_b, y):
  """`program` of both parties, each with its own arrays and the others' shapes."""
  inputs = (x_a, _shape(x_b), _shape(y)), (_shape(x_a), x_b, y)
  return mpc.run(program, *inputs, seed=0)


def _cancer():
  """Columns of two parties and labels; the parties' rows overlap and are in no order."""
  data = datasets.load_breast_cancer()
  x = np.clip((data.data - data.data.mean(0)) / data.data.std(0), -4, 4)
  names = [f"patient {i}" for i in range(len(x))]
  rng = np.random.default_rng(0)
  rows_a, rows_b = rng.permutation(len(x))[:540], rng.permutation(len(x))[:540]
  a = [names[i] for i in rows_a], x[rows_a, :15]
  b = [names[i] for i in rows_b], x[rows_b, 15:], data.target[rows_b]
  return a, b


def _aligned():
  pytest.importorskip(
    "private_set_intersection", reason="needs: pip install -e '.[vertical]'"
  )
  (ids_a, x_a), (ids_b, x_b, y) = _cancer()
  found = alignment.align(ids_a, ids_b)
  return x_a[found.rows_a], x_b[found.rows_b], y[found.rows_b].astype(float)[:, None]


def test_breast_cancer_over_two_parties_is_as_good_as_on_pooled_data():
  x_a, x_b, y = _aligned()
  train, test = slice(0, 256), slice(256, None)
  assert len(y) > 500

  def program(party, x_a, x_b, y):
    rows = vertical_models.shared_rows(party, x_a, x_b, y)
    seen = vertical_models.SharedRows(*(part[train] for part in rows))
    asked = vertical_models.SharedRows(*(part[test] for part in rows))
    batches = np.concatenate([np.random.default_rng(i).permutation(256) for i in range(6)])
    weights = vertical_models.train_logistic(party, seen, batches.reshape(-1, 64), Recipe())
    own = vertical_models.own_weights(party, weights, rows)
    return own, vertical_models.classes(party, weights, asked, to=1)

  (own_a, nothing), (own_b, found) = _run(program, x_a, x_b, y).outputs
  assert nothing is None and own_a.shape == (15,) and own_b.shape == (16,)
  state = network.TwoPartyState(own_a, own_b)
  scores = network.two_party_scores(state, Example((x_a, x_b), y))
  assert ((scores[test] > 0) == found).mean() > 0.99  # rounding where a score is 0
  x, labels = np.concatenate([x_a, x_b], axis=1), y[:, 0]
  pooled = LogisticRegression(max_iter=1000).fit(x[train], labels[train])
  accuracy = (found == labels[test]).mean()
  print(accuracy, pooled.score(x[test], labels[test]))
  assert accuracy >= pooled.score(x[test], labels[test]) - 0.005


def _digits():
  data = datasets.load_digits()
  x, y = data.data / 16, np.eye(10)[data.target]
  return x[:, :32], x[:, 32:], y


def _plain_step(layers, x_a, x_b, y, rate):
  """One step of the split network in float64: what shares should compute."""
  (w_a, c_a), (w_b, c_b), (w, c) = layers
  z = np.concatenate([x_a @ w_a + c_a, x_b @ w_b + c_b], axis=1)
  h = np.maximum(z, 0)
  error = np.clip(h @ w + c + 0.5, 0, 1) - y
  back = (error @ w.T) * (z >= 0)
  back_a, back_b = back[:, : len(c_a)], back[:, len(c_a) :]
  scale = rate / len(y)
  moved = lambda w, c, x, e: (w - scale * x.T @ e, c - scale * e.sum(0))
  return (moved(w_a, c_a, x_a, back_a), moved(w_b, c_b, x_b, back_b), moved(w, c, h, error))


def test_a_split_network_on_shares_takes_the_steps_of_the_plain_one():
  x_a, x_b, y = (part[:64] for part in _digits())
  start = vertical_models.initial_split((32, 32), hidden=8, classes=10, seed=0)
  batches, recipe = np.arange(64).reshape(2, 32), Recipe(learning_rate=0.5)

  def program(party, x_a, x_b, y):
    rows = vertical_models.shared_rows(party, x_a, x_b, y)
    network = vertical_models.train_split(party, start, rows, batches, recipe)
    return mpc.reveal(party, network), vertical_models.classes(party, network, rows, to=1)

  (got, nothing), (_, found) = _run(program, x_a, x_b, y).outputs
  want = start
  for batch in batches:
    want = _plain_step(want, x_a[batch], x_b[batch], y[batch], 0.5)
  errors = [
    np.abs(g - w).max() for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want))
  ]
  assert max(errors) < 1e-4, errors
  assert nothing is None and found.shape == (64,) and set(found) <= set(range(10))


class _Listening:
  """A link that keeps what arrives."""

  def __init__(self, link):
    self._link, self.heard = link, []

  def __getattr__(self, name):
    return getattr(self._link, name)

  def receive(self, length):
    self.heard.append(self._link.receive(length))
    return self.heard[-1]

  def exchange(self, data):
    self.heard.append(self._link.exchange(data))
    return self.heard[-1]


def _bias(heard):
  """How far the bits that arrived are from fair coins, in standard deviations."""
  bits = np.unpackbits(np.frombuffer(b"".join(heard), np.uint8))
  return abs(bits.mean() - 0.5) * 2 * bits.size**0.5


def _heard(program):
  x_a, x_b, y = (part[:32] for part in _digits())

  def listening(party, *inputs):
    party.link = _Listening(party.link)
    program(party, *inputs)
    return _bias(party.link.heard)

  return _run(listening, x_a, x_b, y).outputs


def test_what_a_party_hears_is_uniform_and_the_test_would_see_if_not():
  start = vertical_models.initial_split((32, 32), hidden=4, classes=10, seed=0)

  def blind(party, x_a, x_b, y):
    rows = vertical_models.shared_rows(party, x_a, x_b, y)
    vertical_models.train_split(
      party, start, rows, np.arange(32)[None], Recipe(learning_rate=0.5)
    )

  def leaking(party, x_a, x_b, y):
    party.mask = lambda shape: np.zeros(shape, np.uint64)  # columns sent as they are
    blind(party, x_a, x_b, y)

  assert max(_heard(blind)) < 5
  assert min(_heard(leaking)) > 5


def test_mistakes_are_one_line():
  x_a, x_b, y = _digits()

  def sharing(party, x_a, x_b, y):
    vertical_models.shared_rows(party, x_a, x_b, y)

  with refuses("x_a.shape"):
    _run(sharing, x_a[:5], x_b, y)
  with refuses("y"):
    _run(sharing, x_a, x_b, 2 * y)
  with refuses("recipe.output", value="linear"):
    vertical_models.train_logistic(None, None, None, Recipe(output="linear"))
  with refuses("recipe"):
    vertical_models.train_split(None, None, None, None, Recipe(activation="square"))
