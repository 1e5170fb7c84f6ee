"""Canaries: records inserted into the training data by fair coins, to be recognised
afterwards.

The canary rows LEAVE the training data first. Each comes back, changed, if its coin says so. So
nobody is in the data twice, and one coin changes exactly one record. The data never grow beyond the
size that the plan was made for. The neighbouring relation decides what is left of a canary that
is out:

| relation           | a canary that is out                                           |
| ------------------ | -------------------------------------------------------------- |
| add_or_remove_one  | no row                                                         |
| replace_one        | the original row                                               |
| replace_special    | an empty record: it keeps its place, is drawn, and adds zero   |

The coins are a pure function of the seed, and anyone who knows them can finish the audit.
They say nothing about the other records.

Each canary follows from its own row, its place and the seed. So two data sets that differ in the
record of one place still do so with canaries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import validate
from dpjax.accounting.proved import NeighboringRelation
from dpjax.auditing.scores import CanaryScores, Scores
from dpjax.data import Dataset
from dpjax.gradients.per_example import stacked_arrays
from dpjax.types import Example, LossFn, Params
from dpjax.validate import UserError

# The score "sums" is only for canaries of the kind "gradient"; see `gradient_canaries`.
SCORES = ("loss", "gradient", "sums")
# Part of the seed that separates the coins from other uses of the same seed.
_STREAM = 0x0CA9A21E5
# Number of canaries that are scored at a time.
_CHUNK = 256


class Canaries(NamedTuple):
  """The canaries of an audit, both those inserted and those held out."""

  examples: Dataset  # all m of them, changed
  included: np.ndarray  # [m] bool: the coins
  kind: str


def _mislabel(rows: Dataset, rng: np.random.Generator) -> Dataset:
  _check_labels(rows, "mislabelled")
  shift = rng.integers(1, rows.num_classes, len(rows))
  y = ((rows.y + shift) % rows.num_classes).astype(np.int32)
  return dataclasses.replace(rows, y=y)


def _check_labels(rows: Dataset, kind: str) -> None:
  if rows.num_classes < 2 or rows.x.dtype == np.int32:
    raise UserError(
      "needs a label of 2 or more classes; use 'random'", field="kind", value=kind
    )


def _random(rows: Dataset, rng: np.random.Generator) -> Dataset:
  """Replaces rows by noise over [0, 1], or over all tokens, with random labels."""
  # The range is public: with that of the rows, one row would change every canary.
  # Inputs of type int32 are tokens; all others are pixels.
  if rows.x.dtype == np.int32:
    if rows.vocab_size is None:
      raise UserError(
        "needs data that declare their vocab_size, for the largest token is a record's",
        field="kind",
        value="random",
      )
    x = rng.integers(0, rows.vocab_size, rows.x.shape, np.int32)
  else:
    x = rng.uniform(0.0, 1.0, rows.x.shape).astype(np.float32)
  y = rng.integers(0, rows.num_classes, len(rows), np.int32)
  return dataclasses.replace(rows, x=x, y=y)


def _in_gradients(rows: Dataset, rng: np.random.Generator) -> Dataset:
  """Gives canary i its own label, num_classes + i, by which `canary_loss` recognises it."""
  del rng
  _check_labels(rows, "gradient")
  y = rows.num_classes + np.arange(len(rows), dtype=np.int32)
  return dataclasses.replace(rows, y=y, num_classes=rows.num_classes + len(rows))


_MAKE: dict[str, Callable[[Dataset, np.random.Generator], Dataset]] = {
  "mislabelled": _mislabel,
  "random": _random,
  "gradient": _in_gradients,
}
KINDS = tuple(_MAKE)


def change(rows: Dataset, kind: str, rng: np.random.Generator) -> Dataset:
  """Returns the rows, changed into canaries of a kind, which is one of `KINDS`."""
  return _MAKE[kind](rows, rng)


def insert_canaries(
  train: Dataset,
  *,
  num_canaries: int,
  seed: int,
  keep_labels: bool = False,
  kind: str = "mislabelled",
  neighboring_relation: str = "add_or_remove_one",
) -> tuple[Dataset, Canaries]:
  """Turns `num_canaries` rows of the training data into canaries. Fair coins decide which are in.

  Args:
    train: the training data, which is not changed.
    num_canaries: number m <= len(train) of rows that become canaries.
    seed: seed of the choice of rows, of their change, and of the coins.
    keep_labels: whether a canary keeps the label of its row, for guarantees that do not cover
      labels. Needs the kind "random".
    kind: "mislabelled" (a wrong label), "random" (noise in [0, 1] with a random label) or
      "gradient" (a label of its own beyond the classes: train with `canary_loss`).
    neighboring_relation: relation that decides what is left of a canary that is out; see the table
      above.

  Returns:
    (data to train on, with len <= len(train); the canaries). Train with a plan made for
    len(train): under add_or_remove_one the realised length depends on the coins.

  >>> from dpjax.data import from_arrays
  >>> train = from_arrays(np.zeros((100, 1)), np.zeros(100, int), num_classes=2)
  >>> data, canaries = insert_canaries(train, num_canaries=40, seed=0)
  >>> len(data) - 60, int(data.y.sum()), int(canaries.included.sum())
  (17, 17, 17)
  """
  validate.instance(Dataset, "a data set, as dpjax.data.from_arrays makes", train=train)
  validate.integer_at_least(2, num_canaries=num_canaries)
  validate.integer_at_least(0, seed=seed)
  validate.one_of(KINDS, kind=kind)
  validate.one_of(NeighboringRelation, neighboring_relation=neighboring_relation)
  if num_canaries > len(train):
    raise UserError(
      f"the data have only {len(train)} rows", field="num_canaries", value=num_canaries
    )
  if train.present is not None and not train.present.all():
    raise UserError(
      "holds empty records already (`present`), which no canary can be", field="train"
    )
  rows_rng, change_rng, coin_rng = map(
    np.random.default_rng, np.random.SeedSequence([seed, _STREAM]).spawn(3)
  )
  rows = np.sort(rows_rng.choice(len(train), num_canaries, replace=False))
  changed_records = change(train.subset(rows).read(), kind, change_rng)
  if keep_labels:
    if kind != "random":
      raise UserError("not with keep_labels=True; use 'random'", field="kind", value=kind)
    changed_records = dataclasses.replace(changed_records, y=train.y[rows])
  included = coin_rng.random(num_canaries) < 0.5
  mixed = train.replace_rows(rows[included], changed_records.subset(included))
  left = _without(mixed, rows[~included], neighboring_relation)
  return left, Canaries(changed_records, included, kind)


def _without(train: Dataset, rows: np.ndarray, relation: str) -> Dataset:
  """Removes the records `rows`; replace_special empties them, and replace_one keeps them."""
  if relation == NeighboringRelation.REPLACE_ONE:
    return train
  if relation == NeighboringRelation.ADD_OR_REMOVE_ONE:
    return train.subset(np.setdiff1d(np.arange(len(train)), rows))
  # Every record is present here: `insert_canaries` refuses data with absent records.
  present = np.ones(len(train), bool)
  present[rows] = False
  return dataclasses.replace(train, present=present)


def _values(score: Callable[[Example], jax.Array], examples: Dataset) -> np.ndarray:
  """Applies `score`, batch [B, ...] -> [B], to all examples. Returns [n], where NaN becomes 0."""
  batches = [examples[i : i + _CHUNK] for i in range(0, len(examples), _CHUNK)]
  placed = [Example(jnp.asarray(batch.x), jnp.asarray(batch.y)) for batch in batches]
  compiled = jax.jit(score)
  values = np.concatenate([np.asarray(compiled(batch)) for batch in placed])
  return np.nan_to_num(values, nan=0.0)


def loss_gains(
  loss_fn: LossFn, before: Params, after: Params, examples: Dataset
) -> np.ndarray:
  """Returns the decrease of each example's loss during training: [n]."""

  def gain(batch: Example) -> jax.Array:
    losses = [jax.vmap(loss_fn, (None, 0))(params, batch) for params in (before, after)]
    return losses[0] - losses[1]

  return _values(gain, examples)


