"""Privacy noise: its distributions, its random keys, and the state that counts its draws."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.noise import correlated as correlated
  from dpjax.noise import discrete as discrete
  from dpjax.noise import distributions as distributions
  from dpjax.noise import source as source
  from dpjax.noise.gaussian import add_gaussian as add_gaussian
  from dpjax.noise.gaussian import gaussian as gaussian
  from dpjax.noise.gaussian import init as init
  from dpjax.noise.gaussian import key_id as key_id
  from dpjax.noise.shape import WHITE as WHITE
  from dpjax.noise.shape import NoiseShape as NoiseShape
  from dpjax.noise.source import new_key as new_key
  from dpjax.noise.state import NoiseState as NoiseState
  from dpjax.noise.state import state_at as state_at
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
