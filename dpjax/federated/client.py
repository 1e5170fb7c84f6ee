"""The work of one client in a round, as three pure functions.

`ClientAlgorithm(init, step, finish)` describes ONE client. The functions of `execution` run it
for a cohort: in a Python loop, under vmap, shard_map or pmap, or over several processes. The result
is the same to rounding. Steps that only pad a client's work are skipped or discarded, so a client
without examples sends exactly zero.

Variants of local training do not copy its loop. They fill in these hooks:

| hook       | what it may change                                   | used by                  |
| ---------- | ---------------------------------------------------- | ------------------------ |
| `grad`     | how a batch becomes a gradient                       | your own                 |
| `silos`    | noise on the clipped sum of each step, by silo       | `silos.Silos`            |
| `adjust`   | the gradient of a local step                         | FedProx, SCAFFOLD        |
| `start`    | the optimizer's state at the first local step        | Mime-lite                |
| `message`  | what is sent, and the state that the client keeps    | FedNova, SCAFFOLD        |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import gradients, trees, validate
from dpjax.gradients import loss_checks
from dpjax.key_uses import KeyUse, key_for
from dpjax.plan import Plan
from dpjax.types import (
  Array,
  ArrayLike,
  ArrayTree,
  ClientTx,
  ClippedSum,
  LossFn,
  Params,
)
from dpjax.validate import UserError

if TYPE_CHECKING:
  from dpjax.federated.silos import Silos


class Received(NamedTuple):
  """Values that every client of a round receives, in addition to its own examples."""

  params: Params  # the server's parameters
  extra: Any = None  # further values of the algorithm, such as SCAFFOLD's control variate
  silo: Any = (
    None  # in `init`: public numbers of this client's own noise (`silos.SiloNoise`)
  )


class Local(NamedTuple):
  """A client in the middle of its work."""

  params: Params
  opt_state: Any
  memory: Any  # state that this client kept from its last round
  # [] float32, sum of losses over the examples of all steps; None for a hook of a silo.
  loss_sum: Any
  num_seen: Any  # [] float32, number of examples of all steps; None for a hook of a silo
  num_steps: Array  # [] int32, number of steps that had an example
  num_examples: Array  # [] number of the client's examples
  key: Array  # key of this client in this round; fold it before use
  silo: Any = None  # `received.silo` of `init`

  def add_counts(self, mask: Array, loss: ArrayLike = 0.0) -> Local:
    """Adds one step to the client's counts, with the number of examples in `mask` [B] and the sum
    of their losses."""
    return self._replace(
      # The loop over steps needs a carry of one type, also for losses in float64.
      loss_sum=self.loss_sum + jnp.asarray(loss, self.loss_sum.dtype),
      num_seen=self.num_seen + jnp.sum(mask).astype(self.num_seen.dtype),
      num_steps=self.num_steps + 1,
    )


def begin(
  params: Params,
  opt_state: ArrayTree,
  memory: ArrayTree,
  num_examples: ArrayLike,
  key: Array,
) -> Local:
  """Returns a client before its first step, with all counts 0."""
  zero = jnp.zeros((), jnp.float32)
  steps = jnp.int32(0)
  return Local(params, opt_state, memory, zero, zero, steps, jnp.asarray(num_examples), key)


class ClientInfo(NamedTuple):
  """Diagnostics for users. They are computed from raw examples: NOT private."""

  train_loss: Array  # [] mean loss over the examples of all local steps
  num_examples: Array  # []
  num_steps: Array  # []
  update_norm: Array  # [] l2 norm of the message
  upload_bits: Array  # [] float32; 32 for each float of the message unless compressed
  # [] weight before any noise; the message is left out unless the weight is finite and above 0
  weight: ArrayLike = np.float32(1)
  coordinates_cut: ArrayLike = np.int32(0)  # [] of the message, by a secure sum


class Sent(NamedTuple):
  """A client's message and its weight. Stacked over clients, every leaf has a leading axis."""

  message: Any  # a tree; {"delta": w_local - w_server} for most algorithms
  weight: Array  # [] weight of the message, applied before clipping; see `Weighting`


