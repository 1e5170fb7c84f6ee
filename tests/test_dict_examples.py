"""Examples that are dicts of arrays: batches, gradients, evaluation and a whole run."""

import functools
import sys
import textwrap

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from configs import quickstart
from dpjax import columns, data, gradients, metrics, training
from dpjax.data import resident as resident_lib
from dpjax.data.target_kinds import needs_arrays, needs_classes
from dpjax.experiments.config import fields
from dpjax.experiments.run import loop
from dpjax.sampling import indexed
from dpjax.types import Batch, Example
from dpjax.zoo import networks
from tests import plans
from tests.refuses import refuses

_RANDOM = np.random.default_rng(0)
_ROWS = 12
_CLIP = 0.7
_INPUTS = {
  "features": _RANDOM.normal(size=(_ROWS, 3)).astype(np.float32),
  "tokens": _RANDOM.integers(0, 7, (_ROWS, 5)).astype(np.int32),
}
_LABELS = _RANDOM.integers(0, 2, _ROWS).astype(np.int32)
_TREE = {**_INPUTS, "label": _LABELS}
_PARAMS = {
  "table": _RANDOM.normal(size=(7, 4)),
  "text": _RANDOM.normal(size=(4, 2)),
  "plain": _RANDOM.normal(size=(3, 2)),
}
_PARAMS32 = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in _PARAMS.items()}


def _apply(params, x):
  words = jnp.mean(params["table"][x["tokens"]], axis=1)
  return words @ params["text"] + x["features"] @ params["plain"]


def _loss(params, example):
  x = {name: example[name][None] for name in _INPUTS}
  (logits,) = _apply(params, x)
  return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])


def _gradient(row):
  """Gradient of one example in float64, by hand."""
  tokens = _TREE["tokens"][row]
  features = _TREE["features"][row].astype(np.float64)
  words = _PARAMS["table"][tokens].mean(axis=0)
  logits = words @ _PARAMS["text"] + features @ _PARAMS["plain"]
  shares = np.exp(logits - logits.max())
  slope = shares / shares.sum() - np.eye(2)[_TREE["label"][row]]
  table = np.zeros((7, 4))
  for token in tokens:
    table[token] += _PARAMS["text"] @ slope / len(tokens)
  return {
    "table": table,
    "text": np.outer(words, slope),
    "plain": np.outer(features, slope),
  }


def _clipped(grad):
  norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(grad)))
  return jax.tree.map(lambda leaf: leaf * min(1.0, _CLIP / norm), grad)


@pytest.mark.cases(long=["vmap"], slow=...)
@pytest.mark.parametrize("method", ["auto", pytest.param("vmap", marks=pytest.mark.long)])
def test_the_clipped_sum_is_that_of_a_loop_over_single_examples(method):
  mask = np.arange(_ROWS) % 3 > 0
  grad_fn = jax.jit(gradients.clipped_grad(_loss, l2_clip_norm=_CLIP, method=method))
  total = grad_fn(_PARAMS32, Batch(_TREE, mask)).total
  expected = jax.tree.map(np.zeros_like, _PARAMS)
  for row in np.flatnonzero(mask):
    expected = jax.tree.map(np.add, expected, _clipped(_gradient(row)))
  for name, leaf in expected.items():
    np.testing.assert_allclose(total[name], leaf, rtol=2e-5, atol=1e-6)


_LEAF = st.tuples(st.sampled_from([(), (2,), (3, 1)]), st.sampled_from(["<f4", "<i4"]))
_TREES = st.recursive(
  _LEAF.map(lambda kind: {"leaf": kind}),
  lambda inner: st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2),
  max_leaves=3,
)


def _filled(kinds, size):
  is_kind = lambda node: isinstance(node, tuple)
  random = np.random.default_rng(size)
  made = lambda kind: random.integers(-3, 4, (size, *kind[0])).astype(kind[1])
  return jax.tree.map(made, kinds, is_leaf=is_kind)


@hypothesis.settings(max_examples=25, derandomize=True)
@hypothesis.given(kinds=_TREES, size=st.integers(1, 5))
def test_any_tree_is_read_by_place(kinds, size):
  tree = _filled(kinds, size)
  assert indexed.size_of(tree) == size
  places = np.array([size - 1, 0, 0])
  rows = indexed.reader(columns.by_place(tree), size)(places)
  jax.tree.map(np.testing.assert_array_equal, rows, jax.tree.map(lambda a: a[places], tree))


@pytest.mark.slow
@hypothesis.settings(max_examples=3, derandomize=True)
@hypothesis.given(kinds=_TREES)
def test_any_tree_has_the_clipped_sum_of_a_loop(kinds):
  tree = _filled(kinds, 4)
  params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:]), tree)

  def loss(params, example):
    products = jax.tree.map(lambda w, leaf: jnp.sum(w * leaf), params, example)
    return sum(jax.tree.leaves(products))

  total = gradients.clipped_grad(loss, l2_clip_norm=_CLIP)(params, tree, True).total
  expected = jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:]), tree)
  for row in range(4):
    grad = jax.tree.map(lambda leaf, row=row: leaf[row].astype(np.float64), tree)
    # Of an example of zeros the norm is zero, and so is its part.
    if any(leaf.any() for leaf in jax.tree.leaves(grad)):
      expected = jax.tree.map(np.add, expected, _clipped(grad))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), total, expected)


