"""Ways to train, built on the core: PATE, distillation, synthesis, contrastive and adversarial."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.zoo.recipes.adversarial import Adversarial as Adversarial
  from dpjax.zoo.recipes.adversarial import AdversarialState as AdversarialState
  from dpjax.zoo.recipes.adversarial import adversarial as adversarial
  from dpjax.zoo.recipes.contrastive import alignment as alignment
  from dpjax.zoo.recipes.contrastive import (
    alignment_and_uniformity as alignment_and_uniformity,
  )
  from dpjax.zoo.recipes.contrastive import contrastive as contrastive
  from dpjax.zoo.recipes.contrastive import contrastive_loss as contrastive_loss
  from dpjax.zoo.recipes.contrastive import on_sphere as on_sphere
  from dpjax.zoo.recipes.contrastive import uniformity as uniformity
  from dpjax.zoo.recipes.distillation import Distillation as Distillation
  from dpjax.zoo.recipes.distillation import DistillationState as DistillationState
  from dpjax.zoo.recipes.distillation import distillation as distillation
  from dpjax.zoo.recipes.distillation import joint_distillation as joint_distillation
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
