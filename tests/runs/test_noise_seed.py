"""Where noise comes from: the operating system, or a `noise_seed`, and what is stated then."""

import dataclasses
import multiprocessing
import secrets

import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import noise
from dpjax.accounting import Ledger
from dpjax.experiments.config import choices, fields
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.run import dry_run, guarantee, loop, run_keys
from dpjax.experiments.run import kind as kinds
from dpjax.experiments.run.guarantee import REPEATED
from dpjax.experiments.run.kind import experiment_of
from dpjax.experiments.sweeps.sweep import Runs, Sweep
from dpjax.noise.gaussian import key_id
from dpjax.validate import UserError
from tests.runs import small_configs

_NUMBERS = 100_000
_CONFIGS = [kind.config_class for kind in kinds.KINDS.values()]


def _central(**changes):
  return small_configs.central(**changes)[0]


def test_a_claim_about_a_larger_deployment_says_what_this_very_run_costs():
  """Without it, the epsilon of the deployment stood for that of the records that were read."""
  plans = [
    dpjax.Plan(
      sampler=dpjax.PoissonSampler(sampling_prob=share, capacity=100),
      noise_multiplier=noise_multiplier,
      l2_clip_norm=1.0,
      normalize_by=10,
      num_steps=3,
      delta=1e-5,
    )
    for share, noise_multiplier in ((0.01, 2.0), (0.5, 1.0))
  ]
  simulated = guarantee.of_plan(plans[0], 20, ran=plans[1], deployed=1000)
  claimed = guarantee.as_repeatable(simulated, 3)
  facts = []
  for promised in (simulated, claimed):
    ledger = promised.charge(Ledger(), range(3), noise_key_id="a")
    facts.append(promised.facts(ledger, promised.curve(3)))
  assert [each["epsilon_kind"] for each in facts] == ["simulated", "claimed"]
  assert facts[1]["failed_assumptions"] == [guarantee.DEPLOYED, REPEATED]
  own = [each["epsilon_of_this_run"] for each in facts]
  assert own[0] == own[1] > facts[1]["epsilon"]


# --- two runs


def _draw(config):
  return experiment_of(config).new_keys()


def _correlation(one, other):
  """Returns the correlation of the noise of two runs, in standard deviations of its law at 0."""
  draws = [
    noise.source.gaussian(keys.noise, jnp.zeros(_NUMBERS), 1.0) for keys in (one, other)
  ]
  return abs(float(np.corrcoef(*map(np.asarray, draws))[0, 1])) * np.sqrt(_NUMBERS)


def test_p17_two_runs_of_one_config_have_independent_noise():
  one, other = _draw(_central()), _draw(_central())
  assert _correlation(one, other) < 4
  seeded = [_draw(_central(noise_seed=5)) for _ in range(2)]
  assert _correlation(*seeded) > 100  # so the test would see it


def test_p17_rows_of_a_sweep_have_independent_noise():
  base = _central(**{"privacy.epsilon": 2.0, "privacy.noise_multiplier": None})
  named = [
    (f"epsilon {epsilon}", fields.replace(base, "privacy.epsilon", epsilon))
    for epsilon in (1.0, 2.0)
  ]
  found = [_draw(point.config) for point in Runs(named, Sweep(seeds=[0, 1])).points]
  pairs = [(a, b) for i, a in enumerate(found) for b in found[:i]]
  assert len(pairs) == 6 and max(_correlation(*pair) for pair in pairs) < 4


def _in_a_process(queue):
  run_keys.secrets = secrets  # of this process, as for a user
  queue.put(run_keys.to_json(run_keys.draw(0)))


def test_p17_processes_draw_keys_of_their_own():
  context = multiprocessing.get_context("fork")
  queue = context.SimpleQueue()
  processes = [context.Process(target=_in_a_process, args=(queue,)) for _ in range(2)]
  for process in processes:
    process.start()
  found = [run_keys.from_json(0, queue.get()) for _ in processes]
  for process in processes:
    process.join()
  assert _correlation(*found) < 4 and found[0].sampler != found[1].sampler


def test_runs_that_open_weights_with_noise_have_keys_of_their_own():
  """`launch.account` refuses two runs of one key, as if their noise were the same."""
  config = fields.replace_all(SecureConfig(), {"task": {"name": "noisy_model"}})
  one, other = (experiment_of(config).new_keys() for _ in range(2))
  assert key_id(one.noise) != key_id(other.noise)


@pytest.mark.parametrize("noise_seed", [None, 3])
def test_a_seed_of_numpy_gives_the_keys_of_the_equal_int(noise_seed):
  private = noise_seed is not None
  one = run_keys.draw(2, private=private, noise_seed=noise_seed)
  seeds = np.int64(2), noise_seed and np.int64(noise_seed)
  assert run_keys.draw(seeds[0], private=private, noise_seed=seeds[1]) == one


# --- what is stated

_SMALL = {
  "central": small_configs.central(),
  "central, ftrl": small_configs.central(**small_configs.FTRL),
  "central, least squares": small_configs.least_squares(),
  "federated": small_configs.federated(),
  "federated, local": small_configs.federated(**{"privacy": "local"}),
  "pate": small_configs.pate(),
  "distillation": small_configs.distillation(),
  "synthesis": small_configs.synthesis(method=small_configs.KERNEL),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _SMALL)
def test_a_guarantee_of_repeatable_noise_is_a_claim(name, tmp_path):
  config, data = _SMALL[name]
  config = dataclasses.replace(config, noise_seed=3)
  results = [loop.train(config, tmp_path / folder, data=data) for folder in "ab"]
  assert results[0]["params_sha256"] == results[1]["params_sha256"]
  assert results[0]["epsilon_kind"] == "claimed"
  assert REPEATED in results[0]["failed_assumptions"]
  assert "noise_seed=3" in " ".join(results[0]["privacy_statement"].split())
  assert not (tmp_path / "a" / "trade_off.csv").exists()


def test_a_plan_of_repeatable_noise_is_a_claim():
  for seed, wanted in ((None, "proved"), (3, "claimed")):
    config = _central(noise_seed=seed)
    phase, _ = dry_run.first_phase(config, experiment_of(config).data())
    assert dry_run.privacy_fields(phase)["epsilon_kind"] == wanted


# --- what is refused


@pytest.mark.parametrize(
  "changed",
  [
    (TrainConfig, {"privacy": "sgd"}),
    (FedConfig, {"privacy": "none"}),
    (RelevanceConfig, {"method": "no_dp"}),
    (AttackConfig, {"target.privacy": "sgd"}),
    (SecureConfig, {}),  # a sum has no noise
  ],
  ids=["central", "federated", "relevance", "attack", "secure"],
)
def test_nothing_would_read_the_noise_seed_of_a_run_without_noise(changed):
  make, changes = changed
  config = dataclasses.replace(fields.replace_all(make(), changes), noise_seed=3)
  with pytest.raises(UserError, match="noise_seed=3: "):
    experiment_of(config).check()


def test_every_kind_of_run_has_the_field():
  """Sweeps have it in their base."""
  without = {kind for kind in _CONFIGS if "noise_seed" not in choices.to_dict(kind())}
  assert {kind.__name__ for kind in without} == {"Sweep"}


@pytest.mark.parametrize("kind", [c for c in _CONFIGS if hasattr(c(), "release")])
def test_a_release_has_no_noise_seed(kind):
  config = dataclasses.replace(kind(), release=True, noise_seed=3)
  with pytest.raises(UserError) as caught:
    kinds.check(config)
  assert (caught.value.field, caught.value.value) == ("noise_seed", 3)
