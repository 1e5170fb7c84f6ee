"""Aggregation of a cohort's messages into one update: means, private means, client-side noise.

An `Aggregator` has two pure functions, `init` for its state and
`update(messages [C, *p], mask [C], state, weights [C]) -> ([*p], state)`. An aggregator
that needs only sums of messages also has `partial` and `finish`, the two halves of `update`.
Messages can then be added up as clients finish, over blocks and over devices. `finish` draws the
noise, once for the whole sum, whatever the execution.

| case                                 | `weighted_mean`         | `dp_mean`                  |
| ------------------------------------ | ----------------------- | -------------------------- |
| a message that holds NaN or infinity | left out                | contributes 0              |
| a weight of 1e6                      | counts 1e6 times        | moves at most l2_clip_norm |
| a negative or non-finite weight      | left out                | moves at most l2_clip_norm |
| a client without examples (weight 0) | left out                | contributes exactly 0      |
| no clients at all                    | 0                       | noise / normalize_by       |
| padding (mask False)                 | left out                | contributes 0              |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import accounting, gradients, noise, trees, validate
from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.accounting.proved import NeighboringRelation
from dpjax.federated.client import ClientAlgorithm, Sent
from dpjax.federated.described import aggregator
from dpjax.gradients.arguments import checked_mask
from dpjax.gradients.clipping import clip_and_sum
from dpjax.gradients.weighted_sums import weighted_sum
from dpjax.key_uses import KeyUse, key_for
from dpjax.noise import gaussian
from dpjax.plan import Plan
from dpjax.transforms.clip_scale import clip_scale
from dpjax.transforms.scale_then_privatize import coordinate_scales
from dpjax.types import Array, ArrayTree, ClipLike, ClippedSum
from dpjax.validate import UserError


class RoundRefused(UserError):
  """Error of a round with too few clients or messages. A run may go on with the next round."""


class Aggregator(NamedTuple):
  """Rule that turns messages into one update.

  `init`, `update`, `partial` and `finish` are pure and can be jitted; `check` and `through` cannot.
  If `private` is True, an algorithm releases only functions of the aggregator's output. It then
  refuses options that would release anything else (a realised count, a second mean).
  """

  init: Callable[..., Any]  # (message, or shapes of a message) -> state
  # Function (messages [C, *p], mask [C], state, weights=None) -> ([*p], state).
  update: Callable[..., Any]
  partial: Callable[..., Any] | None = None  # (state, messages, weights, mask) -> sums
  finish: Callable[..., Any] | None = None  # (sums, state) -> ([*p], state)
  private: bool = False  # clips each message, adds noise, divides by a public constant
  plan: Plan | None = None  # plan that draws the cohorts and sets the noise; None: unknown
  # Function (messages, mask, weights) that raises RoundRefused if too few messages count.
  check: Callable[..., Any] | None = None
  # Function from a `MapClients` to one that sums in another way, such as by secure aggregation.
  through: Callable[..., Any] | None = None
  # Fewest clients of a round in which all send a message that counts; a smaller round is refused.
  min_clients: int = 1

  def drawn_by(self, plan: Plan) -> Aggregator:
    """Returns this aggregator with `plan`, a plan without an epsilon, to draw its cohorts.

    Raises:
      UserError: `plan` guarantees an epsilon, which needs the noise that `central` adds; or this
        aggregator is `central`, whose own plan counts on its own cohorts.
    """
    if self.plan is not None and self.plan.is_private:
      raise UserError(
        "draws cohorts other than those of the aggregator's own plan, whose epsilon counts on them",
        field="plan",
      )
    if plan.is_private:
      raise UserError(
        "promises an epsilon, for noise that is not added here; must have noise_multiplier=0, or "
        "use central(plan, key), which adds it",
        field="plan",
      )
    return self._replace(plan=plan)


def by_sums(
  init: Callable, partial: Callable, finish: Callable, **facts: Any
) -> Aggregator:
  """Returns the aggregator whose `update` passes the sums of `partial` to `finish`."""

  def update(messages: Any, mask: Array, state: Any, weights: Array | None = None) -> Any:
    mask, weights = _check(messages, mask, weights)
    messages, weights, mask = at_least_one((messages, weights, mask))
    return finish(partial(state, messages, weights, mask), state)

  return Aggregator(init, update, partial, finish, **facts)


def _check(messages: Any, mask: Any, weights: Any) -> tuple[Array, Array]:
  """Returns (mask [C], weights [C]) of C messages; weights default to 1. Raises UserError for other
  lengths."""
  size = jax.tree.leaves(messages)[0].shape[0]
  mask = checked_mask(mask, size)
  weights = jnp.ones(size, jnp.float32) if weights is None else jnp.asarray(weights)
  if weights.shape != (size,):
    raise UserError(
      f"must be one number for each of {size} messages, got shape {weights.shape}",
      field="weights",
    )
  return mask, weights


def at_least_one(stacked: ArrayTree) -> Any:
  """Appends a row of zeros to leaves [0, ...]; returns all other leaves as they are."""
  # Some rules are undefined for 0 rows. The added row has the mask False, so it does not count.
  pad = lambda leaf: leaf if leaf.shape[0] else jnp.zeros((1, *leaf.shape[1:]), leaf.dtype)
  return jax.tree.map(pad, stacked)


def finite(messages: ArrayTree, mask: Array) -> Array:
  """Returns a mask [C] of the clients of `mask` whose message has a finite l2 norm."""
  lengths = trees.per_example_norms(messages)
  return checked_mask(mask, lengths.shape[0]) & jnp.isfinite(lengths)


@aggregator(
  name="mean",
  source="McMahan et al. 2017",
  stands_up_to="nobody",
  tolerates=lambda n: 0,
  weighted=True,
  is_mean=True,
  no_claim="the mean without privacy",
)
def weighted_mean() -> Aggregator:
  """Takes the mean sum_i w_i m_i / sum_i w_i of finite messages with a finite weight w_i > 0.

  No privacy: the influence of a client has no bound. Without clients the update is 0.

  >>> aggregator = weighted_mean()
  >>> messages = jnp.array([[1.0], [4.0], [jnp.nan]])
  >>> weights = jnp.array([2.0, 1.0, 1.0])
  >>> aggregator.update(messages, jnp.ones(3, bool), aggregator.init(messages[0]), weights)[0]
  Array([2.], dtype=float32)
  """

  def partial(state: Any, messages: Any, weights: Array, mask: Array) -> Any:
    del state
    # Without this mask, one NaN or one infinite weight would decide the mean.
    counted = finite(messages, mask) & jnp.isfinite(weights) & (weights > 0)
    weights = jnp.where(counted, weights, 0.0)
    return weighted_sum(messages, weights), jnp.sum(weights)

  def finish(sums: Any, state: Any) -> Any:
    total, weight = sums
    return trees.scale(total, jnp.where(weight > 0, 1.0 / weight, 0.0)), state

  return by_sums(lambda message: (), partial, finish)


def dp_mean(
  tx: optax.GradientTransformation, *, l2_clip_norm: ClipLike | None = None
) -> Aggregator:
  """Clips each client's weighted message, sums, adds noise once, divides by a public constant.

  Args:
    tx: Optax transformation that clips, adds noise and divides, such as `plan.transform(key)` of a
      plan with `unit="user"`, whose statement is then about clients (`central` checks it). Each row
      is one client, so `normalize_by` is the EXPECTED number of clients in a cohort.
    l2_clip_norm: clip norm, or `Clip`, that `tx` was made for. Each message is then clipped as it
      arrives, to the norm that `tx` uses in this round. `tx` gets the `ClippedSum`, so
      `loop_clients` never holds two messages at once. If the norm adapts, `tx` also gets the count
      by which it adapts. None passes `tx` the stacked messages and their mask.

  Guarantee: adding or removing one client (with any data, message and weight, NaN included)
  moves the sum by at most `l2_clip_norm`. The weight is applied BEFORE the clipping, so no
  weighting rule can break the bound. With a plan's transform and cohorts drawn by the plan's
  sampler, all iterates together are (plan.epsilon(), plan.delta)-DP for one CLIENT.
  An empty cohort still gets noise, and must be accounted. (McMahan et al. 2018, DP-FedAvg,
  with a fixed denominator.)

  Raises:
    UserError: `tx` has noise for a smaller bound than `l2_clip_norm` (raised while tracing), or
      scales coordinates although `l2_clip_norm` is given.

  >>> from dpjax.transforms import clip_and_noise
  >>> tx = clip_and_noise(l2_clip_norm=1.0, noise_multiplier=0.0, normalize_by=2.0,
  ...   key=jax.random.key(0))
  >>> aggregator = dp_mean(tx, l2_clip_norm=1.0)
  >>> messages = jnp.array([[9.0, 0.0], [0.0, 0.5]])
  >>> state = aggregator.init(messages[0])
  >>> aggregator.update(messages, jnp.ones(2, bool), state, jnp.array([1e6, 1.0]))[0]
  Array([0.5 , 0.25], dtype=float32)
  """
  transform = optax.with_extra_args_support(tx)

  def update(messages: Any, mask: Array, state: Any, weights: Array | None = None) -> Any:
    mask, weights = _check(messages, mask, weights)
    mask = _sending(mask, weights)
    weighted, mask = at_least_one((_weigh(messages, weights), mask))
    offered: Any = gradients.wrap_grads(weighted)
    return transform.update(offered, state, None, mask=mask)

  if l2_clip_norm is None:
    return Aggregator(transform.init, update, private=True)
  clip = gradients.Clip.of(l2_clip_norm)
  bound = clip.l2_bound

  def init(params: Any) -> Any:
    state = transform.init(params)
    if coordinate_scales(state) is not None:
      raise UserError(
        "must be None for a transform that scales coordinates: messages would be clipped before "
        "they are scaled",
        field="l2_clip_norm",
        value=l2_clip_norm,
      )
    return state

  def partial(state: Any, messages: Any, weights: Array, mask: Array) -> Any:
    zeros = jnp.zeros(mask.shape, jnp.float32)
    weighted = _weigh(messages, weights)
    scale = clip_scale(state)
    # The scale is public: it is computed from releases of earlier rounds.
    if scale is not None:
      weighted = jax.tree.map(lambda leaf: leaf / scale, weighted)
    summed = clip_and_sum(weighted, zeros, _sending(mask, weights), clip)
    return summed.total, clip.rule.query(summed) if clip.rule.adapts else None

  def finish(sums: Any, state: Any) -> Any:
    total, count = sums
    nothing = jnp.zeros(0, jnp.float32)
    summed: Any = ClippedSum(total, nothing, nothing, bound, (bound,))
    return transform.update(summed, state, None, mask=jnp.zeros(0, bool), count=count)

  return by_sums(init, partial, finish, private=True)


def _sending(mask: Array, weights: Array) -> Array:
  """Returns the mask [C] of the clients of `mask` whose weight is not 0.

  A client without examples adds nothing to the query of an adaptive clip norm either. Else a client
  and its empty twin (replace_special) would differ by more than one client's term."""
  return mask & (weights != 0)


