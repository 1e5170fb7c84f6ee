"""k-out-of-t random allocation: each example is in k random steps of every pass of t steps."""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any, ClassVar

import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds.k_out_of_t import KOutOfTKind, k_out_of_t_event
from dpjax.sampling.draws import assign, generator
from dpjax.sampling.registry import SCHEMES, Sizing, steps_per_pass
from dpjax.sampling.samplers import DpEvent, PaddedSampler
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True)
class KOutOfTSampler(PaddedSampler):
  """Each example is in `num_selected` steps of every pass of `steps_per_pass` steps.

  An example's set of steps is uniform among all sets of `num_selected` steps, independent of other
  examples, and drawn anew in each pass. So every example takes part equally often, even if
  `num_selected` does not divide `steps_per_pass`. With `num_selected` 1 this sampler draws exactly
  as `RandomAllocationSampler` does.

  The proof is for noise that is independent from step to step. A pass is accounted in full at its
  first step, as `num_selected` passes of `RandomAllocationSampler` with about
  steps_per_pass / num_selected steps each (`dpjax.accounting.event_kinds.k_out_of_t`). If
  `num_selected` divides `steps_per_pass`, choose that sampler: it costs the same, and an early stop
  may cost less.

  A pass that stops early costs as much as a whole pass. A smaller cost would hold only if no output
  decides when the pass stops, and it would not be a sum of the costs of steps.

  Args:
    steps_per_pass: number t of steps of a pass.
    num_selected: number k of steps of an example in a pass, from 1 to t.
    capacity: padded batch size, as for PoissonSampler.

  >>> sampler = KOutOfTSampler(steps_per_pass=3, num_selected=2, capacity=4)
  >>> taken = [sampler.draw(4, seed=0, step=t) for t in range(3)]
  >>> np.bincount(np.concatenate(taken)).tolist()
  [2, 2, 2, 2]
  """

  name: ClassVar[str] = "k_out_of_t"
  relations: ClassVar[tuple[str, ...]] = KOutOfTKind.relations
  small: ClassVar[Any] = (
    {"steps_per_pass": 2, "num_selected": 1, "capacity": 5},
    {"steps_per_pass": 3, "num_selected": 2, "capacity": 5},
  )

  steps_per_pass: int
  num_selected: int
  capacity: int

  def __post_init__(self):
    validate.integer_at_least(
      1,
      steps_per_pass=self.steps_per_pass,
      num_selected=self.num_selected,
      capacity=self.capacity,
    )
    if self.num_selected > self.steps_per_pass:
      raise UserError(
        f"must be <= steps_per_pass={self.steps_per_pass}",
        field="num_selected",
        value=self.num_selected,
      )

  @classmethod
  def sized(cls, size: Sizing) -> KOutOfTSampler:
    scheme = SCHEMES["k_out_of_t"]
    scheme.check_prob(size)
    k = scheme.times_per_pass(size)
    steps = steps_per_pass(size.sampling_prob, k)
    return cls(steps_per_pass=steps, num_selected=k, capacity=size.padded_batch_size)

  @property
  def steps_per_event(self) -> int:
    return self.steps_per_pass

  @property
  def sampling_prob(self) -> float:
    return self.num_selected / self.steps_per_pass

  def event(self, inner: DpEvent) -> DpEvent:
    """Returns the event of a whole pass."""
    return k_out_of_t_event(
      inner, num_steps=self.steps_per_pass, num_selected=self.num_selected
    )

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    turn, place = divmod(step, self.steps_per_pass)
    if self.num_selected == 1:
      # These draws are the same as in `RandomAllocationSampler`.
      rows = assign(seed, turn, count=self.steps_per_pass, num_examples=num_examples)
      return self.check_draw(rows.of(place), step)
    sets = _pass_of(self.steps_per_pass, self.num_selected, num_examples, seed, turn)
    return self.check_draw(sets.at(place), step)


class _Pass:
  """Draws the examples of each step of one pass.

  A request for the next step needs one draw. A request for an earlier step draws the pass again
  from its first step."""

  def __init__(
    self, steps: int, num_selected: int, num_examples: int, place: tuple[int, int]
  ):
    self._steps = steps
    self._selected = num_selected
    self._num_examples = num_examples
    self._place = place
    # Threads that read ahead may ask for two batches at the same time.
    self._lock = threading.Lock()
    self._begin()

  def _begin(self) -> None:
    self._rng = generator(*self._place)
    self._left = np.full(self._num_examples, self._selected)  # [n] steps yet to take
    self._next = 0
    self._joined = np.zeros(0, np.int64)

  def at(self, place: int) -> np.ndarray:
    """Returns the examples that take part in step `place` of the pass."""
    with self._lock:
      if place < self._next - 1:
        self._begin()
      while self._next <= place:
        # This is selection sampling (Knuth, volume 2, algorithm S). A step is taken with chance
        # (steps of the set that are left) / (steps of the pass that are left). Then every set is
        # equally likely. Only integers are compared, so rounding favours no set.
        remaining = self._steps - self._next
        joins = self._rng.integers(remaining, size=self._num_examples) < self._left
        self._left -= joins
        self._joined = np.flatnonzero(joins)
        self._next += 1
      return self._joined.copy()


# The current pass is kept, so that each step needs only one draw. Up to 4 passes are kept, for runs
# side by side.
@functools.lru_cache(maxsize=4)
def _pass_of(
  steps_per_pass: int, num_selected: int, num_examples: int, seed: int, turn: int
) -> _Pass:
  return _Pass(steps_per_pass, num_selected, num_examples, (seed, turn))
