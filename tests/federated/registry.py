"""Every federated algorithm and every private aggregator, ready to run on tiny clients."""

import functools
import inspect

import jax
import jax.numpy as jnp
import optax

from dpjax import federated, noise, sampling, transforms
from dpjax.federated import (
  central,
  client_noise,
  compressed,
  described,
  dp_mean,
  loop_clients,
  quantize,
  top_k,
)
from dpjax.federated.compression import error_memory
from dpjax.gradients import Clip
from tests import plans
from tests.federated import problems

KEY, NOISE = jax.random.key(0), jax.random.key(1)
NUM_CLIENTS = 6
CLIP, DIVISOR = 0.5, 4.0
_SGD = optax.sgd(0.1)


def _error_feedback(**more):
  return {
    "wrap": lambda client: compressed(client, top_k(0.4), error_feedback=True),
    "memory": lambda params: error_memory(None, {"delta": params}),
    **more,
  }


def _local_noise(client):
  noisy = client_noise(client, l2_clip_norm=CLIP, noise_multiplier=1.0)
  return compressed(noisy, quantize(4))


# name -> (function, options with which a private aggregator has nothing to complain about)
ALGORITHMS = {
  "fed_avg": (federated.fed_avg, {"client_tx": _SGD}),
  "fed_avg compressed": (
    federated.fed_avg, {"client_tx": _SGD, "wrap": lambda c: compressed(c, quantize(2))},
  ),
  "fed_avg error feedback": (federated.fed_avg, _error_feedback(client_tx=_SGD)),
  "fed_avg local noise": (federated.fed_avg, {"client_tx": _SGD, "wrap": _local_noise}),
  "fed_avg adam": (
    federated.fed_avg, {"client_tx": _SGD, "server_tx": federated.fed_opt("adam", 0.1)},
  ),
  "fed_sgd": (federated.fed_sgd, {"server_tx": optax.sgd(0.1, momentum=0.9)}),
  "fed_prox": (federated.fed_prox, {"client_tx": _SGD, "mu": 0.1}),
  "fed_nova": (federated.fed_nova, {"client_tx": _SGD, "tau_eff": 2.0}),
  "scaffold": (
    federated.scaffold,
    {"client_tx": _SGD, "client_learning_rate": 0.1, "num_clients": NUM_CLIENTS,
     "expected_cohort": DIVISOR},
  ),
  "mime_lite": (federated.mime_lite, {"base_tx": optax.sgd(0.1, momentum=0.9)}),
  "apfl": (federated.apfl, {"client_tx": _SGD, "alpha_learning_rate": 0.1}),
  "hyp_cluster": (
    federated.hyp_cluster,
    {"client_tx": _SGD, "num_clients": NUM_CLIENTS, "cluster_share": 0.5},
  ),
}  # fmt: skip


def _by_its_facts(row):
  """An algorithm without an entry above, with the arguments that it states for games."""
  offered = {"client_tx": _SGD, "server_tx": optax.sgd(1.0)}
  optimizers = [offered[name] for name in row.optimizers]
  make = lambda loss_fn, **options: row.make(loss_fn, *optimizers, **options)
  return make, dict(row.played)


ALGORITHMS |= {
  name: _by_its_facts(row)
  for name, row in described.algorithms().items()
  if name not in ALGORITHMS
}


def made_here():
  """Names of all public functions of the room that return a `FederatedAlgorithm`."""
  functions = {name: getattr(federated, name) for name in dir(federated)}
  returns = lambda fn: inspect.signature(fn).return_annotation
  return {
    name
    for name, fn in functions.items()
    if inspect.isfunction(fn) and returns(fn) == "FederatedAlgorithm"
  }


def build(name, aggregator=None, loss_fn=problems.quadratic, **changes):
  """The algorithm of that name."""
  make, options = ALGORITHMS[name]
  options = {"key": KEY, "aggregator": aggregator, "map_clients": loop_clients(), **options}
  return make(loss_fn, **{**options, **changes})


def start(name, algorithm):
  """Its first state."""
  params = {"w": jnp.array([0.5, -1.0, 2.0])}
  if name == "hyp_cluster":
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), params)
  if name == "fed_bn":
    params |= {"norm": jnp.zeros(3)}
  return algorithm.init(params, NUM_CLIENTS)


# A private plan over clients.
plan = functools.partial(
  plans.of, 40, noise_multiplier=2.0, l2_clip_norm=CLIP, normalize_by=DIVISOR, num_steps=3,
  delta=1e-3, unit="user",
)  # fmt: skip


def _by_hand():
  tx = transforms.clip_and_noise(
    l2_clip_norm=CLIP, noise_multiplier=2.0, normalize_by=DIVISOR, key=NOISE
  )
  return dp_mean(tx, l2_clip_norm=CLIP)


PRIVATE = {
  "flat": lambda: central(plan(), NOISE),
  "automatic": lambda: central(plan(l2_clip_norm=Clip(CLIP, "automatic")), NOISE),
  "adaptive": lambda: central(
    plan(l2_clip_norm=Clip(CLIP, transforms.AdaptiveClipping())), NOISE
  ),
  "slack": lambda: central(
    plan(l2_clip_norm=Clip(CLIP, transforms.SlackClipping(num_slots=2))), NOISE
  ),
  "scheduled": lambda: central(
    plan(l2_clip_norm=Clip(CLIP, schedule=(1.0, 0.5, 0.5))), NOISE
  ),
  "correlated": lambda: central(
    plan(
      sampler=sampling.CyclicSampler(2, NUM_CLIENTS),
      noise_shape=noise.NoiseShape(correlation=noise.correlated.Tree(3)),
    ),
    NOISE,
  ),
  "by hand": _by_hand,
}
