"""A run of PATE: its guarantee, resuming, release mode, and what is kept from it."""

import dataclasses
import json
import math

import numpy as np
import pytest

from dpjax import accounting
from dpjax.accounting import Ledger, matrix
from dpjax.data import Interval, from_arrays
from dpjax.experiments.config import fields
from dpjax.experiments.config.sections import ExamplesConfig
from dpjax.experiments.kinds.pate import config as pate
from dpjax.experiments.kinds.pate import vote_costs
from dpjax.experiments.kinds.pate.config import ConfidentQueries, PateConfig, PublishedCost
from dpjax.experiments.run import loop, run_keys
from tests.refuses import refuses


@pytest.fixture(scope="module")
def sides():
  """Three clear classes, private and public."""
  rng = np.random.default_rng(0)
  parts = []
  for size in (300, 90):
    y = rng.integers(0, 3, size)
    x = np.eye(3, 6)[y] + 0.25 * rng.normal(size=(size, 6))
    shaped = x.astype(np.float32).reshape(size, 1, 6, 1)
    parts.append(from_arrays(shaped, y, num_classes=3, nominal_size=300))
  return tuple(parts)


def _config(**changes):
  return PateConfig(
    **{
      "num_teachers": 12,
      "teacher_capacity": 50,
      "num_pool": 60,
      "pool_is_public": True,
      "num_queries": 20,
      "num_components": 6,
      "eval_every": 10,
      "delta": 1e-5,
    }
    | changes
  )


def _run(config, sides, folder):
  return loop.train(config, folder, data=sides)


@pytest.fixture(scope="module")
def whole(sides, tmp_path_factory):
  folder = tmp_path_factory.mktemp("whole")
  return folder, _run(_config(data_dependent=True, noise_seed=0), sides, folder)


@pytest.mark.slow
def test_the_epsilon_is_that_of_the_noise_and_the_student_learns(whole):
  folder, result = whole
  config = _config(data_dependent=True)
  # That the pool is public is our word; the epsilon is proved under it.
  assert result["epsilon_kind"] == "claimed" and result["epsilon"] <= 8.0
  by_hand = accounting.epsilon(
    accounting.gaussian_event(result["answer_std"] / math.sqrt(2 * 20)), delta=1e-5
  )
  assert result["epsilon"] == pytest.approx(by_hand, rel=1e-6)
  ledger = Ledger.from_json(result["ledger"])
  assert ledger.num_steps == 20 and ledger.epsilon(1e-5) == result["epsilon"]
  assert result["test_accuracy"] > 0.9 and result["test_label_accuracy"] > 0.8
  assert "sqrt(2) in the" in result["privacy_statement"]
  assert result["not_private/epsilon_data_dependent"] > 0
  rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
  assert [row["step"] for row in rows] == [10, 20]
  assert rows[0]["epsilon"] < rows[1]["epsilon"]
  with np.load(folder / "params.npz") as released:
    # Labels, their spreading and the student leave; votes do not.
    assert {released[name].shape for name in released} == {(20,), (60,), (6, 3)}
  assert config.aggregate.std == result["answer_std"]


@pytest.mark.slow
def test_all_answers_are_charged_and_no_more_are_given(sides, tmp_path):
  config = _config(
    aggregator=ConfidentQueries(max_answers=4, threshold=6.0, check_std=30.0), std=1.0
  )
  result = _run(config, sides, tmp_path)
  assert result["num_answers"] == 4 < result["num_queries"]
  mechanism = config.aggregate
  event = mechanism.event(num_checks=20, most_answers=4)
  assert result["epsilon"] == pytest.approx(accounting.epsilon(event, delta=1e-5), rel=1e-9)
  # An answer that is never given costs as much: the sum does not follow from the votes.
  none = fields.replace(config, "aggregator.threshold", 1e9)
  assert vote_costs.guarantee_of(none, 300).curve(20) == pytest.approx(
    result["epsilon"], rel=1e-12
  )
  # After the first query all four answers are charged already.
  first = mechanism.event(num_checks=1, most_answers=1)
  assert vote_costs.guarantee_of(config, 300).curve(1) > accounting.epsilon(
    first, delta=1e-5
  )


