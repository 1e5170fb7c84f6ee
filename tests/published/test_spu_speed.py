"""Training steps on shares by SPU, unmodified JAX, beside plain JAX and our two-party engine.

`python -m tests.published.test_spu_speed` writes results/secure/spu.{csv,md}, in 3 minutes on 2
busy CPU cores, of which all parties are threads. Needs the extras `mpc-spu` (with spu) and
`secure`. `python -m pytest -m long tests/published/test_spu_speed.py` checks the errors alone.
"""

import csv
import importlib.util
import itertools
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.secure import mpc
from dpjax.secure.mpc import private_values, secureml, spu_program
from dpjax.secure.mpc.spu_jit import secure_jit

_OUT = pathlib.Path(__file__).parents[2] / "results" / "secure"
_SECUREML = (784, 128, 128, 10)
_BATCH = 128


def _dense(rng, *sizes):
  return [
    (
      rng.normal(size=(i, o)).astype(np.float32) * (2 / i) ** 0.5,
      np.zeros((1, o), np.float32),
    )
    for i, o in itertools.pairwise(sizes)
  ]


def _scores(params, x):
  *hidden, last = params
  for kernel, bias in hidden:
    x = jax.nn.relu(x @ kernel + bias)
  return x @ last[0] + last[1]


def _loss(params, x, y):
  z = _scores(params, x)
  if z.shape[1] == 1:
    return jnp.mean(jax.nn.softplus(z) - y * z)
  return -jnp.mean(jnp.sum(y * jax.nn.log_softmax(z), axis=1))


def step(params, x, y):
  """One step of gradient descent on the mean loss: what a user has already."""
  gradients = jax.grad(_loss)(params, x, y)
  return jax.tree.map(lambda p, g: p - 0.125 * g, params, gradients)


def _conv_loss(params, x, y):
  conv = lambda x, k: jax.lax.conv_general_dilated(
    x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
  )
  pool = lambda x: x.reshape(
    len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, x.shape[3]
  ).mean((2, 4))
  first, second, *dense = params
  x = pool(jax.nn.relu(conv(x, first)))
  x = pool(jax.nn.relu(conv(x, second)))
  return _loss(dense, x.reshape(len(x), -1), y)


def lenet_step(params, x, y):
  """Of two convolutions with mean pooling and two dense layers."""
  gradients = jax.grad(_conv_loss)(params, x, y)
  return jax.tree.map(lambda p, g: p - 0.125 * g, params, gradients)


def _problems():
  """name -> (function, arguments)."""
  rng = np.random.default_rng(0)
  labels = lambda n: np.eye(10, dtype=np.float32)[rng.integers(0, 10, n)]
  pixels = lambda *shape: rng.random(shape).astype(np.float32)
  coins = (rng.random((64, 1)) < 0.5).astype(np.float32)
  x = rng.normal(size=(64, 10)).astype(np.float32)
  kernel = lambda *shape: (rng.normal(size=shape) * 0.2).astype(np.float32)
  lenet = [kernel(5, 5, 1, 6), kernel(5, 5, 6, 16), *_dense(rng, 256, 84, 10)]
  return {
    "logistic 10, B=64": (step, (_dense(rng, 10, 1), x, coins)),
    "784-32-10, B=32": (step, (_dense(rng, 784, 32, 10), pixels(32, 784), labels(32))),
    "784-128-128-10, B=128": (
      step, (_dense(rng, *_SECUREML), pixels(_BATCH, 784), labels(_BATCH)),
    ),
    "LeNet, B=16": (lenet_step, (lenet, pixels(16, 28, 28, 1), labels(16))),
  }  # fmt: skip


_RUNS = [
  *((name, protocol) for name in _problems() for protocol in ("SEMI2K", "ABY3")),
  ("logistic 10, B=64", "CHEETAH"),
  ("784-32-10, B=32", "CHEETAH"),
]


def _error(got, want):
  differences = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), got, want)
  return max(jax.tree.leaves(differences))


