"""Secure computations as runs: resumed, against the same in the clear, every field read."""

import dataclasses
import inspect
import pkgutil
import re
import sys

import jax
import numpy as np
import pytest

from dpjax import data
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  Sgd,
  TrainConfig,
)
from dpjax.experiments.kinds.secure import (
  aligned_columns,
  noisy_model,
  shared_people,
  vector_sums,
)
from dpjax.experiments.kinds.secure.config import TASKS, SecureConfig
from dpjax.experiments.kinds.secure.task import SecureTask, digest_of
from dpjax.experiments.run import loop, run_keys, saved, writers
from dpjax.experiments.sweeps import sweep
from dpjax.experiments.sweeps.sweep import Runs
from dpjax.secure.mpc import output_noise
from dpjax.secure.mpc.output_noise import OutputNoise
from dpjax.secure.sums import AdditiveServers, SecAgg
from dpjax.validate import UserError
from tests.refuses import refuses
from tests.runs.stops import stop_after

_SUM = {"task.num_clients": 4, "task.length": 20}
_MODEL = {
  "task.train": TrainConfig(
    data=DataConfig(name="digits", center=True, limit=300),
    model=ModelConfig(name="mlp", options={"features": (4,), "activation": "square"}),
    privacy=Sgd(sampling_prob=0.2),
    optimizer=OptimizerConfig(learning_rate=0.01),
    num_steps=4,
  )
}


def _point(**changes):
  config = fields.replace_all(SecureConfig(), changes)
  (point,) = Runs(None, config).points
  return point.config


@pytest.fixture
def secure():
  for module in ("cryptography", "Crypto"):
    pytest.importorskip(module, reason="needs pip install -e '.[secure]'")


@pytest.fixture
def intersection():
  pytest.importorskip("private_set_intersection", reason="needs openmined-psi")


@pytest.fixture
def tenseal():
  pytest.importorskip("tenseal", reason="needs TenSEAL: pip install -e '.[he]'")


def test_a_sum_is_exact_and_holds_what_every_result_does(tmp_path):
  config = _point(**{"task.protocol": "plain"}, **_SUM)
  result = loop.train(config, tmp_path)
  assert set(writers.RESULT_KEYS) <= set(result)
  assert (result["task"], result["method"], result["error"]) == ("sum", "plain", 0.0)
  assert result["epsilon_kind"] == "none" and result["num_survivors"] == 4
  assert result["hides"].startswith("nothing")
  with np.load(tmp_path / "secure.npz") as held:
    assert held["total"].shape == (20,) and held["total"].max() > 2**20


def test_rows_of_another_shape_are_other_data():
  """One person less with one column more had the same bytes."""
  rows = np.arange(6, dtype=np.float32)
  digests = {
    digest_of(rows.reshape(shape), rows[:2]) for shape in ((2, 3), (3, 2), (6,))
  } | {digest_of(rows.reshape(2, 3).view(np.int32), rows[:2])}
  assert len(digests) == 4


def test_a_biased_sum_is_told(tmp_path, monkeypatch):
  pytest.importorskip("cryptography", reason="needs the extra secure")
  true = SecAgg.sum
  biased = lambda self, *args: (lambda s: s._replace(total=s.total + np.uint32(1)))(
    true(self, *args)
  )
  monkeypatch.setattr(SecAgg, "sum", biased)
  result = loop.train(_point(**_SUM, **{"task.silent": 1}), tmp_path)
  assert result["error"] == 1.0 and result["num_survivors"] == 3


@pytest.mark.parametrize("protocol", ["plain", "additive_sharing"])
def test_a_sum_that_the_silent_clients_prevent_names_them(tmp_path, protocol):
  with refuses("task.silent", value=3):
    loop.train(_point(**_SUM, **{"task.protocol": protocol, "task.silent": 3}), tmp_path)


@pytest.mark.long
def test_a_regression_keeps_rounded_weights_alone(tmp_path, tenseal):
  task = {"name": "regress", "num_features": 2, "ridge": 1.0, "num_predicted": 5}
  result = loop.train(_point(task=task | {"tolerance": 5e-5}), tmp_path)
  assert result["error"] < 1e-4 and result["refreshes"] == 1 and result["num_steps"] == 32
  with np.load(tmp_path / "secure.npz") as held:
    weights = held["weights"]
  np.testing.assert_array_equal(weights, weights.round(4))
  assert result["bytes"] > result["upload_bytes"] > 1e6


