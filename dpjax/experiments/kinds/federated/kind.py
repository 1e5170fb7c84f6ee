"""The kind of run of `launch.federate`: one model, its data with many clients."""

from dpjax.experiments.kinds.central.features import featured
from dpjax.experiments.kinds.federated import build
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run.kind import RunKind

FEDERATED = RunKind(
  config=FedConfig,
  launcher="launch.federate",
  check=build.check,
  load_data=build.load_data,
  build=build.build,
  featured=featured,
)
