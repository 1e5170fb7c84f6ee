"""WORKSPACE.md's "How to add ...", followed as it stands: each thing in a file of its own, or by
the one row that the page names, and nothing else of dpjax is edited.

Elsewhere: a sampler (sampling/test_a_new_sampler.py), an event (accounting/test_event_kinds.py,
checks/test_check_own_samplers.py), a clipping rule (gradients/test_rules.py), a kind of run
(runs/test_new_kind.py).
"""

import functools
import importlib
import json
import sys

import numpy as np
import optax
import pytest

import dpjax.federated
import dpjax.mechanisms
from benchmarks import gradient_speed, workloads
from configs.fed import quickstart
from dpjax import accounting, data, models
from dpjax.auditing.games import federated as federated_games
from dpjax.auditing.games import mechanisms as mechanism_games
from dpjax.auditing.games import registry
from dpjax.auditing.games.game import play
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import DataConfig
from dpjax.experiments.kinds.federated import build
from dpjax.zoo import networks
from dpjax.zoo.datasets import published
from dpjax.zoo.networks.registry import MODELS
from launch import list as launch_list
from tests import commands, own_folder
from tests.adversary import plants
from tests.refuses import refuses

_MECHANISM = """
import dataclasses

from dpjax.mechanisms import additive, stated

@dataclasses.dataclass(frozen=True)
class NoisyCount:
  epsilon: float
  neighboring_relation: str = "add_or_remove_one"

  def __call__(self, key, flags):
    return additive.Laplace(self.epsilon, 1.0)(key, flags.sum())

  def event(self, neighboring_relation="add_or_remove_one"):
    own = self.neighboring_relation
    return stated.laplace_event(1 / self.epsilon, own, neighboring_relation)
"""
_ALGORITHM = """
from dpjax import federated
from dpjax.zoo import networks

def gentle_avg(loss_fn, client_tx, **options):
  return federated.fed_avg(loss_fn, client_tx, **options)
"""


@pytest.mark.slow
def test_a_model_and_data_are_files_of_ones_own(tmp_path):
  (tmp_path / "tiny_net.py").write_text(own_folder.NET)
  (tmp_path / "tiny_data.py").write_text(own_folder.CORNERS)
  done = commands.run(
    "launch.train",
    f"--config={commands.ROOT}/configs/quickstart.py",
    f"--workdir={tmp_path}/run",
    "--config.model.name=tiny_net:Net",
    '--config.model.options={"width": 5}',
    "--config.data.name=tiny_data:corners",
    "--config.num_steps=3",
    cwd=tmp_path,
  )
  assert done.returncode == 0, done.stderr
  result = json.loads((tmp_path / "run" / "result.json").read_text())
  assert result["num_parameters"] == 3 * 5 + 5 + 5 * 3 + 3
  assert result["epsilon_kind"] == "proved"


def test_data_in_an_npz_need_no_code(tmp_path):
  x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 2, 0])
  np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y, num_classes=3)
  train, test = data.load(tmp_path / "mine.npz")
  assert (len(train), test.num_classes) == (4, 3)


def test_a_model_by_name_is_one_row(monkeypatch):
  module = importlib.import_module("dpjax.zoo.networks.registry")
  row = module.Entry(models.Mlp)
  monkeypatch.setitem(module.MODELS, "perceptron", row)
  assert "perceptron" in MODELS
  assert networks.build("perceptron", num_classes=2, features=(3,)).features == (3,)


def test_a_data_set_by_name_is_one_row(tmp_path, monkeypatch):
  (tmp_path / "corner_data.py").write_text(own_folder.CORNERS)
  monkeypatch.syspath_prepend(tmp_path)
  row = published.Published(60, loader="corner_data.corners")
  monkeypatch.setitem(published.PUBLISHED, "corners", row)
  train, test = data.load("corners")
  assert (len(train), train.nominal_size, len(test)) == (60, 60, 30)
  with refuses("resident"):
    data.load("corners", resident=False)
  with refuses("num_examples", value=61):
    data.load("corners", num_examples=61)
  with refuses("data.data_dir"):
    DataConfig(name="corners", data_dir="/").check("data")
  assert "  corners " in launch_list.page(("data",))
  del sys.modules["corner_data"]


