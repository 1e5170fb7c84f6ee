"""JAX functions on shares by SPU: equal to plain JAX, refused where they would not be."""

import importlib.util
import pathlib
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import datasets

from dpjax.secure.mpc import secure_jit, spu_program
from dpjax.secure.mpc.spu_jit import reveal, share
from dpjax.validate import UserError
from tests.refuses import refuses

if importlib.util.find_spec("spu") is None:
  pytest.skip(f"needs spu: {spu_program.INSTALL}", allow_module_level=True)

PROTOCOLS = ("SEMI2K", "ABY3")  # CHEETAH takes seconds
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 10)).astype(np.float32)
Y = (RNG.random(64) < 0.5).astype(np.float32)
W = RNG.normal(size=10).astype(np.float32)


def _logistic_loss(w, x, y):
  scores = x @ w
  return jnp.mean(jax.nn.softplus(scores) - y * scores)


def logistic_step(w, x, y):
  return w - 0.5 * jax.grad(_logistic_loss)(w, x, y)


def _mlp_loss(params, x, y):
  (w1, b1), (w2, b2) = params
  logits = jax.nn.relu(x @ w1 + b1[None]) @ w2 + b2[None]
  return -jnp.mean(jnp.sum(y * jax.nn.log_softmax(logits), axis=1))


def mlp_step(params, x, y):
  gradients = jax.grad(_mlp_loss)(params, x, y)
  return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def mlp_problem(seed=0, batch=32):
  rng = np.random.default_rng(seed)
  dense = lambda i, o: (
    (rng.normal(size=(i, o)) / i**0.5).astype(np.float32),
    np.zeros(o, np.float32),
  )
  x = rng.random((batch, 784)).astype(np.float32)
  y = np.eye(10, dtype=np.float32)[rng.integers(0, 10, batch)]
  return (dense(784, 32), dense(32, 10)), x, y


def _error(got, want):
  differences = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), got, want)
  return max(jax.tree.leaves(differences))


