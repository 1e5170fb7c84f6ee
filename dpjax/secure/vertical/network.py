"""Vertical federated learning: parties hold different features of the same entities.

Rows must be aligned first (`alignment.align`): row i is the same entity everywhere.

`split_learning`: each party has a bottom model of its own features, and one party has the labels
and the model on top. Parties send activations, and get cotangents back. The gradient is exactly
that of the joint model, by the chain rule.

`two_party_logistic`: logistic regression with homomorphically encrypted messages. A third party,
the coordinator, holds the key (Hardy et al. 2017).

Neither is differentially private, and no epsilon follows from the encryption: the parties
learn what the protocol computes. Each function says who learns what. Noise on the activations
alone would give no epsilon. A bottom model is trained on raw features, so what it sends for one
entity also carries what it learnt from all the others.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from dpjax import validate
from dpjax.secure.vertical.disclosure import SUM_BITS, Disclosure
from dpjax.secure.vertical.encrypted_vectors import KeyPair, Vectors
from dpjax.types import Algorithm, Array, Example, Params
from dpjax.validate import UserError

Bottom = Callable[[Params, Array], Array]  # (params, x [B, f]) -> activations [B, d]
TopLoss = Callable[[Params, tuple, Array], Array]  # (params, activations, y) -> mean loss

# Masks that hide gradients from the coordinator are uniform in +-2^MASK_BITS.
MASK_BITS = 24
# Largest absolute residual. Its product with a feature, which is scaled to +-1, moves 3e-5 of the
# mass of a mask's distribution.
MAX_RESIDUAL = 1024.0
POLYNOMIALS = {  # degree -> (linear, cubic) coefficients of 1/2 + ... for the sigmoid
  1: (1 / 4, 0.0),
  3: (1.20096 / 8, -0.81562 / 8**3),
}


# --- split network


class SplitParams(NamedTuple):
  """Parameters, each part known to one party only."""

  bottoms: tuple[Params, ...]  # one for each party
  top: Params  # of the party that has the labels


class SplitState(NamedTuple):
  """Parameters and optimizer states; entry p of each tuple never leaves party p."""

  params: SplitParams
  opt_states: SplitParams


class SplitInfo(NamedTuple):
  """Loss and bytes of a step. They are not differentially private: do not release them."""

  loss: Array  # mean over the batch, known to the label party
  bytes_up: int  # activations, all parties together
  bytes_down: int  # cotangents


def party_forward(bottom: Bottom, params: Params, x: Array) -> tuple[Array, Callable]:
  """Returns (activations [B, d] to send, the pull-back that stays with the party).

  >>> import jax.numpy as jnp
  >>> sent, pull = party_forward(lambda w, x: x @ w, jnp.ones((2, 1)), jnp.ones((3, 2)))
  >>> sent.ravel().tolist(), pull(jnp.ones((3, 1))).ravel().tolist()
  ([2.0, 2.0, 2.0], [3.0, 3.0])
  """
  sent, pull = jax.vjp(lambda p: bottom(p, x), params)
  return sent, lambda cotangent: pull(cotangent)[0]


def split_gradient(
  bottoms: Sequence[Bottom], top_loss: TopLoss, params: SplitParams, batch: Example
) -> tuple[SplitParams, SplitInfo]:
  """Returns the gradient of the joint network's loss, computed by messages, and its `SplitInfo`.

  The gradient equals `jax.grad` of `top_loss(top, (bottom_1(x_1), ...), y)`.

  Args:
    batch: rows (x, y). x is a tuple of arrays [B, f_p], one for each party; y is [B, ...].

  Raises:
    UserError: the parties, or their rows, differ in number.

  >>> import jax.numpy as jnp
  >>> linear = lambda w, x: x @ w
  >>> squares = lambda b, sent, y: jnp.mean((sent[0] + sent[1] + b - y) ** 2)
  >>> params = SplitParams((jnp.ones(1), jnp.ones(1)), jnp.float32(0.0))
  >>> batch = Example((jnp.array([[1.0]]), jnp.array([[2.0]])), jnp.array([0.0]))
  >>> grads, info = split_gradient([linear, linear], squares, params, batch)
  >>> grads.bottoms[0].item(), grads.bottoms[1].item(), grads.top.item()  # 2 * 3 * x
  (6.0, 12.0, 6.0)
  >>> info.bytes_up, info.bytes_down
  (8, 8)
  """
  _check_parties(bottoms, params, batch)
  forward = [party_forward(b, p, x) for b, p, x in zip(bottoms, params.bottoms, batch.x)]
  sent = tuple(activations for activations, _ in forward)
  of_label_party = jax.value_and_grad(top_loss, argnums=(0, 1))
  loss, (top_gradient, cotangents) = of_label_party(params.top, sent, batch.y)
  gradients = tuple(pull(c) for (_, pull), c in zip(forward, cotangents))
  info = SplitInfo(loss, _num_bytes(sent), _num_bytes(cotangents))
  return SplitParams(gradients, top_gradient), info


def split_learning(
  bottoms: Sequence[Bottom], top_loss: TopLoss, tx: optax.GradientTransformation
) -> Algorithm:
  """Returns (init, step) of a split network; every party runs its own copy of `tx`.

  `init(params)`, `step(state, batch) -> (state, SplitInfo)`. A transformation that needs the
  whole gradient (for a global norm) sees only one party's part here.

  Who learns what: the label party sees the activations of every entity, from which features
  can be reconstructed; the others see cotangents, which tell labels apart by norm and
  direction (Li et al. 2022, arXiv:2102.08504). No differential privacy.
  Source: Vepakomma et al. 2018, arXiv:1812.00564.
  """

  def init(params: SplitParams) -> SplitState:
    states = SplitParams(tuple(map(tx.init, params.bottoms)), tx.init(params.top))
    return SplitState(params, states)

  def step(state: SplitState, batch: Example) -> tuple[SplitState, SplitInfo]:
    gradients, info = split_gradient(bottoms, top_loss, state.params, batch)
    trees = gradients, state.opt_states, state.params
    owns = [(*tree.bottoms, tree.top) for tree in trees]  # of each party, in order
    moved = [tx.update(*parts) for parts in zip(*owns)]
    params = [
      optax.apply_updates(part_params, update)
      for part_params, (update, _) in zip(owns[2], moved)
    ]
    together = lambda parts: SplitParams(tuple(parts[:-1]), parts[-1])
    return SplitState(together(params), together([kept for _, kept in moved])), info

  return Algorithm(init, step)


def _check_parties(bottoms: Sequence, params: SplitParams, batch: Example) -> None:
  counts = {len(bottoms), len(params.bottoms), len(batch.x)}
  if len(counts) > 1:
    raise UserError(
      f"{len(batch.x)} parties, with {len(bottoms)} models and "
      f"{len(params.bottoms)} parameter trees",
      field="batch.x",
    )
  rows = [len(part) for part in (*batch.x, batch.y)]
  if len(set(rows)) > 1:
    raise UserError(f"rows must be aligned, the parties and y have {rows}", field="batch")


def _num_bytes(tree: Any) -> int:
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# --- logistic regression under encryption


class TwoPartyState(NamedTuple):
  """Weights, each known to one party only."""

  weights_a: np.ndarray  # [f_a]
  weights_b: np.ndarray  # [f_b + 1], the bias last


class Traffic(NamedTuple):
  """Bytes of one step, as sent."""

  a_to_b: int  # encrypted scores
  b_to_a: int  # encrypted residuals
  to_coordinator: int  # masked products, still encrypted
  from_coordinator: int  # masked gradients


def residuals(scores: np.ndarray, y: np.ndarray, *, degree: int = 1) -> np.ndarray:
  """Returns the derivatives [B] of the loss by the scores s: a polynomial for sigmoid(s), minus y.

  Labels y are 0 or 1.

  Degree 1, 1/2 + s/4 - y, is the derivative of Hardy's loss log 2 - s/2 + s^2/8 (for y = 1).
  Degree 3 is within 0.115 of the sigmoid on [-8, 8] (Kim et al. 2018,
  doi:10.2196/medinform.8805) and wrong beyond.

  >>> residuals(np.array([0.0, 2.0]), np.array([1, 0]))
  array([-0.5,  1. ])
  """
  linear, cubic = POLYNOMIALS[degree]
  return 0.5 + linear * scores + cubic * scores**3 - y


def two_party_logistic(
  keys: KeyPair,
  *,
  learning_rate: float,
  ridge: float = 0.0,
  degree: int = 1,
  disclosure: Disclosure | None = None,
) -> Algorithm:
  """Returns (init, step) of logistic regression on the features of party a, and the features and
  labels of party b.

  `init((f_a, f_b))` starts at zero; `step(state, batch) -> (state, Traffic)`, with batch.x
  the pair (x_a [B, f_a], x_b [B, f_b]) and batch.y in {0, 1}. A step is one gradient step on the
  mean loss with derivatives `residuals`, plus ridge / 2 * |weights|^2 (without the bias).

  1. a sends its encrypted scores x_a w_a (degree 3: and their squares and cubes) to b;
  2. b turns them into encrypted residuals by its own scores and labels, which it encrypts before
     it adds them, and sends them to a;
  3. a and b multiply them by their columns, scaled to +-1, add masks, and send the results to c,
     the coordinator;
  4. the coordinator decrypts, sums over the rows, rounds to 2^-20, and sends the sums back;
  5. a and b subtract the sums of their masks, and each takes a step on its own weights.

  | who         | learns                                                          |
  | ----------- | --------------------------------------------------------------- |
  | a, b        | the gradient of its own weights at every step, in the clear     |
  | coordinator | products up to 2^10, and noise of ciphertexts, under masks of   |
  |             | 2^24: statistically hidden, not perfect                         |
  | a and c, or | everything of the other party: the two must not collude         |
  | b and c     |                                                                 |

  A party's gradient is one equation for each of its columns (b's bias is one). Its unknowns are B
  residuals, which tell labels to a and scores to b. `disclosure` counts the equations of both
  parties over all steps. It refuses batches and steps that would give a party a residual, the
  other's features, or more than a quarter of the labels' bits. With secret labels `disclosure`
  admits a few steps on thousands of rows. `secure.vertical_models.train_logistic` has no such
  limit: it trains on shares (with another sigmoid), and no party sees a gradient. If a may know the
  labels, give `Disclosure(secret_labels=False)`. Nothing here is differentially private.
  Source: Hardy et al. 2017, arXiv:1711.10677; degree 3, packing and masks per row are ours.

  Args:
    keys: keys of `encrypted_vectors`; degree 3 needs `ckks(depth=2)`, or `plaintext()`.
    degree: 1 or 3. Degree 3 is closer to logistic regression while scores stay within +-8. Beyond
      that it diverges, so bound the features (clip them, or use tanh).
    disclosure: the parties' memory of earlier runs over the same entities; None: a new memory.
      Every step that runs is counted, also from a state that was used before.

  Raises:
    UserError: labels other than 0 and 1, parties with different numbers of rows, more rows than
      `keys.public.slots`, residuals beyond +-1024, or what `disclosure` refuses.
  """
  seen = Disclosure() if disclosure is None else disclosure
  validate.positive(learning_rate=learning_rate)
  validate.non_negative(ridge=ridge)
  validate.one_of(POLYNOMIALS, degree=degree)

  def init(num_features: tuple[int, int]) -> TwoPartyState:
    return TwoPartyState(np.zeros(num_features[0]), np.zeros(num_features[1] + 1))

  def step(state: TwoPartyState, batch: Example) -> tuple[TwoPartyState, Traffic]:
    x_a, x_b, y = _two_parties(batch, keys.public.slots)
    widths = x_a.shape[1], x_b.shape[1] - 1
    wanted = len(state.weights_a), len(state.weights_b) - 1
    if widths != wanted:
      raise UserError(
        f"has {widths} features, must have {wanted} as the weights", field="batch.x"
      )
    # The largest residual bounds what a party may learn in this step. It is computed here, and is
    # revealed to nobody.
    scores = x_a @ state.weights_a + x_b @ state.weights_b
    with np.errstate(over="ignore", invalid="ignore"):
      largest_residual = float(np.abs(residuals(scores, y, degree=degree)).max())
    # The condition is written so that NaN is refused, too.
    if not largest_residual <= MAX_RESIDUAL:
      raise UserError(
        f"has a residual of {largest_residual:g}; must be within +-{MAX_RESIDUAL:g}, beyond which "
        "the masks no longer hide products from the coordinator: take smaller steps or features",
        field="batch",
      )
    # The step is counted, or refused, before anything is sent.
    seen.admit(x_a, x_b, y, largest_residual)
    # Rows are repeated until all slots are filled.
    slots = keys.public.slots
    scores_a = np.resize(x_a @ state.weights_a, slots)
    # Message of a: its part of the linear term, or the powers of its scores that b needs.
    linear = [POLYNOMIALS[1][0] * scores_a]
    sent = linear if degree == 1 else [scores_a**power for power in (1, 2, 3)]
    powers = [keys.public.encrypt(scores) for scores in sent]
    scores_b = np.resize(x_b @ state.weights_b, slots)
    labels = np.resize(y, slots)
    encrypted = _encrypted_residuals(keys.public, powers, scores_b, labels, degree)
    sum_a, bytes_a = masked_sums(keys, encrypted, x_a)
    sum_b, bytes_b = masked_sums(keys, encrypted, x_b)
    gradient_a = sum_a / len(y) + ridge * state.weights_a
    gradient_b = sum_b / len(y) + ridge * np.append(state.weights_b[:-1], 0.0)
    traffic = Traffic(
      a_to_b=sum(map(len, powers)),
      b_to_a=len(encrypted),
      to_coordinator=bytes_a + bytes_b,
      from_coordinator=8 * (len(sum_a) + len(sum_b)),
    )
    return TwoPartyState(
      state.weights_a - learning_rate * gradient_a,
      state.weights_b - learning_rate * gradient_b,
    ), traffic

  return Algorithm(init, step)


def _encrypted_residuals(
  public: Vectors, powers: list[bytes], scores_b: np.ndarray, y: np.ndarray, degree: int
) -> bytes:
  """Returns encrypted `residuals` of scores_a + scores_b. Degree 3 expands (a + b)^3.

  `powers` are encrypted: scores_a / 4 for degree 1; scores_a, its square and its cube for degree 3.
  """
  part_of_b = residuals(scores_b, y, degree=degree)
  if degree == 1:
    return public.add(powers[0], part_of_b)
  linear, cubic = POLYNOMIALS[degree]
  factors = (
    linear + 3 * cubic * scores_b**2,
    3 * cubic * scores_b,
    np.full_like(scores_b, cubic),
  )
  return public.combine(powers, factors, part_of_b)


def two_party_scores(state: TwoPartyState, batch: Example) -> np.ndarray:
  """Returns scores [B] of new entities: each party computes its part, and b adds both."""
  x_a, x_b = (np.asarray(x, np.float64) for x in batch.x)
  return x_a @ state.weights_a + x_b @ state.weights_b[:-1] + state.weights_b[-1]


def masked_sums(
  keys: KeyPair, encrypted: bytes, columns: np.ndarray
) -> tuple[np.ndarray, int]:
  """Returns (columns^T @ residuals [f], bytes sent to the coordinator) for one party.

  These are steps 3 to 5 of `two_party_logistic`, without the step on weights. `encrypted` holds
  the residuals [B] again and again, so that one ciphertext serves several columns. The masks come
  from the operating system and never leave the party.

  >>> from dpjax.secure.vertical.encrypted_vectors import plaintext
  >>> keys, columns = plaintext(), np.array([[1.0, 0.0], [2.0, 5.0]])
  >>> encrypted = keys.public.encrypt(np.tile([1.0, 10.0], keys.public.slots // 2))
  >>> masked_sums(keys, encrypted, columns)[0].round(4)
  array([21., 50.])
  """
  num_rows, num_columns = columns.shape
  copies = keys.public.slots // num_rows
  # Columns beyond +-1 are scaled down, so that a product is no larger than a residual.
  largest = np.abs(columns).max(axis=0, initial=1.0)
  units = 2.0 ** np.ceil(np.log2(largest))  # exact, as powers of two are
  sums = []
  sent = 0
  for start in range(0, num_columns, copies):
    chunk = (columns / units).T[start : start + copies]
    factors = np.zeros(keys.public.slots)
    factors[: chunk.size] = chunk.ravel()
    # Each ciphertext has fresh masks: two uses of one mask would reveal a difference.
    real, imaginary = _masks(keys.public.slots), _masks(keys.public.slots)
    cipher = keys.public.combine([encrypted], [factors], real + 1j * imaginary)
    masked = _coordinator(keys, cipher, num_rows, len(chunk))
    sums.append(masked - real[: chunk.size].reshape(chunk.shape).sum(axis=1))
    sent += len(cipher)
  return np.concatenate(sums) * units, sent


def _masks(count: int) -> np.ndarray:
  """Draws masks, uniform in +-2^MASK_BITS on a lattice of 2^-28, from the operating system."""
  bits = np.frombuffer(secrets.token_bytes(8 * count), np.int64)
  return (bits >> (63 - MASK_BITS - 28)) / 2.0**28


def _coordinator(keys: KeyPair, cipher: bytes, num_rows: int, num_sums: int) -> np.ndarray:
  """Returns the sums over rows, [num_sums], which are all that the coordinator computes.

  Sums are rounded to steps of 2^-SUM_BITS. So each has a known number of bits (`disclosure`), and
  the noise of a decryption, which tells about the key, is far below a step.
  """
  slots = np.real(keys.decrypt(cipher))[: num_rows * num_sums]
  sums = slots.reshape(num_sums, num_rows).sum(axis=1)
  return np.round(sums * 2.0**SUM_BITS) / 2.0**SUM_BITS


def _two_parties(batch: Example, slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns (x_a, x_b with a column of ones, labels), checked."""
  if len(batch.x) != 2:
    raise UserError(
      f"must hold the features of 2 parties, got {len(batch.x)}", field="batch.x"
    )
  kinds = [np.asarray(part).dtype for part in (*batch.x, batch.y)]
  for kind in [kind for kind in kinds if kind.kind not in "biuf"]:
    raise UserError(f"must hold real numbers, not {kind}", field="batch")
  x_a, x_b = (np.asarray(x, np.float64) for x in batch.x)
  y = np.asarray(batch.y)
  if (x_a.ndim, x_b.ndim, y.ndim) != (2, 2, 1):
    shapes = [x_a.shape, x_b.shape, y.shape]
    raise UserError(
      f"x must be two arrays [B, features] and y [B], not {shapes}", field="batch"
    )
  if not len(x_a) == len(x_b) == len(y):
    raise UserError(
      f"rows must be aligned, the parties and y have {[len(x_a), len(x_b), len(y)]}",
      field="batch",
    )
  if not np.isin(y, (0, 1)).all():
    raise UserError("labels must be 0 or 1", field="batch.y")
  if not 0 < len(y) <= slots:
    raise UserError(f"{len(y)} rows; must be at least 1 and at most {slots}", field="batch")
  if not (np.isfinite(x_a).all() and np.isfinite(x_b).all()):
    raise UserError("must hold finite numbers only", field="batch.x")
  return x_a, np.column_stack([x_b, np.ones(len(y))]), y
