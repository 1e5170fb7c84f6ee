"""Scattering against a slow FFT twin, exact symmetries, and Kymatio where installed."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import datasets

from dpjax.zoo import networks
from dpjax.zoo.networks.scatter_heads import standardized_features
from dpjax.zoo.networks.scattering import (
  COLOURS,
  _lowpass_matrix,
  _morlet_hat,
  num_channels,
  opponent_colours,
  scattering,
  typical_scales,
)
from tests.refuses import refuses

MODULE = sys.modules["dpjax.zoo.networks.scattering"]
RNG = np.random.default_rng(0)


def _random(*shape) -> np.ndarray:
  return RNG.random(shape, np.float32)


# --- the slow twin: definitions on the padded plane, plain FFTs, one path at a time -----


def _twin_wave(P, Q, sigma, theta, xi, slant):
  total = 0
  for shift_u in range(-2, 3):
    for shift_v in range(-2, 3):
      u, v = np.mgrid[shift_u * P : (shift_u + 1) * P, shift_v * Q : (shift_v + 1) * Q]
      turn = np.array([[np.cos(theta), -np.sin(theta)], [np.sin(theta), np.cos(theta)]])
      shape = turn @ np.diag([1, slant**2]) @ turn.T
      form = shape[0, 0] * u * u + 2 * shape[0, 1] * u * v + shape[1, 1] * v * v
      phase = xi * (u * np.cos(theta) + v * np.sin(theta))
      total = total + np.exp(-form / (2 * sigma**2) + 1j * phase)
  return total * slant / (2 * 3.1415 * sigma**2)


def _twin_wavelet(P, Q, j, theta):
  sigma, xi = 0.8 * 2**j, 3 * np.pi / 4 / 2**j
  wave, bump = (_twin_wave(P, Q, sigma, theta, f, 0.5) for f in (xi, 0))
  return np.fft.fft2(wave - wave.sum() / bump.sum() * bump).real


def _twin_band(hat, res):
  """Drops the frequencies above the new Nyquist frequency, keeps the plane's size."""
  for axis, size in enumerate(hat.shape):
    frequency = np.fft.fftfreq(size, 1 / size)
    half = size / 2 ** (res + 1)
    kept = (frequency >= -half) & (frequency < half)
    hat = hat * np.expand_dims(kept, 1 - axis)
  return hat


def _twin_filter(plane, hat, step):
  return np.fft.ifft2(np.fft.fft2(plane) * hat)[::step, ::step]


