"""Every clipping rule keeps its bound; a new one is a class and a row of `RULES`."""

import dataclasses
import importlib
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import gradients, sampling
from dpjax.auditing.games import registry
from dpjax.auditing.games.game import play
from dpjax.experiments.config import choices, fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import DpSgd, TrainConfig
from dpjax.experiments.kinds.federated.config import Central
from dpjax.experiments.sweeps.sweep import Runs, Sweep
from dpjax.federated import central
from dpjax.gradients import Clip, ClipRule
from dpjax.gradients.clip import RULES
from tests import commands
from tests.refuses import refuses

_LENGTHS = np.concatenate([[0.0], np.geomspace(1e-38, 1e38, 400)]).astype(np.float32)
_PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(())}

_FILE = '''
import dataclasses

from dpjax.gradients import ClipRule


@dataclasses.dataclass(frozen=True)
class Psac(ClipRule):
  """Xia et al. 2023, arXiv:2212.00328: C / (norm + r / (norm + r))."""

  r: float = 0.1

  def top(self, bound):
    return min(bound, 2 * self.r**0.5 - self.r)  # the least denominator

  def factors(self, lengths, top, most):
    return top / (lengths + self.r / (lengths + self.r))
'''


@pytest.fixture
def psac(monkeypatch):
  module = types.ModuleType("dpjax.gradients.psac")
  monkeypatch.setitem(sys.modules, module.__name__, module)
  exec(_FILE, vars(module))
  monkeypatch.setitem(RULES, "psac", module.Psac)
  return module.Psac


def _longest(rule, bound):
  """What is left of the longest gradient, in units of what the rule promises."""
  top = rule.top(bound)
  assert 0 < top <= bound
  factors = np.asarray(rule.factors(jnp.asarray(_LENGTHS), top, 1.0), np.float64)
  assert np.isfinite(factors).all() and (factors >= 0).all() and (factors <= 1 + 1e-6).all()
  return (factors * _LENGTHS.astype(np.float64)).max() / top


def _keep_their_bound():
  for rule in RULES.values():
    for bound in (1e-25, 1e-3, 1.0, 1e5):
      assert _longest(rule(), bound) <= 1 + 1e-6


def test_p4_every_rule_keeps_its_bound():
  _keep_their_bound()


def test_every_row_is_a_public_name():
  for rule in RULES.values():
    package = importlib.import_module(rule.__module__.rpartition(".")[0])
    assert getattr(package, rule.__name__, None) is rule, (
      f"{package.__name__} must import {rule.__name__}"
    )


def test_a_rule_that_does_not_is_found(psac, monkeypatch):
  monkeypatch.setattr(psac, "factors", lambda self, lengths, top, most: lengths * 0 + most)
  with pytest.raises(AssertionError):
    _keep_their_bound()


def _loss(params, x):
  return 0.5 * (x @ params["w"] + params["b"]) ** 2


@pytest.mark.slow
def test_a_new_rule_is_known_by_its_name_everywhere(psac):
  _keep_their_bound()
  clip = Clip(0.5, "psac")
  assert clip.rule == psac() and clip.l2_bound == 0.5
  x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
  sums = [
    gradients.clipped_grad(_loss, l2_clip_norm=clip, method=method)(_PARAMS, x, True)
    for method in ("vmap", "ghost")
  ]
  grads = gradients.per_example_grads(_loss)(_PARAMS, x)[1].arrays
  norms = np.asarray(dpjax.trees.per_example_norms(grads), np.float64)
  factors = 0.5 / (norms + 0.1 / (norms + 0.1))
  expected = jax.tree.map(lambda g: np.tensordot(factors, np.asarray(g), 1), grads)
  for summed in sums:
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
      summed.total,
      expected,
    )


@pytest.mark.long
def test_plan_cohorts_and_games_take_a_new_rule_as_it_is(psac):
  numbers = dict(noise_multiplier=2.0, normalize_by=4, num_steps=3, delta=1e-5, unit="user")
  sampler = sampling.PoissonSampler(0.5, 9)
  plan = dpjax.Plan(sampler=sampler, l2_clip_norm=Clip(0.5, "psac"), **numbers)
  flat = dpjax.Plan(sampler=sampler, l2_clip_norm=0.5, **numbers)
  assert plan.event() == flat.event() and plan.mean_noise_std == flat.mean_noise_std
  tx, state = plan.transform(jax.random.key(0)), None
  state = tx.init(_PARAMS)
  mask = jnp.ones(2, bool)
  long = gradients.wrap_grads({"w": jnp.full((2, 3), 1e6), "b": jnp.full(2, 1e6)})
  assert all(
    np.isfinite(u).all() for u in jax.tree.leaves(tx.update(long, state, mask=mask)[0])
  )
  assert (
    central(plan, jax.random.key(0)).partial is not None
  )  # streamed, as flat clipping is
  games = registry.games("transforms", "clip_and_noise")
  (game,) = [one for one in games if one.case == "psac clipping"]
  assert not any(one.refuted for one in play(game, num_draws=400))


_LAUNCHED = (
  _FILE
  + """
from dpjax.gradients.clip import RULES
RULES["psac"] = Psac

from launch import app, train
app.run(train.main.main)
"""
)


