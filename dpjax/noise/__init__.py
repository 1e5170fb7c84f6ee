"""Privacy noise: its distributions, its random keys, and the state that counts its draws."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.noise import correlated as correlated
  from dpjax.noise import discrete as discrete
  from dpjax.noise.gaussian import add_gaussian as add_gaussian
  from dpjax.noise.shape import NoiseShape as NoiseShape
  from dpjax.noise.source import new_key as new_key
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
