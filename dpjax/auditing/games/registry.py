"""Registry of games: every subject that makes a claim must have one.

Subjects are found in tables and by searches of the code, not listed by hand. A subject that has
neither a game nor a stated reason why it claims nothing (`without_game`) fails the tests on the day
that it is added.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import dpjax
import dpjax.accounting
import dpjax.federated
import dpjax.mechanisms
import dpjax.sampling
import dpjax.secure
import dpjax.secure.mpc
import dpjax.secure.vertical
import dpjax.training
import dpjax.transforms
import dpjax.zoo.recipes
from dpjax import validate
from dpjax.accounting import shuffle
from dpjax.auditing.games import (
  accounting,
  federated,
  mechanisms,
  plans,
  relevance,
  samplers,
  secure,
  shares,
  silos,
  training,
  transforms,
  vertical,
)
from dpjax.auditing.games.defined import defined_in, modules, public
from dpjax.auditing.games.game import Game
from dpjax.federated import silos as federated_silos
from dpjax.secure import linear_regression
from dpjax.validate import UserError


class Package(NamedTuple):
  """A kind of subjects of games: how they are found, and how they are played."""

  find: Callable[[], dict[str, Any]]  # name -> class or function
  covered: Mapping[str, Callable[..., list[Game]]]  # name -> function that makes its games
  no_claim: Mapping[str, str]  # names that guarantee nothing, and why
  takes_subject: bool = (
    True  # whether games are made from the class or function that is found
  )


def _concrete(candidate: object, *names: str) -> bool:
  """Returns whether this is a concrete class whose objects have these attributes."""
  if not inspect.isclass(candidate) or inspect.isabstract(candidate):
    return False
  defined = {name for base in candidate.__mro__[:-1] for name in vars(base)}
  return defined.issuperset(names)


def is_mechanism(candidate: object) -> bool:
  """Returns whether this is a class of callable objects with an event; base classes do not
  count."""
  return _concrete(candidate, "__call__", "event")


def is_sampler(candidate: object) -> bool:
  """Returns whether this is a class with `draw` and `event`; base classes do not count."""
  return _concrete(candidate, "draw", "event")


def _samplers() -> dict[str, Any]:
  """Returns every sampler of dpjax, whether a config may name it or not."""
  return _only(is_sampler, public(dpjax.sampling))


def _returns(candidate: Any, *words: str) -> bool:
  if not inspect.isfunction(candidate):
    return False
  annotation = str(inspect.signature(candidate).return_annotation)
  return any(re.search(rf"\b{word}(ExtraArgs)?\b", annotation) for word in words)


def is_transform(candidate: object) -> bool:
  """Returns whether this is a function that makes an Optax transform."""
  return _returns(candidate, "GradientTransformation")


def is_federated(candidate: object) -> bool:
  """Returns whether this function makes a federated algorithm, a client or an aggregator."""
  if not inspect.isfunction(candidate):
    return False
  first = next(iter(inspect.signature(candidate).parameters), "")
  return first == "loss_fn" or _returns(
    candidate, "Aggregator", "ClientAlgorithm", "FederatedAlgorithm"
  )


def states_epsilon(candidate: Any) -> bool:
  """Returns whether this computes an epsilon or an event, or is a class whose objects do."""
  if inspect.isclass(candidate):
    return any(_computes(candidate, name) for name in ("epsilon", "event"))
  if not inspect.isfunction(
    inspect.unwrap(candidate) if callable(candidate) else candidate
  ):
    return False
  words = ("_epsilon", "epsilon_", "_event", "_events")
  return candidate.__name__ in ("epsilon", "event") or any(
    word in candidate.__name__ for word in words
  )


def _computes(candidate: Any, name: str) -> bool:
  """Returns whether a concrete class has a method or a property of that name, not a field."""
  if not _concrete(candidate, name):
    return False
  value = inspect.getattr_static(candidate, name)
  # A class under that name only names the kind of events, and computes no event.
  return isinstance(value, property) or (callable(value) and not inspect.isclass(value))


def _only(kind: Callable[[Any], bool], candidates: Mapping[str, Any]) -> dict[str, Any]:
  return {
    name: candidate for name, candidate in sorted(candidates.items()) if kind(candidate)
  }


def _accountants() -> dict[str, Any]:
  """Returns budget ledgers, `amplified_delta`, and what states epsilons or events in accounting."""
  accountants = _only(states_epsilon, public(dpjax.accounting))
  accountants |= _only(
    lambda candidate: _concrete(candidate, "spend"), public(dpjax.mechanisms)
  )
  return accountants | {"amplified_delta": shuffle.amplified_delta}


PACKAGES: dict[str, Package] = {
  "mechanisms": Package(
    lambda: _only(is_mechanism, public(dpjax.mechanisms)),
    mechanisms.GAMES,
    {},
  ),
  "samplers": Package(
    _samplers,
    {name: samplers.games for name, kind in _samplers().items() if "small" in vars(kind)},
    {},
  ),
  "transforms": Package(
    lambda: _only(is_transform, public(dpjax.transforms)),
    transforms.GAMES,
    transforms.NO_CLAIM,
  ),
  "federated": Package(
    lambda: _only(is_federated, public(dpjax.federated)),
    federated.GAMES,
    federated.NO_CLAIM,
  ),
  "silos": Package(
    lambda: _only(states_epsilon, defined_in(federated_silos)),
    silos.GAMES,
    {},
  ),
  "secure": Package(
    lambda: _only(is_federated, public(dpjax.secure)),
    secure.GAMES,
    secure.NO_CLAIM,
  ),
  "plans": Package(
    lambda: dict.fromkeys(plans.names()),
    plans.GAMES,
    plans.NO_CLAIM,
    takes_subject=False,
  ),
  "training": Package(
    lambda: _only(inspect.isfunction, public(dpjax.training) | public(dpjax.zoo.recipes)),
    training.GAMES,
    training.NO_CLAIM,
    takes_subject=False,
  ),
  "vertical": Package(
    lambda: _only(
      states_epsilon, public(dpjax.secure.vertical) | defined_in(linear_regression)
    ),
    vertical.GAMES,
    vertical.NO_CLAIM,
    takes_subject=False,
  ),
  "shares": Package(
    lambda: _only(states_epsilon, public(dpjax.secure.mpc)),
    shares.GAMES,
    shares.NO_CLAIM,
    takes_subject=False,
  ),
  "accounting": Package(
    _accountants,
    accounting.GAMES,
    accounting.NO_CLAIM,
    takes_subject=False,
  ),
  "relevance": Package(
    lambda: dict.fromkeys(relevance.names()),
    relevance.GAMES,
    relevance.NO_CLAIM,
    takes_subject=False,
  ),
}


def without_game(package: str, exported: Mapping[str, Any] | None = None) -> list[str]:
  """Returns the subjects without a game and without a reason for having none.

  >>> without_game("mechanisms")
  []
  """
  validate.one_of(PACKAGES, package=package)
  known = PACKAGES[package]
  names = known.find() if exported is None else exported
  return [
    name for name in names if name not in known.covered and name not in known.no_claim
  ]


def stale(package: str) -> list[str]:
  """Returns names that have a game or a reason but no subject, or have both game and reason."""
  known = PACKAGES[package]
  exported = PACKAGES[package].find()
  gone = [name for name in (*known.covered, *known.no_claim) if name not in exported]
  return gone + [name for name in known.covered if name in known.no_claim]


_WHOLE = "a whole plan: the rows of samplers, plans and training"
_BEFORE = "answers before anything runs, by the event of the sampler that runs: samplers"
_CLAIMED = "is only claimed, never proved: `launch.relevance --audit` attacks it"
# Names that state an epsilon but are no subjects here -> the row that plays them, or a reason.
ELSEWHERE: dict[str, str] = {
  "dpjax.plan.Plan": _WHOLE,
  "dpjax.joint.JointPlan": "composes what has games of its own: accounting.Ledger",
  "dpjax.accounting.epsilon.epsilon": "adds up an event; every game's claim comes from it",
  "dpjax.accounting.gdp.epsilon": "of Gaussian noise without sampling: mechanisms.Gaussian",
  "dpjax.solve.event": _BEFORE,
  "dpjax.solve.run_event": _BEFORE,
  "dpjax.solve.epsilon_of": _BEFORE,
  "dpjax.solve.epsilon_in_training": _BEFORE,
  "dpjax.federated.aggregation.local_event": "federated.client_noise",
  "dpjax.federated.aggregation.local_epsilon": "federated.client_noise",
  "dpjax.secure.distributed_noise.SkellamSum": "secure.skellam_mean",
  "dpjax.mechanisms.stated.gaussian_event": "mechanisms.Gaussian",
  "dpjax.mechanisms.stated.laplace_event": "mechanisms.Laplace",
  "dpjax.mechanisms.stated.pure_event": "mechanisms.RandomizedResponse",
  "dpjax.relevance.feature_budget.local_epsilon": "relevance.features:laplace",
  "dpjax.relevance.paper.local_epsilon": _CLAIMED,
  "dpjax.relevance.rigorous.laplace_vector_event": "relevance.features:laplace_pld",
  "dpjax.relevance.rigorous.shuffled_epsilon": "accounting.amplified_delta",
  "dpjax.relevance.rigorous.local_epsilon_for": "accounting.amplified_delta",
}
_ATTACKS = (
  "dpjax.attacks",
  "dpjax.auditing",
  "dpjax.experiments.checks",
  "benchmarks",
)


@functools.cache
def stated_anywhere() -> frozenset[str]:
  """Returns the full names of all objects in the library for which `states_epsilon` holds.

  Attacks are left out, since they state lower bounds.

  >>> "dpjax.mechanisms.additive.Laplace" in stated_anywhere()
  True
  """
  return frozenset(
    f"{module.__name__}.{name}"
    for module in modules(dpjax)
    if not module.__name__.startswith(_ATTACKS)
    for name, value in defined_in(module).items()
    if states_epsilon(value)
  )


def row_of(full_name: str) -> str:
  """Returns the row that plays the object of this full name, or the reason for having none.

  Returns "" if there is neither.
  """
  if full_name in ELSEWHERE:
    return ELSEWHERE[full_name]
  name = full_name.rpartition(".")[2]
  for package, known in PACKAGES.items():
    subject = known.find().get(name)
    if subject is not None and f"{subject.__module__}.{name}" == full_name:
      return f"{package}.{name}" if name in known.covered else known.no_claim.get(name, "")
  return ""


@functools.cache
def subjects(only: str = "") -> tuple[tuple[str, str], ...]:
  """Returns (kind, name) of everything that has a game; `only` is a kind, a name or
  kind.name.

  Raises:
    UserError: nothing has that name.

  >>> subjects("Laplace")
  (('mechanisms', 'Laplace'),)
  """
  every = [(package, name) for package, known in PACKAGES.items() for name in known.covered]
  chosen = [
    (package, name)
    for package, name in every
    if only in ("", package, name, f"{package}.{name}")
  ]
  if not chosen:
    names = [*PACKAGES, *(name for _, name in every)]
    validate.one_of(names, only=only)
    raise UserError("nothing is called that", field="only", value=only)
  return tuple(chosen)


def games(package: str, name: str) -> list[Game]:
  """Returns the games of one subject, the strongest first."""
  known = PACKAGES[package]
  make = known.covered[name]
  return make(known.find()[name]) if known.takes_subject else make()
