"""Relevance: layer-wise relevance propagation, and noise that follows it.

The adaptive-Laplace methods (RADP, AdLM, ILM) run as published. Each of their epsilons is a claim,
with a list of the assumptions that fail. RADP also has a rigorous mode with a proof (`rigorous`).
`pipeline.run` runs any method. `lrp.relevance` explains any net of the layers that `lrp` lists.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.relevance import feature_budget as feature_budget
  from dpjax.relevance import lrp as lrp
  from dpjax.relevance import record_noise as record_noise
  from dpjax.relevance import rigorous as rigorous
  from dpjax.relevance.feature_budget import PRESETS as PRESETS
  from dpjax.relevance.feature_budget import Reading as Reading
  from dpjax.relevance.feature_shares import mean_shares as mean_shares
  from dpjax.relevance.feature_shares import shares as shares
  from dpjax.relevance.inputs import Inputs as Inputs
  from dpjax.relevance.inputs import Keys as Keys
  from dpjax.relevance.inputs import Nets as Nets
  from dpjax.relevance.inputs import Outcome as Outcome
  from dpjax.relevance.inputs import RecordNoise as RecordNoise
  from dpjax.relevance.lrp import Lrp as Lrp
  from dpjax.relevance.lrp import Relevance as Relevance
  from dpjax.relevance.lrp import conservation_gap as conservation_gap
  from dpjax.relevance.lrp import heat_map as heat_map
  from dpjax.relevance.pipeline import NAMES as NAMES
  from dpjax.relevance.pipeline import reads as reads
  from dpjax.relevance.pipeline import run as run
  from dpjax.relevance.pipeline import story as story
  from dpjax.relevance.privacy import Privacy as Privacy
  from dpjax.relevance.rigorous import StageCharge as StageCharge
  from dpjax.relevance.rigorous import total as total
  from dpjax.relevance.rigorous_method import check_public as check_public
  from dpjax.relevance.settings import AdLM as AdLM
  from dpjax.relevance.settings import Paper as Paper
  from dpjax.relevance.settings import Private as Private
  from dpjax.relevance.settings import Rigorous as Rigorous
  from dpjax.relevance.settings import Training as Training
  from dpjax.relevance.train import OnEpoch as OnEpoch
  from dpjax.relevance.train import Steps as Steps
  from dpjax.relevance.train import carried_out as carried_out
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
