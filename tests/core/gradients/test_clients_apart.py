"""Under `jax.vmap` over clients, an example that is not finite takes no other client with it.

Clients that have parameters of their own make one convolution in groups. In double precision
XLA's CPU backend computes some of those by a kernel with zeros between the groups.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import dpjax
from dpjax import federated, gradients
from dpjax.federated.cohort import from_batches
from dpjax.federated.round import params_of
from dpjax.gradients.clients_apart import clients_apart

_CLIENTS = 3
_ROWS = 3


def _convolve(x, w, groups=1, **options):
  rank = x.ndim - 2
  space = "DHW"[-rank:]
  layout = (f"N{space}C", f"{space}IO", f"N{space}C")
  known = {"window_strides": (1,) * rank, "padding": "SAME", "feature_group_count": groups}
  return lax.conv_general_dilated(x, w, dimension_numbers=layout, **known | options)


def _depthwise(w, x):
  return jnp.sum(jnp.sin(_convolve(x[None], w, 4)))


def _of_one_channel(w, x):
  # Ordinary convolutions of many clients are depthwise, if each has one channel.
  return jnp.sum(jnp.sin(_convolve(x[None, ..., :1], w[..., :1])))


def _along_a_line(w, x):
  # The only loss here that XLA keeps apart by itself, today.
  return jnp.sum(jnp.sin(_convolve(x[:1, :, :1], w[0, ..., :1])))


def _in_space(w, x):
  return jnp.sum(jnp.sin(_convolve(x.reshape(1, 3, 2, 6, 4), jnp.stack([w] * 3), 4)))


def _transposed(w, x):
  y = _convolve(x[None], w, 4, padding=[(2, 2)] * 2, lhs_dilation=(2, 2))
  return jnp.sum(jnp.sin(y))


def _in_scan(w, x):
  step = lambda carry, kernel: (jnp.tanh(_convolve(carry, kernel, 4)), None)
  return jnp.sum(lax.scan(step, x[None], jnp.stack([w, 2 * w]))[0])


def _in_groups_of_the_batch(w, x):
  rows = jnp.stack([x, x[::-1]])
  y = _convolve(rows, jnp.tile(w, (1, 1, 4, 1)), batch_group_count=2)
  return jnp.sum(jnp.sin(y))


def _after_a_step(w, x):
  inner = lambda w: _depthwise(w, x)
  return inner(w - 0.1 * jax.grad(inner)(w))


@jax.custom_vjp
def _own_derivative(w, x):
  return _convolve(x, w, 4)


_own_derivative.defvjp(
  lambda w, x: (_own_derivative(w, x), (w, x)),
  lambda kept, ct: jax.vjp(lambda w, x: _convolve(x, w, 4), *kept)[1](ct),
)


def _not_differentiated(w, x):
  y = _own_derivative(lax.stop_gradient(w), x[None])
  return jnp.sum(y) * jnp.sum(w)


_LOSSES = {
  "depthwise": _depthwise,
  "one channel": _of_one_channel,
  "1-D": _along_a_line,
  "3-D": _in_space,
  "transposed": _transposed,
  "scan": _in_scan,
  "batch groups": _in_groups_of_the_batch,
  "after a step": _after_a_step,
  "custom": _not_differentiated,
}
_METHODS = {
  "auto": {"method": "auto"},
  "vmap": {"method": "vmap"},
  "microbatch": {"microbatch_size": 2},
}


def _clients(dtype, shared=False):
  rng = np.random.default_rng(0)
  w = jnp.asarray(rng.normal(size=(_CLIENTS, 3, 3, 1, 4)), dtype)
  x = jnp.asarray(rng.normal(size=(_CLIENTS, _ROWS, 6, 6, 4)), dtype)
  return (w[0] if shared else w), x


def _assert_alone(run, w, x, bad=np.nan):
  """Asserts that one example of client 1 changes no other row, and no other client's sum."""
  clean = run(w, x)
  damaged = run(w, x.at[1, 1, 2, 2, 0].set(bad))
  assert all(np.isfinite(each).all() for each in clean)
  for before, after in zip(clean[:-1], damaged[:-1]):  # [K, B, ...]
    kept = np.ones((_CLIENTS, _ROWS), bool)
    kept[1, 1] = False
    np.testing.assert_array_equal(np.asarray(before)[kept], np.asarray(after)[kept])
  others = np.asarray([0, 2])
  before = np.asarray(clean[-1])
  after = np.asarray(damaged[-1])
  np.testing.assert_array_equal(before[others], after[others])
  assert np.isfinite(after).all()


def _clipped(loss, **options):
  grad_fn = gradients.clipped_grad(loss, l2_clip_norm=0.7, **options)

  def run(w, x):
    clipped = grad_fn(w, x, True)
    return clipped.losses, clipped.norms, clipped.total

  return run


_SLOW = [(name, "auto") for name in _LOSSES if name != "one channel"]
_SLOW += [("depthwise", "vmap"), ("depthwise", "microbatch")]
_CASES = [
  ("one channel", "auto"),
  *(pytest.param(*case, marks=pytest.mark.slow) for case in _SLOW),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), _CASES)
@pytest.mark.usefixtures("x64")
def test_an_example_takes_no_other_client_with_it(name, method):
  w, x = _clients(jnp.float64)
  run = jax.jit(jax.vmap(_clipped(_LOSSES[name], **_METHODS[method])))
  # The last one is finite itself, and overflows in the loss.
  for bad in (np.nan, np.inf, 1e300):
    _assert_alone(run, w, x, bad)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["depthwise", "batch groups"])
