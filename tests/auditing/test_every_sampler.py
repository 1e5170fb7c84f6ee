"""Every sampler under each of its relations: audited soundly, and found out when it cheats."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest

from dpjax import auditing, data, sampling
from dpjax.accounting.proved import NeighboringRelation
from dpjax.data import resident as resident_lib
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import (
  CanaryAudit,
  DpFtrl,
  DpSgd,
  Sgd,
  TrainConfig,
)
from dpjax.noise.correlated import Banded
from dpjax.plan import Plan
from dpjax.sampling import registry
from dpjax.sampling.registry import used_for
from tests.refuses import refuses

_N, _STEPS = 120, 6
_FIELDS = {
  "sampling_prob": 0.4, "turn_prob": 0.4, "capacity": _N + 1, "batch_size": 30,
  "num_examples": _N, "steps_per_pass": 3,
  "num_groups": 3, "num_bins": 3, "steps_apart": 2, "num_steps": _STEPS,
}  # fmt: skip


def _value(kind, field):
  """Of a field of a sampler: `_FIELDS`, or else that of the class's own small settings."""
  known = dict(kind.small[0] if kind.small else {}) | _FIELDS
  assert field in known, (
    f"{kind.__name__}: give its field {field!r} a value in {kind.__name__}.small, or in _FIELDS "
    f"of {__name__.replace('.', '/')}.py, by which it draws from {_N} examples in {_STEPS} steps"
  )
  return known[field]


def _every_sampler():
  """All of `dpjax.sampling`, found by what they can do, and every row of its registry."""
  named = inspect.getmembers(sampling, inspect.isclass)
  every = dict.fromkeys(
    [*(kind for _, kind in named), *(row.kind for row in registry.SCHEMES.values())]
  )
  kinds = [k for k in every if hasattr(k, "draw") and dataclasses.is_dataclass(k)]
  assert len(kinds) >= 9
  for kind in kinds:
    values = {field.name: _value(kind, field.name) for field in dataclasses.fields(kind)}
    if kind is sampling.TruncatedPoissonSampler:
      values["capacity"] = 30  # cuts most batches
    yield kind(**values)


_PAIRS = [
  pytest.param(sampler, relation, id=f"{type(sampler).__name__}-{relation}")
  for sampler in _every_sampler()
  for relation in sampler.proved_under
]
_JOINING = pytest.param(
  sampling.FixedSizeSampler(30, _N, size_is_public=False),
  "add_or_remove_one",
  id="FixedSizeSampler-add_or_remove_one",
)


def test_a_sampler_with_a_field_that_has_no_value_here_is_told_where_to_give_one():
  @dataclasses.dataclass(frozen=True)
  class OddSampler(sampling.PoissonSampler):
    oddity: float = 0.5

  with pytest.raises(
    AssertionError, match="'oddity' a value in OddSampler.small, or in _F"
  ):
    _value(OddSampler, "oddity")
  OddSampler.small = ({"sampling_prob": 0.5, "capacity": 5, "oddity": 0.1},)
  assert (_value(OddSampler, "oddity"), _value(OddSampler, "sampling_prob")) == (0.1, 0.4)


def _plan(sampler, relation, **changes):
  plan = Plan(
    **{
      "sampler": sampler,
      "noise_multiplier": 2.0,
      "l2_clip_norm": 1.0,
      "normalize_by": 30.0,
      "num_steps": _STEPS,
      "delta": 1e-5,
      "neighboring_relation": relation,
      **changes,
    }
  )
  if plan.sampler.can_overflow:
    plan = plan.fitted(_N)
  return plan


@pytest.mark.cases(quick=[10], slow=[9], long=...)
@pytest.mark.parametrize(("sampler", "relation"), [*_PAIRS, _JOINING])
def test_gradient_canaries_run_and_stay_below_the_proof(sampler, relation):
  plan = _plan(sampler, relation, slices=2)
  scores = auditing.gradient_canaries(plan, num_canaries=100, seed=1, key=jax.random.key(0))
  assert len(scores.inside) + len(scores.outside) == 100
  assert auditing.one_run(scores, delta=1e-5) <= plan.epsilon()
  silent = dataclasses.replace(plan, noise_multiplier=1e-3, slices=1)  # without its noise
  audited = auditing.gradient_canaries(
    plan, num_canaries=100, seed=1, key=jax.random.key(0), transform=silent.transform
  )
  assert audited.inside.mean() > audited.outside.mean() + 0.01
  if relation == NeighboringRelation.REPLACE_ONE:  # the farthest pair there is
    assert (
      np.abs(audited.inside.mean() + audited.outside.mean()) < 0.3 * audited.inside.mean()
    )
  else:
    assert np.abs(audited.outside).max() < 0.01  # a canary that is out adds nothing


