"""Who holds what: nothing lost or given twice, the laws as published, one line when wrong."""

import dataclasses
import functools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from dpjax import data
from dpjax.columns import Columns
from dpjax.data import Federation, partition
from tests.refuses import refuses

PARTITIONS = {
  "iid": partition.iid,
  "dirichlet": functools.partial(partition.dirichlet, alpha=0.5, min_size=0),
  "dirichlet_hsu": functools.partial(partition.dirichlet_hsu, alpha=0.5),
  "shards": functools.partial(partition.shards, shards_per_client=1),
  "quantity_skew": functools.partial(partition.quantity_skew, alpha=0.3),
  "power_law": functools.partial(partition.power_law, exponent=1.5),
}
ALPHAS = st.sampled_from([1e-12, 1e-3, 0.1, 1.0, 1e6, np.inf])


def balanced(num_classes=10, each=100):
  return np.random.RandomState(0).permutation(np.repeat(np.arange(num_classes), each))


def dataset(labels, num_classes=10):
  x = np.arange(2.0 * len(labels)).reshape(-1, 2)
  return data.from_arrays(x, labels, num_classes=num_classes)


def assert_exactly_once(parts, num_examples, num_clients):
  assert len(parts) == num_clients
  assert sorted(np.concatenate(parts).tolist()) == list(range(num_examples))


# --- for every partition


@hypothesis.given(
  st.sampled_from(sorted(PARTITIONS)),
  st.lists(st.integers(-3, 3), min_size=1, max_size=60),
  st.integers(1, 12),
  st.integers(0, 2**64),
)
@hypothesis.settings(max_examples=200)
def test_every_example_goes_to_exactly_one_client(name, labels, num_clients, seed):
  hypothesis.assume(name != "shards" or len(labels) >= num_clients)
  parts = PARTITIONS[name](labels, num_clients=num_clients, seed=seed)
  assert_exactly_once(parts, len(labels), num_clients)


@hypothesis.given(ALPHAS, st.integers(1, 9), st.integers(0, 99))
@hypothesis.settings(max_examples=60)
def test_any_alpha_works(alpha, num_clients, seed):
  labels = balanced(4, 9)
  common = dict(num_clients=num_clients, alpha=alpha, seed=seed)
  for make in (partition.dirichlet_hsu, partition.quantity_skew):
    assert_exactly_once(make(labels, **common), 36, num_clients)
  assert_exactly_once(partition.dirichlet(labels, min_size=0, **common), 36, num_clients)


@pytest.mark.parametrize("name", PARTITIONS)
def test_a_pure_function_of_labels_and_seed(name):
  make = functools.partial(PARTITIONS[name], balanced(), num_clients=7)
  first, again, other = make(seed=3), make(seed=3), make(seed=4)
  assert all(np.array_equal(a, b) for a, b in zip(first, again))
  assert not all(np.array_equal(a, b) for a, b in zip(first, other))


@pytest.mark.parametrize("make", [partition.dirichlet, partition.dirichlet_hsu])
def test_infinite_alpha_is_iid(make):
  labels = balanced()
  parts = make(labels, num_clients=7, alpha=np.inf, seed=5)
  same = partition.iid(labels, num_clients=7, seed=5)
  assert all(np.array_equal(a, b) for a, b in zip(parts, same))


# --- the laws


def test_dirichlet_shares_of_a_class_follow_the_beta_law():
  """Two clients, the first class dealt: client 0's share is Beta(alpha, alpha)."""
  labels = np.repeat([0, 1], 2_000)
  counts = []
  for seed in range(300):
    parts = partition.dirichlet(labels, num_clients=2, alpha=0.5, seed=seed, min_size=0)
    counts.append(np.count_nonzero(parts[0] < 2_000) / 2_000)
  assert stats.kstest(counts, stats.beta(0.5, 0.5).cdf).pvalue > 0.01
  assert stats.kstest(counts, stats.beta(1.0, 1.0).cdf).pvalue < 1e-4


def test_hsu_counts_of_a_client_follow_the_beta_binomial_law():
  """Two equal classes, neither used up: the first client's count is beta-binomial."""
  labels = np.repeat([0, 1], 200)
  counts = np.array(
    [
      np.count_nonzero(
        partition.dirichlet_hsu(labels, num_clients=4, alpha=1.0, seed=seed)[0] < 200
      )
      for seed in range(400)
    ]
  )
  fits = lambda a: stats.kstest(counts + 0.0, stats.betabinom(100, a, a).cdf).statistic
  assert fits(0.5) < 0.08 < 0.1 < fits(1.0)  # alpha * share of the class = 1.0 * 0.5


