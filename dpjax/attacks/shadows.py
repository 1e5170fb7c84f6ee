"""Shadow models: the target's training, repeated on random halves of the records.

This module uses the target's own pipeline. The caller passes the algorithm (such as
`training.dp_sgd`), the batches (`plan.batches`) and the initial parameters. Each is a function of
the key or seed of one shadow. The module gives every shadow its records and its own randomness. It
keeps the scores that the shadow gives to all records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from dpjax import training, validate
from dpjax.attacks import signals
from dpjax.attacks.membership import Evidence, shadows_of
from dpjax.attacks.signals import Signal
from dpjax.data import Dataset
from dpjax.types import Algorithm, Array, Batch, HostArray, Params
from dpjax.validate import UserError

# Part of the seed, so that other uses of the same seed draw different numbers.
_STREAM = 0x5AD0_4A11


def random_halves(
  num_models: int, num_records: int, *, seed: int, exact: bool = False
) -> np.ndarray:
  """Draws the members of each model: bool [models, records], a fair coin for each record.

  Rows 2 k and 2 k + 1 are each other's complement. If the number of models is even, exactly half of
  them hold each record. If it is odd, the last row is independent of the others, as the target of
  an attack must be.

  Args:
    exact: whether each row holds exactly half of the records, for samplers that need a fixed number
      of records. Another record then replaces one that is left out
      (`allowed.replacement_line`).

  >>> halves = random_halves(5, 1000, seed=0)
  >>> halves[:4].sum(axis=0).tolist() == [2] * 1000, 450 < int(halves[4].sum()) < 550
  (True, True)
  """
  validate.integer_at_least(1, num_models=num_models, num_records=num_records)
  validate.integer_at_least(0, seed=seed)
  if exact and num_records % 2:
    raise UserError("must be even with exact=True", field="num_records", value=num_records)
  coins = np.random.default_rng([seed, _STREAM]).random(
    ((num_models + 1) // 2, num_records)
  )
  half = np.median(coins, axis=1, keepdims=True) if exact else 0.5
  held = coins < half
  return np.stack([held, ~held], axis=1).reshape(-1, num_records)[:num_models]


def each_as_target(
  scores: HostArray, included: HostArray
) -> Iterator[tuple[Evidence, np.ndarray]]:
  """Yields (evidence, membership) for each model as the target.

  Its shadows are the others, except its complement: a model that holds exactly the records that the
  target lacks. Else the NUMBER of shadows that held a record would reveal the members.

  Raises UserError for masks in which this number reveals the members nevertheless.

  >>> halves = random_halves(6, 10, seed=0)
  >>> [evidence.shadows.shape for evidence, _ in each_as_target(halves + 0.0, halves)]
  [(4, 10), (4, 10), (4, 10), (4, 10), (4, 10), (4, 10)]
  """
  score_rows = np.atleast_2d(signals.numbers("scores", scores))
  whole = Evidence(score_rows[0], score_rows, np.asarray(included))
  for target, members in enumerate(whole.included):
    kept = shadows_of(target, whole.included)
    _check_counts(whole.included[kept].sum(axis=0), members)
    yield (
      Evidence(whole.shadows[target], whole.shadows[kept], whole.included[kept]),
      members,
    )


def _check_counts(counts: np.ndarray, members: np.ndarray) -> None:
  """Raises UserError if the counts [n] of shadows that held a record reveal the members.

  They do if every non-member was held by exactly one shadow more than every member.
  """
  if np.ptp(counts) and not np.ptp(counts + members):
    raise UserError(
      "every record is held by equally many models, so the number of shadows "
      "that held it tells the target's members; deal the records by coins "
      "(random_halves)",
      field="included",
    )


def train_shadows(
  records: Dataset,
  included: HostArray,
  *,
  algorithm: Callable[[Array], Algorithm],
  batches: Callable[[Dataset, int], Iterable[Batch]],
  init_params: Callable[[Array], Params],
  signal: Signal,
  seed: int,
  released: Callable[[Any], Params] = training.eval_params,
  side_by_side: int = 1,
  num_scores: int | None = None,
  progress: Callable[[int, int], None] = lambda done, total: None,
) -> np.ndarray:
  """Trains a model on each row of `included` and asks it about all records: [S, n] scores.

  Args:
    records: the n records.
    included: bool [S, n], the records of each shadow, such as `random_halves`.
    algorithm: the target's algorithm, as a function of the typed key of one shadow's noise:
      `lambda key: training.dp_sgd(loss_fn, plan, tx, noise_key=key)`. Split the key if examples
      need keys of their own. JAX traces this function, so it cannot read the key's value.
    batches: function (one shadow's records, integer seed) -> batches, such as `plan.batches`. All
      shadows should have equally many batches of equal shapes, since each shape is compiled.
    init_params: function from a key to the first parameters.
    signal: function (parameters, records) -> [n], such as `signals.log_odds_of_model(model.apply)`.
    seed: seed of all draws; shadow i does not depend on the other shadows.
    released: function from a final state to the parameters that are released.
    side_by_side: number of shadows that are trained at once, under vmap. It changes scores only by
      rounding. Shadows that are trained together must have equally many batches.
    num_scores: length of the signal; None: one score for each record. A signal may read the
      parameters alone, or ask about other inputs (`property_inference`).
    progress: function that is called with numbers of shadows (done, total) after each group.

  Raises UserError for masks that do not fit, an empty row, and a signal of another shape, or not
  finite (a shadow that diverged). `launch.attack` also resumes after it was stopped.
  """
  train = shadow_models(
    records,
    included,
    algorithm=algorithm,
    batches=batches,
    init_params=init_params,
    seed=seed,
    released=released,
    side_by_side=side_by_side,
  )
  if num_scores is not None:
    validate.integer_at_least(1, num_scores=num_scores)
  size = len(records) if num_scores is None else num_scores
  num_models = len(np.asarray(included))
  scores: list[np.ndarray] = []
  for group in range(num_groups(num_models, side_by_side)):
    for params in train(group):
      scores.append(_answers_of(signal(params, records), size, len(scores)))
    progress(len(scores), num_models)
  return np.stack(scores)


def num_groups(num_models: int, side_by_side: int) -> int:
  """Returns the number of groups, if up to `side_by_side` models are trained at once.

  >>> num_groups(17, 4)
  5
  """
  return -(-num_models // side_by_side)


def shadow_models(
  records: Dataset,
  included: HostArray,
  *,
  algorithm: Callable[[Array], Algorithm],
  batches: Callable[[Dataset, int], Iterable[Batch]],
  init_params: Callable[[Array], Params],
  seed: int,
  released: Callable[[Any], Params] = training.eval_params,
  side_by_side: int = 1,
) -> Callable[[int], list[Params]]:
  """Returns `train(g)`, which trains the group of rows from g * side_by_side on.

  `train` returns the released parameters of each model of the group. Arguments and draws are those
  of `train_shadows`.

  Raises UserError for masks that do not fit, or an empty row.
  """
  rows = _rows(records, included)
  validate.integer_at_least(0, seed=seed)
  validate.integer_at_least(1, side_by_side=side_by_side)
  width = min(side_by_side, len(rows))
  # One compilation serves all groups, since the noise key is an argument.
  step = lambda key, state, batch: algorithm(key).step(state, batch)[0]
  compiled = jax.jit(jax.vmap(step) if width > 1 else step)
  stacked = lambda trees: jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *trees)

  def train(group: int) -> list[Params]:
    start = group * side_by_side
    numbers = range(start, start + width)
    # A short last group repeats the records of its last shadow, so that it has the compiled shape.
    # These repeated shadows have other keys: noise for two models with one key would be NaN.
    padded = rows[np.minimum(numbers, len(rows) - 1)]
    noise, first, seeds = zip(*(_keys_of(seed, number) for number in numbers))
    states = [algorithm(key).init(init_params(init)) for key, init in zip(noise, first)]
    parts = [records.subset(np.flatnonzero(row)) for row in padded]
    drawn = [batches(part, number) for part, number in zip(parts, seeds)]
    if width == 1:
      step_of_one = functools.partial(compiled, noise[0])
      return [released(functools.reduce(step_of_one, drawn[0], states[0]))]
    state, keys = stacked(states), stacked(noise)
    # Without strict=True the last batches of some shadows would be dropped silently, if their
    # numbers differed.
    for together in zip(*drawn, strict=True):
      state = compiled(keys, state, stacked(together))
    each = range(min(width, len(rows) - start))
    return [released(jax.tree.map(lambda leaf, i=i: leaf[i], state)) for i in each]

  return train


def _rows(records: Dataset, included: HostArray) -> np.ndarray:
  rows = np.asarray(included)
  if rows.dtype != bool or rows.ndim != 2 or rows.shape[1:] != (len(records),):
    raise UserError(
      f"must be bool [shadows, {len(records)}], one for each record, got "
      f"{rows.dtype} of shape {rows.shape}",
      field="included",
    )
  if len(rows) == 0 or not rows.any(axis=1).all():
    raise UserError(
      "must have rows, each of which holds at least one record", field="included"
    )
  return rows


def _keys_of(seed: int, index: int) -> tuple[Array, Array, int]:
  """Returns a shadow's noise key, key of initial parameters, and seed of batches."""
  words = np.random.SeedSequence([seed, _STREAM, index]).generate_state(6)
  # `jax.random.key` takes only 32 bits, so all other bits are folded in.
  key = functools.reduce(jax.random.fold_in, words[:2], jax.random.key(seed % 2**32))
  noise, init = jax.random.split(key)
  return noise, init, int.from_bytes(words[2:].tobytes(), "little")


def _answers_of(answer: HostArray, size: int, index: int) -> np.ndarray:
  scores = np.asarray(answer, np.float64)
  if scores.shape != (size,):
    raise UserError(f"must return [{size}] numbers, got {scores.shape}", field="signal")
  if not np.isfinite(scores).all():
    raise UserError(
      f"gives {np.count_nonzero(~np.isfinite(scores))} of {size} records no "
      f"finite score for shadow {index}: its training diverged",
      field="signal",
    )
  return scores
