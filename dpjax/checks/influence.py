"""Checks of the gradient: one example's influence, the sum, padding, cross-example leaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import gradients, trees
from dpjax.accounting.proved import NeighboringRelation
from dpjax.checks.subject import BATCH, SEED, Row, Subject, row
from dpjax.gradients.clip import sensitivity
from dpjax.noise import source
from dpjax.types import ArrayTree, LossFn, Params

# Tolerance for rounding in float32, relative to the sensitivity.
_SLACK = 1e-3
# Tolerance in clip norms for each example; it covers bfloat16 models.
_SUM_SLACK = 0.02
# Relative tolerance of model outputs. It is small, since a row of a matrix product does not depend
# on the other rows.
_LEAK = 1e-5
_SPOILT = (float("nan"), float("inf"), 1e38)
# Factors on inputs and parameters, which make gradients adversarially large.
_FACTORS = (1.0, 1e2, 1e4)
# Factors on inputs and losses, which make gradients shorter than the clip norm.
_SMALL_FACTORS = (1e-1, 1e-3, 1e-6)
# Tolerance between sums of one gradient method under different masks, relative to the total length
# of the terms.
_EXACT = 1e-3
# Tolerance between sums of two gradient methods, relative to the total length of the terms. It
# covers bfloat16 models.
_NEAR = 0.05
# Numbers of steps of training without privacy after which gradients are tested.
_FITTED = (15, 40, 80, 150)
# Number of parameters above which a model is tested in fewer regimes.
_LARGE = 300_000
# Number of sums after the first one in one trace, for a small and for a large model.
_TRACED_CALLS = (3, 1)
# Number of sums after the first one, each in a call of its own, for a small and for a large model.
_LATER_CALLS = (16, 4)
# Number of batches that are tested, so that labels occur which the first batch lacks.
_MORE_BATCHES = 6


def _numpy(tree: Any) -> Any:
  return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def _norm(tree: Any) -> float:
  squares = [float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(_numpy(tree))]
  return float(np.sqrt(sum(squares)))


def _worst(moves: Sequence[float]) -> float:
  """Returns the maximum; NaN if a value is NaN or infinite.

  A plain max may drop NaN, and a check must fail on it."""
  return max(moves) if np.isfinite(moves).all() else math.nan


def _minus(a: Any, b: Any) -> Any:
  return jax.tree.map(np.subtract, _numpy(a), _numpy(b))


def _is_float(leaf: Any) -> bool:
  return not trees.is_key(leaf) and jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating)


def _put(batch: Any, rows: Any, change: Callable[[jax.Array], Any]) -> Any:
  """Returns the batch with `change` applied to the floats of these rows; integers and keys stay."""

  def put(leaf):
    if not _is_float(leaf):
      return leaf
    leaf = jnp.asarray(leaf)
    return leaf.at[rows].set(change(leaf[rows]))

  return jax.tree.map(put, batch)


def _scale(tree: Any, factor: float) -> Any:
  return _put(tree, ..., lambda leaf: leaf * factor)


def _own_grad(subject: Subject) -> Callable[..., Any]:
  return subject.once("own_grad", lambda: jax.jit(jax.grad(subject.loss_fn)))


def _total(subject: Subject) -> Callable[..., Any]:
  """Returns (params, batch, mask) -> the sum that noise is added to."""
  clipped_grad = subject.clipped_grad
  sum_of = lambda params, batch, mask: clipped_grad(params, batch, mask).total
  fn = subject.once("total", lambda: jax.jit(sum_of))
  return lambda params, batch, mask: _numpy(fn(params, batch, jnp.asarray(mask)))


def _without(j: int) -> np.ndarray:
  return np.arange(BATCH) != j


def _influence(total: Any, exchange: bool) -> Callable[[Any, Any, int], Any]:
  """Returns (params, batch, j) -> change of the sum if example j is removed. With `exchange` it is
  replaced by another example instead."""

  def move(params, batch, j):
    whole = np.ones(BATCH, bool)
    if exchange:
      return _minus(total(params, batch, whole), total(params, _copy_row(batch, j), whole))
    return _minus(total(params, batch, whole), total(params, batch, _without(j)))

  return move


def _scale_row(batch: Any, j: int, factor: float) -> Any:
  """Returns the batch with the floats of example j multiplied by `factor`."""
  return _put(batch, j, lambda leaf: leaf * factor)


def _copy_row(batch: Any, j: int) -> Any:
  """Returns the batch with example j replaced by a copy of the next example."""

  def copy(leaf):
    leaf = leaf if trees.is_key(leaf) else jnp.asarray(leaf)
    return leaf.at[j].set(leaf[(j + 1) % len(leaf)])

  return jax.tree.map(copy, batch)


def influence(subject: Subject) -> Row:
  """Tests that no example moves the sum by more than the sensitivity that the noise covers."""
  relation = subject.plan.neighboring_relation
  exchange = relation is NeighboringRelation.REPLACE_ONE
  move = _influence(_total(subject), exchange)
  batch = subject.batch()
  norms = [
    _norm(move(_scale(subject.params, p), changed, j))
    for p in _FACTORS[:2]
    for x in _FACTORS
    for j in range(3)
    for changed in (_scale(batch, x), _scale_row(batch, j, x))
  ]
  bound = sensitivity(subject.plan.l2_bound, relation)
  norms += _alike_moves(subject, exchange)
  return row(
    _worst(norms),
    bound * (1 + _SLACK),
    f"largest move of the sum, {relation}, inputs and parameters up to x{_FACTORS[-1]:g}",
  )


def _alike_moves(subject: Subject, exchange: bool) -> Iterator[float]:
  """Yields how far the first and the last example move the sum of a full batch of equal examples.
  Equal terms give a long sum, in which rounding is largest."""
  size = subject.plan.sampler.padded_batch_size
  total = _total(subject)
  scaled = _scale(subject.batch(), _FACTORS[1])
  alike = jax.tree.map(lambda leaf: leaf[np.zeros(size, int)], scaled)
  everyone = np.ones(size, bool)
  whole = total(subject.params, alike, everyone)
  for j in {0, size - 1}:
    if exchange:
      put = lambda leaf, pair, j=j: jnp.asarray(leaf).at[j].set(pair[1])
      other = jax.tree.map(put, alike, scaled)
      yield _norm(_minus(whole, total(subject.params, other, everyone)))
    else:
      yield _norm(_minus(whole, total(subject.params, alike, np.arange(size) != j)))


def _published_factor(rule: gradients.ClipRule, norm: float, bound: float) -> float | None:
  """Returns the factor by which the rule's paper multiplies a gradient of this norm, without use of
  the rule's code; None for an unknown rule."""
  if type(rule) is gradients.Flat or rule.adapts:  # Abadi et al. 2016
    return min(1.0, bound / norm)
  if isinstance(rule, gradients.Automatic):  # Bu et al. 2022
    return bound / (norm + rule.gamma)
  return None


