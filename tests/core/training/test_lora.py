"""Adapters change what merged weights would, and cost no gradient of a frozen weight."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dpjax import gradients, losses, models, trees
from dpjax.gradients.ghost.explain import explain
from dpjax.gradients.per_example import stacked_arrays
from dpjax.training import lora
from dpjax.types import Example
from dpjax.validate import UserError
from dpjax.zoo import networks
from tests.refuses import refuses

_KEY = jax.random.key(0)
_SIZE = 3


def _mlp():
  model = models.Mlp(num_classes=4, features=(7, 6))
  x = jnp.asarray(np.random.default_rng(0).normal(size=(_SIZE, 5)), jnp.float32)
  loss = losses.softmax_cross_entropy(model.apply)
  return loss, model.init(_KEY, x), Example(x, jnp.arange(_SIZE))


def _transformer():
  sizes = dict(num_layers=1, num_heads=2, features=8, max_length=5)
  model = networks.Transformer(vocab_size=11, **sizes)
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (_SIZE, 5)), jnp.int32)
  loss = losses.next_token(jax.jit(model.apply))
  return loss, model.init(_KEY, tokens), Example(tokens, jnp.zeros(_SIZE, jnp.int32))


def _trained(adapted, seed=0):
  """Adapters as they are after some steps: no B is 0."""
  leaves, treedef = jax.tree.flatten(adapted.trainable)
  rng = np.random.default_rng(seed)
  some = [jnp.asarray(rng.normal(size=x.shape) / 3, x.dtype) for x in leaves]
  return treedef.unflatten(some)


_CASES = {"mlp": (_mlp, "*/kernel"), "transformer": (_transformer, "*[lg]")}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(_CASES))
def test_gradients_of_adapters_are_those_through_merged_weights(name):
  """Example by example, against an ordinary gradient through W + (alpha / rank) A B; the
  transformer's tied embedding is looked up, and multiplied from its other side."""
  build, pattern = _CASES[name]
  loss_fn, params, batch = build()
  adapted = lora(params, pattern, rank=2, alpha=3.0, key=_KEY)
  assert any("embed" in path for path in adapted.trainable) == (name == "transformer")
  trainable = _trained(adapted)

  def merged_loss(adapters, example):
    flat = {**adapters}

    def weight(path, w):
      pair = flat.get("/".join(entry.key for entry in path))
      return w if pair is None else w + 1.5 * pair["a"] @ pair["b"]

    return loss_fn(jax.tree_util.tree_map_with_path(weight, params), example)

  run = lambda fn: jax.jit(stacked_arrays(fn))(trainable, batch)
  for ours, theirs in zip(
    *map(jax.tree.leaves, map(run, (adapted.apply(loss_fn), merged_loss)))
  ):
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-6)
    assert np.abs(theirs).max() > 1e-3


@pytest.mark.cases(long=["transformer"], slow=...)
@pytest.mark.parametrize("name", sorted(_CASES))
def test_no_gradient_of_a_frozen_weight_is_formed(name):
  build, _ = _CASES[name]
  loss_fn, params, batch = build()
  adapted = lora(params, "*/kernel", rank=2, alpha=3.0, key=_KEY)
  example = jax.tree.map(lambda leaf: leaf[0], batch)
  table = explain(adapted.apply(loss_fn), adapted.trainable, example)
  assert len(table.rows) == 2 * len(adapted.trainable)
  assert all(row.sites == "dot_general" and not row.reason for row in table.rows)
  plain = lambda a, e: loss_fn(adapted.merge(a), e)
  assert any(
    "combined" in r.reason for r in explain(plain, adapted.trainable, example).rows
  )

  def text(loss):
    fn = gradients.clipped_grad(loss, l2_clip_norm=1.0, method="ghost")
    total = lambda a, b: fn(a, b, True).total
    return str(jax.make_jaxpr(total)(adapted.trainable, batch))

  shapes = {w.shape for w in jax.tree.leaves(params) if w.ndim == 2}
  stacked = [f"f32[{_SIZE},{k},{p}]" for k, p in shapes]
  assert not any(shape in text(adapted.apply(loss_fn)) for shape in stacked)


