"""Text read from gradients: exactly while the span has room, and not beyond or under noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import attacks, losses, training
from dpjax.attacks import text_from_gradients as text
from dpjax.types import Example
from dpjax.zoo import networks
from tests.refuses import refuses

_VOCAB = 12
_LENGTH = 8
_WIDTH = 32


@pytest.fixture(scope="module")
def model():
  return networks.build(
    "transformer", num_classes=_VOCAB, num_layers=2, num_heads=2, features=_WIDTH,
    max_length=_LENGTH,
  )  # fmt: skip


@pytest.fixture(scope="module")
def params(model):
  return model.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))


@pytest.fixture(scope="module")
def attack(model):
  return attacks.SpanAttack(attacks.attention_inputs(model), _VOCAB, _LENGTH - 1, skip=(0,))


@pytest.fixture(scope="module")
def kernels(model, params):
  """(lines, weights of each) -> gradients of both kernels."""
  loss = losses.next_token(model.apply, padding_id=0)
  each = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))

  def gradients(lines, weights):
    zeros = jnp.zeros(len(lines), jnp.int32)
    tree = each(params, Example(jnp.asarray(lines), zeros))
    total = jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1), tree)
    blocks = [total["params"][f"block_{i}"]["attention"] for i in (0, 1)]
    return [block["query_key_value"]["kernel"] for block in blocks]

  return gradients


def _draw(seed, lengths):
  rng = np.random.default_rng(seed)
  lines = np.zeros((4, _LENGTH), np.int32)
  for row, length in zip(lines, lengths):
    row[:length] = rng.integers(1, _VOCAB, length)
  return lines


def _inputs_of(line):
  """The last token of a line is only a target."""
  return [int(token) for token in line[line != 0][:-1]]


@pytest.mark.cases(slow=["1"], long=...)
@pytest.mark.parametrize("seed", range(2))
def test_lines_come_back_exactly_whatever_the_clipping_factors(
  kernels, params, attack, seed
):
  lines = _draw(seed, [8, 5, 7])
  weights = jnp.array([0.1, 2.0, 0.3, 0.0])
  found = attack(params, kernels(lines, weights))
  for line in lines[:3]:
    assert _inputs_of(line) in found
  # And nothing that was not sent, but for beginnings of what was.
  truths = [_inputs_of(line) for line in lines[:3]]
  assert all(any(row == truth[: len(row)] for truth in truths) for row in found)


@pytest.mark.slow
def test_the_first_block_alone_gives_a_line_that_is_alone(kernels, params, attack):
  lines = _draw(7, [8])
  gradients = kernels(lines, jnp.array([1.0, 0.0, 0.0, 0.0]))
  near = attack.token_distances(params, gradients[0])
  assert near.shape == (_LENGTH - 1, _VOCAB)
  for position, row in enumerate(near):
    assert np.flatnonzero(row < 1e-3).tolist() == [lines[0, position]]
  assert attack(params, gradients[:1]) == [_inputs_of(lines[0])]


@pytest.mark.slow
def test_as_many_tokens_as_dimensions_show_nothing(kernels, params, attack):
  """Four lines of seven inputs each are 28 tokens of 32; the width less one is the end."""
  lines = _draw(3, [8, 8, 8, 8])
  assert attack(params, kernels(lines, jnp.ones(4)))
  full = np.random.default_rng(0).normal(size=(_WIDTH, 3 * _WIDTH))
  near = attack.token_distances(params, full)
  assert np.isinf(near).all()
  assert attack(params, [full, full]) == []
  assert attack(params, [np.zeros_like(full)] * 2) == []


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "least", "most"), [(0.01, 0.9, 1.0), (1.0, 0.0, 0.3)])
def test_noise_hides_it_once_it_is_as_large_as_a_guarantee_needs(
  kernels, params, attack, noise, least, most
):
  """A noise multiplier of .01 is half of the gradient's norm in all, and hides nothing."""
  right = 0
  for seed in range(12):
    lines = _draw(seed, [8])
    first, _ = kernels(lines, jnp.array([1.0, 0.0, 0.0, 0.0]))
    std = noise * np.linalg.norm(first)
    noisy = first + std * np.random.default_rng(seed).normal(size=first.shape)
    near = attack.token_distances(params, noisy, rank=7)
    right += np.sum(near.argmin(axis=1) == lines[0, :-1])
  share = right / (12 * (_LENGTH - 1))
  assert least <= share <= most


@pytest.mark.cases(slow=["True"], long=...)
@pytest.mark.parametrize("later", [False, True])
def test_adapters_show_as_many_tokens_as_their_rank_is_above(model, params, attack, later):
  """At first B's gradient does, through A; once B is not 0, A's own gradient does."""
  base = losses.next_token(model.apply, padding_id=0)
  adapted = training.lora(
    params, "*/query_key_value/kernel", rank=12, alpha=12.0, key=jax.random.key(3)
  )
  sent = adapted.trainable
  if later:
    key = jax.random.key(4)
    sent = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(key, leaf.shape), sent)
  line = _draw(5, [8])[0]
  gradient = jax.jit(jax.grad(adapted.apply(base)))(sent, Example(jnp.asarray(line), 0))
  paths = [f"params/block_{i}/attention/query_key_value/kernel" for i in (0, 1)]
  whole = adapted.merge(sent)
  if later:
    found = attack(whole, [gradient[path]["a"] for path in paths])
  else:
    assert all(np.all(np.asarray(gradient[path]["a"]) == 0) for path in paths)
    found = attack(
      whole, [gradient[path]["b"] for path in paths], projects=[sent[p]["a"] for p in paths]
    )
  assert found[0] == _inputs_of(line)


def test_the_distance_is_that_of_least_squares():
  rng = np.random.default_rng(0)
  matrix = rng.normal(size=(9, 4)) @ rng.normal(size=(4, 20))
  basis = text.span(matrix)
  assert basis.shape == (9, 4)
  inputs = rng.normal(size=(30, 9))
  residues = [np.linalg.lstsq(matrix, row, rcond=None)[0] for row in inputs]
  expected = [
    np.linalg.norm(row - matrix @ x) / np.linalg.norm(row)
    for row, x in zip(inputs, residues)
  ]
  np.testing.assert_allclose(text.distance(basis, inputs), expected, atol=1e-12)
  assert text.distance(basis, np.zeros((1, 9))).tolist() == [1.0]


@pytest.mark.parametrize(
  ("call", "field"),
  [
    (lambda a, p: a(p, []), "gradients"),
    (lambda a, p: a(p, [np.ones((3, 4))]), "gradients.shape"),
    (lambda a, p: text.span(np.full((2, 2), np.inf)), "gradient.shape"),
    (lambda a, p: text.span(np.ones((2, 3)), rank=3), "rank"),
    (lambda a, p: text.span(np.full((2, 2), np.nan)), "gradient"),
    (
      lambda a, p: a(p, [np.ones((4, 4))], projects=[np.ones((3, 4))]),
      "projects.shape",
    ),
    (lambda a, p: text.SpanAttack(a.inputs, 1, 4), "vocab_size"),
    (lambda a, p: text.SpanAttack(a.inputs, 5, 4, near=0.0), "near"),
  ],
)
def test_wrong_arguments_are_one_line(attack, params, call, field):
  with refuses(field):
    call(attack, params)


def test_more_blocks_than_there_are_are_refused(model):
  with refuses("num_blocks", value=3):
    attacks.attention_inputs(model, num_blocks=3)