@pytest.mark.parametrize(
  ("tree", "field"),
  [
    ({}, "data"),
    ({"a": {}}, "data"),
    ({"a": np.zeros(3), "b": None}, "data['b']"),
    ({"a": np.zeros(3), "b": np.float32(2)}, "data['b']"),
    ({"a": np.zeros(3), "b": 2.0}, "data['b']"),
    ({"a": np.zeros(3), "b": {"c": np.zeros((2, 4))}}, "data['b']['c']"),
    ({"a": np.zeros(3), 1: np.zeros(3)}, "data"),
    ({"a": np.zeros((0, 2))}, "data"),
    ({"a": np.array(["x", "y"])}, "data"),
  ],
)
def test_a_tree_that_is_no_data_ends_in_one_line(tree, field):
  plan = _plan()
  with refuses(field) as caught:
    next(plan.batches(tree))
  assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
  ("changed", "field"),
  [
    ({"features": _INPUTS["features"][:5]}, "batch"),
    ({"features": np.float32(1)}, "batch"),
    ({"features": None}, "batch['features']"),
  ],
)
def test_a_batch_of_unequal_leaves_ends_in_one_line(changed, field):
  grad_fn = gradients.clipped_grad(_loss, l2_clip_norm=_CLIP)
  with refuses(field):
    grad_fn(_PARAMS32, {**_TREE, **changed}, True)


_plan = functools.partial(plans.of, 20, l2_clip_norm=_CLIP, normalize_by=6, num_steps=2)


@pytest.mark.slow
def test_a_plan_counts_examples_and_not_names():
  plan = dpjax.Plan.for_data(
    {name: np.repeat(leaf, 10, axis=0) for name, leaf in _TREE.items()},
    batch_size=12,
    epochs=1,
    epsilon=3.0,
    delta=1e-5,
    l2_clip_norm=1.0,
    neighboring_relation="replace_special",
  )
  assert plan.sampler.sampling_prob == pytest.approx(0.1) and plan.num_steps == 10


@pytest.mark.slow
def test_dp_sgd_gives_each_dict_a_key_of_its_own():
  def keyed(params, example):
    return _loss(params, example) * jax.random.uniform(example["key"])

  init, step = training.dp_sgd(
    keyed,
    _plan(),
    optax.sgd(0.1),
    noise_key=jax.random.key(0),
    example_key=jax.random.key(1),
  )
  step = jax.jit(step)
  state = init(_PARAMS32)
  for batch in _plan().batches(_TREE, rng=3):
    state, _ = step(state, batch)
  assert np.isfinite(state.params["table"]).all() and int(state.step) == 2
  with refuses("example_key"):
    step(init(_PARAMS32), Batch({**_TREE, "key": _LABELS}, np.ones(_ROWS, bool)))
  with refuses("example_key"):
    step(init(_PARAMS32), Batch((_LABELS, _LABELS), np.ones(_ROWS, bool)))


def _dataset(**more):
  return data.from_arrays(_INPUTS, _LABELS, num_classes=2, nominal_size=_ROWS, **more)


@pytest.mark.slow
def test_a_data_set_holds_dicts_and_an_evaluation_reads_them():
  rows = _dataset()
  assert "['features']: float32[3]" in repr(rows) and len(rows) == _ROWS
  picked = rows.subset(np.array([5, 1]))
  assert picked[0].x["tokens"].tolist() == _INPUTS["tokens"][5].tolist()
  assert not rows.x.tree["tokens"].flags.writeable
  logits = np.asarray(_apply(_PARAMS32, _INPUTS))
  scores = metrics.evaluate(_apply, _PARAMS32, rows, batch_size=5)
  assert scores["accuracy"] == np.mean(logits.argmax(axis=1) == _LABELS)
  nats = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(_ROWS), _LABELS]
  assert scores["loss"] == pytest.approx(nats.mean(), rel=1e-5)
  resident = resident_lib.resident(rows)
  np.testing.assert_array_equal(resident[np.array([3])].x["tokens"], _INPUTS["tokens"][3:4])
  loss = dpjax.losses.softmax_cross_entropy(_apply)
  assert float(loss(_PARAMS32, rows[2])) == pytest.approx(nats[2], rel=1e-5)


def test_the_digest_covers_names_values_and_order():
  digest = lambda tree: data.digest(data.from_arrays(tree, _LABELS, num_classes=2))
  whole = digest(_INPUTS)
  assert whole == digest(dict(reversed(_INPUTS.items())))
  renamed = {"features": _INPUTS["features"], "words": _INPUTS["tokens"]}
  changed = {**_INPUTS, "tokens": _INPUTS["tokens"][::-1].copy()}
  assert (
    len({whole, digest(renamed), digest(changed), digest({"x": _INPUTS["tokens"]})}) == 4
  )


