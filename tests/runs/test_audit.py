"""An audit inside a run: canaries are trained on, the bound is reported, lies are caught."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import quickstart
from dpjax import auditing
from dpjax.auditing.gradient_canaries import sum_scores
from dpjax.auditing.lower_bounds import one_run_gaussian
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.run import loop
from dpjax.plan import Plan
from tests.refuses import refuses

# Full batches, Adam, and twice as many weights as a canary needs: it learns them by heart.
_MEMORISE = {
  "privacy.sampling_prob": 1.0, "num_steps": 60, "eval_every": 60, "grad_method": "auto",
  "model.name": "mlp", "model.options": {"features": (128,)}, "optimizer.rule": "adam",
  "optimizer.learning_rate": 0.01, "data.limit": 240, "audit.num_canaries": 200,
  "audit.kind": "mislabelled", "audit.score": "loss", "audit.method": "one_run",
}  # fmt: skip


def _config(**overrides):
  config = quickstart.get_config()
  small = {
    "grad_method": "vmap", "num_steps": 20, "eval_every": 20, "model.name": "linear",
    "model.options": {}, "audit": "canaries", "audit.num_canaries": 400,
  }  # fmt: skip
  return fields.replace_all(fields.replace_all(config, small), overrides)


@pytest.mark.long
def test_a_sound_run_is_not_refuted_and_its_canaries_are_in_the_data(tmp_path):
  config = _config()
  result = loop.train(config, tmp_path / "run")
  found = result["audit"]
  assert result["epsilon_audited_lower"] == found["epsilon_audited_lower"]
  assert 0 <= result["epsilon_audited_lower"] <= result["epsilon"] and not found["refuted"]
  assert (found["method"], found["confidence"], found["delta"]) == (
    "one_run_two_sided",
    0.95,
    1e-5,
  )
  assert 150 < found["num_included"] < 250 and found["num_canaries"] == 400
  assert "part of the training data" in found["note"]
  built = build.assemble(config)
  assert len(built.train) == 1437 - 400 + found["num_included"]
  # Neither the audit nor its number of canaries is part of the plan.
  for other in ({"audit": "none"}, {"audit.num_canaries": 1000}):
    assert built.plan == build.assemble(_config(**other)).plan
  # It names the declared number: the true one is a secret.
  statement = result["privacy_statement"].replace("\n", " ")
  assert "declared number of 1437 examples" in statement
  assert str(len(built.train)) not in statement


@pytest.mark.cases(long=["gradient"], slow=...)
@pytest.mark.parametrize("score", ["loss", "gradient"])
def test_p39_a_non_private_run_claims_nothing_and_its_canaries_are_found(tmp_path, score):
  """Plain gradient descent that memorises: the bound is far above any private claim."""
  overrides = {**_MEMORISE, "privacy": "sgd", "audit.score": score}
  result = loop.train(_config(**overrides), tmp_path / "run")
  found = result["audit"]
  assert result["epsilon"] is None and not found["refuted"]
  assert "no epsilon is claimed" in found["verdict"]
  assert "private" not in found["verdict"]
  assert found["claim_p_value"] is found["alarm_p_value"] is None
  least = {"loss": 1.5, "gradient": 0.5}[score]
  assert found["epsilon_audited_lower"] > least, found


_WHITE_BOX = {"audit.kind": "gradient", "audit.score": "sums"}


@pytest.mark.long
@pytest.mark.parametrize("grad_method", ["vmap", "auto"])
def test_white_box_canaries_are_as_good_as_ideal_ones_and_leave_the_model_alone(
  grad_method,
):
  """Everybody in every step: the sums are N(steps C, steps (z C)^2) where in, and around 0."""
  config = _config(
    **_WHITE_BOX, **{
      "privacy.sampling_prob": 1.0, "num_steps": 4, "grad_method": grad_method,
      "audit.method": "one_run_gaussian", "privacy.epsilon": 4.0,
    }
  )  # fmt: skip
  built = build.assemble(config)
  state, plan = built.algorithm.init(built.params), built.plan
  step = jax.jit(built.algorithm.step)
  for batch in plan.batches(built.train, rng=0):
    state, _ = step(state, batch)
  found = sum_scores(state, built.canaries)
  unit = plan.l2_bound / plan.normalize_by
  for part, mean in ((found.inside, 4 * unit), (found.outside, 0.0)):
    std = 2 * plan.noise_multiplier * unit  # of four steps
    assert abs(part.mean() - mean) < 5 * std / np.sqrt(part.size)
    assert abs(part.std() / std - 1) < 5 / np.sqrt(2 * part.size)
  bound = one_run_gaussian(found, delta=1e-5)
  assert 1.5 < bound <= plan.epsilon()
  assert set(state.params) == {"model", "canaries"}
  ordinary = built.train.subset(built.train.y < 10)
  test = built.task.evaluate(built.apply, state.params, built.test)
  assert len(ordinary) == 1437 - 400 and np.isfinite(test["loss"])


def _runs_as(monkeypatch, **changes):
  """Has every plan clip, draw and add noise as a changed one, and state its own epsilon."""
  for part in ("clipped_grad", "batches", "transform"):
    honest = getattr(Plan, part)
    monkeypatch.setattr(
      Plan,
      part,
      lambda plan, *args, _honest=honest, **options: _honest(
        dataclasses.replace(plan, **changes), *args, **options
      ),
    )


@pytest.mark.slow
def test_white_box_audit_of_dp_sgd_and_of_dp_sgd_without_its_noise(tmp_path, monkeypatch):
  overrides = {
    **_WHITE_BOX, "audit.method": "one_run_two_sided", "audit.num_canaries": 800,
    "privacy.epsilon": 1.0, "privacy.sampling_prob": 0.3,
    # A plan of hardly any noise refuses a capacity that a draw may exceed.
    "privacy.sampler.capacity": 1438,
  }  # fmt: skip
  result = loop.train(_config(**overrides), tmp_path / "sound")
  found = result["audit"]
  assert found["meaning"] == "valid for any (epsilon, delta)-DP training"
  assert 0 <= result["epsilon_audited_lower"] <= result["epsilon"] and not found["refuted"]
  _runs_as(monkeypatch, noise_multiplier=1e-3)
  broken = loop.train(_config(**overrides), tmp_path / "broken")
  assert broken["epsilon_audited_lower"] > 2 and broken["audit"]["refuted"]


@pytest.mark.cases(long=["0.1"], slow=...)
@pytest.mark.parametrize("factor", [1.0, pytest.param(0.1, marks=pytest.mark.long), 0.01])
def test_the_defaults_refute_a_run_with_a_part_of_its_noise(factor, monkeypatch):
  """By its bound at an epsilon that perfect scores exceed, else by all pairs of the claim."""
  for epsilon in (3.0, 6.0):
    config = _config(**{"audit.num_canaries": 400, "privacy.epsilon": epsilon})
    built = build.assemble(config)
    plan = dataclasses.replace(built.plan, normalize_by=40.0)  # of canaries alone
    wrong = dataclasses.replace(plan, noise_multiplier=factor * plan.noise_multiplier)
    scores = auditing.gradient_canaries(
      plan, num_canaries=400, seed=1, key=jax.random.key(2), transform=wrong.transform
    )
    found = auditing.audit(
      scores, delta=plan.delta, epsilon_claimed=plan.epsilon(), claim=plan.trade_off(),
      method="one_run_two_sided",
    )  # fmt: skip
    assert found.can_refute and found.refuted == (factor < 0.5), found.verdict
    assert (found.epsilon_lower > epsilon) == (factor < 0.5 and epsilon == 3)


def test_an_audit_that_can_refute_nothing_says_so_before_it_trains(capsys):
  build.assemble(_config(**{"audit.num_canaries": 12}))
  (line,) = [x for x in capsys.readouterr().err.splitlines() if "num_canaries" in x]
  assert "audit.num_canaries=12: perfect scores of so many would show epsilon >= " in line
  assert "cannot refute the claimed 3; use more" in line
  build.assemble(_config())
  assert "num_canaries" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_neither_clips_nor_adds_its_noise_is_refuted(tmp_path, monkeypatch):
  """The plan claims epsilon .5; the transform that runs is another one's."""
  _runs_as(monkeypatch, l2_clip_norm=1e6, noise_multiplier=1e-9)
  result = loop.train(_config(**_MEMORISE, **{"privacy.epsilon": 0.5}), tmp_path / "run")
  assert result["epsilon"] <= 0.5 < result["epsilon_audited_lower"]
  assert result["audit"]["refuted"] and "REFUTED" in result["audit"]["verdict"]


