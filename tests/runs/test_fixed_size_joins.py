"""Batches of a fixed size under add/remove, attacked through the launchers' runs.

The oracle is dp_accounting's own PLD of a Poisson sample at twice the sensitivity, of the declared
number of records: whatever accumulates, is audited, grows or goes on, epsilon may not be less.
"""

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from configs.fed import quickstart as fed_quickstart
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.federated import privacy as fed_privacy
from dpjax.experiments.run import loop
from dpjax.validate import UserError
from tests.refuses import refuses
from tests.runs import small_configs, stops

_ADD = "add_or_remove_one"
_FIXED = {
  "privacy.sampler": "fixed_size", "privacy.neighboring_relation": _ADD,
  "privacy.epsilon": None, "privacy.noise_multiplier": 4.0,
}  # fmt: skip


def _config(**overrides):
  few = {"num_steps": 6, "eval_every": 6, "checkpoint_every": 2, "data.limit": 100}
  few |= {"privacy.sampling_prob": 0.2, **_FIXED}
  return fields.replace_all(small_configs.short(**few), overrides)


def _accounted(noise, share, steps, delta):
  """Epsilon by another library: the sum moves by two clip norms where a record joins."""
  event = dpa.PoissonSampledDpEvent(share, dpa.GaussianDpEvent(noise / 2))
  accountant = PLDAccountant(dpa.NeighboringRelation.ADD_OR_REMOVE_ONE)
  return accountant.compose(event, steps).get_epsilon(delta)


@pytest.mark.cases(
  quick=["overrides3-0.2857142857142857"], slow=["overrides1-0.2"], long=...
)
@pytest.mark.parametrize(
  ("overrides", "share"),
  [
    ({}, 20 / 100),
    # A step of three physical batches, the last of which is cut, is one draw.
    ({"slices": 3}, 20 / 100),
    ({"privacy.sampling_prob": 0.99}, 99 / 100),
    # The coins of an audit may leave 30 canaries out: the batch is drawn of what is left.
    ({"audit": "canaries", "audit.num_canaries": 30}, 20 / 70),
  ],
)
def test_epsilon_is_that_of_two_clip_norms_and_the_least_number(overrides, share):
  plan = build.assemble(_config(**overrides)).plan
  expected = _accounted(4.0, share, 6, plan.delta)
  assert plan.epsilon() == pytest.approx(expected, rel=2e-3)
  assert str(plan.neighboring_relation) == _ADD
  # Poisson batches of the same noise would cost less; that would be wrong here.
  assert plan.epsilon() > 1.3 * _accounted(8.0, share, 6, plan.delta)


def test_a_batch_of_all_records_is_refused_in_one_line():
  with refuses("batch_size") as caught:
    build.assemble(_config(**{"privacy.sampling_prob": 1.0}))
  assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_cohort_of_all_clients_is_refused_and_one_less_is_accounted():
  config = fields.replace_all(
    fed_quickstart.get_config(),
    {**_FIXED, "privacy.delta": 1e-3, "num_rounds": 3, "partition.num_clients": 20},
  )
  with refuses("batch_size") as caught:
    fed_privacy.make_plan(fields.replace(config, "clients_per_round", 20.0), 20)
  assert "\n" not in str(caught.value)
  plan, _ = fed_privacy.make_plan(fields.replace(config, "clients_per_round", 19.0), 20)
  expected = _accounted(4.0, 19 / 20, 3, 1e-3)
  assert plan.epsilon() == pytest.approx(expected, rel=2e-3)


def _arrays(folder, count):
  rng = np.random.default_rng(0)
  x = rng.random((121, 4)).astype(np.float32)
  y = (np.arange(121) % 2).astype(np.int32)
  np.savez(
    folder / "own.npz", x_train=x[:count], y_train=y[:count], num_classes=2,
    x_test=x[100:], y_test=y[100:], num_examples=100,
  )  # fmt: skip


@pytest.mark.long
def test_a_record_that_joins_between_kill_and_resume_is_no_other_epsilon(
  tmp_path, monkeypatch
):
  config = _config(**{"data.name": str(tmp_path / "own.npz"), "data.limit": None})
  _arrays(tmp_path, 99)
  stops.stop_after(monkeypatch, 3)
  with pytest.raises(loop.Interrupted):
    loop.train(config, tmp_path / "run")
  _arrays(tmp_path, 100)
  with refuses("data.name") as caught:
    loop.train(config, tmp_path / "run")
  assert "\n" not in str(caught.value)
  # Nor does another relation take the checkpoint for its own.
  _arrays(tmp_path, 99)
  replaced = fields.replace(config, "privacy.neighboring_relation", "replace_one")
  with pytest.raises(UserError):
    loop.train(replaced, tmp_path / "run")
  result = loop.train(config, tmp_path / "run")
  assert result["epsilon"] == pytest.approx(
    _accounted(4.0, 0.2, 6, result["delta"]), rel=2e-3
  )


def test_data_that_lack_two_records_are_refused_without_their_number(tmp_path):
  _arrays(tmp_path, 98)
  config = _config(**{"data.name": str(tmp_path / "own.npz"), "data.limit": None})
  with refuses("num_examples") as caught:
    loop.train(config, tmp_path / "run")
  assert "98" not in str(caught.value)
