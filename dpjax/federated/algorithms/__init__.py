"""Federated algorithms. A line below adds one; the module `round` has their common loop."""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.federated.algorithms.apfl import apfl as apfl
  from dpjax.federated.algorithms.fed_avg import fed_avg as fed_avg
  from dpjax.federated.algorithms.fed_bn import fed_bn as fed_bn
  from dpjax.federated.algorithms.fed_nova import fed_nova as fed_nova
  from dpjax.federated.algorithms.fed_prox import fed_prox as fed_prox
  from dpjax.federated.algorithms.fed_sgd import fed_sgd as fed_sgd
  from dpjax.federated.algorithms.fine_tune import fine_tune as fine_tune
  from dpjax.federated.algorithms.hyp_cluster import hyp_cluster as hyp_cluster
  from dpjax.federated.algorithms.mime_lite import mime_lite as mime_lite
  from dpjax.federated.algorithms.mr_mtl import mr_mtl as mr_mtl
  from dpjax.federated.algorithms.scaffold import scaffold as scaffold
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
