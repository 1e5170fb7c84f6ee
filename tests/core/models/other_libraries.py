"""One network by four libraries, and what each gets wrong, for tests by import path."""

import types

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.example_libraries import stax

WIDTH = 8


class Linen(nn.Module):
  num_classes: int
  rate: float = 0.0

  @nn.compact
  def __call__(self, x, train=False):
    x = nn.tanh(nn.Dense(WIDTH, name="body")(x.reshape(x.shape[0], -1)))
    x = nn.Dropout(self.rate, deterministic=not train)(x)
    return nn.Dense(self.num_classes, name="head")(x)


class Nnx(nnx.Module):
  """A network of nnx."""

  def __init__(self, num_classes, rngs, input_shape, rate=0.0):
    self.body = nnx.Linear(int(np.prod(input_shape)), WIDTH, rngs=rngs)
    self.dropout = nnx.Dropout(rate, rngs=rngs)
    self.head = nnx.Linear(WIDTH, num_classes, rngs=rngs)

  def __call__(self, x):
    x = jnp.tanh(self.body(x.reshape(x.shape[0], -1)))
    return self.head(self.dropout(x))


class NnxCalled(nnx.Module):
  """Its stream comes with the call."""

  def __init__(self, num_classes, rngs):
    self.dropout = nnx.Dropout(0.5)
    self.head = nnx.Linear(64, num_classes, rngs=rngs)

  def __call__(self, x, rngs=None):
    return self.head(self.dropout(x.reshape(x.shape[0], -1), rngs=rngs))


class Equinox(eqx.Module):
  """A network of Equinox."""

  body: eqx.nn.Linear
  dropout: eqx.nn.Dropout
  head: eqx.nn.Linear

  def __init__(self, num_classes, key, input_shape, rate=0.0):
    first, second = jax.random.split(key)
    self.body = eqx.nn.Linear(int(np.prod(input_shape)), WIDTH, key=first)
    self.dropout = eqx.nn.Dropout(rate)
    self.head = eqx.nn.Linear(WIDTH, num_classes, key=second)

  def __call__(self, x, *, key=None):
    return self.head(self.dropout(jnp.tanh(self.body(x.reshape(-1))), key=key))


def haiku_with_rng(num_classes):
  """As `hk.transform`, whose apply takes (params, rng, x)."""
  del num_classes
  return types.SimpleNamespace(init=lambda key, x: {}, apply=lambda params, rng, x: x)


class Functions:
  """A network of two functions."""

  def __init__(self, num_classes, rate=0.0):
    self.num_classes = num_classes
    self.rate = rate

  def init(self, key, x):
    body, head = jax.random.split(key)
    size = int(np.prod(x.shape[1:]))
    return {
      "body": {"w": jax.random.normal(body, (size, WIDTH)) / np.sqrt(size)},
      "head": {"w": jax.random.normal(head, (WIDTH, self.num_classes)) / np.sqrt(WIDTH)},
    }

  def apply(self, params, x, key=None):
    x = jnp.tanh(x.reshape(x.shape[0], -1) @ params["body"]["w"])
    if key is not None and self.rate:
      x = jnp.where(
        jax.random.bernoulli(key, 1 - self.rate, x.shape), x / (1 - self.rate), 0
      )
    return x @ params["head"]["w"]


def _dense(width):
  """A layer of stax without a bias, which stax adds by a promotion that tests refuse."""

  def init(key, shape):
    return (*shape[:-1], width), (jax.random.normal(key, (shape[-1], width)) / 8,)

  return init, lambda params, x, **options: x @ params[0]


def pair(num_classes):
  """A pair of stax."""
  return stax.serial(stax.Flatten, _dense(WIDTH), stax.Tanh, _dense(num_classes))


class Constant(eqx.Module):
  """Holds arrays that are no parameters: an order of pixels, drawn from the key."""

  order: jax.Array
  head: eqx.nn.Linear

  def __init__(self, num_classes, key):
    self.order = jax.random.permutation(key, 64)
    self.head = eqx.nn.Linear(64, num_classes, key=key)

  def __call__(self, x):
    return self.head(x.reshape(-1)[self.order])


class NnxConstant(nnx.Module):
  """Holds a fixed projection, which is an array and no variable."""

  def __init__(self, num_classes, rngs):
    self.fixed = jax.random.normal(rngs.params(), (64, 64)) / 8
    self.head = nnx.Linear(64, num_classes, rngs=rngs)

  def __call__(self, x):
    return self.head(x.reshape(x.shape[0], -1) @ self.fixed)


# --- what is refused


class NnxBatchNorm(nnx.Module):
  def __init__(self, num_classes, rngs):
    self.norm = nnx.BatchNorm(64, rngs=rngs)
    self.head = nnx.Linear(64, num_classes, rngs=rngs)

  def __call__(self, x):
    return self.head(self.norm(x.reshape(x.shape[0], -1)))


