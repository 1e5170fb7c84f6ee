"""Paper mode: what is claimed, and that the list of failed assumptions follows the switches."""

import math

import jax
import numpy as np
import pytest

from dpjax.relevance import adlm, paper, privacy
from dpjax.relevance.settings import AdLM, Paper
from tests.refuses import refuses

_R = np.random.default_rng(0).dirichlet(np.ones(64))


def _failed(how, channels=1, d=784, n=60_000):
  lines = paper.failed_assumptions(
    how, num_features=d, num_channels=channels, num_records=n
  )
  return {line.split(":")[0]: line for line in lines}


@pytest.mark.parametrize(
  ("how", "channels", "present", "absent"),
  [
    (
      Paper(preset="P1"),
      1,
      {"sensitivity L", "batch sums", "raw labels"},
      {"redrawn noise", "L2 sensitivity", "shared channels"},
    ),
    (Paper(preset="P2"), 1, {"batch sums"}, {"sensitivity L", "redrawn noise"}),
    (Paper(preset="P4"), 1, {"batch sums", "redrawn noise"}, {"sensitivity L"}),
    (
      Paper(preset="P5"),
      3,
      {"batch sums", "redrawn noise", "shared channels"},
      {"delta by coordinate"},
    ),
    (
      Paper(mechanism="gaussian"),
      1,
      {"Gaussian by coordinate", "delta by coordinate"},
      {"L2 sensitivity"},
    ),
    (
      Paper(preset="P1", mechanism="gaussian"),
      1,
      {"L2 sensitivity", "Gaussian by coordinate", "delta by coordinate"},
      set(),
    ),
    (Paper(rel_norm="raw"), 1, {"range of shares"}, set()),
    (Paper(shared_channels=False), 3, {"model 1"}, {"shared channels"}),
    (Paper(entropy_floor=0.0), 1, {"relevance floor"}, {"entropy floor"}),
    (Paper(entropy_floor=1e-4), 1, {"entropy floor"}, set()),
    (Paper(preset="custom", draw="record_fresh"), 1, {"redrawn noise"}, set()),
  ],
)
def test_the_failed_assumptions_follow_the_switches(how, channels, present, absent):
  failed = _failed(how, channels)
  assert present <= set(failed) and not absent & set(failed)
  assert {
    "neighbors",
    "data-dependent noise",
    "entropy as epsilon",
    "model 1",
    "relevance floor",
    "raw labels",
    "epsilon_1 left out",
  } <= set(failed)


def test_delta_by_coordinate_says_how_vacuous_delta_is():
  text = _failed(Paper(mechanism="gaussian"))["delta by coordinate"]
  assert "d * delta = 0.784" in text and "n * delta = 60" in text


def _theorem_6(z, num_terms):
  """The first terms of its series for ln(1 + e^-z), which is that of ln(1 + x) at x = e^-z."""
  n = np.arange(1, num_terms + 1)
  return float(np.sum((-1.0) ** (n - 1) / n * np.exp(-n * z)))


@pytest.mark.parametrize("z", [-2.0, -0.5, 0.5, 2.0])
def test_one_of_the_series_of_theorem_6_diverges(z):
  """It expands ln(1 + e^-z) and ln(1 + e^z) side by side, by a series for |x| <= 1."""
  assert _theorem_6(-0.5, 60) < -1e11  # docs/relevance.md
  converges, diverges = sorted([z, -z], reverse=True)
  exact = math.log1p(math.exp(-converges))
  errors = [abs(_theorem_6(converges, n) - exact) for n in (20, 100)]
  assert errors[1] <= errors[0] and errors[1] < 1e-9
  sizes = [abs(_theorem_6(diverges, n)) for n in (20, 100)]
  assert sizes[1] > 1e3 * max(sizes[0], 1)


@pytest.mark.parametrize(
  ("how", "present", "absent"),
  [
    (Paper(), {"noise", "shares", "records", "loss", "kernels"}, set()),
    (Paper(preset="P1"), {"loss"}, {"noise"}),
    (Paper(preset="P2", rel_norm="raw"), {"noise"}, {"shares"}),
  ],
)
def test_departures_follow_the_switches(how, present, absent):
  lines = paper.departures(how, num_records=60_000, averaged=10_000)
  names = {line.split(":")[0] for line in lines}
  assert present <= names and not absent & names
  whole = paper.departures(how, num_records=60_000, averaged=60_000)
  assert not any(line.startswith("records") for line in whole)


@pytest.mark.slow
def test_theorem_7_adds_the_entropy_that_the_figures_leave_out():
  found = paper.features(
    jax.random.key(0), np.full(784, 1 / 784), Paper(), epsilon=2.0, num_records=60_000,
    batch_size=600,
  )  # fmt: skip
  claims = paper.claims(found, 2.0)
  assert claims["claimed_epsilon"] == 2.0
  assert claims["claimed_epsilon_thm7"] == pytest.approx(2 + 9.6147, abs=1e-4)


