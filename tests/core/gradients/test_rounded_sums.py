"""Clipped sums that an accelerator rounds: no term is longer than its bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpjax import gradients
from dpjax.gradients.ghost import precision
from dpjax.gradients.traced_values import on_settled
from dpjax.parallel import targets
from tests.core.gradients import rounded_sums


def _dense(w, x):
  return jnp.sum(jnp.sin(x @ w))


def _rows(w, x):
  return jnp.sum(jnp.sin(x.reshape(8, 4) @ w))


def _convolution(w, x):
  image = x[:32].reshape(1, 4, 4, 2)
  layout = ("NHWC", "HWIO", "NHWC")
  kernel = w[:, :3].reshape(2, 2, 1, 3).repeat(2, axis=2)
  y = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=layout)
  return jnp.sum(jnp.sin(y))


_LOSSES = {
  "one row": (_dense, (32, 7)),
  "rows": (_rows, (4, 7)),
  "convolution": (_convolution, (4, 3)),
}


def _longest(loss, w, x):
  """Length of each example's term, in bounds: the sum over a batch of one."""
  grad_fn = gradients.clipped_grad(loss, l2_clip_norm=1.0)
  total = jax.jit(lambda w, x: grad_fn(w, x, True).total)
  lengths = [
    np.linalg.norm(np.asarray(total(w, x[i : i + 1]), np.float64)) for i in range(len(x))
  ]
  return max(lengths)


@pytest.mark.cases(quick=[2, 5], long=[0], slow=...)
@pytest.mark.parametrize("name", _LOSSES)
@pytest.mark.parametrize("rounded", [rounded_sums.longer, rounded_sums.nearest])
def test_no_term_is_longer_than_its_bound(name, rounded):
  loss, shape = _LOSSES[name]
  rng = np.random.default_rng(0)
  w = jnp.asarray(rng.normal(size=shape), jnp.float32)
  x = jnp.asarray(30 * rng.normal(size=(40, 32)), jnp.float32)
  with rounded_sums.on_a_card(rounded):
    longest = _longest(loss, w, x)
  assert 0.98 < longest <= 1 + 1e-6


@pytest.mark.slow
def test_without_the_charge_terms_are_too_long(monkeypatch):
  """What the test above would find."""
  free = precision.SumPrecision(lax.Precision.HIGH, 0.0)
  monkeypatch.setattr(precision, "of_sums", lambda dtype: free)
  rng = np.random.default_rng(0)
  w = jnp.asarray(rng.normal(size=(32, 7)), jnp.float32)
  x = jnp.asarray(30 * rng.normal(size=(40, 32)), jnp.float32)
  with rounded_sums.on_a_card():
    assert _longest(_dense, w, x) > 1 + 1e-4


@pytest.mark.slow
def test_rows_that_cancel_are_charged_for_what_rounding_leaves_of_them():
  """Two rows cancel to 2^-9 of either; rounded, much more of them is left."""
  rng = np.random.default_rng(1)
  row = rng.normal(size=16)
  off = row * (1 + 2.0**-9 * rng.normal(size=16))
  x = jnp.asarray(1e3 * np.concatenate([row, off])[None], jnp.float32)
  signs = jnp.array([[1.0], [-1.0]])
  loss = lambda w, x: jnp.sum((x.reshape(2, 16) @ w) * signs)
  with rounded_sums.on_a_card():
    assert _longest(loss, jnp.ones((16, 3)), x) <= 1 + 1e-6


def _in_both(function, w, x):
  """Uses one matrix in float32 and, beside it, in double precision."""
  double = x[:2].astype(jnp.float64) @ w.astype(jnp.float64)
  return (function(x @ w) + 1e-15 * jnp.sum(double)).astype(jnp.float32)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_float32_beside_double_precision_keeps_its_rounding_and_its_underflow():
  """A sum of rows of both types is double, and has neither."""
  w = jnp.asarray(np.random.default_rng(0).normal(size=(32, 40)), jnp.float32)
  x = jnp.asarray(30 * np.random.default_rng(1).normal(size=(4, 2, 32)), jnp.float32)
  sines = lambda w, x: _in_both(lambda y: jnp.sum(jnp.sin(y)), w, x)
  with rounded_sums.on_a_card():
    assert 0.98 < _longest(sines, w, x) <= 1 + 1e-6
  # On a CPU: squares of gradients of 1e-21 are 0 in float32, and 1e-42 in double precision.
  linear = lambda w, x: _in_both(jnp.sum, w, x)
  small = gradients.clipped_grad(linear, l2_clip_norm=1e-24)
  term = jax.jit(lambda w, x: small(w, x, True).total)(w, x[:1] * 1e-22)
  assert np.linalg.norm(np.asarray(term, np.float64)) <= 1e-24 * (1 + 1e-5)