class NnxRecurrent(nnx.Module):
  """Its first carry takes a key and is zeros."""

  def __init__(self, num_classes, rngs, cell=nnx.GRUCell):
    self.recurrent = nnx.RNN(cell(8, 8, rngs=rngs), rngs=rngs)
    self.head = nnx.Linear(8, num_classes, rngs=rngs)

  def __call__(self, x):
    return self.head(self.recurrent(x.reshape(x.shape[0], 8, 8))[:, -1])


class _RandomCarry(nnx.GRUCell):
  def initialize_carry(self, input_shape, rngs, *args, **kwargs):
    return jax.random.normal(rngs(), (*input_shape[:-1], self.hidden_features))


class NnxRandomCarry(NnxRecurrent):
  """Its first carry is random, in evaluation too."""

  def __init__(self, num_classes, rngs):
    super().__init__(num_classes, rngs, _RandomCarry)


class NnxSpectralNorm(nnx.Module):
  def __init__(self, num_classes, rngs):
    self.head = nnx.SpectralNorm(nnx.Linear(64, num_classes, rngs=rngs), rngs=rngs)

  def __call__(self, x):
    return self.head(x.reshape(x.shape[0], -1), update_stats=False)


class LinenSpectralNorm(nn.Module):
  num_classes: int

  @nn.compact
  def __call__(self, x):
    head = nn.SpectralNorm(nn.Dense(self.num_classes))
    return head(x.reshape(x.shape[0], -1), update_stats=False)


class NnxCounter(nnx.Module):
  def __init__(self, num_classes, rngs):
    self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
    self.head = nnx.Linear(64, num_classes, rngs=rngs)

  def __call__(self, x):
    self.calls[...] += 1
    return self.head(x.reshape(x.shape[0], -1))


class NnxWrites(nnx.Module):
  def __init__(self, num_classes, rngs):
    self.head = nnx.Linear(64, num_classes, rngs=rngs)

  def __call__(self, x):
    self.head.kernel[...] *= 0.5
    return self.head(x.reshape(x.shape[0], -1))


class NnxAlways(nnx.Module):
  def __init__(self, num_classes, rngs):
    self.rngs = rngs
    self.head = nnx.Linear(64, num_classes, rngs=rngs)

  def __call__(self, x):
    x = x.reshape(x.shape[0], -1)
    return self.head(x + jax.random.normal(self.rngs.noise(), x.shape))


class NnxOneExample(nnx.Module):
  def __init__(self, num_classes, rngs):
    self.head = nnx.Linear(64, num_classes, rngs=rngs)

  def __call__(self, x):
    return self.head(x.reshape(-1))


class NnxTuple(NnxOneExample):
  def __call__(self, x):
    return self.head(x.reshape(x.shape[0], -1)), x


class NnxOtherArguments(nnx.Module):
  def __init__(self, num_classes, rngs, width):
    self.head = nnx.Linear(width, num_classes, rngs=rngs)


class NnxUncallable(nnx.Module):
  def __init__(self, num_classes, rngs):
    self.head = nnx.Linear(64, num_classes, rngs=rngs)


class NnxNoKey(nnx.Module):
  def __init__(self, num_classes):
    self.head = nnx.Linear(64, num_classes, rngs=nnx.Rngs(0))


def nnx_made(num_classes):
  return NnxNoKey(num_classes)


def nnx_number(num_classes, rngs):
  return 7


class EquinoxBatchNorm(eqx.Module):
  norm: eqx.nn.BatchNorm
  head: eqx.nn.Linear

  def __init__(self, num_classes, key):
    self.norm = eqx.nn.BatchNorm(64, "batch", mode="batch")
    self.head = eqx.nn.Linear(64, num_classes, key=key)

  def __call__(self, x):
    return self.head(x)


class EquinoxAlways(eqx.Module):
  head: eqx.nn.Linear

  def __init__(self, num_classes, key):
    self.head = eqx.nn.Linear(64, num_classes, key=key)

  def __call__(self, x, key=None):
    return self.head(x.reshape(-1) + jax.random.normal(key, (64,)))


class EquinoxBatch(EquinoxAlways):
  def __call__(self, x):
    return jax.vmap(self.head)(x.reshape(x.shape[0], -1))


class EquinoxMean(EquinoxAlways):
  """Averages over the batch, by the name of an axis."""

  def __call__(self, x):
    return self.head(jax.lax.pmean(x.reshape(-1), "batch"))


class LinenCounter(nn.Module):
  num_classes: int

  @nn.compact
  def __call__(self, x):
    self.variable("counts", "calls", lambda: jnp.zeros(()))
    return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


class LinenSilent(nn.Module):
  """Takes a flag of a name that nobody knows, so its dropout would never draw."""

  num_classes: int

  @nn.compact
  def __call__(self, x, is_train=False):
    x = nn.Dropout(0.5, deterministic=not is_train)(x.reshape(x.shape[0], -1))
    return nn.Dense(self.num_classes)(x)


class Counted(Functions):
  def init(self, key, x):
    return {**super().init(key, x), "calls": jnp.zeros((), jnp.int32)}


class Twice(Functions):
  def init(self, key, x):
    return {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}}


class Empty(Functions):
  def init(self, key, x):
    return {}


def number(num_classes):
  return 7


def lone_function(num_classes):
  return lambda params, x: x
