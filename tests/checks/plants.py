"""Bugs that void an epsilon, each planted into a sound run: which row of the table sees which.

    python -m tests.checks.plants results/checks/plants.csv

walks all of them, or those that are named behind it, and writes one line for each. A plant is a
function of a `Subject` that returns a broken one, beside the row that must refuse it. `UNSEEN`
names those that no row can see, with the reason.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import itertools
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs import quickstart
from dpjax.checks import batches, charges, influence, noise_distributions, whole_step
from dpjax.experiments.checks import of_config
from dpjax.experiments.config import fields
from dpjax.experiments.run import run_keys
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.types import Algorithm

STEPS = 150


class Plant(NamedTuple):
  """A bug, and the row of the table that must refuse it."""

  row: Callable[..., Any]
  break_: Callable[[Any], Any]  # subject -> broken subject


def config(**overrides: Any) -> Any:
  """The quickstart with a model of 650 parameters on 400 records."""
  small = {
    "model.name": "linear", "model.options": {}, "data.limit": 400, "num_steps": STEPS,
    "privacy.sampling_prob": 0.1,
  }  # fmt: skip
  return fields.replace_all(fields.replace_all(quickstart.get_config(), small), overrides)


def subject(**overrides: Any) -> Any:
  """The sound run."""
  return of_config.subject(config(**overrides))


def _scaled(tree: Any, factor: Any) -> Any:
  return jax.tree.map(lambda leaf: leaf * factor, tree)


# --- noise ------------------------------------------------------------------------------


def _noise(change: Callable[..., Any]) -> Callable[[Any], Any]:
  """change(noise in standard deviations, step, context) -> noise; the sum is left alone.

  context: key (of this step), total, mask, params, norms.
  """

  def broken(sound):
    plan = sound.plan
    std = plan.noise_multiplier * plan.l2_bound / plan.normalize_by

    def transform(key):
      base = sound.transform(key)

      def update(updates, state, params=None, *, mask=None, **_):
        inner, step = state
        out, inner = base.update(updates, inner, params, mask=mask)
        total = getattr(updates, "total", None)
        if total is not None:
          own = _scaled(total, 1 / plan.normalize_by)
          drawn = jax.tree.map(lambda a, b: (a - b) / std, out, own)
          context = {
            "key": jax.random.fold_in(jax.random.fold_in(key, 77), step), "total": total,
            "mask": mask, "params": params, "norms": updates.norms, "base": key,
          }  # fmt: skip
          drawn = change(drawn, step, context)
          out = jax.tree.map(lambda a, b: a * std + b, drawn, own)
        return out, (inner, step + 1)

      begin = lambda params: (base.init(params), jnp.int32(0))
      return optax.GradientTransformationExtraArgs(begin, update)

    return dataclasses.replace(sound, transform=transform)

  return broken


def _each(change: Callable[[jax.Array], jax.Array]) -> Callable[[Any], Any]:
  return _noise(lambda drawn, step, context: jax.tree.map(change, drawn))


def _cut(limit: float) -> Callable[[Any], Any]:
  return _each(lambda x: jnp.clip(x, -limit, limit))


def _folded(limit: float) -> Callable[[Any], Any]:
  """Values beyond the limit are drawn again, in effect: no value stands at the limit itself."""
  return _each(lambda x: jnp.where(jnp.abs(x) > limit, x * (limit - 1) / jnp.abs(x), x))


def _grid(spacing: float) -> Callable[[Any], Any]:
  return _each(lambda x: jnp.round(x / spacing) * spacing)


def _bfloat16(x: jax.Array) -> jax.Array:
  return x.astype(jnp.bfloat16).astype(x.dtype)


def _atom(drawn, step, context):
  hit = jax.random.bernoulli(context["key"], 0.002, jax.tree.leaves(drawn)[0].shape)
  leaves, treedef = jax.tree.flatten(drawn)
  leaves[0] = jnp.where(hit, 1.0, leaves[0])
  return jax.tree.unflatten(treedef, leaves)


def _same_in_neighbours(share):
  def change(drawn, step, context):
    def mixed(x):
      flat = x.ravel()
      return (math.sqrt(1 - share**2) * flat + share * jnp.roll(flat, 1)).reshape(x.shape)

    return jax.tree.map(mixed, drawn)

  return change


def _common(share):
  """A component that all coordinates share: small in each, large in their sum."""

  def change(drawn, step, context):
    one = jax.random.normal(context["key"])
    return jax.tree.map(lambda x: math.sqrt(1 - share**2) * x + share * one, drawn)

  return change


def _sums_to_zero(drawn, step, context):
  return jax.tree.map(lambda x: x - x.mean(), drawn)


def _half_copied(sign):
  def change(drawn, step, context):
    def copied(x):
      flat = x.ravel()
      half = flat.size // 2
      order = np.random.default_rng(3).permutation(half)
      return jnp.concatenate([flat[: flat.size - half], sign * flat[order]]).reshape(
        x.shape
      )

    return jax.tree.map(copied, drawn)

  return change


def _again(derive, lag=1):
  """Noise of odd steps is made of that of the step before: derive(old) -> new."""

  def broken(sound):
    def transform(key):
      base = sound.transform(key)

      def begin(params):
        none = jax.tree.map(lambda p: jnp.zeros((lag, *p.shape)), params)
        return base.init(params), none, jnp.int32(0)

      def update(updates, state, params=None, *, mask=None, **_):
        inner, held, step = state
        out, inner = base.update(updates, inner, params, mask=mask)
        if getattr(updates, "total", None) is not None:
          own = _scaled(updates.total, 1 / sound.plan.normalize_by)
          drawn = jax.tree.map(jnp.subtract, out, own)
          at, odd = step % lag, (step // lag) % 2 == 1
          drawn = jax.tree.map(
            lambda new, old: jnp.where(odd, derive(old[at]), new), drawn, held
          )
          held = jax.tree.map(lambda old, new: old.at[at].set(new), held, drawn)
          out = jax.tree.map(jnp.add, drawn, own)
        return out, (inner, held, step + 1)

      return optax.GradientTransformationExtraArgs(begin, update)

    return dataclasses.replace(sound, transform=transform)

  return broken


def _signs(x):
  drawn = np.random.default_rng(4).choice([-1.0, 1.0], x.size).reshape(x.shape)
  return x * drawn.astype(np.float32)


def _permuted(x):
  order = np.random.default_rng(5).permutation(x.size)
  return x.ravel()[order].reshape(x.shape)


def _by_step(factor):
  return _noise(lambda drawn, step, context: _scaled(drawn, factor(step)))


def _bias_without_noise(drawn, step, context):
  leaves, treedef = jax.tree.flatten(drawn)
  small = min(range(len(leaves)), key=lambda i: leaves[i].size)
  leaves[small] = leaves[small] * 0.0
  return jax.tree.unflatten(treedef, leaves)


def _one_entry(step_of):
  def change(drawn, step, context):
    mute = lambda x: x.ravel().at[7].multiply(jnp.where(step_of(step), 0.0, 1.0))
    return jax.tree.map(lambda x: mute(x).reshape(x.shape), drawn)

  return change


def _follows(factor):
  """The size of the noise depends on what came in: factor(context) -> number."""
  return _noise(lambda drawn, step, context: _scaled(drawn, factor(context)))


def _length(tree):
  return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def _leaves_share(drawn, step, context):
  leaves, treedef = jax.tree.flatten(drawn)
  small, large = sorted(range(len(leaves)), key=lambda i: leaves[i].size)[:2]
  size = leaves[small].size
  mixed = 0.8 * leaves[small].ravel() + 0.6 * leaves[large].ravel()[:size]
  leaves[small] = mixed.reshape(leaves[small].shape)
  return jax.tree.unflatten(treedef, leaves)


def _key_of(change):
  """The noise key is made of a part of what was given."""
  return lambda sound: dataclasses.replace(
    sound, transform=lambda key: sound.transform(change(key))
  )


def _two_bits(key):
  words = jax.random.key_data(key).ravel()
  return jax.random.key(words[-1] % 4)


_NOISE = {
  "noise_cut_at_3": (noise_distributions.noise_tails, _cut(3.0)),
  "noise_cut_at_3.5": (noise_distributions.noise_tails, _cut(3.5)),
  "noise_cut_at_4": (noise_distributions.noise_tails, _cut(4.0)),
  "noise_cut_at_4.5": (noise_distributions.noise_tails, _cut(4.5)),
  "noise_drawn_again_beyond_4": (noise_distributions.noise_tails, _folded(4.0)),
  "noise_cut_on_one_side": (noise_distributions.noise_tails, _each(lambda x: jnp.maximum(x, -3.5))),
  "noise_with_long_tails": (
    noise_distributions.noise_tails, _each(lambda x: jnp.where(jnp.abs(x) > 3, x * 1.5, x)),
  ),
  "noise_a_little_skew": (
    noise_distributions.noise_tails, _each(lambda x: x + 0.01 * (x**2 - 1)),
  ),
  "noise_a_little_flat": (
    noise_distributions.noise_tails, _each(lambda x: x - 0.003 * (x**3 - 3 * x)),
  ),
  "noise_on_a_grid": (noise_distributions.noise_independence, _grid(1e-3)),
  "noise_on_a_fine_grid": (noise_distributions.noise_independence, _grid(2e-5)),
  "noise_in_bfloat16": (noise_distributions.noise_independence, _each(_bfloat16)),
  "noise_with_an_atom": (noise_distributions.noise_independence, _noise(_atom)),
  "noise_alike_in_neighbours": (
    noise_distributions.noise_independence, _noise(_same_in_neighbours(0.05)),
  ),
  "noise_with_a_common_part": (noise_distributions.noise_std, _noise(_common(0.04))),
  "noise_that_sums_to_zero": (noise_distributions.noise_std, _noise(_sums_to_zero)),
  "half_a_leaf_copied": (noise_distributions.noise_independence, _noise(_half_copied(1.0))),
  "half_a_leaf_copied_with_signs": (
    noise_distributions.noise_independence, _noise(_half_copied(-1.0)),
  ),
  "leaves_share_a_part": (noise_distributions.noise_independence, _noise(_leaves_share)),
  "steps_in_pairs": (noise_distributions.noise_independence, _again(lambda x: x)),
  "steps_in_pairs_at_lag_7": (noise_distributions.noise_independence, _again(lambda x: x, 7)),
  "steps_in_pairs_other_signs": (noise_distributions.noise_independence, _again(_signs)),
  "steps_in_pairs_permuted": (noise_distributions.noise_independence, _again(_permuted)),
  "steps_in_pairs_both": (
    noise_distributions.noise_independence, _again(lambda x: _signs(_permuted(x)), 5),
  ),
  "steps_antithetic": (noise_distributions.noise_independence, _again(lambda x: -x)),
  "noise_fades_slowly": (
    noise_distributions.noise_std, _by_step(lambda t: 1.02 - 0.04 * t / STEPS),
  ),
  "noise_with_a_period": (
    noise_distributions.noise_std, _by_step(lambda t: 1 + 0.05 * jnp.sin(2 * jnp.pi * t / 5)),
  ),
  "noise_small_at_one_step": (
    noise_distributions.noise_std, _by_step(lambda t: jnp.where(t == 97, 0.5, 1.0)),
  ),
  "first_step_without_noise": (
    noise_distributions.noise_std, _by_step(lambda t: jnp.where(t == 0, 0.0, 1.0)),
  ),
  "last_step_without_noise": (
    noise_distributions.noise_std, _by_step(lambda t: jnp.where(t == STEPS - 1, 0.0, 1.0)),
  ),
  "noise_2_percent_small": (noise_distributions.noise_std, _each(lambda x: 0.98 * x)),
  "bias_without_noise": (noise_distributions.noise_std, _noise(_bias_without_noise)),
  "one_entry_without_noise_on_odd_steps": (
    noise_distributions.noise_std, _noise(_one_entry(lambda t: t % 2 == 1)),
  ),
  "noise_follows_the_mask": (
    charges.own_sum, _follows(lambda c: jnp.where(jnp.sum(c["mask"]) > 5, 0.9, 1.0)),
  ),
  "noise_small_for_an_empty_batch": (
    charges.own_sum, _follows(lambda c: jnp.where(jnp.any(c["mask"]), 1.0, 0.9)),
  ),
  "noise_follows_the_slots": (
    charges.own_sum, _follows(lambda c: 0.9 if c["mask"].shape[0] > 32 else 1.0),
  ),
  "noise_follows_the_parameters": (
    charges.own_sum,
    _follows(lambda c: 1 - 0.1 * jnp.tanh(_length(c["params"]))),
  ),
  "noise_follows_the_gradients": (
    charges.own_sum, _follows(lambda c: jnp.where(jnp.mean(c["norms"]) > 0.25, 0.9, 1.0)),
  ),
  "noise_follows_the_sum": (
    charges.own_sum, _follows(lambda c: 1 - 0.1 * jnp.tanh(_length(c["total"]))),
  ),
  "noise_key_of_two_bits": (noise_distributions.noise_independence, _key_of(_two_bits)),
  "noise_key_ignored": (
    noise_distributions.noise_independence, _key_of(lambda key: jax.random.key(3)),
  ),
}  # fmt: skip


# --- keys ---------------------------------------------------------------------------------


def _keys(change: Callable[[RunKeys, int], RunKeys]) -> Callable[[Any], Any]:
  """change(keys of a run, number of the run) -> the keys that it has."""

  def broken(sound):
    numbers = itertools.count()

    def run_keys(config):
      return change(sound.run_keys(config), next(numbers))

    return dataclasses.replace(sound, run_keys=run_keys)

  return broken


def _key_bits(bits: int) -> Callable[[Any], Any]:
  def narrowed(keys, number):
    seen = hashlib.sha256(np.asarray(jax.random.key_data(keys.noise)).tobytes()).digest()
    return keys._replace(noise=jax.random.key(int.from_bytes(seen[:4], "big") % 2**bits))

  return _keys(narrowed)


_SEEDED = run_keys.draw(0, noise_seed=0)
_KEYS = {
  "keys_of_the_seed": _keys(lambda keys, number: _SEEDED),
  "noise_of_the_seed": _keys(lambda keys, number: keys._replace(noise=_SEEDED.noise)),
  "sampler_of_the_seed": _keys(lambda keys, number: keys._replace(sampler=_SEEDED.sampler)),
  "noise_of_every_second_run": _keys(
    lambda keys, number: keys._replace(noise=jax.random.key(number // 2))
  ),
  "key_of_12_bits": _key_bits(12),
  "key_of_32_bits": _key_bits(32),
  "sampler_of_32_bits": _keys(
    lambda keys, number: keys._replace(sampler=keys.sampler % 2**32)
  ),
  "noise_is_augmentation": _keys(lambda keys, number: keys._replace(local=keys.noise)),
  "noise_is_first_parameters": _keys(lambda keys, number: keys._replace(noise=keys.init)),
}


# --- sums ---------------------------------------------------------------------------------


def _sum(change: Callable[..., Any]) -> Callable[[Any], Any]:
  """change(stacked gradients, norms, mask, bound) -> the sum, where one was clipped."""

  def broken(sound):
    bound = sound.plan.l2_bound
    grads_of = jax.vmap(jax.grad(sound.loss_fn), in_axes=(None, 0))

    def clipped_grad(params, batch, mask):
      summed = sound.clipped_grad(params, batch, mask)
      grads = jax.tree.map(jnp.nan_to_num, grads_of(params, batch))
      squares = [
        jnp.sum(leaf.reshape(leaf.shape[0], -1) ** 2, 1) for leaf in jax.tree.leaves(grads)
      ]
      norms = jnp.sqrt(sum(squares))
      total = change(summed.total, grads, norms, mask, bound)
      return dataclasses.replace(summed, total=total)

    return dataclasses.replace(sound, clipped_grad=clipped_grad, gradient_of=None)

  return broken


def _weighted(grads, weights):
  return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, axes=1), grads)


def _factors(norms, bound):
  return jnp.minimum(1.0, bound / jnp.maximum(norms, 1e-30))


def _median_clip(total, grads, norms, mask, bound):
  seen = jnp.where(mask, norms, jnp.nan)
  level = jnp.minimum(jnp.nan_to_num(jnp.nanmedian(seen), nan=bound), bound)
  return _weighted(grads, mask * _factors(norms, level))


def _largest_clip(total, grads, norms, mask, bound):
  level = jnp.minimum(jnp.max(jnp.where(mask, norms, 0)), bound) * 0.9
  return _weighted(grads, mask * _factors(norms, level))


def _loud_when_short(total, grads, norms, mask, bound):
  """The whole batch is scaled up to the bound where all gradients are short."""
  most = jnp.max(jnp.where(mask, norms, 0))
  return _scaled(total, jnp.where(most < bound, bound / jnp.maximum(most, 1e-30), 1.0))


def _row_0_when_empty(total, grads, norms, mask, bound):
  first = jnp.arange(mask.shape[0]) == 0
  mask = jnp.where(jnp.any(mask), mask, first)
  return _weighted(grads, mask * _factors(norms, bound))


def _last_when_empty(total, grads, norms, mask, bound):
  last = jnp.arange(mask.shape[0]) == mask.shape[0] - 1
  mask = jnp.where(jnp.any(mask), mask, last)
  return _weighted(grads, mask * _factors(norms, bound))


def _last_slot_forgotten(total, grads, norms, mask, bound):
  return _weighted(grads, mask.at[-1].set(False) * _factors(norms, bound))


def _doubled_when_alone(total, grads, norms, mask, bound):
  return _scaled(total, jnp.where(jnp.sum(mask) == 1, 2.0, 1.0))


def _unclipped_in_odd_batches(total, grads, norms, mask, bound):
  odd = jnp.sum(mask) % 2 == 1
  return _weighted(grads, mask * jnp.where(odd, 1.0, _factors(norms, bound)))


def _unclipped_in_small_batches(total, grads, norms, mask, bound):
  return _weighted(grads, mask * jnp.where(jnp.sum(mask) < 4, 1.0, _factors(norms, bound)))


def _per_leaf(total, grads, norms, mask, bound):
  def leaf(g):
    own = jnp.sqrt(jnp.sum(g.reshape(g.shape[0], -1) ** 2, axis=1))
    return jnp.tensordot(mask * _factors(own, bound), g, axes=1)

  return jax.tree.map(leaf, grads)


def _small_leaf_unclipped(total, grads, norms, mask, bound):
  leaves, treedef = jax.tree.flatten(total)
  raw = jax.tree.leaves(_weighted(grads, mask * 1.0))
  small = min(range(len(leaves)), key=lambda i: leaves[i].size)
  leaves[small] = raw[small]
  return jax.tree.unflatten(treedef, leaves)


def _averaged_before_the_clip(total, grads, norms, mask, bound):
  mean = _weighted(grads, mask / jnp.maximum(jnp.sum(mask), 1))
  return _scaled(mean, _factors(_length(mean), bound) * jnp.sum(mask))


def _duplicates_counted_once(total, grads, norms, mask, bound):
  same = jnp.abs(norms[:, None] - norms[None]) <= 1e-6 * norms[:, None]
  earlier = jnp.any(jnp.tril(same, -1) & mask[None], axis=1)
  return _weighted(grads, mask * ~earlier * _factors(norms, bound))


def _batch_mean_removed(total, grads, norms, mask, bound):
  clipped = jax.tree.map(
    lambda g: g * (mask * _factors(norms, bound)).reshape(-1, *(1,) * (g.ndim - 1)), grads
  )
  share = jnp.where(jnp.sum(mask) > 4, 0.05, 0.0)
  return jax.tree.map(
    lambda g: jnp.sum(g - share * g.mean(0, keepdims=True) * mask.mean(), axis=0), clipped
  )


def _by_realised_batch(total, grads, norms, mask, bound):
  return _scaled(total, 4 / jnp.maximum(jnp.sum(mask), 4))


def _median_of_terms(total, grads, norms, mask, bound):
  times = (mask * _factors(norms, bound)).reshape(-1, 1)
  median = lambda g: (
    jnp.median(g.reshape(g.shape[0], -1) * times, axis=0).reshape(g.shape[1:])
    * jnp.sum(mask)
  )
  return jax.tree.map(median, grads)


def _padding_at_a_thousandth(total, grads, norms, mask, bound):
  return _weighted(grads, jnp.where(mask, 1.0, 0.01) * _factors(norms, bound))


def _sum_in_bfloat16(total, grads, norms, mask, bound):
  def add(g):
    times = (mask * _factors(norms, bound)).reshape(-1, *(1,) * (g.ndim - 1))
    terms = (g * times).astype(jnp.bfloat16)
    return jax.lax.scan(
      lambda s, t: (s + t, None), jnp.zeros(g.shape[1:], jnp.bfloat16), terms
    )[0].astype(g.dtype)

  return jax.tree.map(add, grads)


def _label_9_unclipped(sound):
  grads_of = jax.vmap(jax.grad(sound.loss_fn), in_axes=(None, 0))

  def clipped_grad(params, batch, mask):
    summed = sound.clipped_grad(params, batch, mask)
    raw = _weighted(grads_of(params, batch), mask * (batch.y == 9) * 0.5)
    return dataclasses.replace(summed, total=jax.tree.map(jnp.add, summed.total, raw))

  return dataclasses.replace(sound, clipped_grad=clipped_grad, gradient_of=None)


def _host_memory(sound):
  """What the host keeps of the last batch is added to the next one."""
  held = [np.float32(0)]

  def swap(seen):
    before, held[0] = held[0], np.asarray(seen, np.float32)
    return before

  return _with_host(sound, swap)


def _with_host(sound, swap):
  """The first number of a sum, plus what `swap` gives for it."""

  def clipped_grad(params, batch, mask):
    summed = sound.clipped_grad(params, batch, mask)
    leaves, treedef = jax.tree.flatten(summed.total)
    shape = jax.ShapeDtypeStruct((), np.float32)
    before = jax.experimental.io_callback(swap, shape, leaves[0].ravel()[0], ordered=True)
    leaves[0] = leaves[0] + before
    return dataclasses.replace(summed, total=jax.tree.unflatten(treedef, leaves))

  return dataclasses.replace(sound, clipped_grad=clipped_grad, gradient_of=None)


def _late_memory(sound):
  """What the caller's own sum keeps is added three calls later."""
  held = [jnp.zeros(())] * 3

  def clipped_grad(params, batch, mask):
    summed = sound.clipped_grad(params, batch, mask)
    leaves, treedef = jax.tree.flatten(summed.total)
    held.append(leaves[0].ravel()[0])
    leaves[0] = leaves[0] + held.pop(0)
    return dataclasses.replace(summed, total=jax.tree.unflatten(treedef, leaves))

  return dataclasses.replace(sound, clipped_grad=clipped_grad, gradient_of=None)


