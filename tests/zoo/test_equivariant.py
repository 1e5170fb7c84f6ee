"""Turned and mirrored images: exactly the turned maps, exactly the same logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import gradients, losses
from dpjax.types import Example
from dpjax.zoo import networks
from dpjax.zoo.networks import equivariant
from tests.refuses import refuses

_X = np.random.default_rng(0).normal(size=(2, 8, 8, 3))
_D4 = equivariant.GROUPS["D4"]


def _small(**options):
  fixed = dict(filters=(4, 4), strides=(2, 1), pool_after=(2,), num_groups=2)
  return equivariant.EquivariantCnn(**(dict(num_classes=3) | fixed | options))


def _logits(model):
  """Of the images under all elements of D4, [8, 2, K], float64."""
  params = jax.tree.map(
    lambda s: np.random.default_rng(s.size).normal(size=s.shape),
    jax.eval_shape(model.init, jax.random.key(0), _X[:1]),
  )
  turned = np.concatenate([equivariant.act(_X, *g, axes=(1, 2)) for g in _D4])
  return np.asarray(jax.jit(model.apply)(params, turned)).reshape(len(_D4), 2, -1)


def _changes(logits):
  """Largest change of the logits by each element."""
  return np.abs(logits - logits[0]).max(axis=(1, 2))


@pytest.mark.slow
def test_logits_of_turned_and_mirrored_images_are_equal(x64):
  changes = _changes(_logits(_small()))
  assert changes.max() < 1e-12


def test_c4_turns_and_does_not_mirror(x64):
  changes = _changes(_logits(_small(group="C4")))
  assert changes[:4].max() < 1e-12 and changes[4:].min() > 1e-3


def test_c1_does_neither(x64):
  assert _changes(_logits(_small(group="C1")))[1:].min() > 1e-3


@pytest.mark.cases(long=["C4"])
@pytest.mark.parametrize("group", ["D4", "C4"])
def test_a_wrong_order_of_the_maps_is_seen(x64, monkeypatch, group):
  right = equivariant.left_quotients(group)
  order = len(right)
  swapped = right[[0, 2, 1, *range(3, order)]]  # two elements read each other's maps
  monkeypatch.setattr(equivariant, "left_quotients", lambda group: swapped)
  assert _changes(_logits(_small(group=group)))[:4].max() > 1e-3


def test_a_layer_of_the_group_turns_its_maps(x64):
  order, quotients = len(_D4), equivariant.left_quotients("D4")
  layer = equivariant.GroupConv(2, "D4")
  x = np.random.default_rng(1).normal(size=(1, 4, 4, 3 * order))
  params = jax.tree.map(
    lambda s: np.random.default_rng(2).normal(size=s.shape),
    jax.eval_shape(layer.init, jax.random.key(0), x),
  )

  def acted(maps, index):  # (g f)(x, h) = f(g^-1 x, g^-1 h)
    maps = maps.reshape(*maps.shape[:3], -1, order)[..., quotients[index]]
    return equivariant.act(maps, *_D4[index], axes=(1, 2)).reshape(1, 4, 4, -1)

  moved = np.concatenate([acted(x, index) for index in range(order)])
  out = np.asarray(jax.jit(layer.apply)(params, moved))
  wanted = np.concatenate([acted(out[:1], index) for index in range(order)])
  np.testing.assert_allclose(out, wanted, atol=1e-12)


@pytest.mark.slow
def test_all_positions_reach_the_head_where_it_is_not_invariant(x64):
  assert _changes(_logits(_small(invariant=False)))[1:].min() > 1e-3


@pytest.mark.parametrize(
  ("options", "field"),
  [
    (dict(group="D3"), "group"),
    (dict(first_kernel=5), "kernel_size"),
    (dict(strides=(1, 1)), "kernel_size"),
    (dict(strides=(2, 3)), "strides"),
    (dict(strides=(2,)), "filters"),
    (dict(filters=()), "filters"),
    (dict(pool_after=(3,)), "pool_after"),
    (dict(num_groups=5), "num_groups"),
    (dict(num_groups=0), "num_groups"),
    (
      dict(filters=(2, 4), num_groups=4),
      "num_groups",
    ),
  ],
)
def test_what_would_break_the_symmetry_is_refused(options, field):
  with refuses(field):
    jax.eval_shape(_small(**options).init, jax.random.key(0), _X[:1])


@pytest.mark.parametrize("side", [7, 10])  # odd at the stride; odd at the pool
def test_a_side_that_is_odd_where_it_is_halved_is_refused(side):
  x = jnp.zeros((1, side, side, 3))
  with refuses("x.shape"):
    jax.eval_shape(_small().init, jax.random.key(0), x)


def test_the_fast_route_knows_the_shared_kernels():
  model, x = _small(), jnp.asarray(_X[0], jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), x[None])
  loss = losses.softmax_cross_entropy(model.apply)
  explained = str(gradients.explain(loss, params, Example(x, jnp.int32(0)), platform="cpu"))
  kernels = [
    line for line in explained.splitlines() if line.startswith("['params']['conv_")
  ]
  recorded = [line for line in kernels if "conv_general_dilated" in line or " add " in line]
  assert len(recorded) == 4  # no general gradient, as vmap takes


@pytest.mark.long
def test_the_fast_route_agrees_with_one_gradient_each():
  model = _small(group="C4", filters=(2,), strides=(2,), pool_after=(), num_groups=None)
  x, y = jnp.asarray(_X[:, :4, :4], jnp.float32), jnp.array([0, 2], jnp.int32)
  params = jax.tree.map(
    lambda s: np.random.default_rng(s.size).normal(size=s.shape).astype(np.float32),
    jax.eval_shape(model.init, jax.random.key(0), x[:1]),
  )
  loss = losses.softmax_cross_entropy(model.apply)
  fast, each = (
    jax.jit(gradients.clipped_grad(loss, l2_clip_norm=0.1, method=method))(
      params, Example(x, y), True
    ).total
    for method in ("auto", "vmap")
  )
  for one, other in zip(jax.tree.leaves(fast), jax.tree.leaves(each)):
    np.testing.assert_allclose(one, other, atol=1e-6)


def test_it_is_registered():
  assert networks.build("equivariant_cnn", num_classes=2, group="C4").group == "C4"
