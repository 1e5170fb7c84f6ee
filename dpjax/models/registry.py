"""Models by name, for configs and flags."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn

from dpjax import names as names_lib
from dpjax import validate
from dpjax.models import convnet, dense, scatter_heads, transformer, wide_resnet
from dpjax.validate import UserError


class _Entry(NamedTuple):
  make: Callable[..., nn.Module]  # (*, num_classes, **options)
  module: Callable[..., nn.Module]  # whose parameters are the options
  fixed: tuple[str, ...] = ()  # fields that the name decides
  features: str | None = None  # what the input must be turned into first


def _wide_resnet(depth: int) -> _Entry:
  make = functools.partial(wide_resnet.WideResNet, depth=depth, width=4)
  return _Entry(make, wide_resnet.WideResNet, fixed=("depth", "width"))


def _transformer(*, num_classes: int, **options) -> nn.Module:
  return transformer.Transformer(vocab_size=num_classes, **options)


_ENTRIES = {
  "linear": _Entry(dense.Linear, dense.Linear, fixed=("features", "activation")),
  "mlp": _Entry(dense.Mlp, dense.Mlp),
  "cnn": _Entry(convnet.Cnn, convnet.Cnn),
  "convnet": _Entry(convnet.ConvNet, convnet.ConvNet),
  "cifar_cnn": _Entry(convnet.CifarCnn, convnet.CifarCnn),
  "radp_mnist": _Entry(convnet.RadpCnn.mnist, convnet.RadpCnn),
  "radp_fashion_mnist": _Entry(convnet.RadpCnn.fashion_mnist, convnet.RadpCnn),
  "radp_cifar10": _Entry(convnet.RadpCnn.cifar10, convnet.RadpCnn),
  "scatter_linear": _Entry(
    scatter_heads.ScatterLinear, scatter_heads.ScatterLinear, features="scattering"
  ),
  "scatter_cnn": _Entry(
    scatter_heads.ScatterCnn, scatter_heads.ScatterCnn, features="scattering"
  ),
  "scatter_cnn_cifar10": _Entry(
    scatter_heads.ScatterCnn.cifar10, scatter_heads.ScatterCnn, features="scattering"
  ),
  "wrn_16_4": _wide_resnet(16),
  "wrn_40_4": _wide_resnet(40),
  "transformer": _Entry(_transformer, transformer.Transformer, fixed=("vocab_size",)),
}


def names() -> tuple[str, ...]:
  """The names that `build` knows.

  >>> "cnn" in names()
  True
  """
  return tuple(_ENTRIES)


def _entry(name: str) -> _Entry:
  names_lib.one_of(_ENTRIES, model=name)
  if names_lib.is_path(name):
    make = functools.partial(names_lib.call, name, "model")
    return _Entry(make, names_lib.find(name, "model"))
  return _ENTRIES[name]


def options(name: str) -> tuple[str, ...]:
  """The options of `build(name, ...)`, beside num_classes.

  >>> options("scatter_linear")
  ('num_groups', 'dtype')
  """
  entry = _entry(name)
  hidden = {"num_classes", "parent", "name", *entry.fixed}
  return tuple(name for name in _parameters(entry.module) if name not in hidden)


def _parameters(module: Callable[..., nn.Module]) -> Mapping[str, inspect.Parameter]:
  try:
    return inspect.signature(module).parameters
  except ValueError:  # of native code, which has none to look at
    return inspect.signature(lambda **options: None).parameters


def needs_features(name: str) -> str | None:
  """What the inputs of a model are: "scattering" features, or None for raw examples.

  >>> needs_features("scatter_linear"), needs_features("cnn")
  ('scattering', None)
  """
  return _entry(name).features


def _check_option(name: str, option: str, value: Any, prefix: str) -> None:
  known = options(name)
  kinds = {parameter.kind for parameter in _parameters(_entry(name).module).values()}
  if option in known or inspect.Parameter.VAR_KEYWORD in kinds:
    return
  hint = validate.did_you_mean(option, known)
  listed = ", ".join(known)
  at = f"{prefix}{option}"
  raise UserError(f"{at}={value!r}: not an option of model {name!r}: {listed}{hint}")


def check_options(name: str, model_options: dict[str, Any], prefix: str = "") -> None:
  """Raises UserError for an option that the model of that name does not have; `prefix` is
  where the options stand.

  >>> check_options("linear", {"depth": 3})
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: depth=3: not an option of model 'linear': dtype
  """
  for option, value in model_options.items():
    _check_option(name, option, value, prefix)


def build(name: str, *, num_classes: int, **model_options: Any) -> nn.Module:
  """The model of that name; `init(key, x[:1])` and `apply(params, x)` -> logits.

  Args:
    name: one of `names()`; or `package.module:name`, a user's own linen module class, or a
      function that returns one, called with num_classes and the options.
    num_classes: width of the logits; for "transformer" the size of the vocabulary.
    **model_options: fields of the model, see `options(name)`.

  Raises:
    UserError: an unknown name or option, or a value outside its bounds.

  >>> build("mlp", num_classes=10, features=(64,)).features
  (64,)
  >>> build("mpl", num_classes=10)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: model='mpl': must be one of ... (did you mean 'mlp'?)
  """
  entry = _entry(name)
  validate.integer_at_least(1, num_classes=num_classes)
  check_options(name, model_options)
  try:
    made = entry.make(num_classes=num_classes, **model_options)
    if not isinstance(made, nn.Module):
      raise UserError(f"model={name!r}: must return a linen module, not {made!r}")
    return made
  except (TypeError, OverflowError) as error:  # an option of a kind that no field takes
    reason = str(error).splitlines()[0]
    raise UserError(
      f"options={model_options!r}: not for model {name!r} ({reason})"
    ) from error
