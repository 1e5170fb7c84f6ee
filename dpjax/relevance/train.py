"""Training loops of this package: `fit` (without noise on gradients) and `fit_private`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import closed_over, trees
from dpjax.data import Dataset
from dpjax.plan import Plan
from dpjax.relevance import labels
from dpjax.relevance.settings import Training
from dpjax.types import Array, Example, HostArray, LossFn, Params

# On a CPU a convolution over 600 images exceeds the caches. It takes twice as long per image as a
# convolution over 60 images. So a batch is cut into equal parts, whose gradients are averaged.
_PART = 64

# Names of a method's trainings. Model 1 is the net whose relevance is propagated, and model 2 is
# the net that is released.
FIRST = "model 1"
SECOND = "model 2"

BatchLoss = Callable[[Any, Any, Any], Any]  # (params, x [B, ...], y [B]) -> scalar
Scored = Callable[[Any], dict[str, float]]  # params -> scores


class Steps(NamedTuple):
  """Description of a training; see `carry_out`."""

  name: str  # FIRST or SECOND
  num_steps: int
  steps_per_epoch: int
  init: Callable[[], Any]  # -> state: (params, state of the optimizer)
  step: Callable[[Any, Any], Any]  # (state, draw) -> state
  draws: Callable[[int], Iterator[Any]]  # t -> draws of step t and all later steps
  scored: Scored | None = None  # evaluates the parameters after each epoch

  def epoch_at(self, done: int) -> int | None:
    """Returns the epoch, from 1, that ends after `done` steps; None if no epoch ends there."""
    ends = done % self.steps_per_epoch == 0 or done == self.num_steps
    return -(-done // self.steps_per_epoch) if ends else None


# A method as a generator: it yields a training, gets the parameters after the last step of it, and
# returns what its name says.
Story = Generator[Steps, Any, Any]
OnEpoch = Callable[[int, dict[str, float]], None]  # (epochs done, scores)


def in_one_go(steps: Steps, on_epoch: OnEpoch | None = None) -> Any:
  """Runs all steps without saving anything, and returns the last parameters."""
  state = steps.init()
  for done, draw in enumerate(steps.draws(0), start=1):
    state = steps.step(state, draw)
    epoch = steps.epoch_at(done)
    if epoch is not None and on_epoch is not None and steps.scored is not None:
      on_epoch(epoch, steps.scored(state[0]))
  return state[0]


def carry_out(story: Story, trainer: Callable[[Steps], Any] = in_one_go) -> Any:
  """Runs the trainings of a story by a function of their steps. Returns what the story returns."""
  params = None
  while True:
    try:
      steps = story.send(params)
    except StopIteration as end:
      return end.value
    params = trainer(steps)


def cross_entropy(apply: Callable) -> BatchLoss:
  """Returns a loss: the mean cross-entropy of a batch, in nats."""

  def loss(params: Any, x: Any, y: Any) -> Array:
    log_p = jax.nn.log_softmax(trees.at_least_float32(apply(params, x)))
    return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], axis=1))

  return loss


def corrected_loss(
  apply: Callable, transitions: HostArray, class_priors: HostArray | None
) -> BatchLoss:
  """Returns a loss: the mean of `labels.forward_corrected` over a batch."""
  loss_fn = labels.forward_corrected(apply, transitions, class_priors)

  def loss(params: Any, x: Any, y: Any) -> Array:
    return jnp.mean(jax.vmap(loss_fn, (None, 0))(params, Example(x, y)))

  return loss


def num_parts(batch_size: int, backend: str | None = None) -> int:
  """Number of equal parts of a batch: on a CPU the smallest number <= 64 that leaves at most 64
  examples in a part. It is 1 if there is no such number, and on other platforms.

  >>> num_parts(600, "cpu"), num_parts(601, "cpu"), num_parts(600, "gpu")
  (10, 1, 1)
  """
  if (backend or jax.default_backend()) != "cpu":
    return 1
  fitting = range(-(-batch_size // _PART), _PART + 1)
  return next((count for count in fitting if batch_size % count == 0), 1)


def _in_parts(loss: BatchLoss, parts: int) -> Callable[..., Any]:
  """Returns a function that returns (gradient of a mean loss, None). It averages the gradients of
  equal parts of a batch."""

  @closed_over.jitted
  def add(total: Any, params: Any, x: Any, y: Any) -> Any:
    return trees.add(total, jax.grad(loss)(params, x, y))

  def grad(params: Any, x: Any, y: Any) -> Any:
    size = len(y) // parts
    total = jax.tree.map(jnp.zeros_like, params)
    for start in range(0, len(y), size):
      total = add(total, params, x[start : start + size], y[start : start + size])
    return trees.scale(total, 1 / parts), None

  return grad


def _same(x: Any, step: int) -> Any:
  del step
  return x


def fit(
  loss: BatchLoss,
  params: Params,
  records: Callable[[int], tuple[np.ndarray, np.ndarray]],
  how: Training,
  *,
  num_records: int,
  seed: int,
  name: str = SECOND,
  scored: Scored | None = None,
  corrupt: Callable[[Any, int], Any] = _same,
  refresh: Callable[[Any, Any], Any] | None = None,
  weight_decay: float = 0.0,
  anneal: bool = False,
) -> Steps:
  """Returns a training with Adam over shuffled batches. NOT private by itself.

  Args:
    records: function from an epoch to the records (x [n, ...], y [n]) of that epoch.
    name, scored: fields of `Steps`.
    corrupt: function (x of a batch, step) -> x, for noise that a batch shares.
    refresh: function (params, seen) -> params, called after each step. `loss` then returns
      (mean, seen) and gets whole batches, since it may mix examples; None: a CPU takes batches in
      parts.
    anneal: whether the learning rate falls to 0 along a cosine.

  Records after an epoch's last full batch are dropped. If there are fewer records than a batch, all
  of them are one batch.
  """
  size = min(how.batch_size, num_records)
  per_epoch = num_records // size
  total = how.num_epochs * per_epoch
  rate: Any = how.learning_rate
  if anneal:
    rate = optax.cosine_decay_schedule(rate, total)
  tx = optax.adamw(rate, weight_decay=weight_decay)
  grad = (
    closed_over.jitted(jax.grad(loss, has_aux=True))
    if refresh
    else _in_parts(loss, num_parts(size))
  )

  @closed_over.jitted
  def update(params, opt_state, grads_and_seen):
    grads, seen = grads_and_seen
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return (refresh(params, seen) if refresh else params), opt_state

  def draws(start: int) -> Iterator[Any]:
    for epoch in range(start // per_epoch, how.num_epochs):
      x, y = records(epoch)
      # The order is a function of (seed, epoch), so that a resumed run continues identically.
      order = np.random.default_rng([seed, epoch]).permutation(len(y))
      for step in range(max(start, epoch * per_epoch), (epoch + 1) * per_epoch):
        first = (step - epoch * per_epoch) * size
        take = order[first : first + size]
        yield corrupt(x[take], step), y[take]

  def step(state: Any, draw: Any) -> Any:
    return update(*state, grad(state[0], *draw))

  init = lambda: (params, tx.init(params))
  return Steps(name, total, per_epoch, init, step, draws, scored)


def fit_private(
  loss_fn: LossFn,
  params: Params,
  data: Dataset,
  plan: Plan,
  tx: optax.GradientTransformation,
  *,
  noise_key: Array,
  batch_seed: int,
  steps_per_epoch: int,
  name: str = SECOND,
  scored: Scored | None = None,
) -> Steps:
  """Returns a training by all steps of a plan, with any Optax optimizer on the private gradients.

  Guarantee: the sequence of all parameters is (plan.epsilon(), plan.delta)-DP for one
  element of `data` under the plan's relation.
  """
  chain = optax.chain(plan.transform(noise_key), tx)
  microbatch_size = _PART if jax.default_backend() == "cpu" else None
  clipped = plan.clipped_grad(loss_fn, microbatch_size=microbatch_size)

  @closed_over.jitted
  def step(state, batch):
    params, opt_state = state
    summed: Any = clipped(params, batch)
    updates, opt_state = chain.update(summed, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  draws = lambda start: plan.batches(data, rng=batch_seed, start=start)
  init = lambda: (params, chain.init(params))
  steps = plan.num_steps, steps_per_epoch
  return Steps(name, *steps, init, step, draws, scored)
