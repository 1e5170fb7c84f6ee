"""Per-example gradients, clipped one by one and summed."""

from dpjax.gradients.allocation import allocate_clip_norms as allocate_clip_norms
from dpjax.gradients.allocation import shares_from_sensitivity as shares_from_sensitivity
from dpjax.gradients.arguments import check_real as check_real
from dpjax.gradients.arguments import checked_mask as checked_mask
from dpjax.gradients.clipping import CLIPPINGS as CLIPPINGS
from dpjax.gradients.clipping import check_clip_norm as check_clip_norm
from dpjax.gradients.clipping import clip_and_sum as clip_and_sum
from dpjax.gradients.clipping import group_bounds as group_bounds
from dpjax.gradients.clipping import l2_bound as l2_bound
from dpjax.gradients.clipping import sensitivity as sensitivity
from dpjax.gradients.explain import explain as explain
from dpjax.gradients.per_example import METHODS as METHODS
from dpjax.gradients.per_example import ClippedGrad as ClippedGrad
from dpjax.gradients.per_example import clipped_grad as clipped_grad
from dpjax.gradients.per_example import per_example_grads as per_example_grads
