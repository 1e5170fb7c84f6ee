"""A private run of twelve steps on 400 digits, short enough to be repeated."""

from configs import quickstart
from dpjax.experiments.config import fields

SMALL = {
  "grad_method": "vmap",
  "num_steps": 12,
  "eval_every": 4,
  "checkpoint_every": 3,
  "model.name": "linear",
  "model.options": {},
  "data.limit": 400,
}


def config(**overrides):
  return fields.replace_all(fields.replace_all(quickstart.get_config(), SMALL), overrides)
