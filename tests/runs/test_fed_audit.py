"""An audit inside a federated run: canary clients are trained on, bugs are caught."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import federated
from dpjax.auditing.scores import Scores
from dpjax.experiments.config import fields
from dpjax.experiments.kinds import audits
from dpjax.experiments.kinds.federated import audit, build
from dpjax.experiments.kinds.federated.config import ClientAudit, FedConfig
from dpjax.experiments.run import loop, writers
from dpjax.secure.distributed_noise import SkellamSum
from tests.refuses import refuses
from tests.runs.stops import stop_after
from tests.runs.test_federate import _NONE
from tests.runs.test_federate import _config as small_config

_AUDIT = {"audit": "canaries", "audit.kind": "direction", "audit.num_canaries": 20}


def _config(**overrides):
  return small_config(**{**_AUDIT, **overrides})


# Nearly all clients are canaries, in one round of all, by a model with a direction for each.
_MANY = {
  "partition.num_clients": 1000,
  "clients_per_round": 1000.0,
  "audit.num_canaries": 950,
  "num_rounds": 1,
  "eval_every": 1,
  "model.name": "mlp",
  "model.options": {"features": (128,)},
  "local.batch_size": None,
  "execution": "vmap",
  "privacy.noise_multiplier": 2.0,
  "privacy.delta": 1e-5,
}


def _planted(noise=1.0, clip=1.0):
  """`central` with another noise and clip norm than its plan says, which nobody notices."""
  honest = federated.central

  def broken(plan, key):
    numbers = {
      "l2_clip_norm": plan.l2_bound * clip,
      "noise_multiplier": plan.noise_multiplier * noise / clip,
    }
    return honest(dataclasses.replace(plan, **numbers), key)._replace(plan=plan)

  return broken


_BUGS = {
  "none": None,
  "noise halved": _planted(noise=0.5),
  "noise omitted": _planted(noise=1e-9),
  "clip removed": _planted(clip=1e6),
}


@pytest.mark.long
@pytest.mark.parametrize("bug", _BUGS)
def test_planted_bugs_are_caught_and_a_sound_run_is_not_refuted(bug, tmp_path, monkeypatch):
  """The Gaussian bound sees half the noise; the others are seen by any mechanism's bound."""
  if _BUGS[bug] is not None:
    monkeypatch.setattr(federated, "central", _BUGS[bug])
  subtle = bug in ("none", "noise halved")
  method = {"audit.method": "gdp" if subtle else "one_run"}
  result = loop.train(_config(**_MANY, **method), tmp_path / "run")
  found = result["audit"]
  assert 1.9 < result["epsilon"] < 2.1 and result["unit"] == "user"
  assert found["refuted"] == (bug != "none"), found["verdict"]
  if bug == "none":
    assert found["others"]["one_run"]["epsilon_lower"] > 0.1  # and is seen all the same
  else:
    assert result["epsilon_audited_lower"] > result["epsilon"]


# Each with what an adversary sees, and the relation of the claim.
_PROMISES = {
  "messages": ({"privacy": "local"}, audit.MESSAGES, "replace_one"),
  "messages, of both": (
    {"privacy": "both", "privacy.local_noise_multiplier": 8.0},
    audit.MESSAGES,
    "replace_one",
  ),
  "sums, of both": (
    {"privacy": "both", "privacy.local_noise_multiplier": 1.0},
    audit.SUMS,
    "add_or_remove_one",
  ),
  "shares": (
    {
      "privacy": "distributed",
      "secure_sum": {"name": "secagg", "bits": 16, "threshold": 0.7, "dropout_prob": 0.1},
    },
    audit.MEMBERS_SUMS,
    "replace_special",
  ),
}


def _hundredth(monkeypatch):
  """A hundredth of all noise is drawn, of clients and of the server, and nobody notices."""
  honest, share = federated.client_noise, SkellamSum.share

  def client_noise(client, *, l2_clip_norm, noise_multiplier):
    quiet = 0.01 * noise_multiplier
    return honest(client, l2_clip_norm=l2_clip_norm, noise_multiplier=quiet)

  def quiet_share(mechanism, rng, shares=1):
    variance = 1e-4 * mechanism.noise.share_variance
    noise = dataclasses.replace(mechanism.noise, share_variance=variance)
    return share(dataclasses.replace(mechanism, noise=noise), rng, shares)

  monkeypatch.setattr(federated, "client_noise", client_noise)
  monkeypatch.setattr(federated, "central", _planted(noise=0.01))
  monkeypatch.setattr(SkellamSum, "share", quiet_share)


