"""A secure sum in a run of `launch.federate`: one field, told where it is reported."""

import itertools

import jax
import pytest

from configs.fed import quickstart
from dpjax import accounting
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.federated import build, distributed
from dpjax.experiments.kinds.federated.secure_sums import in_words
from dpjax.experiments.run import loop, run_keys, writers
from dpjax.secure import sums
from tests.refuses import refuses

_SMALL = {
  "privacy": "none",
  "privacy.delta": 1e-5,
  "num_rounds": 3,
  "partition.num_clients": 8,
  "clients_per_round": 7.0,
  "local.epochs": 1,
  "data.limit": 80,
}


def _config(**changes):
  return fields.replace_all(fields.replace_all(quickstart.get_config(), _SMALL), changes)


@pytest.mark.slow
def test_a_simulated_sum_says_what_it_is(tmp_path):
  result = loop.train(_config(secure_sum="secagg"), tmp_path / "secure")
  assert result["secure_sum"]["protocol"] == "secagg" and result["secure_sum"]["simulated"]
  assert "SIMULATED" in in_words(result)
  assert result["secure_sum"]["min_survivors"] == 4


@pytest.mark.slow
def test_a_protocol_runs_in_every_round_where_it_is_asked_to(tmp_path, monkeypatch):
  calls, made = [], sums.AdditiveServers.sum
  spied = lambda self, *args: (calls.append(1), made(self, *args))[1]
  monkeypatch.setattr(sums.AdditiveServers, "sum", spied)
  chosen = {"name": "additive_servers", "simulated": False, "dropout_prob": 0.2}
  result = loop.train(_config(secure_sum=chosen), tmp_path)
  assert len(calls) == 3 and "its protocol ran" in in_words(result)


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"aggregator": "median"}, "aggregator"),
    ({"compression": "quantize"}, "compression"),
    ({"weighting": "examples"}, "weighting"),
    ({"privacy": "central"}, "privacy"),
    ({"secure_sum.simulated": False, "execution": "pmap"}, "execution"),
    ({"secure_sum.bits": 64}, "config.secure_sum.bits"),
    ({"secure_sum.threshold": 0.0}, "config.secure_sum.threshold"),
    ({"secure_sum.dropout_prob": 1.0}, "config.secure_sum.dropout_prob"),
    ({"secure_sum.largest_value": 0.0}, "config.secure_sum.largest_value"),
    ({"clients_per_round": 1.0}, "clients_per_round"),
  ],
)
def test_what_does_not_go_together_is_one_line(changes, field):
  with refuses(field) as caught:
    build.check(_config(**{"secure_sum": "additive_servers", **changes}))
  assert "\n" not in str(caught.value)


def test_a_committee_is_drawn_from_the_clients_of_a_round():
  chosen = {"name": "committee", "num_members": 4, "colluding": 1, "simulated": False}
  config = _config(secure_sum=chosen)
  protocol = config.secure_sum.protocol(config.clients_per_round)
  # No smaller cohort than the committee is summed.
  assert protocol == sums.Committee(num_members=4, colluding=1, min_survivors=4)
  build.check(config)
  chosen = {**chosen, "num_members": 8}
  with refuses("secure_sum.num_members", value=8):
    build.check(_config(secure_sum=chosen))


def test_what_only_a_secure_sum_has_is_no_field_without_one():
  with refuses("config.secure_sum.bits"):
    fields.replace(_config(), "secure_sum.bits", 16)


def test_rounds_with_too_few_survivors_are_charged_and_change_nothing(tmp_path):
  """All seven clients must stay, and half of the rounds lose one."""
  config = _config(
    secure_sum={"name": "additive_servers", "threshold": 1.0, "dropout_prob": 0.1},
    num_rounds=8,
    eval_every=1,
    **{"privacy.sampler": "fixed_size"},
  )
  result = loop.train(config, tmp_path / "run")
  assert result["num_steps"] == 8
  rows = writers.read_metrics(tmp_path / "run")
  refused = [bool(row["not_private/rounds_refused"]) for row in rows]
  moved = [a["test_loss"] != b["test_loss"] for a, b in itertools.pairwise(rows)]
  assert moved == [not was for was in refused[1:]] and True in moved and False in moved


