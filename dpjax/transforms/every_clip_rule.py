"""All clipping rules by name: those of `gradients`, and the adapting ones of this package."""

from __future__ import annotations

from collections import ChainMap

from dpjax import gradients
from dpjax.transforms.adaptive_clipping import AdaptiveClipping
from dpjax.transforms.slack_clipping import SlackClipping

# A ChainMap, so that rules which are added to `gradients.RULES` later appear here, too.
CLIP_RULES = ChainMap[str, type[gradients.ClipRule]](
  {"adaptive": AdaptiveClipping, "slack": SlackClipping}, gradients.RULES
)
