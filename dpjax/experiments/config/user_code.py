"""User-defined parts of a run, by import path (`dpjax.names`): their arguments, the results that
they must return, and what the guarantee still covers.

| field                    | called with                           | returns                    |
| ------------------------ | ------------------------------------- | -------------------------- |
| `model.name` [3]         | num_classes=, **model.options         | a linen, nnx or Equinox    |
|                          |                                       | module, or two functions   |
| `loss`                   | apply                                 | loss(params, ONE example)  |
| `data.name`              | nothing                               | (train, test), `Dataset`s  |
| `optimizer.rule` [1]     | a learning rate or a schedule         | an Optax transformation    |
| `privacy.sampler` [2]    | num_examples=, sampling_prob=; or the | a sampler                  |
|                          | class of one that has `sized`         |                            |
| `aggregator`             | nothing                               | `federated.Aggregator`     |
| `algorithm`              | loss_fn, client_tx, and by their      | `ClientAlgorithm`, or      |
|                          | names server_tx, weighting,           | `FederatedAlgorithm`       |
|                          | aggregator, map_clients and key       |                            |
| `writer`                 | step, row                             | nothing that is read       |
| `attack`                 | its own fields, by their names        | an `AttackSettings`, frozen|

[1] and `client_optimizer.rule`, `server_optimizer.rule`; [2] of every method; [3] with rngs=
for nnx, key= for Equinox, and input_shape= if it has this argument (`models.libraries`).

dpjax itself ensures what a guarantee needs: a loss gets one example at a time, and an optimizer
only the noisy mean. A client's optimizer gets raw gradients, but the client's message is clipped,
whatever it holds. The event of a user's sampler is its author's claim, so `epsilon_kind` is
"claimed"; without an event there is no epsilon. Nobody has proved a user's `FederatedAlgorithm`, so
it is refused in every private run. A user's aggregator is refused wherever the server's noise gives
the guarantee. `launch.check` finds a layer that mixes examples.

result.json lists the user's own modules with their SHA-256 (`starts`), as each start of the run
found them whose steps are in the result. That is for a reader: a run resumes whatever became of
them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import DpEvent

from dpjax import accounting, names, sampling
from dpjax.sampling import batches
from dpjax.sampling.registry import Sizing
from dpjax.types import Array, ArrayTree, LossFn, Params
from dpjax.validate import UserError


def wrong(field: str, path: str, wanted: str, returned: object) -> UserError:
  return UserError(f"must return {wanted}, not {returned!r:.60}", field=field, value=path)


def loss(path: str) -> Callable[[Callable[..., Array]], LossFn]:
  """Returns the loss at a path as a function apply -> loss_fn(params, example), as in
  `dpjax.losses`.

  >>> loss("dpjax.losses:softmax_cross_entropy").__name__
  'loss_of'
  """
  wanted = "a function of (params, example)"

  def loss_of(apply: Callable[..., Array]) -> LossFn:
    loss_fn = names.call(path, "loss", apply)
    if not callable(loss_fn):
      raise wrong("loss", path, wanted, loss_fn)
    try:
      inspect.signature(loss_fn).bind(None, None)
    except TypeError as error:
      raise UserError(f"must return {wanted}: {error}", field="loss", value=path) from error
    # Native code has no signature to inspect, so its arguments are not checked.
    except ValueError:
      pass

    def scalar(params: Params, example: Any) -> Array:
      value: Any = loss_fn(params, example)
      if not _is_array(value) or jnp.shape(value) != ():
        raise wrong("loss", path, f"{wanted} that returns one number", value)
      return value

    return names.guard(path, "loss", scalar)

  return loss_of


def optimizer(
  path: str, rate: float | optax.Schedule, section: str = "optimizer"
) -> optax.GradientTransformation:
  """Returns the optimizer that the function at a path makes from a learning rate.

  It never counts as private. It gets the noisy mean; a client's optimizer gets raw gradients, and
  the client's message is made private afterwards.

  Args:
    rate: a learning rate, or a schedule: step -> learning rate.

  >>> optimizer("optax:sgd", 0.5).init({})
  (EmptyState(), EmptyState())
  """
  field = f"{section}.rule"
  tx: Any = names.call(path, field, rate)
  if not {"init", "update"} <= set(dir(tx)):
    raise wrong(field, path, "an Optax transformation", tx)

  def init(params: Params) -> ArrayTree:
    state = tx.init(params)
    odd = [leaf for leaf in jax.tree.leaves(state) if not _is_array(leaf)]
    if odd:
      raise wrong(field, path, "a transformation with a state of arrays", odd[0])
    return state

  def update(updates: Params, state: ArrayTree, params: Params = None) -> Any:
    changed, state = tx.update(updates, state, params)
    if shapes(changed) != shapes(updates):
      raise wrong(
        field, path, f"updates of shapes {shapes(updates)!r:.60}", shapes(changed)
      )
    return changed, state

  # `guarded` makes an error in `init` or `update` name the field and the user's line.
  guarded = (names.guard(path, field, part) for part in (init, update))
  return optax.GradientTransformation(*guarded)


def _is_array(leaf: object) -> bool:
  return isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float))


def shapes(tree: ArrayTree) -> Any:
  return jax.tree.map(lambda leaf: tuple(jnp.shape(leaf)), tree)


def sampler(path: str, field: str, size: Sizing) -> sampling.Sampler:
  """Returns the sampler at a path: a class with a rule for its size, or what a function returns.

  A subclass of one of dpjax's is sized like its base, unless it has a `sized` of its own. Anything
  else is called with (num_examples=, sampling_prob=).

  Args:
    size: numbers of the run. The sampler's unit must be that of the run, or "example". In a run
      with the unit "user", a sampler of examples draws rows that are clients.

  >>> sampler("builtins:dict", "privacy.sampler", Sizing(0.5, num_examples=1))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: privacy.sampler='builtins:dict': must return a ...
  """
  maker = names.find(path, field)
  is_kind = isinstance(maker, type) and issubclass(maker, sampling.Sampler)
  if is_kind and maker.sized.__func__ is not sampling.Sampler.sized.__func__:
    built = names.guard(path, field, maker.sized)(size)
  else:
    built = names.call(
      path, field, num_examples=size.num_examples, sampling_prob=size.sampling_prob
    )
  if not isinstance(built, sampling.Sampler):
    raise wrong(field, path, "a dpjax.sampling.Sampler", built)

  def check() -> None:
    if built.unit not in (size.unit, "example"):
      raise UserError(
        f"its unit is one {built.unit}, but a row of these data is one {size.unit}"
      )
    event = built.event_at(0, accounting.gaussian_event(1.0))
    relations = built.proved_under
    if event is not None and not (isinstance(event, DpEvent) and relations):
      raise UserError(
        "event() must return a DpEvent, with `relations` under which it is true, or None, not "
        f"{event!r:.60} with relations {relations!r}"
      )
    # One draw is made now, so that a bad sampler is refused before the first step.
    batches.draw_rows(built, size.num_examples, seed=0, step=0)

  names.guard(path, field, check)()
  return built
