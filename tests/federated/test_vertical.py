"""Split networks against the joint gradient; encrypted regression against the pooled one."""

import builtins
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn import datasets, linear_model, model_selection

from dpjax.secure import vertical
from dpjax.secure.vertical import disclosure, encrypted_vectors, network
from dpjax.secure.vertical.network import (
  SplitParams,
  Traffic,
  party_forward,
  split_gradient,
)
from dpjax.types import Example
from dpjax.validate import UserError
from tests.refuses import refuses


@pytest.fixture(scope="module")
def breast_cancer():
  x, y = datasets.load_breast_cancer(return_X_y=True)
  return np.asarray(x), np.asarray(y)


@pytest.fixture
def tenseal():
  if importlib.util.find_spec("tenseal") is None:
    pytest.skip("needs TenSEAL: pip install -e '.[vertical]'")


def halves(x):
  return x[:, :15], x[:, 15:]


# --- split network


def bottom(params, x):
  return jnp.tanh(x @ params["w"] + params["b"])


def top_loss(params, sent, y):
  logits = jnp.concatenate(sent, axis=1) @ params
  return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def joint_loss(bottoms):
  """What the parties minimise together, as one function of all parameters."""

  def loss(params, batch):
    sent = tuple(b(p, x) for b, p, x in zip(bottoms, params.bottoms, batch.x))
    return top_loss(params.top, sent, batch.y)

  return loss


def split_params(widths, *, units=4, classes=3, seed=0):
  keys = jax.random.split(jax.random.key(seed), len(widths) + 1)
  bottoms = tuple(
    {"w": jax.random.normal(key, (width, units)), "b": jnp.zeros((1, units))}
    for key, width in zip(keys, widths)
  )
  return SplitParams(bottoms, jax.random.normal(keys[-1], (units * len(widths), classes)))


def split_batch(widths, *, rows=7, seed=1):
  random = np.random.default_rng(seed)
  xs = tuple(jnp.asarray(random.normal(size=(rows, width))) for width in widths)
  return Example(xs, jnp.asarray(random.integers(0, 3, rows)))


@pytest.mark.cases(long=[1])
@pytest.mark.parametrize("widths", [(5,), (2, 4, 1)])
def test_messages_give_the_joint_gradient(x64, widths):
  params, batch = split_params(widths), split_batch(widths)
  params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
  bottoms = [bottom] * len(widths)
  by_messages = functools.partial(split_gradient, bottoms, top_loss)
  gradients, info = jax.jit(by_messages)(params, batch)
  joint = jax.value_and_grad(joint_loss(bottoms))
  loss, expected = jax.jit(joint)(params, batch)
  assert jax.tree.structure(gradients) == jax.tree.structure(expected)
  for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected)):
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
  np.testing.assert_allclose(info.loss, loss)
  assert info.bytes_up == info.bytes_down == 7 * 4 * len(widths) * 8  # float64


@pytest.mark.long
def test_training_equals_the_joint_model():
  widths, bottoms, tx = (3, 2), [bottom] * 2, optax.adam(0.05)
  batch, params = split_batch(widths), split_params(widths)
  init, step = vertical.split_learning(bottoms, top_loss, tx)
  state, opt_state = init(params), tx.init(params)
  step = jax.jit(step)
  gradient_fn = jax.jit(jax.grad(joint_loss(bottoms)))
  for _ in range(5):
    state, _ = step(state, batch)
    gradient = gradient_fn(params, batch)
    updates, opt_state = tx.update(gradient, opt_state, params)
    params = optax.apply_updates(params, updates)
  for got, want in zip(jax.tree.leaves(state.params), jax.tree.leaves(params)):
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_party_sends_nothing_but_activations():
  """What leaves a party is a function of its bottom's output: same output, same message."""
  x = jnp.arange(6.0).reshape(3, 2)
  params = {"w": jnp.zeros((2, 4)), "b": jnp.ones((1, 4))}
  first, _ = party_forward(bottom, params, x)
  second, _ = party_forward(bottom, params, -x)
  np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_split_network_learns_breast_cancer(breast_cancer):
  x, y = breast_cancer
  z = ((x - x[:400].mean(0)) / x[:400].std(0)).astype(np.float32)
  init, step = vertical.split_learning([bottom] * 2, top_loss, optax.adam(0.02))
  state, step = init(split_params((15, 15), classes=2)), jax.jit(step)
  train = Example(halves(z[:400]), y[:400])
  for _ in range(100):
    state, _ = step(state, train)
  sent = [bottom(p, part) for p, part in zip(state.params.bottoms, halves(z[400:]))]
  predicted = np.argmax(np.concatenate(sent, axis=1) @ state.params.top, axis=1)
  assert np.mean(predicted == y[400:]) > 0.93


