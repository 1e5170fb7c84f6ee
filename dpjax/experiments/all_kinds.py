"""Every kind of run in one table; a launcher imports only its own kind."""

from dpjax.experiments.kinds.central.kind import CENTRAL
from dpjax.experiments.kinds.distillation.kind import DISTILLATION
from dpjax.experiments.kinds.federated.kind import FEDERATED
from dpjax.experiments.kinds.pate.kind import PATE
from dpjax.experiments.kinds.synthesis.kind import SYNTHESIS
from dpjax.experiments.run.kind import Kind
from dpjax.experiments.sweeps.attack_table import ATTACK
from dpjax.experiments.sweeps.experiment import RELEVANCE
from dpjax.experiments.sweeps.grid import SWEEP
from dpjax.experiments.sweeps.secure_table import SECURE

KINDS: dict[type, Kind] = {
  kind.config: kind
  for kind in (
    *(CENTRAL, FEDERATED, PATE, DISTILLATION, SYNTHESIS),
    *(RELEVANCE, ATTACK, SECURE, SWEEP),
  )
}


def of(config: object) -> Kind:
  """Returns the kind of run that a config describes.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> of(TrainConfig()).launcher
  'launch.train'
  """
  return KINDS[type(config)]
