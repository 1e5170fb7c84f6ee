"""Models by name, for configs and flags."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dpjax import models, validate
from dpjax import names as names_lib
from dpjax.models.libraries import linen_modules
from dpjax.validate import UserError
from dpjax.zoo import networks

# Colours of the images of which scattering features are computed.
COLOURS = ("rgb", "opponent")


class Entry(NamedTuple):
  """What is known of a model by its name."""

  # Class whose constructor arguments are the options; of dpjax's models, in the table, its name in
  # `dpjax.models` or `dpjax.zoo.networks`: a run imports its own model alone.
  module: Any
  preset: str = ""  # classmethod of `module` that makes the model; "": the constructor does
  given: Mapping[str, Any] = MappingProxyType({})  # arguments that options may replace
  fixed: tuple[str, ...] = ()  # fields that are no options
  # Features that the model takes as inputs: "scattering", "patches", or the name of a frozen public
  # network (`public_trunks.TRUNKS`, `sentence_encoder.ENCODERS`); None: raw examples.
  features: str | None = None
  is_language: bool = False  # whether the model predicts the next token of a text
  in_unit_range: bool = False  # whether features are those of images in [0, 1]
  num_classes: str = "num_classes"  # argument of the width of the logits


_OF_RESNET = ("depth", "width")
_OF_LAYERS = ("features", "activation", "dropout")


# The head starts from zeros: noise allows too few steps to unlearn thousands of random weights.
_linear_on = functools.partial(Entry, "Linear", given={"zero_head": True}, fixed=_OF_LAYERS)

# Names of dpjax's models. `build` also accepts a user's path.
MODELS = {
  "linear": Entry("Linear", fixed=_OF_LAYERS),
  "mlp": Entry("Mlp"),
  "cnn": Entry("Cnn"),
  "convnet": Entry("ConvNet"),
  "cifar_cnn": Entry("CifarCnn"),
  "equivariant_cnn": Entry("EquivariantCnn"),
  "radp_mnist": Entry("RadpCnn", "mnist"),
  "radp_fashion_mnist": Entry("RadpCnn", "fashion_mnist"),
  "radp_cifar10": Entry("RadpCnn", "cifar10"),
  "scatter_linear": Entry("ScatterLinear", features="scattering"),
  "scatter_cnn": Entry("ScatterCnn", features="scattering"),
  "scatter_cnn_cifar10": Entry("ScatterCnn", "cifar10", features="scattering"),
  "wrn_16_4": Entry("WideResNet", given={"depth": 16, "width": 4}, fixed=_OF_RESNET),
  "wrn_40_4": Entry("WideResNet", given={"depth": 40, "width": 4}, fixed=_OF_RESNET),
  "patches_linear": _linear_on(features="patches", in_unit_range=True),
  "vgg16_linear": _linear_on(features="vgg16", in_unit_range=True),
  "vgg16_96_linear": _linear_on(features="vgg16_96", in_unit_range=True),
  "alexnet_linear": _linear_on(features="alexnet", in_unit_range=True),
  "minilm_linear": _linear_on(features="minilm"),
  "vit": Entry("VisionTransformer"),
  "resnet": Entry("ResNet"),
  "bert": Entry("Bert"),
  "transformer": Entry(
    "Transformer", fixed=("vocab_size",), is_language=True, num_classes="vocab_size"
  ),
}


def entry(name: str) -> Entry:
  """Returns what is known of a model, or of a user's model by its path, with its class.

  >>> entry("mlp").module.__name__, entry("patches_linear").in_unit_range
  ('Mlp', True)
  >>> entry("scatter_linear").features, entry("cnn").features
  ('scattering', None)
  """
  names_lib.one_of(MODELS, model=name)
  if names_lib.is_path(name):
    from dpjax.models.libraries import by_path  # for a user's model alone

    return Entry(by_path.find(name))
  known = MODELS[name]
  if isinstance(known.module, str):
    package = models if hasattr(models, known.module) else networks
    known = known._replace(module=getattr(package, known.module))
  return known


def options(name: str) -> tuple[str, ...]:
  """Returns the names of the options of `build(name, ...)`, without num_classes.

  >>> options("scatter_linear")
  ('num_groups', 'dtype')
  """
  known = entry(name)
  # Fields of every linen module and arguments that dpjax itself gives are no options.
  hidden = {"num_classes", "parent", "name", *known.fixed}
  if names_lib.is_path(name):
    from dpjax.models.libraries import by_path

    hidden.update(by_path.arguments(known.module))
  return tuple(
    name for name in linen_modules.parameters_of(known.module) if name not in hidden
  )


def check_options(name: str, model_options: dict[str, Any]) -> None:
  """Raises UserError for an option that the model does not have.

  >>> check_options("linear", {"depth": 3})
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: depth=3: not an option of model 'linear': dtype, zero_head
  """
  known = options(name)
  parameters = linen_modules.parameters_of(entry(name).module)
  if inspect.Parameter.VAR_KEYWORD in {each.kind for each in parameters.values()}:
    return
  for option, value in model_options.items():
    if option not in known:
      hint = ", ".join(known) + validate.did_you_mean(option, known)
      # A config may still hold the options of an earlier model.
      hint = hint or "it has none, so options must be {}"
      raise UserError(f"not an option of model {name!r}: {hint}", field=option, value=value)


def build(name: str, *, num_classes: int, **model_options: Any) -> Any:
  """Builds the model of a name. It has `init(key, x[:1])` -> params and `apply(params, x)` ->
  logits.

  Args:
    name: one of `MODELS`, or a user's path `package.module:name`. The path names a class of
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
  known = entry(name)
  validate.integer_at_least(1, num_classes=num_classes)
  check_options(name, model_options)
  try:
    if names_lib.is_path(name):
      from dpjax.models.libraries import by_path

      return by_path.build(name, num_classes=num_classes, **model_options)
    make = getattr(known.module, known.preset) if known.preset else known.module
    return make(**{known.num_classes: num_classes}, **{**known.given, **model_options})
  # An option of a wrong type makes the constructor raise one of these errors.
  except (TypeError, OverflowError) as error:
    reason = validate.first_line(error)
    raise UserError(
      f"not for model {name!r} ({reason})", field="options", value=model_options
    ) from error