@pytest.mark.long
@pytest.mark.parametrize("private", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_inference_goes_on_where_it_stopped(private, tmp_path, monkeypatch, tenseal):
  """With the epsilon of its model, where that has one."""
  epsilon = {"task.train.privacy": "dp_sgd", "task.train.privacy.epsilon": 3.0}
  task = {"name": "infer", "num_images": 150}
  config = _point(task=task, **_MODEL, **(epsilon if private else {}))
  stop_after(monkeypatch, 3, subfolder="questions")
  with pytest.raises(loop.Interrupted, match="step 3"):
    loop.train(config, tmp_path)
  result = loop.train(config, tmp_path)
  assert result["agreement"] == 1.0 and result["test_accuracy"] == result["plain_accuracy"]
  assert result["error"] < 1e-2
  assert result["epsilon_kind"] == ("proved" if private else "none")
  assert not private or 2.5 < result["epsilon"] <= 3.0


def mirrored():
  """Other data than digits, of their shape."""
  return tuple(dataclasses.replace(one, x=one.x[:, ::-1]) for one in data.load("digits"))


@pytest.mark.slow
def test_p42_weights_that_are_asked_in_secret_know_what_they_began_from(tmp_path, tenseal):
  first = fields.replace(
    _MODEL["task.train"], "data.name", "tests.runs.test_secure:mirrored"
  )
  loop.train(first, tmp_path / "first")
  begun = {"task.train.pretrained": str(tmp_path / "first" / "params.npz")}
  config = _point(task={"name": "infer", "num_images": 2}, **_MODEL, **begun)
  loop.train(config, tmp_path / "asked")
  path, train = str(tmp_path / "asked" / "secure.npz"), data.load("digits")[0]
  known = saved.pretrained_on(path, "elsewhere", train.subset(slice(0, 9)))
  assert known == ["digits", "tests.runs.test_secure:mirrored"]


_TRAIN = {"name": "train", "dataset": "digits", "hidden": (4,), "epochs": 1}
_TRAIN |= {"batch_size": 64, "learning_rate": 0.25, "num_predicted": 30}


@pytest.mark.cases(long=["relu-sigmoid"])
@pytest.mark.parametrize(
  ("activation", "output"), [("relu", "sigmoid"), ("square", "linear")]
)
def test_training_on_shares_is_that_in_the_clear(tmp_path, activation, output, secure):
  rate = 0.25 if output == "sigmoid" else 2**-12
  task = _TRAIN | {"activation": activation, "output": output, "learning_rate": rate}
  result = loop.train(_point(task=task), tmp_path)
  assert result["error"] < 5e-3 and result["num_steps"] == 1437 // 64
  assert abs(result["test_accuracy"] - result["plain_accuracy"]) < 0.07
  assert result["bytes"] == result["bytes_between_parties"] + result["bytes_dealt"]


def test_an_item_that_a_computation_refuses_has_the_name_of_its_flag():
  with refuses("config.task.hidden[1]", value=0):
    fields.override(SecureConfig(task="train"), "task.hidden", "(4, 0)")


def test_training_on_shares_goes_on_where_it_stopped(tmp_path, monkeypatch, secure):
  stop_after(monkeypatch, 1)
  config = _point(task=_TRAIN)
  with pytest.raises(loop.Interrupted, match="step 1"):
    loop.train(config, tmp_path)
  assert loop.train(config, tmp_path)["error"] < 5e-3


_NOISY = {"name": "noisy_model", "epsilon": 8.0, "num_steps": 15, "l2_penalty": 0.5}


def test_a_noisy_model_goes_on_where_it_stopped_and_is_charged_once(
  tmp_path, monkeypatch, secure
):
  stop_after(monkeypatch, 1)
  config = _point(task=_NOISY)
  with pytest.raises(loop.Interrupted, match="step 1"):
    loop.train(config, tmp_path)
  result = loop.train(config, tmp_path)
  assert set(writers.RESULT_KEYS) <= set(result)
  assert (result["epsilon_kind"], result["neighboring_relation"]) == (
    "proved",
    "replace_one",
  )
  assert 7.9 < result["epsilon"] <= 8.0
  assert len(result["ledger"]["charges"]) == 1
  assert "one party's is counted" in result["privacy_statement"].replace("\n", " ")
  # Two parties' noise on each of 31 weights, and nothing finer than the grid.
  assert 1.5 < result["error"] / result["noise_std"] < 7
  with np.load(tmp_path / "secure.npz") as held:
    units = held["weights"] * 2.0**18
  np.testing.assert_array_equal(units, np.rint(units))


_COLUMNS = {"name": "columns", "epsilon": 8.0, "num_steps": 15, "l2_penalty": 0.5}


def test_columns_of_two_parties_belong_to_one_person(tmp_path, secure, intersection):
  config = _point(task={**_COLUMNS, "shared": 0.6, "first_columns": 7})
  whole = noisy_model.NoisyModelTask.load(config.task)
  aligned = config.task.load()
  clipped = aligned_columns.clip_apart(
    np.split(whole.x, [7], axis=1), 3.0, frac_bits=config.task.frac_bits
  )
  known = {row.tobytes(): label for row, label in zip(clipped, whole.y[:, 0])}
  # Each party's part is within its share of the norm, whatever the other one holds.
  for part, share in zip(np.split(aligned.rows.x, [7], axis=1), (7 / 30, 23 / 30)):
    assert np.linalg.norm(part, axis=1).max() <= 3.0 * np.sqrt(share)
  assert len(aligned.rows.x) == int(0.6 * len(whole.x))
  assert sum(aligned.held) == len(whole.x) + len(aligned.rows.x)
  # Clipping whole rows, which no party could, changes none.
  again = output_noise.bounded_rows(aligned.rows.x, 3.0, frac_bits=config.task.frac_bits)
  np.testing.assert_array_equal(again, aligned.rows.x)
  # A row of two people would be none of the table's.
  found = [known[row.tobytes()] for row in aligned.rows.x]
  np.testing.assert_array_equal(found, aligned.rows.y[:, 0])
  result = loop.train(config, tmp_path, data=aligned)
  assert result["columns"] == [7, 23] and result["shared_people"] == len(aligned.rows.x)
  assert result["epsilon"] <= 8.0 and result["epsilon_kind"] == "proved"
  assert "who is held by both" in result["hides"]
  assert "which people both of them hold" in result["privacy_statement"]


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"first_columns": 30}, "task.first_columns"),
    ({"first_columns": 0}, "config.task.first_columns"),
    ({"shared": 0.001}, "task.shared"),
    ({"shared": 1.0}, "config.task.shared"),
  ],
)
def test_columns_that_leave_a_party_nothing_are_refused(changes, field):
  with refuses(field) as caught:
    _point(task={**_COLUMNS, **changes}).task.load()
  assert len(str(caught.value).splitlines()) == 1


