"""Each check passes on a sound run and fails on the bug that it is for; `plants.py` has more."""

import dataclasses
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import quickstart
from dpjax import gradients, losses
from dpjax.checks import batches, charges, influence, noise_distributions
from dpjax.checks import table as run_table
from dpjax.checks.subject import Row
from dpjax.checks.table import CheckTable
from dpjax.experiments.checks import of_config
from dpjax.experiments.config import fields
from dpjax.experiments.run import run_keys
from dpjax.gradients.per_example import stacked_arrays
from dpjax.sampling import PoissonSampler
from tests.refuses import refuses


def _config(**overrides):
  config = quickstart.get_config()
  small = {"model.name": "linear", "model.options": {}, "data.limit": 400, "num_steps": 20}
  return fields.replace_all(fields.replace_all(config, small), overrides)


@pytest.fixture(scope="module")
def sound():
  return of_config.subject(_config())


# --- planted bugs: each takes a sound subject and returns a broken one ------------------


def _with_sum(subject, change):
  """The clipped sum, changed: (ClippedSum, mask) -> total."""

  def clipped_grad(params, batch, mask):
    summed = subject.clipped_grad(params, batch, mask)
    return dataclasses.replace(summed, total=change(summed, mask))

  return dataclasses.replace(subject, clipped_grad=clipped_grad)


def _scale(tree, factor):
  return jax.tree.map(lambda leaf: leaf * factor, tree)


def mean_instead_of_sum(subject):
  return _with_sum(
    subject, lambda s, mask: _scale(s.total, 1 / jnp.maximum(jnp.sum(mask), 1))
  )


def clipping_removed(subject):
  loose = gradients.clipped_grad(subject.loss_fn, l2_clip_norm=1e6)
  return dataclasses.replace(subject, clipped_grad=loose)


def clipped_to_half(subject):
  """Bounded, and wrong: every rule's own bound would let it pass."""
  return _with_sum(subject, lambda s, mask: _scale(s.total, 0.5))


def wrong_for_large_batches(subject):
  """A bug of one route: right for small batches, unclipped beyond."""
  loose = gradients.clipped_grad(subject.loss_fn, l2_clip_norm=1e6)

  def clipped_grad(params, batch, mask):
    small = mask.shape[0] <= 8
    return (subject.clipped_grad if small else loose)(params, batch, mask)

  return dataclasses.replace(subject, clipped_grad=clipped_grad)


def mask_ignored_in_large_batches(subject):
  def clipped_grad(params, batch, mask):
    mask = mask if mask.shape[0] <= 8 else jnp.ones_like(mask)
    return subject.clipped_grad(params, batch, mask)

  return dataclasses.replace(subject, clipped_grad=clipped_grad)


def last_example_forgotten_in_large_batches(subject):
  def clipped_grad(params, batch, mask):
    mask = mask if mask.shape[0] <= 8 else mask.at[-1].set(False)
    return subject.clipped_grad(params, batch, mask)

  return dataclasses.replace(subject, clipped_grad=clipped_grad)


def weight_tying_ignored(subject):
  """The loss uses its kernel twice; the gradient that is clipped knows of one use."""

  def loss(params, example, second):
    return subject.loss_fn(params, example) + sum(
      jnp.sum(leaf**2) for leaf in jax.tree.leaves(second)
    )

  whole = lambda params, example: loss(params, example, params)
  half = lambda params, example: loss(params, example, jax.lax.stop_gradient(params))
  return dataclasses.replace(
    subject, loss_fn=whole, clipped_grad=subject.plan.clipped_grad(half)
  )


def batch_norm(subject):
  def apply(params, x):
    logits = subject.apply(params, x)
    centred = logits - logits.mean(axis=0, keepdims=True)
    return centred / (logits.std(axis=0, keepdims=True) + 1e-3)

  return dataclasses.replace(subject, apply=apply)


def gradients_that_see_the_batch(subject):
  """Each term shrinks by a factor that depends on the others: every term stays clipped."""

  def change(summed, mask):
    del mask
    return _scale(summed.total, 1 / (1 + jnp.mean(summed.losses)))

  return _with_sum(subject, change)


