"""Batches cut from a fresh permutation in every epoch."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from dpjax import validate
from dpjax.accounting.proved import REPLACE, ZERO
from dpjax.sampling.draws import permutation
from dpjax.sampling.registry import Sizing, whole_batch_size
from dpjax.sampling.samplers import DpEvent, Sampler
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True)
class ShuffledSampler(Sampler):
  """Batches cut from a fresh permutation in every epoch; the remainder is dropped.

  Most non-private code samples in this way. It is wrong to account it as Poisson sampling (pitfall
  P13). If `num_examples` is given, it is proved that an epoch costs at most ONE step on all data,
  without any amplification. Proof: the permutation does not depend on the data, so let it be known.
  The batches of an epoch are then fixed and disjoint, and the record in which two neighbours differ
  is in at most one batch. Every other step of the epoch may depend on all earlier outputs, but is
  the same mechanism for both neighbours and costs nothing. The step of this batch is a Gaussian of
  sensitivity at most two clip norms (replace_one) or one (replace_special), whatever came before.
  Under add_or_remove_one the permutation itself would change, and nothing is proved.

  Args:
    batch_size: number of examples in each step.
    num_examples: size of the data, which becomes public; with None no epsilon is proved.

  >>> sampler = ShuffledSampler(batch_size=2)
  >>> taken = [sampler.draw(4, seed=0, step=t) for t in range(2)]
  >>> sorted(np.concatenate(taken).tolist())
  [0, 1, 2, 3]
  >>> from dpjax.accounting import gaussian_event
  >>> inner = gaussian_event(1.0)
  >>> sampler = ShuffledSampler(batch_size=2, num_examples=4)
  >>> [type(sampler.event_at(step, inner)).__name__ for step in range(3)]
  ['GaussianDpEvent', 'NoOpDpEvent', 'GaussianDpEvent']
  """

  name: ClassVar[str] = "shuffled"
  relations: ClassVar[tuple[str, ...]] = (REPLACE, ZERO)
  small: ClassVar[Any] = ({"batch_size": 2, "num_examples": 4},)

  batch_size: int
  num_examples: int | None = None

  def __post_init__(self):
    validate.integer_at_least(1, batch_size=self.batch_size)
    if self.num_examples is not None:
      validate.integer_at_least(1, num_examples=self.num_examples)
      self._check_size(self.num_examples)

  def _check_size(self, num_examples: int) -> None:
    if num_examples < self.batch_size:
      # Unless it is a field, the number of examples is private.
      raise UserError(
        "must be at most the number of examples", field="batch_size", value=self.batch_size
      )
    if self.num_examples not in (None, num_examples):
      raise UserError(
        f"the data have {num_examples}", field="num_examples", value=self.num_examples
      )

  @classmethod
  def sized(cls, size: Sizing) -> ShuffledSampler:
    batch_size = whole_batch_size(size.sampling_prob, size.num_examples)
    is_proved = size.neighboring_relation in cls.relations
    # Under other relations nothing is proved, so the size of the data stays private.
    return cls(batch_size, size.num_examples if is_proved else None)

  @property
  def proved_under(self) -> tuple[str, ...]:
    return () if self.num_examples is None else self.relations

  @property
  def padded_batch_size(self) -> int:
    return self.batch_size

  @property
  def only_size(self) -> int | None:
    return self.num_examples

  @property
  def steps_per_epoch(self) -> int:
    """Returns the number of whole batches in the data, at least 1.

    Raises UserError if `num_examples` is None."""
    if self.num_examples is None:
      raise UserError(
        "must be given to know how long an epoch is", field="num_examples", value=None
      )
    return self.num_examples // self.batch_size

  @property
  def steps_per_event(self) -> int:
    # Without a public size there is no event.
    return 1 if self.num_examples is None else self.steps_per_epoch

  def event(self, inner: DpEvent) -> DpEvent | None:
    """Returns the event of a whole epoch: one step on all data. None if no size is public."""
    return None if self.num_examples is None else inner

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    self._check_size(num_examples)
    epoch, position = divmod(step, num_examples // self.batch_size)
    # The permutation belongs to the epoch, so any step of the epoch can be drawn alone.
    order = permutation(seed, epoch, num_examples=num_examples)
    rows = order[position * self.batch_size : (position + 1) * self.batch_size]
    return rows.astype(np.int64)