@pytest.fixture
def noisy_count(tmp_path, monkeypatch):
  """A file in dpjax/mechanisms."""
  (tmp_path / "noisy_count.py").write_text(_MECHANISM)
  path = [*dpjax.mechanisms.__path__, str(tmp_path)]
  monkeypatch.setattr(dpjax.mechanisms, "__path__", path)
  yield importlib.import_module("dpjax.mechanisms.noisy_count").NoisyCount
  del sys.modules["dpjax.mechanisms.noisy_count"], dpjax.mechanisms.noisy_count


def _count_games(kind):
  flags = np.zeros(3, np.float32), np.array([0, 0, 1], np.float32)
  options = {"relation": "add_or_remove_one", "adversary": mechanism_games.linear}
  return [mechanism_games.game(kind(epsilon=1.0), "0, 1", *flags, **options)]


@pytest.mark.slow
def test_a_mechanism_is_a_file_and_a_game(noisy_count, monkeypatch):
  assert registry.without_game("mechanisms") == ["NoisyCount"]
  monkeypatch.setitem(mechanism_games.GAMES, "NoisyCount", _count_games)
  assert registry.without_game("mechanisms") == [] == registry.stale("mechanisms")
  (honest,) = registry.games("mechanisms", "NoisyCount")
  assert not any(one.refuted for one in play(honest, num_draws=3_000))
  (broken,) = _count_games(plants.weak(noisy_count))
  assert any(one.refuted for one in play(broken, num_draws=3_000))


def test_the_event_of_a_mechanism_is_charged_by_both_ledgers(noisy_count):
  event = noisy_count(0.5).event()
  budget = dpjax.mechanisms.BudgetLedger(1.0).spend("count", epsilon=0.5, event=event)
  ledger = accounting.Ledger().charge(
    event,
    l2_clip_norm=1.0,
    neighboring_relation="add_or_remove_one",
    noise_key_id="a",
    first_step=0,
  )
  alone = accounting.epsilon(event, delta=1e-6)
  assert 0.45 < alone < 0.51
  assert ledger.epsilon(1e-6) == alone == accounting.epsilon(budget.event(), delta=1e-6)


@pytest.fixture
def gentle_avg(tmp_path, monkeypatch):
  (tmp_path / "gentle.py").write_text(_ALGORITHM)
  monkeypatch.syspath_prepend(tmp_path)
  yield importlib.import_module("gentle").gentle_avg
  del sys.modules["gentle"]


def test_a_federated_algorithm_runs_by_its_import_path(gentle_avg):
  public = {"algorithm": "gentle:gentle_avg", "privacy": "none", "num_rounds": 2}
  config = fields.replace_all(quickstart.get_config(), public)
  built = build.assemble(config)
  assert isinstance(built.algorithm, dpjax.federated.FederatedAlgorithm)
  assert built.guarantee.kind == "none"


def test_a_federated_algorithm_of_dpjax_has_a_game_or_a_reason(gentle_avg, monkeypatch):
  fed_prox = importlib.import_module("dpjax.federated.algorithms.fed_prox")
  monkeypatch.setattr(gentle_avg, "__module__", fed_prox.__name__)  # as if defined there
  monkeypatch.setattr(fed_prox, "gentle_avg", gentle_avg, raising=False)
  assert registry.without_game("federated") == ["gentle_avg"]
  worlds, client = federated_games._WORLDS, optax.sgd(0.5)
  row = federated_games._algorithm("gentle_avg", worlds, client)
  monkeypatch.setitem(federated_games.GAMES, "gentle_avg", row)
  assert registry.without_game("federated") == [] == registry.stale("federated")
  found = registry.games("federated", "gentle_avg")
  assert [game.case for game in found] == list(worlds)


@pytest.mark.slow
def test_a_workload_of_the_benchmark_is_one_row(monkeypatch):
  image = functools.partial(workloads._images, models.Linear(num_classes=10), (2, 2, 1), 8)
  rows = lambda platform: {"tiny": image}
  monkeypatch.setattr(workloads, "_by_platform", rows)
  found = gradient_speed.measure("tiny", ["auto"], repeats=1, fresh_process=False)
  assert [(entry.workload, entry.status) for entry in found] == [("tiny", "ok")] * 2
