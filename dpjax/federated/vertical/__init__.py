"""Parties that hold different columns of the same people: alignment, split networks, two-party
regression, encrypted vectors, transfer; and regression from sums. It needs nothing of the
rest of `federated`."""

from dpjax.federated.vertical import alignment as alignment
from dpjax.federated.vertical import disclosure as disclosure
from dpjax.federated.vertical import encrypted_vectors as encrypted_vectors
from dpjax.federated.vertical import linear_regression as linear_regression
from dpjax.federated.vertical import transfer as transfer
from dpjax.federated.vertical.network import SplitInfo as SplitInfo
from dpjax.federated.vertical.network import SplitParams as SplitParams
from dpjax.federated.vertical.network import SplitState as SplitState
from dpjax.federated.vertical.network import Traffic as Traffic
from dpjax.federated.vertical.network import TwoPartyState as TwoPartyState
from dpjax.federated.vertical.network import masked_sums as masked_sums
from dpjax.federated.vertical.network import party_forward as party_forward
from dpjax.federated.vertical.network import residuals as residuals
from dpjax.federated.vertical.network import split_gradient as split_gradient
from dpjax.federated.vertical.network import split_learning as split_learning
from dpjax.federated.vertical.network import two_party_logistic as two_party_logistic
from dpjax.federated.vertical.network import two_party_scores as two_party_scores