class ClientAlgorithm(NamedTuple):
  """The work of one client, as three pure functions that an execution traces."""

  init: Callable[..., Any]  # (received, memory, num_examples, key) -> local
  step: Callable[..., Any]  # (received, local, examples [B, ...], mask [B]) -> local
  # (received, local) -> (Sent, memory, ClientInfo). A client without examples sends the weight 0:
  # under replace_special an emptied client must contribute nothing.
  finish: Callable[..., Any]
  # Silos whose steps this client's noise makes private; `init` finds its numbers in
  # `received.silo`. None: no noise of a silo.
  silos: Silos | None = None
  # How far apart a client's message and that of a client without examples may be, if the latter
  # sends something, too, such as noise. 0: it sends nothing.
  apart_from_empty: float = 0.0
  # The three functions, where no message follows from what the client kept (`keeping_apart`). Of a
  # client whose functions were exchanged since, nothing is known.
  apart: tuple[Callable[..., Any], ...] = ()

  @property
  def sends_memory(self) -> bool:
    """Whether a message may depend on what the client kept from earlier rounds."""
    return self.apart != (self.init, self.step, self.finish)

  def keeping_apart(self) -> ClientAlgorithm:
    """Returns the client, of which this says that no message follows from what it kept."""
    return self._replace(apart=(self.init, self.step, self.finish))

  def wrap(self, **changes: Any) -> ClientAlgorithm:
    """Returns the client with other functions, which send no more of what it kept."""
    changed = self._replace(**changes)
    return changed if self.sends_memory else changed.keeping_apart()

  def silent_when_empty(self) -> ClientAlgorithm:
    """Returns the client, whose message without examples has the weight 0, whatever it says itself.

    Under replace_special an emptied client must contribute nothing.
    """

    def init(received: Received, memory: Any, num_examples: Array, key: Array) -> Any:
      return self.init(received, memory, num_examples, key), jnp.asarray(num_examples)

    def step(received: Received, counted: Any, examples: Any, mask: Array) -> Any:
      local, num_examples = counted
      return self.step(received, local, examples, mask), num_examples

    def finish(received: Received, counted: Any) -> tuple[Sent, Any, ClientInfo]:
      local, num_examples = counted
      sent, memory, info = self.finish(received, local)
      weighed = lambda weight: jnp.where(num_examples > 0, weight, 0)
      sent = sent._replace(weight=weighed(sent.weight))
      return sent, memory, info._replace(weight=weighed(info.weight))

    return self.wrap(init=init, step=step, finish=finish)


Weighting = Callable[[Array], Array]  # number of examples (>= 1) -> weight


def uniform(num_examples: Array) -> Array:
  """Gives weight 1 to every client with any example."""
  return jnp.ones_like(jnp.asarray(num_examples, jnp.float32))


def by_examples(num_examples: Array) -> Array:
  """Weights a client by its number of examples (McMahan et al. 2017).

  The influence of a client on `weighted_mean` then has no bound. Use this rule without privacy.
  """
  return jnp.asarray(num_examples, jnp.float32)


def capped_weight(cap: int) -> Weighting:
  """Weights a client of n examples by min(n, cap) / cap, in (0, 1]: the public rule of McMahan et
  al. 2018 (DP-FedAvg).

  >>> [float(capped_weight(10)(n)) for n in (5, 10, 10**6)]
  [0.5, 1.0, 1.0]
  """
  validate.integer_at_least(1, cap=cap)
  return lambda n: jnp.minimum(jnp.asarray(n, jnp.float32), cap) / cap


def _weight(weighting: Weighting, num_examples: Array) -> Array:
  # The rule sees at least 1 example. A client without examples gets weight 0 instead.
  return jnp.where(num_examples > 0, weighting(jnp.maximum(num_examples, 1)), 0.0)


def batch_loss(loss_fn: LossFn, params: Params, examples: ArrayTree, mask: Array) -> Any:
  """Returns (mean, sum) of the losses of the examples that are not padding.

  Raises:
    UserError: `loss_fn` is not a scalar loss of ONE example, or could mix several examples.
  """
  loss_checks.check_loss(loss_fn, params, examples)
  losses = jax.vmap(loss_fn, (None, 0))(params, examples)
  # Padding repeats rows of the client, so the losses of padding are left out.
  total = jnp.sum(jnp.where(mask, losses, 0))
  count = jnp.maximum(jnp.sum(mask), 1).astype(total.dtype)
  return total / count, total


def mean_grad(loss_fn: LossFn) -> Callable[..., Any]:
  """Returns `(params, examples, mask) -> (gradient of the mean loss, sum of the losses)`."""
  value_and_grad = jax.value_and_grad(
    lambda params, examples, mask: batch_loss(loss_fn, params, examples, mask), has_aux=True
  )

  def grad(params, examples, mask):
    (_, total), grads = value_and_grad(params, examples, mask)
    return grads, total

  return grad


