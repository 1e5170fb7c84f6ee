"""All clipping rules by name: those of `gradients`, and the adapting ones of this package."""

from __future__ import annotations

from collections import ChainMap
from typing import Any

from dpjax.gradients import clip

# A run imports its own rule alone. A ChainMap also shows what is added to `clip.RULES` later.
CLIP_RULES = ChainMap[str, Any](
  {
    "adaptive": "dpjax.transforms.adaptive_clipping:AdaptiveClipping",
    "slack": "dpjax.transforms.slack_clipping:SlackClipping",
  },
  clip.RULES,
)