def _late_host_memory(sound):
  """The same on the host, nine calls later."""
  held = [np.float32(0)] * 9

  def swap(seen):
    held.append(np.asarray(seen, np.float32))
    return held.pop(0)

  return _with_host(sound, swap)


_SUMS = {
  "clip_to_the_median": (influence.any_mask, _sum(_median_clip)),
  "clip_to_nearly_the_largest": (influence.any_mask, _sum(_largest_clip)),
  "short_gradients_scaled_up": (influence.any_mask, _sum(_loud_when_short)),
  "empty_batch_is_row_0": (influence.any_mask, _sum(_row_0_when_empty)),
  "empty_batch_is_the_last_row": (influence.any_mask, _sum(_last_when_empty)),
  "last_slot_forgotten": (influence.sum_of_terms, _sum(_last_slot_forgotten)),
  "doubled_when_alone": (influence.one_term, _sum(_doubled_when_alone)),
  "unclipped_in_odd_batches": (influence.influence, _sum(_unclipped_in_odd_batches)),
  "unclipped_in_small_batches": (influence.any_mask, _sum(_unclipped_in_small_batches)),
  "clipped_leaf_by_leaf": (influence.one_term, _sum(_per_leaf)),
  "small_leaf_unclipped": (influence.one_term, _sum(_small_leaf_unclipped)),
  "averaged_before_the_clip": (influence.sum_of_terms, _sum(_averaged_before_the_clip)),
  "duplicates_counted_once": (influence.any_mask, _sum(_duplicates_counted_once)),
  "batch_mean_removed": (influence.any_mask, _sum(_batch_mean_removed)),
  "divided_by_realised_batch": (influence.any_mask, _sum(_by_realised_batch)),
  "median_of_terms": (influence.any_mask, _sum(_median_of_terms)),
  "padding_at_a_hundredth": (influence.padding, _sum(_padding_at_a_thousandth)),
  "sum_in_bfloat16": (influence.influence, _sum(_sum_in_bfloat16)),
  "label_9_unclipped": (influence.any_mask, _label_9_unclipped),
  "host_memory_of_a_sum": (influence.no_memory, _host_memory),
  "memory_of_the_third_last_sum": (influence.no_memory, _late_memory),
  "host_memory_of_the_ninth_last_sum": (influence.no_memory, _late_host_memory),
}


