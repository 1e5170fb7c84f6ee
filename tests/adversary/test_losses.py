"""Losses nobody would write, of all sizes, on every route: no example exceeds its bound.

The 200 losses of the acceptance run are `-m long` (or DPJAX_ADVERSARY_LOSSES=n).
"""

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from dpjax import gradients
from tests.adversary import losses
from tests.adversary.routes import LOSSES, ROUTES, SLACK, flat, norm

_ACCURATE = 1e-5  # a float32 gradient this near to the float64 one is expected
_CLOSE = 1e-3


def _contributions(grad_fn, params, batch, mask):
  """(what each example adds alone, the sum of all, norms); padding must add nothing."""
  run = jax.jit(grad_fn)
  size = len(mask)
  empty = flat(run(params, batch, np.zeros(size, bool)).total)
  np.testing.assert_array_equal(empty, 0)
  alone = [
    flat(run(params, batch, mask & (np.arange(size) == i)).total) for i in range(size)
  ]
  whole = run(params, batch, mask)
  return alone, flat(whole.total), np.asarray(whole.norms)


def _gradients(loss, params, batch, wide):
  """Each example's gradient on its own, in float64 or float32; None: not differentiable."""
  dtype = np.float64 if wide else np.float32
  with jax.enable_x64(wide):
    cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
    grad = jax.jit(jax.grad(loss))
    one = lambda i: jax.tree.map(lambda leaf: leaf[i], cast(batch))
    return [flat(grad(cast(params), one(i))) for i in range(losses.BATCH)]


def _clipped(gradient, clip_norm):
  length = norm(gradient)
  return gradient * min(1.0, clip_norm / length) if length > 0 else gradient


def _comparable(recipe, exact, narrow, method):
  """Whether float32 computes this gradient accurately, in numbers of ordinary size."""
  if not (np.isfinite(exact).all() and np.isfinite(narrow).all()):
    return False
  size = norm(exact)
  ordinary = 1e-12 < size < 1e12 and (recipe.is_moderate or method == "vmap")
  return ordinary and norm(narrow - exact) <= _ACCURATE * size


def check(recipe):
  """Every guarantee for one loss; how many gradients were compared with the oracle."""
  loss, (params, batch, mask) = losses.loss_of(recipe), losses.data_of(recipe)
  try:
    with np.errstate(all="ignore"):
      oracle = [_gradients(loss, params, batch, wide) for wide in (True, False)]
  except (TypeError, ValueError):
    return 0  # JAX itself has no gradient for this combination
  return sum(_check_route(recipe, route, (params, batch, mask), oracle) for route in ROUTES)


def _check_route(recipe, route, data, oracle):
  clip_norm, options = recipe.clip_norm, ROUTES[route]
  grad_fn = gradients.clipped_grad(
    losses.loss_of(recipe), l2_clip_norm=clip_norm, **options
  )
  alone, whole, norms = _contributions(grad_fn, *data)
  compared, mask = 0, data[-1]
  assert np.isfinite(whole).all(), route
  assert norm(whole) <= sum(map(norm, alone)) * (1 + 1e-4), route
  for i, term in enumerate(alone):
    assert np.isfinite(term).all(), (route, i)
    assert norm(term) <= clip_norm * (1 + SLACK), (route, i, norm(term) / clip_norm)
    if not (mask[i] and np.isfinite(norms[i])):
      np.testing.assert_array_equal(term, 0)
    elif _comparable(recipe, oracle[0][i], oracle[1][i], options["method"]):
      compared += 1
      wanted = _clipped(oracle[0][i], clip_norm)
      assert norm(term - wanted) <= _CLOSE * norm(wanted), (route, i)
  return compared


_SETTINGS = dict(
  derandomize=True,
  database=None,
  suppress_health_check=list(HealthCheck),
  phases=[Phase.explicit, Phase.generate],  # shrinking would compile for an hour
)


def _run(count):
  compared = 0

  @settings(max_examples=count, **_SETTINGS)
  @given(losses.recipes())
  def each(recipe):
    nonlocal compared
    compared += check(recipe)

  each()
  assert compared >= count // 4  # the oracle has had its say


@pytest.mark.long
def test_a_few_odd_losses_keep_every_promise():
  _run(6)


@pytest.mark.long
def test_odd_losses_on_every_route_keep_every_promise():
  _run(LOSSES)


@pytest.mark.parametrize("name", sorted({**losses.UNARY, **losses.BINARY, **losses.LARGE}))
@pytest.mark.long
def test_every_primitive_with_parameters_on_either_side(name):
  compared = 0
  for places in ((0, 0), (2, 0), (1, 4)):
    recipe = losses.Recipe(
      ((name, *places), ("mul", 0, 0)), 0.0, (0.0, 1.0, -1.0, 0.0), 0.0, ("",) * 4, 1.0, 7
    )
    compared += check(recipe)
  assert compared or name in ("stop", "cancel", *losses._HALF)


def test_a_loss_that_breaks_its_promise_is_found(monkeypatch):
  """The check itself: a norm that is 1e-4 too short must be caught."""
  from dpjax.gradients import clipping

  factors = clipping.clip_factors

  def loose(*args, **kwargs):
    found, norms = factors(*args, **kwargs)
    return jax.tree.map(lambda f: f * 1.0001, found), norms

  monkeypatch.setattr(clipping, "clip_factors", loose)
  recipe = losses.Recipe((("mul", 0, 0),), 0.0, (1.0,) * 4, 3.0, ("",) * 4, 1e-3, 0)
  with pytest.raises(AssertionError):
    check(recipe)
