"""Operands and cotangents from 1e-38 to 1e38: no route drops what another keeps, or exceeds
the bound. The oracle is float64, one example at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpjax import gradients
from dpjax.gradients.ghost import units
from dpjax.parallel import made_for, targets

_TOLERANCE = 1e-5


def _dense(w, x, g):
  return jnp.sum((x @ w) * g)


def _conv(w, x, g):
  numbers = ("NHC", "HIO", "NHC")
  kernel = w.reshape(2, -1, w.shape[1])
  out = lax.conv_general_dilated(
    x.reshape(1, -1, kernel.shape[1]), kernel, (2,), "VALID", dimension_numbers=numbers
  )
  return jnp.sum(out[0] * g)


def _tied(w, x, g):
  return jnp.sum((x @ w) * g) + jnp.sum((g @ w.T) * x)


def _table(w, x, g):
  return jnp.sum(w[jnp.zeros(x.shape[0], jnp.int32)] * g) + jnp.sum((x @ w) * g)


def _joined(w, x, g):
  return jnp.sum((x @ jnp.concatenate([w[:2], w[2:]])) * g)


_LOSSES = {
  "dense": _dense,
  "conv": _conv,
  "tied": _tied,
  "table": _table,
  "joined": _joined,
}
_INNER = 8
# (size of the operand's rows, of the cotangent's), the second one of which lies far away.
_SIZES = (
  ((1e36, 1e-3), (1.0, 1.0)),
  ((1e37, 1e-20), (0.5, 0.25)),
  ((3e37, 1e-37), (3e37, 2e-37)),
  ((3e37, 1e-28), (1e-10, 1e20)),
  ((1e-30, 3e37), (1e-30, 1e37)),
  ((1e-20, 1e-15), (1e-10, 1e-20)),
  ((1.0, 1.0), (2.0, 3.0)),
)


def _examples(rows, width, scale=1.0):
  """`rows` rows of each example, of turn about one size and the other: [B, T, ...] each."""
  rng = np.random.default_rng(0)
  count = len(_SIZES)
  sizes = np.asarray(_SIZES)[:, np.arange(rows) % 2]  # [B, T, 2]
  draw = lambda size: rng.uniform(0.3, 1, (count, rows, size)) * rng.choice([-1, 1], size)
  x = draw(_INNER) * sizes[..., :1] * scale
  g = draw(width) * sizes[..., 1:]
  return x, g


def _oracle(name, x, g):
  """Gradients of each example in float64: [B, K, P]."""
  product = np.einsum("btk,btp->bkp", x, g)
  if name == "tied":
    return 2 * product
  if name == "table":
    product[:, 0] += np.sum(g, axis=1)
  return product


def _check(name, rows, width, clip_norm, options, *, dtype=np.float32, scale=1.0):
  x, g = (part.astype(dtype) for part in _examples(rows, width, scale))
  true = _oracle(name, x.astype(np.float64), g.astype(np.float64))
  lengths = np.array([np.abs(t).max() for t in true])
  lengths = lengths * np.array([np.linalg.norm(t / n) for t, n in zip(true, lengths)])
  loss = lambda w, example: _LOSSES[name](w, *example)
  grad_fn = gradients.clipped_grad(loss, l2_clip_norm=clip_norm, **options)
  run, w = jax.jit(grad_fn), jnp.zeros((_INNER, width), dtype)
  most = np.finfo(np.float32).max * 0.2 * min(clip_norm, 1)
  for i in range(len(x)):
    total = np.asarray(run(w, (x, g), np.arange(len(x)) == i).total, np.float64)
    assert np.linalg.norm(total) <= clip_norm * (1 + _TOLERANCE), (i, options)
    if lengths[i] <= most or dtype == np.float64:
      expected = true[i] * min(1, clip_norm / lengths[i])
      error = np.linalg.norm((total - expected) / clip_norm)
      assert error <= _TOLERANCE * min(1, lengths[i] / clip_norm), (i, options, error)


_ROUTES = {
  "auto": dict(method="auto"),
  "ghost": dict(method="ghost"),
  "vmap": dict(method="vmap"),
  "microbatched": dict(method="ghost", microbatch_size=3),
}


@pytest.mark.cases(slow=["0.001"], long=...)
@pytest.mark.parametrize("clip_norm", [1e-6, 1e-3, 1.0])
def test_no_term_is_lost_to_underflow_beside_large_operands(clip_norm):
  """A factor c_i g_i below 1e-38 dropped the example before."""
  _check("dense", 1, 5, clip_norm, _ROUTES["ghost"])


@pytest.mark.cases(slow=["product-joined"], long=...)
@pytest.mark.parametrize("name", sorted(_LOSSES))
@pytest.mark.parametrize("rule", [units.Rule.GRAM, units.Rule.PRODUCT])
def test_every_rule_keeps_terms_of_any_magnitude(name, rule, monkeypatch):
  monkeypatch.setattr(
    units,
    "_cheapest",
    lambda forms, platform: (rule, units.cost_model.outer(forms[0]), False),
  )
  _check(name, 4, 5, 1e-3, _ROUTES["ghost"])


@pytest.mark.parametrize("name", sorted(_LOSSES))
@pytest.mark.parametrize("route", sorted(_ROUTES))
@pytest.mark.long
def test_every_route_keeps_terms_of_any_magnitude(name, route):
  for rows in (1, 2, 40):
    for width in (1, 5, 300):
      for clip_norm in (1e-6, 1e-3, 1.0, 1e3):
        _check(name, rows, width, clip_norm, _ROUTES[route])


@pytest.mark.cases(slow=["ghost-1e+201"], long=...)
@pytest.mark.parametrize("scale", [1e-210, 1e201])
@pytest.mark.parametrize("route", ["ghost", "vmap"])
def test_float64_has_its_own_range(route, scale, monkeypatch):
  """Lengths were cut to the range of float32, by which the general rule dropped examples."""
  with jax.enable_x64(True):
    _check("dense", 2, 5, 1e-3, _ROUTES[route], dtype=np.float64, scale=scale)
    loss = lambda w, x: jnp.sum(jnp.tanh(w) * x) + jnp.sum((x @ jnp.tanh(w).T) ** 2) * 0
    monkeypatch.setattr(units.cost_model, "gradient", lambda *_: (units.Cost(1, 1), False))
    run = jax.jit(gradients.clipped_grad(loss, l2_clip_norm=1e-3, **_ROUTES[route]))
    total = run(
      jnp.zeros((3, 4)), jnp.full((2, 3, 4), scale), np.array([True, False])
    ).total
    expected = min(1e-3, scale * np.sqrt(12))
    np.testing.assert_allclose(np.linalg.norm(total / expected), 1, rtol=1e-5)


def _standardized(w, x, g):
  """A matrix that is transformed first: its gradients are formed twice, in a loop."""
  centred = w - w.mean(0, keepdims=True)
  return jnp.sum((x @ (centred / (w.std(0, keepdims=True) + 1e-3))) * g)


@pytest.mark.cases(slow=[2, 5])
@pytest.mark.parametrize("machine", [None, "gpu:h100:1"])
@pytest.mark.parametrize("loss", [_dense, _conv, _standardized])
def test_a_rare_example_moves_the_sum_by_its_own_term_alone(loss, machine):
  """Whatever the others are: rare as well, not finite, absent."""
  rng = np.random.default_rng(5)
  w = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
  x = rng.normal(size=(8, 6, 4)).astype(np.float32)
  g = rng.normal(size=(8, 6, 3)).astype(np.float32)
  x *= np.float32([1, 1e25, 1e-25, np.nan, 1e30, 1, 1e-38, 1e36])[:, None, None]
  with made_for.compiling_for(targets.parse(machine) if machine else None):
    grad_fn = gradients.clipped_grad(
      lambda w, example: loss(w, *example), l2_clip_norm=1.0, method="ghost"
    )
    total = jax.jit(lambda mask: grad_fn(w, (x, g), mask).total)
    everyone = np.asarray(total(np.ones(8, bool)), np.float64)
    for row in range(8):
      others = np.asarray(total(np.arange(8) != row), np.float64)
      term = np.asarray(total(np.arange(8) == row), np.float64)
      assert np.linalg.norm(everyone - others) <= 1 + _TOLERANCE
      np.testing.assert_allclose(everyone - others, term, atol=_TOLERANCE)
