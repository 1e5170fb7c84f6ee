"""Per-example gradients, clipped one by one and summed."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.gradients.allocation import allocate_clip_norms as allocate_clip_norms
  from dpjax.gradients.allocation import shares_from_sensitivity as shares_from_sensitivity
  from dpjax.gradients.arguments import check_real as check_real
  from dpjax.gradients.arguments import checked_mask as checked_mask
  from dpjax.gradients.clip import RULES as RULES
  from dpjax.gradients.clip import Automatic as Automatic
  from dpjax.gradients.clip import Clip as Clip
  from dpjax.gradients.clip import ClipRule as ClipRule
  from dpjax.gradients.clip import Flat as Flat
  from dpjax.gradients.clip import sensitivity as sensitivity
  from dpjax.gradients.clipping import clip_and_sum as clip_and_sum
  from dpjax.gradients.convolutions import (
    canonical_convolutions as canonical_convolutions,
  )
  from dpjax.gradients.device_mesh import DATA as DATA
  from dpjax.gradients.device_mesh import checked_mesh as checked_mesh
  from dpjax.gradients.device_mesh import laid_out as laid_out
  from dpjax.gradients.device_mesh import leaf_sharding as leaf_sharding
  from dpjax.gradients.device_mesh import mesh_of as mesh_of
  from dpjax.gradients.device_mesh import on_all as on_all
  from dpjax.gradients.device_mesh import on_one as on_one
  from dpjax.gradients.device_mesh import row_sharding as row_sharding
  from dpjax.gradients.device_mesh import split_rows as split_rows
  from dpjax.gradients.device_mesh import whole_rows as whole_rows
  from dpjax.gradients.ghost.explain import explain as explain
  from dpjax.gradients.microbatch import filled as filled
  from dpjax.gradients.per_example import METHODS as METHODS
  from dpjax.gradients.per_example import ClippedGrad as ClippedGrad
  from dpjax.gradients.per_example import clipped_grad as clipped_grad
  from dpjax.gradients.per_example import per_example_grads as per_example_grads
  from dpjax.gradients.per_example import stacked as stacked
  from dpjax.gradients.per_example import stacked_arrays as stacked_arrays
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)

# This import fills `RULES`, the table of rules that a `Clip` may name.
from dpjax.gradients import clip_rules as _clip_rules  # noqa: F401
