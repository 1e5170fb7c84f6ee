"""Choices: a config holds what its run reads, also of a user's own code, and comes back whole."""

import copy
import json
import pickle
from typing import Any

import pytest

from dpjax.experiments.config import choices, common, fields
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central.config import (
  DpFtrl,
  DpSgd,
  ModelConfig,
  Sgd,
  TrainConfig,
)
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.kinds.pate.config import PateConfig
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.run import writers
from tests.refuses import refuses

_OWN = "tests.schema.test_choices:own_sampler"


def own_sampler(num_examples, sampling_prob):
  raise NotImplementedError


def _again(config):
  """The config that its config.json says."""
  held = json.loads(json.dumps(writers.plain(choices.to_dict(config))))
  return fields.from_dict(type(config), held)


@pytest.mark.parametrize(
  ("kind", "changes"),
  [
    (TrainConfig, {"privacy": "dp_ftrl", "privacy.sampler": "min_sep"}),
    (TrainConfig, {"privacy.sampler": _OWN, "privacy.sampler.capacity": 9}),
    (TrainConfig, {"privacy": "least_squares", "privacy.attacker.mu": 0.5}),
    (TrainConfig, {"audit": "canaries", "audit.num_canaries": 7}),
    (FedConfig, {"privacy": "both", "privacy.local_noise_multiplier": 2.0}),
    (AttackConfig, {"target": "federate", "target.privacy": "none", "attack": "dlg"}),
    (SecureConfig, {"task": "infer", "task.train.privacy": "sgd"}),
    (PateConfig, {"cost": "published", "cost.order": 5.0}),
  ],
)
def test_a_config_comes_back_from_its_json_and_from_another_process(kind, changes):
  config = fields.replace_all(kind(), changes)
  assert config != kind() and _again(config) == config
  assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
  for path, value in changes.items():
    leaves = {leaf.path: leaf.value for leaf in choices.leaves(config)}
    assert leaves[path] == value


def test_a_copy_of_a_wrong_config_is_as_wrong():
  config: Any = TrainConfig()
  config.privacy = "nope"
  for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
    assert copied.privacy == "nope" and copied.data is not config.data


def test_a_sampler_of_ones_own_has_its_path_as_its_name():
  config = fields.replace_all(
    TrainConfig(), {"privacy.sampler": _OWN, "privacy.sampler.capacity": 9}
  )
  chosen = config.privacy.sampler
  assert (chosen.name, chosen.number("capacity"), chosen.scheme) == (_OWN, 9, None)
  assert choices.to_dict(config)["privacy"]["sampler"] == {"name": _OWN, "capacity": 9}
  assert [leaf.path for leaf in choices.leaves(config) if ".sampler" in leaf.path] == [
    "privacy.sampler",
    "privacy.sampler.capacity",
  ]
  with refuses("config.privacy.sampler", value="tests.schema.test_choices:nobody"):
    fields.replace(config, "privacy.sampler", "tests.schema.test_choices:nobody")
  with refuses("config.privacy.sampler.num_selected"):
    fields.replace(config, "privacy.sampler.num_selected", 2)


def test_another_method_keeps_what_it_reads_and_nothing_else():
  set_here = DpSgd(epsilon=None, noise_multiplier=2.0, l2_clip_norm=0.1, sampling_prob=0.2)
  config = TrainConfig(privacy=set_here, noise_seed=3)
  ftrl = fields.replace(config, "privacy", "dp_ftrl")
  assert ftrl.privacy == DpFtrl(
    epsilon=None, noise_multiplier=2.0, l2_clip_norm=0.1, sampling_prob=0.2
  )
  assert ftrl.noise_seed == 3
  plain = fields.replace(config, "privacy", "sgd")
  assert plain == TrainConfig(privacy=Sgd(sampling_prob=0.2))
  # What is named beside the choice stays, so that the run is refused.
  both = fields.replace_all(config, {"privacy": "sgd", "noise_seed": 4})
  assert both.noise_seed == 4
  assert fields.override_all(config, {"noise_seed": "4", "privacy": "sgd"}) == both


@pytest.mark.parametrize(
  ("path", "owner"),
  [
    ("privacy.strategy", "dp_ftrl"),
    ("privacy.ridge", "least_squares"),
    ("privacy.sampler.num_selected", "k_out_of_t"),
    ("privacy.clip_schedule.final", "linear, cosine, exponential"),
    ("audit.num_canaries", "canaries"),
  ],
)
def test_a_field_of_another_choice_says_which(path, owner):
  with refuses(f"config.{path}") as caught:
    fields.override(TrainConfig(), path, "1")
  assert str(caught.value).endswith(f"has no such field; it belongs to {owner}")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_option_that_a_config_json_cannot_hold_is_refused(value):
  config = TrainConfig(model=ModelConfig("mlp", {"features": (8,), "scale": [value]}))
  with refuses("model.options.scale[0]"):
    common.check_types(config)


@pytest.mark.parametrize(
  ("path", "text"), [("model", "{3: 4}"), ("privacy", "{'name': 'dp_sgd', 3: 4}")]
)
def test_a_key_of_a_section_that_is_no_text_is_no_field(path, text):
  with refuses(f"config.{path}.3"):
    fields.override(TrainConfig(), path, text)
