"""Models by name, for configs and flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dpjax import models, validate
from dpjax import names as names_lib
from dpjax.models.libraries import linen_modules
from dpjax.validate import UserError
from dpjax.zoo import networks

# Colours of the images of which scattering features are computed.
COLOURS = ("rgb", "opponent")


class _Entry(NamedTuple):
  # Class whose constructor arguments are the options, or its name in `dpjax.models` or
  # `dpjax.zoo.networks`: a run imports its own model alone.
  module: Any
  preset: str = ""  # classmethod of `module` that makes the model; "": the constructor does
  given: Mapping[str, Any] = MappingProxyType({})  # arguments that options may replace
  fixed: tuple[str, ...] = ()  # fields that are no options
  features: str | None = None  # kind of features that the model takes as inputs
  is_language: bool = False  # whether the model predicts the next token of a text
  in_unit_range: bool = False  # whether features are those of images in [0, 1]
  num_classes: str = "num_classes"  # argument of the width of the logits


_OF_RESNET = ("depth", "width")
_OF_LAYERS = ("features", "activation", "dropout")


def _linear_on(features: str, *, in_unit_range: bool = True) -> _Entry:
  # The head starts from zeros: noise allows too few steps to unlearn thousands of random weights.
  return _Entry(
    "Linear",
    given={"zero_head": True},
    fixed=_OF_LAYERS,
    features=features,
    in_unit_range=in_unit_range,
  )


_ENTRIES = {
  "linear": _Entry("Linear", fixed=_OF_LAYERS),
  "mlp": _Entry("Mlp"),
  "cnn": _Entry("Cnn"),
  "convnet": _Entry("ConvNet"),
  "cifar_cnn": _Entry("CifarCnn"),
  "equivariant_cnn": _Entry("EquivariantCnn"),
  "radp_mnist": _Entry("RadpCnn", "mnist"),
  "radp_fashion_mnist": _Entry("RadpCnn", "fashion_mnist"),
  "radp_cifar10": _Entry("RadpCnn", "cifar10"),
  "scatter_linear": _Entry("ScatterLinear", features="scattering"),
  "scatter_cnn": _Entry("ScatterCnn", features="scattering"),
  "scatter_cnn_cifar10": _Entry("ScatterCnn", "cifar10", features="scattering"),
  "wrn_16_4": _Entry("WideResNet", given={"depth": 16, "width": 4}, fixed=_OF_RESNET),
  "wrn_40_4": _Entry("WideResNet", given={"depth": 40, "width": 4}, fixed=_OF_RESNET),
  "patches_linear": _linear_on("patches"),
  "vgg16_linear": _linear_on("vgg16"),
  "vgg16_96_linear": _linear_on("vgg16_96"),
  "alexnet_linear": _linear_on("alexnet"),
  "minilm_linear": _linear_on("minilm", in_unit_range=False),
  "vit": _Entry("VisionTransformer"),
  "resnet": _Entry("ResNet"),
  "bert": _Entry("Bert"),
  "transformer": _Entry(
    "Transformer", fixed=("vocab_size",), is_language=True, num_classes="vocab_size"
  ),
}


def names() -> tuple[str, ...]:
  """Returns the names of dpjax's models. `build` also accepts a user's path.

  >>> "cnn" in names()
  True
  """
  return tuple(_ENTRIES)


def _entry(name: str) -> _Entry:
  names_lib.one_of(_ENTRIES, model=name)
  if names_lib.is_path(name):
    from dpjax.models.libraries import by_path  # for a user's model alone

    return _Entry(by_path.find(name))
  entry = _ENTRIES[name]
  if isinstance(entry.module, str):
    package = models if hasattr(models, entry.module) else networks
    entry = entry._replace(module=getattr(package, entry.module))
  return entry


def options(name: str) -> tuple[str, ...]:
  """Returns the names of the options of `build(name, ...)`, without num_classes.

  >>> options("scatter_linear")
  ('num_groups', 'dtype')
  """
  entry = _entry(name)
  # Fields of every linen module and arguments that dpjax itself gives are no options.
  hidden = {"num_classes", "parent", "name", *entry.fixed}
  if names_lib.is_path(name):
    from dpjax.models.libraries import by_path

    hidden.update(by_path.arguments(entry.module))
  return tuple(
    name for name in linen_modules.parameters_of(entry.module) if name not in hidden
  )


def documented(name: str) -> Callable[..., Any]:
  """Returns the class or function of a model, whose docstring describes the options.

  >>> documented("mlp").__name__
  'Mlp'
  """
  return _entry(name).module


def needs_features(name: str) -> str | None:
  """Returns the features that a model reads: "scattering", "patches", the name of a frozen public
  network (`public_trunks.TRUNKS`, `sentence_encoder.ENCODERS`), or None for raw examples.

  >>> needs_features("scatter_linear"), needs_features("vgg16_linear"), needs_features("cnn")
  ('scattering', 'vgg16', None)
  """
  return _entry(name).features


def needs_unit_range(name: str) -> bool:
  """Returns whether a model reads features that need images in [0, 1].

  >>> needs_unit_range("patches_linear"), needs_unit_range("scatter_linear")
  (True, False)
  """
  return _entry(name).in_unit_range


def is_language(name: str) -> bool:
  """Returns whether a model predicts the next token of a text, rather than a class.

  >>> is_language("transformer"), is_language("mlp")
  (True, False)
  """
  return _entry(name).is_language


def check_options(name: str, model_options: dict[str, Any], prefix: str = "") -> None:
  """Raises UserError for an option that the model does not have. The message puts `prefix`, such as
  "model.options.", before the option.

  >>> check_options("linear", {"depth": 3})
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: depth=3: not an option of model 'linear': dtype, zero_head
  """
  known = options(name)
  parameters = linen_modules.parameters_of(_entry(name).module)
  if inspect.Parameter.VAR_KEYWORD in {each.kind for each in parameters.values()}:
    return
  for option, value in model_options.items():
    if option not in known:
      hint = ", ".join(known) + validate.did_you_mean(option, known)
      if not known:
        # The config may still hold the options of an earlier model.
        hint = (
          f"it has none; give --config.{prefix[:-1]}='{{}}'" if prefix else "it has none"
        )
      raise UserError(
        f"not an option of model {name!r}: {hint}", field=f"{prefix}{option}", value=value
      )


def build(name: str, *, num_classes: int, **model_options: Any) -> Any:
  """Builds the model of a name. It has `init(key, x[:1])` -> params and `apply(params, x)` ->
  logits.

  Args:
    name: one of `names()`, or a user's path `package.module:name`. The path names a class of
      modules or a function that returns a module. It is called with num_classes and the options.
    num_classes: width of the logits; for "transformer" the size of the vocabulary.
    **model_options: fields of the model, see `options(name)`.

  Returns:
    A linen module; for code of another library a `libraries.by_path.Model`.

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
    if names_lib.is_path(name):
      from dpjax.models.libraries import by_path

      return by_path.build(name, num_classes=num_classes, **model_options)
    make = getattr(entry.module, entry.preset) if entry.preset else entry.module
    return make(**{entry.num_classes: num_classes}, **{**entry.given, **model_options})
  # An option of a wrong type makes the constructor raise one of these errors.
  except (TypeError, OverflowError) as error:
    reason = validate.first_line(error)
    raise UserError(
      f"not for model {name!r} ({reason})", field="options", value=model_options
    ) from error
