"""Per-example gradients, clipped one by one and summed."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.gradients.allocation import allocate_clip_norms as allocate_clip_norms
  from dpjax.gradients.clip import Automatic as Automatic
  from dpjax.gradients.clip import Clip as Clip
  from dpjax.gradients.clip import ClipRule as ClipRule
  from dpjax.gradients.clip import Flat as Flat
  from dpjax.gradients.convolutions import (
    canonical_convolutions as canonical_convolutions,
  )
  from dpjax.gradients.ghost.explain import explain as explain
  from dpjax.gradients.per_example import clipped_grad as clipped_grad
  from dpjax.gradients.per_example import per_example_grads as per_example_grads
  from dpjax.gradients.per_example import wrap_grads as wrap_grads
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
