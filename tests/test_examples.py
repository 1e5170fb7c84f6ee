"""The flat files of examples/ run, and show what they say."""

import contextlib
import io
import json
import pathlib
import runpy

import numpy as np
import pytest
from scipy import stats

from tests import commands

_FOLDER = commands.ROOT / "examples"
_NAMES = sorted(path.stem for path in _FOLDER.glob("*.py"))


def _run(name: str) -> dict:
  """Runs an example as a user would, and returns its variables."""
  with contextlib.redirect_stdout(io.StringIO()):
    return runpy.run_path(str(_FOLDER / f"{name}.py"))


def _is_private(values: dict, accuracy: str, epsilon: float) -> bool:
  """Whether the run learned, and spent its budget and no more."""
  spent = values["spent"].epsilon if "spent" in values else values["epsilon"]
  return values[accuracy] > 0.75 and 0.97 * epsilon < spent <= epsilon


@pytest.mark.cases(slow=["linen"], long=...)
@pytest.mark.parametrize("library", ["linen", "nnx", "equinox"])
def test_dp_sgd_learns_digits_in_each_library(library):
  pytest.importorskip(library if library == "equinox" else "flax")
  values = _run(f"dp_sgd_{library}")
  assert _is_private(values, "accuracy", 3.0)
  assert values["plan"].assumptions == ()


@pytest.mark.slow
def test_fed_avg_by_hand_is_as_good_as_the_library():
  values = _run("fed_avg_users")
  assert _is_private(values, "by_hand", 4.0)
  assert abs(values["by_hand"] - values["by_library"]) < 0.1


@pytest.mark.slow
def test_fine_tuning_helps_and_both_models_are_accounted():
  values = _run("finetune")
  assert values["before"] < 0.1
  assert min(values["with_head"], values["with_lora"]) > 0.5
  assert 3.9 < values["total"] <= 4.0


@pytest.mark.long
def test_images_of_a_generator_teach_a_classifier():
  values = _run("dp_gan")
  assert 7.8 < values["spent"].epsilon <= 8.0
  # Chance is .1; of four noises the worst gave more than .6.
  assert values["accuracy"] > 0.4


@pytest.mark.slow
def test_an_own_sampler_has_a_claimed_epsilon_and_draws_what_it_says():
  values = _run("own_sampler")
  assert _is_private(values, "accuracy", 3.0)
  assert values["plan"].assumptions == ("PhiloxPoisson: its event is its author's word",)
  # The standard error of the mean of 60 sizes is below 2.
  assert abs(values["mean_size"] - 200) < 10


@pytest.mark.slow
def test_an_own_clipping_rule_keeps_its_bound():
  values = _run("own_clipping_rule")
  assert _is_private(values, "accuracy", 3.0)
  assert 0 < values["longest"] <= values["bound"] * (1 + 1e-6)


@pytest.mark.slow
def test_an_own_attack_finds_members_and_the_proof_is_not_contradicted():
  values = _run("own_attack")
  assert values["without"]["gap (mine)"].auc > 0.55
  assert all(verdict.verdict != "above" for verdict in values["verdicts"].values())


@pytest.mark.slow
def test_an_audit_refutes_a_bug_and_not_the_plan():
  values = _run("audit")
  assert not values["honest"].refuted
  assert values["broken"].refuted


@pytest.mark.slow
def test_noise_by_an_attackers_rates_is_less_than_by_one_epsilon():
  values = _run("attack_rates")
  assert 0.0999 < values["tpr"] <= 0.1
  assert values["plan"].noise_multiplier < 0.9 * values["by_epsilon"].noise_multiplier
  # Lines between corners of the curve are a bound, a little looser than the best tangent.
  assert values["tpr"] <= values["drawn"] < 0.1002


@pytest.mark.slow
def test_a_map_of_places_errs_as_the_formula_says():
  values = _run("places")
  # The mean square of 144 errors, in units of the stated variance, has std sqrt(2 / 144).
  assert all(
    abs(error**2 - 1) < 5 * np.sqrt(2 / 144) for error in values["errors"].values()
  )
  wrong = {e: np.abs(m - values["truth"]).sum() / 2 for e, m in values["maps"].items()}
  assert wrong[4.0] < 0.1 < wrong[1.0] < 0.4


@pytest.mark.long
def test_fed_avg_stays_below_its_bound_and_falls_as_fast():
  values = _run("fed_avg_bound")
  assert all(-1.2 < slope < -0.8 for slope in values["slopes"].values())
  assert all((share < 1).all() for share in values["shares"].values())
  assert values["path"].with_suffix(".png").is_file()


@pytest.mark.slow
def test_noise_of_a_record_has_the_distributions_it_says():
  values = _run("noise_of_a_record")
  edges, counts = values["EDGES"], values["counts"]
  distributions = {"Laplace": stats.laplace(), "Gaussian, proved": stats.norm(scale=2.5747)}
  paper = stats.norm(scale=np.sqrt(2 * np.log(1250)))
  for name, found in (distributions | {"Gaussian, the paper's": paper}).items():
    shares = np.diff(found.cdf(edges))
    assert np.abs(counts[name] / values["DRAWS"] - shares).sum() < 0.05
    assert values["deviations"][name] == pytest.approx(found.std(), rel=0.02)
  records = [round(of_a_record) for _, _, of_a_record in values["noises"].values()]
  assert records == [1109, 106, 72]
  assert values["path"].with_suffix(".png").is_file()


@pytest.mark.long
def test_a_sweep_draws_its_curve(tmp_path):
  done = commands.run(
    "launch.sweep",
    f"--config={_FOLDER}/sweep.py",
    f"--workdir={tmp_path}",
    "--config.base.num_steps=20",
    "--config.base.privacy.accountant=rdp",
    "--config.seeds=[0]",
    "--config.epsilons=[1.0, Infinity]",
  )
  assert done.returncode == 0, done.stderr
  rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
  assert [row["status"] for row in rows] == ["done", "done"]
  assert np.isfinite([row["test_accuracy"] for row in rows]).all()
  assert (tmp_path / "curve.png").exists()


@pytest.mark.parametrize("name", _NAMES)
def test_examples_are_listed(name):
  assert f"[{name}.py]({name}.py)" in (_FOLDER / "README.md").read_text(encoding="utf-8")


def test_each_example_has_a_test_of_its_own():
  source = pathlib.Path(__file__).read_text(encoding="utf-8")
  named = [name for name in _NAMES if not name.startswith("dp_sgd_")]
  assert all(f'_run("{name}")' in source or f"/{name}.py" in source for name in named)
