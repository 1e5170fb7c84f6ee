"""Vertical learning: parties hold different columns of the same entities.

Here are alignment, split networks, two-party regression, encrypted vectors and transfer learning.
`disclosure` counts what two-party regression reveals.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.secure.vertical.network import split_learning as split_learning
  from dpjax.secure.vertical.network import two_party_logistic as two_party_logistic
  from dpjax.secure.vertical.network import two_party_scores as two_party_scores
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
