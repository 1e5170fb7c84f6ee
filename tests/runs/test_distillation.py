"""A run with a teacher and a student: its guarantee, resuming, refusals, keys of the result."""

import numpy as np
import pytest

from dpjax.accounting import Ledger
from dpjax.data import from_arrays
from dpjax.experiments.config.sections import ExamplesConfig
from dpjax.experiments.kinds import distillation
from dpjax.experiments.kinds.distillation import (
  DistillationConfig,
  PublicImages,
)
from dpjax.experiments.run import loop, run_keys
from dpjax.zoo import recipes
from tests.refuses import refuses
from tests.runs import small_configs


@pytest.fixture(scope="module")
def sides():
  return small_configs.halves((600, 200))


def _config(**changes):
  settings = {
    "num_pool": 100,
    "pool_is_public": True,
    "teacher_hidden": 16,
    "student_hidden": 4,
    "batch_size": 100,
    "epochs": 5,
    "eval_every": 10,
    "method": PublicImages(student_batch=32),
    "student_rate": 0.02,
  }
  settings |= changes
  if settings.get("method") == "joint":
    settings |= {"student_rate": 0.5}
    del settings["pool_is_public"]
  return DistillationConfig(**settings)


def _run(config, sides):
  return distillation._Run(config, *sides, run_keys.draw(0, noise_seed=0))


@pytest.mark.cases(long=["joint"], slow=...)
@pytest.mark.parametrize("method", ["public", "joint"])
def test_the_epsilon_is_that_of_dp_sgd_and_both_learn(method, sides, tmp_path):
  config = _config(method=method, noise_seed=0)
  whole = loop.train(config, tmp_path / "whole", data=sides)
  # These arrays are of no published data set: that the pool is public is our word.
  assert len(whole["failed_assumptions"]) == (2 if method == "public" else 1)
  assert 2.9 < whole["epsilon"] <= 3.0
  assert whole["task"] == "distillation" and whole["method"] == method
  assert whole["test_accuracy"] > 0.9 and whole["teacher_accuracy"] > 0.9
  assert Ledger.from_json(whole["ledger"]).num_steps == whole["num_steps"] == 30
  # The plan of plain DP-SGD with the same numbers: the student adds nothing.
  assert whole["epsilon"] == pytest.approx(_run(config, sides).plan.epsilon())
  words = " ".join(whole["privacy_statement"].split())
  said = {"public": "100 images that are taken as public", "joint": "one event for both"}
  assert said[method] in words
  with np.load(tmp_path / "whole" / "params.npz") as params:
    assert {name.split("/")[0] for name in params} == {"teacher", "student"}


@pytest.mark.slow
def test_the_student_of_public_images_follows_from_the_teacher_and_the_pool(sides):
  """No private record: the same teacher gives the same student, bit for bit; and the labels of
  the pool are not read."""
  train, public = sides
  config = _config(method=PublicImages(student_updates=2, student_batch=32))
  run = _run(config, sides)
  relabelled = from_arrays(public.x, 1 - public.y, num_classes=2, nominal_size=600)
  other = _run(config, (train, relabelled))
  state = run.first()
  batch = next(run.phase().draws(0))
  one, _ = run.step(state, batch)
  two, _ = other.step(other.first(), batch)
  for key in one.student["params"]["Dense_0"]:
    found = (np.asarray(part.student["params"]["Dense_0"][key]) for part in (one, two))
    np.testing.assert_array_equal(*found)
  assert int(one.student_step) == config.method.student_updates
  assert run.plan.spent(one.teacher).steps == 1
  # It does read the images of the pool: without this the test above could not fail.
  darker = from_arrays(public.x * 0.5, public.y, num_classes=2, nominal_size=600)
  third, _ = (darkened := _run(config, (train, darker))).step(darkened.first(), batch)
  assert np.any(
    np.asarray(third.student["params"]["Dense_0"]["kernel"])
    != np.asarray(one.student["params"]["Dense_0"]["kernel"])
  )


@pytest.mark.slow
def test_a_student_that_reads_private_images_is_refused(sides, monkeypatch):
  """The library sees an array that was not declared."""
  run = _run(_config(), sides)
  secret = np.asarray(sides[0].x[:8])
  leaking = lambda self, student, teacher, x: type(self)._honest(
    self, student, teacher, secret
  )
  monkeypatch.setattr(
    distillation._Run, "_honest", distillation._Run._imitation, raising=False
  )
  monkeypatch.setattr(distillation._Run, "_imitation", leaking)
  leak = _run(_config(), sides)
  with refuses("student_loss"):
    leak.first()
  assert isinstance(run.first(), recipes.distillation.__globals__["DistillationState"])


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"method": "both"}, "config.method"),
    ({"method": {"name": "joint", "student_updates": 3}}, "config.method.student_updates"),
    ({"epsilon": 0.0}, "epsilon"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": 1e-320}, "temperature"),
    ({"temperature": 1e30}, "temperature"),
    ({"student_rate": 1e30}, "student_rate"),
    ({"teacher_rate": 1e-320}, "teacher_rate"),
    ({"data": ExamplesConfig(data_dir="/nowhere")}, "data.data_dir"),
    ({"student_hidden": 0}, "student_hidden"),
    ({"num_pool": 0}, "num_pool"),
    ({"delta": 1.0}, "delta"),
  ],
)
def test_it_refuses_in_one_line(changes, field):
  with refuses(field) as caught:
    distillation.Distillation(_config(**changes)).check()
  assert "\n" not in str(caught.value)


def test_it_refuses_what_only_the_data_show(sides, tmp_path):
  rows = from_arrays(np.zeros((4, 3), np.float32), [0, 1, 0, 1], num_classes=2)
  secret = from_arrays(sides[0].x, sides[0].y, num_classes=2)
  cases = [
    (_config(), (rows, rows), "needs images"),
    (_config(num_pool=200), sides, "num_pool=200: must leave some of the 200"),
    (_config(batch_size=601), sides, "batch_size=601"),
    (_config(epsilon_budget=1.0), sides, "^epsilon_budget=1.0: the budget"),
    (_config(), (secret, sides[1]), "^data.num_examples=None: "),
  ]
  for number, (config, data, match) in enumerate(cases):
    with pytest.raises(ValueError, match=match) as caught:
      loop.train(config, tmp_path / str(number), data=data)
    assert "\n" not in str(caught.value)
