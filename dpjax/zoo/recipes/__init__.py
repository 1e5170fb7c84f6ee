"""Ways to train, built on the core: PATE, distillation, synthesis, contrastive and adversarial."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.zoo.recipes.adversarial import adversarial as adversarial
  from dpjax.zoo.recipes.contrastive import contrastive as contrastive
  from dpjax.zoo.recipes.distillation import distillation as distillation
  from dpjax.zoo.recipes.distillation import joint_distillation as joint_distillation
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
