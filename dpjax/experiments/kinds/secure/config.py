"""One secure computation, from a `SecureConfig`. A table of computations is a sweep of them.

`task` says what is computed, and holds all that this computation reads: `task.protocol` adds the
vectors of a sum, and `task.train` is a config of `launch.train`, for the model that answers about
encrypted images.

All parties of a protocol run in this process and exchange bytes. So a run measures costs, but hides
nothing from whoever starts it. The result has an epsilon only if the model of `train` is private,
or if a model is opened with noise (`noisy_model`, `columns`).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from dpjax.accounting import Ledger
from dpjax.experiments.config import common
from dpjax.experiments.config.choices import Choice, name_of
from dpjax.experiments.config.fields import WithChoices
from dpjax.experiments.config.sections import DataConfig
from dpjax.experiments.kinds.secure.task import Computed
from dpjax.experiments.run.experiment import Experiment, Outcome, Story
from dpjax.experiments.run.guarantee import NONE
from dpjax.experiments.run.run_keys import RunKeys

_HERE = "dpjax.experiments.kinds.secure"
# Each computation's name, and the class that carries it out; its module is imported when it is
# chosen.
TASKS = {
  "sum": f"{_HERE}.vector_sums:SumTask",
  "regress": f"{_HERE}.encrypted_table:RegressTask",
  "infer": f"{_HERE}.encrypted_images:InferTask",
  "train": f"{_HERE}.two_parties:TrainTask",
  "noisy_model": f"{_HERE}.noisy_model:NoisyModelTask",
  "columns": f"{_HERE}.aligned_columns:ColumnsTask",
  "transfer": f"{_HERE}.shared_people:TransferTask",
}
_REPORTED = ("sizes", "seconds", "error", "error_is", "found", "hides", "num_steps")


@dataclasses.dataclass
class SecureConfig(WithChoices):
  """Configuration of a secure computation."""

  task: Annotated[Any, Choice(TASKS), "what is computed"] = "sum"
  seed: common.Seed = 0
  noise_seed: common.NoiseSeed = None

  @property
  def is_private(self) -> bool:
    """Whether the run draws noise from its keys; `OutputNoise` draws from the operating system."""
    return self.task.is_private

  @property
  def data(self) -> DataConfig:
    """Returns a `data` section that names the data of the computation; "drawn" for a sum."""
    return self.task.data


class SecureComputation(Experiment[SecureConfig]):
  """One computation."""

  def check(self) -> None:
    config = self.config
    common.check_types(config)
    config.task.check()
    needed = "a private model (--config.task.train.privacy)"
    common.read_if(config, config.is_private, needed, "noise_seed")

  def data(self) -> Any:
    return self.config.task.load()

  def digest(self, data: Any) -> bytes:
    return self.config.task.digest(data)

  @property
  def is_private(self) -> bool:
    # A task that opens weights with noise draws this noise itself. Secret keys also give its ledger
    # a name of its own, by which `launch.account` tells two runs of one seed apart.
    return self.config.is_private or hasattr(self.config.task, "epsilon")

  def train(self, data: Any, keys: RunKeys) -> Story:
    config = self.config
    computed: Computed = yield from config.task.execute(data, keys, config.seed)
    nothing = NONE.facts(Ledger(), 0.0)
    result = {
      # Tasks that score a model replace this value by an entry of `computed.more`.
      "test_accuracy": None,
      **(nothing if computed.facts is None else computed.facts),
      "task": name_of(config, "task"),
      "dataset": config.data.name,
      "method": computed.protocol,
      "bytes": computed.num_bytes,
      **{name: getattr(computed, name) for name in _REPORTED},
      **computed.more,
    }
    return Outcome(computed.params, lambda folder: result, saved_as="secure.npz")