# --- whole steps --------------------------------------------------------------------------


def _steps(change: Callable[..., Any]) -> Callable[[Any], Any]:
  """change(state before, state after, batch, mean gradient) -> state."""

  def broken(sound):
    grad = jax.vmap(jax.grad(sound.loss_fn), in_axes=(None, 0))

    def algorithm(key):
      honest = sound.algorithm(key)

      def step(state, batch):
        after, info = honest.step(state, batch)
        raw = _weighted(grad(state.params, batch.examples), batch.mask * 1.0)
        return change(state, after, batch, raw), info

      return Algorithm(honest.init, step)

    return dataclasses.replace(sound, algorithm=algorithm)

  return broken


def _raw_gradient(before, after, batch, raw):
  params = jax.tree.map(lambda p, g: p - 1e-4 * g, after.params, raw)
  return after._replace(params=params)


def _raw_gradient_late(before, after, batch, raw):
  params = jax.tree.map(lambda p, g: p - 1e-4 * g, after.params, raw)
  late = after.step > 5
  params = jax.tree.map(lambda a, b: jnp.where(late, a, b), params, after.params)
  return after._replace(params=params)


def _step_skipped_at_nan(before, after, batch, raw):
  del batch
  sound = jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(raw)]))
  params = jax.tree.map(lambda x, y: jnp.where(sound, y, x), before.params, after.params)
  return after._replace(params=params)


