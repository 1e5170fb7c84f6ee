"""Vertical learning: parties hold different columns of the same entities.

Here are alignment, split networks, two-party regression, encrypted vectors, transfer learning, and
regression from sums of statistics. `disclosure` counts what two-party regression reveals.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.secure.vertical import alignment as alignment
  from dpjax.secure.vertical import disclosure as disclosure
  from dpjax.secure.vertical import encrypted_vectors as encrypted_vectors
  from dpjax.secure.vertical import linear_regression as linear_regression
  from dpjax.secure.vertical import transfer as transfer
  from dpjax.secure.vertical.network import SplitInfo as SplitInfo
  from dpjax.secure.vertical.network import SplitParams as SplitParams
  from dpjax.secure.vertical.network import SplitState as SplitState
  from dpjax.secure.vertical.network import Traffic as Traffic
  from dpjax.secure.vertical.network import TwoPartyState as TwoPartyState
  from dpjax.secure.vertical.network import masked_sums as masked_sums
  from dpjax.secure.vertical.network import party_forward as party_forward
  from dpjax.secure.vertical.network import residuals as residuals
  from dpjax.secure.vertical.network import split_gradient as split_gradient
  from dpjax.secure.vertical.network import split_learning as split_learning
  from dpjax.secure.vertical.network import two_party_logistic as two_party_logistic
  from dpjax.secure.vertical.network import two_party_scores as two_party_scores
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
