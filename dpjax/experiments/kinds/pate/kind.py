"""The kind of run of `launch.pate`: teachers on private parts, a student on public data."""

from dpjax.experiments.kinds.pate.config import PateConfig, check
from dpjax.experiments.run.kind import Kind

PATE = Kind(config=PateConfig, launcher="launch.pate", check=check)