def loss_scores(
  loss_fn: LossFn, before: Params, after: Params, canaries: Canaries
) -> Scores:
  """Returns the decrease of each canary's loss during training, the score of a black-box attacker.

  Args:
    loss_fn: `(params, example) -> scalar`.
    before, after: parameters before and after training.
  """
  gains = loss_gains(loss_fn, before, after, canaries.examples)
  return CanaryScores.separate(gains, canaries.included)


def gradient_scores(
  loss_fn: LossFn, before: Params, after: Params, canaries: Canaries
) -> Scores:
  """Returns how far the parameters moved along each canary's negative gradient.

  Gradients are taken at `before`, and scaled to length 1. The attacker knows the first and the last
  parameters.
  """
  moved = jax.tree.map(lambda a, b: jnp.asarray(b) - jnp.asarray(a), after, before)

  def along(batch: Example) -> jax.Array:
    _, grads = stacked_arrays(loss_fn)(before, batch)
    rows = [g.reshape(g.shape[0], -1) for g in jax.tree.leaves(grads)]
    flat = jnp.concatenate(rows, axis=1)
    total = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(moved)])
    # A canary without a gradient has no direction to move along, so its score is 0.
    return flat @ total / jnp.maximum(jnp.linalg.norm(flat, axis=1), 1e-30)

  return CanaryScores.separate(_values(along, canaries.examples), canaries.included)
