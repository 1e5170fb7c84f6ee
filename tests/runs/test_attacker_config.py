"""Runs whose noise is calibrated to what an attacker may do."""

import pytest

from dpjax import accounting
from dpjax.experiments.config.common import AttackerConfig
from dpjax.experiments.kinds.central import privacy as central
from dpjax.experiments.kinds.central.config import DpSgd, TrainConfig
from dpjax.experiments.kinds.federated import privacy as federated
from dpjax.experiments.kinds.federated.config import Central, FedConfig, Local
from dpjax.experiments.run import guarantee
from tests.refuses import refuses

_BOUND = accounting.TruePositiveRate(tpr=0.1, fpr=0.01)
_ATTACKER = AttackerConfig(tpr=0.1, fpr=0.01)


def _keeps(bound, plan):
  cost = bound.cost(plan.privacy_profile(), plan.delta)
  return bound.limit * 0.999 <= cost <= bound.limit


@pytest.mark.slow
def test_a_central_run_keeps_the_rates_that_its_config_asks_for():
  privacy = DpSgd(epsilon=None, attacker=_ATTACKER, sampling_prob=1.0)
  config = TrainConfig(num_steps=4, privacy=privacy)
  central.check(config)
  plan = central.make_plan(config, 1000)
  assert _keeps(_BOUND, plan)
  statement = guarantee.describe_attack_bound(_BOUND, plan.delta)
  assert "a true positive rate above 0.1 at a false positive rate of 0.01" in " ".join(
    statement.split()
  )


@pytest.mark.parametrize("method", [Central, Local])
def test_a_federated_run_keeps_the_mu_that_its_config_asks_for(method):
  privacy = method(epsilon=None, delta=1e-4, attacker=AttackerConfig(mu=1.0))
  config = FedConfig(num_rounds=3, clients_per_round=50, privacy=privacy)
  federated.check(config)
  if method is Central:
    plan, _ = federated.make_plan(config, 50)
    assert _keeps(accounting.GaussianDp(1.0), plan)
    return
  noise = federated.local_noise(config)
  stated = federated.local_promise(config, 50)
  facts = stated.facts(guarantee.Ledger(), stated.curve(3))
  # Messages are exchanged, by 2 clip norms, in each of three rounds.
  assert noise == pytest.approx(2 * 3**0.5, rel=2e-3) and facts["mu"] <= 1


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"attacker": _ATTACKER}, "privacy.epsilon"),
    (
      {"epsilon": None, "noise_multiplier": 1.0, "attacker": _ATTACKER},
      "privacy.noise_multiplier",
    ),
    (
      {"epsilon": None, "attacker": AttackerConfig(tpr=0.1)},
      "privacy.attacker.fpr",
    ),
    (
      {"epsilon": None, "attacker": AttackerConfig(mu=1.0, advantage=0.1)},
      "privacy.attacker.advantage",
    ),
    (
      {"epsilon": None, "attacker": AttackerConfig(tpr=0.1, fpr=0.2)},
      "privacy.attacker.tpr",
    ),
  ],
)
def test_exactly_one_guarantee_is_taken(changes, field):
  config = TrainConfig(privacy=DpSgd(**changes))
  with refuses(field):
    central.check(config)
