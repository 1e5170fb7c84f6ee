"""A finished run as a service: the predictor, its drift, its release by stages, and HTTP.

`Predictor` needs dpjax alone. `http` needs `pip install -e '.[serve]'` (Starlette, uvicorn and
prometheus-client), and no other module of dpjax imports `http`.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.serving.predictor import Predictor as Predictor
  from dpjax.serving.rollout import Rollout as Rollout
  from dpjax.serving.rollout import StageRule as StageRule
  from dpjax.serving.service import Service as Service
  from dpjax.serving.service_settings import ServiceSettings as ServiceSettings
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
