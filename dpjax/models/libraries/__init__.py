"""Models of a user's own, written with any library, in one form for the launchers.

`by_path` describes the form and lists the libraries. Each library has one file here.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.models.libraries.by_path import INPUT_SHAPE as INPUT_SHAPE
  from dpjax.models.libraries.by_path import Model as Model
  from dpjax.models.libraries.by_path import arguments as arguments
  from dpjax.models.libraries.by_path import build as build
  from dpjax.models.libraries.by_path import find as find
  from dpjax.models.libraries.by_path import is_model_class as is_model_class
  from dpjax.models.libraries.by_path import not_linen as not_linen
  from dpjax.models.libraries.user_models import check_collections as check_collections
  from dpjax.models.libraries.user_models import check_outputs as check_outputs
  from dpjax.models.libraries.user_models import draws as draws
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
