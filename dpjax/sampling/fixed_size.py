"""Batches of a fixed size, drawn uniformly without replacement."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import dp_accounting
import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds.fixed_size import FixedSizeKind
from dpjax.accounting.proved import ADD, REPLACE
from dpjax.sampling.draws import generator
from dpjax.sampling.registry import Sizing, whole_batch_size
from dpjax.sampling.samplers import DpEvent, SizedSampler
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True)
class FixedSizeSampler(SizedSampler):
  """`batch_size` distinct examples, drawn uniformly among all subsets of that size.

  All batches have one size, so nothing is padded, and no draw is too large. A record in place of
  another one moves the sum by up to 2 l2_clip_norm, also under add_or_remove_one. So under
  add_or_remove_one Poisson sampling costs less at equal noise.

  Args:
    batch_size: number of examples in each step.
    num_examples: size of the data if it is public; else a public lower bound on the size of the
      larger neighbour.
    size_is_public: True for replace_one: both neighbours have num_examples records. False for
      add_or_remove_one: the larger neighbour has num_examples records or more. Then data of
      num_examples - 1 records or more are accepted, and batch_size must be below num_examples.

  >>> FixedSizeSampler(batch_size=2, num_examples=4).draw(4, seed=0, step=0).size
  2
  >>> joining = FixedSizeSampler(batch_size=2, num_examples=4, size_is_public=False)
  >>> [joining.draw(n, seed=0, step=0).size for n in (3, 4, 500)]
  [2, 2, 2]
  """

  name: ClassVar[str] = "fixed_size"
  relations: ClassVar[tuple[str, ...]] = FixedSizeKind.relations
  small: ClassVar[Any] = (
    {"batch_size": 4, "num_examples": 4, "size_is_public": True},
    {"batch_size": 1, "num_examples": 4, "size_is_public": True},
    {"batch_size": 3, "num_examples": 4, "size_is_public": False},
    {"batch_size": 1, "num_examples": 4, "size_is_public": False},
  )

  batch_size: int
  num_examples: int
  size_is_public: bool = True

  def __post_init__(self):
    validate.integer_at_least(1, batch_size=self.batch_size, num_examples=self.num_examples)
    validate.flag(size_is_public=self.size_is_public)
    most = self.num_examples if self.size_is_public else self.num_examples - 1
    if self.batch_size > most:
      raise UserError(
        f"must be <= num_examples={self.num_examples}"
        + ("" if self.size_is_public else " - 1, the records that a neighbour may have"),
        field="batch_size",
        value=self.batch_size,
      )

  @classmethod
  def sized(cls, size: Sizing) -> FixedSizeSampler:
    batch_size = whole_batch_size(size.sampling_prob, size.num_examples)
    if size.neighboring_relation != ADD:
      return cls(batch_size=batch_size, num_examples=size.num_examples)
    # An audit may leave out records. The batch size stays the same, so that it does not reveal how
    # many records are left. The event uses the smallest possible number, at which a batch is the
    # largest share of the records.
    least = size.num_examples - size.may_leave
    return cls(batch_size=batch_size, num_examples=least, size_is_public=False)

  @property
  def proved_under(self) -> tuple[str, ...]:
    return (REPLACE,) if self.size_is_public else (ADD,)

  @property
  def padded_batch_size(self) -> int:
    return self.batch_size

  @property
  def proved_with_memory(self) -> bool:
    return self.batch_size == self.num_examples

  @property
  def only_size(self) -> int | None:
    return self.num_examples if self.size_is_public else None

  @property
  def least_size(self) -> int:
    return self.num_examples if self.size_is_public else self.num_examples - 1

  def event(self, inner: DpEvent) -> DpEvent:
    return dp_accounting.SampledWithoutReplacementDpEvent(
      self.num_examples, self.batch_size, inner
    )

  def check_data(self, num_examples: int) -> None:
    """Raises UserError for data of a size for which the event does not hold."""
    if self.size_is_public:
      self.check_size(num_examples)
    elif num_examples < self.least_size:
      # The number of records is private here, so it is not shown.
      raise UserError(
        "must be a public number that the data reach; they have at least two records fewer",
        field="num_examples",
        value=self.num_examples,
      )

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    self.check_data(num_examples)
    rng = generator(seed, step)
    # The order inside a batch has no meaning. The indices are sorted, as in Poisson batches.
    return np.sort(rng.choice(num_examples, self.batch_size, replace=False, shuffle=False))