@pytest.mark.cases(quick=[2], long=...)
@pytest.mark.parametrize(
  ("change", "field"),
  [
    (lambda b: b._replace(x=b.x[:1]), "batch.x"),
    (
      lambda b: b._replace(y=b.y[:3]),
      "batch",
    ),
    (lambda b: b._replace(x=(b.x[0][:2], b.x[1])), "batch"),
  ],
)
def test_parties_that_do_not_fit(change, field):
  params, batch = split_params((3, 2)), change(split_batch((3, 2)))
  with refuses(field):
    split_gradient([bottom] * 2, top_loss, params, batch)


# --- the loss polynomials


def test_degree_one_is_the_derivative_of_the_taylor_loss(x64):
  loss = lambda s, sign: jnp.log(2.0) - sign * s / 2 + s * s / 8
  for score in (-3.0, 0.0, 2.0):
    for label in (0, 1):
      want = jax.grad(loss)(score, 2.0 * label - 1)
      got = network.residuals(np.array([score]), np.array([label]))
      np.testing.assert_allclose(got, want)
  exact = jax.grad(lambda s: jnp.log1p(jnp.exp(-s)))  # and of the logistic loss, near 0
  assert abs(exact(1e-3) - network.residuals(np.array([1e-3]), np.array([1]))[0]) < 1e-9


def test_degree_three_is_near_the_sigmoid_and_wrong_beyond_eight():
  error = lambda s: np.abs(
    network.residuals(s, np.zeros(1), degree=3) - 1 / (1 + np.exp(-s))
  )
  assert error(np.linspace(-8, 8, 10_001)).max() < 0.115
  assert error(np.array([16.0])).item() > 4


# --- two-party regression


def pooled_steps(x, y, *, num_steps, learning_rate, ridge=0.0, degree=1):
  """The same gradient steps by one holder of all the data, in plain NumPy."""
  x = np.column_stack([x, np.ones(len(x))])
  w = np.zeros(x.shape[1])
  for _ in range(num_steps):
    gradient = x.T @ network.residuals(x @ w, y, degree=degree) / len(y)
    w = w - learning_rate * (gradient + ridge * np.append(w[:-1], 0))
  return w


def two_party(keys, x, y, *, num_steps, **options):
  seen = disclosure.Disclosure(secret_labels=False)  # 569 rows are few for secrets
  init, step = vertical.two_party_logistic(keys, disclosure=seen, **options)
  state, traffic = init((15, 15)), None
  for _ in range(num_steps):
    state, traffic = step(state, Example(halves(x), y))
  return state, traffic


def squashed(x, rows):
  """Each feature by its owner's own mean and std, then tanh: scores stay within +-8."""
  return np.tanh((x - x[rows].mean(0)) / x[rows].std(0))


