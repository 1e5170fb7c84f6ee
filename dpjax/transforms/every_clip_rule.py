"""Every clipping rule by name: those of `gradients`, and those that release more than a sum."""

from __future__ import annotations

from collections import ChainMap

from dpjax import gradients
from dpjax.transforms.adaptive_clipping import AdaptiveClipping
from dpjax.transforms.slack_clipping import SlackClipping

# Rows added to `gradients.RULES` later appear here, too.
CLIP_RULES = ChainMap[str, type[gradients.ClipRule]](
  {"adaptive": AdaptiveClipping, "slack": SlackClipping}, gradients.RULES
)
