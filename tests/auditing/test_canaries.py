"""Canaries: fair coins, one record for each, and scores that tell them apart."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import auditing, data, losses
from dpjax.auditing.canaries import KINDS, Canaries, gradient_scores, loss_scores
from dpjax.auditing.scores import CanaryScores
from dpjax.experiments.kinds import audits
from tests.refuses import refuses


def _train(n=300, classes=3):
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(n, 4)), rng.integers(0, classes, n)
  return data.from_arrays(x, y, num_classes=classes)


def _insert(train=None, **options):
  return auditing.insert_canaries(
    train or _train(), **{"num_canaries": 100, "seed": 0, **options}
  )


def test_each_coin_decides_one_record_and_nobody_is_there_twice():
  train = _train()
  mixed, canaries = _insert(train)
  kept = {row.tobytes() for row in mixed.x}
  assert len(kept) == len(mixed) == 200 + canaries.included.sum()
  for row, included in zip(canaries.examples.x, canaries.included):
    assert (row.tobytes() in kept) == included


def test_replace_one_keeps_the_size_and_the_original_of_a_losing_coin():
  train = _train()
  mixed, canaries = _insert(train, neighboring_relation="replace_one")
  assert len(mixed) == len(train)
  changed = mixed.y != train.y
  assert changed.sum() == canaries.included.sum()
  np.testing.assert_array_equal(mixed.x, train.x)


def test_mislabelled_canaries_all_have_a_wrong_label():
  train = _train()
  labels = {row.tobytes(): y for row, y in zip(train.x, train.y)}
  _, canaries = _insert(train)
  assert all(
    labels[row.tobytes()] != y for row, y in zip(canaries.examples.x, canaries.examples.y)
  )


def test_only_data_sets_take_canaries():
  with refuses("train"):
    auditing.insert_canaries(np.zeros((200, 4)), num_canaries=10, seed=0)


def test_random_canaries_have_a_public_range():
  train = _train()
  _, canaries = _insert(train, kind="random")
  assert 0 <= canaries.examples.x.min() < 0.01 and 0.99 < canaries.examples.x.max() <= 1
  x, y = np.arange(80, dtype=np.int32).reshape(20, 4), np.zeros(20, int)
  tokens = data.from_arrays(x, y, num_classes=1, vocab_size=90)
  _, canaries = _insert(tokens, kind="random", num_canaries=10)
  assert canaries.examples.x.dtype == np.int32
  with refuses("kind"):
    _insert(tokens, num_canaries=10)
  with refuses("kind", value="random"):
    _insert(data.from_arrays(x, y, num_classes=1), kind="random", num_canaries=10)


@pytest.mark.parametrize("relation", ["replace_one", "replace_special"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_record_changes_one_record_of_the_data_with_canaries(kind, relation):
  """With the range of the rows an outlier among them moved every random canary."""
  train = _train()
  for row in range(0, 300, 7):
    x, y = train.x.copy(), train.y.copy()
    x[row], y[row] = 1e6, (y[row] + 1) % 3
    other = dataclasses.replace(train, x=x, y=y)
    mixed, changed = (
      _insert(part, kind=kind, neighboring_relation=relation)[0] for part in (train, other)
    )
    there = np.ones(300, bool) if mixed.present is None else mixed.present & changed.present
    moved = (mixed.x != changed.x).any(axis=1) | (mixed.y != changed.y)
    assert (moved & there).sum() <= 1


def test_coins_are_fair_independent_of_the_rows_and_a_function_of_the_seed():
  coins = np.array([_insert(seed=seed)[1].included for seed in range(200)])
  assert abs(coins.mean() - 0.5) < 4 * 0.5 / np.sqrt(coins.size)
  per_canary = coins.mean(axis=0)  # by rank of the row: early rows no likelier than late
  assert abs(np.corrcoef(per_canary, np.arange(100))[0, 1]) < 0.4
  np.testing.assert_array_equal(_insert(seed=7)[1].included, coins[7])


def test_scores_tell_what_was_learnt_from_what_was_not():
  """A linear model fitted to the data without noise: both scores find its canaries."""
  train = _train(n=60, classes=2)
  mixed, canaries = _insert(train, num_canaries=40)
  apply = lambda params, x: x.reshape(len(x), -1) @ params
  loss_fn = losses.softmax_cross_entropy(apply)
  before = jnp.zeros((4, 2))
  features = mixed.x.T @ (np.eye(2)[mixed.y] - 0.5)  # one full-batch gradient step
  after = before + jnp.asarray(0.3 * features, jnp.float32)
  for score in (loss_scores, gradient_scores):
    found = score(loss_fn, before, after, canaries)
    assert found.inside.size == canaries.included.sum()
    assert found.inside.mean() > found.outside.mean() + 0.3 * found.outside.std()


def test_a_diverged_model_gives_scores_and_not_a_crash():
  _, canaries = _insert()
  loss_fn = losses.softmax_cross_entropy(lambda params, x: x @ params)
  for score in (loss_scores, gradient_scores):
    found = score(loss_fn, jnp.zeros((4, 3)), jnp.full((4, 3), jnp.nan), canaries)
    assert auditing.one_run(found, delta=1e-5) == 0


@pytest.mark.parametrize(
  ("options", "field"),
  [
    ({"num_canaries": 1}, "num_canaries"),
    ({"num_canaries": 301}, "num_canaries"),
    ({"kind": "mislabeled"}, "kind"),
    ({"seed": -1}, "seed"),
    ({"neighboring_relation": "swap"}, "neighboring_relation"),
  ],
)
def test_bad_input_is_one_line(options, field):
  with refuses(field) as caught:
    _insert(**options)
  assert "\n" not in str(caught.value)


def test_one_sided_coins_are_refused():
  canaries = Canaries(None, np.ones(3, bool), "random")  # type: ignore[arg-type]
  with refuses("canaries"):
    CanaryScores.separate(np.zeros(3), canaries.included)


def test_coins_on_one_side_are_refused_before_anything_trains():
  for seed, coins in enumerate(([True, True], [False, False])):
    with refuses("audit.num_canaries"):
      audits.check_coins(np.array(coins), seed)
  audits.check_coins(np.array([True, False]), 0)


def test_records_that_are_empty_already_are_refused():
  """A canary in their place would be a record more than the plan was made for."""
  train = dataclasses.replace(_train(), present=np.arange(300) % 2 == 0)
  with refuses("train"):
    _insert(train, neighboring_relation="replace_special")