@pytest.mark.parametrize("degree", [1, 3])
def test_plaintext_twin_equals_pooled_steps(breast_cancer, degree):
  x, y = breast_cancer
  z = squashed(x, slice(None))
  options = dict(num_steps=20, learning_rate=0.3, ridge=0.01, degree=degree)
  state, _ = two_party(encrypted_vectors.plaintext(), z, y, **options)
  want = pooled_steps(z, y, **options)
  np.testing.assert_allclose(
    np.concatenate([state.weights_a, state.weights_b]), want, atol=1e-7
  )


def accuracies(x, y, *, seed):
  """(two parties, scikit-learn on the pooled features, on party a's own), 5-fold."""
  right = np.zeros((3, len(y)), bool)
  folds = model_selection.StratifiedKFold(5, shuffle=True, random_state=seed)
  for train, test in folds.split(x, y):
    z = squashed(x, train)
    keys = encrypted_vectors.plaintext()
    options = dict(num_steps=200, learning_rate=0.3, degree=3)
    state, _ = two_party(keys, z[train], y[train], **options)
    scores = vertical.two_party_scores(state, Example(halves(z[test]), None))
    right[0, test] = (scores > 0) == y[test]
    z = (x - x[train].mean(0)) / x[train].std(0)
    for row, columns in ((1, slice(0, 30)), (2, slice(0, 15))):
      model = linear_model.LogisticRegression(max_iter=2_000)
      model.fit(z[train][:, columns], y[train])
      right[row, test] = model.predict(z[test][:, columns]) == y[test]
  return right.mean(axis=1)


@pytest.mark.long
def test_breast_cancer_within_half_a_point_of_pooled_logistic_regression(breast_cancer):
  ours, pooled, alone = accuracies(*breast_cancer, seed=0)
  assert abs(ours - pooled) <= 0.005 and ours > alone + 0.01
  assert ours > 0.97