_TRANSFER = {"name": "transfer", "num_shared": 200, "num_steps": 120}


def test_a_norm_that_leaves_a_party_zeros_alone_is_refused():
  parts = [np.ones((2, 1)), np.ones((2, 3))]
  with refuses("feature_norm"):
    aligned_columns.clip_apart(parts, 1e-6, frac_bits=18)


@pytest.mark.cases(slow=["changes0"])
@pytest.mark.parametrize("changes", [{"learning_rate": 1e30}, {"alignment": 1e38}])
def test_a_transfer_that_diverges_is_no_result(changes, tmp_path, intersection):
  config = _point(task=_TRANSFER | changes | {"num_steps": 3})
  with refuses("task.learning_rate"):
    loop.train(config, tmp_path)


@pytest.mark.slow
def test_labels_of_another_party_teach_and_are_told(tmp_path, monkeypatch, intersection):
  config = _point(task=_TRANSFER)
  stop_after(monkeypatch, 1)
  with pytest.raises(loop.Interrupted, match="step 1"):
    loop.train(config, tmp_path / "stopped")
  result = loop.train(config, tmp_path / "stopped")
  monkeypatch.undo()
  whole = loop.train(config, tmp_path / "whole")
  for name in ("test_accuracy", "accuracy_alone", "labels_read", "bytes"):
    assert result[name] == whole[name]
  assert result["test_accuracy"] > result["accuracy_alone"] + 0.1
  # By the message alone. Ten classes: guesses would be right for one label in ten.
  assert result["labels_read"] > 0.9
  assert result["epsilon_kind"] == "none" and "no epsilon" in result["hides"]


def test_shared_rows_of_both_parties_are_of_one_person(intersection):
  config = _point(task=_TRANSFER)
  halves = config.task.load()
  keys = run_keys.RunKeys(jax.random.key(0), jax.random.key(1), jax.random.key(2), 3, 4)
  batch = shared_people.divide(config.task, halves, keys.order)[0]
  known = {
    left.tobytes() + right.tobytes(): y
    for left, right, y in zip(halves.source_x, halves.target_x, halves.y)
  }
  of_shared = batch.source_shared
  rows = zip(batch.source_x[of_shared], batch.target_shared_x, batch.source_y[of_shared])
  # Halves of two people would be no image of the data set.
  for left, right, y in rows:
    assert known[np.asarray(left).tobytes() + np.asarray(right).tobytes()] == y
  assert (len(batch.source_x), len(of_shared), len(batch.target_x)) == (900, 200, 20)


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"num_source": 1430}, "task.num_source"),
    (
      {"num_labelled": 2000},
      "task.num_labelled",
    ),
  ],
)
def test_more_people_than_the_data_hold_are_refused(changes, field, intersection):
  config = _point(task=_TRANSFER | changes)
  with refuses(field):
    shared_people.divide(config.task, config.task.load(), 0)


