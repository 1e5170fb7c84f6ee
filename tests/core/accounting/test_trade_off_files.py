"""Trade-off curves and privacy losses as files: what is written is read, all else is refused."""

import io
import zipfile

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld_lib
from scipy import special

from dpjax import accounting
from dpjax.accounting import matrix, trade_off_files
from dpjax.accounting.epsilon import privacy_profile
from dpjax.accounting.event_kinds.randomized_response import pure_dp_event
from dpjax.accounting.trade_off import all_pairs
from dpjax.validate import UserError
from tests.refuses import refuses

_RUN = accounting.compose(
  accounting.poisson_sampled_event(accounting.gaussian_event(1.0), sampling_prob=0.2), 3
)


def test_a_curve_that_is_written_is_read_again(tmp_path):
  pairs = accounting.pairs_of(privacy_profile(accounting.gaussian_event(1)), 1e-5)
  trade_off_files.write_curve(pairs, tmp_path / "curve.csv")
  alphas, betas = trade_off_files.read_curve(tmp_path / "curve.csv")
  assert (tmp_path / "curve.csv").read_text().startswith("alpha,beta\n0.0,")
  rates = np.linspace(0.001, 0.999, 500)
  exact = special.ndtr(-special.ndtri(rates) - 1)
  drawn = np.interp(rates, alphas, betas)
  assert (drawn <= exact).all() and np.allclose(drawn, exact, atol=1e-4)


def test_losses_compose_with_those_of_dp_accounting(tmp_path):
  path = tmp_path / "losses.npz"
  assert trade_off_files.write_losses(_RUN, path)
  found = trade_off_files.read_losses(path)
  exact = accounting.epsilon(_RUN, delta=1e-5)
  assert found.get_epsilon_for_delta(1e-5) == pytest.approx(exact, rel=1e-6)
  # Whoever adds a mechanism of their own to it knows only its grid.
  other = pld_lib.from_gaussian_mechanism(
    2.0, value_discretization_interval=float(np.load(path)["remove_discretization"])
  )
  whole = accounting.epsilon(
    matrix.join([_RUN, accounting.gaussian_event(2.0)]), delta=1e-5
  )
  assert found.compose(other).get_epsilon_for_delta(1e-5) == pytest.approx(whole, rel=1e-3)


def test_what_has_no_losses_writes_none(tmp_path):
  path = tmp_path / "losses.npz"
  assert not trade_off_files.write_losses(_RUN, path, accountant="rdp")
  assert not trade_off_files.write_losses(accounting.gaussian_event(0), path)
  assert not path.exists()


_CURVES = {
  "another header": ("fpr,fnr\n0,1\n1,0\n", "must begin with the header"),
  "no number": ("alpha,beta\n0,1\nx,0\n", "row 3 must be two numbers"),
  "three columns": ("alpha,beta\n0,1,2\n", "row 2 must be two numbers"),
  "NaN": ("alpha,beta\n0,nan\n1,0\n", r"row 2 must be two rates in \[0, 1\]"),
  "infinity": ("alpha,beta\n0,1\ninf,0\n", "row 3 must be two rates"),
  "above one": ("alpha,beta\n0,1.5\n1,0\n", "row 2 must be two rates"),
  "no rows": ("alpha,beta\n", "alpha must go from 0 to 1"),
  "half": ("alpha,beta\n0,1\n0.5,0\n", "alpha must go from 0 to 1"),
  "alpha falls": ("alpha,beta\n0,1\n0.5,0.2\n0.4,0.3\n1,0\n", "alpha must rise"),
  "beta rises": ("alpha,beta\n0,0.2\n0.5,0.3\n1,0\n", "beta must never rise"),
  "above a guess": ("alpha,beta\n0,1\n0.5,0.6\n1,0\n", "beta must be at most 1 - alpha"),
  "bent": ("alpha,beta\n0,0.5\n0.3,0.5\n0.6,0\n1,0\n", "beta must be convex"),
}


@pytest.mark.parametrize("name", _CURVES)
def test_a_strangers_curve_that_no_mechanism_has_is_one_line(tmp_path, name):
  text, _message = _CURVES[name]
  (tmp_path / "curve.csv").write_text(text)
  with refuses("curve") as error:
    trade_off_files.read_curve(tmp_path / "curve.csv")
  assert "\n" not in str(error.value)


def _arrays(**changed):
  arrays = {
    "remove_discretization": np.float64(0.5),
    "remove_lower_loss": np.int64(-1),
    "remove_probs": np.array([0.25, 0.25, 0.5]),
    "remove_infinity_mass": np.float64(0.0),
  }
  return {name: value for name, value in (arrays | changed).items() if value is not None}


_LOSSES = {
  "an entry is missing": ({"remove_probs": None}, "must hold"),
  "one direction is half there": ({"add_probs": np.ones(1)}, "must hold"),
  "NaN": ({"remove_probs": np.array([0.5, np.nan])}, "not NaN or negative"),
  "a NaN of mass": ({"remove_infinity_mass": np.float64("nan")}, "not NaN or negative"),
  "negative": ({"remove_probs": np.array([1.5, -0.5])}, "not NaN or negative"),
  "too little": ({"remove_probs": np.array([0.5, 0.4])}, "must sum to 1, not 0.9"),
  "too much": ({"remove_probs": np.array([0.9, 0.4])}, "must sum to 1, not 1.3"),
  "no row": ({"remove_probs": np.ones((1, 1))}, "floats in a row"),
  "no grid": ({"remove_discretization": np.float64(0)}, "must be a finite number > 0"),
  "text": ({"remove_lower_loss": np.array("1")}, "must be numbers"),
  "half a step": ({"remove_lower_loss": np.float64(0.5)}, "must be an integer"),
  "what cancels a run": (
    {"remove_lower_loss": np.int64(-40), "remove_probs": np.ones(1)},
    "would cancel other losses",
  ),
  "what cancels it by a tenth": (
    {"remove_lower_loss": np.int64(-40), "remove_probs": np.array([0.1] + 60 * [0.015])},
    "would cancel other losses",
  ),
  "an object": ({"remove_probs": np.array([None, {}])}, "must be an npz of numbers"),
}