def _twin(image, J=2, L=8):
  H, W = image.shape
  P, Q = (((n + 2**J) // 2**J + 1) * 2**J for n in (H, W))
  pads = [((p - n) // 2, (p - n + 1) // 2) for p, n in ((P, H), (Q, W))]
  plane = np.pad(image.astype(np.float64), pads, mode="reflect")
  angles = [(L // 2 - 1 - a) * np.pi / L for a in range(L)]
  hats = [[_twin_wavelet(P, Q, j, theta) for theta in angles] for j in range(J)]
  phi = np.fft.fft2(_twin_wave(P, Q, 0.8 * 2 ** (J - 1), 0, 0, 1)).real

  def at(hat, res):  # the filter on the grid of resolution res: its low frequencies
    kept = [np.fft.fftfreq(n // 2**res, 2**res / n).astype(int) for n in (P, Q)]
    return _twin_band(hat, res)[np.ix_(*kept)]

  low = lambda u, j: _twin_filter(u, at(phi, j), 2 ** (J - j)).real[1:-1, 1:-1]
  first = [(j, abs(_twin_filter(plane, h, 2**j))) for j in range(J) for h in hats[j]]
  second = [
    (j2, abs(_twin_filter(u, at(hat, j1), 2 ** (j2 - j1))))
    for j1, u in first
    for j2 in range(j1 + 1, J)
    for hat in hats[j2]
  ]
  return np.stack([low(plane, 0)] + [low(u, j) for j, u in first + second], -1)


@pytest.mark.cases(quick=["8-12-1"], long=...)
@pytest.mark.parametrize(("H", "W", "J"), [(28, 28, 2), (8, 12, 1), (9, 8, 3)])
def test_equals_the_slow_fft_twin(H, W, J):
  images = _random(2, H, W, 2)
  ours = np.asarray(scattering(images, J=J))
  paths = num_channels(J)
  assert ours.shape == (2, H // 2**J, W // 2**J, 2 * paths)
  for b in range(2):
    for c in range(2):
      expected = _twin(images[b, :, :, c], J)
      np.testing.assert_allclose(
        ours[b, :, :, c * paths : (c + 1) * paths], expected, atol=2e-6
      )


@pytest.mark.parametrize(("H", "W", "C"), [(28, 28, 1), (32, 32, 3), (8, 8, 1)])
def test_equals_kymatio(H, W, C):
  kymatio = pytest.importorskip("kymatio.scattering2d.frontend.numpy_frontend")
  images = _random(2, H, W, C)
  planes = np.moveaxis(images, 3, 1).astype(np.float64)
  theirs = kymatio.ScatteringNumPy2D(2, (H, W))(planes.copy())  # [B, C, 81, h, w]
  expected = theirs.transpose(0, 3, 4, 1, 2).reshape(2, H // 4, W // 4, -1)
  np.testing.assert_allclose(scattering(images), expected, atol=1e-4)


def test_channel_counts():
  assert [num_channels(J) for J in (1, 2, 3)] == [9, 81, 217]
  assert scattering(_random(1, 16, 8, 1), J=1).shape == (1, 8, 4, 9)
  assert scattering(_random(1, 8, 8, 1), L=4).shape == (1, 2, 2, 1 + 8 + 16)


# --- the filters ------------------------------------------------------------------------


def test_wavelets_have_zero_mean_and_one_peak_at_their_frequency():
  for j in range(2):
    hat = _morlet_hat((36, 36), j, angle=3, L=8)  # theta = 0: along the rows
    assert abs(hat[0, 0]) < 1e-12
    assert np.unravel_index(hat.argmax(), hat.shape) == (round(36 * 3 / 8 / 2**j), 0)


def test_littlewood_paley_sum_is_at_most_one():
  # Then every layer is non-expansive (up to pi rounded to 3.1415: 6e-5).
  hats = [_morlet_hat((36, 36), j, a, 8) for j in range(2) for a in range(8)]
  bands = sum(h**2 + np.roll(h[::-1, ::-1], 1, (0, 1)) ** 2 for h in hats) / 2
  u = np.fft.fftfreq(36, 1 / 36)
  one = np.fft.fft(np.exp(-(u**2) / (2 * 1.6**2))).real / np.sqrt(2 * np.pi * 1.6**2)
  total = bands + np.outer(one, one) ** 2
  assert total.max() <= 1 + 1e-4
  assert total.min() > 0.1


@pytest.mark.parametrize("res", [0, 1])
def test_lowpass_rows_sum_to_one(res):
  rows = _lowpass_matrix(36, 2, res)
  assert rows.shape == (7, 36 // 2**res)
  np.testing.assert_allclose(rows.sum(axis=1), 1, atol=1e-4)


# --- properties -------------------------------------------------------------------------


def test_a_constant_image_has_only_the_lowpass():
  features = np.asarray(scattering(np.full((1, 12, 12, 1), 0.7, np.float32)))
  np.testing.assert_allclose(features[..., 0], 0.7, atol=1e-4)
  assert np.abs(features[..., 1:]).max() < 1e-5


def test_scaling_and_colours():
  images = _random(1, 12, 12, 3)
  features = scattering(images)
  np.testing.assert_allclose(scattering(2.5 * images), 2.5 * features, atol=1e-5)
  for c in range(3):
    alone = scattering(images[..., c : c + 1])
    np.testing.assert_allclose(features[..., 81 * c : 81 * (c + 1)], alone, atol=1e-6)


def test_transposing_the_image_mirrors_the_angles():
  # theta -> pi/2 - theta; with theta = (3 - a) pi/8 that is a -> 2 - a modulo 8.
  images = _random(2, 16, 16, 1)
  features = np.asarray(scattering(images))
  turned = np.asarray(scattering(images.swapaxes(1, 2))).swapaxes(1, 2)
  mirror = (2 - np.arange(8)) % 8
  first = turned[..., 1:17].reshape(2, 4, 4, 2, 8)[..., mirror]
  second = turned[..., 17:].reshape(2, 4, 4, 8, 8)[..., mirror, :][..., mirror]
  np.testing.assert_allclose(turned[..., 0], features[..., 0], atol=1e-6)
  np.testing.assert_allclose(first.reshape(2, 4, 4, 16), features[..., 1:17], atol=1e-6)
  np.testing.assert_allclose(second.reshape(2, 4, 4, 64), features[..., 17:], atol=1e-6)


def _stroke() -> np.ndarray:
  image = np.zeros((1, 28, 28, 1), np.float32)
  image[0, 8:20, 13:15] = 1
  image[0, 8:10, 9:15] = 1
  return image


@pytest.mark.slow
def test_features_move_less_than_pixels_under_a_shift():
  image = _stroke()
  moved = np.roll(image, 1, axis=2)
  change = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(a)
  pixels = change(image, moved)
  features = change(np.asarray(scattering(image)), np.asarray(scattering(moved)))
  assert features < pixels / 2
  assert features > 1e-3


@pytest.mark.cases(slow=["stroke"], long=["noise"])
@pytest.mark.parametrize("kind", ["noise", "stroke", "difference"])
def test_energy_does_not_grow(kind):
  a, b = {
    "noise": (_random(2, 28, 28, 1), np.zeros((2, 28, 28, 1), np.float32)),
    "stroke": (_stroke(), np.zeros_like(_stroke())),
    "difference": (_random(2, 28, 28, 1), _random(2, 28, 28, 1)),
  }[kind]
  change = np.asarray(scattering(a)) - np.asarray(scattering(b))
  padded = np.pad(a - b, ((0, 0), (4, 4), (4, 4), (0, 0)), mode="reflect")
  assert 16 * np.sum(change**2) <= np.sum(padded**2)  # one output for 4x4 pixels


def test_p29_no_image_influences_another():
  images = _random(3, 8, 8, 1)
  changed = images.copy()
  changed[1] = 1 - changed[1]
  before, after = np.asarray(scattering(images)), np.asarray(scattering(changed))
  np.testing.assert_array_equal(before[[0, 2]], after[[0, 2]])
  assert np.abs(before[1] - after[1]).max() > 1e-3


@pytest.mark.slow
def test_jit_and_finite_gradient_at_a_blank_image():
  blank = jnp.zeros((1, 8, 8, 1))
  # not bit for bit: fused or not, moduli of 1e-15 are rounded as the processor likes
  np.testing.assert_allclose(
    jax.jit(scattering)(blank), scattering(blank), rtol=1e-5, atol=0
  )
  grad = jax.grad(lambda x: scattering(x).sum())(blank)
  assert jnp.isfinite(grad).all()


# --- whole data sets --------------------------------------------------------------------


@pytest.mark.slow
def test_chunks_give_the_whole_with_one_compilation(monkeypatch):
  traces, seen, smooth = [], [], MODULE._smooth

  def counted(low, planes):
    traces.append(planes.shape)
    return smooth(low, planes)

  monkeypatch.setattr(MODULE, "_smooth", counted)
  images = _random(7, 12, 8, 2)
  progress = lambda done, total: seen.append((done, total, len(traces)))
  features = networks.scattering_features(images, batch_size=3, progress=progress)
  assert [entry[:2] for entry in seen] == [(3, 7), (6, 7), (7, 7)]
  assert seen[0][2] == seen[-1][2] > 0
  monkeypatch.undo()
  np.testing.assert_allclose(features, scattering(images), atol=1e-6)


@pytest.mark.slow
def test_no_place_and_no_number_of_images_moves_a_bit():
  # A record fewer moves those behind it to other places of their chunk.
  images = np.repeat(_random(1, 12, 12, 1), 48, axis=0)
  seen = networks.scattering_features(images, J=1, L=4)
  np.testing.assert_array_equal(seen, seen[:1].repeat(48, axis=0))
  standardized = standardized_features(seen, 1)
  for count in (1, 2):
    np.testing.assert_array_equal(
      standardized_features(seen[:count], 1), standardized[:count]
    )


@pytest.mark.slow
def test_mirrored_features_are_the_mean_of_both_images():
  images = _random(5, 8, 8, 2)
  found = networks.scattering_features(images, mirrored=True, batch_size=2)
  both = scattering(images), scattering(images[:, :, ::-1])
  np.testing.assert_allclose(found, (both[0] + both[1]) / 2, atol=1e-6)
  other = networks.scattering_features(images[:, :, ::-1], mirrored=True, batch_size=2)
  assert (found == other).all()  # bit for bit: no example and its image differ
  assert np.abs(found - both[0]).max() > 1e-3


def test_opponent_colours_are_orthonormal_and_those_of_the_transformed_image():
  images = _random(3, 8, 8, 3)
  turned = opponent_colours(images)
  lengths = np.linalg.norm(turned, axis=-1), np.linalg.norm(images, axis=-1)
  np.testing.assert_allclose(*lengths, atol=1e-6)
  np.testing.assert_allclose(turned[..., 0], images.sum(axis=-1) / 3**0.5, atol=1e-6)
  np.testing.assert_allclose(
    turned[..., 1] * 2**0.5, images[..., 0] - images[..., 2], atol=1e-6
  )
  grey = opponent_colours(np.repeat(images[..., :1], 3, axis=-1))
  assert np.abs(grey[..., 1:]).max() < 1e-6
  for mirrored in (False, True):
    options = {"mirrored": mirrored, "batch_size": 2}
    found = networks.scattering_features(images, colours="opponent", **options)
    np.testing.assert_allclose(
      found, networks.scattering_features(turned, **options), atol=1e-6
    )
    assert np.abs(found - networks.scattering_features(images, **options)).max() > 1e-2


@pytest.mark.parametrize("colours, depth", [("opponent", 1), ("cmyk", 3)])
def test_colours_that_images_do_not_have_are_refused(colours, depth):
  with refuses("colours", value=colours):
    networks.scattering_features(_random(1, 8, 8, depth), colours=colours)
  with refuses("colours", value=colours):
    typical_scales((8, 8, depth), colours=colours)


def test_typical_scales_of_opponent_colours_are_those_of_correlated_ones():
  """Against images whose colours have that correlation, transformed."""
  rng = np.random.default_rng(0)
  plain, opponent = (typical_scales((8, 8, 3), colours=c) for c in COLOURS)
  light = rng.normal(size=(40000, 1)) * 0.9**0.5
  seen = opponent_colours(light + rng.normal(size=(40000, 3)) * 0.1**0.5).std(axis=0)
  ratio = (opponent / plain).reshape(3, 81)
  np.testing.assert_allclose(ratio, np.tile(seen[:, None], 81), rtol=0.03)


def test_features_in_half_precision():
  images = _random(2, 8, 8, 1)
  half = networks.scattering_features(images, dtype=np.float16)
  assert half.dtype == np.float16
  np.testing.assert_allclose(half, scattering(images), atol=1e-3)


@pytest.mark.parametrize("count", [0, 1])
def test_tiny_data_sets(count):
  features = networks.scattering_features(_random(count, 8, 8, 1))
  assert features.shape == (count, 2, 2, 81)


@pytest.mark.cases(long=[4])
@pytest.mark.parametrize(
  ("images", "options", "field"),
  [
    (np.zeros((1, 8, 8, 1), np.uint8), {}, "images"),
    (np.zeros((8, 8, 1), np.float32), {}, "images"),
    (np.zeros((1, 3, 8, 1), np.float32), {}, "images.shape"),
    (np.zeros((1, 8, 8, 1), np.float32), {"J": 0}, "J"),
    (np.zeros((1, 8, 8, 1), np.float32), {"batch_size": 0}, "batch_size"),
  ],
)
def test_wrong_images_are_refused(images, options, field):
  with refuses(field):
    networks.scattering_features(images, **options)


@pytest.mark.slow
def test_typical_scales_are_those_of_photographs_within_a_factor():
  """Digits, enlarged, are no photographs, and yet: all but the low-pass, which follows the
  mean of the pixels, come near one size."""
  images = np.kron(datasets.load_digits().images[:64] / 16, np.ones((2, 2)))[..., None]
  found = networks.scattering_features(images.astype(np.float32))
  sizes = np.sqrt(np.square(found).mean(axis=(0, 1, 2)))
  scales = typical_scales((16, 16, 1))
  assert np.ptp(np.log(sizes[1:] / scales[1:])) < np.log(5)
  assert np.ptp(np.log(sizes[1:])) > np.log(20)
  np.testing.assert_array_equal(typical_scales((16, 16, 2)), np.tile(scales, 2))
