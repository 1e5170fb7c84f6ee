"""Table of the clipping rules that a config, or a `Clip`, may name.

`transforms.every_clip_rule.CLIP_RULES` adds the rules whose clip norm follows a noisy query.
"""

from __future__ import annotations

from dpjax.gradients.clip import RULES, Automatic, Flat

RULES |= {
  "flat": Flat,
  "automatic": Automatic,
}
