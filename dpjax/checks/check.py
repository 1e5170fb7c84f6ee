"""The checks of a user's loss, parameters, plan and data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import columns, training, trees
from dpjax.checks.subject import BATCH, Subject, parts_of
from dpjax.checks.table import CheckTable, checks, rows
from dpjax.gradients.arguments import check_real
from dpjax.plan import Plan
from dpjax.types import Algorithm, Array, Indexed, LossFn, Params
from dpjax.validate import UserError, first_line


class _Rows:
  """The caller's data. Rows are returned as trees of NumPy arrays, with keys as they are."""

  def __init__(self, data: Any):
    self._data = data

  def __len__(self) -> int:
    return len(self._data)

  def __getitem__(self, indices: np.ndarray) -> Any:
    rows = self._data[indices]
    return jax.tree.map(lambda leaf: leaf if trees.is_key(leaf) else np.asarray(leaf), rows)


def _checked_rows(data: Any) -> _Rows:
  """Returns the data as rows. Raises UserError unless there are two or more, as trees of arrays of
  numbers with one entry for each row."""
  kind = type(data).__name__

  def wrong(what: str, of: str = "") -> UserError:
    needs = f"must have len() and data[indices], a tree of stacked arrays{of}"
    return UserError(f"{needs}; got {kind}{what}", field="data")

  try:
    size = len(data)
    rows = _Rows(data)
    taken = rows[np.zeros(min(size, 2), int)] if size else None
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(taken)]
  except Exception as error:
    # The error's message is left out, as in training, where it could reveal a secret draw: the
    # message of pandas' KeyError holds the indices.
    raise wrong(f" ({type(error).__name__})") from None
  if size < 2:
    raise wrong(f" of {size} records, must be at least 2")
  if not shapes or any(shape[:1] != (2,) for shape in shapes):
    raise wrong(f", whose two rows have the shapes {str(shapes)[:80]}")
  # jnp's test knows bfloat16 and float8, which NumPy does not count as numbers.
  real = lambda dtype: jnp.issubdtype(dtype, jnp.number) or dtype.kind == "b"
  leaves = [leaf for leaf in jax.tree.leaves(taken) if not trees.is_key(leaf)]
  odd = [leaf.dtype for leaf in leaves if not real(leaf.dtype)]
  if odd:
    raise wrong(f", which holds {odd[0]}", " of numbers")
  return rows


def _check_arguments(
  functions: dict[str, Any], plan: Any, optimizer: Any, example_key: Any
) -> None:
  """Raises UserError for an argument of a wrong type. All but the loss and the plan may be None."""
  for name, part in functions.items():
    if not callable(part) and (part is not None or name == "loss_fn"):
      raise UserError("must be a function", field=name, value=part)
  if not isinstance(plan, Plan):
    raise UserError("must be a dpjax.Plan", field="plan", value=plan)
  if optimizer is not None and not hasattr(optimizer, "update"):
    raise UserError(
      "must be an Optax transformation, or None", field="optimizer", value=optimizer
    )
  if example_key is not None:
    trees.check_key(example_key=example_key)


