"""All clipping rules by name: those of `gradients`, and the adapting ones of this package."""

from __future__ import annotations

from collections import ChainMap

from dpjax import gradients
from dpjax.gradients import clip
from dpjax.transforms.adaptive_clipping import AdaptiveClipping
from dpjax.transforms.slack_clipping import SlackClipping

# A ChainMap also shows rules that are added to `clip.RULES` later.
CLIP_RULES = ChainMap[str, type[gradients.ClipRule]](
  {"adaptive": AdaptiveClipping, "slack": SlackClipping}, clip.RULES
)
