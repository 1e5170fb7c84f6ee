"""The decoder: causal, tied or not, bounded in length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import models, trees
from dpjax.models.transformer import Attention
from dpjax.validate import UserError

KEY = jax.random.key(0)
SIZES = dict(num_layers=1, num_heads=2, features=8, max_length=6)
TOKENS = jnp.array([[1, 2, 3, 4, 5, 6]])


@pytest.fixture(scope="module")
def network():
  model = models.Transformer(vocab_size=11, **SIZES)
  params = jax.jit(model.init)(KEY, TOKENS)
  return jax.jit(lambda tokens: model.apply(params, tokens))


@pytest.mark.parametrize("t", [0, 3, 5])
def test_a_token_changes_no_earlier_logits(network, t):
  before, after = network(TOKENS), network(TOKENS.at[0, t].set(9))
  np.testing.assert_array_equal(before[:, :t], after[:, :t])
  assert all(jnp.abs(before[0, i] - after[0, i]).max() > 1e-6 for i in range(t, 6))


def test_a_prefix_has_the_logits_of_the_whole(network):
  np.testing.assert_allclose(network(TOKENS[:, :4]), network(TOKENS)[:, :4], atol=1e-6)


def test_order_matters(network):
  swapped = TOKENS[:, jnp.array([1, 0, 2, 3, 4, 5])]
  assert float(jnp.abs(network(swapped)[0, -1] - network(TOKENS)[0, -1]).max()) > 1e-6


def test_tying_saves_one_matrix_and_its_gradient_has_both_uses():
  tied = models.Transformer(vocab_size=11, **SIZES)
  untied = models.Transformer(vocab_size=11, tie_embeddings=False, **SIZES)
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


@pytest.mark.parametrize(
  ("tokens", "message"),
  [
    (jnp.zeros((1, 7), jnp.int32), "length must be <= max_length=6"),
    (jnp.zeros((1, 3), jnp.float32), "tokens: must be integers"),
    (jnp.zeros(3, jnp.int32), "tokens: must be integers"),
  ],
)
def test_wrong_tokens_are_refused(tokens, message):
  with pytest.raises(UserError, match=message):
    models.Transformer(vocab_size=11, **SIZES).init(KEY, tokens)
