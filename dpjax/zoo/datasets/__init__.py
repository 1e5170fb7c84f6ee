"""Named data sets and the formats that others publish federations in."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.zoo.datasets import prepared as prepared
  from dpjax.zoo.datasets import shakespeare as shakespeare
  from dpjax.zoo.datasets import shakespeare_lines as shakespeare_lines
  from dpjax.zoo.datasets.leaf import leaf_federation as leaf_federation
  from dpjax.zoo.datasets.natural import natural_federation as natural_federation
  from dpjax.zoo.datasets.pfl import pfl_federation as pfl_federation
  from dpjax.zoo.datasets.random_process import load_random_process as load_random_process
  from dpjax.zoo.datasets.registry import EMBEDDED as EMBEDDED
  from dpjax.zoo.datasets.registry import load as load
  from dpjax.zoo.datasets.registry import takes_declaration as takes_declaration
  from dpjax.zoo.datasets.shakespeare import (
    shakespeare_federation as shakespeare_federation,
  )
  from dpjax.zoo.datasets.tff import tff_federation as tff_federation
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
