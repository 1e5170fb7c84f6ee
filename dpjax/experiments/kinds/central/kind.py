"""The kind of run of `launch.train`: one model, its data in one place."""

from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.central.features import featured
from dpjax.experiments.run.kind import RunKind

CENTRAL = RunKind(
  config=TrainConfig,
  launcher="launch.train",
  check=build.check,
  load_data=build.load_data,
  build=build.build,
  featured=featured,
)