def realised_batch_as_divisor(subject):
  def transform(key):
    base = subject.transform(key)

    def update(updates, state, params=None, *, mask=None, **_):
      out, state = base.update(updates, state, params, mask=mask)
      factor = subject.plan.normalize_by / jnp.maximum(jnp.sum(mask), 1)
      return _scale(out, factor), state

    return optax.GradientTransformationExtraArgs(base.init, update)

  return dataclasses.replace(subject, transform=transform)


def noise_halved(subject):
  less = dataclasses.replace(
    subject.plan, noise_multiplier=subject.plan.noise_multiplier / 2
  )
  return dataclasses.replace(subject, transform=less.transform)


def uniform_noise(subject):
  """Right standard deviation, wrong law."""
  plan = subject.plan
  width = plan.noise_multiplier * plan.l2_bound * 3**0.5 / plan.normalize_by

  def transform(key):
    def update(updates, state, params=None, *, mask=None, **_):
      keys = jax.random.split(jax.random.fold_in(key, state), 2)
      leaves, treedef = jax.tree.flatten(params)
      drawn = [
        jax.random.uniform(k, leaf.shape, minval=-width, maxval=width)
        for k, leaf in zip(keys, leaves)
      ]
      return jax.tree.unflatten(treedef, drawn), state + 1

    return optax.GradientTransformationExtraArgs(lambda params: jnp.int32(0), update)

  return dataclasses.replace(subject, transform=transform)


def noise_key_reused_every_step(subject):
  def transform(key):
    base = subject.transform(key)

    def update(updates, state, params=None, *, mask=None, **_):
      return base.update(updates, state, params, mask=mask)[0], state

    return optax.GradientTransformationExtraArgs(base.init, update)

  return dataclasses.replace(subject, transform=transform)


def sampler_with_memory(subject):
  """Poisson sizes and fair turns, but steps 2t and 2t + 1 draw the same batch."""
  draw = lambda n, seed, step: subject.draw(n, seed=seed, step=step - step % 2)
  return dataclasses.replace(subject, draw=draw)


def capacity_too_small(subject):
  sampler = PoissonSampler(sampling_prob=0.2, capacity=100)
  return dataclasses.replace(
    subject, plan=dataclasses.replace(subject.plan, sampler=sampler)
  )


def release_keys_of_an_ordinary_run(subject):
  config = dataclasses.replace(subject.config, release=True)
  return dataclasses.replace(
    subject, config=config, run_keys=lambda config: run_keys.draw(config.seed)
  )


def transform_that_clips_to(factor):
  """At the run's own epsilon, of which the bound by perfect guesses of 400 canaries is a half."""

  def clips_to(subject):
    plan = subject.plan
    z = plan.noise_multiplier / factor
    loose = dataclasses.replace(plan, l2_clip_norm=factor, noise_multiplier=z)
    return dataclasses.replace(subject, transform=loose.transform)

  clips_to.__name__ = f"clips_to_{factor:g}"
  return clips_to


def transform_that_returns_nan(subject):
  """Each score was 0 then, and nobody guesses such canaries."""

  def nan(key):
    tx = subject.transform(key)
    update = lambda *args, **more: jax.tree.map(
      lambda x: x * jnp.nan, tx.update(*args, **more)[0]
    )
    return tx._replace(update=lambda g, s, p=None, **more: (update(g, s, p, **more), s))

  return dataclasses.replace(subject, transform=nan)


