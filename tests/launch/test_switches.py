"""One flag means one flag: another choice keeps what it takes, and a line names what it drops."""

import json

import pytest

from configs import mnist_cnn, quickstart
from configs.attack import quickstart as attacks
from configs.fed import quickstart as federation
from configs.radp import departures_mnist
from dpjax.experiments.config import choices, fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import DpSgd, Sgd, TrainConfig
from dpjax.experiments.kinds.relevance.methods import AdLm
from dpjax.experiments.run import kind as kinds
from dpjax.experiments.run import writers
from tests.refuses import refuses


def _command(config, **flags):
  """What a command line with these flags runs: (config, dropped fields)."""
  texts = {path.replace("__", "."): text for path, text in flags.items()}
  found = fields.override_all(config, texts)
  return found, fields.lost(config, found, texts)


def _refused(field, config, **flags):
  with refuses(field) as caught:
    found, _ = _command(config, **flags)
    kinds.check(found)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_the_twin_without_privacy_is_one_flag():
  private = DpSgd(
    epsilon=3.0, l2_clip_norm=0.1, delta=1e-6, accountant="rdp", clipping="automatic"
  )
  config, lost = _command(TrainConfig(privacy=private, noise_seed=3), privacy="sgd")
  build.Central(config).check()
  assert config == TrainConfig(privacy=Sgd(delta=1e-6))
  assert lost == [
    *("privacy.epsilon", "privacy.accountant", "privacy.l2_clip_norm"),
    *("privacy.clipping", "noise_seed"),
  ]
  again = fields.from_dict(
    TrainConfig, json.loads(json.dumps(writers.plain(choices.to_dict(config))))
  )
  assert again == config


@pytest.mark.parametrize("privacy", ["dp_sgd", "dp_ftrl", "least_squares", "sgd"])
def test_every_method_of_a_published_config_is_one_flag(privacy):
  config, _ = _command(quickstart.get_config(), privacy=privacy, model__name="linear")
  build.Central(config).check()
  assert choices.name_of(config, "privacy") == privacy


def test_what_the_same_command_asks_for_is_refused_by_name():
  text = _refused(
    "config.privacy.noise_multiplier",
    mnist_cnn.get_config(),
    privacy="sgd",
    privacy__noise_multiplier="1",
  )
  assert "belongs to dp_sgd, dp_ftrl, least_squares" in text


@pytest.mark.parametrize(
  ("sampler", "capacity"), [("fixed_size", None), ("truncated_poisson", 300)]
)
def test_a_capacity_stays_where_the_other_sampler_reads_it(sampler, capacity):
  relation = {"fixed_size": "replace_one"}.get(sampler, "replace_special")
  poisson = {"name": "poisson", "capacity": 300}
  privacy = DpSgd(epsilon=4.0, l2_clip_norm=0.2, sampler=poisson)
  config, lost = _command(
    TrainConfig(privacy=privacy),
    privacy__sampler=sampler,
    privacy__neighboring_relation=relation,
  )
  assert config.privacy.sampler.number("capacity") == capacity
  assert lost == ([] if capacity else ["privacy.sampler.capacity"])
  assert (config.privacy.epsilon, config.privacy.l2_clip_norm) == (4.0, 0.2)


def test_statistics_of_the_inputs_are_named_where_they_go():
  file = TrainConfig(privacy=DpSgd(normalization="private_statistics"))
  assert _command(file, privacy="sgd")[1] == ["privacy.normalization"]


def test_a_release_is_not_dropped():
  assert _refused("release", TrainConfig(release=True), privacy="sgd")


def test_options_of_another_model_are_dropped():
  file = mnist_cnn.get_config()
  file.model.options = {"features": (8,)}
  file.model.name = "mlp"
  config, lost = _command(file, model__name="linear")
  assert config.model.options == {} and lost == ["model.options"]
  _refused("model.options.width", file, model__name="linear", model__options__width="3")
  users, lost = _command(file, model__name="mine:Net")
  assert users.model.options == {} and lost == ["model.options"]
  users, _ = _command(file, model__name="mine:Net", model__options__depth="2")
  assert users.model.options == {"depth": 2}
  assert _command(users, model__name="mine:Net") == (users, [])


def test_an_audit_that_is_switched_off_takes_its_settings_along():
  file = fields.replace_all(TrainConfig(), {"audit": "canaries", "audit.num_canaries": 9})
  assert file.audit is not None and file.audit.num_canaries == 9
  assert _command(file, audit="none") == (TrainConfig(), ["audit.num_canaries"])
  _refused("config.audit.num_canaries", TrainConfig(), audit__num_canaries="9")


def test_an_algorithm_drops_what_it_does_not_read():
  file = federation.get_config()
  file.local.epochs = 3
  config, lost = _command(file, algorithm="fed_sgd", privacy="none")
  kinds.check(config)
  assert config.local.epochs == 1 and "local.epochs" in lost
  _refused("local.epochs", file, algorithm="fed_sgd", privacy="none", local__epochs="2")


# --- tables


def test_a_run_of_a_sweep_has_only_what_its_method_reads():
  base = TrainConfig(privacy=DpSgd(l2_clip_norm=0.2))
  assert fields.replace(base, "privacy", "dp_sgd").privacy.l2_clip_norm == 0.2
  assert fields.replace(base, "privacy", "sgd").privacy == Sgd()


def test_an_attack_names_the_kind_of_run_that_it_attacks():
  text = _refused("target", attacks.get_config(), attack="membership")
  assert "must be 'train'" in text


def test_another_method_of_relevance_has_only_what_it_reads():
  file = departures_mnist.get_config().base
  file = fields.replace(file, "method.mechanism", {"name": "gaussian", "delta": 1e-4})
  config, lost = _command(file, method="adlm")
  kinds.check(config)
  assert config.method == AdLm(relevance_records=10_000)
  assert lost == ["method.mechanism", "method.mechanism.delta", "method.floor"]
  text = _refused("config.method.floor", file, method="adlm", **{"method.floor": "0.1"})
  assert "'adlm' has no such field" in text and "radp" in text