@pytest.mark.long
def test_replace_one_exchanges_records_and_keeps_the_size():
  config = _config(
    **{
      "privacy.sampler": "fixed_size",
      "privacy.neighboring_relation": "replace_one",
      "privacy.accountant": "rdp",
    }
  )
  assert len(build.assemble(config).train) == 1437


@pytest.mark.cases(long=[1, 8, 9, 10])
@pytest.mark.parametrize(
  ("overrides", "field"),
  [
    ({"audit.num_canaries": 1}, "audit.num_canaries"),
    ({"audit.num_canaries": 5000}, "audit.num_canaries"),
    ({"audit.kind": "dirac"}, "audit.kind"),
    ({"audit.score": "losses"}, "audit.score"),
    ({"audit.method": "one_runs"}, "audit.method"),
    ({"audit.confidence": 95.0}, "audit.confidence"),
    ({"audit.score": "loss"}, "audit.score"),
    (
      {"audit.kind": "mislabelled", "audit.score": "sums"},
      "audit.score",
    ),
    (
      {"audit.kind": "mislabelled", "audit.method": "one_run_gaussian"},
      "audit.method",
    ),
    (
      {**_WHITE_BOX, "audit.method": "one_run_gaussian"},
      "audit.method",
    ),
    ({"audit.method": "one_run_fdp_two_sided"}, "audit.method"),
    ({"audit.kind": "mislabelled", "release": True}, "audit.kind"),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, overrides, field):
  with refuses(field) as caught:
    loop.train(_config(**overrides), tmp_path / "run")
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "run").exists()
