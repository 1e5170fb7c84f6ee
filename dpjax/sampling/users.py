"""User-level privacy: the unit is a user, with everything that the user contributed.

The examples of one user, up to a public number, form ONE block. The rest of dpjax treats a block
as one example: it is sampled, clipped and accounted as a whole.

  blocks = group_by_user(train, user_ids, max_examples_per_user=8)
  plan = dpjax.Plan.for_data(blocks, ...)               # whose unit is "user"
  grad_fn = plan.clipped_grad(user_loss(loss_fn))     # the loss of ONE user
  for batch in plan.batches(blocks, rng=2): ...       # [64 users, 8 examples, ...]

Guarantee: the examples of user u influence u's block alone. So whatever u's data are, the clipped
sum moves by at most the clip norm C when u joins or leaves, and by at most 2 C when u's data are
exchanged. By construction each example belongs to one user, and which of u's examples are kept
depends on u alone.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import columns, validate
from dpjax.sampling import indexed
from dpjax.types import Array, Batch, Indexed, LossFn
from dpjax.validate import UserError

REDUCTIONS = ("mean", "sum")
CHOICES = ("first", "random")


@dataclasses.dataclass(frozen=True)
class UserBlocks:
  """Examples grouped by user. `len` counts users, and indexing gathers blocks.

  `blocks[users]` is a `Batch` of examples [len(users), m, ...] and mask [len(users), m], where m is
  the `max_examples_per_user` of `group_by_user`. A plan takes them if its `unit` is "user".
  """

  unit: ClassVar[str] = "user"

  data: Indexed
  members: np.ndarray  # [num_users, m] int: rows of the data; padding is the user's own
  mask: np.ndarray  # [num_users, m] bool

  def __len__(self) -> int:
    return len(self.members)

  @property
  def present(self) -> np.ndarray:
    """Returns whether a user has any record, [num_users] bool. A batch's mask leaves others out: a
    rule that counts users would count an emptied one, who is up to twice as far from the full one.
    """
    return np.asarray(self.mask.any(axis=1))

  def __getitem__(self, users: Any) -> Batch:
    rows = self.members[users]
    mask = self.mask[users]
    # All rows are read at once, since many data sets are slow to read row by row.
    flat = self.data[rows.reshape(-1)]
    block = jax.tree.map(lambda leaf: leaf.reshape(*rows.shape, *leaf.shape[1:]), flat)
    return Batch(block, mask)


def group_by_user(
  data: Indexed,
  user_ids: Sequence[Any] | np.ndarray,
  *,
  max_examples_per_user: int,
  choose: str = "first",
  seed: int = 0,
) -> UserBlocks:
  """Groups examples into one block for each user, of at most `max_examples_per_user` examples.

  Args:
    data: n examples, with `len` and row indexing, or a dict of arrays [n, ...].
    user_ids: owner of each example, [n] integers or strings, as one reads them: UTF-8 bytes, and
      an accented letter in each of its encodings, name the user that the text names.
    max_examples_per_user: public number m; a user's further examples are never used.
    choose: rule for the examples that are kept: "first" in the order of `data`, or "random". A
      random choice depends on (seed, user id), and on no other user.
    seed: seed of the random choice.

  Raises:
    UserError: ids that do not fit the data; one that is missing, since its owner may have another
      block, too; or m < 1.

  >>> blocks = group_by_user(np.arange(5.0), ["a", "b", "a", "a", "b"],
  ...                        max_examples_per_user=2)
  >>> len(blocks), blocks[np.array([0])].examples
  (2, array([[0., 2.]]))
  """
  validate.integer_at_least(1, max_examples_per_user=max_examples_per_user)
  validate.integer_at_least(0, seed=seed)
  validate.one_of(CHOICES, choose=choose)
  data = columns.by_place(data)
  ids = np.asarray(user_ids)
  if ids.shape != (len(data),) or not len(ids):
    raise UserError(
      "must be a vector of integers or strings, one per example (at least one), got "
      f"{ids.ndim} axes of {ids.dtype}, or another length",
      field="user_ids",
    )
  # A user of two ids would have two blocks, and twice the influence.
  if ids.dtype.kind not in "iu" or np.ma.is_masked(user_ids):
    ids = np.array(validate.owner_ids(user_ids=user_ids))
  # A stable sort keeps each user's examples in the order of the data, which "first" needs.
  order = np.argsort(ids, kind="stable")
  names, starts = np.unique(ids[order], return_index=True)
  rows = np.split(order, starts[1:])
  keep = functools.partial(_keep, most=max_examples_per_user, choose=choose, seed=seed)
  present = indexed.present_in(data, len(ids))
  members = np.zeros((len(names), max_examples_per_user), np.int64)
  mask = np.zeros(members.shape, bool)
  for user, (name, user_rows) in enumerate(zip(names, rows)):
    # An empty record, whose row is not present, adds nothing, as `replace_special` assumes.
    kept = keep(name, user_rows if present is None else user_rows[present[user_rows]])
    # Padding repeats the user's own rows. Where it held another user's record, a loss that
    # multiplies padding by 0 would give NaN for every user with padding, as soon as that record
    # does.
    members[user] = kept[0] if kept.size else user_rows[0]
    members[user, : kept.size] = kept
    mask[user, : kept.size] = True
  return UserBlocks(data, members, mask)


def _keep(
  name: Any, user_rows: np.ndarray, *, most: int, choose: str, seed: int
) -> np.ndarray:
  if user_rows.size <= most or choose == "first":
    return user_rows[:most]
  # The choice depends on (seed, user) alone. With a shared generator, other users would change it.
  digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
  chosen = np.random.default_rng(int.from_bytes(digest, "big")).permutation(user_rows.size)[
    :most
  ]
  return user_rows[np.sort(chosen)]


def user_loss(loss_fn: LossFn, *, reduction: str = "mean") -> LossFn:
  """Returns a loss function of ONE user: it takes a padded block in place of an example.

  Args:
    loss_fn: (params, ONE example) -> scalar.
    reduction: "mean" over the user's examples, or their "sum". Padding contributes nothing, even
      where the loss or gradient of padding is NaN.

  >>> square = lambda w, x: w * x
  >>> block = Batch(jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False]))
  >>> float(user_loss(square)(2.0, block)), float(user_loss(square, reduction="sum")(2.0, block))
  (4.0, 8.0)
  """
  validate.one_of(REDUCTIONS, reduction=reduction)

  def of_one_user(params: Any, block: Batch) -> Array:
    mask = jnp.asarray(block.mask)
    # Padding is replaced by a real example: a NaN in padding's gradient would stay NaN after it is
    # multiplied by 0.
    real = jax.tree.map(lambda leaf: _padded_by_first(leaf, mask), block.examples)
    losses = jax.vmap(loss_fn, in_axes=(None, 0))(params, real)
    total = jnp.where(mask, losses, 0).sum()
    if reduction == "sum":
      return total
    return total / jnp.maximum(mask.sum(), 1).astype(total.dtype)

  return of_one_user


def _padded_by_first(leaf: Any, mask: Array) -> Any:
  """Returns `leaf` [m, ...] with padded rows replaced by the first row, which is never padding."""
  leaf = jnp.asarray(leaf)
  return jnp.where(mask.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, leaf[:1])
