"""The words of twenty errors, whole. Other tests ask for an error's field and value (`refuses`)."""

import jax
import jax.numpy as jnp
import pytest

from dpjax import (
  accounting,
  federated,
  gradients,
  losses,
  mechanisms,
  names,
  transforms,
  validate,
)
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.validate import UserError
from tests.refuses import refuses

_GAUSSIAN = accounting.gaussian_event(1.0)


def _clip(bound, **mask):
  tx = transforms.clip_and_noise(
    l2_clip_norm=bound, noise_multiplier=1.0, normalize_by=1, key=jax.random.key(0)
  )
  return tx.update(gradients.wrap_grads(jnp.ones((2, 1))), tx.init(jnp.zeros(1)), **mask)


_LINES = [
  (lambda: accounting.epsilon(_GAUSSIAN, delta=2.0), "delta=2.0: must be in (0, 1)"),
  (
    lambda: accounting.epsilon(_GAUSSIAN, delta=1e-5, neighboring_relation="replace"),
    "neighboring_relation='replace': must be one of add_or_remove_one, replace_one, "
    "replace_special (did you mean 'replace_one'?)",
  ),
  (
    lambda: accounting.calibrate_noise_multiplier(
      accounting.gaussian_event, epsilon=0.0, delta=1e-5
    ),
    "epsilon=0.0: must be a finite number > 0",
  ),
  (lambda: _clip(float("nan")), "l2_clip_norm=nan: must be a number > 0"),
  (
    lambda: _clip(1.0, mask=jnp.ones(3, bool)),
    "mask.shape=(3,): must be (2,), the batch size",
  ),
  (
    lambda: mechanisms.Laplace(1.0, 0.0),
    "l1_sensitivity=0.0: must be a finite number > 0",
  ),
  (lambda: federated.krum(num_byzantine=-1), "num_byzantine=-1: must be an integer >= 0"),
  (
    lambda: losses.next_token(None, reduction="batch"),
    "reduction='batch': must be one of mean, sum",
  ),
  (
    lambda: names.one_of(("mlp", "cnn"), **{"model.name": "mpl"}),
    "model.name='mpl': must be one of mlp, cnn, package.module:name (did you mean 'mlp'?)",
  ),
  (
    lambda: names.one_of(("mlp",), **{"model.name": "no_such:Net"}),
    "model.name='no_such:Net': there is no module 'no_such'",
  ),
  (
    lambda: fields.override(TrainConfig(), "privacy.epsilom", "1"),
    "config.privacy.epsilom: 'dp_sgd' has no such field (did you mean 'epsilon'?)",
  ),
  (
    lambda: fields.override(TrainConfig(), "privacy.epsilon", "much"),
    "config.privacy.epsilon='much': must be a number or none",
  ),
  (
    lambda: fields.override(FedConfig(), "compression", "quantise"),
    "config.compression='quantise': must be one of none, quantize, top_k, rotated, drive "
    "(did you mean 'quantize'?)",
  ),
  (
    lambda: validate.integer_at_least(1, num_steps=0),
    "num_steps=0: must be an integer >= 1",
  ),
  (lambda: validate.number_in(0, 1, share=2), "share=2: must be in [0, 1]"),
  (lambda: validate.open_unit(delta=1), "delta=1: must be in (0, 1)"),
  (
    lambda: validate.positive(rate=float("inf")),
    "rate=inf: must be a finite number > 0",
  ),
  (
    lambda: validate.non_negative(rate=-1),
    "rate=-1: must be a finite number >= 0",
  ),
  (
    lambda: _raise(UserError("must be text", field="x", value=[1], hint="try x[0]")),
    "x=[1]: must be text; try x[0]",
  ),
  (
    lambda: _raise(UserError("must be > 0", field="n", value=0).within("data").at("run 3")),
    "data.n=0: must be > 0 (run 3)",
  ),
]


def _raise(error):
  raise error


@pytest.mark.parametrize(("call", "line"), _LINES, ids=[line for _, line in _LINES])
def test_a_refusal_is_this_line(call, line):
  with pytest.raises(UserError) as caught:
    call()
  assert str(caught.value) == line


def test_another_field_another_value_and_no_error_are_seen():
  wrong = UserError("must be > 0", field="n", value=0)
  for asked in ({"field": "m"}, {"field": "n", "value": 1}):
    with pytest.raises(AssertionError, match="n=0"), refuses(**asked):
      raise wrong
  with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), refuses("n"):
    pass
  with refuses("n", value=0) as caught:
    raise wrong
  assert caught.value is wrong