_BUGS = {
  influence.influence: (clipping_removed,),
  influence.one_term: (clipping_removed, clipped_to_half, weight_tying_ignored),
  influence.sum_of_terms: (mean_instead_of_sum, weight_tying_ignored, clipping_removed),
  influence.whole_batch: (
    wrong_for_large_batches, mask_ignored_in_large_batches,
    last_example_forgotten_in_large_batches, mean_instead_of_sum,
  ),
  influence.cross_example: (batch_norm, gradients_that_see_the_batch),
  charges.divisor: (realised_batch_as_divisor,),
  noise_distributions.noise_std: (noise_halved, uniform_noise),
  noise_distributions.noise_independence: (noise_key_reused_every_step,),
  batches.sampler_law: (sampler_with_memory,),
  charges.overflow: (capacity_too_small,),
  of_config.key_reuse: (release_keys_of_an_ordinary_run,),
  charges.white_box_audit: (
    transform_that_clips_to(4.0), transform_that_clips_to(1e6), transform_that_returns_nan,
  ),
}  # fmt: skip
_PAIRS = [
  pytest.param(one, bug, id=f"{one.__name__}-{bug.__name__}")
  for one, bugs in _BUGS.items()
  for bug in bugs
]


@pytest.mark.cases(
  quick=["key_reuse-release_keys_of_an_ordinary_run"],
  slow=["overflow-capacity_too_small"],
  long=...,
)
@pytest.mark.parametrize(("one", "bug"), _PAIRS)
def test_planted_bug_is_found(sound, one, bug):
  row = one(bug(sound))
  assert row.passed is False, row


@pytest.mark.slow
def test_where_all_canaries_may_be_guessed_right_there_is_no_audit(sound):
  """It passed without any noise: of 20 canaries, and of any number under an epsilon of 90."""
  without = transform_that_clips_to(1e6)
  few = dataclasses.replace(sound, train=sound.train[np.arange(20)])
  loose = dataclasses.replace(sound.plan, noise_multiplier=0.2)
  for subject in (few, dataclasses.replace(sound, plan=loose)):
    assert charges.white_box_audit(without(subject)).passed is None


@pytest.mark.slow
def test_where_few_canaries_are_drawn_there_is_no_audit(sound):
  """It passed without any noise: a canary that no step draws looks like one that is out."""
  sampler = PoissonSampler(sampling_prob=0.01, capacity=64)
  few = dataclasses.replace(sound.plan, sampler=sampler, num_steps=10, noise_multiplier=0.7)
  subject = transform_that_clips_to(1e6)(dataclasses.replace(sound, plan=few))
  assert charges.white_box_audit(subject).passed is None
  # With more steps it fails.
  more = dataclasses.replace(few, num_steps=200)
  subject = transform_that_clips_to(1e6)(dataclasses.replace(sound, plan=more))
  assert charges.white_box_audit(subject).passed is False


class _Own(gradients.Flat):
  """A user's rule, of which no formula is known here."""


@pytest.mark.long
@pytest.mark.parametrize("rule", [gradients.Flat(), gradients.Automatic(0.5), _Own()])
def test_the_clip_check_does_not_ask_the_rule_what_is_right(sound, rule, monkeypatch):
  """The library and the check share the rule: a wrong formula there must not pass both."""
  clip = gradients.Clip(0.3, rule)  # most gradients are longer

  def subject():
    clipped_grad = gradients.clipped_grad(sound.loss_fn, l2_clip_norm=clip)
    plan = dataclasses.replace(sound.plan, l2_clip_norm=clip)
    return dataclasses.replace(sound, plan=plan, clipped_grad=clipped_grad)

  assert influence.one_term(subject()).passed and influence.sum_of_terms(subject()).passed
  honest = type(rule).factors

  def wrong(self, lengths, top, most):  # within the bound: only the formula can tell
    return 0.8 * honest(self, lengths, top, most)

  monkeypatch.setattr(type(rule), "factors", wrong, raising=False)
  known = type(rule) is not _Own
  assert influence.one_term(subject()).passed is not known
  assert influence.sum_of_terms(subject()).passed is not known
  turned = _with_sum(subject(), lambda s, mask: jax.tree.map(jnp.flip, s.total))
  assert influence.one_term(turned).passed is False


@pytest.mark.slow
def test_a_sound_run_passes_every_check(sound):
  rows = list(run_table.rows(of_config.checks(sound), sound))
  assert [row.name for row in rows if row.passed is not True] == []
  assert all(np.isfinite(row.measured) for row in rows)
  table = CheckTable(rows)
  assert repr(table).count("\n") == len(rows) - 1 and "FAIL" not in repr(table)
  assert json.loads(json.dumps(table.to_json()))["passed"] is True