def _term(subject: Subject, batch: Any, i: int) -> tuple[Any, Any]:
  """Returns (the contribution of example i alone, the expected contribution), in float64. Expected
  is the example's gradient times the published factor; for an unknown rule, times the factor in
  [0, 1] that comes nearest to the contribution."""
  single_row = jax.tree.map(lambda leaf: leaf[i : i + 1], batch)
  term = _total(subject)(subject.params, single_row, np.ones(1, bool))
  example = jax.tree.map(lambda leaf: leaf[0], single_row)
  grads = _numpy(_own_grad(subject)(subject.params, example))
  clip = subject.plan.l2_clip_norm

  def wanted(bound, group, seen):
    norm = _norm(group)
    if not (bound and 0 < norm < math.inf):
      return jax.tree.map(np.zeros_like, group)
    factor = _published_factor(clip.rule, norm, bound)
    if factor is None:
      along = jax.tree.map(lambda g, t: np.sum(g * t / norm**2), group, seen)
      factor = np.clip(sum(jax.tree.leaves(along)), 0, 1)
    return trees.scale(group, factor)

  return term, jax.tree.map(wanted, clip.norms, grads, term)


def one_term(subject: Subject) -> Row:
  """Tests that each example alone contributes its gradient, scaled as the rule's paper says, and
  that this contribution is never longer than the clip norm."""
  bounds = subject.plan.l2_clip_norm
  off = []
  over = []
  for factor in _FACTORS[:2]:
    batch = _scale(subject.batch(), factor)
    for i in range(BATCH):
      term, wanted = _term(subject, batch, i)
      off.append(_norm(_minus(term, wanted)) / subject.plan.l2_bound)
      norms = jax.tree.map(lambda _, group: _norm(group), bounds.norms, term)
      pairs = zip(jax.tree.leaves(norms), bounds.group_bounds())
      over += [norm / bound - 1 if bound else norm for norm, bound in pairs]
  known = _published_factor(bounds.rule, 1.0, 1.0) is not None
  return row(
    _worst([_worst(off) / _SUM_SLACK, _worst(over) / _SLACK]),
    1.0,
    f"each of {len(off)} examples alone: {max(off):.1e} clip norms off "
    f"{'the published rule' if known else 'its own direction'} (<= {_SUM_SLACK:g}), "
    f"{max(0.0, *over):.1e} beyond its bound (<= {_SLACK:g})",
  )


