"""Optimizers by name: their steps are those of the papers, on the noisy mean alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.experiments.config import fields, optimizers
from dpjax.experiments.kinds.central.config import TrainConfig

_PARAMS = {"w": jnp.zeros((3, 4)), "b": jnp.zeros(4)}
_RANDOM = np.random.default_rng(0)
_GRADS = {"w": _RANDOM.normal(size=(3, 4)), "b": _RANDOM.normal(size=4)}


def _steps(rule, count, **options):
  config = fields.replace_all(
    TrainConfig(),
    {"optimizer.rule": rule, **{f"optimizer.rule.{k}": v for k, v in options.items()}},
  )
  tx = optimizers.make(config.optimizer, lambda step: 0.1)
  state = tx.init(_PARAMS)
  params = _PARAMS
  updates = None
  for number in range(count):
    grads = {name: jnp.asarray(value * (-0.5) ** number) for name, value in _GRADS.items()}
    updates, state = tx.update(grads, state, params)
    params = {name: params[name] + updates[name] for name in params}
  return {name: np.asarray(leaf) for name, leaf in updates.items()}


def test_lion_is_algorithm_2_of_its_paper():
  # Chen et al. 2023, arXiv:2302.06675: sign of beta1 m + (1 - beta1) g; m by beta2.
  mean = {name: 0.01 * value for name, value in _GRADS.items()}
  first = _steps("lion", 1)
  second = _steps("lion", 2)
  for name, grad in _GRADS.items():
    np.testing.assert_allclose(first[name], -0.1 * np.sign(grad), rtol=1e-6)
    mixed = 0.9 * mean[name] + 0.1 * (-0.5 * grad)
    np.testing.assert_allclose(second[name], -0.1 * np.sign(mixed), rtol=1e-6)


def test_muon_moves_matrices_by_nearly_orthogonal_steps_and_vectors_by_nadam():
  # Jordan et al. 2024: five Newton-Schulz steps bring singular values near 1.
  updates = _steps("muon", 1)
  left, _, right = np.linalg.svd(_GRADS["w"], full_matrices=False)
  values = np.diag(left.T @ updates["w"] @ right.T)
  scale = np.abs(values).max()
  assert (values < 0).all() and np.abs(values).min() > 0.5 * scale
  # A step along the gradient itself would keep the ratio of its singular values.
  ratio = np.linalg.svd(_GRADS["w"], compute_uv=False)
  assert ratio.min() < 0.5 * ratio.max()
  # Vectors: Adam with Nesterov's momentum (Dozat 2016), whose first step has this length.
  length = 0.1 * (0.9 * 0.1 / (1 - 0.9**2) + 1)
  np.testing.assert_allclose(updates["b"], -length * np.sign(_GRADS["b"]), rtol=1e-4)


def test_adamw_is_another_optimizer_than_adam():
  adam, adamw = (_steps(rule, 2)["w"] for rule in ("adam", "adamw"))
  assert np.abs(adam - adamw).max() > 1e-6


@pytest.mark.parametrize("rule", ["lion", "muon"])
def test_weight_decay_pulls_to_zero_and_is_off_by_default(rule):
  plain = _steps(rule, 2)
  decayed = _steps(rule, 2, weight_decay=0.5)
  assert np.abs(plain["w"] - decayed["w"]).max() > 1e-4