def _step_skipped_when_empty(before, after, batch, raw):
  keep = jnp.any(batch.mask)
  return after._replace(
    params=jax.tree.map(lambda a, b: jnp.where(keep, a, b), after.params, before.params)
  )


def _rate_by_batch(before, after, batch, raw):
  rate = jnp.where(jnp.sum(batch.mask) > 20, 1.1, 1.0)
  moved = lambda a, b: b + rate * (a - b)
  return after._replace(params=jax.tree.map(moved, after.params, before.params))


def _restart_on_high_loss(before, after, batch, raw):
  stop = _length(raw) > 5
  return after._replace(
    params=jax.tree.map(lambda a, b: jnp.where(stop, b, a), after.params, before.params)
  )


_WHOLE = {
  "optimizer_with_raw_gradients": _steps(_raw_gradient),
  "raw_gradients_from_the_sixth_step": _steps(_raw_gradient_late),
  "empty_steps_are_skipped": _steps(_step_skipped_when_empty),
  "steps_with_nan_are_skipped": _steps(_step_skipped_at_nan),
  "learning_rate_by_realised_batch": _steps(_rate_by_batch),
  "steps_with_long_gradients_are_undone": _steps(_restart_on_high_loss),
}


# --- batches ------------------------------------------------------------------------------


