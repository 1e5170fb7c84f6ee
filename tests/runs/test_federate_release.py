"""Release mode across clients: secrets from the operating system, nothing private logged."""

import jax
import numpy as np
import pytest

from dpjax import federated
from dpjax.experiments.kinds.federated import build as federate_build
from dpjax.experiments.run import loop, run_keys, writers
from dpjax.federated.round import params_of
from dpjax.noise import source
from tests.refuses import refuses
from tests.runs.test_federate import _config


def _release(**overrides):
  return _config(release=True, **overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("fed_release") / "run"
  return workdir, loop.train(_release(), workdir)


@pytest.mark.slow
def test_p32_a_release_logs_nothing_private(finished):
  workdir, result = finished
  named = {name for row in writers.read_metrics(workdir) for name in row}
  assert "test_accuracy" in named
  assert not [name for name in named if name.startswith("not_private")]
  assert result["release"] is True and "heterogeneity" not in result
  for words in ("Release mode.", "256 bits", "grid of multiples", "Unit: one user"):
    assert words in " ".join(result["privacy_statement"].split())


@pytest.mark.slow
def test_the_noisy_sum_lies_on_the_public_grid():
  config = _release(
    **{"server_optimizer.learning_rate": 1.0, "server_optimizer.rule.momentum": 0.0}
  )
  random = run_keys.draw(config.seed, release=True)
  fed = federate_build.assemble(config, None, random)
  state = fed.algorithm.init(fed.params, fed.federation.num_clients)
  cohorts = federated.cohorts(fed.plan, fed.federation, fed.work, rng=1)
  new, _ = fed.algorithm.round(state, next(iter(cohorts)))
  step = source.grid_step(fed.plan.noise_multiplier * fed.plan.l2_bound)
  moved = jax.tree.map(
    lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64),
    params_of(new), fed.params,
  )  # fmt: skip
  for leaf in jax.tree.leaves(moved):
    cells = leaf * fed.plan.normalize_by / step
    # parameters are float32: what they moved by is the grid's multiple up to their rounding
    assert np.abs(cells - np.round(cells)).max() < 1e-3
    assert np.abs(cells).max() > 5


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"privacy": "none"}, "not 'none'"),
    ({"privacy": "both"}, "not 'both'"),
    (
      {"privacy.simulated_cohort": 20, "privacy.simulated_clients": 100},
      "privacy.simulated_cohort",
    ),
  ],
)
def test_what_may_not_be_released_is_refused(tmp_path, fields, words):
  with refuses("release", value=True) as caught:
    loop.train(_release(**fields), tmp_path / "run")
  assert words in str(caught.value) and not (tmp_path / "run").exists()