def _weigh(messages: Any, weights: Array) -> Any:
  """Returns w_i m_i for each message; exactly 0 where w_i is 0, even if m_i is NaN."""

  def scaled(leaf: Array) -> Array:
    leaf = trees.at_least_float32(leaf)
    factor = weights.astype(leaf.dtype).reshape((-1,) + (1,) * (leaf.ndim - 1))
    # 0 x NaN would be NaN, but a client that does not count must send exactly 0.
    return jnp.where(factor == 0, 0, leaf * factor)

  return jax.tree.map(scaled, messages)


def central(plan: Plan, key: Array) -> Aggregator:
  """Returns `dp_mean` with the transform of a plan. `key` is the secret key of the noise.

  Each message is clipped as it arrives, even if the clip norm changes between rounds. The
  aggregator keeps the plan, so a round refuses a cohort that another plan has drawn.

  Raises:
    UserError: the plan has clip norms or noise shares per group, slices or scaling; or noise, but
      another `unit` than "user", with which it has no statistics either.
  """
  validate.instance(Plan, "a dpjax.Plan, which samples clients", plan=plan)
  clip = plan.l2_clip_norm
  if not clip.is_one_number or plan.noise_shape.shares is not None:
    raise UserError(
      "must be one number for clients, whose messages may hold more than parameters",
      field="l2_clip_norm",
      value=clip.norms,
    )
  if plan.scaling is not None:
    raise UserError(
      "must be None for clients, whose messages are clipped as they arrive",
      field="scaling",
      value=plan.scaling,
    )
  if plan.slices != 1:
    raise UserError(
      "must be 1 for clients, which are streamed anyway", field="slices", value=plan.slices
    )
  # One example less turns a client's message round, which moves the sum by two clip norms. So the
  # epsilon of a plan that hides examples would be too small for them.
  if plan.is_private and plan.unit != "user":
    raise UserError(
      "must be 'user', as in dpjax.Plan(..., unit='user'), since one row is all of a client",
      field="unit",
      value=plan.unit,
    )
  return dp_mean(plan.transform(key), l2_clip_norm=clip)._replace(plan=plan)