@pytest.mark.cases(long=[11, 17, 19])
@pytest.mark.parametrize(("sampler", "relation"), _PAIRS)
def test_canaries_leave_what_the_relation_says_and_every_batch_can_be_drawn(
  sampler, relation
):
  train = data.from_arrays(
    np.random.default_rng(0).normal(size=(_N, 3)), np.arange(_N) % 2, num_classes=2
  )
  mixed, canaries = auditing.insert_canaries(
    train, num_canaries=60, seed=0, neighboring_relation=relation
  )
  out = int((~canaries.included).sum())
  empty = relation == NeighboringRelation.REPLACE_SPECIAL
  kept = _N - out if relation == NeighboringRelation.ADD_OR_REMOVE_ONE else _N
  assert len(mixed) == kept and (mixed.present is not None) == empty
  plan, full = _plan(sampler, relation), _plan(sampler, relation)
  resident = resident_lib.resident(mixed)
  taken = absent = 0
  for batch, whole in zip(plan.batches(resident, rng=3), full.batches(train, rng=3)):
    taken += int(batch.mask.sum())
    absent += int(whole.mask.sum()) - int(batch.mask.sum())
  assert taken > 0
  if empty:  # drawn, and masked: the others' places are those of the run with the record
    assert absent > 0


def test_an_empty_record_contributes_zero_and_moves_nobody():
  train = data.from_arrays(np.ones((_N, 2)), np.zeros(_N, int), num_classes=2)
  present = np.ones(_N, bool)
  present[::2] = False
  cut = sampling.TruncatedPoissonSampler(sampling_prob=0.4, capacity=30, num_examples=_N)
  plan = _plan(cut, "replace_special")
  holed = dataclasses.replace(train, present=present)
  for batch, whole in zip(plan.batches(holed, rng=0), plan.batches(train, rng=0)):
    assert batch.mask.shape == whole.mask.shape
    assert not (batch.mask & ~whole.mask).any() and batch.mask.sum() < whole.mask.sum()
  assert holed.subset(slice(0, 4)).present.tolist() == [False, True, False, True]
  with refuses("present"):
    dataclasses.replace(train, present=np.ones(3, bool))


def test_more_canaries_than_examples_is_one_line():
  plan = _plan(sampling.FixedSizeSampler(batch_size=30, num_examples=_N), "replace_one")
  with refuses("num_canaries", value=121):
    auditing.gradient_canaries(plan, num_canaries=121, seed=0, key=jax.random.key(0))
  groups = _plan(sampling.PoissonSampler(0.1, 500), "", l2_clip_norm={"a": 1.0})
  with refuses("l2_clip_norm"):
    auditing.gradient_canaries(groups, num_canaries=9, seed=0, key=jax.random.key(0))


_CONFIGS = [
  *((s, r, "dp_sgd") for s, r in [
    ("poisson", "add_or_remove_one"), ("poisson", "replace_special"),
    ("truncated_poisson", "replace_special"), ("fixed_size", "replace_one"),
    ("fixed_size", "add_or_remove_one"),
    ("shuffled", "replace_one"), ("shuffled", "replace_special"),
    ("with_replacement", "replace_one"), ("with_replacement", "add_or_remove_one"),
    ("k_out_of_t", "add_or_remove_one"),
  ]),
  *(
    (s, "add_or_remove_one", "sgd")
    for s in used_for("examples")
  ),
  *((s, r, "dp_ftrl") for s, rs in [
    ("cyclic", ("replace_special", "replace_one")),
    ("cyclic_poisson", ("add_or_remove_one", "replace_special")),
    ("balls_in_bins", tuple(NeighboringRelation)), ("min_sep", tuple(NeighboringRelation)),
  ] for r in rs),
]  # fmt: skip


def _privacy(sampler, relation, method):
  shared = {"sampling_prob": 0.25, "sampler": {"name": sampler}}
  if sampler in ("cyclic_poisson", "min_sep"):
    shared["sampler"]["steps_apart"] = 2
  if sampler == "k_out_of_t":
    shared["sampler"]["num_selected"] = 2
  if method == "sgd":
    return Sgd(**shared)
  shared |= {"epsilon": None, "neighboring_relation": str(relation)}
  if method == "dp_ftrl":
    bands = {} if "steps_apart" in shared["sampler"] else {"strategy": Banded(bands=2)}
    return DpFtrl(noise_multiplier=2.0, **shared, **bands)
  # Copies lose much at little noise, which takes seconds to account.
  return DpSgd(noise_multiplier=8.0 if sampler == "with_replacement" else 2.0, **shared)


@pytest.mark.cases(long=[0, 1, 2, 3, 5, 18, 19, 20, 22, 23, 24, 25, 26])
@pytest.mark.parametrize(("sampler", "relation", "method"), _CONFIGS)
def test_a_training_run_with_canaries_draws_all_of_its_batches(sampler, relation, method):
  train = data.from_arrays(
    np.random.default_rng(0).normal(size=(_N, 4)),
    np.arange(_N) % 3,
    num_classes=3,
    nominal_size=_N,
  )
  privacy = _privacy(sampler, relation, method)
  config = TrainConfig(
    privacy=privacy, num_steps=_STEPS, audit=CanaryAudit(num_canaries=60)
  )
  config.model.name, config.model.options = "linear", {}
  run = build.assemble(config, (train, train))
  batches = list(run.plan.batches(resident_lib.resident(run.train), rng=run.random.sampler))
  assert len(batches) == _STEPS and any(batch.mask.any() for batch in batches)
  assert run.canaries is not None and run.canaries.included.sum() < 60
