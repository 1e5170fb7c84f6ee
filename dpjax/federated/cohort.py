"""Cohorts: the clients of a round and their batches, as padded and masked index arrays.

A client's local work is a list of steps, and each step is a batch of rows. `LocalWork` cuts the
batches of each epoch from a fresh permutation. The last batch of an epoch is padded, never filled
with rows of other clients. Clients have different numbers of steps here; `execution` pads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax import validate
from dpjax.data import Federation
from dpjax.plan import Plan
from dpjax.sampling import batches as batches_lib
from dpjax.sampling.batches import draw_rows
from dpjax.types import ArrayTree, Example
from dpjax.validate import UserError


def bucket(n: int) -> int:
  """Returns the smallest number >= n that is below 4, or is 4, 5, 6 or 7 times a power of two.

  Shapes are rounded up to these numbers. So clients of many sizes need few compilations, and at
  most a quarter more work.

  >>> [bucket(n) for n in (0, 3, 9, 100, 300)]
  [0, 3, 10, 112, 320]
  """
  # Three leading bits are kept, so that rounding up adds at most a quarter.
  step = 1 << max(0, (max(n, 1) - 1).bit_length() - 3)
  return -(-n // step) * step


def pad(tree: ArrayTree, size: int) -> Any:
  """Pads leaves [n, ...] -> [size, ...], with zeros at the end."""
  widths = lambda leaf: [(0, size - len(leaf))] + [(0, 0)] * (np.ndim(leaf) - 1)
  return jax.tree.map(lambda leaf: np.pad(leaf, widths(leaf)), tree)


class LocalBatches(NamedTuple):
  """The local steps of one client, in order."""

  examples: Any  # leaves [S, B, ...], or row numbers [S, B] of the cohort's data
  mask: np.ndarray  # [S, B] bool; False is padding

  def pad(self, num_steps: int, size: int = 0) -> LocalBatches:
    """Returns the steps with leaves [num_steps, max(B, size), ...]. The added part is masked.

    Padding within a step repeats the client's own rows: row 0 of the data would belong to another
    client. Added steps hold zeros: the result of a step that is all padding is never used.
    """
    longer = self
    places = np.arange(size)
    if size > (width := self.mask.shape[1]):
      columns = np.minimum(places, width - 1)
      examples = jax.tree.map(lambda leaf: np.asarray(leaf)[:, columns], self.examples)
      longer = LocalBatches(examples, self.mask[:, columns] & (places < width))
    return pad(longer, num_steps)


class Drawn(NamedTuple):
  """Origin of a cohort: its plan, its round and its run."""

  plan: Any  # the `Plan`, or the `Silos`, that drew it
  round: int
  run: int = 0  # number of the run, see `sampling.batches.Draws`; secret


class Cohort(NamedTuple):
  """The clients of one round. If clients are sampled, their identity is secret."""

  ids: np.ndarray  # [C] int64, places in the federation
  num_examples: np.ndarray  # [C] int64, number of examples of each client
  batches: Sequence[LocalBatches]  # [C]
  # Arrays [n, ...] to which row numbers in `batches` refer; None if `batches` hold examples.
  data: Any = None
  drawn: Drawn | None = None  # set by `cohorts`; None: made by hand

  @property
  def size(self) -> int:
    """Number of clients that take part; an empty cohort is valid."""
    return len(self.ids)


@dataclasses.dataclass(frozen=True)
class LocalWork:
  """The amount of training of a client in one round. These numbers are public.

  Args:
    batch_size: number of examples of a local batch; None for all examples of the client at once.
    epochs: number of passes over the client's data.
    max_examples: largest number of examples of a client in one epoch; None for all. The examples
      are drawn anew in each epoch.

  >>> LocalWork(batch_size=10, epochs=5).num_steps(600)
  300
  """

  batch_size: int | None = 10
  epochs: int = 1
  max_examples: int | None = None

  def __post_init__(self):
    validate.integer_at_least(1, epochs=self.epochs)
    named = {"batch_size": self.batch_size, "max_examples": self.max_examples}
    present = {name: value for name, value in named.items() if value is not None}
    validate.integer_at_least(1, **present)

  def num_used(self, num_examples: int) -> int:
    """Number of a client's examples that one epoch uses."""
    return min(num_examples, self.max_examples or num_examples)

  def num_steps(self, num_examples: int) -> int:
    """Number of local steps of a client with `num_examples` examples."""
    used = self.num_used(num_examples)
    return self.epochs * -(-used // (self.batch_size or max(used, 1)))

  def rows(self, num_examples: int, rng: np.random.Generator) -> LocalBatches:
    """Returns S batches [S, B] of places in 0 .. num_examples - 1, in random order. Padding repeats
    place 0.

    >>> work = LocalWork(batch_size=2, epochs=2)
    >>> work.rows(3, np.random.default_rng(0)).mask.tolist()
    [[True, True], [True, False], [True, True], [True, False]]
    """
    used = self.num_used(num_examples)
    # Without `batch_size`, clients have batches of many sizes. Rounding keeps the number of
    # compiled sizes small.
    size = self.batch_size or bucket(max(used, 1))
    steps = -(-used // size)
    places = np.zeros((self.epochs, steps * size), np.int64)
    for epoch in range(self.epochs):
      places[epoch, :used] = rng.permutation(num_examples)[:used]
    mask = np.tile(np.arange(steps * size) < used, (self.epochs, 1))
    shape = (self.epochs * steps, size)
    return LocalBatches(places.reshape(shape), mask.reshape(shape))


def cohort_of(
  federation: Federation,
  clients: Sequence[int | str] | np.ndarray,
  work: LocalWork,
  *,
  seed: int,
  round: int,
) -> Cohort:
  """Returns the cohort of `clients` (places or ids; may be empty), with their batches.

  Each client's order of examples is a function of (seed, round, client) alone: it does not
  depend on who else takes part.

  The cohort's `data` are the federation's arrays, in host memory. An execution on one device copies
  them to the device once. An execution over several devices sends the rows that each block needs.

  Raises:
    UserError: a client is unknown, or is named twice.
  """
  native = [c if isinstance(c, str) else int(c) for c in clients]
  ids = np.array([federation.position(c) for c in native], np.int64)
  if len(set(ids.tolist())) != len(ids):
    raise UserError("each client can take part once in a round", field="clients")

  def rows(client: int) -> np.ndarray:
    # An empty record contributes nothing, so an emptied client is one without examples.
    held = federation.indices[client]
    present = federation.dataset.present
    return held if present is None else held[present[held]]

  def batches(client: int, held: np.ndarray) -> LocalBatches:
    # 1 separates these random streams from the sampler's, whose spawn key is the step alone.
    stream = np.random.SeedSequence(seed, spawn_key=(1, round, client))
    rng = np.random.Generator(np.random.Philox(stream))
    places, mask = work.rows(len(held), rng)
    return LocalBatches(held[places].astype(np.int32), mask)

  held = {client: rows(client) for client in ids.tolist()}
  return Cohort(
    ids=ids,
    num_examples=np.array([len(each) for each in held.values()], np.int64),
    batches=tuple(batches(client, each) for client, each in held.items()),
    data=Example(federation.dataset.x, federation.dataset.y),
  )


def cohorts(
  plan: Plan | None,
  federation: Federation,
  work: LocalWork,
  *,
  rng: int | None = None,
  start: int = 0,
) -> Iterator[Cohort]:
  """Yields the cohorts of rounds start .. num_steps - 1, drawn by the plan's sampler over CLIENTS.

  Each cohort is a function of (rng, round) alone, so a resumed run draws the cohorts that the
  interrupted run would have drawn. A Poisson cohort may be empty. Pass an empty cohort to `round`,
  too, which adds the noise that the plan accounts for. Each cohort holds its plan and its round. If
  the aggregator has a plan, `round` refuses a cohort of another plan or round. It always refuses a
  cohort of a private plan, unless the aggregator adds the noise of that plan.

  Args:
    plan: plan for clients: `sampling_prob` is that of a client, `normalize_by` counts clients.
      None, the plan of an aggregator without one, is refused.
    rng: integer seed of the sampler; 128 bits or more for a release. None takes 128 fresh bits of
      the operating system. A round then draws noise of its own for them: two runs with one key
      share none, unless both take the same cohorts.
    start: number of rounds that a resumed run did before; above 0 only with an `rng`.

  Raises:
    UserError: `plan` is None, or the sampler's capacity is too small for so many clients.
  """
  if plan is None:
    raise UserError(
      "knows no plan that could draw cohorts; give central(plan, key), or, "
      "without privacy, weighted_mean().drawn_by(plan)",
      field="aggregator",
    )
  validate.instance(
    Federation, "a Federation, as data.by_client makes", federation=federation
  )
  validate.instance(
    LocalWork, "a LocalWork, as LocalWork(batch_size=10, epochs=1)", work=work
  )
  draws = batches_lib.draws_of(rng, start, plan.sampler, federation.num_clients)
  # The capacity is checked before the first draw, and is refused if it would overflow too often.
  plan.check_capacity(federation.num_clients, federation.nominal_users)

  def generate() -> Iterator[Cohort]:
    for step in range(start, plan.num_steps):
      ids = draw_rows(plan.sampler, federation.num_clients, seed=draws.seed, step=step)
      cohort = cohort_of(federation, ids, work, seed=draws.seed, round=step)
      yield cohort._replace(drawn=Drawn(plan, step, draws.run))

  return generate()


def check_drawn(cohort: Cohort, plan: Plan | None, private: bool, round: int) -> None:
  """Refuses a cohort whose round would not keep the stated epsilon. A cohort that was made by hand
  (`drawn` is None) is not checked.

  Args:
    plan: the aggregator's plan; None if unknown.
    private: whether the aggregator adds noise.
    round: number of the round that the cohort must be drawn for.

  Raises:
    UserError: the cohort is of a private plan, and the aggregator adds no noise, or noise of an
      unknown plan. If `plan` is known: the cohort is of another plan, or of another round.
  """
  if cohort.drawn is None:
    return
  drawn = cohort.drawn
  if not private and drawn.plan.is_private:
    raise UserError(
      "adds no noise, but the cohort was drawn by a private plan; use "
      "central(plan, key), or draw by a plan with noise_multiplier=0",
      field="aggregator",
    )
  if plan is None and drawn.plan.is_private:
    raise UserError(
      "whose noise it adds is not known, but the cohort was drawn by a private "
      "plan; use central(plan, key)",
      field="aggregator",
    )
  if plan is None:
    return
  if type(drawn.plan) is not type(plan):
    raise UserError(
      "was drawn by silos; must be drawn by the aggregator's plan", field="cohort"
    )
  if drawn.plan != plan:
    names = [field.name for field in dataclasses.fields(plan)]
    name = next(n for n in names if getattr(drawn.plan, n) != getattr(plan, n))
    raise UserError(
      f"was drawn by another plan than the aggregator's, {name}={getattr(drawn.plan, name)!r}: "
      f"must be {getattr(plan, name)!r}",
      field="cohort",
    )
  if drawn.round != round:
    raise UserError(
      f"was drawn for round={drawn.round}, must be for round={round} of the state",
      field="cohort",
    )


def from_batches(examples: Sequence[ArrayTree], *, batch_size: int | None = None) -> Cohort:
  """Makes a cohort from the arrays [n, ...] of each client, for one pass in the order given.

  A `batch_size` of None puts all examples of a client into one batch.

  >>> c = from_batches([np.array([[1.0], [2.0], [3.0]]), np.zeros((0, 1))], batch_size=2)
  >>> [len(b.mask) for b in c.batches], c.num_examples.tolist()
  ([2, 0], [3, 0])
  """
  sizes = [len(jax.tree.leaves(client_examples)[0]) for client_examples in examples]

  def in_order(client_examples: ArrayTree, n: int) -> LocalBatches:
    shape = (-1, batch_size or bucket(max(n, 1)))
    places, mask = batches_lib.pad(np.arange(n), -(-n // shape[1]) * shape[1])
    places = places.reshape(shape)
    mask = mask.reshape(shape)
    return LocalBatches(
      jax.tree.map(lambda leaf: np.asarray(leaf)[places], client_examples), mask
    )

  batches = tuple(
    in_order(client_examples, n) for client_examples, n in zip(examples, sizes)
  )
  return Cohort(np.arange(len(sizes)), np.array(sizes, np.int64), batches)