def test_hsu_class_shares_follow_the_labels_of_all():
  labels = np.repeat([0, 1], [900, 100])
  parts = partition.dirichlet_hsu(labels, num_clients=100, alpha=1e6, seed=0)
  rare = np.array([np.count_nonzero(part >= 900) for part in parts])
  assert abs(rare[:50].mean() - 1.0) < 0.5 and rare.max() <= 6


def test_shards_hold_few_labels_and_are_contiguous():
  labels = balanced(10, 60)
  parts = partition.shards(labels, num_clients=10, seed=0)
  assert [len(part) for part in parts] == [60] * 10
  assert max(len(np.unique(labels[part])) for part in parts) == 2
  order = np.argsort(labels, kind="stable")
  rank = np.argsort(order)
  for part in parts:  # two runs of 30 in the sorted order
    runs = np.sort(rank[part]).reshape(2, 30)
    assert (np.diff(runs, axis=1) == 1).all() and (runs[:, 0] % 30 == 0).all()


def test_mcmahan_hundred_clients_have_two_shards_of_three_hundred():
  labels = np.random.RandomState(1).permutation(np.arange(60_000) % 10)
  parts = partition.shards(labels, num_clients=100, seed=0)
  assert {len(part) for part in parts} == {600}


def test_sizes_from_one_to_ten_thousand():
  labels = np.zeros(60_000, int)
  parts = partition.power_law(labels, num_clients=1_000, exponent=1.1, seed=0, min_size=1)
  sizes = np.array([len(part) for part in parts])
  assert sizes.min() >= 1 and sizes.max() > 9_000 and np.count_nonzero(sizes < 10) > 300
  skewed = partition.quantity_skew(labels, num_clients=1_000, alpha=0.1, seed=0)
  sizes = np.array([len(part) for part in skewed])
  assert sizes.min() == 0 and sizes.max() > 1_000


def test_min_size_is_kept():
  parts = partition.dirichlet(balanced(), num_clients=20, alpha=0.1, seed=0, min_size=10)
  assert min(map(len, parts)) >= 10
  parts = partition.quantity_skew(
    balanced(), num_clients=20, alpha=0.05, seed=0, min_size=3
  )
  assert min(map(len, parts)) >= 3


def test_heterogeneity_orders_the_partitions():
  labels = balanced(10, 600)
  number = lambda parts: partition.heterogeneity(
    np.stack([np.bincount(labels[rows], minlength=10) for rows in parts])
  )
  common = dict(num_clients=50, seed=0)
  like = number(partition.iid(labels, **common))
  milder, harsher = (
    number(partition.dirichlet(labels, alpha=alpha, **common)) for alpha in (0.5, 0.1)
  )
  two_labels = number(partition.shards(labels, **common))
  assert like < 0.15 < milder < harsher < 0.9
  assert 0.75 < two_labels <= 0.9  # 0.8 where the two shards differ, 0.9 where not


def test_heterogeneity_by_hand():
  """Overall shares (1/2, 1/2); the clients' (3/4, 1/4) and (0, 1); an empty one is left out."""
  histograms = np.array([[3, 1], [0, 2], [0, 0]])
  assert partition.heterogeneity(histograms) == pytest.approx((1 / 4 + 1 / 2) / 2)
  assert partition.heterogeneity(np.zeros((3, 2), int)) == 0


# --- the container


def test_a_federation_copies_nothing_and_gathers_when_asked():
  d = dataset(balanced())
  parts = partition.iid(d.y, num_clients=8, seed=0)
  fed = Federation(d, parts)
  assert fed.dataset is d and all(
    np.shares_memory(a, b) for a, b in zip(fed.indices, parts)
  )
  np.testing.assert_array_equal(fed.client(3).x, d.x[parts[3]])
  np.testing.assert_array_equal(fed.examples("3").y, d.y[parts[3]])
  assert fed.num_clients == 8 and len(fed) == 1_000 and fed.client_ids[7] == "7"
  assert fed.sizes.tolist() == [125] * 8
  with pytest.raises(ValueError, match="read-only"):
    fed.indices[0][0] = 1
  assert parts[0].flags.writeable  # the caller's own array is left alone


def test_ten_thousand_clients_most_of_them_empty():
  d = dataset(balanced())
  fed = Federation(d, partition.quantity_skew(d.y, num_clients=10_000, alpha=1, seed=0))
  assert fed.num_clients == 10_000 and len(fed) == 1_000 and fed.sizes.min() == 0
  empty = int(np.argmin(fed.sizes))
  assert len(fed.client(empty)) == 0
  assert fed.label_histograms().sum(axis=0).tolist() == [100] * 10


def test_select_keeps_ids_and_rows():
  fed = Federation(dataset([0, 1, 2, 3]), [[0], [1, 2], [3]], ["a", "b", "c"])
  part = fed.select(["c", 1])
  assert part.client_ids == ("c", "b") and len(part) == 3
  assert part.client("b").y.tolist() == [1, 2]