@pytest.mark.cases(long=["3"])
@pytest.mark.parametrize("degree", [1, 3])
def test_encrypted_equals_plaintext(tenseal, breast_cancer, degree):
  x, y = breast_cancer
  z = squashed(x, slice(None))
  keys = encrypted_vectors.ckks(depth=(degree + 1) // 2)
  options = dict(num_steps=4, learning_rate=0.3, degree=degree)
  state, traffic = two_party(keys, z, y, **options)
  twin, plain = two_party(encrypted_vectors.plaintext(), z, y, **options)
  np.testing.assert_allclose(state.weights_a, twin.weights_a, atol=1e-5)
  np.testing.assert_allclose(state.weights_b, twin.weights_b, atol=1e-5)
  assert traffic.from_coordinator == plain.from_coordinator
  assert traffic.to_coordinator > plain.to_coordinator
  assert 300_000 < traffic.a_to_b < 3_000_000


def test_equal_vectors_have_different_ciphertexts(tenseal):
  keys = encrypted_vectors.ckks()
  cipher = keys.public.encrypt(np.array([1.0, 2.0]))
  np.testing.assert_allclose(keys.decrypt(cipher)[:3], [1, 2, 0], atol=1e-9)
  assert cipher != keys.public.encrypt(np.array([1.0, 2.0]))  # fresh randomness


class _Messages:
  """The public operations, which keep what each of them returns."""

  def __init__(self, public):
    self.public, self.slots, self.sent, self.answered = public, public.slots, [], []

  def encrypt(self, values):
    self.sent.append(self.public.encrypt(values))
    return self.sent[-1]

  def add(self, cipher, values):
    self.answered.append(self.public.add(cipher, values))
    return self.answered[-1]

  def combine(self, ciphers, factors, terms):
    return self.public.combine(ciphers, factors, terms)


def _difference(public, before, after):
  """The plain numbers that were added to a ciphertext, if its second part is as it was. A zero
  under keys of the reader's own lets SEAL decrypt the difference."""
  coder, on = public._coder, public._on
  first, second = on.load(before), on.load(after)
  keys = coder.seal.KeyGenerator(coder.context)
  own = coder.seal.PublicKey()
  keys.create_public_key(own)
  out, plain = coder.seal.Ciphertext(), coder.seal.Plaintext()
  zero = coder.encode(0.0, on.level(first))
  coder.seal.Encryptor(coder.context, own).encrypt(zero, out)
  evaluator = coder.seal.Evaluator(coder.context)
  evaluator.add_inplace(out, second)
  evaluator.sub_inplace(out, first)
  coder.seal.Decryptor(coder.context, keys.secret_key()).decrypt(out, plain)
  return coder.decode(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
  "encrypted", [True, False], ids=["as_it_is", "plain_numbers_added"]
)
def test_party_a_cannot_subtract_what_it_sent(tenseal, monkeypatch, encrypted):
  """b's answer minus a's own ciphertext was b's residuals, so a read every label."""
  if not encrypted:
    plus = lambda public, held, values: public._on.dump(public._on.plus(held, values))
    monkeypatch.setattr(encrypted_vectors._Ckks, "_sum", plus)
  keys = encrypted_vectors.ckks()
  messages = _Messages(keys.public)
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(200, 4)), rng.integers(0, 2, 200)
  seen = disclosure.Disclosure(secret_labels=False)
  init, step = vertical.two_party_logistic(
    keys._replace(public=messages), learning_rate=1.0, disclosure=seen
  )
  step(init((2, 2)), Example((x[:, :2], x[:, 2:]), y))
  read = _difference(keys.public, messages.sent[0], messages.answered[0])[:200]
  right = np.mean((read < 0) == y)
  assert (right < 0.7) if encrypted else (np.abs(read - (0.5 - y)).max() < 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("imaginary", [True, False])
def test_masks_hide_the_noise_from_the_coordinator(tenseal, monkeypatch, imaginary):
  """Slots are complex. Masks of the real parts alone left the noise of the residuals times each
  feature in the imaginary parts: the coordinator read features of 200 to +-3.5."""
  if not imaginary:
    masks = network._masks
    drawn = iter([True, False] * 99)
    monkeypatch.setattr(network, "_masks", lambda n: masks(n) * next(drawn))
  keys, seen = encrypted_vectors.ckks(), []
  spy = keys._replace(decrypt=lambda cipher: seen.append(cipher) or keys.decrypt(cipher))
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(300, 4)), rng.integers(0, 2, 300)
  known = disclosure.Disclosure(secret_labels=False)
  init, step = vertical.two_party_logistic(spy, learning_rate=1.0, disclosure=known)
  step(init((2, 2)), Example((x[:, :2], x[:, 2:]), y))
  parts = [part for cipher in seen for part in (keys.decrypt(cipher).view(float))[1::2]]
  spread = np.std(parts) / (2.0**network.MASK_BITS / np.sqrt(3))
  assert (abs(spread - 1) < 0.05) == imaginary
  assert len(parts) == len(seen) * keys.public.slots  # no slot without a mask


def test_residuals_that_no_mask_hides_are_refused():
  """Of +-1e12, in steps too large, the coordinator saw every product."""
  rng = np.random.default_rng(0)
  x, y = rng.uniform(-1000, 1000, size=(512, 4)), rng.integers(0, 2, 512)
  seen = disclosure.Disclosure(secret_labels=False)
  init, step = vertical.two_party_logistic(
    encrypted_vectors.plaintext(), learning_rate=1.0, disclosure=seen
  )
  batch = Example((x[:, :2], x[:, 2:]), y)
  state, _ = step(init((2, 2)), batch)
  with refuses("batch"):
    step(state, batch)