@pytest.mark.slow
def test_an_empty_record_teaches_nobody(sides):
  config = _config(num_teachers=2, neighboring_relation="replace_one")
  private, public = (part.subset(slice(0, 90)) for part in sides)
  present = np.arange(90) != 7

  def counts(label, here):
    y = private.y.copy()
    y[7] = label
    data = dataclasses.replace(private, y=y, present=here)
    run = pate._Run(config, data, public, run_keys.draw(0))
    phase = run.votes_phase()
    state = phase.init()
    for piece in phase.draws(0):
      state, _ = phase.step(state, piece)
    return run.parts, state["counts"], run.not_private(state["counts"])

  (parts, votes, facts), (others, same, _) = (counts(label, present) for label in (0, 1))
  assert parts[7] == -1 and np.array_equal(parts[present], np.arange(90)[present] % 2)
  assert np.array_equal(parts, others) and np.array_equal(votes, same)
  assert facts["not_private/left_out"] == 0
  assert not np.array_equal(counts(0, None)[0], parts)


@pytest.mark.slow
def test_release_mode_writes_nothing_that_follows_from_the_votes(sides, tmp_path):
  results = [
    _run(_config(release=True, cost=PublishedCost(order=4.0)), sides, tmp_path / name)
    for name in ("one", "two")
  ]
  for result in results:
    assert not [name for name in result if name.startswith("not_private")]
    assert "256 bits" in result["privacy_statement"] and result["release"]
    assert result["accountant"] == "rdp" and result["epsilon_kind"] == "claimed"
    step = result["published_cost"]["rdp"] / vote_costs._COST_STEP
    assert step == round(step)
  # Keys of the operating system: no two releases agree.
  assert results[0]["published_cost"]["rdp"] != results[1]["published_cost"]["rdp"]
  # The published number is paid for: more than the labels alone, at the same accountant.
  alone = accounting.epsilon(
    matrix.join(vote_costs.step_events(_config())), delta=1e-5, accountant="rdp"
  )
  assert results[0]["epsilon"] > alone


def test_a_published_cost_has_the_noise_that_is_charged(sides):
  """Its spread over keys, relative to the smooth sensitivity by hand."""
  import jax

  from dpjax.accounting import votes

  config = _config(cost=PublishedCost(order=4.0))
  counts = np.array([[12, 0, 0]] * 19 + [[5, 4, 3]])
  std = config.aggregate.std
  local = sum(
    votes.votes_sensitivity(row, num_teachers=12, std=std, order=4.0) for row in counts
  )
  smooth = np.max(local * np.exp(-0.02 * np.arange(13)))
  drawn = [
    vote_costs.publish(config, config.cost, counts, jax.random.key(seed))["published_cost"][
      "rdp"
    ]
    for seed in range(60)
  ]
  wanted = smooth * config.cost.noise_in_sensitivities
  assert 0.7 * wanted < np.std(drawn) < 1.35 * wanted


@pytest.mark.parametrize(
  "changes, field",
  [
    ({"release": True, "data_dependent": True}, "data_dependent"),
    (
      {"aggregator": ConfidentQueries(max_answers=5), "cost": "published"},
      "cost",
    ),
    ({"cost": PublishedCost(beta=0.2)}, "cost.order"),
    # Its proof fails at so little noise, which is known before any teacher is trained.
    ({"cost": PublishedCost(), "std": 5.0}, "cost.order"),
    ({"num_queries": 61}, "num_queries"),
    ({"num_pool": 90}, "num_pool"),
    ({"num_teachers": 301}, "num_teachers"),
    ({"std": 3.0, "epsilon": 2.0}, "epsilon"),
    ({"neighboring_relation": "replace_special"}, "neighboring_relation"),
    ({"epsilon": math.nan}, "epsilon"),
    ({"epsilon_budget": 1.0}, "epsilon_budget"),
    ({"data": ExamplesConfig(data_dir="/nowhere")}, "data.data_dir"),
    ({"teacher_penalty": 1e-320}, "teacher_penalty"),
    # Noise of float32 would be infinite there, or 0.
    ({"std": 1e38}, "std"),
    ({"std": 1e-35}, "std"),
    (
      {"aggregator": ConfidentQueries(max_answers=5, check_std=1e38)},
      "aggregator.check_std",
    ),
    # Every part is padded to it.
    ({"teacher_capacity": 301}, "teacher_capacity"),
    (
      {"aggregator": ConfidentQueries(max_answers=21)},
      "aggregator.max_answers",
    ),
  ],
)
def test_what_a_run_refuses(sides, tmp_path, changes, field):
  with refuses(field):
    _run(_config(**changes), sides, tmp_path / "run")
  assert not (tmp_path / "run" / "config.json").exists()


def test_votes_are_of_classes(sides, tmp_path):
  target = Interval(0.0, 2.0)
  numbers = [
    dataclasses.replace(side, y=target.scale(side.y), target=target, num_classes=1)
    for side in sides
  ]
  with refuses("data.name"):
    _run(_config(), numbers, tmp_path / "run")
  assert not (tmp_path / "run").exists()
