"""Features of norm 1, targets of a release, and the loss of a generator."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.mechanisms import ClassSums
from dpjax.validate import UserError
from dpjax.zoo.recipes.synthesis import Embedding, Synthesis
from tests.refuses import refuses

_EMBEDDING = Embedding((4, 4, 1), num_frequencies=6, length_scale=2.0, side=2)


def _images(count=9):
  return np.random.default_rng(0).random((count, 4, 4, 1))


def test_every_row_has_norm_1_whatever_the_image():
  odd = np.stack([np.zeros((4, 4, 1)), np.ones((4, 4, 1)), np.full((4, 4, 1), 1e300)])
  rows = _EMBEDDING.rows(np.concatenate([_images(), odd, -odd]))
  assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-12)
  assert rows.shape[1] == _EMBEDDING.width
  broken = _EMBEDDING.rows(np.full((1, 4, 4, 1), np.nan))
  assert np.isnan(broken).all()


def test_a_row_of_a_table_has_norm_1_and_the_moments_of_all_its_columns():
  """Kernels by their definition, on a grid of 2^-12."""
  embedding = Embedding((5,), num_frequencies=20_000, length_scale=1.0, side=1)
  table = np.random.default_rng(1).integers(-100, 5000, (2, 5)) / 4096
  rows = embedding.rows(table)
  assert rows.shape[1] == embedding.width == 1 + 40_000 + 6 * 7 // 2
  assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-12)
  first, second = np.clip(table, 0, 1)
  units = [np.append(0.2 * np.sqrt(5), row) for row in (first, second)]
  units = [unit / np.linalg.norm(unit) for unit in units]
  gaussian = np.exp(-np.sum((first - second) ** 2) / 2)
  wanted = 0.04 + 0.96 * (0.2 * gaussian + 0.8 * (units[0] @ units[1]) ** 2)
  assert rows[0] @ rows[1] == pytest.approx(wanted, abs=0.01)


def test_categories_of_a_generated_row_sum_to_1():
  embedding = Embedding((6,), num_frequencies=2, side=1)
  synthesis = Synthesis(embedding, 2, hidden=8, num_latents=3, categories=((1, 3), (3, 6)))
  rows = synthesis.images(
    synthesis.init(jax.random.key(0)), jax.random.key(1), jnp.arange(4) % 2
  )
  assert rows.shape == (4, 6) and ((rows > 0) & (rows < 1)).all()
  np.testing.assert_allclose(rows[:, 1:3].sum(axis=1), 1, rtol=1e-6)
  np.testing.assert_allclose(rows[:, 3:].sum(axis=1), 1, rtol=1e-6)


def test_a_row_is_the_same_bit_by_bit_in_every_batch():
  images = _images(70)
  together = np.concatenate(list(_EMBEDDING.chunks(images)))
  alone = np.concatenate([_EMBEDDING.rows(image[None]) for image in images])
  assert (together == alone).all()


def test_inner_products_are_the_kernels():
  many = dataclasses.replace(_EMBEDDING, num_frequencies=20_000, moments_share=0.5)
  first, second = _images(2)
  rows = many.rows(np.stack([first, second]))
  half = (1 - 0.04) / 2
  gaussian = np.exp(-np.sum((first - second) ** 2) / (2 * 2.0**2))
  unit = many._unit(np.round(np.stack([first, second]).reshape(2, -1) * 4096) / 4096)
  wanted = 0.04 + half * gaussian + half * (unit[0] @ unit[1]) ** 2
  assert rows[0] @ rows[1] == pytest.approx(wanted, abs=0.01)
  # Another length scale is another kernel.
  wider = dataclasses.replace(many, length_scale=20.0).rows(np.stack([first, second]))
  assert abs(wider[0] @ wider[1] - wanted) > 0.05


@pytest.mark.slow
def test_targets_are_the_means_and_a_class_without_records_is_empty():
  images = _images(400)
  labels = np.zeros(400, np.int32)
  release = ClassSums(1e-6, 2)(jax.random.key(0), _EMBEDDING.rows(images), labels)
  targets = _EMBEDDING.targets(release, 1e-6)
  assert targets.present.tolist() == [True, False]
  assert targets.counts == pytest.approx([400, 0], rel=1e-4)
  unit = _EMBEDDING._unit(np.round(images.reshape(400, -1) * 4096) / 4096)
  inverse = np.linalg.inv(targets.metric)
  moments = inverse @ targets.matrices[0] @ inverse
  assert np.allclose(moments * 1, unit.T @ unit / 400, atol=1e-3)


@pytest.mark.slow
def test_the_loss_is_unbiased_in_the_number_of_images():
  """The mean over batches is that of the exact squared distance, where a plain one is not."""
  synthesis = Synthesis(_EMBEDDING, 2, num_steps=1, per_class=3, num_latents=4, hidden=8)
  params = synthesis.init(jax.random.key(0))
  # A generator of much variety.
  params = jax.tree.map(lambda leaf: 3 * leaf, params)
  release = ClassSums(1e-6, 2)(
    jax.random.key(1), _EMBEDDING.rows(_images(50)), np.arange(50) % 2
  )
  targets = _EMBEDDING.targets(release, 1e-6)
  mean_loss = lambda made, keys: float(
    jnp.mean(jax.vmap(lambda key: made.loss(params, key, targets))(keys))
  )
  few = mean_loss(synthesis, jax.random.split(jax.random.key(2), 1000))
  large = dataclasses.replace(synthesis, per_class=400)
  many = mean_loss(large, jax.random.split(jax.random.key(3), 4))
  assert few == pytest.approx(many, abs=0.04)


@pytest.mark.parametrize(
  "field, value",
  [("length_scale", 0.0), ("count_share", 1.0), ("side", -1), ("shape", (99, 99, 1))],
)
def test_wrong_settings_are_refused(field, value):
  with pytest.raises(UserError, match=field):
    dataclasses.replace(_EMBEDDING, **{field: value})


@pytest.mark.parametrize(
  ("field", "value"), [("per_class", 1), ("num_steps", 0), ("num_classes", 0)]
)
def test_a_generator_without_pairs_of_images_or_steps_is_refused(field, value):
  with refuses(field):
    Synthesis(_EMBEDDING, **{"num_classes": 2, field: value})
