"""Facts about an algorithm or an aggregator, stated once, beside its code.

Configs, runs, attacks, audits and `launch.list` read these facts. So a new algorithm is one file
with `@algorithm(...)` and one line in `dpjax/federated/algorithms/__init__.py`. Its game follows
from its facts: `played` holds what the game passes, and tests hold each fact to what it does.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from dpjax import _lazy
from dpjax.validate import UserError

_Make = TypeVar("_Make", bound=Callable[..., Any])
# Arguments that every algorithm is given.
_COMMON = ("aggregator", "map_clients", "key")


class RunNumbers(NamedTuple):
  """Public numbers of a run, for algorithms that need more than optimizers."""

  num_clients: int
  expected_cohort: float | None  # None without privacy: the realised size may be used
  client_learning_rate: float
  client_momentum: float


def nothing_more(run: RunNumbers) -> dict[str, Any]:
  """Returns no arguments, for algorithms that need only common arguments and optimizers."""
  del run
  return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmFacts:
  """Facts about one federated algorithm.

  Args:
    name: name of the algorithm's function, and its value in `--config.algorithm`.
    make: function `(loss_fn, *optimizers, aggregator=, map_clients=, key=, **options)`.
    client: what a client does, in words.
    server: what the server does with the mean, in words.
    source: paper of the algorithm.
    private_if: option that must be set for privacy, in addition to a private aggregator; "": none.
    options: numbers that a config sets, with their defaults; None: no config names the algorithm.
    optimizers: which of "client_tx" and "server_tx" `make` takes, in order.
    weighted: whether `make` takes `weighting`.
    local_steps: whether clients take local steps, so that the number of local epochs matters.
    keeps_state: whether clients keep state between rounds.
    wraps_clients: whether `make` takes `wrap` and `memory` (see `fed_avg`).
    one_difference: whether a message is one difference of parameters and nothing else.
    plain_client: whether clients train exactly as the clients of `fed_avg`.
    client_rule: rule of client optimizers that the algorithm is derived for; "": any rule.
    client_momentum: whether a client's SGD may have momentum.
    records: whether `make` takes `silos`, and all that a client sends and keeps follows from its
      steps, which a silo's noise makes private.
    personal: function (server's parameters, what a client keeps) -> the model that the client
      uses; None: it uses the server's.
    from_run: function from the numbers of a run to arguments of `make`.
    checks: option -> function of `dpjax.validate` that refuses a wrong value.
    played: options of the algorithm when `launch.audit` and tests run it, in addition to
      optimizers: at least those for which `make` has no default.
  """

  name: str
  make: Callable[..., Any]
  client: str
  server: str
  source: str
  private_if: str = ""
  options: Mapping[str, Any] | None = dataclasses.field(default_factory=dict)
  optimizers: tuple[str, ...] = ("client_tx", "server_tx")
  weighted: bool = True
  local_steps: bool = True
  keeps_state: bool = False
  wraps_clients: bool = False
  one_difference: bool = False
  plain_client: bool = False
  client_rule: str = ""
  client_momentum: bool = True
  records: bool = False
  personal: Callable[[Any, Any], Any] | None = None
  from_run: Callable[[RunNumbers], dict[str, Any]] = nothing_more
  checks: Mapping[str, Callable[..., None]] = dataclasses.field(default_factory=dict)
  played: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    parameters = [*inspect.signature(self.make).parameters.values()]
    places = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    own = places[1 + len(self.optimizers) :]  # after the loss and the optimizers
    own += [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    needed = {p.name for p in own if p.default is p.empty}
    missing = sorted(needed - {*_COMMON, *self.played})
    if missing:
      reason = f"has no {', '.join(missing)}, for which {self.name} has no default"
      hint = f"state a value in @algorithm(..., played={{{missing[0]!r}: ...}})"
      raise UserError(reason, field="played", value=dict(self.played), hint=hint)


def user_defined(name: str) -> AlgorithmFacts:
  """Returns the facts of any user-defined algorithm, about which nothing is known.

  Args:
    name: import path of the algorithm.
  """
  return AlgorithmFacts(
    name=name,
    make=nothing_more,
    client="",
    server="",
    source="",
    # The algorithm may keep client state, so a config may set `client_state`.
    keeps_state=True,
  )


_ALGORITHMS: dict[Callable[..., Any], AlgorithmFacts] = {}


def algorithm(**facts: Any) -> Callable[[_Make], _Make]:
  """Decorates an algorithm with its facts. The function itself is unchanged.

  Args:
    facts: fields of `AlgorithmFacts`, except `name` and `make`.

  >>> @algorithm(client="nothing", server="nothing", source="folklore", local_steps=False)
  ... def idle(loss_fn, client_tx, **common):
  ...   "Clients do nothing."
  >>> _ALGORITHMS.pop(idle).local_steps
  False
  """

  def state(make: _Make) -> _Make:
    _ALGORITHMS[make] = AlgorithmFacts(name=make.__name__, make=make, **facts)
    return make

  return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class AggregatorFacts:
  """Facts about one aggregator that is not private by itself.

  Args:
    name: value of `--config.aggregator` that selects the aggregator.
    make: function `(**options) -> federated.Aggregator`.
    source: paper of the aggregator.
    stands_up_to: number of arbitrary clients among n that it tolerates, in words.
    tolerates: function `(n, **options)` that returns this number.
    options: numbers that a config sets, with their defaults.
    weighted: whether weights of clients count.
    is_mean: whether the aggregator is a mean, which `central` or a secure sum may replace.
    no_claim: reason why the aggregator guarantees no epsilon, for `launch.audit`.
  """

  name: str
  make: Callable[..., Any]
  source: str
  stands_up_to: str
  tolerates: Callable[..., int]
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  weighted: bool = False
  is_mean: bool = False
  no_claim: str = "robust, and private by nobody's claim"


_AGGREGATORS: dict[Callable[..., Any], AggregatorFacts] = {}


def aggregator(*, name: str = "", **facts: Any) -> Callable[[_Make], _Make]:
  """Decorates an aggregator with its facts. The function itself is unchanged.

  Args:
    name: name in configs; "" for the function's name.
    facts: fields of `AggregatorFacts`, except `name` and `make`.

  >>> @aggregator(source="folklore", stands_up_to="nobody", tolerates=lambda n: 0)
  ... def first_message():
  ...   "The first message."
  >>> _AGGREGATORS.pop(first_message).name
  'first_message'
  """

  def state(make: _Make) -> _Make:
    _AGGREGATORS[make] = AggregatorFacts(name=name or make.__name__, make=make, **facts)
    return make

  return state


def minority(n: int) -> int:
  """Returns the largest integer below n / 2.

  >>> minority(9), minority(10)
  (4, 4)
  """
  return (n - 1) // 2


def of_package(package: types.ModuleType, facts: Mapping[Any, Any]) -> list[Any]:
  """Returns the facts of the functions in a package's list, in the order of the list. Functions
  without facts are left out.

  Args:
    package: package whose names `dpjax._lazy` lists.
    facts: facts by function."""
  # The decorators run when a module is imported, so all modules are imported.
  for module, _ in _lazy.public_names(package.__name__).values():
    importlib.import_module(module)
  functions = [getattr(package, name) for name in _lazy.public_names(package.__name__)]
  return [facts[make] for make in functions if make in facts]


def algorithms() -> dict[str, AlgorithmFacts]:
  """Returns the facts of every algorithm that `dpjax.federated.algorithms` lists, by name."""
  package = importlib.import_module("dpjax.federated.algorithms")
  return {row.name: row for row in of_package(package, _ALGORITHMS)}


def aggregators() -> dict[str, AggregatorFacts]:
  """Returns the facts of every aggregator that `dpjax.federated.aggregators` lists, by name."""
  package = importlib.import_module("dpjax.federated.aggregators")
  return {row.name: row for row in of_package(package, _AGGREGATORS)}