@pytest.mark.parametrize("name", _LOSSES)
def test_a_strangers_losses_that_no_mechanism_has_are_one_line(tmp_path, name):
  changed, _message = _LOSSES[name]
  np.savez(tmp_path / "losses.npz", **_arrays(**changed))
  with refuses("losses") as error:
    trade_off_files.read_losses(tmp_path / "losses.npz")
  assert "\n" not in str(error.value)


def test_the_losses_that_those_are_made_of_are_read(tmp_path):
  np.savez(tmp_path / "losses.npz", **_arrays())
  found = trade_off_files.read_losses(tmp_path / "losses.npz")
  assert found.get_delta_for_epsilon(0.0) == pytest.approx(0.5 * -np.expm1(-0.5))


@pytest.mark.parametrize("share", [0.0, 1e-9, 1e-3, 9e-3])
def test_a_strangers_losses_never_lower_what_they_are_composed_with(tmp_path, share):
  event = accounting.gaussian_event(1.0)
  trade_off_files.write_losses(event, tmp_path / "run.npz")
  run = trade_off_files.read_losses(tmp_path / "run.npz")
  grid = float(np.load(tmp_path / "run.npz")["remove_discretization"])
  # A share of the mass at -8, the rest at 0.
  probs = np.zeros(int(8 / grid) + 1)
  probs[0] = share
  probs[-1] = 1 - share
  changed = {"remove_discretization": grid, "remove_lower_loss": 1 - len(probs)}
  np.savez(tmp_path / "losses.npz", **_arrays(**changed, remove_probs=probs))
  theirs = trade_off_files.read_losses(tmp_path / "losses.npz")
  for epsilon in (0.0, 1.0, 3.0, 4.0):
    alone = run.get_delta_for_epsilon(epsilon)
    whole = run.compose(theirs).get_delta_for_epsilon(epsilon)
    assert whole >= alone * (1 - 1e-9)


def test_mass_that_lacks_by_rounding_is_not_lost_in_many_copies(tmp_path):
  missing = 9e-10
  probs = np.array([1 - missing])
  changed = {"remove_lower_loss": np.int64(0), "remove_probs": probs}
  np.savez(tmp_path / "losses.npz", **_arrays(**changed))
  found = trade_off_files.read_losses(tmp_path / "losses.npz").self_compose(1000)
  assert found.get_delta_for_epsilon(0.0) == pytest.approx(1000 * missing, rel=1e-3)


@pytest.mark.parametrize("cost", [1.0, 30.0, 50.0, 100.0])
def test_lines_between_the_points_are_a_bound_at_tiny_rates_too(cost):
  pairs = all_pairs(pure_dp_event(cost))
  alphas, betas = pairs.points()
  rates = np.geomspace(1e-25, 1, 3000)
  # Randomised response, which has the largest rates of all mechanisms of this epsilon.
  exact = np.maximum(1 - np.exp(cost) * rates, np.exp(-cost) * (1 - rates))
  assert (np.interp(rates, alphas, betas) <= exact + 1e-15).all()


@pytest.mark.parametrize("shape", [(10**15,), (10**30,), (-5,), (2**40, 0)])
def test_a_shape_that_nothing_holds_is_one_line(tmp_path, shape):
  header = io.BytesIO()
  described = {"descr": "<f8", "fortran_order": False, "shape": shape}
  np.lib.format.write_array_header_1_0(header, described)
  with zipfile.ZipFile(tmp_path / "losses.npz", "w") as archive:
    for name in _arrays():
      archive.writestr(f"{name}.npy", header.getvalue() + bytes(8))
  with pytest.raises(UserError):
    trade_off_files.read_losses(tmp_path / "losses.npz")


def test_damaged_bytes_are_read_or_end_in_one_line(tmp_path):
  whole = io.BytesIO()
  np.savez_compressed(whole, **_arrays(remove_probs=np.full(1000, 1e-3)))
  rng = np.random.default_rng(0)
  for _ in range(300):
    content = bytearray(whole.getvalue())
    content[rng.integers(len(content))] = rng.integers(256)
    (tmp_path / "losses.npz").write_bytes(content)
    try:
      trade_off_files.read_losses(tmp_path / "losses.npz")
    except UserError as error:
      assert "\n" not in str(error)


def test_no_npz_is_one_line(tmp_path):
  whole = io.BytesIO()
  np.savez(whole, **_arrays())
  for content in (b"", b"no zip", whole.getvalue()[:200], whole.getvalue()[:-30]):
    (tmp_path / "losses.npz").write_bytes(content)
    with refuses("losses") as error:
      trade_off_files.read_losses(tmp_path / "losses.npz")
    assert "\n" not in str(error.value)
  with refuses("losses"):
    trade_off_files.read_losses(tmp_path / "absent.npz")
  with refuses("curve"):
    trade_off_files.read_curve(tmp_path / "absent.csv")
  with refuses("curve"):
    trade_off_files.read_curve("/dev/null")