@pytest.mark.long
@pytest.mark.parametrize(
  "overrides",
  [
    {
      "privacy.sampler": "fixed_size",
      "privacy.neighboring_relation": "replace_one",
      "privacy.accountant": "rdp",
    },
    {"privacy.sampling_prob": 1.0},
    {"grad_method": "vmap", "microbatch_size": 3, "augmentation": "shift", "augmult": 2},
    {"release": True},
  ],
)
def test_other_sound_runs_pass(overrides):
  subject = of_config.subject(_config(**overrides))
  rows = list(run_table.rows(of_config.checks(subject), subject))
  assert [row for row in rows if row.passed is False] == []


_FTRL = {"privacy": "dp_ftrl", "privacy.sampler": "balls_in_bins"}
_LARGE_OR_ODD = {
  "100,000 parameters": {"model.name": "mlp", "model.options": {"features": (1300,)}},
  "bfloat16": {
    "model.name": "mlp",
    "model.options": {"features": (32,), "dtype": "bfloat16"},
  },
  "augmult": {"augmentation": "shift", "augmult": 4},
  "tree": {**_FTRL, "privacy.strategy": "tree"},
  "blt": {**_FTRL, "privacy.strategy": "blt"},
  "dp_adam": {"optimizer.rule": "dp_adam", "optimizer.learning_rate": 0.01},
  "dp_sgld": {"optimizer.rule": "dp_sgld", "optimizer.learning_rate": 1e-4},
}


@pytest.mark.long
@pytest.mark.parametrize("name", _LARGE_OR_ODD)
def test_large_or_odd_runs_pass_and_their_bugs_are_found(name):
  subject = of_config.subject(_config(**_LARGE_OR_ODD[name]))
  assert [
    row for row in run_table.rows(of_config.checks(subject), subject) if row.passed is False
  ] == []
  for one, bug in (
    (influence.influence, clipping_removed),
    (influence.whole_batch, wrong_for_large_batches),
    (noise_distributions.noise_std, noise_halved),
    (noise_distributions.noise_independence, noise_key_reused_every_step),
  ):
    assert one(bug(subject)).passed is False, (name, bug)


@pytest.mark.long
def test_what_promises_nothing_is_not_applicable_and_never_passes():
  overrides = {
    "privacy.sampler": "shuffled",
    "privacy.epsilon": None,
    "privacy.noise_multiplier": 1.0,
  }
  subject = of_config.subject(_config(**overrides))
  rows = list(run_table.rows(of_config.checks(subject), subject))
  skipped = {row.name for row in rows if row.passed is None}
  assert {"sampler as charged"} <= skipped
  with refuses("privacy"):
    of_config.subject(_config(**{"privacy": "sgd"}))


@pytest.mark.slow
def test_a_failure_is_in_the_table_and_in_the_data(sound):
  halved = {
    "noise as charged": lambda run: noise_distributions.noise_std(noise_halved(run))
  }
  padded = {"padding": influence.padding}
  table = CheckTable(list(run_table.rows(halved | padded, sound)))
  assert [row.name for row in table.failed] == ["noise as charged"]
  assert repr(table).startswith("FAIL  noise as charged")
  data = table.to_json()
  assert data["passed"] is False and data["checks"][0]["passed"] is False
  nan = Row("x", False, float("inf"), 0.0, "")
  assert json.loads(json.dumps(CheckTable([nan]).to_json(), allow_nan=False))


# --- cross_example_leakage on a user's own batch functions ------------------------------