@pytest.mark.parametrize(
  ("x", "more", "field"),
  [
    ({"a": np.full((12, 2), np.nan)}, {}, "x['a']"),
    ({"a": np.zeros((12, 0))}, {}, "x['a'].shape"),
    ({"a": np.full(12, 2**40)}, {}, "x['a']"),
    ({"a": np.zeros(12, bool)}, {}, "x['a']"),
    ({"a": np.zeros(11)}, {}, "y"),
    ({"a": np.zeros(12, int)}, {"vocab_size": 3}, "vocab_size"),
  ],
)
def test_a_data_set_of_wrong_dicts_ends_in_one_line(x, more, field):
  with refuses(field):
    data.from_arrays(x, _LABELS, num_classes=2, **more)


def test_what_needs_one_array_says_so():
  with refuses("launch.federate"):
    needs_arrays(_dataset(), "launch.federate")
  with refuses("audit"):
    needs_classes(_dataset(), "audit")
  with refuses("x"):
    data.preprocess.center(_dataset())
  with refuses("x"):
    _dataset().replace_rows(np.array([0]), _dataset().subset([0]))


_MINE = """
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
import dpjax

def load():
  random = np.random.default_rng(0)
  y = random.integers(0, 2, 300)
  x = {
    "features": random.normal(size=(300, 3)) + y[:, None],
    "tokens": random.integers(0, 5, (300, 4)) + 2 * y[:, None],
  }
  make = lambda part, **more: dpjax.data.from_arrays(
    {name: leaf[part] for name, leaf in x.items()}, y[part], num_classes=2, **more)
  return make(slice(240), nominal_size=240), make(slice(240, 300), split="test")

class Net(nn.Module):
  num_classes: int
  @nn.compact
  def __call__(self, x):
    words = nn.Embed(7, 4)(x["tokens"]).mean(axis=1)
    return nn.Dense(self.num_classes)(jnp.concatenate([words, x["features"]], axis=1))

class Nnx(nnx.Module):
  def __init__(self, num_classes, rngs, input_shape):
    self.words = nnx.Embed(7, 4, rngs=rngs)
    self.head = nnx.Linear(4 + input_shape["features"][0], num_classes, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)
  def __call__(self, x):
    words = self.words(x["tokens"]).mean(axis=1)
    return self.head(self.dropout(jnp.concatenate([words, x["features"]], axis=1)))

class Equinox(eqx.Module):
  words: eqx.nn.Embedding
  head: eqx.nn.Linear
  dropout: eqx.nn.Dropout
  def __init__(self, num_classes, key, input_shape):
    first, second = jax.random.split(key)
    self.words = eqx.nn.Embedding(7, 4, key=first)
    self.head = eqx.nn.Linear(4 + input_shape["features"][0], num_classes, key=second)
    self.dropout = eqx.nn.Dropout(0.1)
  def __call__(self, x, key=None):
    words = jax.vmap(self.words)(x["tokens"]).mean(axis=0)
    return self.head(self.dropout(jnp.concatenate([words, x["features"]]), key=key))
"""


@pytest.mark.long
@pytest.mark.parametrize("model", ["Net", "Nnx", "Equinox"])
def test_a_run_trains_on_dicts_with_a_model_of_the_user(model, tmp_path, monkeypatch):
  pytest.importorskip("equinox")
  (tmp_path / "mine_dicts.py").write_text(textwrap.dedent(_MINE))
  monkeypatch.syspath_prepend(tmp_path)
  changes = {
    "data.name": "mine_dicts:load",
    "data.center": False,
    "model.name": f"mine_dicts:{model}",
    "model.options": {},
    "privacy.sampling_prob": 0.2,
    "num_steps": 30,
    "eval_every": 15,
    "checkpoint_every": 15,
  }
  config = fields.replace_all(quickstart.get_config(), changes)
  result = loop.train(config, tmp_path / "run")
  assert result["test_accuracy"] > 0.75 and 2.9 < result["epsilon"] <= 3.0
  mine = sys.modules["mine_dicts"]
  params = {"params": {}}
  with np.load(tmp_path / "run" / "params.npz") as saved:
    for name in saved.files:
      _, layer, leaf = name.split("/")
      params["params"].setdefault(layer, {})[leaf] = saved[name]
  test = mine.load()[1]
  network = networks.build(f"mine_dicts:{model}", num_classes=2)
  network.init(jax.random.key(0), test.x[:1])
  scores = metrics.evaluate(network.apply, params, test)
  assert scores["accuracy"] == pytest.approx(result["test_accuracy"])
  audited = fields.replace_all(config, {"audit": "canaries"})
  with refuses("audit"):
    loop.train(audited, tmp_path / "audited")
  with refuses("run"):
    dpjax.serving.Predictor.load(tmp_path / "run")
  # A row of the training data is an Example whose x is a dict.
  assert isinstance(mine.load()[0][0], Example)
