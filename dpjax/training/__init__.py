"""Algorithms of central training (not federated), as functions such as `init` and `step`."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.training.augment import augment as augment
  from dpjax.training.dp_sgd import dp_sgd as dp_sgd
  from dpjax.training.dp_sgd import eval_params as eval_params
  from dpjax.training.gradient_penalty import gradient_penalty as gradient_penalty
  from dpjax.training.lora import Lora as Lora
  from dpjax.training.lora import lora as lora
  from dpjax.training.part import of_part as of_part
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
