"""Relevance against closed forms: oracles T1-T5 of the design, and what must be refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import models
from dpjax.relevance import tape as tapes
from dpjax.relevance.lrp import Lrp, conservation_gap, heat_map, relevance
from tests.refuses import refuses

_EXACT = Lrp(stabilizer=0.0)
_IMAGES = (3, 8, 8, 2)


def _net(activation="relu", *, zero_bias=True, pool=True, seed=0, shape=_IMAGES):
  model = models.ConvNet(
    num_classes=4, filters=(3, 4), pool_after=(1, 2) if pool else (), dense_sizes=(6,),
    activation=activation,
  )  # fmt: skip
  x = jax.random.uniform(jax.random.key(seed), shape)
  params = model.init(jax.random.key(seed + 1), x)
  shift = lambda path, leaf: (
    leaf if leaf.ndim > 1 else (jnp.zeros_like(leaf) if zero_bias else leaf + 0.3)
  )
  return model.apply, jax.tree_util.tree_map_with_path(shift, params), x


def _sums(scores):
  return np.asarray(scores).reshape(len(scores), -1).sum(axis=1)


# --- T1: one layer, epsilon rule, with a bias


@pytest.mark.cases(slow=["conv-1.0"], long=...)
@pytest.mark.parametrize("stabilizer", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("layer", ["dense", "conv"])
def test_t1_what_one_layer_keeps_is_the_share_without_bias(layer, stabilizer):
  x = jax.random.normal(jax.random.key(0), (5, 6, 6, 2))
  module = (
    nn.Dense(7) if layer == "dense" else nn.Conv(7, (3, 3), bias_init=nn.initializers.ones)
  )
  x = x.reshape(5, -1) if layer == "dense" else x
  params = module.init(jax.random.key(1), x)
  params = jax.tree.map(lambda leaf: leaf + 0.1, params)
  flat = lambda params, x: module.apply(params, x).reshape(5, -1)
  how = Lrp(target="all_logits", stabilizer=stabilizer)
  found = relevance(flat, params, x, jnp.zeros(5, int), how)
  z = np.asarray(found.logits, np.float64)
  bias = np.resize(np.asarray(params["params"]["bias"], np.float64), z.shape[1])
  expected = (z * (z - bias) / (z + stabilizer * np.where(z >= 0, 1, -1))).sum(axis=1)
  np.testing.assert_allclose(_sums(found.scores), expected, rtol=2e-4, atol=2e-4)


# --- T2, T3: no biases, no stabilizer


@pytest.mark.long
@pytest.mark.parametrize(
  ("activation", "target"),
  [
    *(("relu", target) for target in ("true_class", "predicted_class", "all_logits")),
    *((a, "true_class") for a in ("tanh", "sigmoid", "leaky_relu", "gelu")),
  ],
)
def test_t2_without_bias_the_relevance_is_conserved_through_the_net(activation, target):
  apply, params, x = _net(activation)
  y = jnp.array([0, 1, 3])
  found = relevance(apply, params, x, y, Lrp(target=target, stabilizer=0.0))
  start = {
    "true_class": found.logits[jnp.arange(3), y],
    "predicted_class": found.logits.max(axis=1),
    "all_logits": found.logits.sum(axis=1),
  }[target]
  np.testing.assert_allclose(found.start, start, rtol=1e-6)
  scale = np.abs(np.asarray(found.scores)).reshape(3, -1).sum(axis=1)
  assert (np.abs(_sums(found.scores) - start) < 1e-4 * scale).all()


@pytest.mark.long
def test_t2_a_stabilizer_absorbs_relevance():
  apply, params, x = _net()
  gaps = [
    float(
      conservation_gap(relevance(apply, params, x, jnp.arange(3), Lrp(stabilizer=e)))[0]
    )
    for e in (1e-6, 0.5)
  ]
  assert gaps[0] < 1e-3 < gaps[1]


@pytest.mark.slow
def test_t3_relu_and_max_pool_without_bias_give_gradient_times_input():
  apply, params, x = _net()
  y = jnp.array([2, 0, 1])
  logit = lambda x: apply(params, x)[jnp.arange(3), y].sum()
  expected = x * jax.grad(logit)(x)
  found = relevance(apply, params, x, y, _EXACT)
  np.testing.assert_allclose(found.scores, expected, rtol=2e-3, atol=2e-5)
  assert (found.scores < 0).mean() > 0.2  # so p of eq. 10 is not in [0, 1]: C2


@pytest.mark.long
def test_max_pooling_by_reduce_window_equals_ours():
  conv = nn.Conv(3, (3, 3), use_bias=False)
  x = jax.random.uniform(jax.random.key(0), (2, 8, 8, 1))
  params = conv.init(jax.random.key(1), x)
  ours = lambda p, x: models.max_pool(jnp.tanh(conv.apply(p, x))).reshape(2, -1)
  theirs = lambda p, x: nn.max_pool(jnp.tanh(conv.apply(p, x)), (2, 2), (2, 2)).reshape(
    2, -1
  )
  y = jnp.array([3, 17])
  np.testing.assert_allclose(
    relevance(ours, params, x, y, _EXACT).scores,
    relevance(theirs, params, x, y, _EXACT).scores,
    atol=1e-6,
  )


@pytest.mark.long
@pytest.mark.parametrize("how", [_EXACT, Lrp(rule="z_plus"), Lrp(rule="alpha_beta")])
def test_pools_branches_and_moves_conserve(how):
  def apply(w, x):
    left = nn.avg_pool(jax.nn.relu(x @ w), (2, 2), (2, 2))
    right = nn.max_pool(jnp.flip(x, axis=1), (2, 2), (2, 2))
    both = jnp.concatenate([left + right, jnp.transpose(right, (0, 2, 1, 3))], axis=-1)
    return jnp.pad(both.reshape(x.shape[0], -1), [(0, 0), (0, 3)])

  x = jax.random.uniform(jax.random.key(0), (2, 4, 4, 2))
  w = jax.random.uniform(jax.random.key(1), (2, 2))
  found = relevance(apply, w, x, jnp.array([1, 6]), how)
  np.testing.assert_allclose(_sums(found.scores), found.start, rtol=1e-4)


def test_the_readme_example_of_a_residual_sum_by_hand():
  apply = lambda w, x: jax.nn.relu(x) + x @ w
  found = relevance(apply, jnp.array([[2.0, 0.0], [0.0, 2.0]]), jnp.array([[1.0, 4.0]]),
                    jnp.array([1]), _EXACT)  # fmt: skip
  assert found.scores.tolist() == [[0.0, 12.0]]  # 4 of relu, 8 of the product


# --- T4: z+ and the box


@pytest.mark.long
@pytest.mark.parametrize("input_rule", ["same", "z_box"])
def test_t4_z_plus_has_the_sign_of_the_logit_and_conserves(input_rule):
  apply, params, x = _net("relu", zero_bias=False)
  how = Lrp(rule="z_plus", input_rule=input_rule)
  found = relevance(apply, params, x, jnp.array([0, 1, 2]), how)
  sign = np.sign(np.asarray(found.start))
  assert (np.asarray(found.scores) * sign[:, None, None, None] >= -1e-7).all()
  np.testing.assert_allclose(_sums(found.scores), found.start, rtol=1e-5)


def test_t4_the_box_rule_by_hand():
  w, x = np.array([[2.0], [-1.0]]), np.array([[0.5, 0.25]])
  # Z = 1 - 0.25 - f+(0) - f-(1) = 0.75 + 1; R = x w s - 1 * min(w, 0) s
  expected = 0.75 / 1.75 * np.array([[0.5 * 2, -0.25 + 1]])
  found = relevance(
    lambda w, x: x @ w, jnp.asarray(w), jnp.asarray(x), jnp.array([0]),
    Lrp(rule="z_plus", input_rule="z_box"),
  )  # fmt: skip
  np.testing.assert_allclose(found.scores, expected, rtol=1e-6)


@pytest.mark.cases(slow=["0.00392156862745098"])
@pytest.mark.parametrize("factor", [1 / 255, -2.0])
def test_the_box_of_a_scaled_input_is_that_of_the_input(factor):
  """The same network with the factor in its weights has the same relevance."""
  w = jax.random.normal(jax.random.key(0), (6, 3))
  x = jax.random.uniform(jax.random.key(1), (2, 3, 2), maxval=255.0)
  how = Lrp(rule="z_plus", input_rule="z_box", low=0.0, high=255.0)
  y = jnp.array([0, 2])
  scaled = lambda w, x: (factor * x).reshape(2, 6) @ w
  folded = lambda w, x: x.reshape(2, 6) @ (factor * w)
  later = lambda w, x: (factor * x.reshape(2, 6)) @ w
  expected = relevance(folded, w, x, y, how).scores
  for apply in (scaled, later):
    np.testing.assert_allclose(relevance(apply, w, x, y, how).scores, expected, rtol=2e-5)


def test_alpha_beta_by_hand():
  w, x = jnp.array([[2.0], [-1.0], [1.0]]), jnp.array([[1.0, 1.0, 3.0]])
  found = relevance(lambda w, x: x @ w, w, x, jnp.array([0]), Lrp(rule="alpha_beta"))
  # z = 4; contributions 2, -1, 3; alpha 2 shares the positive, beta 1 the negative
  np.testing.assert_allclose(found.scores, [[2 * 4 * 0.4, -4.0, 2 * 4 * 0.6]], rtol=1e-6)


def test_z_plus_folds_a_negative_scale_behind_the_weights():
  w = jnp.array([[1.0], [-2.0]])
  scaled = lambda w, x: -0.5 * (x @ w) + 0.25
  folded = lambda w, x: x @ (-0.5 * w) + 0.25
  x, y, how = jnp.array([[1.0, 1.0]]), jnp.array([0]), Lrp(rule="z_plus")
  np.testing.assert_allclose(
    relevance(scaled, w, x, y, how).scores, relevance(folded, w, x, y, how).scores
  )


# --- T5, and what an activation is


@pytest.mark.slow
def test_t5_a_zero_input_gets_no_relevance():
  apply, params, x = _net("tanh", zero_bias=False)
  x = x * (jax.random.uniform(jax.random.key(9), x.shape) < 0.5)
  scores = relevance(apply, params, x, jnp.arange(3), Lrp()).scores
  assert (np.asarray(scores)[np.asarray(x) == 0] == 0).all()


@pytest.mark.cases(long=["relu", "tanh", "gelu"])
@pytest.mark.parametrize(
  "activation",
  [
    *("relu", "tanh", "sigmoid", "leaky_relu", "tempered_sigmoid", "gelu", "elu", "silu"),
    ("tempered_sigmoid", 1.58, 3.0, 0.71),
  ],
)
def test_every_spelling_of_an_activation_is_no_layer(activation):
  function = models.activations.activation_fn(activation)
  apply = lambda w, x: function(x @ w) @ w
  recorded = tapes.record(apply, jnp.eye(3), jnp.ones((2, 3)))
  assert [node.kind.name for node in recorded.nodes] == ["LINEAR", "LINEAR"]


def test_centring_the_input_is_a_layer_whose_bias_absorbs():
  apply = lambda w, x: ((x - 0.5) / 0.5) @ w
  found = relevance(
    apply, jnp.ones((2, 1)), jnp.array([[1.0, 0.75]]), jnp.array([0]), _EXACT
  )
  np.testing.assert_allclose(found.scores, [[2.0, 1.5]])  # x / (x - 0.5) of 1.0 and 0.5


@pytest.mark.long
def test_it_runs_under_jit_with_traced_parameters():
  apply, params, x = _net("relu", zero_bias=False)
  y = jnp.arange(3)
  run = jax.jit(lambda p, x, y: relevance(apply, p, x, y, Lrp()).scores)
  np.testing.assert_allclose(
    run(params, x, y), relevance(apply, params, x, y, Lrp()).scores, rtol=1e-4, atol=1e-6
  )


@pytest.mark.cases(long=[0])
@pytest.mark.parametrize(
  ("apply", "primitive"),
  [
    (lambda w, x: jax.nn.softmax(x @ w), "div"),
    (lambda w, x: (x @ w) * (x @ w.T), "mul"),
    (lambda w, x: jax.lax.scan(lambda c, _: (c @ w, None), x, None, 2)[0], "scan"),
    (lambda w, x: jnp.sort(x @ w), "sort"),
    (lambda w, x: jnp.einsum("bi,bj->bj", x @ w, x), "dot_general"),
  ],
)
def test_what_has_no_rule_is_refused_by_its_name(apply, primitive):
  with refuses("apply") as caught:
    relevance(apply, jnp.eye(3), jnp.ones((2, 3)), jnp.array([0, 1]), Lrp())
  assert primitive in str(caught.value)


def test_logits_that_ignore_the_input_are_refused():
  with refuses("apply"):
    relevance(lambda w, x: w, jnp.eye(3), jnp.ones((3, 3)), jnp.zeros(3, int), Lrp())


def test_a_heat_map_is_red_where_relevance_is_positive():
  picture = heat_map(np.array([[[1.0, 1.0]], [[-1.0, 0.0]]]))
  assert picture.shape == (2, 1, 3)
  assert picture[0, 0].tolist() == [1, 0, 0] and picture[1, 0].tolist() == [0.5, 0.5, 1]
