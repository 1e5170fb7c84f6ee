"""Earlier noise that a state keeps is guarded, and no program takes its own rounding for a change.

Here XLA optimises in full, so it may round a number anew in each fusion that reads it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.noise.correlated import BandedToeplitz, BufferedToeplitz, Tree
from dpjax.validate import UserError
from tests import plans

_STEPS = 8
_PARAMS = {"w": jnp.zeros((40, 30)), "b": jnp.zeros(7), "n": jnp.zeros(())}
_STRATEGIES = {
  "banded": BandedToeplitz((1.0, 0.5, 0.25)),
  "buffered": BufferedToeplitz((0.3, 0.2), (0.9, 0.5)),
  "tree": Tree(restart_every=4),
}


def _made(name):
  plan = plans.of(
    sampler=dpjax.CyclicSampler(steps_per_pass=4, num_examples=12),
    noise_multiplier=1.3,
    l2_clip_norm=0.7,
    normalize_by=3,
    num_steps=_STEPS,
    neighboring_relation="replace_special",
    noise_shape=dpjax.NoiseShape(correlation=_STRATEGIES[name]),
  )
  row = lambda leaf: jnp.full((3, *leaf.shape), 0.1)
  grads = dpjax.wrap_grads(jax.tree.map(row, _PARAMS), mask=True)
  return plan, lambda tx, state: tx.update(grads, state, _PARAMS)


def _all_finite(tree):
  return all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize("name", _STRATEGIES)
def test_every_program_accepts_its_own_memory_and_that_of_others(name):
  plan, update = _made(name)
  tx = plan.transform(jax.random.key(0))
  step = lambda state: update(tx, state)
  begin = lambda key: plan.transform(key).init(_PARAMS)
  models = jax.vmap(begin)(jax.random.split(jax.random.key(5), 3))
  of_models = jax.jit(jax.vmap(step))
  in_scan = jax.jit(
    lambda state: jax.lax.scan(lambda s, _: step(s)[::-1], state, None, length=_STEPS)
  )
  assert _all_finite(in_scan(tx.init(_PARAMS))[1])
  assert _all_finite(jax.jit(jax.vmap(in_scan))(models)[1])
  compiled, state = jax.jit(step), tx.init(_PARAMS)
  for number in range(_STEPS):
    updates, models = of_models(models)
    assert _all_finite(updates)
    # Programs take turns, and each accepts what the other kept.
    updates, state = compiled(state) if number % 2 else step(state)
    assert _all_finite(updates)


@pytest.mark.cases(
  slow=[
    "-1.0-tree",
    "0.5-tree",
    "-1.0-buffered",
    "-1.0-banded",
    "2.0-banded",
    "2.0-buffered",
    "0.0-buffered",
    "0.0-tree",
    "0.0-banded",
    "0.5-banded",
    "2.0-tree",
  ]
)
@pytest.mark.parametrize("name", _STRATEGIES)
@pytest.mark.parametrize("factor", [0.0, 0.5, -1.0, 2.0])
def test_earlier_noise_that_is_scaled_is_refused(name, factor):
  plan, update = _made(name)
  tx = plan.transform(jax.random.key(0))
  compiled = jax.jit(lambda s: update(tx, s))
  _, state = compiled(tx.init(_PARAMS))
  is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
  change = lambda leaf: factor * leaf if is_float(leaf) else leaf
  memory = jax.tree.map(change, state.inner.memory)
  changed = state._replace(inner=state.inner._replace(memory=memory))
  with pytest.raises(UserError) as refused:
    update(tx, changed)
  assert refused.value.field == "state.draws"
  for _ in range(2):
    updates, changed = compiled(changed)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(updates))
  with pytest.raises(UserError):
    plan.spent(changed)