def _audited(config):
  """(audit of result.json, the run), of its rounds alone."""
  run = build.assemble(config)
  state = run.algorithm.init(run.params, run.federation.num_clients)
  cohorts = run.algorithm.cohorts(run.federation, run.work, rng=run.random.sampler)
  for cohort in run.audited.mark(cohorts):
    state, _ = run.algorithm.round(state, cohort)
  epsilon = run.guarantee.curve(config.num_rounds)
  parts = {"loss_fn": run.task.loss(run.apply), "before": run.params}
  found = run.audited.facts(**parts, state=state, epsilon=epsilon)
  return found["audit"], run


_SLOW = ("messages", "sums, of both")  # the two that compile what another has compiled


@pytest.mark.cases(slow=[1, 3], long=...)
@pytest.mark.parametrize(
  "guarantee",
  [pytest.param(p, marks=pytest.mark.long) if p in _SLOW else p for p in _PROMISES],
)
def test_every_promise_is_refuted_at_a_hundredth_of_its_noise_and_not_at_all_of_it(
  guarantee, monkeypatch
):
  overrides, sees, relation = _PROMISES[guarantee]
  config = _config(
    **{
      "data.limit": 100,
      "partition.num_clients": 80,
      "clients_per_round": 80.0,
      "audit.num_canaries": 70,
      "audit.method": "one_run_two_sided",
      "num_rounds": 1,
      "eval_every": 1,
      "local.batch_size": None,
      "privacy.noise_multiplier": 4.0,
      **overrides,
    }
  )
  sound, run = _audited(config)
  assert not sound["refuted"] and sound["can_refute"], sound["verdict"]
  assert (sound["adversary_sees"], sound["neighboring_relation"]) == (sees, relation)
  assert sound["epsilon_claimed"] <= run.guarantee.curve(1)
  assert sound["ceiling"]["epsilon_lower"] > sound["epsilon_claimed"]
  _hundredth(monkeypatch)
  broken, _ = _audited(config)
  assert broken["refuted"] and broken["verdict"].startswith("REFUTED"), broken["verdict"]


@pytest.mark.long
def test_the_result_says_who_the_canaries_are_and_a_resumed_run_the_same(
  tmp_path, monkeypatch
):
  config = _config(num_rounds=4, noise_seed=0)
  whole = loop.train(config, tmp_path / "whole")
  found = whole["audit"]
  assert whole["epsilon_audited_lower"] == found["epsilon_audited_lower"]
  assert 0 <= whole["epsilon_audited_lower"] <= whole["epsilon"] and not found["refuted"]
  assert (found["method"], found["kind"], found["score"]) == (
    "one_run_two_sided",
    "direction",
    "rounds",
  )
  assert found["num_canaries"] == 20 and 5 <= found["num_included"] <= 15
  # The result names the declared number: the true one is a secret.
  federation = build.assemble(config).federation
  assert federation.num_clients == 30 - 20 + found["num_included"]
  assert whole["num_clients"] == 30
  assert "part of this run: 20 clients left" in found["note"]
  plans = [build.assemble(c).plan for c in (config, small_config(num_rounds=4))]
  assert plans[0] == plans[1]  # made for the federation as it was
  stop_after(monkeypatch, 3)
  with pytest.raises(loop.Interrupted):
    loop.train(config, tmp_path / "run")
  resumed = loop.train(config, tmp_path / "run")
  for name in ("params_sha256", "ledger", "audit", "test_accuracy"):
    assert resumed[name] == whole[name], name
  rows = [writers.read_metrics(tmp_path / name) for name in ("whole", "run")]
  assert rows[0] == rows[1]


_FTRL = {"privacy": "dp_ftrl", "audit.num_canaries": 12}
_FIXED = {"privacy.sampler": "fixed_size"}
_ROWS = {"audit.kind": "mislabelled", "audit.score": "final"}


_LOCAL = {"privacy": "local", "privacy.noise_multiplier": 4.0}
_BOTH = {**_LOCAL, "privacy": "both", "privacy.local_noise_multiplier": 8.0}
_SHARES = {
  "privacy": "distributed",  # its cohorts are of one size
  "secure_sum": {"name": "secagg", "bits": 16, "threshold": 0.7, "dropout_prob": 0.05},
}
_QUICK = [{"audit.score": "final"}, {**_ROWS, **_NONE}, {**_FIXED, **_ROWS}, _FIXED]
_LONG = [
  _FTRL,
  {"algorithm": "scaffold"},
  {"algorithm": "fed_nova", "algorithm.tau_eff": 2.0},
  {"algorithm": "mime_lite", "audit.score": "final"},
  {"privacy.clipping": "adaptive", "compression": "top_k"},
  {"server_optimizer.rule": "adam", "execution": "pmap"},
  {"release": True},
  {**_LOCAL, "client_state": "disk", "compression": "top_k"},
  {
    **_LOCAL,
    **_FIXED,
    "algorithm": "fed_prox",
    "secure_sum": {"name": "secagg", "simulated": False},
  },
  {**_LOCAL, **_ROWS},
  {**_BOTH, "audit.score": "final"},
  {**_SHARES, "secure_sum.simulated": False, "release": True},
  {**_SHARES, "algorithm": "fed_sgd", "local.epochs": 1},
]


