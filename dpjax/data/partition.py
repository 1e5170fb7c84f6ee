"""Partitions of a labelled data set over clients, and how much clients differ.

A partition is a list of index arrays, one for each client, and a pure function of
(labels, seed): the same call gives the same clients on every machine and NumPy version. Every
example goes to exactly one client.

| partition        | what differs between clients            | source                       |
| ---------------- | --------------------------------------- | ---------------------------- |
| `iid`            | nothing but chance                      | McMahan et al. 2017          |
| `dirichlet`      | labels and sizes: Dir over CLIENTS      | Li et al. 2022 (NIID-Bench)  |
| `dirichlet_hsu`  | labels, sizes equal: Dir over CLASSES   | Hsu et al. 2019              |
| `shards`         | labels: a few classes each              | McMahan et al. 2017          |
| `quantity_skew`  | sizes: Dirichlet                        | Li et al. 2022               |
| `power_law`      | sizes: rank^-exponent                   |                              |
| `silos`          | sizes that you declare; labels          | a few holders, cross-silo    |
| `feature_skew`   | inputs, by a SYNTHETIC style per client | after Li et al. 2022         |

The two Dirichlet conventions share a name in the literature but are different distributions. The
same alpha gives more heterogeneous clients in one convention than in the other. So publications
should say which convention they use.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from dpjax import validate
from dpjax.data.federation import Federation
from dpjax.types import HostArray
from dpjax.validate import UserError

Indices = list[np.ndarray]  # one int64 array of row numbers for each client

# Below this alpha, logarithms of gamma variables would leave the range of floats.
_LEAST_ALPHA = 1e-300
_MAX_REDRAWS = 1_000


# --- differences between clients


def heterogeneity(histograms: np.ndarray) -> float:
  """Returns the mean total-variation distance of clients' label shares from the overall shares.

  The distance lies in [0, 1 - smallest overall share]; 0: all clients have the same shares.
  Each client that holds examples counts once, whatever its size. Small clients differ by chance,
  so compare with the value of an `iid` partition into as many clients.

  Args:
    histograms: class counts of the clients, [clients, classes].

  >>> heterogeneity(np.array([[2, 0], [0, 2]])), heterogeneity(np.array([[1, 1], [2, 2]]))
  (0.5, 0.0)
  """
  held = histograms[histograms.sum(axis=1) > 0].astype(np.float64)
  if not len(held):
    return 0.0
  share = held / held.sum(axis=1, keepdims=True)  # [clients, classes]
  overall = held.sum(axis=0) / held.sum()
  return float(np.abs(share - overall).sum(axis=1).mean() / 2)


# --- partitions


def iid(labels: HostArray, *, num_clients: int, seed: int) -> Indices:
  """Cuts a random permutation of the rows into equal parts (sizes differ by at most one).

  >>> [len(client) for client in iid(np.zeros(7), num_clients=3, seed=0)]
  [3, 2, 2]
  """
  labels, random = _start(labels, num_clients, seed)
  return np.array_split(random.permutation(len(labels)), num_clients)


def dirichlet(
  labels: HostArray, *, num_clients: int, alpha: float, seed: int, min_size: int = 10
) -> Indices:
  """Deals each CLASS to the clients in shares drawn from Dir(alpha) (NIID-Bench).

  A smaller alpha gives fewer classes per client, and sizes differ too. As in NIID-Bench, a client
  that already holds n / num_clients or more of the n examples gets none of the later classes. The
  whole draw is repeated until every client has at least `min_size` examples. alpha=inf is `iid`,
  which ignores `min_size`.
  Source: Li, Diao, Chen and He 2022, arXiv:2102.02079, section 4.1.

  Raises:
    UserError: fewer than num_clients * min_size examples, or 1,000 draws without success.

  >>> labels = np.repeat(np.arange(10), 100)
  >>> parts = dirichlet(labels, num_clients=10, alpha=0.1, seed=0)
  >>> sum(map(len, parts)), min(map(len, parts)) >= 10
  (1000, True)
  """
  labels, random = _start(labels, num_clients, seed)
  validate.positive_or_inf(alpha=alpha)
  validate.integer_at_least(0, min_size=min_size)
  if math.isinf(alpha):
    return iid(labels, num_clients=num_clients, seed=seed)
  _check_enough(len(labels), num_clients, min_size=min_size)
  classes = _rows_by_class(labels)
  for _ in range(_MAX_REDRAWS):
    owners = _deal_classes(random, classes, len(labels), num_clients, alpha)
    if np.bincount(owners, minlength=num_clients).min() >= min_size:
      # Rows are shuffled, then sorted by owner. The sort is stable, so each client's rows stay in
      # random order.
      order = random.permutation(len(owners))
      order = order[np.argsort(owners[order], kind="stable")]
      ends = np.cumsum(np.bincount(owners, minlength=num_clients))
      return np.split(order, ends[:-1])
  raise UserError(
    f"no draw in {_MAX_REDRAWS} gave {num_clients} clients that many "
    f"examples at alpha={alpha}; lower it",
    field="min_size",
    value=min_size,
  )


def dirichlet_hsu(
  labels: HostArray, *, num_clients: int, alpha: float, seed: int
) -> Indices:
  """Draws each CLIENT's class shares from Dir(alpha * overall shares) (Hsu 2019).

  Sizes differ by at most one. alpha is the TOTAL concentration, as in the paper: alpha / K for each
  of K equal classes, so alpha=0.5 and ten classes is Dir(0.05, ..., 0.05). A client draws its
  examples one by one by its shares, without replacement. An exhausted class is drawn no more. If
  all classes of a client are exhausted, the client draws from the other classes in proportion to
  their remaining rows. So the data of late clients are more alike than their drawn shares.
  alpha=inf is `iid`. Source: Hsu, Qi and Brown 2019, arXiv:1909.06335, section 4.

  >>> labels = np.repeat(np.arange(10), 100)
  >>> [len(client) for client in dirichlet_hsu(labels, num_clients=4, alpha=0.1, seed=0)]
  [250, 250, 250, 250]
  """
  labels, random = _start(labels, num_clients, seed)
  validate.positive_or_inf(alpha=alpha)
  if math.isinf(alpha):
    return iid(labels, num_clients=num_clients, seed=seed)
  queues = [random.permutation(rows) for rows in _rows_by_class(labels)]
  left = np.array([len(queue) for queue in queues], np.int64)
  prior = alpha * (left / max(1, len(labels)))
  clients = []
  for size in map(len, np.array_split(labels, num_clients)):
    taken = _draw_classes(random, _dirichlet(random, prior), left, size)
    left = left - taken
    # Rows are taken from the end of each queue, so the first `left` rows of it remain.
    parts = [queue[end : end + count] for queue, end, count in zip(queues, left, taken)]
    clients.append(random.permutation(np.concatenate([_NO_ROWS, *parts])))
  return clients


def shards(
  labels: HostArray, *, num_clients: int, seed: int, shards_per_client: int = 2
) -> Indices:
  """Sorts rows by label, cuts them into shards, and gives each client random shards.

  Every client gets `shards_per_client` shards, whose sizes differ by at most one row. Rows of equal
  label keep their order.
  Source: McMahan et al. 2017, arXiv:1602.05629, section 3 (100 clients, 2 shards of 300).

  >>> parts = shards(np.repeat(np.arange(10), 20), num_clients=10, seed=0)
  >>> max(len(np.unique(part // 20)) for part in parts)  # rows 0..19 carry label 0, ...
  2
  """
  labels, random = _start(labels, num_clients, seed)
  validate.integer_at_least(1, shards_per_client=shards_per_client)
  _check_enough(len(labels), num_clients, shards_per_client=shards_per_client)
  num_shards = num_clients * shards_per_client
  pieces = np.array_split(np.argsort(labels, kind="stable"), num_shards)
  hands = random.permutation(num_shards).reshape(num_clients, shards_per_client)
  return [np.concatenate([pieces[shard] for shard in hand]) for hand in hands]


def quantity_skew(
  labels: HostArray, *, num_clients: int, alpha: float, seed: int, min_size: int = 0
) -> Indices:
  """Gives clients the same label distribution, and sizes by shares drawn from Dir(alpha).

  Every client first gets `min_size` examples; the shares divide the rest. With min_size=0, some
  clients may be empty. alpha=inf is `iid`, which ignores `min_size`.
  Source: Li et al. 2022, arXiv:2102.02079, section 4.3.

  >>> parts = quantity_skew(np.zeros(1000), num_clients=5, alpha=0.3, seed=0, min_size=1)
  >>> sum(map(len, parts)), min(map(len, parts)) >= 1
  (1000, True)
  """
  labels, random = _start(labels, num_clients, seed)
  validate.positive_or_inf(alpha=alpha)
  if math.isinf(alpha):
    return iid(labels, num_clients=num_clients, seed=seed)
  shares = _dirichlet(random, np.full(num_clients, float(alpha)))
  return _cut(random, len(labels), shares, min_size)


def power_law(
  labels: HostArray, *, num_clients: int, exponent: float, seed: int, min_size: int = 0
) -> Indices:
  """Gives clients the same label distribution, and sizes by a power law.

  The r-th largest client has a share proportional to r^-exponent. The order of the clients is
  random; exponent=0 gives equal sizes. Every client first gets `min_size` examples; the shares
  divide the rest.

  >>> parts = power_law(np.zeros(1100), num_clients=3, exponent=1.0, seed=0)
  >>> sorted(map(len, parts))  # 1100 * (2, 3, 6) / 11
  [200, 300, 600]
  """
  labels, random = _start(labels, num_clients, seed)
  validate.non_negative(exponent=exponent)
  ranks = 1.0 + random.permutation(num_clients)
  shares = ranks**-exponent
  return _cut(random, len(labels), shares / shares.sum(), min_size)


def silos(
  labels: HostArray,
  *,
  num_clients: int,
  seed: int,
  sizes: tuple[int, ...] | None = None,
  skew: float = 0.0,
) -> Indices:
  """Deals rows to a few silos of declared sizes, such as hospitals, that may prefer classes.

  Silo k prefers the classes c with c mod num_clients = k mod (number of classes). A part `skew` of
  its rows is taken from these as long as there are any, the others from all rows that are left.
  Silos choose in the order of their sizes, the smallest first. Sizes are scaled if they do not add
  up to the number of rows, so that a test set can be dealt like the training set.

  Args:
    sizes: number of rows of each silo; None for equal parts.
    skew: share of a silo's rows that are of its own classes, in [0, 1].

  Raises:
    UserError: not one size for each silo.

  >>> labels = np.array([0, 1] * 50)
  >>> small, large = silos(labels, num_clients=2, seed=0, sizes=(10, 90), skew=0.8)
  >>> len(small), len(large), int((labels[small] == 0).sum()) >= 8
  (10, 90, True)
  """
  labels, random = _start(labels, num_clients, seed)
  validate.number_in(0, 1, skew=skew)
  wanted = (1,) * num_clients if sizes is None else tuple(sizes)
  if len(wanted) != num_clients:
    raise UserError(
      f"must be one for each of num_clients={num_clients} silos", field="sizes", value=sizes
    )
  validate.integer_at_least(1, **validate.entries(sizes=wanted))
  scaled = np.array(wanted) * len(labels) / sum(wanted)
  counts = np.floor(scaled).astype(np.int64)
  # Rows that rounding leaves over go to the silos that lost most by it.
  late = np.argsort(counts - scaled, kind="stable")
  counts[late[: len(labels) - counts.sum()]] += 1
  order = random.permutation(len(labels))
  classes = labels[order]
  kinds = np.unique(labels)
  free = np.ones(len(labels), bool)
  parts: dict[int, np.ndarray] = {}
  for silo in np.argsort(counts, kind="stable").tolist():
    preferred = kinds[np.arange(len(kinds)) % num_clients == silo % max(1, len(kinds))]
    own = np.flatnonzero(free & np.isin(classes, preferred))
    own = own[: round(skew * int(counts[silo]))]
    free[own] = False
    rest = random.permutation(np.flatnonzero(free))[: counts[silo] - len(own)]
    free[rest] = False
    parts[silo] = order[np.concatenate([own, rest])]
  return [parts[silo] for silo in range(num_clients)]


def feature_skew(
  federation: Federation,
  *,
  scale: float = 0.3,
  shift: float = 0.3,
  noise: float = 0.0,
  seed: int,
) -> Federation:
  """Gives each client a SYNTHETIC style: x -> a_i x + b_i + noise * i / num_clients * N(0, 1).

  a_i is uniform in 1 +- scale, and b_i in +-shift, for each client i = 1, 2, ...; the noise
  grows with i, as in NIID-Bench. The skew is not natural, so the data set is renamed to
  "NAME+synthetic-styles". The data set is copied once. Values may leave [0, 1].
  Source: Li et al. 2022, arXiv:2102.02079, section 4.2 (the noise; the affine part is ours).

  >>> from dpjax.data.dataset import from_arrays
  >>> d = from_arrays(np.ones((4, 1)), [0, 0, 0, 0], num_classes=1)
  >>> skewed = feature_skew(Federation(d, [[0, 1], [2, 3]]), seed=0)
  >>> bool(skewed.client(0).x[0] == skewed.client(0).x[1]), skewed.dataset.name
  (True, 'arrays+synthetic-styles')
  """
  validate.non_negative(scale=scale, shift=shift, noise=noise)
  dataset = federation.dataset
  if not isinstance(dataset.x, np.ndarray):
    raise UserError("needs x as one array in memory", field="feature_skew")
  if dataset.x.dtype != np.float32:
    raise UserError("tokens have no style; x must be float32", field="feature_skew")
  random = _random(seed)
  scales = random.uniform(1 - scale, 1 + scale, federation.num_clients)
  shifts = random.uniform(-shift, shift, federation.num_clients)
  x = dataset.x.copy()
  for place, rows in enumerate(federation.indices):
    level = noise * (place + 1) / federation.num_clients
    styled = scales[place] * x[rows] + shifts[place]
    x[rows] = styled + level * random.standard_normal(styled.shape)
  skewed = dataclasses.replace(dataset, x=x, name=f"{dataset.name}+synthetic-styles")
  return dataclasses.replace(federation, dataset=skewed)


# --- helpers

_NO_ROWS = np.zeros(0, np.int64)


def _random(seed: int) -> np.random.RandomState:
  """Returns a `RandomState`, whose stream NumPy never changes, unlike the stream of
  `default_rng`."""
  validate.integer_at_least(0, seed=seed)
  return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(int(seed))))


def _start(
  labels: Any, num_clients: int, seed: int
) -> tuple[np.ndarray, np.random.RandomState]:
  validate.integer_at_least(1, num_clients=num_clients)
  try:
    labels = np.asarray(labels)
  # A data set, for example, whose rows NumPy would read one by one.
  except ValueError:
    labels = np.zeros(())
  if labels.ndim != 1:
    raise UserError(
      f"must be [n], one label for each example, got {validate.shape_of_rows(labels.shape)}",
      field="labels",
    )
  return labels, _random(seed)


def _check_enough(num_examples: int, num_clients: int, **least: int) -> None:
  """Raises UserError unless each client can have `least` examples. It is about `num_clients` if
  there are more of them than examples, and else about the argument `least`."""
  ((name, each),) = least.items()
  if num_clients * each <= num_examples:
    return
  needed = (
    f"{num_clients} clients need {num_clients * each} examples, there are {num_examples}"
  )
  field, value = (
    ("num_clients", num_clients) if num_clients > num_examples else (name, each)
  )
  raise UserError(needed, field=field, value=value)


def _dirichlet(random: np.random.RandomState, alpha: np.ndarray) -> np.ndarray:
  """Draws shares from Dir(alpha) for any alpha > 0, with logarithms of gamma variables.

  Gamma(a) is distributed like Gamma(a + 1) U^(1/a), U uniform in (0, 1). `RandomState.dirichlet`
  divides 0 by 0 if all gamma variables underflow (alpha below about 0.001).
  """
  logs = np.log(random.standard_gamma(alpha + 1)) + np.log(
    random.uniform(np.finfo(float).tiny, 1, len(alpha))
  ) / np.maximum(alpha, _LEAST_ALPHA)
  # Weights are divided by the largest weight, so none overflows and their sum is at least 1.
  weights = np.exp(logs - logs.max())
  return weights / weights.sum()


def _rows_by_class(labels: np.ndarray) -> list[np.ndarray]:
  return [np.flatnonzero(labels == label) for label in np.unique(labels)]


def _deal_classes(
  random: np.random.RandomState,
  classes: list[np.ndarray],
  num_examples: int,
  num_clients: int,
  alpha: float,
) -> np.ndarray:
  """Draws one partition as NIID-Bench does. Returns the owner of each row, [n]."""
  owners = np.zeros(num_examples, np.int64)
  held = np.zeros(num_clients, np.int64)
  for rows in classes:
    is_below_mean = held < num_examples / num_clients
    shares = _dirichlet(random, np.full(num_clients, float(alpha))) * is_below_mean
    # If all shares of unfilled clients underflow, these clients get equal shares.
    shares = shares if shares.sum() > 0 else is_below_mean.astype(float)
    counts = _counts(len(rows), shares / shares.sum())
    owners[random.permutation(rows)] = np.repeat(np.arange(num_clients), counts)
    held += counts
  return owners


def _draw_classes(
  random: np.random.RandomState, shares: np.ndarray, left: np.ndarray, size: int
) -> np.ndarray:
  """Draws the number of rows of each class, [classes]: `size` draws by `shares`, at most `left` of
  each class."""
  taken = np.zeros_like(left)
  while (missing := size - taken.sum()) > 0:
    remaining = left - taken
    weights = np.where(remaining > 0, shares, 0.0)
    weights = weights if weights.sum() > 0 else remaining.astype(float)
    drawn = random.multinomial(missing, weights / weights.sum())
    # Requests for an exhausted class are drawn again.
    taken += np.minimum(drawn, remaining)
  return taken


def _counts(total: int, shares: np.ndarray) -> np.ndarray:
  """Returns integers that are near total * shares and have the sum `total`."""
  # Cumulative sums are rounded, not shares, so the counts add up to the total.
  ends = np.round(np.cumsum(shares) * total).astype(np.int64)
  ends[-1] = total
  return np.diff(np.minimum(ends, total), prepend=0)


def _cut(
  random: np.random.RandomState, num_examples: int, shares: np.ndarray, min_size: int
) -> Indices:
  """Cuts a random permutation: each client gets `min_size` rows and its share of the other rows."""
  validate.integer_at_least(0, min_size=min_size)
  remaining = num_examples - min_size * len(shares)
  _check_enough(num_examples, len(shares), min_size=min_size)
  sizes = min_size + _counts(remaining, shares)
  return np.split(random.permutation(num_examples), np.cumsum(sizes)[:-1])