@pytest.mark.usefixtures("x64")
def test_nor_do_clients_that_share_their_parameters(name):
  w, x = _clients(jnp.float64, shared=True)
  run = jax.jit(jax.vmap(_clipped(_LOSSES[name]), (None, 0)))
  _assert_alone(run, w, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["depthwise", "one channel"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_nor_do_narrow_floats(dtype, name):
  w, x = _clients(dtype)
  _assert_alone(jax.jit(jax.vmap(_clipped(_LOSSES[name]))), w, x)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_nor_do_clients_that_are_mapped_twice():
  w, x = _clients(jnp.float64)
  nested = jax.vmap(jax.vmap(_clipped(_of_one_channel)))

  def run(w, x):
    twice = nested(jnp.stack([w, w]), jnp.stack([x, jnp.ones_like(x)]))
    return [jnp.concatenate(list(each))[:_CLIENTS] for each in twice]

  def second(w, x):
    return nested(jnp.stack([w, w]), jnp.stack([jnp.ones_like(x), x]))[-1][0]

  _assert_alone(jax.jit(run), w, x)
  damaged = x.at[1, 1, 2, 2, 0].set(np.nan)
  np.testing.assert_array_equal(jax.jit(second)(w, x), jax.jit(second)(w, damaged))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_nor_do_rows_that_are_not_clipped():
  w, x = _clients(jnp.float64)
  per_example = gradients.per_example_grads(_depthwise)

  def run(w, x):
    losses, rows = per_example(w, x)
    return losses, rows.arrays

  rows = jax.jit(jax.vmap(run))
  clean = rows(w, x)
  damaged = rows(w, x.at[1, 1, 2, 2, 0].set(np.nan))
  kept = np.ones((_CLIENTS, _ROWS), bool)
  kept[1, 1] = False
  for before, after in zip(clean, damaged):
    np.testing.assert_array_equal(np.asarray(before)[kept], np.asarray(after)[kept])


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_sums_are_those_of_each_client_by_itself():
  w, x = _clients(jnp.float64)
  for loss in (_depthwise, _in_scan, _in_groups_of_the_batch):
    run = _clipped(loss)
    mapped = jax.jit(jax.vmap(run))(w, x)[-1]
    alone = jnp.stack([jax.jit(run)(*each)[-1] for each in zip(w, x)])
    np.testing.assert_allclose(mapped, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_a_model_that_is_not_finite_takes_no_other_with_it():
  """Data that models share are one operand of all; only the kernels are mapped."""
  w, x = _clients(jnp.float64)
  of_models = jax.jit(jax.vmap(clients_apart(lambda w, x: _convolve(x, w, 4)), (0, None)))
  clean = np.asarray(of_models(w, x[0]))
  damaged = np.asarray(of_models(w.at[1, 1, 1, 0, 0].set(np.nan), x[0]))
  np.testing.assert_array_equal(clean[[0, 2]], damaged[[0, 2]])


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_derivatives_pass_through():
  w, x = _clients(jnp.float64)

  def loss(fn):
    return lambda w, x: jnp.sum(jnp.sin(fn(w, x)))

  plain = lambda w, x: _convolve(x, w, 4)
  own = jax.vmap(jax.grad(loss(clients_apart(plain)), (0, 1)))(w, x)
  expected = [jax.grad(loss(plain), (0, 1))(*each) for each in zip(w, x)]
  expected = jax.tree.map(lambda *rows: jnp.stack(rows), *expected)
  for got, wanted in zip(own, expected):
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)


def test_programs_without_such_a_convolution_are_left_as_they_are():
  w, x = _clients(jnp.float32)
  text = lambda loss, x: str(jax.make_jaxpr(_clipped(loss))(w[0], x[0]))
  plain = lambda w, x: jnp.sum(jnp.sin(_convolve(x[None], jnp.tile(w, (1, 1, 4, 1)))))
  assert "custom_vmap" not in text(plain, x)
  with jax.enable_x64(True):
    w, x = _clients(jnp.float64)
    assert "custom_vmap" in text(plain, x)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_a_client_of_a_round_takes_no_other_with_it():
  w, x = _clients(jnp.float64)
  tx = dpjax.clip_and_noise(
    l2_clip_norm=1.0, noise_multiplier=0.0, normalize_by=1.0, key=jax.random.key(0)
  )
  algorithm = federated.fed_avg(
    _depthwise,
    optax.sgd(0.1),
    aggregator=federated.dp_mean(tx, l2_clip_norm=1.0),
    map_clients=federated.vmap_clients(),
    key=jax.random.key(0),
  )

  def after_a_round(examples):
    # From the second step on, clients have parameters of their own.
    cohort = from_batches(examples, batch_size=1)
    state, _ = algorithm.round(algorithm.init(w[0]), cohort)
    return np.asarray(params_of(state))

  first, damaged, last = np.array(x)
  damaged[0, 2, 2, 0] = np.nan
  without = after_a_round([first, np.zeros((0, 6, 6, 4)), last])
  assert np.linalg.norm(without - np.asarray(w[0])) > 0.1
  np.testing.assert_allclose(after_a_round([first, damaged, last]), without, rtol=1e-12)
