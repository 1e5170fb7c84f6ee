"""Runs over clients that the data name: users are counted by id, and told of in every result."""

import dataclasses

import numpy as np
import pytest

from configs.fed import femnist
from dpjax import data
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.federated import build, privacy
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run import loop
from dpjax.experiments.sweeps import cost
from tests.refuses import refuses
from tests.zoo import client_files

_SMALL = {
  "model.name": "linear",
  "model.options": {},
  "num_rounds": 2,
  "clients_per_round": 4.0,
  "eval_every": 2,
  "checkpoint_every": 2,
  "privacy.epsilon": None,
  "privacy.noise_multiplier": 1.0,
  "local.batch_size": 2,
}


def _writers(folder, num_writers=40):
  """A database of TFF's: writers of one to five characters, interleaved; one more writer in
  the test alone."""
  rng = np.random.default_rng(0)
  who = [f"f{n:04}" for n in rng.permutation(np.repeat(np.arange(num_writers), 3))]
  say = lambda y: client_files.example(pixels=rng.random(784), label=int(y))
  rows = [(writer, say(y)) for writer, y in zip(who, rng.integers(0, 62, len(who)))]
  test = [("f9999", say(3)), *rows[:5]]
  path = folder / "emnist_all.sqlite"
  client_files.sqlite(path, {"all_train": rows, "all_test": test})
  small = {**_SMALL, "data.num_users": num_writers}
  return {**small, "data.data_dir": str(folder)}


@pytest.mark.long
def test_femnist_trains_over_its_writers(tmp_path):
  config = fields.replace_all(femnist.get_config(), _writers(tmp_path))
  result = loop.train(config, tmp_path / "run")
  assert result["num_clients"] == 40 and result["partition"] == "tff"
  assert result["unit"] == "user" and result["epsilon_kind"] == "proved"
  assert "Unit: one user" in result["privacy_statement"]
  assert "40 users" in result["privacy_statement"]
  train, test = build.load_data(config)
  assert len(train) == 120 and len(test) == 6 and train.dataset.x.min() < -0.9  # centred
  kept = fields.replace(config, "partition.max_examples", 2)
  fewer, _ = build.load_data(kept)
  assert fewer.num_clients == 40 and fewer.sizes.max() == 2
  assert data.digest(train) != data.digest(fewer)


@pytest.mark.parametrize(
  ("overrides", "field"),
  [
    ({"clients_per_round": 41.0}, "clients_per_round"),
    ({"data.num_users": 81}, "data.num_users"),
    ({"data.num_users": None}, "data.num_users"),
    ({"data.limit": 9}, "data.limit"),
    ({"data.num_classes": None}, "data.num_classes"),
    ({"data.num_classes": 3}, "data.name"),
    ({"data.max_length": 9}, "data.max_length"),
    ({"data.name": "other.sqlite"}, "data.name"),
    ({"data.name": "/nowhere/x.sqlite"}, "data.data_dir"),
    ({"partition.max_examples": 0}, "partition.max_examples"),
    ({"partition": "natural"}, "partition.client_id"),
    ({"partition": {"name": "leaf", "shape": (0,)}}, "partition.shape"),
    ({"partition": "leaf"}, "data.name"),
  ],
)
def test_wrong_settings_are_one_line(tmp_path, overrides, field):
  config = fields.replace_all(femnist.get_config(), {**_writers(tmp_path), **overrides})
  with refuses(field) as caught:
    loop.train(config, tmp_path / "run")
  assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def _own(tmp_path):
  who = np.repeat(["b", "a", "c"], 4)
  arrays = {"x_train": np.eye(12), "y_train": np.arange(12) % 2, "who_train": who}
  arrays |= {"x_test": np.eye(12)[:4], "y_test": [0, 1, 0, 1], "who_test": who[:4]}
  np.savez(tmp_path / "own.npz", num_classes=2, **arrays)
  part = {"name": "natural", "client_id": "who"}
  small = {**_SMALL, "data.num_users": 3}
  return {**small, "data.name": str(tmp_path / "own.npz"), "partition": part}


def test_a_column_of_ones_own_data_names_the_users(tmp_path):
  config = fields.replace_all(FedConfig(), _own(tmp_path))
  found = [rows.tolist() for rows in build.load_data(config)[0].indices]
  assert found == [[4, 5, 6, 7], [0, 1, 2, 3], [8, 9, 10, 11]]


@pytest.mark.parametrize(("declared", "verb"), [(3, "declare"), (None, "have")])
def test_a_cohort_above_the_clients_of_the_data_is_told_their_number(
  declared, verb, tmp_path
):
  changes = {**_own(tmp_path), "data.num_users": declared, "clients_per_round": 5.0}
  config = fields.replace_all(FedConfig(), changes)
  with refuses("clients_per_round", value=5.0) as caught:
    privacy.check_cohort(config, 3)
  assert caught.value.must.endswith(f"the data {verb} 3 clients")


def test_two_columns_are_two_kinds_of_user_and_a_bound_is_not(tmp_path):
  """Epsilons add up for one kind of user alone."""
  config = fields.replace_all(FedConfig(), _own(tmp_path))
  whose = lambda **changed: cost.population(
    dataclasses.replace(config, partition={"name": "natural", **changed})
  )
  assert whose(client_id="who") == whose(client_id="who", max_examples=3)
  assert whose(client_id="who") != whose(client_id="device")


def test_an_array_in_a_file_is_read_as_rounds_need_it(tmp_path):
  """A federation larger than memory: rows lie in a file, and are gathered client by client."""
  x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (12, 3))
  x[:] = np.arange(36).reshape(12, 3)
  x.flush()
  stored = np.load(tmp_path / "x.npy", mmap_mode="r")
  held = data.from_arrays(stored, np.zeros(12, int), num_classes=2)
  fed = data.by_client(held, list("abcabcabcabc"))
  assert np.shares_memory(fed.dataset.x, stored)  # nothing was copied
  np.testing.assert_array_equal(fed.client("b").x, x[1::3])
