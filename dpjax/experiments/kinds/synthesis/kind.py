"""The kind of run of `launch.synthesize`: one release, a generator, and its samples."""

from dpjax.experiments.kinds.synthesis.config import SynthesisConfig, check
from dpjax.experiments.run.kind import Kind

SYNTHESIS = Kind(config=SynthesisConfig, launcher="launch.synthesize", check=check)
