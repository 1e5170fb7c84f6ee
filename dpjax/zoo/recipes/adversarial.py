"""Two networks under one budget: a critic that reads private examples, and a generator that reads
the critic.

Only the critic has a private gradient, as in Xie et al. 2018 (DP-GAN, arXiv:1802.06739). The
generator learns from the critic's noisy parameters and from public random numbers. So the steps,
the parameters and all samples of the generator are post-processing.

Each example is paired with a generated one. The random keys of these pairs are secret: an example
that joins a batch shifts other examples to other places, and so to other keys. If the keys were
known, all gradients would change visibly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import validate
from dpjax.gradients import arguments, loss_checks
from dpjax.key_uses import KeyUse, key_for
from dpjax.noise import source
from dpjax.plan import Plan
from dpjax.training.dp_sgd import StepInfo, TrainState, dp_sgd, noise_state
from dpjax.types import Array, ArrayTree, Batch, LossFn, Params
from dpjax.validate import UserError
from dpjax.zoo.recipes.distillation import check_declared, check_public_key


class AdversarialState(NamedTuple):
  """State of both networks; `plan.spent(state.critic)` gives the privacy cost so far."""

  critic: TrainState
  generator: Params
  generator_opt_state: optax.OptState


class Adversarial(NamedTuple):
  """The two functions of `adversarial`.

  `init(critic, generator)` makes the state. `step(state, batch)` updates the critic. After
  every `critic_steps` updates of the critic it updates the generator, too.
  """

  init: Callable[[Params, Params], AdversarialState]
  step: Callable[[AdversarialState, Batch], tuple[AdversarialState, StepInfo]]


def adversarial(
  critic_loss: LossFn,
  generator_loss: Callable[[Params, Params, Array], Array],
  plan: Plan,
  *,
  pair: Callable[[Params, Array, Any], ArrayTree],
  critic_tx: optax.GradientTransformation,
  generator_tx: optax.GradientTransformation,
  noise_key: Array,
  public_key: Array,
  critic_steps: int = 1,
  method: str = "auto",
  microbatch_size: int | None = None,
) -> Adversarial:
  """Trains a critic by DP-SGD and a generator against it, in turns.

  Args:
    critic_loss: `(critic, pair) -> scalar` for ONE pair.
    generator_loss: `(generator, critic, key) -> scalar`; it sees no example.
    plan: clip norm, noise and divisor of the critic's gradients; also yields the batches.
    pair: `(generator, key, example) -> pair`: joins ONE example with an output of the generator.
      It is called for each example separately, so no example changes the pair of another.
    critic_tx, generator_tx: optimizers of the two networks.
    noise_key: typed key of the noise, for ONE run: `dpjax.new_key()`.
    public_key: typed key of the generator's random numbers. It may be known, so it must not follow
      from `noise_key`. The keys of pairs are secret, and follow from `noise_key`.
    critic_steps: number of steps of the critic before each step of the generator. More steps help
      under noise (Bie, Kamath and Zhang 2023, arXiv:2302.02936). Each counts as a step of the plan.
    method, microbatch_size: see `dpjax.clipped_grad`.

  Returns:
    `init` and `step`, both to be jitted by the caller. `StepInfo` is the critic's; it is not
    private.

  Guarantee: the sequence of all parameters of BOTH networks is (plan.epsilon(), plan.delta)-DP for
  one example. Compute a gradient penalty in `critic_loss`, from ONE pair
  (`training.gradient_penalty`), so that clipping bounds its gradient, too. A critic with BatchNorm
  over a batch is refused.

  Raises:
    UserError: a plan with slices, since the generator would move in the middle of a step; a public
      key that follows from the noise key. At `init` and `step`: a generator that closes over an
      array or calls back into Python, since it could read private data. At `step`: a `pair` through
      which one example could reach another.

  >>> from dpjax.sampling import PoissonSampler
  >>> plan = Plan(sampler=PoissonSampler(sampling_prob=0.5, capacity=4), noise_multiplier=0.0,
  ...   l2_clip_norm=1.0, normalize_by=2, num_steps=1, delta=1e-5)
  >>> both = adversarial(
  ...   lambda critic, pair: critic * (pair["fake"] - pair["real"]),
  ...   lambda generator, critic, key: -critic * generator,
  ...   plan,
  ...   pair=lambda generator, key, x: {"real": x, "fake": generator},
  ...   critic_tx=optax.sgd(1.0),
  ...   generator_tx=optax.sgd(1.0),
  ...   noise_key=jax.random.key(0),
  ...   public_key=jax.random.key(1),
  ... )
  >>> state = both.init(jnp.zeros(()), jnp.zeros(()))
  >>> batch = Batch(jnp.array([0.5, 0.5]), jnp.array([True, True]))
  >>> state, _ = both.step(state, batch)
  >>> print(state.critic.params, state.generator)
  0.5 0.5
  """
  if plan.slices != 1:
    raise UserError(
      "must be 1: the generator moves between steps, not within one",
      field="plan.slices",
      value=plan.slices,
    )
  validate.integer_at_least(1, critic_steps=critic_steps)
  init_critic, critic_step = dp_sgd(
    critic_loss,
    plan,
    critic_tx,
    noise_key=noise_key,
    method=method,
    microbatch_size=microbatch_size,
  )
  check_public_key(public_key, noise_key, plan.num_steps)

  def init(critic: Params, generator: Params) -> AdversarialState:
    # The parameters are copied, so that donation does not delete the caller's arrays.
    generator = jax.tree.map(jnp.copy, generator)
    # The optimizer's first state reaches the generator, so it must not hold private data.
    check(generator_tx.init, generator)
    opt_state = generator_tx.init(generator)
    check(generator_step, critic, public_key, (generator, opt_state))
    return AdversarialState(init_critic(critic), generator, opt_state)

  def step(state: AdversarialState, batch: Batch) -> tuple[AdversarialState, StepInfo]:
    arguments.masked_batch(batch)
    step_key = jax.random.fold_in(public_key, state.critic.step)
    _, generator_key = jax.random.split(step_key)
    # The keys of pairs are secret, and independent of the noise. As nobody knows them, the proof
    # may assign them to examples instead of places. Then one example changes one pair. The noise
    # key comes from the state, so that no compiled program holds it.
    secret = key_for(KeyUse.PAIRS, source.from_words(noise_state(state.critic).key))
    pairs_key = jax.random.fold_in(secret, state.critic.step)
    size = jax.tree.leaves(batch.examples)[0].shape[0]
    pair_keys = jax.random.split(pairs_key, size)
    # Each pair is made alone: a function of the whole batch could put one example into many pairs.
    pair_of = functools.partial(pair, state.generator)
    loss_checks.check_apart(pair_of, pair_keys, batch.examples, name="pair")
    pairs = jax.vmap(pair_of)(pair_keys, batch.examples)
    critic, info = critic_step(state.critic, batch._replace(examples=pairs))
    # Neither the batch nor its mask, whose sum is a secret, reaches the generator.
    moved = functools.partial(generator_step, critic.params, generator_key)
    before = (state.generator, state.generator_opt_state)
    # A second check: a restored state has not passed `init`, and closures may have changed.
    check(generator_step, critic.params, generator_key, before)
    if critic_steps == 1:
      generator, opt_state = moved(before)
    else:
      # `critic.step` counts finished steps. The generator moves after every `critic_steps` of them.
      turn = critic.step % critic_steps == 0
      generator, opt_state = jax.lax.cond(turn, moved, lambda same: same, before)
    return AdversarialState(critic, generator, opt_state), info

  check = functools.partial(
    check_declared,
    field="generator_loss",
    remedy="compute it within the function, or make it one of the generator's parameters",
  )

  def generator_step(critic: Params, key: Array, before: Any) -> tuple[Params, Any]:
    generator, opt_state = before
    gradient = jax.grad(generator_loss)(generator, critic, key)
    updates, opt_state = generator_tx.update(gradient, opt_state, generator)
    return optax.apply_updates(generator, updates), opt_state

  return Adversarial(init, step)
