"""A user's own parts of a run, by import path (`dpjax.names`): how each is called, what it
must return, and what is promised then.

| field                    | called with                           | returns                    |
| ------------------------ | ------------------------------------- | -------------------------- |
| `model.name`             | num_classes=, **model.options         | a linen module             |
| `loss`                   | apply                                 | loss(params, ONE example)  |
| `data.name`              | nothing                               | (train, test), `Dataset`s  |
| `optimizer.rule` [1]     | a learning rate or a schedule         | an Optax transformation    |
| `privacy.sampler` [2]    | num_examples=, sampling_prob=         | a sampler                  |
| `aggregator`             | nothing                               | `federated.Aggregator`     |
| `algorithm`              | loss_fn, client_tx, and by their      | `ClientAlgorithm`, or      |
|                          | names what `algorithm` below says     | `FederatedAlgorithm`       |

[1] and `client_optimizer.rule`, `server_optimizer.rule`; [2] and `privacy.ftrl.sampler`.

What a promise rests on stays dpjax's own: one example at a time reaches a loss; an optimizer
sees nothing but the noisy mean; a client's message is clipped whatever it holds. The event of
a sampler that is none of dpjax's is its author's claim, and `epsilon_kind` says "claimed";
without an event there is no epsilon. An aggregator, or a whole federated algorithm, of one's
own is proved by nobody, so it is refused with privacy. A layer that mixes examples is found by
`launch.check`.

The code at a path (see `names.sources`) is part of the digest that decides every stream, so
edited code never shares its noise with the code before, and result.json names it with its
sha256 in `user_code`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import DpEvent

from dpjax import accounting, federated, names, sampling
from dpjax.federated import client
from dpjax.federated.algorithms import optimizing_server
from dpjax.types import LossFn
from dpjax.validate import UserError


def _wrong(field: str, path: str, wanted: str, made: Any) -> UserError:
  return UserError(f"{field}={path!r}: must return {wanted}, not {made!r:.60}")


def loss(path: str) -> Callable[[Any], LossFn]:
  """`loss(apply) -> loss_fn(params, example)`, as those of `dpjax.losses`.

  >>> loss("dpjax.losses:softmax_cross_entropy").__name__
  'made'
  """

  def made(apply: Any) -> LossFn:
    loss_fn = names.call(path, "loss", apply)
    if not callable(loss_fn):
      raise _wrong("loss", path, "a function of (params, example)", loss_fn)
    try:
      inspect.signature(loss_fn).bind(None, None)
    except TypeError as error:
      wanted = "a function of (params, example)"
      raise UserError(f"loss={path!r}: must return {wanted}: {error}") from error
    except ValueError:  # no signature to look at
      pass
    return cast(LossFn, loss_fn)

  return made


def optimizer(
  path: str, rate: Any, room: str = "optimizer"
) -> optax.GradientTransformation:
  """`make(rate)`; it runs after the private transform and is never taken for one.

  Args:
    rate: a learning rate, or a schedule: step -> learning rate.

  >>> optimizer("optax:sgd", 0.5).init({})
  (EmptyState(), EmptyState())
  """
  tx: Any = names.call(path, f"{room}.rule", rate)
  if not {"init", "update"} <= set(dir(tx)):
    raise _wrong(f"{room}.rule", path, "an Optax transformation", tx)

  def init(params: Any) -> Any:
    state = tx.init(params)
    odd = [leaf for leaf in jax.tree.leaves(state) if not _is_array(leaf)]
    if odd:
      raise _wrong(f"{room}.rule", path, "a transformation with a state of arrays", odd[0])
    return state

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    made, state = tx.update(updates, state, params)
    shapes, wanted = (jax.tree.map(jnp.shape, tree) for tree in (made, updates))
    if shapes != wanted:
      raise _wrong(f"{room}.rule", path, f"updates of shapes {wanted!r:.60}", shapes)
    return made, state

  return optax.GradientTransformation(init, update)


def _is_array(leaf: Any) -> bool:
  return isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float))


def sampler(
  path: str, field: str, *, num_examples: int, prob: float, unit: str = "example"
) -> sampling.Sampler:
  """`make(num_examples=, sampling_prob=)`: a sampler with an event, or without an epsilon.

  Args:
    unit: whose data one row is; a sampler of another unit is refused. "user": rows are
      clients, also to a sampler that only knows rows ("example").

  >>> sampler("builtins:dict", "privacy.sampler", num_examples=1, prob=0.5)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: privacy.sampler='builtins:dict': must return a ...
  """
  made = names.call(path, field, num_examples=num_examples, sampling_prob=prob)
  if not isinstance(made, sampling.Sampler):
    raise _wrong(field, path, "a dpjax.sampling.Sampler", made)
  if made.unit not in (unit, "example"):
    raise UserError(
      f"{field}={path!r}: its unit is one {made.unit}, but a row of these data is one {unit}"
    )
  event = made.event(accounting.gaussian_event(1.0))
  relations = accounting.proved_for(made.law).relations
  if event is not None and not (isinstance(event, DpEvent) and relations):
    raise UserError(
      f"{field}={path!r}: event() must return a DpEvent, with `law` the row of "
      f"accounting.PROVED that says under which relations it is true, or None, not "
      f"{event!r:.60} with law {made.law!r}"
    )
  return made


def kind(drawn_by: sampling.Sampler) -> str:
  """Of an epsilon under a sampler: the event of one of dpjax's is proved, an own one claimed.

  >>> kind(sampling.PoissonSampler(prob=0.1, capacity=8))
  'proved'
  """
  return "claimed" if sampling.assumption(drawn_by) else "proved"


def aggregator(path: str) -> federated.Aggregator:
  """`make()`; taken for no private one, whatever it says."""
  made = names.call(path, "aggregator")
  if not isinstance(made, federated.Aggregator):
    raise _wrong("aggregator", path, "a federated.Aggregator", made)
  return made._replace(private=False, plan=None)


def _checked_finish(finish: Callable[..., Any], path: str) -> Callable[..., Any]:
  """`finish`, with UserError unless it returns what a round reads."""

  def checked(received: Any, local: Any) -> Any:
    sent, memory, info = finish(received, local)
    message = sent.message if isinstance(sent, client.Sent) else None
    delta = message.get("delta") if isinstance(message, dict) else None
    wanted, shapes = (jax.tree.map(jnp.shape, tree) for tree in (received.params, delta))
    if delta is None or shapes != wanted:
      raise _wrong("algorithm", path, 'Sent({"delta": as the parameters}, weight)', sent)
    if not isinstance(info, client.ClientInfo):
      raise _wrong("algorithm", path, "a ClientInfo", info)
    return sent, memory, info

  return checked


def algorithm(
  path: str,
  loss_fn: LossFn,
  client_tx: Any,
  server_tx: optax.GradientTransformation,
  *,
  weighting: Any,
  private: bool,
  **common: Any,
) -> federated.FederatedAlgorithm:
  """`make(loss_fn, client_tx, server_tx=, weighting=, aggregator=, map_clients=, key=)`.

  A function that returns a `ClientAlgorithm` says what ONE client does; message, clip, noise
  and server are dpjax's, so privacy is too. One that returns a whole `FederatedAlgorithm`
  could release what no noise covers.

  Raises:
    UserError: neither is returned, or a whole algorithm in a private run.
  """
  offered = {"server_tx": server_tx, "weighting": weighting, **common}
  made = names.call(path, "algorithm", loss_fn, client_tx, **offered)
  if isinstance(made, federated.ClientAlgorithm):
    made = made._replace(finish=_checked_finish(made.finish, path))
    return federated.federated(made, optimizing_server(server_tx), **common)
  if not isinstance(made, federated.FederatedAlgorithm):
    raise _wrong("algorithm", path, "a ClientAlgorithm or FederatedAlgorithm", made)
  if private:
    raise UserError(
      f"algorithm={path!r}: returns a FederatedAlgorithm, of which nobody knows that its "
      "rounds release noisy messages alone; return a ClientAlgorithm, or set "
      "privacy.method='none'"
    )
  return made
