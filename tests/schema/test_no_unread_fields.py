"""A config holds no field that no run of its kind reads: such a field is an unknown one."""

import pytest

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.validate import UserError


@pytest.mark.parametrize(
  ("config", "path", "value"),
  [
    # A client's state is new in every round, so its rate has no schedule over the rounds.
    (FedConfig, "client_optimizer.schedule", "cosine"),
    (FedConfig, "data.num_examples", 100),
    (TrainConfig, "data.num_users", 100),
    (RelevanceConfig, "data.num_users", 100),
    (RelevanceConfig, "data.max_length", 8),
    (RelevanceConfig, "data.center", True),
    (RelevanceConfig, "model.mirrored", True),
    (RelevanceConfig, "model.colours", "opponent"),
  ],
)
def test_a_field_that_no_run_reads_is_unknown(config, path, value):
  with pytest.raises(UserError) as error:
    fields.replace_all(config(), {path: value})
  assert path in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("config", "path", "value"),
  [
    (FedConfig, "server_optimizer.schedule", "cosine"),
    (FedConfig, "data.num_users", 100),
    (FedConfig, "data.center", True),
    (TrainConfig, "optimizer.schedule", "cosine"),
    (TrainConfig, "data.num_examples", 100),
    (TrainConfig, "model.mirrored", True),
    (RelevanceConfig, "data.num_examples", 100),
  ],
)
def test_a_field_that_a_run_reads_stays(config, path, value):
  changed = fields.replace_all(config(), {path: value})
  section, name = path.split(".")
  assert getattr(getattr(changed, section), name) == value
