"""Typed fields: the annotation decides, from Python and from the command line alike."""

from __future__ import annotations

import math

import pytest

from dpjax.runs import fields
from dpjax.runs.central.config import TrainConfig
from dpjax.sweeps.grid import SweepConfig
from dpjax.validate import UserError


@pytest.mark.parametrize(
  "path, text, value",
  [
    ("privacy.epsilon", "4", 4.0),
    ("privacy.epsilon", "none", None),
    ("privacy.epsilon", "inf", math.inf),
    ("privacy.delta", "1e-6", 1e-6),
    ("num_steps", "12", 12),
    ("microbatch_size", "None", None),
    ("data.center", "true", True),
    ("data.data_dir", "none", None),
    ("data.name", "12", "12"),
    ("model.options.width", "64", 64),
    ("model.options.features", "(64, 32)", (64, 32)),
    ("model.options.activation", "tanh", "tanh"),
  ],
)
def test_override_reads_text_by_annotation(path, text, value):
  config = TrainConfig()
  changed = fields.get(fields.override(config, path, text), path)
  assert changed == value and type(changed) is type(value)
  assert config == TrainConfig()


@pytest.mark.parametrize(
  "path, text, says",
  [
    ("privacy.epsilom", "1", "did you mean 'epsilon'"),
    ("privacy.epsilon", "two", "config.privacy.epsilon='two': must be a number or none"),
    ("privacy.epsilon", "nan", "must be a number"),
    ("privacy.delta", "none", "config.privacy.delta=None: must be a number"),
    ("num_steps", "2.5", "config.num_steps=2.5: must be an integer"),
    ("num_steps", "true", "must be an integer"),
    ("data.center", "1", "must be true or false"),
    ("privacy", "1", "PrivacyConfig (set its fields one by one)"),
    ("seed.x", "1", "config.seed.x: config.seed holds 0, which has no fields"),
    ("model.options", "[1]", "config.model.options=[1]: must be"),
  ],
)
def test_wrong_override_is_one_line_that_names_the_field(path, text, says):
  with pytest.raises(UserError) as error:
    fields.override(TrainConfig(), path, text)
  assert says in str(error.value) and "\n" not in str(error.value)


def test_containers_of_a_sweep():
  sweep = fields.override(SweepConfig(), "seeds", "[3, 4]")
  sweep = fields.override(sweep, "grid.privacy.epsilon", "[1, 2.5]")  # a dotted dict key
  sweep = fields.override(sweep, "references", "[('a', 1, 0.9)]")
  sweep = fields.override(sweep, "base.privacy.delta", "1e-7")
  assert sweep.seeds == [3, 4] and sweep.grid == {"privacy.epsilon": [1, 2.5]}
  assert sweep.references == [("a", 1.0, 0.9)] and sweep.base.privacy.delta == 1e-7
  for path, text in [("seeds", "[0, 'x']"), ("references", "[('a', 1)]"), ("grid", "3")]:
    with pytest.raises(UserError, match=path):
      fields.override(SweepConfig(), path, text)


def test_nested_dict_keys_descend():
  config = TrainConfig()
  config.model.options = {"head": {"width": 1}}
  changed = fields.override(config, "model.options.head.width", "2")
  assert changed.model.options == {"head": {"width": 2}}
  assert config.model.options == {"head": {"width": 1}}


def test_check_finds_an_ill_typed_field_anywhere():
  config = TrainConfig()
  config.privacy.sampling_prob = "0.1"  # type: ignore[assignment]
  with pytest.raises(UserError, match=r"base\.privacy\.sampling_prob='0\.1'"):
    fields.check(SweepConfig(base=config), SweepConfig, "sweep")
  assert fields.check(TrainConfig(), TrainConfig, "config") == TrainConfig()