@pytest.mark.cases(long=["SEMI2K"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_logistic_step_is_that_of_plain_jax(protocol):
  got = secure_jit(logistic_step, protocol=protocol)(W, X, Y)
  assert got.dtype == np.float32 and got.shape == (10,)
  assert _error(got, logistic_step(W, X, Y)) < 2e-4


@pytest.mark.long
def test_cheetah_without_a_dealer_agrees_too():
  got = secure_jit(logistic_step, protocol="CHEETAH")(W, X, Y)
  assert _error(got, logistic_step(W, X, Y)) < 1e-3


@pytest.mark.cases(slow=["ABY3"], long=...)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_network_s_step_is_that_of_plain_jax(protocol):
  problem = mlp_problem()
  got = secure_jit(mlp_step, protocol=protocol)(*problem)
  assert _error(got, mlp_step(*problem)) < 2e-4  # steps of up to .03


@pytest.mark.cases(long=["SEMI2K"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_errors_of_what_training_steps_are_made_of(protocol):
  x = np.linspace(-30, 8, 400, dtype=np.float32)
  functions = {
    "exp": (lambda x: jnp.exp(-jnp.abs(x)), 2e-4),
    "sigmoid": (jax.nn.sigmoid, 2e-4),
    "softmax": (lambda x: jax.nn.softmax(x.reshape(-1, 10)), 2e-4),
    "product": (lambda x: x * x[::-1], 1e-3),  # of up to 240
    "relu": (jax.nn.relu, 2e-5),
    "tanh": (jnp.tanh, 6e-3),
    "argmax": (lambda x: jnp.argmax(jnp.sin(7 * x).reshape(-1, 10), 1), 0),
  }
  got = secure_jit(
    lambda x: {name: f(x) for name, (f, _) in functions.items()}, protocol=protocol
  )(x)
  errors = {name: _error(got[name], f(x)) for name, (f, _) in functions.items()}
  assert all(errors[name] <= bound for name, (_, bound) in functions.items()), errors


def _cancer():
  data = datasets.load_breast_cancer()
  x = (data.data - data.data.mean(0)) / data.data.std(0)
  order = np.random.default_rng(0).permutation(len(x))
  x, y = x[order].astype(np.float32), data.target[order].astype(np.float32)
  return x[:455], y[:455], x[455:], y[455:]


def _trained(w, x, y):
  return jax.lax.fori_loop(0, 20, lambda _, w: logistic_step(w, x, y), w)


def test_breast_cancer_s_accuracy_is_that_of_plain_training():
  x, y, x_test, y_test = _cancer()
  accuracy = lambda w: float(np.mean((x_test @ w > 0) == y_test))
  start = np.zeros(30, np.float32)
  plain = np.asarray(jax.jit(_trained)(start, x, y))
  secret = secure_jit(_trained, protocol="ABY3")(start, x, y)
  assert accuracy(secret) == accuracy(plain) > 0.95
  assert _error(secret, plain) < 2e-3


def test_parameters_stay_shared_between_steps():
  step = secure_jit(logistic_step, protocol="ABY3", revealed=False)
  w, data = W, share((X, Y), protocol="ABY3")
  for _ in range(3):
    w = step(w, *data)
  assert "shares" not in repr(w) and w.shape == (10,)
  plain = logistic_step(logistic_step(logistic_step(W, X, Y), X, Y), X, Y)
  assert _error(reveal(w), plain) < 5e-4


def _uniform(bits):
  """Whether 0/1 values are fair coins, at 5 standard deviations."""
  return abs(bits.mean() - 0.5) < 5 * 0.5 / bits.size**0.5


def _low_bits(secret, rank, bit):
  (chunk,) = secret.shares[rank].share_chunks
  ring = np.frombuffer(chunk[-8 * int(np.prod(secret.shape)) :], np.uint64)
  return (ring >> np.uint64(bit)) & np.uint64(1)


def test_one_share_says_nothing_and_two_say_all():
  ones = np.ones(4096, np.float32)
  first, second = share(ones), share(ones)
  for bit in (0, 18, 40, 63):
    assert _uniform(_low_bits(first, 0, bit)) and _uniform(_low_bits(first, 1, bit))
    together = _low_bits(first, 0, bit) ^ _low_bits(second, 0, bit)
    assert _uniform(together)  # other randomness the second time
  assert not _uniform(np.zeros(4096))  # the test can fail
  assert (reveal(first) == 1).all()


def test_bytes_are_counted_for_what_crosses():
  product = lambda a, b: a @ b
  sizes = [
    secure_jit(product).measured(np.ones((4, n), np.float32), np.ones((n, 4), np.float32))
    for n in (8, 80)
  ]
  small, large = sizes
  # both open 4 x 8 and 8 x 4 masked numbers of 8 bytes; ten times the inner size, ten times all
  assert 2 * 64 * 8 <= small.run_bytes < large.run_bytes <= 10 * small.run_bytes
  assert small.input_bytes >= 2 * 64 * 8 and small.seconds > 0


def test_a_public_argument_is_not_shared():
  scaled = secure_jit(lambda x, rate: rate * x, public_argnums=(1,))
  assert _error(scaled(X, 0.5), 0.5 * X) < 1e-5
  with refuses("public_argnums[0]", value=2):
    secure_jit(lambda x, rate: rate * x, public_argnums=(2,))(X, 0.5)
  with refuses("args[1]"):
    scaled(X, share(0.5))


def _draws(x):
  return x + jax.random.uniform(jax.random.key(0), x.shape)


def _endless(x):
  return jax.lax.while_loop(lambda s: s.sum() < 1e3, lambda s: s * 2, x)


@pytest.mark.parametrize(
  ("fn", "field"),
  [
    (jnp.sort, "fn"),
    (lambda x: x[jnp.argsort(x[:, 0])], "fn"),
    (_draws, "fn"),
    (lambda x: x.astype(jnp.bfloat16), "fn"),
    (lambda x: jnp.linalg.cholesky(x.T @ x), "fn"),
    (lambda x: jax.nn.gelu(x, approximate=False), "fn"),
    (lambda x: x @ W, "fn"),
    (
      lambda x: jax.jit(lambda z: z * W[None])(x),
      "fn",
    ),
    (_endless, "spu"),
  ],
)
def test_what_spu_cannot_do_is_one_line(fn, field):
  with refuses(field) as caught:
    secure_jit(fn)(np.abs(X) + 1)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("value", "field"),
  [
    (np.ones(3), "args[0]"),
    (np.ones(3, np.int64), "args[0]"),
    (jax.random.key(0), "args[0]"),
    ("text", "args[0]"),
    (np.float32([1, np.nan]), "args[0]"),
    (np.float32([-2e5]), "args[0]"),
    (share(X, protocol="ABY3"), "args[0]"),
  ],
)
def test_what_spu_cannot_hold_is_one_line(value, field):
  with refuses(field):
    secure_jit(lambda x: x)(value)


def test_protocols_and_parties_are_checked():
  with refuses("protocol", value="ABY"):
    secure_jit(jnp.sum, protocol="ABY")
  with refuses("parties", value=1):
    secure_jit(jnp.sum, parties=1)
  assert _error(secure_jit(jnp.sum, parties=5)(X), X.sum()) < 1e-3


def test_without_the_extra_it_is_one_line(monkeypatch):
  monkeypatch.setitem(sys.modules, "spu", None)
  with pytest.raises(UserError, match="needs spu; pip install -e '\\.\\[mpc-spu\\]'"):
    secure_jit(jnp.sum)(X)
  assert "spu==" in spu_program.INSTALL


def test_no_private_name_of_jax_is_used():
  for path in pathlib.Path(spu_program.__file__).parent.glob("spu_*.py"):
    assert "jax._src" not in path.read_text()


def test_one_function_called_by_threads_at_once_mixes_no_shares():
  squared, found = secure_jit(lambda x: x * x), {}

  def call(value):
    found[value] = squared(np.full(5, value, np.float32))

  threads = [threading.Thread(target=call, args=(float(v),), daemon=True) for v in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(20)
  for value in range(4):
    np.testing.assert_allclose(found[value], value**2, atol=1e-3)
