"""Registry of required games: one for everything that a table or a search of the code
finds.

Nothing is listed by hand: a package FINDS its subjects, and a subject without a game, or
without a reason why it claims nothing, is `uncovered` and fails the tests on the day that it
is added.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
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
from dpjax import validate
from dpjax.auditing.games import (
  accounting,
  federated,
  mechanisms,
  plans,
  relevance,
  samplers,
  secure,
  shares,
  training,
  transforms,
  vertical,
)
from dpjax.auditing.games.game import Game
from dpjax.validate import UserError


class Room(NamedTuple):
  """A kind of subject of games."""

  find: Callable[[], dict[str, Any]]  # name -> class or function
  play: Callable[[str, Any], list[Game]]
  covered: Mapping[str, Any]  # names that have games
  no_claim: Mapping[str, str]  # names that promise nothing, and why


def public(package: ModuleType) -> dict[str, Any]:
  """Every public class and function of a package, exported or not.

  >>> sorted(n for n in public(dpjax.mechanisms) if n.endswith("Vector"))
  ['SparseVector']
  """
  found: dict[str, Any] = {}
  for module in _modules(package):
    found |= _own(module)
  return found


def _modules(package: ModuleType) -> Iterator[ModuleType]:
  """The package and all modules in it."""
  infos = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
  for name in (package.__name__, *(info.name for info in infos)):
    yield importlib.import_module(name)


def _own(module: ModuleType) -> dict[str, Any]:
  own = lambda found: getattr(found, "__module__", "") == module.__name__
  return {n: o for n, o in vars(module).items() if own(o) and not n.startswith("_")}


def _concrete(found: object, *names: str) -> bool:
  """Whether this is a concrete class whose objects have these attributes."""
  if not inspect.isclass(found) or inspect.isabstract(found):
    return False
  own = {name for base in found.__mro__[:-1] for name in vars(base)}
  return own.issuperset(names)


def is_mechanism(found: object) -> bool:
  """Whether this is a class of callable objects with an event; base classes do not count."""
  return _concrete(found, "__call__", "event")


def is_sampler(found: object) -> bool:
  """Whether this is a class that draws and has an event; base classes do not count."""
  return _concrete(found, "draw", "event")


def _samplers() -> dict[str, Any]:
  """Returns every sampler that a config may name, by the name of its class."""
  return {kind.__name__: kind for kind in dpjax.sampling.SAMPLERS.values()}


def _returns(found: Any, *words: str) -> bool:
  if not inspect.isfunction(found):
    return False
  annotation = str(inspect.signature(found).return_annotation)
  return any(word in annotation for word in words)


def is_transform(found: object) -> bool:
  """Whether this is a function that makes an Optax transform."""
  return _returns(found, "GradientTransformation")


def is_federated(found: object) -> bool:
  """Whether this is a function that makes a federated algorithm, a client or an aggregator."""
  if not inspect.isfunction(found):
    return False
  first = next(iter(inspect.signature(found).parameters), "")
  return first == "loss_fn" or _returns(
    found, "Aggregator", "ClientAlgorithm", "FederatedAlgorithm"
  )


def states_epsilon(found: Any) -> bool:
  """Whether this returns an epsilon or an event, or is a class whose objects compute one."""
  if inspect.isclass(found):
    return any(_computes(found, name) for name in ("epsilon", "event"))
  if not inspect.isfunction(inspect.unwrap(found) if callable(found) else found):
    return False
  words = ("_epsilon", "epsilon_", "_event", "_events")
  return found.__name__ in ("epsilon", "event") or any(
    word in found.__name__ for word in words
  )


def _computes(found: Any, name: str) -> bool:
  """Whether a concrete class has a method or a property of that name, not a field."""
  if not _concrete(found, name):
    return False
  value = inspect.getattr_static(found, name)
  # A class there only names the kind of events, and computes none.
  return isinstance(value, property) or (callable(value) and not inspect.isclass(value))


def _only(kind: Callable[[Any], bool], found: Mapping[str, Any]) -> dict[str, Any]:
  return {name: one for name, one in sorted(found.items()) if kind(one)}


def _exported(package: ModuleType) -> dict[str, Any]:
  # `getattr` is needed: a package imports a name only on access (`_lazy`).
  return {n: getattr(package, n) for n in dir(package) if not n.startswith("_")}


def _accountants() -> dict[str, Any]:
  """Returns everything that adds up, amplifies or composes: accounting, and ledgers of
  mechanisms."""
  found = _only(states_epsilon, public(dpjax.accounting))
  found |= _only(lambda one: _concrete(one, "spend"), public(dpjax.mechanisms))
  return found | {"amplified_delta": dpjax.accounting.shuffle.amplified_delta}


ROOMS: dict[str, Room] = {
  "mechanisms": Room(
    lambda: _only(is_mechanism, public(dpjax.mechanisms)),
    lambda name, kind: mechanisms.GAMES[name](kind),
    mechanisms.GAMES,
    {},
  ),
  "samplers": Room(
    _samplers,
    lambda name, kind: samplers.games(kind),
    {name: kind for name, kind in _samplers().items() if "small" in vars(kind)},
    {},
  ),
  "transforms": Room(
    lambda: _only(is_transform, _exported(dpjax.transforms)),
    transforms.games,
    transforms.GAMES,
    {},
  ),
  "federated": Room(
    lambda: _only(is_federated, _exported(dpjax.federated)),
    federated.games,
    federated.GAMES,
    federated.NO_CLAIM,
  ),
  "secure": Room(
    lambda: _only(is_federated, _exported(dpjax.secure)),
    lambda name, kind: secure.GAMES[name](kind),
    secure.GAMES,
    secure.NO_CLAIM,
  ),
  "plans": Room(
    lambda: dict.fromkeys(plans.names()),
    lambda name, _: plans.GAMES[name](),
    plans.GAMES,
    plans.NO_CLAIM,
  ),
  "training": Room(
    lambda: _only(inspect.isfunction, _exported(dpjax.training)),
    lambda name, _: training.GAMES[name](),
    training.GAMES,
    training.NO_CLAIM,
  ),
  "vertical": Room(
    lambda: _only(states_epsilon, public(dpjax.secure.vertical)),
    lambda name, _: vertical.GAMES[name](),
    vertical.GAMES,
    vertical.NO_CLAIM,
  ),
  "shares": Room(
    lambda: _only(states_epsilon, public(dpjax.secure.mpc)),
    lambda name, _: shares.GAMES[name](),
    shares.GAMES,
    shares.NO_CLAIM,
  ),
  "accounting": Room(
    lambda: _accountants(),
    lambda name, _: accounting.GAMES[name](),
    accounting.GAMES,
    accounting.NO_CLAIM,
  ),
  "relevance": Room(
    lambda: dict.fromkeys(relevance.names()),
    lambda name, _: relevance.GAMES[name](),
    relevance.GAMES,
    relevance.NO_CLAIM,
  ),
}


def uncovered(room: str, found: Mapping[str, Any] | None = None) -> list[str]:
  """Subjects without a game and without a reason for having none.

  >>> uncovered("mechanisms")
  []
  """
  validate.one_of(ROOMS, room=room)
  known = ROOMS[room]
  names = known.find() if found is None else found
  return [
    name for name in names if name not in known.covered and name not in known.no_claim
  ]


def stale(room: str) -> list[str]:
  """Games and reasons without a subject, and subjects that have both."""
  known = ROOMS[room]
  found = ROOMS[room].find()
  gone = [name for name in (*known.covered, *known.no_claim) if name not in found]
  return gone + [name for name in known.covered if name in known.no_claim]


_WHOLE = "a whole plan: the rows of samplers, plans and training"
_BEFORE = "answers before anything runs, by the event of the sampler that runs: samplers"
_CLAIMED = "is only claimed, never proved: `launch.relevance --audit` attacks it"
# Names that state an epsilon and are no subject here: the rows that play them, or a reason.
ELSEWHERE: dict[str, str] = {
  "dpjax.plan.Plan": _WHOLE,
  "dpjax.accounting.epsilon.epsilon": "adds up an event; every game's claim comes from it",
  "dpjax.accounting.gdp.epsilon": "of Gaussian noise without sampling: mechanisms.Gaussian",
  "dpjax.solve.event": _BEFORE,
  "dpjax.solve.run_event": _BEFORE,
  "dpjax.solve.epsilon_of": _BEFORE,
  "dpjax.solve.epsilon_in_training": _BEFORE,
  "dpjax.federated.placement.local_event": "federated.client_noise",
  "dpjax.federated.placement.local_epsilon": "federated.client_noise",
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
  """Returns the full names of everything in the library that `states_epsilon`. Attacks are
  left out, since they state lower bounds.

  >>> "dpjax.mechanisms.additive.Laplace" in stated_anywhere()
  True
  """
  return frozenset(
    f"{module.__name__}.{name}"
    for module in _modules(dpjax)
    if not module.__name__.startswith(_ATTACKS)
    for name, found in _own(module).items()
    if states_epsilon(found)
  )


def row_of(full_name: str) -> str:
  """Returns the row that plays the object of this full name, or the reason for having none;
  "" where there is neither."""
  if full_name in ELSEWHERE:
    return ELSEWHERE[full_name]
  name = full_name.rpartition(".")[2]
  for room, known in ROOMS.items():
    found = known.find().get(name)
    if found is not None and f"{found.__module__}.{name}" == full_name:
      return f"{room}.{name}" if name in known.covered else known.no_claim.get(name, "")
  return ""


@functools.cache
def subjects(only: str = "") -> tuple[tuple[str, str], ...]:
  """Returns (kind, name) of everything that has a game; `only` is a kind, a name or
  kind.name.

  Raises:
    UserError: nothing is called that.

  >>> subjects("Laplace")
  (('mechanisms', 'Laplace'),)
  """
  every = [(room, name) for room, known in ROOMS.items() for name in known.covered]
  chosen = [
    (room, name) for room, name in every if only in ("", room, name, f"{room}.{name}")
  ]
  if not chosen:
    names = [*ROOMS, *(name for _, name in every)]
    validate.one_of(names, only=only)
    raise UserError("nothing is called that", field="only", value=only)
  return tuple(chosen)


def games(room: str, name: str) -> list[Game]:
  """The games of one subject, the strongest first."""
  return ROOMS[room].play(name, ROOMS[room].find().get(name))