def sum_of_terms(subject: Subject) -> Row:
  """Tests that the sum equals the sum of the examples' gradients, each computed alone and
  clipped."""
  batch = subject.batch()
  total = _total(subject)(subject.params, batch, np.ones(BATCH, bool))
  for i in range(BATCH):
    total = _minus(total, _term(subject, batch, i)[1])
  return row(
    _norm(total) / (BATCH * subject.plan.l2_bound),
    _SUM_SLACK,
    "error per example in clip norms, against jax.grad of each example alone",
  )


def _own_grads(loss_fn: LossFn) -> Callable[..., Any]:
  """Returns (params, batch) -> gradients [B, ...], computed one example at a time."""
  return jax.jit(
    # Gradients are computed one at a time: under vmap an example may affect another one.
    lambda params, batch: jax.lax.map(
      lambda example: jax.grad(loss_fn)(params, example), batch
    )
  )


def _scaled_total(gradient_of: Callable[..., Any], loss_fn: LossFn) -> Callable[..., Any]:
  """Returns (factor, params, batch, mask) -> the sum for the loss times the factor."""

  def total(factor, params, batch, mask):
    scaled = lambda params, example: loss_fn(params, example) * factor
    return gradient_of(scaled)(params, batch, mask).total

  return jax.jit(total)


def _masks() -> Iterator[np.ndarray]:
  """Yields masks with no example, with all, and with every number from 2 to `BATCH` - 1."""
  yield np.zeros(BATCH, bool)
  yield np.ones(BATCH, bool)
  rng = np.random.default_rng(SEED)
  for count in range(2, BATCH):
    yield rng.permutation(np.arange(BATCH) < count)


def _fit_params(subject: Subject) -> list[tuple[str, Any]]:
  """Returns (name, parameters) after training by Adam on the batch of a check, so that gradients
  get short."""
  # Two parts of a check need them, and large models have one of them alone.
  return subject.once("fitted", lambda: list(_fit(subject, subject.batch())))


def _fit(subject: Subject, batch: Any) -> Iterator[tuple[str, Any]]:
  tx = optax.adam(0.02)
  mean = lambda params: jnp.mean(
    jax.vmap(subject.loss_fn, in_axes=(None, 0))(params, batch).astype(jnp.float32)
  )

  @jax.jit
  def train(params, state, steps):  # one program for every number of steps
    def step(_, carry):
      params, state = carry
      updates, state = tx.update(jax.grad(mean)(params), state, params)
      return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(0, steps, step, (params, state))

  large = trees.size(subject.params) > _LARGE
  params = subject.params
  state = tx.init(subject.params)
  done = 0
  for steps in _FITTED[:1] if large else _FITTED:
    params, state = train(params, state, steps - done)
    done = steps
    yield f"after {steps} steps of training on them", params