# --- noise inside the sum


_PRIVATE = {
  "privacy": "distributed",
  "privacy.epsilon": None,
  "privacy.noise_multiplier": 1.0,
  "privacy.delta": 1e-3,
  "secure_sum": {"name": "secagg", "bits": 16, "threshold": 0.5},
}


@pytest.mark.slow
def test_noise_in_shares_is_promised_charged_and_told(tmp_path):
  result = loop.train(_config(**_PRIVATE), tmp_path / "run")
  run = build.assemble(_config(**_PRIVATE))
  assert result["epsilon_kind"] == "proved" and result["accountant"] == "rdp"
  assert result["neighboring_relation"] == "replace_special" and result["unit"] == "user"
  charges = accounting.Ledger.from_json(result["ledger"])
  assert charges.num_steps == 3 and charges.charges[0].event == run.mechanism.event
  expected = accounting.epsilon(
    accounting.compose(run.mechanism.event, 3),
    delta=1e-3,
    neighboring_relation="replace_special",
    accountant="rdp",
  )
  assert result["epsilon"] == pytest.approx(expected)
  assert result["method"] == "ddp_fed_avg" and result["noise_multiplier"] == pytest.approx(
    1
  )
  words = " ".join(result["privacy_statement"].split())
  assert "SIMULATED SECURE SUM" in words and "at least 4 of 7 clients" in words
  assert "sampling amplifies nothing" in words and "Skellam noise" in words


def test_noise_is_calibrated_to_the_epsilon_that_was_asked_for():
  changes = {**_PRIVATE, "privacy.epsilon": 5.0, "privacy.noise_multiplier": None}
  run = build.assemble(_config(**changes))
  assert 4.9 < run.guarantee.curve(3) <= 5.0


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"secure_sum": "none"}, "privacy"),
    ({"secure_sum": "bfv"}, "secure_sum"),
    (
      {"secure_sum": {"name": "secagg_plus", "corrupt": 0.9, "dropout_prob": 0.5}},
      "secure_sum.corrupt",
    ),
    ({"privacy.sampler": "poisson"}, "config.privacy.sampler"),
    ({"algorithm": "scaffold"}, "algorithm"),
    ({"secure_sum.largest_value": 2.0}, "secure_sum.largest_value"),
    ({"privacy.accountant": "pld"}, "config.privacy.accountant"),
    ({"privacy.clipping": "automatic"}, "config.privacy.clipping"),
    ({"privacy.epsilon": 5.0}, "privacy.noise_multiplier"),
  ],
)
def test_what_noise_in_shares_does_not_cover_is_refused(changes, field):
  with refuses(field) as caught:
    build.check(_config(**{**_PRIVATE, **changes}))
  assert "\n" not in str(caught.value)


def test_a_grid_that_is_too_coarse_is_told_by_its_bits():
  changes = {
    "secure_sum.bits": 8,
    "privacy.epsilon": 0.001,
    "privacy.noise_multiplier": None,
  }
  with refuses("secure_sum.bits", value=8):
    build.assemble(_config(**{**_PRIVATE, **changes}))


def test_a_release_says_where_its_seeds_are_from():
  run = build.assemble(_config(**{**_PRIVATE, "release": True}))
  words = " ".join(run.guarantee.statement(3).split())
  assert "256 bits of the operating system" in words and "Philox" in words
  assert distributed.seed_of(run_keys.draw(0, release=True).noise).bit_length() > 200
  assert distributed.seed_of(run_keys.draw(0, release=True).noise) != distributed.seed_of(
    run.random.noise
  )


def test_a_protocol_of_several_processes_is_refused_before_it_begins(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  build.check(_config(secure_sum="secagg"))
  with refuses("secure_sum.simulated", value=False):
    build.check(_config(secure_sum={"name": "secagg", "simulated": False}))
