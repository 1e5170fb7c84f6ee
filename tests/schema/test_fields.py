"""Typed fields: the annotation decides, from Python and from the command line alike."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from dpjax.experiments.config import choices, elsewhere, fields, optimizers
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import DpSgd, TrainConfig
from dpjax.experiments.kinds.distillation import DistillationConfig
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.kinds.pate.config import PateConfig
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.kinds.synthesis.config import SynthesisConfig
from dpjax.experiments.run import writers
from dpjax.experiments.run.kind import KINDS
from dpjax.experiments.sweeps.sweep import Sweep
from dpjax.gradients import Automatic, Flat
from tests.refuses import refuses


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
  "path, text, field",
  [
    ("privacy.epsilom", "1", "config.privacy.epsilom"),
    ("privacy.epsilon", "two", "config.privacy.epsilon"),
    ("privacy.epsilon", "nan", "config.privacy.epsilon"),
    ("privacy.delta", "none", "config.privacy.delta"),
    ("num_steps", "2.5", "config.num_steps"),
    ("num_steps", "true", "config.num_steps"),
    ("data.center", "1", "config.data.center"),
    ("privacy", "1", "config.privacy"),
    ("seed.x", "1", "config.seed.x"),
    ("model.options", "[1]", "config.model.options"),
  ],
)
def test_wrong_override_is_one_line_that_names_the_field(path, text, field):
  with refuses(field):
    fields.override(TrainConfig(), path, text)


def test_containers_of_a_sweep():
  sweep = fields.override(Sweep(), "seeds", "[3, 4]")
  sweep = fields.override(sweep, "epsilons", "[1, 2.5]")
  sweep = fields.override(sweep, "references", "[('a', 1, 0.9)]")
  sweep = fields.override(sweep, "base.privacy.delta", "1e-7")
  assert sweep.seeds == [3, 4] and sweep.epsilons == [1.0, 2.5]
  assert sweep.references == [("a", 1.0, 0.9)] and sweep.base.privacy.delta == 1e-7
  for path, text, field in [
    ("seeds", "[0, 'x']", "seeds[1]"),
    ("references", "[('a', 1)]", "references[0]"),
    ("epsilons", "3", "epsilons"),
  ]:
    with refuses(f"config.{field}"):
      fields.override(Sweep(), path, text)


def test_nested_dict_keys_descend():
  config = TrainConfig()
  config.model.options = {"head": {"width": 1}}
  changed = fields.override(config, "model.options.head.width", "2")
  assert changed.model.options == {"head": {"width": 2}}
  assert config.model.options == {"head": {"width": 1}}


def test_check_finds_an_ill_typed_field_anywhere():
  config = TrainConfig()
  config.privacy.sampling_prob = "0.1"  # type: ignore[assignment]
  with refuses("config.privacy.sampling_prob"):
    fields.check(config, TrainConfig, "config")
  assert fields.check(TrainConfig(), TrainConfig, "config") == TrainConfig()


# --- one of several frozen values


def test_a_choice_takes_a_name_json_a_value_and_then_its_numbers():
  by_name = fields.override(TrainConfig(), "privacy.clipping", "automatic")
  assert by_name.privacy.clipping == Automatic() and TrainConfig() != by_name
  written = [
    fields.override(by_name, "privacy.clipping.gamma", "0.1"),
    fields.override(by_name, "privacy.clipping", '{"name": "automatic", "gamma": 0.1}'),
    fields.replace(TrainConfig(), "privacy.clipping", Automatic(0.1)),
    TrainConfig(privacy=DpSgd(clipping={"name": "automatic", "gamma": 0.1})),
  ]
  config = TrainConfig()
  config.privacy.clipping = {"name": "automatic", "gamma": 0.1}
  assert all(one == config for one in written)
  assert fields.get(config, "privacy.clipping") == "automatic(gamma=0.1)"
  assert fields.get(TrainConfig(), "privacy.clipping.gamma") is None  # of another choice
  plain = choices.to_dict(config)["privacy"]["clipping"]
  assert fields.replace(TrainConfig(), "privacy.clipping", plain) == config
  assert choices.set_fields(config) == {
    "privacy.clipping": ("automatic", "flat"),
    "privacy.clipping.gamma": (0.1, 0.01),
  }


@pytest.mark.parametrize(
  "path, text, field",
  [
    ("compression", "quantise", "config.compression"),
    ("compression", "quantise", "config.compression"),
    ("compression", "3", "config.compression"),
    ("compression", '{"bits": 3}', "config.compression"),
    (
      "compression",
      '{"name": "top_k", "bits": 3}',
      "config.compression.bits",
    ),
    (
      "compression",
      '{"name": "top_k", "share": "x"}',
      "config.compression.share",
    ),
    ("compression.bits", "4", "config.compression.bits"),
    ("compression.bit", "4", "config.compression.bit"),
    (
      "algorithm",
      "absent:nothing",
      "config.algorithm",
    ),
    ("algorithm.mu.x", "1", "config.algorithm.mu.x"),
    ("compression.", "quantize", "config.compression."),
    ("partition.alpha", "0.1", "config.partition.alpha"),
    ("momentum", "0.9", "config.momentum"),
  ],
)
def test_what_the_chosen_value_has_not_is_one_line(path, text, field):
  with refuses(field):
    fields.override(FedConfig(), path, text)


def test_a_name_in_place_of_a_section_is_told_where_it_belongs():
  with refuses("config.model", value="cnn") as caught:
    fields.override(TrainConfig(), "model", "cnn")
  assert "--config.model.name: launch.list models" in caught.value.must


def test_a_value_of_no_row_is_refused_where_it_is_checked():
  config = TrainConfig(privacy=DpSgd(clipping=3))  # type: ignore[arg-type]
  with refuses("config.privacy.clipping", value=3):
    fields.check(config, TrainConfig, "config")


def test_a_name_keeps_the_numbers_that_were_set_where_it_has_them():
  """The users of a federation, say, are not silently others when they are dealt otherwise."""
  config = fields.replace(FedConfig(), "partition.num_clients", 500)
  config = fields.replace(
    fields.replace(config, "partition", "dirichlet"), "partition.alpha", 0.1
  )
  for pick in (fields.replace, fields.override):
    same = pick(config, "partition", "dirichlet").partition
    assert (same.num_clients, same.alpha) == (500, 0.1)
    other = pick(config, "partition", "shards").partition
    assert other.num_clients == 500 and not hasattr(other, "alpha")
  whole = fields.replace(config, "partition", {"name": "shards"}).partition
  assert whole.num_clients == FedConfig().partition.num_clients  # a dict is the whole value


@dataclasses.dataclass(frozen=True)
class _Own(Automatic):
  """A rule of no row, which clips nothing."""

  factor: float = dataclasses.field(kw_only=True)

  def factors(self, lengths, top, most):
    return self.factor + 0 * lengths


@pytest.mark.parametrize("odd", [Flat, _Own(factor=9.0), None, ["flat"], {"gamma": 1.0}])
def test_a_class_or_a_rule_of_ones_own_is_one_line(odd):
  config = TrainConfig(privacy=DpSgd(clipping=odd))
  with refuses("config.privacy.clipping"):
    build.Central(config).check()
  assert fields.replace(config, "privacy.clipping", "flat") == TrainConfig()


@pytest.mark.parametrize(
  "text, field",
  [
    ('{"name": ["flat"]}', "config.privacy.clipping"),
    ('{"name": "automatic", 1: 2}', "config.privacy.clipping.1"),
  ],
)
def test_odd_json_of_a_choice_is_one_line(text, field):
  with refuses(field):
    fields.override(TrainConfig(), "privacy.clipping", text)


def test_values_that_are_made_by_lambdas_are_told_by_their_names():
  adam, adagrad = optimizers.CENTRAL["adam"](), optimizers.CENTRAL["adagrad"]()
  config = TrainConfig()
  config.model.options = {"rules": [adam, adagrad]}
  held = writers.plain(choices.to_dict(config))
  assert held["model"]["options"]["rules"] == ["adam()", "adagrad()"]


@dataclasses.dataclass(frozen=True)
class _Secretive:
  told: int = 0
  hidden: int = dataclasses.field(default=0, repr=False)


@pytest.mark.cases(long=[3])
@pytest.mark.parametrize(
  ("odd", "place"),
  [(_Secretive(0, 1), ""), ({1: 2}, ""), ([np.arange(3)], "[0]"), (np.float32(0.1), "")],
)
def test_an_option_that_config_json_would_not_hold_is_refused(odd, place):
  """Two of them could have one digest, and so one noise."""
  config = TrainConfig()
  config.model.options = {"features": odd}
  with refuses(f"model.options.features{place}"):
    build.Central(config).check()


@pytest.mark.cases(long=[2])
@pytest.mark.parametrize(
  ("config", "room", "typo"),
  [
    (TrainConfig, "privacy", "neighbouring_relation"),
    (TrainConfig, "", "relase"),
    (FedConfig, "privacy", "noise_multipler"),
  ],
)
def test_a_typo_in_a_config_file_is_not_dropped(config, room, typo):
  """`config.relase = True` is an assignment that Python takes; its run was no release."""
  made = config()
  setattr(getattr(made, room) if room else made, typo, 1)
  with refuses(f"config.{room}.{typo}" if room else f"config.{typo}"):
    fields.check(made, config, "config")


@pytest.mark.parametrize(
  "kind, chosen, fixed",
  [
    # Each new value is refused beside the default of the other one.
    (FedConfig, {"secure_sum": "committee"}, {"num_members": "3", "colluding": "1"}),
    (FedConfig, {"secure_sum": "committee"},
     {"num_members": "9", "colluding": "6", "packed": "3"}),
    (SecureConfig, {"task.protocol": "committee"}, {"num_members": "2", "colluding": "1"}),
    (SecureConfig, {"task.protocol": "plain"}, {"bits": "32", "largest": "4294967295"}),
    (SecureConfig, {"task": "sum"}, {"num_clients": "30", "silent": "29"}),
    (RelevanceConfig, {"lrp": None}, {"low": "7", "high": "8"}),
    (AttackConfig, {"attack": "extraction"}, {"labels_only": "true", "decimals": "none"}),
  ],
)  # fmt: skip
def test_fields_are_checked_against_each_other_when_all_are_set(kind, chosen, fixed):
  (section, word) = next(iter(chosen.items()))
  texts = {f"{section}.{field}": text for field, text in fixed.items()}
  whole = {} if word is None else {section: word}
  results = [
    fields.override_all(kind(), {**dict(order), **whole})
    for order in itertools.permutations(texts.items())
  ]
  assert all(result == results[0] for result in results)
  values = {path: fields.get(results[0], path) for path in texts}
  assert values != {path: fields.get(kind(), path) for path in texts}
  # Rows of a table and of a sweep, too.
  for order in itertools.permutations(values.items()):
    assert fields.replace_all(kind(), {**dict(order), **whole}) == results[0]


def test_what_contradicts_itself_is_refused_in_any_order():
  texts = {"secure_sum.num_members": "3", "secure_sum.colluding": "3"}
  for order in itertools.permutations(texts.items()):
    with refuses("config.secure_sum.colluding", value=3):
      fields.override_all(FedConfig(), {"secure_sum": "committee", **dict(order)})
  for texts, message in (
    ({"seed": "1", "num_rounds": "x"}, "config.num_rounds"),
    ({"secure_sum.colluding": "1", "secure_sum.": "2"}, "config.secure_sum."),
    ({"secure_sum.nothing": "1"}, "config.secure_sum.nothing"),
  ):
    with refuses(message):
      fields.override_all(FedConfig(), texts)


# Words that others use, beside the field of each kind of run.
_OTHERS = {
  TrainConfig: {
    "epsilon": "privacy.epsilon", "target_epsilon": "privacy.epsilon",
    "target_delta": "privacy.delta", "batch_size": "privacy.sampling_prob",
    "max_grad_norm": "privacy.l2_clip_norm", "l2_norm_clip": "privacy.l2_clip_norm",
    "sigma": "privacy.noise_multiplier", "noise_multiplier": "privacy.noise_multiplier",
    "secure_mode": "release", "lr": "optimizer.learning_rate", "epochs": "num_steps",
    "steps": "num_steps", "microbatches": "microbatch_size",
    "strategy": "privacy.strategy", "random_state": "seed",
    "noise": "privacy.noise_multiplier",
  },
  FedConfig: {
    "fraction_fit": "clients_per_round", "num_clients_per_round": "clients_per_round",
    "proximal_mu": "algorithm.mu", "strategy": "algorithm", "local_epochs": "local.epochs",
    "epochs": "local.epochs", "num_epochs": "local.epochs", "batch_size": "local.batch_size",
    "lr": "client_optimizer.learning_rate", "learning_rate": "client_optimizer.learning_rate",
    "server_lr": "server_optimizer.learning_rate", "sigma": "privacy.noise_multiplier",
    "max_grad_norm": "privacy.l2_clip_norm", "target_epsilon": "privacy.epsilon",
    "secure_mode": "release", "num_server_rounds": "num_rounds", "secagg": "secure_sum",
    "global_rounds": "num_rounds", "join_ratio": "clients_per_round", "test_ratio": "held_out",
    "client_num_in_total": "partition.num_clients", "personal_layers": "algorithm.kept",
    "federated_optimizer": "algorithm", "fine_tuning_epochs": "fine_tune_epochs",
  },
  PateConfig: {
    "target_epsilon": "epsilon", "sigma": "std", "noise_multiplier": "std",
    "secure_mode": "release", "random_seed": "seed",
  },
  DistillationConfig: {
    "target_epsilon": "epsilon", "num_epochs": "epochs", "lr": "teacher_rate",
    "max_grad_norm": "l2_clip_norm", "train_batch_size": "batch_size",
  },
  SynthesisConfig: {
    "sigma": "method.noise_multiplier", "batch_size": "method.batch_size", "lr": "learning_rate",
    "epochs": "method.epochs", "max_grad_norm": "method.l2_clip_norm", 
    "max_steps": "method.num_steps", "secure_mode": "release",
  },
  RelevanceConfig: {
    "target_epsilon": "epsilon", "target_delta": "method.delta", "epochs": "num_epochs",
    "max_grad_norm": "method.l2_clip_norm", "lr": "method.learning_rate",
  },
  AttackConfig: {
    "batch_size": "target.local.batch_size", "sigma": "target.privacy.noise_multiplier",
    "noise": "target.privacy.noise_multiplier",
    "lr": "target.optimizer.learning_rate", "fraction_fit": "target.clients_per_round",
    "strategy": "target.algorithm",
  },
  SecureConfig: {
    "epochs": "task.epochs", "lr": "task.learning_rate", "eps": "task.epsilon",
    "noise": "task.train.privacy.noise_multiplier",
  },
  Sweep: {"noise": "base.privacy.noise_multiplier", "epochs": "base.num_steps"},
}  # fmt: skip


_CONFIGS = [kind.config_class for kind in KINDS.values()]


def test_every_kind_of_run_has_its_row():
  assert set(_OTHERS) == set(_CONFIGS)


@pytest.mark.parametrize(
  ("kind", "word", "path"),
  [(kind, word, path) for kind, words in _OTHERS.items() for word, path in words.items()],
)
def test_names_of_other_libraries_lead_to_the_field(kind, word, path):
  place = fields.place_of(kind(), word)
  assert place is not None and place[0] == path
  fields.get(kind(), path)  # it is there
  if word in {field.name for field in dataclasses.fields(kind)}:
    return
  with refuses(f"config.{word}") as caught:
    fields.override(kind(), word, "1")
  assert f"did you mean {path!r}?" in str(caught.value)
  assert place[1] in str(caught.value)


@pytest.mark.parametrize("kind", _CONFIGS)
def test_a_name_of_another_library_is_no_field_here(kind):
  """A word that became a field of its own must leave the table, or it would mislead."""
  paths = list(fields._paths(kind()))
  named = {path.rpartition(".")[2] for path in paths}
  for word in elsewhere.words() & named:
    place = fields.place_of(kind(), word)
    assert place is not None
    (path, _) = place
    # A field of that name, but where the word means another one to those who type it.
    assert path.endswith(word) or _OTHERS[kind].get(word) == path, (word, path)


def test_every_path_of_the_table_is_a_field_or_a_flag():
  held = {f".{path}" for kind in _CONFIGS for path in fields._paths(kind())}
  for row in elsewhere._ROWS:
    for path in row.paths.split():
      assert path == "workdir" or any(there.endswith(f".{path}") for there in held), path


def test_a_field_that_a_kind_of_run_lacks_is_named():
  with refuses("config.fraction_fit") as caught:
    fields.override(TrainConfig(), "fraction_fit", "1")
  assert "'clients_per_round'" in str(caught.value)


def test_code_that_is_no_choice_is_refused_by_its_field():
  with refuses("config.attack", value="os:system"):
    fields.override(AttackConfig(), "attack", "os:system")