def check(
  loss_fn: LossFn,
  params: Params,
  plan: Plan,
  data: Indexed,
  *,
  apply: Callable[[Params, Any], Array] | None = None,
  optimizer: optax.GradientTransformation | None = None,
  example_key: Array | None = None,
  method: str = "auto",
  microbatch_size: int | None = None,
  clipped_grad: Callable[..., Any] | None = None,
  transform: Callable[[Array], Any] | None = None,
  algorithm: Callable[[Array], Algorithm] | None = None,
) -> CheckTable:
  """Checks the parts of a private training that a user put together.

  It measures, with this loss and these data, facts about code that an epsilon depends on. Of the
  gradient: how far one example moves the sum, padding, empty batches, examples that are not finite,
  leaks between examples. Of the noise: distribution, tails and independence over all steps and
  leaves. Of the rest: sampling scheme and seed, the accountant, the bound from gradient canaries.

  Args:
    loss_fn: `(params, ONE example) -> scalar`, of any library (linen, nnx, Equinox, plain JAX).
    params: tree of floating-point arrays, at which the loss is checked.
    plan: the `dpjax.Plan`, with its number of steps.
    data: `len(data)` records, `data[indices]` a tree of stacked arrays, as for `plan.batches`.
    apply: `(params, x [B, ...]) -> outputs [B, ...]`. With it, the check also tests whether the
      model mixes examples, on `data[indices].x`.
    optimizer: the Optax transformation after the private one; with it, the whole step of
      `training.dp_sgd` is compared with its parts.
    example_key: typed key, needed if the loss draws from `example.key` (dropout, augmentation).
    method, microbatch_size: see `dpjax.clipped_grad`.
    clipped_grad: `(params, batch, mask) -> ClippedSum`, in place of `plan.clipped_grad(loss_fn)`.
    transform: `noise key -> optax transformation`, in place of `plan.transform`.
    algorithm: `noise key -> Algorithm`, in place of `training.dp_sgd`. It needs `optimizer`, and
      takes `plan.slices` batches for a step. Its first steps are compared with the parts: 5 to 64
      steps, by the size of the model, or all steps of a shorter plan. With `example_key` the
      batches bring `example.key`, which the algorithm must hand to the loss as it is.

  Returns:
    A table: `.ok`, `.failed`, `.rows`; its repr has a line for each check. A pass is evidence,
    not a proof. A failure is a bug that voids the epsilon. For sound noise and batches, the chance
    that any statistic exceeds its bound is below 1e-5. The audit by canaries fails for a sound run
    with a chance below .01. The same arguments always give the same table.

  Raises:
    UserError: invalid arguments, or a loss that is not one of ONE example; an algorithm without an
      optimizer, or beside a `clipped_grad` where the plan's clip norm or scales move.

  >>> import dpjax
  >>> plan = dpjax.Plan(sampler=dpjax.PoissonSampler(sampling_prob=0.2, capacity=64),
  ...   noise_multiplier=1.0, l2_clip_norm=1.0, normalize_by=16, num_steps=20, delta=1e-5)
  >>> check(lambda w, x: jnp.sum(w * x), jnp.zeros(3), plan, "text")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: data: must have len() and data[indices], a tree of stacked ...
  """
  functions = {
    "loss_fn": loss_fn,
    "apply": apply,
    "clipped_grad": clipped_grad,
    "transform": transform,
    "algorithm": algorithm,
  }
  _check_arguments(functions, plan, optimizer, example_key)
  check_real(params=params)
  clip = plan.l2_clip_norm
  if algorithm is not None and optimizer is None:
    raise UserError(
      "needs optimizer=, with which its steps are compared", field="algorithm"
    )
  if (
    algorithm is not None
    and clipped_grad is not None
    and (clip.schedule or clip.rule.adapts or plan.scaling)
  ):
    raise UserError(
      "cannot be compared with clipped_grad=, which does not know how the clip norm or the "
      f"scales of the plan move (l2_clip_norm={clip!r:.80}, scaling={plan.scaling!r:.60}); leave "
      "clipped_grad out",
      field="algorithm",
    )
  data = columns.by_place(data)
  train = _checked_rows(data)
  plan.check_unit(data, train[np.zeros(1, int)])
  plan.check_capacity(len(train), getattr(data, "nominal_size", None))
  options: dict[str, Any] = {"method": method, "microbatch_size": microbatch_size}
  keyed = example_key is not None
  if keyed and not hasattr(train[np.zeros(1, int)], "key"):
    raise UserError(
      "needs examples with a field `key`, such as dpjax.Example", field="example_key"
    )

  def whole_step(key: Array) -> Algorithm:
    assert optimizer is not None
    # No key for examples is given, since the batches of a check contain their keys.
    return training.dp_sgd(loss_fn, plan, optimizer, noise_key=key, **options)

  if algorithm is None and optimizer is not None:
    algorithm = whole_step
  subject = Subject(
    **parts_of(
      plan, loss_fn, clipped_grad=clipped_grad, transform=transform, options=options
    ),
    apply=apply,
    params=params,
    train=train,
    keyed=keyed,
    algorithm=algorithm,
    optimizer=optimizer,
  )
  _try(subject)
  return CheckTable(list(rows(checks(subject), subject)))


def _try(subject: Subject) -> None:
  """Raises UserError if clipped gradients, or `apply`, cannot be traced on a batch of these
  data."""
  batch = subject.batch()
  mask = jnp.ones(BATCH, bool)
  try:
    jax.eval_shape(subject.clipped_grad, subject.params, batch, mask)
    if subject.apply is not None:
      jax.eval_shape(subject.apply, subject.params, batch.x)
  except UserError:
    raise
  except Exception as error:
    reason = first_line(error, with_type=True)
    raise UserError(
      f"fails on one example of these data ({reason})", field="loss_fn"
    ) from error