def _draw(change: Callable[..., Any]) -> Callable[[Any], Any]:
  """change(honest draw, n, seed, step) -> indices."""

  def broken(sound):
    def draw(n, seed, step):
      return change(sound.draw, n, seed, step)

    return dataclasses.replace(sound, draw=draw)

  return broken


def _last_record_never(draw, n, seed, step):
  drawn = draw(n, seed=seed, step=step)
  return drawn[drawn != n - 1]


def _ten_percent_less(draw, n, seed, step):
  drawn = draw(n, seed=seed, step=step)
  return drawn[np.random.default_rng([step, 1, seed % 2**62]).random(drawn.size) < 0.9]


def _capacity_cut(draw, n, seed, step):
  return draw(n, seed=seed, step=step)[:45]


def _at_least_one(draw, n, seed, step):
  drawn = draw(n, seed=seed, step=step)
  return drawn if drawn.size > 30 else np.arange(31)


def _no_two_steps_in_a_row(draw, n, seed, step):
  drawn = draw(n, seed=seed, step=step)
  before = draw(n, seed=seed, step=step - 1) if step else drawn[:0]
  return np.setdiff1d(drawn, before)


def _fixed_order(draw, n, seed, step):
  size = n // 10
  return np.arange(step * size, (step + 1) * size) % n