@pytest.mark.parametrize("task", ["noisy_model", "columns", "transfer"])
def test_a_missing_extra_is_named_before_the_first_row(task, tmp_path, monkeypatch, secure):
  def library():
    raise UserError("not installed; pip install -e '.[secure]'")

  monkeypatch.setattr(pkgutil.resolve_name(TASKS[task]), "needs", (library,))
  with pytest.raises(UserError, match=r"\.\[secure\]"):
    sweep.run(None, tmp_path / "run", SecureConfig(task=task))
  assert not (tmp_path / "run").exists()


def test_a_noisy_model_that_is_opened_again_is_opened_with_the_same_noise(secure):
  config = _point(task=_NOISY | {"num_steps": 2})
  rows = noisy_model.NoisyModelTask.load(config.task)
  mechanism = noisy_model.mechanism_of(config.task, rows)
  work = noisy_model._training(mechanism, rows)
  trained, _ = work.step(work.init(), 0)
  # The system's own secrets would agree on one of 31 whole numbers in one run of hundreds.
  fixed = np.arange(8, dtype=np.uint64).reshape(2, 4)
  opening = noisy_model._release(mechanism, trained | {"secret": fixed})
  first, again = (opening.step(opening.init(), 0)[0]["weights"] for _ in range(2))
  np.testing.assert_array_equal(first, again)
  other = noisy_model._release(mechanism, trained | {"secret": fixed + 8})
  assert (other.step(other.init(), 0)[0]["weights"] != first).all()
  assert not np.array_equal(work.init()["secret"], work.init()["secret"])


@pytest.mark.slow
def test_steps_that_run_again_from_an_older_checkpoint_open_the_same_model(
  tmp_path, monkeypatch, secure
):
  # Other roundings under the same noise: the difference of two openings would have no noise.
  config = _point(task=_NOISY)
  opened = []
  release = OutputNoise.release

  def stopped(*args, **kwargs):
    opened.append(release(*args, **kwargs))
    raise KeyboardInterrupt

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(OutputNoise, "release", stopped)
    loop.train(config, tmp_path)
  steps = sorted((tmp_path / "checkpoints").glob("[0-9]*"))
  assert [path.name for path in steps] == ["0.npz", "2.npz"]
  steps[-1].unlink()
  assert len(loop.train(config, tmp_path)["ledger"]["charges"]) == 1
  with np.load(tmp_path / "secure.npz") as held:
    for weights in opened:
      np.testing.assert_array_equal(weights, held["weights"])


def test_ckks_adds_fractions_and_bfv_integers(tmp_path, tenseal):
  for name, most in (("ckks", 1e-6), ("bfv", 0)):
    result = loop.train(_point(**{"task.protocol": name}, **_SUM), tmp_path / name)
    assert result["error"] <= most and result["method"] == name


@pytest.mark.slow
def test_a_table_resumes_and_keeps_failures_as_rows(tmp_path, monkeypatch):
  small = {"task.protocol": "plain"}
  rows = {"one": small, "two": {"task.protocol": {"name": "plain", "bits": 64}}}
  rows["cannot"] = {"task.protocol": "additive_servers"}

  def refused(*_):
    raise UserError("two are left", field="min_survivors", value=4)

  monkeypatch.setattr(AdditiveServers, "sum", refused)
  base = fields.replace_all(SecureConfig(), _SUM)
  named = [(label, fields.replace_all(base, changes)) for label, changes in rows.items()]
  found = sweep.run(named, tmp_path)
  assert [row["status"] for row in found] == ["done", "done", "failed"]
  assert "min_survivors=4" in found[2]["error"]
  results = sorted(tmp_path.glob("points/*/result.json"))
  before = [path.stat().st_mtime_ns for path in results]
  sweep.run(named, tmp_path)
  assert before == [path.stat().st_mtime_ns for path in results] and len(before) == 2
  text = (tmp_path / "secure.md").read_text()
  assert "| one | sum | plain | 4 clients x 20 entries |" in text
  assert (tmp_path / "secure.png").stat().st_size > 5000
  assert "release nothing" in writers.read_json(tmp_path / "sweep.json")["statement"]