def test_sums_are_rounded_far_above_the_noise_of_ciphertexts(tenseal):
  """b knows all residuals of a first step, and so would learn about the key from noise."""
  keys, rng = encrypted_vectors.ckks(), np.random.default_rng(0)
  residuals, columns = rng.integers(0, 2, 2048) - 0.5, rng.uniform(-1000, 1000, (2048, 3))
  cipher = keys.public.encrypt(np.resize(residuals, keys.public.slots))
  noise = np.std(np.real(keys.decrypt(cipher))[:2048] - residuals) * np.sqrt(2048)
  assert noise < 1e-3 * 2.0**-disclosure.SUM_BITS
  sums, _ = network.masked_sums(keys, cipher, columns)
  # Of a column of up to 1000, steps are 1024 times as large.
  np.testing.assert_allclose(sums, columns.T @ residuals, atol=1024 * 2.0**-19)


def test_bytes_sent_are_those_of_the_messages(breast_cancer):
  x, y = breast_cancer
  _, traffic = two_party(
    encrypted_vectors.plaintext(), x / x.max(0), y, num_steps=1, learning_rate=0.1
  )
  copies = 4096 // len(y)
  vector = 8 * 4096
  ciphers = -(-15 // copies) + -(-16 // copies)  # b's columns and its bias
  assert traffic == Traffic(vector, vector, ciphers * vector, 8 * 31)


def test_the_coordinator_sees_masks(breast_cancer):
  """What it decrypts is uniform at +-2^24; two runs of the same step share nothing."""
  x, y = breast_cancer
  seen = []
  keys = encrypted_vectors.plaintext()
  spy = keys._replace(decrypt=lambda cipher: seen.append(cipher) or keys.decrypt(cipher))
  for _ in range(2):
    two_party(spy, x / x.max(0), y, num_steps=1, learning_rate=0.1)
  first, second = (np.frombuffer(seen[i]) for i in (0, len(seen) // 2))
  assert not np.intersect1d(first, second).size
  scale = 2.0**vertical.network.MASK_BITS
  assert np.abs(first).max() <= scale * 1.001
  assert abs(first.std() / (scale / np.sqrt(3)) - 1) < 0.05
  assert abs(np.corrcoef(first, second)[0, 1]) < 0.08


@pytest.mark.parametrize(
  ("rows", "label", "field"),
  [
    (15, 1, "batch"),
    (16, 1, "batch"),
    (5_000, 1, "batch"),
    (20, 2, "batch.y"),
    (20, 0.5, "batch.y"),
  ],
)
def test_wrong_batches(rows, label, field):
  init, step = vertical.two_party_logistic(encrypted_vectors.plaintext(), learning_rate=0.1)
  x = np.random.default_rng(0).normal(size=(2, rows, 15))
  batch = Example((x[0], x[1]), np.full(rows, label))
  with refuses(field):
    step(init((15, 15)), batch)


def test_rows_and_parties_must_fit():
  init, step = vertical.two_party_logistic(encrypted_vectors.plaintext(), learning_rate=0.1)
  x = np.zeros((20, 3))
  for batch, field in (
    (Example((x, x[:9]), np.zeros(20)), "batch"),
    (Example((x,), np.zeros(20)), "batch.x"),
  ):
    with refuses(field):
      step(init((3, 3)), batch)


@pytest.mark.parametrize(
  ("options", "field"),
  [
    (dict(learning_rate=0), "learning_rate"),
    (dict(degree=2), "degree"),
    (dict(ridge=-1), "ridge"),
  ],
)
def test_wrong_options(options, field):
  with refuses(field):
    vertical.two_party_logistic(
      encrypted_vectors.plaintext(), **{"learning_rate": 0.1, **options}
    )


def test_without_tenseal_one_line_names_the_extra(monkeypatch):
  real = builtins.__import__

  def refuse(name, *args, **kwargs):
    if name == "tenseal":
      raise ImportError(name)
    return real(name, *args, **kwargs)

  monkeypatch.setattr(builtins, "__import__", refuse)
  with pytest.raises(UserError, match=r"pip install -e '\.\[vertical\]'"):
    encrypted_vectors.ckks()


def test_only_two_depths():
  with refuses("depth", value=3):
    encrypted_vectors.ckks(depth=3)