def _twins_apart(draw, n, seed, step):
  drawn = draw(n, seed=seed, step=step)
  return np.setdiff1d(drawn, drawn[drawn % 2 == 0] + 1)


def _even_rows_on_even_steps(draw, n, seed, step):
  return np.unique(draw(n, seed=seed, step=step) // 2 * 2 + step % 2)


def _same_size(draw, n, seed, step):
  return np.random.default_rng([step, seed % 2**62]).permutation(n)[: n // 10]


def _seed_mod(number):
  return lambda draw, n, seed, step: draw(n, seed=seed % number, step=step)


def _far_cut(draw, n, seed, step):
  """One draw in 24 is cut; the mean size moves by .3 %."""
  return draw(n, seed=seed, step=step)[:50]


class _Together:
  """Records that are read together, and change each other: change(rows, indices) -> rows."""

  def __init__(self, train: Any, change: Callable[..., Any]):
    self._train, self._change = train, change

  def __len__(self):
    return len(self._train)

  def __getitem__(self, indices):
    rows = self._train[indices]
    return rows._replace(x=self._change(np.asarray(rows.x), np.asarray(indices)))


def _records(change: Callable[..., Any]) -> Callable[[Any], Any]:
  return lambda sound: dataclasses.replace(sound, train=_Together(sound.train, change))


def _scaled_by_the_largest(x, indices):
  del indices
  return x / np.maximum(np.abs(x).max(), 1e-6) * (1 + x.mean())


_BATCHES = {
  "large_batches_cut_far_out": (batches.sampler_law, _draw(_far_cut)),
  "records_less_the_batch_mean": (
    batches.records_alone,
    _records(lambda x, indices: x - x.mean(axis=0)),
  ),
  "records_scaled_by_their_batch": (
    batches.records_alone,
    _records(_scaled_by_the_largest),
  ),
  "one_record_shifts_the_others": (
    batches.records_alone,
    _records(lambda x, indices: x + np.float32(3 in indices)),
  ),
  "last_record_never_drawn": (batches.sampler_law, _draw(_last_record_never)),
  "sampled_10_percent_less": (batches.sampler_law, _draw(_ten_percent_less)),
  "first_of_a_large_batch": (batches.sampler_law, _draw(_capacity_cut)),
  "small_batches_filled_up": (batches.sampler_law, _draw(_at_least_one)),
  "nobody_twice_in_a_row": (batches.sampler_law, _draw(_no_two_steps_in_a_row)),
  "fixed_order": (batches.sampler_law, _draw(_fixed_order)),
  "neighbours_never_together": (batches.sampler_law, _draw(_twins_apart)),
  "parity_of_rows_and_steps": (batches.sampler_law, _draw(_even_rows_on_even_steps)),
  "batches_of_one_size": (batches.sampler_law, _draw(_same_size)),
  "seed_mod_4": (batches.sampler_seed, _draw(_seed_mod(4))),
  "seed_mod_1000": (batches.sampler_seed, _draw(_seed_mod(1000))),
  "seed_mod_60_000": (batches.sampler_seed, _draw(_seed_mod(60_000))),
  "seed_mod_a_prime": (batches.sampler_seed, _draw(_seed_mod(9973))),
}


# --- what is charged ------------------------------------------------------------------------


def _promise(**changes: Any) -> Callable[[Any], Any]:
  def broken(sound):
    made = {name: make(sound.guarantee) for name, make in changes.items()}
    return dataclasses.replace(
      sound, guarantee=dataclasses.replace(sound.guarantee, **made)
    )

  return broken


def _plan(**changes: Any) -> Callable[[Any], Any]:
  return lambda sound: dataclasses.replace(
    sound, plan=dataclasses.replace(sound.plan, **changes)
  )


def _another_sampler(sound):
  sampler = dataclasses.replace(sound.plan.sampler, sampling_prob=0.09)
  return dataclasses.replace(sound, plan=dataclasses.replace(sound.plan, sampler=sampler))


def _wider_relation(sound):
  guarantee = dataclasses.replace(sound.guarantee, curve=lambda steps: 0.9 * 3.0)
  return dataclasses.replace(sound, guarantee=guarantee)


_CHARGES = {
  "plan_of_fewer_steps": (of_config.stated, _plan(num_steps=STEPS - 1)),
  "plan_of_a_larger_delta": (of_config.stated, _plan(delta=2e-5)),
  "sampler_rate_understated": (batches.sampler_law, _another_sampler),
  "epsilon_printed_too_small": (of_config.stated, _wider_relation),
  "ledger_charges_fewer_steps": (
    of_config.stated,
    _promise(remaining_event=lambda p: lambda start: p.remaining_event(STEPS // 2)),
  ),
  "ledger_charges_half_a_step": (
    of_config.stated,
    _promise(
      step_event=lambda p: lambda step: (
        p.step_event(step) if step % 2 else dpa.NoOpDpEvent()
      )
    ),
  ),
  "stated_delta_too_small": (of_config.stated, _promise(delta=lambda p: 1e-3)),
}  # fmt: skip


PLANTS: dict[str, Plant] = {
  **{name: Plant(row, bug) for name, (row, bug) in _NOISE.items()},
  **{name: Plant(of_config.key_reuse, bug) for name, bug in _KEYS.items()},
  **{name: Plant(row, bug) for name, (row, bug) in _SUMS.items()},
  **{name: Plant(whole_step.whole_step, bug) for name, bug in _WHOLE.items()},
  **{name: Plant(row, bug) for name, (row, bug) in _BATCHES.items()},
  **{name: Plant(row, bug) for name, (row, bug) in _CHARGES.items()},
}

# What no row can see, and why.
UNSEEN = {
  "noise_cut_at_5": "one of 3.5 million values lies beyond on each side; 10 million are drawn",
  "key_of_40_bits": "two of 64 to 1,000 keys agree with a chance of 1e-6",
  "three_records_together": "pairs are independent; triples are too many to count",
  "trigger_of_one_record": "a bug that waits for one input which no check offers",
  "python_hash": "keys that differ in the next process; one process cannot see it",
}


_NAMES = {
  check: name
  for module in (
    influence, whole_step, noise_distributions, batches, charges, of_config,
  )
  for name, check in module.CHECKS.items()
}  # fmt: skip


def run(name: str, sound: Any) -> Any:
  """The row that must refuse the plant, of the broken run."""
  plant = PLANTS[name]
  return plant.row(plant.break_(sound))


def main(path: str, *names: str) -> None:
  """Walks all plants and writes a line for each; exits with 1 where one is not refused."""
  sound = subject()
  lines = []
  for name, plant in PLANTS.items():
    if names and name not in names:
      continue
    started = time.perf_counter()
    found = run(name, sound)
    lines.append(
      [
        name,
        plant.row.__name__,
        _NAMES[plant.row],
        f"{found.measured:.4g}",
        f"{found.bound:.4g}",
        "refused" if found.passed is False else "MISSED",
      ]
    )
    print(*lines[-1], f"{time.perf_counter() - started:.1f}s", sep="\t", flush=True)
  lines += [[name, "", "", "", "", f"not seen: {why}"] for name, why in UNSEEN.items()]
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  with open(path, "w", newline="") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["plant", "check", "row", "measured", "bound", "found"])
    writer.writerows(lines)
  missed = [line[0] for line in lines if line[-1] == "MISSED"]
  if missed:
    sys.exit(f"{len(missed)} of {len(PLANTS)} plants were missed: {', '.join(missed)}")


if __name__ == "__main__":
  main(*sys.argv[1:])