class _WithBatchNorm(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Dense(6)(x)
    x = nn.BatchNorm(use_running_average=False)(x)
    return nn.Dense(3)(nn.relu(x))


class _WithLayerNorm(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(3)(nn.relu(nn.LayerNorm()(nn.Dense(6)(x))))


def _logits(model):
  x = jax.random.normal(jax.random.key(0), (5, 4))
  variables = model.init(jax.random.key(1), x)

  def fn(variables, x):
    out = model.apply(variables, x, mutable=["batch_stats"])
    return out[0]

  return fn, variables, x


@pytest.mark.slow
def test_p29_batch_norm_is_found_and_layer_norm_is_not():
  assert influence.cross_example_leakage(*_logits(_WithBatchNorm())) > 0.01
  assert influence.cross_example_leakage(*_logits(_WithLayerNorm())) < 1e-5


@pytest.mark.slow
def test_p29_a_batched_gradient_of_a_batch_norm_model_is_found():
  """What Jacobian code gives a user: one gradient for each example's loss in the batch."""
  fn, variables, x = _logits(_WithBatchNorm())
  losses_of = lambda v, x: jnp.sum(fn(v, x) ** 2, axis=1)
  grads = lambda v, x: jax.jacrev(losses_of)(v, x)["params"]
  assert influence.cross_example_leakage(grads, variables, x) > 0.01


@pytest.mark.cases(long=["mean", "softmax"])
@pytest.mark.parametrize(
  "mix",
  [
    lambda z: z - z.mean(axis=0, keepdims=True),
    lambda z: jax.nn.softmax(z, axis=0),
    lambda z: z * (z[:, :1] >= jax.lax.top_k(z[:, 0], 2)[0][-1]),  # routing, top 2
    lambda z: z + jnp.roll(z, 1, axis=0),
    lambda z: z / jnp.linalg.norm(z),
  ],
  ids=["mean", "softmax", "top_k", "neighbour", "norm"],
)
def test_n6_every_way_to_mix_examples_is_found(mix):
  x = jax.random.normal(jax.random.key(0), (6, 4))
  w = jax.random.normal(jax.random.key(1), (4, 3))
  assert influence.cross_example_leakage(lambda w, x: mix(x @ w), w, x) > 1e-3


def test_integers_and_keys_are_perturbed_too():
  tokens = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
  table = jax.random.normal(jax.random.key(0), (12, 2))
  clean = lambda table, tokens: table[tokens].sum(axis=1)
  mixed = lambda table, tokens: clean(table, tokens).cumsum(axis=0)
  assert influence.cross_example_leakage(clean, table, tokens) == 0
  assert influence.cross_example_leakage(mixed, table, tokens) > 0.01


def test_an_ordinary_loss_does_not_leak():
  apply = lambda w, x: x @ w
  grad_fn = stacked_arrays(losses.softmax_cross_entropy(apply))
  from dpjax.types import Example

  batch = Example(jax.random.normal(jax.random.key(0), (4, 3)), jnp.arange(4) % 2)
  fn = lambda w, batch: grad_fn(w, batch)[1]
  assert influence.cross_example_leakage(fn, jnp.ones((3, 2)), batch) == 0


@pytest.mark.slow
def test_a_run_in_slices_is_checked_on_whole_steps():
  """Its transform refuses a slice; what the checks hand it are sums of steps."""
  cut = of_config.subject(_config(slices=2))
  rows = [noise_distributions.noise_std(cut), charges.divisor(cut)]
  assert all(row.passed for row in rows), rows


def test_a_spoilt_example_is_found_beside_a_small_clip_norm():
  """It moves the sum by half of the clip norm, which is far below 1."""
  sound = of_config.subject(_config(**{"privacy.l2_clip_norm": 1e-4}))
  assert influence.dropped(sound).passed

  def leaking(params, batch, mask):
    summed = sound.clipped_grad(params, batch, mask)
    rows = [leaf.reshape(len(mask), -1) for leaf in jax.tree.leaves(batch)]
    spoilt = jnp.stack([~jnp.isfinite(row).all(axis=1) for row in rows]).any(axis=0)
    first, *others = jax.tree.leaves(summed.total)
    moved = first.at[(0,) * first.ndim].add(5e-5 * jnp.sum(spoilt & mask))
    total = jax.tree.unflatten(jax.tree.structure(summed.total), [moved, *others])
    return dataclasses.replace(summed, total=total)

  row = influence.dropped(dataclasses.replace(sound, clipped_grad=leaking))
  assert row.passed is False and row.measured > 0.4, row
