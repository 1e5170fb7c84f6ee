"""Ridge regression on ciphertexts: E(X), E(y) -> E(w) -> E(y_hat); only the owner decrypts.

The owner of the data standardises columns and targets, so the means, the scales and the intercept
are the owner's alone. The owner then encrypts, and a server computes

  A = X^T X / n + ridge I,   b = X^T y / n,   w <- w - eta (A w - b),   w = 0 at first.

Such a step is w <- M w + c with M = I - eta A and c = eta b, so 2 t steps from zero are
w_2t = w_t + M^t w_t. Squaring M doubles the steps for ONE more successive product. Up to the errors
of CKKS, the result after k doublings is that of 2^k steps of gradient descent (`expected_result`
computes it in float64).

| who                | learns                                                                |
| ------------------ | --------------------------------------------------------------------- |
| server             | numbers of rows and columns, ridge; nothing of X, y, w or y_hat       |
| owner              | w and y_hat, and at a refresh M^t and w_t, which follow from its data |

Guarantee: 128 bits of CKKS against a server that follows the protocol (honest but curious). A
malicious server can return wrong weights, and nothing here would notice. What the owner decrypts
holds noise that tells of the secret key (Li and Micciancio 2021). So the owner passes it on to
nobody, the server included, without rounding it to steps far above `Chain.error`. Circuit privacy
is not needed, since the server has no input of its own. Encryption is not differential privacy:
published weights tell about the data.

When the chain of products is used up, the owner decrypts and encrypts again (a refresh). Refreshes
are counted, and bounded by `RegressionPlan.most_refreshes`. There is no bootstrapping in SEAL.

Layout, for m columns and R rows in a ciphertext: slot j * R + r holds column j of row r, so that a
rotation by R moves to the next column, cyclically. A matrix is stored as its diagonals
D_s[j] = M[j, j + s], one ciphertext each, in the slots j * R. For a symmetric matrix, those up to
m / 2 determine the others. Source: Halevi and Shoup 2014 (products by diagonals); Cheon et al. 2017
(CKKS).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpjax.secure.homomorphic.ckks import (
  PublicKeys,
  SecretKeys,
  SlotEvaluator,
)
from dpjax.secure.homomorphic.regression_plan import RegressionPlan
from dpjax.secure.linear_regression import closed_form, statistics
from dpjax.validate import UserError, Verbatim

# Smallest spread of a column, relative to its largest number; a smaller spread is rounding.
_LEAST_SPREAD = 1e-9
Refresh = Callable[[Sequence[bytes], int], list[bytes]]  # (ciphertexts, level) -> fresh


class Upload(NamedTuple):
  """Keys and encrypted data: everything that the server gets, except refreshes and new
  rows."""

  keys: PublicKeys
  x: list[bytes]
  y: list[bytes]

  @property
  def size(self) -> int:
    """Size of keys and data in bytes."""
    return self.keys.size + sum(map(len, self.x + self.y))


def _numbers(name: str, values: Any) -> np.ndarray:
  try:
    return np.asarray(values, np.float64)
  except (ValueError, TypeError) as error:
    raise UserError("must be an array of real numbers", field=name) from error


class DataOwner:
  """The party with the data. It alone has the secret key.

  Args:
    x: [n, d] features. Each column is standardised by its mean and standard deviation.
    y: [n] targets, standardised in the same way.

  Raises:
    UserError: shapes that are not the plan's; NaN; a column that is constant up to rounding; or
      numbers so large that their variance is infinite.
  """

  def __init__(self, x: np.ndarray, y: np.ndarray, plan: RegressionPlan):
    x = _numbers("x", x)
    y = _numbers("y", y)
    if x.shape != (plan.num_rows, plan.num_features) or y.shape != (plan.num_rows,):
      raise UserError(
        f"must be ({plan.num_rows}, {plan.num_features}) and ({plan.num_rows},), "
        "as planned",
        field="x.shape",
        value=Verbatim(f"{x.shape}, y.shape={y.shape}"),
      )
    for name, array in (("x", x), ("y", y)):
      if not np.isfinite(array).all():
        raise UserError("holds NaN or infinity; leave those rows out", field=name)
    self._mean = x.mean(axis=0)
    self._scale = x.std(axis=0)
    self._y_mean = float(y.mean())
    self._y_scale = float(y.std())
    # Squares may overflow even if the numbers do not.
    for name, scale in (("x", self._scale), ("y", self._y_scale)):
      if not np.isfinite(scale).all():
        raise UserError("holds numbers whose squares are infinite; scale them", field=name)
    # Rounding leaves a constant column a tiny spread, so a test for 0 is not enough.
    for name, array, scale in (("x", x, self._scale), ("y", y, self._y_scale)):
      if not (scale > _LEAST_SPREAD * np.abs(array).max(axis=0)).all():
        raise UserError(
          "holds a constant column, which has no scale; leave it out", field=name
        )
    self.plan = plan
    self.refreshes = 0
    self._x = (x - self._mean) / self._scale
    self._y = (y - self._y_mean) / self._y_scale
    self._keys = SecretKeys(plan.chain, plan.rotations)

  def upload(self) -> Upload:
    """Returns the public keys and the encrypted data."""
    y = np.repeat(self._y[:, None], self.plan.width, axis=1)
    return Upload(self._keys.public, self._encrypt(self._x), self._encrypt(y))

  def _encrypt(self, rows: np.ndarray, level: int | None = None) -> list[bytes]:
    """Encrypts rows [n, <= width] into ciphertexts of `rows_each` rows each."""
    held = self.plan.rows_each
    encrypted = []
    for start in range(0, len(rows), held):
      block = np.zeros((self.plan.width, held))
      part = rows[start : start + held].T
      block[: len(part), : part.shape[1]] = part
      encrypted.append(self._keys.encrypt(block.ravel(), level=level))
    return encrypted

  def refresh(self, ciphers: Sequence[bytes], level: int) -> list[bytes]:
    """Encrypts the numbers of `ciphers` again, with zeros in unused slots. This is a `Refresh`.

    Raises:
      UserError: more refreshes than planned, so the server does not follow the protocol.
    """
    self.refreshes += 1
    if self.refreshes > self.plan.refreshes:
      raise UserError(
        f"planned are {self.plan.refreshes}", field="refreshes", value=self.refreshes
      )
    encrypted = []
    for cipher in ciphers:
      values = self._keys.decrypt(cipher)
      kept = np.zeros_like(values)
      kept[:: self.plan.rows_each] = values[:: self.plan.rows_each]
      encrypted.append(self._keys.encrypt(kept, level=level))
    return encrypted

  def rows(self, x: np.ndarray) -> list[bytes]:
    """Encrypts new rows [n, d] for `RegressionServer.predict`.

    Raises:
      UserError: another shape, NaN, or a row so far from the mean of the training rows that its
        prediction may wrap around.
    """
    x = _numbers("new", x)
    chain = self.plan.chain
    if x.ndim != 2 or not len(x) or x.shape[1] != self.plan.num_features:
      raise UserError(
        f"must be [n, {self.plan.num_features}], n >= 1", field="new.shape", value=x.shape
      )
    scaled = (x - self._mean) / self._scale
    farthest = float(np.linalg.norm(scaled, axis=1).max())
    most = 2.0 ** (chain.end_bits - chain.scale_bits - 1) / max(1.0, self.plan.largest)
    if not farthest < most:
      raise UserError(
        f"a row is {farthest:.3g} standard deviations away; must be below "
        f"{most:.3g}, or its prediction may wrap around",
        field="new",
      )
    return self._encrypt(scaled, level=1)

  def weights(self, cipher: bytes) -> np.ndarray:
    """Returns the decrypted weights [d] of standardised columns. They are secret: round them before
    passing them on (see the module)."""
    held = self._keys.decrypt(cipher)[:: self.plan.rows_each]
    return held[: self.plan.num_features]

  def predictions(self, ciphers: Sequence[bytes], num_rows: int) -> np.ndarray:
    """Returns decrypted predictions [num_rows] in units of y. They are as secret as `weights`."""
    held = [self._keys.decrypt(cipher)[: self.plan.rows_each] for cipher in ciphers]
    return np.concatenate(held)[:num_rows] * self._y_scale + self._y_mean

  def closed_form(self) -> np.ndarray:
    """Returns the exact weights [d] of standardised columns, in float64."""
    rows = statistics(self._x, self._y)
    # The data are centred, so the bias is 0.
    return closed_form([rows], ridge=self.plan.ridge)[:-1]

  def expected_result(self) -> np.ndarray:
    """Returns the server's result [d], computed in float64: `plan.num_steps` steps from
    zero."""
    plan = self.plan
    n = len(self._x)
    eye = np.eye(plan.num_features)
    matrix = eye - plan.step_size * (self._x.T @ self._x / n + plan.ridge * eye)
    w = plan.step_size * self._x.T @ self._y / n
    for _ in range(plan.doublings):
      w = w + matrix @ w
      matrix = matrix @ matrix
    return w


class RegressionServer:
  """The party that computes on ciphertexts with public keys, without a secret key."""

  def __init__(self, plan: RegressionPlan, keys: PublicKeys):
    self.plan = plan
    self._evaluator = SlotEvaluator(plan.chain, keys)
    self.refresh_bytes = 0  # sent and received in refreshes

  def fit(self, upload: Upload, refresh: Refresh) -> bytes:
    """Requests `plan.refreshes` refreshes. Returns E(w), which allows at least one more product."""
    diagonals, w = self._first_step(upload)
    for done in range(self.plan.doublings):
      last = done + 1 == self.plan.doublings
      if not self._evaluator.level(w):
        left = self.plan.doublings - done + 1
        diagonals, w = self._refresh(diagonals, w, refresh, left)
      diagonals, w = self._double(diagonals, w, last)
    if not self._evaluator.level(w):
      _, w = self._refresh([], w, refresh, 1)
    return self._evaluator.dump(w)

  def predict(self, weights: bytes, rows: Sequence[bytes]) -> list[bytes]:
    """Returns E(y_hat) in standardised units: one ciphertext for each ciphertext of `rows`."""
    on = self._evaluator
    plan = self.plan
    # A rotation by one moves each weight to the last slot of the previous column. Every window of
    # `rows_each` slots that begins in that column contains this slot, so each sum over a window is
    # the weight. A second rotation moves the sums back to the weight's own column.
    spread = on.fold(on.rotate(on.load(weights), 1), 1, plan.rows_each)
    spread = on.lower(self._column(spread, plan.width - 1), 1)
    return [on.dump(self._row_sums(on.load(x), spread)) for x in rows]

  def _row_sums(self, x: Any, w: Any) -> Any:
    on = self._evaluator
    part = whole = on.products([(x, w)])
    for _ in range(self.plan.width - 1):
      whole = on.add(on.rotate(whole, self.plan.rows_each), part)
    return whole

  def _first_step(self, upload: Upload) -> tuple[list[Any], Any]:
    """Returns the diagonals of M (see the module) up to m / 2, and the first step c = eta b."""
    on = self._evaluator
    plan = self.plan
    x, y = ([on.load(cipher) for cipher in held] for held in (upload.x, upload.y))
    share = plan.step_size / plan.num_rows
    w = self._column_sums(list(zip(x, y)), share)
    diagonals = []
    moved = x
    for shift in range(plan.width // 2 + 1):
      if shift:
        moved = [on.rotate(cipher, plan.rows_each) for cipher in moved]
      diagonal = self._column_sums(list(zip(x, moved)), -share)
      diagonals.append(diagonal)
    # M = I - eta A: its diagonal gets 1 - eta ridge in addition to the sums over data.
    lane = self._lane(1 - plan.step_size * plan.ridge)
    diagonals[0] = on.plus(diagonals[0], lane)
    return diagonals, w

  def _column_sums(self, pairs: Sequence[tuple[Any, Any]], factor: float) -> Any:
    """Returns the sums over rows of the products, times a factor, in the first slot of each column.

    The other slots are 0.
    """
    on = self._evaluator
    sums = on.fold(on.products(pairs), 1, self.plan.rows_each)
    return on.weighted_sum([(sums, self._lane(factor))])

  def _lane(self, value: float) -> np.ndarray:
    lane = np.zeros(self.plan.chain.slots)
    lane[:: self.plan.rows_each] = value
    return lane

  def _double(self, half: list[Any], w: Any, last: bool) -> tuple[list[Any], Any]:
    """Returns (diagonals 0..m/2 of M^2, w + M w), or ([], w + M w) for the last doubling.

    D_s of M^2 is the sum over t of D_t * (D_(s-t) rotated by t columns). One pass over the
    rotations of the diagonals 0..m/2 meets all of these products, since the other diagonals are
    rotations of these: D_(m-t) is D_t rotated by m - t columns.
    """
    on = self._evaluator
    m = self.plan.width
    whole = half + [self._column(half[t], m - t) for t in range(m // 2 - 1, 0, -1)]
    moved = w
    raw = None
    for diagonal in whole:
      raw = on.total(raw, on.product(diagonal, moved))
      moved = on.rotate(moved, self.plan.rows_each)
    w = on.add(on.lower(w, on.level(w) - 1), on.reduce(raw))
    if last:
      return [], w
    return self._square(half, whole), w

  def _square(self, half: list[Any], whole: list[Any]) -> list[Any]:
    on = self._evaluator
    m = self.plan.width
    raws: list[Any] = [None] * (m // 2 + 1)
    for t, moved in enumerate(half):
      # `moved` is D_t rotated by `steps` columns.
      for steps in range(m):
        meets = {((t + steps) % m, steps)}  # (diagonal of the square, of the factor)
        # `moved` is also D_(m - t), rotated by steps + t columns.
        if t not in (0, m // 2):
          meets.add((steps, (steps + t) % m))
        for s, factor in meets:
          if s <= m // 2:
            raws[s] = on.total(raws[s], on.product(whole[factor], moved))
        moved = on.rotate(moved, self.plan.rows_each)
    return [on.reduce(raw) for raw in raws]

  def _column(self, cipher: Any, columns: int) -> Any:
    for _ in range(columns):
      cipher = self._evaluator.rotate(cipher, self.plan.rows_each)
    return cipher

  def _refresh(
    self, diagonals: list[Any], w: Any, refresh: Refresh, left: int
  ) -> tuple[list[Any], Any]:
    sent = [self._evaluator.dump(cipher) for cipher in [*diagonals, w]]
    got = refresh(sent, min(left, self.plan.chain.levels))
    self.refresh_bytes += sum(map(len, [*sent, *got]))
    fresh = [self._evaluator.load(cipher) for cipher in got]
    return fresh[:-1], fresh[-1]


class Regressed(NamedTuple):
  """Decrypted weights and predictions of a regression on ciphertexts, with errors and costs."""

  weights: np.ndarray  # [d] standardised; SECRET, see `DataOwner.weights`
  predictions: np.ndarray  # [n'] of the new rows, in the units of y
  error: float  # largest error of a weight against the closed form
  step_error: float  # largest error of a weight against the same steps in float64
  refreshes: int
  upload_bytes: int
  refresh_bytes: int
  result_bytes: int  # weights, new rows and their predictions
  seconds: float


def regress(
  x: np.ndarray, y: np.ndarray, new: np.ndarray, plan: RegressionPlan
) -> Regressed:
  """Runs both parties in one process as a rehearsal, and returns results and measurements.

  The parties exchange bytes.

  Args:
    x: [n, d] features.
    y: [n] targets.
    new: [n', d] rows to predict, encrypted as well.

  Raises:
    UserError: as `DataOwner` and `DataOwner.rows`, or TenSEAL is not installed.

  >>> rng = np.random.default_rng(0)
  >>> x = rng.normal(size=(40, 2))
  >>> from dpjax.secure.homomorphic.ckks import Chain
  >>> plan = RegressionPlan(40, 2, ridge=1.0, chain=Chain(3, 38, 50))
  >>> regression = regress(x, x @ [1.0, 2.0], x[:3], plan)
  >>> regression.error < 1e-4, regression.refreshes == plan.refreshes
  (True, True)
  """
  begun = time.monotonic()
  owner = DataOwner(x, y, plan)
  upload = owner.upload()
  server = RegressionServer(plan, upload.keys)
  cipher = server.fit(upload, owner.refresh)
  rows = owner.rows(new)
  answers = server.predict(cipher, rows)
  weights = owner.weights(cipher)
  predictions = owner.predictions(answers, len(new))
  seconds = time.monotonic() - begun
  return Regressed(
    weights,
    predictions,
    float(np.abs(weights - owner.closed_form()).max()),
    float(np.abs(weights - owner.expected_result()).max()),
    owner.refreshes,
    upload.size,
    server.refresh_bytes,
    len(cipher) + sum(map(len, [*rows, *answers])),
    seconds,
  )
