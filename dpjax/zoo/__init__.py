"""What others published, ready to use: data sets, networks with their weights, ways to train.

Nothing in the core imports a part of the zoo.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.zoo import datasets as datasets
  from dpjax.zoo import networks as networks
  from dpjax.zoo import recipes as recipes
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
