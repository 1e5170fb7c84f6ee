"""Optax transforms: clipping by `gradients` with noise by `noise`, and optimizers that follow."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.transforms.accumulation import accumulate as accumulate
  from dpjax.transforms.adaptive_clipping import AdaptiveClipping as AdaptiveClipping
  from dpjax.transforms.adaptive_clipping import (
    adaptive_clip_and_noise as adaptive_clip_and_noise,
  )
  from dpjax.transforms.clip_and_noise import clip_and_noise as clip_and_noise
  from dpjax.transforms.clip_scale import with_clip_schedule as with_clip_schedule
  from dpjax.transforms.correlated import (
    clip_and_correlated_noise as clip_and_correlated_noise,
  )
  from dpjax.transforms.dp_adam import dp_adam as dp_adam
  from dpjax.transforms.dp_sgld import dp_sgld as dp_sgld
  from dpjax.transforms.group_noise import PerLayer as PerLayer
  from dpjax.transforms.scale_then_privatize import CoordinateScaling as CoordinateScaling
  from dpjax.transforms.scale_then_privatize import ScaledLoss as ScaledLoss
  from dpjax.transforms.scale_then_privatize import (
    scale_then_privatize as scale_then_privatize,
  )
  from dpjax.transforms.slack_clipping import SlackClipping as SlackClipping
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
