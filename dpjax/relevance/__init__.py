"""Relevance: layer-wise relevance propagation, and noise that follows it.

The adaptive-Laplace methods (RADP, AdLM, ILM) run as published. Each of their epsilons is a claim,
with a list of the assumptions that fail. `radp_rigorous` is RADP with a proof (`rigorous`).
`pipeline.run` runs any method. `lrp.relevance` explains any net of the layers that `lrp` lists.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.relevance import feature_budget as feature_budget
  from dpjax.relevance import lrp as lrp
  from dpjax.relevance import rigorous as rigorous
  from dpjax.relevance.inputs import Inputs as Inputs
  from dpjax.relevance.inputs import Keys as Keys
  from dpjax.relevance.inputs import Nets as Nets
  from dpjax.relevance.lrp import Lrp as Lrp
  from dpjax.relevance.lrp import heat_map as heat_map
  from dpjax.relevance.pipeline import run as run
  from dpjax.relevance.settings import AdLM as AdLM
  from dpjax.relevance.settings import Paper as Paper
  from dpjax.relevance.settings import Private as Private
  from dpjax.relevance.settings import Rigorous as Rigorous
  from dpjax.relevance.settings import Training as Training
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
