"""Checks of a user's model before a run. Models of dpjax have tests instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax

from dpjax.models.libraries import by_path, linen_modules
from dpjax.types import ArrayTree, Params
from dpjax.validate import UserError


def draws(model: Any, params: Params, first: ArrayTree, path: str) -> bool:
  """Returns whether a user's model of any library needs a key in training (dropout).

  Args:
    model: linen module, as `linen_modules.modes` returns it, or a `Model`.
    first: batch [1, ...] of one example. Only its shape is used.
    path: the user's import path, for messages.

  Raises:
    UserError: the model draws random numbers in evaluation, too, or a Dropout of linen is off in
      training.
  """
  if isinstance(model, by_path.Model):
    return model.draws(params, first)
  if linen_modules.draws(model, params, first, path):
    return True
  flags = getattr(model, "flags", {})
  module = getattr(model, "module", model)
  # The model is traced once more, without computing values.
  _check_dropout(
    lambda: jax.eval_shape(lambda p, x: module.apply(p, x, **flags), params, first), path
  )
  return False


def _check_dropout(run: Callable[[], Any], path: str) -> None:
  """Raises UserError for a Dropout that is off in training. The cause may be a training flag of an
  unknown name, such as `is_train`, which stays at its default."""
  silent = []

  def watch(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    layer = context.module
    if isinstance(layer, nn.Dropout) and context.method_name == "__call__":
      silent.append(layer.rate)
    return call(*args, **kwargs)

  with nn.intercept_methods(watch):
    run()
  if any(silent):
    raise UserError(
      "its Dropout is off in training, too; its __call__ must take one of "
      f"{', '.join(linen_modules.TRAINING)}",
      field="model.name",
      value=path,
    )


def check_collections(collections: Iterable[str], path: str) -> None:
  """Raises UserError for a collection other than "params". Steps would train its variables, too.

  >>> check_collections(["params", "cache"], "mine:Net")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: model.name='mine:Net': must hold no state but "params", not 'cache'...
  """
  others = [name for name in collections if name != "params"]
  held = dict(collections) if isinstance(collections, Mapping) else {}
  stats = held.get("batch_stats", {})
  # BatchNorm's averages have these names. SpectralNorm keeps its vectors in this collection, too.
  last = {str(where[-1].key) for where, _ in jax.tree_util.tree_leaves_with_path(stats)}
  if {"mean", "var"} & last:
    raise UserError(linen_modules.MIXES, field="model.name", value=path)
  if others:
    layers = (
      f" of {', '.join(map(str, stats))}" if others[0] == "batch_stats" and stats else ""
    )
    raise UserError(
      f'must hold no state but "params", not {others[0]!r}{layers}; the loss of one example cannot '
      "carry it to the next step",
      field="model.name",
      value=path,
    )


def check_outputs(
  outputs: Any, wanted: tuple[int, ...], input_shape: tuple[int, ...], path: str
) -> None:
  """Raises UserError unless a model returns one array of logits.

  Args:
    outputs: result of the model, as arrays or as shapes.
    wanted: shape that the logits must have.
    input_shape: shape of the inputs.
    path: the user's import path, for messages.
  """
  shape = getattr(outputs, "shape", None)
  if shape == wanted:
    return
  shown = f"a {type(outputs).__name__}" if shape is None else f"of shape {shape}"
  raise UserError(
    f"must return logits of shape {wanted} for x of shape {input_shape}, not {shown}",
    field="model.name",
    value=path,
  )
