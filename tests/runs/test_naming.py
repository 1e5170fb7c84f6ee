"""Errors about the library's arguments become errors about the fields that give them."""

from __future__ import annotations

import pytest

from dpjax.experiments.config.naming import naming
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central.config import (
  CanaryAudit,
  DpSgd,
  ModelConfig,
  TrainConfig,
)
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.kinds.pate.config import PateConfig
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.kinds.relevance.methods import DpSgd as RelevanceSgd
from dpjax.validate import UserError
from tests.refuses import refuses

_TRAIN = TrainConfig(
  grad_method="ghost", memory_budget_gb=0.5, audit=CanaryAudit(method="one_run")
)
_FED = FedConfig(seed=1, partition={"name": "iid", "seed": 2})


@pytest.mark.parametrize(
  ("config", "field", "value", "named"),
  [
    # By name, and by the value where several fields have the name.
    (TrainConfig(privacy=DpSgd(delta=0.5)), "delta", 0.5, "privacy.delta"),
    (_FED, "seed", 2, "partition.seed"),
    (_FED, "seed", 1, "seed"),
    # The field has another name than the argument that it gives, or another unit.
    (_TRAIN, "method", "ghost", "grad_method"),
    (_TRAIN, "method", "one_run", "audit.method"),
    (_TRAIN, "memory_budget", 5e8, "memory_budget_gb"),
    (
      RelevanceConfig(method=RelevanceSgd(sgd_learning_rate=-1.0)),
      "private.learning_rate",
      -1.0,
      "method.sgd_learning_rate",
    ),
    # A config without sections.
    (PateConfig(epsilon_budget=0.1), "privacy.epsilon_budget", 0.1, "epsilon_budget"),
    # What is inside a section that holds a whole config.
    (AttackConfig(target=TrainConfig(slices=3)), "slices", 3, "target.slices"),
    # An option of a model, and an item of one.
    (
      TrainConfig(model=ModelConfig("scatter_linear", {"num_groups": 7})),
      "num_groups",
      7,
      "model.options.num_groups",
    ),
    (
      TrainConfig(model=ModelConfig("mlp", {"features": (4, 0)})),
      "features[1]",
      0,
      "model.options.features[1]",
    ),
    # These are left alone: fields, what is inside one, and what two fields could mean.
    (TrainConfig(), "privacy.delta", 2.0, "privacy.delta"),
    (TrainConfig(), "model.options.seed", 0, "model.options.seed"),
    (TrainConfig(), "privacy.noise_levels[1]", -1.0, "privacy.noise_levels[1]"),
    (TrainConfig(), "delta", 0.3, "delta"),
    (FedConfig(), "momentum", 0.0, "momentum"),
    (None, "delta", 0.3, "delta"),
  ],
)
def test_an_argument_gets_the_name_of_its_field(config, field, value, named):
  # The value is that of the field, where the argument has another unit.
  shown = 0.5 if field == "memory_budget" else value
  with refuses(named, value=shown), naming(config):
    raise UserError("must be another", field=field, value=value)