def measured(name, protocol, repeats):
  """A row: best time of several, bytes of all parties, error of the parameters."""
  fn, args = _problems()[name]
  runs = [secure_jit(fn, protocol=protocol).measured(*args) for _ in range(repeats)]
  want = jax.jit(fn)(*args)
  return {
    "step": name,
    "by": f"SPU {protocol}, {mpc.spu_jit.PROTOCOLS[protocol][0]} parties",
    "seconds": f"{min(run.seconds for run in runs):.3g}",
    "megabytes": f"{runs[0].run_bytes / 1e6:.3g}",
    "error": f"{max(_error(run.outputs, want) for run in runs):.1e}",
    "largest_update": f"{_error(want, args[0]):.1e}",
  }


def _plain(name, repeats=20):
  fn, args = _problems()[name]
  compiled, times = jax.jit(fn), []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    times.append(time.perf_counter() - start)
  row = {"step": name, "by": "plain JAX", "seconds": f"{min(times):.2g}"}
  return row | {"megabytes": "0", "error": "0", "largest_update": ""}


def _ours(output, repeats=5):
  """A step of SecureML's network by our engine (`mpc.secureml`), both parties threads."""
  rng = np.random.default_rng(0)
  x = rng.random((_BATCH, 784))
  y = np.eye(10)[rng.integers(0, 10, _BATCH)]
  network = secureml.initial(_SECUREML, seed=0)
  recipe = secureml.Recipe(output=output, learning_rate=0.125)
  batches = np.tile(np.arange(_BATCH), (repeats, 1))
  times, sent = [], []

  def program(party, network, x, y):
    for batch in batches:
      start, before = time.perf_counter(), party.link.bytes_sent
      network = secureml.train(party, network, x, y, batch[None], recipe)
      times.append(time.perf_counter() - start)
      sent.append(party.link.bytes_sent - before)

  mpc.run(program, *private_values.split((network, x, y)))
  row = {"step": "784-128-128-10, B=128", "by": f"dpjax two-party engine, {output}"}
  row["seconds"] = f"{min(times):.3g}"
  row["megabytes"] = f"{2 * sent[0] / 1e6:.3g}"
  return row | {"error": "", "largest_update": ""}


def main():
  """Writes results/secure/spu.{csv,md}."""
  rows = []
  for name in _problems():
    rows.append(_plain(name))
    for other, protocol in _RUNS:
      if other == name:
        rows.append(measured(name, protocol, 2 if protocol == "CHEETAH" else 5))
        print(rows[-1], flush=True)
  rows[9:9] = [_ours("sigmoid"), _ours("normalized_relu")]
  _OUT.mkdir(parents=True, exist_ok=True)
  with (_OUT / "spu.csv").open("w", newline="") as file:
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
  heads = list(rows[0])
  lines = [heads, ["---"] * len(heads), *([row[head] for head in heads] for row in rows)]
  table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
  (_OUT / "spu.md").write_text(
    "# Training steps on shares\n\n"
    "`python -m tests.published.test_spu_speed`\n\n"
    "One gradient step of an unmodified JAX function, `jax.grad` included. Seconds: the best\n"
    "of several, all parties threads of one process on a busy 2-core machine; megabytes: sent\n"
    "by all parties while they computed (without the shares of the inputs). Error: largest\n"
    "difference of a parameter from plain JAX, beside the largest change of one in the step.\n"
    "SEMI2K's triples come from its first party, the engine's from a dealer, so neither pays\n"
    f"for them; CHEETAH has no dealer. The engine's gradients are SecureML's.\n\n{table}"
  )


@pytest.mark.long
@pytest.mark.parametrize(("name", "protocol"), _RUNS)
def test_steps_are_those_of_plain_jax(name, protocol):
  if importlib.util.find_spec("spu") is None:
    pytest.skip(f"needs spu: {spu_program.INSTALL}")
  assert float(measured(name, protocol, 1)["error"]) < 1e-3


if __name__ == "__main__":
  sys.exit(main())
