"""The benchmarks of pfl-research, as published, over few users in the true format."""

import numpy as np
import pytest

from configs.fed import flair, stackoverflow, stackoverflow_blt
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.federated import build
from dpjax.experiments.run import loop
from tests.refuses import refuses
from tests.zoo import client_files

pytest.importorskip("h5py", reason="needs the extra 'h5'")

_SHORT = {"num_rounds": 2, "clients_per_round": 3.0, "eval_every": 2, "checkpoint_every": 2}
_LABELS = [f"label {number}" for number in range(17)]


def _photographs(folder):
  rng = np.random.default_rng(0)

  def user():
    return [
      (int(rng.integers(256)), list(rng.choice(_LABELS, 2, replace=False)))
      for _ in range(rng.integers(1, 5))
    ]

  splits = {
    "train": {f"{number}@N": user() for number in range(12)},
    "val": {f"{number}@N": user() for number in range(90, 93)},
  }
  client_files.flair(folder / "flair_federated.hdf5", splits, _LABELS, side=16)
  small = {"partition.image_size": 8, "model.name": "linear", "model.options": {}}
  return {**_SHORT, **small, "data.num_users": 12, "data.data_dir": str(folder)}


def _sentences(folder):
  rng = np.random.default_rng(0)

  def user():
    return [[18, *map(int, rng.integers(1, 17, 4)), 19] for _ in range(rng.integers(1, 5))]

  splits = {
    "train": {str(number): user() for number in range(12)},
    "val": {"v": user()},
  }
  client_files.pfl_sentences(folder / "stackoverflow.hdf5", splits)
  small = {"num_layers": 1, "num_heads": 2, "features": 8, "max_length": 7}
  return {
    **_SHORT,
    "model.options": small,
    "data.num_users": 12,
    "data.data_dir": str(folder),
  }


def _check_claimed(result, assumed):
  """One user's rare word or label is in the list that all users share, so nothing is proved."""
  assert result["epsilon_kind"] == "claimed" and "words or labels" in assumed
  assert "its list of labels" in result["privacy_statement"]


@pytest.mark.slow
def test_flair_trains_over_its_photographers(tmp_path):
  config = fields.replace_all(flair.get_config(), _photographs(tmp_path))
  result = loop.train(config, tmp_path / "run")
  assert result["task"] == "multi_label" and result["partition"] == "pfl"
  assert result["num_clients"] == 12 and result["unit"] == "user"
  # As the benchmark counts: noise of 5,000 of a million clients.
  simulated, of_labels = result["failed_assumptions"]
  assert result["epsilon"] <= 2.0 and "as large as simulated" in simulated
  _check_claimed(result, of_labels)
  train, test = build.load_data(config)
  assert train.dataset.x.shape[1:] == (8, 8, 3) and train.dataset.y.shape[1:] == (17,)
  assert train.dataset.x.min() >= 0 and train.dataset.x.max() <= 1
  assert len(test) == sum(1 for _ in test.x)


@pytest.mark.slow
def test_stackoverflow_trains_over_its_users(tmp_path):
  config = fields.replace_all(stackoverflow.get_config(), _sentences(tmp_path))
  result = loop.train(config, tmp_path / "run")
  assert result["task"] == "language_modeling" and result["partition"] == "pfl"
  assert result["num_clients"] == 12
  _check_claimed(result, result["failed_assumptions"][-1])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["blt", "tree", "identity"])
def test_stackoverflow_trains_with_correlated_noise(tmp_path, strategy):
  """Its users take turns, and the epsilon needs no sampling."""
  small = {**_sentences(tmp_path), "num_rounds": 8, "privacy.strategy": strategy}
  config = fields.replace_all(stackoverflow_blt.get_config(), small)
  result = loop.train(config, tmp_path / "run")
  assert 7.9 < result["epsilon"] <= 8.0
  _check_claimed(result, *result["failed_assumptions"])
  assert result["method"] == "dp_ftrl_fed_avg" and result["unit"] == "user"


@pytest.mark.slow
def test_with_its_own_users_alone_the_epsilon_rests_on_the_labels(tmp_path):
  """Without the simulation: few users leave little, and the statement says it of them."""
  own = {"privacy.simulated_cohort": None, "privacy.simulated_clients": None}
  overrides = {
    **_photographs(tmp_path),
    **own,
    "privacy.epsilon": 50.0,
    "privacy.delta": 1e-3,
  }
  config = fields.replace_all(flair.get_config(), overrides)
  result = loop.train(config, tmp_path / "run")
  assert "12 users" in result["privacy_statement"]
  _check_claimed(result, *result["failed_assumptions"])


@pytest.mark.cases(slow=["overrides5-model.name"])
@pytest.mark.parametrize(
  ("overrides", "field"),
  [
    ({"data.num_classes": None}, "data.num_classes"),
    ({"partition.image_size": 5}, "partition.image_size"),
    ({"partition.test_split": "train"}, "partition.test_split"),
    ({"data.num_users": None}, "data.num_users"),
    ({"data.name": "none.hdf5"}, "data.name"),
    ({"model.name": "transformer"}, "model.name"),
  ],
)
def test_a_wrong_field_is_one_line(tmp_path, overrides, field):
  config = fields.replace_all(flair.get_config(), {**_photographs(tmp_path), **overrides})
  with refuses(field) as error:
    loop.train(config, tmp_path / "run")
  assert "\n" not in str(error.value)