@pytest.mark.cases(slow=[2], long=...)
@pytest.mark.parametrize(
  "overrides",
  [*_QUICK, *(pytest.param(overrides, marks=pytest.mark.long) for overrides in _LONG)],
  ids=lambda overrides: "-".join(map(str, overrides.values())),
)
def test_what_can_be_run_can_be_audited(overrides, tmp_path):
  short = {"num_rounds": 2, "server_optimizer.rule.momentum": 0.0}
  if "server_optimizer.rule" in overrides or overrides.get("algorithm") == "mime_lite":
    short.pop("server_optimizer.rule.momentum")
  if overrides.get("algorithm") == "mime_lite":
    short |= {"server_optimizer.rule": "sgd", "server_optimizer.rule.momentum": 0.0}
  result = loop.train(_config(**short, **overrides), tmp_path / "run")
  epsilon = np.inf if result["epsilon"] is None else result["epsilon"]
  assert 0 <= result["epsilon_audited_lower"] <= epsilon
  assert ("no epsilon is claimed" in result["audit"]["verdict"]) == (epsilon == np.inf)
  if "privacy.sampler" in overrides or overrides.get("privacy") == "distributed":
    shares = overrides.get("privacy") == "distributed"
    assert result["num_clients"] == 30
    assert result["neighboring_relation"] == (
      "replace_special" if shares else "replace_one"
    )


@pytest.mark.slow
def test_every_setting_of_an_audit_changes_it():
  """What is built, or what the same scores are said to show."""
  base = _config(**_ROWS)

  def built(config):
    """Coins, directions and rows, and whether every round is scored."""
    run = build.assemble(config)
    audited, rows = run.audited, run.federation.dataset
    if audited.canaries is None:
      return None
    scored = audited.watch(optax.identity()).init(jnp.zeros(3))
    drawn = jax.tree.leaves(
      (audited.canaries.included, audited.directions, rows.x[:40], rows.y)
    )
    return [np.asarray(leaf).tobytes() for leaf in drawn], len(jax.tree.leaves(scored))

  whole = built(base)
  assert built(small_config()) is None
  for path, value in (
    ("audit.num_canaries", 22), ("audit.kind", "random"), ("audit.kind", "direction")
  ):  # fmt: skip
    assert built(fields.replace(base, path, value)) != whole, path
  sends = fields.replace(base, "audit.kind", "direction")
  assert built(sends) != built(fields.replace(sends, "audit.score", "rounds"))
  rng, coins = np.random.default_rng(0), np.arange(400) < 200
  scores = Scores(rng.normal(1, 1, 200), rng.normal(0, 1, 200))
  plan = build.assemble(small_config()).plan
  rows = [
    audits.facts(
      ClientAudit(**changes),
      scores,
      score="rounds",
      claim=audits.AuditClaim.of_plan(plan),
      included=coins,
      delta=1e-5,
      epsilon=4.0,
      seed=0,
      note="",
    )["epsilon_audited_lower"]
    for changes in ({}, {"method": "one_run"}, {"confidence": 0.6})
  ]
  assert len(set(rows)) == 3


@pytest.mark.parametrize(
  ("overrides", "field"),
  [
    ({"audit.num_canaries": 1}, "audit.num_canaries"),
    ({"audit.num_canaries": 31}, "audit.num_canaries"),
    ({"audit.kind": "dirac"}, "audit.kind"),
    ({"audit.score": "final_model"}, "audit.score"),
    ({"audit.method": "one_runs"}, "audit.method"),
    ({"audit.confidence": 95.0}, "audit.confidence"),
    ({"audit.kind": "random"}, "audit.score"),
    ({"audit.kind": "mislabelled", "release": True}, "audit.kind"),
    (_NONE, "audit.kind"),
    (
      {"privacy.simulated_cohort": 20, "privacy.simulated_clients": 100},
      "audit",
    ),
    (
      {"algorithm": "mime_lite", "server_optimizer": FedConfig().server_optimizer},
      "audit.score",
    ),
    ({"audit": "none"}, "config.audit.kind"),
    (
      {"partition.num_clients": 1000, "audit.num_canaries": 900},
      "audit.num_canaries",
    ),
  ],
)
def test_what_cannot_be_audited_is_one_line_and_writes_nothing(tmp_path, overrides, field):
  with refuses(field) as caught:
    loop.train(_config(**overrides), tmp_path / "run")
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "run").exists()