# --- what is refused


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"task.protocol": "zip"}, "config.task.protocol"),
    ({"task": "regress", "task.protocol": "plain"}, "config.task.protocol"),
    ({"task.train.num_steps": 3}, "config.task.train.num_steps"),
    ({"task": "infer"}, "task.train.model.options.activation"),
    ({"task.entry_bits": 40}, "task.entry_bits"),
    ({"task.silent": 10}, "config.task.silent"),
    ({"task.silent": 9}, "task.silent"),
    ({"task.protocol.min_survivors": 11}, "task.protocol.min_survivors"),
    ({"task.protocol": "additive_sharing", "task.silent": 1}, "task.silent"),
    ({"task.protocol": "committee", "task.num_clients": 3}, "task.protocol.num_members"),
    # Two of the five members may be silent, and a fifth of the clients of SecAgg+.
    ({"task.protocol": "committee", "task.silent": 3}, "task.silent"),
    ({"task.protocol": "secagg_plus", "task.silent": 3}, "task.silent"),
    ({"task.protocol": {"name": "secagg", "signed": True}}, "task.protocol.min_survivors"),
    # Bounds of the protocols and of the mechanism, not of configs in general.
    ({"task.num_clients": 10_001}, "config.task.num_clients"),
    ({"task": {"name": "noisy_model", "num_steps": 10**7}}, "config.task.num_steps"),
    ({"task": {"name": "regress", "table": "wine"}}, "config.task.table"),
    ({"seed": -1}, "seed"),
    ({"task": {"name": "transfer", "num_shared": 901}}, "config.task.num_shared"),
    ({"task": {"name": "transfer", "alignment": 0.0}}, "config.task.alignment"),
    ({"task": {"name": "transfer", "alignment": 1e39}}, "config.task.alignment"),
    ({"task": {"name": "noisy_model", "l2_penalty": 0.0}}, "config.task.l2_penalty"),
    ({"task": {"name": "noisy_model", "dataset": "mnist"}}, "config.task.dataset"),
  ],
)
def test_a_mistake_is_one_line_before_anything_runs(changes, field):
  with refuses(field) as caught:
    Runs(None, fields.replace_all(SecureConfig(), changes))
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    (
      {"task.train.model.options": {"activation": "square", "features": (3, 3)}},
      "task.train.model.options.features",
    ),
    (
      {"task.train.model.name": "linear", "task.train.model.options": {}},
      "task.train.model.name",
    ),
    ({"task.train.audit": "canaries"}, "task.train.audit"),
    ({"task.train.seed": 3}, "task.train.seed"),
  ],
)
def test_a_model_that_no_ciphertext_is_put_through(changes, field):
  with refuses(field):
    _point(task="infer", **_MODEL, **changes)


@pytest.mark.parametrize(
  ("task", "field"),
  [
    ({"name": "regress", "num_features": 20}, "task.num_features"),
    (
      {"name": "regress", "num_predicted": 9000},
      "task.num_predicted",
    ),
    ({"name": "regress", "most_refreshes": 0}, "task.most_refreshes"),
    ({"name": "train", "batch_size": 512}, "task.batch_size"),
    (_TRAIN | {"activation": "square", "output": "linear"}, "task.learning_rate"),
    ({"name": "train", "learning_rate": 0.3}, "task.learning_rate"),
    ({"name": "infer", "num_images": 9000}, "task.num_images"),
    (
      {"name": "noisy_model", "learning_rate": 0.3},
      "task.learning_rate",
    ),
    ({"name": "noisy_model", "learning_rate": 457 / 512}, "task.learning_rate"),
  ],
)
def test_what_the_data_cannot_give_leaves_no_folder(tmp_path, task, field):
  model = _MODEL if task["name"] == "infer" else {}
  with refuses(field):
    loop.train(_point(task=task, **model), tmp_path / "run")
  assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("name", TASKS)
def test_every_field_of_a_task_is_read(name):
  kind = pkgutil.resolve_name(TASKS[name])
  # What a task has from another one is read where the other one's is.
  modules = {each.__module__ for each in kind.__mro__ if issubclass(each, SecureTask)}
  source = "".join(inspect.getsource(sys.modules[module]) for module in modules)
  # Helpers of a task's module are given the task.
  unread = [
    f.name
    for f in dataclasses.fields(kind)
    if not re.search(rf"\b(self|task)\.{f.name}\b", source)
  ]
  assert unread == []


def test_the_same_vectors_whatever_the_protocol():
  """Rows of a table are compared on equal clients."""
  random = run_keys.draw(0, noise_seed=0)
  plain, masked = (
    vector_sums.clients_vectors(
      fields.replace(SecureConfig(), "task.protocol", name).task, random.order
    )[3]
    for name in ("plain", "secagg")
  )
  np.testing.assert_array_equal(plain, masked)
