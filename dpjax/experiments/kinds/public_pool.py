"""Checks and describes pools of public examples that a student reads.

Nothing that is computed from a pool is accounted for. So no record that epsilon protects may be in
the pool, or decide what is in it.

| pool                                               | what a run does with it            |
| -------------------------------------------------- | ---------------------------------- |
| part of the test set of a published data set       | takes it; the epsilon is proved    |
| part of other data, which may hold anyone's record | refuses it                         |
| a pool in which a row equals a private record      | refuses it                         |
| any pool, if the holder sets `pool_is_public=true` | takes it; the epsilon is a claim   |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dpjax import data
from dpjax.accounting.text import paragraph
from dpjax.data.rows import Rows
from dpjax.experiments.run import guarantee, run_keys
from dpjax.validate import UserError
from dpjax.zoo.datasets import published

_ASSUMED = "the pool is public: no record of this run is in it, or decides what is in it"


def check_size(config: Any, public: data.Dataset) -> None:
  """Raises UserError if the pool takes all public examples, so that none is left for scores."""
  if len(public) <= config.num_pool:
    raise UserError(
      f"must leave some of the {len(public)} public examples to score the student",
      field="num_pool",
      value=config.num_pool,
    )


def check(config: Any, private: data.Dataset, public: data.Dataset) -> None:
  """Raises UserError unless the pool is part of a published test set and holds no private record.

  With `pool_is_public` nothing is checked. The outcome depends on the private records, so only the
  holder of these records may see it.

  Args:
    config: config with `data`, `num_pool` and `pool_is_public`.
    private: private records.
    public: data set whose first `num_pool` rows are the pool.
  """
  if config.pool_is_public:
    return
  if not published.is_published_test(public):
    raise UserError(
      f"the pool is of the test set of data.name={config.data.name!r}, and nothing says that "
      "this is public; set it to true only if no private record is in the pool or decides what is "
      "in it: epsilon is a claim then",
      field="pool_is_public",
      value=False,
    )
  pool = set(_rows(public.x[: config.num_pool]))
  present = private.without_empty_records()
  if any(row in pool for row in _rows(present.x)):
    raise UserError(
      f"the pool of data.name={config.data.name!r} holds a private record, which the student would "
      "read without noise; take it out, or set this to true if that record is public",
      field="pool_is_public",
      value=False,
    )


def _rows(x: Any) -> Iterator[bytes]:
  """Yields the bytes of every row; equal rows have equal bytes."""
  for chunk in x.chunks() if isinstance(x, Rows) else [np.asarray(x)]:
    # Adding 0 turns minus zero into zero, so that equal numbers have equal bytes.
    for row in chunk + chunk.dtype.type(0):
      yield row.tobytes()


def digest(config: Any, private: data.Dataset, public: data.Dataset) -> bytes:
  """Returns the digest of all data that a run reads: the private records and the pool.

  A run goes on with the same pool only: other rows, asked about with the same noise, would give the
  difference of exact counts.
  """
  pool = public.subset(np.arange(config.num_pool))
  return run_keys.join_digests(data.digest(private), data.digest(pool))


def add_note(
  promised: guarantee.Guarantee, config: Any, public: data.Dataset
) -> guarantee.Guarantee:
  """Returns the guarantee. Its statement says why the pool counts as public. The guarantee is a
  claim if `pool_is_public` is set."""
  pool = f"The pool is the first {config.num_pool} examples of the test set"
  if not config.pool_is_public:
    note = (
      f"{pool} of {public.name}, a published data set. None of them equals a private record; "
      "that was checked."
    )
    return guarantee.add_note(promised, paragraph(note))
  note = (
    f"{pool} of data.name={config.data.name!r}. That it is public is the word of whoever set "
    "pool_is_public=true: it is assumed, not checked. Nothing is promised to a record that is in "
    "the pool, or that decides what is in it."
  )
  return guarantee.add_note(promised, paragraph(note), _ASSUMED)
