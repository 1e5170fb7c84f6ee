"""Named data sets and the formats that others publish federations in."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.zoo.datasets.leaf import leaf_federation as leaf_federation
  from dpjax.zoo.datasets.natural import natural_federation as natural_federation
  from dpjax.zoo.datasets.pfl import pfl_federation as pfl_federation
  from dpjax.zoo.datasets.shakespeare import (
    shakespeare_federation as shakespeare_federation,
  )
  from dpjax.zoo.datasets.tff import tff_federation as tff_federation
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
