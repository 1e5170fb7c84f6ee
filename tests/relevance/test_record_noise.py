"""The noise of records and labels: oracles T8, T11, T13, and independence of records."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.noise import source
from dpjax.relevance import labels, record_noise
from dpjax.types import Example
from dpjax.validate import UserError
from tests.refuses import refuses

_KEY = jax.random.key(3)
_IDS = np.arange(4000)


def _drawn(scales, shape=(2, 2, 2), **options):
  x = np.full((len(_IDS), *shape), 0.5, np.float32)
  return record_noise.noisy_records(_KEY, _IDS, x, scales, grid=None, **options) - x


def test_t8_mean_absolute_noise_is_the_scale_of_each_feature():
  scales = np.array([0.5, 1.0, 2.0, 8.0])
  drawn = np.abs(_drawn(scales)).mean(axis=(0, 3)).ravel()
  np.testing.assert_allclose(drawn, scales, rtol=0.05)
  assert not np.allclose(drawn, scales * 1.1, rtol=0.05)
  gaussian = _drawn(scales, mechanism="gaussian").std(axis=(0, 3)).ravel()
  np.testing.assert_allclose(gaussian, scales, rtol=0.05)


def test_records_and_channels_are_independent():
  drawn = _drawn(np.ones(4)).reshape(len(_IDS), -1)
  between = np.corrcoef(drawn.T) - np.eye(8)
  assert np.abs(between).max() < 0.08
  assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.03


def test_c17_shared_channels_leave_their_difference_without_noise():
  drawn = _drawn(np.ones(4), shared_channels=True)
  np.testing.assert_array_equal(drawn[..., 0], drawn[..., 1])


@pytest.mark.slow
def test_t13_drawn_once_means_the_same_noise_in_every_order_and_epoch():
  x = np.random.default_rng(0).random((50, 3, 3, 1)).astype(np.float32)
  ids, order = np.arange(50), np.random.default_rng(1).permutation(50)
  once = record_noise.noisy_records(_KEY, ids, x, np.ones(9))
  again = record_noise.noisy_records(_KEY, ids[order], x[order], np.ones(9))
  np.testing.assert_array_equal(once[order], again)
  fresh = record_noise.noisy_records(jax.random.fold_in(_KEY, 1), ids, x, np.ones(9))
  assert not np.array_equal(once, fresh)


@pytest.mark.slow
def test_t13_the_noise_of_a_batch_cancels_in_differences():
  x = jax.random.uniform(jax.random.key(0), (5, 3, 3, 1))
  scales = jnp.asarray(record_noise.by_feature(np.ones(9), (3, 3, 1)))
  noisy = record_noise.noisy_batch(_KEY, x, scales)
  np.testing.assert_allclose(noisy[1:] - noisy[:1], x[1:] - x[:1], atol=2e-6)
  assert np.abs(noisy - x).mean() > 0.3


def test_outputs_lie_on_the_public_grid():
  x = np.random.default_rng(0).random((20, 4)).astype(np.float32)
  noisy = record_noise.noisy_records(_KEY, np.arange(20), x, np.ones(4))
  np.testing.assert_array_equal(noisy * 64, np.round(noisy * 64))


def test_a_large_scale_has_a_grid_that_its_floats_fill():
  """At scale 80,000 three floats lie in a cell of 1/64: their chances tell 0 from 1."""
  scales = np.array([1.0, 1.9, 6.0, 80_000.0], np.float32)
  noisy = record_noise.noisy_records(
    _KEY, _IDS, np.zeros((len(_IDS), 4), np.float32), scales
  )
  for j, scale in enumerate(scales):
    drawn = np.unique(np.abs(noisy[:, j]))
    step = np.diff(drawn).min()
    assert step == max(2.0**-6, 2.0 ** (np.ceil(np.log2(scale)) - 8) if scale > 2 else 0)
    assert (drawn % step == 0).all() and step / np.spacing(4 * scale) >= 2**13


@pytest.mark.parametrize("grid", [0.1, 0.0, -1.0, float("nan")])
def test_a_grid_that_is_no_power_of_two_is_one_line(grid):
  with refuses("grid"):
    record_noise.noisy_records(
      _KEY, [1], np.zeros((1, 2), np.float32), [1.0, 1.0], grid=grid
    )


def test_two_records_of_one_id_are_refused_where_labels_lie_too():
  """They would share their coins: where the answers differ, both are true."""
  for ids in ([5, 5], [0, 2**32]):
    with refuses("record_ids"):
      labels.noisy_labels(_KEY, np.array(ids), np.array([0, 1]), epsilon=1.0, num_classes=3)


@pytest.mark.slow
def test_release_keys_serve_as_well():
  key = source.key_from_bytes(bytes(range(32)))
  x = np.zeros((3000, 2), np.float32)
  drawn = record_noise.noisy_records(key, np.arange(3000), x, [1.0, 3.0], grid=None)
  np.testing.assert_allclose(np.abs(drawn).mean(axis=0), [1.0, 3.0], rtol=0.06)


@pytest.mark.parametrize(
  "ids",
  [
    [0, 0], [0], [-1, 1], [2**32 + 5, 1], np.array([-1, 1]), [0.2, 1.2], [np.nan, 1], ["0", "1"],
    [1, "2"], [True, False], [None, 1], [2**70, 1], [[0], [1]], [[0], [1, 2]], 7,
  ],
  ids=str,
)  # fmt: skip
def test_ids_that_could_share_noise_are_refused(ids):
  """Twice at once, or beside one that another call is given: 5 and 2^32 + 5 were one."""
  with refuses("record_ids"):
    record_noise.noisy_records(_KEY, ids, np.zeros((2, 3)), np.ones(3))
  with refuses("record_ids"):
    labels.noisy_labels(_KEY, ids, [1, 2], epsilon=1.0, num_classes=3)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    *[("scales", [one, 1.0]) for one in (0.0, 1e-50, -1, np.nan, np.inf, 1e39, "a")],
    *[("grid", one) for one in (2.0**200, 2.0**-149, 10**400)],
    *[("x", one) for one in ([[np.inf, 0]], [[np.nan, 0]], 0.5)],
  ],
  ids=str,
)
def test_no_record_leaves_without_noise(field, value):
  """A scale of 1e-50 is 0 in float32: the record itself came back."""
  given = {"x": [[0.25, 0.75]], "scales": [1.0, 1.0], field: value}
  x, scales = given.pop("x"), given.pop("scales")
  with refuses(field):
    record_noise.noisy_records(_KEY, [0], x, scales, **given)


@pytest.mark.parametrize(
  "given",
  [np.zeros((2, 2), int), 5, [3.7, 3.2], [np.nan, 1], ["3", "4"], [None, 1]],
  ids=str,
)
def test_a_record_has_one_label(given):
  """Labels [n, m] of one epsilon would cost each record m of them."""
  with refuses("labels"):
    labels.noisy_labels(_KEY, [0, 1], given, epsilon=1.0, num_classes=10)


def test_a_refusal_does_not_depend_on_what_was_asked_before():
  answer = lambda **by: labels.noisy_labels(_KEY, [0, 1], [1, 2], **by)
  assert answer(epsilon=1.0, num_classes=10).shape == (2,)
  for wrong in (
    {"epsilon": True, "num_classes": 10},
    {"epsilon": 1.0, "num_classes": 10.0},
  ):
    with pytest.raises(UserError):
      answer(**wrong)


def test_a_wrong_number_of_scales_is_refused():
  with refuses("scales"):
    record_noise.noisy_records(_KEY, [0, 1], np.zeros((2, 3)), np.ones(4))


# --- labels


@pytest.mark.cases(long=["2.0-0.4509"])
@pytest.mark.parametrize(("epsilon", "keep"), [(2.0, 0.4509), (1.0, 0.2320)])
def test_t11_the_keep_rate_and_the_log_ratio_of_randomised_response(epsilon, keep):
  n = 40_000
  y = np.full(n, 7)
  out = labels.noisy_labels(_KEY, np.arange(n), y, epsilon=epsilon, num_classes=10)
  rate = np.mean(out == 7)
  assert rate == pytest.approx(keep, abs=0.01)
  assert abs(rate - keep) < 0.03 < abs(rate - 1 / 10)
  others = np.bincount(out, minlength=10)[:7] / n
  np.testing.assert_allclose(others, (1 - keep) / 9, atol=0.008)
  t = labels.transition(epsilon, 10)
  assert np.log(t.max() / t.min()) == pytest.approx(epsilon)
  np.testing.assert_allclose(t.sum(axis=1), 1)


@pytest.mark.slow
def test_labels_are_answered_once():
  y = np.arange(100) % 10
  draw = lambda ids: labels.noisy_labels(_KEY, ids, y[ids], epsilon=1.0, num_classes=10)
  whole = draw(np.arange(100))
  np.testing.assert_array_equal(draw(np.arange(50, 100)), whole[50:])


def test_forward_correction_is_minimised_by_the_true_distribution():
  """Over noisy labels, the corrected loss is least at the CLEAN class probabilities."""
  clean = np.array([0.7, 0.2, 0.1])
  t = labels.transition(1.0, 3)
  loss = labels.forward_corrected(lambda logits, x: logits[None], t)
  noisy = clean @ t
  expected = lambda p: sum(
    noisy[k] * float(loss(jnp.log(jnp.asarray(p)), Example(jnp.zeros(1), k)))
    for k in range(3)
  )
  at_clean = expected(clean)
  for other in ([0.6, 0.3, 0.1], [0.8, 0.1, 0.1], list(noisy), [0.7, 0.1, 0.2]):
    assert expected(other) > at_clean


def test_class_priors_are_learnt_apart_from_the_logits():
  """The corrected loss with priors pi is the one without, at logits + log pi."""
  t, pi = labels.transition(1.0, 3), np.array([0.6, 0.3, 0.1])
  apply = lambda logits, x: logits[None]
  logits, example = jnp.array([0.2, -0.4, 1.0]), Example(jnp.zeros(1), 2)
  with_priors = labels.forward_corrected(apply, t, pi)(logits, example)
  shifted = labels.forward_corrected(apply, t)(logits + jnp.log(pi), example)
  assert float(with_priors) == pytest.approx(float(shifted))


@pytest.mark.slow
def test_priors_come_from_the_responses_alone():
  rng, pi = np.random.default_rng(0), np.array([0.7, 0.2, 0.1])
  y = rng.choice(3, 60_000, p=pi)
  out = labels.noisy_labels(_KEY, np.arange(len(y)), y, epsilon=1.0, num_classes=3)
  np.testing.assert_allclose(labels.priors(out, 1.0, 3), pi, atol=0.02)
