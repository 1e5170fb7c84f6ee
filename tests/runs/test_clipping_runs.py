"""Every way of clipping and every private optimizer as a run: facts, refusals, resume."""

import dataclasses
import json

import pytest

from dpjax.checks import noise_distributions
from dpjax.experiments.checks import of_config
from dpjax.experiments.config import fields
from dpjax.experiments.config.naming import naming
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.privacy import make_plan
from dpjax.experiments.run import loop, writers
from dpjax.gradients import Automatic
from dpjax.transforms import AdaptiveClipping, PerLayer
from tests.checks import second_accountant
from tests.refuses import refuses
from tests.runs import small_configs


def _config(**overrides):
  few = {"num_steps": 4, "eval_every": 4, "checkpoint_every": 2, "data.limit": 300}
  few |= {"privacy.epsilon": None, "privacy.noise_multiplier": 2.0}
  return fields.replace_all(small_configs.short(**few), overrides)


_RUNS = {
  "automatic": {"privacy.clipping": "automatic"},
  "adaptive, release": {"privacy.clipping": "adaptive", "release": True},
  "slack": {"privacy.clipping": "slack"},
  "scaled, release": {"privacy.scaling": "by_outputs", "release": True},
  "scaled, levels": {"privacy.scaling": "by_outputs", "privacy.noise_levels": [2.0, 1.0]},
  "noise by layer": {
    "privacy.clipping": "per_layer",
    "privacy.clipping.noise": "uniform",
    "model.name": "mlp",
    "model.options": {"features": (8,)},
  },
  "dp_adam": {"optimizer.rule": "dp_adam", "optimizer.learning_rate": 0.01},
  "dp_sgld": {"optimizer.rule": "dp_sgld", "optimizer.learning_rate": 1.0},
  "schedule, slices": {"privacy.clip_schedule": "cosine", "slices": 3},
}


@pytest.mark.cases(slow=[8], long=...)
@pytest.mark.parametrize("name", sorted(_RUNS))
def test_a_run_ends_with_true_facts(name, tmp_path):
  config = _config(**_RUNS[name])
  result = loop.train(config, tmp_path / "run")
  plan = make_plan(config, 300, build.assemble(config).params)
  assert result["epsilon"] == pytest.approx(plan.epsilon()) and result["num_steps"] == 4
  assert result["clipping"] == fields.get(config, "privacy.clipping")
  assert result["epsilon_kind"] == "proved"
  flat = make_plan(_config(), 300).epsilon()
  charged_more = name.startswith("adaptive")
  assert (result["epsilon"] > flat * 1.0001) == charged_more
  assert ("scaling" in result) == name.startswith("scaled")
  assert ("Scaled coordinates" in plan.statement()) == name.startswith("scaled")
  rows = writers.read_metrics(tmp_path / "run")
  changing = charged_more or name.startswith(("schedule", "slack"))
  assert all(("l2_clip_norm" in row) == changing for row in rows)
  assert ("final_l2_clip_norm" in result) == changing
  if name == "dp_sgld":  # h (n std)^2 / 2 with h = rate / n
    std = 2.0 * 0.5 / (0.2 * 300)
    assert result["sgld_temperature"] == pytest.approx(1.0 / 300 * (300 * std) ** 2 / 2)
  json.dumps(result, allow_nan=False)


@pytest.mark.cases(long=[7])
@pytest.mark.parametrize(
  ("overrides", "field"),
  [
    ({"privacy.clipping": "adaptiv"}, "config.privacy.clipping"),
    (
      {"privacy.clipping": {"name": "per_layer", "allocation": "x"}},
      "config.privacy.clipping.allocation",
    ),
    ({"privacy.clip_schedule": "x"}, "config.privacy.clip_schedule"),
    ({"privacy.clipping.noise": "uniform"}, "config.privacy.clipping.noise"),
    (
      {
        "privacy.clipping": PerLayer(noise="uniform"),
        "optimizer.rule": "dp_sgld",
      },
      "privacy.clipping.noise",
    ),
    ({"privacy": "sgd", "privacy.clipping": "automatic"}, "config.privacy.clipping"),
    ({"privacy": "sgd", "optimizer.rule": "dp_sgld"}, "optimizer.rule"),
    ({"optimizer.rule": "dp_adam", "privacy.clipping": "adaptive"}, "optimizer.rule"),
    ({"optimizer.rule": "dp_sgld", "privacy.clip_schedule": "linear"}, "optimizer.rule"),
    ({"slices": 0}, "slices"),
    ({"privacy.scaling": "by_output"}, "config.privacy.scaling"),
    (
      {"privacy.scaling": {"name": "by_outputs", "floor": 0.0}},
      "config.privacy.scaling.floor",
    ),
    ({"privacy.scaling": {"name": "by_outputs", "b2": 1.0}}, "config.privacy.scaling.b2"),
    ({"privacy.scaling.floor": 0.5}, "config.privacy.scaling.floor"),
    (
      {"privacy.scaling": "by_outputs", "privacy": "dp_ftrl"},
      "privacy.strategy",
    ),
    ({"privacy.scaling": "by_outputs", "slices": 2}, "slices"),
    ({"privacy.scaling": "by_outputs", "optimizer.rule": "dp_adam"}, "optimizer.rule"),
    ({"privacy.scaling": "by_outputs", "optimizer.rule": "dp_sgld"}, "optimizer.rule"),
    (
      {"privacy.scaling": "by_outputs", "privacy.clipping": "per_layer"},
      "privacy.clipping",
    ),
    (
      {"privacy.scaling": "by_outputs", "privacy": "sgd"},
      "config.privacy.scaling",
    ),
    (
      {
        "privacy.scaling": "by_outputs",
        "privacy": "least_squares",
        "model.name": "linear",
      },
      "config.privacy.scaling",
    ),
    ({"privacy.scaling": "by_outputs", "audit": "canaries"}, "audit.kind"),
    ({"privacy.clipping": "adaptive", "privacy.scaling": "by_outputs"}, "privacy.clipping"),
    (
      {"privacy.clipping": "automatic", "privacy.clip_schedule": "linear"},
      "privacy.clipping",
    ),
    ({"privacy.clipping": "adaptive", "slices": 2}, "slices"),
    ({"privacy.clipping": Automatic(gamma=0.0)}, "privacy.clipping.gamma"),
    (
      {"privacy.clip_schedule": {"name": "linear", "final": 0.0}},
      "privacy.clip_schedule.final",
    ),
  ],
)
def test_what_cannot_run_is_refused_in_one_line(overrides, field):
  with refuses(field) as caught:
    config = _config(**overrides)
    with naming(config):
      build.assemble(config)
  assert "\n" not in str(caught.value)


@pytest.mark.long
def test_p22_launch_check_sees_an_uncharged_count(monkeypatch):
  subject = of_config.subject(_config(**{"privacy.clipping": "adaptive"}))
  assert second_accountant.agrees(subject.plan)
  assert noise_distributions.noise_std(subject).passed
  monkeypatch.setattr(AdaptiveClipping, "combined_noise_multiplier", lambda self, z, n: z)
  # A plan keeps the epsilon that it has computed.
  assert not second_accountant.agrees(dataclasses.replace(subject.plan))
