"""What is refused because nothing would read it, in one line that says what it needs."""

import jax.numpy as jnp
import optax
import pytest

from configs.fed import quickstart as federated
from configs.radp import common, proved_mnist, test4_gaussian
from configs.sweeps import mnist_algorithms
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import PrivacyConfig, TrainConfig
from dpjax.experiments.kinds.federated import build as federate_build
from dpjax.experiments.kinds.federated import unused as fed_unused
from dpjax.experiments.kinds.federated.config import FedConfig, FedOptimizerConfig
from dpjax.experiments.kinds.relevance import build as relevance_build
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.sweeps import experiment, grid
from tests.refuses import refuses


def _with(config, **changes):
  dotted = {path.replace("__", "."): value for path, value in changes.items()}
  return fields.replace_all(config, dotted)


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    (
      {"optimizer__rule__momentum": 1.5},
      "optimizer.rule.momentum",
    ),
    ({"privacy__ftrl__strategy__bands": 3}, "privacy.ftrl.strategy.bands"),
    ({"audit__score": "gradient"}, "audit.score"),
    ({"data__data_dir": "here"}, "data.data_dir"),
    ({"data__max_length": 9}, "data.max_length"),
    ({"data__name": "tokens/", "data__max_length": 9}, "data.max_length"),
    ({"release": True, "diagnostics": False}, "diagnostics"),
    ({"privacy__method": "sgd", "privacy__epsilon": 3.0}, "privacy.epsilon"),
    (
      {"privacy__clip_schedule_final": 0.5, "audit__kind": "random"},
      "privacy.clip_schedule_final",
    ),
  ],
)
def test_a_central_run_names_all_that_it_would_ignore(changes, field):
  with refuses(field) as caught:
    build.check(_with(TrainConfig(), **changes))
  assert "\n" not in str(caught.value)


def test_a_folder_of_leaf_may_hold_text():
  found = [
    fed_unused.of_federation(_with(FedConfig(), partition=name, data__name="text/"))
    for name in ("leaf", "iid")
  ]
  assert ["data.max_length" in one for one in found] == [False, True]


def test_a_default_of_another_method_is_not_a_setting():
  build.check(_with(TrainConfig(), optimizer__rule="adam"))
  build.check(TrainConfig(privacy=PrivacyConfig(method="sgd", epsilon=None)))


def test_dp_adam_without_noise_is_adam_and_refused():
  with refuses("optimizer.rule"):
    build.check(_with(TrainConfig(), optimizer__rule="dp_adam", privacy__method="sgd"))


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"client_optimizer__schedule": "cosine"}, "client_optimizer.schedule"),
    (
      {"client_optimizer__rule__momentum": 1.5},
      "client_optimizer.rule.momentum",
    ),
    (
      {"algorithm": "fed_sgd", "client_optimizer__learning_rate": 0.7},
      "local.epochs",
    ),
    ({"algorithm": "fed_sgd", "local__epochs": 3}, "local.epochs"),
    (
      {"algorithm": "scaffold", "client_optimizer__rule": "adam"},
      "client_optimizer.rule",
    ),
    (
      {"algorithm": "fed_nova", "client_optimizer__rule": "yogi"},
      "client_optimizer.rule",
    ),
    (
      {"algorithm": "scaffold", "client_optimizer__rule__momentum": 0.5},
      "client_optimizer.rule.momentum",
    ),
    (
      {"algorithm": "scaffold", "weighting": "capped"},
      "weighting",
    ),
    ({"privacy__local_noise_multiplier": 2.0}, "privacy.local_noise_multiplier"),
    ({"privacy__method": "local", "privacy__accountant": "rdp"}, "privacy.accountant"),
  ],
)
def test_a_run_over_clients_names_what_it_would_ignore(changes, field):
  with refuses(field) as caught:
    federate_build.check(_with(federated.get_config(), **changes))
  assert "\n" not in str(caught.value)


def test_fed_nova_takes_momentum_for_which_its_step_counts_are_proved():
  changes = {"algorithm": "fed_nova", "client_optimizer__rule__momentum": 0.5}
  federate_build.check(_with(federated.get_config(), **changes))


def test_the_server_follows_its_schedule_over_the_rounds():
  how = FedOptimizerConfig(learning_rate=2.0, schedule="linear")
  tx = federate_build.server_optimizer(how, 4)
  params, state, moved = jnp.zeros(1), tx.init(jnp.zeros(1)), []
  for _ in range(5):
    updates, state = tx.update(jnp.ones(1), state, params)
    params = optax.apply_updates(params, updates)
    moved.append(-float(updates[0]))
  assert moved == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0])


# --- experiments and sweeps


def test_every_field_of_a_training_comes_from_the_experiment_by_name():
  config = RelevanceConfig(weight_decay=0.25, batch_size=7, num_epochs=3)
  made = relevance_build._training(config)
  assert (made.weight_decay, made.batch_size, made.num_epochs) == (0.25, 7, 3)


@pytest.mark.parametrize(
  ("curves", "field"),
  [
    (
      {"DPSGD": {"method": "dpsgd", "weight_decay": 0.1}},
      "curves['DPSGD'].weight_decay",
    ),
    ({"A": {"private.kappa": 0.9}}, "curves['A'].private.kappa"),
    ({"A": {"title": "mine"}}, "curves['A'].title"),
    ({"A": {"rigorous.clip": 0.3}}, "curves['A'].rigorous.clip"),
  ],
)
def test_a_curve_names_what_it_would_ignore(curves, field):
  config = common.on("mnist", curves=curves)
  with refuses(field):
    experiment.points(config)


def test_a_setting_of_an_experiment_is_read_by_a_curve_that_keeps_it():
  config = proved_mnist.get_config()
  experiment.points(config)
  with refuses("paper.preset"):
    experiment.points(_with(config, paper__preset="P5"))
  with refuses("weight_decay"):
    claimed = {**common.paper("mnist"), "curves": common.COMPARED}
    experiment.points(common.on("mnist", **claimed, weight_decay=0.3))
  for section in ("model", "rigorous_model"):
    for name, value in (("mirrored", True), ("colours", "opponent")):
      with refuses(f"{section}.{name}"):
        experiment.points(_with(config, **{f"{section}__{name}": value}))
  vectors = _with(test4_gaussian.get_config(), weight_decay=0.3)
  assert experiment.points(vectors)[-1].config.weight_decay == 0.3


def test_a_sweep_refuses_what_no_run_keeps_and_what_a_run_ignores():
  config = mnist_algorithms.get_config()
  assert len(grid.points(config)) == 12
  with refuses("base.privacy.epsilon"):
    grid.points(_with(config, base__privacy__epsilon=3.5))
  with refuses("base.seed"):
    grid.points(_with(config, base__seed=4))
  ignored = fields.replace(config, "grid", {"optimizer.rule.weight_decay": [0.1, 0.2]})
  with refuses("grid.optimizer.rule.weight_decay"):
    grid.points(ignored)
  with refuses("selection.mean_trials"):
    grid.points(_with(config, selection__mean_trials=3.0))