def _regimes(subject: Subject) -> Iterator[tuple[str, Callable[..., Any], Any, Any]]:
  """Yields (name, total, params, batch) with gradients of very different lengths."""
  total = _total(subject)
  batch = subject.batch()
  params = subject.params
  few = trees.size(params) > _LARGE
  yield "as they are", total, params, batch
  yield "two of them alike", total, params, _copy_row(batch, 0)
  for factor in _FACTORS[1:2] if few else (*_FACTORS[1:], *_SMALL_FACTORS, -1.0):
    yield f"inputs x{factor:g}", total, params, _scale(batch, factor)
    yield f"one input x{factor:g}", total, params, _scale_row(batch, 1, factor)
  for name, fitted_params in _fit_params(subject):
    yield name, total, fitted_params, batch
  if subject.gradient_of is None:
    return
  scaled = _scaled_total(subject.gradient_of, subject.loss_fn)
  for factor in _SMALL_FACTORS:
    by = lambda params, batch, mask, factor=factor: _numpy(
      scaled(factor, params, batch, jnp.asarray(mask))
    )
    yield f"losses x{factor:g}", by, params, batch


def _terms(subject: Subject, grads: Any) -> Any:
  """Returns stacked gradients, clipped as the rule's paper says, in float64; the rule must be
  known."""
  clip = subject.plan.l2_clip_norm

  def clipped(bound, group):
    leaves = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(group)]
    norms = np.sqrt(sum(np.sum(leaf**2, axis=1) for leaf in leaves))
    factors = [
      (_published_factor(clip.rule, norm, bound) or 0.0)
      if bound and 0 < norm < math.inf
      else 0.0
      for norm in norms
    ]
    times = np.array(factors)
    by = lambda leaf: np.nan_to_num(leaf) * times.reshape(-1, *(1,) * (leaf.ndim - 1))
    return jax.tree.map(by, group)

  return jax.tree.map(clipped, clip.norms, grads)


def _off(total: Any, terms: Any, mask: np.ndarray) -> float:
  """Returns the distance between a sum and the sum of its terms [B, ...], relative to the total
  length of the terms."""
  wanted = jax.tree.map(lambda leaf: np.tensordot(mask.astype(float), leaf, axes=1), terms)
  lengths = [
    _norm(jax.tree.map(lambda leaf, i=i: leaf[i], terms)) for i in range(len(mask))
  ]
  length = float(np.array(lengths) @ mask)
  moved = _norm(_minus(total, wanted))
  # A length of at most 1e-30 counts as zero. If all terms are zero, the sum must be zero, too.
  return moved / length if length > 1e-30 else min(moved, math.inf) * 1e30 * (moved > 1e-30)


def any_mask(subject: Subject) -> Row:
  """Tests that the sum equals the sum of the terms of single examples, for many masks and for
  gradients of very different lengths. No term may depend on the number, lengths or labels of other
  terms."""
  worst = 0.0
  where = ""
  shortest = math.inf
  for name, total, params, batch in _regimes(subject):
    alone = [total(params, batch, np.arange(BATCH) == i) for i in range(BATCH)]
    terms = jax.tree.map(lambda *leaves: np.stack(leaves), *alone)
    for mask in _masks():
      off = _off(total(params, batch, mask), terms, mask) / _EXACT
      if not off <= worst:
        worst = off
        where = f"{name}, {int(mask.sum())} of {BATCH}"
    least = min(_norm(vector) for vector in alone)
    shortest = min(shortest, least or shortest)
  off, name = _by_another_route(subject)
  if not off <= worst:
    worst = off
    where = name
  return row(
    worst,
    1.0,
    f"error in {_EXACT:g} of the terms' lengths (by another route, {_NEAR:g}); worst: {where}; "
    f"shortest term {shortest / subject.plan.l2_bound:.1e} clip norms",
  )


