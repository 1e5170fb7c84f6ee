"""The clipping rules that a config, or a `Clip`, may name: one row each.

`transforms` adds those that need noise of their own: adaptive clipping, and bounds by layer.
"""

from __future__ import annotations

from dpjax.gradients.clip import RULES, Automatic, Flat

RULES |= {
  "flat": Flat,
  "automatic": Automatic,
}