def _clipped_grad(loss_fn: LossFn, plan: Plan) -> Callable[..., Any]:
  """Returns a variant of `mean_grad` whose gradient is a `ClippedSum` of examples."""
  # Not that of the plan: clients that share a program by vmap can skip no microbatch.
  summed_fn = gradients.clipped_grad(loss_fn, l2_clip_norm=plan.l2_clip_norm, method="vmap")

  def grad(params, examples, mask):
    summed = summed_fn(params, examples, mask)
    return summed, jnp.sum(jnp.where(mask, summed.losses, 0))

  return grad


def _check_counted(grads: Any) -> None:
  """Raises UserError for a sum that was clipped for a plan.

  The plan's transform would add its noise, but its sampler draws no batch here, and nothing counts
  the steps. So its epsilon would be of other steps.
  """
  if isinstance(grads, ClippedSum):
    raise UserError(
      "clips examples for a plan, whose batches and steps are not those of a client: use "
      "silos=Silos(plans, num_rounds), which draws and counts them",
      field="grad",
    )


def make_tx(client_tx: ClientTx, key: Array) -> optax.GradientTransformationExtraArgs:
  """Returns the client's optimizer: `client_tx` itself, or what `client_tx(key)` returns.

  An optimizer that draws noise must be made from the client's key. An optimizer that is built once
  would give every client the same noise.
  """
  # An Optax transformation is a named tuple; anything else is a function of a key.
  tx: Any = client_tx(key) if not isinstance(client_tx, tuple) else client_tx
  return optax.with_extra_args_support(tx)


def difference(received: Received, local: Local) -> Params:
  """Returns w_local - w_server in float32 or wider; exactly 0 without a local step."""
  wide = trees.at_least_float32
  return jax.tree.map(
    # Numbers are widened before the subtraction: bfloat16 would round the difference to 8 bits.
    lambda new, old: wide(jnp.asarray(new)) - wide(jnp.asarray(old)),
    local.params,
    received.params,
  )


def send_difference(received: Received, local: Local) -> tuple[Any, Any]:
  """The `message` hook of FedAvg: sends the difference, and keeps the client's state as it was."""
  return {"delta": difference(received, local)}, local.memory


def pull(strength: float) -> Callable[..., Any]:
  """Returns an `adjust` of `local_training`: it adds strength (w - w_server), the gradient of
  strength / 2 ||w - w_server||^2."""

  def adjust(gradient: Any, received: Received, local: Local) -> Any:
    pulled = lambda g, own, server: g + strength * (own - server)
    return jax.tree.map(pulled, gradient, local.params, received.params)

  return adjust


def info(local: Local, message: ArrayTree, weight: ArrayLike = 1.0) -> ClientInfo:
  """Returns diagnostics of a client that sends `message` with this weight; NOT private."""
  stacked = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], message)
  return ClientInfo(
    train_loss=local.loss_sum / jnp.maximum(local.num_seen, 1),
    num_examples=local.num_examples,
    num_steps=local.num_steps,
    update_norm=trees.per_example_norms(stacked)[0],
    upload_bits=jnp.float32(32 * trees.size(message)),
    weight=jnp.asarray(weight, jnp.float32),
  )