@pytest.mark.long
def test_a_new_rule_is_launched_by_its_name_and_its_numbers(tmp_path):
  (tmp_path / "psac.py").write_text(_LAUNCHED)
  options = ["--config.num_steps=2", "--config.data.limit=60", "--workdir=run"]
  options += [
    f"--config={commands.ROOT}/configs/quickstart.py",
    "--config.privacy.clipping.r=.2",
  ]
  done = commands.run("psac", *options, "--config.privacy.clipping=psac", cwd=tmp_path)
  assert not done.returncode, done.stderr
  written = [
    json.loads((tmp_path / "run" / f"{n}.json").read_text()) for n in ("config", "result")
  ]
  assert written[0]["privacy"]["clipping"] == {"name": "psac", "r": 0.2}
  assert written[1]["clipping"] == "psac(r=0.2)" and written[1]["epsilon_kind"] == "proved"
  refused = commands.run("psac", *options, cwd=tmp_path)
  assert (
    refused.returncode == 2
    and "'flat' has no such field; it belongs to psac" in refused.stderr
  )


@dataclasses.dataclass(frozen=True)
class Halved(ClipRule):
  """A rule that no table names."""

  share: float = 0.5

  def factors(self, lengths, top, most):
    return self.share * jnp.minimum(most, top / lengths)


@pytest.mark.parametrize("kind", [DpSgd, Central])
def test_a_rule_of_a_users_module_is_named_by_its_path_and_proved(kind):
  path = f"{__name__}:Halved"
  privacy = fields.replace(kind(), "clipping", path)
  assert privacy.clipping == Halved()
  assert choices.to_dict(privacy)["clipping"] == {"name": path, "share": 0.5}
  assert fields.replace(privacy, "clipping.share", 0.25).clipping == Halved(0.25)
  sampler = sampling.PoissonSampler(0.5, 9)
  numbers = dict(noise_multiplier=2.0, normalize_by=4, num_steps=3, delta=1e-5)
  assert not dpjax.Plan(
    sampler=sampler, l2_clip_norm=Clip(1.0, Halved()), **numbers
  ).assumptions
  with refuses("config.clipping"):
    fields.replace(kind(), "clipping", f"{__name__}:Nothing")


def test_a_new_rule_is_in_configs_sweeps_and_the_walk_over_every_leaf(psac):
  config = TrainConfig(privacy=DpSgd(clipping={"name": "psac", "r": 0.3}))
  assert config.privacy.clipping == psac(0.3) == Central(clipping=psac(0.3)).clipping
  build.Central(config).check()
  named = [
    (name, fields.replace(config, "privacy.clipping", name)) for name in ("flat", "psac")
  ]
  points = Runs(named, Sweep(series="privacy.clipping")).points
  assert [one.facts["privacy.clipping"] for one in points] == ["flat", "psac(r=0.3)"]
  walked = {leaf.path: leaf.type.hint for leaf in choices.leaves(config)}
  assert walked["privacy.clipping.r"] is float
  assert "psac" in fields.choice_of(walked["privacy.clipping"]).table
  with refuses("config.privacy.clipping.r", error=dpjax.validate.UserError):
    fields.replace(config, "privacy.clipping.r", "x")


@dataclasses.dataclass(frozen=True)
class _OfTheLongest(ClipRule):
  """A plant: each factor follows from the longest gradient of the batch."""

  by: str

  def top(self, bound):
    return bound

  def factors(self, lengths, top, most):
    longest = lambda seen: np.float32(top / np.max(seen)) * np.ones_like(seen)
    if self.by in ("sequential", "expand_dims"):
      shape = jax.ShapeDtypeStruct(lengths.shape, lengths.dtype)
      return jax.pure_callback(longest, shape, lengths, vmap_method=self.by)
    own = jax.custom_batching.custom_vmap(lambda length: top / length)
    own.def_vmap(
      lambda _, batched, seen: (jnp.full_like(seen, top / seen.max()), batched[0])
    )
    return own(lengths)


@pytest.mark.parametrize("factors", [None, "no array", jnp.ones(()), jnp.ones(3)])
def test_a_rule_whose_factors_are_no_array_of_one_is_named(factors):
  class Rule(ClipRule):
    pass

  grad = lambda: gradients.clipped_grad(jnp.dot, l2_clip_norm=Clip(1.0, Rule()))
  with refuses("Rule.factors"):
    grad()(jnp.zeros(2), jnp.ones((3, 2)), True)
  Rule.factors = lambda self, lengths, top, most: factors
  with refuses("Rule.factors"):
    grad()(jnp.zeros(2), jnp.ones((3, 2)), True)


@pytest.mark.parametrize("by", ["expand_dims", "custom_vmap"])
def test_a_rule_that_sees_all_lengths_is_refused(by):
  """One record more moved the sum of eight by 6.9 clip norms, at an epsilon called proved."""
  x = jnp.float32([[1.0, 0.0]] * 8 + [[0.0, 100.0]])
  mask = jnp.ones(9, bool)
  grad = lambda how: gradients.clipped_grad(
    jnp.dot, l2_clip_norm=Clip(1.0, _OfTheLongest(how))
  )
  with refuses("_OfTheLongest.factors"):
    grad(by)(jnp.zeros(2), x, mask)
  # One length at a time, the longest is its own.
  total = grad("sequential")(jnp.zeros(2), x, mask).total
  np.testing.assert_allclose(total, [8.0, 1.0], rtol=1e-5)