@pytest.mark.slow
def test_rows_of_a_table_are_not_charged():
  """They are added, not multiplied: their terms are as long as the bound."""
  loss = lambda w, tokens: 9.0 * jnp.sum(jnp.sin(w[tokens]))
  w = jnp.asarray(np.random.default_rng(2).normal(size=(9, 64)), jnp.float32)
  tokens = jnp.arange(8)[None] % 5
  with rounded_sums.on_a_card():
    assert 1 - 1e-5 < _longest(loss, w, tokens) <= 1 + 1e-6


@pytest.mark.parametrize("cpu", ["cpu", jax.devices("cpu")[0]])
def test_a_cpu_beside_a_card_has_the_program_of_a_cpu(monkeypatch, cpu):
  """Its compiler drops the barrier that holds a norm and its sum together on a card."""
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

  def names():
    settled = jax.make_jaxpr(lambda x: on_settled(jnp.sum, 2.0 * x))(jnp.ones(3))
    return {eqn.primitive.name for eqn in settled.jaxpr.eqns}

  assert "optimization_barrier" in names()
  with jax.default_device(cpu):
    assert "cond" in names()
    assert precision.of_sums(jnp.float32).growth == 0


@pytest.mark.parametrize("first", [jnp.nan, -jnp.inf, jnp.inf, 1.0])
def test_a_function_of_settled_numbers_is_traced_once_and_sees_any_number(first):
  """The condition that XLA cannot tell holds for NaN and infinity, too."""
  calls = []

  def summed(x):
    calls.append(x.shape)
    return jnp.sum(x)

  total = jax.jit(lambda x: on_settled(summed, 2.0 * x))(jnp.array([first, 1.0]))
  np.testing.assert_equal(float(total), 2.0 * float(first) + 2.0)
  assert calls == [(2,)]


@pytest.mark.parametrize("platform", ["gpu:h100:1", "tpu:v5e:1x1"])
def test_full_precision_is_a_choice_and_double_precision_is_exact(platform):
  with targets.compiling_for(targets.parse(platform)):
    assert precision.of_sums(jnp.float32).growth > 0
    with jax.default_matmul_precision("highest"):
      assert precision.of_sums(jnp.float32) == (lax.Precision.HIGHEST, 0.0)
    assert precision.of_sums(np.dtype("float64")).growth == 0
  assert precision.of_sums(jnp.float32).growth == 0  # here, on a CPU


def test_a_step_of_an_accelerator_branches_once():
  """A GPU's program waits for the host at every conditional."""
  grad_fn = gradients.clipped_grad(_dense, l2_clip_norm=1.0)
  with targets.compiling_for(targets.parse("gpu:h100:1")):
    traced = jax.make_jaxpr(lambda w, x: grad_fn(w, x, True).total)(
      jnp.ones((32, 7)), jnp.ones((40, 32))
    )

  def branches(jaxpr):
    found = 0
    for eqn in jaxpr.eqns:
      if eqn.primitive.name in ("cond", "while"):
        found += 1
        continue
      held = [v for v in eqn.params.values() if hasattr(v, "eqns") or hasattr(v, "jaxpr")]
      found += sum(branches(getattr(v, "jaxpr", v)) for v in held)
    return found

  assert branches(traced.jaxpr) == 1


def test_norms_are_products_in_three_parts_on_a_card_that_knows_them(monkeypatch):
  monkeypatch.setattr(precision.made_for, "platform", lambda: "gpu")
  rows = jnp.ones((1, 4, 8), jnp.float32)
  product = lambda a: precision.gram("ntk,nsk->nts", a, a)
  for capability, known in (("9.0", True), ("7.5", False), ("gfx942", False), ("", False)):
    card = type("Card", (), {"compute_capability": capability})()
    monkeypatch.setattr(precision.jax, "local_devices", lambda card=card: [card])
    text = jax.jit(lambda a: product(a)).trace(rows).lower(lowering_platforms=("cuda",))
    assert ("num_primitive_operations = 3" in text.as_text()) == known
  with targets.compiling_for(targets.parse("gpu:h100:1")):
    assert not precision.in_three_parts(rows, rows)
