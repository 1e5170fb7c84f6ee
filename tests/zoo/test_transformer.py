"""The decoder: causal, tied or not, bounded in length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import gradients, losses, trees
from dpjax.types import Example
from dpjax.zoo import networks
from dpjax.zoo.networks.transformer import Attention
from tests.refuses import refuses

KEY = jax.random.key(0)
SIZES = dict(num_layers=1, num_heads=2, features=8, max_length=6)
TOKENS = jnp.array([[1, 2, 3, 4, 5, 6]])


@pytest.fixture(scope="module")
def network():
  model = networks.Transformer(vocab_size=11, **SIZES)
  params = jax.jit(model.init)(KEY, TOKENS)
  return jax.jit(lambda tokens: model.apply(params, tokens))


@pytest.mark.long
@pytest.mark.parametrize("t", [0, 3, 5])
def test_a_token_changes_no_earlier_logits(network, t):
  before, after = network(TOKENS), network(TOKENS.at[0, t].set(9))
  np.testing.assert_array_equal(before[:, :t], after[:, :t])
  assert all(jnp.abs(before[0, i] - after[0, i]).max() > 1e-6 for i in range(t, 6))


@pytest.mark.slow
def test_a_prefix_has_the_logits_of_the_whole(network):
  np.testing.assert_allclose(network(TOKENS[:, :4]), network(TOKENS)[:, :4], atol=1e-6)


@pytest.mark.slow
def test_order_matters(network):
  swapped = TOKENS[:, jnp.array([1, 0, 2, 3, 4, 5])]
  assert float(jnp.abs(network(swapped)[0, -1] - network(TOKENS)[0, -1]).max()) > 1e-6


@pytest.mark.long
def test_tying_saves_one_matrix_and_its_gradient_has_both_uses():
  tied = networks.Transformer(vocab_size=11, **SIZES)
  untied = networks.Transformer(vocab_size=11, tie_embeddings=False, **SIZES)
  params, more = (jax.jit(model.init)(KEY, TOKENS) for model in (tied, untied))
  assert trees.size(more) - trees.size(params) == 11 * 8
  embedding = params["params"]["embed"]["embedding"]
  copied = {"params": {**params["params"], "head": {"kernel": embedding.T}}}
  loss = lambda model, p: jax.nn.log_softmax(model.apply(p, TOKENS))[..., 0].sum()
  grad = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)
  (loss_one, one), (loss_two, two) = grad(tied, params), grad(untied, copied)
  np.testing.assert_allclose(loss_one, loss_two, rtol=1e-5)
  uses = two["params"]["embed"]["embedding"], two["params"]["head"]["kernel"].T
  np.testing.assert_allclose(one["params"]["embed"]["embedding"], sum(uses), atol=1e-4)


@pytest.mark.long
def test_attention_is_the_average_over_the_past_when_scores_are_equal():
  x = jax.random.normal(KEY, (1, 4, 6))
  layer = Attention(num_heads=2)
  params = jax.jit(layer.init)(KEY, x)["params"]
  # Zero queries and keys, identity values and output: a causal running mean of x.
  kernel = jnp.concatenate([jnp.zeros((6, 12)), jnp.eye(6)], axis=1)
  params["query_key_value"] = {"kernel": kernel, "bias": jnp.zeros(18)}
  params["out"] = {"kernel": jnp.eye(6), "bias": jnp.zeros(6)}
  running = jnp.cumsum(x, axis=1) / jnp.arange(1, 5).reshape(1, 4, 1)
  np.testing.assert_allclose(layer.apply({"params": params}, x), running, atol=1e-5)


@pytest.mark.cases(long=[2])
@pytest.mark.parametrize(
  ("tokens", "field"),
  [
    (jnp.zeros((1, 7), jnp.int32), "tokens.shape"),
    (jnp.zeros((1, 3), jnp.float32), "tokens"),
    (jnp.zeros(3, jnp.int32), "tokens"),
  ],
)
def test_wrong_tokens_are_refused(tokens, field):
  with refuses(field):
    networks.Transformer(vocab_size=11, **SIZES).init(KEY, tokens)


@pytest.mark.slow
def test_blocks_that_are_computed_again_have_the_same_parameters_and_keep_less():
  kept, again = (
    networks.Transformer(vocab_size=11, **SIZES, remat=r) for r in (False, True)
  )
  shapes = [jax.eval_shape(model.init, KEY, TOKENS) for model in (kept, again)]
  assert shapes[0] == shapes[1]
  held = []
  for model in (kept, again):
    loss = lambda p, model=model: jax.nn.log_softmax(model.apply(p, TOKENS))[..., 0].sum()
    _, back = jax.eval_shape(lambda p, loss=loss: jax.vjp(loss, p), shapes[0])
    held.append(trees.size(back))  # numbers that the backward pass is given
  assert held[1] < 0.8 * held[0]
  with refuses("remat", value="yes"):
    networks.Transformer(vocab_size=11, **SIZES, remat="yes")


@pytest.mark.long
def test_p4_bfloat16_activations_keep_the_bound_and_float32_sums():
  """The clipped gradient of each example alone, in float64, of losses that stretch it: weights
  that saturate, one token repeated (rows that add up), rows that cancel, a tiny and a huge
  scale; and without clipping, the direction of a float32 model's."""
  options = dict(vocab_size=11, num_layers=1, num_heads=2, features=8, max_length=6)
  half, full = (networks.Transformer(**options, dtype=d) for d in ("bfloat16", None))
  params = jax.jit(full.init)(KEY, TOKENS)
  tokens = jnp.array([[1, 2, 3, 4, 5, 6], [7] * 6, [7, 8] * 3, [0, 0, 9, 9, 9, 9]])

  def total(model):
    def loss(p, example):
      tokens, scale = example
      return scale * losses.next_token(model.apply, padding_id=0)(p, Example(tokens, 0))

    fn = gradients.clipped_grad(loss, l2_clip_norm=0.7, method="ghost")
    return jax.jit(lambda p, scale, mask: fn(p, (tokens, jnp.full(4, scale)), mask).total)

  def flat(tree):
    assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype("float32")}
    return np.concatenate(
      [np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)]
    )

  of_half, of_full = total(half), total(full)
  for stretch, scale in ((1.0, 1e-3), (1.0, 1e6), (60.0, 1.0), (60.0, 1e25)):
    weights = jax.tree.map(lambda leaf, s=stretch: s * leaf, params)
    for i in range(4):
      clipped = flat(of_half(weights, scale, jnp.arange(4) == i))
      assert np.linalg.norm(clipped) <= 0.7 * (1 + 1e-6)
  ours, theirs = (flat(f(params, 1e-3, jnp.ones(4, bool))) for f in (of_half, of_full))
  assert ours @ theirs > 0.99 * np.linalg.norm(ours) * np.linalg.norm(theirs) > 0
  assert not np.array_equal(ours, theirs)