def local_training(
  loss_fn: LossFn,
  client_tx: ClientTx,
  *,
  weighting: Weighting = uniform,
  grad: Callable[..., Any] | None = None,
  adjust: Callable[..., Any] | None = None,
  start: Callable[..., Any] | None = None,
  message: Callable[..., Any] = send_difference,
  silos: Silos | None = None,
) -> ClientAlgorithm:
  """Local training from the server's parameters with any Optax optimizer.

  Args:
    loss_fn: `(params, example) -> scalar`, for ONE example.
    client_tx: an Optax optimizer, fresh in every round; or a function of the client's key
      that returns one.
    weighting: public rule for the client's weight; a client without examples weighs 0.
    grad: `(params, examples, mask) -> (gradient, sum of losses)`; default `mean_grad`. A sum that
      was clipped for a plan is refused: privacy of single examples is that of `silos`.
    adjust: `(gradient, received, local) -> gradient`, called before the optimizer.
    start: `(opt_state, received) -> opt_state` at the first local step.
    message: `(received, local) -> (message, memory)`.
    silos: plans of all clients, each of which adds the noise of its own plan to every step, before
      `adjust`; None: clients add none. It determines `grad`. `adjust` and `message` then see no
      `loss_sum` and no `num_seen`: both are None, since raw records decide them.

  >>> algorithm = local_training(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), optax.sgd(0.5))
  >>> received = Received(jnp.zeros(1))
  >>> local = algorithm.init(received, None, 2, jax.random.key(0))
  >>> local = algorithm.step(received, local, jnp.array([[2.0], [9.0]]), jnp.array([True, False]))
  >>> algorithm.finish(received, local)[0].message["delta"]
  Array([1.], dtype=float32)
  """
  if not callable(client_tx):
    validate.optimizer(client_tx=client_tx)
  grad_fn = mean_grad(loss_fn) if grad is None else grad
  if silos is not None:
    grad_fn = _clipped_grad(loss_fn, silos.plans[0])

  def init(received: Received, memory: Any, num_examples: Array, key: Array) -> Local:
    tx = make_tx(client_tx, key_for(KeyUse.CLIENT_OPTIMIZER, key))
    opt_state = tx.init(received.params)
    if start is not None:
      opt_state = start(opt_state, received)
    params = jax.tree.map(jnp.asarray, received.params)
    local = begin(params, opt_state, memory, num_examples, key)
    return local._replace(silo=received.silo)

  def shown(local: Local) -> Local:
    # What a silo sends and keeps must follow from noisy sums and public numbers.
    return local if silos is None else local._replace(loss_sum=None, num_seen=None)

  def step(received: Received, local: Local, examples: Any, mask: Array) -> Local:
    grads, loss = grad_fn(local.params, examples, mask)
    if silos is None:
      _check_counted(grads)
    # From here on everything is computed from noisy sums and public numbers.
    grads = grads if silos is None else silos.noisy(grads, local)
    grads = grads if adjust is None else adjust(grads, received, shown(local))
    # The optimizer is made again in each step, from the same key: it is pure, and `local` holds
    # its state.
    tx = make_tx(client_tx, key_for(KeyUse.CLIENT_OPTIMIZER, local.key))
    # Which rows are padding is a secret of the silo.
    extra = {"mask": mask} if silos is None else {}
    updates, opt_state = tx.update(grads, local.opt_state, local.params, **extra)
    params = optax.apply_updates(local.params, updates)
    return local._replace(params=params, opt_state=opt_state).add_counts(mask, loss)

  def finish(received: Received, local: Local) -> tuple[Sent, Any, ClientInfo]:
    sent, memory = message(received, shown(local))
    weight = _weight(weighting, local.num_examples)
    return Sent(sent, weight), memory, info(local, sent, weight)

  client = ClientAlgorithm(init, step, finish, silos)
  keeps_apart = adjust is None and message is send_difference
  return client.keeping_apart() if keeps_apart else client


def full_gradient(
  loss_fn: LossFn, *, weighting: Weighting = by_examples
) -> ClientAlgorithm:
  """Makes a client that sends the gradient of its mean loss at the server's parameters.

  The mean is over the examples of all batches of a round; one pass over the data (`epochs=1`) is
  enough. The batch size only bounds memory. The message is {"delta": -g}, a step of learning rate
  1, which aggregators and server optimizers take unchanged.

  >>> algorithm = full_gradient(lambda w, x: 0.5 * jnp.sum((w - x) ** 2))
  >>> received, local = Received(jnp.zeros(1)), None
  >>> local = algorithm.init(received, None, 2, jax.random.key(0))
  >>> for x in (2.0, 4.0):
  ...   local = algorithm.step(received, local, jnp.array([[x]]), jnp.array([True]))
  >>> algorithm.finish(received, local)[0].message["delta"]
  Array([3.], dtype=float32)
  """
  grad_fn = jax.grad(
    lambda params, examples, mask: batch_loss(loss_fn, params, examples, mask)[::-1],
    has_aux=True,
  )

  def init(received: Received, memory: Any, num_examples: Array, key: Array) -> Local:
    return begin(trees.zeros(received.params), None, memory, num_examples, key)

  def step(received: Received, local: Local, examples: Any, mask: Array) -> Local:
    grads, mean = grad_fn(received.params, examples, mask)
    summed = local._replace(params=trees.add(local.params, grads))
    return summed.add_counts(mask, mean * jnp.sum(mask))

  def finish(received: Received, local: Local) -> tuple[Sent, Any, ClientInfo]:
    del received
    sent = {"delta": trees.scale(local.params, -1.0 / jnp.maximum(local.num_seen, 1))}
    weight = _weight(weighting, local.num_examples)
    return Sent(sent, weight), local.memory, info(local, sent, weight)

  return ClientAlgorithm(init, step, finish).keeping_apart()