def test_what_the_features_alone_would_cost():
  numbers = dict(epsilon=2.0, num_records=1000, batch_size=100)
  make = lambda how: paper.features(jax.random.key(0), _R, how, **numbers)
  cost = lambda how, channels=1: paper.local_epsilon(make(how), how, channels)
  assert cost(Paper(preset="P1")) == pytest.approx(0.02)
  assert cost(Paper(preset="P2")) == pytest.approx(2.0)
  assert cost(Paper(preset="P3")) == pytest.approx(128.0)  # d = 64
  assert cost(Paper(preset="P5")) == math.inf
  assert cost(Paper(preset="P2"), 3) == math.inf  # channels share their noise


def test_the_gaussian_of_the_paper_has_the_classic_factor():
  numbers = dict(epsilon=2.0, num_records=1000, batch_size=100)
  one, other = (
    paper.features(jax.random.key(0), _R, Paper(mechanism=m), **numbers).scales
    for m in ("laplace", "gaussian")
  )
  np.testing.assert_allclose(other / one, 3.7765, rtol=1e-4)


@pytest.mark.slow
def test_the_entropy_floor_of_the_paper_defeats_itself():
  """Section 1.2 of the design: with the paper's budgets half of the irrelevant features get
  huge relevance and take the budget; the default floor gives it to the relevant ones."""
  r = np.full(100, 1e-6)
  r[:10] = (1 - 90e-6) / 10
  share = lambda floor: np.mean(
    [
      paper.features(
        jax.random.key(s), r, Paper(entropy_floor=floor), epsilon=1.0, num_records=60_000,
        batch_size=1,
      ).beta[:10].sum()
      for s in range(5)
    ]
  )  # fmt: skip
  assert share(1e-12) < 0.05 and share(None) > 0.8


def test_a_claim_cannot_be_stated_without_what_fails():
  with pytest.raises(ValueError, match="must name the assumptions"):
    privacy.Privacy("claimed", 1.0, 0.0, "replace_one")
  with pytest.raises(ValueError, match="finite"):
    privacy.Privacy("proved", math.inf, 1e-5, "replace_one")
  claimed = privacy.Privacy(
    "claimed", 1.0, 0.0, "x", failed_assumptions=("raw labels: ...",)
  )
  assert claimed.to_json()["proved_epsilon"] is None


@pytest.mark.parametrize(
  ("fields", "field"),
  [({"preset": "P6"}, "paper.preset"), ({"rel_norm": "x"}, "paper.rel_norm")],
)
def test_a_wrong_setting_is_one_line(fields, field):
  with refuses(field):
    Paper(**fields)


# --- AdLM


def test_the_input_noise_of_adlm_is_that_of_its_code():
  scale = adlm.input_scales(np.full(784, 1 / 784), AdLM(), epsilon=0.075, batch_size=1800)
  np.testing.assert_allclose(scale, 9800 / 0.075 / 1800)


def test_the_loss_noise_of_adlm_has_the_scale_of_its_code_or_is_none():
  fields = {"num_classes": 10, "epsilon": 0.15, "batch_size": 1800}
  drawn = adlm.loss_noise(jax.random.key(0), AdLM(hidden=400), **fields)
  assert drawn.shape == (400, 10)
  scale = 10 * (400 + 400**2 / 4) / 0.15 / 1800
  # 4,000 absolute values of a Laplace law have a mean within 5 % of its scale, at 3 sigma.
  assert float(np.abs(drawn).mean()) == pytest.approx(scale, rel=0.05)
  none = adlm.loss_noise(jax.random.key(0), AdLM(loss_noise=False), **fields)
  assert none.shape == (30, 10) and not np.any(none)


def test_the_polynomial_is_the_sigmoid_cross_entropy_to_second_order():
  import jax.numpy as jnp

  z = jnp.array([[0.05, -0.1, 0.02]])
  net = adlm.Net(None, None, None, lambda params, x: (z, None))
  params = {"head": jnp.ones((2, 3))}
  loss, _ = adlm.polynomial_loss(net, jnp.zeros((2, 3)))(params, None, jnp.array([1]))
  wanted = np.array([0.0, 1.0, 0.0])
  flat = np.asarray(z[0], np.float64)
  exact = np.sum(np.maximum(flat, 0) - flat * wanted + np.log1p(np.exp(-np.abs(flat))))
  assert float(loss) == pytest.approx(exact, abs=1e-5)
  noisy, _ = adlm.polynomial_loss(net, jnp.ones((2, 3)))(params, None, jnp.array([1]))
  assert float(loss - noisy) == pytest.approx(6.0, rel=1e-5)
