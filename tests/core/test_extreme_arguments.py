"""Extreme values of each argument of a plan: what is refused is refused by the argument's name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import sampling
from dpjax.validate import UserError
from tests.refuses import refuses

_VALUES = [np.inf, -np.inf, np.nan, 0, -1, 1e-320, 1e-45, 1e-30, 1e30, 1e38, 1e39, 1e300]
_VALUES += [10**400, 2**31, 2**64, None, "1", True, [1.0], {"w": np.inf}, 1j, ()]
_PLAN = {
  "sampler": sampling.PoissonSampler(sampling_prob=0.5, capacity=101),
  "noise_multiplier": 1.0,
  "l2_clip_norm": 1.0,
  "normalize_by": 50,
  "num_steps": 2,
  "delta": 1e-5,
}


def _update(tx):
  grads = dpjax.wrap_grads({"w": jnp.ones((3, 2))}, mask=True)
  tx.update(grads, tx.init({"w": jnp.zeros(2)}))


def _plan(**changes):
  plan = dpjax.Plan(**{**_PLAN, **changes})
  _update(plan.transform(jax.random.key(0)))
  loss = lambda params, x: jnp.sum(params["w"] * x)
  plan.clipped_grad(loss)({"w": jnp.zeros(2)}, jnp.ones((3, 2)), True)


def _for_data(**changes):
  base = {"batch_size": 20, "epochs": 0.2, "epsilon": 3.0, "delta": 1e-5}
  base |= {"l2_clip_norm": 1.0, "num_examples": 100}
  dpjax.Plan.for_data(np.zeros((100, 2)), **{**base, **changes})


def _transform(**changes):
  base = {"l2_clip_norm": 1.0, "noise_multiplier": 1.0, "normalize_by": 3}
  base |= {"key": jax.random.key(0), "num_steps": 2}
  _update(dpjax.clip_and_noise(**{**base, **changes}))


def _gradients(**changes):
  loss = lambda w, x: jnp.sum(w * x)
  dpjax.clipped_grad(loss, **changes)(jnp.zeros(2), jnp.ones((3, 2)), True)


_DOORS = [(_plan, name) for name in (*_PLAN, "slices", "noise_shape", "statistics")]
_DOORS += [(_plan, name) for name in ("scaling", "accountant", "neighboring_relation")]
_DOORS += [(_for_data, name) for name in ("batch_size", "epsilon", "delta", "num_examples")]
_DOORS += [(_for_data, name) for name in ("l2_clip_norm", "epochs")]
_DOORS += [(_transform, name) for name in ("l2_clip_norm", "noise_multiplier")]
_DOORS += [(_transform, name) for name in ("normalize_by", "num_steps", "key")]
_DOORS += [(_gradients, "l2_clip_norm")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
  ("door", "name"), _DOORS, ids=[f"{door.__name__[1:]}-{name}" for door, name in _DOORS]
)
def test_a_refusal_names_the_argument_that_was_given(door, name):
  for value in _VALUES:
    try:
      door(**{name: value})
    except UserError as error:
      text = str(error)
      assert text.startswith(name) or f" {name}=" in text, text
      assert "\n" not in text and len(text) < 400


@pytest.mark.slow
def test_a_clip_norm_without_a_bound_is_named():
  for door in (_plan, _for_data, _transform):
    with pytest.raises(UserError) as refused:
      door(l2_clip_norm=np.inf)
    assert refused.value.field == "l2_clip_norm"
  # Without noise nothing need be bounded.
  _plan(l2_clip_norm=np.inf, noise_multiplier=0.0)


def test_two_numbers_whose_product_overflows_are_both_named():
  for door in (_plan, _transform):
    with refuses("l2_clip_norm", value=1e150):
      door(l2_clip_norm=1e150, noise_multiplier=1e200)
    with pytest.raises(UserError, match=r"^noise_multiplier \* l2_clip_norm=1e\+38"):
      door(l2_clip_norm=1e19, noise_multiplier=1e19)
    with pytest.raises(UserError, match=r"^noise_multiplier \* l2_clip_norm=1e\+220"):
      door(l2_clip_norm=1e20, noise_multiplier=1e200)