def _by_another_route(subject: Subject) -> tuple[float, str]:
  """Returns (worst deviation of a sum from clipped gradients that are computed one example at a
  time and then added, name of the worst case).

  The deviation is in units of `_NEAR`; it is 0 if the clipping rule is unknown."""
  clip = subject.plan.l2_clip_norm
  if _published_factor(clip.rule, 1.0, 1.0) is None:
    return 0.0, ""
  own_grads = _own_grads(subject.loss_fn)
  total = _total(subject)
  deviations = []
  more = 1 if trees.size(subject.params) > _LARGE else _MORE_BATCHES
  cases = [
    (f"examples {k}", subject.params, subject.batch(start=k)) for k in range(1, more)
  ]
  batch = subject.batch()
  cases += [(name, params, batch) for name, params in _fit_params(subject)]
  everyone = np.ones(BATCH, bool)
  for name, params, examples in cases:
    terms = _terms(subject, _numpy(own_grads(params, examples)))
    off = _off(total(params, examples, everyone), terms, everyone) / _NEAR
    deviations.append(
      (off if math.isfinite(off) else math.inf, f"{name}, by another route")
    )
  return max(deviations)


def padding(subject: Subject) -> Row:
  """Tests that the content of padding, NaN included, changes nothing."""
  total = _total(subject)
  batch = subject.batch()
  half = np.arange(BATCH) < BATCH // 2

  filled = lambda value: _put(batch, slice(BATCH // 2, None), lambda leaf: value)
  clean = total(subject.params, _copy_row(batch, BATCH - 1), half)
  moves = [
    _norm(_minus(total(subject.params, filled(value), half), clean))
    for value in (0.0, 1e4, float("nan"))
  ]
  return row(
    _worst(moves) / subject.plan.l2_bound,
    _SLACK,
    "move of the sum, in clip norms, when padded rows hold 0, 1e4 or NaN",
  )


def whole_batch(subject: Subject) -> Row:
  """Tests that the sum of a batch of full size equals the sums of its parts of `BATCH` rows, added
  up. Large batches may use another algorithm.

  One gradient is far longer than the clip norm. Padding holds NaN or other examples.
  """
  size = max(subject.plan.sampler.padded_batch_size, 2 * BATCH)
  rng = np.random.default_rng(SEED)
  batch = _scale_row(subject.batch(size), BATCH + 1, _FACTORS[-1])
  many = rng.random(size) < 0.75
  many[[BATCH + 1, -1]] = True
  last = np.arange(size) == size - 1
  everyone = np.ones(size, bool)
  nobody = np.zeros(size, bool)
  moves = [
    _whole_less_parts(subject, batch, mask) for mask in (many, last, everyone, nobody)
  ]
  return row(
    _worst(moves) / (math.sqrt(size) * subject.plan.l2_bound),
    _SUM_SLACK,
    f"{size} rows, many, one, all or none of them taken, against sums of {BATCH}: error in "
    "clip norms / sqrt(rows)",
  )


def _whole_less_parts(subject: Subject, batch: Any, mask: np.ndarray) -> float:
  """Returns the norm of a large batch's sum minus the sums of its parts of `BATCH` rows."""
  size = len(mask)
  total = _total(subject)
  # Half of the padding is NaN, the rest is other examples.
  hole = np.flatnonzero(~mask)[::2]
  batch = _put(batch, hole, lambda leaf: float("nan"))
  left = total(subject.params, batch, mask)
  for start in range(0, size, BATCH):
    take = np.arange(start, start + BATCH)
    here = (take < size) & mask[take % size]
    if here.any():
      part = jax.tree.map(lambda leaf, at=take % size: leaf[at], batch)
      left = _minus(left, total(subject.params, part, here))
  return _norm(left)


def _dropped_from_sum(subject: Subject) -> Iterator[float]:
  """Yields distances by which an example of NaN, infinity or 1e38 moves the sum, less the clip norm
  if its gradient is finite. They are in units of min(clip norm, 1)."""
  total = _total(subject)
  unit = min(subject.plan.l2_bound, 1.0)
  batch = subject.batch()
  own_grad = _own_grad(subject)
  everyone = np.ones(BATCH, bool)
  for value in _SPOILT:
    for j in (0, BATCH - 1):
      spoilt = _put(batch, j, lambda leaf, value=value: value)
      grad = own_grad(subject.params, jax.tree.map(lambda leaf, j=j: leaf[j], spoilt))
      moved = _norm(
        _minus(
          total(subject.params, spoilt, everyone),
          total(subject.params, spoilt, _without(j)),
        )
      )
      finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(_numpy(grad)))
      # A finite gradient may move the sum by the clip norm. `influence` tests this bound.
      allowed = subject.plan.l2_bound * (1 + _SLACK) if finite else 0.0
      yield (moved - allowed) / unit


def _dropped_from_stack(subject: Subject) -> Iterator[float]:
  """Yields distances by which non-finite entries in stacked gradients move the sum in the update of
  the transform, in units of min(clip norm, 1)."""
  plan = subject.plan
  key = jax.random.key(SEED)
  length = min(plan.l2_bound, 1.0) / math.sqrt(max(1, trees.size(subject.params)))
  floats = source.as_floats(subject.params)
  grads = jax.tree.map(lambda p: jnp.full((BATCH, *jnp.shape(p)), length), floats)
  # The gradient of this loss is the example itself. It gives stacked gradients of any
  # value, in the type that the private transform accepts.
  stacked_grads = lambda params, example: jnp.stack(
    [jnp.sum(p * e) for p, e in zip(jax.tree.leaves(params), jax.tree.leaves(example))]
  ).sum()

  @jax.jit
  def update(grads, mask):
    stacked = gradients.per_example_grads(stacked_grads)(floats, grads)[1]
    tx = subject.transform(key)
    return tx.update(stacked, tx.init(floats), floats, mask=mask)[0]

  def spoil(tree, value, whole):
    leaves, treedef = jax.tree.flatten(tree)
    spoilt = leaves[:1] if not whole else leaves  # one entry of one leaf, or row 0 of all
    put = lambda leaf: (
      leaf.at[0].set(value) if whole else leaf.at[(0,) * leaf.ndim].set(value)
    )
    return treedef.unflatten([*map(put, spoilt), *leaves[len(spoilt) :]])

  without = update(grads, jnp.asarray(_without(0)))
  for value in _SPOILT[:2]:
    for whole in (False, True):
      seen = update(spoil(grads, value, whole), jnp.ones(BATCH, bool))
      yield _norm(_minus(seen, without)) * plan.normalize_by / min(plan.l2_bound, 1.0)


def dropped(subject: Subject) -> Row:
  """Tests that an example with a NaN or infinite gradient contributes nothing, and spoils
  nothing."""
  moves = [0.0, *_dropped_from_sum(subject), *_dropped_from_stack(subject)]
  noise = 1e-6 * subject.plan.noise_multiplier * math.sqrt(trees.size(subject.params))
  return row(
    _worst(moves),
    _SLACK + noise,
    "move of the sum, in clip norms, by an example of NaN, infinity or 1e38",
  )


def no_memory(subject: Subject) -> Row:
  """Tests that a sum does not depend on earlier batches. With error feedback, for example, it
  would."""
  batch = subject.batch()
  everyone = jnp.ones(BATCH, bool)
  other = _scale(_copy_row(batch, 0), -3.0)
  total = lambda params, examples: subject.clipped_grad(params, examples, everyone).total
  is_large = trees.size(subject.params) > _LARGE
  traced = _TRACED_CALLS[is_large]
  later = _LATER_CALLS[is_large]

  @jax.jit
  def in_one_trace(params, first):  # later calls see what the trace of an earlier one left
    totals = [total(params, first)]
    return [*totals, *(total(params, batch) for _ in range(traced))]

  def in_turn(fn):
    """Returns a function that calls `fn` for each batch in order, so that state kept on the host
    would reach the later calls."""
    return lambda params, first: [
      _numpy(fn(params, examples)) for examples in [first, *[batch] * later]
    ]

  ways = [in_one_trace, in_turn(jax.jit(total))]
  if subject.gradient_of is None:  # a `clipped_grad` of the caller's own may keep arrays
    ways = [in_turn(total), *ways]
  worst = 0.0
  for after in ways:
    # A failure ends the test. Code that keeps arrays would also keep tracers, and then raise
    # errors.
    if not worst <= _SLACK:
      break
    # This call replaces the state that earlier calls left.
    after(subject.params, batch)
    for seen, wanted in zip(
      after(subject.params, other)[1:], after(subject.params, batch)[1:]
    ):
      worst = _worst([worst, _norm(_minus(seen, wanted)) / subject.plan.l2_bound])
  detail = f"clip norms that a batch moves any of the {later} sums after it"
  return row(worst, _SLACK, detail)


def _perturbations(batch: Any, j: int) -> Iterator[Any]:
  """Yields batches with example j changed: replaced by its neighbour, scaled, shifted."""
  exchanged = _copy_row(batch, j)
  yield exchanged
  for change in (lambda leaf: leaf * -30 + 7, lambda leaf: leaf + 1e3):
    moved = _put(batch, j, change)
    yield jax.tree.map(lambda a, b: a if _is_float(a) else b, moved, exchanged)


def cross_example_leakage(
  fn: Callable[[Any, Any], Any], params: Params, batch: ArrayTree
) -> float:
  """Returns how much the outputs for the OTHER examples change when one example changes.

  Args:
    fn: `(params, batch) -> tree with leaves [B, ...]`: logits, losses or gradients, one row
      for each example. It may be any code that takes a whole batch.
    batch: tree with leaves [B, ...], B >= 2.

  Returns:
    The largest change in the row of another example, relative to the largest entry; 0 if no
    example affects another one. Batch normalisation, a softmax or a top-k over the batch, and a
    loss of pairs give a number above 0.

  >>> batch = jnp.arange(6.0).reshape(3, 2)
  >>> cross_example_leakage(lambda w, x: w * x, 2.0, batch)
  0.0
  >>> cross_example_leakage(lambda w, x: w * x.cumsum(axis=0), 2.0, batch) > 0.1
  True
  """
  fn = jax.jit(fn)
  clean = jax.tree.leaves(_numpy(fn(params, batch)))
  size = clean[0].shape[0]
  worst = 0.0
  for j in {0, size - 1}:
    for changed in _perturbations(batch, j):
      moved = jax.tree.leaves(_numpy(fn(params, changed)))
      for before, after in zip(clean, moved):
        others = np.arange(len(before)) != j
        # The floor makes 0 / 0 count as 0, which is no leak.
        largest = max(float(np.abs(before[others]).max(initial=0.0)), 1e-30)
        change = float(np.abs(after[others] - before[others]).max(initial=0.0))
        # A difference of infinities counts as a leak. It is NaN, which `max` would ignore.
        leak = change / largest
        worst = max(worst, leak if np.isfinite(leak) else math.inf)
  return worst


def _sum_leakage(subject: Subject) -> float:
  """Returns how far the other examples' part of the sum moves when example 0 changes, in clip
  norms."""
  total = _total(subject)
  batch = subject.batch()
  worst = 0.0
  first_only = np.arange(BATCH) == 0
  others = lambda b: _minus(
    total(subject.params, b, np.ones(BATCH, bool)), total(subject.params, b, first_only)
  )
  clean = others(batch)
  for changed in _perturbations(batch, 0):
    leak = _norm(_minus(others(changed), clean)) / subject.plan.l2_bound
    worst = max(worst, leak if np.isfinite(leak) else float("inf"))
  return worst


def cross_example(subject: Subject) -> Row:
  """Tests that no example changes another one's outputs in the model, or another one's gradient in
  the sum."""
  summed = _sum_leakage(subject)
  # Without `apply` there is only a loss of one example, so only the code of the sum can mix
  # examples.
  if subject.apply is None:
    detail = f"the others' gradients move by {summed:.1e} clip norms (<= {_SLACK:g})"
    return row(summed / _SLACK, 1.0, detail)
  x = jnp.asarray(subject.batch().x)
  model = cross_example_leakage(subject.apply, subject.params, x)
  return row(
    max(model / _LEAK, summed / _SLACK),
    1.0,
    f"model outputs move by {model:.1e} (<= {_LEAK:g}), the others' gradients by "
    f"{summed:.1e} clip norms (<= {_SLACK:g})",
  )


CHECKS = {
  "influence of one example": influence,
  "one clipped term": one_term,
  "sum of clipped terms": sum_of_terms,
  "sum for every mask and scale": any_mask,
  "whole batch is its parts": whole_batch,
  "padding contributes nothing": padding,
  "non-finite example dropped": dropped,
  "sum without memory": no_memory,
  "no cross-example leakage": cross_example,
}