@pytest.mark.slow
def test_what_is_computed_again_is_rewritten_too():
  """Under jax.checkpoint: the same clipped sum, and no merged weight."""
  block = lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]) ** 2)
  params = {"w": jnp.arange(30.0).reshape(6, 5) / 30}
  batch = jnp.asarray(np.random.default_rng(0).normal(size=(_SIZE, 4, 6)), jnp.float32)
  totals = []
  for loss in (block, jax.checkpoint(block)):
    adapted = lora(params, "w", rank=2, alpha=3.0, key=_KEY)
    trainable = _trained(adapted)
    rows = explain(adapted.apply(loss), trainable, batch[0]).rows
    assert [(row.sites, row.reason) for row in rows] == [("dot_general", "")] * 2
    fn = gradients.clipped_grad(adapted.apply(loss), l2_clip_norm=0.1, method="ghost")
    totals.append(jax.jit(lambda a, fn=fn: fn(a, batch, True).total)(trainable))
  for one, other in zip(*map(jax.tree.leaves, totals)):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_function_is_unchanged_at_first_and_merged_weights_are_exact():
  loss_fn, params, batch = _mlp()
  adapted = lora(params, "params/*/kernel", rank=2, alpha=3.0, key=_KEY)
  example = jax.tree.map(lambda leaf: leaf[0], batch)
  assert adapted.apply(loss_fn)(adapted.trainable, example) == loss_fn(params, example)
  for before, after in zip(
    *map(jax.tree.leaves, (params, adapted.merge(adapted.trainable)))
  ):
    np.testing.assert_array_equal(before, after)
  trainable = _trained(adapted)
  merged = adapted.merge(trainable)["params"]
  assert sorted(merged) == sorted(path.split("/")[1] for path in trainable)
  for path, pair in trainable.items():
    layer = path.split("/")[1]
    before, after = params["params"][layer], merged[layer]
    expected = np.float64(before["kernel"]) + 1.5 * np.float64(pair["a"]) @ pair["b"]
    np.testing.assert_allclose(after["kernel"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(after["bias"], before["bias"])


@pytest.mark.cases(quick=["checkpoint"], long=...)
@pytest.mark.parametrize("use", ["first", "elementwise", "checkpoint"])
def test_other_uses_take_the_merged_weight(use):
  params = {"w": jnp.arange(6.0).reshape(2, 3)}
  uses = {
    "first": lambda p, x: jnp.sum(jnp.sin(p["w"].T @ x)),
    "elementwise": lambda p, x: jnp.sum(jnp.sin(p["w"] * x[:, None])),
    "checkpoint": lambda p, x: jax.checkpoint(lambda w: jnp.sum(jnp.sin(x @ w)))(p["w"]),
  }
  adapted = lora(params, "w", rank=1, alpha=2.0, key=_KEY)
  trainable, x = _trained(adapted), jnp.array([0.5, -1.0])
  ours = adapted.apply(uses[use])(trainable, x)
  np.testing.assert_allclose(ours, uses[use](adapted.merge(trainable), x), rtol=1e-5)


@pytest.mark.long
def test_half_precision_weights_have_float32_adapters():
  params = {"w": jnp.ones((4, 3), jnp.bfloat16)}
  adapted = lora(params, "w", rank=1, alpha=1.0, key=_KEY)
  assert adapted.merge(adapted.trainable)["w"].dtype == jnp.bfloat16
  loss = lambda p, x: jnp.sum(x.astype(jnp.bfloat16) @ p["w"])
  grads = jax.grad(adapted.apply(loss))(_trained(adapted), jnp.ones(4))
  assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
  ("params", "options", "field"),
  [
    ({"w": jnp.ones((4, 3))}, dict(pattern="v*"), "pattern"),
    (
      {"b": jnp.ones(3), "w": jnp.ones((4, 3))},
      dict(pattern="v*"),
      "pattern",
    ),
    ({"w": jnp.ones((4, 3))}, dict(rank=4), "rank"),
    ({"w": jnp.ones((4, 3))}, dict(rank=0), "rank"),
    ({"w": jnp.ones((4, 3))}, dict(alpha=0.0), "alpha"),
    ({"w": jnp.ones((4, 3, 2))}, {}, "params"),
    ({"w": jnp.ones((4, 3), jnp.int32)}, {}, "params['w']"),
    ({"w": jnp.ones((4, 3), jnp.complex64)}, {}, "params['w']"),
    ({}, {}, "params"),
    ({"w": jnp.ones((4, 3))}, dict(pattern=None), "pattern"),
    ({"w": {"k": jnp.ones((4, 3))}, "w/k": jnp.ones((2, 2))}, {}, "params"),
  ],
)  # fmt: skip
def test_mistakes_are_one_line(params, options, field):
  options = dict(pattern="*", rank=1, alpha=1.0) | options
  with refuses(field) as error:
    lora(params, options.pop("pattern"), **options, key=_KEY)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", ["other name", "other shape", "one missing"])
def test_adapters_of_other_names_or_shapes_are_refused(change):
  adapted = lora({"w": jnp.ones((4, 3))}, "w", rank=1, alpha=1.0, key=_KEY)
  pair = adapted.trainable["w"]
  wrong = {
    "other name": {"v": pair},
    "other shape": {"w": {**pair, "a": jnp.ones((4, 2))}},
    "one missing": {"w": {"a": pair["a"]}},
  }[change]
  for use in (adapted.merge, lambda t: adapted.apply(lambda p, x: p["w"].sum())(t, 1.0)):
    with refuses("adapters"):
      use(wrong)


def test_a_loss_that_is_no_scalar_stays_none():
  """Of {"aux": .., "loss": ..} the first leaf would else be trained."""
  adapted = lora({"w": jnp.ones((4, 3))}, "w", rank=1, alpha=1.0, key=_KEY)
  loss = adapted.apply(lambda p, x: {"aux": jnp.sum(x), "loss": jnp.sum(x @ p["w"])})
  with pytest.raises(UserError, match="scalar"):
    gradients.clipped_grad(loss, l2_clip_norm=1.0)(
      adapted.trainable, jnp.ones((2, 4)), True
    )


def test_a_pattern_of_linen_matches_an_nnx_state_and_a_module_that_names_an_array_value():
  """The box of a variable adds no name, but `value` beside `query` is one."""
  _, params, _ = nnx.split(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Param, ...)
  adapted = lora({"head": params}, "*/kernel", rank=1, alpha=1.0, key=_KEY)
  assert list(adapted.trainable) == ["head/kernel"]
  merged = adapted.merge(adapted.trainable)
  assert jax.tree.structure(merged) == jax.tree.structure({"head": params})
  Attention = collections.namedtuple("Attention", "query value")
  assert trees.leaf_names(Attention(1, 2)) == ["query", "value"]
