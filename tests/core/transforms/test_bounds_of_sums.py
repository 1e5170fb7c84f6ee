"""A sum whose bound is no number >= 0 is refused, since no noise covers it."""

import math

import jax
import jax.numpy as jnp
import pytest

from dpjax.transforms.clip_and_noise import clip_and_noise
from dpjax.transforms.group_noise import check_groups
from dpjax.types import ClippedSum
from tests.refuses import refuses


@pytest.mark.parametrize("bound", [math.nan, -1.0, math.inf])
def test_a_sum_without_a_bound_is_refused(bound):
  tx = clip_and_noise(
    l2_clip_norm=1.0, noise_multiplier=1.0, normalize_by=1, key=jax.random.key(0)
  )
  params = jnp.zeros(3)
  empty = jnp.zeros(0)
  whole = ClippedSum(jnp.full(3, 100.0), empty, empty, bound, (bound,))
  with refuses("l2_clip_norm", value=1.0):
    tx.update(whole, tx.init(params), params)
  parts = ClippedSum(jnp.full(3, 100.0), empty, empty, 1.0, (bound, 1.0))
  with refuses("noise_shares"):
    check_groups(parts, {"a": 1.0, "b": 1.0})