def client_noise(
  client: ClientAlgorithm, *, l2_clip_norm: float, noise_multiplier: float
) -> ClientAlgorithm:
  """Wraps a client so that it clips its message to `l2_clip_norm` and adds noise before sending.

  Privacy is local: nobody has to be trusted. The noise has standard deviation
  noise_multiplier * l2_clip_norm in every coordinate, and is drawn from the client's key of the
  round. The weight multiplies the message before clipping. The client then sends weight 1, since
  its weight would reveal its number of examples.

  Guarantee: one message is the Gaussian mechanism with `noise_multiplier` under "zero-out".
  REPLACING a client's data moves the message by up to 2 * l2_clip_norm, so the guarantee against
  the server is `local_event` under "replace_one". A client that takes part k times sends k
  messages. Sampling does not amplify the guarantee against the server. At one guarantee, the mean
  of n clients' messages has sqrt(n) times the noise that a trusted server would add.

  The result may be used with `dp_mean`, which clips the noisy message once more and adds noise. A
  client without examples sends noise, too, and so does not contribute zero. Under replace_special
  the bound of `dp_mean` then needs a flat clip to `l2_clip_norm` or more, and no compression: a
  clip moves two messages no further apart. `federated` refuses a plan for which that fails.
  """
  gradients.Clip.of(l2_clip_norm).check_finite()
  validate.non_negative(noise_multiplier=noise_multiplier)
  std = noise_multiplier * l2_clip_norm

  def finish(received: Any, local: Any) -> Any:
    sent, memory, info = client.finish(received, local)
    stacked = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], sent.message)
    weighted = _weigh(stacked, jnp.asarray(sent.weight)[None])
    nothing = jnp.zeros(1, jnp.float32)
    clipped = clip_and_sum(weighted, nothing, jnp.ones(1, bool), l2_clip_norm)
    # The noise has a key of its own, so it shares no random stream with the optimizer or rounding.
    state = gaussian.init(key_for(KeyUse.CLIENT_NOISE, local.key))
    noisy, _ = noise.add_gaussian(state, clipped.total, std)
    info = info._replace(upload_bits=jnp.float32(32 * trees.size(noisy)))
    # The message already contains the weight. A weight that is sent separately would reveal the
    # client's number of examples.
    return Sent(noisy, jnp.ones_like(sent.weight)), memory, info

  return client.wrap(finish=finish, apart_from_empty=float(l2_clip_norm))


def local_event(noise_multiplier: float, num_messages: int = 1) -> DpEvent:
  """Returns the event of one client's messages to the server. Account for it under "replace_one".

  Args:
    noise_multiplier: argument of `client_noise`, relative to the clip norm.
    num_messages: largest number of rounds that one client takes part in.
  """
  return accounting.compose(accounting.gaussian_event(noise_multiplier), num_messages)


def local_epsilon(noise_multiplier: float, delta: float, num_messages: int = 1) -> float:
  """Returns a proved epsilon of a client's messages against the server, under "replace_one".

  No amplification by sampling or shuffling is claimed: the server sees who sends.

  >>> central = accounting.epsilon(accounting.gaussian_event(1.0), delta=1e-5)
  >>> abs(local_epsilon(2.0, 1e-5) - central) < 1e-3  # twice the sensitivity
  True
  """
  return accounting.epsilon(
    local_event(noise_multiplier, num_messages),
    delta=delta,
    neighboring_relation=NeighboringRelation.REPLACE_ONE,
  )
