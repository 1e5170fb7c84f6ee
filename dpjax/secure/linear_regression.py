"""Federated ridge regression, whose optimum has a closed form.

Over K clients with n_k rows each and n in all, with a column of ones in x for the bias,

  F(w) = 1/n sum_k sum_i (y_i - x_i w)^2 + ridge |w|^2 = sum_k (n_k / n) F_k(w),

and the bias is penalised too. A client's statistics x^T x, x^T y and n_k determine F_k up to a
constant. So three ways to the optimum can be compared exactly:

| function          | what the server gets                | result                            |
| ----------------- | ----------------------------------- | --------------------------------- |
| `closed_form`     | the sum of the statistics           | the optimum                       |
| `fed_avg`         | weights after E local steps         | E = 1: the optimum; E > 1 on      |
|                   |                                     | unlike clients: a biased point    |
| `stochastic_fed_  | the same, with one row for a step   | the optimum, at the rate of a     |
| avg`              | and a decaying learning rate        | theorem: `FedAvgBound`            |
| `private_ridge`   | the sum of the statistics + noise   | epsilon for one example           |

NumPy computes in float64: at these sizes it is not worthwhile to compile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import accounting, mechanisms, noise, validate
from dpjax.accounting import proved
from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.noise import gaussian
from dpjax.secure import row_norms
from dpjax.validate import UserError

Rows = tuple[np.ndarray, np.ndarray]  # x [n, f], y [n]


class Statistics(NamedTuple):
  """Sums that ridge regression needs from a client; those of several clients add up."""

  xx: np.ndarray  # [d, d] x^T x, the column of ones last
  xy: np.ndarray  # [d] x^T y
  count: float  # number of rows


def statistics(x: np.ndarray, y: np.ndarray) -> Statistics:
  """Computes the statistics of one client: x [n, f] without the column of ones, y [n].

  >>> s = statistics(np.array([[2.0], [4.0]]), np.array([1.0, 3.0]))
  >>> s.xx.tolist(), s.xy.tolist(), s.count
  ([[20.0, 6.0], [6.0, 2.0]], [14.0, 4.0], 2.0)
  """
  x, y = _rows(x, y)
  x = np.column_stack([x, np.ones(len(x))])
  return Statistics(x.T @ x, x.T @ y, float(len(x)))


def _rows(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  x = np.asarray(x, np.float64)
  y = np.asarray(y, np.float64)
  if x.ndim != 2:
    raise UserError("must be [n, features]", field="x.shape", value=x.shape)
  if y.shape != (len(x),):
    raise UserError(
      f"must be ({len(x)},), one target for each row", field="y.shape", value=y.shape
    )
  return x, y


def total(clients: Sequence[Statistics]) -> Statistics:
  """Adds the statistics of all clients. The result is all that a secure sum would reveal."""
  return Statistics(*(np.sum(parts, axis=0) for parts in zip(*clients)))


def closed_form(clients: Sequence[Statistics], *, ridge: float) -> np.ndarray:
  """Returns the minimiser [d] of F, the bias last: (x^T x / n + ridge I)^-1 x^T y / n.

  >>> line = statistics(np.array([[0.0], [1.0], [2.0]]), np.array([1.0, 3.0, 5.0]))
  >>> closed_form([line], ridge=0.0).round(6).tolist()  # y = 2 x + 1
  [2.0, 1.0]
  """
  validate.non_negative(ridge=ridge)
  pooled = total(clients)
  if not pooled.count:
    raise UserError("hold no rows at all", field="clients")
  matrix = pooled.xx / pooled.count + ridge * np.eye(len(pooled.xy))
  if np.linalg.matrix_rank(matrix, hermitian=True) < len(matrix):
    raise UserError("x^T x is singular; must be > 0", field="ridge", value=ridge)
  return np.linalg.solve(matrix, pooled.xy / pooled.count)


# --- FedAvg


def fed_avg(
  clients: Sequence[Statistics],
  *,
  ridge: float,
  num_rounds: int,
  num_local_steps: int,
  learning_rate: float,
) -> np.ndarray:
  """Returns [num_rounds + 1, d]: zero weights at first, and the weights after each FedAvg round.

  Every client takes `num_local_steps` full-batch gradient steps on its own F_k. The server averages
  with weights n_k / n. With one local step this is gradient descent on F.
  Source: McMahan et al. 2017, arXiv:1602.05629, algorithm 1.

  >>> line = statistics(np.array([[0.0], [1.0], [2.0]]), np.array([1.0, 3.0, 5.0]))
  >>> path = fed_avg([line], ridge=0.0, num_rounds=100, num_local_steps=2, learning_rate=0.2)
  >>> path[-1].round(4).tolist()
  [2.0, 1.0]
  """
  validate.integer_at_least(1, num_rounds=num_rounds, num_local_steps=num_local_steps)
  validate.positive(learning_rate=learning_rate)
  validate.non_negative(ridge=ridge)
  held = [client for client in clients if client.count]
  if not held:
    raise UserError("hold no rows at all", field="clients")
  eye = np.eye(len(held[0].xy))
  path = [np.zeros_like(held[0].xy)]

  def descended(client: Statistics, w: np.ndarray) -> np.ndarray:
    matrix = client.xx / client.count + ridge * eye
    vector = client.xy / client.count
    for _ in range(num_local_steps):
      w = w - 2 * learning_rate * (matrix @ w - vector)
    return w

  for _ in range(num_rounds):
    local = [descended(client, path[-1]) for client in held]
    path.append(np.average(local, axis=0, weights=[client.count for client in held]))
  return np.stack(path)


def objective(clients: Sequence[Statistics], w: np.ndarray, *, ridge: float) -> float:
  """Returns F(w) without its constant y^T y / n; differences equal those of F."""
  pooled = total(clients)
  return float(
    (w @ pooled.xx @ w - 2 * w @ pooled.xy) / pooled.count + ridge * np.dot(w, w)
  )


@dataclasses.dataclass(frozen=True)
class FedAvgBound:
  """Bound on the gap E F(w_T) - F(w*) of FedAvg with a decaying learning rate: O(1 / T).

  All clients take part. Each F_k is L-smooth and mu-strongly convex. Along the run, gradients of
  client k have a variance of at most sigma_k^2 and a second moment of at most G^2.
  Source: Li, Huang, Yang, Wang and Zhang 2020, arXiv:1907.02189, theorem 1.

  >>> bound = FedAvgBound(smoothness=2.0, convexity=1.0, num_local_steps=1, gradient_noise=0.0,
  ...   dissimilarity=0.0, squared_gradient=0.0, squared_start=1.0)
  >>> bound.offset, bound.learning_rate(0), bound.gap(1)  # 2 / 16 * (16 / 2)
  (16.0, 0.125, 1.0)
  """

  smoothness: float  # L
  convexity: float  # mu
  num_local_steps: int  # E
  gradient_noise: float  # sum_k p_k^2 sigma_k^2
  dissimilarity: float  # F* - sum_k p_k F_k*
  squared_gradient: float  # G^2
  squared_start: float  # |w_1 - w*|^2

  @classmethod
  def of(
    cls, clients: Sequence[Rows], *, ridge: float, num_local_steps: int, gradient: float
  ) -> FedAvgBound:
    """Returns the bound of clients' rows, from weights of 0.

    Args:
      clients: rows (x [n, f], y [n]) of each client, at least one.
      ridge: penalty of the weights.
      num_local_steps: gradient steps of a client in a round.
      gradient: largest norm of the gradient of one row along the run; it bounds the noise, too.
    """
    validate.integer_at_least(1, num_local_steps=num_local_steps)
    validate.positive(ridge=ridge)
    sums = [statistics(x, y) for x, y in clients]
    best = closed_form(sums, ridge=ridge)
    shares = np.array([s.count for s in sums]) / sum(s.count for s in sums)
    curvatures = np.array([
      np.linalg.eigvalsh(2 * (s.xx / s.count + ridge * np.eye(len(best)))) for s in sums
    ])  # fmt: skip
    # The constants of F_k cancel.
    apart = [
      objective([s], best, ridge=ridge)
      - objective([s], closed_form([s], ridge=ridge), ridge=ridge)
      for s in sums
    ]
    return cls(
      smoothness=float(curvatures.max()),
      convexity=float(curvatures.min()),
      num_local_steps=num_local_steps,
      gradient_noise=float(shares @ shares) * gradient**2,
      dissimilarity=float(shares @ np.array(apart)),
      squared_gradient=gradient**2,
      squared_start=float(best @ best),
    )

  @property
  def offset(self) -> float:
    """Head start of the decaying rate, gamma in the source."""
    return max(8 * self.smoothness / self.convexity, self.num_local_steps)

  def learning_rate(self, step: int) -> float:
    """Returns the rate of step 0, 1, ..., counted over the local steps of all rounds."""
    return 2 / (self.convexity * (self.offset + step))

  def gap(self, num_steps: int) -> float:
    """Returns the bound after `num_steps` local steps."""
    drift = 8 * (self.num_local_steps - 1) ** 2 * self.squared_gradient
    noise_term = self.gradient_noise + 6 * self.smoothness * self.dissimilarity + drift
    start = self.convexity * self.offset / 2 * self.squared_start
    scale = self.smoothness / self.convexity / (self.offset + num_steps - 1)
    return scale * (2 * noise_term / self.convexity + start)


def stochastic_fed_avg(
  clients: Sequence[Rows],
  bound: FedAvgBound,
  *,
  ridge: float,
  num_rounds: int,
  num_runs: int,
  seed: int,
) -> tuple[np.ndarray, float]:
  """Runs FedAvg from weights of 0 with one random row for each local step, at the bound's rates.

  Args:
    clients: rows (x [n, f], y [n]) of each client.
    bound: gives learning rates and local steps.
    ridge: penalty of the weights.
    num_rounds: rounds of each run.
    num_runs: runs with independent rows.
    seed: seed of the rows that are drawn.

  Returns:
    F(w) - F(w*) after each round, [num_rounds, num_runs], and the largest norm of a gradient.
  """
  validate.integer_at_least(1, num_rounds=num_rounds, num_runs=num_runs)
  random = np.random.default_rng(seed)
  rows = [(np.column_stack([x, np.ones(len(x))]), y) for x, y in map(_rows, *zip(*clients))]
  sums = [statistics(x, y) for x, y in clients]
  pooled = total(sums)
  share = np.array([s.count for s in sums]) / pooled.count
  best = closed_form(sums, ridge=ridge)
  matrix = pooled.xx / pooled.count + ridge * np.eye(len(best))
  w = np.zeros((num_runs, len(best)))
  gaps = np.zeros((num_rounds, num_runs))
  largest = 0.0
  for r in range(num_rounds):
    average = np.zeros_like(w)
    for p, (x, y) in zip(share, rows):
      local = w
      for step in range(bound.num_local_steps):
        i = random.integers(len(y), size=num_runs)
        errors = (x[i] * local).sum(axis=1) - y[i]
        gradient = 2 * (errors[:, None] * x[i] + ridge * local)
        largest = max(largest, float(np.linalg.norm(gradient, axis=1).max()))
        local = local - bound.learning_rate(r * bound.num_local_steps + step) * gradient
      average += p * local
    w = average
    # F is quadratic, so that its gap is that of the distance.
    gaps[r] = np.einsum("ri,ij,rj->r", w - best, matrix, w - best)
  return gaps, largest


# --- private version


@dataclasses.dataclass(frozen=True)
class PrivateStatistics:
  """Noisy sums of the statistics of bounded rows: (epsilon, delta)-DP for one example.

  Rows are bounded before they are summed: features clipped to an L2 norm of `x_bound`,
  targets to +-`y_bound`, rows with NaN or infinity dropped. With s = x_bound^2 + 1 (the
  column of ones) one row's (x x^T, x y) has a norm of at most sqrt(s^2 + s y_bound^2).
  The symmetric matrix counts by its Frobenius norm: off-diagonal entries are summed once and
  weigh sqrt(2). The norm bound is the sensitivity under add_or_remove_one; under replace_one the
  sensitivity is twice as large. The number of rows is one of the sums, so it is private, too.

  Guarantee: one Gaussian release. Everything computed from it (the weights, any ridge, the
  repair of a matrix that noise made indefinite) costs no further epsilon. The unit is one EXAMPLE,
  whichever client holds it. Noise is added once, to the sum: the server, or a secure sum, is
  trusted.
  Source: Dwork, Talwar, Thakurta and Zhang 2014 ("Analyze Gauss"); Wang 2018,
  arXiv:1803.02596.

  >>> private = PrivateStatistics(noise_multiplier=2.0, x_bound=1.0, y_bound=1.0)
  >>> round(private.l2_sensitivity, 6)  # sqrt(2^2 + 2)
  2.44949
  >>> round(private.epsilon(delta=1e-5), 3)
  1.993
  """

  noise_multiplier: float  # std / l2_sensitivity of one row under add_or_remove_one
  x_bound: float
  y_bound: float
  neighboring_relation: str = "add_or_remove_one"

  def __post_init__(self) -> None:
    validate.positive(
      noise_multiplier=self.noise_multiplier, x_bound=self.x_bound, y_bound=self.y_bound
    )
    validate.one_of(proved.RELATIONS, neighboring_relation=self.neighboring_relation)

  @classmethod
  def calibrated(
    cls,
    *,
    epsilon: float,
    delta: float,
    x_bound: float,
    y_bound: float,
    neighboring_relation: str = "add_or_remove_one",
  ) -> PrivateStatistics:
    """Returns the release with the smallest noise that is (epsilon, delta)-DP."""
    needed = mechanisms.analytic_noise_multiplier(epsilon, delta)
    # A replaced row may move the sums by twice as much as an added or removed one.
    factor = 2.0 if neighboring_relation == "replace_one" else 1.0
    return cls(needed * factor, x_bound, y_bound, neighboring_relation)

  @property
  def l2_sensitivity(self) -> float:
    """Largest norm of one row's statistics: the most that adding or removing it can change."""
    square = self.x_bound**2 + 1
    return (square**2 + square * self.y_bound**2) ** 0.5

  @property
  def std(self) -> float:
    """Standard deviation of the noise on each entry of the vector of `exact`."""
    return self.noise_multiplier * self.l2_sensitivity

  @property
  def event(self) -> DpEvent:
    """Event of one Gaussian release. Its noise multiplier is relative to `l2_sensitivity`."""
    return accounting.gaussian_event(self.noise_multiplier)

  def epsilon(self, *, delta: float) -> float:
    """Returns epsilon for one example under `neighboring_relation`, proved."""
    return accounting.epsilon(
      self.event, delta=delta, neighboring_relation=self.neighboring_relation
    )

  def bound_rows(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounded rows, without rows that hold NaN or infinity.

    Each bounded row depends on one given row alone.
    """
    x, y = _rows(x, y)
    kept = np.isfinite(x).all(axis=1) & np.isfinite(y)
    x = row_norms.shorten(x[kept], self.x_bound, inside=1 - 1e-12)
    return x, np.clip(y[kept], -self.y_bound, self.y_bound)

  def release(self, clients: Sequence[tuple[np.ndarray, np.ndarray]]) -> Statistics:
    """Returns the noisy statistics of all clients' rows [(x [n, f], y [n]), ...].

    The key of the noise comes from the operating system, and is not kept: two releases under one
    key would share their noise, which cancels in their difference. Each release costs epsilon.
    """
    return self.read(self.noisy(noise.new_key(), self.exact(clients)))

  def exact(self, clients: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Returns the sums of all bounded rows as one vector [d (d + 1) / 2 + d], float64: NOT
    private."""
    summed = total([statistics(*self.bound_rows(x, y)) for x, y in clients])
    return np.concatenate([_to_vector(summed.xx), summed.xy])

  def noisy(self, key: jax.Array, vector: np.ndarray) -> jax.Array:
    """Returns the vector of `exact` with noise, float64: everything that is released.

    Args:
      key: secret key of this release alone, as `release` draws one.
    """
    # Noise is added in float64: rounding the sums first would add to the change that a row makes.
    with jax.enable_x64(True):
      noisy, _ = noise.add_gaussian(gaussian.init(key), jnp.asarray(vector), self.std)
    return noisy

  def read(self, vector: np.ndarray | jax.Array) -> Statistics:
    """Returns the statistics that a vector of `noisy` holds."""
    vector = np.asarray(vector, np.float64)
    # The vector has d (d + 1) / 2 + d = (d^2 + 3 d) / 2 entries, which determines d.
    size = (math.isqrt(9 + 8 * len(vector)) - 3) // 2
    # `_to_vector` multiplied off-diagonal entries, which occur twice, by sqrt(2).
    rows, columns = np.triu_indices(size)
    upper = np.zeros((size, size))
    upper[rows, columns] = vector[:-size] / np.where(rows == columns, 1.0, np.sqrt(2))
    xx = upper + np.triu(upper, 1).T
    return Statistics(xx, vector[-size:], xx[-1, -1])


def _to_vector(matrix: np.ndarray) -> np.ndarray:
  """Returns the upper triangle of a symmetric matrix as a vector, with off-diagonal entries times
  sqrt(2). So the vector has the Frobenius norm of the matrix.
  """
  rows, columns = np.triu_indices(len(matrix))
  return matrix[rows, columns] * np.where(rows == columns, 1.0, np.sqrt(2))


def private_ridge(released: Statistics, *, ridge: float, floor: float) -> np.ndarray:
  """Returns weights [d] from noisy statistics, as `closed_form`, with eigenvalues raised to
  `floor`.

  This only post-processes the release, and costs no further epsilon. `floor` is in units of x^T x.
  `PrivateStatistics.std` is a good value, since below it there is only noise.

  >>> exact = statistics(np.array([[0.0], [1.0], [2.0]]), np.array([1.0, 3.0, 5.0]))
  >>> private_ridge(exact, ridge=0.0, floor=1e-9).round(6).tolist()
  [2.0, 1.0]
  """
  validate.non_negative(ridge=ridge)
  validate.positive(floor=floor)
  values, vectors = np.linalg.eigh(released.xx)
  values = np.maximum(values, floor) + ridge * max(released.count, 1.0)
  return vectors @ ((vectors.T @ released.xy) / values)
