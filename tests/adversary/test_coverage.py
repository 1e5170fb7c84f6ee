"""What is added without a game fails here on the day that it is added."""

import dataclasses

import optax
import pytest

from dpjax import sampling
from dpjax.auditing.games import registry
from dpjax.federated import Aggregator
from tests.refuses import refuses


@pytest.mark.parametrize("package", registry.PACKAGES)
def test_everything_has_a_game_or_a_reason(package):
  assert registry.PACKAGES[package].find()
  missing = ", ".join(registry.without_game(package))
  assert not missing, f"{missing}: no game, and no reason in NO_CLAIM, of auditing/games"
  assert registry.stale(package) == []
  assert all(registry.PACKAGES[package].no_claim.values())


class FakeMechanism:
  """Neither tested nor true."""

  def __call__(self, key, data):
    return data

  def event(self, neighboring_relation):
    return None


@dataclasses.dataclass(frozen=True)
class FakeSampler(sampling.PoissonSampler):
  """Everybody, always, at the price of a few."""


def fake_transform() -> optax.GradientTransformation:
  """Adds nothing."""
  return optax.identity()


def fake_algorithm(loss_fn, **options):
  """Sends everything."""


def fake_aggregator() -> Aggregator:
  """Adds nothing."""
  raise NotImplementedError


@pytest.mark.parametrize(
  ("package", "kind", "fake"),
  [
    ("mechanisms", registry.is_mechanism, FakeMechanism),
    ("samplers", registry.is_sampler, FakeSampler),
    ("transforms", registry.is_transform, fake_transform),
    ("federated", registry.is_federated, fake_algorithm),
    ("federated", registry.is_federated, fake_aggregator),
  ],
)
def test_a_new_one_is_found_and_has_no_game(package, kind, fake):
  assert kind(fake)
  view = registry.PACKAGES[package].find() | {fake.__name__: fake}
  assert registry.without_game(package, view) == [fake.__name__]


def test_a_new_class_in_a_module_is_found_without_being_exported(monkeypatch):
  from dpjax.mechanisms import response

  FakeMechanism.__module__ = response.__name__
  monkeypatch.setattr(response, "FakeMechanism", FakeMechanism, raising=False)
  assert registry.without_game("mechanisms") == ["FakeMechanism"]


def test_a_new_relevance_method_is_found(monkeypatch):
  monkeypatch.setitem(registry.relevance.pipeline.METHODS, "new", None)
  assert registry.without_game("relevance") == ["method:new"]


def test_names_are_chosen_or_refused_in_one_line():
  assert registry.subjects("mechanisms.Laplace") == (("mechanisms", "Laplace"),)
  assert len(registry.subjects("samplers")) == len(registry.PACKAGES["samplers"].covered)
  with refuses("only"):
    registry.subjects("Laplac")


def test_whatever_states_an_epsilon_has_a_row_or_a_reason():
  found = registry.stated_anywhere()
  assert len(found) > 50 and "dpjax.plan.Plan" in found
  rowless = {name for name in found if not registry.row_of(name)}
  assert rowless == set()
  assert set(registry.ELSEWHERE) <= set(found)


def test_a_class_with_an_epsilon_anywhere_in_the_library_is_found(monkeypatch):
  from dpjax.models import dense

  class Promises:
    """Of privacy, in a package where nobody looks for it."""

    def epsilon(self, delta):
      return delta

  Promises.__module__ = dense.__name__
  monkeypatch.setattr(dense, "Promises", Promises, raising=False)
  registry.stated_anywhere.cache_clear()
  name = f"{dense.__name__}.Promises"
  assert name in registry.stated_anywhere() and not registry.row_of(name)
  registry.stated_anywhere.cache_clear()