def test_feature_skew_is_affine_for_each_client_and_named():
  d = dataset(balanced())
  fed = Federation(d, partition.iid(d.y, num_clients=4, seed=0))
  skewed = partition.feature_skew(fed, seed=1)
  assert "synthetic" in skewed.dataset.name and skewed.client_ids == fed.client_ids
  for i in range(4):
    slope, offset = np.polyfit(fed.client(i).x[:, 0], skewed.client(i).x[:, 0], 1)
    assert 0.7 <= slope <= 1.3 and abs(offset) <= 0.31
    np.testing.assert_allclose(
      skewed.client(i).x, slope * fed.client(i).x + offset, atol=1e-2
    )
    np.testing.assert_array_equal(skewed.client(i).y, fed.client(i).y)
  np.testing.assert_array_equal(d.x, dataset(balanced()).x)  # the original is untouched


def test_feature_noise_grows_with_the_client():
  d = dataset(np.zeros(8_000, int))
  fed = Federation(d, np.split(np.arange(8_000), 4))
  skewed = partition.feature_skew(fed, seed=0, scale=0, shift=0, noise=2.0)
  added = [np.std(skewed.client(i).x - fed.client(i).x) for i in range(4)]
  np.testing.assert_allclose(added, [0.5, 1.0, 1.5, 2.0], rtol=0.05)


# --- what can be wrong


@pytest.mark.parametrize(
  ("indices", "ids", "field"),
  [
    ([[0], [0]], (), "indices"),
    ([[1, 1]], (), "indices"),
    ([[0], [4]], (), "indices"),
    ([[-1]], (), "indices"),
    ([], (), "indices"),
    ([[0.5]], (), "indices"),
    ([[[0]]], (), "indices"),
    ([[True]], (), "indices"),
    ([[0], [1]], ["a"], "client_ids"),
    ([[0], [1]], ["a", "a"], "client_ids"),
  ],
)
def test_a_wrong_federation(indices, ids, field):
  with refuses(field):
    Federation(dataset([0, 1, 2, 3]), indices, ids)


def test_swapped_and_missing_arguments_show_no_record():
  rows = dataset([0, 1, 2, 3])
  for make in (lambda: data.by_client(["a"] * 4, rows), lambda: Federation(rows.x, [[0]])):
    with refuses("dataset"):
      make()
  for ids in (None, 4):
    with refuses("client_ids", value=ids):
      data.by_client(rows, ids)
  with refuses("labels"):
    partition.iid(rows, num_clients=2, seed=0)


@pytest.mark.parametrize(
  ("client", "field"),
  [
    (2, "client"),
    (-1, "client"),
    (0.0, "client"),
    ("Macbth", "client"),
  ],
)
def test_an_unknown_client(client, field):
  fed = Federation(dataset([0, 1, 2, 3]), [[0], [1]], ["Macbeth", "Ross"])
  for ask in (fed.client, fed.examples, fed.position):
    with refuses(field):
      ask(client)


@pytest.mark.cases(long=[5])
@pytest.mark.parametrize(
  ("make", "arguments", "field"),
  [
    (partition.iid, dict(num_clients=0), "num_clients"),
    (partition.iid, dict(num_clients=2, seed=-1), "seed"),
    (partition.dirichlet, dict(num_clients=2, alpha=0), "alpha"),
    (partition.dirichlet, dict(num_clients=2, alpha=np.nan), "alpha"),
    (partition.dirichlet, dict(num_clients=101, alpha=1), "min_size"),
    (
      partition.dirichlet,
      dict(num_clients=50, alpha=1e-9, min_size=20),
      "min_size",
    ),
    (partition.dirichlet_hsu, dict(num_clients=2, alpha=-1), "alpha"),
    (partition.shards, dict(num_clients=501), "shards_per_client"),
    (partition.power_law, dict(num_clients=2, exponent=-1), "exponent"),
    (
      partition.quantity_skew,
      dict(num_clients=9, alpha=1, min_size=200),
      "min_size",
    ),
  ],
)
def test_wrong_arguments(make, arguments, field):
  with refuses(field):
    make(balanced(), **{"seed": 0, **arguments})


def test_tokens_have_no_style():
  tokens = data.from_arrays(np.array([[1, 2]]), [0], num_classes=1)
  with refuses("feature_skew"):
    partition.feature_skew(Federation(tokens, [[0]]), seed=0)


def test_styles_need_one_array():
  images = data.from_arrays(np.zeros((2, 3), np.float32), [0, 0], num_classes=1)
  columns = dataclasses.replace(images, x=Columns({"a": images.x}))
  with refuses("feature_skew"):
    partition.feature_skew(Federation(columns, [[0], [1]]), seed=0)
